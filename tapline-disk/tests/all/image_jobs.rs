//! The image commands that change chains: their results, what they refuse, and the effect of a kill at any point.

use std::fs;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant, SystemTime};

use crate::tool::control::Control;
use crate::tool::served::Disk;
use crate::tool::{Room, TAPLINE, noise};

const MIB: u64 = 1 << 20;
const AN_HOUR: Duration = Duration::from_secs(3600);
/// Formats of a chain of three, leaf first.
const CHAINS: [[&str; 3]; 4] =
    [["vhd", "vhd", "vhd"], ["qcow2", "qcow2", "qcow2"], ["qcow2", "vhd", "raw"], ["vhd", "qcow2", "vhd"]];

/// Creates three layers, leaf first, each with data that the others lack; their contents are in `before.raw`.
fn three_layers(room: &Room, formats: [&str; 3]) -> [String; 3] {
    let [leaf, middle, base] = [0, 1, 2].map(|n| format!("{}:{n}.{}", formats[n], formats[n]));
    room.make_raw("content.raw", 64 * MIB);
    room.done(&format!("image convert raw:content.raw {base}"));
    room.done(&format!("image create {middle} --parent {base}"));
    room.guest(
        &format!("{middle} --parent {base}"),
        &["write -P 1 3M 70k", "write -P 2 10M 3M", "write -z -u 8M 1M", "write -P 4 63M 512"],
    );
    room.done(&format!("image create {leaf} --parent {middle} --parent {base}"));
    room.guest(
        &format!("{leaf} --parent {middle} --parent {base}"),
        &["write -P 3 10M 64k", "write -P 5 40M 2M", "write -z -u 12M 1M", "write -P 6 33000448 3k"],
    );
    room.done(&format!("image convert {leaf} raw:before.raw --parent {middle} --parent {base}"));
    [leaf, middle, base]
}

fn on(layers: &[String]) -> String {
    let (leaf, rest) = layers.split_first().unwrap();
    format!("{leaf}{}", parents(rest))
}

fn parents(layers: &[String]) -> String {
    layers.iter().map(|parent| format!(" --parent {parent}")).collect()
}

/// Checks that the chain has the contents of the disk, and every layer is sound.
fn shows_the_same(room: &Room, layers: &[String]) {
    shows(room, layers, &[0]);
}

/// Checks the same after a kill, which may leave leaked clusters in a qcow2 image (exit code 3 of qemu-img).
fn still_shows_the_same(room: &Room, layers: &[String]) {
    shows(room, layers, &[0, 3]);
}

fn shows(room: &Room, layers: &[String], fine: &[i32]) {
    let (leaf, parents) = layers.split_first().unwrap();
    let parents: String = parents.iter().map(|parent| format!(" --parent {parent}")).collect();
    let said = room.tapline(&format!("image compare {leaf} raw:before.raw{parents}"));
    assert_eq!(said.code, Some(0), "{layers:?}: {said:?}");
    for layer in layers {
        // A writer that was killed has not closed its image.
        room.sound(layer);
    }
    for qcow2 in layers.iter().filter_map(|layer| layer.strip_prefix("qcow2:")) {
        // Without its parents, whose names QEMU would resolve in its own way.
        let alone = r#"{"driver":"qcow2","file":{"driver":"file","filename":"FILE"},"backing":null}"#;
        let said = room.run("qemu-img", &format!("check -U json:{}", alone.replace("FILE", qcow2)));
        assert!(said.code.is_some_and(|code| fine.contains(&code)), "{qcow2}: {said:?}");
    }
}

fn file_of(image: &str) -> &str {
    image.split_once(':').unwrap().1
}

/// Starts a job and kills it once `file` takes `space` bytes more, or less for a negative number, than before.
fn kill_when(room: &Room, words: &str, file: &str, grown: i64) {
    let space = || i64::try_from(room.space(file)).unwrap();
    let before = space();
    let mut job = Command::new(TAPLINE);
    let job = job.args(words.split_whitespace()).current_dir(room.path()).stderr(Stdio::null()).stdout(Stdio::null());
    let mut job = job.spawn().unwrap();
    while if grown > 0 { space() < before + grown } else { space() > before + grown } {
        assert_eq!(job.try_wait().unwrap(), None, "'{words}' ended before it could be killed");
        std::thread::yield_now();
    }
    job.kill().unwrap();
    job.wait().unwrap();
}

/// Creates a disk of stored bytes only, and an empty child of it.
fn full_base(room: &Room, len: u64, format: &str) -> [String; 2] {
    room.write("before.raw", &noise(1, usize::try_from(len).unwrap()));
    let [child, base] = [format!("{format}:child.{format}"), format!("{format}:base.{format}")];
    room.done(&format!("image convert raw:before.raw {base}"));
    room.done(&format!("image create {child} --parent {base}"));
    [child, base]
}

