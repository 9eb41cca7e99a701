//! Maps of changed blocks: which blocks of a disk may read otherwise than when the map was started.
//!
//! A map is a file of its own next to an image, whatever the format of that. It names blocks of 64 KiB, each with a
//! bit, in regions of 64 blocks. The promise: **it may name too much, never too little**, after a power loss or a kill
//! as well. This file knows the map and reads it; `disk/tracker.rs` writes it, and has the order of the writes.
//!
//! # What is in a map
//!
//! Besides its bits a region may have an *intent*: it is durable before the first request that changes the region is
//! started, whose bit is then set in memory only. A map that was closed has no intents. Of one that was not, each
//! region with an intent counts as changed throughout.
//!
//! The intents and the bits of a region stand in one sector. So the bits take the place of the intent by one write,
//! which reaches the storage or does not: no crash finds a region with neither. A sector that is not whole, or not of
//! this map, counts as changed throughout: what was never written, or is behind the end of something else on a device,
//! is rubbish and not zero. Only a header that is whole says anything.
//!
//! A map that could not be kept says so in its header (`INVALID`), and is refused.
//!
//! A map is right only if each write to the image was recorded. Its owner finds out whether one was not; the header
//! keeps for him the state of the image's file when the map was closed, and the number of the session, which the image
//! has too.

mod layout;
mod runs;
#[cfg(test)]
mod test;

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use zerocopy::byteorder::little_endian::{I64, U32, U64};
use zerocopy::{FromBytes, IntoBytes};

pub use layout::{HEADERS_AT, PAGES_AT, REGIONS, SECTOR, page_at};

use crate::size::{in_memory, on_disk};
use crate::{Creation, DiskOffset, FileOffset, ImageError, ImageErrorKind, MetaWrite, Source, Span};
use layout::{CLOSED, INVALID, MAGIC, RawHeader, RawPage, SEALED, SECTOR_LEN, VERSION, joined};

/// Bytes of a block, as the backup programs of XenServer and XCP-ng expect it.
pub const BLOCK: u32 = 64 << 10;
/// Blocks of a region: the bits of a word.
pub const REGION: u32 = u64::BITS;
/// The largest write of pages. Few operations, and each of a size that storage takes at once.
const WRITE_MAX: usize = 256 << 10;
/// Regions of a map: 64 TiB in blocks of 64 KiB. More would be memory that no disk process has.
const REGIONS_MAX: u64 = 1 << 24;
/// The sequence of the first header.
const FIRST: u64 = 1;

/// Identifies a map: random bytes that its creator draws.
pub type MapId = [u8; 16];

/// A map to be created.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Spec {
    /// Its id, drawn at random.
    pub id: MapId,
    /// The id of the map of the interval before; `None` for the first of a chain.
    pub continues: Option<MapId>,
    /// Bytes of the disk.
    pub len: u64,
    /// Bytes of a block: [`BLOCK`], or another power of two from 512 on.
    pub block: u32,
}

/// The state of an image's file when its map was closed. Every later write to the file changes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileState {
    /// The time of its last change (ctime), in seconds and nanoseconds.
    pub changed: (i64, u32),
    /// Its bytes.
    pub len: u64,
}

/// A map of changed blocks, in memory.
#[derive(Clone, Debug)]
pub struct ChangeMap {
    spec: Spec,
    sequence: u64,
    flags: u32,
    /// Random bytes, drawn whenever a process opens the map to write it; the id of the map before.
    session: MapId,
    /// The image when the map was closed; `None` if it was not.
    closed: Option<FileState>,
    /// The changed blocks of each region, the first one being the lowest bit.
    changed: Vec<u64>,
    /// Regions that had an intent.
    suspects: u64,
    /// Pages that were not whole.
    damaged: u64,
    /// Pages that say less, or in another way, than `changed`.
    stale: Vec<u32>,
}

/// The file of a new map, in which nothing has changed. It must be durable before the disk tracks its changes in it.
pub fn create(spec: &Spec) -> Result<Creation, ImageError> {
    let map = ChangeMap::new(*spec)?;
    let pages = 0..page_count(map.changed.len());
    let mut writes = map.writes(pages, |_| false);
    let at = FileOffset(writes.last().map_or(0, |last| last.at.0 + on_disk(last.bytes.len())));
    let headers = HEADERS_AT.into_iter().map(|at| MetaWrite { at, bytes: map.header(FIRST, 0, map.spec.len) });
    writes.extend(headers);
    Ok(Creation { len: at.0, writes })
}

