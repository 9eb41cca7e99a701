//! Periodic checks of repositories: their free space, while it can change, and whether lost ones are back.
//!
//! Invariant: on a host on which no disk is plugged read-write, no task ends and no repository is lost, nothing here
//! wakes up.

use std::sync::Arc;
use std::time::Duration;

use api::{Event, ObjectKind, Problem, SrState, Task, TaskState};
use repo::catalogue::Image;
use tokio::sync::broadcast::Receiver;
use tokio::time::Instant;
use uuid::Uuid;

use super::{Srs, WhenAttached};
use crate::daemon::Daemon;

/// Minimum interval of checks caused by events, however many events there are.
const APART: Duration = Duration::from_secs(1);

/// Looks for lost repositories, for the lifetime of the daemon.
pub async fn seek_lost(daemon: Daemon) {
    let mut events = daemon.catalogue.subscribe();
    loop {
        let known = daemon.catalogue.read(|view| view.srs()).await.unwrap_or_default();
        let lost = known.into_iter().filter(|sr| sr.state == SrState::Lost).collect::<Vec<_>>();
        if lost.is_empty() {
            wait_for(&mut events, |event| event.kind == ObjectKind::Sr).await;
            continue;
        }
        tokio::time::sleep(daemon.srs.intervals.lost).await;
        for sr in lost {
            let Ok(_claim) = daemon.srs.claim(sr.uuid, "checked") else { continue };
            // It may have been attached or detached in the meantime.
            let now = daemon.catalogue.read(move |view| view.sr(sr.uuid)).await;
            let Some(sr) = now.ok().filter(|sr| sr.state == SrState::Lost) else { continue };
            match daemon.srs.attach_as(sr.uuid, None, true).await {
                Ok(ended) => {
                    daemon.tasks.abandon_ended(&ended);
                    tracing::info!(sr = %sr.uuid, name = %sr.name, "the repository is back");
                    super::doubtful::hold(&daemon, sr.uuid).await;
                    let WhenAttached { reconcile, collect } = daemon.srs.when_attached;
                    reconcile(daemon.clone(), sr.uuid).await;
                    collect(&daemon, sr.uuid);
                }
                Err(problem) => {
                    tracing::debug!(sr = %sr.uuid, "still lost: {problem}");
                    if let Err(problem) = daemon.srs.lose(&sr, &problem).await {
                        tracing::warn!(sr = %sr.uuid, "the reason for the loss could not be recorded: {problem}");
                    }
                }
            }
        }
    }
}

/// Measures the free space of repositories: when a task has ended that may have changed it, and periodically while a
/// disk is writable.
pub async fn watch_space(daemon: Daemon) {
    let mut events = daemon.catalogue.subscribe();
    let mut due = Instant::now();
    loop {
        if let Err(problem) = daemon.srs.clear_stale_full().await {
            tracing::warn!("cannot tell which guests wait for space: {problem}");
        }
        let written = daemon.catalogue.read(|view| view.srs_written()).await.unwrap_or_default();
        let any_full = written.iter().any(|sr| daemon.srs.is_full(*sr));
        let intervals = daemon.srs.intervals;
        let interval = if any_full { intervals.full } else { intervals.usual };
        due = due.min(Instant::now() + interval);
        tokio::select! {
            () = tokio::time::sleep_until(due), if !written.is_empty() => {
                look(&daemon.srs, &written).await;
                due = Instant::now() + interval;
            }
            task = wait_for(&mut events, matters) => {
                if task {
                    measure_all(&daemon.srs, &written).await;
                }
                tokio::time::sleep(APART).await;
            }
        }
    }
}

/// Whether an event may affect the free space of a repository, or when it is measured. Plugs and unplugs do, as
/// changes of VBDs.
fn matters(event: &Event) -> bool {
    match event.kind {
        ObjectKind::Vbd => true,
        ObjectKind::Task => ended(event),
        ObjectKind::Host | ObjectKind::Sr | ObjectKind::Vdi | ObjectKind::Vm => false,
    }
}

fn ended(event: &Event) -> bool {
    let task: Option<Task> = event.object().ok().flatten();
    let over = |task: &Task| matches!(task.state, TaskState::Done | TaskState::Failed | TaskState::Cancelled);
    task.is_some_and(|task| over(&task) && !task.verb.starts_with("vbd-"))
}

