//! The ledger of a check: for every cluster of the file, how often something refers to it.
//!
//! Knows nothing of tables or of what the image itself claims. It takes two and a half bytes for each cluster that
//! is referred to, in pages of 4096: 40 MiB for a full disk of 1 TiB at 64 KiB, 640 MiB at 16 TiB. A count stops at
//! 65535.

use std::cell::Cell;
use std::collections::BTreeMap;

use crate::qcow2::cluster::HostCluster;
use crate::qcow2::layout::{index, length};
use crate::{ImageError, ImageErrorKind};

/// Clusters on a page.
const PAGE: usize = 4096;
/// The same, of cluster numbers.
const WIDTH: u64 = 4096;
/// Pages at most: what a full disk of 24 TiB at 64 KiB takes, 1 GiB. A sparse file with references all over it must
/// not take more.
const PAGES_MAX: usize = 100_000;

/// The purpose of a reference.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// A second-level table of the active disk.
    Table,
    /// A cluster of the active disk.
    Data,
    /// Anything else: a structure that has its clusters for itself, a compressed cluster, something of a snapshot.
    Other,
}

/// Something that cannot be so in the active disk alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Clash {
    /// Two places have the same cluster.
    Shared,
    /// The cluster is a second-level table and data at once.
    TableAndData,
}

/// One bit for each cluster of a page.
type Bits = [u64; PAGE / 64];

struct Page {
    counts: [u16; PAGE],
    tables: Bits,
    data: Bits,
    shared: Bits,
    single: Bits,
}

/// How often something refers to each cluster of a file.
pub struct Ledger {
    /// In the order in which they were needed.
    pages: Vec<Box<Page>>,
    pages_max: usize,
    /// Page numbers, and where those pages are.
    places: BTreeMap<u64, usize>,
    /// The page used last: clusters that follow each other are mostly looked up in turn.
    last: Cell<Option<(u64, usize)>>,
}

impl Default for Ledger {
    fn default() -> Ledger {
        Ledger { pages: Vec::new(), pages_max: PAGES_MAX, places: BTreeMap::new(), last: Cell::new(None) }
    }
}

fn split(cluster: HostCluster) -> (u64, usize) {
    (cluster.0 / WIDTH, index(cluster.0 % WIDTH))
}

fn bit(bits: &Bits, index: usize) -> bool {
    bits.get(index / 64).is_some_and(|word| word >> (index % 64) & 1 == 1)
}

fn raise(bits: &mut Bits, index: usize) {
    if let Some(word) = bits.get_mut(index / 64) {
        *word |= 1 << (index % 64);
    }
}

impl Ledger {
    /// Where a count stops.
    pub const COUNT_MAX: u64 = 65535;

    /// One reference more.
    pub fn count(&mut self, cluster: HostCluster, role: Role) -> Result<Option<Clash>, ImageError> {
        let (number, index) = split(cluster);
        if self.place(number).is_none() {
            self.add(number)?;
        }
        let Some(page) = self.page_mut(number) else { return Ok(None) };
        if let Some(count) = page.counts.get_mut(index) {
            *count = count.saturating_add(1);
        }
        let (table, data) = (bit(&page.tables, index), bit(&page.data, index));
        let clash = match role {
            Role::Other => None,
            Role::Table if data => Some(Clash::TableAndData),
            Role::Data if table => Some(Clash::TableAndData),
            Role::Table | Role::Data if table || data => Some(Clash::Shared),
            Role::Table | Role::Data => None,
        };
        match role {
            Role::Table => raise(&mut page.tables, index),
            Role::Data => raise(&mut page.data, index),
            Role::Other => {}
        }
        if clash == Some(Clash::Shared) {
            raise(&mut page.shared, index);
        }
        Ok(clash)
    }

    /// Takes one reference back.
    pub fn discount(&mut self, cluster: HostCluster) {
        let (number, index) = split(cluster);
        if let Some(count) = self.page_mut(number).and_then(|page| page.counts.get_mut(index)) {
            *count = count.saturating_sub(1);
        }
    }

    /// How many references there are.
    pub fn references(&self, cluster: HostCluster) -> u64 {
        let (number, index) = split(cluster);
        self.page(number).and_then(|page| page.counts.get(index)).map_or(0, |&count| count.into())
    }

    /// Whether a cluster is a second-level table of the active disk.
    pub fn is_table(&self, cluster: HostCluster) -> bool {
        self.bit(cluster, |page| &page.tables)
    }

    /// Whether two places of the active disk have this cluster.
    pub fn is_shared(&self, cluster: HostCluster) -> bool {
        self.bit(cluster, |page| &page.shared)
    }

    /// Notes that the image counts one reference to a cluster, which is what lets an entry be marked as copied.
    pub fn set_single(&mut self, cluster: HostCluster) {
        let (number, index) = split(cluster);
        if let Some(page) = self.page_mut(number) {
            raise(&mut page.single, index);
        }
    }

