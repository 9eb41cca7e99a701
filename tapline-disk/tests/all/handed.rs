//! A process with passed files and sockets: it uses names that do not exist, opens nothing itself, and closes every
//! descriptor that it need not keep.

use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use fastrand::Rng;
use rustix::fs::{FlockOperation, OFlags, fcntl_getfl, fcntl_lock};
use rustix::process::Signal;
use serde_json::{Value, json};

use crate::tool::Room;
use crate::tool::control::Control;
use crate::tool::guest::Guest;
use crate::tool::handed::{Hand, Handed, NOWHERE};
use crate::tool::nbd::{BLOCK, Nbd, Versions};
use crate::tool::served::Disk;

const FORMATS: [&str; 2] = ["vhd", "qcow2"];
const MIB: u64 = 1 << 20;
const BLOCKS: usize = 96;
const STRIDE: u64 = MIB / 2 + 4096;

fn name(format: &str, file: &str) -> String {
    format!("{format}:{NOWHERE}/{file}")
}

fn create(room: &Room, format: &str, file: &str) {
    Hand::to(&format!("image create {} --size 64M", name(format, file))).file(&Handed::create(room, file)).done();
}

fn read(room: &Room, file: &str) -> Handed {
    Handed::open(room, file, false)
}

fn write(room: &Room, file: &str) -> Handed {
    Handed::open(room, file, true)
}

/// Serves a disk of 64 MiB on passed sockets.
fn serve(room: &Room, format: &str) -> Disk {
    serve_with(room, format, |_| Vec::new())
}

/// Serves it with more files than its image.
fn serve_with(room: &Room, format: &str, more: impl FnOnce(&Room) -> Vec<Handed>) -> Disk {
    create(room, format, "a");
    let words = format!("serve {} --nbd {NOWHERE}/nbd.sock --control {NOWHERE}/control.sock", name(format, "a"));
    let hand = Hand::to(&words).file(&write(room, "a")).files(&more(room));
    hand.listen(room, "nbd", "nbd.sock").listen(room, "control", "control.sock").serve()
}

fn control(room: &Room) -> Control {
    Control::connect(&room.file("control.sock"))
}

fn guest(room: &Room) -> Guest {
    let path = room.file("nbd.sock");
    Guest::start(move || Nbd::connect(&path).unwrap(), Versions::new(BLOCKS, STRIDE), Rng::with_seed(1))
}

fn snapshot(format: &str, to: &str) -> Value {
    json!({ "verb": "snapshot", "to": name(format, to) })
}

/// Returns the files passed for a snapshot of the leaf `old` to the new file `to`.
fn for_snapshot(room: &Room, old: &str, to: &str) -> [Handed; 2] {
    [Handed::create(room, to), read(room, old)]
}

#[test]
fn a_daemon_receives_progress_of_a_long_job() {
    let room = Room::new();
    room.make_raw("raw", 64 * MIB);
    let to = format!("image convert raw:{NOWHERE}/raw {}", name("qcow2", "a"));
    let said = Hand::to(&to).files(&[read(&room, "raw"), Handed::create(&room, "a")]).run();
    assert_eq!(said.code, Some(0), "{said:?}");
    let told: Vec<Value> = said.err.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
    let done: Vec<u64> = told.iter().map(|line| line["done"].as_u64().unwrap()).collect();
    assert!(done.len() > 3 && done.is_sorted() && done.last() == Some(&(64 * MIB)), "{said:?}");
    assert!(told.iter().all(|line| line["doing"] == "converting" && line["len"] == 64 * MIB), "{said:?}");
}

