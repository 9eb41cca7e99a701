//! Clients of the NBD server, without sockets: arbitrary negotiations, and arbitrary commands on a small disk.

use std::collections::{BTreeMap, VecDeque};

use disk::{DiskOffset, Extent, ExtentKind, Geometry, Operation, Request, Span, Status};
use transport::nbd::{Bitmaps, Export, MemoryQuota, Next, ProtocolError, Session};

const GEOMETRY: Geometry =
    Geometry { len: 1 << 20, block: 512, physical_block: 4096, discard: 4096, chs: None, read_only: false };

fn export(geometry: Geometry) -> Export {
    let bitmaps = vec!["b".into(), "b:c".into()];
    Export { name: "vdi".into(), description: "fuzzed".into(), geometry, layered: true, bitmaps }
}

/// Bitmaps in which blocks of 1 KiB, or of 512 bytes, are dirty in turn.
struct Dirty;

impl Bitmaps for Dirty {
    fn runs(&self, index: usize, span: Span, most: usize) -> Vec<(u64, bool)> {
        let block = 1024 >> index;
        let ends = (1..).map(|nth| (span.at.0 / block + nth) * block);
        let mut at = span.at.0;
        let runs = ends.map_while(|end| {
            let end = end.min(span.end().0);
            let run = (end - at, at / block % 2 == 1);
            at = end;
            (run.0 > 0).then_some(run)
        });
        runs.take(most).collect()
    }
}

/// Everything that the session has to say, as a client that reads at once gets it.
fn drain(session: &mut Session) -> Vec<u8> {
    let mut all = Vec::new();
    let mut piece = [0; 4096];
    while !session.outgoing().is_empty() {
        let len = session.outgoing().fill(&mut piece);
        assert!(len > 0, "something is to be sent and nothing is given");
        all.extend_from_slice(&piece[..len]);
        session.outgoing().sent(len);
    }
    assert_eq!(session.outgoing().held(), 0);
    all
}

/// How a negotiation went.
#[derive(Debug, PartialEq, Eq)]
struct Outcome {
    answers: Vec<u8>,
    end: Result<bool, ProtocolError>,
}

/// Invariants checked:
/// - no input panics, and none makes more than 128 KiB of answers wait for a client that does not read;
/// - answers do not depend on how the client's bytes are cut into pieces;
/// - answers are the greeting, then option replies of the protocol's form, to options that were sent;
/// - a session that requires TLS serves no request, and describes no export, before STARTTLS.
pub fn negotiation(input: &[u8]) {
    for begin in [Session::new, Session::requiring_tls] {
        let whole = negotiate(begin, input, input.len().max(1));
        let bytes = negotiate(begin, input, 1);
        let pieces = negotiate(begin, input, 7);
        assert_eq!(whole, bytes, "all at once against byte by byte");
        assert_eq!(whole, pieces, "all at once against pieces of 7");
        check_answers(&whole.answers);
        negotiate_deaf(begin, input);
    }
}

/// Begins a session whose tokens have this prefix.
type Begin = fn(u64) -> Session;

/// Feeds pieces of `cut` bytes and reads all answers, up to the end of the negotiation. What follows STARTTLS is fed
/// as if it had been decrypted.
fn negotiate(begin: Begin, input: &[u8], cut: usize) -> Outcome {
    let export = export(GEOMETRY);
    let mut session = begin(0);
    let mut in_clear = session.needs_tls();
    let mut requests = VecDeque::new();
    let mut answers = drain(&mut session);
    let mut unread = Vec::new();
    for piece in input.chunks(cut) {
        unread.extend_from_slice(piece);
        // One message at a time: what follows the negotiation is not looked at here.
        while session.is_negotiating() {
            let received = match session.receive(&unread, &export, &GEOMETRY, MemoryQuota::default(), &mut requests) {
                Ok(received) => received,
                // A broken request behind the negotiation, in the same piece.
                Err(_) if !session.is_negotiating() => {
                    answers.extend(drain(&mut session));
                    break;
                }
                Err(error) => return Outcome { answers: [answers, drain(&mut session)].concat(), end: Err(error) },
            };
            unread.drain(..received.used);
            let said = drain(&mut session);
            if in_clear {
                assert!(session.is_negotiating() || received.next == Next::Disconnect);
                check_before_tls(&said);
            }
            in_clear &= received.next != Next::StartTls;
            answers.extend(said);
            if received.next == Next::Receive {
                break;
            }
        }
        if !session.is_negotiating() {
            break;
        }
    }
    retire(requests);
    // Requests that came in the same piece may have been answered; the negotiation's own answers come first.
    let end = Ok(!session.is_negotiating());
    Outcome { answers: option_answers(answers), end }
}

