//! Dirty bitmaps at the daemon's NBD address, as nbdinfo, qemu-img and libnbd see them: the changes that `vdi changed`
//! lists, or no bitmap. A client that copies only what is dirty gets the very content of the snapshot.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::Path;
use std::process::Command;

use serde_json::{Value, json};
use testkit::nbd::wire::Connection;

use crate::cbt::{BLOCK, Bed, SIZE, bed, copy_with_attributes};
use crate::harness::disks::{nothing_leaked, plug, processes, unplug};
use crate::harness::{kill, wait_until};

const DIRTY: &str = "qemu:dirty-bitmap:";

fn socket(bed: &Bed) -> String {
    bed.daemon.room().join("run/nbd.sock").display().to_string()
}

fn uri(bed: &Bed, name: &str) -> String {
    format!("nbd+unix:///{name}?socket={}", socket(bed))
}

/// Runs a client; returns its output, or what it says if it fails.
fn run(program: &str, words: &[&str]) -> Result<String, String> {
    let done = Command::new(program).args(words).current_dir("/").output().unwrap();
    match done.status.success() {
        true => Ok(String::from_utf8(done.stdout).unwrap()),
        false => Err(String::from_utf8_lossy(&done.stderr).into_owned()),
    }
}

/// The blocks in the ranges that are dirty.
fn blocks(ranges: &str, start: &str, is_dirty: impl Fn(&Value) -> bool) -> BTreeSet<usize> {
    let ranges: Vec<Value> = serde_json::from_str(ranges).unwrap();
    let number = |range: &Value, key: &str| usize::try_from(range[key].as_u64().unwrap()).unwrap();
    let of = |range: &Value| {
        let (start, len) = (number(range, start), number(range, "length"));
        start / BLOCK..(start + len).div_ceil(BLOCK)
    };
    ranges.iter().filter(|range| is_dirty(range)).flat_map(of).collect()
}

/// By nbdinfo; an error if there is no such bitmap.
fn nbdinfo(bed: &Bed, from: &str, to: &str) -> Result<BTreeSet<usize>, String> {
    let map = format!("--map={DIRTY}{from}");
    let said = run("nbdinfo", &[&map, "--json", &uri(bed, to)])?;
    Ok(blocks(&said, "offset", |range| range["type"] == 1))
}

/// By qemu-img, which shows what is dirty as ranges without data.
fn qemu_img(bed: &Bed, from: &str, to: &str) -> BTreeSet<usize> {
    let export = format!("export={to},x-dirty-bitmap={DIRTY}{from}");
    let options = format!("driver=nbd,server.type=unix,server.path={},{export}", socket(bed));
    let said = run("qemu-img", &["map", "--output=json", "--image-opts", &options]).unwrap();
    blocks(&said, "start", |range| range["data"] == false)
}

/// Each state since which there is a bitmap, as nbdinfo lists them.
fn listed(bed: &Bed, to: &str) -> BTreeSet<String> {
    let said = run("nbdinfo", &["--json", &uri(bed, to)]).unwrap();
    let said: Value = serde_json::from_str(&said).unwrap();
    let contexts = said["exports"][0]["contexts"].as_array().unwrap_or_else(|| panic!("{said}")).clone();
    assert!(contexts.contains(&json!("base:allocation")), "{contexts:?}");
    contexts.iter().filter_map(|name| Some(name.as_str()?.strip_prefix(DIRTY)?.to_owned())).collect()
}

fn set(states: &[&String]) -> BTreeSet<String> {
    states.iter().map(|state| (*state).clone()).collect()
}

/// A client of ours that has chosen an export with this bitmap, perhaps in vain: it has no number then.
fn client(bed: &Bed, from: &str, to: &str) -> (Connection, Option<u32>) {
    let mut connection = Connection::greeted(Path::new(&socket(bed))).unwrap();
    let answers = |connection: &mut Connection, number: u32, data: &[u8]| {
        connection.option(number, data).unwrap();
        let mut contexts = Vec::new();
        loop {
            match connection.option_reply().unwrap() {
                (4, data) => contexts.push(u32::from_be_bytes(data[..4].try_into().unwrap())),
                (3, _) => {}
                (kind, data) => {
                    assert_eq!(kind, 1, "option {number}: {}", String::from_utf8_lossy(&data));
                    break contexts;
                }
            }
        }
    };
    let string = |text: &str| [&u32::try_from(text.len()).unwrap().to_be_bytes(), text.as_bytes()].concat();
    answers(&mut connection, 8, &[]);
    // It looks at the export before it sets the context.
    answers(&mut connection, 6, &[string(to), vec![0, 0]].concat());
    let query = [string(to), vec![0, 0, 0, 1], string(&format!("{DIRTY}{from}"))].concat();
    let contexts = answers(&mut connection, 10, &query);
    answers(&mut connection, 7, &[string(to), vec![0, 0]].concat());
    (connection, contexts.first().copied())
}

