//! `cargo xtask bench xen`: backends side by side on the disks of one guest, each over a RAM disk of its own.
//!
//! What is compared are instructions: the machine has one CPU whose clock counts them, so a loaded host changes nothing, and
//! what the guest, Xen, dom0 and the backend need for a request all counts. Caches and idle CPUs are not in it. Rounds of the
//! backends alternate; medians and their ratios to the kernel's backend are printed.

use std::collections::BTreeMap;
use std::fs;
use std::time::Duration;

use super::suite::{Backend, Guest};
use super::{Bed, BedError, LAST_LINES, programs};
use crate::demo::guest::at;
use crate::demo::progress::Progress;
use crate::demo::{chain, tool};

const USAGE: &str =
    "usage: cargo xtask bench xen [--rounds N] [--requests N] [--guest pv|pvh] [--backend NAME]… [--json]";

/// The names in `testbed/xen/jobs/compare.sh`, in order.
const CASES: [(&str, &str); 6] = [
    ("rr4k1", "randread 4k qd1"),
    ("rr4k32", "randread 4k qd32"),
    ("sr64k1", "read 64k qd1"),
    ("sr64k8", "read 64k qd8"),
    ("rw4k1", "randwrite 4k qd1"),
    ("rw4k32", "randwrite 4k qd32"),
];

const SECONDS_MAX: u64 = 3600;

struct Options {
    rounds: usize,
    requests: u32,
    guest: Guest,
    backends: Vec<Backend>,
    json: bool,
}

impl Options {
    fn parse(arguments: &[String]) -> Option<Self> {
        let mut options = Self { rounds: 3, requests: 600, guest: Guest::Pvh, backends: Vec::new(), json: false };
        let mut words = arguments.iter();
        while let Some(word) = words.next() {
            match word.as_str() {
                "--rounds" => options.rounds = words.next()?.parse().ok().filter(|&rounds| rounds > 0)?,
                "--requests" => options.requests = words.next()?.parse().ok().filter(|&requests| requests > 1)?,
                "--guest" => {
                    options.guest = [Guest::Pv, Guest::Pvh]
                        .into_iter()
                        .find(|guest| Some(guest.name()) == words.clone().next().map(String::as_str))
                        .inspect(|_| {
                            words.next();
                        })?
                }
                "--backend" => options.backends.push(Backend::of_name(words.next()?)?),
                "--json" => options.json = true,
                _ => return None,
            }
        }
        if options.backends.is_empty() {
            options.backends = vec![Backend::Blkback, Backend::Qdisk];
        }
        Some(options)
    }
}

