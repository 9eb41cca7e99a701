//! `image replay`: handmade recordings, on images with known contents.

use std::io::{BufRead, BufReader, Read, Write};
use std::process::Stdio;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

use crate::tool::{Room, TAPLINE};

const MIB: u64 = 1 << 20;

/// Creates a recording of requests: times in milliseconds, kinds, offsets and lengths.
fn recording(room: &Room, name: &str, requests: &[(u64, &str, u64, u64)]) {
    let head = json!({ "tapline_recording": 1, "requests": requests.len(), "lost": 0 });
    let lines = requests.iter().map(|(at, operation, offset, size)| {
        json!({
            "at_ns": at * 1_000_000, "operation": operation, "offset": offset, "size": size, "took_ns": 5000,
            "outcome": "done",
        })
    });
    let text: String = std::iter::once(head).chain(lines).map(|line| format!("{line}\n")).collect();
    room.write(name, text.as_bytes());
}

/// Creates a recording with `count` requests of each kind in turn, a millisecond apart.
fn all_kinds(room: &Room, name: &str, count: u64) {
    let kinds = [("read", 4096), ("write", 8192), ("flush", 0), ("discard", 65536), ("write-zeroes", 65536)];
    let one = |n: u64| {
        let (operation, size) = kinds[usize::try_from(n % 5).unwrap()];
        (n, operation, if size == 0 { 0 } else { n * 65536 }, size)
    };
    let all: Vec<_> = (0..5 * count).map(one).collect();
    recording(room, name, &all);
}

fn counts(told: &Value) -> Vec<(&str, u64, u64)> {
    let groups = told["groups"].as_array().unwrap();
    let number = |group: &Value, field: &str| group[field].as_u64().unwrap();
    groups
        .iter()
        .map(|group| (group["operation"].as_str().unwrap(), number(group, "size"), number(group, "count")))
        .collect()
}

#[test]
fn without_write_a_replay_leaves_the_image_unchanged() {
    let room = Room::new();
    room.make_raw("a", 16 * MIB);
    all_kinds(&room, "recorded", 10);
    let before = room.read("a");
    for speed in ["1", "4", "max"] {
        let told = room.json(&format!("image replay raw:a recorded --speed {speed}"));
        assert_eq!(counts(&told), [("read", 4096, 10), ("flush", 0, 10)], "{told}");
        assert_eq!(told["left_out"], json!({ "writes": 30, "failed": 0, "lost": 0 }));
        assert_eq!((&told["speed"], &told["stopped_early"]), (&json!(speed), &json!(false)));
        for group in told["groups"].as_array().unwrap() {
            assert_eq!(group["recorded"], json!({ "mean_ns": 5000.0, "p50_ns": 5000, "p99_ns": 5000 }));
            assert!(group["replayed"]["p50_ns"].as_u64() <= group["replayed"]["p99_ns"].as_u64(), "{group}");
            assert!(group["replayed"]["mean_ns"].as_f64().unwrap() > 0.0, "{group}");
        }
        // The last replayed request comes 47 ms after the first, and none is issued before its time.
        let seconds = told["seconds"].as_f64().unwrap();
        match speed {
            "max" => assert!(told["lateness"].is_null(), "{told}"),
            times => assert!(seconds >= 0.047 / times.parse::<f64>().unwrap() - 0.001, "{told}"),
        }
    }
    assert!(room.read("a") == before, "the image was written to");
    let said = room.done("image replay raw:a recorded --speed max");
    assert!(said.contains("left out: 30 requests that change the disk; --write replays them"), "{said}");
}

#[test]
fn a_replay_at_full_speed_keeps_the_recorded_queue_depth() {
    let room = Room::new();
    room.make_raw("a", 16 * MIB);
    // The second and third of each three arrive while those before them are in flight.
    let three = |n: u64| json!({ "at_ns": n / 3 * 1000 + n % 3, "took_ns": 500, "offset": n * 4096 });
    let one = |n: u64| json!({ "at_ns": n * 1000, "took_ns": 500, "offset": n * 4096 });
    for (depth, request) in [(3, &three as &dyn Fn(u64) -> Value), (1, &one)] {
        let mut text = format!("{}\n", json!({ "tapline_recording": 1, "requests": 300, "lost": 2 }));
        for n in 0..300 {
            let mut line = request(n);
            line["operation"] = json!("read");
            line["size"] = json!(4096);
            line["outcome"] = json!("done");
            text += &format!("{line}\n");
        }
        room.write("recorded", text.as_bytes());
        let told = room.json("image replay raw:a recorded --speed max");
        assert!(told["in_flight_max"].as_u64().unwrap() <= depth, "{told}");
        assert_eq!((&told["requests"], &told["left_out"]["lost"]), (&json!(300), &json!(2)));
    }
}

