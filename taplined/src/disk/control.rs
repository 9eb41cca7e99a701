//! The client of running disks' control protocol (docs/control.md).
//!
//! Each verb has a connection of its own, which ends with the response: an idle disk has none and is never woken. This
//! module knows lines and descriptors, not the meaning of verbs.

use std::fs::File;
use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::Duration;

use api::{Code, Problem};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader, Interest};
use tokio::net::UnixStream;

/// Maximum number of files with a line (docs/control.md).
const FILES_MAX: usize = 128;

/// Bytes of a line that a disk says, at most: sixty layers with the longest paths are a quarter of it.
const LINE_MAX: usize = 1 << 20;

/// A file that goes with a verb.
#[derive(Debug)]
pub struct Beside {
    /// The path used in the verb.
    pub path: PathBuf,
    /// Whether it is open for writing.
    pub write: bool,
    /// The file.
    pub file: File,
}

/// Sends a verb to the disk at a control socket and waits for the response, but not longer than `patience`. Progress
/// messages go to `told`.
pub async fn ask(
    socket: &Path,
    verb: Value,
    files: Vec<Beside>,
    patience: Duration,
    told: impl FnMut(&Value) + Send,
) -> Result<Value, Problem> {
    let name = verb.get("verb").and_then(Value::as_str).unwrap_or("nothing").to_owned();
    let answered = async { Asked::with_files(socket, verb, files).await?.answer(told).await };
    match tokio::time::timeout(patience, answered).await {
        Ok(answered) => answered.map_err(Problem::from),
        Err(_) => {
            let what =
                format!("the disk at {} has not answered '{name}' in {} s", socket.display(), patience.as_secs());
            Err(Problem::new(Code::Timeout, what).advise("check its log and its storage"))
        }
    }
}

/// Why a verb was not done.
#[derive(Clone, Debug, PartialEq)]
pub struct Refused {
    /// The disk's own error kind (docs/control.md); `None` if it has not answered.
    pub kind: Option<String>,
    /// The error as a problem of the API.
    pub problem: Problem,
}

impl From<Problem> for Refused {
    fn from(problem: Problem) -> Refused {
        Refused { kind: None, problem }
    }
}

impl From<Refused> for Problem {
    fn from(refused: Refused) -> Problem {
        refused.problem
    }
}

/// A verb that was sent to a disk and has not been answered yet.
#[derive(Debug)]
pub struct Asked(Watch);

impl Asked {
    /// Sends a verb with files.
    pub async fn with_files(socket: &Path, mut verb: Value, files: Vec<Beside>) -> Result<Asked, Problem> {
        if !files.is_empty() {
            let said = files.iter().map(|file| json!({ "path": file.path, "write": file.write }));
            verb["files"] = said.collect();
        }
        let descriptors = files.into_iter().map(|file| file.file.into()).collect();
        Asked::with_descriptors(socket, verb, descriptors).await
    }

    /// Sends a verb with other descriptors. They are closed here once they are sent: our copies of files would keep
    /// their locks, and those of sockets would keep them open.
    pub async fn with_descriptors(socket: &Path, verb: Value, descriptors: Vec<OwnedFd>) -> Result<Asked, Problem> {
        Watch::begin(socket, verb, descriptors).await.map(Asked)
    }

    /// Waits for the response. Progress messages before it go to `told`.
    pub async fn answer(mut self, mut told: impl FnMut(&Value) + Send) -> Result<Value, Refused> {
        while let Some(mut said) = self.0.line().await? {
            match (said.get("event"), said.get("error")) {
                (Some(event), _) => told(event),
                (None, Some(error)) => return Err(refused(error)),
                (None, None) => return Ok(said["ok"].take()),
            }
        }
        Err(self.0.failed(std::io::Error::other("it exited without answering")).into())
    }
}

/// Subscribes to the events of the disk at a control socket for as long as the connection is kept. Returns the current
/// state and the connection, which is silent while nothing happens.
pub async fn watch(socket: &Path) -> Result<(Value, Watch), Problem> {
    let mut talk = Watch::begin(socket, json!({ "verb": "watch" }), Vec::new()).await?;
    while let Some(mut said) = talk.line().await? {
        match said.get("error") {
            Some(error) => return Err(refused(error).into()),
            None if said.get("ok").is_some() => return Ok((said["ok"].take(), talk)),
            None => {}
        }
    }
    Err(talk.failed(std::io::Error::other("it exited without answering")))
}

