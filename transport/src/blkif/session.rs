//! Does what the handshake asks for: reads both nodes, takes the rings, lets them go.
//!
//! Knows nothing of what is in the rings. Invariants: what was mapped or bound for a front end that then cannot be
//! connected is given up; each look at the nodes ends, whatever they say; a front end that is connected is never told
//! to close because its rings cannot be taken: it is left as it is, and tried again after a pause; a store that fails
//! while a front end is served is asked again a bounded number of times, since each time may hold its requests up.

use std::collections::VecDeque;
use std::sync::Arc;

use disk::{Geometry, Request, Status};
use memory::Buffer;
use xen::{Granted, Grants, Port, Store, StoreError};

use super::data::{Data, Way};
use super::device::{Device, Limits};
use super::event::{Event, Log};
use super::moment::{Mistake, mistake};
use super::node::{self, Begins, Features, Nodes, Offer, RingKeys, Rings, Unusable};
use super::not_connected::NotConnected;
use super::queue::Queue;
use super::retry::Patience;
use super::ring::Ring;
use super::state::{Seen, State, Step};
use super::{Config, GrantsPolicy, Machine, OnStop};
use crate::MemoryChange;
use crate::log::in_full;

/// Steps of one look at the nodes. Three lead from anywhere to rest, unless the nodes change meanwhile.
const STEPS: usize = 8;

const WATCH: &str = "blkif";

/// The device as its two nodes have it.
pub struct Session {
    /// What is asked of it.
    pub config: Config,
    nodes: Nodes,
    /// The front end's rings, while it is connected.
    pub device: Option<Device>,
    /// Memory that data pass through: that of the present front end, as those before have no requests any more.
    staging: Arc<Buffer>,
    /// What the engine was not yet told of memory, but for that of the present front end.
    memory_changes: VecDeque<MemoryChange>,
    /// Requests of front ends that are gone, not yet completed.
    orphans: usize,
    epoch: u32,
    settled: bool,
    announced: bool,
    refused: bool,
    /// See [`Seen::inherited`]; nothing before our node was looked at.
    inherited: Option<bool>,
    /// Why the rings of a front end that keeps its connection cannot be taken, and how often that was tried.
    trouble: Option<(String, u32)>,
    ended: bool,
    closing: Closing,
    /// The connection to the store is gone, and with it all that was watched. The rings are served as they are.
    lost: bool,
    asking: Patience,
    /// Ports that could not be given up.
    stuck: Vec<Port>,
}

/// Whether the device is to be closed since the server stops.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Closing {
    No,
    /// The front end was asked to let go.
    Asked,
    /// Nobody is asked: the store does not take it, and asked once more it would only take time; or nobody has the
    /// rings of a front end that is connected, and it would have no answers.
    Unheard,
}

impl Session {
    /// Of a device nobody is connected to.
    pub fn new(config: Config, nodes: Nodes, staging: Arc<Buffer>) -> Session {
        // Nothing of ours is between the guest and the storage where pages are mapped for that.
        let passes = config.grants != GrantsPolicy::Map;
        let memory_changes = passes.then(|| MemoryChange::Comes(staging.clone())).into_iter().collect();
        Session {
            config,
            nodes,
            device: None,
            staging,
            memory_changes,
            orphans: 0,
            epoch: 0,
            settled: false,
            announced: false,
            refused: false,
            inherited: None,
            trouble: None,
            ended: false,
            closing: Closing::No,
            lost: false,
            asking: Patience::default(),
            stuck: Vec::new(),
        }
    }

    /// What the engine should know of memory, and was not yet told.
    #[inline]
    pub fn take_memory_change(&mut self) -> Option<MemoryChange> {
        match &mut self.device {
            Some(device) if self.memory_changes.is_empty() => device.take_memory_change(),
            _ => self.memory_changes.pop_front(),
        }
    }

    /// Has changes of both nodes reported.
    pub fn watch(&self, store: &mut dyn Store) -> Result<(), StoreError> {
        store.watch(&self.nodes.ours(), WATCH)?;
        store.watch(&self.nodes.theirs(), WATCH)
    }

