//! The statistics of a served disk: counters and histograms of every stage of a request, in a page of shared memory.
//!
//! The disk's thread is the only writer ([`Page`]); anybody who may read the file can read it at any time
//! ([`Reader`]), without asking the process and while it is stuck. The page outlives the process: the next process of
//! the disk continues to count in it, so that counters never go back.
//!
//! Nothing here knows about requests, disks or transports. A time is in nanoseconds of CLOCK_MONOTONIC ([`Clock`]).
//!
//! | file | knows |
//! |---|---|
//! | `clock` | the CPU's counter, and what it is worth in nanoseconds |
//! | `histogram` | which bucket a duration falls into, and quantiles |
//! | `layout` | where everything stands in the page |
//! | `page` | how it is written |
//! | `place` | where pages are, and how one is opened |
//! | `reader`, `snapshot` | how it is read, and what was read |
//! | `delay` | whether requests take long, from several readings |
//! | `process` | what the kernel knows of the process of a disk |
//! | `recording` | a stream of requests in a file, to be replayed |
//! | `kernel` | what a Linux kernel counts for a block device |
//! | `guest` | requests to a guest about its disks, and its answers |
//! | `beneath` | the host's block device beneath a file |
//! | `storage` | what tells that storage from all other |

#![cfg_attr(not(test), deny(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, clippy::panic))]

mod beneath;
mod clock;
mod delay;
mod guest;
mod histogram;
mod kernel;
mod layout;
mod page;
mod place;
mod process;
mod reader;
mod recording;
mod snapshot;
mod storage;

pub use beneath::{DeviceNumber, HostDevices, beneath, beneath_filesystem};
pub use clock::{Clock, Source, monotonic};
pub use delay::{Delay, Delays};
pub use guest::{BadAnswer, GuestAnswer, Listening, NotThere, question};
pub use histogram::{BUCKETS, Histogram, bucket_bounds};
pub use kernel::{Completed, DeviceCounts, DeviceLine, DeviceRates, devices, differs};
pub use layout::{Count, Kind, Outcome, RECORDS, SLOTS, STAGES, Stage};
pub use page::{Page, PageError, Slot, Spent};
pub use place::{directories, directory, of_daemon, open, pages_in};
pub use process::{is_stopped, process_status, thread_status};
pub use reader::{ReadError, Reader};
pub use recording::{Recorded, RecordingError, read_recording, write_recording};
pub use snapshot::{InFlight, KindCounts, Record, Snapshot, float};
pub use storage::storage_of;
