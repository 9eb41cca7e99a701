//! The cloud-init seed of a VM: an image in the directory of its machine while QEMU is being started.
//!
//! Invariant: the image is readable by root only, and removed as soon as QEMU has opened it or failed to. What a
//! killed daemon leaves is removed with the directory.

use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use ::vm::qemu::seed;
use api::{Problem, Seed, SeedText, Vm};

/// The longest label of a host name (RFC 1123, 2.1).
const HOSTNAME_MAX: usize = 63;

/// The path of the image in the directory of a machine.
pub fn path(directory: &Path) -> PathBuf {
    directory.join("seed.img")
}

/// The image of a VM's seed.
#[derive(Clone)]
pub struct Image(Vec<u8>);

impl std::fmt::Debug for Image {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "<{} bytes>", self.0.len())
    }
}

/// Creates the image.
pub fn image(vm: &Vm, seed: &Seed) -> Result<Image, Problem> {
    let meta_data = seed.meta_data.as_ref().map_or_else(|| meta_data(vm), |text| text.as_str().to_owned());
    let network = seed.network_config.as_ref().map(SeedText::as_str);
    let files = [("meta-data", Some(meta_data.as_str())), ("user-data", Some(seed.user_data.as_str()))];
    let files = files.into_iter().chain([("network-config", network)]);
    let files: Vec<_> = files.filter_map(|(name, text)| Some((name, text?))).collect();
    let failed = |error| Problem::failed(format_args!("make the cloud-init seed of VM {}", vm.uuid), error);
    seed::image(&files).map(Image).map_err(failed)
}

impl Image {
    /// Writes the image into the directory of a machine, and removes it when `started` has returned.
    pub fn lend<T>(&self, directory: &Path, started: impl FnOnce() -> Result<T, Problem>) -> Result<T, Problem> {
        let path = path(directory);
        let failed = |tried: &str, error: io::Error| Problem::failed(format_args!("{tried} {}", path.display()), error);
        let file = OpenOptions::new().write(true).create_new(true).mode(0o400).open(&path);
        file.and_then(|mut file| file.write_all(&self.0)).map_err(|error| failed("write", error))?;
        let outcome = started();
        fs::remove_file(&path).map_err(|error| failed("remove", error))?;
        outcome
    }
}

/// The meta-data of a VM. The instance is the VM: its setup survives a change of its name.
fn meta_data(vm: &Vm) -> String {
    let id = format!("instance-id: {}\n", vm.uuid);
    match hostname(vm.name.as_str()) {
        // Quoted: YAML gives `1` and `no` other meanings.
        Some(name) => format!("{id}local-hostname: \"{name}\"\n"),
        None => id,
    }
}

/// A host name similar to the name; `None` if no character is usable.
fn hostname(name: &str) -> Option<String> {
    let allowed = |char: char| if char.is_ascii_alphanumeric() { char.to_ascii_lowercase() } else { '-' };
    let words: String = name.chars().map(allowed).collect();
    let words = words.split('-').filter(|word| !word.is_empty()).collect::<Vec<_>>().join("-");
    let short = words.get(..HOSTNAME_MAX).unwrap_or(&words).trim_end_matches('-');
    (!short.is_empty()).then(|| short.to_owned())
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn a_host_name_is_made_of_a_vms_name() {
        let cases = [("web", "web"), ("Web Server №1", "web-server-1"), ("-a.b_c-", "a-b-c"), ("1", "1")];
        for (name, expected) in cases {
            assert_eq!(hostname(name).as_deref(), Some(expected), "{name}");
        }
        assert_eq!(hostname("データ"), None);
        assert_eq!(hostname(&format!("{}-{}", "x".repeat(62), "y")).unwrap(), "x".repeat(62));
    }

    #[test]
    fn a_seed_image_is_there_for_root_only_and_only_during_the_start() {
        use std::os::unix::fs::MetadataExt;
        let room = tempfile::tempdir().unwrap();
        let image = Image(b"secret".to_vec());
        assert!(!format!("{image:?}").contains("115"), "{image:?}");
        for fails in [false, true] {
            let lent = image.lend(room.path(), || {
                let mode = fs::metadata(path(room.path())).unwrap().mode();
                assert_eq!((mode & 0o777, fs::read(path(room.path())).unwrap()), (0o400, b"secret".to_vec()));
                if fails { Err(Problem::failed("start", "no")) } else { Ok(()) }
            });
            assert_eq!((lent.is_err(), path(room.path()).exists()), (fails, false));
        }
    }
}
