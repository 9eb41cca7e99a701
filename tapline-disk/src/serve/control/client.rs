//! A client of the control socket: receives and sends lines without waiting.
//!
//! Knows nothing about the contents of lines. Invariants: no more than [`LINE_MAX`] bytes of a line are buffered; a
//! line is only returned when the socket has accepted all earlier output, so the output buffered for a client that does
//! not read is bounded by its pending replies; unclaimed descriptors are closed with the last line to which they may
//! belong.

use std::io::IoSliceMut;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

use control::Kind;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{RecvAncillaryBuffer, RecvFlags, ReturnFlags, SendFlags, recvmsg, send};

use crate::files::passed::descriptors_of;
use crate::process::failure::Failure;

/// The maximum length of a line without its end: the longest verb has two paths.
pub const LINE_MAX: usize = 64 << 10;

/// The maximum number of pending replies to a client.
const PENDING_MAX: usize = 4;

/// The bytes received in one call.
const PIECE: usize = 16 << 10;

/// The maximum number of descriptors of a line: a chain has at most [`disk::LAYERS_MAX`] layers, a new layer may be
/// added, and each may have a redo log.
const DESCRIPTORS_MAX: usize = 128;

/// The result of reading from a client.
#[derive(Debug, PartialEq, Eq)]
pub enum Heard {
    /// A line, without its end.
    Line(Vec<u8>),
    /// A line that is longer than any request; later input is ignored.
    TooLong,
    /// No complete line yet.
    Nothing,
}

/// A client of the control socket.
#[derive(Debug)]
pub struct Client {
    socket: UnixStream,
    /// Distinguishes it from earlier clients with the same index.
    pub number: u64,
    input: Vec<u8>,
    output: Vec<u8>,
    /// The number of bytes of `output` that have been sent.
    sent: usize,
    /// Whether the socket may have input, or space for output.
    awake: bool,
    /// Whether it will send nothing more.
    input_ended: bool,
    gone: bool,
    pending: usize,
    /// Received descriptors that are not claimed yet.
    descriptors: Vec<OwnedFd>,
    /// The bytes of `input` up to the last ones with which descriptors were received. If zero, they can belong to no
    /// later line than the one returned last.
    descriptors_until: usize,
    /// Whether there were too many descriptors.
    surplus: bool,
}

impl Client {
    /// Takes over an accepted socket.
    pub fn new(socket: UnixStream, number: u64) -> std::io::Result<Client> {
        socket.set_nonblocking(true)?;
        Ok(Client {
            socket,
            number,
            input: Vec::new(),
            output: Vec::new(),
            sent: 0,
            awake: true,
            input_ended: false,
            gone: false,
            pending: 0,
            descriptors: Vec::new(),
            descriptors_until: 0,
            surplus: false,
        })
    }

    /// Called when the socket is ready.
    pub fn wake(&mut self) {
        self.awake = true;
    }

    /// Returns whether the socket may be ready.
    pub fn is_awake(&self) -> bool {
        self.awake && !self.gone
    }

    /// Returns whether there is nothing more to send or receive.
    pub fn is_over(&self) -> bool {
        self.gone || (self.input_ended && self.input.is_empty() && self.pending == 0 && self.output.is_empty())
    }

    /// Returns the next line, if the client may send one now. Requests of a disconnected client are ignored: it does
    /// not wait for them, and its successor may already have relied on their not being executed.
    pub fn hear(&mut self) -> Heard {
        match self.next_line() {
            Heard::Line(_) if self.has_hung_up() => {
                self.gone = true;
                Heard::Nothing
            }
            result => result,
        }
    }

    /// Returns whether the peer is gone. One that has only shut down its write side still reads.
    fn has_hung_up(&self) -> bool {
        let mut fds = [PollFd::new(&self.socket, PollFlags::empty())];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        loop {
            match poll(&mut fds, Some(&now)) {
                Err(Errno::INTR) => {}
                // Its state is unknown, so the request counts.
                Err(_) => return false,
                Ok(_) => return fds[0].revents().intersects(PollFlags::HUP | PollFlags::ERR),
            }
        }
    }

