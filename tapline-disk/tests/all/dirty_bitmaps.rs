//! Dirty bitmaps made of maps of changed blocks, as nbdinfo, qemu-img, libnbd and a client of ours see them: the same
//! as `image changes` lists; while the disk is written to, nothing that was answered is missing.

use std::fs::{self, File};
use std::os::unix::fs::{FileExt, MetadataExt};

use rustix::process::{Signal, kill_process};
use serde_json::{Value, json};
use testkit::nbd::wire::{Connection, REQ_ONE};

use crate::changed_blocks::{BLOCK, ask, named, refused, serve, write};
use crate::tool::Room;
use crate::tool::control::Control;
use crate::tool::handed::{Hand, Handed, NOWHERE};
use crate::tool::nbd::Nbd;
use crate::tool::replaced::{Replaced, wait_until_gone};

const MIB: u64 = 1 << 20;

fn context(name: &str) -> String {
    format!("qemu:dirty-bitmap:{name}")
}

fn snapshot(room: &Room, to: &str, map: &str) {
    let request =
        json!({ "verb": "snapshot", "to": format!("qcow2:{}", room.file(to).display()), "map": room.file(map) });
    ask(room, &request);
}

/// A disk of 64 MiB with two snapshots, `a` and `b`, and a leaf `c`, and the maps `m1` to `m3`.
fn chain(room: &Room, format: &str) -> (String, String) {
    let image = room.image(format, "64M");
    let disk = serve(room, &format!("{image} --track m1"));
    write(room, MIB, 4096);
    snapshot(room, "b", "m2");
    write(room, 20 * MIB, 70_000);
    write(room, MIB + 65_536, 4096);
    snapshot(room, "c", "m3");
    // The last bytes of the disk.
    write(room, 64 * MIB - 512, 512);
    assert_eq!(disk.stop().0, Some(0));
    let chain = format!("qcow2:c --parent qcow2:b --parent {image}");
    (image, chain)
}

/// The blocks that a client finds dirty, by one of its contexts.
fn dirty(connection: &mut Connection, id: u32, len: u64) -> Vec<usize> {
    let (mut at, mut blocks) = (0, Vec::new());
    while at < len {
        let reply = connection.block_status(0, at, u32::try_from(len - at).unwrap()).unwrap();
        let (_, runs) = reply.iter().find(|(context, _)| *context == id).expect("the context was requested");
        for (run, flags) in runs {
            let bytes = usize::try_from(at).unwrap()..usize::try_from(at + run).unwrap();
            if *flags == 1 {
                blocks.extend(bytes.start / BLOCK..bytes.end.div_ceil(BLOCK));
            }
            at += run;
        }
    }
    blocks.dedup();
    blocks
}

/// The same by a tool that lists ranges.
fn blocks_of(ranges: &Value, start: &str, is_dirty: impl Fn(&Value) -> bool) -> Vec<usize> {
    let ranges = ranges.as_array().unwrap().iter().filter(|range| is_dirty(range));
    let number = |range: &Value, word: &str| usize::try_from(range[word].as_u64().unwrap()).unwrap();
    let blocks =
        |range: &Value| number(range, start) / BLOCK..(number(range, start) + number(range, "length")).div_ceil(BLOCK);
    ranges.flat_map(blocks).collect()
}

fn nbdinfo(room: &Room, name: &str) -> Vec<usize> {
    let uri = format!("nbd+unix:///?socket={}", room.file("nbd.sock").display());
    let found = room.tool("nbdinfo", &format!("--map={} --json {uri}", context(name)));
    blocks_of(&serde_json::from_str(&found).unwrap(), "offset", |range| range["type"] == 1)
}

/// QEMU shows dirty ranges of such a context as ranges without data.
fn qemu_img(room: &Room, name: &str) -> Vec<usize> {
    let socket = room.file("nbd.sock");
    let export =
        format!("driver=nbd,server.type=unix,server.path={},x-dirty-bitmap={}", socket.display(), context(name));
    let found = room.tool("qemu-img", &format!("map --output=json --image-opts {export}"));
    blocks_of(&serde_json::from_str(&found).unwrap(), "start", |range| range["data"] == false)
}

/// Python's libnbd, with all contexts in one request and two chunks or more in each reply.
const LIBNBD: &str = r#"
import json, nbd, sys
h = nbd.NBD()
for name in sys.argv[2:]:
    h.add_meta_context(name)
