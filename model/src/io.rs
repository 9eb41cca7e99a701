//! The I/O of clients of plugged disks, and the checks of its results.

use std::io;
use std::path::Path;
use std::time::{Duration, Instant};

use testkit::nbd::{Client, Command};

use super::content::{Range, UNIT, bytes_of};
use super::verbs::patience;
use super::world::{PendingVerb, World};

/// Number of bytes that are compared at a time.
const PIECE: u64 = 1 << 20;

/// The longest write, in units.
const LONGEST: u64 = 24;

impl World {
    /// A VBD whose disk can be used now.
    pub fn usable_vbd(&mut self) -> Option<String> {
        let unplugging: Vec<String> = self
            .pending
            .iter()
            .filter_map(|pending| match &pending.verb {
                PendingVerb::Unplug(vbd) => Some(vec![vbd.clone()]),
                PendingVerb::Many(vbds) => Some(vbds.clone()),
                PendingVerb::Drain => Some(self.vbds.keys().cloned().collect()),
                _ => None,
            })
            .flatten()
            .collect();
        let usable = self.vbds.iter().filter(|(uuid, vbd)| {
            vbd.plugged && vbd.vm.is_none() && vbd.sent.is_none() && vbd.stopped.is_none() && !unplugging.contains(uuid)
        });
        let usable: Vec<String> = usable.map(|(uuid, _)| uuid.clone()).collect();
        self.one_of(&usable)
    }

    /// A random range of a VDI.
    fn range(&mut self, vdi: &str) -> Result<Range, String> {
        let units = self.vdi(vdi)?.least() / UNIT;
        // Often at the same place, and sometimes at the very end.
        let at = match self.random.below(4) {
            0 => units.saturating_sub(1 + self.random.below(4)),
            1 => self.random.below(64.min(units)),
            _ => self.random.below(units),
        };
        let len = (1 + self.random.below(LONGEST)).min(units - at);
        Ok(Range { at, len })
    }

