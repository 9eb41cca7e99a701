//! An upgrade of the process that serves a disk: its guests notice nothing, and whatever is killed or fails during it,
//! exactly one process serves the disk and no completed request is lost.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::process::{Command, Stdio};
use std::time::Duration;

use fastrand::Rng;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use rustix::process::{Signal, kill_process};
use serde_json::{Value, json};
use testkit::nbd::wire::{self, Connection};
use testkit::ring::Driver;

use crate::tool::control::Control;
use crate::tool::handed::{Hand, Handed, NOWHERE};
use crate::tool::nbd::{Nbd, Versions};
use crate::tool::replaced::{PAUSE_MAX, Replaced, pid_of, wait_until_gone};
use crate::tool::served::Disk;
use crate::tool::{Room, TAPLINE, from_environment};

const FORMATS: [&str; 3] = ["raw", "vhd", "qcow2"];

/// Upgrades the process of a disk this many times, under a guest at queue depth 128, over one connection.
fn replace_under_load(recorded: bool, times: u64, format: &str) {
    let seed = from_environment("TAPLINE_SEED").unwrap_or(1);
    println!("TAPLINE_SEED={seed} TAPLINE_UPGRADES={times}, recorded: {recorded}, {format}");
    let mut random = Rng::with_seed(seed);
    let room = Room::new();
    let image = room.image(format, "16M");
    let mut disk = Replaced::serve(&room, &format!("{image} --vhost-user vm.sock"));
    let mut driver = Driver::connect(&room.file("vm.sock"), recorded);
    let mut longest = Duration::ZERO;
    for _ in 0..times {
        for _ in 0..random.u64(..30) {
            driver.work(&mut random);
        }
        let answered = driver.answered;
        let upgrade = disk.upgrade();
        while !upgrade.is_finished() {
            driver.work(&mut random);
        }
        longest = longest.max(disk.replaced_by(&upgrade.join().unwrap()));
        driver.drain();
        assert!(driver.answered > answered, "nothing goes on");
    }
    println!("{} requests answered, the longest pause was {longest:?}", driver.answered);
    let stats = Control::connect(&room.file("control.sock")).done(&json!({ "verb": "stats" }));
    let count = |kind: &str| stats[kind]["count"].as_u64().unwrap();
    assert_eq!(
        count("reads") + count("writes") + count("flushes"),
        driver.answered,
        "counters have gone back: {stats}"
    );
    disk.stop();
    assert!(!room.file("vm.sock").exists() && !room.file("control.sock").exists(), "the last one removes the sockets");
    if format != "raw" {
        room.sound_and_closed(&image);
    }
    room.done(&format!("image convert {image} raw:b"));
    driver.check(&room.read("b"));
}

#[test]
#[ignore = "slow: run by `make test-all`"]
fn a_guest_at_work_notices_nothing() {
    let times = from_environment("TAPLINE_UPGRADES").unwrap_or(8);
    for format in FORMATS.into_iter().chain(["data-file"]) {
        replace_under_load(true, times, format);
        replace_under_load(false, times, format);
    }
}

/// Over NBD: a partly received write, and replies that were not read.
#[test]
#[ignore = "slow: run by `make test-all`"]
fn requests_between_client_and_disk_are_not_lost_in_an_upgrade() {
    /// Neither this nor where it is written is a multiple of a block.
    const LEN: usize = (1 << 18) - 5;
    for format in FORMATS {
        let mut random = Rng::with_seed(7);
        let room = Room::new();
        room.done(&format!("image create {format}:a --size 64M"));
        let mut disk = Replaced::serve(&room, &format!("{format}:a --nbd ./nbd.sock"));
        let mut other = Nbd::connect(&room.file("nbd.sock")).unwrap();
        let mut versions = Versions::new(64, 1 << 19);
        let mut asking = Connection::simple(&room.file("nbd.sock")).unwrap();
        for round in 0..8u64 {
            let at = (round << 18) + 3;
            let data = vec![u8::try_from(round + 1).unwrap(); LEN];
            let write = [request(wire::Command::Write, at, LEN), data.clone()].concat();
            let cut = random.usize(..write.len());
            // The replies are more than the socket takes.
            let reads: Vec<u8> = (0..24).flat_map(|_| request(wire::Command::Read, 3, LEN)).collect();
            asking.send(&reads).unwrap();
            asking.send(&write[..cut]).unwrap();
            versions.step(&mut other, &mut random).unwrap();
            let mut greeted = Connection(UnixStream::connect(room.file("nbd.sock")).unwrap());
            assert!(greeted.receive(18).unwrap().starts_with(b"NBDMAGIC"));
            let upgrade = disk.upgrade();
            let answer = upgrade.join().unwrap();
            disk.replaced_by(&answer);
            asking.send(&write[cut..]).unwrap();
            for _ in 0..24 {
                assert_eq!(reply(&mut asking, LEN), vec![u8::from(round > 0); LEN]);
            }
            reply(&mut asking, 0);
            asking.send(&request(wire::Command::Read, at, LEN)).unwrap();
            assert_eq!(reply(&mut asking, LEN), data);
            // A client in the middle of its handshake is served.
            greeted.send(&3u32.to_be_bytes()).unwrap();
            greeted.go().unwrap();
            greeted.send(&request(wire::Command::Read, at, LEN)).unwrap();
            assert_eq!(reply(&mut greeted, LEN), data);
        }
        drop(asking);
        disk.stop();
    }
}

