//! A client of the daemon's API that outlives daemons: it distinguishes a lost response from a refusal, and waits for
//! the next daemon where that helps.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

/// Timeout for a task or for the start of a daemon, sufficient on a loaded machine.
pub const PATIENCE: Duration = Duration::from_secs(300);

/// Polling interval.
pub const REST: Duration = Duration::from_millis(100);

/// The reason why a request was not done.
#[derive(Debug)]
pub enum Trouble {
    /// The daemon does not run or ended before its response.
    Gone,
    /// The daemon has refused it, with this code and problem.
    Refused(String, String),
    /// The response is invalid.
    Wrong(String),
}

impl Trouble {
    /// Whether the object does not exist.
    pub fn is_not_found(&self) -> bool {
        matches!(self, Trouble::Refused(code, _) if code == "not-found")
    }
}

impl std::fmt::Display for Trouble {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Trouble::Gone => f.write_str("the daemon does not answer"),
            Trouble::Refused(_, why) | Trouble::Wrong(why) => f.write_str(why),
        }
    }
}

/// The error message of a bench that gives up.
impl From<Trouble> for String {
    fn from(trouble: Trouble) -> String {
        trouble.to_string()
    }
}

/// The result of a task.
#[derive(Debug)]
pub enum Ended {
    /// The task succeeded with this result.
    Done(Value),
    /// The task failed for this reason.
    Failed(String),
    /// The task is no longer known.
    Forgotten,
}

/// A client of the daemon.
#[derive(Clone, Debug)]
pub struct Api {
    /// The path of the daemon's socket.
    pub socket: PathBuf,
}

impl Api {
    /// Sends a request.
    pub fn ask(&self, method: &str, path: &str, body: &Value) -> Result<Value, Trouble> {
        self.ask_with(method, path, body, None)
    }

    /// Sends a request with an idempotency key, with which it is done once however often it is sent.
    pub fn ask_with(&self, method: &str, path: &str, body: &Value, key: Option<&str>) -> Result<Value, Trouble> {
        let (status, text) = self.converse(method, path, body, key).map_err(|_| Trouble::Gone)?;
        let value: Value = if text.is_empty() {
            Value::Null
        } else {
            serde_json::from_str(&text).map_err(|error| Trouble::Wrong(format!("{method} {path}: {error}: {text}")))?
        };
        match status {
            200..=299 => Ok(value),
            _ => {
                let code = value["code"].as_str().unwrap_or("no code").to_owned();
                Err(Trouble::Refused(code, format!("{method} {path}: {status}: {value}")))
            }
        }
    }

    /// The response as text.
    pub fn text(&self, path: &str) -> Result<String, Trouble> {
        match self.converse("GET", path, &Value::Null, None) {
            Ok((200, text)) => Ok(text),
            Ok((status, text)) => Err(Trouble::Wrong(format!("GET {path}: {status}: {text}"))),
            Err(_) => Err(Trouble::Gone),
        }
    }

    /// Sends a request and disconnects at once.
    pub fn ask_and_leave(&self, method: &str, path: &str, body: &Value, key: &str) -> Result<(), Trouble> {
        self.send(method, path, body, Some(key)).map(drop).map_err(|_| Trouble::Gone)
    }

    fn send(&self, method: &str, path: &str, body: &Value, key: Option<&str>) -> std::io::Result<UnixStream> {
        let mut stream = UnixStream::connect(&self.socket)?;
        let body = if body.is_null() { String::new() } else { body.to_string() };
        let key = key.map(|key| format!("idempotency-key: {key}\r\n")).unwrap_or_default();
        let head = format!(
            "{method} /v1{path} HTTP/1.1\r\nhost: t\r\nconnection: close\r\n{key}content-length: {}",
            body.len()
        );
        stream.write_all(format!("{head}\r\n\r\n{body}").as_bytes())?;
        Ok(stream)
    }

    fn converse(&self, method: &str, path: &str, body: &Value, key: Option<&str>) -> std::io::Result<(u16, String)> {
        let mut stream = self.send(method, path, body, key)?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        let cut_off = || std::io::Error::other("no whole answer");
        let (head, body) = answer.split_once("\r\n\r\n").ok_or_else(cut_off)?;
        let said = head.lines().find_map(|line| line.strip_prefix("content-length: ")?.parse::<usize>().ok());
        if said.is_some_and(|len| len != body.len()) {
            return Err(cut_off());
        }
        let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).ok_or_else(cut_off)?;
        Ok((status, body.to_owned()))
    }

    /// Sends a request that changes nothing, until a daemon responds.
    pub fn get(&self, path: &str) -> Result<Value, Trouble> {
        let begin = Instant::now();
        loop {
            match self.ask("GET", path, &Value::Null) {
                Err(Trouble::Gone) if begin.elapsed() < PATIENCE => std::thread::sleep(REST),
                other => return other,
            }
        }
    }

    /// Requests a list.
    pub fn list(&self, path: &str) -> Result<Vec<Value>, Trouble> {
        match self.get(path)? {
            Value::Array(list) => Ok(list),
            other => Err(Trouble::Wrong(format!("GET {path}: {other} is no list"))),
        }
    }

    /// Waits for the end of a task, across restarts of the daemon.
    pub fn wait(&self, task: &Value) -> Result<Ended, Trouble> {
        let path = format!("/tasks/{}?wait=10", uuid(task)?);
        let begin = Instant::now();
        while begin.elapsed() < PATIENCE {
            let mut now = match self.get(&path) {
                Err(trouble) if trouble.is_not_found() => return Ok(Ended::Forgotten),
                other => other?,
            };
            match now["state"].as_str() {
                Some("done") => return Ok(Ended::Done(now["result"].take())),
                Some("failed" | "cancelled") => {
                    return Ok(Ended::Failed(format!("{}: {}", now["verb"], now["problem"])));
                }
                _ => {}
            }
        }
        Err(Trouble::Wrong(format!("{path} has not ended in {} s", PATIENCE.as_secs())))
    }

    /// Sends a request and waits for its task, which must succeed.
    pub fn done(&self, path: &str, body: &Value) -> Result<Value, String> {
        let task = self.ask("POST", path, body)?;
        match self.wait(&task)? {
            Ended::Done(result) => Ok(result),
            other => Err(format!("POST {path}: {other:?}")),
        }
    }

    /// Creates a VBD of a VDI without a machine; returns its UUID.
    pub fn make_vbd(&self, vdi: &Value) -> Result<String, String> {
        let vbd = self.ask("POST", "/vbds", &json!({ "vdi": vdi }))?;
        Ok(uuid(&vbd)?.to_owned())
    }

    /// Waits until all current tasks of this verb have ended: one of them may belong to a request whose response was
    /// lost.
    pub fn settle(&self, verb: &str) -> Result<(), Trouble> {
        for task in self.list("/tasks?open=true")?.iter().filter(|task| task["verb"] == verb) {
            self.wait(task)?;
        }
        Ok(())
    }
}

/// The UUID of an object.
pub fn uuid(object: &Value) -> Result<&str, Trouble> {
    object["uuid"].as_str().ok_or_else(|| Trouble::Wrong(format!("{object} has no uuid")))
}

/// An empty request body.
pub fn nothing() -> Value {
    json!({})
}
