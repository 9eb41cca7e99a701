//! qcow2 images from a user's view, checked by QEMU in both directions.

use std::collections::BTreeSet;

use serde_json::{Value, json};
use testkit::nbd::Client;

use crate::tool;
use crate::tool::Room;
use crate::tool::control::Control;
use crate::tool::served::Disk;

const MIB: u64 = 1 << 20;

/// QEMU's description of an image, as JSON.
fn qemu(room: &Room, words: &str) -> Value {
    serde_json::from_str(&room.tool("qemu-img", &format!("{words} --output=json"))).unwrap()
}

/// Returns the clusters that a map reports as data, in whole or in part.
fn data_clusters(map: &Value, cluster: u64) -> BTreeSet<u64> {
    let runs = map.as_array().unwrap().iter().filter(|run| run["data"] == true);
    runs.flat_map(|run| {
        let (start, length) = (run["start"].as_u64().unwrap(), run["length"].as_u64().unwrap());
        start / cluster..(start + length).div_ceil(cluster)
    })
    .collect()
}

#[test]
fn qemu_finds_a_new_image_intact_and_as_requested() {
    let room = Room::new();
    for cluster in ["64K", "256K", "2M"] {
        room.done(&format!("image create qcow2:{cluster}.q --size 10G --cluster-size {cluster}"));
        let info = qemu(&room, &format!("info -f qcow2 {cluster}.q"));
        assert_eq!(info["virtual-size"].as_u64(), Some(10 << 30));
        assert_eq!(
            info["cluster-size"],
            room.json(&format!("image info qcow2:{cluster}.q"))[0]["qcow2"]["cluster_size"]
        );
        room.tool("qemu-img", &format!("check -U -f qcow2 {cluster}.q"));
        assert_eq!(room.json(&format!("image check qcow2:{cluster}.q"))["result"], "clean");
    }
}

#[test]
fn a_disk_of_16_tib_is_created_written_and_read_by_both() {
    let room = Room::new();
    room.done("image create qcow2:big.q --size 16T");
    room.guest("qcow2:big.q", &["write -P 7 16383G 64k", "write -P 8 0 64k"]);
    room.tool("qemu-img", "check -U -f qcow2 big.q");
    for command in ["read -P 7 16383G 64k", "read -P 8 0 64k", "read -P 0 8192G 64k"] {
        let said = room.run_words("qemu-io", &["-r", "-f", "qcow2", "-c", command, "big.q"]);
        assert!(said.code == Some(0) && !said.out.contains("failed"), "{command}: {said:?}");
    }
}

#[test]
fn qemu_reads_what_we_convert() {
    let room = Room::new();
    room.make_raw("a.raw", 64 * MIB);
    for options in ["", "--cluster-size 512K", "--cluster-size 2M", "--cache writeback"] {
        room.done(&format!("image convert raw:a.raw qcow2:b.q --force --verify {options}"));
        room.tool("qemu-img", "check -U -f qcow2 b.q");
        room.tool("qemu-img", "compare -f raw -F qcow2 a.raw b.q");
    }
}

#[test]
fn we_read_what_qemu_writes() {
    let room = Room::new();
    room.make_raw("a.raw", 64 * MIB);
    let options = [
        "-o cluster_size=65536",
        "-o cluster_size=2M",
        "-o compat=0.10",
        "-o lazy_refcounts=on",
        "-o refcount_bits=64",
        "-o refcount_bits=1",
        "-o preallocation=metadata",
        "-c -o compression_type=zlib",
        "-c -o compression_type=zstd",
        "-c -o compression_type=zstd,cluster_size=2M",
    ];
    for options in options {
        std::fs::remove_file(room.file("b.q")).unwrap_or_default();
        room.tool("qemu-img", &format!("convert -f raw -O qcow2 {options} a.raw b.q"));
        assert_eq!(room.json("image check qcow2:b.q")["result"], "clean", "{options}");
        assert_eq!(room.json("image compare raw:a.raw qcow2:b.q")["same"], true, "{options}");
    }
}

