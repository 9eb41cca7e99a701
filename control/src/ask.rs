//! Requests to a disk, in the order of docs/control.md.
//!
//! It knows nothing about sockets and disks. Invariant: a [`Request`] that was parsed has a verb with all the fields
//! that it needs and no others, and every path in it is absolute, so that clients need not know the disk's working
//! directory.

use std::path::{Path, PathBuf};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

#[cfg(test)]
use crate::Reply;
use crate::answer::PolicyNote;
use crate::limits::Limits;
pub use crate::method::Method;
use crate::tracking::NewMap;
use crate::{Error, Id, ImageName, Kind, PollingMode, SizeRule, answer, share};

/// The only protocol version that is supported.
pub const VERSION: u64 = 1;

/// Maximum length of a request ID in bytes: enough for a UUID with a prefix.
const ID_MAX: usize = 128;

/// A verb with its fields, and the type of its answer.
pub trait Ask: Into<Verb> {
    /// Type of the answer.
    type Answer: DeserializeOwned;
}

/// Calls the macro `$then` with the list of verbs: for each a description, its word, its kind, the type of its fields
/// and the type of its answer. The command line generates a subcommand for each verb that is not for programs only.
#[macro_export]
macro_rules! with_verbs {
    ($then:ident) => {
        $then! {
            /// Show the protocol version
            "version" Immediate::Version -> answer::Version;
            /// List the layers
            "layers" Immediate::Layers -> answer::Layers;
            /// Show I/O statistics
            "stats" Immediate::Stats -> answer::Stats;
            /// Take a snapshot: create a new leaf on the current one, or a copy that shares its blocks
            "snapshot" LongRunning::Snapshot -> answer::Snapshot;
            /// Create an empty child of a read-only layer, for another disk
            "clone" LongRunning::Clone -> answer::Clone;
            /// Merge layers into the one below them
            "merge" LongRunning::Merge -> answer::Merge;
            /// Show the merge's progress, or how the last one ended
            "merge-status" Immediate::MergeStatus -> answer::Merge;
            /// Pause the merge
            "merge-pause" Immediate::MergePause -> answer::Merge;
            /// Resume the merge
            "merge-resume" Immediate::MergeResume -> answer::Merge;
            /// Stop the merge; the disk stays valid, and another merge continues from there
            "merge-cancel" Immediate::MergeCancel -> answer::Merge;
            /// Revert the disk to a layer; no client may be connected
            "revert" LongRunning::Revert -> answer::Revert;
            /// Enlarge the disk and notify its guest
            "resize" LongRunning::Resize -> answer::Resize;
            /// Record which blocks change in a new map of changed blocks, from now on
            "track" LongRunning::Track -> answer::Tracked;
            /// Stop recording which blocks change; the map is void then
            "untrack" LongRunning::Untrack -> answer::Tracked;
            /// Retry requests that are waiting for space (serve --when-full wait)
            "space" Immediate::Space -> answer::Condition;
            /// Replace the process that serves the disk; its guest only notices a short wait
            "upgrade" LongRunning::Upgrade -> answer::Upgrade;
            /// Limit its requests and bytes per second, or show its limits
            "limit" Immediate::Limit -> answer::Limited;
            /// Set the disk's share of a storage that other disks use too, or show it
            "share" Immediate::Share -> answer::Shared;
            /// Pause all requests; everything is durable while they are paused
            "pause" LongRunning::Pause -> answer::Paused;
            /// Resume requests
            "resume" LongRunning::Resume -> answer::Paused;
            /// Show or set when the disk's thread polls, and for how long
            "polling" Immediate::Polling -> answer::Polling;
            /// Show or set how its transfers are split and merged
            "shape" Immediate::Shape -> answer::Shape;
            /// Show or set how many threads the disk may use
            "threads" Immediate::Threads -> answer::Threads;
            for programs:
            /// Send an event whenever a condition that prevents writes changes
            "watch" Immediate::Watch -> answer::Condition;
            /// Keep the stages of each request in the statistics page for a while
            "trace" Immediate::Trace -> answer::Trace;
        }
    };
}

