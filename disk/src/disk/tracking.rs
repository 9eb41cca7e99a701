//! Changed blocks: the requests that wait for a map, and the maps of a disk that are written.
//!
//! Carries out the steps of `tracker`, which has their order. Keeps: no request that changes the disk is started before
//! its map admits it; and the map changes only while nothing is in flight, so that a request is named in the map of the
//! interval in which its change becomes visible.
//!
//! What is in the disk does not change when layers are merged or moved: these writes are no requests, and are not
//! tracked.

use memory::Segments;

use super::Disk;
use super::ops::Op;
use super::tracker::{MapState, MapStep, Tracker};
use crate::changes::ChangeMap;
use crate::format::Format;
use crate::{Action, FileError, FileId, ImageError, ImageErrorKind, Io, Request};

/// The maps of a disk.
#[derive(Debug, Default)]
pub(super) struct Changes {
    current: Option<Box<Tracker>>,
    /// Maps of earlier intervals, which are being sealed.
    sealing: Vec<Tracker>,
    /// The last map was given up.
    given_up: bool,
}

impl Changes {
    /// Whether a request may start.
    #[inline(always)]
    pub fn admit(&mut self, request: &Request) -> bool {
        match &mut self.current {
            None => true,
            Some(map) => !request.operation().is_write() || map.admits(request.span()),
        }
    }

    fn all(&mut self) -> impl Iterator<Item = &mut Tracker> {
        self.current.as_deref_mut().into_iter().chain(&mut self.sealing)
    }

    fn of(&mut self, file: FileId) -> &mut Tracker {
        let Some(map) = self.all().find(|map| map.file() == file) else {
            unreachable!("the engine has completed an operation on {file:?}, which is no map")
        };
        map
    }

    /// Drops the maps that are written no more.
    fn drop_ended(&mut self) {
        self.sealing.retain(|map| !map.is_over());
        let ended = self.current.take_if(|map| map.is_over() && map.state() != MapState::Doubtful);
        self.given_up |= ended.is_some_and(|map| map.state() == MapState::Invalid);
    }
}

impl<F: Format> Disk<F> {
    /// Records from now on in a new map, which is in `file`, which blocks change. The number of the file is no layer's.
    /// The map begins with what the disk shows now: all of that must be durable ([`Disk::is_clean`]), or a power loss
    /// could undo what is not named. Only while nothing is in flight.
    pub fn begin_tracking(&mut self, file: FileId, map: ChangeMap) -> Result<(), ImageError> {
        if !map.is_new() {
            return Err(unsupported("the map of changed blocks is not new: it can be continued only"));
        }
        if !self.is_clean() {
            return Err(unsupported("a new map of changed blocks cannot begin while not everything is durable"));
        }
        self.track(file, map)
    }

    /// Continues the map of the last process that has written to the disk. Before the first request: what is not
    /// recorded is not named.
    pub fn track(&mut self, file: FileId, map: ChangeMap) -> Result<(), ImageError> {
        self.check_map(file, &map)?;
        if self.changes.current.is_some() {
            return Err(unsupported("the disk has a map of changed blocks already"));
        }
        self.set_map(file, map);
        Ok(())
    }

    /// Ends the interval of the map and begins the next one in `map`, which is new and continues it. To be called when
    /// a new leaf was put on the disk, before requests are let go: what the new map begins with is what the old leaf
    /// shows. The old map is sealed in the background from [`Disk::resume`] on, until which it names too much; nothing
    /// is written now.
    pub fn switch_map(&mut self, file: FileId, map: ChangeMap) -> Result<(), ImageError> {
        self.check_map(file, &map)?;
        let Some(current) = self.changes.current.as_ref().filter(|_| self.is_quiesced()) else {
            return Err(unsupported(
                "there is no map of changed blocks to be continued, or requests are not held back",
            ));
        };
        if !map.is_new() || map.continues() != Some(current.map().id()) || map.block() != current.map().block() {
            let what = "the new map of changed blocks is not new, or does not continue the one before it";
            return Err(ImageError::new(ImageErrorKind::Mismatch, what));
        }
        if let Some(mut old) = self.changes.current.take() {
            old.end(true);
            self.changes.sealing.push(*old);
        }
        self.set_map(file, map);
        Ok(())
    }

