//! Backups of the catalogue, and restoring one.
//!
//! Invariants: a backup gets its name when it is completely durable and has been read back; a replaced file is kept
//! under another name; a catalogue is never combined with the leftovers of another one (`-wal`), which SQLite would
//! take for its own.
//!
//! A backup is restored as follows; after a crash in any step, the state is as described:
//!
//! 1. it is copied next to the catalogue, read, and upgraded to the current schema: the catalogue is unchanged;
//! 2. the current file is renamed: there is no catalogue, starting is refused and the restore can be repeated;
//! 3. the files next to it are renamed too: the same;
//! 4. the copy gets the catalogue's name.

use std::fs::{self, File, Permissions};
use std::io;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use api::{Backup, BackupReason, Code, Problem};
use jiff::Timestamp;
use jiff::civil::DateTime;
use jiff::tz::TimeZone;
use rusqlite::{Connection, OpenFlags};

use super::seal::beside;
use super::sound::{self, Look};
use super::{Catalogue, count_start, failed, migrate, version_of};
use crate::replace::rename;

/// The suffix of unfinished files.
const UNFINISHED: &str = ".unfinished";

/// The suffixes of SQLite's files and ours for a catalogue.
const BESIDE: [&str; 3] = ["-wal", "-shm", ".seal"];

/// How moments are written in names: the order of names is that of moments.
const MOMENT: &str = "%Y%m%dT%H%M%SZ";

fn moment(at: Timestamp) -> String {
    at.strftime(MOMENT).to_string()
}

fn file_name(made: Timestamp, reason: BackupReason) -> String {
    format!("catalogue-{}-{reason}.db", moment(made))
}

/// The time and reason in a file's name, if it is a backup.
fn of_name(name: &str) -> Option<(Timestamp, BackupReason)> {
    let (made, reason) = name.strip_prefix("catalogue-")?.strip_suffix(".db")?.split_once('-')?;
    let made = DateTime::strptime(MOMENT, made).ok()?.to_zoned(TimeZone::UTC).ok()?;
    Some((made.timestamp(), reason.parse().ok()?))
}

/// The copies in a directory, the newest first; none if it is not there. Those from the future come last: they were
/// made with a wrong clock, and may be older than all others.
pub fn list(directory: &Path) -> Result<Vec<Backup>, Problem> {
    list_at(directory, Timestamp::now())
}

fn list_at(directory: &Path, now: Timestamp) -> Result<Vec<Backup>, Problem> {
    let tried = |error| Problem::failed(format_args!("list {}", directory.display()), error);
    let entries = match fs::read_dir(directory) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        other => other.map_err(tried)?,
    };
    let mut found = Vec::new();
    for entry in entries {
        let entry = entry.map_err(tried)?;
        let Some((made, reason)) = entry.file_name().to_str().and_then(of_name) else { continue };
        let file = entry.path().display().to_string();
        found.push(Backup { file, created: made, reason, size: entry.metadata().map_err(tried)?.len() });
    }
    found.sort_by(|one, other| {
        (one.created > now, other.created, &other.file).cmp(&(other.created > now, one.created, &one.file))
    });
    Ok(found)
}

/// Makes a copy of a catalogue, which may be in use, and removes surplus old copies.
pub fn write(catalogue: &Path, directory: &Path, reason: BackupReason, kept: u32) -> Result<Backup, Problem> {
    // Rounded as in its name.
    let made = Timestamp::from_second(Timestamp::now().as_second()).unwrap_or_default();
    let path = directory.join(file_name(made, reason));
    let tried = format!("create the backup {}", path.display());
    make_directory(directory)
        .and_then(|()| remove_unfinished(directory))
        .map_err(|error| Problem::failed(&tried, error))?;
    let unfinished = beside(&path, UNFINISHED);
    let written = copy_within(catalogue, &unfinished, &tried)
        .and_then(|()| rename(&unfinished, &path).map_err(|error| Problem::failed(&tried, error)));
    if let Err(problem) = written {
        // A leftover does no harm.
        fs::remove_file(&unfinished).ok();
        return Err(problem);
    }
    remove_old(directory, kept, made)?;
    let size = fs::metadata(&path).map_err(|error| Problem::failed(&tried, error))?.len();
    Ok(Backup { file: path.display().to_string(), created: made, reason, size })
}

