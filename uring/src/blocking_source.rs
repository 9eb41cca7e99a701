//! A read-only source of bytes in place of a file, whose reads block: threads wait for them, and an engine sees them as
//! operations like all others ([`crate::Engine`]).
//!
//! It knows nothing about where the bytes come from. Invariants: an operation is completed once, and its memory is not
//! touched afterwards, also if a thread still waits for the source; once the source is given up, no operation waits.

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use disk::{Action, FileDone, FileError, FileOp};
use memory::size::{in_memory, on_disk};

use crate::sync::WakeEvent;
use crate::thread;

/// Reads that wait at a time.
const THREADS: usize = 8;
/// The stack of a thread: TLS and a resolver of names need more than system calls do.
const STACK: usize = 512 << 10;
/// How often a caller that waits looks whether the source is given up: nothing wakes it for that.
const LOOK: Duration = Duration::from_millis(200);

/// Bytes that several threads may read.
pub trait ReadSource: fmt::Debug + Send + Sync {
    /// The number of bytes.
    fn size(&self) -> u64;

    /// Reads bytes within the size, and may block.
    fn read_at(&self, at: u64, bytes: &mut [u8]) -> Result<(), FileError>;

    /// Whether nothing waits for it any longer: the process is to end.
    fn is_given_up(&self) -> bool;
}

/// An open source. Clones share its threads, which end with the last one.
#[derive(Clone)]
pub(crate) struct SourceFile(Arc<Owner>);

/// Ends the threads when it is dropped.
struct Owner(Arc<Shared>);

struct Shared {
    source: Arc<dyn ReadSource>,
    state: Mutex<State>,
    /// There is work for a thread, or none will follow.
    work: Condvar,
    /// A caller's read has completed.
    answered: Condvar,
    event: WakeEvent,
}

#[derive(Default)]
struct State {
    next: u64,
    queue: VecDeque<Wanted>,
    /// Reads that have not completed.
    waiting: HashMap<u64, Waiting>,
    done: Vec<FileDone>,
    threads: usize,
    idle: usize,
    closed: bool,
    watched: bool,
}

/// A range that a thread reads.
#[derive(Clone, Copy)]
struct Wanted {
    ticket: u64,
    at: u64,
    len: u64,
}

/// What waits for a range.
enum Waiting {
    Engine(FileOp),
    Caller(Option<Result<Vec<u8>, FileError>>),
}

impl Waiting {
    fn is_engine((_, waiting): &(u64, Waiting)) -> bool {
        matches!(waiting, Waiting::Engine(_))
    }
}

impl fmt::Debug for SourceFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.0.source.fmt(f)
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        self.0.lock().closed = true;
        self.0.work.notify_all();
    }
}

impl SourceFile {
    /// Makes one of its own threads, which start when they are needed.
    pub(crate) fn new(source: Arc<dyn ReadSource>) -> io::Result<SourceFile> {
        let (state, work, answered) = Default::default();
        Ok(SourceFile(Arc::new(Owner(Arc::new(Shared { source, state, work, answered, event: WakeEvent::new()? })))))
    }

    /// Accepts an operation of an engine.
    pub(crate) fn push(&self, op: FileOp) {
        let range = match &op.action {
            Action::Read { at, into } => Some((at.0, on_disk(into.len()))),
            Action::Write { .. } | Action::SyncData | Action::Deallocate { .. } => None,
        };
        let mut state = self.0.0.lock();
        if let Some((at, len)) = range {
            self.0.0.request(&mut state, at, len, Waiting::Engine(op));
            return;
        }
        // Nothing was written, so everything is durable.
        let is_sync = matches!(op.action, Action::SyncData);
        let result = if is_sync { Ok(()) } else { Err(FileError::Failed(libc::EROFS)) };
        state.done.push(FileDone { op, result });
        self.0.0.event.signal();
    }

