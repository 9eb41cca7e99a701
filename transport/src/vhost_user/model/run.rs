//! One run: a back-end that is killed at a chosen point and restarted, storage that completes in any order and fails,
//! and the steps of a front-end in between.
//!
//! It knows nothing about the choice of runs. Invariants checked: a request is taken only while it is unanswered, in
//! the order of submission in its queue, and never performed after its answer; each is answered once, with an error
//! only if the storage has failed it; a queue stops as soon as nothing is in progress in it, regardless of the others;
//! a flush is answered after the writes it covers are durable; reads and, in the end, the disk have possible contents.

use std::path::{Path, PathBuf};

use disk::{Geometry, Operation, Request, Span, Transport};
use memory::Segments;

use super::super::kill_point::test::{self as kill_point, Bug};
use super::super::{Config, Server, token};
use super::guest::{Guest, RequestKind};
use super::script::ModelStep;
use super::storage::{CrashOutcome, OperationOutcome, Storage};
use super::vhost_mock::GEOMETRY;
use super::vhost_mock::epoll::Epoll;
use super::{Check, QUEUES, SECTORS};
use crate::{HandOver as _, Server as _, TakeBack as _};

/// The parameters of a run.
#[derive(Clone, Copy, Debug)]
pub struct Scenario {
    /// The front-end records requests in flight.
    pub recorded: bool,
    pub event_idx: bool,
    pub queues: usize,
    /// The outcome of operations in flight when the process is killed.
    pub crash_outcome: CrashOutcome,
}

/// A request that the back-end has taken.
struct TakenRequest {
    request: Request,
    queue: usize,
    head: u16,
    number: u64,
}

/// One run of the model: the guest, the process that serves it, and the storage.
pub struct Run {
    scenario: Scenario,
    path: PathBuf,
    _directory: tempfile::TempDir,
    guest: Guest,
    server: Server,
    watch: Epoll,
    held: Vec<TakenRequest>,
    waiting: Vec<TakenRequest>,
    /// Requests that were given back, for [`Bug::DoneAfterStop`].
    discarded: Vec<(Operation, u64, Segments)>,
    storage: Storage,
    /// By queue, the number of the last request taken since the ring was started.
    last: [Option<u64>; QUEUES],
    removed: [bool; 2],
    /// The kill points of the next processes, in reverse order.
    kills: Vec<u64>,
    pub killed: usize,
    pub upgraded: u64,
}

const DISK: Geometry = Geometry { len: SECTORS as u64 * 512, physical_block: 512, discard: 512, ..GEOMETRY };

fn config(path: &Path, queues: usize) -> Config {
    Config { path: path.to_owned(), queues: queues as u16, serial: String::new(), geometry: DISK }
}

fn serve(path: &Path, queues: usize) -> (Server, Epoll) {
    let mut server = Server::bind(config(path, queues)).unwrap();
    let mut watch = Epoll::new();
    server.start(&mut watch).unwrap();
    (server, watch)
}

impl Run {
    /// Connects a guest to its disk; the first process is killed after the last of `kills`, counted from now.
    pub fn new(scenario: Scenario, kills: Vec<u64>) -> Run {
        kill_point::die_after(u64::MAX);
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("s");
        let (server, watch) = serve(&path, scenario.queues);
        let guest = Guest::new(&path, scenario.recorded, scenario.event_idx, scenario.queues);
        let mut run = Run {
            scenario,
            path,
            _directory: directory,
            guest,
            server,
            watch,
            held: Vec::new(),
            waiting: Vec::new(),
            discarded: Vec::new(),
            storage: Storage::new(),
            last: [None; QUEUES],
            removed: [false; 2],
            kills,
            killed: 0,
            upgraded: 0,
        };
        // The first process may be killed before the guest has connected.
        kill_point::die_after(run.kills.pop().unwrap_or(u64::MAX));
        run.connect(&[0; QUEUES]).and_then(|()| run.respawn()).unwrap();
        run
    }

