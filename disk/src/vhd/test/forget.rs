//! Sectors that live in the parent from now on.

use super::crash::*;
use super::*;
use crate::DiskOffset;

const BLOCK: u64 = 512 << 10;

fn span(sector: u64, count: u64) -> Span {
    Span { at: DiskOffset(sector * 512), len: count * 512 }
}

/// A file whose first block has its first eight sectors written, with all of that durable; and the file opened.
fn eight_sectors() -> (Vhd, Vec<u8>) {
    let mut bytes = small(differencing());
    let mut vhd = open(&bytes).unwrap();
    fill(&mut vhd, &mut bytes, span(0, 8), 0x11);
    round(&mut vhd, &mut bytes);
    (open(&bytes).unwrap(), bytes)
}

fn forget(vhd: &mut Vhd, bytes: &[u8], span: Span) {
    let len = asked(vhd, bytes, |vhd| vhd.forget(span));
    assert_eq!(len, span.len);
}

#[test]
fn forgotten_sectors_are_the_parents() {
    let (mut vhd, mut bytes) = eight_sectors();
    forget(&mut vhd, &bytes, span(2, 3));
    let now = content(&mut vhd, &bytes);
    assert_eq!(&now[..6], [[Found::Data(0x11); 2].as_slice(), &[Found::Parent; 3], &[Found::Data(0x11)]].concat());
    round(&mut vhd, &mut bytes);
    assert_eq!(reopened(&bytes), now);
    assert_eq!(checked(&bytes).problems, []);
}

#[test]
fn a_bitmap_is_asked_for_unless_the_block_goes_as_a_whole() {
    let (mut vhd, bytes) = eight_sectors();
    assert!(matches!(vhd.forget(span(0, 4)), Err(Wait::Load(_))));
    let (mut vhd, _) = eight_sectors();
    assert_eq!(vhd.forget(Span { at: DiskOffset(0), len: 2 * BLOCK }), Ok(BLOCK));
    assert_eq!(
        vhd.forget(Span { at: DiskOffset(0), len: 2 * BLOCK }),
        Ok(2 * BLOCK),
        "there is nothing left to forget"
    );
    assert_eq!(content(&mut vhd, &bytes)[0], Found::Parent);
}

#[test]
fn a_block_without_sectors_leaves_the_table_and_its_place_is_leaked_when_that_is_durable() {
    let (mut vhd, mut bytes) = eight_sectors();
    forget(&mut vhd, &bytes, span(0, 5));
    assert_eq!(vhd.allocated(), BLOCK);
    forget(&mut vhd, &bytes, span(5, 3));
    assert_eq!(vhd.allocated(), 0);
    assert_eq!(vhd.reclaim(), None);
    drop(vhd.seal());
    assert_eq!(vhd.reclaim(), None, "a power loss may still bring it back");
    vhd.settled(false);
    assert_eq!(vhd.reclaim(), None, "the round has failed");
    round(&mut vhd, &mut bytes);
    let FileRange { at, len } = vhd.reclaim().unwrap();
    assert_eq!((len, bytes[at.0 as usize]), (BLOCK, 0x11));
    assert_eq!(vhd.reclaim(), None);
    let elsewhere = asked(&mut vhd, &bytes, |vhd| vhd.reserve(span(0, 1))).at;
    assert_ne!(elsewhere, at, "it is not deallocated yet");
    vhd.released(at, true);
    assert_eq!(asked(&mut vhd, &bytes, |vhd| vhd.reserve(Span { at: DiskOffset(BLOCK), len: 512 })).at, at);
    assert_eq!(open(&bytes).unwrap().allocated(), 0);
}

#[test]
fn a_write_under_way_keeps_its_block() {
    let (mut vhd, mut bytes) = eight_sectors();
    let write = asked(&mut vhd, &bytes, |vhd| vhd.reserve(span(100, 1)));
    forget(&mut vhd, &bytes, span(0, 8));
    bytes[write.at.0 as usize..][..512].fill(0x22);
    vhd.commit(write.ticket.unwrap()).unwrap();
    round(&mut vhd, &mut bytes);
    let found = reopened(&bytes);
    assert_eq!((found[0], found[100], found[101]), (Found::Parent, Found::Data(0x22), Found::Parent));
}

