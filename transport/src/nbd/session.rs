//! One client's session from the first byte to the last, without its socket.
//!
//! It does no I/O: it turns bytes into requests and completions into bytes, so fuzzers and tests can drive it. It knows
//! nothing about file descriptors, other clients (beyond the memory they hold, [`MemoryQuota`]) and the disk.

use std::collections::VecDeque;

use disk::{Geometry, Request, Status};
use memory::Segments;

use super::context::Bitmaps;
use super::error::ProtocolError;
use super::export::Export;
use super::handshake::{self, Encryption, Handshake, Progress};
use super::memory_quota::MemoryQuota;
use super::outgoing::Outgoing;
use super::spare_memory::SpareMemory;
use super::transmission::{InputProgress, Transmission};

/// The result of processing received bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Received {
    /// The number of bytes used; the others must be passed again, before the bytes received next.
    pub used: usize,
    /// The next action of the caller.
    pub next: Next,
}

/// The action that a session requests from its caller after it has processed received bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// Receive more.
    Receive,
    /// Receive nothing more until [`Session::has_memory`].
    Stall,
    /// Send pending replies as they are; then pass all bytes in both directions through TLS, beginning with those that
    /// were not used. They must not be passed to the session without it.
    StartTls,
    /// Send pending replies, then disconnect.
    Disconnect,
}

/// The session of one client.
#[derive(Debug)]
pub struct Session {
    phase: SessionPhase,
    outgoing: Outgoing,
    prefix: u64,
    /// The size of the next request, if there was no memory for it.
    stalled: Option<usize>,
}

#[derive(Debug)]
pub(super) enum SessionPhase {
    Negotiating(Handshake),
    Serving(Transmission),
    Closed,
}

impl Session {
    /// A new session without TLS. Its requests' tokens have `prefix` in all but the lowest 16 bits.
    pub fn new(prefix: u64) -> Session {
        Session::greeting(prefix, Encryption::Unavailable)
    }

    /// A new session whose client must start TLS before anything else ([`Next::StartTls`]).
    pub fn requiring_tls(prefix: u64) -> Session {
        Session::greeting(prefix, Encryption::Required)
    }

    fn greeting(prefix: u64, encryption: Encryption) -> Session {
        let mut outgoing = Outgoing::default();
        outgoing.push(handshake::greeting(), Segments::empty());
        let phase = SessionPhase::Negotiating(Handshake { encryption, ..Handshake::default() });
        Session { phase, outgoing, prefix, stalled: None }
    }

    /// A session taken over from another process, with replies to be sent.
    pub(super) fn resumed(phase: SessionPhase, outgoing: Outgoing, prefix: u64) -> Session {
        Session { phase, outgoing, prefix, stalled: None }
    }

    pub(super) fn phase(&self) -> &SessionPhase {
        &self.phase
    }

    /// The replies that have not been sent to the client.
    pub(super) fn unsent(&self) -> &Outgoing {
        &self.outgoing
    }

    /// Returns true until the client has finished negotiating.
    pub fn is_negotiating(&self) -> bool {
        matches!(self.phase, SessionPhase::Negotiating(_))
    }

    /// Returns true until the client has started TLS, if it must.
    pub fn needs_tls(&self) -> bool {
        matches!(&self.phase, SessionPhase::Negotiating(handshake) if handshake.encryption == Encryption::Required)
    }

    /// The number of requests in the disk.
    pub fn in_flight(&self) -> usize {
        match &self.phase {
            SessionPhase::Serving(transmission) => transmission.in_flight(),
            SessionPhase::Negotiating(_) | SessionPhase::Closed => 0,
        }
    }

    /// The memory held by requests and replies, in bytes.
    pub fn held(&self) -> usize {
        let requests = match &self.phase {
            SessionPhase::Serving(transmission) => transmission.held(),
            SessionPhase::Negotiating(_) | SessionPhase::Closed => 0,
        };
        requests + self.outgoing.held()
    }

    /// The replies to be sent to the client.
    pub fn outgoing(&mut self) -> &mut Outgoing {
        &mut self.outgoing
    }

