//! The guest's life: it boots and works, its disk's process is killed repeatedly, and it loses its power in the end.
//!
//! Uses the guest's messages (`testbed/guest/jobs/survive.sh`); `autopsy` checks the images. A guest that makes no
//! progress within a generous time is an error, and so is any error that it reports.

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use vm::qemu::version::Version;

use crate::guest::{CPUS, ConsoleEvent, Guest, Job, Running, protocol_line};
use crate::progress::Progress;
use crate::tool;

use super::changes::{ChangeCounts, ChangeVerb, Changes};
use super::disk::{Disk, Stage};
use super::moments::{Deed, Moment, Since};
use super::records::{Records, SLOTS};
use super::{Failure, chain};

/// Size in MiB that each of the two loads writes and verifies in a round.
const ROUND_MIB: u64 = 24;
const SIZE: &str = "1G";

/// Timeout of the guest: ten times more than anything it does with all CPUs busy.
const SILENCE_MAX: Duration = Duration::from_secs(180);

/// Polling interval for the next time of an action.
const STEP: Duration = Duration::from_millis(2);

/// The first QEMU that keeps a disk whose process dies while it connects (decision 0014).
const NOT_LOST: Version = Version(9, 1);

/// Time after the start of the rings when a QEMU that may lose a disk has certainly connected.
const CONNECTED: Duration = Duration::from_millis(50);

/// Number of records after which the guest counts as working.
const AT_WORK: u64 = 5;

/// The resources of a trial.
pub struct Bed<'b> {
    pub guest: &'b Guest,
    pub version: Version,
    pub queue_size: Option<u16>,
    pub program: &'b Path,
    /// The directory of images and logs, and that of sockets and redo logs.
    pub work: &'b Path,
    pub run: &'b Path,
}

pub struct Trial<'a> {
    running: Running,
    disk: Disk,
    changes: Changes,
    version: Version,
    progress: &'a Progress,
    /// When the previous process was killed, the current one was started, and its rings were seen running.
    died: Instant,
    started: Instant,
    rings: Option<Instant>,
    question: Option<String>,
    /// When a load has last reported.
    round_at: Instant,
    lived: Lived,
}

/// The results of a trial.
pub struct Lived {
    pub records: Records,
    /// Rounds that fio has written and verified, and its longest wait for a response.
    pub rounds: u64,
    pub verified_kib: u64,
    pub longest: Duration,
    pub deeds: Deeds,
    /// Longest time from one fsynced record to the next, with the number of actions in between.
    pub pauses: Vec<(u64, Duration)>,
    /// Times from the death of a process until the guest's rings ran under the next one.
    pub back: Vec<Duration>,
    /// Times that requests have waited during upgrades.
    pub upgraded: Vec<Duration>,
    /// Number of upgrades in which the front-end recorded requests in flight.
    pub recorded: u64,
    pub done: ChangeCounts,
}

/// Numbers of actions by the progress of the process.
#[derive(Clone, Copy, Debug, Default)]
pub struct Deeds {
    pub kills: u64,
    pub upgrades: u64,
    pub opening: u64,
    pub connecting: u64,
    pub in_merge: u64,
    pub in_snapshot: u64,
    /// Number of actions since the guest was last seen working.
    unanswered: u64,
}

