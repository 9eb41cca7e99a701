//! Our check of qcow2 images against qemu-img's, and our repair against both, on images that QEMU made and we damaged.
//!
//! Invariants checked: both sort every image alike (sound, space lost, damaged); after a repair of what can be repaired
//! both find it sound, and it holds what it held; stopped after any batch, it still holds that, and can be repaired; no
//! bytes whatever make us panic, read on and on, or take memory without end.

#[path = "qcow2/damage.rs"]
mod damage;
#[path = "qcow2/room.rs"]
mod room;
#[path = "qcow2/sparse.rs"]
mod sparse;

use damage::{Bytes, COPIED};
use disk::qcow2::{check, repair};
use fastrand::Rng;
use room::{Class, Room, Sectors, apply, class};
use sparse::{Sparse, header};

/// What each image holds: data in two second-level tables (for clusters of 64 KiB), zeroes, a discarded cluster.
const WRITES: &str = "write -P 1 0 1M;write -P 2 10M 192k;write -z 20M 1M;discard 10M 64k;write -P 3 600M 128k";

/// An image as QEMU makes it with these options.
fn image(room: &Room, options: &str) -> Bytes {
    room.img(&format!("create -q -f qcow2 {options} sound 1G"));
    room.io("sound", WRITES);
    Bytes(room.read("sound"))
}

/// Asserts that both sort the bytes into `class`.
fn assert_class(room: &Room, bytes: &[u8], expected: Class, name: &str) {
    room.write("damaged", bytes);
    let mut source = bytes;
    let report = check(&mut source);
    assert_eq!(room.qemu_class("damaged"), expected, "{name}: qemu-img says {}", room.qemu_text("damaged"));
    assert_eq!(room::class_of(&report), expected, "{name}: {report:?}");
}

/// Repairs, and asserts that this may stop after any batch, or with every other sector of one, and leaves in the end
/// what `sound` has.
fn assert_repaired(room: &Room, bytes: &[u8], sound: &str, name: &str) {
    let plan = repair(&mut &*bytes).unwrap();
    for batches in 0..=plan.batches.len() {
        for sectors in [Sectors::None, Sectors::Even, Sectors::Odd] {
            let mut stopped = bytes.to_vec();
            apply(&mut stopped, &plan, batches, sectors);
            let name = format!("{name}, stopped after {batches} batches and {sectors:?} of {:?}", plan.what);
            assert!(is_marked(bytes) <= (is_marked(&stopped) || class(&stopped) == Class::Clean), "{name}: too early");
            assert_resumed(room, stopped, sound, &name);
        }
    }
}

/// Whether an image says of itself that it is not to be trusted.
fn is_marked(bytes: &[u8]) -> bool {
    check(&mut &*bytes).is_ok_and(|report| report.dirty || report.marked_corrupt)
}

/// Asserts that an image that may not be sound holds what `sound` does, and is sound after a repair.
fn assert_resumed(room: &Room, mut stopped: Vec<u8>, sound: &str, name: &str) {
    room.write("stopped", &stopped);
    assert!(room.is_same("stopped", sound) || !room.opens("stopped"), "{name}: other content");
    let plan = repair(&mut stopped.as_slice()).unwrap();
    apply(&mut stopped, &plan, plan.batches.len(), Sectors::None);
    assert_sound(room, &stopped, name);
    room.write("stopped", &stopped);
    assert!(room.is_same("stopped", sound), "{name}: other content after {:?}", plan.what);
}

/// Asserts that nothing is wrong, and nothing left to repair.
fn assert_sound(room: &Room, bytes: &[u8], name: &str) {
    assert_class(room, bytes, Class::Clean, name);
    let report = check(&mut &*bytes).unwrap();
    assert!(!report.dirty && !report.marked_corrupt, "{name}: {report:?}");
    assert!(repair(&mut &*bytes).unwrap().batches.is_empty(), "{name}");
}

/// Damages a sound image; both are to see it, and a repair is to undo it.
fn mended(name: &str, expected: Class, damage: impl Fn(&mut Bytes)) {
    for options in ENTRIES {
        let room = Room::new();
        let mut bytes = image(&room, options);
        damage(&mut bytes);
        assert_class(&room, &bytes.0, expected, name);
        assert_repaired(&room, &bytes.0, "sound", name);
    }
}

