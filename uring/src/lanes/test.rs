//! Lanes of an engine on tmpfs, whose steps can be made to fail.

use std::path::Path;

use disk::{FileOffset, OpId};
use memory::Segments;
use tempfile::TempDir;

use super::*;
use crate::{Cache, Engine, EngineKind, OpenOptions};

const KIB: u64 = 1 << 10;
const OPTIONS: OpenOptions = OpenOptions { write: true, cache: Cache::None, lock: true };

/// An engine that counts the steps of its lanes, with two lanes.
struct Subject {
    engine: Engine,
    directory: TempDir,
    done: Vec<FileDone>,
}

impl Subject {
    fn new(kind: EngineKind, faults: Faults) -> Subject {
        let directory = tempfile::tempdir_in("/dev/shm").unwrap();
        let file = file(&directory, "0");
        let mut engine = Engine::open(kind, vec![file], 64).unwrap();
        engine.insert_lanes().unwrap().0.set_faults(faults);
        Subject { engine, directory, done: Vec::new() }
    }

    /// With two lanes that have begun.
    fn with_lanes(kind: EngineKind) -> Subject {
        let mut subject = Subject::new(kind, Faults::default());
        subject.engine.start_lane().unwrap();
        subject.engine.start_lane().unwrap();
        subject.engine.prefer_lanes();
        subject
    }

    fn path(&self) -> &Path {
        self.directory.path()
    }

    fn push(&mut self, file: FileId, id: u64, action: Action) {
        self.try_push(file, id, action).unwrap();
    }

    fn try_push(&mut self, file: FileId, id: u64, action: Action) -> Result<(), EngineFailed> {
        let mut op = FileOp { id: OpId(id), file, action };
        while let Err(back) = self.engine.push(op) {
            op = back;
            self.engine.reap(Until::Any, &mut self.done)?;
        }
        Ok(())
    }

    /// Everything that is in flight ends well, or the engine fails.
    fn finish(&mut self, count: usize) -> Result<(), EngineFailed> {
        while self.done.len() < count {
            self.engine.reap(Until::Any, &mut self.done)?;
        }
        assert_eq!(self.done.len(), count, "each comes back once");
        assert!(self.done.drain(..).all(|done| done.result.is_ok()));
        Ok(())
    }

    /// Writes blocks that differ to a file, and finds them again.
    fn work(&mut self, file: FileId) -> Result<(), EngineFailed> {
        for block in 0..100 {
            self.try_push(file, block, write(block))?;
        }
        self.finish(100)?;
        let memory: Vec<Segments> = (0..100).map(|_| Segments::zeroed(512)).collect();
        for (block, into) in (0..).zip(&memory) {
            self.try_push(file, block, Action::Read { at: FileOffset(block * 512), into: into.clone() })?;
        }
        self.finish(100)?;
        assert!((0..).zip(&memory).all(|(block, found)| found.to_vec() == bytes(block)));
        Ok(())
    }
}

fn file(directory: &TempDir, name: &str) -> ImageFile {
    let path = directory.path().join(name);
    std::fs::write(&path, vec![0; 64 << 10]).unwrap();
    ImageFile::open(&path, OPTIONS).unwrap()
}

fn bytes(block: u64) -> Vec<u8> {
    (block + 1).to_le_bytes().repeat(64)
}

fn write(block: u64) -> Action {
    Action::Write { at: FileOffset(block * 512), from: Segments::copy_of(&bytes(block)) }
}

fn kinds() -> [EngineKind; 2] {
    [EngineKind::Uring, EngineKind::Aio]
}

/// A file is added, used, replaced, used and removed while lanes work; then all lanes end.
fn everything(subject: &mut Subject) -> Result<(), EngineFailed> {
    let started = (0..2).filter(|_| subject.engine.start_lane().is_ok()).count();
    subject.engine.prefer_lanes();
    subject.work(FileId(0))?;
    let added = subject.engine.add(file(&subject.directory, "1")).unwrap();
    subject.work(added)?;
    let again = subject.engine.file(added).unwrap().try_clone().unwrap();
    drop(subject.engine.replace(added, again).unwrap());
    subject.work(added)?;
    drop(subject.engine.remove(added).unwrap());
    // Nothing of ours has it open any more, so that nobody's lock is on it.
    assert!(ImageFile::open(&subject.path().join("1"), OPTIONS).is_ok());
    subject.work(FileId(0))?;
    let troubles = std::iter::from_fn(|| subject.engine.take_lane_trouble()).count();
    assert_eq!(subject.engine.lane_count() + troubles, started, "a lane that was let go of is a trouble");
    while subject.engine.lane_count() > 0 {
        subject.engine.end_lane();
    }
    subject.work(FileId(0))
}

#[test]
fn the_nth_step_that_fails_in_a_lane_loses_no_operation() {
    for kind in kinds() {
        for nth in 1.. {
            let faults = Faults::at(nth);
            let mut subject = Subject::new(kind, faults.clone());
            match everything(&mut subject) {
                Ok(()) => {}
                Err(failed) => assert_eq!(failed.what, "a lane of a test", "a failure is not another one's"),
            }
            if faults.was_never_met() {
                assert!(nth > 20, "there are as many steps");
                break;
            }
            // Later steps are sleeps, of which there are as many as the machine likes.
            if nth > 60 {
                break;
            }
        }
    }
}

