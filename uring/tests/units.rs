//! On storage with an O_DIRECT unit of 4096 bytes, sectors of 512 bytes can be read and written concurrently, and files
//! get exact lengths.

mod fixture;

use std::collections::BTreeMap;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;

use disk::{Action, DATA_FILE, FileDone, FileId, FileOffset, FileOp, Io, OpId, ShapePolicy, Until};
use fastrand::Rng;
use fixture::{DIRECT, pattern};
use memory::Segments;
use uring::{Engine, EngineKind, ImageFile};

const SECTOR: usize = 512;
const ENGINES: [EngineKind; 2] = [EngineKind::Uring, EngineKind::Aio];

/// A loop device with sectors of 4096 bytes, optionally with a mounted file system.
struct Device {
    name: String,
    directory: tempfile::TempDir,
    mounted: bool,
}

impl Device {
    /// Returns `None`, with a message, if the system does not allow one.
    fn new() -> Option<Device> {
        let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let back = directory.path().join("back");
        std::fs::File::create(&back).unwrap().set_len(512 << 20).unwrap();
        let output = Command::new("losetup").args(["--find", "--show", "--sector-size", "4096"]).arg(&back).output();
        match output {
            Ok(output) if output.status.success() => {
                let name = String::from_utf8(output.stdout).unwrap().trim().to_owned();
                Some(Device { name, directory, mounted: false })
            }
            other => {
                eprintln!("skipped on large sectors: losetup: {other:?}");
                None
            }
        }
    }

    fn mounted(program: &str) -> Option<Device> {
        let mut device = Device::new()?;
        let place = device.directory.path().join("files");
        std::fs::create_dir(&place).unwrap();
        run(Command::new(program).arg("-q").arg(&device.name));
        run(Command::new("mount").arg(&device.name).arg(&place));
        device.mounted = true;
        Some(device)
    }

    fn file(&self, name: &str) -> std::path::PathBuf {
        self.directory.path().join("files").join(name)
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        if self.mounted {
            run(Command::new("umount").arg(self.file("")));
        }
        run(Command::new("losetup").arg("--detach").arg(&self.name));
    }
}

fn run(command: &mut Command) {
    assert!(command.status().unwrap().success(), "{command:?}");
}

fn open(path: &Path) -> ImageFile {
    let file = ImageFile::open(path, DIRECT).unwrap();
    assert_eq!(file.alignment().offset, 4096, "{} takes sectors of 512", path.display());
    file
}

/// Scope: 3000 operations of up to 20 sectors, up to 16 at once, without overlaps, on an engine's file from `base` on:
/// a file of `model`'s length that grows to `sectors`, or a device of that size.
fn work(engine: &mut Engine, base: FileOffset, model: &mut Vec<u8>, sectors: usize) {
    let is_device = engine.file(FileId(0)).unwrap().device_len().is_some();
    let mut random = Rng::with_seed(1);
    let mut busy: BTreeMap<u64, (usize, usize, Option<Segments>)> = BTreeMap::new();
    let mut done: Vec<FileDone> = Vec::new();
    for id in 0..3000 {
        let count = 1 + random.usize(..20);
        let (from, to) = (random.usize(..sectors - count), count);
        let (from, to) = (from * SECTOR, (from + to) * SECTOR);
        let memory = Segments::copy_of(&pattern(to - from, id));
        let (at, len) = (u64::try_from(from).unwrap(), u64::try_from(to - from).unwrap());
        let action = match random.usize(..8) {
            0 if to <= model.len() && !is_device => Action::Deallocate { at: base + at, len },
            1 => Action::SyncData,
            2..5 => Action::Read { at: base + at, into: memory.clone() },
            _ => Action::Write { at: base + at, from: memory.clone() },
        };
        let free = !busy.values().any(|(begin, end, _)| *begin < to && from < *end);
        if free && busy.len() < 16 {
            let read = matches!(action, Action::Read { .. }).then(|| memory.clone());
            let op = FileOp { id: OpId(id), file: FileId(0), action: action.clone() };
            if engine.push(op).is_ok() {
                let range = if matches!(action, Action::SyncData) { (0, 0) } else { (from, to) };
                busy.insert(id, (range.0, range.1, read));
                change(model, from, &action);
            }
        }
        let until = if random.usize(..3) == 0 { Until::Any } else { Until::Now };
        engine.reap(if busy.is_empty() { Until::Now } else { until }, &mut done).unwrap();
        done.drain(..).for_each(|done| check_completed(done, &mut busy, model));
    }
    while !busy.is_empty() {
        engine.reap(Until::Any, &mut done).unwrap();
        done.drain(..).for_each(|done| check_completed(done, &mut busy, model));
    }
    let file = engine.remove(FileId(0)).expect("an operation is still in flight");
    assert!(rustix::fs::fcntl_getfl(&file).unwrap().contains(rustix::fs::OFlags::DIRECT));
}

