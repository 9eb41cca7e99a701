//! What both ends write about themselves into the store.
//!
//! Knows nothing of what follows from it. Invariants: what we offer becomes visible together; a front end's keys are
//! numbers within what it was offered, whoever has offered that, or it is refused; what an earlier front end has chosen
//! is no choice of the present one's; no transaction stays open; a node of ours that somebody has removed is not made
//! again, and a state that the toolstack has written since we looked is not written over.
//!
//! Specification: Xen's public header io/blkif.h, "Backend XenBus Nodes" and "Frontend XenBus Nodes".
//!
//! **Sectors.** `sectors`, and every sector in a request, count 512 bytes, whatever `sector-size` says; that is the
//! block to which requests must be aligned. So it stands in the header since Xen 4.20 ("blkif: reconcile protocol
//! specification with in-use implementations", September 2024), and so Linux's front and back end have always had it.
//! Headers from 2013 on said otherwise, and front ends that believed them (FreeBSD's, MiniOS's, Windows' with
//! `feature-large-sector-size`) take a disk of 4096-byte blocks for eight times as large. The header asks back ends not
//! to heed that key; neither do we. With `sector-size` 512, which every format of ours has but raw on storage of
//! 4096-byte blocks, all of them agree.

use disk::Geometry;
use xen::{DomId, GrantRef, Port, Store, StoreError, Transaction};

use super::abi::Layout;
use super::moment::{Mistake, mistake};
use super::request::SEGMENTS_MAX;
use super::state::State;
use super::{QUEUES_MAX, RING_ORDER_MAX};

/// Attempts at a transaction that others overtake. Only the toolstack writes here too, and seldom.
const ATTEMPTS: usize = 16;

/// Bytes of a complaint. It may quote what a guest has written.
const COMPLAINT_MAX: usize = 256;

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
#[derive(Clone, Copy)]
pub struct Offer {
    /// Size and limits of the disk.
    pub geometry: Geometry,
    /// Space may be given up.
    pub discard: bool,
    /// What a front end chooses from.
    pub features: Features,
}

/// What a front end reads before it makes its rings, and keeps to for as long as it is connected, whichever process
/// serves it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Features {
    /// The largest ring, as a power of two of pages.
    pub ring_order: u32,
    /// Queues.
    pub queues: u16,
    /// Segments of an indirect request; zero if there are none.
    pub segments: u16,
    /// Pages may stay mapped.
    pub persistent: bool,
}

impl Features {
    /// What a front end has that was offered nothing.
    pub const NONE: Features = Features { ring_order: 0, queues: 1, segments: 0, persistent: false };

    /// What suits also a front end that has read `before`, which may stand in its rings already: limits only grow, and
    /// pages stay mapped only if both say so.
    pub fn widened(self, before: Features) -> Features {
        Features {
            ring_order: self.ring_order.max(before.ring_order),
            queues: self.queues.max(before.queues),
            segments: self.segments.max(before.segments),
            persistent: self.persistent && before.persistent,
        }
    }
}

/// Whether a front end begins now, so that what stands in its node is of one before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Begins {
    /// It waits for our offer.
    Anew,
    /// It may have read an offer, and chosen.
    Before,
}

/// What a front end writes only where it has chosen it. An earlier one's would be believed: Linux's front end writes
/// neither the number of queues nor the order of the ring where it has one of one page, and removes nothing, so the
/// kernel that boots after a crash, or after firmware with a driver of its own, would find its single ring unread
/// (Linux's back end believes them). io/blkif.h has both ends' choices written after the back end says InitWait; so
/// what stands there before is stale. What every front end writes, as `ring-ref`, is written over or not looked at; a
/// driver that goes before the header's order and writes its keys at once (Linux before 4.2) has none of these but the
/// last, and can do without that.
const CHOICES: [&str; 4] = ["multi-queue-num-queues", "ring-page-order", "num-ring-pages", "feature-persistent"];

/// What a front end has written about itself.
pub struct Rings {
    /// How it lays out entries.
    pub layout: &'static Layout,
    /// Its pages may stay mapped: both ends have said so.
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
    /// Another process has offered more than this one can serve.
    #[error("it was offered indirect requests of {segments} segments, and {SEGMENTS_MAX} can be served")]
    Beyond {
        /// Segments of a request.
        segments: u32,
    },
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

