//! The NBD protocol (`doc/proto.md` of the NetworkBlockDevice project), as both sides need it.
//!
//! It knows nothing about sockets or disks, nor about files but those of certificates. The client's side is [`client`];
//! the server's is `transport::nbd`; [`tls`] is the encryption of both.

#![forbid(unsafe_code)]

pub mod client;
pub mod tls;
pub mod uri;
pub mod wire;
