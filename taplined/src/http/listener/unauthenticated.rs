//! Limits the number of connections per address that have not sent a token yet, since anyone can connect.
//!
//! It knows nothing about tokens. Invariant: without a token, one address holds at most a quarter of all connections,
//! or 32 if that is more.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Minimum limit: what a multi-threaded client, or a few clients behind one address, may open at the same time.
const AT_LEAST: u32 = 32;

/// The fraction of all connections that one address may hold without a token.
const PART: u32 = 4;

/// Unauthenticated connections by address.
#[derive(Clone, Debug)]
pub struct Unauthenticated {
    most: u32,
    counts: Arc<Mutex<HashMap<IpAddr, u32>>>,
}

/// An unauthenticated connection; dropping it frees its slot.
#[derive(Debug)]
pub struct UnauthenticatedSlot {
    unauthenticated: Unauthenticated,
    address: IpAddr,
}

impl Unauthenticated {
    /// The limits for a given total number of connections.
    pub fn among(connections: u32) -> Unauthenticated {
        Unauthenticated { most: AT_LEAST.max(connections / PART), counts: Arc::default() }
    }

    /// Takes a slot for an address, if it has not used all of its slots.
    pub fn enter(&self, address: IpAddr) -> Option<UnauthenticatedSlot> {
        let address = host(address);
        let mut counts = self.counts();
        let count = counts.entry(address).or_default();
        if *count >= self.most {
            return None;
        }
        *count = count.saturating_add(1);
        Some(UnauthenticatedSlot { unauthenticated: self.clone(), address })
    }

    fn counts(&self) -> MutexGuard<'_, HashMap<IpAddr, u32>> {
        self.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for UnauthenticatedSlot {
    fn drop(&mut self) {
        let mut counts = self.unauthenticated.counts();
        if let Some(count) = counts.get_mut(&self.address) {
            *count = count.saturating_sub(1);
            if *count == 0 {
                counts.remove(&self.address);
            }
        }
    }
}

/// The host of an address: an IPv6 host has a whole 64-bit network (RFC 4291, 2.5.4).
fn host(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => IpAddr::V6(Ipv6Addr::from(u128::from(address) >> 64 << 64)),
        address => address,
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn connections_are_limited_per_address() {
        let unauthenticated = Unauthenticated::among(200);
        let enter = |address: &str| unauthenticated.enter(address.parse().unwrap());
        let mut all: Vec<UnauthenticatedSlot> = (0..50).map(|_| enter("192.0.2.7").unwrap()).collect();
        assert!(enter("192.0.2.7").is_none() && enter("::ffff:192.0.2.7").is_none());
        assert!(enter("192.0.2.8").is_some());
        all.pop();
        assert!(enter("192.0.2.7").is_some());
        all.clear();
        assert!(unauthenticated.counts().is_empty());
    }

    #[test]
    fn a_network_of_one_host_is_one_address() {
        let unauthenticated = Unauthenticated::among(0);
        let all: Vec<_> = (0..40u128).map(|at| unauthenticated.enter(Ipv6Addr::from((7 << 64) + at).into())).collect();
        assert_eq!(all.iter().flatten().count(), 32);
        assert!(unauthenticated.enter(Ipv6Addr::from(8u128 << 64).into()).is_some());
    }
}
