//! qcow2 images with an external data file, together with QEMU, which creates them and reads what was written.

use std::fs;

use fastrand::Rng;
use serde_json::json;

use crate::tool::control::Control;
use crate::tool::served::Disk;
use crate::tool::{Room, from_environment};

const IMAGE: &str = "qcow2:a,data-file=a.data";
const MIB: u64 = 1 << 20;

/// Checks that QEMU finds no error in `a`, and that its data file alone has the contents of the disk.
fn is_sound(room: &Room, is_raw: bool) {
    assert_eq!(room.json(&format!("image check {IMAGE}"))["result"], "clean");
    room.tool("qemu-img", "check -q -f qcow2 a");
    if is_raw {
        room.tool("qemu-img", "compare -q -f raw -F qcow2 a.data a");
        let features = &room.json(&format!("image info {IMAGE}"))[0]["qcow2"]["autoclear_features"];
        assert_eq!(*features, json!(["raw external data"]), "what is true is not forgotten");
    }
}

#[test]
fn an_image_without_its_data_file_given_is_refused_with_a_suggestion() {
    let room = Room::new();
    room.tool("qemu-img", "create -q -f qcow2 -o data_file=a.data a 8M");
    room.tool("qemu-img", "create -q -f qcow2 b 8M");
    let refused = |words: &str, why: &str| {
        let said = room.tapline(words);
        assert!(matches!(said.code, Some(4 | 64)) && said.err.contains(why), "{words}: {said:?}");
    };
    for verb in ["map", "info", "check"] {
        refused(&format!("image {verb} qcow2:a"), "calls \"a.data\": name that too, as qcow2:IMAGE,data-file=FILE");
        refused(&format!("image {verb} qcow2:b,data-file=a.data"), "a data file was named");
    }
    refused("image map qcow2:a,data-file=a", "its data file is already another file of this chain");
    refused("image map qcow2:a,data-file=nowhere", "nowhere");
    refused("image map raw:a.data,data-file=a", "only qcow2 images have data files");
    refused("image create qcow2:c,data-file=d --size 8M", "a new image cannot have an external data file");
    refused(&format!("image convert raw:a.data {IMAGE}"), "a new image cannot have an external data file");
    refused(&format!("image compact {IMAGE}"), "it cannot have gaps");
    let info = &room.json(&format!("image info {IMAGE}"))[0];
    assert_eq!((&info["qcow2"]["data_file"], &info["data_file"]["file_size"]), (&json!("a.data"), &json!(8 * MIB)));
    let _server = Disk::serve(&room, &format!("{IMAGE} --nbd ./nbd.sock --control control.sock"));
    let told = Control::connect(&room.file("control.sock")).done(&json!({ "verb": "layers" }));
    assert_eq!(told["layers"][0]["data_file"], json!(room.file("a.data")), "{told}");
    refused("image resize raw:a.data --size 16M", "in use");
}

/// Returns the output of a command that may fail.
fn json_of(room: &Room, words: &str) -> serde_json::Value {
    let said = room.tapline(&format!("{words} --json"));
    serde_json::from_str(&said.out).unwrap_or_else(|error| panic!("{words}: {error}: {said:?}"))
}

