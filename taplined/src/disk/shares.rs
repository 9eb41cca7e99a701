//! The pages by which disks of a repository share its storage (docs/decisions/0051): created by the daemon, and
//! passed to the processes of its disks.
//!
//! It knows nothing about how they share. A page lives as long as a process has it open: the next daemon creates
//! another one and passes it to all processes that it finds. Invariant: the processes of a repository's disks have
//! the same page, or will have it as soon as each has answered.

use std::collections::HashMap;
use std::fs::File;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use api::{Code, Problem};
use control::{in_full, share};
use shares::Page;
use uuid::Uuid;

/// The pages, by repository.
#[derive(Debug, Default)]
pub struct Pages(Mutex<HashMap<Uuid, Arc<Page>>>);

impl Pages {
    /// The file of a repository's page, created on first use.
    pub fn file(&self, sr: Uuid, depth: u32) -> Result<File, Problem> {
        let failed = |error| Problem::failed("make the page by which disks share their storage", error);
        let mut pages = self.pages();
        let page = match pages.get(&sr) {
            Some(page) => page,
            None => {
                let page = Page::new(depth).map_err(|error| failed(std::io::Error::other(in_full(&error))))?;
                pages.entry(sr).or_insert_with(|| Arc::new(page))
            }
        };
        // The recorded depth may have changed.
        page.set_depth(depth);
        page.file().try_clone().map_err(failed)
    }

    /// Applies a repository's new depth.
    pub fn set_depth(&self, sr: Uuid, depth: u32) {
        if let Some(page) = self.pages().get(&sr) {
            page.set_depth(depth);
        }
    }

    /// Drops the contribution of a process that has exited.
    pub fn ended(&self, pid: u32) {
        self.forget_ended(Some(pid));
    }

    /// Finds exited processes and frees their slots.
    pub fn sweep(&self) {
        self.forget_ended(None);
    }

    fn forget_ended(&self, pid: Option<u32>) {
        let pages: Vec<Arc<Page>> = self.pages().values().cloned().collect();
        pages.iter().for_each(|page| page.forget_ended(pid));
    }

    fn pages(&self) -> MutexGuard<'_, HashMap<Uuid, Arc<Page>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Validates the weight of a disk.
pub fn checked_weight(weight: u32) -> Result<u32, Problem> {
    share::check_weight(weight).map(|()| weight).map_err(invalid)
}

/// Validates the depth of a repository.
pub fn checked_depth(depth: u32) -> Result<(), Problem> {
    share::check_depth(depth).map_err(|error| invalid(error).field("share_depth"))
}

fn invalid(error: control::Error) -> Problem {
    Problem { advice: error.advice, ..Problem::new(Code::Invalid, error.message) }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn a_repository_has_one_page_whose_depth_can_change() {
        use std::os::unix::fs::MetadataExt;
        let (pages, sr) = (Pages::default(), Uuid::new_v4());
        let inode = |sr, depth| pages.file(sr, depth).unwrap().metadata().unwrap().ino();
        assert_eq!(inode(sr, 64), inode(sr, 32));
        assert_ne!(inode(sr, 32), inode(Uuid::new_v4(), 32));
        let page = Page::open(pages.file(sr, 32).unwrap()).unwrap();
        assert_eq!(page.depth(), Some(32));
        pages.set_depth(sr, 8);
        assert_eq!(page.depth(), Some(8));
    }

    #[test]
    fn numbers_are_the_same_in_the_api_and_for_processes() {
        assert_eq!((api::SHARE_WEIGHT, api::SHARE_DEPTH), (share::WEIGHT, share::DEPTH));
        assert_eq!((shares::WEIGHT, shares::DEPTH), (share::WEIGHT, share::DEPTH));
        assert_eq!((shares::WEIGHTS, shares::DEPTHS), (share::WEIGHTS, share::DEPTHS));
        assert_eq!(checked_depth(0).unwrap_err().field.as_deref(), Some("share_depth"));
        assert_eq!(checked_weight(10_001).unwrap_err().code, Code::Invalid);
    }
}