impl ChangeMap {
    /// An empty map.
    fn new(spec: Spec) -> Result<ChangeMap, ImageError> {
        let limits = |what: String| ImageError::new(ImageErrorKind::OutOfLimits, what);
        if !spec.block.is_power_of_two() || !(512..=1 << 30).contains(&spec.block) {
            let what =
                format!("a map with blocks of {} bytes is not possible: use a power of two from 512 on", spec.block);
            return Err(limits(what));
        }
        let regions = spec.len.div_ceil(u64::from(spec.block) * u64::from(REGION));
        if spec.len == 0 || regions > REGIONS_MAX {
            let what = format!("a disk of {} bytes cannot have a map with blocks of {}", spec.len, spec.block);
            return Err(limits(what));
        }
        let changed = vec![0; in_memory(regions)];
        Ok(ChangeMap {
            spec,
            sequence: FIRST,
            flags: 0,
            session: spec.id,
            closed: None,
            changed,
            suspects: 0,
            damaged: 0,
            stale: Vec::new(),
        })
    }

    /// Reads a map. Refuses another file, another version, and a map that misses changes.
    pub fn open(source: &mut dyn Source) -> Result<ChangeMap, ImageError> {
        let header = newest_header(source)?;
        let (spec, flags) = (spec_of(&header), header.flags.get());
        if flags & INVALID != 0 {
            let what = "the map of changed blocks misses changes, because it could not be written: remove it, make a \
                        full backup, and start a new one";
            return Err(ImageError::new(ImageErrorKind::Corrupt, what));
        }
        if flags & !(SEALED | INVALID | CLOSED) != 0 {
            let what = format!("the map of changed blocks has flags that are not known: {flags:#x}");
            return Err(ImageError::new(ImageErrorKind::Unsupported, what));
        }
        // Before memory is taken for it: the file must have all pages.
        let regions = spec.len.div_ceil(u64::from(spec.block).max(1) * u64::from(REGION));
        let needs = PAGES_AT.saturating_add(regions.div_ceil(on_disk(REGIONS)).saturating_mul(SECTOR));
        if source.len() < needs.0 {
            let what = format!("a map of changed blocks needs {needs} bytes, and its file has {}", source.len());
            return Err(ImageError::new(ImageErrorKind::Corrupt, what));
        }
        let changed = (header.changed_s.get(), header.changed_ns.get());
        let closed = (flags & CLOSED != 0).then(|| FileState { changed, len: header.file_len.get() });
        let (sequence, session, flags) = (header.sequence.get(), header.session, flags & !CLOSED);
        let mut map = ChangeMap { sequence, flags, session, closed, ..ChangeMap::new(spec)? };
        map.read_pages(source)?;
        Ok(map)
    }

    fn read_pages(&mut self, source: &mut dyn Source) -> Result<(), ImageError> {
        let mut bytes = vec![0; WRITE_MAX];
        let all = page_count(self.changed.len());
        let per_read = u32::try_from(WRITE_MAX / SECTOR_LEN).unwrap_or(1);
        for first in (0..all).step_by(in_memory(per_read.into())) {
            let pages = first..all.min(first.saturating_add(per_read));
            let len = pages.len() * SECTOR_LEN;
            let Some(bytes) = bytes.get_mut(..len) else { unreachable!("more pages than fit are read at once") };
            source.read_at(page_at(first), bytes).map_err(|fault| {
                let what = format!("the map of changed blocks cannot be read: {fault}");
                ImageError::at(ImageErrorKind::Storage, page_at(first), what)
            })?;
            pages.zip(bytes.chunks_exact(SECTOR_LEN)).for_each(|(page, bytes)| self.take_page(page, bytes));
        }
        Ok(())
    }

    fn take_page(&mut self, number: u32, bytes: &[u8]) {
        let page = RawPage::read_from_bytes(bytes).ok().filter(|page| page.is_sound(self.spec.id, number));
        self.damaged += u64::from(page.is_none());
        let regions = self.regions_of(number);
        if page.is_none_or(|page| page.intents.get() != 0) {
            self.stale.push(number);
        }
        for (nth, region) in regions.enumerate() {
            let word = match &page {
                None => u64::MAX,
                Some(page) if page.intents.get() >> nth & 1 == 1 => {
                    self.suspects += 1;
                    u64::MAX
                }
                Some(page) => page.changed.get(nth).map_or(u64::MAX, |word| word.get()),
            };
            let whole = self.whole(region);
            if let Some(changed) = self.changed.get_mut(region) {
                *changed = word & whole;
            }
        }
    }