    /// Reads any range, and waits for it.
    pub(crate) fn wait_to_read(&self, at: u64, bytes: &mut [u8]) -> Result<(), FileError> {
        let shared = &self.0.0;
        let mut state = shared.lock();
        let ticket = shared.request(&mut state, at, on_disk(bytes.len()), Waiting::Caller(None));
        loop {
            if let Some(Waiting::Caller(answer)) = state.waiting.get_mut(&ticket) {
                if let Some(answer) = answer.take() {
                    state.waiting.remove(&ticket);
                    return answer.map(|found| bytes.copy_from_slice(&found));
                }
            }
            if shared.source.is_given_up() {
                state.waiting.remove(&ticket);
                return Err(FileError::Failed(libc::EINTR));
            }
            state = shared.answered.wait_timeout(state, LOOK).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Appends completed operations; returns after which time to look again although
    /// the event is not signalled, `None` if that is not needed.
    pub(crate) fn turn(&self, done: &mut Vec<FileDone>) -> Option<Duration> {
        let shared = &*self.0.0;
        shared.event.clear();
        let mut state = shared.lock();
        done.append(&mut state.done);
        if shared.source.is_given_up() {
            state.queue.clear();
            let (engine, callers): (HashMap<_, _>, HashMap<_, _>) =
                std::mem::take(&mut state.waiting).into_iter().partition(Waiting::is_engine);
            state.waiting = callers;
            for waiting in engine.into_values() {
                if let Waiting::Engine(op) = waiting {
                    done.push(FileDone { op, result: Err(FileError::Failed(libc::EINTR)) });
                }
            }
        }
        state.is_busy().then_some(LOOK)
    }

    /// Calls `watch` with the event, unless it is watched.
    pub(crate) fn watch_new(&self, watch: impl FnOnce(BorrowedFd<'_>) -> io::Result<()>) -> io::Result<()> {
        match std::mem::replace(&mut self.0.0.lock().watched, true) {
            true => Ok(()),
            false => watch(self.0.0.event.as_fd()),
        }
    }

    /// The engine that watched the event does so no longer.
    pub(crate) fn unwatch(&self) {
        self.0.0.lock().watched = false;
    }

    pub(crate) fn is_busy(&self) -> bool {
        self.0.0.lock().is_busy()
    }
}

impl State {
    fn is_busy(&self) -> bool {
        !self.done.is_empty() || self.waiting.values().any(|waiting| matches!(waiting, Waiting::Engine(_)))
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        // Each change of it is complete, whatever panics.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Queues a range, and starts a thread if all are busy; returns its ticket.
    fn request(self: &Arc<Shared>, state: &mut State, at: u64, len: u64, waiting: Waiting) -> u64 {
        let ticket = state.next;
        state.next += 1;
        state.waiting.insert(ticket, waiting);
        state.queue.push_back(Wanted { ticket, at, len });
        if state.idle < state.queue.len() && state.threads < THREADS {
            let shared = Arc::clone(self);
            match thread::spawn("tapline-source", STACK, move || shared.serve()) {
                Ok(_) => state.threads += 1,
                // Another one takes it.
                Err(_) if state.threads > 0 => {}
                Err(error) => self.fail_all(state, error.raw_os_error().unwrap_or(libc::EAGAIN)),
            }
        }
        self.work.notify_one();
        ticket
    }

    /// Fails all reads: there is no thread.
    fn fail_all(&self, state: &mut State, errno: i32) {
        state.queue.clear();
        for (ticket, waiting) in std::mem::take(&mut state.waiting) {
            match waiting {
                Waiting::Engine(op) => state.done.push(FileDone { op, result: Err(FileError::Failed(errno)) }),
                Waiting::Caller(_) => {
                    let failed = Waiting::Caller(Some(Err(FileError::Failed(errno))));
                    state.waiting.insert(ticket, failed);
                }
            }
        }
        self.event.signal();
        self.answered.notify_all();
    }

    /// A thread: reads what is wanted, until the last handle is gone.
    fn serve(&self) {
        while let Some(wanted) = self.next() {
            let read = self.read(wanted);
            let mut state = self.lock();
            match state.waiting.get_mut(&wanted.ticket) {
                // It was given up.
                None => {}
                Some(Waiting::Caller(answer)) => {
                    *answer = Some(read);
                    self.answered.notify_all();
                }
                Some(Waiting::Engine(_)) => {
                    let Some(Waiting::Engine(op)) = state.waiting.remove(&wanted.ticket) else { continue };
                    let result = match (&op.action, read) {
                        (Action::Read { into, .. }, Ok(bytes)) => {
                            into.copy_from(&bytes);
                            Ok(())
                        }
                        (_, read) => read.map(drop),
                    };
                    state.done.push(FileDone { op, result });
                    self.event.signal();
                }
            }
        }
    }

    fn next(&self) -> Option<Wanted> {
        let mut state = self.lock();
        loop {
            if let Some(wanted) = state.queue.pop_front() {
                return Some(wanted);
            }
            if state.closed {
                return None;
            }
            state.idle += 1;
            state = self.work.wait(state).unwrap_or_else(PoisonError::into_inner);
            state.idle -= 1;
        }
    }

    /// Reads a range; what is behind the end reads as zeroes, as in a file.
    fn read(&self, Wanted { at, len, .. }: Wanted) -> Result<Vec<u8>, FileError> {
        let mut bytes = vec![0; in_memory(len)];
        let within = len.min(self.source.size().saturating_sub(at));
        match bytes.get_mut(..in_memory(within)) {
            Some(bytes) if !bytes.is_empty() => self.source.read_at(at, bytes)?,
            _ => {}
        }
        Ok(bytes)
    }
}

#[cfg(test)]
mod test {
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::sync::mpsc::{Receiver, Sender, channel};

    use disk::{FileId, FileOffset, OpId};
    use memory::Segments;

    use super::*;

    /// Bytes that are their offsets; a read waits for a permission if there is a channel for that.
    #[derive(Debug, Default)]
    struct Numbers {
        gate: Option<Mutex<Receiver<()>>>,
        given_up: AtomicBool,
    }

    impl ReadSource for Numbers {
        fn size(&self) -> u64 {
            100
        }

        fn read_at(&self, at: u64, bytes: &mut [u8]) -> Result<(), FileError> {
            if let Some(gate) = &self.gate {
                gate.lock().unwrap().recv().map_err(|_| FileError::Failed(libc::EIO))?;
            }
            bytes.iter_mut().zip(at..).for_each(|(byte, at)| *byte = u8::try_from(at).unwrap());
            Ok(())
        }

        fn is_given_up(&self) -> bool {
            self.given_up.load(Ordering::Relaxed)
        }
    }

    fn gated() -> (Sender<()>, Arc<Numbers>, SourceFile) {
        let (open, gate) = channel();
        let numbers = Arc::new(Numbers { gate: Some(Mutex::new(gate)), ..Numbers::default() });
        let file = SourceFile::new(Arc::clone(&numbers) as Arc<dyn ReadSource>).unwrap();
        (open, numbers, file)
    }

    fn read(id: u64, at: u64, into: &Segments) -> FileOp {
        let action = Action::Read { at: FileOffset(at), into: into.clone() };
        FileOp { id: OpId(id), file: FileId(0), action }
    }

    /// Waits for completed operations.
    fn completed(file: &SourceFile) -> Vec<FileDone> {
        let mut done = Vec::new();
        while done.is_empty() {
            file.0.0.event.wait();
            file.turn(&mut done);
        }
        done
    }

    #[test]
    fn an_operation_is_read_by_a_thread_and_zeroes_follow_the_end() {
        let file = SourceFile::new(Arc::new(Numbers::default())).unwrap();
        let into = Segments::zeroed(4);
        into.copy_from(&[9; 4]);
        file.push(read(7, 98, &into));
        let done = completed(&file);
        assert_eq!((done[0].op.id, done[0].result, into.to_vec()), (OpId(7), Ok(()), vec![98, 99, 0, 0]));
        assert!(!file.is_busy());
        let mut bytes = [0; 3];
        file.wait_to_read(10, &mut bytes).unwrap();
        assert_eq!(bytes, [10, 11, 12]);
    }

    #[test]
    fn a_source_that_is_given_up_completes_all_and_touches_no_memory_later() {
        let (open, numbers, file) = gated();
        let into = Segments::zeroed(4);
        file.push(read(1, 1, &into));
        let mut done = Vec::new();
        assert!(file.turn(&mut done).is_some() && done.is_empty());
        numbers.given_up.store(true, Ordering::Relaxed);
        file.turn(&mut done);
        assert_eq!(done[0].result, Err(FileError::Failed(libc::EINTR)));
        assert!(!file.is_busy());
        assert_eq!(file.wait_to_read(0, &mut [0; 1]), Err(FileError::Failed(libc::EINTR)));
        open.send(()).unwrap();
        // The next read of the same thread comes after the one that was given up.
        numbers.given_up.store(false, Ordering::Relaxed);
        open.send(()).unwrap();
        open.send(()).unwrap();
        file.wait_to_read(50, &mut [0; 1]).unwrap();
        assert!(into.is_zero());
    }

    #[test]
    fn writes_are_refused_and_syncs_have_nothing_to_do() {
        let file = SourceFile::new(Arc::new(Numbers::default())).unwrap();
        let op = |action| FileOp { id: OpId(0), file: FileId(0), action };
        file.push(op(Action::Write { at: FileOffset(0), from: Segments::zeroed(1) }));
        file.push(op(Action::SyncData));
        let results: Vec<_> = completed(&file).into_iter().map(|done| done.result).collect();
        assert_eq!(results, [Err(FileError::Failed(libc::EROFS)), Ok(())]);
    }
}
