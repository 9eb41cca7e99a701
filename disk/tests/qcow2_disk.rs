//! qcow2 images under a disk, with QEMU as the judge.
//!
//! Invariants checked: whatever a guest does, it reads what it wrote; after a flush qemu-img finds the file without
//! error or leak, and in it what the guest reads; and what QEMU makes, we read as QEMU does.

#![allow(clippy::cast_possible_truncation, reason = "sizes of tests fit")]

#[path = "qcow2/rig.rs"]
#[allow(dead_code, reason = "shared with the test of power losses")]
mod rig;
#[path = "qcow2/room.rs"]
#[allow(dead_code, reason = "shared with the test of checks")]
mod room;

use disk::qcow2::{Qcow2, Spec, create};
use disk::{Access, Action, FileError, Image, Link, Tail};
use fastrand::Rng;
use rig::{Rig, file_of, open};
use room::{Class, Room};

const MIB: u64 = 1 << 20;

fn spec(len: u64, cluster_size: u32, parent: Option<Link>) -> Spec {
    Spec { len, cluster_size, uuid: [7; 16], parent, compression: Default::default() }
}

fn link(name: &str, format: &'static str) -> Link {
    Link {
        format: Some(format),
        uuid: [9; 16],
        relative: name.to_owned(),
        absolute: String::new(),
        len: Some(32 * MIB),
        modified: None,
    }
}

/// What a guest might do, drawn from the rig's seed; nothing overlaps what is under way.
fn work(rig: &mut Rig, steps: u64, cluster: u64) {
    let len = rig.disk.geometry().len;
    for step in 0..steps {
        // Clusters of its own for each request of a batch: half a dozen at once, in neighbouring places.
        let slot = len / 6 / 512 * 512;
        for part in 0..6 {
            let unit = [512, 4096, cluster][rig.files.random.usize(..3)];
            let size = (1 + rig.files.random.u64(..3 * cluster / unit + 1)) * unit;
            let size = size.min(slot);
            let at = part * slot + rig.files.random.u64(..(slot - size) / unit.min(slot) + 1) * unit.min(512);
            let at = at.min(part * slot + slot - size);
            match rig.files.random.u64(..8) {
                0 | 1 => rig.zero(at / 512 * 512, size),
                2 => rig.zero(at / cluster * cluster, (2 * cluster).min(len - at / cluster * cluster)),
                _ => rig.write(at / 512 * 512, size, (step % 255) as u8 + 1),
            }
        }
        if rig.files.random.u64(..3) == 0 {
            rig.flush();
        }
        assert!(rig.finish());
    }
    rig.flush();
    assert!(rig.finish());
}

/// Asserts that QEMU finds the file sound and reads what the model has.
fn judge(room: &Room, rig: &Rig, name: &str) {
    room.write(name, &rig.files.bytes[0]);
    assert_eq!(room.qemu_class(name), Class::Clean, "{name}: {}", room.qemu_text(name));
    room.img(&format!("convert -f qcow2 -O raw {name} {name}.raw"));
    let read = room.read(&format!("{name}.raw"));
    let wrong = read.iter().zip(&rig.model).position(|(found, expected)| found != expected);
    assert_eq!((wrong, read.len()), (None, rig.model.len()), "{name}: QEMU reads something else from there on");
}

#[test]
fn a_new_image_is_sound_to_qemu() {
    let room = Room::new();
    for (cluster, len) in [(64 << 10, MIB), (2 << 20, 3 * MIB + 512), (128 << 10, 64 << 40), (64 << 10, 16 << 40)] {
        let creation = create(&spec(len, cluster, None)).unwrap();
        room.write("new", &file_of(&creation));
        assert_eq!(room.qemu_class("new"), Class::Clean, "{}", room.qemu_text("new"));
        let file = file_of(&creation);
        let image = Qcow2::open(&mut file.as_slice(), Access::ReadWrite, Tail::Zeroes).unwrap();
        assert_eq!((image.info().len, image.info().uuid), (len, [7; 16]));
    }
}

