//! The keys that both ends of a device write into the store.
//!
//! It knows nothing about the handshake. Invariants: our features become visible atomically; a front end is refused
//! unless its keys are numbers within the offer that it got, from this or an earlier process; the choices of an earlier
//! front end are not used for the current one; no transaction stays open; our node is not recreated after it was
//! removed, and a state that the toolstack has written meanwhile is not overwritten.
//!
//! Specification: Xen's public header io/blkif.h, "Backend XenBus Nodes" and "Frontend XenBus Nodes".
//!
//! **Sectors.** `sectors`, and the sectors in requests, are units of 512 bytes, regardless of `sector-size`, which is
//! the block size to which requests must be aligned. The header specifies this since Xen 4.20 ("blkif: reconcile
//! protocol specification with in-use implementations", September 2024), and Linux's front and back end have always
//! done so. Headers from 2013 on specified otherwise, and front ends that follow those (FreeBSD's, MiniOS's, Windows'
//! with `feature-large-sector-size`) see a disk of 4096-byte blocks as eight times as large. The header requires back
//! ends to ignore that key, and we do. With `sector-size` 512, which all our formats have except raw on storage with
//! 4096-byte blocks, all front ends agree.

use disk::Geometry;
use xen::{DomId, GrantRef, Port, Store, StoreError, Transaction};

use super::abi::EntryLayout;
use super::kill_point::{InjectedBug, injected};
use super::request::SEGMENTS_MAX;
use super::state::XenbusState;
use super::{QUEUES_MAX, RING_ORDER_MAX};

/// The maximum number of attempts at a transaction that conflicts with others. Only the toolstack also writes here,
/// and seldom.
const ATTEMPTS: usize = 16;

/// The maximum length of an error message, which may quote a guest's value.
const ERROR_MAX: usize = 256;

/// The maximum number of quoted characters of a guest's value.
const QUOTED_MAX: usize = 32;

/// `VDISK_READONLY`, in `info`.
const READ_ONLY: u32 = 4;

/// The paths of the two nodes of a device.
pub struct DeviceNodes {
    /// The backend's node.
    pub backend: String,
    /// The front end's node.
    pub frontend: String,
}

/// The properties that the backend announces.
#[derive(Clone, Copy)]
pub struct Offer {
    /// Size and limits of the disk.
    pub geometry: Geometry,
    /// Whether discard is allowed.
    pub discard: bool,
    /// The features from which a front end chooses.
    pub features: Features,
}

/// The features that a front end reads before it creates its rings. It relies on them while it is connected, even if
/// another process serves it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Features {
    /// The largest ring, as a power of two of pages.
    pub ring_order: u32,
    /// The maximum number of queues.
    pub queues: u16,
    /// The maximum number of segments of an indirect request; zero if they are not supported.
    pub segments: u16,
    /// Whether persistent grants are supported.
    pub persistent: bool,
}

impl Features {
    /// The features used by a front end without an offer.
    pub const NONE: Features = Features { ring_order: 0, queues: 1, segments: 0, persistent: false };

    /// Merges the features with earlier ones, `before`, which a front end may use in its rings already: limits only
    /// grow, and grants are persistent only if both have that feature.
    pub fn merged_with(self, before: Features) -> Features {
        Features {
            ring_order: self.ring_order.max(before.ring_order),
            queues: self.queues.max(before.queues),
            segments: self.segments.max(before.segments),
            persistent: self.persistent && before.persistent,
        }
    }
}

/// Whether a front end is starting, so that the keys in its node belong to an earlier one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FrontendPhase {
    /// It waits for our offer.
    Starting,
    /// It may have read an offer and made its choices.
    Running,
}

/// Keys that a front end writes only if it chooses the feature. Stale keys of an earlier front end would be mistaken
/// for its own: Linux's front end writes neither the number of queues nor the order of a ring of one page, and removes
/// nothing, so the single ring of a kernel that boots after a crash, or after firmware with its own driver, would not
/// be read (Linux's back end has that problem). In io/blkif.h both ends make their choices after the back end is in
/// InitWait; so keys that exist before that are stale. Keys that every front end writes, like `ring-ref`, are
/// overwritten or not read. A driver that ignores the specified order and writes its keys right away (Linux before 4.2)
/// writes only the last of these, and works without it.
const OPTIONAL_KEYS: [&str; 4] = ["multi-queue-num-queues", "ring-page-order", "num-ring-pages", "feature-persistent"];

