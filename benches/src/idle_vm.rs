//! Counts the wake-ups of the QEMU of an idle guest by emulated device: the table of XenServer's Project Pulsar, for
//! our default hardware and for each device that it omits.
//!
//! All machines run concurrently, each with one disk; `trace` counts from boot to shutdown.

mod table;
mod trace;

use std::fs::{self, File};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use control::in_full;
use serde_json::json;
use tempfile::TempDir;
use testbed::guest::{Guest, Job, MEMORY_MIB, image, kernel};
use testbed::programs::{build_programs, root};
use testbed::progress::Progress;
use testbed::tapline::{Access, DiskProcess, Tapline};
use vm::qemu::accelerator::Accelerator;
use vm::qemu::hardware::{Boot, Disk, Hardware};
use vm::qemu::machine::{Ending, QemuVm};
use vm::qemu::platform::Platform;
use vm::qemu::slots::Position;

use self::trace::{Counts, Threads};

/// Duration and intervals of the measurement.
#[derive(Debug, clap::Args)]
pub struct Options {
    /// Length of an interval in seconds
    #[arg(long, default_value_t = 30, value_parser = clap::value_parser!(u32).range(1..))]
    interval: u32,
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(..1_000_000))]
    minutes: u32,
    #[arg(long)]
    json: bool,
}

/// A hardware variant: its name, and its platform keys.
type Variant = (&'static str, &'static [(&'static str, &'static str)]);

const VARIANTS: &[Variant] = &[
    ("default", &[]),
    ("usb and tablet", &[("usb", "true"), ("usb_tablet", "true")]),
    ("serial port", &[("hvm_serial", "null")]),
    ("parallel port", &[("parallel", "null")]),
    ("IDE DVD drive", &[("dvd", "empty")]),
    (
        "all of these",
        &[("usb", "true"), ("usb_tablet", "true"), ("hvm_serial", "null"), ("parallel", "null"), ("dvd", "empty")],
    ),
];

/// Drivers for all variants, for a full kernel; that for virtual machines lacks those for USB and the parallel port.
const DRIVERS: &[&str] = &[
    "uhci_hcd",
    "usbhid",
    "hid_generic",
    "parport_pc",
    "ppdev",
    "lp",
    "ata_piix",
    "sr_mod",
    "virtio_pci",
    "virtio_blk",
];

/// Timeout of a guest under TCG with five others running.
const PATIENCE: Duration = Duration::from_secs(120);

/// Length and number of the intervals.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Plan {
    interval: Duration,
    intervals: u32,
    json: bool,
}

/// A machine that is measured.
struct Run {
    name: &'static str,
    machine: QemuVm,
    disk: Option<DiskProcess>,
    began: SystemTime,
    /// Counts of its threads at the end of each interval.
    threads: Vec<Threads>,
    ending: Option<Ending>,
}

impl Drop for Run {
    fn drop(&mut self) {
        if self.ending.is_some() {
            return;
        }
        // The machine would outlive us.
        if let Err(error) = self.machine.end() {
            eprintln!("{}", in_full(&error));
        }
    }
}

/// The counts of a machine.
struct Counted {
    name: &'static str,
    counts: Vec<Counts>,
    ending: Option<Ending>,
}

/// Boots, counts, shuts down and prints.
pub fn run(options: &Options) -> Result<(), String> {
    let plan = options.plan();
    let progress = Progress::start();
    let programs = build_programs().map_err(|error| in_full(&error))?;
    let modules: Vec<&str> = image::MODULES.iter().chain(DRIVERS).copied().collect();
    let cache = root().join("build").join("guest-full");
    let guest = Guest::build_of(kernel::FULL, &modules, &cache, &progress).map_err(|error| in_full(&error))?;
    let work = tempfile::tempdir().map_err(|error| format!("a directory for the machines: {error}"))?;
    let tapline = Tapline::new(programs.join("tapline"), work.path());
    let mut runs = Vec::new();
    for &variant in VARIANTS {
        progress.live(&format!("booting {}", variant.0));
        runs.push(boot(variant, &guest, &tapline, &work)?);
    }
    count(&mut runs, plan, &progress)?;
    let counted = runs.into_iter().map(|run| finish(run, plan)).collect::<Result<Vec<_>, _>>()?;
    if plan.json {
        println!("{}", table::json(&counted, plan, guest.accelerator()));
    } else {
        print!("{}", table::text(&counted, plan, guest.accelerator()));
    }
    match counted.iter().find(|run| run.ending != Some(Ending::Guest)) {
        Some(run) => Err(format!("the guest with {} has not powered off: {:?}", run.name, run.ending)),
        None => Ok(()),
    }
}

impl Options {
    fn plan(&self) -> Plan {
        // At least a boot, an idle interval and a shutdown.
        let intervals = (self.minutes * 60 / self.interval).max(3);
        Plan { interval: Duration::from_secs(self.interval.into()), intervals, json: self.json }
    }
}

