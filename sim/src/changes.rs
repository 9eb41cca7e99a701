//! Maps of changed blocks: what each must name, whatever a power loss leaves of it.
//!
//! Blocks are sectors here, so that a disk has many regions. Knows nothing about how a disk writes its map.
//!
//! Invariants checked in each state:
//! - the map opens, unless a fault was injected, of which it may say that changes are missing;
//! - a sector whose content was not legal when the map was started is named;
//! - the map of an interval that has ended with a snapshot names what the snapshot shows;
//! - what is named was touched by a request, or lies in a region in which something was; no more regions count as
//!   changed throughout than may have an intent, and half as many while some give theirs up.

use std::ops::Range;

use disk::changes::{self, ChangeMap, REGION, Spec};
use disk::{DiskOffset, FileId, FileOffset};

use crate::media::{Media, Unwritten};
use crate::oracle::{Legal, Oracle};
use crate::planted::Planted;
use crate::random::Random;
use crate::saboteur::pages;
use crate::sector::{SECTOR, Words, mix};
use crate::violation::Violation;

/// Bytes of a device with a map: those of the largest disk need less.
const DEVICE: u64 = 64 << 10;
/// Sectors of a region.
const SECTORS: u64 = 64;
const _: () = assert!(REGION as u64 == SECTORS);

/// Whether a map is refused by who opens it, although no fault was injected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Refused {
    Never,
    Maybe,
    Always,
}

/// A map, and what it must name.
#[derive(Clone, Debug)]
pub struct Tracked {
    /// Its file.
    pub file: FileId,
    /// The legal contents when the map was started.
    began: Oracle,
    /// What requests have changed, perhaps.
    touched: Vec<Range<u64>>,
    /// Whether it says, or may say, that changes are missing: the disk is about to show what was not recorded.
    refused: Refused,
    /// The sectors that a map must name whose interval has ended.
    ended: Option<Vec<u64>>,
    /// How many regions may have an intent.
    intents: usize,
    digest: u64,
}

impl Tracked {
    /// A map that is started when these contents are legal.
    pub fn new(file: FileId, began: Oracle, intents: usize) -> Tracked {
        let digest = began.after_crash().digest();
        Tracked { file, began, touched: Vec::new(), refused: Refused::Never, ended: None, intents, digest }
    }

    /// The same map in a file with another number.
    pub fn in_file(&self, file: FileId) -> Tracked {
        Tracked { file, ..self.clone() }
    }

    /// A request may change these sectors.
    pub fn touch(&mut self, sectors: Range<u64>) {
        if !sectors.is_empty() && !self.touched.contains(&sectors) {
            self.digest = mix(self.digest ^ mix(sectors.start) ^ sectors.end);
            self.touched.push(sectors);
        }
    }

    /// The disk continues with the remains of it. If some is rubbish, everything may be named.
    pub fn go_on(&mut self, map: &ChangeMap) {
        if map.damaged() > 0 {
            self.touch(0..u64::MAX);
        }
    }

    /// It is being ended: it may be refused.
    pub fn may_be_refused(&mut self) {
        self.refused = Refused::Maybe;
        self.digest = mix(self.digest ^ 1);
    }

    /// It has ended, and the disk may show other contents: it must be refused.
    pub fn must_be_refused(&mut self) {
        self.refused = Refused::Always;
        self.digest = mix(self.digest ^ 2);
    }

    /// Whether it may be refused rightly.
    pub fn is_refused_rightly(&self) -> bool {
        self.refused != Refused::Never
    }

    /// Whether its interval lasts.
    pub fn is_current(&self) -> bool {
        self.ended.is_none()
    }

    /// Its interval ends with a snapshot of these contents.
    pub fn end(&mut self, shown: &[Words]) {
        let legal = self.began.after_crash();
        let changed = (0..).zip(shown).filter(|(sector, words)| legal.check(*sector, **words).is_err());
        self.ended = Some(changed.map(|(sector, _)| sector).collect());
        self.digest = mix(!self.digest);
    }

    /// A digest of what it must name.
    pub fn digest(&self) -> u64 {
        mix(self.digest ^ u64::from(self.file.0))
    }

