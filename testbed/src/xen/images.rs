//! Builds what the machine boots from: the hypervisor, a kernel for dom0 and guests, dom0's initramfs and root, the
//! guests' initramfs.
//!
//! Knows nothing about tests. The images are rebuilt when any input has changed: the list of inputs is stored next to
//! them, written last, and is the key of everything that is built from the images in turn.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;

use super::packages::Packages;
use super::{BedError, stubs};
use crate::guest::cpio::Archive;
use crate::guest::distribution::{self, put};
use crate::guest::image::{self, Contents};
use crate::guest::kernel::{Kernel, entries, file_name};
use crate::guest::{GuestError, at};
use crate::progress::Progress;
use crate::tool;

pub const HYPERVISOR: &str = "xen";
pub const KERNEL: &str = "vmlinux";
pub const DOM0_INITRD: &str = "dom0-initrd";
pub const DOM0_ROOT: &str = "dom0-root.img";

const FIRST_INIT: &str = include_str!("../../xen/first-init");
const DOM0_INIT: &str = include_str!("../../xen/dom0-init");

/// To be increased if images are built differently from the same inputs.
const FORMAT: u32 = 2;

/// Modules that find and read dom0's root.
const FIRST_MODULES: [&str; 4] = ["virtio_pci", "virtio_blk", "crc32c_generic", "ext4"];
const FIRST_REQUIRED: [&str; 3] = ["virtio_pci", "virtio_blk", "ext4"];

/// dom0's modules: grants and event channels for us, a backend to compare with, disks of its own for pygrub, and RAM
/// disks, of which null_blk's have a volatile cache.
const DOM0_MODULES: [&str; 10] = [
    "xen_evtchn",
    "xen_gntdev",
    "xen_gntalloc",
    "xen_privcmd",
    "xenfs",
    "xen_blkback",
    "xen_blkfront",
    "loop",
    "brd",
    "null_blk",
];
const DOM0_REQUIRED: [&str; 8] =
    ["xen_evtchn", "xen_gntdev", "xen_privcmd", "xen_blkback", "xen_blkfront", "loop", "brd", "null_blk"];
/// Modules that tests load, which determine the number of disks, and whether dom0 has such of its own.
const LOADED_LATER: [&str; 3] = ["brd", "null_blk", "xen_blkfront"];

const GUEST_MODULES: [&str; 4] = ["xen_blkfront", "crc32c_generic", "crc32c_intel", "ext4"];
const GUEST_REQUIRED: [&str; 2] = ["xen_blkfront", "ext4"];

/// Libraries that fio really uses; all others are stubs.
const GENUINE: [&str; 6] = ["libc.so.6", "libm.so.6", "libz.so.1", "libaio.so.1", "libaio.so.1t64", "libnuma.so.1"];

/// Size of the root in MiB: 330 MB are used, and a test may leave core files.
const ROOT_MIB: u32 = 700;

pub struct Images {
    pub directory: PathBuf,
    pub inputs: String,
}

impl Images {
    /// The images in `cache`, built if they are missing or have other inputs.
    pub fn obtain(cache: &Path, packages: &Packages, progress: &Progress) -> Result<Self, BedError> {
        let directory = cache.join("images");
        let list = directory.join("inputs");
        let kernel = unpack_boot(&cache.join("boot"), packages, progress)?;
        let stubs = cache.join("stubs");
        let contents = guest_contents(&kernel, &stubs)?;
        let inputs = format!(
            "format {FORMAT}\n{}{DOM0_MODULES:?}\n{FIRST_INIT}\n{DOM0_INIT}\n{}",
            packages.names(),
            contents.inputs()?
        );
        let images = Self { directory, inputs };
        if fs::read_to_string(&list).is_ok_and(|list| list == images.inputs) {
            return Ok(images);
        }
        if images.directory.exists() {
            fs::remove_dir_all(&images.directory).map_err(at("remove", &images.directory))?;
        }
        fs::create_dir_all(&images.directory).map_err(at("create", &images.directory))?;
        images.make(&kernel, packages, &contents, progress)?;
        image::replace(&list, images.inputs.as_bytes())?;
        Ok(images)
    }

