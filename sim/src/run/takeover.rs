//! The death of a disk's process while its guest lives, and the takeover by another process.
//!
//! What outlives a process: writes that have reached the files, the redo logs, and the responses to the guest. Requests
//! without a response may have been begun or not. Before the disk is opened, pending writes below the leaf are made
//! durable, as when an image is opened.
//!
//! Invariants checked:
//! - every answered write is read, in every chain that may be opened;
//! - a flush covers them all: they survive a power loss after it;
//! - data flushed before survives a power loss at any time meanwhile;
//! - after a failed sync nothing is durable and no new write is accepted, in the next process as well;
//! - without any space everything is read as well, no flush succeeds, and everything becomes durable when there is
//!   space;
//! - a process that only reads finds it without writing;
//! - a process that accepts the images after a failed sync loses nothing that was flushed.

use std::mem::ManuallyDrop;
use std::ops::Range;

use disk::{Access, Disk, FileId, Image, Operation, Options};

use super::aside::{self, Aside};
use super::opening::Opening;
use super::{Run, Setup, Sight, Violation, Watch};
use crate::changes::Tracked;
use crate::io::SimIo;
use crate::logs::Logs;
use crate::planted::Planted;
use crate::saboteur::{SabotagedIo, SyncFate};
use crate::subject::{Form, Subject};
use crate::theme::Theme;
use crate::workload::{Op, Sectors, Step};

/// The circumstances of a process's death.
#[derive(Clone, Debug)]
pub struct Death<'a> {
    /// The chain that is opened next, leaf first.
    pub chain: &'a [FileId],
    /// Another chain with the same leaf, if there is one: the leaf's parent link determines which is valid.
    pub other: Option<&'a [FileId]>,
    /// Whether pending writes have reached the storage.
    pub reached: bool,
    /// The windows to read.
    pub windows: &'a [Range<u64>],
    /// Whether the next process does more than read and flush.
    pub lives_on: bool,
    /// Whether it accepts the images after a failed sync. It makes durable what it finds; answered writes that were not
    /// flushed may be lost.
    pub accepts: bool,
    /// The next process.
    pub next: Next,
}

/// The process after one that has died.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// A process that serves the disk.
    Serves,
    /// The same, without any space until a write and a flush have failed.
    WithoutSpace,
    /// A process that only reads: it writes nothing.
    OnlyReads,
}

/// Runs the next process: read and flush; or write, read, flush, write, flush and read. `watch` is called after every
/// event.
pub fn take_over(setup: &Setup, sight: &Sight<'_>, death: &Death<'_>, watch: &mut Watch<'_>) -> Result<(), Violation> {
    let wrong = |violation| Violation::TakenOver(Box::new(violation));
    live_on(setup, sight, death, watch).map_err(wrong)
}

