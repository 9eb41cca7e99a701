//! Finds images that are one file with two names: hard links (`cp -al`), bind mounts. Two disks of one file would
//! overwrite each other's data.
//!
//! Files are compared by device and inode number while both are open, across all attached repositories, never by
//! path. Invariant: of the VDIs of one file, the one in use or recorded first keeps it; the others are diverged until
//! a user decides. A file of an image never becomes a second image. Read-only VDIs may share a file.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use api::{Code, Problem, Sr, Unplaced};
use repo::Tx;
use repo::catalogue::{Image, ImageState};
use repo::driver::{Directory, FileNumbers};
use uuid::Uuid;

use super::listing::{Candidate, unplaced};
use super::record;
use crate::daemon::Daemon;
use crate::fault::{self, Planted};

/// The file of an image in the catalogue.
#[derive(Clone, Debug)]
struct Recorded {
    image: Image,
    numbers: FileNumbers,
    directory: Arc<Directory>,
    /// Its VDI, if it has one.
    vdi: Option<Owner>,
    /// Number of images that were recorded before it.
    age: usize,
}

/// The VDI of an image.
#[derive(Clone, Copy, Debug)]
struct Owner {
    uuid: Uuid,
    read_only: bool,
    in_use: bool,
}

impl Recorded {
    fn path(&self) -> String {
        self.image.path(self.directory.path()).display().to_string().escape_debug().to_string()
    }

    /// Its path and owner, for messages.
    fn shown(&self) -> String {
        let owner = self.vdi.map_or_else(|| "an image of other VDIs".into(), |vdi| format!("VDI {}", vdi.uuid));
        format!("'{}' ({owner})", self.path())
    }

    /// The lowest rank keeps the file: an image that others are based on, then a running disk, then the oldest.
    fn rank(&self) -> (bool, bool, bool, usize) {
        let in_use = self.vdi.is_some_and(|vdi| vdi.in_use);
        (self.vdi.is_some(), !in_use, self.image.state != ImageState::Ready, self.age)
    }
}

/// A name of a file that is or becomes an image.
#[derive(Debug)]
struct Named {
    directory: Arc<Directory>,
    file: String,
    /// The name for messages.
    shown: String,
    /// Whether no disk may write to it.
    read_only: bool,
}

/// A VDI whose file is also another image's.
#[derive(Clone, Debug)]
pub struct Held {
    /// Its image.
    pub image: Image,
    /// The VDI.
    pub vdi: Uuid,
    /// The other image with the file, and advice.
    pub problem: Problem,
}

/// Separates the files that `appeared` in a repository from those that are already an image, or that appear under two
/// names; returns both, the latter with the reason.
pub async fn take_out(
    daemon: &Daemon,
    sr: &Sr,
    directory: &Arc<Directory>,
    appeared: Vec<Candidate>,
) -> Result<(Vec<Candidate>, Vec<Unplaced>), Problem> {
    if appeared.is_empty() || fault::planted(Planted::HardLink) {
        return Ok((appeared, Vec::new()));
    }
    let devices = appeared.iter().filter_map(|candidate| candidate.numbers).map(|numbers| numbers.device).collect();
    let mut known: HashMap<FileNumbers, Vec<Named>> = HashMap::new();
    for one in recorded(daemon, sr.uuid, devices).await? {
        let (numbers, shown, read_only) = (one.numbers, one.shown(), one.vdi.is_some_and(|vdi| vdi.read_only));
        known.entry(numbers).or_default().push(Named {
            directory: one.directory,
            file: one.image.file,
            shown,
            read_only,
        });
    }
    let (directory, fixed) = (directory.clone(), sr.is_read_only());
    let compare = move || {
        let (mut alone, mut taken) = (Vec::new(), Vec::new());
        for candidate in appeared {
            let Some(numbers) = candidate.numbers else { continue };
            let (others, file) = (known.entry(numbers).or_default(), candidate.file.clone());
            let read_only = record::is_read_only(fixed, &file);
            let shares = |other: &&Named| !(read_only && other.read_only);
            let same =
                others.iter().filter(shares).find(|other| is_same(&directory, &file, &other.directory, &other.file));
            match same {
                Some(other) => taken.push(unplaced(file, linked(&directory, &candidate.file, &other.shown))),
                None => {
                    let shown = format!("'{}', which was found at the same time", file.escape_debug());
                    others.push(Named { directory: directory.clone(), file, shown, read_only });
                    alone.push(candidate);
                }
            }
        }
        Ok((alone, taken))
    };
    daemon.srs.patience.ask(sr.uuid, "compare files of", compare).await
}

