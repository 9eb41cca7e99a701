//! The accelerator that runs the guest's instructions: KVM if that really works, otherwise TCG.
//!
//! An accessible /dev/kvm proves nothing, because there are nested and filtered KVMs; so the firmware is run with it to
//! its end. Invariant: the result comes with its reason, in bounded time, and leaves no process behind.

use std::fmt::{self, Display};
use std::fs::OpenOptions;
use std::io::Read;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::account::Account;
use super::hear::hear;
use crate::qmp::shortened;

/// SeaBIOS prints this after it has tried all boot devices: by then it has run in every processor mode.
const LAST_WORDS: &[u8] = b"No bootable device";

/// The firmware's whole output is a few KiB.
const WORDS_MAX: usize = 1 << 20;

/// The engine that executes the guest's instructions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Accelerator {
    /// The processor.
    Kvm,
    /// QEMU translates them.
    Tcg,
}

/// The verdict, which holds until the machine boots again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Verdict {
    /// The better one that works.
    pub accelerator: Accelerator,
    /// Why, for people.
    pub reason: String,
}

impl Accelerator {
    /// The values of QEMU's `-accel` and `-cpu`: the host's processor, or everything that QEMU can translate.
    pub fn words(self) -> [&'static str; 4] {
        match self {
            Self::Kvm => ["-accel", "kvm", "-cpu", "host"],
            Self::Tcg => ["-accel", "tcg,thread=multi", "-cpu", "max"],
        }
    }
}

impl Display for Accelerator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Kvm => "KVM",
            Self::Tcg => "TCG",
        })
    }
}

/// Finds out, by trying `program` for at most `patience`, as the user as whom it is to run; under a KVM that works it
/// takes a second.
pub fn find(account: Option<&Account>, program: &Path, patience: Duration) -> Verdict {
    let tcg = |reason| Verdict { accelerator: Accelerator::Tcg, reason };
    if let Err(error) = OpenOptions::new().read(true).write(true).open("/dev/kvm") {
        return tcg(format!("/dev/kvm cannot be opened: {error}"));
    }
    match try_out(account, program, Accelerator::Kvm, patience) {
        Ok(()) => Verdict { accelerator: Accelerator::Kvm, reason: "the firmware runs with it".to_owned() },
        Err(why) => tcg(format!("/dev/kvm exists, but the firmware does not run with it: {why}")),
    }
}

/// Whether the firmware runs to its end, or why not.
fn try_out(
    account: Option<&Account>,
    program: &Path,
    accelerator: Accelerator,
    patience: Duration,
) -> Result<(), String> {
    let words = account.map(Account::words).unwrap_or_default();
    let mut command = match words.split_first() {
        Some((first, rest)) => {
            let mut command = Command::new(first);
            command.args(rest).arg(program);
            command
        }
        None => Command::new(program),
    };
    command.args(accelerator.words()).args(["-machine", "pc,hpet=off", "-nodefaults", "-no-user-config"]);
    command.args(["-display", "none", "-m", "32", "-chardev", "stdio,id=words,signal=off"]);
    command.args(["-device", "isa-debugcon,iobase=0x402,chardev=words"]);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().map_err(|error| format!("cannot start {}: {error}", program.display()))?;
    let is_last = |said: &[u8]| said.windows(LAST_WORDS.len()).any(|window| window == LAST_WORDS);
    let heard = hear(&mut child, patience, WORDS_MAX, is_last).map(|heard| is_last(&heard.said));
    let ended = child.kill().and_then(|()| child.wait());
    match (heard, ended) {
        (Ok(true), Ok(_)) => Ok(()),
        (Ok(false), Ok(_)) => Err(last_line(&mut child)),
        (Err(error), _) | (_, Err(error)) => Err(error.to_string()),
    }
}

/// The last line that QEMU printed; it has exited.
fn last_line(child: &mut Child) -> String {
    let mut said = Vec::new();
    let read = child.stderr.as_mut().map_or(Ok(0), |errors| errors.take(1 << 16).read_to_end(&mut said));
    let text = String::from_utf8_lossy(&said);
    match (read, text.lines().rfind(|line| !line.trim().is_empty())) {
        (Ok(_), Some(line)) => shortened(line),
        (Ok(_), None) => "it hangs".to_owned(),
        (Err(error), _) => format!("it has exited, and its output cannot be read: {error}"),
    }
}

#[cfg(test)]
mod test {
    use super::*;

    const QEMU: &str = "qemu-system-x86_64";
    const PATIENCE: Duration = Duration::from_secs(60);

    #[test]
    fn running_firmware_is_detected() {
        if Command::new(QEMU).arg("--version").output().is_err() {
            eprintln!("not run: there is no {QEMU}; install qemu-system-x86");
            return;
        }
        assert_eq!(try_out(None, Path::new(QEMU), Accelerator::Tcg, PATIENCE), Ok(()));
        let verdict = find(None, Path::new(QEMU), Duration::from_secs(20));
        eprintln!("{}: {}", verdict.accelerator, verdict.reason);
        assert!(!verdict.reason.is_empty());
    }

    #[test]
    fn exiting_or_hanging_firmware_is_reported_with_its_output() {
        let room = tempfile::tempdir().unwrap();
        let script = |text: &str| {
            let path = room.path().join("qemu");
            testkit::program::script(&path, text);
            path
        };
        let ended = try_out(None, &script("echo failed to set MSR >&2"), Accelerator::Kvm, PATIENCE);
        assert_eq!(ended, Err("failed to set MSR".to_owned()));
        let hangs = try_out(None, &script("exec sleep 60"), Accelerator::Kvm, Duration::from_millis(100));
        assert_eq!(hangs, Err("it hangs".to_owned()));
        let missing = try_out(None, Path::new("/no/such/qemu"), Accelerator::Kvm, PATIENCE).unwrap_err();
        assert!(missing.contains("cannot start /no/such/qemu"), "{missing}");
    }
}
