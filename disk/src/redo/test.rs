//! What is read back from a redo log is what was appended, whenever its process has died.

use std::cell::Cell;

use super::*;
use crate::FileOffset;
use crate::format::MetaWrite;

const OWNER: Owner = Owner { identity: [7; IDENTITY_LEN], stamps: Vec::new(), session: [1; 16] };
const CAPACITY: usize = 256;
/// Bytes in front of what the tests change: a sector with the stamp.
const STAMPED: u64 = 512;

/// Three sectors of sevens.
fn file() -> Vec<u8> {
    vec![7; 1536]
}

/// A byte of them.
fn at(offset: u64) -> FileOffset {
    FileOffset(STAMPED + offset)
}

/// A log, and a file that has its stamp.
struct Bed {
    region: Shared,
    file: Vec<u8>,
    /// Processes so far.
    sessions: Cell<u8>,
}

impl Bed {
    fn new() -> Bed {
        let mut bed = Bed::unstamped();
        let mut log = bed.open();
        let stamp = log.new_stamp().unwrap();
        log.begin_stamp();
        bed.file = [stamped(stamp), file()].concat();
        log.end_stamp();
        bed
    }

    fn unstamped() -> Bed {
        let region = Shared::of_words((HEADER_LEN + CAPACITY) / WORD);
        Bed { region, file: file(), sessions: Cell::new(0) }
    }

    fn try_open(&self) -> Result<RedoLog, ImageError> {
        self.sessions.set(self.sessions.get() + 1);
        let stamps = crate::stamps_in(&mut self.file.as_slice()).unwrap();
        let owner = Owner { session: [self.sessions.get(); 16], stamps, ..OWNER };
        RedoLog::open(self.region.clone(), &owner, &mut self.file.as_slice())
    }

    /// The log as the next process finds it.
    fn open(&self) -> RedoLog {
        self.try_open().unwrap()
    }

    /// What the file holds behind the stamp when all that the log says has been written.
    fn patched(&self) -> Vec<u8> {
        let log = self.open();
        let mut file = self.file.as_slice();
        let mut patched = log.patched(&mut file);
        let mut bytes = vec![0; usize::try_from(patched.len() - STAMPED).unwrap()];
        patched.read_at(at(0), &mut bytes).unwrap();
        bytes
    }
}

/// The first sector of a VHD with this stamp.
fn stamped(stamp: Stamp) -> Vec<u8> {
    use crate::vhd::stamp_field;
    let mut sector = b"conectix".to_vec();
    sector.resize(512 - 42, 0);
    sector.extend_from_slice(&stamp_field(stamp));
    sector
}

fn changed(change: impl FnOnce(&mut Records)) -> Records {
    let mut changes = Records::default();
    changes.collect();
    change(&mut changes);
    changes
}

fn append(log: &mut RedoLog, change: impl FnOnce(&mut Records)) {
    log.append(&mut changed(change), false);
}

#[test]
fn every_kind_of_change_is_read_back() {
    let bed = Bed::new();
    let mut log = bed.open();
    let long: Vec<u8> = (0..21).collect();
    append(&mut log, |changes| {
        changes.bytes(0, at(3), &[1]);
        changes.bytes(0, at(8), &[1, 2, 3, 4, 5, 6, 7, 8]);
        changes.bytes(1, at(505), &long);
        changes.fill(1, at(1500), 100, 9);
    });
    let mut expected = file();
    expected.resize(2048, 0);
    expected[3] = 1;
    expected[8..16].copy_from_slice(&[1, 2, 3, 4, 5, 6, 7, 8]);
    expected[505..526].copy_from_slice(&long);
    expected[1500..1600].fill(9);
    assert_eq!(bed.patched(), expected);
}

