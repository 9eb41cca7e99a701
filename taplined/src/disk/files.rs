//! Checks whether the files that a running disk has open still exist under their names in the repository.
//!
//! A file may have been removed or replaced with a backup: the disk continues in a file that can no longer be opened,
//! and everything written since is lost when its process exits. The files of each VBD's process are remembered, so
//! that the next process is not given different files of the same names.

use std::collections::HashMap;
use std::fs::File;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use api::{Code, Problem, Vbd};
use repo::catalogue::Image;
use repo::driver::{Directory, FileNumbers};
use uuid::Uuid;

use super::names::ServedLayer;
use crate::daemon::Daemon;

/// The files of a process, by name.
pub type Known = HashMap<String, OpenFile>;

/// A file that a process has, or had, open.
#[derive(Clone, Debug)]
pub struct OpenFile {
    /// Its identity, while it exists.
    pub numbers: FileNumbers,
    /// Keeps the inode in use, so that its number is not reused after the name is removed and the process has exited.
    /// `None` for files opened before this daemon started.
    held: Option<Arc<File>>,
}

impl OpenFile {
    /// An open file, held by this name.
    pub fn held(directory: &Directory, name: &str, file: &File) -> Result<OpenFile, Problem> {
        let failed = |error| Problem::failed("examine an image", error);
        let numbers = FileNumbers::of(file).map_err(failed)?;
        let held = directory.hold(name)?;
        match FileNumbers::of(&held).map_err(failed)? == numbers {
            true => Ok(OpenFile { numbers, held: Some(Arc::new(held)) }),
            false => Err(Problem::failed(format_args!("open {name}"), "it was replaced at this moment")),
        }
    }

    /// Stops holding the file: it now exists only as long as its name and its processes.
    fn release(&mut self) {
        self.held = None;
    }

    /// A file reported by a running process; held if `before` is the same file.
    pub fn reported(numbers: FileNumbers, before: Option<&OpenFile>) -> OpenFile {
        let same = before.filter(|before| before.numbers == numbers);
        OpenFile { numbers, held: same.and_then(|before| before.held.clone()) }
    }
}

/// The files that the processes of VBDs have open, as far as known.
#[derive(Debug, Default)]
pub struct OpenFiles(Mutex<HashMap<Uuid, Known>>);

impl OpenFiles {
    fn lock(&self) -> MutexGuard<'_, HashMap<Uuid, Known>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The files of a VBD's current or last process.
    pub fn of(&self, vbd: Uuid) -> Known {
        self.lock().get(&vbd).cloned().unwrap_or_default()
    }

    /// Replaces the remembered files of a VBD.
    pub fn set(&self, vbd: Uuid, known: Known) {
        self.lock().insert(vbd, known);
    }

    /// Forgets the files of a VBD that was unplugged.
    pub fn forget(&self, vbd: Uuid) {
        self.lock().remove(&vbd);
    }

    /// Stops holding files of this name, whose space must be freed when the name is removed.
    pub fn release_held(&self, file: &str) {
        let mut all = self.lock();
        all.values_mut().filter_map(|known| known.get_mut(file)).for_each(OpenFile::release);
    }
}

/// A file that a disk has open and that is no longer in the repository under its name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Astray {
    /// Its name.
    pub file: String,
    /// Its identity.
    pub numbers: FileNumbers,
}

/// The files of a disk that are no longer in the repository. Empty if the repository is not attached, or the process
/// does not report its files.
pub async fn astray(daemon: &Daemon, sr: Uuid, layers: &[ServedLayer]) -> Result<Vec<Astray>, Problem> {
    let reported = |layer: &ServedLayer| Some((layer.file().to_owned(), OpenFile::reported(layer.numbers()?, None)));
    let known: Known = layers.iter().filter_map(reported).collect();
    let Ok(directory) = daemon.srs.directory(sr).await else { return Ok(Vec::new()) };
    daemon.srs.patience.ask(sr, "find the files of a disk in", move || look(&directory, &known)).await
}

