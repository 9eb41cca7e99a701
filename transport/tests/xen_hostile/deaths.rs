//! A disk's process dies while a front end is connected, killed by the test or by a request, and the next one takes
//! over the rings.
//!
//! `TAPLINE_TAKEOVER_ROUNDS` sets the number of kills on each kind of disk; `TAPLINE_TAKEOVER_SEED` sets the seed of
//! the random numbers.
//!
//! Invariants checked: each request is answered once, and only the one that killed three processes with an error; the
//! next process reads the answered writes, and its flush covers them; the image is consistent afterwards.

use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use fastrand::Rng;
use xen::kernel::GrantedPages;

use crate::data::{fill, get};
use crate::disk_process::DiskProcess;
use crate::entry::{READ, WRITE, transfer};
use crate::fixture::PERSISTENT;
use crate::front::Front;
use crate::{ERROR, OKAY};

const FLUSH: u8 = 3;
const VDEV: (&str, u32) = ("xvda", 51712);
/// Slots of a ring of one page.
const SLOTS: usize = 32;
/// Number of 4 KiB blocks of every disk.
const BLOCKS: u64 = 4096;

/// Number of created disks, for the names of their images.
static CREATED: AtomicU32 = AtomicU32::new(0);

/// A disk, the program that serves it, and the expected contents of its blocks.
struct Disk {
    program: PathBuf,
    words: Vec<String>,
    log: PathBuf,
    /// The point and the sector at which the process aborts.
    abort_at: Option<String>,
    front: Front,
    pages: Vec<GrantedPages>,
    model: Vec<u8>,
}

impl Disk {
    /// Creates a disk in the file system that the script has created. A `kind` such as `qcow2-raw` has a parent.
    fn create(kind: &str, grants: &str) -> Option<Disk> {
        let Some(program) = std::env::var_os("TAPLINE_DISK").map(PathBuf::from) else {
            println!("skipped: needs Xen; TAPLINE_DISK names the program to test there");
            return None;
        };
        let (format, below) = kind.split_once('-').map_or((kind, None), |(format, below)| (format, Some(below)));
        let number = CREATED.fetch_add(1, Ordering::Relaxed);
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

    fn serve(&self) -> DiskProcess {
        DiskProcess::of(self.command(), &self.log, VDEV.0)
    }

    /// Submits a write of a block, with the page of that number.
    fn put_write(&mut self, page: usize, block: u64, version: u8) {
        fill(&self.pages[page].bytes, version);
        let grant = self.pages[page].pages[0];
        self.front.put(0, &transfer(WRITE, page as u64, block * 8, &[(grant, 0, 7)]));
        self.model[block as usize] = version;
    }

    /// Waits for these responses; each must come once and report success.
    fn await_done(&mut self, mut ids: Vec<u64>) {
        let mut answers = self.front.await_answers(0, ids.len());
        answers.sort_unstable();
        ids.sort_unstable();
        let all: Vec<(u64, i16)> = answers.iter().map(|answer| (answer.0, answer.2)).collect();
        assert_eq!(all, ids.into_iter().map(|id| (id, OKAY)).collect::<Vec<_>>());
    }

    /// Reads these blocks, and checks the contents.
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
                assert!(found == [version; 4096], "block {block} holds {} instead of {version}", found[0]);
            }
        }
    }

    /// Reads and checks the whole disk; then ends the process, and checks the image.
    fn end(mut self, process: DiskProcess) {
        self.check(&(0..BLOCKS).collect::<Vec<u64>>());
        self.front.close();
        process.end();
        let leaf = self.words[1].clone();
        if !leaf.starts_with("raw:") {
            let parent = self.words.iter().position(|word| word == "--parent");
            let parent: Vec<&str> = parent.map_or(Vec::new(), |at| vec!["--parent", &self.words[at + 1]]);
            image(&self.program, &[&["check", &leaf][..], &parent].concat());
        }
        let Disk { front, pages, .. } = self;
        drop(pages);
        front.remove_nodes();
    }
}

/// Runs a subcommand of `image`.
fn image(program: &Path, words: &[&str]) {
    let output = Command::new(program).arg("image").args(words).output().unwrap();
    assert!(output.status.success(), "{words:?}: {}", String::from_utf8_lossy(&output.stderr));
}

fn variable(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |value| value.parse().unwrap())
}

