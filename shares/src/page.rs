//! The page of a storage: a head, and a slot for each disk.
//!
//! It is written by processes of which one may have been broken into: each access is checked and made once, and what is
//! read is judged by [`Share`](crate::Share). A slot belongs to the process whose number and start time it has; it is
//! taken by comparing and exchanging, so that two never have one. A disk whose slot another process has written over
//! notices it when it looks, and takes another one.
//!
//! It knows no disk and no clock. Invariant: nothing in the page ends a process. A page of a daemon cannot be made
//! shorter; that of `--share FILE` can be, by those who may write to the file, and is lost then ([`Page::is_lost`]).

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;

use memory::{Mapping, Shared};
use rustix::fs::{
    FallocateFlags, MemfdFlags, SealFlags, fallocate, fcntl_add_seals, fcntl_get_seals, ftruncate, memfd_create,
};

use crate::share::{DEPTHS, Slot};

/// "taplnshr", as bytes.
const MAGIC: u64 = u64::from_ne_bytes(*b"taplnshr");
const VERSION: u64 = 1;

const MAGIC_AT: usize = 0;
const VERSION_AT: usize = 8;
/// Requests in flight at most, of all.
const DEPTH_AT: usize = 16;
/// One more than the highest slot that was ever taken.
const USED_AT: usize = 24;

const SLOTS_AT: usize = 4096;
/// A cache line with one writer.
const SLOT_LEN: usize = 64;
/// The number of a process in the lower half, and a part of its start time in the upper one; zero is no process.
const OWNER: usize = 0;
/// Requests in flight in the lower half; bit 32: something waits.
const STATE: usize = 8;
const TIME: usize = 16;
const ANSWERED: usize = 24;
const WEIGHT: usize = 32;

const WAITS: u64 = 1 << 32;

/// Disks that can share a storage.
pub const SLOTS: usize = 1024;
/// The length of a page.
pub const PAGE_LEN: usize = SLOTS_AT + SLOTS * SLOT_LEN;

/// Why there is no page.
#[derive(Debug, thiserror::Error)]
pub enum PageError {
    /// It cannot be made as long as it must be, or mapped.
    #[error("cannot {what} the page of shares")]
    Failed {
        /// What was tried.
        what: &'static str,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// It is somebody's file.
    #[error("it is not a page of shares, nor an empty file: nothing is written there")]
    NotAPage,
    /// It is of another version.
    #[error("it is of version {0}, and this program knows version {VERSION}")]
    OfAnotherVersion(u64),
    /// There are as many disks as slots.
    #[error("all {SLOTS} slots of the page of shares are taken")]
    Full,
}

/// Whose a slot is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Owner {
    /// The number of the process.
    pub pid: u32,
    /// The lower part of its start time, in clock ticks after boot: a number that was given twice is noticed.
    pub started: u32,
}

impl Owner {
    fn word(self) -> u64 {
        u64::from(self.pid) | u64::from(self.started) << 32
    }

    fn of_word(word: u64) -> Option<Owner> {
        let half = |word: u64| u32::try_from(word & u64::from(u32::MAX)).unwrap_or(0);
        (word != 0).then(|| Owner { pid: half(word), started: half(word >> 32) })
    }

    /// The calling process.
    pub fn this() -> io::Result<Owner> {
        let pid = std::process::id();
        Owner::of(pid)?.ok_or_else(|| io::Error::other(format!("/proc/{pid}/stat is not there")))
    }

    /// The process with this number, if there is one.
    pub fn of(pid: u32) -> io::Result<Option<Owner>> {
        let stat = match std::fs::read_to_string(format!("/proc/{pid}/stat")) {
            Ok(stat) => stat,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            // It has ended between open and read (ESRCH).
            Err(error) if error.raw_os_error() == Some(rustix::io::Errno::SRCH.raw_os_error()) => return Ok(None),
            Err(error) => return Err(error),
        };
        // proc(5): the name is in parentheses and may have any character; the start time is the 20th field after it,
        // the state the first.
        let mut fields = stat.rsplit(')').next().unwrap_or_default().split_ascii_whitespace();
        let is_dead = fields.next().is_none_or(|state| ["Z", "X", "x"].contains(&state));
        let started = fields.nth(18).and_then(|field| field.parse::<u64>().ok()).unwrap_or(0);
        let started = u32::try_from(started & u64::from(u32::MAX)).unwrap_or(0);
        Ok((!is_dead).then_some(Owner { pid, started }))
    }

    fn is_alive(self) -> bool {
        // What cannot be read is somebody's.
        Owner::of(self.pid).map_or(true, |found| found == Some(self))
    }
}

/// Which slots a process may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Usable {
    /// Free slots: this process cannot see the others, or a daemon frees their slots.
    Free,
    /// Free slots and those of processes that have ended.
    Abandoned,
}

