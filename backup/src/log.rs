//! The log of a target: the one order in which backups are published and objects are given up.
//!
//! Entries are objects with successive numbers, created only if the number is free, so a host that appends entry n + 1
//! has seen all entries up to n, or fails and looks again. No lock, no lease and no clock is part of it. An entry is
//! either a published backup, or the whole state, which a prune appends; entries before a state are then deleted.
//!
//! What is published: a backup exists if the log says so. What is doomed: a state lists objects that no backup refers
//! to and that are going to be deleted.
//!
//! **Invariant.** At each number, every chunk of every published backup is in a pack that is durable and not doomed.
//!
//! - *Publishing keeps it.* The writer found each chunk in a pack that existed; at the number before its own no such
//!   pack is doomed and, if there was a state meanwhile, each exists still. Only doomed packs are deleted, and names
//!   are never given out again, so a pack that exists and is not doomed has never been doomed. That a pack was found
//!   does not prove that it is durable: each append settles all packs first.
//! - *A state keeps it.* The pruner dooms a pack only if, at the number before its own, each chunk of each published
//!   backup has a place in another pack that it read, and that is not doomed.
//! - *Deletion keeps it*, since only what a confirmed state dooms is deleted.
//! - An object leaves the list of doomed ones only when it was found not to exist.
//!
//! **A number that is free because its entry was deleted** would break the order: a host that slept could create it
//! again. Three rules prevent it, all by name, so that a late listing cannot hurt:
//!
//! 1. Entries are deleted in ascending order, by number, from the oldest on that may exist: each state names that one.
//! 2. An append counts for the host that made it if the marked state that it started from exists after the append: then
//!    nothing behind that state had been deleted, and the number was never taken before. Otherwise the host reads the
//!    log again, and appends again if its entry is not there. What a host has read counts by the same condition.
//! 3. A reader starts from a state that is *marked*: an object whose name has the number and the id of the entry. The
//!    pruner creates it when its append counts, and before it deletes anything. An entry of a host that slept is never
//!    marked, so no reader starts from one.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use crate::codec::{Codec, Kind};
use crate::error::{Error, damaged};
use crate::id::{Digest, Id};
use crate::name::{Name, prefix};
use crate::planted::Bug;
use crate::store::{is_missing, put_own};
use crate::target::Target;

/// The number of the entry that the creation of a target writes.
const FIRST: u64 = 1;

/// Attempts to read a log that others shorten meanwhile.
const READS: u32 = 16;

/// A published backup, as listed without reading its index.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// The id of the backup.
    pub id: Id,
    /// The disk, such as by its UUID.
    pub disk: Id,
    /// The name of the disk when the backup was made.
    pub label: String,
    /// The moment of the content, in seconds since 1970.
    pub time: u64,
    /// The size of the disk in bytes.
    pub len: u64,
    /// The digest of the whole content.
    pub content: Digest,
    /// The base of an incremental backup, for information: a backup needs no other one to be restored.
    pub base: Option<Id>,
    /// The moment that it is a part of, with the backups of other disks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub moment: Option<MachineMoment>,
}

/// A state of a machine: backups of all of its disks, of which each is published by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MachineMoment {
    /// The machine, such as by its UUID.
    pub machine: Id,
    /// The moment, the same with each of the disks, and never again.
    pub id: Id,
    /// The number of disks. With fewer the state is incomplete: more are being backed up, or that has failed.
    pub disks: u32,
}

/// All that is published and doomed at a number of the log.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct State {
    pub backups: BTreeMap<Id, Record>,
    /// Numbers of the entries that have published them: their order, whatever the clocks of hosts show.
    #[serde(default)]
    pub published: BTreeMap<Id, u64>,
    /// Each entry before this number is deleted.
    #[serde(default)]
    pub oldest: u64,
    /// Objects that no backup refers to, and that may be deleted at any time.
    pub doomed: BTreeSet<Name>,
    /// Objects that no backup refers to yet, and when a prune saw them first: of a running writer, or of a dead one.
    pub orphans: BTreeMap<Name, u64>,
}

impl State {
    /// All published backups, the first published one first.
    pub fn in_order(&self) -> Vec<Record> {
        let mut records: Vec<Record> = self.backups.values().cloned().collect();
        records.sort_by_key(|record| (self.published.get(&record.id).copied(), record.time, record.id));
        records
    }
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Change {
    Publish(Record),
    State(State),
}

#[derive(Serialize, Deserialize)]
struct Entry {
    /// Makes the bytes of each entry unique, so that a host recognizes its own.
    id: Id,
    change: Change,
}

/// The log as one host has read it.
#[derive(Clone, Debug)]
pub(crate) struct View {
    pub state: State,
    /// Number of the marked state that reading began with.
    base: u64,
    /// Number and id of the entry of the latest state.
    latest: (u64, Id),
    last: u64,
}

/// Result of an attempt to append.
pub(crate) enum Appended {
    /// The change is in the log, as the entry of this id.
    Done(Id),
    /// Others appended first: the log now.
    Lost(Box<View>),
}

/// Writes the first entry of a new target.
pub(crate) fn begin(target: &Target) -> Result<(), Error> {
    let name = Name::log(target.id(), FIRST);
    let entry = Entry { id: Id::random(), change: Change::State(State::default()) };
    let bytes = encode(&target.codec, &name, &entry)?;
    let is_ours = put_own(&*target.store, &name, &bytes)?
        && put_own(&*target.store, &Name::log_mark(target.id(), FIRST, entry.id), &[])?;
    if is_ours { Ok(()) } else { Err(Error::TargetExists) }
}

impl View {
    /// Reads the log from its latest marked state on.
    pub fn load(target: &Target) -> Result<View, Error> {
        for _ in 0..READS {
            if let Some(view) = View::try_load(target)? {
                return Ok(view);
            }
        }
        Err(Error::Stale)
    }

