//! Follows the states of both ends of a device until they are as expected, with a time limit.
//!
//! It knows nothing about which states are expected. Invariant: each change of a state is reported once.

use std::time::Duration;

use control::{Error, printable};
use xen::Store;

use super::device::{Device, State, described, text};
use super::wait::Wait;

/// The state of the backend, then of the frontend; `None` where there is no node.
pub type States = (Option<State>, Option<State>);

/// Both ends, as last seen.
pub struct BothEnds<'a, T> {
    device: &'a Device,
    patience: Duration,
    tell: T,
    last: Option<States>,
}

impl<'a, T: FnMut(&str)> BothEnds<'a, T> {
    /// Follows both ends of a device and reports each change.
    pub fn new(device: &'a Device, patience: Duration, tell: T) -> BothEnds<'a, T> {
        BothEnds { device, patience, tell, last: None }
    }

    /// Follows them until `judge` comes to something, or the time is up; `None` then.
    pub fn until<V>(&mut self, store: &mut dyn Store, judge: impl Fn(States) -> Option<V>) -> Result<Option<V>, Error> {
        let paths = [self.device.backend(), self.device.frontend()];
        Wait { paths: &paths, patience: self.patience, also: None }.until(store, |store| {
            let states = self.device.states(store, None)?;
            if self.last != Some(states) {
                (self.tell)(&format!("backend {}, guest {}", described(states.0), described(states.1)));
                self.last = Some(states);
            }
            Ok(judge(states))
        })
    }

    /// The states that were seen last.
    pub fn states(&self) -> States {
        self.last.unwrap_or_default()
    }

    /// The states when the time was up.
    pub fn at_last(&self) -> String {
        let (backend, guest) = self.states();
        let seconds = self.patience.as_secs();
        format!("after {seconds} s the backend is {}, the guest {}", described(backend), described(guest))
    }
}

/// Waits until the guest is connected to the disk, and reports each change of a state.
pub fn wait_connected(
    store: &mut dyn Store,
    device: &Device,
    patience: Duration,
    tell: impl FnMut(&str),
) -> Result<(), Error> {
    let mut both = BothEnds::new(device, patience, tell);
    let connected = both.until(store, |states| match states {
        (Some(State::CONNECTED), Some(State::CONNECTED)) => Some(Ok(())),
        (None, _) | (_, None) => Some(Err(())),
        _ => None,
    })?;
    match connected {
        Some(Ok(())) => Ok(()),
        Some(Err(())) => Err(Error::cannot(format!("see {device} connected"), "it was removed in the meantime")),
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
            Err(Error::cannot(format!("see {device} connected"), why).advise(advice))
        }
    }
}

#[cfg(test)]
mod test {
    use super::super::fake::{WRITABLE, machine, say};
    use super::super::give::announce;
    use xen::DomId;

    use super::*;

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
        assert!(failure.message.ends_with("after 0 s the backend is InitWait, the guest Initialising"), "{failure}");
        store.write(None, &format!("{}/error", device.complaint()), b"22 there is no ring").unwrap();
        let failure = wait_connected(&mut store, &device, Duration::ZERO, |_| {}).unwrap_err();
        assert!(
            failure.message.ends_with("the guest Initialising; the backend says: 22 there is no ring"),
            "{failure}"
        );
        store.remove(None, &device.frontend()).unwrap();
        let failure = wait_connected(&mut store, &device, Duration::ZERO, |_| {}).unwrap_err();
        assert!(failure.message.contains("it was removed in the meantime"), "{failure}");
    }
}
