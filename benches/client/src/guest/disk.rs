//! A disk of a guest that boots: checked, read, written and flushed, by a client that remembers what was promised.
//!
//! Each block has the number of times it was written (`last`), and the number for which a flush has promised durability
//! (`kept`). The content must be from a time between the two, whichever process was killed meanwhile; blocks that were
//! never written must be unchanged.

use std::collections::BTreeMap;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::device::{DEPTH, Device, Failure, Op};
use super::pattern::{self, BLOCK, FULL, MARKER_AT, mix};
use super::{Disk, Outcome};

/// Number and length of the pieces of the golden image that a boot reads.
const READS: u64 = 48;
const PIECE: usize = 32 << 10;

/// Number of blocks that are written: inside and after the data of the golden image, so that some are copied and some
/// not.
const PLACES: u64 = 96;

/// How often a block was written.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
struct Times {
    /// The number of writes that are durable.
    kept: u32,
    /// The number of all writes.
    last: u32,
}

/// The expected content of a disk, by block.
type Memory = BTreeMap<u64, Times>;

/// Checks that everything is there, and writes.
pub fn boot(disk: &Disk, rounds: u32, blocks: u32) -> Result<Outcome, String> {
    let mut memory = recall(&disk.memory)?;
    let mut requests = 0;
    let booted = Device::connect(&disk.socket, disk.pid).and_then(|mut device| {
        let booted = live(disk, &mut device, &mut memory, rounds, blocks);
        requests = device.requests();
        booted
    });
    // Also if the disk is gone: earlier promises must hold when it is back.
    keep(&disk.memory, &memory)?;
    match booted {
        Ok(()) => Ok(Outcome::Done { requests }),
        Err(Failure::Gone) => Ok(Outcome::Gone { requests }),
        Err(Failure::Wrong(why)) => Err(format!("{}: {why}", disk.socket)),
    }
}

fn live(disk: &Disk, device: &mut Device, memory: &mut Memory, rounds: u32, blocks: u32) -> Result<(), Failure> {
    if let Some(line) = &disk.marker {
        expect(&device.read(&[(MARKER_AT, BLOCK)])?, MARKER_AT, &pattern::lines(line))?;
    }
    look(disk, device, memory)?;
    boot_reads(disk, device, memory)?;
    for round in 0..rounds {
        write(disk, device, memory, round, blocks)?;
    }
    if rounds > 0 { look(disk, device, memory) } else { Ok(()) }
}

/// Reads all blocks that were written. A write that was in flight when a disk died is there now or never.
fn look(disk: &Disk, device: &mut Device, memory: &mut Memory) -> Result<(), Failure> {
    let mut all: Vec<(&u64, &mut Times)> = memory.iter_mut().collect();
    for some in all.chunks_mut(DEPTH) {
        let places: Vec<(u64, usize)> = some.iter().map(|(block, _)| (**block * BLOCK as u64, BLOCK)).collect();
        let read = device.read(&places)?;
        for ((block, times), bytes) in some.iter_mut().zip(read.chunks(BLOCK)) {
            times.last = written(bytes, **block * BLOCK as u64, disk.seed, times)?;
        }
    }
    Ok(())
}

/// The number of the write whose content this is.
fn written(bytes: &[u8], at: u64, seed: u64, times: &Times) -> Result<u32, Failure> {
    let found = (times.kept..=times.last).find(|time| filled(at, BLOCK, seed, *time) == bytes);
    found.ok_or_else(|| {
        let before = (0..times.kept).find(|time| filled(at, BLOCK, seed, *time) == bytes);
        let what = before
            .map_or("what was never written there".to_owned(), |time| format!("what it held after {time} writes"));
        let Times { kept, last } = times;
        Failure::Wrong(format!(
            "the block at {at}, of which write {kept} was made durable and {last} the last, holds {what}"
        ))
    })
}

