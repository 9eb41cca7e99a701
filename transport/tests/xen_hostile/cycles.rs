//! A thousand front ends, one after the other, on one process.

use crate::OKAY;
use crate::bed::Bed;
use crate::data::{describe, whole};
use crate::entry::{Abi, READ, Rings, WRITE, indirect, transfer};
use crate::victim::grants_in_use;

/// Front ends that come and go.
const CYCLES: u32 = 1000;

/// KiB by which a process may have grown after all of them, and not more with each.
const GROWN: u64 = 512;

fn cycles_leave_nothing(policy: &str) {
    let Some(mut bed) = Bed::of_policy(policy) else { return };
    let grants = grants_in_use();
    let (data, list) = (bed.front.pages(16), bed.front.pages(1));
    describe(&list, &whole(&data.pages));
    let mut memory = 0;
    for cycle in 0..CYCLES {
        let abi = if cycle % 2 == 0 { Abi::X86_64 } else { Abi::X86_32 };
        bed.connect(Rings { abi, order: cycle % 3, queues: 1 + cycle % 2, persistent: true });
        let queue = bed.front.rings.len() - 1;
        let entries = [
            transfer(WRITE, 1, u64::from(cycle) * 8, &[(data.pages[0], 0, 7)]),
            transfer(READ, 2, 0, &whole(&data.pages[1..12])),
            indirect(READ, 3, 0, list.pages[0], 16),
        ];
        let answers = bed.front.run_all(queue, &entries);
        assert_eq!(answers, [(1, WRITE, OKAY), (2, READ, OKAY), (3, READ, OKAY)], "cycle {cycle}");
        bed.front.close();
        // What is there to be grown has, after the first hundred.
        if cycle == 100 {
            memory = bed.victim.memory();
        }
    }
    bed.assert_idle();
    let grown = bed.victim.memory().saturating_sub(memory);
    println!("{policy}: grown by {grown} KiB since the hundredth, {} KiB now", bed.victim.memory());
    assert!(grown <= GROWN, "{policy}: grown by {grown} KiB");
    drop((data, list));
    assert_eq!(grants_in_use(), grants, "grants in use, as Xen has them");
    bed.end(&[0..u64::from(CYCLES) * 8]);
}

#[test]
fn a_thousand_connections_by_copies_leave_nothing() {
    cycles_leave_nothing("copy");
}

#[test]
fn a_thousand_connections_by_mappings_that_stay_leave_nothing() {
    cycles_leave_nothing("persistent");
}

#[test]
fn a_thousand_connections_by_mappings_each_time_leave_nothing() {
    cycles_leave_nothing("map");
}
