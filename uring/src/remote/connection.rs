//! A client of an export with its socket: connects, moves bytes, and connects again after a loss.
//!
//! It knows nothing about engines. Invariants: nothing blocks but the methods whose names begin with `wait`; while
//! there is a connection that works, there is no timer, unless the process is a job, or is to end; once it is to end,
//! a server that answers nothing is given up for good.

#[cfg(test)]
mod test;

use std::time::{Duration, Instant};

use disk::{Allocation, FileDone, FileOp};
use nbd::client::{Client, Described};
use nbd::uri::Uri;

use super::socket::{Socket, Target};
use super::{RemoteOptions, RemoteState};

/// Pauses between attempts to connect: the first is short, because a restarted server is back at once.
const PAUSE_MIN: Duration = Duration::from_millis(20);
const PAUSE_MAX: Duration = Duration::from_secs(5);
/// A server that has accepted a connection must end the negotiation within this time.
const NEGOTIATION: Duration = Duration::from_secs(10);
/// A process that is to end waits this long for the next answer.
const ENDING: Duration = Duration::from_secs(5);
/// How often a job looks whether it is to end: the signal does not wake it.
const LOOK: Duration = Duration::from_secs(1);
/// Bytes received at once.
const CHUNK: usize = 256 << 10;
/// The most bytes received in one turn, so that other files of the engine have theirs.
const TURN: usize = 8 << 20;

#[derive(Debug)]
enum State {
    /// There is no socket until this time.
    Down(Instant),
    /// Since this time.
    Connecting(Socket, Instant),
    /// The client negotiates, or works; since this time.
    Connected(Socket, Instant),
}

/// Why a connection has ended.
#[derive(Debug)]
enum Ended {
    /// Because of the server's messages.
    Broken(String),
    Socket(std::io::Error),
}

/// A part of the export that is known to be a hole, or not.
#[derive(Clone, Copy, Debug)]
struct Extent {
    start: u64,
    end: u64,
    zero: bool,
}

#[derive(Debug)]
pub(super) struct Connection {
    pub(super) client: Client,
    uri: Uri,
    targets: Vec<Target>,
    /// The one that was tried last. From the first negotiation on it stays: behind another address of the name there
    /// may be another server, with an older state of the disk.
    target: usize,
    state: State,
    /// Attempts to connect since the last connection on which a request was answered, or which has lasted.
    attempts: u32,
    /// Since when there is no connection that works. A server that only negotiates does not.
    lost: Option<Instant>,
    /// A loss was reported, and no new connection.
    reported_loss: bool,
    /// How long operations wait for a server that is away. While it is opened, something else limits that.
    patience: Option<Duration>,
    options: RemoteOptions,
    /// Since when the process is to end, and how many requests were answered by then or later, and when.
    ending: Option<(Instant, u64)>,
    /// The server was given up: the process is to end, and nothing was answered for some time.
    given_up: bool,
    /// The socket is another one than the engine watches, or there is none any more.
    pub(super) unwatched: bool,
    /// There may be more to receive although nothing new arrives.
    pub(super) more: bool,
    /// Why there was no connection at last.
    pub(super) why: String,
    buffer: Vec<u8>,
    extents: Vec<Extent>,
}

impl Connection {
    pub(super) fn new(
        client: Client,
        uri: Uri,
        targets: Vec<Target>,
        options: RemoteOptions,
        now: Instant,
    ) -> Connection {
        Connection {
            client,
            uri,
            targets,
            target: 0,
            state: State::Down(now),
            attempts: 0,
            lost: Some(now),
            reported_loss: false,
            patience: None,
            options,
            ending: None,
            given_up: false,
            unwatched: false,
            more: false,
            why: String::new(),
            buffer: Vec::new(),
            extents: Vec::new(),
        }
    }

    /// It is open: from now on operations wait as long as the options say.
    pub(super) fn opened(&mut self) {
        self.patience = self.options.patience;
    }

    /// Whether the server was given up.
    pub(super) fn is_given_up(&self) -> bool {
        self.given_up
    }

    pub(super) fn socket(&self) -> Option<&Socket> {
        match &self.state {
            State::Down(_) => None,
            State::Connecting(socket, _) | State::Connected(socket, _) => Some(socket),
        }
    }

    /// Failed attempts to connect since the last connection that worked.
    pub(super) fn failures(&self) -> usize {
        match self.state {
            State::Down(_) => usize::try_from(self.attempts).unwrap_or(usize::MAX),
            _ => 0,
        }
    }

