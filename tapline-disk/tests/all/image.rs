//! The image commands from a user's view: output, resulting files and exit codes.

use std::fs;

use crate::remote::{Server, make_disk, uri};
use crate::tool::{Room, TAPLINE};

const MIB: u64 = 1 << 20;

#[test]
fn a_new_image_is_thin_clean_and_described() {
    let room = Room::new();
    assert_eq!(room.done("image create vhd:a.vhd --size 10G"), "created vhd:a.vhd: dynamic, 10 GiB\n");
    let info = &room.json("image info vhd:a.vhd")[0];
    assert_eq!(info["size"], 10u64 << 30);
    assert_eq!(info["vhd"]["kind"], "dynamic");
    assert_eq!(info["vhd"]["block_size"], 2 << 20);
    assert_eq!(info["vhd"]["blocks_allocated"], 0);
    assert!(info["file_allocated"].as_u64().unwrap() < MIB);
    assert_eq!(room.json("image check vhd:a.vhd")["result"], "clean");
    assert!(room.done("image info vhd:a.vhd").contains("kind      dynamic"));
}

/// Marks a VHD as hidden like XenServer's storage manager: a byte in both footers, after the saved-state byte.
fn hide(room: &Room, file: &str) {
    let mut bytes = room.read(file);
    for at in [0, bytes.len() - 512] {
        bytes[at + 85] = 1;
        bytes[at + 64..at + 68].fill(0);
        let sum = !bytes[at..at + 512].iter().map(|&byte| u32::from(byte)).sum::<u32>();
        bytes[at + 64..at + 68].copy_from_slice(&sum.to_be_bytes());
    }
    room.write(file, &bytes);
}

#[test]
fn info_has_the_same_fields_for_every_format() {
    let room = Room::new();
    room.done("image create raw:a.raw --size 1G");
    room.done("image create vhd:b.vhd --parent raw:a.raw");
    room.done("image create qcow2:c.qcow2 --parent vhd:b.vhd");
    room.done("image create vhd:d.vhd --parent vhd:b.vhd");
    let info = |name: &str| room.json(&format!("image info {name}"))[0].clone();
    let [a, b, c, d] = ["raw:a.raw", "vhd:b.vhd", "qcow2:c.qcow2", "vhd:d.vhd"].map(info);
    for (image, format) in [(&a, "raw"), (&b, "vhd"), (&c, "qcow2"), (&d, "vhd")] {
        assert_eq!((&image["format"], &image["size"]), (&format.into(), &(1u64 << 30).into()), "{image}");
        assert!(image["file_allocated"].is_u64() && image["hidden"] == false, "{image}");
        assert_eq!(image["uuid"].is_string(), format != "raw", "{image}");
    }
    assert!(a["parent"].is_null());
    for (child, parent, file, format) in [(&b, &a, "a.raw", "raw"), (&c, &b, "b.vhd", "vhd"), (&d, &b, "b.vhd", "vhd")]
    {
        let found = &child["parent"];
        let path = room.file(file).canonicalize().unwrap();
        assert_eq!((&found["format"], &found["uuid"]), (&format.into(), &parent["uuid"]), "{child}");
        assert!(found["relative"].as_str().unwrap().ends_with(file), "{child}");
        assert!(found["absolute"].is_null() || found["absolute"] == path.to_str().unwrap(), "{child}");
    }
    hide(&room, "b.vhd");
    assert_eq!((&info("vhd:b.vhd")["hidden"], &info("vhd:b.vhd")["vhd"]["hidden"]), (&true.into(), &true.into()));
}

#[test]
fn an_image_that_exists_is_never_overwritten() {
    let room = Room::new();
    room.write("a.vhd", b"precious");
    let said = room.tapline("image create vhd:a.vhd --size 10G");
    assert_eq!(said.code, Some(4));
    assert!(said.err.contains("a.vhd") && said.err.contains("exists"), "{said:?}");
    let said = room.tapline("image convert raw:a.vhd vhd:a.vhd --force");
    assert!(said.code == Some(64) && said.err.contains("it is the file of raw:a.vhd itself"), "{said:?}");
    assert_eq!(room.read("a.vhd"), b"precious");
}