    /// Whether the device is closed and not wanted any more.
    pub fn has_ended(&self) -> bool {
        self.ended
    }

    /// Takes the answer to a request; one that has none stays in its ring, for the next process. `true`: it was the
    /// last of a front end that is gone.
    pub fn complete(&mut self, request: Request, status: Option<Status>, grants: &mut dyn Grants) -> bool {
        match &mut self.device {
            Some(device) => {
                if device.complete(request, status, grants) {
                    return false;
                }
            }
            None => drop(request.retire()),
        }
        self.orphans = self.orphans.saturating_sub(1);
        self.orphans == 0
    }

    /// Looks at both nodes and does what follows.
    pub fn examine(&mut self, machine: &mut Machine, log: &mut Log) {
        self.stuck.retain(|&port| machine.channels.unbind(port).is_err());
        if self.lost {
            return;
        }
        for _ in 0..STEPS {
            match self.step(machine, log) {
                Ok(true) => {}
                Ok(false) => return self.asking.worked(),
                Err(error) => {
                    let may_be_asked = self.store_failed("the store does not answer as it should", &error, log);
                    let again = may_be_asked && self.asking.failed_once_more(machine);
                    if may_be_asked && !again && self.device.is_none() {
                        machine.retry.arm(log);
                    }
                    return;
                }
            }
        }
        // They change faster than we look; what changed last is reported to us.
    }

    /// Notes that the store has failed. `false`: it is lost, which is told once, and nothing is asked of it any more.
    pub fn store_failed(&mut self, what: &'static str, error: &StoreError, log: &mut Log) -> bool {
        self.lost |= matches!(error, StoreError::Lost { .. });
        log.failed(what, error);
        !self.lost
    }

    /// Whether there is no store to be asked.
    pub fn is_lost(&self) -> bool {
        self.lost
    }

    /// One step. `false`: there is nothing to be done.
    fn step(&mut self, machine: &mut Machine, log: &mut Log) -> Result<bool, StoreError> {
        let seen = self.see(&mut *machine.store)?;
        let step = seen.next();
        match step {
            Step::Wait => {
                self.ended = !seen.online && !seen.connected && matches!(seen.ours, Some(State::Closed));
                self.ended |= seen.ours.is_none();
                return Ok(false);
            }
            Step::Announce | Step::Connect { .. } if self.closing != Closing::No => return Ok(false),
            Step::Announce => self.announce(machine, &seen, log)?,
            Step::Connect { .. } if self.trouble.is_some() && machine.retry.runs() => return Ok(false),
            Step::Connect { say } => match self.connect(machine, &seen, say, log) {
                Ok(true) => {
                    machine.retry.worked();
                    self.trouble = None;
                    self.tell(self.nodes.retract(&mut *machine.store), log);
                }
                Ok(false) => {}
                Err(NotConnected::Keys(Unusable::Store(error)) | NotConnected::Say(error)) => return Err(error),
                Err(error) => self.not_connected(&error, &seen, machine, log),
            },
            Step::Finish => return Ok(self.device.as_mut().is_none_or(|device| device.finish(log))),
            Step::Disconnect(why) => self.disconnect(why, machine, log),
            Step::Say(state) => {
                if self.nodes.say(&mut *machine.store, seen.ours, state)? && state == State::Closed {
                    log.note(Event::Closed);
                }
            }
        }
        Ok(true)
    }

    /// Writes what we offer, and that we wait for the front end.
    fn announce(&mut self, machine: &mut Machine, seen: &Seen, log: &mut Log) -> Result<(), StoreError> {
        let mut offer = self.offer(&mut *machine.store)?;
        // One that waits for us already may have read what another process has offered.
        let mut begins = Begins::Anew;
        if seen.ours == Some(State::InitWait) {
            begins = Begins::Before;
            match self.nodes.offered(&mut *machine.store) {
                Ok(before) => offer.features = before.map_or(offer.features, |before| offer.features.widened(before)),
                Err(Unusable::Store(error)) => return Err(error),
                // What cannot be served is offered anew.
                Err(_) => {}
            }
        }
        if self.nodes.announce(&mut *machine.store, &offer, (seen.ours, Some(State::InitWait)), begins)? {
            (self.announced, self.inherited, self.trouble) = (true, Some(false), None);
            machine.retry.worked();
            log.note(Event::Announced);
        }
        Ok(())
    }

