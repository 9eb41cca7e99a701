//! `image check`: checks an image's structure, and repairs what can be repaired without losing data.
//!
//! Leaked space is reported but is not damage: every crash may leave some, and the next writer reclaims it. The same
//! holds for an image whose writer was stopped before it could close it. Only leaked space has an exit code of its own.

use disk::{Problem, Severity};
use serde::Serialize;
use uring::{Cache, OpenOptions};

use crate::cli::Check;
use crate::failure::{Exit, Failure};
use crate::image_name::ImageName;
use crate::layers::{Layers, open_file, to_look_at};
use crate::output;
use crate::soundness::{Examined, examine, mend};

/// The result. Names and meanings are part of the interface.
#[derive(Serialize)]
struct Found {
    image: String,
    /// `clean`, `leaks`, `unclosed`, `damaged` or `repaired`.
    result: &'static str,
    problems: Vec<Line>,
    /// Problems that are not in the list, which stops at some hundreds.
    unlisted: u64,
    /// The repairs that were made.
    repairs: Vec<String>,
}

#[derive(Serialize)]
struct Line {
    image: String,
    /// `leak`, `unclosed`, `repairable` or `damage`.
    severity: &'static str,
    /// Offset in the file.
    at: u64,
    what: String,
}

/// Runs the job. Parents that are named are checked too, and never repaired.
pub fn run(check: &Check) -> Result<Exit, Failure> {
    let write = check.repair;
    let mut file = open_file(&check.image, OpenOptions { write, cache: Cache::Writeback, lock: true })?;
    let first = examine(&check.image, &mut file, check.repair)?;
    let mut found = Found {
        image: check.image.to_string(),
        result: "clean",
        problems: lines(&check.image, &first.problems),
        unlisted: first.unlisted,
        repairs: Vec::new(),
    };
    let mut exit = verdict(&first);
    if check.repair && !first.cure.batches.is_empty() {
        mend(&check.image, &mut file, &first.cure)?;
        exit = match (first.worst(), verdict(&examine(&check.image, &mut file, false)?)) {
            (Some(worst), Exit::Done | Exit::Leaks) if worst > Severity::Leak => Exit::Repaired,
            (_, now) => now,
        };
        found.repairs = first.cure.what;
    }
    drop(file);
    for parent in &check.parents.names {
        let mut file = open_file(parent, to_look_at(true))?;
        let report = examine(parent, &mut file, false)?;
        found.problems.extend(lines(parent, &report.problems));
        found.unlisted = found.unlisted.saturating_add(report.unlisted);
        exit = match (exit, verdict(&report)) {
            (_, Exit::Damaged) => Exit::Damaged,
            (Exit::Done, Exit::Leaks) => Exit::Leaks,
            (exit, _) => exit,
        };
    }
    if !check.parents.names.is_empty() && exit != Exit::Damaged {
        Layers::open(&check.image, &check.parents, to_look_at(true))?;
    }
    report(check, exit, found)
}

fn verdict(report: &Examined) -> Exit {
    match report.worst() {
        None | Some(Severity::Unclosed) => Exit::Done,
        Some(Severity::Leak) => Exit::Leaks,
        Some(Severity::Repairable | Severity::Damage) => Exit::Damaged,
    }
}

fn lines(name: &ImageName, problems: &[Problem]) -> Vec<Line> {
    let severity = |severity| match severity {
        Severity::Leak => "leak",
        Severity::Unclosed => "unclosed",
        Severity::Repairable => "repairable",
        Severity::Damage => "damage",
    };
    let line = |problem: &Problem| Line {
        image: name.to_string(),
        severity: severity(problem.severity),
        at: problem.at,
        what: problem.what.clone(),
    };
    problems.iter().map(line).collect()
}

fn report(check: &Check, exit: Exit, mut found: Found) -> Result<Exit, Failure> {
    let mut severities = found.problems.iter().map(|line| line.severity);
    let only_unclosed = severities.clone().all(|severity| matches!(severity, "leak" | "unclosed"));
    let unclosed = only_unclosed && severities.any(|severity| severity == "unclosed");
    let (result, sentence) = match exit {
        Exit::Repaired if unclosed => ("repaired", "was not closed cleanly; this has been repaired"),
        Exit::Repaired => ("repaired", "was damaged and has been repaired"),
        Exit::Damaged => ("damaged", "is damaged"),
        Exit::Leaks => ("leaks", "is intact, apart from leaked space"),
        _ if unclosed => ("unclosed", "was not closed cleanly; nothing is damaged, and the next writer repairs it"),
        _ => ("clean", "is clean"),
    };
    found.result = result;
    if check.json {
        output::json(&found)?;
        return Ok(exit);
    }
    let line = |line: &Line| format!("{}: {} at byte {}: {}\n", line.image, line.severity, line.at, line.what);
    let mut text: String = found.problems.iter().map(line).collect();
    if found.unlisted > 0 {
        text.push_str(&format!("{}: {} more problems\n", check.image, found.unlisted));
    }
    text.extend(found.repairs.iter().map(|what| format!("{}: {what}\n", check.image)));
    text.push_str(&format!("{} {sentence}\n", check.image));
    let repairable = found.problems.iter().any(|line| line.severity == "repairable");
    let damage = found.problems.iter().any(|line| line.severity == "damage");
    if exit == Exit::Damaged && repairable && !damage && !check.repair {
        text.push_str("  run it again with --repair; no data will be lost\n");
    }
    output::print(&text)?;
    Ok(exit)
}