/// What a connected client sees.
fn dirty(connection: &mut Connection, len: u64) -> io::Result<BTreeSet<usize>> {
    let (mut found, mut at) = (BTreeSet::new(), 0);
    while at < len {
        let answered = connection.block_status(0, at, u32::try_from(len - at).unwrap())?;
        for (run, flags) in &answered[0].1 {
            let block = |at: u64| usize::try_from(at).unwrap() / BLOCK;
            if *flags == 1 {
                found.extend(block(at)..block(at + run));
            }
            at += run;
        }
    }
    Ok(found)
}

/// Refuses to have a bitmap: by all clients, and the log says why.
#[track_caller]
fn not_offered(bed: &Bed, from: &str, to: &str, why: &str) {
    let log = bed.daemon.log().len();
    assert!(!listed(bed, to).contains(from));
    let said = nbdinfo(bed, from, to).unwrap_err();
    assert!(said.contains("metadata context"), "{said}");
    assert_eq!(client(bed, from, to).1, None);
    let log = bed.daemon.log()[log..].to_owned();
    assert!(log.lines().any(|line| line.contains("not offered") && line.contains(why)), "{why}: {log}");
    // All is as for any other reader.
    run("nbdcopy", &[&uri(bed, to), bed.daemon.room().join("copy").to_str().unwrap()]).unwrap();
}

#[track_caller]
fn offered(bed: &Bed, from: &str, to: &str) -> BTreeSet<usize> {
    let named = bed.changed(from, to);
    assert_eq!(nbdinfo(bed, from, to).unwrap(), named, "{}", bed.daemon.log());
    assert_eq!(qemu_img(bed, from, to), named);
    assert!(listed(bed, to).contains(from));
    named
}

/// A backup program: copies what is dirty onto a copy of an earlier state, and the whole disk next to it.
const BACK_UP: &str = r#"
import nbd, sys
address, to, context, target = sys.argv[1:]
h = nbd.NBD()
h.add_meta_context(context)
h.set_export_name(to)
h.connect_unix(address)
assert h.can_meta_context(context)
size = h.get_size()
extents = []
def extent(name, offset, entries, err):
    for length, flags in zip(entries[::2], entries[1::2]):
        extents.append((offset, length, flags))
        offset += length
at = 0
while at < size:
    h.block_status(min(size - at, 1 << 20), at, extent)
    at = extents[-1][0] + extents[-1][1]
with open(target, 'r+b') as file:
    file.truncate(size)
    for offset, length, flags in extents:
        if flags & 1:
            while length:
                part = min(length, 1 << 20)
                file.seek(offset)
                file.write(h.pread(part, offset))
                offset, length = offset + part, length - part
"#;

/// Copies what has changed onto `target`, which has the content of `from`, and compares the result with `to`.
#[track_caller]
fn back_up(bed: &Bed, from: &str, to: &str, target: &Path) {
    let (address, context, path) = (socket(bed), format!("{DIRTY}{from}"), target.to_str().unwrap());
    // Not another Python that may come first in PATH, without the package python3-libnbd.
    run("/usr/bin/python3", &["-c", BACK_UP, &address, to, &context, path]).unwrap();
    let whole = bed.daemon.room().join("whole");
    run("nbdcopy", &[&uri(bed, to), whole.to_str().unwrap()]).unwrap();
    assert!(fs::read(&whole).unwrap() == fs::read(target).unwrap(), "the copies of {to} differ");
}

#[test]
fn a_copy_of_what_is_dirty_is_the_snapshot() {
    copies_are_the_snapshots("qcow2", "disk-user-range = \"61000-61999\"");
}

#[test]
#[ignore = "slow: run by `make test-all`"]
fn a_copy_of_what_is_dirty_is_the_snapshot_of_a_vhd() {
    copies_are_the_snapshots("vhd", "");
}