/// Waits for a relevant event, and consumes all that are queued. Returns whether one was about a task, or events were
/// missed, so that one may have been.
async fn wait_for(events: &mut Receiver<Arc<Event>>, matters: impl Fn(&Event) -> bool) -> bool {
    let mut found = false;
    let mut task = false;
    loop {
        let next = match found {
            false => events.recv().await.map_err(|error| error.to_string()),
            true => match events.try_recv() {
                Err(tokio::sync::broadcast::error::TryRecvError::Empty) => return task,
                next => next.map_err(|error| error.to_string()),
            },
        };
        match next {
            Ok(event) if matters(&event) => {
                found = true;
                task |= event.kind == ObjectKind::Task;
            }
            Ok(_) => {}
            // Some were missed: the sender never closes.
            Err(_) => (found, task) = (true, true),
        }
    }
}

/// Measures all repositories, and images of those that are written: a snapshot task may have ended.
async fn measure_all(srs: &Srs, written: &[Uuid]) {
    let attached: Vec<Uuid> = srs.open().keys().copied().collect();
    for sr in attached {
        match written.contains(&sr) {
            true => look(srs, &[sr]).await,
            false => srs.measure_now(sr).await,
        }
    }
}

async fn look(srs: &Srs, written: &[Uuid]) {
    for sr in written {
        let looked = match srs.is_full(*sr) {
            true => srs.relieve(*sr).await,
            false => Ok(()),
        };
        let looked = match looked {
            Ok(()) => srs.measure_written(*sr).await,
            failed => failed,
        };
        if let Err(problem) = looked {
            tracing::warn!(%sr, "its free space could not be read: {problem}");
        }
    }
}

impl Srs {
    /// If no disk is plugged read-write any more, no guest waits for space. This is checked after the set of waiting
    /// disks is known: a disk that reported being full was plugged before.
    async fn clear_stale_full(&self) -> Result<(), Problem> {
        let attached: Vec<Uuid> = self.open().keys().copied().collect();
        let full: Vec<Uuid> = attached.into_iter().filter(|sr| self.is_full(*sr)).collect();
        if full.is_empty() {
            return Ok(());
        }
        let written = self.catalogue.read(|view| view.srs_written()).await?;
        for sr in full.into_iter().filter(|sr| !written.contains(sr)) {
            self.clear_full(sr);
            self.measure_now(sr).await;
        }
        Ok(())
    }

    /// Records the physical size of a VDI's image after its disk's process has exited: it is not measured again until
    /// written. Failure is left to the next scan.
    pub async fn measure_image_of(&self, vdi: Uuid) {
        let measure = async {
            let image = self.catalogue.read(move |view| view.image(view.vdi_image(vdi)?)).await?;
            let (directory, file) = (self.directory(image.sr).await?, image.file.clone());
            let physical =
                self.patience.ask(image.sr, "measure an image of", move || directory.physical(&file)).await?;
            let recorded = self.catalogue.write(move |tx| match tx.find_image(image.uuid)? {
                Some(now) if now.physical != physical => tx.set_image(&Image { physical, ..now }),
                _ => Ok(()),
            });
            recorded.await
        };
        if let Err(problem) = measure.await {
            tracing::debug!(%vdi, "its image was not measured: {problem}");
        }
    }

    /// Records the physical sizes of the images that are being written, and the space of the repository.
    async fn measure_written(&self, sr: Uuid) -> Result<(), Problem> {
        let directory = self.directory(sr).await?;
        let images = self.catalogue.read(move |view| view.images_written(sr)).await?;
        let grown = self.patience.ask(sr, "measure its images", move || {
            // An image that is missing, or cannot be measured, is left to the next scan.
            let physical = |image: &Image| directory.physical(&image.file).unwrap_or(image.physical);
            let looked = images.into_iter().map(|image| (physical(&image), image));
            Ok(looked.filter(|(physical, image)| *physical != image.physical).collect::<Vec<_>>())
        });
        let grown = grown.await?;
        if !grown.is_empty() {
            let recorded = self.catalogue.write(move |tx| {
                for (physical, image) in grown {
                    // It may have changed since it was measured.
                    if let Some(now) = tx.find_image(image.uuid)? {
                        tx.set_image(&Image { physical, ..now })?;
                    }
                }
                Ok(())
            });
            recorded.await?;
        }
        self.measure(sr).await
    }
}

#[cfg(test)]
mod test;