#[test]
#[ignore = "slow: run by `make test-all`"]
fn a_merge_moves_layers_down_without_changing_contents() {
    for formats in CHAINS {
        for (from, into, left) in [(0, 1, vec![1, 2]), (1, 2, vec![0, 2]), (0, 2, vec![2])] {
            let room = Room::new();
            let layers = three_layers(&room, formats);
            room.done(&format!("image merge {} --from {from} --into {into} --delete", on(&layers)));
            let left: Vec<String> = left.iter().map(|&n: &usize| layers[n].clone()).collect();
            shows_the_same(&room, &left);
            let gone = layers.iter().filter(|layer| !left.contains(layer));
            assert!(gone.into_iter().all(|layer| !room.file(file_of(layer)).exists()), "{formats:?} {from} {into}");
        }
    }
}

#[test]
#[ignore = "slow: run by `make test-all`"]
fn a_killed_merge_continues_where_it_stopped() {
    for format in ["vhd", "qcow2"] {
        let room = Room::new();
        let [child, base] = full_base(&room, 128 * MIB, format);
        room.done(&format!("image create {format}:empty --size 128M"));
        room.done(&format!("image rebase {child} --parent {base} --onto {format}:empty"));
        let layers = [child.clone(), format!("{format}:empty")];
        let words = format!("image merge {} --from 0 --into 1", on(&layers));
        for _ in 0..3 {
            kill_when(&room, &words, "empty", 16 << 20);
            still_shows_the_same(&room, &layers);
        }
        room.done(&words);
        still_shows_the_same(&room, &layers[1..]);
        assert!(room.space(file_of(&child)) < 2 * MIB, "the merged layer still takes {}", room.space(file_of(&child)));
    }
}

/// An empty leaf was grown, and its merge was killed before the layer below was resized: it contributes nothing but its
/// size.
#[test]
fn an_empty_leaf_is_not_merged_before_the_target_is_as_large() {
    for format in ["vhd", "qcow2"] {
        let room = Room::new();
        let [leaf, base] = [format!("{format}:leaf"), format!("{format}:base")];
        room.done(&format!("image create {base} --size 16M"));
        room.done(&format!("image create {leaf} --parent {base}"));
        room.done(&format!("image resize {leaf} --parent {base} --size 20M"));
        let before = room.read("base");
        let merge = format!("image merge {leaf} --parent {base} --from 0 --into 1");
        room.done(&merge);
        assert_eq!(room.json(&format!("{merge} --is-done"))["done"], true, "{format}");
        let after = room.read("base");
        room.write("base", &before);
        assert_eq!(room.json(&format!("{merge} --is-done"))["done"], false, "{format}");
        room.write("base", &after);
        assert_eq!(room.json(&format!("{merge} --is-done"))["done"], true, "{format}");
    }
}

/// The layers above the merged ones are written to as well, if only in their parent links.
#[test]
fn a_killed_merge_deep_in_a_chain_leaves_it_readable() {
    for format in ["vhd", "qcow2"] {
        let room = Room::new();
        let layers = [0, 1, 2, 3].map(|n| format!("{format}:{n}.{format}"));
        let mut made: Vec<String> = Vec::new();
        for layer in layers.iter().rev() {
            match made.first() {
                None => room.done(&format!("image create {layer} --size 64M")),
                Some(parent) => room.done(&format!("image create {layer} --parent {parent}")),
            };
            made.insert(0, layer.clone());
            if layer == &layers[2] {
                room.guest(&on(&made), &["write -P 1 0 32M"]);
            }
            // So long ago that the modification time differs in whole seconds.
            room.tool("touch", &format!("-d @1000000000 {}", file_of(layer)));
        }
        room.done(&format!("image convert {} raw:before.raw{}", layers[0], parents(&layers[1..])));
        // The kernel kills a process that writes beyond this limit, which the copy in the target does.
        let merge = format!("image merge {} --from 2 --into 3", on(&layers));
        let limited = room.run_words("sh", &["-c", &format!("ulimit -c 0; ulimit -f 8192; exec {TAPLINE} {merge}")]);
        assert_ne!(limited.code, Some(0), "{limited:?}");
        still_shows_the_same(&room, &layers);
        room.done(&merge);
        still_shows_the_same(&room, &layers.iter().filter(|layer| !layer.contains(":2.")).cloned().collect::<Vec<_>>());
    }
}

/// Creates an empty image on three layers, the chain of which has the contents of `before.raw`.
fn four_layers(room: &Room, formats: [&str; 3]) -> [String; 4] {
    let [leaf, middle, base] = three_layers(room, formats);
    let top = format!("{}:top", formats[0]);
    room.done(&format!("image create {top}{}", parents(&[leaf.clone(), middle.clone(), base.clone()])));
    [top, leaf, middle, base]
}

