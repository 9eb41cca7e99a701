//! `explain`: in words, what bounds a disk now.
//!
//! Two readings of the disk's statistics page, and of the CPU time of its process, are all that is looked at.
//! Invariant: each sentence comes with the figures that it follows from.

use std::fmt::Write;
use std::path::Path;
use std::time::Duration;

use control::answer::{self, NOT_FOLLOWED, PolicyNote};
use control::size::readable;
use control::{Error, Kind, SizeRule, ask, printable};
use serde_json::json;
use stats::{Count, Kind as Operation, KindCounts, Reader, Snapshot, Stage, float};

use crate::failure::Failure;
use crate::output::print_local;
use crate::place;
use crate::session::How;

/// A request that is older than this is stuck.
const STUCK: u64 = 1_000_000_000;

/// `explain`.
#[derive(Debug, clap::Args)]
pub struct Explain {
    /// A control socket (`serve --control`), or a VBD of the daemon on this host: UUID prefix, VM/vda, or the disk's
    /// name
    #[arg(value_name = "DISK")]
    disk: String,
    /// Look at it for so many seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=600))]
    seconds: u32,
}

/// What was seen in a while.
#[derive(Clone, Debug, Default)]
struct Seen {
    /// How long that was, in nanoseconds.
    ns: u64,
    /// What has come in it, of all kinds together.
    counts: KindCounts,
    reads: u64,
    writes: u64,
    flushes: u64,
    in_flight: u64,
    /// The age of the oldest request, and whether it is with the storage.
    oldest: Option<(u64, bool)>,
    errors: u64,
    /// Requests that a limit has held back, and for how many nanoseconds.
    throttled: (u64, u64),
    /// Those that have waited for the disk's share of its storage.
    shared: (u64, u64),
    /// The share of a CPU that the process took; `None` where that cannot be seen.
    cpu: Option<f64>,
    slow_clock: bool,
}

/// A sentence, and what it follows from.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Finding {
    /// A word for programs.
    bound: &'static str,
    text: String,
    /// What could be done.
    advice: Option<&'static str>,
}

/// Runs the command.
pub fn run(explain: &Explain, how: How) -> Result<(), Failure> {
    let json = how.json;
    let place = place::find(&explain.disk, how)?;
    let seen = look(&place.page, Duration::from_secs(explain.seconds.into()))?;
    let mut findings = judge(&seen);
    // A disk of an earlier program does not know the verb, and one without a socket cannot be asked.
    let shape = crate::disk::ask_once(&place.control, ask::Shape::default());
    findings.extend(shape.ok().map(|shape| shaped(&shape)));
    if json {
        let told: Vec<_> =
            findings.iter().map(|one| json!({ "bound": one.bound, "text": one.text, "advice": one.advice })).collect();
        return Ok(print_local(&format!("{}\n", json!({ "findings": told })))?);
    }
    let mut out = String::new();
    for Finding { text, advice, .. } in findings {
        // Writing to a string cannot fail.
        writeln!(out, "{text}").unwrap_or_default();
        if let Some(advice) = advice {
            writeln!(out, "  {advice}").unwrap_or_default();
        }
    }
    Ok(print_local(&out)?)
}

fn look(page: &Path, time: Duration) -> Result<Seen, Error> {
    let failed = |why: stats::ReadError| {
        let kind = if matches!(why, stats::ReadError::Failed(_)) { Kind::Failed } else { Kind::State };
        Error::cannot(format!("read the statistics page {}", page.display()), why)
            .of_kind(kind)
            .advise("a page of the daemon's disk is readable by root")
    };
    let reader = Reader::open(page).map_err(failed)?;
    let before = reader.snapshot().map_err(failed)?;
    let cpu_before = before.pid.and_then(cpu_time);
    std::thread::sleep(time);
    let now = reader.snapshot().map_err(failed)?;
    let cpu_now = now.pid.filter(|pid| Some(*pid) == before.pid).and_then(cpu_time);
    let cpu = cpu_before.zip(cpu_now).map(|(before, now)| now.saturating_sub(before));
    Ok(Seen::between(&before, &now, cpu))
}

