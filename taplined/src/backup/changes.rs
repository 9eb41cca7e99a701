//! The blocks that have changed in a disk since its last backup to a target, so that only these are read.
//!
//! The snapshot of which that backup has the content was kept without data, as its *base* (decision 0068). It knows
//! neither maps nor targets: the list is that of `vdi changed`, which is refused if it could name too little, and the
//! backup is looked up by its ID and the digest of its content. Invariant: a list goes from the state that was backed
//! up to the snapshot that is read. If either is uncertain there is no list, and everything is read.

use std::ffi::OsString;
use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use api::{BackupId, BackupTarget, ChangedExtent, ChangesFormat, DiskBackup, Problem, Vdi};
use repo::catalogue::KeptBase;
use uuid::Uuid;

use crate::daemon::Daemon;
use crate::task::blocking;
use crate::vdi::begin;

/// What has changed since a backup. The list is removed when this is dropped.
#[derive(Debug)]
pub struct Changes {
    /// The backup.
    pub since: BackupId,
    content: String,
    list: List,
}

impl Changes {
    /// The arguments of the backup program.
    pub fn words(&self) -> Vec<OsString> {
        let since = self.since.to_string();
        let words = ["--since".into(), since.into(), "--since-content".into(), OsString::from(&self.content)];
        words.into_iter().chain(["--changed".into(), self.list.path.clone().into()]).collect()
    }
}

/// What has changed in `disk` up to `snapshot` since the last backup to a target that has `backups` of it; or why that
/// is not known.
pub async fn since(
    daemon: &Daemon,
    disk: Uuid,
    snapshot: &Vdi,
    target: &BackupTarget,
    backups: &[DiskBackup],
) -> Result<Changes, String> {
    let Some(KeptBase { snapshot: from, base, .. }) = base_of(daemon, disk, target.uuid).await? else {
        let is_tracked = daemon.catalogue.read(move |view| view.is_tracked(disk)).await;
        return Err(match is_tracked.map_err(|problem| problem.detail)? {
            true => "no backup of the disk to this target is known since which all changes were recorded",
            false => "the changes of the disk are not recorded (see: tapline vdi cbt enable)",
        }
        .to_owned());
    };
    let backup = backups.iter().find(|backup| backup.id == base.backup);
    let backup = backup.ok_or_else(|| format!("backup {} is no longer on the target", base.backup))?;
    if backup.content != base.content {
        return Err(format!("backup {} on the target has other content than the one that was made", base.backup));
    }
    if backup.size != snapshot.size {
        return Err(format!("the disk had another size when backup {} was made", base.backup));
    }
    let changes = begin::changed(daemon, snapshot.uuid, from, ChangesFormat::Extents).await;
    let changes = changes.map_err(|problem| problem.detail)?;
    let Some(extents) = changes.extents.filter(|_| changes.size == snapshot.size) else {
        return Err("the list of its changes is of another size".to_owned());
    };
    let run_directory = daemon.config.run_directory.clone();
    let list = blocking("write a list of changes", move || List::write(&run_directory, &extents)).await;
    Ok(Changes { since: base.backup, content: base.content, list: list.map_err(|problem| problem.detail)? })
}

/// The base of the next backup of a disk to a target.
async fn base_of(daemon: &Daemon, disk: Uuid, target: Uuid) -> Result<Option<KeptBase>, String> {
    let bases = daemon.catalogue.read(move |view| view.backup_bases(Some(disk))).await;
    let bases = bases.map_err(|problem| problem.detail)?;
    Ok(bases.into_iter().find(|base| base.base.target == target))
}

/// A file with a list of changes. It says where a guest has written, so only this user can read it.
#[derive(Debug)]
struct List {
    path: PathBuf,
}

impl List {
    fn write(run_directory: &Path, extents: &[ChangedExtent]) -> Result<List, Problem> {
        let directory = directory_of(run_directory);
        let path = directory.join(Uuid::new_v4().to_string());
        let failed = |error: io::Error| Problem::failed(format_args!("write {}", path.display()), error);
        match fs::DirBuilder::new().mode(0o700).create(&directory) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(failed(error)),
            _ => {}
        }
        let mut file = fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path).map_err(failed)?;
        let list = List { path: path.clone() };
        let bytes = serde_json::to_vec(extents).map_err(|error| failed(error.into()))?;
        file.write_all(&bytes).map_err(failed)?;
        Ok(list)
    }
}

impl Drop for List {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_file(&self.path) {
            tracing::warn!(path = %self.path.display(), %error, "a list of changes cannot be removed");
        }
    }
}

/// The directory of these files.
pub fn directory_of(run_directory: &Path) -> PathBuf {
    run_directory.join("changes")
}

#[cfg(test)]
mod test {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_list_is_private_and_removed_with_its_owner() {
        let room = tempfile::tempdir().unwrap();
        let list = List::write(room.path(), &[ChangedExtent { start: 65536, length: 131_072 }]).unwrap();
        assert_eq!(fs::read_to_string(&list.path).unwrap(), r#"[{"start":65536,"length":131072}]"#);
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!((mode(&list.path), mode(&directory_of(room.path()))), (0o600, 0o700));
        let path = list.path.clone();
        drop(list);
        assert!(!path.exists());
        let left = List::write(room.path(), &[]).unwrap();
        super::super::forget(&directory_of(room.path()));
        assert!(!left.path.exists());
    }
}
