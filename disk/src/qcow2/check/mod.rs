//! Whether a qcow2 image is sound: every reference in it is followed and counted, and the counts are compared with
//! those that the image keeps.
//!
//! Reads only, and knows nothing of how to repair ([`super::repair`] begins with the same survey). What `qemu-img
//! check` calls an error is [`Severity::Repairable`] or [`Severity::Damage`] here, what it calls a leak is
//! [`Severity::Leak`]. Memory: the ledger, and one table of 8 MiB at most; everything else passes through in pieces.
//! Time: each table is read once for each first-level entry that names it.

mod bitmaps;
pub mod copied;
mod ledger;
mod refcounts;
pub mod shape;
mod snapshots;
pub mod walk;

use ledger::Ledger;
use refcounts::Refcounts;
use shape::Shape;
use walk::Walk;

use crate::qcow2::cluster::HostCluster;
use crate::{FileOffset, FileRange, ImageError, Problem, Severity, Source};

/// Problems listed of each severity. A block of refcounts that is gone makes 32768 of them, and no user reads that
/// many.
const LISTED_MAX: u64 = 200;

/// The outcome of a check.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// The problems found, the first 200 of each severity. Empty if there are none.
    pub problems: Vec<Problem>,
    /// Number of problems that are not in the list.
    pub unlisted: u64,
    /// The image was not closed: its refcounts are not to be trusted before a repair, whatever the check found.
    pub dirty: bool,
    /// A program found the image damaged and marked it: it is not to be written to before a repair.
    pub marked_corrupt: bool,
}

impl Report {
    /// The severity of the worst problem.
    pub fn worst(&self) -> Option<Severity> {
        self.problems.iter().map(|problem| problem.severity).max()
    }
}

/// Checks all metadata of a file. An error means that it cannot be read as a qcow2 image at all.
pub fn check(source: &mut dyn Source) -> Result<Report, ImageError> {
    let survey = Survey::of(source)?;
    Ok(Report {
        problems: survey.findings.problems,
        unlisted: survey.findings.unlisted,
        dirty: survey.shape.dirty(),
        marked_corrupt: survey.shape.marked_corrupt(),
    })
}

/// Problems, as they are found.
#[derive(Debug, Default)]
pub(super) struct Findings {
    pub(super) problems: Vec<Problem>,
    pub(super) unlisted: u64,
    listed: [u64; 3],
}

impl Findings {
    pub(super) fn add(&mut self, severity: Severity, at: FileOffset, what: impl Into<String>) {
        let listed = match severity {
            Severity::Leak | Severity::Unclosed => &mut self.listed[0],
            Severity::Repairable => &mut self.listed[1],
            Severity::Damage => &mut self.listed[2],
        };
        if *listed < LISTED_MAX {
            *listed += 1;
            self.problems.push(Problem { severity, at, what: what.into() });
        } else {
            self.unlisted = self.unlisted.saturating_add(1);
        }
    }
}

/// All references of an image, and what is wrong with it.
pub(super) struct Survey {
    pub(super) shape: Shape,
    pub(super) ledger: Ledger,
    pub(super) refcounts: Refcounts,
    pub(super) findings: Findings,
    /// Some references cannot be made out: what they refer to may look like a leak.
    pub(super) unresolved: bool,
    /// Some entries may be repairable one by one.
    pub(super) mendable: bool,
    /// The first cluster behind the end of the file that something refers to.
    pub(super) beyond: Option<HostCluster>,
    /// Two places of the disk have the same cluster, more often than the image says.
    pub(super) shared: u64,
    /// Something lies where a structure is that has its clusters for itself.
    pub(super) overlapped: bool,
    /// Those structures, but for second-level tables of the disk.
    structures: Vec<FileRange>,
}

impl Survey {
    pub(super) fn of(source: &mut dyn Source) -> Result<Survey, ImageError> {
        let shape = Shape::of(source)?;
        let mut walk = Walk::new(&shape);
        if shape.claims_raw_data() {
            walk.findings.add(
                Severity::Repairable,
                FileOffset(88),
                "the header flags a raw external data file, but the image has no data file",
            );
        }
        if shape.misplaces_no_snapshots() {
            walk.findings.add(
                Severity::Repairable,
                FileOffset(64),
                "the header names a place that cannot be, for no snapshots",
            );
        }
        walk.image(source)?;
        // Before the refcount structures are counted: what those lie upon is right again once they are elsewhere.
        walk.judge_overlaps();
        let mut refcounts = Refcounts::read(source, &mut walk)?;
        walk.judge_overlaps();
        let Walk { mut ledger, mut findings, unresolved, mendable, beyond, overlapped, structures, .. } = walk;
        let compared = refcounts::compare(source, &shape, &mut refcounts, &mut ledger, &mut findings)?;
        copied::judge(source, &shape, &ledger, &mut findings)?;
        Ok(Survey {
            shape,
            ledger,
            refcounts,
            findings,
            unresolved: unresolved || compared.too_many,
            mendable,
            beyond,
            shared: compared.shared,
            overlapped,
            structures,
        })
    }

    /// Whether a structure that has its clusters for itself is in this one.
    pub(super) fn is_structure(&self, cluster: HostCluster) -> bool {
        let at = self.shape.offset_of(cluster);
        let within = |other: &FileRange| {
            at < other.at.saturating_add(other.len) && at.saturating_add(self.shape.cluster) > other.at
        };
        self.ledger.is_table(cluster) || self.structures.iter().any(within)
    }
}