#[test]
#[ignore = "slow: run by `make test-all`"]
fn a_merge_killed_at_any_moment_completes_when_repeated() {
    for formats in CHAINS {
        let room = Room::new();
        let layers = four_layers(&room, formats);
        let merge = format!("image merge {} --from 1 --into 3 --delete", on(&layers));
        let keep = |from: &str, to: &str| {
            fs::create_dir_all(room.file(to)).unwrap();
            let files: String = layers.iter().map(|layer| format!("{from}/{} ", file_of(layer))).collect();
            room.tool("cp", &format!("-p --sparse=always {files} {to}"));
        };
        keep(".", "kept");
        let begun = Instant::now();
        room.done(&merge);
        let whole = begun.elapsed();
        for moment in 0..=10 {
            keep("kept", ".");
            let mut job = Command::new(TAPLINE);
            let job = job.args(merge.split_whitespace()).current_dir(room.path()).stderr(Stdio::null());
            let mut job = job.stdout(Stdio::null()).spawn().unwrap();
            std::thread::sleep(whole * moment / 10);
            job.kill().unwrap();
            job.wait().unwrap();
            room.done(&merge);
            still_shows_the_same(&room, &[layers[0].clone(), layers[3].clone()]);
            assert!(!layers[1..3].iter().any(|layer| room.file(file_of(layer)).exists()), "{moment}");
        }
    }
}

/// The moments after the layer above was linked to the target, one by one.
#[test]
#[ignore = "slow: run by `make test-all`"]
fn a_merge_killed_at_its_end_is_recognized_and_its_files_removed() {
    for formats in CHAINS {
        for removed in 0..=2 {
            let room = Room::new();
            let layers = four_layers(&room, formats);
            let merge = format!("image merge {} --from 1 --into 3", on(&layers));
            room.done(&merge);
            layers[1..3].iter().take(removed).for_each(|layer| fs::remove_file(room.file(file_of(layer))).unwrap());
            let told = room.json(&merge);
            assert_eq!((&told["copied"], &told["deleted"]), (&0.into(), &false.into()));
            assert_eq!(room.file(file_of(&layers[2])).exists(), removed < 2);
            room.done(&format!("{merge} --delete"));
            assert!(!layers[1..3].iter().any(|layer| room.file(file_of(layer)).exists()), "{formats:?} {removed}");
            shows_the_same(&room, &[layers[0].clone(), layers[3].clone()]);
        }
    }
}

/// The image has no child that would show it; the remaining layers below it do.
#[test]
#[ignore = "slow: run by `make test-all`"]
fn a_merge_of_the_image_killed_during_removal_completes_when_repeated() {
    for formats in CHAINS {
        for nth in 1.. {
            let room = Room::new();
            let layers = four_layers(&room, formats);
            let merge = format!("image merge {} --from 0 --into 3 --delete", on(&layers));
            // An image that never existed was not merged: the layer below it contains data.
            let never = room.tapline(&merge.replace(&layers[0], &format!("{}:never", formats[0])));
            assert!(never.code == Some(4) && never.err.contains("check its name"), "{never:?}");
            if !killed_at(&room, &merge, "unlink", nth) {
                assert!(nth > 3, "only {} files were removed", nth - 1);
                break;
            }
            let left = |room: &Room| layers.iter().filter(|layer| room.file(file_of(layer)).exists()).count();
            room.done(&merge);
            assert_eq!(left(&room), 1);
            still_shows_the_same(&room, &layers[3..]);
            let again = room.tapline(&merge);
            assert!(again.code == Some(4) && again.err.contains("does not exist"), "{again:?}");
        }
    }
}

#[test]
#[ignore = "slow: run by `make test-all`"]
fn files_not_left_by_a_merge_are_not_removed() {
    for formats in CHAINS {
        let room = Room::new();
        let layers = three_layers(&room, formats);
        let merge = format!("image merge {} --from 1 --into 2 --delete", on(&layers));
        room.done(&merge);
        // Another disk's process uses the target, and has not written to it yet.
        let clone = &layers[1];
        room.done(&format!("image create {clone} --parent {}", layers[2]));
        let said = room.tapline(&merge);
        assert_eq!(said.code, Some(4), "{said:?}");
        assert!(
            said.err.contains("records its parent's time or size") && said.err.contains("remove it by hand"),
            "{said:?}"
        );
        room.guest(&format!("{clone} --parent {}", layers[2]), &["write -P 9 0 64k"]);
        let said = room.tapline(&merge);
        assert_eq!(said.code, Some(4), "{said:?}");
        assert!(room.file(file_of(clone)).exists());
        shows_the_same(&room, &[layers[0].clone(), layers[2].clone()]);
    }
}

#[test]
#[ignore = "slow: run by `make test-all`"]
fn a_larger_image_is_merged_into_smaller_layers_even_if_killed() {
    for formats in CHAINS {
        let room = Room::new();
        let layers = three_layers(&room, formats);
        room.done(&format!("image resize {} --size 96M", on(&layers)));
        room.done(&format!("image resize raw:before.raw --size {}", 96 * MIB));
        let merge = format!("image merge {} --from 0 --into 2", on(&layers));
        // Less than the size of the base: the kernel kills a process that writes to its end.
        let limit = fs::metadata(room.file(file_of(&layers[2]))).unwrap().len() / 512 - 1;
        let limited = format!("ulimit -c 0; ulimit -f {limit}; exec {TAPLINE} {merge}");
        assert_ne!(room.run_words("sh", &["-c", &limited]).code, Some(0));
        still_shows_the_same(&room, &layers);
        room.done(&merge);
        still_shows_the_same(&room, &layers[2..]);
        // The merged files contain no data, so the command can be repeated even if it had completed.
        still_shows_the_same(&room, &layers);
    }
}

