//! What a fuzzer does to a qcow2 image: any bytes are opened as one, to be read, written, checked and mended.
//!
//! Invariants checked:
//! - nothing panics, whatever the file says, and every request is answered exactly once;
//! - of an image that a check finds sound, every byte stays what it was until it is written, and is what was written
//!   from then on, also when the image is opened again; and the image stays sound, but for space that is lost and for a
//!   mark "copied" that one of two entries lacks when the other one is given up;
//! - a repair changes nothing that the disk shows, and when the check had found nothing worse than what can be mended,
//!   it finds nothing at all afterwards, and what was mended serves as a sound image does.

use std::collections::HashMap;

use disk::qcow2::{self, Qcow2, Report};
use disk::raw::Raw;
use disk::{
    Access, Disk, DiskOffset, FileOffset, Image, ImageError, Operation, Options, Problem, Severity, Span, Status, Tail,
};
use memory::Segments;

use super::guest::Guest;
use super::qcow2_input::{Asked, Input};
use super::storage::{SECTOR, Sparse};

/// Length of the parent, where the image says that it has one.
const PARENT_LEN: u64 = 100 * SECTOR;
/// So far around a request something might change that should not: a cluster.
const AROUND: u64 = 64 << 10;

/// Opens the file that `bytes` describe, and makes requests of it.
pub fn image(bytes: &[u8]) {
    let input = Input::decode(bytes);
    let file = input.file();
    let found = qcow2::check(&mut &file);
    let sound = found.as_ref().is_ok_and(is_sound);
    if let Some(guest) = open(file.clone(), Access::ReadOnly) {
        Session::new(guest, false).run(&input.requests);
    }
    if let Some(mended) = mend(&file, &found) {
        serve(mended, &input.requests, true);
    }
    serve(file, &input.requests, sound);
}

fn is_sound(report: &Report) -> bool {
    report.problems.is_empty() && report.unlisted == 0 && !report.dirty && !report.marked_corrupt
}

/// The image in `file`, on a parent if it says that it has one.
fn open(mut file: Sparse, access: Access) -> Option<Guest> {
    let image = Qcow2::open(&mut &file, access, Tail::Zeroes).ok()?;
    image.first_writes().iter().for_each(|write| file.write(write.at, &write.bytes));
    let mut files = vec![file];
    let mut layers = Vec::new();
    if image.has_parent() {
        let mut parent = Sparse::default();
        (0..PARENT_LEN / SECTOR).for_each(|number| parent.write(FileOffset(number * SECTOR), &[number as u8; 512]));
        files.push(parent);
        layers.push(Image::Raw(Raw::new(PARENT_LEN, 512, true).ok()?));
    }
    layers.insert(0, Image::Qcow2(Box::new(image)));
    Some(Guest::new(Disk::new(layers, Options::default()).ok()?, files))
}

/// Opens `file` for writing, if it can be, and makes requests of it.
fn serve(file: Sparse, requests: &[Asked], sound: bool) {
    let Some(guest) = open(file.clone(), Access::ReadWrite) else { return };
    let mut session = Session::new(guest, sound);
    session.run(requests);
    if session.guest.flush() != Some(Status::Done) || !sound {
        return;
    }
    let (before, file) = (file, session.guest.leaf().clone());
    let report = qcow2::check(&mut &file).expect("an image that can be checked");
    let is_fine = |problem: &Problem| problem.severity == Severity::Leak || is_last_of_two(problem, &before, &file);
    assert!(report.problems.iter().all(is_fine), "{:?}", report.problems);
    assert!(!report.dirty && !report.marked_corrupt);
    let guest = open(file, Access::ReadOnly).expect("an image that opens again");
    let mut windows: Vec<u64> = session.known.keys().map(|sector| sector * SECTOR / AROUND).collect();
    windows.sort_unstable();
    windows.dedup();
    let mut again = Session { guest, known: session.known, trusted: true };
    windows.into_iter().for_each(|window| again.look(Span { at: DiskOffset(window * AROUND), len: AROUND }));
}

