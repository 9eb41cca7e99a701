//! `tapline vdi`: virtual disks.

mod backup;
mod cbt;
mod make;
mod schedule;
mod shown;
mod source_format;
mod tree;

use api::{
    Believed, Code, Description, ImageFormat, LogicalBlockSize, Name, ObjectKind, Problem, Size, VdiDestroyPlan,
    VdiExport, VdiPatch, VdiReconcile, VdiResize, VdiRevert,
};
use arguments::NewSize;
use uuid::Uuid;

use crate::attach::{Attach, Detach};
use crate::column::Names;
use crate::confirm::Confirm;
use crate::find::Disk;
use crate::label::{ChangeLabels, WithTags};
use crate::session::{Listing, Session, Waiting, named};
use crate::transfer::{self, Fetched};
use crate::word::ImageFile;
use crate::{removal, word};
use backup::{Backup, Restore};
use make::{Branch, Copy, Create, Import};
use shown::COLUMNS;

/// Operations on virtual disks.
#[derive(clap::Subcommand)]
pub enum VdiVerb {
    /// Create an empty disk and print its UUID
    Create(Create),
    /// List the disks
    #[command(visible_alias = "ls")]
    List {
        /// Only those with this name or UUID prefix
        #[arg(value_parser = word::listed("vdi"))]
        text: Option<String>,
        /// Only those in this repository
        #[arg(long)]
        sr: Option<String>,
        #[command(flatten)]
        tags: WithTags,
        #[command(flatten)]
        listing: Listing,
    },
    /// List disks with their snapshots and clones below them, and the space that each takes by itself
    Tree(tree::Tree),
    /// Show a disk
    Show(Disk),
    /// Change a disk's name, description, tags, sectors or read-only flag
    Set(Set),
    /// Attach a disk to a machine (creating and plugging the block device if needed), and print the block device's UUID
    Attach(Attach),
    /// Detach a disk from its machines: its block devices are unplugged and removed; the disk stays
    Detach(Detach),
    /// Grow a disk; it may be plugged
    Resize {
        #[command(flatten)]
        vdi: Disk,
        /// New size seen by the guest, at least the current one; +SIZE: that much more
        #[arg(required_unless_present = "size_option", conflicts_with = "size_option")]
        size: Option<NewSize>,
        /// The size, as an option
        #[arg(long = "size", value_name = "SIZE", allow_hyphen_values = true)]
        size_option: Option<NewSize>,
        #[command(flatten)]
        waiting: Waiting,
    },
    /// Take a read-only snapshot of a disk and print its UUID; the disk may be plugged
    Snapshot(Branch),
    /// Create a writable clone of a disk and print its UUID
    Clone(Branch),
    /// Schedule snapshots or backups of a disk and set how many to retain
    Schedule(schedule::Schedule),
    /// Protect a snapshot from its schedule: it stays until you destroy it
    Pin(schedule::Pin),
    /// Revert a disk to a snapshot; data written since then is lost
    Revert(Revert),
    /// Record which blocks of a disk change, for incremental backups
    #[command(subcommand)]
    Cbt(cbt::CbtVerb),
    /// List the parts of a disk or a snapshot that may differ from an earlier snapshot
    Changed(cbt::Changed),
    /// Make a full copy of a disk and print its UUID
    Copy(Copy),
    /// Create a disk from a file on the host and print its UUID
    Import(Import),
    /// Write a disk, including its backing chain, to a new file on the host
    Export {
        #[command(flatten)]
        vdi: Disk,
        /// The file on the daemon's host, which must not exist; '-' writes to the standard output, and takes space in
        /// the disk's repository meanwhile
        #[arg(value_parser = word::image_file)]
        path: ImageFile,
        /// Format of the file
        #[arg(long, value_parser = word::one_of::<ImageFormat>(&word::FORMATS))]
        format: ImageFormat,
        #[command(flatten)]
        waiting: Waiting,
    },
    /// Back a disk up to a target and print the backup's ID; the disk may be plugged
    Backup(Backup),
    /// Restore a backup to a new disk and print its UUID; or replace the contents of a disk
    Restore(Restore),
    /// Shorten a disk's backing chain; it may be plugged
    Merge {
        #[command(flatten)]
        vdi: Disk,
        #[command(flatten)]
        waiting: Waiting,
    },
    /// Resolve a diverged disk, whose running process and catalogue entry disagree
    Reconcile(Reconcile),
    /// Destroy the data of a snapshot; the changes since it can still be listed
    DataDestroy(DataDestroy),
    /// Destroy a disk; images shared with other disks stay
    #[command(visible_alias = "rm", aliases = ["delete", "remove"])]
    Destroy(Destroy),
}

