//! Measures free space, predicts when repositories will be full, and handles guests that wait for space.
//!
//! A disk process that runs out of space holds its guest's requests and reports that; the repository is then *full*.
//! It is measured until there is space again, and then all its disks are notified. Only operations that create
//! something new fail for lack of space.

use std::time::Duration;

use api::{Problem, Space, Sr, SrState};
use jiff::Timestamp;
use repo::driver::Capacity;
use tokio::sync::broadcast;
use uuid::Uuid;

use super::Srs;
use super::forecast::Samples;
use crate::config::Config;

/// Bytes that must be free for guests to continue, or a hundredth of a small repository: with less they would soon
/// wait again.
const ENOUGH: u64 = 64 << 20;

/// The state of a repository's space.
#[derive(Debug, Default)]
pub struct Watched {
    samples: Samples,
    /// Guests are waiting.
    full: bool,
    /// The free bytes when a guest last ran out of space; `None` if not known.
    short_with: Option<u64>,
    /// The state in the last event.
    published: Option<Space>,
}

/// Intervals of measuring repositories while one of their disks is writable.
#[derive(Clone, Copy, Debug)]
pub struct Intervals {
    /// While no guest waits.
    pub usual: Duration,
    /// While guests wait.
    pub full: Duration,
    /// While the repository is lost.
    pub lost: Duration,
}

impl Intervals {
    /// Reads the settings.
    pub fn of(config: &Config) -> Intervals {
        let seconds = |seconds: u32| Duration::from_secs(seconds.into());
        let storage = &config.storage;
        Intervals {
            usual: seconds(storage.measure_interval),
            full: seconds(storage.full_interval),
            lost: seconds(storage.lost_interval),
        }
    }
}

impl Srs {
    fn watched<T>(&self, sr: Uuid, with: impl FnOnce(&mut Watched) -> T) -> T {
        let mut all = self.watched.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        with(all.entry(sr).or_default())
    }

    /// Restores the state recorded by the previous daemon.
    pub(super) fn remember_space(&self, sr: &Sr) {
        let full = sr.space.as_ref().is_some_and(|space| space.full);
        self.watched(sr.uuid, |watched| watched.full = full);
    }

    pub(super) fn forget_space(&self, sr: Uuid) {
        self.watched.lock().unwrap_or_else(std::sync::PoisonError::into_inner).remove(&sr);
    }

    /// Whether guests wait for space in a repository.
    pub(super) fn is_full(&self, sr: Uuid) -> bool {
        self.watched(sr, |watched| watched.full)
    }

    pub(super) fn clear_full(&self, sr: Uuid) {
        self.watched(sr, |watched| (watched.full, watched.short_with) = (false, None));
    }

    /// No disk of the repository waits for space any more: the last one has found some by itself.
    pub async fn no_longer_full(&self, sr: Uuid) {
        if self.is_full(sr) {
            self.clear_full(sr);
            self.measure_now(sr).await;
        }
    }

    /// A disk of the repository is out of space and holds requests.
    pub async fn reported_full(&self, sr: Uuid) -> Result<(), Problem> {
        if !self.watched(sr, |watched| std::mem::replace(&mut watched.full, true)) {
            tracing::error!(%sr, "the repository is full: guests are waiting for space");
        }
        let directory = self.directory(sr).await?;
        let capacity = self.patience.ask(sr, "read its free space", move || directory.capacity()).await?;
        self.watched(sr, |watched| watched.short_with = Some(capacity.available));
        self.measure(sr).await
    }

    /// Subscribes to repositories that have space again. The receiver sends `space` to each plugged disk of such a
    /// repository.
    pub fn relieved(&self) -> broadcast::Receiver<Uuid> {
        self.relieved.subscribe()
    }

