//! `vm-suspend`: saves the memory of a guest to a file, and ends its machine. A start resumes from there
//! ([`super::start`]).
//!
//! 1. In the commit with the intent, `held_for` of the VM records why its guest is paused, if it runs.
//! 2. `save`: it is paused, and QEMU writes its memory to a file, which is then durable under its final name. *If
//!    killed or cancelled:* the guest continues, when the next daemon finds it, and the file is removed.
//! 3. `record`: the memory is in the catalogue, in one commit. From here on there is no way back to that machine. *If
//!    killed before:* as above.
//! 4. `end`: QEMU is ended, and the VBDs are unplugged; then the VM is suspended, with its disks as they are when no
//!    process has them open. The VBDs keep their leases. *If killed:* repeated, by this job or by the recovery of the
//!    VM.
//!
//! Resuming: its disks are plugged and QEMU loads the file, with the guest still paused. *If that fails, or the
//! daemon is killed:* the VM stays suspended. Then the memory is forgotten, in the commit that records the VM as
//! running, and only then does the guest run: its first write makes the file useless. *If killed in between:* the
//! next daemon finds the machine and resumes it. Finally the file is removed. *If killed before:* the next daemon
//! does that.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use ::vm::qemu::hardware::Hardware;
use ::vm::qemu::machine::Saving;
use ::vm::qemu::slots::Position;
use api::{About, Code, Driver, ObjectKind, Power, Problem, Task, Vbd, VbdState, Vm};
use jiff::Timestamp;
use repo::catalogue::{DiskOfMemory, VmMemory};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use uuid::Uuid;

use super::end::Ended;
use super::guest::Guest;
use super::hardware::{self, Plan};
use super::machine::RunningVm;
use super::{Operation, end, memory, reach};
use crate::daemon::Daemon;
use crate::request;
use crate::task::job::{Job, declare_steps};
use crate::task::{Context, blocking};

/// Interval of polling QEMU's progress.
const LOOK_AFTER: Duration = Duration::from_millis(50);

/// Time for the exit of a dead machine to be noticed.
const TO_END: Duration = Duration::from_secs(3);

/// The intent of the job.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Suspend {
    /// The VM.
    pub vm: Uuid,
    /// The ID of its memory, under which the VM is also kept reserved.
    pub id: Uuid,
    /// Whether its guest was running.
    pub ran: bool,
}

/// Starts a `vm-suspend` task.
pub async fn suspend(daemon: &Daemon, vm: Uuid) -> Result<Task, Problem> {
    let operation = daemon.vms.begin(vm)?;
    let (known, vbds) = daemon.catalogue.read(move |view| Ok((view.vm(vm)?, view.vbds(Some(vm), None)?))).await?;
    must_be_possible(&known, &vbds)?;
    let (config, memory) = (daemon.config.clone(), known.memory);
    blocking("query the space for a VM's memory", move || memory::must_have_room(&config, memory)).await?;
    let guest = reach::reach(daemon, vm).await?;
    let ran = !guest.run(RunningVm::is_paused).await?;
    guest.run(RunningVm::must_be_savable).await?;
    let job = Suspend { vm, id: Uuid::new_v4(), ran };
    let id = job.id;
    daemon.vms.keep(id, operation);
    let begun = daemon.tasks.start_job(daemon, job, move |job, _, tx| match tx.vm(job.vm)?.power {
        Power::Running | Power::Paused if job.ran => tx.set_vm_held(job.vm, Some(job.id)),
        Power::Running | Power::Paused => Ok(()),
        _ => Err(not_running(job.vm)),
    });
    begun.await.inspect_err(|_| daemon.vms.end_reservation(id))
}

fn not_running(vm: Uuid) -> Problem {
    Problem::new(Code::State, format!("VM {vm} is not running, so it has no memory to save")).advise("start it first")
}

