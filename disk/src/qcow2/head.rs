//! The first page of an open image: its header, what has changed in it, and when each change may be written.
//!
//! Knows nothing of clusters. Keeps: the page is written with one changed sector at most, which is written whole or not
//! at all; and a version of it goes out only when all that it points to is durable.

use super::create::check_name;
use super::header::Header;
use super::info::{backing_name, record_parent};
use super::layout::{EXTENSION_STAMP, PAGE, RawHeader, STAMP_VALID, index, length};
use crate::format::MetaWrite;
use crate::size::in_32_bits;
use crate::{FileOffset, ImageError, ImageErrorKind, Link, Stamp};

/// Where the backing name may stand: one of the three is always free of the old name and the one before.
const NAME_PLACES: [u64; 3] = [1024, 2048, 3072];

/// The header and the bytes behind it, as they are and as rounds will write them.
#[derive(Debug)]
pub struct Head {
    /// As it is to be.
    pub header: Header,
    /// The bytes of the file, names not yet referred to included; the first sector as it was at opening.
    page: Vec<u8>,
    /// The sector as it is in the file, and was before the round that may be under way.
    durable: Vec<u8>,
    /// The sector that the round under way makes durable.
    sealed: Option<Vec<u8>>,
    /// Places of names that the file may refer to: those of `durable` and `sealed`.
    names: [Option<(u64, u64)>; 2],
    changes: Changes,
    sealed_changes: Changes,
}

/// The changed parts of the header.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Changes {
    /// Where the refcount table stands.
    pub refcount_table: bool,
    /// Anything else.
    pub other: bool,
    /// A name was written into the page.
    pub name: bool,
}

/// The writes of the page in a round.
#[derive(Debug, Default)]
pub struct Writes {
    /// A name that nothing refers to.
    pub name: Option<MetaWrite>,
    /// When the refcount table is there: a header that points to it, and else is the old one.
    pub refcount_table: Option<MetaWrite>,
    /// When the L1 table is there: all of it.
    pub other: Option<MetaWrite>,
}

impl Head {
    /// The page of an image, as read.
    pub fn new(header: Header, page: Vec<u8>) -> Head {
        let Some(durable) = page.get(..512).map(<[u8]>::to_vec) else { unreachable!("a cluster has 512 bytes") };
        let names = [place(&header.raw), None];
        Head {
            header,
            page,
            durable,
            sealed: None,
            names,
            changes: Changes::default(),
            sealed_changes: Changes::default(),
        }
    }

    /// Pieces that a round would write.
    pub fn dirty(&self) -> usize {
        usize::from(self.changes != Changes::default())
    }

    /// Something other than the refcount table's place has changed in the header.
    pub fn changed(&mut self) {
        self.changes.other = true;
    }

    /// The refcount table stands elsewhere.
    pub fn move_refcount_table(&mut self, at: FileOffset, clusters: u32) {
        self.header.raw.refcount_table_at = at.0.into();
        self.header.raw.refcount_table_clusters = clusters.into();
        self.changes.refcount_table = true;
    }

    /// Clears the autoclear bits but for those in `kept`: this program does not keep up to date what they stand for.
    /// Returns the write to make before the first write of a guest, if any was set.
    pub fn clear_autoclear(&mut self, kept: u64) -> Option<MetaWrite> {
        let old = self.header.raw.autoclear.get();
        if old & !kept == 0 {
            return None;
        }
        self.header.raw.autoclear = (old & kept).into();
        // Should the caller forget it, the first round does not.
        self.changes.other = true;
        // In the file's own sector, so that nothing else of it changes.
        if let Some(field) = self.durable.get_mut(88..96) {
            field.copy_from_slice(&(old & kept).to_be_bytes());
        }
        Some(self.write(self.durable.clone()))
    }

    /// The write that puts a stamp into the header, in its first sector. `None` where the first sector has no room for
    /// it, and while a round has something to write there.
    pub fn set_stamp(&mut self, stamp: Stamp) -> Option<MetaWrite> {
        let busy = self.sealed.is_some() || self.changes != Changes::default();
        if busy || self.header.raw.version.get() < 3 {
            return None;
        }
        let mut header = self.header.clone();
        header.raw.autoclear = (header.raw.autoclear.get() | STAMP_VALID).into();
        let stamp = stamp.to_bytes().to_vec();
        match header.extensions.iter_mut().find(|extension| extension.kind == EXTENSION_STAMP) {
            Some(extension) => extension.data = stamp,
            None => header.set_extension(EXTENSION_STAMP, Some(stamp)),
        }
        let (list, sector) = header.first_sector_with_len().ok()?;
        // A backing name may stand right behind the extensions.
        let name_at = header.raw.backing_at.get();
        if name_at != 0 && name_at < list {
            return None;
        }
        let mut stamped = self.durable.clone();
        let end = if name_at == 0 { stamped.len() } else { index(name_at).min(stamped.len()) };
        stamped.get_mut(..end)?.copy_from_slice(sector.get(..end)?);
        header.extensions_end = list;
        (self.header, self.durable) = (header, stamped);
        Some(self.write(self.durable.clone()))
    }