fn retire(requests: VecDeque<Request>) {
    for request in requests {
        request.retire();
    }
}

/// The answers to options, without what follows an acknowledged GO or EXPORT_NAME.
fn option_answers(mut answers: Vec<u8>) -> Vec<u8> {
    let mut at = 18;
    while answers.len() >= at + 20 && answers[at..at + 8] == REPLY_MAGIC {
        at += 20 + word(&answers, at + 16);
    }
    answers.truncate(at);
    answers
}

const REPLY_MAGIC: [u8; 8] = [0, 3, 0xe8, 0x89, 4, 0x55, 0x65, 0xa9];

fn word(bytes: &[u8], at: usize) -> usize {
    u32::from_be_bytes(bytes[at..at + 4].try_into().unwrap()) as usize
}

fn check_answers(answers: &[u8]) {
    assert_eq!(&answers[..16], b"NBDMAGICIHAVEOPT");
    let mut at = 18;
    while answers.len() > at {
        assert_eq!(answers[at..at + 8], REPLY_MAGIC, "at byte {at} of the answers");
        let (kind, len) = (word(answers, at + 12), word(answers, at + 16));
        assert!(matches!(kind, 1..=4) || kind > 1 << 31, "kind {kind:#x}");
        at += 20 + len;
    }
    assert_eq!(at, answers.len(), "the last answer is cut off");
}

/// Before TLS, only STARTTLS and ABORT have another answer than that it is required, or that they are malformed.
fn check_before_tls(mut answers: &[u8]) {
    const TLS_REQUIRED: usize = (1 << 31) + 5;
    const INVALID: usize = (1 << 31) + 3;
    while !answers.is_empty() {
        let (option, kind, len) = (word(answers, 8), word(answers, 12), word(answers, 16));
        assert!(
            kind == TLS_REQUIRED || option == 2 || option == 5 && matches!(kind, 1 | INVALID),
            "{option}: {kind:#x}"
        );
        answers = &answers[20 + len..];
    }
}

/// Feeds everything to a session whose answers nobody reads.
fn negotiate_deaf(begin: Begin, input: &[u8]) {
    let export = export(GEOMETRY);
    let mut session = begin(0);
    let mut requests = VecDeque::new();
    let received = session.receive(input, &export, &GEOMETRY, MemoryQuota::default(), &mut requests);
    if session.is_negotiating() {
        assert!(session.outgoing().held() <= 128 << 10);
    }
    if let Ok(received) = received {
        assert!(received.used <= input.len());
    }
    retire(requests);
}

/// Invariants checked:
/// - no command panics, however broken; every request that surfaces lies inside the disk;
/// - at most 128 requests and 64 MiB are under way, and a session that stalls goes on once they are answered;
/// - each command whose last byte was sent is answered exactly once, in a form that fits it, unless the
///   connection has ended;
/// - a block status is answered with a chunk for each context that it selects, in the order of their ids, whose runs
///   are neither empty nor longer than the range, and which say of a bitmap what it is;
/// - a read returns what the disk held when it was done.
pub fn commands(input: &[u8]) {
    let Some((&setup, input)) = input.split_first() else { return };
    let mut peer = Peer::new(setup);
    for record in input.chunks(8) {
        peer.act(record);
        if peer.ended {
            break;
        }
    }
    peer.finish();
}