    fn next_line(&mut self) -> Heard {
        self.flush();
        if self.gone || !self.output.is_empty() || self.pending >= PENDING_MAX {
            // It is woken when the socket has space, or a reply has been sent.
            self.awake = false;
            return Heard::Nothing;
        }
        loop {
            if let Some(end) = self.input.iter().position(|&byte| byte == b'\n') {
                let rest = self.input.split_off(end + 1);
                let mut line = std::mem::replace(&mut self.input, rest);
                line.truncate(end);
                self.descriptors_until = self.descriptors_until.saturating_sub(end + 1);
                return Heard::Line(line);
            }
            if self.input.len() > LINE_MAX {
                return self.cut_off();
            }
            if !self.input_ended && self.receive() {
                continue;
            }
            self.awake = false;
            // A last line may lack its end.
            return match self.input_ended && !self.input.is_empty() {
                true => {
                    self.descriptors_until = 0;
                    Heard::Line(std::mem::take(&mut self.input))
                }
                false => Heard::Nothing,
            };
        }
    }

    fn cut_off(&mut self) -> Heard {
        self.input = Vec::new();
        self.descriptors = Vec::new();
        self.input_ended = true;
        Heard::TooLong
    }

    /// Returns whether bytes were received.
    fn receive(&mut self) -> bool {
        let before = self.input.len();
        self.input.resize(before + PIECE, 0);
        let room = self.input.get_mut(before..).unwrap_or_default();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
        let got = loop {
            match recvmsg(&self.socket, &mut [IoSliceMut::new(room)], &mut ancillary, flags) {
                Err(Errno::INTR) => {}
                got => break got,
            }
        };
        let cut = got.as_ref().is_ok_and(|got| got.flags.contains(ReturnFlags::CTRUNC));
        let got = got.map(|got| got.bytes);
        let came = descriptors_of(&mut ancillary);
        self.input.truncate(before + got.unwrap_or(0));
        match got {
            Ok(0) => self.input_ended = true,
            Ok(_) | Err(Errno::AGAIN) => {}
            Err(_) => self.gone = true,
        }
        if cut || !came.is_empty() {
            self.keep(came, cut);
        }
        matches!(got, Ok(1..))
    }

    /// Stores descriptors that were received with the last bytes of the input. `cut`: more of them were truncated.
    fn keep(&mut self, came: Vec<OwnedFd>, cut: bool) {
        self.descriptors_until = self.input.len();
        self.descriptors.extend(came);
        if cut || self.descriptors.len() > DESCRIPTORS_MAX {
            self.descriptors = Vec::new();
            self.surplus = true;
        }
    }

    /// Takes `wanted` descriptors for the line that was returned last. The kernel reports the bytes with which they
    /// arrived, not the line: remaining ones may belong to the next line, if that began in the same bytes.
    pub fn claim(&mut self, wanted: usize) -> Result<Vec<OwnedFd>, Failure> {
        let (came, last) = (self.descriptors.len(), self.descriptors_until == 0);
        let why = match () {
            () if std::mem::take(&mut self.surplus) => format!("more than {DESCRIPTORS_MAX} descriptors were received"),
            () if came < wanted || (last && came > wanted) => {
                format!("{came} descriptors came with the line, but it lists {wanted} files")
            }
            () => return Ok(self.descriptors.drain(..wanted).collect()),
        };
        self.descriptors = Vec::new();
        let advice = "send the files together with their line, and list them in \"files\"";
        Err(Failure::of(Kind::Invalid, why).advise(advice))
    }

    /// Announces a later [`Client::reply`].
    pub fn begin_reply(&mut self) {
        self.pending += 1;
    }

    /// Sends a pending reply.
    pub fn reply(&mut self, line: &str) {
        self.pending -= 1;
        self.awake = true;
        self.say(line);
    }

    /// Sends an immediate reply.
    pub fn say(&mut self, line: &str) {
        self.output.extend_from_slice(line.as_bytes());
        self.flush();
    }

    /// Returns whether the socket has accepted all output.
    pub fn is_up_to_date(&self) -> bool {
        self.output.is_empty()
    }

    /// Sends a line that may be dropped: it is not sent while earlier output is unread.
    pub fn mention(&mut self, line: &str) {
        if self.output.is_empty() {
            self.say(line);
        }
    }

