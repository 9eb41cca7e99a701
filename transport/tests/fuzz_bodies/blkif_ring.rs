//! A front end that writes anything into its rings, its pages and its node, at any time.
//!
//! Invariants checked: no panic; the server becomes idle after each step, regardless of the announced number of
//! requests; after the front end has closed, none of its pages is mapped and none of its ports is bound, and the next
//! one is served.
//!
//! Input: two bytes for the configuration, then records of one byte and its arguments (see `step`).

use transport::blkif::GrantsPolicy;
use xen::GrantRef;
use xen::fake::{Counts, Host};

use crate::blkif_mock::{Abi, FRONTEND, Front, READ, Rings, TestBackend, attach, config, set, transfer};

/// Runs one input.
pub fn run(data: &[u8]) {
    let mut input = Input { rest: data };
    let (policy, shape) = (input.byte(), input.byte());
    let policies = [GrantsPolicy::Copy, GrantsPolicy::Map, GrantsPolicy::Persistent, GrantsPolicy::Auto];
    let abi = [Abi::Native, Abi::X86_32, Abi::X86_64, Abi::X86_32][usize::from(shape & 3)];
    let rings = Rings {
        abi,
        order: u32::from(shape >> 2 & 1),
        queues: 1 + u32::from(shape >> 3 & 1),
        persistent: shape & 16 == 0,
    };
    let host = Host::new().unwrap();
    attach(&host);
    let mut machine = TestBackend::new(&host, config(policies[usize::from(policy & 3)]));
    let mut front = Front::new(&host);
    front.connect(&mut machine, rings);
    let grants: Vec<GrantRef> = (0..4).map(|byte| front.page(byte).1).collect();
    while !input.rest.is_empty() {
        step(&mut input, &mut machine, &mut front, &grants);
    }
    machine.file.hold = false;
    machine.settle();
    front.close(&mut machine);
    assert_eq!((host.counts().mapped, host.counts().bound), (0, 0));
    front.write_state(1);
    front.connect(&mut machine, Rings::default());
    assert_eq!(front.run(&mut machine, &transfer(READ, 1, 0, &[(grants[0], 0, 7)])), 0, "the next is served");
    drop(machine);
    assert_eq!(host.counts(), Counts::default());
}

/// The next action of the front end, selected by the low three bits of a byte.
fn step(input: &mut Input<'_>, machine: &mut TestBackend, front: &mut Front, grants: &[GrantRef]) {
    let what = input.byte();
    let queue = usize::from(what >> 7) % front.rings.len();
    match what & 7 {
        // A mostly valid request.
        0 | 1 => {
            let (operation, sector, parts) = (input.byte() % 7, input.byte(), usize::from(input.byte() % 12));
            let piece = |byte: u8| (grants[usize::from(byte & 3)], byte >> 2 & 7, byte >> 5);
            let parts: Vec<_> = (0..parts).map(|_| piece(input.byte())).collect();
            front.submit(queue, &transfer(operation, u64::from(sector), u64::from(sector) * 8, &parts));
        }
        // Arbitrary bytes as a request.
        2 => {
            let mut entry = [0; 108];
            entry.fill_with(|| input.byte());
            front.submit(queue, &entry);
        }
        // An arbitrary number in the header.
        3 => {
            let (at, value) = (usize::from(input.byte() % 16) * 4, input.byte());
            let value = if value > 127 { u32::MAX - u32::from(value) } else { u32::from(value) };
            front.rings[queue].shared.store_u32(at, value).unwrap();
            front.guest.signal(front.rings[queue].port).unwrap();
        }
        // An arbitrary byte anywhere in the ring.
        4 => {
            let at = 64 + usize::from(input.byte()) * 15;
            front.rings[queue].shared.write(at, [input.byte()]).unwrap();
        }
        5 => machine.file.hold = !machine.file.hold,
        6 => set(&front.host, &format!("{FRONTEND}/state"), &(input.byte() % 10).to_string()),
        // A page is revoked, or was never granted.
        _ => {
            let page = grants[1 + usize::from(input.byte() % 3)];
            front.guest.revoke(page);
        }
    }
    machine.settle();
    machine.take_log();
}

struct Input<'a> {
    rest: &'a [u8],
}

impl Input<'_> {
    /// The next byte; zero when there is none.
    fn byte(&mut self) -> u8 {
        let Some((&first, rest)) = self.rest.split_first() else { return 0 };
        self.rest = rest;
        first
    }
}