/// A client, a disk and the session between them.
struct Peer {
    session: Session,
    export: Export,
    structured: bool,
    /// With extended headers, which include structured replies.
    extended: bool,
    bytes: Vec<u8>,
    requests: VecDeque<Request>,
    unread: Vec<u8>,
    received: Vec<u8>,
    /// Commands not answered, by cookie: kind, offset and length.
    open: BTreeMap<u64, (u16, u64, u64)>,
    /// The ids of negotiated contexts.
    contexts: Vec<u32>,
    /// Those that a block status selects, if not all, and its range, by cookie.
    selected: BTreeMap<u64, (Vec<u32>, u64)>,
    /// The ids of contexts described so far in a reply of several chunks, by cookie.
    described: BTreeMap<u64, Vec<u32>>,
    cookie: u64,
    /// Data that reads must return, by cookie.
    expected: BTreeMap<u64, Vec<u8>>,
    sane: bool,
    ended: bool,
}

const READ: u16 = 0;
const WRITE: u16 = 1;
const DISC: u16 = 2;
const BLOCK_STATUS: u16 = 7;
const PAYLOAD_LEN: u16 = 1 << 5;

impl Peer {
    fn new(setup: u8) -> Peer {
        let extended = setup & 8 != 0;
        let structured = extended || setup & 1 != 0;
        let block = if setup & 2 != 0 { 4096 } else { 512 };
        let geometry = Geometry { block, read_only: setup & 4 != 0, ..GEOMETRY };
        let mut peer = Peer {
            session: Session::new(0),
            export: export(geometry),
            structured,
            extended,
            bytes: vec![0; 1 << 20],
            requests: VecDeque::new(),
            unread: Vec::new(),
            received: Vec::new(),
            open: BTreeMap::new(),
            contexts: Vec::new(),
            selected: BTreeMap::new(),
            described: BTreeMap::new(),
            cookie: 0,
            expected: BTreeMap::new(),
            sane: true,
            ended: false,
        };
        peer.send(&3u32.to_be_bytes());
        if structured {
            let style = if extended { 11 } else { 8 };
            peer.send(&[&b"IHAVEOPT"[..], &[0, 0, 0, style, 0, 0, 0, 0]].concat());
            let names = ["base:allocation", "qemu:allocation-depth", "qemu:dirty-bitmap:b", "qemu:dirty-bitmap:b:c"];
            let wanted = (1..).zip(names).filter(|(id, _)| *id == 1 || setup >> (3 + id) & 1 == 1);
            let (ids, names): (Vec<u32>, Vec<&str>) = wanted.unzip();
            let string = |name: &str| [&(name.len() as u32).to_be_bytes()[..], name.as_bytes()].concat();
            let names: Vec<Vec<u8>> = names.into_iter().map(string).collect();
            let query = [&[0; 4][..], &(names.len() as u32).to_be_bytes(), &names.concat()].concat();
            peer.contexts = ids;
            let head = [&[0, 0, 0, 10][..], &(query.len() as u32).to_be_bytes()].concat();
            peer.send(&[&b"IHAVEOPT"[..], &head, &query].concat());
        }
        peer.send(&[&b"IHAVEOPT"[..], &[0, 0, 0, 7, 0, 0, 0, 6], &[0; 6]].concat());
        assert!(!peer.session.is_negotiating());
        drain(&mut peer.session);
        peer
    }

    /// One record of the input: mostly a sound command, at times a broken one, raw bytes, or an answer of the disk.
    fn act(&mut self, record: &[u8]) {
        let mut padded = [0; 8];
        padded[..record.len()].copy_from_slice(record);
        let [what, flags, at_high, at_low, len_high, len_low, tweak, fill] = padded;
        match what {
            0..=127 => {
                // The disk has 2048 blocks: one command in nine lies behind its end.
                let at = u64::from(u16::from_be_bytes([at_high, at_low]) % 2304) * 512 + u64::from(tweak & 1);
                let len = u32::from(u16::from_be_bytes([len_high, len_low]) % 512) * 512 + u32::from(tweak >> 1 & 1);
                // A length of 32 MiB and more, for each command.
                let len = if tweak & 0x80 != 0 { len + (32 << 20) } else { len };
                if self.extended {
                    return self.extended_command(u16::from(what % 9), u16::from(flags), at, len.into(), tweak, fill);
                }
                self.command(u16::from(what % 9), u16::from(flags), at, len, fill);
            }
            128..=191 => self.answer_one(usize::from(flags)),
            192..=223 => self.read_replies(),
            224..=239 => self.answer_all(),
            _ => {
                // Whatever this is taken for, what follows is not in step any more.
                self.sane = false;
                self.send(record);
            }
        }
    }

