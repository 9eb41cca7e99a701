//! A connection to xenstored: one request and its reply at a time, and the watch events in between.
//!
//! It knows nothing about the meaning of requests. Invariant: the wait for a reply is bounded, and after a protocol
//! error no exchange succeeds.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, epoll, poll};
use rustix::io::{Errno, read, write};

use crate::pending::Pending;
use crate::wire::{HEADER, Kind, Message, PAYLOAD_MAX, Receiver};
use crate::{Transaction, WatchEvent};

/// Reads per non-blocking call: a flooding sender must not keep us from other work.
const READS_MAX: usize = 16;

/// A socket of xenstored, or the kernel's device.
pub(super) struct Connection {
    fd: OwnedFd,
    /// Readable when `fd` or `pending` is.
    readable: OwnedFd,
    receiver: Receiver,
    /// Our watches and their events.
    pub(super) pending: Pending,
    /// The id of the last request.
    request_id: u32,
    lost: bool,
}

/// Why there is no reply.
pub(super) enum ExchangeError {
    TimedOut,
    /// Linux's device rejects a request when it is written, and stays usable: one for a watch, or one that is too long
    /// for it.
    Refused(&'static str),
    Broken(io::Error),
}

impl From<io::Error> for ExchangeError {
    fn from(error: io::Error) -> ExchangeError {
        ExchangeError::Broken(error)
    }
}

impl Connection {
    pub(super) fn new(fd: OwnedFd) -> io::Result<Connection> {
        rustix::io::ioctl_fionbio(&fd, true).or_else(|error| match error {
            // The device does not support this; it was opened non-blocking.
            Errno::NOTTY => Ok(()),
            error => Err(error),
        })?;
        let pending = Pending::new()?;
        let readable = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        for either in [fd.as_fd(), pending.fd()] {
            epoll::add(&readable, either, epoll::EventData::new_u64(0), epoll::EventFlags::IN)?;
        }
        Ok(Connection { fd, readable, receiver: Receiver::default(), pending, request_id: 0, lost: false })
    }

    /// Takes the descriptor of a connection on which nothing has been sent yet.
    pub(super) fn into_fd(self) -> OwnedFd {
        self.fd
    }

    /// Sends a request and waits for the reply, up to `timeout`. Any I/O error ends the connection.
    pub(super) fn exchange(
        &mut self,
        kind: Kind,
        within: Option<Transaction>,
        payload: Vec<u8>,
        timeout: Duration,
    ) -> Result<Message, ExchangeError> {
        self.request_id = self.request_id.wrapping_add(1).max(1);
        let message =
            Message { kind, request: self.request_id, transaction: within.map_or(0, |within| within.0), payload };
        let bytes = message.encode().ok_or(ExchangeError::Refused("E2BIG"))?;
        let reply = self.send_and_receive(kind, &bytes, Instant::now() + timeout);
        self.lost |= matches!(reply, Err(ExchangeError::Broken(_)));
        reply
    }

    /// The next event, without waiting.
    pub(super) fn take_event(&mut self) -> io::Result<Option<WatchEvent>> {
        for _ in 0..READS_MAX {
            if self.lost {
                break;
            }
            match self.receive(None) {
                Ok((_, true)) => {}
                Ok((_, false)) => break,
                Err(error) => {
                    self.lost = true;
                    return Err(error);
                }
            }
        }
        match self.pending.take()? {
            None if self.lost => Err(io::ErrorKind::NotConnected.into()),
            event => Ok(event),
        }
    }

    /// Marks the connection as unusable.
    pub(super) fn mark_lost(&mut self) {
        self.lost = true;
    }

    fn send_and_receive(&mut self, kind: Kind, bytes: &[u8], until: Instant) -> Result<Message, ExchangeError> {
        if self.lost {
            return Err(io::Error::from(io::ErrorKind::NotConnected).into());
        }
        self.send(bytes, until)?;
        loop {
            let (reply, any) = self.receive(Some(kind))?;
            if let Some(reply) = reply {
                return Ok(reply);
            }
            // A flood of events is not a reply.
            if !any || Instant::now() >= until {
                self.wait(PollFlags::IN, until)?;
            }
        }
    }