fn request(command: wire::Command, at: u64, len: usize) -> Vec<u8> {
    wire::request(command, 0, 0, at, u32::try_from(len).unwrap())
}

fn reply(connection: &mut Connection, len: usize) -> Vec<u8> {
    assert_eq!(connection.simple_reply().unwrap().0, 0, "an error");
    connection.receive(len).unwrap()
}

#[test]
fn a_program_that_does_not_start_changes_nothing() {
    let room = Room::new();
    room.done("image create qcow2:a --size 16M");
    let disk = Replaced::serve(&room, "qcow2:a --vhost-user vm.sock");
    let mut driver = Driver::connect(&room.file("vm.sock"), true);
    let mut random = Rng::with_seed(3);
    // A new process that says hello, accepts everything, and fails, as with an image that it does not support.
    let half = "#!/usr/bin/env python3\nimport socket, sys\n\
                s = socket.socket(fileno=0)\n\
                s.send(b'{\"hello\":{\"program\":\"9\",\"pid\":1}}')\n\
                while s.recv(1 << 16) != b'\"all\"': pass\n\
                sys.exit(1)\n";
    let programs = [("half", half), ("deaf", "#!/bin/sh\nexit 64\n"), ("none", "no program at all")];
    for (name, text) in programs {
        testkit::program::write(&room.file(name), text);
    }
    let paths = programs.map(|(name, _)| room.file(name).to_str().unwrap().to_owned());
    for program in paths.iter().map(String::as_str).chain(["/nowhere/tapline-disk", "/bin/true"]) {
        driver.work(&mut random);
        let upgrade = disk.upgrade_to(program);
        while !upgrade.is_finished() {
            driver.work(&mut random);
        }
        let answer = upgrade.join().unwrap();
        assert_eq!(answer["error"]["kind"], "failed", "{program}: {answer}");
        assert!(answer["error"]["message"].is_string(), "{answer}");
        driver.drain();
    }
    // A new process with another version of the redo log than the process that owns the log.
    room.write_redo_log("a", 8, &3u64.to_ne_bytes());
    let upgrade = disk.upgrade_to(TAPLINE);
    while !upgrade.is_finished() {
        driver.work(&mut random);
    }
    let answer = upgrade.join().unwrap();
    assert_eq!(answer["error"]["kind"], "failed", "{answer}");
    driver.drain();
    room.write_redo_log("a", 8, &2u64.to_ne_bytes());
    let mut control = Control::connect(&room.file("control.sock"));
    // A new process that has taken everything over, but too late: it is requested to stop, and removes no socket.
    let line = json!({ "verb": "upgrade", "program": TAPLINE, "pause_max": 1 });
    let answer = control.ask(&line);
    assert_eq!(answer["error"]["kind"], "busy", "{answer}");
    assert!(room.file("vm.sock").exists() && room.file("control.sock").exists());
    let refused = |control: &mut Control, request: Value, kind: &str| {
        let answer = control.ask(&request);
        assert_eq!(answer["error"]["kind"], kind, "{request}: {answer}");
    };
    refused(&mut control, json!({ "verb": "upgrade" }), "invalid");
    refused(&mut control, json!({ "verb": "upgrade", "program": "tapline-disk" }), "invalid");
    refused(&mut control, json!({ "verb": "upgrade", "successor": true }), "invalid");
    control.done(&json!({ "verb": "pause" }));
    refused(&mut control, json!({ "verb": "upgrade", "program": TAPLINE }), "state");
    control.done(&json!({ "verb": "resume" }));
    assert_eq!(control.done(&json!({ "verb": "version" }))["pid"], disk.first.child.id());
    drop(control);
    disk.stop();
    room.done("image convert qcow2:a raw:b");
    driver.check(&room.read("b"));
}