#[test]
fn image_jobs_work_on_passed_files_with_unresolvable_names() {
    for format in FORMATS {
        let room = Room::new();
        room.make_raw("raw", 64 * MIB);
        let image = name(format, "a");
        let to = format!("image convert raw:{NOWHERE}/raw {image} --verify");
        Hand::to(&to).files(&[read(&room, "raw"), Handed::create(&room, "a")]).done();
        let info = Hand::to(&format!("image info {image} --json")).file(&read(&room, "a")).done();
        let info: Value = serde_json::from_str(&info).unwrap();
        assert_eq!((&info[0]["image"], &info[0]["size"]), (&json!(image), &json!(64 * MIB)));
        assert_eq!(info[0]["file_size"], room.read("a").len());
        Hand::to(&format!("image check {image}")).file(&read(&room, "a")).done();
        Hand::to(&format!("image check {image} --repair")).file(&write(&room, "a")).done();
        Hand::to(&format!("image map {image}")).file(&read(&room, "a")).done();
        let child = format!("image create {} --parent {image}", name(format, "b"));
        Hand::to(&child).files(&[Handed::create(&room, "b"), read(&room, "a")]).done();
        let compare = format!("image compare {} raw:{NOWHERE}/raw --parent {image}", name(format, "b"));
        Hand::to(&compare).files(&[read(&room, "a"), read(&room, "b"), read(&room, "raw")]).done();
        let merge = format!("image merge {} --parent {image} --from 0 --into 1", name(format, "b"));
        Hand::to(&merge).files(&[write(&room, "a"), write(&room, "b")]).done();
        Hand::to(&format!("image resize {image} --size 96M")).file(&write(&room, "a")).done();
        room.done(&format!("image check {format}:a"));
        assert_eq!(room.json(&format!("image info {format}:a"))[0]["size"], 96 * MIB);
    }
}

#[test]
fn a_merge_with_passed_files_records_the_parents_public_name() {
    for format in FORMATS {
        let room = Room::new();
        create(&room, format, "a");
        for (new, old) in [("b", "a"), ("c", "b")] {
            let child = format!("image create {} --parent {}", name(format, new), name(format, old));
            Hand::to(&child).files(&[Handed::create(&room, new), read(&room, old)]).done();
        }
        let [a, b, c] = ["a", "b", "c"].map(|file| name(format, file));
        let merge = format!("image merge {c} --parent {b} --parent {a} --from 1 --into 2");
        let all = ["a", "b", "c"].map(|file| write(&room, file));
        Hand::to(&merge).files(&all).done();
        // The repeated request finds that it is already done.
        Hand::to(&merge).files(&all).done();
        // The lock is held as long as any process has the description.
        drop(all);
        let info = Hand::to(&format!("image info {c} --json")).file(&read(&room, "c")).done();
        let info: Value = serde_json::from_str(&info).unwrap();
        assert!(info[0][format]["parent"].to_string().contains('a'), "{info}");
        room.done(&format!("image map {format}:c --parent {format}:a"));
    }
}

#[test]
fn an_existing_file_that_was_not_passed_is_refused() {
    let room = Room::new();
    room.done("image create vhd:a --size 64M");
    let there = format!("vhd:{}", room.file("a").display());
    let cases = [
        (format!("image info {there}"), 4),
        (format!("image check {there} --repair"), 4),
        (format!("image convert {there} raw:{NOWHERE}/new"), 4),
        (format!("image create vhd:{} --size 1M", room.file("new").display()), 4),
        (format!("serve {there} --nbd {}", room.file("nbd.sock").display()), 64),
    ];
    for (words, code) in cases {
        let said = Hand::to(&words).run();
        assert_eq!(said.code, Some(code), "{words}: {said:?}");
        assert!(said.err.contains("was not passed to this process") && said.err.contains("/"), "{words}: {said:?}");
    }
    let words = format!("serve vhd:{NOWHERE}/a --nbd {NOWHERE}/nbd.sock");
    let hand = Hand::to(&words).file(&write(&room, "a")).listen(&room, "nbd", "nbd.sock");
    let said = hand.listen(&room, "control", "control.sock").run();
    assert_eq!(said.code, Some(64), "{said:?}");
    assert!(said.err.contains("control.sock") && said.err.contains("does not mention it"), "{said:?}");
    ["nbd.sock", "control.sock"].iter().for_each(|socket| std::fs::remove_file(room.file(socket)).unwrap());
    let said = Hand::to(&format!("image resize vhd:{NOWHERE}/a --size 96M")).file(&read(&room, "a")).run();
    assert!(said.err.contains("for writing: it was not passed"), "{said:?}");
    assert_eq!(std::fs::read_dir(room.path()).unwrap().count(), 1, "something was made");
}

