//! Tests of the whole crate: a world of hosts on one target, and what must hold after anything that happens to them.
//!
//! Invariants checked by [`World::check`]: every published backup restores bit for bit to the moment that it claims; a
//! backup that was acknowledged and not removed is published; a verification is clean; a repeated backup succeeds;
//! after prunes nothing is left that no backup refers to.

#![allow(clippy::cast_possible_truncation, reason = "images of tests have a few KiB")]

mod crash;
mod damage;
mod hosts;
mod model;
pub(crate) mod seed;

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::io;
use std::ops::Range;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};

use crate::planted::Bug;
use crate::{
    Base, Control, Error, Extent, Id, Job, Key, Layout, Memory, Prune, Pruned, Reader, Record, Sink, Source, Target,
};

/// Small, so that few bytes have many chunks, pages and packs.
const LAYOUT: Layout = Layout { chunk: 4096, page: 4, pack: 3 * 4096, level: 1 };
const CHUNK: usize = 4096;

/// A disk in memory.
#[derive(Clone)]
struct Image(Vec<u8>);

impl Source for Image {
    fn len(&self) -> u64 {
        self.0.len() as u64
    }

    fn extents(&self, range: Range<u64>) -> io::Result<Vec<Extent>> {
        let bytes = &self.0[range.start as usize..range.end as usize];
        let extent = |part: &[u8]| Extent { len: part.len() as u64, is_zero: part.iter().all(|byte| *byte == 0) };
        Ok(bytes.chunks(1024).map(extent).collect())
    }

    fn read_at(&self, at: u64, buffer: &mut [u8]) -> io::Result<()> {
        buffer.copy_from_slice(&self.0[at as usize..][..buffer.len()]);
        Ok(())
    }
}

/// A restored disk; checks the order of calls.
#[derive(Default)]
struct Restored(Vec<u8>);

impl Sink for Restored {
    fn write(&mut self, at: u64, bytes: &[u8]) -> io::Result<()> {
        assert_eq!(at, self.0.len() as u64);
        self.0.extend(bytes);
        Ok(())
    }

    fn zero(&mut self, at: u64, len: u64) -> io::Result<()> {
        assert_eq!(at, self.0.len() as u64);
        self.0.resize(self.0.len() + len as usize, 0);
        Ok(())
    }
}

/// An image of chunks that are each filled with one letter, `.` for a hole; the first bytes differ within a chunk.
fn image(letters: &str) -> Image {
    let chunk = |letter: u8| match letter {
        b'.' => vec![0; CHUNK],
        _ => (0..CHUNK).map(|at| if at % 7 == 0 { letter } else { (at % 251) as u8 }).collect(),
    };
    Image(letters.bytes().flat_map(chunk).collect())
}

fn with_control<T>(run: impl FnOnce(&mut Control<'_>) -> T) -> T {
    run(&mut Control { cancel: &AtomicBool::new(false), progress: &mut |_| {} })
}

const DISK: Id = Id::from_bytes([0xd1; 16]);

/// A full backup of an image whose moment is `time`, in one thread.
fn job(disk: Id, time: u64, image: &Image) -> Job<'_> {
    Job {
        disk,
        label: "disk",
        time,
        properties: None,
        moment: None,
        source: image,
        base: None,
        threads: 1,
        avoided: HashSet::new(),
    }
}

/// Makes a backup of an image whose moment is `time`.
fn back_up(target: &Target, disk: Id, time: u64, image: &Image, base: Option<Base>) -> Result<Record, Error> {
    let job = Job { properties: Some("{}"), base, ..job(disk, time, image) };
    with_control(|control| target.back_up(&job, control))
}

fn restore(target: &Target, id: Id) -> Result<Vec<u8>, Error> {
    let mut sink = Restored::default();
    with_control(|control| Reader::open(target, id, 1 << 20)?.restore(&mut sink, 2, control))?;
    Ok(sink.0)
}

fn prune(target: &Target, remove: &[Id], now: u64, grace: u64) -> Result<Pruned, Error> {
    with_control(|control| target.prune(&Prune { remove: &|_| remove.to_vec(), now, grace }, control))
}

/// A backup of an image whose last chunk has fewer bytes than the others, and its bytes.
pub(crate) fn sample(letters: &str, cut: usize) -> (Reader, Vec<u8>) {
    let world = World::new(None);
    let mut disk = image(letters);
    disk.0.truncate(disk.0.len() - cut);
    let record = back_up(&world.target(), DISK, 1, &disk, None).unwrap();
    (Reader::open(&world.target(), record.id, 1 << 20).unwrap(), disk.0)
}

/// The extents of a range as its bytes have them, chunk by chunk.
pub(crate) fn extents_of(bytes: &[u8], range: Range<u64>) -> Vec<Extent> {
    let mut extents: Vec<Extent> = Vec::new();
    for (number, chunk) in bytes.chunks(CHUNK).enumerate() {
        let begin = (number * CHUNK) as u64;
        let end = (begin + chunk.len() as u64).min(range.end);
        let len = end.saturating_sub(begin.max(range.start));
        let is_zero = chunk.iter().all(|byte| *byte == 0);
        match extents.last_mut() {
            _ if len == 0 => {}
            Some(last) if last.is_zero == is_zero => last.len += len,
            _ => extents.push(Extent { len, is_zero }),
        }
    }
    extents
}

