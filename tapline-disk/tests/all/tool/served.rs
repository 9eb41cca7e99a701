//! A disk served by the program under test.

#![allow(dead_code, reason = "each test uses its part")]

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, Stdio};

use rustix::process::{Pid, Signal, kill_process};

use super::{Room, TAPLINE};

/// A disk that is served until it is stopped.
pub struct Disk {
    pub child: Child,
    log: BufReader<std::process::ChildStderr>,
    pub said: String,
}

impl Disk {
    /// Starts it and waits until it listens.
    pub fn serve(room: &Room, words: &str) -> Disk {
        let mut command = room.command(TAPLINE);
        command.arg("serve").args(words.split_whitespace());
        Disk::start(command)
    }

    /// Starts a given command.
    pub fn start(mut command: Command) -> Disk {
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        // The receiving socket belongs to the child.
        drop(command);
        let log = BufReader::new(child.stderr.take().unwrap());
        let mut disk = Disk { child, log, said: String::new() };
        disk.wait_for("serving ");
        disk
    }

    /// Reads the log up to a line that contains `word`.
    pub fn wait_for(&mut self, word: &str) -> String {
        loop {
            let mut line = String::new();
            let len = self.log.read_line(&mut line).unwrap();
            assert!(len > 0, "the log ended before '{word}': {}", self.said);
            self.said.push_str(&line);
            if line.contains(word) {
                return line;
            }
        }
    }

    pub fn signal(&self, signal: Signal) {
        let pid = Pid::from_raw(i32::try_from(self.child.id()).unwrap()).unwrap();
        kill_process(pid, signal).unwrap();
    }

    /// Returns all output, until every process that has its log open has exited.
    pub fn rest_of_log(&mut self) -> String {
        self.log.read_to_string(&mut self.said).unwrap();
        std::mem::take(&mut self.said)
    }

    /// Stops it; returns its exit code and all output.
    pub fn stop(mut self) -> (Option<i32>, String) {
        self.signal(Signal::TERM);
        self.log.read_to_string(&mut self.said).unwrap();
        let status = self.child.wait().unwrap();
        (status.code(), std::mem::take(&mut self.said))
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        // It only runs after a failed test.
        self.child.kill().unwrap_or_default();
        self.child.wait().unwrap();
    }
}
