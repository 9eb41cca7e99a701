//! Virtual block devices.

use std::collections::HashMap;

use api::{
    AbsolutePath, Change, Code, DiskLimits, Driver, Health, HealthState, Labels, Mode, ObjectKind, Problem, Transport,
    Vbd, VbdState, Vdi, VdiState,
};
use rusqlite::{Row, named_params};
use uuid::Uuid;

use super::autostart::check_autostart;
use super::health::HealthBoard;
use super::image::ImageState;
use super::row::{Id, Json, Time, Word, labels, text};
use super::{Tx, View, not_found};

/// A process: its pid and start time, which distinguishes it from a later process with the same pid.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Process {
    /// Its number.
    pub pid: u32,
    /// Clock ticks after the boot of the host (proc_pid_stat(5), field 22).
    pub started: u64,
}

/// The columns of a VBD, and the state of its VDI's own image and its repository, on which its health depends.
const COLUMNS: &str = "vbd.*, EXISTS (SELECT 1 FROM nbd_vbd WHERE nbd_vbd.vbd = vbd.uuid) AS for_nbd_address,
    (SELECT image.state FROM vdi JOIN image ON image.uuid = vdi.image WHERE vdi.uuid = vbd.vdi) AS image_state,
    (SELECT image.sr FROM vdi JOIN image ON image.uuid = vdi.image WHERE vdi.uuid = vbd.vdi) AS sr";

fn of_row(row: &Row<'_>, health: &HealthBoard) -> rusqlite::Result<Vbd> {
    let socket: Option<String> = row.get("socket")?;
    let Labels { tags, other_config } = labels(row)?;
    // A VDI is without an image only within the transaction that replaces it.
    let image = row.get::<_, Option<Word<ImageState>>>("image_state")?.map_or(ImageState::Missing, |word| word.0);
    let mut vbd = Vbd {
        uuid: row.get::<_, Id>("uuid")?.0,
        vm: row.get::<_, Option<Id>>("vm")?.map(|id| id.0),
        vdi: row.get::<_, Id>("vdi")?.0,
        position: row.get("position")?,
        mode: row.get::<_, Word<_>>("mode")?.0,
        bootable: row.get("bootable")?,
        transport: row.get::<_, Word<_>>("transport")?.0,
        for_nbd_address: row.get("for_nbd_address")?,
        queues: row.get("queues")?,
        tags,
        other_config,
        autostart: row.get::<_, Option<Json<_>>>("autostart")?.map(|json| json.0),
        limits: row.get::<_, Option<Json<_>>>("limits")?.map(|json| json.0),
        share_weight: row.get("share_weight")?,
        state: row.get::<_, Word<_>>("state")?.0,
        socket: socket.is_some().then(|| text(row, "socket")).transpose()?,
        pid: row.get("pid")?,
        restarts: row.get("restarts")?,
        waits_for_space: row.get("waits_for_space")?,
        health: Health::healthy(),
        problem: row.get::<_, Option<Json<_>>>("problem")?.map(|json| json.0),
        created: row.get::<_, Time>("created")?.0,
    };
    let sr = row.get::<_, Option<Id>>("sr")?.map(|id| id.0);
    vbd.health = health.of_vbd(&vbd, image.shown(), sr);
    Ok(vbd)
}

