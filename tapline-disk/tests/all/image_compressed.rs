//! `image convert --compress`.

use crate::tool::{Room, noise};

const MIB: u64 = 1 << 20;

/// Creates a disk with zeroes, with compressible and incompressible data, and with data that repeats only at a
/// distance.
fn mixed_disk(room: &Room, name: &str, len: usize) {
    let mut bytes = Vec::new();
    while bytes.len() < len {
        let text: Vec<u8> = (0..700_000u32).flat_map(|n| (n / 5).to_string().into_bytes()).take(700_000).collect();
        bytes.extend(text);
        bytes.extend(vec![0; 300_000]);
        let seed = bytes.len() as u64;
        bytes.extend(noise(seed, 500_000));
        bytes.extend(noise(seed + 1, 31_000).repeat(20));
    }
    bytes.truncate(len);
    room.write(name, &bytes);
}

#[test]
#[ignore = "slow: run by `make test-all`"]
fn a_compressed_image_is_intact_and_the_same_for_us_and_for_qemu() {
    let room = Room::new();
    mixed_disk(&room, "a.raw", (40 << 20) + 512);
    room.done("image convert raw:a.raw qcow2:plain.q");
    for (n, options) in [
        "--compress",
        "--compress=zstd",
        "--compress=zlib --threads 1",
        "--compress=zstd --threads 7 --cluster-size 2M",
        "--compress --cluster-size 128K",
    ]
    .into_iter()
    .enumerate()
    {
        let said = room.done(&format!("image convert raw:a.raw qcow2:{n}.q {options} --verify"));
        assert!(said.contains("compressed to "), "{said}");
        room.sound_and_closed(&format!("qcow2:{n}.q"));
        room.tool("qemu-img", &format!("check -f qcow2 {n}.q"));
        room.tool("qemu-img", &format!("compare -f raw -F qcow2 a.raw {n}.q"));
        assert!(room.space(&format!("{n}.q")) < room.space("plain.q") * 2 / 3, "{options}");
        let zstd = options.contains("zstd");
        let info = room.tool("qemu-img", &format!("info {n}.q"));
        assert!(info.contains(if zstd { "compression type: zstd" } else { "compression type: zlib" }), "{info}");
    }
    assert_eq!(room.json("image check qcow2:0.q")["result"], "clean");
}

#[test]
fn a_compressed_image_can_be_written_to() {
    let room = Room::new();
    mixed_disk(&room, "a.raw", 16 << 20);
    room.done("image convert raw:a.raw qcow2:a.q --compress=zstd");
    room.guest("qcow2:a.q", &["write -P 1 0 64k", "write -P 2 3M 100k", "discard 5M 1M", "read -P 1 0 64k"]);
    room.sound_and_closed("qcow2:a.q");
    room.tool("qemu-img", "check -f qcow2 a.q");
}

#[test]
fn an_empty_disk_and_a_pipe_are_compressed_too() {
    let room = Room::new();
    room.done("image create raw:empty.raw --size 1G");
    let done = room.json("image convert raw:empty.raw qcow2:empty.q --compress");
    assert_eq!((&done["written"], &done["compressed"]), (&0.into(), &0.into()));
    room.tool("qemu-img", "compare -f raw -F qcow2 empty.raw empty.q");
    mixed_disk(&room, "a.raw", 5 << 20);
    let pipe = "cat a.raw | $0 image convert - qcow2:a.q --size 5M --compress --threads 2";
    let said = room.run_words("sh", &["-c", pipe, crate::tool::TAPLINE]);
    assert_eq!(said.code, Some(0), "{said:?}");
    room.tool("qemu-img", "check -f qcow2 a.q");
    assert_eq!(room.json("image compare raw:a.raw qcow2:a.q")["same"], true);
}

#[test]
fn only_qcow2_is_compressed() {
    let room = Room::new();
    room.make_raw("a.raw", 16 * MIB);
    for (words, why) in [
        ("vhd:b --compress", "only qcow2 images"),
        ("qcow2:b --compress=lzma", "invalid value"),
        ("qcow2:b --threads 2", "--compress"),
    ] {
        let said = room.tapline(&format!("image convert raw:a.raw {words}"));
        assert!(said.code == Some(64) && said.err.contains(why), "{words}: {said:?}");
        assert!(!room.file("b").exists());
    }
}
