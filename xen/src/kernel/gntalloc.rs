//! Grants pages of ours to another domain, through `/dev/xen/gntalloc`.
//!
//! A back end does not need it; it serves front ends in user space, and test guests for a back end on real Xen. It
//! knows nothing about the contents of the pages. Invariant: a grant is revoked when its pages are no longer mapped
//! here; if another domain still has it mapped, the kernel revokes it when that domain unmaps it.

use std::io;
use std::mem::size_of;
use std::os::fd::AsFd;
use std::sync::Arc;

use memory::{Mapping, Shared};
use rustix::ioctl::Opcode;

use super::gntdev::pair;
use super::{Device, code};
use crate::{DomId, GrantRef, PAGE};

const DEVICE: &str = "/dev/xen/gntalloc";

/// `struct ioctl_gntalloc_dealloc_gref`.
#[repr(C)]
struct Dealloc {
    index: u64,
    count: u32,
    pad: u32,
}

/// `struct ioctl_gntalloc_alloc_gref` with its one reference; more may follow.
const ALLOC_GREF: Opcode = code(b'G', 5, 24);
const DEALLOC_GREF: Opcode = code(b'G', 6, size_of::<Dealloc>());
// The values of the header's macros on x86 and ARM.
const _: () = assert!(ALLOC_GREF == 0x0018_4705 && DEALLOC_GREF == 0x0010_4706);

/// `GNTALLOC_FLAG_WRITABLE`, in the flags after the domain.
const WRITABLE: u32 = 1 << 16;

/// Allocates granted pages.
pub struct Gntalloc {
    device: Arc<Device>,
}

/// Pages that are contiguous here, each granted. Dropping this revokes the grants.
pub struct GrantedPages {
    /// The grant of each page, in order.
    pub pages: Vec<GrantRef>,
    /// The bytes of all pages. Holding on to them keeps them granted.
    pub bytes: Shared,
}

impl Gntalloc {
    /// Opens the device.
    pub fn open() -> io::Result<Gntalloc> {
        Ok(Gntalloc { device: Arc::new(Device::open(DEVICE)?) })
    }

    /// Grants `count` zeroed pages to `domain`. The kernel module limits the total (its parameter `limit`).
    pub fn grant(&self, domain: DomId, count: u32, read_only: bool) -> io::Result<GrantedPages> {
        let failed = |source: io::Error| self.device.failed(format!("cannot grant {count} pages to {domain}"), source);
        let pages = usize::try_from(count).map_err(|_| io::ErrorKind::InvalidInput)?;
        // The domain with the flags and the count, where the index will be returned, and room for two references in
        // each number.
        let flags = if read_only { 0 } else { WRITABLE };
        let mut call = vec![0; 2 + pages.div_ceil(2).max(1)];
        call[0] = pair(u32::from(domain.0) | flags, count);
        // SAFETY: the structure of this call, followed by room for as many references as it says.
        let result = unsafe { self.device.call::<ALLOC_GREF, [u64]>(&mut call) };
        result.map_err(|errno| failed(errno.into()))?;
        let grants = call.iter().skip(2).flat_map(|&number| halves(number)).take(pages).map(GrantRef).collect();
        let index = call.get(1).copied().unwrap_or_default();
        // Dropped after the mapping, and also if mapping fails.
        let device_grants = DeviceGrants { device: self.device.clone(), index, count };
        let mapping = Mapping::of_file(self.device.as_fd(), index, pages * PAGE).map_err(failed)?;
        let (base, len) = (mapping.base(), mapping.len());
        // SAFETY: the whole mapping, which the value holds and which is writable.
        let bytes = unsafe { Shared::new(Arc::new((mapping, device_grants)), base, len) };
        Ok(GrantedPages { pages: grants, bytes })
    }
}

/// Grants registered with the device.
struct DeviceGrants {
    device: Arc<Device>,
    index: u64,
    count: u32,
}

impl Drop for DeviceGrants {
    fn drop(&mut self) {
        let mut dealloc = Dealloc { index: self.index, count: self.count, pad: 0 };
        // SAFETY: the structure of this call.
        let result = unsafe { self.device.call::<DEALLOC_GREF, _>(&mut dealloc) };
        debug_assert!(result.is_ok(), "the device does not know its own grants");
    }
}

fn halves(number: u64) -> [u32; 2] {
    let [a, b, c, d, e, f, g, h] = number.to_ne_bytes();
    [u32::from_ne_bytes([a, b, c, d]), u32::from_ne_bytes([e, f, g, h])]
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn pair_and_halves_are_inverse() {
        assert_eq!(halves(pair(7, u32::MAX)), [7, u32::MAX]);
    }
}
