//! Entries that make no sense, and clusters and tables that others refer to, or may: what is beside them is none of
//! their business.

use super::*;
use crate::{DiskOffset, FileOffset};

#[test]
fn a_table_without_its_mark_is_copied_by_the_first_write() {
    let mut bench = Bench::new(new_file(64 * MIB));
    bench.write(Span { at: DiskOffset(0), len: 4096 }, 1);
    // In another slice of the table.
    bench.write(Span { at: DiskOffset(40 * MIB), len: 4096 }, 3);
    bench.round();
    let l1_at = at(bench.image.info().l1_at.0);
    bench.file[l1_at] &= 0x7f;
    let before = entry(&bench.file[l1_at..], 0);
    let mut bench = Bench::new(bench.file);
    bench.write(Span { at: DiskOffset(CLUSTER), len: 4096 }, 2);
    assert_eq!(bench.round(), 3, "the old table is freed behind the L1 entry");
    let after = entry(&bench.file[l1_at..], 0);
    assert_ne!(after & layout::OFFSET_MASK, before);
    assert_eq!(after & layout::COPIED, layout::COPIED);
    let mut bench = bench.reopened();
    assert_eq!((bench.byte(0), bench.byte(CLUSTER), bench.byte(40 * MIB)), (1, 2, 3));
}

/// Three clusters in one piece of an L2 table; `damage` is done to the entry of the middle one.
fn three_clusters(damage: impl Fn(u64) -> u64) -> (Bench, u64) {
    let mut bench = Bench::new(new_file(2 * GIB));
    for (number, at) in [4 * CLUSTER, 5 * CLUSTER, 6 * CLUSTER, GIB].into_iter().enumerate() {
        bench.write(Span { at: DiskOffset(at), len: CLUSTER }, u8::try_from(number).unwrap() + 1);
    }
    bench.round();
    let l2 = entry(&bench.file[at(bench.image.info().l1_at.0)..], 0) & layout::OFFSET_MASK;
    let old = entry(&bench.file[at(l2)..], 5);
    set_entry(&mut bench.file[at(l2)..], 5, damage(old));
    (Bench::new(bench.file), l2 + 40)
}

#[test]
fn a_bad_entry_costs_its_cluster_and_nothing_beside_it() {
    let bad = (1 << 63) | (1 << 40);
    let (mut bench, entry_at) = three_clusters(|_| bad);
    let wrong = Mapping::Damaged { at: FileOffset(entry_at), raw: bad, len: 512 };
    for _ in 0..2 {
        assert_eq!(bench.ask(|image| image.map(Span { at: DiskOffset(5 * CLUSTER), len: 512 })), wrong);
        assert_eq!((bench.byte(4 * CLUSTER), bench.byte(6 * CLUSTER), bench.byte(GIB)), (1, 3, 4));
    }
    let long = bench.ask(|image| image.map(Span { at: DiskOffset(0), len: 16 * CLUSTER }));
    assert_eq!(long, Mapping::Parent { len: 4 * CLUSTER });
    let span = Span { at: DiskOffset(5 * CLUSTER), len: 4096 };
    assert_eq!(bench.image.reserve(span), Err(Wait::Damaged(Corrupt { at: FileOffset(entry_at) })));
    assert_eq!(
        bench.image.discard(Span { len: CLUSTER, ..span }),
        Err(Wait::Damaged(Corrupt { at: FileOffset(entry_at) }))
    );
    bench.write(Span { at: DiskOffset(4 * CLUSTER), len: 4096 }, 7);
    bench.write(Span { at: DiskOffset(7 * CLUSTER), len: 4096 }, 8);
    bench.round();
    assert_eq!((bench.byte(4 * CLUSTER), bench.byte(7 * CLUSTER)), (7, 8));
}

#[test]
fn a_lost_mark_costs_a_copy_and_nothing_beside_it() {
    let (mut bench, _) = three_clusters(|old| old & !layout::COPIED);
    let old = match bench.ask(|image| image.map(Span { at: DiskOffset(5 * CLUSTER), len: CLUSTER })) {
        Mapping::Shared { at, len } => (at, len),
        other => panic!("{other:?}"),
    };
    assert_eq!(old.1, CLUSTER);
    assert_eq!((bench.file[at(old.0.0)], bench.byte(4 * CLUSTER), bench.byte(6 * CLUSTER)), (2, 1, 3));
    let reserved = bench.ask(|image| image.reserve(Span { at: DiskOffset(5 * CLUSTER + 4096), len: 4096 }));
    let fill = crate::Fill { before: 4096, after: CLUSTER - 8192 };
    assert_eq!(reserved.fill, Some(fill), "what is around the write is copied with it");
    assert_ne!(reserved.at, old.0 + 4096);
    bench.image.abandon(reserved.ticket.unwrap());
    bench.write(Span { at: DiskOffset(5 * CLUSTER), len: CLUSTER }, 9);
    bench.round();
    let mut bench = bench.reopened();
    assert_eq!((bench.byte(4 * CLUSTER), bench.byte(5 * CLUSTER), bench.byte(6 * CLUSTER)), (1, 9, 3));
}