#[test]
fn with_write_everything_is_replayed_at_its_place_and_durable() {
    for image in ["raw:a", "qcow2:a", "vhd:a"] {
        let room = Room::new();
        room.done(&format!("image create {image} --size 16M"));
        all_kinds(&room, "recorded", 10);
        let told = room.json(&format!("image replay {image} recorded --speed max --write --yes"));
        let all = [("read", 4096), ("write", 8192), ("flush", 0), ("discard", 65536), ("write-zeroes", 65536)];
        assert_eq!(counts(&told), all.map(|(operation, size)| (operation, size, 10)), "{told}");
        assert_eq!(told["left_out"]["writes"], 0);
        room.done(&format!("image convert {image} raw:copy"));
        let copy = room.read("copy");
        for (block, bytes) in copy.chunks(65536).enumerate() {
            let written = if block < 50 && block % 5 == 1 { 8192 } else { 0 };
            let is_right = bytes.iter().enumerate().all(|(at, byte)| *byte == if at < written { 0x54 } else { 0 });
            assert!(is_right, "{image}: block {block}");
        }
    }
}

#[test]
fn a_replay_that_writes_is_confirmed_first() {
    let room = Room::new();
    room.make_raw("a", MIB);
    recording(&room, "recorded", &[(0, "write", 0, 512)]);
    let before = room.read("a");
    let said = room.tapline("image replay raw:a recorded --write");
    assert_eq!(said.code, Some(64), "{said:?}");
    assert!(said.err.contains("overwrite raw:a with what was recorded: not confirmed"), "{said:?}");
    assert!(said.err.contains("add --yes") && room.read("a") == before, "{said:?}");
    let run = |words: &str, typed: &str| {
        let mut script = room.command("script");
        let line = format!("'{TAPLINE}' image replay raw:a recorded {words}");
        script.args(["--quiet", "--return", "--command", &line, "/dev/null"]);
        let mut script = script.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        // Held open: the end of the input would be the end of the terminal.
        let mut stdin = script.stdin.take().unwrap();
        stdin.write_all(typed.as_bytes()).unwrap();
        let output = script.wait_with_output().unwrap();
        drop(stdin);
        (output.status.code(), String::from_utf8(output.stdout).unwrap())
    };
    let (code, said) = run("--write", "n\n");
    assert!(said.contains("overwrite raw:a with what was recorded: really? [y/N] "), "{said}");
    assert!(code == Some(4) && said.contains("not confirmed: nothing was done"), "{said}");
    assert!(room.read("a") == before, "it is overwritten");
    let (code, said) = run("--write --yes", "");
    assert!(code == Some(0) && !said.contains("really?"), "{said}");
    assert!(room.read("a")[..512] == [0x54; 512] && room.read("a")[512..] == before[512..]);
    room.write("a", &before);
    assert_eq!(run("--write", "y\n").0, Some(0));
    assert!(room.read("a") != before);
}

#[test]
fn a_recording_that_does_not_fit_the_disk_is_refused() {
    let room = Room::new();
    room.done("image create raw:a --size 1M");
    room.done("image create raw:b --size 4M");
    recording(&room, "recorded", &[(0, "write", 0, 512), (1, "read", 2 * MIB, 4096)]);
    let said = room.tapline("image replay raw:a recorded --write --yes");
    assert_eq!(said.code, Some(64), "{said:?}");
    assert!(said.err.contains("it has requests up to 2101248 bytes, and the disk has 1048576 bytes"), "{said:?}");
    assert!(said.err.contains("use an image of 3 MiB or more"), "{said:?}");
    assert!(room.read("a").iter().all(|byte| *byte == 0));
    for (size, why) in [(100, "is not aligned to the disk's blocks of 512 bytes"), (65 * MIB, "up to")] {
        recording(&room, "odd", &[(0, "read", 0, size)]);
        let said = room.tapline("image replay raw:b odd");
        assert!(said.code == Some(64) && said.err.contains(why), "{said:?}");
    }
    recording(&room, "far", &[(0, "read", u64::MAX - 4095, 4095)]);
    let said = room.tapline("image replay raw:b far");
    assert!(said.code == Some(64) && said.err.contains("up to 18446744073709551615 bytes"), "{said:?}");
    recording(&room, "writes", &[(0, "write", 0, 512)]);
    let said = room.tapline("image replay raw:b writes");
    assert!(said.code == Some(64) && said.err.contains("only requests that change the disk"), "{said:?}");
    recording(&room, "none", &[]);
    let said = room.tapline("image replay raw:b none");
    assert!(said.code == Some(64) && said.err.contains("no requests that were done"), "{said:?}");
    for speed in ["0", "-1", "1.5", "fast", "70000"] {
        let said = room.tapline(&format!("image replay raw:b recorded --speed={speed}"));
        assert!(said.code == Some(64) && said.err.contains("1 or more, or max"), "{said:?}");
    }
}

