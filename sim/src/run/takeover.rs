//! The death of a disk's process, whose guest lives: another takes over.
//!
//! Knows what outlives a process: what its writes have brought to the files, the redo logs, and what the guest was
//! told. Requests that had no answer are as good as not begun, or begun and not ended. What is done here in front of
//! the disk is what opens an image does: what was left below the leaf is made durable, then the disk is opened.
//!
//! Invariants checked:
//! - every answered write is read, in every chain that may be opened;
//! - a flush covers them all: after a power loss from then on they are found;
//! - nothing that was flushed before is lost by a power loss at any moment meanwhile;
//! - after a failed sync nothing is durable and no new write is accepted, by another process either;
//! - without any space all of it is read as well, no flush is answered as if it were durable, and it becomes so when
//!   there is space;
//! - one that only reads finds it without writing;
//! - one that is told to take the images as they are all the same loses nothing that was flushed.

use std::mem::ManuallyDrop;
use std::ops::Range;

use disk::{Access, Disk, FileId, Image, Operation, Options};

use super::aside::{self, Aside};
use super::opening::Opening;
use super::{Run, Setup, Sight, Violation, Watch};
use crate::io::SimIo;
use crate::logs::Logs;
use crate::planted::Planted;
use crate::saboteur::{SabotagedIo, SyncFate};
use crate::subject::{Form, Subject};
use crate::theme::Theme;
use crate::workload::{Op, Sectors, Step};

/// How a process has died.
#[derive(Clone, Debug)]
pub struct Death<'a> {
    /// The chain that is opened then, leaf first.
    pub chain: &'a [FileId],
    /// Another with the same leaf, if there is one: what that records of its parent tells which is right.
    pub other: Option<&'a [FileId]>,
    /// Whether the writes that were under way have reached the storage.
    pub reached: bool,
    /// Where to read.
    pub windows: &'a [Range<u64>],
    /// Whether the next process is to do more than to read and to flush.
    pub lives_on: bool,
    /// Whether it takes the images as they are after a failed sync. It makes durable what it finds, and no more: what
    /// was answered and not flushed may be gone.
    pub accepts: bool,
    /// What it finds.
    pub next: Next,
}

/// Who comes after a process that has died.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// Another one that serves the disk.
    Serves,
    /// The same, and there is no space for anything until it has tried to write and to flush in vain.
    WithoutSpace,
    /// One that only reads: it writes nothing.
    OnlyReads,
}

/// Has another process take over, read and flush; or write, read, flush, write, flush and read. `watch` looks at every
/// moment of it.
pub fn take_over(setup: &Setup, sight: &Sight<'_>, death: &Death<'_>, watch: &mut Watch<'_>) -> Result<(), Violation> {
    let wrong = |violation| Violation::TakenOver(Box::new(violation));
    live_on(setup, sight, death, watch).map_err(wrong)
}