#[test]
#[ignore = "slow: run by `make test-all`"]
fn what_a_guest_writes_is_what_it_and_qemu_read() {
    for seed in 0..12 {
        let cluster = [64 << 10, 128 << 10][seed as usize % 2];
        let tail = if seed % 3 == 0 { Tail::Stale } else { Tail::Zeroes };
        let room = Room::new();
        let mut file = file_of(&create(&spec(24 * MIB + 512, cluster, None)).unwrap());
        if tail == Tail::Stale {
            file.resize(40 * MIB as usize, 0xee);
        }
        let image = open(&mut file, tail);
        let mut rig = Rig::new(vec![image], vec![file], vec![0; 24 * MIB as usize + 512], seed);
        rig.files.can_deallocate = seed % 4 != 1;
        println!("seed {seed}");
        for _ in 0..4 {
            work(&mut rig, 12, cluster.into());
            rig.verify();
            judge(&room, &rig, "leaf");
        }
    }
}

#[test]
#[ignore = "slow: run by `make test-all`"]
fn a_child_hides_its_parent_cluster_by_cluster() {
    for seed in 0..8 {
        println!("seed {seed}");
        let room = Room::new();
        let len = 16 * MIB + 1024;
        let base: Vec<u8> = (0..len).map(|at| (at / 512 % 251) as u8).collect();
        room.write("base", &base);
        let mut file = file_of(&create(&spec(len, 64 << 10, Some(link("base", "raw")))).unwrap());
        let image = open(&mut file, Tail::Zeroes);
        assert!(matches!(&image, Image::Qcow2(image) if image.has_parent()));
        let parent = Image::Raw(disk::raw::Raw::new(len, 512, true).unwrap());
        let mut rig = Rig::new(vec![image, parent], vec![file, base.clone()], base, seed);
        for _ in 0..4 {
            work(&mut rig, 8, 64 << 10);
            rig.verify();
            judge(&room, &rig, "leaf");
        }
        // Again, opened anew.
        let mut file = rig.files.bytes[0].clone();
        let image = open(&mut file, Tail::Zeroes);
        let parent = Image::Raw(disk::raw::Raw::new(len, 512, true).unwrap());
        let base = rig.files.bytes[1].clone();
        let mut rig = Rig::new(vec![image, parent], vec![file, base], rig.model, seed);
        rig.verify();
        work(&mut rig, 8, 64 << 10);
        judge(&room, &rig, "leaf");
    }
}

#[test]
fn images_of_qemu_are_read_and_written() {
    let room = Room::new();
    let writes =
        "write -P 1 0 1M;write -P 2 3M 192k;write -z 5M 1M;discard 3M 64k;write -P 3 9M 128k;write -P 4 9100k 12k";
    for (number, options) in [
        "-o cluster_size=512",
        "-o cluster_size=4k",
        "-o cluster_size=64k",
        "-o cluster_size=2M",
        "-o cluster_size=64k,preallocation=metadata",
        "-o cluster_size=64k,lazy_refcounts=on",
        "-o cluster_size=64k,refcount_bits=1",
        "-o cluster_size=4k,refcount_bits=2",
        "-o cluster_size=4k,refcount_bits=8",
        "-o cluster_size=64k,refcount_bits=64",
        "-o cluster_size=64k,compression_type=zstd",
        "-o cluster_size=16k,extended_l2=on",
        "-o cluster_size=128k,extended_l2=on,preallocation=metadata",
        "-o cluster_size=2M,extended_l2=on,refcount_bits=1",
    ]
    .into_iter()
    .enumerate()
    {
        println!("{options}");
        room.img(&format!("create -q -f qcow2 {options} image 12M"));
        room.io("image", writes);
        room.img("convert -f qcow2 -O raw image image.raw");
        let mut file = room.read("image");
        let model = room.read("image.raw");
        let mut rig = Rig::new(vec![open(&mut file, Tail::Zeroes)], vec![file], model, number as u64);
        rig.verify();
        work(&mut rig, 20, 64 << 10);
        rig.verify();
        judge(&room, &rig, "image");
    }
}

