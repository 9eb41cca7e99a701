//! The messages of the control socket: one JSON object per line in both directions. See `docs/control.md`.
//!
//! It knows nothing about sockets and disks. Invariant: a [`Verb`] that exists has all the fields that it needs and no
//! others, and every path in it is absolute, so that clients need not know this process's working directory.

use std::fmt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Map, Value};

use super::refusal::{Kind, Refusal};
use crate::image_name::{ImageName, NotAnImage};

/// The version of the protocol that is spoken here, and the only one.
pub const VERSION: u64 = 1;

/// Names that a client may give its requests: enough for a uuid with a word before it.
const ID_MAX: usize = 128;

/// A client's name for a request, handed back with everything that is said about it.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[serde(transparent)]
pub struct Id(Value);

/// A line that makes sense.
#[derive(Clone, Debug, PartialEq)]
pub struct Asked {
    /// The requested verb.
    pub verb: Verb,
    /// The files that come with it.
    pub files: Vec<FileAsked>,
}

/// A line's description of a file that comes with it.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileAsked {
    /// Its name.
    pub path: PathBuf,
    /// Whether it is open for writing too.
    pub write: bool,
}

/// The requested verb.
#[derive(Clone, Debug, PartialEq)]
pub enum Verb {
    /// Which version is spoken, and which verbs there are.
    Version,
    /// Counters.
    Stats,
    /// The chain.
    Layers,
    /// Holds all requests.
    Pause,
    /// Lets them go on.
    Resume,
    /// A new leaf on the present one, or a copy by reflink.
    Snapshot(Snapshot),
    /// Moves what layers hold into the one below.
    Merge(MergeRequest),
    /// How far the merge is.
    MergeStatus,
    /// Stops the merge for a while.
    MergePause,
    /// Goes on with it.
    MergeResume,
    /// Ends it where it is.
    MergeCancel,
    /// Throws away what is above a layer.
    Revert(Revert),
    /// A new child of a layer, for another disk.
    Clone(CloneOf),
    /// Makes the disk larger.
    Resize(Resize),
    /// There may be space again.
    Space,
    /// Lines about what keeps the disk from writing, from now on.
    Watch,
    /// Another process in the place of this one.
    Upgrade(Upgrade),
}

/// The names of the verbs, in the order of the documentation.
pub const VERBS: [&str; 17] = [
    "version",
    "layers",
    "stats",
    "pause",
    "resume",
    "snapshot",
    "merge",
    "merge-status",
    "merge-pause",
    "merge-resume",
    "merge-cancel",
    "revert",
    "clone",
    "resize",
    "space",
    "watch",
    "upgrade",
];

/// `snapshot`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Snapshot {
    /// The new file.
    #[serde(deserialize_with = "image_name")]
    pub to: ImageName,
    /// Which way.
    #[serde(default)]
    pub method: Method,
}

/// How a snapshot is taken.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Method {
    /// By reflink where the leaf and the new file are raw and the file system can, else by a chain.
    #[default]
    Auto,
    /// The new file shares all blocks with the disk's own; the disk goes on in its file.
    Reflink,
    /// The new file is the leaf; the old one its parent.
    Chain,
}

/// `merge`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MergeRequest {
    /// The uppermost layer that is merged.
    pub from: usize,
    /// The layer that takes it all.
    pub into: usize,
    /// Bytes a second at most.
    #[serde(default)]
    pub rate: Option<u64>,
    /// Progress lines until it ends, and the answer at the end.
    #[serde(default)]
    pub follow: bool,
    /// Files that hold nothing any more are removed.
    #[serde(default)]
    pub delete: bool,
    /// The expected chain; the request is refused if the disk has another.
    #[serde(default, deserialize_with = "image_names")]
    pub expect: Option<Vec<ImageName>>,
}

/// `revert`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Revert {
    /// The layer that is to be seen again.
    pub to: usize,
    /// The new leaf on it.
    #[serde(deserialize_with = "image_name")]
    pub leaf: ImageName,
}

/// `clone`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CloneOf {
    /// The layer that the new disk stands on.
    pub of: usize,
    /// The new file.
    #[serde(deserialize_with = "image_name")]
    pub to: ImageName,
}

/// `resize`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Resize {
    /// Bytes of the disk.
    pub size: u64,
}