    fn command(&mut self, kind: u16, flags: u16, at: u64, len: u32, fill: u8) {
        self.cookie += 1;
        let cookie = self.cookie;
        let (kind_bytes, flags) = (kind.to_be_bytes(), flags.to_be_bytes());
        let head = [&[0x25, 0x60, 0x95, 0x13], &flags[..], &kind_bytes, &cookie.to_be_bytes(), &at.to_be_bytes()];
        let mut bytes = [&head.concat()[..], &len.to_be_bytes()].concat();
        if kind == WRITE && len <= 1 << 20 {
            bytes.resize(bytes.len() + len as usize, fill);
        } else if kind == WRITE && len <= 32 << 20 {
            self.sane = false;
        }
        if kind != DISC {
            self.open.insert(cookie, (kind, at, len.into()));
        }
        self.send(&bytes);
    }

    /// A command whose header is extended. A write mostly has its payload flag, others have it at times; a block status
    /// with it selects contexts, at times soundly.
    fn extended_command(&mut self, kind: u16, flags: u16, at: u64, len: u64, tweak: u8, fill: u8) {
        self.cookie += 1;
        let flags = if kind == WRITE && tweak & 0x40 == 0 { flags | PAYLOAD_LEN } else { flags };
        // QEMU's writes have data without the flag.
        let has_data = kind == WRITE || flags & PAYLOAD_LEN != 0;
        // One context, or two of which the second is at times the same or not negotiated.
        let ids = [1 + u32::from(fill / 8 % 5), 1 + u32::from(fill % 5)];
        let ids = if tweak & 8 != 0 { &ids[..] } else { &ids[..1] };
        let selection =
            [&len.to_be_bytes()[..], &ids.iter().flat_map(|id| id.to_be_bytes()).collect::<Vec<_>>()].concat();
        let selects = has_data && kind == BLOCK_STATUS && tweak & 4 != 0;
        let wide = if has_data { 0 } else { u64::from(tweak & 0x20) << 35 };
        if selects {
            self.selected.insert(self.cookie, (ids.to_vec(), len));
        }
        let len = if selects { selection.len() as u64 } else { len + wide };
        let [flags, kind_bytes] = [flags, kind].map(u16::to_be_bytes);
        let head = [&[0x21, 0xe4, 0x1c, 0x71], &flags[..], &kind_bytes, &self.cookie.to_be_bytes()].concat();
        let mut bytes = [&head[..], &at.to_be_bytes(), &len.to_be_bytes()].concat();
        if selects {
            bytes.extend_from_slice(&selection);
        } else if has_data && len <= 1 << 20 {
            bytes.resize(bytes.len() + len as usize, fill);
        } else if has_data && len <= 32 << 20 {
            self.sane = false;
        }
        if kind != DISC {
            self.open.insert(self.cookie, (kind, at, len));
        }
        self.send(&bytes);
    }

    fn send(&mut self, bytes: &[u8]) {
        if self.ended {
            return;
        }
        self.unread.extend_from_slice(bytes);
        loop {
            let geometry = self.export.geometry;
            let received =
                self.session.receive(&self.unread, &self.export, &geometry, MemoryQuota::default(), &mut self.requests);
            assert!(self.session.in_flight() <= 128 && self.session.held() <= 65 << 20);
            let Ok(received) = received else {
                self.ended = true;
                return;
            };
            self.unread.drain(..received.used);
            match received.next {
                Next::Receive => return,
                Next::StartTls => unreachable!("the session has no TLS"),
                Next::Disconnect => {
                    self.ended = true;
                    return;
                }
                Next::Stall => {
                    self.answer_all();
                    self.read_replies();
                    assert!(
                        self.session.has_memory(MemoryQuota::default()),
                        "nothing is under way and still it stalls"
                    );
                }
            }
        }
    }

