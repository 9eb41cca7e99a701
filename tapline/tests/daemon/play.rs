//! A daemon that plays recorded responses: a real HTTP server on a Unix socket, with the API's own types.
//!
//! Each response is for one request, which must be the next one received; requests are recorded for the test to check.

use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::{Arc, Mutex};

use http_body_util::{BodyExt, Full};
use hyper::body::{Bytes, Incoming};
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use serde::Serialize;
use serde_json::Value;

/// A response and the request that it is for.
#[derive(Clone)]
pub struct Scene {
    method: &'static str,
    target: String,
    status: u16,
    body: Vec<u8>,
    end: End,
    /// Whether it is for any number of requests, in any order.
    lasts: bool,
}

/// How a response ends.
#[derive(Clone, Copy, Debug, PartialEq)]
enum End {
    /// The response is complete.
    Whole,
    /// The response never comes.
    Held,
    /// The response is complete, but late: tasks that take less time show no progress.
    Late,
    /// The connection is closed before the response is complete.
    Cut,
}

/// A received request.
#[derive(Clone, Debug, PartialEq)]
pub struct Received {
    /// The method and the target: `GET /v1/host`.
    pub what: String,
    /// The body; null if there is none.
    pub body: Value,
    /// The value of the header `Last-Event-ID`.
    pub last_event_id: Option<String>,
}

/// The daemon that plays the scenes.
pub struct Played {
    directory: tempfile::TempDir,
    scenes: Arc<Mutex<VecDeque<Scene>>>,
    asked: Arc<Mutex<Vec<Received>>>,
}

/// A response with status 200.
pub fn ok(method: &'static str, target: &str, body: &impl Serialize) -> Scene {
    scene(method, target, 200, serde_json::to_vec(body).unwrap())
}

/// A response with status 202: a task has begun.
pub fn begun(method: &'static str, target: &str, task: &api::Task) -> Scene {
    scene(method, target, 202, serde_json::to_vec(task).unwrap())
}

/// A refusal with this problem.
pub fn refused(method: &'static str, target: &str, problem: &api::Problem) -> Scene {
    scene(method, target, problem.code.http_status(), serde_json::to_vec(problem).unwrap())
}

/// A response with any status.
pub fn scene(method: &'static str, target: &str, status: u16, body: impl Into<Vec<u8>>) -> Scene {
    Scene { method, target: format!("/v1/{target}"), status, body: body.into(), end: End::Whole, lasts: false }
}

/// No response, for as long as the client waits.
pub fn held(method: &'static str, target: &str) -> Scene {
    Scene { end: End::Held, ..scene(method, target, 200, "") }
}

/// Delays a scene by more than half a second.
pub fn late(scene: Scene) -> Scene {
    Scene { end: End::Late, ..scene }
}

/// Closes the connection instead of responding.
pub fn cut(method: &'static str, target: &str) -> Scene {
    Scene { end: End::Cut, ..scene(method, target, 200, "") }
}

impl Played {
    /// Serves these scenes, in this order.
    pub fn new(scenes: impl IntoIterator<Item = Scene>) -> Played {
        let directory = tempfile::tempdir().unwrap();
        let played =
            Played { directory, scenes: Arc::new(Mutex::new(scenes.into_iter().collect())), asked: Arc::default() };
        let listener = std::os::unix::net::UnixListener::bind(played.socket()).unwrap();
        let (scenes, asked) = (played.scenes.clone(), played.asked.clone());
        // It ends with the test's process.
        std::thread::spawn(move || serve(listener, scenes, asked));
        played
    }

    /// Serves these scenes in any order and any number of times.
    pub fn lasting(scenes: impl IntoIterator<Item = Scene>) -> Played {
        Played::new(scenes.into_iter().map(|scene| Scene { lasts: true, ..scene }))
    }

    /// The path of the daemon's socket.
    pub fn socket(&self) -> PathBuf {
        self.directory.path().join("taplined.sock")
    }

    /// Runs `tapline` with these arguments against it.
    pub fn run(&self, words: &[&str]) -> Output {
        run(&self.socket(), words)
    }

