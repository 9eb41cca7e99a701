//! One queue: a ring, the event channel beside it, and the requests that were taken and have no answer.
//!
//! Knows nothing of grants. Invariants: a request is answered once; a barrier is alone; a broken queue is not touched
//! again.

use std::io;

use disk::Geometry;
use xen::{EventChannels, Port};

use super::data::Lent;
use super::moment::{Mistake, mistake};
use super::request::{Parsed, Pieces};
use super::ring::{Broken, Response, Ring};

/// One queue.
pub struct Queue {
    ring: Ring,
    /// Our end of its event channel.
    pub port: Port,
    records: Vec<Record>,
    free: Vec<u16>,
    /// Requests taken and not yet done.
    open: usize,
    barrier: Barrier,
    broken: bool,
    /// There are answers that the front end may have to be told of.
    answered: bool,
    /// It could not be told of them.
    owes_signal: bool,
}

/// What was taken and has no answer.
pub struct Record {
    /// What its entry asks for.
    pub parsed: Parsed,
    /// Where its data are in the guest's pages.
    pub pieces: Pieces,
    /// What they lie in meanwhile.
    pub lent: Option<Lent>,
}

/// How it stands with a barrier. Nothing is taken while there is one.
enum Barrier {
    None,
    /// It waits for what came before it.
    Waits(u16),
    /// It is being done.
    Runs,
}

impl Barrier {
    /// Has it begin, once it is alone; its number.
    fn run(&mut self, open: &mut usize) -> Option<u16> {
        match *self {
            Barrier::Waits(number) if *open == 0 => {
                (*self, *open) = (Barrier::Runs, 1);
                Some(number)
            }
            _ => None,
        }
    }
}

impl Queue {
    /// A queue whose front end signals `port`.
    pub fn new(ring: Ring, port: Port) -> Queue {
        let slots = u16::try_from(ring.slots()).unwrap_or(0);
        let records = (0..slots).map(|_| Record::default()).collect();
        let free = (0..slots).rev().collect();
        let (open, barrier, broken, answered, owes_signal) = (0, Barrier::None, false, true, false);
        Queue { ring, port, records, free, open, barrier, broken, answered, owes_signal }
    }

    /// Whether there may be something to take, at the price of one load.
    #[inline]
    pub fn has_news(&self) -> bool {
        !self.broken && (self.ring.has_news() || !matches!(self.barrier, Barrier::None))
    }

    /// The next request, with its number. Its record has what its entry tells, and nothing else. One that is to be
    /// refused is done.
    #[inline]
    pub fn take(&mut self, segments_max: u16, geometry: &Geometry) -> Result<Option<(u16, &mut Record)>, Broken> {
        if self.broken {
            return Ok(None);
        }
        if !matches!(self.barrier, Barrier::None) {
            let Some(number) = self.barrier.run(&mut self.open) else { return Ok(None) };
            return Ok(self.records.get_mut(usize::from(number)).map(|record| (number, record)));
        }
        let Some(&number) = self.free.last() else { return Ok(None) };
        let Some(record) = self.records.get_mut(usize::from(number)) else { return Ok(None) };
        let Some(entry) = self.ring.take(number)? else { return Ok(None) };
        self.free.pop();
        record.parsed.look_at(entry, segments_max, geometry, &mut record.pieces);
        match record.parsed.ask {
            Ok(ask) if ask.is_barrier() => {
                self.barrier = Barrier::Waits(number);
                return Ok(self.barrier.run(&mut self.open).map(|number| (number, record)));
            }
            Ok(_) => self.open = self.open.saturating_add(1),
            Err(_) => {}
        }
        Ok(Some((number, record)))
    }

    /// What is known of a request.
    #[inline]
    pub fn record(&self, number: u16) -> Option<&Record> {
        self.records.get(usize::from(number))
    }

    /// The same, to be added to.
    #[inline]
    pub fn record_mut(&mut self, number: u16) -> Option<&mut Record> {
        self.records.get_mut(usize::from(number))
    }

    /// A request was done.
    #[inline]
    pub fn done(&mut self) {
        self.open = self.open.saturating_sub(1);
        if matches!(self.barrier, Barrier::Runs) {
            self.barrier = Barrier::None;
        }
    }

    /// Whether the answer to this request takes its own place, if it is the next.
    pub fn is_next(&self, number: u16) -> bool {
        self.ring.is_next(number)
    }

    /// Puts the answer to a request that was done into the ring; its memory is free, if it had any.
    #[inline]
    pub fn answer(&mut self, number: u16, status: i16, free: impl FnOnce(Lent)) -> Result<(), Broken> {
        let Some(record) = self.records.get_mut(usize::from(number)) else { return Ok(()) };
        if let Some(lent) = record.lent.take() {
            free(lent);
        }
        record.pieces.clear();
        if self.broken {
            return Ok(());
        }
        self.free.push(number);
        self.answered = true;
        let Parsed { id, operation, .. } = record.parsed;
        self.ring.answer(number, Response { id, operation, status })
    }

    /// Tells the front end of the answers, if it wants to know. What fails is owed, and tried again with the next call:
    /// it may wait for nothing else.
    pub fn tell(&mut self, channels: &mut dyn EventChannels) -> Result<io::Result<()>, Broken> {
        if self.broken || !(std::mem::take(&mut self.answered) || self.owes_signal) {
            return Ok(Ok(()));
        }
        if !self.ring.must_signal()? && !self.owes_signal {
            return Ok(Ok(()));
        }
        let notified = channels.notify(self.port);
        self.owes_signal = notified.is_err() && !mistake(Mistake::SignalLost);
        Ok(notified)
    }

    /// Asks to be signalled of the next request.
    pub fn ask_for_signal(&mut self) -> Result<(), Broken> {
        if self.broken { Ok(()) } else { self.ring.ask_for_signal() }
    }

    /// Whether there is nothing that could be taken now.
    pub fn is_empty(&mut self) -> Result<bool, Broken> {
        match &self.barrier {
            _ if self.broken => Ok(true),
            Barrier::None => self.ring.is_empty(),
            Barrier::Waits(..) => Ok(self.open > 0),
            Barrier::Runs => Ok(true),
        }
    }

    /// Takes nothing that is announced from now on.
    pub fn close(&mut self) -> Result<(), Broken> {
        if self.broken { Ok(()) } else { self.ring.close() }
    }

    /// Gives the ring up.
    pub fn break_off(&mut self) {
        self.broken = true;
    }
}

impl Default for Record {
    fn default() -> Record {
        Record { parsed: Parsed::nothing(), pieces: Pieces::default(), lent: None }
    }
}
