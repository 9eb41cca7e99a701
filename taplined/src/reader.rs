//! VBDs through which clients of the NBD address, and backups, read.
//!
//! Invariants: the clients of one VDI that want the same dirty bitmaps share a VBD, as long as that is plugged; it
//! exists only while there is a client, or while it is being plugged for one or removed.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use api::{Problem, Requester, Transport, VbdState};
use repo::catalogue::on_behalf_of;
use tokio::sync::Mutex as AsyncMutex;
use uuid::Uuid;

use crate::background;
use crate::daemon::Daemon;
use crate::disk::paths::DiskPaths;
use crate::plug;

/// Pause before another attempt to remove a VBD.
const REST: Duration = Duration::from_secs(5);

/// The VDIs that are being read.
#[derive(Debug, Default)]
pub struct Readers {
    slots: Mutex<HashMap<Read, Slot>>,
    /// The dirty bitmaps that the process of a VBD is to offer, if any.
    bitmaps: Mutex<HashMap<Uuid, Vec<Uuid>>>,
}

/// What is read: a VDI, with what has changed since these earlier snapshots of it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Read {
    vdi: Uuid,
    since: Vec<Uuid>,
}

/// The VBD through which something is read. Locked while one is plugged.
type Slot = Arc<AsyncMutex<Weak<PluggedVbd>>>;

/// A plugged VBD. Dropped with its last client, it is removed.
#[derive(Debug)]
struct PluggedVbd {
    daemon: Daemon,
    vbd: Uuid,
}

/// A client of a VDI.
#[derive(Debug)]
pub struct Reader {
    vbd: Arc<PluggedVbd>,
    /// The socket of the disk process.
    pub socket: PathBuf,
}

impl Readers {
    fn slot(&self, read: Read) -> Slot {
        let mut all = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
        // Others than those that are in use, or are being taken.
        all.retain(|_, slot| Arc::strong_count(slot) > 1 || slot.try_lock().is_ok_and(|vbd| vbd.strong_count() > 0));
        all.entry(read).or_default().clone()
    }

    /// The snapshots since which changes are wanted by the readers of a VBD. A VBD of an earlier daemon has none: its
    /// clients are gone.
    pub fn bitmaps_of(&self, vbd: Uuid) -> Vec<Uuid> {
        self.bitmaps().get(&vbd).cloned().unwrap_or_default()
    }

    fn bitmaps(&self) -> MutexGuard<'_, HashMap<Uuid, Vec<Uuid>>> {
        self.bitmaps.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Reader {
    /// Plugs a VDI for a client, unless that is done for another one already. Its process offers, as dirty bitmaps, the
    /// changes `since` earlier snapshots of the VDI, as far as all of them are known. Continues to its end
    /// if the caller is gone.
    pub async fn open(daemon: &Daemon, vdi: Uuid, since: &[Uuid], requester: Requester) -> Result<Reader, Problem> {
        let (at_work, read) = (daemon.clone(), Read { vdi, since: since.to_vec() });
        let opened = background::spawn(on_behalf_of(requester, async move { Reader::plugged(at_work, read).await }));
        opened.await.map_err(|error| Problem::failed(format_args!("plug VDI {vdi}"), error))?
    }

    async fn plugged(daemon: Daemon, read: Read) -> Result<Reader, Problem> {
        let slot = daemon.readers.slot(read.clone());
        let mut known = slot.lock().await;
        let shared = match known.upgrade() {
            Some(shared) if shared.is_served().await? => shared,
            // Somebody has unplugged it. Its clients end by themselves.
            _ => {
                let made = Arc::new(make(&daemon, read).await?);
                *known = Arc::downgrade(&made);
                made
            }
        };
        let socket = DiskPaths::of(&daemon.config, shared.vbd).transport(Transport::Nbd);
        Ok(Reader { vbd: shared, socket })
    }

    /// The VBD through which it is read. While it is there, no guest writes to the VDI.
    pub fn vbd(&self) -> Uuid {
        self.vbd.vbd
    }
}

impl PluggedVbd {
    async fn is_served(&self) -> Result<bool, Problem> {
        let vbd = self.vbd;
        let found = self.daemon.catalogue.read(move |view| view.find_vbd(vbd)).await?;
        Ok(found.is_some_and(|vbd| matches!(vbd.state, VbdState::Plugged | VbdState::Restarting)))
    }
}

impl Drop for PluggedVbd {
    fn drop(&mut self) {
        self.daemon.readers.bitmaps().remove(&self.vbd);
        background::spawn(remove(self.daemon.clone(), self.vbd));
    }
}

/// Creates a VBD and plugs it.
async fn make(daemon: &Daemon, Read { vdi, since }: Read) -> Result<PluggedVbd, Problem> {
    let vbd = daemon.catalogue.write(move |tx| tx.add_nbd_vbd(vdi)).await?.uuid;
    // Removed if the plug fails.
    let made = PluggedVbd { daemon: daemon.clone(), vbd };
    if !since.is_empty() {
        daemon.readers.bitmaps().insert(vbd, since);
    }
    let task = plug::plug(daemon, vbd).await?;
    daemon.tasks.success_of(task.uuid).await?;
    Ok(made)
}

/// Unplugs a VBD and removes it, however often that must be tried. When the daemon stops, the next one does it.
async fn remove(daemon: Daemon, vbd: Uuid) {
    while !daemon.tasks.is_stopping() {
        match try_to_remove(&daemon, vbd).await {
            Ok(()) => return,
            Err(_) if daemon.tasks.is_stopping() => return,
            Err(problem) => {
                tracing::warn!(%vbd, "a VBD of the NBD address could not be removed: {problem}; trying again");
                tokio::time::sleep(REST).await;
            }
        }
    }
}

async fn try_to_remove(daemon: &Daemon, vbd: Uuid) -> Result<(), Problem> {
    let Some(now) = daemon.catalogue.read(move |view| view.find_vbd(vbd)).await? else { return Ok(()) };
    if now.state != VbdState::Unplugged {
        let task = plug::unplug(daemon, vbd, true).await?;
        daemon.tasks.success_of(task.uuid).await?;
    }
    plug::remove(daemon, vbd).await
}

/// Removes the VBDs that the previous daemon had for its clients, which are gone with it.
pub async fn remove_left_over(daemon: &Daemon) -> Result<(), Problem> {
    for vbd in daemon.catalogue.read(|view| view.nbd_vbds()).await? {
        background::spawn(remove(daemon.clone(), vbd));
    }
    Ok(())
}