/// Whether two names are the same file. One that cannot be examined counts as such, so that it is not added; its next
/// reader reports the error.
fn is_same(directory: &Directory, file: &str, other: &Directory, name: &str) -> bool {
    directory.is_same_file(file, other, name).unwrap_or_else(|problem| problem.code != Code::NotFound)
}

fn linked(directory: &Directory, file: &str, other: &str) -> Problem {
    let path = directory.path().join(file).display().to_string();
    let path = path.escape_debug();
    let what =
        format!("it is the same file as {other}: a hard link or a bind mount, and two disks would share its data");
    Problem::new(Code::Exists, what).advise(format!(
        "remove this name: rm '{path}'; or give it a file of its own: cp '{path}' '{path}.new' && mv '{path}.new' \
         '{path}'; then scan again"
    ))
}

/// The VDIs whose file is another image's, in a repository and in others on the same storage.
pub async fn held(daemon: &Daemon, sr: Uuid) -> Result<Vec<Held>, Problem> {
    let mut groups: HashMap<FileNumbers, Vec<Recorded>> = HashMap::new();
    for one in recorded(daemon, sr, HashSet::new()).await? {
        groups.entry(one.numbers).or_default().push(one);
    }
    let mut held = Vec::new();
    for mut group in groups.into_values() {
        group.sort_by_key(Recorded::rank);
        let Some((keeper, others)) = group.split_first() else { continue };
        for other in others {
            if let Some(problem) = double(daemon, other, keeper).await? {
                let vdi = other.vdi.map(|vdi| vdi.uuid).unwrap_or_default();
                held.push(Held { image: other.image.clone(), vdi, problem });
            }
        }
    }
    held.sort_by(|one, other| (one.image.sr, &one.image.file).cmp(&(other.image.sr, &other.image.file)));
    Ok(held)
}

/// Why a VDI cannot be used, if its file is also another image's.
pub async fn shared(daemon: &Daemon, vdi: Uuid) -> Result<Option<Problem>, Problem> {
    let sr = daemon.catalogue.read(move |view| view.vdi(vdi)).await?.sr;
    let mut all = recorded(daemon, sr, HashSet::new()).await?;
    all.sort_by_key(Recorded::rank);
    let is_it = |one: &&Recorded| one.vdi.is_some_and(|owner| owner.uuid == vdi);
    let Some(own) = all.iter().find(is_it) else { return Ok(None) };
    for other in all.iter().filter(|other| other.numbers == own.numbers && other.image.uuid != own.image.uuid) {
        if let Some(problem) = double(daemon, own, other).await? {
            return Ok(Some(problem));
        }
    }
    Ok(None)
}

/// The problem of a VDI whose file is also another image's, if one of the two is writable.
async fn double(daemon: &Daemon, of: &Recorded, other: &Recorded) -> Result<Option<Problem>, Problem> {
    let written = |one: &Recorded| one.vdi.is_some_and(|vdi| !vdi.read_only);
    let Some(vdi) = of.vdi.filter(|_| written(of) || written(other)) else { return Ok(None) };
    let (one, two) = (of.clone(), other.clone());
    let same = move || Ok(is_same(&one.directory, &one.image.file, &two.directory, &two.image.file));
    if !daemon.srs.patience.ask(of.image.sr, "compare files of", same).await? {
        return Ok(None);
    }
    let (vdi, path, shown) = (vdi.uuid, of.path(), other.shown());
    let what = format!(
        "VDI {vdi} is held: its file '{path}' is the same file as {shown}, by a hard link or a bind mount, and two \
         disks would overwrite each other's data"
    );
    Ok(Some(Problem::new(Code::State, what).advise(format!(
        "destroy this VDI, which removes this name only: tapline vdi destroy {vdi}; or give it a file of its own: cp \
         '{path}' '{path}.new' && mv '{path}.new' '{path}', then tapline vdi reconcile {vdi} --believe catalogue"
    ))))
}

