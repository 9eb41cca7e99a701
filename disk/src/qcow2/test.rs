//! The format by itself: a file in memory, and every wait answered at once.

use super::layout::{
    COMPRESSION_TYPE, CORRUPT, DIRTY, EXTENSION_BITMAPS, EXTENSION_FEATURE_NAMES, EXTERNAL_DATA, entry, set_entry,
};
use super::*;
use crate::{Creation, DiskOffset, ImageErrorKind};

mod sharing;

const CLUSTER: u64 = 64 << 10;
const MIB: u64 = 1 << 20;

fn spec(len: u64) -> Spec {
    Spec { len, cluster_size: CLUSTER_SIZE, uuid: [7; 16], parent: None, compression: Compression::Deflate }
}

fn parent(name: &str) -> Link {
    Link {
        format: Some("qcow2"),
        uuid: [9; 16],
        relative: name.to_owned(),
        absolute: String::new(),
        len: Some(GIB),
        modified: Some(1_700_000_000),
    }
}

const GIB: u64 = 1 << 30;

fn at(offset: u64) -> usize {
    usize::try_from(offset).unwrap()
}

fn file_of(creation: &Creation) -> Vec<u8> {
    let mut file = vec![0; at(creation.len)];
    apply(&mut file, &creation.writes);
    file
}

fn apply(file: &mut Vec<u8>, writes: &[MetaWrite]) {
    for write in writes {
        let end = at(write.at.0) + write.bytes.len();
        file.resize(file.len().max(end), 0);
        file[at(write.at.0)..end].copy_from_slice(&write.bytes);
    }
}

fn new_file(len: u64) -> Vec<u8> {
    file_of(&create(&spec(len)).unwrap())
}

fn open(file: &[u8]) -> Result<Qcow2, ImageError> {
    Qcow2::open(&mut &*file, Access::ReadWrite, Tail::Zeroes)
}

fn read_only(file: &[u8]) -> Result<Qcow2, ImageError> {
    Qcow2::open(&mut &*file, Access::ReadOnly, Tail::Zeroes)
}

/// An image and its file.
struct Bench {
    file: Vec<u8>,
    image: Qcow2,
}

impl Bench {
    fn new(file: Vec<u8>) -> Bench {
        let image = open(&file).unwrap();
        Bench { file, image }
    }

    /// What `ask` says when everything it waits for has been loaded.
    fn ask<T>(&mut self, mut ask: impl FnMut(&mut Qcow2) -> Result<T, Wait>) -> T {
        for _ in 0..1000 {
            match ask(&mut self.image) {
                Ok(answer) => return answer,
                Err(Wait::Load(block)) => {
                    let mut bytes = vec![0; usize::try_from(block.len).unwrap()];
                    let end = self.file.len().min(at(block.at.0) + bytes.len());
                    let there = &self.file[at(block.at.0).min(end)..end];
                    bytes[..there.len()].copy_from_slice(there);
                    self.image.load(block, &bytes).unwrap();
                }
                Err(other) => panic!("{other:?}"),
            }
        }
        panic!("loads without end");
    }

    /// Writes one byte over a span, zeroes where a fill is asked for.
    fn write(&mut self, span: Span, byte: u8) {
        let mut done = 0;
        while done < span.len {
            let rest = Span { at: span.at + done, len: span.len - done };
            let reserved = self.ask(|image| image.reserve(rest));
            let fill = reserved.fill.unwrap_or(crate::Fill { before: 0, after: 0 });
            let (from, end) = (at(reserved.at.0), at((reserved.at + reserved.len).0));
            self.file.resize(self.file.len().max(end + at(fill.after)), 0);
            self.file[from - at(fill.before)..end + at(fill.after)].fill(0);
            self.file[from..end].fill(byte);
            reserved.ticket.map(|ticket| self.image.commit(ticket).unwrap());
            done += reserved.len;
        }
    }

