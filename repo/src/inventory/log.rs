//! The file of an inventory: read as a whole, appended to line by line, and rewritten when most of it is obsolete.
//!
//! *If killed during an append:* the line is there, or is cut off at the next append; the catalogue still has it. *If
//! killed during a rewrite:* the file is the old or the new one, which have the same contents. *If an append could not
//! be made durable:* it is unknown what is on the disk, so the file is rewritten. *If the file is removed or replaced
//! while the repository is attached:* the same, and the other file is kept as damaged, because the process that has
//! attached a repository uses it exclusively.

use std::collections::{BTreeMap, VecDeque};

use api::{Code, Problem};
use uuid::Uuid;

use super::line::{Changes, Header, VERSION, Versioned, header, parse};
use super::{Contents, Line};
use crate::driver::{Appended, DAMAGED, Directory, INVENTORY};

/// Bytes of the longest one: 100,000 disks many times over.
const LEN_MAX: usize = 1 << 30;

/// The number of heads that are kept when a file is rewritten, so that an older catalogue is recognized.
const HISTORY: usize = 1000;

/// Bytes at the end of a file that identify it: its last hash, and what follows.
const END: usize = 40;

/// How much a file may exceed twice the needed size before it is rewritten.
const SLACK: u64 = 1 << 20;

/// Where a file is: what has been written to it, for certain.
#[derive(Debug)]
pub struct Log {
    /// Its generation.
    pub generation: u64,
    /// The hash over all of it.
    pub head: String,
    history: VecDeque<(u64, String)>,
    /// The known valid length; anything after it was cut off.
    len: u64,
    /// The last of them, which tell the file from any other.
    end: Vec<u8>,
    /// Bytes of its first line.
    first: u64,
    /// It is unknown what is durable: it must be rewritten.
    doubtful: bool,
}

/// The inventory found in a directory.
#[derive(Debug)]
pub enum Read {
    /// No inventory.
    Absent,
    /// A whole one.
    Whole(Box<Log>, Box<Contents>),
    /// A damaged one.
    Damaged(Damage),
}

/// A file with a line that cannot be trusted.
#[derive(Debug)]
pub struct Damage {
    /// The problem.
    pub why: Problem,
    /// The newest generation with a line that can be trusted, and its head.
    newest: Option<(u64, String)>,
    /// The number of lines after that one.
    behind: u64,
}

impl Damage {
    /// Whether a catalogue has all that the file had: it is of generation `generation`, and `known` are heads of its
    /// own. Each line that cannot be trusted is one generation at most.
    pub fn is_known(&self, generation: u64, known: &[(u64, String)]) -> bool {
        let Some((newest, head)) = &self.newest else { return false };
        known.iter().any(|(at, known)| at == newest && known == head)
            && newest.saturating_add(self.behind) <= generation
    }
}

/// Reads the inventory of the repository `sr`. Refuses a newer format, and the inventory of another repository.
pub fn read(directory: &Directory, sr: Uuid) -> Result<Read, Problem> {
    let Some(bytes) = directory.read_file(INVENTORY, LEN_MAX)? else { return Ok(Read::Absent) };
    let path = directory.path().join(INVENTORY).display().to_string();
    let first = bytes.split_inclusive(|byte| *byte == b'\n').next().unwrap_or_default();
    // In a newer format, not even the hash need be at the expected offset.
    let version = serde_json::from_slice(first).map_or(0, |Versioned { version }| version);
    if version > VERSION {
        let what = format!("{path} has version {version}, and this taplined supports version {VERSION}");
        return Err(Problem::new(Code::Unsupported, what).advise("attach it with the taplined version that wrote it"));
    }
    match whole(&bytes, sr) {
        Ok((log, contents)) => Ok(Read::Whole(Box::new(log), Box::new(contents))),
        Err(Fault::Another(other)) => {
            let what = format!("{path} is the inventory of another repository: {other}, not {sr}");
            let advice = "if it was copied here, remove it; that does not affect the images";
            Err(Problem::new(Code::State, what).advise(advice))
        }
        Err(Fault::Damaged(why)) => {
            let why = Problem::failed(format_args!("read the inventory {path}"), why)
                .advise("check the storage; restore the file from a backup, or move it away and scan");
            let (newest, behind) = newest(&bytes);
            Ok(Read::Damaged(Damage { why, newest, behind }))
        }
    }
}

