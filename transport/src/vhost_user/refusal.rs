//! Why a request of a front-end is refused.
//!
//! It knows nothing about the effects of messages. Invariant: each reason states what was requested and what is wrong
//! with it.

use super::dirty_log::LogError;
use super::inflight;
use super::message::Malformed;
use super::table::RegionError;

/// Why a message is refused.
#[derive(Debug, thiserror::Error)]
pub enum Refusal {
    #[error(transparent)]
    Malformed(Malformed),
    #[error("cannot change the memory table")]
    Region(#[source] RegionError),
    #[error("there is no queue {0}")]
    NoQueue(u32),
    #[error("features {0:#x} were not offered")]
    Features(u64),
    #[error("queue {0} is running")]
    Running(u32),
    #[error("invalid {what} {value} for queue {queue}")]
    Value { queue: u32, what: &'static str, value: u32 },
    #[error("the ring of queue {0} is not in guest memory, or not aligned")]
    Ring(u32),
    #[error("dirty logging was not negotiated")]
    LogNotNegotiated,
    #[error("cannot use the dirty log")]
    Log(#[source] LogError),
    #[error("the file descriptor that reports writes to the dirty log is not an eventfd or pipe")]
    LogFdNotSignal,
    #[error("cannot use the file descriptor that reports writes to the dirty log")]
    LogFd(#[source] std::io::Error),
    #[error("queue {0} has no kick: this server does not poll for a driver that cannot notify")]
    NoKick(u32),
    #[error("the file descriptor for queue {0} is not an eventfd or pipe")]
    NotSignal(u32),
    #[error("cannot use the file descriptor for queue {queue}")]
    Fd {
        queue: u32,
        #[source]
        source: std::io::Error,
    },
    #[error("the configuration space is read-only")]
    ReadOnlyConfig,
    #[error("cannot use the back-end channel")]
    Backend(#[source] std::io::Error),
    #[error("a record of requests in flight was not negotiated")]
    NotNegotiated,
    #[error("cannot use the record of requests in flight")]
    Inflight(#[source] inflight::InflightRegionError),
}