macro_rules! verbs {
    ($($(for programs:)? $(#[$doc:meta])* $word:literal $kind:ident::$verb:ident -> $answer:ty;)*) => {
        /// The words of all verbs.
        pub const VERBS: &[&str] = &[$($word),*];

        impl Verb {
            /// The word of the verb in a request.
            pub fn word(&self) -> &'static str {
                match self {
                    $(Verb::$kind($kind::$verb(_)) => $word,)*
                }
            }

            fn parse(mut object: Map<String, Value>) -> Result<Verb, Error> {
                let advice = || format!("known verbs: {}", VERBS.join(", "));
                let Some(Value::String(word)) = object.remove("verb") else {
                    return Err(invalid("\"verb\" is missing").advise(advice()));
                };
                match word.as_str() {
                    $($word => fields::<$verb>(Value::Object(object)).map(Verb::from),)*
                    _ => {
                        let what = format!("unknown verb {}", shortened(&word.into()));
                        Err(Error::new(Kind::UnknownVerb, what).advise(advice()))
                    }
                }
            }

            /// Checks that a line is an answer or an event of this verb.
            #[cfg(test)]
            pub(crate) fn understands(&self, line: &[u8]) -> serde_json::Result<()> {
                match self {
                    $(Verb::$kind($kind::$verb(_)) => Reply::<$answer, Value>::parse(line).map(drop),)*
                }
            }
        }

        $(impl From<$verb> for Verb {
            fn from(fields: $verb) -> Verb {
                Verb::$kind($kind::$verb(fields))
            }
        }

        impl Ask for $verb {
            type Answer = $answer;
        })*

        kinds! { [] [] $($kind [$(#[$doc])* #[serde(rename = $word)] $verb($verb)])* }
    };
}

/// Sorts the verbs into one type for each kind.
macro_rules! kinds {
    ([$($immediate:tt)*] $long:tt Immediate $verb:tt $($rest:tt)*) => {
        kinds! { [$($immediate)* $verb] $long $($rest)* }
    };
    ($immediate:tt [$($long:tt)*] LongRunning $verb:tt $($rest:tt)*) => {
        kinds! { $immediate [$($long)* $verb] $($rest)* }
    };
    ([$([$($immediate:tt)*])*] [$([$($long:tt)*])*]) => {
        /// A verb that is answered at once, whatever else is under way.
        #[derive(Clone, Debug, PartialEq, Serialize)]
        #[serde(tag = "verb")]
        pub enum Immediate { $($($immediate)*,)* }

        /// A verb that is done in steps, one at a time, while the disk is used.
        #[derive(Clone, Debug, PartialEq, Serialize)]
        #[serde(tag = "verb")]
        pub enum LongRunning { $($($long)*,)* }
    };
}

/// A verb with its fields.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(untagged)]
pub enum Verb {
    /// One that is answered at once.
    Immediate(Immediate),
    /// One that takes its time.
    LongRunning(LongRunning),
}

with_verbs!(verbs);

/// Verbs without fields.
macro_rules! alone {
    ($($verb:ident)*) => {
        $(/// A verb without fields.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
        #[serde(deny_unknown_fields)]
        pub struct $verb {})*
    };
}

alone! { Version Layers Stats MergeStatus MergePause MergeResume MergeCancel Space Watch Pause Resume }

/// Fields of `snapshot`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Snapshot {
    /// New image file.
    pub to: ImageName,
    /// How the snapshot is taken.
    #[serde(default)]
    pub method: Method,
    /// File of a new map of changed blocks, which continues the present one: that ends with the snapshot. If omitted,
    /// the present one continues. Only for a chain.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub map: Option<PathBuf>,
    /// Ids of the new map, for which the client has marked the new image; required with a map for disks of a daemon.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub new: Option<NewMap>,
}

/// Fields of `track`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Track {
    /// File of the new map.
    pub map: PathBuf,
    /// Ids of the new map, for which the client has marked the image; required for disks of a daemon.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub new: Option<NewMap>,
}

/// Fields of `untrack`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Untrack {
    /// Whether the client has removed the file of the map, durably: necessary for a map that is doubtful.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub removed: bool,
    /// Whether the client records it in the catalogue; required for disks of a daemon.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub recorded: bool,
}

/// Fields of `clone`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Clone {
    /// Number of the layer that becomes the parent.
    pub of: usize,
    /// New image file.
    pub to: ImageName,
}

/// Fields of `merge`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Merge {
    /// Number of the uppermost layer that is merged.
    pub from: usize,
    /// Number of the layer that receives the data.
    pub into: usize,
    /// Maximum rate in bytes per second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rate: Option<u64>,
    /// Whether to send progress events, and the answer when the merge has ended.
    #[serde(default)]
    pub follow: bool,
    /// Whether to remove files that are no longer needed.
    #[serde(default)]
    pub delete: bool,
    /// Expected chain; the request is refused if the disk has a different one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expect: Option<Vec<ImageName>>,
}