/// Subclusters of every kind, with and without a place, over a parent: made by QEMU, written to by us and by QEMU in
/// turns.
#[test]
fn subclusters_are_read_and_written_over_a_parent() {
    let room = Room::new();
    let len = 12 * MIB;
    let base: Vec<u8> = (0..len).map(|at| (at / 512 % 251) as u8).collect();
    room.write("base", &base);
    for (seed, cluster) in [(0, "16k"), (1, "64k"), (2, "128k"), (3, "2M")] {
        println!("seed {seed}");
        room.img(&format!("create -q -f qcow2 -o cluster_size={cluster},extended_l2=on -b base -F raw image {len}"));
        let mut model = base.clone();
        for turn in 0..3 {
            let far = (6 + turn) * MIB;
            // Zeroes first, so that some of a cluster without a place read as zero.
            room.io(
                "image",
                &format!("write -z {far} 64k;write -P 9 {} 64k;discard {} 192k", far + 98304, far + 524_288),
            );
            room.io("image", &format!("write -P 7 {} 64k;write -P 8 {} 4k", turn * MIB + 65536, turn * MIB + 262_144));
            room.io("image", "write -z 69632 4k;write -z -u 4M 64k");
            room.img("convert -f qcow2 -O raw image image.raw");
            model = room.read("image.raw");
            let mut file = room.read("image");
            let parent = Image::Raw(disk::raw::Raw::new(len, 512, true).unwrap());
            let leaf = open(&mut file, Tail::Zeroes);
            let mut rig = Rig::new(vec![leaf, parent], vec![file, base.clone()], model.clone(), seed * 3 + turn);
            rig.verify();
            work(&mut rig, 3, 64 << 10);
            rig.verify();
            judge(&room, &rig, "image");
        }
        assert_ne!(model, base);
    }
}

#[test]
#[ignore = "slow: run by `make test-all`"]
fn compressed_clusters_are_read_and_written_over() {
    let room = Room::new();
    let mut random = Rng::with_seed(5);
    let bytes: Vec<u8> = (0..8 * MIB).map(|at| if at % 7 < 3 { random.u8(..) } else { (at >> 16) as u8 }).collect();
    room.write("raw", &bytes);
    for (number, options) in [
        "cluster_size=64k",
        "cluster_size=64k,compression_type=zstd",
        "cluster_size=4k",
        "cluster_size=1M",
        "cluster_size=64k,extended_l2=on",
    ]
    .into_iter()
    .enumerate()
    {
        println!("{options}");
        room.img(&format!("convert -c -f raw -O qcow2 -o {options} raw image"));
        let mut file = room.read("image");
        let mut rig = Rig::new(vec![open(&mut file, Tail::Zeroes)], vec![file], bytes.clone(), number as u64);
        rig.verify();
        for _ in 0..3 {
            work(&mut rig, 10, 64 << 10);
            rig.verify();
            judge(&room, &rig, "image");
        }
        let all = rig.disk.geometry().len;
        rig.zero(0, all);
        rig.flush();
        assert!(rig.finish());
        judge(&room, &rig, "image");
    }
}

#[test]
fn a_file_with_holes_is_filled_before_it_grows() {
    let mut file = file_of(&create(&spec(16 * MIB, 64 << 10, None)).unwrap());
    let image = open(&mut file, Tail::Zeroes);
    let mut rig = Rig::new(vec![image], vec![file], vec![0; 16 * MIB as usize], 1);
    for pass in 1..20 {
        rig.write(0, 8 * MIB, pass);
        assert!(rig.finish());
        rig.zero(0, 8 * MIB);
        rig.flush();
        assert!(rig.finish());
    }
    let len = rig.files.bytes[0].len() as u64;
    assert!(len < 18 * MIB, "the file has {len} bytes");
    // Opened anew, what is free inside is found again.
    let mut file = rig.files.bytes[0].clone();
    let image = open(&mut file, Tail::Zeroes);
    let mut rig = Rig::new(vec![image], vec![file], rig.model, 1);
    for pass in 1..20 {
        rig.write(0, 8 * MIB, pass);
        assert!(rig.finish());
        rig.zero(0, 8 * MIB);
        rig.flush();
        assert!(rig.finish());
    }
    let longer = rig.files.bytes[0].len() as u64;
    assert!(longer < len + 10 * MIB, "the file has {longer} bytes");
}

