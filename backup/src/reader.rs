//! Reading a backup: at any offset, with a cache, and as a whole, in order.
//!
//! Knows nothing of the log: a backup can be read as long as its index and packs are there, also while a prune moves
//! its chunks. Every byte that is returned has been proven by its digest.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::chunks::{Chunks, Fetched, Place};
use crate::codec::Kind;
use crate::error::Error;
use crate::id::{Digest, Id};
use crate::index::{Index, Statistics, chunk_len, decode_page, page_chunks};
use crate::log::Record;
use crate::source::{Extent, Sink};
use crate::target::Target;
use crate::writer::Control;

/// Bytes of the disk that one thread restores at once.
const WINDOW: u64 = 4 << 20;

/// Pages that are read at most to count the data of a disk: those of 16 GiB by default.
const COUNTED_PAGES: usize = 256;

/// An opened backup. Several threads may read at the same time.
pub struct Reader {
    target: Target,
    index: Index,
    chunks: Mutex<Arc<Chunks>>,
    cache: Mutex<Cache>,
}

impl std::fmt::Debug for Reader {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Reader").field("record", &self.index.record).finish_non_exhaustive()
    }
}

/// A chunk of a disk: its offset, size and digest.
#[derive(Clone, Copy)]
struct Piece {
    at: u64,
    len: usize,
    digest: Digest,
}

/// Pieces that are neighbours in a pack.
struct Run {
    pieces: Vec<Piece>,
    /// The place of the first piece; `None` if it has none.
    first: Option<Place>,
    /// Where the last one ends in the pack.
    end: u32,
}

impl Run {
    fn is_before(&self, place: &Place) -> bool {
        self.first.is_some_and(|first| first.pack == place.pack) && self.end == place.at
    }
}

impl Reader {
    /// Opens a backup. `cache` bounds the bytes of content that random reads keep. In addition 60 bytes of memory for
    /// each chunk on the target, and 32 for each page of the disk.
    pub fn open(target: &Target, backup: Id, cache: usize) -> Result<Reader, Error> {
        let index = Index::read(target, backup)?;
        let chunks = Mutex::new(Arc::new(Chunks::load(target, |_| false)?));
        let cache = Mutex::new(Cache { max: cache, ..Cache::default() });
        Ok(Reader { target: target.clone(), index, chunks, cache })
    }

    /// What the backup is.
    pub fn record(&self) -> &Record {
        &self.index.record
    }

    /// What the backup cost when it was made.
    pub fn statistics(&self) -> &Statistics {
        &self.index.statistics
    }

    /// Fills a buffer from an offset; the range must be within the disk.
    pub fn read_at(&self, at: u64, buffer: &mut [u8]) -> Result<(), Error> {
        let len = self.index.record.len;
        let end = u64::try_from(buffer.len()).ok().and_then(|size| at.checked_add(size)).filter(|end| *end <= len);
        let end =
            end.ok_or_else(|| Error::Invalid(format!("a read at {at} beyond the end of a disk of {len} bytes")))?;
        let mut rest = buffer;
        let mut at = at;
        while at < end {
            let begin = at - at % self.target.chunk();
            let piece = self.piece(begin)?;
            let skip = usize::try_from(at - begin).unwrap_or(usize::MAX);
            let (part, behind) = rest.split_at_mut((piece.len - skip).min(rest.len()));
            if piece.digest == Digest::HOLE {
                part.fill(0);
            } else {
                let chunk = self.cached(Kind::Chunk, &piece)?;
                part.copy_from_slice(chunk.get(skip..skip + part.len()).unwrap_or_default());
            }
            at += u64::try_from(part.len()).unwrap_or(u64::MAX);
            rest = behind;
        }
        Ok(())
    }

    /// The parts of a range, in order and without gaps: which are holes. Only the index is read.
    pub fn extents(&self, range: Range<u64>) -> Result<Vec<Extent>, Error> {
        let mut extents: Vec<Extent> = Vec::new();
        let mut at = range.start;
        while at < range.end.min(self.index.record.len) {
            let (end, is_zero) = self.run(at)?;
            let len = end.min(range.end) - at;
            match extents.last_mut() {
                Some(last) if last.is_zero == is_zero => last.len += len,
                _ => extents.push(Extent { len, is_zero }),
            }
            at += len;
        }
        Ok(extents)
    }

    /// Bytes that a copy without holes takes at most. Of a disk with many pages, each of which is an object to be read,
    /// only pages without any data count as holes.
    pub fn data(&self) -> Result<u64, Error> {
        let len = self.index.record.len;
        let pages = self.index.pages.iter().filter(|page| **page != Digest::HOLE).count();
        if pages > COUNTED_PAGES {
            let pages = u64::try_from(pages).unwrap_or(u64::MAX);
            return Ok(pages.saturating_mul(self.target.page_span()).min(len));
        }
        let extents = self.extents(0..len)?;
        Ok(extents.iter().filter(|extent| !extent.is_zero).map(|extent| extent.len).sum())
    }