    /// Starts `tapline` with these arguments against it.
    pub fn start(&self, words: &[&str]) -> Child {
        let mut tapline = Command::new(env!("CARGO_BIN_EXE_tapline"));
        tapline.args(words).env("TAPLINE_SOCKET", self.socket()).env_remove("TAPLINE_CONNECT").stdin(Stdio::null());
        tapline.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    }

    /// Waits until this many requests have been received.
    pub fn wait_for(&self, count: usize) {
        while self.asked.lock().unwrap().len() < count {
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
    }

    /// The received requests; all scenes must have been played.
    pub fn received(&self) -> Vec<Received> {
        assert!(self.scenes.lock().unwrap().is_empty(), "not everything was asked: {:?}", self.asked.lock().unwrap());
        self.asked.lock().unwrap().clone()
    }
}

/// Runs `tapline` with these arguments against the daemon at `socket`, without a terminal.
pub fn run(socket: &Path, words: &[&str]) -> Output {
    let mut tapline = Command::new(env!("CARGO_BIN_EXE_tapline"));
    tapline.args(words).env("TAPLINE_SOCKET", socket).env_remove("TAPLINE_CONNECT").stdin(Stdio::null());
    tapline.output().unwrap()
}

/// Standard output of a command that must have succeeded.
pub fn out(output: &Output) -> String {
    assert_eq!(output.status.code(), Some(0), "{}", err(output));
    String::from_utf8(output.stdout.clone()).unwrap()
}

/// Standard error of a command.
pub fn err(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

#[tokio::main(flavor = "current_thread")]
async fn serve(
    listener: std::os::unix::net::UnixListener,
    scenes: Arc<Mutex<VecDeque<Scene>>>,
    asked: Arc<Mutex<Vec<Received>>>,
) {
    listener.set_nonblocking(true).unwrap();
    let listener = tokio::net::UnixListener::from_std(listener).unwrap();
    loop {
        let (stream, _) = listener.accept().await.unwrap();
        let (scenes, asked) = (scenes.clone(), asked.clone());
        let service = hyper::service::service_fn(move |request| play(request, scenes.clone(), asked.clone()));
        tokio::spawn(hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(stream), service));
    }
}

/// Takes the scene for a request.
fn next(scenes: &mut VecDeque<Scene>, what: &str) -> Option<Scene> {
    match scenes.iter().find(|scene| scene.lasts && what == format!("{} {}", scene.method, scene.target)) {
        Some(lasting) => Some(lasting.clone()),
        None if scenes.front().is_some_and(|scene| scene.lasts) => None,
        None => scenes.pop_front(),
    }
}

async fn play(
    request: Request<Incoming>,
    scenes: Arc<Mutex<VecDeque<Scene>>>,
    asked: Arc<Mutex<Vec<Received>>>,
) -> Result<Response<Full<Bytes>>, String> {
    let what = format!("{} {}", request.method(), request.uri());
    let last_event_id = request.headers().get("last-event-id").map(|id| id.to_str().unwrap().to_owned());
    let body = request.into_body().collect().await.unwrap().to_bytes();
    let body = if body.is_empty() { Value::Null } else { serde_json::from_slice(&body).unwrap() };
    asked.lock().unwrap().push(Received { what: what.clone(), body, last_event_id });
    let scene = next(&mut scenes.lock().unwrap(), &what);
    match scene.as_ref().map(|scene| scene.end) {
        Some(End::Held) => std::future::pending::<()>().await,
        Some(End::Late) => tokio::time::sleep(std::time::Duration::from_millis(600)).await,
        Some(End::Cut) => return Err("cut".into()),
        _ => {}
    }
    let (status, body) = match scene {
        Some(scene) if what == format!("{} {}", scene.method, scene.target) => (scene.status, scene.body),
        other => {
            let expected = other.map_or("nothing".into(), |scene| format!("{} {}", scene.method, scene.target));
            (500, format!("{{\"code\":\"internal\",\"detail\":\"the play has {expected}, not {what}\"}}").into_bytes())
        }
    };
    Ok(Response::builder().status(status).body(Full::new(body.into())).unwrap())
}
