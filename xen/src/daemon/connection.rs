//! A connection to the store: one question and its answer at a time, and the events that come in between.
//!
//! Knows nothing of what is asked. Keeps: an answer is waited for in bounded time, and once the two sides no longer
//! understand each other no exchange succeeds.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, epoll, poll};
use rustix::io::{Errno, read, write};

use crate::pending::Pending;
use crate::wire::{HEADER, Kind, Message, PAYLOAD_MAX, Receiver};
use crate::{Transaction, WatchEvent};

/// Reads in one call that waits for nothing: a sender that floods does not keep us from other work.
const READS: usize = 16;

/// A socket of the daemon, or the kernel's device.
pub(super) struct Connection {
    fd: OwnedFd,
    /// Readable when `fd` or `pending` is.
    readable: OwnedFd,
    receiver: Receiver,
    /// Our watches and their events.
    pub(super) pending: Pending,
    /// The number of the last question.
    asked: u32,
    lost: bool,
}

/// Why there is no answer.
pub(super) enum Silence {
    Late,
    /// Linux's device refuses a question when it is written, and goes on: one for a watch, or one that is too long for it.
    Refused(&'static str),
    Broken(io::Error),
}

impl From<io::Error> for Silence {
    fn from(error: io::Error) -> Silence {
        Silence::Broken(error)
    }
}

impl Connection {
    pub(super) fn new(fd: OwnedFd) -> io::Result<Connection> {
        rustix::io::ioctl_fionbio(&fd, true).or_else(|error| match error {
            // Not so for the device, which was opened that way.
            Errno::NOTTY => Ok(()),
            error => Err(error),
        })?;
        let pending = Pending::new()?;
        let readable = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        for either in [fd.as_fd(), pending.fd()] {
            epoll::add(&readable, either, epoll::EventData::new_u64(0), epoll::EventFlags::IN)?;
        }
        Ok(Connection { fd, readable, receiver: Receiver::default(), pending, asked: 0, lost: false })
    }

    /// Gives the connection away, over which nothing was said yet.
    pub(super) fn into_descriptor(self) -> OwnedFd {
        self.fd
    }

    /// Asks, and waits so long for the answer. What breaks is the end of the connection.
    pub(super) fn exchange(
        &mut self,
        kind: Kind,
        within: Option<Transaction>,
        payload: Vec<u8>,
        patience: Duration,
    ) -> Result<Message, Silence> {
        self.asked = self.asked.wrapping_add(1).max(1);
        let message = Message { kind, request: self.asked, transaction: within.map_or(0, |within| within.0), payload };
        let bytes = message.encode().ok_or(Silence::Refused("E2BIG"))?;
        let answer = self.ask(kind, &bytes, Instant::now() + patience);
        self.lost |= matches!(answer, Err(Silence::Broken(_)));
        answer
    }

    /// The next event, without waiting.
    pub(super) fn take_event(&mut self) -> io::Result<Option<WatchEvent>> {
        for _ in 0..READS {
            if self.lost {
                break;
            }
            match self.hear(None) {
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

    /// That nothing is to be had of it any more.
    pub(super) fn lose(&mut self) {
        self.lost = true;
    }

    fn ask(&mut self, kind: Kind, bytes: &[u8], until: Instant) -> Result<Message, Silence> {
        if self.lost {
            return Err(io::Error::from(io::ErrorKind::NotConnected).into());
        }
        self.send(bytes, until)?;
        loop {
            let (answer, any) = self.hear(Some(kind))?;
            if let Some(answer) = answer {
                return Ok(answer);
            }
            // A flood of events is not an answer.
            if !any || Instant::now() >= until {
                self.wait(PollFlags::IN, until)?;
            }
        }
    }

    fn send(&mut self, bytes: &[u8], until: Instant) -> Result<(), Silence> {
        let mut rest = bytes;
        while !rest.is_empty() {
            match write(&self.fd, rest) {
                Ok(0) => return Err(io::Error::from(io::ErrorKind::WriteZero).into()),
                Ok(sent) => rest = rest.get(sent..).unwrap_or_default(),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => {
                    let waited = self.wait(PollFlags::OUT, until);
                    // Half a question cannot be taken back.
                    self.lost |= waited.is_err() && rest.len() < bytes.len();
                    waited?;
                }
                Err(errno) => {
                    let refused = refusal(errno).filter(|_| rest.len() == bytes.len());
                    return Err(refused.map_or(Silence::Broken(errno.into()), Silence::Refused));
                }
            }
        }
        Ok(())
    }

    /// Reads once without waiting. Says what answers the question of `kind` that was asked last, if that has come, and
    /// whether anything has.
    fn hear(&mut self, kind: Option<Kind>) -> io::Result<(Option<Message>, bool)> {
        let mut bytes = [0; HEADER + PAYLOAD_MAX];
        let len = match read(&self.fd, &mut bytes) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(len) => len,
            Err(Errno::AGAIN | Errno::INTR) => return Ok((None, false)),
            Err(error) => return Err(error.into()),
        };
        self.receiver.push(bytes.get(..len).unwrap_or_default());
        let mut answer = None;
        while let Some(message) = self.receiver.next_message().map_err(rubbish)? {
            match (message.kind, kind) {
                (Kind::WATCH_EVENT, _) => self.pending.push(event(&message).ok_or_else(|| rubbish("an odd event"))?)?,
                (_, Some(kind)) if answers(&message, kind, self.asked) => {
                    if message.kind != kind && message.kind != Kind::ERROR {
                        return Err(rubbish("an answer of another kind than the question"));
                    }
                    answer = Some(message);
                }
                // The answer to a question that was given up.
                _ => {}
            }
        }
        Ok((answer, true))
    }

    fn wait(&self, flags: PollFlags, until: Instant) -> Result<(), Silence> {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(Silence::Late);
        }
        let timeout = Timespec::try_from(left).map_err(io::Error::other)?;
        match poll(&mut [PollFd::new(&self.fd, flags)], Some(&timeout)) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(error) => Err(Silence::Broken(error.into())),
        }
    }
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.readable.as_fd()
    }
}

/// The store's word for what Linux's device says of a question; `None` if it is not about the question.
fn refusal(errno: Errno) -> Option<&'static str> {
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

/// Whether a message answers the question of `kind` and number `asked`.
fn answers(message: &Message, kind: Kind, asked: u32) -> bool {
    // Linux answers for its device itself when watches are concerned, and does not repeat the number.
    let from_linux = message.request == 0 && message.kind == kind && [Kind::WATCH, Kind::UNWATCH].contains(&kind);
    message.request == asked || from_linux
}

fn event(message: &Message) -> Option<WatchEvent> {
    let mut words = message.words().map(|word| std::str::from_utf8(word).ok().map(str::to_owned));
    Some(WatchEvent { path: words.next()??, token: words.next()?? })
}

/// What came is not the protocol.
pub(super) fn rubbish(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error)
}
