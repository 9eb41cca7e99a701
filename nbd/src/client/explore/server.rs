//! A model of a server: bytes in, bytes out. What it has not flushed, a restart may lose. As with a kernel's page
//! cache, a flush that fails is reported once, and loses what it should have made durable.

use crate::client::incoming::{u16_at, u32_at, u64_at};
use crate::tls::{Channel, KEPT_MAX, ServerTls};
use crate::wire;

/// The size of the export.
pub const SIZE: usize = 512;

/// A request that the server has received and not executed.
#[derive(Clone, Debug)]
pub struct Received {
    pub kind: u16,
    cookie: u64,
    at: usize,
    len: usize,
    bytes: Vec<u8>,
}

/// What a restart does with writes that no flush has made durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Restart {
    /// The server continues.
    None,
    /// They are lost.
    Loses,
    /// Some bytes of them have reached the disk.
    LosesSome,
}

/// The server and its one connection.
#[derive(Debug)]
pub struct Server {
    /// The export as a read sees it, and what survives a restart.
    pub cache: Vec<u8>,
    pub durable: Vec<u8>,
    /// The bytes that the next flush makes durable.
    dirty: Vec<bool>,
    /// The next flush fails.
    pub fails_flush: bool,
    /// A flush has failed.
    pub flush_failed: bool,
    pub structured: bool,
    /// The size that the next connection is offered.
    pub size: u64,
    /// Each read ends at its first chunk.
    pub ends_reads_early: bool,
    incoming: Vec<u8>,
    greeted: bool,
    transmission: bool,
    starts_tls: bool,
    pub pending: Vec<Received>,
    /// Messages to send.
    pub out: Vec<u8>,
    /// It requires TLS.
    pub tls: Option<ServerTls>,
    channel: Option<Channel>,
}

/// A write that was executed: offset and bytes.
pub type Executed = Option<(usize, Vec<u8>)>;

impl Server {
    pub fn new(structured: bool) -> Server {
        let zeroes = vec![0; SIZE];
        Server {
            cache: zeroes.clone(),
            durable: zeroes,
            dirty: vec![false; SIZE],
            fails_flush: false,
            flush_failed: false,
            structured,
            size: 512,
            ends_reads_early: false,
            incoming: Vec::new(),
            greeted: false,
            transmission: false,
            starts_tls: false,
            pending: Vec::new(),
            out: Vec::new(),
            tls: None,
            channel: None,
        }
    }

    pub fn connect(&mut self) {
        self.out.extend_from_slice(&wire::GREETING_MAGIC.to_be_bytes());
        self.out.extend_from_slice(&wire::OPTION_MAGIC.to_be_bytes());
        self.out.extend_from_slice(&(wire::FLAG_FIXED_NEWSTYLE | wire::FLAG_NO_ZEROES).to_be_bytes());
    }

    /// Another disk is served from now on.
    pub fn is_another(&mut self) {
        self.cache.fill(77);
        self.durable.fill(77);
        self.dirty.fill(false);
    }

    /// The connection has ended. What was received may have been executed already.
    pub fn cut(&mut self, restart: Restart) {
        self.incoming.clear();
        self.out.clear();
        self.channel = None;
        self.pending.clear();
        (self.greeted, self.transmission) = (false, false);
        match restart {
            Restart::None => return,
            Restart::Loses => {}
            Restart::LosesSome => {
                for (at, (durable, cache)) in self.durable.iter_mut().zip(&self.cache).enumerate() {
                    if self.dirty[at] && (at / 4 + usize::from(*cache)) % 2 == 0 {
                        *durable = *cache;
                    }
                }
            }
        }
        self.cache.clone_from(&self.durable);
        self.dirty.fill(false);
    }