    /// Runs a script, and then until all requests are answered.
    pub fn live(mut self, script: &[ModelStep]) -> Result<Run, String> {
        for &step in script {
            self.step(step)?;
        }
        for index in 0..2 {
            self.step(ModelStep::Add(index))?;
        }
        for round in 0..12 {
            self.step(ModelStep::Turn)?;
            self.step(ModelStep::Space)?;
            while !self.held.is_empty() {
                self.step(ModelStep::Complete(if round % 2 == 0 { usize::MAX } else { 0 }))?;
            }
            self.perform_discarded();
            self.step(ModelStep::Publish)?;
        }
        if !self.guest.pending.is_empty() {
            return Err(format!("never answered: {:?}", self.guest.pending));
        }
        for (sector, bytes) in (0..).zip(&self.storage.sectors) {
            if self.guest.sector_models[sector as usize].possible(sector, bytes).is_none() {
                return Err(format!("sector {sector} does not have the contents written last"));
            }
        }
        Ok(self)
    }

    /// Performs one step, and the reactions of a driver and QEMU.
    fn step(&mut self, step: ModelStep) -> Check {
        match step {
            ModelStep::Offer(queue, kind) => self.guest.offer(queue, kind),
            ModelStep::Turn => self.turn()?,
            ModelStep::Complete(index) => self.end(index, OperationOutcome::Done)?,
            ModelStep::Fail(index, applied) => self.end(index, OperationOutcome::Failed { applied })?,
            ModelStep::Full(index) if self.needs_space(index) => self.end(index, OperationOutcome::Full)?,
            ModelStep::Wait(index) if self.needs_space(index) => self.waiting.push(self.held.remove(index)),
            ModelStep::Full(_) | ModelStep::Wait(_) => {}
            ModelStep::Space => {
                self.held.append(&mut self.waiting);
                self.held.sort_by_key(|taken| taken.number);
            }
            ModelStep::Publish => self.server.publish().unwrap(),
            ModelStep::Remove(index) if !self.removed[index] => {
                self.removed[index] = true;
                self.guest.remove_memory(index);
                self.turn()?;
            }
            ModelStep::Add(index) if self.removed[index] => {
                self.removed[index] = false;
                self.guest.add_memory(index);
                self.turn()?;
            }
            ModelStep::Replace if self.removed == [false; 2] => {
                self.guest.replace_memory();
                self.turn()?;
            }
            ModelStep::Remove(_) | ModelStep::Add(_) | ModelStep::Replace => {}
            ModelStep::Restart(queue) => self.restart(queue % self.scenario.queues)?,
            ModelStep::Reconnect => self.reconnect()?,
            ModelStep::Upgrade(succeeds) => self.upgrade(succeeds)?,
            ModelStep::Log | ModelStep::LogOff if self.removed != [false; 2] => {}
            ModelStep::Log => {
                self.guest.begin_log();
                self.turn_logged()?;
                self.guest.begin_copy();
            }
            ModelStep::LogOff => {
                self.guest.end_log();
                self.turn()?;
            }
        }
        self.respawn()?;
        self.guest.interrupt(&self.storage.durable)?;
        self.guest.check_log()
    }

    /// Runs the process's event loop until it is idle.
    fn turn(&mut self) -> Check {
        for _ in 0..64 {
            let keys = self.watch.wait(false);
            for &key in &keys {
                self.server.ready(key, &mut self.watch);
            }
            self.take()?;
            self.give_back();
            self.server.publish().unwrap();
            if keys.is_empty() {
                return Ok(());
            }
        }
        Err("the back-end never becomes idle".into())
    }

    /// Runs the event loop after a log may have been sent.
    fn turn_logged(&mut self) -> Check {
        self.turn()?;
        self.guest.take_log_reply(kill_point::is_dead(), || format!("{:?}", self.server.take_events()))
    }

    fn take(&mut self) -> Check {
        while let Some(request) = self.server.pop(&DISK) {
            if kill_point::is_dead() {
                request.retire();
                return Ok(());
            }
            match self.recognise(&request) {
                Ok((queue, head, number)) => self.held.push(TakenRequest { request, queue, head, number }),
                Err(why) => {
                    request.retire();
                    return Err(why);
                }
            }
        }
        Ok(())
    }

