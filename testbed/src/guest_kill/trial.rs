//! The guest's life: it boots, works, has its disk's process killed again and again, and loses its power in the end.
//!
//! Knows what the guest says (`testbed/guest/jobs/survive.sh`) and when something is to happen, nothing of what is in
//! the images. Keeps: a guest that stands still is an error after a generous time, and so is anything that it finds
//! wrong.

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use vm::qemu::version::Version;

use crate::guest::{CPUS, Guest, Heard, Job, Running, said};
use crate::progress::Progress;
use crate::tool;

use super::changes::{Changes, Done, Verb};
use super::disk::{Disk, Stage};
use super::moments::{Deed, Moment, Since};
use super::records::{Records, SLOTS};
use super::{Failure, chain};

/// What each of the two loads writes and verifies in a round.
const ROUND_MIB: u64 = 24;
const SIZE: &str = "1G";

/// Nothing that the guest does takes a tenth of this, with all CPUs busy.
const SILENCE_MAX: Duration = Duration::from_secs(180);

/// How often it is looked whether a moment has come.
const STEP: Duration = Duration::from_millis(2);

/// From this one on QEMU does not lose a disk whose process dies while it connects (decision 0014).
const NOT_LOST: Version = Version(9, 1);

/// A QEMU that may lose a disk has certainly done with connecting so long after the rings were started.
const CONNECTED: Duration = Duration::from_millis(50);

/// Records that are waited for where the guest has to be seen at work.
const AT_WORK: u64 = 5;

/// What a trial is made of.
pub struct Bed<'b> {
    pub guest: &'b Guest,
    pub version: Version,
    pub queue_size: Option<u16>,
    pub program: &'b Path,
    /// Where images and logs are, and where sockets and redo logs are.
    pub work: &'b Path,
    pub run: &'b Path,
}

pub struct Trial<'a> {
    running: Running,
    disk: Disk,
    changes: Changes,
    version: Version,
    progress: &'a Progress,
    /// When the process before it was killed, the present one was started, and it was seen to have the guest.
    died: Instant,
    started: Instant,
    rings: Option<Instant>,
    asked: Option<String>,
    /// When a load has last said something.
    round_at: Instant,
    lived: Lived,
}

/// What happened.
pub struct Lived {
    pub records: Records,
    /// Rounds that fio has written and verified, and the longest that it waited for one answer.
    pub rounds: u64,
    pub verified_kib: u64,
    pub longest: Duration,
    pub deeds: Deeds,
    /// Longest time from one fsynced record to the next, with how many deeds between.
    pub pauses: Vec<(u64, Duration)>,
    /// From the death of a process until the guest's rings ran again under the next one.
    pub back: Vec<Duration>,
    /// How long requests have waited while another process took over.
    pub upgraded: Vec<Duration>,
    /// In how many of these what was in flight was recorded by the front-end.
    pub recorded: u64,
    pub done: Done,
}

/// What the process was at when something was done to it.
#[derive(Clone, Copy, Debug, Default)]
pub struct Deeds {
    pub kills: u64,
    pub upgrades: u64,
    pub opening: u64,
    pub connecting: u64,
    pub in_merge: u64,
    pub in_snapshot: u64,
    /// Since the guest was last seen at work.
    unanswered: u64,
}

