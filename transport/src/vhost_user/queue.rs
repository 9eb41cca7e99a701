//! One queue: what the front-end has set up for it, the ring once it runs, and the chains being worked on.
//!
//! Knows nothing about what a chain asks for. Invariant: a chain is answered once, after the last of the requests
//! that were made of it; a broken queue is not touched again before it is set up anew.

use std::os::fd::OwnedFd;

use disk::Status;
use memory::GuestAddr;

use super::message::VringAddr;
use super::request::status_byte;
use super::ring::{Broken, Ring};
use super::table::Table;

/// One queue.
#[derive(Default)]
pub struct Queue {
    /// Places in the ring; zero until told.
    pub size: u16,
    /// The index to start at.
    pub base: u16,
    /// Where the ring lies.
    pub place: Option<VringAddr>,
    /// May be served (when the front-end negotiates that at all).
    pub enabled: bool,
    /// Started: signalled by the driver on new requests.
    pub kick: Option<OwnedFd>,
    /// To be signalled on answers.
    pub call: Option<OwnedFd>,
    /// To be signalled when the queue breaks.
    pub err: Option<OwnedFd>,
    /// No chains are taken until the front-end starts it again.
    pub draining: bool,
    ring: Option<Ring>,
    broken: bool,
    /// By head of the chain; as many as the ring has places, so that no head is outside.
    slots: Vec<Slot>,
    /// Chains being worked on.
    in_flight: u16,
}

/// A chain being worked on.
#[derive(Clone, Copy)]
struct Slot {
    status_at: GuestAddr,
    /// Bytes that the driver is told were written when all is well, status included.
    written: u32,
    /// Requests made of the chain that have no answer yet.
    open: u16,
    worst: Status,
}

const IDLE: Slot = Slot { status_at: GuestAddr(0), written: 0, open: 0, worst: Status::Done };

impl Queue {
    /// Whether the front-end has started it.
    pub fn is_started(&self) -> bool {
        self.kick.is_some()
    }

    /// Whether no chain is being worked on.
    pub fn is_idle(&self) -> bool {
        self.in_flight == 0
    }

    /// Brings the ring up, or to its new place, once everything for it is known; without one if it does not lie in
    /// the table, until the next table.
    pub fn start(&mut self, table: &Table, event_idx: bool) {
        let Some(place) = self.place.filter(|_| self.is_started() && self.size > 0) else { return };
        match &mut self.ring {
            Some(ring) => {
                if ring.move_to(table, &place).is_none() {
                    self.base = ring.next_avail();
                    self.ring = None;
                }
            }
            None => {
                self.ring = Ring::new(table, &place, self.size, self.base, event_idx);
                // A chain of before the ring was lost may still be under way; its slot must stay.
                self.slots.resize(usize::from(self.size), IDLE);
            }
        }
    }

    /// Takes the ring down; the answer is the index at which it is to be continued.
    pub fn stop(&mut self) -> u16 {
        if let Some(ring) = self.ring.take() {
            self.base = ring.next_avail();
        }
        self.kick = None;
        self.draining = false;
        self.broken = false;
        self.base
    }

    /// The ring, if chains may be taken from it.
    fn served(&mut self) -> Option<&mut Ring> {
        let serve = self.enabled && !self.draining && !self.broken;
        self.ring.as_mut().filter(|_| serve)
    }

    /// The next chain: its head, and the ring to read it from.
    pub fn pop(&mut self) -> Result<Option<(u16, &Ring)>, Broken> {
        let Some(ring) = self.served() else { return Ok(None) };
        let Some(head) = ring.pop()? else { return Ok(None) };
        if self.slots.get(usize::from(head)).is_none_or(|slot| slot.open > 0) {
            return Err(Broken::InUse(head));
        }
        Ok(self.ring.as_ref().map(|ring| (head, ring)))
    }

    /// Notes that `open` requests were made of a chain.
    pub fn open(&mut self, head: u16, status_at: GuestAddr, written: u32, open: u16) {
        if let Some(slot) = self.slots.get_mut(usize::from(head)) {
            *slot = Slot { status_at, written, open, worst: Status::Done };
            self.in_flight = self.in_flight.saturating_add(1);
        }
    }

    /// One request of a chain has its answer; with the last of them, so has the chain. `true`: there is
    /// something to publish.
    pub fn close(&mut self, head: u16, status: Status, table: &Table) -> Result<bool, Broken> {
        let Some(slot) = self.slots.get_mut(usize::from(head)) else { return Ok(false) };
        let Some(left) = slot.open.checked_sub(1) else { return Ok(false) };
        slot.open = left;
        if status != Status::Done {
            slot.worst = status;
        }
        if left > 0 {
            return Ok(false);
        }
        let Slot { status_at, written, worst, .. } = *slot;
        self.in_flight = self.in_flight.saturating_sub(1);
        // Of a failed read nothing is promised but the status byte.
        let written = if worst == Status::Done { written } else { 1 };
        self.answer(head, status_at, status_byte(worst), written, table)
    }

    /// Answers a chain: status first, then the used element. `true`: there is something to publish.
    pub fn answer(
        &mut self,
        head: u16,
        status_at: GuestAddr,
        byte: u8,
        written: u32,
        table: &Table,
    ) -> Result<bool, Broken> {
        let Some(ring) = self.ring.as_mut().filter(|_| !self.broken) else { return Ok(false) };
        // Memory taken away in the meantime is nobody's status any more; the chain is used all the same.
        let written = table.write_byte(status_at, byte).map_or(0, |()| written);
        ring.push_used(head, written)?;
        Ok(true)
    }

    /// Shows the driver its answers and signals it if it wants that.
    pub fn publish(&mut self) -> Result<(), Broken> {
        let Some(ring) = self.ring.as_mut().filter(|_| !self.broken) else { return Ok(()) };
        if ring.publish()? {
            signal(self.call.as_ref());
        }
        Ok(())
    }

    /// Asks to be notified of new chains.
    pub fn ask_for_kicks(&mut self) -> Result<(), Broken> {
        self.served().map_or(Ok(()), Ring::ask_for_kicks)
    }

    /// Whether there is no chain to take.
    pub fn is_empty(&mut self) -> Result<bool, Broken> {
        self.served().map_or(Ok(true), Ring::is_empty)
    }

    /// Gives the ring up, and says so. Chains being worked on are finished into nothing.
    pub fn break_off(&mut self) {
        self.broken = true;
        signal(self.err.as_ref());
    }
}

/// Signals an eventfd. It does not block (see `session::signal_fd`), and one that is full is signalled already.
fn signal(fd: Option<&OwnedFd>) {
    if let Some(fd) = fd {
        // Nothing can be lost: a front-end that closed the other end does not listen.
        rustix::io::write(fd, &1u64.to_ne_bytes()).ok();
    }
}
