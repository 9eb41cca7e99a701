//! The host's block device beneath a file, and what the host's kernel counts for it.
//!
//! It knows numbers of devices, mounts, and /proc/diskstats. Invariant: a device is named where the kernel says that it
//! is the one; otherwise the reason is, and never the device of something that only looks alike.

use std::collections::BTreeMap;
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use crate::clock::monotonic;
use crate::kernel::{DeviceLine, devices};

/// The number of a device: major and minor.
pub type DeviceNumber = (u32, u32);

/// The devices of this host, as they were read together.
#[derive(Clone, Debug)]
pub struct HostDevices {
    /// When, in nanoseconds of CLOCK_MONOTONIC.
    pub read: u64,
    all: BTreeMap<DeviceNumber, DeviceLine>,
}

impl HostDevices {
    /// Reads their counters.
    pub fn read() -> io::Result<HostDevices> {
        let all = devices(&std::fs::read_to_string("/proc/diskstats")?);
        Ok(HostDevices { read: monotonic(), all })
    }

    /// A device; and, where it is a partition, the whole disk behind it.
    pub fn of(&self, number: DeviceNumber) -> Result<Vec<&DeviceLine>, String> {
        let missing = |(major, minor)| format!("the kernel does not count for the device {major}:{minor}");
        let device = self.all.get(&number).ok_or_else(|| missing(number))?;
        let whole = whole_disk(number).and_then(|whole| self.all.get(&whole));
        Ok(std::iter::once(device).chain(whole).collect())
    }
}

/// The whole disk of a partition; `None` for other devices.
fn whole_disk((major, minor): DeviceNumber) -> Option<DeviceNumber> {
    let device = PathBuf::from(format!("/sys/dev/block/{major}:{minor}"));
    // The directory of a partition lies in that of its disk.
    let whole = device.join("partition").exists().then(|| std::fs::read_to_string(device.join("../dev")).ok())??;
    number_of(whole.trim())
}

/// `8:1`.
fn number_of(word: &str) -> Option<DeviceNumber> {
    let (major, minor) = word.split_once(':')?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}

/// The device beneath the file or block device at `path`, or the reason why it is not known. Queries the file system of
/// `path`, so it may block while a file server does not answer.
pub fn beneath(path: &Path) -> Result<DeviceNumber, String> {
    let path = path.canonicalize().map_err(|error| error.to_string())?;
    let found = path.metadata().map_err(|error| error.to_string())?;
    match found.file_type().is_block_device() {
        true => Ok(split(found.rdev())),
        false => beneath_filesystem(found.dev(), &path),
    }
}

/// The device beneath the file system with the number `device` (`st_dev`), in which the canonical `path` lies. Only
/// what the kernel says of it is read.
pub fn beneath_filesystem(device: u64, path: &Path) -> Result<DeviceNumber, String> {
    match beneath_mount(device, path)? {
        Beneath::Device(number) => Ok(number),
        Beneath::Mount { kind, .. } => Err(kind),
    }
}

/// The storage of a file system.
pub(crate) enum Beneath {
    Device(DeviceNumber),
    /// It has no device.
    Mount {
        kind: String,
        source: String,
    },
}

/// The same with what is known of a file system without a device.
pub(crate) fn beneath_mount(device: u64, path: &Path) -> Result<Beneath, String> {
    let number = split(device);
    if number.0 != 0 {
        return Ok(Beneath::Device(number));
    }
    // It has no device of its own: tmpfs, NFS, overlay; or it has several, as btrfs may.
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").map_err(|error| error.to_string())?;
    let (kind, source) = mount_of(&mounts, number, path).ok_or("its mount is not in /proc/self/mountinfo")?;
    let device = Path::new(&source).metadata().ok().filter(|_| source.starts_with("/dev/"));
    let device = device.filter(|device| device.file_type().is_block_device());
    Ok(match device {
        Some(device) => Beneath::Device(split(device.rdev())),
        None => Beneath::Mount { kind, source },
    })
}

fn split(device: u64) -> DeviceNumber {
    (rustix::fs::major(device), rustix::fs::minor(device))
}

