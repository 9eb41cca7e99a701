//! The sockets of the NBD address: a Unix socket for this host, and TCP with TLS and tokens if configured.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use api::Problem;
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};

use super::negotiation::{Admission, Client};
use crate::background;
use crate::certificate::Certificate;
use crate::config::Config;
use crate::daemon::Daemon;
use crate::http::{Caller, Unauthenticated, bind_local, bind_remote};

/// Pause after a failed accept, for example because of too many open files, which is temporary.
const REST: Duration = Duration::from_millis(100);

/// The listening sockets.
#[derive(Debug)]
pub struct Listener {
    local: UnixListener,
    remote: Vec<TcpListener>,
    certificate: Option<Arc<Certificate>>,
    connections: Arc<Semaphore>,
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
            local: bind_local(config, &config.nbd_socket())?,
            remote,
            certificate,
            connections: Arc::new(Semaphore::new((most as usize).min(Semaphore::MAX_PERMITS))),
            unauthenticated: Unauthenticated::among(most),
        })
    }

    /// Serves until cancelled, which ends all connections.
    pub async fn serve(&self, daemon: &Daemon) {
        // Dropped with this future.
        let (_ending, ended) = watch::channel(());
        loop {
            // While all are in use, new connections wait in the sockets' queues.
            let Ok(permit) = self.connections.clone().acquire_owned().await else { return };
            let accepted = tokio::select! {
                accepted = self.local.accept() => accepted.map(|(stream, _)| self.of_this_host(stream)),
                accepted = self.accept_remote() => accepted.map(|(stream, peer)| self.of_another(stream, peer)),
            };
            match accepted {
                Ok(Some(client)) => serve(client, daemon.clone(), permit, ended.clone()),
                Ok(None) => {}
                Err(error) => {
                    tracing::warn!(%error, "a connection could not be accepted");
                    tokio::time::sleep(REST).await;
                }
            }
        }
    }

    /// Removes the Unix socket. Called before the next daemon can have created its own.
    pub fn remove(&self, config: &Config) {
        if let Err(error) = std::fs::remove_file(config.nbd_socket()) {
            tracing::warn!(%error, "the socket could not be removed");
        }
    }

    /// Accepts the next connection at any address; never returns if there is none.
    async fn accept_remote(&self) -> std::io::Result<(TcpStream, SocketAddr)> {
        let all = self.remote.iter().map(|socket| Box::pin(socket.accept()));
        match self.remote.is_empty() {
            true => std::future::pending().await,
            false => futures_util::future::select_all(all).await.0,
        }
    }

    fn of_this_host(&self, stream: UnixStream) -> Option<Client> {
        let uid = match stream.peer_cred() {
            Ok(peer) => peer.uid(),
            Err(error) => {
                tracing::warn!(%error, "the peer's credentials could not be read");
                return None;
            }
        };
        Some(Client::new(Box::new(stream), Admission::Granted(Caller::Local { uid })))
    }

    /// A client that has to prove who it is; `None` if too many of its address have not yet.
    fn of_another(&self, stream: TcpStream, peer: SocketAddr) -> Option<Client> {
        let certificate = self.certificate.as_ref()?;
        let Some(slot) = self.unauthenticated.enter(peer.ip()) else {
            tracing::debug!(%peer, "too many connections without a token from one address");
            return None;
        };
        stream.set_nodelay(true).ok()?;
        Some(Client::new(Box::new(stream), Admission::ByToken { tls: certificate.current(), _slot: slot }))
    }
}

/// Serves a client in a task of its own.
fn serve(client: Client, daemon: Daemon, permit: OwnedSemaphorePermit, mut ended: watch::Receiver<()>) {
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
