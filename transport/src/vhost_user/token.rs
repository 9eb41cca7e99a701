//! The name of a request: which device, queue and chain it came from.
//!
//! It knows nothing about what is done with it. Invariant: no two requests in progress have one name, but those of the
//! same chain.

use disk::Token;

/// Encodes the epoch, queue and head of a request as its token: 32, 16 and 16 bits.
pub fn token(epoch: u32, queue: u16, head: u16) -> Token {
    Token((u64::from(epoch) << 32) | (u64::from(queue) << 16) | u64::from(head))
}

/// The number of a queue, as its record and its requests have it.
pub fn number(index: usize) -> u16 {
    let Ok(number) = u16::try_from(index) else { unreachable!("at most MAX_QUEUES queues") };
    number
}

/// A description of where a request came from, for log messages.
pub fn place_of(token: Token) -> String {
    let (_, index, head) = parts(token);
    format!("queue {index}, descriptor {head}")
}

/// The epoch, queue and head of a request.
pub fn parts(token: Token) -> (u32, usize, u16) {
    let [a, b, c, d, e, f, g, h] = token.0.to_be_bytes();
    (u32::from_be_bytes([a, b, c, d]), usize::from(u16::from_be_bytes([e, f])), u16::from_be_bytes([g, h]))
}
