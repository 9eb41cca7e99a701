//! `cargo xtask xfstests`: Linux's tests of file systems, in a guest with disks served by Tapline or by QEMU.
//!
//! Knows nothing about the tests; the user names a built checkout of xfstests. A test that hangs or ends the guest is
//! reported as such, and another guest continues with the next test. Nothing on the host is changed and no root is
//! needed.

mod list;
mod results;
mod root;

use std::fs;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::process::Command;

use control::in_full;

use self::results::{Outcome, Results, is_test};
use crate::guest::{self, Guest, GuestError, Job, Line, at, distribution, kernel};
use crate::options::whole_path;
use crate::programs::{programs, root as top};
use crate::progress::Progress;
use crate::tapline::{Access, Tapline};
use crate::tool;

/// Modules that the tests need; those unknown to the kernel are omitted.
const MODULES: &[&str] = &[
    "virtio_pci",
    "virtio_blk",
    "crc32c_generic",
    "crc32c_intel",
    "ext4",
    "xfs",
    "loop",
    "dm_mod",
    "dm_flakey",
    "dm_delay",
    "dm_snapshot",
    "dm_thin_pool",
    "dm_log_writes",
    "dm_zero",
    "fuse",
    "overlay",
    "quota_v2",
    "sha256_generic",
    "aes_generic",
    // For encrypted directories.
    "ecb",
    "cbc",
    "cts",
    "xts",
    "essiv",
    "hmac",
    "sha512_generic",
    "adiantum",
    "button",
];

/// Sixty quick tests for both file systems that stress a disk: written data, fsync and power losses by dm-flakey,
/// holes, discards, direct and asynchronous requests, growing files.
const SIXTY: &str = include_str!("../../xfstests/sixty");

/// Size of each of the two disks in GiB; tests that need more are skipped.
const DISK_GIB: u32 = 8;

/// Timeout for a silent guest: a test of the group 'quick' takes up to half a minute on a real machine; emulation is a
/// hundred times slower.
const SILENCE_SECONDS: u64 = 1800;

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum DiskOwner {
    Tapline,
    Qemu,
}

impl DiskOwner {
    fn name(self) -> &'static str {
        match self {
            DiskOwner::Tapline => "tapline",
            DiskOwner::Qemu => "qemu",
        }
    }
}

/// Runs Linux's tests of file systems on Tapline's disks and on QEMU's
///
/// Runs them in a guest on two disks, and reports the result of each. The whole group 'quick' takes hours under
/// emulation. Exit status 1 if a test fails on Tapline's disks and not on QEMU's or, if only one of the two is tested,
/// if any test fails.
#[derive(Debug, clap::Args)]
pub struct Options {
    /// A checkout of xfstests that was built: git clone https://git.kernel.org/pub/scm/fs/xfs/xfstests-dev.git; its
    /// README names the packages; make
    #[arg(long, value_name = "DIR", value_parser = whole_path)]
    source: PathBuf,
    /// The file systems, tested one after the other
    #[arg(long = "fs", value_name = "NAME", value_parser = ["ext4", "xfs"], default_values = ["ext4", "xfs"])]
    file_systems: Vec<String>,
    /// The owners of the disks
    #[arg(long = "disk", value_name = "WHOSE", default_values = ["tapline", "qemu"])]
    owners: Vec<DiskOwner>,
    /// The format of both disks; QEMU calls vhd vpc
    #[arg(long, value_parser = ["qcow2", "raw", "vhd"], default_value = "qcow2")]
    format: String,
    /// The tests of a group, if no test is named [default: the sixty of testbed/xfstests/sixty]
    #[arg(long, value_name = "NAME")]
    group: Option<String>,
    /// Directory of tapline and tapline-disk [default: they are built]
    #[arg(long, value_name = "DIR", value_parser = whole_path)]
    bin_dir: Option<PathBuf>,
    /// Directory for the disks
    #[arg(long, default_value_os_t = top().join("build/xfstests"), hide_default_value = true, value_parser = whole_path)]
    dir: PathBuf,
    /// Write the results to this file as well, one line each
    #[arg(long, value_name = "FILE", value_parser = whole_path)]
    results: Option<PathBuf>,
    /// Tests by name: generic/001 …
    #[arg(value_name = "TEST", value_parser = test_name)]
    tests: Vec<String>,
}