#[test]
fn forgetting_up_to_the_end_of_the_disk_takes_bits_behind_it_along() {
    // Other programs set every bit of a last block that is full, also of sectors that the disk does not have.
    let spec = Spec { block_size: 512 << 10, ..spec(BLOCK + 4096, differencing()) };
    let mut bytes = file_of(&create(&spec).unwrap());
    let mut vhd = open(&bytes).unwrap();
    fill(&mut vhd, &mut bytes, Span { at: DiskOffset(BLOCK), len: 4096 }, 0x11);
    round(&mut vhd, &mut bytes);
    let Ok(Mapping::Data { at, .. }) = vhd.map(Span { at: DiskOffset(BLOCK), len: 512 }) else {
        panic!("it is written")
    };
    bytes[at.0 as usize - 512..at.0 as usize].fill(0xff);
    let mut vhd = open(&bytes).unwrap();
    forget(&mut vhd, &bytes, Span { at: DiskOffset(BLOCK + 512), len: 4096 - 512 });
    assert_eq!(vhd.allocated(), BLOCK);
    forget(&mut vhd, &bytes, Span { at: DiskOffset(BLOCK), len: 512 });
    assert_eq!(vhd.allocated(), 0);
    round(&mut vhd, &mut bytes);
    assert_eq!(open(&bytes).unwrap().allocated(), 0);
}

/// Scope: every subset of the sectors of each batch of one round, in which a block has bits set and cleared, a second
/// leaves the table sector by sector, and a third as a whole.
#[test]
fn until_the_round_has_ended_a_power_loss_finds_forgotten_sectors_as_they_were() {
    let (mut vhd, mut bytes) = eight_sectors();
    fill(&mut vhd, &mut bytes, Span { at: DiskOffset(BLOCK), len: 1024 }, 0x22);
    fill(&mut vhd, &mut bytes, Span { at: DiskOffset(2 * BLOCK), len: 1024 }, 0x33);
    round(&mut vhd, &mut bytes);
    let mut vhd = open(&bytes).unwrap();
    let before = content(&mut vhd, &bytes);
    fill(&mut vhd, &mut bytes, span(20, 2), 0x44);
    forget(&mut vhd, &bytes, span(0, 4));
    forget(&mut vhd, &bytes, Span { at: DiskOffset(BLOCK), len: 1024 });
    forget(&mut vhd, &bytes, Span { at: DiskOffset(2 * BLOCK), len: BLOCK });
    let after = content(&mut vhd, &bytes);
    let mut states = 0;
    each_crash(&bytes, &vhd.seal(), |state, durable| {
        states += 1;
        let found = reopened(state);
        assert!(!durable || found == after);
        for (sector, found) in found.iter().enumerate() {
            assert!(*found == before[sector] || *found == after[sector], "sector {sector}: {found:?}");
        }
    });
    assert_eq!(states, 2 + 2 + 1, "a bitmap, a sector of the table, the end");
}

/// Scope: every subset of the sectors of the round, for a block that another program's batmap calls full.
#[test]
fn a_block_called_full_is_so_no_longer() {
    let mut bytes = small(differencing());
    let mut vhd = open(&bytes).unwrap();
    fill(&mut vhd, &mut bytes, Span { at: DiskOffset(0), len: BLOCK }, 0x11);
    fill(&mut vhd, &mut bytes, Span { at: DiskOffset(BLOCK), len: BLOCK }, 0x11);
    round(&mut vhd, &mut bytes);
    let header_at = bytes.windows(8).position(|cookie| cookie == b"tdbatmap").unwrap();
    bytes[header_at + 512] = 0xc0;
    let sum = layout::checksum(&bytes[header_at + 512..header_at + 1024]);
    bytes[header_at + 24..header_at + 28].copy_from_slice(&sum.to_be_bytes());
    let mut vhd = open(&bytes).unwrap();
    assert!(vhd.map(span(0, 8)).is_ok(), "the bitmap is not even looked at");
    let before = content(&mut vhd, &bytes);
    assert_eq!(vhd.forget(span(16, 32)), Ok(32 * 512));
    let after = content(&mut vhd, &bytes);
    assert_eq!((after[15], after[16], after[47], after[48]), (before[0], Found::Parent, Found::Parent, before[0]));
    each_crash(&bytes, &vhd.seal(), |state, durable| {
        let found = reopened(state);
        assert!(found == after || !durable && found == before);
    });
}

#[test]
fn a_place_forgotten_and_taken_anew_in_one_round_is_two_places() {
    let (mut vhd, mut bytes) = eight_sectors();
    forget(&mut vhd, &bytes, span(0, 8));
    fill(&mut vhd, &mut bytes, span(1, 1), 0x22);
    let after = content(&mut vhd, &bytes);
    each_crash(&bytes, &vhd.seal(), |state, durable| {
        let found = reopened(state);
        assert!(found == after || !durable && found[..8] == [Found::Data(0x11); 8]);
    });
}
