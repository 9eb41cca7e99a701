//! An engine that does nothing holds little memory. Alone in its program: what is measured is the process's.

mod bed;

use bed::{Bed, DIRECT, STORAGES};
use uring::EngineKind;

/// Anonymous memory of this process in KiB.
fn anonymous() -> u64 {
    let rollup = std::fs::read_to_string("/proc/self/smaps_rollup").unwrap();
    let line = rollup.lines().find_map(|line| line.strip_prefix("Anonymous:")).unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}

#[test]
fn an_idle_engine_of_depth_256_holds_well_under_a_mebibyte() {
    for kind in [EngineKind::Uring, EngineKind::Aio] {
        let before = anonymous();
        let bed = Bed::on(STORAGES[1], (kind, DIRECT), &[1; 4096], 256);
        let grown = anonymous().saturating_sub(before);
        eprintln!("{kind:?}: {grown} KiB, of {before} KiB before");
        assert!(grown < 512, "{kind:?} holds {grown} KiB");
        drop(bed);
    }
}
