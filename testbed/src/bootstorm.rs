//! `cargo xtask bootstorm`: many VMs are cloned from one golden image, booted, shut down and destroyed, all at one
//! time; with `--kill`, while the daemon and disk processes are killed all the time.
//!
//! It fails when something is wrong at the end of a part, when a disk does not hold what was promised, when two
//! processes may write to one file at any moment, when more memory is taken than is set, or, with nobody killed, when
//! anything has to be asked for twice. Guests are simulated by `bench-guest`, which shares no code with us, but for
//! some real ones.

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

/// Bytes for those that are being plugged: with small disks about as many as there are workers.
const WORKER_MEMORY: u64 = 128 << 20;

/// Bytes that a plugged disk may take (PSS), and those of the daemon itself.
const OF_DISK: u64 = 2 << 20;
const OF_DAEMON: u64 = 64 << 20;

/// As much of the golden image is looked at by real guests, in MiB; and where they write, in blocks of 4096 bytes
/// (`bench-guest` knows).
const LOOKED_AT_MIB: u64 = 4;
const MARKER_BLOCK: u64 = (48 << 20) / 4096;

/// Files that QEMU judges at the end: a look at each takes a while.
const JUDGED: usize = 32;

/// Rounds of a simulated guest whose disks are killed.
const KILLED_ROUNDS: u32 = 12;

/// What a disk needs of limits of the machine: requests of Linux AIO, or bytes of an io_uring's rings, which are
/// counted as locked memory.
const AIO_OF_DISK: u64 = 257;
const RING_OF_DISK: u64 = 28 << 10;

/// Descriptors that a daemon may have more than before: connections and threads that come and go.
const DESCRIPTORS: usize = 32;

/// Many VMs are cloned, booted and destroyed, while what serves them is killed or not
#[derive(Clone, Debug, clap::Args)]
pub struct Plan {
    #[arg(long, default_value_t = 125)]
    vms: usize,
    /// Disks of each VM
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u8).range(1..))]
    disks: u8,
    /// So many of the VMs are real
    #[arg(long, default_value_t = 4)]
    real: usize,
    /// Kill the daemon and disk processes all the time
    #[arg(long)]
    kill: bool,
    /// The moments of kills; another each time, and printed, if not given
    #[arg(long, default_value_t = any_seed(), hide_default_value = true)]
    seed: u64,
    /// Memory that the daemon and all disk processes may take together [default: by the number of disks]
    #[arg(long, value_name = "MIB")]
    budget: Option<u64>,
    /// Use the programs in this directory instead of building released ones
    #[arg(long, value_name = "DIR", value_parser = whole_path)]
    bin_dir: Option<PathBuf>,
    /// Where the files go
    #[arg(long, default_value = "/dev/shm", value_parser = whole_path)]
    dir: PathBuf,
    #[arg(long)]
    json: bool,
}

/// Blocks that a simulated guest writes each round, and rounds of a real one.
const BLOCKS: u32 = 6;
const REAL_ROUNDS: u32 = 20;

impl Plan {
    /// VMs that are real.
    fn real(&self) -> usize {
        self.real.min(self.vms)
    }

    /// Disks of each VM.
    fn disks(&self) -> usize {
        self.disks.into()
    }

    /// Rounds of a simulated guest.
    fn rounds(&self) -> u32 {
        // Longer, so that more are killed in the middle of it.
        if self.kill { KILLED_ROUNDS } else { 3 }
    }

    fn budget_kib(&self) -> u64 {
        let disks = u64::try_from(self.vms * self.disks()).unwrap_or(u64::MAX);
        let counted = (disks.saturating_mul(OF_DISK) + WORKER_MEMORY + OF_DAEMON) >> 10;
        self.budget.map_or(counted, |mib| mib << 10)
    }
}

/// What all VMs have in common.
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
    /// What real guests boot.
    boot: Option<Value>,
}

/// The line that a real guest has written last, again and again.
fn last_line(rounds: u32) -> String {
    format!("marker {rounds}")
}

/// Does it, prints what came of it, and fails if anything is wrong.
pub fn run(plan: &Plan) -> Result<(), String> {
    let programs = released(plan.bin_dir.as_deref())?;
    let room = tempfile::Builder::new().prefix("tl-storm-").tempdir_in(&plan.dir);
    let room = room.map_err(|error| format!("a directory in {}: {error}", plan.dir.display()))?;
    // As /run is: QEMU, which is another user, passes it on its way to its disks.
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
        // Whoever looks for the cause needs it.
        let kept = room.keep();
        eprintln!("all that was there is kept in {}", kept.display());
    }
    report.print(plan)
}

/// Whether the machine lets there be so many disks, with one engine or the other: it is better said before than by
/// hundreds of refusals.
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

/// Makes the golden image, and what real guests boot.
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

/// The repository, and the golden image in it, which nobody may write.
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
    /// All parts, as far as it goes.
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
        // Real guests may be through already.
        self.part(report, "plug", true, there(None), || self.all(machines, |machine| self.plug(machine)))?;
        let load = || self.all(machines, |machine| self.load(machine, self.plan.rounds()));
        self.part(report, "load", true, there(Some(of_simulated)), load)?;
        self.part(report, "unplug", true, there(Some(0)), || self.all(machines, |machine| self.unplug(machine)))?;
        self.descriptors(report, before);
        self.verify(report, machines, there(Some(0)))?;
        let none = Expected { vdis: 0, vbds: 0, plugged: Some(0) };
        self.part(report, "destroy", true, none, || self.all(machines, |machine| self.destroy(machine)))?;
        self.nothing_left()
    }

    /// All disks hold what was promised, with nobody killed; and QEMU finds nothing wrong.
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
            // 3: clusters that nobody uses, as a killed process leaves them.
            if !matches!(judged.status.code(), Some(0 | 3)) {
                report.fail(format!("{}: {}", file.display(), String::from_utf8_lossy(&judged.stdout)));
            }
        }
        Ok(())
    }

    /// Does a part with everybody, and looks what is so when it is over.
    fn part(
        &self,
        report: &mut Report,
        name: &'static str,
        killed: bool,
        after: Expected,
        work: impl FnOnce() -> Result<(), String>,
    ) -> Result<(), String> {
        eprintln!("{name} …");
        // What was before is not of this part.
        let _ = self.watch.peaks();
        if self.plan.kill && killed {
            self.killer.loose(name);
        }
        let begin = Instant::now();
        let done = work();
        let seconds = begin.elapsed().as_secs_f64();
        self.killer.hold();
        // A short part may not have been looked at.
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

    /// Does something with everyone at one time; what came of each, or the first that went wrong.
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

    /// A daemon that was not killed has no more open than before.
    fn descriptors(&self, report: &mut Report, before: usize) {
        let now = self.daemon.pid().map_or(0, descriptors);
        if !self.plan.kill && now > before + DESCRIPTORS {
            report.fail(format!(
                "the daemon had {before} descriptors before anything was plugged, and {now} after all was unplugged"
            ));
        }
    }

    /// What was made for the storm goes, and leaves nothing.
    fn nothing_left(&self) -> Result<(), String> {
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
