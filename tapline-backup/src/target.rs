//! Backup targets on the command line: opened, created, shown; and backups found by their ids.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::sync::Arc;

use arguments::backup::{At, TargetCreate, TargetShow, Threads};
use backup::{Directory, Id, Key, Layout, Name, ObjectStore, Record, Target, prefix};
use control::printable;
use control::size::readable;
use serde_json::json;

use crate::failure::{Exit, Failure};
use crate::output::{print, print_json};
use crate::s3::{S3, SCHEME};

/// What an interrupted creation leaves in a directory.
const MAY_BE_LEFT: [&str; 2] = ["log", "tmp"];

/// What a new file system has.
const OF_FILE_SYSTEM: &str = "lost+found";

/// The least number of digits of an id that stand for it.
const DIGITS_MIN: usize = 8;

/// The most threads that are used unasked: more do not help one stream.
const THREADS_MAX: usize = 8;

/// An open target and the store that it is in.
pub struct Opened {
    /// The target.
    pub target: Target,
    /// Its store.
    pub store: Arc<dyn ObjectStore>,
}

/// Opens the target. Nothing is written.
pub fn open(at: &At) -> Result<Opened, Failure> {
    let store = store(at)?;
    let key = at.key_file.as_deref().map(read_key).transpose()?;
    let target = Target::open(Arc::clone(&store), key.as_ref())?;
    match &at.target_id {
        Some(wanted) if *wanted != target.id().to_string() => {
            let what = format!("{} is another target: {}, not {wanted}", at.target.display(), target.id());
            Err(Failure::new(Exit::Usage, what).advise("check that its storage is mounted"))
        }
        _ => Ok(Opened { target, store }),
    }
}

impl Opened {
    /// Bytes of all packs, which have the chunks.
    pub fn packed(&self) -> Result<u64, Failure> {
        Ok(self.store.list(prefix::PACKS)?.iter().map(|(_, size)| size).sum())
    }
}

fn store(at: &At) -> Result<Arc<dyn ObjectStore>, Failure> {
    Ok(match url(at)? {
        Some(url) => Arc::new(S3::open(url, &at.s3)?),
        None => Arc::new(Directory::open(&at.target)?),
    })
}

/// The store for a new target, in which nothing else is.
fn empty_store(at: &At) -> Result<Arc<dyn ObjectStore>, Failure> {
    let path = &at.target;
    if let Some(url) = url(at)? {
        let store = S3::open(url, &at.s3)?;
        let others = store.others(|name| name.is_of_log() || name.is_temporary())?;
        return match others.iter().find(|name| *name == Name::format().as_str()).or(others.first()) {
            Some(other) => Err(not_empty(path, other)),
            None => Ok(Arc::new(store)),
        };
    }
    let store = Directory::open(path)?;
    check_empty(path, &store)?;
    Ok(Arc::new(store))
}

/// The target as a URL, if it is one.
fn url(at: &At) -> Result<Option<&str>, Failure> {
    let path = &at.target;
    match path.to_str() {
        Some(text) if text.starts_with(SCHEME) => Ok(Some(text)),
        Some(text) if text.contains("://") => {
            let what = format!("cannot open the target {}: only directories and s3:// can be targets", path.display());
            Err(Failure::new(Exit::Usage, what).advise("mount the storage, and give the directory"))
        }
        _ => match at.s3.given() {
            None => Ok(None),
            Some(option) => {
                let what = format!("{option} is for a target in S3, and {} is a directory", path.display());
                Err(Failure::new(Exit::Usage, what).advise("name a bucket as s3://BUCKET or s3://BUCKET/PREFIX"))
            }
        },
    }
}

/// A place for a new target has `found`.
fn not_empty(path: &Path, found: &str) -> Failure {
    if found == Name::format().as_str() {
        return backup::Error::TargetExists.into();
    }
    let what = format!("{} is not empty: it has {}", path.display(), printable(found));
    Failure::new(Exit::Conflict, what).advise("use an empty directory, or an unused prefix in the bucket")
}

fn read_key(path: &Path) -> Result<Key, Failure> {
    Key::read(path).map_err(|error| Failure::new(Exit::Usage, control::in_full(&error)))
}

/// `backup target create`.
pub fn create(create: &TargetCreate) -> Result<Exit, Failure> {
    let store = empty_store(&create.at)?;
    let chunk = u32::try_from(create.chunk_size.0).unwrap_or(u32::MAX);
    let layout = Layout { chunk, level: i32::from(create.compression), ..Layout::default() };
    let key = match (&create.at.key_file, &create.new_key) {
        (Some(file), _) => Some(read_key(file)?),
        (None, Some(file)) => {
            let key = Key::random();
            // Before the target: one without its key would be of no use.
            key.write(file).map_err(|error| Failure::cannot("create the target", error))?;
            Some(key)
        }
        (None, None) => None,
    };
    let target = Target::create(store, layout, key.as_ref()).map_err(|error| {
        let failure = Failure::from(error);
        match &create.new_key {
            Some(file) => failure.advise(format!("the new key is in {}: repeat with --key-file", file.display())),
            None => failure,
        }
    })?;
    if create.at.json {
        print_json(&json!({ "id": target.id(), "layout": target.layout(), "encrypted": target.is_encrypted() }))?;
    } else {
        print(&format!("{}\n", target.id()))?;
    }
    Ok(Exit::Done)
}

