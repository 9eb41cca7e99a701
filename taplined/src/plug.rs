//! VBDs: plugged and unplugged in parallel, and their disk processes supervised.
//!
//! 1. The VDI's lease is taken and the state is `plugging`, in one commit ([`begin`]). *Killed behind it:* the next
//!    daemon gives all back.
//! 2. When its turn comes ([`queue`]), the files are opened, the sockets listen, and a process is started that waits
//!    for them. It is recorded before anything is handed to it ([`start`]). *Killed before that:* its standard input
//!    ends, and so does it, with no file open. *Killed behind it:* the next daemon finds it by the record, and ends it.
//! 3. It answers, and the state is `plugged`. From here on it outlives the daemon, and is found again ([`recover`]).
//!    Another process may take its place under a guest that goes on ([`upgrade`]).
//! 4. An unplug waits for the guest to let go, records `unplugging`, and ends the process ([`unplug`]). *Killed behind
//!    that:* the next daemon goes on with it. Only when the process is no more is the lease given back.

mod begin;
mod deaths;
mod doubt;
mod drain;
mod handover;
mod leave;
mod lost;
mod many;
mod operation;
mod plug_spec;
mod queue;
mod recover;
mod settle;
mod space;
mod start;
mod steps;
mod supervise;
pub mod unplug;
mod upgrade;
mod workers;

use std::collections::{HashMap, HashSet};
use std::sync::{Mutex, MutexGuard, PoisonError};

use api::Problem;
use tokio::sync::Semaphore;
use uuid::Uuid;

use crate::account;
use crate::config::Config;
use crate::disk::process::DiskProcess;
use crate::reconcile::files::Known;

pub use begin::plug;
pub use doubt::doubt;
pub use drain::drain;
pub use many::{plug_all, plug_many, unplug_all, unplug_many};
pub use recover::recover;
pub use unplug::unplug;
pub use upgrade::upgrade;

use operation::Operations;
use supervise::Served;
use workers::Workers;

/// What is known of VBDs beside what the catalogue has: what is under way, and who looks after their processes.
#[derive(Debug)]
pub struct Plugs {
    workers: Workers,
    /// Disks that are started again at one time: as many as workers, but not behind plugs, since their guests wait.
    restarts: Semaphore,
    /// Disks that are upgraded at one time.
    upgrades: Semaphore,
    operations: Operations,
    served: Mutex<HashMap<Uuid, Served>>,
    /// VBDs whose processes do not answer.
    doubted: Mutex<HashSet<Uuid>>,
    /// Which files their processes have, as far as that was seen.
    files: Mutex<HashMap<Uuid, Known>>,
    /// The group that may connect to disks.
    group: Option<u32>,
}

impl Plugs {
    /// Nothing is plugged.
    pub fn new(config: &Config) -> Result<Plugs, Problem> {
        let group = config.plug.socket_group.as_deref();
        let group = group.map(|name| account::group("plug.socket-group", name)).transpose()?;
        Ok(Plugs {
            workers: Workers::new(config.limits()),
            restarts: Semaphore::new(usize::try_from(config.plug.worker_pool_size).unwrap_or(Semaphore::MAX_PERMITS)),
            upgrades: Semaphore::new(upgrade::AT_ONE_TIME),
            operations: Operations::default(),
            served: Mutex::default(),
            doubted: Mutex::default(),
            files: Mutex::default(),
            group,
        })
    }

    fn served(&self) -> MutexGuard<'_, HashMap<Uuid, Served>> {
        self.served.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn doubted(&self) -> MutexGuard<'_, HashSet<Uuid>> {
        self.doubted.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn files(&self) -> MutexGuard<'_, HashMap<Uuid, Known>> {
        self.files.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The process of a VBD has these files open.
    pub fn has_open(&self, vbd: Uuid, known: Known) {
        self.files().insert(vbd, known);
    }

    /// Nobody looks after the VBD's process any more; whoever asks has it now, if there is one.
    async fn release(&self, vbd: Uuid) -> Option<DiskProcess> {
        let served = self.served().remove(&vbd)?;
        served.release().await
    }
}