#[test]
fn a_batch_has_what_it_and_those_before_it_have_changed() {
    let bed = Bed::new();
    let mut log = bed.open();
    append(&mut log, |changes| {
        changes.bytes(4, at(1), &[41]);
        changes.bytes(0, at(0), &[1]);
        changes.bytes(2, at(600), &[2]);
    });
    let next = bed.open();
    let batches = next.owed().unwrap().batches();
    let begin = |write: &MetaWrite| (write.at.0 - STAMPED, write.bytes[0], write.bytes[1]);
    let found: Vec<_> = batches.iter().map(|batch| batch.iter().map(begin).collect::<Vec<_>>()).collect();
    assert_eq!(found, [vec![(0, 1, 7)], vec![(512, 7, 7)], vec![(0, 1, 41)]]);
}

#[test]
fn what_is_not_published_is_not_read() {
    let bed = Bed::new();
    let mut log = bed.open();
    append(&mut log, |changes| changes.bytes(0, at(0), &[1]));
    bed.set_word(HEADER_LEN + 16, u64::MAX);
    assert_eq!(bed.patched()[..2], [1, 7]);
}

#[test]
fn a_log_with_records_is_void_for_a_file_without_its_stamp() {
    let other = Stamp { session: [1; 16], number: 2 };
    for first in [vec![0; 512], stamped(other)] {
        let mut bed = Bed::new();
        append(&mut bed.open(), |changes| changes.bytes(0, at(0), &[1]));
        bed.file = [first, file()].concat();
        let log = bed.open();
        assert!(log.was_void() && log.owed().is_none());
        assert!(bed.open().was_void(), "the next process knows it, too");
        bed.open().forget_void();
        assert!(!bed.open().was_void());
    }
}

#[test]
fn a_log_without_records_belongs_to_the_file_with_its_identity() {
    let bed = Bed::unstamped();
    bed.open().sync_failed();
    assert!(bed.open().has_failed());
    let other = Owner { identity: [8; IDENTITY_LEN], ..OWNER };
    let log = RedoLog::open(bed.region.clone(), &other, &mut bed.file.as_slice()).unwrap();
    assert!(!log.was_void() && !log.has_failed(), "that of another file says nothing about this one");
}

#[test]
fn an_empty_log_is_void_for_another_state_of_its_file() {
    let mut bed = Bed::new();
    let mut log = bed.open();
    append(&mut log, |changes| changes.bytes(0, at(0), &[1]));
    log.seal();
    log.settle(true, true);
    assert!(log.is_clean() && !bed.open().was_void());
    bed.file = [stamped(Stamp { session: [1; 16], number: 2 }), file()].concat();
    let log = bed.open();
    assert!(log.is_clean() && log.was_void(), "the process was killed, and the file restored");
    let prefix = bed.region.read(0).unwrap();
    assert!(was_void(&prefix) && !is_left(prefix.first_chunk().unwrap()));
}

#[test]
fn a_failed_sync_is_remembered_when_the_stamp_is_lost() {
    let mut bed = Bed::new();
    let mut log = bed.open();
    append(&mut log, |changes| changes.bytes(0, at(0), &[1]));
    log.sync_failed();
    bed.file = [vec![0; 512], file()].concat();
    let prefix = bed.region.read(0).unwrap();
    assert!(!is_void(&prefix, &OWNER));
    assert!(is_void(&prefix, &Owner { identity: [8; IDENTITY_LEN], ..OWNER }));
    let next = bed.open();
    assert!(next.has_failed() && !next.was_void());
}

#[test]
fn while_a_stamp_is_written_the_log_is_of_the_file_with_either() {
    let mut bed = Bed::new();
    let mut log = bed.open();
    append(&mut log, |changes| changes.bytes(0, at(0), &[1]));
    let (before, stamp) = (bed.file.clone(), log.new_stamp().unwrap());
    log.begin_stamp();
    let region: [u8; HEADER_LEN + CAPACITY] = bed.region.read(0).unwrap();
    for first in [before[..512].to_vec(), stamped(stamp)] {
        bed.region.write(0, region);
        bed.file = [first, file()].concat();
        assert_eq!(bed.patched()[..2], [1, 7]);
    }
    bed.region.write(0, region);
    log.end_stamp();
    assert_eq!(bed.patched()[..2], [1, 7]);
    bed.file = before;
    assert_eq!(bed.patched()[..2], [7, 7], "a copy of before was put back");
}

