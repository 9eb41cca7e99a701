//! The report of a storm: times, peaks, kills, repeated requests, and errors.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use serde_json::{Value, json};

use super::watch::Peaks;
use super::{Plan, Storm};

/// Notes collected during the storm.
#[derive(Debug, Default)]
pub struct Notes(Mutex<Noted>);

#[derive(Debug, Default)]
struct Noted {
    again: BTreeMap<String, u64>,
    requests: u64,
}

impl Notes {
    fn noted(&self) -> MutexGuard<'_, Noted> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes that a request failed, and why, and will be repeated.
    pub fn again(&self, what: &str, why: &str) {
        *self.noted().again.entry(format!("{what}: {}", without_names(why))).or_default() += 1;
    }

    /// Adds requests that guests got answered.
    pub fn requests(&self, count: u64) {
        self.noted().requests += count;
    }
}

/// Replaces names and numbers in a message, so that similar ones are counted together.
fn without_names(text: &str) -> String {
    let mut plain = String::new();
    let is_of_name = |c: char| c.is_ascii_hexdigit() || c == '-';
    let mut rest = text;
    while let Some(at) = rest.find(is_of_name) {
        let (before, from) = rest.split_at(at);
        let (name, behind) = from.split_at(from.find(|c| !is_of_name(c)).unwrap_or(from.len()));
        plain.push_str(before);
        // A word that consists of hexadecimal letters only has no digit.
        let is_name = name.len() > 2 && name.contains(|c: char| c.is_ascii_digit());
        plain.push_str(if is_name { "…" } else { name });
        rest = behind;
    }
    plain + rest
}

/// A part of the storm and its duration.
#[derive(Debug)]
pub struct Part {
    pub name: &'static str,
    pub seconds: f64,
    pub peaks: Peaks,
}

/// The report of a storm.
#[derive(Debug, Default)]
pub struct Report {
    pub parts: Vec<Part>,
    failures: Vec<String>,
    killed: BTreeMap<String, u64>,
    again: BTreeMap<String, u64>,
    requests: u64,
    looks: u64,
}

impl Report {
    /// Adds an error to the report.
    pub fn fail(&mut self, why: String) {
        eprintln!("FAILED: {why}");
        self.failures.push(why);
    }

    /// The errors so far.
    pub fn failures(&self) -> &[String] {
        &self.failures
    }

    /// Adds the notes of the whole storm.
    pub fn judged(mut self, storm: &Storm<'_>, killer: Option<String>) -> Report {
        let (twice, looks) = storm.watch.twice();
        self.looks = looks;
        killer.into_iter().chain(twice).for_each(|why| self.fail(why));
        for ((part, kind), count) in storm.killer.killed() {
            self.killed.insert(format!("{part}: {kind}"), count);
        }
        let noted = storm.notes.noted();
        self.requests = noted.requests;
        self.again = noted.again.clone();
        if !storm.plan.kill {
            let asked: Vec<String> =
                noted.again.keys().map(|why| format!("repeated although nothing was killed: {why}")).collect();
            asked.into_iter().for_each(|why| self.fail(why));
        }
        let peak = self.parts.iter().map(|part| part.peaks.all_kib).max().unwrap_or(0);
        let budget = storm.plan.budget_kib();
        if peak > budget {
            self.fail(format!("{} MiB were taken, and {} MiB are set", peak >> 10, budget >> 10));
        }
        self
    }

    /// Prints the report; an error if anything is wrong.
    pub fn print(&self, plan: &Plan) -> Result<(), String> {
        if plan.json {
            println!("{}", self.json(plan));
        } else {
            print!("{}", self.text(plan));
        }
        match self.failures.len() {
            0 => Ok(()),
            count => Err(format!("{count} failures; the first: {}", self.failures.first().map_or("", String::as_str))),
        }
    }

    fn json(&self, plan: &Plan) -> Value {
        let part = |part: &Part| {
            json!({
                "part": part.name, "seconds": part.seconds, "peak_kib": part.peaks.all_kib, "daemon_kib": part.peaks.daemon_kib,
                "disks_kib": part.peaks.disks_kib, "disks": part.peaks.disks, "jobs_kib": part.peaks.jobs_kib, "jobs": part.peaks.jobs,
            })
        };
        json!({
            "vms": plan.vms, "disks": plan.disks, "real": plan.real(), "kill": plan.kill, "seed": plan.seed, "bin_dir": plan.bin_dir,
            "parts": self.parts.iter().map(part).collect::<Vec<_>>(), "budget_kib": plan.budget_kib(), "requests": self.requests,
            "looks_for_two_writers": self.looks, "killed": self.killed, "asked_again": self.again, "failures": self.failures,
        })
    }

    fn text(&self, plan: &Plan) -> String {
        let programs = plan.bin_dir.as_ref().map_or("released".to_owned(), |directory| directory.display().to_string());
        let mut text = format!(
            "{} VMs with {} disks each, {} of them real; programs: {programs}\n\n",
            plan.vms,
            plan.disks,
            plan.real()
        );
        text += &format!(
            "{:<8} {:>9} {:>10} {:>10} {:>16} {:>16}\n",
            "part", "time", "peak", "daemon", "disks", "image jobs"
        );
        for Part { name, seconds, peaks } in &self.parts {
            let of = |kib: u64, count: usize| format!("{} MiB of {count}", kib >> 10);
            text += &format!(
                "{name:<8} {seconds:>7.1} s {:>6} MiB {:>6} MiB {:>16} {:>16}\n",
                peaks.all_kib >> 10,
                peaks.daemon_kib >> 10,
                of(peaks.disks_kib, peaks.disks),
                of(peaks.jobs_kib, peaks.jobs),
            );
        }
        let seconds: f64 = self.parts.iter().map(|part| part.seconds).sum();
        text += &format!("total    {seconds:>7.1} s; {} MiB are set\n\n", plan.budget_kib() >> 10);
        text +=
            &format!("{} requests of simulated guests; looked {} times for two writers\n", self.requests, self.looks);
        for (what, count) in &self.killed {
            text += &format!("killed in {what}: {count}\n");
        }
        for (why, count) in &self.again {
            text += &format!("repeated {count} times: {why}\n");
        }
        for why in &self.failures {
            text += &format!("FAILED: {why}\n");
        }
        if self.failures.is_empty() {
            text += "no failure\n";
        }
        text
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn what_differs_by_identities_and_numbers_alone_is_counted_as_one() {
        let why = |uuid: &str| format!("VBD {uuid} is being plugged already, pid 12345 (code 9)");
        let one = without_names(&why("9b1deb4d-3b7d-4bad-9bdd-2b0d7b3dcb6d"));
        assert_eq!(one, without_names(&why("00000000-3b7d-4bad-9bdd-2b0d7b3dcb6d")));
        assert_eq!(one, "VBD … is being plugged already, pid … (code 9)");
    }
}
