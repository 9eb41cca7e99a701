//! The Unix socket of the API: who may, by what the kernel says of them, and how many at a time.

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
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tower::ServiceExt;

use super::super::Refusal;
use super::super::asker::{Asker, is_own};
use super::{REST, converse, room};
use crate::account;
use crate::config::Config;

/// The socket.
#[derive(Debug)]
pub struct Local {
    socket: UnixListener,
    path: PathBuf,
    /// Whether the mode of the socket lets in only those who may.
    group: bool,
    connections: Arc<Semaphore>,
}

impl Local {
    /// Listens.
    pub fn bind(config: &Config) -> Result<Local, Problem> {
        let path = config.socket();
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
        let connections = room(config.api.connections_max);
        Ok(Local { socket, path, group: config.api.group.is_some(), connections })
    }

    /// Serves for as long as it is waited for.
    pub async fn serve(&self, router: &Router, ended: &watch::Receiver<()>) {
        loop {
            // No connection is taken for which there is no room: it waits in the socket's queue.
            let permit = self.connections.clone().acquire_owned().await;
            match (permit, self.socket.accept().await) {
                (Ok(permit), Ok((stream, _))) => self.take(stream, permit, router.clone(), ended.clone()),
                (_, Err(error)) => {
                    tracing::warn!(%error, "a connection could not be taken");
                    tokio::time::sleep(REST).await;
                }
                (Err(_), _) => return,
            }
        }
    }

    /// The socket goes before the next daemon can have made its own.
    pub fn remove(&self) {
        if let Err(error) = std::fs::remove_file(&self.path) {
            tracing::warn!(%error, "the socket could not be removed");
        }
    }

    /// Serves a connection, beside all others.
    fn take(&self, stream: UnixStream, permit: OwnedSemaphorePermit, router: Router, end: watch::Receiver<()>) {
        let who = self.who(&stream);
        tokio::spawn(async move {
            let answer = |request: hyper::Request<Incoming>| {
                let (router, who) = (router.clone(), who.clone());
                async move {
                    let mut request = Request::from(request.map(Body::new));
                    match who {
                        Ok(asker) => {
                            request.extensions_mut().insert(asker);
                            router.oneshot(request).await
                        }
                        Err(problem) => Ok(Refusal(problem).into_response()),
                    }
                }
            };
            converse(stream, answer, end).await;
            drop(permit);
        });
    }

    /// The peer, if it may use the API: root, the daemon's own user, and whomever the group of the socket lets in.
    fn who(&self, stream: &UnixStream) -> Result<Asker, Problem> {
        let peer = stream.peer_cred().map_err(|error| Problem::failed("see who has connected", error))?;
        let uid = peer.uid();
        if is_own(uid) || self.group {
            return Ok(Asker::Local { uid });
        }
        let what = format!("user {uid} may not use this API");
        Err(Problem::new(Code::Forbidden, what).advise("ask as root, or set api.group in the daemon's configuration"))
    }
}
