//! Reads what a chain shows that nobody else uses, with the disk itself.
//!
//! Knows nothing of what should be found.

use std::ops::Range;

use disk::{Disk, DiskOffset, Image, ImageError, Operation, Options, Request, Span, Status, Token};
use memory::Segments;

use crate::io::{ROOM, SimIo, Visible};
use crate::media::Media;
use crate::sector::{SECTOR, Words, words_of};

/// Why something cannot be read.
#[derive(Debug)]
pub enum Unread {
    /// The layers make no disk.
    Open(ImageError),
    /// A read has ended so.
    Status {
        /// The first sector that was asked for.
        sector: u64,
        /// The answer.
        status: Status,
    },
    /// A read has not ended.
    Unanswered,
}

/// Hands what the layers show in some windows to `take`. What a disk that has not grown does not have is zero.
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