    /// The rings could not be taken.
    fn not_connected(&mut self, error: &NotConnected, seen: &Seen, machine: &mut Machine, log: &mut Log) {
        let (errno, why) = (error.errno(), in_full(error));
        let attempts = self.trouble.as_ref().map_or(0, |(_, attempts)| *attempts).saturating_add(1);
        let again = error.is_tried_again(seen, attempts);
        if !again && matches!(seen.theirs, Some(State::Closing | State::Closed)) {
            // It has given its rings up, and waits for nothing in them.
            (self.inherited, self.trouble) = (Some(false), None);
            return machine.wake();
        }
        if !again {
            self.tell(self.nodes.complain(&mut *machine.store, errno, &why), log);
            log.note(Event::Refused { why });
            (self.refused, self.trouble) = (true, None);
            // It is told so at once.
            return machine.wake();
        }
        if self.trouble.as_ref().is_none_or(|(before, _)| *before != why) {
            self.tell(self.nodes.complain(&mut *machine.store, errno, &why), log);
            log.note(Event::NotYet { why: why.clone() });
        }
        self.trouble = Some((why, attempts));
        machine.retry.arm(log);
    }

    /// Words for whoever looks after the host, which are no part of the handshake and must not stop it.
    fn tell(&self, said: Result<(), StoreError>, log: &mut Log) {
        if let Err(error) = said {
            log.failed("cannot say in the store how the device is", &error);
        }
    }

    fn see(&mut self, store: &mut dyn Store) -> Result<Seen, StoreError> {
        let ours = node::state(store, &self.nodes.ours())?;
        let theirs = node::state(store, &self.nodes.theirs())?;
        let online = self.nodes.is_online(store)?;
        let connected = self.device.is_some();
        self.settled |= connected && theirs == Some(State::Connected);
        let inherited = *self.inherited.get_or_insert(matches!(ours, Some(State::Connected | State::Closing)));
        let inherited = inherited && !mistake(Mistake::ClosedUnanswered);
        if ours.is_none() || matches!(theirs, None | Some(State::Initialising | State::InitWait)) {
            // Whose rings they were is gone.
            self.trouble = None;
        }
        // One that has left the states in which it wants to be connected has begun anew.
        self.refused &= matches!(theirs, Some(State::Initialised | State::Connected));
        let finishing = self.device.as_ref().is_some_and(Device::is_finishing);
        let unanswered = self.device.as_mut().is_some_and(|device| !device.is_finished());
        let (settled, announced, refused) = (self.settled, self.announced, self.refused);
        Ok(Seen {
            ours,
            theirs,
            online,
            connected,
            finishing,
            unanswered,
            settled,
            draining: self.orphans > 0,
            announced,
            refused,
            inherited,
        })
    }

    fn offer(&self, store: &mut dyn Store) -> Result<Offer, StoreError> {
        let geometry = self.config.geometry;
        let features = Features {
            ring_order: self.config.max_ring_pages_order,
            queues: self.config.max_queues,
            segments: self.config.max_segments,
            persistent: matches!(self.config.grants, GrantsPolicy::Persistent | GrantsPolicy::Auto),
        };
        Ok(Offer {
            geometry: Geometry { read_only: geometry.read_only || self.config.read_only, ..geometry },
            discard: self.nodes.may_discard(store)?,
            features,
        })
    }

