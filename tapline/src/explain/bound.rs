//! Finds what limits a disk, from two readings of its statistics page.
//!
//! Invariant: each sentence comes with the figures that support it.

use std::time::Duration;

use stats::{Count, Kind as Operation, KindCounts, Snapshot, Stage, float};

use super::Finding;
use crate::unit::time;

/// Age in nanoseconds from which a request in flight is reported.
const OLD: u64 = 1_000_000_000;

/// With fewer requests in flight on average, the guest spends much of its time elsewhere.
const MOSTLY_HERE: f64 = 0.7;

const ONLY_THE_GUEST_KNOWS: &str = "which of both cannot be seen from the host: with tapline-guest in the guest, \
                                    tapline top shows its CPUs and queues (docs/statistics.md)";

/// Counts of an interval.
#[derive(Clone, Debug, Default)]
pub struct Interval {
    /// Length of the interval in nanoseconds.
    ns: u64,
    /// Counts of all kinds together.
    counts: KindCounts,
    reads: u64,
    writes: u64,
    flushes: u64,
    in_flight: u64,
    /// The age of the oldest request, in nanoseconds.
    oldest: Option<u64>,
    errors: u64,
    /// Number of requests held back by a limit, and the nanoseconds that they waited.
    throttled: (u64, u64),
    /// The same for the disk's share of its storage.
    shared: (u64, u64),
    /// CPU time of the process as a share of the interval; `None` if unknown.
    cpu: Option<f64>,
    slow_clock: bool,
}

impl Interval {
    pub fn between(before: &Snapshot, now: &Snapshot, cpu: Option<Duration>) -> Interval {
        let since = |kind: Operation| now.kind(kind).since(&before.kind(kind));
        let counts = now.all_kinds().since(&before.all_kinds());
        let ns = now.read.saturating_sub(before.read);
        let oldest = now.in_flight.first();
        let more = |count: Count| now.count(count).saturating_sub(before.count(count));
        Interval {
            ns,
            counts,
            reads: since(Operation::Read).count(),
            writes: since(Operation::Write).count(),
            flushes: since(Operation::Flush).count(),
            in_flight: now.in_flight.len() as u64,
            oldest: oldest.map(|one| now.read.saturating_sub(one.taken)),
            errors: counts.all_errors(),
            throttled: (more(Count::Throttled), more(Count::ThrottledNs)),
            shared: (more(Count::Shared), more(Count::SharedNs)),
            cpu: cpu.map(|cpu| cpu.as_secs_f64() * 1e9 / float(ns).max(1.0)),
            slow_clock: now.slow_clock,
        }
    }

    /// Average number of requests in these stages.
    fn queue(&self, stages: &[Stage]) -> f64 {
        stages.iter().map(|stage| float(self.counts.sum(*stage))).sum::<f64>() / float(self.ns).max(1.0)
    }

    /// Share of a request's time spent in these stages.
    fn share(&self, stages: &[Stage]) -> f64 {
        let sum = stages.iter().map(|stage| float(self.counts.sum(*stage))).sum::<f64>();
        sum / float(self.counts.sum_of_all()).max(1.0)
    }

    /// Describes how long requests were held back, if that limits the disk. The stages count this time as `ring`.
    fn held_back(&self, (waited, held): (u64, u64)) -> Option<String> {
        let share = float(waited) / float(self.counts.count()).max(1.0);
        let mean = time(float(held) / float(waited).max(1.0));
        let is_much = share > 0.1 && float(held) > 0.3 * float(self.counts.sum_of_all());
        let of_all = percent(share.min(1.0));
        is_much.then(|| format!("{of_all} % of the requests have waited for it, {mean} each"))
    }

    /// Mean duration of a request in nanoseconds.
    fn mean(&self) -> f64 {
        float(self.counts.sum_of_all()) / float(self.counts.count()).max(1.0)
    }
}

