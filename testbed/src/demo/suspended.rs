//! Saves the memory of a real guest while it writes and reads, once while it is stopped and once while it runs, and
//! continues it in another QEMU.
//!
//! Checks that the guest was not booted again, and that its disk and memory have the expected contents. The memory of a
//! running guest is correct only if everything that its disk's process has written to it is in the dirty log.

use std::fs::File;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use vm::qemu::machine::{QemuVm, Saving};

use super::machines::{Bed, Bound, said_in};
use super::story::{Failure, Story};
use crate::guest::Job;
use crate::tapline::DiskProcess;

/// Timeout for a guest under TCG on a loaded machine.
const PATIENCE: Duration = Duration::from_secs(300);

const POLL: Duration = Duration::from_millis(50);

/// Rounds that the guest does before and after its memory is saved.
const ROUNDS: u64 = 3;

/// Size of the disk in bytes.
const LEN: u64 = 16 << 20;

impl Story<'_> {
    /// Saves the memory of a guest and continues from it, twice.
    pub fn suspended(&mut self) -> Result<(), Failure> {
        self.progress.step("a guest whose memory is saved while it is at work");
        let job = Job { name: "suspend", script: include_str!("../../guest/jobs/suspend.sh"), parameters: Vec::new() };
        let mut bed = self.bed(&job, 1, LEN)?;
        let qemu = Path::new("qemu-system-x86_64");
        let mut bound = Bound(Some(QemuVm::start(qemu, &bed.hardware, &bed.directory, PATIENCE)?));
        self.wait_for_rounds(&bed, &mut bound, 0)?;
        let booted = said_in(&bed.console, "boot")?;
        for (live, claim) in [
            (false, "saved while stopped, it continues in another QEMU"),
            (true, "saved while running, it continues in another QEMU"),
        ] {
            let Some(mut machine) = bound.0.take() else { unreachable!("it was put there") };
            bed.hardware.machine = Some(machine.kind()?.machine);
            let file = self.save(&mut machine, live)?;
            machine.end()?;
            let rounds = rounds(&bed)?;
            // The descriptors share one offset, which is after the saved data.
            std::io::Seek::rewind(&mut &file).map_err(|source| self.failed("rewind", source))?;
            let started =
                QemuVm::start_as(None, qemu, &bed.hardware, &bed.directory, PATIENCE, Some(&file), &|| false)?;
            bound.0.insert(started).resume()?;
            self.wait_for_rounds(&bed, &mut bound, rounds)?;
            let now = said_in(&bed.console, "boot")?;
            self.claim(claim, now == booted, || format!("it was booted again: {booted:?}, {now:?}"))?;
        }
        let wrong = said_in(&bed.console, "bad")?;
        self.claim("it finds on its disk and in its memory what it has put there", wrong.is_none(), || {
            format!("{wrong:?}; see {}", bed.console.display())
        })?;
        drop(bound);
        bed.disks.into_values().try_for_each(DiskProcess::stop)?;
        Ok(())
    }

    /// Saves the memory of a machine; unless `live`, its guest is stopped first.
    fn save(&self, machine: &mut QemuVm, live: bool) -> Result<File, Failure> {
        let path = self.work.join("memory");
        let file = File::options().read(true).write(true).create(true).truncate(true).open(&path);
        let file = file.map_err(|source| self.failed("create", source))?;
        machine.must_be_savable()?;
        if !live {
            machine.pause()?;
        }
        machine.begin_save(&file)?;
        let deadline = Instant::now() + PATIENCE;
        loop {
            match machine.saving()? {
                Saving::Complete => return Ok(file),
                Saving::Active { done, total } if Instant::now() < deadline => {
                    self.progress.live(&format!("{} of {} MiB are saved", done >> 20, total >> 20));
                }
                other => return Err(Failure::Saving(other)),
            }
            thread::sleep(POLL);
        }
    }

    fn failed(&self, what: &'static str, source: std::io::Error) -> Failure {
        Failure::File { what, path: self.work.join("memory"), source }
    }

    /// Waits until the guest has done more rounds without an error.
    fn wait_for_rounds(&mut self, bed: &Bed, bound: &mut Bound, from: u64) -> Result<(), Failure> {
        let deadline = Instant::now() + PATIENCE;
        while rounds(bed)? < from + ROUNDS {
            let wrong = said_in(&bed.console, "bad")?;
            let ended = bound.0.as_mut().map(QemuVm::ended).transpose()?.flatten();
            if wrong.is_some() || ended.is_some() || Instant::now() > deadline {
                let found = format!("{wrong:?}, {ended:?}; see {}", bed.console.display());
                return self.claim("the guest continues", false, || found);
            }
            thread::sleep(POLL);
        }
        Ok(())
    }
}

fn rounds(bed: &Bed) -> Result<u64, Failure> {
    Ok(said_in(&bed.console, "rounds")?.and_then(|said| said.parse().ok()).unwrap_or(0))
}
