//! The disk over files in memory whose operations complete in any order.

#![allow(clippy::cast_possible_truncation, reason = "sizes of tests fit")]

mod cache_trim;
mod chain;
pub(super) mod clusters;
mod coarse;
mod copying;
mod fast_path;
mod growing;
mod interleaving;
mod map_load;
mod merging;
mod merging_qcow2;
mod merging_vhd;
mod model;
mod no_space;
mod random;
mod throttling;
mod tracking;
mod unaligned;
mod waiting;

use std::collections::VecDeque;

use memory::Segments;

use super::*;
use crate::format::{Access, Mapping, Tail, Wait};
use crate::memory_io::MemoryIo;
use crate::qcow2::{self, Qcow2};
use crate::vhd::{self, Kind, Parent, Spec, Vhd};
use crate::{
    DiskOffset, Extent, ExtentKind, FileError, FileOffset, FileOp, Image, Link, MetaBlock, MetaWrite, Token, Until,
    raw::Raw,
};

const MIB: u64 = 1 << 20;

struct Rig<F: Format = Image> {
    disk: Disk<F>,
    files: MemoryIo,
    answered: VecDeque<(Token, Status, Vec<Extent>)>,
}

impl<F: Format> Rig<F> {
    fn new(layers: Vec<F>, bytes: Vec<Vec<u8>>, seed: u64) -> Rig<F> {
        Rig {
            disk: Disk::new(layers, Options::default()).unwrap(),
            files: MemoryIo::random(bytes, seed),
            answered: VecDeque::new(),
        }
    }

    fn request(&self, operation: Operation, at: u64, len: u64, memory: Segments, token: u64) -> Request {
        Request::new(operation, Span { at: DiskOffset(at), len }, memory, Token(token), &self.disk.geometry()).unwrap()
    }

    fn submit(&mut self, operation: Operation, at: u64, len: u64, memory: Segments, token: u64) {
        let request = self.request(operation, at, len, memory, token);
        self.disk.submit(request, &mut self.files);
        self.collect();
    }

    fn collect(&mut self) {
        while let Some((mut request, status)) = self.disk.answer() {
            let extents = request.take_extents();
            self.answered.push_back((request.retire(), status, extents));
        }
    }

    /// One completion.
    fn step(&mut self) {
        let mut done = Vec::new();
        self.files.reap(Until::Now, &mut done).unwrap();
        for done in done {
            self.disk.settle(done, &mut self.files);
        }
        self.disk.retry(&mut self.files);
        self.collect();
    }

    fn drain(&mut self) {
        while !self.disk.is_idle() {
            self.step();
        }
    }

    /// Completes the first operation that `which` picks.
    fn complete(&mut self, which: impl Fn(&Action) -> bool) {
        let op = self.files.take(|op| which(&op.action));
        self.end(op);
        self.collect();
    }

    /// Completes an operation that was taken out of the engine.
    fn end(&mut self, op: FileOp) {
        let done = self.files.perform(op);
        self.disk.settle(done, &mut self.files);
    }

    /// Submits a write or a flush and waits for it alone.
    fn ask_meanwhile(&mut self, operation: Operation, at: u64, bytes: &[u8]) -> Status {
        self.submit(operation, at, bytes.len() as u64, Segments::copy_of(bytes), u64::MAX);
        while self.answered.back().is_none_or(|(token, ..)| token.0 != u64::MAX) {
            self.step();
        }
        self.answered.pop_back().unwrap().1
    }

    /// Submits and waits.
    fn ask(&mut self, operation: Operation, at: u64, len: u64, memory: Segments) -> Status {
        self.submit(operation, at, len, memory, u64::MAX);
        self.drain();
        self.answered.pop_back().unwrap().1
    }

    fn write(&mut self, at: u64, bytes: &[u8]) -> Status {
        self.ask(Operation::Write { durable: false }, at, bytes.len() as u64, Segments::copy_of(bytes))
    }

    fn read(&mut self, at: u64, len: u64) -> Vec<u8> {
        let memory = Segments::copy_of(&vec![0xee; len as usize]);
        assert_eq!(self.ask(Operation::Read, at, len, memory.clone()), Status::Done);
        memory.to_vec()
    }