/// Accessible to its owner only.
fn make_directory(directory: &Path) -> io::Result<()> {
    fs::create_dir_all(directory)?;
    fs::set_permissions(directory, Permissions::from_mode(0o700))
}

/// Removes leftovers of killed processes: no other process creates a backup now.
fn remove_unfinished(directory: &Path) -> io::Result<()> {
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        if entry.file_name().to_str().is_some_and(|name| name.starts_with("catalogue-") && name.contains(UNFINISHED)) {
            remove_if_there(&entry.path())?;
        }
    }
    Ok(())
}

/// Lets SQLite copy the contents without free pages, concurrently with other users, then reads the copy like a start
/// would.
fn copy_within(catalogue: &Path, to: &Path, tried: &str) -> Result<(), Problem> {
    let why = |error: io::Error| Problem::failed(tried, error);
    // SQLite takes an empty file for none, and leaves its mode.
    File::options().write(true).create_new(true).mode(0o600).open(to).map_err(why)?;
    let source = Connection::open_with_flags(catalogue, OpenFlags::SQLITE_OPEN_READ_ONLY).map_err(failed)?;
    let told = to.to_str().ok_or_else(|| Problem::failed(tried, "its path is not UTF-8"))?;
    source.execute("VACUUM INTO ?1", [told]).map_err(failed)?;
    drop(source);
    let copy = Connection::open_with_flags(to, OpenFlags::SQLITE_OPEN_READ_ONLY).map_err(failed)?;
    sound::check_pages(&copy, Look::Whole)?;
    drop(copy);
    sync(to).map_err(why)
}

/// Keeps the newest backup of each of `kept` days, and as many of those made on request or before a schema change.
/// Daily ones from the future are kept in addition, as many; of the others they are the first to go.
fn remove_old(directory: &Path, kept: u32, now: Timestamp) -> Result<(), Problem> {
    let kept = usize::try_from(kept).unwrap_or(usize::MAX);
    let (mut days, mut others): (Vec<String>, [usize; 3]) = (Vec::new(), [0; 3]);
    for backup in list_at(directory, now)? {
        let keep = match backup.reason {
            BackupReason::Daily if backup.created > now => count(&mut others[2]) <= kept,
            BackupReason::Daily => {
                let day = backup.created.strftime("%Y%m%d").to_string();
                let newest = days.last() != Some(&day);
                if newest {
                    days.push(day);
                }
                newest && days.len() <= kept
            }
            BackupReason::Asked => count(&mut others[0]) <= kept,
            BackupReason::Schema => count(&mut others[1]) <= kept,
        };
        if !keep {
            let tried = format!("remove the backup {}", backup.file);
            remove_if_there(Path::new(&backup.file)).map_err(|error| Problem::failed(tried, error))?;
        }
    }
    Ok(())
}

fn count(number: &mut usize) -> usize {
    *number = number.saturating_add(1);
    *number
}

/// Whether there is no data at `path`: no file, an empty one, or one without tables.
pub fn is_nothing(path: &Path) -> bool {
    match fs::metadata(path) {
        Err(error) => error.kind() == io::ErrorKind::NotFound,
        Ok(found) if found.len() == 0 => true,
        Ok(_) => has_no_table(path).unwrap_or(false),
    }
}

fn has_no_table(path: &Path) -> rusqlite::Result<bool> {
    let connection = Connection::open_with_flags(path, OpenFlags::SQLITE_OPEN_READ_ONLY)?;
    connection.query_row("SELECT count(*) = 0 FROM sqlite_schema", [], |row| row.get(0))
}

/// Creates the future catalogue from a backup, and checks that it can be opened. The start counter is raised, so that
/// no event number is reused.
pub fn prepare(from: &Path, catalogue: &Path) -> Result<PathBuf, Problem> {
    let tried = format!("restore {}", from.display());
    let why = |error: io::Error| Problem::failed(&tried, error);
    let new = clear_new(catalogue)?;
    // A manual copy of a running daemon's files may have the latest commits in the second one.
    for suffix in ["", "-wal"] {
        match fs::copy(beside(from, suffix), beside(&new, suffix)) {
            Err(error) if !suffix.is_empty() && error.kind() == io::ErrorKind::NotFound => {}
            other => drop(other.map_err(why)?),
        }
    }
    fs::set_permissions(&new, Permissions::from_mode(0o600)).map_err(why)?;
    let mut connection = Connection::open(&new).map_err(failed)?;
    sound::check_pages(&connection, Look::Whole)?;
    let version = version_of(&connection, from)?;
    if version == 0 {
        let what = format!("cannot {tried}: it is not a Tapline catalogue");
        return Err(
            Problem::new(Code::Invalid, what).advise("see 'tapline host backups', or look in the directory 'backups'")
        );
    }
    migrate(&mut connection, version).map_err(failed)?;
    sound::check_rows(&connection)?;
    live_later(&mut connection)?;
    // Alone it is the whole catalogue.
    connection.pragma_update(None, "journal_mode", "DELETE").map_err(failed)?;
    drop(connection);
    sync(&new).map_err(why)?;
    Ok(new)
}