/// The choices of a front end, checked.
pub struct Rings {
    /// The layout of entries.
    pub layout: &'static EntryLayout,
    /// Whether grants are persistent: both ends support it.
    pub persistent: bool,
    /// The rings, at least one.
    pub queues: Vec<RingKeys>,
}

/// The keys of one ring.
pub struct RingKeys {
    /// The pages of the ring.
    pub pages: Vec<GrantRef>,
    /// The front end's port of its event channel.
    pub port: Port,
}

/// Why a front end cannot be connected.
#[derive(Debug, thiserror::Error)]
pub enum KeysError {
    /// The store could not be read.
    #[error("its keys cannot be read")]
    Store(#[source] StoreError),
    /// Another process has offered more than this one can serve.
    #[error("it was offered indirect requests of {segments} segments; this process supports {SEGMENTS_MAX}")]
    TooManySegments {
        /// The number of segments offered.
        segments: u32,
    },
    /// A key is missing.
    #[error("key {0} is missing")]
    Missing(String),
    /// A value is not within the offer.
    #[error("{path} is '{value}'; must be {wanted}")]
    Value {
        /// The key.
        path: String,
        /// The value of the key.
        value: String,
        /// The permitted values.
        wanted: String,
    },
}

impl DeviceNodes {
    /// The nodes of the device at `backend`, which names the front end's node; if not, that is at the default path.
    pub fn find(store: &mut dyn Store, backend: &str, domain: DomId, device: u32) -> Result<DeviceNodes, StoreError> {
        let named = text(store, &format!("{backend}/frontend"))?;
        let usual = || format!("/local/domain/{domain}/device/vbd/{device}");
        Ok(DeviceNodes { backend: backend.to_owned(), frontend: named.unwrap_or_else(usual) })
    }

    /// The path of the backend's state.
    pub fn backend_state_path(&self) -> String {
        format!("{}/state", self.backend)
    }

    /// The path of the front end's state.
    pub fn frontend_state_path(&self) -> String {
        format!("{}/state", self.frontend)
    }

    /// Returns false if the toolstack is removing the device.
    pub fn is_online(&self, store: &mut dyn Store) -> Result<bool, StoreError> {
        Ok(text(store, &format!("{}/online", self.backend))?.as_deref() != Some("0"))
    }

