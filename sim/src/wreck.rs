//! The states in which one power loss may leave several files together.
//!
//! Knows nothing about chains or requests. Each sector of each file has a fate of its own, and so has the length of
//! each file that has grown.

use disk::FileId;

use crate::file::{Crash, Fate};
use crate::io::SimIo;
use crate::media::Media;
use crate::sector::{SECTOR, mix};

/// Maximum number of files: the growths of all are the bits of one number.
const FILES_MAX: usize = 16;

/// The states in which one power loss may leave some files. The places of all files are numbered consecutively.
pub struct Wreck<'a> {
    files: Vec<FilePart<'a>>,
    places: usize,
}

struct FilePart<'a> {
    file: FileId,
    crash: Crash<'a>,
    /// Number of its first place.
    first: usize,
    grown: bool,
}

/// Which of the files that have grown have lost their growth: one bit each, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Lengths(u32);

impl<'a> Wreck<'a> {
    /// The states of these files of the storage.
    pub fn new(io: &'a SimIo, files: &[FileId]) -> Wreck<'a> {
        assert!(files.len() <= FILES_MAX, "too many files for one wreck");
        let mut places = 0;
        let mut part = |file: &FileId| {
            let crash = io.file(*file).crash(io.unit() / SECTOR);
            let first = places;
            places += crash.places();
            FilePart { file: *file, grown: crash.grown(), crash, first }
        };
        let files = files.iter().map(&mut part).collect();
        Wreck { files, places }
    }

    /// Number of places with independent fates.
    pub fn places(&self) -> usize {
        self.places
    }

    fn part(&self, place: usize) -> Option<(&FilePart<'a>, usize)> {
        let at = self.files.partition_point(|part| part.first + part.crash.places() <= place);
        self.files.get(at).map(|part| (part, place - part.first))
    }

    /// Number of contents that the `place`th may have.
    pub fn contents(&self, place: usize) -> usize {
        self.part(place).map_or(0, |(part, place)| part.crash.contents(place))
    }

    /// Whether the `place`th may contain rubbish.
    pub fn may_trash(&self, place: usize) -> bool {
        self.part(place).is_some_and(|(part, _)| part.crash.may_trash())
    }

    /// For each place the number of its page: places in the same 4 KiB of a file have the same.
    pub fn pages(&self) -> Vec<u64> {
        let page = |part: &FilePart<'a>, sector: u64| (u64::from(part.file.0) << 56) | (sector / 8);
        self.files.iter().flat_map(|part| part.crash.sectors().map(move |sector| page(part, sector))).collect()
    }

    /// All combinations of lengths.
    pub fn lengths(&self) -> impl Iterator<Item = Lengths> + use<> {
        let grown = self.files.iter().filter(|part| part.grown).count();
        (0..1u32 << grown).map(Lengths)
    }

    /// A digest of all states together.
    pub fn digest(&self) -> u64 {
        self.files.iter().fold(0, |sum, part| mix(sum ^ part.crash.digest()))
    }

    /// Each part with its fates, and whether its growth was lost.
    fn fates<'b>(
        &'b self,
        fates: &'b [Fate],
        Lengths(lost): Lengths,
    ) -> impl Iterator<Item = (&'b FilePart<'a>, &'b [Fate], bool)> {
        let mut grown = 0;
        self.files.iter().map(move |part| {
            let own = fates.get(part.first..part.first + part.crash.places()).unwrap_or_default();
            let growth_lost = part.grown && lost & (1 << grown) != 0;
            grown += u32::from(part.grown);
            (part, own, growth_lost)
        })
    }

    /// The files after the power loss, with a fate for each place in order.
    pub fn state(&self, fates: &[Fate], lengths: Lengths) -> Vec<(FileId, Media)> {
        self.fates(fates, lengths).map(|(part, fates, lost)| (part.file, part.crash.state(fates, lost))).collect()
    }

    /// The digest of [`state`](Wreck::state) with the same arguments, without building it.
    pub fn state_digest(&self, fates: &[Fate], lengths: Lengths) -> u64 {
        self.fates(fates, lengths).fold(0, |sum, (part, fates, lost)| mix(sum ^ part.crash.state_digest(fates, lost)))
    }
}

#[cfg(test)]
mod test {
    use disk::{Action, FileOffset, FileOp, Io, OpId};
    use memory::Segments;

    use super::*;
    use crate::io::{ROOM, Visible};
    use crate::media::Unwritten;
    use crate::sector::Sector;

    fn write(io: &mut SimIo, file: FileId, byte: u8) {
        let action = Action::Write { at: FileOffset(0), from: Segments::copy_of(&[byte; 512]) };
        io.push(FileOp { id: OpId(0), file, action }).unwrap();
        io.finish(0);
    }

    /// A sync that succeeds.
    fn sync(io: &mut SimIo, file: FileId) {
        io.push(FileOp { id: OpId(0), file, action: Action::SyncData }).unwrap();
        io.finish(0);
    }

    fn storage() -> (SimIo, [FileId; 2]) {
        let mut io = SimIo::new(vec![Media::empty(Unwritten::Zeroes)], SECTOR, Visible::AtPush, ROOM, None);
        let other = io.add(&Media::empty(Unwritten::Zeroes));
        (io, [FileId(0), other])
    }

    #[test]
    fn each_file_loses_what_it_loses_by_itself() {
        let (mut io, files) = storage();
        write(&mut io, files[0], 1);
        write(&mut io, files[1], 2);
        let wreck = Wreck::new(&io, &files);
        assert_eq!((wreck.places(), wreck.lengths().count()), (2, 4));
        let state = wreck.state(&[Fate::Lost, Fate::Kept(0)], Lengths(0));
        let found: Vec<_> = state.iter().map(|(_, media)| media.get(0)).collect();
        assert_eq!(found, [Sector::ZERO, Sector::of(&[2; 512])]);
        let state = wreck.state(&[Fate::Kept(0), Fate::Kept(0)], Lengths(2));
        let lens: Vec<_> = state.iter().map(|(_, media)| media.len()).collect();
        assert_eq!(lens, [512, 0]);
    }

    #[test]
    fn a_sync_covers_its_own_file_and_no_other() {
        let (mut io, files) = storage();
        write(&mut io, files[0], 1);
        write(&mut io, files[1], 2);
        sync(&mut io, files[1]);
        let wreck = Wreck::new(&io, &files);
        assert_eq!(wreck.places(), 1);
        let state = wreck.state(&[Fate::Lost], Lengths(1));
        let found: Vec<_> = state.iter().map(|(_, media)| media.get(0)).collect();
        assert_eq!(found, [Sector::ZERO, Sector::of(&[2; 512])]);
    }

    #[test]
    fn states_that_differ_have_digests_that_differ() {
        let (mut io, files) = storage();
        write(&mut io, files[0], 1);
        write(&mut io, files[1], 1);
        let wreck = Wreck::new(&io, &files);
        let mut digests = std::collections::HashSet::new();
        for fates in [[Fate::Lost, Fate::Lost], [Fate::Lost, Fate::Kept(0)], [Fate::Kept(0), Fate::Lost]] {
            digests.insert(wreck.state_digest(&fates, Lengths(0)));
        }
        assert_eq!(digests.len(), 3);
    }
}