fn live_on(setup: &Setup, sight: &Sight<'_>, death: &Death<'_>, watch: &mut Watch<'_>) -> Result<(), Violation> {
    let mut files = death.chain.to_vec();
    files.extend(death.other.into_iter().flatten().filter(|file| !death.chain.contains(file)));
    let forms = files.iter().filter_map(|id| sight.forms.get(usize::from(id.0)).copied()).collect::<Vec<_>>();
    let mut io = sight.io.after_death(&files, death.reached);
    let mut logs = sight.logs.of_chain(&files);
    logs.accepts = death.accepts;
    if setup.bug == Some(Planted::FailureBelowForgotten) {
        // Each log by itself: those below the leaf are written and end before it is opened.
        let all = (0..).map(FileId).zip(&forms).map(|(file, _)| file);
        let knows = |file: &FileId| *file == FileId(0) && io.file(*file).has_failed();
        all.filter(|file| !knows(file)).for_each(|file| logs.forget_failure(file));
    }
    let numbered = |chain: &[FileId]| -> Vec<FileId> {
        let number = |file| files.iter().position(|other| other == file).and_then(|at| u8::try_from(at).ok());
        chain.iter().filter_map(number).map(FileId).collect()
    };
    let chains: Vec<Vec<FileId>> = [death.chain].into_iter().chain(death.other).map(numbered).collect();
    if death.next == Next::OnlyReads {
        io.let_write(FileId(0), false);
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
                watch(&Sight { io, logs, forms: &forms, chains: &chains, siblings: &[], ..*sight })
            };
            let parent = (file, forms[depth]);
            // Where a write fails, this process ends, and another begins anew.
            if !settle_parent(&setup.subject, &mut io, &mut logs, parent, &mut look)? && !logs.has_failed(file) {
                settle_parent(&setup.subject, &mut io, &mut logs, parent, &mut look)?;
            }
        }
        // What has failed below has failed above, whether it is known from the last process or from this one.
        if logs.has_failed(file) && setup.bug != Some(Planted::FailureBelowForgotten) {
            (0..file.0).for_each(|above| logs.fail(FileId(above)));
        }
    }
    unsettled.iter().for_each(|file| io.let_write(*file, true));
    let only_read = setup.bug == Some(Planted::ParentsDebtOnlyRead);
    let opening = Opening::Served { unsettled: &unsettled, only_read };
    let run = Run::on(setup, io, (logs, opening), forms, sight.oracle.clone(), chains)?;
    if setup.bug == Some(Planted::OwedWithoutSyncs) {
        // The one between the first batch of what is owed and the second.
        run.plot.borrow_mut().syncs.insert(FileId(0), [SyncFate::Honest, SyncFate::Hollow].into());
    }
    let keeps_chain = sight.chains.first().is_some_and(|first| first == death.chain);
    run.follow(setup, death, keeps_chain, watch)
}

/// Makes durable what the process has left to be written to a file below the leaf; whether it is.
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
    io.let_write(file, true);
    disk.sync(&mut Aside { io, file });
    while io.pending() > 0 || retried(&mut disk, io, file) {
        for done in io.finish(0) {
            disk.settle(aside::own(done), &mut Aside { io, file });
        }
        disk.retry(&mut Aside { io, file });
        look(io, logs)?;
    }
    io.let_write(file, false);
    if disk.is_clean() {
        logs.close(file);
    } else if !failed && !io.fault_happened() {
        return Err(Violation::Step("what was left to be written below the leaf does not become durable".into()));
    }
    Ok(disk.is_clean())
}

/// Whether an engine that was full has got something to do.
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
    /// Does what the next process does. `keeps_chain`: its chain is the one that there is to be in the end.
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
        // What is left of a rebase is the same as of a merge, but that somebody else removes the old parents.
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
        // A write that comes first finds what is owed not yet durable, and waits for it. So does a merge.
        let (first, later, again) = match death.lives_on {
            true => (parse("w1026+2"), parse("f w2+1 f"), reads.as_slice()),
            false => (Vec::new(), parse("f"), [].as_slice()),
        };
        for op in first.iter().chain(&reads).chain(&later).chain(again) {
            self.do_alone(*op, watch)?;
        }
        // Every request is answered.
        drop(ManuallyDrop::into_inner(self.disk));
        Ok(())
    }

    /// Reads, and nothing else.
    fn only_read(mut self, death: &Death<'_>, watch: &mut Watch<'_>) -> Result<(), Violation> {
        death.reads().into_iter().try_for_each(|op| self.do_alone(op, watch))?;
        drop(ManuallyDrop::into_inner(self.disk));
        Ok(())
    }

    /// Writes, reads and flushes while nothing finds space. Then there is some, and all becomes durable.
    fn without_space(&mut self, reads: &[Op], watch: &mut Watch<'_>) -> Result<(), Violation> {
        self.io.set_full(true);
        let ops = crate::workload::parse("w1026+2 f").unwrap_or_default();
        ops.iter().chain(reads).try_for_each(|op| self.do_alone(*op, watch))?;
        self.io.set_full(false);
        // Where something goes wrong once, it is tried once more.
        for last in [self.setup.fault.is_none(), true] {
            match self.sync_alone(watch) {
                Err(_) if self.io.sync_failed() => break,
                Err(Violation::Step(_)) if !last => {}
                synced => return synced,
            }
        }
        Ok(())
    }

    /// Makes durable what there is.
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

    /// Does one operation from its beginning to its end.
    fn do_alone(&mut self, op: Op, watch: &mut Watch<'_>) -> Result<(), Violation> {
        let Some(op) = op.within(self.told) else { return Ok(()) };
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