/// An image of QEMU with clusters of 512 bytes, one block of refcounts to 128 KiB of the file, and 64 KiB of data; what
/// it holds, and a MiB behind it that nothing knows of, as a program leaves it that was killed.
fn with_tail() -> (Vec<u8>, Vec<u8>) {
    let room = Room::new();
    room.img("create -q -f qcow2 -o cluster_size=512 image 2M");
    room.io("image", "write -P 1 0 64k");
    let mut model = vec![0; 2 * MIB as usize];
    model[..64 << 10].fill(1);
    let mut file = room.read("image");
    file.resize(file.len() + MIB as usize, 0xee);
    (file, model)
}

fn word(file: &[u8], at: usize) -> usize {
    u64::from_be_bytes(file[at..at + 8].try_into().unwrap()) as usize & 0xff_ffff_ffff_fe00
}

fn set_word(file: &mut [u8], at: usize, value: usize) {
    file[at..at + 8].copy_from_slice(&(value as u64).to_be_bytes());
}

#[test]
fn what_no_refcount_block_counts_is_used_before_the_file_grows() {
    let room = Room::new();
    let (mut file, model) = with_tail();
    let len = file.len();
    let image = open(&mut file, Tail::Zeroes);
    let mut rig = Rig::new(vec![image], vec![file], model, 1);
    for piece in 2..14 {
        rig.write(piece * (64 << 10), 64 << 10, piece as u8);
        rig.flush();
        assert!(rig.finish());
    }
    rig.flush();
    assert!(rig.finish());
    rig.verify();
    judge(&room, &rig, "image");
    assert_eq!(rig.files.bytes[0].len(), len, "there were 1024 KiB for 768 KiB and what they take to count");
}

#[test]
fn what_a_lost_refcount_block_has_counted_is_left_alone() {
    let (mut file, model) = with_tail();
    // The block of the first clusters, among which all tables stand.
    let table = word(&file, 48);
    set_word(&mut file, table, 0);
    let image = open(&mut file, Tail::Zeroes);
    let mut rig = Rig::new(vec![image], vec![file], model, 1);
    rig.write(MIB, MIB, 7);
    assert!(rig.finish());
    rig.verify();
}

#[test]
fn what_an_entry_refers_to_is_left_alone_though_no_refcount_block_counts_it() {
    let (mut file, model) = with_tail();
    // The second cluster of the disk moves to where nothing is counted.
    let place = 512 << 10;
    file[place..place + 512].fill(1);
    let entry = word(&file, word(&file, 40)) + 8;
    set_word(&mut file, entry, 1 << 63 | place);
    let image = open(&mut file, Tail::Zeroes);
    let mut rig = Rig::new(vec![image], vec![file], model, 1);
    rig.verify();
    rig.write(MIB, MIB, 7);
    assert!(rig.finish());
    rig.verify();
    assert_eq!(rig.files.bytes[0][place..place + 512], [1; 512]);
    let end = place / (128 << 10) * (128 << 10) + (128 << 10);
    assert!(rig.files.bytes[0][place + 512..end].iter().all(|&byte| byte == 0xee), "its neighbours were handed out");
}

