//! The source of a conversion: an image, or a raw disk on standard input, as chunks in order, cut off at the end of the
//! new disk.
//!
//! Invariant: what is cut off reads as zeroes, or the conversion fails. For an image this is checked before anything is
//! created; standard input can only be checked when it has been read.

use control::size::Size;
use disk::{DiskOffset, Span};

use super::input::Input;
use super::{check_signal, first_data, would_lose};
use crate::files::Files;
use crate::files::access;
use crate::image::chain::Layers;
use crate::image::progress::Progress;
use crate::jobs::stream::{Chunk, Stream, Unreadable};
use crate::process::failure::Failure;
use crate::process::signals::Signal;
use arguments::Convert;

/// An open source.
pub struct Source {
    from: SourceKind,
    /// The bytes of it that are copied.
    copied: u64,
    /// The size of the new disk in bytes.
    pub len: u64,
    /// The logical block size of the source, if it is known.
    pub block: Option<u32>,
}

enum SourceKind {
    Image(Box<Layers>),
    Input(Input),
}

/// The chunks of a source, until a signal is received.
pub struct Chunks<'a> {
    chunks: ChunkSource,
    convert: &'a Convert,
    stop: &'a mut Option<Signal>,
}

enum ChunkSource {
    Image(Stream),
    Input(Input),
}

impl Source {
    /// Opens the source.
    pub fn open(files: &Files, convert: &Convert, stop: &mut Option<Signal>) -> Result<Source, Failure> {
        if convert.source.is_stream() {
            let input = Input::open(convert, files.are_trusted())?;
            return Ok(Source { copied: input.len(), len: input.len(), block: None, from: SourceKind::Input(input) });
        }
        let layers = open_image(files, convert)?;
        let has = layers.geometry().map_or(0, |geometry| geometry.len);
        let len = convert.size.map_or(has, |Size(size)| size);
        if len < has {
            must_be_zero(files, convert, Span { at: DiskOffset(len), len: has - len }, stop)?;
        }
        let block = Some(layers.block());
        Ok(Source { from: SourceKind::Image(Box::new(layers)), copied: len.min(has), len, block })
    }

    /// Starts reading.
    pub fn chunks<'a>(self, convert: &'a Convert, stop: &'a mut Option<Signal>) -> Chunks<'a> {
        let unreadable = if convert.salvage { Unreadable::Skip } else { Unreadable::Fail };
        let whole = Span { at: DiskOffset(0), len: self.copied };
        let chunks = match self.from {
            SourceKind::Image(layers) => {
                ChunkSource::Image(Stream::range(*layers, access::engine(convert.access), unreadable, whole))
            }
            SourceKind::Input(input) => ChunkSource::Input(input),
        };
        Chunks { chunks, convert, stop }
    }
}

impl Iterator for Chunks<'_> {
    type Item = Result<Chunk, Failure>;

    fn next(&mut self) -> Option<Self::Item> {
        if let Err(interrupted) = check_signal(self.convert, self.stop) {
            return Some(Err(interrupted));
        }
        match &mut self.chunks {
            ChunkSource::Image(stream) => stream.next(),
            ChunkSource::Input(input) => input.next(self.convert, self.stop).transpose(),
        }
    }
}

fn open_image(files: &Files, convert: &Convert) -> Result<Layers, Failure> {
    let options = access::shared(access::options(convert.access, false), convert.sharing);
    Layers::open(files, &convert.source, &convert.parents, options).map_err(access::advise)
}

/// Rejects the conversion if data would be cut off. What cannot be read may be data.
fn must_be_zero(files: &Files, convert: &Convert, cut: Span, stop: &mut Option<Signal>) -> Result<(), Failure> {
    let layers = open_image(files, convert)?;
    let mut progress = Progress::new(files, "looking at what is cut off", cut.len);
    for chunk in Stream::range(layers, access::engine(convert.access), Unreadable::Fail, cut) {
        check_signal(convert, stop)?;
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