#[test]
fn stamps_whose_writes_fail_are_begun_until_no_more_can_be_told_apart() {
    let bed = Bed::new();
    let mut log = bed.open();
    append(&mut log, |changes| changes.bytes(0, at(0), &[1]));
    for _ in 0..2 {
        assert!(log.new_stamp().is_some());
        log.begin_stamp();
    }
    assert_eq!(log.new_stamp(), None);
    assert_eq!(bed.patched()[..2], [1, 7], "the file has the first");
    log.leave_gap();
    log.seal();
    log.settle(true, true);
    assert!(log.new_stamp().is_some(), "there is nothing left to be read");
}

#[test]
fn a_settled_round_drops_what_was_sealed_and_no_more() {
    let bed = Bed::new();
    let mut log = bed.open();
    append(&mut log, |changes| changes.bytes(0, at(0), &[1]));
    log.seal();
    append(&mut log, |changes| changes.bytes(0, at(1), &[2]));
    log.settle(false, false);
    assert_eq!(bed.patched()[..2], [1, 2], "a round that has failed drops nothing");
    log.seal();
    append(&mut log, |changes| changes.bytes(0, at(2), &[3]));
    log.settle(true, false);
    assert_eq!(bed.patched()[..3], [7, 7, 3]);
}

#[test]
fn a_log_that_wraps_around_reads_back() {
    let bed = Bed::new();
    let mut log = bed.open();
    for number in 0..200u8 {
        append(&mut log, |changes| changes.bytes(0, at(9), &[number; 17]));
        assert!(!log.has_gap());
        assert_eq!(bed.patched()[9..26], [number; 17]);
        log.seal();
        log.settle(true, true);
        assert!(log.is_clean());
    }
}

#[test]
fn behind_a_gap_nothing_counts_before_the_round_that_ends_it() {
    for leave_gap in [
        |log: &mut RedoLog| append(log, |changes| changes.leave_out()),
        |log: &mut RedoLog| append(log, |changes| changes.bytes(0, at(100), &[9; CAPACITY])),
        |log: &mut RedoLog| log.append(&mut changed(|changes| changes.bytes(0, at(100), &[9])), true),
    ] {
        let bed = Bed::new();
        let mut log = bed.open();
        append(&mut log, |changes| changes.bytes(0, at(0), &[1]));
        leave_gap(&mut log);
        append(&mut log, |changes| changes.bytes(0, at(1), &[2]));
        assert!(log.has_gap());
        assert_eq!(bed.patched()[..2], [1, 7]);
        log.seal();
        append(&mut log, |changes| changes.bytes(0, at(2), &[3]));
        assert_eq!(bed.patched()[..3], [1, 7, 7]);
    }
}

#[test]
fn a_gap_ends_with_its_round_or_goes_on() {
    for durable in [true, false] {
        let bed = Bed::new();
        let mut log = bed.open();
        append(&mut log, |changes| changes.leave_out());
        log.seal();
        append(&mut log, |changes| changes.bytes(0, at(2), &[3]));
        assert!(log.has_gap());
        log.settle(durable, false);
        assert_eq!(log.has_gap(), !durable);
        append(&mut log, |changes| changes.bytes(0, at(3), &[4]));
        assert_eq!(bed.patched()[2..4], if durable { [3, 4] } else { [7, 7] });
    }
}

#[test]
fn who_dies_behind_a_gap_leaves_nothing_that_a_third_would_stumble_over() {
    let bed = Bed::new();
    let mut log = bed.open();
    append(&mut log, |changes| changes.bytes(0, at(0), &[1]));
    append(&mut log, |changes| changes.leave_out());
    log.seal();
    append(&mut log, |changes| changes.bytes(0, at(2), &[3]));
    let mut next = bed.open();
    next.seal();
    next.settle(true, false);
    append(&mut next, |changes| changes.bytes(0, at(4), &[5]));
    assert_eq!(bed.patched()[..5], [7, 7, 7, 7, 5]);
}

