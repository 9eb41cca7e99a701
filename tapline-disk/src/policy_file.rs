//! The file of a policy for the sizes of transfers, with the evidence that it follows from.
//!
//! It knows how it is written and read, and whether it is of some storage; not how it was measured. Invariant: a policy
//! file is replaced whole or not at all, and is only used on the storage that it was measured on.

use std::io::Write;
use std::path::Path;

use control::Kind;
use control::answer::PolicyNote;
use control::size::readable;
use device::{Fit, Pattern, Point, Policy};
use serde::{Deserialize, Serialize};

use crate::failure::Failure;
use crate::storage_identity::StorageIdentity;

/// The version of this format.
const VERSION: u32 = 1;
/// No policy file is as long.
const LEN_MAX: u64 = 4 << 20;

/// A policy file. Names and meanings are part of the interface.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PolicyFile {
    version: u32,
    /// What it was measured on.
    pub device: StorageIdentity,
    /// When.
    pub measured: String,
    /// By which version of this program, on which kernel.
    pub program: String,
    /// The same.
    pub kernel: String,
    /// `read` or `write`.
    pub operation: String,
    /// What is done to the sizes of transfers.
    pub policy: Sizes,
    /// What loads gain by that on average, and what the worst is left with: 1.1 is a tenth more.
    pub gain: f64,
    /// The same.
    pub worst: f64,
    /// All that was measured.
    pub points: Vec<Measured>,
}

/// Sizes in bytes; `null` where nothing is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sizes {
    /// Larger transfers are split into pieces of so many.
    pub split: Option<u64>,
    /// Adjacent ones are merged up to so many.
    pub merge: Option<u64>,
}

/// One measurement.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Measured {
    /// Bytes of a request.
    pub size: u64,
    /// Requests in flight.
    pub depth: usize,
    /// Whether they were one behind the other, and not anywhere.
    pub sequential: bool,
    /// What was done to them.
    #[serde(flatten)]
    pub policy: Sizes,
    /// How fast they were.
    pub bytes_per_second: u64,
}

impl From<Policy> for Sizes {
    fn from(Policy { split, merge }: Policy) -> Sizes {
        Sizes { split, merge }
    }
}

impl From<&Point> for Measured {
    fn from(point: &Point) -> Measured {
        Measured {
            size: point.load.size,
            depth: point.load.depth,
            sequential: point.load.pattern == Pattern::Sequential,
            policy: point.policy.into(),
            bytes_per_second: point.bytes_per_second,
        }
    }
}

impl PolicyFile {
    /// What was found on some storage just now.
    pub fn of(fit: &Fit, device: StorageIdentity, operation: &str) -> PolicyFile {
        let kernel = rustix::system::uname();
        PolicyFile {
            version: VERSION,
            device,
            measured: jiff::Timestamp::now().strftime("%Y-%m-%dT%H:%M:%SZ").to_string(),
            program: env!("CARGO_PKG_VERSION").into(),
            kernel: kernel.release().to_string_lossy().into_owned(),
            operation: operation.into(),
            policy: fit.policy.into(),
            gain: fit.gain,
            worst: fit.worst,
            points: fit.points.iter().map(Measured::from).collect(),
        }
    }

    /// Reads one, whose sizes are such as a policy may have.
    pub fn read(path: &Path) -> Result<PolicyFile, Failure> {
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
        if version != VERSION {
            return Err(refused(format!("it has version {version}, and this program reads version {VERSION}")));
        }
        let found: PolicyFile =
            serde_json::from_slice(&bytes).map_err(|error| refused(format!("it is damaged: {error}")))?;
        let sizes = [found.policy.split, found.policy.merge];
        match sizes.into_iter().flatten().find(|size| !control::SizeRule::is_allowed(*size)) {
            Some(size) => Err(refused(format!("its sizes must be powers of two from 4K to 16M, and {size} is not"))),
            None => Ok(found),
        }
    }

    /// Whether one may be put there: nothing is there, or nothing in it, or another policy.
    pub fn must_be_replaceable(path: &Path) -> Result<(), Failure> {
        let is_empty = path.metadata().is_ok_and(|found| found.is_file() && found.len() == 0);
        if is_empty || path.symlink_metadata().is_err() || PolicyFile::read(path).is_ok() {
            return Ok(());
        }
        let why = "there is a file that is not a policy";
        Err(Failure::new(format!("write the policy file {}", path.display()), why)
            .of_kind(Kind::Exists)
            .advise("name another file, or remove that one"))
    }

    /// Puts it in the place of the policy that is there, if there is one.
    pub fn write(&self, path: &Path) -> Result<(), Failure> {
        PolicyFile::must_be_replaceable(path)?;
        let failed = |error: std::io::Error| Failure::new(format!("write the policy file {}", path.display()), error);
        let mut name = path.file_name().unwrap_or_default().to_owned();
        name.push(".new");
        let new = path.with_file_name(name);
        let mut bytes = serde_json::to_vec_pretty(self).map_err(|error| failed(error.into()))?;
        bytes.push(b'\n');
        let written = std::fs::File::create(&new).and_then(|mut file| {
            file.write_all(&bytes)?;
            file.sync_all()?;
            std::fs::rename(&new, path)
        });
        written.map_err(|error| {
            // It may not be there, and is of no use.
            std::fs::remove_file(&new).unwrap_or_default();
            failed(error)
        })?;
        uring::sync_directory(path).map_err(Failure::said)
    }