/// Scope: clusters of 512 bytes to 2 MiB, both versions, narrow to wide refcounts, every preallocation mode, lazy
/// refcounts and extended L2 entries: 104 valid combinations, one in seven of them unless TAPLINE_WAYS=1 selects all.
/// Each image is written by QEMU, then by us, then by QEMU; both read all of it, and find no error.
#[test]
#[ignore = "slow: run by `make test-all`"]
fn images_of_every_qemu_variant_are_written_alternately() {
    let room = Room::new();
    let versions = ["compat=0.10", "compat=1.1", "refcount_bits=1", "refcount_bits=64", "lazy_refcounts=on"];
    let one_in = usize::try_from(tool::from_environment("TAPLINE_WAYS").unwrap_or(7)).unwrap();
    let mut ways = 0_usize;
    for cluster in ["512", "4k", "64k", "2M"] {
        let extended = ["64k", "2M"].contains(&cluster).then_some("extended_l2=on");
        for version in versions.into_iter().chain(["lazy_refcounts=on,refcount_bits=8"]).chain(extended) {
            for preallocation in ["off", "metadata", "falloc", "full"] {
                ways += 1;
                if ways % one_in > 0 {
                    continue;
                }
                let way = format!("cluster_size={cluster},{version},preallocation={preallocation}");
                std::fs::remove_file(room.file("a.q")).unwrap_or_default();
                room.tool("qemu-img", &format!("create -q -f qcow2 -o {way} a.q 12M"));
                let qemu_io = |commands: &[&str]| {
                    let words = ["-f", "qcow2"].into_iter().chain(commands.iter().flat_map(|command| ["-c", command]));
                    let said = room.run_words("qemu-io", &words.chain(["a.q"]).collect::<Vec<_>>());
                    assert!(said.code == Some(0) && !said.out.contains("failed"), "{way}: {commands:?}: {said:?}");
                };
                let sound = |by: &str| {
                    let said = room.run("qemu-img", "check -f qcow2 a.q");
                    assert_eq!(said.code, Some(0), "{way}, by {by}: {said:?}");
                    assert_eq!(room.json("image check qcow2:a.q")["result"], "clean", "{way}, by {by}");
                };
                qemu_io(&["write -P 1 512 1M", "write -P 2 5M 70k", "write -z -u 5M 4k"]);
                sound("QEMU");
                let of_qemu = ["read -P 0 0 512", "read -P 1 512 1M", "read -P 0 5M 4k", "read -P 2 5124k 66k"];
                let ours = ["write -P 3 1000k 100k", "write -P 4 11M 1M", "discard 512k 64k", "write -z 6M 3k"];
                room.guest("qcow2:a.q", &[&of_qemu[..], &ours[..]].concat());
                sound("us");
                qemu_io(&["read -P 3 1000k 100k", "read -P 4 11M 1M", "read -P 0 6M 3k", "write -P 5 3M 3M"]);
                sound("QEMU again");
                let all = ["read -P 1 512 500k", "read -P 3 1000k 100k", "read -P 4 11M 1M", "read -P 5 3M 3M"];
                room.guest("qcow2:a.q", &all);
            }
        }
    }
    assert_eq!(ways, 104);
}

#[test]
fn maps_agree_with_those_of_qemu() {
    let room = Room::new();
    room.make_raw("a.raw", 64 * MIB);
    // Our map shows holes of the file system inside a cluster, which QEMU's does not.
    for (options, cluster) in [("cluster_size=65536", 64 << 10), ("cluster_size=2M", 2 << 20)] {
        room.tool("qemu-img", &format!("convert -f raw -O qcow2 -o {options} a.raw b.q"));
        let (ours, theirs) = (room.json("image map qcow2:b.q"), qemu(&room, "map -f qcow2 b.q"));
        assert_eq!(data_clusters(&ours, cluster), data_clusters(&theirs, cluster), "{options}");
    }
}

