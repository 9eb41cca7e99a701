//! Waits until a guest is connected to an attached disk.
//!
//! The nodes of both ends are the crate `vm`'s business. It knows nothing about images and serving processes.

use std::time::Duration;

use xen::Store;

use super::both_ends::BothEnds;
use super::device::{Device, State, text};
use crate::failure::Failure;
use crate::output::printable;

/// Waits until the guest is connected to the disk, and reports each change of a state.
pub fn wait_connected(
    store: &mut dyn Store,
    device: &Device,
    patience: Duration,
    tell: impl FnMut(&str),
) -> Result<(), Failure> {
    let mut both = BothEnds::new(device, patience, tell);
    let connected = both.until(store, |states| match states {
        (Some(State::CONNECTED), Some(State::CONNECTED)) => Some(Ok(())),
        (None, _) | (_, None) => Some(Err(())),
        _ => None,
    })?;
    match connected {
        Some(Ok(())) => Ok(()),
        Some(Err(())) => Err(Failure::new(format!("see {device} connected"), "it was removed in the meantime")),
        None => {
            let advice = match both.states().0 {
                Some(State::INITIALISING) => "it is not served: see the log of its disk process",
                _ => {
                    "a guest that is paused or still booting connects later: the disk stays attached; `tapline xen \
                     list` shows it"
                }
            };
            let seen = both.at_last();
            let said = text(store, None, &format!("{}/error", device.complaint()))?;
            let why =
                said.map_or_else(|| seen.clone(), |said| format!("{seen}; the backend says: {}", printable(&said)));
            Err(Failure::new(format!("see {device} connected"), why).advise(advice))
        }
    }
}

#[cfg(test)]
pub mod test {
    use vm::xen::give::{Wish, announce};
    use xen::DomId;
    use xen::fake::{Host, Tree};

    use super::*;

    /// A machine with a guest, and the disk it shall have.
    pub fn machine() -> (Host, Tree, Device) {
        let host = Host::new().unwrap();
        let mut store = host.store(DomId(0)).unwrap();
        store.write(None, "/local/domain/0/name", b"Domain-0").unwrap();
        store.write(None, "/local/domain/7/name", b"vm").unwrap();
        let device = Device { own: DomId(0), kind: "tapline".into(), guest: DomId(7), vdev: "xvdb".parse().unwrap() };
        (host, store, device)
    }

    pub const WRITABLE: Wish = Wish { read_only: false, kept: false };

    /// Sets the state of one end.
    pub fn say(store: &mut Tree, node: &str, state: &str) {
        store.write(None, &format!("{node}/state"), state.as_bytes()).unwrap();
    }

    #[test]
    fn a_connecting_guest_is_awaited_and_each_state_reported() {
        let (host, mut store, device) = machine();
        announce(&mut store, &device, WRITABLE).unwrap();
        let mut guest = host.store(DomId(7)).unwrap();
        let mut told = Vec::new();
        let nodes = [device.backend(), device.frontend()];
        wait_connected(&mut store, &device, Duration::from_secs(60), |states| {
            told.push(states.to_owned());
            match told.len() {
                1 => say(&mut guest, &nodes[0], "2"),
                2 => say(&mut guest, &nodes[1], "4"),
                _ => say(&mut guest, &nodes[0], "4"),
            }
        })
        .unwrap();
        let expected =
            ["Initialising, guest Initialising", "InitWait, guest Initialising", "InitWait, guest Connected"];
        assert_eq!(told[..3], expected.map(|states| format!("backend {states}")));
    }

    #[test]
    fn a_stuck_guest_is_reported_with_its_state() {
        let (_host, mut store, device) = machine();
        announce(&mut store, &device, WRITABLE).unwrap();
        say(&mut store, &device.backend(), "2");
        let failure = wait_connected(&mut store, &device, Duration::ZERO, |_| {}).unwrap_err();
        assert!(failure.what().ends_with("after 0 s the backend is InitWait, the guest Initialising"), "{failure}");
        store.write(None, &format!("{}/error", device.complaint()), b"22 there is no ring").unwrap();
        let failure = wait_connected(&mut store, &device, Duration::ZERO, |_| {}).unwrap_err();
        assert!(failure.what().ends_with("the guest Initialising; the backend says: 22 there is no ring"), "{failure}");
        store.remove(None, &device.frontend()).unwrap();
        let failure = wait_connected(&mut store, &device, Duration::ZERO, |_| {}).unwrap_err();
        assert!(failure.what().contains("it was removed in the meantime"), "{failure}");
    }
}