/// Whether an entry lacks the mark "copied" only because another entry of the disk has referred to the same cluster,
/// and does not any more: nobody looks for the one that is left, which stays as it was.
fn is_last_of_two(problem: &Problem, before: &Sparse, after: &Sparse) -> bool {
    let (mut old, mut new) = ([0; 8], [0; 8]);
    before.read(problem.at, &mut old);
    after.read(problem.at, &mut new);
    problem.what.contains("not marked as copied, without") && old == new
}

/// Mends an image. `None` if there is nothing to mend, or more than can be.
fn mend(file: &Sparse, found: &Result<Report, ImageError>) -> Option<Sparse> {
    let repair = qcow2::repair(&mut &*file).ok()?;
    let found = found.as_ref().expect("what can be mended can be checked");
    let hopeless = found.worst() == Some(Severity::Damage) || found.unlisted > 0;
    let mut mended = file.clone();
    mended.len = mended.len.max(repair.new_len.unwrap_or(0));
    let len = mended.len;
    repair.batches.iter().flatten().for_each(|write| mended.write(write.at, &write.bytes));
    assert_eq!(mended.len, len, "a repair writes behind the end that it speaks of");
    if let Some(before) = open(file.clone(), Access::ReadOnly) {
        let after = open(mended.clone(), Access::ReadOnly).expect("what could be read can be read when it is mended");
        // An entry that could not be read may be mended; what could be read stays as it was, but for a table that the
        // disk shows as well.
        let shows_tables = found.problems.iter().any(|problem| problem.what.contains("and data at once"));
        let kept = shows_tables
            || content(before).into_iter().zip(content(after)).all(|(old, new)| old.is_none() || old == new);
        assert!(kept, "a repair has changed what the disk shows: {:?}", repair.what);
    }
    let report = qcow2::check(&mut &mended).expect("what was mended can be checked");
    if hopeless {
        return None;
    }
    assert!(is_sound(&report), "after {:?}: {report:?}", repair.what);
    let again = qcow2::repair(&mut &mended).expect("what was mended can be looked at");
    assert!(again.batches.is_empty(), "{:?}, and then {:?}", repair.what, again.what);
    (!repair.batches.is_empty()).then_some(mended)
}

/// Some of what a disk shows, by its pieces; `None` for what cannot be read.
fn content(mut guest: Guest) -> Vec<Option<Vec<u8>>> {
    let len = guest.disk.geometry().len;
    let places = [0, AROUND, 2 * AROUND, 3 * AROUND, 4 * AROUND, len.saturating_sub(AROUND) / SECTOR * SECTOR];
    let spans = places.map(|at| Span { at: DiskOffset(at), len: AROUND.min(len.saturating_sub(at)) });
    let mut read = |span: Span| {
        let memory = Segments::zeroed(span.len as usize);
        (guest.ask(Operation::Read, span, memory.clone()) == Some(Status::Done)).then(|| memory.to_vec())
    };
    spans.into_iter().filter(|span| span.len > 0).map(&mut read).collect()
}

/// A guest, and what it knows of its disk.
struct Session {
    guest: Guest,
    /// Sectors that were read or written.
    known: HashMap<u64, [u8; 512]>,
    /// The image was sound when it was opened.
    trusted: bool,
}

impl Session {
    fn new(guest: Guest, trusted: bool) -> Session {
        Session { guest, known: HashMap::new(), trusted }
    }

    fn run(&mut self, requests: &[Asked]) {
        requests.iter().for_each(|&request| self.request(request));
    }

    fn request(&mut self, [what, high, low, count, fill]: Asked) {
        let sectors = self.guest.disk.geometry().len / SECTOR;
        if sectors == 0 {
            return;
        }
        // The upper quarter of the places means the end of the disk.
        let place = u64::from(u16::from_be_bytes([high, low]));
        let first = if place >= 0xc000 { sectors.saturating_sub(1 + place % 0x4000) } else { place % sectors };
        let count = if what & 0x80 == 0 { 1 + u64::from(count) % 16 } else { 1 + u64::from(count) * 8 };
        let span = Span { at: DiskOffset(first * SECTOR), len: count.min(sectors - first) * SECTOR };
        let around = Span { at: DiskOffset(span.at.0.saturating_sub(AROUND)), len: span.len + 2 * AROUND };
        self.look(around);
        let durable = fill & 1 == 1;
        match what % 8 {
            0..=2 => self.write(span, fill, durable),
            3 => self.zero(span, Operation::WriteZeroes { free: fill & 2 == 0, durable }),
            4 => self.discard(span),
            5 => drop(self.guest.flush()),
            6 => drop(self.guest.ask(Operation::Extents { depths: false }, span, Segments::empty())),
            _ => self.grow(count),
        }
        self.look(around);
    }