#[test]
fn a_chain_of_three_formats_reads_alike_in_both() {
    let room = Room::new();
    room.make_raw("base.raw", 32 * MIB);
    room.done("image create qcow2:middle.q --parent raw:base.raw");
    room.guest("qcow2:middle.q --parent raw:base.raw", &["write -P 1 3M 70k", "write -z -u 8M 1M"]);
    room.done("image create qcow2:leaf.q --parent qcow2:middle.q --parent raw:base.raw --cluster-size 128K");
    let chain = "qcow2:leaf.q --parent qcow2:middle.q --parent raw:base.raw";
    room.guest(chain, &["write -P 2 3M 4k", "discard 20M 1M"]);
    room.tool("qemu-img", "check -U -f qcow2 leaf.q");
    room.tool("qemu-img", "convert -f qcow2 -O raw leaf.q flat.raw");
    room.done("image compare raw:flat.raw qcow2:leaf.q --other-parent qcow2:middle.q --other-parent raw:base.raw");
    room.done("image convert raw:base.raw vhd:base.vhd");
    room.done("image create vhd:middle.vhd --parent vhd:base.vhd");
    room.guest("vhd:middle.vhd --parent vhd:base.vhd", &["write -P 3 5M 1M"]);
    room.done("image create qcow2:top.q --parent vhd:middle.vhd --parent vhd:base.vhd");
    let chain = "--parent vhd:middle.vhd --parent vhd:base.vhd";
    room.guest(&format!("qcow2:top.q {chain}"), &["read -P 3 5M 1M", "write -P 4 5M 512", "read -P 3 5632k 8k"]);
}

#[test]
fn an_image_of_version_2_is_read_and_written() {
    let room = Room::new();
    room.make_raw("a.raw", 16 * MIB);
    room.tool("qemu-img", "convert -f raw -O qcow2 -o compat=0.10 a.raw old.q");
    room.done("image convert qcow2:old.q qcow2:new.q --verify");
    room.guest("qcow2:old.q", &["write -P 1 0 64k", "discard 1M 1M"]);
    assert_eq!(room.json("image check qcow2:old.q")["result"], "clean");
    room.tool("qemu-img", "check -U -f qcow2 old.q");
    assert_eq!(room.run_words("qemu-io", &["-f", "qcow2", "-c", "read -P 1 0 64k", "old.q"]).code, Some(0));
    assert_eq!(room.json("image info qcow2:old.q")[0]["qcow2"]["version"], 2);
}

#[test]
fn an_image_with_internal_snapshots_is_written_and_they_stay() {
    let room = Room::new();
    room.make_raw("base.raw", 16 * MIB);
    room.tool("qemu-img", "create -q -f qcow2 -b base.raw -F raw a.q 16M");
    room.guest("qcow2:a.q --parent raw:base.raw", &["write -P 1 1M 1M"]);
    room.tool("qemu-img", "snapshot -c kept a.q");
    room.tool("qemu-img", "convert -f qcow2 -l kept -O raw a.q before.raw");
    room.guest("qcow2:a.q --parent raw:base.raw", &["write -P 2 1M 4k", "discard 1536k 64k", "write -P 3 8M 64k"]);
    room.done("image create qcow2:b.q --size 16M");
    for command in [
        "rebase qcow2:a.q --parent raw:base.raw --onto qcow2:b.q",
        "flatten qcow2:a.q --parent raw:base.raw",
        "merge qcow2:a.q --parent raw:base.raw --from 0 --into 1 --delete",
    ] {
        let before = (room.read("a.q"), room.read("base.raw"));
        let said = room.tapline(&format!("image {command}"));
        assert!(said.code == Some(4) && said.err.contains("internal snapshots"), "{said:?}");
        assert!((room.read("a.q"), room.read("base.raw")) == before, "a refused image was written to");
    }
    let disk = Disk::serve(&room, "qcow2:a.q --parent raw:base.raw --control control.sock --nbd nbd.sock");
    let merge = json!({ "verb": "merge", "from": 0, "into": 1 });
    let (kind, why) = Control::connect(&room.file("control.sock")).refused(&merge);
    assert!(kind == "unsupported" && why.contains("internal snapshots"), "{kind}: {why}");
    assert_eq!(disk.stop().0, Some(0));
    // Its child is merged into it, like a guest's writes.
    room.done("image create qcow2:c.q --parent qcow2:a.q --parent raw:base.raw");
    room.guest("qcow2:c.q --parent qcow2:a.q --parent raw:base.raw", &["write -P 4 9M 64k"]);
    room.done("image merge qcow2:c.q --parent qcow2:a.q --parent raw:base.raw --from 0 --into 1 --delete");
    room.guest("qcow2:a.q --parent raw:base.raw", &["read -P 4 9M 64k"]);
    room.done("image resize qcow2:a.q --parent raw:base.raw --size 32M");
    room.tool("qemu-img", "check -U -f qcow2 a.q");
    room.tool("qemu-img", "convert -f qcow2 -l kept -O raw a.q after.raw");
    // QEMU shows it with the current size of the disk.
    let (before, after) = (room.read("before.raw"), room.read("after.raw"));
    assert!(
        after.starts_with(&before) && after[before.len()..].iter().all(|&byte| byte == 0),
        "the snapshot has changed"
    );
    let reads =
        ["read -P 2 1M 4k", "read -P 1 1028k 508k", "read -P 0 1536k 64k", "read -P 3 8M 64k", "read -P 0 16M 16M"];
    room.guest("qcow2:a.q --parent raw:base.raw", &reads);
}

