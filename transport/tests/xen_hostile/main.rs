//! A front end of our own against `tapline-disk serve` on real Xen: what Linux's never would do, and a thousand connections.
//!
//! It runs in dom0, which is its own guest: pages granted by `/dev/xen/gntalloc`, event channels and store as any guest has
//! them. The disk's process is the installed program, looked at from outside only. TAPLINE_DISK names it; elsewhere there is
//! nothing to try, and each test says so.
//!
//! Invariants checked, by every test at its end ([`bed::Bed::end`]): the process lives, and ends when it is asked to, with
//! success; it holds what it held before the first front end came (descriptors, mappings of grants, event channels, memory
//! within bounds); it serves the next front end; nothing of the image has changed but what requests were allowed to change;
//! the disk of another process has gone on working; the store has no node more.

#![allow(clippy::cast_possible_truncation, reason = "the numbers are the test's own, and small")]
#![allow(clippy::single_range_in_vec_init, reason = "a list of what may have changed, which has one range")]

#[path = "../blkif_mock/entry.rs"]
mod entry;

mod bed;
mod cycles;
mod data;
mod deaths;
mod front;
mod grants;
mod handshake;
mod image;
mod pressure;
mod requests;
mod victim;

const OKAY: i16 = 0;
const ERROR: i16 = -1;
const UNSUPPORTED: i16 = -2;

/// `--grants` of the process.
const POLICIES: [&str; 3] = ["copy", "persistent", "map"];
