//! Who is connected and has not shown a token yet: so many of one address and no more, since anybody can connect.
//!
//! It knows nothing of tokens. Invariant: one address alone never has all the connections there are.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// As many as a client with many threads, or some clients behind one address, may have on the way at one time.
const AT_LEAST: u32 = 32;

/// Of all connections, the part that one address may have without a token.
const PART: u32 = 4;

/// Strangers by their addresses.
#[derive(Clone, Debug)]
pub struct Strangers {
    most: u32,
    counts: Arc<Mutex<HashMap<IpAddr, u32>>>,
}

/// One of them. Dropped, it is none any more.
#[derive(Debug)]
pub struct Stranger {
    strangers: Strangers,
    address: IpAddr,
}

impl Strangers {
    /// Where there may be so many connections.
    pub fn among(connections: u32) -> Strangers {
        Strangers { most: AT_LEAST.max(connections / PART), counts: Arc::default() }
    }

    /// One more of an address, if it has not too many.
    pub fn enter(&self, address: IpAddr) -> Option<Stranger> {
        let address = host(address);
        let mut counts = self.counts();
        let count = counts.entry(address).or_default();
        if *count >= self.most {
            return None;
        }
        *count = count.saturating_add(1);
        Some(Stranger { strangers: self.clone(), address })
    }

    fn counts(&self) -> MutexGuard<'_, HashMap<IpAddr, u32>> {
        self.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Stranger {
    fn drop(&mut self) {
        let mut counts = self.strangers.counts();
        if let Some(count) = counts.get_mut(&self.address) {
            *count = count.saturating_sub(1);
            if *count == 0 {
                counts.remove(&self.address);
            }
        }
    }
}

/// Whose address it is: with IPv6 a host has all of a network of 64 bits (RFC 4291, 2.5.4).
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
    fn one_address_is_let_in_so_often_and_others_all_the_same() {
        let strangers = Strangers::among(200);
        let enter = |address: &str| strangers.enter(address.parse().unwrap());
        let mut all: Vec<Stranger> = (0..50).map(|_| enter("192.0.2.7").unwrap()).collect();
        assert!(enter("192.0.2.7").is_none() && enter("::ffff:192.0.2.7").is_none());
        assert!(enter("192.0.2.8").is_some());
        all.pop();
        assert!(enter("192.0.2.7").is_some());
        all.clear();
        assert!(strangers.counts().is_empty());
    }

    #[test]
    fn a_network_of_one_host_is_one_address() {
        let strangers = Strangers::among(0);
        let all: Vec<_> = (0..40u128).map(|at| strangers.enter(Ipv6Addr::from((7 << 64) + at).into())).collect();
        assert_eq!(all.iter().flatten().count(), 32);
        assert!(strangers.enter(Ipv6Addr::from(8u128 << 64).into()).is_some());
    }
}
