//! As whom programs of one kind run: as the daemon, all as one user, or each as one of its own.
//!
//! It knows nothing of the programs.

use api::Problem;

use super::numbers::{Chosen, Numbers};
use super::{User, user};

/// As whom programs run.
#[derive(Clone, Debug)]
pub enum Users {
    /// As the daemon does, which cannot change that.
    Own,
    /// All as one.
    One(User),
    /// Each as a user that no other process is.
    Each(Numbers),
}

/// As whom one runs that is about to be started.
#[derive(Debug)]
pub struct As {
    /// The user; that of the daemon if there is none.
    pub user: Option<User>,
    /// It is this program's alone.
    chosen: Option<Chosen>,
}

impl Users {
    /// As two settings say, each given with its name: a user, who goes before, or a range of them.
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

    /// As whom the next one is to run.
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
    /// A process runs as this user now.
    pub fn given_to(self, pid: u32) {
        self.chosen.into_iter().for_each(|chosen| chosen.given_to(pid));
    }
}