#[test]
fn layers_that_hide_the_end_of_a_parent_are_not_merged_into_it() {
    let room = Room::new();
    room.done("image create qcow2:base --size 64M");
    room.done("image create vhd:leaf --parent qcow2:base");
    room.done("image resize qcow2:base --size 96M");
    let before = room.read("leaf");
    let said = room.tapline("image merge vhd:leaf --parent qcow2:base --from 0 --into 1 --accept-changed-parent");
    assert_eq!(said.code, Some(4), "{said:?}");
    assert!(said.err.contains("qcow2:base") && said.err.contains("vhd:leaf"), "{said:?}");
    assert_eq!(room.read("leaf"), before);
}

/// Creates a child of 16 MiB, whose parent of 48 MiB has data beyond the child's end: as if the parent was enlarged
/// later, or the child was created by another program.
fn longer_base(room: &Room, child: &str, base: &str) {
    room.done(&format!("image create {base} --size 16M"));
    let modified = fs::metadata(room.file("b")).unwrap().modified().unwrap();
    match child.starts_with("vhd") {
        true => room.done(&format!("image create {child} --parent {base}")),
        false => room.tool("qemu-img", &format!("create -f qcow2 -b b -F {} c 16M", base.replace(":b", ""))),
    };
    room.done(&format!("image resize {base} --size 48M"));
    room.guest(base, &["write -P 5 0 48M"]);
    fs::File::options().write(true).open(room.file("b")).unwrap().set_modified(modified).unwrap();
}

const BASES: [[&str; 2]; 4] = [["vhd:c", "raw:b"], ["qcow2:c", "raw:b"], ["vhd:c", "vhd:b"], ["qcow2:c", "qcow2:b"]];

/// Checks that it is refused, and follows the advice: the child then has no parent.
fn is_refused_and_flattened_as_advised(room: &Room, words: &str) {
    let said = room.tapline(words);
    assert_eq!(said.code, Some(4), "{said:?}");
    assert!(said.err.contains("would appear in the disk"), "{said:?}");
    let advised = said.err.split("tapline image flatten ").nth(1).and_then(|rest| rest.lines().next());
    room.done(&format!("image flatten {}", advised.unwrap_or_else(|| panic!("{said:?}"))));
}

/// Checks the same for a growth: everything new reads as zeroes.
fn is_refused_and_grows_as_advised(room: &Room, words: &str, child: &str, base: &str) {
    is_refused_and_flattened_as_advised(room, words);
    room.done(&format!("image resize {child} --size 64M"));
    room.guest(child, &["read -P 5 0 16M", "read -P 0 16M 48M"]);
    room.guest(base, &["read -P 5 0 48M"]);
}

#[test]
fn resizing_a_layer_shorter_than_its_base_exposes_nothing() {
    for [child, base] in BASES {
        let room = Room::new();
        longer_base(&room, child, base);
        let on = format!("{child} --parent {base}");
        let said = room.tapline(&format!("image resize {child} --size 64M"));
        assert!(said.code == Some(64) && said.err.contains("--parent"), "its parent must be given: {said:?}");
        is_refused_and_grows_as_advised(&room, &format!("image resize {on} --size 64M"), child, base);
    }
}

#[test]
fn merging_into_a_layer_shorter_than_its_base_exposes_nothing() {
    for [child, base] in BASES {
        let room = Room::new();
        longer_base(&room, child, base);
        let top = child.replace(":c", ":top");
        room.done(&format!("image create {top} --size 64M --parent {child} --parent {base}"));
        let on = format!("{top} --parent {child} --parent {base}");
        room.guest(&on, &["read -P 5 0 16M", "read -P 0 16M 48M"]);
        let merge = format!("image merge {on} --from 0 --into 1");
        is_refused_and_flattened_as_advised(&room, &merge);
        room.done(&merge.replace(&format!(" --parent {base}"), ""));
        room.guest(child, &["read -P 5 0 16M", "read -P 0 16M 48M"]);
    }
}

#[test]
#[ignore = "slow: run by `make test-all`"]
fn the_advice_of_a_rebase_onto_a_longer_parent_exposes_nothing() {
    for [child, base] in BASES {
        let room = Room::new();
        longer_base(&room, child, base);
        let new = base.replace(":b", ":n");
        room.done(&format!("image create {new} --size 64M"));
        room.guest(&new, &["write -P 9 0 64M"]);
        let rebase = format!("image rebase {child} --parent {base} --onto {new}");
        let said = room.tapline(&rebase);
        let advised = said.err.split("tapline image resize ").nth(1).and_then(|rest| rest.lines().next());
        let resize = format!("image resize {}", advised.unwrap_or_else(|| panic!("{said:?}")));
        is_refused_and_grows_as_advised(&room, &resize, child, base);
        room.done(&format!("image rebase {child} --onto {new}"));
        room.guest(&format!("{child} --parent {new}"), &["read -P 5 0 16M", "read -P 0 16M 48M"]);
    }
}