fn live_on(setup: &Setup, sight: &Sight<'_>, death: &Death<'_>, watch: &mut Watch<'_>) -> Result<(), Violation> {
    let mut files = death.chain.to_vec();
    files.extend(death.other.into_iter().flatten().filter(|file| !death.chain.contains(file)));
    // The maps come last, so that the files of a chain have the numbers of their depths.
    files.extend(sight.tracked.iter().map(|map| map.file));
    let forms = files.iter().filter_map(|id| sight.forms.get(usize::from(id.0)).copied()).collect::<Vec<_>>();
    let mut io = sight.io.after_death(&files, death.reached);
    let mut logs = sight.logs.of_chain(&files);
    logs.accepts = death.accepts;
    if setup.bug == Some(Planted::FailureBelowForgotten) {
        // Each log separately: pending writes below the leaf are completed before the leaf is opened.
        let all = (0..).map(FileId).zip(&forms).map(|(file, _)| file);
        let knows = |file: &FileId| *file == FileId(0) && io.file(*file).has_failed();
        all.filter(|file| !knows(file)).for_each(|file| logs.forget_failure(file));
    }
    let numbered = |chain: &[FileId]| -> Vec<FileId> {
        let number = |file| files.iter().position(|other| other == file).and_then(|at| u8::try_from(at).ok());
        chain.iter().filter_map(number).map(FileId).collect()
    };
    let tracked: Vec<Tracked> =
        sight.tracked.iter().flat_map(|map| numbered(&[map.file]).first().map(|file| map.in_file(*file))).collect();
    let chains: Vec<Vec<FileId>> = [death.chain].into_iter().chain(death.other).map(numbered).collect();
    if death.next == Next::OnlyReads {
        io.set_writable(FileId(0), false);
        let opening = Opening::ToRead { blind: setup.bug == Some(Planted::LogNotRead) };
        return Run::on(setup, io, (logs, opening), forms, sight.oracle.clone(), chains)?.only_read(death, watch);
    }
    let mut unsettled = Vec::new();
    for depth in (1..death.chain.len()).rev() {
        let file = FileId(u8::try_from(depth).unwrap_or(u8::MAX));
        let finds_no_space = death.next == Next::WithoutSpace && (!unsettled.is_empty() || !logs.has_failed(file));
        if finds_no_space && logs.is_left(file) {
            unsettled.push(file);
        } else if logs.is_left(file) && setup.bug != Some(Planted::ParentsDebtForgotten) {
            let mut look = |io: &SimIo, logs: &Logs| {
                watch(&Sight { io, logs, forms: &forms, chains: &chains, siblings: &[], tracked: &tracked, ..*sight })
            };
            let parent = (file, forms[depth]);
            // If a write fails, this process ends, and another one begins.
            if !settle_parent(&setup.subject, &mut io, &mut logs, parent, &mut look)? && !logs.has_failed(file) {
                settle_parent(&setup.subject, &mut io, &mut logs, parent, &mut look)?;
            }
        }
        // A failed sync below also counts above, whether this process or an earlier one has seen it.
        if logs.has_failed(file) && setup.bug != Some(Planted::FailureBelowForgotten) {
            (0..file.0).for_each(|above| logs.fail(FileId(above)));
        }
    }
    unsettled.iter().for_each(|file| io.set_writable(*file, true));
    let only_read = setup.bug == Some(Planted::ParentsDebtOnlyRead);
    let opening = Opening::Served { unsettled: &unsettled, only_read };
    let mut run = Run::on(setup, io, (logs, opening), forms.clone(), sight.oracle.clone(), chains.clone())?;
    run.continue_map(tracked.clone())?;
    if setup.bug == Some(Planted::OwedWithoutSyncs) {
        // The sync between the first and second batch of pending writes.
        run.plot.borrow_mut().syncs.insert(FileId(0), [SyncFate::Honest, SyncFate::Hollow].into());
    }
    let keeps_chain = sight.chains.first().is_some_and(|first| first == death.chain);
    run.follow(setup, death, keeps_chain, watch)
}

/// Makes the pending writes of a file below the leaf durable; returns whether that succeeded.
fn settle_parent(
    subject: &Subject,
    io: &mut SimIo,
    logs: &mut Logs,
    (file, form): (FileId, Form),
    look: &mut dyn FnMut(&SimIo, &Logs) -> Result<(), Violation>,
) -> Result<bool, Violation> {
    let mut media = io.file(file).visible().clone();
    let log = logs.open(file, &mut media).map_err(Violation::Open)?;
    let failed = log.has_failed();
    let image = subject.open_one(&mut log.patched(&mut media), form, Access::ReadWrite).map_err(Violation::Open)?;
    let mut disk = Disk::new(vec![image], Options::default()).map_err(Violation::Open)?;
    disk.set_log(FileId(0), log).map_err(Violation::Open)?;
    io.set_writable(file, true);
    disk.sync(&mut Aside { io, file });
    while io.pending() > 0 || retried(&mut disk, io, file) {
        for done in io.finish(0) {
            disk.settle(aside::own(done), &mut Aside { io, file });
        }
        disk.retry(&mut Aside { io, file });
        look(io, logs)?;
    }
    io.set_writable(file, false);
    if disk.is_clean() {
        logs.close(file);
    } else if !failed && !io.fault_happened() {
        return Err(Violation::Step("what was left to be written below the leaf does not become durable".into()));
    }
    Ok(disk.is_clean())
}

/// Resubmits refused operations; returns whether the engine has something to do.
fn retried(disk: &mut Disk<Image>, io: &mut SimIo, file: FileId) -> bool {
    disk.retry(&mut Aside { io, file });
    io.pending() > 0
}