/// An invalid entry and an entry without its copied flag, in adjacent clusters.
#[test]
fn a_bad_entry_costs_its_cluster_and_is_reported() {
    let room = Room::new();
    room.tool("qemu-img", "create -q -f qcow2 a.q 64M");
    let written = room.run_words("qemu-io", &["-f", "qcow2", "-c", "write -P 1 0 1M", "a.q"]);
    assert_eq!(written.code, Some(0), "{written:?}");
    let mut bytes = room.read("a.q");
    let word = |bytes: &[u8], at: usize| u64::from_be_bytes(bytes[at..at + 8].try_into().unwrap());
    let l1 = usize::try_from(word(&bytes, 40)).unwrap();
    let l2 = usize::try_from(word(&bytes, l1) & 0x00ff_ffff_ffff_fe00).unwrap();
    bytes[l2 + 24..l2 + 32].copy_from_slice(&0x8000_0000_0005_0200_u64.to_be_bytes());
    bytes[l2 + 40] &= 0x7f;
    room.write("a.q", &bytes);
    let said = room.tapline("image convert qcow2:a.q raw:a.raw");
    assert_eq!(said.code, Some(4), "{said:?}");
    for words in
        ["bytes 196608 to 262143", "0x8000000000050200", &format!("byte {}", l2 + 24), "check qcow2:a.q --repair"]
    {
        assert!(said.err.contains(words), "{words}: {said:?}");
    }
    room.guest("qcow2:a.q", &["read -P 1 0 192k", "read -P 1 256k 768k", "write -P 2 320k 4k", "read -P 1 324k 60k"]);
}

/// Reading them takes several requests each, all of which are in flight at the same time.
#[test]
fn a_bad_table_and_a_bad_compressed_cluster_are_reported() {
    let room = Room::new();
    room.make_raw("a.raw", 64 * MIB);
    room.tool("qemu-img", "convert -f raw -O qcow2 a.raw table.q");
    room.tool("qemu-img", "convert -c -f raw -O qcow2 a.raw packed.q");
    let at = |bytes: &[u8], at: u64| {
        let at = usize::try_from(at).unwrap();
        u64::from_be_bytes(bytes[at..at + 8].try_into().unwrap())
    };
    let mut bytes = room.read("table.q");
    let l1 = at(&bytes, 40);
    let place = usize::try_from(l1).unwrap();
    bytes[place..place + 8].copy_from_slice(&(1_u64 << 40).to_be_bytes());
    room.write("table.q", &bytes);
    let mut bytes = room.read("packed.q");
    let l1 = at(&bytes, 40);
    let packed = at(&bytes, at(&bytes, l1) & 0x00ff_ffff_ffff_fe00) & ((1 << 54) - 1);
    let place = usize::try_from(packed).unwrap();
    bytes[place..place + 64].fill(0xff);
    room.write("packed.q", &bytes);
    for (image, words) in
        [("table.q", format!("at byte {l1} of")), ("packed.q", format!("the compressed cluster at byte {packed} of"))]
    {
        let said = room.tapline(&format!("image convert qcow2:{image} raw:out.raw"));
        assert!(said.code == Some(4) && said.err.contains(&words), "{words}: {said:?}");
    }
}