/// Requests a second of the machine's time, by case and backend: one a round.
type Figures = BTreeMap<(String, &'static str), Vec<f64>>;

/// Runs the comparison.
pub fn run(arguments: &[String]) -> Result<(), String> {
    let options = Options::parse(arguments).ok_or(USAGE)?;
    let figures = measure(&options).map_err(|error| chain(&error))?;
    let complete = CASES.iter().all(|(case, _)| {
        let of = |backend: &Backend| figures.get(&((*case).to_owned(), backend.name())).map_or(0, Vec::len);
        options.backends.iter().all(|backend| of(backend) == options.rounds)
    });
    if !complete {
        return Err("the guest did not say every figure; see the console in build".to_owned());
    }
    if options.json {
        print_json(&options, &figures)
    } else {
        print_table(&options, &figures)
    }
    Ok(())
}

fn measure(options: &Options) -> Result<Figures, BedError> {
    let progress = Progress::start();
    let bed = Bed::prepare(&progress)?;
    let mut binaries = Vec::new();
    if options.backends.contains(&Backend::Tapline) {
        progress.detail("building tapline and tapline-disk, static");
        binaries = programs::tapline()?;
    }
    let names: Vec<&str> = options.backends.iter().map(|backend| backend.name()).collect();
    let script = format!(
        ". /drop/steps.sh\nbackends='{}'\nguest_type={}\nrounds={}\nrequests={}\n. /drop/tests/compare.sh\nfinish\n",
        names.join(" "),
        options.guest.name(),
        options.rounds,
        options.requests
    );
    let work = bed.build.join(format!("xen-compare-{}", std::process::id()));
    let mut figures = Figures::new();
    progress.step(&format!("{} in a {} guest, {} rounds", names.join(", "), options.guest.name(), options.rounds));
    let ended = bed.run_script(&script, &binaries, &work, Duration::from_secs(SECONDS_MAX), |line| {
        if let Some((backend, case, rate)) = figure_in(line, &options.backends) {
            figures.entry((case, backend)).or_default().push(rate);
        } else if let Some(round) = line.strip_prefix("TAPLINE round=") {
            progress.detail(&format!("round {} is done", round.trim()));
        }
    })?;
    if ended.code != Some(0) {
        println!("{}\nconsole and /out are kept in {}", tool::last_lines(&ended.console, LAST_LINES), work.display());
    } else {
        fs::remove_dir_all(&work).map_err(at("remove", &work))?;
    }
    Ok(figures)
}

/// `TAPLINE figure=BACKEND CASE MICROSECONDS REQUESTS`: from the time, as fio's own rate is cut to whole numbers.
fn figure_in(line: &str, backends: &[Backend]) -> Option<(&'static str, String, f64)> {
    let mut words = line.strip_prefix("TAPLINE figure=")?.split_whitespace();
    let backend = backends.iter().map(|backend| backend.name()).find(|name| Some(*name) == words.clone().next())?;
    let case = words.nth(1)?.to_owned();
    let rate = words.next()?.parse().ok()?;
    Some((backend, case, rate))
}

fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied().unwrap_or_default()
}

fn spread(values: &[f64]) -> f64 {
    let (low, high) = values.iter().fold((f64::MAX, 0.0_f64), |(low, high), &value| (low.min(value), high.max(value)));
    if high > 0.0 { (high / low - 1.0) * 100.0 } else { 0.0 }
}

fn of<'a>(figures: &'a Figures, case: &str, backend: Backend) -> &'a [f64] {
    figures.get(&(case.to_owned(), backend.name())).map_or(&[], Vec::as_slice)
}

fn print_table(options: &Options, figures: &Figures) {
    println!(
        "\nrequests a second of the machine's time (250 instructions are a microsecond), ratio to the first, spread of rounds"
    );
    print!("{:<20}", "");
    options.backends.iter().for_each(|backend| print!("{:>24}", backend.name()));
    println!();
    for (case, title) in CASES {
        print!("{title:<20}");
        let base = options.backends.first().map_or(0.0, |&first| median(of(figures, case, first)));
        for &backend in &options.backends {
            let values = of(figures, case, backend);
            print!("{:>10.0} {:>6.2}x {:>4.1}%", median(values), median(values) / base, spread(values));
        }
        println!();
    }
}

fn print_json(options: &Options, figures: &Figures) {
    let rows = CASES.iter().flat_map(|(case, title)| {
        options.backends.iter().map(move |&backend| {
            let values = of(figures, case, backend);
            serde_json::json!({ "case": title, "backend": backend.name(), "iops": median(values), "rounds": values })
        })
    });
    println!("{}", serde_json::Value::Array(rows.collect()));
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn a_figure_is_read_from_its_line_only() {
        let both = [Backend::Blkback, Backend::Qdisk];

        assert_eq!(figure_in("TAPLINE figure=qdisk rr4k1 1724.5", &both), Some(("qdisk", "rr4k1".to_owned(), 1724.5)));
        assert_eq!(figure_in("TAPLINE figure=tapline rr4k1 1724.5", &both), None);
        assert_eq!(figure_in("TAPLINE end=0", &both), None);
    }

    #[test]
    fn the_spread_is_of_the_largest_over_the_smallest() {
        assert!((spread(&[100.0, 110.0, 105.0]) - 10.0).abs() < 1e-9);
        assert!(spread(&[]).abs() < 1e-9);
    }
}
