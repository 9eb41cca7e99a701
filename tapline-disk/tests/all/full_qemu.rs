//! A real QEMU whose guest writes to a disk without space: its monitor responds, the guest can be stopped and reset,
//! and the disk's process upgraded, while the write waits; the write is completed once there is space.

#![allow(clippy::cast_possible_truncation, reason = "the numbers are the test's own, and small")]

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use rustix::process::Signal;
use serde_json::{Value, json};

use crate::tool::control::Control;
use crate::tool::served::Disk;
use crate::tool::small::Small;

/// The sector to which the boot sector writes itself.
const TARGET_SECTOR: u64 = 0x2000;
const TARGET: usize = 0x2000 * 512;
/// The time limit for a monitor's response, on a busy machine.
const PATIENCE: Duration = Duration::from_secs(120);

/// A file system that is full, with a disk on it that boots.
struct Bed {
    small: Small,
}

impl Bed {
    fn new() -> Option<Bed> {
        let small = Small::new(c"size=8m")?;
        small.room.done("image create raw:small/a --size 16M");
        let sector = testkit::firmware::writes_itself_to(TARGET_SECTOR);
        fs::File::options().write(true).open(small.room.file("small/a")).unwrap().write_all(&sector).unwrap();
        small.fill();
        Some(Bed { small })
    }

    fn serve(&self) -> (Disk, Control) {
        let (disk, mut watcher) = self.small.serve("raw:small/a --vhost-user vm.sock --when-full wait");
        watcher.done(&json!({ "verb": "watch", "id": 7 }));
        (disk, watcher)
    }

    fn boot(&self) -> Qemu {
        let (socket, monitor) = (self.small.room.file("vm.sock"), self.small.room.file("monitor"));
        let child = Command::new("qemu-system-x86_64")
            .args(["-nodefaults", "-display", "none", "-m", "64", "-accel", "kvm", "-accel", "tcg"])
            .args(["-object", "memory-backend-memfd,id=ram,size=64M,share=on", "-machine", "q35,memory-backend=ram"])
            .args(["-chardev", &format!("socket,id=disk,path={},reconnect=1", socket.display())])
            .args(["-device", "vhost-user-blk-pci,chardev=disk,num-queues=1,bootindex=0"])
            .args(["-device", "isa-debug-exit,iobase=0x501,iosize=1"])
            .args(["-qmp", &format!("unix:{},server=on,wait=off", monitor.display())])
            .stdin(Stdio::null())
            .spawn()
            .expect("this test needs qemu-system-x86_64 (Debian: qemu-system-x86)");
        Qemu { child, monitor: None, path: monitor }
    }
}

struct Qemu {
    child: Child,
    monitor: Option<BufReader<UnixStream>>,
    path: std::path::PathBuf,
}

impl Qemu {
    /// Sends a command to the monitor, and waits for its response.
    fn ask(&mut self, command: &str) {
        if self.monitor.is_none() {
            let stream = UnixStream::connect(&self.path).unwrap();
            stream.set_read_timeout(Some(PATIENCE)).unwrap();
            self.monitor = Some(BufReader::new(stream));
            self.ask("qmp_capabilities");
        }
        let monitor = self.monitor.as_mut().unwrap();
        writeln!(monitor.get_mut(), "{}", json!({ "execute": command, "id": command })).unwrap();
        loop {
            let mut line = String::new();
            let len = monitor.read_line(&mut line).unwrap_or_else(|error| panic!("{command} hangs: {error}"));
            assert!(len > 0, "{command}: the monitor is gone");
            let said: Value = serde_json::from_str(&line).unwrap();
            if said["id"] == command {
                assert!(said.get("return").is_some(), "{said}");
                return;
            }
        }
    }

    /// Checks that the guest exits because the firmware's write has succeeded.
    fn ends_well(mut self) {
        // isa-debug-exit exits with twice the value plus one.
        assert_eq!(self.child.wait().unwrap().code(), Some(16 * 2 + 1));
    }
}

impl Drop for Qemu {
    fn drop(&mut self) {
        // It only exists after a failed test.
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

/// Waits until the disk reports this state.
fn wait_for(watcher: &mut Control, state: &str) {
    loop {
        let line = watcher.next_line().expect("the disk has ended");
        if line["event"]["state"] == state {
            return;
        }
    }
}

fn holds_what_was_written(bed: &Bed) {
    let image = bed.small.room.read("small/a");
    assert!(image[TARGET..TARGET + 512] == image[..512]);
}

#[test]
#[ignore = "slow: run by `make test-all`"]
fn the_monitor_of_a_waiting_guest_responds_and_can_reset_it() {
    let Some(bed) = Bed::new() else { return };
    let (disk, mut watcher) = bed.serve();
    let mut qemu = bed.boot();
    wait_for(&mut watcher, "full");
    qemu.ask("stop");
    wait_for(&mut watcher, "resumed");
    qemu.ask("cont");
    wait_for(&mut watcher, "full");
    qemu.ask("system_reset");
    // It boots again, and writes again.
    wait_for(&mut watcher, "resumed");
    wait_for(&mut watcher, "full");
    bed.small.make_space();
    Control::connect(&bed.small.room.file("control.sock")).done(&json!({ "verb": "space" }));
    qemu.ends_well();
    assert_eq!(disk.stop().0, Some(0));
    holds_what_was_written(&bed);
}

#[test]
#[ignore = "slow: run by `make test-all`"]
fn a_write_that_waits_for_space_survives_the_disks_process() {
    for signal in [Signal::TERM, Signal::KILL] {
        let Some(bed) = Bed::new() else { return };
        let (mut disk, mut watcher) = bed.serve();
        let mut qemu = bed.boot();
        wait_for(&mut watcher, "full");
        disk.signal(signal);
        disk.child.wait().unwrap();
        let (mut disk, mut watcher) = bed.serve();
        disk.wait_for("survive a crash of this process");
        disk.wait_for("continues with 1 requests");
        wait_for(&mut watcher, "full");
        qemu.ask("query-status");
        bed.small.make_space();
        Control::connect(&bed.small.room.file("control.sock")).done(&json!({ "verb": "space" }));
        qemu.ends_well();
        assert_eq!(disk.stop().0, Some(0));
        holds_what_was_written(&bed);
    }
}
