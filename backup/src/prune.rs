//! Pruning: backups are removed, and what no backup refers to any more is given up and deleted.
//!
//! 1. Delete what an earlier prune has doomed and not deleted, and the log entries that it has left; what is gone
//!    leaves the list.
//! 2. Read the log, the tables of packs, and the pages of all backups that stay.
//! 3. Copy the chunks that are needed from packs that are mostly unneeded into new ones. A crash leaves orphans.
//! 4. Append the new state: without the removed backups, with doomed objects and orphans. If others appended first,
//!    begin again with 2. A crash leaves doomed objects to the next prune.
//! 5. Delete doomed objects, and log entries before the state.
//!
//! An *orphan* is referred to by no backup: of a running backup, or of one that died. Nothing proves which, so it is
//! noted with the time, and doomed by a later prune after a period of grace. A wrong guess costs the running backup a
//! second sending of those chunks, and nothing else (`log.rs`).

use std::collections::{BTreeSet, HashMap, HashSet};
use std::fmt;

use crate::chunks::{Chunks, Frame, Packer, Place};
use crate::error::Error;
use crate::id::{Digest, Id};
use crate::index::Index;
use crate::log::{Appended, Change, Record, State, View};
use crate::name::{Name, prefix};
use crate::planted::Bug;
use crate::store::is_missing;
use crate::target::Target;
use crate::writer::Control;

/// Each repetition means that another host has published a backup or pruned meanwhile.
const ATTEMPTS: u32 = 16;

/// A request to prune.
pub struct Prune<'a> {
    /// Chooses the backups to remove among all, the first published one first. It may be called several times, and
    /// decides by what other hosts have published and removed meanwhile.
    pub remove: &'a dyn Fn(&[Record]) -> Vec<Id>,
    /// Seconds since 1970.
    pub now: u64,
    /// For how many seconds to spare objects of backups that may be running: longer than a backup takes, such as a day.
    pub grace: u64,
}

impl fmt::Debug for Prune<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Prune").field("now", &self.now).field("grace", &self.grace).finish_non_exhaustive()
    }
}

/// Result of a prune.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Pruned {
    /// Backups that were removed.
    pub backups: Vec<Record>,
    /// Objects that were deleted.
    pub deleted: u64,
    /// Bytes that were sent to keep the needed chunks of packs that were deleted.
    pub moved: u64,
    /// Objects that no backup refers to, and that are spared until their period of grace ends.
    pub orphans: u64,
}

/// What the backups that stay, and those that are removed, refer to.
struct Referred {
    live: HashSet<Digest>,
    released: HashSet<Digest>,
}

/// The new state, and what it costs.
struct Decision {
    state: State,
    removed: Vec<Record>,
    moved: u64,
}

impl Target {
    /// Removes backups and what is not needed any more. The backups are removed when the new state is in the log; what
    /// is deleted behind it may be left to the next prune, as after a crash.
    pub fn prune(&self, prune: &Prune<'_>, control: &mut Control<'_>) -> Result<Pruned, Error> {
        let mut view = View::load(self)?;
        let mut moved = 0;
        for _ in 0..ATTEMPTS {
            control.check()?;
            let decision = match self.decide(prune, &view, control) {
                Ok(decision) => decision,
                // What another host has removed meanwhile is missing, and not lost.
                Err(error @ (Error::Damaged { .. } | Error::Lost { .. })) => {
                    let now = View::load(self)?;
                    if now.has_state_of(&view) {
                        return Err(error);
                    }
                    view = now;
                    continue;
                }
                Err(error) => return Err(error),
            };
            moved += decision.moved;
            if self.has(Bug::DeletedBeforeDoomed) {
                self.delete_doomed(&decision.state.doomed)?;
            }
            let state = decision.state;
            match view.append(self, Change::State(state.clone()))? {
                Appended::Lost(now) if self.has(Bug::PruneNotRepeated) => {
                    let Appended::Done(entry) = now.append(self, Change::State(state.clone()))? else { continue };
                    self.delete_doomed(&state.doomed)?;
                    now.shorten(self, entry)?;
                    return Ok(Pruned::default());
                }
                Appended::Lost(now) => view = *now,
                Appended::Done(entry) => {
                    let deleted = self.delete_doomed(&state.doomed)?;
                    view.shorten(self, entry)?;
                    let orphans = u64::try_from(state.orphans.len()).unwrap_or(u64::MAX);
                    return Ok(Pruned { backups: decision.removed, deleted, moved, orphans });
                }
            }
        }
        Err(Error::Contended(ATTEMPTS, "prune"))
    }

