//! VBDs through which clients of the NBD address read.
//!
//! Invariants: a VDI has at most one, which all of its clients share; it exists only while there is a client, or while
//! it is being plugged for one or removed.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use api::{Code, Problem, Transport, VbdState};
use tokio::sync::Mutex as AsyncMutex;
use uuid::Uuid;

use crate::background;
use crate::daemon::Daemon;
use crate::disk::paths::DiskPaths;
use crate::plug;

/// The VDIs that are being read.
#[derive(Debug, Default)]
pub struct Readers(Mutex<HashMap<Uuid, Shared>>);

/// The VBD of one VDI. Locked while it is plugged and while it is removed.
type Shared = Arc<AsyncMutex<Vbd>>;

#[derive(Debug, Default)]
struct Vbd {
    plugged: Option<Uuid>,
    clients: usize,
}

/// A client of a VDI. Dropping the last one removes the VBD.
#[derive(Debug)]
pub struct Reader {
    daemon: Daemon,
    vdi: Uuid,
    shared: Shared,
    /// The socket of the disk process.
    pub socket: PathBuf,
}

impl Readers {
    fn of(&self, vdi: Uuid) -> Shared {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).entry(vdi).or_default().clone()
    }

    /// Forgets a VDI that no other client is about to read.
    fn forget(&self, vdi: Uuid, shared: &Shared) {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        // One in the map, one of the caller; a client that waits for it has another one.
        if Arc::strong_count(shared) == 2 {
            all.remove(&vdi);
        }
    }
}

impl Reader {
    /// Plugs a VDI for a client, unless that is done for another one already. Continues to its end if the caller is
    /// gone.
    pub async fn open(daemon: &Daemon, vdi: Uuid) -> Result<Reader, Problem> {
        let at_work = daemon.clone();
        let opened = background::spawn(async move { Reader::plugged(at_work, vdi).await });
        opened.await.map_err(|error| Problem::new(Code::Internal, format!("plugging VDI {vdi} ended: {error}")))?
    }

    async fn plugged(daemon: Daemon, vdi: Uuid) -> Result<Reader, Problem> {
        let shared = daemon.readers.of(vdi);
        let mut vbd = shared.clone().lock_owned().await;
        let plugged = match vbd.plugged {
            Some(plugged) => plugged,
            None => match make(&daemon, vdi).await {
                Ok(made) => *vbd.plugged.insert(made),
                Err(problem) => {
                    drop(vbd);
                    daemon.readers.forget(vdi, &shared);
                    return Err(problem);
                }
            },
        };
        vbd.clients += 1;
        drop(vbd);
        let socket = DiskPaths::of(&daemon.config, plugged).transport(Transport::Nbd);
        Ok(Reader { daemon, vdi, shared, socket })
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        let (daemon, vdi, shared) = (self.daemon.clone(), self.vdi, self.shared.clone());
        background::spawn(async move {
            let mut vbd = shared.lock().await;
            vbd.clients = vbd.clients.saturating_sub(1);
            if vbd.clients > 0 {
                return;
            }
            if let Some(plugged) = vbd.plugged.take() {
                remove(&daemon, plugged).await;
            }
            drop(vbd);
            daemon.readers.forget(vdi, &shared);
        });
    }
}

/// Creates a VBD and plugs it.
async fn make(daemon: &Daemon, vdi: Uuid) -> Result<Uuid, Problem> {
    let vbd = daemon.catalogue.write(move |tx| tx.add_nbd_vbd(vdi)).await?.uuid;
    let plugged = async {
        let task = plug::plug(daemon, vbd).await?;
        daemon.tasks.success_of(task.uuid).await
    };
    match plugged.await {
        Ok(_) => Ok(vbd),
        Err(problem) => {
            remove(daemon, vbd).await;
            Err(match problem.code {
                Code::InUse => problem.advise("take a snapshot, and read that"),
                _ => problem,
            })
        }
    }
}

/// Unplugs a VBD and removes it. What cannot be done now is left to the next daemon.
async fn remove(daemon: &Daemon, vbd: Uuid) {
    if daemon.tasks.is_stopping() {
        return;
    }
    let removed = async {
        let now = daemon.catalogue.read(move |view| view.find_vbd(vbd)).await?;
        let Some(now) = now else { return Ok(()) };
        if now.state != VbdState::Unplugged {
            let task = plug::unplug(daemon, vbd, true).await?;
            daemon.tasks.success_of(task.uuid).await?;
        }
        plug::remove(daemon, vbd).await
    };
    if let Err(problem) = removed.await {
        tracing::error!(%vbd, "a VBD of the NBD address could not be removed: {problem}");
    }
}

/// Removes the VBDs that the previous daemon had for its clients, which are gone with it.
pub async fn remove_left_over(daemon: &Daemon) -> Result<(), Problem> {
    for vbd in daemon.catalogue.read(|view| view.nbd_vbds()).await? {
        let daemon = daemon.clone();
        background::spawn(async move { remove(&daemon, vbd).await });
    }
    Ok(())
}