/// Arguments of `vdi set`.
#[derive(clap::Args)]
#[command(group = word::changes(&["name", "description", "read_only", "logical_block_size", "tag", "no_tag", "config", "no_config"]))]
#[group(skip)]
pub struct Set {
    #[command(flatten)]
    vdi: Disk,
    /// New name
    #[arg(long)]
    name: Option<Name>,
    /// New description
    #[arg(long, value_name = "TEXT")]
    description: Option<Description>,
    /// Whether the disk is read-only; cannot be changed while it is plugged
    #[arg(long, value_name = "BOOL")]
    read_only: Option<bool>,
    /// Size in bytes of the sectors with which the disk was partitioned; cannot be changed while it is plugged
    #[arg(long, value_name = "BYTES", value_parser = word::block_size())]
    logical_block_size: Option<LogicalBlockSize>,
    #[command(flatten)]
    labels: ChangeLabels,
}

/// Arguments of `vdi revert`.
#[derive(clap::Args)]
pub struct Revert {
    #[command(flatten)]
    vdi: Disk,
    /// The snapshot: its name or UUID prefix
    #[arg(long)]
    snapshot: String,
    #[command(flatten)]
    confirm: Confirm,
    #[command(flatten)]
    waiting: Waiting,
}

/// Arguments of `vdi reconcile`.
#[derive(clap::Args)]
pub struct Reconcile {
    #[command(flatten)]
    vdi: Disk,
    /// Which side is right: the running disk, or the catalogue, which the next plug then uses
    #[arg(long, value_parser = word::one_of::<Believed>(&["disk", "catalogue"]))]
    believe: Believed,
    #[command(flatten)]
    confirm: Confirm,
}

/// Arguments of `vdi data-destroy`.
#[derive(clap::Args)]
pub struct DataDestroy {
    /// The snapshot: its name or UUID prefix
    #[command(flatten)]
    snapshot: Disk,
    #[command(flatten)]
    confirm: Confirm,
    #[command(flatten)]
    waiting: Waiting,
}

/// Arguments of `vdi destroy`.
#[derive(clap::Args)]
pub struct Destroy {
    #[command(flatten)]
    vdi: Disk,
    /// Only report what would be destroyed
    #[arg(long)]
    dry_run: bool,
    #[command(flatten)]
    confirm: Confirm,
    #[command(flatten)]
    waiting: Waiting,
}

impl VdiVerb {
    /// Runs the verb and prints its output.
    pub async fn run(self, session: &Session) -> Result<(), Problem> {
        let client = &session.client;
        match self {
            VdiVerb::Create(create) => create.run(session).await,
            VdiVerb::List { text, sr, tags, listing } => {
                list(session, text.as_deref(), sr.as_deref(), &tags, &listing).await
            }
            VdiVerb::Tree(tree) => tree.run(session).await,
            VdiVerb::Show(vdi) => session.show(&client.vdi(vdi.find(session).await?).await?, COLUMNS),
            VdiVerb::Set(set) => set.run(session).await,
            VdiVerb::Resize { vdi, size, size_option, waiting } => {
                let Some(size) = size.or(size_option) else { unreachable!("one of them is required") };
                let vdi = vdi.find(session).await?;
                let size = new_size(session, vdi, size).await?;
                session.complete(client.vdi_resize(vdi, &VdiResize { size }).await?, waiting).await
            }
            VdiVerb::Attach(attach) => attach.run(session).await,
            VdiVerb::Detach(detach) => detach.run(session).await,
            VdiVerb::Snapshot(branch) => branch.snapshot(session).await,
            VdiVerb::Clone(branch) => branch.clone(session).await,
            VdiVerb::Schedule(schedule) => schedule.run(session).await,
            VdiVerb::Pin(pin) => pin.run(session).await,
            VdiVerb::Revert(revert) => revert.run(session).await,
            VdiVerb::Cbt(verb) => verb.run(session).await,
            VdiVerb::Changed(changed) => changed.run(session).await,
            VdiVerb::Copy(copy) => copy.run(session).await,
            VdiVerb::Import(import) => import.run(session).await,
            VdiVerb::Export { vdi, path: ImageFile::Host(path), format, waiting } => {
                let (vdi, path) = (vdi.find(session).await?, session.path(path)?);
                let asked = VdiExport { path: Some(path), download: false, format };
                session.complete(client.vdi_export(vdi, &asked).await?, waiting).await
            }
            VdiVerb::Export { vdi, path: ImageFile::Standard, format, waiting } => {
                waiting.must_wait("an export to the standard output")?;
                transfer::must_not_be_terminal(&std::io::stdout())?;
                let vdi = vdi.find(session).await?;
                let fetched = Fetched::export(session, vdi, format).await?;
                fetched.write_to(session, "writing the disk", &mut tokio::io::stdout(), |_| {}).await
            }
            VdiVerb::Backup(backup) => backup.run(session).await,
            VdiVerb::Restore(restore) => restore.run(session).await,
            VdiVerb::Merge { vdi, waiting } => {
                session.complete(client.vdi_merge(vdi.find(session).await?).await?, waiting).await
            }
            VdiVerb::Reconcile(reconcile) => reconcile.run(session).await,
            VdiVerb::DataDestroy(destroy) => destroy.run(session).await,
            VdiVerb::Destroy(destroy) => destroy.run(session).await,
        }
    }
}

