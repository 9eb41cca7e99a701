//! A disk keeps running whatever happens to its log: full, without a reader, or with one that does not read.

use std::fs::File;
use std::io::Read;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::pipe::{PipeFlags, fcntl_setpipe_size, pipe_with};
use rustix::process::{Pid, Signal, kill_process};

use crate::tool;
use crate::tool::nbd::{BLOCK, Nbd};
use crate::tool::{Room, TAPLINE};

/// The time limit for everything; a test that waits longer fails.
const PATIENCE: Duration = Duration::from_secs(60);

/// A disk with this log, killed at the end of the test.
struct Disk(Child);

impl Disk {
    fn serve(room: &Room, log: impl Into<Stdio>) -> (Disk, Nbd) {
        room.done("image create qcow2:a.qcow2 --size 16M");
        let mut command = Command::new(TAPLINE);
        command.args(["serve", "qcow2:a.qcow2", "--nbd", "./nbd.sock"]).current_dir(room.path());
        let disk = Disk(command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log).spawn().unwrap());
        let begun = Instant::now();
        loop {
            if let Ok(client) = Nbd::connect(&room.file("nbd.sock")) {
                return (disk, client);
            }
            assert!(begun.elapsed() < PATIENCE, "it does not serve");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.0), signal).unwrap();
    }

    /// Makes it log many lines of statistics, and checks that it responds meanwhile.
    fn log_much(&self, client: &mut Nbd) {
        for _ in 0..64 {
            self.signal(Signal::USR1);
            client.read(0, BLOCK).unwrap();
        }
    }

    /// Returns its exit code after a request to stop; `None` if it has not exited.
    fn stop(&mut self) -> Option<i32> {
        self.signal(Signal::TERM);
        let begun = Instant::now();
        while begun.elapsed() < PATIENCE {
            if let Some(status) = self.0.try_wait().unwrap() {
                return status.code();
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        None
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        // It only runs after a failed test.
        self.0.kill().unwrap_or_default();
        self.0.wait().unwrap();
    }
}

fn use_it(client: &mut Nbd) {
    client.write(0, &[7; BLOCK]).unwrap();
    client.flush().unwrap();
    assert_eq!(client.read(0, BLOCK).unwrap(), [7; BLOCK]);
}

/// A pipe that holds very little.
fn narrow_pipe() -> (File, File) {
    let (reader, writer) = pipe_with(PipeFlags::CLOEXEC).unwrap();
    fcntl_setpipe_size(&writer, 4096).unwrap();
    (reader.into(), writer.into())
}

/// Reads up to a word.
fn wait_for(log: &mut impl Read, word: &str) -> String {
    let (mut said, mut bytes) = (String::new(), [0; 4096]);
    while !said.contains(word) {
        let len = log.read(&mut bytes).unwrap();
        assert!(len > 0, "the log has ended before '{word}': {said}");
        said.push_str(&String::from_utf8_lossy(&bytes[..len]));
    }
    said
}

#[test]
fn a_full_log_does_not_stop_a_disk() {
    let room = Room::new();
    let (mut disk, mut client) = Disk::serve(&room, File::options().write(true).open("/dev/full").unwrap());
    disk.log_much(&mut client);
    use_it(&mut client);
    assert_eq!(disk.stop(), Some(0));
}

#[test]
fn a_closed_log_pipe_does_not_stop_a_disk() {
    let room = Room::new();
    let (mut reader, writer) = narrow_pipe();
    let (mut disk, mut client) = Disk::serve(&room, writer);
    wait_for(&mut reader, "serving ");
    drop(reader);
    disk.log_much(&mut client);
    use_it(&mut client);
    assert_eq!(disk.stop(), Some(0));
}

#[test]
fn a_stalled_log_reader_does_not_delay_a_disk_and_learns_of_lost_lines() {
    let room = Room::new();
    let (mut reader, writer) = narrow_pipe();
    let (mut disk, mut client) = Disk::serve(&room, writer);
    wait_for(&mut reader, "serving ");
    disk.log_much(&mut client);
    use_it(&mut client);
    // There is space again, and there are more lines to write.
    let mut before = [0; 4096];
    let len = reader.read(&mut before).unwrap();
    disk.signal(Signal::USR1);
    let said = String::from_utf8_lossy(&before[..len]).into_owned() + &wait_for(&mut reader, "could not be logged");
    let missing: u64 = said.split(" lines could").next().unwrap().rsplit(' ').next().unwrap().parse().unwrap();
    let logged = u64::try_from(said.matches("statistics: ").count()).unwrap();
    // Signals that arrive at the same time count once.
    assert!(missing > 0 && missing + logged <= 66, "{missing} of 64 and {logged}: {said}");
    // It also stops while nothing reads its log.
    disk.log_much(&mut client);
    assert_eq!(disk.stop(), Some(0));
}

#[test]
fn printing_fails_without_space_but_not_on_a_closed_pipe() {
    let room = Room::new();
    room.done("image create qcow2:a.qcow2 --size 16M");
    let info = |out: Stdio| {
        let mut command = Command::new(TAPLINE);
        command.args(["image", "info", "qcow2:a.qcow2"]).current_dir(room.path()).stdout(out);
        tool::Said::of(&command.output().unwrap())
    };
    let full = info(File::options().write(true).open("/dev/full").unwrap().into());
    assert!(full.code == Some(4) && full.err.contains("No space left"), "{full:?}");
    let (reader, writer) = narrow_pipe();
    drop(reader);
    let gone = info(writer.into());
    assert!(gone.code == Some(0) && gone.err.is_empty(), "{gone:?}");
}
