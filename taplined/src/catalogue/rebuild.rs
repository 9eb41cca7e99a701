//! Rebuilds the catalogue from the repositories' inventories while no daemon runs: names, snapshots and files of disks
//! are restored. What no repository records is lost: VBDs, VMs, tokens. Running disks are adopted when the daemon
//! starts, according to their processes (`crate::reconcile`).
//!
//! The new catalogue is created next to the current one and replaces it at the end.

use std::collections::{HashMap, HashSet};
use std::path::Path;

use api::{AbsolutePath, Code, Problem, Sr, SrSource, SrState};
use repo::Catalogue;
use repo::catalogue::backup;
use repo::driver::{self, Attached, Directory, Label, Last, LastHost};
use repo::inventory::{self, Read};

use super::put_in_place::{finish, must_have_none};
use crate::config::Config;
use crate::daemon;
use crate::predecessors;

/// Rebuilds the catalogue; returns a message for the user.
pub async fn rebuild(config: &Config, directories: &[AbsolutePath]) -> Result<String, Problem> {
    let _locks = daemon::alone(config)?;
    must_have_none(config)?;
    let new = backup::clear_new(&config.catalogue())?;
    let catalogue = Catalogue::open(&new)?;
    let (mut said, mut hosts) = (String::new(), HashSet::new());
    for path in directories {
        if Path::new(path.as_str()).starts_with(&config.run_directory) {
            let what = format!("{path} is the daemon's mount point of a network repository");
            let advice = "omit it, and introduce the repository once the daemon runs: tapline sr introduce";
            return Err(Problem::new(Code::Invalid, what).advise(advice));
        }
        let Imported { message, host } = import_repository(&catalogue, path).await?;
        said += &message;
        hosts.extend(host);
    }
    // Since this machine was started it was this host, so no other machine is; and its catalogue was here, and is lost.
    let ran_here = predecessors::known(&config.run_directory);
    hosts.retain(|last: &LastHost| last.state_directory == config.state_directory && ran_here.contains(last));
    // Backups of its disks are those of the new catalogue's then.
    if let [last] = &hosts.into_iter().collect::<Vec<LastHost>>()[..] {
        daemon::be_host(&catalogue, last).await?;
    }
    said += &finish(config, catalogue, "rebuild")?;
    said += "start taplined: it adopts running disks. Add network repositories with 'tapline sr introduce'. VBDs of \
        disks that are not running, VMs, tokens, backup targets and schedules of backups must be created again\n";
    Ok(said)
}

/// What was found in a repository.
struct Imported {
    message: String,
    /// The host that last used it, if that is known.
    host: Option<LastHost>,
}

/// Imports one repository from its inventory.
async fn import_repository(catalogue: &Catalogue, path: &AbsolutePath) -> Result<Imported, Problem> {
    let source = SrSource::Dir { path: path.clone() };
    let label = Label::read(&Directory::open(path)?)?.ok_or_else(|| {
        let what = format!("{path} is not a repository: it has no label ({})", driver::LABEL);
        Problem::new(Code::NotFound, what)
            .advise("give the directory that contains the images, and check that it is mounted")
    })?;
    // No other process may use it, even on another host.
    let Attached { directory, variant } = driver::attach(path, &source, label.uuid)?;
    let host = match directory.last_host()? {
        Last::Host(last) => Some(last),
        Last::Nobody | Last::Unknown => None,
    };
    let sr = Sr {
        uuid: label.uuid,
        name: label.name,
        description: api::Description::default(),
        tags: api::Tags::default(),
        other_config: api::OtherConfig::default(),
        source,
        state: SrState::Attached,
        health: api::Health::healthy(),
        variant: Some(variant),
        space: None,
        reserve: 0,
        share_depth: api::SHARE_DEPTH,
        split: api::SizeRule::default(),
        merge: api::SizeRule::default(),
        policy: None,
        problem: None,
        created: jiff::Timestamp::now(),
    };
    let (log, contents) = match inventory::read(&directory, sr.uuid)? {
        Read::Whole(log, contents) => (log, contents),
        Read::Damaged(damage) => return Err(damage.why),
        Read::Absent => {
            let message = format!(
                "'{}' ({path}) has no inventory: find its images with 'tapline sr scan {}'\n",
                sr.name, sr.uuid
            );
            catalogue.write(move |tx| tx.add_sr(&sr)).await?;
            return Ok(Imported { message, host });
        }
    };
    let entries = directory.entries()?.into_iter().filter(|entry| entry.file);
    let files: HashMap<String, u64> = entries.map(|entry| (entry.name, entry.physical)).collect();
    let (name, vdis, images) = (contents.words.name.clone(), contents.vdis.len(), contents.images.len());
    let missing = contents.images.values().filter(|image| !files.contains_key(&image.file)).count();
    let taken = catalogue.write(move |tx| {
        tx.add_sr(&sr)?;
        tx.take_in(sr.uuid, (log.generation, &log.head), &contents, &files).map(drop)
    });
    taken.await?;
    let missing = if missing > 0 { format!(", {missing} of them missing") } else { String::new() };
    let message = format!("'{name}' ({path}): {vdis} VDIs in {images} images{missing}\n");
    Ok(Imported { message, host })
}

/// The directories as typed by the user, made absolute.
pub fn absolute(typed: &[std::path::PathBuf]) -> Result<Vec<AbsolutePath>, Problem> {
    let of = |path: &std::path::PathBuf| {
        let tried = format!("resolve the directory {}", path.display());
        let found = std::fs::canonicalize(path).map_err(|error| Problem::failed(&tried, error))?;
        AbsolutePath::try_from(text(&found)).map_err(|why| Problem::failed(&tried, why))
    };
    typed.iter().map(of).collect()
}

fn text(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}
