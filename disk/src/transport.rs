//! The peer's side of a disk: requests in, answers out.

use crate::{Geometry, Request, Status};

/// The peer is gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the peer has disconnected")]
pub struct Disconnected;

/// The peer: a guest ring or a socket. Everything behind it is hostile.
pub trait Transport {
    /// The next request, copied out of shared memory once and fully checked; a malformed one is answered here
    /// and never surfaces. `None`: nothing more for now.
    fn pop(&mut self, geometry: &Geometry) -> Option<Request>;

    /// Answers a popped request. By value: a second answer is impossible. A peer that has gone in the meantime
    /// is not an error.
    fn complete(&mut self, request: Request, status: Status);

    /// Publishes answers and signals the peer if it wants that; once per batch.
    fn publish(&mut self) -> Result<(), Disconnected>;
}
