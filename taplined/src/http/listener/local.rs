//! The API's Unix socket: authenticates callers by their kernel credentials and limits connections.

use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::sync::Arc;

use api::{Code, Problem};
use axum::Router;
use axum::body::Body;
use axum::extract::Request;
use axum::response::IntoResponse;
use hyper::body::Incoming;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{Semaphore, watch};
use tower::ServiceExt;

use super::super::Refusal;
use super::super::caller::Caller;
use super::{converse, rest, room};
use crate::account::{self, is_own};
use crate::background;
use crate::config::Config;

/// The fraction of connections that is reserved for root.
const FOR_ROOT: u32 = 10;

/// A Unix socket for users of this host: root, the daemon's own user and members of the configured group.
#[derive(Debug)]
pub struct LocalSocket {
    socket: UnixListener,
    path: PathBuf,
    /// Whether the socket's mode already restricts access to the group.
    group: bool,
}

/// The API at its Unix socket.
#[derive(Debug)]
pub struct Local {
    socket: LocalSocket,
    connections: Arc<Semaphore>,
    /// Limits on connections of users other than root: active ones, and those that may wait for one.
    others: Arc<Semaphore>,
    waiting: Arc<Semaphore>,
}

impl LocalSocket {
    /// Listens at a path, replacing the socket of a daemon that no longer exists.
    pub fn bind(config: &Config, path: PathBuf) -> Result<LocalSocket, Problem> {
        let tried = || format!("listen at {}", path.display());
        match std::fs::remove_file(&path) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(Problem::failed(tried(), error)),
            _ => {}
        }
        let socket = UnixListener::bind(&path).map_err(|error| Problem::failed(tried(), error))?;
        let mode = if config.api.group.is_some() { 0o660 } else { 0o600 };
        if let Some(group) = &config.api.group {
            let gid = account::group("api.group", group)?;
            std::os::unix::fs::chown(&path, None, Some(gid)).map_err(|error| Problem::failed(tried(), error))?;
        }
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode))
            .map_err(|error| Problem::failed(tried(), error))?;
        Ok(LocalSocket { socket, path, group: config.api.group.is_some() })
    }

    /// Accepts the next connection.
    pub async fn accept(&self) -> io::Result<UnixStream> {
        self.socket.accept().await.map(|(stream, _)| stream)
    }

    /// Removes the socket. Called before the next daemon can have created its own.
    pub fn remove(&self) {
        if let Err(error) = std::fs::remove_file(&self.path) {
            tracing::warn!(%error, path = %self.path.display(), "the socket could not be removed");
        }
    }

    /// The peer, if it may use the daemon: root, the daemon's own user, and members of the socket's group.
    pub fn who(&self, stream: &UnixStream) -> Result<Caller, Problem> {
        let peer = stream.peer_cred().map_err(|error| Problem::failed("get the peer's credentials", error))?;
        let uid = peer.uid();
        if is_own(uid) || self.group {
            return Ok(Caller::Local { uid });
        }
        let what = format!("user {uid} may not use this API");
        Err(Problem::new(Code::Forbidden, what).advise("do it as root, or set api.group in the daemon's configuration"))
    }
}

impl Local {
    /// Starts listening, with the configured group's permissions.
    pub fn bind(config: &Config) -> Result<Local, Problem> {
        let socket = LocalSocket::bind(config, config.socket())?;
        let all = config.api.connections_max;
        let others = all.saturating_sub(all / FOR_ROOT);
        Ok(Local { socket, connections: room(all), others: room(others), waiting: room(all) })
    }

    /// Serves until cancelled.
    pub async fn serve(&self, router: &Router, ended: &watch::Receiver<()>) {
        loop {
            // While there is no free connection even for root, new ones wait in the socket's queue.
            let permit = self.connections.clone().acquire_owned().await;
            match (permit, self.socket.accept().await) {
                (Ok(permit), Ok(stream)) => match self.socket.who(&stream) {
                    Ok(Caller::Local { uid }) if !is_own(uid) => self.admit(stream, uid, router.clone(), ended.clone()),
                    who => serve(stream, who, permit, router.clone(), ended.clone()),
                },
                (_, Err(error)) => rest(&error).await,
                (Err(_), _) => return,
            }
        }
    }

    /// Removes the socket. Called before the next daemon can have created its own.
    pub fn remove(&self) {
        self.socket.remove();
    }

    /// Serves a connection of a group member when there is capacity: members with long-lived connections delay each
    /// other, but never root. Connections beyond the queue's limit are closed.
    fn admit(&self, stream: UnixStream, uid: u32, router: Router, end: watch::Receiver<()>) {
        let (others, connections) = (self.others.clone(), self.connections.clone());
        let at_once = others.clone().try_acquire_owned().ok();
        let waits = self.waiting.clone().try_acquire_owned().ok().filter(|_| at_once.is_none());
        if at_once.is_none() && waits.is_none() {
            return tracing::debug!(uid, "closing a connection: too many are waiting");
        }
        background::spawn(async move {
            let permit = match at_once {
                Some(permit) => Ok(permit),
                None => others.acquire_owned().await,
            };
            let permits = (permit, connections.acquire_owned().await);
            drop(waits);
            serve(stream, Ok(Caller::Local { uid }), permits, router, end);
        });
    }
}

/// Serves a connection in a task of its own.
fn serve(
    stream: UnixStream,
    who: Result<Caller, Problem>,
    permits: impl Send + 'static,
    router: Router,
    end: watch::Receiver<()>,
) {
    background::spawn(async move {
        let answer = |request: hyper::Request<Incoming>| {
            let (router, who) = (router.clone(), who.clone());
            async move {
                let mut request = Request::from(request.map(Body::new));
                match who {
                    Ok(caller) => {
                        request.extensions_mut().insert(caller);
                        router.oneshot(request).await
                    }
                    Err(problem) => Ok(Refusal(problem).into_response()),
                }
            }
        };
        converse(stream, answer, end).await;
        drop(permits);
    });
}
