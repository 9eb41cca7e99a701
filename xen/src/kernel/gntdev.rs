//! Grants through `/dev/xen/gntdev`.
//!
//! It knows nothing about the contents of the pages. Invariant: a mapping's references leave the device after its
//! addresses are gone, also when creating it fails half way. A notification of the guest when a page is unmapped
//! (SET_UNMAP_NOTIFY) is not requested: front ends watch the store, and the kernel unmaps the pages of a process that
//! dies.

use std::io;
use std::mem::{offset_of, size_of};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use memory::Mapping;
use rustix::ioctl::Opcode;

use super::{Device, code};
use crate::grant::Entry;
use crate::{Copied, CopyBatch, Direction, DomId, GrantRef, Granted, Grants, PAGE, PageRange};

const DEVICE: &str = "/dev/xen/gntdev";

/// `struct ioctl_gntdev_unmap_grant_ref`.
#[repr(C)]
struct Unmap {
    index: u64,
    count: u32,
    pad: u32,
}

/// `struct ioctl_gntdev_grant_copy`.
#[repr(C)]
struct CopyCall {
    count: u32,
    segments: *mut CopySegment,
}

/// `struct gntdev_grant_copy_segment`.
#[repr(C)]
struct CopySegment {
    source: CopyEnd,
    dest: CopyEnd,
    len: u16,
    flags: u16,
    status: i16,
}

/// One end of a copy. The flags of the segment say which kind it is.
#[repr(C)]
union CopyEnd {
    /// The address in our memory.
    ours: u64,
    theirs: Foreign,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Foreign {
    page: u32,
    offset: u16,
    domid: u16,
}

const _: () = assert!(size_of::<Unmap>() == 16 && size_of::<CopyEnd>() == 8 && size_of::<*mut CopySegment>() == 8);
const _: () = assert!(size_of::<CopyCall>() == 16 && offset_of!(CopyCall, segments) == 8);
const _: () = assert!(size_of::<CopySegment>() == 24 && offset_of!(CopySegment, len) == 16);
const _: () = assert!(offset_of!(CopySegment, flags) == 18 && offset_of!(CopySegment, status) == 20);

/// `struct ioctl_gntdev_map_grant_ref` with its one reference; more may follow.
const MAP_GRANT_REF: Opcode = code(b'G', 0, 24);
const UNMAP_GRANT_REF: Opcode = code(b'G', 1, size_of::<Unmap>());
const GRANT_COPY: Opcode = code(b'G', 8, size_of::<CopyCall>());
// The values of the header's macros on x86 and ARM.
const _: () = assert!(MAP_GRANT_REF == 0x0018_4700 && UNMAP_GRANT_REF == 0x0010_4701 && GRANT_COPY == 0x0010_4708);

/// Which end of a copy is a grant (`GNTCOPY_*`).
const SOURCE_IS_GRANT: u16 = 1;
const DEST_IS_GRANT: u16 = 2;

/// The status of a successful copy (`GNTST_okay`).
const OKAY: i16 = 0;

/// The grants that guests have made to the domain that this process runs in.
pub struct Gntdev {
    device: Arc<Device>,
    /// Segments of the current batch; kept for their allocation.
    segments: Vec<CopySegment>,
    /// How many segments each entry of the batch became.
    counts: Vec<usize>,
}

impl Gntdev {
    /// Opens the device.
    pub fn open() -> io::Result<Gntdev> {
        Device::open(DEVICE).map(|device| Gntdev::from_fd(device.fd))
    }

    /// Uses a device opened by another process: for this process alone, since its mappings count for everyone who has
    /// it open.
    pub fn from_fd(device: OwnedFd) -> Gntdev {
        let device = Arc::new(Device { name: DEVICE, fd: device });
        Gntdev { device, segments: Vec::new(), counts: Vec::new() }
    }

