//! A disk's process dies under a front end that lives, by a kill or of a request: the next one takes the rings over.
//!
//! `TAPLINE_TAKEOVER_ROUNDS` says how often the process is killed, on each kind of disk; `TAPLINE_TAKEOVER_SEED` where
//! the random numbers begin.
//!
//! Invariants checked: each request is answered once, and with an error only the one of which three processes have
//! died; what was answered is there for the next process, and is covered by its flush; the image is sound afterwards.

use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use xen::kernel::Offered;

use crate::bed::PERSISTENT;
use crate::data::{fill, get};
use crate::entry::{READ, WRITE, transfer};
use crate::front::Front;
use crate::victim::Victim;
use crate::{ERROR, OKAY};

const FLUSH: u8 = 3;
const VDEV: (&str, u32) = ("xvda", 51712);
/// Slots of a ring of one page.
const SLOTS: usize = 32;
/// Blocks of 4 KiB of every disk.
const BLOCKS: u64 = 4096;

/// Disks made, for their images' names.
static MADE: AtomicU32 = AtomicU32::new(0);

/// A disk, the program that serves it, and what its blocks hold.
struct Disk {
    program: PathBuf,
    words: Vec<String>,
    log: PathBuf,
    /// Of the process: what it is to die of.
    abort_at: Option<String>,
    front: Front,
    pages: Vec<Offered>,
    model: Vec<u8>,
}

impl Disk {
    /// A disk of a kind, `qcow2` or `qcow2-raw` on a parent, in the file system that the script has made.
    fn made(kind: &str, grants: &str) -> Option<Disk> {
        let Some(program) = std::env::var_os("TAPLINE_DISK").map(PathBuf::from) else {
            println!("not run: it needs Xen; TAPLINE_DISK names the program to be tried there");
            return None;
        };
        let (format, below) = kind.split_once('-').map_or((kind, None), |(format, below)| (format, Some(below)));
        let number = MADE.fetch_add(1, Ordering::Relaxed);
        let leaf = format!("{format}:/images/{number}-{kind}");
        let mut words = vec!["serve".to_owned(), leaf.clone()];
        match below {
            None => image(&program, &["create", &leaf, "--size", "16M"]),
            Some(below) => {
                let parent = format!("{below}:/images/below-{number}-{kind}");
                image(&program, &["create", &parent, "--size", "16M"]);
                image(&program, &["create", &leaf, "--parent", &parent]);
                words.extend(["--parent".to_owned(), parent]);
            }
        }
        words.extend(["--xen".to_owned(), format!("0/{}", VDEV.0), "--grants".to_owned(), grants.to_owned()]);
        let logs = std::env::var_os("TAPLINE_LOGS").map_or_else(std::env::temp_dir, PathBuf::from);
        let log = logs.join(format!("deaths-{number}-{kind}.log"));
        let front = Front::new(VDEV.1);
        let pages = (0..SLOTS).map(|_| front.pages(1)).collect();
        Some(Disk { program, words, log, abort_at: None, front, pages, model: vec![0; BLOCKS as usize] })
    }

    fn command(&self) -> Command {
        let mut command = Command::new(&self.program);
        command.args(&self.words).stdin(Stdio::null()).stdout(Stdio::null());
        if let Some(point) = &self.abort_at {
            command.env("TAPLINE_DISK_ABORT_AT", point);
        }
        command
    }

    fn serve(&self) -> Victim {
        Victim::of(self.command(), &self.log, VDEV.0)
    }

    /// Asks for a block to be written, with the page of that number.
    fn put_write(&mut self, page: usize, block: u64, version: u8) {
        fill(&self.pages[page].bytes, version);
        let grant = self.pages[page].pages[0];
        self.front.put(0, &transfer(WRITE, page as u64, block * 8, &[(grant, 0, 7)]));
        self.model[block as usize] = version;
    }