    /// Returns true if input is accepted: always, except after [`Next::Stall`] until memory is available, and at the
    /// end.
    pub fn has_memory(&self, quota: MemoryQuota) -> bool {
        match &self.phase {
            // If the client does not read its replies, no more are produced.
            SessionPhase::Negotiating(_) => self.stalled.is_none() || self.outgoing.is_empty(),
            SessionPhase::Serving(transmission) => {
                self.stalled.is_none_or(|len| transmission.admits(len, &self.outgoing, quota))
            }
            SessionPhase::Closed => false,
        }
    }

    /// Returns true if processing of the last bytes ended with [`Next::Stall`].
    pub fn is_stalled(&self) -> bool {
        self.stalled.is_some()
    }

    /// Processes bytes from the client. Complete requests are appended to `requests`.
    pub fn receive(
        &mut self,
        bytes: &[u8],
        export: &Export,
        geometry: &Geometry,
        quota: MemoryQuota,
        requests: &mut VecDeque<Request>,
    ) -> Result<Received, ProtocolError> {
        self.stalled = None;
        let mut used: usize = 0;
        loop {
            let rest = bytes.get(used..).unwrap_or_default();
            let progress = match &mut self.phase {
                SessionPhase::Negotiating(_) => self.negotiate(rest, export)?,
                SessionPhase::Serving(transmission) => {
                    transmission.process(rest, geometry, quota, &mut self.outgoing, requests)?
                }
                SessionPhase::Closed => InputProgress::Disconnect,
            };
            let next = match progress {
                InputProgress::Used(len) => {
                    used += len;
                    continue;
                }
                InputProgress::StartTls(len) => {
                    used += len;
                    Next::StartTls
                }
                InputProgress::Incomplete => Next::Receive,
                InputProgress::Stalled(len) => {
                    self.stalled = Some(len);
                    Next::Stall
                }
                InputProgress::Disconnect => Next::Disconnect,
            };
            return Ok(Received { used, next });
        }
    }

    fn negotiate(&mut self, bytes: &[u8], export: &Export) -> Result<InputProgress, ProtocolError> {
        let SessionPhase::Negotiating(handshake) = &mut self.phase else { return Ok(InputProgress::Incomplete) };
        if self.outgoing.held() > REPLIES_MAX {
            return Ok(InputProgress::Stalled(0));
        }
        let mut reply = Vec::new();
        let progress = handshake.step(bytes, export, &mut reply)?;
        self.outgoing.push(reply, Segments::empty());
        Ok(match progress {
            Progress::StartTls(used) => InputProgress::StartTls(used),
            Progress::Incomplete => InputProgress::Incomplete,
            Progress::Negotiating(used) => InputProgress::Used(used),
            Progress::Negotiated(used, negotiated) => {
                self.phase = SessionPhase::Serving(Transmission::new(negotiated, self.prefix));
                InputProgress::Used(used)
            }
            Progress::Aborted => {
                self.phase = SessionPhase::Closed;
                InputProgress::Disconnect
            }
        })
    }

    /// Replies to a completed request; `bitmaps` are those of the export as they are now. A durable trim may add a
    /// [`disk::Operation::Flush`] to `follow`; without `follow`, it is answered with an error because the server is
    /// stopping.
    pub fn complete(
        &mut self,
        request: Request,
        status: Status,
        bitmaps: &dyn Bitmaps,
        follow: Option<(&Geometry, &mut VecDeque<Request>)>,
    ) {
        match &mut self.phase {
            SessionPhase::Serving(transmission) => {
                transmission.complete(request, status, bitmaps, &mut self.outgoing, follow);
            }
            SessionPhase::Negotiating(_) | SessionPhase::Closed => {
                debug_assert!(false, "a completion for a client without requests");
                request.retire();
            }
        }
    }

    /// Replies to a request that was never passed to the disk: the server is stopping.
    pub fn reject(&mut self, request: Request) {
        match &mut self.phase {
            SessionPhase::Serving(transmission) => transmission.reject(request, &mut self.outgoing),
            SessionPhase::Negotiating(_) | SessionPhase::Closed => {
                request.retire();
            }
        }
    }