    /// The random id of this map.
    pub fn id(&self) -> MapId {
        self.spec.id
    }

    /// The id of the map of the interval before, if there is one.
    pub fn continues(&self) -> Option<MapId> {
        self.spec.continues
    }

    /// Bytes of the disk.
    pub fn len(&self) -> u64 {
        self.spec.len
    }

    /// Whether no block has changed.
    pub fn is_empty(&self) -> bool {
        self.changed.iter().all(|word| *word == 0)
    }

    /// Bytes of a block.
    pub fn block(&self) -> u32 {
        self.spec.block
    }

    /// Whether its interval is over: a snapshot was taken, and nothing is added.
    pub fn is_sealed(&self) -> bool {
        self.flags & SEALED != 0
    }

    /// The session of the last process that has opened it for writing.
    pub fn session(&self) -> MapId {
        self.session
    }

    /// The state of the image's file when the map was closed; `None` if it is in use, or its process was killed.
    pub fn closed(&self) -> Option<FileState> {
        self.closed
    }

    /// The header by which a process takes the map up: to be durable before the image is written to.
    pub fn opened(&mut self, session: MapId) -> MetaWrite {
        (self.session, self.closed) = (session, None);
        self.next_header(false, self.spec.len)
    }

    /// The headers by which a new map gets its session, and stays new. Until they are durable it has the session with
    /// which it was created, or either of the two.
    pub fn begin_session(&mut self, session: MapId) -> Vec<MetaWrite> {
        self.session = session;
        let header = |at| MetaWrite { at, bytes: self.header(self.sequence, self.flags, self.spec.len) };
        HEADERS_AT.map(header).into()
    }

    /// The header that closes the map: all pages must be durable, and nothing may be written to the image any more.
    pub fn close(&mut self, image: FileState) -> MetaWrite {
        self.closed = Some(image);
        self.next_header(false, self.spec.len)
    }

    /// The header that ends the interval of a closed map: nothing is added from then on.
    pub fn sealed(&mut self) -> MetaWrite {
        self.next_header(true, self.spec.len)
    }

    /// Headers that say that changes are missing: the map is refused from then on. One of them, durable, suffices.
    pub fn invalidate(&mut self) -> Vec<MetaWrite> {
        self.invalid_headers()
    }

    /// Bytes of the blocks that may have changed.
    pub fn changed_bytes(&self) -> u64 {
        self.changed.iter().map(|word| u64::from(word.count_ones())).sum::<u64>() * u64::from(self.spec.block)
    }

    /// Whether nothing was ever recorded in it.
    pub fn is_new(&self) -> bool {
        self.sequence == FIRST && self.is_empty() && self.stale.is_empty()
    }

    /// Regions that count as changed throughout because the map was not closed.
    pub fn suspects(&self) -> u64 {
        self.suspects
    }

    /// Pages that count as changed throughout because they are not whole.
    pub fn damaged(&self) -> u64 {
        self.damaged
    }

    /// Whether the block of this byte may have changed.
    pub fn has_changed(&self, at: DiskOffset) -> bool {
        let block = at / u64::from(self.spec.block);
        let word = self.changed.get(in_memory(block / u64::from(REGION)));
        word.is_some_and(|word| word >> (block % u64::from(REGION)) & 1 == 1)
    }