#[track_caller]
fn copies_are_the_snapshots(format: &str, settings: &str) {
    let bed = bed(format, settings);
    bed.write(&[0, 1, 40], 1);
    let first = bed.snapshot();
    let target = bed.daemon.room().join("target");
    run("nbdcopy", &[&uri(&bed, &first), target.to_str().unwrap()]).unwrap();
    assert_eq!(listed(&bed, &first), set(&[]));
    bed.write(&[1, 5, 6, 300], 2);
    let second = bed.snapshot();
    assert_eq!(offered(&bed, &first, &second), BTreeSet::from([1, 5, 6, 300]));
    back_up(&bed, &first, &second, &target);
    // A larger disk, and a snapshot in between that goes.
    bed.daemon.done(bed.daemon.post(&format!("/vdis/{}/resize", bed.vdi), json!({ "size": SIZE * 2 })));
    bed.write(&[2, 900], 3);
    let third = bed.snapshot();
    bed.write(&[3, 5, 901], 4);
    let fourth = bed.snapshot();
    assert_eq!(listed(&bed, &fourth), set(&[&first, &second, &third]));
    // For a client that can use one only.
    let only = format!("{fourth}@since={second}");
    assert_eq!(listed(&bed, &only), set(&[&second]));
    assert_eq!(nbdinfo(&bed, &second, &only).unwrap(), bed.changed(&second, &fourth));
    assert_eq!(listed(&bed, &format!("{second}@since={fourth}")), set(&[]));
    assert!(run("nbdinfo", &[&uri(&bed, &format!("{fourth}@since=monday"))]).is_err());
    bed.destroy(&third);
    assert_eq!(listed(&bed, &fourth), set(&[&first, &second]));
    assert!(offered(&bed, &first, &fourth).is_superset(&BTreeSet::from([1, 2, 3, 5, 6, 300, 900, 901])));
    // The data of the earlier state is not needed.
    bed.verb(&second, "data-destroy");
    offered(&bed, &second, &fourth);
    back_up(&bed, &second, &fourth, &target);
    // Of a disk that changes there is nothing to read, and of one that is not plugged its present state.
    bed.write(&[7], 5);
    nbdinfo(&bed, &fourth, &bed.vdi).unwrap_err();
    unplug(&bed.daemon, &bed.vbd);
    assert_eq!(offered(&bed, &fourth, &bed.vdi), BTreeSet::from([7]));
    back_up(&bed, &fourth, &bed.vdi, &target);
    // States that are not earlier ones of the same disk, and names that are not those of a state.
    not_offered(&bed, &fourth, &first, "not known");
    not_offered(&bed, &fourth, &fourth, "not an earlier snapshot");
    not_offered(&bed, &bed.vdi, &fourth, "not an earlier snapshot");
    for name in ["", "nightly", &first.to_uppercase(), &first.replace('-', "")] {
        nbdinfo(&bed, name, &fourth).unwrap_err();
    }
    bed.nothing_is_left();
    wait_until("no client is left", || bed.daemon.get("/vbds").1.as_array().unwrap().len() == 1);
    nothing_leaked(&bed.daemon);
}

