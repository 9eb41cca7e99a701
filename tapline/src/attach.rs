//! Attaches and detaches a machine's disks in one step: `vdi attach` and `vdi detach`, and the disks of `vm create`.
//!
//! Every step is idempotent: a command can be repeated.

use api::{
    Code, ImageFormat, Mode, Name, Problem, Size, SourceFormat, Vbd, VbdCreate, VbdState, VbdUnplug, VdiCreate,
    VdiImport,
};
use serde_json::Value;
use uuid::Uuid;

use crate::confirm::Confirm;
use crate::find::Disk;
use crate::image_source::{ImageSource, Verified};
use crate::output::say;
use crate::session::{Session, named, print};
use crate::vbd::{VmManager, paste, release};
use crate::word;

/// Arguments of `vdi attach`.
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
    print: Option<VmManager>,
}

/// Arguments of `vdi detach`.
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
    /// Runs the verb and prints its output.
    pub async fn run(self, session: &Session) -> Result<(), Problem> {
        let Attach { vdi, vm, new, sr, format, mode, print: wanted } = self;
        let vm = session.vm_if(vm.as_deref()).await?;
        let vdi = match new {
            Some(size) => make(session, &vdi, size, sr.as_deref(), format).await?,
            None => session.vdi_in(session.sr_if(sr.as_deref()).await?, &vdi).await?,
        };
        let Attachment { vbd, is_new } = ensure_vbd(session, vdi, vm, mode).await?;
        let uuid = vbd.uuid;
        let vbd = match plug(session, vbd).await {
            Err(problem) if is_new => return Err(remove_vbd(session, uuid, problem).await),
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
    /// Runs the verb and prints its output.
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
                let request = VbdUnplug { force: self.force };
                session.finish(session.client.vbd_unplug(vbd.uuid, &request).await?).await?;
            }
            session.finish(session.client.vbd_destroy(vbd.uuid).await?).await?;
        }
        Ok(())
    }
}

/// Creates an empty disk and waits for it; returns its UUID.
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
    let request = VdiCreate {
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
    uuid(&session.finish(session.client.vdi_create(&request).await?).await?)
}

/// Creates a disk from an image and waits for it; returns its UUID.
pub async fn import(
    session: &Session,
    name: &str,
    (source_format, source): (SourceFormat, ImageSource),
    verified: Verified,
    sr: Option<&str>,
) -> Result<Uuid, Problem> {
    source.check(&verified)?;
    let (path, url) = source.of_request(session)?;
    let Verified { checksum, insecure_http } = verified;
    let request = VdiImport {
        uuid: None,
        sr: session.sr_or_only(sr).await?,
        name: disk_name(name)?,
        allow_duplicate_name: false,
        description: Default::default(),
        path,
        upload: None,
        url,
        checksum,
        insecure_http,
        source_format,
        really_raw: false,
        logical_block_size: None,
        format: None,
        tags: Default::default(),
        other_config: Default::default(),
    };
    uuid(&session.finish(session.client.vdi_import(&request).await?).await?)
}

fn disk_name(name: &str) -> Result<Name, Problem> {
    name.parse().map_err(|why| Problem::new(Code::Invalid, format!("'{name}': {why}")).field("name"))
}

/// The UUID in the result of a create verb.
pub fn uuid(made: &Value) -> Result<Uuid, Problem> {
    let uuid = made.get("uuid").and_then(Value::as_str).and_then(|uuid| uuid.parse().ok());
    uuid.ok_or_else(|| Problem::failed("read the answer", "it has no UUID"))
}

/// A machine's block device for a disk.
pub struct Attachment {
    vbd: Vbd,
    /// True if it was created by this command.
    is_new: bool,
}

/// Returns the block device that connects a disk to a machine, and creates it if necessary.
pub async fn ensure_vbd(
    session: &Session,
    vdi: Uuid,
    vm: Option<Uuid>,
    mode: Option<Mode>,
) -> Result<Attachment, Problem> {
    let of_disk = session.client.vbds(vm, Some(vdi), None).await?;
    if let Some(vbd) = of_disk.into_iter().find(|vbd| vbd.vm == vm && mode.is_none_or(|mode| vbd.mode == mode)) {
        return Ok(Attachment { vbd, is_new: false });
    }
    let request = VbdCreate {
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
    let made = session.finish(session.client.vbd_create(&request).await?).await?;
    Ok(Attachment { vbd: session.client.vbd(uuid(&made)?).await?, is_new: true })
}

/// Removes a block device that was created only to be plugged, after the plug failed with `problem`.
async fn remove_vbd(session: &Session, vbd: Uuid, problem: Problem) -> Problem {
    let removed = async { session.finish(session.client.vbd_destroy(vbd).await?).await };
    match removed.await {
        Ok(_) => problem,
        Err(also) => problem.advise(format!("its block device {vbd} is still there: {also}")),
    }
}

/// Plugs a block device unless it is plugged; returns its new state.
async fn plug(session: &Session, vbd: Vbd) -> Result<Vbd, Problem> {
    if vbd.state == VbdState::Plugged {
        return Ok(vbd);
    }
    session.finish(session.client.vbd_plug(vbd.uuid).await?).await?;
    session.client.vbd(vbd.uuid).await
}
