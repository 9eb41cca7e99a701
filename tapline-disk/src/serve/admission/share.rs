//! A disk's part in the page of its storage ([`shares`], docs/decisions/0051): which slot it has, what it says there,
//! and when it looks at the others.
//!
//! It knows no disk and no server. Invariants: a disk is served whatever becomes of its page; it writes to a slot only
//! while that is its own.

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

/// The name of a page that is handed over, by a daemon or by the process before this one.
pub const NAME: &str = "shares.page";

/// This process, as its slot says it. It can be found out only before the process is confined.
static OWNER: OnceLock<Option<Owner>> = OnceLock::new();

/// Finds out what a confined process cannot.
pub fn prepare() {
    owner();
}

fn owner() -> Option<Owner> {
    *OWNER.get_or_init(|| Owner::this().ok())
}

/// What a process hands to the one that takes its place.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Handed {
    weight: u32,
    time: u64,
    slot: usize,
}

/// The part of a served disk.
#[derive(Debug)]
pub struct Sharing {
    share: Share,
    /// The page and the disk's slot in it.
    place: Option<(Page, usize)>,
    owner: Owner,
    said: shares::Slot,
    /// Its slot was taken by another process, and there is no other one: it is served alone.
    has_none: bool,
}

/// The page of the command line, or the one that was handed over, and the weight; `None` where the storage is not
/// shared, which is logged if the command line has a page.
pub fn find(files: &Files, serve: &Serve, taken: Option<Handed>) -> Option<Sharing> {
    let page = match (files.handed_as(NAME), &serve.share) {
        (Some(handed), _) => handed.map_err(|error| error.to_string()),
        // Settings made later count, not the command line of the first process.
        (None, Some(path)) if !serve.take_over => open(path),
        (None, _) => return None,
    };
    let weight = serve.share_weight.unwrap_or(WEIGHT);
    let begun = page.and_then(|file| {
        let page = Page::open(file).map_err(|error| in_full(&error))?;
        // What was set since the first process began is in the page.
        if let Some(depth) = serve.share_depth.filter(|_| !serve.take_over) {
            page.set_depth(depth);
        }
        Sharing::begun(page, weight, taken)
    });
    begun.map_err(|why| say_none(&why)).ok()
}

fn open(path: &Path) -> Result<File, String> {
    use std::os::unix::fs::OpenOptionsExt;
    let file = File::options().read(true).write(true).create(true).truncate(false).mode(0o660).open(path);
    file.map_err(|error| format!("{}: {error}", path.display()))
}

fn say_none(why: &str) {
    say(format_args!("the storage is not shared with other disks: {why}"));
}

impl Sharing {
    /// Takes a slot of the page, or the slot of the process before, which still uses it until this one begins.
    fn begun(page: Page, weight: u32, taken: Option<Handed>) -> Result<Sharing, String> {
        let owner = owner().ok_or("the start time of this process cannot be found out from /proc")?;
        let (weight, time) = taken.map_or((weight, 0), |taken| (taken.weight, taken.time));
        let slot = match taken {
            Some(taken) => taken.slot,
            None => page.claim(owner, Usable::Abandoned).map_err(|error| in_full(&error))?,
        };
        let said = shares::Slot::default();
        Ok(Sharing { share: Share::new(weight, time), place: Some((page, slot)), owner, said, has_none: false })
    }

    /// The process before this one, if there was one, no longer uses the slot.
    pub fn go(&self) {
        if let Some((page, slot)) = &self.place {
            page.take_over(*slot, self.owner);
        }
    }

    /// Has another page from now on; the same one changes nothing.
    pub fn move_to(&mut self, file: File) -> Result<(), String> {
        let numbers = |file: &File| fstat(file.as_fd()).map(|stat| (stat.st_dev, stat.st_ino)).ok();
        if self.place.as_ref().is_some_and(|(page, _)| numbers(page.file()) == numbers(&file)) {
            return Ok(());
        }
        let page = Page::open(file).map_err(|error| in_full(&error))?;
        let slot = page.claim(self.owner, Usable::Free).map_err(|error| in_full(&error))?;
        self.leave();
        // The virtual times of one page mean nothing in another one.
        self.share = Share::new(self.share.weight(), 0);
        self.said = shares::Slot::default();
        self.place = Some((page, slot));
        self.has_none = false;
        Ok(())
    }

    /// A part in a page that a running process is handed.
    pub fn in_page(file: File) -> Result<Sharing, String> {
        Sharing::begun(Page::open(file).map_err(|error| in_full(&error))?, WEIGHT, None)
    }

    /// Gives the slot back.
    pub fn leave(&mut self) {
        if let Some((page, slot)) = self.place.take() {
            page.release(slot, self.owner);
        }
    }

    /// For the process that takes the place of this one.
    pub fn handed(&mut self) -> Option<Handed> {
        let time = self.share.slot(0, false).time;
        self.place.as_ref().map(|(_, slot)| Handed { weight: self.share.weight(), time, slot: *slot })
    }

    /// The page's file.
    pub fn file(&self) -> Option<&File> {
        self.place.as_ref().map(|(page, _)| page.file())
    }

    /// The share.
    pub fn share(&self) -> &Share {
        &self.share
    }

    /// The depth that the page has now, which counts from the next look on; `None` without a slot in a page.
    pub fn depth(&self) -> Option<u32> {
        let (page, _) = self.place.as_ref().filter(|(page, _)| !page.is_lost() && !self.has_none)?;
        Some(page.depth().unwrap_or(shares::DEPTH))
    }

    /// Has another weight from now on.
    pub fn set_weight(&mut self, weight: u32) {
        self.share.set_weight(weight);
    }

    /// Whether other disks were there in the last look.
    #[inline(always)]
    pub fn is_shared(&self) -> bool {
        self.share.is_shared()
    }

    /// What may be begun now, with `in_flight` requests in flight.
    pub fn allowance(&mut self, in_flight: usize, now: u64) -> Allowance {
        self.look(now);
        self.share.allowance(count(in_flight), now)
    }

    /// A request of this cost is begun.
    #[inline]
    pub fn begin(&mut self, cost: u64) {
        self.share.begin(cost);
    }

    /// A turn has ended in which `answered` requests were answered. `waits`: a request waits for the share.
    pub fn turned(&mut self, answered: usize, in_flight: usize, waits: bool, now: u64) {
        self.share.answered(answered, now);
        // A disk that is alone publishes its state for disks that begin.
        self.look(now);
        let said = self.share.slot(count(in_flight), waits);
        if let Some((page, slot)) = self.place.as_ref().filter(|_| said != self.said && !self.has_none) {
            page.say(*slot, said, self.share.weight());
            self.said = said;
        }
    }

    /// Looks at the others, if it is time to.
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

    /// Takes another slot, if another process has written over the owner of this one. Leaves a page whose file was made
    /// shorter: the others do not see it any more.
    fn keep_place(&mut self) {
        if self.place.as_ref().is_some_and(|(page, _)| page.is_lost()) {
            self.leave();
            self.share = Share::new(self.share.weight(), 0);
            return say_none("the file of its page was made shorter");
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
                say_none(&format!("its slot was taken by another process: {}", in_full(&why)));
            }
            Err(_) => {}
        }
        self.said = shares::Slot::default();
    }
}

fn count(in_flight: usize) -> u32 {
    u32::try_from(in_flight).unwrap_or(u32::MAX)
}