#[test]
fn an_image_that_was_not_closed_is_repaired_before_it_is_written() {
    let room = Room::new();
    room.tool("qemu-img", "create -q -f qcow2 -o lazy_refcounts=on a.q 64M");
    let killed = room.run_words("qemu-io", &["-f", "qcow2", "-c", "write -P 3 0 10M", "-c", "abort", "a.q"]);
    assert_ne!(killed.code, Some(0));
    let before = room.read("a.q");
    assert_eq!(room.json("image info qcow2:a.q")[0]["qcow2"]["dirty"], true);
    room.done("image map qcow2:a.q");
    assert!(room.read("a.q") == before, "an image was written to that was only read");
    let said = room.tapline("image resize qcow2:a.q --size 128M");
    assert!(said.code == Some(0) && said.err.contains("has been repaired"), "{said:?}");
    assert_eq!(room.json("image check qcow2:a.q")["result"], "clean");
    room.tool("qemu-img", "check -U -f qcow2 a.q");
    room.guest("qcow2:a.q", &["read -P 3 0 10M", "read -P 0 64M 64M"]);
}

#[test]
fn growth_by_more_than_64_bits_hold_is_refused_by_that_reason() {
    let room = Room::new();
    room.done("image create qcow2:a.q 64M");
    let said = room.tapline("image resize qcow2:a.q +18446744073709551615");
    assert_eq!(said.code, Some(4), "{said:?}");
    assert!(said.err.contains("no disk can be that much larger"), "{said:?}");
    room.done("image resize qcow2:a.q +64M");
}

#[test]
fn check_and_repair_return_the_documented_exit_codes() {
    let room = Room::new();
    room.make_raw("a.raw", 16 * MIB);
    room.done("image convert raw:a.raw qcow2:a.q");
    let mut bytes = room.read("a.q");
    // The first refcount block is in the third cluster; the last clusters of the file are data.
    let info = qemu(&room, "check -U -f qcow2 a.q");
    let last = usize::try_from(info["image-end-offset"].as_u64().unwrap() / 65536 - 1).unwrap();
    bytes[2 * 65536 + 2 * last..][..2].fill(0);
    room.write("a.q", &bytes);
    let said = room.tapline("image check qcow2:a.q");
    assert!(said.code == Some(2) && said.out.contains("--repair"), "{said:?}");
    let said = room.tapline("image check qcow2:a.q --repair");
    assert!(said.code == Some(3) && said.out.contains("repaired"), "{said:?}");
    assert_eq!(room.tapline("image check qcow2:a.q --repair").code, Some(0));
    room.done("image compare raw:a.raw qcow2:a.q");
    room.tool("qemu-img", "check -U -f qcow2 a.q");
}

#[test]
fn wrong_refcount_blocks_are_logged_and_not_believed() {
    let room = Room::new();
    room.make_raw("a.raw", 16 * MIB);
    room.done("image convert raw:a.raw qcow2:a.q");
    let mut bytes = room.read("a.q");
    // The block says that nothing is in use, not even itself.
    bytes[2 * 65536..3 * 65536].fill(0);
    room.write("a.q", &bytes);
    let disk = Disk::serve(&room, "qcow2:a.q --nbd nbd.sock");
    let mut nbd = Client::connect(&room.file("nbd.sock")).unwrap();
    nbd.write(3 * MIB, &[7; 65536]).unwrap();
    let (code, log) = disk.stop();
    assert!(code == Some(0) && log.contains("1 of its refcount blocks are lost or wrong"), "{log}");
    assert_eq!(room.tapline("image check qcow2:a.q --repair").code, Some(3));
    room.guest("qcow2:a.q", &["read -P 7 3M 64k"]);
    let (_, log) = Disk::serve(&room, "qcow2:a.q --nbd nbd.sock").stop();
    assert!(!log.contains("refcount"), "{log}");
}

