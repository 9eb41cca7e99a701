//! A new image that is written once, from the beginning of the disk to its end, with compressed clusters.
//!
//! Knows nothing of how they are compressed, nor of files. It begins with an empty image ([`super::create`]) and says
//! what is to be written behind it: clusters as they come, compressed ones byte by byte behind each other, and each L2
//! table behind the clusters that it is about.
//!
//! Order: [`Appender::take`] while clusters are added, then the batches of [`Appender::finish`], with a sync behind
//! each.
//!
//! 1. Clusters, L2 tables and refcount blocks; the first block, which is referred to already. *Reopened here:* the
//!    empty image; some clusters may be leaked.
//! 2. The refcount table. *Reopened here:* the same.
//! 3. The L1 table. *Reopened here:* the empty image, or a part of the disk, or all of it.
//!
//! Memory: two bytes for each cluster of the file, 32 MiB for a TiB of clusters of 64 KiB.

use super::create::{Spec, create};
use super::entry::{Entry, EntryFormat};
use super::layout::{COPIED, index, length, set_entry};
use crate::format::MetaWrite;
use crate::{FileOffset, ImageError, ImageErrorKind};

/// References to one cluster of the file: one less than a refcount can be, which a check takes for too many.
const REFERENCES_MAX: u16 = u16::MAX - 1;
/// Bytes of one write.
const PIECE: u64 = 1 << 20;

