//! `cargo xtask bootstorm`: clones many VMs from one golden image, boots, shuts down and destroys them, all at the same
//! time; with `--kill`, while the daemon and disk processes are killed continuously.
//!
//! It fails if something is wrong at the end of a part, if a disk has lost data, if two processes may write to one file
//! at any time, if the memory budget is exceeded, or, without kills, if any request must be repeated. Guests are
//! simulated by `bench-guest`, which shares no code with Tapline, except for some real ones.

mod census;
mod kills;
mod machine;
mod report;
mod watch;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Instant;

use control::in_full;
use serde_json::{Value, json};

use self::census::{Expected, census};
use self::kills::Killer;
use self::machine::Machine;
use self::report::{Notes, Part, Report};
use self::watch::Watch;
use crate::daemon::Daemon;
use crate::daemon::api::{Api, Ended};
use crate::daemon::processes::{Places, descriptors};
use crate::guest::{Guest, Job};
use crate::options::{any_seed, whole_path};
use crate::programs::{released, root};
use crate::progress::Progress;
use crate::tool;

/// Bytes for disks that are being plugged: with small disks about one worker each.
const WORKER_MEMORY: u64 = 128 << 20;

/// Bytes that a plugged disk may use (PSS), and those of the daemon itself.
const OF_DISK: u64 = 2 << 20;
const OF_DAEMON: u64 = 64 << 20;

/// MiB of the golden image that real guests read, and the block of 4096 bytes at which they write (as in
/// `bench-guest`).
const LOOKED_AT_MIB: u64 = 4;
const MARKER_BLOCK: u64 = (48 << 20) / 4096;

/// Maximum number of files that QEMU checks at the end, because each takes a while.
const JUDGED: usize = 32;

/// Rounds of a simulated guest whose disks are killed.
const KILLED_ROUNDS: u32 = 12;

/// Resources of a disk that the host limits: requests of Linux AIO, or bytes of an io_uring's rings, which count as
/// locked memory.
const AIO_OF_DISK: u64 = 257;
const RING_OF_DISK: u64 = 28 << 10;

/// Number of descriptors by which the daemon's may grow: connections and threads are temporary.
const DESCRIPTORS: usize = 32;

/// Clones, boots and destroys many VMs, optionally while the processes that serve them are killed
#[derive(Clone, Debug, clap::Args)]
pub struct Plan {
    #[arg(long, default_value_t = 125)]
    vms: usize,
    /// Disks of each VM
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u8).range(1..))]
    disks: u8,
    /// Number of the VMs that are real
    #[arg(long, default_value_t = 4)]
    real: usize,
    /// Kill the daemon and disk processes continuously
    #[arg(long)]
    kill: bool,
    /// Seed of the times of kills [default: random; it is printed]
    #[arg(long, default_value_t = any_seed(), hide_default_value = true)]
    seed: u64,
    /// Memory budget of the daemon and all disk processes together [default: by the number of disks]
    #[arg(long, value_name = "MIB")]
    budget: Option<u64>,
    /// Use the programs in this directory instead of building optimized ones
    #[arg(long, value_name = "DIR", value_parser = whole_path)]
    bin_dir: Option<PathBuf>,
    /// Directory for the files
    #[arg(long, default_value = "/dev/shm", value_parser = whole_path)]
    dir: PathBuf,
    #[arg(long)]
    json: bool,
}

/// Blocks that a simulated guest writes per round, and rounds of a real guest.
const BLOCKS: u32 = 6;
const REAL_ROUNDS: u32 = 20;

impl Plan {
    /// Number of real VMs.
    fn real(&self) -> usize {
        self.real.min(self.vms)
    }

    /// Number of disks of each VM.
    fn disks(&self) -> usize {
        self.disks.into()
    }

    /// Number of rounds of a simulated guest.
    fn rounds(&self) -> u32 {
        // More with kills, so that more occur in the middle of a guest's work.
        if self.kill { KILLED_ROUNDS } else { 3 }
    }

    fn budget_kib(&self) -> u64 {
        let disks = u64::try_from(self.vms * self.disks()).unwrap_or(u64::MAX);
        let counted = (disks.saturating_mul(OF_DISK) + WORKER_MEMORY + OF_DAEMON) >> 10;
        self.budget.map_or(counted, |mib| mib << 10)
    }
}

