//! Rebase, flatten and relink, carried out by the disk of a guest that sends no requests, with the plans of the job.
//!
//! Carries out each step in the simulator. The guest's next process finds the leaf on its new parents: when the plan is
//! done, nothing needs the old ones, and they are removed. The job copies what the format reports as not the image's
//! own; here that is the data that shows through a leaf on stale storage.
//!
//! Invariant checked: at every time before, the chain is the old one or the new one, with the same contents.

use std::mem::ManuallyDrop;

use disk::raw::Raw;
use disk::{DiskOffset, FileId, Geometry, Image, Operation, Request, Span, Status, Token};
use memory::Segments;

use super::opening::Opening;
use super::steps::{ActiveVerb, Ended, Phase, refused};
use super::{Run, Violation};
use crate::link;
use crate::media::{Media, Unwritten};
use crate::reader;
use crate::saboteur::SabotagedIo;
use crate::sector::{PART, SECTOR, Sector, Word, Words};
use crate::subject::{Form, LayerType, Start, Subject};
use crate::workload::{Sectors, Step};

/// The token of writes that copy up; requests of the guest have smaller ones.
pub(super) const COPY: Token = Token(u64::MAX - 1);
/// Sectors per read.
const PIECE: usize = 128;

/// A run of sectors to copy up; without bytes it is zeroes.
struct Copy {
    sectors: Sectors,
    bytes: Option<Vec<u8>>,
}

impl Run {
    /// Whether no guest uses the disk.
    pub(super) fn is_offline(&self) -> bool {
        self.verb.as_ref().is_some_and(|verb| verb.asked.is_offline())
    }

    /// Whether the leaf has room to record another parent.
    pub(super) fn can_relink(&self) -> bool {
        self.disk.layers().first().is_some_and(|leaf| link::can_change(leaf.format.inner()))
    }

    /// Copies up the data that the leaf would not show on its new parents. The guest's process has made everything
    /// durable and ended before.
    pub(super) fn copy_up(&mut self, verb: &mut ActiveVerb, subject: &Subject) -> Result<Ended, Violation> {
        match verb.phase {
            Phase::CopyingUp(_, failed) => return Ok(if failed { Ended::Badly } else { Ended::Well }),
            Phase::Due if !self.disk.is_clean() => {
                self.disk.sync(&mut SabotagedIo { io: &mut self.io, plot: &self.plot });
                verb.phase = Phase::Syncing;
                return Ok(Ended::NotYet);
            }
            _ if !self.disk.is_clean() => return Ok(Ended::Badly),
            _ => {}
        }
        let new = match verb.asked {
            Step::Rebase => Some(self.new_parent(verb, subject)?),
            _ => None,
        };
        let copies = self.differences(new, subject)?;
        verb.phase = Phase::CopyingUp(copies.len(), false);
        for copy in copies {
            self.copy(copy);
        }
        Ok(Ended::NotYet)
    }

    fn copy(&mut self, Copy { sectors, bytes }: Copy) {
        let (operation, memory) = match bytes {
            Some(bytes) => (Operation::Write { durable: false }, Segments::copy_of(&bytes)),
            None => (Operation::WriteZeroes { free: false, durable: false }, Segments::empty()),
        };
        self.touch(sectors.range());
        let span = Span { at: DiskOffset(sectors.at * SECTOR), len: sectors.count * SECTOR };
        let Ok(request) = Request::new(operation, span, memory, COPY, &self.disk.geometry()) else {
            unreachable!("what is copied lies on the disk")
        };
        self.disk.submit(request, &mut SabotagedIo { io: &mut self.io, plot: &self.plot });
    }

    /// Handles the response to a write that copies up.
    pub(super) fn copied_up(&mut self, status: Status) {
        let Some(ActiveVerb { phase: Phase::CopyingUp(left, failed), .. }) = &mut self.verb else {
            unreachable!("what is copied up belongs to a verb")
        };
        *left -= 1;
        *failed |= status != Status::Done;
    }