    /// The bytes that may have changed, in order; whole blocks, except at the end of the disk.
    pub fn extents(&self) -> impl Iterator<Item = Span> + '_ {
        let (block, end) = (u64::from(self.spec.block), self.spec.len.div_ceil(u64::from(self.spec.block)));
        let mut at = 0;
        std::iter::from_fn(move || {
            let first = self.next_block(at, true).filter(|first| *first < end)?;
            let behind = self.next_block(first, false).unwrap_or(end).min(end);
            at = behind;
            let len = (behind * block).min(self.spec.len) - first * block;
            Some(Span { at: DiskOffset(first * block), len })
        })
    }

    /// The first block from `block` on that has changed, or has not.
    fn next_block(&self, block: u64, changed: bool) -> Option<u64> {
        let (first, bit) = (in_memory(block / u64::from(REGION)), block % u64::from(REGION));
        let words = self.changed.iter().enumerate().skip(first);
        words.map(|(region, word)| (on_disk(region), if changed { *word } else { !*word })).find_map(
            |(region, word)| {
                let word = if region == on_disk(first) { word & u64::MAX << bit } else { word };
                (word != 0).then(|| region * u64::from(REGION) + u64::from(word.trailing_zeros()))
            },
        )
    }

    /// The blocks that any of these maps names. They are of successive intervals, the oldest first, so that the result
    /// names what differs between the beginning of the first and the end of the last. Refused if one does not continue
    /// the one before it, or has other blocks: it is of another disk, or an interval is missing.
    pub fn union(maps: impl IntoIterator<Item = ChangeMap>) -> Result<ChangeMap, ImageError> {
        let mut maps = maps.into_iter();
        let Some(mut all) = maps.next() else {
            return Err(ImageError::new(ImageErrorKind::OutOfLimits, "there is no map of changed blocks"));
        };
        for next in maps {
            next.must_continue(&all)?;
            let mut next = next;
            let spec = next.spec;
            let words = next.changed.iter_mut().zip(&all.changed).enumerate();
            words.for_each(|(region, (word, earlier))| *word |= earlier & whole(&spec, region));
            next.suspects += all.suspects;
            next.damaged += all.damaged;
            all = next;
        }
        Ok(all)
    }

    /// The bytes of a file with this map, which names the same blocks: for another process.
    pub fn contents(&self) -> Vec<MetaWrite> {
        let mut writes = self.writes(0..page_count(self.changed.len()), |_| false);
        let [at, _] = HEADERS_AT;
        writes.push(MetaWrite { at, bytes: self.header(self.sequence, self.flags, self.spec.len) });
        writes
    }

    /// The bits as `VDI.list_changed_blocks` of XenAPI has them: base64 of a byte for each eight blocks, the first one
    /// being its highest bit.
    pub fn to_xapi(&self) -> String {
        let blocks = self.spec.len.div_ceil(u64::from(self.spec.block));
        let mut bytes: Vec<u8> =
            self.changed.iter().flat_map(|word| word.to_le_bytes()).map(u8::reverse_bits).collect();
        bytes.truncate(in_memory(blocks.div_ceil(8)));
        BASE64_STANDARD.encode(&bytes)
    }
}

/// What the disk that writes the map needs of it.
impl ChangeMap {
    /// All bits of a region that lie in the disk.
    #[inline]
    pub(crate) fn whole(&self, region: usize) -> u64 {
        whole(&self.spec, region)
    }

    /// The changed blocks of each region.
    #[inline(always)]
    pub(crate) fn words(&mut self) -> &mut [u64] {
        &mut self.changed
    }

    /// The changed blocks of a region.
    pub(crate) fn word(&self, region: usize) -> u64 {
        self.changed.get(region).copied().unwrap_or(u64::MAX)
    }

    /// Takes the numbers of the pages that do not say what this map does.
    pub(crate) fn take_stale(&mut self) -> Vec<u32> {
        std::mem::take(&mut self.stale)
    }

    /// Makes room for a disk of `len` bytes, of which the header says nothing yet. Returns the pages to be written.
    pub(crate) fn make_room(&mut self, len: u64) -> Result<std::ops::Range<u32>, ImageError> {
        let larger = ChangeMap::new(Spec { len, ..self.spec })?;
        let first = page_count(self.changed.len()).saturating_sub(1);
        self.changed.resize(larger.changed.len().max(self.changed.len()), 0);
        Ok(first..page_count(self.changed.len()))
    }

    /// The header says that the disk has this size.
    pub(crate) fn set_len(&mut self, len: u64) {
        self.spec.len = len;
    }

    /// The writes of these pages, which are in order. `has_intent` tells which regions have an intent.
    pub(crate) fn writes(
        &self,
        pages: impl IntoIterator<Item = u32>,
        has_intent: impl Fn(usize) -> bool,
    ) -> Vec<MetaWrite> {
        let page = |number: u32| {
            let mut page = RawPage {
                checksum: U32::ZERO,
                number: U32::new(number),
                id: self.spec.id,
                intents: U64::ZERO,
                changed: [U64::ZERO; REGIONS],
            };
            for (nth, (region, word)) in self.regions_of(number).zip(&mut page.changed).enumerate() {
                *word = U64::new(self.word(region));
                page.intents |= U64::new(u64::from(has_intent(region)) << nth);
            }
            MetaWrite { at: page_at(number), bytes: page.summed().as_bytes().to_vec() }
        };
        joined(pages.into_iter().map(page), WRITE_MAX)
    }

