//! Random requests, many at once in few clusters, over a chain with compressed clusters and a table that is loaded
//! piece by piece; completions in any order, with faults.
//!
//! Invariants checked: every sector that is read is one version as a whole, and one that was there at some moment of
//! the read: the last answered, or one in flight. A failed write leaves its own sectors as before or as written, and no
//! others touched. Every request is answered once. The map agrees with the formats at the end.

use super::clusters::CLUSTER;
use super::model::{LEN, Model};

fn run(seed: u64, depth: usize, fail_one_in: Option<u64>) -> usize {
    println!("seed {seed}, depth {depth}, faults {fail_one_in:?}");
    let mut model = Model::new(seed, depth, 1);
    model.rig.files.fail_one_in = fail_one_in;
    for _ in 0..60 {
        // A few clusters at a time, so that requests meet.
        let hot = model.draw(LEN / CLUSTER);
        model.rig.files.room = 1 + model.draw(12) as usize;
        for _ in 0..40 {
            let near = (hot + model.draw(2)).min(LEN / CLUSTER - 1);
            model.submit(near);
            for _ in 0..model.draw(4) {
                model.step();
            }
        }
    }
    model.check_all();
    model.failed
}

/// Scope: 24 seeds of 2400 requests for chains of one, two and three layers.
#[test]
fn requests_that_meet_in_a_cluster_lose_nothing() {
    let failed: usize = (0..24).map(|seed| run(seed, 1 + seed as usize % 3, None)).sum();
    assert_eq!(failed, 0);
}

/// Scope: 24 seeds of 2400 requests, one in 6 to one in 40 operations failing.
#[test]
fn faults_make_only_their_own_request_uncertain() {
    let failed: usize = (100..124).map(|seed| run(seed, 1 + seed as usize % 3, Some(6 + seed % 5 * 8))).sum();
    assert!(failed > 100, "{failed} requests have failed");
}