    fn flush(&mut self) -> Status {
        self.ask(Operation::Flush, 0, 0, Segments::empty())
    }
}

fn uuid(n: u8) -> [u8; 16] {
    [n; 16]
}

fn new_vhd(len: u64, kind: Kind, block_size: u32, id: u8) -> Vec<u8> {
    let creation = vhd::create(&Spec { len, kind, block_size, uuid: uuid(id), created: 1_700_000_000 }).unwrap();
    let mut bytes = vec![0; creation.len as usize];
    apply(&mut bytes, &creation.writes);
    bytes
}

fn apply(bytes: &mut Vec<u8>, writes: &[MetaWrite]) {
    for write in writes {
        let end = write.at.0 as usize + write.bytes.len();
        bytes.resize(bytes.len().max(end), 0);
        bytes[write.at.0 as usize..end].copy_from_slice(&write.bytes);
    }
}

fn open(bytes: &[u8], access: Access) -> Image {
    Image::Vhd(Box::new(Vhd::open(&mut { bytes }, access, Tail::Zeroes).unwrap()))
}

/// An empty qcow2 child of a raw image.
fn qcow2_on_raw(len: u64) -> (Image, Vec<u8>) {
    let (relative, absolute) = ("base".into(), "/base".into());
    let link = Link { format: None, uuid: uuid(0), relative, absolute, len: None, modified: None };
    let spec =
        qcow2::Spec { len, cluster_size: 64 << 10, uuid: uuid(1), parent: Some(link), compression: Default::default() };
    let creation = qcow2::create(&spec).unwrap();
    let mut bytes = vec![0; creation.len as usize];
    apply(&mut bytes, &creation.writes);
    let opened = Qcow2::open(&mut bytes.as_slice(), Access::ReadWrite, Tail::Zeroes).unwrap();
    (Image::Qcow2(Box::new(opened)), bytes)
}

fn child_of(id: u8) -> Kind {
    Kind::Differencing(Parent {
        uuid: uuid(id),
        modified: 0,
        relative: "base.vhd".into(),
        absolute: "/base.vhd".into(),
    })
}

fn dynamic(len: u64) -> Rig {
    let bytes = new_vhd(len, Kind::Dynamic, 2 << 20, 1);
    Rig::new(vec![open(&bytes, Access::ReadWrite)], vec![bytes], 1)
}

/// A child on a base that holds `fill` in its first `filled` bytes.
fn child(len: u64, filled: u64, fill: u8) -> Rig {
    let mut base = dynamic(len);
    assert_eq!(base.write(0, &vec![fill; filled as usize]), Status::Done);
    assert_eq!(base.flush(), Status::Done);
    let base = base.files.bytes.remove(0);
    let leaf = new_vhd(len, child_of(1), 2 << 20, 2);
    Rig::new(vec![open(&leaf, Access::ReadWrite), open(&base, Access::ReadOnly)], vec![leaf, base], 1)
}

#[test]
fn what_was_written_and_flushed_is_there_after_reopening() {
    let mut rig = dynamic(64 * MIB);
    let bytes: Vec<u8> = (0..3 * MIB).map(|i| (i / 512 % 251) as u8).collect();
    assert_eq!(rig.write(MIB, &bytes), Status::Done);
    assert_eq!(rig.flush(), Status::Done);
    let file = rig.files.bytes.remove(0);
    assert_eq!(vhd::check(&mut file.as_slice(), Tail::Zeroes).unwrap().problems, []);
    let mut again = Rig::new(vec![open(&file, Access::ReadOnly)], vec![file], 2);
    assert_eq!(again.read(MIB, 3 * MIB), bytes);
    assert_eq!(again.read(0, MIB), vec![0; MIB as usize]);
    assert_eq!(again.read(4 * MIB, 2 * MIB), vec![0; 2 * MIB as usize]);
}

