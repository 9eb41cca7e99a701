//! Sends requests to running disks by their control protocol (docs/control.md, crate `control`).
//!
//! Each verb has a connection of its own, which ends with the response: an idle disk has none and is never woken. This
//! module knows lines and descriptors, not the meaning of verbs.

use std::fs::File;
use std::io::IoSlice;
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::Duration;

use api::{Code, Problem};
use control::answer::{Change, Condition, Merge};
use control::{Ask, FileAsked, Kind, Reply, Request, ask};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use serde::de::DeserializeOwned;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader, Interest};
use tokio::net::UnixStream;

/// Maximum number of files with a line (docs/control.md).
const FILES_MAX: usize = 128;

/// Maximum line length in bytes: sixty layers with the longest paths need a quarter of it.
const LINE_MAX: usize = 1 << 20;

/// A file passed with a verb.
#[derive(Debug)]
pub struct PassedFile {
    /// The path used in the verb.
    pub path: PathBuf,
    /// Whether it is open for writing.
    pub write: bool,
    /// The open file, whose descriptor is passed.
    pub file: File,
}

/// Sends a verb to the disk at a control socket and waits for the response, but not longer than `patience`.
pub async fn ask<V: Ask>(
    socket: &Path,
    verb: V,
    files: Vec<PassedFile>,
    patience: Duration,
) -> Result<V::Answer, Refused> {
    let request = Request::of(verb);
    let word = request.verb.word();
    let answered = async { PendingVerb::<V>::with_files(socket, request, files).await?.answer(|_| ()).await };
    tokio::time::timeout(patience, answered).await.unwrap_or_else(|_| {
        let what = format!("the disk at {} has not answered '{word}' in {} s", socket.display(), patience.as_secs());
        Err(Problem::new(Code::Timeout, what).advise("check its log and its storage").into())
    })
}

/// Why a verb failed.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum Refused {
    /// The disk has refused.
    #[error("{0}")]
    Disk(control::Error),
    /// The disk has not answered.
    #[error("{0}")]
    Unanswered(Problem),
}

impl From<control::Error> for Refused {
    fn from(error: control::Error) -> Refused {
        Refused::Disk(error)
    }
}

impl From<Problem> for Refused {
    fn from(problem: Problem) -> Refused {
        Refused::Unanswered(problem)
    }
}

impl From<Refused> for Problem {
    fn from(refused: Refused) -> Problem {
        match refused {
            Refused::Disk(error) => problem(error),
            Refused::Unanswered(problem) => problem,
        }
    }
}

/// A disk's error as a problem of the API.
pub fn problem(error: control::Error) -> Problem {
    let code = match error.kind {
        Kind::Busy | Kind::Replaced => Code::Busy,
        Kind::State | Kind::Connected => Code::State,
        Kind::Exists => Code::Exists,
        Kind::InUse => Code::InUse,
        Kind::NoSpace => Code::NoSpace,
        Kind::Unsupported => Code::Unsupported,
        Kind::Cancelled => Code::Cancelled,
        Kind::Version | Kind::UnknownVerb => {
            let what = format!("the disk's process runs another version of Tapline: {}", error.message);
            return Problem::new(Code::Unsupported, what).advise("upgrade the disk: tapline vbd upgrade VBD");
        }
        // The daemon has sent a request that is invalid for the disk.
        Kind::Malformed | Kind::Invalid => Code::Internal,
        Kind::Failed | Kind::NotAnImage => Code::Failed,
    };
    Problem { advice: error.advice, ..Problem::new(code, error.message) }
}

/// A verb that was sent to a disk and has not been answered yet.
#[derive(Debug)]
pub struct PendingVerb<V>(Connection, PhantomData<fn() -> V>);