#[test]
fn unsupported_sizes_and_block_sizes_are_refused_without_leftovers() {
    let room = Room::new();
    let nothing = room.tapline("image create vhd:a.vhd --size 0");
    assert!(nothing.code == Some(64) && !room.file("a.vhd").exists(), "{nothing:?}");
    for words in ["--size 3T", "--size 1000", "--size 1G --block-size 3M", "--size 1G --block-size 256K"] {
        let said = room.tapline(&format!("image create vhd:a.vhd {words}"));
        assert_eq!(said.code, Some(4), "{words}: {said:?}");
        assert!(said.err.starts_with("tapline: cannot create vhd:a.vhd: "), "{words}: {said:?}");
        assert!(!room.file("a.vhd").exists(), "{words}");
    }
    let said = room.tapline("image create vhd:a.vhd --size 10GB");
    assert_eq!(said.code, Some(64));
    assert!(said.err.contains("use 10G, which is 10GiB"), "{said:?}");
}

#[test]
fn a_fixed_image_has_its_space_from_the_beginning() {
    let room = Room::new();
    room.done("image create vhd:a.vhd --size 16M --fixed");
    let info = &room.json("image info vhd:a.vhd")[0];
    assert_eq!(info["vhd"]["kind"], "fixed");
    assert!(info["file_allocated"].as_u64().unwrap() >= 16 * MIB);
}

#[test]
fn converting_keeps_every_byte_and_every_hole() {
    let room = Room::new();
    room.make_raw("a.raw", 64 * MIB);
    for target in ["vhd:dynamic.vhd", "vhd:small.vhd --block-size 512K", "vhd:fixed.vhd --fixed", "raw:copy.raw"] {
        room.done(&format!("image convert raw:a.raw {target} --verify"));
        let image = target.split_whitespace().next().unwrap();
        assert_eq!(room.json(&format!("image compare raw:a.raw {image}"))["same"], true, "{target}");
        assert_eq!(room.json(&format!("image check {image}"))["result"], "clean", "{target}");
    }
    let thin = &room.json("image info vhd:dynamic.vhd")[0];
    assert!(thin["file_allocated"].as_u64().unwrap() < 16 * MIB, "{thin}");
    room.done("image convert vhd:small.vhd raw:back.raw --io-engine aio");
    assert!(room.read("back.raw") == room.read("a.raw"), "the disk came back changed");
}

#[test]
fn compare_says_where_disks_differ() {
    let room = Room::new();
    room.make_raw("a.raw", 32 * MIB);
    room.done("image convert raw:a.raw vhd:b.vhd");
    let mut bytes = room.read("a.raw");
    bytes[20_000_001] ^= 1;
    room.write("a.raw", &bytes);
    let said = room.tapline("image compare raw:a.raw vhd:b.vhd");
    assert_eq!(said.code, Some(1), "{said:?}");
    assert!(said.out.contains("differ at byte 20000001 "), "{said:?}");
    room.done("image create raw:short.raw --size 31M");
    let said = room.tapline("image compare vhd:b.vhd raw:short.raw");
    assert_eq!(said.code, Some(1), "{said:?}");
    assert!(said.out.contains("differ in size"), "{said:?}");
}

#[test]
fn map_lists_data_and_holes_to_the_last_byte() {
    let room = Room::new();
    room.make_raw("a.raw", 64 * MIB);
    room.done("image convert raw:a.raw vhd:b.vhd");
    let map = room.json("image map vhd:b.vhd");
    let runs = map.as_array().unwrap();
    let mut end = 0;
    for run in runs {
        assert_eq!(run["start"].as_u64(), Some(end));
        end += run["length"].as_u64().unwrap();
    }
    assert_eq!(end, 64 * MIB);
    assert!(runs.iter().any(|run| run["data"] == false) && runs.iter().any(|run| run["data"] == true), "{map}");
}

