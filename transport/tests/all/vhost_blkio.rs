//! An independent front-end, the crate `blkio`, against the server over its socket.

use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;

use blkio::{Blkio, Blkioq, Completion, MemoryRegion, ReqFlags};
use disk::Geometry;
use memory::{GuestAddr, GuestMemory, Mapping, Region};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

use crate::vhost_mock::{GEOMETRY, RunningBackend};

fn connect(path: &Path) -> Blkio {
    let mut blkio = Blkio::new("virtio-blk-vhost-user").unwrap();
    blkio.set_str("path", path.to_str().unwrap()).unwrap();
    blkio.connect().unwrap();
    blkio
}

fn start(mut blkio: Blkio, queues: i32) -> (Blkio, Vec<Blkioq>) {
    blkio.set_i32("num-queues", queues).unwrap();
    blkio.set_i32("queue-size", 64).unwrap();
    let started = blkio.start().unwrap();
    (blkio, started.queues)
}

/// Memory that both the client and the test can see.
struct SharedBuffers {
    file: OwnedFd,
    mapping: Arc<Mapping>,
    memory: Arc<GuestMemory>,
}

impl SharedBuffers {
    fn new(blkio: &mut Blkio, len: usize) -> SharedBuffers {
        let file = memfd_create("buffers", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&file, len as u64).unwrap();
        let mapping = Arc::new(Mapping::of_file(file.as_fd(), 0, len).unwrap());
        let region = Region { guest: GuestAddr(0), peer: 0, len: len as u64, offset: 0, mapping: mapping.clone() };
        let memory = Arc::new(GuestMemory::new(vec![region]).unwrap());
        let shared = SharedBuffers { file, mapping, memory };
        blkio.map_mem_region(&shared.region()).unwrap();
        shared
    }

    fn region(&self) -> MemoryRegion {
        let addr = self.mapping.base().addr();
        MemoryRegion { addr, iova: 0, len: self.mapping.len(), fd: self.file.as_raw_fd(), fd_offset: 0, flags: 0 }
    }

    fn at(&self, at: usize) -> *mut u8 {
        self.mapping.base().wrapping_add(at)
    }

    fn put(&self, at: usize, bytes: &[u8]) {
        self.memory.segments([(GuestAddr(at as u64), bytes.len() as u32)]).unwrap().copy_from(bytes);
    }

    fn get(&self, at: usize, len: usize) -> Vec<u8> {
        self.memory.segments([(GuestAddr(at as u64), len as u32)]).unwrap().to_vec()
    }
}

/// Waits for `count` completions; returns the result of each, by `user_data`.
fn wait(queue: &mut Blkioq, count: usize) -> Vec<(usize, i32)> {
    let mut results = Vec::new();
    while results.len() < count {
        let mut completions = [const { MaybeUninit::<Completion>::uninit() }; 64];
        let room = completions.len().min(count - results.len());
        let found = queue.do_io(&mut completions[..room], 1, None, None).unwrap();
        for completion in &completions[..found] {
            // SAFETY: `do_io` has filled the first `found` of them.
            let completion = unsafe { completion.assume_init_ref() };
            results.push((completion.user_data, completion.ret));
        }
    }
    results.sort();
    results
}

fn pattern(seed: usize, len: usize) -> Vec<u8> {
    (0..len).map(|at| (at * 31 + seed * 7 + at / 512) as u8).collect()
}

#[test]
fn the_disk_has_the_configured_properties() {
    let mut running = RunningBackend::new(GEOMETRY, 4);
    let blkio = connect(&running.path());
    assert_eq!(blkio.get_u64("capacity").unwrap(), GEOMETRY.len);
    assert_eq!(blkio.get_i32("max-queues").unwrap(), 4);
    assert_eq!(blkio.get_i32("request-alignment").unwrap(), 512);
    assert_eq!(blkio.get_i32("max-segments").unwrap(), 126);
    assert_eq!(blkio.get_i32("discard-alignment").unwrap(), 4096);
    assert_eq!(blkio.get_u64("max-discard-len").unwrap(), 2 << 30);
    assert_eq!(blkio.get_u64("max-write-zeroes-len").unwrap(), 2 << 30);
    drop(blkio);
    running.stop();
}

#[test]
fn written_data_is_read_back() {
    let mut running = RunningBackend::new(GEOMETRY, 1);
    let (mut blkio, mut queues) = start(connect(&running.path()), 1);
    let shared = SharedBuffers::new(&mut blkio, 64 << 10);
    let written = pattern(1, 16384);
    shared.put(0, &written);

    queues[0].write(8192, shared.at(0), 16384, 1, ReqFlags::empty());
    assert_eq!(wait(&mut queues[0], 1), [(1, 0)]);
    queues[0].flush(2, ReqFlags::empty());
    assert_eq!(wait(&mut queues[0], 1), [(2, 0)]);
    queues[0].read(8192, shared.at(32768), 16384, 3, ReqFlags::empty());
    assert_eq!(wait(&mut queues[0], 1), [(3, 0)]);
    assert_eq!(shared.get(32768, 16384), written);

    drop((queues, blkio));
    assert_eq!(running.stop()[8192..24576], written);
}

