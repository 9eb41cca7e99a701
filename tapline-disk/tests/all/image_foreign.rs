//! VMDK and VHDX as QEMU makes them: read, converted and compared, and nothing else.

use crate::tool::Room;

const MIB: u64 = 1 << 20;

/// What QEMU makes of a raw disk: the image's name, and the options.
const MADE: [(&str, &str); 6] = [
    ("vmdk:a", "-O vmdk -o subformat=monolithicSparse"),
    ("vmdk:a", "-O vmdk -o subformat=streamOptimized"),
    ("vmdk:a", "-O vmdk -o subformat=monolithicSparse,zeroed_grain=on"),
    ("vhdx:a", "-O vhdx -o subformat=dynamic"),
    ("vhdx:a", "-O vhdx -o subformat=fixed"),
    ("vhdx:a", "-O vhdx -o subformat=dynamic,block_size=1M"),
];

#[test]
fn images_that_qemu_makes_hold_the_same_for_us() {
    let room = Room::new();
    // Several grain tables, and the last grain and block in part.
    room.make_raw("a.raw", 101 * MIB + 512);
    for (image, options) in MADE {
        room.tool("qemu-img", &format!("convert -f raw {options} a.raw a"));
        assert_eq!(room.json(&format!("image compare raw:a.raw {image}"))["same"], true, "{options}");
        for target in ["raw:b", "qcow2:b", "vhd:b"] {
            room.done(&format!("image convert {image} {target} --verify --force"));
            assert_eq!(room.json(&format!("image compare raw:a.raw {target}"))["same"], true, "{options} {target}");
        }
        room.done(&format!("image convert {image} qcow2:b --compress --io-engine aio --force"));
        room.tool("qemu-img", "compare -f raw -F qcow2 a.raw b");
        let map = room.json(&format!("image map {image}"));
        let stored = map.as_array().unwrap().iter().filter(|run| run["data"] == true);
        let stored: u64 = stored.map(|run| run["length"].as_u64().unwrap()).sum();
        assert!(options.contains("fixed") || stored < 100 * MIB, "{options}: {stored}");
    }
}

#[test]
fn info_says_what_kind_of_image_it_is() {
    let room = Room::new();
    room.make_raw("a.raw", 16 * MIB);
    for ((image, options), kind) in
        MADE.into_iter().zip(["monolithicSparse", "streamOptimized", "monolithicSparse", "dynamic", "fixed", "dynamic"])
    {
        room.tool("qemu-img", &format!("convert -f raw {options} a.raw a"));
        let info = &room.json(&format!("image info {image}"))[0];
        let format = image.split(':').next().unwrap();
        assert_eq!((&info["format"], &info["size"]), (&format.into(), &(16 * MIB).into()), "{info}");
        assert_eq!(info[format]["kind"], kind, "{info}");
        assert!(room.done(&format!("image info {image}")).contains(&format!("kind      {kind}\n")));
    }
}

#[test]
fn images_of_other_hypervisors_are_only_read() {
    let room = Room::new();
    room.make_raw("a.raw", 16 * MIB);
    for image in ["vmdk:a", "vhdx:a"] {
        let format = image.split(':').next().unwrap();
        room.tool("qemu-img", &format!("convert -f raw -O {format} a.raw a"));
        let before = room.read("a");
        for words in [
            format!("serve {image} --nbd ./a.sock"),
            format!("serve {image} --nbd ./a.sock --read-only"),
            format!("image create qcow2:b --parent {image}"),
            format!("image create {format}:b --size 1G"),
            format!("image convert raw:a.raw {format}:b"),
            format!("image snapshot {image} --to qcow2:b"),
            format!("image clone {image} --to qcow2:b"),
            format!("image resize {image} --size 1G"),
            format!("image compact {image}"),
            format!("image check {image}"),
            format!("image measure {image} --format {format}"),
        ] {
            let said = room.tapline(&words);
            assert!(matches!(said.code, Some(4 | 64)), "{words}: {said:?}");
            assert!(said.err.contains("only read") || said.err.contains("it must be raw"), "{words}: {said:?}");
            assert!(!room.file("b").exists(), "{words}");
        }
        assert!(room.read("a") == before, "{image} was changed");
        room.done(&format!("image measure {image} --format qcow2"));
        room.done("image create qcow2:c --size 16M");
        let said = room.tapline(&format!("image rebase qcow2:c --onto {image} --unsafe"));
        assert!(said.code == Some(4) && said.err.contains("only read"), "{said:?}");
        std::fs::remove_file(room.file("c")).unwrap();
    }
}

#[test]
fn an_image_in_several_files_and_a_wrong_format_are_refused_with_advice() {
    let room = Room::new();
    room.make_raw("a.raw", 16 * MIB);
    room.tool("qemu-img", "convert -f raw -O vmdk -o subformat=twoGbMaxExtentSparse a.raw a.vmdk");
    for (image, advice) in [
        ("vmdk:a.vmdk", "qemu-img convert -f vmdk"),
        ("vmdk:a-s001.vmdk", "qemu-img convert -f vmdk"),
        ("vhdx:a.vmdk", "give the file's actual format"),
        ("raw:a-s001.vmdk", "give it as vmdk:a-s001.vmdk"),
    ] {
        let said = room.tapline(&format!("image info {image}"));
        assert!(matches!(said.code, Some(4 | 64)) && said.err.contains(advice), "{image}: {said:?}");
    }
}

#[test]
fn what_can_be_read_of_a_damaged_image_is_salvaged() {
    let room = Room::new();
    room.make_raw("a.raw", 16 * MIB);
    room.tool("qemu-img", "convert -f raw -O vmdk -o subformat=streamOptimized a.raw a");
    let mut bytes = room.read("a");
    // The first grain, behind its marker: at the first sector with its number and a length.
    let grain = (128..).find(|n| bytes[n * 512..n * 512 + 8] == [0; 8] && bytes[n * 512 + 8] != 0).unwrap() * 512;
    bytes[grain + 12..grain + 40].fill(0xee);
    room.write("a", &bytes);
    let said = room.tapline("image convert vmdk:a raw:b");
    assert!(said.code == Some(4) && said.err.contains("--salvage"), "{said:?}");
    let said = room.tapline("image convert vmdk:a raw:b --salvage");
    assert!(said.code == Some(2) && said.out.contains("bytes 0 to 65535"), "{said:?}");
    assert!(room.read("b")[64 << 10..] == room.read("a.raw")[64 << 10..]);
}