/// The page of one storage.
pub struct Page {
    file: File,
    shared: Shared,
    mapping: Arc<Mapping>,
}

impl std::fmt::Debug for Page {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Page").field("file", &self.file).finish_non_exhaustive()
    }
}

impl Page {
    /// Creates a page that no process can truncate, to be passed to other processes.
    pub fn new(depth: u32) -> Result<Page, PageError> {
        let made = memfd_create("tapline-shares", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING);
        let file = File::from(made.map_err(|errno| failed("create")(errno.into()))?);
        ftruncate(&file, PAGE_LEN as u64).map_err(|errno| failed("size")(errno.into()))?;
        let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
        fcntl_add_seals(&file, seals).map_err(|errno| failed("seal")(errno.into()))?;
        let page = Page::open(file)?;
        page.set_depth(depth);
        Ok(page)
    }

    /// The one in `file`, which is open for reading and writing. An empty file becomes a page.
    pub fn open(file: File) -> Result<Page, PageError> {
        let metadata = file.metadata().map_err(failed("measure"))?;
        let is_whole = metadata.len() == PAGE_LEN as u64;
        if !metadata.is_file() || metadata.len() > 0 && !is_whole {
            return Err(PageError::NotAPage);
        }
        if !is_whole {
            ftruncate(&file, PAGE_LEN as u64).map_err(|errno| failed("size")(errno.into()))?;
        }
        // Where there is no memory or space for it, a write to the page would end the process (SIGBUS). A process
        // before this one may have found none either, and left it as long as this.
        let taken = fallocate(&file, FallocateFlags::empty(), 0, PAGE_LEN as u64);
        taken.map_err(|errno| failed("take memory for")(errno.into()))?;
        // Only a file in memory has seals.
        let is_sealed = fcntl_get_seals(&file).is_ok_and(|seals| seals.contains(SealFlags::SHRINK));
        let mapping = match is_sealed {
            true => Mapping::of_file(file.as_fd(), 0, PAGE_LEN),
            false => Mapping::of_shrinking_file(file.as_fd(), PAGE_LEN),
        };
        let mapping = Arc::new(mapping.map_err(failed("map"))?);
        let page = Page { file, shared: Shared::of_held(mapping.clone()), mapping };
        match (page.load(MAGIC_AT), page.load(VERSION_AT)) {
            (MAGIC, VERSION) => {}
            (MAGIC, other) => return Err(PageError::OfAnotherVersion(other)),
            // Two processes may begin it: they write the same.
            (0, 0) => {
                page.store(VERSION_AT, VERSION);
                page.publish(MAGIC_AT, MAGIC);
            }
            (0, VERSION) => page.publish(MAGIC_AT, MAGIC),
            _ => return Err(PageError::NotAPage),
        }
        Ok(page)
    }

    /// Whether its file was made shorter: what is said there is seen by no other disk.
    pub fn is_lost(&self) -> bool {
        self.mapping.is_lost()
    }

    /// The page's file, to be passed to other processes.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// The depth of the storage, if that was set.
    pub fn depth(&self) -> Option<u32> {
        u32::try_from(self.load(DEPTH_AT)).ok().filter(|depth| DEPTHS.contains(depth))
    }

    /// Has another depth.
    pub fn set_depth(&self, depth: u32) {
        self.store(DEPTH_AT, u64::from(depth.clamp(*DEPTHS.start(), *DEPTHS.end())));
    }

    /// Takes a slot. That of this owner, if it has one already: a process that is replaced hands over its own.
    pub fn claim(&self, owner: Owner, usable: Usable) -> Result<usize, PageError> {
        if let Some(own) = (0..self.used()).find(|&slot| self.is_of(slot, owner)) {
            return Ok(own);
        }
        let free = |word: u64| match Owner::of_word(word) {
            None => true,
            Some(owner) => usable == Usable::Abandoned && !owner.is_alive(),
        };
        let claimed = (0..SLOTS).find(|&slot| {
            let word = self.load(at(slot, OWNER));
            free(word) && self.exchange(at(slot, OWNER), word, owner.word())
        });
        let slot = claimed.ok_or(PageError::Full)?;
        self.begin(slot);
        Ok(slot)
    }

    /// Takes the slot of a process that has handed it over, whatever is in there.
    pub fn take_over(&self, slot: usize, owner: Owner) {
        self.store(at(slot.min(SLOTS - 1), OWNER), owner.word());
    }

    /// Gives a slot back, if it is this owner's.
    pub fn release(&self, slot: usize, owner: Owner) {
        if self.is_of(slot, owner) {
            self.begin(slot);
            self.exchange(at(slot, OWNER), owner.word(), 0);
        }
    }

    /// Whether a slot is this owner's still. It is seen by the others afterwards, whatever is in the head.
    pub fn keep(&self, slot: usize, owner: Owner) -> bool {
        self.have_used(slot);
        self.is_of(slot, owner)
    }

