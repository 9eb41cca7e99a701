//! `image check`: checks an image's structure, and repairs what can be repaired without losing data.
//!
//! Leaked space is reported but is not damage: every crash may leave some, and the next writer reclaims it. The same
//! holds for an image whose writer was stopped before it could close it. Only leaked space has its own exit code.

use control::{FormatName, ImageName};
use disk::redo::Owed;
use disk::{Problem, RedoLog, Severity};
use serde::Serialize;
use uring::{ImageFile, OpenOptions};

use crate::files::Files;
use crate::files::access;
use crate::image::chain::{Layers, metadata_options};
use crate::image::check::{self, Examined, examine, examine_through};
use crate::image::replay_redo;
use crate::image::vhd_tail;
use crate::process::failure::{Exit, Failure};
use crate::process::output;
use arguments::{Check, Sharing};

/// The result. Names and meanings are part of the interface.
#[derive(Serialize)]
struct Checked {
    image: String,
    /// `clean`, `leaks`, `unclosed`, `damaged` or `repaired`.
    result: &'static str,
    problems: Vec<ProblemLine>,
    /// The number of problems that are not in the list, which is limited to some hundreds.
    unlisted: u64,
    /// The repairs that were made.
    repairs: Vec<String>,
    /// The number of metadata sectors that the image's last process, which was killed, has left in its redo log. They
    /// were checked as if they had been written.
    #[serde(skip_serializing_if = "Option::is_none")]
    left_sectors: Option<usize>,
}

#[derive(Serialize)]
struct ProblemLine {
    image: String,
    /// `leak`, `unclosed`, `repairable` or `damage`.
    severity: &'static str,
    /// Byte offset in the file.
    at: u64,
    what: String,
}

/// Runs the job. Parents that are named are checked too, and never repaired.
pub fn run(files: &Files, check: &Check) -> Result<Exit, Failure> {
    let (mut file, log) = match check.repair {
        true => {
            (replay_redo::to_write(files, &check.image, OpenOptions { write: true, ..metadata_options(true) })?, None)
        }
        false => to_examine(files, &check.image, check.sharing)?,
    };
    let first = match check.repair {
        true => examine(&check.image, &mut file, true)?,
        false => examine_through(&check.image, &mut file, log.as_ref())?,
    };
    let mut found = Checked {
        image: check.image.to_string(),
        result: "clean",
        problems: lines(&check.image, &first.problems),
        unlisted: first.unlisted,
        repairs: Vec::new(),
        left_sectors: log.as_ref().and_then(RedoLog::owed).map(Owed::sectors),
    };
    let mut exit = verdict(&check.image, &first);
    if check.repair {
        let worst = first.worst();
        found.repairs = repair(&check.image, &mut file, first)?;
        if !found.repairs.is_empty() {
            exit = match (worst, verdict(&check.image, &examine(&check.image, &mut file, false)?)) {
                (Some(worst), Exit::Done | Exit::Leaks) if worst > Severity::Leak => Exit::Repaired,
                (_, now) => now,
            };
        }
    }
    drop(file);
    let own = exit;
    for parent in &check.parents.names {
        let (mut file, log) = to_examine(files, parent, check.sharing)?;
        let report = examine_through(parent, &mut file, log.as_ref())?;
        found.problems.extend(lines(parent, &report.problems));
        found.unlisted += report.unlisted;
        exit = match (exit, verdict(parent, &report)) {
            (_, Exit::Damaged) => Exit::Damaged,
            (Exit::Done, Exit::Leaks) => Exit::Leaks,
            (exit, _) => exit,
        };
    }
    if !check.parents.names.is_empty() && exit != Exit::Damaged {
        Layers::open(files, &check.image, &check.parents, access::shared(metadata_options(true), check.sharing))?;
    }
    report(check, own, exit, found)
}

/// Opens an image for reading, and the redo log through which it must be read. The log of an image in use changes
/// during the check, so it is ignored.
fn to_examine(files: &Files, name: &ImageName, sharing: Sharing) -> Result<(ImageFile, Option<RedoLog>), Failure> {
    match sharing.force_share {
        true => files.open_image(name, metadata_options(false)).map(|file| (file, None)).map_err(Failure::said),
        false => replay_redo::to_read(files, name, metadata_options(true)).map_err(access::advise),
    }
}

/// Repairs what can be repaired; returns what was done, and what could not be.
fn repair(name: &ImageName, file: &mut ImageFile, examined: Examined) -> Result<Vec<String>, Failure> {
    let Examined { problems, repair, .. } = examined;
    let mut done = Vec::new();
    if !repair.batches.is_empty() {
        check::repair(name, file, &repair)?;
    }
    done.extend(repair.what);
    let leaks = problems.iter().any(|problem| problem.severity == Severity::Leak);
    if name.format == FormatName::Vhd && leaks && vhd_tail::clear(name, file)? {
        done.push("the file ends behind its last block".to_owned());
    }
    Ok(done)
}