#[test]
fn damaged_truncated_and_foreign_recordings_are_refused() {
    let room = Room::new();
    room.done("image create raw:a --size 1M");
    recording(&room, "good", &[(0, "read", 0, 512), (1, "read", 512, 512)]);
    let good = String::from_utf8(room.read("good")).unwrap();
    let refused = |text: &str, why: &str| {
        room.write("bad", text.as_bytes());
        let said = room.tapline("image replay raw:a bad");
        assert_eq!(said.code, Some(4), "{said:?}");
        assert!(said.err.contains("cannot replay bad: ") && said.err.contains(why), "'{why}' is not in {said:?}");
    };
    refused(&good[..good.len() / 2], "it is cut off: it has 0 of 2 requests");
    refused(&good[..good.len() - 3], "it is cut off: it has 1 of 2 requests");
    refused(&good.replace("recording\":1", "recording\":7"), "it is of version 7, and this program reads version 1");
    refused(&good.replace("512", "x"), "it is damaged: line 2 is not a request");
    refused(
        &good[good.find('\n').unwrap() + 1..],
        "it is not a recording: `tapline trace DISK --record FILE` makes one",
    );
    refused("", "it is not a recording");
    let said = room.tapline("image replay raw:a nowhere");
    assert!(said.code == Some(4) && said.err.contains("cannot replay nowhere: No such file"), "{said:?}");
}

#[test]
fn a_replay_that_is_ended_by_a_signal_reports_what_it_has_done() {
    let room = Room::new();
    room.done("image create raw:a --size 1M");
    // The last request would be issued in an hour.
    recording(&room, "recorded", &[(0, "read", 0, 512), (3_600_000, "read", 512, 512)]);
    let mut command = room.command(TAPLINE);
    command.args(["image", "replay", "raw:a", "recorded", "--json"]).stdout(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let pid = Pid::from_raw(i32::try_from(child.id()).unwrap()).unwrap();
    // A signal would kill it until it handles signals, which it does when it holds the image's lock.
    while !is_open(child.id(), &room.file("a")) {
        assert!(child.try_wait().unwrap().is_none(), "it has ended");
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    kill_process(pid, Signal::TERM).unwrap();
    let mut out = String::new();
    child.stdout.take().unwrap().read_to_string(&mut out).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(0), "{out}");
    let told: Value = serde_json::from_str(&out).unwrap();
    assert_eq!(told["stopped_early"], true);
    assert!(told["requests"].as_u64() <= Some(1), "{told}");
}

fn is_open(pid: u32, file: &std::path::Path) -> bool {
    let file = std::fs::canonicalize(file).unwrap();
    let fds = std::fs::read_dir(format!("/proc/{pid}/fd"));
    fds.into_iter().flatten().flatten().any(|fd| std::fs::read_link(fd.path()).is_ok_and(|path| path == file))
}

/// Returns the first line of a replay that does not end by itself.
fn first_line(room: &Room, words: &str) -> String {
    let mut child = room.command(TAPLINE);
    let child = child.args(words.split_whitespace()).stdin(Stdio::null()).stderr(Stdio::piped());
    let mut child = child.spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stderr.take().unwrap()).read_line(&mut line).unwrap();
    child.kill().unwrap();
    child.wait().unwrap();
    line
}

#[test]
fn a_replay_that_waits_for_long_says_for_what() {
    let room = Room::new();
    room.make_raw("a", 16 * MIB);
    recording(&room, "recorded", &[(0, "read", 0, 4096), (3_780_000, "read", 4096, 4096)]);
    let line = first_line(&room, "image replay raw:a recorded");
    assert!(line.contains("request 2 of 2 is due in 1:0"), "{line}");
    room.tool("mkfifo", "pipe");
    let line = first_line(&room, "image replay raw:a pipe");
    assert!(line.contains("pipe is a pipe: waiting for a recording"), "{line}");
}
