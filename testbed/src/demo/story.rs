//! The life of a thin disk, step by step with a real guest: filled, trimmed, branched, killed, compared.
//!
//! It checks claims; booting guests and running disk processes is done elsewhere. The first claim that does not hold
//! ends the story with an error that contains what was found instead.

use std::fs;
use std::io;
use std::ops::ControlFlow;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use thiserror::Error;

use super::findings::{Findings, Load, counters};
use crate::guest::{self, Guest, GuestError, Job, Line, Transcript};
use crate::progress::Progress;
use crate::tapline::{Access, DiskProcess, Statistics, Tapline, TaplineError};
use crate::tool::{self, ToolError};

const SIZE: u64 = 4 << 30;

const BASE_FILE: &str = "base.vhd";
const BASE: &str = "vhd:base.vhd";
const CHILD: &str = "vhd:child.vhd";
const LIVE_FILE: &str = "live.qcow2";
const LIVE: &str = "qcow2:live.qcow2";

/// Number of markers after which the disk process is killed: some seconds of load, with allocations in progress at any
/// time.
const MARKERS: u64 = 40;

#[derive(Debug, Error)]
pub enum Failure {
    #[error(transparent)]
    Guest(#[from] GuestError),
    #[error(transparent)]
    Tapline(#[from] TaplineError),
    #[error(transparent)]
    Tool(#[from] ToolError),
    #[error("cannot {what} {}", path.display())]
    File { what: &'static str, path: PathBuf, source: io::Error },
    #[error(transparent)]
    Machine(#[from] vm::qemu::machine::MachineError),
    #[error("a machine has no disk {0}")]
    Position(u8),
    #[error("saving the guest's memory does not come to an end: {0:?}")]
    Saving(vm::qemu::machine::Saving),
    #[error("does not hold: {claim}; found {found}")]
    Claim { claim: String, found: String },
    #[error("the statistics page of the disk at {0} is not found or cannot be read")]
    NoPage(String),
    #[error("the guest does not say what it counts: {0}")]
    Unasked(String),
    #[error("the counters of the load make no sense, so there is no figure to show")]
    Counters,
}

/// The amount of data that the guest writes, and the duration of the measurement.
pub struct Amount {
    pub fill_mib: u32,
    pub load_seconds: u32,
}

pub struct Story<'a> {
    pub guest: &'a Guest,
    pub tapline: &'a Tapline,
    /// The directory of the programs.
    pub programs: &'a Path,
    pub progress: &'a Progress,
    pub work: &'a Path,
    pub findings: Findings,
}

impl Story<'_> {
    /// The whole story: a disk, its snapshot, a crash on the snapshot's child, and QEMU's check.
    pub fn whole(mut self, amount: &Amount) -> Result<Findings, Failure> {
        let reference = self.fill(amount)?;
        let base = self.snapshot()?;
        let sums = self.branch(&reference)?;
        self.same_base(&base, "the parent file is byte for byte as before the child was written")?;
        self.parent_alone(&reference)?;
        let markers = self.crash(&[CHILD, BASE])?;
        self.survey(&[CHILD, BASE], markers, &sums)?;
        self.same_base(&base, "the parent file is byte for byte as before the crash")?;
        self.check(&[CHILD, BASE])?;
        self.check(&[BASE])?;
        self.compare_with_qemu()?;
        self.live(amount)?;
        self.through_the_daemon(amount)?;
        Ok(self.findings)
    }

    /// The story without the snapshot: the crash is on the disk itself; then a machine with `disks` disks.
    pub fn short(mut self, amount: &Amount, disks: u8) -> Result<Findings, Failure> {
        let reference = self.fill(amount)?;
        let markers = self.crash(&[BASE])?;
        self.survey(&[BASE], markers, &format!("reference:{reference}"))?;
        self.check(&[BASE])?;
        self.compare_with_qemu()?;
        self.through_the_daemon(amount)?;
        self.machine(disks)?;
        self.suspended()?;
        Ok(self.findings)
    }

    /// Only the part with machines.
    pub fn only_machine(mut self, disks: u8) -> Result<Findings, Failure> {
        self.machine(disks)?;
        self.suspended()?;
        Ok(self.findings)
    }

    /// Only the part with layers.
    pub fn only_layers(mut self) -> Result<Findings, Failure> {
        self.layers()?;
        self.guest_of_the_daemon()?;
        Ok(self.findings)
    }

    /// Fills a new thin disk: a file system, verified writes, a measured load, fstrim. Returns the hash of a file that
    /// stays.
    fn fill(&mut self, amount: &Amount) -> Result<String, Failure> {
        self.progress.step("a thin disk of 4 GiB, and a guest that fills it");
        self.tapline.image(&["create", BASE, "--size", "4G"])?;
        let job = Job {
            name: "fill",
            script: include_str!("../../guest/jobs/fill.sh"),
            parameters: vec![
                ("FILL_MIB", amount.fill_mib.to_string()),
                ("LOAD_SECONDS", amount.load_seconds.to_string()),
            ],
        };
        let mut disk = self.serve(&[BASE], Access::ReadWrite)?;
        let image = self.work.join(BASE_FILE);
        let (mut used, mut states) = (Vec::new(), Vec::new());
        let transcript = self.boot(&job, &disk)?.follow(|line| {
            match self.show(&line) {
                Some(("ask", "window-begin" | "window-end")) => states.push(disk.statistics()?),
                Some(("ask", "trim-before" | "trim-after")) => used.push(bytes_used(&image)?),
                _ => {}
            }
            Ok::<_, Failure>(ControlFlow::Continue(()))
        })?;
        disk.stop()?;
        let cache = transcript.value("cache")?;
        // A guest that treats the disk as write-through never flushes, and checks of fsync would be meaningless.
        self.claim("the guest detected a write cache (will flush)", cache == "write back", || format!("`{cache}`"))?;
        self.judge_space(&transcript, &used)?;
        self.findings.load = Some(load(&transcript, &states)?);
        self.holds("ext4 made; fio verified every block it wrote: sequential, random, and with fsync");
        self.holds("a file written before the load and fstrim reads back unchanged; e2fsck is clean");
        Ok(transcript.value("reference")?.to_owned())
    }

    fn judge_space(&mut self, transcript: &Transcript, used: &[u64]) -> Result<(), Failure> {
        let size = transcript.value("size")?;
        self.claim("the guest sees a disk of 4 GiB", size == SIZE.to_string(), || format!("{size} bytes"))?;
        let [before, after] = *used else { return Err(Failure::Counters) };
        let space = &mut self.findings.space;
        (space.virtual_size, space.used_before_trim, space.used_after_trim) = (SIZE, before, after);
        let found = || format!("{before} bytes used before, {after} after");
        self.claim("fstrim in the guest gives space back to the host", after < before, found)
    }

    /// Creates a child of the disk while no guest runs. Returns the hash of the parent's file.
    fn snapshot(&mut self) -> Result<String, Failure> {
        self.progress.step("a snapshot: the disk becomes the parent of a differencing child");
        self.tapline.image(&["create", CHILD, "--parent", BASE])?;
        let base = self.hash_of_base()?;
        let child = bytes_used(&self.work.join("child.vhd"))?;
        self.progress.detail(&format!("the new child uses {} KiB", child / 1024));
        Ok(base)
    }

    /// A guest on the child reads the parent's files and changes them. Returns what must be found after the crash.
    fn branch(&mut self, reference: &str) -> Result<String, Failure> {
        self.progress.step("a guest on the child");
        let job = Job {
            name: "branch",
            script: include_str!("../../guest/jobs/branch.sh"),
            parameters: vec![("REFERENCE", reference.to_owned())],
        };
        let transcript = self.run_on(&[CHILD, BASE], Access::ReadWrite, &job)?;
        self.holds("the child shows the parent's files, and takes changes of its own");
        Ok(format!("reference:{} child-only:{}", transcript.value("changed")?, transcript.value("added")?))
    }

    fn parent_alone(&mut self, reference: &str) -> Result<(), Failure> {
        self.progress.step("a guest on the parent alone, read-only");
        let job = Job {
            name: "parent",
            script: include_str!("../../guest/jobs/parent.sh"),
            parameters: vec![("REFERENCE", reference.to_owned())],
        };
        self.run_on(&[BASE], Access::ReadOnly, &job)?;
        self.holds("the parent alone shows no change of the child");
        Ok(())
    }

    /// Kills the disk process, then the guest, under load. Returns the number of markers that the guest reported as
    /// fsynced.
    fn crash(&mut self, layers: &[&str]) -> Result<u64, Failure> {
        self.progress.step("the disk process is killed under load");
        let job = Job { name: "crash", script: include_str!("../../guest/jobs/crash.sh"), parameters: Vec::new() };
        let disk = self.serve(layers, Access::ReadWrite)?;
        let running = self.boot(&job, &disk)?;
        let mut serving = Some(disk);
        let mut state = None;
        let mut announced = 0;
        running.follow(|line| {
            if let Some(("marker", number)) = self.show(&line) {
                announced = number.parse().unwrap_or(announced);
            }
            if announced < MARKERS {
                return Ok::<_, Failure>(ControlFlow::Continue(()));
            }
            if let Some(mut disk) = serving.take() {
                state = Some(disk.statistics()?);
                disk.kill()?;
            }
            Ok(ControlFlow::Break(()))
        })?;
        let Some(state) = state else { return Err(Failure::Counters) };
        let (writes, flushes) = (state.writes.count, state.flushes.count);
        self.progress.detail(&format!("killed after {announced} markers, {writes} writes and {flushes} flushes"));
        let claim = "the guest's fsyncs reached the disk process as flushes, among writes of the load";
        self.claim(claim, flushes >= announced && writes > 2 * announced, || format!("{state:?}"))?;
        Ok(announced)
    }

    /// Starts the disk process and the guest after the crash.
    fn survey(&mut self, layers: &[&str], markers: u64, sums: &str) -> Result<(), Failure> {
        self.progress.step("the disk process and the guest are started again");
        let job = Job {
            name: "survey",
            script: include_str!("../../guest/jobs/survey.sh"),
            parameters: vec![("MARKERS", markers.to_string()), ("SUMS", sums.to_owned())],
        };
        self.run_on(layers, Access::ReadWrite, &job)?;
        self.holds(&format!(
            "after kill -9 all {markers} markers announced as fsynced are there, with the right content"
        ));
        self.holds("so are the files from before the crash; e2fsck is clean");
        Ok(())
    }

    fn check(&mut self, layers: &[&str]) -> Result<(), Failure> {
        let mut arguments = vec!["check"];
        for (depth, layer) in layers.iter().enumerate() {
            arguments.extend((depth > 0).then_some("--parent"));
            arguments.push(layer);
        }
        let found = match self.tapline.image(&arguments) {
            // Leaked space of a killed process or of a discard is not damage.
            Err(TaplineError::Tool(ToolError::Failed { status, .. })) if status.code() == Some(5) => "sound",
            checked => checked.map(|_| "clean")?,
        };
        self.holds(&format!("tapline image check finds {} {found}", layers.first().unwrap_or(&"nothing")));
        Ok(())
    }

    /// Compares with QEMU's VHD driver, which cannot read differencing images, so the base is compared.
    fn compare_with_qemu(&mut self) -> Result<(), Failure> {
        self.progress.step("the image as QEMU reads it");
        self.tapline.image(&["convert", BASE, "raw:base.raw"])?;
        let arguments = ["info", "--output=json", "-f", "vpc", BASE_FILE];
        let info = tool::text(Command::new("qemu-img").args(arguments).current_dir(self.work))?;
        let size = serde_json::from_str::<serde_json::Value>(&info).ok().and_then(|info| info["virtual-size"].as_u64());
        self.claim("QEMU sees a disk of 4 GiB too", size == Some(SIZE), || format!("{size:?} bytes"))?;
        let arguments = ["compare", "-f", "vpc", "-F", "raw", BASE_FILE, "base.raw"];
        tool::text(Command::new("qemu-img").args(arguments).current_dir(self.work))?;
        self.holds("QEMU reads the same bytes out of the image as Tapline does");
        Ok(())
    }

    /// A qcow2 disk whose chain changes while the guest writes.
    fn live(&mut self, amount: &Amount) -> Result<(), Failure> {
        self.progress.step("a qcow2 disk: snapshots, a merge and more room while the guest writes");
        self.tapline.image(&["create", LIVE, "--size", "4G"])?;
        let job = Job {
            name: "live",
            script: include_str!("../../guest/jobs/live.sh"),
            parameters: vec![
                ("FILL_MIB", amount.fill_mib.to_string()),
                ("LOAD_SECONDS", (amount.load_seconds + 6).to_string()),
            ],
        };
        let disk = self.serve(&[LIVE], Access::ReadWrite)?;
        let image = self.work.join(LIVE_FILE);
        let (mut pauses, mut copied, mut used) = (Vec::new(), 0, Vec::new());
        let transcript = self.boot(&job, &disk)?.follow(|line| {
            match self.show(&line) {
                Some(("ask", step @ ("snapshot-1" | "snapshot-2"))) => {
                    let leaf = format!("qcow2:{step}.qcow2");
                    pauses.push(microseconds(&self.order(&disk, &["snapshot", "--to", &leaf])?)?);
                }
                Some(("ask", "merge")) => {
                    let words = ["merge", "--from", "0", "--into", "2", "--delete"];
                    copied = self.order(&disk, &words)?["copied"].as_u64().ok_or(Failure::Counters)?;
                }
                Some(("ask", "grow")) => drop(self.order(&disk, &["resize", "--size", "5G"])?),
                Some(("ask", "trim-before" | "trim-after")) => used.push(bytes_used(&image)?),
                _ => {}
            }
            Ok::<_, Failure>(ControlFlow::Continue(()))
        })?;
        disk.stop()?;
        self.findings.pauses_us = pauses;
        self.findings.copied = copied;
        let grown = transcript.value("grown")?;
        self.claim("the running guest sees the disk grow to 5 GiB", grown == (5u64 << 30).to_string(), || {
            grown.into()
        })?;
        let [before, after] = *used else { return Err(Failure::Counters) };
        let found = || format!("{before} bytes used before, {after} after");
        self.claim("fstrim gives the space of the qcow2 file back, too", after < before, found)?;
        let layers = ["snapshot-1.qcow2", "snapshot-2.qcow2"].map(|layer| self.work.join(layer).exists());
        self.claim("the merged layers are gone, the chain is one file again", layers == [false; 2], || {
            format!("{layers:?}")
        })?;
        self.holds("fio verified all that it wrote through two snapshots and a merge of the live leaf");
        self.check(&[LIVE])?;
        tool::text(Command::new("qemu-img").args(["check", "-q", "-f", "qcow2", LIVE_FILE]).current_dir(self.work))?;
        self.holds("so does qemu-img check");
        Ok(())
    }

    fn order(&self, disk: &DiskProcess, words: &[&str]) -> Result<serde_json::Value, Failure> {
        Ok(self.tapline.disk(disk, words)?)
    }

    /// Runs `job` to its end on a disk made of `layers`.
    fn run_on(&mut self, layers: &[&str], access: Access, job: &Job) -> Result<Transcript, Failure> {
        let disk = self.serve(layers, access)?;
        let transcript = self.boot(job, &disk)?.follow(|line| {
            self.show(&line);
            Ok::<_, Failure>(ControlFlow::Continue(()))
        })?;
        disk.stop()?;
        Ok(transcript)
    }

    pub(super) fn serve(&self, layers: &[&str], access: Access) -> Result<DiskProcess, Failure> {
        Ok(self.tapline.serve(layers, access, guest::CPUS)?)
    }

    fn boot(&self, job: &Job, disk: &DiskProcess) -> Result<guest::Running, Failure> {
        self.progress.live("the guest boots");
        Ok(self.guest.boot(job, &[disk.socket()], self.work)?)
    }

    /// Shows the lines of a guest that are of interest; returns the key and value of a message.
    pub(super) fn show<'l>(&self, line: &Line<'l>) -> Option<(&'l str, &'l str)> {
        match *line {
            Line::Said("doing", what) => self.progress.detail(&format!("guest: {what}")),
            Line::Said("init", seconds) => self.progress.live(&format!("the guest's init runs after {seconds} s")),
            Line::Said("marker", number) => self.progress.live(&format!("marker {number} fsynced")),
            Line::Chatter(text) if text.starts_with("Jobs:") => self.progress.live(text),
            _ => {}
        }
        match *line {
            Line::Said(key, value) => Some((key, value)),
            Line::Chatter(_) => None,
        }
    }

    fn same_base(&mut self, hash: &str, claim: &str) -> Result<(), Failure> {
        let now = self.hash_of_base()?;
        self.claim(claim, now == hash, || format!("SHA-256 {now}, was {hash}"))
    }

    fn hash_of_base(&self) -> Result<String, Failure> {
        let line = tool::text(Command::new("sha256sum").arg(BASE_FILE).current_dir(self.work))?;
        Ok(line.split_whitespace().next().unwrap_or_default().to_owned())
    }

    pub(super) fn claim(&mut self, claim: &str, holds: bool, found: impl FnOnce() -> String) -> Result<(), Failure> {
        if !holds {
            return Err(Failure::Claim { claim: claim.to_owned(), found: found() });
        }
        self.holds(claim);
        Ok(())
    }

    pub(super) fn holds(&mut self, claim: &str) {
        self.progress.holds(claim);
        self.findings.claims.push(claim.to_owned());
    }
}

/// The load between the two readings of the guest and the disk process.
fn load(transcript: &Transcript, states: &[Statistics]) -> Result<Load, Failure> {
    let (begin, end) = (counters(transcript, "load-begin")?, counters(transcript, "load-end")?);
    let (Some(begin), Some(end), [before, after]) = (begin, end, states) else { return Err(Failure::Counters) };
    Load::between((&begin, &end), (before, after)).ok_or(Failure::Counters)
}

/// The pause seen by the guest, in a response.
fn microseconds(answer: &serde_json::Value) -> Result<u64, Failure> {
    answer["pause_us"].as_u64().ok_or(Failure::Counters)
}

/// Allocated size of a sparse file.
pub(super) fn bytes_used(path: &Path) -> Result<u64, Failure> {
    let file = fs::File::open(path).map_err(|source| Failure::File { what: "open", path: path.to_owned(), source })?;
    // Delayed allocations count only after the sync.
    file.sync_all().map_err(|source| Failure::File { what: "sync", path: path.to_owned(), source })?;
    let metadata =
        file.metadata().map_err(|source| Failure::File { what: "look at", path: path.to_owned(), source })?;
    Ok(metadata.blocks() * 512)
}