    /// The data that the leaf shows of its old parents and would not show on the new one, if any.
    fn differences(&self, new: Option<FileId>, subject: &Subject) -> Result<Vec<Copy>, Violation> {
        let (Some(old), geometry) = (self.chains.last(), self.disk.geometry()) else { return Ok(Vec::new()) };
        let Some(leaf) = old.first() else { return Ok(Vec::new()) };
        let shown = self.shown(old, subject)?;
        let onto = match new {
            Some(new) => self.shown(&[new], subject)?,
            None => Vec::new(),
        };
        let own = self.own(*leaf, subject, geometry)?;
        let mut copies: Vec<Copy> = Vec::new();
        for (at, (shown, is_own)) in (0..).zip(shown.into_iter().zip(own)) {
            let onto = usize::try_from(at).ok().and_then(|at| onto.get(at)).copied().unwrap_or(Words::ZERO);
            if is_own || shown == onto {
                continue;
            }
            let bytes = (shown != Words::ZERO).then(|| bytes_of(shown));
            match copies.last_mut() {
                Some(Copy { sectors, bytes: last })
                    if sectors.range().end == at && last.is_some() == bytes.is_some() =>
                {
                    sectors.count += 1;
                    last.iter_mut().for_each(|last| last.extend(bytes.iter().flatten()));
                }
                _ => copies.push(Copy { sectors: Sectors { at, count: 1 }, bytes }),
            }
        }
        Ok(copies)
    }

    /// The content of a chain, sector by sector.
    pub(super) fn shown(&self, chain: &[FileId], subject: &Subject) -> Result<Vec<Words>, Violation> {
        let mut files = self.io.contents(chain);
        let forms: Vec<Form> = chain.iter().map(|file| self.form(Some(*file))).collect();
        let layers = subject.open(&mut files, &forms, 0).map_err(Violation::Open)?;
        read_all(layers, files)
    }

    /// The sectors that are allocated in a leaf itself.
    fn own(&self, leaf: FileId, subject: &Subject, geometry: Geometry) -> Result<Vec<bool>, Violation> {
        let start = Start { files: self.io.contents(&[leaf]), forms: vec![self.form(Some(leaf))], ..Start::default() };
        let mut files = start.files;
        let mut layers = subject.open(&mut files, &start.forms, 0).map_err(Violation::Open)?;
        let mut rubbish = Media::empty(Unwritten::Stale);
        rubbish.set_len(geometry.len);
        layers.push(Image::Raw(Raw::new(geometry.len, 512, true).map_err(Violation::Open)?));
        files.push(rubbish);
        let shows = read_all(layers, files)?;
        let own = |(at, words)| words != Words::whole(Word::stale(at));
        Ok((0..).zip(shows).map(own).collect())
    }

    /// Creates the new parent: a raw file of the initial size with some data; or, if nothing is copied up, one with the
    /// size and content of the old parent. It is not durable yet.
    pub(super) fn new_parent(&mut self, verb: &mut ActiveVerb, subject: &Subject) -> Result<FileId, Violation> {
        if let Some(file) = verb.parent {
            return Ok(file);
        }
        let holds = match (verb.asked, self.chains.first()) {
            (Step::Relink, Some(old)) => self.shown(old.get(1..).unwrap_or_default(), subject)?,
            _ => Vec::new(),
        };
        let sectors = if verb.asked == Step::Relink { self.layer(1).len / SECTOR } else { subject.kind.sectors() };
        let as_a_file = Subject { tail: Unwritten::Zeroes, told: Unwritten::Zeroes, ..*subject };
        let made = as_a_file.create(LayerType::Raw, self.forms.len(), None, sectors);
        let mut media = made.map_err(Violation::Open)?;
        let given = if verb.asked == Step::Relink { Vec::new() } else { LayerType::Given.given() };
        given.into_iter().for_each(|(sector, word)| media.set(sector, Sector::Word(word)));
        for (sector, words) in (0..).zip(holds).filter(|(_, words)| *words != Words::ZERO) {
            media.write(disk::FileOffset(sector * SECTOR), &bytes_of(words));
        }
        let file = self.io.add(&media);
        self.io.set_writable(file, false);
        self.forms.push(Form::Raw);
        verb.parent = Some(file);
        Ok(file)
    }