fn boot((name, keys): Variant, guest: &Guest, tapline: &Tapline, work: &TempDir) -> Result<Run, String> {
    let directory = work.path().join(name.replace(' ', "-"));
    private(&directory)?;
    let image = directory.join("disk.raw");
    let made = File::create(&image).and_then(|file| file.set_len(1 << 20));
    made.map_err(|error| format!("{}: {error}", image.display()))?;
    let disk = tapline.serve(&[&format!("raw:{}", image.display())], Access::ReadWrite, 1).map_err(|e| in_full(&e))?;
    let job = Job { name: "idle", script: include_str!("../../testbed/guest/jobs/idle.sh"), parameters: Vec::new() };
    let hardware = Hardware {
        machine: None,
        name: "idle".to_owned(),
        memory_mib: MEMORY_MIB,
        vcpus: 1,
        accelerator: guest.accelerator(),
        boot: with_command_line(guest.boot_of(&job, &directory).map_err(|error| in_full(&error))?),
        disks: vec![Disk {
            position: Position::new(0).ok_or("a machine has a first disk")?,
            socket: work.path().join(disk.socket()),
            queues: Some(1),
            bootable: false,
        }],
        console: None,
        seed: None,
        guest_port: None,
        platform: Platform::parse(keys.iter().copied()).map_err(|error| error.to_string())?,
    };
    let began = SystemTime::now();
    let qemu = Path::new("qemu-system-x86_64");
    let machine = QemuVm::start(qemu, &hardware, &directory, PATIENCE).map_err(|error| in_full(&error))?;
    let mut run = Run { name, machine, disk: Some(disk), began, threads: Vec::new(), ending: None };
    for event in trace::EVENTS {
        let arguments = json!({ "name": event, "enable": true });
        run.machine.ask("trace-event-set-state", &arguments).map_err(|error| in_full(&error))?;
    }
    Ok(run)
}

/// The default hardware has no serial port to write to. With a trusted TSC, a guest under TCG reads the time without
/// the chipset, which it would otherwise access a hundred times per second; under KVM it never leaves the processor for
/// that.
const COMMAND_LINE: &str = "console=tty0 quiet panic=-1 mitigations=off tsc=reliable";

fn with_command_line(boot: Boot) -> Boot {
    match boot {
        Boot::Kernel { kernel, initrd, .. } => Boot::Kernel { kernel, initrd, command_line: COMMAND_LINE.to_owned() },
        Boot::Firmware => Boot::Firmware,
    }
}

fn private(directory: &PathBuf) -> Result<(), String> {
    let made =
        fs::create_dir(directory).and_then(|()| fs::set_permissions(directory, fs::Permissions::from_mode(0o700)));
    made.map_err(|error| format!("{}: {error}", directory.display()))
}

/// Reads the counters of all machines at the end of every interval; at the beginning of the last one, presses the power
/// buttons.
fn count(runs: &mut [Run], plan: Plan, progress: &Progress) -> Result<(), String> {
    for interval in 0..plan.intervals.saturating_sub(1) {
        for run in runs.iter_mut() {
            // Each machine began a second or two after the previous one.
            let end = run.began + plan.interval * (interval + 1);
            thread::sleep(end.duration_since(SystemTime::now()).unwrap_or_default());
            run.threads.push(Threads::of(run.machine.identity().pid)?);
        }
        progress.live(&format!("interval {} of {}", interval + 1, plan.intervals));
    }
    for run in runs {
        run.ending = Some(end(run)?);
    }
    Ok(())
}

/// Powers the guest off, and keeps the last counts of its threads.
fn end(run: &mut Run) -> Result<Ending, String> {
    run.machine.ask("system_powerdown", &json!({})).map_err(|error| in_full(&error))?;
    let deadline = Instant::now() + PATIENCE;
    let mut last = None;
    while !run.machine.wait_ended(Duration::from_millis(20)).map_err(|error| in_full(&error))? {
        if Instant::now() > deadline {
            return run.machine.end().map_err(|error| in_full(&error));
        }
        // It may have exited between the two.
        last = Threads::of(run.machine.identity().pid).ok().or(last);
    }
    run.threads.extend(last);
    Ok(Ending::Guest)
}

fn finish(mut run: Run, plan: Plan) -> Result<Counted, String> {
    let began = run.began.duration_since(UNIX_EPOCH).map_err(|error| error.to_string())?;
    let log = fs::read(run.machine.log()).map_err(|error| format!("{}: {error}", run.machine.log().display()))?;
    let mut counts = trace::counts(&String::from_utf8_lossy(&log), began, plan.interval, plan.intervals);
    let mut before = Threads::default();
    for (count, threads) in counts.iter_mut().zip(&run.threads) {
        count.woken = threads.since(&before);
        before = *threads;
    }
    run.disk.take().map_or(Ok(()), DiskProcess::stop).map_err(|error| in_full(&error))?;
    Ok(Counted { name: run.name, counts, ending: run.ending })
}

#[cfg(test)]
mod test {
    use testbed::options::parse;

    use super::*;

    fn plan(words: &[&str]) -> Option<Plan> {
        parse(words).ok().map(|options: Options| options.plan())
    }

    #[test]
    fn the_default_is_five_minutes_in_intervals_of_thirty_seconds() {
        let default = plan(&[]).unwrap();
        assert_eq!((default.interval, default.intervals), (Duration::from_secs(30), 10));
        let short = plan(&["--interval", "20", "--minutes", "2", "--json"]).unwrap();
        assert_eq!((short.intervals, short.json), (6, true));
        assert_eq!(plan(&["--minutes", "0"]).unwrap().intervals, 3);
        assert!(plan(&["--interval", "0"]).is_none());
        assert!(plan(&["--seconds", "3"]).is_none());
    }
}
