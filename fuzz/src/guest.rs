//! A guest of a disk over storage in memory, for the fuzz targets of image formats: one request at a time.
//!
//! Invariants checked: every request is answered exactly once, and nothing is left under way behind it.

use disk::{Disk, DiskOffset, Image, Io, Operation, Request, Span, Status, Token, Until};
use memory::Segments;

use super::storage::{Engine, Sparse};

/// A disk and its storage.
pub struct Guest {
    /// The disk.
    pub disk: Disk<Image>,
    /// Its storage.
    pub engine: Engine,
}

impl Guest {
    /// A guest of `disk`, whose files these are, leaf first.
    pub fn new(disk: Disk<Image>, files: Vec<Sparse>) -> Guest {
        Guest { disk, engine: Engine::new(files) }
    }

    /// The leaf's file, as it is now.
    pub fn leaf(&self) -> &Sparse {
        &self.engine.files[0]
    }

    /// One request, from submission to its one answer; `None` for one that is refused at the door.
    pub fn ask(&mut self, operation: Operation, span: Span, memory: Segments) -> Option<Status> {
        let geometry = self.disk.geometry();
        let request = Request::new(operation, span, memory, Token(1), &geometry).ok()?;
        self.disk.submit(request, &mut self.engine);
        let mut done = Vec::new();
        while !self.engine.is_idle() {
            self.engine.reap(Until::Now, &mut done).expect("an engine of memory");
            done.drain(..).for_each(|done| self.disk.settle(done, &mut self.engine));
        }
        let (answered, status) = self.disk.answer().expect("an answer");
        answered.retire();
        assert!(self.disk.answer().is_none(), "a second answer");
        assert!(self.disk.is_idle());
        Some(status)
    }

    /// Makes durable what was written.
    pub fn flush(&mut self) -> Option<Status> {
        self.ask(Operation::Flush, Span { at: DiskOffset(0), len: 0 }, Segments::empty())
    }
}