/// An image of QEMU with 2 MiB of data at the beginning and as much at the end of 16 MiB; what it holds.
fn with_two_pieces(options: &str) -> (Vec<u8>, Vec<u8>) {
    let room = Room::new();
    room.img(&format!("create -q -f qcow2 -o {options} image 16M"));
    room.io("image", "write -P 1 0 2M; write -P 2 14M 2M");
    let mut model = vec![0; 16 * MIB as usize];
    model[..2 << 20].fill(1);
    model[14 << 20..].fill(2);
    (room.read("image"), model)
}

/// Writes to what has no place yet, and asserts that nothing else has changed. A device, all of which one block counts,
/// has no space that is known to be free.
fn assert_nothing_is_lost(mut file: Vec<u8>, model: Vec<u8>, tail: Tail, name: &str) {
    let image = open(&mut file, tail);
    let mut rig = Rig::new(vec![image], vec![file], model, 1);
    for piece in 4..12 {
        rig.write(piece * MIB, MIB, 7);
        rig.flush();
        let done = rig.finish();
        assert!(done || tail == Tail::Stale, "{name}");
        if !done {
            rig.model[(piece * MIB) as usize..][..MIB as usize].fill(0);
        }
    }
    rig.zero(MIB, MIB);
    assert!(rig.finish(), "{name}");
    rig.verify();
}

#[test]
fn what_a_zeroed_refcount_block_has_counted_is_left_alone() {
    for options in ["cluster_size=64k", "cluster_size=64k,refcount_bits=1", "cluster_size=4k,extended_l2=off"] {
        let (mut file, model) = with_two_pieces(options);
        let cluster = 1 << u32::from_be_bytes(file[20..24].try_into().unwrap());
        let block = word(&file, word(&file, 48));
        file[block..block + cluster].fill(0);
        assert_nothing_is_lost(file.clone(), model.clone(), Tail::Zeroes, options);
        // A device, whose last refcounts say where the image ends.
        file.resize(64 << 20, 0xee);
        assert_nothing_is_lost(file, model, Tail::Stale, options);
    }
}

#[test]
fn what_an_entry_at_hand_refers_to_is_left_alone_though_its_refcount_is_zero() {
    let (mut file, model) = with_two_pieces("cluster_size=64k");
    // The tables have their references.
    let block = word(&file, word(&file, 48));
    file[block + 2 * 8..block + 4096].fill(0);
    assert_nothing_is_lost(file.clone(), model.clone(), Tail::Zeroes, "a file");
    file.resize(64 << 20, 0xee);
    assert_nothing_is_lost(file, model, Tail::Stale, "a device");
}

#[test]
#[ignore = "slow: run by `make test-all`"]
fn failed_metadata_writes_are_made_up_for() {
    for seed in 0..40 {
        println!("seed {seed}");
        let room = Room::new();
        let mut file = file_of(&create(&spec(24 * MIB, 64 << 10, None)).unwrap());
        let image = open(&mut file, Tail::Zeroes);
        let mut rig = Rig::new(vec![image], vec![file], vec![0; 24 * MIB as usize], seed);
        rig.write(0, 4096, 1);
        rig.write(9 * MIB, 192 << 10, 2);
        assert!(rig.finish());
        rig.zero(9 * MIB, 64 << 10);
        rig.write(12 * MIB, 4096, 3);
        assert!(rig.finish());
        let mut left = seed % 5;
        rig.files.fault = Box::new(move |op| {
            let fails = left == 0 && matches!(op.action, Action::Write { .. });
            left -= u64::from(left > 0 && matches!(op.action, Action::Write { .. }));
            fails.then_some(FileError::Failed(5))
        });
        rig.flush();
        rig.finish();
        rig.files.fault = Box::new(|_| None);
        rig.write(20 * MIB, 8192, 4);
        assert!(rig.finish());
        rig.flush();
        assert!(rig.finish());
        rig.verify();
        judge(&room, &rig, "leaf");
    }
}

