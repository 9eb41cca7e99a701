//! Events: changes, published in commit order.
//!
//! The last few thousand are kept in memory for clients that reconnect. The upper bits of every event number contain
//! the daemon's start counter, so that a number from before a restart is never mistaken for a current one.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use api::{Change, Event, ObjectKind, Problem, Requester, Transfer};
use jiff::Timestamp;
use serde_json::value::{RawValue, to_raw_value};
use tokio::sync::broadcast;
use uuid::Uuid;

use super::Tx;
use super::health::HealthBoard;

/// The number of events kept: as many as a burst of plugs causes while a client reconnects.
const KEPT: usize = 8192;

/// Bits for the events of one life of the daemon. Above them 21 bits are left in what JSON can hold exactly (2^53).
const SEQ_BITS: u32 = 32;

/// An object that a change has touched.
#[derive(Clone, Debug)]
pub struct Touched {
    kind: ObjectKind,
    uuid: Uuid,
    change: Change,
    requester: Requester,
}

/// Publishes events to subscribers.
#[derive(Debug)]
pub struct EventBus {
    state: Mutex<State>,
    health: HealthBoard,
    sender: broadcast::Sender<Arc<Event>>,
}

#[derive(Debug)]
struct State {
    next: u64,
    past: VecDeque<Arc<Event>>,
    /// How far tasks are that have not ended.
    progress: HashMap<Uuid, (f64, Option<Transfer>)>,
}

/// The events that a client has missed, and later ones.
#[derive(Debug)]
pub struct Past {
    /// The missed events; `None` if they are no longer available: the client must reload everything.
    pub missed: Option<Vec<Arc<Event>>>,
    /// Later events.
    pub next: broadcast::Receiver<Arc<Event>>,
    /// The number of the last event before `next`.
    pub seq: u64,
}

/// An event without its number.
pub struct News {
    kind: ObjectKind,
    uuid: Uuid,
    change: Change,
    requester: Requester,
    object: Option<Box<RawValue>>,
}

impl EventBus {
    /// For a daemon with this start counter.
    pub fn new(starts: u64, health: HealthBoard) -> EventBus {
        let next = (starts << SEQ_BITS).saturating_add(1);
        let state = State { next, past: VecDeque::new(), progress: HashMap::new() };
        EventBus { state: Mutex::new(state), health, sender: broadcast::channel(KEPT).0 }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The known health of objects.
    pub(super) fn health(&self) -> &HealthBoard {
        &self.health
    }

    /// Publishes events.
    pub fn tell(&self, news: Vec<News>) {
        let mut state = self.state();
        for News { kind, uuid, change, requester, object } in news {
            let (seq, at) = (state.next, Timestamp::now());
            let event = Arc::new(Event { seq, at, kind, uuid, change, requester, object });
            state.next = state.next.saturating_add(1);
            if state.past.len() == KEPT {
                state.past.pop_front();
            }
            state.past.push_back(event.clone());
            // There may be no subscribers.
            self.sender.send(event).ok();
        }
    }

    /// Events from now on.
    pub fn subscribe(&self) -> broadcast::Receiver<Arc<Event>> {
        self.sender.subscribe()
    }

    /// Events after number `seq`.
    pub fn subscribe_behind(&self, seq: u64) -> Past {
        let state = self.state();
        let last = state.next.saturating_sub(1);
        let oldest = state.past.front().map_or(state.next, |event| event.seq);
        let known = seq.saturating_add(1) >= oldest && seq <= last;
        let missed = known.then(|| state.past.iter().filter(|event| event.seq > seq).cloned().collect());
        Past { missed, next: self.sender.subscribe(), seq: last }
    }

    /// How far a task is: its completed fraction, and what it has transferred.
    pub fn progress_of(&self, task: Uuid) -> Option<(f64, Option<Transfer>)> {
        self.state().progress.get(&task).copied()
    }

    /// Reports the progress of a task, once per percent.
    pub fn progress(&self, task: &api::Task, progress: f64, transfer: Option<Transfer>) {
        let progress = progress.clamp(0.0, 1.0);
        let before = self.state().progress.insert(task.uuid, (progress, transfer));
        let hundredth = |part: f64| (part * 100.0).floor();
        if before.is_some_and(|(before, _)| hundredth(before) == hundredth(progress)) {
            return;
        }
        let object = to_raw_value(&api::Task { progress, transfer, ..task.clone() }).ok();
        let (kind, requester) = (ObjectKind::Task, task.requester.clone());
        self.tell(vec![News { kind, uuid: task.uuid, change: Change::Changed, requester, object }]);
    }

    /// A task has ended.
    pub fn forget_progress(&self, task: Uuid) {
        self.state().progress.remove(&task);
    }
}

impl Tx<'_> {
    /// An object is other than before.
    pub(super) fn touch(&mut self, kind: ObjectKind, uuid: Uuid, change: Change) {
        self.touched.push(Touched { kind, uuid, change, requester: self.requester.clone() });
    }

    /// The objects that were touched.
    pub(super) fn touched_objects(&self) -> impl Iterator<Item = (ObjectKind, Uuid, Change)> {
        self.touched.iter().map(|touched| (touched.kind, touched.uuid, touched.change))
    }

    /// The resulting events, one per object.
    pub(super) fn events(&mut self) -> Result<Vec<News>, Problem> {
        self.note_health()?;
        let mut order: Vec<(ObjectKind, Uuid)> = Vec::new();
        let mut changes: HashMap<(ObjectKind, Uuid), (Change, &Requester)> = HashMap::new();
        for Touched { kind, uuid, change, requester } in &self.touched {
            let object = (*kind, *uuid);
            match (changes.get(&object).map(|(change, _)| change), change) {
                (None, _) => order.push(object),
                // An object that was added and changed in the same commit is new.
                (Some(Change::Added), Change::Changed) => continue,
                _ => {}
            }
            changes.insert(object, (*change, requester));
        }
        let order = order.into_iter().filter_map(|object| Some((object, *changes.get(&object)?)));
        let news = order.map(|((kind, uuid), (change, requester))| {
            let object = match change {
                Change::Removed => None,
                Change::Added | Change::Changed => self.object(kind, uuid)?,
            };
            Ok(News { kind, uuid, change, requester: requester.clone(), object })
        });
        news.collect()
    }

    /// An object as shown by the API; `None` if it was removed.
    fn object(&self, kind: ObjectKind, uuid: Uuid) -> Result<Option<Box<RawValue>>, Problem> {
        let shown = match kind {
            ObjectKind::Host => None,
            ObjectKind::Sr => self.find_sr(uuid)?.map(|sr| to_raw_value(&sr)),
            ObjectKind::Vdi => self.find_vdi(uuid)?.map(|vdi| to_raw_value(&vdi)),
            ObjectKind::Vbd => self.find_vbd(uuid)?.map(|vbd| to_raw_value(&vbd)),
            ObjectKind::Vm => self.find_vm(uuid)?.map(|vm| to_raw_value(&vm)),
            ObjectKind::Task => self.find_task(uuid)?.map(|task| to_raw_value(&task)),
        };
        shown.transpose().map_err(|error| Problem::failed("encode a changed object", error))
    }
}
