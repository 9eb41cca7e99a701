//! A typed client with one function per route, over the daemon's Unix socket or over TLS, for programs that use tokio.
//!
//! Requests and responses are types of this crate; whatever prevents a response is a [`Problem`], whether the daemon
//! refused the request or could not be reached. Each connection serves one request: connecting costs less than the
//! request, and no connection has to be kept alive. A request is repeated once if the connection broke before the
//! response arrived; requests that change something carry a key (`Idempotency-Key`), so they are carried out only once.

mod backup_target;
mod event;
mod exchange;
mod host;
mod remote;
mod sr;
mod sse;
mod statistics;
mod target;
mod task;
mod token;
mod transfer;
mod vbd;
mod vdi;
mod vm;

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

use crate::Task;

pub use event::{Events, StreamItem};
pub use exchange::Stream;
pub use remote::Remote;
pub use vbd::Connector;

/// The daemon's socket unless its configuration says otherwise.
pub const SOCKET: &str = "/run/tapline/taplined.sock";

/// A client of a daemon. Cheap to clone; it holds no connection.
#[derive(Clone, Debug)]
pub struct Client {
    endpoint: Endpoint,
}

/// Where a daemon listens.
#[derive(Clone, Debug)]
enum Endpoint {
    /// A Unix socket on this host.
    Socket(PathBuf),
    /// A TLS address on any host.
    Remote(Arc<Remote>),
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Endpoint::Socket(path) => path.display().fmt(f),
            Endpoint::Remote(remote) => remote.fmt(f),
        }
    }
}

/// The response to a verb that may be long-running.
#[derive(Clone, Debug, PartialEq)]
pub enum Answer<T> {
    /// The verb has completed with this result.
    Done(T),
    /// A task has begun.
    Begun(Box<Task>),
}

impl Client {
    /// A client of this host's daemon, which listens at `socket`.
    pub fn new(socket: impl Into<PathBuf>) -> Client {
        Client { endpoint: Endpoint::Socket(socket.into()) }
    }

    /// A client of a daemon that is reached over TLS.
    pub fn remote(remote: Remote) -> Client {
        Client { endpoint: Endpoint::Remote(Arc::new(remote)) }
    }
}