    /// Sends output until the socket accepts no more.
    fn flush(&mut self) {
        while let Some(rest) = self.output.get(self.sent..).filter(|rest| !rest.is_empty() && !self.gone) {
            match send(&self.socket, rest, SendFlags::NOSIGNAL | SendFlags::DONTWAIT) {
                Ok(count) => self.sent += count,
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return,
                Err(_) => self.gone = true,
            }
        }
        self.output = Vec::new();
        self.sent = 0;
    }
}

impl Drop for Client {
    /// Shuts the socket down, so that the peer notices the end now, although the engine may still hold the socket.
    fn drop(&mut self) {
        // Fails if the peer has closed it first.
        self.socket.shutdown(std::net::Shutdown::Both).ok();
    }
}

impl AsFd for Client {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

#[cfg(test)]
mod test {
    use std::io::{Read, Write};

    use super::*;

    fn pair() -> (Client, UnixStream) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        (Client::new(ours, 1).unwrap(), theirs)
    }

    fn line(text: &str) -> Heard {
        Heard::Line(text.as_bytes().to_vec())
    }

    #[test]
    fn a_line_received_in_pieces_is_one_line() {
        let (mut client, mut peer) = pair();
        for byte in b"{\"a\":1}" {
            peer.write_all(&[*byte]).unwrap();
            assert_eq!(client.hear(), Heard::Nothing);
        }
        peer.write_all(b"\nnext\n").unwrap();
        assert_eq!(client.hear(), line("{\"a\":1}"));
        assert_eq!(client.hear(), line("next"));
        assert_eq!(client.hear(), Heard::Nothing);
    }

    #[test]
    fn an_overlong_line_is_rejected_and_not_buffered() {
        let (mut client, mut peer) = pair();
        let writer = std::thread::spawn(move || {
            // It fails when the other side reads no more.
            while peer.write_all(&[b'x'; 4096]).is_ok() {}
        });
        while client.hear() != Heard::TooLong {}
        assert!(client.input.capacity() <= LINE_MAX + 2 * PIECE);
        assert!(client.is_over());
        drop(client);
        writer.join().unwrap();
    }

    #[test]
    fn a_client_that_does_not_read_is_not_served() {
        let (mut client, mut peer) = pair();
        peer.write_all(b"one\ntwo\n").unwrap();
        assert_eq!(client.hear(), line("one"));
        while client.output.is_empty() {
            client.say(&"x".repeat(100_000));
        }
        let kept = client.output.len();
        assert_eq!(client.hear(), Heard::Nothing);
        client.mention("and another thing\n");
        assert_eq!(client.output.len(), kept);
        let mut bytes = vec![0; 1 << 20];
        while !client.output.is_empty() {
            assert!(peer.read(&mut bytes).unwrap() > 0);
            client.flush();
        }
        client.wake();
        assert_eq!(client.hear(), line("two"));
    }

    #[test]
    fn a_client_with_many_pending_answers_is_throttled() {
        let (mut client, mut peer) = pair();
        peer.write_all(b"a\nb\nc\nd\ne\n").unwrap();
        for word in ["a", "b", "c", "d"] {
            assert_eq!(client.hear(), line(word));
            client.begin_reply();
        }
        assert_eq!(client.hear(), Heard::Nothing);
        client.reply("answer\n");
        assert!(client.is_awake());
        assert_eq!(client.hear(), line("e"));
    }

    #[test]
    fn a_client_that_shut_down_its_write_side_is_answered() {
        let (mut client, mut peer) = pair();
        peer.write_all(b"last words").unwrap();
        peer.shutdown(std::net::Shutdown::Write).unwrap();
        assert_eq!(client.hear(), line("last words"));
        client.begin_reply();
        assert!(!client.is_over());
        client.reply("answer\n");
        assert!(client.is_over());
        drop(client);
        let mut output = String::new();
        peer.read_to_string(&mut output).unwrap();
        assert_eq!(output, "answer\n");
    }

    #[test]
    fn requests_of_a_disconnected_client_are_ignored() {
        let (mut client, mut peer) = pair();
        peer.write_all(b"one\ntwo\nthree").unwrap();
        assert_eq!(client.hear(), line("one"));
        drop(peer);
        assert_eq!(client.hear(), Heard::Nothing);
        assert!(client.is_over());
    }

    #[test]
    fn a_disconnected_client_is_finished() {
        let (mut client, peer) = pair();
        drop(peer);
        assert_eq!(client.hear(), Heard::Nothing);
        assert!(client.is_over());
    }
}
