//! Requests about changed blocks: `vdi-cbt-enable`, `vdi-cbt-disable`, and the blocks that have changed between two
//! states of a VDI.

use std::ffi::OsString;

use api::{ChangeMap, ChangeTracking, ChangedExtent, ChangesFormat, Code, ImageFormat, Problem, Task, Vdi, VdiChanges};
use control::answer::MapState;
use control::tracking::{ExpectedMap, ExpectedMaps, ListedChanges, Proof};
use repo::Tx;
use repo::catalogue::{Image, ImageState};
use uuid::Uuid;

use super::super::DataDestroy;
use super::super::tracking::{DisableTracking, EnableTracking, present};
use super::{find, just_changed, look, must_be_destroyable, must_be_ready, writer_of};
use crate::daemon::Daemon;
use crate::disk::handing::Handing;
use crate::disk::mark;
use crate::task::blocking;
use crate::vdi::hold;

/// Maps that are joined at most: more descriptors than a process accepts.
const MAPS_MAX: usize = 200;

/// What to do if changes are not known.
const FULL: &str = "make a full backup";

/// Starts a `vdi-cbt-enable` task.
pub async fn enable(daemon: &Daemon, uuid: Uuid) -> Result<Task, Problem> {
    let (vdi, _, _, _want) = find(daemon, uuid).await?;
    must_be_ready(&vdi)?;
    must_be_trackable(&vdi)?;
    let vbd = writer_of(&vdi);
    if vdi.cbt.as_ref().is_some_and(|tracking| tracking.enabled && (vbd.is_none() || !tracking.maps.is_empty())) {
        let what = format!("the changed blocks of VDI {uuid} are recorded already");
        return Err(Problem::new(Code::State, what).advise("see: tapline vdi cbt show"));
    }
    let job = EnableTracking { vdi: uuid, sr: vdi.sr, vbd, map: Uuid::new_v4() };
    daemon.tasks.start_job(daemon, job, move |job, task, tx: &mut Tx<'_>| hold(tx, job.vdi, task, vbd)).await
}

fn must_be_trackable(vdi: &Vdi) -> Result<(), Problem> {
    let refused = |code, why: &str, advice: &str| {
        Err(Problem::new(code, format!("the changed blocks of VDI {} cannot be recorded: {why}", vdi.uuid))
            .advise(advice))
    };
    match vdi.format {
        _ if vdi.read_only => refused(Code::ReadOnly, "it is read-only", "enable tracking on the VDI that is written"),
        // Its snapshots share blocks with it, and do not end the interval of a map.
        ImageFormat::Raw => refused(Code::Unsupported, "it is raw", "copy it to the format qcow2 or vhd"),
        ImageFormat::Vhd | ImageFormat::Qcow2 => Ok(()),
    }
}

/// Starts a `vdi-cbt-disable` task.
pub async fn disable(daemon: &Daemon, uuid: Uuid) -> Result<Task, Problem> {
    let (vdi, _, _, _want) = find(daemon, uuid).await?;
    if !vdi.cbt.as_ref().is_some_and(|tracking| tracking.enabled) {
        let what = format!("the changed blocks of VDI {uuid} are not recorded");
        return Err(Problem::new(Code::State, what).advise("see: tapline vdi cbt show"));
    }
    let vbd = writer_of(&vdi);
    let job = DisableTracking { vdi: uuid, sr: vdi.sr, vbd };
    daemon.tasks.start_job(daemon, job, move |job, task, tx: &mut Tx<'_>| hold(tx, job.vdi, task, vbd)).await
}

/// Starts a `vdi-data-destroy` task.
pub async fn data_destroy(daemon: &Daemon, uuid: Uuid) -> Result<Task, Problem> {
    let (vdi, sr, image, _want) = find(daemon, uuid).await?;
    must_be_destroyable(daemon, &vdi, &sr).await?;
    let job = DataDestroy { vdi: uuid, sr: vdi.sr, image, without: Uuid::new_v4() };
    let held = |job: &DataDestroy, task, tx: &mut Tx<'_>| {
        hold(tx, job.vdi, task, None)?;
        tx.check_data_destroyable(job.vdi)?;
        if tx.vdi_image(job.vdi)? == job.image { Ok(()) } else { Err(just_changed(job.vdi)) }
    };
    daemon.tasks.start_job(daemon, job, held).await
}

/// The parts of `to` that may differ from its earlier snapshot `from`.
pub async fn changed(daemon: &Daemon, to: Uuid, from: Uuid, format: ChangesFormat) -> Result<VdiChanges, Problem> {
    let (vdi, _, _) = look(daemon, to).await?;
    let (earlier, _, _) = look(daemon, from).await.map_err(|problem| problem.field("from"))?;
    must_be_states_of_one(&earlier, &vdi)?;
    let sr = vdi.sr;
    let tracked = daemon.catalogue.read(move |view| {
        let tracked = view.tracked_vdis(sr)?;
        let images = tracked.iter().map(|(_, image, _)| view.image(*image)).collect::<Result<Vec<_>, Problem>>()?;
        Ok(tracked
            .into_iter()
            .zip(images)
            .map(|((vdi, _, tracking), image)| (vdi, tracking, image))
            .collect::<Vec<_>>())
    });
    let tracked = tracked.await?;
    let named: Vec<(Uuid, &ChangeTracking)> = tracked.iter().map(|(vdi, tracking, _)| (*vdi, tracking)).collect();
    let maps = maps_between(&named, from, to)?;
    let last = Last::of(daemon, &vdi, maps.last()).await?;
    let image_of = |map: &ChangeMap| {
        let ends = |tracking: &ChangeTracking| tracking.maps.last().is_some_and(|last| last.uuid == map.uuid);
        let of = tracked.iter().find(|(_, tracking, _)| ends(tracking)).map(|(_, _, image)| image.clone());
        // Without data there is no mark either: then the map is complete only if it is sealed.
        of.filter(|image| image.state != ImageState::NoData)
    };
    let images: Vec<Option<Image>> = maps.iter().map(image_of).collect();
    let directory = daemon.srs.directory(sr).await?;
    let opened = blocking("open maps of changed blocks", move || {
        let (mut handing, mut words, mut expected) = (Handing::default(), Vec::<OsString>::new(), Vec::new());
        let count = maps.len();
        for (nth, (map, image)) in maps.iter().zip(images).enumerate() {
            let path = directory.path().join(map.file());
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
            words.push(path.clone().into());
            handing.plain(&path, false, file);
        }
        let expected = serde_json::to_string(&ExpectedMaps(expected))
            .map_err(|error| Problem::failed("list changed blocks", error))?;
        words.extend(["--expect".into(), expected.into()]);
        Ok((handing, words))
    });
    let (handing, mut words) = opened.await?;
    words.insert(0, "changes".into());
    if format == ChangesFormat::Xapi {
        words.extend(["--format".into(), "xapi".into()]);
    }
    let ListedChanges { size, block, changed, ranges, bitmap, .. } = daemon.tool.image(words, handing).await?;
    let extent = |range: control::tracking::ChangedRange| ChangedExtent { start: range.start, length: range.length };
    let extents = ranges.map(|ranges| ranges.into_iter().map(extent).collect());
    Ok(VdiChanges { from, to, size, block, changed, extents, bitmap })
}

fn must_be_states_of_one(from: &Vdi, to: &Vdi) -> Result<(), Problem> {
    let of = |vdi: &Vdi| vdi.snapshot_of.unwrap_or(vdi.uuid);
    if from.snapshot_of.is_some() && of(from) == of(to) && from.uuid != to.uuid {
        return Ok(());
    }
    let what = format!("VDI {} is not an earlier snapshot of the same disk as VDI {}", from.uuid, to.uuid);
    Err(Problem::new(Code::Invalid, what).field("from").advise("give one of its snapshots"))
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

    fn proof(&self, map: &std::fs::File, image: Option<&std::fs::File>) -> Result<Proof, Problem> {
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
            let why = newest.ended.as_ref().map(|why| format!(": {why}")).unwrap_or_default();
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
        let newest = ChangeTracking { ended: Some("it was restored".into()), ..tracking(&[(13, None)]) };
        let all = [(1, tracking(&[(11, None)])), (9, newest)];
        assert!(found(&all, 1, 9).unwrap_err().contains("it was restored"));
    }
}