    fn round(&mut self) -> usize {
        let batches = self.image.seal();
        batches.iter().for_each(|batch| apply(&mut self.file, batch));
        self.image.settled(true);
        assert_eq!(self.image.dirty(), 0);
        batches.len()
    }

    fn byte(&mut self, offset: u64) -> u8 {
        match self.ask(|image| image.map(Span { at: DiskOffset(offset), len: 512 })) {
            Mapping::Data { at: place, .. } => self.file[at(place.0)],
            _ => 0,
        }
    }

    /// The image as it is opened again, found to be sound.
    fn reopened(&self) -> Bench {
        let report = check(&mut self.file.as_slice()).unwrap();
        assert!(report.problems.is_empty(), "{report:?}");
        Bench::new(self.file.clone())
    }
}

fn refused(file: &[u8], kind: ImageErrorKind, words: &str) {
    let error = open(file).unwrap_err();
    assert_eq!(error.kind, kind, "{error}");
    assert!(error.what.contains(words), "{error}");
}

fn with_features(field: usize, bits: u64) -> Vec<u8> {
    let mut file = new_file(64 * MIB);
    file[field..field + 8].copy_from_slice(&bits.to_be_bytes());
    file
}

#[test]
fn a_new_image_says_who_it_is_and_whom_it_is_on() {
    let link = parent("../base.qcow2");
    let file = file_of(&create(&Spec { parent: Some(link.clone()), ..spec(GIB) }).unwrap());
    let image = open(&file).unwrap();
    assert_eq!(image.info().uuid, [7; 16]);
    assert_eq!(image.link(), Some(link));
    assert!(image.has_parent());
    let backing = image.info().backing.clone().unwrap();
    assert_eq!((backing.name.as_str(), backing.format.as_deref()), ("../base.qcow2", Some("qcow2")));
}

#[test]
fn a_parent_that_another_program_has_changed_is_of_unknown_identity() {
    let mut file = file_of(&create(&Spec { parent: Some(parent("base.qcow2")), ..spec(GIB) }).unwrap());
    file[1024] = b'c';
    let link = open(&file).unwrap().link().unwrap();
    assert_eq!((link.relative.as_str(), link.uuid, link.len, link.modified), ("case.qcow2", [0; 16], None, None));
}

#[test]
fn a_name_with_a_colon_is_no_protocol() {
    let file = file_of(&create(&Spec { parent: Some(parent("nbd:x")), ..spec(GIB) }).unwrap());
    assert_eq!(open(&file).unwrap().info().backing.as_ref().unwrap().name, "./nbd:x");
}

#[test]
fn what_cannot_be_made_is_refused() {
    let of = |spec: &Spec| create(spec).unwrap_err().kind;
    assert_eq!(of(&spec(0)), ImageErrorKind::OutOfLimits);
    assert_eq!(of(&spec(1000)), ImageErrorKind::OutOfLimits);
    assert_eq!(of(&spec(1 << 51)), ImageErrorKind::OutOfLimits);
    assert_eq!(of(&Spec { cluster_size: 32 << 10, ..spec(GIB) }), ImageErrorKind::OutOfLimits);
    assert_eq!(of(&Spec { parent: Some(parent(&"x".repeat(1024))), ..spec(GIB) }), ImageErrorKind::OutOfLimits);
    assert_eq!(of(&Spec { parent: Some(parent("")), ..spec(GIB) }), ImageErrorKind::OutOfLimits);
}

