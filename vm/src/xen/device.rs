//! A virtual disk in xenstore: a node for the guest's frontend and one for our backend.
//!
//! It knows paths, states and the values below them; not how a device is used. Invariant: related changes are made in
//! one transaction, which is retried when another client was faster.

use std::fmt;

use control::Error;
use xen::{DomId, Store, StoreError, Transaction};

use super::vdev::Vdev;

/// How many times a conflicting transaction is retried. Each conflict means that another client has made progress.
const ATTEMPTS: usize = 64;

/// The state of one end of a device (Xen, io/xenbus.h).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct State(u8);

impl State {
    /// The nodes are there.
    pub const INITIALISING: State = State(1);
    /// The backend waits for the guest.
    pub const INIT_WAIT: State = State(2);
    /// Both do their part.
    pub const CONNECTED: State = State(4);
    /// The end is disconnecting from the other one.
    pub const CLOSING: State = State(5);
    /// The end is disconnected and uses no pages of the other one.
    pub const CLOSED: State = State(6);

    /// As written in xenstore.
    pub fn digits(self) -> String {
        self.0.to_string()
    }
}

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.0 {
            0 => "Unknown",
            1 => "Initialising",
            2 => "InitWait",
            3 => "Initialised",
            4 => "Connected",
            5 => "Closing",
            6 => "Closed",
            7 => "Reconfiguring",
            8 => "Reconfigured",
            _ => "in an unknown state",
        })
    }
}

/// Describes the state of an end, or that it does not exist.
pub fn described(state: Option<State>) -> String {
    state.map_or_else(|| "gone".to_owned(), |state| state.to_string())
}

/// A virtual disk of a guest, served by one backend.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Device {
    /// Whose backend it is: ours.
    pub own: DomId,
    /// The backend's name in the store.
    pub kind: String,
    /// Whose disk it is.
    pub guest: DomId,
    /// The virtual disk.
    pub vdev: Vdev,
}

impl Device {
    /// The backend's node.
    pub fn backend(&self) -> String {
        format!("/local/domain/{}/backend/{}/{}/{}", self.own, self.kind, self.guest, self.vdev.number())
    }

    /// The guest's node.
    pub fn frontend(&self) -> String {
        frontend(self.guest, self.vdev)
    }

    /// xl's own node for it, if it is xl's.
    pub fn of_xl(&self) -> String {
        format!("/libxl/{}/device/vbd/{}", self.guest, self.vdev.number())
    }

    /// Where backends report errors: `error/` and the device's path in our domain.
    pub fn complaint(&self) -> String {
        format!("/local/domain/{}/error/backend/{}/{}/{}", self.own, self.kind, self.guest, self.vdev.number())
    }

    /// The device that belongs to a backend's node.
    pub fn of_backend(path: &str) -> Option<Device> {
        let mut words = path.strip_prefix("/local/domain/")?.split('/');
        let own = DomId(words.next()?.parse().ok()?);
        let kind = words.next().filter(|&word| word == "backend").and_then(|_| words.next())?;
        let guest = DomId(words.next()?.parse().ok()?);
        let vdev = Vdev::of_number(words.next()?.parse().ok()?);
        words.next().is_none().then(|| Device { own, kind: kind.to_owned(), guest, vdev })
    }

    /// The states of both ends: the backend, then the guest.
    pub fn states(
        &self,
        store: &mut dyn Store,
        within: Option<Transaction>,
    ) -> Result<(Option<State>, Option<State>), Error> {
        Ok((state(store, within, &self.backend())?, state(store, within, &self.frontend())?))
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of domain {}", self.vdev, self.guest)
    }
}

/// A guest's node for a disk.
pub fn frontend(guest: DomId, vdev: Vdev) -> String {
    format!("/local/domain/{guest}/device/vbd/{}", vdev.number())
}

/// A value that is text.
pub fn text(store: &mut dyn Store, within: Option<Transaction>, path: &str) -> Result<Option<String>, Error> {
    let value = store.read(within, path).map_err(store_failed)?;
    Ok(value.map(|value| String::from_utf8_lossy(&value).into_owned()))
}

/// The state of one end. A guest may have written anything there: a value that is not a number counts as Unknown.
fn state(store: &mut dyn Store, within: Option<Transaction>, node: &str) -> Result<Option<State>, Error> {
    let value = text(store, within, &format!("{node}/state"))?;
    Ok(value.map(|value| State(value.trim().parse().unwrap_or(0))))
}

/// The names below a node.
pub fn children(store: &mut dyn Store, within: Option<Transaction>, path: &str) -> Result<Vec<String>, Error> {
    Ok(store.list(within, path).map_err(store_failed)?.unwrap_or_default())
}

/// Writes values below a node.
pub fn write_all(
    store: &mut dyn Store,
    within: Option<Transaction>,
    node: &str,
    values: &[(&str, &str)],
) -> Result<(), Error> {
    for (key, value) in values {
        store.write(within, &format!("{node}/{key}"), value.as_bytes()).map_err(store_failed)?;
    }
    Ok(())
}

