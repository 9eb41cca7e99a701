//! The users that disk processes run as, including those of earlier settings: a process that has a disk's command line
//! and runs as anybody else is none of ours.
//!
//! Everybody may start a process with any command line, also our program with the words of a disk. Only who may become
//! other users, like the daemon, can start one as a user of disks; so that tells, and the program does not. Who listens
//! on the control socket would not tell: sockets are made by the daemon, and a process that waits to take over a disk
//! has none.
//!
//! The file is in the run directory, which nobody else may write: it goes with the processes when the host reboots.

use std::fs;
use std::io;
use std::ops::RangeInclusive;
use std::path::PathBuf;

use api::Problem;

use crate::account::Users;
use crate::account::numbers::user_of;
use crate::config::Config;

/// The name of the file: a line for each setting, with the first and the last uid.
const FILE: &str = "disk-users";

/// Users of disk processes.
#[derive(Debug)]
pub struct Owners(Vec<RangeInclusive<u32>>);

fn path(config: &Config) -> PathBuf {
    config.run_directory.join(FILE)
}

impl Owners {
    /// Those of all daemons that used the run directory since the host booted.
    pub fn of(config: &Config) -> Result<Owners, Problem> {
        match fs::read_to_string(path(config)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Owners(Vec::new())),
            Err(error) => Err(Problem::failed(format_args!("read {}", path(config).display()), error)),
            Ok(text) => Ok(Owners(text.lines().filter_map(parse).collect())),
        }
    }

    /// Adds those that disks are started as from now on. Must be called before the first is started.
    pub fn add(config: &Config, users: &Users) -> Result<(), Problem> {
        let Owners(mut all) = Owners::of(config)?;
        let Some(more) = users.uids().filter(|more| !all.contains(more)) else { return Ok(()) };
        all.push(more);
        let text: String = all.iter().map(|uids| format!("{} {}\n", uids.start(), uids.end())).collect();
        let written = repo::replace::replace_file(&path(config), text.as_bytes(), 0o644);
        written.map_err(|error| Problem::failed(format_args!("write {}", path(config).display()), error))
    }

    /// Whether a process runs as one of them, or as root or the daemon's own user: who is that may do all that the
    /// daemon does, also replace a disk process by another.
    pub fn own(&self, pid: u32) -> bool {
        let trusted = |uid| uid == 0 || uid == rustix::process::geteuid().as_raw();
        user_of(pid).is_some_and(|uid| trusted(uid) || self.0.iter().any(|uids| uids.contains(&uid)))
    }
}

fn parse(line: &str) -> Option<RangeInclusive<u32>> {
    let (first, last) = line.split_once(' ')?;
    Some(first.parse().ok()?..=last.parse().ok()?)
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn users_of_earlier_settings_are_remembered() {
        let room = tempfile::tempdir().unwrap();
        let config = Config { run_directory: room.path().to_owned(), ..Config::default() };
        let all = || Owners::of(&config).unwrap().0;
        assert_eq!(all(), []);
        for users in [Users::One((5, 6)), Users::Own, Users::One((7, 7)), Users::One((5, 6))] {
            Owners::add(&config, &users).unwrap();
        }
        assert_eq!(all(), [5..=5, 7..=7]);
        assert!(Owners::of(&config).unwrap().own(std::process::id()));
    }
}
