//! The maps of changed blocks between two states of a disk, and what is to show that they name all changes.
//!
//! It knows which maps the catalogue has, and opens their files and the images whose marks may prove them. It looks
//! into no map: the process that reads the maps verifies them ([`control::tracking::Proof`]), and the catalogue is
//! never trusted. Invariant: between two states there is a chain of maps without a gap, or an error that names the gap.

use std::fs::File;
use std::path::PathBuf;
use std::sync::Arc;

use api::{ChangeMap, ChangeTracking, Code, Problem, Vdi};
use control::answer::MapState;
use control::tracking::{ExpectedMap, ExpectedMaps, Proof};
use repo::catalogue::{Image, ImageState};
use repo::driver::Directory;
use uuid::Uuid;

use super::leaf::writer_of;
use super::tracking::present;
use crate::daemon::Daemon;
use crate::disk::mark;
use crate::task::blocking;

/// Maps that are joined at most. A process accepts descriptors for them and for the longest chain of images.
const MAPS_MAX: usize = 200;

/// What to do if changes are not known.
const FULL: &str = "make a full backup";

/// What the catalogue has of the maps that lead to a state of a disk.
#[derive(Clone, Debug)]
pub struct History {
    /// The state: a VDI or a snapshot.
    pub to: Vdi,
    /// The snapshots of the same disk, `to` perhaps among them.
    snapshots: Vec<Vdi>,
    /// All maps of the repository, by the VDIs that they belong to, with their images.
    tracked: Vec<(Uuid, ChangeTracking, Image)>,
    directory: Arc<Directory>,
}

/// Opened maps of successive intervals, the oldest first.
#[derive(Debug)]
pub struct OpenMaps {
    /// Their paths and files.
    pub files: Vec<(PathBuf, File)>,
    /// What is to show that they name all changes.
    pub expected: ExpectedMaps,
}

impl History {
    /// Reads the history of a state of a disk.
    pub async fn of(daemon: &Daemon, to: Uuid) -> Result<History, Problem> {
        let found = daemon.catalogue.read(move |view| {
            let to = view.vdi(to)?;
            let snapshots = view.snapshots_of(to.disk())?;
            let tracked = view.tracked_vdis(to.sr)?;
            let images = tracked.iter().map(|(_, image, _)| view.image(*image)).collect::<Result<Vec<_>, Problem>>()?;
            let tracked = tracked.into_iter().zip(images).map(|((vdi, _, tracking), image)| (vdi, tracking, image));
            Ok((to, snapshots, tracked.collect()))
        });
        let (to, snapshots, tracked) = found.await?;
        let directory = daemon.srs.directory(to.sr).await?;
        Ok(History { to, snapshots, tracked, directory })
    }

    /// The earlier snapshots of the disk from which maps lead here, with the numbers of maps, the most first. The maps
    /// of each are the last ones of those before it.
    pub fn earlier(&self) -> Vec<(Uuid, usize)> {
        let count = |from: &Vdi| Some((from.uuid, self.maps_since(from.uuid).ok()?.len()));
        sorted(self.snapshots.iter().filter_map(count).collect())
    }

    /// Those of these that are such snapshots, in the same order. The log has the reasons why others are not.
    pub fn earlier_of(&self, wanted: &[Uuid]) -> Vec<(Uuid, usize)> {
        let count = |from: &Uuid| match self.maps_since(*from) {
            Ok(maps) => Some((*from, maps.len())),
            Err(problem) => {
                let vdi = self.to.uuid;
                tracing::warn!(%vdi, %from, "its changes are not offered to a client of the NBD address: {problem}");
                None
            }
        };
        sorted(wanted.iter().filter_map(count).collect())
    }

    /// The maps of the intervals since an earlier snapshot of the disk.
    fn maps_since(&self, from: Uuid) -> Result<Vec<ChangeMap>, Problem> {
        let to = self.to.uuid;
        if from == to || !self.snapshots.iter().any(|snapshot| snapshot.uuid == from) {
            let what = format!("VDI {from} is not an earlier snapshot of the same disk as VDI {to}");
            return Err(Problem::new(Code::Invalid, what).field("from").advise("give one of its snapshots"));
        }
        let named: Vec<_> = self.tracked.iter().map(|(vdi, tracking, _)| (*vdi, tracking)).collect();
        maps_between(&named, from, to)
    }