/// Refuses a directory with other files: they would be taken for ours, or ours for theirs. An interrupted creation has
/// left log entries and temporary files.
fn check_empty(path: &Path, store: &dyn ObjectStore) -> Result<(), Failure> {
    let failed = |error| Failure::cannot(format_args!("list {}", path.display()), error);
    for entry in fs::read_dir(path).map_err(failed)? {
        let name = entry.map_err(failed)?.file_name();
        let is_left = MAY_BE_LEFT.iter().any(|own| name == *own && is_left_over(&path.join(own), own, store));
        if !is_left && name != OF_FILE_SYSTEM {
            return Err(not_empty(path, &name.to_string_lossy()));
        }
    }
    Ok(())
}

/// Whether all files in a directory are of an interrupted creation.
fn is_left_over(path: &Path, name: &str, store: &dyn ObjectStore) -> bool {
    let Ok(listed) = store.list(&format!("{name}/")) else { return false };
    let known = listed.iter().filter(|(name, _)| name.is_of_log() || name.is_temporary()).count();
    files_below(path).is_ok_and(|all| all == known)
}

/// The number of all that is no directory, below one.
fn files_below(path: &Path) -> std::io::Result<usize> {
    let mut files = 0;
    for entry in fs::read_dir(path)? {
        let entry = entry?;
        files += if entry.file_type()?.is_dir() { files_below(&entry.path())? } else { 1 };
    }
    Ok(files)
}

/// `backup target show`.
pub fn show(show: &TargetShow) -> Result<Exit, Failure> {
    let Opened { target, store } = open(&show.at)?;
    let backups = target.backups()?;
    let packs = store.list(prefix::PACKS)?;
    let stored: u64 = packs.iter().chain(&store.list(prefix::BACKUPS)?).map(|(_, size)| size).sum();
    let disks: BTreeMap<Id, u64> = backups.iter().map(|record| (record.disk, record.len)).collect();
    let virtual_len: u64 = backups.iter().map(|record| record.len).sum();
    if show.at.json {
        return print_json(&json!({
            "id": target.id(),
            "layout": target.layout(),
            "encrypted": target.is_encrypted(),
            "backups": backups.len(),
            "disks": disks.len(),
            "packs": packs.len(),
            "stored": stored,
            "virtual": virtual_len,
        }))
        .map(|()| Exit::Done);
    }
    let layout = target.layout();
    let encryption = if target.is_encrypted() { "XChaCha20-Poly1305" } else { "none" };
    let compression = if layout.level == 0 { "none".to_owned() } else { format!("zstd, level {}", layout.level) };
    print(&format!(
        "id            {}\nencryption    {encryption}\ncompression   {compression}\nchunk size    {}\npack size     {}\n\
         backups       {} of {} disks, {} in all\nstored        {} in {} packs\n",
        target.id(),
        readable(layout.chunk.into()),
        readable(layout.pack.into()),
        backups.len(),
        disks.len(),
        readable(virtual_len),
        readable(stored),
        packs.len(),
    ))?;
    Ok(Exit::Done)
}

/// The backup with this id, or with an id that begins so.
pub fn find(backups: &[Record], word: &str) -> Result<Record, Failure> {
    let is_digits = word.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
    if !is_digits || word.len() < DIGITS_MIN || word.len() > 32 {
        let what = format!(
            "'{}' is not the id of a backup: it has 32 digits, of which the first 8 are enough",
            printable(word)
        );
        return Err(Failure::new(Exit::Usage, what).advise("list the backups with 'tapline backup list TARGET'"));
    }
    let mut found = backups.iter().filter(|record| record.id.to_string().starts_with(word));
    match (found.next(), found.next()) {
        (Some(record), None) => Ok(record.clone()),
        (Some(_), Some(_)) => {
            Err(Failure::new(Exit::Usage, format!("several backups have ids that begin with {word}"))
                .advise("give more digits"))
        }
        (None, _) => Err(Failure::new(Exit::NotFound, format!("the target has no backup {word}"))
            .advise("list the backups with 'tapline backup list TARGET'; it may have been removed")),
    }
}

/// The number of threads to use.
pub fn threads(threads: Threads) -> usize {
    let own = || std::thread::available_parallelism().map_or(1, usize::from).min(THREADS_MAX);
    threads.threads.map_or_else(own, usize::from)
}
