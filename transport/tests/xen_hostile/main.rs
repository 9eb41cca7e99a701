//! A front end of our own against `tapline-disk serve` on real Xen: actions that Linux's front end never performs, and
//! a thousand connections.
//!
//! It runs in dom0, which is its own guest: it grants pages through `/dev/xen/gntalloc`, and uses event channels and
//! the store like any guest. The disk's process is the installed program, observed only from outside. TAPLINE_DISK
//! names it; without that variable each test prints that it is skipped.
//!
//! Invariants checked by every test at its end ([`fixture::Fixture::end`]): the process is running, and exits
//! successfully on SIGTERM; it holds what it held before the first front end connected (descriptors, grant mappings,
//! event channels, memory within bounds); it serves the next front end; only the parts of the image that requests could
//! change have changed; another process's disk still works; the store has no additional nodes.

#![allow(clippy::cast_possible_truncation, reason = "the test's own numbers are small")]
#![allow(clippy::single_range_in_vec_init, reason = "a list of ranges that happens to have one element")]

#[path = "../blkif_mock/entry.rs"]
mod entry;

mod cycles;
mod data;
mod deaths;
mod disk_process;
mod fixture;
mod front;
mod grants;
mod handshake;
mod image;
mod pressure;
mod requests;

const OKAY: i16 = 0;
const ERROR: i16 = -1;
const UNSUPPORTED: i16 = -2;

/// `--grants` of the process.
const POLICIES: [&str; 3] = ["copy", "persistent", "map"];
