//! VHDs that libvhd rejects: those made by older versions and other programs keep working and are repaired where
//! possible, and creating one prints a warning.

use serde_json::{Value, json};
use testkit::nbd::Client;

use crate::tool::Room;
use crate::tool::control::Control;
use crate::tool::served::Disk;

const MIB: u64 = 1 << 20;

/// Creates an image as another program does, as `q.vhd`, with its first block directly after the table, and its
/// contents as `a.raw`.
fn without_room(room: &Room) {
    room.make_raw("a.raw", 64 * MIB);
    room.tool("qemu-img", "convert -f raw -O vpc -o subformat=dynamic,force_size a.raw q.vhd");
}

/// Checks that it has the same contents as before, followed by zeroes.
fn shows_the_same(room: &Room) {
    assert_eq!(room.json("image check vhd:q.vhd")["result"], "clean");
    std::fs::File::options().write(true).open(room.file("a.raw")).unwrap().set_len(10 << 30).unwrap();
    room.done("image compare raw:a.raw vhd:q.vhd");
    room.tool("qemu-img", "compare -f raw -F vpc a.raw q.vhd");
}

#[test]
fn an_image_without_space_before_its_blocks_grows_with_one_note() {
    let room = Room::new();
    without_room(&room);
    let said = room.tapline("image resize vhd:q.vhd --size 10G");
    assert_eq!(said.code, Some(0), "{said:?}");
    assert!(said.err.contains("vhd:q.vhd") && said.err.contains("`vhd-util check` rejects"), "{said:?}");
    shows_the_same(&room);
    let said = room.tapline("image resize vhd:q.vhd --size 11G");
    assert_eq!((said.code, said.err.as_str()), (Some(0), ""), "{said:?}");
}

#[test]
fn a_served_image_without_space_before_its_blocks_grows_with_a_note() {
    let room = Room::new();
    without_room(&room);
    let disk = Disk::serve(&room, "vhd:q.vhd --nbd nbd.sock --control control.sock");
    Control::connect(&room.file("control.sock")).done(&serde_json::json!({ "verb": "resize", "size": 10u64 << 30 }));
    let (code, said) = disk.stop();
    assert_eq!(code, Some(0), "{said}");
    assert!(
        said.contains("q.vhd had to be moved behind its blocks") && said.contains("`vhd-util check` rejects"),
        "{said}"
    );
    shows_the_same(&room);
}

#[test]
fn an_image_without_space_before_its_blocks_merges_a_larger_one() {
    let room = Room::new();
    without_room(&room);
    room.done("image create vhd:child.vhd --parent vhd:q.vhd");
    room.done("image resize vhd:child.vhd --parent vhd:q.vhd --size 10G");
    let said = room.tapline("image merge vhd:child.vhd --parent vhd:q.vhd --from 0 --into 1 --delete");
    assert_eq!(said.code, Some(0), "{said:?}");
    assert!(said.err.contains("the metadata of vhd:q.vhd had to be moved behind its blocks"), "{said:?}");
    shows_the_same(&room);
}

#[test]
fn our_images_grow_without_a_note() {
    let room = Room::new();
    room.make_raw("a.raw", 64 * MIB);
    room.done("image convert raw:a.raw vhd:q.vhd");
    let said = room.tapline("image resize vhd:q.vhd --size 10G");
    assert_eq!((said.code, said.err.as_str()), (Some(0), ""), "{said:?}");
    shows_the_same(&room);
}

#[test]
fn blocks_unsupported_by_libvhd_are_reported() {
    let room = Room::new();
    for (words, told) in [("", false), ("--block-size 2M", false), ("--block-size 1M", true)] {
        let said = room.tapline(&format!("image create vhd:{told}{}.vhd --size 64M {words}", words.len()));
        assert_eq!((said.code, said.err.contains("2097152 bytes only")), (Some(0), told), "{words}: {said:?}");
    }
}

#[test]
fn space_behind_the_last_block_is_a_leak_that_a_repair_frees() {
    let room = Room::new();
    room.make_raw("a.raw", 32 * MIB);
    room.done("image convert raw:a.raw vhd:b.vhd");
    let whole = room.read("b.vhd");
    let (blocks, footer) = whole.split_at(whole.len() - 512);
    let unused = vec![7; 3 << 20];
    let with_footer = ([blocks, &unused, footer].concat(), 5, "leaked space", 0);
    // The next writer frees the space.
    let unclosed = ([&whole[..], &unused].concat(), 0, "the next writer repairs it", 3);
    for (bytes, code, says, repaired) in [with_footer, unclosed] {
        room.write("b.vhd", &bytes);
        let said = room.tapline("image check vhd:b.vhd");
        assert!(said.code == Some(code) && said.out.contains(says), "{said:?}");
        let said = room.tapline("image check vhd:b.vhd --repair");
        assert!(said.code == Some(repaired) && said.out.contains("ends behind its last block"), "{said:?}");
        assert!(!said.out.contains("header"), "only a footer was restored: {said:?}");
        assert_eq!(room.json("image check vhd:b.vhd")["result"], "clean");
        assert_eq!(room.read("b.vhd"), whole);
    }
    room.done("image compare raw:a.raw vhd:b.vhd");
}

