//! The states of several disks of a VM at one moment, for snapshots or clones: crash consistency across disks.
//!
//! A running guest is paused while the states are kept, so that no write to one disk can depend on the completion of
//! a later write to another: all disks contain everything that was acknowledged before the first state was kept. The
//! pause was not requested by a user and must not outlast this:
//!
//! 1. In the commit with the job's intent, `held_for` of the VM records the reason of its pause.
//! 2. It is paused, and each disk's state is kept ([`KeptState::keep`]). *If killed:* the next daemon resumes the
//!    guest when it finds the machine ([`super::recover`]), and rolls the disks back.
//! 3. It is resumed, whether that succeeded or not, and `held_for` is cleared. *If killed before:* as above.
//!
//! A guest that was already paused stays paused. While it is held, no other operation begins on the VM.

use std::time::Duration;

use api::{Code, Mode, Power, Problem, Vbd, Vm};
use repo::Tx;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::machine::RunningVm;
use super::{Operation, reach};
use crate::catalogue;
use crate::daemon::Daemon;
use crate::fault;
use crate::task::wanted::Want;
use crate::vdi::{KeptImages, KeptState, begin};

/// Maximum time for which a guest is paused. If its disks take longer, it is resumed and the job fails.
const HELD_MAX: Duration = Duration::from_secs(30);

/// Time for the exit of a dead machine to be noticed.
const TO_END: Duration = Duration::from_secs(3);

/// The disks, and whether their guest is paused.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Moment {
    /// The VM.
    pub vm: Uuid,
    /// A unique ID.
    pub id: Uuid,
    /// Whether its guest is paused for it.
    pub hold: bool,
    /// The disks.
    pub disks: Vec<KeptState>,
}

/// A VM, reserved for a request, and its VBDs.
#[derive(Debug)]
pub struct Found {
    /// The VM.
    pub vm: Vm,
    /// Its VBDs, by position.
    pub vbds: Vec<Vbd>,
    operation: Operation,
}

impl Found {
    /// Reserves a VM for a request.
    pub async fn of(daemon: &Daemon, vm: Uuid) -> Result<Found, Problem> {
        let operation = daemon.vms.begin(vm)?;
        let (vm, vbds) = daemon.catalogue.read(move |view| Ok((view.vm(vm)?, view.vbds(Some(vm), None)?))).await?;
        Ok(Found { vm, vbds, operation })
    }

    /// The VDIs that the guest may write, by position.
    pub fn writable(&self) -> Vec<Uuid> {
        let writable = self.vbds.iter().filter(|vbd| vbd.mode == Mode::ReadWrite);
        let mut vdis: Vec<Uuid> = Vec::new();
        for vbd in writable {
            if !vdis.contains(&vbd.vdi) {
                vdis.push(vbd.vdi);
            }
        }
        vdis
    }

    /// Whether the guest must be paused for the states of these disks: it runs, and writes to at least two of them.
    pub async fn must_be_held(&self, daemon: &Daemon, disks: &[KeptState]) -> Result<bool, Problem> {
        match self.vm.power {
            Power::Halted => return must_not_be_written(&self.vm, disks).map(|()| false),
            // Whether it runs is determined from its machine.
            Power::Running | Power::Paused => {
                let is_own = |vbd| self.vbds.iter().any(|own| own.uuid == vbd);
                if disks.iter().filter_map(|state| state.vbd).any(|vbd| !is_own(vbd)) {
                    must_not_be_written(&self.vm, disks)?;
                }
            }
            // Its disks have been refused before.
            Power::Suspended => return Ok(false),
            Power::Starting | Power::Stopping => {
                let what = format!("VM {} is being started or stopped", self.vm.uuid);
                return Err(Problem::new(Code::Busy, what).advise("wait for that task"));
            }
        }
        let is_written = |state: &&KeptState| state.vbd.is_some_and(|vbd| self.vbds.iter().any(|own| own.uuid == vbd));
        if disks.iter().filter(is_written).count() < 2 {
            return Ok(false);
        }
        let guest = reach::reach(daemon, self.vm.uuid).await?;
        Ok(guest.run(RunningVm::power).await? == Some(Power::Running))
    }

    /// Keeps the VM reserved until the states are kept, or [`super::Vms::end_reservation`] is called.
    pub fn keep(self, daemon: &Daemon, id: Uuid) {
        daemon.vms.keep(id, self.operation);
    }
}

/// Refuses the states of several disks that are written to, not all of them by the guest of their machine, which can be
/// paused: a later write to one of them could be kept without an earlier one to another.
fn must_not_be_written(vm: &Vm, disks: &[KeptState]) -> Result<(), Problem> {
    let written: Vec<Uuid> = disks.iter().filter_map(|state| state.vbd).collect();
    let [first, _, ..] = written.as_slice() else { return Ok(()) };
    let what = format!(
        "{} disks of VM {} are plugged, and not all of them for its running guest: others may write to them meanwhile, \
         and their states would not be of one moment",
        written.len(),
        vm.uuid
    );
    Err(Problem::new(Code::InUse, what).advise(format!("unplug them first: tapline vbd unplug {first}")))
}

