//! What both ends write about themselves into the store.
//!
//! Knows nothing of what follows from it. Invariants: what we offer becomes visible together; a front end's keys are numbers
//! within what was offered, or it is refused; no transaction stays open.
//!
//! Specification: Xen's public header io/blkif.h, "Backend XenBus Nodes" and "Frontend XenBus Nodes".

use disk::Geometry;
use xen::{DomId, GrantRef, Port, Store, StoreError, Transaction};

use super::abi::Layout;
use super::state::State;

/// Attempts at a transaction that others overtake. Only the toolstack writes here too, and seldom.
const ATTEMPTS: usize = 16;

/// Letters of a guest's value that are quoted.
const QUOTED_MAX: usize = 32;

/// `VDISK_READONLY`, in `info`.
const READ_ONLY: u32 = 4;

/// The two nodes of a device.
pub struct Nodes {
    /// Ours.
    pub backend: String,
    /// The front end's.
    pub frontend: String,
}

/// What we offer.
pub struct Offer {
    /// Size and limits of the disk.
    pub geometry: Geometry,
    /// The largest ring, as a power of two of pages.
    pub ring_order: u32,
    /// Queues.
    pub queues: u16,
    /// Segments of an indirect request; zero if there are none.
    pub segments: u16,
    /// Pages may stay mapped.
    pub persistent: bool,
}

/// What a front end has written about itself.
pub struct Rings {
    /// How it lays out entries.
    pub layout: &'static Layout,
    /// Its pages may stay mapped.
    pub persistent: bool,
    /// One or more.
    pub queues: Vec<RingKeys>,
}

/// One ring.
pub struct RingKeys {
    /// Its pages.
    pub pages: Vec<GrantRef>,
    /// The front end's end of its event channel.
    pub port: Port,
}

/// Why a front end cannot be connected.
#[derive(Debug, thiserror::Error)]
pub enum Unusable {
    /// The store did not say.
    #[error("its keys cannot be read")]
    Store(#[source] StoreError),
    /// It did not write something.
    #[error("there is no {0}")]
    Missing(String),
    /// It wrote something else than what was offered.
    #[error("{path} is {value}; {wanted} was offered")]
    Value {
        /// Where.
        path: String,
        /// What.
        value: String,
        /// What may be there.
        wanted: String,
    },
}

impl Nodes {
    /// The device at `backend`, whose front end is where that says, or else where front ends are.
    pub fn find(store: &mut dyn Store, backend: &str, domain: DomId, device: u32) -> Result<Nodes, StoreError> {
        let named = text(store, &format!("{backend}/frontend"))?;
        let usual = || format!("/local/domain/{domain}/device/vbd/{device}");
        Ok(Nodes { backend: backend.to_owned(), frontend: named.unwrap_or_else(usual) })
    }

    /// The node whose changes tell of ours.
    pub fn ours(&self) -> String {
        format!("{}/state", self.backend)
    }

    /// The node whose changes tell of theirs.
    pub fn theirs(&self) -> String {
        format!("{}/state", self.frontend)
    }

    /// Whether the toolstack wants the device to stay.
    pub fn is_online(&self, store: &mut dyn Store) -> Result<bool, StoreError> {
        Ok(text(store, &format!("{}/online", self.backend))?.as_deref() != Some("0"))
    }

    /// Writes what we offer, and our state with it.
    pub fn announce(&self, store: &mut dyn Store, offer: &Offer, state: Option<State>) -> Result<(), StoreError> {
        self.write(store, &offer.keys(), state)
    }

    /// Writes the size, and our state with it: Linux's front end looks at the size whenever we say that we are connected.
    pub fn resize(&self, store: &mut dyn Store, len: u64, state: Option<State>) -> Result<(), StoreError> {
        self.write(store, &[("sectors", (len / 512).to_string())], state)
    }

    /// Writes our state.
    pub fn say(&self, store: &mut dyn Store, state: State) -> Result<(), StoreError> {
        store.write(None, &self.ours(), state.value().as_bytes())
    }

    fn write(&self, store: &mut dyn Store, keys: &[(&str, String)], state: Option<State>) -> Result<(), StoreError> {
        for _ in 1..ATTEMPTS {
            match self.try_write(store, keys, state) {
                Err(StoreError::Again) => {}
                result => return result,
            }
        }
        self.try_write(store, keys, state)
    }

    fn try_write(
        &self,
        store: &mut dyn Store,
        keys: &[(&str, String)],
        state: Option<State>,
    ) -> Result<(), StoreError> {
        let transaction = store.begin()?;
        let within = Some(transaction);
        let mut put =
            |key: &str, value: &str| store.write(within, &format!("{}/{key}", self.backend), value.as_bytes());
        let mut written = keys.iter().try_for_each(|(key, value)| put(key, value));
        if let Some(state) = state {
            written = written.and_then(|()| put("state", state.value()));
        }
        written.and_then(|()| store.end(transaction, true)).inspect_err(|error| give_up(store, transaction, error))
    }