/// A connection to a disk.
#[derive(Debug)]
pub struct Watch {
    socket: PathBuf,
    stream: BufReader<UnixStream>,
    /// The received part of the next line.
    line: Vec<u8>,
}

impl Watch {
    async fn begin(socket: &Path, verb: Value, descriptors: Vec<OwnedFd>) -> Result<Watch, Problem> {
        let failed = |why| cannot_ask(socket, why);
        let mut stream = UnixStream::connect(socket).await.map_err(failed)?;
        send(&mut stream, &request(verb), &descriptors).await.map_err(failed)?;
        Ok(Watch { socket: socket.to_owned(), stream: BufReader::new(stream), line: Vec::new() })
    }

    /// The next event; none when the disk has ended.
    pub async fn event(&mut self) -> Result<Option<Value>, Problem> {
        while let Some(mut said) = self.line().await? {
            if said.get("event").is_some() {
                return Ok(Some(said["event"].take()));
            }
        }
        Ok(None)
    }

    async fn line(&mut self) -> Result<Option<Value>, Problem> {
        // A compromised process may send anything, for any length of time.
        let room = LINE_MAX.saturating_sub(self.line.len());
        let mut bounded = (&mut self.stream).take(u64::try_from(room).unwrap_or(u64::MAX));
        let read = bounded.read_until(b'\n', &mut self.line).await;
        read.map_err(|why| self.failed(why))?;
        let line = std::mem::take(&mut self.line);
        match line.last() {
            None => Ok(None),
            Some(b'\n') => serde_json::from_slice(&line).map(Some).map_err(|why| self.failed(why.into())),
            Some(_) if line.len() >= LINE_MAX => {
                let why = format!("it sent a line longer than {LINE_MAX} bytes");
                Err(self.failed(std::io::Error::other(why)))
            }
            // It ended in the middle of a line, which is discarded.
            Some(_) => Ok(None),
        }
    }

    fn failed(&self, why: std::io::Error) -> Problem {
        cannot_ask(&self.socket, why)
    }
}

fn cannot_ask(socket: &Path, why: std::io::Error) -> Problem {
    Problem::failed(format_args!("send a request to the disk at {}", socket.display()), why)
}

fn request(mut verb: Value) -> String {
    verb["version"] = json!(1);
    verb["id"] = json!(1);
    format!("{verb}\n")
}

/// Sends a line, and its descriptors with the first byte of it.
async fn send(stream: &mut UnixStream, line: &str, descriptors: &[OwnedFd]) -> std::io::Result<()> {
    let descriptors: Vec<BorrowedFd<'_>> = descriptors.iter().map(OwnedFd::as_fd).collect();
    let sent = stream.async_io(Interest::WRITABLE, || {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FILES_MAX))];
        let mut beside = SendAncillaryBuffer::new(&mut space);
        if !descriptors.is_empty() && !beside.push(SendAncillaryMessage::ScmRights(&descriptors)) {
            return Err(std::io::Error::other(format!("a verb can pass at most {FILES_MAX} files")));
        }
        Ok(sendmsg(&*stream, &[IoSlice::new(line.as_bytes())], &mut beside, SendFlags::NOSIGNAL)?)
    });
    let sent = sent.await?;
    stream.write_all(line.as_bytes().get(sent..).unwrap_or_default()).await
}

/// The disk's refusal as a problem of the API.
fn refused(error: &Value) -> Refused {
    let text = |field: &str| error.get(field).and_then(Value::as_str);
    let code = match text("kind") {
        Some("busy" | "replaced") => Code::Busy,
        Some("state" | "connected") => Code::State,
        Some("exists") => Code::Exists,
        Some("in-use") => Code::InUse,
        Some("no-space") => Code::NoSpace,
        Some("unsupported") => Code::Unsupported,
        Some("cancelled") => Code::Cancelled,
        // The daemon has sent something that is invalid for the disk.
        Some("malformed" | "version" | "unknown-verb" | "invalid") => Code::Internal,
        _ => Code::Failed,
    };
    let problem = Problem::new(code, text("message").unwrap_or("the disk refused without giving a reason"));
    let problem = match text("advice") {
        Some(advice) => problem.advise(advice),
        None => problem,
    };
    Refused { kind: text("kind").map(str::to_owned), problem }
}

#[cfg(test)]
mod test {
    use std::io::IoSliceMut;
    use std::os::unix::net::UnixListener;

