//! The header of a qcow2 file with its extensions and the backing name, read and checked; and its first sector,
//! composed.
//!
//! Knows nothing of tables' content. Keeps: every number of a [`Header`] that exists is within the limits of `layout`,
//! every table aligned, and no sum of them overflows. Whether the image can be used is for others to judge.

use zerocopy::{FromBytes, FromZeros, IntoBytes};

use super::entry::EntryFormat;
use super::layout::{
    BACKING_FORMAT_MAX, BACKING_NAME_MAX, CLUSTER_BITS_MAX, CLUSTER_BITS_MIN, COMPRESSION_TYPE, CRYPT_LUKS,
    EXTENDED_L2, EXTENSION_BACKING_FORMAT, EXTENSION_BITMAPS, EXTENSION_DATA_FILE, EXTENSION_ENCRYPTION, EXTENSION_END,
    EXTENSION_FEATURE_NAMES, EXTENSION_IDENTITY, EXTENSION_STAMP, EXTERNAL_DATA, HEADER_LEN_V2, HEADER_LEN_V3,
    L1_BYTES_MAX, LEN_MAX, MAGIC, REFCOUNT_ORDER_MAX, REFCOUNT_TABLE_BYTES_MAX, RawBitmaps, RawExtension,
    RawFeatureName, RawHeader, RawIdentity, SECTOR, STAMP_VALID, SUBCLUSTERS_BITS_MIN, index, length,
};
use crate::size::in_32_bits;
use crate::{FileOffset, ImageError, ImageErrorKind, Source, Stamp};

/// An extension as it stands in the header.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Extension {
    /// Which.
    pub kind: u32,
    /// Its data without padding.
    pub data: Vec<u8>,
}

/// The header of an image.
#[derive(Clone, Debug)]
pub struct Header {
    /// The fields, with those that version 2 lacks filled in.
    pub raw: RawHeader,
    /// In their order.
    pub extensions: Vec<Extension>,
    /// Where in the file the extensions end, their end mark included.
    pub extensions_end: u64,
    /// Empty if there is none.
    pub backing: Vec<u8>,
}

/// An error at byte `at` of the header.
fn corrupt<T>(at: u64, what: impl Into<String>) -> Result<T, ImageError> {
    Err(ImageError::at(ImageErrorKind::Corrupt, FileOffset(at), what))
}

/// Reads a piece of metadata that opening needs.
pub fn read(source: &mut dyn Source, at: FileOffset, len: u64, what: &str) -> Result<Vec<u8>, ImageError> {
    let mut bytes = vec![0; index(len)];
    match source.read_at(at, &mut bytes) {
        Ok(()) => Ok(bytes),
        Err(crate::ReadFault::PastEnd(_)) => corrupt(at.0, format!("the {what} reaches behind the end of the file")),
        Err(fault) => Err(ImageError::at(ImageErrorKind::Storage, at, format!("the {what} cannot be read: {fault}"))),
    }
}

impl Header {
    /// Reads and checks the header.
    pub fn read(source: &mut dyn Source) -> Result<Header, ImageError> {
        let header = Header::read_to_repair(source)?;
        check_refcount_table(&header.raw)?;
        Ok(header)
    }

    /// The same, for who can do without the refcount table: what the header says of it is not checked.
    pub fn read_to_repair(source: &mut dyn Source) -> Result<Header, ImageError> {
        let wrong = |what: &str| Err(ImageError::at(ImageErrorKind::WrongFormat, FileOffset(0), what));
        let mut bytes = vec![0; size_of::<RawHeader>()];
        let there = index(source.len()).min(bytes.len());
        if let Some(start) = bytes.get_mut(..there) {
            if let Err(fault) = source.read_at(FileOffset(0), start) {
                let what = format!("the header cannot be read: {fault}");
                return Err(ImageError::at(ImageErrorKind::Storage, FileOffset(0), what));
            }
        }
        let Ok(mut raw) = RawHeader::read_from_bytes(&bytes) else { return wrong("the file has no header") };
        if raw.magic.get() != MAGIC || there < index(HEADER_LEN_V2.into()) {
            return wrong("the file does not begin like a qcow2 image");
        }
        match raw.version.get() {
            2 => complete_v2(&mut raw),
            3 => check_v3(&mut raw)?,
            other => {
                let what = format!("the image is of qcow2 version {other}; versions 2 and 3 are known");
                return Err(ImageError::at(ImageErrorKind::Unsupported, FileOffset(4), what));
            }
        }
        check_numbers(&raw)?;
        check_places(&raw)?;
        let mut header = Header { raw, extensions: Vec::new(), extensions_end: 0, backing: Vec::new() };
        header.read_rest(source)?;
        Ok(header)
    }

