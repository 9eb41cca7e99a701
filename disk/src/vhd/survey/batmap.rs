//! The batmap of the Xen tools: read, held against its sum, and written.

use zerocopy::{FromBytes, IntoBytes};

use super::super::layout::{BATMAP_COOKIE, BATMAP_VERSION, RawBatmapHeader, SECTOR, checksum};
use super::{Survey, index, read};
use crate::{FileOffset, ImageError, ImageErrorKind, MetaWrite, Severity, Source};

/// The block allocation table's companion of the Xen tools: which blocks have every sector written.
#[derive(Clone, Debug)]
pub struct Batmap {
    /// Its header.
    pub header: RawBatmapHeader,
    /// Offset of the header in the file.
    pub header_at: FileOffset,
    /// One bit a block, most significant first.
    pub bits: Vec<u8>,
    /// Whether the checksum matched; otherwise `bits` are all zero.
    pub sound: bool,
}

impl Survey {
    /// The batmap stands right behind the table in images whose creator is one of the Xen tools.
    pub(super) fn read_batmap(
        &mut self,
        source: &mut dyn Source,
        at: FileOffset,
        blocks: u64,
    ) -> Result<Option<Batmap>, ImageError> {
        let by_xen_tools =
            self.footer.creator_app.starts_with(b"tap") && self.footer.creator_version.get() > 0x0000_0001;
        if !by_xen_tools || at.saturating_add(SECTOR).0 > self.file_len {
            return Ok(None);
        }
        let bytes = read(source, at, 512, "batmap header")?;
        let Ok(header) = RawBatmapHeader::read_from_bytes(&bytes) else { return Ok(None) };
        if header.cookie != BATMAP_COOKIE {
            return Ok(None);
        }
        if header.key_cookie != 0 {
            return Err(ImageError::at(
                ImageErrorKind::Unsupported,
                at,
                "the image is encrypted, which Tapline cannot read",
            ));
        }
        let len = u64::from(header.size.get()) * SECTOR;
        let map_at = FileOffset(header.offset.get());
        let fits =
            map_at >= at.saturating_add(SECTOR) && map_at.checked_add(len).is_some_and(|end| end.0 <= self.file_len);
        // 2 TiB in blocks of 512 KiB are 4 Mi bits; a larger map is not one.
        let plausible = fits && map_at % SECTOR == 0 && len * 8 >= blocks && len <= 1 << 20;
        let bits = if plausible { read(source, map_at, index(len), "batmap")? } else { Vec::new() };
        // libvhd reads, and sums up, what a disk of this size needs in blocks of 2 MiB; the rest may be anything.
        let summed = (self.footer.current_size.get() >> 24).div_ceil(SECTOR).max(1) * SECTOR;
        let known = bits.get(..index(summed)).unwrap_or(&bits);
        let matches = |bits: &[u8]| checksum(bits) == header.checksum.get();
        let sound = plausible && header.version.get() == BATMAP_VERSION && (matches(&bits) || matches(known));
        let bits = if matches(&bits) { bits } else { [known, &vec![0; bits.len() - known.len()]].concat() };
        if !sound {
            self.note(Severity::Repairable, at, "the batmap does not match its checksum and is not used".into());
        }
        let bits = if sound { bits } else { vec![0; if plausible { index(len) } else { 0 }] };
        if plausible && !sound {
            self.repairs.extend(batmap_writes(&header, at, &bits));
        }
        Ok(plausible.then_some(Batmap { header, header_at: at, bits, sound }))
    }
}

/// The writes that put a batmap and its header into the file.
pub fn batmap_writes(header: &RawBatmapHeader, header_at: FileOffset, bits: &[u8]) -> Vec<MetaWrite> {
    let header = RawBatmapHeader { checksum: checksum(bits).into(), version: BATMAP_VERSION.into(), ..*header };
    let map = MetaWrite { at: FileOffset(header.offset.get()), bytes: bits.to_vec() };
    vec![map, MetaWrite { at: header_at, bytes: header.as_bytes().to_vec() }]
}
