//! How long an NBD server that is away is waited for, and how disks and jobs end meanwhile.

use std::io::{BufRead, BufReader};
use std::process::{Child, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};

use crate::remote::{Server, make_disk, reads_in_flight, start, uri, wait_for_line};
use crate::tool::Room;
use crate::tool::served::Disk;

/// Starts a read of the disk's first bytes by a client of NBD.
fn begin_read(room: &Room) -> Child {
    let at = format!("nbd+unix:///?socket={}", room.file("at").display());
    let mut guest = room.command("qemu-io");
    guest.args(["-f", "raw", "-r", &at, "-c", "read -P 0 0 4k"]).stdout(Stdio::piped()).stderr(Stdio::piped());
    guest.spawn().unwrap()
}

#[test]
fn requests_fail_after_the_patience_and_work_when_the_server_is_back() {
    let room = Room::new();
    let server = Server::nbdkit(&room, "memory 64M", "there");
    let mut disk = Disk::serve(&room, &format!("{} --nbd at --patience 1", uri("there")));
    drop(server);
    disk.wait_for("connection lost");
    let failed = begin_read(&room).wait_with_output().unwrap();
    assert!(!failed.status.success() || String::from_utf8_lossy(&failed.stdout).contains("Input/output error"));
    let _server = Server::nbdkit(&room, "memory 64M", "there");
    disk.wait_for("connected again");
    let read = begin_read(&room).wait_with_output().unwrap();
    assert!(read.status.success() && String::from_utf8_lossy(&read.stdout).contains("read 4096/4096"), "{read:?}");
    assert_eq!(disk.stop().0, Some(0));
}

#[test]
fn a_job_fails_after_its_patience() {
    let room = Room::new();
    make_disk(&room, "raw:from.raw");
    let source = Server::slow(&room, "from.raw", "from");
    let mut job = start(&room, &format!("image convert {} qcow2:to.qcow2 --patience 0", uri("from")));
    let mut lines = BufReader::new(job.stderr.take().unwrap()).lines();
    while room.file("to.qcow2.tapline-new").metadata().is_err() {
        assert_eq!(job.try_wait().unwrap(), None);
        std::thread::sleep(Duration::from_millis(1));
    }
    drop(source);
    wait_for_line(&mut lines, "connection lost");
    let rest: Vec<String> = lines.map(Result::unwrap).collect();
    assert_eq!(job.wait().unwrap().code(), Some(4), "{rest:?}");
    assert!(!room.file("to.qcow2").exists() && !room.file("to.qcow2.tapline-new").exists());
}

#[test]
fn a_disk_whose_server_is_away_or_silent_ends_by_sigterm() {
    let room = Room::new();
    for silent in [false, true] {
        let server = Server::nbdkit(&room, "memory 64M", "there");
        let mut disk = Disk::serve(&room, &format!("{} --nbd at --patience forever", uri("there")));
        let server = match silent {
            true => {
                server.signal(Signal::STOP);
                Some(server)
            }
            false => {
                drop(server);
                disk.wait_for("connection lost");
                None
            }
        };
        let guest = begin_read(&room);
        while reads_in_flight(&mut disk) == 0 {}
        let (code, said) = disk.stop();
        assert!(code == Some(4) && said.contains("given up") && said.contains("flush the disk"), "{silent}: {said}");
        let read = guest.wait_with_output().unwrap();
        assert!(!String::from_utf8_lossy(&read.stdout).contains("read 4096/4096"), "{silent}: {read:?}");
        drop(server);
    }
}

#[test]
fn a_job_whose_server_is_silent_ends_by_sigterm() {
    let room = Room::new();
    make_disk(&room, "raw:from.raw");
    room.done("image create raw:to.raw --size 64M");
    for (from, to) in [(uri("from"), "qcow2:new.qcow2".to_owned()), ("raw:from.raw".to_owned(), uri("to"))] {
        let source = Server::slow(&room, "from.raw", "from");
        let target = Server::slow(&room, "to.raw", "to");
        let mut job = start(&room, &format!("image convert {from} {to} --force --patience forever"));
        let before = room.space("to.raw");
        while room.file("new.qcow2.tapline-new").metadata().is_err() && room.space("to.raw") == before {
            assert_eq!(job.try_wait().unwrap(), None);
            std::thread::sleep(Duration::from_millis(1));
        }
        source.signal(Signal::STOP);
        target.signal(Signal::STOP);
        kill_process(Pid::from_child(&job), Signal::TERM).unwrap();
        let lines = BufReader::new(job.stderr.take().unwrap()).lines();
        let said: Vec<String> = lines.map(Result::unwrap).collect();
        assert_eq!(job.wait().unwrap().code(), Some(4), "{said:?}");
        assert!(said.iter().any(|line| line.contains("given up")), "{said:?}");
        assert!(!room.file("new.qcow2").exists() && !room.file("new.qcow2.tapline-new").exists());
    }
}

#[test]
fn another_disk_of_the_same_size_is_not_used() {
    let room = Room::new();
    make_disk(&room, "raw:from.raw");
    let mut other = room.read("from.raw");
    other[512] ^= 1;
    room.write("other.raw", &other);
    let server = Server::nbdkit(&room, "file from.raw", "there");
    let mut disk = Disk::serve(&room, &format!("{} --nbd at --read-only", uri("there")));
    let at = format!("nbd+unix:///?socket={}", room.file("at").display());
    room.qemu_io(&["-f", "raw", "-r", &at], &["read 0 64k"]);
    drop(server);
    disk.wait_for("connection lost");
    let other = Server::nbdkit(&room, "file other.raw", "there");
    disk.wait_for("the export has changed: the block at byte 0 has other contents");
    drop(other);
    let _server = Server::nbdkit(&room, "file from.raw", "there");
    disk.wait_for("connected again");
    room.qemu_io(&["-f", "raw", "-r", &at], &["read 0 64k"]);
    assert_eq!(disk.stop().0, Some(0));
}