    /// Extensions and backing name, which stand in the first cluster.
    fn read_rest(&mut self, source: &mut dyn Source) -> Result<(), ImageError> {
        let len = source.len().min(self.cluster_size());
        let mut first = read(source, FileOffset(0), len, "first cluster")?;
        // Behind the end of the file is zero, as everywhere.
        first.resize(index(self.cluster_size()), 0);
        let backing_at = self.raw.backing_at.get();
        let backing_len = self.raw.backing_len.get().into();
        if backing_at != 0 {
            let place = index(backing_at)..index(backing_at.saturating_add(backing_len));
            let Some(name) = first.get(place) else {
                return corrupt(8, "the backing file's name reaches behind the first cluster");
            };
            self.backing = name.to_vec();
        }
        // "Header extensions": up to the backing name or the end of the first cluster.
        let end = if backing_at != 0 { index(backing_at) } else { first.len() };
        let mut at = index(self.raw.header_len.get().into());
        while at < end {
            let found = first.get(at..end).and_then(|rest| RawExtension::read_from_prefix(rest).ok());
            let data = found.and_then(|(head, rest)| Some((head, rest.get(..index(head.len.get().into()))?)));
            let Some((head, data)) = data else {
                return corrupt(length(at), "a header extension reaches behind the header's room");
            };
            // Whatever length the mark has: it has no data, and nothing is behind it.
            if head.kind.get() == EXTENSION_END {
                at += size_of::<RawExtension>();
                break;
            }
            check_extension(&self.raw, head.kind.get(), data.len(), length(at))?;
            self.extensions.push(Extension { kind: head.kind.get(), data: data.to_vec() });
            at += size_of::<RawExtension>() + data.len().next_multiple_of(8);
        }
        self.extensions_end = length(at.min(first.len()));
        Ok(())
    }

    /// Bytes in a cluster.
    pub fn cluster_size(&self) -> u64 {
        1 << self.raw.cluster_bits.get()
    }

    /// Bytes of the L1 table.
    pub fn l1_len(&self) -> u64 {
        u64::from(self.raw.l1_entries.get()) * 8
    }

    /// Bytes of the refcount table.
    pub fn refcount_table_len(&self) -> u64 {
        u64::from(self.raw.refcount_table_clusters.get()) * self.cluster_size()
    }

    /// How the entries of L2 tables stand there.
    pub fn entries(&self) -> EntryFormat {
        entries_of(&self.raw)
    }

    /// The data of an extension.
    pub fn extension(&self, kind: u32) -> Option<&[u8]> {
        self.extensions.iter().find(|extension| extension.kind == kind).map(|extension| extension.data.as_slice())
    }

    /// Our own extension, if the image has it.
    pub fn identity(&self) -> Option<RawIdentity> {
        let (identity, _) = RawIdentity::read_from_prefix(self.extension(EXTENSION_IDENTITY)?).ok()?;
        (identity.version == RawIdentity::VERSION).then_some(identity)
    }

    /// The stamp, if the image has one that counts.
    pub fn stamp(&self) -> Option<Stamp> {
        let counts = self.raw.version.get() >= 3 && self.raw.autoclear.get() & STAMP_VALID != 0;
        Stamp::from_bytes(self.extension(EXTENSION_STAMP).filter(|_| counts)?)
    }

    /// Names of the bits set in `bits`, of the features of a `kind` (0 incompatible, 1 compatible, 2 autoclear): ours,
    /// the image's own, or the number.
    pub fn feature_names(&self, kind: u8, bits: u64) -> Vec<String> {
        let table = self.extension(EXTENSION_FEATURE_NAMES).unwrap_or_default();
        (0..64u8)
            .filter(|bit| bits & (1 << bit) != 0)
            .map(|bit| known_name(kind, bit).map_or_else(|| name_in(table, kind, bit), str::to_owned))
            .collect()
    }

    /// Sets or removes an extension. What is about the parent stands in front, so that it is in the first sector.
    pub fn set_extension(&mut self, kind: u32, data: Option<Vec<u8>>) {
        self.extensions.retain(|extension| extension.kind != kind);
        if let Some(data) = data {
            self.extensions.insert(0, Extension { kind, data });
        }
    }

    /// The first sector of the file: header and extensions. An extension list that does not fit loses its feature
    /// names, which are for people; if that does not help, it is the caller who must do without something.
    pub fn first_sector(&self) -> Result<Vec<u8>, ImageError> {
        self.first_sector_with_len().map(|(_, sector)| sector)
    }

