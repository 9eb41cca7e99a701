//! Bugs of the kinds that formats and disks really had, planted between the disk and what it stands on.
//!
//! Nothing in production code knows of them: a [`Saboteur`] wraps a format, a [`SabotagedIo`] an engine, and with
//! no bug chosen both pass everything through. An explorer that misses one of them is not worth running.

use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::rc::Rc;
use std::str::FromStr;

use disk::{
    Action, Allocation, Corrupt, Discarded, EngineFailed, FileDone, FileId, FileOp, Format, Geometry, ImageError, Io,
    MetaBlock, MetaWrite, Place, Placed, Reserved, Span, Ticket, Until, Wait,
};

use crate::io::{FaultKind, SimIo};
use crate::sector::SECTOR;
use crate::workload::BLOCK;

/// A planted bug.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Planted {
    /// The table is written before the bitmaps it refers to.
    TableBeforeBitmap,
    /// Table and bitmaps are written together.
    OneBatch,
    /// A write becomes visible, and part of the next round, when it is begun.
    EarlyCommit,
    /// A flush is answered without its last sync.
    EarlyAnswer,
    /// A round begins without syncing the data.
    NoDataSync,
    /// No sync between the bitmaps and the table.
    NoMiddleSync,
    /// A discarded block's place is given away before the table that gave it up is durable.
    EarlyReuse,
    /// Bitmaps are written with whole bytes set: eight sectors where one was written.
    RoundedBitmap,
    /// A bitmap is sealed with the bits of writes that are still under way.
    EarlyBits,
    /// The footer is written where it used to be, so that nothing makes the file long enough for its new block.
    OldFooter,
    /// The footer is written where the next block will begin.
    FooterOverBlock,
    /// Two blocks that are allocated at the same time get the same place.
    SamePlace,
    /// A write that failed is taken for one that succeeded.
    LostAbandon,
    /// Metadata whose write failed is not written again.
    LostRewrite,
    /// A discard in a differencing image clears the bits of what is discarded, which shows the parent again.
    ParentShown,
    /// Space behind the end of the file is taken for zeros on storage where it is not.
    TrustedTail,
    /// A place is called clean though it could not be deallocated.
    TrustedRelease,
}

const NAMES: [(Planted, &str); 17] = [
    (Planted::TableBeforeBitmap, "table-before-bitmap"),
    (Planted::OneBatch, "one-batch"),
    (Planted::EarlyCommit, "early-commit"),
    (Planted::EarlyAnswer, "early-answer"),
    (Planted::NoDataSync, "no-data-sync"),
    (Planted::NoMiddleSync, "no-middle-sync"),
    (Planted::EarlyReuse, "early-reuse"),
    (Planted::RoundedBitmap, "rounded-bitmap"),
    (Planted::EarlyBits, "early-bits"),
    (Planted::OldFooter, "old-footer"),
    (Planted::FooterOverBlock, "footer-over-block"),
    (Planted::SamePlace, "same-place"),
    (Planted::LostAbandon, "lost-abandon"),
    (Planted::LostRewrite, "lost-rewrite"),
    (Planted::ParentShown, "parent-shown"),
    (Planted::TrustedTail, "trusted-tail"),
    (Planted::TrustedRelease, "trusted-release"),
];

impl Planted {
    /// All of them.
    pub fn all() -> impl Iterator<Item = Planted> {
        NAMES.into_iter().map(|(planted, _)| planted)
    }

    /// What must go wrong below for the bug to matter.
    pub fn faults(self) -> &'static [FaultKind] {
        match self {
            Planted::LostAbandon | Planted::LostRewrite => &[FaultKind::NoSpace],
            Planted::TrustedRelease => &[FaultKind::Unsupported],
            _ => &[],
        }
    }
}

impl fmt::Display for Planted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(NAMES.iter().find(|(planted, _)| planted == self).map_or("", |(_, name)| name))
    }
}

impl FromStr for Planted {
    type Err = String;

    fn from_str(text: &str) -> Result<Planted, String> {
        let found = NAMES.iter().find(|(_, name)| *name == text).map(|(planted, _)| *planted);
        found.ok_or_else(|| {
            let names: Vec<_> = NAMES.iter().map(|(_, name)| *name).collect();
            format!("'{text}' is not a planted bug; there are {}", names.join(", "))
        })
    }
}

/// What format and engine agree upon behind the disk's back: for each sync of the round under way, whether it is
/// to do nothing.
pub type Plot = Rc<RefCell<VecDeque<bool>>>;

/// The bytes of a bitmap of the blocks that the simulator uses, and of a block.
const BITMAP_LEN: u64 = 512;
const BLOCK_LEN: u64 = BLOCK * SECTOR;

/// Part of a block that a request is about.
#[derive(Clone, Copy, Debug)]
struct Open {
    span: Span,
    /// Where the block begins in the file.
    base: u64,
}

