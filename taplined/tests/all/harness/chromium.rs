//! A real browser, headless, driven by its DevTools protocol over a pipe: needs no port and no library.

use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::thread;

use serde_json::{Value, json};

use super::{PATIENCE, not_run, wait_until};

const PROGRAM: &str = "chromium";

/// A browser with one page.
pub struct Browser {
    process: Child,
    input: ChildStdin,
    output: Receiver<Value>,
    session: Option<String>,
    asked: u64,
    /// Events that the browser has sent.
    events: Vec<Value>,
    _profile: tempfile::TempDir,
}

impl Browser {
    /// Starts a browser; `None` if Chromium is not installed, which is reported.
    pub fn start() -> Option<Browser> {
        if Command::new(PROGRAM).arg("--version").output().is_err() {
            not_run(&format!("the dashboard in a browser: there is no {PROGRAM}; `make prepare` installs it"));
            return None;
        }
        let profile = tempfile::Builder::new().prefix("chromium-").tempdir().unwrap();
        // It reads from descriptor 3 and writes to 4. Its own sandbox needs more than a container often has.
        let script = "exec \"$0\" \"$@\" 3<&0 4>&1 </dev/null >/dev/null";
        let mut command = Command::new("sh");
        command.args(["-c", script, PROGRAM, "--headless=new", "--remote-debugging-pipe", "--no-sandbox"]);
        command.args(["--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--disable-background-networking"]);
        command.args(["--disable-component-update", "--ignore-certificate-errors", "--window-size=1280,800"]);
        command.arg(format!("--user-data-dir={}", profile.path().display())).arg("about:blank");
        command.env("HOME", profile.path()).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut process = command.spawn().unwrap();
        let (input, said) = (process.stdin.take().unwrap(), process.stdout.take().unwrap());
        let (sender, output) = channel();
        thread::spawn(move || {
            for message in BufReader::new(said).split(0) {
                let Ok(message) = message else { return };
                if sender.send(serde_json::from_slice(&message).unwrap()).is_err() {
                    return;
                }
            }
        });
        let mut browser =
            Browser { process, input, output, session: None, asked: 0, events: Vec::new(), _profile: profile };
        browser.attach();
        Some(browser)
    }

    fn attach(&mut self) {
        let mut page = None;
        wait_until("the browser has a page", || {
            let targets = self.ask("Target.getTargets", json!({}));
            let pages = targets["targetInfos"].as_array().unwrap();
            page = pages.iter().find(|target| target["type"] == "page").map(|target| target["targetId"].clone());
            page.is_some()
        });
        let attached = self.ask("Target.attachToTarget", json!({ "targetId": page, "flatten": true }));
        self.session = attached["sessionId"].as_str().map(str::to_owned);
        for domain in ["Page", "Runtime", "Log", "Network"] {
            self.ask(&format!("{domain}.enable"), json!({}));
        }
    }

    /// Calls a method of the browser; returns the result.
    #[track_caller]
    pub fn ask(&mut self, method: &str, params: Value) -> Value {
        self.asked += 1;
        let mut message = json!({ "id": self.asked, "method": method, "params": params });
        if let Some(session) = &self.session {
            message["sessionId"] = json!(session);
        }
        self.input.write_all(format!("{message}\0").as_bytes()).unwrap();
        loop {
            let said = self.output.recv_timeout(PATIENCE).unwrap_or_else(|error| panic!("{method}: {error}"));
            if said["id"] == self.asked {
                assert!(said.get("error").is_none(), "{method}: {said}");
                return said["result"].clone();
            }
            self.events.push(said);
        }
    }

    /// Opens an address.
    pub fn open(&mut self, url: &str) {
        let gone = self.ask("Page.navigate", json!({ "url": url }));
        assert!(gone.get("errorText").is_none(), "{url}: {gone}");
    }

