//! The states of several disks of a VM at one moment, of which snapshots or clones are made: crash consistency across
//! disks.
//!
//! A running guest is paused while they are kept, so that it sends no write to one disk because of the answer to a
//! write to another: of what was acknowledged before the state of the first disk was kept, nothing is missing in that
//! of another. It is paused for a moment and not because anybody wanted it to be, so it must not stay so:
//!
//! 1. In the commit with the job's intent, `held_for` of the VM says what it will be paused for.
//! 2. It is paused, and each disk's state is kept ([`KeptState::keep`]). *If killed:* the next daemon resumes the guest
//!    when it finds the machine again ([`super::recover`]), and rolls the disks back.
//! 3. It is resumed, whether that succeeded or not, and `held_for` is cleared. *If killed before:* as above.
//!
//! A guest that was paused before stays paused. While it is held, no other operation begins with the VM.

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

/// How long a guest may be held. If its disks take longer, it is resumed and the job fails.
const HELD_MAX: Duration = Duration::from_secs(30);

/// For a machine that has died to be known as gone.
const TO_END: Duration = Duration::from_secs(3);

/// The disks, and whether their guest is held.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Moment {
    /// The VM.
    pub vm: Uuid,
    /// Its identity, which no other moment has.
    pub id: Uuid,
    /// Whether its guest is paused for it.
    pub hold: bool,
    /// The disks.
    pub disks: Vec<KeptState>,
}

/// What a request has found: the VM, reserved for it, and its VBDs.
#[derive(Debug)]
pub struct Found {
    /// The VM.
    pub vm: Vm,
    /// Its VBDs, by position.
    pub vbds: Vec<Vbd>,
    operation: Operation,
}

impl Found {
    /// Reserves a VM.
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

    /// Whether the guest must be paused for the states of these disks: it runs, and writes to two of them at least.
    pub async fn must_be_held(&self, daemon: &Daemon, disks: &[KeptState]) -> Result<bool, Problem> {
        match self.vm.power {
            Power::Halted => return Ok(false),
            // Which of the two it is, its machine knows.
            Power::Running | Power::Paused => {}
            // Its disks are refused before this.
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
        Ok(guest.tell(RunningVm::power).await? == Some(Power::Running))
    }

    /// Keeps the VM reserved until the states are kept, or [`super::Vms::let_go`] is called.
    pub fn keep(self, daemon: &Daemon, id: Uuid) {
        daemon.vms.keep(id, self.operation);
    }
}

/// The states of disks as they are going to be kept, all with the same time. No merge begins there while the other
/// values exist.
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
    /// Keeps others from the disks, and records that the guest is to be held; in the commit with the intent.
    pub fn prepare(&self, tx: &mut Tx<'_>, task: Uuid, tried: &str) -> Result<(), Problem> {
        for state in &self.disks {
            begin::hold_state(state, task, tx, tried)?;
        }
        if self.hold { tx.set_vm_held(self.vm, Some(self.id)) } else { Ok(()) }
    }

    /// Keeps the states, with the guest held. `verb` is the job's.
    pub async fn keep(&self, daemon: &Daemon, verb: &'static str) -> Result<(), Problem> {
        if self.hold {
            reach::reach(daemon, self.vm).await?.tell(RunningVm::pause).await?;
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
                // To its end: what it creates is not to appear after it was rolled back.
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
        daemon.vms.let_go(self.id);
        kept
    }

    /// Resumes the guest, if it is still paused for this.
    async fn resume(&self, daemon: &Daemon) -> Result<(), Problem> {
        let (vm, id) = (self.vm, self.id);
        let held = daemon.catalogue.read(move |view| view.vm_held(vm)).await? == Some(id);
        // A machine that is not found yet is resumed when it is.
        let Some(guest) = daemon.vms.guest(vm).filter(|_| held) else { return Ok(()) };
        if let Err(problem) = guest.tell(RunningVm::resume).await {
            if tokio::time::timeout(TO_END, guest.ended()).await.is_err() {
                return Err(problem);
            }
        }
        catalogue::record(&daemon.catalogue, move |tx| tx.set_vm_held(vm, None)).await
    }

    /// Rolls back what [`Moment::keep`] may have left: first of all the guest runs again.
    pub async fn undo(&self, daemon: &Daemon) -> Result<(), Problem> {
        let mut undone = self.resume(daemon).await;
        if undone.is_ok() {
            daemon.vms.let_go(self.id);
        }
        // A repository that does not respond keeps none of the others waiting.
        for state in &self.disks {
            undone = undone.and(state.undo(daemon).await);
        }
        undone
    }

    /// The images of the states, as they are to be recorded.
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

/// Each repository of several disks once.
pub fn distinct(srs: impl Iterator<Item = Uuid>) -> Vec<Uuid> {
    let mut srs: Vec<Uuid> = srs.collect();
    srs.sort();
    srs.dedup();
    srs
}