impl Seen {
    fn between(before: &Snapshot, now: &Snapshot, cpu: Option<Duration>) -> Seen {
        let since = |kind: Operation| now.kind(kind).since(&before.kind(kind));
        let counts = Operation::ALL.iter().fold(KindCounts::default(), |sum, kind| sum.with(&since(*kind)));
        let ns = now.read.saturating_sub(before.read);
        let oldest = now.in_flight.first();
        let more = |count: Count| now.count(count).saturating_sub(before.count(count));
        Seen {
            ns,
            counts,
            reads: since(Operation::Read).count(),
            writes: since(Operation::Write).count(),
            flushes: since(Operation::Flush).count(),
            in_flight: now.in_flight.len() as u64,
            oldest: oldest.map(|one| (now.read.saturating_sub(one.taken), one.stage() == Stage::Storage)),
            errors: counts.all_errors(),
            throttled: (more(Count::Throttled), more(Count::ThrottledNs)),
            shared: (more(Count::Shared), more(Count::SharedNs)),
            cpu: cpu.map(|cpu| cpu.as_secs_f64() * 1e9 / float(ns).max(1.0)),
            slow_clock: now.slow_clock,
        }
    }

    /// The average number of requests in these stages.
    fn queue(&self, stages: &[Stage]) -> f64 {
        stages.iter().map(|stage| float(self.counts.sum(*stage))).sum::<f64>() / float(self.ns).max(1.0)
    }

    /// The share of a request's time that is spent in these stages.
    fn share(&self, stages: &[Stage]) -> f64 {
        let sum = stages.iter().map(|stage| float(self.counts.sum(*stage))).sum::<f64>();
        sum / float(self.counts.sum_of_all()).max(1.0)
    }

    /// What requests that were held back have waited, if that bounds the disk. They wait in the ring, as far as the
    /// stages know.
    fn held_back(&self, (waited, held): (u64, u64)) -> Option<String> {
        let share = float(waited) / float(self.counts.count()).max(1.0);
        let mean = float(held) / float(waited).max(1.0) / 1e6;
        let is_much = share > 0.1 && float(held) > 0.3 * float(self.counts.sum_of_all());
        let of_all = percent(share.min(1.0));
        is_much.then(|| format!("{of_all} % of the requests have waited for it, {mean:.1} ms each"))
    }

    fn mean_us(&self) -> f64 {
        float(self.counts.sum_of_all()) / float(self.counts.count()).max(1.0) / 1000.0
    }
}

/// What bounds the disk, the most important first.
fn judge(seen: &Seen) -> Vec<Finding> {
    let mut findings = Vec::new();
    let mut find = |bound, text, advice| findings.push(Finding { bound, text, advice });
    if let Some((age, at_storage)) = seen.oldest.filter(|(age, _)| *age > STUCK) {
        let age = float(age) / 1e9;
        match at_storage {
            true => find(
                "storage",
                format!("The storage has not answered a request for {age:.1} s ({} in flight).", seen.in_flight),
                Some("see the kernel log of the host, and whether the file system or its server hangs"),
            ),
            false => find(
                "held",
                format!("A request has been held back for {age:.1} s and is not with the storage."),
                Some("it waits for space, for a pause, or for an operation on the disk: see tapline disk SOCKET stats"),
            ),
        }
    }
    if seen.errors > 0 {
        let text = format!("{} of {} requests failed.", seen.errors, seen.counts.count());
        find("errors", text, Some("the log of the disk has the reasons"));
    }
    if seen.counts.count() == 0 {
        if seen.in_flight == 0 {
            find("idle", format!("The guest asked for nothing in {:.1} s.", float(seen.ns) / 1e9), None);
        }
        return findings;
    }
    bound_by(seen, &mut find);
    let rate = |count: u64| float(count) * 1e9 / float(seen.ns).max(1.0);
    let text = format!(
        "{:.0} reads, {:.0} writes and {:.0} flushes a second; a request takes {:.1} µs: {} % at the storage, {} % \
         before and {} % behind it.",
        rate(seen.reads),
        rate(seen.writes),
        rate(seen.flushes),
        seen.mean_us(),
        percent(seen.share(&[Stage::Storage])),
        percent(seen.share(&[Stage::Ring, Stage::Map, Stage::Split, Stage::Queue])),
        percent(seen.share(&[Stage::Completion, Stage::Notify])),
    );
    find("figures", text, None);
    if seen.slow_clock {
        let text = "The CPU's counter is no clock on this host, so each look at the time is a system call.".to_owned();
        find("clock", text, Some("tapline doctor says more"));
    }
    findings
}