#[test]
fn a_child_without_its_parent_given_is_refused_with_a_suggestion() {
    let room = Room::new();
    room.make_raw("a.raw", 32 * MIB);
    room.done("image convert raw:a.raw vhd:base.vhd");
    room.done("image create vhd:child.vhd --parent vhd:base.vhd");
    let before = room.read("child.vhd");
    let said = room.tapline("image map vhd:child.vhd");
    assert_eq!(said.code, Some(64));
    assert!(said.err.contains("--parent vhd:base.vhd") && said.err.contains("with uuid"), "{said:?}");
    assert!(said.out.is_empty());
    room.done("image compare vhd:child.vhd raw:a.raw --parent vhd:base.vhd");
    room.done("image create vhd:grandchild.vhd --parent vhd:child.vhd");
    room.done("image compare vhd:grandchild.vhd raw:a.raw --parent vhd:child.vhd --parent vhd:base.vhd");
    let info = &room.json("image info vhd:child.vhd")[0];
    assert_eq!(info["vhd"]["parent"]["name"], "base.vhd");
    assert_eq!(room.read("child.vhd"), before);
}

#[test]
fn a_wrong_parent_is_refused() {
    let room = Room::new();
    room.done("image create vhd:base.vhd --size 32M");
    room.done("image create vhd:other.vhd --size 32M");
    room.done("image create raw:plain.raw --size 32M");
    room.done("image create vhd:child.vhd --parent vhd:base.vhd");
    for parent in ["vhd:other.vhd", "raw:plain.raw"] {
        let said = room.tapline(&format!("image map vhd:child.vhd --parent {parent}"));
        assert_eq!(said.code, Some(4), "{said:?}");
        assert!(said.err.contains("uuid") && said.err.contains("base.vhd"), "{said:?}");
    }
    let said = room.tapline("image map vhd:base.vhd --parent vhd:other.vhd");
    assert_eq!(said.code, Some(64), "{said:?}");
    let said = room.tapline("image create vhd:small.vhd --parent vhd:base.vhd --size 16M");
    assert_eq!(said.code, Some(64), "{said:?}");
    assert!(!room.file("small.vhd").exists());
}

#[test]
fn a_raw_image_can_be_a_parent() {
    let room = Room::new();
    room.make_raw("a.raw", 32 * MIB);
    room.done("image create vhd:child.vhd --parent raw:a.raw");
    room.done("image compare vhd:child.vhd raw:a.raw --parent raw:a.raw");
}

#[test]
fn a_lost_footer_is_found_and_repaired() {
    let room = Room::new();
    room.make_raw("a.raw", 32 * MIB);
    room.done("image convert raw:a.raw vhd:b.vhd");
    let mut bytes = room.read("b.vhd");
    let footer = bytes.len() - 512;
    bytes[footer..].fill(0);
    room.write("b.vhd", &bytes);
    let said = room.tapline("image check vhd:b.vhd");
    assert_eq!(said.code, Some(0), "{said:?}");
    assert!(said.out.contains("not closed cleanly") && said.out.contains("nothing is damaged"), "{said:?}");
    assert_eq!(room.read("b.vhd"), bytes, "a check without --repair must not write");
    let said = room.tapline("image check vhd:b.vhd --repair --json");
    assert_eq!(said.code, Some(3), "{said:?}");
    assert_eq!(room.json("image check vhd:b.vhd")["result"], "clean");
    room.done("image compare raw:a.raw vhd:b.vhd");
}

#[test]
fn truncated_images_are_refused_and_unchanged() {
    let room = Room::new();
    room.make_raw("a.raw", 32 * MIB);
    room.done("image convert raw:a.raw vhd:b.vhd");
    let whole = room.read("b.vhd");
    for len in [0, 1, 511, 512, 1535, 1536, 2000, whole.len() / 2, whole.len() - 3 * 512] {
        room.write("cut.vhd", &whole[..len]);
        let said = room.tapline("image check vhd:cut.vhd");
        assert!(matches!(said.code, Some(2 | 4)), "cut to {len}: {said:?}");
        assert!(!said.err.is_empty() || said.out.contains("at byte"), "cut to {len}: {said:?}");
        assert_eq!(room.read("cut.vhd"), &whole[..len]);
    }
}

