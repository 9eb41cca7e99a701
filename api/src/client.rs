//! A typed client: one function a route, over the daemon's Unix socket or over TLS, for programs that run on tokio.
//!
//! What is asked is a type of this crate and so is the answer; whatever keeps it from coming is a [`Problem`], be it
//! the daemon that refused or the daemon that is not there. A connection serves one request: it costs less than the
//! request, and nothing has to be kept alive. What is asked is asked once more where the connection broke before the
//! answer had come; what changes something has a key (`Idempotency-Key`), and is done once.

mod event;
mod exchange;
mod host;
mod remote;
mod sr;
mod sse;
mod target;
mod task;
mod token;
mod vbd;
mod vdi;
mod vm;

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

use crate::Task;

pub use event::{Events, Tiding};
pub use remote::Remote;
pub use vbd::Connector;

/// Where the daemon's socket is unless its configuration says otherwise.
pub const SOCKET: &str = "/run/tapline/taplined.sock";

/// Somebody who asks a daemon. Cheap to clone; it holds no connection.
#[derive(Clone, Debug)]
pub struct Client {
    place: Place,
}

/// Where a daemon listens.
#[derive(Clone, Debug)]
enum Place {
    /// On this host.
    Socket(PathBuf),
    /// On any.
    Remote(Arc<Remote>),
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Place::Socket(path) => path.display().fmt(f),
            Place::Remote(remote) => remote.fmt(f),
        }
    }
}

/// The answer to a verb that may take time.
#[derive(Clone, Debug, PartialEq)]
pub enum Answer<T> {
    /// It is done.
    Done(T),
    /// It has begun.
    Begun(Box<Task>),
}

impl Client {
    /// A client of the daemon of this host that listens at `socket`.
    pub fn new(socket: impl Into<PathBuf>) -> Client {
        Client { place: Place::Socket(socket.into()) }
    }

    /// A client of a daemon that listens for TLS.
    pub fn remote(remote: Remote) -> Client {
        Client { place: Place::Remote(Arc::new(remote)) }
    }
}
