//! `disk`: sends a request to a served disk through its control socket and shows the reply.
//!
//! It opens no image. Paths are made absolute before they are sent, because the disk's process has a different working
//! directory.

mod arguments;
mod human;

use std::path::Path;
use std::time::Duration;

use control::answer::{self, Layer};
use control::ask;
use control::size::readable;
use control::{Ask, Client, ClientError, Error, ImageName, Reply, Request, printable};
use serde::de::{DeserializeOwned, IgnoredAny};

use crate::failure::Failure;
use crate::output::print_local as print;
use crate::wait::Progress;

pub use arguments::Disk;
use arguments::DiskRequest;
pub use human::away_in_words;

/// Runs the command. With `json`, the disk's replies are printed unchanged, one per line.
pub fn run(disk: &Disk, json: bool) -> Result<(), Failure> {
    disk.verb.execute(&Target { socket: &disk.control, json })
}

/// A disk, by its control socket.
struct Target<'a> {
    socket: &'a Path,
    json: bool,
}

/// Sends a verb and prints the reply.
fn execute<V: DiskRequest>(disk: &Target<'_>, arguments: &V::Arguments) -> Result<(), Failure> {
    let mut client = send(disk.socket, V::of(arguments)?)?;
    let mut progress = None;
    loop {
        let text = client.line().map_err(|why| unanswered(disk.socket, why))?;
        if disk.json {
            print(&text)?;
            match parse::<IgnoredAny>(disk.socket, text)? {
                Reply::Event(_) => continue,
                Reply::Ok(_) => return Ok(()),
                Reply::Error(error) => return Err(Failure::Printed(error.kind)),
            }
        }
        let reply = parse::<V::Answer>(disk.socket, text)?;
        if let Reply::Event(merge) = &reply {
            show_progress(&mut progress, merge);
            continue;
        }
        if let Some(bar) = progress.take() {
            bar.finish();
        }
        return match reply {
            Reply::Error(error) => Err(error.into()),
            Reply::Ok(answer) => {
                let lines: String = V::shown(&answer).into_iter().map(|line| line + "\n").collect();
                Ok(print(&lines)?)
            }
            Reply::Event(_) => unreachable!("it was shown"),
        };
    }
}

/// Shows the progress of a merge, the only verb with events here.
fn show_progress(progress: &mut Option<Progress>, merge: &answer::Merge) {
    let Some(control::Progress { done, len, .. }) = merge.progress() else { return };
    let bar = progress.get_or_insert_with(Progress::new);
    // In steps of one percent, so that a log gets at most 100 lines.
    let hundredth = u128::from(done) * 100 / u128::from(len.max(1));
    let hundredth = u32::try_from(hundredth).unwrap_or(100).min(100);
    bar.show_share(format!("merging: {hundredth} % of {}", readable(len)), f64::from(hundredth) / 100.0);
}

/// Returns the layers of the disk with this control socket, from the leaf down. `patience` limits the wait.
pub fn layers(socket: &Path, patience: Duration) -> Result<Vec<ImageName>, Error> {
    let mut client = connect(socket)?;
    client.set_patience(patience).map_err(|error| not_sent(socket, error))?;
    let layers = client.ask(ask::Layers {}).map_err(|why| unanswered(socket, why))?.layers;
    let names: Option<Vec<ImageName>> = layers.iter().map(Layer::name).collect();
    names.filter(|names| !names.is_empty()).ok_or_else(|| misunderstood(socket, "a layer has no file"))
}

/// Sends a verb to a disk and waits for the reply.
pub fn ask_once<V: Ask>(socket: &Path, verb: V) -> Result<V::Answer, Error> {
    connect(socket)?.ask(verb).map_err(|why| unanswered(socket, why))
}

/// Sends a verb to a disk and waits for the reply for at most `patience`; `None` on timeout. A stopped process may not
/// even accept the connection, so a thread waits for it, which may outlive this call.
pub fn ask_within<V>(socket: &Path, verb: V, patience: Duration) -> Result<Option<V::Answer>, Error>
where
    V: Ask + Send + 'static,
    V::Answer: Send + 'static,
{
    let (sender, answers) = std::sync::mpsc::channel();
    let target = socket.to_owned();
    // After a timeout the reply is dropped.
    std::thread::spawn(move || sender.send(ask_once(&target, verb)).unwrap_or_default());
    match answers.recv_timeout(patience) {
        Ok(answer) => answer.map(Some),
        Err(_) => Ok(None),
    }
}

fn whole(name: &ImageName) -> Result<ImageName, Error> {
    let whole = name.map_paths(|path| std::path::absolute(path));
    whole.map_err(|error| Error::cannot(format!("resolve the path of {name}"), error))
}

fn whole_path(path: &Path) -> Result<std::path::PathBuf, Error> {
    std::path::absolute(path).map_err(|error| Error::cannot(format!("resolve the path of {}", path.display()), error))
}

fn connect(socket: &Path) -> Result<Client, Error> {
    Client::connect(socket).map_err(|error| not_sent(socket, error))
}

fn send(socket: &Path, verb: impl Ask) -> Result<Client, Error> {
    let mut client = connect(socket)?;
    client.send(&Request::of(verb)).map_err(|error| not_sent(socket, error))?;
    Ok(client)
}

fn not_sent(socket: &Path, error: std::io::Error) -> Error {
    let advice = match error.kind() {
        std::io::ErrorKind::NotFound if !socket.to_string_lossy().contains('/') => {
            "give the socket created by `serve --control SOCKET`; disks of the daemon have other commands: \
             tapline vdi, tapline vbd"
        }
        std::io::ErrorKind::NotFound => "give the socket created by `serve --control SOCKET`",
        std::io::ErrorKind::ConnectionRefused => {
            "nothing listens there: the process that made the socket has ended, and the disk is no longer served there"
        }
        std::io::ErrorKind::PermissionDenied => "only the user that serves the disk may control it",
        std::io::ErrorKind::InvalidData => "give a path in UTF-8: it is sent as JSON",
        _ => "check that the disk is still served",
    };
    Error::cannot(format!("send a request to the disk at {}", socket.display()), error).advise(advice)
}

fn unanswered(socket: &Path, why: ClientError) -> Error {
    match why {
        ClientError::Refused(error) => error,
        ClientError::Senseless { text, .. } => misunderstood(socket, &text),
        ClientError::Connection(_) => Error::cannot(format!("read from the disk at {}", socket.display()), why),
        ClientError::Ended => Error::cannot(format!("read from the disk at {}", socket.display()), why)
            .advise("see its log for the reason"),
    }
}

fn parse<A: DeserializeOwned>(socket: &Path, text: String) -> Result<Reply<A, answer::Merge>, Error> {
    Reply::parse(text.as_bytes()).map_err(|_| misunderstood(socket, &text))
}

fn misunderstood(socket: &Path, text: &str) -> Error {
    let said: String = printable(text.trim_end()).chars().take(200).collect();
    Error::cannot(format!("parse the response from {}", socket.display()), said)
        .advise("check that this is a disk's control socket")
}
