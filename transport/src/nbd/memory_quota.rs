//! The memory quota of a connection, which depends on what the others hold.
//!
//! Invariant: all connections together hold at most a fixed amount, and none can starve another.

/// The maximum memory of one connection's requests and replies: two of the longest requests.
const PER_CONNECTION_MAX: usize = 64 << 20;
/// The maximum memory of all connections' requests and replies.
const TOTAL_MAX: usize = 256 << 20;
/// Memory always granted to a connection that holds none, so that others cannot starve it by hoarding.
const GUARANTEED: usize = 1 << 20;

/// The quota of one connection.
#[derive(Clone, Copy, Debug, Default)]
pub struct MemoryQuota {
    /// Bytes held by requests and replies of the other connections.
    pub others: usize,
}

impl MemoryQuota {
    /// Returns true if a connection that holds `held` bytes may hold `len` more.
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