fn bound_by(seen: &Seen, find: &mut impl FnMut(&'static str, String, Option<&'static str>)) {
    let storage = seen.share(&[Stage::Storage]);
    let whole = seen.queue(&Stage::ALL);
    if let Some(waited) = seen.held_back(seen.throttled) {
        let advice = "tapline vbd limit, or tapline disk SOCKET limit, shows and changes it";
        return find("limit", format!("The limit of the disk: {waited}."), Some(advice));
    }
    if let Some(waited) = seen.held_back(seen.shared) {
        let advice = "other disks use the same storage: tapline vbd share, or tapline disk SOCKET share, gives it more";
        return find("share", format!("The disk's share of its storage: {waited}."), Some(advice));
    }
    if let Some(cpu) = seen.cpu.filter(|cpu| *cpu > 0.9) {
        let text = format!("The disk's thread is busy: it takes {} % of a CPU.", percent(cpu));
        return find(
            "cpu",
            text,
            Some("requests of 64 KiB and more, or several disks, take less of it for the same data"),
        );
    }
    if seen.share(&[Stage::Queue]) > 0.2 {
        let text = format!(
            "{} % of the time requests wait in front of a full kernel queue.",
            percent(seen.share(&[Stage::Queue]))
        );
        return find("queue", text, None);
    }
    if seen.share(&[Stage::Ring]) > 0.3 {
        let text = format!(
            "{} % of the time requests wait to be taken: they come in bursts, or the thread does not get a CPU.",
            percent(seen.share(&[Stage::Ring]))
        );
        return find("ring", text, Some("see whether other processes take the CPUs of the host"));
    }
    if seen.share(&[Stage::Map, Stage::Split]) > 0.4 {
        let text = format!(
            "{} % of the time goes before and between operations of the storage: metadata, copy on write, or requests \
             that wait for each other.",
            percent(seen.share(&[Stage::Map, Stage::Split]))
        );
        return find(
            "map",
            text,
            Some("a long chain or first writes to a thin image do that: see tapline disk SOCKET layers"),
        );
    }
    if storage > 0.6 && whole < 1.3 {
        let text = format!("The guest asks for one thing at a time ({whole:.2} on average): latency is all there is.");
        return find("guest", text, Some("more requests at once (queue depth, threads, read-ahead) give more"));
    }
    if storage > 0.6 {
        let text =
            format!("The storage: of {whole:.1} requests in flight, {:.1} are with it.", seen.queue(&[Stage::Storage]));
        return find("storage", text, None);
    }
    find("balanced", "Nothing stands out.".to_owned(), None);
}

