//! What a state after a power loss is compared with: the legal contents of the disk, and the map of its changed blocks.

use std::ops::Range;

use disk::FileId;
use disk::changes::ChangeMap;

use super::{Scene, recover};
use crate::changes::{Names, Tracked};
use crate::media::Media;
use crate::oracle::Legal;
use crate::run::{Sight, Violation};
use crate::sector::Words;
use crate::subject::{Start, Subject};

/// What a power loss may leave.
pub(super) struct Expected<'a> {
    pub legal: &'a Legal<'a>,
    /// The map of changed blocks that it has left, if there is one.
    pub names: Option<Names<'a>>,
    /// The same, to be continued.
    pub map: Option<(Media, Tracked)>,
}

impl Expected<'_> {
    /// Opens the chain, compares its content, and passes that to `each`.
    pub fn recover(
        &self,
        subject: &Subject,
        start: Start,
        windows: &[Range<u64>],
        each: &mut dyn FnMut(u64, Words),
    ) -> Result<(), Violation> {
        let mut unnamed = None;
        recover(subject, start, windows, &mut |sector, words| {
            each(sector, words);
            if self.names.as_ref().is_some_and(|names| names.misses(sector, words)) {
                unnamed.get_or_insert(sector);
            }
            self.legal.check(sector, words)
        })?;
        unnamed.map_or(Ok(()), |sector| Err(Violation::Unnamed(sector)))
    }
}

/// Checks what is left of the maps by themselves. Returns the one in use, if it is not refused.
pub(super) fn current_map(
    scene: Scene<'_>,
    sight: &Sight<'_>,
    found: &[(FileId, Media)],
) -> Result<Option<ChangeMap>, Violation> {
    let mut current = None;
    for map in sight.tracked {
        let Some((_, media)) = found.iter().find(|(file, _)| *file == map.file) else { continue };
        let left = map.check(media, scene.setup.bug, sight.io.fault_happened())?;
        current = if map.is_current() { left } else { current };
    }
    Ok(current)
}

pub(super) fn left_of_map(map: &Tracked, found: &[(FileId, Media)]) -> Option<(Media, Tracked)> {
    let (_, media) = found.iter().find(|(file, _)| *file == map.file)?;
    Some((media.clone(), map.clone()))
}
