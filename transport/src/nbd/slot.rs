//! The slot of a connection within its server, in watch keys and in tokens of requests.

use disk::Request;
use disk::size::in_memory;

use crate::WatchKey;

/// The watch key of a connection: its slot and, since slots are reused, its client number.
pub(super) fn key(index: usize, client: u32) -> WatchKey {
    WatchKey(slot(index) << 32 | u64::from(client))
}

/// All of a token except the lowest 16 bits, which belong to the session.
pub(super) fn token_prefix(index: usize, client: u32) -> u64 {
    slot(index) << 48 | u64::from(client) << 16
}

/// The slot number of a connection in keys and tokens.
fn slot(index: usize) -> u64 {
    let Ok(slot) = u16::try_from(index) else { unreachable!("at most CONNECTIONS_MAX slots") };
    slot.into()
}

/// The slot of the connection that a request belongs to.
pub(super) fn index_of(request: &Request) -> usize {
    in_memory(request.token().0 >> 48)
}

/// The index of a free slot, which is added if there are fewer than `most`.
pub(super) fn free_slot<T>(slots: &mut Vec<Option<T>>, most: usize) -> Option<usize> {
    if let Some(index) = slots.iter().position(Option::is_none) {
        return Some(index);
    }
    let index = slots.len();
    (index < most).then(|| {
        slots.push(None);
        index
    })
}
