//! A format for tests: clusters that are all here or all elsewhere, some of them compressed, and a cache of its table
//! that is too small.

use std::collections::{HashMap, HashSet, VecDeque};

use super::*;
use crate::{Committed, Corrupt, Discarded, DiskOffset, FileOffset, FileRange, Fill, Records, Reserved, Stamp};

/// Small, so that requests meet in one cluster.
pub const CLUSTER: u64 = 4096;
/// Clusters whose places are loaded at once.
const SLICE: u64 = 64;
/// The table's place in the file: never read or written otherwise.
const TABLE_LEN: u64 = 64 << 10;
/// What a compressed cluster begins with.
pub const MARK: u8 = 0xc5;

/// Where a cluster is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Entry {
    Parent,
    Zero,
    Data(u64),
    /// Compressed, beginning at this byte.
    Compressed(u64),
}

/// A reservation of clusters in a row, at places in a row.
#[derive(Debug)]
struct Pending {
    first: u64,
    count: u64,
    place: u64,
}

#[derive(Debug)]
pub struct Clusters {
    pub len: u64,
    pub read_only: bool,
    pub table: Vec<Entry>,
    /// Never any.
    records: Records,
    pending: HashMap<u64, Pending>,
    last_ticket: u64,
    /// Slices of the table that are known, the latest last.
    known: VecDeque<u64>,
    pub known_max: usize,
    next: u64,
    free: Vec<u64>,
    /// Freed, and freed before the round that is under way.
    limbo: Vec<u64>,
    sealed: Vec<u64>,
    changed: usize,
    /// Places that were forgotten, and that were before the round that is under way; and what may be reclaimed.
    forgotten: Vec<u64>,
    sealed_forgotten: Vec<u64>,
    leaked: VecDeque<u64>,
    /// What a power loss leaves of the table, and what the round under way will make of it.
    pub durable: Vec<Entry>,
    sealed_table: Vec<Entry>,
    /// How often something was hidden, at the price of an entry in the table.
    pub hidden: usize,
    /// There is no room for another cluster.
    pub at_limit: bool,
    pub unpacked: std::cell::Cell<usize>,
}

impl Clusters {
    pub fn new(len: u64) -> Clusters {
        Clusters {
            len,
            read_only: false,
            table: vec![Entry::Parent; len.div_ceil(CLUSTER) as usize],
            records: Records::default(),
            pending: HashMap::new(),
            last_ticket: 0,
            known: VecDeque::new(),
            known_max: 64,
            next: TABLE_LEN,
            free: Vec::new(),
            limbo: Vec::new(),
            sealed: Vec::new(),
            changed: 0,
            forgotten: Vec::new(),
            sealed_forgotten: Vec::new(),
            leaked: VecDeque::new(),
            durable: vec![Entry::Parent; len.div_ceil(CLUSTER) as usize],
            sealed_table: Vec::new(),
            hidden: 0,
            at_limit: false,
            unpacked: std::cell::Cell::new(0),
        }
    }

    /// Puts a cluster into a new place of `file`, each sector filled with one byte.
    pub fn put(&mut self, file: &mut Vec<u8>, cluster: u64, first: u8) {
        let at = self.take_place();
        file.resize(file.len().max((at + CLUSTER) as usize), 0);
        file[at as usize..(at + CLUSTER) as usize].copy_from_slice(&content(first));
        self.table[cluster as usize] = Entry::Data(at);
    }

    /// The same, compressed.
    pub fn put_packed(&mut self, file: &mut Vec<u8>, cluster: u64, first: u8) {
        let at = self.take_place();
        file.resize(file.len().max((at + CLUSTER) as usize), 0);
        // Not at the beginning of a sector, nor of the place.
        let begin = at + 512 * (cluster % 3) + 24;
        file[begin as usize..begin as usize + 2].copy_from_slice(&[MARK, first]);
        self.table[cluster as usize] = Entry::Compressed(begin);
    }

    fn take_place(&mut self) -> u64 {
        self.free.pop().unwrap_or_else(|| {
            self.next += CLUSTER;
            self.next - CLUSTER
        })
    }

    fn know(&mut self, at: u64) -> Result<u64, Wait> {
        let cluster = at / CLUSTER;
        let slice = cluster / SLICE;
        let Some(found) = self.known.iter().position(|&known| known == slice) else {
            return Err(Wait::Load(MetaBlock { at: FileOffset(slice * 512), len: 512 }));
        };
        let slice = self.known.remove(found).unwrap();
        self.known.push_back(slice);
        Ok(cluster)
    }