/// Damages a sound image beyond repair; both are to see it, before and after.
fn lasting(name: &str, damage: impl Fn(&mut Bytes)) {
    for options in ENTRIES {
        let room = Room::new();
        let mut bytes = image(&room, options);
        damage(&mut bytes);
        assert_class(&room, &bytes.0, Class::Corrupt, name);
        let Ok(plan) = repair(&mut bytes.0.as_slice()) else { continue };
        apply(&mut bytes.0, &plan, plan.batches.len(), Sectors::None);
        assert_class(&room, &bytes.0, Class::Corrupt, name);
        assert!(repair(&mut bytes.0.as_slice()).unwrap().batches.is_empty(), "{name}: there is always more to repair");
    }
}

/// Has clusters of the disk lie where structures are; both are to see it, and a repair leaves what the disk shows.
fn taken_apart(name: &str, damage: impl Fn(&mut Bytes)) {
    for options in ENTRIES {
        let room = Room::new();
        let mut bytes = image(&room, options);
        damage(&mut bytes);
        assert_class(&room, &bytes.0, Class::Corrupt, name);
        room.img("convert -f qcow2 -O qcow2 damaged shown");
        let plan = repair(&mut bytes.0.as_slice()).unwrap();
        assert!(plan.what.iter().any(|what| what.contains("of its own") || what.contains("of their own")), "{name}");
        assert_repaired(&room, &bytes.0, "shown", name);
    }
}

/// Every kind of image that qemu-img makes and we can follow.
const KINDS: [&str; 13] = [
    "-o cluster_size=64k",
    "-o cluster_size=512",
    "-o cluster_size=2M",
    "-o compat=0.10",
    "-o refcount_bits=1",
    "-o refcount_bits=2",
    "-o refcount_bits=8",
    "-o refcount_bits=32",
    "-o refcount_bits=64",
    "-o lazy_refcounts=on",
    "-o compression_type=zstd",
    "-o extended_l2=on",
    "-o extended_l2=on,cluster_size=16k",
];

/// Entries of both lengths: of 8 bytes, and of 16 with subclusters.
const ENTRIES: [&str; 2] = ["-o cluster_size=64k", "-o cluster_size=64k,extended_l2=on"];

/// Scope: [`KINDS`], as they are and compressed in both ways.
#[test]
fn what_qemu_makes_is_sound() {
    for kind in KINDS {
        let room = Room::new();
        let bytes = image(&room, kind);
        assert_sound(&room, &bytes.0, kind);
        for options in ["", "-o compression_type=zstd"] {
            room.img(&format!("convert -q -c -f qcow2 -O qcow2 {options} sound packed"));
            assert_sound(&room, &room.read("packed"), kind);
        }
    }
}

/// Scope: [`KINDS`], with a block of refcounts that is empty, and without one.
#[test]
fn refcounts_of_every_kind_are_rebuilt() {
    for kind in KINDS {
        let room = Room::new();
        let sound = image(&room, kind);
        let mut empty = Bytes(sound.0.clone());
        empty.zero(empty.refcount_block(), empty.cluster());
        let mut none = Bytes(sound.0.clone());
        none.set_u64(none.refcount_table(), 0);
        for mut bytes in [empty, none] {
            assert_class(&room, &bytes.0, Class::Corrupt, kind);
            let plan = repair(&mut bytes.0.as_slice()).unwrap();
            apply(&mut bytes.0, &plan, plan.batches.len(), Sectors::None);
            assert_sound(&room, &bytes.0, kind);
            room.write("mended", &bytes.0);
            assert!(room.is_same("mended", "sound"), "{kind}: other content");
        }
    }
}

#[test]
fn places_without_data_are_followed() {
    let room = Room::new();
    room.img("create -q -f qcow2 -o preallocation=metadata sound 32M");
    room.io("sound", "write -z 1M 2M;discard 20M 1M");
    assert_sound(&room, &room.read("sound"), "preallocated");
}

