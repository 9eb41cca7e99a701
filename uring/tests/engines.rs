//! Both engines follow the rules of `disk::Io`, on tmpfs and on a disk file system.

mod fixture;

use disk::{Action, Allocation, FileDone, FileError, FileId, FileOffset, FileOp, Io, OpId, Until};
use fixture::{DIRECT, ENGINES, Fixture, STORAGES, everywhere, everywhere_alone, filled, pattern, scattered};
use memory::{Buffer, Segments};
use uring::{Engine, EngineError, EngineKind, ImageFile, OpenOptions};

const KIB: usize = 1 << 10;

/// Writes the pattern from `from` at `at`, and reads it into `into`.
fn round_trip(fixture: &mut Fixture, at: u64, from: Segments, into: &Segments) {
    let bytes = pattern(from.len(), at);
    assert_eq!(fixture.run(vec![Action::Write { at: FileOffset(at), from: filled(from, &bytes) }]), [Ok(())]);
    assert_eq!(fixture.run(vec![Action::Read { at: FileOffset(at), into: into.clone() }]), [Ok(())]);
    assert!(into.to_vec() == bytes, "the data read differs from the data written");
}

#[test]
fn aligned_memory_round_trips() {
    everywhere(&[], 4, |fixture| {
        round_trip(fixture, 0, Segments::zeroed(4 * KIB), &Segments::zeroed(4 * KIB));
        round_trip(fixture, 512, Segments::zeroed(64 * KIB), &scattered(64 * KIB, 4 * KIB, 0));
    });
}

#[test]
fn unaligned_guest_memory_round_trips() {
    everywhere(&[], 4, |fixture| {
        round_trip(fixture, 4096, scattered(8 * KIB, 8 * KIB, 1), &scattered(8 * KIB, 8 * KIB, 77));
        round_trip(fixture, 8192, scattered(128 * KIB, 1000, 3), &scattered(128 * KIB, 333, 0));
        round_trip(fixture, 512, scattered(512, 512, 100), &scattered(512, 1, 0));
    });
}

#[test]
fn unaligned_memory_larger_than_a_bounce_round_trips() {
    everywhere(&[], 4, |fixture| {
        round_trip(fixture, 512, scattered(3000 * KIB, 3000 * KIB, 9), &scattered(3000 * KIB, 7000, 9))
    });
}

#[test]
fn more_parts_than_the_kernel_accepts_round_trip() {
    everywhere(&[], 4, |fixture| {
        round_trip(fixture, 0, scattered(1500 * 512, 512, 0), &scattered(1500 * 512, 512, 0));
        round_trip(fixture, 4096, scattered(3000 * 512, 511, 5), &scattered(3000 * 512, 513, 0));
    });
}

#[test]
fn bytes_past_the_end_of_the_file_read_as_zero() {
    let content = pattern(5000, 1);
    everywhere(&content, 4, |fixture| {
        let across = filled(Segments::zeroed(16 * KIB), &[7; 16 * KIB]);
        let unaligned = filled(scattered(8 * KIB, 8 * KIB, 1), &[7; 8 * KIB]);
        let behind = filled(Segments::zeroed(4 * KIB), &[7; 4 * KIB]);
        let reads = vec![
            Action::Read { at: FileOffset(0), into: across.clone() },
            Action::Read { at: FileOffset(0), into: unaligned.clone() },
            Action::Read { at: FileOffset(1 << 20), into: behind.clone() },
        ];
        assert_eq!(fixture.run(reads), [Ok(()); 3]);
        assert_eq!(across.to_vec(), [content.clone(), vec![0; 16 * KIB - 5000]].concat());
        assert_eq!(unaligned.to_vec(), [content.clone(), vec![0; 8 * KIB - 5000]].concat());
        assert!(behind.is_zero());
    });
}

#[test]
fn an_empty_transfer_succeeds() {
    everywhere(&[], 4, |fixture| {
        let nothing = vec![
            Action::Read { at: FileOffset(0), into: Segments::empty() },
            Action::Write { at: FileOffset(0), from: Segments::empty() },
            Action::Deallocate { at: FileOffset(0), len: 0 },
        ];
        assert_eq!(fixture.run(nothing), [Ok(()); 3]);
    });
}