h.connect_unix(sys.argv[1])
assert all(h.can_meta_context(name) for name in sys.argv[2:])
found, seen = {}, []
def extent(context, offset, entries, err):
    at = offset
    for len, flags in zip(entries[::2], entries[1::2]):
        found.setdefault(context, []).append({"offset": at, "length": len, "type": flags})
        at += len
h.block_status(h.get_size(), 0, extent)
one = []
h.block_status(h.get_size(), 0, lambda context, offset, entries, err: one.append(len(entries)), nbd.CMD_FLAG_REQ_ONE)
assert one == [2] * len(sys.argv[2:]), one
print(json.dumps(found))
"#;

fn libnbd(room: &Room, names: &[&str]) -> Vec<Vec<usize>> {
    let contexts: Vec<String> = names.iter().map(|name| context(name)).collect();
    let socket = room.file("nbd.sock");
    let mut words = vec!["-c", LIBNBD, socket.to_str().unwrap(), "base:allocation"];
    words.extend(contexts.iter().map(String::as_str));
    // Not another Python that may come first in PATH, without the package python3-libnbd.
    let said = room.run_words("/usr/bin/python3", &words);
    assert_eq!(said.code, Some(0), "{said:?}");
    let found: Value = serde_json::from_str(&said.out).unwrap();
    assert!(found["base:allocation"].is_array(), "{found}");
    contexts.iter().map(|name| blocks_of(&found[name], "offset", |range| range["type"] == 1)).collect()
}

#[test]
fn all_clients_see_what_the_maps_name() {
    for format in ["raw", "vhd", "qcow2"] {
        let room = Room::new();
        let (image, chain) = chain(&room, format);
        // The leaf, with three intervals and with two of them, and a snapshot.
        for (disk, maps) in [(&chain, ["m1,m2,m3", "m2,m3"]), (&image, ["m1", "m1"])] {
            let [first, second] = maps;
            let words = format!("{disk} --read-only --dirty-bitmap first={first} --dirty-bitmap a:b={second}");
            let disk = serve(&room, &words);
            let expected = maps.map(|maps| named(&room, &maps.replace(',', " ")));
            assert!(!expected[0].is_empty());
            assert_eq!(libnbd(&room, &["first", "a:b"]), expected);
            for (name, expected) in ["first", "a:b"].into_iter().zip(expected) {
                assert_eq!(nbdinfo(&room, name), expected, "{format} {name}");
                assert_eq!(qemu_img(&room, name), expected, "{format} {name}");
                let names = [&context(name)[..], "base:allocation"];
                let (mut client, ids) = Connection::with_contexts(&room.file("nbd.sock"), false, &names).unwrap();
                assert_eq!(dirty(&mut client, ids[0], 64 * MIB), expected, "{format} {name}");
                // From the middle of a block to that of another one, and only one run.
                let reply = client.block_status(REQ_ONE, MIB + 7, 65_536).unwrap();
                let is_dirty = |block| u32::from(expected.contains(&block));
                let len = if is_dirty(16) == is_dirty(17) { 65_536 } else { 65_529 };
                let (_, runs) = reply.iter().find(|(id, _)| *id == ids[0]).unwrap();
                assert_eq!(*runs, [(len, is_dirty(16))], "{format} {name}");
            }
            let list = format!("--list --json nbd+unix:///?socket={}", room.file("nbd.sock").display());
            let list: Value = serde_json::from_str(&room.tool("nbdinfo", &list)).unwrap();
            let contexts = list["exports"][0]["contexts"].as_array().unwrap();
            assert!(contexts.ends_with(&[json!(context("first")), json!(context("a:b"))]), "{contexts:?}");
            assert_eq!(disk.stop().0, Some(0));
        }
    }
}