#[test]
fn snapshots_are_followed() {
    let room = Room::new();
    image(&room, "-o cluster_size=64k");
    room.img("snapshot -c one sound");
    room.io("sound", "write -P 7 64k 256k;write -P 8 500M 64k");
    room.img("snapshot -c two sound");
    room.io("sound", "write -P 9 0 64k");
    assert_sound(&room, &room.read("sound"), "two snapshots");

    let mut bytes = Bytes(room.read("sound"));
    let shared = bytes.place(4);
    assert_eq!(bytes.refcount(shared), 2);
    bytes.set_refcount(shared, 1);
    assert_class(&room, &bytes.0, Class::Corrupt, "a cluster of a snapshot with refcount 1");
    assert_repaired(&room, &bytes.0, "sound", "a cluster of a snapshot with refcount 1");

    let mut bytes = Bytes(room.read("sound"));
    bytes.zero(bytes.refcount_block(), bytes.cluster());
    assert_class(&room, &bytes.0, Class::Corrupt, "snapshots without refcounts");
    assert_repaired(&room, &bytes.0, "sound", "snapshots without refcounts");
}

#[test]
fn compressed_clusters_are_followed() {
    for options in ["", "-o compression_type=zstd"] {
        let room = Room::new();
        image(&room, "-o cluster_size=64k");
        room.img(&format!("convert -q -c -f qcow2 -O qcow2 {options} sound packed"));
        let mut bytes = Bytes(room.read("packed"));
        bytes.zero(bytes.refcount_block(), bytes.cluster());
        assert_class(&room, &bytes.0, Class::Corrupt, "compressed without refcounts");
        assert_repaired(&room, &bytes.0, "sound", "compressed without refcounts");

        let mut bytes = Bytes(room.read("packed"));
        bytes.flip(bytes.l2(0), COPIED);
        assert_class(&room, &bytes.0, Class::Corrupt, "a compressed cluster marked as copied");
    }
}

#[test]
fn bitmaps_are_followed_and_dropped_when_they_are_out_of_date() {
    let room = Room::new();
    image(&room, "-o cluster_size=64k");
    room.img("bitmap --add sound first");
    room.img("bitmap --add -g 4096 sound second");
    room.io("sound", "write -P 5 30M 1M");
    assert_sound(&room, &room.read("sound"), "two bitmaps");

    let mut bytes = Bytes(room.read("sound"));
    bytes.zero(bytes.refcount_block(), bytes.cluster());
    assert_class(&room, &bytes.0, Class::Corrupt, "bitmaps without refcounts");
    assert_repaired(&room, &bytes.0, "sound", "bitmaps without refcounts");

    let mut bytes = Bytes(room.read("sound"));
    assert_eq!(bytes.u64(88), 1, "the autoclear bit is set");
    bytes.set_u64(88, 0);
    assert_class(&room, &bytes.0, Class::Leaks, "bitmaps out of date");
    assert_repaired(&room, &bytes.0, "sound", "bitmaps out of date");
    let plan = repair(&mut bytes.0.as_slice()).unwrap();
    assert!(plan.what.iter().any(|what| what.contains("bitmaps")), "{:?}", plan.what);
}

#[test]
fn two_bitmaps_with_one_name_are_damage() {
    let room = Room::new();
    image(&room, "-o cluster_size=64k");
    room.img("bitmap --add sound first");
    room.img("bitmap --add sound other");
    let mut bytes = room.read("sound");
    let name = bytes.windows(5).rposition(|window| window == b"other").unwrap();
    bytes[name..name + 5].copy_from_slice(b"first");
    assert_class(&room, &bytes, Class::Corrupt, "two bitmaps with one name");
}

/// Scope: a program killed in the middle, with and without lazy refcounts.
#[test]
fn an_image_that_was_not_closed_is_repaired() {
    for options in ["-o lazy_refcounts=on", "-o lazy_refcounts=off", "-o lazy_refcounts=on,cluster_size=4k"] {
        let room = Room::new();
        room.img(&format!("create -q -f qcow2 {options} damaged 1G"));
        room.io_killed("damaged", WRITES);
        let bytes = room.read("damaged");
        let expected = room.qemu_class("damaged");
        assert_eq!(class(&bytes), expected, "{options}: {}", room.qemu_text("damaged"));
        room.img(&format!("create -q -f qcow2 {options} sound 1G"));
        room.io("sound", WRITES);
        assert_repaired(&room, &bytes, "sound", options);
    }
}