#[test]
fn options_that_need_paths_are_refused_with_passed_files() {
    let room = Room::new();
    for words in [
        "image convert raw:/a raw:/b --force",
        "image merge vhd:/b --parent vhd:/a --from 0 --into 1 --delete",
        "serve vhd:/a --nbd /s --stats /f",
        "image compact vhd:/a",
    ] {
        let said = room.tapline(&format!("{words} --handed"));
        assert_eq!(said.code, Some(64), "{said:?}");
        assert!(said.err.contains("--handed"), "{said:?}");
    }
    let said = room.tapline("image info vhd:/a --handed");
    assert_eq!(said.code, Some(64), "{said:?}");
    assert!(said.err.contains("standard input is not a SOCK_SEQPACKET socket"), "{said:?}");
    // An image is only created in an empty file.
    room.write("full", b"precious");
    let hand = Hand::to(&format!("image create raw:{NOWHERE}/full --size 1M")).file(&write(&room, "full"));
    assert!(hand.run().err.contains("already exists"));
    assert_eq!(room.read("full"), b"precious");
}

#[test]
fn a_xen_guest_is_served_only_with_passed_descriptors() {
    let room = Room::new();
    room.write("disk", &[0; 4096]);
    let said = Hand::to(&format!("serve raw:{NOWHERE}/disk --xen 7/xvda")).file(&write(&room, "disk")).run();
    assert_eq!(said.code, Some(64), "{said:?}");
    assert!(said.err.contains("Store was not passed to this process"), "{said:?}");
}

#[test]
fn a_passed_description_gets_o_direct_and_a_lock() {
    let room = Room::new();
    create(&room, "vhd", "a");
    for (cache, direct) in [("none", true), ("writeback", false), ("none", true)] {
        let file = write(&room, "a");
        let words = format!("serve vhd:{NOWHERE}/a --nbd {NOWHERE}/nbd.sock --cache {cache}");
        let disk = Hand::to(&words).file(&file).listen(&room, "nbd", "nbd.sock").serve();
        assert_eq!(fcntl_getfl(&file.descriptor).unwrap().contains(OFlags::DIRECT), direct);
        assert!(room.tapline("image check vhd:a").err.contains("in use"));
        assert_eq!(disk.stop().0, Some(0));
        assert!(room.file("nbd.sock").exists(), "the path is somebody else's");
        std::fs::remove_file(room.file("nbd.sock")).unwrap();
    }
}

#[test]
#[ignore = "slow: run by `make test-all`"]
fn snapshot_and_merge_with_passed_files_lose_nothing_under_load() {
    for format in FORMATS {
        let room = Room::new();
        let disk = serve(&room, format);
        let guest = guest(&room);
        let mut control = control(&room);
        for (old, new) in [("a", "b"), ("b", "c"), ("c", "d")] {
            guest.work(100);
            let told = control.done_with(&snapshot(format, new), &for_snapshot(&room, old, new));
            assert_eq!((&told["method"], &told["leaf"]), (&json!("chain"), &json!(name(format, new))));
        }
        guest.work(100);
        // Other processes may read the new parent, but not write it.
        assert_eq!(room.tapline(&format!("image compare {format}:a {format}:a")).code, Some(0));
        assert!(room.tapline(&format!("image check {format}:a --repair")).err.contains("in use"));
        let merge = |from: usize, into: usize| json!({ "verb": "merge", "from": from, "into": into, "follow": true });
        let told = control.done_with(&merge(1, 2), &[write(&room, "c"), write(&room, "b")]);
        assert_eq!(told["layers"], json!([name(format, "d"), name(format, "b"), name(format, "a")]));
        guest.work(100);
        assert_eq!(room.tapline(&format!("image compare {format}:a {format}:a")).code, Some(0), "lowered again");
        let told = control.done_with(&merge(0, 2), &[write(&room, "b"), write(&room, "a")]);
        assert_eq!(told["layers"], json!([name(format, "a")]));
        guest.work(100);
        let mut versions = guest.stop();
        let (code, said) = disk.stop();
        assert_eq!(code, Some(0), "{said}");
        assert!(!said.contains("stays"), "{said}");
        room.done(&format!("image check {format}:a"));
        let _disk = Disk::serve(&room, &format!("{format}:a --nbd again.sock"));
        versions.check(&mut Nbd::connect(&room.file("again.sock")).unwrap());
    }
}