impl View<'_> {
    /// All VBDs, or those of a VM or of a VDI, by machine and position.
    pub fn vbds(&self, vm: Option<Uuid>, vdi: Option<Uuid>) -> Result<Vec<Vbd>, Problem> {
        let which = "(?1 IS NULL OR vm = ?1) AND (?2 IS NULL OR vdi = ?2) ORDER BY vm, position, uuid";
        let sql = format!("SELECT {COLUMNS} FROM vbd WHERE {which}");
        self.rows(&sql, [vm.map(Id), vdi.map(Id)], |row| of_row(row, self.event_bus.health()))
    }

    /// The number of VBDs per state, without zeroes.
    pub fn count_vbds(&self) -> Result<Vec<(VbdState, u64)>, Problem> {
        let sql = "SELECT state, count(*) FROM vbd GROUP BY state";
        self.rows(sql, [], |row| Ok((row.get::<_, Word<_>>(0)?.0, row.get(1)?)))
    }

    /// A VBD, if there is one.
    pub fn find_vbd(&self, uuid: Uuid) -> Result<Option<Vbd>, Problem> {
        let sql = format!("SELECT {COLUMNS} FROM vbd WHERE uuid = ?1");
        self.row(&sql, [Id(uuid)], |row| of_row(row, self.event_bus.health()))
    }

    /// The worst health of the VBDs of each VDI that has one which is not healthy.
    pub(super) fn health_of_users(&self) -> Result<HashMap<Uuid, Health>, Problem> {
        let sql = format!("SELECT {COLUMNS} FROM vbd WHERE state <> 'unplugged' OR problem IS NOT NULL");
        let mut worst: HashMap<Uuid, Health> = HashMap::new();
        for vbd in self.rows(&sql, [], |row| of_row(row, self.event_bus.health()))? {
            let known = worst.get(&vbd.vdi).map_or(HealthState::Healthy, |health| health.state);
            if vbd.health.state > known {
                worst.insert(vbd.vdi, vbd.health);
            }
        }
        Ok(worst)
    }

    /// The VBDs that were made for clients of the daemon's NBD address ([`Tx::add_nbd_vbd`]).
    pub fn nbd_vbds(&self) -> Result<Vec<Uuid>, Problem> {
        self.rows("SELECT vbd FROM nbd_vbd", [], |row| Ok(row.get::<_, Id>(0)?.0))
    }

    /// A VBD; an error if there is none with this UUID.
    pub fn vbd(&self, uuid: Uuid) -> Result<Vbd, Problem> {
        self.find_vbd(uuid)?.ok_or_else(|| not_found(ObjectKind::Vbd, uuid))
    }

    /// The plugged VBDs, each with the process that serves it.
    pub fn plugged_processes(&self) -> Result<Vec<(Uuid, u32)>, Problem> {
        let sql = "SELECT uuid, pid FROM vbd WHERE state = 'plugged' AND pid IS NOT NULL";
        self.rows(sql, [], |row| Ok((row.get::<_, Id>("uuid")?.0, row.get("pid")?)))
    }

    /// The repositories in which disks are plugged, each with these.
    pub fn plugged_by_sr(&self) -> Result<HashMap<Uuid, Vec<Uuid>>, Problem> {
        let sql = "SELECT image.sr, vbd.uuid FROM vbd JOIN vdi ON vdi.uuid = vbd.vdi
                   JOIN image ON image.uuid = vdi.image WHERE vbd.state = 'plugged'";
        let mut all: HashMap<Uuid, Vec<Uuid>> = HashMap::new();
        for (sr, vbd) in self.rows(sql, [], |row| Ok((row.get::<_, Id>(0)?.0, row.get::<_, Id>(1)?.0)))? {
            all.entry(sr).or_default().push(vbd);
        }
        Ok(all)
    }

    /// The process of a VBD, if it has one.
    pub fn vbd_process(&self, uuid: Uuid) -> Result<Option<Process>, Problem> {
        let sql = "SELECT pid, pid_started FROM vbd WHERE uuid = ?1 AND pid IS NOT NULL";
        self.row(sql, [Id(uuid)], |row| Ok(Process { pid: row.get(0)?, started: row.get(1)? }))
    }

    /// The first position of a VM that is free.
    pub fn free_position(&self, vm: Uuid) -> Result<u8, Problem> {
        let taken: Vec<u8> =
            self.rows("SELECT position FROM vbd WHERE vm = ?1 ORDER BY position", [Id(vm)], |row| row.get(0))?;
        let free = (0..=254).find(|position| taken.binary_search(position).is_err());
        free.ok_or_else(|| Problem::new(Code::Exists, format!("VM {vm} already has 255 VBDs, the maximum")))
    }
}