#[test]
fn a_live_bitmap_names_each_answered_change_across_snapshots_and_successors() {
    let room = Room::new();
    let image = room.image("qcow2", "64M");
    let words = format!("{image} --track m1 --nbd nbd.sock --dirty-bitmap live=m1");
    let mut disk = Replaced::serve(&room, &words);
    let names = ["base:allocation", &context("live")];
    let (mut client, ids) = Connection::with_contexts(&room.file("nbd.sock"), false, &names).unwrap();
    let len = 64 * MIB;
    assert!(dirty(&mut client, ids[1], len).is_empty());
    let mut expected = Vec::new();
    let mut change = |client: &mut Connection, block: usize| {
        write(&room, u64::try_from(block * BLOCK).unwrap(), 4096);
        expected.push(block);
        expected.sort_unstable();
        assert_eq!(dirty(client, ids[1], len), expected);
    };
    change(&mut client, 100);
    snapshot(&room, "b", "m2");
    change(&mut client, 50);
    // The client stays connected, with its contexts; the intervals that are over were handed over.
    let upgrade = disk.upgrade();
    disk.replaced_by(&upgrade.join().unwrap());
    change(&mut client, 200);
    snapshot(&room, "c", "m3");
    change(&mut client, 300);
    let upgrade = disk.upgrade();
    disk.replaced_by(&upgrade.join().unwrap());
    change(&mut client, 10);
    assert_eq!(nbdinfo(&room, "live"), expected);
    // The disk grows; a client that connects then sees more.
    ask(&room, &json!({ "verb": "resize", "size": 80 * MIB }));
    write(&room, 70 * MIB, 512);
    expected.push(1120);
    assert_eq!(nbdinfo(&room, "live"), expected);
    // Without its map everything is dirty, also for those that connect later.
    ask(&room, &json!({ "verb": "untrack" }));
    assert_eq!(client.block_status(0, 0, 1 << 26).unwrap()[1], (ids[1], vec![(1 << 26, 1)]));
    ask(&room, &json!({ "verb": "track", "map": room.file("m4") }));
    assert_eq!(client.block_status(0, 0, 1 << 26).unwrap()[1], (ids[1], vec![(1 << 26, 1)]));
    let upgrade = disk.upgrade();
    disk.replaced_by(&upgrade.join().unwrap());
    assert_eq!(client.block_status(0, 0, 1 << 26).unwrap()[1], (ids[1], vec![(1 << 26, 1)]));
    assert_eq!(nbdinfo(&room, "live").len(), 1280);
    assert!(disk.stop().contains("the dirty bitmap live shows everything as dirty"));
}

#[test]
fn a_killed_process_costs_a_live_bitmap_no_change() {
    let room = Room::new();
    let image = room.image("raw", "64M");
    let words = format!("{image} --track m1 --dirty-bitmap live=m1");
    let mut disk = Replaced::of(&room, serve(&room, &words));
    write(&room, 5 * MIB, 4096);
    kill_process(disk.pid, Signal::KILL).unwrap();
    disk.first.child.wait().unwrap();
    wait_until_gone(disk.pid);
    let disk = serve(&room, &words);
    let found = nbdinfo(&room, "live");
    // All of its region of 4 MiB.
    assert_eq!(found, (64..128).collect::<Vec<_>>());
    assert_eq!(disk.stop().0, Some(0));
}

#[test]
fn maps_that_do_not_prove_what_has_changed_are_refused() {
    let room = Room::new();
    let (image, chain) = chain(&room, "qcow2");
    let refused = |words: &str, why: &str| refused(&room, words, why);
    refused(&format!("{chain} --dirty-bitmap x=m3"), "the disk is writable, and its changes are not recorded");
    refused(&format!("{chain} --track m3 --dirty-bitmap x=m2"), "is not m3, the one of --track");
    refused(&format!("{chain} --track new --dirty-bitmap x=m3"), "is not new, the one of --track");
    refused(&format!("{chain} --track new --dirty-bitmap x=m3,new"), "continues no other");
    refused(&format!("{chain} --track m3 --dirty-bitmap x=m1,m3"), "does not continue");
    assert!(!room.file("new").exists());
    let read_only = format!("{chain} --read-only --dirty-bitmap");
    refused(&format!("{read_only} x=m1,m3"), "does not continue");
    refused(&format!("{read_only} x=m3,m2"), "tracked by another map");
    refused(&format!("{read_only} x=m1,m2"), "tracked by another map");
    refused(&format!("{read_only} x=m3 --dirty-bitmap x=m3"), "two have the name x");
    refused(&format!("{read_only} x=absent"), "absent");
    refused(&format!("{read_only} x=c"), "no map of changed blocks");
    let many: String = (0..17).map(|nth| format!(" --dirty-bitmap {nth}=m3")).collect();
    refused(&format!("{chain} --read-only{many}"), "at most 16");
    // The snapshot has another map than the leaf; it is known as long as nobody writes to it.
    refused(&format!("{image} --read-only --dirty-bitmap x=m1,m2"), "tracked by another map");
    room.done(&format!("image changes m1 --image {image}"));
    fs::copy(room.file("a"), room.file("copy")).unwrap();
    refused("qcow2:copy --read-only --dirty-bitmap x=m1", "not marked as tracked");
    assert_eq!(serve(&room, &image).stop().0, Some(0));
    refused(&format!("{image} --read-only --dirty-bitmap x=m1"), "not marked as tracked");
    // Another program has written to the leaf after a clean end.
    let file = File::options().write(true).open(room.file("c")).unwrap();
    file.write_all_at(&room.read("c")[700..701], 700).unwrap();
    refused(&format!("{read_only} x=m3 --accept-changed-parent"), "was changed after the map was closed");
}

