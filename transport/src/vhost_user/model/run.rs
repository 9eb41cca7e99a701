//! One life of a ring: a back-end that is killed at a chosen moment and started again, storage that completes in any
//! order, and everything that a front-end may do in between.
//!
//! Knows nothing about which lives are worth living. Invariants checked: a request is taken only while it is not answered,
//! in the order in which requests were offered, and never done after its answer; each is answered once; a flush is answered after what
//! it covers is durable; reads and, in the end, the disk show what was written last.

use std::path::{Path, PathBuf};

use disk::{Geometry, Operation, Request, Status, Transport};
use memory::Segments;

use super::super::moment::test::{self as moment, Bug};
use super::super::{Config, Server};
use super::guest::{Guest, Kind, content};
use super::vhost_mock::GEOMETRY;
use super::vhost_mock::epoll::Epoll;
use super::{Check, SECTORS};
use crate::Server as _;

/// What happens next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// The driver offers a request.
    Offer(Kind),
    /// The back-end looks at its socket, takes what is offered and publishes.
    Turn,
    /// The storage is done with one of the requests, counted from the oldest.
    Complete(usize),
    /// One of the requests begins to wait for space.
    Wait(usize),
    /// Answers are published.
    Publish,
    /// The memory of the ring is taken away, or that of the data.
    Remove(usize),
    /// It comes back.
    Add(usize),
    /// The memory table is replaced.
    Replace,
    /// The ring is stopped, and started again.
    Restart,
    /// The connection is lost, and comes again.
    Reconnect,
}

/// How the life is.
#[derive(Clone, Copy, Debug)]
pub struct Nature {
    /// The front-end records what is in flight.
    pub recorded: bool,
    pub event_idx: bool,
    /// What was begun is done by the storage although the process was killed.
    pub outlives: bool,
}

/// A request that was taken.
struct Taken {
    request: Request,
    number: u64,
}

/// One life.
pub struct Run {
    nature: Nature,
    path: PathBuf,
    _directory: tempfile::TempDir,
    guest: Guest,
    server: Server,
    watch: Epoll,
    held: Vec<Taken>,
    waiting: Vec<Taken>,
    /// What was given back, for a bug.
    ghosts: Vec<(Operation, u64, Segments, u64)>,
    /// Versions of sectors.
    disk: [Vec<u8>; SECTORS],
    durable: [u64; SECTORS],
    on_disk: [u64; SECTORS],
    /// The number of the request that was taken last since the ring was started.
    last: Option<u64>,
    removed: [bool; 2],
    /// Moments after which the next processes are killed, the last first.
    pub kills: Vec<u64>,
    pub killed: usize,
}

fn serve(path: &Path) -> (Server, Epoll) {
    let geometry = Geometry { len: SECTORS as u64 * 512, physical_block: 512, discard: 512, ..GEOMETRY };
    let config = Config { path: path.to_owned(), queues: 1, serial: String::new(), geometry };
    let mut server = Server::bind(config).unwrap();
    let mut watch = Epoll::new();
    server.start(&mut watch).unwrap();
    (server, watch)
}

impl Run {
    /// A guest that finds its disk; the first process dies after the last of `kills` moments from now on.
    pub fn new(nature: Nature, kills: Vec<u64>) -> Run {
        moment::die_after(u64::MAX);
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("s");
        let (server, watch) = serve(&path);
        let guest = Guest::new(&path, nature.recorded, nature.event_idx);
        let mut run = Run {
            nature,
            path,
            _directory: directory,
            guest,
            server,
            watch,
            held: Vec::new(),
            waiting: Vec::new(),
            ghosts: Vec::new(),
            disk: std::array::from_fn(|sector| content(sector as u64, 0)),
            durable: [0; SECTORS],
            on_disk: [0; SECTORS],
            last: None,
            removed: [false; 2],
            kills,
            killed: 0,
        };
        // The first process may die before the guest has found its disk.
        moment::die_after(run.kills.pop().unwrap_or(u64::MAX));
        run.connect(0).and_then(|()| run.mourn()).unwrap();
        run
    }

