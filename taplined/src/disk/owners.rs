//! The users that disk processes run as, including those of earlier settings: a process that has a disk's command
//! line but another user is not one of ours.
//!
//! Any user may start our program with the command line of a disk. Only a process that may change its user, like the
//! daemon, can start one as a disk user; so the user is what identifies it. The owner of the control socket would
//! not: sockets are created by the daemon, and a process that waits to take over a disk has none.
//!
//! The file is in the run directory, which only the daemon may write: it disappears with the processes when the host
//! reboots.

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
    /// The users of all daemons that used the run directory since the host booted.
    pub fn of(config: &Config) -> Result<Owners, Problem> {
        match fs::read_to_string(path(config)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Owners(Vec::new())),
            Err(error) => Err(Problem::failed(format_args!("read {}", path(config).display()), error)),
            Ok(text) => Ok(Owners(text.lines().filter_map(parse).collect())),
        }
    }

    /// Adds the users that disks are started as. Must be called before the first is started.
    pub fn add(config: &Config, users: &Users) -> Result<(), Problem> {
        let Owners(mut all) = Owners::of(config)?;
        let Some(more) = users.uids().filter(|more| !all.contains(more)) else { return Ok(()) };
        all.push(more);
        let text: String = all.iter().map(|uids| format!("{} {}\n", uids.start(), uids.end())).collect();
        let written = repo::replace::replace_file(&path(config), text.as_bytes(), 0o644);
        written.map_err(|error| Problem::failed(format_args!("write {}", path(config).display()), error))
    }

    /// Whether a process runs as one of these users, or as root or the daemon's own user, who may do everything that
    /// the daemon does, including replacing a disk process.
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