#[test]
fn features_that_are_not_handled_are_refused_by_name() {
    refused(
        &with_features(72, EXTERNAL_DATA),
        ImageErrorKind::Unsupported,
        "external data file, which it does not name",
    );
    refused(&with_features(72, 1 << 40), ImageErrorKind::Unsupported, "bit 40");
    refused(&with_features(72, COMPRESSION_TYPE), ImageErrorKind::Unsupported, "compression type 0");
    let mut named = with_features(72, 1 << 40);
    let table = named.windows(4).position(|word| word == EXTENSION_FEATURE_NAMES.to_be_bytes()).unwrap();
    named[table + 8..table + 10].copy_from_slice(&[0, 40]);
    named[table + 10..table + 56].fill(0);
    named[table + 10..table + 18].copy_from_slice(b"quantum\n");
    refused(&named, ImageErrorKind::Unsupported, "quantum");
    let mut encrypted = new_file(64 * MIB);
    encrypted[35] = 2;
    refused(&encrypted, ImageErrorKind::Unsupported, "LUKS");
}

#[test]
fn what_cannot_be_written_safely_is_only_read() {
    let mut snapshots = new_file(64 * MIB);
    snapshots[63] = 2;
    for (file, kind, words) in [
        (with_features(72, DIRTY), ImageErrorKind::Corrupt, "check --repair"),
        (with_features(72, CORRUPT), ImageErrorKind::Corrupt, "marked as corrupt"),
        (snapshots, ImageErrorKind::Corrupt, "internal snapshots makes no sense"),
    ] {
        refused(&file, kind, words);
        assert!(read_only(&file).unwrap().geometry().read_only);
    }
}

/// An image with one snapshot, whose L1 table of one entry is at this byte; the last cluster is free for it.
fn with_snapshot(l1_at: u64) -> Vec<u8> {
    let mut file = new_file(64 * MIB);
    let table = u64::try_from(file.len()).unwrap();
    file[60..64].copy_from_slice(&1u32.to_be_bytes());
    file[64..72].copy_from_slice(&table.to_be_bytes());
    file.resize(file.len() + 2 * at(CLUSTER), 0);
    let entry = &mut file[at(table)..];
    entry[..8].copy_from_slice(&l1_at.to_be_bytes());
    entry[8..12].copy_from_slice(&1u32.to_be_bytes());
    entry[36..40].copy_from_slice(&16u32.to_be_bytes());
    file
}

/// What is allocated would go behind it: to the end of what a file system can hold, or nowhere.
#[test]
fn a_snapshot_whose_table_is_behind_the_file_leaves_the_image_read_only() {
    let last = u64::try_from(new_file(64 * MIB).len()).unwrap() + CLUSTER;
    assert!(open(&with_snapshot(last)).is_ok());
    for l1_at in [last + CLUSTER, 1 << 40, 1 << 55, u64::MAX - CLUSTER + 1] {
        let file = with_snapshot(l1_at);
        refused(&file, ImageErrorKind::Corrupt, "internal snapshots makes no sense");
        assert!(read_only(&file).unwrap().geometry().read_only);
    }
}

/// Two bits of every byte of the header and of some of the rest, one at a time.
#[test]
fn no_damage_makes_us_panic() {
    let mut bench = Bench::new(new_file(64 * MIB));
    bench.write(Span { at: DiskOffset(MIB), len: 300 << 10 }, 1);
    bench.round();
    let mut file = bench.file;
    for place in (0..128).chain((128..file.len()).step_by(1013)) {
        for flip in [0x01, 0x80] {
            file[place] ^= flip;
            for access in [Access::ReadOnly, Access::ReadWrite] {
                let Ok(mut image) = Qcow2::open(&mut file.as_slice(), access, Tail::Zeroes) else { continue };
                poke(&mut image, &file);
            }
            file[place] ^= flip;
        }
    }
}