/// Fields of `revert`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Revert {
    /// Number of the layer to revert to.
    pub to: usize,
    /// New leaf on top of that layer.
    pub leaf: ImageName,
}

/// Fields of `resize`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Resize {
    /// New size of the disk in bytes.
    pub size: u64,
    /// Whether the client records the new size in the catalogue; required for disks of a daemon.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub recorded: bool,
}

/// Fields of `limit`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Limit {
    /// New limits; rates without one become unlimited. If omitted, the limits are unchanged.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limits: Option<Limits>,
    /// Whether the client records the limits in the catalogue; required for disks of a daemon.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub recorded: bool,
}

/// Fields of `share`. The page of shares may be passed with the request as the writable file `shares.page`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Share {
    /// New weight of the disk. If omitted, the weight is unchanged.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub weight: Option<u32>,
    /// Whether the client records the weight in the catalogue; required for disks of a daemon.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub recorded: bool,
    /// Whether the disk leaves its page and stops sharing its storage.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub alone: bool,
}

/// Fields of `trace`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Trace {
    /// Duration of the recording in seconds; 0 ends it.
    pub seconds: u32,
}

/// Fields of `polling`. Omitted settings are unchanged.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Polling {
    /// When the thread of the disk polls.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mode: Option<PollingMode>,
    /// Maximum polling time before a sleep, in microseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_us: Option<u64>,
}

/// Fields of `shape`. Omitted settings are unchanged.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Shape {
    /// Rule for splitting large transfers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub split: Option<SizeRule>,
    /// Rule for merging adjacent transfers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub merge: Option<SizeRule>,
    /// Whether the request has all settings of the repository in the catalogue: omitted ones are then reset, and the
    /// disk follows `policy` and no other.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub recorded: bool,
    /// Policy that a rule `auto` follows. Only with `recorded`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub policy: Option<PolicyNote>,
}

/// Maximum number of threads of a disk. One thread maps and completes all requests, so more than a few do not help.
pub const THREADS_MAX: usize = 16;

/// Fields of `threads`. An omitted setting is unchanged.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Threads {
    /// Maximum number of threads, including the disk's own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub most: Option<usize>,
}

/// Fields of `upgrade`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Upgrade {
    /// Program to start as the successor.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub program: Option<PathBuf>,
    /// Whether a socket to a successor that is already running is passed with the request instead.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub successor: bool,
    /// Maximum time that requests may wait, in microseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pause_max: Option<u64>,
}

/// A valid request.
#[derive(Clone, Debug, PartialEq)]
pub struct Request {
    /// The verb and its fields.
    pub verb: Verb,
    /// Files that are passed with the request.
    pub files: Vec<FileAsked>,
}

/// Description of a file that is passed with a request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileAsked {
    /// Path of the file.
    pub path: PathBuf,
    /// Whether the file is open for writing.
    pub write: bool,
}

impl Request {
    /// Creates a request without files.
    pub fn of(verb: impl Into<Verb>) -> Request {
        Request { verb: verb.into(), files: Vec::new() }
    }

    /// Encodes the request as a line. Fails for a path that is not UTF-8.
    pub fn line(&self) -> serde_json::Result<String> {
        #[derive(Serialize)]
        struct Line<'a> {
            version: u64,
            id: u64,
            #[serde(flatten)]
            verb: &'a Verb,
            #[serde(skip_serializing_if = "<[FileAsked]>::is_empty")]
            files: &'a [FileAsked],
        }
        // These clients have one request in progress, so any ID will do.
        let line = Line { version: VERSION, id: 1, verb: &self.verb, files: &self.files };
        serde_json::to_string(&line).map(|line| line + "\n")
    }

    /// Parses a line. The request's id is returned even if the rest is invalid.
    pub fn parse(line: &[u8]) -> (Id, Result<Request, Error>) {
        let malformed = |why: String| {
            Error::new(Kind::Malformed, why).advise("send one JSON object per line, as described in docs/control.md")
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
                let why = format!("\"id\" must be a number or a string of at most {ID_MAX} bytes");
                return (Id::default(), Err(malformed(why)));
            }
        };
        let files = object.remove("files").map_or(Ok(Vec::new()), fields::<Vec<FileAsked>>);
        let request = files.and_then(|files| {
            files.iter().try_for_each(|file| absolute(&file.path))?;
            check_version(object.remove("version").as_ref())?;
            let verb = Verb::parse(object)?;
            verb.check().map(|()| Request { verb, files })
        });
        (id, request)
    }
}

