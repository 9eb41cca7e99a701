//! `image compare`: compares the contents of two disks, whatever their formats and chains.

use control::size::readable;
use disk::DiskOffset;
use serde::Serialize;

use crate::files::Files;
use crate::files::access;
use crate::image::chain::{Chain, Layers};
use crate::image::progress::Progress;
use crate::jobs::stream::{Chunk, Stream};
use crate::process::failure::{Exit, Failure};
use crate::process::output;
use arguments::Compare;

/// The result. Names and meanings are part of the interface.
#[derive(Serialize)]
struct Compared {
    a: String,
    b: String,
    same: bool,
    size_a: u64,
    size_b: u64,
    /// The first byte of the disks that differs.
    differs_at: Option<u64>,
}

/// Runs `image compare`.
pub fn run(files: &Files, compare: &Compare) -> Result<Exit, Failure> {
    let options = access::shared(access::options(compare.access, false), compare.sharing);
    let one = Layers::open(files, &compare.one, &compare.parents, options).map_err(access::advise)?;
    let others = std::iter::once(&compare.other).chain(&compare.other_parent).collect();
    let others = Chain {
        from: files,
        names: others,
        accept_changed: compare.parents.accept_changed_parent,
        writable: 0,
        command: None,
        served: None,
        settled: false,
    };
    let other = Layers::open_chain(&others, options).map_err(access::advise)?;
    let size = |layers: &Layers| layers.geometry().map_or(0, |geometry| geometry.len);
    let (size_a, size_b) = (size(&one), size(&other));
    let mut found = Compared {
        a: compare.one.to_string(),
        b: compare.other.to_string(),
        same: false,
        size_a,
        size_b,
        differs_at: None,
    };
    if size_a == size_b {
        let engine = access::engine(compare.access);
        let (one, other) = (Stream::of(one, engine), Stream::of(other, engine));
        found.differs_at = first_difference(files, "comparing", size_a, one, other)?.map(|at| at.0);
        found.same = found.differs_at.is_none();
    }
    report(compare, &found)
}

/// Returns the first byte at which two disks of `len` bytes differ.
pub fn first_difference(
    files: &Files,
    title: &'static str,
    len: u64,
    mut one: impl Iterator<Item = Result<Chunk, Failure>>,
    mut other: impl Iterator<Item = Result<Chunk, Failure>>,
) -> Result<Option<DiskOffset>, Failure> {
    let mut progress = Progress::new(files, title, len);
    let mut found = None;
    while let (Some(a), Some(b)) = (one.next(), other.next()) {
        let (a, b) = (a?, b?);
        if let Some(offset) = difference(&a, &b) {
            found = Some(a.span.at + offset);
            break;
        }
        progress.advance(a.span.len);
    }
    progress.finish();
    Ok(found)
}

/// Returns the first byte at which two chunks of the same range differ.
fn difference(a: &Chunk, b: &Chunk) -> Option<u64> {
    let at = match (&a.bytes, &b.bytes) {
        (None, None) => None,
        (Some(bytes), None) | (None, Some(bytes)) if bytes.is_zero() => None,
        (Some(bytes), None) | (None, Some(bytes)) => bytes.to_vec().iter().position(|&byte| byte != 0),
        (Some(one), Some(other)) => {
            let (one, other) = (one.to_vec(), other.to_vec());
            // Comparing whole slices is many times faster than comparing byte by byte.
            if one == other { None } else { one.iter().zip(&other).position(|(x, y)| x != y) }
        }
    };
    at.and_then(|at| u64::try_from(at).ok())
}

fn report(compare: &Compare, found: &Compared) -> Result<Exit, Failure> {
    let (a, b) = (&found.a, &found.b);
    if compare.json {
        output::json(found)?;
    } else {
        output::print(&match found.differs_at {
            Some(at) => format!("{a} and {b} differ at byte {at} of the disk (sector {})\n", at / 512),
            None if found.same => format!("{a} and {b} hold the same {}\n", readable(found.size_a)),
            None => format!("{a} and {b} differ in size: {} and {} bytes\n", found.size_a, found.size_b),
        })?;
    }
    Ok(if found.same { Exit::Done } else { Exit::Differ })
}

#[cfg(test)]
mod test {
    use disk::Span;
    use memory::Segments;

    use super::*;

    fn piece(bytes: Option<&[u8]>) -> Chunk {
        Chunk { span: Span { at: DiskOffset(0), len: 4 }, bytes: bytes.map(Segments::copy_of), lost: Vec::new() }
    }

    #[test]
    fn stored_zeros_and_holes_are_the_same() {
        assert_eq!(difference(&piece(Some(&[0; 4])), &piece(None)), None);
        assert_eq!(difference(&piece(None), &piece(Some(&[0, 0, 7, 0]))), Some(2));
    }

    #[test]
    fn the_first_differing_byte_is_reported() {
        assert_eq!(difference(&piece(Some(&[1, 2, 3, 4])), &piece(Some(&[1, 2, 4, 4]))), Some(2));
        assert_eq!(difference(&piece(Some(&[1, 2, 3, 4])), &piece(Some(&[1, 2, 3, 4]))), None);
    }
}
