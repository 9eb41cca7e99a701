//! `track` and `untrack`: begins a map of changed blocks of the disk, or ends it ([`plan::track`], [`plan::untrack`]).

use control::answer::{Answer, Tracked};
use control::{Kind, ask};
use disk::MapState;

use super::driver::Driver;
use super::work::Work;
use crate::image::tracking;
use crate::process::failure::Failure;

/// `track` or `untrack` in progress.
#[derive(Debug)]
pub struct Track(Driver);

impl Track {
    /// Checks `track` and starts it.
    pub fn begin(asked: ask::Track, work: &mut Work<'_>) -> Result<Track, Failure> {
        work.must_be_writable()?;
        tracking::must_be_possible(&work.name(0)?, work.file(0)?.1)?;
        if work.disk.tracked().is_some() {
            let what = "the changed blocks of the disk are recorded already";
            return Err(Failure::of(Kind::State, what)
                .advise("a snapshot with --map begins a new map; untrack ends the present one"));
        }
        Ok(Track(Driver::new(plan::track()).with_map(Some(asked.map), asked.new)?))
    }

    /// Checks `untrack` and starts it.
    pub fn end(asked: ask::Untrack, work: &mut Work<'_>) -> Result<Track, Failure> {
        match work.disk.map_state() {
            Some(MapState::Doubtful) if asked.removed => work.changes.was_removed(work.files, work.disk, work.engine),
            Some(MapState::Doubtful) => {
                let what = "the map can neither be written nor made invalid, and would be trusted";
                return Err(Failure::of(Kind::State, what).advise("remove its file, then use untrack --removed"));
            }
            _ if asked.removed => {
                let what = "the map is not doubtful: its file need not be removed";
                return Err(Failure::of(Kind::State, what).advise("omit --removed"));
            }
            _ => {}
        }
        Ok(Track(Driver::new(plan::untrack())))
    }

    /// Advances it; returns the answer at its end, still without the pause.
    pub fn advance(&mut self, work: &mut Work<'_>) -> Result<Option<Answer>, Failure> {
        if !self.0.advance(work)? {
            return Ok(None);
        }
        Ok(Some(Tracked { changes: work.changes.report(work.disk, work.engine), pause: None }.into()))
    }
}
