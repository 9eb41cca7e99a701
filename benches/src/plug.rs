//! The time to plug many VBDs, compared with the limit of the window and with chunks of ten; and their cost.
//!
//! The delays are injected into the daemon (`injected-delays`): each simulates storage on which opening a disk takes
//! that long. The VBDs have no VM and so no window, which the number of workers simulates.

use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tempfile::TempDir;
use testbed::daemon::Daemon;
use testbed::daemon::api::{Api, nothing, uuid};
use testbed::daemon::processes::Places;
use testbed::process::{cpu_seconds, pss_kib, switches};

use super::{Arguments, program, room, tapline};

/// Number of VBDs of a VM that are plugged at the same time.
const WINDOW: usize = 10;

/// The delay of each disk, and the factor by which the slow one is slower.
const DELAY: Duration = Duration::from_millis(200);
const SLOWER: u32 = 20;

const COUNTS: [usize; 5] = [1, 10, 11, 50, 255];

/// Maximum number of VBDs of a VM.
const MANY: usize = 255;

/// Measures and prints the times.
pub fn run(arguments: &Arguments) -> Result<(), String> {
    let mut report = Vec::new();
    for count in COUNTS {
        report.push(equal(count, arguments)?);
    }
    report.push(one_slow(arguments)?);
    report.push(undelayed(arguments)?);
    report.push(idle(arguments)?);
    if arguments.json {
        println!("{}", Value::Array(report));
        return Ok(());
    }
    for row in &report {
        let Some(row) = row.as_object() else { continue };
        let fields: Vec<String> = row.iter().map(|(name, value)| format!("{name} {value}")).collect();
        println!("{}", fields.join("  "));
    }
    Ok(())
}

fn rounds(count: usize) -> u32 {
    u32::try_from(count.div_ceil(WINDOW)).unwrap_or(u32::MAX)
}

fn seconds(time: Duration) -> f64 {
    (time.as_secs_f64() * 1000.0).round() / 1000.0
}

/// A daemon with VBDs, each with its own disk, in a temporary directory.
struct Plugs {
    daemon: Daemon,
    api: Api,
    places: Places,
    vbds: Vec<String>,
    _room: TempDir,
}

impl Plugs {
    /// Creates this number of VBDs; `name` returns the name of the VDI of each, which may contain a delay.
    fn make(
        arguments: &Arguments,
        count: usize,
        settings: &str,
        name: impl Fn(usize) -> String,
    ) -> Result<Plugs, String> {
        let room = room(arguments)?;
        let places = Places::make(room.path())?;
        let settings = format!("injected-delays = true\n{settings}");
        let daemon = Daemon::start(program(""), places.clone(), &settings)?;
        let api = daemon.api();
        let source = json!({ "type": "dir", "path": places.sr });
        let sr = api.done("/srs", &json!({ "name": "disks", "source": source }))?;
        for number in 0..count {
            // Each image needs its own UUID, which a copy does not have.
            let path = places.sr.join(format!("{}.qcow2", name(number)));
            tapline(&["image", "create", &format!("qcow2:{}", path.display()), "--size", "10G"])?;
        }
        let sr = uuid(&sr)?;
        let scan = api.done(&format!("/srs/{sr}/scan"), &nothing())?;
        let placed = scan["appeared"].as_array().into_iter().flatten();
        let vbds: Vec<String> = placed.map(|placed| api.make_vbd(&placed["vdi"])).collect::<Result<_, _>>()?;
        match vbds.len() {
            found if found == count => Ok(Plugs { daemon, api, places, vbds, _room: room }),
            found => Err(format!("{found} of {count} disks were found: {scan}")),
        }
    }

    /// A daemon with as many workers as a window has places.
    fn windowed(arguments: &Arguments, count: usize, name: impl Fn(usize) -> String) -> Result<Plugs, String> {
        Plugs::make(arguments, count, &format!("worker-pool-size = {WINDOW}\nplug-window = {WINDOW}"), name)
    }

    /// Plugs or unplugs all VBDs in one request.
    fn all(&self, verb: &str) -> Result<Duration, String> {
        self.in_chunks(verb, self.vbds.len())
    }

    /// Plugs or unplugs the VBDs in chunks of this size, waiting for the end of each chunk.
    fn in_chunks(&self, verb: &str, of: usize) -> Result<Duration, String> {
        let begin = Instant::now();
        for vbds in self.vbds.chunks(of) {
            self.api.done(&format!("/vbds/{verb}"), &json!({ "vbds": vbds }))?;
        }
        Ok(begin.elapsed())
    }

