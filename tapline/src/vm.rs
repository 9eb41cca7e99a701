//! `tapline vm`: virtual machines.

mod archive;
mod backup;
mod boot;
mod console;
mod create;
mod devices;
mod export;
mod import;
mod ovf;
mod run;
mod schedule;
mod seed;
mod snapshot;

use api::{Autostart, Description, Name, Problem, Size, Suspended, Vm, VmPatch, VmShutdown};
use arguments::number;
use control::size::readable;

use crate::column::Column;
use crate::confirm::Confirm;
use crate::label::{self, ChangeLabels, WithTags};
use crate::schedule::{backed_up, last_backup, missed};
use crate::session::{Listing, Session, Waiting};
use crate::word;
use boot::{Boot, shown};
use console::Open;
use create::Create;
use devices::Devices;
use run::Run;
use seed::SeedFiles;

/// Operations on virtual machines.
#[derive(clap::Subcommand)]
pub enum VmVerb {
    /// Create a machine, with disks if some are given, and print its UUID
    Create(Create),
    /// Boot a thin clone of a disk with its console here; both are removed at the end
    Run(Run),
    /// List the machines
    #[command(visible_alias = "ls")]
    List {
        /// Only those with this name or UUID prefix
        #[arg(value_parser = word::listed("vm"))]
        text: Option<String>,
        #[command(flatten)]
        tags: WithTags,
        #[command(flatten)]
        listing: Listing,
    },
    /// Show a machine
    Show {
        /// Name or UUID prefix
        vm: String,
    },
    /// Change a machine; memory, processors, boot, platform and seed only while it is halted
    Set(Set),
    /// Plug a machine's disks and start it; a suspended one continues from its saved memory
    Start {
        /// Name or UUID prefix
        vm: String,
        /// Open its console once it is started
        #[arg(long, conflicts_with = "no_wait")]
        console: bool,
        #[command(flatten)]
        waiting: Waiting,
    },
    /// Connect this terminal with a machine's serial console; Ctrl-] leaves it
    Console(Open),
    /// Ask the guest to power off, wait for it, and unplug its disks
    Shutdown {
        /// Name or UUID prefix
        vm: String,
        /// Stop it at once without asking the guest
        #[arg(long)]
        force: bool,
        /// Stop it by force if the guest takes longer than this [default: wait for the guest]
        #[arg(long, value_name = "SECONDS", conflicts_with = "force", value_parser = number::<u32>(0..=u64::MAX))]
        force_after: Option<u32>,
        #[command(flatten)]
        waiting: Waiting,
    },
    /// Shut a machine down and start it again
    Reboot {
        /// Name or UUID prefix
        vm: String,
        /// Stop it at once without asking the guest
        #[arg(long)]
        force: bool,
        /// Stop it by force if the guest takes longer than this [default: wait for the guest]
        #[arg(long, value_name = "SECONDS", conflicts_with = "force", value_parser = number::<u32>(0..=u64::MAX))]
        force_after: Option<u32>,
    },
    /// Hold a machine's guest in memory until it is resumed
    Pause(OneVm),
    /// Save a machine's memory to a file on the host, end it and unplug its disks; 'vm start' continues from there
    Suspend(OneVm),
    /// Resume a paused or suspended machine
    Resume(OneVm),
    /// Drop the saved memory of a suspended machine; it is then halted, as after a power cut
    DropMemory {
        /// Name or UUID prefix
        vm: String,
        #[command(flatten)]
        confirm: Confirm,
        #[command(flatten)]
        waiting: Waiting,
    },
    /// Take snapshots of all writable disks of a machine at one moment, and print the UUID; a running guest is paused
    /// for it
    Snapshot(snapshot::Take),
    /// List the snapshots of a machine
    Snapshots(snapshot::List),
    /// Destroy a snapshot of a machine, with those of its disks
    #[command(aliases = ["snapshot-rm", "snapshot-delete", "snapshot-remove"])]
    SnapshotDestroy(snapshot::Destroy),
    /// Schedule snapshots or backups of all writable disks of a machine and set how many to retain
    Schedule(schedule::Schedule),
    /// Protect a snapshot of a machine from its schedule: it stays until you destroy it
    Pin(schedule::Pin),
    /// Revert all disks of a halted machine to a snapshot of it; data written since then is lost
    Revert(snapshot::Revert),
    /// Create a halted machine with the hardware of another and thin clones of its disks, and print its UUID
    Clone(snapshot::Clone),
    /// Back up all writable disks of a machine at one moment, with what the machine is; a running guest is paused for
    /// that moment
    Backup(backup::Backup),
    /// Create a halted machine from a backup, with new disks, and print its UUID; or replace the contents of its disks
    Restore(backup::Restore),
    /// Write a machine with all its disks, as they are at one moment, into one archive
    Export(export::Export),
    /// Create a halted machine with its disks from an OVA or an archive of 'vm export', and print its UUID
    Import(import::Import),
    /// Remove a halted or suspended machine, its saved memory and its block devices; its disks stay
    #[command(visible_alias = "rm", aliases = ["delete", "remove"])]
    Destroy {
        /// Name or UUID prefix
        vm: String,
        #[command(flatten)]
        confirm: Confirm,
        #[command(flatten)]
        waiting: Waiting,
    },
}