#[test]
fn lanes_do_transfers_and_the_owner_everything_else() {
    for kind in kinds() {
        let mut subject = Subject::with_lanes(kind);
        subject.work(FileId(0)).unwrap();
        let transfers: u64 = subject.engine.lane_operations().iter().sum();
        assert!(transfers > 0);
        subject.push(FileId(0), 0, Action::SyncData);
        subject.push(FileId(0), 1, Action::Deallocate { at: FileOffset(0), len: 4 * KIB });
        subject.finish(2).unwrap();
        assert_eq!(subject.engine.lane_operations().iter().sum::<u64>(), transfers);
        assert!(subject.engine.lane_time() > Duration::ZERO);
    }
}

#[test]
fn a_few_operations_at_once_are_done_by_the_owner_and_many_are_spread() {
    for kind in kinds() {
        let mut subject = Subject::new(kind, Faults::default());
        subject.engine.start_lane().unwrap();
        subject.engine.insert_lanes().unwrap().0.wait_until_begun();
        for _ in 0..10 {
            (0..3).for_each(|block| subject.push(FileId(0), block, write(block)));
            subject.finish(3).unwrap();
        }
        assert_eq!(subject.engine.lane_operations(), [0]);
        (0..20).for_each(|block| subject.push(FileId(0), block, write(block)));
        subject.finish(20).unwrap();
        assert_eq!(subject.engine.lane_operations(), [16]);
    }
}

#[test]
fn a_file_with_an_operation_in_a_lane_is_busy() {
    for kind in kinds() {
        let mut subject = Subject::with_lanes(kind);
        subject.push(FileId(0), 0, write(0));
        assert_eq!(subject.engine.lane_operations().iter().sum::<u64>(), 1);
        // Not reaped: the lane may have done it or not.
        assert!(matches!(subject.engine.remove(FileId(0)), Err(EngineError::FileBusy(FileId(0)))));
        subject.finish(1).unwrap();
        assert!(subject.engine.remove(FileId(0)).is_ok());
    }
}

#[test]
fn an_engine_whose_lanes_have_ended_is_as_if_it_never_had_any() {
    for kind in kinds() {
        let mut subject = Subject::with_lanes(kind);
        // With something in flight, which comes back all the same.
        (0..50).for_each(|block| subject.push(FileId(0), block, write(block)));
        subject.engine.end_lane();
        subject.engine.end_lane();
        assert_eq!(subject.engine.lane_count(), 0);
        (50..60).for_each(|block| subject.push(FileId(0), block, write(block)));
        subject.finish(60).unwrap();
        while subject.engine.has_stages() {
            subject.engine.reap(Until::Now, &mut subject.done).unwrap();
            std::thread::yield_now();
        }
        subject.work(FileId(0)).unwrap();
        // And again.
        subject.engine.start_lane().unwrap();
        subject.engine.prefer_lanes();
        subject.work(FileId(0)).unwrap();
        assert!(subject.engine.lane_operations().iter().sum::<u64>() > 0);
    }
}

#[test]
fn an_engine_is_dropped_with_operations_in_its_lanes() {
    for kind in kinds() {
        let mut subject = Subject::with_lanes(kind);
        (0..60).for_each(|block| subject.push(FileId(0), block, write(block)));
        let Subject { engine, directory, .. } = subject;
        drop(engine);
        assert!(ImageFile::open(&directory.path().join("0"), OPTIONS).is_ok(), "its lock is free");
    }
}

#[test]
fn a_write_that_was_submitted_to_a_lane_is_done_before_the_engine_is_dropped() {
    for kind in kinds() {
        // The lane often sees the write and the stop in one look.
        for _ in 0..20 {
            let mut subject = Subject::with_lanes(kind);
            subject.push(FileId(0), 0, write(0));
            assert_eq!(subject.engine.lane_operations().iter().sum::<u64>(), 1);
            subject.engine.reap(Until::Now, &mut subject.done).unwrap();
            let Subject { engine, directory, .. } = subject;
            drop(engine);
            let found = std::fs::read(directory.path().join("0")).unwrap();
            assert!(found.starts_with(&bytes(0)), "the write is missing");
        }
    }
}

#[test]
fn lanes_use_memory_that_is_registered_before_and_after_they_start() {
    let mut subject = Subject::new(EngineKind::Uring, Faults::default());
    let buffers = [Buffer::zeroed(64 << 10), Buffer::zeroed(64 << 10)];
    subject.engine.register_memory(buffers[0].clone()).unwrap();
    subject.engine.start_lane().unwrap();
    subject.engine.register_memory(buffers[1].clone()).unwrap();
    for (id, buffer) in (0..).zip(&buffers) {
        subject.push(FileId(0), id, write(0));
        subject.finish(1).unwrap();
        // SAFETY: the part is the buffer, which the list owns.
        let into = unsafe { Segments::new(buffer.clone(), [(buffer.base(), 512)]) };
        subject.push(FileId(0), id, Action::Read { at: FileOffset(0), into: into.clone() });
        subject.finish(1).unwrap();
        assert_eq!(into.to_vec(), bytes(0));
        subject.engine.forget_memory(buffer).unwrap();
    }
    assert_eq!((subject.engine.lane_count(), subject.engine.take_lane_trouble()), (1, None));
}
