//! A target: an object store with a `format` object, opened with its key.
//!
//! Knows the format object and nothing of what else is stored. It has three lines: the parameters as JSON, a digest of
//! them against damage, and on an encrypted target a keyed digest by which a wrong key is refused before anything else
//! is read or written.
//!
//! Creation writes the first entry of the log, whose name contains the random id of the target, then the format: a
//! target that opens has a log, and a creation that was interrupted or that lost against another leaves nothing that
//! counts.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::codec::{Codec, Kind};
use crate::error::{Error, damaged};
use crate::id::{Digest, Id};
use crate::key::Key;
use crate::name::Name;
use crate::planted::Bug;
use crate::store::{ObjectStore, get_all, is_missing};

/// The latest version of the format. Programs that know version 1 only lose the moments of machines when they prune; a
/// target of that version is used as it is.
const VERSION: u64 = 2;

/// A format object is three lines; another file under its name may be of any size.
const FORMAT_MAX: u64 = 4096;

/// Sizes and compression of a new target. They cannot be changed later.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Layout {
    /// Bytes of a chunk, the unit of deduplication: a power of two, 4 KiB to 4 MiB.
    pub chunk: u32,
    /// Chunks of a page, the unit in which unchanged parts of an index are shared: 4 to 65536.
    pub page: u32,
    /// Bytes of chunks that are gathered into an object: up to 256 MiB.
    pub pack: u32,
    /// The level of zstd, 1 to 19; 0 stores everything uncompressed.
    pub level: i32,
}

impl Default for Layout {
    /// For disks of machines; the reasons are in decision 0059.
    fn default() -> Layout {
        Layout { chunk: 64 << 10, page: 1024, pack: 16 << 20, level: 1 }
    }
}

#[derive(Debug, Serialize, Deserialize)]
struct Format {
    #[serde(rename = "tapline-backup")]
    version: u64,
    id: Id,
    encryption: Encryption,
    #[serde(flatten)]
    layout: Layout,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
enum Encryption {
    #[serde(rename = "none")]
    None,
    #[serde(rename = "xchacha20-poly1305")]
    XChaCha,
}

/// An opened target. Cheap to clone.
#[derive(Clone)]
pub struct Target {
    pub(crate) store: Arc<dyn ObjectStore>,
    pub(crate) codec: Arc<Codec>,
    id: Id,
    layout: Layout,
    pub(crate) bug: Option<Bug>,
}

impl std::fmt::Debug for Target {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Target").field("id", &self.id).field("layout", &self.layout).finish_non_exhaustive()
    }
}

impl Target {
    /// A target that does not exist yet in its store, and the text of its `format` object, which makes it one.
    pub(crate) fn prepare(
        store: Arc<dyn ObjectStore>,
        layout: Layout,
        key: Option<&Key>,
    ) -> Result<(Target, String), Error> {
        check_layout(&layout).map_err(|what| Error::Invalid(what.to_owned()))?;
        match store.size(&Name::format()) {
            Ok(_) => return Err(Error::TargetExists),
            Err(error) if is_missing(&error) => {}
            Err(error) => return Err(error.into()),
        }
        let encryption = if key.is_some() { Encryption::XChaCha } else { Encryption::None };
        let format = Format { version: VERSION, id: Id::random(), encryption, layout };
        let codec = Codec::new(format.id, key, format.layout.level);
        let text = encode(&format, &codec).map_err(|what| Error::Invalid(what.to_string()))?;
        let target = Target { store, codec: Arc::new(codec), id: format.id, layout: format.layout, bug: None };
        Ok((target, text))
    }

    /// Opens a target. Nothing is written.
    pub fn open(store: Arc<dyn ObjectStore>, key: Option<&Key>) -> Result<Target, Error> {
        let name = Name::format();
        let found = store.size(&name).and_then(|size| store.get(&name, 0..size.min(FORMAT_MAX)));
        let bytes = match found {
            Ok(bytes) => bytes,
            Err(error) if is_missing(&error) => return Err(Error::NoTarget),
            Err(error) => return Err(error.into()),
        };
        let (format, codec) = decode(&bytes, key)?;
        Ok(Target { store, codec: Arc::new(codec), id: format.id, layout: format.layout, bug: None })
    }

    /// The random id of the target.
    pub fn id(&self) -> Id {
        self.id
    }