    /// What the front end was offered. It has chosen from what stands in our node, whoever has written that; and it
    /// keeps to its choice, so what is offered there stays as it is until it begins anew.
    fn offered(&self, seen: &Seen, store: &mut dyn Store) -> Result<Offer, NotConnected> {
        let offer = self.offer(store).map_err(NotConnected::Say)?;
        let before = match seen.ours {
            Some(State::InitWait | State::Connected | State::Closing) => {
                self.nodes.offered(store).map_err(NotConnected::Keys)?
            }
            _ => Some(offer.features),
        };
        let none = if seen.ours == Some(State::InitWait) { offer.features } else { Features::NONE };
        let mut features = before.unwrap_or(none);
        if mistake(Mistake::OwnOffer) {
            features = offer.features;
        }
        features.persistent |= mistake(Mistake::OwnPersistence) && offer.features.persistent;
        Ok(Offer { features, ..offer })
    }

    /// `false`: our node says something else than was seen.
    fn connect(&mut self, machine: &mut Machine, seen: &Seen, say: bool, log: &mut Log) -> Result<bool, NotConnected> {
        let offer = self.offered(seen, &mut *machine.store)?;
        let rings = self.nodes.rings(&mut *machine.store, &offer.features).map_err(NotConnected::Keys)?;
        let pages = rings.queues.first().map_or(0, |ring| ring.pages.len());
        let mut queues = Vec::with_capacity(rings.queues.len());
        let taken = rings.queues.iter().try_for_each(|keys| {
            queues.push(self.take_ring(machine, &rings, keys, queues.len())?);
            Ok(())
        });
        let said = taken.and_then(|()| {
            let states = (seen.ours, say.then_some(State::Connected));
            self.nodes.announce(&mut *machine.store, &offer, states, Begins::Before).map_err(NotConnected::Say)
        });
        if !matches!(said, Ok(true)) {
            queues.iter().for_each(|queue| self.unbind(queue.port, machine));
            return said;
        }
        let (way, grants) = self.way(&rings);
        let taken_over = seen.ours == Some(State::Connected) && seen.theirs == Some(State::Connected);
        log.note(Event::Connected { queues: queues.len(), pages, grants, taken_over });
        self.epoch = self.epoch.wrapping_add(1);
        let data = Data::new(self.config.domain, way, self.staging.clone());
        let limits =
            Limits { segments_max: offer.features.segments, read_only: self.config.read_only, discard: offer.discard };
        self.device = Some(Device::new(queues, data, limits, self.epoch));
        (self.settled, self.inherited) = (false, Some(false));
        Ok(true)
    }

    /// Its event channel first: a driver that has gone has given that up, and what its references stand for now is not
    /// known.
    fn take_ring(
        &mut self,
        machine: &mut Machine,
        rings: &Rings,
        keys: &RingKeys,
        queue: usize,
    ) -> Result<Queue, NotConnected> {
        let domain = self.config.domain;
        let port = machine.channels.bind(domain, keys.port).map_err(|source| NotConnected::Bind { queue, source })?;
        let mapped = machine.grants.map(domain, &keys.pages, false);
        let ring = mapped.map_err(|source| NotConnected::Map { queue, source }).and_then(|granted: Arc<Granted>| {
            Ring::attach(granted.shared(), rings.layout).map_err(|source| NotConnected::Ring { queue, source })
        });
        ring.map(|ring| Queue::new(ring, port)).inspect_err(|_| self.unbind(port, machine))
    }

    fn way(&self, rings: &Rings) -> (Way, &'static str) {
        match self.config.grants {
            GrantsPolicy::Map => (Way::Map, "mapping each time"),
            GrantsPolicy::Persistent | GrantsPolicy::Auto if rings.persistent => {
                (Way::Persistent(Box::default()), "mappings that stay")
            }
            GrantsPolicy::Copy | GrantsPolicy::Persistent | GrantsPolicy::Auto => (Way::Copy, "copies"),
        }
    }

