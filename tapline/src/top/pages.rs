//! The statistics pages of this machine: found, kept open, and read once a round.
//!
//! It knows files and processes, and neither names nor screens. Invariants: the directories are listed every few
//! seconds only, and histograms are read only for disks that somebody asks about. Whatever lies in a directory, nothing
//! is waited for: a page is a regular file, and is opened without blocking.

use std::collections::{BTreeMap, VecDeque};
use std::fs::{File, Metadata};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use api::health::Seen;
use serde::Deserialize;
use stats::{Delays, Histogram, Kind, ReadError, Reader, Snapshot, Stage};
use uuid::Uuid;

use super::rates::{self, Rates};
use crate::health;

/// Time between two listings of the directories.
const LISTED: Duration = Duration::from_secs(3);
/// How long a disk that has ended is shown.
const ENDED: Duration = Duration::from_secs(5);
/// Intervals that are kept for each disk.
pub const HISTORY: usize = 120;

/// What a page says its disk is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Identity {
    /// Its image, as the command line has it.
    pub image: String,
    /// How its guest reaches it.
    pub transport: String,
    /// Where.
    pub at: String,
    /// Its control socket.
    pub control: Option<String>,
    /// The version of the program that serves it.
    pub program: String,
    /// The serial number by which its guest knows it.
    pub serial: Option<String>,
}

/// A histogram of each kind and stage, and of the whole, as they were read together.
pub type Histograms = BTreeMap<(Kind, Option<Stage>), Histogram>;

/// A disk with a page.
#[derive(Debug)]
pub struct Disk {
    /// Where its page is.
    pub path: PathBuf,
    /// The daemon's number of it.
    pub vbd: Option<Uuid>,
    /// What it is.
    pub identity: Identity,
    /// The last reading.
    pub now: Snapshot,
    /// What happened since the one before.
    pub rates: Option<Rates>,
    /// Requests per second and queue sizes of earlier intervals, the latest last.
    pub history: VecDeque<(f64, f64)>,
    /// What can be seen of its process and of how long its requests take.
    pub seen: Seen,
    /// Since when its process has been gone.
    pub ended: Option<Instant>,
    delays: Delays,
    reader: Reader,
    file: (u64, u64),
    /// Its file is not in its place any more.
    removed: bool,
    round: u64,
    latency: Read<Histogram>,
    stages: Read<Histograms>,
}

/// What is read only if it is asked for: the last reading, in which round it was, and what came since the one before.
#[derive(Debug)]
struct Read<T> {
    last: Option<(u64, T)>,
    since: Option<T>,
}

/// A page that cannot be read, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unread {
    /// Why.
    pub why: String,
    /// Whether another user could.
    pub forbidden: bool,
}

/// All pages.
#[derive(Debug)]
pub struct Pages {
    /// Directories in which they are.
    directories: Vec<PathBuf>,
    /// Pages that were named.
    named: Vec<PathBuf>,
    /// Those that are read.
    pub disks: BTreeMap<PathBuf, Disk>,
    /// Those that cannot be read.
    pub unread: BTreeMap<PathBuf, Unread>,
    listed: Option<Instant>,
    round: u64,
}

/// The directories in which pages are: those of the disks of the daemon with this run directory and of disks without a
/// daemon, or what was given instead of both.
pub fn directories(given: Option<&Path>, run: &Path) -> Vec<PathBuf> {
    match given {
        Some(given) => vec![given.to_owned(), given.join("vbd"), given.join("stats")],
        None => stats::directories(run),
    }
}

impl Pages {
    /// Those in these directories, and those at these paths.
    pub fn new(directories: Vec<PathBuf>, named: Vec<PathBuf>) -> Pages {
        raise_file_limit();
        let (disks, unread) = (BTreeMap::new(), BTreeMap::new());
        Pages { directories, named, disks, unread, listed: None, round: 0 }
    }

    /// Where pages are looked for.
    pub fn places(&self) -> String {
        let places: Vec<String> = self.directories.iter().map(|path| path.display().to_string()).collect();
        places.join(", ")
    }

