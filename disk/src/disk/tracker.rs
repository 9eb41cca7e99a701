//! The map of changed blocks of a disk: which requests may start, and what is written to the map before they do.
//!
//! Knows nothing of requests but their spans, nothing of how something is written, nor of the other files of the disk.
//! Keeps: each region that a request changes has a durable intent, or durable bits for all its blocks, before the
//! request is started (`crate::changes` says what these are). So after a crash the map names too much at most.
//!
//! # Steps
//!
//! 1. A request whose regions all *pass* sets its bits in memory and starts. Others wait, and their regions are wanted.
//! 2. A batch begins: pages are written in which the wanted regions have an intent. There is a limit of intents: the
//!    oldest give theirs up in the same batch. From here on they do not pass. Their bits are in the page, those of
//!    requests in flight as well, since these were set before the request was started. *Crash:* each page is as before
//!    or as after; either names what has changed. Nothing was started yet in a wanted region.
//! 3. The batch is synced. The wanted regions pass, and what waited starts. What was wanted meanwhile is the next
//!    batch.
//!
//! A region whose blocks are all named passes without an intent, once its page is durable: so does one that a request
//! covers whole, however long that is.
//!
//! To *close* the map, a batch gives up all intents. To *seal* it, a header is written behind that which says that no
//! change will be added. To *extend* it, the new pages are written and synced, then a header with the new size; only
//! then may the disk grow. A map *at rest* has given up all intents: it names exactly what was requested, and the next
//! process continues it without suspects.
//!
//! If a batch fails, the guest must not notice. Whether its intents are durable is not known: requests keep waiting
//! until a header says that the map misses changes, durably. If that fails as well, they wait until the owner of the
//! disk has taken the map away: a process that opens it later would believe it ([`MapState::Doubtful`]). A map that
//! cannot be closed stays as it is, with intents.

use std::collections::{BTreeSet, VecDeque};

use crate::changes::{ChangeMap, REGION, page_of};
use crate::size::{in_memory, on_disk};
use crate::{FileId, ImageError, MetaWrite, Span};

/// Requests to the region start.
const PASSES: u8 = 1;
/// One has, since the region was last considered for giving up its intent.
const USED: u8 = 2;
/// The region has an intent, or gets one with the batch under way.
const INTENT: u8 = 4;
/// It is wanted, or part of the batch under way.
const WANTED: u8 = 8;
/// All its blocks are to be named.
const WHOLE: u8 = 16;

/// Whether the map of a disk can be relied on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MapState {
    /// It names each block that has changed.
    Kept,
    /// It could not be written, and says so: a process that opens it refuses it. The disk does not track its changes
    /// any more.
    Invalid,
    /// It could not be written, nor could that be written into it. Requests to regions without an intent wait until its
    /// owner has taken it away, durably, and calls [`Disk::abandon_map`](super::Disk::abandon_map).
    Doubtful,
}

/// What is to be done next to the file of a map.
#[derive(Debug)]
pub(super) enum MapStep {
    /// These writes, in any order.
    Write(Vec<MetaWrite>),
    /// A sync.
    Sync,
    /// Nothing; or what is under way must end first.
    Nothing,
}

/// What is under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Idle,
    Pages,
    SyncOfPages,
    Header,
    SyncOfHeader,
    /// That changes are missing.
    Invalidity,
    SyncOfInvalidity,
    /// Nothing more is written: it is closed or invalid, or neither could be written.
    Over,
}

/// How the map is to end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ending {
    Closed,
    Sealed,
}

/// A map that is written.
#[derive(Debug)]
pub(super) struct Tracker {
    file: FileId,
    map: ChangeMap,
    /// Flags of each region.
    regions: Vec<u8>,
    /// Of a block and of a region, as powers of two.
    block_shift: u32,
    region_shift: u32,
    /// How many regions may have an intent.
    intents_max: usize,
    /// Regions that requests wait for, in the order in which they were wanted.
    wanted: VecDeque<u32>,
    /// Those of the batch under way.
    granting: Vec<u32>,
    /// Those with a durable intent, the oldest first.
    granted: VecDeque<u32>,
    /// Pages of the next batch.
    stale: BTreeSet<u32>,
    stage: Stage,
    /// Writes of the stage under way; and of those that have ended, whether one has failed, and whether one has not.
    left: usize,
    failed: bool,
    landed: bool,
    /// The size that the map is being extended to.
    len: Option<u64>,
    ending: Option<Ending>,
    /// All intents are being given up, until a request wants one again.
    resting: bool,
    /// The disk is about to show what was not recorded: the map is to say that changes are missing.
    unwanted: bool,
    state: MapState,
}