#[test]
fn a_connected_client_keeps_its_bitmap_whatever_becomes_of_the_maps() {
    let bed = bed("qcow2", "");
    bed.write(&[0], 1);
    let first = bed.snapshot();
    bed.write(&[1], 2);
    let second = bed.snapshot();
    bed.write(&[2], 3);
    let third = bed.snapshot();
    // Two clients of one snapshot that want other bitmaps, and one that wants none.
    let (mut one, mut other) = (client(&bed, &first, &third), client(&bed, &second, &third));
    let mut plain = Connection::greeted(Path::new(&socket(&bed))).unwrap();
    plain.option(6, &[&36_u32.to_be_bytes()[..], third.as_bytes(), &[0, 0]].concat()).unwrap();
    while plain.option_reply().unwrap().0 == 3 {}
    assert!(one.1.is_some() && other.1.is_some());
    assert_eq!(processes(&bed.daemon).len(), 4);
    let mut same = client(&bed, &second, &third);
    assert_eq!(processes(&bed.daemon).len(), 4);
    let mut still = |bed: &Bed| {
        assert_eq!(dirty(&mut one.0, SIZE).unwrap(), BTreeSet::from([1, 2]), "{}", bed.daemon.log());
        assert_eq!(dirty(&mut other.0, SIZE).unwrap(), BTreeSet::from([2]));
        assert_eq!(dirty(&mut same.0, SIZE).unwrap(), BTreeSet::from([2]));
    };
    still(&bed);
    bed.write(&[3], 4);
    bed.destroy(&first);
    still(&bed);
    // It is read by others still, and right; but the state cannot be found any more.
    assert_eq!(listed(&bed, &third), set(&[&second]));
    bed.destroy(&second);
    unplug(&bed.daemon, &bed.vbd);
    bed.daemon.done(bed.daemon.post(&format!("/vdis/{}/revert", bed.vdi), json!({ "snapshot": third })));
    bed.verb(&bed.vdi, "cbt-disable");
    still(&bed);
    // Its file was replaced by that of another map.
    let maps = fs::read_dir(bed.directory()).unwrap().map(|entry| entry.unwrap().path());
    for map in maps.filter(|path| path.extension().is_some_and(|end| end == "changes")) {
        fs::write(map, b"nothing").unwrap();
    }
    still(&bed);
    // The successor of a process has its bitmaps.
    let vbds = bed.daemon.get("/vbds").1;
    for vbd in vbds.as_array().unwrap().iter().filter(|vbd| vbd["for_nbd_address"] == true) {
        let path = format!("/vbds/{}/upgrade", vbd["uuid"].as_str().unwrap());
        bed.daemon.done(bed.daemon.post(&path, json!({})));
    }
    still(&bed);
    drop((one, other, same, plain));
    wait_until("no client is left", || bed.daemon.get("/vbds").1.as_array().unwrap().len() == 1);
    nothing_leaked(&bed.daemon);
}

#[test]
fn the_vdi_itself_is_held_while_its_changes_are_read() {
    let bed = bed("qcow2", "");
    bed.write(&[0], 1);
    let first = bed.snapshot();
    bed.write(&[1], 2);
    unplug(&bed.daemon, &bed.vbd);
    let (mut reader, context) = client(&bed, &first, &bed.vdi);
    assert!(context.is_some());
    let size = json!({ "size": SIZE * 2 });
    for (verb, body) in [("revert", json!({ "snapshot": first })), ("resize", size), ("snapshot", json!({}))] {
        let refused = bed.daemon.post(&format!("/vdis/{}/{verb}", bed.vdi), body);
        assert!((400..500).contains(&refused.0), "{verb}: {}", refused.1);
    }
    let refused = bed.daemon.post(&format!("{}/plug", bed.vbd), json!({}));
    assert_eq!(refused.0, 409, "{}", refused.1);
    assert_eq!(dirty(&mut reader, SIZE).unwrap(), BTreeSet::from([1]));
    drop(reader);
    let are_gone = || wait_until("no client is left", || bed.daemon.get("/vbds").1.as_array().unwrap().len() == 1);
    are_gone();
    let second = bed.snapshot();
    assert_eq!(offered(&bed, &first, &second), BTreeSet::from([1]));
    assert_eq!(offered(&bed, &second, &bed.vdi), BTreeSet::new());
    are_gone();
    plug(&bed.daemon, &bed.vbd);
    bed.write(&[2], 3);
    // Another program writes to the disk that is not plugged.
    unplug(&bed.daemon, &bed.vbd);
    let write = ["-f", "qcow2", "-c", "write -P 9 1M 64k"];
    assert!(Command::new("qemu-io").args(write).arg(bed.leaf()).status().unwrap().success());
    not_offered(&bed, &first, &bed.vdi, "changed after the map was closed");
    assert_eq!(offered(&bed, &first, &second), BTreeSet::from([1]));
}