/// `upgrade`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Upgrade {
    /// The program to be started in the place of this one.
    #[serde(default)]
    pub program: Option<PathBuf>,
    /// Or: a socket to a process that was started comes with the line.
    #[serde(default)]
    pub successor: bool,
    /// Microseconds that requests may wait.
    #[serde(default)]
    pub pause_max: Option<u64>,
}

/// `{}`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Nothing {}

/// Parses a line. The request's id is returned even if the rest is invalid.
pub fn parse(line: &[u8]) -> (Id, Result<Asked, Refusal>) {
    let malformed = |why: String| {
        Refusal::new(Kind::Malformed, why).advise("send one JSON object per line, as described in docs/control.md")
    };
    let mut object = match serde_json::from_slice(line) {
        Ok(Value::Object(object)) => object,
        Ok(_) => return (Id::default(), Err(malformed("the line is not a JSON object".into()))),
        Err(error) => return (Id::default(), Err(malformed(format!("the line is not JSON: {error}")))),
    };
    let id = match object.remove("id").unwrap_or(Value::Null) {
        id @ (Value::Null | Value::Number(_)) => Id(id),
        Value::String(id) if id.len() <= ID_MAX => Id(Value::String(id)),
        _ => {
            return (
                Id::default(),
                Err(malformed(format!("\"id\" must be a number or a string of at most {ID_MAX} bytes"))),
            );
        }
    };
    let files = object.remove("files").map_or(Ok(Vec::new()), fields::<Vec<FileAsked>>);
    let asked = files.and_then(whole_paths).and_then(|files| Ok(Asked { verb: verb(object)?, files }));
    (id, asked)
}

fn whole_paths(files: Vec<FileAsked>) -> Result<Vec<FileAsked>, Refusal> {
    match files.iter().find(|file| !file.path.is_absolute()) {
        Some(file) => Err(invalid(format!("'{}' must be an absolute path", file.path.display()))),
        None => Ok(files),
    }
}

fn verb(mut object: Map<String, Value>) -> Result<Verb, Refusal> {
    match object.remove("version") {
        Some(version) if version == VERSION => {}
        Some(version) => {
            let what = format!("protocol version {} is not supported", shortened(&version));
            return Err(Refusal::new(Kind::Version, what).advise(format!("send \"version\":{VERSION}")));
        }
        None => return Err(invalid("\"version\" is missing").advise(format!("send \"version\":{VERSION}"))),
    }
    let name = match object.remove("verb") {
        Some(Value::String(name)) => name,
        _ => return Err(invalid("\"verb\" is missing").advise(format!("known verbs: {}", VERBS.join(", ")))),
    };
    let rest = Value::Object(object);
    let alone = |verb: Verb, rest: Value| fields::<Nothing>(rest).map(|_| verb);
    match name.as_str() {
        "version" => alone(Verb::Version, rest),
        "stats" => alone(Verb::Stats, rest),
        "layers" => alone(Verb::Layers, rest),
        "space" => alone(Verb::Space, rest),
        "watch" => alone(Verb::Watch, rest),
        "pause" => alone(Verb::Pause, rest),
        "resume" => alone(Verb::Resume, rest),
        "merge-status" => alone(Verb::MergeStatus, rest),
        "merge-pause" => alone(Verb::MergePause, rest),
        "merge-resume" => alone(Verb::MergeResume, rest),
        "merge-cancel" => alone(Verb::MergeCancel, rest),
        "snapshot" => fields(rest).map(Verb::Snapshot),
        "merge" => fields(rest).and_then(in_order).map(Verb::Merge),
        "revert" => fields(rest).map(Verb::Revert),
        "clone" => fields(rest).map(Verb::Clone),
        "resize" => fields(rest).map(Verb::Resize),
        "upgrade" => fields(rest).and_then(whole_program).map(Verb::Upgrade),
        _ => {
            let what = format!("unknown verb {}", shortened(&Value::String(name)));
            Err(Refusal::new(Kind::UnknownVerb, what).advise(format!("known verbs: {}", VERBS.join(", "))))
        }
    }
}

fn in_order(merge: MergeRequest) -> Result<MergeRequest, Refusal> {
    if merge.from >= merge.into {
        let what = format!("layer {} is not above layer {}", merge.from, merge.into);
        return Err(
            invalid(what).advise("layers are numbered from the leaf, 0, downwards: from 0 into 1 merges the leaf")
        );
    }
    if let Some(chain) = merge.expect.as_ref().filter(|chain| chain.len() <= merge.into) {
        return Err(invalid(format!("the expected chain has {} layers and no layer {}", chain.len(), merge.into)));
    }
    match merge.rate {
        Some(0) => {
            Err(invalid("a merge at rate 0 would never end").advise("use merge-pause to stop a merge for a while"))
        }
        _ => Ok(merge),
    }
}

