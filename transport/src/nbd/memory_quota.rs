//! The memory quota of a connection, shared with the others.
//!
//! Invariant: all connections together hold at most a fixed amount, and none can starve another.

/// Memory that one connection's requests and replies may hold: two of the longest requests.
const PER_CONNECTION_MAX: usize = 64 << 20;
/// Memory that those of all connections together may hold.
const TOTAL_MAX: usize = 256 << 20;
/// Always granted to a connection that holds nothing, so that others cannot starve it by hoarding.
const GUARANTEED: usize = 1 << 20;

/// The quota left by the other connections of the server.
#[derive(Clone, Copy, Debug, Default)]
pub struct MemoryQuota {
    /// Bytes that their requests and replies hold.
    pub others: usize,
}

impl MemoryQuota {
    /// Whether a connection that holds `held` bytes may hold `len` more.
    pub(super) fn admits(self, held: usize, len: usize) -> bool {
        let wanted = held + len;
        let guaranteed = held == 0 && len <= GUARANTEED;
        wanted <= PER_CONNECTION_MAX && (guaranteed || wanted + self.others <= TOTAL_MAX)
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn one_connection_may_hold_two_of_the_longest_requests() {
        let alone = MemoryQuota::default();
        assert!(alone.admits(32 << 20, 32 << 20));
        assert!(!alone.admits((32 << 20) + 1, 32 << 20));
    }

    #[test]
    fn a_small_request_is_admitted_despite_hoarding_clients() {
        let crowded = MemoryQuota { others: TOTAL_MAX };
        assert!(crowded.admits(0, 1 << 20));
        assert!(!crowded.admits(0, (1 << 20) + 512));
        assert!(!crowded.admits(512, 512));
    }
}
