//! The map of changed blocks of the disk in a run: begun, continued, extended, switched and closed.
//!
//! What the maps must name is in `crate::changes`.

use disk::{Action, FileDone, FileId, MapState};

use super::steps::{Ended, Phase, refused};
use super::{Run, Violation};
use crate::changes::{self, Tracked};
use crate::media::Media;
use crate::planted::Planted;
use crate::saboteur::{ANSWERED, SabotagedIo};
use crate::subject::{Form, Start, Subject};

/// The maps of the disk in a run.
#[derive(Default)]
pub(super) struct Maps {
    /// The maps, of which one at most is in use.
    pub tracked: Vec<Tracked>,
    /// Whether that was begun by another process.
    continued: bool,
    /// The map of the next interval, which a planted bug does not use yet.
    late: Option<FileId>,
}

impl Run {
    /// The same run with a map, if it is to have one.
    pub(super) fn with_map(mut self, start: &Start) -> Result<Run, Violation> {
        self.maps.continued = start.map.is_some();
        self.begin_map(start.map.clone())?;
        Ok(self)
    }

    /// The completions that are the disk's: not those of writes that a planted bug has answered before. A failed sync
    /// of a map does not break the disk.
    pub(super) fn settle_maps(&mut self, mut ended: Vec<FileDone>) -> Vec<FileDone> {
        ended.retain(|done| done.op.id != ANSWERED);
        let of_map = |done: &&FileDone| self.plot.borrow().maps.contains(&done.op.file);
        let mut failed = ended.iter().filter(of_map).filter(|done| done.result.is_err());
        if failed.any(|done| matches!(done.op.action, Action::SyncData)) {
            self.io.excuse_failed_sync();
        }
        ended
    }

    /// Begins to track changes: in a new map, or in what a power loss has left of one.
    fn begin_map(&mut self, left: Option<(Media, Tracked)>) -> Result<(), Violation> {
        let Some(intents) = self.setup.intents else { return Ok(()) };
        self.sync_before_map();
        if !self.disk.is_clean() {
            return Ok(());
        }
        let is_new = left.is_none();
        let (media, mut tracked) = match left {
            Some(left) => left,
            None => {
                let number = u8::try_from(self.forms.len()).unwrap_or(u8::MAX);
                let len = self.disk.geometry().len;
                let media = changes::create(self.setup.subject.tail, number, None, len);
                (media, Tracked::new(FileId(number), self.oracle.clone(), intents))
            }
        };
        let file = self.add_map(&media);
        let map = changes::open(&media, self.bug).map_err(Violation::Map)?;
        tracked.go_on(&map);
        let begun = if is_new { self.disk.begin_tracking(file, map) } else { self.disk.track(file, map) };
        begun.map_err(Violation::Map)?;
        self.maps.tracked = vec![tracked.in_file(file)];
        Ok(())
    }

    fn sync_before_map(&mut self) {
        self.disk.sync(&mut SabotagedIo { io: &mut self.io, plot: &self.plot });
        while self.io.pending() > 0 || self.retry() {
            self.finish(0);
        }
    }

    fn add_map(&mut self, media: &Media) -> FileId {
        let file = self.io.add_map(media);
        self.forms.push(Form::Raw);
        self.plot.borrow_mut().maps.push(file);
        self.plot.borrow_mut().map_bug = self.bug;
        file
    }

    /// Continues the map of the process that has died.
    pub(super) fn continue_map(&mut self, maps: Vec<Tracked>) -> Result<(), Violation> {
        for map in &maps {
            self.io.set_writable(map.file, true);
            self.plot.borrow_mut().maps.push(map.file);
        }
        self.plot.borrow_mut().map_bug = self.bug;
        (self.maps.tracked, self.maps.continued) = (maps, true);
        let Some(current) = self.maps.tracked.iter_mut().find(|map| map.is_current()) else { return Ok(()) };
        match changes::open(self.io.file(current.file).visible(), self.bug) {
            Ok(map) => {
                current.go_on(&map);
                self.disk.track(current.file, map).map_err(Violation::Map)
            }
            Err(_) if self.io.fault_happened() || current.is_refused_rightly() => {
                self.maps.tracked.clear();
                Ok(())
            }
            Err(error) => Err(Violation::Map(error)),
        }
    }

    /// A request may change these sectors.
    pub(super) fn touch(&mut self, sectors: std::ops::Range<u64>) {
        self.maps.tracked.iter_mut().filter(|map| map.is_current()).for_each(|map| map.touch(sectors.clone()));
    }

    /// Extends the map before the disk grows.
    pub(super) fn extend_map(&mut self, len: u64, phase: &mut Phase) -> Result<Ended, Violation> {
        let mut io = SabotagedIo { io: &mut self.io, plot: &self.plot };
        match phase {
            Phase::Due => self.disk.extend_map(len, &mut io).map_err(refused)?,
            _ => return Ok(Ended::Well),
        }
        *phase = Phase::Mapping;
        Ok(Ended::NotYet)
    }