    /// Waits for these answers, each once and well.
    fn await_done(&mut self, mut ids: Vec<u64>) {
        let mut answers = self.front.await_answers(0, ids.len());
        answers.sort_unstable();
        ids.sort_unstable();
        let all: Vec<(u64, i16)> = answers.iter().map(|answer| (answer.0, answer.2)).collect();
        assert_eq!(all, ids.into_iter().map(|id| (id, OKAY)).collect::<Vec<_>>());
    }

    /// Reads these blocks, and finds what was written.
    fn check(&mut self, blocks: &[u64]) {
        for some in blocks.chunks(SLOTS) {
            for (page, &block) in some.iter().enumerate() {
                fill(&self.pages[page].bytes, 0xee);
                let grant = self.pages[page].pages[0];
                self.front.put(0, &transfer(READ, page as u64, block * 8, &[(grant, 0, 7)]));
            }
            self.front.push(0);
            self.await_done((0..some.len() as u64).collect());
            for (page, &block) in some.iter().enumerate() {
                let (found, version) = (get(&self.pages[page].bytes, 4096), self.model[block as usize]);
                assert!(found == [version; 4096], "block {block} holds {} for {version}", found[0]);
            }
        }
    }

    /// All is served and read once more; then it ends, and its image is sound.
    fn end(mut self, victim: Victim) {
        self.check(&(0..BLOCKS).collect::<Vec<u64>>());
        self.front.close();
        victim.end();
        let leaf = self.words[1].clone();
        if !leaf.starts_with("raw:") {
            let parent = self.words.iter().position(|word| word == "--parent");
            let parent: Vec<&str> = parent.map_or(Vec::new(), |at| vec!["--parent", &self.words[at + 1]]);
            image(&self.program, &[&["check", &leaf][..], &parent].concat());
        }
        let Disk { front, pages, .. } = self;
        drop(pages);
        front.leave();
    }
}

/// A job on images.
fn image(program: &Path, words: &[&str]) {
    let output = Command::new(program).arg("image").args(words).output().unwrap();
    assert!(output.status.success(), "{words:?}: {}", String::from_utf8_lossy(&output.stderr));
}

fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |value| value.parse().unwrap())
}

struct Dice(u64);

impl Dice {
    fn throw(&mut self, sides: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % sides
    }

    fn block(&mut self) -> u64 {
        self.throw(BLOCKS)
    }

    fn version(&mut self) -> u8 {
        self.throw(255) as u8 + 1
    }
}

/// Written and answered; more written and not answered; killed, taken over, flushed, read. The same again.
fn survives_kills(kind: &str, grants: &str) {
    let (rounds, seed) = (number("TAPLINE_TAKEOVER_ROUNDS", 12), number("TAPLINE_TAKEOVER_SEED", 7));
    println!("{kind}, {grants}: TAPLINE_TAKEOVER_ROUNDS={rounds} TAPLINE_TAKEOVER_SEED={seed}");
    let Some(mut disk) = Disk::made(kind, grants) else { return };
    let mut dice = Dice(seed);
    let mut victim = disk.serve();
    disk.front.connect(PERSISTENT);
    let (mut while_starting, mut unanswered) = (0, 0);
    for round in 0..rounds {
        let mut written = Vec::new();
        for page in 0..12 {
            written.push(dice.block());
            disk.put_write(page, written[page], dice.version());
        }
        disk.front.push(0);
        disk.await_done((0..12).collect());
        // Of these each block once: any of them may be the last to be done.
        let first = dice.block();
        for page in 12..20 {
            written.push((first + 37 * page as u64) % BLOCKS);
            disk.put_write(page, written[page], dice.version());
        }
        disk.front.push(0);
        std::thread::sleep(Duration::from_micros(dice.throw(1500)));
        victim.kill();
        let answered = disk.front.answers(0);
        unanswered += 8 - answered.len();
        if dice.throw(4) == 0 {
            let mut starting = disk.command().stderr(Stdio::null()).spawn().unwrap();
            std::thread::sleep(Duration::from_micros(dice.throw(40_000)));
            starting.kill().unwrap();
            starting.wait().unwrap();
            while_starting += 1;
        }
        victim = disk.serve();
        disk.front.put(0, &transfer(FLUSH, 99, 0, &[]));
        disk.front.push(0);
        let told: Vec<u64> = answered.iter().map(|answer| answer.0).collect();
        assert!(answered.iter().all(|answer| answer.2 == OKAY), "round {round}: {answered:?}");
        disk.await_done((12..20).chain([99]).filter(|id| !told.contains(id)).collect());
        for _ in 20..SLOTS {
            written.push(dice.block());
        }
        disk.check(&written);
    }
    println!(
        "{kind}: {rounds} rounds, {unanswered} requests without answer, {while_starting} killed while they started"
    );
    disk.end(victim);
}

