//! On real file systems, made in a file and mounted over a loop device. This requires root; what cannot be run is
//! reported.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::*;

/// A file system of its own, gone with this value.
struct Mounted {
    room: tempfile::TempDir,
}

/// A file system made by `mkfs` with `options`, of this size; `None`, with a message, where that is impossible.
fn mounted(mkfs: &str, options: &[&str], mebibytes: u64) -> Option<Mounted> {
    let room = tempfile::tempdir().unwrap();
    let (image, at) = (room.path().join("image"), room.path().join("at"));
    std::fs::File::create(&image).unwrap().set_len(mebibytes << 20).unwrap();
    std::fs::create_dir(&at).unwrap();
    let run = |program: &str, words: &[&std::ffi::OsStr]| {
        let path = format!("{}:/usr/sbin:/sbin", std::env::var("PATH").unwrap());
        let ran = Command::new(program).args(words).env("PATH", path).output();
        ran.is_ok_and(|ran| ran.status.success())
    };
    let mut words: Vec<&std::ffi::OsStr> = options.iter().map(|word| word.as_ref()).collect();
    words.push(image.as_ref());
    if run(mkfs, &words) && run("mount", &["-o".as_ref(), "loop".as_ref(), image.as_ref(), at.as_ref()]) {
        return Some(Mounted { room });
    }
    // Past the capture of what tests print: it is to be seen.
    std::io::stderr()
        .write_all(
            format!("NOT RUN: a test on a file system of {mkfs}: it needs root, {mkfs} and a loop device\n").as_bytes(),
        )
        .unwrap();
    None
}