    /// Extends the map for a disk of `len` bytes. [`Disk::grow`] is refused before that has ended
    /// ([`Disk::is_map_settled`]).
    pub fn extend_map<I: Io>(&mut self, len: u64, io: &mut I) -> Result<(), ImageError> {
        if let Some(map) = &mut self.changes.current {
            map.extend(len)?;
        }
        self.record_changes(io);
        Ok(())
    }

    /// Closes the map: it then names exactly what was requested since it was started, and what it named too much
    /// before. Over when [`Disk::tracked`] names no file. Only while the disk is quiesced and nothing is in flight, as
    /// the last thing before the disk is dropped: requests that come later are not recorded.
    pub fn stop_tracking<I: Io>(&mut self, io: &mut I) -> Result<(), ImageError> {
        if !self.is_quiesced() || !self.is_quiet() {
            return Err(unsupported("the map of changed blocks cannot be closed while requests are in flight"));
        }
        if let Some(map) = self.changes.current.as_mut().filter(|map| map.state() == MapState::Kept) {
            map.end(false);
        }
        self.record_changes(io);
        Ok(())
    }

    /// Ends the map because the disk is about to show what was not recorded: it will say that changes are missing, and
    /// be refused. That is durable when [`Disk::tracked`] names no file; if it names one and the map is settled, it is
    /// [`MapState::Doubtful`]. Only while the disk is quiesced and nothing is in flight.
    pub fn invalidate_map<I: Io>(&mut self, io: &mut I) -> Result<(), ImageError> {
        if !self.is_quiesced() || !self.is_quiet() {
            return Err(unsupported("the map of changed blocks cannot be ended while requests are in flight"));
        }
        if let Some(map) = &mut self.changes.current {
            map.invalidate();
        }
        self.record_changes(io);
        Ok(())
    }

    /// Gives up all intents of the map, so that the next process continues it without suspects. Over when
    /// [`Disk::is_map_at_rest`]; requests may be in flight, and later ones want intents again.
    pub fn rest_map<I: Io>(&mut self, io: &mut I) {
        if let Some(map) = &mut self.changes.current {
            map.rest();
        }
        self.record_changes(io);
    }

    /// Whether the map, if there is one, has no intents, and no earlier one is being sealed.
    pub fn is_map_at_rest(&self) -> bool {
        self.changes.current.as_ref().is_none_or(|map| map.is_at_rest()) && self.changes.sealing.is_empty()
    }

    /// The map as it is in memory, if there is one.
    pub fn map(&self) -> Option<&ChangeMap> {
        self.changes.current.as_ref().map(|map| map.map())
    }

    /// Continues without a map, which its owner has taken away: no process will find it later. Only while none of its
    /// operations is in flight.
    pub fn abandon_map<I: Io>(&mut self, io: &mut I) -> Result<(), ImageError> {
        if self.changes.current.as_ref().is_some_and(|map| !map.is_idle()) {
            return Err(unsupported("the map of changed blocks cannot be given up while it is being written"));
        }
        self.changes.given_up |= self.changes.current.take().is_some();
        self.overlap.may_go();
        self.work_all(io);
        Ok(())
    }

    /// The file of the map that changes are recorded in, if there is one.
    pub fn tracked(&self) -> Option<FileId> {
        self.changes.current.as_ref().map(|map| map.file())
    }

    /// Whether the map can be relied on; `None` if the disk was never tracked, or its map was closed.
    pub fn map_state(&self) -> Option<MapState> {
        let given_up = self.changes.given_up.then_some(MapState::Invalid);
        self.changes.current.as_ref().map(|map| map.state()).or(given_up)
    }

