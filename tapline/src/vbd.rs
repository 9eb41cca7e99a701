//! `tapline vbd`: virtual block devices.

mod limit;
pub mod release;
mod share;
mod upgrade;

use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use api::client::Connector;
use api::{Autostart, Code, Mode, ObjectKind, Problem, Transport, Vbd, VbdCreate, VbdPatch, VbdState, VbdUnplug, Vbds};
use arguments::{LimitWords, number};
use jiff::Timestamp;
use uuid::Uuid;

use crate::column::{Column, Names};
use crate::confirm::Confirm;
use crate::health;
use crate::label::{self, ChangeLabels, NewLabels, WithTags};
use crate::output::say;
use crate::session::{Listing, Session, Waiting, print};
use crate::word;

/// Operations on virtual block devices.
#[derive(clap::Subcommand)]
pub enum VbdVerb {
    /// Create a block device for a disk and print its UUID; it is not plugged yet
    Create(Create),
    /// List the block devices
    #[command(visible_alias = "ls")]
    List {
        /// Only those with this UUID prefix
        #[arg(value_parser = word::listed("vbd"))]
        text: Option<String>,
        /// Only those of this machine
        #[arg(long)]
        vm: Option<String>,
        /// Only those of this disk
        #[arg(long)]
        vdi: Option<String>,
        #[command(flatten)]
        tags: WithTags,
        #[command(flatten)]
        listing: Listing,
    },
    /// Show a block device
    Show {
        /// UUID prefix, VM/vda, or the disk's name
        vbd: String,
    },
    /// Change the tags of a block device, or autostart of one whose machine is managed elsewhere
    Set(Set),
    /// Start the process that serves the disk, and attach it to its machine if that is running
    Plug {
        #[command(flatten)]
        which: VbdSelection,
        #[command(flatten)]
        waiting: Waiting,
    },
    /// Detach the disk from its machine, flush everything and stop the process that serves it
    Unplug {
        #[command(flatten)]
        which: VbdSelection,
        /// Do not wait for the guest to release the disk; unflushed data is lost
        #[arg(long)]
        force: bool,
        #[command(flatten)]
        confirm: Confirm,
        #[command(flatten)]
        waiting: Waiting,
    },
    /// Replace the process that serves the disk with the installed program, without interrupting the guest
    Upgrade(upgrade::Upgrade),
    /// Limit requests and bytes per second of the disk, at once if it is plugged
    Limit(limit::Limit),
    /// Set how much of its storage the disk gets while other disks use it too, at once if it is plugged
    Share(share::Share),
    /// Remove an unplugged block device; its disk stays
    #[command(visible_alias = "rm", aliases = ["delete", "remove"])]
    Destroy(OneVbd),
    /// Print the configuration to paste for a machine that is managed elsewhere
    Connect {
        /// UUID prefix, VM/vda, or the disk's name
        vbd: String,
        /// The machine monitor or manager to configure
        #[arg(long, value_enum)]
        r#for: VmManager,
    },
}

/// A machine monitor or manager.
#[derive(Clone, Copy, Debug, clap::ValueEnum)]
pub enum VmManager {
    /// QEMU before 10.2, as command-line options
    Qemu,
    /// QEMU 9.2 and later, as command-line options: reconnects within 0.1 s after the disk's process restarts, not 1 s
    #[value(name = "qemu-9.2")]
    Qemu92,
    /// libvirt, as domain XML; 'virsh start' waits forever if QEMU's user may not open the socket (check with 'tapline
    /// doctor')
    Libvirt,
    /// libvirt, as a device's XML: a file for 'virsh attach-device'
    LibvirtDevice,
    /// Cloud Hypervisor, as command-line options
    CloudHypervisor,
    /// xl, as a line of the domain's configuration
    Xl,
}

/// One block device, several, or all of a machine.
#[derive(clap::Args)]
#[group(required = true, multiple = false)]
pub struct VbdSelection {
    /// UUID prefix, VM/vda, or the disk's name; several are plugged or unplugged in parallel
    vbd: Vec<String>,
    /// All block devices of this machine: its name or UUID prefix
    #[arg(long)]
    vm: Option<String>,
}

/// Arguments of a verb without options of its own.
#[derive(clap::Args)]
pub struct OneVbd {
    /// UUID prefix, VM/vda, or the disk's name
    vbd: String,
    #[command(flatten)]
    waiting: Waiting,
}