    /// Number of plugged VBDs.
    fn plugged(&self) -> Result<usize, String> {
        let host = self.api.get("/host")?;
        Ok(host["plugged"].as_u64().and_then(|count| count.try_into().ok()).unwrap_or(0))
    }

    /// The pids of all disk processes.
    fn disks(&self) -> Vec<u32> {
        self.places.disks().into_iter().map(|disk| disk.pid).collect()
    }

    fn pid(&self) -> Result<u32, String> {
        self.daemon.pid().ok_or_else(|| "the daemon has ended".to_owned())
    }
}

/// Disks with equal delays.
fn equal(count: usize, arguments: &Arguments) -> Result<Value, String> {
    let plugs = Plugs::windowed(arguments, count, |number| format!("disk{number}~{}ms", DELAY.as_millis()))?;
    let plugged = plugs.all("plug")?;
    let least = DELAY * rounds(count);
    Ok(json!({
        "what": "equal delays", "disks": count, "delay_s": seconds(DELAY), "plug_s": seconds(plugged),
        "bound_s": seconds(least.mul_f64(1.15)), "ratio": (plugged.as_secs_f64() / least.as_secs_f64() * 100.0).round() / 100.0,
    }))
}

/// One disk that is much slower than the others: the time until all others are plugged.
fn one_slow(arguments: &Arguments) -> Result<Value, String> {
    let slow = DELAY * SLOWER;
    let delay = |number: usize| if number == 0 { slow } else { DELAY };
    let plugs = Plugs::windowed(arguments, MANY, |number| format!("disk{number}~{}ms", delay(number).as_millis()))?;
    let begin = Instant::now();
    let task = plugs.api.ask("POST", "/vbds/plug", &json!({ "vbds": plugs.vbds }))?;
    while plugs.plugged()? < MANY - 1 {
        std::thread::sleep(Duration::from_millis(20));
    }
    let others = begin.elapsed();
    plugs.api.wait(&task)?;
    let all = begin.elapsed();
    plugs.all("unplug")?;
    let chunks = plugs.in_chunks("plug", WINDOW)?;
    Ok(json!({
        "what": "one 20 times slower", "disks": MANY, "others_plugged_s": seconds(others),
        "all_plugged_s": seconds(all), "all_in_chunks_of_ten_s": seconds(chunks),
        "without_the_slow_one_s": seconds(DELAY * rounds(MANY)),
    }))
}

/// The maximum number of VBDs of a VM without delays, and their cost.
fn undelayed(arguments: &Arguments) -> Result<Value, String> {
    let plugs = Plugs::make(arguments, MANY, "", |number| format!("disk{number}"))?;
    let plugged = plugs.all("plug")?;
    let disks = plugs.disks();
    let pss: Vec<u64> = disks.iter().map(|pid| pss_kib(*pid)).collect::<Result<_, _>>()?;
    let daemon_pss = pss_kib(plugs.pid()?)?;
    let unplugged = plugs.all("unplug")?;
    Ok(json!({
        "what": "no delay", "disks": MANY, "plug_s": seconds(plugged), "unplug_s": seconds(unplugged),
        "pss_kib_mean": pss.iter().sum::<u64>() / pss.len().max(1) as u64, "pss_kib_max": pss.iter().max(),
        "daemon_pss_kib": daemon_pss,
    }))
}

/// Many idle disks: the wake-ups of their processes and of the daemon.
fn idle(arguments: &Arguments) -> Result<Value, String> {
    let plugs = Plugs::make(arguments, arguments.disks, "", |number| format!("disk{number}"))?;
    plugs.all("plug")?;
    let (disks, daemon) = (plugs.disks(), plugs.pid()?);
    // Idle threads of the daemon end after ten seconds.
    std::thread::sleep(Duration::from_secs(15));
    let of_disks = || disks.iter().map(|pid| switches(*pid)).sum::<Result<u64, _>>();
    let before = (of_disks()?, switches(daemon)?, cpu_seconds(daemon)?);
    std::thread::sleep(Duration::from_secs_f64(arguments.seconds));
    let after = (of_disks()?, switches(daemon)?, cpu_seconds(daemon)?);
    Ok(json!({
        "what": "idle", "disks": arguments.disks, "seconds": arguments.seconds, "switches_of_disks": after.0.saturating_sub(before.0),
        "switches_of_daemon": after.1.saturating_sub(before.1),
        "daemon_cpu_percent": (after.2 - before.2) * 100.0 / arguments.seconds,
    }))
}