    /// `None` if the listing did not fit the objects: it was late, or a prune has shortened the log meanwhile.
    fn try_load(target: &Target) -> Result<Option<View>, Error> {
        let listed = target.store.list(prefix::LOG)?;
        let marked = listed.iter().filter_map(|(name, _)| name.log_marked(target.id())).max();
        let Some((base, id)) = marked else { return Ok(None) };
        match read(target, base)? {
            Some(Entry { id: found, change: Change::State(state) }) if found == id => {
                let mut view = View { state, base, latest: (base, id), last: base };
                view.extend(target)?;
                Ok(if view.is_confirmed(target)? { Some(view) } else { None })
            }
            _ => Ok(None),
        }
    }

    /// Reads the entries behind, by name.
    fn extend(&mut self, target: &Target) -> Result<(), Error> {
        while let Some(entry) = read(target, self.last + 1)? {
            self.last += 1;
            match entry.change {
                Change::State(state) => {
                    self.state = state;
                    self.latest = (self.last, entry.id);
                }
                Change::Publish(record) => {
                    self.state.published.insert(record.id, self.last);
                    self.state.backups.insert(record.id, record);
                }
            }
        }
        Ok(())
    }

    /// Whether no prune has appended a state between the two.
    pub fn has_state_of(&self, other: &View) -> bool {
        self.latest == other.latest
    }

    /// Appends a change that is right for the state that this view shows. After an error the change may be in the log
    /// or not.
    pub fn append(&self, target: &Target, change: Change) -> Result<Appended, Error> {
        if !target.has(Bug::FoundTakenForDurable) {
            target.store.settle(prefix::PACKS)?;
        }
        let number = self.last + 1;
        let name = Name::log(target.id(), number);
        let entry = Entry { id: Id::random(), change };
        let is_ours = put_own(&*target.store, &name, &encode(&target.codec, &name, &entry)?)?;
        if is_ours && (target.has(Bug::UnconfirmedAppend) || self.is_confirmed(target)?) {
            return Ok(Appended::Done(entry.id));
        }
        let now = View::load(target)?;
        let is_in = is_ours
            && match &entry.change {
                Change::Publish(record) => now.state.backups.contains_key(&record.id),
                Change::State(_) => now.latest == (number, entry.id),
            };
        Ok(if is_in { Appended::Done(entry.id) } else { Appended::Lost(Box::new(now)) })
    }

    /// Whether no entry behind the marked state that this view starts from has been deleted: each number of the view,
    /// and the next one, was given out once at most.
    fn is_confirmed(&self, target: &Target) -> Result<bool, Error> {
        match target.store.size(&Name::log(target.id(), self.base)) {
            Ok(_) => Ok(true),
            Err(error) if is_missing(&error) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    /// Deletes what an interrupted prune has left before the marked state that this view starts from. The number before
    /// which no entry is left then.
    pub fn clear(&self, target: &Target) -> Result<u64, Error> {
        for old in self.state.oldest..self.base {
            target.store.delete(&Name::log(target.id(), old))?;
        }
        Ok(self.base)
    }

    /// Marks a state that was appended to this view, and deletes the entries before it.
    pub fn shorten(&self, target: &Target, entry: Id) -> Result<(), Error> {
        let number = self.last + 1;
        // Its name has the id of the entry: if it is taken, then by a call of ours whose answer was lost.
        put_own(&*target.store, &Name::log_mark(target.id(), number, entry), &[])?;
        for old in self.base..number {
            target.store.delete(&Name::log(target.id(), old))?;
        }
        for (name, _) in target.store.list(prefix::LOG)? {
            let of = name.log_number(target.id()).or(name.log_marked(target.id()).map(|(of, _)| of));
            // Marks; entries of hosts that slept; and those of creations of targets that have lost against this one.
            if name.is_of_log() && of.is_none_or(|of| of < number) {
                target.store.delete(&name)?;
            }
        }
        Ok(())
    }
}

fn encode(codec: &Codec, name: &Name, entry: &Entry) -> Result<Vec<u8>, Error> {
    let text = serde_json::to_vec(entry).map_err(|error| Error::Invalid(error.to_string()))?;
    codec.seal(Kind::Log, name, &text).map_err(|damage| Error::Invalid(format!("a log entry: {}", damage.0)))
}

/// `None` if there is no such entry.
fn read(target: &Target, number: u64) -> Result<Option<Entry>, Error> {
    let name = Name::log(target.id(), number);
    let text = match target.unsealed(Kind::Log, &name) {
        Ok(text) => text,
        Err(Error::Store(error)) if is_missing(&error) => return Ok(None),
        Err(error) => return Err(error),
    };
    serde_json::from_slice(&text).map(Some).map_err(|error| damaged(&name, error.to_string()))
}
