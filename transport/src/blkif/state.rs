//! The xenbus handshake: what is to be done next, from what both ends' nodes say.
//!
//! Knows nothing of rings, grants or the store: it is a function. Invariants: nothing is connected before requests of
//! an earlier front end have ended; keys of a front end are not asked for before it has said that they are its own; a
//! front end that was refused is not tried again before it has begun anew.
//!
//! Specification: Xen's public header io/xenbus.h, and io/blkif.h "Startup".

/// A state of either end (`enum xenbus_state`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// What no end should say.
    Unknown,
    /// It begins.
    Initialising,
    /// It has said what it offers, and waits.
    InitWait,
    /// It has said all there is to say.
    Initialised,
    /// It is connected.
    Connected,
    /// It wants to end.
    Closing,
    /// It has ended.
    Closed,
    /// Of devices that change while in use, which disks do not.
    Reconfiguring,
    /// Likewise.
    Reconfigured,
}

impl State {
    /// The state that a node's value says.
    pub fn parse(value: &[u8]) -> State {
        match value {
            b"1" => State::Initialising,
            b"2" => State::InitWait,
            b"3" => State::Initialised,
            b"4" => State::Connected,
            b"5" => State::Closing,
            b"6" => State::Closed,
            b"7" => State::Reconfiguring,
            b"8" => State::Reconfigured,
            _ => State::Unknown,
        }
    }

    /// What a node says for it.
    pub fn value(self) -> &'static str {
        match self {
            State::Unknown => "0",
            State::Initialising => "1",
            State::InitWait => "2",
            State::Initialised => "3",
            State::Connected => "4",
            State::Closing => "5",
            State::Closed => "6",
            State::Reconfiguring => "7",
            State::Reconfigured => "8",
        }
    }

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            State::Unknown => "in no known state",
            State::Initialising => "initialising",
            State::InitWait => "waiting to initialise",
            State::Initialised => "initialised",
            State::Connected => "connected",
            State::Closing => "closing",
            State::Closed => "closed",
            State::Reconfiguring => "reconfiguring",
            State::Reconfigured => "reconfigured",
        }
    }
}

/// What there is to see.
#[derive(Clone, Copy, Debug)]
pub struct Seen {
    /// What our node says; `None` if it is gone.
    pub ours: Option<State>,
    /// What the front end's node says; `None` if it is gone.
    pub theirs: Option<State>,
    /// Whether the toolstack wants the device to stay.
    pub online: bool,
    /// Whether we hold the front end's rings.
    pub connected: bool,
    /// It has closed since: nothing new is taken.
    pub finishing: bool,
    /// Some of its requests are without answer, or may be.
    pub unanswered: bool,
    /// Whether it was seen to be connected since we hold them.
    pub settled: bool,
    /// Requests of a front end that is gone are under way.
    pub draining: bool,
    /// What we offer was written for the front end that is there.
    pub announced: bool,
    /// What the front end has written about itself could not be used.
    pub refused: bool,
    /// Another process has served the device before us, as our node says, and nobody has its rings since: what they
    /// hold may have no answer.
    pub inherited: bool,
}

/// What is to be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Nothing before something changes.
    Wait,
    /// Write what we offer, and that we wait.
    Announce,
    /// Take the rings, and say so unless the device is to go.
    Connect {
        /// Write that we are connected.
        say: bool,
    },
    /// Answer what the rings hold, and take nothing new.
    Finish,
    /// Let the rings go.
    Disconnect(&'static str),
    /// Say this.
    Say(State),
}

impl Seen {
    /// The next step. Each brings the device nearer to where there is nothing to be done.
    pub fn next(&self) -> Step {
        let Some(ours) = self.ours else { return self.after_answers("our node is gone", Step::Wait) };
        let Some(theirs) = self.theirs else { return self.closed(ours, "the front end's node is gone") };
        match theirs {
            State::Initialising | State::InitWait => self.without("the front end begins anew", self.begin(ours)),
            // Whatever it says now, it has closed.
            _ if self.connected && self.finishing => self.after_answers("the front end has closed", Step::Wait),
            State::Initialised | State::Connected => self.connect(ours, theirs),
            State::Closing | State::Closed if self.owes_answers(ours) => match self.draining {
                true => Step::Wait,
                false => Step::Connect { say: false },
            },
            State::Closing => match ours {
                State::Closing | State::Closed => Step::Wait,
                _ => Step::Say(State::Closing),
            },
            State::Closed => self.closed(ours, "the front end has closed"),
            State::Unknown | State::Reconfiguring | State::Reconfigured => Step::Wait,
        }
    }