    /// Connects to a disk, unless there is a connection.
    pub fn connect(&mut self, vbd: &str) -> Result<(), String> {
        if self.vbd(vbd)?.client.is_some() {
            return Ok(());
        }
        let begun = Instant::now();
        loop {
            let shown = self.get(&format!("/vbds/{vbd}"))?;
            if let (Some("plugged"), Some(socket)) = (shown["state"].as_str(), shown["socket"].as_str()) {
                if let Ok(client) = Client::connect(Path::new(socket)) {
                    self.vbd(vbd)?.client = Some(client);
                    return Ok(());
                }
            }
            if begun.elapsed() > patience() {
                return Err(format!("stuck, the disk cannot be reached: {shown}"));
            }
            self.wait_a_moment(begun)?;
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Sends a request once; `None` if the connection has ended or the disk failed, which must be excused.
    fn send_once(&mut self, vbd: &str, command: Command, range: Range, data: &[u8]) -> Result<Option<Vec<u8>>, String> {
        self.connect(vbd)?;
        let client = self.vbd(vbd)?.client.as_mut().ok_or("there is no connection")?;
        match client.ask(command, range.at * UNIT, range.len * UNIT, data) {
            Ok(bytes) => Ok(Some(bytes)),
            Err(error) => self.cut_off(vbd, &error).map(|()| None),
        }
    }

    fn cut_off(&mut self, vbd: &str, error: &io::Error) -> Result<(), String> {
        self.log(format!("vbd {vbd}: no answer: {error}"));
        self.vbd(vbd)?.client = None;
        let timed_out = matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut);
        match self.troubled && !timed_out {
            true => Ok(()),
            false => Err(format!("the disk of VBD {vbd} does not answer as it should: {error}")),
        }
    }

    /// Does several writes in turn.
    pub fn write_some(&mut self, vbd: &str) -> Result<(), String> {
        for _ in 0..=self.random.below(4) {
            self.write(vbd)?;
        }
        Ok(())
    }

    /// Writes, zeroes or discards a random range.
    pub fn write(&mut self, vbd: &str) -> Result<(), String> {
        let vdi = self.vbd(vbd)?.vdi.clone();
        if self.vdi(&vdi)?.read_only {
            return self.read(vbd);
        }
        let range = self.range(&vdi)?;
        let (command, stamp) = match self.random.below(10) {
            0 => (Command::Trim, 0),
            1 => (Command::Zeroes, 0),
            _ => (Command::Write, self.stamp()),
        };
        self.count("write");
        self.log(format!("vbd {vbd}: {command:?} {range:?} stamp {stamp}"));
        let bytes = if command == Command::Write { bytes_of(range, stamp) } else { Vec::new() };
        let answered = self.send_once(vbd, command, range, &bytes)?.is_some();
        // Discarded data may still be there.
        self.written(&vdi, range, stamp, answered && command != Command::Trim)
    }

    /// Records a write that was answered, or perhaps done: in the VDI, and in copies of it that are being made.
    fn written(&mut self, vdi: &str, range: Range, stamp: u64, answered: bool) -> Result<(), String> {
        for pending in self.pending.iter_mut().filter(|pending| pending.source.as_deref() == Some(vdi)) {
            if let PendingVerb::Make(made) = &mut pending.verb {
                made.content.set_perhaps(range, stamp);
            }
        }
        let content = &mut self.vdi(vdi)?.content;
        match answered {
            true => content.set(range, stamp),
            false => content.set_perhaps(range, stamp),
        }
        Ok(())
    }

    /// Sends a write without waiting: the disk will be killed, is stopped, or waits for space.
    pub fn send_write(&mut self, vbd: &str) -> Result<(), String> {
        let vdi = self.vbd(vbd)?.vdi.clone();
        if self.vdi(&vdi)?.read_only || self.vbd(vbd)?.sent.is_some() {
            return Ok(());
        }
        let range = self.range(&vdi)?;
        let stamp = self.stamp();
        if self.vbd(vbd)?.client.is_none() {
            if self.vbd(vbd)?.stopped.is_some() {
                return Ok(());
            }
            self.connect(vbd)?;
        }
        self.count("write");
        self.log(format!("vbd {vbd}: write {range:?} stamp {stamp} is sent"));
        self.written(&vdi, range, stamp, false)?;
        let client = self.vbd(vbd)?.client.as_mut().ok_or("there is no connection")?;
        match client.send(Command::Write, range.at * UNIT, range.len * UNIT, &bytes_of(range, stamp)) {
            Ok(()) => self.vbd(vbd)?.sent = Some((range, stamp)),
            Err(error) => self.cut_off(vbd, &error)?,
        }
        Ok(())
    }

    /// Receives the response to a write that was sent.
    pub fn take_answer(&mut self, vbd: &str) -> Result<(), String> {
        let now = self.vbd(vbd)?;
        let (Some((range, stamp)), Some(client)) = (now.sent.take(), now.client.as_mut()) else { return Ok(()) };
        match client.answer(0) {
            Ok(_) => {
                let vdi = now.vdi.clone();
                self.log(format!("vbd {vbd}: write of stamp {stamp} is answered"));
                self.vdi(&vdi)?.content.set(range, stamp);
                Ok(())
            }
            Err(error) => self.cut_off(vbd, &error),
        }
    }

    /// Flushes a disk: writes that were answered become durable.
    pub fn flush(&mut self, vbd: &str) -> Result<(), String> {
        self.count("flush");
        self.send_once(vbd, Command::Flush, Range { at: 0, len: 0 }, &[]).map(drop)
    }

    /// Reads a random range and compares it.
    pub fn read(&mut self, vbd: &str) -> Result<(), String> {
        let vdi = self.vbd(vbd)?.vdi.clone();
        let range = self.range(&vdi)?;
        self.count("read");
        self.compare(vbd, &vdi, range).map(drop)
    }

    /// Reads and compares; returns whether the disk has responded.
    fn compare(&mut self, vbd: &str, vdi: &str, range: Range) -> Result<bool, String> {
        let Some(bytes) = self.send_once(vbd, Command::Read, range, &[])? else { return Ok(false) };
        self.counts.compared += range.len * UNIT;
        let what = format!("VDI {vdi} ({}) through VBD {vbd}", self.vdi(vdi)?.name);
        self.vdi(vdi)?.content.check_read(range.at, &bytes).map_err(|why| format!("{what}: {why}"))?;
        Ok(true)
    }

    /// Reads and compares all of a plugged disk, and its size.
    pub fn compare_all(&mut self, vbd: &str) -> Result<(), String> {
        let vdi = self.vbd(vbd)?.vdi.clone();
        // The size is sent when a client connects.
        self.vbd(vbd)?.client = None;
        self.connect(vbd)?;
        let served = self.vbd(vbd)?.client.as_ref().map_or(0, |client| client.size);
        let sizes = self.vdi(&vdi)?.sizes.clone();
        if !sizes.contains(&served) {
            return Err(format!("VDI {vdi} is served with {served} bytes; it should have {sizes:?}"));
        }
        let units = served / UNIT;
        let mut at = 0;
        while at < units {
            let len = (PIECE / UNIT).min(units - at);
            if self.compare(vbd, &vdi, Range { at, len })? {
                at += len;
            }
        }
        Ok(())
    }
}
