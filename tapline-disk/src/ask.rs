//! `disk`: sends a request to a served disk through its control socket and shows the response.
//!
//! It opens no image. Paths are made absolute before they are sent, because the disk's process has a different working
//! directory.

mod human;

use std::path::Path;
use std::time::Duration;

use control::answer::{self, Layer};
use control::ask::{self, Method};
use control::{Ask, Client, ClientError, ImageName, Reply, Request};
use serde::de::{DeserializeOwned, IgnoredAny};

use crate::cli::{Disk, DiskVerb, SnapshotMethod};
use crate::failure::{Exit, Failure};
use crate::output;
use crate::progress::Progress;

/// Runs the command.
pub fn run(disk: &Disk) -> Result<Exit, Failure> {
    match &disk.verb {
        DiskVerb::Snapshot { to, method } => {
            let method = match method {
                SnapshotMethod::Auto => Method::Auto,
                SnapshotMethod::Reflink => Method::Reflink,
                SnapshotMethod::Chain => Method::Chain,
            };
            tell(disk, ask::Snapshot { to: whole(to)?, method }, human::snapshot)
        }
        DiskVerb::Merge { from, into, rate, detach, delete, expect } => {
            let (from, into, rate) = (*from, *into, rate.map(|rate| rate.0));
            let expect = expect.iter().map(whole).collect::<Result<Vec<_>, _>>()?;
            let expect = (!expect.is_empty()).then_some(expect);
            let merge = ask::Merge { from, into, rate, follow: !detach, delete: *delete, expect };
            tell(disk, merge, human::merge)
        }
        DiskVerb::MergeStatus => tell(disk, ask::MergeStatus {}, human::merge),
        DiskVerb::MergePause => tell(disk, ask::MergePause {}, human::merge),
        DiskVerb::MergeResume => tell(disk, ask::MergeResume {}, human::merge),
        DiskVerb::MergeCancel => tell(disk, ask::MergeCancel {}, human::merge),
        DiskVerb::Revert { to, leaf } => tell(disk, ask::Revert { to: *to, leaf: whole(leaf)? }, human::revert),
        DiskVerb::Clone { of, to } => tell(disk, ask::Clone { of: *of, to: whole(to)? }, human::clone),
        DiskVerb::Resize { size } => tell(disk, ask::Resize { size: size.0 }, human::resize),
        DiskVerb::Upgrade { program, pause_max } => {
            let program = program.as_deref().map_or_else(std::env::current_exe, std::path::absolute);
            let program = program.map_err(|error| Failure::new("find the program to start", error))?;
            let pause_max = Some(pause_max.saturating_mul(1000));
            tell(disk, ask::Upgrade { program: Some(program), successor: false, pause_max }, human::upgrade)
        }
        DiskVerb::Space => tell(disk, ask::Space {}, human::space),
        DiskVerb::Pause => tell(disk, ask::Pause {}, human::paused),
        DiskVerb::Resume => tell(disk, ask::Resume {}, human::paused),
        DiskVerb::Layers => tell(disk, ask::Layers {}, human::layers),
        DiskVerb::Stats => tell(disk, ask::Stats {}, human::stats),
        DiskVerb::Version => tell(disk, ask::Version {}, human::version),
    }
}

/// Sends a verb, and shows what is said about it.
fn tell<V: Ask>(disk: &Disk, verb: V, shown: fn(&V::Answer) -> Vec<String>) -> Result<Exit, Failure> {
    let mut client = send(&disk.socket, verb)?;
    let mut progress = None;
    loop {
        let text = client.line().map_err(|why| unanswered(&disk.socket, why))?;
        if disk.json {
            output::print(&text)?;
            match parse::<IgnoredAny>(&disk.socket, text)? {
                Reply::Event(_) => continue,
                Reply::Ok(_) => return Ok(Exit::Done),
                Reply::Error(error) => return Ok(Failure::from(error).exit()),
            }
        }
        let reply = parse::<V::Answer>(&disk.socket, text)?;
        if let Reply::Event(merge) = &reply {
            show_progress(&mut progress, merge);
            continue;
        }
        if let Some((bar, _)) = progress.take() {
            bar.finish();
        }
        return match reply {
            Reply::Error(error) => Err(error.into()),
            Reply::Ok(answer) => {
                let lines: String = shown(&answer).into_iter().map(|line| line + "\n").collect();
                output::print(&lines).map(|()| Exit::Done)
            }
            Reply::Event(_) => unreachable!("it was shown"),
        };
    }
}

/// Shows how far a merge is, which is all that has events here.
fn show_progress(progress: &mut Option<(Progress, u64)>, merge: &answer::Merge) {
    let Some(control::Progress { done, len, .. }) = merge.progress() else { return };
    let (bar, before) = progress.get_or_insert_with(|| (Progress::new("merging", len), 0));
    bar.advance(done.saturating_sub(*before));
    *before = done.max(*before);
}

/// The layers of the disk with this control socket, from the leaf down. `patience` limits the wait for the response.
pub fn layers(socket: &Path, patience: Duration) -> Result<Vec<ImageName>, Failure> {
    let mut client = connect(socket)?;
    client.set_patience(patience).map_err(|error| not_sent(socket, error))?;
    let layers = client.ask(ask::Layers {}).map_err(|why| unanswered(socket, why))?.layers;
    let names: Option<Vec<ImageName>> = layers.iter().map(Layer::name).collect();
    names.filter(|names| !names.is_empty()).ok_or_else(|| misunderstood(socket, "a layer has no file"))
}

fn whole(name: &ImageName) -> Result<ImageName, Failure> {
    let whole = name.map_paths(|path| std::path::absolute(path));
    whole.map_err(|error| Failure::new(format!("resolve the path of {name}"), error))
}

fn connect(socket: &Path) -> Result<Client, Failure> {
    Client::connect(socket).map_err(|error| not_sent(socket, error))
}

fn send(socket: &Path, verb: impl Ask) -> Result<Client, Failure> {
    let mut client = connect(socket)?;
    client.send(&Request::of(verb)).map_err(|error| not_sent(socket, error))?;
    Ok(client)
}

fn not_sent(socket: &Path, error: std::io::Error) -> Failure {
    let advice = match error.kind() {
        std::io::ErrorKind::NotFound => "give the socket created by `serve --control SOCKET`",
        std::io::ErrorKind::ConnectionRefused => "the disk is no longer served there",
        std::io::ErrorKind::PermissionDenied => "only the user that serves the disk may control it",
        std::io::ErrorKind::InvalidData => "give a path in UTF-8: it is sent as JSON",
        _ => "check that the disk is still served",
    };
    Failure::new(format!("send a request to the disk at {}", socket.display()), error).advise(advice)
}

fn unanswered(socket: &Path, why: ClientError) -> Failure {
    match why {
        ClientError::Refused(error) => error.into(),
        ClientError::Senseless { text, .. } => misunderstood(socket, &text),
        ClientError::Connection(_) => Failure::new(format!("read from the disk at {}", socket.display()), why),
        ClientError::Ended => Failure::new(format!("read from the disk at {}", socket.display()), why)
            .advise("see its log for the reason"),
    }
}

fn parse<A: DeserializeOwned>(socket: &Path, text: String) -> Result<Reply<A, answer::Merge>, Failure> {
    Reply::parse(text.as_bytes()).map_err(|_| misunderstood(socket, &text))
}

fn misunderstood(socket: &Path, text: &str) -> Failure {
    let said: String = output::printable(text.trim_end()).chars().take(200).collect();
    Failure::new(format!("parse the response from {}", socket.display()), said)
        .advise("check that this is a disk's control socket")
}
