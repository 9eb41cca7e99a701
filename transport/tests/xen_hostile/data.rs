//! The contents of a front end's pages, and descriptors of them.
//!
//! It knows nothing about the requests.

use memory::Shared;
use xen::GrantRef;
use xen::kernel::GrantedPages;

use crate::entry::segments;

/// Fills all pages with a byte.
pub fn fill(bytes: &Shared, byte: u8) {
    (0..bytes.len() / 4096).for_each(|page| bytes.write(page * 4096, [byte; 4096]).unwrap());
}

/// Writes bytes to the start of the pages; a whole number of sectors.
pub fn put(bytes: &Shared, content: &[u8]) {
    for (at, sector) in content.chunks(512).enumerate() {
        bytes.write::<512>(at * 512, sector.try_into().unwrap()).unwrap();
    }
}

/// The first bytes of the pages; a whole number of sectors.
pub fn get(bytes: &Shared, len: usize) -> Vec<u8> {
    (0..len / 512).flat_map(|sector| bytes.read::<512>(sector * 512).unwrap()).collect()
}

/// A segment for each whole page.
pub fn whole(pages: &[GrantRef]) -> Vec<(GrantRef, u8, u8)> {
    pages.iter().map(|&page| (page, 0, 7)).collect()
}

/// Writes descriptors to the start of the pages.
pub fn describe(list: &GrantedPages, parts: &[(GrantRef, u8, u8)]) {
    for (at, descriptor) in segments(parts).chunks(8).enumerate() {
        list.bytes.write::<8>(at * 8, descriptor.try_into().unwrap()).unwrap();
    }
}