#[test]
fn a_file_that_is_not_an_image_is_refused_with_advice() {
    let room = Room::new();
    room.make_raw("a.raw", MIB);
    let said = room.tapline("image info vhd:a.raw");
    assert_eq!(said.code, Some(4));
    assert!(said.err.contains("vhd:a.raw") && said.err.contains("give the file's actual format"), "{said:?}");
    let said = room.tapline("image info vhd:missing.vhd");
    assert_eq!(said.code, Some(4));
    assert!(said.err.contains("missing.vhd") && said.err.contains("no such file"), "{said:?}");
    let said = room.tapline("image info vhd:.");
    assert_eq!(said.code, Some(4));
    assert!(said.err.contains("directory"), "{said:?}");
}

#[test]
fn a_conversion_that_runs_out_of_space_leaves_nothing() {
    let room = Room::new();
    room.make_raw("a.raw", 64 * MIB);
    // The shell's limit is in blocks of 512 bytes: 2 MiB, less than the data.
    let words = format!("ulimit -f 4096; exec {TAPLINE} image convert raw:a.raw vhd:b.vhd");
    let output = std::process::Command::new("sh").args(["-c", &words]).current_dir(room.path()).output().unwrap();
    let err = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(4), "{err}");
    assert!(err.contains("vhd:b.vhd") && err.contains("no space"), "{err}");
    assert!(!room.file("b.vhd").exists());
}

#[test]
fn qemu_reads_what_we_write() {
    let room = Room::new();
    room.make_raw("a.raw", 64 * MIB);
    for options in ["", "--fixed", "--block-size 512K", "--block-size 16M"] {
        room.done(&format!("image convert raw:a.raw vhd:b.vhd --force {options}"));
        room.tool("qemu-img", "convert -f vpc -O raw b.vhd c.raw");
        assert!(room.read("a.raw") == room.read("c.raw"), "QEMU reads other bytes of an image made with {options:?}");
    }
}

#[test]
fn we_read_what_qemu_writes() {
    let room = Room::new();
    room.make_raw("a.raw", 64 * MIB);
    for options in ["subformat=dynamic", "subformat=fixed", "subformat=dynamic,force_size"] {
        room.tool("qemu-img", &format!("convert -f raw -O vpc -o {options} a.raw b.vhd"));
        assert_eq!(room.json("image check vhd:b.vhd")["result"], "clean", "{options}");
        room.done("image convert vhd:b.vhd raw:c.raw --force");
        // Without force_size QEMU rounds the size up to whole cylinders.
        let (mine, its) = (room.read("c.raw"), room.read("a.raw"));
        assert!(mine.starts_with(&its) && mine[its.len()..].iter().all(|&byte| byte == 0), "{options}");
        fs::remove_file(room.file("b.vhd")).unwrap();
    }
}

#[test]
fn a_closed_pipe_is_not_a_failure() {
    let room = Room::new();
    room.done("image create vhd:a.vhd --size 1G");
    let (ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
    drop(ours);
    let mut command = std::process::Command::new(TAPLINE);
    command.args(["image", "info", "vhd:a.vhd"]).current_dir(room.path());
    let output = command.stdout(std::os::fd::OwnedFd::from(theirs)).output().unwrap();
    assert_eq!((output.status.code(), output.stderr.as_slice()), (Some(0), &b""[..]));
}

#[test]
fn an_interrupted_conversion_leaves_nothing() {
    let room = Room::new();
    make_disk(&room, "raw:a.raw");
    let _source = Server::slow(&room, "a.raw", "from");
    let mut command = std::process::Command::new(TAPLINE);
    command.args(["image", "convert", &uri("from"), "vhd:b.vhd"]).current_dir(room.path());
    let mut child = command.stderr(std::process::Stdio::piped()).spawn().unwrap();
    while !room.file("b.vhd.tapline-new").exists() {
        assert_eq!(child.try_wait().unwrap(), None, "it ended before it began");
        std::thread::yield_now();
    }
    let pid = rustix::process::Pid::from_raw(i32::try_from(child.id()).unwrap()).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    let output = child.wait_with_output().unwrap();
    let err = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(4), "{err}");
    assert!(err.contains("signal") && err.contains("removed"), "{err}");
    assert!(!room.file("b.vhd").exists() && !room.file("b.vhd.tapline-new").exists());
}