/// Arguments of a verb without options of its own.
#[derive(clap::Args)]
pub struct OneVm {
    /// Name or UUID prefix
    vm: String,
    #[command(flatten)]
    waiting: Waiting,
}

/// Arguments of `vm set`.
#[derive(clap::Args)]
#[command(group = word::changes(&[
    "name", "description", "memory", "vcpus", "kernel", "boot_disk", "platform", "no_platform", "cdrom", "nic", "vga",
    "vnc", "serial", "tablet", "user_data", "no_seed", "autostart", "no_autostart", "tag", "no_tag", "config",
    "no_config",
]))]
#[group(skip)]
pub struct Set {
    /// Name or UUID prefix
    vm: String,
    /// New name
    #[arg(long)]
    name: Option<Name>,
    /// New description
    #[arg(long, value_name = "TEXT")]
    description: Option<Description>,
    /// Memory, a multiple of 1 MiB
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true, value_parser = word::memory)]
    memory: Option<Size>,
    /// Number of processors
    #[arg(long, value_name = "N", value_parser = number::<u8>(1..=255))]
    vcpus: Option<u8>,
    #[command(flatten)]
    boot: Boot,
    /// Boot the first bootable disk instead of a kernel on the host
    #[arg(long, conflicts_with_all = ["kernel", "initrd", "cmdline"])]
    boot_disk: bool,
    /// Hardware to add or change; may be given several times
    #[arg(long, value_name = "KEY=VALUE", value_parser = word::pair)]
    platform: Vec<(String, String)>,
    /// Hardware to remove; may be given several times
    #[arg(long, value_name = "KEY")]
    no_platform: Vec<String>,
    /// Start it when the host boots: order, delay before the next ones in seconds, number of tries
    #[arg(long, value_name = word::AUTOSTART, value_parser = word::autostart, num_args = 0..=1, require_equals = true, default_missing_value = "")]
    autostart: Option<Autostart>,
    /// Do not start it when the host boots
    #[arg(long, conflicts_with = "autostart")]
    no_autostart: bool,
    /// Remove the cloud-init seed
    #[arg(long, conflicts_with = "user_data")]
    no_seed: bool,
    #[command(flatten)]
    labels: ChangeLabels,
    #[command(flatten)]
    files: SeedFiles,
    // Last, because the heading of the devices applies to all following options.
    #[command(flatten)]
    devices: Devices,
}

type VmColumn = Column<Vm>;

