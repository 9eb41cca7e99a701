//! The users that programs of one kind run as: the daemon's own, a common one, or an exclusive one for each process.
//!
//! It knows nothing about the programs.

use api::Problem;

use super::numbers::{Chosen, Numbers};
use super::{User, user};

/// The users that programs run as.
#[derive(Clone, Debug)]
pub enum Users {
    /// The daemon's own user, which it cannot change.
    Own,
    /// One user for all.
    One(User),
    /// An exclusive uid for each process.
    Each(Numbers),
}

/// The user that a program is about to run as.
#[derive(Debug)]
pub struct As {
    /// The user; `None` is the daemon's own.
    pub user: Option<User>,
    /// Exclusive to this program.
    chosen: Option<Chosen>,
}

impl Users {
    /// From two settings, each given with its name: a single user, which takes precedence, or a range.
    pub fn of(named: (&'static str, Option<&str>), range: (&'static str, &str)) -> Result<Users, Problem> {
        match named {
            _ if !rustix::process::geteuid().is_root() => Ok(Users::Own),
            (setting, Some(name)) => {
                let user = user(setting, name)?;
                if user.0 == 0 {
                    tracing::warn!(
                        "{setting} is root: a process that is broken into would own the host; set another user"
                    );
                }
                Ok(Users::One(user))
            }
            (instead, None) => Ok(Users::Each(Numbers::of(range.0, range.1, instead)?)),
        }
    }

    /// The uids that a program may run as; `None` if only the daemon's.
    pub fn uids(&self) -> Option<std::ops::RangeInclusive<u32>> {
        match self {
            Users::Own => None,
            Users::One((uid, _)) => Some(*uid..=*uid),
            Users::Each(numbers) => Some(numbers.all()),
        }
    }

    /// Chooses the user of the next program.
    pub fn choose(&self) -> Result<As, Problem> {
        Ok(match self {
            Users::Own => As { user: None, chosen: None },
            Users::One(user) => As { user: Some(*user), chosen: None },
            Users::Each(numbers) => {
                let chosen = numbers.choose()?;
                As { user: Some(chosen.user()), chosen: Some(chosen) }
            }
        })
    }
}

impl As {
    /// Assigns the user to a process that was started.
    pub fn given_to(self, pid: u32) {
        self.chosen.into_iter().for_each(|chosen| chosen.given_to(pid));
    }
}
