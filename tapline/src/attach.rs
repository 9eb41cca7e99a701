//! Disks of a machine in one step: `vdi attach` and `vdi detach`, and what `vm create` does with its disks.
//!
//! What is already so is left as it is, so that a command can be given again.

use api::{
    Code, ImageFormat, Mode, Name, Problem, Size, SourceFormat, Vbd, VbdCreate, VbdState, VbdUnplug, VdiCreate,
    VdiImport,
};
use serde_json::Value;
use uuid::Uuid;

use crate::confirm::Confirm;
use crate::find::Disk;
use crate::output::say;
use crate::session::{Session, named, print};
use crate::vbd::{For, paste, release};
use crate::word::{self, HostPath};

/// `vdi attach`.
#[derive(clap::Args)]
pub struct Attach {
    /// The disk: its name or UUID prefix; with --new the name of the new one
    vdi: String,
    /// The machine: its name or UUID prefix [default: a machine that is managed elsewhere]
    #[arg(long)]
    vm: Option<String>,
    /// Make the disk first, of this size
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true, value_parser = word::size)]
    new: Option<Size>,
    /// The repository in which the disk is, or with --new is made [default: any; with --new the only attached
    /// one, ISO libraries aside]
    #[arg(long)]
    sr: Option<String>,
    /// With --new: the format [default: the repository's default]
    #[arg(long, requires = "new", value_parser = word::one_of::<ImageFormat>(&word::FORMATS))]
    format: Option<ImageFormat>,
    /// Access mode: RW or RO, read-only [default: what the disk allows]
    #[arg(long, value_parser = word::one_of::<Mode>(&word::MODES))]
    mode: Option<Mode>,
    /// Print the configuration to paste for a machine that is managed elsewhere, instead of the block device's UUID
    #[arg(long, value_enum, value_name = "FOR", conflicts_with = "vm")]
    print: Option<For>,
}

/// `vdi detach`.
#[derive(clap::Args)]
pub struct Detach {
    #[command(flatten)]
    vdi: Disk,
    /// Only from this machine: its name or UUID prefix
    #[arg(long)]
    vm: Option<String>,
    /// Do not wait for the guest to release the disk; unflushed data is lost
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    confirm: Confirm,
}

impl Attach {
    /// Runs the verb.
    pub async fn run(self, session: &Session) -> Result<(), Problem> {
        let Attach { vdi, vm, new, sr, format, mode, print: wanted } = self;
        let vm = session.vm_if(vm.as_deref()).await?;
        let vdi = match new {
            Some(size) => make(session, &vdi, size, sr.as_deref(), format).await?,
            None => session.vdi_in(session.sr_if(sr.as_deref()).await?, &vdi).await?,
        };
        let Given { vbd, is_new } = give(session, vdi, vm, mode).await?;
        let uuid = vbd.uuid;
        let vbd = match plug(session, vbd).await {
            Err(problem) if is_new => return Err(unmake(session, uuid, problem).await),
            plugged => plugged?,
        };
        match wanted {
            Some(to) => paste(session, &vbd, to.into()).await,
            None if session.json() => session.value(&vbd),
            None => print(&format!("{}\n", vbd.uuid)),
        }
    }
}

impl Detach {
    /// Runs the verb.
    pub async fn run(self, session: &Session) -> Result<(), Problem> {
        let vdi = self.vdi.find(session).await?;
        let vm = session.vm_if(self.vm.as_deref()).await?;
        let vbds = session.client.vbds(vm, Some(vdi), None).await?;
        if vbds.is_empty() {
            let vdi = session.client.vdi(vdi).await?;
            say(&format!("tapline: {} is not attached\n", named("disk", vdi.name.as_str(), vdi.uuid)));
        }
        release::prepare(session, &vbds, self.force, self.confirm).await?;
        for vbd in vbds {
            if vbd.state != VbdState::Unplugged {
                let asked = VbdUnplug { force: self.force };
                session.finish(session.client.vbd_unplug(vbd.uuid, &asked).await?).await?;
            }
            session.finish(session.client.vbd_destroy(vbd.uuid).await?).await?;
        }
        Ok(())
    }
}