/// A format with a bug.
pub struct Saboteur<F> {
    inner: F,
    bug: Option<Planted>,
    plot: Plot,
    /// Committed early; what the disk is told when it commits.
    early: BTreeMap<u64, Option<Placed>>,
    open: BTreeMap<u64, Open>,
    /// Metadata that the format believes durable and that is still to be written.
    owed: Vec<Vec<MetaWrite>>,
    in_round: bool,
    /// Places that are really another's.
    alias: BTreeMap<u64, u64>,
    /// Discarded, and not written since.
    discarded: Vec<Open>,
    footer_at: u64,
}

impl<F: Format> Saboteur<F> {
    /// `inner` with `bug`, if any, in a file of `file_len` bytes.
    pub fn new(inner: F, bug: Option<Planted>, plot: Plot, file_len: u64) -> Saboteur<F> {
        Saboteur {
            inner,
            bug,
            plot,
            early: BTreeMap::new(),
            open: BTreeMap::new(),
            owed: Vec::new(),
            in_round: false,
            alias: BTreeMap::new(),
            discarded: Vec::new(),
            footer_at: file_len.saturating_sub(SECTOR),
        }
    }

    fn has(&self, bug: Planted) -> bool {
        self.bug == Some(bug)
    }

    /// Where a byte of the file really is.
    fn aliased(&self, at: u64) -> u64 {
        let alias = self.alias.iter().find(|(base, _)| (**base..**base + BLOCK_LEN).contains(&at));
        alias.map_or(at, |(base, other)| at - base + other)
    }

    /// Gives a new block the place of another that is being allocated.
    fn crowd(&mut self, base: u64, span: Span) {
        let block = span.at / BLOCK_LEN;
        let other = self.open.values().find(|open| open.span.at / BLOCK_LEN != block && open.base != base);
        if let Some(other) = other.map(|open| open.base).filter(|other| !self.alias.contains_key(other)) {
            self.alias.entry(base).or_insert(other);
        }
    }

    fn spoil(&mut self, mut batches: Vec<Vec<MetaWrite>>) -> Vec<Vec<MetaWrite>> {
        match self.bug {
            Some(Planted::TableBeforeBitmap) => batches.reverse(),
            Some(Planted::OneBatch) if !batches.is_empty() => batches = vec![batches.concat()],
            Some(Planted::RoundedBitmap) => bitmaps(&mut batches).for_each(|write| {
                write.bytes.iter_mut().filter(|byte| **byte != 0).for_each(|byte| *byte = 0xff);
            }),
            Some(Planted::EarlyBits) => bitmaps(&mut batches).for_each(|write| {
                bits_of(write, self.open.values(), |byte, bit| *byte |= bit);
            }),
            Some(Planted::ParentShown) => bitmaps(&mut batches).for_each(|write| {
                bits_of(write, self.discarded.iter(), |byte, bit| *byte &= !bit);
            }),
            Some(Planted::OldFooter) => footers(&mut batches).for_each(|write| {
                std::mem::swap(&mut write.at, &mut self.footer_at);
            }),
            Some(Planted::FooterOverBlock) => footers(&mut batches).for_each(|write| {
                write.at = (write.at + SECTOR + BITMAP_LEN).next_multiple_of(4096);
            }),
            Some(Planted::SamePlace) => self.crowd_metadata(&mut batches),
            _ => {}
        }
        let last = batches.len();
        let hollow = |sync| match self.bug {
            Some(Planted::EarlyAnswer) => sync == last,
            Some(Planted::NoDataSync) => sync == 0 && last > 0,
            Some(Planted::NoMiddleSync) => sync == 1 && last > 1,
            _ => false,
        };
        *self.plot.borrow_mut() = (0..=last).map(hollow).collect();
        batches
    }

    fn crowd_metadata(&self, batches: &mut [Vec<MetaWrite>]) {
        for (base, other) in &self.alias {
            let entry = |base: u64| u32::try_from((base - BITMAP_LEN) / SECTOR).unwrap_or(0).to_be_bytes();
            for write in batches.iter_mut().flatten() {
                if write.at == base - BITMAP_LEN {
                    write.at = other - BITMAP_LEN;
                }
                for place in write.bytes.chunks_exact_mut(4).filter(|place| **place == entry(*base)) {
                    place.copy_from_slice(&entry(*other));
                }
            }
        }
    }
}

/// Changes the bits of the sectors of `parts` in a bitmap that is about to be written.
fn bits_of<'a>(write: &mut MetaWrite, parts: impl Iterator<Item = &'a Open>, change: impl Fn(&mut u8, u8)) {
    let at = write.at;
    for part in parts.filter(|part| part.base == at + BITMAP_LEN) {
        let from = part.span.at % BLOCK_LEN / SECTOR;
        for sector in from..from + part.span.len / SECTOR {
            let byte = usize::try_from(sector / 8).ok().and_then(|at| write.bytes.get_mut(at));
            byte.into_iter().for_each(|byte| change(byte, 0x80 >> (sector % 8)));
        }
    }
}

/// The first sector of a block allocation table begins with an entry, of a header or footer with a cookie.
fn is_footer(write: &MetaWrite) -> bool {
    write.bytes.starts_with(b"conectix")
}