    fn delete_doomed(&self, doomed: &BTreeSet<Name>) -> Result<u64, Error> {
        doomed.iter().try_for_each(|name| self.store.delete(name))?;
        Ok(u64::try_from(doomed.len()).unwrap_or(u64::MAX))
    }

    /// Doomed objects that are still there, after an attempt to delete them.
    fn still_there(&self, view: &View) -> Result<BTreeSet<Name>, Error> {
        let mut there = BTreeSet::new();
        if self.has(Bug::DoomForgotten) {
            return Ok(there);
        }
        for name in &view.state.doomed {
            self.store.delete(name)?;
            match self.store.size(name) {
                Ok(_) => {
                    there.insert(name.clone());
                }
                Err(error) if is_missing(&error) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(there)
    }

    fn decide(&self, prune: &Prune<'_>, view: &View, control: &mut Control<'_>) -> Result<Decision, Error> {
        let mut state = view.state.clone();
        state.oldest = view.clear(self)?;
        state.doomed = self.still_there(view)?;
        let chunks = Chunks::load(self, |name| view.state.doomed.contains(name))?;
        let chosen = (prune.remove)(&state.in_order());
        let removed: Vec<Record> = chosen.iter().filter_map(|id| state.backups.remove(id)).collect();
        state.published.retain(|id, _| state.backups.contains_key(id));
        let referred = self.referred(&state, &removed, &chunks, control)?;
        let orphans = std::mem::take(&mut state.orphans);
        let mut spare = |state: &mut State, name: Name| {
            let since = orphans.get(&name).copied().unwrap_or(prune.now);
            if orphans.contains_key(&name) && prune.now.saturating_sub(since) >= prune.grace {
                state.doomed.insert(name);
            } else {
                state.orphans.insert(name, since);
            }
        };
        let moved = self.judge_packs(&chunks, &referred, &mut state, &mut spare, control)?;
        let kept: HashSet<Name> = state.backups.keys().map(|id| Name::backup(*id)).collect();
        let gone: HashSet<Name> = removed.iter().map(|record| Name::backup(record.id)).collect();
        let is_index = |(name, _): &(Name, u64)| name.backup_id().is_some();
        for (name, _) in self.store.list(prefix::BACKUPS)?.into_iter().filter(is_index) {
            if gone.contains(&name) {
                state.doomed.insert(name);
            } else if !kept.contains(&name) && !state.doomed.contains(&name) {
                spare(&mut state, name);
            }
        }
        // The files of writers that died: one that lives writes another, so nothing has to be agreed upon.
        for (name, _) in self.store.list(prefix::TEMPORARY)?.into_iter().filter(|(name, _)| name.is_temporary()) {
            spare(&mut state, name);
        }
        Ok(Decision { state, removed, moved })
    }

    /// Decides for each pack whether it stays, is doomed, is an orphan, or gives up what is needed to a new one.
    /// Returns the bytes that were sent.
    fn judge_packs(
        &self,
        chunks: &Chunks,
        referred: &Referred,
        state: &mut State,
        spare: &mut impl FnMut(&mut State, Name),
        control: &mut Control<'_>,
    ) -> Result<u64, Error> {
        let is_whole = referred.live.iter().all(|digest| chunks.contains(digest));
        let packs = self.weigh_packs(chunks, referred)?;
        let mut packer = Packer::new(false);
        for (name, pack) in chunks.packs.iter().zip(&packs) {
            let live: u64 = pack.live.iter().map(|(_, place)| u64::from(place.len)).sum();
            if live == 0 && pack.is_released {
                state.doomed.insert(name.clone());
            } else if live == 0 {
                spare(state, name.clone());
            } else if (pack.is_damaged || live.saturating_mul(2) < pack.len)
                && self.move_live(name, pack, &mut packer, control)?
            {
                state.doomed.insert(name.clone());
            }
        }
        packer.finish(self)?;
        // A damaged pack may have the only copy of something that a backup has lost: it is kept while that is so.
        for (name, _) in chunks.damaged.iter().filter(|_| is_whole) {
            spare(state, name.clone());
        }
        Ok(packer.bytes_sent)
    }

    /// What each pack has. Of several copies of a needed frame the first sound one counts: a writer that was sent a
    /// chunk again because of damage must not lose it to the damaged copy.
    fn weigh_packs(&self, chunks: &Chunks, referred: &Referred) -> Result<Vec<Pack>, Error> {
        let mut chosen: HashMap<Digest, Place> = HashMap::new();
        let mut damaged: HashSet<u32> = HashSet::new();
        for digest in chunks.copied().filter(|digest| referred.live.contains(*digest)) {
            for place in chunks.copies(digest) {
                if chunks.is_sound(self, digest, place)? {
                    chosen.insert(*digest, *place);
                    break;
                }
                damaged.insert(place.pack);
            }
        }
        let new = |number| Pack { is_damaged: damaged.contains(&number), ..Pack::default() };
        let mut packs: Vec<Pack> = (0..).take(chunks.packs.len()).map(new).collect();
        let mut at = |place: &Place, weigh: &dyn Fn(&mut Pack)| {
            if let Some(pack) = usize::try_from(place.pack).ok().and_then(|pack| packs.get_mut(pack)) {
                weigh(pack);
            }
        };
        for (digest, first) in &chunks.places {
            for place in chunks.copies(digest) {
                at(place, &|pack| {
                    pack.len += u64::from(place.len);
                    pack.is_released |= referred.released.contains(digest);
                });
            }
            if referred.live.contains(digest) {
                let place = *chosen.get(digest).unwrap_or(first);
                at(&place, &|pack| pack.live.push((*digest, place)));
            }
        }
        // In the order of places, so that moving reads forwards.
        packs.iter_mut().for_each(|pack| pack.live.sort_by_key(|(_, place)| place.at));
        Ok(packs)
    }

    /// Copies the needed frames of a pack; false if one is damaged, so that the pack must stay.
    fn move_live(
        &self,
        name: &Name,
        pack: &Pack,
        packer: &mut Packer,
        control: &mut Control<'_>,
    ) -> Result<bool, Error> {
        let mut frames = Vec::new();
        for (digest, place) in &pack.live {
            control.check()?;
            let at = u64::from(place.at);
            let bytes = match self.store.get(name, at..at + u64::from(place.len)) {
                Ok(bytes) => bytes,
                Err(error) if is_missing(&error) => return Ok(false),
                Err(error) => return Err(error.into()),
            };
            let content = usize::try_from(place.content).unwrap_or(usize::MAX);
            if self.codec.unframe(place.kind, digest, content, &bytes).is_err() {
                return Ok(false);
            }
            frames.push((digest, place, bytes));
        }
        for (digest, place, bytes) in frames {
            let frame = Frame { kind: place.kind, digest, bytes: &bytes, content: place.content };
            packer.push(self, &frame)?;
        }
        Ok(true)
    }

    /// All digests that backups refer to. The index and all pages of a backup that stays must be readable: otherwise
    /// nothing is known to be unneeded.
    fn referred(
        &self,
        state: &State,
        removed: &[Record],
        chunks: &Chunks,
        control: &mut Control<'_>,
    ) -> Result<Referred, Error> {
        let mut referred = Referred { live: HashSet::new(), released: HashSet::new() };
        for id in state.backups.keys() {
            control.check()?;
            let index = match Index::read(self, *id) {
                Err(Error::NoBackup(id)) => return Err(crate::error::damaged(&Name::backup(id), "it does not exist")),
                other => other?,
            };
            self.refer(&index, chunks, &mut referred.live, true)?;
        }
        for record in removed {
            control.check()?;
            // What a damaged index referred to becomes orphans.
            match Index::read(self, record.id) {
                Ok(index) => self.refer(&index, chunks, &mut referred.released, false)?,
                Err(Error::Store(error)) => return Err(error.into()),
                Err(_) => {}
            }
        }
        Ok(referred)
    }

    fn refer(&self, index: &Index, chunks: &Chunks, into: &mut HashSet<Digest>, is_needed: bool) -> Result<(), Error> {
        for (number, digest) in (0..).zip(&index.pages) {
            if *digest == Digest::HOLE || !into.insert(*digest) {
                continue;
            }
            match index.page(self, chunks, number)? {
                Some(page) => into.extend(page.into_iter().filter(|digest| *digest != Digest::HOLE)),
                None if is_needed => {
                    let (at, len) = (number * self.page_span(), self.page_span());
                    return Err(Error::Lost { backup: index.record.id, at, len });
                }
                None => {}
            }
        }
        Ok(())
    }
}

/// What is known of a pack.
#[derive(Default)]
struct Pack {
    len: u64,
    live: Vec<(Digest, Place)>,
    /// Whether it has something of a removed backup, so that it is of no running one.
    is_released: bool,
    /// Whether it has a damaged copy of something that is sound elsewhere.
    is_damaged: bool,
}