    /// The state of the connection.
    pub(super) fn state(&self, now: Instant) -> RemoteState {
        RemoteState {
            away: self.lost.map(|lost| now.duration_since(lost)),
            why: self.lost.map(|_| self.why.clone()).filter(|why| !why.is_empty()),
            attempts: self.attempts,
            kept: self.client.kept(),
        }
    }

    /// Since when no connection works.
    pub(super) fn lost(&self) -> Option<Instant> {
        self.lost
    }

    /// Accepts an operation; see [`Client::push`].
    pub(super) fn push(&mut self, op: FileOp) -> Result<(), FileOp> {
        if !matches!(op.action, disk::Action::Read { .. }) {
            self.extents.clear();
        }
        if !self.client.is_waiting() {
            // The server has not been silent: it had nothing to answer.
            self.ending = None;
        }
        self.client.push(op)
    }

    /// Does what can be done now. Completed operations are appended.
    pub(super) fn turn(&mut self, now: Instant, done: &mut Vec<FileDone>) {
        self.more = false;
        self.look_for_end(now);
        if self.given_up {
            self.client.fail_waiting();
        } else {
            self.advance(now);
        }
        if self.lost.zip(self.patience).is_some_and(|(lost, patience)| now.duration_since(lost) >= patience) {
            self.client.fail_waiting();
        }
        if let Some(trouble) = self.client.take_trouble() {
            (self.options.report)(&format!("{}: {trouble}", self.uri));
        }
        self.client.take_done(done);
    }

    /// Gives the server up if the process is to end and nothing was answered for some time.
    fn look_for_end(&mut self, now: Instant) {
        if self.given_up || !(self.options.stopping)() {
            return;
        }
        let answers = self.client.answers();
        let (since, before) = *self.ending.get_or_insert((now, answers));
        if answers != before {
            self.ending = Some((now, answers));
        } else if self.client.is_waiting() && now.duration_since(since) >= ENDING {
            self.lose(now, "this process is to end");
            self.given_up = true;
            let (seconds, kept) = (ENDING.as_secs(), self.client.kept());
            let kept =
                if kept == 0 { String::new() } else { format!("; {kept} writes may be lost that it had answered") };
            (self.options.report)(&format!(
                "{}: given up, as nothing was answered for {seconds} s and this process is to end{kept}",
                self.uri
            ));
        }
    }

    /// When the next look at the end of the process is due.
    fn next_look(&self, now: Instant) -> Option<Instant> {
        match self.ending {
            _ if self.given_up || !self.client.is_waiting() => None,
            Some((since, _)) => Some(since + ENDING),
            None => self.options.may_wait.then_some(now + LOOK),
        }
    }

    /// How long nothing happens without an event of the socket; `None` for ever.
    pub(super) fn sleeps(&self, now: Instant) -> Option<Duration> {
        let next = match &self.state {
            _ if self.given_up => None,
            State::Down(next) => Some(*next),
            State::Connecting(_, since) => Some(*since + NEGOTIATION),
            State::Connected(_, since) if self.client.is_negotiating() => Some(*since + NEGOTIATION),
            State::Connected(..) => None,
        };
        let gives_up = self.lost.zip(self.patience).map(|(lost, patience)| lost + patience);
        // While there is a connection, nothing is given up.
        let gives_up = gives_up.filter(|_| !self.client.is_idle() && !self.client.is_up());
        let next = next.into_iter().chain(gives_up).chain(self.next_look(now)).min()?;
        Some(next.saturating_duration_since(now))
    }

    fn advance(&mut self, now: Instant) {
        if let State::Down(next) = self.state {
            if now < next {
                return;
            }
            self.connect(now);
        }
        if let State::Connecting(socket, since) = &self.state {
            match socket.is_connected() {
                Ok(true) => self.connected(now),
                Ok(false) if now.duration_since(*since) < NEGOTIATION => {}
                Ok(false) => self.lose(now, "it does not answer"),
                Err(error) => self.lose(now, &error.to_string()),
            }
        }
        if matches!(self.state, State::Connected(..)) {
            match self.transfer(now) {
                Ok(()) => {}
                Err(Ended::Broken(why)) => self.lose(now, &why),
                Err(Ended::Socket(error)) => {
                    let suspicion = self.client.suspicion().map_or_else(String::new, |why| format!("; {why}"));
                    self.lose(now, &format!("{error}{suspicion}"));
                }
            }
        }
    }

