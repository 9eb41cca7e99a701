//! Opening, creating, locking and repairing image files.

mod fixture;

use std::os::unix::fs::FileTypeExt;
use std::path::Path;
use std::process::Command;

use disk::{Action, FileOffset, ReadFault, Source};
use fixture::{BUFFERED, DIRECT, Mount, READ_ONLY, STORAGES, image, pattern};
use memory::Segments;
use tempfile::{TempDir, tempdir_in};
use uring::{AccessMode, Alignment, Engine, EngineKind, FileOpenError, ImageFile, OpenOptions, sync_directory};

fn on_disk() -> TempDir {
    tempdir_in(STORAGES[1]).unwrap()
}

#[test]
fn the_error_for_a_second_writer_names_the_file() {
    let directory = on_disk();
    let path = image(directory.path(), &[]);
    let _first = ImageFile::open(&path, DIRECT).unwrap();
    let refused = ImageFile::open(&path, BUFFERED).unwrap_err();
    assert!(matches!(refused, FileOpenError::InUse { wanted: AccessMode::Writing, held: AccessMode::Writing, .. }));
    let text = refused.to_string();
    assert!(text.contains(path.to_str().unwrap()), "{text}");
    assert!(text.contains("another process has it open for writing"), "{text}");
}

#[test]
fn a_writer_and_a_reader_exclude_each_other() {
    let directory = on_disk();
    let path = image(directory.path(), &[]);
    let reader = ImageFile::open(&path, READ_ONLY).unwrap();
    let refused = ImageFile::open(&path, DIRECT).unwrap_err();
    assert!(matches!(refused, FileOpenError::InUse { wanted: AccessMode::Writing, held: AccessMode::Reading, .. }));
    drop(reader);
    let _writer = ImageFile::open(&path, DIRECT).unwrap();
    let refused = ImageFile::open(&path, READ_ONLY).unwrap_err();
    assert!(matches!(refused, FileOpenError::InUse { wanted: AccessMode::Reading, held: AccessMode::Writing, .. }));
}

#[test]
fn readers_share_the_lock_and_an_unlocked_open_does_not_change_it() {
    let directory = on_disk();
    let path = image(directory.path(), &[]);
    let _one = ImageFile::open(&path, READ_ONLY).unwrap();
    let _two = ImageFile::open(&path, READ_ONLY).unwrap();
    let unlocked = ImageFile::open(&path, OpenOptions { lock: false, ..DIRECT }).unwrap();
    drop(unlocked);
    assert!(ImageFile::open(&path, DIRECT).is_err());
}

#[test]
fn closing_a_file_releases_its_lock() {
    let directory = on_disk();
    let path = image(directory.path(), &[]);
    drop(ImageFile::open(&path, DIRECT).unwrap());
    drop(ImageFile::open(&path, DIRECT).unwrap());
    let engine = Engine::open(EngineKind::Uring, vec![ImageFile::open(&path, DIRECT).unwrap()], 1).unwrap();
    drop(engine);
    assert!(ImageFile::open(&path, DIRECT).is_ok());
}

/// procfs has regular files without direct I/O.
#[test]
fn refused_direct_io_is_an_error_and_buffered_io_is_opt_in() {
    let path = Path::new("/proc/version");
    let options = OpenOptions { lock: false, ..READ_ONLY };
    let refused = ImageFile::open(path, options).unwrap_err();
    assert!(matches!(refused, FileOpenError::DirectRefused { .. }));
    assert!(refused.to_string().starts_with("cannot open /proc/version with O_DIRECT"), "{refused}");
    assert!(refused.to_string().contains("--cache writeback"), "{refused}");
    assert!(ImageFile::open(path, OpenOptions { write: false, lock: false, ..BUFFERED }).is_ok());
}

#[test]
fn the_error_for_a_non_image_file_says_what_it_is() {
    let directory = on_disk();
    let pipe = directory.path().join("pipe");
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let text = |path: &Path| ImageFile::open(path, DIRECT).unwrap_err().to_string();
    assert!(text(directory.path()).contains("a directory"));
    assert!(text(Path::new("/dev/null")).contains("a character device"));
    assert!(text(&pipe).contains("a pipe"));
    assert!(text(&directory.path().join("absent")).ends_with("there is no such file"));
}