    /// The end of the chunk at an offset, or of the page if all of that is a hole; and whether it is a hole.
    fn run(&self, at: u64) -> Result<(u64, bool), Error> {
        let (span, chunk) = (self.target.page_span(), self.target.chunk());
        let page = usize::try_from(at / span).ok().and_then(|number| self.index.pages.get(number));
        if page.is_none_or(|page| *page == Digest::HOLE) {
            return Ok(((at / span + 1).saturating_mul(span).min(self.index.record.len), true));
        }
        let piece = self.piece(at - at % chunk)?;
        Ok(((at - at % chunk + chunk).min(self.index.record.len), piece.digest == Digest::HOLE))
    }

    /// Writes the whole disk to a sink, in order. Memory: for each thread 4 MiB of the disk, twice.
    pub fn restore(&self, sink: &mut dyn Sink, threads: usize, control: &mut Control<'_>) -> Result<(), Error> {
        let len = self.index.record.len;
        let mut done = Statistics::default();
        while done.done < len {
            control.check()?;
            let mut windows = Vec::new();
            let mut at = done.done;
            while at < len && windows.len() < threads.max(1) {
                let end = (at + WINDOW.max(self.target.chunk())).min(len);
                windows.push(self.pieces(at..end)?);
                at = end;
            }
            let contents: Vec<Result<Vec<Vec<u8>>, Error>> = if let [window] = windows.as_slice() {
                vec![self.contents(window)]
            } else {
                std::thread::scope(|scope| {
                    let readers: Vec<_> = windows.iter().map(|window| scope.spawn(|| self.contents(window))).collect();
                    readers
                        .into_iter()
                        .map(|reader| reader.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
                        .collect()
                })
            };
            for (window, contents) in windows.iter().zip(contents) {
                write(sink, window, &contents?, &mut done)?;
            }
            (control.progress)(&done);
        }
        Ok(())
    }

    /// The chunk at an offset.
    fn piece(&self, at: u64) -> Result<Piece, Error> {
        let number = at / self.target.page_span();
        let digest = usize::try_from(number).ok().and_then(|number| self.index.pages.get(number)).copied();
        let digest = digest.unwrap_or(Digest::HOLE);
        let len = chunk_len(&self.target, self.index.record.len, at);
        let mut piece = Piece { at, len: usize::try_from(len).unwrap_or(usize::MAX), digest: Digest::HOLE };
        if digest != Digest::HOLE {
            let size = page_chunks(&self.target, self.index.record.len, number) * 32;
            let page = self.cached(Kind::Page, &Piece { at, len: size, digest })?;
            let within = (at % self.target.page_span()) / self.target.chunk() * 32;
            let bytes = usize::try_from(within).ok().and_then(|within| page.get(within..)).unwrap_or_default();
            piece.digest = decode_page(bytes.get(..32).unwrap_or_default()).first().copied().unwrap_or(Digest::HOLE);
        }
        Ok(piece)
    }

    fn pieces(&self, range: Range<u64>) -> Result<Vec<Piece>, Error> {
        let step = usize::try_from(self.target.chunk()).unwrap_or(usize::MAX);
        range.step_by(step).map(|at| self.piece(at)).collect()
    }

    fn cached(&self, kind: Kind, piece: &Piece) -> Result<Arc<Vec<u8>>, Error> {
        if let Some(content) = lock(&self.cache).get(&piece.digest) {
            return Ok(content);
        }
        let content = Arc::new(self.content(kind, piece)?);
        lock(&self.cache).insert(piece.digest, &content);
        Ok(content)
    }

    /// The content of a chunk or page. If its pack is gone, a prune may have moved it: the tables are read again, once.
    fn content(&self, kind: Kind, piece: &Piece) -> Result<Vec<u8>, Error> {
        let chunks = Arc::clone(&lock(&self.chunks));
        let mut fetched = chunks.fetch(&self.target, kind, &piece.digest, piece.len)?;
        if let Fetched::Gone = fetched {
            let now = Arc::new(Chunks::load(&self.target, |_| false)?);
            *lock(&self.chunks) = Arc::clone(&now);
            fetched = now.fetch(&self.target, kind, &piece.digest, piece.len)?;
        }
        let backup = self.index.record.id;
        match fetched {
            Fetched::Content(content) => Ok(content),
            Fetched::Damaged => Err(self.lost(kind, piece)),
            // An index that is gone as well says that the backup was removed while it was read.
            Fetched::Gone => match Index::read(&self.target, backup) {
                Err(Error::NoBackup(_)) => Err(Error::NoBackup(backup)),
                _ => Err(self.lost(kind, piece)),
            },
        }
    }

    fn lost(&self, kind: Kind, piece: &Piece) -> Error {
        let len = match kind {
            Kind::Page => self.target.page_span().min(self.index.record.len - piece.at),
            _ => u64::try_from(piece.len).unwrap_or(0),
        };
        Error::Lost { backup: self.index.record.id, at: piece.at, len }
    }

    /// The content of each piece that is not a hole, in order; neighbours in a pack are read with one call.
    fn contents(&self, pieces: &[Piece]) -> Result<Vec<Vec<u8>>, Error> {
        let chunks = Arc::clone(&lock(&self.chunks));
        let stored = pieces.iter().filter(|piece| piece.digest != Digest::HOLE);
        let mut runs: Vec<Run> = Vec::new();
        for piece in stored {
            let place = chunks.places.get(&piece.digest).copied();
            match (runs.last_mut(), place) {
                (Some(run), Some(place)) if run.is_before(&place) => {
                    run.pieces.push(*piece);
                    run.end += place.len;
                }
                _ => runs.push(Run {
                    pieces: vec![*piece],
                    first: place,
                    end: place.map_or(0, |place| place.at.saturating_add(place.len)),
                }),
            }
        }
        let mut contents = Vec::new();
        for Run { pieces, first, end } in runs {
            let bytes = first.and_then(|first| {
                let name = chunks.pack(&first)?;
                self.target.store.get(name, u64::from(first.at)..u64::from(end)).ok()
            });
            let mut rest = bytes.as_deref().unwrap_or_default();
            for piece in pieces {
                let len = chunks.places.get(&piece.digest).and_then(|place| usize::try_from(place.len).ok());
                let frame = rest.split_at_checked(len.unwrap_or(0));
                let (frame, behind) = frame.unwrap_or_default();
                rest = behind;
                let sound = self.target.codec.unframe(Kind::Chunk, &piece.digest, piece.len, frame);
                // Whatever went wrong is sorted out for each chunk by itself.
                contents.push(match sound {
                    Ok(content) => content,
                    Err(_) => self.content(Kind::Chunk, &piece)?,
                });
            }
        }
        Ok(contents)
    }
}

fn write(sink: &mut dyn Sink, pieces: &[Piece], contents: &[Vec<u8>], done: &mut Statistics) -> Result<(), Error> {
    let mut contents = contents.iter();
    for piece in pieces {
        let (at, len) = (piece.at, u64::try_from(piece.len).unwrap_or(0));
        let written = match contents.as_slice().first().filter(|_| piece.digest != Digest::HOLE) {
            Some(content) => {
                contents.next();
                done.read += len;
                sink.write(at, content)
            }
            None => {
                done.holes += len;
                sink.zero(at, len)
            }
        };
        written.map_err(|source| Error::Sink { at, len, source })?;
        done.done += len;
    }
    Ok(())
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Content by digest; what was used last stays.
#[derive(Default)]
struct Cache {
    max: usize,
    len: usize,
    turn: u64,
    held: HashMap<Digest, (u64, Arc<Vec<u8>>)>,
}

impl Cache {
    fn get(&mut self, digest: &Digest) -> Option<Arc<Vec<u8>>> {
        self.turn += 1;
        let (turn, content) = self.held.get_mut(digest)?;
        *turn = self.turn;
        Some(Arc::clone(content))
    }

    fn insert(&mut self, digest: Digest, content: &Arc<Vec<u8>>) {
        self.turn += 1;
        if let Some((_, old)) = self.held.insert(digest, (self.turn, Arc::clone(content))) {
            self.len -= old.len();
        }
        self.len += content.len();
        // A few thousand entries are looked through for a miss, which costs a read.
        while self.len > self.max.max(content.len()) {
            let Some(oldest) = self.held.iter().min_by_key(|(_, (turn, _))| *turn).map(|(digest, _)| *digest) else {
                return;
            };
            if let Some((_, old)) = self.held.remove(&oldest) {
                self.len -= old.len();
            }
        }
    }
}

#[cfg(test)]
mod test {
    use crate::test::{extents_of, sample};

    #[test]
    fn extents_of_any_range_are_its_holes() {
        // Pages of four chunks: one that is a hole, one that has holes, and a last chunk that is cut off.
        let (reader, bytes) = sample("ab..........c.dd.e", 100);
        let len = bytes.len() as u64;
        for start in (0..len).step_by(1000) {
            for end in (start + 1..=len).step_by(3333).chain([len]) {
                let extents = reader.extents(start..end).unwrap();
                assert_eq!(extents, extents_of(&bytes, start..end), "{start}..{end}");
            }
        }
        assert_eq!(reader.extents(len..len + 9).unwrap(), []);
    }
}