    /// Refuses it for other storage than it was measured on.
    pub fn must_be_of(&self, path: &Path, device: &StorageIdentity, image: &str) -> Result<(), Failure> {
        if self.device.id == device.id {
            return Ok(());
        }
        let why = format!("it was measured on {}, and {image} is on {device}", self.device);
        Err(Failure::new(format!("use the policy file {}", path.display()), why)
            .of_kind(Kind::Invalid)
            .advise(format!("measure that: tapline calibrate {image} --policy FILE; or leave --policy out")))
    }

    /// What a served disk says of it.
    pub fn note(&self, path: &Path) -> PolicyNote {
        PolicyNote {
            file: std::path::absolute(path).unwrap_or_else(|_| path.to_owned()).display().to_string(),
            device: self.device.to_string(),
            measured: self.measured.clone(),
            kernel: self.kernel.clone(),
            split: self.policy.split,
            merge: self.policy.merge,
            why: self.why(),
        }
    }

    /// Why the policy is what it is, for people.
    pub fn why(&self) -> String {
        let percent = |share: f64| format!("{:.0} %", share.abs() * 100.0);
        let count = self.points.len();
        match (self.policy.split, self.policy.merge) {
            (None, None) => {
                format!("of {count} measurements none showed a gain that costs no other load more than 3 %")
            }
            (split, merge) => {
                let split = split.map(|piece| format!("pieces of {}", readable(piece)));
                let merge = merge.map(|most| format!("merging up to {}", readable(most)));
                let what = split.into_iter().chain(merge).collect::<Vec<_>>().join(" and ");
                let worst = match self.worst < 1.0 {
                    true => format!("the worst loses {}", percent(1.0 - self.worst)),
                    false => "none loses anything".to_owned(),
                };
                format!("in {count} measurements {what} gained {} on average; {worst}", percent(self.gain - 1.0))
            }
        }
    }
}

#[derive(Deserialize)]
struct Versioned {
    version: u32,
}

#[cfg(test)]
mod test {
    use device::{Load, Progress};

    use super::*;

    fn fitted() -> PolicyFile {
        let measure = |load: Load, policy: Policy, _: Progress| {
            Ok::<_, std::convert::Infallible>(1000 + if policy.split.is_some() { load.size / 1024 } else { 0 })
        };
        let fit = device::fit(false, 1, measure).unwrap_or_else(|never| match never {});
        PolicyFile::of(&fit, StorageIdentity { id: "a".into(), name: "disk a".into() }, "read")
    }

    #[test]
    fn what_is_written_is_read_and_replaces_what_was_there() {
        let room = tempfile::tempdir().unwrap();
        let path = room.path().join("policy.json");
        let written = fitted();
        for _ in 0..2 {
            written.write(&path).unwrap();
        }
        std::fs::write(&path, "").unwrap();
        written.write(&path).unwrap();
        assert_eq!(PolicyFile::read(&path).unwrap(), written);
        assert_eq!(std::fs::read_dir(room.path()).unwrap().count(), 1);
        assert!(written.policy.split.is_some() && written.why().contains("pieces of"), "{}", written.why());
    }

    #[test]
    fn a_file_that_is_no_policy_is_not_replaced() {
        let room = tempfile::tempdir().unwrap();
        let path = room.path().join("disk.qcow2");
        std::fs::write(&path, "an image").unwrap();
        let said = fitted().write(&path).unwrap_err().to_string();
        assert!(said.contains("not a policy"), "{said}");
        assert_eq!(std::fs::read(&path).unwrap(), b"an image");
        PolicyFile::must_be_replaceable(&room.path().join("new")).unwrap();
        PolicyFile::must_be_replaceable(room.path()).unwrap_err();
    }

    #[test]
    fn a_policy_of_other_storage_is_refused_and_both_are_named() {
        let policy = fitted();
        let other = StorageIdentity { id: "b".into(), name: "disk b".into() };
        let said = policy.must_be_of(Path::new("p"), &other, "raw:a").unwrap_err().to_string();
        assert!(said.contains("disk a") && said.contains("disk b") && said.contains("tapline calibrate"), "{said}");
        // A name may change; what it is does not.
        let renamed = StorageIdentity { id: "a".into(), name: "disk c".into() };
        policy.must_be_of(Path::new("p"), &renamed, "raw:a").unwrap();
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
            let said = PolicyFile::read(&path).unwrap_err().to_string();
            assert!(said.contains(why), "{said}");
        }
        assert!(PolicyFile::read(room.path()).unwrap_err().to_string().contains("no file"));
        PolicyFile::read(&room.path().join("none")).unwrap_err();
    }
}
