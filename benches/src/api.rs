//! `cargo xtask bench api`: how long a list of many VDIs takes, and what a thousand clients do to a plug.
//!
//! Plugs alone and beside the clients take turns; what is printed are medians and their ratio. Nothing here passes or
//! fails by a figure.

mod clients;

use std::fs::File;
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use testbed::daemon::Daemon;
use testbed::daemon::api::Api;
use testbed::daemon::processes::Places;
use testbed::options::{positive, whole_path};
use testbed::process::pss_kib;
use testbed::programs::released;

use self::clients::{Clients, Habit};
use super::median;

/// Lists whose time is taken.
const LISTS: usize = 30;

/// VBDs that are plugged together.
const VBDS: usize = 20;

/// For clients to be connected and at it.
const TO_BEGIN: Duration = Duration::from_secs(3);

/// How much is asked of the daemon.
#[derive(Debug, clap::Args)]
pub struct Plan {
    #[arg(long, default_value_t = 10_000, value_parser = enough_vdis)]
    vdis: usize,
    #[arg(long, default_value_t = 1000)]
    clients: usize,
    #[arg(long, default_value_t = 5, value_parser = positive)]
    rounds: usize,
    /// Use the programs in this directory instead of building released ones
    #[arg(long, value_name = "DIR", value_parser = whole_path)]
    bin_dir: Option<PathBuf>,
    /// Where the files go
    #[arg(long, default_value = "/dev/shm", value_parser = whole_path)]
    dir: PathBuf,
    #[arg(long)]
    json: bool,
}

fn enough_vdis(text: &str) -> Result<usize, String> {
    positive(text).and_then(|vdis| {
        if vdis < VBDS { Err(format!("{VBDS} are plugged, so there must be as many")) } else { Ok(vdis) }
    })
}

/// Runs it, and prints.
pub fn run(plan: &Plan) -> Result<(), String> {
    let programs = released(plan.bin_dir.as_deref())?;
    let room = tempfile::Builder::new().prefix("tl-api-").tempdir_in(&plan.dir);
    let room = room.map_err(|error| format!("a directory in {}: {error}", plan.dir.display()))?;
    let places = Places::make(room.path())?;
    let daemon = Daemon::start(programs, places.clone(), "")?;
    let api = daemon.api();
    eprintln!("{} VDIs are made", plan.vdis);
    let vdis = disks(&api, &places, plan.vdis)?;
    let lists = lists(&api)?;
    eprintln!("lists: {lists}");
    let vbds: Vec<String> = vdis.iter().take(VBDS).map(|vdi| api.make_vbd(&json!(vdi))).collect::<Result<_, _>>()?;
    let vdi = vdis.first().ok_or("there is no VDI")?;
    let mut beside = Beside::default();
    for round in 0..plan.rounds {
        eprintln!("round {} of {}", round + 1, plan.rounds);
        beside.alone.push(plug(&api, &vbds)?);
        beside.crowd(&daemon, &api, vdi, &vbds, plan.clients, |number| {
            [Habit::List, Habit::Show, Habit::Follow][number % 3]
        })?;
        eprintln!("alone {:?}, beside {:?}", beside.alone, beside.together);
    }
    let before = pss_kib(daemon.pid().unwrap_or(0))?;
    let mut ignored = Beside::default();
    ignored.crowd(&daemon, &api, vdi, &vbds, plan.clients, |_| Habit::Ignore)?;
    let report = json!({
        "vdis": plan.vdis, "clients": plan.clients, "rounds": plan.rounds, "list": lists,
        "plug": beside.report(), "who_do_not_read": ignored.report(), "daemon_kib_before_those": before,
    });
    if plan.json {
        println!("{report}");
    } else {
        println!("{}", serde_json::to_string_pretty(&report).map_err(|error| error.to_string())?);
    }
    Ok(())
}

/// Plugs beside clients, and alone.
#[derive(Default)]
struct Beside {
    alone: Vec<(f64, f64)>,
    together: Vec<(f64, f64)>,
    answers: u64,
    refused: u64,
    events: u64,
    failed: u64,
    daemon_kib: u64,
}