    fn disconnect(&mut self, why: &'static str, machine: &mut Machine, log: &mut Log) {
        let Some(mut device) = self.device.take() else { return };
        let in_flight = device.end();
        device.ports().for_each(|port| self.unbind(port, machine));
        self.memory_changes.extend(device.let_memory_go());
        self.orphans = self.orphans.saturating_add(in_flight);
        (self.announced, self.settled) = (false, false);
        log.note(Event::Disconnected { why, in_flight });
    }

    fn unbind(&mut self, port: Port, machine: &mut Machine) {
        if machine.channels.unbind(port).is_err() {
            self.stuck.push(port);
        }
    }

    /// The disk has another size.
    pub fn resized(&mut self, geometry: &Geometry, machine: &mut Machine, log: &mut Log) {
        self.config.geometry = *geometry;
        let connected = self.device.is_some();
        if !connected && !self.announced {
            return;
        }
        match self.nodes.resize(&mut *machine.store, geometry.len) {
            Ok(true) if connected => log.note(Event::SizeTold { len: geometry.len }),
            Ok(_) => {}
            Err(error) => log.failed("cannot tell the front end of the new size", &error),
        }
    }

    /// From now on stopping leaves the front end to another process.
    pub fn leave(&mut self) {
        self.config.on_stop = OnStop::Leave;
    }

    /// Asks the front end to let the device go. What it asks for is served until it has: its driver waits for the
    /// answers.
    pub fn close(&mut self, machine: &mut Machine, log: &mut Log) {
        if self.config.on_stop == OnStop::Leave || self.closing != Closing::No {
            return;
        }
        let unheard = self.lost || self.trouble.is_some();
        self.closing = if unheard { Closing::Unheard } else { Closing::Asked };
        if self.closing == Closing::Asked && self.device.is_some() {
            let asked = self.ask_to_close(machine);
            self.heard(asked, log);
        }
    }

    fn ask_to_close(&self, machine: &mut Machine) -> Result<(), StoreError> {
        let ours = node::state(&mut *machine.store, &self.nodes.ours())?;
        if ours.is_some_and(|ours| !matches!(ours, State::Closing | State::Closed)) {
            self.nodes.say(&mut *machine.store, ours, State::Closing)?;
        }
        Ok(())
    }

    fn heard(&mut self, said: Result<(), StoreError>, log: &mut Log) {
        if let Err(error) = said {
            log.failed("cannot close the device", &error);
            self.closing = Closing::Unheard;
        }
    }

    /// Whether the device was to be closed, and there is nobody to wait for.
    pub fn is_closed(&self) -> bool {
        match self.closing {
            Closing::No => false,
            Closing::Asked => self.device.is_none(),
            Closing::Unheard => true,
        }
    }

    /// Says how the device is left. Requests that were popped have their answers after that.
    pub fn stop(&mut self, machine: &mut Machine, log: &mut Log) {
        self.close(machine, log);
        if self.closing == Closing::Asked {
            let said = self.say_how_it_is_left(machine, log);
            self.heard(said, log);
        }
    }

    fn say_how_it_is_left(&mut self, machine: &mut Machine, log: &mut Log) -> Result<(), StoreError> {
        if self.device.is_some() {
            let theirs = node::state(&mut *machine.store, &self.nodes.theirs())?;
            if let Some(state) = theirs.filter(|&theirs| theirs != State::Closed) {
                log.note(Event::StillUsed { state: state.name() });
            }
            return Ok(());
        }
        let ours = node::state(&mut *machine.store, &self.nodes.ours())?;
        let open = ours.is_some_and(|ours| ours != State::Closed);
        if open && self.nodes.say(&mut *machine.store, ours, State::Closed)? {
            log.note(Event::Closed);
        }
        Ok(())
    }

    /// Gives up everything that is held for a front end.
    pub fn let_go(&mut self, machine: &mut Machine, log: &mut Log) {
        if self.closing == Closing::Asked && self.device.is_some() {
            // One that has closed since, or whose answers took longer, has them now.
            self.examine(machine, log);
        }
        self.disconnect("the server is gone", machine, log);
        self.stuck.retain(|&port| machine.channels.unbind(port).is_err());
    }
}
