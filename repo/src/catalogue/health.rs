//! The health of VBDs, VDIs and repositories, and since when each is as it is.
//!
//! The health of an object is computed at each read from its row and from the last observation of its process or
//! storage ([`Tx::see_vbd`], [`Tx::see_sr`]), so that it never contradicts the rest of the object. Only the writer's
//! thread notes changes: a change of health is an event of the object, once. Since when an object is not healthy is
//! kept in the catalogue, for a daemon that is restarted.

use std::collections::{HashMap, HashSet};
use std::sync::{Mutex, MutexGuard, PoisonError};

use api::health::{self, DiskFacts, Seen, SrFacts, VdiFacts};
use api::{Change, Code, Health, HealthState, Mode, ObjectKind, Problem, Requester, Sr, Vbd, Vdi, VdiState};
use jiff::Timestamp;
use rusqlite::Connection;
use uuid::Uuid;

use super::row::Id;
use super::{Tx, View, meta};

/// Where the catalogue keeps since when objects are not healthy.
const META: &str = "health";

/// Facts about health that are not in the rows.
#[derive(Debug, Default)]
pub struct HealthBoard(Mutex<Known>);

#[derive(Debug, Default)]
struct Known {
    /// The last observation of the processes of VBDs, if there is anything to report.
    vbds: HashMap<Uuid, Seen>,
    /// Repositories whose storage does not respond.
    silent: HashSet<Uuid>,
    /// The health that a repository passes on to its disks, for repositories whose storage is missing or does not
    /// respond.
    conditions: HashMap<Uuid, Health>,
    /// The objects that are not healthy, and since when.
    since: HashMap<Uuid, (HealthState, Timestamp)>,
}

impl HealthBoard {
    /// With what an earlier daemon has recorded. A record that cannot be read only costs the times in it.
    pub fn load(connection: &Connection) -> HealthBoard {
        let text = meta(connection, META).ok().flatten().unwrap_or_default();
        let since = serde_json::from_str(&text).unwrap_or_default();
        HealthBoard(Mutex::new(Known { since, ..Known::default() }))
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// `sr` is the repository of its VDI.
    pub(super) fn of_vbd(&self, vbd: &Vbd, vdi: VdiState, sr: Option<Uuid>) -> Health {
        let (uuid, vdi_name) = (vbd.uuid.to_string(), vbd.vdi.to_string());
        let known = self.known();
        known.dated(
            vbd.uuid,
            health::of_disk(&DiskFacts {
                name: uuid.get(..8).unwrap_or_default(),
                vdi_name: vdi_name.get(..8).unwrap_or_default(),
                supervised: true,
                state: vbd.state,
                vdi,
                problem: vbd.problem.as_ref(),
                waits_for_space: vbd.waits_for_space,
                pid: vbd.pid,
                seen: known.vbds.get(&vbd.uuid).copied().unwrap_or_default(),
                repository: sr.and_then(|sr| known.conditions.get(&sr)),
            }),
        )
    }

    /// `users` is the health of the VBDs that use it.
    pub(super) fn of_vdi<'a>(&self, vdi: &Vdi, users: impl IntoIterator<Item = &'a Health>) -> Health {
        let (known, uuid) = (self.known(), vdi.uuid.to_string());
        let facts = VdiFacts {
            name: uuid.get(..8).unwrap_or_default(),
            state: vdi.state,
            file: &vdi.file,
            repository: known.conditions.get(&vdi.sr),
        };
        known.dated(vdi.uuid, health::of_vdi(&facts, users))
    }

    pub(super) fn of_sr(&self, sr: &Sr) -> Health {
        let known = self.known();
        let read_only = sr.is_read_only();
        known.dated(
            sr.uuid,
            health::of_sr(&SrFacts {
                state: sr.state,
                read_only: read_only || matches!(sr.source, api::SrSource::Iso { .. }),
                space: sr.space.as_ref(),
                problem: sr.problem.as_ref(),
                silent: known.silent.contains(&sr.uuid),
            }),
        )
    }

