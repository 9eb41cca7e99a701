//! One request and its answer over a connection of their own.
//!
//! It knows HTTP and JSON, and no noun. Whatever goes wrong becomes a [`Problem`] that says where the daemon was
//! sought.

use std::io;
use std::path::Path;
use std::time::Duration;

use http_body_util::{BodyExt, Full};
use hyper::body::{Bytes, Incoming};
use hyper::client::conn::http1;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::UnixStream;
use tokio::time::Instant;
use uuid::Uuid;

use super::target::Target;
use super::{Answer, Client, Place};
use crate::{Code, Problem};

/// How long an answer may take. What takes longer is a task, and a wait for one is shorter.
const PATIENCE: Duration = Duration::from_secs(120);

/// How long a daemon may take to be there again that has gone before it answered: its service manager starts it anew.
const TO_COME_BACK: Duration = Duration::from_secs(15);
/// How long to rest before it is looked for again.
const REST: Duration = Duration::from_millis(250);

/// Why there is no answer.
#[derive(Debug)]
pub enum Failure {
    /// The daemon is not there: it has not heard of the request.
    Absent(Problem),
    /// The daemon has gone before it answered, or the way to it.
    Gone(Problem),
    /// It has refused.
    Refused(Problem),
}

impl From<Failure> for Problem {
    fn from(failure: Failure) -> Problem {
        match failure {
            Failure::Absent(problem) | Failure::Gone(problem) | Failure::Refused(problem) => problem,
        }
    }
}

/// What a request says of those before it.
#[derive(Clone, Copy, Debug)]
pub enum Known {
    /// The last event that has come.
    LastEvent(u64),
    /// The key of a request that may have come already.
    Key(Uuid),
}

/// A whole answer that is no refusal.
struct Whole {
    status: StatusCode,
    body: Bytes,
}

impl Client {
    /// Asks for what there is.
    pub(super) async fn get<T: DeserializeOwned>(&self, target: &Target) -> Result<T, Problem> {
        Ok(self.look(target).await?)
    }

    /// As `get`, and tells apart why there is no answer.
    pub(super) async fn look<T: DeserializeOwned>(&self, target: &Target) -> Result<T, Failure> {
        self.read(&self.whole(Method::GET, target, Bytes::new()).await?.body)
    }

    /// Asks for text.
    pub(super) async fn text(&self, target: &Target) -> Result<String, Problem> {
        let whole = self.whole(Method::GET, target, Bytes::new()).await?;
        String::from_utf8(whole.body.into()).map_err(|error| self.senseless(&error))
    }

    /// Asks for a change that is done when the answer comes.
    pub(super) async fn change<T: DeserializeOwned>(
        &self,
        method: Method,
        target: &Target,
        asked: &impl Serialize,
    ) -> Result<T, Problem> {
        let whole = self.whole(method, target, self.json(asked)?).await?;
        Ok(self.read(&whole.body)?)
    }

    /// Asks for a change that may take time: 202 (RFC 9110, 15.3.3) says that it has only begun.
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

    fn json(&self, asked: &impl Serialize) -> Result<Bytes, Problem> {
        let text = serde_json::to_vec(asked).map_err(|error| Problem::failed("write a request as JSON", error))?;
        // What has no fields needs no body.
        Ok(if text == b"null" { Bytes::new() } else { text.into() })
    }

    /// No body at all stands for null: what there is to say, the status says.
    fn read<T: DeserializeOwned>(&self, body: &Bytes) -> Result<T, Failure> {
        let text: &[u8] = if body.is_empty() { b"null" } else { body };
        serde_json::from_slice(text).map_err(|error| Failure::Refused(self.senseless(&error)))
    }

    fn senseless(&self, error: &dyn std::error::Error) -> Problem {
        let what = format!("the answer at {} makes no sense: {error}", self.place);
        Problem::new(Code::Failed, what)
            .advise("see that tapline and taplined are of one version, and restart taplined")
    }

    /// A whole answer. It is asked for once more if the daemon has gone before it answered; by its key the daemon, or
    /// the one after it, knows that a change is the same.
    async fn whole(&self, method: Method, target: &Target, body: Bytes) -> Result<Whole, Failure> {
        let key = (method != Method::GET).then(Uuid::new_v4);
        let first = self.once(method.clone(), target, key, body.clone()).await;
        let Err(Failure::Gone(why)) = first else { return first };
        let begun = Instant::now();
        loop {
            match self.once(method.clone(), target, key, body.clone()).await {
                Err(Failure::Absent(_)) if begun.elapsed() < TO_COME_BACK => tokio::time::sleep(REST).await,
                // Whether it was done, the first failure says better.
                Err(Failure::Absent(_) | Failure::Gone(_)) => return Err(Failure::Gone(why)),
                answered => return answered,
            }
        }
    }