/// More changes than that no repository has had: one each microsecond for 200 years. SQLite keeps numbers up to 2^63.
const GENERATION_MAX: u64 = 1 << 52;

enum Fault {
    Another(Uuid),
    Damaged(String),
}

/// All lines that are whole, if they belong together.
fn whole(bytes: &[u8], sr: Uuid) -> Result<(Log, Contents), Fault> {
    let ended = bytes.iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at.saturating_add(1));
    let complete = bytes.get(..ended).unwrap_or_default();
    let mut lines = complete.split_inclusive(|byte| *byte == b'\n').enumerate();
    let damaged = |(at, why): (usize, String)| Fault::Damaged(format!("line {}: {why}", at.saturating_add(1)));
    let text = |(at, bytes): (usize, &'_ [u8])| {
        String::from_utf8(bytes.to_vec()).map_err(|_| damaged((at, "it is not text".into()))).map(|text| (at, text))
    };
    let Some(first) = lines.next() else { return Err(Fault::Damaged("it has no complete line".into())) };
    let (_, first) = text(first)?;
    let header: Header = parse(&first).map_err(|why| damaged((0, why)))?;
    if header.sr != sr {
        return Err(Fault::Another(header.sr));
    }
    if header.generation > GENERATION_MAX {
        return Err(damaged((0, format!("generation {} is impossibly high", header.generation))));
    }
    let mut contents = Contents {
        words: header.words,
        images: header.images.into_iter().map(|image| (image.uuid, image)).collect(),
        vdis: header.vdis.into_iter().map(|vdi| (vdi.uuid, vdi)).collect(),
    };
    let mut log = Log {
        generation: header.generation,
        head: header.head.clone(),
        history: header.history.into(),
        len: u64::try_from(ended).unwrap_or(u64::MAX),
        end: end_of(complete),
        first: u64::try_from(first.len()).unwrap_or(u64::MAX),
        doubtful: false,
    };
    log.note(header.generation, header.head);
    for line in lines {
        let (at, text) = text(line)?;
        let Changes { generation, before, changes, sum, .. } = parse(&text).map_err(|why| damaged((at, why)))?;
        if generation != log.generation.saturating_add(1) || before != log.head {
            return Err(damaged((at, format!("generation {generation} does not follow the previous line"))));
        }
        changes.into_iter().for_each(|change| contents.apply(change));
        log.note(generation, sum);
    }
    contents.check().map_err(Fault::Damaged)?;
    Ok((log, contents))
}

/// The newest line that is valid by itself, and the number of lines after it, including an incomplete one.
fn newest(bytes: &[u8]) -> (Option<(u64, String)>, u64) {
    let mut heads = BTreeMap::new();
    let lines: Vec<&[u8]> = bytes.split_inclusive(|byte| *byte == b'\n').collect();
    for (at, line) in lines.iter().enumerate() {
        let Ok(text) = std::str::from_utf8(line) else { continue };
        if let Ok(header) = parse::<Header>(text) {
            heads.insert(header.generation, (header.head, at));
        } else if let Ok(line) = parse::<Changes>(text) {
            heads.insert(line.generation, (line.sum, at));
        }
    }
    match heads.pop_last() {
        Some((generation, (head, at))) => {
            let behind = lines.len().saturating_sub(at).saturating_sub(1);
            (Some((generation, head)), u64::try_from(behind).unwrap_or(u64::MAX))
        }
        None => (None, 0),
    }
}

/// The end of the written data, which contains its hash.
fn end_of(bytes: &[u8]) -> Vec<u8> {
    bytes.get(bytes.len().saturating_sub(END)..).unwrap_or_default().to_vec()
}

/// Renames a damaged file for later inspection. If it no longer exists, nothing needs to be kept.
pub fn keep_damaged(directory: &Directory) -> Result<(), Problem> {
    match directory.rename_over(INVENTORY, DAMAGED) {
        Err(problem) if problem.code == Code::NotFound => Ok(()),
        kept => kept,
    }
}

