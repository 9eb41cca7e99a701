//! One client's conversation from the first byte to the last, without its socket.
//!
//! Pure: bytes in, requests out, answers in, bytes out; what fuzzers and tests drive. Knows nothing about file
//! descriptors, other clients (beyond the memory they hold, [`Room`]) and the disk.

use std::collections::VecDeque;

use disk::{Geometry, Request, Status};
use memory::Segments;

use super::error::ProtocolError;
use super::export::Export;
use super::handshake::{self, Handshake, Progress};
use super::outgoing::Outgoing;
use super::room::Room;
use super::transmission::{Step, Transmission};

/// What came of received bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Received {
    /// How many bytes were used; the others are to be shown again, in front of what comes next.
    pub used: usize,
    /// What to do next.
    pub next: Next,
}

/// What to do after bytes have been received.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// Receive more.
    Receive,
    /// Nothing more, before [`Session::has_room`].
    Stall,
    /// Send what is to be sent; the conversation is over.
    Farewell,
}

/// One conversation.
#[derive(Debug)]
pub struct Session {
    phase: Phase,
    outgoing: Outgoing,
    prefix: u64,
    /// Bytes of memory that the next request asks for, if there was no room for it.
    stalled: Option<usize>,
}

#[derive(Debug)]
pub(super) enum Phase {
    Negotiating(Handshake),
    Serving(Transmission),
    Over,
}

impl Session {
    /// A conversation that begins. The tokens of its requests are `prefix` in all but the lowest 16 bits.
    pub fn new(prefix: u64) -> Session {
        let mut outgoing = Outgoing::default();
        outgoing.push(handshake::greeting(), Segments::empty());
        Session { phase: Phase::Negotiating(Handshake::default()), outgoing, prefix, stalled: None }
    }

    /// A conversation that goes on from there, with replies that are to be sent.
    pub(super) fn resumed(phase: Phase, outgoing: Outgoing, prefix: u64) -> Session {
        Session { phase, outgoing, prefix, stalled: None }
    }

    /// How far it is.
    pub(super) fn phase(&self) -> &Phase {
        &self.phase
    }

    /// What has not been sent to the client.
    pub(super) fn unsent(&self) -> &Outgoing {
        &self.outgoing
    }

    /// Whether the client has not yet got as far as requests.
    pub fn is_negotiating(&self) -> bool {
        matches!(self.phase, Phase::Negotiating(_))
    }

    /// Requests that the disk has.
    pub fn in_flight(&self) -> usize {
        match &self.phase {
            Phase::Serving(transmission) => transmission.in_flight(),
            Phase::Negotiating(_) | Phase::Over => 0,
        }
    }

    /// Bytes of memory that requests and replies hold.
    pub fn held(&self) -> usize {
        let requests = match &self.phase {
            Phase::Serving(transmission) => transmission.held(),
            Phase::Negotiating(_) | Phase::Over => 0,
        };
        requests.saturating_add(self.outgoing.held())
    }

    /// What is to be sent to the client.
    pub fn outgoing(&mut self) -> &mut Outgoing {
        &mut self.outgoing
    }

    /// Whether bytes are wanted: always, except after [`Next::Stall`] while there is still no room, and at the end.
    pub fn has_room(&self, room: Room) -> bool {
        match &self.phase {
            // Answers that the client does not read are not added to.
            Phase::Negotiating(_) => self.stalled.is_none() || self.outgoing.is_empty(),
            Phase::Serving(transmission) => {
                self.stalled.is_none_or(|len| transmission.admits(len, &self.outgoing, room))
            }
            Phase::Over => false,
        }
    }

    /// Whether the last bytes received ended with [`Next::Stall`].
    pub fn is_stalled(&self) -> bool {
        self.stalled.is_some()
    }