/// Looks, writes and discards a little, whatever comes of it.
fn poke(image: &mut Qcow2, file: &[u8]) {
    let len = image.geometry().len.min(64 * MIB);
    for step in 0..12u64 {
        let span =
            Span { at: DiskOffset((step / 3 * MIB).min(len)), len: (64 << 10).min(len.saturating_sub(step / 3 * MIB)) };
        if span.len == 0 {
            return;
        }
        for _ in 0..8 {
            let wait = match step % 3 {
                0 => image.map(span).map(|_| ()),
                1 if image.geometry().read_only => Ok(()),
                1 => image.reserve(span).map(|reserved| {
                    reserved.ticket.map(|ticket| image.commit(ticket));
                }),
                _ if image.geometry().read_only => Ok(()),
                _ => image.discard(span).map(|_| ()),
            };
            let Err(Wait::Load(block)) = wait else { break };
            let mut bytes = vec![0; usize::try_from(block.len).unwrap()];
            let end = file.len().min(at(block.at.0).saturating_add(bytes.len()));
            let there = &file[at(block.at.0).min(end)..end];
            bytes[..there.len()].copy_from_slice(there);
            if image.load(block, &bytes).is_err() {
                break;
            }
        }
    }
    image.seal();
    image.settled(true);
}

#[test]
fn tables_in_one_place_are_damage() {
    let mut file = new_file(2 * GIB);
    let l1_at = at(open(&file).unwrap().info().l1_at.0);
    file.resize(file.len() + at(2 * CLUSTER), 0);
    let table = (1 << 63) | (file.len() as u64 - CLUSTER);
    set_entry(&mut file[l1_at..], 0, table);
    set_entry(&mut file[l1_at..], 1, table);
    refused(&file, ImageErrorKind::Corrupt, "same place");
}

#[test]
fn autoclear_bits_are_cleared_before_anything_is_written() {
    let file = with_features(88, 1 | (1 << 33));
    let image = open(&file).unwrap();
    let writes = image.first_writes();
    assert_eq!(image.info().autoclear, ["bitmaps", "bit 33"]);
    let mut cleared = file.clone();
    apply(&mut cleared, &writes);
    assert_eq!(cleared[88..96], [0; 8]);
    cleared[88..96].copy_from_slice(&file[88..96]);
    assert!(cleared == file, "nothing else changes");
    assert_eq!(open(&new_file(MIB)).unwrap().first_writes(), []);
    assert_eq!(read_only(&file).unwrap().first_writes(), []);
}

#[test]
fn the_disk_grows_in_place_and_to_a_longer_table() {
    let mut bench = Bench::new(new_file(64 * MIB));
    bench.write(Span { at: DiskOffset(0), len: CLUSTER }, 1);
    for len in [GIB, 4 << 40, 9 << 40, 64 << 40] {
        bench.image.grow(len).unwrap();
        bench.write(Span { at: DiskOffset(len - CLUSTER), len: 4096 }, 2);
        bench.round();
        // What the old table leaves is freed when its refcounts are at hand.
        bench.write(Span { at: DiskOffset(len - 2 * CLUSTER), len: 4096 }, 3);
        bench.round();
        bench = bench.reopened();
        assert_eq!(bench.image.geometry().len, len);
        assert_eq!((bench.byte(0), bench.byte(len - CLUSTER), bench.byte(len - 2 * CLUSTER)), (1, 2, 3));
    }
    assert!(bench.image.grow(GIB).is_err(), "a disk does not shrink");
}

#[test]
fn an_image_just_opened_grows_without_reading() {
    let mut bench = Bench::new(new_file(64 * MIB));
    bench.image.grow(64 << 40).unwrap();
    bench.round();
    bench.write(Span { at: DiskOffset(0), len: 4096 }, 1);
    bench.round();
    let mut bench = bench.reopened();
    assert_eq!(bench.byte(0), 1);
}