    /// Opens the maps of the intervals since an earlier snapshot of the disk.
    pub async fn open(&self, daemon: &Daemon, from: Uuid) -> Result<OpenMaps, Problem> {
        let maps = self.maps_since(from)?;
        let last = Last::of(daemon, &self.to, maps.last()).await?;
        let images: Vec<Option<Image>> = maps.iter().map(|map| self.image_of(map)).collect();
        let directory = self.directory.clone();
        let opened = blocking("open maps of changed blocks", move || {
            let (mut files, mut expected) = (Vec::new(), Vec::new());
            let count = maps.len();
            for (nth, (map, image)) in maps.iter().zip(images).enumerate() {
                let file = directory.open_marked(&map.file(), false).map_err(|problem| match problem.code {
                    Code::NotFound => missing(map.uuid, "its file is missing"),
                    _ => problem,
                })?;
                let marked = image.map(|image| directory.open_marked(&image.file, false)).transpose()?;
                let proof = match last.as_ref().filter(|_| nth + 1 == count) {
                    Some(last) => last.proof(&file, marked.as_ref())?,
                    None => Proof::Sealed(marked.as_ref().map(mark::own).transpose()?.flatten()),
                };
                let continues = map.continues.map(mark::digits);
                expected.push(ExpectedMap { map: mark::digits(map.uuid), continues, proof });
                files.push((directory.path().join(map.file()), file));
            }
            Ok(OpenMaps { files, expected: ExpectedMaps(expected) })
        });
        opened.await
    }

    /// The image of the state that ended the interval of a map, if its mark may prove the map.
    fn image_of(&self, map: &ChangeMap) -> Option<Image> {
        let ends = |tracking: &ChangeTracking| tracking.maps.last().is_some_and(|last| last.uuid == map.uuid);
        let of = self.tracked.iter().find(|(_, tracking, _)| ends(tracking)).map(|(_, _, image)| image.clone());
        // Without data there is no mark either: then the map is complete only if it is sealed.
        of.filter(|image| image.state != ImageState::NoData)
    }
}

/// Snapshots, those with the most maps first.
fn sorted(mut earlier: Vec<(Uuid, usize)>) -> Vec<(Uuid, usize)> {
    earlier.sort_unstable_by_key(|(from, maps)| (std::cmp::Reverse(*maps), *from));
    earlier
}

/// The map of a disk that may be running, which no snapshot has ended.
enum Last {
    /// Its process records changes in this session, in the file with this inode.
    Served(String, Option<u64>),
    /// It is not running.
    Halted,
}

impl Last {
    /// `None` for a snapshot.
    async fn of(daemon: &Daemon, vdi: &Vdi, map: Option<&ChangeMap>) -> Result<Option<Last>, Problem> {
        if vdi.snapshot_of.is_some() {
            return Ok(None);
        }
        let (Some(vbd), Some(map)) = (writer_of(vdi), map) else { return Ok(Some(Last::Halted)) };
        match present(daemon, vbd).await? {
            Some(found) if found.state == MapState::Kept && found.id == mark::digits(map.uuid) => {
                Ok(Some(Last::Served(found.session.unwrap_or_default(), found.inode)))
            }
            Some(found) if found.state != MapState::Kept => {
                Err(missing(map.uuid, "it could not be written, and misses changes"))
            }
            _ => Err(missing(map.uuid, "the running disk does not record changes in it")),
        }
    }

    fn proof(&self, map: &File, image: Option<&File>) -> Result<Proof, Problem> {
        match self {
            Last::Served(session, inode) => {
                let found = map.metadata().map_err(|error| Problem::failed("examine a map", error))?;
                // The running disk has the file open that had this name; its inode cannot have another one meanwhile.
                let is_it = *inode == Some(std::os::unix::fs::MetadataExt::ino(&found));
                Ok(Proof::Served(if is_it { session.clone() } else { String::new() }))
            }
            Last::Halted => {
                let refused = |why| Problem::new(Code::State, why).advise(FULL);
                let image = image.ok_or_else(|| refused("the image of the VDI is not known"))?;
                let found = mark::own(image)?
                    .ok_or_else(|| refused("the image of the VDI was written to without recording"))?;
                Ok(Proof::Image(found, mark::state(image)?))
            }
        }
    }
}

fn missing(map: Uuid, why: &str) -> Problem {
    let what = format!("the changes in the map {map} are not known: {why}");
    Problem::new(Code::State, what).advise(FULL)
}