    /// Checks whether waiting guests can continue.
    pub(super) async fn relieve(&self, sr: Uuid) -> Result<(), Problem> {
        let directory = self.directory(sr).await?;
        let capacity = self.patience.ask(sr, "read its free space", move || directory.capacity()).await?;
        let enough = ENOUGH.min(capacity.size / 100);
        // With an amount that was not enough before, guests would wait again at once. Space freed before that
        // measurement is left to the disk, which retries by itself.
        let short_with = self.watched(sr, |watched| watched.short_with);
        let more_than = short_with.map_or(0, |short| short.saturating_add(1));
        if capacity.available < enough.max(more_than) {
            return Ok(());
        }
        tracing::info!(%sr, available = capacity.available, "space is available again: guests continue");
        self.clear_full(sr);
        // Without a receiver, no disk is plugged.
        self.relieved.send(sr).ok();
        self.measure(sr).await
    }

    /// Measures a repository; failure is only logged.
    pub async fn measure_now(&self, sr: Uuid) {
        if let Err(problem) = self.measure(sr).await {
            tracing::warn!(%sr, "its free space could not be read: {problem}");
        }
    }

    /// Measures and records the free space of a repository. If its directory is no longer where it was, it is lost.
    pub async fn measure(&self, uuid: Uuid) -> Result<(), Problem> {
        let directory = self.directory(uuid).await?;
        let measuring = self.patience.ask(uuid, "read its free space", move || {
            directory.still_there()?;
            directory.capacity()
        });
        let (sr, allocation) = self.catalogue.read(move |view| Ok((view.sr(uuid)?, view.sr_allocation(uuid)?))).await?;
        let capacity = match measuring.await {
            Ok(capacity) => capacity,
            Err(problem) if problem.code == api::Code::State => return self.lose(&sr, &problem).await,
            Err(problem) => return Err(problem),
        };
        let space = self.space(&sr, capacity, allocation);
        if sr.state != SrState::Attached || sr.space.as_ref().is_some_and(|before| is_equivalent(before, &space)) {
            return Ok(());
        }
        let publish = self.watched(uuid, |watched| {
            let publish = watched.published.as_ref().is_none_or(|last| deserves_event(last, &space));
            if publish {
                watched.published = Some(space.clone());
            }
            publish
        });
        self.catalogue.write(move |tx| tx.set_sr_space(uuid, &space, publish)).await
    }

    fn space(&self, sr: &Sr, capacity: Capacity, (images, virtual_allocation): (u64, u64)) -> Space {
        let measured = Timestamp::now();
        let free = capacity.available.saturating_sub(sr.reserve);
        let (full, forecast) = self.watched(sr.uuid, |watched| {
            watched.samples.note(measured, capacity.used);
            (watched.full, watched.samples.forecast(free))
        });
        Space {
            physical_size: capacity.size,
            physical_utilisation: capacity.used,
            free,
            images,
            virtual_allocation,
            full,
            forecast,
            measured,
        }
    }
}

/// Whether a measurement is equivalent to the previous one: then it is not recorded, and there is no event.
fn is_equivalent(before: &Space, now: &Space) -> bool {
    let same = Space { measured: now.measured, forecast: now.forecast.clone(), ..before.clone() };
    same == *now && before.forecast.is_some() == now.forecast.is_some()
}

/// Whether a measurement differs from the last published one by more than ordinary writes of guests: by a hundredth
/// of the repository, or in the size, the VDIs or the forecast's existence.
fn deserves_event(last: &Space, now: &Space) -> bool {
    let differs = |one: u64, other: u64| one.abs_diff(other) >= (now.physical_size / 100).max(1);
    last.full != now.full
        || (last.free == 0) != (now.free == 0)
        || last.forecast.is_some() != now.forecast.is_some()
        || last.virtual_allocation != now.virtual_allocation
        || last.physical_size != now.physical_size
        || differs(last.physical_utilisation, now.physical_utilisation)
        || differs(last.free, now.free)
}

#[cfg(test)]
mod test;
