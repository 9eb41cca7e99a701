//! The new file of a verb: an empty child of a layer, to be the disk's leaf or another disk's, or a copy.
//!
//! A power loss leaves nothing of a file without a name; one whose name is not durable may exist or not.
//!
//! Invariants checked:
//! - the file is complete when it gets its name;
//! - if the name of a disk's leaf is not durable, everything reported to the guest is found without that leaf as well;
//! - the name of a file that was reported to a client is durable.

use disk::FileId;

use super::made::NewFile;
use super::steps::{ActiveVerb, refused};
use super::{Run, Violation};
use crate::media::{Media, Unwritten};
use crate::oracle::Oracle;
use crate::planted::Planted;
use crate::sector::{SECTOR, Words};
use crate::sibling::Sibling;
use crate::subject::{Form, Subject};
use crate::workload::Step;

impl ActiveVerb {
    pub(super) fn new_file(&self) -> &NewFile {
        let Some(new) = &self.new else { unreachable!("no file was made") };
        new
    }

    pub(super) fn new_mut(&mut self) -> &mut NewFile {
        let Some(new) = &mut self.new else { unreachable!("no file was made") };
        new
    }

    /// Checks that the new file, if any, may be reported to the client.
    pub(super) fn check_name(&self) -> Result<(), Violation> {
        match self.new.as_ref().filter(|new| !new.is_named_durably) {
            Some(new) => Err(Violation::Nameless(new.file)),
            None => Ok(()),
        }
    }
}

impl Run {
    /// Whether a layer and those below it are closed for writing.
    pub(super) fn is_closed(&self, depth: usize) -> bool {
        let files = self.chains.first().and_then(|chain| chain.get(depth..)).unwrap_or_default();
        !files.is_empty() && !files.iter().any(|file| self.io.is_writable(*file))
    }

    /// Creates a file of which nothing is durable, not yet visible to others.
    pub(super) fn create_child(&mut self, of: usize, live: bool, subject: &Subject) -> Result<NewFile, Violation> {
        let file = self.file_at(of);
        let made = subject.kind.leaf_on(self.form(file));
        let parent = self.parent_of(file, of, !live);
        let sectors = self.layer(of).len / SECTOR;
        let media = subject.create(made, self.forms.len(), Some(&parent), sectors).map_err(Violation::Open)?;
        let below = self.chains.first().and_then(|chain| chain.get(of..)).unwrap_or_default().to_vec();
        let file = self.io.add(&media);
        self.forms.push(made.form());
        Ok(NewFile { file, below, copied: None, is_named_durably: false })
    }

    /// Whether the leaf can be copied by sharing blocks: a raw file without a parent.
    pub(super) fn can_copy(&self) -> bool {
        let file = self.file_at(0).filter(|file| self.form(Some(*file)) == Form::Raw);
        file.is_some_and(|file| self.io.file(file).visible().unwritten() == Unwritten::Zeroes)
    }

    /// Creates an empty file for a copy.
    pub(super) fn create_copy(&mut self) -> NewFile {
        let file = self.io.add(&Media::empty(Unwritten::Zeroes));
        self.forms.push(Form::Raw);
        NewFile { file, below: Vec::new(), copied: None, is_named_durably: false }
    }

    /// Shares the blocks of the leaf: the copy has its current content.
    pub(super) fn share_blocks(&mut self, verb: &mut ActiveVerb) {
        let Some(leaf) = self.file_at(0) else { unreachable!("a disk has a leaf") };
        let new = verb.new_mut();
        self.io.share(leaf, new.file);
        new.copied = Some(self.oracle.clone());
    }

    pub(super) fn sync_new(&mut self, verb: &ActiveVerb) {
        self.io.sync_now(verb.new_file().file);
    }

    /// Names the new file: from now on others find it. After a snapshot, the new file is the leaf if it exists; before
    /// the switch the old leaf is equivalent. A clone belongs to another disk, and so does the new leaf of a revert
    /// until the switch.
    pub(super) fn name_new(&mut self, verb: &ActiveVerb, subject: &Subject) -> Result<(), Violation> {
        let new = verb.new_file();
        if verb.asked == Step::Snapshot {
            self.chains.push(new.chain());
            return Ok(());
        }
        let shows = match &new.copied {
            Some(copied) => copied.clone(),
            None => {
                let shown = (0..).zip(self.shown(&new.below, subject)?);
                Oracle::new(shown.filter(|(_, words)| *words != Words::ZERO).collect())
            }
        };
        self.siblings.push(Sibling::new(new.chain(), shows));
        Ok(())
    }

    /// Removes the new file again.
    pub(super) fn remove_new(&mut self, verb: &mut ActiveVerb) {
        let Some(new) = verb.new.take() else { return };
        self.chains.truncate(1);
        self.siblings.retain(|sibling| sibling.chain.first() != Some(&new.file));
    }

    /// Removes the layers above this one from the chain. They are no longer written to.
    pub(super) fn pop_to(&mut self, depth: usize) -> Result<(), Violation> {
        for layer in self.disk.pop_to(depth).map_err(refused)? {
            self.io.set_writable(layer.file, false);
            self.logs.close(layer.file);
        }
        Ok(())
    }

    /// Makes the new file the leaf.
    pub(super) fn push_leaf(&mut self, verb: &ActiveVerb, subject: &Subject) -> Result<(), Violation> {
        let NewFile { file, is_named_durably, .. } = *verb.new_file();
        let old = self.chains.swap_remove(0);
        if self.bug == Some(Planted::SnapshotWithoutRound) {
            self.plot.borrow_mut().deaf = old.first().copied();
        }
        if verb.asked == Step::Revert {
            self.become_reverted(verb.new_file(), old);
        } else if !is_named_durably {
            self.chains.push(old);
        }
        let (leaf, log) = self.open(file, 0, subject)?;
        self.disk.push_leaf(file, leaf).map_err(refused)?;
        self.disk.set_log(file, log).map_err(refused)
    }

    /// Changes the guest's content to that of the layer. The old chain keeps its content.
    fn become_reverted(&mut self, new: &NewFile, old: Vec<FileId>) {
        let place = self.siblings.iter().position(|sibling| sibling.chain.first() == Some(&new.file));
        let Some(reverted) = place.map(|place| self.siblings.remove(place)) else { unreachable!("it was named") };
        let shown = std::mem::replace(&mut self.oracle, reverted.into_shown());
        self.siblings.push(Sibling::new(old, shown));
        self.chains = vec![new.chain()];
    }
}