    /// All of a script, and then everything to its end.
    pub fn live(mut self, script: &[Step]) -> Result<Run, String> {
        for &step in script {
            self.step(step)?;
        }
        for index in 0..2 {
            self.step(Step::Add(index))?;
        }
        for round in 0..12 {
            self.step(Step::Turn)?;
            while !self.held.is_empty() || !self.waiting.is_empty() {
                self.held.append(&mut self.waiting);
                self.held.sort_by_key(|taken| taken.number);
                self.step(Step::Complete(if round % 2 == 0 { usize::MAX } else { 0 }))?;
            }
            self.haunt();
            self.step(Step::Publish)?;
        }
        if !self.guest.asked.is_empty() {
            return Err(format!("lost: never answered are {:?}", self.guest.asked));
        }
        for sector in 0..SECTORS {
            if self.disk[sector] != content(sector as u64, self.guest.acknowledged[sector]) {
                return Err(format!("sector {sector} does not hold what was written last"));
            }
        }
        Ok(self)
    }

    /// One step, and what a driver and QEMU do about it.
    fn step(&mut self, step: Step) -> Check {
        match step {
            Step::Offer(kind) => self.guest.offer(kind),
            Step::Turn => self.turn()?,
            Step::Complete(index) => self.complete(index)?,
            Step::Wait(index) => self.wait(index),
            Step::Publish => self.server.publish().unwrap(),
            Step::Remove(index) if !self.removed[index] => {
                self.removed[index] = true;
                self.guest.remove_memory(index);
                self.turn()?;
            }
            Step::Add(index) if self.removed[index] => {
                self.removed[index] = false;
                self.guest.add_memory(index);
                self.turn()?;
            }
            Step::Replace if self.removed == [false; 2] => {
                self.guest.replace_memory();
                self.turn()?;
            }
            Step::Remove(_) | Step::Add(_) | Step::Replace => {}
            Step::Restart => self.restart()?,
            Step::Reconnect => self.reconnect()?,
        }
        self.mourn()?;
        self.guest.interrupt(&self.durable)
    }

