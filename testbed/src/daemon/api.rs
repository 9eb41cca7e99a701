//! The daemon's API for a client that outlives daemons: it tells an answer that never came from one that is a refusal,
//! and waits for the next daemon where that helps.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

/// A task or another daemon comes to its end before this, on a loaded machine too.
pub const PATIENCE: Duration = Duration::from_secs(300);

/// Between two looks at something that takes its time.
pub const REST: Duration = Duration::from_millis(100);

/// Why something was not done.
#[derive(Debug)]
pub enum Trouble {
    /// The daemon has ended before it answered, or is not there.
    Gone,
    /// It refuses: the code and the whole of its problem.
    Refused(String, String),
    /// It has said something that makes no sense.
    Wrong(String),
}

impl Trouble {
    /// Whether an object is not there.
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

/// What a bench that gives up says.
impl From<Trouble> for String {
    fn from(trouble: Trouble) -> String {
        trouble.to_string()
    }
}

/// How a task has ended.
#[derive(Debug)]
pub enum Ended {
    /// It is done, with this result.
    Done(Value),
    /// It is not, and why.
    Failed(String),
    /// It is not known any more.
    Forgotten,
}

/// The way to the daemon.
#[derive(Clone, Debug)]
pub struct Api {
    /// Its socket.
    pub socket: PathBuf,
}

impl Api {
    /// Asks once.
    pub fn ask(&self, method: &str, path: &str, body: &Value) -> Result<Value, Trouble> {
        self.ask_with(method, path, body, None)
    }

    /// Asks once, with a key by which it is done once however often it is asked for.
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

    /// What is answered, as it comes.
    pub fn text(&self, path: &str) -> Result<String, Trouble> {
        match self.converse("GET", path, &Value::Null, None) {
            Ok((200, text)) => Ok(text),
            Ok((status, text)) => Err(Trouble::Wrong(format!("GET {path}: {status}: {text}"))),
            Err(_) => Err(Trouble::Gone),
        }
    }

    /// Sends a request and goes away at once.
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

    /// Asks what changes nothing, until a daemon answers.
    pub fn get(&self, path: &str) -> Result<Value, Trouble> {
        let begin = Instant::now();
        loop {
            match self.ask("GET", path, &Value::Null) {
                Err(Trouble::Gone) if begin.elapsed() < PATIENCE => std::thread::sleep(REST),
                other => return other,
            }
        }
    }

    /// A list.
    pub fn list(&self, path: &str) -> Result<Vec<Value>, Trouble> {
        match self.get(path)? {
            Value::Array(list) => Ok(list),
            other => Err(Trouble::Wrong(format!("GET {path}: {other} is no list"))),
        }
    }

    /// Waits for the end of a task, through the ends of daemons.
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

    /// Has a task done; no other end is allowed.
    pub fn done(&self, path: &str, body: &Value) -> Result<Value, String> {
        let task = self.ask("POST", path, body)?;
        match self.wait(&task)? {
            Ended::Done(result) => Ok(result),
            other => Err(format!("POST {path}: {other:?}")),
        }
    }

    /// Makes a VBD of a VDI for nobody in particular; its identity.
    pub fn make_vbd(&self, vdi: &Value) -> Result<String, String> {
        let vbd = self.ask("POST", "/vbds", &json!({ "vdi": vdi }))?;
        Ok(uuid(&vbd)?.to_owned())
    }

    /// Waits until tasks of this verb that are under way now are over: one of them may be what was asked for when the
    /// answer was lost.
    pub fn settle(&self, verb: &str) -> Result<(), Trouble> {
        for task in self.list("/tasks?open=true")?.iter().filter(|task| task["verb"] == verb) {
            self.wait(task)?;
        }
        Ok(())
    }
}

/// The identity of an object.
pub fn uuid(object: &Value) -> Result<&str, Trouble> {
    object["uuid"].as_str().ok_or_else(|| Trouble::Wrong(format!("{object} has no uuid")))
}

/// What is asked for where nothing is to be said.
pub fn nothing() -> Value {
    json!({})
}
