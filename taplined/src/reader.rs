//! VBDs through which clients of the NBD address, and backups, read.
//!
//! Invariants: the clients of one VDI share a VBD, as long as that is plugged; it exists only while there is a client,
//! or while it is being plugged for one or removed.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError, Weak};
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
pub struct Readers(Mutex<HashMap<Uuid, Slot>>);

/// The VBD of one VDI. Locked while one is plugged.
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
    _vbd: Arc<PluggedVbd>,
    /// The socket of the disk process.
    pub socket: PathBuf,
}

impl Readers {
    fn slot(&self, vdi: Uuid) -> Slot {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        // Others than those that are in use, or are being taken.
        all.retain(|_, slot| Arc::strong_count(slot) > 1 || slot.try_lock().is_ok_and(|vbd| vbd.strong_count() > 0));
        all.entry(vdi).or_default().clone()
    }
}

impl Reader {
    /// Plugs a VDI for a client, unless that is done for another one already. Continues to its end if the caller is
    /// gone.
    pub async fn open(daemon: &Daemon, vdi: Uuid, requester: Requester) -> Result<Reader, Problem> {
        let at_work = daemon.clone();
        let opened = background::spawn(on_behalf_of(requester, async move { Reader::plugged(at_work, vdi).await }));
        opened.await.map_err(|error| Problem::failed(format_args!("plug VDI {vdi}"), error))?
    }

    async fn plugged(daemon: Daemon, vdi: Uuid) -> Result<Reader, Problem> {
        let slot = daemon.readers.slot(vdi);
        let mut known = slot.lock().await;
        let shared = match known.upgrade() {
            Some(shared) if shared.is_served().await? => shared,
            // Somebody has unplugged it. Its clients end by themselves.
            _ => {
                let made = Arc::new(make(&daemon, vdi).await?);
                *known = Arc::downgrade(&made);
                made
            }
        };
        let socket = DiskPaths::of(&daemon.config, shared.vbd).transport(Transport::Nbd);
        Ok(Reader { _vbd: shared, socket })
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
        background::spawn(remove(self.daemon.clone(), self.vbd));
    }
}

/// Creates a VBD and plugs it.
async fn make(daemon: &Daemon, vdi: Uuid) -> Result<PluggedVbd, Problem> {
    let vbd = daemon.catalogue.write(move |tx| tx.add_nbd_vbd(vdi)).await?.uuid;
    // Removed if the plug fails.
    let made = PluggedVbd { daemon: daemon.clone(), vbd };
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