#[test]
fn a_plain_allocating_round_has_two_batches() {
    let mut file = file_of(&create(&spec(24 * MIB, 64 << 10, None)).unwrap());
    let image = open(&mut file, Tail::Zeroes);
    let mut rig = Rig::new(vec![image], vec![file], vec![0; 24 * MIB as usize], 3);
    rig.write(0, 4096, 1);
    assert!(rig.finish());
    rig.flush();
    assert!(rig.finish());
    assert_eq!(rig.files.log.iter().filter(|op| op.1 && op.3 == 0).count(), 3, "the data, and each batch");
    assert_eq!(rig.dirty(), 0);
}

/// What an image holds now, and each of its snapshots, as QEMU sees them.
fn shown(room: &Room, image: &str, snapshots: &[&str]) -> Vec<Vec<u8>> {
    let mut found = Vec::new();
    room.img(&format!("convert -f qcow2 -O raw {image} shown.raw"));
    found.push(room.read("shown.raw"));
    for snapshot in snapshots {
        room.img(&format!("convert -f qcow2 -l {snapshot} -O raw {image} shown.raw"));
        found.push(room.read("shown.raw"));
    }
    found
}

/// For each version and several sizes: QEMU makes snapshots, we write, trim and zero, in two sessions with one more
/// snapshot of QEMU's between them. All snapshots stay as they were, and QEMU finds nothing wrong.
#[test]
#[ignore = "slow: run by `make test-all`"]
fn what_snapshots_hold_outlives_our_writes() {
    for options in [
        "-o cluster_size=64k",
        "-o compat=0.10",
        "-o cluster_size=4k",
        "-o cluster_size=512,refcount_bits=8",
        "-o cluster_size=256k,refcount_bits=64",
        "-o cluster_size=64k,refcount_bits=4",
        "-c -o cluster_size=64k",
    ] {
        let room = Room::new();
        match options.strip_prefix("-c ") {
            None => room.img(&format!("create -q -f qcow2 {options} image 8M")),
            // Compressed clusters that share a cluster of the file.
            Some(options) => {
                room.write("plain", &(0..8 * MIB).map(|at| (at / 512 % 251) as u8).collect::<Vec<u8>>());
                room.img(&format!("convert -c -f raw -O qcow2 {options} plain image"))
            }
        };
        room.io("image", "write -P 1 0 3M;write -P 3 5M 100k");
        room.img("snapshot -c one image");
        room.io("image", "write -P 2 1M 1M");
        room.img("snapshot -c two image");
        let mut snapshots = vec!["one", "two"];
        for session in 0..2 {
            let before = shown(&room, "image", &snapshots);
            let mut file = room.read("image");
            let cluster = 1 << file[23];
            let mut rig = Rig::new(vec![open(&mut file, Tail::Zeroes)], vec![file], before[0].clone(), session + 1);
            rig.verify();
            work(&mut rig, 8, cluster);
            rig.verify();
            judge(&room, &rig, "image");
            let after = shown(&room, "image", &snapshots);
            assert!(before[1..] == after[1..], "{options}: a snapshot has changed");
            assert!(after[0] == rig.model, "{options}: QEMU reads something else");
            let next = ["three", "four"][session as usize];
            room.img(&format!("snapshot -c {next} image"));
            snapshots.push(next);
        }
        // What we wrote is freed again, and what was before is there.
        let old = shown(&room, "image", &["one"]);
        room.img("snapshot -a one image");
        assert!(shown(&room, "image", &[])[0] == old[1], "{options}");
        assert_eq!(room.qemu_class("image"), Class::Clean, "{}", room.qemu_text("image"));
        for snapshot in snapshots {
            room.img(&format!("snapshot -d {snapshot} image"));
        }
        assert_eq!(room.qemu_class("image"), Class::Clean, "{}", room.qemu_text("image"));
    }
}