    /// Whether nothing of any map is being written or about to be, but for intents.
    pub fn is_map_settled(&self) -> bool {
        self.changes.current.as_ref().is_none_or(|map| map.is_settled()) && self.changes.sealing.is_empty()
    }

    /// Refuses what would show a guest more than the map has blocks for.
    pub(super) fn check_map_reaches(&self, len: u64) -> Result<(), ImageError> {
        match &self.changes.current {
            Some(map) if map.map().len() < len => {
                let what = format!("the map of changed blocks is of {} bytes: extend it first", map.map().len());
                Err(ImageError::new(ImageErrorKind::Unsupported, what))
            }
            _ => Ok(()),
        }
    }

    /// Refuses what changes the disk as a whole.
    pub(super) fn require_no_map(&self, what: &str) -> Result<(), ImageError> {
        match self.tracked() {
            Some(_) => Err(unsupported(&format!("{what} while its changed blocks are tracked"))),
            None => Ok(()),
        }
    }

    fn check_map(&self, file: FileId, map: &ChangeMap) -> Result<(), ImageError> {
        if !self.is_quiet() {
            return Err(unsupported("a map of changed blocks cannot be set while operations are in flight"));
        }
        if map.is_sealed() {
            return Err(unsupported("the map of changed blocks is sealed: nothing can be added to it"));
        }
        // A power loss may have kept a disk from growing whose map was extended before.
        if map.len() < self.geometry().len {
            let what =
                format!("the map of changed blocks is of {} bytes, the disk of {}", map.len(), self.geometry().len);
            return Err(ImageError::new(ImageErrorKind::Mismatch, what));
        }
        let is_taken = self.layers().iter().any(|layer| layer.file == file);
        if is_taken || self.changes.sealing.iter().any(|map| map.file() == file) || self.tracked() == Some(file) {
            let what = format!("file {} is in use by the disk already", file.0);
            return Err(ImageError::new(ImageErrorKind::Mismatch, what));
        }
        Ok(())
    }

    fn set_map(&mut self, file: FileId, map: ChangeMap) {
        self.changes.given_up = false;
        self.changes.current = Some(Box::new(Tracker::new(file, map, self.options.intents)));
    }

    /// Has a request wait that the map does not admit.
    #[cold]
    #[inline(never)]
    pub(super) fn wait_for_map<I: Io>(&mut self, request: Request, io: &mut I) {
        self.overlap.wait(request);
        self.record_changes(io);
    }

    /// Writes what the maps are to hold.
    #[cold]
    #[inline(never)]
    pub(super) fn record_changes<I: Io>(&mut self, io: &mut I) {
        let steps: Vec<(FileId, MapStep)> = self.changes.all().map(|map| (map.file(), map.begin())).collect();
        steps.into_iter().for_each(|(file, step)| self.take_map_step(file, step, io));
        self.changes.drop_ended();
    }

    fn take_map_step<I: Io>(&mut self, file: FileId, step: MapStep, io: &mut I) {
        match step {
            MapStep::Write(writes) => {
                for write in writes {
                    let from = Segments::copy_of(&write.bytes);
                    self.ops.push(Op::MapWrite, file, Action::Write { at: write.at, from }, io);
                }
            }
            MapStep::Sync => self.ops.push(Op::MapSync, file, Action::SyncData, io),
            MapStep::Nothing => {}
        }
    }

    /// A write or a sync of a map has ended.
    pub(super) fn map_op_ended<I: Io>(&mut self, op: &Op, file: FileId, result: Result<(), FileError>, io: &mut I) {
        let map = self.changes.of(file);
        let step = match op {
            Op::MapSync => map.synced(result.is_ok()),
            _ => map.written(result.is_ok()),
        };
        let is_next = matches!(step, MapStep::Nothing);
        self.take_map_step(file, step, io);
        if is_next {
            self.record_changes(io);
            self.overlap.may_go();
        }
    }
}

fn unsupported(what: &str) -> ImageError {
    ImageError::new(ImageErrorKind::Unsupported, what)
}