    /// What the front end has written.
    pub fn rings(&self, store: &mut dyn Store, offer: &Offer) -> Result<Rings, Unusable> {
        let mut keys = Keys { store, frontend: &self.frontend };
        let protocol = keys.text("protocol")?;
        let layout = Layout::of(protocol.as_deref()).ok_or_else(|| Unusable::Value {
            path: format!("{}/protocol", self.frontend),
            value: quoted(&protocol.unwrap_or_default()),
            wanted: "x86_64-abi or x86_32-abi".to_owned(),
        })?;
        let persistent = keys.text("feature-persistent")?.as_deref() == Some("1");
        let count = keys.number("multi-queue-num-queues", 1..=u32::from(offer.queues))?.unwrap_or(1);
        let order = keys.order(offer.ring_order)?;
        let queues = match count {
            1 => vec![keys.ring("", order)?],
            _ => (0..count).map(|queue| keys.ring(&format!("queue-{queue}/"), order)).collect::<Result<_, _>>()?,
        };
        Ok(Rings { layout, persistent, queues })
    }
}

impl Offer {
    fn keys(&self) -> Vec<(&'static str, String)> {
        let Geometry { len, block, physical_block, discard, read_only, .. } = self.geometry;
        let flag = |set: bool| u32::from(set).to_string();
        let mut keys = vec![
            ("feature-flush-cache", flag(true)),
            ("feature-barrier", flag(true)),
            ("feature-discard", flag(!read_only)),
            ("feature-persistent", flag(self.persistent)),
            ("max-ring-page-order", self.ring_order.to_string()),
            ("max-ring-pages", 1u32.checked_shl(self.ring_order).unwrap_or(1).to_string()),
            ("multi-queue-max-queues", self.queues.to_string()),
            // The header: in units of 512, whatever `sector-size` says.
            ("sectors", (len / 512).to_string()),
            ("sector-size", block.to_string()),
            ("physical-sector-size", physical_block.to_string()),
            ("info", if read_only { READ_ONLY } else { 0 }.to_string()),
            ("mode", if read_only { "r" } else { "w" }.to_owned()),
        ];
        if !read_only {
            keys.push(("discard-granularity", discard.to_string()));
            keys.push(("discard-alignment", flag(false)));
            keys.push(("discard-secure", flag(false)));
        }
        if self.segments > 0 {
            keys.push(("feature-max-indirect-segments", self.segments.to_string()));
        }
        keys
    }
}

/// The state that a node says; `None` if it is not there.
pub fn state(store: &mut dyn Store, path: &str) -> Result<Option<State>, StoreError> {
    Ok(text(store, path)?.map(|value| State::parse(value.as_bytes())))
}

/// A value as text; some writers end theirs with a zero.
fn text(store: &mut dyn Store, path: &str) -> Result<Option<String>, StoreError> {
    Ok(store.read(None, path)?.map(|value| String::from_utf8_lossy(&value).trim_end_matches('\0').to_owned()))
}

/// A value of the guest's own, as it may stand in a log.
fn quoted(value: &str) -> String {
    value.chars().take(QUOTED_MAX).collect::<String>().escape_debug().to_string()
}

/// Ends a transaction in which something failed. One that was overtaken has ended.
fn give_up(store: &mut dyn Store, transaction: Transaction, error: &StoreError) {
    if !matches!(error, StoreError::Again) {
        // If this fails too, it ends with our connection.
        store.end(transaction, false).ok();
    }
}

/// The keys of a front end.
struct Keys<'a> {
    store: &'a mut dyn Store,
    frontend: &'a str,
}

impl Keys<'_> {
    fn text(&mut self, key: &str) -> Result<Option<String>, Unusable> {
        text(self.store, &format!("{}/{key}", self.frontend)).map_err(Unusable::Store)
    }

    /// A number in a range, if it is there.
    fn number(&mut self, key: &str, range: std::ops::RangeInclusive<u32>) -> Result<Option<u32>, Unusable> {
        let Some(value) = self.text(key)? else { return Ok(None) };
        match value.parse().ok().filter(|number| range.contains(number)) {
            Some(number) => Ok(Some(number)),
            None => Err(Unusable::Value {
                path: format!("{}/{key}", self.frontend),
                value: quoted(&value),
                wanted: format!("{} to {}", range.start(), range.end()),
            }),
        }
    }

    fn needed(&mut self, key: &str) -> Result<u32, Unusable> {
        let found = self.number(key, 0..=u32::MAX)?;
        found.ok_or_else(|| Unusable::Missing(format!("{}/{key}", self.frontend)))
    }

    /// How many pages a ring has, as a power of two; `None` if that is not said.
    fn order(&mut self, max: u32) -> Result<Option<u32>, Unusable> {
        if let Some(order) = self.number("ring-page-order", 0..=max)? {
            return Ok(Some(order));
        }
        // What front ends say that ask for `max-ring-pages`.
        let pages_max = 1u32.checked_shl(max).unwrap_or(1);
        match self.number("num-ring-pages", 1..=pages_max)? {
            Some(pages) if pages.is_power_of_two() => Ok(pages.checked_ilog2()),
            Some(pages) => Err(Unusable::Value {
                path: format!("{}/num-ring-pages", self.frontend),
                value: pages.to_string(),
                wanted: "a power of two".to_owned(),
            }),
            None => Ok(None),
        }
    }

    /// The ring whose keys begin so.
    fn ring(&mut self, queue: &str, order: Option<u32>) -> Result<RingKeys, Unusable> {
        let alone = format!("{queue}ring-ref");
        let pages = match order {
            // Front ends differ in how they call the only page.
            None | Some(0) => match self.number(&alone, 0..=u32::MAX)? {
                Some(page) => vec![GrantRef(page)],
                None if order.is_none() => vec![GrantRef(self.needed(&alone)?)],
                None => vec![GrantRef(self.needed(&format!("{queue}ring-ref0"))?)],
            },
            Some(order) => {
                let count = 1u32.checked_shl(order).unwrap_or(1);
                let page = |index| self.needed(&format!("{queue}ring-ref{index}")).map(GrantRef);
                (0..count).map(page).collect::<Result<_, _>>()?
            }
        };
        Ok(RingKeys { pages, port: Port(self.needed(&format!("{queue}event-channel"))?) })
    }
}
