//! The client, a model server and the network between them, and what must hold.
//!
//! Invariants checked, after each step:
//! - each operation is answered once, and well unless the server has failed a flush;
//! - after an operation has failed, no flush succeeds;
//! - a read returns what the operations before it have written;
//! - after an answered flush the durable bytes have what was answered before the flush was submitted, or something
//!   newer; and no such byte is ever written again with something older, nor with itself;
//! - at the end everything is answered, and after the last flush the durable bytes are those of the last writes.

use disk::{Action, FileDone, FileId, FileOffset, FileOp, OpId};
use memory::Segments;

use super::server::{Restart, Server};
use crate::client::planted::Planted;
use crate::client::{Broken, Client};

/// The bytes that workloads touch.
const TOUCHED: usize = 48;

/// An operation of a workload.
#[derive(Clone, Copy, Debug)]
pub enum Work {
    Write(usize, usize),
    Zero(usize, usize),
    Read(usize, usize),
    Flush,
}

/// What is known of a byte: all values in the order of submission, and how far they are answered and durable.
#[derive(Clone, Debug)]
struct Byte {
    values: Vec<u8>,
    answered: usize,
    floor: usize,
}

pub struct World {
    pub client: Client,
    pub server: Server,
    /// Bytes on their way.
    pub to_server: Vec<u8>,
    pub to_client: Vec<u8>,
    /// Replies to executed requests that the server has not sent yet.
    pub held: Vec<Vec<u8>>,
    pub connected: bool,
    /// Bytes that the network has delivered, in both directions.
    pub delivered: usize,
    work: Vec<Work>,
    pub submitted: usize,
    /// For each submitted operation, what its answer means.
    open: Vec<Option<Open>>,
    bytes: Vec<Byte>,
    pub broken: Option<Broken>,
    /// An operation has failed.
    failed: bool,
    is_another: bool,
}

enum Open {
    /// The positions in the histories of its bytes.
    Write(usize, Vec<usize>),
    Read(usize, Vec<u8>),
    Flush(Vec<usize>),
}

impl World {
    pub fn new(work: &[Work], structured: bool, planted: Option<Planted>) -> World {
        let mut client = Client::new("export", true).unwrap();
        client.pieces.planted = planted;
        client.sample.block = 4;
        World {
            client,
            server: Server::new(structured),
            to_server: Vec::new(),
            to_client: Vec::new(),
            held: Vec::new(),
            connected: false,
            delivered: 0,
            work: work.to_vec(),
            submitted: 0,
            open: Vec::new(),
            bytes: vec![Byte { values: vec![0], answered: 0, floor: 0 }; TOUCHED],
            broken: None,
            failed: false,
            is_another: false,
        }
    }

    pub fn connect(&mut self) {
        self.client.connected();
        self.server.connect();
        self.to_client.append(&mut self.server.send());
        self.connected = true;
    }

    /// Ends the connection: `executes` of the requests at the server, in their order, are still executed.
    pub fn cut(&mut self, executes: usize, restart: Restart) -> Result<(), String> {
        for _ in 0..executes.min(self.server.pending.len()) {
            self.execute(0, 0, false)?;
        }
        self.server.cut(restart);
        self.to_server.clear();
        self.to_client.clear();
        self.held.clear();
        self.client.disconnected();
        self.connected = false;
        self.check_durable()?;
        self.check()
    }

    /// Another disk is served from now on: what it has durable is only checked at the end.
    pub fn serve_another(&mut self) {
        self.server.is_another();
        self.is_another = true;
    }

    pub fn has_work(&self) -> bool {
        self.submitted < self.work.len() && self.client.export().is_some()
    }

    pub fn is_done(&self) -> bool {
        self.submitted == self.work.len() && self.open.iter().all(Option::is_none)
    }

    pub fn submit(&mut self) -> Result<(), String> {
        let id = self.submitted;
        let number = u8::try_from(id + 1).unwrap();
        let (action, open) = match self.work[id] {
            Work::Write(at, len) => {
                let bytes = vec![number; len];
                let action = Action::Write { at: offset(at), from: Segments::copy_of(&bytes) };
                (action, Open::Write(at, self.will_be(at, &bytes)))
            }
            Work::Zero(at, len) => {
                let action = Action::Deallocate { at: offset(at), len: len as u64 };
                (action, Open::Write(at, self.will_be(at, &vec![0; len])))
            }
            Work::Read(at, len) => {
                let expected = self.bytes[at..at + len].iter().map(|byte| *byte.values.last().unwrap()).collect();
                (Action::Read { at: offset(at), into: Segments::copy_of(&vec![255; len]) }, Open::Read(at, expected))
            }
            Work::Flush => (Action::SyncData, Open::Flush(self.bytes.iter().map(|byte| byte.answered).collect())),
        };
        self.submitted += 1;
        self.open.push(Some(open));
        let op = FileOp { id: OpId(id as u64), file: FileId(0), action };
        self.client.push(op).map_err(|_| "the client is full".to_owned())?;
        self.check()
    }

