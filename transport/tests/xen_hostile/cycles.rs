//! A thousand front ends, one after the other, on one process.

use std::time::Instant;

use crate::OKAY;
use crate::bed::Bed;
use crate::data::{describe, whole};
use crate::entry::{Abi, READ, Rings, WRITE, indirect, transfer};
use crate::victim::grants_in_use;

/// KiB by which a process may have grown since it has served all kinds of front ends, and not more with each.
const GROWN: u64 = 512;

fn cycles_leave_nothing(policy: &str, cycles: u32) {
    let Some(mut bed) = Bed::new(&["--grants", policy, "--queues", "2"]) else { return };
    let grants = grants_in_use();
    let (data, list) = (bed.front.pages(16), bed.front.pages(1));
    describe(&list, &whole(&data.pages));
    let mut memory = 0;
    let (began, before) = (Instant::now(), bed.victim.used());
    for cycle in 0..cycles {
        // Two layouts, three sizes, one queue or two, its pages to stay or not: each with each.
        let abi = if cycle % 2 == 0 { Abi::X86_64 } else { Abi::X86_32 };
        let (order, queues, persistent) = (cycle % 3, 1 + cycle / 3 % 2, cycle / 6 % 2 == 0);
        bed.connect(Rings { abi, order, queues, persistent });
        let queue = bed.front.rings.len() - 1;
        let entries = [
            transfer(WRITE, 1, u64::from(cycle % 1000) * 8, &[(data.pages[0], 0, 7)]),
            transfer(READ, 2, 0, &whole(&data.pages[1..12])),
            indirect(READ, 3, 0, list.pages[0], 16),
        ];
        let answers = bed.front.run_all(queue, &entries);
        assert_eq!(answers, [(1, WRITE, OKAY), (2, READ, OKAY), (3, READ, OKAY)], "cycle {cycle}");
        bed.front.close();
        if cycle == 100 {
            memory = bed.victim.memory();
        }
    }
    bed.assert_idle();
    let grown = bed.victim.memory().saturating_sub(memory);
    let (each, used) = (began.elapsed() / cycles, bed.victim.used().since(before).cpu / cycles);
    println!("{policy}: {each:?} each, {used:?} of them the process's; grown by {grown} KiB since the hundredth");
    assert!(grown <= GROWN, "{policy}: grown by {grown} KiB");
    drop((data, list));
    assert_eq!(grants_in_use(), grants, "grants in use, as Xen has them");
    bed.end(&[0..u64::from(cycles) * 8]);
}

/// By copies and by mappings that stay, in turn: as the front end offers.
#[test]
fn a_thousand_connections_leave_nothing() {
    cycles_leave_nothing("auto", 1000);
}

#[test]
fn connections_by_mappings_each_time_leave_nothing() {
    cycles_leave_nothing("map", 200);
}
