//! Which storage a file is on: what stays the same when it is mounted or named anew, as far as the kernel knows that.
//!
//! It reads what /sys says of block devices, and nothing of the storage itself.

use std::fmt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use control::ImageName;
use control::size::readable;
use serde::{Deserialize, Serialize};
use uring::ImageFile;

use crate::failure::Failure;

/// Storage.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StorageIdentity {
    /// What tells it from all other storage.
    pub id: String,
    /// What people call it.
    pub name: String,
}

/// Where /sys has what identifies a device for good, the best first. A partition has that of its disk.
const NAMES: [&str; 7] = ["wwid", "device/wwid", "dm/uuid", "md/uuid", "device/serial", "serial", "loop/backing_file"];

impl StorageIdentity {
    /// That of an image's file.
    pub fn of(name: &ImageName, file: &ImageFile) -> Result<StorageIdentity, Failure> {
        if let Some(kind) = name.model() {
            return Ok(StorageIdentity { id: format!("model:{kind}"), name: format!("a model of {kind}") });
        }
        let failed = |why: String| Failure::new(format!("find the storage of {name}"), why);
        let metadata = file.metadata().map_err(|error| failed(error.to_string()))?;
        let number = match file.device_len() {
            Some(_) => {
                let device = metadata.rdev();
                Ok((rustix::fs::major(device), rustix::fs::minor(device)))
            }
            None => {
                let path = file.path().canonicalize().map_err(|error| failed(error.to_string()))?;
                stats::beneath_filesystem(metadata.dev(), &path)
            }
        };
        Ok(match number {
            Ok(number) => StorageIdentity::of_device(number, Path::new("/sys/dev/block")),
            // It has no device: tmpfs, a server's. Its number is another one after the next mount, which is refused
            // then.
            Err(kind) => {
                let device = metadata.dev();
                StorageIdentity {
                    id: format!("{kind}:{device}"),
                    name: format!("a file system without device ({kind})"),
                }
            }
        })
    }

    fn of_device((major, minor): stats::DeviceNumber, devices: &Path) -> StorageIdentity {
        let device = devices.join(format!("{major}:{minor}"));
        let directory = device.canonicalize().unwrap_or(device);
        let whole = match directory.join("partition").exists() {
            true => directory.parent().map_or_else(|| directory.clone(), Path::to_owned),
            false => directory.clone(),
        };
        let read = |path: PathBuf| std::fs::read_to_string(path).ok().map(|text| text.trim().to_owned());
        let known = NAMES.iter().find_map(|name| read(whole.join(name)).filter(|text| !text.is_empty()));
        let sectors = read(whole.join("size")).and_then(|text| text.parse::<u64>().ok()).unwrap_or(0);
        let name = whole.file_name().map_or_else(|| format!("{major}:{minor}"), |name| name.to_string_lossy().into());
        let size = readable(sectors.saturating_mul(512));
        let model = read(whole.join("device/model")).filter(|text| !text.is_empty());
        let name = match &model {
            Some(model) => format!("{name} ({model}, {size})"),
            None => format!("{name} ({size})"),
        };
        // What has no name of its own is known by its place and its size.
        let id = match known {
            Some(known) => format!("{known} of {sectors} sectors"),
            None => format!("{major}:{minor} of {sectors} sectors"),
        };
        StorageIdentity { id, name }
    }
}

impl fmt::Display for StorageIdentity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)
    }
}

#[cfg(test)]
mod test {
    use super::*;

    fn devices(files: &[(&str, &str)]) -> tempfile::TempDir {
        let room = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = room.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        room
    }

    #[test]
    fn a_device_is_known_by_what_it_says_of_itself_and_its_size() {
        let room =
            devices(&[("8:0/device/wwid", "naa.5\n"), ("8:0/size", "2097152\n"), ("8:0/device/model", "Fast \n")]);
        let found = StorageIdentity::of_device((8, 0), room.path());
        assert_eq!(found.id, "naa.5 of 2097152 sectors");
        assert_eq!(found.name, "8:0 (Fast, 1 GiB)");
        let room = devices(&[("8:0/size", "2097152\n")]);
        assert_eq!(StorageIdentity::of_device((8, 0), room.path()).id, "8:0 of 2097152 sectors");
    }

    #[test]
    fn a_partition_is_on_its_disk() {
        let room =
            devices(&[("sda/wwid", "naa.5"), ("sda/size", "8"), ("sda/sda1/partition", "1"), ("sda/sda1/size", "4")]);
        std::os::unix::fs::symlink(room.path().join("sda/sda1"), room.path().join("8:1")).unwrap();
        std::os::unix::fs::symlink(room.path().join("sda"), room.path().join("8:0")).unwrap();
        let [disk, part] = [0, 1].map(|minor| StorageIdentity::of_device((8, minor), room.path()));
        assert_eq!(disk, part);
        assert!(disk.name.starts_with("sda"), "{disk}");
    }
}