/// The old or the new process is killed at a certain point; the survivor serves, or none does, and then another process
/// can.
#[test]
#[ignore = "slow: run by `make test-all`"]
fn a_kill_at_any_moment_leaves_one_process_or_none() {
    let kills = from_environment("TAPLINE_KILLS").unwrap_or(24);
    let mut random = Rng::with_seed(from_environment("TAPLINE_SEED").unwrap_or(1));
    let room = Room::new();
    room.done("image create qcow2:a --size 16M");
    let mut disk = Replaced::serve(&room, "qcow2:a --vhost-user vm.sock");
    let mut driver = Driver::connect(&room.file("vm.sock"), true);
    let (mut done, mut died) = (0, 0);
    for round in 0..kills {
        let upgrade = disk.upgrade();
        let after = Duration::from_micros(random.u64(..20_000));
        let begun = std::time::Instant::now();
        while begun.elapsed() < after {
            driver.work(&mut random);
        }
        if round % 2 == 0 {
            kill_process(disk.pid, Signal::KILL).ok();
        } else if let Some(pid) = successor_of(disk.pid) {
            kill_process(pid, Signal::KILL).ok();
        }
        let answer = upgrade.join().unwrap();
        done += u64::from(answer.get("ok").is_some());
        let alive = Control::try_connect(&room.file("control.sock")).and_then(|mut control| {
            control.send(&json!({ "verb": "version" }));
            control.next_line()
        });
        if let Some(version) = alive {
            disk.pid = pid_of(&version["ok"]["pid"]);
        } else {
            died += 1;
            // No process has the image open any more: another process can open it.
            disk.first.child.kill().unwrap_or_default();
            disk = Replaced::serve(&room, "qcow2:a --vhost-user vm.sock");
            driver.connect_again();
        }
        driver.drain();
    }
    println!("{done} of {kills} were replaced, {died} times nobody was left");
    assert!(died > 0 && died < kills, "the moments are not spread");
    kill_process(disk.pid, Signal::TERM).unwrap();
    wait_until_gone(disk.pid);
    room.sound_and_closed("qcow2:a");
    room.done("image convert qcow2:a raw:b");
    driver.check(&room.read("b"));
}

/// A child of a process, if it has one.
fn successor_of(pid: rustix::process::Pid) -> Option<rustix::process::Pid> {
    let number = pid.as_raw_nonzero();
    let children = std::fs::read_to_string(format!("/proc/{number}/task/{number}/children")).ok()?;
    let tasks = std::fs::read_dir(format!("/proc/{number}/task")).ok()?;
    let all = tasks.flatten().filter_map(|task| std::fs::read_to_string(task.path().join("children")).ok());
    let all: String = all.chain([children]).collect();
    all.split_whitespace().next().and_then(|pid| rustix::process::Pid::from_raw(pid.parse().ok()?))
}

#[test]
fn an_upgrade_interrupts_a_merge_which_continues_on_request() {
    let room = Room::new();
    room.done("image create qcow2:a --size 64M");
    let mut disk = Replaced::serve(&room, "qcow2:a --nbd ./nbd.sock");
    let mut client = Nbd::connect(&room.file("nbd.sock")).unwrap();
    let mut control = Control::connect(&room.file("control.sock"));
    for at in 0..512 {
        client.write(at << 16, &[1; 4096]).unwrap();
    }
    let to = format!("qcow2:{}", room.file("b").display());
    control.done(&json!({ "verb": "snapshot", "to": to, "method": "chain" }));
    for at in 0..512 {
        client.write(at << 16, &[2; 4096]).unwrap();
    }
    let merge = json!({ "verb": "merge", "id": 5, "from": 0, "into": 1, "rate": 1 << 20, "follow": true });
    control.send(&merge);
    assert!(control.next_line().unwrap().get("event").is_some());
    let answer = disk.upgrade().join().unwrap();
    disk.replaced_by(&answer);
    let outcome = control.outcome();
    assert_eq!(outcome["error"]["kind"], "replaced", "{outcome}");
    assert!(control.next_line().is_none());

    let mut control = Control::connect(&room.file("control.sock"));
    control.send(&json!({ "verb": "merge", "from": 0, "into": 1, "follow": true }));
    let outcome = control.outcome();
    assert_eq!(outcome["ok"]["state"], "done", "{outcome}");
    for at in 0..512 {
        assert_eq!(client.read(at << 16, 4096).unwrap(), [2; 4096]);
    }
    disk.stop();
    room.sound_and_closed("qcow2:a");
}

