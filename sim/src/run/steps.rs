//! What an administrator does to the chain while its guest runs: one thing at a time, in steps between which
//! anything may happen.
//!
//! Knows the order in which the disk is asked, as the jobs of the disk process ask it, and which chains may be opened
//! after a power loss meanwhile.

use disk::{Access, FileId, ImageErrorKind};

use super::{Run, Violation};
use crate::planted::Planted;
use crate::saboteur::{SabotagedIo, Saboteur};
use crate::sector::SECTOR;
use crate::subject::{Form, Made, Subject};
use crate::workload::Step;

/// Something that is being done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Chore {
    step: Step,
    stage: Stage,
    /// The file that it makes.
    file: Option<FileId>,
}

/// How far it has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// Asked for; a new file exists.
    Begun,
    /// Requests are held back; what is in flight ends.
    Held,
    /// The last round before the change.
    Syncing,
}

impl Run {
    /// Whether a step can begin: one thing is done at a time, and only that can be given up.
    pub(super) fn can_begin(&self, step: Step) -> bool {
        self.chore.is_none() || step == Step::Cancel
    }

    /// Begins a step.
    pub(super) fn begin(&mut self, step: Step, subject: &Subject) -> Result<(), Violation> {
        let file = match step {
            Step::Snapshot => Some(self.new_leaf(subject)?),
            Step::Merge | Step::Cancel | Step::Grow => None,
        };
        self.chore = Some(Chore { step, stage: Stage::Begun, file });
        Ok(())
    }

    /// A new file, whole and durable from the moment at which it has its name.
    fn new_leaf(&mut self, subject: &Subject) -> Result<FileId, Violation> {
        let chain = self.chains.swap_remove(0);
        let media = subject.create(self.made(&chain), chain.len()).map_err(Violation::Open)?;
        let file = self.io.add(media);
        self.forms.push(Form::Vhd);
        // The rule after a power loss is one sentence: if the new file is there, it is the leaf. Before the switch
        // the other one is as good.
        let longer = [&[file], chain.as_slice()].concat();
        self.chains = vec![chain, longer];
        Ok(file)
    }

    fn made(&self, chain: &[FileId]) -> Made {
        match chain.first().and_then(|leaf| self.forms.get(usize::from(leaf.0))) {
            Some(Form::Raw | Form::Vhd) | None => Made::Vhd,
        }
    }

    /// Whether the chore can go on.
    pub(super) fn can_go_on(&self) -> bool {
        self.chore.is_some_and(|chore| match chore.stage {
            Stage::Begun => true,
            Stage::Held => self.disk.is_quiet(),
            Stage::Syncing => !self.disk.is_syncing() && self.disk.is_quiet(),
        })
    }

    /// Takes the next step of the chore.
    pub(super) fn go_on(&mut self, subject: &Subject) -> Result<(), Violation> {
        let Some(mut chore) = self.chore else { return Ok(()) };
        match chore.stage {
            Stage::Begun => {
                self.disk.hold();
                chore.stage = Stage::Held;
            }
            Stage::Held => {
                if self.bug == Some(Planted::SnapshotWithoutRound) && chore.step == Step::Snapshot {
                    self.plot.borrow_mut().deaf = self.chains.first().and_then(|chain| chain.first()).copied();
                }
                self.disk.sync(&mut SabotagedIo { io: &mut self.io, plot: &self.plot });
                chore.stage = Stage::Syncing;
            }
            Stage::Syncing => return self.change(chore, subject),
        }
        self.chore = Some(chore);
        Ok(())
    }

    /// Everything is durable, or cannot be.
    fn change(&mut self, chore: Chore, subject: &Subject) -> Result<(), Violation> {
        self.chore = None;
        if self.disk.is_clean() {
            match (chore.step, chore.file) {
                (Step::Snapshot, Some(file)) => self.switch(file, subject)?,
                (Step::Grow, _) => self.grow(subject)?,
                _ => {}
            }
        } else if self.io.fault_happened() {
            // The new file, if any, is removed.
            self.chains.truncate(1);
        } else {
            return Err(Violation::Step("a round leaves something that is not durable".into()));
        }
        self.disk.release(&mut SabotagedIo { io: &mut self.io, plot: &self.plot });
        Ok(())
    }

    /// Makes the new file the leaf.
    fn switch(&mut self, file: FileId, subject: &Subject) -> Result<(), Violation> {
        let old = self.chains.swap_remove(0);
        if let Some(leaf) = old.first() {
            let parent = self.open(*leaf, 1, Access::ReadOnly, subject)?;
            self.disk.reopen(0, parent).map_err(refused)?;
        }
        let leaf = self.open(file, 0, Access::ReadWrite, subject)?;
        self.disk.push_leaf(file, leaf).map_err(refused)?;
        self.io.let_write(&[file]);
        Ok(())
    }

    /// Makes the disk larger, once.
    fn grow(&mut self, subject: &Subject) -> Result<(), Violation> {
        match self.disk.grow(subject.kind.grown() * SECTOR) {
            // Not every format can.
            Err(error) if error.kind == ImageErrorKind::Unsupported => Ok(()),
            grown => grown.map_err(refused),
        }
    }

    /// Opens a file as it is now.
    fn open(
        &self,
        file: FileId,
        depth: usize,
        access: Access,
        subject: &Subject,
    ) -> Result<Saboteur<disk::Image>, Violation> {
        let mut media = self.io.file(file).visible().clone();
        let form = self.forms.get(usize::from(file.0)).copied().unwrap_or(Form::Raw);
        let image = subject.open_one(&mut media, form, access).map_err(Violation::Open)?;
        Ok(Saboteur::new(image, self.bug, self.plot.clone(), (file, depth), media.len()))
    }
}

fn refused(error: disk::ImageError) -> Violation {
    Violation::Step(error.to_string())
}