/// Arguments of `vbd create`.
#[derive(clap::Args)]
pub struct Create {
    /// The disk: its name or UUID prefix
    #[arg(long)]
    vdi: String,
    /// The machine: its name or UUID prefix [default: a machine that is managed elsewhere]
    #[arg(long)]
    vm: Option<String>,
    /// Position among the machine's disks, 0 to 254 [default: the first free one]
    #[arg(long, value_name = "N", value_parser = number::<u8>(0..=254))]
    position: Option<u8>,
    /// Access mode: RW or RO, read-only [default: what the disk allows]
    #[arg(long, value_parser = word::one_of::<Mode>(&word::MODES))]
    mode: Option<Mode>,
    /// Whether the machine may boot from it [default: only from its first disk]
    #[arg(long, value_name = "BOOL")]
    bootable: Option<bool>,
    /// Transport [default: what the machine's driver needs, otherwise vhost-user]
    #[arg(long, value_parser = word::one_of::<Transport>(&word::TRANSPORTS))]
    transport: Option<Transport>,
    /// Number of queues offered to the guest, 1 to 64 [default: one per processor, at most 4]
    #[arg(long, value_name = "N", value_parser = number::<u16>(1..=64))]
    queues: Option<u16>,
    /// Plug it when the host boots: order, delay before the next ones in seconds, number of tries; only for machines
    /// that are managed elsewhere
    #[arg(long, value_name = word::AUTOSTART, value_parser = word::autostart, num_args = 0..=1, require_equals = true, default_missing_value = "")]
    autostart: Option<Autostart>,
    /// How much of its storage the disk gets while other disks use it too: with twice the weight twice as much
    /// [default: 100]
    #[arg(long, value_name = "N", value_parser = number::<u32>(1..=10_000))]
    share_weight: Option<u32>,
    #[command(flatten)]
    limits: LimitWords,
    #[command(flatten)]
    labels: NewLabels,
    #[command(flatten)]
    waiting: Waiting,
}

/// Arguments of `vbd set`.
#[derive(clap::Args)]
#[command(group = word::changes(&["autostart", "no_autostart", "tag", "no_tag", "config", "no_config"]))]
#[group(skip)]
pub struct Set {
    /// UUID prefix, VM/vda, or the disk's name
    vbd: String,
    /// Plug it when the host boots: order, delay before the next ones in seconds, number of tries
    #[arg(long, value_name = word::AUTOSTART, value_parser = word::autostart, num_args = 0..=1, require_equals = true, default_missing_value = "")]
    autostart: Option<Autostart>,
    /// Do not plug it when the host boots
    #[arg(long, conflicts_with = "autostart")]
    no_autostart: bool,
    #[command(flatten)]
    labels: ChangeLabels,
}

type VbdColumn = Column<Vbd>;

/// A recorded problem that the health does not show, such as the last exit of a process that was replaced.
fn last_problem(vbd: &Vbd) -> String {
    let problem = vbd.problem.as_ref().filter(|problem| vbd.health.reason.as_ref() != Some(&problem.detail));
    problem.map(|problem| problem.detail.clone()).unwrap_or_default()
}

const COLUMNS: &[VbdColumn] = &[
    VbdColumn::new("uuid", |vbd, uuids| uuids.show(vbd.uuid)),
    VbdColumn::new("vm", |vbd, uuids| match vbd.vm {
        Some(vm) => uuids.named(vm),
        None if vbd.for_nbd_address => "NBD address".into(),
        None => "-".into(),
    }),
    VbdColumn::new("vdi", |vbd, uuids| uuids.named(vbd.vdi)),
    VbdColumn::new("position", |vbd, _| vbd.position.to_string()).right().if_room(),
    VbdColumn::new("mode", |vbd, _| word::of(&vbd.mode)),
    VbdColumn::new("state", |vbd, _| health::with_state(word::of(&vbd.state), &vbd.health)),
    VbdColumn::new("transport", |vbd, _| word::of(&vbd.transport)).if_room(),
    VbdColumn::new("queues", |vbd, _| vbd.queues.to_string()).right().if_room(),
    VbdColumn::new("socket", |vbd, _| vbd.socket.as_ref().map(ToString::to_string).unwrap_or_default()).if_room(),
    VbdColumn::new("bootable", |vbd, _| vbd.bootable.to_string()).wide(),
    VbdColumn::new("weight", |vbd, _| vbd.share_weight.to_string()).right().wide(),
    VbdColumn::new("tags", |vbd, _| label::shown(&vbd.tags)).wide(),
    VbdColumn::new("other config", |vbd, _| label::lines(&vbd.other_config)).alone(),
    VbdColumn::new("pid", |vbd, _| vbd.pid.map(|pid| pid.to_string()).unwrap_or_default()).right().wide(),
    VbdColumn::new("restarts", |vbd, _| vbd.restarts.to_string()).right().wide(),
    VbdColumn::new("health", |vbd, _| health::in_words(&vbd.health, Timestamp::now())).alone(),
    VbdColumn::new("reason", |vbd, _| vbd.health.reason.clone().unwrap_or_default()).alone(),
    VbdColumn::new("advice", |vbd, _| vbd.health.advice.clone().unwrap_or_default()).alone(),
    VbdColumn::new("last problem", |vbd, _| last_problem(vbd)).alone(),
    VbdColumn::new("autostart", |vbd, _| vbd.autostart.as_ref().map(word::of_autostart).unwrap_or_default()).alone(),
    VbdColumn::new("limits", |vbd, _| vbd.limits.as_ref().map(limit::shown).unwrap_or_default()).alone(),
    VbdColumn::new("created", |vbd, _| format!("{:.0}", vbd.created)).alone(),
];

