//! Notifies clients when the disk cannot write, when it can again, and when a request was failed because it had killed
//! several processes (`watch`).
//!
//! It knows no disk. Invariants: a client is notified of each lasting condition, and of the current one last; the
//! buffer of a client that does not read is bounded, because nothing is sent to it before it has read the previous
//! notification.

use control::Reply;
use control::answer::{Change, Condition, ServerChange};
use serde::Serialize;

use super::{Asker, Control};

/// The watching clients.
#[derive(Debug, Default)]
pub struct Watchers(Vec<Watcher>);

#[derive(Debug)]
struct Watcher {
    asker: Asker,
    /// The state that was last sent to it.
    sent: WriteState,
    /// The number of condemned requests that was last sent to it.
    fatal: u64,
}

/// Whether the disk can write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum WriteState {
    Working,
    Full,
    /// A server of its images is away.
    Away,
    Broken,
}

impl WriteState {
    fn of(condition: Condition) -> WriteState {
        match condition {
            Condition { broken: true, .. } => WriteState::Broken,
            Condition { away_ms: Some(_), .. } => WriteState::Away,
            Condition { full: true, .. } => WriteState::Full,
            _ => WriteState::Working,
        }
    }

    /// Returns the line about a change to this state.
    fn line(self, waiting: usize, asker: &Asker) -> String {
        match self {
            WriteState::Working => event(asker, Change::Resumed { waiting }),
            WriteState::Full => event(asker, Change::Full { waiting }),
            WriteState::Away => event(asker, ServerChange::Away { waiting }),
            WriteState::Broken => event(asker, Change::Broken { waiting }),
        }
    }
}

impl Watchers {
    /// Adds a client, which knows the condition from the answer. If it is already watching, the new id replaces the old
    /// one.
    pub fn add(&mut self, asker: &Asker, condition: Condition) {
        self.0.retain(|other| other.asker.number != asker.number);
        self.0.push(Watcher { asker: asker.clone(), sent: WriteState::of(condition), fatal: condition.fatal });
    }
}

impl Control {
    /// Notifies the watching clients of changes.
    pub(super) fn tell_watchers(&mut self, condition: Condition) {
        let state = WriteState::of(condition);
        let mut watchers = std::mem::take(&mut self.watchers);
        watchers.0.retain_mut(|watcher| {
            let Some(client) = self.client(&watcher.asker) else { return false };
            if watcher.fatal < condition.fatal && client.is_up_to_date() {
                watcher.fatal = condition.fatal;
                client.say(&event(&watcher.asker, Change::Fatal { fatal: condition.fatal }));
            }
            if watcher.sent != state && client.is_up_to_date() {
                watcher.sent = state;
                client.say(&state.line(condition.waiting, &watcher.asker));
            }
            true
        });
        self.watchers = watchers;
    }
}

fn event(asker: &Asker, change: impl Serialize) -> String {
    Reply::<(), _>::Event(change).line(&asker.id)
}

#[cfg(test)]
mod test {
    use std::io::{BufRead, BufReader};
    use std::os::unix::net::UnixStream;

    use control::Id;
    use serde_json::{Value, json};

    use super::super::client::Client;
    use super::*;

    const WORKING: Condition = Condition { broken: false, full: false, waiting: 0, fatal: 0, away_ms: None };
    const FULL: Condition = Condition { full: true, waiting: 3, ..WORKING };
    const AWAY: Condition = Condition { away_ms: Some(7), ..FULL };
    const BROKEN: Condition = Condition { broken: true, ..FULL };

    #[test]
    fn watchers_get_each_change_and_slow_readers_the_last() {
        let room = tempfile::tempdir().unwrap();
        let mut control = Control::bind(&room.path().join("socket")).unwrap();
        let (ours, theirs) = UnixStream::pair().unwrap();
        control.clients[0] = Some(Client::new(ours, 1).unwrap());
        let asker = Asker { place: 0, number: 1, id: Id::default() };
        control.watchers.add(&asker, WORKING);
        let mut lines = BufReader::new(theirs).lines();
        let mut event =
            move || serde_json::from_str::<Value>(&lines.next().unwrap().unwrap()).unwrap()["event"].clone();
        control.tell_watchers(WORKING);
        control.tell_watchers(FULL);
        assert_eq!(event(), json!({ "state": "full", "waiting": 3 }));
        control.tell_watchers(WORKING);
        assert_eq!(event()["state"], "resumed");
        control.tell_watchers(AWAY);
        assert_eq!(event(), json!({ "state": "away", "waiting": 3 }));
        control.tell_watchers(WORKING);
        assert_eq!(event()["state"], "resumed");
        control.tell_watchers(Condition { fatal: 1, ..WORKING });
        assert_eq!(event(), json!({ "state": "fatal", "fatal": 1 }));
        // The client does not read this event while the rest happens.
        control.clients[0].as_mut().unwrap().say(&format!("{}\n", json!({ "event": "x".repeat(1 << 20) })));
        [FULL, WORKING, FULL, BROKEN].into_iter().for_each(|condition| control.tell_watchers(condition));
        let reader = std::thread::spawn(move || (event(), event()));
        while !control.clients[0].as_mut().unwrap().is_up_to_date() {
            control.clients[0].as_mut().unwrap().hear();
            std::thread::yield_now();
        }
        control.tell_watchers(BROKEN);
        assert_eq!(reader.join().unwrap().1["state"], "broken");
        control.clients[0] = None;
        control.tell_watchers(WORKING);
        assert!(control.watchers.0.is_empty(), "a disconnected client is still watched");
    }
}
