//! Changed-block tracking: which maps of changed blocks a VDI has.
//!
//! It knows identities and their order, and neither files nor what is in a map. Invariant: the maps of a VDI are of
//! successive intervals, the last of which ends with the state that it shows.

use std::collections::HashSet;

use api::{Change, ChangeMap, ChangeTracking, Code, ObjectKind, Problem, VdiState};
use uuid::Uuid;

use super::image::{Image, ImageState};
use super::row::{Id, Json};
use super::{Tx, View};

impl View<'_> {
    /// The VDIs of a repository that have maps or record changes, with their images.
    pub fn tracked_vdis(&self, sr: Uuid) -> Result<Vec<(Uuid, Uuid, ChangeTracking)>, Problem> {
        let sql = "SELECT vdi.uuid, vdi.image, vdi.cbt FROM vdi JOIN image ON vdi.image = image.uuid
                   WHERE image.sr = ?1 AND vdi.cbt IS NOT NULL ORDER BY vdi.uuid";
        self.rows(sql, [Id(sr)], |row| {
            Ok((row.get::<_, Id>(0)?.0, row.get::<_, Id>(1)?.0, row.get::<_, Json<_>>(2)?.0))
        })
    }

    /// Whether a VDI of a repository needs a map.
    pub fn is_map_needed(&self, sr: Uuid, map: Uuid) -> Result<bool, Problem> {
        let tracked = self.tracked_vdis(sr)?;
        Ok(tracked.iter().any(|(_, _, tracking)| tracking.maps.iter().any(|known| known.uuid == map)))
    }

    /// Refuses a VDI that is of no use without its data: one that is not a snapshot, or does not end the interval of a
    /// map; and one that belongs to a snapshot of a VM, which could not be reverted to it.
    pub fn check_data_destroyable(&self, uuid: Uuid) -> Result<(), Problem> {
        let vdi = self.vdi(uuid)?;
        let refused = |code, why: &str, advice: &str| {
            Err(Problem::new(code, format!("the data of VDI {uuid} cannot be destroyed alone: {why}")).advise(advice))
        };
        let is_mapped = vdi.cbt.as_ref().is_some_and(|tracking| !tracking.maps.is_empty());
        match self.vm_snapshot_with(uuid)? {
            _ if vdi.snapshot_of.is_none() => {
                refused(Code::State, "it is not a snapshot", "take a snapshot of it: tapline vdi snapshot")
            }
            _ if vdi.state == VdiState::NoData => {
                refused(Code::State, "it was destroyed already", "nothing is to be done")
            }
            _ if !is_mapped => {
                let why = "no changed blocks are recorded up to it, so changes since could not be listed";
                refused(Code::State, why, "destroy it: tapline vdi destroy")
            }
            Some(of) => {
                let why = format!("it belongs to the snapshot '{}' of VM {}", of.name, of.vm);
                refused(Code::InUse, &why, "destroy that snapshot first: tapline vm snapshot-destroy")
            }
            None => Ok(()),
        }
    }
}

impl Tx<'_> {
    /// A snapshot has no data from now on: its image stays, hidden, and it gets the image `without`, which has no file.
    /// It is no longer one of its disk's schedule, which would count it as a state that can be reverted to.
    pub fn remove_data(&mut self, uuid: Uuid, without: Uuid) -> Result<(), Problem> {
        let image = self.image(self.vdi_image(uuid)?)?;
        if image.uuid == without {
            return Ok(());
        }
        self.check_data_destroyable(uuid)?;
        if let Some(vbd) = self.vbds(None, Some(uuid))?.first() {
            let what = format!("VDI {uuid} is used by VBD {}", vbd.uuid);
            return Err(Problem::new(Code::InUse, what).advise("destroy its VBDs first"));
        }
        let (file, state) = (format!("{without}.no-data"), ImageState::NoData);
        self.add_image(&Image { uuid: without, file, state, physical: 0, parent: None, kept: false, ..image })?;
        self.execute("UPDATE vdi SET scheduled = FALSE WHERE uuid = ?1", [Id(uuid)])?;
        self.set_vdi_image(uuid, without)
    }

    /// Changes the tracking of a VDI.
    pub fn change_tracking(
        &mut self,
        vdi: Uuid,
        change: impl FnOnce(&mut ChangeTracking),
    ) -> Result<ChangeTracking, Problem> {
        let before = self.vdi(vdi)?.cbt;
        let mut tracking = before.clone().unwrap_or_default();
        change(&mut tracking);
        if before.as_ref() == Some(&tracking) {
            return Ok(tracking);
        }
        self.execute("UPDATE vdi SET cbt = ?2 WHERE uuid = ?1", (Id(vdi), Json(&tracking)))?;
        self.note_vdi(vdi)?;
        self.touch(ObjectKind::Vdi, vdi, Change::Changed);
        Ok(tracking)
    }

    /// A new snapshot gets the maps of its VDI, except for the one that began with it; and the reason why changes
    /// before the first of them are not known, if that is so.
    pub fn give_maps_to_snapshot(&mut self, vdi: Uuid, snapshot: Uuid) -> Result<(), Problem> {
        let mut ended = Vec::new();
        let of_vdi = self.change_tracking(vdi, |tracking| {
            let last = tracking.maps.pop();
            ended = std::mem::replace(&mut tracking.maps, last.into_iter().collect());
        })?;
        let begins = ended.first().is_some_and(|first: &ChangeMap| first.continues.is_none());
        let given = move |tracking: &mut ChangeTracking| {
            tracking.maps = ended;
            tracking.ended = of_vdi.ended.filter(|_| begins);
        };
        self.change_tracking(snapshot, given).map(drop)
    }

    /// The maps of a VDI that is being removed: those of later states get them if an earlier state is still there, and
    /// need none of those before any state.
    pub(super) fn leave_maps(&mut self, vdi: Uuid) -> Result<(), Problem> {
        let Some(found) = self.find_vdi(vdi)? else { return Ok(()) };
        let Some(maps) = found.cbt.map(|tracking| tracking.maps).filter(|maps| !maps.is_empty()) else {
            return Ok(());
        };
        let last = maps.last().map(|map| map.uuid);
        let others: Vec<_> = self.tracked_vdis(found.sr)?.into_iter().filter(|(other, ..)| *other != vdi).collect();
        let states: HashSet<Uuid> =
            others.iter().filter_map(|(_, _, tracking)| Some(tracking.maps.last()?.uuid)).collect();
        for (other, _, tracking) in others {
            let is_next = tracking.maps.first().is_some_and(|map| map.continues == last);
            let earlier = if is_next { &maps[..] } else { &[] };
            let mut all: Vec<ChangeMap> = earlier.iter().chain(&tracking.maps).copied().collect();
            let begins = all.first().and_then(|map| map.continues);
            let unneeded = match begins.is_some_and(|before| states.contains(&before)) {
                true => Vec::new(),
                false => all.drain(..all.len().saturating_sub(1)).map(|map| map.uuid).collect(),
            };
            self.change_tracking(other, |tracking| {
                // Those of the VDI that is being removed are removed with it.
                tracking
                    .unneeded
                    .extend(unneeded.into_iter().filter(|map| tracking.maps.iter().any(|own| own.uuid == *map)));
                tracking.maps = all;
            })?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod test;
