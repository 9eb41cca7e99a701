//! A front end of our own against `tapline-disk serve` on real Xen: what Linux's front end would never do, and a
//! thousand connections.
//!
//! It runs in dom0, which is its own guest: pages are granted through `/dev/xen/gntalloc`, event channels and store are
//! those of any guest. The disk's process is the installed program, observed only from outside. TAPLINE_DISK names it;
//! elsewhere there is nothing to test, and each test says so.
//!
//! Invariants checked by every test at its end ([`fixture::Fixture::end`]): the process is alive, and exits
//! successfully when asked to; it holds what it held before the first front end connected (descriptors, grant mappings,
//! event channels, memory within bounds); it serves the next front end; only the parts of the image that requests could
//! change have changed; another process's disk has continued to work; the store has no additional nodes.

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