    /// The features in our node that a front end may have read; `None` if there are none. Values beyond our limits are
    /// reduced to those: a front end that has chosen more is detected by its own keys.
    pub fn announced_features(&self, store: &mut dyn Store) -> Result<Option<Features>, KeysError> {
        let mut number = |key: &str| -> Result<Option<u32>, KeysError> {
            let value = text(store, &format!("{}/{key}", self.backend)).map_err(KeysError::Store)?;
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
        // A higher limit is an error here: larger requests would be refused one by one, as disk errors.
        let served = u16::try_from(segments).ok().filter(|&segments| segments <= SEGMENTS_MAX);
        let segments = served.ok_or(KeysError::TooManySegments { segments })?;
        let queues = queues.and_then(|queues| u16::try_from(queues).ok()).unwrap_or(1).clamp(1, QUEUES_MAX);
        let persistent = persistent == Some(1);
        Ok(Some(Features { ring_order: order.min(RING_ORDER_MAX), queues, segments, persistent }))
    }

    /// Returns true if the toolstack allows discard (libxl's `discard-enable`; Linux's back end checks it too).
    pub fn may_discard(&self, store: &mut dyn Store) -> Result<bool, StoreError> {
        Ok(text(store, &format!("{}/discard-enable", self.backend))?.as_deref() != Some("0"))
    }

    /// Writes our features and our next state, if our current one is `ours`. Returns `false` if it is not, or if our
    /// node does not exist.
    pub fn announce(
        &self,
        store: &mut dyn Store,
        offer: &Offer,
        (ours, next): (Option<XenbusState>, Option<XenbusState>),
        phase: FrontendPhase,
    ) -> Result<bool, StoreError> {
        let next = |present| (Some(present) == ours).then_some(next.unwrap_or(present));
        self.write(store, &offer.keys(), phase, next)
    }

    /// Writes the size, and our state again: Linux's front end reads the size whenever we write that we are connected.
    pub fn resize(&self, store: &mut dyn Store, len: u64) -> Result<bool, StoreError> {
        self.write(store, &[("sectors", (len / 512).to_string())], FrontendPhase::Running, Some)
    }

    /// Writes our next state, if our current one is `ours`. Returns `false` if it is not, or our node does not exist.
    pub fn write_state(
        &self,
        store: &mut dyn Store,
        ours: Option<XenbusState>,
        next: XenbusState,
    ) -> Result<bool, StoreError> {
        self.write(store, &[], FrontendPhase::Running, |present| (Some(present) == ours).then_some(next))
    }

    /// Writes values, and the state that `next` returns for our current one. Writes nothing if it returns none, or if
    /// our node does not exist.
    fn write(
        &self,
        store: &mut dyn Store,
        keys: &[(&str, String)],
        phase: FrontendPhase,
        next: impl Fn(XenbusState) -> Option<XenbusState>,
    ) -> Result<bool, StoreError> {
        for _ in 1..ATTEMPTS {
            match self.try_write(store, keys, phase, &next) {
                Err(StoreError::Again) => {}
                result => return result,
            }
        }
        self.try_write(store, keys, phase, &next)
    }

    fn try_write(
        &self,
        store: &mut dyn Store,
        keys: &[(&str, String)],
        phase: FrontendPhase,
        next: impl Fn(XenbusState) -> Option<XenbusState>,
    ) -> Result<bool, StoreError> {
        let transaction = store.begin()?;
        let written = self.write_within(store, transaction, keys, next).and_then(|written| {
            if written && phase == FrontendPhase::Starting {
                self.remove_stale_choices(store, transaction)?;
            }
            Ok(written)
        });
        let ended = written.and_then(|written| store.end(transaction, written).map(|()| written));
        ended.inspect_err(|error| abort(store, transaction, error))
    }

    fn write_within(
        &self,
        store: &mut dyn Store,
        transaction: Transaction,
        keys: &[(&str, String)],
        next: impl Fn(XenbusState) -> Option<XenbusState>,
    ) -> Result<bool, StoreError> {
        let within = Some(transaction);
        let present = store.read(within, &self.backend_state_path())?.map(as_text);
        let Some(state) = present.and_then(|present| next(XenbusState::parse(present.as_bytes()))) else {
            return Ok(false);
        };
        for (key, value) in keys {
            store.write(within, &format!("{}/{key}", self.backend), value.as_bytes())?;
        }
        store.write(within, &self.backend_state_path(), state.value().as_bytes())?;
        Ok(true)
    }

    /// Removes the choices of an earlier front end before a starting one. A driver domain may not write there: in one
    /// they stay, and are mistaken for the front end's own.
    fn remove_stale_choices(&self, store: &mut dyn Store, transaction: Transaction) -> Result<(), StoreError> {
        let within = Some(transaction);
        let theirs = store.read(within, &self.frontend_state_path())?.map(as_text);
        if theirs.map(|theirs| XenbusState::parse(theirs.as_bytes())) != Some(XenbusState::Initialising) {
            return Ok(());
        }
        for key in OPTIONAL_KEYS.into_iter().skip(usize::from(injected(InjectedBug::StaleQueueCount))) {
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

    /// The node in which back ends report errors of a device to the host's administrator: `error/` and the device's
    /// path, in our domain, as Linux's do (xenbus_dev_error in drivers/xen/xenbus/xenbus_client.c). The guest cannot
    /// read it.
    fn error_node(&self) -> Option<String> {
        let (domain, path) = self.backend.strip_prefix("/local/domain/")?.split_once('/')?;
        Some(format!("/local/domain/{domain}/error/{path}"))
    }

    /// Reports an error, preceded by an errno.
    pub fn report_error(&self, store: &mut dyn Store, errno: i32, why: &str) -> Result<(), StoreError> {
        let Some(node) = self.error_node() else { return Ok(()) };
        let mut message = format!("{errno} {why}");
        while message.len() > ERROR_MAX {
            message.pop();
        }
        store.write(None, &format!("{node}/error"), message.as_bytes())
    }

    /// Removes the error report.
    pub fn clear_error(&self, store: &mut dyn Store) -> Result<(), StoreError> {
        self.error_node().map_or(Ok(()), |node| store.remove(None, &node))
    }

    /// Reads and checks the keys of a front end that was offered these features.
    pub fn rings(&self, store: &mut dyn Store, announced_features: &Features) -> Result<Rings, KeysError> {
        let mut keys = FrontendKeys { store, frontend: &self.frontend };
        let protocol = keys.text("protocol")?;
        let layout = EntryLayout::of(protocol.as_deref()).ok_or_else(|| KeysError::Value {
            path: format!("{}/protocol", self.frontend),
            value: quoted(&protocol.unwrap_or_default()),
            wanted: "x86_64-abi or x86_32-abi".to_owned(),
        })?;
        let persistent = keys.text("feature-persistent")?.as_deref() == Some("1") && announced_features.persistent;
        let count = keys.number("multi-queue-num-queues", 1..=u32::from(announced_features.queues))?.unwrap_or(1);
        let order = keys.order(announced_features.ring_order)?;
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
            // In units of 512 bytes, regardless of `sector-size` (see above).
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

/// The state in a node; `None` if the node does not exist.
pub fn state(store: &mut dyn Store, path: &str) -> Result<Option<XenbusState>, StoreError> {
    Ok(text(store, path)?.map(|value| XenbusState::parse(value.as_bytes())))
}

/// A value as text; some writers append a NUL.
fn text(store: &mut dyn Store, path: &str) -> Result<Option<String>, StoreError> {
    Ok(store.read(None, path)?.map(as_text))
}

fn as_text(value: Vec<u8>) -> String {
    String::from_utf8_lossy(&value).trim_end_matches('\0').to_owned()
}

/// A guest's value, escaped for log messages.
fn quoted(value: &str) -> String {
    value.chars().take(QUOTED_MAX).collect::<String>().escape_debug().to_string()
}

/// Aborts a transaction after an error. After a conflict it has already ended.
fn abort(store: &mut dyn Store, transaction: Transaction, error: &StoreError) {
    if !matches!(error, StoreError::Again) {
        // If this fails too, the transaction ends with our connection.
        store.end(transaction, false).ok();
    }
}

/// The keys of a front end.
struct FrontendKeys<'a> {
    store: &'a mut dyn Store,
    frontend: &'a str,
}

impl FrontendKeys<'_> {
    fn text(&mut self, key: &str) -> Result<Option<String>, KeysError> {
        text(self.store, &format!("{}/{key}", self.frontend)).map_err(KeysError::Store)
    }

    /// A number within a range, if the key exists.
    fn number(&mut self, key: &str, range: std::ops::RangeInclusive<u32>) -> Result<Option<u32>, KeysError> {
        let Some(value) = self.text(key)? else { return Ok(None) };
        match value.parse().ok().filter(|number| range.contains(number)) {
            Some(number) => Ok(Some(number)),
            None => Err(KeysError::Value {
                path: format!("{}/{key}", self.frontend),
                value: quoted(&value),
                wanted: format!("{} to {}", range.start(), range.end()),
            }),
        }
    }

    fn required(&mut self, key: &str) -> Result<u32, KeysError> {
        let found = self.number(key, 0..=u32::MAX)?;
        found.ok_or_else(|| KeysError::Missing(format!("{}/{key}", self.frontend)))
    }

    /// The number of pages of a ring, as a power of two; `None` if there is no such key.
    fn order(&mut self, max: u32) -> Result<Option<u32>, KeysError> {
        if let Some(order) = self.number("ring-page-order", 0..=max)? {
            return Ok(Some(order));
        }
        // Written by front ends that read `max-ring-pages`.
        let pages_max = 1u32.checked_shl(max).unwrap_or(1);
        match self.number("num-ring-pages", 1..=pages_max)? {
            Some(pages) if pages.is_power_of_two() => Ok(pages.checked_ilog2()),
            Some(pages) => Err(KeysError::Value {
                path: format!("{}/num-ring-pages", self.frontend),
                value: pages.to_string(),
                wanted: "a power of two".to_owned(),
            }),
            None => Ok(None),
        }
    }

    /// The ring whose keys have this prefix.
    fn ring(&mut self, queue: &str, order: Option<u32>) -> Result<RingKeys, KeysError> {
        let alone = format!("{queue}ring-ref");
        let pages = match order {
            // Front ends differ in the name of the only page.
            None | Some(0) => match self.number(&alone, 0..=u32::MAX)? {
                Some(page) => vec![GrantRef(page)],
                None if order.is_none() => vec![GrantRef(self.required(&alone)?)],
                None => vec![GrantRef(self.required(&format!("{queue}ring-ref0"))?)],
            },
            Some(order) => {
                let count = 1u32.checked_shl(order).unwrap_or(1);
                let page = |index| self.required(&format!("{queue}ring-ref{index}")).map(GrantRef);
                (0..count).map(page).collect::<Result<_, _>>()?
            }
        };
        Ok(RingKeys { pages, port: Port(self.required(&format!("{queue}event-channel"))?) })
    }
}
