//! `cargo xtask bench xen`: compares backends on the disks of one guest, each over a RAM disk of its own.
//!
//! Instructions are compared: the machine has one CPU whose clock counts them, so the load of the host does not matter,
//! and everything that the guest, Xen, dom0 and the backend need for a request is counted. Caches and idle CPUs are not
//! modelled. Rounds of the backends alternate; medians and their ratios to the kernel's backend are printed.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use control::in_full;

use super::counted::{Costs, Counter, Counts, MARKS, Owner};
use super::machine::Processors;
use super::suite::{Backend, Guest};
use super::targets::{self, TargetResult, middle};
use super::{Bed, BedError, LAST_LINES, programs};
use crate::guest::at;
use crate::options::positive;
use crate::progress::Progress;
use crate::tool;

/// The cases of `testbed/xen/jobs/compare.sh` with their titles, in order.
const CASES: [(&str, &str); 9] = [
    ("rr4k1", "randread 4k qd1"),
    ("rr4k32", "randread 4k qd32"),
    // Uses four rings of one page.
    ("rr4k128", "randread 4k qd128"),
    ("sr64k1", "read 64k qd1"),
    ("sr64k8", "read 64k qd8"),
    ("sr1m2", "read 1m qd2"),
    ("rw4k1", "randwrite 4k qd1"),
    ("rw4k32", "randwrite 4k qd32"),
    ("sw64k8", "write 64k qd8"),
];

/// Options of Tapline in the name of a backend: `tapline xen attach --grants`, and `tapline disk SOCKET polling
/// --mode`.
const WAYS: [&str; 6] = ["copy", "map", "persistent", "polling-off", "polling-adaptive", "polling-on"];

const SECONDS_MAX: u64 = 3600;

/// Instructions of the machine's clock per second (`-icount shift=2`).
const INSTRUCTIONS_A_SECOND: f64 = 250e6;

/// Compares backends of a Xen guest's disks by their instructions
#[derive(Debug, clap::Args)]
pub struct Options {
    #[arg(long, default_value_t = 3, value_parser = positive)]
    rounds: usize,
    #[arg(long, default_value_t = 600, value_parser = clap::value_parser!(u32).range(2..))]
    requests: u32,
    /// Type of the guest: pv or pvh
    #[arg(long, default_value = "pvh", value_parser = paravirtual)]
    guest: Guest,
    /// blkback, qdisk or tapline, or ours with words: a way to reach the guest's pages (copy, map, persistent), when to
    /// poll (polling-off, polling-adaptive, polling-on): tapline+map, tapline+copy+polling-on
    #[arg(long = "backend", value_name = "NAME", value_parser = backend,
          default_values = ["blkback", "qdisk", "tapline"])]
    backends: Vec<String>,
    /// Only this case (rr4k32: random reads of 4 KiB at depth 32); repeat for several
    #[arg(long = "case", value_name = "NAME", value_parser = case)]
    cases: Vec<String>,
    /// The guest uses rings of 2^N pages instead of one
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(..=4))]
    ring_order: Option<u8>,
    /// Maximum number of segments in the guest's requests, instead of 32
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(11..=256))]
    segments: Option<u16>,
    /// One round in which every instruction is counted and attributed, per request
    #[arg(long)]
    count: bool,
    /// List the N functions with most instructions, except the guest's
    #[arg(long, value_name = "N", requires = "count", default_value_t = 0)]
    functions: usize,
    #[arg(long)]
    json: bool,
    /// The guest has a processor of its own; one clock counts the instructions of both
    #[arg(long)]
    own_processor: bool,
}

impl Options {
    /// The parameters of the guest's driver.
    fn front_end(&self) -> Vec<String> {
        let order = self.ring_order.map(|order| format!("xen_blkfront.max_ring_page_order={order}"));
        let segments = self.segments.map(|segments| format!("xen_blkfront.max_indirect_segments={segments}"));
        order.into_iter().chain(segments).collect()
    }

    fn processors(&self) -> Processors {
        if self.own_processor { Processors::Apart } else { Processors::Shared }
    }

