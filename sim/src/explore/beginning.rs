//! Two writes around the beginning of a merge, at every moment of it, and with no space for any one of them.
//!
//! Knows nothing of how a merge decides; that no other exploration has requests begin at the moments of a step.

use super::{Case, Failure, Outcome, explore, in_threads, start_of};
use crate::crash::Explorer;
use crate::fault::{Fault, FaultKind};
use crate::media::Unwritten;
use crate::planted::Planted;
use crate::schedule::{Pace, Schedule};
use crate::subject::{Kind, Start, Subject};
use crate::workload;

/// Two writes to one chunk that no source holds anything of, while a merge begins: the target takes them, or the leaf
/// does, but never the one and then the other. What begins before the merge must begin at one moment of it, and what
/// comes behind at another. The target has a place for the first two writes and none for the others; that there is none
/// the disk's map knows from the read in front of them.
const AROUND_A_BEGINNING: [&str; 2] = ["merge w1+1 w2+1", "r3000+8 merge w3000+1 w3001+1"];
/// Moments at which a request begins, or something ends, before its turn.
const MOMENTS: usize = 3;
/// The same where something fails: the write to the target, above all, for which it has no space.
const MOMENTS_OF_FAULTS: usize = 1;

/// Explores what happens around the beginning of a merge, with requests that begin at any moments of it.
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
        at_moments(explorer, &start, &case, MOMENTS)?;
        for nth in 1.. {
            case.setup.fault = Some(Fault { kind: FaultKind::NoSpace, nth });
            if !at_moments(explorer, &start, &case, MOMENTS_OF_FAULTS)? {
                break;
            }
        }
        Ok(keep_going(job + 1, jobs.len()))
    })
}

/// Explores a case with so many requests at other moments than it says; whether its fault has happened.
fn at_moments(explorer: &mut Explorer, start: &Start, case: &Case, moments: usize) -> Result<bool, Failure> {
    let mut happened = false;
    let mut next = Some(case.schedule.clone());
    while let Some(schedule) = next {
        let mut case = Case { schedule, ..case.clone() };
        happened |= explore(explorer, start, &mut case)?.fault_happened;
        next = case.schedule.next(moments);
    }
    Ok(happened)
}