#[test]
fn creation_refuses_an_existing_file_and_leaves_it_unchanged() {
    let directory = on_disk();
    let path = image(directory.path(), b"precious");
    assert!(matches!(ImageFile::create_new(&path, DIRECT), Err(FileOpenError::Exists { .. })));
    assert_eq!(std::fs::read(&path).unwrap(), b"precious");
}

#[test]
fn a_created_file_is_empty_writable_and_locked() {
    let directory = on_disk();
    let path = directory.path().join("new");
    let mut file = ImageFile::create_new(&path, READ_ONLY).unwrap();
    sync_directory(&path).unwrap();
    assert!(file.is_empty());
    file.write_at(FileOffset(0), b"hello").unwrap();
    file.sync().unwrap();
    assert!(matches!(ImageFile::open(&path, READ_ONLY), Err(FileOpenError::InUse { .. })));
}

#[test]
fn creation_where_direct_io_is_refused_leaves_nothing_behind() {
    let Some(mount) = Mount::new("ramfs", "size=1m") else { return };
    let path = mount.path().join("new");
    let refused = ImageFile::create_new(&path, DIRECT).unwrap_err();
    assert!(matches!(refused, FileOpenError::DirectRefused { .. }));
    assert!(!path.exists());
    assert!(ImageFile::create_new(&path, BUFFERED).is_ok());
}

#[test]
fn offline_access_takes_any_alignment() {
    for storage in STORAGES {
        for options in [DIRECT, BUFFERED] {
            let directory = tempdir_in(storage).unwrap();
            let mut wanted = pattern(3_000_001, 4);
            let path = image(directory.path(), &wanted);
            let mut file = ImageFile::open(&path, options).unwrap();
            for (at, len) in [(0, 1), (511, 2), (4096, 8192), (1_048_000, 1_100_000), (3_000_000, 512), (3_000_600, 1)]
            {
                let bytes = pattern(len, len as u64);
                wanted.resize(wanted.len().max(at + len), 0);
                wanted[at..at + len].copy_from_slice(&bytes);
                file.write_at(FileOffset(at as u64), &bytes).unwrap();
                let mut found = vec![0; len];
                file.read_at(FileOffset(at as u64), &mut found).unwrap();
                assert!(found == bytes, "{at} {len}");
            }
            file.sync().unwrap();
            assert_eq!(file.len(), 3_000_601);
            assert!(std::fs::read(&path).unwrap() == wanted, "bytes outside the write were changed");
        }
    }
}

#[test]
fn reading_past_the_end_is_an_error() {
    for options in [DIRECT, BUFFERED] {
        let directory = on_disk();
        let mut file = ImageFile::open(&image(directory.path(), &[1; 700]), options).unwrap();
        assert_eq!(file.read_at(FileOffset(690), &mut [0; 10]), Ok(()));
        assert_eq!(file.read_at(FileOffset(690), &mut [0; 11]), Err(ReadFault::PastEnd(FileOffset(701))));
        assert_eq!(file.read_at(FileOffset(u64::MAX), &mut [0; 11]), Err(ReadFault::PastEnd(FileOffset(u64::MAX))));
    }
}

#[test]
fn set_len_sets_the_length_of_a_file() {
    let directory = on_disk();
    let mut file = ImageFile::open(&image(directory.path(), &[1; 700]), DIRECT).unwrap();
    file.set_len(1 << 40).unwrap();
    assert_eq!(file.len(), 1 << 40);
    file.set_len(1).unwrap();
    assert_eq!(file.len(), 1);
}

#[test]
fn the_alignment_matches_the_storage() {
    let directory = tempdir_in(STORAGES[0]).unwrap();
    let path = image(directory.path(), &[]);
    let direct = ImageFile::open(&path, OpenOptions { lock: false, ..DIRECT }).unwrap();
    let buffered = ImageFile::open(&path, OpenOptions { lock: false, ..BUFFERED }).unwrap();
    assert_eq!(direct.alignment(), Alignment { memory: 512, offset: 512 });
    assert_eq!(buffered.alignment(), Alignment { memory: 1, offset: 1 });
}