fn must_be_possible(vm: &Vm, vbds: &[Vbd]) -> Result<(), Problem> {
    if vm.driver == Driver::Xen {
        let what = format!("VM {} cannot be suspended: Tapline saves the memory of QEMU's guests only", vm.uuid);
        return Err(Problem::new(Code::Unsupported, what).advise("hold it in memory: tapline vm pause"));
    }
    if !matches!(vm.power, Power::Running | Power::Paused) {
        return Err(not_running(vm.uuid));
    }
    let busy = |vbd: &&Vbd| !matches!(vbd.state, VbdState::Plugged | VbdState::Unplugged);
    if let Some(vbd) = vbds.iter().find(busy) {
        let what = format!("VBD {} of VM {} is being plugged, unplugged or restarted", vbd.uuid, vm.uuid);
        return Err(Problem::new(Code::Busy, what).advise("wait for that, then try again"));
    }
    if let Some(vbd) = vbds.iter().find(|vbd| vbd.waits_for_space) {
        let what = format!(
            "the guest of VM {} waits for space for VBD {}, and that request cannot be saved",
            vm.uuid, vbd.uuid
        );
        return Err(Problem::new(Code::State, what).advise("free space in its repository, then try again"));
    }
    Ok(())
}

/// Discards the memory of a suspended VM, which is then halted, as if its power had been cut when it was suspended.
pub async fn discard(daemon: &Daemon, vm: Uuid) -> Result<Vm, Problem> {
    let _operation = daemon.vms.begin(vm)?;
    let file = daemon.catalogue.read(move |view| view.vm_memory(vm)).await?.map(|memory| memory.file);
    let discarded = request::change(&daemon.catalogue, 200, move |tx| {
        if tx.vm(vm)?.power != Power::Suspended {
            let what = format!("VM {vm} is not suspended, so it has no saved memory");
            return Err(Problem::new(Code::State, what));
        }
        tx.forget_vm_memory(vm)?;
        tx.set_vm_power(vm, Power::Halted, None)?;
        tx.vm(vm)
    });
    let discarded = discarded.await?;
    memory::forget_file(file).await;
    Ok(discarded)
}

declare_steps!(
    /// The steps of `vm-suspend`.
    SuspendStep { Save = "save", Record = "record", End = "end" }
);

impl Job for Suspend {
    type Step = SuspendStep;

    const VERB: &'static str = "vm-suspend";
    const NO_RETURN: SuspendStep = SuspendStep::Record;

    fn changes(&self) -> Vec<Uuid> {
        Vec::new()
    }

    fn about(&self) -> Vec<About> {
        vec![About { kind: ObjectKind::Vm, uuid: self.vm }]
    }

    /// A disk was unplugged by force in the meantime, or the VM has ended.
    fn is_hopeless(&self, problem: &Problem) -> bool {
        problem.code == Code::State
    }

    async fn step(&self, step: SuspendStep, daemon: &Daemon, context: &Context) -> Result<(), Problem> {
        // After a restart of the daemon, recovery must first have left this machine to the job.
        while !daemon.vms.are_found() {
            tokio::time::sleep(LOOK_AFTER).await;
        }
        match step {
            SuspendStep::Save => self.save(daemon, context).await,
            SuspendStep::Record => self.record(daemon).await,
            // From here on there is no rollback, whatever fails.
            SuspendStep::End => {
                self.end(daemon, context).await.map_err(|problem| Problem { code: Code::Failed, ..problem })
            }
        }
    }

    async fn undo(&self, daemon: &Daemon) -> Result<(), Problem> {
        let (vm, id) = (self.vm, self.id);
        if daemon.catalogue.read(move |view| view.vm_memory(vm)).await?.is_some_and(|memory| memory.id == id) {
            return Ok(());
        }
        if let Some(guest) = self.found(daemon).await? {
            if let Err(problem) = self.let_continue(daemon, &guest).await {
                if tokio::time::timeout(TO_END, guest.ended()).await.is_err() {
                    return Err(problem);
                }
            }
        }
        let config = daemon.config.clone();
        blocking("remove a VM's memory", move || memory::remove_all(&config, vm)).await?;
        daemon.vms.end_reservation(self.id);
        Ok(())
    }

    fn result(&self) -> Value {
        json!({ "uuid": self.vm })
    }
}