    fn make(
        &self,
        kernel: &Kernel,
        packages: &Packages,
        guest: &Contents<'_>,
        progress: &Progress,
    ) -> Result<(), BedError> {
        progress.detail(&format!("making the images, with kernel {}", kernel.version));
        let linux = bare_kernel(&kernel.image)?;
        image::replace(&self.directory.join(KERNEL), &linux)?;
        let hypervisor = entries(kernel.image.parent().unwrap_or(Path::new("/")))?;
        let hypervisor =
            hypervisor.iter().find(|path| file_name(path).starts_with("xen-") && file_name(path).ends_with(".gz"));
        let hypervisor = hypervisor.ok_or(BedError::NoHypervisor { boot: kernel.image.clone() })?;
        let hypervisor = tool::output(Command::new("gzip").arg("-dc").arg(hypervisor))?;
        image::replace(&self.directory.join(HYPERVISOR), &hypervisor)?;

        let root = self.directory.join("root");
        unpack_root(&root, packages)?;
        let busybox = image::read(&root.join("bin/busybox"))?;
        image::replace(&self.directory.join(DOM0_INITRD), &first_root(kernel, &busybox)?)?;
        let mut order = String::new();
        for (module, content) in kernel.modules(&DOM0_MODULES, &DOM0_REQUIRED)? {
            put(&root.join(format!("modules/{module}.ko")), &content)?;
            if !LOADED_LATER.contains(&module.as_str()) {
                order.push_str(&format!("{module}.ko\n"));
            }
        }
        put(&root.join("modules/order"), order.as_bytes())?;
        put(&root.join("sbin/dom0-init"), DOM0_INIT.as_bytes())?;
        put(&root.join("guest/vmlinux"), &linux)?;
        // In the format of boot loaders and kexec.
        put(&root.join("guest/vmlinuz"), &image::read(&kernel.image)?)?;
        put(&root.join("guest/initrd"), &guest.pack()?)?;
        distribution::make_image(&root, &self.directory.join(DOM0_ROOT), ROOT_MIB)?;
        Ok(())
    }
}

/// Unpacks the kernel and the hypervisor in `directory`, if missing.
fn unpack_boot(directory: &Path, packages: &Packages, progress: &Progress) -> Result<Kernel, BedError> {
    let list = directory.join("packages");
    let names: String = packages.boot.iter().map(|file| format!("{}\n", file_name(file))).collect();
    if !fs::read_to_string(&list).is_ok_and(|list| list == names) {
        if directory.exists() {
            fs::remove_dir_all(directory).map_err(at("remove", directory))?;
        }
        for package in &packages.boot {
            progress.detail(&format!("unpacking {}", file_name(package)));
            fs::create_dir_all(directory).map_err(at("create", directory))?;
            tool::text(Command::new("dpkg-deb").arg("-x").arg(package).arg(directory))?;
        }
        image::replace(&list, names.as_bytes())?;
    }
    Ok(Kernel::unpacked(directory.to_owned())?)
}

/// The tools of other guests, with a fio that starts quickly, and the modules for a Xen disk.
fn guest_contents<'a>(kernel: &'a Kernel, stub_directory: &Path) -> Result<Contents<'a>, BedError> {
    let tools = image::locate_tools()?;
    let is_fio = |tool: &&PathBuf| file_name(tool) == "fio";
    let others: Vec<PathBuf> = tools.iter().filter(|tool| !is_fio(tool)).cloned().collect();
    let fio: Vec<PathBuf> = tools.iter().filter(is_fio).cloned().collect();
    let mut libraries = image::libraries_of(&others)?;
    let of_fio = image::libraries_of(&fio)?;
    let wanted: BTreeMap<PathBuf, PathBuf> = of_fio
        .iter()
        .filter(|(path, _)| GENUINE.contains(&file_name(path).as_str()) || file_name(path).starts_with("ld-linux"))
        .map(|(path, file)| (path.clone(), file.clone()))
        .collect();
    let genuine: Vec<&Path> = wanted.values().map(PathBuf::as_path).collect();
    for program in &fio {
        for (name, stub) in stubs_of(program, &genuine, stub_directory)? {
            libraries.insert(Path::new("/usr/lib").join(name), stub);
        }
    }
    libraries.extend(wanted);
    Ok(Contents { kernel, tools, libraries, modules: &GUEST_MODULES, required: &GUEST_REQUIRED })
}