#[test]
fn a_disk_is_cloned_reverted_and_grown_with_handed_files() {
    for format in FORMATS {
        let room = Room::new();
        let disk = serve(&room, format);
        let mut nbd = Nbd::connect(&room.file("nbd.sock")).unwrap();
        let mut control = control(&room);
        nbd.write(0, &[1; BLOCK]).unwrap();
        control.done_with(&snapshot(format, "b"), &for_snapshot(&room, "a", "b"));
        nbd.write(0, &[2; BLOCK]).unwrap();
        let clone = json!({ "verb": "clone", "of": 1, "to": name(format, "c") });
        control.done_with(&clone, &[Handed::create(&room, "c")]);
        let made = std::fs::File::options().write(true).open(room.file("c")).unwrap();
        fcntl_lock(&made, FlockOperation::NonBlockingLockExclusive).unwrap();
        drop(made);
        room.done(&format!("image map {format}:c --parent {format}:a"));
        drop(nbd);
        let revert = json!({ "verb": "revert", "to": 1, "leaf": name(format, "d") });
        let file = Handed::create(&room, "d");
        control.send_with(&revert, &[Handed { write: false, ..file }]);
        let line = control.outcome();
        assert!(line["error"]["message"].as_str().unwrap().contains("open for writing"), "{line}");
        let line = loop {
            // The server may not have noticed yet that its client has disconnected.
            control.send_with(&revert, &[write(&room, "d")]);
            let line = control.outcome();
            if line["error"]["kind"] != "connected" {
                break line;
            }
        };
        assert_eq!(line["ok"]["layers"], json!([name(format, "d"), name(format, "a")]), "{line}");
        assert_eq!(control.done(&json!({ "verb": "resize", "size": 96 * MIB }))["size"], 96 * MIB);
        let mut nbd = Nbd::connect(&room.file("nbd.sock")).unwrap();
        assert_eq!((nbd.size, nbd.read(0, BLOCK).unwrap()), (96 * MIB, vec![1; BLOCK]));
        drop(nbd);
        assert_eq!(disk.stop().0, Some(0));
    }
}

/// Mounts a file system that can share blocks.
struct Mounted<'a>(&'a Room);

impl Mounted<'_> {
    fn xfs(room: &Room) -> Mounted<'_> {
        std::fs::File::create(room.file("storage")).unwrap().set_len(400 * MIB).unwrap();
        room.tool("mkfs.xfs", "-q -m reflink=1 storage");
        std::fs::create_dir(room.file("mounted")).unwrap();
        room.tool("mount", "-o loop storage mounted");
        Mounted(room)
    }
}

impl Drop for Mounted<'_> {
    fn drop(&mut self) {
        assert!(self.0.run("umount", "-l mounted").code == Some(0) || std::thread::panicking());
    }
}

#[test]
fn a_raw_disk_is_copied_by_reflink_into_a_passed_file() {
    let room = Room::new();
    let _mounted = Mounted::xfs(&room);
    create(&room, "raw", "mounted/a");
    let words = format!("serve raw:{NOWHERE}/mounted/a --nbd {NOWHERE}/nbd.sock --control {NOWHERE}/control.sock");
    let hand = Hand::to(&words).file(&write(&room, "mounted/a"));
    let disk = hand.listen(&room, "nbd", "nbd.sock").listen(&room, "control", "control.sock").serve();
    let guest = guest(&room);
    guest.work(100);
    let mut control = control(&room);
    let told = control.done_with(&snapshot("raw", "mounted/b"), &[Handed::create(&room, "mounted/b")]);
    assert_eq!((&told["method"], &told["leaf"]), (&json!("reflink"), &json!(name("raw", "mounted/a"))));
    let copy = room.read("mounted/b");
    guest.work(100);
    let mut versions = guest.stop();
    versions.check(&mut Nbd::connect(&room.file("nbd.sock")).unwrap());
    assert!(u64::try_from(copy.len()).unwrap() == 64 * MIB && room.read("mounted/b") == copy);
    // On another file system there is no reflink, and the passed file is left alone.
    control.send_with(&snapshot("raw", "elsewhere"), &[Handed::create(&room, "elsewhere")]);
    assert_eq!(control.outcome()["error"]["kind"], "unsupported");
    assert!(room.read("elsewhere").is_empty());
    assert_eq!(disk.stop().0, Some(0));
}