#[test]
fn a_growth_that_stops_midway_leaves_the_old_disk_or_the_new() {
    let mut bench = Bench::new(new_file(64 * MIB));
    bench.write(Span { at: DiskOffset(0), len: 4096 }, 1);
    bench.round();
    bench.image.grow(64 << 40).unwrap();
    bench.write(Span { at: DiskOffset(0), len: 2 * CLUSTER }, 2);
    // The last batch lowers the refcounts of the old table, the one before it is the header.
    let batches = bench.image.seal();
    for stop in 0..=batches.len() {
        let mut file = bench.file.clone();
        batches[..stop].iter().for_each(|batch| apply(&mut file, batch));
        let report = check(&mut file.as_slice()).unwrap();
        assert!(
            report.problems.iter().all(|problem| problem.severity != crate::Severity::Damage),
            "{stop}: {report:?}"
        );
        let mut again = Bench::new(file);
        assert_eq!(again.image.geometry().len, if stop + 1 < batches.len() { 64 * MIB } else { 64 << 40 }, "{stop}");
        assert_eq!(again.byte(0), 2, "in place");
    }
}

#[test]
fn the_refcount_table_of_a_small_image_grows() {
    // As QEMU makes it: one cluster for the table. With clusters of 512 bytes it counts 8 MiB.
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("small");
    let made = std::process::Command::new("qemu-img")
        .args(["create", "-q", "-f", "qcow2", "-o", "cluster_size=512", path.to_str().unwrap(), "40M"])
        .status();
    assert!(made.unwrap().success());
    let mut bench = Bench::new(std::fs::read(&path).unwrap());
    for number in 0..20u8 {
        bench.write(Span { at: DiskOffset(u64::from(number) * 2 * MIB), len: 2 * MIB }, number + 1);
        bench.round();
    }
    bench.write(Span { at: DiskOffset(0), len: 512 }, 1);
    bench.image.discard(Span { at: DiskOffset(0), len: 512 }).unwrap();
    bench.round();
    let mut again = bench.reopened();
    (0..20u8).for_each(|number| assert_eq!(again.byte(u64::from(number) * 2 * MIB + MIB), number + 1));
}

#[test]
fn another_parent_is_recorded_by_one_sector() {
    let mut bench = Bench::new(file_of(&create(&Spec { parent: Some(parent("a")), ..spec(GIB) }).unwrap()));
    for name in ["the-second-of-them", "c", &"d".repeat(1023)] {
        let old = bench.image.link();
        bench.image.relink(Some(&parent(name))).unwrap();
        let new = bench.image.link();
        let batches = bench.image.seal();
        for stop in 0..batches.len() {
            let mut file = bench.file.clone();
            batches[..stop].iter().for_each(|batch| apply(&mut file, batch));
            assert_eq!(open(&file).unwrap().link(), old, "{stop}");
        }
        let before = bench.file.clone();
        batches.iter().for_each(|batch| apply(&mut bench.file, batch));
        bench.image.settled(true);
        assert_eq!(open(&bench.file).unwrap().link(), new);
        assert_eq!(before.len(), bench.file.len());
    }
    bench.image.relink(None).unwrap();
    bench.round();
    let bench = bench.reopened();
    assert_eq!((bench.image.link(), bench.image.has_parent(), bench.image.info().uuid), (None, false, [7; 16]));
}

#[test]
fn what_is_forgotten_is_the_parents_and_leaked_when_that_is_durable() {
    let mut bench = Bench::new(file_of(&create(&Spec { parent: Some(parent("a")), ..spec(GIB) }).unwrap()));
    bench.write(Span { at: DiskOffset(0), len: 4 * CLUSTER }, 1);
    bench.round();
    let whole = Span { at: DiskOffset(0), len: 2 * MIB };
    let mut done = 0;
    while done < whole.len {
        let rest = Span { at: DiskOffset(done), len: whole.len - done };
        done += bench.ask(|image| image.forget(rest));
    }
    assert_eq!(bench.image.map(whole), Ok(Mapping::Parent { len: 2 * MIB }));
    assert_eq!(bench.image.reclaim(), None, "a power loss could bring it back");
    assert_eq!(bench.round(), 2);
    let FileRange { at: place, len } = bench.image.reclaim().unwrap();
    assert_eq!(len, 4 * CLUSTER);
    bench.image.released(place, true);
    let reserved = bench.ask(|image| image.reserve(Span { at: DiskOffset(0), len: CLUSTER }));
    assert_eq!(reserved.at, place);
    bench.reopened();
}