/// Prints the configuration to paste into a machine's definition, and who may open the disk's socket.
pub async fn paste(session: &Session, vbd: &Vbd, connector: Connector) -> Result<(), Problem> {
    print(&session.client.vbd_connect(vbd.uuid, connector).await?)?;
    // A Xen guest has a node instead of a file, and the socket of another host cannot be examined here.
    if let (false, Some(socket)) = (session.is_remote(), &vbd.socket) {
        if let Ok(file) = std::fs::metadata(socket.as_path()) {
            say(&openers(socket.as_path(), &file));
        }
    }
    Ok(())
}

/// Describes who may open a socket.
fn openers(socket: &Path, file: &Metadata) -> String {
    let socket = socket.display();
    let for_group = file.mode() & 0o060 == 0o060 && file.gid() != 0;
    if !for_group {
        return format!(
            "note: only root may open {socket}; for a machine of another user set socket-group in the section \
             [plug] of taplined.toml, restart taplined, and plug the disk again\n"
        );
    }
    let groups = std::fs::read_to_string("/etc/group").unwrap_or_default();
    let gid = file.gid().to_string();
    let name = groups.lines().find_map(|line| {
        let mut fields = line.split(':');
        let name = fields.next()?;
        (fields.nth(1) == Some(&gid)).then(|| name.to_owned())
    });
    let name = name.unwrap_or(gid);
    format!("note: only root and the group {name} may open {socket}: the machine's user must be in it\n")
}

impl From<VmManager> for Connector {
    fn from(connector: VmManager) -> Connector {
        match connector {
            VmManager::Qemu => Connector::Qemu,
            VmManager::Qemu92 => Connector::Qemu92,
            VmManager::Libvirt => Connector::Libvirt,
            VmManager::LibvirtDevice => Connector::LibvirtDevice,
            VmManager::CloudHypervisor => Connector::CloudHypervisor,
            VmManager::Xl => Connector::Xl,
        }
    }
}

impl VbdVerb {
    /// Runs the verb and prints its output.
    pub async fn run(self, session: &Session) -> Result<(), Problem> {
        let client = &session.client;
        match self {
            VbdVerb::Create(create) => create.run(session).await,
            VbdVerb::List { text, vm, vdi, tags, listing } => list(session, text, (vm, vdi), &tags, &listing).await,
            VbdVerb::Show { vbd } => session.show(&client.vbd(session.vbd(&vbd).await?).await?, COLUMNS),
            VbdVerb::Set(set) => set.run(session).await,
            VbdVerb::Plug { which, waiting } => plug(session, which, waiting).await,
            VbdVerb::Unplug { which, force, confirm, waiting } => unplug(session, which, force, confirm, waiting).await,
            VbdVerb::Upgrade(upgrade) => upgrade.run(session).await,
            VbdVerb::Limit(limit) => limit.run(session).await,
            VbdVerb::Share(share) => share.run(session).await,
            VbdVerb::Destroy(OneVbd { vbd, waiting }) => {
                session.complete(client.vbd_destroy(session.vbd(&vbd).await?).await?, waiting).await
            }
            VbdVerb::Connect { vbd, r#for: connector } => {
                let vbd = client.vbd(session.vbd(&vbd).await?).await?;
                paste(session, &vbd, connector.into()).await
            }
        }
    }
}

