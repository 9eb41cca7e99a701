//! Snapshots of all disks of a machine at one moment: `vm snapshot`, `snapshots`, `snapshot-destroy`, `revert`,
//! `clone`.

use api::{Code, Description, Mode, Name, Problem, VmClone, VmRevert, VmSnapshot, VmSnapshotCreate};
use control::size::readable;
use uuid::Uuid;

use crate::column::Column;
use crate::confirm::Confirm;
use crate::output::say;
use crate::session::{Listing, Outcome, Session, Waiting, named, print};
use crate::word;

/// Arguments of `vm snapshot`.
#[derive(clap::Args)]
pub struct Take {
    /// Name or UUID prefix of the machine
    vm: String,
    /// Name of the snapshot [default: VM@TIME in UTC]
    #[arg(long)]
    name: Option<Name>,
    /// Description of the snapshot
    #[arg(long, value_name = "TEXT", default_value = "", hide_default_value = true)]
    description: Description,
    #[command(flatten)]
    waiting: Waiting,
}

/// Arguments of `vm snapshots`.
#[derive(clap::Args)]
pub struct List {
    /// Name or UUID prefix of the machine
    vm: String,
    #[command(flatten)]
    listing: Listing,
}

/// Arguments of `vm snapshot-destroy`.
#[derive(clap::Args)]
pub struct Destroy {
    /// Name or UUID prefix of the machine
    vm: String,
    /// The snapshot: its name or UUID prefix
    #[arg(long)]
    snapshot: String,
    #[command(flatten)]
    confirm: Confirm,
    #[command(flatten)]
    waiting: Waiting,
}

/// Arguments of `vm revert`.
#[derive(clap::Args)]
pub struct Revert {
    /// Name or UUID prefix of the machine, which must be halted
    vm: String,
    /// The snapshot: its name or UUID prefix
    #[arg(long)]
    snapshot: String,
    #[command(flatten)]
    confirm: Confirm,
    #[command(flatten)]
    waiting: Waiting,
}

/// Arguments of `vm clone`.
#[derive(clap::Args)]
pub struct Clone {
    /// Name or UUID prefix of the machine
    vm: String,
    /// Name of the new machine
    name: Name,
    /// The snapshot to clone: its name or UUID prefix [default: the machine as it is now]
    #[arg(long)]
    snapshot: Option<String>,
    /// Description of the new machine
    #[arg(long, value_name = "TEXT", default_value = "", hide_default_value = true)]
    description: Description,
    #[command(flatten)]
    waiting: Waiting,
}

type SnapshotColumn = Column<VmSnapshot>;

const COLUMNS: &[SnapshotColumn] = &[
    SnapshotColumn::new("uuid", |snapshot, uuids| uuids.show(snapshot.uuid)),
    SnapshotColumn::new("name", |snapshot, _| snapshot.name.to_string()),
    SnapshotColumn::new("created", |snapshot, _| format!("{:.0}", snapshot.created)),
    SnapshotColumn::new("disks", |snapshot, _| {
        snapshot.disks.iter().filter(|disk| disk.snapshot.is_some()).count().to_string()
    })
    .right(),
    SnapshotColumn::new("memory", |snapshot, _| readable(snapshot.hardware.memory)).right().if_room(),
    SnapshotColumn::new("vcpus", |snapshot, _| snapshot.hardware.vcpus.to_string()).right().if_room(),
    SnapshotColumn::new("description", |snapshot, _| snapshot.description.to_string()).if_room(),
    SnapshotColumn::new(
        "taken by",
        |snapshot, _| if snapshot.scheduled { "its schedule".into() } else { String::new() },
    )
    .wide(),
    SnapshotColumn::new("driver", |snapshot, _| word::of(&snapshot.hardware.driver)).wide(),
    SnapshotColumn::new("snapshots", |snapshot, uuids| {
        let of_disks = snapshot.disks.iter().filter(|disk| disk.mode == Mode::ReadWrite);
        of_disks.filter_map(|disk| disk.snapshot).map(|vdi| uuids.show(vdi)).collect::<Vec<_>>().join(", ")
    })
    .wide(),
];