#[test]
fn a_parent_in_another_directory_is_suggested_with_its_path() {
    let room = Room::new();
    fs::create_dir(room.file("children")).unwrap();
    room.done("image create vhd:base.vhd --size 1G");
    room.done("image create vhd:children/a.vhd --parent vhd:base.vhd");
    let said = room.tapline("image map vhd:children/a.vhd");
    assert!(said.err.ends_with("--parent vhd:children/../base.vhd\n"), "{said:?}");
    room.done("image map vhd:children/a.vhd --parent vhd:children/../base.vhd");
}

#[test]
fn a_failed_conversion_keeps_the_file_to_be_replaced() {
    let room = Room::new();
    room.make_raw("a.raw", 64 * MIB);
    room.done("image create vhd:b.vhd --size 1M");
    let before = room.read("b.vhd");
    let words = format!("ulimit -f 4096; exec {TAPLINE} image convert raw:a.raw vhd:b.vhd --force");
    let output = std::process::Command::new("sh").args(["-c", &words]).current_dir(room.path()).output().unwrap();
    assert_eq!(output.status.code(), Some(4));
    assert_eq!(room.read("b.vhd"), before);
    assert!(!room.file("b.vhd.tapline-new").exists());
    room.done("image convert raw:a.raw vhd:b.vhd --force --verify");
    room.done("image compare raw:a.raw vhd:b.vhd");
    assert!(!room.file("b.vhd.tapline-new").exists());
}

#[test]
fn a_file_may_occur_only_once_in_a_chain() {
    let room = Room::new();
    room.done("image create vhd:base.vhd --size 1G");
    room.done("image create vhd:a.vhd --parent vhd:base.vhd");
    std::os::unix::fs::symlink("a.vhd", room.file("symbolic.vhd")).unwrap();
    fs::hard_link(room.file("a.vhd"), room.file("hard.vhd")).unwrap();
    for twice in ["./a.vhd", "symbolic.vhd", "hard.vhd"] {
        let said = room.tapline(&format!("serve vhd:a.vhd --nbd nbd.sock --parent vhd:{twice} --parent vhd:base.vhd"));
        assert_eq!(said.code, Some(64), "{said:?}");
        assert!(said.err.contains(twice) && said.err.contains("the same file as vhd:a.vhd"), "{said:?}");
    }
    let said = room.tapline("image map vhd:a.vhd --parent vhd:base.vhd --parent vhd:hard.vhd");
    assert!(said.err.contains("the same file as vhd:a.vhd"), "{said:?}");
}

#[test]
fn an_overlong_chain_is_refused_before_anything_is_opened() {
    let room = Room::new();
    let parents = " --parent vhd:missing.vhd".repeat(60);
    let said = room.tapline(&format!("image map vhd:a.vhd{parents}"));
    assert_eq!(said.code, Some(64), "{said:?}");
    assert!(said.err.contains("61 layers") && said.err.contains("image merge"), "{said:?}");
}

#[test]
fn a_modified_parent_is_refused_with_both_names() {
    let room = Room::new();
    for (parent, child) in [("vhd:p.vhd", "vhd:c.vhd"), ("qcow2:p.q", "qcow2:c.q"), ("raw:p.raw", "qcow2:d.q")] {
        room.done(&format!("image create {parent} --size 32M"));
        room.done(&format!("image create {child} --parent {parent}"));
        room.done(&format!("image map {child} --parent {parent}"));
        let file = fs::File::open(room.file(parent.split_once(':').unwrap().1)).unwrap();
        file.set_modified(std::time::SystemTime::now() + std::time::Duration::from_secs(60)).unwrap();
        let said = room.tapline(&format!("image map {child} --parent {parent}"));
        assert_eq!(said.code, Some(4), "{said:?}");
        assert!(said.err.contains(parent) && said.err.contains(child), "{said:?}");
        assert!(said.err.contains("--accept-changed-parent"), "{said:?}");
        let said = room.tapline(&format!("image map {child} --parent {parent} --accept-changed-parent"));
        assert_eq!(said.code, Some(0), "{said:?}");
        assert!(said.err.contains(parent) && said.err.contains(child), "{said:?}");
    }
}