fn change(model: &mut Vec<u8>, at: usize, action: &Action) {
    let bytes = match action {
        Action::Write { from, .. } => from.to_vec(),
        Action::Deallocate { len, .. } => vec![0; usize::try_from(*len).unwrap()],
        Action::Read { .. } | Action::SyncData => return,
    };
    model.resize(model.len().max(at + bytes.len()), 0);
    model[at..at + bytes.len()].copy_from_slice(&bytes);
}

fn check_completed(done: FileDone, busy: &mut BTreeMap<u64, (usize, usize, Option<Segments>)>, model: &[u8]) {
    assert_eq!(done.result, Ok(()), "{:?}", done.op);
    let (from, to, read) = busy.remove(&done.op.id.0).unwrap();
    let Some(memory) = read else { return };
    let expected: Vec<u8> = (from..to).map(|at| model.get(at).copied().unwrap_or(0)).collect();
    assert!(memory.to_vec() == expected, "the data read at {from} is wrong");
}

#[test]
fn a_file_is_read_and_written_in_sectors_and_has_the_exact_length() {
    for program in ["/usr/sbin/mkfs.ext4", "/usr/sbin/mkfs.xfs"] {
        let Some(device) = Device::mounted(program) else { return };
        for kind in ENGINES {
            println!("{kind:?} on {program}");
            let path = device.file("image");
            let mut model = pattern(100 * SECTOR, 7);
            std::fs::write(&path, &model).unwrap();
            let mut engine = Engine::open(kind, vec![open(&path)], 8).unwrap();
            work(&mut engine, FileOffset(0), &mut model, 333);
            assert!(std::fs::read(&path).unwrap() == model);
        }
    }
}

#[test]
fn a_data_file_is_read_and_written_in_sectors_through_all_stages() {
    let Some(device) = Device::mounted("/usr/sbin/mkfs.ext4") else { return };
    let (image, data) = (device.file("image"), device.file("data"));
    let header = pattern(8 * SECTOR, 5);
    std::fs::write(&image, &header).unwrap();
    for kind in ENGINES {
        let mut model = pattern(100 * SECTOR, 7);
        std::fs::write(&data, &model).unwrap();
        let mut engine = Engine::open(kind, vec![open(&image).with_data_file(open(&data))], 8).unwrap();
        engine.set_shape(ShapePolicy { split: Some(4 << 10), merge: Some(4 << 10) });
        (0..2).for_each(|_| engine.start_lane().unwrap());
        engine.prefer_lanes();
        work(&mut engine, DATA_FILE, &mut model, 333);
        assert!(engine.shape_counts().splits > 0 && engine.lane_operations().iter().any(|count| *count > 0));
        assert!(std::fs::read(&data).unwrap() == model);
        assert!(std::fs::read(&image).unwrap() == header);
    }
}

#[test]
fn a_device_is_read_and_written_in_sectors() {
    let Some(device) = Device::new() else { return };
    for kind in ENGINES {
        let mut model = vec![0; 400 * SECTOR];
        ImageFile::open(Path::new(&device.name), DIRECT).unwrap().write_at(FileOffset(0), &model).unwrap();
        let mut engine = Engine::open(kind, vec![open(Path::new(&device.name))], 8).unwrap();
        work(&mut engine, FileOffset(0), &mut model, 400);
        drop(engine);
        let mut found = vec![0; model.len()];
        std::fs::File::open(&device.name).unwrap().read_exact_at(&mut found, 0).unwrap();
        assert!(found == model);
    }
}

#[test]
fn offline_writes_do_not_extend_a_file_beyond_its_data() {
    let Some(device) = Device::mounted("/usr/sbin/mkfs.ext4") else { return };
    let path = device.file("image");
    let mut model = pattern(9 * SECTOR, 3);
    std::fs::write(&path, &model).unwrap();
    let mut file = ImageFile::open(&path, DIRECT).unwrap();
    for (at, len) in [(0, 1), (8 * SECTOR + 100, 7), (5000, 3 << 20), (model.len() - 1, 5), (4 << 20, 1 << 20)] {
        let bytes = pattern(len, 9);
        file.write_at(FileOffset(u64::try_from(at).unwrap()), &bytes).unwrap();
        model.resize(model.len().max(at + len), 0);
        model[at..at + len].copy_from_slice(&bytes);
        assert!(rustix::fs::fcntl_getfl(&file).unwrap().contains(rustix::fs::OFlags::DIRECT));
    }
    assert!(std::fs::read(&path).unwrap() == model);
}