#[test]
fn a_client_that_asks_for_much_gets_what_exists() {
    let room = Room::new();
    let image = room.image("raw", "64M");
    let disk = serve(&room, &format!("{image} --track m --dirty-bitmap x=m"));
    let socket = room.file("nbd.sock");
    for name in ["qemu:dirty-bitmap:", "qemu:dirty-bitmap:xx", "qemu:dirty-bitmap", "qemu:dirty-bitmap:X"] {
        assert!(Connection::with_contexts(&socket, false, &[name]).is_err(), "{name}");
    }
    let (mut client, ids) = Connection::with_contexts(&socket, false, &[&context("x")]).unwrap();
    // Without base:allocation, and behind the end.
    assert_eq!(client.block_status(0, 0, 1 << 26).unwrap(), [(ids[0], vec![(1 << 26, 0)])]);
    assert!(client.block_status(0, 64 * MIB - 512, 513).is_err());
    assert_eq!(disk.stop().0, Some(0));
}

#[test]
fn a_daemon_passes_the_maps_as_descriptors() {
    let room = Room::new();
    let (image, _) = chain(&room, "qcow2");
    let expected = named(&room, "m1");
    assert_eq!(image, "qcow2:a");
    let words =
        format!("serve qcow2:{NOWHERE}/a --read-only --confine --nbd {NOWHERE}/nbd.sock --dirty-bitmap x={NOWHERE}/m1");
    let files = ["a", "m1"].map(|file| Handed::open(&room, file, false));
    fs::remove_file(room.file("nbd.sock")).ok();
    let disk = Hand::to(&words).files(&files).listen(&room, "nbd", "nbd.sock").serve();
    assert_eq!(nbdinfo(&room, "x"), expected);
    assert_eq!(Nbd::connect(&room.file("nbd.sock")).unwrap().read(MIB, 512).unwrap().len(), 512);
    assert_eq!(disk.stop().0, Some(0));
    fs::remove_file(room.file("nbd.sock")).unwrap();
    let said = Hand::to(&words).file(&files[0]).listen(&room, "nbd", "nbd.sock").run();
    assert!(said.err.contains("m1") && said.code != Some(0), "{said:?}");
}

/// The mark of an image, as a daemon sends it.
fn mark(room: &Room, file: &str) -> Value {
    let mut text = [0; 1024];
    let len = rustix::fs::getxattr(room.file(file), "user.tapline.changes", &mut text[..]).unwrap();
    let text = String::from_utf8(text[..len].to_vec()).unwrap();
    let words: Vec<&str> = text.split(' ').collect();
    json!({ "map": words[1], "file": words[2], "sessions": words[3].split(',').collect::<Vec<_>>() })
}