    /// Makes the new parent durable.
    pub(super) fn sync_parents(&mut self, verb: &mut ActiveVerb, subject: &Subject) -> Result<(), Violation> {
        let parent = self.new_parent(verb, subject)?;
        self.io.sync_now(parent);
        Ok(())
    }

    /// Changes the leaf's parent link. Until that is durable both chains are legal.
    pub(super) fn set_parent(&mut self, new: Option<FileId>, subject: &Subject) -> Result<(), Violation> {
        let parent = |run: &mut Run, file: FileId| {
            let modified = run.io.modified(file);
            let mut media = run.io.file(file).visible().clone();
            let image = subject.open_one(&mut media, run.form(Some(file)), disk::Access::ReadOnly);
            image.map(|image| link::to(&image, file, Some(modified))).map_err(Violation::Open)
        };
        let link = new.map(|file| parent(self, file)).transpose()?;
        let leaf = self.disk.layer_mut(0).map_err(refused)?;
        leaf.inner_mut().relink(link.as_ref()).map_err(refused)?;
        let old = self.chains.swap_remove(0);
        self.chains = vec![old.first().copied().into_iter().chain(new).collect(), old];
        Ok(())
    }

    /// Handles the end of a verb, successful or not.
    pub(super) fn end_verb(&mut self, mut verb: ActiveVerb) -> Result<(), Violation> {
        if !verb.has_failed {
            verb.check_name()?;
        }
        let is_moved = verb.asked.is_move() && self.chains.len() > 1;
        if is_moved && verb.has_failed {
            // The leaf is on either parent. The job ends, and this run cannot continue.
            self.is_over = true;
        } else if is_moved && !self.disk.is_quiet() {
            verb.phase = Phase::Ending;
            self.verb = Some(verb);
        } else if is_moved {
            return self.begin_on_new_parents();
        }
        Ok(())
    }

    /// Opens the chain in the guest's next process. The old parents are removed.
    fn begin_on_new_parents(&mut self) -> Result<(), Violation> {
        let chain = self.chains.swap_remove(0);
        let (mut io, logs) = (self.io.after_death(&chain, true), self.logs.of_chain(&chain));
        io.plant(self.bug);
        let forms = chain.iter().map(|file| self.form(Some(*file))).collect();
        let files = (0..).map(FileId).zip(&chain).map(|(file, _)| file).collect();
        let mut run = Run::on(&self.setup, io, (logs, Opening::ALONE), forms, self.oracle.clone(), vec![files])?;
        (run.next, run.operations, run.guest_sectors, run.forgets) =
            (self.next, self.operations, self.guest_sectors, self.forgets);
        let Run { disk, .. } = std::mem::replace(self, run);
        drop(ManuallyDrop::into_inner(disk));
        Ok(())
    }
}

/// The whole content of a disk with these layers.
fn read_all(layers: Vec<Image>, files: Vec<Media>) -> Result<Vec<Words>, Violation> {
    let end = layers.first().map_or(0, |leaf| disk::Format::geometry(leaf).len / SECTOR);
    let piece = u64::try_from(PIECE).unwrap_or(1);
    let windows: Vec<_> = (0..end).step_by(PIECE).map(|at| at..(at + piece).min(end)).collect();
    let mut found = Vec::new();
    reader::read(layers, files, &windows, &mut |_, words| found.push(words))?;
    Ok(found)
}

fn bytes_of(Words(parts): Words) -> Vec<u8> {
    let words = usize::try_from(PART / 8).unwrap_or(0);
    parts.iter().flat_map(|word| word.0.to_le_bytes().repeat(words)).collect()
}
