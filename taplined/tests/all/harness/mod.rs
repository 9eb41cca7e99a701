//! The real daemon in a test, started with its own configuration and directories, and accessed over its socket.
//!
//! A daemon that a test leaves running is killed, and its directories are removed. Its log is shown if the test
//! fails.

pub mod chromium;
pub mod disks;
pub mod mounted;
pub mod nbd;
pub mod tls;

use std::fs;
use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

/// The time limit for all waits; a test that waits longer fails.
const PATIENCE: Duration = Duration::from_secs(60);

/// The environment variable for the point at which the daemon dies: `VERB:STEP` or `VERB:STEP:after`; with
/// `VERB:STEP:panic` it panics.
pub const ABORT_AT: &str = "TAPLINED_ABORT_AT";

/// A daemon and its directories.
pub struct Taplined {
    room: tempfile::TempDir,
    environment: Vec<(String, String)>,
    /// Programs that execute the daemon, with their arguments.
    through: Vec<String>,
    process: Option<Child>,
}

/// A complete response. Status 0: the daemon has died before it responded.
#[derive(Debug)]
pub struct Exchange {
    pub status: u16,
    head: String,
    pub body: String,
}

impl Exchange {
    /// The value of a response header.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.head.lines().find_map(|line| {
            let (found, value) = line.split_once(": ")?;
            found.eq_ignore_ascii_case(name).then_some(value)
        })
    }

    pub fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }

    /// The status, and the code and field of the problem.
    #[track_caller]
    pub fn refusal(&self) -> (u16, String, String) {
        assert_eq!(self.header("content-type"), Some("application/problem+json"), "{self:?}");
        let problem = self.json();
        assert_eq!(problem["status"], self.status, "{problem}");
        let word = |name: &str| problem[name].as_str().unwrap_or_default().to_owned();
        assert!(!word("title").is_empty() && !word("detail").is_empty(), "{problem}");
        assert_eq!(word("type"), format!("/v1/problems/{}", word("code")));
        (self.status, word("code"), word("field"))
    }
}

/// A field of a process's status (proc_pid_status(5)).
pub fn process_status(pid: u32, field: &str) -> Vec<String> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':')).unwrap();
    line.split_whitespace().map(str::to_owned).collect()
}

/// The user of a process, whose real, effective and saved uids are equal, as are those of its group.
#[track_caller]
pub fn only_user(pid: u32) -> u32 {
    let (users, groups) = (process_status(pid, "Uid"), process_status(pid, "Gid"));
    assert!(users.iter().all(|user| *user == users[0]) && groups == users, "{users:?} {groups:?}");
    users[0].parse().unwrap()
}

/// Starts a daemon with default settings, except for its directories.
pub fn start() -> Taplined {
    start_with("", &[])
}

/// Starts a daemon with additional settings, as TOML text, and environment variables.
pub fn start_with(settings: &str, environment: &[(&str, &str)]) -> Taplined {
    let room = tempfile::Builder::new().prefix("taplined-").tempdir().unwrap();
    // Like /run: QEMU, which runs as another user, must be able to traverse it to reach its disks.
    fs::set_permissions(room.path(), fs::Permissions::from_mode(0o711)).unwrap();
    let directory = |name: &str| room.path().join(name);
    let config = format!(
        "state-directory = {:?}\nrun-directory = {:?}\nlog-directory = {:?}\ndisk-program = {:?}\n\
         upgrade-pause-max = 60000\n{settings}\n",
        directory("state"),
        directory("run"),
        directory("log"),
        disk_program(),
    );
    fs::write(room.path().join("taplined.toml"), config).unwrap();
    let environment = environment.iter().map(|(name, value)| ((*name).into(), (*value).into())).collect();
    let mut daemon = Taplined { room, environment, through: Vec::new(), process: None };
    daemon.run();
    daemon
}

/// `tapline-disk`: the program named by TAPLINE_DISK, or the one in the daemon's directory. Built if necessary: cargo
/// only builds the programs of the crate under test.
pub fn disk_program() -> PathBuf {
    if let Some(named) = std::env::var_os("TAPLINE_DISK") {
        return named.into();
    }
    let program = Path::new(env!("CARGO_BIN_EXE_taplined")).with_file_name("tapline-disk");
    if !program.exists() {
        let built = Command::new(env!("CARGO")).args(["build", "-q", "-p", "tapline-disk"]).status().unwrap();
        assert!(built.success(), "tapline-disk cannot be built");
    }
    program
}