    /// Opens the device for a process that cannot do so itself.
    pub fn open_fd() -> io::Result<OwnedFd> {
        Device::open(DEVICE).map(|device| device.fd)
    }
}

impl Grants for Gntdev {
    fn copy(&mut self, domain: DomId, batch: &mut CopyBatch) -> io::Result<()> {
        batch.reset_results();
        self.segments.clear();
        self.counts.clear();
        let mut ranges = batch.ranges.as_slice();
        for entry in &batch.entries {
            let (now, later) = ranges.split_at_checked(entry.ranges).unwrap_or((ranges, &[]));
            ranges = later;
            let before = self.segments.len();
            push_segments(&mut self.segments, domain, entry, now);
            self.counts.push(self.segments.len() - before);
        }
        if !self.segments.is_empty() {
            let count = u32::try_from(self.segments.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
            let mut call = CopyCall { count, segments: self.segments.as_mut_ptr() };
            // SAFETY: the structure of this call, with the address and number of our segments. Each has the address and
            // at most the length of memory that the batch holds.
            let result = unsafe { self.device.call::<GRANT_COPY, _>(&mut call) };
            result.map_err(|error| {
                self.device.failed(format!("cannot copy {count} page ranges of domain {domain}"), error)
            })?;
        }
        let mut segments = self.segments.as_slice();
        for (entry, &count) in batch.entries.iter_mut().zip(&self.counts) {
            let (now, later) = segments.split_at_checked(count).unwrap_or((segments, &[]));
            segments = later;
            // The kernel itself retries while a page is paged out (GNTST_eagain): a refusal here is final.
            let refused = now.iter().map(|segment| segment.status).find(|&status| status != OKAY);
            entry.copied = refused.map_or(Copied::All, Copied::Refused);
        }
        Ok(())
    }

    fn map(&mut self, domain: DomId, pages: &[GrantRef], read_only: bool) -> io::Result<Arc<Granted>> {
        let count = u32::try_from(pages.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
        let failed = |source: io::Error| {
            let which = if read_only { "to read " } else { "" };
            self.device
                .failed(format!("cannot map {count} pages of domain {domain} {which}from {:?}", pages.first()), source)
        };
        // The count, where the index will be returned, and the references, each preceded by the domain.
        let mut call = vec![pair(count, 0), 0];
        call.extend(pages.iter().map(|page| pair(u32::from(domain.0), page.0)));
        // SAFETY: the structure of this call, followed by as many references as it says.
        let result = unsafe { self.device.call::<MAP_GRANT_REF, [u64]>(&mut call) };
        result.map_err(|errno| failed(errno.into()))?;
        let index = call.get(1).copied().unwrap_or_default();
        // Dropped after the mapping, and also if mapping fails.
        let device_mapping = DeviceMapping { device: self.device.clone(), index, count };
        let len = pages.len() * PAGE;
        // The kernel requests from the hypervisor the access of the mapping: a page granted read-only can only be
        // mapped read-only.
        let mapping = match read_only {
            true => Mapping::of_file_to_read(self.device.as_fd(), index, len),
            false => Mapping::of_file(self.device.as_fd(), index, len),
        };
        let mapping = mapping.map_err(failed)?;
        Ok(Arc::new(Granted::new(mapping, read_only, Box::new(device_mapping))))
    }
}

/// References that the device holds for a mapping.
struct DeviceMapping {
    device: Arc<Device>,
    index: u64,
    count: u32,
}

impl Drop for DeviceMapping {
    fn drop(&mut self) {
        let mut unmap = Unmap { index: self.index, count: self.count, pad: 0 };
        // SAFETY: the structure of this call; the addresses were unmapped before.
        let result = unsafe { self.device.call::<UNMAP_GRANT_REF, _>(&mut unmap) };
        debug_assert!(result.is_ok(), "the device does not know its own mapping");
    }
}

/// Appends the copies that `entry` consists of: a new one begins wherever a range, or a part of our memory, begins.
fn push_segments(segments: &mut Vec<CopySegment>, domain: DomId, entry: &Entry, ranges: &[PageRange]) {
    let mut parts = entry.memory.parts().iter().map(|part| (part.base(), part.len()));
    let (mut base, mut room) = (std::ptr::null_mut::<u8>(), 0);
    for range in ranges {
        let (mut offset, mut left) = (range.from, range.len);
        while left > 0 {
            if room == 0 {
                // A batch accepts no entry with fewer bytes of memory than of ranges.
                let Some(part) = parts.next() else { return };
                (base, room) = part;
            }
            let len = left.min(u16::try_from(room).unwrap_or(u16::MAX));
            let ours = CopyEnd { ours: u64::try_from(base.expose_provenance()).unwrap_or_default() };
            let theirs = CopyEnd { theirs: Foreign { page: range.page.0, offset, domid: domain.0 } };
            let (source, dest, flags) = match entry.direction {
                Direction::FromGuest => (theirs, ours, SOURCE_IS_GRANT),
                Direction::ToGuest => (ours, theirs, DEST_IS_GRANT),
            };
            segments.push(CopySegment { source, dest, len, flags, status: OKAY });
            base = base.wrapping_add(usize::from(len));
            room -= usize::from(len);
            offset += len;
            left -= len;
        }
    }
}

/// Packs two fields of a structure that is passed as 64-bit numbers.
pub(super) fn pair(first: u32, second: u32) -> u64 {
    let [a, b, c, d] = first.to_ne_bytes();
    let [e, f, g, h] = second.to_ne_bytes();
    u64::from_ne_bytes([a, b, c, d, e, f, g, h])
}

#[cfg(test)]
mod test {
    use memory::{Buffer, Segments};

    use super::*;

    fn range(page: u32, from: u16, len: u16) -> PageRange {
        PageRange { page: GrantRef(page), from, len }
    }

    /// Byte offset in memory, page, page offset, length, flags.
    fn described(segments: &[CopySegment], base: *mut u8) -> Vec<(usize, u32, u16, u16, u16)> {
        let one = |segment: &CopySegment| {
            // SAFETY: every bit pattern is valid for either kind of end.
            let (source, dest) =
                unsafe { ((segment.source.ours, segment.source.theirs), (segment.dest.ours, segment.dest.theirs)) };
            let (ours, theirs) = if segment.flags == SOURCE_IS_GRANT { (dest.0, source.1) } else { (source.0, dest.1) };
            let at = usize::try_from(ours).unwrap() - base.addr();
            assert_eq!(theirs.domid, 3);
            (at, theirs.page, theirs.offset, segment.len, segment.flags)
        };
        segments.iter().map(one).collect()
    }

    #[test]
    fn an_entry_is_split_at_range_and_memory_boundaries() {
        let buffer = Buffer::zeroed(8192);
        let base = buffer.base();
        // SAFETY: both parts are within the buffer, which the list owns.
        let memory = unsafe { Segments::new(buffer, [(base, 600), (base.wrapping_add(4096), 1448)]) };
        let ranges = [range(7, 512, 512), range(8, 0, 1536)];
        let mut batch = CopyBatch::default();
        assert_eq!(batch.push(Direction::FromGuest, memory.clone(), &ranges), Some(0));
        assert_eq!(batch.push(Direction::ToGuest, memory.slice(0, 600), &[range(9, 4096 - 600, 600)]), Some(1));
        let mut segments = Vec::new();
        push_segments(&mut segments, DomId(3), &batch.entries[0], &batch.ranges[..2]);
        push_segments(&mut segments, DomId(3), &batch.entries[1], &batch.ranges[2..]);
        assert_eq!(
            described(&segments, base),
            [(0, 7, 512, 512, 1), (512, 8, 0, 88, 1), (4096, 8, 88, 1448, 1), (0, 9, 3496, 600, 2)]
        );
    }
}
