//! A real `taplined` in a directory of its own, with disks that a scan has found; asked over its socket.

use std::fs;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::super::{program, tapline};

/// How long the daemon may take to listen.
const TO_LISTEN: Duration = Duration::from_secs(20);

/// A daemon.
pub struct Daemon {
    room: PathBuf,
    child: Child,
}

impl Daemon {
    /// Starts one in `room`, with settings of `[plug]` as text of TOML.
    pub fn start(room: &Path, plug: &str) -> Result<Daemon, String> {
        let directory = |name: &str| room.join(name).display().to_string();
        let config = format!(
            "state-directory = {:?}\nrun-directory = {:?}\nlog-directory = {:?}\ndisk-program = {:?}\n\
             [plug]\ninjected-delays = true\n{plug}\n",
            directory("state"),
            directory("run"),
            directory("log"),
            program("tapline-disk"),
        );
        let path = room.join("taplined.toml");
        fs::write(&path, config).map_err(|error| format!("{}: {error}", path.display()))?;
        let log = fs::File::create(room.join("stderr")).map_err(|error| error.to_string())?;
        let mut command = Command::new(program("taplined"));
        command.arg("--config").arg(&path).stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        let child = command.spawn().map_err(|error| format!("start taplined: {error}"))?;
        let daemon = Daemon { room: room.to_owned(), child };
        let begin = Instant::now();
        while UnixStream::connect(daemon.socket()).is_err() {
            if begin.elapsed() > TO_LISTEN {
                return Err(format!("taplined does not listen: see {}", room.join("stderr").display()));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(daemon)
    }

    fn socket(&self) -> PathBuf {
        self.room.join("run/taplined.sock")
    }

    /// Its process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Asks; an answer that is a refusal is an error.
    pub fn ask(&self, method: &str, path: &str, body: &Value) -> Result<Value, String> {
        let failed = |error: std::io::Error| format!("{method} {path}: {error}");
        let mut stream = UnixStream::connect(self.socket()).map_err(failed)?;
        let body = if body.is_null() { String::new() } else { body.to_string() };
        let head =
            format!("{method} /v1{path} HTTP/1.1\r\nhost: t\r\nconnection: close\r\ncontent-length: {}", body.len());
        stream.write_all(format!("{head}\r\n\r\n{body}").as_bytes()).map_err(failed)?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).map_err(failed)?;
        let (head, body) = answer.split_once("\r\n\r\n").ok_or(format!("{method} {path}: no answer"))?;
        if !head.contains(" 20") {
            return Err(format!("{method} {path}: {body}"));
        }
        serde_json::from_str(body).map_err(|error| format!("{method} {path}: {error}"))
    }

    /// Has a task done; what came of it.
    pub fn done(&self, path: &str, body: &Value) -> Result<Value, String> {
        let task = self.ask("POST", path, body)?;
        let path = format!("/tasks/{}?wait=60", task["uuid"].as_str().unwrap_or_default());
        loop {
            let mut task = self.ask("GET", &path, &Value::Null)?;
            match task["state"].as_str() {
                Some("done") => return Ok(task["result"].take()),
                Some("failed" | "cancelled") => return Err(task["problem"].to_string()),
                _ => {}
            }
        }
    }

    /// VBDs with disks of their own: `name` tells what the VDI of each is called.
    pub fn vbds(&self, count: usize, name: impl Fn(usize) -> String) -> Result<Vec<String>, String> {
        let room = self.room.join("disks");
        fs::create_dir(&room).map_err(|error| error.to_string())?;
        let source = json!({ "type": "dir", "path": room });
        let sr = self.done("/srs", &json!({ "name": "disks", "source": source }))?;
        for number in 0..count {
            // Each has an identity of its own, which a copy has not.
            let path = room.join(format!("{}.qcow2", name(number)));
            tapline(&["image", "create", &format!("qcow2:{}", path.display()), "--size", "10G"])?;
        }
        let scan = self.done(&format!("/srs/{}/scan", sr["uuid"].as_str().unwrap_or_default()), &json!({}))?;
        let mut vbds = Vec::new();
        for placed in scan["appeared"].as_array().into_iter().flatten() {
            let vbd = self.ask("POST", "/vbds", &json!({ "vdi": placed["vdi"] }))?;
            vbds.push(vbd["uuid"].as_str().unwrap_or_default().to_owned());
        }
        match vbds.len() {
            found if found == count => Ok(vbds),
            found => Err(format!("{found} of {count} disks were found: {scan}")),
        }
    }

    /// How many VBDs are plugged.
    pub fn plugged(&self) -> Result<usize, String> {
        let host = self.ask("GET", "/host", &Value::Null)?;
        Ok(host["plugged"].as_u64().and_then(|count| count.try_into().ok()).unwrap_or(0))
    }

    /// The numbers of all disk processes.
    pub fn disks(&self) -> Result<Vec<u32>, String> {
        let vbds = self.ask("GET", "/vbds", &Value::Null)?;
        let pids = vbds.as_array().into_iter().flatten().filter_map(|vbd| vbd["pid"].as_u64()?.try_into().ok());
        Ok(pids.collect())
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // Disks outlive the daemon, and are not to outlive the bench; a daemon that cannot do it any more has said why.
        if let Err(why) = self.done("/host/drain", &json!({ "timeout": 5 })) {
            eprintln!("disks are left behind: {why}");
        }
        if self.child.kill().is_ok() {
            drop(self.child.wait());
        }
    }
}