#[test]
fn maps_that_do_not_prove_all_changes_are_not_offered() {
    let bed = bed("qcow2", "disk-user-range = \"62000-62999\"");
    bed.write(&[0], 1);
    let first = bed.snapshot();
    bed.write(&[1], 2);
    let begun = bed.map();
    let early = bed.daemon.room().join("early");
    copy_with_attributes(&bed.map_path(&begun), &early);
    unplug(&bed.daemon, &bed.vbd);
    plug(&bed.daemon, &bed.vbd);
    bed.write(&[9], 2);
    let second = bed.snapshot();
    bed.write(&[2], 3);
    let later = bed.map();
    let third = bed.snapshot();
    offered(&bed, &first, &third);
    let whole = |map: &str| fs::read(bed.map_path(map)).unwrap();
    let (of_second, of_third) = (whole(&begun), whole(&later));
    let damaged = |bytes: &[u8]| bytes.iter().map(|byte| byte ^ 0xff).collect::<Vec<u8>>();
    for (map, bytes, why) in [
        (&begun, fs::read(&early).unwrap(), "not complete"),
        (&begun, of_third.clone(), "its file has map"),
        (&begun, damaged(&of_second), "map of changed blocks"),
        (&begun, Vec::new(), "map of changed blocks"),
    ] {
        fs::write(bed.map_path(map), bytes).unwrap();
        not_offered(&bed, &first, &third, why);
        assert_eq!(listed(&bed, &third), set(&[&second]));
        assert_eq!(offered(&bed, &second, &third), BTreeSet::from([2]));
    }
    fs::remove_file(bed.map_path(&begun)).unwrap();
    not_offered(&bed, &first, &third, "its file is missing");
    fs::write(bed.map_path(&begun), &of_second).unwrap();
    fs::write(bed.map_path(&later), &of_second).unwrap();
    assert_eq!(listed(&bed, &third), set(&[]));
    not_offered(&bed, &second, &third, "its file has map");
    fs::write(bed.map_path(&later), &of_third).unwrap();
    assert_eq!(listed(&bed, &third), set(&[&first, &second]));
    // Only those since the damage are proven.
    let more = [(); 3].map(|()| bed.snapshot());
    let last = bed.snapshot();
    assert_eq!(listed(&bed, &last), set(&[&first, &second, &third, &more[0], &more[1], &more[2]]));
    fs::write(bed.map_path(&later), &of_second).unwrap();
    assert_eq!(listed(&bed, &last), set(&[&third, &more[0], &more[1], &more[2]]));
    fs::write(bed.map_path(&later), &of_third).unwrap();
    fs::write(bed.map_path(&begun), &of_third).unwrap();
    assert_eq!(listed(&bed, &last), set(&[&second, &third, &more[0], &more[1], &more[2]]));
    // A gap: the changes in between were not recorded.
    bed.verb(&bed.vdi, "cbt-disable");
    bed.write(&[3], 4);
    bed.verb(&bed.vdi, "cbt-enable");
    bed.write(&[4], 5);
    let fourth = bed.snapshot();
    assert_eq!(listed(&bed, &fourth), set(&[]));
    not_offered(&bed, &third, &fourth, "a map began in between");
}

#[test]
fn a_killed_process_has_its_bitmaps_again() {
    let bed = bed("qcow2", "");
    bed.write(&[0], 1);
    let first = bed.snapshot();
    bed.write(&[1], 2);
    let second = bed.snapshot();
    let (mut reader, context) = client(&bed, &first, &second);
    assert!(context.is_some());
    // Keeps the VBD when the other has lost its process.
    let mut idle = Connection::greeted(Path::new(&socket(&bed))).unwrap();
    let string = |text: &str| [&u32::try_from(text.len()).unwrap().to_be_bytes(), text.as_bytes()].concat();
    idle.option(8, &[]).unwrap();
    idle.option_reply().unwrap();
    idle.option(10, &[string(&second), vec![0, 0, 0, 1], string(&format!("{DIRTY}{first}"))].concat()).unwrap();
    assert_eq!((idle.option_reply().unwrap().0, idle.option_reply().unwrap().0), (4, 1));
    // The VBD through which they have looked at the export first goes.
    let all = || bed.daemon.get("/vbds").1.as_array().unwrap().clone();
    wait_until("one VBD is left", || all().iter().filter(|vbd| vbd["for_nbd_address"] == true).count() == 1);
    let before = all().into_iter().find(|vbd| vbd["for_nbd_address"] == true).unwrap();
    let path = format!("/vbds/{}", before["uuid"].as_str().unwrap());
    kill(&before["pid"].as_u64().unwrap());
    assert!(dirty(&mut reader, SIZE).is_err());
    wait_until("another process serves it", || {
        let now = bed.daemon.get(&path).1;
        now["state"] == "plugged" && now["pid"] != before["pid"]
    });
    let (mut again, context) = client(&bed, &first, &second);
    assert!(context.is_some());
    assert_eq!(dirty(&mut again, SIZE).unwrap(), BTreeSet::from([1]));
    // By that process, which offers it again.
    wait_until("one VBD is left", || all().iter().filter(|vbd| vbd["for_nbd_address"] == true).count() == 1);
    assert_eq!(bed.daemon.get(&path).1["state"], "plugged");
}
