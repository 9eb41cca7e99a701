//! Downloads an object into a file, by several requests at a time, and continues a download that was interrupted.
//!
//! Parts are written in order. Blocks of zeroes are left out, since the file is new where it is written. Invariant: a
//! download is continued only if the file records the same URL, length and validator ([`crate::partial`]); the file is
//! complete, durable and of the object's length when this returns.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use crate::error::{HttpError, HttpErrorKind};
use crate::object::{Object, PART_MAX};
use crate::partial::Partial;

/// Requests at a time: one connection seldom has all of a line.
const THREADS: usize = 4;
/// Parts that are read ahead of the file: the memory that a download takes.
const AHEAD: u64 = 8;
/// How often the file is synced: what a kill or a power loss can cost.
const SYNC_EVERY: u64 = 32 << 20;
/// How often the writer looks at the end of the process: the signal does not wake it.
const LOOK: Duration = Duration::from_millis(200);
/// The granularity of holes.
const GRAIN: usize = 64 << 10;

/// Why a download has failed. The file can be continued.
#[derive(Debug, thiserror::Error)]
pub enum DownloadError {
    /// The object cannot be read.
    #[error(transparent)]
    Http(#[from] HttpError),
    /// The file cannot be written.
    #[error("cannot write what is downloaded")]
    File(#[source] io::Error),
}

/// The parts between the threads that request them and the one that writes.
struct Parts {
    state: Mutex<State>,
    changed: Condvar,
    /// The bytes to be read.
    range: Range<u64>,
}

struct State {
    /// The first part that no thread has begun, and the first that has not been written.
    next: u64,
    written: u64,
    /// Those that have arrived.
    here: BTreeMap<u64, Vec<u8>>,
    /// The first failure of a thread.
    failed: Option<HttpError>,
    /// The writer has ended.
    over: bool,
}

/// Fills `file` with the object; `progress` receives the number of bytes of it that the file has. Returns how many it
/// had at first. After a failure, threads of this function may still wait for the server, for as long as a request may
/// take; they touch nothing else.
pub fn download(object: &Arc<Object>, file: &File, progress: &mut dyn FnMut(u64)) -> Result<u64, DownloadError> {
    let failed = DownloadError::File;
    let mut partial = Partial::take_up(file, object.url().text(), object.identity()).map_err(failed)?;
    let begun = partial.done();
    progress(begun);
    let state = State { next: 0, written: 0, here: BTreeMap::new(), failed: None, over: false };
    let range = begun..object.size();
    let parts = Arc::new(Parts { state: Mutex::new(state), changed: Condvar::new(), range });
    for _ in 0..THREADS {
        let (parts, object) = (Arc::clone(&parts), Arc::clone(object));
        thread::spawn(move || parts.fetch(&object));
    }
    let written = parts.write(object, file, &mut partial, progress);
    parts.lock().over = true;
    parts.changed.notify_all();
    if let Err(error) = written {
        // What has been written need not be read again; the first error is the one to report. After an error of the
        // file a sync would prove nothing: the kernel may have marked clean what it could not write.
        if let DownloadError::Http(_) = error {
            drop(partial.record(parts.written()));
        }
        return Err(error);
    }
    partial.complete().map_err(failed)?;
    Ok(begun)
}

impl Parts {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The bytes of a part; `None` behind the last one.
    fn part(&self, number: u64) -> Option<Range<u64>> {
        let start = self.range.start.checked_add(number.checked_mul(PART_MAX)?)?;
        (start < self.range.end).then(|| start..start.saturating_add(PART_MAX).min(self.range.end))
    }

    /// The offset up to which the file is written.
    fn written(&self) -> u64 {
        self.part(self.lock().written).map_or(self.range.end, |part| part.start)
    }

    /// Requests parts, until there are no more or one has failed.
    fn fetch(&self, object: &Object) {
        loop {
            let mut state = self.lock();
            while !state.over && state.failed.is_none() && state.next >= state.written + AHEAD {
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
            let number = state.next;
            let Some(part) = self.part(number).filter(|_| !state.over && state.failed.is_none()) else { return };
            state.next += 1;
            drop(state);
            let read = object.read(part);
            let mut state = self.lock();
            match read {
                Ok(bytes) => drop(state.here.insert(number, bytes)),
                Err(error) => drop(state.failed.get_or_insert(error)),
            }
            drop(state);
            self.changed.notify_all();
        }
    }

    /// Writes the parts in order as they arrive.
    fn write(
        &self,
        object: &Object,
        file: &File,
        partial: &mut Partial<'_>,
        progress: &mut dyn FnMut(u64),
    ) -> Result<(), DownloadError> {
        let failed = DownloadError::File;
        let mut synced = self.range.start;
        for number in 0.. {
            let Some(part) = self.part(number) else { break };
            let bytes = self.wait_for(number, object)?;
            write_data(file, part.start, &bytes).map_err(failed)?;
            self.lock().written = number + 1;
            self.changed.notify_all();
            if part.end - synced >= SYNC_EVERY {
                partial.record(part.end).map_err(failed)?;
                synced = part.end;
            }
            progress(part.end);
        }
        Ok(())
    }

    fn wait_for(&self, number: u64, object: &Object) -> Result<Vec<u8>, HttpError> {
        let mut state = self.lock();
        loop {
            if let Some(bytes) = state.here.remove(&number) {
                return Ok(bytes);
            }
            if let Some(failed) = &state.failed {
                return Err(failed.clone());
            }
            if object.is_stopping() {
                return Err(HttpError::new(object.url(), HttpErrorKind::Stopped, "interrupted by a signal"));
            }
            state = self.changed.wait_timeout(state, LOOK).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

/// Writes what is not zero.
fn write_data(file: &File, at: u64, bytes: &[u8]) -> io::Result<()> {
    let (mut at, mut rest) = (at, bytes);
    while !rest.is_empty() {
        let (grain, behind) = rest.split_at(rest.len().min(GRAIN));
        if grain.iter().any(|&byte| byte != 0) {
            file.write_all_at(grain, at)?;
        }
        at += u64::try_from(grain.len()).unwrap_or(u64::MAX);
        rest = behind;
    }
    Ok(())
}