/// The states of disks to be kept, all with the same time. No merge begins there while the other values exist.
pub async fn states(
    daemon: &Daemon,
    vdis: &[Uuid],
    at: jiff::Timestamp,
    writable: bool,
) -> Result<(Vec<KeptState>, Vec<Want>), Problem> {
    let (mut states, mut wants) = (Vec::new(), Vec::new());
    for vdi in vdis {
        let (state, want) = begin::state(daemon, *vdi, None, None, Default::default(), writable).await?;
        states.push(KeptState { at, ..state });
        wants.push(want);
    }
    Ok((states, wants))
}

impl Moment {
    /// Reserves the disks, and records that the guest will be paused; in the commit with the intent.
    pub fn prepare(&self, tx: &mut Tx<'_>, task: Uuid, tried: &str) -> Result<(), Problem> {
        for state in &self.disks {
            begin::hold_state(state, task, tx, tried)?;
        }
        if self.hold { tx.set_vm_held(self.vm, Some(self.id)) } else { Ok(()) }
    }

    /// Keeps the states, with the guest paused. `verb` is the job's.
    pub async fn keep(&self, daemon: &Daemon, verb: &'static str) -> Result<(), Problem> {
        if self.hold {
            reach::reach(daemon, self.vm).await?.run(RunningVm::pause).await?;
        }
        fault::point(verb, "pause", true);
        let keeping = async {
            for (count, state) in self.disks.iter().enumerate() {
                state.keep(daemon).await?;
                if count == 0 {
                    fault::point(verb, "first", true);
                }
            }
            Ok(())
        };
        tokio::pin!(keeping);
        let kept = match tokio::time::timeout(HELD_MAX, &mut keeping).await {
            Ok(kept) => kept,
            Err(_) => {
                self.resume(daemon).await?;
                // Waits for its end, so that no file appears after the rollback.
                keeping.await?;
                let what = format!(
                    "the disks of VM {} took more than {} s; its guest was resumed",
                    self.vm,
                    HELD_MAX.as_secs()
                );
                Err(Problem::new(Code::Timeout, what).advise("check the storage of its repositories, then try again"))
            }
        };
        fault::point(verb, "resume", false);
        self.resume(daemon).await?;
        fault::point(verb, "resume", true);
        daemon.vms.end_reservation(self.id);
        kept
    }

    /// Seals the maps of changed blocks whose intervals have ended, once the states are recorded.
    pub async fn seal(&self, daemon: &Daemon) -> Result<(), Problem> {
        for state in &self.disks {
            state.seal(daemon).await?;
        }
        Ok(())
    }

    /// Resumes the guest, if it is still paused for this.
    async fn resume(&self, daemon: &Daemon) -> Result<(), Problem> {
        let (vm, id) = (self.vm, self.id);
        let held = daemon.catalogue.read(move |view| view.vm_held(vm)).await? == Some(id);
        // A machine that is not found yet is resumed when it is.
        let Some(guest) = daemon.vms.guest(vm).filter(|_| held) else { return Ok(()) };
        if let Err(problem) = guest.run(RunningVm::resume).await {
            if tokio::time::timeout(TO_END, guest.ended()).await.is_err() {
                return Err(problem);
            }
        }
        catalogue::record(&daemon.catalogue, move |tx| tx.set_vm_held(vm, None)).await
    }

    /// Rolls back what [`Moment::keep`] may have left; the guest is resumed first.
    pub async fn undo(&self, daemon: &Daemon) -> Result<(), Problem> {
        let mut undone = self.resume(daemon).await;
        if undone.is_ok() {
            daemon.vms.end_reservation(self.id);
        }
        // A repository that does not respond must not prevent the rollback in others.
        for state in &self.disks {
            undone = undone.and(state.undo(daemon).await);
        }
        undone
    }

    /// The catalogue entries for the kept states.
    pub async fn described(&self, daemon: &Daemon) -> Result<Vec<(KeptState, KeptImages)>, Problem> {
        let mut described = Vec::new();
        for state in &self.disks {
            described.push((state.clone(), state.described(daemon).await?));
        }
        Ok(described)
    }

    /// The repositories of the disks.
    pub fn srs(&self) -> Vec<Uuid> {
        distinct(self.disks.iter().map(|state| state.sr))
    }
}

/// The repositories without duplicates, sorted.
pub fn distinct(srs: impl Iterator<Item = Uuid>) -> Vec<Uuid> {
    let mut srs: Vec<Uuid> = srs.collect();
    srs.sort();
    srs.dedup();
    srs
}