/// The stubs for a fio, built once, because a rebuilt stub would change the images.
fn stubs_of(program: &Path, genuine: &[&Path], directory: &Path) -> Result<BTreeMap<String, PathBuf>, BedError> {
    let list = directory.join("stubs");
    let metadata = fs::metadata(program).map_err(at("look at", program))?;
    let made_of = format!("{} {} {:?}\n", program.display(), metadata.len(), metadata.modified().ok());
    let told = fs::read_to_string(&list).unwrap_or_default();
    if let Some(names) = told.strip_prefix(&made_of) {
        return Ok(names.lines().map(|name| (name.to_owned(), directory.join(name))).collect());
    }
    let stubs = stubs::make(program, genuine, directory)?;
    let names: String = stubs.keys().map(|name| format!("{name}\n")).collect();
    image::replace(&list, format!("{made_of}{names}").as_bytes())?;
    Ok(stubs)
}

/// dom0's first root: mounts the disk and switches to it.
fn first_root(kernel: &Kernel, busybox: &[u8]) -> Result<Vec<u8>, BedError> {
    let mut archive = Archive::default();
    let pack = |archive: &mut Archive| -> Result<(), GuestError> {
        for directory in ["bin", "dev", "proc", "root", "sys"] {
            archive.directory(directory)?;
        }
        archive.character_device("dev/console", 5, 1)?;
        archive.program("bin/busybox", busybox)?;
        let mut order = String::new();
        for (module, content) in kernel.modules(&FIRST_MODULES, &FIRST_REQUIRED)? {
            archive.file(&format!("modules/{module}.ko"), &content)?;
            order.push_str(&format!("{module}.ko\n"));
        }
        archive.file("modules/order", order.as_bytes())?;
        archive.program("init", FIRST_INIT.as_bytes())?;
        Ok(())
    };
    pack(&mut archive)?;
    Ok(archive.finish().map_err(GuestError::from)?)
}

/// Unpacks dom0's programs into the tree `root`.
fn unpack_root(root: &Path, packages: &Packages) -> Result<(), BedError> {
    // Xen's hotplug scripts need bash as sh, and pygrub needs Python.
    distribution::unpack(root, &packages.dom0, &["libpython", "python"])?;
    for directory in [
        "busybox",
        "drop",
        "guest",
        "modules",
        "out",
        "proc",
        "run",
        "sys",
        "tmp",
        "dev",
        "var/lib/xen",
        "var/log/xen/console",
    ] {
        let directory = root.join(directory);
        fs::create_dir_all(&directory).map_err(at("create", &directory))?;
    }
    put(&root.join("etc/group"), b"root:x:0:\ndisk:x:6:\n")?;
    Ok(())
}

/// The kernel without its decompressor, which would take ten seconds per boot under emulation. Format: Linux
/// Documentation/arch/x86/boot.rst, `setup_sects`, `payload_offset`, `payload_length`.
fn bare_kernel(image: &Path) -> Result<Vec<u8>, BedError> {
    let bytes = image::read(image)?;
    let unknown = || BedError::KernelForm { image: image.to_owned() };
    let payload = payload_of(&bytes).ok_or_else(unknown)?;
    let (unpacker, payload) = match payload {
        [0x1f, 0x8b, ..] => ("gzip", payload),
        // Other formats are followed by the uncompressed length, which is not part of the stream.
        [0xfd, b'7', b'z', b'X', b'Z', ..] => {
            ("xz", payload.get(..payload.len().saturating_sub(4)).unwrap_or_default())
        }
        [0x28, 0xb5, 0x2f, 0xfd, ..] => ("zstd", payload.get(..payload.len().saturating_sub(4)).unwrap_or_default()),
        _ => return Err(unknown()),
    };
    let packed = tempfile::NamedTempFile::new().map_err(at("create", Path::new("a temporary file")))?;
    fs::write(packed.path(), payload).map_err(at("write", packed.path()))?;
    let input = File::open(packed.path()).map_err(at("open", packed.path()))?;
    Ok(tool::output(Command::new(unpacker).arg("-dc").stdin(input))?)
}

fn payload_of(bytes: &[u8]) -> Option<&[u8]> {
    let word = |at: usize| Some(u32::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?));
    let setup = (usize::from(*bytes.get(0x1f1)?) + 1) * 512;
    let from = setup.checked_add(usize::try_from(word(0x248)?).ok()?)?;
    let to = from.checked_add(usize::try_from(word(0x24c)?).ok()?)?;
    bytes.get(from..to)
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn the_payload_is_behind_the_setup() {
        let mut image = vec![0; 4096];
        image[0x1f1] = 1;
        image[0x248] = 16;
        image[0x24c] = 4;
        image[1024 + 16..1024 + 20].copy_from_slice(b"here");

        assert_eq!(payload_of(&image), Some(&b"here"[..]));
        assert_eq!(payload_of(&image[..1030]), None);
    }
}