/// Makes a disk, and waits for it.
pub async fn make(
    session: &Session,
    name: &str,
    size: Size,
    sr: Option<&str>,
    format: Option<ImageFormat>,
) -> Result<Uuid, Problem> {
    let (name, sr) = (disk_name(name)?, session.sr_or_only(sr).await?);
    let (description, allow_duplicate_name) = Default::default();
    let (tags, other_config) = Default::default();
    let asked = VdiCreate {
        uuid: None,
        sr,
        name,
        allow_duplicate_name,
        description,
        size,
        logical_block_size: None,
        format,
        tags,
        other_config,
    };
    uuid(&session.finish(session.client.vdi_create(&asked).await?).await?)
}

/// Makes a disk of an image file, and waits for it.
pub async fn import(
    session: &Session,
    name: &str,
    source_format: SourceFormat,
    path: HostPath,
    sr: Option<&str>,
) -> Result<Uuid, Problem> {
    let asked = VdiImport {
        uuid: None,
        sr: session.sr_or_only(sr).await?,
        name: disk_name(name)?,
        allow_duplicate_name: false,
        description: Default::default(),
        path: Some(session.path(path)?),
        upload: None,
        source_format,
        really_raw: false,
        logical_block_size: None,
        format: None,
        tags: Default::default(),
        other_config: Default::default(),
    };
    uuid(&session.finish(session.client.vdi_import(&asked).await?).await?)
}

fn disk_name(name: &str) -> Result<Name, Problem> {
    name.parse().map_err(|why| Problem::new(Code::Invalid, format!("'{name}': {why}")).field("name"))
}

/// The UUID of what was made.
pub fn uuid(made: &Value) -> Result<Uuid, Problem> {
    let uuid = made.get("uuid").and_then(Value::as_str).and_then(|uuid| uuid.parse().ok());
    uuid.ok_or_else(|| Problem::failed("read the answer", "it has no UUID"))
}

/// The block device by which a machine has a disk.
pub struct Given {
    vbd: Vbd,
    /// Whether there was none.
    is_new: bool,
}

/// The block device by which a machine has a disk, which is made if there is none.
pub async fn give(session: &Session, vdi: Uuid, vm: Option<Uuid>, mode: Option<Mode>) -> Result<Given, Problem> {
    let of_disk = session.client.vbds(vm, Some(vdi), None).await?;
    if let Some(vbd) = of_disk.into_iter().find(|vbd| vbd.vm == vm && mode.is_none_or(|mode| vbd.mode == mode)) {
        return Ok(Given { vbd, is_new: false });
    }
    let asked = VbdCreate {
        uuid: None,
        vm,
        vdi,
        position: None,
        mode,
        bootable: None,
        transport: None,
        queues: None,
        autostart: None,
        limits: None,
        share_weight: None,
        tags: Default::default(),
        other_config: Default::default(),
    };
    let made = session.finish(session.client.vbd_create(&asked).await?).await?;
    Ok(Given { vbd: session.client.vbd(uuid(&made)?).await?, is_new: true })
}

/// Removes a block device that was made only to be plugged, which failed because of `problem`.
async fn unmake(session: &Session, vbd: Uuid, problem: Problem) -> Problem {
    let removed = async { session.finish(session.client.vbd_destroy(vbd).await?).await };
    match removed.await {
        Ok(_) => problem,
        Err(also) => problem.advise(format!("its block device {vbd} is still there: {also}")),
    }
}

/// Plugs a block device, unless it is plugged; as it is then.
async fn plug(session: &Session, vbd: Vbd) -> Result<Vbd, Problem> {
    if vbd.state == VbdState::Plugged {
        return Ok(vbd);
    }
    session.finish(session.client.vbd_plug(vbd.uuid).await?).await?;
    session.client.vbd(vbd.uuid).await
}
