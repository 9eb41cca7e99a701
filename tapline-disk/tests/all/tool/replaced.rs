//! A disk whose process is upgraded while it is served: processes after the first are not children of the test.

#![allow(dead_code, reason = "each test uses its part")]

use std::path::PathBuf;
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open};
use serde_json::{Value, json};

use super::control::Control;
use super::served::Disk;
use super::{Room, TAPLINE};

/// No test depends on how fast a process starts, so clients may wait for long.
pub const PAUSE_MAX: u64 = 60_000_000;

/// A disk, and the process that serves it now.
pub struct Replaced {
    pub first: Disk,
    pub pid: Pid,
    control: PathBuf,
}

impl Replaced {
    /// Serves a disk with a control socket, `control.sock` in the room.
    pub fn serve(room: &Room, words: &str) -> Replaced {
        Replaced::of(room, Disk::serve(room, &format!("{words} --control control.sock")))
    }

    pub fn of(room: &Room, first: Disk) -> Replaced {
        let pid = pid_of(&json!(first.child.id()));
        Replaced { first, pid, control: room.file("control.sock") }
    }

    /// Requests an upgrade and returns at once; the response is returned by the thread.
    pub fn upgrade(&self) -> JoinHandle<Value> {
        self.upgrade_to(TAPLINE)
    }

    pub fn upgrade_to(&self, program: &str) -> JoinHandle<Value> {
        let request = json!({ "verb": "upgrade", "program": program, "pause_max": PAUSE_MAX });
        // Requested before this returns: a process that is killed next has received the request, even if the thread
        // starts late.
        let mut control = Control::connect(&self.control);
        control.send(&request);
        std::thread::spawn(move || control.next_line().unwrap_or(json!({ "ended": true })))
    }

    /// The process that has taken over, according to the response, serves the disk from now on. Returns the time that
    /// requests have waited.
    pub fn replaced_by(&mut self, answer: &Value) -> Duration {
        let told = answer.get("ok").unwrap_or_else(|| panic!("{answer}"));
        let before = std::mem::replace(&mut self.pid, pid_of(&told["pid"]));
        wait_until_gone(before);
        let version = Control::connect(&self.control).done(&json!({ "verb": "version" }));
        assert_eq!(version["pid"], told["pid"], "another process answers");
        Duration::from_micros(told["pause_us"].as_u64().unwrap())
    }

    /// Stops it; returns the output of all of its processes.
    pub fn stop(mut self) -> String {
        kill_process(self.pid, Signal::TERM).unwrap();
        let said = self.first.rest_of_log();
        assert!(said.contains("stopped: all requests are completed and flushed"), "{said}");
        assert_eq!(self.first.child.wait().unwrap().code(), Some(0), "{said}");
        said
    }
}

impl Drop for Replaced {
    fn drop(&mut self) {
        // It only exists after a failed test.
        kill_process(self.pid, Signal::KILL).ok();
    }
}

pub fn pid_of(number: &Value) -> Pid {
    Pid::from_raw(i32::try_from(number.as_u64().unwrap()).unwrap()).unwrap()
}

/// Waits until a process has exited, whatever its parent.
pub fn wait_until_gone(pid: Pid) {
    let Ok(process) = pidfd_open(pid, PidfdFlags::empty()) else { return };
    let minute = Timespec { tv_sec: 60, tv_nsec: 0 };
    assert_eq!(poll(&mut [PollFd::new(&process, PollFlags::IN)], Some(&minute)).unwrap(), 1, "{pid:?} does not end");
}