fn check_version(version: Option<&Value>) -> Result<(), Error> {
    let refusal = match version {
        Some(version) if *version == VERSION => return Ok(()),
        Some(version) => Error::new(Kind::Version, format!("protocol version {} is not supported", shortened(version))),
        None => invalid("\"version\" is missing"),
    };
    Err(refusal.advise(format!("send \"version\":{VERSION}")))
}

impl Verb {
    fn check(&self) -> Result<(), Error> {
        let whole = |name: &ImageName| name.paths().try_for_each(absolute);
        match self {
            Verb::LongRunning(LongRunning::Snapshot(snapshot)) => {
                snapshot.map.as_deref().map_or(Ok(()), absolute)?;
                whole(&snapshot.to)
            }
            Verb::LongRunning(LongRunning::Track(track)) => absolute(&track.map),
            Verb::LongRunning(LongRunning::Clone(clone)) => whole(&clone.to),
            Verb::LongRunning(LongRunning::Revert(revert)) => whole(&revert.leaf),
            Verb::LongRunning(LongRunning::Merge(merge)) => {
                merge.expect.iter().flatten().try_for_each(whole)?;
                merge.check()
            }
            Verb::LongRunning(LongRunning::Upgrade(upgrade)) => upgrade.program.as_deref().map_or(Ok(()), absolute),
            Verb::Immediate(Immediate::Limit(limit)) => limit.limits.map_or(Ok(()), |limits| limits.check()),
            Verb::Immediate(Immediate::Share(share)) => share.weight.map_or(Ok(()), share::check_weight),
            _ => Ok(()),
        }
    }
}

impl Merge {
    fn check(&self) -> Result<(), Error> {
        if self.from >= self.into {
            let what = format!("layer {} is not above layer {}", self.from, self.into);
            return Err(
                invalid(what).advise("layers are numbered from the leaf, 0, downwards: from 0 into 1 merges the leaf")
            );
        }
        if let Some(chain) = self.expect.as_ref().filter(|chain| chain.len() <= self.into) {
            return Err(invalid(format!("the expected chain has {} layers and no layer {}", chain.len(), self.into)));
        }
        match self.rate {
            Some(0) => {
                Err(invalid("a merge at rate 0 would never end").advise("use merge-pause to stop a merge for a while"))
            }
            _ => Ok(()),
        }
    }
}

fn absolute(path: &Path) -> Result<(), Error> {
    match path.is_absolute() {
        true => Ok(()),
        false => Err(invalid(format!("'{}' must be an absolute path", path.display()))),
    }
}

fn fields<T: DeserializeOwned>(value: Value) -> Result<T, Error> {
    serde_json::from_value(value).map_err(|error| invalid(error.to_string()))
}

fn invalid(what: impl Into<String>) -> Error {
    Error::new(Kind::Invalid, what)
}

/// The beginning of a value, for a message.
fn shortened(value: &Value) -> String {
    let text = value.to_string();
    let end = text.char_indices().nth(40).map_or(text.len(), |(at, _)| at);
    text.get(..end).unwrap_or_default().to_owned()
}

#[cfg(test)]
mod test {
    use super::*;

    /// The objects of a kind in the documentation that are not shortened, each in one line.
    fn documented(mark: char) -> Vec<String> {
        let text = include_str!("../../docs/control.md");
        let object = |text: &str| {
            let end = text.find("\n    →").into_iter().chain(text.find("\n    ←")).chain(text.find("\n\n")).min();
            let object = text.get(..end.unwrap_or(text.len())).unwrap_or_default();
            object.split("     +").next().unwrap_or_default().replace('\n', " ")
        };
        let begin = format!("\n    {mark} ");
        text.split(&begin).skip(1).map(object).filter(|object| !object.contains('…')).collect()
    }

    #[test]
    fn the_documentation_is_understood() {
        let requests = documented('→').into_iter().map(|line| Request::parse(line.as_bytes()));
        let requests: Vec<_> = requests.map(|(id, request)| (id, request.unwrap())).collect();
        let answers = documented('←');
        assert!(requests.len() > 12 && answers.len() > 12, "{} and {}", requests.len(), answers.len());
        for line in answers {
            let id = Id(serde_json::from_str::<Value>(&line).unwrap()["id"].take());
            let Some((_, request)) = requests.iter().find(|(asked, _)| *asked == id) else { panic!("{line}") };
            request.verb.understands(line.as_bytes()).unwrap_or_else(|error| panic!("{line}: {error}"));
        }
    }

