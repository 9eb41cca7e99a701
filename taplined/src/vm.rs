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
mod directory;
pub mod domain;
mod end;
mod group;
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
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use ::vm::qemu::accelerator::{self, Accelerator};
use ::vm::qemu::account::Account;
use api::{About, ObjectKind, Problem};
use repo::catalogue::NewTask;
use tokio::sync::OnceCell;
use uuid::Uuid;

use crate::account::Users;
use crate::config::Config;
use crate::task::blocking;

pub use connect::{Reader, connect};
pub use directory::{user, vm_directories};
pub use hardware::check;
pub use hot::{ask_to_let_go, attach, detach, expect_room, has_lost};
pub use recover::recover;
pub use start::start;
pub use stop::{resume, shutdown, suspend};

use directory::vm_directory;
use guest::Guest;
use operation::{Operation, Operations};

/// How long it may take to find out whether the processor runs guests; where it does, it takes a second.
const TO_TRY: Duration = Duration::from_secs(20);

/// What is known of VMs beside what the catalogue has: the machines that run, and what is under way with them.
#[derive(Debug)]
pub struct Vms {
    /// As whom QEMUs run.
    users: Users,
    operations: Operations,
    guests: Mutex<HashMap<Uuid, Arc<Guest>>>,
    accelerator: OnceCell<Accelerator>,
}

impl Vms {
    /// Those of a daemon that knows of none yet.
    pub fn of(config: &Config) -> Result<Vms, Problem> {
        let named = ("qemu-user", config.qemu_user.as_deref());
        Ok(Vms {
            users: Users::of(named, ("qemu-user-range", &config.qemu_user_range))?,
            operations: Operations::default(),
            guests: Mutex::default(),
            accelerator: OnceCell::new(),
        })
    }

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

    /// Who runs the guests' instructions on this host, as that is for who is to run them.
    async fn accelerator(&self, config: &Config, account: Option<Account>) -> Result<Accelerator, Problem> {
        let find = || async {
            let program = config.qemu_program.clone();
            let find = move || Ok(accelerator::find(account.as_ref(), &program, TO_TRY));
            let found = blocking("detect the QEMU accelerator", find).await?;
            tracing::info!("guests run with {}: {}", found.accelerator, found.reason);
            if found.reason.contains("Permission denied") {
                tracing::warn!("QEMU's user has no access to /dev/kvm: grant it to a group (chgrp kvm, chmod g+rw)");
            }
            Ok(found.accelerator)
        };
        self.accelerator.get_or_try_init(find).await.copied()
    }
}

fn new_task(verb: &'static str, vm: Uuid, cancellable: bool) -> NewTask {
    let about = vec![About { kind: ObjectKind::Vm, uuid: vm }];
    NewTask { uuid: Uuid::new_v4(), verb, about, cancellable, intent: None }
}