    fn answer_one(&mut self, which: usize) {
        if self.requests.is_empty() {
            return;
        }
        if let Some(mut request) = self.requests.remove(which % self.requests.len()) {
            let status = self.perform(&mut request);
            if request.operation() == Operation::Read && status == Status::Done {
                // The cookie is not in the request; replies to reads are compared in the order of answers.
                let key = self.expected.len() as u64;
                self.expected.insert(key, request.asked_memory().to_vec());
            }
            let geometry = self.export.geometry;
            self.session.complete(request, status, &Dirty, Some((&geometry, &mut self.requests)));
        }
    }

    fn answer_all(&mut self) {
        while !self.requests.is_empty() {
            self.answer_one(0);
        }
    }

    fn perform(&mut self, request: &mut Request) -> Status {
        let span = request.span();
        assert!(span.end() <= DiskOffset(self.export.geometry.len));
        let range = span.at.0 as usize..span.end().0 as usize;
        let asked = request.asked().at.0 as usize..request.asked().end().0 as usize;
        match request.operation() {
            // Failures of the storage, at places that the input can choose.
            Operation::Read | Operation::Write { .. } | Operation::Patch { .. } if span.at == DiskOffset(65536) => {
                return Status::Failed;
            }
            Operation::Read => request.memory().copy_from(&self.bytes[range]),
            Operation::Write { .. } | Operation::Patch { .. } => request.asked_memory().copy_to(&mut self.bytes[asked]),
            // As where zeroes cannot be made fast.
            Operation::WriteZeroes { .. } if request.fast && span.at % 1024 == 0 => return Status::Unsupported,
            Operation::Discard => self.bytes[range].fill(0),
            Operation::WriteZeroes { .. } => self.bytes[asked].fill(0),
            Operation::Flush => {}
            Operation::Extents { .. } => {
                let block = u64::from(self.export.geometry.block);
                let kinds = [ExtentKind::Data, ExtentKind::Hole, ExtentKind::Hole];
                let runs = (0..span.len / block).map(|run| Extent {
                    len: block,
                    kind: kinds[(run % 3) as usize],
                    depth: (run % 2) as u32,
                });
                request.extents_mut().extend(runs);
            }
        }
        Status::Done
    }

    /// Takes what the session says, and every whole reply in it.
    fn read_replies(&mut self) {
        let said = drain(&mut self.session);
        self.received.extend(said);
        let mut at = 0;
        while at < self.received.len() {
            at += self.reply(at);
        }
        self.received.clear();
        self.expected.clear();
    }