/// QEMU lets a disk grow whose snapshots say how large they are, as those of version 3, and no other.
#[test]
fn a_disk_with_snapshots_grows_where_qemu_lets_it_grow() {
    for (options, grows) in [("-o cluster_size=4k", true), ("-o cluster_size=4k,compat=0.10", false)] {
        let room = Room::new();
        room.img(&format!("create -q -f qcow2 {options} image 8M"));
        room.io("image", "write -P 1 0 1M;write -P 2 7M 1M");
        room.img("snapshot -c one image");
        let before = shown(&room, "image", &["one"]);
        let mut file = room.read("image");
        let mut rig = Rig::new(vec![open(&mut file, Tail::Zeroes)], vec![file], before[0].clone(), 1);
        let grown = rig.grow(40 * MIB);
        assert_eq!(grown.is_ok(), grows, "{grown:?}");
        assert_eq!(room.run("qemu-img", &["resize", "-q", "image", "40M"]).status.success(), grows);
        if grows {
            rig.write(8 * MIB - 4096, 12 << 10, 5);
            rig.write(39 * MIB, 4096, 6);
            assert!(rig.finish());
            rig.flush();
            assert!(rig.finish());
            rig.verify();
            judge(&room, &rig, "image");
            // QEMU shows a snapshot with the size that the disk has now.
            let after = shown(&room, "image", &["one"]).remove(1);
            let (same, new) = after.split_at(before[1].len());
            assert!(same == before[1] && new.iter().all(|&byte| byte == 0), "the snapshot has changed");
            room.img("snapshot -a one image");
            assert!(shown(&room, "image", &[])[0] == before[1], "it has kept its size");
        }
    }
}

#[test]
fn an_image_whose_snapshots_cannot_be_made_out_is_only_read() {
    let room = Room::new();
    room.img("create -q -f qcow2 image 8M");
    room.io("image", "write -P 1 0 1M");
    room.img("snapshot -c one image");
    let mut file = room.read("image");
    let table = usize::try_from(u64::from_be_bytes(file[64..72].try_into().unwrap())).unwrap();
    file[table + 7] = 1;
    let error = Qcow2::open(&mut file.as_slice(), Access::ReadWrite, Tail::Zeroes).unwrap_err();
    assert!(error.what.contains("snapshots"), "{error}");
    assert!(Qcow2::open(&mut file.as_slice(), Access::ReadOnly, Tail::Zeroes).is_ok());
}

#[test]
fn bitmaps_of_others_are_void_once_we_write() {
    let room = Room::new();
    room.img("create -q -f qcow2 image 8M");
    room.img("bitmap --add image nightly");
    room.io("image", "write -P 1 0 3M");
    room.img("convert -f qcow2 -O raw image image.raw");
    let mut file = room.read("image");
    let image = open(&mut file, Tail::Zeroes);
    let Image::Qcow2(qcow2) = &image else { panic!("not qcow2") };
    assert_eq!(
        (qcow2.info().bitmaps.as_slice(), qcow2.info().bitmaps_valid),
        (["nightly".to_owned()].as_slice(), true)
    );
    let mut rig = Rig::new(vec![image], vec![file], room.read("image.raw"), 1);
    rig.write(4 * MIB, 4096, 7);
    rig.flush();
    assert!(rig.finish());
    room.write("image", &rig.files.bytes[0]);
    // QEMU does not believe the bitmap any more, and knows whose its clusters are.
    assert_eq!(room.qemu_class("image"), Class::Clean, "{}", room.qemu_text("image"));
    let mut again = rig.files.bytes[0].clone();
    let opened = Qcow2::open(&mut again.as_slice(), Access::ReadWrite, Tail::Zeroes).unwrap();
    assert!(!opened.info().bitmaps_valid && opened.first_writes().is_empty());
    let said = room.run("qemu-img", &["info", "image"]);
    let said = String::from_utf8_lossy(&said.stdout).into_owned();
    assert!(said.contains("nightly") && said.contains("in-use"), "{said}");
    assert!(!room.run("qemu-img", &["bitmap", "--clear", "image", "nightly"]).status.success(), "it is inconsistent");
    room.img("bitmap --remove image nightly");
    assert_eq!(room.qemu_class("image"), Class::Clean, "{}", room.qemu_text("image"));
    // A directory that makes no sense: the bit of all bitmaps goes, as before.
    let directory = disk::Source::len(&again.as_slice());
    let extension = again.windows(8).position(|bytes| bytes == [0x23, 0x85, 0x28, 0x75, 0, 0, 0, 24]).unwrap();
    again[extension + 16 + 8..][..8].copy_from_slice(&directory.to_be_bytes());
    let opened = Qcow2::open(&mut again.as_slice(), Access::ReadWrite, Tail::Zeroes).unwrap();
    assert_eq!(opened.first_writes().len(), 1);
    assert_eq!(opened.first_writes()[0].bytes[88..96], [0; 8]);
}