impl Log {
    /// Writes the file as a whole, in the place of the one that is there if any is. `earlier` are heads before this
    /// one.
    pub fn write(
        directory: &Directory,
        sr: Uuid,
        (generation, head): (u64, String),
        contents: &Contents,
        earlier: VecDeque<(u64, String)>,
    ) -> Result<Log, Problem> {
        contents.check().map_err(|why| Problem::failed("encode an inventory", why))?;
        let mut history = earlier;
        history.retain(|(at, _)| *at < generation);
        history.drain(..history.len().saturating_sub(HISTORY));
        let text = header(sr, generation, &head, contents, history.iter().cloned().collect())?;
        directory.replace_file(INVENTORY, text.as_bytes())?;
        let len = u64::try_from(text.len()).unwrap_or(u64::MAX);
        let mut log = Log {
            generation,
            head: head.clone(),
            history,
            len,
            end: end_of(text.as_bytes()),
            first: len,
            doubtful: false,
        };
        log.note(generation, head);
        Ok(log)
    }

    /// The heads that it has had, as far as they are known, the present one among them.
    pub fn history(&self) -> VecDeque<(u64, String)> {
        self.history.clone()
    }

    /// Whether it was at this head, or is.
    pub fn has_been_at(&self, generation: u64, head: &str) -> bool {
        self.history.iter().any(|(at, known)| *at == generation && known == head)
    }

    /// Whether it is unknown what is durable, so that it must be rewritten.
    pub fn is_doubtful(&self) -> bool {
        self.doubtful
    }

    /// Appends the missing lines, durably. The file is rewritten if most of it is obsolete then.
    pub fn append(&mut self, directory: &Directory, sr: Uuid, lines: &[Line]) -> Result<(), Problem> {
        let new: Vec<&Line> = lines.iter().filter(|line| line.generation > self.generation).collect();
        if new.is_empty() {
            return Ok(());
        }
        let mut head = &self.head;
        for (line, generation) in new.iter().zip(self.generation.saturating_add(1)..) {
            if line.before != *head || line.generation != generation {
                self.doubtful = true;
                return Err(Problem::new(Code::Internal, "the inventory and the catalogue have diverged"));
            }
            head = &line.head;
        }
        let bytes: String = new.iter().map(|line| line.text.as_str()).collect();
        match directory.append_file(INVENTORY, self.len, &self.end, bytes.as_bytes()) {
            Ok(()) => {}
            Err(Appended::Nothing(problem)) => return Err(problem),
            Err(Appended::Doubtful(problem)) => {
                self.doubtful = true;
                return Err(problem);
            }
            Err(Appended::Another(problem)) => {
                self.doubtful = true;
                keep_damaged(directory)?;
                return Err(problem);
            }
        }
        self.len = self.len.saturating_add(u64::try_from(bytes.len()).unwrap_or(u64::MAX));
        self.end = end_of(bytes.as_bytes());
        new.into_iter().for_each(|line| self.note(line.generation, line.head.clone()));
        if self.len > self.first.saturating_mul(2).saturating_add(SLACK) {
            self.compact(directory, sr);
        }
        Ok(())
    }

    /// Rewrites the file with its current contents. If that fails it does no harm: it is retried with the next line.
    fn compact(&mut self, directory: &Directory, sr: Uuid) {
        let compacted = read(directory, sr).and_then(|read| match read {
            Read::Whole(log, contents) if log.head == self.head => {
                Log::write(directory, sr, (log.generation, log.head.clone()), &contents, log.history)
            }
            _ => Err(Problem::new(Code::Failed, "the inventory does not contain what was written")),
        });
        match compacted {
            Ok(log) => *self = log,
            Err(problem) => tracing::warn!(%sr, "the inventory was not compacted: {problem}"),
        }
    }

    fn note(&mut self, generation: u64, head: String) {
        (self.generation, self.head) = (generation, head.clone());
        self.history.push_back((generation, head));
        // There may be very many; those of the lines are in the file anyway.
        let surplus = self.history.len().saturating_sub(HISTORY.saturating_mul(64));
        self.history.drain(..surplus);
    }
}