    /// Whether a process that is gone may owe answers to a front end that closes: its driver waits for them.
    fn owes_answers(&self, ours: State) -> bool {
        self.inherited && !self.connected && !self.refused && matches!(ours, State::Connected | State::Closing)
    }

    /// First lets go of what is connected, and waits for what is under way; then `step`.
    fn without(&self, why: &'static str, step: Step) -> Step {
        match (self.connected, self.draining) {
            (true, _) => Step::Disconnect(why),
            (false, true) => Step::Wait,
            (false, false) => step,
        }
    }

    /// The same; but a driver that lets its device go waits for the answers to what it has asked before. One that
    /// begins anew has forgotten them, and the pages in which they would be.
    fn after_answers(&self, why: &'static str, step: Step) -> Step {
        match self.connected && self.unanswered {
            true => Step::Finish,
            false => self.without(why, step),
        }
    }

    fn begin(&self, ours: State) -> Step {
        match ours {
            State::Closing if !self.online => Step::Say(State::Closed),
            State::Closed if !self.online => Step::Wait,
            State::InitWait if self.announced => Step::Wait,
            _ => Step::Announce,
        }
    }

    fn connect(&self, ours: State, theirs: State) -> Step {
        if self.connected {
            // One that was connected and is only initialised has begun anew, faster than we looked.
            let anew = self.settled && theirs == State::Initialised;
            return if anew { Step::Disconnect("the front end begins anew") } else { Step::Wait };
        }
        let leaving = !self.online && matches!(ours, State::Closing | State::Closed);
        match ours {
            _ if self.draining => Step::Wait,
            State::Closing | State::Closed if self.refused => Step::Wait,
            _ if self.refused => Step::Say(State::Closing),
            State::Closed if leaving => Step::Wait,
            _ => Step::Connect { say: !leaving },
        }
    }

    fn closed(&self, ours: State, why: &'static str) -> Step {
        let step = if ours == State::Closed { Step::Wait } else { Step::Say(State::Closed) };
        self.after_answers(why, step)
    }
}

#[cfg(test)]
mod test {
    use super::*;

    const ALL: [State; 9] = [
        State::Unknown,
        State::Initialising,
        State::InitWait,
        State::Initialised,
        State::Connected,
        State::Closing,
        State::Closed,
        State::Reconfiguring,
        State::Reconfigured,
    ];

    const NEW: Seen = Seen {
        ours: Some(State::Initialising),
        theirs: Some(State::Initialising),
        online: true,
        connected: false,
        finishing: false,
        unanswered: false,
        settled: false,
        draining: false,
        announced: false,
        refused: false,
        inherited: false,
    };

    /// Does what is said until there is nothing more to do.
    fn settle(mut seen: Seen) -> (Seen, usize) {
        for steps in 0..10 {
            match seen.next() {
                Step::Wait => return (seen, steps),
                Step::Announce => (seen.ours, seen.announced) = (Some(State::InitWait), true),
                Step::Connect { say } => {
                    (seen.connected, seen.unanswered, seen.inherited) = (true, true, false);
                    seen.ours = if say { Some(State::Connected) } else { seen.ours };
                }
                Step::Finish => (seen.finishing, seen.unanswered) = (true, false),
                Step::Disconnect(_) => {
                    (seen.connected, seen.settled, seen.announced, seen.finishing) = (false, false, false, false);
                }
                Step::Say(state) => seen.ours = Some(state),
            }
        }
        panic!("{seen:?} never comes to rest");
    }

    #[test]
    fn values_are_states() {
        for state in ALL {
            assert_eq!(State::parse(state.value().as_bytes()), state);
        }
        assert_eq!(State::parse(b"44"), State::Unknown);
    }