/// Writes, zeroes and discards of both programs in turn, compared with an array of bytes.
#[test]
#[ignore = "slow: run by `make test-all`"]
fn tapline_and_qemu_read_each_others_writes() {
    const LEN: u64 = 16 * MIB;
    let kinds = [
        ("data_file=a.data", true),
        ("data_file=a.data,data_file_raw=on", true),
        ("data_file=a.data,data_file_raw=on,extended_l2=on", true),
        ("data_file=a.data,extended_l2=on", true),
        ("data_file=a.data,cluster_size=4k", true),
        ("data_file=a.data", false),
        ("data_file=a.data,extended_l2=on", false),
    ];
    let seed = from_environment("TAPLINE_SEED").unwrap_or(100);
    println!("TAPLINE_SEED={seed}");
    for (number, (options, alone)) in kinds.into_iter().enumerate() {
        let room = Room::new();
        room.make_raw("base", LEN);
        let (on, parent) = if alone { ("", "") } else { ("-b base -F raw", " --parent raw:base") };
        room.tool("qemu-img", &format!("create -q -f qcow2 {on} -o {options} a {LEN}"));
        // Data that is already in the file must not become visible.
        if !options.contains("raw") {
            room.write("a.data", &vec![0xee; usize::try_from(LEN).unwrap()]);
        }
        let mut model = if alone { vec![0; usize::try_from(LEN).unwrap()] } else { room.read("base") };
        let mut random = Rng::with_seed(seed + u64::try_from(number).unwrap());
        for round in 0..6 {
            let ours = round % 2 == 0;
            let commands: Vec<String> = (0..24).map(|_| command(&mut random, LEN, &mut model)).collect();
            let commands: Vec<&str> = commands.iter().map(String::as_str).collect();
            if ours {
                room.guest(&format!("{IMAGE}{parent}"), &commands);
            } else {
                room.qemu_io(&["-f", "qcow2", "a"], &commands);
            }
            room.tool("qemu-img", "convert -f qcow2 -O raw a theirs");
            room.done(&format!("image convert {IMAGE}{parent} raw:ours --force"));
            for name in ["theirs", "ours"] {
                let found = room.read(name);
                let wrong = (0..).zip(found.iter().zip(&model)).find(|(_, (found, wanted))| found != wanted);
                assert_eq!(wrong, None::<(u64, _)>, "{options}, {alone}, round {round}, {name}: {commands:?}");
                assert_eq!(found.len(), model.len());
            }
            is_sound(&room, options.contains("raw"));
        }
    }
}

/// Returns a random command, already applied to the model.
fn command(random: &mut Rng, len: u64, model: &mut [u8]) -> String {
    let at = random.u64(..len / 512) * 512;
    let most = if random.u64(..4) == 0 { 2048 } else { 64 };
    let count = ((random.u64(..most) + 1) * 512).min(len - at);
    let place = usize::try_from(at).unwrap()..usize::try_from(at + count).unwrap();
    match random.u64(..4) {
        0 => {
            model[place].fill(0);
            format!("write -z {at} {count}")
        }
        1 => {
            model[place].fill(0);
            format!("write -z -u {at} {count}")
        }
        _ => {
            let byte = random.u8(1..);
            model[place].fill(byte);
            format!("write -P {byte} {at} {count}")
        }
    }
}

#[test]
fn discarded_space_is_freed_and_reads_as_zeroes() {
    let room = Room::new();
    room.tool("qemu-img", "create -q -f qcow2 -o data_file=a.data,data_file_raw=on a 64M");
    room.guest(IMAGE, &["write -P 5 0 32M"]);
    let full = room.space("a.data");
    room.guest(IMAGE, &["discard 1M 30M", "read -P 0 1M 30M", "read -P 5 0 1M"]);
    assert!(full >= 32 * MIB && room.space("a.data") <= full - 29 * MIB, "{full} and {}", room.space("a.data"));
    is_sound(&room, true);
}

/// A leaf is created on such an image, and merged into it again.
#[test]
fn layers_above_a_data_file_are_added_and_merged_while_served() {
    let room = Room::new();
    room.tool("qemu-img", "create -q -f qcow2 -o data_file=a.data,data_file_raw=on a 16M");
    room.guest(IMAGE, &["write -P 1 0 4M"]);
    let disk = Disk::serve(&room, &format!("{IMAGE} --nbd ./nbd.sock --control control.sock"));
    let mut control = Control::connect(&room.file("control.sock"));
    let nbd = |commands: &[&str]| room.qemu_io(&["-f", "raw", "nbd+unix:///?socket=nbd.sock"], commands);
    let leaf = format!("qcow2:{}", room.file("leaf").display());
    control.done(&json!({ "verb": "snapshot", "to": leaf }));
    nbd(&["write -P 2 1M 1M", "write -z 3M 64k", "write -P 3 15M 1M"]);
    control.done(&json!({ "verb": "resize", "size": 32 * MIB }));
    nbd(&["write -P 4 31M 1M"]);
    control.done(&json!({ "verb": "merge", "from": 0, "into": 1, "follow": true, "delete": true }));
    nbd(&["read -P 2 1M 1M", "read -P 0 3M 64k", "read -P 3 15M 1M", "write -P 5 30M 1M"]);
    assert_eq!(disk.stop().0, Some(0));
    assert!(!room.file("leaf").exists());
    assert_eq!(fs::metadata(room.file("a.data")).unwrap().len(), 32 * MIB, "it is as long as the disk");
    is_sound(&room, true);
    room.guest(
        IMAGE,
        &["read -P 1 0 1M", "read -P 2 1M 1M", "read -P 3 15M 1M", "read -P 5 30M 1M", "read -P 4 31M 1M"],
    );
}