    fn busy(&self, cluster: u64) -> Option<Ticket> {
        let inside = |pending: &Pending| (pending.first..pending.first + pending.count).contains(&cluster);
        self.pending.iter().find(|(_, pending)| inside(pending)).map(|(&ticket, _)| Ticket(ticket))
    }

    /// Of `span`, what lies in its first cluster.
    fn inside(&self, span: Span) -> (u64, u64) {
        let within = span.at % CLUSTER;
        (within, span.len.min(CLUSTER - within))
    }

    fn free(&mut self, entry: Entry) {
        self.limbo.extend(place_of(entry));
    }

    /// What a reader finds at `at` after a power loss, if it is here.
    pub fn survivor(&self, file: &[u8], at: u64) -> Option<u8> {
        let within = at % CLUSTER;
        match *self.durable.get((at / CLUSTER) as usize)? {
            Entry::Parent => None,
            Entry::Zero => Some(0),
            Entry::Data(place) => Some(file.get((place + within) as usize).copied().unwrap_or(0)),
            Entry::Compressed(begin) => Some(content(file[begin as usize + 1])[within as usize]),
        }
    }
}

/// The place that goes with an entry.
fn place_of(entry: Entry) -> Option<u64> {
    match entry {
        Entry::Data(at) => Some(at),
        Entry::Compressed(begin) => Some(begin / CLUSTER * CLUSTER),
        Entry::Parent | Entry::Zero => None,
    }
}

/// What a cluster holds whose first sector is full of `first`.
pub fn content(first: u8) -> Vec<u8> {
    (0..CLUSTER).map(|i| first.wrapping_add((i / 512) as u8)).collect()
}

impl Format for Clusters {
    fn geometry(&self) -> Geometry {
        let discard = u32::try_from(CLUSTER).unwrap();
        Geometry { len: self.len, block: 512, physical_block: 4096, discard, chs: None, read_only: self.read_only }
    }

    fn map(&mut self, span: Span) -> Result<Mapping, Wait> {
        let cluster = self.know(span.at.0)?;
        let (within, len) = self.inside(span);
        Ok(match self.table[cluster as usize] {
            Entry::Parent => Mapping::Parent { len },
            Entry::Zero => Mapping::Zero { len },
            Entry::Data(at) => Mapping::Data { at: FileOffset(at + within), len },
            Entry::Compressed(begin) => Mapping::Compressed {
                at: FileOffset(begin / 512 * 512),
                size: 512,
                lead: begin % 512,
                skip: within,
                len,
            },
        })
    }

    fn reserve(&mut self, span: Span) -> Result<Reserved, Wait> {
        assert!(!self.read_only, "a write to a parent");
        let first = self.know(span.at.0)?;
        if let Some(ticket) = self.busy(first) {
            return Err(Wait::Busy(ticket));
        }
        let (within, mut len) = self.inside(span);
        if let Entry::Data(at) = self.table[first as usize] {
            return Ok(Reserved { at: FileOffset(at + within), len, ticket: None, fill: None });
        }
        if self.at_limit {
            return Err(Wait::NoSpace);
        }
        let place = self.take_place();
        let mut count = 1;
        // More clusters, as long as the places continue.
        while len < span.len && self.next == place + count * CLUSTER {
            let cluster = first + count;
            let free = self.know(cluster * CLUSTER).is_ok() && self.busy(cluster).is_none();
            if !free || matches!(self.table[cluster as usize], Entry::Data(_)) {
                break;
            }
            self.next += CLUSTER;
            count += 1;
            len = span.len.min(count * CLUSTER - within);
        }
        self.last_ticket += 1;
        self.pending.insert(self.last_ticket, Pending { first, count, place });
        let fill = Fill { before: within, after: count * CLUSTER - within - len };
        let fill = (fill.before + fill.after > 0).then_some(fill);
        Ok(Reserved { at: FileOffset(place + within), len, ticket: Some(Ticket(self.last_ticket)), fill })
    }

    fn commit(&mut self, ticket: Ticket) -> Option<Committed> {
        let Pending { first, count, place } = self.pending.remove(&ticket.0)?;
        for i in 0..count {
            let entry = &mut self.table[(first + i) as usize];
            let old = std::mem::replace(entry, Entry::Data(place + i * CLUSTER));
            self.free(old);
        }
        self.changed += 1;
        let at = first * CLUSTER;
        Some(Committed {
            span: Span { at: DiskOffset(at), len: (count * CLUSTER).min(self.len - at) },
            at: FileOffset(place),
        })
    }

