//! The NBD protocol (`doc/proto.md` of the NetworkBlockDevice project), as both sides need it.
//!
//! It knows nothing about sockets, disks or files. The server's side is `transport::nbd`.

#![forbid(unsafe_code)]

pub mod wire;
