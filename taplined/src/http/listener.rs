//! The listeners of the API, and their shutdown: a Unix socket ([`local`]), and TCP with TLS if configured
//! ([`remote`]).
//!
//! Each has its own connection limit, so connections over TCP never delay those of this host.

mod local;
mod remote;
mod unauthenticated;

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use api::Problem;
use axum::response::Response;
use hyper::Request;
use hyper::body::Incoming;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::{Semaphore, watch};

use crate::certificate::Certificate;
use crate::config::Config;
use crate::daemon::Daemon;
use crate::panics;
use local::Local;
use remote::Remote;

pub use local::LocalSocket;
pub use remote::bind as bind_remote;
pub use unauthenticated::{Unauthenticated, UnauthenticatedSlot};

/// Time limit for a client to send a request after connecting or after the last response, and to send the body.
pub const REQUEST_TIMEOUT: Duration = Duration::from_secs(60);

/// Time limit for connections to end when the daemon stops.
const TO_END: Duration = Duration::from_secs(5);

/// Pause after a failed accept, for example because of too many open files, which is temporary.
const REST: Duration = Duration::from_millis(100);

/// All listeners of the API.
#[derive(Debug)]
pub struct Listener {
    local: Local,
    remote: Option<Arc<Remote>>,
    certificate: Option<Arc<Certificate>>,
}

/// SIGTERM and SIGINT, which stop the daemon, and SIGHUP, which reloads the certificate.
#[derive(Debug)]
pub struct Signals {
    terminate: Signal,
    interrupt: Signal,
    hangup: Signal,
}

impl Signals {
    /// Installs the handlers, so that the signals no longer end the process by themselves.
    pub fn handle() -> Result<Signals, Problem> {
        let handle = |kind| signal(kind).map_err(|error| Problem::failed("handle signals", error));
        Ok(Signals {
            terminate: handle(SignalKind::terminate())?,
            interrupt: handle(SignalKind::interrupt())?,
            hangup: handle(SignalKind::hangup())?,
        })
    }

    /// Waits for a signal that stops the daemon; reloads the certificate on SIGHUP.
    async fn end(&mut self, certificate: Option<&Certificate>) {
        loop {
            tokio::select! {
                _ = self.terminate.recv() => return,
                _ = self.interrupt.recv() => return,
                _ = self.hangup.recv() => match certificate {
                    Some(certificate) => certificate.reload().await,
                    None => tracing::info!("nothing to reload: there is no certificate"),
                },
            }
        }
    }
}

impl Listener {
    /// Starts listening, replacing the socket of a daemon that no longer exists: a lock ensures that there is only one
    /// daemon.
    pub fn bind(config: &Config, daemon: &Daemon, certificate: Option<Arc<Certificate>>) -> Result<Listener, Problem> {
        let remote = certificate.as_ref().map(|certificate| Remote::bind(config, certificate, daemon.tokens.clone()));
        Ok(Listener { local: Local::bind(config)?, remote: remote.transpose()?.map(Arc::new), certificate })
    }

    /// Serves until a signal stops the daemon, then waits for requests in progress.
    pub async fn serve(self, daemon: Daemon, mut signals: Signals) {
        let router = super::router(daemon);
        let (ending, ended) = watch::channel(());
        let remote = self.remote.as_ref().map(|remote| remote.serve(&router, &ended));
        tokio::select! {
            () = signals.end(self.certificate.as_deref()) => {}
            () = self.local.serve(&router, &ended) => {}
        }
        drop((remote, ended));
        self.local.remove();
        ending.send_replace(());
        if tokio::time::timeout(TO_END, ending.closed()).await.is_err() {
            tracing::info!("disconnecting remaining clients");
        }
    }
}

/// A limit on the number of connections.
pub fn room(connections: u32) -> Arc<Semaphore> {
    Arc::new(Semaphore::new((connections as usize).min(Semaphore::MAX_PERMITS)))
}

/// Reports a failed accept, and pauses.
pub async fn rest(error: &std::io::Error) {
    tracing::warn!(%error, "a connection could not be accepted");
    tokio::time::sleep(REST).await;
}

/// Serves HTTP until the connection ends; when the daemon stops, only until the current request is answered.
async fn converse<IO, A, F>(stream: IO, answer: A, mut end: watch::Receiver<()>)
where
    IO: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    A: Fn(Request<Incoming>) -> F,
    F: Future<Output = Result<Response, Infallible>>,
{
    let mut http = hyper::server::conn::http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(REQUEST_TIMEOUT);
    let service = hyper::service::service_fn(|request: Request<Incoming>| {
        let name = format!("the request {} {}", request.method(), request.uri().path());
        panics::during(name, answer(request))
    });
    let mut connection = std::pin::pin!(http.serve_connection(TokioIo::new(stream), service).with_upgrades());
    let done = tokio::select! {
        done = connection.as_mut() => done,
        _ = end.changed() => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = done {
        tracing::debug!(%error, "a connection ended");
    }
}
