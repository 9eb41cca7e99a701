//! A disk's share of its storage, and its slot in the shared page ([`shares`], docs/decisions/0051): what it publishes
//! there, and when it reads the slots of others.
//!
//! It knows no disk and no server. Invariants: whatever happens to the page, the disk is served; it writes to a slot
//! only while it owns that.

use std::fs::File;
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::OnceLock;

use arguments::Serve;
use control::in_full;
use rustix::fs::fstat;
use serde::{Deserialize, Serialize};
use shares::{Allowance, Owner, Page, Share, Usable, WEIGHT};

use crate::files::Files;
use crate::process::log::say;

/// The name of a page that the daemon or the previous process passes.
pub const NAME: &str = "shares.page";

/// This process as the owner of its slot. It must be determined before the process is confined.
static OWNER: OnceLock<Option<Owner>> = OnceLock::new();

/// Determines what a confined process cannot.
pub fn prepare() {
    owner();
}

fn owner() -> Option<Owner> {
    *OWNER.get_or_init(|| Owner::this().ok())
}

/// What a process passes to its successor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Handed {
    weight: u32,
    time: u64,
    slot: usize,
}

/// The share of a served disk.
#[derive(Debug)]
pub struct Sharing {
    share: Share,
    /// The page and the disk's slot in it.
    place: Option<(Page, usize)>,
    owner: Owner,
    published: shares::Slot,
    /// Whether another process has taken its slot, and there is no free one: it then shares with no other disk.
    has_none: bool,
}

/// Opens the page of the command line, or the one that was passed, with its weight. Returns `None` if the storage is
/// not shared, which is logged if the command line has a page.
pub fn find(files: &Files, serve: &Serve, taken: Option<Handed>) -> Option<Sharing> {
    let page = match (files.handed_as(NAME), &serve.share) {
        (Some(handed), _) => handed.map_err(|error| error.to_string()),
        // The settings may have changed since, so the command line of the first process does not count.
        (None, Some(path)) if !serve.take_over => open(path),
        (None, _) => return None,
    };
    let weight = serve.share_weight.unwrap_or(WEIGHT);
    let begun = page.and_then(|file| {
        let page = Page::open(file).map_err(|error| in_full(&error))?;
        // The page has the settings made since the first process began.
        if let Some(depth) = serve.share_depth.filter(|_| !serve.take_over) {
            page.set_depth(depth);
        }
        Sharing::begun(page, weight, taken)
    });
    begun.map_err(|why| log_unshared(&why)).ok()
}

fn open(path: &Path) -> Result<File, String> {
    use std::os::unix::fs::OpenOptionsExt;
    let file = File::options().read(true).write(true).create(true).truncate(false).mode(0o660).open(path);
    file.map_err(|error| format!("{}: {error}", path.display()))
}

fn log_unshared(why: &str) {
    say(format_args!("the storage is not shared with other disks: {why}"));
}

impl Sharing {
    /// Claims a slot of the page, or keeps that of the previous process, which uses it until this one begins.
    fn begun(page: Page, weight: u32, taken: Option<Handed>) -> Result<Sharing, String> {
        let owner = owner().ok_or("the start time of this process cannot be found out from /proc")?;
        let (weight, time) = taken.map_or((weight, 0), |taken| (taken.weight, taken.time));
        let slot = match taken {
            Some(taken) => taken.slot,
            None => page.claim(owner, Usable::Abandoned).map_err(|error| in_full(&error))?,
        };
        let published = shares::Slot::default();
        Ok(Sharing { share: Share::new(weight, time), place: Some((page, slot)), owner, published, has_none: false })
    }

    /// Takes over the slot of the previous process, if there was one; it no longer uses the slot.
    pub fn go(&self) {
        if let Some((page, slot)) = &self.place {
            page.take_over(*slot, self.owner);
        }
    }

    /// Moves to another page; does nothing if it is the same.
    pub fn move_to(&mut self, file: File) -> Result<(), String> {
        let numbers = |file: &File| fstat(file.as_fd()).map(|stat| (stat.st_dev, stat.st_ino)).ok();
        if self.place.as_ref().is_some_and(|(page, _)| numbers(page.file()) == numbers(&file)) {
            return Ok(());
        }
        let page = Page::open(file).map_err(|error| in_full(&error))?;
        let slot = page.claim(self.owner, Usable::Free).map_err(|error| in_full(&error))?;
        self.leave();
        // Virtual times of one page mean nothing in another.
        self.share = Share::new(self.share.weight(), 0);
        self.published = shares::Slot::default();
        self.place = Some((page, slot));
        self.has_none = false;
        Ok(())
    }

