//! The NBD address of the daemon: every VDI and snapshot to which no guest writes, read-only, as an export named by its
//! UUID or its name.
//!
//! A client negotiates with the daemon until it names an export. From then on it talks to a disk process, which the
//! daemon has plugged for it ([`crate::reader`]): a VBD like any other, with its lease, limits, share and statistics.
//! The daemon decrypts, forwards, and knows nothing about requests.
//!
//! 1. The VBD is created, marked as one for the NBD address, and plugged. *If killed after this:* the next daemon
//!    removes it ([`crate::reader::remove_left_over`]).
//! 2. Clients of the same VDI share it, unless they want other dirty bitmaps. After the last one it is unplugged and
//!    removed.

mod contexts;
mod listener;
mod negotiation;
mod process;

pub use listener::Listener;
