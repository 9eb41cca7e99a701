//! A typed client: one function a route, over the daemon's Unix socket, for programs that run on tokio.
//!
//! What is asked is a type of this crate and so is the answer; whatever keeps it from coming is a [`Problem`], be it the
//! daemon that refused or the daemon that is not there. A connection serves one request: it costs less than the request,
//! and nothing has to be kept alive. Nothing is asked twice by itself but what changes nothing.

mod event;
mod exchange;
mod host;
mod sr;
mod sse;
mod target;
mod task;
mod vbd;
mod vdi;
mod vm;

use std::path::{Path, PathBuf};

use crate::Task;

pub use event::{Events, Tiding};
pub use vbd::Connector;

/// Where the daemon's socket is unless its configuration says otherwise.
pub const SOCKET: &str = "/run/tapline/taplined.sock";

/// Somebody who asks a daemon. Cheap to clone; it holds no connection.
#[derive(Clone, Debug)]
pub struct Client {
    socket: PathBuf,
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
    /// A client of the daemon that listens at `socket`.
    pub fn new(socket: impl Into<PathBuf>) -> Client {
        Client { socket: socket.into() }
    }

    /// Where the daemon listens.
    pub fn socket(&self) -> &Path {
        &self.socket
    }
}