impl Taplined {
    fn run(&mut self) {
        let log = fs::File::options().create(true).append(true).open(self.log_path()).unwrap();
        self.run_logging_to(log.into());
    }

    /// Restarts it with another destination for its log; stops it first.
    pub fn restart_logging_to(&mut self, log: Stdio) {
        assert!(self.stop(), "{}", self.log());
        self.run_logging_to(log);
    }

    fn run_logging_to(&mut self, log: Stdio) {
        let words: Vec<&str> =
            self.through.iter().map(String::as_str).chain([env!("CARGO_BIN_EXE_taplined")]).collect();
        let mut command = Command::new(words[0]);
        command.args(&words[1..]).arg("--config").arg(self.room.path().join("taplined.toml"));
        command.envs(self.environment.clone()).stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        self.process = Some(command.spawn().unwrap());
        wait_until("the daemon listens", || {
            let ended = self.process.as_mut().unwrap().try_wait().unwrap();
            assert!(ended.is_none(), "the daemon has ended: {ended:?}\n{}", self.log());
            UnixStream::connect(self.socket()).is_ok()
        });
    }

    /// The path of its socket.
    pub fn socket(&self) -> PathBuf {
        self.room.path().join("run/taplined.sock")
    }

    /// The catalogue of the running daemon. On a busy machine a commit can take longer than the default timeout of
    /// five seconds.
    pub fn catalogue(&self) -> rusqlite::Connection {
        let catalogue = rusqlite::Connection::open(self.room().join("state/catalogue.db")).unwrap();
        catalogue.busy_timeout(Duration::from_secs(120)).unwrap();
        catalogue
    }

    /// A directory for the test's own files, next to the daemon's.
    pub fn room(&self) -> &Path {
        self.room.path()
    }

    fn log_path(&self) -> PathBuf {
        self.room.path().join("stderr")
    }

    /// Its log since the start of the test.
    pub fn log(&self) -> String {
        fs::read_to_string(self.log_path()).unwrap_or_default()
    }

    /// The pid of the daemon.
    pub fn pid(&self) -> u32 {
        self.process.as_ref().unwrap().id()
    }

    /// Kills it with SIGKILL.
    pub fn kill(&mut self) {
        let mut process = self.process.take().unwrap();
        process.kill().unwrap();
        process.wait().unwrap();
    }

    /// Stops it as systemd does, and returns whether it exited successfully.
    pub fn stop(&mut self) -> bool {
        let mut process = self.process.take().unwrap();
        let told = Command::new("kill").arg(process.id().to_string()).status().unwrap();
        assert!(told.success());
        wait_until("the daemon ends", || process.try_wait().unwrap().is_some());
        process.wait().unwrap().success()
    }

    /// Waits until it has died at the point chosen by a test.
    pub fn wait_for_death(&mut self) -> ExitStatus {
        let mut process = self.process.take().unwrap();
        wait_until("the daemon dies", || process.try_wait().unwrap().is_some());
        process.wait().unwrap()
    }

    /// Restarts it with the same directories and environment, but without the point at which it was to die; stops it
    /// first if it runs.
    pub fn restart(&mut self) {
        if self.process.is_some() {
            assert!(self.stop(), "{}", self.log());
        }
        self.environment.retain(|(name, _)| name != ABORT_AT);
        self.run();
    }

    /// Restarts it through another program, which executes it.
    pub fn restart_through(&mut self, words: &[&str]) {
        self.through = words.iter().map(|word| (*word).into()).collect();
        self.restart();
    }

    /// Runs a one-shot command of the program with the daemon's configuration; returns its exit code and output.
    pub fn command(&self, words: &[&str]) -> (i32, String) {
        let mut command = Command::new(env!("CARGO_BIN_EXE_taplined"));
        let ended = command.arg("--config").arg(self.room.path().join("taplined.toml")).args(words).output().unwrap();
        let said = [ended.stdout, ended.stderr].concat();
        (ended.status.code().unwrap_or(-1), String::from_utf8_lossy(&said).into_owned())
    }

