//! What is in a front end's pages, and descriptors that name them.
//!
//! Knows nothing of what is asked with them.

use memory::Shared;
use xen::GrantRef;
use xen::kernel::Offered;

use crate::entry::segments;

/// Fills all pages with a byte.
pub fn fill(bytes: &Shared, byte: u8) {
    (0..bytes.len() / 4096).for_each(|page| bytes.write(page * 4096, [byte; 4096]).unwrap());
}

/// Writes bytes from the beginning of the pages on; a whole number of sectors.
pub fn put(bytes: &Shared, content: &[u8]) {
    for (at, sector) in content.chunks(512).enumerate() {
        bytes.write::<512>(at * 512, sector.try_into().unwrap()).unwrap();
    }
}

/// The first bytes of the pages; a whole number of sectors.
pub fn get(bytes: &Shared, len: usize) -> Vec<u8> {
    (0..len / 512).flat_map(|sector| bytes.read::<512>(sector * 512).unwrap()).collect()
}

/// A segment of each page, whole.
pub fn whole(pages: &[GrantRef]) -> Vec<(GrantRef, u8, u8)> {
    pages.iter().map(|&page| (page, 0, 7)).collect()
}

/// Writes descriptors into the pages, from the first byte on.
pub fn describe(list: &Offered, parts: &[(GrantRef, u8, u8)]) {
    for (at, descriptor) in segments(parts).chunks(8).enumerate() {
        list.bytes.write::<8>(at * 8, descriptor.try_into().unwrap()).unwrap();
    }
}
