//! Disks that share the storage of a repository fairly, each in a process of its own: start-time fair queueing with a
//! depth, SFQ(D), without a scheduler in the middle (docs/decisions/0051).
//!
//! [`Share`] decides how many requests a disk may begin now, from what the other disks say of themselves. It has no
//! clock, no memory of others and no file, so that the tests run a hundred of them over a simulated device. [`Page`] is
//! where they say it: a slot of one cache line for each disk, which its thread writes and all others read.
//!
//! It knows nothing about requests, images and processes. Invariant: whatever is in the page, a disk may have one
//! request in flight.

#![forbid(unsafe_code)]

mod page;
mod share;

pub use page::{Owner, PAGE_LEN, Page, PageError, SLOTS, Usable};
pub use share::{Allowance, DEPTH, DEPTHS, Share, Slot, WEIGHT, WEIGHTS, cost};