#[test]
fn a_chain_of_qemus_is_read_and_written() {
    let room = Room::new();
    let base: Vec<u8> = (0..8 * MIB).map(|at| (at / 4096 % 200) as u8).collect();
    room.write("base", &base);
    room.img("create -q -f qcow2 -b base -F raw mid 8M");
    room.io("mid", "write -P 250 1M 2M;write -z 4M 1M;write -P 251 100k 4k");
    room.img("create -q -f qcow2 -o cluster_size=128k -b mid -F qcow2 top 8M");
    room.io("top", "write -P 252 2M 1M;write -P 253 6M 8k");
    room.img("convert -f qcow2 -O raw top top.raw");
    let (mut top, mid) = (room.read("top"), room.read("mid"));
    let leaf = open(&mut top, Tail::Zeroes);
    let Image::Qcow2(qcow2) = &leaf else { panic!("not qcow2") };
    let link = qcow2.link().unwrap();
    assert_eq!((link.relative.as_str(), link.format, link.uuid), ("mid", Some("qcow2"), [0; 16]));
    let middle = Qcow2::open(&mut mid.as_slice(), Access::ReadOnly, Tail::Zeroes).unwrap();
    let bottom = Image::Raw(disk::raw::Raw::new(8 * MIB, 512, true).unwrap());
    let layers = vec![leaf, Image::Qcow2(Box::new(middle)), bottom];
    let mut rig = Rig::new(layers, vec![top, mid, base], room.read("top.raw"), 4);
    rig.verify();
    work(&mut rig, 15, 128 << 10);
    rig.verify();
    judge(&room, &rig, "top");
}

#[test]
fn version_2_is_read_and_written() {
    let room = Room::new();
    room.img("create -q -f qcow2 -o compat=0.10 image 8M");
    room.io("image", "write -P 1 0 3M;discard 1M 64k;write -P 2 5M 12k");
    room.img("convert -f qcow2 -O raw image image.raw");
    let mut file = room.read("image");
    let mut rig = Rig::new(vec![open(&mut file, Tail::Zeroes)], vec![file], room.read("image.raw"), 1);
    rig.verify();
    work(&mut rig, 30, 64 << 10);
    judge(&room, &rig, "image");
    assert_eq!(rig.files.bytes[0][7], 2, "it stays of version 2");
}

#[test]
fn version_2_hides_its_parent_with_zeroes_that_it_writes() {
    let room = Room::new();
    let base: Vec<u8> = (0..8 * MIB).map(|at| (at / 4096 % 200) as u8).collect();
    room.write("base", &base);
    room.img("create -q -f qcow2 -o compat=0.10 -b base -F raw image 8M");
    room.io("image", "write -P 250 1M 1M");
    room.img("convert -f qcow2 -O raw image image.raw");
    let mut file = room.read("image");
    let bottom = Image::Raw(disk::raw::Raw::new(8 * MIB, 512, true).unwrap());
    let layers = vec![open(&mut file, Tail::Zeroes), bottom];
    let mut rig = Rig::new(layers, vec![file, base], room.read("image.raw"), 1);
    rig.zero(MIB / 2, MIB);
    assert!(rig.finish());
    rig.flush();
    assert!(rig.finish());
    rig.verify();
    judge(&room, &rig, "image");
    work(&mut rig, 20, 64 << 10);
    rig.verify();
    judge(&room, &rig, "image");
}
