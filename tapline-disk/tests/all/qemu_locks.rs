//! Image locks of Tapline and QEMU: an image written by one is not read by the other, and both may read.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Stdio};

use crate::tool::handed::{Hand, Handed, NOWHERE};
use crate::tool::served::Disk;
use crate::tool::{Room, Said};

/// A qemu-io that has an image open until it is dropped.
struct Qemu {
    child: Child,
}

impl Qemu {
    fn open(room: &Room, words: &str) -> Qemu {
        let mut command = room.command("qemu-io");
        let command = command.args(words.split_whitespace()).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().expect("this test needs qemu-io (Debian: qemu-utils)");
        // It has opened the image when it executes its first command.
        let mut input = child.stdin.take().unwrap();
        input.write_all(b"length\n").unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let line = lines.next().expect("qemu-io has ended").unwrap();
        assert!(line.contains("MiB"), "{line}");
        child.stdin = Some(input);
        Qemu { child }
    }
}

impl Drop for Qemu {
    fn drop(&mut self) {
        // It exits at the end of its input.
        drop(self.child.stdin.take());
        self.child.wait().unwrap();
    }
}

fn room() -> Room {
    let room = Room::new();
    for (format, name) in [("qcow2", "base"), ("raw", "disk"), ("qcow2", "other")] {
        room.tool("qemu-img", &format!("create -q -f {format} {name} 8M"));
    }
    room.done("image create qcow2:child --parent qcow2:base");
    room
}

fn refuses(room: &Room, words: &str) {
    let said = room.tapline(words);
    assert_refused(words, &said);
}

fn assert_refused(words: &str, said: &Said) {
    assert_eq!(said.code, Some(4), "{words}: {said:?}");
    let expected = "for reading: it is in use: qemu-io (process ";
    assert!(said.err.contains(expected) && said.err.contains("has it open for writing"), "{words}: {said:?}");
}

/// Commands that read `base` or `disk`, and the files that they create.
const READERS: [&str; 6] = [
    "image convert qcow2:base raw:copy",
    "image check qcow2:base",
    "image compare qcow2:other qcow2:base",
    "image map qcow2:base",
    "image measure qcow2:base --format vhd",
    "image convert raw:disk vhd:copy",
];

#[test]
#[ignore = "slow: run by `make test-all`"]
fn images_that_qemu_writes_are_read_by_no_command() {
    let room = room();
    let _writers = [Qemu::open(&room, "-f qcow2 base"), Qemu::open(&room, "-f raw disk")];
    for words in READERS {
        refuses(&room, words);
        assert!(room.tapline(words).err.contains("--force-share"), "{words}");
        assert!(!room.file("copy").exists(), "{words}");
    }
    for words in [
        "image create qcow2:new --parent qcow2:base",
        "image create vhd:new --parent raw:disk",
        "image check qcow2:child --parent qcow2:base",
        "image compare qcow2:other qcow2:child --other-parent qcow2:base",
        "serve qcow2:base --read-only --nbd n.sock",
        "serve raw:disk --read-only --nbd n.sock",
        "serve qcow2:child --parent qcow2:base --nbd n.sock",
    ] {
        refuses(&room, words);
    }
    assert!(!room.file("new").exists());
    // For writing, too, the message is about a writer.
    let said = room.tapline("serve qcow2:base --nbd n.sock");
    assert!(said.err.contains("has it open for writing"), "{said:?}");
}

#[test]
#[ignore = "slow: run by `make test-all`"]
fn a_forced_reader_reads_what_qemu_writes() {
    let room = room();
    let _writers = [Qemu::open(&room, "-f qcow2 base"), Qemu::open(&room, "-f raw disk")];
    for words in READERS {
        let said = room.tapline(&format!("{words} --force-share"));
        assert_eq!(said.code, Some(0), "{words}: {said:?}");
        std::fs::remove_file(room.file("copy")).unwrap_or_default();
    }
    assert_eq!(room.tapline("image check qcow2:base -U --repair").code, Some(64));
}

#[test]
#[ignore = "slow: run by `make test-all`"]
fn what_qemu_reads_is_read_and_not_written() {
    let room = room();
    let _readers = [Qemu::open(&room, "-r -f qcow2 base"), Qemu::open(&room, "-r -f raw disk")];
    for words in READERS {
        room.done(words);
        std::fs::remove_file(room.file("copy")).unwrap_or_default();
    }
    let disk = Disk::serve(&room, "qcow2:child --parent qcow2:base --nbd n.sock");
    assert_eq!(disk.stop().0, Some(0));
    let said = room.tapline("serve raw:disk --nbd n.sock");
    let expected = "for writing: it is in use: qemu-io (process ";
    assert!(said.err.contains(expected) && said.err.contains("has it open for reading"), "{said:?}");
}

#[test]
fn qemu_reads_and_does_not_write_what_is_read() {
    let room = room();
    let disks = [
        Disk::serve(&room, "qcow2:child --parent qcow2:base --nbd n.sock"),
        Disk::serve(&room, "raw:disk --read-only --nbd r.sock"),
    ];
    for (format, name) in [("qcow2", "base"), ("raw", "disk")] {
        room.tool("qemu-img", &format!("compare -f {format} -F {format} {name} {name}"));
        room.tool("qemu-img", &format!("map -f {format} {name}"));
        let said = room.run_words("qemu-io", &["-f", format, "-c", "write 0 64k", name]);
        assert_ne!(said.code, Some(0), "{said:?}");
        assert!(said.err.contains("Failed to get \"write\" lock"), "{said:?}");
    }
    let said = room.tapline("serve qcow2:base --nbd b.sock");
    assert!(said.err.contains("it is in use: tapline-disk (process "), "{said:?}");
    for disk in disks {
        assert_eq!(disk.stop().0, Some(0));
    }
}

#[test]
fn qemu_neither_reads_nor_writes_what_is_written() {
    let room = room();
    let disk = Disk::serve(&room, "qcow2:base --nbd n.sock");
    for mode in ["-r", "--discard=unmap"] {
        let said = room.run_words("qemu-io", &[mode, "-f", "qcow2", "-c", "read 0 64k", "base"]);
        assert!(said.code != Some(0) && said.err.contains("lock"), "{said:?}");
    }
    assert_eq!(disk.stop().0, Some(0));
}

/// Like a daemon that copies an image to import it.
#[test]
fn a_confined_copy_of_what_qemu_writes_is_in_use() {
    let room = room();
    let _writer = Qemu::open(&room, "-f qcow2 base");
    let words = format!("image convert qcow2:{NOWHERE}/base raw:{NOWHERE}/copy --confine");
    let said = Hand::to(&words).files(&[Handed::open(&room, "base", false), Handed::create(&room, "copy")]).run();
    assert_eq!(said.code, Some(4), "{said:?}");
    let expected = "QEMU, or a program that locks images as QEMU does, has it open for writing";
    assert!(said.out.contains("in-use") && said.out.contains(expected), "{said:?}");
}