    /// Identifies the guest's request, and checks that it may be taken now.
    fn recognise(&mut self, request: &Request) -> Result<(usize, u16, u64), String> {
        let (_, queue, head) = token::parts(request.token());
        let (sector, operation) = (request.span().at / 512, request.operation());
        let pending = self.guest.pending.get(&(queue, head)).filter(|pending| self.guest.awaits(pending.number));
        let pending = pending.ok_or_else(|| format!("taken after its answer: a request for sector {sector}"))?;
        let kind = match operation {
            Operation::Read => RequestKind::Read,
            Operation::Write { .. } => RequestKind::Write,
            Operation::WriteZeroes { .. } => RequestKind::Zeroes,
            _ => RequestKind::Flush,
        };
        let named = pending.sectors.iter().any(|(other, _)| *other == sector) || kind == RequestKind::Flush;
        if kind != pending.kind || !named {
            return Err(format!("{operation:?} of sector {sector} is not the submitted request: {pending:?}"));
        }
        let number = pending.number;
        let is_same = |taken: &TakenRequest| taken.number == number && taken.request.span().at == request.span().at;
        if self.held.iter().chain(&self.waiting).any(is_same) {
            return Err(format!("request {number} was taken twice"));
        }
        let last = self.last[queue];
        if last.is_some_and(|last| last > number || last == number && kind != RequestKind::Zeroes) {
            return Err(format!("request {number} of queue {queue} was taken out of order, after {last:?}"));
        }
        self.last[queue] = Some(number);
        Ok((queue, head, number))
    }

    /// Gives back waiting requests that the server recalls.
    fn give_back(&mut self) {
        for taken in std::mem::take(&mut self.waiting) {
            if !self.server.recalls(taken.request.token()) {
                self.waiting.push(taken);
                continue;
            }
            if kill_point::is_planted(Bug::DoneAfterStop) {
                let TakenRequest { request, .. } = &taken;
                self.discarded.push((request.operation(), request.span().at / 512, request.memory().clone()));
            }
            self.server.give_back(taken.request);
        }
    }

    /// Performs requests that should have been discarded.
    fn perform_discarded(&mut self) {
        for (operation, sector, memory) in std::mem::take(&mut self.discarded) {
            if let Operation::Write { .. } = operation {
                self.storage.sectors[sector as usize] = memory.to_vec();
            }
        }
    }

    fn needs_space(&self, index: usize) -> bool {
        let writes = |taken: &TakenRequest| taken.request.operation().is_write();
        self.held.get(index).is_some_and(writes)
    }

    fn end(&mut self, index: usize, end: OperationOutcome) -> Check {
        let Some(last) = self.held.len().checked_sub(1) else { return Ok(()) };
        let taken = self.held.remove(index.min(last));
        self.end_taken(taken, end)
    }

    fn end_taken(&mut self, taken: TakenRequest, end: OperationOutcome) -> Check {
        let checked = self.check_unanswered(&taken);
        let version = self.record_end(&taken, end);
        let status = self.storage.end(&taken.request, version, end);
        self.server.complete(taken.request, status);
        checked
    }

    fn check_unanswered(&self, taken: &TakenRequest) -> Check {
        match self.guest.awaits(taken.number) {
            true => Ok(()),
            false => Err(format!("request {} is done after its answer", taken.number)),
        }
    }

    /// Records whether the guest may get an error; returns the version that the request gives to its sector.
    fn record_end(&mut self, taken: &TakenRequest, end: OperationOutcome) -> u64 {
        let Span { at, .. } = taken.request.span();
        let Some(pending) = self.guest.pending.get_mut(&(taken.queue, taken.head)) else { return 0 };
        pending.failed |= end != OperationOutcome::Done;
        pending.sectors.iter().find(|(sector, _)| *sector == at / 512).map_or(0, |&(_, version)| version)
    }

    /// Restarts the process if it is dead, until one survives.
    fn respawn(&mut self) -> Check {
        while kill_point::is_dead() {
            self.killed += 1;
            for (place, taken) in std::mem::take(&mut self.held).into_iter().enumerate() {
                let mut checked = Ok(());
                if self.scenario.crash_outcome.is_done(place) {
                    checked = self.check_unanswered(&taken);
                    let version = self.record_end(&taken, OperationOutcome::Done);
                    self.storage.end(&taken.request, version, OperationOutcome::Done);
                }
                taken.request.retire();
                checked?;
            }
            self.waiting.drain(..).for_each(|taken| {
                taken.request.retire();
            });
            self.guest.interrupt(&self.storage.durable)?;
            let bases = self.used_indices();
            kill_point::die_after(u64::MAX);
            self.server.stop(&mut self.watch);
            (self.server, self.watch) = serve(&self.path, self.scenario.queues);
            kill_point::die_after(self.kills.pop().unwrap_or(u64::MAX));
            self.guest.reconnect(&self.path);
            self.connect(&bases)?;
        }
        Ok(())
    }