#[test]
fn a_partial_write_to_a_differencing_image_does_not_read_the_parent() {
    let mut rig = child(64 * MIB, 4 * MIB, 7);
    rig.files.log.clear();
    assert_eq!(rig.write(MIB + 512, &[9; 512]), Status::Done);
    assert!(rig.files.log.iter().all(|&(file, write, ..)| file == 0 && write), "{:?}", rig.files.log);
    let found = rig.read(MIB, 2048);
    assert_eq!(found[..512], [7; 512]);
    assert_eq!(found[512..1024], [9; 512]);
    assert_eq!(found[1024..], [7; 1024]);
}

#[test]
fn many_blocks_are_allocated_at_once() {
    let mut rig = dynamic(64 * MIB);
    for block in 0..16 {
        rig.submit(
            Operation::Write { durable: false },
            block * 2 * MIB,
            512,
            Segments::copy_of(&[block as u8 + 1; 512]),
            block,
        );
    }
    let places: std::collections::HashSet<FileOffset> = rig
        .files
        .queue
        .iter()
        .map(|op| match op.action {
            Action::Write { at, .. } => at,
            _ => panic!("not a write"),
        })
        .collect();
    assert_eq!(places.len(), 16);
    rig.drain();
    for block in 0..16 {
        assert_eq!(rig.read(block * 2 * MIB, 512), [block as u8 + 1; 512]);
    }
}

#[test]
fn allocation_writes_no_more_than_the_guest_did() {
    let mut rig = dynamic(64 * MIB);
    rig.write(MIB, &[1; 4096]);
    let written: u64 = rig.files.log.iter().filter(|op| op.1).map(|op| op.3).sum();
    assert_eq!(written, 4096);
}

#[test]
fn a_discarded_block_is_used_again_only_after_a_flush() {
    let mut rig = dynamic(64 * MIB);
    rig.write(0, &[1; 4096]);
    rig.flush();
    let len = rig.files.bytes[0].len();
    assert_eq!(rig.ask(Operation::Discard, 0, 2 * MIB, Segments::empty()), Status::Done);
    assert_eq!(rig.read(0, 4096), [0; 4096]);
    rig.write(4 * MIB, &vec![2; 2 * MIB as usize]);
    assert!(rig.files.bytes[0].len() > len + MIB as usize, "the discarded block was used again before the flush");
    rig.flush();
    let len = rig.files.bytes[0].len();
    rig.write(8 * MIB, &vec![3; 2 * MIB as usize]);
    rig.flush();
    assert_eq!(rig.files.bytes[0].len(), len);
    assert_eq!(rig.read(8 * MIB, 512), [3; 512]);
}

#[test]
fn zeroes_and_discards_in_a_differencing_image_hide_the_parent() {
    let mut rig = child(64 * MIB, 8 * MIB, 7);
    rig.write(0, &[9; 4096]);
    assert_eq!(rig.ask(Operation::Discard, 0, 4096, Segments::empty()), Status::Done);
    assert_eq!(rig.read(0, 4096), [0; 4096]);
    assert_eq!(
        rig.ask(Operation::WriteZeroes { free: true, durable: false }, 2 * MIB, 4 * MIB, Segments::empty()),
        Status::Done
    );
    assert_eq!(rig.read(2 * MIB, 4 * MIB), vec![0; 4 * MIB as usize]);
    assert_eq!(rig.read(6 * MIB, 512), [7; 512]);
    rig.flush();
    let (leaf, base) = (rig.files.bytes.remove(0), rig.files.bytes.remove(0));
    let layers = vec![open(&leaf, Access::ReadOnly), open(&base, Access::ReadOnly)];
    let mut again = Rig::new(layers, vec![leaf, base], 3);
    assert_eq!(again.read(0, 4096), [0; 4096]);
    assert_eq!(again.read(2 * MIB, 4 * MIB), vec![0; 4 * MIB as usize]);
    assert_eq!(again.read(4096, 512), [7; 512]);
}

#[test]
fn storage_without_deallocation_still_writes_zeroes() {
    let mut rig = child(64 * MIB, 8 * MIB, 7);
    rig.files.can_deallocate = false;
    rig.write(0, &[9; 8192]);
    for free in [true, false] {
        assert_eq!(
            rig.ask(Operation::WriteZeroes { free, durable: true }, 512, 3 * MIB, Segments::empty()),
            Status::Done
        );
        assert_eq!(rig.read(512, 3 * MIB), vec![0; 3 * MIB as usize]);
        rig.write(0, &[9; 8192]);
    }
}

