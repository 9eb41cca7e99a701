//! A format with a planted bug, between the disk and the correct format.
//!
//! Without a bug it passes everything through. The bugs are listed in [`crate::planted`].

mod engine;
pub mod order;
pub mod pages;
mod vhd;

use std::collections::BTreeMap;

use disk::{
    Committed, Corrupt, Discarded, FileId, FileOffset, FileRange, Format, Geometry, ImageError, Mapping, MetaBlock,
    MetaWrite, Records, Reserved, Span, Stamp, Ticket, Wait,
};

use crate::cluster::{self, CLUSTER};
use crate::planted::{Layers, Planted};
use crate::sector::SECTOR;
use crate::subclusters;
pub use engine::{ANSWERED, Instructions, Plot, SabotagedIo, SyncFate};
use vhd::{BITMAP_LEN, BLOCK_LEN, bitmaps, bits_of, footers, header_in_place, header_last};

/// A part of a block with a request in flight.
#[derive(Clone, Copy, Debug)]
struct Open {
    span: Span,
    /// Its offset in the file.
    at: FileOffset,
    /// The offset of the block in the file.
    base: FileOffset,
}

/// A format with a bug.
pub struct Saboteur<F> {
    inner: F,
    bug: Option<Planted>,
    plot: Plot,
    file: FileId,
    depth: usize,
    /// Writes committed early, with what the disk gets at their commit.
    early: BTreeMap<u64, Option<Committed>>,
    open: BTreeMap<u64, Open>,
    /// Metadata that the format treats as durable and that is still to be written.
    owed: Vec<Vec<MetaWrite>>,
    in_round: bool,
    /// Offsets that were replaced by another block's.
    alias: BTreeMap<FileOffset, FileOffset>,
    /// Ranges dropped by a merge, to be deallocated at once.
    leaks: Vec<FileRange>,
    deallocated: Vec<FileOffset>,
    /// Ranges discarded and not written since.
    discarded: Vec<Open>,
    footer_at: FileOffset,
    /// The end of the disk before it grew.
    old_end: Option<u64>,
    /// Records that are returned with the next ones.
    late: [Records; 2],
}

impl<F: Format> Saboteur<F> {
    /// `inner` with `bug`, if that applies to this depth of a chain, in a file of `file_len` bytes.
    pub fn new(
        inner: F,
        bug: Option<Planted>,
        plot: Plot,
        (file, depth): (FileId, usize),
        file_len: u64,
    ) -> Saboteur<F> {
        let lives_here = |bug: &Planted| match bug.layers() {
            Layers::Leaf => depth == 0,
            Layers::Below => depth > 0,
            Layers::All => true,
        };
        Saboteur {
            inner,
            bug: bug.filter(lives_here),
            plot,
            file,
            depth,
            early: BTreeMap::new(),
            open: BTreeMap::new(),
            owed: Vec::new(),
            in_round: false,
            alias: BTreeMap::new(),
            leaks: Vec::new(),
            deallocated: Vec::new(),
            discarded: Vec::new(),
            footer_at: FileOffset(file_len.saturating_sub(SECTOR)),
            old_end: None,
            late: Default::default(),
        }
    }

    /// The correct format.
    pub fn inner(&self) -> &F {
        &self.inner
    }

    /// The correct format, to be changed where nothing is planted.
    pub fn inner_mut(&mut self) -> &mut F {
        &mut self.inner
    }

    fn has(&self, bug: Planted) -> bool {
        self.bug == Some(bug)
    }

    /// The actual offset in the file.
    fn aliased(&self, at: FileOffset) -> FileOffset {
        let alias = self.alias.iter().find(|(base, _)| (**base..**base + BLOCK_LEN).contains(&at));
        alias.map_or(at, |(base, other)| *other + (at - *base))
    }

    /// Gives a new block the space of another one that is being allocated.
    fn crowd(&mut self, base: FileOffset, span: Span) {
        let block = span.at / BLOCK_LEN;
        let other = self.open.values().find(|open| open.span.at / BLOCK_LEN != block && open.base != base);
        if let Some(other) = other.map(|open| open.base).filter(|other| !self.alias.contains_key(other)) {
            self.alias.entry(base).or_insert(other);
        }
    }