fn test_name(word: &str) -> Result<String, String> {
    is_test(word).then(|| word.to_owned()).ok_or_else(|| "tests are called like generic/001".to_owned())
}

impl Options {
    fn tests_for(&self, file_system: &str) -> Result<Vec<String>, String> {
        if let Some(group) = &self.group {
            return list::of_group(&self.source, file_system, group);
        }
        if self.tests.is_empty() {
            return Ok(SIXTY.split_whitespace().map(str::to_owned).collect());
        }
        Ok(self.tests.clone())
    }
}

/// The resources that all runs share.
struct Bed<'a> {
    guest: Guest,
    root: PathBuf,
    /// The checkout as an archive.
    given: PathBuf,
    programs: PathBuf,
    work: PathBuf,
    format: &'a str,
    progress: &'a Progress,
}

/// Runs `cargo xtask xfstests`.
pub fn run(options: &Options) -> Result<(), String> {
    let progress = Progress::start();
    progress.step("the programs, a distribution and a guest");
    let programs = programs(options.bin_dir.as_deref())?;
    let bed = prepare(options, programs, &progress).map_err(|error| in_full(&error))?;
    let mut lines = String::new();
    let mut worse = Vec::new();
    for file_system in &options.file_systems {
        let tests = options.tests_for(file_system)?;
        let mut all = Vec::new();
        for &owner in &options.owners {
            progress.step(&format!("{} tests on {file_system}, disks of {}", tests.len(), owner.name()));
            let results = bed.run_all(file_system, owner, &tests).map_err(|error| in_full(&error))?;
            for (test, outcome) in &results.outcomes {
                lines.push_str(&format!("{file_system}\t{}\t{test}\t{outcome}\n", owner.name()));
            }
            progress.step(&summary(file_system, owner, &results));
            all.push(results);
        }
        worse.extend(worse_than_peer(&tests, &all).into_iter().map(|test| format!("{file_system} {test}")));
    }
    if let Some(file) = &options.results {
        fs::write(file, &lines).map_err(|error| format!("{}: {error}", file.display()))?;
    }
    match worse.as_slice() {
        [] => Ok(()),
        worse => {
            let what = match options.owners.as_slice() {
                [DiskOwner::Tapline] => "failed",
                [DiskOwner::Qemu] => "failed on QEMU's disks",
                _ => "came out worse on our disks",
            };
            Err(format!("{} tests {what}: {}", worse.len(), worse.join(", ")))
        }
    }
}

fn summary(file_system: &str, owner: DiskOwner, results: &Results) -> String {
    let counts =
        ["passed", "failed", "not run", "took the guest"].map(|word| format!("{} {word}", results.count(word)));
    format!("{file_system} on {}: {}", owner.name(), counts.join(", "))
}

/// The tests that fail on the first owner's disks and not on the other's, if there is one.
fn worse_than_peer<'a>(tests: &'a [String], all: &[Results]) -> Vec<&'a String> {
    let bad = |results: &Results, test: &String| {
        matches!(results.outcomes.get(test), Some(Outcome::Failed { .. } | Outcome::TookTheGuest { .. }) | None)
    };
    let [ours, peers @ ..] = all else { return Vec::new() };
    tests.iter().filter(|test| bad(ours, test) && !peers.iter().any(|peer| bad(peer, test))).collect()
}

