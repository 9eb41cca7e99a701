//! The number of the last commit, in the catalogue and in a file outside of its directory. If they differ when the
//! catalogue is opened, it was replaced by an older copy, and what runs on this host may have been started since.
//!
//! It knows nothing about what runs, nor who replaces a catalogue: a restored backup and a file that was copied by hand
//! are the same to it. Invariant: no commit is answered before its number is in the file. So a catalogue without
//! that commit is never taken for the latest one while something that has followed from the commit may run.
//!
//! The file belongs into the run directory: a reboot of the host removes it together with everything that ran.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

use api::Problem;
use rusqlite::Connection;
use uuid::Uuid;

use super::{Tx, View, failed, meta, set_meta};

/// Under which the number is kept.
const NUMBER: &str = "commit";

/// Under which it is kept that the catalogue was found to be an older copy.
const OLDER: &str = "older";

/// Counts the commits of a catalogue that is open.
#[derive(Debug)]
pub struct LastCommit {
    file: File,
    life: Uuid,
    number: u64,
}

/// A commit: the life of the daemon that made it, and its number in that. Two catalogues that were copies of each other
/// differ in the life as soon as both were used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Numbered {
    life: Uuid,
    number: u64,
}

impl Numbered {
    fn parse(text: &str) -> Option<Numbered> {
        let (life, number) = text.trim_end().split_once(' ')?;
        Some(Numbered { life: life.parse().ok()?, number: number.parse().ok()? })
    }

    /// Of the same length for all numbers: the file is overwritten in place, which needs no space.
    fn text(self) -> String {
        format!("{} {:020}", self.life, self.number)
    }

    /// Whether a catalogue with this number contains every commit that was answered by the time that the file had the
    /// number `told`. The catalogue may be one commit ahead: a daemon may be killed between writing the two.
    fn has_all(self, told: Numbered) -> bool {
        self.life == told.life && (self.number == told.number || self.number == told.number.saturating_add(1))
    }
}

impl LastCommit {
    /// Compares a catalogue with the file, and restarts the count. That the catalogue is older is kept in it until
    /// [`Tx::set_up_to_date`], however often the daemon is killed before.
    pub fn begin(connection: &mut Connection, path: &Path) -> Result<LastCommit, Problem> {
        let tried = |error: io::Error| Problem::failed(format_args!("use {}", path.display()), error);
        let told = match fs::read_to_string(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            // What is no text is no number either.
            Err(error) if error.kind() == io::ErrorKind::InvalidData => None,
            text => Numbered::parse(&text.map_err(tried)?),
        };
        let now = Numbered { life: Uuid::new_v4(), number: 0 };
        let transaction = connection.transaction().map_err(failed)?;
        let kept = meta(&transaction, NUMBER).map_err(failed)?.and_then(|text| Numbered::parse(&text));
        let latest = match (kept, told) {
            (Some(kept), Some(told)) => kept.has_all(told),
            // Without a number in one of them nothing is certain.
            _ => false,
        };
        set_meta(&transaction, NUMBER, &now.text()).map_err(failed)?;
        if !latest {
            set_meta(&transaction, OLDER, "true").map_err(failed)?;
        }
        transaction.commit().map_err(failed)?;
        let file = File::options().create(true).truncate(false).write(true).mode(0o600).open(path).map_err(tried)?;
        let begun = LastCommit { file, life: now.life, number: now.number };
        begun.write().and_then(|()| begun.file.set_len(now.text().len().try_into().unwrap_or(0))).map_err(tried)?;
        Ok(begun)
    }

    /// Counts a commit that is about to be made.
    pub fn count(&self, connection: &Connection) -> rusqlite::Result<()> {
        let next = Numbered { life: self.life, number: self.number.saturating_add(1) };
        set_meta(connection, NUMBER, &next.text())
    }

    /// The commit was made.
    pub fn made(&mut self) {
        self.number = self.number.saturating_add(1);
        // If this fails, the next daemon takes the catalogue for an older one, and ends nothing that runs.
        self.write().ok();
    }

    fn write(&self) -> io::Result<()> {
        self.file.write_all_at(Numbered { life: self.life, number: self.number }.text().as_bytes(), 0)
    }
}