#[test]
fn a_damaged_entry_costs_a_reader_its_block_and_nothing_else() {
    let room = Room::new();
    room.make_raw("a.raw", 16 * MIB);
    room.done("image convert raw:a.raw vhd:b.vhd");
    let mut bytes = room.read("b.vhd");
    let number = |at: usize| usize::try_from(u64::from_be_bytes(bytes[at..at + 8].try_into().unwrap())).unwrap();
    let table = number(number(16) + 16);
    // The third block is at the offset of the first one.
    bytes.copy_within(table..table + 4, table + 8);
    room.write("b.vhd", &bytes);

    let said = room.tapline("image check vhd:b.vhd");
    assert!(said.code == Some(2) && said.out.contains("lies over metadata or over another block"), "{said:?}");
    let said = room.tapline("serve vhd:b.vhd --nbd nbd.sock");
    assert!(said.code == Some(4) && said.err.contains("over another block"), "{said:?}");
    assert!(room.done("image info vhd:b.vhd").contains("16 MiB"));
    let said = room.tapline("image convert vhd:b.vhd raw:c.raw");
    assert!(said.err.contains("its bytes 0 to 1048575 cannot be located"), "{said:?}");

    let said = room.tapline("image convert --salvage vhd:b.vhd raw:c.raw --json");
    assert_eq!(said.code, Some(2), "{said:?}");
    let said: Value = serde_json::from_str(&said.out).unwrap();
    let lost = [json!({ "at": 0, "len": 2 * MIB }), json!({ "at": 4 * MIB, "len": 2 * MIB })];
    assert_eq!(said["lost"], json!(lost), "{said}");
    let mut salvaged = room.read("a.raw");
    salvaged[..2 << 20].fill(0);
    salvaged[4 << 20..6 << 20].fill(0);
    assert!(room.read("c.raw") == salvaged, "all other blocks are there");
    let said = room.tapline("image convert --salvage vhd:b.vhd raw:c.raw --force");
    assert!(said.code == Some(2) && said.out.contains("bytes 4194304 to 6291455"), "{said:?}");

    let disk = Disk::serve(&room, "vhd:b.vhd --read-only --nbd nbd.sock");
    let mut nbd = Client::connect(&room.file("nbd.sock")).unwrap();
    let content = room.read("a.raw");
    for (block, content) in (0..).zip(content.chunks(2 << 20)) {
        let expected = (block != 0 && block != 2).then_some(content);
        assert_eq!(nbd.read(block * 2 * MIB, 2 << 20).ok().as_deref(), expected, "block {block}");
    }
    let (code, log) = disk.stop();
    assert!(code == Some(0) && log.contains("cannot be located: the entry"), "{log}");
}

#[test]
fn a_misspelt_locator_is_found_and_repaired() {
    let room = Room::new();
    room.make_raw("a.raw", 64 * MIB);
    room.done("image convert raw:a.raw vhd:q.vhd");
    room.done("image create vhd:child.vhd --parent vhd:q.vhd");
    let mut bytes = room.read("child.vhd");
    misspell(&mut bytes[512..1536]);
    room.write("child.vhd", &bytes);
    let said = room.tapline("image check vhd:child.vhd");
    assert_eq!(said.code, Some(2), "{said:?}");
    assert!(said.out.contains("MACX") && said.out.contains("--repair"), "{said:?}");
    assert_eq!(room.read("child.vhd"), bytes, "a check without --repair must not write");
    assert_eq!(room.tapline("image check vhd:child.vhd --repair").code, Some(3));
    assert_eq!(room.json("image check vhd:child.vhd --parent vhd:q.vhd")["result"], "clean");
    let info = room.done("image info vhd:child.vhd --parent vhd:q.vhd");
    assert!(info.contains("MacX") && !info.contains("MACX"), "{info}");
    room.done("image compare vhd:child.vhd raw:a.raw --parent vhd:q.vhd");
}

/// Gives the locator of a header the code that Tapline once wrote, and updates the checksum of the header.
fn misspell(header: &mut [u8]) {
    let at = header.windows(4).position(|bytes| bytes == b"MacX").unwrap();
    header[at..at + 4].copy_from_slice(b"MACX");
    header[36..40].fill(0);
    let sum = header.iter().fold(0u32, |sum, &byte| sum.wrapping_add(byte.into()));
    header[36..40].copy_from_slice(&(!sum).to_be_bytes());
}