impl Mounted {
    fn at(&self) -> PathBuf {
        self.room.path().join("at")
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        // A process that another test is just starting has our files open for a moment.
        let unmounted = || Command::new("umount").arg(self.at()).status().is_ok_and(|status| status.success());
        for _ in 0..100 {
            if unmounted() {
                return;
            }
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
        assert!(std::thread::panicking(), "{} cannot be unmounted", self.at().display());
    }
}

fn path(path: &Path) -> AbsolutePath {
    path.to_str().unwrap().parse().unwrap()
}

fn dir(at: &Path) -> SrSource {
    SrSource::Dir { path: path(at) }
}

fn label(format: Option<ImageFormat>) -> Label {
    Label::new(Uuid::new_v4(), "disks".parse().unwrap(), format)
}

/// The properties of a repository in this directory.
fn variant_at(at: &Path, format: Option<ImageFormat>) -> Variant {
    let label = label(format);
    make(&path(at), &label, false).unwrap();
    let attached = attach(&path(at), &dir(at), label.uuid).unwrap();
    unmake(&path(at), label.uuid).unwrap();
    attached.variant
}

#[test]
fn ext4_uses_qcow2_chains_by_default() {
    let Some(mounted) = mounted("mkfs.ext4", &["-q"], 64) else { return };
    let variant = variant_at(&mounted.at(), None);
    assert_eq!((&*variant.filesystem, variant.versions, variant.format), ("ext4", Versions::Chain, ImageFormat::Qcow2));
    assert!(!variant.read_only);
    assert_eq!(variant_at(&mounted.at(), Some(ImageFormat::Vhd)).format, ImageFormat::Vhd);
}

#[test]
fn xfs_without_reflink_is_reported() {
    let Some(with) = mounted("mkfs.xfs", &["-q", "-m", "reflink=1"], 320) else { return };
    let variant = variant_at(&with.at(), None);
    assert_eq!((&*variant.filesystem, variant.versions, variant.format), ("xfs", Versions::Reflink, ImageFormat::Raw));
    assert_eq!(variant.formats.len(), 3);
    drop(with);
    let without = mounted("mkfs.xfs", &["-q", "-m", "reflink=0"], 320).unwrap();
    let variant = variant_at(&without.at(), None);
    assert_eq!((variant.versions, variant.format), (Versions::Chain, ImageFormat::Qcow2));
    assert!(variant.notes.iter().any(|note| note.contains("reflink")), "{:?}", variant.notes);
}

/// It must be possible to attach it, to free space in it.
#[test]
fn a_full_repository_is_attached_with_reflink() {
    let Some(full) = mounted("mkfs.xfs", &["-q", "-m", "reflink=1"], 320) else { return };
    let label = label(None);
    make(&path(&full.at()), &label, false).unwrap();
    // Until there is no space for a byte, nor for the inode of a file.
    for (name, size) in [("a", 1 << 20), ("b", 4096)] {
        let mut filler = std::fs::File::create(full.at().join(name)).unwrap();
        while std::io::Write::write_all(&mut filler, &vec![1; size]).is_ok() {}
    }
    let inode = |n: u32| std::fs::File::create(full.at().join(n.to_string())).is_ok();
    assert!((0..1_000_000).any(|n| !inode(n)), "there is no end of inodes");
    let attached = attach(&path(&full.at()), &dir(&full.at()), label.uuid).unwrap();
    assert_eq!(attached.variant.versions, Versions::Reflink);
}

#[test]
fn btrfs_shares_blocks() {
    let Some(mounted) = mounted("mkfs.btrfs", &["-q"], 128) else { return };
    let variant = variant_at(&mounted.at(), None);
    assert_eq!((&*variant.filesystem, variant.versions), ("btrfs", Versions::Reflink));
}

#[test]
fn the_reflink_test_leaves_nothing() {
    let Some(mounted) = mounted("mkfs.xfs", &["-q", "-m", "reflink=1"], 320) else { return };
    variant_at(&mounted.at(), None);
    assert_eq!(std::fs::read_dir(mounted.at()).unwrap().count(), 0);
}

#[test]
fn on_a_read_only_mount_repositories_are_read_but_not_created() {
    let Some(mounted) = mounted("mkfs.ext4", &["-q"], 64) else { return };
    let at = mounted.at();
    let label = label(None);
    make(&path(&at), &label, false).unwrap();
    let remounted = Command::new("mount").args(["-o", "remount,ro"]).arg(&at).status().unwrap();
    assert!(remounted.success());
    let attached = attach(&path(&at), &dir(&at), label.uuid).unwrap();
    assert!(attached.variant.read_only);
    assert_eq!(attached.variant.versions, Versions::None);
    assert_eq!(attached.directory.create_image("a").unwrap_err().code, Code::ReadOnly);
    let other = super::test::label(None);
    assert_eq!(make(&path(&at), &other, false).unwrap_err().code, Code::ReadOnly);
}

#[test]
fn a_nonempty_directory_or_repository_is_refused() {
    let room = tempfile::tempdir().unwrap();
    let at = path(room.path());
    std::fs::create_dir(room.path().join("lost+found")).unwrap();
    let first = label(None);
    make(&at, &first, false).unwrap();
    make(&at, &first, false).unwrap();
    let twice = make(&at, &label(None), false).unwrap_err();
    assert_eq!((twice.code, twice.field.as_deref()), (Code::Exists, Some("source")));
    unmake(&at, first.uuid).unwrap();
    std::fs::write(room.path().join("disk.vhd"), "").unwrap();
    let full = make(&at, &label(None), false).unwrap_err();
    assert!(full.code == Code::Exists && full.detail.contains("disk.vhd"), "{full}");
    // The directory can be used with its contents if the user says so.
    make(&at, &label(None), true).unwrap();
}

#[test]
fn a_directory_with_another_label_or_none_is_not_attached() {
    let room = tempfile::tempdir().unwrap();
    let at = path(room.path());
    let (ours, other) = (label(None), label(None));
    assert_eq!(attach(&at, &dir(room.path()), ours.uuid).unwrap_err().code, Code::State);
    make(&at, &other, false).unwrap();
    let refused = attach(&at, &dir(room.path()), ours.uuid).unwrap_err();
    assert!(refused.detail.contains(&other.uuid.to_string()), "{refused}");
    unmake(&at, ours.uuid).unwrap();
    attach(&at, &dir(room.path()), other.uuid).unwrap();
}

#[test]
fn a_repository_is_attached_only_once_at_a_time() {
    let room = tempfile::tempdir().unwrap();
    let (at, source) = (path(room.path()), dir(room.path()));
    let label = label(None);
    make(&at, &label, false).unwrap();
    let first = attach(&at, &source, label.uuid).unwrap();
    assert_eq!(attach(&at, &source, label.uuid).unwrap_err().code, Code::InUse);
    drop(first);
    attach(&at, &source, label.uuid).unwrap();
}

#[test]
fn leftovers_of_a_killed_creation_are_rolled_back() {
    let room = tempfile::tempdir().unwrap();
    let at = path(room.path());
    std::fs::write(room.path().join(LOCK), "").unwrap();
    std::fs::write(room.path().join(format!("{LABEL}{UNFINISHED}")), "{").unwrap();
    unmake(&at, Uuid::new_v4()).unwrap();
    assert_eq!(std::fs::read_dir(room.path()).unwrap().count(), 0);
}

#[test]
fn an_iso_library_is_read_only_unlabelled_and_shared() {
    let room = tempfile::tempdir().unwrap();
    let at = path(room.path());
    let source = SrSource::Iso { path: at.clone() };
    let first = attach(&at, &source, Uuid::new_v4()).unwrap();
    attach(&at, &source, Uuid::new_v4()).unwrap();
    assert!(first.variant.read_only);
    assert_eq!(first.variant.formats, [ImageFormat::Raw]);
    assert_eq!(std::fs::read_dir(room.path()).unwrap().count(), 0);
}
