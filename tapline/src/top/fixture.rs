//! Statistics pages for tests, with requests of given durations.

use std::fs::File;
use std::path::{Path, PathBuf};

use stats::{Kind, Outcome, Page, Reader, Snapshot, Source, Spent};

/// A millisecond in nanoseconds.
pub const MS: u64 = 1_000_000;
/// A second in nanoseconds.
pub const SECOND: u64 = 1_000_000_000;

/// A page and its writer.
pub struct Written {
    /// The path of the page.
    pub path: PathBuf,
    /// The writer of the page.
    pub page: Page,
}

impl Written {
    /// Creates a page at this path, including its directories.
    pub fn at(path: PathBuf, image: &str) -> Written {
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        let identity = serde_json::json!({
            "image": image,
            "transport": "vhost-user",
            "at": "/run/vm.sock",
            "control": null,
            "program": "0.1.0",
        });
        let page = Page::begin(open(&path), Source::Counter, &identity.to_string()).unwrap();
        Written { path, page }
    }

    /// Records requests that took a millisecond before they were submitted, and `storage` nanoseconds with the storage.
    pub fn ended(&mut self, kind: Kind, count: u64, bytes: u64, storage: u64) {
        for _ in 0..count {
            let slot = self.page.came(kind, SECOND, 0, bytes);
            let spent = Spent {
                seen: SECOND,
                taken: SECOND,
                begun: SECOND + MS,
                ended: SECOND + MS + storage,
                ..Spent::default()
            };
            self.page.ended(kind, slot, bytes, Outcome::Done, &spent, spent.ended);
            self.page.publish_batch(spent.ended);
        }
    }

    /// The page's counters, as if read at this time.
    pub fn read_at(&self, read: u64) -> Snapshot {
        let mut snapshot = Reader::open(&self.path).unwrap().snapshot().unwrap();
        snapshot.read = read;
        snapshot
    }
}

/// Opens or creates a page's file for its writer.
pub fn open(path: &Path) -> File {
    File::options().read(true).write(true).create(true).truncate(false).open(path).unwrap()
}
