//! The xenbus handshake: the next action, derived from the states of both ends.
//!
//! It knows nothing about rings, grants or the store: it is a pure function. Invariants: a front end is connected only
//! when the requests of the earlier one have completed; a front end's keys are not read before its state shows that
//! they are its own; a refused front end is not retried before it has restarted.
//!
//! Specification: Xen's public header io/xenbus.h, and io/blkif.h "Startup".

/// The state of either end (`enum xenbus_state`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum XenbusState {
    /// Not a valid state.
    Unknown,
    /// The end is starting.
    Initialising,
    /// The end has written its features, and waits.
    InitWait,
    /// The end has written all its keys.
    Initialised,
    /// The end is connected.
    Connected,
    /// The end is shutting down.
    Closing,
    /// The end has shut down.
    Closed,
    /// Not used by disks: for devices that are reconfigured while in use.
    Reconfiguring,
    /// Not used by disks, like `Reconfiguring`.
    Reconfigured,
}

impl XenbusState {
    /// Parses the value of a node.
    pub fn parse(value: &[u8]) -> XenbusState {
        match value {
            b"1" => XenbusState::Initialising,
            b"2" => XenbusState::InitWait,
            b"3" => XenbusState::Initialised,
            b"4" => XenbusState::Connected,
            b"5" => XenbusState::Closing,
            b"6" => XenbusState::Closed,
            b"7" => XenbusState::Reconfiguring,
            b"8" => XenbusState::Reconfigured,
            _ => XenbusState::Unknown,
        }
    }

    /// The value in a node.
    pub fn value(self) -> &'static str {
        match self {
            XenbusState::Unknown => "0",
            XenbusState::Initialising => "1",
            XenbusState::InitWait => "2",
            XenbusState::Initialised => "3",
            XenbusState::Connected => "4",
            XenbusState::Closing => "5",
            XenbusState::Closed => "6",
            XenbusState::Reconfiguring => "7",
            XenbusState::Reconfigured => "8",
        }
    }

    /// The name in messages.
    pub fn name(self) -> &'static str {
        match self {
            XenbusState::Unknown => "in no known state",
            XenbusState::Initialising => "initialising",
            XenbusState::InitWait => "waiting to initialise",
            XenbusState::Initialised => "initialised",
            XenbusState::Connected => "connected",
            XenbusState::Closing => "closing",
            XenbusState::Closed => "closed",
            XenbusState::Reconfiguring => "reconfiguring",
            XenbusState::Reconfigured => "reconfigured",
        }
    }
}

/// The inputs of the handshake.
#[derive(Clone, Copy, Debug)]
pub struct Handshake {
    /// Our state; `None` if our node does not exist.
    pub ours: Option<XenbusState>,
    /// The front end's state; `None` if its node does not exist.
    pub theirs: Option<XenbusState>,
    /// The toolstack is not removing the device.
    pub online: bool,
    /// We are attached to the front end's rings.
    pub connected: bool,
    /// The connected front end has closed: no new requests are taken.
    pub finishing: bool,
    /// The connected front end has, or may have, unanswered requests.
    pub unanswered: bool,
    /// The front end was seen connected since we attached.
    pub seen_connected: bool,
    /// Requests of an earlier front end are in flight.
    pub draining: bool,
    /// Our features were written for the current front end.
    pub announced: bool,
    /// The keys of the front end were invalid.
    pub refused: bool,
    /// Another process has served the device before us, according to our node, and its rings have not been attached
    /// since: they may contain unanswered requests.
    pub inherited: bool,
}

/// The next action.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Do nothing until an input changes.
    Wait,
    /// Write our features and InitWait.
    Announce,
    /// Attach the rings.
    Connect {
        /// Also write Connected; not if the device is being removed.
        write_state: bool,
    },
    /// Answer the requests in the rings, and take no new ones.
    Finish,
    /// Release the rings.
    Disconnect(&'static str),
    /// Write this state.
    WriteState(XenbusState),
}

impl Handshake {
    /// The next action. A few actions lead to [`Action::Wait`] from any state.
    pub fn next(&self) -> Action {
        let Some(ours) = self.ours else {
            return self.after_responses("the backend node is gone", Action::Wait);
        };
        let Some(theirs) = self.theirs else { return self.on_closed(ours, "the front end's node is gone") };
        match theirs {
            XenbusState::Initialising | XenbusState::InitWait => {
                self.after_disconnect("the front end restarts", self.on_initialising(ours))
            }
            // In any later state, it has closed.
            _ if self.connected && self.finishing => self.after_responses("the front end has closed", Action::Wait),
            XenbusState::Initialised | XenbusState::Connected => self.on_initialised(ours, theirs),
            XenbusState::Closing | XenbusState::Closed if self.has_inherited_requests(ours) => match self.draining {
                true => Action::Wait,
                false => Action::Connect { write_state: false },
            },
            XenbusState::Closing => match ours {
                XenbusState::Closing | XenbusState::Closed => Action::Wait,
                _ => Action::WriteState(XenbusState::Closing),
            },
            XenbusState::Closed => self.on_closed(ours, "the front end has closed"),
            XenbusState::Unknown | XenbusState::Reconfiguring | XenbusState::Reconfigured => Action::Wait,
        }
    }

