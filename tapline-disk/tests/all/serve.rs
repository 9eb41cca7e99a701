//! `serve` from a user's view: where it listens, which connections it refuses, and how it ends.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};

use rustix::process::Signal;

use crate::tool::Room;
use crate::tool::served::Disk;

const MIB: u64 = 1 << 20;

fn image(room: &Room) {
    room.make_raw("a.raw", 32 * MIB);
    room.done("image convert raw:a.raw vhd:a.vhd");
}

#[test]
fn data_written_over_nbd_is_in_the_image_after_sigterm() {
    let room = Room::new();
    image(&room);
    let disk = Disk::serve(&room, "vhd:a.vhd --nbd nbd.sock");
    let uri = "nbd+unix:///?socket=nbd.sock";
    let wrote = room.run_words("qemu-io", &["-f", "raw", "-c", "write -P 7 20M 1M", uri]);
    assert_eq!(wrote.code, Some(0), "{wrote:?}");
    let (code, said) = disk.stop();
    assert_eq!(code, Some(0), "{said}");
    assert!(said.contains("all requests are completed and flushed"), "{said}");
    assert!(!room.file("nbd.sock").exists());
    assert_eq!(room.json("image check vhd:a.vhd")["result"], "clean");
    room.done("image convert vhd:a.vhd raw:b.raw");
    let (mut expected, found) = (room.read("a.raw"), room.read("b.raw"));
    expected[20 << 20..21 << 20].fill(7);
    assert!(found == expected, "the image holds something else");
}

/// Connects a client that has written 8 MiB and not flushed.
fn write_without_flush(room: &Room) -> Child {
    let mut guest = Command::new("qemu-io")
        .args(["-t", "writeback", "-f", "raw", "nbd+unix:///?socket=nbd.sock"])
        .current_dir(room.path())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    guest.stdin.as_mut().unwrap().write_all(b"write -P 7 20M 8M\n").unwrap();
    let said = BufReader::new(guest.stdout.take().unwrap());
    let wrote = said.lines().map_while(Result::ok).find(|line| line.contains("wrote 8388608"));
    assert!(wrote.is_some(), "qemu-io has not written");
    guest
}

#[test]
fn repeated_kills_without_flush_do_not_grow_the_file() {
    let room = Room::new();
    room.done("image create vhd:a.vhd --size 64M");
    let mut lengths = Vec::new();
    for _ in 0..4 {
        let disk = Disk::serve(&room, "vhd:a.vhd --nbd nbd.sock");
        // Still connected: when a client leaves, the disk is flushed.
        let mut guest = write_without_flush(&room);
        disk.signal(Signal::KILL);
        drop(disk);
        guest.kill().unwrap();
        guest.wait().unwrap();
        std::fs::remove_file(room.file("nbd.sock")).unwrap();
        // Otherwise, completed writes are kept for the next process.
        room.lose_redo_logs();
        lengths.push(room.read("a.vhd").len());
        assert_eq!(room.json("image check vhd:a.vhd")["result"], "unclosed");
    }
    assert!(lengths[0] > 8 << 20, "the guest's writes have not reached the file: {lengths:?}");
    assert_eq!(lengths, [lengths[0]; 4], "what was left was not taken away");
    assert_eq!(Disk::serve(&room, "vhd:a.vhd --nbd nbd.sock").stop().0, Some(0));
    assert_eq!(room.json("image check vhd:a.vhd")["result"], "clean");
    assert!(room.read("a.vhd").len() < 1 << 20, "nothing of it was ever flushed");
}

#[test]
fn a_second_writer_is_refused_by_name() {
    let room = Room::new();
    image(&room);
    let disk = Disk::serve(&room, "vhd:a.vhd --nbd nbd.sock");
    for words in ["serve vhd:a.vhd --nbd other.sock", "serve vhd:a.vhd --read-only --nbd other.sock"] {
        let said = room.tapline(words);
        assert_eq!(said.code, Some(4), "{said:?}");
        assert!(said.err.contains("a.vhd") && said.err.contains("in use"), "{said:?}");
    }
    room.done("image info vhd:a.vhd");
    assert_eq!(disk.stop().0, Some(0));
    room.done("image check vhd:a.vhd");
}

#[test]
fn readers_share_an_image() {
    let room = Room::new();
    image(&room);
    let one = Disk::serve(&room, "vhd:a.vhd --read-only --nbd one.sock");
    let other = Disk::serve(&room, "vhd:a.vhd --read-only --nbd other.sock");
    room.done("image compare vhd:a.vhd raw:a.raw");
    let said = room.tapline("serve vhd:a.vhd --nbd third.sock");
    assert_eq!(said.code, Some(4), "{said:?}");
    assert!(said.err.contains("in use"), "{said:?}");
    assert_eq!((one.stop().0, other.stop().0), (Some(0), Some(0)));
}

#[test]
fn a_parent_in_use_by_its_child_is_not_written() {
    let room = Room::new();
    image(&room);
    room.done("image create vhd:child.vhd --parent vhd:a.vhd");
    let child = Disk::serve(&room, "vhd:child.vhd --parent vhd:a.vhd --vhost-user child.sock");
    let said = room.tapline("serve vhd:a.vhd --vhost-user other.sock");
    assert_eq!(said.code, Some(4), "{said:?}");
    assert!(said.err.contains("a.vhd"), "{said:?}");
    assert_eq!(child.stop().0, Some(0));
}

