//! The label of a repository: a small file in its directory that identifies it.
//!
//! Invariant: a label exists completely or not at all, even after a power loss.

use api::{Code, ImageFormat, Name, Problem};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::Directory;

/// The name of the label's file in the directory.
pub const LABEL: &str = ".tapline-sr.json";

/// The version of the label that this program writes, and the last that it understands.
const VERSION: u32 = 1;

/// Bytes of the longest label: a name of 128 characters and a little more.
const LABEL_MAX: usize = 16 << 10;

/// Identifies the repository in a directory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Label {
    /// The label's own version.
    version: u32,
    /// The repository's identity.
    pub uuid: Uuid,
    /// The name at its creation.
    pub name: Name,
    /// The default format of new VDIs, if one was given when the repository was created.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub format: Option<ImageFormat>,
}

/// The part that is parsed first.
#[derive(Deserialize)]
struct Versioned {
    version: u32,
}

impl Label {
    /// A label of today.
    pub fn new(uuid: Uuid, name: Name, format: Option<ImageFormat>) -> Label {
        Label { version: VERSION, uuid, name, format }
    }

    /// The label of a directory, if it has one.
    pub fn read(directory: &Directory) -> Result<Option<Label>, Problem> {
        let Some(bytes) = directory.read_file(LABEL, LABEL_MAX)? else { return Ok(None) };
        parse(&bytes).map(Some).map_err(|why| {
            let path = directory.path().join(LABEL);
            Problem::failed(format_args!("read the label {}", path.display()), why)
                .advise("if it is damaged, inspect it and rewrite it by hand; that does not affect the images")
        })
    }

    /// Gives a directory this label; refuses if it has one.
    pub fn write(&self, directory: &Directory) -> Result<(), Problem> {
        let text = serde_json::to_string_pretty(self).map_err(|error| Problem::failed("write a label", error))?;
        directory.write_file(LABEL, format!("{text}\n").as_bytes()).map_err(|problem| match problem.code {
            Code::Exists => {
                let what = format!("{} is already a repository", directory.path().display());
                Problem::new(Code::Exists, what).field("source").advise("introduce it, or choose another directory")
            }
            _ => problem,
        })
    }
}

fn parse(bytes: &[u8]) -> Result<Label, String> {
    let text = |error: serde_json::Error| error.to_string();
    match serde_json::from_slice::<Versioned>(bytes).map_err(text)?.version {
        VERSION => serde_json::from_slice(bytes).map_err(text),
        version => Err(format!("it has version {version}, and this taplined supports version {VERSION}")),
    }
}

#[cfg(test)]
mod test {
    use super::*;

    fn directory() -> (tempfile::TempDir, Directory) {
        let room = tempfile::tempdir().unwrap();
        let path = room.path().to_str().unwrap().parse().unwrap();
        (room, Directory::open(&path).unwrap())
    }

    fn label() -> Label {
        Label::new(Uuid::new_v4(), "disks".parse().unwrap(), Some(ImageFormat::Vhd))
    }

    #[test]
    fn a_label_is_read_back_and_never_overwritten() {
        let (room, directory) = directory();
        assert_eq!(Label::read(&directory).unwrap(), None);
        let first = label();
        first.write(&directory).unwrap();
        assert_eq!(label().write(&directory).unwrap_err().code, Code::Exists);
        assert_eq!(Label::read(&directory).unwrap(), Some(first));
        assert_eq!(std::fs::read_dir(room.path()).unwrap().count(), 1, "nothing is left beside it");
    }

    #[test]
    fn an_invalid_label_is_rejected() {
        let (room, directory) = directory();
        for text in ["", "{", "{\"version\":2}", "{\"version\":1,\"uuid\":\"x\",\"name\":\"a\"}", &"x".repeat(1 << 20)]
        {
            std::fs::write(room.path().join(LABEL), text).unwrap();
            assert!(Label::read(&directory).is_err(), "{text:.40}");
        }
    }
}