/// A served disk is refused for the same reason and with the same message.
#[test]
fn a_served_layer_shorter_than_its_base_exposes_nothing() {
    for [child, base] in BASES {
        let room = Room::new();
        longer_base(&room, child, base);
        let disk = Disk::serve(&room, &format!("{child} --parent {base} --nbd nbd.sock --control control.sock"));
        let resize = serde_json::json!({ "verb": "resize", "size": 64 * MIB });
        let (_, said) = Control::connect(&room.file("control.sock")).refused(&resize);
        assert!(said.contains("would appear in the disk"), "{said}");
        disk.stop();
    }
}

#[test]
fn a_merge_without_space_stops_and_continues_later() {
    for format in ["vhd", "qcow2"] {
        let room = Room::new();
        let [child, base] = full_base(&room, 32 * MIB, format);
        room.done(&format!("image create {format}:empty --size 32M"));
        room.done(&format!("image rebase {child} --parent {base} --onto {format}:empty"));
        let layers = [child, format!("{format}:empty")];
        let words = format!("image merge {} --from 0 --into 1", on(&layers));
        // The shell's limit is in blocks of 512 bytes: the child has its space already, the target gets half of it.
        let limited = format!("ulimit -f 32768; exec {TAPLINE} {words}");
        let output = Command::new("sh").args(["-c", &limited]).current_dir(room.path()).output().unwrap();
        let err = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(4), "{err}");
        assert!(err.contains("no space") && err.contains("empty"), "{err}");
        shows_the_same(&room, &layers);
        room.done(&words);
        shows_the_same(&room, &layers[1..]);
    }
}

#[test]
fn a_merge_into_a_parent_in_use_is_refused() {
    let room = Room::new();
    let layers = three_layers(&room, ["qcow2", "qcow2", "qcow2"]);
    room.done(&format!("image create qcow2:other.q --parent {}", layers[2]));
    let mut server = Command::new(TAPLINE);
    let words = format!("serve qcow2:other.q --parent {} --nbd ./other.sock", layers[2]);
    let server = server.args(words.split_whitespace()).current_dir(room.path()).stderr(Stdio::piped());
    let mut server = server.spawn().unwrap();
    while !room.file("other.sock").exists() {
        assert_eq!(server.try_wait().unwrap(), None, "the other child is not served");
        std::thread::yield_now();
    }
    let said = room.tapline(&format!("image merge {} --from 0 --into 2", on(&layers)));
    // It is not killed: the kernel releases the locks of a killed process's io_uring with a delay.
    let pid = rustix::process::Pid::from_child(&server);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    assert!(server.wait().unwrap().success());
    assert_eq!(said.code, Some(4), "{said:?}");
    assert!(said.err.contains(file_of(&layers[2])) && said.err.contains("in use"), "{said:?}");
    shows_the_same(&room, &layers);
}

#[test]
fn merging_nonexistent_layers_is_refused() {
    let room = Room::new();
    let layers = three_layers(&room, ["vhd", "vhd", "vhd"]);
    for (from, into) in [(0, 0), (1, 0), (0, 3), (2, 3)] {
        let said = room.tapline(&format!("image merge {} --from {from} --into {into}", on(&layers)));
        assert_eq!(said.code, Some(64), "{from} into {into}: {said:?}");
    }
}

#[test]
fn flattening_an_image_without_a_parent_copies_nothing() {
    let room = Room::new();
    room.done("image create qcow2:a --size 8M");
    let said = room.tapline("image flatten qcow2:a");
    assert_eq!((said.code, said.out.as_str()), (Some(0), "qcow2:a has no parent; nothing was copied\n"), "{said:?}");
}

#[test]
#[ignore = "slow: run by `make test-all`"]
fn flattening_makes_an_image_independent() {
    for formats in CHAINS {
        let room = Room::new();
        let layers = three_layers(&room, formats);
        let parents = [&layers[1], &layers[2]].map(|layer| room.read(file_of(layer)));
        room.done(&format!("image flatten {}", on(&layers)));
        shows_the_same(&room, &layers[..1]);
        assert!([&layers[1], &layers[2]].map(|layer| room.read(file_of(layer))) == parents, "a parent was written to");
    }
}

#[test]
#[ignore = "slow: run by `make test-all`"]
fn a_killed_flatten_continues() {
    for format in ["vhd", "qcow2"] {
        let room = Room::new();
        let layers = full_base(&room, 128 * MIB, format);
        for _ in 0..2 {
            kill_when(&room, &format!("image flatten {}", on(&layers)), file_of(&layers[0]), 16 << 20);
            still_shows_the_same(&room, &layers);
        }
        room.done(&format!("image flatten {}", on(&layers)));
        still_shows_the_same(&room, &layers[..1]);
    }
}

#[test]
#[ignore = "slow: run by `make test-all`"]
fn a_killed_rebase_continues() {
    for format in ["vhd", "qcow2"] {
        let room = Room::new();
        let layers = full_base(&room, 128 * MIB, format);
        room.done(&format!("image create {format}:empty --size 128M"));
        let words = format!("image rebase {} --onto {format}:empty", on(&layers));
        kill_when(&room, &words, file_of(&layers[0]), 16 << 20);
        still_shows_the_same(&room, &layers);
        room.done(&words);
        still_shows_the_same(&room, &[layers[0].clone(), format!("{format}:empty")]);
    }
}