    /// Reads all counters once.
    pub fn round(&mut self) {
        self.round += 1;
        let is_due = self.listed.is_none_or(|listed| listed.elapsed() >= LISTED);
        if is_due {
            self.listed = Some(Instant::now());
            self.list();
        }
        for (path, disk) in &mut self.disks {
            // One that was opened just now has no interval yet.
            if disk.round == self.round {
                continue;
            }
            disk.round = self.round;
            match disk.reader.snapshot() {
                Ok(now) => disk.take(now, is_due),
                Err(error) => {
                    disk.rates = None;
                    disk.ended.get_or_insert_with(Instant::now);
                    self.unread.insert(path.clone(), Unread::of(&error));
                }
            }
        }
        let named = &self.named;
        self.disks.retain(|path, disk| {
            disk.ended.is_none_or(|ended| ended.elapsed() < ENDED || (named.contains(path) && path.exists()))
        });
    }

    fn list(&mut self) {
        self.unread.clear();
        let mut found: BTreeMap<PathBuf, bool> = self.named.iter().map(|path| (path.clone(), true)).collect();
        for directory in &self.directories {
            match stats::pages_in(directory) {
                Ok(pages) => pages.into_iter().for_each(|path| {
                    found.entry(path).or_insert(false);
                }),
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => drop(self.unread.insert(directory.clone(), Unread::of(&error.into()))),
            }
        }
        for (path, is_named) in found {
            self.look_at(path, is_named);
        }
        for disk in self.disks.values_mut() {
            disk.removed = std::fs::metadata(&disk.path).map_or(true, |file| id(&file) != disk.file);
        }
    }

    /// Opens a page, unless it is open already.
    fn look_at(&mut self, path: PathBuf, is_named: bool) {
        let file = match open(&path) {
            // An empty one is about to be begun.
            Ok(Some((_, file))) if file.len() == 0 && !is_named => return,
            Ok(Some((_, file))) if self.disks.get(&path).is_some_and(|disk| disk.file == id(&file)) => return,
            Ok(Some(opened)) => opened,
            Ok(None) => {
                let why = "it is not a regular file".to_owned();
                self.unread.insert(path, Unread { why, forbidden: false });
                return;
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound && !is_named => return,
            Err(error) => {
                self.unread.insert(path, Unread::of(&error.into()));
                return;
            }
        };
        match Disk::of(path.clone(), file, self.round) {
            Ok(disk) if disk.ended.is_none() || is_named => drop(self.disks.insert(path, disk)),
            Ok(_) | Err(ReadError::NotStarted) => {}
            Err(error) => drop(self.unread.insert(path, Unread::of(&error))),
        }
    }
}

impl Disk {
    fn of(path: PathBuf, (file, metadata): (File, Metadata), round: u64) -> Result<Disk, ReadError> {
        let reader = Reader::of(file)?;
        let now = reader.snapshot()?;
        let mut delays = Delays::default();
        let vbd = path.parent().and_then(Path::file_name).and_then(|name| Uuid::parse_str(name.to_str()?).ok());
        let mut disk = Disk {
            vbd: vbd.filter(|_| path.extension().is_some() && path.ends_with("statistics.page")),
            path,
            identity: Identity::default(),
            seen: health::seen(&mut delays, &now),
            now,
            rates: None,
            history: VecDeque::new(),
            ended: None,
            delays,
            reader,
            file: id(&metadata),
            removed: false,
            round,
            latency: Read { last: None, since: None },
            stages: Read { last: None, since: None },
        };
        disk.identity = identity(&disk.now.identity);
        disk.see_whether_it_ended(true);
        Ok(disk)
    }

    /// Takes the next reading.
    fn take(&mut self, now: Snapshot, look_at_process: bool) {
        let before = std::mem::replace(&mut self.now, now);
        self.rates = rates::between(&before, &self.now);
        self.seen = health::seen(&mut self.delays, &self.now);
        if before.identity != self.now.identity {
            self.identity = identity(&self.now.identity);
        }
        if let Some(rates) = &self.rates {
            let all = rates.all();
            self.history.push_back((all.per_second, all.queue));
            if self.history.len() > HISTORY {
                self.history.pop_front();
            }
        }
        self.see_whether_it_ended(look_at_process || self.now.pid != before.pid);
    }