impl<V: Ask> PendingVerb<V> {
    /// Sends a verb with files.
    pub async fn with_files(
        socket: &Path,
        mut request: Request,
        files: Vec<PassedFile>,
    ) -> Result<PendingVerb<V>, Problem> {
        let listed = |file: &PassedFile| FileAsked { path: file.path.clone(), write: file.write };
        request.files = files.iter().map(listed).collect();
        let descriptors = files.into_iter().map(|file| file.file.into()).collect();
        PendingVerb::with_descriptors(socket, request, descriptors).await
    }

    /// Sends a verb with other descriptors. They are closed here once sent: our copies would keep files locked and
    /// sockets open.
    pub async fn with_descriptors(
        socket: &Path,
        request: Request,
        descriptors: Vec<OwnedFd>,
    ) -> Result<PendingVerb<V>, Problem> {
        Connection::begin(socket, request, descriptors).await.map(|connection| PendingVerb(connection, PhantomData))
    }

    /// Waits for the response. Progress of a merge is passed to `on_progress`.
    pub async fn answer(mut self, mut on_progress: impl FnMut(Merge) + Send) -> Result<V::Answer, Refused> {
        loop {
            match self.0.reply().await? {
                Some(Reply::Ok(answer)) => return Ok(answer),
                Some(Reply::Error(error)) => return Err(Refused::Disk(error)),
                Some(Reply::Event(merge)) => on_progress(merge),
                None => return Err(self.0.ended().into()),
            }
        }
    }
}

/// A subscription to a disk's events.
#[derive(Debug)]
pub struct Watch(Connection);

/// Subscribes to the events of the disk at a control socket for as long as the connection is kept. Returns the
/// current state and the connection, which stays idle until an event occurs.
pub async fn watch(socket: &Path) -> Result<(Condition, Watch), Problem> {
    let mut connection = Connection::begin(socket, Request::of(ask::Watch {}), Vec::new()).await?;
    loop {
        match connection.reply::<Condition, Change>().await? {
            Some(Reply::Ok(condition)) => return Ok((condition, Watch(connection))),
            Some(Reply::Error(error)) => return Err(problem(error)),
            Some(Reply::Event(_)) => {}
            None => return Err(connection.ended()),
        }
    }
}

impl Watch {
    /// The next event; `None` when the disk has exited.
    pub async fn event(&mut self) -> Result<Option<Change>, Problem> {
        while let Some(reply) = self.0.reply::<Condition, Change>().await? {
            if let Reply::Event(change) = reply {
                return Ok(Some(change));
            }
        }
        Ok(None)
    }
}

/// A connection to a disk.
#[derive(Debug)]
struct Connection {
    socket: PathBuf,
    stream: BufReader<UnixStream>,
    /// The received part of the next line.
    line: Vec<u8>,
}

impl Connection {
    async fn begin(socket: &Path, request: Request, descriptors: Vec<OwnedFd>) -> Result<Connection, Problem> {
        let failed = |why| cannot_ask(socket, why);
        let line = request.line().map_err(|why| failed(why.into()))?;
        let mut stream = UnixStream::connect(socket).await.map_err(failed)?;
        send(&mut stream, &line, &descriptors).await.map_err(failed)?;
        Ok(Connection { socket: socket.to_owned(), stream: BufReader::new(stream), line: Vec::new() })
    }

    /// The next line from the disk; `None` when it has closed the connection.
    async fn reply<A: DeserializeOwned, E: DeserializeOwned>(&mut self) -> Result<Option<Reply<A, E>>, Problem> {
        // A compromised process may send anything, for any length of time.
        let room = LINE_MAX.saturating_sub(self.line.len());
        let mut bounded = (&mut self.stream).take(room as u64);
        let read = bounded.read_until(b'\n', &mut self.line).await;
        read.map_err(|why| self.failed(why))?;
        let line = std::mem::take(&mut self.line);
        match line.last() {
            None => Ok(None),
            Some(b'\n') => Reply::parse(&line).map(Some).map_err(|why| self.senseless(why)),
            Some(_) if line.len() >= LINE_MAX => Err(self.senseless(format!("it is longer than {LINE_MAX} bytes"))),
            // A truncated line is discarded.
            Some(_) => Ok(None),
        }
    }

