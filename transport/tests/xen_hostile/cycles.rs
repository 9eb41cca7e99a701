//! A thousand connections of front ends, one after the other, to one process.

use std::time::Instant;

use crate::OKAY;
use crate::data::{describe, whole};
use crate::disk_process::grants_in_use;
use crate::entry::{Abi, READ, Rings, WRITE, indirect, transfer};
use crate::fixture::Fixture;

/// KiB by which a process may grow once it has served all kinds of front ends, regardless of the number of cycles.
const GROWTH_MAX: u64 = 512;

fn cycles_leak_nothing(policy: &str, cycles: u32) {
    let Some(mut fixture) = Fixture::new(&["--grants", policy, "--queues", "2"]) else { return };
    let grants = grants_in_use();
    let (data, list) = (fixture.front.pages(16), fixture.front.pages(1));
    describe(&list, &whole(&data.pages));
    let mut memory = 0;
    let (began, before) = (Instant::now(), fixture.process.usage());
    for cycle in 0..cycles {
        // Every combination of two layouts, three sizes, one or two queues, persistent grants or not.
        let abi = if cycle % 2 == 0 { Abi::X86_64 } else { Abi::X86_32 };
        let (order, queues, persistent) = (cycle % 3, 1 + cycle / 3 % 2, cycle / 6 % 2 == 0);
        fixture.connect(Rings { abi, order, queues, persistent });
        let queue = fixture.front.rings.len() - 1;
        let entries = [
            transfer(WRITE, 1, u64::from(cycle % 1000) * 8, &[(data.pages[0], 0, 7)]),
            transfer(READ, 2, 0, &whole(&data.pages[1..12])),
            indirect(READ, 3, 0, list.pages[0], 16),
        ];
        let answers = fixture.front.run_all(queue, &entries);
        assert_eq!(answers, [(1, WRITE, OKAY), (2, READ, OKAY), (3, READ, OKAY)], "cycle {cycle}");
        fixture.front.close();
        if cycle == 100 {
            memory = fixture.process.memory();
        }
    }
    fixture.assert_idle();
    let grown = fixture.process.memory().saturating_sub(memory);
    let (each, used) = (began.elapsed() / cycles, fixture.process.usage().since(before).cpu / cycles);
    println!("{policy}: {each:?} each, {used:?} of that in the process; grown by {grown} KiB since the hundredth");
    assert!(grown <= GROWTH_MAX, "{policy}: grown by {grown} KiB");
    drop((data, list));
    assert_eq!(grants_in_use(), grants, "grants in use according to Xen");
    fixture.end(&[0..u64::from(cycles) * 8]);
}

/// The front ends choose copies and persistent mapping in turn.
#[test]
fn a_thousand_connections_leak_nothing() {
    cycles_leak_nothing("auto", 1000);
}

#[test]
fn connections_with_per_request_mapping_leak_nothing() {
    cycles_leak_nothing("map", 200);
}