/// The kind and the source of a mount: the one with this number, else (btrfs shows another one) the one in which `path`
/// lies.
fn mount_of(mountinfo: &str, number: DeviceNumber, path: &Path) -> Option<(String, String)> {
    let mounts: Vec<Mount> = mountinfo.lines().filter_map(Mount::parse).collect();
    // Of several at one place the last is seen.
    let over = mounts.iter().filter(|mount| path.starts_with(&mount.place));
    let found = over.enumerate().max_by_key(|(at, mount)| (mount.number == number, mount.place.as_os_str().len(), *at));
    found.map(|(_, mount)| (mount.kind.clone(), mount.source.clone()))
}

/// A line of /proc/self/mountinfo: proc(5).
struct Mount {
    number: DeviceNumber,
    place: PathBuf,
    kind: String,
    source: String,
}

impl Mount {
    fn parse(line: &str) -> Option<Mount> {
        let (before, behind) = line.split_once(" - ")?;
        let mut before = before.split(' ').skip(2);
        let (number, place) = (number_of(before.next()?)?, before.nth(1)?);
        let mut behind = behind.split(' ');
        let (kind, source) = (behind.next()?.to_owned(), unescaped(behind.next()?));
        Some(Mount { number, place: PathBuf::from(unescaped(place)), kind, source })
    }
}

/// Spaces and the like are octal there.
fn unescaped(word: &str) -> String {
    [("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")]
        .iter()
        .fold(word.to_owned(), |word, (escape, char)| word.replace(escape, char))
}

#[cfg(test)]
mod test {
    use super::*;

    const MOUNTS: &str = "22 1 254:1 / / rw,relatime shared:1 - ext4 /dev/vda1 rw
30 22 0:25 / /run rw,nosuid shared:5 - tmpfs tmpfs rw,size=1g
31 22 0:40 /srv /srv rw shared:7 - btrfs /dev/vdb rw,subvol=/srv
32 31 0:41 / /srv/nfs\\040share rw - nfs4 server:/export rw
33 31 0:42 / /srv/nfs\\040share rw - tmpfs tmpfs rw
rubbish
";

    fn mount(number: DeviceNumber, path: &str) -> (String, String) {
        mount_of(MOUNTS, number, Path::new(path)).unwrap()
    }

    #[test]
    fn a_mount_is_found_by_its_number_and_else_by_its_place() {
        let of = |kind: &str, source: &str| (kind.to_owned(), source.to_owned());
        assert_eq!(mount((0, 25), "/run/x"), of("tmpfs", "tmpfs"));
        // A subvolume of btrfs has a number that no mount has.
        assert_eq!(mount((0, 99), "/srv/vms/a.raw"), of("btrfs", "/dev/vdb"));
        assert_eq!(mount((0, 99), "/srvx"), of("ext4", "/dev/vda1"));
        assert_eq!(mount((0, 41), "/srv/nfs share/a"), of("nfs4", "server:/export"));
        assert_eq!(mount((0, 42), "/srv/nfs share/a"), of("tmpfs", "tmpfs"));
        assert_eq!(mount((0, 99), "/srv/nfs share/a"), of("tmpfs", "tmpfs"));
        assert_eq!(mount_of("rubbish - \n1 2 3 - 4", (0, 1), Path::new("/")), None);
    }

    #[test]
    fn a_file_system_without_a_device_is_named_and_one_with_a_device_is_that_device() {
        let not_there = beneath(Path::new("/no/such/file")).unwrap_err();
        assert!(not_there.contains("No such file"), "{not_there}");
        assert_eq!(beneath(Path::new("/proc/self/stat")).unwrap_err(), "proc");
        assert_eq!(beneath_filesystem(rustix::fs::makedev(8, 1), Path::new("/a")), Ok((8, 1)));
    }

    #[test]
    fn the_host_s_own_devices_can_be_read_and_a_partition_has_its_disk() {
        let devices = HostDevices::read().unwrap();
        assert!(devices.of((4095, 1)).unwrap_err().contains("4095:1"));
        for (number, line) in &devices.all {
            let found = devices.of(*number).unwrap();
            assert_eq!(found[0].name, line.name);
            assert!(found.get(1).is_none_or(|whole| line.name.starts_with(&whole.name)), "{found:?}");
        }
    }
}
