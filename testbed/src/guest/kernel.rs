//! The guest's kernel: a package of the distribution, unpacked next to the guest image without being installed.
//!
//! Once unpacked it is reused, so that later runs need no network; removing the cache directory fetches the newest one
//! again.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use super::{GuestError, at};
use crate::progress::Progress;
use crate::tool;

/// Meta packages of the newest kernel: Debian's for virtual machines, Ubuntu's, then those of full kernels.
pub const SMALL: &[&str] =
    &["linux-image-cloud-amd64", "linux-image-virtual", "linux-image-amd64", "linux-image-generic"];

/// Meta packages of kernels with all drivers: Debian's and Ubuntu's.
pub const FULL: &[&str] = &["linux-image-amd64", "linux-image-generic"];

pub struct Kernel {
    pub image: PathBuf,
    pub version: String,
    root: PathBuf,
}

impl Kernel {
    /// The unpacked kernel in `cache`, fetched if missing: that of the first of `packages` that apt knows.
    pub fn obtain(cache: &Path, packages: &[&str], progress: &Progress) -> Result<Self, GuestError> {
        let root = cache.join("kernel");
        if !root.exists() {
            fetch(cache, &root, packages, progress)?;
        }
        Self::unpacked(root)
    }

    /// The kernel whose packages are unpacked in `root`.
    pub fn unpacked(root: PathBuf) -> Result<Self, GuestError> {
        let boot = root.join("boot");
        let image = entries(&boot)?.into_iter().find(|path| file_name(path).starts_with("vmlinuz-"));
        let image = image.ok_or(GuestError::NoKernelImage { directory: boot })?;
        let version = file_name(&image).trim_start_matches("vmlinuz-").to_owned();
        Ok(Self { image, version, root })
    }

    /// The modules for `wanted`, decompressed and in load order. Modules built into the kernel are omitted, and so are
    /// unknown ones that are not `required`.
    pub fn modules(&self, wanted: &[&str], required: &[&str]) -> Result<Vec<(String, Vec<u8>)>, GuestError> {
        let directory = self.module_directory()?;
        let mut files = BTreeMap::new();
        collect_modules(&directory, &mut files)?;
        let built_in = fs::read_to_string(directory.join("modules.builtin")).unwrap_or_default();
        let built_in: Vec<String> = built_in.lines().map(|line| module_name(Path::new(line))).collect();
        if let Some(module) = required.iter().find(|&&m| !files.contains_key(m) && !built_in.iter().any(|b| b == m)) {
            return Err(GuestError::NoModule { module: (*module).to_owned(), version: self.version.clone() });
        }
        let mut loaded = Vec::new();
        for module in wanted {
            load(module, &files, &mut loaded)?;
        }
        Ok(loaded)
    }

    /// The directory of modules; newer packages have lib below usr.
    fn module_directory(&self) -> Result<PathBuf, GuestError> {
        let places = ["lib/modules", "usr/lib/modules"].map(|place| self.root.join(place).join(&self.version));
        let found = places.into_iter().find(|place| place.is_dir());
        found.ok_or_else(|| GuestError::NoKernelImage { directory: self.root.clone() })
    }
}

/// Downloads and unpacks the newest kernel as `root`.
fn fetch(cache: &Path, root: &Path, packages: &[&str], progress: &Progress) -> Result<(), GuestError> {
    let partial = cache.join(format!("kernel.{}.partial", std::process::id()));
    fs::create_dir_all(&partial).map_err(at("create", &partial))?;
    Apt::with_any_lists(&partial, progress, |apt| apt.download_kernel(&partial, packages, progress))?;
    let unpacked = partial.join("root");
    for file in entries(&partial)?.iter().filter(|path| file_name(path).ends_with(".deb")) {
        progress.detail(&format!("unpacking {}", file_name(file)));
        tool::text(Command::new("dpkg-deb").arg("-x").arg(file).arg(&unpacked))?;
    }
    // Another run may have been faster; its kernel is the same.
    if !root.exists() {
        fs::rename(&unpacked, root).map_err(at("rename to", root))?;
    }
    fs::remove_dir_all(&partial).map_err(at("remove", &partial))
}

/// The distribution's packages, from the host's package lists or our own. Nothing is ever installed, and no root is
/// needed.
pub struct Apt {
    options: Vec<String>,
}

impl Apt {
    /// Calls `work` with the host's package lists and, if that fails, with our own, which are kept in `directory`.
    pub fn with_any_lists<E: Display + From<GuestError>>(
        directory: &Path,
        progress: &Progress,
        work: impl Fn(&Apt) -> Result<(), E>,
    ) -> Result<(), E> {
        let Err(error) = work(&Self::of_the_machine()) else { return Ok(()) };
        // Missing or outdated lists are common in containers.
        progress.detail(&format!("apt's package lists do not work ({error}); fetching our own"));
        work(&Self::with_own_lists(directory)?)
    }

    fn of_the_machine() -> Self {
        // Only for root: apt's own user may not write into our directory.
        Self { options: vec!["-oAPT::Sandbox::User=root".to_owned()] }
    }

    /// Fetches the package lists of the host's sources into `directory`.
    fn with_own_lists(directory: &Path) -> Result<Self, GuestError> {
        let mut apt = Self::of_the_machine();
        for (option, place) in [("Dir::State::lists", "lists"), ("Dir::Cache", "cache")] {
            let place = directory.join(place);
            fs::create_dir_all(&place).map_err(at("create", &place))?;
            apt.options.push(format!("-o{option}={}", place.display()));
        }
        tool::run(apt.command("apt-get").arg("update"))?;
        Ok(apt)
    }

