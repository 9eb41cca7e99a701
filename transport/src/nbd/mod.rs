//! NBD: the disk for clients of the Network Block Device protocol, over Unix sockets and TCP.
//!
//! Fixed newstyle negotiation, simple and structured replies, `base:allocation`. One export, any number of clients up
//! to a limit, all of one disk. No thread and no timer. A client can block its own requests and, by hoarding memory,
//! other clients' requests longer than 1 MiB; it cannot make the server grow without bound, spin or fail. A client that
//! connects and never finishes negotiating occupies one of few slots, which it loses to the next client.
//!
//! Modules: `wire` the protocol's bytes; `option`, `handshake` the negotiation; `command`, `reply`, `transmission` the
//! requests; [`Session`] one session, all of it pure; `listener`, `connection` the sockets; `handover` the state of a
//! client for a successor process; `spare_memory` what answered requests leave to the next; [`Server`] all clients and
//! the disk's side of them.

mod command;
mod connection;
mod error;
mod export;
mod handover;
mod handshake;
mod listener;
mod memory_quota;
mod option;
mod outgoing;
mod reply;
mod server;
mod session;
mod spare_memory;
mod transmission;
mod wire;

pub use error::{BindError, DisconnectReason, Event, ProtocolError};
pub use export::{Export, REQUEST_MAX};
pub use listener::Address;
pub use memory_quota::MemoryQuota;
pub use outgoing::Outgoing;
pub use server::{Config, Server};
pub use session::{Next, Received, Session};