impl Tracker {
    /// Continues `map`, which is in `file`, with at most `intents_max` intents.
    pub fn new(file: FileId, mut map: ChangeMap, intents_max: usize) -> Tracker {
        let block_shift = map.block().trailing_zeros();
        let stale = map.take_stale().into_iter().collect();
        let regions = vec![0; map.words().len()];
        Tracker {
            file,
            map,
            regions,
            block_shift,
            region_shift: block_shift + REGION.trailing_zeros(),
            // A request may need two at once: where it begins and where it ends.
            intents_max: intents_max.max(2),
            wanted: VecDeque::new(),
            granting: Vec::new(),
            granted: VecDeque::new(),
            stale,
            stage: Stage::Idle,
            left: 0,
            failed: false,
            landed: false,
            len: None,
            ending: None,
            resting: false,
            unwanted: false,
            state: MapState::Kept,
        }
    }

    /// The file of the map.
    pub fn file(&self) -> FileId {
        self.file
    }

    /// The map as it is in memory.
    pub fn map(&self) -> &ChangeMap {
        &self.map
    }

    /// Whether it can be relied on.
    pub fn state(&self) -> MapState {
        self.state
    }

    /// Whether nothing is under way or to be written but intents, of which there may always be a next one.
    pub fn is_settled(&self) -> bool {
        let is_due = self.len.is_some() || self.ending.is_some() || self.unwanted;
        self.is_over() || !is_due && !matches!(self.stage, Stage::Invalidity | Stage::SyncOfInvalidity)
    }

    /// Whether nothing is under way.
    pub fn is_idle(&self) -> bool {
        matches!(self.stage, Stage::Idle | Stage::Over)
    }

    /// Whether no region has an intent, and nothing is to be written.
    pub fn is_at_rest(&self) -> bool {
        self.is_over() || self.is_idle() && self.is_settled() && self.granted.is_empty() && self.stale.is_empty()
    }

    /// Whether nothing will be written any more.
    pub fn is_over(&self) -> bool {
        self.stage == Stage::Over
    }

    /// Whether a request that changes `span` may start; its blocks are named then. If not, what it waits for is wanted.
    #[inline(always)]
    pub fn admits(&mut self, span: Span) -> bool {
        let last = span.at.0.wrapping_add(span.len).wrapping_sub(1);
        let region = span.at.0 >> self.region_shift;
        if region == last >> self.region_shift {
            let at = in_memory(region);
            if let (Some(flags), Some(word)) = (self.regions.get_mut(at), self.map.words().get_mut(at)) {
                if *flags & PASSES != 0 {
                    *flags |= USED;
                    *word |= bits(span.at.0 >> self.block_shift, last >> self.block_shift);
                    return true;
                }
            }
        }
        self.admits_slowly(span)
    }

    #[cold]
    #[inline(never)]
    fn admits_slowly(&mut self, span: Span) -> bool {
        if span.len == 0 {
            return true;
        }
        let (first, last) = (span.at.0 >> self.block_shift, (span.end().0 - 1) >> self.block_shift);
        let of_blocks = u64::from(REGION);
        let regions = first / of_blocks..=last / of_blocks;
        if in_memory(*regions.end()) >= self.regions.len() {
            // The disk has grown and its map has not: a map that misses changes must not be trusted.
            self.wanted.clear();
            self.failed = true;
            return false;
        }
        // The blocks of a region that the request changes.
        let changed = |region: u64| {
            let begin = region * of_blocks;
            bits(first.max(begin), last.min(begin + of_blocks - 1))
        };
        let mut passes = true;
        for region in regions.clone() {
            passes &= self.passes_or_is_wanted(in_memory(region), changed(region));
        }
        if passes {
            for region in regions {
                let at = in_memory(region);
                if let (Some(flags), Some(word)) = (self.regions.get_mut(at), self.map.words().get_mut(at)) {
                    *flags |= USED;
                    *word |= changed(region);
                }
            }
        }
        passes
    }

