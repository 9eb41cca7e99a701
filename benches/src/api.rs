//! `cargo xtask bench api`: the time of a list of many VDIs, and the effect of a thousand clients on plugs.
//!
//! Plugs alone and with the clients alternate; medians and their ratio are printed. No figure is a failure.

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

use self::clients::{Behaviour, Clients};
use super::median;

/// Number of lists that are timed.
const LISTS: usize = 30;

/// Number of VBDs that are plugged together.
const VBDS: usize = 20;

/// Time for the clients to connect and begin.
const TO_BEGIN: Duration = Duration::from_secs(3);

/// The load on the daemon.
#[derive(Debug, clap::Args)]
pub struct Plan {
    #[arg(long, default_value_t = 10_000, value_parser = enough_vdis)]
    vdis: usize,
    #[arg(long, default_value_t = 1000)]
    clients: usize,
    #[arg(long, default_value_t = 5, value_parser = positive)]
    rounds: usize,
    /// Use the programs in this directory instead of building optimized ones
    #[arg(long, value_name = "DIR", value_parser = whole_path)]
    bin_dir: Option<PathBuf>,
    /// Directory for the files
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

/// Runs the benchmark and prints the results.
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
    let mut beside = PlugTimes::default();
    for round in 0..plan.rounds {
        eprintln!("round {} of {}", round + 1, plan.rounds);
        beside.alone.push(plug(&api, &vbds)?);
        beside.crowd(&daemon, &api, vdi, &vbds, plan.clients, |number| {
            [Behaviour::List, Behaviour::Show, Behaviour::Follow][number % 3]
        })?;
        eprintln!("alone {:?}, beside {:?}", beside.alone, beside.together);
    }
    let before = pss_kib(daemon.pid().unwrap_or(0))?;
    let mut ignored = PlugTimes::default();
    ignored.crowd(&daemon, &api, vdi, &vbds, plan.clients, |_| Behaviour::Ignore)?;
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

/// Times of plugs alone and with clients.
#[derive(Default)]
struct PlugTimes {
    alone: Vec<(f64, f64)>,
    together: Vec<(f64, f64)>,
    answers: u64,
    refused: u64,
    events: u64,
    failed: u64,
    daemon_kib: u64,
}

impl PlugTimes {
    /// Measures a plug and an unplug with this number of clients.
    fn crowd(
        &mut self,
        daemon: &Daemon,
        api: &Api,
        vdi: &str,
        vbds: &[String],
        count: usize,
        habit: impl Fn(usize) -> Behaviour,
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
        watch.join().map_err(|_| "the watching thread has panicked")?;
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

/// Creates VDIs from raw files, which a scan adds without reading them.
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

/// Times of successive lists.
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

/// Plugs and unplugs; returns the seconds of each.
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
