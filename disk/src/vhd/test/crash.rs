//! What a power loss may leave of a round, and what is read from it.

use super::*;
use crate::DiskOffset;

const SECTOR: usize = 512;

/// What a reader finds at one sector of the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Found {
    Zero,
    Parent,
    /// Its first byte.
    Data(u8),
}

/// A differencing image of four blocks of 512 KiB.
pub fn small(kind: Kind) -> Vec<u8> {
    let spec = Spec { block_size: 512 << 10, ..spec(2 << 20, kind) };
    file_of(&create(&spec).unwrap())
}

pub fn write(bytes: &mut Vec<u8>, write: &MetaWrite) {
    let (at, end) = (write.at.0 as usize, write.at.0 as usize + write.bytes.len());
    bytes.resize(bytes.len().max(end), 0);
    bytes[at..end].copy_from_slice(&write.bytes);
}

/// Runs a round to its end.
pub fn round(vhd: &mut Vhd, bytes: &mut Vec<u8>) {
    vhd.seal().iter().flatten().for_each(|each| write(bytes, each));
    vhd.settled(true);
}

/// Asks until there is an answer, giving what is waited for.
pub fn asked<T>(vhd: &mut Vhd, bytes: &[u8], mut ask: impl FnMut(&mut Vhd) -> Result<T, Wait>) -> T {
    loop {
        match ask(vhd) {
            Ok(answer) => return answer,
            Err(Wait::Load(block)) => {
                vhd.load(block, &bytes[block.at.0 as usize..][..block.len as usize]).unwrap();
            }
            Err(wait) => panic!("{wait:?}"),
        }
    }
}

/// Writes `fill` to a span that lies in one block, without a round.
pub fn fill(vhd: &mut Vhd, bytes: &mut Vec<u8>, span: Span, fill: u8) {
    let reserved = asked(vhd, bytes, |vhd| vhd.reserve(span));
    assert_eq!(reserved.len, span.len);
    write(bytes, &MetaWrite { at: reserved.at, bytes: vec![fill; span.len as usize] });
    if let Some(ticket) = reserved.ticket {
        vhd.commit(ticket).unwrap();
    }
}

/// Everything that a reader finds, sector by sector.
pub fn content(vhd: &mut Vhd, bytes: &[u8]) -> Vec<Found> {
    let mut found = Vec::new();
    let len = vhd.geometry().len;
    let mut at = 0;
    while at < len {
        let place = asked(vhd, bytes, |vhd| vhd.map(Span { at: DiskOffset(at), len: len - at }));
        let sectors = place.len() as usize / SECTOR;
        match place {
            Mapping::Data { at, .. } => {
                let of = |sector: usize| bytes.get(at.0 as usize + sector * SECTOR).copied().unwrap_or(0);
                found.extend((0..sectors).map(|sector| Found::Data(of(sector))));
            }
            Mapping::Zero { .. } => found.extend(std::iter::repeat_n(Found::Zero, sectors)),
            Mapping::Parent { .. } => found.extend(std::iter::repeat_n(Found::Parent, sectors)),
            Mapping::Compressed { .. } | Mapping::Shared { .. } | Mapping::Damaged { .. } | Mapping::Missing { .. } => {
                panic!("there is no such place in a VHD")
            }
        }
        at += place.len();
    }
    found
}

/// What is found in a file that is opened after a crash.
pub fn reopened(bytes: &[u8]) -> Vec<Found> {
    let mut vhd = open(bytes).unwrap_or_else(|error| panic!("a crash left what does not open: {error}"));
    content(&mut vhd, bytes)
}

/// Shows every state in which a power loss may leave the file: the batches before some one, and any subset of the
/// sectors of that one. Twice where the file grows: without what was not written, and with zeros in its place.
///
/// `show` is also told whether all of the batches are durable.
pub fn each_crash(bytes: &[u8], batches: &[Vec<MetaWrite>], mut show: impl FnMut(&[u8], bool)) {
    let mut durable = bytes.to_vec();
    for batch in batches {
        let sectors: Vec<MetaWrite> = batch.iter().flat_map(sectors_of).collect();
        assert!(sectors.len() <= 14, "{} sectors in a batch have too many subsets", sectors.len());
        let end = sectors.iter().map(|sector| sector.at.0 as usize + SECTOR).max().unwrap_or(0);
        for subset in 0..1u32 << sectors.len() {
            let mut state = durable.clone();
            let chosen = sectors.iter().enumerate().filter(|(number, _)| subset & (1 << number) != 0);
            chosen.for_each(|(_, sector)| write(&mut state, sector));
            show(&state, false);
            if state.len() < end {
                state.resize(end, 0);
                show(&state, false);
            }
        }
        batch.iter().for_each(|each| write(&mut durable, each));
    }
    show(&durable, true);
}

fn sectors_of(write: &MetaWrite) -> impl Iterator<Item = MetaWrite> + '_ {
    let at = write.at;
    write
        .bytes
        .chunks(SECTOR)
        .zip(0..)
        .map(move |(bytes, number)| MetaWrite { at: at + number * 512, bytes: bytes.into() })
}

#[test]
fn on_a_device_no_block_takes_the_place_of_one_that_a_killed_writer_may_have_freed() {
    let mut bytes = small(Kind::Dynamic);
    let first = Span { at: DiskOffset(0), len: 512 };
    write_block(&mut bytes, 0);
    let mut vhd = open(&bytes).unwrap();
    let freed = asked(&mut vhd, &bytes, |vhd| vhd.reserve(first)).at;
    // The table that says so is in the file, and perhaps in a cache only.
    asked(&mut vhd, &bytes, |vhd| vhd.discard(Span { len: 512 << 10, ..first }));
    round(&mut vhd, &mut bytes);

    let mut next = Vhd::open(&mut bytes.as_slice(), Access::ReadWrite, Tail::Stale).unwrap();
    let other = Span { at: DiskOffset(512 << 10), len: 512 };
    assert_eq!(next.reserve(other), Err(Wait::Round));
    next.seal();
    next.settled(false);
    assert_eq!(next.reserve(other), Err(Wait::Round));
    next.seal();
    next.settled(true);
    assert_eq!(next.reserve(other).map(|reserved| reserved.at), Ok(freed));
}