    /// The value of an expression in the page.
    #[track_caller]
    pub fn value(&mut self, expression: &str) -> Value {
        let asked = json!({ "expression": expression, "returnByValue": true, "awaitPromise": true });
        let answer = self.ask("Runtime.evaluate", asked);
        assert!(answer.get("exceptionDetails").is_none(), "{expression}: {answer}");
        answer["result"]["value"].clone()
    }

    /// Waits until an expression in the page is true.
    #[track_caller]
    pub fn wait_for(&mut self, what: &str, expression: &str) {
        let mut so = false;
        for _ in 0..PATIENCE.as_millis() / 50 {
            so = self.value(&format!("Boolean({expression})")) == true;
            if so {
                break;
            }
            thread::sleep(std::time::Duration::from_millis(50));
        }
        if !so {
            let page = self.value("document.body.innerText");
            panic!("this has not come about: {what}: {expression}; {:?}; {}", self.errors(), page.as_str().unwrap());
        }
    }

    /// Clicks a button by its text.
    #[track_caller]
    pub fn click(&mut self, text: &str) {
        let found = format!("[...document.querySelectorAll('button, a')].find((one) => one.textContent === {text:?})");
        self.wait_for("there is something to click", &format!("{found}?.checkVisibility() && !{found}.disabled"));
        self.value(&format!("{found}.click()"));
    }

    /// Presses a key, like a person.
    pub fn press(&mut self, key: &str) {
        let text = if key.chars().count() == 1 { key } else { "" };
        for kind in ["keyDown", "keyUp"] {
            let text = if kind == "keyDown" { text } else { "" };
            self.ask("Input.dispatchKeyEvent", json!({ "type": kind, "key": key, "text": text }));
        }
    }

    /// Saves a screenshot, which is kept.
    pub fn screenshot(&mut self, name: &str) -> PathBuf {
        let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("dashboard-{name}.png"));
        let shot = self.ask("Page.captureScreenshot", json!({}));
        let mut decode = Command::new("base64");
        decode.arg("-d").stdin(Stdio::piped()).stdout(std::fs::File::create(&path).unwrap());
        let mut decode = decode.spawn().unwrap();
        decode.stdin.take().unwrap().write_all(shot["data"].as_str().unwrap().as_bytes()).unwrap();
        assert!(decode.wait().unwrap().success());
        path
    }

    /// Errors of the page: exceptions and console errors, except for these HTTP statuses.
    pub fn errors(&mut self) -> Vec<String> {
        let is_error = |event: &&Value| match event["method"].as_str() {
            Some("Runtime.exceptionThrown") => true,
            Some("Runtime.consoleAPICalled") => event["params"]["type"] == "error",
            Some("Log.entryAdded") => event["params"]["entry"]["level"] == "error",
            _ => false,
        };
        self.events.iter().filter(is_error).map(|event| event["params"].to_string()).collect()
    }

    /// The addresses that the page has requested.
    pub fn requests(&mut self) -> Vec<String> {
        let sent = self.events.iter().filter(|event| event["method"] == "Network.requestWillBeSent");
        sent.map(|event| event["params"]["request"]["url"].as_str().unwrap().to_owned()).collect()
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        self.process.kill().ok();
        self.process.wait().ok();
    }
}

/// Forwards a port of this host to a socket, as `ssh -L` does; returns the port.
pub fn forward(socket: PathBuf) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    thread::spawn(move || {
        for near in listener.incoming() {
            let (Ok(near), Ok(far)) = (near, UnixStream::connect(&socket)) else { continue };
            join(near, far);
        }
    });
    port
}

fn join(near: TcpStream, far: UnixStream) {
    let (mut to_far, mut from_far) = (far.try_clone().unwrap(), far);
    let (mut to_near, mut from_near) = (near.try_clone().unwrap(), near);
    thread::spawn(move || {
        std::io::copy(&mut from_near, &mut to_far).ok();
        to_far.shutdown(std::net::Shutdown::Write).ok();
    });
    thread::spawn(move || {
        std::io::copy(&mut from_far, &mut to_near).ok();
        to_near.shutdown(std::net::Shutdown::Both).ok();
    });
}