const COLUMNS: &[VmColumn] = &[
    VmColumn::new("uuid", |vm, uuids| uuids.show(vm.uuid)),
    VmColumn::new("name", |vm, _| vm.name.to_string()),
    VmColumn::new("power", |vm, _| word::of(&vm.power)),
    VmColumn::new("memory", |vm, _| readable(vm.memory)).right().if_room(),
    VmColumn::new("vcpus", |vm, _| vm.vcpus.to_string()).right().if_room(),
    VmColumn::new("driver", |vm, _| word::of(&vm.driver)).if_room(),
    VmColumn::new("problem", |vm, _| vm.problem.as_ref().map(|problem| problem.detail.clone()).unwrap_or_default())
        .if_room(),
    VmColumn::new("pid", |vm, _| vm.pid.map(|pid| pid.to_string()).unwrap_or_default()).right().wide(),
    VmColumn::new("tags", |vm, _| label::shown(&vm.tags)).wide(),
    VmColumn::new("other config", |vm, _| label::lines(&vm.other_config)).alone(),
    VmColumn::new("handle", |vm, _| vm.handle.clone().unwrap_or_default()).wide(),
    VmColumn::new("advice", |vm, _| vm.problem.as_ref().and_then(|problem| problem.advice.clone()).unwrap_or_default())
        .alone(),
    VmColumn::new("boot", |vm, _| shown(&vm.boot)).alone(),
    VmColumn::new("platform", |vm, _| {
        vm.platform.iter().map(|(key, value)| format!("{key}={value}")).collect::<Vec<_>>().join("\n")
    })
    .alone(),
    VmColumn::new("autostart", |vm, _| vm.autostart.as_ref().map(word::of_autostart).unwrap_or_default()).alone(),
    VmColumn::new("keeps", |vm, _| vm.retention.map(|schedule| schedule.to_string()).unwrap_or_default()).alone(),
    VmColumn::new("not kept", |vm, _| missed(vm.retention_problem.as_ref())).alone(),
    VmColumn::new("backed up", |vm, uuids| backed_up(vm.backup_schedule.as_ref(), uuids)).alone(),
    VmColumn::new("last backup", |vm, _| last_backup(vm.last_backup)).alone(),
    VmColumn::new("not backed up", |vm, _| missed(vm.backup_problem.as_ref())).alone(),
    VmColumn::new("seed", |vm, _| if vm.seed { "for cloud-init".to_owned() } else { String::new() }).alone(),
    VmColumn::new("suspended", |vm, _| vm.suspended.as_ref().map(of_memory).unwrap_or_default()).alone(),
    VmColumn::new("created", |vm, _| format!("{:.0}", vm.created)).alone(),
    VmColumn::new("description", |vm, _| vm.description.to_string()).alone(),
];

/// Sets the note that is printed if a shutdown takes long: what it waits for and how to force it. `vm` is the machine
/// as named by the user.
fn note_shutdown(session: &Session, vm: &str, request: &VmShutdown) {
    if request.force {
        return;
    }
    let until = request.force_after.map_or_else(String::new, |seconds| format!(" for up to {seconds} s"));
    session.note(format!(
        "waiting{until} for the guest of {vm} to power off; Ctrl-C cancels the shutdown\n  to stop it as if its power \
         were cut: tapline vm shutdown {vm} --force (or with --force-after SECONDS from the beginning)"
    ));
}

/// Formats the saved memory of a machine.
fn of_memory(memory: &Suspended) -> String {
    let Suspended { since, size, file, paused } = memory;
    let paused = if *paused { ", paused" } else { "" };
    format!("{since:.0}{paused}\n{} in {file}", readable(*size))
}