    fn see_whether_it_ended(&mut self, look_at_process: bool) {
        let gone = match self.now.pid.map(i32::try_from) {
            _ if self.removed => true,
            None => true,
            Some(Ok(pid)) if look_at_process => vm::qemu::process::has_ended(pid),
            Some(Ok(_)) => self.ended.is_some(),
            // No process has such a number; the page is read as long as it is there.
            Some(Err(_)) => false,
        };
        match gone {
            true => drop(self.ended.get_or_insert_with(Instant::now)),
            false => self.ended = None,
        }
    }

    /// The durations of all requests that ended in the last interval; `None` if nobody asked in the round before.
    pub fn latency(&mut self) -> Option<&Histogram> {
        let (reader, now) = (&self.reader, &self.now);
        self.latency.get(self.round, || whole(reader, now), |now, before| now.since(before))
    }

    /// The histograms of each stage and kind of what ended in the last interval.
    pub fn stages(&mut self) -> Option<&Histograms> {
        let (reader, now) = (&self.reader, &self.now);
        self.stages.get(
            self.round,
            || all_histograms(reader, now),
            |now, before| {
                let none = Histogram::default();
                let since = |(key, now): (&_, &Histogram)| (*key, now.since(before.get(key).unwrap_or(&none)));
                now.iter().map(since).collect()
            },
        )
    }

    /// The same since the page was begun, as last read by [`Disk::stages`].
    pub fn stages_of_all_time(&self) -> Option<&Histograms> {
        self.stages.last.as_ref().map(|(_, last)| last)
    }
}

impl<T> Read<T> {
    fn get(&mut self, round: u64, read: impl Fn() -> Option<T>, since: impl Fn(&T, &T) -> T) -> Option<&T> {
        if self.last.as_ref().is_none_or(|(last, _)| *last != round) {
            let now = read()?;
            let before = self.last.take().filter(|(last, _)| last + 1 == round);
            self.since = before.map(|(_, before)| since(&now, &before));
            self.last = Some((round, now));
        }
        self.since.as_ref()
    }
}

impl Unread {
    fn of(error: &ReadError) -> Unread {
        match error {
            ReadError::Failed(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                Unread { why: "permission denied; root can read it".into(), forbidden: true }
            }
            ReadError::Failed(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                Unread { why: "it is cut short".into(), forbidden: false }
            }
            ReadError::Failed(error) => Unread { why: error.to_string(), forbidden: false },
            other => Unread { why: other.to_string(), forbidden: false },
        }
    }
}

/// Durations of all kinds of requests together.
fn whole(reader: &Reader, now: &Snapshot) -> Option<Histogram> {
    let mut sum: Option<Histogram> = None;
    for kind in Kind::ALL.into_iter().filter(|kind| now.kind(*kind).count() > 0) {
        let histogram = reader.histogram(kind, None).ok()?;
        sum = Some(sum.map_or_else(|| histogram.clone(), |sum| sum.with(&histogram)));
    }
    Some(sum.unwrap_or_default())
}

fn all_histograms(reader: &Reader, now: &Snapshot) -> Option<Histograms> {
    let mut all = Histograms::new();
    for kind in Kind::ALL.into_iter().filter(|kind| now.kind(*kind).count() > 0) {
        for stage in Stage::ALL.into_iter().map(Some).chain([None]) {
            all.insert((kind, stage), reader.histogram(kind, stage).ok()?);
        }
    }
    Some(all)
}

/// What the text in a page says; of a text that says nothing, nothing.
pub fn identity(text: &str) -> Identity {
    serde_json::from_str(text).unwrap_or_default()
}

/// Opens a page; `None` if it is no regular file.
fn open(path: &Path) -> io::Result<Option<(File, Metadata)>> {
    let Some(file) = stats::open(path)? else { return Ok(None) };
    let metadata = file.metadata()?;
    Ok(Some((file, metadata)))
}

fn id(file: &Metadata) -> (u64, u64) {
    (file.dev(), file.ino())
}

/// Each page has a descriptor; the limit of most shells is 1,024.
fn raise_file_limit() {
    use rustix::process::{Resource, getrlimit, setrlimit};
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    // Pages beyond the limit are listed as not read.
    setrlimit(Resource::Nofile, limit).unwrap_or_default();
}

#[cfg(test)]
#[path = "pages/test.rs"]
mod test;