    fn connect(&mut self, now: Instant) {
        if self.client.export().is_none() {
            self.target = usize::try_from(self.attempts).unwrap_or(0) % self.targets.len().max(1);
        }
        self.attempts = self.attempts.saturating_add(1);
        let Some(target) = self.targets.get(self.target) else { return };
        match Socket::begin(target) {
            Ok(socket) => {
                self.unwatched = true;
                self.state = State::Connecting(socket, now);
            }
            Err(error) => self.lose(now, &error.to_string()),
        }
    }

    fn connected(&mut self, now: Instant) {
        let State::Connecting(socket, _) = std::mem::replace(&mut self.state, State::Down(now)) else { return };
        self.state = State::Connected(socket, now);
        self.client.connected();
    }

    /// Sends and receives until the socket has and takes nothing more.
    fn transfer(&mut self, now: Instant) -> Result<(), Ended> {
        let State::Connected(socket, since) = &self.state else { return Ok(()) };
        if self.buffer.is_empty() {
            self.buffer = vec![0; CHUNK];
        }
        let mut received = 0;
        loop {
            let mut moved = false;
            while !self.client.to_send().is_empty() {
                let Some(sent) = socket.send(self.client.to_send()).map_err(Ended::Socket)? else { break };
                self.client.sent(sent);
                moved = true;
            }
            if let Some(len) = socket.receive(&mut self.buffer).map_err(Ended::Socket)? {
                self.client
                    .receive(self.buffer.get(..len).unwrap_or_default())
                    .map_err(|broken| Ended::Broken(broken.to_string()))?;
                received += len;
                moved = true;
            }
            if !moved || received >= TURN {
                self.more = moved;
                break;
            }
        }
        if self.client.works() {
            let lost = self.lost.take();
            if let Some(lost) = lost.filter(|_| std::mem::take(&mut self.reported_loss)) {
                let away = now.duration_since(lost).as_secs_f32();
                (self.options.report)(&format!("{}: connected again after {away:.1} s", self.uri));
            }
        } else if self.client.is_negotiating() && now.duration_since(*since) >= NEGOTIATION {
            return Err(Ended::Broken("the server does not end the negotiation".to_owned()));
        }
        Ok(())
    }

    /// The connection, or the attempt to make one, has failed.
    fn lose(&mut self, now: Instant, why: &str) {
        let was_up = self.client.is_up();
        let lasted = matches!(self.state, State::Connected(_, since) if now.duration_since(since) >= PAUSE_MAX);
        // A server that accepts or negotiates, and then ends the connection, is tried as rarely as one that is away.
        if self.client.has_answered() || (was_up && lasted) {
            self.attempts = 0;
        }
        self.client.disconnected();
        if let Some(socket) = self.socket() {
            socket.end();
        }
        self.unwatched = true;
        self.extents.clear();
        self.buffer = Vec::new();
        let is_new = self.lost.is_none() || self.why != why;
        self.lost.get_or_insert(now);
        let pause = PAUSE_MIN.saturating_mul(1 << self.attempts.min(8)).min(PAUSE_MAX);
        self.state = State::Down(now + pause);
        // While it is being opened, the error of that has the reason.
        if is_new && self.client.export().is_some() {
            let lost = if was_up { "connection lost" } else { "cannot connect" };
            (self.options.report)(&format!("{}: {lost}: {why}; trying again", self.uri));
            self.reported_loss = true;
        }
        self.why = why.to_owned();
    }

    /// Waits for an event, no longer than `most`.
    pub(super) fn wait(&mut self, most: Duration, now: Instant) {
        let most = self.sleeps(now).map_or(most, |next| most.min(next)).min(LOOK);
        let writes = matches!(self.state, State::Connecting(..)) || !self.client.to_send().is_empty();
        let waited = match self.socket() {
            _ if self.more => Ok(true),
            Some(socket) => socket.wait_for(writes, most),
            None => {
                std::thread::sleep(most);
                Ok(true)
            }
        };
        if let Err(error) = waited {
            self.lose(now, &error.to_string());
        }
    }

    /// What is known about allocation at this offset.
    pub(super) fn known_allocation(&self, at: u64, len: u64) -> Option<Allocation> {
        let index = self.extents.partition_point(|extent| extent.end <= at);
        let extent = self.extents.get(index).filter(|extent| extent.start <= at)?;
        let len = len.min(extent.end - at);
        Some(if extent.zero { Allocation::Hole(len) } else { Allocation::Data(len) })
    }

    /// Remembers the extents of a range that begins at `at`.
    pub(super) fn remember(&mut self, at: u64, described: Vec<Described>) {
        let mut start = at;
        self.extents = described
            .into_iter()
            .map(|Described { len, zero, .. }| {
                let extent = Extent { start, end: start + len, zero };
                start = extent.end;
                extent
            })
            .collect();
    }
}
