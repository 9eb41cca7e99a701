//! A small Linux guest that runs a job on vhost-user-blk disks and powers off.
//!
//! It works with any server of vhost-user-blk sockets. The guest is built from the distribution's packages once and
//! cached; a boot does not change it, so several may run concurrently.

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
pub use self::running::{ConsoleEvent, Line, MEMORY_MIB, Running, Transcript, add_disk, protocol_line};
use super::progress::Progress;
use super::tool::ToolError;

/// The program that reports the counters of the guest's kernel, as installed.
const READER: &str = include_str!("../../../packaging/guest/tapline-guest");

/// vCPUs of the guest, and queues of each of its disks.
pub const CPUS: u32 = 2;

/// A job of the guest: a script of `testbed/guest/jobs`, and its variables.
pub struct Job {
    pub name: &'static str,
    pub script: &'static str,
    pub parameters: Vec<(&'static str, String)>,
}

/// An error while building or running the guest.
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

/// For `map_err`: a failed file operation on `path`.
pub fn at(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> GuestError {
    let path = path.to_owned();
    move |source| GuestError::File { what, path, source }
}

/// A guest that can be booted.
pub struct Guest {
    kernel: PathBuf,
    initramfs: PathBuf,
    accelerator: Accelerator,
    /// The program of QEMU.
    qemu: PathBuf,
}

/// The default program of QEMU.
const QEMU: &str = "qemu-system-x86_64";

impl Guest {
    /// The guest in the directory `cache`, which is fetched, built and tested if missing.
    pub fn build(cache: &Path, progress: &Progress) -> Result<Self, GuestError> {
        Self::build_of(kernel::SMALL, image::MODULES, cache, progress)
    }

    /// As `build`, with another kernel, and with modules that are loaded if the kernel has them.
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

    /// Uses another program of QEMU.
    pub fn under(self, qemu: PathBuf) -> Self {
        Self { qemu, ..self }
    }

    /// Boots with a disk for each of the vhost-user-blk `sockets` (names in `work`, where the logs are as well).
    pub fn boot(&self, job: &Job, sockets: &[&str], work: &Path) -> Result<Running, GuestError> {
        self.boot_with(job, work, |command| {
            for (number, socket) in sockets.iter().enumerate() {
                running::add_disk(command, number, socket);
            }
        })
    }

    /// As `boot`, with arguments of QEMU added by `add`.
    pub fn boot_with(&self, job: &Job, work: &Path, add: impl FnOnce(&mut Command)) -> Result<Running, GuestError> {
        let initrd = work.join(format!("{}.initrd", job.name));
        self.write_initrd(job, &initrd)?;
        let mut command = running::qemu(&self.qemu, self.accelerator, &self.kernel, &initrd);
        add(&mut command);
        Running::start(command, job.name, work, initrd)
    }

    /// The boot source of a `vm` machine that runs `job`: the kernel with an initrd that is written to `work`.
    pub fn boot_of(&self, job: &Job, work: &Path) -> Result<hardware::Boot, GuestError> {
        let initrd = work.join(format!("{}.initrd", job.name));
        self.write_initrd(job, &initrd)?;
        let command_line = running::COMMAND_LINE.to_owned();
        Ok(hardware::Boot::Kernel { kernel: self.kernel.clone(), initrd: Some(initrd), command_line })
    }

    /// The configuration of its kernel, if that is in its package: a directory and the file in it.
    pub fn kernel_config(&self) -> Option<(PathBuf, String)> {
        let (directory, image) = (self.kernel.parent()?, self.kernel.file_name()?.to_str()?);
        let config = format!("config-{}", image.strip_prefix("vmlinuz-")?);
        directory.join(&config).exists().then(|| (directory.to_owned(), config))
    }

    /// The accelerator, as the `vm` crate's type.
    pub fn accelerator(&self) -> Accelerator {
        self.accelerator
    }

    /// The kernel unpacks every archive in its initrd, so the job is appended.
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
