//! One queue: a ring, the event channel beside it, and the requests that were taken and have no answer.
//!
//! Knows nothing of grants. Invariants: a request is answered once; a barrier is alone; a broken queue is not touched again.

use disk::Geometry;
use xen::{EventChannels, Piece, Port};

use super::pool::Loan;
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
}

/// What was taken and has no answer.
#[derive(Default)]
struct Record {
    id: u64,
    operation: u8,
    /// Where data go that are read.
    pieces: Pieces,
    /// What they lie in meanwhile.
    loan: Option<Loan>,
}

/// How it stands with a barrier. Nothing is taken while there is one.
enum Barrier {
    None,
    /// It waits for what came before it.
    Waits(u16, Parsed),
    /// It is being done.
    Runs,
}

impl Queue {
    /// A queue whose front end signals `port`.
    pub fn new(ring: Ring, port: Port) -> Queue {
        let slots = u16::try_from(ring.slots()).unwrap_or(0);
        let records = (0..slots).map(|_| Record::default()).collect();
        let free = (0..slots).rev().collect();
        Queue { ring, port, records, free, open: 0, barrier: Barrier::None, broken: false, answered: true }
    }

    /// The next request, with its number.
    pub fn take(&mut self, segments_max: u16, geometry: &Geometry) -> Result<Option<(u16, Parsed)>, Broken> {
        if self.broken {
            return Ok(None);
        }
        match std::mem::replace(&mut self.barrier, Barrier::None) {
            Barrier::None => {}
            Barrier::Waits(number, parsed) if self.open == 0 => {
                self.open = 1;
                self.barrier = Barrier::Runs;
                return Ok(Some((number, parsed)));
            }
            still => {
                self.barrier = still;
                return Ok(None);
            }
        }
        let Some(&number) = self.free.last() else { return Ok(None) };
        let Some(entry) = self.ring.take(number)? else { return Ok(None) };
        self.free.pop();
        let parsed = Parsed::of(&entry, segments_max, geometry);
        if let Some(record) = self.records.get_mut(usize::from(number)) {
            (record.id, record.operation) = (parsed.id, parsed.operation);
        }
        if parsed.is_barrier() {
            self.barrier = Barrier::Waits(number, parsed);
            return self.take(segments_max, geometry);
        }
        self.open = self.open.saturating_add(1);
        Ok(Some((number, parsed)))
    }

    /// Keeps with a request what its answer needs.
    pub fn keep(&mut self, number: u16, pieces: Pieces, loan: Option<Loan>) {
        if let Some(record) = self.records.get_mut(usize::from(number)) {
            (record.pieces, record.loan) = (pieces, loan);
        }
    }

    /// A request was done; its operation, where data go that it has read, and what they lie in.
    pub fn done(&mut self, number: u16) -> (u8, &[Piece], Option<&Loan>) {
        self.open = self.open.saturating_sub(1);
        if matches!(self.barrier, Barrier::Runs) {
            self.barrier = Barrier::None;
        }
        let record = self.records.get(usize::from(number));
        record.map_or((0, &[], None), |record| (record.operation, &record.pieces, record.loan.as_ref()))
    }

    /// Puts the answer to a request that was done into the ring; its memory is free, if it had any.
    pub fn answer(&mut self, number: u16, status: i16) -> (Option<Loan>, Result<(), Broken>) {
        let Some(record) = self.records.get_mut(usize::from(number)) else { return (None, Ok(())) };
        let response = Response { id: record.id, operation: record.operation, status };
        let loan = record.loan.take();
        record.pieces.clear();
        if self.broken {
            return (loan, Ok(()));
        }
        self.free.push(number);
        self.answered = true;
        (loan, self.ring.answer(number, response))
    }

    /// Tells the front end of the answers, if it wants to know.
    pub fn tell(&mut self, channels: &mut dyn EventChannels) -> Result<(), Broken> {
        if self.broken || !std::mem::take(&mut self.answered) {
            return Ok(());
        }
        if self.ring.must_signal()? {
            // An end that cannot be signalled is one that nobody listens at.
            channels.notify(self.port).ok();
        }
        Ok(())
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