impl Suspend {
    /// Pauses the guest, and makes QEMU write its memory.
    async fn save(&self, daemon: &Daemon, context: &Context) -> Result<(), Problem> {
        let vm = self.vm;
        let guest = reach::reach(daemon, vm).await?;
        if self.ran {
            guest.run(RunningVm::pause).await?;
        }
        let (memory, disks) = self.describe(daemon, &guest).await?;
        let config = daemon.config.clone();
        let file = blocking("create a file for a VM's memory", move || memory::begin(&config, vm, &memory)).await?;
        let shared = file.try_clone().map_err(|error| Problem::failed("save a VM's memory", error))?;
        guest.run(move |machine| machine.begin_save(&shared, &disks)).await?;
        loop {
            match guest.run(RunningVm::saving).await? {
                Saving::Complete => break,
                Saving::Active { done, total } => context.progress(part(done, total)),
                Saving::Idle => {
                    return Err(Problem::failed(format_args!("save the memory of VM {vm}"), "it was cancelled"));
                }
            }
            let rest = async {
                tokio::time::sleep(LOOK_AFTER).await;
                Ok(())
            };
            context.unless_cancelled(rest).await?;
        }
        let config = daemon.config.clone();
        blocking("make a VM's memory durable", move || memory::complete(&config, vm, &file)).await
    }

    /// The record of the current machine, and the positions of its disks.
    async fn describe(&self, daemon: &Daemon, guest: &Arc<Guest>) -> Result<(VmMemory, Vec<Position>), Problem> {
        let vm = self.vm;
        let read = daemon.catalogue.read(move |view| Ok((view.vm(vm)?, view.vbds(Some(vm), None)?)));
        let (known, vbds) = read.await?;
        let plugged: Vec<Vbd> = vbds.into_iter().filter(|vbd| vbd.state != VbdState::Unplugged).collect();
        let Plan::Qemu(hardware) = hardware::of(&daemon.config, &known, &plugged)? else {
            return Err(not_running(vm));
        };
        let mut positions = plugged.iter().map(hardware::position_of).collect::<Result<Vec<_>, _>>()?;
        positions.sort_unstable();
        let kind = guest.run(RunningVm::kind).await?;
        let (machine, accelerator) = (Some(kind.machine), kind.accelerator);
        let machine = serde_json::to_value(Hardware { machine, accelerator, ..*hardware });
        let machine = machine.map_err(|error| Problem::failed("describe a VM's hardware", error))?;
        let disk = |vbd: &Vbd| DiskOfMemory { vbd: vbd.uuid, vdi: vbd.vdi, mode: vbd.mode, images: Vec::new() };
        let memory = VmMemory {
            id: self.id,
            file: memory::file_of(&daemon.config, vm).to_string_lossy().into_owned(),
            size: 0,
            since: Timestamp::now(),
            ran: self.ran,
            qemu: kind.version.to_string(),
            machine,
            disks: plugged.iter().map(disk).collect(),
        };
        Ok((memory, positions))
    }

    /// Records that the guest can only be resumed from its memory.
    async fn record(&self, daemon: &Daemon) -> Result<(), Problem> {
        let (vm, id, config) = (self.vm, self.id, daemon.config.clone());
        if daemon.catalogue.read(move |view| view.vm_memory(vm)).await?.is_some_and(|memory| memory.id == id) {
            return Ok(());
        }
        // A restarted daemon must reserve the VM again: nothing may run the guest from here on.
        if !daemon.vms.keeps(id) {
            daemon.vms.keep(id, daemon.vms.operations.wait(vm).await);
        }
        let guest = reach::reach(daemon, vm).await?;
        let is_saved = match guest.run(RunningVm::is_saved).await {
            Ok(is_saved) => is_saved,
            // A machine that has ended cannot be recorded, and retries are useless.
            Err(problem) => match tokio::time::timeout(TO_END, guest.ended()).await {
                Ok(_) => return Err(Problem::new(Code::State, format!("VM {vm} has ended: {problem}"))),
                Err(_) => return Err(problem),
            },
        };
        if !is_saved {
            let what = format!("the guest of VM {vm} has run since its memory was saved");
            return Err(Problem::new(Code::State, what).advise("suspend it again"));
        }
        let memory = blocking("read the description of a VM's memory", move || memory::describe(&config, vm)).await?;
        let recorded = daemon.catalogue.write(move |tx| {
            let power = tx.vm(vm)?.power;
            let there = |disk: &DiskOfMemory| {
                let vbd = tx.find_vbd(disk.vbd)?;
                Ok::<_, Problem>(vbd.is_some_and(|vbd| matches!(vbd.state, VbdState::Plugged | VbdState::Restarting)))
            };
            let disks = memory.disks.iter().map(there).collect::<Result<Vec<bool>, _>>()?;
            if memory.id != id || !matches!(power, Power::Running | Power::Paused) || disks.contains(&false) {
                let what = format!("VM {vm} or one of its disks has ended while its memory was saved");
                return Err(Problem::new(Code::State, what));
            }
            tx.set_vm_memory(vm, &memory)?;
            tx.set_vm_held(vm, None)?;
            tx.set_vm_power(vm, Power::Stopping, None)
        });
        recorded.await
    }

