//! VMs: started with their disks, shut down with them, and reattached to. There are two drivers over the crate `vm`,
//! `qemu` and `xen`; each [`machine`] has one of them.
//!
//! With QEMU:
//!
//! 1. `starting` is recorded; then all VBDs are plugged ([`start`]). *If killed:* the next daemon unplugs them.
//! 2. QEMU is started, and recorded with `running` when it responds. *If killed in between:* the next daemon finds it
//!    by its directory and kills it ([`strays`]): no caller was informed that it runs.
//! 3. It outlives the daemon, which reattaches to it ([`recover`]). VBDs that are plugged and unplugged in the
//!    meantime are hot-plugged ([`hot`]).
//! 4. QEMU exits, on request ([`stop`]) or not ([`end`]); then the VBDs are unplugged, and finally `halted` is
//!    recorded. *If killed in between:* the next daemon continues.
//!
//! A suspended VM ([`suspend`]) has no machine and no plugged VBDs either, but its guest's memory in a file, from
//! which a start continues.
//!
//! With Xen, disks are attached to a domain, so the domain is created first, paused, and resumed when all disks are
//! there: decision 0013. *If killed before that:* the next daemon finds it by its UUID and destroys it. From 3 on
//! everything is the same.

mod clone;
mod connect;
mod console;
mod directory;
pub mod domain;
mod end;
mod group;
mod guest;
mod hardware;
mod hot;
mod inside;
mod machine;
mod memory;
mod moment;
mod network;
mod operation;
mod power;
mod reach;
mod recover;
mod revert;
mod screen;
mod seed;
mod snapshot;
mod start;
mod stop;
mod strays;
mod suspend;

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use ::vm::qemu::accelerator::{self, Accelerator};
use ::vm::qemu::account::Account;
use api::{About, Code, Driver, ObjectKind, Power, Problem, Vm};
use repo::catalogue::{Journalled, NewTask};
use stats::GuestAnswer;
use tokio::sync::OnceCell;
use uuid::Uuid;

use crate::account::Users;
use crate::config::Config;
use crate::daemon::Daemon;
use crate::task::blocking;
use crate::task::job::Job;

pub use clone::{Clone, clone};
pub use connect::{Reader, connect};
pub use console::{Console, KEPT};
pub use directory::user;
pub use hardware::check;
pub use hot::{attach, detach, expect_room, has_lost, request_release};
pub use memory::forget_file;
pub use moment::{Found, distinct};
pub use network::{settle_mac, without_mac};
pub use recover::recover;
pub use revert::{DestroySnapshot, Revert, destroy_scheduled_snapshot, destroy_snapshot, revert};
pub use snapshot::{Snapshot, backup_snapshot, scheduled_snapshot, snapshot};
pub use start::start;
pub use stop::{pause, resume, shutdown};
pub use suspend::{Suspend, discard, suspend};

use directory::vm_directory;
use guest::Guest;
use operation::{Operation, Operations};

/// Time limit for detecting hardware virtualization; if available, it takes a second.
const TO_TRY: Duration = Duration::from_secs(20);

/// The state of VMs that is not in the catalogue: running machines, and operations in progress.
#[derive(Debug)]
pub struct Vms {
    /// The users that QEMU processes run as.
    users: Users,
    operations: Operations,
    guests: Mutex<HashMap<Uuid, Arc<Guest>>>,
    /// Operations of jobs that continue after their request, by an ID that the job chooses.
    kept: Mutex<HashMap<Uuid, Operation>>,
    accelerator: OnceCell<Accelerator>,
    /// Whether the search for machines that ran when the daemon started is complete.
    found: AtomicBool,
}

impl Vms {
    /// Creates the state of a daemon that has not found any machine yet.
    pub fn of(config: &Config) -> Result<Vms, Problem> {
        let named = ("qemu-user", config.qemu_user.as_deref());
        Ok(Vms {
            users: Users::of(named, ("qemu-user-range", &config.qemu_user_range))?,
            operations: Operations::default(),
            guests: Mutex::default(),
            kept: Mutex::default(),
            accelerator: OnceCell::new(),
            found: AtomicBool::new(false),
        })
    }