    fn spoil(&mut self, mut batches: Vec<Vec<MetaWrite>>) -> Vec<Vec<MetaWrite>> {
        match self.bug {
            Some(Planted::TableBeforeBitmap | Planted::RefcountAfterEntry) => batches.reverse(),
            Some(Planted::OneBatch | Planted::RefcountWithEntry) if !batches.is_empty() => {
                batches = vec![batches.concat()];
            }
            Some(Planted::RoundedBitmap) => bitmaps(&mut batches).for_each(|write| {
                write.bytes.iter_mut().filter(|byte| **byte != 0).for_each(|byte| *byte = 0xff);
            }),
            Some(Planted::RoundedSubclusters) => batches.iter_mut().flatten().for_each(subclusters::round),
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
                write.at = (write.at + SECTOR + BITMAP_LEN).align_up(4096);
            }),
            Some(Planted::HeaderInPlace) => header_in_place(&mut batches),
            Some(Planted::FooterBeforeHeader) => header_last(&mut batches),
            Some(Planted::SamePlace) => self.crowd_metadata(&mut batches),
            Some(Planted::TornHeader) => header_first(&mut batches),
            Some(Planted::EntryWithCopy) => tables_late(&mut batches),
            Some(Planted::LoweredEarly) => lower_early(&mut batches),
            Some(Planted::ForgottenBeforeCopied) => std::mem::swap(&mut self.owed, &mut batches),
            _ => {}
        }
        batches
    }

    /// Instructs the engine about the fates of the syncs of a round with this many batches.
    fn plot(&self, last: usize) {
        let fate = |sync| match self.bug {
            Some(Planted::EarlyAnswer) if sync == last => SyncFate::Hollow,
            Some(Planted::NoDataSync) if sync == 0 && last > 0 => SyncFate::Hollow,
            Some(Planted::EntryWithoutSync) if sync < last => SyncFate::Hollow,
            Some(Planted::NoMiddleSync) if sync == 1 && last > 1 => SyncFate::Hollow,
            Some(Planted::UpperLayerFirst) if self.depth > 0 => SyncFate::Hollow,
            Some(Planted::UpperLayerFirst) if sync == last => SyncFate::ForAll,
            _ => SyncFate::Honest,
        };
        let mut plot = self.plot.borrow_mut();
        // The instructions for that one were given before.
        if self.bug != Some(Planted::OwedWithoutSyncs) || !plot.syncs.contains_key(&self.file) {
            plot.syncs.insert(self.file, (0..=last).map(fate).collect());
        }
    }

    /// Allocates a range that was written to the target in the leaf as well, and logs that.
    fn grow_leaf(&mut self) {
        for span in std::mem::take(&mut self.plot.borrow_mut().regrown) {
            let reserved = self.inner.reserve(span);
            if let Some(ticket) = reserved.ok().and_then(|reserved| reserved.ticket) {
                self.inner.commit(ticket);
            }
        }
    }

    /// Lets the format treat its changes as durable. They are written with the next round.
    fn feign_round(&mut self) {
        let batches = self.inner.seal();
        self.inner.settled(true);
        self.owed.extend(batches);
    }

    /// The clusters that a planted bug deallocates although others refer to them: those of a compressed cluster, or the
    /// one shared with an internal snapshot.
    fn freed_at(&mut self, span: Span) -> Option<FileRange> {
        match (self.bug?, self.inner.map(span)) {
            (Planted::SharedDeallocated, Ok(Mapping::Compressed { at, size, .. })) => {
                let first = at.align_down(CLUSTER);
                Some(FileRange { at: first, len: (at + size).align_up(CLUSTER) - first })
            }
            (Planted::SnapshotDeallocated, Ok(Mapping::Shared { at, .. })) => {
                Some(FileRange { at: at.align_down(CLUSTER), len: CLUSTER })
            }
            _ => None,
        }
    }

    /// The space that another write is allocating for the cluster, used without waiting.
    fn not_awaited(&self, ticket: Ticket, span: Span) -> Option<Reserved> {
        let open = self.open.get(&ticket.0)?;
        let left = CLUSTER - span.at % CLUSTER;
        // It may precede the range of the other write.
        let at = FileOffset((open.at.0 + span.at.0).checked_sub(open.span.at.0)?);
        Some(Reserved { at, len: span.len.min(left), ticket: None, fill: None })
    }

    fn crowd_metadata(&self, batches: &mut [Vec<MetaWrite>]) {
        for (base, other) in &self.alias {
            let entry = |base: FileOffset| u32::try_from((base - BITMAP_LEN) / SECTOR).unwrap_or(0).to_be_bytes();
            for write in batches.iter_mut().flatten() {
                if write.at == *base - BITMAP_LEN {
                    write.at = *other - BITMAP_LEN;
                }
                for place in write.bytes.chunks_exact_mut(4).filter(|place| **place == entry(*base)) {
                    place.copy_from_slice(&entry(*other));
                }
            }
        }
    }
}

