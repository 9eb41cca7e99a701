//! A client that sends exactly what a test specifies.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use super::Served;

pub const READ: u16 = 0;
pub const WRITE: u16 = 1;
pub const DISC: u16 = 2;
pub const FLUSH: u16 = 3;
pub const TRIM: u16 = 4;
pub const CACHE: u16 = 5;
pub const WRITE_ZEROES: u16 = 6;
pub const BLOCK_STATUS: u16 = 7;
pub const FUA: u16 = 1;
pub const NO_HOLE: u16 = 2;
pub const FAST_ZERO: u16 = 16;

pub const OPT_EXPORT_NAME: u32 = 1;
pub const OPT_LIST: u32 = 3;
pub const OPT_GO: u32 = 7;
pub const OPT_STRUCTURED_REPLY: u32 = 8;
pub const OPT_SET_META_CONTEXT: u32 = 10;

/// The parts of a structured reply that tests check.
#[derive(Debug, PartialEq, Eq)]
pub struct Chunk {
    pub kind: u16,
    pub cookie: u64,
    pub payload: Vec<u8>,
}

/// A blocking connection with a timeout, so that a lost reply fails a test instead of hanging it.
pub struct Client(pub UnixStream);

impl Client {
    /// Connected and greeted, client flags sent.
    pub fn greeted(served: &Served) -> Client {
        let stream = UnixStream::connect(served.path()).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        let mut client = Client(stream);
        assert_eq!(&client.receive(18)[..16], b"NBDMAGICIHAVEOPT");
        client.send(&3u32.to_be_bytes());
        client
    }

    /// Ready for requests with simple replies.
    pub fn simple(served: &Served) -> Client {
        let mut client = Client::greeted(served);
        client.go();
        client
    }

    /// Ready for requests with structured replies and `base:allocation`.
    pub fn structured(served: &Served) -> Client {
        let mut client = Client::greeted(served);
        client.option(OPT_STRUCTURED_REPLY, &[]);
        assert_eq!(client.option_reply(), (1, Vec::new()));
        client.option(OPT_SET_META_CONTEXT, b"\0\0\0\0\0\0\0\x01\0\0\0\x0fbase:allocation");
        assert_eq!(client.option_reply().0, 4);
        assert_eq!(client.option_reply().0, 1);
        client.go();
        client
    }

    fn go(&mut self) {
        self.option(OPT_GO, &[0; 6]);
        while self.option_reply().0 != 1 {}
    }

    pub fn send(&mut self, bytes: &[u8]) {
        self.0.write_all(bytes).unwrap();
    }

    pub fn receive(&mut self, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.0.read_exact(&mut bytes).unwrap();
        bytes
    }

    /// Whether the server ends the connection; remaining data is skipped.
    pub fn is_disconnected(&mut self) -> bool {
        let mut rest = Vec::new();
        match self.0.read_to_end(&mut rest) {
            Ok(_) => true,
            Err(error) => error.kind() == std::io::ErrorKind::ConnectionReset,
        }
    }

    pub fn option(&mut self, number: u32, data: &[u8]) {
        let len = u32::try_from(data.len()).unwrap();
        self.send(&[&b"IHAVEOPT"[..], &number.to_be_bytes(), &len.to_be_bytes(), data].concat());
    }

    /// Kind and data.
    pub fn option_reply(&mut self) -> (u32, Vec<u8>) {
        let header = self.receive(20);
        let word = |at: usize| u32::from_be_bytes(header[at..at + 4].try_into().unwrap());
        let data = self.receive(usize::try_from(word(16)).unwrap());
        (word(12), data)
    }

    pub fn send_request(&mut self, kind: u16, flags: u16, cookie: u64, at: u64, len: u32) {
        self.send(&request(kind, flags, cookie, at, len));
    }

    /// Error number and cookie.
    pub fn simple_reply(&mut self) -> (u32, u64) {
        let reply = self.receive(16);
        assert_eq!(reply[..4], 0x6744_6698u32.to_be_bytes());
        (u32::from_be_bytes(reply[4..8].try_into().unwrap()), u64::from_be_bytes(reply[8..].try_into().unwrap()))
    }

    pub fn chunk(&mut self) -> Chunk {
        let header = self.receive(20);
        assert_eq!(header[..6], [0x66, 0x8e, 0x33, 0xef, 0, 1]);
        let len = u32::from_be_bytes(header[16..].try_into().unwrap());
        Chunk {
            kind: u16::from_be_bytes(header[6..8].try_into().unwrap()),
            cookie: u64::from_be_bytes(header[8..16].try_into().unwrap()),
            payload: self.receive(usize::try_from(len).unwrap()),
        }
    }
}

pub fn request(kind: u16, flags: u16, cookie: u64, at: u64, len: u32) -> Vec<u8> {
    let (kind, flags) = (kind.to_be_bytes(), flags.to_be_bytes());
    [&[0x25, 0x60, 0x95, 0x13], &flags[..], &kind, &cookie.to_be_bytes(), &at.to_be_bytes(), &len.to_be_bytes()]
        .concat()
}