/// Returns the exit code of a check. Leaked space counts unless something worse is found: an image that was merely not
/// closed is intact. Bytes behind the last block of an unclosed VHD are no leak: the next writer removes them.
fn verdict(name: &ImageName, report: &Examined) -> Exit {
    let has = |severity| report.problems.iter().any(|problem| problem.severity == severity);
    match report.worst() {
        Some(Severity::Repairable | Severity::Damage) => Exit::Damaged,
        _ if has(Severity::Unclosed) && name.format == FormatName::Vhd => Exit::Done,
        _ if has(Severity::Leak) => Exit::Leaks,
        Some(Severity::Leak | Severity::Unclosed) | None => Exit::Done,
    }
}

fn lines(name: &ImageName, problems: &[Problem]) -> Vec<ProblemLine> {
    let severity = |severity| match severity {
        Severity::Leak => "leak",
        Severity::Unclosed => "unclosed",
        Severity::Repairable => "repairable",
        Severity::Damage => "damage",
    };
    let line = |problem: &Problem| ProblemLine {
        image: name.to_string(),
        severity: severity(problem.severity),
        at: problem.at.0,
        what: problem.what.clone(),
    };
    problems.iter().map(line).collect()
}

/// Prints the result. `own` is the exit code of the image itself, `exit` that of all checked images.
fn report(check: &Check, own: Exit, exit: Exit, mut found: Checked) -> Result<Exit, Failure> {
    let is_own = |line: &&ProblemLine| line.image == found.image;
    let own_severities: Vec<_> = found.problems.iter().filter(is_own).map(|line| line.severity).collect();
    let only_unclosed = own_severities.iter().all(|severity| matches!(*severity, "leak" | "unclosed"));
    let unclosed = only_unclosed && own_severities.contains(&"unclosed");
    let (result, sentence) = match own {
        Exit::Repaired if unclosed => ("repaired", "was not closed cleanly; this has been repaired"),
        Exit::Repaired => ("repaired", "was damaged and has been repaired"),
        Exit::Damaged => ("damaged", "is damaged"),
        Exit::Leaks if unclosed => ("leaks", "was not closed cleanly; nothing is damaged, apart from leaked space"),
        Exit::Leaks => ("leaks", "is intact, apart from leaked space"),
        _ if unclosed => ("unclosed", "was not closed cleanly; nothing is damaged, and the next writer repairs it"),
        _ => ("clean", "is clean"),
    };
    // The sentence is about the image only; the result is about all checked images.
    let of_parents = match exit {
        _ if exit == own => None,
        Exit::Damaged => Some(("damaged", "a parent is damaged")),
        _ => Some(("leaks", "a parent has leaked space")),
    };
    found.result = of_parents.map_or(result, |(result, _)| result);
    if check.json {
        output::json(&found)?;
        return Ok(exit);
    }
    let line = |line: &ProblemLine| format!("{}: {} at byte {}: {}\n", line.image, line.severity, line.at, line.what);
    let mut text: String = found.problems.iter().map(line).collect();
    if found.unlisted > 0 {
        text.push_str(&format!("{}: {} more problems\n", check.image, found.unlisted));
    }
    text.extend(found.repairs.iter().map(|what| format!("{}: {what}\n", check.image)));
    let of_parents = of_parents.map_or(String::new(), |(_, sentence)| format!("; {sentence}"));
    text.push_str(&format!("{} {sentence}{of_parents}\n", check.image));
    if let Some(sectors) = found.left_sectors {
        text.push_str(&format!(
            "  its last process was killed and has left {sectors} sectors of metadata in its redo log, which were \
             checked with it; the next writer writes them\n"
        ));
    }
    text.push_str(advice(own, check.repair, &own_severities));
    output::print(&text)?;
    Ok(exit)
}

/// Returns advice about an image with this verdict and these problems; empty if there is none.
fn advice(own: Exit, repaired: bool, severities: &[&str]) -> &'static str {
    match (own, severities.contains(&"damage")) {
        (Exit::Damaged, _) if repaired => {
            "  what is still damaged cannot be repaired: restore the image from a backup, or copy what can be read: \
             `tapline image convert --salvage`\n"
        }
        (Exit::Damaged, true) => {
            "  run it again with --repair: it repairs what can be repaired, and says what cannot\n"
        }
        (Exit::Damaged, false) => "  run it again with --repair; no data will be lost\n",
        _ => "",
    }
}
