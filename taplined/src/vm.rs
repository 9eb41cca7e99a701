//! VMs: started with their disks, ended with them, and found again. Two drivers over the crate `vm`, one of which is in [`machine`]
//! each time: `qemu`, and `xen`.
//!
//! With QEMU:
//!
//! 1. `starting` is recorded; then all VBDs are plugged ([`start`]). *Killed:* the next daemon unplugs them.
//! 2. QEMU is started, and recorded with `running` when it answers. *Killed between:* the next daemon finds it by its directory,
//!    and kills it ([`strays`]): nobody was told that it runs.
//! 3. It outlives the daemon, and is found again ([`recover`]). What is plugged and unplugged meanwhile is given to the guest
//!    and taken from it ([`hot`]).
//! 4. QEMU ends, asked to ([`stop`]) or not ([`end`]); then the VBDs are unplugged, and last `halted` is recorded. *Killed between:*
//!    the next daemon goes on with it.
//!
//! With Xen disks are given to a domain, so it is made first, paused, and runs when all are there: decision 0013. *Killed before
//! that:* the next daemon destroys it, which it finds by its identity. From 3 on all is the same.

mod connect;
pub mod domain;
mod end;
mod guest;
mod hardware;
mod hot;
mod machine;
mod operation;
mod recover;
mod start;
mod stop;
mod strays;

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use ::vm::qemu::accelerator::{self, Accelerator};
use api::{About, ObjectKind, Problem};
use repo::catalogue::NewTask;
use tokio::sync::OnceCell;
use uuid::Uuid;

use crate::config::Config;
use crate::task::blocking;

pub use connect::{Reader, connect};
pub use hardware::check;
pub use hot::{ask_to_let_go, attach, detach, expect_room, has_lost};
pub use recover::recover;
pub use start::start;
pub use stop::{resume, shutdown, suspend};

use guest::Guest;
use operation::{Operation, Operations};

/// How long it may take to find out whether the processor runs guests; where it does, it takes a second.
const TO_TRY: Duration = Duration::from_secs(20);

/// What is known of VMs beside what the catalogue has: the machines that run, and what is under way with them.
#[derive(Debug, Default)]
pub struct Vms {
    operations: Operations,
    guests: Mutex<HashMap<Uuid, Arc<Guest>>>,
    accelerator: OnceCell<Accelerator>,
}

impl Vms {
    fn guests(&self) -> MutexGuard<'_, HashMap<Uuid, Arc<Guest>>> {
        self.guests.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The machine of a VM, if it runs.
    fn guest(&self, vm: Uuid) -> Option<Arc<Guest>> {
        self.guests().get(&vm).cloned()
    }

    /// Takes a VM for what nothing else may be done with meanwhile.
    pub fn begin(&self, vm: Uuid) -> Result<Operation, Problem> {
        self.operations.begin(vm)
    }

    /// Waits until nothing is under way with a VM.
    pub async fn settled(&self, vm: Uuid) {
        drop(self.operations.wait(vm).await);
    }

    /// Who runs the guests' instructions on this host.
    async fn accelerator(&self, config: &Config) -> Result<Accelerator, Problem> {
        let find = || async {
            let program = config.qemu_program.clone();
            let found =
                blocking("find out who can run guests", move || Ok(accelerator::find(&program, TO_TRY))).await?;
            tracing::info!("guests are run by {}: {}", found.accelerator, found.reason);
            Ok(found.accelerator)
        };
        self.accelerator.get_or_try_init(find).await.copied()
    }
}

/// The directory of the directories of all machines.
pub fn places(config: &Config) -> PathBuf {
    config.run_directory.join("vm")
}

/// Where a machine has its monitor and its messages while it runs.
fn place(config: &Config, vm: Uuid) -> PathBuf {
    places(config).join(vm.to_string())
}

fn new_task(verb: &'static str, vm: Uuid, cancellable: bool) -> NewTask {
    let about = vec![About { kind: ObjectKind::Vm, uuid: vm }];
    NewTask { uuid: Uuid::new_v4(), verb, about, cancellable, intent: None }
}
