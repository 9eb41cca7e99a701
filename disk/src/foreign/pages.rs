//! Pages of tables, as many as are kept.
//!
//! Knows nothing of what is in them. Keeps: no more than [`KEPT_MAX`] of them, those that came last.

use std::collections::VecDeque;

use rustc_hash::FxHashMap;

use crate::FileOffset;
use crate::format::{MetaBlock, Wait};

/// Pages that are kept, of at most 4 KiB: tables of 128 GiB of the usual VMDK.
const KEPT_MAX: usize = 1024;

/// Pages of tables.
#[derive(Debug, Default)]
pub struct Pages {
    pages: FxHashMap<FileOffset, Box<[u8]>>,
    /// As they came.
    arrivals: VecDeque<FileOffset>,
}

impl Pages {
    /// The page of these bytes.
    pub fn get(&self, block: MetaBlock) -> Result<&[u8], Wait> {
        self.pages.get(&block.at).map(|page| &**page).ok_or(Wait::Load(block))
    }

    /// A page that was waited for.
    pub fn load(&mut self, block: MetaBlock, bytes: &[u8]) {
        if self.pages.insert(block.at, bytes.into()).is_none() {
            self.arrivals.push_back(block.at);
        }
        while self.arrivals.len() > KEPT_MAX {
            if let Some(oldest) = self.arrivals.pop_front() {
                self.pages.remove(&oldest);
            }
        }
    }

    /// Drops all pages; they are loaded again when needed.
    pub fn clear(&mut self) {
        *self = Pages::default();
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn the_last_pages_are_kept() {
        let block = |n: usize| MetaBlock { at: FileOffset(4096 * u64::try_from(n).unwrap()), len: 4096 };
        let mut pages = Pages::default();
        assert_eq!(pages.get(block(0)), Err(Wait::Load(block(0))));
        (0..=KEPT_MAX).for_each(|n| pages.load(block(n), &[7; 4096]));
        assert_eq!(pages.get(block(0)), Err(Wait::Load(block(0))));
        assert_eq!(pages.get(block(KEPT_MAX)), Ok(&[7; 4096][..]));
        assert_eq!(pages.pages.len(), KEPT_MAX);
    }
}
