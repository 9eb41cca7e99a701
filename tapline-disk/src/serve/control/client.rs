//! One client of the control socket: lines in, lines out, never waiting for either.
//!
//! Knows nothing of what the lines say. Invariants: no more than [`LINE_MAX`] bytes of a line are kept; a line is only
//! handed out when everything said before has been taken by the socket, so what a client does not read is bounded by
//! what it was promised; descriptors that no line claims are closed with the line that they can have belonged to last.

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

/// Bytes of a line, its end not counted: the longest verb has two paths.
pub const LINE_MAX: usize = 64 << 10;

/// Answers that a client may be waiting for at one time.
const OWED_MAX: usize = 4;

/// Bytes received in one call.
const PIECE: usize = 16 << 10;

/// Descriptors that may come with a line: a chain has [`disk::LAYERS_MAX`] layers, a new one may come to them, and each
/// may have a redo log.
const DESCRIPTORS_MAX: usize = 128;

/// What came of a look at a client.
#[derive(Debug, PartialEq, Eq)]
pub enum Heard {
    /// A line, without its end.
    Line(Vec<u8>),
    /// A line that is longer than any request; nothing behind it is heard.
    TooLong,
    /// Nothing for now.
    Nothing,
}

/// One client.
#[derive(Debug)]
pub struct Client {
    socket: UnixStream,
    /// Tells it from the one that had its place before.
    pub number: u64,
    input: Vec<u8>,
    output: Vec<u8>,
    /// Of `output`, what the socket has taken.
    sent: usize,
    /// The socket may have something for us, or room.
    awake: bool,
    /// It will say nothing more.
    silent: bool,
    gone: bool,
    owed: usize,
    /// What came beside bytes and is not claimed yet.
    descriptors: Vec<OwnedFd>,
    /// Bytes of `input` up to the end of those that they came with: none, and the line that was handed out is the last
    /// that they can belong to.
    beside: usize,
    /// There were too many of them.
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
            silent: false,
            gone: false,
            owed: 0,
            descriptors: Vec::new(),
            beside: 0,
            surplus: false,
        })
    }

    /// Something has happened to the socket.
    pub fn wake(&mut self) {
        self.awake = true;
    }

    /// Whether a look at it may bring something.
    pub fn is_awake(&self) -> bool {
        self.awake && !self.gone
    }

    /// Whether nothing more is to be said or heard.
    pub fn is_over(&self) -> bool {
        self.gone || (self.silent && self.input.is_empty() && self.owed == 0 && self.output.is_empty())
    }

    /// The next line, if it may speak now. What a client has asked for that has hung up is not begun: nobody waits for
    /// it, and whoever took its place may have found out meanwhile that it was not done, and gone by that.
    pub fn hear(&mut self) -> Heard {
        match self.next_line() {
            Heard::Line(_) if self.has_hung_up() => {
                self.gone = true;
                Heard::Nothing
            }
            heard => heard,
        }
    }

    /// Whether its peer is gone: one that has only closed its half still reads.
    fn has_hung_up(&self) -> bool {
        let mut fds = [PollFd::new(&self.socket, PollFlags::empty())];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        loop {
            match poll(&mut fds, Some(&now)) {
                Err(Errno::INTR) => {}
                // It cannot be told, and the request is a request.
                Err(_) => return false,
                Ok(_) => return fds[0].revents().intersects(PollFlags::HUP | PollFlags::ERR),
            }
        }
    }

    fn next_line(&mut self) -> Heard {
        self.flush();
        if self.gone || !self.output.is_empty() || self.owed >= OWED_MAX {
            // It is looked at again when the socket has room, or an answer has gone out.
            self.awake = false;
            return Heard::Nothing;
        }
        loop {
            if let Some(end) = self.input.iter().position(|&byte| byte == b'\n') {
                let rest = self.input.split_off(end + 1);
                let mut line = std::mem::replace(&mut self.input, rest);
                line.truncate(end);
                self.beside = self.beside.saturating_sub(end.saturating_add(1));
                return Heard::Line(line);
            }
            if self.input.len() > LINE_MAX {
                return self.cut_off();
            }
            if !self.silent && self.receive() {
                continue;
            }
            self.awake = false;
            // A last line without an end is one too.
            return match self.silent && !self.input.is_empty() {
                true => {
                    self.beside = 0;
                    Heard::Line(std::mem::take(&mut self.input))
                }
                false => Heard::Nothing,
            };
        }
    }

    fn cut_off(&mut self) -> Heard {
        self.input = Vec::new();
        self.descriptors = Vec::new();
        self.silent = true;
        Heard::TooLong
    }

    /// Whether bytes came.
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
            Ok(0) => self.silent = true,
            Ok(_) | Err(Errno::AGAIN) => {}
            Err(_) => self.gone = true,
        }
        if cut || !came.is_empty() {
            self.keep(came, cut);
        }
        matches!(got, Ok(1..))
    }

    /// Descriptors came beside the last bytes of the input; some more may have been cut off.
    fn keep(&mut self, came: Vec<OwnedFd>, cut: bool) {
        self.beside = self.input.len();
        self.descriptors.extend(came);
        if cut || self.descriptors.len() > DESCRIPTORS_MAX {
            self.descriptors = Vec::new();
            self.surplus = true;
        }
    }

    /// Takes so many descriptors for the line that was handed out. The kernel says beside which bytes they came and not
    /// with which line, so that those a line leaves may belong to the next, as long as that began in the same bytes.
    pub fn claim(&mut self, wanted: usize) -> Result<Vec<OwnedFd>, Failure> {
        let (came, last) = (self.descriptors.len(), self.beside == 0);
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

    /// An answer will follow.
    pub fn begin_reply(&mut self) {
        self.owed += 1;
    }

    /// An answer that was owed.
    pub fn reply(&mut self, line: &str) {
        self.owed -= 1;
        self.awake = true;
        self.say(line);
    }

    /// Says something that was asked for.
    pub fn say(&mut self, line: &str) {
        self.output.extend_from_slice(line.as_bytes());
        self.flush();
    }

    /// Whether it has read all that was said.
    pub fn is_up_to_date(&self) -> bool {
        self.output.is_empty()
    }

    /// Says something that will not be missed: not to a client that has not read what came before.
    pub fn mention(&mut self, line: &str) {
        if self.output.is_empty() {
            self.say(line);
        }
    }

    /// Sends what there is, until the socket takes no more.
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
    /// Whoever watches the socket may hold it for a while yet; the peer is to hear of the end now.
    fn drop(&mut self) {
        // Fails if the peer was faster, which comes to the same.
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
            // It fails when the other side has heard enough.
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
        let mut said = String::new();
        peer.read_to_string(&mut said).unwrap();
        assert_eq!(said, "answer\n");
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
