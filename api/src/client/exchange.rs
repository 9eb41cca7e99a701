//! One request and its response over a connection of their own.
//!
//! This module knows HTTP and JSON, but no noun. Every failure becomes a [`Problem`] that says which daemon was tried.

use std::io;
use std::path::Path;
use std::time::Duration;

use http_body_util::{BodyExt, Full};
use hyper::body::{Bytes, Incoming};
use hyper::client::conn::http1;
use hyper::upgrade::Upgraded;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::UnixStream;
use tokio::time::Instant;
use uuid::Uuid;

use super::target::Target;
use super::{Answer, Client, Endpoint};
use crate::{Code, Problem};

/// Time limit for a response. Longer operations are tasks, and one request to wait for a task takes less.
const PATIENCE: Duration = Duration::from_secs(120);

/// How long to wait for a daemon that disappeared before it answered: its service manager restarts it.
const TO_COME_BACK: Duration = Duration::from_secs(15);
/// Pause before the next attempt to reach the daemon.
const REST: Duration = Duration::from_millis(250);

/// Why there is no response.
#[derive(Debug)]
pub enum Failure {
    /// The daemon cannot be reached: it has not received the request.
    Absent(Problem),
    /// The daemon, or the connection to it, disappeared before the response arrived.
    Gone(Problem),
    /// The daemon refused the request.
    Refused(Problem),
}

impl From<Failure> for Problem {
    fn from(failure: Failure) -> Problem {
        match failure {
            Failure::Absent(problem) | Failure::Gone(problem) | Failure::Refused(problem) => problem,
        }
    }
}

/// What a request says in a header.
#[derive(Clone, Copy, Debug)]
pub enum Known {
    /// The last event that was received.
    LastEvent(u64),
    /// The idempotency key of a request that may be repeated.
    Key(Uuid),
    /// The protocol that the connection is to have.
    Protocol(&'static str),
}

const JSON: &str = "application/json";

/// The body of a request.
#[derive(Clone, Debug)]
pub struct Content {
    bytes: Bytes,
    kind: &'static str,
}

impl Content {
    /// The body of a request without one.
    pub fn none() -> Content {
        Content { bytes: Bytes::new(), kind: JSON }
    }
}

/// A connection that is no longer one of HTTP.
pub type Stream = TokioIo<Upgraded>;

/// A complete, successful response.
struct Whole {
    status: StatusCode,
    body: Bytes,
}

impl Client {
    /// Gets an object.
    pub(super) async fn get<T: DeserializeOwned>(&self, target: &Target) -> Result<T, Problem> {
        Ok(self.look(target).await?)
    }

    /// Like `get`, but distinguishes why there is no response.
    pub(super) async fn look<T: DeserializeOwned>(&self, target: &Target) -> Result<T, Failure> {
        self.read(&self.whole(Method::GET, target, Content::none()).await?.body)
    }

    /// Gets text.
    pub(super) async fn text(&self, target: &Target) -> Result<String, Problem> {
        let whole = self.whole(Method::GET, target, Content::none()).await?;
        String::from_utf8(whole.body.into()).map_err(|error| self.senseless(&error))
    }

    /// Gets bytes.
    pub(super) async fn bytes(&self, target: &Target) -> Result<Vec<u8>, Problem> {
        Ok(self.whole(Method::GET, target, Content::none()).await?.body.into())
    }

    /// Sends bytes, which are no JSON.
    pub(super) async fn send_bytes<T: DeserializeOwned>(&self, target: &Target, bytes: Bytes) -> Result<T, Problem> {
        let content = Content { bytes, kind: "application/octet-stream" };
        let whole = self.whole(Method::POST, target, content).await?;
        Ok(self.read(&whole.body)?)
    }

    /// Makes a connection one of another protocol (RFC 9110, 7.8).
    pub(super) async fn upgrade(&self, target: &Target, protocol: &'static str) -> Result<Stream, Problem> {
        let begin = async {
            let known = Some(Known::Protocol(protocol));
            let response = self.send(Method::GET, target, known, Content::none()).await?;
            let status = response.status();
            if status == StatusCode::SWITCHING_PROTOCOLS {
                let upgraded = hyper::upgrade::on(response).await.map_err(|error| self.broken(&error))?;
                return Ok(TokioIo::new(upgraded));
            }
            let body = response.into_body().collect().await.map_err(|error| self.broken(&error))?.to_bytes();
            Err(Failure::Refused(refusal(status, &body)))
        };
        match tokio::time::timeout(PATIENCE, begin).await {
            Ok(begun) => Ok(begun?),
            Err(_) => Err(self.silent()),
        }
    }

    /// Requests a change that is complete when the response arrives.
    pub(super) async fn change<T: DeserializeOwned>(
        &self,
        method: Method,
        target: &Target,
        asked: &impl Serialize,
    ) -> Result<T, Problem> {
        let whole = self.whole(method, target, self.json(asked)?).await?;
        Ok(self.read(&whole.body)?)
    }