impl Death<'_> {
    fn reads(&self) -> Vec<Op> {
        let windows = self.windows.iter().map(|window| Sectors { at: window.start, count: window.end - window.start });
        windows.map(Op::Read).collect()
    }
}

impl Run {
    /// Does the work of the next process. `keeps_chain`: its chain is the one that must exist in the end.
    fn follow(
        mut self,
        setup: &Setup,
        death: &Death<'_>,
        keeps_chain: bool,
        watch: &mut Watch<'_>,
    ) -> Result<(), Violation> {
        if death.accepts {
            self.sync_alone(watch)?;
            drop(ManuallyDrop::into_inner(self.disk));
            return Ok(());
        }
        // The files left by a rebase are the same as those of a merge, except that others remove the old parents.
        if death.lives_on && death.other.is_some() && keeps_chain {
            self.finish_merge(&setup.subject, watch)?;
        }
        let merges = setup.subject.kind.theme() == Theme::Chain && death.other.is_none() && death.next == Next::Serves;
        if merges && death.lives_on && death.reached {
            self.do_verb(Step::MergeAll, &setup.subject, watch)?;
        }
        let reads = death.reads();
        if death.next == Next::WithoutSpace {
            self.without_space(&reads, watch)?;
        }
        let parse = |text| crate::workload::parse(text).unwrap_or_default();
        // A write, and a merge, must wait until the pending writes are durable.
        let (first, later, again) = match death.lives_on {
            true => (parse("w1026+2"), parse("f w2+1 f"), reads.as_slice()),
            false => (Vec::new(), parse("f"), [].as_slice()),
        };
        for op in first.iter().chain(&reads).chain(&later).chain(again) {
            self.do_alone(*op, watch)?;
        }
        // Every request was answered, so the disk can be dropped.
        drop(ManuallyDrop::into_inner(self.disk));
        Ok(())
    }

    /// Only reads the windows.
    fn only_read(mut self, death: &Death<'_>, watch: &mut Watch<'_>) -> Result<(), Violation> {
        death.reads().into_iter().try_for_each(|op| self.do_alone(op, watch))?;
        drop(ManuallyDrop::into_inner(self.disk));
        Ok(())
    }

    /// Writes, reads and flushes without space. Then there is space, and everything must become durable.
    fn without_space(&mut self, reads: &[Op], watch: &mut Watch<'_>) -> Result<(), Violation> {
        self.io.set_full(true);
        let ops = crate::workload::parse("w1026+2 f").unwrap_or_default();
        ops.iter().chain(reads).try_for_each(|op| self.do_alone(*op, watch))?;
        self.io.set_full(false);
        // With a fault, a failed attempt is repeated once.
        for last in [self.setup.fault.is_none(), true] {
            match self.sync_alone(watch) {
                Err(_) if self.io.sync_failed() => break,
                Err(Violation::Step(_)) if !last => {}
                synced => return synced,
            }
        }
        Ok(())
    }

    /// Makes everything durable.
    fn sync_alone(&mut self, watch: &mut Watch<'_>) -> Result<(), Violation> {
        self.disk.sync(&mut SabotagedIo { io: &mut self.io, plot: &self.plot });
        while self.io.pending() > 0 || self.retry() {
            self.finish(0);
            watch(&self.sight())?;
        }
        match self.disk.is_clean() {
            true => Ok(()),
            false => Err(Violation::Step("what was left or taken as it is does not become durable".into())),
        }
    }

    /// Does one operation and waits for its end.
    fn do_alone(&mut self, op: Op, watch: &mut Watch<'_>) -> Result<(), Violation> {
        let Some(op) = op.within(self.guest_sectors) else { return Ok(()) };
        let operation = op.operation().unwrap_or(Operation::Flush);
        self.submit(op, operation);
        while self.io.pending() > 0 || self.retry() {
            self.finish(0);
            self.answers()?;
            watch(&self.sight())?;
        }
        self.answers()?;
        if self.in_flight.is_empty() { Ok(()) } else { Err(Violation::Unanswered(self.in_flight.len())) }
    }
}