#[test]
fn a_child_may_be_larger_than_its_parent() {
    let room = Room::new();
    room.make_raw("base.raw", 32 * MIB);
    for child in ["vhd:c.vhd", "qcow2:c.q"] {
        room.done(&format!("image create {child} --parent raw:base.raw --size 40M"));
        let disk = format!("{child} --parent raw:base.raw");
        room.guest(&disk, &["read -P 0 32M 8M", "write -P 5 39M 1M"]);
        room.guest(&disk, &["read -P 0 32M 7M", "read -P 5 39M 1M", "read -v 33553920 512"]);
    }
}

#[test]
fn an_image_of_another_format_is_not_taken_for_raw() {
    let room = Room::new();
    room.done("image create qcow2:a.qcow2 --size 8M");
    room.done("image create vhd:b.vhd --size 8M --fixed");
    for (file, magic) in [("c.vmdk", b"KDMV"), ("c.qed", b"QED\0")] {
        room.write(file, magic);
        room.tool("truncate", &format!("-s 8M {file}"));
    }
    let refused = |words: &str, advice: &str| {
        let said = room.tapline(words);
        assert_eq!(said.code, Some(64), "{words}: {said:?}");
        assert!(said.err.contains(advice) && said.err.contains("--really-raw"), "{words}: {said:?}");
    };
    refused("image info raw:a.qcow2", "begins like an image of the format qcow2\n  give it as qcow2:a.qcow2");
    refused("serve raw:a.qcow2 --nbd ./s", "begins like");
    refused("image convert raw:b.vhd qcow2:d.qcow2", "ends like an image of the format vhd\n  give it as vhd:b.vhd");
    refused("image convert raw:c.vmdk qcow2:d.qcow2", "give it as vmdk:c.vmdk");
    refused("image convert raw:c.qed qcow2:d.qcow2", "convert it with the tools of QED");
    assert!(!room.file("d.qcow2").exists());
    room.done("image convert raw:a.qcow2 qcow2:d.qcow2 --really-raw");
    room.done("--really-raw image info raw:b.vhd");
}

#[test]
fn a_disk_becomes_smaller_only_where_nothing_is_lost() {
    let room = Room::new();
    room.write("a.raw", &[vec![1; 2 << 20], vec![0; 3 << 20]].concat());
    room.done("image convert raw:a.raw qcow2:a.qcow2");
    for target in ["raw:b", "vhd:b", "qcow2:b"] {
        room.done(&format!("image convert qcow2:a.qcow2 {target} --size 2M --verify"));
        assert_eq!(room.json(&format!("image info {target}"))[0]["size"], 2 * MIB, "{target}");
        room.done(&format!("image convert {target} raw:c"));
        assert!(room.read("c") == room.read("a.raw")[..2 << 20], "{target}");
        fs::remove_file(room.file("b")).unwrap();
        fs::remove_file(room.file("c")).unwrap();
        let said = room.tapline(&format!("image convert qcow2:a.qcow2 {target} --size 1M"));
        assert!(said.code == Some(4) && said.err.contains("data behind that, at byte 1048576 of"), "{said:?}");
        assert!(!room.file("b").exists() && !room.file("b.tapline-new").exists(), "{target}");
    }
    let mut bytes = room.read("a.raw");
    bytes[4_500_001] = 1;
    room.write("a.raw", &bytes);
    let said = room.tapline("image convert raw:a.raw qcow2:b --size 3M");
    assert!(said.err.contains("at byte 4500001 of the disk"), "{said:?}");
}

#[test]
fn a_disk_becomes_larger_and_the_rest_is_zero() {
    let room = Room::new();
    room.make_raw("a.raw", 16 * MIB);
    for target in ["raw:b.raw", "vhd:b.vhd", "qcow2:b.qcow2"] {
        room.done(&format!("image convert raw:a.raw {target} --size 20M --verify"));
        room.done(&format!("image convert {target} raw:c --force"));
        let bytes = room.read("c");
        assert!(bytes[..16 << 20] == room.read("a.raw") && bytes[16 << 20..] == vec![0; 4 << 20], "{target}");
    }
}

