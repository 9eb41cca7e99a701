//! Tests of `tapline disk` with a disk served by `tapline-disk`.

use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Output};
use std::time::Duration;

use serde_json::Value;

/// A served disk with the chain `vhd:a`, in its own directory.
struct Served {
    room: tempfile::TempDir,
    process: Child,
}

fn tapline() -> Command {
    Command::new(env!("CARGO_BIN_EXE_tapline"))
}

impl Served {
    fn new() -> Served {
        crate::build_disk_program();
        let room = tempfile::tempdir().unwrap();
        let made = tapline().args(["image", "create", "vhd:a", "--size", "64M"]).current_dir(room.path()).output();
        assert!(made.as_ref().unwrap().status.success(), "{made:?}");
        let serve = ["serve", "vhd:a", "--cache", "writeback", "--nbd", "nbd.sock", "--control", "control.sock"];
        let process = tapline().args(serve).current_dir(room.path()).spawn().unwrap();
        let served = Served { room, process };
        while UnixStream::connect(served.room.path().join("control.sock")).is_err() {
            std::thread::sleep(Duration::from_millis(10));
        }
        // When the disk replies here, its other sockets exist, too.
        served.done("disk control.sock stats");
        served
    }

    fn run(&self, words: &str) -> Output {
        tapline().args(words.split_whitespace()).current_dir(self.room.path()).output().unwrap()
    }

    fn done(&self, words: &str) -> String {
        let output = self.run(words);
        assert!(output.status.success(), "{words}: {output:?}");
        String::from_utf8(output.stdout).unwrap()
    }

    /// Runs a command that must be refused; returns the exit code and the message.
    fn refused(&self, words: &str) -> (Option<i32>, String) {
        let output = self.run(words);
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    }

    fn stop(&mut self) {
        assert!(Command::new("kill").arg(self.process.id().to_string()).status().unwrap().success());
        assert!(self.process.wait().unwrap().success());
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        // It may have been stopped already.
        self.process.kill().unwrap_or_default();
        self.process.wait().map(drop).unwrap_or_default();
    }
}

#[test]
fn each_verb_is_sent_and_its_answer_shown() {
    let mut disk = Served::new();
    assert!(disk.done("disk control.sock snapshot --to vhd:b").contains("is now the leaf"));
    assert!(disk.done("disk control.sock layers").contains("read-only"));
    assert!(disk.done("disk control.sock clone --of 1 --to vhd:c").contains("--parent"));
    for _ in 0..2 {
        // The second time there is nothing to do.
        let merge = "disk control.sock merge --from 0 --into 1 --delete --expect vhd:b vhd:a";
        assert!(disk.done(merge).contains("merged layers"));
    }
    assert!(disk.done("disk control.sock merge-status").contains("merged layers"));
    assert!(disk.done("disk control.sock resize --size 128M").contains("128 MiB"));
    assert!(disk.done("disk control.sock stats").contains("reads"));
    assert!(disk.done("disk control.sock space").contains("no requests are waiting"));
    let raw: Value = serde_json::from_str(&disk.done("disk control.sock version --json")).unwrap();
    assert_eq!(raw["ok"]["version"], 1);
    let said = disk.done("disk control.sock upgrade --pause-max 60000");
    assert!(said.contains("now serves the disk"), "{said}");
    assert!(disk.process.wait().unwrap().success());
    assert!(disk.done("disk control.sock layers").contains("128 MiB disk"));
    let pid = said.split_whitespace().nth(1).unwrap();
    assert!(Command::new("kill").arg(pid).status().unwrap().success());
    while disk.room.path().join("control.sock").exists() {
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn what_a_disk_refuses_is_shown_with_its_exit_code() {
    let mut disk = Served::new();
    assert_eq!(disk.refused("disk control.sock revert --to 0 --leaf vhd:d").0, Some(64));
    disk.done("image create vhd:taken --size 1M");
    let (code, said) = disk.refused("disk control.sock snapshot --to vhd:taken");
    assert!(code == Some(7) && said.contains("already exists"), "{said}");
    // With --json the refusal is the last line on stdout; the exit code is the same.
    let output = disk.run("disk control.sock snapshot --to vhd:taken --json");
    let line: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&line["error"]["kind"], output.status.code()), (&Value::from("exists"), Some(7)));
    assert!(output.stderr.is_empty(), "{output:?}");
    // Well-formed but impossible for this disk: the result is the same whether it is served or not.
    assert_eq!(disk.refused("disk control.sock resize --size 1M").0, Some(4));
    disk.stop();
    assert_eq!(disk.refused("image resize vhd:a --size 1M").0, Some(4));
    let (code, said) = disk.refused("disk control.sock layers");
    assert!(code == Some(4) && said.contains("serve --control"), "{said}");
}