#[test]
fn a_failed_sync_is_sticky() {
    let mut rig = dynamic(64 * MIB);
    rig.write(0, &[1; 512]);
    rig.files.fail_sync = true;
    assert_eq!(rig.flush(), Status::Failed);
    rig.files.fail_sync = false;
    assert_eq!(rig.flush(), Status::Refused);
    assert_eq!(rig.write(0, &[2; 512]), Status::Refused);
    assert_eq!(rig.read(0, 512), [1; 512]);
    assert!(rig.disk.is_broken());
}

#[test]
fn a_write_that_waited_while_a_sync_failed_is_refused() {
    let mut rig = dynamic(64 * MIB);
    rig.write(0, &vec![1; 2 * MIB as usize]);
    rig.submit(Operation::Discard, 4096, 8192, Segments::empty(), 1);
    rig.submit(Operation::Write { durable: false }, 4096, 512, Segments::copy_of(&[2; 512]), 2);
    rig.submit(Operation::Flush, 0, 0, Segments::empty(), 3);
    rig.files.fail_sync = true;
    rig.complete(|action| matches!(action, Action::SyncData));
    rig.files.log.clear();
    rig.drain();
    let statuses: Vec<_> = rig.answered.iter().map(|(token, status, _)| (token.0, *status)).collect();
    assert_eq!(statuses, [(3, Status::Failed), (1, Status::Done), (2, Status::Refused)]);
    assert_eq!(rig.files.log, []);
}

/// An image of 64 MiB with two places at its end that nothing refers to, as a crash leaves them: behind its metadata
/// and the 4 MiB of room for more.
fn with_leaked_space() -> Rig {
    let mut file = new_vhd(64 * MIB, Kind::Dynamic, 2 << 20, 1);
    let footer = file.split_off(file.len() - 512);
    file.resize(file.len() + 9 * MIB as usize, 0xdd);
    file.extend(footer);
    Rig::new(vec![open(&file, Access::ReadWrite)], vec![file], 1)
}

#[test]
fn no_flush_succeeds_beside_a_sync_that_failed() {
    let mut rig = with_leaked_space();
    rig.submit(Operation::Write { durable: false }, 0, 512, Segments::copy_of(&[1; 512]), 1);
    rig.complete(|action| matches!(action, Action::Write { .. }));
    rig.submit(Operation::Flush, 0, 0, Segments::empty(), 2);
    rig.files.fail_sync = true;
    rig.complete(|action| matches!(action, Action::SyncData));
    rig.files.fail_sync = false;
    rig.drain();
    assert_eq!(rig.answered.pop_back().unwrap(), (Token(2), Status::Failed, Vec::new()));
    assert!(rig.disk.is_broken());
}

#[test]
fn rounds_go_on_by_themselves_after_one_has_failed() {
    let mut rig = dynamic(64 * MIB);
    rig.disk.options.dirty_max = 4;
    let metadata = |op: &FileOp| matches!(&op.action, Action::Write { from, .. } if from.len() == 512);
    rig.files.fault = Box::new(move |op| metadata(op).then_some(FileError::NoSpace));
    (0..8).for_each(|block| assert_eq!(rig.write(block * 2 * MIB, &[1; 4096]), Status::Done));
    assert!(rig.disk.layers()[0].format.dirty() > 4, "the round has failed");
    rig.files.fault = Box::new(|_| None);
    (8..16).for_each(|block| assert_eq!(rig.write(block * 2 * MIB, &[1; 4096]), Status::Done));
    assert!(rig.disk.layers()[0].format.dirty() <= 8, "{} changed blocks", rig.disk.layers()[0].format.dirty());
}

#[test]
fn a_read_only_disk_writes_nothing_not_even_a_repair() {
    let mut file = new_vhd(64 * MIB, Kind::Dynamic, 2 << 20, 1);
    file.truncate(file.len() - 512);
    let mut rig = Rig::new(vec![open(&file, Access::ReadOnly)], vec![file], 1);
    assert_eq!(rig.flush(), Status::Done);
    assert_eq!(rig.files.log, []);
}