#[test]
fn each_of_many_concurrent_operations_completes_once() {
    everywhere(&[], 64, |fixture| {
        let bytes: Vec<Vec<u8>> = (0..300).map(|block| pattern(4 * KIB, block)).collect();
        let at = |block: usize| (block * 4 * KIB) as u64;
        let write = |(block, bytes): (usize, &Vec<u8>)| Action::Write {
            at: FileOffset(at(block)),
            from: Segments::copy_of(bytes),
        };
        assert_eq!(fixture.run(bytes.iter().enumerate().map(write).collect()), [Ok(()); 300]);
        let memory: Vec<Segments> = (0..300).map(|_| Segments::zeroed(4 * KIB)).collect();
        let read = |(block, into): (usize, &Segments)| Action::Read { at: FileOffset(at(block)), into: into.clone() };
        assert_eq!(fixture.run(memory.iter().enumerate().map(read).collect()), [Ok(()); 300]);
        assert!(memory.iter().zip(&bytes).all(|(memory, bytes)| memory.to_vec() == *bytes));
    });
}

#[test]
fn a_full_queue_hands_the_operation_back() {
    everywhere_alone(&[1; 4096], 2, |fixture| {
        let op = |id| FileOp {
            id: OpId(id),
            file: FileId(0),
            action: Action::Read { at: FileOffset(0), into: Segments::zeroed(4 * KIB) },
        };
        assert!(fixture.engine.push(op(1)).is_ok());
        assert!(fixture.engine.push(op(2)).is_ok());
        let back = fixture.engine.push(op(3)).unwrap_err();
        assert_eq!(back.id, OpId(3));

        let mut done: Vec<FileDone> = Vec::new();
        while done.is_empty() {
            fixture.engine.reap(Until::Any, &mut done).unwrap();
        }
        assert!(fixture.engine.push(back).is_ok());
        while done.len() < 3 {
            fixture.engine.reap(Until::Any, &mut done).unwrap();
        }
        assert!(done.iter().all(|done| done.result == Ok(())));
    });
}

#[test]
fn a_deallocated_range_reads_as_zero_and_the_length_stays() {
    let content = pattern(256 * KIB, 3);
    everywhere(&content, 4, |fixture| {
        let free = vec![Action::Deallocate { at: FileOffset(64 * KIB as u64), len: 64 * KIB as u64 }];
        assert_eq!(fixture.run(free), [Ok(())]);
        let memory = Segments::zeroed(256 * KIB);
        assert_eq!(fixture.run(vec![Action::Read { at: FileOffset(0), into: memory.clone() }]), [Ok(())]);
        let wanted = [&content[..64 * KIB], &[0; 64 * KIB], &content[128 * KIB..]].concat();
        assert!(memory.to_vec() == wanted);
        assert_eq!(fixture.content().len(), 256 * KIB);
        let hole = fixture.engine.allocated(FileId(0), FileOffset(64 * KIB as u64), 1 << 30);
        assert_eq!(hole, Allocation::Hole(64 * KIB as u64));
        assert_eq!(fixture.engine.allocated(FileId(0), FileOffset(0), 4096), Allocation::Data(4096));
        assert_eq!(fixture.engine.allocated(FileId(0), FileOffset(1 << 30), 4096), Allocation::Hole(4096));
    });
}

#[test]
fn deallocating_past_the_end_of_the_file_succeeds() {
    everywhere(&[1; 4096], 4, |fixture| {
        let free = vec![
            Action::Deallocate { at: FileOffset(1 << 20), len: 1 << 20 },
            Action::Deallocate { at: FileOffset(0), len: 1 << 20 },
        ];
        assert_eq!(fixture.run(free), [Ok(()), Ok(())]);
        assert_eq!(fixture.content(), [0; 4096]);
    });
}

#[test]
fn a_sync_succeeds_during_writes() {
    everywhere(&[], 8, |fixture| {
        let write = |at| Action::Write { at, from: Segments::zeroed(4 * KIB) };
        let actions =
            vec![write(FileOffset(0)), Action::SyncData, write(FileOffset(4096)), Action::SyncData, Action::SyncData];
        assert_eq!(fixture.run(actions), [Ok(()); 5]);
    });
}

