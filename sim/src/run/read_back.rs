//! The reads at the end of a run.

use disk::Operation;

use super::{Run, Violation, around};
use crate::workload::{Op, Sectors};

impl Run {
    /// Reads everything that was requested once more. A power loss shows the contents of the files; this shows those
    /// that the disk reports.
    pub(super) fn read_all_back(&mut self, workload: &[Op]) -> Result<(), Violation> {
        let touched = workload.iter().filter(|op| op.sectors().count > 0);
        let borders = touched.flat_map(|op| [op.sectors().range().start, op.sectors().range().end]);
        for window in around(borders, self.guest_sectors) {
            let sectors = Sectors { at: window.start, count: window.end - window.start };
            self.submit(Op::Read(sectors), Operation::Read);
            while self.io.pending() > 0 || self.retry() {
                self.finish(0);
            }
        }
        self.answers()?;
        if self.in_flight.is_empty() { Ok(()) } else { Err(Violation::Unanswered(self.in_flight.len())) }
    }
}