#[test]
fn discarded_and_zeroed_ranges_read_as_zero() {
    let mut running = RunningBackend::new(GEOMETRY, 1);
    let (mut blkio, mut queues) = start(connect(&running.path()), 1);
    let shared = SharedBuffers::new(&mut blkio, 16384);
    shared.put(0, &[0xaa; 12288]);

    queues[0].write(0, shared.at(0), 12288, 0, ReqFlags::empty());
    assert_eq!(wait(&mut queues[0], 1), [(0, 0)]);
    queues[0].discard(0, 4096, 1, ReqFlags::empty());
    queues[0].write_zeroes(4096, 4096, 2, ReqFlags::empty());
    assert_eq!(wait(&mut queues[0], 2), [(1, 0), (2, 0)]);

    drop((queues, blkio));
    let bytes = running.stop();
    assert_eq!(bytes[..8192], [0; 8192]);
    assert_eq!(bytes[8192..12288], [0xaa; 4096]);
}

#[test]
fn a_read_only_disk_announces_that_and_refuses_writes() {
    let mut running = RunningBackend::new(Geometry { read_only: true, ..GEOMETRY }, 1);
    let mut writer = Blkio::new("virtio-blk-vhost-user").unwrap();
    writer.set_str("path", running.path().to_str().unwrap()).unwrap();
    assert!(
        writer.connect().and_then(|()| writer.start()).is_err(),
        "a client without the read-only property is refused"
    );
    drop(writer);
    let mut reader = Blkio::new("virtio-blk-vhost-user").unwrap();
    reader.set_str("path", running.path().to_str().unwrap()).unwrap();
    reader.set_bool("read-only", true).unwrap();
    reader.connect().unwrap();
    let (mut blkio, mut queues) = start(reader, 1);
    let shared = SharedBuffers::new(&mut blkio, 4096);
    shared.put(0, &[1; 4096]);

    queues[0].read(0, shared.at(0), 4096, 1, ReqFlags::empty());
    queues[0].write(0, shared.at(0), 4096, 2, ReqFlags::empty());
    let results = wait(&mut queues[0], 2);
    assert_eq!(results[0], (1, 0));
    assert!(results[1].1 < 0);
    assert_eq!(shared.get(0, 4096), [0; 4096]);

    drop((queues, blkio));
    running.stop();
}

#[test]
fn a_request_past_the_end_of_the_disk_fails_alone() {
    let mut running = RunningBackend::new(GEOMETRY, 1);
    let (mut blkio, mut queues) = start(connect(&running.path()), 1);
    let shared = SharedBuffers::new(&mut blkio, 4096);

    queues[0].read(GEOMETRY.len, shared.at(0), 4096, 1, ReqFlags::empty());
    queues[0].read(GEOMETRY.len - 4096, shared.at(0), 4096, 2, ReqFlags::empty());
    let results = wait(&mut queues[0], 2);
    assert!(results[0].1 < 0);
    assert_eq!(results[1], (2, 0));

    drop((queues, blkio));
    running.stop();
}

/// 4 queues with 16 writes in flight each, 16 rounds: every block of the disk is written by one queue, with unique
/// bytes, and then read back by another.
#[test]
fn many_queues_at_depth_neither_lose_nor_mix_requests() {
    const DEPTH: usize = 16;
    const ROUNDS: usize = 16;
    let mut running = RunningBackend::new(GEOMETRY, 4);
    let (mut blkio, mut queues) = start(connect(&running.path()), 4);
    let shared = SharedBuffers::new(&mut blkio, 4 * DEPTH * 4096);
    let block = |round: usize, queue: usize, slot: usize| (round * 4 + queue) * DEPTH + slot;

    for round in 0..ROUNDS {
        for (index, queue) in queues.iter_mut().enumerate() {
            for slot in 0..DEPTH {
                let at = (index * DEPTH + slot) * 4096;
                shared.put(at, &pattern(block(round, index, slot), 4096));
                let offset = (block(round, index, slot) * 4096) as u64;
                queue.write(offset, shared.at(at), 4096, slot, ReqFlags::empty());
            }
            queue.do_io(&mut [], 0, None, None).unwrap();
        }
        for queue in &mut queues {
            assert!(wait(queue, DEPTH).iter().all(|&(_, result)| result == 0));
        }
    }
    for round in 0..ROUNDS {
        for (index, queue) in queues.iter_mut().enumerate() {
            let other = (index + 1) % 4;
            for slot in 0..DEPTH {
                let offset = (block(round, other, slot) * 4096) as u64;
                queue.read(offset, shared.at(slot * 4096), 4096, slot, ReqFlags::empty());
            }
            assert!(wait(queue, DEPTH).iter().all(|&(_, result)| result == 0));
            for slot in 0..DEPTH {
                assert!(shared.get(slot * 4096, 4096) == pattern(block(round, other, slot), 4096), "round {round}");
            }
        }
    }

    drop((queues, blkio));
    running.stop();
}

#[test]
fn a_client_can_connect_after_another() {
    let mut running = RunningBackend::new(GEOMETRY, 2);
    for round in 0..20 {
        let (mut blkio, mut queues) = start(connect(&running.path()), 2);
        let shared = SharedBuffers::new(&mut blkio, 8192);
        shared.put(0, &pattern(round, 4096));
        queues[1].write(round as u64 * 4096, shared.at(0), 4096, 0, ReqFlags::empty());
        assert_eq!(wait(&mut queues[1], 1), [(0, 0)]);
        blkio.unmap_mem_region(&shared.region());
    }
    let bytes = running.stop();
    assert_eq!(bytes[19 * 4096..20 * 4096], pattern(19, 4096));
}
