//! How much memory a connection may hold, beside the others.
//!
//! Invariant: all connections together hold no more than a fixed amount, and none can starve another.

/// Memory that one connection's requests and replies may hold: two of the longest requests.
const HELD_BY_ONE: usize = 64 << 20;
/// Memory that those of all connections may hold.
const HELD_BY_ALL: usize = 256 << 20;
/// What a connection that holds nothing may always have, lest others starve it by hoarding.
const HELD_ALWAYS: usize = 1 << 20;

/// The memory that the other connections of the server leave.
#[derive(Clone, Copy, Debug, Default)]
pub struct Room {
    /// Bytes that their requests and replies hold.
    pub others: usize,
}

impl Room {
    /// Whether a connection that holds `held` bytes may have `len` more.
    pub(super) fn admits(self, held: usize, len: usize) -> bool {
        let wanted = held.saturating_add(len);
        let modest = held == 0 && len <= HELD_ALWAYS;
        wanted <= HELD_BY_ONE && (modest || wanted.saturating_add(self.others) <= HELD_BY_ALL)
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn one_connection_may_hold_two_of_the_longest_requests() {
        let alone = Room::default();
        assert!(alone.admits(32 << 20, 32 << 20));
        assert!(!alone.admits((32 << 20) + 1, 32 << 20));
    }

    #[test]
    fn hoarders_leave_others_a_modest_request() {
        let crowded = Room { others: HELD_BY_ALL };
        assert!(crowded.admits(0, 1 << 20));
        assert!(!crowded.admits(0, (1 << 20) + 512));
        assert!(!crowded.admits(512, 512));
    }
}
