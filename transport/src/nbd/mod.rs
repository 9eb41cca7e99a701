//! NBD: serves a disk to clients of the Network Block Device protocol, over Unix sockets and TCP.
//!
//! It supports fixed newstyle negotiation, TLS, simple and structured replies, extended headers, `base:allocation`, and
//! QEMU's contexts: depths, and dirty bitmaps, which the server's owner describes ([`Bitmaps`]). There is one export,
//! for a limited number of clients, and no thread or timer. A client can block its own requests and, by hoarding
//! memory, other clients' requests longer than 1 MiB; it cannot make the server grow without bound, spin or fail. A
//! client that never finishes negotiating occupies one of few slots, which it loses to a newer client.
//!
//! Modules (crate `nbd` has the protocol's bytes): `option` and `handshake` are the negotiation; `context` is what can
//! be queried about ranges; `command`, `reply` and `transmission` are the requests; [`Session`] combines them for one
//! client, without I/O; `listener` and `connection` are the sockets, and `tls` is between them and the session of a
//! client that must use TLS; `handover` saves a client for a successor process; `spare_memory` keeps the memory of
//! answered requests; [`Server`] has all clients and is the disk's transport, and `slot` numbers them.

mod command;
mod connection;
mod context;
mod error;
mod export;
mod handover;
mod handshake;
mod listener;
mod memory_quota;
mod option;
mod origin;
mod outgoing;
mod reply;
mod server;
mod session;
mod slot;
mod spare_memory;
mod tls;
mod transmission;

use ::nbd::wire;

pub use ::nbd::tls::{Credentials, CredentialsError, Part, ServerTls as Tls};
pub use context::{AllDirty, BITMAP_NAME_MAX, BITMAPS_MAX, Bitmaps};
pub use error::{BindError, DisconnectReason, Event, ProtocolError};
pub use export::{Export, REQUEST_MAX};
pub use listener::Address;
pub use memory_quota::MemoryQuota;
pub use outgoing::Outgoing;
pub use server::{Config, Server};
pub use session::{Next, Received, Session};
