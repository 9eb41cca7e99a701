//! Both engines do file I/O by the rules of `disk::Io`, on tmpfs and on a disk's file system.

mod bed;

use bed::{Bed, DIRECT, ENGINES, STORAGES, everywhere, filled, pattern, scattered};
use disk::{Action, Allocation, FileDone, FileError, FileId, FileOp, Io, OpId, Until};
use memory::{Buffer, Segments};
use uring::{Engine, EngineError, EngineKind, ImageFile, OpenOptions};

const KIB: usize = 1 << 10;

/// Writes the pattern out of `from` at `at`, and reads it into `into`.
fn round_trip(bed: &mut Bed, at: u64, from: Segments, into: &Segments) {
    let bytes = pattern(from.len(), at);
    assert_eq!(bed.run(vec![Action::Write { at, from: filled(from, &bytes) }]), [Ok(())]);
    assert_eq!(bed.run(vec![Action::Read { at, into: into.clone() }]), [Ok(())]);
    assert!(into.to_vec() == bytes, "other bytes came back");
}

#[test]
fn aligned_memory_round_trips() {
    everywhere(&[], 4, |bed| {
        round_trip(bed, 0, Segments::zeroed(4 * KIB), &Segments::zeroed(4 * KIB));
        round_trip(bed, 512, Segments::zeroed(64 * KIB), &scattered(64 * KIB, 4 * KIB, 0));
    });
}

#[test]
fn unaligned_guest_memory_round_trips() {
    everywhere(&[], 4, |bed| {
        round_trip(bed, 4096, scattered(8 * KIB, 8 * KIB, 1), &scattered(8 * KIB, 8 * KIB, 77));
        round_trip(bed, 8192, scattered(128 * KIB, 1000, 3), &scattered(128 * KIB, 333, 0));
        round_trip(bed, 512, scattered(512, 512, 100), &scattered(512, 1, 0));
    });
}

#[test]
fn unaligned_memory_larger_than_a_bounce_round_trips() {
    everywhere(&[], 4, |bed| {
        round_trip(bed, 512, scattered(3000 * KIB, 3000 * KIB, 9), &scattered(3000 * KIB, 7000, 9))
    });
}

#[test]
fn more_parts_than_the_kernel_takes_round_trip() {
    everywhere(&[], 4, |bed| {
        round_trip(bed, 0, scattered(1500 * 512, 512, 0), &scattered(1500 * 512, 512, 0));
        round_trip(bed, 4096, scattered(3000 * 512, 511, 5), &scattered(3000 * 512, 513, 0));
    });
}

#[test]
fn bytes_behind_the_end_of_the_file_read_as_zero() {
    let content = pattern(5000, 1);
    everywhere(&content, 4, |bed| {
        let across = filled(Segments::zeroed(16 * KIB), &[7; 16 * KIB]);
        let unaligned = filled(scattered(8 * KIB, 8 * KIB, 1), &[7; 8 * KIB]);
        let behind = filled(Segments::zeroed(4 * KIB), &[7; 4 * KIB]);
        let reads = vec![
            Action::Read { at: 0, into: across.clone() },
            Action::Read { at: 0, into: unaligned.clone() },
            Action::Read { at: 1 << 20, into: behind.clone() },
        ];
        assert_eq!(bed.run(reads), [Ok(()); 3]);
        assert_eq!(across.to_vec(), [content.clone(), vec![0; 16 * KIB - 5000]].concat());
        assert_eq!(unaligned.to_vec(), [content.clone(), vec![0; 8 * KIB - 5000]].concat());
        assert!(behind.is_zero());
    });
}

#[test]
fn an_empty_transfer_succeeds() {
    everywhere(&[], 4, |bed| {
        let nothing = vec![
            Action::Read { at: 0, into: Segments::empty() },
            Action::Write { at: 0, from: Segments::empty() },
            Action::Deallocate { at: 0, len: 0 },
        ];
        assert_eq!(bed.run(nothing), [Ok(()); 3]);
    });
}