    fn used_indices(&self) -> Vec<u16> {
        (0..self.scenario.queues).map(|queue| self.guest.used_index(queue)).collect()
    }

    fn connect(&mut self, bases: &[u16]) -> Check {
        self.removed = [false; 2];
        self.last = [None; QUEUES];
        self.guest.negotiate();
        self.turn()?;
        self.guest.take_region();
        self.guest.start(bases);
        self.turn_logged()
    }

    /// Stops and restarts one ring while the others continue.
    fn restart(&mut self, queue: usize) -> Check {
        self.guest.stop_ring(queue);
        self.turn()?;
        while let Some(place) = self.held.iter().rposition(|taken| taken.queue == queue) {
            if self.guest.front.reply(11).is_some() {
                return Err(format!("GET_VRING_BASE of queue {queue} is answered while its requests are in flight"));
            }
            let taken = self.held.remove(place);
            self.end_taken(taken, OperationOutcome::Done)?;
        }
        self.server.publish().unwrap();
        self.turn()?;
        let reply = self.guest.front.reply(11);
        if kill_point::is_dead() {
            return Ok(());
        }
        let reply = reply.ok_or_else(|| format!("GET_VRING_BASE is not answered: {:?}", self.server.take_events()))?;
        self.guest.interrupt(&self.storage.durable)?;
        self.last[queue] = None;
        for index in [0, 1].into_iter().filter(|&index| std::mem::take(&mut self.removed[index])) {
            self.guest.add_memory(index);
        }
        if self.scenario.queues == 1 {
            self.guest.send_region();
        }
        self.guest.start_ring(queue, u16::from_ne_bytes([reply[4], reply[5]]));
        self.guest.enable_ring(queue);
        self.turn()
    }

    /// Closes the connection and connects again, with the same memory. Requests in flight continue, and their results
    /// are discarded.
    fn reconnect(&mut self) -> Check {
        // QEMU reads the used index at once; the back-end notices the disconnect later.
        let bases = self.used_indices();
        self.server.publish().unwrap();
        self.guest.reconnect(&self.path);
        self.guest.negotiate();
        self.turn()?;
        let before = self.held.len();
        while !self.held.is_empty() {
            self.end(usize::MAX, OperationOutcome::Done)?;
            self.take()?;
            if self.held.len() > before {
                return Err("the next connection took a request before those of the last had completed".into());
            }
        }
        self.turn()?;
        if kill_point::is_dead() {
            return Ok(());
        }
        self.removed = [false; 2];
        self.last = [None; QUEUES];
        self.guest.take_region();
        self.guest.start(&bases);
        self.turn_logged()
    }

    /// Completes requests in flight, leaves waiting ones to the guest, and lets another process take over.
    fn upgrade(&mut self, succeeds: bool) -> Check {
        self.server.hold(true);
        while !self.held.is_empty() {
            self.end(usize::MAX, OperationOutcome::Done)?;
            self.take()?;
        }
        self.turn()?;
        let next =
            self.server.hand_over().and_then(|all| Server::taken_over(all, config(&self.path, self.scenario.queues)));
        // Refused while a queue is being stopped, or the memory of a ring is removed.
        let Some(mut next) = next.ok().filter(|_| succeeds && !kill_point::is_dead()) else {
            self.server.hold(false);
            return self.turn();
        };
        for taken in self.waiting.drain(..) {
            taken.request.retire();
        }
        let mut watch = Epoll::new();
        next.start(&mut watch).unwrap();
        self.watch = watch;
        std::mem::replace(&mut self.server, next).leave_path();
        self.last = [None; QUEUES];
        self.upgraded += 1;
        self.turn()
    }

    pub fn answered(&self) -> u64 {
        self.guest.answered
    }

    pub fn errors(&self) -> u64 {
        self.guest.errors
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        self.held.drain(..).chain(self.waiting.drain(..)).for_each(|taken| {
            taken.request.retire();
        });
        kill_point::die_after(u64::MAX);
    }
}
