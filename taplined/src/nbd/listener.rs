//! The sockets of the NBD address: a Unix socket for this host, and TCP with TLS and tokens if configured.
//!
//! Each of the two has its own connection limit, so connections over TCP never delay those of this host.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use api::Problem;
use rustix::net::sockopt;
use tokio::net::{TcpListener, TcpStream, UnixStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};

use super::negotiation::{Admission, Client};
use crate::background;
use crate::certificate::Certificate;
use crate::config::Config;
use crate::daemon::Daemon;
use crate::http::{LocalSocket, Unauthenticated, bind_remote, rest, room};

/// A peer that is gone without a word is noticed within about a minute, if nothing is being sent to it.
const KEEPALIVE_IDLE: Duration = Duration::from_secs(30);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(10);
const KEEPALIVE_COUNT: u32 = 3;

/// How long a client may read nothing while there is data for it: a backup program may wait for its own storage.
const USER_TIMEOUT_MS: u32 = 600_000;

/// The listening sockets.
#[derive(Debug)]
pub struct Listener {
    local: LocalSocket,
    remote: Vec<TcpListener>,
    certificate: Option<Arc<Certificate>>,
    local_connections: Arc<Semaphore>,
    remote_connections: Arc<Semaphore>,
    unauthenticated: Unauthenticated,
}

impl Listener {
    /// Starts listening.
    pub fn bind(config: &Config, certificate: Option<Arc<Certificate>>) -> Result<Listener, Problem> {
        let most = config.nbd.connections_max;
        let remote = config
            .nbd
            .listen
            .iter()
            .map(|address| bind_remote(address, "nbd.listen", "serving NBD"))
            .collect::<Result<_, _>>()?;
        Ok(Listener {
            local: LocalSocket::bind(config, config.nbd_socket())?,
            remote,
            certificate,
            local_connections: room(most),
            remote_connections: room(most),
            unauthenticated: Unauthenticated::among(most),
        })
    }

    /// Serves until cancelled, which ends all connections.
    pub async fn serve(&self, daemon: &Daemon) {
        // Dropped with this future.
        let (_ending, ended) = watch::channel(());
        tokio::join!(self.serve_local(daemon, &ended), self.serve_remote(daemon, &ended));
    }

    async fn serve_local(&self, daemon: &Daemon, ended: &watch::Receiver<()>) {
        // While all connections are in use, new ones wait in the socket's queue.
        while let Ok(permit) = self.local_connections.clone().acquire_owned().await {
            match self.local.accept().await {
                Ok(stream) => serve(self.of_this_host(stream), daemon, permit, ended),
                Err(error) => rest(&error).await,
            }
        }
    }

    async fn serve_remote(&self, daemon: &Daemon, ended: &watch::Receiver<()>) {
        while let Ok(permit) = self.remote_connections.clone().acquire_owned().await {
            match self.accept_remote().await {
                Ok((stream, peer)) => serve(self.of_another(stream, peer), daemon, permit, ended),
                Err(error) => rest(&error).await,
            }
        }
    }

    /// Removes the Unix socket. Called before the next daemon can have created its own.
    pub fn remove(&self) {
        self.local.remove();
    }

    /// Accepts the next connection at any address; never returns if there is none.
    async fn accept_remote(&self) -> std::io::Result<(TcpStream, SocketAddr)> {
        let all = self.remote.iter().map(|socket| Box::pin(socket.accept()));
        match self.remote.is_empty() {
            true => std::future::pending().await,
            false => futures_util::future::select_all(all).await.0,
        }
    }

    /// A user of this host, if it may use the daemon.
    fn of_this_host(&self, stream: UnixStream) -> Option<Client> {
        let caller = self.local.who(&stream).inspect_err(|problem| tracing::warn!("{problem}")).ok()?;
        Some(Client::new(Box::new(stream), Admission::Granted(caller)))
    }

    /// A client that has to prove who it is; `None` if too many of its address have not yet.
    fn of_another(&self, stream: TcpStream, peer: SocketAddr) -> Option<Client> {
        let certificate = self.certificate.as_ref()?;
        let Some(slot) = self.unauthenticated.enter(peer.ip()) else {
            tracing::debug!(%peer, "too many connections without a token from one address");
            return None;
        };
        if let Err(error) = set_options(&stream) {
            tracing::debug!(%peer, %error, "a connection has ended at once");
            return None;
        }
        Some(Client::new(Box::new(stream), Admission::ByToken { tls: certificate.current(), peer, _slot: slot }))
    }
}

fn set_options(stream: &TcpStream) -> std::io::Result<()> {
    stream.set_nodelay(true)?;
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, KEEPALIVE_IDLE)?;
    sockopt::set_tcp_keepintvl(stream, KEEPALIVE_INTERVAL)?;
    sockopt::set_tcp_keepcnt(stream, KEEPALIVE_COUNT)?;
    Ok(sockopt::set_tcp_user_timeout(stream, USER_TIMEOUT_MS)?)
}

/// Serves a client in a task of its own.
fn serve(client: Option<Client>, daemon: &Daemon, permit: OwnedSemaphorePermit, ended: &watch::Receiver<()>) {
    let Some(client) = client else { return };
    let (daemon, mut ended) = (daemon.clone(), ended.clone());
    background::spawn(async move {
        let served = tokio::select! {
            served = client.serve(&daemon) => served,
            _ = ended.changed() => Ok(()),
        };
        if let Err(error) = served {
            tracing::debug!(%error, "a connection of the NBD address ended");
        }
        drop(permit);
    });
}