    /// Restarts it where it may refuse to start; returns its exit code and output if it did.
    pub fn try_to_restart(&mut self, words: &[&str]) -> Result<(), (i32, String)> {
        if self.process.is_some() {
            assert!(self.stop(), "{}", self.log());
        }
        let said = self.log().len();
        let log = fs::File::options().create(true).append(true).open(self.log_path()).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_taplined"));
        command.arg("--config").arg(self.room.path().join("taplined.toml")).args(words);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        let mut process = command.spawn().unwrap();
        let mut ended = None;
        wait_until("the daemon listens or ends", || {
            ended = process.try_wait().unwrap();
            ended.is_some() || UnixStream::connect(self.socket()).is_ok()
        });
        match ended {
            Some(status) => Err((status.code().unwrap_or(-1), self.log().split_off(said))),
            None => {
                self.process = Some(process);
                Ok(())
            }
        }
    }

    /// Starts a daemon that dies at this point of its recovery, possibly before it listens.
    pub fn start_and_die(&mut self, at: &str) {
        let log = fs::File::options().create(true).append(true).open(self.log_path()).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_taplined"));
        command.arg("--config").arg(self.room.path().join("taplined.toml")).env(ABORT_AT, at);
        self.process = Some(command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log).spawn().unwrap());
        self.wait_for_death();
    }

    /// Restarts it with environment variables for this start.
    pub fn restart_with(&mut self, environment: &[(&str, &str)]) {
        if self.process.is_some() {
            assert!(self.stop(), "{}", self.log());
        }
        self.environment = environment.iter().map(|(name, value)| ((*name).into(), (*value).into())).collect();
        self.run();
    }

    /// Requests a task at which the daemon dies, and waits for its death. The response may come earlier or not at
    /// all.
    #[track_caller]
    pub fn ask_and_die(&mut self, method: &str, path: &str, body: Option<&Value>) {
        let (status, answer) = self.ask(method, path, body);
        assert!([0, 202].contains(&status), "{status} {answer}");
        self.wait_for_death();
    }

    #[track_caller]
    pub fn post_and_die(&mut self, path: &str, body: Value) {
        self.ask_and_die("POST", path, Some(&body));
    }

    /// Sends a request; returns the status and the JSON of the response. Status 0: the daemon has died before it
    /// responded.
    pub fn ask(&self, method: &str, path: &str, body: Option<&Value>) -> (u16, Value) {
        let (status, body) = self.converse(method, path, body);
        (status, if body.is_empty() { Value::Null } else { serde_json::from_str(&body).unwrap() })
    }

    /// Requests a response that is not JSON.
    #[track_caller]
    pub fn text(&self, path: &str) -> String {
        let (status, text) = self.converse("GET", path, None);
        assert_eq!(status, 200, "{text}");
        text
    }

    fn converse(&self, method: &str, path: &str, body: Option<&Value>) -> (u16, String) {
        let mut stream = UnixStream::connect(self.socket()).unwrap();
        stream.set_read_timeout(Some(PATIENCE + Duration::from_secs(10))).unwrap();
        let body = body.map(Value::to_string).unwrap_or_default();
        let head =
            format!("{method} /v1{path} HTTP/1.1\r\nhost: t\r\nconnection: close\r\ncontent-length: {}", body.len());
        // In one write: a refusal may be sent, and the connection closed, before the body is read.
        stream.write_all(format!("{head}\r\n\r\n{body}").as_bytes()).unwrap();
        let mut answer = String::new();
        if stream.read_to_string(&mut answer).is_err() || answer.is_empty() {
            return (0, String::new());
        }
        let (head, body) = answer.split_once("\r\n\r\n").unwrap_or_else(|| panic!("{method} {path}: {answer:?}"));
        let status = head.split(' ').nth(1).unwrap().parse().unwrap();
        (status, body.to_owned())
    }

    /// Sends a request with additional headers; returns the complete response.
    pub fn exchange(&self, method: &str, path: &str, headers: &[(&str, &str)], body: &str) -> Exchange {
        let mut stream = UnixStream::connect(self.socket()).unwrap();
        stream.set_read_timeout(Some(PATIENCE + Duration::from_secs(10))).unwrap();
        let mut request = format!("{method} {path} HTTP/1.1\r\nhost: t\r\nconnection: close\r\n");
        for (name, value) in headers {
            request += &format!("{name}: {value}\r\n");
        }
        let length = if body.is_empty() { String::new() } else { format!("content-length: {}\r\n", body.len()) };
        stream.write_all(format!("{request}{length}\r\n{body}").as_bytes()).unwrap();
        let mut answer = String::new();
        if stream.read_to_string(&mut answer).is_err() || answer.is_empty() {
            return Exchange { status: 0, head: String::new(), body: String::new() };
        }
        let (head, body) = answer.split_once("\r\n\r\n").unwrap_or_else(|| panic!("{method} {path}: {answer:?}"));
        let status = head.split(' ').nth(1).unwrap().parse().unwrap();
        Exchange { status, head: head.to_owned(), body: body.to_owned() }
    }

    pub fn get(&self, path: &str) -> (u16, Value) {
        self.ask("GET", path, None)
    }

    pub fn post(&self, path: &str, body: Value) -> (u16, Value) {
        self.ask("POST", path, Some(&body))
    }

    pub fn patch(&self, path: &str, body: Value) -> (u16, Value) {
        self.ask("PATCH", path, Some(&body))
    }

    pub fn delete(&self, path: &str) -> (u16, Value) {
        self.ask("DELETE", path, None)
    }

    /// Waits until a task, given by its response, is over; returns it.
    pub fn wait(&self, task: &Value) -> Value {
        let uuid = task["uuid"].as_str().unwrap_or_else(|| panic!("{task} is no task"));
        let begun = Instant::now();
        loop {
            let (status, task) = self.get(&format!("/tasks/{uuid}?wait=60"));
            assert_eq!(status, 200, "{task}");
            if ["done", "failed", "cancelled"].contains(&task["state"].as_str().unwrap()) {
                return task;
            }
            assert!(begun.elapsed() < PATIENCE, "{task} does not end\n{}", self.log());
        }
    }

    /// Waits until nothing is running, including background cleanup.
    pub fn settle(&self) {
        let mut quiet = 0;
        wait_until("all tasks are over", || {
            quiet = if self.get("/tasks?open=true").1 == json!([]) { quiet + 1 } else { 0 };
            quiet > 20
        });
    }

    /// Waits until a requested task is done; returns its result.
    #[track_caller]
    pub fn done(&self, answer: (u16, Value)) -> Value {
        assert_eq!(answer.0, 202, "{}\n{}", answer.1, self.log());
        let task = self.wait(&answer.1);
        assert_eq!(task["state"], "done", "{task}\n{}", self.log());
        // One form for all: the objects that a verb has created or changed, or its results for several objects.
        let result = &task["result"];
        let many = ["plugged", "unplugged", "forced"].iter().any(|key| result.get(key).is_some());
        assert!(result["uuid"].is_string() || many, "{task}");
        result.clone()
    }

    /// Waits until a requested task has failed; returns its problem.
    #[track_caller]
    pub fn failed(&self, answer: (u16, Value)) -> Value {
        assert_eq!(answer.0, 202, "{}\n{}", answer.1, self.log());
        let task = self.wait(&answer.1);
        assert_eq!(task["state"], "failed", "{task}");
        let instance = format!("/v1/tasks/{}", task["uuid"].as_str().unwrap());
        assert_eq!(task["problem"]["instance"], instance, "{task}");
        task["problem"].clone()
    }

    /// Creates a repository in a new directory of the test; returns its UUID.
    #[track_caller]
    pub fn repository(&self, name: &str) -> String {
        let path = self.room().join(name);
        fs::create_dir(&path).unwrap();
        let made = self.post("/srs", json!({ "name": name, "source": { "type": "dir", "path": path } }));
        self.done(made)["uuid"].as_str().unwrap().into()
    }
}

impl Drop for Taplined {
    fn drop(&mut self) {
        if let Some(mut process) = self.process.take() {
            process.kill().ok();
            process.wait().ok();
        }
        // Disks outlive their daemon, but must not outlive the test.
        for pid in disks::disks_of(&self.room.path().join("run/vbd")) {
            Command::new("kill").args(["-9", &pid.to_string()]).status().ok();
        }
        for pid in disks::machines_of(&self.room.path().join("run/vm")) {
            Command::new("kill").args(["-9", &pid.to_string()]).status().ok();
        }
        if std::thread::panicking() {
            eprintln!("the daemon's log:\n{}", self.log());
        }
    }
}

/// Reports that a test was not run, bypassing the capture of test output.
pub fn not_run(why: &str) {
    std::io::stderr().write_all(format!("NOT RUN: {why}\n").as_bytes()).unwrap();
}

/// Kills an existing process.
#[track_caller]
pub fn kill(pid: &impl std::fmt::Display) {
    assert!(Command::new("kill").args(["-9", &pid.to_string()]).status().unwrap().success());
}

/// Waits until a condition holds.
#[track_caller]
pub fn wait_until(what: &str, mut so: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !so() {
        assert!(begun.elapsed() < PATIENCE, "this has not come about: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}