/// The name of a file that is to be the catalogue, with nothing that has it.
pub fn clear_new(catalogue: &Path) -> Result<PathBuf, Problem> {
    let new = beside(catalogue, UNFINISHED);
    for suffix in ["", "-wal", "-shm", "-journal", ".seal"] {
        let left = beside(&new, suffix);
        remove_if_there(&left).map_err(|error| Problem::failed(format_args!("remove {}", left.display()), error))?;
    }
    Ok(new)
}

/// Numbers of events of lives to come are higher than those of any life of which this catalogue may not know: it counts
/// the starts at least as if there had been one each hour since 1970.
fn live_later(connection: &mut Connection) -> Result<(), Problem> {
    let counted = count_start(connection).map_err(failed)?;
    let hours = u64::try_from(Timestamp::now().as_second()).unwrap_or(0) / 3600;
    let lives = hours.max(counted.saturating_add(1000)).to_string();
    connection.execute("UPDATE meta SET value = ?1 WHERE key = 'starts'", [lives]).map(drop).map_err(failed)
}

/// Turns a new catalogue, created next to the one it will replace, into a single file, and returns that.
pub fn finish(made: Catalogue, catalogue: &Path) -> Result<PathBuf, Problem> {
    // This closes its connections and stops its writer thread.
    let new = beside(catalogue, UNFINISHED);
    made.end();
    let mut connection = Connection::open(&new).map_err(failed)?;
    connection.busy_timeout(std::time::Duration::from_secs(10)).map_err(failed)?;
    live_later(&mut connection)?;
    connection.pragma_update(None, "journal_mode", "DELETE").map_err(failed)?;
    drop(connection);
    sync(&new).map_err(|error| Problem::failed("make a catalogue durable", error))?;
    Ok(new)
}

/// Renames the current catalogue and its files; `None` if there is none.
pub fn set_aside(catalogue: &Path, why: &str) -> Result<Option<PathBuf>, Problem> {
    let tried = format!("move {} aside", catalogue.display());
    let aside = beside(catalogue, &format!(".before-{why}-{}", moment(Timestamp::now())));
    let mut moved = false;
    for suffix in std::iter::once("").chain(BESIDE) {
        match rename(&beside(catalogue, suffix), &beside(&aside, suffix)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(Problem::failed(tried, error)),
            Ok(()) => moved = true,
        }
    }
    Ok(moved.then_some(aside))
}

/// Makes a prepared file the catalogue, and keeps the previous one. Returns the name under which it is kept.
pub fn replace(new: &Path, catalogue: &Path, why: &str) -> Result<Option<PathBuf>, Problem> {
    let tried = format!("rename {} to {}", new.display(), catalogue.display());
    let aside = set_aside(catalogue, why)?;
    rename(new, catalogue).map_err(|error| Problem::failed(&tried, error))?;
    Ok(aside)
}

/// Makes durable what a file holds.
fn sync(path: &Path) -> io::Result<()> {
    File::open(path)?.sync_all()
}