    /// The requested cases with their titles.
    fn cases(&self) -> impl Iterator<Item = (&'static str, &'static str)> + '_ {
        let asked = |name: &str| self.cases.is_empty() || self.cases.iter().any(|case| case == name);
        CASES.into_iter().filter(move |(name, _)| asked(name))
    }

    /// Number of rounds of each backend.
    fn rounds(&self) -> usize {
        if self.count { 1 } else { self.rounds }
    }

    /// Number of requests in a case, as `many` in `testbed/xen/jobs/compare.sh`.
    fn requests_of(&self, case: &str) -> u32 {
        match case {
            "rr4k32" | "rr4k128" | "rw4k32" => self.requests * 4,
            "sr64k1" => self.requests / 2,
            "sr1m2" => self.requests / 8,
            _ => self.requests,
        }
    }
}

/// Whether it is the name of a backend, or of Tapline with options.
fn is_backend(name: &str) -> bool {
    let mut words = name.split('+');
    let backend = words.next().and_then(Backend::of_name);
    backend.is_some() && words.all(|way| backend == Some(Backend::Tapline) && WAYS.contains(&way))
}

fn paravirtual(name: &str) -> Result<Guest, String> {
    [Guest::Pv, Guest::Pvh].into_iter().find(|guest| guest.name() == name).ok_or_else(|| "pv or pvh".to_owned())
}

fn case(name: &str) -> Result<String, String> {
    let names = CASES.map(|(name, _)| name);
    names.contains(&name).then(|| name.to_owned()).ok_or_else(|| format!("the cases are {}", names.join(", ")))
}

fn backend(name: &str) -> Result<String, String> {
    is_backend(name).then(|| name.to_owned()).ok_or_else(|| format!("no backend is called {name}"))
}

/// Requests per second of the machine's time, by case and backend, for each round.
type Figures = BTreeMap<(String, String), Vec<f64>>;

/// Runs the comparison and prints the result.
pub fn run(options: &Options) -> Result<(), String> {
    if options.count {
        return count(options).map_err(|error| in_full(&error));
    }
    let figures = measure(options).map_err(|error| in_full(&error))?;
    let complete = options
        .cases()
        .all(|(case, _)| options.backends.iter().all(|backend| of(&figures, case, backend).len() == options.rounds()));
    if !complete {
        return Err("the guest did not say every figure; see the console in build".to_owned());
    }
    if options.json {
        print_json(options, &figures);
    } else {
        print_table(options, &figures);
        judged(options, &figures).iter().for_each(|judged| println!("{judged}"));
    }
    Ok(())
}

fn measure(options: &Options) -> Result<Figures, BedError> {
    let progress = Progress::start();
    let bed = Bed::prepare(options.processors(), &progress)?;
    let work = bed.build.join(format!("xen-compare-{}", std::process::id()));
    let mut figures = Figures::new();
    let ours = ours(options, &progress)?;
    perform(options, &bed, &ours, &work, None, &progress, |line| {
        if let Some((backend, case, rate)) = figure_in(line, &options.backends) {
            figures.entry((case, backend)).or_default().push(rate);
        }
    })?;
    Ok(figures)
}

/// Tapline's programs, if it takes part.
fn ours(options: &Options, progress: &Progress) -> Result<Vec<PathBuf>, BedError> {
    if !options.backends.iter().any(|name| name.starts_with(Backend::Tapline.name())) {
        return Ok(Vec::new());
    }
    progress.detail("building tapline and tapline-disk, static");
    programs::released()
}