    /// Returns true if an earlier process may have left requests of a closing front end unanswered, for which its
    /// driver waits.
    fn has_inherited_requests(&self, ours: XenbusState) -> bool {
        self.inherited
            && !self.connected
            && !self.refused
            && matches!(ours, XenbusState::Connected | XenbusState::Closing)
    }

    /// Releases the rings and waits for requests in flight before `action`.
    fn after_disconnect(&self, why: &'static str, action: Action) -> Action {
        match (self.connected, self.draining) {
            (true, _) => Action::Disconnect(why),
            (false, true) => Action::Wait,
            (false, false) => action,
        }
    }

    /// Answers the requests in the rings, then continues as [`Handshake::after_disconnect`]: a driver that releases its
    /// device waits for the responses. One that restarts does not: its pages may be in use for other data.
    fn after_responses(&self, why: &'static str, action: Action) -> Action {
        match self.connected && self.unanswered {
            true => Action::Finish,
            false => self.after_disconnect(why, action),
        }
    }

    fn on_initialising(&self, ours: XenbusState) -> Action {
        match ours {
            XenbusState::Closing if !self.online => Action::WriteState(XenbusState::Closed),
            XenbusState::Closed if !self.online => Action::Wait,
            XenbusState::InitWait if self.announced => Action::Wait,
            _ => Action::Announce,
        }
    }

    fn on_initialised(&self, ours: XenbusState, theirs: XenbusState) -> Action {
        if self.connected {
            // A front end that was connected and is Initialised now has restarted between two observations.
            let restarted = self.seen_connected && theirs == XenbusState::Initialised;
            return if restarted { Action::Disconnect("the front end restarts") } else { Action::Wait };
        }
        let leaving = !self.online && matches!(ours, XenbusState::Closing | XenbusState::Closed);
        match ours {
            _ if self.draining => Action::Wait,
            XenbusState::Closing | XenbusState::Closed if self.refused => Action::Wait,
            _ if self.refused => Action::WriteState(XenbusState::Closing),
            XenbusState::Closed if leaving => Action::Wait,
            _ => Action::Connect { write_state: !leaving },
        }
    }

    fn on_closed(&self, ours: XenbusState, why: &'static str) -> Action {
        let action = if ours == XenbusState::Closed { Action::Wait } else { Action::WriteState(XenbusState::Closed) };
        self.after_responses(why, action)
    }
}

#[cfg(test)]
mod test {
    use super::*;

    const ALL: [XenbusState; 9] = [
        XenbusState::Unknown,
        XenbusState::Initialising,
        XenbusState::InitWait,
        XenbusState::Initialised,
        XenbusState::Connected,
        XenbusState::Closing,
        XenbusState::Closed,
        XenbusState::Reconfiguring,
        XenbusState::Reconfigured,
    ];

    const NEW: Handshake = Handshake {
        ours: Some(XenbusState::Initialising),
        theirs: Some(XenbusState::Initialising),
        online: true,
        connected: false,
        finishing: false,
        unanswered: false,
        seen_connected: false,
        draining: false,
        announced: false,
        refused: false,
        inherited: false,
    };

    /// Performs actions until there is nothing more to do.
    fn run_to_rest(mut seen: Handshake) -> (Handshake, usize) {
        for steps in 0..10 {
            match seen.next() {
                Action::Wait => return (seen, steps),
                Action::Announce => (seen.ours, seen.announced) = (Some(XenbusState::InitWait), true),
                Action::Connect { write_state } => {
                    (seen.connected, seen.unanswered, seen.inherited) = (true, true, false);
                    seen.ours = if write_state { Some(XenbusState::Connected) } else { seen.ours };
                }
                Action::Finish => (seen.finishing, seen.unanswered) = (true, false),
                Action::Disconnect(_) => {
                    (seen.connected, seen.seen_connected, seen.announced, seen.finishing) =
                        (false, false, false, false);
                }
                Action::WriteState(state) => seen.ours = Some(state),
            }
        }
        panic!("{seen:?} never leads to Wait");
    }

    #[test]
    fn node_values_map_to_states() {
        for state in ALL {
            assert_eq!(XenbusState::parse(state.value().as_bytes()), state);
        }
        assert_eq!(XenbusState::parse(b"44"), XenbusState::Unknown);
    }