    /// What stands in our node for a front end to choose from; `None` if nothing does. Numbers beyond what can be
    /// served are cut down to that: a front end that has chosen more is found out by its own keys.
    pub fn offered(&self, store: &mut dyn Store) -> Result<Option<Features>, Unusable> {
        let mut number = |key: &str| -> Result<Option<u32>, Unusable> {
            let value = text(store, &format!("{}/{key}", self.backend)).map_err(Unusable::Store)?;
            Ok(value.and_then(|value| value.trim().parse().ok()))
        };
        let (order, pages) = (number("max-ring-page-order")?, number("max-ring-pages")?);
        let (queues, persistent) = (number("multi-queue-max-queues")?, number("feature-persistent")?);
        let segments = number("feature-max-indirect-segments")?;
        if [order, pages, queues, persistent, segments].iter().all(Option::is_none) {
            return Ok(None);
        }
        let order = order.or_else(|| pages.and_then(u32::checked_ilog2)).unwrap_or(0);
        let segments = segments.unwrap_or(0);
        // More than we take would be refused one by one, as errors of the disk.
        let served = u16::try_from(segments).ok().filter(|&segments| segments <= SEGMENTS_MAX);
        let segments = served.ok_or(Unusable::Beyond { segments })?;
        let queues = queues.and_then(|queues| u16::try_from(queues).ok()).unwrap_or(1).clamp(1, QUEUES_MAX);
        let persistent = persistent == Some(1);
        Ok(Some(Features { ring_order: order.min(RING_ORDER_MAX), queues, segments, persistent }))
    }

    /// Whether the toolstack lets space be given up (libxl's `discard-enable`; Linux's back end asks it too).
    pub fn may_discard(&self, store: &mut dyn Store) -> Result<bool, StoreError> {
        Ok(text(store, &format!("{}/discard-enable", self.backend))?.as_deref() != Some("0"))
    }

    /// Writes what we offer, and our next state with it, if our present one is `ours`. `false`: it is not, or our node
    /// is gone.
    pub fn announce(
        &self,
        store: &mut dyn Store,
        offer: &Offer,
        (ours, next): (Option<State>, Option<State>),
        begins: Begins,
    ) -> Result<bool, StoreError> {
        let next = |present| (Some(present) == ours).then_some(next.unwrap_or(present));
        self.write(store, &offer.keys(), begins, next)
    }

    /// Writes the size, and our state anew: Linux's front end looks at the size whenever we say that we are connected.
    pub fn resize(&self, store: &mut dyn Store, len: u64) -> Result<bool, StoreError> {
        self.write(store, &[("sectors", (len / 512).to_string())], Begins::Before, Some)
    }

    /// Writes our next state, if our present one is `ours`. `false`: it is not, or our node is gone.
    pub fn say(&self, store: &mut dyn Store, ours: Option<State>, next: State) -> Result<bool, StoreError> {
        self.write(store, &[], Begins::Before, |present| (Some(present) == ours).then_some(next))
    }

    /// Writes values, and the state that follows from our present one; nothing if none does, or our node is gone.
    fn write(
        &self,
        store: &mut dyn Store,
        keys: &[(&str, String)],
        begins: Begins,
        next: impl Fn(State) -> Option<State>,
    ) -> Result<bool, StoreError> {
        for _ in 1..ATTEMPTS {
            match self.try_write(store, keys, begins, &next) {
                Err(StoreError::Again) => {}
                result => return result,
            }
        }
        self.try_write(store, keys, begins, &next)
    }

    fn try_write(
        &self,
        store: &mut dyn Store,
        keys: &[(&str, String)],
        begins: Begins,
        next: impl Fn(State) -> Option<State>,
    ) -> Result<bool, StoreError> {
        let transaction = store.begin()?;
        let written = self.put(store, transaction, keys, next).and_then(|written| {
            if written && begins == Begins::Anew {
                self.forget_choices(store, transaction)?;
            }
            Ok(written)
        });
        let ended = written.and_then(|written| store.end(transaction, written).map(|()| written));
        ended.inspect_err(|error| give_up(store, transaction, error))
    }

    fn put(
        &self,
        store: &mut dyn Store,
        transaction: Transaction,
        keys: &[(&str, String)],
        next: impl Fn(State) -> Option<State>,
    ) -> Result<bool, StoreError> {
        let within = Some(transaction);
        let present = store.read(within, &self.ours())?.map(as_text);
        let Some(state) = present.and_then(|present| next(State::parse(present.as_bytes()))) else { return Ok(false) };
        for (key, value) in keys {
            store.write(within, &format!("{}/{key}", self.backend), value.as_bytes())?;
        }
        store.write(within, &self.ours(), state.value().as_bytes())?;
        Ok(true)
    }