/// The environment that all VMs share.
pub struct Storm<'a> {
    plan: &'a Plan,
    programs: &'a Path,
    places: &'a Places,
    daemon: &'a Daemon,
    api: Api,
    notes: Notes,
    killer: Killer,
    watch: Watch,
    sr: String,
    golden: String,
    /// The boot source of real guests.
    boot: Option<Value>,
}

/// The last line that a real guest writes repeatedly.
fn last_line(rounds: u32) -> String {
    format!("marker {rounds}")
}

/// Runs the storm and prints the report; an error if anything is wrong.
pub fn run(plan: &Plan) -> Result<(), String> {
    let programs = released(plan.bin_dir.as_deref())?;
    let room = tempfile::Builder::new().prefix("tl-storm-").tempdir_in(&plan.dir);
    let room = room.map_err(|error| format!("a directory in {}: {error}", plan.dir.display()))?;
    // As /run: QEMU, which runs as another user, traverses it on the way to its disks.
    std::fs::set_permissions(room.path(), std::os::unix::fs::PermissionsExt::from_mode(0o711))
        .map_err(|error| format!("open {} to machines: {error}", room.path().display()))?;
    let places = Places::make(room.path())?;
    let said = format!("cargo xtask bootstorm --vms {} --disks {} --real {}", plan.vms, plan.disks, plan.real());
    eprintln!("{said}{} --seed {}", if plan.kill { " --kill" } else { "" }, plan.seed);
    limits(plan)?;
    let boot = prepare(plan, &programs, &places)?;
    let daemon = Daemon::start(programs.clone(), places.clone(), &format!("worker-memory = {WORKER_MEMORY}"))?;
    let (sr, golden) = repository(&daemon.api(), &places)?;
    let storm = Storm {
        plan,
        programs: &programs,
        places: &places,
        api: daemon.api(),
        daemon: &daemon,
        notes: Notes::default(),
        killer: Killer::held(),
        watch: Watch::default(),
        sr,
        golden,
        boot,
    };
    let report = thread::scope(|scope| {
        scope.spawn(|| storm.watch.run(storm.daemon, storm.places));
        let killer = scope.spawn(|| storm.killer.run(storm.daemon, storm.places, plan.seed));
        let report = storm.pass();
        storm.killer.end();
        storm.watch.end();
        let killed = killer.join().unwrap_or_else(|_| Err("whoever kills has panicked".to_owned()));
        report.judged(&storm, killed.err())
    });
    if !report.failures().is_empty() {
        // Kept for the search for the cause.
        let kept = room.keep();
        eprintln!("all that was there is kept in {}", kept.display());
    }
    report.print(plan)
}

/// Checks the host's limits for this number of disks with either engine, because one message is better than hundreds of
/// refusals.
fn limits(plan: &Plan) -> Result<(), String> {
    use rustix::process::{Resource, getrlimit};
    let sysctl = |name: &str| -> u64 {
        let text = fs::read_to_string(format!("/proc/sys/fs/{name}")).unwrap_or_default();
        text.trim().parse().unwrap_or(u64::MAX)
    };
    let disks = u64::try_from(plan.vms * plan.disks()).unwrap_or(u64::MAX);
    let aio = sysctl("aio-max-nr").saturating_sub(sysctl("aio-nr")) / AIO_OF_DISK;
    let uring = getrlimit(Resource::Memlock).maximum.map_or(u64::MAX, |bytes| bytes / RING_OF_DISK);
    let there_can_be = match is_tmpfs(&plan.dir)? {
        true => aio,
        false => uring,
    };
    if disks <= there_can_be {
        return Ok(());
    }
    Err(format!(
        "{disks} disks are asked for, and this machine lets there be {there_can_be} in {}: {aio} with Linux AIO (which tmpfs needs; raise \
         fs.aio-max-nr), {uring} with io_uring (raise the hard limit of locked memory, ulimit -Hl); or ask for fewer",
        plan.dir.display()
    ))
}

fn is_tmpfs(directory: &Path) -> Result<bool, String> {
    // TMPFS_MAGIC, statfs(2).
    let found = rustix::fs::statfs(directory).map_err(|errno| format!("{}: {errno}", directory.display()))?;
    Ok(found.f_type == 0x0102_1994)
}

