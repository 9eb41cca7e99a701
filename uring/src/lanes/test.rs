//! Lanes of an engine on tmpfs, with injected faults.

use std::path::Path;

use disk::{FileOffset, OpId};
use memory::Segments;
use tempfile::TempDir;

use super::*;
use crate::{Cache, Engine, EngineKind, OpenOptions};

const KIB: u64 = 1 << 10;
const OPTIONS: OpenOptions = OpenOptions { write: true, cache: Cache::None, lock: true };

/// An engine with two lanes whose steps can fail.
struct LanesFixture {
    engine: Engine,
    directory: TempDir,
    done: Vec<FileDone>,
}

impl LanesFixture {
    fn new(kind: EngineKind, faults: Faults) -> LanesFixture {
        let directory = tempfile::tempdir_in("/dev/shm").unwrap();
        let file = file(&directory, "0");
        let mut engine = Engine::open(kind, vec![file], 64).unwrap();
        engine.insert_lanes().unwrap().0.set_faults(faults);
        LanesFixture { engine, directory, done: Vec::new() }
    }

    /// Also starts two lanes, and waits until they accept operations.
    fn with_lanes(kind: EngineKind) -> LanesFixture {
        let mut fixture = LanesFixture::new(kind, Faults::default());
        fixture.engine.start_lane().unwrap();
        fixture.engine.start_lane().unwrap();
        fixture.engine.prefer_lanes();
        fixture
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

    /// Waits for `count` operations, all of which must succeed, or for the engine's failure.
    fn finish(&mut self, count: usize) -> Result<(), EngineFailed> {
        while self.done.len() < count {
            self.engine.reap(Until::Any, &mut self.done)?;
        }
        assert_eq!(self.done.len(), count, "each completes once");
        assert!(self.done.drain(..).all(|done| done.result.is_ok()));
        Ok(())
    }

    /// Writes different blocks to a file, and reads them back.
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

/// Adds a file, uses it, replaces it, uses it again and removes it while there are lanes; then ends all lanes.
fn work_through_changes(fixture: &mut LanesFixture) -> Result<(), EngineFailed> {
    let started = (0..2).filter(|_| fixture.engine.start_lane().is_ok()).count();
    fixture.engine.prefer_lanes();
    fixture.work(FileId(0))?;
    let added = fixture.engine.add(file(&fixture.directory, "1")).unwrap();
    fixture.work(added)?;
    let again = fixture.engine.file(added).unwrap().try_clone().unwrap();
    drop(fixture.engine.replace(added, again).unwrap());
    fixture.work(added)?;
    drop(fixture.engine.remove(added).unwrap());
    // No lane has it open any more: it is not locked.
    assert!(ImageFile::open(&fixture.path().join("1"), OPTIONS).is_ok());
    fixture.work(FileId(0))?;
    let troubles = std::iter::from_fn(|| fixture.engine.take_lane_trouble()).count();
    assert_eq!(fixture.engine.lane_count() + troubles, started, "every lane that ended early is reported");
    while fixture.engine.lane_count() > 0 {
        fixture.engine.end_lane();
    }
    fixture.work(FileId(0))
}

#[test]
fn a_failure_at_any_step_of_a_lane_loses_no_operation() {
    for kind in kinds() {
        for nth in 1.. {
            let faults = Faults::at(nth);
            let mut fixture = LanesFixture::new(kind, faults.clone());
            match work_through_changes(&mut fixture) {
                Ok(()) => {}
                Err(failed) => assert_eq!(failed.what, "a lane of a test", "only the injected failure occurs"),
            }
            if faults.was_not_reached() {
                assert!(nth > 20, "the test has too few steps");
                break;
            }
            // Later steps are sleeps, whose number depends on timing.
            if nth > 60 {
                break;
            }
        }
    }
}

#[test]
fn lanes_do_transfers_and_the_owner_everything_else() {
    for kind in kinds() {
        let mut fixture = LanesFixture::with_lanes(kind);
        fixture.work(FileId(0)).unwrap();
        let transfers: u64 = fixture.engine.lane_operations().iter().sum();
        assert!(transfers > 0);
        fixture.push(FileId(0), 0, Action::SyncData);
        fixture.push(FileId(0), 1, Action::Deallocate { at: FileOffset(0), len: 4 * KIB });
        fixture.finish(2).unwrap();
        assert_eq!(fixture.engine.lane_operations().iter().sum::<u64>(), transfers);
        assert!(fixture.engine.lane_time() > Duration::ZERO);
    }
}

#[test]
fn the_owner_does_small_batches_itself_and_shares_large_ones() {
    for kind in kinds() {
        let mut fixture = LanesFixture::new(kind, Faults::default());
        fixture.engine.start_lane().unwrap();
        fixture.engine.insert_lanes().unwrap().0.wait_until_begun();
        for _ in 0..10 {
            (0..3).for_each(|block| fixture.push(FileId(0), block, write(block)));
            fixture.finish(3).unwrap();
        }
        assert_eq!(fixture.engine.lane_operations(), [0]);
        (0..20).for_each(|block| fixture.push(FileId(0), block, write(block)));
        fixture.finish(20).unwrap();
        assert_eq!(fixture.engine.lane_operations(), [16]);
    }
}

#[test]
fn a_file_with_an_operation_in_a_lane_is_busy() {
    for kind in kinds() {
        let mut fixture = LanesFixture::with_lanes(kind);
        fixture.push(FileId(0), 0, write(0));
        assert_eq!(fixture.engine.lane_operations().iter().sum::<u64>(), 1);
        // Not reaped yet, whether or not the lane has done it.
        assert!(matches!(fixture.engine.remove(FileId(0)), Err(EngineError::FileBusy(FileId(0)))));
        fixture.finish(1).unwrap();
        assert!(fixture.engine.remove(FileId(0)).is_ok());
    }
}

#[test]
fn an_engine_works_without_stages_after_its_lanes_have_ended() {
    for kind in kinds() {
        let mut fixture = LanesFixture::with_lanes(kind);
        // Operations in flight still complete.
        (0..50).for_each(|block| fixture.push(FileId(0), block, write(block)));
        fixture.engine.end_lane();
        fixture.engine.end_lane();
        assert_eq!(fixture.engine.lane_count(), 0);
        (50..60).for_each(|block| fixture.push(FileId(0), block, write(block)));
        fixture.finish(60).unwrap();
        while fixture.engine.has_stages() {
            fixture.engine.reap(Until::Now, &mut fixture.done).unwrap();
            std::thread::yield_now();
        }
        fixture.work(FileId(0)).unwrap();
        // Lanes can be started again.
        fixture.engine.start_lane().unwrap();
        fixture.engine.prefer_lanes();
        fixture.work(FileId(0)).unwrap();
        assert!(fixture.engine.lane_operations().iter().sum::<u64>() > 0);
    }
}

#[test]
fn an_engine_with_operations_in_lanes_can_be_dropped() {
    for kind in kinds() {
        let mut fixture = LanesFixture::with_lanes(kind);
        (0..60).for_each(|block| fixture.push(FileId(0), block, write(block)));
        let LanesFixture { engine, directory, .. } = fixture;
        drop(engine);
        assert!(ImageFile::open(&directory.path().join("0"), OPTIONS).is_ok(), "its lock is free");
    }
}

#[test]
fn dropping_an_engine_completes_writes_already_sent_to_lanes() {
    for kind in kinds() {
        // The lane often takes the write and the stop in one batch.
        for _ in 0..20 {
            let mut fixture = LanesFixture::with_lanes(kind);
            fixture.push(FileId(0), 0, write(0));
            assert_eq!(fixture.engine.lane_operations().iter().sum::<u64>(), 1);
            fixture.engine.reap(Until::Now, &mut fixture.done).unwrap();
            let LanesFixture { engine, directory, .. } = fixture;
            drop(engine);
            let found = std::fs::read(directory.path().join("0")).unwrap();
            assert!(found.starts_with(&bytes(0)), "the write is missing");
        }
    }
}

#[test]
fn lanes_use_memory_registered_before_or_after_their_start() {
    let mut fixture = LanesFixture::new(EngineKind::Uring, Faults::default());
    let buffers = [Buffer::zeroed(64 << 10), Buffer::zeroed(64 << 10)];
    fixture.engine.register_memory(buffers[0].clone()).unwrap();
    fixture.engine.start_lane().unwrap();
    fixture.engine.register_memory(buffers[1].clone()).unwrap();
    for (id, buffer) in (0..).zip(&buffers) {
        fixture.push(FileId(0), id, write(0));
        fixture.finish(1).unwrap();
        // SAFETY: the part is the buffer, which the list owns.
        let into = unsafe { Segments::new(buffer.clone(), [(buffer.base(), 512)]) };
        fixture.push(FileId(0), id, Action::Read { at: FileOffset(0), into: into.clone() });
        fixture.finish(1).unwrap();
        assert_eq!(into.to_vec(), bytes(0));
        fixture.engine.forget_memory(buffer).unwrap();
    }
    assert_eq!((fixture.engine.lane_count(), fixture.engine.take_lane_trouble()), (1, None));
}