/// Removes our end, its error node, and the nodes above them if they are empty.
pub fn remove_own_end(store: &mut dyn Store, within: Option<Transaction>, device: &Device) -> Result<(), Error> {
    for node in [device.backend(), device.complaint()] {
        store.remove(within, &node).map_err(store_failed)?;
        let Some((above, _)) = node.rsplit_once('/') else { continue };
        if store.list(within, above).map_err(store_failed)?.is_some_and(|left| left.is_empty()) {
            store.remove(within, above).map_err(store_failed)?;
        }
    }
    Ok(())
}

/// Makes all changes of `change` atomically.
pub fn together<T, E: From<Error>>(
    store: &mut dyn Store,
    mut change: impl FnMut(&mut dyn Store, Option<Transaction>) -> Result<T, E>,
) -> Result<T, E> {
    let mut attempts = 0;
    loop {
        let transaction = store.begin().map_err(store_failed)?;
        let changed = match change(store, Some(transaction)) {
            Ok(changed) => changed,
            Err(failure) => {
                // The result is that nothing is to be changed; if the connection is lost, xenstore has dropped the
                // transaction anyway.
                store.end(transaction, false).unwrap_or_default();
                return Err(failure);
            }
        };
        attempts += 1;
        match store.end(transaction, true) {
            Ok(()) => return Ok(changed),
            Err(StoreError::Again) if attempts < ATTEMPTS => {}
            Err(error) => return Err(store_failed(error).into()),
        }
    }
}

/// An error of xenstore, with advice. The message already says what was tried.
pub fn store_failed(error: StoreError) -> Error {
    let advice = match &error {
        StoreError::Unreachable { .. } => "run this in domain 0 of a Xen host, as root",
        StoreError::NoEntry { .. } => "the node was removed by its owner: check with 'tapline xen list' and try again",
        StoreError::Again => "other processes keep changing the same nodes: try again",
        StoreError::Refused { code, .. } => match code.as_str() {
            "EACCES" => "only a privileged domain may do that: run it in domain 0",
            "ENOSPC" | "EQUOTA" => "a xenstore quota is exhausted: remove unneeded nodes, or raise it (xenstored(8))",
            _ => "see xenstored's log",
        },
        StoreError::TimedOut { .. } | StoreError::Lost { .. } => {
            "check that xenstored is running; the operation may or may not have taken effect: check with 'tapline xen \
             list'"
        }
    };
    Error::said(error).advise(advice)
}

#[cfg(test)]
mod test {
    use xen::fake::{Host, Subsystem};

    use super::*;

    #[test]
    fn a_device_is_identified_by_its_backends_path() {
        let device = Device { own: DomId(0), kind: "tapline".into(), guest: DomId(7), vdev: "xvdb".parse().unwrap() };
        assert_eq!(device.backend(), "/local/domain/0/backend/tapline/7/51728");
        assert_eq!(Device::of_backend(&device.backend()), Some(device));
        for other in
            ["/local/domain/0/backend/vif/7", "/local/domain/0/device/vbd/7/1", "/local/domain/0/backend/a/1/2/3"]
        {
            assert_eq!(Device::of_backend(other), None, "{other}");
        }
    }

    #[test]
    fn an_invalid_guest_state_is_unknown() {
        let host = Host::new().unwrap();
        let mut store = host.store(DomId(0)).unwrap();
        store.write(None, "/a/state", b"\xff\xfe4").unwrap();
        assert_eq!(described(state(&mut store, None, "/a").unwrap()), "Unknown");
        assert_eq!(described(state(&mut store, None, "/b").unwrap()), "gone");
    }

    #[test]
    fn a_conflicting_transaction_is_retried() {
        let host = Host::new().unwrap();
        let (mut ours, mut other) = (host.store(DomId(0)).unwrap(), host.store(DomId(0)).unwrap());
        let mut rounds = 0;
        together(&mut ours, |store, within| {
            rounds += 1;
            text(store, within, "/x")?;
            if rounds == 1 {
                other.write(None, "/x", b"faster").unwrap();
            }
            write_all(store, within, "/x", &[("y", "1")])
        })
        .unwrap();
        assert_eq!(rounds, 2);
        assert_eq!(other.read(None, "/x/y").unwrap().as_deref(), Some(b"1".as_slice()));
    }

    #[test]
    fn a_change_that_fails_leaves_nothing_behind() {
        let host = Host::new().unwrap();
        let mut store = host.store(DomId(0)).unwrap();
        host.fail(Subsystem::Store, 3);
        let failure = together(&mut store, |store, within| write_all(store, within, "/x", &[("a", "1"), ("b", "2")]));
        assert!(failure.unwrap_err().message.contains("/x/b"));
        assert_eq!(store.read(None, "/x/a").unwrap(), None);
        assert_eq!(host.counts().transactions, 0);
    }
}