#[test]
fn the_dirty_bit_alone_is_cleared() {
    mended("dirty", Class::Clean, |bytes| bytes.flip(72, 1));
    let room = Room::new();
    let mut bytes = image(&room, "-o cluster_size=64k");
    bytes.flip(72, 1);
    assert!(check(&mut bytes.0.as_slice()).unwrap().dirty);
}

#[test]
fn the_corrupt_bit_alone_is_cleared() {
    mended("corrupt", Class::Clean, |bytes| bytes.flip(72, 2));
}

#[test]
#[ignore = "slow: run by `make test-all`"]
fn a_leaked_cluster_is_given_back() {
    mended("a cluster leaked at the end", Class::Leaks, |bytes| {
        let end = bytes.len();
        bytes.0.resize(usize::try_from(end + bytes.cluster()).unwrap(), 0);
        bytes.set_refcount(end, 1);
    });
    mended("refcount 2 of one cluster", Class::Corrupt, |bytes| bytes.set_refcount(bytes.place(3), 2));
    mended("refcount 2 of one cluster, not marked", Class::Leaks, |bytes| {
        bytes.set_refcount(bytes.place(3), 2);
        bytes.flip(bytes.l2(3), COPIED);
    });
}

#[test]
fn refcounts_that_are_too_low_are_raised() {
    mended("refcount 0 of a cluster", Class::Corrupt, |bytes| bytes.set_refcount(bytes.place(3), 0));
    mended("refcount 0 of a table", Class::Corrupt, |bytes| bytes.set_refcount(bytes.l2(0), 0));
    mended("refcount 0 of the header", Class::Corrupt, |bytes| bytes.set_refcount(0, 0));
    mended("a block of zeroes", Class::Corrupt, |bytes| bytes.zero(bytes.refcount_block(), bytes.cluster()));
    mended("a block of ones", Class::Corrupt, |bytes| {
        for cluster in 0..bytes.cluster() / 2 {
            bytes.set_refcount(cluster * bytes.cluster(), 0xffff);
        }
    });
}

#[test]
#[ignore = "slow: run by `make test-all`"]
fn refcounts_that_cannot_be_mended_in_place_are_laid_out_anew() {
    mended("no block", Class::Corrupt, |bytes| bytes.set_u64(bytes.refcount_table(), 0));
    mended("a block that is not aligned", Class::Corrupt, |bytes| bytes.flip(bytes.refcount_table(), 0x2000));
    mended("reserved bits", Class::Corrupt, |bytes| bytes.flip(bytes.refcount_table(), 1));
    mended("a block outside the file", Class::Corrupt, |bytes| bytes.set_u64(bytes.refcount_table(), 1 << 40));
    mended("a block twice", Class::Corrupt, |bytes| {
        let block = bytes.refcount_block();
        bytes.set_u64(bytes.refcount_table() + 8, block);
    });
    mended("a table of garbage", Class::Corrupt, |bytes| {
        for index in 0..bytes.cluster() / 8 {
            bytes.set_u64(bytes.refcount_table() + 8 * index, 0x0123_4567_89ab_cdef + index);
        }
    });
    mended("a table outside the file", Class::Corrupt, |bytes| bytes.set_u64(48, 1 << 40));
    // Neither can be opened before, not even by a reader.
    mended("a table that is not aligned", Class::Corrupt, |bytes| bytes.flip(48, 0x200));
    mended("no table", Class::Corrupt, |bytes| bytes.flip(56, 1 << 32));
    mended("a block where a cluster of the disk is", Class::Corrupt, |bytes| {
        let place = bytes.place(3);
        bytes.set_u64(bytes.refcount_table(), place);
    });
}

#[test]
fn wrong_marks_are_corrected() {
    mended("a cluster not marked", Class::Corrupt, |bytes| bytes.flip(bytes.l2(3), COPIED));
    mended("a table not marked", Class::Corrupt, |bytes| bytes.flip(bytes.l1(0), COPIED));
    mended("all marks gone", Class::Corrupt, |bytes| {
        (0..16).for_each(|cluster| bytes.flip(bytes.l2(cluster), COPIED));
    });
}

