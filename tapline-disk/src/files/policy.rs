//! The policy file: transfer sizes for some storage, with the measurements that they follow from.
//!
//! It knows how the file is written and read, and which storage it belongs to; not how that was measured. Invariant: a
//! policy file is replaced as a whole or not at all, and is only used on the storage that it was measured on.

use std::io::Write;
use std::path::Path;

use control::answer::PolicyNote;
use control::calibration::{CALIBRATION_VERSION, Calibration, Measured, Sizes, Storage};
use control::{ImageName, Kind};
use device::{Fit, Pattern, Point, Policy};
use serde::Deserialize;
use uring::ImageFile;

use crate::process::failure::Failure;

/// Longer files are no policy files.
const LEN_MAX: u64 = 4 << 20;

/// Makes a policy from measurements that were just made.
pub fn of(fit: &Fit, device: Storage, operation: &str) -> Calibration {
    let kernel = rustix::system::uname();
    Calibration {
        version: CALIBRATION_VERSION,
        device,
        measured: jiff::Timestamp::now().strftime("%Y-%m-%dT%H:%M:%SZ").to_string(),
        program: env!("CARGO_PKG_VERSION").into(),
        kernel: kernel.release().to_string_lossy().into_owned(),
        operation: operation.into(),
        policy: sizes(fit.policy),
        gain: fit.gain,
        worst: fit.worst,
        points: fit.points.iter().map(measured).collect(),
    }
}

fn sizes(Policy { split, merge }: Policy) -> Sizes {
    Sizes { split, merge }
}

fn measured(point: &Point) -> Measured {
    Measured {
        size: point.load.size,
        depth: point.load.depth,
        sequential: point.load.pattern == Pattern::Sequential,
        policy: sizes(point.policy),
        bytes_per_second: point.bytes_per_second,
    }
}

/// Reads a policy file, and checks that its sizes are valid.
pub fn read(path: &Path) -> Result<Calibration, Failure> {
    let tried = || format!("read the policy file {}", path.display());
    let advice = "make one for the storage of this image: tapline calibrate IMAGE --policy FILE";
    let refused = |why: String| Failure::new(tried(), why).of_kind(Kind::Invalid).advise(advice);
    let metadata = path.metadata().map_err(|error| Failure::new(tried(), error).advise(advice))?;
    if !metadata.is_file() || metadata.len() > LEN_MAX {
        return Err(refused("it is no file of the size of one".into()));
    }
    let bytes = std::fs::read(path).map_err(|error| Failure::new(tried(), error))?;
    let version = serde_json::from_slice::<Versioned>(&bytes).map(|found| found.version);
    let version = version.map_err(|error| refused(format!("it is not a policy file: {error}")))?;
    if version != CALIBRATION_VERSION {
        let why = format!("it has version {version}, and this program reads version {CALIBRATION_VERSION}");
        return Err(refused(why));
    }
    let found: Calibration =
        serde_json::from_slice(&bytes).map_err(|error| refused(format!("it is damaged: {error}")))?;
    match found.policy.not_allowed() {
        Some(size) => Err(refused(format!("its sizes must be powers of two from 4K to 16M, and {size} is not"))),
        None => Ok(found),
    }
}

/// Refuses to replace a file that is neither empty nor a policy.
pub fn must_be_replaceable(path: &Path) -> Result<(), Failure> {
    let is_empty = path.metadata().is_ok_and(|found| found.is_file() && found.len() == 0);
    if is_empty || path.symlink_metadata().is_err() || read(path).is_ok() {
        return Ok(());
    }
    let why = "there is a file that is not a policy";
    Err(Failure::new(format!("write the policy file {}", path.display()), why)
        .of_kind(Kind::Exists)
        .advise("name another file, or remove that one"))
}

/// Writes a policy file, in place of the old one if there is one.
pub fn write(found: &Calibration, path: &Path) -> Result<(), Failure> {
    must_be_replaceable(path)?;
    let failed = |error: std::io::Error| Failure::new(format!("write the policy file {}", path.display()), error);
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(".new");
    let new = path.with_file_name(name);
    let mut bytes = serde_json::to_vec_pretty(found).map_err(|error| failed(error.into()))?;
    bytes.push(b'\n');
    let written = std::fs::File::create(&new).and_then(|mut file| {
        file.write_all(&bytes)?;
        file.sync_all()?;
        std::fs::rename(&new, path)
    });
    written.map_err(|error| {
        // The file may be missing, and is of no use otherwise.
        std::fs::remove_file(&new).unwrap_or_default();
        failed(error)
    })?;
    uring::sync_directory(path).map_err(Failure::said)
}