    /// Notes the health that an object has now. Returns the one that it had, if that was another one.
    fn note(&self, uuid: Uuid, state: HealthState) -> Option<HealthState> {
        let mut known = self.known();
        let before = known.since.get(&uuid).map_or(HealthState::Healthy, |(state, _)| *state);
        match state {
            _ if state == before => return None,
            HealthState::Healthy => drop(known.since.remove(&uuid)),
            _ => drop(known.since.insert(uuid, (state, Timestamp::now()))),
        }
        Some(before)
    }

    /// Notes what the disks of a repository have from it now. Returns whether that was something else.
    pub(super) fn note_condition(&self, sr: &Sr) -> bool {
        let now = health::of_contents(sr.name.as_str(), &sr.health);
        let conditions = &mut self.known().conditions;
        match now {
            Some(now) => conditions.insert(sr.uuid, now.clone()) != Some(now),
            None => conditions.remove(&sr.uuid).is_some(),
        }
    }

    /// Forgets what was seen of the process of a VBD: it has ended, or another one serves.
    pub(super) fn forget_process(&self, vbd: Uuid) {
        self.known().vbds.remove(&vbd);
    }

    fn forget(&self, uuid: Uuid) -> bool {
        let mut known = self.known();
        known.vbds.remove(&uuid);
        known.silent.remove(&uuid);
        known.conditions.remove(&uuid);
        known.since.remove(&uuid).is_some()
    }
}

impl Known {
    /// With the time since when the object is in that state.
    fn dated(&self, uuid: Uuid, health: Health) -> Health {
        let known = self.since.get(&uuid).filter(|(state, _)| *state == health.state).map(|(_, since)| *since);
        let since = match health.state {
            HealthState::Healthy => None,
            // Not noted yet: it begins now.
            _ => Some(known.unwrap_or_else(Timestamp::now)),
        };
        Health { since, ..health }
    }
}