#[test]
fn an_image_counts_as_sound_only_when_it_is() {
    mended("everything wrong, in place", Class::Corrupt, |bytes| {
        bytes.flip(72, 3);
        bytes.flip(bytes.l2(3), COPIED);
        bytes.set_refcount(bytes.place(4), 0);
        bytes.set_refcount(bytes.place(5), 7);
        bytes.set_refcount(bytes.len(), 1);
    });
    mended("everything wrong, and no refcounts", Class::Corrupt, |bytes| {
        bytes.flip(72, 3);
        bytes.flip(bytes.l2(3), COPIED);
        bytes.flip(bytes.l1(0), COPIED);
        bytes.set_u64(bytes.refcount_table(), 0x123);
    });
}

#[test]
fn unknown_autoclear_bits_go_before_anything_is_written() {
    let room = Room::new();
    let mut bytes = image(&room, "-o cluster_size=64k");
    bytes.flip(88, 1 << 40);
    assert!(repair(&mut bytes.0.as_slice()).unwrap().batches.is_empty());
    bytes.set_refcount(bytes.place(3), 0);
    let plan = repair(&mut bytes.0.as_slice()).unwrap();
    let mut begun = Bytes(bytes.0.clone());
    apply(&mut begun.0, &plan, 1, Sectors::None);
    assert_eq!((begun.u64(88), begun.refcount(begun.place(3))), (0, 0));
    assert_repaired(&room, &bytes.0, "sound", "an unknown autoclear bit");
}

#[test]
fn a_mark_of_an_external_data_file_that_is_none_is_cleared() {
    mended("a raw external data file", Class::Corrupt, |bytes| bytes.flip(88, 2));
}

#[test]
fn a_place_for_no_snapshots_is_cleared() {
    mended("an unaligned place for no snapshots", Class::Corrupt, |bytes| bytes.set_u64(64, 512));
    mended("a negative place for no snapshots", Class::Corrupt, |bytes| bytes.set_u64(64, 1 << 63));
}

/// New refcounts must not stand where the disk has clusters that are cut off, nor the file end behind those: then they
/// would be zeroes and the image sound.
#[test]
#[ignore = "slow: run by `make test-all`"]
fn a_file_cut_short_reads_the_same_and_stays_damaged_after_a_repair() {
    let room = Room::new();
    let mut bytes = image(&room, "-o cluster_size=4k");
    bytes.0.truncate(bytes.0.len() * 3 / 4);
    bytes.set_u64(bytes.refcount_table(), 1 << 40);
    room.write("cut", &bytes.0);
    room.img("convert -f qcow2 -O raw cut before");
    let plan = repair(&mut bytes.0.as_slice()).unwrap();
    assert!(plan.what.iter().any(|what| what.contains("cut short")), "{:?}", plan.what);
    apply(&mut bytes.0, &plan, plan.batches.len(), Sectors::None);
    assert_class(&room, &bytes.0, Class::Corrupt, "a file cut short");
    room.write("mended", &bytes.0);
    room.img("convert -f qcow2 -O raw mended after");
    assert!(room.read("before") == room.read("after"));
}

#[test]
fn reserved_bits_are_cleared_where_the_rest_makes_sense() {
    mended("reserved bits of a cluster", Class::Corrupt, |bytes| bytes.flip(bytes.l2(3), 1 << 60));
    mended("reserved bits of a table", Class::Corrupt, |bytes| bytes.flip(bytes.l1(0), 1 << 60));
    mended("reserved bits of both", Class::Corrupt, |bytes| {
        bytes.flip(bytes.l2(3), 1 << 57);
        bytes.flip(bytes.l2(4), 2);
        bytes.flip(bytes.l1(0), 1 << 57);
    });
    mended("reserved bits and a refcount of zero", Class::Corrupt, |bytes| {
        bytes.set_refcount(bytes.place(3), 0);
        bytes.flip(bytes.l2(3), 1 << 57);
    });
}