#[test]
fn a_verb_without_its_files_is_refused_and_changes_nothing() {
    let room = Room::new();
    let disk = serve(&room, "qcow2");
    let mut control = control(&room);
    let before = control.done(&json!({ "verb": "layers" }));
    let refused = |control: &mut Control, request: &Value, files: &[Handed]| {
        control.send_with(request, files);
        let line = control.outcome();
        (line["error"]["kind"].to_string(), line["error"]["message"].to_string())
    };
    let ask = snapshot("qcow2", "b");
    let (kind, why) = refused(&mut control, &ask, &[]);
    assert!(kind.contains("invalid") && why.contains("/nowhere/a for reading"), "{why}");
    let (_, why) = refused(&mut control, &ask, &[read(&room, "a")]);
    assert!(why.contains("/nowhere/b for writing"), "{why}");
    room.write("b", b"precious");
    let (kind, _) = refused(&mut control, &ask, &[read(&room, "a"), write(&room, "b")]);
    assert!(kind.contains("exists"), "{kind}");
    assert_eq!(room.read("b"), b"precious");
    let merge = json!({ "verb": "merge", "from": 0, "into": 1, "delete": true });
    let (kind, why) = refused(&mut control, &merge, &[]);
    assert!(kind.contains("unsupported") && why.contains("cannot remove files"), "{why}");
    let (_, why) = refused(&mut control, &json!({ "verb": "layers" }), &[read(&room, "a")]);
    assert!(why.contains("does not take any"), "{why}");
    control.done_with(&snapshot("qcow2", "c"), &for_snapshot(&room, "a", "c"));
    let merge = json!({ "verb": "merge", "from": 0, "into": 1 });
    let (_, why) = refused(&mut control, &merge, &[]);
    assert!(why.contains("/nowhere/a for writing"), "{why}");
    // The redo log of another file with the name of a layer would be wrong.
    room.write("other", &room.read("a"));
    let other = Handed { path: format!("{NOWHERE}/a"), ..write(&room, "other") };
    let (_, why) = refused(&mut control, &merge, &[other]);
    assert!(why.contains("another file"), "{why}");
    control.done_with(&json!({ "verb": "merge", "from": 0, "into": 1, "follow": true }), &[write(&room, "a")]);
    assert_eq!(control.done(&json!({ "verb": "layers" }))["layers"][0]["path"], before["layers"][0]["path"]);
    assert_eq!(disk.stop().0, Some(0));
}

fn descriptors(disk: &Disk) -> usize {
    std::fs::read_dir(format!("/proc/{}/fd", disk.child.id())).unwrap().count()
}