    /// Gives back the slots of a process that has ended, or of all that have: for a daemon, since the process of a disk
    /// cannot see others.
    pub fn forget_ended(&self, pid: Option<u32>) {
        for slot in 0..self.used() {
            let owner = Owner::of_word(self.load(at(slot, OWNER)));
            let owner = owner.filter(|owner| pid.is_none_or(|pid| owner.pid == pid) && !owner.is_alive());
            if let Some(owner) = owner {
                self.release(slot, owner);
            }
        }
    }

    /// Publishes the state of the owner of a slot.
    #[inline]
    pub fn say(&self, slot: usize, said: Slot, weight: u32) {
        let state = u64::from(said.in_flight) | if said.waits { WAITS } else { 0 };
        self.store(at(slot, TIME), said.time);
        self.store(at(slot, ANSWERED), said.answered);
        self.store(at(slot, WEIGHT), u64::from(weight));
        self.publish(at(slot, STATE), state);
    }

    /// The states in all slots that were ever taken, except this one.
    pub fn others(&self, own: usize) -> impl Iterator<Item = (usize, Slot)> {
        (0..self.used()).filter(move |slot| *slot != own).map(|slot| (slot, self.said(slot)))
    }

    /// The state in a slot, with its owner and weight.
    pub fn said(&self, slot: usize) -> Slot {
        let state = self.load(at(slot, STATE));
        if state == 0 {
            return Slot::default();
        }
        Slot {
            in_flight: u32::try_from(state & u64::from(u32::MAX)).unwrap_or(0),
            waits: state & WAITS != 0,
            time: self.load(at(slot, TIME)),
            answered: self.load(at(slot, ANSWERED)),
        }
    }

    fn begin(&self, slot: usize) {
        self.publish(at(slot, STATE), 0);
        for field in [TIME, ANSWERED, WEIGHT] {
            self.store(at(slot, field), 0);
        }
        self.have_used(slot);
    }

    fn have_used(&self, slot: usize) {
        let wanted = slot as u64 + 1;
        loop {
            let used = self.load(USED_AT);
            if (wanted..=SLOTS as u64).contains(&used) || self.exchange(USED_AT, used, wanted) {
                return;
            }
        }
    }

    fn used(&self) -> usize {
        usize::try_from(self.load(USED_AT)).map_or(SLOTS, |used| used.min(SLOTS))
    }

    fn is_of(&self, slot: usize, owner: Owner) -> bool {
        self.load(at(slot, OWNER)) == owner.word()
    }

    // Every place is within the page.
    fn load(&self, at: usize) -> u64 {
        self.shared.load_u64_native(at).unwrap_or(0)
    }

    fn store(&self, at: usize, value: u64) {
        let stored = self.shared.store_u64_native(at, value);
        debug_assert!(stored.is_some());
    }

    fn publish(&self, at: usize, value: u64) {
        let stored = self.shared.publish_u64_native(at, value);
        debug_assert!(stored.is_some());
    }

    fn exchange(&self, at: usize, old: u64, new: u64) -> bool {
        self.shared.exchange_u64_native(at, old, new).unwrap_or(false)
    }
}

fn at(slot: usize, field: usize) -> usize {
    SLOTS_AT + slot * SLOT_LEN + field
}

fn failed(what: &'static str) -> impl Fn(io::Error) -> PageError {
    move |source| PageError::Failed { what, source }
}

#[cfg(test)]
mod test {
    use fastrand::Rng;

    use super::*;

    const ME: Owner = Owner { pid: 10, started: 1 };
    const OTHER: Owner = Owner { pid: 11, started: 2 };

    fn said(in_flight: u32) -> Slot {
        Slot { in_flight, waits: true, time: 7, answered: 9 }
    }

    fn in_file(bytes: &[u8]) -> Result<Page, PageError> {
        let file = tempfile::tempfile().unwrap();
        std::os::unix::fs::FileExt::write_all_at(&file, bytes, 0).unwrap();
        Page::open(file)
    }

    #[test]
    fn each_disk_sees_what_the_others_say() {
        let page = Page::new(48).unwrap();
        let again = Page::open(page.file().try_clone().unwrap()).unwrap();
        let (mine, other) = (page.claim(ME, Usable::Free).unwrap(), again.claim(OTHER, Usable::Free).unwrap());
        assert_eq!((mine, other, again.depth()), (0, 1, Some(48)));
        again.say(other, said(3), 100);
        assert_eq!(page.others(mine).collect::<Vec<_>>(), [(other, said(3))]);
        again.release(other, OTHER);
        assert_eq!(page.others(mine).collect::<Vec<_>>(), [(other, Slot::default())]);
        assert_eq!(page.claim(ME, Usable::Free).unwrap(), mine, "it has one");
    }

