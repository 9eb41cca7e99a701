//! Maps of changed blocks: which requests wait for them, and what stands in their files.

use super::*;
use crate::changes::{self, BLOCK, ChangeMap, Spec};

const MAP: FileId = FileId(1);
const LEN: u64 = 64 * MIB;
/// Bytes of a region.
const REGION: u64 = 4 * MIB;
const ANY: Operation = Operation::Write { durable: false };

fn spec() -> Spec {
    Spec { id: [7; 16], continues: None, len: LEN, block: BLOCK }
}

fn new_file(spec: &Spec) -> Vec<u8> {
    let creation = changes::create(spec).unwrap();
    let mut bytes = Vec::new();
    apply(&mut bytes, &creation.writes);
    bytes
}

fn open_map(bytes: &[u8]) -> Result<ChangeMap, ImageError> {
    ChangeMap::open(&mut { bytes })
}

/// A raw disk with a new map, and at most two intents.
fn tracked() -> Rig<Raw> {
    let files = MemoryIo::new(vec![vec![0; LEN as usize], new_file(&spec())]);
    let options = Options { intents: 2, ..Options::default() };
    let disk = Disk::new(vec![Raw::new(LEN, 512, false).unwrap()], options).unwrap();
    let mut rig = Rig { disk, files, answered: VecDeque::new() };
    assert_eq!(rig.flush(), Status::Done);
    let map = open_map(&rig.files.bytes[1]).unwrap();
    rig.disk.begin_tracking(MAP, map).unwrap();
    rig.files.log.clear();
    rig
}

impl Rig<Raw> {
    fn in_file(&self) -> ChangeMap {
        open_map(&self.files.bytes[1]).unwrap()
    }

    /// Blocks, by offset, that the file of the map names.
    fn named(&self) -> Vec<(u64, u64)> {
        self.in_file().extents().map(|span| (span.at.0, span.len)).collect()
    }

    fn begin_write(&mut self, at: u64) {
        self.submit(ANY, at, 512, Segments::copy_of(&[1; 512]), at);
    }

    /// The files of the operations in flight, and whether each is a sync.
    fn under_way(&self) -> Vec<(u8, bool)> {
        self.files.queue.iter().map(|op| (op.file.0, matches!(op.action, Action::SyncData))).collect()
    }

    fn close(&mut self) {
        self.disk.quiesce();
        self.disk.stop_tracking(&mut self.files).unwrap();
        self.drain();
        assert_eq!((self.disk.tracked(), self.disk.is_map_settled()), (None, true));
    }
}

#[test]
fn a_write_begins_when_its_intent_is_durable_and_what_gathers_meanwhile_shares_the_next() {
    let mut rig = tracked();
    rig.begin_write(0);
    rig.begin_write(512);
    rig.begin_write(REGION);
    assert_eq!(rig.under_way(), [(1, false)], "the intent of the first");
    rig.step();
    assert_eq!(rig.under_way(), [(1, true)]);
    rig.step();
    assert_eq!(rig.under_way(), [(1, false), (0, false), (0, false)], "the intent of the third, and two writes");
    rig.begin_write(1024);
    assert_eq!(rig.under_way().len(), 4, "its region has an intent");
    rig.drain();
    assert_eq!((rig.answered.len(), rig.in_file().suspects()), (4, 2));
}

#[test]
fn reads_and_flushes_wait_for_no_map() {
    let mut rig = tracked();
    rig.begin_write(0);
    rig.submit(Operation::Read, MIB, 512, Segments::zeroed(512), 1);
    assert_eq!(rig.under_way(), [(1, false), (0, false)]);
    rig.submit(Operation::Flush, 0, 0, Segments::empty(), 2);
    rig.files.take(|op| op.file == MAP);
    rig.step();
    assert_eq!(rig.answered.iter().map(|(token, ..)| token.0).collect::<Vec<_>>(), [2, 1]);
    assert_eq!(rig.disk.in_flight(), 1);
    std::mem::forget(rig);
}

#[test]
fn the_oldest_intents_are_given_up_for_bits() {
    let mut rig = tracked();
    for region in 0..8 {
        assert_eq!(rig.write(region * REGION + 65536, &[1; 512]), Status::Done);
        assert!(rig.in_file().suspects() <= 2, "{}", rig.in_file().suspects());
        for earlier in 0..=region {
            assert!(rig.in_file().has_changed(DiskOffset(earlier * REGION + 65536)));
        }
    }
    assert_eq!(rig.write(65536, &[2; 512]), Status::Done, "the first again");
    rig.close();
    let exact: Vec<_> = (0..8).map(|region| (region * REGION + 65536, 65536)).collect();
    assert_eq!((rig.named(), rig.in_file().suspects()), (exact, 0));
}

#[test]
fn what_is_in_flight_is_named_when_its_region_gives_up_its_intent() {
    let mut rig = tracked();
    rig.begin_write(0);
    rig.step();
    rig.step();
    let slow = rig.files.take(|op| op.file == FileId(0));
    for region in 1..4 {
        assert_eq!(rig.ask_meanwhile(ANY, region * REGION, &[1; 512]), Status::Done);
    }
    let map = rig.in_file();
    assert!(map.has_changed(DiskOffset(0)) && !map.has_changed(DiskOffset(65536)), "by a bit, without an intent");
    rig.end(slow);
    rig.drain();
}

#[test]
fn a_request_longer_than_all_intents_needs_them_at_its_ends_only() {
    let mut rig = tracked();
    let zeroes = Operation::WriteZeroes { free: false, durable: false };
    let (at, len) = (REGION - 65536, 10 * REGION);
    assert_eq!(rig.ask(zeroes, at, len, Segments::empty()), Status::Done);
    assert_eq!(rig.in_file().suspects(), 2);
    rig.files.log.clear();
    assert_eq!(rig.write(5 * REGION, &[1; 512]), Status::Done);
    assert!(rig.files.log.iter().all(|op| op.0 == 0), "the region is named throughout: {:?}", rig.files.log);
    rig.close();
    assert_eq!(rig.named(), [(at, len)]);
}

