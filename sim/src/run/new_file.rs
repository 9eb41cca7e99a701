//! The new file of a verb: an empty child of a layer, on its way to be the disk's leaf or another disk's, or a copy.
//!
//! Knows what a power loss leaves of a file that has no name yet, nothing, and of one whose name is not durable: it is
//! there or it is not.
//!
//! Invariants checked:
//! - the file is what it is to be from the moment at which it has a name;
//! - what the guest was told of a disk whose leaf has no durable name is found without that leaf as well;
//! - a file that was answered for has a durable name.

use disk::FileId;

use super::made::New;
use super::steps::{Verb, refused};
use super::{Run, Violation};
use crate::media::{Media, Unwritten};
use crate::oracle::Oracle;
use crate::planted::Planted;
use crate::sector::{SECTOR, Words};
use crate::sibling::Sibling;
use crate::subject::{Form, Subject};
use crate::workload::Step;

impl Verb {
    fn new_file(&self) -> &New {
        let Some(new) = &self.new else { unreachable!("no file was made") };
        new
    }

    pub(super) fn new_mut(&mut self) -> &mut New {
        let Some(new) = &mut self.new else { unreachable!("no file was made") };
        new
    }

    /// Whether what it has made, if anything, may be answered for.
    pub(super) fn check_name(&self) -> Result<(), Violation> {
        match self.new.as_ref().filter(|new| !new.is_named_durably) {
            Some(new) => Err(Violation::Nameless(new.file)),
            None => Ok(()),
        }
    }
}

impl Run {
    /// Whether nothing is written any more to a layer, nor to those below it.
    pub(super) fn is_closed(&self, depth: usize) -> bool {
        let files = self.chains.first().and_then(|chain| chain.get(depth..)).unwrap_or_default();
        !files.is_empty() && !files.iter().any(|file| self.io.is_writable(*file))
    }

    /// A new file, of which nothing is durable. Nobody knows where it is.
    pub(super) fn create_child(&mut self, of: usize, live: bool, subject: &Subject) -> Result<New, Violation> {
        let file = self.file_at(of);
        let made = subject.kind.leaf_on(self.form(file));
        let parent = self.parent_of(file, of, !live);
        let sectors = self.layer(of).len / SECTOR;
        let media = subject.create(made, self.forms.len(), Some(&parent), sectors).map_err(Violation::Open)?;
        let below = self.chains.first().and_then(|chain| chain.get(of..)).unwrap_or_default().to_vec();
        let file = self.io.add(&media);
        self.forms.push(made.form());
        Ok(New { file, below, copied: None, is_named_durably: false })
    }

    /// Whether the leaf can share its blocks: it is raw, and a file, and stands alone.
    pub(super) fn can_copy(&self) -> bool {
        let file = self.file_at(0).filter(|file| self.form(Some(*file)) == Form::Raw);
        file.is_some_and(|file| self.io.file(file).visible().unwritten() == Unwritten::Zeroes)
    }

    /// A new file in which nothing is.
    pub(super) fn create_copy(&mut self) -> New {
        let file = self.io.add(&Media::empty(Unwritten::Zeroes));
        self.forms.push(Form::Raw);
        New { file, below: Vec::new(), copied: None, is_named_durably: false }
    }

    /// The copy shows what a guest would find now.
    pub(super) fn share_blocks(&mut self, verb: &mut Verb) {
        let Some(leaf) = self.file_at(0) else { unreachable!("a disk has a leaf") };
        let new = verb.new_mut();
        self.io.share(leaf, new.file);
        new.copied = Some(self.oracle.clone());
    }

    pub(super) fn sync_new(&mut self, verb: &Verb) {
        self.io.sync_now(verb.new_file().file);
    }

    /// Whoever looks finds it from now on. After a snapshot the rule is one sentence: if the new file is there, it is
    /// the leaf. Before the switch the other one is as good. A clone is another disk's, and so is the new leaf of a
    /// revert until the switch.
    pub(super) fn name_new(&mut self, verb: &Verb, subject: &Subject) -> Result<(), Violation> {
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

    /// It is not used after all.
    pub(super) fn remove_new(&mut self, verb: &mut Verb) {
        let Some(new) = verb.new.take() else { return };
        self.chains.truncate(1);
        self.siblings.retain(|sibling| sibling.chain.first() != Some(&new.file));
    }

    /// The layers above this one leave the chain. They are not written to any more.
    pub(super) fn pop_to(&mut self, depth: usize) -> Result<(), Violation> {
        for layer in self.disk.pop_to(depth).map_err(refused)? {
            self.io.let_write(layer.file, false);
            self.logs.close(layer.file);
        }
        Ok(())
    }

    /// Makes the new file the leaf.
    pub(super) fn push_leaf(&mut self, verb: &Verb, subject: &Subject) -> Result<(), Violation> {
        let New { file, is_named_durably, .. } = *verb.new_file();
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

    /// From now on the guest is to find what the layer shows. The old chain shows what it did, to whoever opens it.
    fn become_reverted(&mut self, new: &New, old: Vec<FileId>) {
        let place = self.siblings.iter().position(|sibling| sibling.chain.first() == Some(&new.file));
        let Some(reverted) = place.map(|place| self.siblings.remove(place)) else { unreachable!("it was named") };
        let shown = std::mem::replace(&mut self.oracle, reverted.into_shown());
        self.siblings.push(Sibling::new(old, shown));
        self.chains = vec![new.chain()];
    }
}