    /// Ends the machine, and unplugs its disks.
    async fn end(&self, daemon: &Daemon, context: &Context) -> Result<(), Problem> {
        let vm = self.vm;
        let operation: Operation = match daemon.vms.take_kept(self.id) {
            Some(operation) => operation,
            None => daemon.vms.operations.wait(vm).await,
        };
        // Recovery may have done the rest, and the VM may even run again.
        let known = daemon.catalogue.read(move |view| Ok((view.vm_memory(vm)?, view.vm(vm)?.power))).await?;
        let (Some(memory), Power::Stopping) = known else { return Ok(()) };
        if memory.id != self.id {
            return Ok(());
        }
        match daemon.vms.guest(vm) {
            Some(guest) => guest.run(RunningVm::end).await?,
            None => reach::kill(daemon, vm).await?,
        }
        end::clear(daemon, vm, None, &BTreeSet::new(), &context.regardless()).await?;
        drop(operation);
        Ok(())
    }

    /// The machine, for an undo. While the daemon starts it is not found yet, and its guest is resumed once it is.
    async fn found(&self, daemon: &Daemon) -> Result<Option<Arc<Guest>>, Problem> {
        let vm = self.vm;
        if let Some(guest) = daemon.vms.guest(vm) {
            return Ok(Some(guest));
        }
        let power = daemon.catalogue.read(move |view| view.find_vm(vm)).await?.map(|vm| vm.power);
        if !daemon.vms.are_found() || !matches!(power, Some(Power::Running | Power::Paused)) {
            return Ok(None);
        }
        let found = reach::adopt(daemon, vm).await?;
        if found.is_none() {
            let operation = match daemon.vms.take_kept(self.id) {
                Some(operation) => operation,
                None => daemon.vms.operations.wait(vm).await,
            };
            let what = format!("VM {vm} is halted: it ended while its memory was saved");
            let why = Problem::new(Code::Failed, what).advise("start it again");
            end::halt(daemon, vm, Ended::because(why), operation).await;
        }
        Ok(found)
    }

    /// Resumes the guest, if it was paused for this.
    async fn let_continue(&self, daemon: &Daemon, guest: &Arc<Guest>) -> Result<(), Problem> {
        let (vm, id) = (self.vm, self.id);
        guest.run(RunningVm::end_save).await?;
        if daemon.catalogue.read(move |view| view.vm_held(vm)).await? == Some(id) {
            guest.run(RunningVm::resume).await?;
            let recorded = crate::catalogue::record(&daemon.catalogue, move |tx| {
                tx.set_vm_held(vm, None)?;
                // Another daemon may have found it paused.
                match tx.vm(vm)?.power {
                    Power::Paused => tx.set_vm_power(vm, Power::Running, None),
                    _ => Ok(()),
                }
            });
            recorded.await?;
        }
        Ok(())
    }
}

/// The saved fraction of the memory, from 0 to 1.
fn part(done: u64, total: u64) -> f64 {
    let mib = |bytes: u64| u32::try_from(bytes >> 20).map_or(f64::from(u32::MAX), f64::from);
    if total >> 20 == 0 { 0.0 } else { (mib(done) / mib(total)).min(1.0) }
}