/// A loop device over a file, if the system allows one.
struct LoopDevice(String);

impl LoopDevice {
    fn over(path: &Path, sector: u32) -> Option<LoopDevice> {
        let sector = sector.to_string();
        let output = Command::new("losetup").args(["--find", "--show", "--sector-size", &sector]).arg(path).output();
        match output {
            Ok(output) if output.status.success() => {
                Some(LoopDevice(String::from_utf8(output.stdout).unwrap().trim().to_owned()))
            }
            other => {
                eprintln!("skipped on a block device: losetup: {other:?}");
                None
            }
        }
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        assert!(Command::new("losetup").args(["--detach", &self.0]).status().unwrap().success());
    }
}

#[test]
fn a_block_device_is_an_image_with_a_fixed_length() {
    let directory = on_disk();
    let backing = image(directory.path(), &[3; 1 << 20]);
    let Some(device) = LoopDevice::over(&backing, 4096) else { return };
    let path = Path::new(&device.0);
    assert!(std::fs::metadata(path).unwrap().file_type().is_block_device());
    for kind in [EngineKind::Uring, EngineKind::Aio] {
        let mut file = ImageFile::open(path, DIRECT).unwrap();
        assert_eq!((file.len(), file.alignment().offset), (1 << 20, 4096));
        assert!(file.set_len(1 << 20).is_ok());
        assert!(file.set_len((1 << 20) + 1).is_err());
        assert!(matches!(ImageFile::open(path, DIRECT), Err(FileOpenError::InUse { .. })));
        file.write_at(FileOffset(4090), b"across blocks").unwrap();

        let mut engine = Engine::open(kind, vec![file], 4).unwrap();
        let memory = Segments::zeroed(8192);
        let read = Action::Read { at: FileOffset((1 << 20) - 4096), into: memory.clone() };
        let behind = Action::Deallocate { at: FileOffset(1 << 20), len: 4096 };
        let write = Action::Write { at: FileOffset(1 << 20), from: Segments::zeroed(4096) };
        let results = fixture::run(&mut engine, vec![read, behind, write, Action::SyncData]);
        assert_eq!(results, [Ok(()), Ok(()), Err(disk::FileError::NoSpace), Ok(())]);
        assert_eq!(memory.to_vec(), [vec![3; 4096], vec![0; 4096]].concat());
        drop(engine);
        let mut file = ImageFile::open(path, READ_ONLY).unwrap();
        let mut found = [0; 13];
        file.read_at(FileOffset(4090), &mut found).unwrap();
        assert_eq!(&found, b"across blocks");
    }
}

#[test]
fn reading_an_image_does_not_change_its_access_time() {
    let directory = tempfile::tempdir_in(STORAGES[1]).unwrap();
    let path = fixture::image(directory.path(), &[1; 4096]);
    let opened = ImageFile::open(&path, READ_ONLY).unwrap();
    for file in [opened.try_clone().unwrap(), opened.reopen_read_only().unwrap(), opened] {
        assert!(rustix::fs::fcntl_getfl(&file).unwrap().contains(rustix::fs::OFlags::NOATIME));
    }
}

#[test]
fn deallocating_a_partial_block_of_a_device_is_unsupported() {
    let directory = on_disk();
    let backing = image(directory.path(), &[3; 1 << 20]);
    let Some(device) = LoopDevice::over(&backing, 4096) else { return };
    let path = Path::new(&device.0);
    for (kind, options) in [(EngineKind::Uring, BUFFERED), (EngineKind::Uring, DIRECT), (EngineKind::Aio, DIRECT)] {
        let mut engine = Engine::open(kind, vec![ImageFile::open(path, options).unwrap()], 4).unwrap();
        let part = Action::Deallocate { at: FileOffset(512), len: 8192 };
        let whole = Action::Deallocate { at: FileOffset(4096), len: 4096 };
        let results = fixture::run(&mut engine, vec![part, whole]);
        assert_eq!(results, [Err(disk::FileError::Unsupported), Ok(())]);
    }
}
