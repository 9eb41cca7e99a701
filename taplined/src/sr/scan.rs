//! `sr scan`: synchronizes the catalogue with the files of a repository.
//!
//! Unknown images are added with the parent that they record; images that have disappeared become missing, and ready
//! again when they are back. Unmatched files are reported `unplaced` with the reason. No file is changed. Tasks may
//! run at the same time: images that they create, remove or change are left alone.

pub mod doubtful;
mod info;
mod listing;
mod placement;
mod record;
pub mod same_file;

use std::collections::HashSet;
use std::sync::Arc;

use api::{Code, Difference, DifferenceKind, Problem, Scan, Sr, Unplaced};
use repo::View;
use repo::catalogue::{Image, ImageState};
use repo::driver::Directory;
use uuid::Uuid;

use crate::daemon::Daemon;
use crate::task::Context;
use listing::{Candidate, Sorted};
use placement::Found;

/// Scans a repository, which the caller has claimed.
pub async fn scan(daemon: &Daemon, uuid: Uuid, context: &mut Context) -> Result<Scan, Problem> {
    context.step("list", true).await?;
    let directory = daemon.srs.directory(uuid).await?;
    let (sr, sorted) = list(daemon, uuid, &directory).await?;
    let gone = really_gone(daemon, &sr, &directory, sorted.absent.clone()).await?;
    context.step("examine", true).await?;
    let (found, unplaced) = examine(daemon, &sr, &directory, &sorted, Some(context)).await?;
    let placement = placement::place(found);
    context.step("record", false).await?;
    let Sorted { present, counts, unplaced: odd, .. } = sorted;
    let recorded = daemon.catalogue.write(move |tx| record::record(tx, &sr, present, gone, placement));
    let mut scan = recorded.await?;
    daemon.srs.measure_now(uuid).await;
    // Two repositories may be scanned at the same time, and a file may have got a second name since it was added.
    let held = same_file::hold(daemon, uuid).await;
    let held = held
        .into_iter()
        .filter(|held| held.image.sr == uuid)
        .map(|held| listing::unplaced(held.image.file, held.problem));
    scan.counts = counts;
    scan.unplaced.extend(odd.into_iter().chain(unplaced).chain(held));
    scan.unplaced.sort_by(|one, other| one.file.cmp(&other.file));
    Ok(scan)
}

/// The files that differ from the catalogue: images that are gone, and unrecorded files that may be images.
pub async fn compare_files(daemon: &Daemon, uuid: Uuid) -> Result<Vec<Difference>, Problem> {
    let directory = daemon.srs.directory(uuid).await?;
    let (sr, sorted) = list(daemon, uuid, &directory).await?;
    let mut found = Vec::new();
    let gone = really_gone(daemon, &sr, &directory, sorted.absent).await?;
    for image in gone.into_iter().filter(|image| image.state != ImageState::Missing) {
        let vdi = daemon.catalogue.read(move |view| view.vdi_of_image(image.uuid)).await?;
        let what = format!("the file {} of repository {uuid} is gone", image.file);
        let advice = "restore it, or mark its VDI missing: tapline sr scan SR";
        let catalogue = vec![image.file];
        found.push(differs(uuid, vdi, Vec::new(), catalogue, Problem::new(Code::NotFound, what).advise(advice)));
    }
    for candidate in sorted.appeared {
        let what = format!("the file {} of repository {uuid} is not in the catalogue", candidate.file);
        let problem = Problem::new(Code::State, what).advise("add it with 'tapline sr scan SR', or remove it");
        found.push(differs(uuid, None, vec![candidate.file], Vec::new(), problem));
    }
    for Unplaced { file, problem } in sorted.unplaced {
        found.push(differs(uuid, None, vec![file], Vec::new(), problem));
    }
    let held = same_file::held(daemon, uuid).await?.into_iter().filter(|held| held.image.sr == uuid);
    for same_file::Held { image, vdi, problem } in held {
        found.push(differs(uuid, Some(vdi), vec![image.file.clone()], vec![image.file], problem));
    }
    Ok(found)
}

fn differs(sr: Uuid, vdi: Option<Uuid>, found: Vec<String>, catalogue: Vec<String>, problem: Problem) -> Difference {
    let at = Difference { sr: Some(sr), vdi, found, catalogue, ..Difference::new(DifferenceKind::File) };
    Difference { problem: Some(problem), ..at }
}

/// Lists a repository, and classifies its files.
async fn list(daemon: &Daemon, uuid: Uuid, directory: &Arc<Directory>) -> Result<(Sr, Sorted), Problem> {
    // Files that a task is using, when they are listed or compared, are left to that task.
    let mut in_hand = daemon.catalogue.read(intents).await?;
    let listed = directory.clone();
    let entries = daemon.srs.patience.ask(uuid, "list", move || {
        listed.still_there()?;
        listed.entries()
    });
    let entries = entries.await?;
    let (sr, known, later) =
        daemon.catalogue.read(move |view| Ok((view.sr(uuid)?, view.images_of_sr(uuid)?, intents(view)?))).await?;
    in_hand.extend(later);
    let mut sorted = listing::sort(&sr, entries, known, &in_hand);
    let (alone, linked) = same_file::take_out(daemon, &sr, directory, sorted.appeared).await?;
    sorted.appeared = alone;
    sorted.unplaced.extend(linked);
    Ok((sr, sorted))
}

/// The intents of tasks, which contain the files that they create, change or remove.
fn intents(view: &View<'_>) -> Result<Vec<String>, Problem> {
    Ok(view.journal()?.into_iter().map(|entry| entry.intent.to_string()).collect())
}

/// The missing images that are still missing: a task may have created one after the files were listed.
async fn really_gone(
    daemon: &Daemon,
    sr: &Sr,
    directory: &Arc<Directory>,
    absent: Vec<Image>,
) -> Result<Vec<Image>, Problem> {
    let directory = directory.clone();
    let looked = daemon.srs.patience.ask(sr.uuid, "find images in", move || {
        let gone = |image: &Image| directory.physical(&image.file).is_err_and(|problem| problem.code == Code::NotFound);
        Ok(absent.into_iter().filter(gone).collect())
    });
    looked.await
}

/// The metadata of new files and, if there is a VHD among them, of known VHDs, because their children refer to them
/// by a UUID in the file.
async fn examine(
    daemon: &Daemon,
    sr: &Sr,
    directory: &Arc<Directory>,
    sorted: &Sorted,
    context: Option<&Context>,
) -> Result<(Vec<Found>, Vec<Unplaced>), Problem> {
    let appeared: HashSet<_> = sorted.appeared.iter().map(|candidate| candidate.format).collect();
    let known = sorted.present.iter().map(|(image, _)| Candidate::known(image));
    let (to_read, not_read): (Vec<_>, Vec<_>) =
        known.partition(|known| appeared.contains(&known.format) && known.has_identity());
    let all: Vec<Candidate> = sorted.appeared.iter().cloned().chain(to_read).collect();
    let (mut found, unplaced) = info::of_all(daemon, sr, directory, all, context).await?;
    found.extend(not_read.into_iter().map(Found::of_known));
    Ok((found, unplaced))
}