    /// Takes in bytes of the client. Requests that they complete go to the end of `requests`.
    pub fn receive(
        &mut self,
        bytes: &[u8],
        export: &Export,
        geometry: &Geometry,
        room: Room,
        requests: &mut VecDeque<Request>,
    ) -> Result<Received, ProtocolError> {
        self.stalled = None;
        let mut used: usize = 0;
        loop {
            let rest = bytes.get(used..).unwrap_or_default();
            let step = match &mut self.phase {
                Phase::Negotiating(_) => self.negotiate(rest, export)?,
                Phase::Serving(transmission) => {
                    transmission.step(rest, geometry, room, &mut self.outgoing, requests)?
                }
                Phase::Over => Step::Disconnect,
            };
            let next = match step {
                Step::Used(len) => {
                    used = used.saturating_add(len);
                    continue;
                }
                Step::Incomplete => Next::Receive,
                Step::Stalled(len) => {
                    self.stalled = Some(len);
                    Next::Stall
                }
                Step::Disconnect => Next::Farewell,
            };
            return Ok(Received { used, next });
        }
    }

    fn negotiate(&mut self, bytes: &[u8], export: &Export) -> Result<Step, ProtocolError> {
        let Phase::Negotiating(handshake) = &mut self.phase else { return Ok(Step::Incomplete) };
        if self.outgoing.held() > ANSWERS_MAX {
            return Ok(Step::Stalled(0));
        }
        let mut answer = Vec::new();
        let progress = handshake.step(bytes, export, &mut answer)?;
        self.outgoing.push(answer, Segments::empty());
        Ok(match progress {
            Progress::Incomplete => Step::Incomplete,
            Progress::Negotiating(used) => Step::Used(used),
            Progress::Agreed(used, agreed) => {
                self.phase = Phase::Serving(Transmission::new(agreed, self.prefix));
                Step::Used(used)
            }
            Progress::Aborted => {
                self.phase = Phase::Over;
                Step::Disconnect
            }
        })
    }

    /// Answers a request. With `follow`, it may lead to another one ([`disk::Operation::Flush`] after a trim that
    /// is to be durable); without, the client is told that the server stops.
    pub fn complete(&mut self, request: Request, status: Status, follow: Option<(&Geometry, &mut VecDeque<Request>)>) {
        match &mut self.phase {
            Phase::Serving(transmission) => transmission.complete(request, status, &mut self.outgoing, follow),
            Phase::Negotiating(_) | Phase::Over => {
                debug_assert!(false, "an answer to a client that has made no request");
                request.retire();
            }
        }
    }

    /// Answers a request that was never given to the disk: the server stops.
    pub fn turn_away(&mut self, request: Request) {
        match &mut self.phase {
            Phase::Serving(transmission) => transmission.turn_away(request, &mut self.outgoing),
            Phase::Negotiating(_) | Phase::Over => {
                request.retire();
            }
        }
    }

    /// The client is gone: nothing more is held for it, except by requests that the disk has.
    pub fn hang_up(&mut self) {
        self.outgoing = Outgoing::default();
        if let Phase::Serving(transmission) = &mut self.phase {
            transmission.hang_up();
        }
    }
}

/// Answers of a negotiation that may wait to be sent: a few of the longest.
const ANSWERS_MAX: usize = 64 << 10;

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn a_half_received_write_is_held_until_the_client_hangs_up() {
        let geometry =
            Geometry { len: 1 << 20, block: 512, physical_block: 512, discard: 512, chs: None, read_only: false };
        let export = Export { name: String::new(), description: String::new(), geometry, layered: true };
        let mut session = Session::new(0);
        let name_and_write = [
            &3u32.to_be_bytes()[..],
            b"IHAVEOPT\0\0\0\x01\0\0\0\0",
            &[0x25, 0x60, 0x95, 0x13, 0, 0, 0, 1],
            &[0; 16],
            &4096u32.to_be_bytes(),
            &[7; 100],
        ]
        .concat();
        let mut requests = VecDeque::new();
        let received = session.receive(&name_and_write, &export, &geometry, Room::default(), &mut requests);
        assert_eq!(received, Ok(Received { used: name_and_write.len(), next: Next::Receive }));
        assert!(requests.is_empty());
        assert!(session.held() > 4096);
        session.hang_up();
        assert_eq!(session.held(), 0);
    }
}