    /// Joins the page that a running process has received.
    pub fn in_page(file: File) -> Result<Sharing, String> {
        Sharing::begun(Page::open(file).map_err(|error| in_full(&error))?, WEIGHT, None)
    }

    /// Releases the slot.
    pub fn leave(&mut self) {
        if let Some((page, slot)) = self.place.take() {
            page.release(slot, self.owner);
        }
    }

    /// Returns what the successor of this process needs.
    pub fn handed(&mut self) -> Option<Handed> {
        let time = self.share.slot(0, false).time;
        self.place.as_ref().map(|(_, slot)| Handed { weight: self.share.weight(), time, slot: *slot })
    }

    /// Returns the page's file.
    pub fn file(&self) -> Option<&File> {
        self.place.as_ref().map(|(page, _)| page.file())
    }

    /// Returns the share.
    pub fn share(&self) -> &Share {
        &self.share
    }

    /// Returns the depth set in the page, which takes effect with the next look; `None` without a slot in a page.
    pub fn depth(&self) -> Option<u32> {
        let (page, _) = self.place.as_ref().filter(|(page, _)| !page.is_lost() && !self.has_none)?;
        Some(page.depth().unwrap_or(shares::DEPTH))
    }

    /// Sets the weight.
    pub fn set_weight(&mut self, weight: u32) {
        self.share.set_weight(weight);
    }

    /// Returns whether other disks were there at the last look.
    #[inline(always)]
    pub fn is_shared(&self) -> bool {
        self.share.is_shared()
    }

    /// Returns what may start now, with `in_flight` requests in flight.
    pub fn allowance(&mut self, in_flight: usize, now: u64) -> Allowance {
        self.look(now);
        self.share.allowance(count(in_flight), now)
    }

    /// Counts a request of this cost that starts.
    #[inline]
    pub fn begin(&mut self, cost: u64) {
        self.share.begin(cost);
    }

    /// Publishes the state after a loop iteration with `answered` completions. `waits`: a request waits for the share.
    pub fn turned(&mut self, answered: usize, in_flight: usize, waits: bool, now: u64) {
        self.share.answered(answered, now);
        // A disk that is alone publishes its state too, for disks that start later.
        self.look(now);
        let slot_now = self.share.slot(count(in_flight), waits);
        if let Some((page, slot)) = self.place.as_ref().filter(|_| slot_now != self.published && !self.has_none) {
            page.say(*slot, slot_now, self.share.weight());
            self.published = slot_now;
        }
    }

    /// Reads the slots of the other disks, if that is due.
    fn look(&mut self, now: u64) {
        if !self.share.is_due(now) {
            return;
        }
        self.keep_place();
        let Some((page, slot)) = &self.place else { return };
        if self.has_none {
            return self.share.look(now, shares::DEPTH, std::iter::empty());
        }
        self.share.look(now, page.depth().unwrap_or(shares::DEPTH), page.others(*slot));
    }

    /// Claims another slot if another process has overwritten the owner of this one. Leaves a page whose file was
    /// truncated, because the others no longer see it.
    fn keep_place(&mut self) {
        if self.place.as_ref().is_some_and(|(page, _)| page.is_lost()) {
            self.leave();
            self.share = Share::new(self.share.weight(), 0);
            return log_unshared("the file of its page was made shorter");
        }
        let Some((page, slot)) = &mut self.place else { return };
        if page.keep(*slot, self.owner) && !self.has_none {
            return;
        }
        match page.claim(self.owner, Usable::Free) {
            Ok(other) => {
                *slot = other;
                if std::mem::take(&mut self.has_none) {
                    say("the storage is shared with other disks again: there is a slot");
                }
            }
            Err(why) if !self.has_none => {
                self.has_none = true;
                self.share = Share::new(self.share.weight(), 0);
                log_unshared(&format!("its slot was taken by another process: {}", in_full(&why)));
            }
            Err(_) => {}
        }
        self.published = shares::Slot::default();
    }
}

fn count(in_flight: usize) -> u32 {
    u32::try_from(in_flight).unwrap_or(u32::MAX)
}