/// Replays the reads of a new recording on another image; their number and length must be those of the trace.
fn replays_what_was_recorded(served: &Served, traced: &Value) {
    let room = |words: &str| {
        let output = tapline().args(words.split_whitespace()).current_dir(served.room.path()).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap()
    };
    room("image create qcow2:other --size 16M");
    for words in ["image replay qcow2:other requests --speed max --json", "image replay qcow2:other requests --json"] {
        let told: Value = serde_json::from_str(&room(words)).unwrap();
        let (replayed, reads) = (&told["groups"][0], &traced["groups"][0]);
        assert_eq!(told["groups"].as_array().unwrap().len(), 1, "{told}");
        assert_eq!((&replayed["operation"], &replayed["size"]), (&Value::from("read"), &Value::from(512)));
        assert_eq!(replayed["count"], reads["count"]);
        assert_eq!((&replayed["recorded"]["p99_ns"], &told["left_out"]["lost"]), (&reads["p99_ns"], &Value::from(0)));
    }
    assert!(room("help image replay").contains("Usage: tapline image replay"));
}

#[test]
fn a_trace_has_the_requests_of_its_time_and_their_stages_add_up() {
    let mut served = Served::new();
    let mut client = testkit::nbd::Client::connect(&served.room.path().join("nbd.sock")).unwrap();
    let words = "--json trace control.sock --seconds 2 --svg where.svg --chrome trace.json --record requests";
    let mut trace = tapline();
    trace.args(words.split_whitespace()).current_dir(served.room.path()).stdout(std::process::Stdio::piped());
    let mut trace = trace.spawn().unwrap();
    // The beginning of the trace is unknown, so requests are sent until it has ended.
    while trace.try_wait().unwrap().is_none() {
        client.write(1 << 20, &[7; 4096]).unwrap();
        client.read(0, 512).unwrap();
        std::thread::sleep(Duration::from_millis(5));
    }
    let output = trace.wait_with_output().unwrap();
    assert!(output.status.success());
    let told: Value = serde_json::from_slice(&output.stdout).unwrap();
    let groups = told["groups"].as_array().unwrap();
    let kinds: Vec<_> = groups.iter().map(|group| (group["operation"].as_str().unwrap(), &group["size"])).collect();
    assert_eq!(kinds, [("read", &Value::from(512)), ("write", &Value::from(4096))]);
    for group in groups {
        let stages = group["stages_ns"].as_object().unwrap();
        let sum: f64 = stages.values().map(|ns| ns.as_f64().unwrap()).sum();
        let whole = group["typical_ns"].as_f64().unwrap();
        assert!(whole > 0.0 && (sum - whole).abs() < 1.0, "{group}");
    }
    let count: u64 = groups.iter().map(|group| group["count"].as_u64().unwrap()).sum();
    let requests = std::fs::read_to_string(served.room.path().join("requests")).unwrap();
    assert_eq!((requests.lines().count() as u64, &told["lost"]), (1 + count, &Value::from(0)));
    let line: Value = serde_json::from_str(requests.lines().last().unwrap()).unwrap();
    assert!(line["at_ns"].as_u64().unwrap() < 3_000_000_000, "{line}");
    replays_what_was_recorded(&served, &told);
    let chrome = std::fs::read(served.room.path().join("trace.json")).unwrap();
    let chrome: Value = serde_json::from_slice(&chrome).unwrap();
    assert!(chrome["traceEvents"].as_array().unwrap().len() as u64 > count);
    let svg = std::fs::read_to_string(served.room.path().join("where.svg")).unwrap();
    assert!(svg.contains("read 512 B") && svg.contains("write 4 KiB"), "{svg}");
    for (words, said) in [
        ("trace control.sock --seconds 2 --warm-up 2", "leaves nothing"),
        ("trace control.sock --seconds 1 --svg nowhere/x.svg", "nowhere/x.svg"),
        ("trace other.sock", "none in"),
        ("trace control.sock --seconds 0", "0 is not in 1..=3600"),
    ] {
        let (code, told) = served.refused(words);
        assert!(code != Some(0) && told.contains(said), "{words}: {told}");
    }
    served.stop();
}