    fn download_kernel(&self, directory: &Path, packages: &[&str], progress: &Progress) -> Result<(), GuestError> {
        for package in self.newest_kernel(packages)? {
            progress.detail(&format!("downloading {package} ({}), once", self.size_of(&package)?));
            tool::run(self.command("apt-get").args(["download", &package]).current_dir(directory))?;
        }
        Ok(())
    }

    /// The kernel package of the first known meta package, with that of its modules if they are separate.
    fn newest_kernel(&self, packages: &[&str]) -> Result<Vec<String>, GuestError> {
        for meta in packages {
            let Some(image) = self.dependency(meta, "linux-image-") else { continue };
            let modules = self.dependency(&image, "linux-modules-");
            return Ok(std::iter::once(image).chain(modules).collect());
        }
        Err(GuestError::NoKernelPackage { tried: packages.join(", ") })
    }

    /// The first dependency of `package` whose name is `prefix` and a version; `None` if apt does not know the package.
    pub fn dependency(&self, package: &str, prefix: &str) -> Option<String> {
        let listing = tool::text(self.command("apt-cache").args(["depends", package])).ok()?;
        dependency_in(&listing, prefix)
    }

    /// The size of a download, for display.
    fn size_of(&self, package: &str) -> Result<String, GuestError> {
        let shown = tool::text(self.command("apt-cache").args(["show", "--no-all-versions", package]))?;
        let bytes = shown.lines().find_map(|line| line.strip_prefix("Size: ")?.trim().parse::<u64>().ok());
        Ok(bytes.map_or_else(|| "size unknown".to_owned(), |bytes| format!("{} MB", bytes.div_ceil(1_000_000))))
    }

    pub fn command(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        command.args(&self.options).env("LC_ALL", "C").stdin(Stdio::null());
        command
    }
}

fn dependency_in(listing: &str, prefix: &str) -> Option<String> {
    let names = listing.lines().filter_map(|line| line.trim().trim_start_matches('|').strip_prefix("Depends: "));
    let versioned = |name: &&str| {
        let rest = name.strip_prefix(prefix);
        rest.is_some_and(|rest| rest.starts_with(|first: char| first.is_ascii_digit()))
    };
    names.map(str::trim).find(versioned).map(str::to_owned)
}

/// Appends `module` to `loaded`, after those it depends on.
fn load(
    module: &str,
    files: &BTreeMap<String, PathBuf>,
    loaded: &mut Vec<(String, Vec<u8>)>,
) -> Result<(), GuestError> {
    let Some(file) = files.get(module) else { return Ok(()) };
    if loaded.iter().any(|(name, _)| name == module) {
        return Ok(());
    }
    let content = unpacked_module(file)?;
    for dependency in dependencies_of(&content) {
        load(&dependency, files, loaded)?;
    }
    loaded.push((module.to_owned(), content));
    Ok(())
}

/// The dependencies of a module: the entry `depends=a,b` in its `.modinfo` section.
fn dependencies_of(module: &[u8]) -> Vec<String> {
    const KEY: &[u8] = b"\0depends=";
    let Some(at) = module.windows(KEY.len()).position(|window| window == KEY) else { return Vec::new() };
    let list = module.iter().skip(at + KEY.len()).copied().take_while(|&byte| byte != 0).collect::<Vec<u8>>();
    let list = String::from_utf8_lossy(&list).replace('-', "_");
    list.split(',').filter(|name| !name.is_empty()).map(str::to_owned).collect()
}

/// Decompresses a module, because the guest's insmod need not support the distribution's compression.
fn unpacked_module(file: &Path) -> Result<Vec<u8>, GuestError> {
    let unpacker = match file.extension().and_then(|extension| extension.to_str()) {
        Some("xz") => "xz",
        Some("zst") => "zstd",
        Some("gz") => "gzip",
        _ => return fs::read(file).map_err(at("read", file)),
    };
    Ok(tool::output(Command::new(unpacker).arg("-dc").arg(file))?)
}

/// Collects every module below `directory` by its kernel name.
fn collect_modules(directory: &Path, files: &mut BTreeMap<String, PathBuf>) -> Result<(), GuestError> {
    for path in entries(directory)? {
        if path.is_dir() {
            collect_modules(&path, files)?;
        } else if file_name(&path).contains(".ko") {
            files.insert(module_name(&path), path);
        }
    }
    Ok(())
}

fn module_name(path: &Path) -> String {
    let name = file_name(path);
    name.split('.').next().unwrap_or_default().replace('-', "_")
}

pub fn entries(directory: &Path) -> Result<Vec<PathBuf>, GuestError> {
    let listing = fs::read_dir(directory).map_err(at("list", directory))?;
    listing.map(|entry| entry.map(|entry| entry.path()).map_err(at("list", directory))).collect()
}

pub fn file_name(path: &Path) -> String {
    path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn the_kernel_is_the_versioned_dependency() {
        let listing =
            "linux-image-virtual\n  Depends: linux-base\n  |Depends: linux-image-6.8.0-45-generic\n    Depends: x\n";

        assert_eq!(dependency_in(listing, "linux-image-").as_deref(), Some("linux-image-6.8.0-45-generic"));
        assert_eq!(dependency_in(listing, "linux-modules-"), None);
    }

    #[test]
    fn module_names_are_the_kernels() {
        assert_eq!(module_name(Path::new("kernel/crypto/crc32c-intel.ko.zst")), "crc32c_intel");
    }

    #[test]
    fn dependencies_are_read_from_modinfo() {
        let module = b"license=GPL\0depends=mbcache,crc16,jbd-2\0retpoline=Y\0";

        assert_eq!(dependencies_of(module), ["mbcache", "crc16", "jbd_2"]);
        assert!(dependencies_of(b"license=GPL\0depends=\0").is_empty());
        assert!(dependencies_of(b"").is_empty());
    }
}