fn prepare<'a>(options: &'a Options, programs: PathBuf, progress: &'a Progress) -> Result<Bed<'a>, GuestError> {
    let cache = top().join("build/xfstests");
    let root = root::ROOT.obtain(&cache, progress)?;
    let guest = Guest::build_of(kernel::FULL, MODULES, &cache.join("guest"), progress)?;
    let work = options.dir.join(format!("run-{}", std::process::id()));
    fs::create_dir_all(&work).map_err(at("create", &work))?;
    let given = work.join("xfstests.tar");
    let mut tar = Command::new("tar");
    tar.args(["-c", "--owner=0", "--group=0", "--exclude=.git", "--exclude=*.o", "--exclude=*.lo", "-f"]);
    tar.arg(&given).arg("-C").arg(&options.source).arg(".");
    // Some tests read the kernel's configuration.
    if let Some((directory, config)) = guest.kernel_config() {
        tar.arg("-C").arg(directory).arg(config);
    }
    tool::text(&mut tar)?;
    Ok(Bed { guest, root, given, programs, work, format: &options.format, progress })
}

impl Bed<'_> {
    /// Runs all tests, in as many guests as necessary.
    fn run_all(&self, file_system: &str, owner: DiskOwner, tests: &[String]) -> Result<Results, GuestError> {
        let mut results = Results::default();
        let mut left = tests;
        while !left.is_empty() {
            let ended = self.boot(file_system, owner, left, &mut results);
            let done = left.iter().take_while(|test| results.outcomes.contains_key(*test)).count();
            left = left.get(done..).unwrap_or_default();
            match (ended, left.split_first()) {
                (Ok(()), None) => {}
                // A guest that has ended normally has reported each test.
                (Ok(()), Some((test, rest))) => {
                    let why = "check has said nothing of it".to_owned();
                    results.outcomes.insert(test.clone(), Outcome::Failed { why });
                    left = rest;
                }
                (Err(error @ (GuestError::Silent { .. } | GuestError::Broke { .. })), Some((test, rest))) => {
                    self.progress.detail(&format!("{test}: {error}"));
                    let how = error.to_string().lines().next().unwrap_or_default().to_owned();
                    results.outcomes.insert(test.clone(), Outcome::TookTheGuest { how });
                    left = rest;
                }
                (Err(error), _) => return Err(error),
            }
        }
        Ok(results)
    }

    /// Runs one guest, on new disks.
    fn boot(
        &self,
        file_system: &str,
        owner: DiskOwner,
        tests: &[String],
        results: &mut Results,
    ) -> Result<(), GuestError> {
        let failed = |error: &(dyn std::error::Error + 'static)| GuestError::Job {
            job: "xfstests".to_owned(),
            why: in_full(error),
            console: self.work.clone(),
        };
        let tapline = Tapline::new(self.programs.join("tapline"), &self.work);
        let names = ["test", "scratch"].map(|name| format!("{name}.{}", self.format));
        for name in &names {
            let file = self.work.join(name);
            if file.exists() {
                fs::remove_file(&file).map_err(at("remove", &file))?;
            }
            let image = format!("{}:{name}", self.format);
            tapline.image(&["create", &image, "--size", &format!("{DISK_GIB}G")]).map_err(|error| failed(&error))?;
        }
        let mut served = Vec::new();
        if owner == DiskOwner::Tapline {
            for name in &names {
                let image = format!("{}:{name}", self.format);
                let disk = tapline.serve(&[&image], Access::ReadWrite, guest::CPUS);
                served.push(disk.map_err(|error| failed(&error))?);
            }
        }
        let sockets: Vec<String> = served.iter().map(|disk| disk.socket().to_owned()).collect();
        let job = Job {
            name: "xfstests",
            script: distribution::TO_ROOT,
            parameters: vec![
                ("INIT", "/sbin/xfstests-init".to_owned()),
                ("FS", file_system.to_owned()),
                ("TESTS", tests.join(" ")),
            ],
        };
        let running = self.guest.boot_with(&job, &self.work, |qemu| self.add_disks(qemu, &sockets, &names))?;
        let transcript = running.silent_for_at_most(SILENCE_SECONDS).follow(|line| {
            if let Line::Chatter(line) = line {
                results.process_line(line.trim_end());
                self.progress.live(line);
            }
            Ok::<_, GuestError>(ControlFlow::Continue(()))
        })?;
        self.progress.detail(&format!("kernel {}", transcript.value("kernel")?));
        for disk in served {
            disk.stop().map_err(|error| failed(&error))?;
        }
        Ok(())
    }

    /// Adds the root, the two disks and the archive, in the order of their names in the guest.
    fn add_disks(&self, qemu: &mut Command, sockets: &[String], names: &[String]) {
        let mut plain = |id: &str, file: &Path, more: &str| {
            qemu.arg("-drive").arg(format!("file={},if=none,id={id},{more}", file.display()));
            qemu.arg("-device").arg(format!("virtio-blk-pci,drive={id}"));
        };
        plain("root", &self.root, "format=raw,snapshot=on");
        if sockets.is_empty() {
            let format = if self.format == "vhd" { "vpc" } else { self.format };
            for name in names {
                let settings = format!("format={format},cache=none,discard=unmap,detect-zeroes=off");
                plain(name.split('.').next().unwrap_or(name), &self.work.join(name), &settings);
            }
        }
        for (number, socket) in sockets.iter().enumerate() {
            guest::add_disk(qemu, number, socket);
        }
        let mut archive = |file: &Path| {
            qemu.arg("-drive").arg(format!("file={},if=none,id=given,format=raw,readonly=on", file.display()));
            qemu.arg("-device").arg("virtio-blk-pci,drive=given");
        };
        archive(&self.given);
    }
}