    async fn once(&self, method: Method, target: &Target, key: Option<Uuid>, body: Bytes) -> Result<Whole, Failure> {
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

    /// Sends a request; the answer has begun when this returns.
    pub(super) async fn send(
        &self,
        method: Method,
        target: &Target,
        known: Option<Known>,
        body: Bytes,
    ) -> Result<Response<Incoming>, Failure> {
        let mut request = Request::builder().method(method).uri(target.as_str());
        let mut sender = match &self.place {
            Place::Socket(path) => {
                request = request.header("host", "localhost");
                self.converse(UnixStream::connect(path).await.map_err(|error| unreachable(path, &error))?).await?
            }
            Place::Remote(remote) => {
                request = request.header("host", remote.authority()).header("authorization", remote.authorization());
                self.converse(remote.connect().await?).await?
            }
        };
        if !body.is_empty() {
            request = request.header("content-type", "application/json");
        }
        request = match known {
            Some(Known::LastEvent(seq)) => request.header("last-event-id", seq),
            Some(Known::Key(key)) => request.header("idempotency-key", key.to_string()),
            None => request,
        };
        let request = request
            .body(Full::new(body))
            .map_err(|error| Failure::Refused(Problem::failed(format_args!("ask for {}", target.as_str()), error)))?;
        sender.send_request(request).await.map_err(|error| self.broken(&error))
    }

    /// Begins to speak HTTP.
    async fn converse<S>(&self, stream: S) -> Result<http1::SendRequest<Full<Bytes>>, Failure>
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let (sender, connection) = http1::handshake(TokioIo::new(stream)).await.map_err(|error| self.broken(&error))?;
        // It ends with the answer. What goes wrong in it, the answer tells too.
        tokio::spawn(connection);
        Ok(sender)
    }

    fn broken(&self, error: &hyper::Error) -> Failure {
        let what = format!("taplined at {} has gone before it answered: {error}", self.place);
        let look = "whether it was done is not known: look at the object and at «tapline task list»";
        Failure::Gone(Problem::new(Code::Failed, what).advise(look))
    }

    fn silent(&self) -> Problem {
        let seconds = PATIENCE.as_secs();
        let what = format!("taplined at {} has not answered for {seconds} s", self.place);
        Problem::new(Code::Timeout, what).advise("see its log: journalctl -u taplined")
    }
}

/// Nobody listens, or not for us.
fn unreachable(socket: &Path, error: &io::Error) -> Failure {
    let what = format!("cannot reach taplined at {}: {error}", socket.display());
    if error.kind() == io::ErrorKind::PermissionDenied {
        let who = "root may, and the members of the group that api.group names in /etc/tapline/taplined.toml";
        return Failure::Refused(Problem::new(Code::Forbidden, what).advise(who));
    }
    let start = "start it with «systemctl start taplined»; if it listens elsewhere, name its socket \
                 (--socket PATH or TAPLINE_SOCKET)";
    Failure::Absent(Problem::new(Code::Failed, what).advise(start))
}

/// What a status that is no success says.
pub fn refusal(status: StatusCode, body: &[u8]) -> Problem {
    if let Ok(problem) = serde_json::from_slice::<Problem>(body) {
        return problem;
    }
    // A later version may know codes that this one does not: they are for `failed`.
    let value: serde_json::Value = serde_json::from_slice(body).unwrap_or_default();
    let word = |name: &str| value.get(name).and_then(|value| value.as_str()).map(str::to_owned);
    let message = word("message").unwrap_or_else(|| format!("taplined refused with HTTP status {status}"));
    Problem { code: Code::Failed, message, field: word("field"), advice: word("advice") }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn a_refusal_with_an_unknown_code_is_a_failure_with_all_it_says() {
        let body = br#"{"code":"on-fire","message":"it burns","advice":"put it out"}"#;
        let problem = refusal(StatusCode::CONFLICT, body);
        assert_eq!(problem, Problem::new(Code::Failed, "it burns").advise("put it out"));
    }

    #[test]
    fn a_refusal_by_something_else_than_the_daemon_names_its_status() {
        let problem = refusal(StatusCode::BAD_GATEWAY, b"<html>");
        assert_eq!((problem.code, problem.message.contains("502")), (Code::Failed, true));
    }

    /// What a daemon hears at a socket, connection by connection; those that are not answered are closed.
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
    async fn a_change_is_asked_once_more_with_its_key_when_the_connection_breaks() {
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
    async fn a_change_is_not_asked_a_third_time_and_a_refusal_is_an_answer() {
        let room = tempfile::tempdir().unwrap();
        let socket = room.path().join("socket");
        let refusal = "HTTP/1.1 409 Conflict\r\ncontent-length: 0\r\n\r\n";
        let heard = hear(&socket, vec![None, None, Some(refusal)]);
        let client = Client::new(&socket);
        let target = Target::new("vdis/1");
        let change = || client.change::<serde_json::Value>(Method::DELETE, &target, &());
        let broken = change().await.unwrap_err();
        assert!(broken.message.contains("has gone before it answered"), "{broken}");
        assert!(change().await.unwrap_err().message.contains("409"));
        assert_eq!(heard.await.unwrap().len(), 3);
        // Nobody is there: it has not been heard at all.
        std::fs::remove_file(&socket).unwrap();
        assert!(change().await.unwrap_err().message.contains("cannot reach"));
    }
}
