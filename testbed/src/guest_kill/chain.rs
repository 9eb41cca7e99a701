//! Determines the files of a disk after its process has died. The process knew them; whoever starts the next one has
//! only the files.
//!
//! According to docs/control.md, a snapshot's file that exists is the leaf, and files that a merge was to remove may
//! exist or not. So the leaf is the newest file that exists with its whole chain.

use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom};
use std::path::Path;

/// The base image. Snapshots are numbered in ascending order.
pub const BASE: &str = "base.qcow2";
const PREFIX: &str = "snapshot-";
const SUFFIX: &str = ".qcow2";

/// Maximum length of a chain here, to detect loops.
const LAYERS_MAX: usize = 8;

/// The name of snapshot `number`.
pub fn snapshot(number: u64) -> String {
    format!("{PREFIX}{number}{SUFFIX}")
}

/// The names of the files of the disk in `directory`, from the leaf down.
pub fn of(directory: &Path) -> io::Result<Vec<String>> {
    let mut numbers = Vec::new();
    for entry in fs::read_dir(directory)? {
        let name = entry?.file_name();
        let number =
            name.to_str().and_then(|name| name.strip_prefix(PREFIX)?.strip_suffix(SUFFIX)?.parse::<u64>().ok());
        numbers.extend(number);
    }
    numbers.sort_unstable();
    for number in numbers.into_iter().rev() {
        if let Some(chain) = below(directory, snapshot(number))? {
            return Ok(chain);
        }
    }
    Ok(vec![BASE.to_owned()])
}

/// The chain of a file; `None` if one of its files does not exist.
fn below(directory: &Path, leaf: String) -> io::Result<Option<Vec<String>>> {
    let mut chain = Vec::new();
    let mut next = Some(leaf);
    while let Some(name) = next {
        if chain.len() == LAYERS_MAX {
            return Err(io::Error::other(format!("the chain {} has no end", chain.join(", "))));
        }
        let mut file = match File::open(directory.join(&name)) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error),
        };
        chain.push(name);
        next = backing(&mut file)?;
    }
    Ok(Some(chain))
}

/// The backing file name recorded in a qcow2 file (QEMU, docs/interop/qcow2.txt, "Header": bytes 8 to 15 and 16 to 19).
fn backing(file: &mut File) -> io::Result<Option<String>> {
    let mut header = [0; 20];
    file.read_exact(&mut header)?;
    let [.., l0, l1, l2, l3] = header;
    let [_, _, _, _, _, _, _, _, at @ .., _, _, _, _] = header;
    let (at, len) = (u64::from_be_bytes(at), u32::from_be_bytes([l0, l1, l2, l3]));
    if at == 0 {
        return Ok(None);
    }
    file.seek(SeekFrom::Start(at))?;
    let mut name = String::new();
    file.take(len.into()).read_to_string(&mut name)?;
    Ok(Some(name))
}

#[cfg(test)]
mod test {
    use super::*;

    fn image(directory: &Path, name: &str, on: Option<&str>) {
        let mut bytes = vec![0; 64];
        if let Some(on) = on {
            bytes[8..16].copy_from_slice(&32u64.to_be_bytes());
            bytes[16..20].copy_from_slice(&u32::try_from(on.len()).unwrap().to_be_bytes());
            bytes[32..32 + on.len()].copy_from_slice(on.as_bytes());
        }
        fs::write(directory.join(name), bytes).unwrap();
    }

    #[test]
    fn the_leaf_is_the_newest_file_that_stands_on_something() {
        let directory = tempfile::tempdir().unwrap();
        image(directory.path(), BASE, None);
        assert_eq!(of(directory.path()).unwrap(), [BASE]);
        image(directory.path(), "snapshot-9.qcow2", Some(BASE));
        image(directory.path(), "snapshot-10.qcow2", Some("snapshot-9.qcow2"));
        image(directory.path(), "snapshot-11.qcow2.unfinished", Some("snapshot-10.qcow2"));
        assert_eq!(of(directory.path()).unwrap(), ["snapshot-10.qcow2", "snapshot-9.qcow2", BASE]);
        // A merge into the base that was killed while removing files.
        fs::remove_file(directory.path().join("snapshot-9.qcow2")).unwrap();
        assert_eq!(of(directory.path()).unwrap(), [BASE]);
    }
}