impl Set {
    async fn run(self, session: &Session) -> Result<(), Problem> {
        let autostart = if self.no_autostart { Some(None) } else { self.autostart.map(Some) };
        let uuid = session.vbd(&self.vbd).await?;
        let now = match self.labels.changes_some() {
            true => session.client.vbd(uuid).await.map(|vbd| (vbd.tags, vbd.other_config))?,
            false => Default::default(),
        };
        let (tags, other_config) = self.labels.of(now)?;
        let vbd = session.client.vbd_set(uuid, &VbdPatch { autostart, tags, other_config }).await?;
        if session.json() { session.value(&vbd) } else { Ok(()) }
    }
}

async fn plug(session: &Session, which: VbdSelection, waiting: Waiting) -> Result<(), Problem> {
    if let ([vbd], None) = (which.vbd.as_slice(), &which.vm) {
        let vbd = session.vbd(vbd).await?;
        return match session.client.vbd_plug(vbd).await {
            Err(problem) => session.accept_if_already(vbd, VbdState::Plugged, problem).await,
            Ok(answer) => session.complete(answer, waiting).await,
        };
    }
    session.complete(session.client.vbds_plug(&which.many(session, false).await?).await?, waiting).await
}

async fn unplug(
    session: &Session,
    which: VbdSelection,
    force: bool,
    confirm: Confirm,
    waiting: Waiting,
) -> Result<(), Problem> {
    if let ([vbd], None) = (which.vbd.as_slice(), &which.vm) {
        let vbd = session.vbd(vbd).await?;
        release::prepare(session, &[session.client.vbd(vbd).await?], force, confirm).await?;
        return match session.client.vbd_unplug(vbd, &VbdUnplug { force }).await {
            Err(problem) => session.accept_if_already(vbd, VbdState::Unplugged, problem).await,
            Ok(answer) => session.complete(answer, waiting).await,
        };
    }
    let many = which.many(session, force).await?;
    let mut vbds = session.client.vbds(many.vm, None, None).await?;
    vbds.retain(|vbd| many.vbds.as_ref().is_none_or(|selected| selected.contains(&vbd.uuid)));
    release::prepare(session, &vbds, force, confirm).await?;
    session.complete(session.client.vbds_unplug(&many).await?, waiting).await
}

impl Session {
    /// Accepts a refusal if the block device is in the wanted state already.
    async fn accept_if_already(&self, vbd: Uuid, wanted: VbdState, refused: Problem) -> Result<(), Problem> {
        if refused.code != Code::State {
            return Err(refused);
        }
        let found = self.client.vbd(vbd).await?;
        match found.state == wanted {
            true if self.json() => self.value(&found),
            true => Ok(()),
            false => Err(refused),
        }
    }
}

impl VbdSelection {
    /// Converts the selection to the API's type.
    async fn many(self, session: &Session, force: bool) -> Result<Vbds, Problem> {
        if let Some(vm) = self.vm {
            return Ok(Vbds { vm: Some(session.vm(&vm).await?), vbds: None, force });
        }
        let mut vbds = Vec::new();
        for vbd in &self.vbd {
            vbds.push(session.vbd(vbd).await?);
        }
        Ok(Vbds { vm: None, vbds: Some(vbds), force })
    }
}

async fn list(
    session: &Session,
    text: Option<String>,
    (vm, vdi): (Option<String>, Option<String>),
    tags: &WithTags,
    listing: &Listing,
) -> Result<(), Problem> {
    let vm = session.vm_if(vm.as_deref()).await?;
    let vdi = session.vdi_if(vdi.as_deref()).await?;
    let vbds = session.client.vbds_tagged(vm, vdi, text.as_deref(), &tags.tag).await?;
    session.list_named(&vbds, COLUMNS, listing, &[ObjectKind::Vm, ObjectKind::Vdi], Names::new()).await
}

impl Create {
    async fn run(self, session: &Session) -> Result<(), Problem> {
        let vm = session.vm_if(self.vm.as_deref()).await?;
        let (tags, other_config) = self.labels.values()?;
        let request = VbdCreate {
            uuid: None,
            vm,
            vdi: session.vdi(&self.vdi).await?,
            position: self.position,
            mode: self.mode,
            bootable: self.bootable,
            transport: self.transport,
            queues: self.queues,
            autostart: self.autostart,
            limits: limit::of_words(&self.limits)?,
            share_weight: self.share_weight,
            tags,
            other_config,
        };
        session.print_created(session.client.vbd_create(&request).await?, self.waiting).await
    }
}