#[test]
fn a_measured_size_is_that_of_the_converted_image() {
    let room = Room::new();
    room.make_raw("a.raw", 301 * MIB + 512);
    room.done("image convert raw:a.raw qcow2:a.qcow2");
    for source in ["raw:a.raw", "qcow2:a.qcow2"] {
        for (format, options) in [
            ("raw", ""),
            ("vhd", ""),
            ("vhd", "--fixed"),
            ("vhd", "--block-size 512K"),
            ("vhd", "--block-size 16M"),
            ("qcow2", ""),
            ("qcow2", "--cluster-size 1M"),
        ] {
            let measured = room.json(&format!("image measure {source} --format {format} {options}"));
            room.done(&format!("image convert {source} {format}:b {options} --force"));
            let made = &room.json(&format!("image info {format}:b"))[0];
            let [required, made] = [&measured["required"], &made["file_size"]].map(|size| size.as_u64().unwrap());
            // A qcow2 file may end inside its last cluster.
            let unit = match (format, options) {
                ("qcow2", "") => 64 << 10,
                ("qcow2", _) => MIB,
                _ => 1,
            };
            assert_eq!(required, made.next_multiple_of(unit), "{source} {format} {options}: {measured}");
            assert_eq!(measured["size"], 301 * MIB + 512);
        }
    }
    let text = room.done("image measure --size 10G --format qcow2");
    assert!(text.contains("\nrequired         "), "{text}");
    assert_eq!(room.tapline("image measure --format qcow2").code, Some(64));
    assert_eq!(room.tapline("image measure --size 10G --format vmdk").code, Some(64));
}

/// The disk is full, and there are several refcount blocks and L2 tables of 64 KiB.
#[test]
#[ignore = "slow: run by `make test-all`"]
fn a_fully_allocated_size_is_that_of_a_full_image() {
    let room = Room::new();
    room.write("a.raw", &vec![1; 2100 << 20]);
    for (format, options) in [("raw", ""), ("vhd", ""), ("vhd", "--block-size 512K"), ("qcow2", "")] {
        let measured = room.json(&format!("image measure --size 2100M --format {format} {options}"));
        room.done(&format!("image convert raw:a.raw {format}:b {options} --force"));
        let made = &room.json(&format!("image info {format}:b"))[0];
        assert_eq!(measured["fully_allocated"], made["file_size"], "{format} {options}: {measured}");
    }
}

#[test]
fn a_measurement_reads_and_writes_only_when_told_to() {
    let room = Room::new();
    room.make_raw("a.raw", 16 * MIB);
    room.done("image convert raw:a.raw qcow2:a.qcow2");
    for pattern in ["seq", "random"] {
        for image in ["raw:a.raw", "qcow2:a.qcow2"] {
            let measured =
                room.json(&format!("image bench {image} --count 300 --depth 7 --size 64K --pattern {pattern}"));
            assert_eq!((&measured["requests"], &measured["operation"]), (&300.into(), &"read".into()), "{measured}");
            assert!(measured["latency_us"]["median"].as_u64() <= measured["latency_us"]["max"].as_u64(), "{measured}");
        }
    }
    assert_eq!(room.json("image compare raw:a.raw qcow2:a.qcow2")["same"], true);
    let said = room.done("image bench qcow2:a.qcow2 --count 128 --size 128K --overwrite-data");
    assert!(said.starts_with("qcow2:a.qcow2: 128 seq writes of 128 KiB at depth 32 in "), "{said}");
    room.sound_and_closed("qcow2:a.qcow2");
    room.done("image convert qcow2:a.qcow2 raw:b.raw");
    assert!(room.read("b.raw").iter().all(|&byte| byte == 0x54), "all of the disk was overwritten");
    for words in ["--size 1000", "--size 17M", "--size 32M", "--depth 0"] {
        let said = room.tapline(&format!("image bench raw:a.raw {words}"));
        assert_eq!(said.code, Some(64), "{words}: {said:?}");
    }
}