impl Beside {
    /// A plug and an unplug beside so many clients.
    fn crowd(
        &mut self,
        daemon: &Daemon,
        api: &Api,
        vdi: &str,
        vbds: &[String],
        count: usize,
        habit: impl Fn(usize) -> Habit,
    ) -> Result<(), String> {
        let clients = Clients::begin(&api.socket, vdi, count, habit).map_err(|error| format!("clients: {error}"))?;
        std::thread::sleep(TO_BEGIN);
        let pid = daemon.pid().ok_or("the daemon has ended")?;
        let peak = Arc::new(Mutex::new((0_u64, false)));
        let watched = peak.clone();
        let watch = std::thread::spawn(move || {
            loop {
                let kib = pss_kib(pid).unwrap_or(0);
                {
                    let mut peak = watched.lock().unwrap_or_else(PoisonError::into_inner);
                    peak.0 = peak.0.max(kib);
                    if peak.1 {
                        return;
                    }
                }
                std::thread::sleep(Duration::from_millis(200));
            }
        });
        let plugged = plug(api, vbds);
        peak.lock().unwrap_or_else(PoisonError::into_inner).1 = true;
        watch.join().map_err(|_| "whoever watches has panicked")?;
        self.daemon_kib = self.daemon_kib.max(peak.lock().unwrap_or_else(PoisonError::into_inner).0);
        self.together.push(plugged?);
        let of = |count: &std::sync::atomic::AtomicU64| count.load(Ordering::Relaxed);
        self.answers += of(&clients.seen.answers);
        self.refused += of(&clients.seen.refused);
        self.events += of(&clients.seen.events);
        self.failed += of(&clients.seen.failed);
        Ok(())
    }

    fn report(&self) -> Value {
        let of = |times: &[(f64, f64)], which: fn(&(f64, f64)) -> f64| match times {
            [] => f64::NAN,
            some => median(some.iter().map(which)),
        };
        let (alone, together) = (of(&self.alone, |time| time.0), of(&self.together, |time| time.0));
        let (alone_un, together_un) = (of(&self.alone, |time| time.1), of(&self.together, |time| time.1));
        json!({
            "vbds": VBDS, "plug_alone_s": alone, "plug_beside_s": together, "plug_ratio": together / alone,
            "unplug_alone_s": alone_un, "unplug_beside_s": together_un, "unplug_ratio": together_un / alone_un,
            "answers": self.answers, "refused": self.refused, "events": self.events, "failed": self.failed,
            "daemon_kib_peak": self.daemon_kib,
        })
    }
}

/// Makes VDIs of raw files, which a scan takes in without looking into them.
fn disks(api: &Api, places: &Places, count: usize) -> Result<Vec<String>, String> {
    let failed = |error: std::io::Error| format!("{}: {error}", places.sr.display());
    let sr = api.done("/srs", &json!({ "name": "many", "source": { "type": "dir", "path": places.sr } }))?;
    for number in 0..count {
        let file = File::create(places.sr.join(format!("disk-{number:05}.raw"))).map_err(failed)?;
        file.set_len(1 << 20).map_err(failed)?;
    }
    let scan = api.done(&format!("/srs/{}/scan", sr["uuid"].as_str().unwrap_or_default()), &json!({}))?;
    let placed = scan["appeared"].as_array().into_iter().flatten();
    let vdis: Vec<String> = placed.filter_map(|placed| placed["vdi"].as_str().map(str::to_owned)).collect();
    if vdis.len() == count { Ok(vdis) } else { Err(format!("{} of {count} disks were found", vdis.len())) }
}

/// The times of lists, one after the other.
fn lists(api: &Api) -> Result<Value, String> {
    let mut times = Vec::new();
    let mut objects = 0;
    for _ in 0..LISTS {
        let begin = Instant::now();
        let text = api.text("/vdis")?;
        times.push(begin.elapsed().as_secs_f64() * 1000.0);
        objects = text.matches("\"physical_utilisation\"").count();
    }
    times.sort_by(f64::total_cmp);
    let at = |part: usize| times.get((times.len() * part / 100).min(times.len() - 1)).copied();
    Ok(json!({ "calls": LISTS, "objects": objects, "p50_ms": at(50), "p99_ms": at(99), "max_ms": times.last() }))
}

/// Plugs and unplugs; how many seconds each took.
fn plug(api: &Api, vbds: &[String]) -> Result<(f64, f64), String> {
    let begin = Instant::now();
    api.done("/vbds/plug", &json!({ "vbds": vbds }))?;
    let plugged = begin.elapsed();
    let begin = Instant::now();
    api.done("/vbds/unplug", &json!({ "vbds": vbds }))?;
    Ok((plugged.as_secs_f64(), begin.elapsed().as_secs_f64()))
}

#[cfg(test)]
mod test {
    use testbed::options::parse;

    use super::*;

    #[test]
    fn ten_thousand_disks_and_a_thousand_clients_unless_said() {
        let whole: Plan = parse(&[]).unwrap();
        assert_eq!((whole.vdis, whole.clients, whole.rounds), (10_000, 1000, 5));
        assert!(parse::<Plan>(&["--vdis", "3"]).is_err() && parse::<Plan>(&["--seconds", "3"]).is_err());
    }
}