    /// Requests a change that may be long-running: status 202 (RFC 9110, 15.3.3) says that it has only begun.
    pub(super) async fn begin<T: DeserializeOwned>(
        &self,
        method: Method,
        target: &Target,
        asked: &impl Serialize,
    ) -> Result<Answer<T>, Problem> {
        let whole = self.whole(method, target, self.json(asked)?).await?;
        Ok(match whole.status {
            StatusCode::ACCEPTED => Answer::Begun(self.read(&whole.body)?),
            _ => Answer::Done(self.read(&whole.body)?),
        })
    }

    fn json(&self, asked: &impl Serialize) -> Result<Content, Problem> {
        let text = serde_json::to_vec(asked).map_err(|error| Problem::failed("encode the request as JSON", error))?;
        // A request without fields needs no body.
        Ok(if text == b"null" { Content::none() } else { Content { bytes: text.into(), kind: JSON } })
    }

    /// An empty body stands for null: the status says everything.
    fn read<T: DeserializeOwned>(&self, body: &Bytes) -> Result<T, Failure> {
        let text: &[u8] = if body.is_empty() { b"null" } else { body };
        serde_json::from_slice(text).map_err(|error| Failure::Refused(self.senseless(&error)))
    }

    /// Both may be of different versions.
    fn senseless(&self, error: &dyn std::error::Error) -> Problem {
        let what = format!("cannot read the response of taplined at {}: {error}", self.endpoint);
        Problem::new(Code::Failed, what)
            .advise("tapline and taplined may be of different versions: restart taplined (disks keep running)")
    }

    /// A complete response. The request is repeated once if the daemon disappeared before answering; by its key the
    /// daemon, or its successor, recognizes a change as the same.
    async fn whole(&self, method: Method, target: &Target, body: Content) -> Result<Whole, Failure> {
        let key = (method != Method::GET).then(Uuid::new_v4);
        let first = self.once(method.clone(), target, key, body.clone()).await;
        let Err(Failure::Gone(why)) = first else { return first };
        let begun = Instant::now();
        loop {
            match self.once(method.clone(), target, key, body.clone()).await {
                Err(Failure::Absent(_)) if begun.elapsed() < TO_COME_BACK => tokio::time::sleep(REST).await,
                // The first failure tells more about whether it was done.
                Err(Failure::Absent(_) | Failure::Gone(_)) => return Err(Failure::Gone(why)),
                answered => return answered,
            }
        }
    }

    async fn once(&self, method: Method, target: &Target, key: Option<Uuid>, body: Content) -> Result<Whole, Failure> {
        let all = async {
            let response = self.send(method, target, key.map(Known::Key), body).await?;
            let status = response.status();
            let body = response.into_body().collect().await.map_err(|error| self.broken(&error))?.to_bytes();
            if status.is_success() { Ok(Whole { status, body }) } else { Err(Failure::Refused(refusal(status, &body))) }
        };
        match tokio::time::timeout(PATIENCE, all).await {
            Ok(answered) => answered,
            Err(_) => Err(Failure::Refused(self.silent())),
        }
    }

    /// Sends a request; returns when the response has begun.
    pub(super) async fn send(
        &self,
        method: Method,
        target: &Target,
        known: Option<Known>,
        Content { bytes, kind }: Content,
    ) -> Result<Response<Incoming>, Failure> {
        let mut request = Request::builder().method(method).uri(target.as_str());
        let mut sender = match &self.endpoint {
            Endpoint::Socket(path) => {
                request = request.header("host", "localhost");
                self.converse(UnixStream::connect(path).await.map_err(|error| unreachable(path, &error))?).await?
            }
            Endpoint::Remote(remote) => {
                request = request.header("host", remote.authority()).header("authorization", remote.authorization());
                self.converse(remote.connect().await?).await?
            }
        };
        if !bytes.is_empty() {
            request = request.header("content-type", kind);
        }
        request = match known {
            Some(Known::LastEvent(seq)) => request.header("last-event-id", seq),
            Some(Known::Key(key)) => request.header("idempotency-key", key.to_string()),
            Some(Known::Protocol(protocol)) => request.header("connection", "upgrade").header("upgrade", protocol),
            None => request,
        };
        let request = request
            .body(Full::new(bytes))
            .map_err(|error| Failure::Refused(Problem::failed(format_args!("ask for {}", target.as_str()), error)))?;
        sender.send_request(request).await.map_err(|error| self.broken(&error))
    }

    /// Starts HTTP on a connection.
    async fn converse<S>(&self, stream: S) -> Result<http1::SendRequest<Full<Bytes>>, Failure>
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let (sender, connection) = http1::handshake(TokioIo::new(stream)).await.map_err(|error| self.broken(&error))?;
        // The task ends with the response, which also reports its errors.
        tokio::spawn(connection.with_upgrades());
        Ok(sender)
    }