#[test]
fn syncs_that_are_owed_and_one_that_has_failed_are_known_to_the_next() {
    let bed = Bed::new();
    let mut log = bed.open();
    assert!(log.is_clean());
    log.touched();
    assert!(bed.open().is_unsynced() && !bed.open().is_clean());
    log.seal();
    log.settle(true, false);
    assert!(bed.open().is_unsynced(), "something was written since");
    log.settle(true, true);
    assert!(bed.open().is_clean());
    log.sync_failed();
    assert!(bed.open().has_failed() && !bed.open().is_clean());
}

#[test]
fn what_is_owed_to_a_failed_sync_is_read_until_that_is_accepted_and_forgotten_then() {
    let bed = Bed::new();
    let mut log = bed.open();
    append(&mut log, |changes| changes.bytes(0, at(0), &[1]));
    log.sync_failed();
    assert!(bed.open().has_failed());
    assert_eq!(bed.patched()[..2], [1, 7]);
    bed.open().accept_failure();
    assert!(!bed.open().has_failed() && bed.open().owed().is_none());
    assert_eq!(bed.patched()[..2], [7, 7]);
}

#[test]
fn a_log_that_makes_no_sense_is_an_error_and_never_a_panic() {
    let damaged = |word: usize, value: u64| {
        let bed = Bed::new();
        append(&mut bed.open(), |changes| changes.bytes(0, at(0), &[1; 20]));
        bed.set_word(word, value);
        bed.try_open().map(|_| ()).map_err(|error| error.kind)
    };
    let corrupt = Err(ImageErrorKind::Corrupt);
    assert_eq!(damaged(HEAD_AT, 1 << 40), corrupt);
    assert_eq!(damaged(HEAD_AT, 12), corrupt);
    assert_eq!(damaged(HEAD_AT, 8), corrupt, "a record without its value");
    assert_eq!(damaged(TAIL_AT, 64), corrupt, "a tail behind the head");
    assert_eq!(damaged(HEADER_LEN, 0), corrupt, "no kind");
    assert_eq!(damaged(HEADER_LEN, 9 << 4), corrupt, "a fill of nothing");
    assert_eq!(damaged(HEADER_LEN + 8, u64::MAX), corrupt, "more bytes than there are");
    assert_eq!(damaged(VERSION_AT, 3), Err(ImageErrorKind::Unsupported));
    assert_eq!(damaged(MAGIC_AT, 0), Ok(()));
}

#[test]
fn a_log_whose_head_cannot_be_counted_up_is_refused() {
    let bed = Bed::new();
    let last = u64::MAX - 7;
    bed.set_word(HEAD_AT, last);
    bed.set_word(TAIL_AT, last);
    assert_eq!(bed.try_open().map(|_| ()).map_err(|error| error.kind), Err(ImageErrorKind::Corrupt));
}

/// Logs of later versions, as a program of before finds them: what is not known of them is where anything else lies.
#[test]
fn a_log_of_another_version_is_refused_counts_as_left_and_is_not_touched() {
    let changes: [&[(usize, u64)]; 4] = [
        &[(VERSION_AT, 3)],
        &[(VERSION_AT, 3), (TAIL_AT, 0), (HEAD_AT, 0)],
        &[(VERSION_AT, 3), (IDENTITY_AT, 0)],
        // The same version with more room: its records begin again elsewhere.
        &[(CAPACITY_AT, 512)],
    ];
    for words in changes {
        let bed = Bed::new();
        append(&mut bed.open(), |changes| changes.bytes(0, at(0), &[1; 20]));
        words.iter().for_each(|&(at, value)| bed.set_word(at, value));
        let before: [u8; HEADER_LEN + CAPACITY] = bed.region.read(0).unwrap();
        let refused = bed.try_open().unwrap_err();
        assert_eq!(refused.kind, ImageErrorKind::Unsupported);
        assert!(refused.to_string().contains("this program "), "{refused}");
        assert!(is_left(before.first_chunk().unwrap()));
        assert_eq!(bed.region.read(0), Some(before));
    }
}

impl Bed {
    fn set_word(&self, at: usize, value: u64) {
        self.region.publish_u64_native(at, value).unwrap();
    }
}