/// Blocks the VDIs whose file is another image's, after a repository was attached or scanned; returns all such VDIs.
pub async fn hold(daemon: &Daemon, sr: Uuid) -> Vec<Held> {
    if fault::planted(Planted::HardLink) {
        return Vec::new();
    }
    let found = match held(daemon, sr).await {
        Ok(found) if found.is_empty() => return found,
        Ok(found) => found,
        Err(problem) => {
            tracing::warn!(%sr, "cannot determine whether disks share a file: {problem}");
            return Vec::new();
        }
    };
    let all = found.clone();
    let recorded = daemon.catalogue.write(move |tx| found.into_iter().map(|held| diverge(tx, held)).collect());
    let recorded: Result<Vec<Option<Held>>, Problem> = recorded.await;
    match recorded {
        Ok(held) => held.iter().flatten().for_each(|held| tracing::error!(vdi = %held.vdi, "{}", held.problem)),
        Err(problem) => tracing::warn!(%sr, "disks that share a file could not be held: {problem}"),
    }
    all
}

/// Blocks a VDI, unless it is in use, changed by a task, or blocked already.
fn diverge(tx: &mut Tx<'_>, held: Held) -> Result<Option<Held>, Problem> {
    let (vdi, image) = (tx.find_vdi(held.vdi)?, tx.find_image(held.image.uuid)?);
    let (Some(vdi), Some(image)) = (vdi, image.filter(|image| image.state == ImageState::Ready)) else {
        return Ok(None);
    };
    if !vdi.users.is_empty() || tx.claimant(vdi.uuid)?.is_some() || image.file != held.image.file {
        return Ok(None);
    }
    tx.set_image(&Image { state: ImageState::Diverged, ..image })?;
    Ok(Some(held))
}

/// The files of all images in a repository, and in the others on its device or on `devices`: only those can share
/// files, and a hanging one elsewhere does not delay this. A repository that does not respond is left out.
async fn recorded(daemon: &Daemon, own: Uuid, mut devices: HashSet<u64>) -> Result<Vec<Recorded>, Problem> {
    let mut all = Vec::new();
    let open = daemon.srs.all_open();
    devices.extend(open.iter().filter(|(sr, _)| *sr == own).map(|(_, directory)| directory.device()));
    let ages = daemon.catalogue.read(|view| view.images_by_age()).await?;
    let ages: HashMap<Uuid, usize> = ages.into_iter().enumerate().map(|(age, image)| (image, age)).collect();
    for (sr, directory) in open.into_iter().filter(|(sr, at)| *sr == own || devices.contains(&at.device())) {
        let listed = directory.clone();
        let entries = match daemon.srs.patience.ask(sr, "list", move || listed.entries()).await {
            Ok(entries) => entries,
            Err(problem) => {
                tracing::warn!(%sr, "not compared with the files of other repositories: {problem}");
                continue;
            }
        };
        let files = entries.into_iter().filter(|entry| entry.file).map(|entry| (entry.name, entry.numbers));
        let files: HashMap<String, FileNumbers> = files.collect();
        let read = daemon.catalogue.read(move |view| {
            let vdis = view.vdis(Some(sr))?.into_iter();
            let owner =
                |vdi: api::Vdi| Owner { uuid: vdi.uuid, read_only: vdi.read_only, in_use: !vdi.users.is_empty() };
            let owners: HashMap<String, Owner> = vdis.map(|vdi| (vdi.file.clone(), owner(vdi))).collect();
            Ok((view.images_of_sr(sr)?, owners))
        });
        let (images, owners) = read.await?;
        for image in images {
            let Some(numbers) = files.get(&image.file).copied() else { continue };
            let (vdi, age) = (owners.get(&image.file).copied(), ages.get(&image.uuid).copied().unwrap_or(usize::MAX));
            all.push(Recorded { image, numbers, directory: directory.clone(), vdi, age });
        }
    }
    Ok(all)
}
