//! An idle engine holds little memory, even if all its threads were busy before. The only test of its program, as
//! memory is measured for the whole process.

mod fixture;

use std::time::{Duration, Instant};

use disk::{Action, FileOffset};
use fixture::{BUFFERED, DIRECT, Fixture, STORAGES};
use memory::Segments;
use uring::EngineKind;

/// Anonymous memory of this process in KiB.
fn anonymous() -> u64 {
    let rollup = std::fs::read_to_string("/proc/self/smaps_rollup").unwrap();
    let line = rollup.lines().find_map(|line| line.strip_prefix("Anonymous:")).unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}

fn threads() -> usize {
    std::fs::read_dir("/proc/self/task").unwrap().count()
}

/// Runs concurrent allocating writes, reads, syncs and deallocations; then waits until the threads have ended.
fn work_and_rest(fixture: &mut Fixture) {
    let before = threads();
    let memory = Segments::zeroed(64 << 10);
    let len = 64 << 10;
    let writes = (0..64).map(|block| Action::Write { at: FileOffset(block * len), from: memory.clone() });
    let reads = (0..64).map(|block| Action::Read { at: FileOffset(block * len), into: memory.clone() });
    let others = (0..64).flat_map(|block| [Action::SyncData, Action::Deallocate { at: FileOffset(block * len), len }]);
    assert!(fixture.run(writes.chain(reads).chain(others).collect()).iter().all(Result::is_ok));
    let since = Instant::now();
    while threads() > before {
        assert!(since.elapsed() < Duration::from_secs(60), "idle threads do not end");
        std::thread::sleep(Duration::from_millis(100));
    }
}

#[test]
fn an_idle_engine_of_depth_256_holds_well_under_a_mebibyte() {
    for (kind, options) in [(EngineKind::Uring, DIRECT), (EngineKind::Uring, BUFFERED), (EngineKind::Aio, DIRECT)] {
        for storage in STORAGES {
            let before = anonymous();
            let mut fixture = Fixture::on(storage, (kind, options), &[1; 4096], 256);
            let opened = anonymous().saturating_sub(before);
            work_and_rest(&mut fixture);
            let used = anonymous().saturating_sub(before);
            eprintln!("{kind:?} on {storage}: {opened} KiB, {used} KiB after use; {before} KiB before opening");
            assert!(opened < 512 && used < 512, "{kind:?} holds {opened} KiB, {used} KiB after use");
            drop(fixture);
        }
    }
}