    use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};

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
            let mut beside = RecvAncillaryBuffer::new(&mut space);
            let got = recvmsg(&stream, &mut [IoSliceMut::new(&mut bytes)], &mut beside, RecvFlags::empty()).unwrap();
            let count = |message| if let RecvAncillaryMessage::ScmRights(came) = message { came.count() } else { 0 };
            let files = beside.drain().map(count).sum();
            std::io::Write::write_all(&mut &stream, answers.as_bytes()).unwrap();
            (serde_json::from_slice(&bytes[..got.bytes]).unwrap(), files)
        });
        (room, path, thread)
    }

    const PATIENCE: Duration = Duration::from_secs(20);

    #[tokio::test]
    async fn progress_precedes_the_answer_and_files_go_with_the_request() {
        let (_room, path, thread) =
            disk("{\"id\":1,\"event\":{\"done\":5}}\n{\"id\":1,\"ok\":{\"leaf\":\"raw:/b\"}}\n");
        let file = Beside { path: "/b".into(), write: true, file: tempfile::tempfile().unwrap() };
        let mut events = Vec::new();
        let verb = json!({ "verb": "snapshot", "to": "raw:/b" });
        let answer = ask(&path, verb, vec![file], PATIENCE, |event| events.push(event.clone())).await.unwrap();
        assert_eq!((answer, events), (json!({ "leaf": "raw:/b" }), vec![json!({ "done": 5 })]));
        let (asked, files) = thread.join().unwrap();
        let expected = json!({
            "version": 1, "id": 1, "verb": "snapshot", "to": "raw:/b", "files": [{ "path": "/b", "write": true }]
        });
        assert_eq!((asked, files), (expected, 1));
    }

    #[tokio::test]
    async fn a_watcher_gets_the_state_and_then_events() {
        let (_room, path, _thread) =
            disk("{\"id\":1,\"ok\":{\"full\":true}}\n{\"id\":1,\"event\":{\"state\":\"resumed\"}}\n");
        let (now, mut watch) = watch(&path).await.unwrap();
        assert_eq!(now, json!({ "full": true }));
        assert_eq!(watch.event().await.unwrap(), Some(json!({ "state": "resumed" })));
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
        let endless = ask(&path, json!({ "verb": "version" }), Vec::new(), PATIENCE, |_| ()).await.unwrap_err();
        assert!(endless.message.contains("longer than"), "{endless}");
        // Unread data stays in the socket's buffer.
        assert!(thread.join().unwrap() < 16 * LINE_MAX);
    }

    #[tokio::test]
    async fn a_refusal_is_a_problem_with_its_advice() {
        let (_room, path, _thread) =
            disk("{\"id\":1,\"error\":{\"kind\":\"in-use\",\"message\":\"it is\",\"advice\":\"end it\"}}\n");
        let refused = ask(&path, json!({ "verb": "resize" }), Vec::new(), PATIENCE, |_| ()).await.unwrap_err();
        assert_eq!(refused, Problem::new(Code::InUse, "it is").advise("end it"));
    }

    #[tokio::test]
    async fn a_descriptor_without_listed_file_is_sent_and_closed() {
        let (_room, path, thread) = disk("{\"id\":1,\"error\":{\"kind\":\"unknown-verb\",\"message\":\"no\"}}\n");
        let (ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
        let verb = json!({ "verb": "upgrade", "successor": true });
        let asked = Asked::with_descriptors(&path, verb, vec![theirs.into()]).await.unwrap();
        let refused = asked.answer(|_| ()).await.unwrap_err();
        assert_eq!((refused.kind.as_deref(), refused.problem.code), (Some("unknown-verb"), Code::Internal));
        let expected = json!({ "version": 1, "id": 1, "verb": "upgrade", "successor": true });
        assert_eq!(thread.join().unwrap(), (expected, 1));
        // The disk has closed its copy, and there is no other.
        assert_eq!(std::io::Read::read(&mut &ours, &mut [0]).unwrap(), 0);
    }

    #[tokio::test]
    async fn an_exited_or_silent_disk_blocks_nobody() {
        let (_room, path, _thread) = disk("");
        let ended = ask(&path, json!({ "verb": "version" }), Vec::new(), PATIENCE, |_| ()).await.unwrap_err();
        assert!(ended.message.contains("exited without answering"), "{ended}");
        let room = tempfile::tempdir().unwrap();
        let silent = room.path().join("silent");
        let _listener = UnixListener::bind(&silent).unwrap();
        let patience = Duration::from_millis(10);
        let late = ask(&silent, json!({ "verb": "version" }), Vec::new(), patience, |_| ()).await.unwrap_err();
        assert_eq!(late.code, Code::Timeout);
    }
}
