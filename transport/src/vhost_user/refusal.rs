//! Why a front-end is told "no".
//!
//! Knows nothing about what a message does. Invariant: each reason names what was asked and what is wrong with it.

use super::inflight;
use super::message::Malformed;
use super::table::BadRegion;

/// Why a message is answered with "no".
#[derive(Debug, thiserror::Error)]
pub enum Refusal {
    #[error(transparent)]
    Malformed(Malformed),
    #[error("the memory table cannot change")]
    Region(#[source] BadRegion),
    #[error("there is no queue {0}")]
    NoQueue(u32),
    #[error("features {0:#x} were not offered")]
    Features(u64),
    #[error("queue {0} is running")]
    Running(u32),
    #[error("queue {queue} cannot have {what} {value}")]
    Value { queue: u32, what: &'static str, value: u32 },
    #[error("the ring of queue {0} is not in guest memory, or not aligned")]
    Ring(u32),
    #[error("queue {0} asks for its writes to be logged")]
    Log(u32),
    #[error("queue {0} has no kick: this server does not poll for a driver that cannot notify")]
    NoKick(u32),
    #[error("the file descriptor for queue {0} is no eventfd or pipe")]
    NotSignal(u32),
    #[error("the file descriptor for queue {queue} cannot be used")]
    Fd {
        queue: u32,
        #[source]
        source: std::io::Error,
    },
    #[error("the configuration space is read-only")]
    ReadOnlyConfig,
    #[error("the back-end's channel cannot be used")]
    Backend(#[source] std::io::Error),
    #[error("a record of requests in flight was not negotiated")]
    NotNegotiated,
    #[error("the record of requests in flight cannot be used")]
    Inflight(#[source] inflight::BadRegion),
}