    /// The same, and where in it the extensions end.
    pub fn first_sector_with_len(&self) -> Result<(u64, Vec<u8>), ImageError> {
        let full = self.compose(true);
        let sector = index(SECTOR);
        // A backing name that stands in the sector stays there.
        let room = match index(self.raw.backing_at.get()) {
            0 => sector,
            name => sector.min(name),
        };
        let mut bytes = if full.len() <= room { full } else { self.compose(false) };
        if bytes.len() > sector {
            let what = "the header extensions of other programs leave no room for a change of the parent";
            return Err(ImageError::new(ImageErrorKind::Unsupported, what));
        }
        let len = length(bytes.len());
        bytes.resize(sector, 0);
        Ok((len, bytes))
    }

    fn compose(&self, with_names: bool) -> Vec<u8> {
        let mut bytes = self.raw.as_bytes().to_vec();
        bytes.truncate(index(self.raw.header_len.get().into()));
        bytes.resize(index(self.raw.header_len.get().into()), 0);
        for extension in &self.extensions {
            if extension.kind == EXTENSION_FEATURE_NAMES && !with_names {
                continue;
            }
            let len = in_32_bits(length(extension.data.len()), "a cluster");
            let head = RawExtension { kind: extension.kind.into(), len: len.into() };
            bytes.extend_from_slice(head.as_bytes());
            bytes.extend_from_slice(&extension.data);
            bytes.resize(bytes.len().next_multiple_of(8), 0);
        }
        bytes.extend_from_slice(RawExtension::new_zeroed().as_bytes());
        bytes
    }

    /// The name of the external data file, if the image has one and names it.
    pub fn data_file(&self) -> Option<String> {
        self.extension(EXTENSION_DATA_FILE).map(|name| String::from_utf8_lossy(name).into_owned())
    }

    /// The backing file's format, as the image has it.
    pub fn backing_format(&self) -> Option<String> {
        self.extension(EXTENSION_BACKING_FORMAT).map(|name| String::from_utf8_lossy(name).into_owned())
    }
}

/// Fills in the fields that a header of version 2 does not have.
fn complete_v2(raw: &mut RawHeader) {
    raw.incompatible = 0.into();
    raw.compatible = 0.into();
    raw.autoclear = 0.into();
    raw.refcount_order = 4.into();
    raw.header_len = HEADER_LEN_V2.into();
    raw.compression = 0;
    raw.padding = [0; 7];
}

fn check_v3(raw: &mut RawHeader) -> Result<(), ImageError> {
    let header_len = raw.header_len.get();
    if header_len < HEADER_LEN_V3 || header_len % 8 != 0 {
        return corrupt(100, format!("the header claims to be {header_len} bytes long"));
    }
    // "Additional fields": what lies behind the header's length is not the header's.
    if header_len <= HEADER_LEN_V3 {
        raw.compression = 0;
        raw.padding = [0; 7];
    }
    Ok(())
}

fn check_numbers(raw: &RawHeader) -> Result<(), ImageError> {
    let bits = raw.cluster_bits.get();
    if !(CLUSTER_BITS_MIN..=CLUSTER_BITS_MAX).contains(&bits) {
        return corrupt(20, format!("clusters of 2^{bits} bytes are not between 512 bytes and 2 MiB"));
    }
    if entries_of(raw).extended && bits < SUBCLUSTERS_BITS_MIN {
        return corrupt(20, format!("clusters of 2^{bits} bytes have no subclusters of a sector: they take 16 KiB"));
    }
    if u64::from(raw.header_len.get()) > 1 << bits {
        return corrupt(100, "the header does not fit the first cluster");
    }
    if raw.refcount_order.get() > REFCOUNT_ORDER_MAX {
        return corrupt(96, format!("refcounts of 2^{} bits do not exist", raw.refcount_order.get()));
    }
    if raw.len.get() > LEN_MAX {
        let what = format!("a virtual size of {} bytes is beyond the 1 PiB that is handled", raw.len.get());
        return Err(ImageError::at(ImageErrorKind::OutOfLimits, FileOffset(24), what));
    }
    if index(raw.backing_len.get().into()) > BACKING_NAME_MAX && raw.backing_at.get() != 0 {
        return corrupt(16, "the backing file's name is longer than 1023 bytes");
    }
    Ok(())
}