    /// Takes bytes from the network; returns those for it.
    pub fn receive(&mut self, bytes: &[u8]) -> Vec<u8> {
        match &mut self.channel {
            None => self.incoming.extend_from_slice(bytes),
            Some(channel) => {
                let mut plain = vec![0; bytes.len() + KEPT_MAX];
                let len = channel.decrypt(bytes, &mut plain).unwrap();
                self.incoming.extend_from_slice(&plain[..len]);
            }
        }
        let mut network = Vec::new();
        while self.next() {
            if let Some(tls) = self.tls.as_ref().filter(|_| self.starts_tls) {
                network.append(&mut self.out);
                self.channel = Some(Channel::of_server(tls).unwrap());
                self.starts_tls = false;
                assert!(self.incoming.is_empty(), "the client has sent something before the answer to STARTTLS");
            }
        }
        network.append(&mut self.send());
        network
    }

    /// The messages to send, as bytes for the network.
    pub fn send(&mut self) -> Vec<u8> {
        let Some(channel) = &mut self.channel else { return std::mem::take(&mut self.out) };
        let mut records = Vec::new();
        while !self.out.is_empty() || channel.wants_send() {
            let len = channel.encrypt(&self.out);
            self.out.drain(..len);
            channel.send(&mut records).unwrap();
        }
        records
    }

    fn take(&mut self, len: usize) -> Option<Vec<u8>> {
        (self.incoming.len() >= len).then(|| self.incoming.drain(..len).collect())
    }

    fn next(&mut self) -> bool {
        if !self.greeted {
            self.greeted = self.take(4).is_some();
            return self.greeted;
        }
        if !self.transmission {
            let Some(len) = u32_at(&self.incoming, 12) else { return false };
            let Some(option) = self.take(16 + len as usize) else { return false };
            self.option(u32_at(&option, 8).unwrap());
            return true;
        }
        let Some(len) = u32_at(&self.incoming, 24).map(|len| len as usize) else { return false };
        let kind = u16_at(&self.incoming, 6).unwrap();
        let payload = if kind == wire::CMD_WRITE { len } else { 0 };
        let Some(request) = self.take(28 + payload) else { return false };
        assert_eq!(u32_at(&request, 0), Some(wire::REQUEST_MAGIC));
        let (cookie, at) = (u64_at(&request, 8).unwrap(), usize::try_from(u64_at(&request, 16).unwrap()).unwrap());
        assert!(at + len <= SIZE, "a request outside of the export");
        self.pending.push(Received { kind, cookie, at, len, bytes: request[28..].to_vec() });
        true
    }

    fn reply(&mut self, option: u32, kind: u32, payload: &[u8]) {
        self.out.extend_from_slice(&wire::OPTION_REPLY_MAGIC.to_be_bytes());
        self.out.extend_from_slice(&option.to_be_bytes());
        self.out.extend_from_slice(&kind.to_be_bytes());
        self.out.extend_from_slice(&wire::length(payload).to_be_bytes());
        self.out.extend_from_slice(payload);
    }

    fn option(&mut self, option: u32) {
        let required = self.tls.is_some() && self.channel.is_none();
        match option {
            wire::OPT_STARTTLS => {
                self.reply(option, wire::REP_ACK, b"");
                self.starts_tls = true;
            }
            _ if required => panic!("option {option} is sent without TLS"),
            wire::OPT_STRUCTURED_REPLY if !self.structured => self.reply(option, wire::REP_ERR_UNSUP, b"no"),
            wire::OPT_SET_META_CONTEXT => {
                self.reply(option, wire::REP_META_CONTEXT, b"\0\0\0\x07base:allocation");
                self.reply(option, wire::REP_ACK, b"");
            }
            wire::OPT_GO => {
                let flags = wire::HAS_FLAGS | wire::SEND_FLUSH | wire::SEND_WRITE_ZEROES;
                let mut info = wire::INFO_EXPORT.to_be_bytes().to_vec();
                info.extend_from_slice(&self.size.to_be_bytes());
                info.extend_from_slice(&flags.to_be_bytes());
                self.reply(option, wire::REP_INFO, &info);
                self.reply(option, wire::REP_ACK, b"");
                self.transmission = true;
            }
            _ => self.reply(option, wire::REP_ACK, b""),
        }
    }