#[test]
fn sockets_that_cannot_be_bound_are_named() {
    let room = Room::new();
    image(&room);
    room.write("taken", b"not a socket");
    let long = "a".repeat(120);
    for socket in ["taken", "missing/nbd.sock", &long] {
        for transport in ["--nbd", "--vhost-user"] {
            let said = room.tapline(&format!("serve vhd:a.vhd {transport} ./{socket}"));
            assert_eq!(said.code, Some(4), "{transport} {socket}: {said:?}");
            assert!(said.err.contains(socket), "{transport} {socket}: {said:?}");
        }
    }
    assert_eq!(room.read("taken"), b"not a socket");
    let disk = Disk::serve(&room, "vhd:a.vhd --read-only --nbd nbd.sock");
    let said = room.tapline("serve vhd:a.vhd --read-only --nbd nbd.sock");
    assert_eq!(said.code, Some(4), "{said:?}");
    assert!(UnixStream::connect(room.file("nbd.sock")).is_ok());
    assert_eq!(disk.stop().0, Some(0));
}

#[test]
fn the_printed_configuration_matches_the_served_disk() {
    let room = Room::new();
    image(&room);
    let mut disk = Disk::serve(&room, "vhd:a.vhd --vhost-user vm.sock --queues 3 --print qemu");
    let mut line = String::new();
    let mut text = String::new();
    let mut out = BufReader::new(disk.child.stdout.take().unwrap());
    while !line.contains("-device") {
        line.clear();
        assert!(out.read_line(&mut line).unwrap() > 0, "{text}");
        text.push_str(&line);
    }
    assert!(text.contains(&format!("path={}", room.file("vm.sock").display())), "{text}");
    assert!(text.contains("num-queues=3") && text.contains("share=on"), "{text}");
    assert_eq!(disk.stop().0, Some(0));
}

#[test]
fn unsupported_monitor_options_are_refused_with_alternatives() {
    let room = Room::new();
    image(&room);
    let said = room.tapline("serve vhd:a.vhd --nbd nbd.sock --print cloud-hypervisor");
    assert_eq!(said.code, Some(4), "{said:?}");
    assert!(said.err.contains("Cloud Hypervisor cannot use a disk served over NBD"), "{said:?}");
}

#[test]
fn statistics_are_appended_on_sigusr1_and_at_the_end() {
    let room = Room::new();
    image(&room);
    let mut disk = Disk::serve(&room, "vhd:a.vhd --nbd nbd.sock --stats stats.json");
    room.tool("nbdcopy", "nbd+unix:///?socket=nbd.sock copy.raw");
    disk.wait_for("client disconnected");
    disk.signal(Signal::USR1);
    assert_eq!(disk.stop().0, Some(0));
    let text = String::from_utf8(room.read("stats.json")).unwrap();
    let lines: Vec<serde_json::Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert!((1..=2).contains(&lines.len()), "{text}");
    let last = lines.last().unwrap();
    assert!(last["reads"]["bytes"].as_u64().unwrap() >= 4 * MIB, "{last}");
    assert!(last["reads"]["sum_ns"].as_u64().unwrap() > 0, "{last}");
    assert_eq!(last["reads"]["in_flight"], 0);
    assert!(room.read("copy.raw") == room.read("a.raw"), "nbdcopy read something else");
}

#[test]
fn a_system_chosen_port_is_reported() {
    let room = Room::new();
    image(&room);
    let disk = Disk::serve(&room, "vhd:a.vhd --read-only --nbd 127.0.0.1:0");
    let uri = disk.said.split_whitespace().find(|word| word.starts_with("nbd://")).unwrap().to_owned();
    assert!(room.tool("nbdinfo", &uri).contains("export-size"));
    assert_eq!(disk.stop().0, Some(0));
}

#[test]
fn an_unwritable_statistics_file_is_reported_before_serving() {
    let room = Room::new();
    image(&room);
    let said = room.tapline("serve vhd:a.vhd --nbd nbd.sock --stats missing/stats.json");
    assert_eq!(said.code, Some(4), "{said:?}");
    assert!(said.err.contains("append statistics to missing/stats.json"), "{said:?}");
    assert!(!room.file("nbd.sock").exists());
}

#[test]
fn a_disk_is_not_written_to_from_other_hosts_unless_that_is_said() {
    let room = Room::new();
    room.done("image create qcow2:a --size 8M");
    for (words, advice) in [
        ("serve qcow2:a --nbd 0.0.0.0:0", "--allow-unencrypted"),
        ("serve qcow2:a --nbd 10809", "write 127.0.0.1:10809 for a port, or ./10809 for a socket"),
    ] {
        let said = room.tapline(words);
        assert!(said.code == Some(64) && said.err.contains(advice), "{words}: {said:?}");
        assert!(!said.err.contains("writable"), "the image was opened: {said:?}");
    }
    let disk = Disk::serve(&room, "qcow2:a --nbd 0.0.0.0:0 --read-only --control control.sock");
    assert_eq!(disk.stop().0, Some(0));
    let disk = Disk::serve(&room, "qcow2:a --nbd 0.0.0.0:0 --allow-unencrypted --control control.sock");
    assert_eq!(disk.stop().0, Some(0));
}