    fn will_be(&mut self, at: usize, bytes: &[u8]) -> Vec<usize> {
        let written = self.bytes[at..].iter_mut().zip(bytes).map(|(byte, &value)| {
            byte.values.push(value);
            byte.values.len() - 1
        });
        written.collect()
    }

    /// Moves what the client wants to send into the network.
    pub fn send(&mut self) {
        let bytes = self.client.to_send().to_vec();
        self.client.sent(bytes.len());
        self.to_server.extend_from_slice(&bytes);
    }

    pub fn deliver_to_server(&mut self, len: usize) {
        let bytes: Vec<u8> = self.to_server.drain(..len.min(self.to_server.len())).collect();
        self.delivered += bytes.len();
        self.to_client.append(&mut self.server.receive(&bytes));
    }

    /// Executes a request at the server, which may send its reply later.
    pub fn execute(&mut self, index: usize, style: usize, hold: bool) -> Result<(), String> {
        if let Some((at, bytes)) = self.server.execute(index, style) {
            for (n, value) in bytes.into_iter().enumerate() {
                let byte = &self.bytes[at + n];
                if !byte.values[byte.floor + 1..].contains(&value) {
                    return Err(format!("byte {} is written again with {value}, after a flush covered it", at + n));
                }
            }
        }
        match hold {
            true => self.held.push(std::mem::take(&mut self.server.out)),
            false => self.to_client.append(&mut self.server.send()),
        }
        self.check_durable()
    }

    pub fn deliver_to_client(&mut self, len: usize) -> Result<(), String> {
        let bytes: Vec<u8> = self.to_client.drain(..len.min(self.to_client.len())).collect();
        self.delivered += bytes.len();
        if let Err(broken) = self.client.receive(&bytes) {
            self.broken = Some(broken);
            self.cut(0, Restart::None)?;
        }
        self.check()
    }

    fn check(&mut self) -> Result<(), String> {
        let mut done = Vec::new();
        self.client.take_done(&mut done);
        if done.is_empty() {
            return Ok(());
        }
        for done in done {
            self.answered(done)?;
        }
        self.check_durable()
    }

    fn check_durable(&self) -> Result<(), String> {
        for (at, (byte, durable)) in self.bytes.iter().zip(&self.server.durable).enumerate() {
            if !self.is_another && !byte.values[byte.floor..].contains(durable) {
                return Err(format!("durable byte {at} is {durable}, after {:?} was flushed", byte.values[byte.floor]));
            }
        }
        Ok(())
    }

    fn answered(&mut self, done: FileDone) -> Result<(), String> {
        let id = usize::try_from(done.op.id.0).unwrap();
        let work = self.work[id];
        let open = self.open[id].take().ok_or(format!("{work:?} was answered twice"))?;
        match done.result {
            Ok(()) if self.failed && matches!(work, Work::Flush) => return Err("a flush after a failure".to_owned()),
            Ok(()) => {}
            Err(_) if self.server.flush_failed && !matches!(work, Work::Read(..)) => {
                self.failed = true;
                return Ok(());
            }
            Err(error) => return Err(format!("{work:?} failed: {error}")),
        }
        match (open, &done.op.action) {
            (Open::Write(at, positions), _) => {
                for (byte, position) in self.bytes[at..].iter_mut().zip(positions) {
                    byte.answered = byte.answered.max(position);
                }
            }
            // A read returns the last submitted bytes, unless their write has failed.
            (Open::Read(..), _) if self.failed => {}
            (Open::Read(at, expected), Action::Read { into, .. }) if into.to_vec() != expected => {
                return Err(format!("a read at {at} returned {:?}, not {expected:?}", into.to_vec()));
            }
            (Open::Read(..), _) => {}
            (Open::Flush(covered), _) => {
                for (byte, position) in self.bytes.iter_mut().zip(covered) {
                    byte.floor = byte.floor.max(position);
                }
            }
        }
        Ok(())
    }

    /// Checks the end of a run, whose last operation is a flush submitted after all else was answered.
    pub fn check_end(&self) -> Result<(), String> {
        if self.failed {
            return Ok(());
        }
        for (at, (byte, durable)) in self.bytes.iter().zip(&self.server.durable).enumerate() {
            if byte.values.last() != Some(durable) {
                return Err(format!("byte {at} is {durable} at the end, not {:?}", byte.values.last()));
            }
        }
        match self.server.size {
            512 => Ok(()),
            other => Err(format!("an export of {other} bytes was used as the one of 512")),
        }
    }

    /// Whether all but the last operation are answered.
    pub fn only_last_left(&self) -> bool {
        self.submitted + 1 == self.work.len() && self.open.iter().all(Option::is_none)
    }

    pub fn is_last(&self) -> bool {
        self.submitted + 1 == self.work.len()
    }
}

fn offset(at: usize) -> FileOffset {
    FileOffset(at as u64)
}