/// Repeats: writes with responses, writes without, a kill, a takeover, a flush, and reads.
fn kill_and_take_over(kind: &str, grants: &str) {
    let (rounds, seed) = (variable("TAPLINE_TAKEOVER_ROUNDS", 12), variable("TAPLINE_TAKEOVER_SEED", 7));
    println!("{kind}, {grants}: TAPLINE_TAKEOVER_ROUNDS={rounds} TAPLINE_TAKEOVER_SEED={seed}");
    let Some(mut disk) = Disk::create(kind, grants) else { return };
    let mut random = Rng::with_seed(seed);
    let mut process = disk.serve();
    disk.front.connect(PERSISTENT);
    let (mut while_starting, mut unanswered) = (0, 0);
    for round in 0..rounds {
        let mut written = Vec::new();
        for page in 0..12 {
            written.push(random.u64(..BLOCKS));
            disk.put_write(page, written[page], random.u8(1..));
        }
        disk.front.push(0);
        disk.await_done((0..12).collect());
        // Each block only once, because these writes complete in any order.
        let first = random.u64(..BLOCKS);
        for page in 12..20 {
            written.push((first + 37 * page as u64) % BLOCKS);
            disk.put_write(page, written[page], random.u8(1..));
        }
        disk.front.push(0);
        std::thread::sleep(Duration::from_micros(random.u64(..1500)));
        process.kill();
        let answered = disk.front.responses(0);
        unanswered += 8 - answered.len();
        if random.u64(..4) == 0 {
            let mut starting = disk.command().stderr(Stdio::null()).spawn().unwrap();
            std::thread::sleep(Duration::from_micros(random.u64(..40_000)));
            starting.kill().unwrap();
            starting.wait().unwrap();
            while_starting += 1;
        }
        process = disk.serve();
        disk.front.put(0, &transfer(FLUSH, 99, 0, &[]));
        disk.front.push(0);
        let ids: Vec<u64> = answered.iter().map(|answer| answer.0).collect();
        assert!(answered.iter().all(|answer| answer.2 == OKAY), "round {round}: {answered:?}");
        disk.await_done((12..20).chain([99]).filter(|id| !ids.contains(id)).collect());
        for _ in 20..SLOTS {
            written.push(random.u64(..BLOCKS));
        }
        disk.check(&written);
    }
    println!(
        "{kind}: {rounds} rounds, {unanswered} unanswered requests, {while_starting} processes killed while starting"
    );
    disk.end(process);
}

#[test]
fn answered_writes_survive_the_process_on_raw() {
    kill_and_take_over("raw", "persistent");
}

#[test]
fn answered_writes_survive_the_process_on_vhd() {
    kill_and_take_over("vhd", "copy");
}

#[test]
fn answered_writes_survive_the_process_on_qcow2() {
    kill_and_take_over("qcow2", "auto");
}

#[test]
fn answered_writes_survive_the_process_on_a_chain_of_vhd() {
    kill_and_take_over("vhd-raw", "persistent");
}

#[test]
fn answered_writes_survive_the_process_on_a_chain_of_qcow2() {
    kill_and_take_over("qcow2-vhd", "copy");
}

/// The block of the fatal request, which is submitted in the middle of a full ring.
const FATAL: u64 = 17;

fn check_failed_once(kind: &str, operation: u8, point: &str, grants: &str) {
    println!("{kind}, {grants}: {point}");
    let Some(mut disk) = Disk::create(kind, grants) else { return };
    disk.abort_at = Some(format!("{point}:{}", FATAL * 8));
    let mut process = disk.serve();
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
        let status = process.wait();
        assert_eq!(status.signal(), Some(6), "{}", process.log_text());
        process = disk.serve();
    }
    let mut answers = disk.front.await_answers(0, SLOTS);
    answers.sort_unstable();
    let expected = |id| if id == FATAL { ERROR } else { OKAY };
    let all: Vec<(u64, i16)> = answers.iter().map(|answer| (answer.0, answer.2)).collect();
    assert_eq!(all, (0..SLOTS as u64).map(|id| (id, expected(id))).collect::<Vec<_>>());
    let log = process.log_text();
    let operation_name = if operation == READ { "a read" } else { "a write" };
    assert!(log.contains(&format!("{operation_name} of 4096 bytes at sector {}, queue 0", FATAL * 8)), "{log}");
    assert!(log.contains("3 processes of this disk in a row have died of it"), "{log}");

    // A process that does not abort serves the disk normally.
    disk.abort_at = None;
    process.kill();
    process = disk.serve();
    if point == "begin" {
        disk.model[FATAL as usize] = 0;
    }
    disk.end(process);
}

#[test]
fn a_request_that_kills_the_process_before_it_starts_is_failed_once() {
    check_failed_once("raw", WRITE, "begin", "persistent");
    check_failed_once("qcow2", WRITE, "begin", "copy");
    check_failed_once("vhd", READ, "begin", "map");
}

#[test]
fn a_request_that_kills_the_process_after_it_is_done_is_failed_once() {
    check_failed_once("raw", READ, "answer", "copy");
    check_failed_once("qcow2", WRITE, "answer", "persistent");
    check_failed_once("vhd", WRITE, "answer", "map");
}