#[test]
fn only_writes_fail_on_a_read_only_file() {
    for (kind, options) in ENGINES {
        let mut fixture =
            Fixture::on(STORAGES[0], (kind, uring::OpenOptions { write: false, ..options }), &[5; 4096], 4);
        let memory = Segments::zeroed(4 * KIB);
        let actions = vec![
            Action::Write { at: FileOffset(0), from: Segments::zeroed(512) },
            Action::Read { at: FileOffset(0), into: memory.clone() },
        ];
        assert_eq!(fixture.run(actions), [Err(FileError::Failed(libc::EBADF)), Ok(())]);
        assert_eq!(memory.to_vec(), [5; 4096]);
    }
}

#[test]
fn each_operation_goes_to_the_file_it_names() {
    for (kind, options) in ENGINES {
        let directory = tempfile::tempdir_in(STORAGES[1]).unwrap();
        let files = [b"leaf", b"base"].map(|content| {
            let path = directory.path().join(std::str::from_utf8(content).unwrap());
            std::fs::write(&path, content.repeat(1024)).unwrap();
            ImageFile::open(&path, options).unwrap()
        });
        let mut engine = Engine::open(kind, files.into(), 4).unwrap();
        let memory = Segments::zeroed(4 * KIB);
        let read = Action::Read { at: FileOffset(0), into: memory.clone() };
        engine.push(FileOp { id: OpId(0), file: FileId(1), action: read }).unwrap();
        let mut done = Vec::new();
        engine.reap(Until::Any, &mut done).unwrap();
        assert_eq!(done.len(), 1);
        assert_eq!(memory.to_vec(), b"base".repeat(1024));
    }
}

#[test]
fn dropping_an_engine_waits_for_operations_in_flight_and_closes_the_file() {
    everywhere(&[0; 4096], 64, |fixture| {
        let bytes = pattern(64 * KIB, 9);
        let memory = Segments::copy_of(&bytes);
        for block in 0..64 {
            let action = Action::Write { at: FileOffset(block * 64 * KIB as u64), from: memory.clone() };
            fixture.engine.push(FileOp { id: OpId(block), file: FileId(0), action }).unwrap();
        }
        fixture.engine.reap(Until::Now, &mut Vec::new()).unwrap();
        let options = fixture.engine.file(FileId(0)).unwrap().options();
        let other = tempfile::tempdir().unwrap();
        let spare = ImageFile::open(&fixture::image(other.path(), &[]), options).unwrap();
        fixture.engine = Engine::open(fixture.engine.kind(), vec![spare], 1).unwrap();

        assert!(
            ImageFile::open(&fixture.path, options).is_ok(),
            "the file is still locked after the engine was dropped"
        );
        assert!(fixture.content() == bytes.repeat(64), "a submitted write is missing from the file");
    });
}

#[test]
fn aio_refuses_a_file_open_through_the_page_cache() {
    let directory = tempfile::tempdir_in(STORAGES[0]).unwrap();
    let file = ImageFile::open(&fixture::image(directory.path(), &[]), fixture::BUFFERED).unwrap();
    let refused = Engine::open(EngineKind::Aio, vec![file], 4).err().unwrap();
    assert!(matches!(refused, EngineError::AioNeedsDirect { .. }));
    assert!(refused.to_string().contains("--cache none"), "{refused}");
}

#[test]
fn an_unsupported_depth_is_refused() {
    for kind in [EngineKind::Uring, EngineKind::Aio] {
        for depth in [0, 1 << 20] {
            assert!(matches!(Engine::open(kind, vec![], depth), Err(EngineError::Depth { .. })));
        }
    }
}

#[test]
fn only_tmpfs_needs_workers_with_io_uring() {
    let [tmpfs, disk] = STORAGES.map(|storage| Fixture::on(storage, (EngineKind::Uring, DIRECT), &[1; 4096], 1));
    assert!(tmpfs.engine.file(FileId(0)).unwrap().uring_needs_workers());
    assert!(!disk.engine.file(FileId(0)).unwrap().uring_needs_workers());
}

