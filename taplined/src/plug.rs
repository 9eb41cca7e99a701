//! VBDs: plugged and unplugged in parallel, and their disk processes supervised.
//!
//! 1. The VDI's lease is taken and the state becomes `plugging`, in one commit ([`begin`]). *If killed after this:* the
//!    next daemon rolls it back.
//! 2. When its turn comes ([`queue`]), the files are opened, the sockets listen, and a process is started that waits
//!    for them. It is recorded before anything is passed to it ([`start`]). *If killed before that:* its standard input
//!    is closed, and it exits without any open file. *If killed after it:* the next daemon finds it by the record and
//!    stops it.
//! 3. It responds, and the state becomes `plugged`. From here on it outlives the daemon, which reattaches to it
//!    ([`recover`]). Another process can replace it while the guest keeps running ([`upgrade`]).
//! 4. An unplug waits for the guest to release the disk, records `unplugging`, and stops the process ([`unplug`]). *If
//!    killed after that:* the next daemon continues. Only when the process has exited is the lease released.

mod begin;
mod bitmaps;
mod cleanup;
mod deaths;
mod handover;
mod leave;
mod limit;
mod lost;
mod many;
mod operation;
mod plug_spec;
mod push_settings;
mod queue;
mod recover;
mod settle;
mod shape;
mod share;
mod space;
mod start;
mod steps;
pub mod stray;
mod supervise;
mod unplug;
mod upgrade;
mod workers;
mod xen_disk;

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use api::Problem;
use tokio::sync::Semaphore;
use uuid::Uuid;

use crate::account;
use crate::config::Config;
use crate::disk::process::DiskProcess;

pub use begin::plug;
pub use cleanup::{remove, remove_logs};
pub use limit::set as limit;
pub use many::{plug_all, plug_many, unplug_all, unplug_each, unplug_many};
pub use plug_spec::serial;
pub use recover::recover;
pub use shape::send_to_all as shape_all;
pub use share::set as share;
pub use unplug::unplug;
pub use upgrade::upgrade;

use operation::Operations;
use supervise::Served;
use workers::Workers;

/// The state of VBDs that is not in the catalogue: operations in progress, and the supervisors of their processes.
#[derive(Debug)]
pub struct Plugs {
    workers: Workers,
    /// Limits concurrent restarts: as many as workers, but they do not queue behind plugs, because their guests are
    /// waiting.
    restarts: Semaphore,
    /// Limits concurrent upgrades.
    upgrades: Semaphore,
    operations: Operations,
    served: Mutex<HashMap<Uuid, Served>>,
    /// The group that may connect to disks.
    group: Option<u32>,
}

impl Plugs {
    /// Creates the state with no VBD plugged.
    pub fn new(config: &Config) -> Result<Plugs, Problem> {
        let group = config.plug.socket_group.as_deref();
        let group = group.map(|name| account::group("plug.socket-group", name)).transpose()?;
        Ok(Plugs {
            workers: Workers::new(config.limits()),
            restarts: Semaphore::new(usize::try_from(config.plug.worker_pool_size).unwrap_or(Semaphore::MAX_PERMITS)),
            upgrades: Semaphore::new(upgrade::AT_ONE_TIME),
            operations: Operations::default(),
            served: Mutex::default(),
            group,
        })
    }

    fn served(&self) -> MutexGuard<'_, HashMap<Uuid, Served>> {
        self.served.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Stops supervising the VBD's process and returns it, if there is one.
    async fn release(&self, vbd: Uuid) -> Option<DiskProcess> {
        let served = self.served().remove(&vbd)?;
        served.release().await
    }
}