#[test]
fn many_operations_at_once_each_come_back_once() {
    everywhere(&[], 64, |bed| {
        let bytes: Vec<Vec<u8>> = (0..300).map(|block| pattern(4 * KIB, block)).collect();
        let at = |block: usize| (block * 4 * KIB) as u64;
        let write = |(block, bytes): (usize, &Vec<u8>)| Action::Write { at: at(block), from: Segments::copy_of(bytes) };
        assert_eq!(bed.run(bytes.iter().enumerate().map(write).collect()), [Ok(()); 300]);
        let memory: Vec<Segments> = (0..300).map(|_| Segments::zeroed(4 * KIB)).collect();
        let read = |(block, into): (usize, &Segments)| Action::Read { at: at(block), into: into.clone() };
        assert_eq!(bed.run(memory.iter().enumerate().map(read).collect()), [Ok(()); 300]);
        assert!(memory.iter().zip(&bytes).all(|(memory, bytes)| memory.to_vec() == *bytes));
    });
}

#[test]
fn a_full_queue_hands_the_operation_back() {
    everywhere(&[1; 4096], 2, |bed| {
        let op = |id| FileOp {
            id: OpId(id),
            file: FileId(0),
            action: Action::Read { at: 0, into: Segments::zeroed(4 * KIB) },
        };
        assert!(bed.engine.push(op(1)).is_ok());
        assert!(bed.engine.push(op(2)).is_ok());
        let back = bed.engine.push(op(3)).unwrap_err();
        assert_eq!(back.id, OpId(3));

        let mut done: Vec<FileDone> = Vec::new();
        while done.is_empty() {
            bed.engine.reap(Until::Any, &mut done).unwrap();
        }
        assert!(bed.engine.push(back).is_ok());
        while done.len() < 3 {
            bed.engine.reap(Until::Any, &mut done).unwrap();
        }
        assert!(done.iter().all(|done| done.result == Ok(())));
    });
}

#[test]
fn a_deallocated_range_reads_as_zero_and_the_length_stays() {
    let content = pattern(256 * KIB, 3);
    everywhere(&content, 4, |bed| {
        let free = vec![Action::Deallocate { at: 64 * KIB as u64, len: 64 * KIB as u64 }];
        assert_eq!(bed.run(free), [Ok(())]);
        let memory = Segments::zeroed(256 * KIB);
        assert_eq!(bed.run(vec![Action::Read { at: 0, into: memory.clone() }]), [Ok(())]);
        let wanted = [&content[..64 * KIB], &[0; 64 * KIB], &content[128 * KIB..]].concat();
        assert!(memory.to_vec() == wanted);
        assert_eq!(bed.content().len(), 256 * KIB);
        let hole = bed.engine.allocated(FileId(0), 64 * KIB as u64, 1 << 30);
        assert_eq!(hole, Allocation::Hole(64 * KIB as u64));
        assert_eq!(bed.engine.allocated(FileId(0), 0, 4096), Allocation::Data(4096));
        assert_eq!(bed.engine.allocated(FileId(0), 1 << 30, 4096), Allocation::Hole(4096));
    });
}

#[test]
fn deallocating_behind_the_end_of_the_file_succeeds() {
    everywhere(&[1; 4096], 4, |bed| {
        let free = vec![Action::Deallocate { at: 1 << 20, len: 1 << 20 }, Action::Deallocate { at: 0, len: 1 << 20 }];
        assert_eq!(bed.run(free), [Ok(()), Ok(())]);
        assert_eq!(bed.content(), [0; 4096]);
    });
}

#[test]
fn a_sync_succeeds_beside_writes() {
    everywhere(&[], 8, |bed| {
        let write = |at| Action::Write { at, from: Segments::zeroed(4 * KIB) };
        let actions = vec![write(0), Action::SyncData, write(4096), Action::SyncData, Action::SyncData];
        assert_eq!(bed.run(actions), [Ok(()); 5]);
    });
}

