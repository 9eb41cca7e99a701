//! What is converted: an image, or a raw disk on standard input, as chunks in order, cut off where the new disk ends.
//!
//! Invariant: what is cut off reads as zeroes, or the conversion fails. For an image that is found out before anything
//! is created; what comes on standard input can only be looked at when it comes.

use control::size::Size;
use disk::{DiskOffset, Span};

use super::input::Input;
use super::{first_data, go_on, would_lose};
use crate::files::Files;
use crate::files::access;
use crate::image::chain::Layers;
use crate::image::progress::Progress;
use crate::jobs::stream::{Chunk, Stream, Unreadable};
use crate::process::failure::Failure;
use crate::process::signals::Signal;
use arguments::Convert;

/// What is converted.
pub struct Source {
    from: From,
    /// Bytes of it that are copied.
    copied: u64,
    /// Bytes of the new disk.
    pub len: u64,
    /// Its logical block size, if it is known.
    pub block: Option<u32>,
}

enum From {
    Image(Box<Layers>),
    Input(Input),
}

/// Its chunks, until a signal comes.
pub struct Chunks<'a> {
    chunks: Kind,
    convert: &'a Convert,
    stop: &'a mut Option<Signal>,
}

enum Kind {
    Image(Stream),
    Input(Input),
}

impl Source {
    /// Opens what is to be converted.
    pub fn open(files: &Files, convert: &Convert, stop: &mut Option<Signal>) -> Result<Source, Failure> {
        if convert.source.is_stream() {
            let input = Input::open(convert, files.are_trusted())?;
            return Ok(Source { copied: input.len(), len: input.len(), block: None, from: From::Input(input) });
        }
        let layers = open_image(files, convert)?;
        let has = layers.geometry().map_or(0, |geometry| geometry.len);
        let len = convert.size.map_or(has, |Size(size)| size);
        if len < has {
            must_be_zero(files, convert, Span { at: DiskOffset(len), len: has - len }, stop)?;
        }
        let block = Some(layers.block());
        Ok(Source { from: From::Image(Box::new(layers)), copied: len.min(has), len, block })
    }

    /// Begins to read.
    pub fn chunks<'a>(self, convert: &'a Convert, stop: &'a mut Option<Signal>) -> Chunks<'a> {
        let unreadable = if convert.salvage { Unreadable::IsLost } else { Unreadable::Fails };
        let whole = Span { at: DiskOffset(0), len: self.copied };
        let chunks = match self.from {
            From::Image(layers) => {
                Kind::Image(Stream::range(*layers, access::engine(convert.access), unreadable, whole))
            }
            From::Input(input) => Kind::Input(input),
        };
        Chunks { chunks, convert, stop }
    }
}

impl Iterator for Chunks<'_> {
    type Item = Result<Chunk, Failure>;

    fn next(&mut self) -> Option<Self::Item> {
        if let Err(interrupted) = go_on(self.convert, self.stop) {
            return Some(Err(interrupted));
        }
        match &mut self.chunks {
            Kind::Image(stream) => stream.next(),
            Kind::Input(input) => input.next(self.convert, self.stop).transpose(),
        }
    }
}

fn open_image(files: &Files, convert: &Convert) -> Result<Layers, Failure> {
    let options = access::shared(access::options(convert.access, false), convert.sharing);
    Layers::open(files, &convert.source, &convert.parents, options).map_err(access::advise)
}

/// Refuses to cut off data. What cannot be read may be data.
fn must_be_zero(files: &Files, convert: &Convert, cut: Span, stop: &mut Option<Signal>) -> Result<(), Failure> {
    let layers = open_image(files, convert)?;
    let mut progress = Progress::new(files, "looking at what is cut off", cut.len);
    for chunk in Stream::range(layers, access::engine(convert.access), Unreadable::Fails, cut) {
        go_on(convert, stop)?;
        let Chunk { span, bytes, .. } = chunk?;
        let bytes = bytes.filter(|bytes| !bytes.is_zero()).map(|bytes| bytes.to_vec()).unwrap_or_default();
        if let Some(found) = first_data(&bytes) {
            progress.finish();
            return Err(would_lose(convert, cut.at.0, span.at.0 + found));
        }
        progress.advance(span.len);
    }
    progress.finish();
    Ok(())
}