impl<'a> Trial<'a> {
    /// Makes an image, starts a process for it and boots the guest.
    pub fn begin(bed: &Bed<'_>, seed: u64, progress: &'a Progress) -> Result<Self, Failure> {
        let Bed { guest, version, program, work, run, .. } = *bed;
        progress.step("a guest with two loads that verify, and records that it fsyncs");
        let mut disk = Disk::new(program.to_owned(), work, run)?;
        let image = format!("qcow2:{}", chain::BASE);
        let words = ["image", "create", &image, "--size", SIZE];
        tool::text(Command::new(program).args(words).env("TAPLINE_REDO_DIR", disk.redo()).current_dir(work))?;
        disk.start()?;
        while disk.stage()? == Stage::Opening {
            std::thread::sleep(STEP);
        }
        let job = Job {
            name: "survive",
            script: include_str!("../../guest/jobs/survive.sh"),
            parameters: vec![("ROUND_MIB", ROUND_MIB.to_string()), ("SLOTS", SLOTS.to_string())],
        };
        let running = guest.boot_with(&job, work, |command| {
            let (socket, reconnect) = (disk.socket(), version.reconnect());
            command.args(["-chardev", &format!("socket,id=disk,path={},{reconnect}", socket.display())]);
            let size = bed.queue_size.map(|size| format!(",queue-size={size}")).unwrap_or_default();
            command.args(["-device", &format!("vhost-user-blk-pci,chardev=disk,num-queues={CPUS}{size}")]);
        })?;
        let lived = Lived {
            records: Records::new(),
            rounds: 0,
            verified_kib: 0,
            longest: Duration::ZERO,
            deeds: Deeds::default(),
            pauses: Vec::new(),
            back: Vec::new(),
            upgraded: Vec::new(),
            recorded: 0,
            done: Done::default(),
        };
        let (changes, now) = (Changes::begin(work, &disk.control(), seed), Instant::now());
        let (died, started, round_at) = (now, now, now);
        Ok(Self { running, disk, changes, version, progress, died, started, rings: None, asked: None, round_at, lived })
    }

    /// All of it. What is left are the images.
    pub fn live(mut self, moments: &[Moment]) -> Result<Lived, Failure> {
        self.until_asked("enough")?;
        self.until_at_work()?;
        self.progress.step(&format!("{} moments", moments.len()));
        for (number, moment) in moments.iter().enumerate() {
            self.wait_for(moment)?;
            self.perform(moment, number + 1)?;
        }
        self.until_at_work()?;
        self.note_pause();
        self.progress.step("the loads end with what they have begun, and verify it");
        self.running.answer();
        self.until_asked("power")?;
        self.until_at_work()?;
        self.progress.step("the guest loses its power, and the disk's process is killed");
        self.running.cut_power()?;
        self.disk.kill()?;
        self.changes.end().map_err(Failure::Claim)?;
        self.lived.done = self.changes.done();
        // What it had announced before.
        while let Heard::Line(line) = self.running.listen(SILENCE_MAX)? {
            self.take(&line)?;
        }
        Ok(self.lived)
    }

    /// Waits for a moment, and while QEMU could lose the disk for good.
    fn wait_for(&mut self, moment: &Moment) -> Result<(), Failure> {
        loop {
            let stage = self.disk.stage()?;
            if stage == Stage::Serving && self.rings.is_none() {
                self.rings = Some(Instant::now());
                if self.disk.started > 1 {
                    self.lived.recorded += u64::from(self.disk.is_recorded()?);
                    self.lived.back.push(self.died.elapsed());
                }
            }
            let since = match moment.since {
                Since::Start => Some(self.started),
                Since::Rings => self.rings,
            };
            let connected = self.rings.is_some_and(|rings| rings.elapsed() >= CONNECTED);
            let allowed = connected || stage == Stage::Opening || self.version >= NOT_LOST;
            if allowed && since.is_some_and(|since| since.elapsed() >= moment.after) {
                return Ok(());
            }
            self.hear(STEP)?;
        }
    }

    fn perform(&mut self, moment: &Moment, number: usize) -> Result<(), Failure> {
        self.note_pause();
        let (stage, under_way) = (self.disk.stage()?, self.changes.done().under_way);
        match moment.deed {
            Deed::Kill => {
                // Its end takes its time as well.
                self.died = Instant::now();
                self.disk.kill()?;
                self.disk.start()?;
                (self.started, self.rings) = (Instant::now(), None);
                self.lived.deeds.kills += 1;
            }
            Deed::Upgrade => {
                let pause = self.disk.upgrade()?;
                self.lived.upgraded.push(pause);
                (self.started, self.rings) = (Instant::now(), Some(Instant::now()));
                self.lived.deeds.upgrades += 1;
            }
        }
        let deeds = &mut self.lived.deeds;
        deeds.opening += u64::from(stage == Stage::Opening);
        deeds.connecting += u64::from(stage == Stage::Listening);
        deeds.in_merge += u64::from(under_way == Some(Verb::Merge));
        deeds.in_snapshot += u64::from(under_way == Some(Verb::Snapshot));
        deeds.unanswered += 1;
        let (announced, rounds) = (self.lived.records.announced, self.lived.rounds);
        self.progress.live(&format!("moment {number}: {announced} records fsynced, {rounds} rounds verified"));
        Ok(())
    }