/// Which sizes the disk's transfers have, and why.
fn shaped(shape: &answer::Shape) -> Finding {
    let split = shape.split_bytes.map(|bytes| format!("split into pieces of {}", readable(bytes)));
    let merge = shape.merge_bytes.map(|bytes| format!("merged up to {}", readable(bytes)));
    let parts: Vec<String> = split.into_iter().chain(merge).collect();
    let what = if parts.is_empty() { "left as they are".to_owned() } else { parts.join(" and ") };
    let auto = [shape.split, shape.merge].contains(&SizeRule::Auto);
    let (why, advice) = match &shape.policy {
        Some(policy) if auto => {
            let PolicyNote { measured, device, why, .. } = policy;
            let why = match why.strip_prefix(NOT_FOLLOWED) {
                Some(why) => format!("as {why}"),
                None => format!("by the policy {}, measured {measured} on {device}: {why}", policy.name()),
            };
            (why, None)
        }
        Some(policy) => (format!("as was asked for; the policy {} is not in force", policy.name()), None),
        None if parts.is_empty() => {
            let advice = "tapline sr calibrate, or tapline calibrate without a daemon, measures which suit its storage";
            ("as there is no policy and nothing was asked for".to_owned(), Some(advice))
        }
        None => ("as was asked for".to_owned(), None),
    };
    let text = format!("Transfers are {what}, {}.", printable(&why));
    Finding { bound: "shape", text, advice }
}

/// The CPU time that a process has taken (proc_pid_stat(5), fields 14 and 15).
fn cpu_time(pid: u32) -> Option<Duration> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
    let ticks = |field: usize| fields.get(field - 3).and_then(|ticks| ticks.parse::<u64>().ok());
    let ticks = ticks(14)? + ticks(15)?;
    let a_second = rustix::param::clock_ticks_per_second().max(1);
    Some(Duration::from_millis(ticks * 1000 / a_second))
}

fn percent(share: f64) -> String {
    format!("{:.0}", share * 100.0)
}

#[cfg(test)]
mod test {
    use stats::{Outcome, Page, Source, Spent};

    use super::*;

    /// A disk that has served `count` reads in a second, each with these stages, in nanoseconds.
    fn served(count: u64, [ring, map, storage, completion]: [u64; 4], change: impl FnOnce(&mut Page)) -> Vec<Finding> {
        let file = tempfile::tempfile().unwrap();
        let mut page = Page::begin(file.try_clone().unwrap(), Source::Counter, "{}").unwrap();
        let reader = Reader::of(file).unwrap();
        let before = reader.snapshot().unwrap();
        for _ in 0..count {
            let seen = 1_000_000;
            let (taken, begun) = (seen + ring, seen + ring + map);
            let ended = begun + storage;
            let slot = page.came(Operation::Read, taken, 0, 4096);
            let spent = Spent { seen, taken, begun, ended, split: 0, queue: 0 };
            page.ended(Operation::Read, slot, 4096, Outcome::Done, &spent, ended + completion);
            page.publish_batch(ended + completion);
        }
        change(&mut page);
        let now = reader.snapshot().unwrap();
        let seen = Seen::between(&before, &now, Some(Duration::from_millis(100)));
        // A second, whatever the machine does.
        judge(&Seen { ns: 1_000_000_000, cpu: Some(0.1), ..seen })
    }