impl View<'_> {
    /// Whether the catalogue may be older than what runs on this host.
    pub fn may_be_older(&self) -> Result<bool, Problem> {
        Ok(self.meta(OLDER)?.is_some())
    }
}

impl Tx<'_> {
    /// Everything that runs is in the catalogue now.
    pub fn set_up_to_date(&mut self) -> Result<(), Problem> {
        self.execute("DELETE FROM meta WHERE key = ?1", [OLDER]).map(drop)
    }
}

#[cfg(test)]
mod test {
    use std::path::PathBuf;

    use super::*;
    use crate::Catalogue;

    struct Bed {
        room: tempfile::TempDir,
    }

    impl Bed {
        fn path(&self, name: &str) -> PathBuf {
            self.room.path().join(name)
        }

        fn open(&self) -> Catalogue {
            Catalogue::open_with(&self.path("catalogue.db"), Some(&self.path("last-commit")), || {}).unwrap()
        }

        /// Makes commits in a life of a daemon that takes everything in and is killed.
        async fn live(&self, commits: usize) {
            let catalogue = self.open();
            catalogue.write(|tx| tx.set_up_to_date()).await.unwrap();
            for _ in 0..commits {
                catalogue.write(|tx| tx.set_meta("a", "1")).await.unwrap();
            }
            catalogue.end();
        }

        async fn is_older(&self) -> bool {
            let catalogue = self.open();
            let older = catalogue.read(|view| view.may_be_older()).await.unwrap();
            catalogue.end();
            older
        }

        fn copy(&self, from: &str, to: &str) {
            for suffix in ["-wal", "-shm"] {
                fs::remove_file(self.path(&format!("{to}{suffix}"))).ok();
            }
            fs::copy(self.path(from), self.path(to)).unwrap();
        }
    }

    #[tokio::test]
    async fn a_catalogue_that_was_not_replaced_is_the_latest() {
        let bed = Bed { room: tempfile::tempdir().unwrap() };
        assert!(bed.is_older().await, "nothing is known about the first");
        for commits in [0, 1, 3] {
            bed.live(commits).await;
            assert!(!bed.is_older().await, "{commits}");
        }
        // A refused change, and one that changes nothing, are no commits.
        let catalogue = bed.open();
        let refused = |_: &mut Tx<'_>| Err::<(), _>(Problem::new(api::Code::State, "no"));
        catalogue.write(refused).await.unwrap_err();
        catalogue.write(|_| Ok(())).await.unwrap();
        let told = Numbered::parse(&fs::read_to_string(bed.path("last-commit")).unwrap()).unwrap();
        assert_eq!(told.number, 0);
        catalogue.end();
        // The daemon was killed before the number of its last commit was in the file.
        bed.live(5).await;
        let text = fs::read_to_string(bed.path("last-commit")).unwrap();
        let last = Numbered::parse(&text).unwrap();
        let before = Numbered { number: last.number - 1, ..last };
        fs::write(bed.path("last-commit"), before.text()).unwrap();
        assert!(!bed.is_older().await);
    }

    #[tokio::test]
    async fn an_older_copy_is_noticed_until_everything_is_taken_in() {
        let bed = Bed { room: tempfile::tempdir().unwrap() };
        bed.live(3).await;
        bed.copy("catalogue.db", "same-life");
        bed.live(3).await;
        bed.copy("catalogue.db", "newer");
        bed.copy("same-life", "catalogue.db");
        // It stays so for a daemon that is killed before it has looked.
        assert!(bed.is_older().await && bed.is_older().await);
        bed.live(3).await;
        assert!(!bed.is_older().await);
        // With as many commits, but other ones.
        bed.copy("newer", "catalogue.db");
        assert!(bed.is_older().await);
        bed.live(0).await;
        fs::remove_file(bed.path("last-commit")).unwrap();
        assert!(bed.is_older().await);
        bed.live(0).await;
        fs::write(bed.path("last-commit"), [0xff; 80]).unwrap();
        assert!(bed.is_older().await);
        bed.live(0).await;
        assert!(!bed.is_older().await, "{}", fs::read_to_string(bed.path("last-commit")).unwrap());
    }
}