/// Runs the load. The console of a guest that did not complete is shown, and its directory kept.
fn perform(
    options: &Options,
    bed: &Bed,
    programs: &[PathBuf],
    work: &Path,
    plugin: Option<&str>,
    progress: &Progress,
    mut heard: impl FnMut(&str),
) -> Result<(), BedError> {
    let script = format!(
        ". /drop/steps.sh\nbackends='{}'\nkernel_words='{}'\nguest_type={}\nguest_cpu={}\ncases='{}'\nrounds={}\nrequests={}\n. /drop/tests/compare.sh\nfinish\n",
        options.backends.join(" "),
        options.front_end().join(" "),
        options.guest.name(),
        if options.own_processor { "1" } else { "" },
        options.cases().map(|(name, _)| name).collect::<Vec<_>>().join(" "),
        options.rounds(),
        options.requests
    );
    progress.step(&format!(
        "{} in a {} guest, {} rounds",
        options.backends.join(", "),
        options.guest.name(),
        options.rounds()
    ));
    let ended = bed.run_script(&script, programs, work, Duration::from_secs(SECONDS_MAX), plugin, |line| {
        heard(line);
        if let Some(round) = line.strip_prefix("TAPLINE round=") {
            progress.detail(&format!("round {} is done", round.trim()));
        }
    })?;
    if ended.code != Some(0) {
        println!("{}\nconsole and /out are kept in {}", tool::last_lines(&ended.console, LAST_LINES), work.display());
    } else if plugin.is_none() {
        fs::remove_dir_all(work).map_err(at("remove", work))?;
    }
    Ok(())
}

/// Counts every instruction and prints the costs.
fn count(options: &Options) -> Result<(), BedError> {
    let progress = Progress::start();
    let bed = Bed::prepare(options.processors(), &progress)?;
    let work = bed.build.join(format!("xen-count-{}", std::process::id()));
    fs::create_dir_all(&work).map_err(at("create", &work))?;
    let counter = Counter::make(&work.join("count"))?;
    let ours = ours(options, &progress)?;
    let programs = [ours.as_slice(), std::slice::from_ref(&counter.mark)].concat();
    let dumps = work.join("dump");
    let plugin = format!("{},out={}", counter.plugin.display(), dumps.display());
    perform(options, &bed, &programs, &work, Some(&plugin), &progress, |_| ())?;
    let disk = ours.iter().find(|program| program.ends_with("tapline-disk"));
    let counts = Counts::read(&work.join("out"), disk.map(PathBuf::as_path), dumps)?;
    println!("\ninstructions a request");
    for (case, (name, title)) in options.cases().enumerate() {
        let mut columns = Vec::new();
        for backend in 0..options.backends.len() {
            let first = (backend * options.cases().count() + case) * MARKS;
            // The last run has three times as many requests.
            columns.push(counts.costs(first, 2 * options.requests_of(name))?);
        }
        print_costs(title, options, &columns);
    }
    fs::remove_dir_all(&work).map_err(at("remove", &work))?;
    Ok(())
}

fn print_costs(title: &str, options: &Options, columns: &[Costs]) {
    let print = |name: &str, figure: &dyn Fn(&Costs) -> f64| {
        print!("{name:<20}");
        columns.iter().for_each(|costs| print!("{:>20.0}", figure(costs)));
        println!();
    };
    print!("\n{title:<20}");
    options.backends.iter().for_each(|backend| print!("{backend:>20}"));
    println!();
    for who in Owner::ALL {
        print(who.name(), &|costs| costs.iter().filter(|((of, _), _)| *of == who).map(|(_, cost)| cost).sum());
    }
    print("all", &|costs| costs.values().sum());
    for (backend, costs) in options.backends.iter().zip(columns).filter(|_| options.functions > 0) {
        println!("  {backend}:");
        let mut functions: Vec<_> =
            costs.iter().filter(|((who, _), _)| !matches!(who, Owner::Guest | Owner::Programs)).collect();
        functions.sort_by(|a, b| b.1.total_cmp(a.1));
        for ((who, function), cost) in functions.into_iter().take(options.functions) {
            println!("{cost:>10.0}  {:<20} {function}", who.name());
        }
    }
}