/// The beginning of the block that contains `span`, whose first byte is at `at`.
fn base_of(at: FileOffset, span: Span) -> FileOffset {
    FileOffset(at.0.saturating_sub(span.at % BLOCK_LEN))
}

/// Moves new L2 tables after the L1 entries that refer to them.
fn tables_late(batches: &mut [Vec<MetaWrite>]) {
    let Some((first, later)) = batches.split_first_mut() else { return };
    let (counts, tables) =
        std::mem::take(first).into_iter().partition(|write| [FileOffset(0), cluster::BLOCK_AT].contains(&write.at));
    match later.iter_mut().find(|batch| batch.iter().any(|write| write.at == cluster::L1_AT)) {
        Some(with_l1) => (*first, *with_l1) = (counts, [std::mem::take(with_l1), tables].concat()),
        None => *first = [counts, tables].concat(),
    }
}

/// Moves decreases of refcounts from the end of a round to its first batch.
fn lower_early(batches: &mut Vec<Vec<MetaWrite>>) {
    let is_block = |write: &MetaWrite| write.at == cluster::BLOCK_AT;
    match batches.as_mut_slice() {
        [first, .., last] if last.iter().all(is_block) => {
            first.retain(|write| !is_block(write));
            first.append(last);
        }
        _ => {}
    }
    batches.retain(|batch| !batch.is_empty());
}

/// Moves the header before everything to which it points.
fn header_first(batches: &mut Vec<Vec<MetaWrite>>) {
    let mut header = Vec::new();
    for batch in batches.iter_mut() {
        let (found, rest) = std::mem::take(batch).into_iter().partition(|write| write.at == FileOffset(0));
        (header, *batch) = ([header, found].concat(), rest);
    }
    batches.insert(0, header);
    batches.retain(|batch| !batch.is_empty());
}

impl<F: Format> Format for Saboteur<F> {
    fn geometry(&self) -> Geometry {
        self.inner.geometry()
    }

    fn map(&mut self, span: Span) -> Result<Mapping, Wait> {
        let before_end = self.old_end.map_or(span.len, |end| end.saturating_sub(span.at.0).min(span.len));
        if before_end == 0 {
            return Ok(Mapping::Zero { len: span.len });
        }
        match self.inner.map(Span { len: before_end, ..span })? {
            Mapping::Shared { at, len } if self.has(Planted::SharedOverwritten) => Ok(Mapping::Data { at, len }),
            Mapping::Data { at, len } => Ok(Mapping::Data { at: self.aliased(at), len }),
            other => Ok(other),
        }
    }

    fn reserve(&mut self, span: Span) -> Result<Reserved, Wait> {
        let freed = self.freed_at(span);
        let mut reserved = match self.inner.reserve(span) {
            Err(Wait::Busy(ticket)) if self.has(Planted::CopyNotAwaited) => {
                return self.not_awaited(ticket, span).ok_or(Wait::Busy(ticket));
            }
            Err(Wait::Round) if self.has(Planted::UnprovenPlace) && !self.in_round => {
                self.feign_round();
                self.inner.reserve(span)?
            }
            other => other?,
        };
        if self.depth > 0 && self.has(Planted::LeafGrows) {
            let mut plot = self.plot.borrow_mut();
            if plot.forgotten.iter().any(|forgotten| forgotten.overlaps(span)) {
                plot.regrown.push(Span { len: reserved.len, ..span });
            }
        }
        if self.has(Planted::FillForgotten) {
            reserved.fill = None;
        }
        if let (Some(fill), true) = (&mut reserved.fill, self.has(Planted::UnfilledEnd)) {
            let end = span.at + reserved.len;
            fill.after = fill.after.min(self.inner.geometry().len.saturating_sub(end.0));
        }
        self.discarded.retain(|discarded| !discarded.span.overlaps(span));
        let Some(ticket) = reserved.ticket else {
            return Ok(Reserved { at: self.aliased(reserved.at), ..reserved });
        };
        let base = base_of(reserved.at, span);
        if self.has(Planted::SamePlace) {
            self.crowd(base, span);
        }
        self.leaks.extend(freed);
        self.open.insert(ticket.0, Open { span: Span { len: reserved.len, ..span }, at: reserved.at, base });
        reserved.at = self.aliased(reserved.at);
        if self.has(Planted::EarlyCommit) || self.has(Planted::EntryBeforeData) {
            let placed = self.inner.commit(ticket);
            self.early.insert(ticket.0, placed);
        }
        Ok(reserved)
    }