impl Tx<'_> {
    /// Records what was seen of the process of a VBD. There is an event if that changes its health.
    pub fn see_vbd(&mut self, uuid: Uuid, see: impl FnOnce(&mut Seen)) -> Result<(), Problem> {
        let Some(before) = self.find_vbd(uuid)? else { return Ok(()) };
        {
            let mut known = self.event_bus.health().known();
            let mut seen = known.vbds.get(&uuid).copied().unwrap_or_default();
            see(&mut seen);
            match seen == Seen::default() {
                true => drop(known.vbds.remove(&uuid)),
                false => drop(known.vbds.insert(uuid, seen)),
            }
        }
        let now = self.find_vbd(uuid)?.map(|vbd| vbd.health);
        if now.is_some_and(|now| now.state != before.health.state || now.reason != before.health.reason) {
            self.touch(ObjectKind::Vbd, uuid, Change::Changed);
        }
        Ok(())
    }

    /// Records whether the storage of a repository does not respond. There is an event if that changes its health.
    pub fn see_sr(&mut self, uuid: Uuid, silent: bool) -> Result<(), Problem> {
        let Some(before) = self.find_sr(uuid)? else { return Ok(()) };
        match silent {
            true => self.event_bus.health().known().silent.insert(uuid),
            false => self.event_bus.health().known().silent.remove(&uuid),
        };
        if self.find_sr(uuid)?.is_some_and(|now| now.health.state != before.health.state) {
            self.touch(ObjectKind::Sr, uuid, Change::Changed);
        }
        Ok(())
    }

    /// Notes the health of all objects that this change has touched, and touches those whose health follows from
    /// theirs: a VDI from its VBDs, and they from it.
    pub(super) fn note_health(&mut self) -> Result<(), Problem> {
        let board = self.view.event_bus.health();
        let touched: HashMap<Uuid, (ObjectKind, Change)> =
            self.touched_objects().map(|(kind, uuid, change)| (uuid, (kind, change))).collect();
        let mut is_other = false;
        let (mut vdis, mut follow) = (HashSet::new(), Vec::new());
        for (uuid, (kind, change)) in &touched {
            let (uuid, change) = (*uuid, *change);
            match kind {
                _ if change == Change::Removed => is_other |= board.forget(uuid),
                ObjectKind::Sr => {
                    let Some(sr) = self.find_sr(uuid)? else { continue };
                    is_other |= board.note(uuid, sr.health.state).is_some();
                    if board.note_condition(&sr) {
                        vdis.extend(self.vdis(Some(uuid))?.into_iter().map(|vdi| vdi.uuid));
                    }
                }
                ObjectKind::Vdi => drop(vdis.insert(uuid)),
                ObjectKind::Vbd => drop(self.find_vbd(uuid)?.map(|vbd| vdis.insert(vbd.vdi))),
                ObjectKind::Host | ObjectKind::Vm | ObjectKind::Task => {}
            }
        }
        for vdi in vdis {
            let Some(vdi) = self.find_vdi(vdi)? else { continue };
            for vbd in self.vbds(None, Some(vdi.uuid))? {
                let Some(before) = board.note(vbd.uuid, vbd.health.state) else { continue };
                is_other = true;
                follow.push((ObjectKind::Vbd, vbd.uuid));
                if [before, vbd.health.state].contains(&HealthState::Stuck) {
                    self.note_waiting_task(vdi.uuid)?;
                }
            }
            if board.note(vdi.uuid, vdi.health.state).is_some() {
                is_other = true;
                follow.push((ObjectKind::Vdi, vdi.uuid));
            }
        }
        // This change follows from others, and is not the requester's.
        self.requester = Requester::Daemon;
        follow.retain(|(_, uuid)| !touched.contains_key(uuid));
        follow.into_iter().for_each(|(kind, uuid)| self.touch(kind, uuid, Change::Changed));
        if is_other {
            let text = serde_json::to_string(&board.known().since);
            let text = text.map_err(|error| Problem::failed("encode since when objects are not healthy", error))?;
            self.set_meta(META, &text)?;
        }
        Ok(())
    }
}

/// How the problem of a task begins that waits for a stuck disk.
const WAITS: &str = "it waits for the disk of VBD ";

impl View<'_> {
    /// Why a task does not continue, if that is because a disk which it changes is stuck.
    pub(super) fn stuck_disk_of(&self, task: Uuid) -> Result<Option<Problem>, Problem> {
        let sql = "SELECT vbd.uuid FROM claim JOIN vbd ON vbd.vdi = claim.object
                   WHERE claim.task = ?1 AND vbd.state = 'plugged' ORDER BY vbd.uuid";
        for vbd in self.rows(sql, [Id(task)], |row| Ok(row.get::<_, Id>(0)?.0))? {
            let Vbd { uuid, mode, health, .. } = self.vbd(vbd)?;
            if mode == Mode::ReadWrite && health.state == HealthState::Stuck {
                let what = format!("{WAITS}{uuid}, which is stuck: {}", health.reason.unwrap_or_default());
                return Ok(Some(Problem { advice: health.advice, ..Problem::new(Code::Timeout, what) }));
            }
        }
        Ok(None)
    }
}

impl Tx<'_> {
    /// A disk of this VDI became stuck, or is no longer: the task that changes it shows that.
    fn note_waiting_task(&mut self, vdi: Uuid) -> Result<(), Problem> {
        let Some(task) = self.claimant(vdi)? else { return Ok(()) };
        let Some(known) = self.find_task(task)? else { return Ok(()) };
        let waited = known.problem.is_some_and(|problem| problem.detail.starts_with(WAITS));
        if waited || self.stuck_disk_of(task)?.is_some() {
            self.set_task_problem(task, None)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod test;