impl Drop for Bed<'_> {
    fn drop(&mut self) {
        // The console of the last guest is kept if a test failed; disks and archive are large.
        for name in
            ["xfstests.tar", "test.qcow2", "scratch.qcow2", "test.raw", "scratch.raw", "test.vhd", "scratch.vhd"]
        {
            let file = self.work.join(name);
            if let Err(error) = fs::remove_file(&file)
                && error.kind() != std::io::ErrorKind::NotFound
            {
                eprintln!("cannot remove {}: {error}", file.display());
            }
        }
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn a_checkout_must_be_named() {
        let parse = crate::options::parse::<Options>;
        assert!(parse(&[]).is_err());
        assert!(parse(&["--source"]).is_err());
        let options = parse(&["--source", "x", "--fs", "xfs", "--disk", "qemu", "generic/001"]).unwrap();
        assert_eq!(
            (options.file_systems.as_slice(), options.owners.as_slice()),
            (&["xfs".to_owned()][..], &[DiskOwner::Qemu][..])
        );
        assert_eq!(options.tests_for("xfs").unwrap(), ["generic/001"]);
        assert!(parse(&["--source", "x", "--fs", "btrfs"]).is_err());
    }

    #[test]
    fn there_are_sixty_different_tests() {
        let mut tests: Vec<&str> = SIXTY.split_whitespace().collect();
        assert!(tests.iter().all(|test| is_test(test)));
        tests.sort_unstable();
        tests.dedup();
        assert_eq!(tests.len(), 60);
    }

    #[test]
    fn only_tests_that_pass_on_the_peer_count_as_worse() {
        let results = |failed: &[&str], passed: &[&str]| {
            let mut results = Results::default();
            failed.iter().for_each(|test| results.process_line(&format!("{test} [failed, exit status 1]")));
            passed.iter().for_each(|test| results.process_line(&format!("{test} 3s")));
            results
        };
        let tests = ["generic/001", "generic/002", "generic/003"].map(str::to_owned);
        let ours = results(&["generic/001", "generic/002"], &["generic/003"]);
        let peer = results(&["generic/001", "generic/003"], &["generic/002"]);
        assert_eq!(worse_than_peer(&tests, &[ours.clone(), peer]), ["generic/002"]);
        assert_eq!(worse_than_peer(&tests, &[ours]), ["generic/001", "generic/002"]);
    }
}