/// Runs a job until just before the `nth` system call `call`, where it is killed; returns whether it got there.
fn killed_at(room: &Room, words: &str, call: &str, nth: u32) -> bool {
    let inject = format!("-e trace={call} -e inject={call}:signal=KILL:when={nth}");
    let said = room.run("strace", &format!("-f -qq -o /dev/null {inject} {TAPLINE} {words}"));
    assert!(matches!(said.code, Some(0) | None), "{words}: {said:?}");
    said.code.is_none()
}

/// Kills a job on the middle one of three layers at any point, and repeats it; `new` is the final parent of the middle
/// layer.
fn is_done_again(formats: [&str; 3], words: &str, new: &[String], kill: impl Fn(&Room, &str) -> bool) -> bool {
    let room = Room::new();
    let layers = three_layers(&room, formats);
    room.make_raw("other.raw", 32 * MIB);
    let middle = room.file(file_of(&layers[1]));
    let time = || fs::metadata(&middle).unwrap().modified().unwrap();
    // A child records whole seconds: a job within a single second would prove nothing.
    let long_ago = time() - AN_HOUR;
    fs::File::open(&middle).unwrap().set_modified(long_ago).unwrap();
    room.done(&format!("image rebase {} --unsafe --onto {} --onto {}", layers[0], layers[1], layers[2]));
    let words = words.replace("MIDDLE", &on(&layers[1..]));
    let killed = kill(&room, &words);
    let shows = if killed { still_shows_the_same } else { shows_the_same };
    let moved = [&layers[..2], new].concat();
    let stays = room.tapline(&format!("image compare {} raw:before.raw{}", layers[0], parents(&layers[1..])));
    shows(&room, if stays.code == Some(0) { &layers } else { &moved });
    room.done(&words);
    shows(&room, &moved);
    assert_eq!(time(), long_ago);
    let left = fs::read_dir(room.path()).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    assert_eq!(left.filter(|name| name.contains("unfinished")).count(), 0);
    killed
}

/// Scope: before every call by which the job makes something durable, including its disk's flushes, renames or removes
/// a file, or sets a time; and at one in 32 of its calls to the ring, which performs the writes in between.
fn is_done_again_wherever_it_is_killed(formats: [&str; 3], words: &str, new: &[String]) {
    for (call, step, at_least) in [
        ("fsync", 1, 4),
        ("fdatasync", 1, 1),
        ("rename", 1, 1),
        ("utimensat", 1, 1),
        ("unlink", 1, 1),
        ("io_uring_enter", 32, 1),
    ] {
        let mut nth = 1;
        while is_done_again(formats, words, new, |room, words| killed_at(room, words, call, nth)) {
            nth += step;
        }
        assert!(nth > at_least, "{call} was made only {} times", nth - 1);
    }
}

#[test]
#[ignore = "slow: run by `make test-all`"]
fn flattening_in_the_middle_of_a_chain_can_be_killed_at_each_durable_step() {
    for format in ["vhd", "qcow2"] {
        is_done_again_wherever_it_is_killed([format; 3], "image flatten MIDDLE", &[]);
    }
}

#[test]
#[ignore = "slow: run by `make test-all`"]
fn rebasing_in_the_middle_of_a_chain_can_be_killed_at_each_durable_step() {
    for formats in [["qcow2", "vhd", "raw"], ["vhd", "qcow2", "vhd"]] {
        let new = "raw:other.raw".to_owned();
        is_done_again_wherever_it_is_killed(formats, &format!("image rebase MIDDLE --onto {new}"), &[new]);
    }
}

/// The last record of a killed command may be only in the page cache, and the old parents are removed when the repeated
/// command has succeeded.
#[test]
fn a_repeated_rebase_makes_the_parent_that_it_finds_recorded_durable() {
    for (format, words) in [("vhd", "rebase IMAGE --onto raw:other"), ("qcow2", "flatten IMAGE")] {
        let room = Room::new();
        let words = format!("image {words}").replace("IMAGE", &on(&full_base(&room, MIB, format)));
        room.done("image create raw:other --size 1M");
        room.done(&words);
        assert!(killed_at(&room, &words, "fdatasync", 1), "'{words}', repeated, syncs nothing");
        room.done(&words);
    }
}

/// Data of the new parent is not copied, and the old ones may be removed afterwards. The program that has written the
/// new parent need not have made it durable.
#[test]
fn an_image_is_not_based_on_a_parent_that_cannot_be_made_durable() {
    for how in ["", " --unsafe"] {
        let room = Room::new();
        let layers = full_base(&room, MIB, "qcow2");
        room.write("copy.raw", &room.read("before.raw"));
        let old = if how.is_empty() { on(&layers) } else { layers[0].clone() };
        let words = format!("image rebase {old}{how} --onto raw:copy.raw");
        let parent = room.file("copy.raw");
        let inject = format!("-P {} -e trace=fsync -e inject=fsync:error=EIO", parent.display());
        let said = room.run("strace", &format!("-f -qq -o /dev/null {inject} {TAPLINE} {words}"));
        assert!(said.code == Some(4) && said.err.contains("make raw:copy.raw durable"), "{words}: {said:?}");
        shows_the_same(&room, &layers);
        room.done(&words);
        shows_the_same(&room, &[layers[0].clone(), "raw:copy.raw".into()]);
    }
}