#[test]
fn a_cluster_freed_is_used_again_after_the_round_and_its_deallocation() {
    let mut bench = Bench::new(new_file(GIB));
    bench.write(Span { at: DiskOffset(0), len: 2 * CLUSTER }, 1);
    bench.round();
    let freed = bench.ask(|image| image.discard(Span { at: DiskOffset(0), len: 2 * CLUSTER }));
    let Discarded::Freed { at: place, len, size } = freed else { panic!("{freed:?}") };
    assert_eq!((len, size), (2 * CLUSTER, 2 * CLUSTER));
    bench.image.released(place, true);
    let elsewhere = bench.ask(|image| image.reserve(Span { at: DiskOffset(MIB), len: 4096 }));
    assert!(elsewhere.at >= place + size, "{elsewhere:?}");
    assert_eq!(bench.round(), 2, "entries, then refcounts");
    let again = bench.ask(|image| image.reserve(Span { at: DiskOffset(2 * MIB), len: 4096 }));
    assert_eq!((again.at, again.fill), (place, None));
}

#[test]
fn data_that_is_not_counted_is_neither_deallocated_nor_lost_with_the_first_write() {
    let mut bench = Bench::new(new_file(GIB));
    bench.write(Span { at: DiskOffset(0), len: 3 * CLUSTER }, 1);
    bench.round();
    let Mapping::Data { at: place, .. } = bench.ask(|image| image.map(Span { at: DiskOffset(0), len: 512 })) else {
        panic!()
    };
    let mut file = bench.file.clone();
    // The block of refcounts stands behind the header and the refcount table.
    let counts = at(2 * CLUSTER + place / CLUSTER * 2);
    assert_eq!(file[counts..counts + 6], [0, 1, 0, 1, 0, 1]);
    file[counts..counts + 6].fill(0);
    let mut bench = Bench::new(file);
    bench.write(Span { at: DiskOffset(40 * MIB), len: 4096 }, 2);
    assert_eq!(bench.image.reclaim(), None, "who knows why the refcounts are zero");
    assert_eq!((bench.byte(40 * MIB), bench.byte(CLUSTER), bench.byte(2 * CLUSTER)), (2, 1, 1));
    let next = bench.ask(|image| image.reserve(Span { at: DiskOffset(80 * MIB), len: 4096 }));
    assert!(next.at >= place + 3 * CLUSTER, "what is referred to is not handed out: {next:?}");
}

#[test]
fn the_end_of_storage_without_one_is_behind_blocks_that_were_not_looked_at() {
    const BLOCKS: u64 = 70;
    let mut file = new_file(GIB);
    let first = file.len() as u64 / CLUSTER;
    for number in 1..=BLOCKS {
        let place = first + number - 1;
        let entry = at(CLUSTER + number * 8);
        file[entry..entry + 8].copy_from_slice(&(place * CLUSTER).to_be_bytes());
        file[at(2 * CLUSTER + place * 2) + 1] = 1;
    }
    file.resize(file.len() + at(BLOCKS * CLUSTER), 0);
    let mut bench = Bench::new(file);
    bench.write(Span { at: DiskOffset(0), len: CLUSTER }, 1);
    bench.round();
    let image = Qcow2::open(&mut bench.file.as_slice(), Access::ReadWrite, Tail::Stale).unwrap();
    assert_eq!(Bench { file: bench.file, image }.byte(0), 1);
}

