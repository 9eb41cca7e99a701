//! The null engine follows the rules of `disk::Io`, and waits like the other engines.

use std::io::Write;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use disk::{Action, FileDone, FileId, FileOffset, FileOp, Io, OpId, Until};
use memory::Segments;
use uring::{Engine, EngineKind, ImageFile};

const GIB: u64 = 1 << 30;

fn open(depth: usize) -> Engine {
    let file = ImageFile::of_nothing(Path::new("1G"), GIB, true).unwrap();
    Engine::open(EngineKind::Null, vec![file], depth).unwrap()
}

fn op(id: u64, action: Action) -> FileOp {
    FileOp { id: OpId(id), file: FileId(0), action }
}

#[test]
fn operations_succeed_in_order_and_touch_neither_memory_nor_file() {
    let mut engine = open(8);
    let memory = Segments::copy_of(&[7; 4096]);
    let actions = [
        Action::Write { at: FileOffset(0), from: Segments::copy_of(&[1; 4096]) },
        Action::Read { at: FileOffset(0), into: memory.clone() },
        Action::Deallocate { at: FileOffset(0), len: 4096 },
        Action::SyncData,
    ];
    for (id, action) in (0..).zip(actions) {
        engine.push(op(id, action)).unwrap();
    }
    let mut done: Vec<FileDone> = Vec::new();
    engine.reap(Until::Any, &mut done).unwrap();
    assert_eq!(
        done.iter().map(|done| (done.op.id.0, done.result)).collect::<Vec<_>>(),
        [0, 1, 2, 3].map(|id| (id, Ok(())))
    );
    assert_eq!(memory.to_vec(), [7; 4096], "a read leaves the memory as it is");
    let file = engine.file(FileId(0)).unwrap().metadata().unwrap();
    assert_eq!((file.len(), std::os::unix::fs::MetadataExt::blocks(&file)), (GIB, 0));
}

#[test]
fn a_full_engine_hands_operations_back_and_keeps_a_file_in_use() {
    let mut engine = open(4);
    let mut pushed = 0;
    let back = loop {
        match engine.push(op(pushed, Action::SyncData)) {
            Ok(()) => pushed += 1,
            Err(back) => break back,
        }
    };
    assert!(pushed >= 4 && back.id == OpId(pushed));
    engine.remove(FileId(0)).unwrap_err();
    let mut done = Vec::new();
    engine.reap(Until::Now, &mut done).unwrap();
    assert_eq!(done.len() as u64, pushed);
    engine.push(back).unwrap();
    engine.reap(Until::Now, &mut done).unwrap();
    engine.remove(FileId(0)).unwrap();
}

#[test]
fn a_watched_descriptor_ends_a_wait_and_is_reported_among_operations() {
    let mut engine = open(4);
    let (mut ours, theirs) = UnixStream::pair().unwrap();
    engine.watch(theirs.as_fd(), false, 5).unwrap();
    let (mut done, mut ready) = (Vec::new(), Vec::new());
    ours.write_all(b"a").unwrap();
    engine.reap(Until::Any, &mut done).unwrap();
    engine.take_ready(&mut ready);
    assert_eq!((done.len(), ready.as_slice()), (0, [5].as_slice()));
    // The kernel reports an event with a delay, while operations complete at once.
    ours.write_all(b"b").unwrap();
    ready.clear();
    while ready.is_empty() {
        engine.push(op(1, Action::SyncData)).unwrap();
        engine.reap(Until::Any, &mut done).unwrap();
        engine.take_ready(&mut ready);
    }
    assert_eq!(ready, [5]);
    engine.limit_sleep(Duration::from_millis(1));
    done.clear();
    engine.reap(Until::Any, &mut done).unwrap();
    assert!(done.is_empty());
}