/// More watches and concurrent operations than the ring has entries.
#[test]
fn a_small_ring_serves_many_watches_and_operations() {
    use std::os::fd::AsFd;
    let event = || rustix::event::eventfd(1, rustix::event::EventfdFlags::NONBLOCK).unwrap();
    for (kind, options) in ENGINES {
        let mut fixture = Fixture::on(STORAGES[1], (kind, options), &[1; 4096], 16);
        let events: Vec<_> = (0..200).map(|_| event()).collect();
        for (key, event) in (0..).zip(&events) {
            fixture.engine.watch(event.as_fd(), false, key).unwrap();
        }
        let read = |_| Action::Read { at: FileOffset(0), into: Segments::zeroed(4 * KIB) };
        assert_eq!(fixture.run((0..100).map(read).collect()), [Ok(()); 100]);
        let mut ready = Vec::new();
        while ready.len() < 200 {
            fixture.engine.reap(Until::Any, &mut Vec::new()).unwrap();
            fixture.engine.take_ready(&mut ready);
        }
        ready.sort();
        assert_eq!(ready, (0..200).collect::<Vec<u64>>());
    }
}

/// Reads or writes one block of `file`.
fn block(engine: &mut Engine, file: FileId, action: Action) -> Result<(), FileError> {
    let mut done: Vec<FileDone> = Vec::new();
    engine.push(FileOp { id: OpId(1), file, action }).unwrap();
    while done.is_empty() {
        engine.reap(Until::Any, &mut done).unwrap();
    }
    done.remove(0).result
}

#[test]
fn an_added_file_is_usable_and_its_id_is_reused_after_removal() {
    everywhere(&[1; 4096], 4, |fixture| {
        let options = fixture.engine.file(FileId(0)).unwrap().options();
        let other = tempfile::tempdir_in(fixture.path.parent().unwrap()).unwrap();
        let added = fixture::image(other.path(), &[2; 4096]);
        let id = fixture.engine.add(ImageFile::open(&added, options).unwrap()).unwrap();
        assert_eq!(id, FileId(1));
        let memory = Segments::zeroed(4 * KIB);
        assert_eq!(block(&mut fixture.engine, id, Action::Read { at: FileOffset(0), into: memory.clone() }), Ok(()));
        assert_eq!(memory.to_vec(), [2; 4096]);
        let removed = fixture.engine.remove(id).unwrap();
        assert_eq!(removed.path(), added);
        assert_eq!(fixture.engine.add(removed).unwrap(), id);
        assert_eq!(
            block(&mut fixture.engine, FileId(0), Action::Read { at: FileOffset(0), into: memory.clone() }),
            Ok(())
        );
        assert_eq!(memory.to_vec(), [1; 4096]);
    });
}

#[test]
fn a_file_in_use_cannot_be_removed() {
    everywhere(&[1; 4096], 4, |fixture| {
        let memory = Segments::zeroed(4 * KIB);
        let op = FileOp { id: OpId(1), file: FileId(0), action: Action::Read { at: FileOffset(0), into: memory } };
        fixture.engine.push(op).unwrap();
        assert!(matches!(fixture.engine.remove(FileId(0)), Err(EngineError::FileBusy(FileId(0)))));
        assert!(matches!(fixture.engine.remove(FileId(1)), Err(EngineError::NoSuchFile(FileId(1)))));
    });
}

#[test]
fn a_replaced_file_has_the_access_mode_of_the_new_one() {
    everywhere(&[1; 4096], 4, |fixture| {
        let read_only = fixture.engine.file(FileId(0)).unwrap().reopen_read_only().unwrap();
        drop(fixture.engine.replace(FileId(0), read_only).unwrap());
        let write = || Action::Write { at: FileOffset(0), from: Segments::copy_of(&[3; 4096]) };
        assert!(matches!(block(&mut fixture.engine, FileId(0), write()), Err(FileError::Failed(_))));
        let writable = fixture.engine.file(FileId(0)).unwrap().reopen_writable().unwrap();
        drop(fixture.engine.replace(FileId(0), writable).unwrap());
        assert_eq!(block(&mut fixture.engine, FileId(0), write()), Ok(()));
        assert_eq!(fixture.content(), [3; 4096]);
    });
}