/// Checks that a process has no more descriptors than this, at once or soon: a new connection may be noticed before the
/// end of an old one.
fn has_no_more_than(disk: &Disk, count: usize) {
    let begun = Instant::now();
    while descriptors(disk) > count {
        assert!(begun.elapsed() < Duration::from_secs(60), "{} descriptors, not {count}", descriptors(disk));
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn unclaimed_descriptors_are_refused_and_closed() {
    for handed in [true, false] {
        let room = Room::new();
        let disk = if handed {
            serve(&room, "vhd")
        } else {
            room.done("image create vhd:a --size 64M");
            Disk::serve(&room, "vhd:a --nbd nbd.sock --control control.sock")
        };
        let mut control = control(&room);
        control.done(&json!({ "verb": "layers" }));
        // Connections that checked whether it listens may still be among them.
        let before = descriptors(&disk);
        let many: Vec<OwnedFd> = (0..100).map(|_| read(&room, "a").descriptor).collect();
        let many: Vec<&OwnedFd> = many.iter().collect();
        let files = r#""files":[{"path":"/x","write":false},{"path":"/y","write":false}]"#;
        let lines = [
            (r#"{"version":1,"verb":"layers"}"#.to_owned(), 1),
            (format!(r#"{{"version":1,"verb":"snapshot","to":"vhd:/n",{files}}}"#), 1),
            (format!(r#"{{"version":1,"verb":"snapshot","to":"vhd:/n",{files}}}"#), 3),
            (format!(r#"{{"version":1,"verb":"layers",{files}}}"#), 2),
            (r#"{"version":1,"verb":"layers"}"#.to_owned(), 100),
            ("nonsense".to_owned(), 5),
            (r#"{"version":1,"verb":"snapshot","to":"vhd:/n","files":[{"path":"/x"}]}"#.to_owned(), 1),
        ];
        for (line, count) in lines.iter().cycle().take(1000) {
            control.send_with_descriptors(&format!("{line}\n"), &many[..*count]);
            let answer = control.outcome();
            assert!(answer["error"]["kind"].is_string(), "{line}: {answer}");
        }
        has_no_more_than(&disk, before);
        // A line that never ends, continually with descriptors.
        for _ in 0..100 {
            control.send_with_descriptors("x", &many[..50]);
        }
        drop(control);
        Control::connect(&room.file("control.sock")).done(&json!({ "verb": "layers" }));
        has_no_more_than(&disk, before);
        assert_eq!(disk.stop().0, Some(0));
    }
}

#[test]
fn two_lines_in_one_packet_get_their_own_files() {
    let room = Room::new();
    let disk = serve(&room, "vhd");
    let mut control = control(&room);
    let [new, old] = for_snapshot(&room, "a", "b");
    let files = json!([new.described(), old.described()]);
    let ask = json!({ "version": 1, "id": 2, "verb": "snapshot", "to": name("vhd", "b"), "files": files });
    let first = json!({ "version": 1, "id": 1, "verb": "layers" });
    control.send_with_descriptors(&format!("{first}\n{ask}\n"), &[&new.descriptor, &old.descriptor]);
    let answers = [control.outcome(), control.outcome()];
    assert!(answers.iter().all(|answer| answer.get("ok").is_some()), "{answers:?}");
    assert_eq!(disk.stop().0, Some(0));
}

/// The process is killed at an arbitrary moment of a snapshot: the file shows which chain is valid, and together with
/// the redo logs it contains everything that was completed.
#[test]
fn a_kill_during_a_snapshot_leaves_no_image_or_the_leaf() {
    for (n, format) in FORMATS.iter().cycle().take(12).enumerate() {
        let room = Room::new();
        let disk = serve_with(&room, format, |room| vec![Handed::redo_log(room, "a")]);
        let guest = guest(&room);
        let mut control = control(&room);
        guest.work(50);
        let [new, old] = for_snapshot(&room, "a", "b");
        let log = Handed::redo_log(&room, "b");
        control.send_with(&snapshot(format, "b"), &[new, old, log]);
        guest.work(n * 3);
        disk.signal(Signal::KILL);
        drop(disk);
        let mut versions = guest.wait();
        let leaf = room.tapline(&format!("image info {format}:b")).code == Some(0);
        let chain = if leaf { format!("{format}:b --parent {format}:a") } else { format!("{format}:a") };
        let _disk = Disk::serve(&room, &format!("{chain} --nbd again.sock"));
        versions.check(&mut Nbd::connect(&room.file("again.sock")).unwrap());
    }
}

/// A former layer may be merged and removed while its disk keeps running. Another image may have received its inode
/// number and its log since, and a running process has that log mapped: it must not be ended here.
#[test]
fn a_log_that_now_belongs_to_another_image_is_not_touched() {
    for own in [true, false] {
        let room = Room::new();
        let disk = serve_with(&room, "qcow2", |room| vec![Handed::redo_log(room, "a")]);
        let log = std::fs::File::from(Handed::redo_log(&room, "a").descriptor);
        let len = log.metadata().unwrap().len();
        assert!(len > 0);
        if !own {
            std::os::unix::fs::FileExt::write_all_at(&log, &[7; 64], 256).unwrap();
        }
        assert_eq!(disk.stop().0, Some(0));
        assert_eq!(log.metadata().unwrap().len(), if own { 0 } else { len }, "own: {own}");
    }
}

/// A job that continues after its daemon has died keeps the next daemon from using the image.
#[test]
fn a_job_tied_to_its_daemon_exits_with_it() {
    use std::io::Read;
    use std::os::unix::fs::FileExt;
    let room = Room::new();
    // Its map is longer than a pipe's buffer, and is not read to the end: the job blocks.
    let file = std::fs::File::create(room.file("raw")).unwrap();
    file.set_len(64 * MIB).unwrap();
    (0..4096).for_each(|at| file.write_all_at(&[1; 4096], at * 16384).unwrap());
    let words = format!("image map raw:{NOWHERE}/raw --json --confine --end-with-input");
    let (mut command, daemon) = Hand::to(&words).file(&read(&room, "raw")).apart();
    let mut job = command.stdout(std::process::Stdio::piped()).spawn().unwrap();
    let mut said = job.stdout.take().unwrap();
    said.read_exact(&mut [0; 100]).unwrap();
    std::thread::sleep(Duration::from_millis(200));
    assert!(job.try_wait().unwrap().is_none(), "it has ended though its daemon lives");
    drop((command, daemon));
    let begun = Instant::now();
    while job.try_wait().unwrap().is_none() {
        if begun.elapsed() > Duration::from_secs(60) {
            job.kill().unwrap();
            panic!("it goes on without its daemon");
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    assert_eq!(job.wait().unwrap().code(), Some(4));
}