    /// Removes what a front end before the one that begins now has chosen. In a driver domain, which may not write
    /// there, it stays and is believed.
    fn forget_choices(&self, store: &mut dyn Store, transaction: Transaction) -> Result<(), StoreError> {
        let within = Some(transaction);
        let theirs = store.read(within, &self.theirs())?.map(as_text);
        if theirs.map(|theirs| State::parse(theirs.as_bytes())) != Some(State::Initialising) {
            return Ok(());
        }
        for key in CHOICES.into_iter().skip(usize::from(mistake(Mistake::StaleQueues))) {
            let path = format!("{}/{key}", self.frontend);
            if store.read(within, &path)?.is_none() {
                continue;
            }
            match store.remove(within, &path) {
                Err(StoreError::Refused { code, .. }) if code == "EACCES" => return Ok(()),
                removed => removed?,
            }
        }
        Ok(())
    }

    /// Where back ends say what is wrong with a device, for whoever looks after the host: `error/` and the device's
    /// path in our domain, as Linux's do (xenbus_dev_error in drivers/xen/xenbus/xenbus_client.c). The guest cannot
    /// read it.
    fn complaint(&self) -> Option<String> {
        let (domain, path) = self.backend.strip_prefix("/local/domain/")?.split_once('/')?;
        Some(format!("/local/domain/{domain}/error/{path}"))
    }

    /// Says what is wrong, with the number of an error before it.
    pub fn complain(&self, store: &mut dyn Store, errno: i32, why: &str) -> Result<(), StoreError> {
        let Some(node) = self.complaint() else { return Ok(()) };
        let mut said = format!("{errno} {why}");
        while said.len() > COMPLAINT_MAX {
            said.pop();
        }
        store.write(None, &format!("{node}/error"), said.as_bytes())
    }

    /// Nothing is wrong any more.
    pub fn retract(&self, store: &mut dyn Store) -> Result<(), StoreError> {
        self.complaint().map_or(Ok(()), |node| store.remove(None, &node))
    }

    /// What the front end has written, which was offered these features.
    pub fn rings(&self, store: &mut dyn Store, offered: &Features) -> Result<Rings, Unusable> {
        let mut keys = Keys { store, frontend: &self.frontend };
        let protocol = keys.text("protocol")?;
        let layout = Layout::of(protocol.as_deref()).ok_or_else(|| Unusable::Value {
            path: format!("{}/protocol", self.frontend),
            value: quoted(&protocol.unwrap_or_default()),
            wanted: "x86_64-abi or x86_32-abi".to_owned(),
        })?;
        let persistent = keys.text("feature-persistent")?.as_deref() == Some("1") && offered.persistent;
        let count = keys.number("multi-queue-num-queues", 1..=u32::from(offered.queues))?.unwrap_or(1);
        let order = keys.order(offered.ring_order)?;
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
        let Features { ring_order, queues, segments, persistent } = self.features;
        let may_discard = self.discard && !read_only;
        let flag = |set: bool| u32::from(set).to_string();
        let mut keys = vec![
            ("feature-flush-cache", flag(true)),
            ("feature-barrier", flag(true)),
            ("feature-discard", flag(may_discard)),
            ("feature-persistent", flag(persistent)),
            ("max-ring-page-order", ring_order.to_string()),
            ("max-ring-pages", 1u32.checked_shl(ring_order).unwrap_or(1).to_string()),
            ("multi-queue-max-queues", queues.to_string()),
            // The header: in units of 512, whatever `sector-size` says.
            ("sectors", (len / 512).to_string()),
            ("sector-size", block.to_string()),
            ("physical-sector-size", physical_block.to_string()),
            ("info", if read_only { READ_ONLY } else { 0 }.to_string()),
            ("mode", if read_only { "r" } else { "w" }.to_owned()),
        ];
        if may_discard {
            keys.push(("discard-granularity", discard.to_string()));
            keys.push(("discard-alignment", flag(false)));
            keys.push(("discard-secure", flag(false)));
        }
        if segments > 0 {
            keys.push(("feature-max-indirect-segments", segments.to_string()));
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
    Ok(store.read(None, path)?.map(as_text))
}

fn as_text(value: Vec<u8>) -> String {
    String::from_utf8_lossy(&value).trim_end_matches('\0').to_owned()
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
