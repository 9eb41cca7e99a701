//! Redo logs of images, which are passed to disk processes along with the images: they preserve the changes of
//! completed requests beyond the process that completed them.
//!
//! A log is a file in memory, named after the image's file by the same rules as in disk processes, whose source file is
//! shared (`redo_name`); a process that serves the image without the daemon finds it too. It knows nothing about a
//! log's contents.

use std::fs::{DirBuilder, File, Metadata, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use api::{Code, Problem};
use control::redo_name;
use repo::driver::{Directory, end_map, is_used};

use super::control::PassedFile;
use crate::config::Config;

/// The directory of the redo logs.
#[derive(Clone, Debug)]
pub struct RedoLogs {
    directory: PathBuf,
}

impl RedoLogs {
    /// The redo logs in the configured run directory.
    pub fn of(config: &Config) -> RedoLogs {
        RedoLogs { directory: config.run_directory.join("redo") }
    }

    /// The files to pass with an image file: its redo log; and, for an image passed for reading into which a process
    /// has left data to be written, the image once more, open for writing.
    pub fn to_pass(&self, path: &Path, write: bool, image: &File) -> Result<Vec<PassedFile>, Problem> {
        self.open(path, write, image)
            .map_err(|error| Problem::failed(format_args!("open the redo log of {}", path.display()), error))
    }

    fn open(&self, path: &Path, write: bool, image: &File) -> io::Result<Vec<PassedFile>> {
        let log = self.directory.join(redo_name::file_name(&image.metadata()?));
        if !write && std::fs::metadata(&log).map_or(0, |found| found.len()) == 0 {
            return Ok(Vec::new());
        }
        DirBuilder::new().recursive(true).mode(0o700).create(&self.directory)?;
        let file = OpenOptions::new().read(true).write(true).create(write).truncate(false).mode(0o600).open(&log)?;
        let mut all = vec![PassedFile { path: log, write: true, file }];
        if !write {
            let again = format!("/proc/self/fd/{}", image.as_raw_fd());
            let file = OpenOptions::new().read(true).write(true).open(again)?;
            all.push(PassedFile { path: path.to_owned(), write: true, file });
        }
        Ok(all)
    }

    /// Refuses to serve an image for writing to a guest that already has it, if its process's redo log is gone.
    pub fn must_be_there(&self, path: &Path, image: &Metadata) -> Result<(), Problem> {
        let tried = |error| Problem::failed(format_args!("find the redo log of {}", path.display()), error);
        let log = self.directory.join(redo_name::file_name(image));
        if log.try_exists().map_err(tried)? {
            return Ok(());
        }
        let what = format!(
            "the redo log of {} is gone ({}): completed writes that the guest had not flushed are lost",
            path.display(),
            log.display()
        );
        Err(Problem::new(Code::State, what).advise(
            "stop the guest that used it if it still runs, then unplug and plug the VBD: the disk will be as after a \
             power loss",
        ))
    }

    /// Removes the redo logs of a repository's images that no process has locked, because another host has used the
    /// images since. Returns the images whose logs were not empty.
    pub fn remove_void(&self, directory: &Directory) -> Result<Vec<String>, Problem> {
        let mut removed = Vec::new();
        if self.directory.read_dir().map_or(true, |mut logs| logs.next().is_none()) {
            return Ok(removed);
        }
        for entry in directory.entries()?.into_iter().filter(|entry| entry.file && !entry.name.starts_with('.')) {
            let file = match directory.open_marked(&entry.name, true) {
                Err(problem) if problem.code == Code::NotFound => continue,
                opened => opened?,
            };
            let tried = |error| Problem::failed(format_args!("remove the redo log of {}", entry.name), error);
            let log = self.directory.join(redo_name::file_name(&file.metadata().map_err(tried)?));
            let Ok(found) = std::fs::metadata(&log) else { continue };
            if is_used(&file) {
                continue;
            }
            let has_changes = found.len() > 0;
            if has_changes {
                // Only the log shows that the image was written to since; so its map is not trusted any more.
                end_map(&file).map_err(|errno| tried(errno.into()))?;
            }
            std::fs::remove_file(&log).map_err(tried)?;
            if has_changes {
                removed.push(entry.name);
            }
        }
        Ok(removed)
    }

    /// Adds the redo logs of the files that go with a verb.
    pub fn with_logs(&self, mut files: Vec<PassedFile>) -> Result<Vec<PassedFile>, Problem> {
        let logs = files.iter().filter(|file| file.write).map(|file| self.to_pass(&file.path, true, &file.file));
        let logs = logs.collect::<Result<Vec<_>, _>>()?;
        files.extend(logs.into_iter().flatten());
        Ok(files)
    }

    /// The files to pass with those that a process gets at its start.
    pub fn of_handed(&self, files: &[PassedFile]) -> Result<Vec<PassedFile>, Problem> {
        let mut all = Vec::new();
        for file in files {
            all.extend(self.to_pass(&file.path, file.write, &file.file)?);
        }
        Ok(all)
    }
}

#[cfg(test)]
mod test {
    use super::*;
    use crate::disk::mark;

    fn bed() -> (tempfile::TempDir, RedoLogs, PathBuf) {
        let room = tempfile::tempdir().unwrap();
        let path = room.path().join("image");
        std::fs::write(&path, [0; 512]).unwrap();
        let logs = RedoLogs { directory: room.path().join("redo") };
        (room, logs, path)
    }

    #[test]
    fn an_image_that_is_written_has_a_log_that_the_next_process_finds() {
        let (_room, logs, path) = bed();
        let image = OpenOptions::new().read(true).write(true).open(&path).unwrap();
        let first = logs.to_pass(&path, true, &image).unwrap();
        assert_eq!((first.len(), first[0].write), (1, true));
        assert_eq!(logs.to_pass(&path, true, &image).unwrap()[0].path, first[0].path);
    }

    #[test]
    fn an_image_that_another_host_may_have_written_to_has_no_mark() {
        let (room, logs, path) = bed();
        let image = OpenOptions::new().read(true).write(true).open(&path).unwrap();
        let Ok(_) = mark::set_new(&image, uuid::Uuid::new_v4()) else { return };
        let log = logs.to_pass(&path, true, &image).unwrap().remove(0);
        let directory = Directory::open(&room.path().to_str().unwrap().parse().unwrap()).unwrap();
        assert!(logs.remove_void(&directory).unwrap().is_empty(), "an empty one");
        assert!(mark::read(&image).unwrap().is_some());
        let log = OpenOptions::new().create_new(true).write(true).open(log.path).unwrap();
        log.set_len(4096).unwrap();
        assert_eq!(logs.remove_void(&directory).unwrap(), ["image"]);
        assert!(mark::read(&image).unwrap().is_none());
    }

    #[test]
    fn a_read_only_image_has_a_log_only_if_it_is_not_empty() {
        let (_room, logs, path) = bed();
        let image = File::open(&path).unwrap();
        assert!(logs.to_pass(&path, false, &image).unwrap().is_empty());
        let log = logs.to_pass(&path, true, &image).unwrap().remove(0);
        assert!(logs.to_pass(&path, false, &image).unwrap().is_empty(), "an empty one");
        log.file.set_len(4096).unwrap();
        let both = logs.to_pass(&path, false, &image).unwrap();
        assert_eq!(both.iter().map(|file| &file.path).collect::<Vec<_>>(), [&log.path, &path]);
        assert!(both.iter().all(|file| file.write));
    }
}