    /// Has the map say that changes are missing, before other contents are shown.
    pub(super) fn end_map(&mut self, phase: &mut Phase) -> Result<Ended, Violation> {
        if matches!(phase, Phase::Due) {
            self.maps.tracked.iter_mut().filter(|map| map.is_current()).for_each(Tracked::may_be_refused);
            let mut io = SabotagedIo { io: &mut self.io, plot: &self.plot };
            self.disk.invalidate_map(&mut io).map_err(refused)?;
            *phase = Phase::Mapping;
            return Ok(Ended::NotYet);
        }
        if self.disk.tracked().is_some() {
            return Ok(Ended::Badly);
        }
        self.maps.tracked.iter_mut().filter(|map| map.is_current()).for_each(Tracked::must_be_refused);
        Ok(Ended::Well)
    }

    /// As the owner of a map that can neither be written nor say so: it takes the map away.
    pub(super) fn watch_map(&mut self) -> Result<(), Violation> {
        if self.disk.map_state() == Some(MapState::Doubtful) { self.abandon_map() } else { Ok(()) }
    }

    /// Takes the map away and goes on without one.
    pub(super) fn abandon_map(&mut self) -> Result<(), Violation> {
        self.maps.tracked.clear();
        if self.disk.tracked().is_none() {
            return Ok(());
        }
        self.disk.abandon_map(&mut SabotagedIo { io: &mut self.io, plot: &self.plot }).map_err(refused)
    }

    /// Creates the map of the next interval.
    fn create_next(&mut self, current: FileId) -> Result<FileId, Violation> {
        let old = changes::open(self.io.file(current).visible(), None).map_err(Violation::Map)?;
        let number = u8::try_from(self.forms.len()).unwrap_or(u8::MAX);
        let media = changes::create(self.setup.subject.tail, number, Some(old.id()), self.disk.geometry().len);
        Ok(self.add_map(&media))
    }

    fn use_next(&mut self, file: FileId) -> Result<(), Violation> {
        let map = changes::open(self.io.file(file).visible(), self.bug).map_err(Violation::Map)?;
        self.disk.switch_map(file, map).map_err(refused)
    }

    /// A new leaf is on these layers: the map's interval has ended, and the next one begins.
    pub(super) fn switch_map(&mut self, old: &[FileId], subject: &Subject) -> Result<(), Violation> {
        let Some(at) = self.maps.tracked.iter().position(Tracked::is_current) else { return Ok(()) };
        let (Some(current), Some(MapState::Kept)) = (self.disk.tracked(), self.disk.map_state()) else { return Ok(()) };
        let shown = self.shown(old, subject)?;
        let file = self.create_next(current)?;
        if self.bug == Some(Planted::SwitchedLate) {
            self.maps.late = Some(file);
        } else {
            self.use_next(file)?;
        }
        let mut ended = self.maps.tracked.swap_remove(at);
        ended.end(&shown);
        if self.maps.late.is_some() {
            // To be found is that the new map names too little, not that the old one names too much.
            ended.touch(0..u64::MAX);
        }
        let mut new = Tracked::new(file, self.oracle.answered(), self.setup.intents.unwrap_or_default());
        let waiting = self.in_flight.values().filter(|asked| asked.operation.is_write());
        waiting.for_each(|asked| new.touch(asked.op.sectors().range()));
        self.maps.tracked = vec![new, ended];
        Ok(())
    }

    /// With the bug, switches maps when requests go on already, as soon as none is in flight.
    pub(super) fn switch_map_late(&mut self) -> Result<(), Violation> {
        let Some(file) = self.maps.late.take_if(|_| self.disk.is_quiet()) else { return Ok(()) };
        self.disk.quiesce();
        self.use_next(file)?;
        self.disk.resume(&mut SabotagedIo { io: &mut self.io, plot: &self.plot });
        Ok(())
    }

    /// Closes the map at the end of a run, and checks it.
    pub(super) fn close_map(&mut self) -> Result<(), Violation> {
        let current = self.maps.tracked.iter().find(|map| map.is_current()).cloned();
        let Some(current) = current.filter(|_| self.disk.map_state() == Some(MapState::Kept)) else { return Ok(()) };
        self.disk.quiesce();
        if self.io.fault_happened() || self.bug.is_some() || !self.disk.is_quiet() {
            return Ok(());
        }
        let mut io = SabotagedIo { io: &mut self.io, plot: &self.plot };
        self.disk.stop_tracking(&mut io).map_err(refused)?;
        while self.io.pending() > 0 || self.retry() {
            self.finish(0);
        }
        if self.io.fault_happened() {
            return Ok(());
        }
        match self.disk.tracked() {
            Some(_) => Err(Violation::Step("a map is never closed".into())),
            None if self.maps.continued => Ok(()),
            None => current.check_closed(self.io.file(current.file).visible()),
        }
    }
}
