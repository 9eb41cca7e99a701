//! Two writes around the beginning of a merge, at every time within it, and with each operation failing for lack of
//! space.
//!
//! Knows nothing about how a merge decides. Only this exploration lets requests begin between the steps of a verb.

use super::{Case, Failure, Outcome, explore, in_threads, start_of};
use crate::crash::Explorer;
use crate::fault::{Fault, FaultKind};
use crate::media::Unwritten;
use crate::planted::Planted;
use crate::schedule::{Pace, Schedule};
use crate::subject::{Kind, Start, Subject};
use crate::workload;

/// Two writes to one chunk of which no source has data, while a merge begins: either the target takes both or the leaf
/// does, but never one after the other. To find an error, one write must begin at one time within the merge's beginning
/// and the other at another. In the first workload the target has the writes' place allocated, in the second it has
/// not, which the disk's map knows from the preceding read.
const AROUND_A_BEGINNING: [&str; 2] = ["merge w1+1 w2+1", "r3000+8 merge w3000+1 w3001+1"];
/// Maximum number of events that happen before their turn.
const DEVIATIONS: usize = 3;
/// The same for runs with a fault, mostly lack of space for the write to the target.
const DEVIATIONS_WITH_FAULT: usize = 1;

/// Explores the beginning of a merge, with requests that begin at any times within it.
pub fn around_a_beginning(
    bug: Option<Planted>,
    threads: usize,
    keep_going: &(dyn Fn(usize, usize) -> bool + Sync),
) -> Outcome {
    let kinds = [Kind::NewVhdOnVhd, Kind::NewQcow2OnQcow2];
    let jobs: Vec<(Subject, &str)> = kinds
        .into_iter()
        .flat_map(|kind| AROUND_A_BEGINNING.map(|text| (Subject::new(kind, Unwritten::Zeroes), text)))
        .collect();
    in_threads(Explorer::broad, threads, jobs.len(), &|explorer, job| {
        let (subject, text) = jobs[job];
        let workload = workload::parse(text).unwrap_or_default();
        let start = start_of(&subject, Some(&workload))?;
        let mut case = Case::new(subject.plant(bug), workload, Schedule::undisturbed(Pace::Steps));
        case.setup.bug = bug;
        with_deviations(explorer, &start, &case, DEVIATIONS)?;
        for nth in 1.. {
            case.setup.fault = Some(Fault { kind: FaultKind::NoSpace, nth });
            if !with_deviations(explorer, &start, &case, DEVIATIONS_WITH_FAULT)? {
                break;
            }
        }
        Ok(keep_going(job + 1, jobs.len()))
    })
}

/// Explores a case with at most `deviations` events at other times than scheduled; returns whether its fault occurred.
fn with_deviations(explorer: &mut Explorer, start: &Start, case: &Case, deviations: usize) -> Result<bool, Failure> {
    let mut happened = false;
    let mut next = Some(case.schedule.clone());
    while let Some(schedule) = next {
        let mut case = Case { schedule, ..case.clone() };
        happened |= explore(explorer, start, &mut case)?.fault_happened;
        next = case.schedule.next(deviations);
    }
    Ok(happened)
}