/// The new size of a disk in bytes.
async fn new_size(session: &Session, vdi: Uuid, size: NewSize) -> Result<Size, Problem> {
    let current = match size {
        NewSize::To(_) => 0,
        NewSize::By(_) => session.client.vdi(vdi).await?.size,
    };
    let bytes = size.from(current).ok_or_else(|| "no disk can be that large".to_owned());
    let size = bytes.and_then(Size::try_from);
    size.map_err(|why| Problem::new(Code::Invalid, why).advise("write 10G for 10 GiB, or +10G for 10 GiB more"))
}

async fn list(
    session: &Session,
    text: Option<&str>,
    sr: Option<&str>,
    tags: &WithTags,
    listing: &Listing,
) -> Result<(), Problem> {
    let sr = session.sr_if(sr).await?;
    let vdis = session.client.vdis_tagged(sr, text, &tags.tag).await?;
    let listed: Names = vdis.iter().map(|vdi| (vdi.uuid, vdi.name.to_string())).collect();
    // The disk of a snapshot may not be in the list.
    let are_known = vdis.iter().filter_map(|vdi| vdi.snapshot_of).all(|of| listed.contains_key(&of));
    let kinds: &[ObjectKind] = if are_known { &[ObjectKind::Sr] } else { &[ObjectKind::Sr, ObjectKind::Vdi] };
    session.list_named(&vdis, COLUMNS, listing, kinds, listed).await
}

impl Set {
    async fn run(self, session: &Session) -> Result<(), Problem> {
        let Set { vdi, name, description, read_only, logical_block_size, labels } = self;
        let uuid = vdi.find(session).await?;
        let now = match labels.changes_some() {
            true => session.client.vdi(uuid).await.map(|vdi| (vdi.tags, vdi.other_config))?,
            false => Default::default(),
        };
        let (tags, other_config) = labels.of(now)?;
        let patch =
            VdiPatch { name, description, read_only, logical_block_size, tags, other_config, ..VdiPatch::default() };
        let vdi = session.client.vdi_set(uuid, &patch).await?;
        if session.json() { session.value(&vdi) } else { Ok(()) }
    }
}

impl Revert {
    async fn run(self, session: &Session) -> Result<(), Problem> {
        let vdi = session.client.vdi(self.vdi.find(session).await?).await?;
        let snapshot = session.client.vdi(session.snapshot_of(vdi.uuid, &self.snapshot).await?).await?;
        self.confirm.ask(&format!(
            "revert {} to {}; data written since then will be lost",
            named("disk", vdi.name.as_str(), vdi.uuid),
            named("snapshot", snapshot.name.as_str(), snapshot.uuid)
        ))?;
        let request = VdiRevert { snapshot: snapshot.uuid };
        session.complete(session.client.vdi_revert(vdi.uuid, &request).await?, self.waiting).await
    }
}

impl Reconcile {
    async fn run(self, session: &Session) -> Result<(), Problem> {
        let vdi = session.client.vdi(self.vdi.find(session).await?).await?;
        let lost = match self.believe {
            Believed::Disk => "VDIs backed by files that are no longer in its chain will be marked damaged",
            Believed::Catalogue => "data written to other files will not be part of it",
        };
        let disk = named("disk", vdi.name.as_str(), vdi.uuid);
        self.confirm.ask(&format!("believe {} about {disk}: {lost}", word::of(&self.believe)))?;
        let vdi = session.client.vdi_reconcile(vdi.uuid, &VdiReconcile { believe: self.believe }).await?;
        if session.json() { session.value(&vdi) } else { Ok(()) }
    }
}

impl DataDestroy {
    async fn run(self, session: &Session) -> Result<(), Problem> {
        let vdi = session.client.vdi(self.snapshot.find(session).await?).await?;
        self.confirm.ask(&format!("destroy the data of {}", named("snapshot", vdi.name.as_str(), vdi.uuid)))?;
        session.complete(session.client.vdi_data_destroy(vdi.uuid).await?, self.waiting).await
    }
}

impl Destroy {
    async fn run(self, session: &Session) -> Result<(), Problem> {
        let vdi = session.client.vdi(self.vdi.find(session).await?).await?;
        if self.dry_run {
            let what = named("disk", vdi.name.as_str(), vdi.uuid);
            let plan = session.client.vdi_destroy(vdi.uuid, true).await?;
            return removal::show::<VdiDestroyPlan>(session, &what, plan, self.waiting).await;
        }
        self.confirm.ask(&format!("destroy {}", named("disk", vdi.name.as_str(), vdi.uuid)))?;
        session.complete(session.client.vdi_destroy(vdi.uuid, false).await?, self.waiting).await
    }
}