    /// Checks one reply; returns its length.
    fn reply(&mut self, at: usize) -> usize {
        let bytes = &self.received[at..];
        // A simple reply has its cookie where chunks have theirs.
        let cookie = u64::from_be_bytes(bytes[8..16].try_into().unwrap());
        // All chunks but the last one of a reply lack the flag.
        let is_simple = bytes[..4] == [0x67, 0x44, 0x66, 0x98];
        let is_last = is_simple || bytes[5] & 1 == 1;
        let command = if is_last { self.open.remove(&cookie) } else { self.open.get(&cookie).copied() };
        assert!(command.is_some() || !self.sane, "cookie {cookie} was answered twice, or never asked");
        let (kind, from, len) = command.unwrap_or((u16::MAX, 0, 0));
        let head = match bytes[..4] {
            [0x67, 0x44, 0x66, 0x98] => None,
            [0x66, 0x8e, 0x33, 0xef] => Some(20),
            [0x6e, 0x8a, 0x27, 0x8c] => Some(32),
            _ => panic!("a reply with the magic number {:x?}", &bytes[..4]),
        };
        assert_eq!(self.extended, head == Some(32), "another style than was negotiated");
        if let Some(head) = head {
            assert!(self.structured);
            if self.extended {
                assert_eq!(bytes[24..28], [0; 4], "a payload of 4 GiB");
                assert!(bytes[16..24] == from.to_be_bytes() || !self.sane, "the offset of another request");
            }
            let (chunk, payload) = (u16::from_be_bytes([bytes[6], bytes[7]]), word(bytes, head - 4));
            match chunk {
                0 => assert_eq!(payload, 0),
                1 => assert!(kind == READ && payload as u64 == len + 8 || !self.sane),
                5 => {
                    assert!(
                        !self.extended && (kind == BLOCK_STATUS && payload >= 12 && payload % 8 == 4 || !self.sane)
                    );
                    let pairs = bytes[head + 4..head + payload].chunks(8);
                    let runs = pairs.map(|pair| (word(pair, 0) as u64, word(pair, 4) as u64)).collect();
                    self.context(cookie, is_last, word(bytes, head) as u32, (from, len), runs);
                }
                6 => {
                    assert!(self.extended && (kind == BLOCK_STATUS || !self.sane));
                    assert!(payload >= 24 && payload == 8 + 16 * word(bytes, head + 4));
                    let number = |bytes: &[u8]| u64::from_be_bytes(bytes.try_into().unwrap());
                    let pairs = bytes[head + 8..head + payload].chunks(16);
                    let runs = pairs.map(|pair| (number(&pair[..8]), number(&pair[8..]))).collect();
                    self.context(cookie, is_last, word(bytes, head) as u32, (from, len), runs);
                }
                0x8001 => {
                    let text = u16::from_be_bytes([bytes[head + 4], bytes[head + 5]]);
                    assert_eq!(payload, 6 + usize::from(text));
                }
                _ => panic!("chunk of type {chunk}"),
            }
            if chunk == 1 {
                self.data(at + head + 8, payload - 8);
            }
            return head + payload;
        }
        assert!(!self.structured || (kind != READ && kind != BLOCK_STATUS) || !self.sane);
        let data = if kind == READ && word(bytes, 4) == 0 { len as usize } else { 0 };
        if data > 0 {
            self.data(at + 16, data);
        }
        16 + data
    }

    /// Checks the runs of one context in the reply to a block status of `len` bytes at `from`, or to one that selects
    /// contexts.
    fn context(&mut self, cookie: u64, is_last: bool, id: u32, (from, len): (u64, u64), runs: Vec<(u64, u64)>) {
        let (wanted, len) = match self.selected.get(&cookie) {
            Some((ids, len)) => (self.contexts.iter().copied().filter(|id| ids.contains(id)).collect(), *len),
            None => (self.contexts.clone(), len),
        };
        let described = self.described.entry(cookie).or_default();
        described.push(id);
        if is_last {
            let described = self.described.remove(&cookie);
            assert!(described == Some(wanted) || !self.sane, "contexts {described:?}");
        }
        let sum: u64 = runs.iter().map(|run| run.0).sum();
        assert!(runs.iter().all(|run| run.0 > 0) && (sum <= len || !self.sane), "{sum} of {len}");
        if id >= 3 && self.sane {
            let span = Span { at: DiskOffset(from), len };
            let expected = Dirty.runs((id - 3) as usize, span, runs.len());
            let found: Vec<(u64, bool)> = runs.iter().map(|run| (run.0, run.1 == 1)).collect();
            assert_eq!(found, expected, "bitmap {id}");
        }
    }

    /// Compares a read's data with what the disk gave to the read that was answered first.
    fn data(&mut self, at: usize, len: usize) {
        let (_, expected) = self.expected.pop_first().expect("data that no read has asked for");
        assert_eq!(self.received[at..at + len], expected);
    }

    fn finish(mut self) {
        self.answer_all();
        if self.sane || !self.ended {
            self.read_replies();
        }
        assert!(self.ended || !self.sane || self.open.is_empty(), "not answered: {:?}", self.open);
        assert_eq!(self.session.in_flight(), 0);
    }
}
