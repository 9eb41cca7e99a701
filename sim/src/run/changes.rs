//! The map of changed blocks of the disk in a run: begun, continued, extended, switched and closed.
//!
//! What the maps must name is in `crate::changes`.

use disk::{FileId, MapState};

use super::steps::{Phase, refused};
use super::{Run, Violation};
use crate::changes::{self, Tracked};
use crate::media::Media;
use crate::planted::Planted;
use crate::saboteur::SabotagedIo;
use crate::sector::SECTOR;
use crate::subject::{Form, Subject};

impl Run {
    /// Begins to track changes: in a new map, or in what a power loss has left of one.
    pub(super) fn begin_map(&mut self, left: Option<(Media, Tracked)>) -> Result<(), Violation> {
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
        self.tracked = vec![tracked.in_file(file)];
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
        self.tracked = maps;
        let Some(current) = self.tracked.iter_mut().find(|map| map.is_current()) else { return Ok(()) };
        match changes::open(self.io.file(current.file).visible(), self.bug) {
            Ok(map) => {
                current.go_on(&map);
                self.disk.track(current.file, map).map_err(Violation::Map)
            }
            Err(_) if self.io.fault_happened() => {
                self.tracked.clear();
                Ok(())
            }
            Err(error) => Err(Violation::Map(error)),
        }
    }

    /// A request may change these sectors.
    pub(super) fn touch(&mut self, sectors: std::ops::Range<u64>) {
        self.tracked.iter_mut().filter(|map| map.is_current()).for_each(|map| map.touch(sectors.clone()));
    }

    /// Extends the map before the disk grows; returns whether that has ended.
    pub(super) fn has_extended_map(&mut self, phase: &mut Phase, subject: &Subject) -> Result<bool, Violation> {
        match phase {
            Phase::Due if self.disk.tracked().is_some() => {
                let mut io = SabotagedIo { io: &mut self.io, plot: &self.plot };
                self.disk.extend_map(subject.kind.grown() * SECTOR, &mut io).map_err(refused)?;
                *phase = Phase::Extending;
                Ok(false)
            }
            Phase::Extending => {
                *phase = Phase::Due;
                Ok(true)
            }
            _ => Ok(true),
        }
    }

    /// As the owner of a map that can neither be written nor say so: it takes the map away.
    pub(super) fn watch_map(&mut self) -> Result<(), Violation> {
        if self.disk.map_state() == Some(MapState::Doubtful) { self.abandon_map() } else { Ok(()) }
    }

    /// Takes the map away and goes on without one.
    pub(super) fn abandon_map(&mut self) -> Result<(), Violation> {
        self.tracked.clear();
        if self.disk.tracked().is_none() {
            return Ok(());
        }
        self.disk.abandon_map(&mut SabotagedIo { io: &mut self.io, plot: &self.plot }).map_err(refused)
    }

    /// With the bug, switches maps before requests are held, if it can.
    pub(super) fn switch_map_early(&mut self) -> Result<(), Violation> {
        if self.bug != Some(Planted::SwitchedEarly) || !self.disk.is_quiet() || self.disk.tracked().is_none() {
            return Ok(());
        }
        let Some(at) = self.tracked.iter().position(Tracked::is_current) else { return Ok(()) };
        self.disk.quiesce();
        self.new_map()?;
        let mut ended = self.tracked.swap_remove(at);
        ended.end(&[]);
        // That the new map names too much is not what is to be found.
        let file = self.disk.tracked().unwrap_or(ended.file);
        let mut new = Tracked::new(file, self.oracle.answered(), self.setup.intents.unwrap_or_default());
        new.touch(0..u64::MAX);
        self.tracked = vec![new, ended];
        self.switched_early = true;
        self.disk.resume(&mut SabotagedIo { io: &mut self.io, plot: &self.plot });
        Ok(())
    }

    /// Begins the map of the next interval.
    fn new_map(&mut self) -> Result<(), Violation> {
        let Some(current) = self.disk.tracked() else { return Ok(()) };
        let old = changes::open(self.io.file(current).visible(), None).map_err(Violation::Map)?;
        let number = u8::try_from(self.forms.len()).unwrap_or(u8::MAX);
        let media = changes::create(self.setup.subject.tail, number, Some(old.id()), self.disk.geometry().len);
        let file = self.add_map(&media);
        let map = changes::open(&media, self.bug).map_err(Violation::Map)?;
        self.disk.switch_map(file, map).map_err(refused)
    }

    /// A new leaf is on these layers: the map's interval has ended.
    pub(super) fn switch_map(&mut self, old: &[FileId], subject: &Subject) -> Result<(), Violation> {
        let Some(at) = self.tracked.iter().position(Tracked::is_current) else { return Ok(()) };
        if self.disk.map_state() != Some(MapState::Kept) {
            return Ok(());
        }
        let shown = self.shown(old, subject)?;
        if let (true, [_, ended]) = (std::mem::take(&mut self.switched_early), self.tracked.as_mut_slice()) {
            ended.end(&shown);
            return Ok(());
        }
        self.new_map()?;
        let Some(file) = self.disk.tracked() else { return Ok(()) };
        let mut ended = self.tracked.swap_remove(at);
        ended.end(&shown);
        let mut new = Tracked::new(file, self.oracle.answered(), self.setup.intents.unwrap_or_default());
        let waiting = self.in_flight.values().filter(|asked| asked.operation.is_write());
        waiting.for_each(|asked| new.touch(asked.op.sectors().range()));
        self.tracked = vec![new, ended];
        Ok(())
    }

    /// Closes the map at the end of a run, and checks it.
    pub(super) fn close_map(&mut self) -> Result<(), Violation> {
        let current = self.tracked.iter().find(|map| map.is_current()).cloned();
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
            None if self.continued => Ok(()),
            None => current.check_closed(self.io.file(current.file).visible()),
        }
    }
}