    /// What the process's loop does in one turn.
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
        Err("the back-end does not come to rest".into())
    }

    fn take(&mut self) -> Check {
        let geometry = Geometry { len: SECTORS as u64 * 512, physical_block: 512, discard: 512, ..GEOMETRY };
        while let Some(request) = self.server.pop(&geometry) {
            if moment::is_dead() {
                request.retire();
                return Ok(());
            }
            let sector = request.span().at / 512;
            let found = self.guest.find(request.operation(), sector).map(|asked| asked.number);
            let Some(number) = found.filter(|&number| self.guest.awaits(number)) else {
                request.retire();
                return Err(format!("taken after its answer: a request for sector {sector}"));
            };
            let is_flush = request.operation() == Operation::Flush;
            if self.last.is_some_and(|last| last >= number) && !is_flush {
                request.retire();
                return Err(format!("request {number} was taken out of order, after {:?}", self.last));
            }
            self.last = self.last.max(Some(number));
            self.held.push(Taken { request, number });
        }
        Ok(())
    }

    /// What the owner of waiting requests does.
    fn give_back(&mut self) {
        for taken in std::mem::take(&mut self.waiting) {
            if !self.server.recalls(taken.request.token()) {
                self.waiting.push(taken);
                continue;
            }
            if moment::is_planted(Bug::DoneAfterStop) {
                let Taken { request, number } = &taken;
                self.ghosts.push((request.operation(), request.span().at / 512, request.memory().clone(), *number));
            }
            self.server.give_back(taken.request);
        }
    }

    /// Does what should have been forgotten.
    fn haunt(&mut self) {
        for (operation, sector, memory, _) in std::mem::take(&mut self.ghosts) {
            if let Operation::Write { .. } = operation {
                self.disk[sector as usize] = memory.to_vec();
            }
        }
    }

    fn wait(&mut self, index: usize) {
        let writes = |taken: &Taken| matches!(taken.request.operation(), Operation::Write { .. });
        if self.held.get(index).is_some_and(writes) {
            self.waiting.push(self.held.remove(index));
        }
    }

    fn complete(&mut self, index: usize) -> Check {
        let Some(last) = self.held.len().checked_sub(1) else { return Ok(()) };
        let taken = self.held.remove(index.min(last));
        let done = self.execute(&taken);
        self.server.complete(taken.request, Status::Done);
        done
    }

    fn execute(&mut self, taken: &Taken) -> Check {
        let Taken { request, number } = taken;
        let sector = (request.span().at / 512) as usize;
        // Flushes look the same, so that one may stand for another.
        let is_flush = request.operation() == Operation::Flush;
        if !is_flush && !self.guest.awaits(*number) {
            return Err(format!("request {number} is done after its answer"));
        }
        match request.operation() {
            Operation::Read => request.memory().copy_from(&self.disk[sector]),
            Operation::Write { .. } => {
                self.disk[sector] = request.memory().to_vec();
                self.on_disk[sector] = u64::from(u32::from_le_bytes(self.disk[sector][..4].try_into().unwrap()));
            }
            _ => self.durable = self.on_disk,
        }
        Ok(())
    }

    /// If the process is dead: the next one, until one lives that long.
    fn mourn(&mut self) -> Check {
        while moment::is_dead() {
            self.killed += 1;
            for taken in std::mem::take(&mut self.held) {
                let done = if self.nature.outlives { self.execute(&taken) } else { Ok(()) };
                taken.request.retire();
                done?;
            }
            self.waiting.drain(..).for_each(|taken| {
                taken.request.retire();
            });
            self.guest.interrupt(&self.durable)?;
            let base = self.guest.used_index();
            moment::die_after(u64::MAX);
            self.server.stop(&mut self.watch);
            let (server, watch) = serve(&self.path);
            (self.server, self.watch) = (server, watch);
            moment::die_after(self.kills.pop().unwrap_or(u64::MAX));
            self.guest.front.reconnect(&self.path);
            self.connect(base)?;
        }
        Ok(())
    }

    fn connect(&mut self, base: u16) -> Check {
        self.removed = [false; 2];
        self.last = None;
        self.guest.negotiate();
        self.turn()?;
        self.guest.take_region();
        self.guest.start(base);
        self.turn()
    }

    fn restart(&mut self) -> Check {
        self.guest.front.send(11, 0, &[0; 8], &[]);
        self.turn()?;
        while !self.held.is_empty() {
            self.complete(usize::MAX)?;
        }
        self.server.publish().unwrap();
        self.turn()?;
        let reply = self.guest.front.reply(11);
        if moment::is_dead() {
            return Ok(());
        }
        let reply = reply.ok_or_else(|| format!("GET_VRING_BASE is not answered: {:?}", self.server.take_events()))?;
        self.guest.interrupt(&self.durable)?;
        self.last = None;
        for index in [0, 1].into_iter().filter(|&index| std::mem::take(&mut self.removed[index])) {
            self.guest.add_memory(index);
        }
        self.guest.start_ring(u16::from_ne_bytes([reply[4], reply[5]]));
        self.turn()
    }

    /// The front-end loses the connection, not its memory. What is under way goes on, and nobody hears of it.
    fn reconnect(&mut self) -> Check {
        // QEMU looks at the used index at once, and the back-end notices later.
        let base = self.guest.used_index();
        self.server.publish().unwrap();
        self.guest.front.reconnect(&self.path);
        self.guest.negotiate();
        self.turn()?;
        let before = self.held.len();
        while !self.held.is_empty() {
            self.complete(usize::MAX)?;
            self.take()?;
            if self.held.len() > before {
                return Err("the next connection took something before the last was over".into());
            }
        }
        self.turn()?;
        if moment::is_dead() {
            return Ok(());
        }
        self.removed = [false; 2];
        self.last = None;
        self.guest.take_region();
        self.guest.start(base);
        self.turn()
    }

    pub fn answered(&self) -> u64 {
        self.guest.answered
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        self.held.drain(..).chain(self.waiting.drain(..)).for_each(|taken| {
            taken.request.retire();
        });
        moment::die_after(u64::MAX);
    }
}