/// How the entries of the L2 tables of such an image stand there.
fn entries_of(raw: &RawHeader) -> EntryFormat {
    let incompatible = raw.incompatible.get();
    EntryFormat {
        cluster_bits: raw.cluster_bits.get(),
        extended: incompatible & EXTENDED_L2 != 0,
        external: incompatible & EXTERNAL_DATA != 0,
    }
}

fn check_places(raw: &RawHeader) -> Result<(), ImageError> {
    let cluster: u64 = 1 << raw.cluster_bits.get();
    let reach = entries_of(raw).reach();
    let l1_len = u64::from(raw.l1_entries.get()) * 8;
    if l1_len > L1_BYTES_MAX {
        return corrupt(36, format!("an L1 table of {l1_len} bytes is larger than 32 MiB"));
    }
    if u64::from(raw.l1_entries.get()).saturating_mul(reach) < raw.len.get() {
        return corrupt(36, "the L1 table is too small for the disk");
    }
    let l1_at = raw.l1_at.get();
    if l1_len != 0 && !is_place(l1_at, cluster) {
        return corrupt(40, format!("the L1 table stands at byte {l1_at}, which is not where a cluster begins"));
    }
    Ok(())
}

/// Refuses extensions that QEMU refuses, of those that both know.
fn check_extension(raw: &RawHeader, kind: u32, len: usize, at: u64) -> Result<(), ImageError> {
    match kind {
        EXTENSION_BACKING_FORMAT if len > BACKING_FORMAT_MAX => {
            corrupt(at, format!("the name of the backing file's format is {len} bytes long"))
        }
        EXTENSION_BITMAPS if len != size_of::<RawBitmaps>() => {
            corrupt(at, format!("the header extension about bitmaps is {len} bytes long"))
        }
        // "Full disk encryption header pointer": there if and only if the method is LUKS.
        EXTENSION_ENCRYPTION if raw.encryption.get() != CRYPT_LUKS => {
            corrupt(at, "there is a header extension about encryption in an image without it")
        }
        _ => Ok(()),
    }
}

/// Whether the compression type is one that is known, and stated where it has to be ("Compression type").
pub fn check_compression(raw: &RawHeader) -> Result<(), ImageError> {
    let stated = raw.incompatible.get() & COMPRESSION_TYPE != 0;
    if raw.compression > 1 || stated != (raw.compression != 0) {
        let what = format!("the image's compression type {} is not known", raw.compression);
        return Err(ImageError::at(ImageErrorKind::Unsupported, FileOffset(104), what));
    }
    Ok(())
}

/// Whether the header names a refcount table that can be read.
pub fn check_refcount_table(raw: &RawHeader) -> Result<(), ImageError> {
    let cluster: u64 = 1 << raw.cluster_bits.get();
    let table_len = u64::from(raw.refcount_table_clusters.get()) * cluster;
    if table_len > REFCOUNT_TABLE_BYTES_MAX.max(cluster) || table_len == 0 {
        return corrupt(56, format!("a refcount table of {table_len} bytes is not between a cluster and 8 MiB"));
    }
    let at = raw.refcount_table_at.get();
    if !is_place(at, cluster) {
        return corrupt(48, format!("the refcount table stands at byte {at}, which is not where a cluster begins"));
    }
    Ok(())
}

/// Whether a table can begin here.
fn is_place(at: u64, cluster: u64) -> bool {
    at % cluster == 0 && at != 0 && at < 1 << 56
}

/// Names of the feature bits that we know.
pub fn known_name(kind: u8, bit: u8) -> Option<&'static str> {
    match (kind, bit) {
        (0, 0) => Some("dirty bit"),
        (0, 1) => Some("corrupt bit"),
        (0, 2) => Some("external data file"),
        (0, 3) => Some("compression type"),
        (0, 4) => Some("extended L2 entries"),
        (1, 0) => Some("lazy refcounts"),
        (2, 0) => Some("bitmaps"),
        (2, 1) => Some("raw external data"),
        (2, 63) => Some("in use by Tapline"),
        _ => None,
    }
}

/// A name from the image's own table ("Feature name table").
fn name_in(table: &[u8], kind: u8, bit: u8) -> String {
    let names = table.chunks_exact(size_of::<RawFeatureName>());
    let found = names
        .filter_map(|entry| RawFeatureName::read_from_bytes(entry).ok())
        .find(|entry| entry.kind == kind && entry.bit == bit);
    match found {
        Some(entry) => {
            let text = String::from_utf8_lossy(&entry.name);
            // The name is shown to people: no control characters of a stranger.
            text.trim_end_matches('\0').chars().filter(|letter| !letter.is_control()).collect()
        }
        None => format!("bit {bit}"),
    }
}