    /// Sizes and compression of the target.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Whether the target is encrypted.
    pub fn is_encrypted(&self) -> bool {
        self.codec.is_encrypted()
    }

    pub(crate) fn chunk(&self) -> u64 {
        u64::from(self.layout.chunk)
    }

    /// Bytes of a disk that one page describes.
    pub(crate) fn page_span(&self) -> u64 {
        self.chunk() * u64::from(self.layout.page)
    }

    /// Whether a bug was planted; never outside of tests.
    pub(crate) fn has(&self, bug: Bug) -> bool {
        self.bug == Some(bug)
    }

    pub(crate) fn unsealed(&self, kind: Kind, name: &Name) -> Result<Vec<u8>, Error> {
        let bytes = get_all(&*self.store, name)?;
        self.codec.unseal(kind, name, &bytes).map_err(|damage| damaged(name, damage.0))
    }
}

fn check_layout(layout: &Layout) -> Result<(), &'static str> {
    if !layout.chunk.is_power_of_two() || !(4 << 10..=4 << 20).contains(&layout.chunk) {
        return Err("the chunk size must be a power of two, 4 KiB to 4 MiB");
    }
    if !(4..=65536).contains(&layout.page) {
        return Err("a page must have 4 to 65536 chunks");
    }
    if !(layout.chunk..=256 << 20).contains(&layout.pack) {
        return Err("a pack must have at least a chunk, and at most 256 MiB");
    }
    if !(0..=19).contains(&layout.level) {
        return Err("the level of compression must be 0 to 19");
    }
    Ok(())
}

fn line_digest(line: &str) -> Digest {
    Digest::from_bytes(*blake3::hash(line.as_bytes()).as_bytes())
}

fn encode(format: &Format, codec: &Codec) -> Result<String, serde_json::Error> {
    let line = serde_json::to_string(format)?;
    let check = codec.is_encrypted().then(|| codec.digest(Kind::Format, line.as_bytes()).to_string());
    Ok(format!("{line}\n{}\n{}\n", line_digest(&line), check.as_deref().unwrap_or("-")))
}

fn decode(bytes: &[u8], key: Option<&Key>) -> Result<(Format, Codec), Error> {
    let bad = |what: &str| damaged(&Name::format(), what);
    let text = std::str::from_utf8(bytes).map_err(|_| bad("it is not text"))?;
    let mut lines = text.split_terminator('\n');
    let (Some(line), Some(digest), Some(check)) = (lines.next(), lines.next(), lines.next()) else {
        return Err(bad("it is cut off"));
    };
    if text.len() != line.len() + digest.len() + check.len() + 3 {
        return Err(bad("it does not have three lines"));
    }
    if Digest::parse(digest) != Some(line_digest(line)) {
        return Err(bad("its parameters do not have their digest"));
    }
    let value: serde_json::Value = serde_json::from_str(line).map_err(|_| bad("it is not JSON"))?;
    match value.get("tapline-backup").and_then(serde_json::Value::as_u64) {
        Some(1..=VERSION) => {}
        Some(found) if found > VERSION => return Err(Error::NewerVersion { found, known: VERSION }),
        _ => return Err(bad("it has no version")),
    }
    let format: Format = serde_json::from_value(value).map_err(|error| bad(&error.to_string()))?;
    check_layout(&format.layout).map_err(bad)?;
    let key = match (format.encryption, key) {
        (Encryption::None, None) => None,
        (Encryption::XChaCha, Some(key)) => Some(key),
        (Encryption::None, Some(_)) => return Err(Error::NotEncrypted),
        (Encryption::XChaCha, None) => return Err(Error::KeyNeeded),
    };
    let codec = Codec::new(format.id, key, format.layout.level);
    if key.is_some() {
        let check = Digest::parse(check).ok_or_else(|| bad("its key check is not a digest"))?;
        // Compared in constant time.
        let is_right = blake3::Hash::from_bytes(*check.as_bytes())
            == blake3::Hash::from_bytes(*codec.digest(Kind::Format, line.as_bytes()).as_bytes());
        if !is_right {
            return Err(Error::WrongKey);
        }
    } else if check != "-" {
        return Err(bad("it has a key check, and is not encrypted"));
    }
    Ok((format, codec))
}
