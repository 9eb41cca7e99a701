//! Single bytes over NBD, from the socket to the storage.

use std::ops::Range;

use fastrand::Rng;
use serde_json::json;

use crate::tool::Room;
use crate::tool::control::Control;
use crate::tool::nbd::Nbd;
use crate::tool::served::Disk;

const MIB: u64 = 1 << 20;
/// Bytes of the disk that the clients fight for: two clusters of qcow2, a part of one block of a VHD. A parent holds
/// something there.
const WHERE: Range<u64> = 9 * MIB..9 * MIB + (128 << 10);
/// Bytes in a row that belong to one client, and then the next client's come: no multiple or part of a block.
const OWN: u64 = 77;
const CLIENTS: u64 = 4;

/// Writes and reads bytes of its own, a number of times; returns their final values.
fn client(room: &Room, number: u64) -> Vec<(u64, Vec<u8>)> {
    let mut nbd = Nbd::connect(&room.file("nbd.sock")).unwrap();
    let mut random = Rng::with_seed(number + 1);
    let stripe = OWN * CLIENTS;
    let mut own: Vec<(u64, Vec<u8>)> = (0..(WHERE.end - WHERE.start) / stripe)
        .map(|row| WHERE.start + row * stripe + number * OWN)
        .map(|at| (at, nbd.read(at, 77).unwrap()))
        .collect();
    for step in 0..400u64 {
        // Near each other, so that two clients are seldom in different blocks.
        let which = usize::try_from(random.u64(..8) + step / 16 * 8).unwrap() % own.len();
        let (at, bytes) = &mut own[which];
        let from = usize::try_from(random.u64(..OWN)).unwrap();
        let to = from + 1 + usize::try_from(random.u64(..OWN)).unwrap() % (77 - from);
        bytes[from..to].fill(random.u8(..));
        nbd.write(*at + u64::try_from(from).unwrap(), &bytes[from..to]).unwrap();
        assert_eq!(nbd.read(*at, 77).unwrap(), *bytes, "client {number}, step {step}: bytes at {at}");
        if random.u64(..50) == 0 {
            nbd.flush().unwrap();
        }
    }
    own
}

#[test]
fn concurrent_writes_to_adjacent_bytes_do_not_lose_data() {
    for (image, cache) in [("raw:a.raw", "none"), ("vhd:a.vhd", "writeback"), ("qcow2:a.qcow2", "none")] {
        let room = Room::new();
        room.make_raw("base.raw", 32 * MIB);
        let mut expected = room.read("base.raw");
        let parent = if image.starts_with("raw") { "" } else { "--parent raw:base.raw" };
        match parent {
            "" => room.write("a.raw", &expected),
            parent => drop(room.done(&format!("image create {image} {parent}"))),
        }
        let disk = Disk::serve(&room, &format!("{image} {parent} --nbd nbd.sock --cache {cache}"));
        let written = std::thread::scope(|scope| {
            let clients: Vec<_> = (0..CLIENTS)
                .map(|number| {
                    let room = &room;
                    scope.spawn(move || client(room, number))
                })
                .collect();
            clients.into_iter().flat_map(|client| client.join().unwrap()).collect::<Vec<_>>()
        });
        for (at, bytes) in written {
            let at = usize::try_from(at).unwrap();
            expected[at..at + bytes.len()].copy_from_slice(&bytes);
        }
        let (code, said) = disk.stop();
        assert_eq!(code, Some(0), "{said}");
        room.done(&format!("image convert {image} {parent} raw:b.raw"));
        assert!(room.read("b.raw") == expected, "{image} holds something else");
    }
}

#[test]
fn an_export_has_the_name_of_its_file_or_another() {
    let room = Room::new();
    room.done("image create raw:a.raw --size 1M");
    for (words, name) in [("", "a.raw"), ("--nbd-export web", "web")] {
        let disk = Disk::serve(&room, &format!("raw:a.raw --nbd nbd.sock {words}"));
        let listed = room.tool("nbdinfo", "--list nbd+unix:///?socket=nbd.sock");
        assert!(listed.contains(&format!("export=\"{name}\"")), "{listed}");
        for name in ["", name] {
            assert_eq!(room.tool("nbdinfo", &format!("--size nbd+unix:///{name}?socket=nbd.sock")).trim(), "1048576");
        }
        let other = room.run_words("nbdinfo", &["--size", "nbd+unix:///other?socket=nbd.sock"]);
        assert_ne!(other.code, Some(0), "{other:?}");
        assert_eq!(disk.stop().0, Some(0));
    }
    let said = room.tapline("serve raw:a.raw --nbd nbd.sock --nbd-export=");
    assert_eq!(said.code, Some(64), "{said:?}");
}