impl<'a> Trial<'a> {
    /// Creates an image, starts a process for it and boots the guest.
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
            done: ChangeCounts::default(),
        };
        let (changes, now) = (Changes::begin(work, &disk.control(), seed), Instant::now());
        let (died, started, round_at) = (now, now, now);
        Ok(Self {
            running,
            disk,
            changes,
            version,
            progress,
            died,
            started,
            rings: None,
            question: None,
            round_at,
            lived,
        })
    }

    /// Runs the whole trial; the images remain.
    pub fn live(mut self, moments: &[Moment]) -> Result<Lived, Failure> {
        self.wait_for_question("enough")?;
        self.wait_for_work()?;
        self.progress.step(&format!("{} moments", moments.len()));
        for (number, moment) in moments.iter().enumerate() {
            self.wait_for(moment)?;
            self.perform(moment, number + 1)?;
        }
        self.wait_for_work()?;
        self.note_pause();
        self.progress.step("the loads end with what they have begun, and verify it");
        self.running.answer();
        self.wait_for_question("power")?;
        self.wait_for_work()?;
        self.progress.step("the guest loses its power, and the disk's process is killed");
        self.running.cut_power()?;
        self.disk.kill()?;
        self.changes.end().map_err(Failure::Claim)?;
        self.lived.done = self.changes.done();
        // Messages that were sent before.
        while let ConsoleEvent::Line(line) = self.running.listen(SILENCE_MAX)? {
            self.process_line(&line)?;
        }
        Ok(self.lived)
    }

    /// Waits for the next action, and longer while QEMU could lose the disk.
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
            self.process_messages(STEP)?;
        }
    }

    fn perform(&mut self, moment: &Moment, number: usize) -> Result<(), Failure> {
        self.note_pause();
        let (stage, under_way) = (self.disk.stage()?, self.changes.done().under_way);
        match moment.deed {
            Deed::Kill => {
                // Its end takes time as well.
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
        deeds.in_merge += u64::from(under_way == Some(ChangeVerb::Merge));
        deeds.in_snapshot += u64::from(under_way == Some(ChangeVerb::Snapshot));
        deeds.unanswered += 1;
        let (announced, rounds) = (self.lived.records.announced, self.lived.rounds);
        self.progress.live(&format!("moment {number}: {announced} records fsynced, {rounds} rounds verified"));
        Ok(())
    }

    /// Records how long the guest has waited since the last action, unless it is still waiting.
    fn note_pause(&mut self) {
        if let Some(longest) = self.lived.records.waited() {
            self.lived.pauses.push((std::mem::take(&mut self.lived.deeds.unanswered), longest));
        }
    }

    fn wait_for_question(&mut self, name: &str) -> Result<(), Failure> {
        while self.question.as_deref() != Some(name) {
            self.process_messages(STEP)?;
            self.disk.stage()?;
        }
        Ok(())
    }

    fn wait_for_work(&mut self) -> Result<(), Failure> {
        let enough = self.lived.records.announced + AT_WORK;
        while self.lived.records.announced < enough {
            self.process_messages(STEP)?;
            self.disk.stage()?;
        }
        Ok(())
    }

    /// Processes messages for at most this time, and checks the thread that changes the chain.
    fn process_messages(&mut self, at_most: Duration) -> Result<(), Failure> {
        match self.running.listen(at_most)? {
            ConsoleEvent::Line(line) => self.process_line(&line)?,
            ConsoleEvent::Nothing => {}
            ConsoleEvent::End => {
                self.running.ended()?;
                return Err(Failure::Claim("the guest has ended prematurely".to_owned()));
            }
        }
        if let Some(why) = self.changes.failure() {
            return Err(Failure::Claim(format!("the changes below the guest have failed: {why}")));
        }
        if self.lived.records.silent().max(self.round_at.elapsed()) > SILENCE_MAX {
            return Err(self.running.silent(SILENCE_MAX.as_secs()).into());
        }
        Ok(())
    }

    /// Processes a line of the console.
    fn process_line(&mut self, line: &str) -> Result<(), Failure> {
        let Some((key, value)) = protocol_line(line) else { return Ok(()) };
        match (key, value) {
            ("queues", "2") | ("cache", "write back") => {}
            ("queues" | "cache", other) => return Err(Failure::Claim(format!("the guest's disk has {key} {other}"))),
            ("fsynced", number) => self.lived.records.announce(number).map_err(Failure::Claim)?,
            ("round", round) => self.process_round(round)?,
            ("ask", name) => self.question = Some(name.to_owned()),
            ("fail", why) => return Err(Failure::Claim(format!("the guest has failed: {why}"))),
            ("verified" | "doing", what) => self.progress.detail(&format!("guest: {key} {what}")),
            _ => {}
        }
        Ok(())
    }

    /// Processes the report of a load that has verified a round: its name and fio's error, KiB read, longest read, KiB
    /// written, longest write.
    fn process_round(&mut self, round: &str) -> Result<(), Failure> {
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