    /// Returns true if more memory is kept for further requests than an idle client should keep.
    pub fn keeps_much_memory(&self) -> bool {
        self.outgoing.spare().exceeds_idle_max()
    }

    /// Frees the memory kept for further requests.
    pub fn free_kept_memory(&mut self) {
        *self.outgoing.spare_mut() = SpareMemory::default();
    }

    /// Frees everything held for a client that has disconnected, except requests in the disk.
    pub fn hang_up(&mut self) {
        self.outgoing = Outgoing::default();
        if let SessionPhase::Serving(transmission) = &mut self.phase {
            transmission.hang_up();
        }
    }
}

/// The maximum size of pending replies in a negotiation: a few of the longest.
const REPLIES_MAX: usize = 64 << 10;

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn a_partly_received_write_is_held_until_the_client_hangs_up() {
        let geometry =
            Geometry { len: 1 << 20, block: 512, physical_block: 512, discard: 512, chs: None, read_only: false };
        let export =
            Export { name: String::new(), description: String::new(), geometry, layered: true, bitmaps: Vec::new() };
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
        let received = session.receive(&name_and_write, &export, &geometry, MemoryQuota::default(), &mut requests);
        assert_eq!(received, Ok(Received { used: name_and_write.len(), next: Next::Receive }));
        assert!(requests.is_empty());
        assert!(session.held() > 4096);
        session.hang_up();
        assert_eq!(session.held(), 0);
    }

    #[test]
    fn a_status_waits_for_memory_for_its_longest_reply() {
        let geometry =
            Geometry { len: 1 << 30, block: 512, physical_block: 512, discard: 512, chs: None, read_only: false };
        let bitmaps = vec!["b".into()];
        let export = Export { name: String::new(), description: String::new(), geometry, layered: true, bitmaps };
        let mut session = Session::new(0);
        let contexts = ["base:allocation", "qemu:dirty-bitmap:b"]
            .map(|name| [&u32::try_from(name.len()).unwrap().to_be_bytes()[..], name.as_bytes()].concat());
        let contexts = [&[0, 0, 0, 0, 0, 0, 0, 2][..], &contexts.concat()].concat();
        let option = |number: u32, data: &[u8]| {
            [b"IHAVEOPT", &number.to_be_bytes()[..], &u32::try_from(data.len()).unwrap().to_be_bytes(), data].concat()
        };
        let status = |cookie: u64, len: u32| {
            let cookie = cookie.to_be_bytes();
            [&[0x25, 0x60, 0x95, 0x13, 0, 0, 0, 7], &cookie[..], &[0; 8], &len.to_be_bytes()].concat()
        };
        let begin = [3u32.to_be_bytes().to_vec(), option(8, &[]), option(10, &contexts), option(7, &[0; 6])].concat();
        // Other clients hold all memory: this one may have one request.
        let quota = MemoryQuota { others: 256 << 20 };
        let mut requests = VecDeque::new();
        let mut receive = |session: &mut Session, bytes: &[u8]| {
            let received = session.receive(bytes, &export, &geometry, quota, &mut requests).unwrap();
            (received.next, requests.pop_front())
        };
        assert_eq!(receive(&mut session, &begin).0, Next::Receive);
        let all = session.outgoing().held();
        session.outgoing().sent(all);
        let (_, first) = receive(&mut session, &status(1, 1 << 30));
        assert_eq!(session.held(), 2 * (20 + 4 + 4096 * 8));
        assert_eq!(receive(&mut session, &status(2, 512)).0, Next::Stall);
        let mut first = first.unwrap();
        first.extents_mut().push(disk::Extent { len: 1 << 30, kind: disk::ExtentKind::Hole, depth: 0 });
        session.complete(first, Status::Done, &super::super::AllDirty, None);
        // Now what it is: one run in each context.
        assert_eq!(session.held(), 2 * (20 + 4 + 8));
        let reply = session.outgoing().held();
        session.outgoing().sent(reply);
        let (next, second) = receive(&mut session, &status(2, 512));
        assert_eq!((next, session.held()), (Next::Receive, 2 * (20 + 4 + 3 * 8)));
        second.unwrap().retire();
    }
}