    fn passes_or_is_wanted(&mut self, region: usize, changed: u64) -> bool {
        let whole = self.map.whole(region);
        let (Some(flags), Some(word)) = (self.regions.get_mut(region), self.map.words().get_mut(region)) else {
            return false;
        };
        if *flags & PASSES != 0 {
            return true;
        }
        let is_begun = *flags & INTENT != 0;
        if !is_begun && (*word | changed) & whole == whole {
            *word |= whole;
            *flags |= WHOLE;
        }
        if *flags & WANTED == 0 {
            *flags |= WANTED;
            self.resting = false;
            self.wanted.push_back(number(region));
        }
        false
    }

    /// Extends the map for a disk of `len` bytes.
    pub fn extend(&mut self, len: u64) -> Result<(), ImageError> {
        if len <= self.map.len() {
            return Ok(());
        }
        self.stale.extend(self.map.make_room(len)?);
        self.regions.resize(self.map.words().len(), 0);
        self.len = Some(len);
        Ok(())
    }

    /// Ends the map when what is under way has ended: no request changes the disk any more, or the map of the next
    /// interval has their changes. `sealed`: for good.
    pub fn end(&mut self, sealed: bool) {
        self.wanted.clear();
        self.ending = Some(if sealed { Ending::Sealed } else { Ending::Closed });
    }

    /// Gives up all intents. What is in flight is named by bits.
    pub fn rest(&mut self) {
        self.resting = true;
    }

    /// Has the map say that changes are missing, when what is under way has ended.
    pub fn invalidate(&mut self) {
        self.wanted.clear();
        self.unwanted = true;
    }

    /// The next step, if none is under way.
    pub fn begin(&mut self) -> MapStep {
        if self.stage != Stage::Idle {
            return MapStep::Nothing;
        }
        if self.failed || self.unwanted {
            return self.give_up();
        }
        self.grant();
        let kept = if self.ending.is_some() || self.resting { 0 } else { self.intents_max };
        while self.granted.len() + self.new_intents() > kept && self.retire() {}
        let pages = std::mem::take(&mut self.stale);
        if !pages.is_empty() {
            let regions = &self.regions;
            let has_intent = |region: usize| regions.get(region).is_some_and(|flags| flags & INTENT != 0);
            let writes = self.map.writes(pages, has_intent);
            return self.write(Stage::Pages, writes);
        }
        self.finish()
    }

    /// Takes wanted regions into the next batch: half of those that may have an intent, so that a request that needs
    /// two gets the second before the first is given up.
    fn grant(&mut self) {
        let mut intents = 0;
        while let Some(&region) = self.wanted.front() {
            let Some(flags) = self.regions.get_mut(in_memory(region.into())) else { break };
            if *flags & WHOLE == 0 {
                if intents == self.intents_max / 2 {
                    break;
                }
                intents += 1;
                *flags |= INTENT;
            }
            self.wanted.pop_front();
            self.granting.push(region);
            self.stale.insert(page_of(in_memory(region.into())));
        }
    }

    /// How many regions get an intent with the next batch.
    fn new_intents(&self) -> usize {
        let flags = |region: &&u32| self.regions.get(in_memory(u64::from(**region)));
        self.granting.iter().filter(|region| flags(region).is_some_and(|flags| flags & INTENT != 0)).count()
    }

    /// Gives up the oldest intent that was not used lately. Returns whether there was one.
    fn retire(&mut self) -> bool {
        for _ in 0..=self.granted.len() {
            let Some(region) = self.granted.pop_front() else { return false };
            let at = in_memory(region.into());
            let named = self.map.word(at) == self.map.whole(at);
            let Some(flags) = self.regions.get_mut(at) else { continue };
            if *flags & USED != 0 && self.ending.is_none() && !self.resting {
                *flags &= !USED;
                self.granted.push_back(region);
                continue;
            }
            *flags &= !(PASSES | USED | INTENT);
            self.stale.insert(page_of(at));
            if named {
                *flags |= WHOLE | WANTED;
                self.granting.push(region);
            }
            return true;
        }
        // All were used.
        !self.granted.is_empty() && self.retire()
    }