impl Take {
    /// Runs the verb and prints its output.
    pub async fn run(self, session: &Session) -> Result<(), Problem> {
        let Take { vm, name, description, waiting } = self;
        let vm = session.vm(&vm).await?;
        let request = VmSnapshotCreate { uuid: None, name, description };
        session.print_created(session.client.vm_snapshot(vm, &request).await?, waiting).await
    }
}

impl List {
    /// Runs the verb and prints its output.
    pub async fn run(self, session: &Session) -> Result<(), Problem> {
        let vm = session.vm(&self.vm).await?;
        session.list(&session.client.vm_snapshots(vm, None).await?, COLUMNS, &self.listing)
    }
}

impl Destroy {
    /// Runs the verb and prints its output.
    pub async fn run(self, session: &Session) -> Result<(), Problem> {
        let vm = session.vm(&self.vm).await?;
        let snapshot = find(session, vm, &self.vm, &self.snapshot).await?;
        let shown = named("snapshot", snapshot.name.as_str(), snapshot.uuid);
        self.confirm.ask(&format!("destroy {shown} with the snapshots of its {} disks", snapshot.disks.len()))?;
        session.complete(session.client.vm_snapshot_destroy(vm, snapshot.uuid).await?, self.waiting).await
    }
}

impl Revert {
    /// Runs the verb and prints its output.
    pub async fn run(self, session: &Session) -> Result<(), Problem> {
        let vm = session.client.vm(session.vm(&self.vm).await?).await?;
        let snapshot = find(session, vm.uuid, &self.vm, &self.snapshot).await?;
        self.confirm.ask(&format!(
            "revert all disks of {} to {}; data written since then will be lost",
            named("vm", vm.name.as_str(), vm.uuid),
            named("snapshot", snapshot.name.as_str(), snapshot.uuid)
        ))?;
        let request = VmRevert { snapshot: snapshot.uuid };
        session.complete(session.client.vm_revert(vm.uuid, &request).await?, self.waiting).await
    }
}

impl Clone {
    /// Runs the verb and prints its output.
    pub async fn run(self, session: &Session) -> Result<(), Problem> {
        let Clone { vm: text, name, snapshot, description, waiting } = self;
        let vm = session.vm(&text).await?;
        let snapshot = match snapshot {
            Some(snapshot) => Some(find(session, vm, &text, &snapshot).await?.uuid),
            None => None,
        };
        let request = VmClone { uuid: None, name, description, snapshot };
        match session.outcome(session.client.vm_clone(vm, &request).await?, waiting).await? {
            Outcome::Done(result) => {
                if let Some(note) = result.get("note").and_then(serde_json::Value::as_str) {
                    say(&format!("tapline: {note}\n"));
                }
                print(&format!("{}\n", crate::attach::uuid(&result)?))
            }
            Outcome::Printed => Ok(()),
        }
    }
}

/// Finds a snapshot of a machine by its name or UUID prefix. `of` is the machine as named by the user.
pub async fn find(session: &Session, vm: Uuid, of: &str, text: &str) -> Result<VmSnapshot, Problem> {
    let mut found = session.client.vm_snapshots(vm, Some(text)).await?;
    if found.len() > 1 {
        let uuids: Vec<String> = found.iter().map(|snapshot| snapshot.uuid.to_string()).collect();
        let what = format!("'{text}' is ambiguous; it matches {} snapshots: {}", uuids.len(), uuids.join(", "));
        return Err(Problem::new(Code::Invalid, what).advise("give the UUID of the one you mean"));
    }
    found.pop().ok_or_else(|| {
        Problem::new(Code::NotFound, format!("the vm '{of}' has no snapshot named '{text}'"))
            .advise(format!("'tapline vm snapshots {of}' lists those that it has"))
    })
}