/// The footers at the end of the file among the writes.
fn footers(batches: &mut [Vec<MetaWrite>]) -> impl Iterator<Item = &mut MetaWrite> {
    batches.iter_mut().flatten().filter(|write| is_footer(write) && write.at != 0)
}

/// The bitmaps: what stands right in front of a block, which begins at a multiple of 4 KiB.
fn bitmaps(batches: &mut [Vec<MetaWrite>]) -> impl Iterator<Item = &mut MetaWrite> {
    batches.iter_mut().flatten().filter(|write| (write.at + BITMAP_LEN) % 4096 == 0 && !is_footer(write))
}

impl<F: Format> Format for Saboteur<F> {
    fn geometry(&self) -> Geometry {
        self.inner.geometry()
    }

    fn map(&mut self, span: Span) -> Result<Place, Wait> {
        match self.inner.map(span)? {
            Place::Data { at, len } => Ok(Place::Data { at: self.aliased(at), len }),
            other => Ok(other),
        }
    }

    fn reserve(&mut self, span: Span) -> Result<Reserved, Wait> {
        let mut reserved = self.inner.reserve(span)?;
        self.discarded.retain(|discarded| !discarded.span.overlaps(span));
        let Some(ticket) = reserved.ticket else {
            return Ok(Reserved { at: self.aliased(reserved.at), ..reserved });
        };
        let base = reserved.at - span.at % BLOCK_LEN;
        if self.has(Planted::SamePlace) {
            self.crowd(base, span);
        }
        self.open.insert(ticket.0, Open { span: Span { len: reserved.len, ..span }, base });
        reserved.at = self.aliased(reserved.at);
        if self.has(Planted::EarlyCommit) {
            let placed = self.inner.commit(ticket);
            self.early.insert(ticket.0, placed);
        }
        Ok(reserved)
    }

    fn commit(&mut self, ticket: Ticket) -> Option<Placed> {
        self.open.remove(&ticket.0);
        match self.early.remove(&ticket.0) {
            Some(placed) => placed,
            None => {
                let placed = self.inner.commit(ticket)?;
                Some(Placed { at: self.aliased(placed.at), ..placed })
            }
        }
    }

    fn abandon(&mut self, ticket: Ticket) {
        self.open.remove(&ticket.0);
        if self.early.remove(&ticket.0).is_some() {
            return;
        }
        if self.has(Planted::LostAbandon) {
            self.inner.commit(ticket);
        } else {
            self.inner.abandon(ticket);
        }
    }

    fn discard(&mut self, span: Span) -> Result<Discarded, Wait> {
        let discarded = self.inner.discard(span)?;
        if let Discarded::Kept { at, len } = discarded {
            self.discarded.push(Open { span: Span { at: span.at, len }, base: at - span.at % BLOCK_LEN });
        }
        Ok(discarded)
    }

    fn released(&mut self, at: u64, clean: bool) {
        self.inner.released(at, clean || self.has(Planted::TrustedRelease));
        if self.has(Planted::EarlyReuse) && !self.in_round {
            let batches = self.inner.seal();
            self.inner.settled(true);
            self.owed.extend(batches);
        }
    }

    fn reclaim(&mut self) -> Option<(u64, u64)> {
        self.inner.reclaim()
    }

    fn forget(&mut self, span: Span) -> Result<u64, Wait> {
        self.inner.forget(span)
    }

    fn grow(&mut self, len: u64) -> Result<(), ImageError> {
        self.inner.grow(len)
    }

    fn unpack(&self, bytes: &[u8]) -> Result<Vec<u8>, Corrupt> {
        self.inner.unpack(bytes)
    }

    fn load(&mut self, block: MetaBlock, bytes: &[u8]) -> Result<(), Corrupt> {
        self.inner.load(block, bytes)
    }

    fn dirty(&self) -> usize {
        self.inner.dirty() + self.owed.len()
    }

    fn seal(&mut self) -> Vec<Vec<MetaWrite>> {
        self.in_round = true;
        let mut batches = std::mem::take(&mut self.owed);
        batches.extend(self.inner.seal());
        self.spoil(batches)
    }

    fn settled(&mut self, durable: bool) {
        self.in_round = false;
        self.inner.settled(durable || self.has(Planted::LostRewrite));
    }
}

/// An engine that does nothing for some syncs.
pub struct SabotagedIo<'a> {
    /// The honest engine.
    pub io: &'a mut SimIo,
    /// Which syncs.
    pub plot: &'a Plot,
}

impl Io for SabotagedIo<'_> {
    fn push(&mut self, op: FileOp) -> Result<(), FileOp> {
        if matches!(op.action, Action::SyncData) && self.plot.borrow_mut().pop_front() == Some(true) {
            self.io.push_hollow_sync(op);
            return Ok(());
        }
        self.io.push(op)
    }

    fn reap(&mut self, until: Until, done: &mut Vec<FileDone>) -> Result<(), EngineFailed> {
        self.io.reap(until, done)
    }

    fn allocated(&mut self, file: FileId, at: u64, len: u64) -> Allocation {
        self.io.allocated(file, at, len)
    }
}