    /// Whether the cluster was noted with [`Ledger::set_single`].
    pub fn is_single(&self, cluster: HostCluster) -> bool {
        self.bit(cluster, |page| &page.single)
    }

    /// The first cluster behind all that is referred to.
    pub fn end(&self) -> HostCluster {
        let in_use = |page: &Page| page.counts.iter().rposition(|&count| count > 0);
        let pages = self.places.iter().rev().filter_map(|(&number, &place)| Some((number, self.pages.get(place)?)));
        let last = pages.filter_map(|(number, page)| Some((number, in_use(page)?))).next();
        last.map_or(HostCluster(0), |(number, index)| HostCluster(number * WIDTH + length(index) + 1))
    }

    /// The first cluster from `cluster` on that is referred to.
    pub fn next_in_use(&self, cluster: HostCluster) -> Option<HostCluster> {
        let (first, index) = split(cluster);
        self.places.range(first..).find_map(|(&number, &place)| {
            let page = self.pages.get(place)?;
            let skip = if number == first { index } else { 0 };
            let found = page.counts.iter().skip(skip).position(|&count| count > 0)?;
            Some(HostCluster(number * WIDTH + length(skip + found)))
        })
    }

    fn bit(&self, cluster: HostCluster, of: impl Fn(&Page) -> &Bits) -> bool {
        let (number, index) = split(cluster);
        self.page(number).is_some_and(|page| bit(of(page), index))
    }

    fn add(&mut self, number: u64) -> Result<(), ImageError> {
        if self.pages.len() >= self.pages_max {
            let what = "its clusters are too many, or too far apart, to be counted in 1 GiB of memory";
            return Err(ImageError::new(ImageErrorKind::OutOfLimits, what));
        }
        let empty = [0; PAGE / 64];
        self.places.insert(number, self.pages.len());
        let page = Page { counts: [0; PAGE], tables: empty, data: empty, shared: empty, single: empty };
        self.pages.push(Box::new(page));
        Ok(())
    }

    fn place(&self, number: u64) -> Option<usize> {
        match self.last.get() {
            Some((last, place)) if last == number => Some(place),
            _ => {
                let place = *self.places.get(&number)?;
                self.last.set(Some((number, place)));
                Some(place)
            }
        }
    }

    fn page(&self, number: u64) -> Option<&Page> {
        self.pages.get(self.place(number)?).map(Box::as_ref)
    }

    fn page_mut(&mut self, number: u64) -> Option<&mut Page> {
        let place = self.place(number)?;
        self.pages.get_mut(place).map(Box::as_mut)
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn references_are_counted_over_pages() {
        let mut ledger = Ledger::default();
        ledger.count(HostCluster(0), Role::Other).unwrap();
        ledger.count(HostCluster(4095), Role::Data).unwrap();
        ledger.count(HostCluster(4096), Role::Data).unwrap();
        ledger.count(HostCluster(4096), Role::Other).unwrap();
        assert_eq!([0, 1, 4095, 4096, 9999].map(|cluster| ledger.references(HostCluster(cluster))), [1, 0, 1, 2, 0]);
        assert_eq!(ledger.end(), HostCluster(4097));
        let next = [0, 1, 4096, 4097].map(|from| ledger.next_in_use(HostCluster(from)).map(|found| found.0));
        assert_eq!(next, [Some(0), Some(4095), Some(4096), None]);
        ledger.discount(HostCluster(4096));
        ledger.discount(HostCluster(4096));
        assert_eq!(ledger.end(), HostCluster(4096));
    }

    #[test]
    fn two_places_of_the_disk_with_one_cluster_are_seen() {
        let mut ledger = Ledger::default();
        assert_eq!(ledger.count(HostCluster(7), Role::Data), Ok(None));
        assert_eq!(ledger.count(HostCluster(7), Role::Other), Ok(None));
        assert!(!ledger.is_shared(HostCluster(7)));
        assert_eq!(ledger.count(HostCluster(7), Role::Data), Ok(Some(Clash::Shared)));
        assert!(ledger.is_shared(HostCluster(7)));
        assert_eq!(ledger.count(HostCluster(7), Role::Table), Ok(Some(Clash::TableAndData)));
    }

    #[test]
    fn a_count_stops_at_its_end() {
        let mut ledger = Ledger::default();
        for _ in 0..70_000 {
            ledger.count(HostCluster(1), Role::Other).unwrap();
        }
        assert_eq!(ledger.references(HostCluster(1)), 65535);
    }

    #[test]
    fn references_all_over_a_sparse_file_do_not_take_all_memory() {
        let mut ledger = Ledger { pages_max: 10, ..Ledger::default() };
        let refused = (0..100).find(|&step| ledger.count(HostCluster(step * 5000), Role::Data).is_err());
        assert_eq!(refused, Some(10));
    }
}