    /// The stamp does not count any more, once the next round has ended.
    pub fn clear_stamp(&mut self) {
        if self.header.raw.autoclear.get() & STAMP_VALID == 0 {
            return;
        }
        self.header.raw.autoclear = (self.header.raw.autoclear.get() & !STAMP_VALID).into();
        self.changes.other = true;
    }

    /// Records another parent, or none.
    pub fn relink(&mut self, uuid: [u8; 16], parent: Option<&Link>) -> Result<(), ImageError> {
        let unsupported = |what: &str| Err(ImageError::new(ImageErrorKind::Unsupported, what));
        let name = parent.map(backing_name).unwrap_or_default().into_bytes();
        check_name(&name, parent.is_some())?;
        if length(self.page.len()) < PAGE {
            return unsupported("the parent of an image with clusters below 4 KiB cannot be changed");
        }
        let mut header = self.header.clone();
        record_parent(&mut header, uuid, parent);
        header.backing = name;
        let len = length(header.backing.len());
        let at = match self.free_place(len) {
            _ if len == 0 => 0,
            Some(at) => at,
            None => return unsupported("the first cluster has no room for the parent's name"),
        };
        header.raw.backing_at = at.into();
        header.raw.backing_len = in_32_bits(len, "BACKING_NAME_MAX").into();
        header.first_sector()?;
        if let Some(room) = self.page.get_mut(index(at)..index(at + len)).filter(|_| len > 0) {
            room.copy_from_slice(&header.backing);
            self.changes.name = true;
        }
        // Old extensions behind the first sector are not part of the new list.
        self.header = header;
        self.changes.other = true;
        Ok(())
    }

    /// A place for a name of `len` bytes that the file does not refer to.
    fn free_place(&self, len: u64) -> Option<u64> {
        NAME_PLACES.into_iter().find(|&at| {
            let clear =
                |&(other, size): &(u64, u64)| at.saturating_add(len) <= other || other.saturating_add(size) <= at;
            at >= self.header.extensions_end && self.names.iter().flatten().all(clear)
        })
    }

    /// The page with another first sector.
    fn write(&self, sector: Vec<u8>) -> MetaWrite {
        let mut bytes = self.page.clone();
        if let Some(place) = bytes.get_mut(..sector.len()) {
            place.copy_from_slice(&sector);
        }
        MetaWrite { at: FileOffset(0), bytes }
    }

    /// The first sector as it is to be. Only fields of the header change where the extensions have not, so that the
    /// extensions of other programs stay where they are.
    fn sector(&self) -> Vec<u8> {
        let mut sector = self.durable.clone();
        let fields = zerocopy::IntoBytes::as_bytes(&self.header.raw);
        let len = fields.len().min(index(self.header.raw.header_len.get().into()));
        for (place, &byte) in sector.iter_mut().zip(fields).take(len) {
            *place = byte;
        }
        if self.changes.other && self.relinked() {
            return self.header.first_sector().unwrap_or(sector);
        }
        sector
    }

    /// Whether the parent's name stands elsewhere than in the file.
    fn relinked(&self) -> bool {
        place(&self.header.raw) != self.names[0]
    }

    /// Begins a round.
    pub fn seal(&mut self) -> Writes {
        let mut writes = Writes::default();
        if self.changes == Changes::default() {
            return writes;
        }
        let sector = self.sector();
        writes.name = self.changes.name.then(|| self.write(self.durable.clone()));
        if self.changes.refcount_table {
            let mut only = self.durable.clone();
            // Bytes 48 to 60: offset and clusters of the refcount table.
            if let (Some(place), Some(new)) = (only.get_mut(48..60), sector.get(48..60)) {
                place.copy_from_slice(new);
            }
            writes.refcount_table = Some(self.write(only));
        }
        writes.other = self.changes.other.then(|| self.write(sector.clone()));
        self.sealed_changes = std::mem::take(&mut self.changes);
        self.names[1] = place(&self.header.raw);
        self.sealed = Some(sector);
        writes
    }

    /// Ends a round; what it did not make durable stays to be written.
    pub fn settled(&mut self, durable: bool) {
        let Some(sector) = self.sealed.take() else { return };
        let sealed = std::mem::take(&mut self.sealed_changes);
        if durable {
            self.durable = sector;
            self.names = [self.names[1], None];
        } else {
            // The sector may be in the file or not: its name stays where it is.
            self.changes.refcount_table |= sealed.refcount_table;
            self.changes.other |= sealed.other;
            self.changes.name |= sealed.name;
        }
    }
}

/// Where the backing name stands, and its length.
fn place(raw: &RawHeader) -> Option<(u64, u64)> {
    (raw.backing_at.get() != 0).then(|| (raw.backing_at.get(), raw.backing_len.get().into()))
}