#[test]
fn a_write_to_a_read_only_file_fails_and_nothing_else_does() {
    for (kind, options) in ENGINES {
        let mut bed = Bed::on(STORAGES[0], (kind, uring::OpenOptions { write: false, ..options }), &[5; 4096], 4);
        let memory = Segments::zeroed(4 * KIB);
        let actions =
            vec![Action::Write { at: 0, from: Segments::zeroed(512) }, Action::Read { at: 0, into: memory.clone() }];
        assert_eq!(bed.run(actions), [Err(FileError::Failed(libc::EBADF)), Ok(())]);
        assert_eq!(memory.to_vec(), [5; 4096]);
    }
}

#[test]
fn operations_go_to_the_file_that_they_name() {
    for (kind, options) in ENGINES {
        let directory = tempfile::tempdir_in(STORAGES[1]).unwrap();
        let files = [b"leaf", b"base"].map(|content| {
            let path = directory.path().join(std::str::from_utf8(content).unwrap());
            std::fs::write(&path, content.repeat(1024)).unwrap();
            ImageFile::open(&path, options).unwrap()
        });
        let mut engine = Engine::open(kind, files.into(), 4).unwrap();
        let memory = Segments::zeroed(4 * KIB);
        let read = Action::Read { at: 0, into: memory.clone() };
        engine.push(FileOp { id: OpId(0), file: FileId(1), action: read }).unwrap();
        let mut done = Vec::new();
        engine.reap(Until::Any, &mut done).unwrap();
        assert_eq!(done.len(), 1);
        assert_eq!(memory.to_vec(), b"base".repeat(1024));
    }
}

#[test]
fn dropping_an_engine_waits_for_what_is_in_flight_and_frees_the_file() {
    everywhere(&[0; 4096], 64, |bed| {
        let bytes = pattern(64 * KIB, 9);
        let memory = Segments::copy_of(&bytes);
        for block in 0..64 {
            let action = Action::Write { at: block * 64 * KIB as u64, from: memory.clone() };
            bed.engine.push(FileOp { id: OpId(block), file: FileId(0), action }).unwrap();
        }
        bed.engine.reap(Until::Now, &mut Vec::new()).unwrap();
        let options = bed.engine.file(FileId(0)).unwrap().options();
        let other = tempfile::tempdir().unwrap();
        let spare = ImageFile::open(&bed::image(other.path(), &[]), options).unwrap();
        bed.engine = Engine::open(bed.engine.kind(), vec![spare], 1).unwrap();

        assert!(ImageFile::open(&bed.path, options).is_ok(), "the lock outlives the engine");
        assert!(bed.content() == bytes.repeat(64), "what was submitted is not in the file");
    });
}

#[test]
fn aio_refuses_a_file_in_the_page_cache() {
    let directory = tempfile::tempdir_in(STORAGES[0]).unwrap();
    let file = ImageFile::open(&bed::image(directory.path(), &[]), bed::BUFFERED).unwrap();
    let refused = Engine::open(EngineKind::Aio, vec![file], 4).err().unwrap();
    assert!(matches!(refused, EngineError::AioNeedsDirect { .. }));
    assert!(refused.to_string().contains("--cache none"), "{refused}");
}

#[test]
fn a_depth_that_no_engine_has_is_refused() {
    for kind in [EngineKind::Uring, EngineKind::Aio] {
        for depth in [0, 1 << 20] {
            assert!(matches!(Engine::open(kind, vec![], depth), Err(EngineError::Depth { .. })));
        }
    }
}

#[test]
fn only_tmpfs_makes_io_uring_use_workers() {
    let [tmpfs, disk] = STORAGES.map(|storage| Bed::on(storage, (EngineKind::Uring, DIRECT), &[1; 4096], 1));
    assert!(tmpfs.engine.file(FileId(0)).unwrap().uring_needs_workers());
    assert!(!disk.engine.file(FileId(0)).unwrap().uring_needs_workers());
}

