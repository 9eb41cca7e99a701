//! The Unix socket of the API: who may, how many at a time, how long they may take to ask, and when it ends.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use api::{Code, Problem};
use axum::Router;
use axum::body::Body;
use axum::extract::Request;
use axum::response::IntoResponse;
use hyper::body::Incoming;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::{UnixListener, UnixStream};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tower::ServiceExt;

use super::Refusal;
use crate::config::Config;
use crate::daemon::Daemon;

/// How long a client may take to ask, once it has connected or was answered.
const TO_ASK: Duration = Duration::from_secs(60);

/// How long connections may take to end when the daemon does.
const TO_END: Duration = Duration::from_secs(5);

/// The socket.
#[derive(Debug)]
pub struct Listener {
    socket: UnixListener,
    path: PathBuf,
    /// Whether the mode of the socket lets in only those who may.
    group: bool,
    connections: Arc<Semaphore>,
}

/// SIGTERM or SIGINT.
#[derive(Debug)]
pub struct Stop {
    terminate: Signal,
    interrupt: Signal,
}

impl Stop {
    /// From now on they do not end the process by themselves.
    pub fn on_signals() -> Result<Stop, Problem> {
        let handle = |kind| signal(kind).map_err(|error| Problem::failed("handle SIGTERM", error));
        Ok(Stop { terminate: handle(SignalKind::terminate())?, interrupt: handle(SignalKind::interrupt())? })
    }

    /// Waits for one.
    async fn wait(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }
}

impl Listener {
    /// Listens, in the place of a daemon that is no more: there is only one, which a lock sees to.
    pub fn bind(config: &Config) -> Result<Listener, Problem> {
        let path = config.socket();
        let tried = || format!("listen at {}", path.display());
        match std::fs::remove_file(&path) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(Problem::failed(tried(), error)),
            _ => {}
        }
        let socket = UnixListener::bind(&path).map_err(|error| Problem::failed(tried(), error))?;
        let mode = if config.api.group.is_some() { 0o660 } else { 0o600 };
        if let Some(group) = &config.api.group {
            let gid = group_id("api.group", group)?;
            std::os::unix::fs::chown(&path, None, Some(gid)).map_err(|error| Problem::failed(tried(), error))?;
        }
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode))
            .map_err(|error| Problem::failed(tried(), error))?;
        let connections = usize::try_from(config.api.connections_max).unwrap_or(usize::MAX);
        let connections = Arc::new(Semaphore::new(connections.min(Semaphore::MAX_PERMITS)));
        Ok(Listener { socket, path, group: config.api.group.is_some(), connections })
    }

    /// Serves until it is to stop; then lets those who are being answered come to their end.
    pub async fn serve(self, daemon: Daemon, mut stop: Stop) -> Result<(), Problem> {
        let router = super::router(daemon);
        let (ending, ended) = watch::channel(());
        loop {
            // No connection is taken for which there is no room: it waits in the socket's queue.
            let permit = self.connections.clone().acquire_owned();
            let accepted = tokio::select! {
                () = stop.wait() => break,
                accepted = async { (permit.await, self.socket.accept().await) } => accepted,
            };
            match accepted {
                (Ok(permit), Ok((stream, _))) => self.take(stream, permit, router.clone(), ended.clone()),
                (_, Err(error)) => {
                    // Too many open files, for example: it passes.
                    tracing::warn!(%error, "a connection could not be taken");
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
                (Err(_), _) => break,
            }
        }
        drop(ended);
        // It goes before the next daemon can have made its own.
        if let Err(error) = std::fs::remove_file(&self.path) {
            tracing::warn!(%error, "the socket could not be removed");
        }
        ending.send_replace(());
        if tokio::time::timeout(TO_END, ending.closed()).await.is_err() {
            tracing::info!("clients are cut off");
        }
        Ok(())
    }

    /// Serves a connection, beside all others.
    fn take(&self, stream: UnixStream, permit: OwnedSemaphorePermit, router: Router, mut end: watch::Receiver<()>) {
        let may = self.may(&stream);
        tokio::spawn(async move {
            let service = hyper::service::service_fn(move |request: hyper::Request<Incoming>| {
                let (router, may) = (router.clone(), may.clone());
                async move {
                    match may {
                        Ok(()) => router.oneshot(Request::from(request.map(Body::new))).await,
                        Err(problem) => Ok(Refusal(problem).into_response()),
                    }
                }
            });
            let mut http = hyper::server::conn::http1::Builder::new();
            http.timer(TokioTimer::new()).header_read_timeout(TO_ASK);
            let mut connection = std::pin::pin!(http.serve_connection(TokioIo::new(stream), service));
            let done = tokio::select! {
                done = connection.as_mut() => done,
                _ = end.changed() => {
                    connection.as_mut().graceful_shutdown();
                    connection.await
                }
            };
            if let Err(error) = done {
                tracing::debug!(%error, "a connection has ended");
            }
            drop(permit);
        });
    }

    /// Whether the peer may use the API: root, the daemon's own user, and whomever the group of the socket lets in.
    fn may(&self, stream: &UnixStream) -> Result<(), Problem> {
        let peer = stream.peer_cred().map_err(|error| Problem::failed("see who has connected", error))?;
        let own = rustix::process::geteuid().as_raw();
        if peer.uid() == 0 || peer.uid() == own || self.group {
            return Ok(());
        }
        let what = format!("user {} may not use this API", peer.uid());
        Err(Problem::new(Code::Forbidden, what).advise("ask as root, or set api.group in the daemon's configuration"))
    }
}

/// The number of the group that a setting names, from group(5).
pub fn group_id(setting: &str, name: &str) -> Result<u32, Problem> {
    let path = Path::new("/etc/group");
    let groups = std::fs::read_to_string(path).map_err(|error| Problem::failed("read /etc/group", error))?;
    let found = groups.lines().find_map(|line| {
        let mut fields = line.split(':');
        (fields.next() == Some(name)).then(|| fields.nth(1).and_then(|gid| gid.parse().ok())).flatten()
    });
    found.ok_or_else(|| Problem::new(Code::Invalid, format!("{setting}: there is no group {name}")))
}
