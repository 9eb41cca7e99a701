//! Reads the content of a chain that no disk uses.
//!
//! Knows nothing about the expected content.

use std::ops::Range;

use disk::{Disk, DiskOffset, Image, ImageError, Operation, Options, Request, Span, Status, Token};
use memory::Segments;

use crate::io::{ROOM, SimIo, Visible};
use crate::media::Media;
use crate::sector::{SECTOR, Words, words_of};

/// The reason why a chain cannot be read.
#[derive(Debug)]
pub enum Unread {
    /// The layers cannot be opened as a disk.
    Open(ImageError),
    /// A read has failed.
    Status {
        /// The first sector of the read.
        sector: u64,
        /// The status of the response.
        status: Status,
    },
    /// A read has not completed.
    Unanswered,
}

/// Passes the content of the layers in some windows to `take`. Sectors after the end of the disk are zero.
pub fn read(
    layers: Vec<Image>,
    files: Vec<Media>,
    windows: &[Range<u64>],
    take: &mut dyn FnMut(u64, Words),
) -> Result<(), Unread> {
    let options = Options { requests: windows.len(), ..Options::default() };
    let mut disk = Disk::new(layers, options).map_err(Unread::Open)?;
    let mut io = SimIo::new(files, SECTOR, Visible::AtCompletion, ROOM, None);
    let end = disk.geometry().len / SECTOR;
    for window in windows {
        let (window, behind) = (window.start.min(end)..window.end.min(end), window.start.max(end)..window.end);
        behind.for_each(|at| take(at, Words::ZERO));
        if window.is_empty() {
            continue;
        }
        let wrong = |status| Unread::Status { sector: window.start, status };
        let span = Span { at: DiskOffset(window.start * SECTOR), len: (window.end - window.start) * SECTOR };
        let memory = Segments::zeroed(usize::try_from(span.len).unwrap_or(0));
        let read = Request::new(Operation::Read, span, memory.clone(), Token(window.start), &disk.geometry());
        disk.submit(read.map_err(wrong)?, &mut io);
        while disk.in_flight() > 0 && io.pending() > 0 {
            io.finish(0).into_iter().for_each(|done| disk.settle(done, &mut io));
        }
        let Some((request, status)) = disk.answer() else {
            std::mem::forget(disk);
            return Err(Unread::Unanswered);
        };
        request.retire();
        if status != Status::Done {
            return Err(wrong(status));
        }
        window.clone().zip(words_of(&memory)).for_each(|(sector, words)| take(sector, words));
    }
    Ok(())
}
