//! Handles a repository that another host has used since this one: this host's state of its disks is void.
//!
//! When a daemon and its disks die together, they leave redo logs, and VBDs that are plugged according to the
//! catalogue. The next daemon continues with both, which is right if no other host has used the repository. If one
//! has, it may have written to the images: replaying a log would overwrite that, and a guest would continue with a
//! disk that has changed under it.
//!
//! 1. Logs of images that no process has locked are removed. A locked image has not been written by others.
//! 2. VBDs whose process is gone are unplugged in the catalogue; their supervisors notice.
//! 3. The catalogue is updated from the repository's inventory, discarding changes that are not in it; unfinished jobs
//!    of an earlier daemon are over.
//! 4. This host is recorded as the last user.
//!
//! *If killed before 4:* everything is repeated.

use std::sync::Arc;

use api::{Code, Problem, Sr, Variant, VbdState};
use repo::driver::{Directory, Last, LastHost};
use uuid::Uuid;

use super::Srs;
use crate::disk::redo::RedoLogs;
use crate::disk::serving;
use crate::task::blocking;

/// The previous user of a repository.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Before {
    /// This host; or the repository is read-only and has no record.
    Us,
    /// This host, with its state directory elsewhere.
    Moved,
    /// This machine with an earlier catalogue, whose redo logs are in our run directory.
    Predecessor,
    /// No host is recorded.
    Unrecorded,
    /// Another host.
    Other,
}

impl Srs {
    /// Determines the last user of a repository, which is locked. If it was another host, void state is discarded.
    pub(super) async fn discard_void_state(
        &self,
        sr: &Sr,
        directory: &Arc<Directory>,
        variant: &Variant,
    ) -> Result<Before, Problem> {
        if variant.read_only {
            return Ok(Before::Us);
        }
        let at = directory.clone();
        let last = self.patience.ask(sr.uuid, "read the last host of", move || at.last_host()).await?;
        let other = match last {
            Last::Host(last) if last == self.host => return Ok(Before::Us),
            Last::Host(last) if last.is_same(&self.host) => return Ok(Before::Moved),
            Last::Host(last) if self.predecessors.contains(&last) => return Ok(Before::Predecessor),
            Last::Nobody => return Ok(Before::Unrecorded),
            Last::Host(LastHost { host, .. }) if host == self.host.host => "a copy of this host".to_owned(),
            Last::Host(LastHost { host, .. }) => format!("host {host}"),
            Last::Unknown => "an unknown host".to_owned(),
        };
        self.discard_all(sr, directory, &other).await.map(|()| Before::Other)
    }

    /// Records this host as the last user of a repository.
    pub(super) async fn record_last_host(&self, sr: Uuid, directory: &Arc<Directory>, before: Before) {
        if before == Before::Us {
            return;
        }
        let (at, host) = (directory.clone(), self.host.clone());
        if let Err(problem) = self.patience.ask(sr, "record the host of", move || at.set_last_host(&host)).await {
            // The repository may be full, for example. Changes by the other host are then checked again the next
            // time.
            tracing::warn!(%sr, "this host could not be recorded in it: {problem}");
        }
    }

    async fn discard_all(&self, sr: &Sr, directory: &Arc<Directory>, other: &str) -> Result<(), Problem> {
        let (uuid, name) = (sr.uuid, sr.name.clone());
        tracing::warn!(sr = %uuid, %name, "{other} has used the repository since this host");
        let (at, logs) = (directory.clone(), RedoLogs::of(&self.config));
        let removed = self.patience.ask(uuid, "find redo logs of", move || logs.remove_void(&at)).await?;
        for image in removed {
            tracing::warn!(sr = %uuid, image, "removed its redo log: {other} may have written to the image since");
        }
        let config = self.config.clone();
        let running = blocking("find disk processes", move || serving::all(&config)).await?;
        let why =
            format!("{other} has used its repository, '{name}', since its process ended and may have written to it");
        let unplugged = self.catalogue.write(move |tx| {
            let mut unplugged = Vec::new();
            for vbd in tx.vbds(None, None)? {
                let served = !matches!(vbd.state, VbdState::Plugged | VbdState::Restarting);
                if served || running.contains_key(&vbd.uuid) || tx.vdi(vbd.vdi)?.sr != uuid {
                    continue;
                }
                tx.end_unplug(vbd.uuid, Some(&void(vbd.uuid, &why)))?;
                unplugged.push(vbd.uuid);
            }
            Ok(unplugged)
        });
        for vbd in unplugged.await? {
            tracing::error!(%vbd, sr = %uuid, "it is no longer plugged: {other} has used the repository since");
        }
        Ok(())
    }
}

/// The problem of a VBD that was unplugged.
fn void(vbd: Uuid, why: &str) -> Problem {
    let what = format!("VBD {vbd} is no longer plugged: {why}; data its guest had not flushed is lost");
    Problem::new(Code::State, what).advise("stop the guest that used it if it still runs, then plug it again")
}