    /// Executes a pending request, and answers it in one of several ways.
    pub fn execute(&mut self, index: usize, style: usize) -> Executed {
        let Received { kind, cookie, at, len, bytes } = self.pending.remove(index);
        let range = at..at + len;
        let mut error = 0;
        match kind {
            wire::CMD_WRITE => self.cache[range.clone()].copy_from_slice(&bytes),
            wire::CMD_WRITE_ZEROES => self.cache[range.clone()].fill(0),
            wire::CMD_FLUSH if std::mem::take(&mut self.fails_flush) => {
                self.dirty.fill(false);
                self.flush_failed = true;
                error = 5;
            }
            wire::CMD_FLUSH => self.flush(),
            wire::CMD_READ => {}
            other => panic!("command {other}"),
        }
        if matches!(kind, wire::CMD_WRITE | wire::CMD_WRITE_ZEROES) {
            self.dirty[range.clone()].fill(true);
        }
        match (kind, self.structured) {
            (wire::CMD_READ, true) => self.answer_read(cookie, at, len, style),
            (wire::CMD_READ, false) => {
                self.simple(cookie, 0);
                let data = self.cache[range.clone()].to_vec();
                self.out.extend_from_slice(&data);
            }
            (_, true) if style % 2 == 0 && error == 0 => self.chunk(wire::CHUNK_DONE, wire::CHUNK_NONE, cookie, &[]),
            _ => self.simple(cookie, error),
        }
        match kind {
            wire::CMD_WRITE => Some((at, bytes)),
            wire::CMD_WRITE_ZEROES => Some((at, vec![0; len])),
            _ => None,
        }
    }

    fn flush(&mut self) {
        for (at, dirty) in self.dirty.iter_mut().enumerate() {
            if std::mem::take(dirty) {
                self.durable[at] = self.cache[at];
            }
        }
    }

    fn simple(&mut self, cookie: u64, error: u32) {
        self.out.extend_from_slice(&wire::SIMPLE_REPLY_MAGIC.to_be_bytes());
        self.out.extend_from_slice(&error.to_be_bytes());
        self.out.extend_from_slice(&cookie.to_be_bytes());
    }

    pub fn chunk(&mut self, flags: u16, kind: u16, cookie: u64, payload: &[u8]) {
        self.out.extend_from_slice(&wire::CHUNK_MAGIC.to_be_bytes());
        self.out.extend_from_slice(&flags.to_be_bytes());
        self.out.extend_from_slice(&kind.to_be_bytes());
        self.out.extend_from_slice(&cookie.to_be_bytes());
        self.out.extend_from_slice(&wire::length(payload).to_be_bytes());
        self.out.extend_from_slice(payload);
    }

    /// Data in one chunk, or the second half first and a hole where there are zeroes.
    fn answer_read(&mut self, cookie: u64, at: usize, len: usize, style: usize) {
        let half = if style % 2 == 0 { 0 } else { len / 2 };
        let mut parts = vec![(at + half, len - half)];
        if half > 0 {
            parts.push((at, half));
        }
        parts.truncate(if self.ends_reads_early { 1 } else { 2 });
        for (n, &(at, len)) in parts.iter().enumerate() {
            let last = n + 1 == parts.len() && style < 2;
            let flags = if last { wire::CHUNK_DONE } else { 0 };
            let mut payload = u64::try_from(at).unwrap().to_be_bytes().to_vec();
            let bytes = self.cache[at..at + len].to_vec();
            if bytes.iter().all(|&byte| byte == 0) {
                payload.extend_from_slice(&u32::try_from(len).unwrap().to_be_bytes());
                self.chunk(flags, wire::CHUNK_OFFSET_HOLE, cookie, &payload);
            } else {
                payload.extend_from_slice(&bytes);
                self.chunk(flags, wire::CHUNK_OFFSET_DATA, cookie, &payload);
            }
        }
        if style >= 2 {
            self.chunk(wire::CHUNK_DONE, wire::CHUNK_NONE, cookie, &[]);
        }
    }
}
