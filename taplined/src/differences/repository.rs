//! Compares the files and the inventories of attached repositories with the catalogue. Changes nothing: a scan records
//! what differs in files, and the next attachment resolves what differs in the inventory.

use api::{Difference, DifferenceKind, Problem, Sr, SrSource, SrState};
use repo::catalogue::Recorded;
use repo::inventory::{self, Contents, Read};
use tokio::task::JoinSet;
use uuid::Uuid;

use crate::daemon::Daemon;
use crate::sr;

/// All attached repositories, concurrently. One that cannot be examined counts as a difference.
pub async fn all(daemon: &Daemon) -> Result<Vec<Difference>, Problem> {
    let srs = daemon.catalogue.read(|view| view.srs()).await?;
    let mut comparing = JoinSet::new();
    for sr in srs.into_iter().filter(|sr| sr.state == SrState::Attached) {
        let daemon = daemon.clone();
        comparing.spawn(async move {
            match of_sr(&daemon, &sr).await {
                Ok(found) => found,
                Err(problem) => vec![difference(sr.uuid, problem)],
            }
        });
    }
    let mut found = Vec::new();
    while let Some(compared) = comparing.join_next().await {
        found.extend(compared.map_err(|error| Problem::failed("compare a repository with the catalogue", error))?);
    }
    found.sort_by(|one, other| (one.sr, &one.found, &one.catalogue).cmp(&(other.sr, &other.found, &other.catalogue)));
    Ok(found)
}

async fn of_sr(daemon: &Daemon, sr: &Sr) -> Result<Vec<Difference>, Problem> {
    let mut found = sr::compare_files(daemon, sr.uuid).await?;
    let fixed = sr.is_read_only();
    if !fixed && !matches!(sr.source, SrSource::Iso { .. }) {
        let why = of_inventory(daemon, sr.uuid).await?;
        found.extend(why.map(|why| difference(sr.uuid, why)));
    }
    Ok(found)
}

/// How the inventory differs from the catalogue, if neither was changing while they were compared.
async fn of_inventory(daemon: &Daemon, sr: Uuid) -> Result<Option<Problem>, Problem> {
    let Some(before) = daemon.catalogue.read(move |view| view.inventory(sr)).await? else { return Ok(None) };
    if daemon.catalogue.outbox().is_behind(sr) {
        return Ok(None);
    }
    let directory = daemon.srs.directory(sr).await?;
    let read = daemon.srs.patience.ask(sr, "read the inventory of", move || inventory::read(&directory, sr)).await?;
    let after = daemon.catalogue.read(move |view| view.inventory_head(sr)).await?;
    if after.is_none_or(|(generation, head)| (generation, &head) != (before.generation, &before.head)) {
        return Ok(None);
    }
    Ok(match read {
        Read::Whole(log, contents) => {
            let same = (log.generation, &log.head) == (before.generation, &before.head) && *contents == before.contents;
            (!same).then(|| differs(sr, log.generation, &contents, &before))
        }
        Read::Damaged(damage) => Some(damage.why),
        Read::Absent => {
            let what = format!("the inventory of repository {sr} is gone");
            Some(Problem::new(api::Code::NotFound, what).advise(AGAIN))
        }
    })
}

/// Advice that reconciles inventory and catalogue.
const AGAIN: &str = "detach the repository and attach it again: the inventory is then read or rewritten, or attaching \
    says what there is to choose";

fn differs(sr: Uuid, generation: u64, there: &Contents, here: &Recorded) -> Problem {
    let vdis = there.vdis.iter().filter(|(uuid, vdi)| here.contents.vdis.get(uuid) != Some(vdi)).count();
    let more = here.contents.vdis.keys().filter(|uuid| !there.vdis.contains_key(uuid)).count();
    let what = format!(
        "the inventory of repository {sr} is at generation {generation}, the catalogue at {}; {} VDIs differ",
        here.generation,
        vdis.saturating_add(more)
    );
    Problem::new(api::Code::State, what).advise(AGAIN)
}

fn difference(sr: Uuid, problem: Problem) -> Difference {
    Difference { sr: Some(sr), problem: Some(problem), ..Difference::new(DifferenceKind::Inventory) }
}
