//! `xl`, Xen's toolstack: run for one command at a time, each with a time limit.
//!
//! It knows nothing about disks. Invariant: a failed command is reported with its own error message.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

use control::{Error, printable};
use xen::DomId;

use crate::qemu::process::Process;

/// The time limit for one command. Creating a domain with much memory takes seconds, and waits for other commands that
/// do so (xl's lock).
const PATIENCE: Duration = Duration::from_secs(120);

/// Bytes of what a command says that are read: a line for each of Xen's domains at most.
const SAID_MAX: u64 = 8 << 20;

/// Runs the commands of `xl`.
#[derive(Clone, Debug)]
pub struct Xl {
    program: PathBuf,
}

/// The state of a domain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// Its guest runs, or waits for something to do.
    Running,
    /// It was paused.
    Paused,
    /// Its guest is paused while it is saved: it resumes if that fails or was a checkpoint, and is destroyed otherwise.
    Saved,
    /// Its guest has ended, and the domain is still there.
    Down(Reason),
    /// It is being destroyed, or was and another domain still maps pages of it.
    Dying,
}

/// Why a guest has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// It has powered off.
    PowerOff,
    /// It wants to reboot.
    Reboot,
    /// It has started another kernel (kexec), for which the toolstack must recreate its devices.
    SoftReset,
    /// It has crashed, or its watchdog has fired.
    Crash,
    /// Another reason, which no guest of ours should have.
    Other,
}

impl Xl {
    /// The program of that path or name.
    pub fn of(program: &Path) -> Xl {
        Xl { program: program.to_owned() }
    }

    /// Creates a domain, paused, without a background process that monitors it.
    pub fn create_paused(&self, config: &Path) -> Result<(), Error> {
        self.run(&["create", "-q", "-p", "-e", &config.to_string_lossy()]).map(drop)
    }

    /// Lets the guest run.
    pub fn unpause(&self, domain: DomId) -> Result<(), Error> {
        self.run(&["unpause", &domain.to_string()]).map(drop)
    }

    /// Pauses the guest.
    pub fn pause(&self, domain: DomId) -> Result<(), Error> {
        self.run(&["pause", &domain.to_string()]).map(drop)
    }

    /// Requests the guest to power off, without waiting.
    pub fn ask_to_power_off(&self, domain: DomId) -> Result<(), Error> {
        self.run(&["shutdown", &domain.to_string()]).map(drop)
    }

    /// Ends a domain, whatever its guest does.
    pub fn destroy(&self, domain: DomId) -> Result<(), Error> {
        self.run(&["destroy", &domain.to_string()]).map(drop)
    }

    /// The state of a domain; `None` if it does not exist.
    pub fn state(&self, domain: DomId) -> Result<Option<State>, Error> {
        let listed = self.run(&["list"])?;
        Ok(listed.lines().filter_map(state_in).find(|(found, _)| *found == domain).map(|(_, state)| state))
    }

    fn run(&self, words: &[&str]) -> Result<String, Error> {
        let tried = || format!("run `{} {}`", self.program.display(), words.join(" "));
        let failed = |error: std::io::Error| Error::cannot(tried(), error);
        let mut command = Command::new(&self.program);
        command.args(words).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let started = command.spawn();
        let mut child = started.map_err(|error| failed(error).advise("install Xen's tools, or set xl-program"))?;
        let (out, err) = (child.stdout.take(), child.stderr.take());
        let process = i32::try_from(child.id()).map_err(std::io::Error::other).and_then(Process::with_pid);
        let (in_time, out, err) = thread::scope(|scope| {
            let (out, err) = (scope.spawn(|| read(out)), scope.spawn(|| read(err)));
            let in_time = process.and_then(|process| process.wait(PATIENCE));
            if !matches!(in_time, Ok(true)) {
                // A process that has exited cannot be killed.
                child.kill().unwrap_or_default();
            }
            (in_time, out.join().unwrap_or_default(), err.join().unwrap_or_default())
        });
        let status = child.wait().map_err(failed)?;
        match in_time.map_err(failed)? {
            false => {
                Err(Error::cannot(tried(), format!("it did not finish in {} s and was killed", PATIENCE.as_secs())))
            }
            true if status.success() => Ok(out),
            true => {
                let said: Vec<String> = err.lines().chain(out.lines()).map(printable).collect();
                Err(Error::cannot(tried(), format!("{status}: {}", said.join("; "))))
            }
        }
    }
}

