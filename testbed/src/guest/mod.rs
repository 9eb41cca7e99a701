//! A small Linux guest that runs one job on vhost-user-blk disks and powers off.
//!
//! Knows nothing of Tapline: anything that listens on a vhost-user-blk socket will do. The guest is built from the
//! distribution's packages once and cached; a boot changes nothing of it, so boots may run side by side.

mod accelerator;
pub mod cpio;
pub mod distribution;
pub mod image;
pub mod kernel;
mod running;

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::Command;

use thiserror::Error;
use vm::qemu::accelerator::Accelerator;
use vm::qemu::hardware;

use self::cpio::Archive;
use self::kernel::Kernel;
pub use self::running::{Heard, Line, MEMORY_MIB, Running, Transcript, add_disk, said};
use super::progress::Progress;
use super::tool::ToolError;

/// The reader that says what the guest's kernel counts, as it is installed.
const READER: &str = include_str!("../../../packaging/guest/tapline-guest");

/// vCPUs of the guest, and queues of each of its disks.
pub const CPUS: u32 = 2;

/// What the guest runs: a script of `testbed/guest/jobs`, and the variables it reads.
pub struct Job {
    pub name: &'static str,
    pub script: &'static str,
    pub parameters: Vec<(&'static str, String)>,
}

/// What went wrong with building or running the guest.
#[derive(Debug, Error)]
pub enum GuestError {
    #[error("{program} is not installed; install {package}")]
    Missing { program: &'static str, package: &'static str },
    #[error("apt knows none of the kernel packages {tried}")]
    NoKernelPackage { tried: String },
    #[error("no kernel with modules in {}; remove that directory to fetch it again", directory.display())]
    NoKernelImage { directory: PathBuf },
    #[error("kernel {version} has no module {module}")]
    NoModule { module: String, version: String },
    #[error("cannot {what} {}", path.display())]
    File { what: &'static str, path: PathBuf, source: io::Error },
    #[error("cannot make the initramfs")]
    Archive(#[from] cpio::TooLarge),
    #[error(transparent)]
    Tool(#[from] ToolError),
    #[error("cannot start the guest `{command}`")]
    Start { command: String, source: io::Error },
    #[error("guest `{job}` was silent for {seconds} s and is taken for hung; its console is in {}", console.display())]
    Silent { job: String, seconds: u64, console: PathBuf },
    #[error("guest `{job}` ended without finishing:\n{said}\nits console is in {}", console.display())]
    Broke { job: String, said: String, console: PathBuf },
    #[error("guest `{job}`: {why}; its console is in {}", console.display())]
    Job { job: String, why: String, console: PathBuf },
    #[error("guest `{job}` never said {key}")]
    Unsaid { job: String, key: &'static str },
}

/// For `map_err`: a file operation that failed on `path`.
pub fn at(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> GuestError {
    let path = path.to_owned();
    move |source| GuestError::File { what, path, source }
}

/// A guest ready to boot.
pub struct Guest {
    kernel: PathBuf,
    initramfs: PathBuf,
    accelerator: Accelerator,
    /// The program that is QEMU.
    qemu: PathBuf,
}

/// QEMU where nobody names another.
const QEMU: &str = "qemu-system-x86_64";

impl Guest {
    /// The guest in the directory `cache`: fetched, made and tried out where that has not been done.
    pub fn build(cache: &Path, progress: &Progress) -> Result<Self, GuestError> {
        Self::build_of(kernel::SMALL, image::MODULES, cache, progress)
    }

    /// The same with another kernel, and modules that are loaded as far as it knows them.
    pub fn build_of(
        packages: &[&str],
        modules: &[&str],
        cache: &Path,
        progress: &Progress,
    ) -> Result<Self, GuestError> {
        fs::create_dir_all(cache).map_err(at("create", cache))?;
        let kernel = Kernel::obtain(cache, packages, progress)?;
        let initramfs = image::obtain(cache, &kernel, modules, progress)?;
        let qemu = PathBuf::from(QEMU);
        let mut guest = Self { kernel: kernel.image, initramfs, accelerator: Accelerator::Tcg, qemu };
        guest.accelerator = accelerator::choose(&guest, cache)?;
        let usable = if guest.accelerator == Accelerator::Tcg { " (KVM is not usable here)" } else { "" };
        progress.detail(&format!("kernel {}, under {}{usable}", kernel.version, guest.accelerator));
        Ok(guest)
    }

    /// The same, run by another QEMU.
    pub fn under(self, qemu: PathBuf) -> Self {
        Self { qemu, ..self }
    }

    /// Boots with a disk on each of the vhost-user-blk `sockets` (names in `work`, where the logs go too).
    pub fn boot(&self, job: &Job, sockets: &[&str], work: &Path) -> Result<Running, GuestError> {
        self.boot_with(job, work, |command| {
            for (number, socket) in sockets.iter().enumerate() {
                running::add_disk(command, number, socket);
            }
        })
    }

    /// The same with whatever is added to QEMU's words.
    pub fn boot_with(&self, job: &Job, work: &Path, add: impl FnOnce(&mut Command)) -> Result<Running, GuestError> {
        let initrd = work.join(format!("{}.initrd", job.name));
        self.write_initrd(job, &initrd)?;
        let mut command = running::qemu(&self.qemu, self.accelerator, &self.kernel, &initrd);
        add(&mut command);
        Running::start(command, job.name, work, initrd)
    }

    /// What a machine of the `vm` crate boots to run `job`: the kernel with an initrd that is written to `work`.
    pub fn boot_of(&self, job: &Job, work: &Path) -> Result<hardware::Boot, GuestError> {
        let initrd = work.join(format!("{}.initrd", job.name));
        self.write_initrd(job, &initrd)?;
        let command_line = running::COMMAND_LINE.to_owned();
        Ok(hardware::Boot::Kernel { kernel: self.kernel.clone(), initrd: Some(initrd), command_line })
    }

    /// What its kernel was configured with, if its package says so: a directory and the file in it.
    pub fn kernel_config(&self) -> Option<(PathBuf, String)> {
        let (directory, image) = (self.kernel.parent()?, self.kernel.file_name()?.to_str()?);
        let config = format!("config-{}", image.strip_prefix("vmlinuz-")?);
        directory.join(&config).exists().then(|| (directory.to_owned(), config))
    }

    /// Who runs its instructions, as the `vm` crate has it.
    pub fn accelerator(&self) -> Accelerator {
        self.accelerator
    }

    /// The kernel takes one file and unpacks every archive in it, so the job is appended.
    fn write_initrd(&self, job: &Job, initrd: &Path) -> Result<(), GuestError> {
        let parameters = job.parameters.iter().map(|(name, value)| format!("{name}='{value}'\n")).collect::<String>();
        let mut archive = Archive::default();
        archive.file("job/job.sh", job.script.as_bytes())?;
        archive.file("job/parameters", parameters.as_bytes())?;
        archive.program("job/tapline-guest", READER.as_bytes())?;
        fs::copy(&self.initramfs, initrd).map_err(at("write", initrd))?;
        let mut file = fs::OpenOptions::new().append(true).open(initrd).map_err(at("open", initrd))?;
        file.write_all(&archive.finish()?).map_err(at("write", initrd))
    }
}