/// The parent's time is that of its data file if that was written last.
#[test]
fn a_live_vhd_snapshot_of_a_data_file_opens_again() {
    let room = Room::new();
    room.tool("qemu-img", "create -q -f qcow2 -o data_file=a.data,data_file_raw=on a 16M");
    room.guest(IMAGE, &["write -P 1 0 4M"]);
    // Whole seconds are recorded.
    let long_ago = std::time::SystemTime::UNIX_EPOCH + std::time::Duration::from_secs(1_600_000_000);
    let disk = Disk::serve(&room, &format!("{IMAGE} --nbd ./nbd.sock --control control.sock"));
    fs::File::open(room.file("a")).unwrap().set_modified(long_ago).unwrap();
    let leaf = format!("vhd:{}", room.file("leaf").display());
    Control::connect(&room.file("control.sock")).done(&json!({ "verb": "snapshot", "to": leaf }));
    room.qemu_io(&["-f", "raw", "nbd+unix:///?socket=nbd.sock"], &["write -P 2 0 64k"]);
    assert_eq!(disk.stop().0, Some(0));
    room.guest(&format!("vhd:leaf --parent {IMAGE}"), &["read -P 2 0 64k", "read -P 1 64k 1M"]);
}

/// As a source it frees all of its data, including its data file.
#[test]
fn a_layer_with_a_data_file_is_merged_into_its_parent() {
    let room = Room::new();
    room.make_raw("base.raw", 16 * MIB);
    room.done("image convert raw:base.raw qcow2:base");
    room.tool("qemu-img", "create -q -f qcow2 -b base -F qcow2 -o data_file=a.data a 16M");
    let chain = format!("{IMAGE} --parent qcow2:base");
    room.guest(&chain, &["write -P 7 1M 1M", "write -z -u 8M 2M", "write -P 8 100k 4k"]);
    room.tool("qemu-img", "convert -f qcow2 -O raw a before");
    room.done(&format!("image merge {chain} --from 0 --into 1 --delete"));
    room.done("image compare raw:before qcow2:base");
    assert!(!room.file("a").exists() && !room.file("a.data").exists());
    room.sound_and_closed("qcow2:base");
}

/// A merge was killed after it had removed one of the two files.
#[test]
fn a_repeated_merge_removes_a_data_file_without_image() {
    let room = Room::new();
    room.make_raw("base.raw", 16 * MIB);
    room.done("image convert raw:base.raw qcow2:base");
    room.tool("qemu-img", "create -q -f qcow2 -b base -F qcow2 -o data_file=a.data a 16M");
    room.guest(&format!("{IMAGE} --parent qcow2:base"), &["write -P 7 1M 1M"]);
    let chain = format!("qcow2:top --parent {IMAGE} --parent qcow2:base");
    room.done(&format!("image create {chain}"));
    room.done(&format!("image merge {chain} --from 1 --into 2"));
    fs::remove_file(room.file("a")).unwrap();
    room.done(&format!("image merge {chain} --from 1 --into 2 --delete"));
    assert!(!room.file("a.data").exists());
    room.guest("qcow2:top --parent qcow2:base", &["read -P 7 1M 1M"]);
}

