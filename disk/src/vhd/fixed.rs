//! A fixed image: the disk's bytes where they are on the disk, and a footer behind them.
//!
//! Knows nothing about blocks. Keeps: at every moment there is a footer at the end of the file.
//!
//! # How it grows
//!
//! 1. Slack in front of the old footer, where there is any, is zeroed. *Reopened here:* the old size.
//! 2. The footer at the new end. *Reopened here:* the old size, or the new one with the old footer in its first sector.
//! 3. The old footer's place is zeroed.
//! 4. Settled: only now is the disk larger, since until then its first new sector is not the guest's.
//!
//! A file is assumed not to become longer without what made it so: there is no second footer to find.

use zerocopy::IntoBytes;

use super::layout::{RawFooter, SECTOR};
use super::survey::index;
use crate::format::{Discarded, Mapping, MetaWrite, Reserved, Wait};
use crate::{FileOffset, ImageError, ImageErrorKind, Records, Span};

/// Some programs round the size up in the file and not in the footer; to a cylinder, at most.
const SLACK_MAX: u64 = 1 << 20;

/// A fixed VHD: data, and a footer at the end.
#[derive(Debug)]
pub struct Fixed {
    footer: RawFooter,
    footer_at: FileOffset,
    /// The footer of the disk as it will be.
    growing: Option<RawFooter>,
    /// The one of the round under way.
    sealed: Option<RawFooter>,
    records: Records,
}

impl Fixed {
    /// An image with this footer at this place.
    pub fn new(footer: RawFooter, footer_at: FileOffset) -> Fixed {
        Fixed { footer, footer_at, growing: None, sealed: None, records: Records::default() }
    }

    /// Bytes of the disk.
    pub fn len(&self) -> u64 {
        self.footer.current_size.get()
    }

    /// Where in the file the disk ends.
    fn end(&self) -> FileOffset {
        FileOffset(self.len())
    }

    /// Cylinders, heads, sectors.
    pub fn chs(&self) -> (u16, u8, u8) {
        (self.footer.cylinders.get(), self.footer.heads, self.footer.sectors)
    }

    /// Where a span lives. Behind the disk's end, where it is still to grow, is nothing.
    pub fn map(&self, span: Span) -> Mapping {
        match self.inside(span) {
            0 => Mapping::Zero { len: span.len },
            len => Mapping::Data { at: span.at.in_flat_file(), len },
        }
    }

    /// Space for a span. Behind the disk's end there is none: that is where the footer stands.
    pub fn reserve(&self, span: Span) -> Result<Reserved, Wait> {
        match self.inside(span) {
            0 => Err(Wait::NoSpace),
            len => Ok(Reserved { at: span.at.in_flat_file(), len, ticket: None, fill: None }),
        }
    }

    /// Gives a span up, which keeps its place.
    pub fn discard(&self, span: Span) -> Discarded {
        match self.inside(span) {
            0 => Discarded::Nothing { len: span.len },
            len => Discarded::Kept { at: span.at.in_flat_file(), len },
        }
    }

    /// Bytes of a span, from its start, that the disk has.
    fn inside(&self, span: Span) -> u64 {
        span.len.min(self.len().saturating_sub(span.at.0))
    }

    /// Makes the disk larger, with the next round.
    pub fn grow(&mut self, len: u64) -> Result<(), ImageError> {
        let slack = self.footer_at.saturating_sub(self.end());
        if slack > SLACK_MAX {
            let what = format!("{slack} bytes lie between the disk and its footer");
            return Err(ImageError::at(ImageErrorKind::Unsupported, self.end(), what));
        }
        let mut footer = self.footer;
        footer.resize(len);
        self.growing = Some(footer.sealed());
        self.records.leave_out();
        Ok(())
    }

    /// The changes that are to be logged.
    pub fn records(&mut self) -> &mut Records {
        &mut self.records
    }

    /// Whether there is something to write.
    pub fn dirty(&self) -> usize {
        usize::from(self.growing.is_some())
    }

    /// Begins a round.
    pub fn seal(&mut self) -> Vec<Vec<MetaWrite>> {
        let Some(footer) = self.growing.take() else { return Vec::new() };
        self.sealed = Some(footer);
        let zeroes = |at: FileOffset, end: FileOffset| MetaWrite { at, bytes: vec![0; index(end.saturating_sub(at))] };
        let at = self.footer_place(&footer);
        let slack = zeroes(self.end(), self.footer_at.min(FileOffset(footer.current_size.get())));
        let old_end = if at > self.footer_at { self.footer_at.saturating_add(SECTOR) } else { self.footer_at };
        let footer = MetaWrite { at, bytes: footer.as_bytes().to_vec() };
        let batches = [slack, footer, zeroes(self.footer_at, old_end)];
        batches.into_iter().filter(|write| !write.bytes.is_empty()).map(|write| vec![write]).collect()
    }

    /// Ends a round; `durable` if its footer is on storage.
    pub fn settled(&mut self, durable: bool) {
        let Some(footer) = self.sealed.take() else { return };
        if durable {
            self.footer_at = self.footer_place(&footer);
            self.footer = footer;
        } else {
            self.growing = Some(self.growing.unwrap_or(footer));
        }
    }

    /// A file is not made shorter: what is behind the disk stays there.
    fn footer_place(&self, footer: &RawFooter) -> FileOffset {
        FileOffset(footer.current_size.get()).max(self.footer_at)
    }
}