/// Two entries for one cluster that is counted once, beside one that makes no sense, so that their piece is judged each
/// time anew. That is damage; but a write that was begun is there when it ends.
#[test]
fn a_write_under_way_is_not_lost_with_what_its_neighbour_has_freed() {
    let (bench, entry_at) = three_clusters(|_| (1 << 63) | (1 << 40));
    let mut file = bench.file;
    let first = entry(&file[at(entry_at - 8)..], 0) & !layout::COPIED;
    set_entry(&mut file[at(entry_at - 8)..], 0, first);
    set_entry(&mut file[at(entry_at + 8)..], 0, first);
    let mut bench = Bench::new(file);
    let [one, two] = [4 * CLUSTER, 6 * CLUSTER]
        .map(|at| bench.ask(|image| image.reserve(Span { at: DiskOffset(at), len: CLUSTER })));
    for (reserved, byte) in [(one, 8), (two, 9)] {
        let place = at(reserved.at.0)..at((reserved.at + CLUSTER).0);
        bench.file.resize(bench.file.len().max(place.end), 0);
        bench.file[place].fill(byte);
        bench.image.commit(reserved.ticket.unwrap()).unwrap();
    }
    bench.round();
    assert_eq!((bench.byte(4 * CLUSTER), bench.byte(6 * CLUSTER)), (8, 9));
}

/// A new image that says it has a snapshot, whose table stands in a new cluster with an empty L1 table behind it.
fn with_snapshot(mut file: Vec<u8>, extra_len: u8) -> Vec<u8> {
    let table = file.len().next_multiple_of(at(CLUSTER));
    file.resize(table + 2 * at(CLUSTER), 0);
    let snapshot = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 1, 0, 1];
    file[table..table + 16].copy_from_slice(&snapshot);
    file[table..table + 8].copy_from_slice(&(table as u64 + CLUSTER).to_be_bytes());
    file[table + 39] = extra_len;
    file[60..64].copy_from_slice(&1u32.to_be_bytes());
    file[64..72].copy_from_slice(&(table as u64).to_be_bytes());
    file
}

#[test]
fn a_disk_grows_only_where_its_snapshots_say_how_large_they_are() {
    let refused = |file: Vec<u8>, words: &str| {
        let error = Bench::new(file).image.grow(128 * MIB).unwrap_err();
        assert!(error.kind == ImageErrorKind::Unsupported && error.what.contains(words), "{error}");
    };
    refused(with_snapshot(old_file(64 * MIB, None), 0), "internal snapshots");
    refused(with_snapshot(old_file(64 * MIB, None), 16), "internal snapshots");
    refused(with_snapshot(new_file(64 * MIB), 8), "internal snapshots");
    for mut file in [with_snapshot(new_file(64 * MIB), 16), old_file(64 * MIB, None), new_file(64 * MIB)] {
        Bench::new(file.clone()).image.grow(128 * MIB).unwrap();
        // The first L1 entry that is not of the disk, in a table of two.
        let l1 = at(u64::from_be_bytes(file[40..48].try_into().unwrap()));
        file[39] = 2;
        let table = file.len().next_multiple_of(at(CLUSTER));
        file.resize(table + at(CLUSTER), 0);
        set_entry(&mut file[l1 + 8..], 0, table as u64 | layout::COPIED);
        refused(file, "behind the end");
    }
}

#[test]
fn a_shared_cluster_stays_as_it_is_and_loses_a_reference() {
    let (bench, entry_at) = three_clusters(|old| old & !layout::COPIED);
    let place = entry(&bench.file[at(entry_at)..], 0) & layout::OFFSET_MASK;
    // As if a snapshot had it too: nobody else here counts.
    let count_at = |file: &[u8], cluster: u64| {
        let table = at(u64::from_be_bytes(file[48..56].try_into().unwrap()));
        at(entry(&file[table..], 0) + cluster * 2)
    };
    let mut file = bench.file;
    let counted = count_at(&file, place / CLUSTER);
    file[counted + 1] = 2;
    for discard in [false, true] {
        let mut bench = Bench::new(file.clone());
        let span = Span { at: DiskOffset(5 * CLUSTER), len: CLUSTER };
        if discard {
            assert_eq!(bench.ask(|image| image.discard(span)), Discarded::Hidden { len: CLUSTER });
        } else {
            bench.write(span, 9);
        }
        let batches = bench.image.seal();
        // Up to the last batch, which lowers it, the refcount is what it was.
        for batch in &batches[..batches.len() - 1] {
            apply(&mut bench.file, batch);
            assert_eq!(bench.file[counted + 1], 2);
        }
        apply(&mut bench.file, batches.last().unwrap());
        bench.image.settled(true);
        assert_eq!((bench.file[counted + 1], bench.file[at(place)]), (1, 2));
        assert_eq!(bench.byte(5 * CLUSTER), if discard { 0 } else { 9 });
    }
}

