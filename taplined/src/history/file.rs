//! The file of the history: a JSON line for each minute, in two files of at most a day each.
//!
//! Invariant: a file consists of complete lines, except that a crash may have truncated the last one, which is
//! dropped. A file with anything else is set aside and restarted. Nothing is synced: a power loss costs minutes.

use std::fs::{self, OpenOptions};
use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::{DISKS_MAX, KEPT, Minute};

/// The current file and the previous one.
const NAMES: [&str; 2] = ["history.jsonl", "history.old.jsonl"];

/// Maximum length of a line: a UUID and six numbers for each disk.
const LINE_MAX: u64 = 160 * DISKS_MAX as u64;

/// A line of the file.
#[derive(Serialize, Deserialize)]
struct Line {
    minute: i64,
    disks: Vec<(Uuid, Minute)>,
}

/// A minute's number since 1970, and the VBDs that were busy in it.
pub type RecordedMinute = (i64, Vec<(Uuid, Minute)>);

/// The file to which minutes are appended.
#[derive(Debug)]
pub struct File {
    directory: PathBuf,
    /// Number of minutes in it.
    lines: i64,
    /// A failure was logged; the next is logged only after a success.
    is_failing: bool,
}

impl File {
    /// Opens the files of a directory; returns their entries from a minute on, in the order written.
    pub fn open(directory: &Path, from: i64) -> (File, Vec<RecordedMinute>) {
        let [now, before] = NAMES.map(|name| read(&directory.join(name)));
        let Ok(lines) = i64::try_from(now.len()) else { unreachable!("not many more than KEPT") };
        let kept = before.into_iter().chain(now).map(|line| (line.minute, line.disks));
        let kept = kept.filter(|(minute, _)| *minute >= from).collect();
        (File { directory: directory.to_owned(), lines, is_failing: false }, kept)
    }

    /// Appends a minute. A failure is logged; the next call tries again.
    #[must_use]
    pub fn append(mut self, minute: i64, disks: &[(Uuid, Minute)]) -> File {
        match self.try_append(minute, disks) {
            Ok(()) => self.is_failing = false,
            Err(error) if !self.is_failing => {
                tracing::warn!(%error, "the history cannot be written to {}", self.directory.display());
                self.is_failing = true;
            }
            Err(_) => {}
        }
        self
    }

    fn try_append(&mut self, minute: i64, disks: &[(Uuid, Minute)]) -> io::Result<()> {
        let [now, before] = NAMES.map(|name| self.directory.join(name));
        if self.lines >= KEPT {
            fs::rename(&now, before)?;
            self.lines = 0;
        }
        let mut line = serde_json::to_vec(&Line { minute, disks: disks.to_vec() })?;
        line.push(b'\n');
        let mut file = OpenOptions::new().append(true).create(true).mode(0o600).open(&now)?;
        let len = file.metadata()?.len();
        self.lines += 1;
        // A partial line would make the file count as damaged.
        file.write_all(&line).inspect_err(|_| file.set_len(len).unwrap_or_default())
    }
}

/// The lines of a file. A truncated last line is removed; a damaged file is set aside, which is logged.
fn read(path: &Path) -> Vec<Line> {
    let parsed = fs::File::open(path).and_then(|file| parse(BufReader::new(file)));
    match parsed {
        Ok((lines, len)) => {
            let cut = || OpenOptions::new().write(true).open(path)?.set_len(len);
            if let Err(error) = cut() {
                tracing::warn!(%error, "the end of the history {} cannot be removed", path.display());
            }
            lines
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => Vec::new(),
        Err(error) => {
            let aside = path.with_extension("damaged");
            let renamed = fs::rename(path, &aside);
            tracing::warn!(%error, "the history {} is damaged and begun again; it is kept as {}{}", path.display(),
                aside.display(), renamed.err().map(|error| format!(": {error}")).unwrap_or_default());
            Vec::new()
        }
    }
}

/// The complete lines and their total length in bytes.
fn parse(mut file: impl BufRead) -> io::Result<(Vec<Line>, u64)> {
    let (mut lines, mut len) = (Vec::new(), 0);
    let mut text = Vec::new();
    loop {
        text.clear();
        let read = io::Read::take(&mut file, LINE_MAX).read_until(b'\n', &mut text)?;
        if text.last() != Some(&b'\n') {
            let is_cut = u64::try_from(read).is_ok_and(|read| read < LINE_MAX);
            return is_cut.then_some((lines, len)).ok_or_else(|| io::Error::other("a line is too long"));
        }
        lines.push(serde_json::from_slice(&text)?);
        len += read as u64;
        if i64::try_from(lines.len()).is_ok_and(|lines| lines > KEPT) {
            return Err(io::Error::other("it has more than a day"));
        }
    }
}

#[cfg(test)]
mod test {
    use super::*;

    fn minutes(kept: &[RecordedMinute]) -> Vec<i64> {
        kept.iter().map(|(minute, _)| *minute).collect()
    }

    fn some() -> Vec<(Uuid, Minute)> {
        vec![(Uuid::from_u128(7), Minute(1, 2, 3, 4, 5, 6))]
    }

    #[test]
    fn minutes_are_read_again_and_a_torn_line_is_removed() {
        let room = tempfile::tempdir().unwrap();
        let (file, kept) = File::open(room.path(), 0);
        assert!(kept.is_empty());
        drop(file.append(10, &some()).append(11, &some()));
        let path = room.path().join(NAMES[0]);
        let whole = fs::read(&path).unwrap();
        for cut in [whole.len() - 1, whole.len() / 2 + 1] {
            fs::write(&path, &whole[..cut]).unwrap();
            let (file, kept) = File::open(room.path(), 0);
            assert_eq!(minutes(&kept), [10]);
            drop(file.append(12, &some()));
            assert_eq!(minutes(&File::open(room.path(), 0).1), [10, 12]);
        }
        fs::write(&path, &whole).unwrap();
        let (_, kept) = File::open(room.path(), 11);
        assert_eq!(kept, [(11, some())]);
    }

    #[test]
    fn a_damaged_file_is_set_aside_and_begun_again() {
        let room = tempfile::tempdir().unwrap();
        let path = room.path().join(NAMES[0]);
        let long = vec![b'x'; usize::try_from(LINE_MAX).unwrap() + 1];
        for damage in [&b"{\"minute\":1,\"disks\":[]}\nnothing\n"[..], &long, b"\xff\n"] {
            fs::write(&path, damage).unwrap();
            let (file, kept) = File::open(room.path(), 0);
            assert!(kept.is_empty() && !path.exists() && room.path().join("history.damaged").exists());
            drop(file.append(3, &some()));
            assert_eq!(minutes(&File::open(room.path(), 0).1), [3]);
        }
    }

    #[test]
    fn two_files_of_a_day_are_kept() {
        let room = tempfile::tempdir().unwrap();
        let (mut file, _) = File::open(room.path(), 0);
        for minute in 0..3 * KEPT + 5 {
            file = file.append(minute, &some());
        }
        let (_, kept) = File::open(room.path(), 0);
        assert_eq!(minutes(&kept), (2 * KEPT..3 * KEPT + 5).collect::<Vec<_>>());
        assert_eq!(fs::read_dir(room.path()).unwrap().count(), 2);
    }
}