/// The base of an incremental backup on a record; what differs between the images has changed.
fn base_on(record: &Record, old: &Image, new: &Image) -> Base {
    let pairs = old.0.chunks(512).zip(new.0.chunks(512)).enumerate().filter(|(_, (old, new))| old != new);
    let changed = pairs.map(|(at, _)| at as u64 * 512..(at as u64 + 1) * 512).collect();
    Base { backup: record.id, content: record.content, changed }
}

/// A target with hosts, and what must be on it.
struct World {
    memory: Memory,
    key: Option<Key>,
    bug: Option<Bug>,
    /// What each moment is.
    moments: Arc<Mutex<BTreeMap<u64, Image>>>,
    /// Backups that were acknowledged and not removed.
    acknowledged: Arc<Mutex<BTreeSet<Id>>>,
}

impl World {
    fn new(bug: Option<Bug>) -> World {
        World::encrypted(bug, None)
    }

    fn encrypted(bug: Option<Bug>, key: Option<Key>) -> World {
        let memory = Memory::new();
        Target::create(Arc::new(memory.host()), LAYOUT, key.as_ref()).unwrap();
        World { memory, key, bug, moments: Arc::default(), acknowledged: Arc::default() }
    }

    /// The same world, of which one host does something else.
    fn copy(&self) -> World {
        World {
            memory: self.memory.copy(),
            key: self.key.clone(),
            bug: self.bug,
            moments: Arc::new(Mutex::new(self.moments.lock().unwrap().clone())),
            acknowledged: Arc::new(Mutex::new(self.acknowledged.lock().unwrap().clone())),
        }
    }

    /// A sound host.
    fn target(&self) -> Target {
        self.on(self.memory.host()).unwrap()
    }

    /// A host on this handle.
    fn on(&self, memory: Memory) -> Result<Target, Error> {
        let mut target = Target::open(Arc::new(memory), self.key.as_ref())?;
        target.bug = self.bug;
        Ok(target)
    }

    fn back_up(&self, target: &Target, time: u64, image: &Image, base: Option<Base>) -> Result<Record, Error> {
        self.moments.lock().unwrap().insert(time, image.clone());
        let record = back_up(target, DISK, time, image, base)?;
        self.acknowledged.lock().unwrap().insert(record.id);
        Ok(record)
    }

    fn prune(&self, target: &Target, remove: &[Id], now: u64, grace: u64) -> Result<Pruned, Error> {
        remove.iter().for_each(|id| {
            self.acknowledged.lock().unwrap().remove(id);
        });
        prune(target, remove, now, grace)
    }

    /// Checks everything that must hold at any time; the error names the first violation.
    fn holds(&self) -> Result<(), String> {
        let target = self.target();
        let told = |what: &str, error: Error| format!("{what}: {error}");
        let records = target.backups().map_err(|error| told("list", error))?;
        for id in self.acknowledged.lock().unwrap().iter() {
            if !records.iter().any(|record| record.id == *id) {
                return Err(format!("acknowledged backup {id} is not there"));
            }
        }
        for record in &records {
            let restored = restore(&target, record.id).map_err(|error| told("restore", error))?;
            if restored != self.moments.lock().unwrap()[&record.time].0 {
                return Err(format!("the backup of moment {} restores to something else", record.time));
            }
        }
        let verified = with_control(|control| target.verify(1, control)).map_err(|error| told("verify", error))?;
        if verified.is_clean() { Ok(()) } else { Err(format!("verify: {verified:?}")) }
    }

    /// Also: backups and prunes can be repeated, and leave nothing behind.
    fn check(&self) -> Result<(), String> {
        self.holds()?;
        let target = self.target();
        self.back_up(&target, 900, &image("ABCDEFgh.J"), None).map_err(|error| format!("a later backup: {error}"))?;
        self.holds()?;
        for now in [1_000_000, 2_000_000, 3_000_000] {
            self.prune(&target, &[], now, 1000).map_err(|error| format!("a later prune: {error}"))?;
        }
        self.holds()?;
        self.is_tidy()
    }

    /// Whether there is nothing that no backup refers to.
    fn is_tidy(&self) -> Result<(), String> {
        let target = self.target();
        let records = target.backups().map_err(|error| error.to_string())?;
        // What remains on a target from which all else is removed is the least that it can have.
        let names = self.memory.names();
        let count = |prefix: &str| names.iter().filter(|name| name.as_str().starts_with(prefix)).count();
        if count("tmp/") != 0 || count("backups/") != records.len() || count("log/") != 2 {
            return Err(format!("something is left of {} backups: {names:?}", records.len()));
        }
        let mut live = HashSet::new();
        for record in &records {
            let index = crate::index::Index::read(&target, record.id).map_err(|error| error.to_string())?;
            let chunks = crate::chunks::Chunks::load(&target, |_| false).map_err(|error| error.to_string())?;
            for (page, digest) in index.pages.iter().enumerate().filter(|(_, digest)| **digest != crate::Digest::HOLE) {
                live.insert(*digest);
                let Ok(Some(page)) = index.page(&target, &chunks, page as u64) else {
                    return Err("a page is gone".into());
                };
                live.extend(page);
            }
        }
        for name in names.iter().filter(|name| name.as_str().starts_with("packs/")) {
            let size = self.memory.bytes(name).unwrap().len() as u64;
            let rows = crate::chunks::read_table(&target, name, size).unwrap().map_err(|damage| damage.0)?;
            let all: u64 = rows.iter().map(|row| u64::from(row.len)).sum();
            let used: u64 = rows.iter().filter(|row| live.contains(&row.digest)).map(|row| u64::from(row.len)).sum();
            if used * 2 < all {
                return Err(format!("{name} has {used} of {all} bytes that are referred to"));
            }
        }
        Ok(())
    }
}