/// Creates the golden image and the boot source of real guests.
fn prepare(plan: &Plan, programs: &Path, places: &Places) -> Result<Option<Value>, String> {
    let golden = places.room.join("golden.raw");
    tool::run(Command::new(programs.join("bench-guest")).arg("golden").arg(&golden))
        .map_err(|error| in_full(&error))?;
    if plan.real() == 0 {
        return Ok(None);
    }
    let head = format!("head -c {} '{}' | sha256sum", LOOKED_AT_MIB << 20, golden.display());
    let sum = tool::text(Command::new("sh").args(["-c", &head])).map_err(|error| in_full(&error))?;
    let sum = sum.split(' ').next().unwrap_or_default().to_owned();
    let guest = Guest::build(&root().join("build/guest"), &Progress::start()).map_err(|error| in_full(&error))?;
    let job = Job {
        name: "bootstorm",
        script: include_str!("../guest/jobs/bootstorm.sh"),
        parameters: vec![
            ("DISKS", plan.disks.to_string()),
            ("SUM", sum),
            ("MIB", LOOKED_AT_MIB.to_string()),
            ("ROUNDS", REAL_ROUNDS.to_string()),
            ("BLOCK", MARKER_BLOCK.to_string()),
        ],
    };
    match guest.boot_of(&job, &places.room).map_err(|error| in_full(&error))? {
        vm::qemu::hardware::Boot::Kernel { kernel, initrd, command_line } => {
            Ok(Some(json!({ "from": "kernel", "kernel": kernel, "initrd": initrd, "cmdline": command_line })))
        }
        vm::qemu::hardware::Boot::Firmware => Err("the guest has no kernel".to_owned()),
    }
}

/// Creates the repository with the golden image, which is read-only.
fn repository(api: &Api, places: &Places) -> Result<(String, String), String> {
    let sr = api.done("/srs", &json!({ "name": "storm", "source": { "type": "dir", "path": places.sr } }))?;
    let sr = sr["uuid"].as_str().ok_or(format!("{sr} is no SR"))?.to_owned();
    let path = places.room.join("golden.raw");
    let asked = json!({ "sr": sr, "name": "golden", "path": path, "source_format": "raw", "format": "qcow2" });
    let golden = api.done("/vdis/import", &asked)?;
    let golden = golden["uuid"].as_str().ok_or(format!("{golden} is no VDI"))?.to_owned();
    let patched = api.ask("PATCH", &format!("/vdis/{golden}"), &json!({ "read_only": true }));
    patched?;
    Ok((sr, golden))
}

