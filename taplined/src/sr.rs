//! Attached repositories: where their directories are, and their free space.
//!
//! Any access to their storage may block for long, so it runs on separate threads with a time limit ([`patience`]).
//! The contents of images are left to disk processes.

mod attach;
mod destroy;
mod forecast;
mod inventory;
mod make;
mod mount_points;
mod patience;
mod probe;
mod scan;
mod space;
mod take_over;
mod watch;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use api::{Code, Problem};
use futures_util::future::BoxFuture;
use repo::Catalogue;
use repo::driver::{Directory, LastHost};
use uuid::Uuid;

use crate::config::Config;
use crate::daemon::Daemon;
use mount_points::MountPoints;
use patience::Patience;
use space::Watched;

pub use attach::storage_of;
pub use destroy::Destroy;
pub use inventory::keep_inventories;
pub use make::{Create, Given, Introduce, is_known, must_fit, new_sr};
pub use scan::{compare_files, doubtful, same_file, scan};
pub use watch::{seek_lost, watch_space};

/// The attached repositories.
#[derive(Debug)]
pub struct Srs {
    catalogue: Catalogue,
    config: Config,
    /// This host.
    host: LastHost,
    /// Earlier hosts of the run directory.
    predecessors: Vec<LastHost>,
    /// Their directories.
    open: Mutex<HashMap<Uuid, Arc<Directory>>>,
    /// The state of the inventories of writable repositories.
    logs: Mutex<HashMap<Uuid, inventory::Slot>>,
    /// Repositories that are being attached, detached, scanned or removed, with the operation as a participle.
    claimed: Arc<Mutex<HashMap<Uuid, &'static str>>>,
    /// Limits the time to wait for their storage.
    pub patience: Patience,
    places: MountPoints,
    watched: Mutex<HashMap<Uuid, Watched>>,
    intervals: space::Intervals,
    /// Notifies of repositories that have space again.
    relieved: tokio::sync::broadcast::Sender<Uuid>,
    /// What follows when a repository becomes available.
    pub when_attached: WhenAttached,
}

/// Actions of the rest of the daemon when a repository becomes available.
#[derive(Clone, Copy, Debug)]
pub struct WhenAttached {
    /// Compares its disks and files with the catalogue.
    pub reconcile: fn(Daemon, Uuid) -> BoxFuture<'static, ()>,
    /// Starts merges of its images that are no longer needed.
    pub collect: fn(&Daemon, Uuid),
}

/// Exclusive use of a repository, until dropped.
#[derive(Debug)]
pub struct Claim {
    sr: Uuid,
    claimed: Arc<Mutex<HashMap<Uuid, &'static str>>>,
}

impl Drop for Claim {
    fn drop(&mut self) {
        self.claimed.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.sr);
    }
}

impl Srs {
    /// Creates the state with no repository attached.
    pub fn new(
        config: &Config,
        catalogue: Catalogue,
        host: LastHost,
        predecessors: Vec<LastHost>,
        when_attached: WhenAttached,
    ) -> Srs {
        let limit = config.storage.patience();
        Srs {
            catalogue,
            config: config.clone(),
            host,
            predecessors,
            open: Mutex::default(),
            logs: Mutex::default(),
            claimed: Arc::default(),
            patience: Patience::new(limit),
            places: MountPoints { directory: config.run_directory.join("sr"), limit },
            watched: Mutex::default(),
            intervals: space::Intervals::of(config),
            relieved: tokio::sync::broadcast::channel(64).0,
            when_attached,
        }
    }

    fn open(&self) -> MutexGuard<'_, HashMap<Uuid, Arc<Directory>>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// All attached repositories and their directories.
    fn all_open(&self) -> Vec<(Uuid, Arc<Directory>)> {
        let mut open: Vec<_> = self.open().iter().map(|(sr, directory)| (*sr, directory.clone())).collect();
        open.sort_by_key(|(sr, _)| *sr);
        open
    }

    fn logs(&self) -> MutexGuard<'_, HashMap<Uuid, inventory::Slot>> {
        self.logs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives a task exclusive use of a repository, while it is `doing` something with it.
    pub fn claim(&self, sr: Uuid, doing: &'static str) -> Result<Claim, Problem> {
        let mut claimed = self.claimed.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(other) = claimed.get(&sr) {
            let what = format!("the repository {sr} is being {other}");
            return Err(Problem::new(Code::Busy, what).advise("wait for that task"));
        }
        claimed.insert(sr, doing);
        Ok(Claim { sr, claimed: self.claimed.clone() })
    }

    /// The directory of a repository, which must be attached.
    pub async fn directory(&self, sr: Uuid) -> Result<Arc<Directory>, Problem> {
        let open = self.open().get(&sr).cloned();
        if let Some(directory) = open {
            return Ok(directory);
        }
        self.catalogue.read(move |view| view.attached_sr(sr)).await?;
        let what = format!("the repository {sr} is being attached or detached");
        Err(Problem::new(Code::State, what).advise("try again"))
    }

    /// Refuses an operation that needs `bytes` in a repository if they are not available in addition to its reserve.
    pub async fn room(&self, sr: Uuid, bytes: u64) -> Result<(), Problem> {
        let directory = self.directory(sr).await?;
        let reserve = self.catalogue.read(move |view| view.sr(sr)).await?.reserve;
        let capacity = self.patience.ask(sr, "read its free space", move || directory.capacity()).await?;
        let free = capacity.available.saturating_sub(reserve);
        if bytes <= free {
            return Ok(());
        }
        let what = format!(
            "this needs {bytes} bytes, but the repository {sr} has only {free} free besides its reserve of \
                {reserve}"
        );
        let advice = "destroy unneeded disks, enlarge its file system, or lower the reserve";
        Err(Problem::new(Code::NoSpace, what).advise(advice))
    }
}