    fn send(&mut self, bytes: &[u8], until: Instant) -> Result<(), ExchangeError> {
        let mut rest = bytes;
        while !rest.is_empty() {
            match write(&self.fd, rest) {
                Ok(0) => return Err(io::Error::from(io::ErrorKind::WriteZero).into()),
                Ok(sent) => rest = rest.get(sent..).unwrap_or_default(),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => {
                    let waited = self.wait(PollFlags::OUT, until);
                    // A partly sent request cannot be taken back.
                    self.lost |= waited.is_err() && rest.len() < bytes.len();
                    waited?;
                }
                Err(errno) => {
                    let refused = store_error_code(errno).filter(|_| rest.len() == bytes.len());
                    return Err(refused.map_or(ExchangeError::Broken(errno.into()), ExchangeError::Refused));
                }
            }
        }
        Ok(())
    }

    /// Reads once without waiting. Returns the reply to the last request, which was of `kind`, if it has arrived, and
    /// whether anything has.
    fn receive(&mut self, kind: Option<Kind>) -> io::Result<(Option<Message>, bool)> {
        let mut bytes = [0; HEADER + PAYLOAD_MAX];
        let len = match read(&self.fd, &mut bytes) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(len) => len,
            Err(Errno::AGAIN | Errno::INTR) => return Ok((None, false)),
            Err(error) => return Err(error.into()),
        };
        self.receiver.push(bytes.get(..len).unwrap_or_default());
        let mut reply = None;
        while let Some(message) = self.receiver.next_message().map_err(protocol_error)? {
            match (message.kind, kind) {
                (Kind::WATCH_EVENT, _) => {
                    self.pending.push(event(&message).ok_or_else(|| protocol_error("a malformed event"))?)?
                }
                (_, Some(kind)) if is_reply(&message, kind, self.request_id) => {
                    if message.kind != kind && message.kind != Kind::ERROR {
                        return Err(protocol_error("a reply whose type does not match the request"));
                    }
                    reply = Some(message);
                }
                // The reply to a request that timed out.
                _ => {}
            }
        }
        Ok((reply, true))
    }

    fn wait(&self, flags: PollFlags, until: Instant) -> Result<(), ExchangeError> {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(ExchangeError::TimedOut);
        }
        let timeout = Timespec::try_from(left).map_err(io::Error::other)?;
        match poll(&mut [PollFd::new(&self.fd, flags)], Some(&timeout)) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(error) => Err(ExchangeError::Broken(error.into())),
        }
    }
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.readable.as_fd()
    }
}

/// The store's error code for an errno of Linux's device; `None` if the error is not about the request.
fn store_error_code(errno: Errno) -> Option<&'static str> {
    let known = [
        (Errno::ACCESS, "EACCES"),
        (Errno::EXIST, "EEXIST"),
        (Errno::INVAL, "EINVAL"),
        (Errno::NOENT, "ENOENT"),
        (Errno::NOSPC, "ENOSPC"),
        (Errno::PERM, "EPERM"),
        (Errno::TOOBIG, "E2BIG"),
    ];
    known.iter().find(|(known, _)| *known == errno).map(|&(_, code)| code)
}

/// Whether a message is the reply to the request of `kind` with id `request_id`.
fn is_reply(message: &Message, kind: Kind, request_id: u32) -> bool {
    // Linux answers watch requests for its device itself, and does not repeat the id.
    let from_linux = message.request == 0 && message.kind == kind && [Kind::WATCH, Kind::UNWATCH].contains(&kind);
    message.request == request_id || from_linux
}

fn event(message: &Message) -> Option<WatchEvent> {
    let mut words = message.words().map(|word| std::str::from_utf8(word).ok().map(str::to_owned));
    Some(WatchEvent { path: words.next()??, token: words.next()?? })
}

/// The error for received data that is not valid protocol.
pub(super) fn protocol_error(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error)
}