/// Parses `TAPLINE figure=BACKEND CASE MICROSECONDS REQUESTS`; fio's own rate is truncated to whole numbers.
fn figure_in(line: &str, backends: &[String]) -> Option<(String, String, f64)> {
    let mut words = line.strip_prefix("TAPLINE figure=")?.split_whitespace();
    let backend = words.next().filter(|name| backends.iter().any(|backend| backend == name))?.to_owned();
    let case = words.next()?.to_owned();
    let rate = words.next()?.parse().ok()?;
    Some((backend, case, rate))
}

fn spread(values: &[f64]) -> f64 {
    let (low, high) = values.iter().fold((f64::MAX, 0.0_f64), |(low, high), &value| (low.min(value), high.max(value)));
    if high > 0.0 { (high / low - 1.0) * 100.0 } else { 0.0 }
}

fn of<'a>(figures: &'a Figures, case: &str, backend: &str) -> &'a [f64] {
    figures.get(&(case.to_owned(), backend.to_owned())).map_or(&[], Vec::as_slice)
}

fn print_table(options: &Options, figures: &Figures) {
    println!(
        "\nthousands of instructions a request, of guest, Xen, dom0 and backend; speed as a ratio to the first; spread of rounds"
    );
    print!("{:<20}", "");
    options.backends.iter().for_each(|backend| print!("{backend:>26}"));
    println!();
    for (case, title) in options.cases() {
        print!("{title:<20}");
        let base = options.backends.first().map_or(0.0, |first| middle(of(figures, case, first)));
        for backend in &options.backends {
            let values = of(figures, case, backend);
            let thousands = INSTRUCTIONS_A_SECOND / middle(values) / 1e3;
            print!("{thousands:>12.1} {:>6.2}x {:>4.1}%", middle(values) / base, spread(values));
        }
        println!();
    }
}

/// The targets of the backends that took part, with their results.
fn judged(options: &Options, figures: &Figures) -> Vec<TargetResult> {
    let title = |case: &str| CASES.iter().find(|(name, _)| *name == case).map_or("", |(_, title)| title);
    let has_run = |name: &str| options.cases().any(|(case, _)| case == name);
    let part = targets::of(options.own_processor).filter(|target| target.concerns(&options.backends));
    part.filter(|target| has_run(target.case))
        .map(|target| {
            let of = |backend| of(figures, target.case, backend);
            target.judge(title(target.case), of(target.of), of(target.base))
        })
        .collect()
}

fn print_json(options: &Options, figures: &Figures) {
    let rows = options.cases().flat_map(|(case, title)| {
        options.backends.iter().map(move |backend| {
            let values = of(figures, case, backend);
            let instructions = INSTRUCTIONS_A_SECOND / middle(values);
            serde_json::json!({ "case": title, "backend": backend, "instructions": instructions, "iops": middle(values), "rounds": values })
        })
    });
    let targets = judged(options, figures);
    let targets = targets
        .iter()
        .map(|judged| serde_json::json!({ "target": judged.what, "has": judged.has, "met": judged.is_met }));
    println!("{}", serde_json::json!({ "cases": rows.collect::<Vec<_>>(), "targets": targets.collect::<Vec<_>>() }));
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn a_figure_is_read_from_its_line_only() {
        let both = ["blkback", "tapline+copy"].map(str::to_owned);
        let read = |figure: &str| figure_in(&format!("TAPLINE figure={figure}"), &both);

        assert_eq!(read("tapline+copy rr4k1 1724.5"), Some(("tapline+copy".to_owned(), "rr4k1".to_owned(), 1724.5)));
        assert_eq!(read("tapline rr4k1 1724.5"), None);
        assert_eq!(figure_in("TAPLINE end=0", &both), None);
    }

    #[test]
    fn only_tapline_has_options() {
        assert!(is_backend("blkback") && is_backend("tapline+copy") && is_backend("tapline+map+polling-on"));
        assert!(!is_backend("blkback+copy") && !is_backend("tapline+fast") && !is_backend("vbd3"));
    }

    #[test]
    fn the_spread_is_of_the_largest_over_the_smallest() {
        assert!((spread(&[100.0, 110.0, 105.0]) - 10.0).abs() < 1e-9);
        assert!(spread(&[]).abs() < 1e-9);
    }
}