    fn guests(&self) -> MutexGuard<'_, HashMap<Uuid, Arc<Guest>>> {
        self.guests.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The machine of a VM, if it runs.
    fn guest(&self, vm: Uuid) -> Option<Arc<Guest>> {
        self.guests().get(&vm).cloned()
    }

    /// Reserves a VM for an exclusive operation.
    pub fn begin(&self, vm: Uuid) -> Result<Operation, Problem> {
        self.operations.begin(vm)
    }

    /// Keeps a VM reserved for a job.
    fn keep(&self, job: Uuid, operation: Operation) {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner).insert(job, operation);
    }

    /// Whether a VM is kept reserved for a job.
    fn keeps(&self, job: Uuid) -> bool {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner).contains_key(&job)
    }

    /// Whether the search for machines that ran when the daemon started is complete.
    fn are_found(&self) -> bool {
        self.found.load(Ordering::Relaxed)
    }

    /// Takes over the reservation of a VM from a job.
    fn take_kept(&self, job: Uuid) -> Option<Operation> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner).remove(&job)
    }

    /// Releases a VM kept reserved for a job, if it is.
    pub fn end_reservation(&self, job: Uuid) {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner).remove(&job);
    }

    /// The console of a VM.
    pub fn console(&self, vm: &Vm) -> Result<Arc<Console>, Problem> {
        let refused = |why: &str, advice: String| {
            let what = format!("cannot open the console of VM '{}' ({}): {why}", vm.name, vm.uuid);
            Err(Problem::new(Code::State, what).advise(advice))
        };
        let guest = match (vm.power, self.guest(vm.uuid)) {
            (Power::Halted, _) => return refused("it is halted", "start it".into()),
            (Power::Suspended, _) => return refused("it is suspended", "start it".into()),
            (_, None) => return refused("its machine is not reached yet", "try again".into()),
            (_, Some(guest)) => guest,
        };
        if let Some(console) = &guest.console {
            return Ok(console.clone());
        }
        match (vm.driver, vm.platform.get("hvm_serial"), &vm.handle) {
            (Driver::Xen, _, Some(domain)) => {
                refused("Xen keeps the consoles of its guests", format!("run 'xl console {domain}' on its host"))
            }
            (Driver::Qemu, Some(to), _) => refused(
                &format!("its serial port goes to {to}"),
                "remove hvm_serial from its platform while it is halted, then start it".into(),
            ),
            _ => refused("it was started without one", "shut it down and start it again".into()),
        }
    }

    /// Queries a VM's guest about its disks; an error is the reason why it is unknown.
    pub async fn query_guest(&self, vm: Uuid) -> Result<GuestAnswer, String> {
        let guest = self.guest(vm).ok_or("its machine does not run")?;
        match &guest.inside {
            Some(inside) => inside.query().await.map_err(|unknown| unknown.to_string()),
            None if guest.process().is_none() => Err("Xen's guests are not queried".into()),
            None => Err("the port for it cannot be reached".into()),
        }
    }

    /// Whether an operation is in progress on a VM.
    pub fn is_busy(&self, vm: Uuid) -> bool {
        self.operations.is_busy(vm)
    }

    /// Waits until no operation is in progress on a VM.
    pub async fn settled(&self, vm: Uuid) {
        drop(self.operations.wait(vm).await);
    }

    /// The accelerator of this host, as available to the user that QEMU runs as.
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

/// Whether the journal has a job that saves the memory of a VM.
async fn is_being_suspended(daemon: &Daemon, vm: Uuid) -> Result<bool, Problem> {
    let is_it = move |entry: Journalled| {
        entry.task.verb == Suspend::VERB && entry.task.about.iter().any(|about| about.uuid == vm)
    };
    daemon.catalogue.read(move |view| Ok(view.journal()?.into_iter().any(is_it))).await
}