    fn broken(&self, error: &hyper::Error) -> Failure {
        let what = format!("taplined at {} closed the connection before answering: {error}", self.endpoint);
        let look = "the request may or may not have been carried out: check the object and 'tapline task list'";
        Failure::Gone(Problem::new(Code::Unreachable, what).advise(look))
    }

    fn silent(&self) -> Problem {
        let seconds = PATIENCE.as_secs();
        let what = format!("taplined at {} has not answered for {seconds} s", self.endpoint);
        Problem::new(Code::Timeout, what).advise("check its log: journalctl -u taplined")
    }
}

/// Nothing listens there, or this user has no access.
fn unreachable(socket: &Path, error: &io::Error) -> Failure {
    let what = format!("cannot reach taplined at {}: {error}", socket.display());
    if error.kind() == io::ErrorKind::PermissionDenied {
        let who = "only root and members of the group set by api.group in /etc/tapline/taplined.toml have access";
        return Failure::Refused(Problem::new(Code::Forbidden, what).advise(who));
    }
    let start = "start it with 'systemctl start taplined'; if it listens elsewhere, give its socket with --socket PATH \
        or TAPLINE_SOCKET";
    Failure::Absent(Problem::new(Code::Unreachable, what).advise(start))
}

/// The problem reported by an error status.
pub fn refusal(status: StatusCode, body: &[u8]) -> Problem {
    if let Ok(problem) = serde_json::from_slice::<Problem>(body) {
        return problem;
    }
    Problem::new(Code::Failed, format!("taplined refused the request with HTTP status {status}"))
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn an_unknown_code_is_a_failure_with_detail_and_advice() {
        let body = br#"{"type":"/v1/problems/on-fire","code":"on-fire","detail":"it burns","advice":"put it out"}"#;
        let problem = refusal(StatusCode::CONFLICT, body);
        assert_eq!(problem, Problem::new(Code::Failed, "it burns").advise("put it out"));
    }

    #[test]
    fn a_refusal_by_a_proxy_shows_the_http_status() {
        let problem = refusal(StatusCode::BAD_GATEWAY, b"<html>");
        assert_eq!((problem.code, problem.detail.contains("502")), (Code::Failed, true));
    }

    /// Records the requests to a socket, one connection at a time; connections without an answer are closed.
    fn hear(socket: &Path, answers: Vec<Option<&'static str>>) -> tokio::task::JoinHandle<Vec<String>> {
        use tokio::io::{AsyncReadExt, AsyncWriteExt};
        let listener = tokio::net::UnixListener::bind(socket).unwrap();
        tokio::spawn(async move {
            let mut heard = Vec::new();
            for answer in answers {
                let (mut stream, _) = listener.accept().await.unwrap();
                let mut text = vec![0; 4096];
                let len = stream.read(&mut text).await.unwrap();
                heard.push(String::from_utf8_lossy(&text[..len]).into_owned());
                if let Some(answer) = answer {
                    stream.write_all(answer.as_bytes()).await.unwrap();
                }
            }
            heard
        })
    }

    const NULL: &str = "HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nnull";

    #[tokio::test]
    async fn a_change_is_repeated_with_its_key_if_the_connection_breaks() {
        let room = tempfile::tempdir().unwrap();
        let socket = room.path().join("socket");
        let heard = hear(&socket, vec![None, Some(NULL), Some(NULL)]);
        let client = Client::new(&socket);
        let target = Target::new("vdis");
        let change = || client.change::<serde_json::Value>(Method::POST, &target, &());
        change().await.unwrap();
        change().await.unwrap();
        let heard = heard.await.unwrap();
        let key = |text: &str| text.lines().find_map(|line| line.strip_prefix("idempotency-key: ").map(str::to_owned));
        let keys: Vec<String> = heard.iter().map(|text| key(text).unwrap()).collect();
        assert!(keys[0] == keys[1] && keys[1] != keys[2], "{keys:?}");
    }

    #[tokio::test]
    async fn a_change_is_repeated_only_once_and_never_after_a_refusal() {
        let room = tempfile::tempdir().unwrap();
        let socket = room.path().join("socket");
        let refusal = "HTTP/1.1 409 Conflict\r\ncontent-length: 0\r\n\r\n";
        let heard = hear(&socket, vec![None, None, Some(refusal)]);
        let client = Client::new(&socket);
        let target = Target::new("vdis/1");
        let change = || client.change::<serde_json::Value>(Method::DELETE, &target, &());
        let broken = change().await.unwrap_err();
        assert!(broken.detail.contains("closed the connection before answering"), "{broken}");
        assert!(change().await.unwrap_err().detail.contains("409"));
        assert_eq!(heard.await.unwrap().len(), 3);
        // Nothing listens: the request was never received.
        std::fs::remove_file(&socket).unwrap();
        assert!(change().await.unwrap_err().detail.contains("cannot reach"));
    }
}