    fn bounds(findings: &[Finding]) -> Vec<&'static str> {
        findings.iter().map(|one| one.bound).collect()
    }

    #[test]
    fn what_bounds_a_disk_is_found_in_its_stages() {
        let nothing = |_: &mut Page| ();
        assert_eq!(bounds(&served(0, [0; 4], nothing)), ["idle"]);
        assert_eq!(bounds(&served(9000, [1000, 2000, 100_000, 1000], nothing)), ["guest", "figures"]);
        assert_eq!(bounds(&served(90_000, [1000, 2000, 100_000, 1000], nothing)), ["storage", "figures"]);
        assert_eq!(bounds(&served(9000, [90_000, 2000, 100_000, 1000], nothing)), ["ring", "figures"]);
        assert_eq!(bounds(&served(9000, [1000, 200_000, 100_000, 1000], nothing)), ["map", "figures"]);
        assert_eq!(bounds(&served(9000, [1000, 1000, 2000, 3000], nothing)), ["balanced", "figures"]);
        let figures = served(1000, [0, 50_000, 50_000, 0], nothing).pop().unwrap().text;
        assert!(figures.starts_with("1000 reads, 0 writes") && figures.contains("100.0 µs: 50 %"), "{figures}");
    }

    #[test]
    fn a_stuck_request_comes_first() {
        let stuck = |at_storage: bool| {
            served(10, [0, 1000, 1000, 0], move |page| {
                let old = stats::monotonic() - 5_000_000_000;
                let slot = page.came(Operation::Write, old, 0, 512);
                if at_storage {
                    page.submitted(slot, old + 1);
                }
            })
        };
        let findings = stuck(true);
        assert_eq!(findings[0].bound, "storage");
        assert!(findings[0].text.contains("for 5.") && findings[0].text.contains("1 in flight"), "{:?}", findings[0]);
        assert_eq!(stuck(false)[0].bound, "held");
    }

    #[test]
    fn a_limit_that_holds_requests_back_is_named() {
        let limited = |count: u64, held: u64| {
            served(1000, [held, 2000, 100_000, 1000], move |page| {
                page.count(Count::Throttled, count);
                page.count(Count::ThrottledNs, count * held);
            })
        };
        let findings = limited(900, 5_000_000);
        assert_eq!(bounds(&findings), ["limit", "figures"]);
        assert!(findings[0].text.contains("90 % of the requests have waited for it, 5.0 ms each"), "{findings:?}");
        assert_ne!(bounds(&limited(10, 5_000_000))[0], "limit", "few have waited");
        assert_ne!(bounds(&limited(900, 100))[0], "limit", "they have not waited for long");
    }

    #[test]
    fn the_sizes_of_transfers_are_told_with_the_reason() {
        let policy =
            PolicyNote { file: "/p".into(), why: "it gained".into(), device: "sda".into(), ..PolicyNote::default() };
        let none = shaped(&answer::Shape::default());
        assert!(none.text.contains("left as they are") && none.advice.is_some(), "{none:?}");
        let split =
            answer::Shape { split_bytes: Some(16 << 10), split: SizeRule::Bytes(16 << 10), ..answer::Shape::default() };
        assert_eq!(shaped(&split).text, "Transfers are split into pieces of 16 KiB, as was asked for.");
        let auto = shaped(&answer::Shape { split: SizeRule::Auto, policy: Some(policy.clone()), ..split.clone() });
        assert!(auto.text.contains("by the policy /p") && auto.text.contains("it gained"), "{auto:?}");
        // A disk of the daemon has the policy of its repository, which may be of other storage.
        let recorded = PolicyNote { file: String::new(), repository: Some("7d0f".into()), ..policy.clone() };
        let auto = answer::Shape { split: SizeRule::Auto, policy: Some(recorded.clone()), ..split.clone() };
        assert!(shaped(&auto).text.contains("by the policy of repository 7d0f"), "{auto:?}");
        let unused = PolicyNote { why: format!("{NOT_FOLLOWED}it was measured on sdz"), ..recorded };
        let unused = shaped(&answer::Shape { split_bytes: None, policy: Some(unused), ..auto });
        assert_eq!(unused.text, "Transfers are left as they are, as it was measured on sdz.");
        let other = shaped(&answer::Shape { policy: Some(policy), ..split });
        assert!(other.text.contains("/p is not in force"), "{other:?}");
    }

    #[test]
    fn the_share_of_the_storage_is_named_where_it_holds_requests_back() {
        let findings = served(1000, [5_000_000, 2000, 100_000, 1000], |page| {
            page.count(Count::Shared, 900);
            page.count(Count::SharedNs, 900 * 5_000_000);
        });
        assert_eq!(bounds(&findings), ["share", "figures"]);
        assert!(findings[0].advice.is_some_and(|advice| advice.contains("tapline vbd share")), "{findings:?}");
    }

    #[test]
    fn a_busy_thread_is_named() {
        let seen = Seen { ns: 1_000_000_000, cpu: Some(0.97), ..Seen::default() };
        let mut found = Vec::new();
        bound_by(&seen, &mut |bound, text, _| found.push((bound, text)));
        assert_eq!(found, [("cpu", "The disk's thread is busy: it takes 97 % of a CPU.".to_owned())]);
        assert!(cpu_time(std::process::id()).is_some());
    }
}