    fn commit(&mut self, ticket: Ticket) -> Option<Committed> {
        self.open.remove(&ticket.0);
        match self.early.remove(&ticket.0) {
            Some(placed) => placed,
            None => {
                let placed = self.inner.commit(ticket).filter(|_| !self.has(Planted::TargetNotShown))?;
                Some(Committed { at: self.aliased(placed.at), ..placed })
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
        let mut discarded = self.inner.discard(span)?;
        if let (Discarded::Nothing { .. }, true) = (discarded, self.has(Planted::OldZeroesForgotten)) {
            if let Ok(Mapping::Data { .. } | Mapping::Shared { .. }) = self.inner.map(span) {
                discarded = Discarded::Hidden { len: self.inner.forget(span)? };
            }
        }
        if let Discarded::Kept { at, len } = discarded {
            self.discarded.push(Open { span: Span { at: span.at, len }, at, base: base_of(at, span) });
        }
        Ok(discarded)
    }

    fn released(&mut self, at: FileOffset, clean: bool) {
        if let Some(which) = self.deallocated.iter().position(|other| *other == at) {
            self.deallocated.remove(which);
            return;
        }
        self.inner.released(at, clean || self.has(Planted::TrustedRelease));
        if (self.has(Planted::EarlyReuse) || self.has(Planted::ReuseBeforeFlush)) && !self.in_round {
            self.feign_round();
        }
    }

    fn reclaim(&mut self) -> Option<FileRange> {
        let leaked = self.leaks.pop();
        self.deallocated.extend(leaked.map(|range| range.at));
        leaked.or_else(|| self.inner.reclaim())
    }

    fn forget(&mut self, span: Span) -> Result<u64, Wait> {
        let place = self.inner.map(span);
        let len = self.inner.forget(span)?;
        if let (Ok(Mapping::Data { at, len: there }), true) = (place, self.has(Planted::EarlyDeallocation)) {
            self.leaks.push(FileRange { at, len: there.min(len) });
        }
        if self.has(Planted::LeafGrows) {
            self.plot.borrow_mut().forgotten.push(Span { at: span.at, len });
        }
        Ok(len)
    }

    fn grow(&mut self, len: u64) -> Result<(), ImageError> {
        let old_end = self.inner.geometry().len;
        self.inner.grow(len)?;
        if self.has(Planted::EndRemembered) {
            self.old_end.get_or_insert(old_end);
        }
        Ok(())
    }

    fn decompress(&self, bytes: &[u8]) -> Result<Vec<u8>, Corrupt> {
        self.inner.decompress(bytes)
    }

    fn load(&mut self, block: MetaBlock, bytes: &[u8]) -> Result<(), Corrupt> {
        self.inner.load(block, bytes)
    }

    fn drop_caches(&mut self) {
        self.inner.drop_caches();
    }

    fn records(&mut self) -> &mut Records {
        if !self.has(Planted::LoggedAfterAnswer) && !self.has(Planted::LowerLayerLoggedLater) {
            return self.inner.records();
        }
        let [now, later] = &mut self.late;
        if now.is_empty() {
            now.append(later);
        }
        later.append(self.inner.records());
        now
    }

    fn collect_records(&mut self) {
        self.inner.collect_records();
    }

    fn set_stamp(&mut self, stamp: Stamp) -> Option<MetaWrite> {
        self.inner.set_stamp(stamp)
    }

    fn clear_stamp(&mut self) {
        self.inner.clear_stamp();
    }

    fn dirty(&self) -> usize {
        let owed = if self.has(Planted::ForgottenBeforeCopied) { 0 } else { self.owed.len() };
        self.inner.dirty() + owed
    }

    fn seal(&mut self) -> Vec<Vec<MetaWrite>> {
        self.in_round = true;
        if self.has(Planted::LogDroppedEarly) {
            self.plot.borrow_mut().dropped.push(self.file);
        }
        if self.depth == 0 && self.has(Planted::LeafGrows) {
            self.grow_leaf();
        }
        let mut batches =
            if self.has(Planted::ForgottenBeforeCopied) { Vec::new() } else { std::mem::take(&mut self.owed) };
        batches.extend(self.inner.seal());
        let batches = self.spoil(batches);
        self.plot(batches.len());
        batches
    }

    fn settled(&mut self, durable: bool) {
        self.in_round = false;
        self.inner.settled(durable || self.has(Planted::LostRewrite));
    }
}
