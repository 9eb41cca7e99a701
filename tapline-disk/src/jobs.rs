//! Jobs on images that are not being served, one module each with a function `run` that prints the result and returns
//! an exit code.

pub mod bench;
pub mod calibrate;
pub mod changes;
pub mod check;
pub mod compact;
pub mod compare;
pub mod convert;
pub mod copy_up;
pub mod create;
pub mod fetch;
pub mod info;
pub mod map;
pub mod measure;
pub mod merge;
pub mod planned;
pub mod rebase;
pub mod replay;
pub mod resize;
pub mod runner;
pub mod seal;
pub mod snapshot;
pub mod stream;

use arguments::ImageCommand;
use control::ImageName;

/// Returns the images of a command that must be files.
pub fn needing_files(command: &ImageCommand) -> Vec<&ImageName> {
    use ImageCommand::{
        Bench, Changes, Check, Clone, Compact, Compare, Convert, Create, Fetch, Flatten, Info, Map, Measure, Merge,
        Rebase, Replay, Resize, Seal, Snapshot,
    };
    match command {
        Info(_) | Map(_) | Changes(_) | Seal(_) | Fetch(_) | Convert(_) | Measure(_) | Compare(_) => Vec::new(),
        // An export is created by its server; as a parent it may stand alone.
        Create(create) => vec![&create.image],
        Check(check) => vec![&check.image],
        Snapshot(snapshot) | Clone(snapshot) => vec![&snapshot.image, &snapshot.to],
        // Those that are written to, or merged into others.
        Merge(merge) => std::iter::once(&merge.image).chain(merge.parents.names.iter().take(merge.into)).collect(),
        Rebase(rebase) => std::iter::once(&rebase.image).chain(&rebase.onto).collect(),
        Flatten(flatten) => vec![&flatten.image],
        Resize(resize) => vec![&resize.image],
        Compact(compact) => vec![&compact.image],
        Bench(bench) => vec![&bench.image],
        Replay(replay) => vec![&replay.image],
    }
}
