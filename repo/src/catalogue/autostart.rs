//! Autostart when the host boots.
//!
//! The objects to start are recorded in the commit that notes the new boot, and removed one by one: if the daemon dies
//! in between, the next one continues. A daemon that is merely restarted finds nothing to start.

use api::{Autostart, Change, Code, ObjectKind, Problem, Vbd, VbdPatch};
use uuid::Uuid;

use super::row::{Id, Json};
use super::{Tx, View};

/// Under which the identity of the host's present life is kept.
const BOOT: &str = "boot";

/// The value stored when the catalogue has moved to another machine: no boot id is equal to it.
const MOVED: &str = "on another machine";

/// Something that is still to be started.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ToStart {
    /// A VM.
    Vm(Uuid, Autostart),
    /// A VBD that no VM has.
    Vbd(Uuid, Autostart),
}

impl ToStart {
    /// The object's UUID.
    pub fn uuid(self) -> Uuid {
        match self {
            ToStart::Vm(uuid, _) | ToStart::Vbd(uuid, _) => uuid,
        }
    }

    /// How it is started.
    pub fn autostart(self) -> Autostart {
        match self {
            ToStart::Vm(_, autostart) | ToStart::Vbd(_, autostart) => autostart,
        }
    }
}

/// A VBD that a VM has is plugged when that is started.
pub(super) fn check_autostart(vbd: &Vbd) -> Result<(), Problem> {
    if vbd.vm.is_none() || vbd.autostart.is_none() {
        return Ok(());
    }
    let what = "a VBD that belongs to a VM is plugged when the VM starts and cannot autostart on its own";
    Err(Problem::new(Code::Unsupported, what)
        .field("autostart")
        .advise("set autostart on the VM: tapline vm set --autostart"))
}

impl View<'_> {
    /// The objects still to be started, in order. Withdrawn or destroyed ones are left out.
    pub fn to_start(&self) -> Result<Vec<ToStart>, Problem> {
        let queued = self.rows("SELECT object, kind FROM to_start ORDER BY kind, object", [], |row| {
            Ok((row.get::<_, Id>(0)?.0, row.get::<_, String>(1)?))
        });
        let mut found = Vec::new();
        for (uuid, kind) in queued? {
            found.extend(match kind.as_str() {
                "vm" => self.find_vm(uuid)?.and_then(|vm| vm.autostart).map(|how| ToStart::Vm(uuid, how)),
                _ => self.find_vbd(uuid)?.map(|vbd| ToStart::Vbd(uuid, vbd.autostart.unwrap_or_default())),
            });
        }
        found.sort_by_key(|one| one.autostart().order);
        Ok(found)
    }
}

impl Tx<'_> {
    /// Records the current boot of the host; returns whether it differs from the recorded one. The objects to start are
    /// recorded then, if this is the `first` daemon of that boot: with a catalogue restored from a backup it may not
    /// be. A catalogue from another machine, where things may be running, starts nothing. With `again` the list
    /// includes VBDs of no VM that were plugged when the host went down.
    pub fn note_boot(&mut self, boot: &str, first: bool, again: bool) -> Result<bool, Problem> {
        let before = self.meta(BOOT)?;
        self.set_meta(BOOT, boot)?;
        if before.as_ref().is_none_or(|before| before == boot) {
            return Ok(false);
        }
        self.execute("DELETE FROM to_start", [])?;
        if !first || before.as_deref() == Some(MOVED) {
            return Ok(true);
        }
        self.execute("INSERT INTO to_start SELECT uuid, 'vm' FROM vm WHERE autostart IS NOT NULL", [])?;
        self.execute(
            "INSERT INTO to_start SELECT uuid, 'vbd' FROM vbd WHERE vm IS NULL AND (autostart IS NOT NULL
             OR (?1 AND (drained OR state IN ('plugged', 'restarting')) AND uuid NOT IN (SELECT vbd FROM nbd_vbd)))",
            [again],
        )?;
        self.execute("UPDATE vbd SET drained = FALSE WHERE drained", [])?;
        Ok(true)
    }

    /// The catalogue has come to another machine: nothing that it has for running runs here, and nothing is started by
    /// it.
    pub fn note_moved(&mut self) -> Result<(), Problem> {
        self.set_meta(BOOT, MOVED)
    }

    /// The host is about to shut down: records which VBDs of external machines are plugged, for the next boot.
    pub fn note_drained(&mut self) -> Result<(), Problem> {
        let sql = "UPDATE vbd SET drained = TRUE WHERE vm IS NULL AND state IN ('plugged', 'restarting')";
        self.execute(sql, []).map(drop)
    }

    /// It has been plugged since.
    pub(super) fn forget_drained(&mut self, vbd: Uuid) -> Result<(), Problem> {
        self.execute("UPDATE vbd SET drained = FALSE WHERE uuid = ?1 AND drained", [Id(vbd)]).map(drop)
    }

    /// Something was started, or has been tried often enough.
    pub fn end_start(&mut self, uuid: Uuid) -> Result<(), Problem> {
        self.execute("DELETE FROM to_start WHERE object = ?1", [Id(uuid)]).map(drop)
    }

    /// Changes the given fields of a VBD.
    pub fn patch_vbd(&mut self, uuid: Uuid, patch: &VbdPatch) -> Result<Vbd, Problem> {
        let mut vbd = self.vbd(uuid)?;
        vbd.autostart = patch.autostart.unwrap_or(vbd.autostart);
        check_autostart(&vbd)?;
        vbd.tags = patch.tags.clone().unwrap_or(vbd.tags);
        vbd.other_config = patch.other_config.clone().unwrap_or(vbd.other_config);
        self.execute(
            "UPDATE vbd SET autostart = ?2, tags = ?3, other_config = ?4 WHERE uuid = ?1",
            (Id(uuid), vbd.autostart.map(Json), Json(&vbd.tags), Json(&vbd.other_config)),
        )?;
        if patch.autostart == Some(None) {
            self.end_start(uuid)?;
        }
        self.touch(ObjectKind::Vbd, uuid, Change::Changed);
        Ok(vbd)
    }
}