    /// A write of the map has ended.
    pub fn written(&mut self, ok: bool) -> MapStep {
        self.left -= 1;
        self.failed |= !ok;
        self.landed |= ok;
        if self.left > 0 {
            return MapStep::Nothing;
        }
        match self.stage {
            Stage::Pages if !self.failed => self.sync(Stage::SyncOfPages),
            Stage::Header if !self.failed => self.sync(Stage::SyncOfHeader),
            Stage::Invalidity if self.landed => self.sync(Stage::SyncOfInvalidity),
            Stage::Invalidity => self.over(MapState::Doubtful),
            _ => self.give_up(),
        }
    }

    /// A sync of the map has ended.
    pub fn synced(&mut self, ok: bool) -> MapStep {
        match self.stage {
            Stage::SyncOfInvalidity => self.over(if ok { MapState::Invalid } else { MapState::Doubtful }),
            _ if !ok => self.give_up(),
            Stage::SyncOfPages => {
                self.pass_granted();
                self.stage = Stage::Idle;
                self.finish()
            }
            _ => {
                if let Some(len) = self.len.take() {
                    self.extended(len);
                }
                self.stage = Stage::Idle;
                if self.ending.is_some() { self.over(self.state) } else { MapStep::Nothing }
            }
        }
    }

    fn extended(&mut self, len: u64) {
        let last = in_memory((self.map.len() - 1) >> self.region_shift);
        self.map.set_len(len);
        // It may have more blocks now, which are not named.
        if let Some(flags) = self.regions.get_mut(last).filter(|flags| **flags & INTENT == 0) {
            *flags &= !(PASSES | WHOLE);
        }
    }

    fn pass_granted(&mut self) {
        for region in std::mem::take(&mut self.granting) {
            let Some(flags) = self.regions.get_mut(in_memory(region.into())) else { continue };
            *flags = *flags & !WANTED | PASSES;
            if *flags & INTENT != 0 {
                self.granted.push_back(region);
            }
        }
    }

    /// Writes the header that is due when all pages are durable, if one is.
    fn finish(&mut self) -> MapStep {
        if !self.stale.is_empty() || self.ending.is_some() && !self.granted.is_empty() {
            return MapStep::Nothing;
        }
        match (self.ending, self.len) {
            (Some(Ending::Closed), None) => self.over(self.state),
            (None, None) => MapStep::Nothing,
            (ending, len) => {
                let header = self.map.next_header(ending == Some(Ending::Sealed), len.unwrap_or(self.map.len()));
                self.write(Stage::Header, vec![header])
            }
        }
    }

    /// Something could not be written.
    fn give_up(&mut self) -> MapStep {
        if self.ending.is_some() {
            // The intents that are in the file name what the bits do not.
            return self.over(self.state);
        }
        let headers = self.map.invalid_headers();
        self.write(Stage::Invalidity, headers)
    }

    fn write(&mut self, stage: Stage, writes: Vec<MetaWrite>) -> MapStep {
        (self.stage, self.left, self.failed, self.landed) = (stage, writes.len(), false, false);
        MapStep::Write(writes)
    }

    fn sync(&mut self, stage: Stage) -> MapStep {
        self.stage = stage;
        MapStep::Sync
    }

    fn over(&mut self, state: MapState) -> MapStep {
        (self.stage, self.state) = (Stage::Over, state);
        MapStep::Nothing
    }
}

/// The bits of the blocks from `first` to `last` in the word of their region.
#[inline(always)]
fn bits(first: u64, last: u64) -> u64 {
    let end = u64::from(REGION) - 1;
    (u64::MAX << (first & end)) & (u64::MAX >> (end - (last & end)))
}

fn number(region: usize) -> u32 {
    u32::try_from(on_disk(region)).unwrap_or(u32::MAX)
}
