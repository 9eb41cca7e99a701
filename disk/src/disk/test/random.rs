//! Random requests to chains of VHDs.

use super::*;
use crate::{Problem, Severity};

/// Random requests, several at a time and never overlapping, against a flat array of bytes; several layers deep, with a
/// full engine now and then. Scope: 9 seeds of 400 requests for each kind of chain; the last of them frees the last
/// block of a file.
#[test]
fn random_requests_agree_with_a_flat_model() {
    for seed in (0..8).chain([1000]) {
        for depth in 0..4 {
            random_run(seed, depth);
        }
    }
}

fn random_run(seed: u64, depth: u8) {
    const LEN: u64 = 9 * MIB + 512 * 7;
    let mut model = vec![0u8; LEN as usize];
    let mut files: Vec<Vec<u8>> = Vec::new();
    for layer in 0..=depth {
        let kind = if layer == 0 { Kind::Dynamic } else { child_of(layer - 1) };
        files.insert(0, new_vhd(LEN, kind, 512 << 10, layer));
        let access = |at: usize| if at == 0 { Access::ReadWrite } else { Access::ReadOnly };
        let layers = files.iter().enumerate().map(|(at, bytes)| open(bytes, access(at))).collect();
        let mut rig = Rig::new(layers, files, seed * 77 + u64::from(layer));
        for _ in 0..400 / (u64::from(depth) + 1) {
            random_batch(&mut rig, &mut model);
        }
        assert_eq!(rig.flush(), Status::Done);
        assert!(rig.read(0, LEN) == model, "seed {seed}, depth {depth}, layer {layer}");
        files = rig.files.bytes;
        assert_eq!(worse_than_leaks(&files[0]), [], "seed {seed}, depth {depth}");
    }
}

/// What is wrong with an image, but for space that nothing refers to and the next writer takes back.
fn worse_than_leaks(file: &[u8]) -> Vec<Problem> {
    let problems = vhd::check(&mut { file }, Tail::Zeroes).unwrap().problems;
    problems.into_iter().filter(|problem| problem.severity > Severity::Leak).collect()
}

#[test]
fn a_last_block_that_was_freed_is_space_that_the_next_writer_uses() {
    const BLOCK: u64 = 2 * MIB;
    let mut rig = dynamic(16 * MIB);
    assert_eq!(rig.write(0, &vec![1; 2 * BLOCK as usize]), Status::Done);
    assert_eq!(rig.flush(), Status::Done);
    let len = rig.files.bytes[0].len();
    let free = Operation::WriteZeroes { free: true, durable: false };
    assert_eq!(rig.ask(free, BLOCK, BLOCK, Segments::empty()), Status::Done);
    assert_eq!(rig.flush(), Status::Done);
    let file = rig.files.bytes.remove(0);
    let severities = |file: &[u8]| -> Vec<Severity> {
        vhd::check(&mut { file }, Tail::Zeroes).unwrap().problems.iter().map(|problem| problem.severity).collect()
    };
    assert_eq!(severities(&file), [Severity::Leak]);
    let mut next = Rig::new(vec![open(&file, Access::ReadWrite)], vec![file], 2);
    // With the first request it is looked for, and deallocated behind a sync.
    assert_eq!(next.read(0, 512), vec![1; 512]);
    assert_eq!(next.write(3 * BLOCK, &vec![2; BLOCK as usize]), Status::Done);
    assert_eq!(next.flush(), Status::Done);
    let longer = next.files.bytes[0].len() - len;
    assert!(longer < BLOCK as usize, "it is where the block that was freed was, and not behind it: {longer}");
    assert_eq!(severities(&next.files.bytes[0]), []);
}

/// Four requests at once, each in its own quarter of the disk.
pub fn random_batch(rig: &mut Rig, model: &mut [u8]) {
    let sectors = model.len() as u64 / 512;
    rig.files.room = 1 + rig.files.draw(16) as usize;
    let mut reads = Vec::new();
    for quarter in 0..4 {
        let first = sectors / 4 * quarter;
        let from = first + rig.files.draw(sectors / 4);
        let long = if rig.files.draw(8) == 0 { 3000 } else { 40 };
        let count = (1 + rig.files.draw(long)).min(first + sectors / 4 - from).max(1);
        let (at, len) = (from * 512, count * 512);
        let range = at as usize..(at + len) as usize;
        match rig.files.draw(10) {
            0..5 => {
                let byte = rig.files.draw(255) as u8 + 1;
                model[range].fill(byte);
                let memory = Segments::copy_of(&vec![byte; len as usize]);
                rig.submit(Operation::Write { durable: byte % 16 == 0 }, at, len, memory, quarter);
            }
            5 => {
                model[range].fill(0);
                let free = rig.files.draw(2) == 0;
                rig.submit(Operation::WriteZeroes { free, durable: false }, at, len, Segments::empty(), quarter);
            }
            6 => rig.submit(Operation::Flush, 0, 0, Segments::empty(), quarter),
            _ => {
                let memory = Segments::zeroed(len as usize);
                rig.submit(Operation::Read, at, len, memory.clone(), quarter);
                reads.push((range, memory));
            }
        }
    }
    rig.drain();
    assert!(rig.answered.drain(..).all(|(_, status, _)| status == Status::Done));
    for (range, memory) in reads {
        assert!(memory.to_vec() == model[range.clone()], "read of {range:?}");
    }
}