    #[test]
    fn a_front_end_comes_and_goes_and_comes_again() {
        let mut seen = NEW;
        for _ in 0..3 {
            for (theirs, ours, connected) in [
                (State::Initialising, State::InitWait, false),
                (State::Initialised, State::Connected, true),
                (State::Connected, State::Connected, true),
                (State::Closing, State::Closing, true),
                (State::Closed, State::Closed, false),
            ] {
                seen.theirs = Some(theirs);
                (seen, _) = settle(seen);
                assert_eq!((seen.ours, seen.connected), (Some(ours), connected), "{theirs:?}");
            }
        }
    }

    #[test]
    fn every_combination_comes_to_rest_and_a_refused_front_end_is_never_connected() {
        let mut count = 0;
        let states = || ALL.into_iter().map(Some).chain([None]);
        for (ours, theirs) in states().flat_map(|ours| states().map(move |theirs| (ours, theirs))) {
            for flags in 0..512u16 {
                let [online, connected, settled, draining, announced, refused, unanswered, finishing, inherited] =
                    [1, 2, 4, 8, 16, 32, 64, 128, 256].map(|bit| flags & bit != 0);
                let (finishing, unanswered) = (finishing && connected, unanswered && connected);
                let inherited = inherited && !connected;
                let seen = Seen {
                    ours,
                    theirs,
                    online,
                    connected,
                    finishing,
                    unanswered,
                    settled,
                    draining,
                    announced,
                    refused,
                    inherited,
                };
                let (end, steps) = settle(seen);
                assert!(steps <= 4, "{seen:?} takes {steps} steps");
                assert!(!end.connected || connected || !(refused || draining), "{seen:?}");
                let gone = matches!(theirs, None | Some(State::Closed | State::Initialising | State::InitWait));
                assert!(!end.connected || !gone, "{seen:?} stays connected");
                count += 1;
            }
        }
        assert_eq!(count, 51200);
    }

    #[test]
    fn the_toolstack_ends_a_device_that_nobody_uses() {
        let seen = Seen { ours: Some(State::Closing), online: false, ..NEW };
        assert_eq!(settle(seen).0.ours, Some(State::Closed));
        let used = Seen { connected: true, theirs: Some(State::Connected), ..seen };
        assert!(settle(used).0.connected, "one in use is let go by its front end");
    }

    #[test]
    fn what_a_front_end_that_closes_has_asked_is_answered_first_and_not_what_one_has_forgotten() {
        let used = Seen { connected: true, unanswered: true, ours: Some(State::Connected), ..NEW };
        for theirs in [Some(State::Closed), None] {
            assert_eq!(Seen { theirs, ..used }.next(), Step::Finish);
            assert!(matches!(Seen { theirs, unanswered: false, ..used }.next(), Step::Disconnect(_)));
        }
        assert_eq!(Seen { ours: None, ..used }.next(), Step::Finish);
        assert!(matches!(used.next(), Step::Disconnect(_)), "it begins anew");
        let back = Seen { theirs: Some(State::Connected), finishing: true, unanswered: false, ..used };
        assert!(matches!(back.next(), Step::Disconnect(_)), "what has closed is not served any more");
    }

    #[test]
    fn what_a_process_that_is_gone_owes_to_a_front_end_that_closes_is_answered_first() {
        for theirs in [State::Closing, State::Closed] {
            for ours in [State::Connected, State::Closing] {
                let seen = Seen { ours: Some(ours), theirs: Some(theirs), inherited: true, ..NEW };
                assert_eq!(seen.next(), Step::Connect { say: false }, "{ours:?} {theirs:?}");
                assert_eq!(settle(seen).0.ours, Some(theirs));
                assert!(!matches!(Seen { inherited: false, ..seen }.next(), Step::Connect { .. }));
            }
            let closed = Seen { ours: Some(State::Closed), theirs: Some(theirs), inherited: true, ..NEW };
            assert_eq!(closed.next(), Step::Wait, "whoever has said Closed has answered");
        }
    }

    #[test]
    fn a_front_end_that_was_connected_and_is_initialised_has_begun_anew() {
        let seen = Seen { theirs: Some(State::Initialised), connected: true, ours: Some(State::Connected), ..NEW };
        assert_eq!(seen.next(), Step::Wait);
        assert!(matches!(Seen { settled: true, ..seen }.next(), Step::Disconnect(_)));
    }
}