/// The limiting factors of the disk, the most important first.
pub fn judge(seen: &Interval) -> Vec<Finding> {
    let mut findings = Vec::new();
    let mut find = |bound, text, advice: Option<&'static str>| {
        findings.push(Finding { bound, text, advice: advice.map(Into::into) })
    };
    if let Some(age) = seen.oldest.filter(|age| *age > OLD) {
        find("in-flight", in_flight(seen.in_flight, age), None);
    }
    if seen.errors > 0 {
        let text = format!("{} of {} requests failed.", seen.errors, seen.counts.count());
        find("errors", text, Some("the log of the disk has the reasons"));
    }
    if seen.counts.count() == 0 {
        if seen.in_flight == 0 {
            find("idle", format!("The guest sent no requests for {}.", time(float(seen.ns))), None);
        }
        return findings;
    }
    bound_by(seen, &mut find);
    let rate = |count: u64| float(count) * 1e9 / float(seen.ns).max(1.0);
    let text = format!(
        "{:.0} reads, {:.0} writes and {:.0} flushes a second; a request takes {}: {} % at the storage, {} % \
         before and {} % behind it.",
        rate(seen.reads),
        rate(seen.writes),
        rate(seen.flushes),
        time(seen.mean()),
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

/// Describes the requests in flight, the oldest of which is `oldest` nanoseconds old.
pub fn in_flight(count: u64, oldest: u64) -> String {
    let age = time(float(oldest));
    match count {
        1 => format!("One request is in flight, for {age}."),
        count => format!("{count} requests are in flight, the oldest for {age}."),
    }
}

/// Describes how much of its time the guest spends outside of this disk, with `whole` requests in flight on average.
fn elsewhere(whole: f64) -> String {
    format!(
        "The guest spends at most {} % of its time waiting for this disk ({whole:.2} requests in flight on average). \
         The rest is its own: it computes, or has nothing to do.",
        percent(whole)
    )
}

fn bound_by(seen: &Interval, find: &mut impl FnMut(&'static str, String, Option<&'static str>)) {
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
    if storage > 0.6 && whole < MOSTLY_HERE {
        return find("guest", elsewhere(whole), Some(ONLY_THE_GUEST_KNOWS));
    }
    if storage > 0.6 && whole < 1.3 {
        let text = format!(
            "The guest waits for one request at a time ({whole:.2} in flight on average): the storage's latency is the \
             limit."
        );
        return find("guest", text, Some("more requests at once (queue depth, threads, read-ahead) give more"));
    }
    if storage > 0.6 {
        let text =
            format!("The storage: of {whole:.1} requests in flight, {:.1} are with it.", seen.queue(&[Stage::Storage]));
        return find("storage", text, None);
    }
    find("balanced", "Nothing stands out.".to_owned(), None);
}

/// CPU time that a process has used (proc_pid_stat(5), fields 14 and 15).
pub fn cpu_time(pid: u32) -> Option<Duration> {
    let status = stats::process_status(pid)?;
    let mut ticks = status.split_whitespace().skip(11).map(|ticks| ticks.parse::<u64>().ok());
    let ticks = ticks.next()?? + ticks.next()??;
    let a_second = rustix::param::clock_ticks_per_second().max(1);
    Some(Duration::from_millis(ticks * 1000 / a_second))
}

fn percent(share: f64) -> String {
    format!("{:.0}", share * 100.0)
}

#[cfg(test)]
mod test {
    use stats::{Outcome, Page, Reader, Source, Spent};

    use super::*;

    /// Findings for a disk that has served `count` reads in a second, each with these nanoseconds in its stages.
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
        let seen = Interval::between(&before, &now, Some(Duration::from_millis(100)));
        // Exactly a second, however slow the machine is.
        judge(&Interval { ns: 1_000_000_000, cpu: Some(0.1), ..seen })
    }

    fn bounds(findings: &[Finding]) -> Vec<&'static str> {
        findings.iter().map(|one| one.bound).collect()
    }

    #[test]
    fn the_limiting_stage_is_found() {
        let nothing = |_: &mut Page| ();
        assert_eq!(bounds(&served(0, [0; 4], nothing)), ["idle"]);
        assert_eq!(bounds(&served(9000, [1000, 2000, 100_000, 1000], nothing)), ["guest", "figures"]);
        assert_eq!(bounds(&served(90_000, [1000, 2000, 100_000, 1000], nothing)), ["storage", "figures"]);
        assert_eq!(bounds(&served(9000, [90_000, 2000, 100_000, 1000], nothing)), ["ring", "figures"]);
        assert_eq!(bounds(&served(9000, [1000, 200_000, 100_000, 1000], nothing)), ["map", "figures"]);
        assert_eq!(bounds(&served(9000, [1000, 1000, 2000, 3000], nothing)), ["balanced", "figures"]);
        let figures = served(1000, [0, 50_000, 50_000, 0], nothing).pop().unwrap().text;
        assert!(figures.starts_with("1000 reads, 0 writes") && figures.contains("100 µs: 50 %"), "{figures}");
    }

    #[test]
    fn an_old_request_comes_first() {
        let findings = served(10, [0, 1000, 1000, 0], |page| {
            page.came(Operation::Write, stats::monotonic() - 5_000_000_000, 0, 512);
        });
        assert_eq!(findings[0].bound, "in-flight");
        assert!(findings[0].text.starts_with("One request is in flight, for 5."), "{:?}", findings[0]);
    }

    #[test]
    fn the_share_of_the_guests_own_time_is_named() {
        let findings = served(3000, [1000, 2000, 100_000, 1000], |_| ());
        assert_eq!(bounds(&findings), ["guest", "figures"]);
        assert!(findings[0].text.contains("at most 31 % of its time"), "{findings:?}");
        assert!(findings[0].advice.as_ref().is_some_and(|advice| advice.contains("tapline-guest")), "{findings:?}");
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
    fn the_share_of_the_storage_is_named_where_it_holds_requests_back() {
        let findings = served(1000, [5_000_000, 2000, 100_000, 1000], |page| {
            page.count(Count::Shared, 900);
            page.count(Count::SharedNs, 900 * 5_000_000);
        });
        assert_eq!(bounds(&findings), ["share", "figures"]);
        assert!(findings[0].advice.as_ref().is_some_and(|advice| advice.contains("tapline vbd share")), "{findings:?}");
    }

    #[test]
    fn a_busy_thread_is_named() {
        let seen = Interval { ns: 1_000_000_000, cpu: Some(0.97), ..Interval::default() };
        let mut found = Vec::new();
        bound_by(&seen, &mut |bound, text, _| found.push((bound, text)));
        assert_eq!(found, [("cpu", "The disk's thread is busy: it takes 97 % of a CPU.".to_owned())]);
        assert!(cpu_time(std::process::id()).is_some());
    }
}