#[test]
#[ignore = "slow: run by `make test-all`"]
fn children_open_with_a_note_after_a_killed_job() {
    for format in ["vhd", "qcow2"] {
        let room = Room::new();
        let [middle, base] = full_base(&room, 128 * MIB, format);
        let layers = [format!("{format}:leaf"), middle.clone(), base.clone()];
        let long_ago = SystemTime::now() - AN_HOUR;
        fs::File::open(room.file(file_of(&middle))).unwrap().set_modified(long_ago).unwrap();
        room.done(&format!("image create {} --parent {middle} --parent {base}", layers[0]));
        let words = format!("image flatten {}", on(&layers[1..]));
        kill_when(&room, &words, file_of(&middle), 16 << 20);
        let said = room.tapline(&format!("image map {}", on(&layers)));
        assert!(said.code == Some(0) && said.err.contains(&format!("tapline {words}")), "{said:?}");
        shows_the_same(&room, &layers);
        room.done(&words);
        shows_the_same(&room, &layers[..2]);
    }
}

#[test]
fn a_guests_write_removes_the_marker_of_an_image() {
    let room = Room::new();
    let [middle, base] = full_base(&room, 128 * MIB, "qcow2");
    let layers = ["qcow2:leaf".to_owned(), middle.clone(), base.clone()];
    room.done(&format!("image create {} --parent {middle} --parent {base}", layers[0]));
    let long_ago = SystemTime::now() - AN_HOUR;
    fs::File::open(room.file(file_of(&middle))).unwrap().set_modified(long_ago).unwrap();
    room.done(&format!("image rebase {} --unsafe --onto {middle} --onto {base}", layers[0]));
    kill_when(&room, &format!("image flatten {}", on(&layers[1..])), file_of(&middle), 16 << 20);
    room.guest(&on(&layers[1..]), &["write -P 7 1M 64k"]);
    assert!(!room.file("child.qcow2.unfinished").exists());
    let said = room.tapline(&format!("image map {}", on(&layers)));
    assert!(said.code == Some(4) && said.err.contains("was last changed"), "{said:?}");
}

#[test]
#[ignore = "slow: run by `make test-all`"]
fn an_image_keeps_its_contents_on_other_parents() {
    for formats in CHAINS {
        let room = Room::new();
        let layers = three_layers(&room, formats);
        let mut other = room.read("content.raw");
        other[20 << 20..21 << 20].fill(9);
        other[9 << 20..(9 << 20) + 70_000].fill(0);
        room.write("other.raw", &other);
        for onto in ["raw:other.raw", &layers[2]] {
            room.done(&format!("image rebase {} --onto {onto}", on(&layers)));
            shows_the_same(&room, &[layers[0].clone(), onto.to_owned()]);
            room.done(&format!("image rebase {} --parent {onto} --onto {} --onto {}", layers[0], layers[1], layers[2]));
            shows_the_same(&room, &layers);
        }
    }
}

#[test]
fn a_parent_that_was_moved_is_recorded_without_reading_it() {
    for format in ["vhd", "qcow2"] {
        let room = Room::new();
        let layers = three_layers(&room, [format; 3]);
        fs::create_dir(room.file("else")).unwrap();
        fs::rename(room.file(file_of(&layers[1])), room.file("else/moved")).unwrap();
        let moved = format!("{format}:else/moved");
        room.done(&format!("image rebase {} --onto {moved} --onto {} --unsafe", layers[0], layers[2]));
        let said = room.tapline(&format!("image map {}", layers[0]));
        assert!(said.err.contains(&format!("--parent {moved}")), "{said:?}");
        shows_the_same(&room, &[layers[0].clone(), moved, layers[2].clone()]);
    }
}

#[test]
fn no_image_is_rebased_onto_itself() {
    let room = Room::new();
    let layers = three_layers(&room, ["vhd", "vhd", "vhd"]);
    let said = room.tapline(&format!("image rebase {} --onto {}", on(&layers), layers[0]));
    assert_eq!(said.code, Some(64), "{said:?}");
    assert!(said.err.contains("no image is its own parent"), "{said:?}");
}

#[test]
fn snapshots_and_clones_read_as_their_image() {
    let room = Room::new();
    let layers = three_layers(&room, ["qcow2", "vhd", "raw"]);
    for (verb, new) in [("snapshot", "qcow2:s.q"), ("clone", "vhd:c.vhd"), ("clone", "qcow2:c.q")] {
        let made = room.json(&format!("image {verb} {} --to {new}", on(&layers)));
        assert_eq!(made["how"], "child");
        let mut chain = vec![new.to_owned()];
        chain.extend(layers.iter().cloned());
        shows_the_same(&room, &chain);
        let said = room.tapline(&format!("image {verb} {} --to {new}", on(&layers)));
        assert!(said.code == Some(4) && said.err.contains("exists"), "{said:?}");
    }
}