    fn write(&mut self, span: Span, fill: u8, durable: bool) {
        let memory = Segments::copy_of(&vec![fill; span.len as usize]);
        let status = self.guest.ask(Operation::Write { durable }, span, memory);
        self.became(span, status, fill);
    }

    fn zero(&mut self, span: Span, operation: Operation) {
        let status = self.guest.ask(operation, span, Segments::empty());
        self.became(span, status, 0);
    }

    /// What is known of `span`, which was written.
    fn became(&mut self, span: Span, status: Option<Status>, fill: u8) {
        for sector in span.at / SECTOR..span.end() / SECTOR {
            match status {
                Some(Status::Done) => drop(self.known.insert(sector, [fill; 512])),
                // Read-only: nothing was done.
                None => {}
                Some(_) => drop(self.known.remove(&sector)),
            }
        }
    }

    /// A discarded sector reads as zero or as before.
    fn discard(&mut self, span: Span) {
        if self.guest.ask(Operation::Discard, span, Segments::empty()).is_none() {
            return;
        }
        for sector in span.at / SECTOR..span.end() / SECTOR {
            let Some(old) = self.known.remove(&sector).filter(|_| self.trusted) else { continue };
            let memory = Segments::zeroed(512);
            let status =
                self.guest.ask(Operation::Read, Span { at: DiskOffset(sector * SECTOR), len: SECTOR }, memory.clone());
            assert_eq!(status, Some(Status::Done), "a discarded sector that could be read");
            let found = memory.to_vec();
            assert!(found == old || found == [0; 512], "a discarded sector became another");
        }
    }

    /// Makes the disk larger. What is new is zero from the next cluster on: the last one may hold anything behind the
    /// old end.
    fn grow(&mut self, sectors: u64) {
        let old = self.guest.disk.geometry().len;
        self.guest.disk.quiesce();
        let grown = !self.guest.disk.geometry().read_only && self.guest.disk.grow(old + sectors * SECTOR).is_ok();
        self.guest.disk.resume(&mut self.guest.engine);
        if !grown {
            return;
        }
        let new = self.guest.disk.geometry().len;
        assert_eq!(new, old + sectors * SECTOR);
        let at = old.next_multiple_of(self.guest.disk.geometry().discard.into()).min(new);
        let memory = Segments::copy_of(&vec![0xee; (new - at) as usize]);
        let status = self.guest.ask(Operation::Read, Span { at: DiskOffset(at), len: new - at }, memory.clone());
        assert!(!self.trusted || status != Some(Status::Done) || memory.is_zero(), "a disk grows by what is not zero");
    }

    /// Reads, of the disk, as much of `span` as there is: what is known must still be so.
    fn look(&mut self, span: Span) {
        let len = span.len.min(self.guest.disk.geometry().len.saturating_sub(span.at.0)) / SECTOR * SECTOR;
        if len == 0 {
            return;
        }
        let span = Span { len, ..span };
        let memory = Segments::zeroed(len as usize);
        match self.guest.ask(Operation::Read, span, memory.clone()) {
            Some(Status::Done) if self.trusted => self.compare(span, &memory.to_vec()),
            Some(Status::Done) => {}
            _ if len > SECTOR => {
                let half = len / SECTOR / 2 * SECTOR;
                self.look(Span { len: half, ..span });
                self.look(Span { at: span.at + half, len: len - half });
            }
            _ => assert!(!self.trusted || !self.known.contains_key(&(span.at / SECTOR)), "{span:?} was readable"),
        }
    }

    fn compare(&mut self, span: Span, bytes: &[u8]) {
        for (sector, found) in (span.at / SECTOR..).zip(bytes.chunks_exact(512)) {
            let known = self.known.entry(sector).or_insert_with(|| found.try_into().expect("a sector"));
            assert!(known == found, "sector {sector} begins with {:?} and not {:?}", &found[..4], &known[..4]);
        }
    }
}