    /// The next header, and where it goes. `sealed`: nothing will be added.
    pub(crate) fn next_header(&mut self, sealed: bool, len: u64) -> MetaWrite {
        self.sequence += 1;
        self.flags |= if sealed { SEALED } else { 0 };
        MetaWrite { at: header_at(self.sequence), bytes: self.header(self.sequence, self.flags, len) }
    }

    /// Headers that say that changes are missing. One of them, durable, suffices.
    pub(crate) fn invalid_headers(&mut self) -> Vec<MetaWrite> {
        self.flags |= INVALID;
        self.closed = None;
        let mut header = || self.next_header(false, self.spec.len);
        vec![header(), header()]
    }

    fn header(&self, sequence: u64, flags: u32, len: u64) -> Vec<u8> {
        let header = RawHeader {
            magic: MAGIC,
            version: U32::new(VERSION),
            checksum: U32::ZERO,
            sequence: U64::new(sequence),
            id: self.spec.id,
            continues: self.spec.continues.unwrap_or_default(),
            len: U64::new(len),
            block: U32::new(self.spec.block),
            flags: U32::new(flags | if self.closed.is_some() { CLOSED } else { 0 }),
            session: self.session,
            changed_s: I64::new(self.closed.map_or(0, |image| image.changed.0)),
            changed_ns: U32::new(self.closed.map_or(0, |image| image.changed.1)),
            unused: U32::ZERO,
            file_len: U64::new(self.closed.map_or(0, |image| image.len)),
            reserved: [0; 400],
        };
        header.summed().as_bytes().to_vec()
    }

    /// The regions of a page.
    fn regions_of(&self, page: u32) -> std::ops::Range<usize> {
        let first = in_memory(page.into()) * REGIONS;
        first..(first + REGIONS).min(self.changed.len())
    }
}

/// The page of a region.
pub(crate) fn page_of(region: usize) -> u32 {
    u32::try_from(region / REGIONS).unwrap_or(u32::MAX)
}

fn page_count(regions: usize) -> u32 {
    u32::try_from(regions.div_ceil(REGIONS)).unwrap_or(u32::MAX)
}

fn header_at(sequence: u64) -> FileOffset {
    let [even, odd] = HEADERS_AT;
    if sequence % 2 == 0 { even } else { odd }
}

fn whole(spec: &Spec, region: usize) -> u64 {
    let before = on_disk(region).saturating_mul(u64::from(REGION));
    let blocks = spec.len.div_ceil(u64::from(spec.block)).saturating_sub(before);
    if blocks >= u64::from(REGION) { u64::MAX } else { (1 << blocks) - 1 }
}

fn spec_of(header: &RawHeader) -> Spec {
    let continues = (header.continues != [0; 16]).then_some(header.continues);
    Spec { id: header.id, continues, len: header.len.get(), block: header.block.get() }
}

/// The header that counts.
fn newest_header(source: &mut dyn Source) -> Result<RawHeader, ImageError> {
    let mut newest: Option<RawHeader> = None;
    let mut other_version = None;
    for at in HEADERS_AT {
        let mut bytes = [0; SECTOR_LEN];
        match source.read_at(at, &mut bytes) {
            Ok(()) => {}
            Err(crate::ReadFault::PastEnd(_)) => continue,
            Err(fault) => {
                let what = format!("the map of changed blocks cannot be read: {fault}");
                return Err(ImageError::at(ImageErrorKind::Storage, at, what));
            }
        }
        let Ok(header) = RawHeader::read_from_bytes(&bytes) else { continue };
        if header.magic != MAGIC {
            continue;
        }
        if header.version.get() != VERSION {
            other_version = Some(header.version.get());
        } else if header.is_sound() && newest.is_none_or(|newest| newest.sequence.get() < header.sequence.get()) {
            newest = Some(header);
        }
    }
    match (other_version, newest) {
        (Some(version), _) => {
            let what = format!("the map of changed blocks is of version {version}, and this program knows {VERSION}");
            Err(ImageError::new(ImageErrorKind::Unsupported, what))
        }
        (None, Some(header)) => Ok(header),
        (None, None) => Err(ImageError::new(ImageErrorKind::WrongFormat, "the file is no map of changed blocks")),
    }
}

fn hex(id: MapId) -> String {
    id.iter().map(|byte| format!("{byte:02x}")).collect()
}