#[test]
fn a_raw_snapshot_shares_blocks_or_fails() {
    let room = Room::new();
    room.make_raw("a.raw", 16 * MIB);
    let said = room.tapline("image clone raw:a.raw --to raw:b.raw");
    match said.code {
        Some(0) => assert!(said.out.contains("reflink") && room.read("a.raw") == room.read("b.raw"), "{said:?}"),
        _ => assert!(said.err.contains("share") && said.err.contains("--to qcow2:"), "{said:?}"),
    }
    assert!(!room.file("b.raw.tapline-new").exists());
    assert_eq!(room.file("b.raw").exists(), said.code == Some(0));
}

#[test]
fn a_disk_grows_and_never_shrinks() {
    for image in ["raw:a.raw", "vhd:a.vhd", "qcow2:a.q"] {
        let room = Room::new();
        room.done(&format!("image create {image} --size 32M"));
        room.guest(image, &["write -P 1 31M 1M"]);
        let grown = room.json(&format!("image resize {image} --size 5G"));
        assert_eq!((grown["before"].as_u64(), grown["after"].as_u64()), (Some(32 * MIB), Some(5 << 30)));
        room.guest(image, &["read -P 1 31M 1M", "read -P 0 32M 1M", "write -P 2 5119M 1M", "read -P 2 5119M 1M"]);
        room.sound_and_closed(image);
        assert_eq!(room.json(&format!("image info {image}"))[0]["size"].as_u64(), Some(5 << 30));
        let said = room.tapline(&format!("image resize {image} --size 1G"));
        assert_eq!(said.code, Some(4), "{said:?}");
        assert!(said.err.contains("cannot be shrunk"), "{said:?}");
    }
}

#[test]
fn compacting_a_chain_keeps_contents_and_identity() {
    for format in ["vhd", "qcow2"] {
        let room = Room::new();
        let layers = three_layers(&room, [format; 3]);
        let uuid = |room: &Room, image: &str| room.json(&format!("image info {image}"))[0][format]["uuid"].clone();
        let before = layers.each_ref().map(|layer| uuid(&room, layer));
        for layer in &layers {
            let done = room.json(&format!("image compact {layer}"));
            // A few tables may end up at another offset.
            assert!(done["after"].as_u64().unwrap() <= done["before"].as_u64().unwrap() + MIB / 8, "{done}");
        }
        assert_eq!(layers.each_ref().map(|layer| uuid(&room, layer)), before);
        shows_the_same(&room, &layers);
    }
}

#[test]
fn compacting_closes_the_gaps_in_a_file() {
    for image in ["vhd:a.vhd", "qcow2:a.qcow2"] {
        let room = Room::new();
        room.done(&format!("image create {image} --size 64M"));
        room.guest(image, &["write -P 1 0 32M", "write -P 2 40M 2M"]);
        room.guest(image, &["discard 4M 24M"]);
        let len = || fs::metadata(room.file(file_of(image))).unwrap().len();
        let before = len();
        room.done(&format!("image compact {image}"));
        assert!(len() + 20 * MIB < before, "{image}: {} of {before} are left", len());
        let reads = ["read -P 1 0 4M", "read -P 0 4M 24M", "read -P 1 28M 4M", "read -P 2 40M 2M", "read -P 0 42M 22M"];
        room.guest(image, &reads);
    }
}

#[test]
#[ignore = "slow: run by `make test-all`"]
fn compacting_that_was_killed_leaves_the_old_image() {
    for format in ["vhd", "qcow2"] {
        let room = Room::new();
        let layers = full_base(&room, 128 * MIB, format);
        let base = file_of(&layers[1]);
        let new = format!("{base}.tapline-new");
        let mut job = Command::new(TAPLINE);
        let job = job.args(["image", "compact", &layers[1]]).current_dir(room.path()).spawn();
        let mut job = job.unwrap();
        while fs::metadata(room.file(&new)).map_or(0, |found| found.len()) < 16 * MIB {
            assert_eq!(job.try_wait().unwrap(), None, "it ended before it could be killed");
            std::thread::yield_now();
        }
        job.kill().unwrap();
        job.wait().unwrap();
        still_shows_the_same(&room, &layers);
        room.done(&format!("image compact {}", layers[1]));
        assert!(!room.file(&new).exists());
        still_shows_the_same(&room, &layers);
    }
}

#[test]
fn a_merged_image_is_deleted_if_requested() {
    let room = Room::new();
    let layers = three_layers(&room, ["qcow2", "vhd", "raw"]);
    let said = room.done(&format!("image merge {} --from 0 --into 1 --delete", on(&layers)));
    assert!(said.starts_with(&format!("merged {} into {}, ", layers[0], layers[1])), "{said}");
    assert!(!room.file(file_of(&layers[0])).exists());
    shows_the_same(&room, &layers[1..]);
    let said = room.tapline(&format!("image merge {} --from 0 --into 1", layers[2]));
    assert_eq!(said.code, Some(64), "{said:?}");
}