fn remove_if_there(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod test {
    use super::*;

    fn names(directory: &Path) -> Vec<String> {
        // After all of them, but for those that are from the future whatever the time is.
        let found = list_at(directory, moment_of("2026-11-30T00:00:00Z")).unwrap();
        found.iter().map(|backup| backup.file.rsplit('/').next().unwrap().to_owned()).collect()
    }

    fn moment_of(text: &str) -> Timestamp {
        text.parse().unwrap()
    }

    fn make(directory: &Path, names: &[&str]) {
        for name in names {
            fs::write(directory.join(name), "").unwrap();
        }
    }

    #[test]
    fn the_newest_backup_of_each_day_and_some_requested_ones_are_kept() {
        let room = tempfile::tempdir().unwrap();
        let all = [
            "catalogue-20261120T100000Z-daily.db",
            "catalogue-20261121T100000Z-daily.db",
            "catalogue-20261121T110000Z-asked.db",
            "catalogue-20261121T120000Z-asked.db",
            "catalogue-20261121T130000Z-asked.db",
            "catalogue-20261122T100000Z-daily.db",
            "catalogue-20261122T110000Z-daily.db",
            "catalogue-20261122T120000Z-schema.db",
        ];
        make(room.path(), &all);
        make(room.path(), &["catalogue-x-daily.db", "notes"]);
        assert_eq!(names(room.path()).len(), all.len());
        remove_old(room.path(), 2, moment_of("2026-11-22T12:30:00Z")).unwrap();
        let kept: Vec<&str> = [7, 6, 4, 3, 1].map(|at: usize| all[at]).to_vec();
        assert_eq!(names(room.path()), kept);
        // The clock was set back.
        make(room.path(), &["catalogue-20261123T100000Z-daily.db", "catalogue-20261120T100000Z-daily.db"]);
        remove_old(room.path(), 2, moment_of("2026-11-21T12:30:00Z")).unwrap();
        let daily: Vec<String> = names(room.path()).into_iter().filter(|name| name.contains("daily")).collect();
        let days = ["23", "22", "21", "20"].map(|day| format!("catalogue-202611{day}T1"));
        assert!(daily.iter().zip(&days).all(|(name, day)| name.starts_with(day)) && daily.len() == 4, "{daily:?}");
        assert!(room.path().join("notes").exists());
    }

    #[test]
    fn backups_from_the_future_neither_displace_others_nor_come_first() {
        let room = tempfile::tempdir().unwrap();
        let all = [
            "catalogue-20261122T100000Z-asked.db",
            "catalogue-20261121T100000Z-asked.db",
            "catalogue-21260101T100000Z-asked.db",
            "catalogue-21250101T100000Z-asked.db",
        ];
        make(room.path(), &all);
        assert_eq!(names(room.path()), all);
        remove_old(room.path(), 3, moment_of("2026-11-22T12:30:00Z")).unwrap();
        assert_eq!(names(room.path()), all[..3]);
    }

    #[tokio::test]
    async fn a_backup_is_a_private_snapshot_of_the_catalogue() {
        let room = tempfile::tempdir().unwrap();
        let (path, backups) = (room.path().join("catalogue.db"), room.path().join("backups"));
        let catalogue = Catalogue::open(&path).unwrap();
        catalogue.write(|tx| tx.set_meta("a", "1")).await.unwrap();
        // One before was killed.
        fs::create_dir(&backups).unwrap();
        for left in ["", "-journal"] {
            fs::write(backups.join(format!("catalogue-20261120T100000Z-daily.db.unfinished{left}")), "x").unwrap();
        }
        let made = write(&path, &backups, BackupReason::Asked, 7).unwrap();
        assert_eq!(fs::read_dir(&backups).unwrap().count(), 1);
        catalogue.write(|tx| tx.set_meta("a", "2")).await.unwrap();
        catalogue.close().await.unwrap();
        drop(catalogue);
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!((mode(&backups), mode(Path::new(&made.file))), (0o700, 0o600));
        let new = prepare(Path::new(&made.file), &path).unwrap();
        let aside = replace(&new, &path, "restore").unwrap().unwrap();
        for (path, value) in [(&path, "1"), (&aside, "2")] {
            let catalogue = Catalogue::open(path).unwrap();
            let found = catalogue.read(|view| view.meta("a")).await.unwrap();
            assert_eq!(found.as_deref(), Some(value), "{}", path.display());
        }
        assert_eq!(names(&backups).len(), 1);
    }

    #[test]
    fn a_file_that_is_not_a_catalogue_is_not_restored() {
        let room = tempfile::tempdir().unwrap();
        let (from, path) = (room.path().join("from"), room.path().join("catalogue.db"));
        for bytes in
            ["", "nothing of ours, and longer than a header of SQLite's, which has a hundred bytes and no more....."]
        {
            fs::write(&from, bytes.repeat(50)).unwrap();
            let refused = prepare(&from, &path).unwrap_err();
            assert!([Code::Invalid, Code::Damaged].contains(&refused.code), "{refused}");
            assert!(!path.exists());
        }
    }
}
