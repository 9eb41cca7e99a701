//! The token of a request: the device, queue and chain that it came from.
//!
//! Invariant: two requests in progress have the same token only if they are of the same chain.

use disk::Token;

/// Encodes the epoch, queue and head of a request as its token: 32, 16 and 16 bits.
pub fn token(epoch: u32, queue: u16, head: u16) -> Token {
    Token((u64::from(epoch) << 32) | (u64::from(queue) << 16) | u64::from(head))
}

/// The number of a queue in records and tokens.
pub fn number(index: usize) -> u16 {
    let Ok(number) = u16::try_from(index) else { unreachable!("at most MAX_QUEUES queues") };
    number
}

/// A description of the origin of a request, for log messages.
pub fn place_of(token: Token) -> String {
    let (_, index, head) = parts(token);
    format!("queue {index}, descriptor {head}")
}

/// Decodes the epoch, queue and head of a request.
pub fn parts(token: Token) -> (u32, usize, u16) {
    let [a, b, c, d, e, f, g, h] = token.0.to_be_bytes();
    (u32::from_be_bytes([a, b, c, d]), usize::from(u16::from_be_bytes([e, f])), u16::from_be_bytes([g, h]))
}