    fn abandon(&mut self, ticket: Ticket) {
        let pending = self.pending.remove(&ticket.0).expect("abandoned once");
        self.free.extend((0..pending.count).map(|i| pending.place + i * CLUSTER));
    }

    fn discard(&mut self, span: Span) -> Result<Discarded, Wait> {
        let cluster = self.know(span.at.0)?;
        let (within, len) = self.inside(span);
        let whole = within == 0 && len == CLUSTER.min(self.len - cluster * CLUSTER);
        if let Some(ticket) = self.busy(cluster) {
            assert!(!whole, "a discard over a write in flight");
            return if cluster % 2 == 0 { Err(Wait::Busy(ticket)) } else { Ok(Discarded::Nothing { len }) };
        }
        let entry = self.table[cluster as usize];
        match entry {
            Entry::Data(at) if !whole => return Ok(Discarded::Kept { at: FileOffset(at + within), len }),
            _ if !whole || entry == Entry::Zero => return Ok(Discarded::Nothing { len }),
            _ => {}
        }
        self.table[cluster as usize] = Entry::Zero;
        self.changed += 1;
        if let Entry::Data(at) = entry {
            return Ok(Discarded::Freed { at: FileOffset(at), len, size: CLUSTER });
        }
        self.hidden += 1;
        self.free(entry);
        Ok(Discarded::Hidden { len })
    }

    fn released(&mut self, at: FileOffset, _clean: bool) {
        self.limbo.push(at.0);
    }

    fn reclaim(&mut self) -> Option<FileRange> {
        self.leaked.pop_front().map(|at| FileRange { at: FileOffset(at), len: CLUSTER })
    }

    fn forget(&mut self, span: Span) -> Result<u64, Wait> {
        let cluster = self.know(span.at.0)?;
        let (within, len) = self.inside(span);
        assert!(
            within == 0 && span.at + len == (span.at + CLUSTER).min(DiskOffset(self.len)),
            "a part of a cluster is forgotten"
        );
        assert!(self.busy(cluster).is_none(), "forgotten under a write");
        let old = std::mem::replace(&mut self.table[cluster as usize], Entry::Parent);
        self.changed += usize::from(old != Entry::Parent);
        self.forgotten.extend(place_of(old));
        Ok(len)
    }

    fn grow(&mut self, len: u64) -> Result<(), ImageError> {
        self.len = len;
        self.table.resize(len.div_ceil(CLUSTER) as usize, Entry::Parent);
        self.changed += 1;
        Ok(())
    }

    fn decompress(&self, bytes: &[u8]) -> Result<Vec<u8>, Corrupt> {
        self.unpacked.set(self.unpacked.get() + 1);
        match bytes {
            [MARK, first, ..] => Ok(content(*first)),
            _ => Err(Corrupt { at: FileOffset(0) }),
        }
    }

    fn load(&mut self, block: MetaBlock, _bytes: &[u8]) -> Result<(), Corrupt> {
        self.known.push_back(block.at / 512);
        let distinct: HashSet<u64> = self.known.iter().copied().collect();
        assert_eq!(distinct.len(), self.known.len(), "loaded once for all");
        if self.known.len() > self.known_max {
            self.known.pop_front();
        }
        Ok(())
    }

    fn records(&mut self) -> &mut Records {
        &mut self.records
    }

    fn collect_records(&mut self) {}

    fn set_stamp(&mut self, _stamp: Stamp) -> Option<MetaWrite> {
        None
    }

    fn clear_stamp(&mut self) {}

    fn dirty(&self) -> usize {
        self.changed + self.limbo.len() + self.forgotten.len()
    }

    fn seal(&mut self) -> Vec<Vec<MetaWrite>> {
        self.changed = 0;
        self.sealed.append(&mut self.limbo);
        self.sealed_forgotten.append(&mut self.forgotten);
        self.sealed_table.clone_from(&self.table);
        vec![vec![MetaWrite { at: FileOffset(0), bytes: vec![0; 512] }]]
    }

    fn settled(&mut self, durable: bool) {
        let (sealed, forgotten) = (std::mem::take(&mut self.sealed), std::mem::take(&mut self.sealed_forgotten));
        if durable {
            self.free.extend(sealed);
            self.leaked.extend(forgotten);
            self.durable.clone_from(&self.sealed_table);
        } else {
            self.limbo.extend(sealed);
            self.forgotten.extend(forgotten);
            self.changed += 1;
        }
    }
}