    #[test]
    fn a_front_end_can_connect_disconnect_and_reconnect() {
        let mut seen = NEW;
        for _ in 0..3 {
            for (theirs, ours, connected) in [
                (XenbusState::Initialising, XenbusState::InitWait, false),
                (XenbusState::Initialised, XenbusState::Connected, true),
                (XenbusState::Connected, XenbusState::Connected, true),
                (XenbusState::Closing, XenbusState::Closing, true),
                (XenbusState::Closed, XenbusState::Closed, false),
            ] {
                seen.theirs = Some(theirs);
                (seen, _) = run_to_rest(seen);
                assert_eq!((seen.ours, seen.connected), (Some(ours), connected), "{theirs:?}");
            }
        }
    }

    #[test]
    fn every_state_leads_to_wait_and_refused_front_ends_stay_unconnected() {
        let mut count = 0;
        let states = || ALL.into_iter().map(Some).chain([None]);
        for (ours, theirs) in states().flat_map(|ours| states().map(move |theirs| (ours, theirs))) {
            for flags in 0..512u16 {
                let [online, connected, seen_connected, draining, announced, refused, unanswered, finishing, inherited] =
                    [1, 2, 4, 8, 16, 32, 64, 128, 256].map(|bit| flags & bit != 0);
                let (finishing, unanswered) = (finishing && connected, unanswered && connected);
                let inherited = inherited && !connected;
                let seen = Handshake {
                    ours,
                    theirs,
                    online,
                    connected,
                    finishing,
                    unanswered,
                    seen_connected,
                    draining,
                    announced,
                    refused,
                    inherited,
                };
                let (end, steps) = run_to_rest(seen);
                assert!(steps <= 4, "{seen:?} takes {steps} steps");
                assert!(!end.connected || connected || !(refused || draining), "{seen:?}");
                let gone = matches!(
                    theirs,
                    None | Some(XenbusState::Closed | XenbusState::Initialising | XenbusState::InitWait)
                );
                assert!(!end.connected || !gone, "{seen:?} stays connected");
                count += 1;
            }
        }
        assert_eq!(count, 51200);
    }

    #[test]
    fn the_toolstack_closes_an_unused_device() {
        let seen = Handshake { ours: Some(XenbusState::Closing), online: false, ..NEW };
        assert_eq!(run_to_rest(seen).0.ours, Some(XenbusState::Closed));
        let used = Handshake { connected: true, theirs: Some(XenbusState::Connected), ..seen };
        assert!(run_to_rest(used).0.connected, "a device in use is released by its front end");
    }

    #[test]
    fn requests_of_closing_front_ends_are_answered_but_not_of_restarting_ones() {
        let used = Handshake { connected: true, unanswered: true, ours: Some(XenbusState::Connected), ..NEW };
        for theirs in [Some(XenbusState::Closed), None] {
            assert_eq!(Handshake { theirs, ..used }.next(), Action::Finish);
            assert!(matches!(Handshake { theirs, unanswered: false, ..used }.next(), Action::Disconnect(_)));
        }
        assert_eq!(Handshake { ours: None, ..used }.next(), Action::Finish);
        assert!(matches!(used.next(), Action::Disconnect(_)), "the front end restarts");
        let back = Handshake { theirs: Some(XenbusState::Connected), finishing: true, unanswered: false, ..used };
        assert!(matches!(back.next(), Action::Disconnect(_)), "a closed front end is not served any more");
    }

    #[test]
    fn inherited_requests_of_a_closing_front_end_are_answered_first() {
        for theirs in [XenbusState::Closing, XenbusState::Closed] {
            for ours in [XenbusState::Connected, XenbusState::Closing] {
                let seen = Handshake { ours: Some(ours), theirs: Some(theirs), inherited: true, ..NEW };
                assert_eq!(seen.next(), Action::Connect { write_state: false }, "{ours:?} {theirs:?}");
                assert_eq!(run_to_rest(seen).0.ours, Some(theirs));
                assert!(!matches!(Handshake { inherited: false, ..seen }.next(), Action::Connect { .. }));
            }
            let closed = Handshake { ours: Some(XenbusState::Closed), theirs: Some(theirs), inherited: true, ..NEW };
            assert_eq!(closed.next(), Action::Wait, "a process that wrote Closed has answered all requests");
        }
    }

    #[test]
    fn a_front_end_that_goes_from_connected_to_initialised_has_restarted() {
        let seen = Handshake {
            theirs: Some(XenbusState::Initialised),
            connected: true,
            ours: Some(XenbusState::Connected),
            ..NEW
        };
        assert_eq!(seen.next(), Action::Wait);
        assert!(matches!(Handshake { seen_connected: true, ..seen }.next(), Action::Disconnect(_)));
    }
}
