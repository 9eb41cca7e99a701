//! The configuration space of the virtio-blk device: size, limits and features, as seen by the driver.
//!
//! It knows nothing about messages. Invariant: every limit shown here is enforced on requests.
//!
//! Specification: virtio 1.2, 5.2.3 "Feature bits" and 5.2.4 "Device configuration layout".

use disk::Geometry;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{Immutable, IntoBytes};

use super::request::{MAX_RANGE_SECTORS, MAX_RANGES, SECTOR};

const SEG_MAX: u64 = 1 << 2;
const GEOMETRY: u64 = 1 << 4;
const RO: u64 = 1 << 5;
const BLK_SIZE: u64 = 1 << 6;
/// The driver can flush; without this feature writes are durable (virtio 1.2, 5.2.6.2).
pub const FLUSH: u64 = 1 << 9;
const TOPOLOGY: u64 = 1 << 10;
const MQ: u64 = 1 << 12;
const DISCARD: u64 = 1 << 13;
const WRITE_ZEROES: u64 = 1 << 14;
const RING_INDIRECT_DESC: u64 = 1 << 28;
/// VHOST_F_LOG_ALL: every write to guest memory is logged. Not a feature of the device: the front-end sets it during a
/// migration, while rings run.
pub const LOG_ALL: u64 = 1 << 26;
/// Notifications and interrupts by event index.
pub const RING_EVENT_IDX: u64 = 1 << 29;
/// The front-end negotiates protocol features, and enables rings itself.
pub const PROTOCOL_FEATURES: u64 = 1 << 30;
const VERSION_1: u64 = 1 << 32;

/// The maximum number of data segments in one request: with header and status, a ring of 128, QEMU's default.
const SEGMENTS: u32 = 126;

#[repr(C)]
#[derive(IntoBytes, Immutable)]
struct ConfigLayout {
    capacity: U64,
    size_max: U32,
    seg_max: U32,
    cylinders: U16,
    heads: u8,
    sectors: u8,
    blk_size: U32,
    physical_block_exp: u8,
    alignment_offset: u8,
    min_io_size: U16,
    opt_io_size: U32,
    writeback: u8,
    unused0: u8,
    num_queues: U16,
    max_discard_sectors: U32,
    max_discard_seg: U32,
    discard_sector_alignment: U32,
    max_write_zeroes_sectors: U32,
    max_write_zeroes_seg: U32,
    write_zeroes_may_unmap: u8,
    unused1: [u8; 3],
}
const _: () = assert!(size_of::<ConfigLayout>() == 60);

/// The features offered for a disk.
pub fn features(geometry: &Geometry, queues: u16) -> u64 {
    let ring = RING_INDIRECT_DESC | RING_EVENT_IDX | PROTOCOL_FEATURES | VERSION_1 | LOG_ALL;
    let mut bits = ring | SEG_MAX | BLK_SIZE | FLUSH | TOPOLOGY;
    bits |= if geometry.read_only { RO } else { DISCARD | WRITE_ZEROES };
    if geometry.chs.is_some() {
        bits |= GEOMETRY;
    }
    if queues > 1 {
        bits |= MQ;
    }
    bits
}

/// The contents of a disk's configuration space.
pub fn bytes(geometry: &Geometry, queues: u16) -> Vec<u8> {
    let (cylinders, heads, sectors) = geometry.chs.unwrap_or_default();
    // Both are powers of two; a physical block is never smaller than a logical one.
    let per_physical = geometry.physical_block.checked_div(geometry.block).unwrap_or(1).max(1);
    let Ok(physical_block_exp) = u8::try_from(per_physical.ilog2()) else { unreachable!("a number of 32 bits") };
    let discard_sectors = u64::from(geometry.discard) / SECTOR;
    let writable = u32::from(!geometry.read_only);
    let layout = ConfigLayout {
        capacity: (geometry.len / SECTOR).into(),
        // SIZE_MAX is not offered: a segment may have any length.
        size_max: 0.into(),
        seg_max: SEGMENTS.into(),
        cylinders: cylinders.into(),
        heads,
        sectors,
        blk_size: geometry.block.into(),
        physical_block_exp,
        alignment_offset: 0,
        min_io_size: u16::try_from(per_physical).unwrap_or(1).into(),
        opt_io_size: 0.into(),
        // There is a write cache that can be flushed, but not switched off (CONFIG_WCE is not offered).
        writeback: 1,
        unused0: 0,
        num_queues: queues.into(),
        max_discard_sectors: (MAX_RANGE_SECTORS * writable).into(),
        max_discard_seg: (u32::from(MAX_RANGES) * writable).into(),
        discard_sector_alignment: u32::try_from(discard_sectors).unwrap_or(1).into(),
        max_write_zeroes_sectors: (MAX_RANGE_SECTORS * writable).into(),
        max_write_zeroes_seg: (u32::from(MAX_RANGES) * writable).into(),
        write_zeroes_may_unmap: 1,
        unused1: [0; 3],
    };
    layout.as_bytes().to_vec()
}

#[cfg(test)]
mod test {
    use super::*;

    const DISK: Geometry = Geometry {
        len: 1 << 30,
        block: 512,
        physical_block: 4096,
        discard: 2 << 20,
        chs: Some((100, 16, 63)),
        read_only: false,
    };

    #[test]
    fn the_layout_matches_the_specification() {
        let space = bytes(&DISK, 4);
        assert_eq!(space[..8], (2u64 << 20).to_le_bytes(), "capacity");
        assert_eq!(space[12..16], 126u32.to_le_bytes(), "seg_max");
        assert_eq!(space[16..20], [100, 0, 16, 63], "geometry");
        assert_eq!(space[20..24], 512u32.to_le_bytes(), "blk_size");
        assert_eq!(space[24], 3, "physical_block_exp");
        assert_eq!(space[34..36], 4u16.to_le_bytes(), "num_queues");
        assert_eq!(space[44..48], 4096u32.to_le_bytes(), "discard_sector_alignment");
        assert_eq!(space[56], 1, "write_zeroes_may_unmap");
    }

    #[test]
    fn a_read_only_disk_offers_no_write_features() {
        let read_only = Geometry { read_only: true, chs: None, ..DISK };
        let offered = features(&read_only, 1);
        assert_eq!(offered & (DISCARD | WRITE_ZEROES | MQ | GEOMETRY), 0);
        assert_ne!(offered & RO, 0);
        assert_eq!(bytes(&read_only, 1)[36..44], [0; 8]);
    }
}