#[test]
fn writes_to_one_clean_cluster_share_it_and_others_wait() {
    let mut bench = Bench::new(new_file(GIB));
    let first = bench.ask(|image| image.reserve(Span { at: DiskOffset(0), len: 4096 }));
    let second = bench.ask(|image| image.reserve(Span { at: DiskOffset(8192), len: 4096 }));
    assert_eq!((second.at, first.fill, second.fill), (first.at + 8192, None, None));
    let placed = bench.image.commit(second.ticket.unwrap()).unwrap();
    assert_eq!((placed.span, placed.at), (Span { at: DiskOffset(0), len: CLUSTER }, first.at));
    bench.image.abandon(first.ticket.unwrap());
    assert_eq!(bench.image.reclaim(), None, "it is in use");

    let mut child = Bench::new(file_of(&create(&Spec { parent: Some(parent("a")), ..spec(GIB) }).unwrap()));
    let first = child.ask(|image| image.reserve(Span { at: DiskOffset(4096), len: 4096 }));
    assert_eq!(first.fill, Some(crate::Fill { before: 4096, after: CLUSTER - 8192 }));
    let ticket = first.ticket.unwrap();
    assert_eq!(child.image.reserve(Span { at: DiskOffset(0), len: 512 }), Err(Wait::Busy(ticket)));
    assert_eq!(child.image.discard(Span { at: DiskOffset(0), len: CLUSTER }), Err(Wait::Busy(ticket)));
    child.image.abandon(ticket);
    assert_eq!(child.image.reclaim(), Some(FileRange { at: first.at - 4096, len: CLUSTER }));
    let whole = child.ask(|image| image.reserve(Span { at: DiskOffset(0), len: 3 * CLUSTER }));
    assert_eq!((whole.len, whole.fill), (3 * CLUSTER, None));
}

#[test]
fn a_long_write_gets_one_place() {
    let mut bench = Bench::new(new_file(GIB));
    let reserved = bench.ask(|image| image.reserve(Span { at: DiskOffset(4096), len: MIB }));
    assert_eq!((reserved.len, reserved.fill), (MIB, None));
    bench.image.commit(reserved.ticket.unwrap());
    assert_eq!(
        bench.image.map(Span { at: DiskOffset(4096), len: MIB }),
        Ok(Mapping::Data { at: reserved.at, len: MIB })
    );
}

#[test]
fn an_unallocated_cluster_over_a_parent_is_hidden() {
    let mut bench = Bench::new(file_of(&create(&Spec { parent: Some(parent("a")), ..spec(GIB) }).unwrap()));
    assert_eq!(
        bench.ask(|image| image.discard(Span { at: DiskOffset(0), len: 2 * CLUSTER + 512 })),
        Discarded::Hidden { len: 2 * CLUSTER }
    );
    assert_eq!(bench.image.map(Span { at: DiskOffset(0), len: MIB }), Ok(Mapping::Zero { len: 2 * CLUSTER }));
    assert_eq!(
        bench.image.discard(Span { at: DiskOffset(2 * CLUSTER), len: 512 }),
        Ok(Discarded::Nothing { len: 512 })
    );
    bench.round();
    bench.reopened();
}

#[test]
fn the_last_cluster_is_freed_whole() {
    let mut bench = Bench::new(new_file(CLUSTER + 512));
    bench.write(Span { at: DiskOffset(CLUSTER), len: 512 }, 1);
    let freed = bench.ask(|image| image.discard(Span { at: DiskOffset(CLUSTER), len: 512 }));
    assert!(matches!(freed, Discarded::Freed { len: 512, size: CLUSTER, .. }), "{freed:?}");
}

