//! Follows the states of both ends of a device until they are as expected, with a time limit.
//!
//! It knows nothing about which states are expected. Invariant: each change of a state is reported once.

use std::time::Duration;

use xen::Store;

use super::device::{Device, State, described};
use super::wait::Wait;
use crate::failure::Failure;

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
    pub fn until<V>(
        &mut self,
        store: &mut dyn Store,
        judge: impl Fn(States) -> Option<V>,
    ) -> Result<Option<V>, Failure> {
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