#[test]
fn answered_writes_survive_the_process_on_raw() {
    survives_kills("raw", "persistent");
}

#[test]
fn answered_writes_survive_the_process_on_vhd() {
    survives_kills("vhd", "copy");
}

#[test]
fn answered_writes_survive_the_process_on_qcow2() {
    survives_kills("qcow2", "auto");
}

#[test]
fn answered_writes_survive_the_process_on_a_chain_of_vhd() {
    survives_kills("vhd-raw", "persistent");
}

#[test]
fn answered_writes_survive_the_process_on_a_chain_of_qcow2() {
    survives_kills("qcow2-vhd", "copy");
}

/// The block of the request that kills, which is offered in the middle of a full ring.
const FATAL: u64 = 17;

fn is_failed_once(kind: &str, operation: u8, point: &str, grants: &str) {
    println!("{kind}, {grants}: {point}");
    let Some(mut disk) = Disk::made(kind, grants) else { return };
    disk.abort_at = Some(format!("{point}:{}", FATAL * 8));
    let mut victim = disk.serve();
    disk.front.connect(PERSISTENT);
    for block in 0..SLOTS as u64 - 1 {
        if block == FATAL && operation == READ {
            let grant = disk.pages[FATAL as usize].pages[0];
            disk.front.put(0, &transfer(READ, FATAL, FATAL * 8, &[(grant, 0, 7)]));
        } else {
            disk.put_write(block as usize, block, 100);
        }
    }
    disk.front.put(0, &transfer(FLUSH, 31, 0, &[]));
    disk.front.push(0);
    for _ in 0..3 {
        let status = victim.wait();
        assert_eq!(status.signal(), Some(6), "{}", victim.said());
        victim = disk.serve();
    }
    let mut answers = disk.front.await_answers(0, SLOTS);
    answers.sort_unstable();
    let expected = |id| if id == FATAL { ERROR } else { OKAY };
    let all: Vec<(u64, i16)> = answers.iter().map(|answer| (answer.0, answer.2)).collect();
    assert_eq!(all, (0..SLOTS as u64).map(|id| (id, expected(id))).collect::<Vec<_>>());
    let said = victim.said();
    let asked = if operation == READ { "a read" } else { "a write" };
    assert!(said.contains(&format!("{asked} of 4096 bytes at sector {}, queue 0", FATAL * 8)), "{said}");
    assert!(said.contains("3 processes of this disk in a row have died of it"), "{said}");

    // It goes on as any disk does, with a process that was not told to die.
    disk.abort_at = None;
    victim.kill();
    victim = disk.serve();
    if point == "begin" {
        disk.model[FATAL as usize] = 0;
    }
    disk.end(victim);
}

#[test]
fn a_request_of_which_the_process_dies_before_it_is_begun_is_failed_once() {
    is_failed_once("raw", WRITE, "begin", "persistent");
    is_failed_once("qcow2", WRITE, "begin", "copy");
    is_failed_once("vhd", READ, "begin", "map");
}

#[test]
fn a_request_of_which_the_process_dies_when_it_has_been_done_is_failed_once() {
    is_failed_once("raw", READ, "answer", "copy");
    is_failed_once("qcow2", WRITE, "answer", "persistent");
    is_failed_once("vhd", WRITE, "answer", "map");
}
