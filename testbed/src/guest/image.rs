//! Builds the guest's initramfs: busybox, the tools of a job with their libraries, the modules a disk needs, and init.
//!
//! Knows nothing about packages and QEMU. It is rebuilt when any input has changed: a list of its inputs is stored next
//! to it, written last.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::UNIX_EPOCH;

use super::cpio::Archive;
use super::kernel::Kernel;
use super::{GuestError, at};
use crate::progress::Progress;
use crate::tool;

const INIT: &str = include_str!("../../guest/init");
const STEPS: &str = include_str!("../../guest/steps.sh");

/// Programs of the host that jobs run, with their packages. fio alone brings 80 MB of cluster libraries, which cost
/// half a second of booting; leaving them out would be less trustworthy.
const TOOLS: [(&str, &str); 6] = [
    ("busybox", "busybox-static"),
    ("e2fsck", "e2fsprogs"),
    ("fio", "fio"),
    ("fstrim", "util-linux"),
    ("mke2fs", "e2fsprogs"),
    ("sync", "coreutils"),
];

/// The configuration of mke2fs with its defaults.
const SETTINGS: &str = "/etc/mke2fs.conf";

/// ext4 uses crc32c by name without depending on its module; the second module is the fast one. The last ones are for
/// the power button, and for the port of `tapline-guest`.
pub const MODULES: &[&str] =
    &["virtio_pci", "virtio_blk", "virtio_console", "crc32c_generic", "crc32c_intel", "ext4", "button", "evdev"];
const MODULES_REQUIRED: [&str; 3] = ["virtio_pci", "virtio_blk", "ext4"];

/// The contents of an initramfs in addition to init and its steps.
pub struct Contents<'a> {
    pub kernel: &'a Kernel,
    pub tools: Vec<PathBuf>,
    /// Files of the host, by their path in the guest.
    pub libraries: BTreeMap<PathBuf, PathBuf>,
    pub modules: &'a [&'a str],
    /// The modules without which there is no disk.
    pub required: &'a [&'a str],
}

/// The initramfs in `cache`, built if it is missing or has other inputs.
pub fn obtain(cache: &Path, kernel: &Kernel, modules: &[&str], progress: &Progress) -> Result<PathBuf, GuestError> {
    let image = cache.join("initramfs.cpio");
    let inputs_list = cache.join("initramfs.inputs");
    let tools = locate_tools()?;
    let libraries = libraries_of(&tools)?;
    let contents = Contents { kernel, tools, libraries, modules, required: &MODULES_REQUIRED };
    let inputs = contents.inputs()?;
    if image.exists() && fs::read_to_string(&inputs_list).is_ok_and(|list| list == inputs) {
        return Ok(image);
    }
    progress.detail("making the guest's initramfs");
    replace(&image, &contents.pack()?)?;
    replace(&inputs_list, inputs.as_bytes())?;
    Ok(image)
}

pub fn locate_tools() -> Result<Vec<PathBuf>, GuestError> {
    let find = |(program, package)| tool::locate(program).ok_or(GuestError::Missing { program, package });
    TOOLS.into_iter().map(find).collect()
}

/// The shared libraries of all `tools`, and their loader, as found by the host's loader.
pub fn libraries_of(tools: &[PathBuf]) -> Result<BTreeMap<PathBuf, PathBuf>, GuestError> {
    let mut libraries = BTreeMap::new();
    for program in tools {
        // A static program has none, which is a failure for ldd.
        let listing = tool::text(Command::new("ldd").arg(program).env("LC_ALL", "C"));
        match listing {
            Ok(listing) => libraries.extend(listing.lines().filter_map(library_in).map(|path| (path.clone(), path))),
            Err(tool::ToolError::Failed { said, .. }) if said.contains("not a dynamic executable") => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(libraries)
}

/// The path in a line of ldd: `libz.so.1 => /lib/libz.so.1 (0x…)` or `/lib64/ld-linux-x86-64.so.2 (0x…)`.
fn library_in(line: &str) -> Option<PathBuf> {
    let (found, _) = line.split_once(" (0x")?;
    let path = found.split_once("=> ").map_or(found, |(_, path)| path).trim();
    path.starts_with('/').then(|| PathBuf::from(path))
}

impl Contents<'_> {
    /// A list of all inputs; a changed file has another size or time.
    pub fn inputs(&self) -> Result<String, GuestError> {
        let mut list = format!("kernel {}\nmodules {:?}\n{INIT}\n{STEPS}\n", self.kernel.version, self.modules);
        let settings = PathBuf::from(SETTINGS);
        for file in self.tools.iter().chain(self.libraries.values()).chain(std::iter::once(&settings)) {
            let metadata = fs::metadata(file).map_err(at("look at", file))?;
            let changed = metadata.modified().ok().and_then(|time| time.duration_since(UNIX_EPOCH).ok());
            let changed = changed.unwrap_or_default().as_nanos();
            list.push_str(&format!("{} {} {changed}\n", file.display(), metadata.len()));
        }
        Ok(list)
    }

    pub fn pack(&self) -> Result<Vec<u8>, GuestError> {
        let mut archive = Archive::default();
        for directory in ["bin", "dev", "job", "mnt", "proc", "sys", "tmp"] {
            archive.directory(directory)?;
        }
        // The kernel opens the console for init before devtmpfs is mounted.
        archive.character_device("dev/console", 5, 1)?;
        for program in &self.tools {
            let name = program.file_name().unwrap_or_default().to_string_lossy();
            let directory = if name == "busybox" { "bin" } else { "tools" };
            archive.program(&format!("{directory}/{name}"), &read(program)?)?;
        }
        for (path, library) in &self.libraries {
            archive.program(&path.to_string_lossy(), &read(library)?)?;
        }
        archive.file(SETTINGS, &read(Path::new(SETTINGS))?)?;
        let mut order = String::new();
        for (module, content) in self.kernel.modules(self.modules, self.required)? {
            archive.file(&format!("modules/{module}.ko"), &content)?;
            order.push_str(&format!("{module}.ko\n"));
        }
        archive.file("modules/order", order.as_bytes())?;
        archive.file("steps.sh", STEPS.as_bytes())?;
        archive.program("init", INIT.as_bytes())?;
        Ok(archive.finish()?)
    }
}

pub fn read(file: &Path) -> Result<Vec<u8>, GuestError> {
    fs::read(file).map_err(at("read", file))
}

/// Replaces `file` by `content` atomically, because a concurrent run may read it.
pub fn replace(file: &Path, content: &[u8]) -> Result<(), GuestError> {
    let partial = file.with_extension(format!("{}.partial", std::process::id()));
    fs::write(&partial, content).map_err(at("write", &partial))?;
    fs::rename(&partial, file).map_err(at("rename to", file))
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn libraries_and_the_loader_are_found_in_what_ldd_prints() {
        let library = library_in("\tlibz.so.1 => /lib/x86_64-linux-gnu/libz.so.1 (0x00007f33ac363000)");
        let loader = library_in("\t/lib64/ld-linux-x86-64.so.2 (0x00007f33ac3ee000)");

        assert_eq!(library, Some(PathBuf::from("/lib/x86_64-linux-gnu/libz.so.1")));
        assert_eq!(loader, Some(PathBuf::from("/lib64/ld-linux-x86-64.so.2")));
    }

    #[test]
    fn the_kernels_own_pages_are_no_library() {
        assert_eq!(library_in("\tlinux-vdso.so.1 (0x00007f33ac363000)"), None);
    }
}