    #[test]
    fn a_request_is_read_as_it_was_written() {
        for line in documented('→') {
            let (_, request) = Request::parse(line.as_bytes());
            let request = request.unwrap();
            let (id, again) = Request::parse(request.line().unwrap().as_bytes());
            assert_eq!((id, again), (Id(1.into()), Ok(request)));
        }
    }

    fn refused(line: &str) -> Error {
        Request::parse(line.as_bytes()).1.unwrap_err()
    }

    #[test]
    fn a_request_is_its_verb_and_its_fields() {
        let (id, verb) =
            Request::parse(br#"{"version":1,"id":7,"verb":"merge","from":0,"into":2,"rate":1000,"follow":true}"#);
        assert_eq!(id, Id(7.into()));
        let merge = Merge { from: 0, into: 2, rate: Some(1000), follow: true, delete: false, expect: None };
        assert_eq!(verb.unwrap(), Request::of(merge));
        let (_, verb) = Request::parse(br#"{"version":1,"verb":"snapshot","to":"vhd:/a/b.vhd"}"#);
        let to = "vhd:/a/b.vhd".parse().unwrap();
        assert_eq!(verb.unwrap(), Request::of(Snapshot { to, method: Method::Auto, map: None, new: None }));
    }

    #[test]
    fn a_line_of_each_verb_is_the_same_for_all_programs() {
        let words = "version layers stats snapshot clone merge merge-status merge-pause merge-resume merge-cancel \
            revert resize track untrack space upgrade limit share pause resume polling shape threads watch trace";
        assert_eq!(VERBS.join(" "), words);
        let fields = |word| match word {
            "snapshot" => r#","to":"vhd:/a","method":"chain""#,
            "clone" => r#","of":1,"to":"vhd:/a""#,
            "merge" => r#","from":0,"into":1,"rate":9,"follow":true,"delete":false,"expect":["vhd:/b","raw:/a"]"#,
            "revert" => r#","to":1,"leaf":"vhd:/a""#,
            "resize" => r#","size":4096,"recorded":true"#,
            "track" => r#","map":"/m""#,
            "untrack" => r#","removed":true"#,
            "upgrade" => r#","program":"/p","successor":true,"pause_max":50000"#,
            "limit" => r#","limits":{"iops":5000},"recorded":true"#,
            "share" => r#","weight":200,"recorded":true,"alone":true"#,
            "polling" => r#","mode":"on","max_us":50"#,
            "shape" => r#","split":"4096","merge":"auto","recorded":true"#,
            "threads" => r#","most":2"#,
            "trace" => r#","seconds":10"#,
            _ => "",
        };
        for &word in VERBS {
            let line = format!("{{\"version\":1,\"id\":1,\"verb\":\"{word}\"{}}}\n", fields(word));
            let request = Request::parse(line.as_bytes()).1.unwrap();
            assert_eq!((request.verb.word(), request.line().unwrap()), (word, line));
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
            let (id, verb) = Request::parse(line.as_bytes());
            assert_eq!((id, verb.unwrap_err().kind), (Id::default(), Kind::Malformed), "{line:.40}");
        }
        let long = format!(r#"{{"id":"{}"}}"#, "x".repeat(ID_MAX + 1));
        assert_eq!(refused(&long).kind, Kind::Malformed);
    }

    #[test]
    fn relative_paths_are_refused() {
        let error = refused(r#"{"version":1,"verb":"snapshot","to":"vhd:b.vhd"}"#);
        assert!(error.message.contains("an absolute path"), "{error:?}");
        assert!(refused(r#"{"version":1,"verb":"clone","of":1,"to":"b.vhd"}"#).message.contains("format"));
    }

    #[test]
    fn files_are_listed_with_their_use_only() {
        let line = |file: &str| format!(r#"{{"version":1,"verb":"stats","files":[{file}]}}"#);
        let (_, asked) = Request::parse(line(r#"{"path":"/a","write":true}"#).as_bytes());
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
        let (_, verb) = Request::parse(merge(r#"["vhd:/b","raw:/a"]"#).as_bytes());
        let expect = Some(vec!["vhd:/b".parse().unwrap(), "raw:/a".parse().unwrap()]);
        assert_eq!(verb, Ok(Request::of(Merge { from: 0, into: 1, expect, ..Merge::default() })));
        assert!(refused(&merge(r#"["vhd:/b"]"#)).message.contains("no layer 1"));
        assert!(refused(&merge(r#"["vhd:b","raw:/a"]"#)).message.contains("an absolute path"));
        assert!(refused(&merge("7")).message.contains("sequence"));
    }
}