    /// The disk sent an invalid line: an internal error, because the process is running.
    fn senseless(&self, why: impl std::fmt::Display) -> Problem {
        Problem {
            code: Code::Internal,
            ..Problem::failed(format_args!("parse a line of {}", self.socket.display()), why)
        }
    }

    fn ended(&self) -> Problem {
        self.failed(std::io::Error::other("it exited without answering"))
    }

    fn failed(&self, why: std::io::Error) -> Problem {
        cannot_ask(&self.socket, why)
    }
}

fn cannot_ask(socket: &Path, why: std::io::Error) -> Problem {
    Problem::failed(format_args!("send a request to the disk at {}", socket.display()), why)
}

/// Sends a line, with its descriptors attached to the first byte.
async fn send(stream: &mut UnixStream, line: &str, descriptors: &[OwnedFd]) -> std::io::Result<()> {
    let descriptors: Vec<BorrowedFd<'_>> = descriptors.iter().map(OwnedFd::as_fd).collect();
    let sent = stream.async_io(Interest::WRITABLE, || {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FILES_MAX))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        if !descriptors.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(&descriptors)) {
            return Err(std::io::Error::other(format!("a verb can pass at most {FILES_MAX} files")));
        }
        Ok(sendmsg(&*stream, &[IoSlice::new(line.as_bytes())], &mut ancillary, SendFlags::NOSIGNAL)?)
    });
    let sent = sent.await?;
    stream.write_all(line.as_bytes().get(sent..).unwrap_or_default()).await
}

#[cfg(test)]
mod test {
    use std::io::IoSliceMut;
    use std::os::unix::net::UnixListener;

    use control::answer::MergeState;
    use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
    use serde_json::{Value, json};

    use super::*;

    /// A disk that answers one request; returns that request and the number of its files.
    fn disk(answers: &'static str) -> (tempfile::TempDir, PathBuf, std::thread::JoinHandle<(Value, usize)>) {
        let room = tempfile::tempdir().unwrap();
        let path = room.path().join("control.sock");
        let listener = UnixListener::bind(&path).unwrap();
        let thread = std::thread::spawn(move || {
            let (stream, _) = listener.accept().unwrap();
            let mut bytes = [0; 4096];
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
            let mut ancillary = RecvAncillaryBuffer::new(&mut space);
            let got = recvmsg(&stream, &mut [IoSliceMut::new(&mut bytes)], &mut ancillary, RecvFlags::empty()).unwrap();
            let count = |message| if let RecvAncillaryMessage::ScmRights(came) = message { came.count() } else { 0 };
            let files = ancillary.drain().map(count).sum();
            std::io::Write::write_all(&mut &stream, answers.as_bytes()).unwrap();
            (serde_json::from_slice(&bytes[..got.bytes]).unwrap(), files)
        });
        (room, path, thread)
    }

    const PATIENCE: Duration = Duration::from_secs(20);

    #[tokio::test]
    async fn progress_precedes_the_answer_and_files_go_with_the_request() {
        let (_room, path, thread) =
            disk("{\"id\":1,\"event\":{\"state\":\"running\",\"done\":5}}\n{\"id\":1,\"ok\":{\"state\":\"done\"}}\n");
        let file = PassedFile { path: "/b".into(), write: true, file: tempfile::tempfile().unwrap() };
        let mut events = Vec::new();
        let merge = Request::of(ask::Merge { into: 1, ..ask::Merge::default() });
        let asked = PendingVerb::<ask::Merge>::with_files(&path, merge, vec![file]).await.unwrap();
        let answer = asked.answer(|event| events.push(event.done)).await.unwrap();
        assert_eq!((answer.state, events), (MergeState::Done, vec![Some(5)]));
        let (asked, files) = thread.join().unwrap();
        let expected = json!({
            "version": 1, "id": 1, "verb": "merge", "from": 0, "into": 1, "follow": false, "delete": false,
            "files": [{ "path": "/b", "write": true }]
        });
        assert_eq!((asked, files), (expected, 1));
    }