#[test]
fn maps_that_are_not_as_a_daemon_has_recorded_them_are_refused() {
    let room = Room::new();
    let (_, chain) = chain(&room, "qcow2");
    let id = |maps: &str| room.json(&format!("image changes {maps}"))["maps"][0].as_str().unwrap().to_owned();
    let [first, second, third] = ["m1", "m2", "m3"].map(id);
    let expected = |map: &str, continues: Option<&str>, proof: &Value| json!({ "map": map, "continues": continues, "proof": proof });
    let sealed = json!({ "sealed": null });
    let names = |words: &str| words.replace("qcow2:", &format!("qcow2:{NOWHERE}/"));
    let hand = |chain: &str, maps: &[&str], expected: &[Value]| {
        let bitmap = maps.iter().map(|map| format!("{NOWHERE}/{map}")).collect::<Vec<_>>().join(",");
        let chain = names(chain);
        let words = format!("serve {chain} --read-only --confine --nbd {NOWHERE}/nbd.sock --dirty-bitmap x={bitmap}");
        fs::remove_file(room.file("nbd.sock")).ok();
        let hand = Hand::to(&format!("{words} --expect {}", json!(expected)));
        let files: Vec<&str> = ["a", "b", "c"].into_iter().filter(|file| chain.contains(&format!("/{file}"))).collect();
        let files: Vec<Handed> = files.iter().chain(maps).map(|file| Handed::open(&room, file, false)).collect();
        hand.files(&files).listen(&room, "nbd", "nbd.sock")
    };
    let served = |chain: &str, maps: &[&str], expected: &[Value]| {
        let disk = hand(chain, maps, expected).serve();
        assert_eq!(nbdinfo(&room, "x"), named(&room, &maps.join(" ")));
        assert_eq!(disk.stop().0, Some(0));
    };
    let refused = |chain: &str, maps: &[&str], expected: &[Value], why: &str| {
        let said = hand(chain, maps, expected).run();
        assert!(said.code != Some(0) && said.err.contains(why), "{why}: {said:?}");
    };
    let (a, b) = ("qcow2:a", "qcow2:b --parent qcow2:a");
    let good = expected(&first, None, &sealed);
    served(a, &["m1"], std::slice::from_ref(&good));
    served(b, &["m1", "m2"], &[good.clone(), expected(&second, Some(&first), &sealed)]);
    // The last of those that are expected.
    served(b, &["m2"], &[good.clone(), expected(&second, Some(&first), &sealed)]);
    refused(a, &["m1"], &[expected(&second, None, &sealed)], "its file has map");
    refused(b, &["m2"], &[expected(&second, Some(&third), &sealed)], "it continues");
    refused(b, &["m1", "m2"], &[expected(&second, None, &sealed)], "as many maps must be expected");
    refused(b, &["m2", "m1"], &[expected(&second, None, &sealed), good], "does not continue");
    // The map of the leaf is proven by the image, as this process has it locked.
    let found = fs::metadata(room.file("c")).unwrap();
    let state = json!({ "seconds": found.ctime(), "nanoseconds": found.ctime_nsec(), "len": found.len() });
    let image = |mark: Value| expected(&third, Some(&second), &json!({ "image": [mark, state] }));
    served(&chain, &["m3"], &[image(mark(&room, "c"))]);
    refused(&chain, &["m3"], &[expected(&third, None, &sealed)], "it is not complete");
    refused(&chain, &["m3"], &[expected(&third, None, &json!({ "served": "ab" }))], "a running disk");
    refused(&chain, &["m3"], &[image(mark(&room, "a"))], "tracked by another map");
    let file = File::options().write(true).open(room.file("c")).unwrap();
    file.write_all_at(&room.read("c")[700..701], 700).unwrap();
    refused(&chain, &["m3"], &[image(mark(&room, "c"))], "was changed after the map was closed");
}

#[test]
fn a_live_bitmap_is_made_of_passed_files() {
    let room = Room::new();
    Hand::to(&format!("image create raw:{NOWHERE}/a --size 64M")).file(&Handed::create(&room, "a")).done();
    let words = format!(
        "serve raw:{NOWHERE}/a --track {NOWHERE}/m --nbd {NOWHERE}/nbd.sock --control {NOWHERE}/control.sock \
         --dirty-bitmap x={NOWHERE}/m"
    );
    let files = [Handed::open(&room, "a", true), Handed::create(&room, "m")];
    let hand = Hand::to(&words).files(&files).listen(&room, "nbd", "nbd.sock").listen(&room, "control", "control.sock");
    let disk = hand.serve();
    write(&room, MIB, 512);
    assert_eq!(nbdinfo(&room, "x"), [16]);
    let mut control = Control::connect(&room.file("control.sock"));
    assert_eq!(control.done(&json!({ "verb": "layers" }))["changes"]["state"], "kept");
    assert_eq!(disk.stop().0, Some(0));
}