#[test]
fn more_files_than_the_table_holds_are_refused() {
    everywhere(&[], 1, |fixture| {
        let options = fixture.engine.file(FileId(0)).unwrap().options();
        let other = tempfile::tempdir_in(fixture.path.parent().unwrap()).unwrap();
        let spare =
            ImageFile::open(&fixture::image(other.path(), &[]), OpenOptions { lock: false, ..options }).unwrap();
        for _ in 1..uring::FILES_MAX {
            fixture.engine.add(spare.try_clone().unwrap()).unwrap();
        }
        assert!(matches!(fixture.engine.add(spare.try_clone().unwrap()), Err(EngineError::TooManyFiles)));
    });
}

/// A worker is performing an allocating write when its file is replaced; the write must not go to the file that then
/// has the old descriptor's number.
#[test]
fn an_operation_in_flight_finishes_on_the_file_it_started_on() {
    everywhere(&[], 32, |fixture| {
        let bytes = pattern(64 * KIB, 4);
        let memory = Segments::copy_of(&bytes);
        for block in 0..32 {
            let action = Action::Write { at: FileOffset(block * 64 * KIB as u64), from: memory.clone() };
            fixture.engine.push(FileOp { id: OpId(block), file: FileId(0), action }).unwrap();
        }
        let mut done: Vec<FileDone> = Vec::new();
        fixture.engine.reap(Until::Now, &mut done).unwrap();
        fixture.engine.reap(Until::Now, &mut done).unwrap();
        let other = fixture.engine.file(FileId(0)).unwrap().try_clone().unwrap();
        drop(fixture.engine.replace(FileId(0), other).unwrap());
        let others: Vec<_> = (0..8).map(|_| std::fs::File::open("/dev/null").unwrap()).collect();
        while done.len() < 32 {
            fixture.engine.reap(Until::Any, &mut done).unwrap();
        }
        drop(others);
        assert!(done.iter().all(|done| done.result == Ok(())));
        assert!(fixture.content() == bytes.repeat(32));
    });
}

/// A non-blocking read returns only the part that is in the page cache, and then fails.
#[test]
fn a_partly_cached_read_gets_the_rest_from_storage() {
    let content = pattern(4096 * KIB, 5);
    let mut fixture = Fixture::on(STORAGES[1], (EngineKind::Uring, fixture::BUFFERED), &content, 4);
    let file = std::fs::File::open(&fixture.path).unwrap();
    file.sync_all().unwrap();
    for cached in [0, 4 * KIB, 512 * KIB] {
        rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
        rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::Random).unwrap();
        std::os::unix::fs::FileExt::read_exact_at(&file, &mut vec![0; cached], 0).unwrap();
        let memory = Segments::zeroed(4096 * KIB);
        assert_eq!(fixture.run(vec![Action::Read { at: FileOffset(0), into: memory.clone() }]), [Ok(())]);
        assert!(memory.to_vec() == content);
    }
}

/// Transfers inside, outside and across registered memory, as buffers are registered and unregistered.
#[test]
fn registered_memory_works_like_any_other() {
    everywhere(&[], 4, |fixture| {
        let buffers: Vec<_> = (0..41).map(|_| Buffer::zeroed(64 * KIB)).collect();
        let registered: Vec<bool> =
            buffers.iter().map(|it| fixture.engine.register_memory(it.clone()).is_ok()).collect();
        // More buffers than the table has slots are refused, if there is a table.
        assert!(registered == [true; 41] || registered == [[true; 40].as_slice(), &[false]].concat(), "{registered:?}");
        for buffer in &buffers {
            round_trip(fixture, 0, buffer.range(0, 4 * KIB), &buffer.range(60 * KIB, 4 * KIB));
            round_trip(fixture, 8192, buffer.range(512, 32 * KIB), &scattered(32 * KIB, 4 * KIB, 0));
        }
        let both = Segments::joined(vec![buffers[0].range(0, 4 * KIB), buffers[1].range(0, 4 * KIB)]);
        round_trip(fixture, 4096, both, &buffers[40].range(0, 8 * KIB));
        for buffer in &buffers {
            fixture.engine.forget_memory(buffer).unwrap();
            round_trip(fixture, 0, buffer.range(4 * KIB, 4 * KIB), &buffer.range(0, 4 * KIB));
        }
        assert!(fixture.engine.register_memory(buffers[40].clone()).is_ok(), "a slot is free again");
        round_trip(fixture, 0, buffers[40].range(0, 4 * KIB), &buffers[40].range(4 * KIB, 4 * KIB));
    });
}
