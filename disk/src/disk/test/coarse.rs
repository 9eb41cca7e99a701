//! Storage that frees whole blocks of 4096 bytes only, under requests of 512.

use super::*;

const EDGE: u64 = 4096;

fn coarse() -> Rig<Raw> {
    let mut rig = Rig::new(vec![Raw::new(MIB, 512, false).unwrap()], vec![vec![7; MIB as usize]], 1);
    rig.files.coarse = true;
    rig
}

/// The deallocations that the storage was asked for, and has not refused.
fn freed(rig: &Rig<Raw>) -> Vec<(u64, u64)> {
    let aligned =
        |&(_, write, at, len): &(u8, bool, u64, u64)| (write && at % EDGE == 0 && len % EDGE == 0).then_some((at, len));
    rig.files.log.iter().filter_map(aligned).collect()
}

#[test]
fn zeroes_in_part_of_a_block_are_written_and_whole_blocks_freed() {
    for free in [true, false] {
        let zeroes = Operation::WriteZeroes { free, durable: false };
        for (at, len) in [(512, 512), (512, 3 * EDGE), (EDGE, 512), (3584, 1024), (3584, EDGE + 512), (0, EDGE)] {
            let mut rig = coarse();
            assert_eq!(rig.ask(zeroes, at, len, Segments::empty()), Status::Done, "{at}+{len}");
            let mut expected = vec![7; MIB as usize];
            expected[at as usize..(at + len) as usize].fill(0);
            assert_eq!(rig.read(0, MIB), expected, "{at}+{len}");
        }
    }
    let mut rig = coarse();
    rig.ask(Operation::WriteZeroes { free: true, durable: false }, 512, 3 * EDGE, Segments::empty());
    assert_eq!(freed(&rig), [(EDGE, 2 * EDGE)]);
}

#[test]
fn a_discard_frees_what_can_be_freed_of_it() {
    let mut rig = coarse();
    assert_eq!(rig.ask(Operation::Discard, 512, 512, Segments::empty()), Status::Done);
    assert_eq!(rig.read(0, MIB), vec![7; MIB as usize]);
    assert_eq!(rig.ask(Operation::Discard, 512, 3 * EDGE, Segments::empty()), Status::Done);
    let mut expected = vec![7; MIB as usize];
    expected[EDGE as usize..3 * EDGE as usize].fill(0);
    assert_eq!(rig.read(0, MIB), expected);
}

#[test]
fn an_edge_that_cannot_be_written_fails_the_zeroes() {
    let mut rig = coarse();
    rig.submit(Operation::WriteZeroes { free: true, durable: false }, 512, 2 * EDGE, Segments::empty(), 1);
    rig.step();
    rig.files.fail_nth = Some(0);
    rig.drain();
    assert_eq!(rig.answered.pop_back().unwrap().1, Status::Failed);
}