/// Reads what every boot reads: the golden image, except for blocks written here.
fn boot_reads(disk: &Disk, device: &mut Device, memory: &Memory) -> Result<(), Failure> {
    let pieces = FULL / PIECE as u64;
    let all: Vec<(u64, usize)> = (0..READS).map(|number| (mix(number) % pieces * PIECE as u64, PIECE)).collect();
    for some in all.chunks(DEPTH) {
        let read = device.read(some)?;
        for ((at, _), bytes) in some.iter().zip(read.chunks(PIECE)) {
            for (block, bytes) in (at / BLOCK as u64..).zip(bytes.chunks(BLOCK)) {
                if !memory.contains_key(&block) {
                    let at = block * BLOCK as u64;
                    expect(bytes, at, &filled(at, BLOCK, disk.seed, 0))?;
                }
            }
        }
    }
    Ok(())
}

/// Writes some blocks again, a quarter of them durably, and flushes.
fn write(disk: &Disk, device: &mut Device, memory: &mut Memory, round: u32, blocks: u32) -> Result<(), Failure> {
    let begin = mix(disk.seed ^ memory.values().map(|times| u64::from(times.last)).sum::<u64>() ^ u64::from(round));
    // Up to where real guests write.
    let room = MARKER_AT / BLOCK as u64 / PLACES;
    let mut chosen: Vec<u64> =
        (0..u64::from(blocks)).map(|number| mix(begin.wrapping_add(number)) % PLACES * room).collect();
    chosen.sort_unstable();
    chosen.dedup();
    for some in chosen.chunks(DEPTH) {
        let mut ops = Vec::new();
        for block in some {
            let times = memory.entry(*block).or_default();
            times.last += 1;
            let at = *block * BLOCK as u64;
            ops.push(Op::Write { at, bytes: filled(at, BLOCK, disk.seed, times.last), durable: is_durable(*block) });
        }
        device.submit(&ops)?;
        for block in some.iter().filter(|block| is_durable(**block)) {
            memory.entry(*block).and_modify(|times| times.kept = times.last);
        }
    }
    device.submit(&[Op::Flush])?;
    memory.values_mut().for_each(|times| times.kept = times.last);
    Ok(())
}

/// Whether a block is written durably.
fn is_durable(block: u64) -> bool {
    mix(block) % 4 == 0
}

fn filled(at: u64, len: usize, seed: u64, time: u32) -> Vec<u8> {
    let mut bytes = vec![0; len];
    pattern::fill(&mut bytes, at, seed, time);
    bytes
}

fn expect(bytes: &[u8], at: u64, expected: &[u8]) -> Result<(), Failure> {
    if bytes == expected {
        return Ok(());
    }
    let begin: Vec<String> = bytes.iter().take(16).map(|byte| format!("{byte:02x}")).collect();
    Err(Failure::Wrong(format!("the block at {at} begins with {} and is not what it must be", begin.concat())))
}

fn recall(path: &Path) -> Result<Memory, String> {
    match std::fs::read(path) {
        Ok(text) => serde_json::from_slice(&text).map_err(|error| format!("{}: {error}", path.display())),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(Memory::new()),
        Err(error) => Err(format!("{}: {error}", path.display())),
    }
}

fn keep(path: &Path, memory: &Memory) -> Result<(), String> {
    std::fs::write(path, serde_json::json!(memory).to_string()).map_err(|error| format!("{}: {error}", path.display()))
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn a_block_is_at_least_as_new_as_the_last_flush() {
        let times = Times { kept: 2, last: 4 };
        let said = |time| written(&filled(8192, BLOCK, 7, time), 8192, 7, &times);
        for time in 2..=4 {
            assert!(matches!(said(time), Ok(found) if found == time));
        }
        let lost = said(1);
        assert!(matches!(&lost, Err(Failure::Wrong(why)) if why.contains("after 1 writes")), "{lost:?}");
        assert!(matches!(said(5), Err(Failure::Wrong(why)) if why.contains("never written")));
        assert!(written(&filled(8192, BLOCK, 8, 3), 8192, 7, &times).is_err());
    }
}
