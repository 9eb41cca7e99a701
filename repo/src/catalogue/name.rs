//! Names, which are unique among the VDIs of a repository, among repositories, among VMs and among the snapshots of a
//! VM.
//!
//! A name that a request gives is checked in the commit that changes the object, or in the one that records a task's
//! intent; the task keeps the name until it ends. So of two requests for one name, one is refused. A name that no
//! request gives is chosen in the commit that adds the object.
//!
//! Names need not be unique for all that: an inventory is taken in as it is. Its names are those that another host
//! knows the disks by, its storage may be read-only, and a disk is never refused for its name (decision 0039).

use api::{Code, Name, ObjectKind, Problem};
use jiff::Timestamp;
use uuid::Uuid;

use super::row::{Id, Time, Word};
use super::{Tx, View};

/// Characters of a name ([`api::Name`]).
const NAME_MAX: usize = 128;

/// The objects among which a name is unique.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Among {
    /// The VDIs of a repository.
    Vdis(Uuid),
    /// All repositories.
    Srs,
    /// All VMs.
    Vms,
    /// The snapshots of a VM.
    VmSnapshots(Uuid),
}

impl Among {
    /// Distinguishes claims of different kinds, together with [`Among::of`].
    fn kind(self) -> ObjectKind {
        match self {
            Among::Vdis(_) => ObjectKind::Vdi,
            Among::Srs => ObjectKind::Sr,
            Among::Vms | Among::VmSnapshots(_) => ObjectKind::Vm,
        }
    }

    /// The repository of VDIs, the VM of snapshots.
    fn of(self) -> Option<Uuid> {
        match self {
            Among::Vdis(of) | Among::VmSnapshots(of) => Some(of),
            Among::Srs | Among::Vms => None,
        }
    }

    /// The objects with the name ?1, of the repository or VM ?2.
    fn holders(self) -> &'static str {
        match self {
            Among::Vdis(_) => {
                "SELECT vdi.uuid, vdi.created FROM vdi JOIN image ON vdi.image = image.uuid
                 WHERE vdi.name = ?1 AND image.sr = ?2 ORDER BY vdi.created, vdi.uuid LIMIT 1"
            }
            Among::Srs => "SELECT uuid, created FROM sr WHERE name = ?1 AND ?2 IS NULL ORDER BY created, uuid LIMIT 1",
            Among::Vms => "SELECT uuid, created FROM vm WHERE name = ?1 AND ?2 IS NULL ORDER BY created, uuid LIMIT 1",
            Among::VmSnapshots(_) => "SELECT uuid, created FROM vm_snapshot WHERE name = ?1 AND vm = ?2 LIMIT 1",
        }
    }
}

/// The holder of a name.
enum Holder {
    /// An object, and when it was created.
    Object(Uuid, Timestamp),
    /// A task that is creating the object.
    Task(Uuid),
}

impl View<'_> {
    fn name_holder(&self, among: Among, name: &str) -> Result<Option<Holder>, Problem> {
        let of = among.of().map(Id);
        let object = self.row(among.holders(), (name, of), |row| {
            Ok(Holder::Object(row.get::<_, Id>(0)?.0, row.get::<_, Time>(1)?.0))
        })?;
        if object.is_some() {
            return Ok(object);
        }
        let claims = "SELECT task FROM name_claim WHERE name = ?1 AND sr IS ?2 AND kind = ?3 LIMIT 1";
        self.row(claims, (name, of, Word(among.kind())), |row| Ok(Holder::Task(row.get::<_, Id>(0)?.0)))
    }

    /// Whether neither an object nor a task has a name.
    pub fn is_name_free(&self, among: Among, name: &Name) -> Result<bool, Problem> {
        Ok(self.name_holder(among, name.as_str())?.is_none())
    }

    /// Refuses a name that is taken. `tried` is what would have needed it: "create VDI 'web'".
    pub fn check_name_free(&self, among: Among, name: &Name, tried: &str) -> Result<(), Problem> {
        let Some(holder) = self.name_holder(among, name.as_str())? else { return Ok(()) };
        let (noun, word) = match among {
            Among::Vdis(_) => ("VDI", "vdi"),
            Among::Srs => ("SR", "sr"),
            Among::Vms => ("VM", "vm"),
            Among::VmSnapshots(_) => ("snapshot", "vm"),
        };
        let place = match among {
            Among::Vdis(sr) => format!(" in SR '{}' ({sr})", self.sr(sr)?.name),
            Among::VmSnapshots(vm) => format!(" of VM '{}' ({vm})", self.vm(vm)?.name),
            Among::Srs | Among::Vms => String::new(),
        };
        let (has, advice) = match holder {
            Holder::Object(uuid, created) => (
                format!("{noun} {uuid}{place}, created {created:.0}, has that name"),
                match among {
                    Among::VmSnapshots(_) => "choose another name, or destroy that one first".into(),
                    _ => {
                        format!("choose another name, or rename that one first: tapline {word} set {uuid} --name NAME")
                    }
                },
            ),
            Holder::Task(task) => (
                format!("the task {task} is creating a {noun} of that name{place}"),
                "choose another name, or wait for that task or cancel it".into(),
            ),
        };
        Err(Problem::new(Code::NameTaken, format!("cannot {tried}: {has}")).field("name").advise(advice))
    }

    /// A free name: `base` with `suffix`, and with a number behind it if that is taken.
    pub fn free_name(&self, among: Among, base: &Name, suffix: &str) -> Result<Name, Problem> {
        let mut name = with_suffix(base, suffix)?;
        let mut count = 2_u64;
        while !self.is_name_free(among, &name)? {
            name = with_suffix(base, &format!("{suffix}-{count}"))?;
            count = count.saturating_add(1);
        }
        Ok(name)
    }

    /// A free name for a snapshot: when it was taken, in UTC, and as exactly as necessary.
    pub fn free_snapshot_name(&self, among: Among, of: &Name, at: Timestamp) -> Result<Name, Problem> {
        let name = with_suffix(of, &at.strftime("@%Y-%m-%dT%H:%M").to_string())?;
        match self.is_name_free(among, &name)? {
            true => Ok(name),
            false => self.free_name(among, of, &at.strftime("@%Y-%m-%dT%H:%M:%S").to_string()),
        }
    }
}

/// A name with a suffix; as much of the name is left out as it takes.
fn with_suffix(base: &Name, suffix: &str) -> Result<Name, Problem> {
    let kept = NAME_MAX.saturating_sub(suffix.chars().count());
    let base: String = base.as_str().chars().take(kept).collect();
    let name = format!("{}{suffix}", base.trim_end());
    name.parse().map_err(|why| Problem::failed(format_args!("choose the name '{name}'"), why))
}

impl Tx<'_> {
    /// Keeps a name for what a task creates, until the task ends.
    pub fn take_name(&mut self, among: Among, name: &Name, task: Uuid, tried: &str) -> Result<(), Problem> {
        self.check_name_free(among, name, tried)?;
        self.execute(
            "INSERT INTO name_claim VALUES (?1, ?2, ?3, ?4)",
            (Id(task), Word(among.kind()), among.of().map(Id), name.as_str()),
        )
        .map(drop)
    }

    /// Gives back the name that a task has kept.
    pub(super) fn drop_name_claim(&mut self, task: Uuid) -> Result<(), Problem> {
        self.execute("DELETE FROM name_claim WHERE task = ?1", [Id(task)]).map(drop)
    }
}

#[cfg(test)]
mod test;