#[test]
fn a_cluster_that_reads_as_zero_loses_a_place_that_cannot_be() {
    for options in ENTRIES {
        let room = Room::new();
        let mut bytes = image(&room, options);
        let (entry, place) = (bytes.l2(3), bytes.place(3));
        room.write("zeroed", &bytes.0);
        let cluster = bytes.cluster();
        room.io("zeroed", &format!("write -z {} {cluster}", 3 * cluster));
        let extended = bytes.u64(72) & 1 << 4 != 0;
        bytes.set_u64(entry, COPIED | place | 0x200 | u64::from(!extended));
        if extended {
            bytes.set_u64(entry + 8, 0xffff_ffff << 32);
        }
        assert_class(&room, &bytes.0, Class::Corrupt, options);
        assert_repaired(&room, &bytes.0, "zeroed", options);
    }
}

#[test]
fn references_that_make_no_sense_stay_damage() {
    lasting("a cluster outside the file", |bytes| bytes.set_u64(bytes.l2(3), COPIED | 1 << 40));
    lasting("a cluster that is not aligned", |bytes| bytes.flip(bytes.l2(3), 0x200));
    lasting("reserved bits of a cluster that others have", |bytes| {
        bytes.set_u64(bytes.l2(3), bytes.place(4) | 1 << 60)
    });
    lasting("a table that is not aligned", |bytes| bytes.flip(bytes.l1(0), 0x200));
    lasting("a table outside the file", |bytes| bytes.set_u64(bytes.l1(0), COPIED | 1 << 40));
    lasting("a file cut short", |bytes| bytes.0.truncate(bytes.0.len() / 2));
    lasting("a first-level table that is not aligned", |bytes| bytes.flip(40, 0x200));
}

#[test]
#[ignore = "slow: run by `make test-all`"]
fn clusters_that_lie_where_a_structure_is_get_places_of_their_own() {
    taken_apart("the first-level table", |bytes| bytes.set_u64(bytes.l2(3), COPIED | bytes.u64(40)));
    taken_apart("its own table", |bytes| {
        let table = bytes.l2(0);
        bytes.set_u64(bytes.l2(3), COPIED | table);
    });
    taken_apart("another table, twice, and an image marked as corrupt", |bytes| {
        let other = bytes.l2(600 << 4) & !0xffff;
        bytes.set_u64(bytes.l2(3), COPIED | other);
        bytes.set_u64(bytes.l2(5), other);
        bytes.flip(72, 2);
    });
    taken_apart("the first-level table, and no refcounts", |bytes| {
        bytes.set_u64(bytes.l2(3), COPIED | bytes.u64(40));
        bytes.set_u64(bytes.refcount_table(), 0);
    });
}

#[test]
fn what_lies_where_a_snapshot_has_its_table_gets_a_place_of_its_own() {
    let room = Room::new();
    image(&room, "-o cluster_size=64k");
    room.img("snapshot -c one sound");
    room.io("sound", "write -P 9 0 64k");
    let mut bytes = Bytes(room.read("sound"));
    let table_of_snapshot = bytes.u64(bytes.u64(64));
    bytes.set_u64(bytes.l2(0), COPIED | table_of_snapshot);
    assert_class(&room, &bytes.0, Class::Corrupt, "a snapshot's table");
    room.img("convert -f qcow2 -O qcow2 damaged shown");
    assert_repaired(&room, &bytes.0, "shown", "a snapshot's table");
}

/// QEMU's check lets that pass, and its readers do not.
#[test]
fn a_cluster_of_version_2_that_claims_to_be_zero_is_damage() {
    let room = Room::new();
    let mut bytes = image(&room, "-o compat=0.10");
    bytes.flip(bytes.l2(3), 1);
    let report = check(&mut bytes.0.as_slice()).unwrap();
    assert!(report.problems.iter().any(|problem| problem.what.contains("reserved bits")), "{report:?}");
}

