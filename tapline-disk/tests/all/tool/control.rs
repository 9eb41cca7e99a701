//! A client of the control socket.

#![allow(dead_code, reason = "each test uses its part")]

use std::io::{BufRead, BufReader, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;

use serde_json::{Value, json};

use super::handed::{Handed, send_with_descriptors};

/// A connection to a control socket.
pub struct Control {
    lines: BufReader<UnixStream>,
}

impl Control {
    pub fn connect(path: &Path) -> Control {
        Control { lines: BufReader::new(UnixStream::connect(path).unwrap()) }
    }

    /// Connects, if a process listens.
    pub fn try_connect(path: &Path) -> Option<Control> {
        Some(Control { lines: BufReader::new(UnixStream::connect(path).ok()?) })
    }

    /// Sends a request without waiting.
    pub fn send(&mut self, request: &Value) {
        let mut request = request.clone();
        request.as_object_mut().unwrap().extend([("version".into(), json!(1))]);
        self.send_raw(format!("{request}\n").as_bytes());
    }

    /// Sends a request with file descriptors.
    pub fn send_with(&mut self, request: &Value, files: &[Handed]) {
        let mut request = request.clone();
        let named: Vec<Value> = files.iter().map(Handed::described).collect();
        request.as_object_mut().unwrap().extend([("version".into(), json!(1)), ("files".into(), json!(named))]);
        self.send_with_descriptors(
            &format!("{request}\n"),
            &files.iter().map(|file| &file.descriptor).collect::<Vec<_>>(),
        );
    }

    /// Sends bytes and descriptors.
    pub fn send_with_descriptors(&mut self, text: &str, descriptors: &[&OwnedFd]) {
        send_with_descriptors(&self.lines.get_ref().as_fd(), text, descriptors);
    }

    /// Executes a request with file descriptors, which must succeed.
    pub fn done_with(&mut self, request: &Value, files: &[Handed]) -> Value {
        self.send_with(request, files);
        let line = self.outcome();
        assert!(line.get("ok").is_some(), "{request}: {line}");
        line["ok"].clone()
    }

    /// Returns the answer to what was sent.
    pub fn outcome(&mut self) -> Value {
        loop {
            let line = self.next_line().expect("the disk has ended without an answer");
            if line.get("event").is_none() {
                return line;
            }
        }
    }

    pub fn send_raw(&mut self, bytes: &[u8]) {
        // The disk may have been killed, or may have closed the connection, which the test will notice.
        self.lines.get_mut().write_all(bytes).ok();
    }

    /// Returns the next line; `None` at the end of the connection.
    pub fn next_line(&mut self) -> Option<Value> {
        let mut line = String::new();
        match self.lines.read_line(&mut line) {
            Ok(1..) if line.ends_with('\n') => Some(serde_json::from_str(&line).unwrap()),
            _ => None,
        }
    }

    /// Executes a request; returns its result.
    pub fn ask(&mut self, request: &Value) -> Value {
        self.send(request);
        self.outcome()
    }

    /// Executes a request that must succeed.
    pub fn done(&mut self, request: &Value) -> Value {
        let line = self.ask(request);
        assert!(line.get("ok").is_some(), "{request}: {line}");
        line["ok"].clone()
    }

    /// Executes a request that must be refused; returns the kind and the message.
    pub fn refused(&mut self, request: &Value) -> (String, String) {
        let line = self.ask(request);
        let text = |field: &str| line["error"][field].as_str().unwrap_or_default().to_owned();
        assert!(line.get("error").is_some(), "{request}: {line}");
        (text("kind"), text("message"))
    }
}