fn whole_program(upgrade: Upgrade) -> Result<Upgrade, Refusal> {
    match &upgrade.program {
        Some(program) if !program.is_absolute() => {
            Err(invalid(format!("'{}' must be an absolute path", program.display())))
        }
        _ => Ok(upgrade),
    }
}

fn fields<T: for<'a> Deserialize<'a>>(rest: Value) -> Result<T, Refusal> {
    serde_json::from_value(rest).map_err(|error| invalid(error.to_string()))
}

fn invalid(what: impl Into<String>) -> Refusal {
    Refusal::new(Kind::Invalid, what)
}

/// What a client has sent, as far as it is worth repeating.
fn shortened(value: &Value) -> String {
    let text = value.to_string();
    let end = text.char_indices().nth(40).map_or(text.len(), |(at, _)| at);
    text.get(..end).unwrap_or_default().to_owned()
}

fn image_names<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Vec<ImageName>>, D::Error> {
    let words = Vec::<String>::deserialize(deserializer)?;
    words.iter().map(|word| whole(word).map_err(serde::de::Error::custom)).collect::<Result<_, _>>().map(Some)
}

fn image_name<'de, D: Deserializer<'de>>(deserializer: D) -> Result<ImageName, D::Error> {
    whole(&String::deserialize(deserializer)?).map_err(serde::de::Error::custom)
}

fn whole(word: &str) -> Result<ImageName, String> {
    let name: ImageName = word.parse().map_err(|error: NotAnImage| error.to_string())?;
    let whole = name.paths().all(Path::is_absolute);
    match whole {
        true => Ok(name),
        false => Err(format!("'{name}' must be an absolute path")),
    }
}

#[derive(Serialize)]
struct Line<'a, T> {
    id: &'a Id,
    #[serde(flatten)]
    said: T,
}

#[derive(Serialize)]
#[serde(rename_all = "lowercase")]
enum Said<'a> {
    Ok(&'a Value),
    Error(&'a Refusal),
    Event(&'a Value),
}

/// The last word on a request.
pub fn answer(id: &Id, outcome: &Result<Value, Refusal>) -> String {
    match outcome {
        Ok(value) => line(id, Said::Ok(value)),
        Err(refusal) => line(id, Said::Error(refusal)),
    }
}

/// A word on the way.
pub fn event(id: &Id, value: &Value) -> String {
    line(id, Said::Event(value))
}

fn line(id: &Id, said: Said<'_>) -> String {
    let text = serde_json::to_string(&Line { id, said });
    // Nothing in these values can fail to be JSON.
    let text = text.unwrap_or_else(|error| format!("{{\"id\":null,\"error\":{{\"message\":\"{error}\"}}}}"));
    format!("{text}\n")
}

impl fmt::Display for Method {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Method::Auto => "auto",
            Method::Reflink => "reflink",
            Method::Chain => "chain",
        })
    }
}

#[cfg(test)]
mod test {
    use super::*;

    fn refused(line: &str) -> Refusal {
        parse(line.as_bytes()).1.unwrap_err()
    }