#[test]
fn bitmaps_are_named() {
    let mut file = new_file(64 * MIB);
    let directory_at = file.len() as u64;
    let mut directory = vec![0; 32];
    directory[19] = 6;
    directory[24..30].copy_from_slice(b"nightl");
    file.extend_from_slice(&directory);
    file.resize(file.len().next_multiple_of(at(CLUSTER)), 0);
    let names = file.windows(4).position(|word| word == EXTENSION_FEATURE_NAMES.to_be_bytes()).unwrap();
    let mut extension = EXTENSION_BITMAPS.to_be_bytes().to_vec();
    extension.extend_from_slice(&24u32.to_be_bytes());
    extension.extend_from_slice(&(1u64 << 32).to_be_bytes());
    extension.extend_from_slice(&32u64.to_be_bytes());
    extension.extend_from_slice(&directory_at.to_be_bytes());
    extension.extend_from_slice(&[0; 8]);
    file[names..names + extension.len()].copy_from_slice(&extension);
    let image = read_only(&file).unwrap();
    assert_eq!(image.info().bitmaps, ["nightl"]);
    assert!(!image.info().bitmaps_valid);
}

/// An image with subclusters, as another program makes it: they are 2 KiB.
fn with_subclusters(parent: Option<Link>) -> Bench {
    let mut file = file_of(&create(&Spec { parent, ..spec(64 * MIB) }).unwrap());
    file[72..80].copy_from_slice(&layout::EXTENDED_L2.to_be_bytes());
    Bench::new(file)
}

#[test]
fn a_small_write_takes_the_subclusters_that_it_touches_from_the_parent() {
    let mut bench = with_subclusters(Some(parent("base.qcow2")));
    let span = Span { at: DiskOffset(CLUSTER + 4096 + 512), len: 2048 };
    let first = bench.ask(|image| image.reserve(span));
    assert_eq!(first.fill, Some(crate::Fill { before: 512, after: 1536 }));
    assert_eq!(bench.image.reserve(Span { at: DiskOffset(CLUSTER), len: 512 }), Err(Wait::Busy(first.ticket.unwrap())));
    let placed = bench.image.commit(first.ticket.unwrap()).unwrap();
    assert_eq!((placed.span, placed.at), (Span { at: DiskOffset(CLUSTER + 4096), len: 4096 }, first.at - 512));
    let mut map = |at| bench.ask(|image| image.map(Span { at, len: 64 << 10 }));
    assert_eq!(map(DiskOffset(CLUSTER)), Mapping::Parent { len: 4096 });
    assert_eq!(map(DiskOffset(CLUSTER + 4096)), Mapping::Data { at: placed.at, len: 4096 });
    assert_eq!(map(DiskOffset(CLUSTER + 8192)), Mapping::Parent { len: CLUSTER - 8192 });
    // Up to what is there already, which is written in place.
    let before = bench.ask(|image| image.reserve(Span { at: DiskOffset(CLUSTER + 2048), len: 8192 }));
    assert_eq!((before.len, before.at, before.fill), (2048, placed.at - 2048, None));
    bench.image.abandon(before.ticket.unwrap());
    let there = bench.ask(|image| image.reserve(Span { at: DiskOffset(CLUSTER + 5120), len: 8192 }));
    assert_eq!((there.len, there.at, there.ticket), (3072, placed.at + 1024, None));
}

#[test]
fn a_cluster_of_which_others_have_a_part_is_copied_as_a_whole() {
    let mut bench = with_subclusters(None);
    bench.write(Span { at: DiskOffset(0), len: CLUSTER }, 1);
    bench.round();
    let l2 = entry(&bench.file[at(bench.image.info().l1_at.0)..], 0) & layout::OFFSET_MASK;
    // Only its first two subclusters are in the file, and the mark is lost.
    bench.file[at(l2)] &= 0x7f;
    set_entry(&mut bench.file[at(l2)..], 1, 0b11);
    let mut bench = Bench::new(bench.file);
    assert!(matches!(
        bench.ask(|image| image.map(Span { at: DiskOffset(0), len: CLUSTER })),
        Mapping::Shared { len: 4096, .. }
    ));
    let reserved = bench.ask(|image| image.reserve(Span { at: DiskOffset(512), len: 512 }));
    assert_eq!(reserved.fill, Some(crate::Fill { before: 512, after: CLUSTER - 1024 }));
}