/// Children record the modification time of the image, of which its data file is a part.
#[test]
fn a_child_detects_a_modified_data_file_but_not_a_moved_one() {
    let room = Room::new();
    room.make_raw("base", 16 * MIB);
    room.make_raw("other", 16 * MIB);
    room.guest("raw:other", &["write -P 1 2M 1M"]);
    room.tool("qemu-img", "create -q -f qcow2 -b base -F raw -o data_file=a.data a 16M");
    let on_base = format!("{IMAGE} --parent raw:base");
    room.guest(&on_base, &["write -P 3 1M 64k"]);
    room.done(&format!("image create qcow2:child --parent {on_base}"));
    room.done(&format!("image convert qcow2:child --parent {on_base} raw:before"));
    std::thread::sleep(std::time::Duration::from_millis(1100));
    room.done(&format!("image rebase {on_base} --onto raw:other"));
    let on_other = format!("{IMAGE} --parent raw:other");
    room.done(&format!("image compare raw:before qcow2:child --other-parent {IMAGE} --other-parent raw:other"));
    room.guest(&on_other, &["write -P 4 1M 64k"]);
    let said = room.tapline(&format!("image map qcow2:child --parent {on_other}"));
    assert!(said.code != Some(0) && said.err.contains("the parent was last changed"), "{said:?}");
}

#[test]
fn an_image_is_resized_with_its_data_file() {
    let room = Room::new();
    room.tool("qemu-img", "create -q -f qcow2 -o data_file=a.data,data_file_raw=on a 8M");
    room.guest(IMAGE, &["write -P 1 7M 1M"]);
    room.done(&format!("image resize {IMAGE} --size 24M"));
    assert_eq!(fs::metadata(room.file("a.data")).unwrap().len(), 24 * MIB);
    is_sound(&room, true);
    room.guest(IMAGE, &["read -P 1 7M 1M", "read -P 0 8M 16M"]);
}

/// A missing copied flag, which QEMU repairs, and an entry with a wrong offset, which cannot be repaired.
#[test]
fn damage_is_repaired_like_qemu_or_limited_to_its_cluster() {
    let room = Room::new();
    room.tool("qemu-img", "create -q -f qcow2 -o data_file=a.data a 8M");
    room.guest(IMAGE, &["write -P 6 0 512k"]);
    let sound = room.read("a");
    let number = |at: usize| u64::from_be_bytes(sound[at..at + 8].try_into().unwrap());
    let l1 = usize::try_from(number(40)).unwrap();
    let l2 = usize::try_from(number(l1) & 0x00ff_ffff_ffff_fe00).unwrap();
    let third = l2 + 3 * 8;

    let mut unmarked = sound.clone();
    unmarked[third] &= 0x7f;
    room.write("a", &unmarked);
    assert_ne!(room.run("qemu-img", "check -f qcow2 a").code, Some(0));
    room.guest(IMAGE, &["read -P 6 0 512k"]);
    room.write("a", &unmarked);
    assert_eq!(json_of(&room, &format!("image check {IMAGE} --repair"))["result"], "repaired");
    is_sound(&room, false);

    let mut astray = sound.clone();
    astray[third + 5] ^= 4;
    room.write("a", &astray);
    assert_eq!(json_of(&room, &format!("image check {IMAGE}"))["result"], "damaged");
    let said = room.tapline(&format!("image convert {IMAGE} raw:b"));
    assert!(said.err.contains("its bytes 196608 to 262143 cannot be located"), "{said:?}");
    let said = room.tapline(&format!("image convert --salvage {IMAGE} raw:b"));
    assert!(said.code == Some(2) && said.out.contains("bytes 196608 to 262143\n"), "{said:?}");
    let bytes = room.read("b");
    let is_kept = |at: usize| at < 512 << 10 && !(196_608..262_144).contains(&at);
    assert!(bytes.iter().enumerate().all(|(at, &byte)| byte == if is_kept(at) { 6 } else { 0 }));
    let half = ["read -P 6 0 192k", "read -P 6 256k 256k"];
    room.guest(IMAGE, &half);
}