impl Storm<'_> {
    /// Runs all parts until one fails.
    fn pass(&self) -> Report {
        let mut report = Report::default();
        if let Err(why) = self.parts(&mut report) {
            self.killer.hold();
            report.fail(why);
        }
        report
    }

    fn parts(&self, report: &mut Report) -> Result<(), String> {
        let (vms, disks) = (self.plan.vms, self.plan.vms * self.plan.disks());
        let numbers: Vec<usize> = (0..vms).collect();
        let mut machines = Vec::new();
        let there = |plugged| Expected { vdis: disks, vbds: disks, plugged };
        self.part(report, "create", true, there(Some(0)), || {
            machines = self.each(&numbers, |number| self.create(*number))?;
            Ok(())
        })?;
        let machines = &machines;
        let of_simulated = (vms - self.plan.real()) * self.plan.disks();
        let before = self.daemon.pid().map_or(0, descriptors);
        // Real guests may have finished already.
        self.part(report, "plug", true, there(None), || self.all(machines, |machine| self.plug(machine)))?;
        let load = || self.all(machines, |machine| self.load(machine, self.plan.rounds()));
        self.part(report, "load", true, there(Some(of_simulated)), load)?;
        self.part(report, "unplug", true, there(Some(0)), || self.all(machines, |machine| self.unplug(machine)))?;
        self.descriptors(report, before);
        self.verify(report, machines, there(Some(0)))?;
        let none = Expected { vdis: 0, vbds: 0, plugged: Some(0) };
        self.part(report, "destroy", true, none, || self.all(machines, |machine| self.destroy(machine)))?;
        self.expect_nothing_left()
    }

    /// Checks without kills that all disks have their data, and that QEMU finds no damage.
    fn verify(&self, report: &mut Report, machines: &[Machine], after: Expected) -> Result<(), String> {
        self.part(report, "verify", false, after, || {
            self.all(machines, |machine| {
                self.settle(machine)?;
                self.simulated(machine, 0)?;
                self.unplug(machine)
            })
        })?;
        for vdi in self.api.list("/vdis")?.iter().take(JUDGED) {
            let file = self.places.sr.join(vdi["file"].as_str().unwrap_or_default());
            let judged = Command::new("qemu-img").args(["check", "-q", "-f", "qcow2"]).arg(&file).output();
            let judged = judged.map_err(|error| format!("qemu-img: {error}"))?;
            // Status 3: leaked clusters, as a killed process leaves them.
            if !matches!(judged.status.code(), Some(0 | 3)) {
                report.fail(format!("{}: {}", file.display(), String::from_utf8_lossy(&judged.stdout)));
            }
        }
        Ok(())
    }

    /// Runs a part with all VMs, then checks the result.
    fn part(
        &self,
        report: &mut Report,
        name: &'static str,
        killed: bool,
        after: Expected,
        work: impl FnOnce() -> Result<(), String>,
    ) -> Result<(), String> {
        eprintln!("{name} …");
        // Peaks of earlier parts are discarded.
        let _ = self.watch.peaks();
        if self.plan.kill && killed {
            self.killer.loose(name);
        }
        let begin = Instant::now();
        let done = work();
        let seconds = begin.elapsed().as_secs_f64();
        self.killer.hold();
        // A short part may not have been sampled.
        self.watch.look(self.daemon, self.places);
        let peaks = self.watch.peaks();
        eprintln!("{name}: {seconds:.1} s, at most {} MiB", peaks.all_kib >> 10);
        report.parts.push(Part { name, seconds, peaks });
        done.map_err(|why| format!("{name}: {why}"))?;
        for wrong in census(&self.api, self.places, after) {
            report.fail(format!("after {name}: {wrong}"));
        }
        Ok(())
    }

    /// Runs `work` for all items concurrently; returns the results or the first error.
    fn each<T: Sync, R: Send>(
        &self,
        of: &[T],
        work: impl Fn(&T) -> Result<R, String> + Sync,
    ) -> Result<Vec<R>, String> {
        let done = Mutex::new(0_usize);
        let one = |item| {
            let result = work(item);
            let mut done = done.lock().unwrap_or_else(PoisonError::into_inner);
            *done += 1;
            if *done % 25 == 0 {
                eprintln!("  {done} of {}", of.len());
            }
            result
        };
        thread::scope(|scope| {
            let one = &one;
            let threads: Vec<_> = of.iter().map(|item| scope.spawn(move || one(item))).collect();
            let joined = threads.into_iter().map(thread::ScopedJoinHandle::join);
            joined.map(|ended| ended.unwrap_or_else(|_| Err("a thread has panicked".to_owned()))).collect()
        })
    }

    fn all(&self, machines: &[Machine], work: impl Fn(&Machine) -> Result<(), String> + Sync) -> Result<(), String> {
        self.each(machines, work).map(drop)
    }

    /// A daemon that was not killed must not have more descriptors open than before.
    fn descriptors(&self, report: &mut Report, before: usize) {
        let now = self.daemon.pid().map_or(0, descriptors);
        if !self.plan.kill && now > before + DESCRIPTORS {
            report.fail(format!(
                "the daemon had {before} descriptors before anything was plugged, and {now} after all was unplugged"
            ));
        }
    }

    /// Everything that was created for the storm is removed without remains.
    fn expect_nothing_left(&self) -> Result<(), String> {
        for path in [format!("/vdis/{}", self.golden), format!("/srs/{}", self.sr)] {
            let task = self.api.ask("DELETE", &path, &Value::Null)?;
            match self.api.wait(&task)? {
                Ended::Done(_) => {}
                other => return Err(format!("DELETE {path}: {other:?}")),
            }
        }
        let left = fs::read_dir(&self.places.sr).map_err(|error| format!("{}: {error}", self.places.sr.display()))?;
        match left.count() {
            0 => Ok(()),
            count => Err(format!("{count} files are left in the destroyed repository")),
        }
    }
}

#[cfg(test)]
mod test {
    use super::*;
    use crate::options::parse;

    #[test]
    fn a_thousand_disks_of_125_vms_unless_said() {
        let whole: Plan = parse(&["--kill", "--seed", "7"]).unwrap();
        assert_eq!((whole.vms, whole.disks, whole.real(), whole.kill, whole.seed), (125, 8, 4, true, 7));
        assert_eq!(whole.budget_kib() >> 10, 2000 + 128 + 64);
        let small: Plan = parse(&["--vms", "2", "--disks", "3", "--budget", "100"]).unwrap();
        assert_eq!((small.real(), small.budget_kib()), (2, 100 << 10));
        for refused in [["--disks", "256"], ["--disks", "0"], ["--rounds", "1"]] {
            assert!(parse::<Plan>(&refused).is_err(), "{refused:?}");
        }
    }
}