/// More watches and operations at once than the ring has places.
#[test]
fn a_small_ring_serves_many_watches_and_operations() {
    use std::os::fd::AsFd;
    let event = || rustix::event::eventfd(1, rustix::event::EventfdFlags::NONBLOCK).unwrap();
    for (kind, options) in ENGINES {
        let mut bed = Bed::on(STORAGES[1], (kind, options), &[1; 4096], 16);
        let events: Vec<_> = (0..200).map(|_| event()).collect();
        for (key, event) in (0..).zip(&events) {
            bed.engine.watch(event.as_fd(), false, key).unwrap();
        }
        let read = |_| Action::Read { at: 0, into: Segments::zeroed(4 * KIB) };
        assert_eq!(bed.run((0..100).map(read).collect()), [Ok(()); 100]);
        let mut ready = Vec::new();
        while ready.len() < 200 {
            bed.engine.reap(Until::Any, &mut Vec::new()).unwrap();
            bed.engine.take_ready(&mut ready);
        }
        ready.sort();
        assert_eq!(ready, (0..200).collect::<Vec<u64>>());
    }
}

/// One block of file `file`, read or written.
fn block(engine: &mut Engine, file: FileId, action: Action) -> Result<(), FileError> {
    let mut done: Vec<FileDone> = Vec::new();
    engine.push(FileOp { id: OpId(1), file, action }).unwrap();
    while done.is_empty() {
        engine.reap(Until::Any, &mut done).unwrap();
    }
    done.remove(0).result
}

#[test]
fn a_file_that_is_added_is_worked_on_and_its_number_is_used_again() {
    everywhere(&[1; 4096], 4, |bed| {
        let options = bed.engine.file(FileId(0)).unwrap().options();
        let other = tempfile::tempdir_in(bed.path.parent().unwrap()).unwrap();
        let added = bed::image(other.path(), &[2; 4096]);
        let id = bed.engine.add(ImageFile::open(&added, options).unwrap()).unwrap();
        assert_eq!(id, FileId(1));
        let memory = Segments::zeroed(4 * KIB);
        assert_eq!(block(&mut bed.engine, id, Action::Read { at: 0, into: memory.clone() }), Ok(()));
        assert_eq!(memory.to_vec(), [2; 4096]);
        let removed = bed.engine.remove(id).unwrap();
        assert_eq!(removed.path(), added);
        assert_eq!(bed.engine.add(removed).unwrap(), id);
        assert_eq!(block(&mut bed.engine, FileId(0), Action::Read { at: 0, into: memory.clone() }), Ok(()));
        assert_eq!(memory.to_vec(), [1; 4096]);
    });
}

#[test]
fn a_file_in_use_is_not_removed() {
    everywhere(&[1; 4096], 4, |bed| {
        let memory = Segments::zeroed(4 * KIB);
        let op = FileOp { id: OpId(1), file: FileId(0), action: Action::Read { at: 0, into: memory } };
        bed.engine.push(op).unwrap();
        assert!(matches!(bed.engine.remove(FileId(0)), Err(EngineError::FileBusy(FileId(0)))));
        assert!(matches!(bed.engine.remove(FileId(1)), Err(EngineError::NoSuchFile(FileId(1)))));
    });
}

#[test]
fn a_replaced_file_has_the_rights_of_the_new_one() {
    everywhere(&[1; 4096], 4, |bed| {
        let read_only = bed.engine.file(FileId(0)).unwrap().reopen_read_only().unwrap();
        drop(bed.engine.replace(FileId(0), read_only).unwrap());
        let write = || Action::Write { at: 0, from: Segments::copy_of(&[3; 4096]) };
        assert!(matches!(block(&mut bed.engine, FileId(0), write()), Err(FileError::Failed(_))));
        let writable = bed.engine.file(FileId(0)).unwrap().reopen_writable().unwrap();
        drop(bed.engine.replace(FileId(0), writable).unwrap());
        assert_eq!(block(&mut bed.engine, FileId(0), write()), Ok(()));
        assert_eq!(bed.content(), [3; 4096]);
    });
}

#[test]
fn there_are_as_many_files_as_an_engine_has_places() {
    everywhere(&[], 1, |bed| {
        let options = bed.engine.file(FileId(0)).unwrap().options();
        let other = tempfile::tempdir_in(bed.path.parent().unwrap()).unwrap();
        let spare = ImageFile::open(&bed::image(other.path(), &[]), OpenOptions { lock: false, ..options }).unwrap();
        for _ in 1..uring::FILES_MAX {
            bed.engine.add(spare.try_clone().unwrap()).unwrap();
        }
        assert!(matches!(bed.engine.add(spare.try_clone().unwrap()), Err(EngineError::TooManyFiles)));
    });
}