/// Refuses a policy that was measured on other storage.
pub fn must_be_of(found: &Calibration, path: &Path, device: &Storage, image: &str) -> Result<(), Failure> {
    if found.device.id == device.id {
        return Ok(());
    }
    let why = format!("it was measured on {}, and {image} is on {device}", found.device);
    Err(Failure::new(format!("use the policy file {}", path.display()), why)
        .of_kind(Kind::Invalid)
        .advise(format!("measure that: tapline calibrate {image} --policy FILE; or leave --io-policy out")))
}

/// Identifies the storage of an image's file.
pub fn storage(name: &ImageName, file: &ImageFile) -> Result<Storage, Failure> {
    if let Some(kind) = name.model() {
        return Ok(Storage { id: format!("model:{kind}"), name: format!("a model of {kind}") });
    }
    let found = file.metadata().and_then(|metadata| stats::storage_of(&metadata, file.path()));
    found.map_err(|error| Failure::new(format!("find the storage of {name}"), error))
}

/// Describes the policy in the status of a served disk.
pub fn note(found: &Calibration, path: &Path) -> PolicyNote {
    found.note(std::path::absolute(path).unwrap_or_else(|_| path.to_owned()).display().to_string())
}

#[derive(Deserialize)]
struct Versioned {
    version: u32,
}

#[cfg(test)]
mod test {
    use device::{Load, Progress};

    use super::*;

    fn fitted() -> Calibration {
        let measure = |load: Load, policy: Policy, _: Progress| {
            Ok::<_, std::convert::Infallible>(1000 + if policy.split.is_some() { load.size / 1024 } else { 0 })
        };
        let fit = device::fit(false, 1, measure).unwrap_or_else(|never| match never {});
        of(&fit, Storage { id: "a".into(), name: "disk a".into() }, "read")
    }

    #[test]
    fn what_is_written_is_read_and_replaces_what_was_there() {
        let room = tempfile::tempdir().unwrap();
        let path = room.path().join("policy.json");
        let written = fitted();
        for _ in 0..2 {
            write(&written, &path).unwrap();
        }
        std::fs::write(&path, "").unwrap();
        write(&written, &path).unwrap();
        assert_eq!(read(&path).unwrap(), written);
        assert_eq!(std::fs::read_dir(room.path()).unwrap().count(), 1);
        assert!(written.policy.split.is_some() && written.why().contains("pieces of"), "{}", written.why());
    }

    #[test]
    fn a_file_that_is_no_policy_is_not_replaced() {
        let room = tempfile::tempdir().unwrap();
        let path = room.path().join("disk.qcow2");
        std::fs::write(&path, "an image").unwrap();
        let said = write(&fitted(), &path).unwrap_err().to_string();
        assert!(said.contains("not a policy"), "{said}");
        assert_eq!(std::fs::read(&path).unwrap(), b"an image");
        must_be_replaceable(&room.path().join("new")).unwrap();
        must_be_replaceable(room.path()).unwrap_err();
    }

    #[test]
    fn a_policy_of_other_storage_is_refused_and_both_are_named() {
        let policy = fitted();
        let other = Storage { id: "b".into(), name: "disk b".into() };
        let said = must_be_of(&policy, Path::new("p"), &other, "raw:a").unwrap_err().to_string();
        assert!(said.contains("disk a") && said.contains("disk b") && said.contains("tapline calibrate"), "{said}");
        // The name may change; the identifier does not.
        let renamed = Storage { id: "a".into(), name: "disk c".into() };
        must_be_of(&policy, Path::new("p"), &renamed, "raw:a").unwrap();
    }

    #[test]
    fn what_is_no_policy_file_is_refused_with_the_reason() {
        let room = tempfile::tempdir().unwrap();
        let path = room.path().join("policy.json");
        let mut sizes = serde_json::to_value(fitted()).unwrap();
        sizes["policy"]["split"] = 5000.into();
        let mut version = serde_json::to_value(fitted()).unwrap();
        version["version"] = 2.into();
        let cases = [
            ("rubbish".to_owned(), "not a policy file"),
            ("{\"version\":1}".to_owned(), "damaged"),
            (sizes.to_string(), "5000 is not"),
            (version.to_string(), "version 2"),
        ];
        for (text, why) in cases {
            std::fs::write(&path, text).unwrap();
            let said = read(&path).unwrap_err().to_string();
            assert!(said.contains(why), "{said}");
        }
        assert!(read(room.path()).unwrap_err().to_string().contains("no file"));
        read(&room.path().join("none")).unwrap_err();
    }
}
