//! Host users that programs run as: looked up by name the way the host's own programs do, or an unused uid from a
//! range.
//!
//! It knows nothing about the programs. Names are looked up with `getent`, which uses whatever sources the host is
//! configured for: files, LDAP, a domain. The C library could do it in-process, but only with unsafe code and without a
//! time limit.

mod existing;
pub mod numbers;
mod users;

use std::fs::File;
use std::io::{Read, Seek};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use api::{Code, Problem};

pub use numbers::Range;
pub use users::{As, Users};

/// A user and its group.
pub type User = (u32, u32);

/// Timeout for an answer of the name service.
const TO_ANSWER: Duration = Duration::from_secs(30);

/// Interval between checks whether `getent` has exited.
const LOOK_AGAIN: Duration = Duration::from_millis(5);

/// Maximum size of an answer in bytes: all users of a large directory.
const ANSWER_MAX: u64 = 64 << 20;

/// The exit status of `getent` if some of the names are unknown (getent(1)); the others are printed.
const NOT_FOUND: i32 = 2;

/// The uid and gid of the user that a setting names.
pub fn user(setting: &str, name: &str) -> Result<User, Problem> {
    let numbers = |line: &str| {
        let mut fields = line.trim_end().split(':').skip(2);
        Some((fields.next()?.parse().ok()?, fields.next()?.parse().ok()?))
    };
    found(setting, "user", name, look_up("passwd", name)?.as_deref().and_then(numbers))
}

/// The gid of the group that a setting names.
pub fn group(setting: &str, name: &str) -> Result<u32, Problem> {
    let number = |line: &str| line.trim_end().split(':').nth(2)?.parse().ok();
    found(setting, "group", name, look_up("group", name)?.as_deref().and_then(number))
}

fn found<N>(setting: &str, kind: &str, name: &str, numbers: Option<N>) -> Result<N, Problem> {
    numbers.ok_or_else(|| {
        Problem::new(Code::Invalid, format!("{setting}: no {kind} named {name}"))
            .advise(format!("set one that 'getent' finds on this host, or create it with {kind}add"))
    })
}

/// The entry for a name in one of the system's databases, if there is one.
fn look_up(database: &str, name: &str) -> Result<Option<String>, Problem> {
    let found = entries(database, &[name.to_owned()])?;
    Ok(Some(found).filter(|found| !found.is_empty()))
}

/// The entries with these names or ids in one of the system's databases, one per line; without any, all that its
/// sources list.
fn entries(database: &str, keys: &[String]) -> Result<String, Problem> {
    let tried = match keys {
        [] => format!("list getent {database}"),
        [first, ..] => format!("look up {first} by getent {database}"),
    };
    let failed = |why: &dyn std::fmt::Display| {
        Problem::failed(&tried, why)
            .advise("getent is part of the C library (libc-bin); check that the name service answers")
    };
    // No pipe: a large answer could fill it and block the process.
    let answer = rustix::fs::memfd_create("getent", rustix::fs::MemfdFlags::CLOEXEC).map_err(|error| failed(&error))?;
    let mut answer = File::from(answer);
    let output = answer.try_clone().map_err(|error| failed(&error))?;
    let mut command = Command::new("getent");
    command.args([database, "--"]).args(keys).stdin(Stdio::null()).stdout(output).stderr(Stdio::null());
    let mut child = command.spawn().map_err(|error| failed(&error))?;
    let deadline = Instant::now() + TO_ANSWER;
    let status = loop {
        match child.try_wait().map_err(|error| failed(&error))? {
            Some(status) => break status,
            None if Instant::now() >= deadline => {
                child.kill().and_then(|()| child.wait()).map_err(|error| failed(&error))?;
                return Err(failed(&format_args!("no answer in {} s", TO_ANSWER.as_secs())));
            }
            None => std::thread::sleep(LOOK_AGAIN),
        }
    };
    if !matches!(status.code(), Some(0 | NOT_FOUND)) {
        return Err(failed(&status));
    }
    let mut text = Vec::new();
    answer.rewind().map_err(|error| failed(&error))?;
    answer.take(ANSWER_MAX).read_to_end(&mut text).map_err(|error| failed(&error))?;
    // Names in other encodings than UTF-8 still have their ids.
    Ok(String::from_utf8_lossy(&text).into_owned())
}

/// Whether a user has full rights.
pub fn is_own(uid: u32) -> bool {
    uid == 0 || uid == rustix::process::geteuid().as_raw()
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn root_is_uid_0() {
        assert_eq!(user("disk-user", "root").unwrap(), (0, 0));
        assert_eq!(group("api.group", "root").unwrap(), 0);
    }

    #[test]
    fn an_unknown_name_is_reported_with_its_setting() {
        let refused = user("disk-user", "no such user").unwrap_err();
        assert_eq!((refused.code, refused.detail.as_str()), (Code::Invalid, "disk-user: no user named no such user"));
        assert_eq!(group("api.group", "no such group").unwrap_err().code, Code::Invalid);
        assert_eq!(user("disk-user", "--help").unwrap_err().code, Code::Invalid);
    }
}