/// With the size that QEMU assumes: reads as zeroes beyond the end of the file, which grows on a write there.
#[test]
fn a_raw_file_that_ends_inside_a_sector_is_a_disk_that_ends_with_it() {
    for cache in ["none", "writeback"] {
        let room = Room::new();
        room.write("a", &[7; 4097]);
        room.tool("qemu-img", "convert -f raw -O raw a theirs");
        room.done("image convert raw:a raw:ours");
        assert_eq!(room.read("ours"), room.read("theirs"));
        assert_eq!(room.read("ours").len(), 4608);
        let disk = Disk::serve(&room, &format!("raw:a --nbd ./nbd.sock --cache {cache}"));
        let mut nbd = Nbd::connect(&room.file("nbd.sock")).unwrap();
        assert_eq!(nbd.read(4095, 513).unwrap(), [&[7, 7][..], &[0; 511]].concat());
        assert_eq!(room.read("a").len(), 4097, "nothing was written");
        nbd.write(4600, &[9; 8]).unwrap();
        nbd.flush().unwrap();
        assert_eq!(nbd.read(4096, 512).unwrap(), [&[7][..], &[0; 503], &[9; 8]].concat());
        assert_eq!(disk.stop().0, Some(0));
        assert_eq!(room.read("a"), [&[7; 4097][..], &[0; 503], &[9; 8]].concat());
    }
}

/// The memory of a request is used again for the next: nothing of what it held may come out as the disk's content.
#[test]
fn a_hole_reads_as_zeroes_in_memory_that_held_data() {
    for image in ["raw:a.raw", "vhd:a.vhd", "qcow2:a.qcow2"] {
        let room = Room::new();
        room.done(&format!("image create {image} --size 64M"));
        let disk = Disk::serve(&room, &format!("{image} --nbd nbd.sock"));
        let mut nbd = Nbd::connect(&room.file("nbd.sock")).unwrap();
        for len in [4096, 64 << 10] {
            nbd.write(8 * MIB, &vec![0xa5; len]).unwrap();
            for at in [48 * MIB, 8 * MIB, 56 * MIB] {
                let read = nbd.read(at, len).unwrap();
                let expected = if at == 8 * MIB { 0xa5 } else { 0 };
                assert!(read.iter().all(|&byte| byte == expected), "{image}: {len} bytes at {at}");
            }
        }
        assert_eq!(disk.stop().0, Some(0));
    }
}

#[test]
fn reads_of_a_truncated_raw_file_fail_and_are_reported() {
    for engine in ["uring", "aio"] {
        let room = Room::new();
        room.make_raw("a", MIB);
        let disk = Disk::serve(&room, &format!("raw:a --nbd nbd.sock --io-engine {engine}"));
        let mut nbd = Nbd::connect(&room.file("nbd.sock")).unwrap();
        let before = nbd.read(MIB / 2 - 4096, 4096).unwrap();
        std::fs::File::options().write(true).open(room.file("a")).unwrap().set_len(MIB / 2).unwrap();
        for (at, len) in [(MIB / 2, 4096), (MIB / 2 - 4096, 8192), (MIB - 512, 512)] {
            assert!(nbd.read(at, len).is_err(), "{engine}: {len} bytes at {at}");
        }
        assert!(nbd.read(MIB / 2 - 4096, 4096).unwrap() == before);
        let (code, said) = disk.stop();
        assert_eq!(code, Some(0), "{said}");
        assert!(said.contains("another program has cut off the end of"), "{said}");
    }
}

/// Cuts a file off as another program does.
fn cut(room: &Room, name: &str, len: u64) {
    std::fs::File::options().write(true).open(room.file(name)).unwrap().set_len(len).unwrap();
}