#[test]
fn a_disk_that_goes_on_after_a_crash_names_what_had_an_intent() {
    let mut rig = tracked();
    assert_eq!(rig.write(0, &[1; 512]), Status::Done);
    let bytes = rig.files.bytes[1].clone();
    let mut next = tracked();
    next.disk.abandon_map(&mut next.files).unwrap();
    next.files.bytes[1] = bytes;
    next.disk.track(MAP, next.in_file()).unwrap();
    assert_eq!(next.write(2 * REGION, &[1; 512]), Status::Done);
    assert_eq!(next.in_file().suspects(), 1, "the first is written as changed throughout");
    next.close();
    assert_eq!(next.named(), [(0, REGION), (2 * REGION, 65536)]);
}

#[test]
fn a_map_that_cannot_be_written_says_so_before_the_guest_goes_on() {
    for fails_at_sync in [false, true] {
        let mut rig = tracked();
        rig.begin_write(0);
        if fails_at_sync {
            rig.step();
        }
        let op = rig.files.take(|op| op.file == MAP);
        rig.disk.settle(FileDone { op, result: Err(FileError::Failed(5)) }, &mut rig.files);
        assert_eq!(rig.under_way(), [(1, false), (1, false)], "both headers");
        rig.step();
        assert_eq!(rig.under_way(), [(1, true)]);
        rig.drain();
        assert_eq!(rig.answered.pop_back().map(|(_, status, _)| status), Some(Status::Done));
        assert_eq!((rig.disk.tracked(), rig.disk.map_state()), (None, Some(MapState::Invalid)));
        assert!(open_map(&rig.files.bytes[1]).unwrap_err().what.contains("misses changes"));
    }
}

#[test]
fn a_guest_waits_while_a_map_may_be_believed_that_misses_changes() {
    let mut rig = tracked();
    assert_eq!(rig.write(0, &[1; 512]), Status::Done);
    rig.files.fault = Box::new(|op| (op.file == MAP).then_some(FileError::NoSpace));
    rig.begin_write(REGION);
    (0..4).for_each(|_| rig.step());
    assert_eq!((rig.disk.map_state(), rig.disk.in_flight()), (Some(MapState::Doubtful), 1));
    assert_eq!(rig.ask_meanwhile(ANY, 512, &[1; 512]), Status::Done, "its region has an intent");
    rig.disk.abandon_map(&mut rig.files).unwrap();
    rig.drain();
    assert_eq!((rig.disk.in_flight(), rig.disk.map_state()), (0, Some(MapState::Invalid)));
    assert_eq!(rig.write(2 * REGION, &[1; 512]), Status::Done);
}

#[test]
fn a_disk_grows_only_as_far_as_its_map() {
    let mut rig = tracked();
    assert_eq!(rig.write(LEN - 512, &[1; 512]), Status::Done);
    rig.disk.quiesce();
    assert!(rig.disk.check_map_reaches(LEN + MIB).is_err());
    rig.disk.extend_map(LEN + 300 * MIB, &mut rig.files).unwrap();
    assert!(rig.disk.check_map_reaches(LEN + MIB).is_err(), "it is not durable yet");
    rig.drain();
    assert!(rig.disk.is_map_settled() && rig.disk.check_map_reaches(LEN + 300 * MIB).is_ok());
    assert_eq!(rig.in_file().len(), LEN + 300 * MIB);
    assert!(!rig.in_file().has_changed(DiskOffset(LEN)), "the region that had an intent ended with the disk");
    rig.close();
    assert_eq!(rig.named(), [(LEN - 65536, 65536)]);
}

#[test]
fn an_interval_ends_in_one_file_and_goes_on_in_another() {
    let mut rig = tracked();
    assert_eq!(rig.write(0, &[1; 512]), Status::Done);
    let next = Spec { id: [8; 16], continues: Some([7; 16]), ..spec() };
    rig.files.bytes.push(new_file(&next));
    let map = |rig: &Rig<Raw>| open_map(&rig.files.bytes[2]).unwrap();
    assert!(rig.disk.switch_map(FileId(2), map(&rig)).is_err(), "requests are not held");
    rig.disk.quiesce();
    rig.begin_write(REGION);
    rig.disk.switch_map(FileId(2), map(&rig)).unwrap();
    assert!(rig.under_way().is_empty(), "nothing keeps the snapshot waiting");
    rig.disk.resume(&mut rig.files);
    rig.drain();
    assert!(rig.in_file().is_sealed() && rig.disk.is_map_settled());
    assert_eq!(rig.named(), [(0, 65536)]);
    assert_eq!(map(&rig).extents().map(|span| span.at.0).collect::<Vec<_>>(), [REGION]);
    let sealed = rig.in_file();
    assert!(rig.disk.track(MAP, sealed).is_err());
}

#[test]
fn maps_of_other_disks_and_files_in_use_are_refused() {
    let mut rig = tracked();
    assert!(rig.disk.pop_to(0).is_err());
    let map = rig.in_file();
    assert!(rig.disk.track(FileId(2), map.clone()).unwrap_err().what.contains("already"));
    rig.disk.abandon_map(&mut rig.files).unwrap();
    assert!(rig.disk.track(FileId(0), map).unwrap_err().what.contains("in use"));
    let small = open_map(&new_file(&Spec { len: LEN / 2, ..spec() })).unwrap();
    assert_eq!(rig.disk.track(MAP, small).unwrap_err().kind, ImageErrorKind::Mismatch);
}