/// A write that allocates is with a thread when its file is replaced; it must not go to what then has the number of the
/// old descriptor.
#[test]
fn an_operation_in_flight_ends_by_the_file_it_began_with() {
    everywhere(&[], 32, |bed| {
        let bytes = pattern(64 * KIB, 4);
        let memory = Segments::copy_of(&bytes);
        for block in 0..32 {
            let action = Action::Write { at: block * 64 * KIB as u64, from: memory.clone() };
            bed.engine.push(FileOp { id: OpId(block), file: FileId(0), action }).unwrap();
        }
        let mut done: Vec<FileDone> = Vec::new();
        bed.engine.reap(Until::Now, &mut done).unwrap();
        bed.engine.reap(Until::Now, &mut done).unwrap();
        let other = bed.engine.file(FileId(0)).unwrap().try_clone().unwrap();
        drop(bed.engine.replace(FileId(0), other).unwrap());
        let others: Vec<_> = (0..8).map(|_| std::fs::File::open("/dev/null").unwrap()).collect();
        while done.len() < 32 {
            bed.engine.reap(Until::Any, &mut done).unwrap();
        }
        drop(others);
        assert!(done.iter().all(|done| done.result == Ok(())));
        assert!(bed.content() == bytes.repeat(32));
    });
}

/// The kernel answers a read without blocking as far as the page cache goes, and then not at all.
#[test]
fn a_read_of_which_a_part_is_cached_gets_the_rest_from_storage() {
    let content = pattern(4096 * KIB, 5);
    let mut bed = Bed::on(STORAGES[1], (EngineKind::Uring, bed::BUFFERED), &content, 4);
    let file = std::fs::File::open(&bed.path).unwrap();
    file.sync_all().unwrap();
    for cached in [0, 4 * KIB, 512 * KIB] {
        rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
        rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::Random).unwrap();
        std::os::unix::fs::FileExt::read_exact_at(&file, &mut vec![0; cached], 0).unwrap();
        let memory = Segments::zeroed(4096 * KIB);
        assert_eq!(bed.run(vec![Action::Read { at: 0, into: memory.clone() }]), [Ok(())]);
        assert!(memory.to_vec() == content);
    }
}

/// Transfers inside, outside and across memory that the engine was told of, while it comes and goes.
#[test]
fn memory_that_is_registered_is_memory_like_any_other() {
    everywhere(&[], 4, |bed| {
        let buffers: Vec<_> = (0..41).map(|_| Buffer::zeroed(64 * KIB)).collect();
        let told: Vec<bool> = buffers.iter().map(|it| bed.engine.register_memory(it.clone()).is_ok()).collect();
        // More than there is room for are refused, where there is such a table at all.
        assert!(told == [true; 41] || told == [[true; 40].as_slice(), &[false]].concat(), "{told:?}");
        for buffer in &buffers {
            round_trip(bed, 0, buffer.range(0, 4 * KIB), &buffer.range(60 * KIB, 4 * KIB));
            round_trip(bed, 8192, buffer.range(512, 32 * KIB), &scattered(32 * KIB, 4 * KIB, 0));
        }
        let both = Segments::joined(vec![buffers[0].range(0, 4 * KIB), buffers[1].range(0, 4 * KIB)]);
        round_trip(bed, 4096, both, &buffers[40].range(0, 8 * KIB));
        for buffer in &buffers {
            bed.engine.forget_memory(buffer).unwrap();
            round_trip(bed, 0, buffer.range(4 * KIB, 4 * KIB), &buffer.range(0, 4 * KIB));
        }
        assert!(bed.engine.register_memory(buffers[40].clone()).is_ok(), "there is room again");
        round_trip(bed, 0, buffers[40].range(0, 4 * KIB), &buffers[40].range(4 * KIB, 4 * KIB));
    });
}