#[test]
fn an_l1_entry_that_makes_no_sense_costs_what_it_is_about() {
    let (bench, _) = three_clusters(|old| old);
    let l1_at = at(bench.image.info().l1_at.0);
    let mut file = bench.file;
    set_entry(&mut file[l1_at..], 0, (1 << 63) | 0x1_0200);
    refused(&file, ImageErrorKind::Corrupt, "check --repair");
    let mut image = read_only(&file).unwrap();
    let place = image.map(Span { at: DiskOffset(GIB / 4), len: GIB }).unwrap();
    assert_eq!(place, Mapping::Damaged { at: FileOffset(l1_at as u64), raw: (1 << 63) | 0x1_0200, len: GIB / 4 });
    assert_eq!(image.map(Span { at: DiskOffset(GIB / 2), len: GIB / 4 }), Ok(Mapping::Parent { len: GIB / 4 }));
}

/// A new image as version 2 has it.
fn old_file(len: u64, on: Option<Link>) -> Vec<u8> {
    let mut file = file_of(&create(&Spec { parent: on, ..spec(len) }).unwrap());
    file[7] = 2;
    file[72..1024].fill(0);
    file
}

#[test]
fn version_2_is_written_to_and_never_told_of_zeroes() {
    let mut bench = Bench::new(old_file(64 * MIB, None));
    bench.write(Span { at: DiskOffset(MIB), len: CLUSTER }, 3);
    assert!(matches!(
        bench.ask(|image| image.discard(Span { at: DiskOffset(MIB), len: CLUSTER })),
        Discarded::Freed { .. }
    ));
    bench.write(Span { at: DiskOffset(2 * MIB), len: CLUSTER }, 4);
    bench.round();
    let mut bench = bench.reopened();
    assert_eq!((bench.byte(MIB), bench.byte(2 * MIB), bench.image.info().version), (0, 4, 2));

    let mut child = Bench::new(old_file(64 * MIB, Some(parent("base.qcow2"))));
    child.write(Span { at: DiskOffset(0), len: CLUSTER }, 5);
    let discarded = child.ask(|image| image.discard(Span { at: DiskOffset(0), len: 2 * CLUSTER }));
    assert_eq!(discarded, Discarded::Nothing { len: 2 * CLUSTER }, "the parent would show");
    child.round();
    assert_eq!(child.reopened().byte(0), 5);
}

#[test]
fn a_cluster_that_reads_as_zero_is_damage_in_version_2() {
    let mut bench = Bench::new(old_file(64 * MIB, None));
    bench.write(Span { at: DiskOffset(0), len: CLUSTER }, 3);
    bench.round();
    let l2 = entry(&bench.file[at(bench.image.info().l1_at.0)..], 0) & layout::OFFSET_MASK;
    bench.file[at(l2) + 7] |= 1;
    let mut bench = Bench::new(bench.file);
    let place = bench.ask(|image| image.map(Span { at: DiskOffset(0), len: CLUSTER }));
    assert!(matches!(place, Mapping::Damaged { at, len: CLUSTER, .. } if at == FileOffset(l2)), "{place:?}");
}

/// What a redo log has when it becomes full, written again over a round that has freed more: it refers to nothing
/// that is counted too low.
#[test]
fn what_a_log_says_of_a_copied_table_does_not_outlive_what_the_table_refers_to() {
    let mut bench = Bench::new(new_file(64 * MIB));
    bench.write(Span { at: DiskOffset(0), len: 2 * CLUSTER }, 1);
    bench.round();
    let l1_at = at(bench.image.info().l1_at.0);
    bench.file[l1_at] &= 0x7f;
    let mut bench = Bench::new(bench.file);
    bench.image.collect_records();
    bench.write(Span { at: DiskOffset(CLUSTER), len: 4096 }, 2);
    let logged = bench.image.records().words().to_vec();
    let complete = !bench.image.records().is_incomplete();
    let freed = bench.ask(|image| image.discard(Span { at: DiskOffset(0), len: CLUSTER }));
    assert!(matches!(freed, Discarded::Freed { .. } | Discarded::Hidden { .. }), "{freed:?}");
    bench.round();
    let (owed, _) = crate::redo::Owed::of(&logged, &mut bench.file.as_slice()).unwrap();
    if let Some(owed) = owed.filter(|_| complete) {
        owed.batches().iter().for_each(|batch| apply(&mut bench.file, batch));
    }
    let problems = check(&mut bench.file.as_slice()).unwrap().problems;
    assert!(problems.iter().all(|problem| problem.severity == crate::Severity::Leak), "{problems:?}");
}