impl VmVerb {
    /// Runs the verb and prints its output.
    pub async fn run(self, session: &Session) -> Result<(), Problem> {
        let client = &session.client;
        match self {
            VmVerb::Create(create) => create.run(session).await,
            VmVerb::List { text, tags, listing } => {
                session.list(&client.vms_tagged(text.as_deref(), &tags.tag).await?, COLUMNS, &listing)
            }
            VmVerb::Show { vm } => session.show(&client.vm(session.vm(&vm).await?).await?, COLUMNS),
            VmVerb::Set(set) => set.run(session).await,
            VmVerb::Run(run) => run.run(session).await,
            VmVerb::Start { vm, console, waiting } => {
                let vm = session.vm(&vm).await?;
                session.complete(client.vm_start(vm).await?, waiting).await?;
                if console { console::attach(session, vm).await.map(drop) } else { Ok(()) }
            }
            VmVerb::Console(open) => open.run(session).await,
            VmVerb::Shutdown { vm: text, force, force_after, waiting } => {
                let vm = session.vm(&text).await?;
                let request = VmShutdown { force, force_after };
                note_shutdown(session, &text, &request);
                session.complete(client.vm_shutdown(vm, &request).await?, waiting).await
            }
            VmVerb::Reboot { vm: text, force, force_after } => {
                let vm = session.vm(&text).await?;
                let request = VmShutdown { force, force_after };
                note_shutdown(session, &text, &request);
                session.finish(client.vm_shutdown(vm, &request).await?).await?;
                session.finish(client.vm_start(vm).await?).await.map(drop)
            }
            VmVerb::Pause(OneVm { vm, waiting }) => {
                session.complete(client.vm_pause(session.vm(&vm).await?).await?, waiting).await
            }
            VmVerb::Suspend(OneVm { vm, waiting }) => {
                session.complete(client.vm_suspend(session.vm(&vm).await?).await?, waiting).await
            }
            VmVerb::DropMemory { vm, confirm, waiting } => {
                let vm = client.vm(session.vm(&vm).await?).await?;
                confirm.ask(&format!("drop the saved memory of the vm '{}' ({})", vm.name, vm.uuid))?;
                session.complete(client.vm_drop_memory(vm.uuid).await?, waiting).await
            }
            VmVerb::Resume(OneVm { vm, waiting }) => {
                session.complete(client.vm_resume(session.vm(&vm).await?).await?, waiting).await
            }
            VmVerb::Snapshot(take) => take.run(session).await,
            VmVerb::Snapshots(list) => list.run(session).await,
            VmVerb::SnapshotDestroy(destroy) => destroy.run(session).await,
            VmVerb::Schedule(schedule) => schedule.run(session).await,
            VmVerb::Pin(pin) => pin.run(session).await,
            VmVerb::Revert(revert) => revert.run(session).await,
            VmVerb::Clone(clone) => clone.run(session).await,
            VmVerb::Backup(backup) => backup.run(session).await,
            VmVerb::Restore(restore) => restore.run(session).await,
            VmVerb::Export(export) => export.run(session).await,
            VmVerb::Import(import) => import.run(session).await,
            VmVerb::Destroy { vm: text, confirm, waiting } => {
                let vm = client.vm(session.vm(&text).await?).await?;
                let memory = if vm.suspended.is_some() { "saved memory and " } else { "" };
                // With virsh, `destroy` is a forced power-off.
                confirm.ask_or(
                    &format!("destroy the vm '{}' ({}) with its {memory}block devices", vm.name, vm.uuid),
                    Some(&format!("to cut the machine's power, use: tapline vm shutdown --force {text}")),
                )?;
                session.complete(client.vm_destroy(vm.uuid).await?, waiting).await
            }
        }
    }
}

impl Set {
    async fn run(self, session: &Session) -> Result<(), Problem> {
        let Set {
            vm,
            name,
            description,
            memory,
            vcpus,
            boot,
            boot_disk,
            platform,
            no_platform,
            autostart,
            no_autostart,
            no_seed,
            labels,
            files,
            devices,
        } = self;
        let uuid = session.vm(&vm).await?;
        let devices = devices.platform(session)?;
        // The API replaces maps and sets as a whole.
        let changes_platform = !platform.is_empty() || !no_platform.is_empty() || !devices.is_empty();
        let now = match changes_platform || labels.changes_some() {
            true => Some(session.client.vm(uuid).await?),
            false => None,
        };
        let (mut all, now) = now.map(|vm| (vm.platform, (vm.tags, vm.other_config))).unwrap_or_default();
        all.retain(|key, _| !no_platform.contains(key));
        all.extend(devices);
        all.extend(platform);
        let platform = changes_platform.then_some(all);
        let (tags, other_config) = labels.of(now)?;
        let boot = if boot_disk { Some(api::Boot::Disk) } else { boot.kernel(session)? };
        let autostart = if no_autostart { Some(None) } else { autostart.map(Some) };
        let seed = if no_seed { Some(None) } else { files.seed()?.map(Some) };
        let patch = VmPatch {
            name,
            description,
            memory,
            vcpus,
            boot,
            platform,
            autostart,
            retention: None,
            backup_schedule: None,
            seed,
            tags,
            other_config,
        };
        let vm = session.client.vm_set(uuid, &patch).await?;
        if session.json() { session.value(&vm) } else { Ok(()) }
    }
}
