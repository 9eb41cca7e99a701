//! `snapshot` by a chain: the live leaf becomes a read-only parent, and a new file the leaf (decision 0006). The order
//! is [`plan::snapshot`].
//!
//! With `--handed` 'the new file exists' means 'it opens as an image on top of the old leaf': its parent is not
//! recorded as unchanged, so as the leaf it has the contents of the old one, whatever was written to that in the
//! meantime.

use std::path::PathBuf;

use control::answer::{self, Answer, Took};
use control::ask::Method;
use control::tracking::NewMap;
use control::{ImageName, Kind};

use super::driver::{Driver, not_tracked};
use super::pause::micros;
use super::work::Work;
use crate::process::failure::Failure;

/// A snapshot in progress.
#[derive(Debug)]
pub struct Snapshot {
    to: ImageName,
    parent: ImageName,
    driver: Driver,
}

impl Snapshot {
    /// Checks the request and starts the snapshot.
    pub fn begin(
        to: ImageName,
        map: Option<PathBuf>,
        new: Option<NewMap>,
        work: &mut Work<'_>,
    ) -> Result<Snapshot, Failure> {
        work.must_be_writable()?;
        // The future parent is reopened read-only at the end.
        work.files.must_have(work.file(0)?.1.path(), false)?;
        if map.is_some() && work.changes.kept(work.disk).is_none() {
            return Err(not_tracked());
        }
        if map.is_none() && work.files.are_handed() && work.changes.kept(work.disk).is_some() {
            // This process cannot mark the new leaf, on which the map would continue.
            return Err(Failure::of(
                Kind::State,
                "the changed blocks of the disk are recorded, and no new map was passed",
            )
            .advise("try again"));
        }
        let driver = Driver::making(&to, plan::snapshot()).with_map(map, new)?;
        Ok(Snapshot { to, parent: work.name(0)?, driver })
    }

    /// Advances the snapshot; returns the answer at its end, still without the pause.
    pub fn advance(&mut self, work: &mut Work<'_>) -> Result<Option<Answer>, Failure> {
        if !self.driver.advance(work)? {
            return Ok(None);
        }
        let (making, sync) = self.driver.took();
        let answer = answer::Snapshot {
            method: Method::Chain,
            copy: None,
            leaf: self.to.to_string(),
            parent: Some(self.parent.to_string()),
            layers: work.names(),
            took: Some(Took { work_us: micros(making), sync_us: micros(sync) }),
            pause: None,
        };
        Ok(Some(answer.into()))
    }
}