    #[tokio::test]
    async fn a_watcher_gets_the_state_and_then_events() {
        let (_room, path, _thread) =
            disk("{\"id\":1,\"ok\":{\"full\":true}}\n{\"id\":1,\"event\":{\"state\":\"resumed\",\"waiting\":0}}\n");
        let (now, mut watch) = watch(&path).await.unwrap();
        assert_eq!(now, Condition { full: true, ..Condition::default() });
        assert_eq!(watch.event().await.unwrap(), Some(Change::Resumed { waiting: 0 }));
        assert_eq!(watch.event().await.unwrap(), None);
    }

    #[tokio::test]
    async fn an_endless_line_from_a_disk_is_rejected() {
        let room = tempfile::tempdir().unwrap();
        let path = room.path().join("control.sock");
        let listener = UnixListener::bind(&path).unwrap();
        let thread = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut said = 0;
            // Until the reader has closed the connection.
            while std::io::Write::write_all(&mut stream, &[b' '; 4096]).is_ok() {
                said += 4096;
            }
            said
        });
        let endless = Problem::from(super::ask(&path, ask::Version {}, Vec::new(), PATIENCE).await.unwrap_err());
        assert!(endless.detail.contains("longer than"), "{endless}");
        // Unread data stays in the socket's buffer.
        assert!(thread.join().unwrap() < 16 * LINE_MAX);
    }

    #[tokio::test]
    async fn a_refusal_is_a_problem_with_its_advice() {
        let (_room, path, _thread) =
            disk("{\"id\":1,\"error\":{\"kind\":\"in-use\",\"message\":\"it is\",\"advice\":\"end it\"}}\n");
        let refused =
            super::ask(&path, ask::Resize { size: 1, recorded: true }, Vec::new(), PATIENCE).await.unwrap_err();
        assert_eq!(Problem::from(refused), Problem::new(Code::InUse, "it is").advise("end it"));
    }

    #[tokio::test]
    async fn a_descriptor_without_listed_file_is_sent_and_closed() {
        let (_room, path, thread) = disk("{\"id\":1,\"error\":{\"kind\":\"unknown-verb\",\"message\":\"no\"}}\n");
        let (ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
        let verb = Request::of(ask::Upgrade { successor: true, ..ask::Upgrade::default() });
        let asked = PendingVerb::<ask::Upgrade>::with_descriptors(&path, verb, vec![theirs.into()]).await.unwrap();
        let refused = asked.answer(|_| ()).await.unwrap_err();
        assert_eq!(refused, Refused::Disk(control::Error::new(Kind::UnknownVerb, "no")));
        let problem = Problem::from(refused);
        assert_eq!(problem.code, Code::Unsupported);
        assert!(problem.detail.contains("another version") && problem.advice.unwrap().contains("vbd upgrade"));
        let expected = json!({ "version": 1, "id": 1, "verb": "upgrade", "successor": true });
        assert_eq!(thread.join().unwrap(), (expected, 1));
        // The disk has closed its copy, and there is no other.
        assert_eq!(std::io::Read::read(&mut &ours, &mut [0]).unwrap(), 0);
    }

    #[tokio::test]
    async fn an_exited_or_silent_disk_blocks_no_caller() {
        let (_room, path, _thread) = disk("");
        let ended = Problem::from(super::ask(&path, ask::Version {}, Vec::new(), PATIENCE).await.unwrap_err());
        assert!(ended.detail.contains("exited without answering"), "{ended}");
        let room = tempfile::tempdir().unwrap();
        let silent = room.path().join("silent");
        let _listener = UnixListener::bind(&silent).unwrap();
        let patience = Duration::from_millis(10);
        let late = Problem::from(super::ask(&silent, ask::Version {}, Vec::new(), patience).await.unwrap_err());
        assert_eq!(late.code, Code::Timeout);
    }
}