    /// How long the guest has waited since the last deed, unless it still does.
    fn note_pause(&mut self) {
        if let Some(longest) = self.lived.records.waited() {
            self.lived.pauses.push((std::mem::take(&mut self.lived.deeds.unanswered), longest));
        }
    }

    fn until_asked(&mut self, name: &str) -> Result<(), Failure> {
        while self.asked.as_deref() != Some(name) {
            self.hear(STEP)?;
            self.disk.stage()?;
        }
        Ok(())
    }

    fn until_at_work(&mut self) -> Result<(), Failure> {
        let enough = self.lived.records.announced + AT_WORK;
        while self.lived.records.announced < enough {
            self.hear(STEP)?;
            self.disk.stage()?;
        }
        Ok(())
    }

    /// Hears what is said within so long, and looks after what goes on beside.
    fn hear(&mut self, at_most: Duration) -> Result<(), Failure> {
        match self.running.listen(at_most)? {
            Heard::Line(line) => self.take(&line)?,
            Heard::Nothing => {}
            Heard::End => {
                self.running.ended()?;
                return Err(Failure::Claim("the guest has ended before it was told to".to_owned()));
            }
        }
        if let Some(why) = self.changes.failure() {
            return Err(Failure::Claim(format!("what goes on below the guest has failed: {why}")));
        }
        if self.lived.records.silent().max(self.round_at.elapsed()) > SILENCE_MAX {
            return Err(self.running.silent(SILENCE_MAX.as_secs()).into());
        }
        Ok(())
    }

    /// A line of the console.
    fn take(&mut self, line: &str) -> Result<(), Failure> {
        let Some((key, value)) = said(line) else { return Ok(()) };
        match (key, value) {
            ("queues", "2") | ("cache", "write back") => {}
            ("queues" | "cache", other) => return Err(Failure::Claim(format!("the guest's disk has {key} {other}"))),
            ("fsynced", number) => self.lived.records.announce(number).map_err(Failure::Claim)?,
            ("round", round) => self.take_round(round)?,
            ("ask", name) => self.asked = Some(name.to_owned()),
            ("fail", why) => return Err(Failure::Claim(format!("the guest has failed: {why}"))),
            ("verified" | "doing", what) => self.progress.detail(&format!("guest: {key} {what}")),
            _ => {}
        }
        Ok(())
    }

    /// What a load says when it has verified a round: its name and fio's error, KiB read, longest answer to a read, KiB
    /// written, longest answer to a write.
    fn take_round(&mut self, round: &str) -> Result<(), Failure> {
        let unclear = || Failure::Claim(format!("fio says what is not understood: {round:?}"));
        let words: Vec<&str> = round.split_whitespace().collect();
        let [_, "0", read, read_us, written, write_us] = words[..] else { return Err(unclear()) };
        let number = |word: &str| word.parse::<u64>().map_err(|_| unclear());
        if number(read)? == 0 || number(read)? != number(written)? {
            return Err(Failure::Claim(format!("fio has not verified all that it wrote: {round}")));
        }
        let lived = &mut self.lived;
        lived.rounds += 1;
        lived.verified_kib += number(read)?;
        let longest = Duration::from_micros(number(read_us)?.max(number(write_us)?));
        lived.longest = lived.longest.max(longest);
        self.round_at = Instant::now();
        Ok(())
    }
}
