//! Checks whether the files that a running disk has open are those that its repository has under their names.
//!
//! Somebody may have removed one, or replaced it with a backup: the disk continues in a file that nobody can open any
//! more, and everything written since is lost when its process exits. For each VBD the files of its process are
//! remembered, so that the next process is not given different ones of the same names.

use std::collections::HashMap;
use std::sync::Arc;

use api::{Code, Problem};
use repo::catalogue::Image;
use repo::driver::{Directory, FileNumbers};
use uuid::Uuid;

use crate::daemon::Daemon;
use crate::vdi::ServedLayer;

/// The files of a process, by name.
pub type Known = HashMap<String, FileNumbers>;

/// The files of a disk that are no longer in the repository. None if that is not attached, or for processes that do not
/// report their files.
pub async fn astray(daemon: &Daemon, sr: Uuid, layers: &[ServedLayer]) -> Result<Vec<String>, Problem> {
    let known: Known = layers.iter().filter_map(|layer| Some((layer.file().to_owned(), layer.numbers()?))).collect();
    let Ok(directory) = daemon.srs.directory(sr).await else { return Ok(Vec::new()) };
    daemon.srs.patience.ask(sr, "find the files of a disk in", move || look(&directory, &known)).await
}

fn look(directory: &Arc<Directory>, known: &Known) -> Result<Vec<String>, Problem> {
    let mut astray = Vec::new();
    for (file, numbers) in known {
        if !directory.is_it(file, *numbers)? {
            astray.push(file.clone());
        }
    }
    astray.sort();
    Ok(astray)
}

/// Refuses to serve from files that have taken the place of those that the process before had.
pub fn must_be_those(directory: &Arc<Directory>, chain: &[Image], known: &Known) -> Result<(), Problem> {
    let had = chain.iter().filter_map(|image| Some((image.file.clone(), *known.get(&image.file)?))).collect();
    match look(directory, &had)?.first() {
        None => Ok(()),
        Some(file) => {
            let what = format!("{file} is no longer the file that this disk had open; it was replaced");
            Err(Problem::new(Code::State, what)
                .advise("data written since then is lost; to use the new file, unplug the VBD and plug it again"))
        }
    }
}

/// The problem of a disk that continues in files that are gone.
pub fn problem(vdi: Uuid, pid: Option<u32>, astray: &[String]) -> Problem {
    let process = pid.map_or("its process".into(), |pid| format!("process {pid}"));
    let what = format!(
        "the disk of VDI {vdi} is using files that were removed from its repository or replaced: {}",
        astray.join(", ")
    );
    Problem::new(Code::State, what).advise(format!(
        "all its data is lost when {process} ends: copy it to another disk from inside the guest, or read it through \
         the disk's client; then unplug it and run: tapline vdi reconcile VDI --believe catalogue"
    ))
}
