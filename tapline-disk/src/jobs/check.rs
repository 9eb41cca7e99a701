//! `image check`: whether an image's structure is sound, and what can be repaired without loss.
//!
//! Space that nothing refers to is named but is no damage: every crash may leave some, and the next writer takes
//! it back. So is an image whose writer was stopped before it could close it.

use disk::vhd::{self, Problem, Report, Severity};
use disk::{ImageErrorKind, Source};
use serde::Serialize;
use uring::{Cache, ImageFile, OpenOptions};

use crate::cli::Check;
use crate::failure::{Exit, Failure};
use crate::image_name::{FormatName, ImageName};
use crate::layers::{Layers, explain, to_look_at};
use crate::output;

/// What was found. Names and meanings are part of the interface.
#[derive(Serialize)]
struct Found {
    image: String,
    /// `clean`, `unclosed`, `damaged` or `repaired`.
    result: &'static str,
    problems: Vec<Line>,
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
    let mut file = ImageFile::open(check.image.path(), OpenOptions { write, cache: Cache::Writeback, lock: true })
        .map_err(Failure::said)?;
    let first = examine(&check.image, &mut file)?;
    let mut problems = lines(&check.image, &first.problems);
    let mut exit = verdict(&first);
    if check.repair && !first.repairs.is_empty() && unfit(&first).is_none() {
        repair(&check.image, &mut file, &first)?;
        exit = match verdict(&examine(&check.image, &mut file)?) {
            Exit::Done => Exit::Repaired,
            worse => worse,
        };
    }
    drop(file);
    for parent in &check.parents.names {
        let mut file = ImageFile::open(parent.path(), to_look_at(true)).map_err(Failure::said)?;
        let report = examine(parent, &mut file)?;
        problems.extend(lines(parent, &report.problems));
        if verdict(&report) == Exit::Damaged {
            exit = Exit::Damaged;
        }
    }
    if !check.parents.names.is_empty() && exit != Exit::Damaged {
        Layers::open(&check.image, &check.parents.names, to_look_at(true))?;
    }
    report(check, exit, problems)
}

fn examine(name: &ImageName, file: &mut ImageFile) -> Result<Report, Failure> {
    let checked = match name.format {
        FormatName::Vhd => vhd::check(file),
        FormatName::Raw => disk::raw::Raw::new(Source::len(file), 512, true)
            .map(|_| Report { problems: Vec::new(), repairs: Vec::new() }),
    };
    match checked {
        Ok(report) => Ok(report),
        // So damaged that the rest cannot be read: a finding, like any other.
        Err(error) if error.kind == ImageErrorKind::Corrupt => {
            let at = error.at.unwrap_or(0);
            let problem = Problem { severity: Severity::Damage, at, what: error.what };
            Ok(Report { problems: vec![problem], repairs: Vec::new() })
        }
        Err(error) => Err(explain(name, error)),
    }
}

fn unfit(report: &Report) -> Option<&Problem> {
    report.problems.iter().find(|problem| problem.severity == Severity::Damage)
}

fn verdict(report: &Report) -> Exit {
    match report.worst() {
        None | Some(Severity::Leak | Severity::Unclosed) => Exit::Done,
        Some(Severity::Repairable | Severity::Damage) => Exit::Damaged,
    }
}

fn repair(name: &ImageName, file: &mut ImageFile, report: &Report) -> Result<(), Failure> {
    let failed = |error| {
        Failure::new(format!("repair {name}"), error)
            .advise("what was wrong before is wrong still; nothing else has changed")
    };
    for write in &report.repairs {
        file.write_at(write.at, &write.bytes).map_err(failed)?;
    }
    file.sync().map_err(failed)
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

fn report(check: &Check, exit: Exit, problems: Vec<Line>) -> Result<Exit, Failure> {
    let unclosed = !problems.is_empty() && problems.iter().all(|line| matches!(line.severity, "leak" | "unclosed"));
    let unclosed = unclosed && problems.iter().any(|line| line.severity == "unclosed");
    let (result, sentence) = match exit {
        Exit::Repaired if unclosed => ("repaired", "was not closed cleanly and is in order now"),
        Exit::Repaired => ("repaired", "was damaged and is repaired"),
        Exit::Damaged => ("damaged", "is damaged"),
        _ if unclosed => {
            ("unclosed", "was not closed cleanly; nothing is damaged, and the next writer puts it in order")
        }
        _ => ("clean", "is clean"),
    };
    if check.json {
        output::json(&Found { image: check.image.to_string(), result, problems })?;
        return Ok(exit);
    }
    let mut text: String = problems
        .iter()
        .map(|line| format!("{}: {} at byte {}: {}\n", line.image, line.severity, line.at, line.what))
        .collect();
    text.push_str(&format!("{} {sentence}\n", check.image));
    let repairable = problems.iter().any(|line| line.severity == "repairable");
    let damage = problems.iter().any(|line| line.severity == "damage");
    if exit == Exit::Damaged && repairable && !damage && !check.repair {
        text.push_str("  run it again with --repair: nothing is lost by that\n");
    }
    output::print(&text)?;
    Ok(exit)
}