#[test]
fn a_flush_without_anything_to_make_durable_does_nothing() {
    let mut rig = dynamic(64 * MIB);
    assert_eq!(rig.flush(), Status::Done);
    rig.files.log.clear();
    assert_eq!(rig.flush(), Status::Done);
    assert_eq!(rig.files.log, []);
}

#[test]
fn a_write_waits_for_the_discard_before_it() {
    let mut rig = dynamic(64 * MIB);
    rig.write(0, &vec![1; 2 * MIB as usize]);
    rig.submit(Operation::Discard, 4096, 8192, Segments::empty(), 1);
    rig.submit(Operation::Write { durable: false }, 4096, 512, Segments::copy_of(&[2; 512]), 2);
    rig.submit(Operation::Read, 0, 512, Segments::zeroed(512), 3);
    assert_eq!(rig.files.queue.len(), 2, "the read goes ahead, the write does not");
    rig.drain();
    assert_eq!(rig.read(4096, 1024), [[2; 512], [0; 512]].concat());
}

#[test]
fn extents_tell_data_from_holes() {
    let mut rig = child(64 * MIB, 2 * MIB, 7);
    rig.write(8 * MIB, &[1; 4096]);
    rig.submit(Operation::Extents { depths: false }, 0, 64 * MIB, Segments::empty(), 1);
    rig.drain();
    let (_, status, extents) = rig.answered.pop_back().unwrap();
    assert_eq!(status, Status::Done);
    let found: Vec<_> = extents.iter().map(|extent| (extent.kind, extent.len)).collect();
    let expected = [
        (ExtentKind::Data, 2 * MIB),
        (ExtentKind::Hole, 6 * MIB),
        (ExtentKind::Data, 4096),
        (ExtentKind::Hole, 56 * MIB - 4096),
    ];
    assert_eq!(found, expected);
}

#[test]
fn extents_tell_which_layer_holds_what() {
    let mut rig = child(64 * MIB, 4 * MIB, 7);
    rig.write(2 * MIB, &[1; 4096]);
    rig.write(8 * MIB, &[1; 4096]);
    // All metadata has to be loaded.
    rig.disk.drop_caches();
    rig.submit(Operation::Extents { depths: true }, 0, 64 * MIB, Segments::empty(), 1);
    rig.drain();
    let (_, status, extents) = rig.answered.pop_back().unwrap();
    assert_eq!(status, Status::Done);
    let found: Vec<_> = extents.iter().map(|extent| (extent.kind, extent.depth, extent.len)).collect();
    let expected = [
        (ExtentKind::Data, 2, 2 * MIB),
        (ExtentKind::Data, 1, 4096),
        (ExtentKind::Data, 2, 2 * MIB - 4096),
        (ExtentKind::Hole, 0, 4 * MIB),
        (ExtentKind::Data, 1, 4096),
        (ExtentKind::Hole, 0, 56 * MIB - 4096),
    ];
    assert_eq!(found, expected);
}

#[test]
fn zeroes_over_a_whole_disk_are_few_operations_at_a_time() {
    let mut io = MemoryIo::new(vec![Vec::new()]);
    let layers = vec![Image::Raw(Raw::new(4096 * MIB, 512, false).unwrap())];
    let mut disk = Disk::new(layers, Options::default()).unwrap();
    let zeroes = Operation::WriteZeroes { free: false, durable: false };
    let span = Span { at: DiskOffset(0), len: 4096 * MIB };
    disk.submit(Request::new(zeroes, span, Segments::empty(), Token(1), &disk.geometry()).unwrap(), &mut io);
    let mut most = 0;
    while !io.queue.is_empty() {
        most = most.max(io.queue.len());
        let op = io.queue.remove(0);
        disk.settle(FileDone { op, result: Ok(()) }, &mut io);
    }
    let (request, status) = disk.answer().unwrap();
    request.retire();
    assert_eq!((status, io.log.len()), (Status::Done, 2048));
    assert!(most <= 257, "{most} operations at once");
    assert!(disk.is_idle());
}