/// The files of `known` that are no longer in the directory under their names.
pub fn look(directory: &Arc<Directory>, known: &Known) -> Result<Vec<Astray>, Problem> {
    let mut astray = Vec::new();
    for (file, OpenFile { numbers, .. }) in known {
        if !directory.is_it(file, *numbers)? {
            astray.push(Astray { file: file.clone(), numbers: *numbers });
        }
    }
    astray.sort_by(|one, other| one.file.cmp(&other.file));
    Ok(astray)
}

/// Refuses to serve files that have replaced those of the previous process. `to_use` are the commands that serve them
/// anyway.
pub fn must_be_those(directory: &Arc<Directory>, chain: &[Image], known: &Known, to_use: &str) -> Result<(), Problem> {
    let had = chain.iter().filter_map(|image| Some((image.file.clone(), known.get(&image.file)?.clone()))).collect();
    match look(directory, &had)?.first() {
        None => Ok(()),
        Some(Astray { file, .. }) => {
            let what =
                format!("{file} is no longer the file that this disk had open; it was replaced, removed or moved");
            Err(Problem::new(Code::State, what).advise(lost(to_use)))
        }
    }
}

/// Why a diverged disk whose process has died is not restarted. Matching inode numbers prove nothing: numbers of
/// removed files are reused.
pub fn unproven(vbd: &Vbd) -> Problem {
    let what = format!(
        "the files of VDI {} were not those that its disk had open when its process died, and nothing proves that they \
         are now",
        vbd.vdi
    );
    Problem::new(Code::State, what).advise(lost(&decided(vbd)))
}

fn lost(to_use: &str) -> String {
    format!(
        "what was written to a file that was removed or replaced is lost. Move it back if it was moved, or put a \
         backup in its place; then use what is there: {to_use}"
    )
}

/// The commands that serve the files in the repository.
pub fn again(vbd: &Vbd) -> String {
    format!("tapline vbd unplug {0}; tapline vbd plug {0}", vbd.uuid)
}

/// The commands that serve the files of a diverged VDI.
pub fn decided(vbd: &Vbd) -> String {
    let (vbd, vdi) = (vbd.uuid, vbd.vdi);
    format!("tapline vbd unplug {vbd}; tapline vdi reconcile {vdi} --believe catalogue; tapline vbd plug {vbd}")
}

/// The problem of a disk that uses files removed from its repository.
pub fn problem(daemon: &Daemon, vbd: &Vbd, directory: &Path, astray: &[Astray]) -> Problem {
    let (vdi, disk) = (vbd.vdi, vbd.uuid);
    let process = vbd.pid.map_or("its process".into(), |pid| format!("process {pid}"));
    let names: Vec<&str> = astray.iter().map(|astray| astray.file.as_str()).collect();
    let what = format!(
        "the disk of VDI {vdi} is using files that were removed from its repository or replaced: {}; its guest \
         continues, but the data is lost when {process} ends",
        names.join(", ")
    );
    let pid = vbd.pid.map_or("PID".into(), |pid| pid.to_string());
    let at = |file: &str| quoted(&directory.join(file).display().to_string());
    let saved = |file: &str| at(&format!("{file}.saved"));
    let save = |astray: &Astray| {
        let inode = astray.numbers.inode;
        format!("cp --sparse=always \"$(find -L /proc/{pid}/fd -inum {inode} -print -quit)\" {}; ", saved(&astray.file))
    };
    let replace = |astray: &Astray| format!("mv {} {}; ", saved(&astray.file), at(&astray.file));
    let (save, replace): (String, String) = (astray.iter().map(save).collect(), astray.iter().map(replace).collect());
    let socket = quoted(&daemon.disks.socket(disk).display().to_string());
    Problem::new(Code::State, what).advise(format!(
        "if the file was moved, move it back. Otherwise save it while the process runs: tapline disk {socket} pause; \
         {save}then serve what was saved: tapline vbd unplug --force {disk}; {replace}tapline vdi reconcile {vdi} \
         --believe catalogue; tapline vbd plug {disk}"
    ))
}

/// A path quoted for a shell.
fn quoted(path: &str) -> String {
    format!("'{}'", path.replace('\'', "'\\''"))
}
