//! qcow2.

mod check;
mod check_bitmaps;
mod check_copied;
mod check_ledger;
mod check_refcounts;
mod check_shape;
mod check_snapshots;
mod check_walk;
mod entry;
mod header;
mod repair;
mod repair_anew;
mod repair_header;

mod layout;
pub mod unpack;

pub use check::{Report, check};
pub use repair::{Repair, repair};