/// A cluster's bytes.
#[derive(Clone, Copy, Debug)]
pub enum Content<'a> {
    /// As they are: a whole cluster.
    Plain(&'a [u8]),
    /// Compressed.
    Compressed(&'a [u8]),
}

/// A new image, to which clusters are added.
#[derive(Debug)]
pub struct Appender {
    format: EntryFormat,
    /// Bytes that are still to be written, and where they begin in the file.
    bytes: Vec<u8>,
    bytes_at: u64,
    /// The L2 table that is being filled, and its number.
    table: Vec<u8>,
    number: Option<u64>,
    l1: Vec<u8>,
    /// Of all clusters of the file.
    counts: Vec<u16>,
    refcount_table_at: u64,
    refcount_table_len: u64,
    l1_at: u64,
}

impl Appender {
    /// Begins behind the empty image.
    pub fn new(spec: &Spec) -> Result<Appender, ImageError> {
        let empty = create(spec)?;
        let cluster = u64::from(spec.cluster_size);
        let format = EntryFormat { cluster_bits: spec.cluster_size.trailing_zeros(), extended: false, external: false };
        let tables = spec.len.div_ceil(format.reach());
        // As they are laid out: header, refcount table, one block, L1 table.
        let l1_at = empty.len - (tables * 8).next_multiple_of(cluster);
        Ok(Appender {
            format,
            bytes: Vec::new(),
            bytes_at: empty.len,
            table: vec![0; index(cluster)],
            number: None,
            l1: vec![0; index((tables * 8).next_multiple_of(cluster))],
            counts: vec![1; index(empty.len / cluster)],
            refcount_table_at: cluster,
            refcount_table_len: l1_at - 2 * cluster,
            l1_at,
        })
    }

    fn cluster(&self) -> u64 {
        1 << self.format.cluster_bits
    }

    /// Where the file ends so far.
    fn end(&self) -> u64 {
        self.bytes_at + length(self.bytes.len())
    }

    /// Adds a cluster of the disk, behind all that were added before.
    ///
    /// # Panics
    /// If it is not behind them, or behind the disk's end.
    pub fn add(&mut self, cluster: u64, content: Content<'_>) {
        let (number, entry) = (cluster / self.format.in_table(), cluster % self.format.in_table());
        if self.number != Some(number) {
            self.end_table();
            assert!(self.number.is_none_or(|before| before < number), "clusters come in order");
            self.number = Some(number);
        }
        let at = match content {
            Content::Plain(bytes) => Entry::Data { at: self.append_clusters(bytes), copied: true },
            Content::Compressed(bytes) => self.append_compressed(bytes),
        };
        self.format.write(&mut self.table, index(entry), self.format.encode(at));
    }

    /// Appends whole clusters.
    fn append_clusters(&mut self, bytes: &[u8]) -> FileOffset {
        self.align();
        let at = self.end();
        self.bytes.extend_from_slice(bytes);
        self.align();
        self.counts.resize(index(self.end() / self.cluster()), 1);
        FileOffset(at)
    }

    /// Appends a compressed cluster: each cluster of the file that it reaches into gets a reference.
    fn append_compressed(&mut self, bytes: &[u8]) -> Entry {
        let full =
            |counts: &[u16], number: u64| counts.get(index(number)).is_some_and(|&count| count >= REFERENCES_MAX);
        if full(&self.counts, self.end() / self.cluster()) {
            self.align();
        }
        let (at, size) = (self.end(), self.cluster());
        self.bytes.extend_from_slice(bytes);
        let (first, behind) = (at / size, self.end().div_ceil(size));
        self.counts.resize(index(behind), 0);
        for count in self.counts.iter_mut().skip(index(first)) {
            *count += 1;
        }
        Entry::Compressed { at: FileOffset(at), end: FileOffset(self.end()).align_up(super::layout::SECTOR) }
    }

    /// Continues at the beginning of a cluster.
    fn align(&mut self) {
        let missing = self.end().next_multiple_of(self.cluster()) - self.end();
        self.bytes.resize(self.bytes.len() + index(missing), 0);
    }

    /// Appends the L2 table, if it has entries.
    fn end_table(&mut self) {
        let Some(number) = self.number else { return };
        let empty = vec![0; self.table.len()];
        let table = std::mem::replace(&mut self.table, empty);
        let at = self.append_clusters(&table);
        set_entry(&mut self.l1, index(number), at.0 | COPIED);
    }

    /// Takes the whole pieces that are ready to be written.
    pub fn take(&mut self) -> Option<MetaWrite> {
        let whole = length(self.bytes.len()) / PIECE * PIECE;
        if whole == 0 {
            return None;
        }
        let rest = self.bytes.split_off(index(whole));
        let bytes = std::mem::replace(&mut self.bytes, rest);
        let at = FileOffset(self.bytes_at);
        self.bytes_at += whole;
        Some(MetaWrite { at, bytes })
    }

    /// Ends the image; returns the last writes, in batches.
    pub fn finish(mut self) -> Result<Vec<Vec<MetaWrite>>, ImageError> {
        self.end_table();
        self.align();
        // Each block has 16-bit counts, and counts itself too. The first one exists.
        let cluster = self.cluster();
        let per_block = cluster / 2;
        let used = self.end() / cluster;
        let more = used.saturating_sub(per_block).div_ceil(per_block - 1);
        self.counts.resize(index(used + more), 1);
        if (1 + more) * 8 > self.refcount_table_len {
            let what = "the refcount table is too small for the file";
            return Err(ImageError::new(ImageErrorKind::OutOfLimits, what));
        }
        let counts = std::mem::take(&mut self.counts);
        let mut blocks = counts.chunks(index(per_block)).map(|counts| {
            let mut block: Vec<u8> = counts.iter().flat_map(|count| count.to_be_bytes()).collect();
            block.resize(index(cluster), 0);
            block
        });
        let first_at = self.refcount_table_at + self.refcount_table_len;
        let Some(bytes) = blocks.next() else { unreachable!("the header has a refcount") };
        let first = MetaWrite { at: FileOffset(first_at), bytes };
        let mut table = vec![0; index(self.refcount_table_len)];
        set_entry(&mut table, 0, first_at);
        for (number, block) in (1..).zip(blocks) {
            set_entry(&mut table, number, self.end());
            self.bytes.extend(block);
        }
        let rest = MetaWrite { at: FileOffset(self.bytes_at), bytes: self.bytes };
        Ok(vec![
            vec![rest, first],
            vec![MetaWrite { at: FileOffset(self.refcount_table_at), bytes: table }],
            vec![MetaWrite { at: FileOffset(self.l1_at), bytes: self.l1 }],
        ])
    }
}

#[cfg(test)]
mod test {
    use super::super::compress::compress;
    use super::super::{Compression, Qcow2, check};
    use super::*;
    use crate::format::{Access, Format, Mapping, Tail, Wait};
    use crate::{DiskOffset, Span};

    fn put(file: &mut Vec<u8>, write: &MetaWrite) {
        let from = index(write.at.0);
        file.resize(file.len().max(from + write.bytes.len()), 0);
        file[from..from + write.bytes.len()].copy_from_slice(&write.bytes);
    }

    fn spec(len: u64, cluster_size: u32) -> Spec {
        Spec { len, cluster_size, uuid: [7; 16], parent: None, compression: Compression::Deflate }
    }

    fn is_clean(file: &[u8]) {
        let mut source = file;
        let report = check(&mut source).unwrap();
        assert!(report.problems.is_empty(), "{:?}", report.problems);
    }

    /// The mapping of the beginning of a cluster.
    fn mapping(image: &mut Qcow2, file: &[u8], at: u64) -> Mapping {
        loop {
            match image.map(Span { at: DiskOffset(at), len: 512 }) {
                Ok(mapping) => return mapping,
                Err(Wait::Load(block)) => {
                    let from = index(block.at.0);
                    image.load(block, &file[from..from + index(block.len.into())]).unwrap();
                }
                Err(wait) => panic!("{wait:?}"),
            }
        }
    }

    #[test]
    fn clusters_are_found_where_they_were_appended() {
        let spec = spec(3 << 30, 64 << 10);
        let mut file = Vec::new();
        create(&spec).unwrap().writes.iter().for_each(|write| put(&mut file, write));
        let mut appender = Appender::new(&spec).unwrap();
        let (text, noise) = (vec![7; 64 << 10], (0..64 << 10).map(|n: u32| n.to_le_bytes()[1]).collect::<Vec<_>>());
        let compressed = compress(Compression::Deflate, &text).unwrap();
        // Of three L2 tables; the second one has none.
        for cluster in [0, 1, 2, 5, 8191, 30_000, 49_151] {
            let plain = cluster == 2;
            appender.add(cluster, if plain { Content::Plain(&noise) } else { Content::Compressed(&compressed) });
            appender.take().iter().for_each(|write| put(&mut file, write));
        }
        appender.finish().unwrap().iter().flatten().for_each(|write| put(&mut file, write));
        is_clean(&file);
        let mut image = Qcow2::open(&mut file.as_slice(), Access::ReadOnly, Tail::Zeroes).unwrap();
        for cluster in [0, 1, 5, 8191, 30_000, 49_151] {
            let Mapping::Compressed { at, size, lead, .. } = mapping(&mut image, &file, cluster << 16) else {
                panic!("cluster {cluster}")
            };
            let from = index(at.0 + lead);
            let until = index(at.0 + size).min(file.len());
            assert_eq!(image.decompress(&file[from..until]).unwrap(), text, "cluster {cluster}");
        }
        let Mapping::Data { at, .. } = mapping(&mut image, &file, 2 << 16) else { panic!("it is plain") };
        assert_eq!(file[index(at.0)..index(at.0) + noise.len()], noise);
        for cluster in [3, 20_000] {
            assert_eq!(mapping(&mut image, &file, cluster << 16), Mapping::Parent { len: 512 });
        }
    }

    #[test]
    fn a_cluster_of_the_file_has_no_more_references_than_can_be_counted() {
        let spec = spec(200 << 30, 2 << 20);
        let mut file = Vec::new();
        create(&spec).unwrap().writes.iter().for_each(|write| put(&mut file, write));
        let mut appender = Appender::new(&spec).unwrap();
        (0..70_000).for_each(|cluster| appender.add(cluster, Content::Compressed(&[0; 9])));
        assert_eq!(appender.counts.iter().copied().max(), Some(REFERENCES_MAX));
        appender.finish().unwrap().iter().flatten().for_each(|write| put(&mut file, write));
        is_clean(&file);
    }

    /// Scope: every prefix of the batches, without and with what follows it.
    #[test]
    fn a_crash_leaves_the_empty_image_or_the_whole_one() {
        let spec = spec(3 << 30, 64 << 10);
        let mut file = Vec::new();
        create(&spec).unwrap().writes.iter().for_each(|write| put(&mut file, write));
        let mut appender = Appender::new(&spec).unwrap();
        (0..2000).for_each(|cluster| appender.add(cluster * 20, Content::Plain(&[1; 64 << 10])));
        let batches = appender.finish().unwrap();
        let last = batches.len() - 1;
        for (number, batch) in batches.iter().enumerate() {
            for write in batch {
                put(&mut file, write);
                let report = check(&mut file.as_slice()).unwrap();
                let fine = |severity| severity == crate::Severity::Leak && number < last;
                assert!(report.problems.iter().all(|problem| fine(problem.severity)), "{:?}", report.problems);
            }
        }
    }
}