/// Checks that a VDI can be used with a VBD's access mode.
fn check_use(vbd: &Vbd, vdi: &Vdi) -> Result<(), Problem> {
    if vdi.state == VdiState::NoData {
        let what = format!("VDI {} is a snapshot whose data was destroyed", vdi.uuid);
        return Err(Problem::new(Code::State, what).field("vdi").advise("use another snapshot of the disk"));
    }
    if vbd.mode == Mode::ReadWrite && vdi.read_only {
        let what = format!("VDI {} is read-only and cannot be plugged read-write", vdi.uuid);
        return Err(Problem::new(Code::ReadOnly, what)
            .field("mode")
            .advise("use mode RO, or clone it and write to the clone"));
    }
    match (vbd.transport, vbd.queues) {
        (Transport::Nbd, 2..) => {
            let what = format!("NBD does not support multiple queues, but {} were requested", vbd.queues);
            Err(Problem::new(Code::Invalid, what)
                .field("queues")
                .advise("request 1 queue; clients can open several connections"))
        }
        (_, 1..=64) => Ok(()),
        (_, queues) => {
            Err(Problem::new(Code::Invalid, format!("{queues} queues requested; must be 1 to 64")).field("queues"))
        }
    }
}

impl Tx<'_> {
    /// Adds a VBD, which is not plugged.
    pub fn add_vbd(&mut self, vbd: &Vbd) -> Result<(), Problem> {
        let vdi = self.find_vdi(vbd.vdi)?.ok_or_else(|| not_found(ObjectKind::Vdi, vbd.vdi).field("vdi"))?;
        check_use(vbd, &vdi)?;
        check_autostart(vbd)?;
        if vbd.position > 254 {
            return Err(Problem::new(Code::Invalid, "a position must be 0 to 254").field("position"));
        }
        let driver = vbd.vm.map(|vm| self.vm(vm)).transpose()?.map(|vm| vm.driver);
        if (vbd.transport == Transport::Blkif) != (driver == Some(Driver::Xen)) {
            let what = "the blkif transport is used for all VBDs of VMs with the xen driver, and only for those";
            let advice =
                "omit the transport; for a Xen guest that is managed elsewhere see 'tapline vbd connect --for xl'";
            return Err(Problem::new(Code::Unsupported, what).field("transport").advise(advice));
        }
        if let Some(vm) = vbd.vm {
            self.check_not_suspended(vm, "it cannot be given a disk")?;
            let same = "SELECT uuid FROM vbd WHERE vm = ?1 AND vdi = ?2";
            if let Some(other) = self.row(same, (Id(vm), Id(vbd.vdi)), |row| Ok(row.get::<_, Id>(0)?.0))? {
                let what = format!("VM {vm} has VDI '{}' ({}) already: VBD {other}", vdi.name, vdi.uuid);
                return Err(Problem::new(Code::Exists, what).field("vdi").advise("use that one"));
            }
            let taken = "SELECT uuid FROM vbd WHERE vm = ?1 AND position = ?2";
            let taken = self.row(taken, (Id(vm), vbd.position), |row| Ok(row.get::<_, Id>(0)?.0))?;
            if let Some(other) = taken {
                let what = format!("position {} of VM {vm} is used by VBD {other}", vbd.position);
                return Err(Problem::new(Code::Exists, what)
                    .field("position")
                    .advise("choose another position, or omit it"));
            }
        }
        self.execute(
            "INSERT INTO vbd VALUES (:uuid, :vm, :vdi, :position, :mode, :bootable, :transport, :queues, :state,
             NULL, NULL, NULL, 0, FALSE, NULL, :created, :autostart, FALSE, :tags, :other_config, :limits, :share_weight)",
            named_params! {
                ":uuid": Id(vbd.uuid), ":vm": vbd.vm.map(Id), ":vdi": Id(vbd.vdi), ":position": vbd.position,
                ":mode": Word(vbd.mode), ":bootable": vbd.bootable, ":transport": Word(vbd.transport),
                ":queues": vbd.queues, ":state": Word(VbdState::Unplugged), ":created": Time(vbd.created),
                ":autostart": vbd.autostart.map(Json), ":tags": Json(&vbd.tags),
                ":other_config": Json(&vbd.other_config), ":limits": vbd.limits.map(Json),
                ":share_weight": vbd.share_weight,
            },
        )?;
        if vbd.for_nbd_address {
            self.execute("INSERT INTO nbd_vbd VALUES (?1)", [Id(vbd.uuid)])?;
        }
        self.touch(ObjectKind::Vbd, vbd.uuid, Change::Added);
        Ok(())
    }

    /// Adds a read-only VBD for clients of the daemon's NBD address. It is not plugged again when the host boots.
    pub fn add_nbd_vbd(&mut self, vdi: Uuid) -> Result<Vbd, Problem> {
        let vbd = Vbd { mode: Mode::ReadOnly, for_nbd_address: true, ..Vbd::unplugged(vdi, Transport::Nbd) };
        self.add_vbd(&vbd)?;
        Ok(vbd)
    }

    /// Begins to plug an unserved VBD: it holds its VDI's lease from now on, excluding conflicting users.
    pub fn begin_plug(&mut self, uuid: Uuid) -> Result<Vbd, Problem> {
        let vbd = self.vbd(uuid)?;
        let refused = |code, what: &str| Problem::new(code, format!("VBD {uuid} {what}"));
        match vbd.state {
            VbdState::Unplugged | VbdState::Restarting => {}
            VbdState::Plugged => return Err(refused(Code::State, "is already plugged")),
            VbdState::Plugging => return Err(refused(Code::Busy, "is already being plugged")),
            VbdState::Unplugging => {
                return Err(refused(Code::Busy, "is being unplugged").advise("plug it again after that"));
            }
        }
        check_use(&vbd, &self.vdi(vbd.vdi)?)?;
        for image in self.chain(vbd.vdi)? {
            let wrong = match image.state {
                ImageState::Ready => continue,
                ImageState::Making => "is still being created",
                ImageState::Missing => "was missing when its repository was last scanned",
                ImageState::Damaged => "is damaged",
                ImageState::Diverged => "is part of a running disk's chain that the catalogue does not match",
                ImageState::NoData => "has no data",
            };
            let advice = match image.state {
                ImageState::Diverged => "resolve the conflict: see 'tapline host reconcile --dry-run'",
                _ => "restore it and scan the repository",
            };
            let what = format!("VDI {} cannot be plugged: its file {} {wrong}", vbd.vdi, image.file);
            return Err(Problem::new(Code::State, what).advise(advice));
        }
        self.take_lease(vbd.vdi, uuid, vbd.mode)?;
        self.check_not_stuck(vbd.vdi)?;
        self.forget_drained(uuid)?;
        self.set_vbd_state(uuid, VbdState::Plugging, None)?;
        self.vbd(uuid)
    }

    /// A VBD is served.
    pub fn end_plug(&mut self, uuid: Uuid) -> Result<Vbd, Problem> {
        self.set_vbd_state(uuid, VbdState::Plugged, None)?;
        self.set_vbd_restarts(uuid, 0)?;
        self.vbd(uuid)
    }

    /// Marks a VBD as unplugged and releases its VDI; `problem` says why, if that was not requested.
    pub fn end_unplug(&mut self, uuid: Uuid, problem: Option<&Problem>) -> Result<Vbd, Problem> {
        self.set_vbd_unserved(uuid)?;
        self.release(uuid)?;
        self.set_vbd_state(uuid, VbdState::Unplugged, problem)?;
        self.vbd(uuid)
    }

    /// Records the state of a VBD and why it is so.
    pub fn set_vbd_state(&mut self, uuid: Uuid, state: VbdState, problem: Option<&Problem>) -> Result<(), Problem> {
        self.vbd(uuid)?;
        self.execute(
            "UPDATE vbd SET state = ?2, problem = ?3 WHERE uuid = ?1",
            (Id(uuid), Word(state), problem.map(Json)),
        )?;
        self.touch(ObjectKind::Vbd, uuid, Change::Changed);
        Ok(())
    }

    /// Records by which process and where a VBD is served. While it is being restarted that is no event: the next one
    /// is that it is plugged, or that the process has died as well.
    pub fn set_vbd_served(&mut self, uuid: Uuid, by: Process, at: &AbsolutePath) -> Result<(), Problem> {
        let is_event = self.vbd(uuid)?.state != VbdState::Restarting;
        self.execute(
            "UPDATE vbd SET pid = ?2, pid_started = ?3, socket = ?4 WHERE uuid = ?1",
            (Id(uuid), by.pid, by.started, at.as_str()),
        )?;
        if is_event {
            self.touch(ObjectKind::Vbd, uuid, Change::Changed);
        }
        Ok(())
    }

    /// Records that another process serves a VBD from now on, in the same place.
    pub fn set_vbd_process(&mut self, uuid: Uuid, by: Process) -> Result<(), Problem> {
        self.vbd(uuid)?;
        if self.vbd_process(uuid)? != Some(by) {
            self.event_bus.health().forget_process(uuid);
        }
        let sql = "UPDATE vbd SET pid = ?2, pid_started = ?3 WHERE uuid = ?1";
        self.execute(sql, (Id(uuid), by.pid, by.started))?;
        self.touch(ObjectKind::Vbd, uuid, Change::Changed);
        Ok(())
    }

    /// Records that no process serves a VBD.
    pub fn set_vbd_unserved(&mut self, uuid: Uuid) -> Result<(), Problem> {
        self.vbd(uuid)?;
        self.event_bus.health().forget_process(uuid);
        let sql =
            "UPDATE vbd SET pid = NULL, pid_started = NULL, socket = NULL, waits_for_space = FALSE WHERE uuid = ?1";
        self.execute(sql, [Id(uuid)])?;
        self.touch(ObjectKind::Vbd, uuid, Change::Changed);
        Ok(())
    }

    /// Records what the disk of a VBD is limited to. Refused while a process is starting that may not know it.
    pub fn set_vbd_limits(&mut self, uuid: Uuid, limits: Option<&DiskLimits>) -> Result<Vbd, Problem> {
        let doing = match self.vbd(uuid)?.state {
            VbdState::Unplugged | VbdState::Plugged => None,
            VbdState::Plugging => Some("is being plugged"),
            VbdState::Restarting => Some("is being restarted"),
            VbdState::Unplugging => Some("is being unplugged"),
        };
        if let Some(doing) = doing {
            let what = format!("VBD {uuid} {doing}, so its limits cannot be changed");
            return Err(Problem::new(Code::Busy, what).advise("retry after that"));
        }
        self.execute("UPDATE vbd SET limits = ?2 WHERE uuid = ?1", (Id(uuid), limits.map(Json)))?;
        self.touch(ObjectKind::Vbd, uuid, Change::Changed);
        self.vbd(uuid)
    }

    /// Records the weight of a VBD's disk among those that share its storage. A disk process that is starting receives
    /// it when it serves.
    pub fn set_vbd_share_weight(&mut self, uuid: Uuid, weight: u32) -> Result<Vbd, Problem> {
        self.vbd(uuid)?;
        self.execute("UPDATE vbd SET share_weight = ?2 WHERE uuid = ?1", (Id(uuid), weight))?;
        self.touch(ObjectKind::Vbd, uuid, Change::Changed);
        self.vbd(uuid)
    }

    /// How often the process of a VBD has died since it was plugged.
    pub fn set_vbd_restarts(&mut self, uuid: Uuid, restarts: u32) -> Result<(), Problem> {
        self.execute("UPDATE vbd SET restarts = ?2 WHERE uuid = ?1", (Id(uuid), restarts))?;
        self.touch(ObjectKind::Vbd, uuid, Change::Changed);
        Ok(())
    }

    /// Whether the guest of a VBD waits for space.
    pub fn set_vbd_waits(&mut self, uuid: Uuid, waits: bool) -> Result<(), Problem> {
        self.execute("UPDATE vbd SET waits_for_space = ?2 WHERE uuid = ?1", (Id(uuid), waits))?;
        self.touch(ObjectKind::Vbd, uuid, Change::Changed);
        Ok(())
    }

    /// Forgets a VBD, which must be unplugged.
    pub fn remove_vbd(&mut self, uuid: Uuid) -> Result<(), Problem> {
        let vbd = self.vbd(uuid)?;
        if vbd.state != VbdState::Unplugged {
            let what = format!("VBD {uuid} is plugged or changing state");
            return Err(Problem::new(Code::State, what).advise("unplug it first"));
        }
        if let Some(vm) = vbd.vm {
            self.check_not_suspended(vm, "its disks cannot be taken away")?;
        }
        self.drop_leases(uuid)?;
        self.execute("DELETE FROM vbd WHERE uuid = ?1", [Id(uuid)])?;
        self.touch(ObjectKind::Vbd, uuid, Change::Removed);
        if !vbd.health.is_healthy() {
            // Its VDI no longer has that from it.
            self.touch(ObjectKind::Vdi, vbd.vdi, Change::Changed);
        }
        Ok(())
    }
}