/// The maps of the intervals behind the snapshot `from` up to the state `to`, the oldest first.
fn maps_between(tracked: &[(Uuid, &ChangeTracking)], from: Uuid, to: Uuid) -> Result<Vec<ChangeMap>, Problem> {
    let of = |vdi: Uuid| tracked.iter().find(|(known, _)| *known == vdi).map(|(_, tracking)| *tracking);
    let refused = |what: String| Err(Problem::new(Code::State, what).advise(FULL));
    let Some(begins) = of(from).and_then(|tracking| tracking.maps.last()) else {
        return refused(format!("snapshot {from} has no map of changed blocks: changes since are not known"));
    };
    let Some(newest) = of(to).filter(|tracking| !tracking.maps.is_empty()) else {
        let why = of(to).and_then(|tracking| tracking.ended.as_deref()).unwrap_or("tracking was not enabled");
        return refused(format!("VDI {to} has no map of changed blocks: {why}"));
    };
    let (mut found, mut at) = (Vec::new(), newest);
    loop {
        for map in at.maps.iter().rev() {
            found.push(*map);
            if map.continues == Some(begins.uuid) {
                found.reverse();
                return Ok(found);
            }
            if found.len() > MAPS_MAX {
                return refused(format!("more than {MAPS_MAX} maps of changed blocks are between {from} and {to}"));
            }
        }
        let before = at.maps.first().and_then(|first| first.continues);
        let ends = |tracking: &&ChangeTracking| before.is_some() && tracking.maps.last().map(|map| map.uuid) == before;
        let Some(next) = tracked.iter().map(|(_, tracking)| *tracking).find(ends) else {
            let why = at.ended.as_ref().or(newest.ended.as_ref()).map(|why| format!(": {why}")).unwrap_or_default();
            let gap = match before {
                Some(map) => format!("the map {map} is missing"),
                None => "a map began in between".into(),
            };
            return refused(format!("the changes from {from} to {to} are not known: {gap}{why}"));
        };
        at = next;
    }
}

#[cfg(test)]
mod test {
    use super::*;

    fn tracking(maps: &[(u128, Option<u128>)]) -> ChangeTracking {
        let map = |(uuid, continues): &(u128, Option<u128>)| ChangeMap {
            uuid: Uuid::from_u128(*uuid),
            continues: continues.map(Uuid::from_u128),
        };
        ChangeTracking { maps: maps.iter().map(map).collect(), ..ChangeTracking::default() }
    }

    fn found(all: &[(u128, ChangeTracking)], from: u128, to: u128) -> Result<Vec<u128>, String> {
        let all: Vec<_> = all.iter().map(|(vdi, tracking)| (Uuid::from_u128(*vdi), tracking)).collect();
        let found = maps_between(&all, Uuid::from_u128(from), Uuid::from_u128(to));
        found.map(|maps| maps.iter().map(|map| map.uuid.as_u128()).collect()).map_err(|problem| problem.detail)
    }

    #[test]
    fn maps_are_joined_along_the_snapshots() {
        let all = [
            (1, tracking(&[(11, None)])),
            (2, tracking(&[(12, Some(11))])),
            (3, tracking(&[(13, Some(12)), (14, Some(13))])),
            (9, tracking(&[(15, Some(14))])),
        ];
        assert_eq!(found(&all, 1, 2), Ok(vec![12]));
        assert_eq!(found(&all, 1, 9), Ok(vec![12, 13, 14, 15]));
        assert_eq!(found(&all, 2, 3), Ok(vec![13, 14]));
        assert_eq!(found(&all, 3, 9), Ok(vec![15]));
        // Backwards.
        assert!(found(&all, 3, 2).unwrap_err().contains("a map began in between"));
    }

    #[test]
    fn a_gap_is_an_error_that_names_the_map() {
        let all = [(1, tracking(&[(11, None)])), (9, tracking(&[(13, Some(12))]))];
        assert!(found(&all, 1, 9).unwrap_err().contains(&Uuid::from_u128(12).to_string()));
        assert!(found(&all, 2, 9).unwrap_err().contains("has no map"));
        assert!(found(&all, 1, 8).unwrap_err().contains("tracking was not enabled"));
    }

    #[test]
    fn a_new_map_says_why_the_one_before_was_ended() {
        let next = ChangeTracking { ended: Some("it was restored".into()), ..tracking(&[(13, None)]) };
        let all = [(1, tracking(&[(11, None)])), (2, next), (9, tracking(&[(14, Some(13))]))];
        assert!([2, 9].iter().all(|to| found(&all, 1, *to).unwrap_err().contains("it was restored")));
    }
}
