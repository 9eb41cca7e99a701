//! Storage as a matter of time: how long a device takes for requests, and which transfer sizes suit it.
//!
//! It knows no files, no requests of guests and no clock: time is a number of nanoseconds that callers count. Nothing
//! is random but where a seed says so, so that each run gives the same figures.

#![forbid(unsafe_code)]
#![cfg_attr(not(test), deny(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, clippy::panic))]

mod fit;
mod load;
mod model;
mod preset;

pub use fit::{Fit, Point, Progress, fit};
pub use load::{Load, Pattern, Policy, throughput};
pub use model::{Device, Spec};
pub use preset::Preset;