    /// Checks what a power loss has left of the map, by itself. Returns what it names; `None` if it is rightly refused.
    pub fn check(&self, media: &Media, bug: Option<Planted>, faulty: bool) -> Result<Option<ChangeMap>, Violation> {
        let map = match open(media, bug) {
            Ok(_) if self.refused == Refused::Always => {
                return Err(Violation::Step("a map is believed that ended before other contents were shown".into()));
            }
            Ok(map) => map,
            Err(_) if faulty || self.is_refused_rightly() => return Ok(None),
            Err(error) => return Err(Violation::Map(error)),
        };
        let missed = self.ended.iter().flatten().find(|sector| !names(&map, **sector));
        if let Some(sector) = missed {
            return Err(Violation::Unnamed(*sector));
        }
        let mut sectors = map.extents().flat_map(|span| span.at / SECTOR..span.end() / SECTOR);
        let is_explained = |sector: &u64| {
            let region = sector / SECTORS;
            let near = |range: &&Range<u64>| range.start / SECTORS <= region && region <= (range.end - 1) / SECTORS;
            self.touched.iter().any(|range| near(&range))
        };
        // A batch writes pages with new intents and others without old ones, in any order.
        let intents_max = self.intents + self.intents / 2;
        let too_many = map.suspects() > u64::try_from(intents_max).unwrap_or(u64::MAX);
        let unexplained = sectors.find(|sector| !is_explained(sector) || too_many);
        drop(sectors);
        match unexplained {
            Some(sector) if map.damaged() == 0 => Err(Violation::Overnamed(sector)),
            _ => Ok(Some(map)),
        }
    }

    /// Checks a map that was closed: it names what was touched, and nothing else.
    pub fn check_closed(&self, media: &Media) -> Result<(), Violation> {
        let map = open(media, None).map_err(Violation::Map)?;
        let is_touched = |sector: &u64| self.touched.iter().any(|range| range.contains(sector));
        let mut sectors = map.extents().flat_map(|span| span.at / SECTOR..span.end() / SECTOR);
        match sectors.find(|sector| !is_touched(sector)) {
            Some(sector) => Err(Violation::Overnamed(sector)),
            None if map.suspects() > 0 => Err(Violation::Step("a map that was closed has intents".into())),
            None => Ok(()),
        }
    }

    /// The legal contents when the map was started.
    pub fn began(&self) -> Legal<'_> {
        self.began.after_crash()
    }
}

fn names(map: &ChangeMap, sector: u64) -> bool {
    map.has_changed(DiskOffset(sector * SECTOR))
}

/// A map in use, to be compared with the contents that a power loss has left.
pub struct Names<'a> {
    /// What it names.
    pub map: ChangeMap,
    /// The legal contents when it was started.
    pub began: &'a Legal<'a>,
}

impl Names<'_> {
    /// Whether a sector with this content should be named and is not.
    pub fn misses(&self, sector: u64, words: Words) -> bool {
        !names(&self.map, sector) && self.began.check(sector, words).is_err()
    }
}

/// How many intents the map of a disk may have; one in two disks has none. Few, or more than there are regions.
pub fn intents_at_random(bug: Option<Planted>, random: &mut Random) -> Option<usize> {
    match bug {
        None => (random.below(2) == 0).then(|| [2, 1024][random.index(2)]),
        Some(bug) => bug.is_about_changes().then_some(2),
    }
}

/// The file of a new map.
pub fn create(tail: Unwritten, number: u8, continues: Option<changes::MapId>, len: u64) -> Media {
    let spec = Spec { id: [0xc0 ^ number; 16], continues, len, block: 512 };
    let Ok(creation) = changes::create(&spec) else { unreachable!("a simulated disk is small") };
    let mut media = Media::empty(tail);
    media.set_len(if tail == Unwritten::Stale { DEVICE } else { creation.len });
    for write in creation.writes {
        media.write(FileOffset(write.at.0), &write.bytes);
    }
    media
}

/// Opens a map, as a planted bug does.
pub fn open(media: &Media, bug: Option<Planted>) -> Result<ChangeMap, disk::ImageError> {
    let mut media = media.clone();
    match bug {
        Some(Planted::IntentsIgnored) => pages::without_intents(&mut media),
        Some(Planted::TornPageBelieved) => pages::sound(&mut media),
        _ => {}
    }
    ChangeMap::open(&mut media)
}