    #[test]
    fn a_request_is_its_verb_and_its_fields() {
        let (id, verb) = parse(br#"{"version":1,"id":7,"verb":"merge","from":0,"into":2,"rate":1000,"follow":true}"#);
        assert_eq!(id, Id(7.into()));
        let merge = MergeRequest { from: 0, into: 2, rate: Some(1000), follow: true, delete: false, expect: None };
        assert_eq!(verb.unwrap(), Asked { verb: Verb::Merge(merge), files: Vec::new() });
        let (_, verb) = parse(br#"{"version":1,"verb":"snapshot","to":"vhd:/a/b.vhd"}"#);
        let to = "vhd:/a/b.vhd".parse().unwrap();
        assert_eq!(verb.unwrap().verb, Verb::Snapshot(Snapshot { to, method: Method::Auto }));
    }

    #[test]
    fn every_verb_that_is_listed_is_known() {
        for name in VERBS {
            let line = format!(r#"{{"version":1,"verb":"{name}"}}"#);
            let unknown = parse(line.as_bytes()).1.is_err_and(|refusal| refusal.kind == Kind::UnknownVerb);
            assert!(!unknown, "{name}");
        }
    }

    #[test]
    fn unknown_fields_and_verbs_are_refused_by_name() {
        assert!(refused(r#"{"version":1,"verb":"explode"}"#).message.contains("explode"));
        assert!(refused(r#"{"version":1,"verb":"stats","now":true}"#).message.contains("now"));
        assert!(refused(r#"{"version":1,"verb":"resize","size":1,"shrink":true}"#).message.contains("shrink"));
        assert!(refused(r#"{"version":1,"verb":"resize"}"#).message.contains("size"));
        assert_eq!(refused(r#"{"version":2,"verb":"stats"}"#).kind, Kind::Version);
        assert_eq!(refused(r#"{"verb":"stats"}"#).kind, Kind::Invalid);
    }

    #[test]
    fn invalid_lines_are_refused_without_an_id() {
        for line in ["", "{", "[]", "7", "{\"id\":{}}", "\u{0}", "{\"version\":1,\"version\"", &"[".repeat(100_000)] {
            let (id, verb) = parse(line.as_bytes());
            assert_eq!((id, verb.unwrap_err().kind), (Id::default(), Kind::Malformed), "{line:.40}");
        }
        let long = format!(r#"{{"id":"{}"}}"#, "x".repeat(ID_MAX + 1));
        assert_eq!(refused(&long).kind, Kind::Malformed);
    }

    #[test]
    fn relative_paths_are_refused() {
        let refusal = refused(r#"{"version":1,"verb":"snapshot","to":"vhd:b.vhd"}"#);
        assert!(refusal.message.contains("an absolute path"), "{refusal:?}");
        assert!(refused(r#"{"version":1,"verb":"clone","of":1,"to":"b.vhd"}"#).message.contains("format"));
    }

    #[test]
    fn files_are_listed_with_their_use_only() {
        let line = |file: &str| format!(r#"{{"version":1,"verb":"stats","files":[{file}]}}"#);
        let (_, asked) = parse(line(r#"{"path":"/a","write":true}"#).as_bytes());
        assert_eq!(asked.unwrap().files, [FileAsked { path: "/a".into(), write: true }]);
        assert!(refused(&line(r#"{"path":"a","write":true}"#)).message.contains("an absolute path"));
        assert!(refused(&line(r#"{"path":"/a"}"#)).message.contains("write"));
        assert!(refused(&line(r#"{"path":"/a","write":true,"mode":1}"#)).message.contains("mode"));
        assert!(refused(r#"{"version":1,"verb":"stats","files":7}"#).message.contains("sequence"));
    }

    #[test]
    fn a_merge_must_go_downwards_at_a_nonzero_rate() {
        assert!(refused(r#"{"version":1,"verb":"merge","from":1,"into":1}"#).message.contains("not above"));
        assert!(refused(r#"{"version":1,"verb":"merge","from":0,"into":1,"rate":0}"#).message.contains("never end"));
    }

    #[test]
    fn an_expected_chain_has_absolute_paths_and_all_merged_layers() {
        let merge = |chain: &str| format!(r#"{{"version":1,"verb":"merge","from":0,"into":1,"expect":{chain}}}"#);
        let (_, verb) = parse(merge(r#"["vhd:/b","raw:/a"]"#).as_bytes());
        let Ok(Asked { verb: Verb::Merge(MergeRequest { expect: Some(chain), .. }), .. }) = verb else {
            panic!("{verb:?}")
        };
        assert_eq!(chain, ["vhd:/b".parse().unwrap(), "raw:/a".parse().unwrap()]);
        assert!(refused(&merge(r#"["vhd:/b"]"#)).message.contains("no layer 1"));
        assert!(refused(&merge(r#"["vhd:b","raw:/a"]"#)).message.contains("an absolute path"));
        assert!(refused(&merge("7")).message.contains("sequence"));
    }

    #[test]
    fn an_answer_is_one_line_with_its_requests_id() {
        let id = Id("a\nb".into());
        assert_eq!(answer(&id, &Ok(Value::Null)), "{\"id\":\"a\\nb\",\"ok\":null}\n");
        assert_eq!(event(&Id::default(), &7.into()), "{\"id\":null,\"event\":7}\n");
        let refusal = Refusal::new(Kind::Busy, "a merge is running").advise("wait");
        let line = answer(&Id(1.into()), &Err(refusal));
        assert_eq!(
            line,
            "{\"id\":1,\"error\":{\"kind\":\"busy\",\"message\":\"a merge is running\",\"advice\":\"wait\"}}\n"
        );
    }
}