fn read(from: Option<impl Read>) -> String {
    let mut bytes = Vec::new();
    if let Some(from) = from {
        // Whatever was read until then is its output.
        from.take(SAID_MAX).read_to_end(&mut bytes).unwrap_or_default();
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// A line of `xl list`: name, number, memory, processors, state, time. Names of others may have blanks. The state is
/// six characters, each a dash or: r(unning), b(locked), p(aused), s(hut down), why, d(ying) (tools/xl/xl_list.c). Why
/// is of SHUTDOWN_* (Xen, sched.h): - power off, r(eboot), s(uspend), c(rash), w(atchdog), S(oft reset).
fn state_in(line: &str) -> Option<(DomId, State)> {
    let mut columns = line.split_whitespace().rev();
    let state = columns.nth(1)?;
    let domain = columns.nth(2)?.parse().ok().map(DomId)?;
    let [_, _, paused, down, why, dying] = *state.as_bytes() else { return None };
    let state = match (dying, down, paused) {
        (b'd', _, _) => State::Dying,
        (_, b's', _) if why == b's' => State::Saved,
        (_, b's', _) => State::Down(match why {
            b'-' => Reason::PowerOff,
            b'r' => Reason::Reboot,
            b'S' => Reason::SoftReset,
            b'c' | b'w' => Reason::Crash,
            _ => Reason::Other,
        }),
        (_, _, b'p') => State::Paused,
        _ => State::Running,
    };
    Some((domain, state))
}

#[cfg(test)]
mod test {
    use super::*;

    /// As written by xl 4.17.
    const LIST: &str = "Name                                        ID   Mem VCPUs\tState\tTime(s)
Domain-0                                     0  1024     1     r-----      35.1
9b1deb4d-3b7d-4bad-9bdd-2b0d7b3dcb6d         1   320     1     -b----       6.3
an odd name 7                                2   320     1     --p---       0.0
9b1deb4d-3b7d-4bad-9bdd-2b0d7b3dcb6e         3   319     1     ---s--       7.9
9b1deb4d-3b7d-4bad-9bdd-2b0d7b3dcb6f         4   319     1     ---sr-       7.9
9b1deb4d-3b7d-4bad-9bdd-2b0d7b3dcb60         5   319     1     ---sc-       7.9
9b1deb4d-3b7d-4bad-9bdd-2b0d7b3dcb61         7   319     1     ---ss-       7.9
9b1deb4d-3b7d-4bad-9bdd-2b0d7b3dcb62         8   319     1     ---sS-       7.9
(null)                                       6     0     1     --ps-d       8.0
";

    #[test]
    fn xl_list_gives_each_domains_state() {
        let states: Vec<(u16, State)> = LIST.lines().filter_map(state_in).map(|(id, state)| (id.0, state)).collect();
        let expected = [
            (0, State::Running),
            (1, State::Running),
            (2, State::Paused),
            (3, State::Down(Reason::PowerOff)),
            (4, State::Down(Reason::Reboot)),
            (5, State::Down(Reason::Crash)),
            (7, State::Saved),
            (8, State::Down(Reason::SoftReset)),
            (6, State::Dying),
        ];
        assert_eq!(states, expected);
    }

    #[test]
    fn a_failed_xl_command_is_quoted() {
        let room = tempfile::tempdir().unwrap();
        let program = room.path().join("xl");
        testkit::program::script(&program, "echo \"no $1 of $2\" >&2\nexit 3");
        let failed = Xl::of(&program).destroy(DomId(7)).unwrap_err();
        assert!(failed.message.ends_with("destroy 7`: exit status: 3: no destroy of 7"), "{failed}");
        let missing = Xl::of(&room.path().join("none")).pause(DomId(7)).unwrap_err();
        assert!(missing.advice.as_deref().unwrap().contains("xl-program"), "{missing}");
    }
}
