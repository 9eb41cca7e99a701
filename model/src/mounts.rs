//! Mounts file systems below one directory, and unmounts them at the end.
//!
//! It knows nothing about their contents.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use testbed::tool;

/// Mounted file systems, unmounted on drop.
#[derive(Debug)]
pub struct Mounts {
    room: PathBuf,
    mounted: Vec<PathBuf>,
}

impl Mounts {
    /// No mounts yet, below `room`.
    pub fn below(room: &Path) -> Mounts {
        Mounts { room: room.to_owned(), mounted: Vec::new() }
    }

    /// Mounts at `name` with these options. `made`: first creates an image of this size in MiB, with a file system made
    /// by this program with these options.
    pub fn mount(&mut self, name: &str, words: &[&str], made: Option<(&str, &[&str], u64)>) -> Result<(), String> {
        let at = self.room.join(name);
        fs::create_dir(&at).map_err(|error| format!("{}: {error}", at.display()))?;
        let mut command = Command::new("mount");
        command.args(words);
        if let Some((mkfs, options, mebibytes)) = made {
            let image = self.room.join(format!("{name}.image"));
            let file = File::create(&image).and_then(|file| file.set_len(mebibytes << 20));
            file.map_err(|error| format!("{}: {error}", image.display()))?;
            run(Command::new(mkfs).args(options).arg(&image))?;
            command.arg(&image);
        }
        run(command.arg(&at))?;
        self.mounted.push(at);
        Ok(())
    }

    /// Mounts a directory at `name`, through FUSE.
    pub fn show(&mut self, name: &str, directory: &Path) -> Result<(), String> {
        let at = self.room.join(name);
        for directory in [directory, &at] {
            fs::create_dir_all(directory).map_err(|error| format!("{}: {error}", directory.display()))?;
        }
        run(Command::new("bindfs").arg(directory).arg(&at))?;
        self.mounted.push(at);
        Ok(())
    }

    /// Leaves all file systems mounted.
    pub fn keep(&mut self) {
        self.mounted.clear();
    }
}

impl Drop for Mounts {
    fn drop(&mut self) {
        for at in self.mounted.iter().rev() {
            // A killed process closes its files a moment later.
            let mut left = Ok(());
            for _ in 0..100 {
                left = run(Command::new("umount").arg(at));
                if left.is_ok() {
                    break;
                }
                std::thread::sleep(Duration::from_millis(50));
            }
            if let Err(why) = left {
                eprintln!("{why}");
            }
        }
    }
}

/// Runs a program that must succeed.
fn run(command: &mut Command) -> Result<(), String> {
    tool::text(command).map(drop).map_err(|error| error.to_string())
}