#[test]
fn a_cluster_with_two_places_is_named_and_made_safe() {
    let room = Room::new();
    let mut bytes = image(&room, "-o cluster_size=64k");
    bytes.set_u64(bytes.l2(3), bytes.u64(bytes.l2(4)));
    assert_class(&room, &bytes.0, Class::Corrupt, "one cluster in two places");
    let report = check(&mut bytes.0.as_slice()).unwrap();
    assert!(report.problems.iter().any(|problem| problem.what.contains("two places")), "{report:?}");

    let plan = repair(&mut bytes.0.as_slice()).unwrap();
    apply(&mut bytes.0, &plan, plan.batches.len(), Sectors::None);

    assert!(plan.what.iter().any(|what| what.contains("two places")), "{:?}", plan.what);
    assert_sound(&room, &bytes.0, "one cluster in two places");
    assert_eq!(bytes.refcount(bytes.place(3)), 2);
    assert_eq!(bytes.u64(bytes.l2(3)) & COPIED, 0);
}

#[test]
fn a_table_with_two_places_is_made_safe() {
    let room = Room::new();
    let mut bytes = image(&room, "-o cluster_size=64k");
    bytes.set_u64(bytes.l1(0), bytes.u64(bytes.l1(1)));
    assert_class(&room, &bytes.0, Class::Corrupt, "one table in two places");
    let plan = repair(&mut bytes.0.as_slice()).unwrap();
    apply(&mut bytes.0, &plan, plan.batches.len(), Sectors::None);
    assert_sound(&room, &bytes.0, "one table in two places");
}

/// Scope: 400 times, one sector of metadata behind the header overwritten with zeroes, ones, random bytes or another
/// sector. Both sort the image alike, and a repair leaves nothing that another would do.
#[test]
#[ignore = "slow: run by `make test-all`"]
fn a_random_sector_of_metadata_is_judged_as_qemu_does() {
    random_sectors("-o cluster_size=4k");
}

#[test]
#[ignore = "slow: run by `make test-all`"]
fn a_random_sector_of_metadata_with_subclusters_is_judged_as_qemu_does() {
    random_sectors("-o cluster_size=16k,extended_l2=on");
}

fn random_sectors(options: &str) {
    let room = Room::new();
    image(&room, options);
    room.img("snapshot -c one sound");
    room.io("sound", "write -P 7 16k 64k;write -P 8 50M 16k");
    let sound = Bytes(room.read("sound"));
    let is_metadata = |sector: &u64| {
        let words = (0..64).map(|word| sound.u64(sector * 512 + word * 8));
        words.filter(|word| ![0, 1, 2, 3, 7, 8].map(|byte| byte * 0x0101_0101_0101_0101).contains(word)).count() > 0
    };
    let sectors: Vec<u64> = (sound.cluster() / 512..sound.len() / 512).filter(is_metadata).collect();
    let seed = 0x5eed;
    println!("seed {seed:#x}, {} sectors", sectors.len());
    let mut random = Rng::with_seed(seed);
    for _ in 0..400 {
        let mut bytes = Bytes(sound.0.clone());
        let at = random.choice(&sectors).unwrap() * 512;
        let other = random.choice(&sectors).unwrap() * 512;
        let way = random.usize(..4);
        for word in (0..512).step_by(8) {
            bytes.set_u64(at + word, [0, u64::MAX, random.u64(..), sound.u64(other + word)][way]);
        }
        let name = format!("sector at {at} in way {way}, or like {other}");
        room.write("damaged", &bytes.0);
        assert_eq!(class(&bytes.0), room.qemu_class("damaged"), "{name}: {}", room.qemu_text("damaged"));
        let Ok(plan) = repair(&mut bytes.0.as_slice()) else { continue };
        apply(&mut bytes.0, &plan, plan.batches.len(), Sectors::None);
        assert!(repair(&mut bytes.0.as_slice()).unwrap().batches.is_empty(), "{name}: there is always more to repair");
    }
}

/// Whether we and QEMU take an image with these header extensions (type, length, whatever data) and this place for a
/// backing name of 4 bytes.
fn takes_extensions(room: &Room, extensions: &[(u32, u32)], name_at: u64) -> bool {
    room.img("create -q -f qcow2 made 1M");
    let mut bytes = Bytes(room.read("made"));
    bytes.zero(112, 65536 - 112);
    let mut at = 112;
    for &(kind, len) in extensions {
        bytes.set_u64(at, u64::from(kind) << 32 | u64::from(len));
        at += 8 + u64::from(len).next_multiple_of(8);
    }
    if name_at > 0 {
        bytes.set_u64(8, name_at);
        bytes.set_u64(16, 4 << 32 | 16);
        bytes.set_u64(name_at, u64::from_be_bytes(*b"base\0\0\0\0"));
    }
    room.write("damaged", &bytes.0);
    assert_eq!(
        class(&bytes.0),
        room.qemu_class("damaged"),
        "{extensions:x?}, {name_at}: {}",
        room.qemu_text("damaged")
    );
    class(&bytes.0) == Class::Clean
}