#[test]
fn check_has_an_exit_code_for_leaks_only() {
    let room = Room::new();
    room.make_raw("a.raw", MIB);
    room.done("image convert raw:a.raw qcow2:a.q");
    room.done("image check qcow2:a.q");
    let mut bytes = room.read("a.q");
    // A cluster beyond the end is counted in the first refcount block.
    let clusters = bytes.len().div_ceil(65536);
    bytes.resize((clusters + 1) * 65536, 7);
    bytes[2 * 65536 + 2 * clusters + 1] = 1;
    room.write("a.q", &bytes);
    let said = room.tapline("image check qcow2:a.q --json");
    assert!(said.code == Some(5) && said.out.contains(r#""result": "leaks""#), "{said:?}");
    assert_eq!(room.run("qemu-img", "check -f qcow2 a.q").code, Some(3), "as QEMU's");
    let said = room.tapline("image check qcow2:a.q");
    assert!(said.code == Some(5) && said.out.contains("leak"), "{said:?}");
    // This one was not closed either: the dirty bit of the header.
    let leaking = room.read("a.q");
    let mut bytes = leaking.clone();
    bytes[79] |= 1;
    room.write("a.q", &bytes);
    let said = room.tapline("image check qcow2:a.q");
    assert!(said.code == Some(5) && said.out.contains("not closed cleanly"), "{said:?}");
    room.write("a.q", &leaking);
    // A leak of the parent is not one of its child.
    room.done("image create qcow2:child.q --parent qcow2:a.q");
    let said = room.tapline("image check qcow2:child.q --parent qcow2:a.q");
    assert!(said.code == Some(5) && said.out.contains("child.q is clean; a parent has leaked space"), "{said:?}");
    assert_eq!(room.tapline("image check qcow2:a.q --repair").code, Some(0));
    room.done("image check qcow2:a.q");
}

#[test]
fn names_inside_an_image_are_shown_and_never_opened() {
    let room = Room::new();
    room.write("secret.raw", &vec![7; 1 << 20]);
    room.tool("qemu-img", "create -f qcow2 -b secret.raw -F raw child.q");
    let info = &room.json("image info qcow2:child.q")[0]["qcow2"];
    assert_eq!(info["parent"]["name"], "secret.raw");
    let said = room.tapline("image map qcow2:child.q");
    assert_eq!(said.code, Some(64), "{said:?}");
    assert!(said.err.contains("--parent raw:secret.raw"), "{said:?}");
    std::fs::remove_file(room.file("secret.raw")).unwrap();
    room.done("image info qcow2:child.q");
    room.done("image check qcow2:child.q");
}

#[test]
fn a_wrong_format_is_refused() {
    let room = Room::new();
    room.make_raw("a.raw", MIB);
    room.done("image create qcow2:base.q --size 16M");
    room.done("image create qcow2:child.q --parent qcow2:base.q");
    for (image, advice) in [("qcow2:a.raw", "give the file's actual format"), ("vhd:base.q", "give it as qcow2:base.q")]
    {
        let said = room.tapline(&format!("image info {image}"));
        assert!(said.code == Some(4) && said.err.contains(advice), "{said:?}");
    }
    // Opened as raw, its metadata would be visible to the guest.
    let said = room.tapline("image map qcow2:child.q --parent raw:base.q");
    assert!(said.code == Some(64) && said.err.contains("give it as qcow2:base.q"), "{said:?}");
}

#[test]
fn discarded_space_is_returned_by_the_file() {
    let room = Room::new();
    for image in ["qcow2:a.q", "vhd:a.vhd"] {
        room.done(&format!("image create {image} --size 64M"));
        room.guest(image, &["write -P 9 0 32M"]);
        let file = image.split_once(':').unwrap().1;
        assert!(room.space(file) >= 32 * MIB);
        room.guest(image, &["discard 0 32M", "read -P 0 0 32M"]);
        assert!(room.space(file) < 2 * MIB, "{image} still takes {}", room.space(file));
    }
}