/// What is written behind the end of a cut file would make a hole of what was lost.
#[test]
fn writes_to_a_truncated_raw_file_fail() {
    for engine in ["uring", "aio"] {
        for threads in [1, 2] {
            let room = Room::new();
            room.make_raw("a", MIB);
            let words = format!("raw:a --nbd nbd.sock --io-engine {engine} --threads {threads}");
            let disk = Disk::serve(&room, &words);
            let mut nbd = Nbd::connect(&room.file("nbd.sock")).unwrap();
            nbd.write(MIB - 4096, &[1; 4096]).unwrap();
            cut(&room, "a", MIB / 2);
            assert!(nbd.write(MIB - 4096, &[2; 4096]).is_err(), "{engine}");
            assert!(nbd.read(MIB / 2, 4096).is_err(), "{engine}");
            assert_eq!(room.read("a").len() as u64, MIB / 2, "{engine}");
            assert!(disk.stop().1.contains("another program has cut off the end of"));
        }
    }
}

#[test]
fn reads_of_a_raw_file_truncated_after_a_live_resize_fail() {
    let room = Room::new();
    room.write("a", &[7; 1 << 20]);
    let disk = Disk::serve(&room, "raw:a --nbd nbd.sock --control c.sock");
    let resize = json!({"verb": "resize", "size": 2 * MIB});
    Control::connect(&room.file("c.sock")).done(&resize);
    let mut nbd = Nbd::connect(&room.file("nbd.sock")).unwrap();
    assert_eq!(nbd.read(2 * MIB - 512, 512).unwrap(), [0; 512]);
    cut(&room, "a", MIB);
    assert!(nbd.read(2 * MIB - 512, 512).is_err());
    assert_eq!(disk.stop().0, Some(0));
}

#[test]
fn reads_and_writes_of_a_truncated_image_fail() {
    for format in ["qcow2", "vhd"] {
        for grown in [false, true] {
            let room = Room::new();
            room.done(&format!("image create {format}:a --size 64M"));
            let image = format!("{format}:a");
            if !grown {
                room.guest(&image, &["write -P 1 0 8M"]);
            }
            let disk = Disk::serve(&room, &format!("{image} --nbd nbd.sock"));
            let mut nbd = Nbd::connect(&room.file("nbd.sock")).unwrap();
            if grown {
                (0..8).for_each(|n| nbd.write(n * MIB, &vec![1; 1 << 20]).unwrap());
                nbd.flush().unwrap();
            }
            cut(&room, "a", room.read("a").len() as u64 / 2);
            assert_eq!(nbd.read(0, 4096).unwrap(), [1; 4096], "{format}");
            assert!(nbd.read(7 * MIB, 4096).is_err(), "{format}, grown: {grown}");
            assert!(nbd.write(7 * MIB, &[2; 4096]).is_err(), "{format}, grown: {grown}");
            assert!(nbd.read(6 * MIB, 4096).is_err(), "{format}, grown: {grown}");
            // Its metadata cannot be written.
            assert!(disk.stop().1.contains("another program has cut off the end of"), "{format}");
        }
    }
}

/// Those whose ends are inside of blocks are widened, in memory that is put together for that.
#[test]
fn memory_does_not_grow_with_the_number_of_unaligned_requests() {
    let room = Room::new();
    room.done("image create raw:a.raw --size 4M");
    let disk = Disk::serve(&room, "raw:a.raw --nbd nbd.sock");
    let mut nbd = Nbd::connect(&room.file("nbd.sock")).unwrap();
    let resident = || {
        let status = std::fs::read_to_string(format!("/proc/{}/status", disk.child.id())).unwrap();
        let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
        line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap()
    };
    let mut work = |times: u64| {
        for _ in 0..times {
            nbd.write(100, &[5; 4096]).unwrap();
            assert_eq!(nbd.read(100, 4096).unwrap(), [5; 4096]);
        }
    };
    work(100);
    let before = resident();
    work(2000);
    // One page of each request would be 16 MiB.
    let grown = resident().saturating_sub(before);
    assert!(grown < 8 << 10, "{grown} KiB more than before");
    assert_eq!(disk.stop().0, Some(0));
}
