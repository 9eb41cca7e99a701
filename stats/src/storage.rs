//! Which storage a file is on: an identity that survives mounting and renaming, as far as the kernel knows one.
//!
//! It reads what /sys says of block devices, and nothing of the storage itself.

use std::fs::Metadata;
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use control::calibration::Storage;
use control::size::readable;

use crate::beneath::{Beneath, DeviceNumber, beneath_mount};

/// Where /sys has what identifies a device for good, the best first. A partition has that of its disk.
const NAMES: [&str; 7] = ["wwid", "device/wwid", "dm/uuid", "md/uuid", "device/serial", "serial", "loop/backing_file"];

/// The storage of the file or block device at `path`, which has this metadata.
pub fn storage_of(metadata: &Metadata, path: &Path) -> io::Result<Storage> {
    let devices = Path::new("/sys/dev/block");
    if metadata.file_type().is_block_device() {
        let device = metadata.rdev();
        return Ok(of_device((rustix::fs::major(device), rustix::fs::minor(device)), devices));
    }
    let path = path.canonicalize()?;
    Ok(match beneath_mount(metadata.dev(), &path) {
        Ok(Beneath::Device(number)) => of_device(number, devices),
        Ok(Beneath::Mount { kind, source }) => of_mount(&kind, &source, metadata.dev()),
        Err(why) => of_mount(&why, "", metadata.dev()),
    })
}

/// That of a file system without a device. A server's is known by its name for it; of others (tmpfs) only the number is
/// known, which is another one after the next mount.
fn of_mount(kind: &str, source: &str, device: u64) -> Storage {
    let is_of_server = kind.starts_with("nfs") || ["cifs", "smb3"].contains(&kind);
    match is_of_server && !source.is_empty() {
        true => Storage { id: format!("{kind}:{source}"), name: format!("{source} ({kind})") },
        false => Storage { id: format!("{kind}:{device}"), name: format!("a file system without device ({kind})") },
    }
}

fn of_device((major, minor): DeviceNumber, devices: &Path) -> Storage {
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
    Storage { id, name }
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
        let found = of_device((8, 0), room.path());
        assert_eq!(found.id, "naa.5 of 2097152 sectors");
        assert_eq!(found.name, "8:0 (Fast, 1 GiB)");
        let room = devices(&[("8:0/size", "2097152\n")]);
        assert_eq!(of_device((8, 0), room.path()).id, "8:0 of 2097152 sectors");
    }

    #[test]
    fn a_partition_is_on_its_disk() {
        let room =
            devices(&[("sda/wwid", "naa.5"), ("sda/size", "8"), ("sda/sda1/partition", "1"), ("sda/sda1/size", "4")]);
        std::os::unix::fs::symlink(room.path().join("sda/sda1"), room.path().join("8:1")).unwrap();
        std::os::unix::fs::symlink(room.path().join("sda"), room.path().join("8:0")).unwrap();
        let [disk, part] = [0, 1].map(|minor| of_device((8, minor), room.path()));
        assert_eq!(disk, part);
        assert!(disk.name.starts_with("sda"), "{disk}");
    }

    #[test]
    fn a_server_s_file_system_stays_the_same_when_it_is_mounted_again_and_others_do_not() {
        let [once, again] = [40, 41].map(|device| of_mount("nfs4", "server:/vms", device));
        assert_eq!((&once, once.name.as_str()), (&again, "server:/vms (nfs4)"));
        assert_ne!(of_mount("nfs4", "other:/vms", 40).id, once.id);
        assert_ne!(of_mount("tmpfs", "tmpfs", 40).id, of_mount("tmpfs", "tmpfs", 41).id);
    }
}
