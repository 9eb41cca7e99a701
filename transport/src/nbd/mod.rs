//! NBD: the disk for whatever speaks the Network Block Device protocol, over Unix sockets and TCP.
//!
//! Fixed newstyle negotiation, simple and structured replies, `base:allocation`. One export, any number of
//! clients up to a limit, all of one disk. No thread and no timer. A client can hold up its own requests and, by
//! hoarding memory, those requests of other clients that are longer than 1 MiB; it cannot make the server grow
//! without bound, spin or fail. A client that connects and never finishes negotiating costs one of few places,
//! which it loses to the next client that comes.
//!
//! Who knows what: `wire` the protocol's bytes; `option`, `handshake` the negotiation; `command`, `reply`,
//! `transmission` the requests; [`Session`] one conversation, all of it pure; `listener`, `connection` the sockets;
//! `handover` a client as the next process is told of it; [`Server`] the clients as a whole and the disk's side of
//! them.

mod command;
mod connection;
mod error;
mod export;
mod handover;
mod handshake;
mod listener;
mod option;
mod outgoing;
mod reply;
mod room;
mod server;
mod session;
mod transmission;
mod wire;

pub use error::{BindError, End, Event, ProtocolError};
pub use export::{Export, REQUEST_MAX};
pub use listener::Address;
pub use outgoing::Outgoing;
pub use room::Room;
pub use server::{Config, Server};
pub use session::{Next, Received, Session};
