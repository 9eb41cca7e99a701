//! Transfers are split and merged in front of every engine, and data is read back as written.

mod fixture;

use disk::{Action, FileDone, FileId, FileOffset, FileOp, Io, OpId, ShapePolicy, Until};
use fixture::{Fixture, everywhere, pattern};
use memory::Segments;

const KIB: usize = 1 << 10;

fn op(id: u64, action: Action) -> FileOp {
    FileOp { id: OpId(id), file: FileId(0), action }
}

/// Pushes all actions before the first reap, and waits for their success.
fn run_batch(fixture: &mut Fixture, actions: Vec<Action>) -> usize {
    let (count, mut done) = (actions.len(), Vec::<FileDone>::new());
    for (id, action) in (0..).zip(actions) {
        fixture.engine.push(op(id, action)).unwrap();
    }
    while done.len() < count {
        fixture.engine.reap(Until::Any, &mut done).unwrap();
    }
    assert!(done.iter().all(|done| done.result == Ok(())));
    done.len()
}

fn at(bytes: usize) -> FileOffset {
    FileOffset(u64::try_from(bytes).unwrap())
}

#[test]
fn adjacent_transfers_of_a_batch_are_merged_and_large_ones_split() {
    everywhere(&[], 64, |fixture| {
        fixture.engine.set_shape(ShapePolicy { split: Some(16 << 10), merge: Some(16 << 10) });
        let bytes = pattern(64 * KIB, 7);
        let write =
            |(number, part): (usize, &[u8])| Action::Write { at: at(number * 4 * KIB), from: Segments::copy_of(part) };
        run_batch(fixture, bytes.chunks(4 * KIB).enumerate().map(write).collect());
        let counts = fixture.engine.shape_counts();
        assert_eq!((counts.merges, counts.splits), (16, 0), "four groups of four");
        let whole = Segments::zeroed(64 * KIB);
        run_batch(fixture, vec![Action::Read { at: FileOffset(0), into: whole.clone() }]);
        assert_eq!(fixture.engine.shape_counts().splits, 1);
        assert!(whole.to_vec() == bytes);
        let parts: Vec<Segments> = (0..16).map(|_| Segments::zeroed(4 * KIB)).collect();
        let read = |(number, into): (usize, &Segments)| Action::Read { at: at(number * 4 * KIB), into: into.clone() };
        // In reverse order: each is prepended to the one pushed before.
        run_batch(fixture, parts.iter().enumerate().rev().map(read).collect());
        assert_eq!(fixture.engine.shape_counts().merges, 32);
        assert!(parts.iter().flat_map(Segments::to_vec).collect::<Vec<u8>>() == bytes);
        assert!(fixture.content() == bytes);
    });
}

#[test]
fn removing_the_policy_keeps_operations_in_flight_and_counters() {
    everywhere(&[], 8, |fixture| {
        fixture.engine.set_shape(ShapePolicy { split: Some(4 << 10), merge: Some(8 << 10) });
        let bytes = pattern(32 * KIB, 3);
        let mut done = Vec::new();
        fixture.engine.push(op(0, Action::Write { at: FileOffset(0), from: Segments::copy_of(&bytes) })).unwrap();
        fixture.engine.set_shape(ShapePolicy::default());
        assert!(fixture.engine.shapes() && fixture.engine.remove(FileId(0)).is_err());
        while done.is_empty() {
            fixture.engine.reap(Until::Any, &mut done).unwrap();
        }
        assert!(!fixture.engine.shapes(), "the idle stage is dropped");
        assert_eq!(fixture.engine.shape_counts().splits, 1);
        assert!(fixture.content() == bytes);
        fixture.engine.remove(FileId(0)).unwrap();
    });
}

#[test]
fn a_model_completes_operations_in_order_of_their_due_times() {
    let file = uring::ImageFile::of_nothing("1G".as_ref(), 1 << 30, true).unwrap();
    let kind = uring::EngineKind::Model("disk".parse().unwrap());
    let mut engine = uring::Engine::open(kind, vec![file], 4).unwrap();
    let begun = std::time::Instant::now();
    let read = |place: u64| Action::Read { at: FileOffset(place << 20), into: Segments::zeroed(4 * KIB) };
    (0..4).for_each(|id| engine.push(op(id, read(100 * (id + 1)))).unwrap());
    assert!(engine.push(op(9, Action::SyncData)).is_err(), "the engine is full");
    let mut done = Vec::new();
    engine.reap(Until::Now, &mut done).unwrap();
    while done.len() < 4 {
        engine.reap(Until::Any, &mut done).unwrap();
    }
    assert_eq!(done.iter().map(|done| done.op.id.0).collect::<Vec<_>>(), [0, 1, 2, 3]);
    assert!(begun.elapsed() >= std::time::Duration::from_millis(32), "four seeks");
}