/// As a daemon does it: both processes are passed their files, and the new one was started by another process.
#[test]
fn a_confined_disk_is_taken_over_by_a_prestarted_process() {
    let room = Room::new();
    let name = format!("vhd:{NOWHERE}/a");
    Hand::to(&format!("image create {name} --size 64M")).file(&Handed::create(&room, "a")).done();
    let words = format!("serve {name} --nbd {NOWHERE}/nbd.sock --control {NOWHERE}/control.sock --confine");
    let hand = Hand::to(&words).file(&Handed::open(&room, "a", true)).file(&Handed::redo_log(&room, "a"));
    let first = hand.listen(&room, "nbd", "nbd.sock").listen(&room, "control", "control.sock").serve();
    let mut client = Nbd::connect(&room.file("nbd.sock")).unwrap();
    let mut control = Control::connect(&room.file("control.sock"));
    let refused = control.ask(&json!({ "verb": "upgrade", "program": TAPLINE }));
    assert_eq!(refused["error"]["kind"], "unsupported", "{refused}");

    // Settings made while it is served need no file, and pass from process to process.
    control.done(&json!({ "verb": "shape", "split": "16384" }));
    let mut disk = Replaced::of(&room, first);
    for round in 0..3u8 {
        client.write(u64::from(round) << 21, &[round + 1; 4096]).unwrap();
        let (ours, theirs) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
        let mut next = successor(&words, theirs);
        let line = json!({ "version": 1, "verb": "upgrade", "successor": true, "pause_max": PAUSE_MAX });
        let mut control = Control::connect(&room.file("control.sock"));
        control.send_with_descriptors(&format!("{line}\n"), &[&ours]);
        drop(ours);
        let answer = control.outcome();
        assert_eq!(answer["ok"]["pid"], next.id(), "{answer}");
        disk.replaced_by(&answer);
        let shape = Control::connect(&room.file("control.sock")).done(&json!({ "verb": "shape" }));
        assert_eq!(shape["split_bytes"], 16384, "{shape}");
        assert_eq!(client.read(u64::from(round) << 21, 4096).unwrap(), [round + 1; 4096]);
        // Data that was completed but not flushed, and that is in no redo log with a path, is still there.
        if round == 2 {
            client.flush().unwrap();
            kill_process(disk.pid, Signal::TERM).unwrap();
            assert!(next.wait().unwrap().success());
        } else {
            std::mem::forget(next);
        }
    }
    let image = Hand::to(&format!("image check {name}")).file(&Handed::open(&room, "a", false)).run();
    assert_eq!(image.code, Some(0), "{image:?}");
}

fn successor(words: &str, socket: OwnedFd) -> std::process::Child {
    let mut command = Command::new(TAPLINE);
    command.args(words.split_whitespace()).args(["--handed", "--take-over"]).stdin(Stdio::from(socket));
    command.stderr(Stdio::inherit()).spawn().unwrap()
}

/// A process that was started for an upgrade without success exits by itself.
#[test]
fn the_unneeded_process_exits() {
    let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
    let mut next = successor("serve raw:/nowhere/a --nbd /nowhere/s --control /nowhere/c", theirs);
    drop(ours);
    assert_eq!(next.wait().unwrap().code(), Some(4));
    let room = Room::new();
    room.make_raw("a", 1 << 20);
    let mut alone = room.command(TAPLINE);
    alone.args(["serve", "raw:a", "--nbd", "./s", "--take-over"]).stdin(Stdio::null());
    assert_eq!(alone.status().unwrap().code(), Some(64));
    let disk = Disk::serve(&room, "raw:a --nbd ./s");
    assert_eq!(disk.stop().0, Some(0));
}

/// Returns the serial number known to the guest, from the disk's statistics page.
fn serial(room: &Room) -> String {
    // The verb is executed after the page has been started.
    Control::connect(&room.file("control.sock")).done(&json!({ "verb": "version" }));
    let identity = stats::Reader::open(&room.file("page")).unwrap().snapshot().unwrap().identity;
    let identity: Value = serde_json::from_str(&identity).unwrap();
    identity["serial"].as_str().unwrap().to_owned()
}

#[test]
fn a_serial_number_survives_a_snapshot_an_upgrade_and_a_restart() {
    let mut seen = Vec::new();
    for (name, leaf) in [("vhd:production-portal-of-customer-a", "vhd"), ("qcow2:b", "qcow2"), ("raw:c", "qcow2")] {
        let room = Room::new();
        room.done(&format!("image create {name} --size 64M"));
        let at = "--vhost-user vm.sock --stats-page page";
        let mut disk = Replaced::serve(&room, &format!("{name} {at}"));
        let first = serial(&room);
        assert!(first.len() == 20 && disk.first.said.contains(&format!("serial number {first}")), "{first}");
        let mut control = Control::connect(&room.file("control.sock"));
        let to = format!("{leaf}:{}", room.file("leaf").display());
        control.done(&json!({ "verb": "snapshot", "to": to, "method": "chain" }));
        let answer = disk.upgrade().join().unwrap();
        disk.replaced_by(&answer);
        assert_eq!(serial(&room), first, "{name}");
        disk.stop();
        let disk = Replaced::serve(&room, &format!("{leaf}:leaf --parent {name} {at}"));
        assert_eq!(serial(&room), first, "{name}");
        disk.stop();
        seen.push(first);
    }
    seen.dedup();
    assert_eq!(seen.len(), 3);
}