#[test]
fn header_extensions_are_taken_or_refused_as_by_qemu() {
    let room = Room::new();
    room.write("base", &[0; 512]);
    let takes = |extensions: &[(u32, u32)], name_at| takes_extensions(&room, extensions, name_at);
    // The mark that ends the list may have any length that fits.
    assert!(takes(&[(0, 0)], 0) && takes(&[(0, 1)], 0) && takes(&[(0, 65536 - 120)], 0));
    assert!(!takes(&[(0, 65536 - 119)], 0) && !takes(&[(0, u32::MAX)], 0));
    assert!(takes(&[(0, 4)], 124) && !takes(&[(0, 5)], 124));
    // A list without a mark ends where the name begins, and not within 8 bytes of that.
    assert!(takes(&[(0x1234_5678, 8)], 128) && takes(&[], 112));
    assert!(!takes(&[], 116) && !takes(&[(0x1234_5678, 0)], 124) && !takes(&[(0x1234_5678, 9)], 128));
    // Sizes of what both know.
    assert!(takes(&[(0xe279_2aca, 15)], 0) && !takes(&[(0xe279_2aca, 16)], 0));
    assert!(takes(&[(0x2385_2875, 24)], 0) && !takes(&[(0x2385_2875, 23)], 0) && !takes(&[(0x2385_2875, 32)], 0));
    assert!(!takes(&[(0x0537_be77, 16)], 0), "an encryption header without encryption");
}

/// The type is an additional field, and means something though no feature bit says that it is there.
#[test]
fn a_compression_type_that_nothing_announces_is_refused() {
    let room = Room::new();
    let mut bytes = image(&room, "-o cluster_size=64k");
    for kind in [1, 2, 255] {
        bytes.0[104] = kind;
        assert_class(&room, &bytes.0, Class::Corrupt, "compression type");
    }
}

/// Scope: each byte of the header and its extensions, three values each.
#[test]
fn a_byte_of_the_header_is_refused_or_followed_without_a_panic() {
    let room = Room::new();
    let sound = image(&room, "-o cluster_size=4k");
    for at in 0..640 {
        for value in [0, 0x80, 0xff] {
            let mut bytes = sound.0.clone();
            bytes[at] = value;
            if let Ok(report) = check(&mut bytes.as_slice()) {
                assert!(report.problems.len() <= 600);
                repair(&mut bytes.as_slice()).unwrap();
            }
        }
    }
}

/// 4 million entries name one table, each cluster of which is in the file: 256 GiB to be read by who follows them all.
#[test]
fn a_table_named_again_and_again_is_not_read_as_often() {
    let entries = 4 << 20;
    let l1 = (0..entries).map(|index| (0x2_0000 + index * 8, COPIED | 0x400_0000));
    let mut source = Sparse::new(1 << 40, header(entries).into_iter().chain(l1));
    let report = check(&mut source).unwrap();
    assert_eq!(report.worst(), Some(disk::Severity::Damage));
    assert!(source.read < 1 << 28, "{} bytes read", source.read);
}

/// The refcount table names a block for far more than there is, and the last cluster of 16 PiB is in use.
#[test]
fn a_long_sparse_file_is_checked_for_what_is_in_it() {
    let far = (1 << 54) - 0x1_0000;
    let words = [(0x2_0000, COPIED | 0x3_0000), (0x3_0000, COPIED | far), (0x1_0000, 0x4_0000)];
    let mut source = Sparse::new(1 << 54, header(2).into_iter().chain(words));
    let report = check(&mut source).unwrap();
    assert_eq!(report.worst(), Some(disk::Severity::Repairable), "{report:?}");
    assert!(source.read < 1 << 24, "{} bytes read", source.read);
    // The block for the last cluster would need a table larger than any that is read.
    assert!(repair(&mut source).is_err());
}