    #[test]
    fn a_slot_is_given_back_by_its_owner_only() {
        let page = Page::new(48).unwrap();
        let slot = page.claim(ME, Usable::Free).unwrap();
        // The next process of the disk has it.
        page.take_over(slot, OTHER);
        page.say(slot, said(1), 100);
        page.release(slot, ME);
        assert!(!page.keep(slot, ME) && page.keep(slot, OTHER));
        assert_eq!(page.said(slot), said(1));
    }

    #[test]
    fn slots_of_ended_processes_are_found() {
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let dead = Owner::of(child.id()).unwrap().unwrap_or(Owner { pid: child.id(), started: 1 });
        let page = Page::new(48).unwrap();
        page.claim(dead, Usable::Free).unwrap();
        let living = page.claim(Owner::this().unwrap(), Usable::Free).unwrap();
        page.say(0, said(5), 100);
        child.wait().unwrap();
        assert_eq!(page.claim(ME, Usable::Free).unwrap(), 2, "its slot is not free for one that cannot see it");
        page.release(2, ME);
        page.forget_ended(Some(std::process::id()));
        assert_eq!(page.said(0), said(5));
        page.forget_ended(Some(dead.pid));
        assert_eq!(page.said(0), Slot::default());
        assert!(page.keep(living, Owner::this().unwrap()));
        page.claim(dead, Usable::Free).unwrap();
        page.say(0, said(5), 100);
        page.forget_ended(None);
        assert_eq!(page.said(0), Slot::default());
        page.claim(dead, Usable::Free).unwrap();
        assert_eq!(page.claim(Owner::this().unwrap(), Usable::Abandoned).unwrap(), living);
        assert_eq!(page.claim(OTHER, Usable::Abandoned).unwrap(), 0);
        assert_eq!(Owner::of(std::process::id()).unwrap(), Some(Owner::this().unwrap()));
    }

    #[test]
    fn a_page_cannot_be_made_shorter_or_taken_for_another_file() {
        let page = Page::new(48).unwrap();
        assert!(page.file().set_len(0).is_err() && page.file().set_len(1 << 20).is_err());
        assert!(matches!(in_file(b"an image"), Err(PageError::NotAPage)));
        assert!(matches!(in_file(&[1; PAGE_LEN]), Err(PageError::NotAPage)));
        let mut newer = [0; PAGE_LEN];
        newer[..8].copy_from_slice(&MAGIC.to_ne_bytes());
        newer[8..16].copy_from_slice(&9u64.to_ne_bytes());
        assert!(matches!(in_file(&newer), Err(PageError::OfAnotherVersion(9))));
        // One that was being begun by a process that was killed.
        assert!(in_file(&[0; PAGE_LEN]).is_ok());
    }

    #[test]
    fn a_page_whose_file_is_made_shorter_is_lost_and_ends_nothing() {
        let page = in_file(&[]).unwrap();
        let again = Page::open(page.file().try_clone().unwrap()).unwrap();
        let mine = page.claim(ME, Usable::Free).unwrap();
        page.file().set_len(0).unwrap();
        page.say(mine, said(3), 100);
        assert_eq!((page.depth(), page.keep(mine, ME), page.others(mine).count()), (None, false, 0));
        assert!(page.is_lost() && !again.is_lost());
        // It is long enough again, and empty: the other one has nothing, too, and no fault.
        page.file().set_len(PAGE_LEN as u64).unwrap();
        assert!(!again.keep(mine, ME) && !again.is_lost());
    }

    #[test]
    fn a_page_full_of_anything_is_read_and_is_full_for_a_new_disk() {
        let mut random = Rng::with_seed(1);
        for _ in 0..50 {
            let page = Page::new(48).unwrap();
            for word in (16..PAGE_LEN).step_by(8) {
                page.store(word, random.u64(..));
            }
            assert!(page.others(5).count() < SLOTS);
            let mut share = crate::Share::new(100, 0);
            share.look(1, page.depth().unwrap_or(64), page.others(5));
            assert!(share.allowance(0, 1).allows());
            assert!(matches!(page.claim(ME, Usable::Free), Err(PageError::Full)));
            assert!(!page.keep(5, ME));
        }
    }

    #[test]
    fn a_head_that_hides_a_slot_is_mended() {
        let page = Page::new(48).unwrap();
        let slot = page.claim(ME, Usable::Free).unwrap();
        page.store(USED_AT, 0);
        assert_eq!(page.others(9).count(), 0);
        assert!(page.keep(slot, ME));
        assert_eq!(page.others(9).count(), 1);
        page.store(USED_AT, u64::MAX);
        assert_eq!(page.others(9).count(), SLOTS - 1);
        page.keep(slot, ME);
        assert_eq!(page.others(9).count(), 1);
    }
}
