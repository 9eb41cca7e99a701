//! Tests of `tapline top` with a disk served by `tapline-disk`, over pipes and in a terminal.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Output, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use serde_json::Value;
use testkit::nbd;

/// A served disk with a statistics page, in its own directory.
struct Served {
    room: tempfile::TempDir,
    process: Child,
}

fn tapline() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tapline"));
    // Without the daemon of this host.
    command.env("TAPLINE_SOCKET", "/nonexistent/taplined.sock").env_remove("TAPLINE_CONNECT");
    command
}

impl Served {
    fn new() -> Served {
        crate::build_disk_program();
        let room = tempfile::tempdir().unwrap();
        let made = tapline().args(["image", "create", "raw:a.raw", "--size", "16M"]).current_dir(room.path()).output();
        assert!(made.as_ref().unwrap().status.success(), "{made:?}");
        let serve = ["serve", "raw:a.raw", "--nbd", "nbd.sock", "--control", "control.sock", "--stats-page", "a.page"];
        let mut process = tapline();
        process.args(serve).current_dir(room.path()).stdout(Stdio::null()).stderr(Stdio::null());
        let served = Served { process: process.spawn().unwrap(), room };
        wait("the disk is served", || UnixStream::connect(served.room.path().join("nbd.sock")).is_ok());
        // It listens before it creates its page.
        let page = served.room.path().join("a.page");
        wait("the page is begun", || stats::Reader::open(&page).is_ok_and(|page| page.snapshot().is_ok()));
        served
    }

    fn top(&self, words: &str) -> Command {
        let mut command = tapline();
        command.arg("top").args(words.split_whitespace()).current_dir(self.room.path());
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    fn connect(&self) -> nbd::Client {
        nbd::Client::connect(&self.room.path().join("nbd.sock")).unwrap()
    }

    fn disk(&self, verb: &str) {
        let output = tapline().args(["disk", "control.sock", verb]).current_dir(self.room.path()).output().unwrap();
        assert!(output.status.success(), "{output:?}");
    }

    fn sample(&self) -> Value {
        let output = self.top("a.page --json -n 1 -i 0.05").output().unwrap();
        assert!(output.status.success(), "{output:?}");
        serde_json::from_slice(&output.stdout).unwrap()
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        self.process.kill().unwrap_or_default();
        self.process.wait().map(drop).unwrap_or_default();
    }
}

fn wait(what: &str, mut is_so: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !is_so() {
        assert!(begun.elapsed() < Duration::from_secs(120), "it never came to this: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn refused(output: &Output) -> (Option<i32>, String) {
    (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
}

/// Sends this number of writes and reads, and a flush.
fn work(client: &mut nbd::Client, writes: u64, reads: u64) {
    (0..writes).for_each(|number| client.write(number * 4096, &[1; 4096]).unwrap());
    (0..reads).for_each(|number| drop(client.read(number * 512, 512).unwrap()));
    client.flush().unwrap();
}

#[test]
fn samples_count_what_was_done_and_their_rates_add_up_to_it() {
    let served = Served::new();
    let mut client = served.connect();
    work(&mut client, 3, 2);
    let mut top = served.top("a.page --json -i 0.05").spawn().unwrap();
    let mut lines = BufReader::new(top.stdout.take().unwrap()).lines();
    let mut next = || serde_json::from_str::<Value>(&lines.next().unwrap().unwrap()).unwrap();
    let count = |sample: &Value, kind: &str| sample["disks"][0]["kinds"][kind]["count"].as_u64().unwrap();
    let mut sample = next();
    while count(&sample, "flush") < 1 {
        sample = next();
    }
    assert_eq!([count(&sample, "write"), count(&sample, "read")], [3, 2]);
    work(&mut client, 40, 25);
    let (mut writes, mut read_bytes) = (0.0, 0.0);
    while count(&sample, "flush") < 2 {
        sample = next();
        let disk = &sample["disks"][0];
        let of = |field: &str| disk[field].as_f64().unwrap() * disk["interval_seconds"].as_f64().unwrap();
        writes += of("writes_per_second");
        read_bytes += of("read_bytes_per_second");
    }
    assert_eq!([count(&sample, "write"), count(&sample, "read")], [43, 27]);
    assert!((writes - 40.0).abs() < 1e-6 && (read_bytes - 25.0 * 512.0).abs() < 1e-3, "{writes} {read_bytes}");
    let disk = &sample["disks"][0];
    let kinds = &disk["kinds"];
    assert_eq!((&kinds["write"]["bytes"], &kinds["read"]["bytes"]), (&(43 * 4096).into(), &(27 * 512).into()));
    assert_eq!((&disk["name"], &disk["transport"], &disk["errors"]), (&"a.raw".into(), &"nbd".into(), &0.into()));
    assert_eq!(disk["pid"].as_u64(), Some(served.process.id().into()));
    top.kill().unwrap();
    top.wait().unwrap();
}

#[test]
fn a_request_that_is_held_is_a_queue_of_one_while_nothing_ends() {
    let served = Served::new();
    let mut client = served.connect();
    served.disk("pause");
    client.send(nbd::Command::Write, 0, 4096, &[1; 4096]).unwrap();
    wait("the request is in flight", || served.sample()["disks"][0]["in_flight"] == 1);
    let sample = served.sample();
    let disk = &sample["disks"][0];
    let queue = disk["queue_size"].as_f64().unwrap();
    assert!((queue - 1.0).abs() < 1e-6 && disk["queue_size_tapline"] == disk["queue_size"], "{disk}");
    assert_eq!((&disk["writes_per_second"], &disk["kinds"]["write"]["count"]), (&0.0.into(), &0.into()));
    assert!(disk["oldest_in_flight_ns"].as_u64().unwrap() > 50_000_000, "{disk}");
    served.disk("resume");
    client.answer(0).unwrap();
    wait("the request is counted", || served.sample()["disks"][0]["kinds"]["write"]["count"] == 1);
    assert_eq!(served.sample()["disks"][0]["in_flight"], 0);
}

#[test]
fn a_disk_is_selected_by_its_page_or_image() {
    let served = Served::new();
    for words in ["a.page -b -n 1 -i 0.01", "--pages . a.raw -b -n 1 -i 0.01", "--pages . -b -n 1 -i 0.01 --sort p99"] {
        let output = served.top(words).output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && text.contains("\na.raw ") && output.stderr.is_empty(), "{output:?}");
    }
    let (code, said) = refused(&served.top("--pages . nothing -b -n 1").output().unwrap());
    assert!(code == Some(6) && said.contains("'nothing'") && said.contains("served are a.raw"), "{said}");
    std::fs::write(served.room.path().join("bad.page"), [7; 9000]).unwrap();
    let output = served.top("--pages . -b -n 2 -i 0.01").output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(said.matches("bad.page: it is not a statistics page").count(), 1, "said once: {said}");
    assert!(output.status.success() && String::from_utf8_lossy(&output.stdout).contains("\na.raw "));
}

#[test]
fn without_a_terminal_or_pages_there_is_advice() {
    let room = tempfile::tempdir().unwrap();
    let run = |words: &str| {
        let mut command = tapline();
        command.arg("top").args(words.split_whitespace()).current_dir(room.path()).stdin(Stdio::null());
        refused(&command.output().unwrap())
    };
    let (code, said) = run("--pages .");
    assert!(code == Some(64) && said.contains("not a terminal") && said.contains("--batch"), "{said}");
    let (code, said) = run("--pages . --batch -n 1 -i 0.01");
    assert!(code == Some(0) && said.contains("./stats") && said.contains("tapline serve"), "{said}");
    let (code, said) = run("--batch --connect https://nas:8443");
    assert!(code == Some(64) && said.contains("this host"), "{said}");
    assert_eq!(run("--batch -i 0").0, Some(64));
}

/// `tapline top` in a terminal of script(1).
struct Screen {
    script: Child,
    /// Its output; blanks may be missing, where the cursor is moved over them.
    seen: Arc<Mutex<Vec<u8>>>,
}

impl Screen {
    /// Starts it, and saves the terminal's settings before and after it, its name and the exit code.
    fn of(served: &Served) -> Screen {
        let command = format!(
            "tty >tty; stty rows 24 cols 100; stty -g >before; sh -c 'echo $$ >pid; exec \"{}\" top --pages .'; \
             echo $? >code; stty -g >after; echo the end",
            env!("CARGO_BIN_EXE_tapline")
        );
        let mut script = Command::new("script");
        script.args(["--quiet", "--command", &command, "/dev/null"]).current_dir(served.room.path());
        script.env("TERM", "xterm").env("TAPLINE_SOCKET", "/nonexistent/taplined.sock").env_remove("TAPLINE_CONNECT");
        let mut script = script.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let seen = Arc::new(Mutex::new(Vec::new()));
        let (mut output, shared) = (script.stdout.take().unwrap(), Arc::clone(&seen));
        std::thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(len @ 1..) = output.read(&mut bytes) {
                shared.lock().unwrap().extend_from_slice(&bytes[..len]);
            }
        });
        Screen { script, seen }
    }

    fn text(&self) -> String {
        String::from_utf8_lossy(&self.seen.lock().unwrap()).into_owned()
    }

    fn see(&self, what: &str) {
        let begun = Instant::now();
        while !self.text().contains(what) {
            assert!(begun.elapsed() < Duration::from_secs(120), "not seen: {what}\n{:?}", self.text());
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    fn type_in(&mut self, keys: &str) {
        self.script.stdin.as_mut().unwrap().write_all(keys.as_bytes()).unwrap();
    }

    /// Checks that the screen was left and the terminal restored.
    fn ended(mut self, served: &Served) {
        self.see("the end");
        let text = self.text();
        self.script.wait().unwrap();
        let file = |name: &str| std::fs::read_to_string(served.room.path().join(name)).unwrap();
        assert_eq!(file("code"), "0\n", "{text:?}");
        assert_eq!(file("before"), file("after"), "the terminal's settings are not what they were");
        let (entered, left) = (text.find("\u{1b}[?1049h").unwrap(), text.find("\u{1b}[?1049l").unwrap());
        let (hidden, shown) = (text.find("\u{1b}[?25l").unwrap(), text.rfind("\u{1b}[?25h").unwrap());
        assert!(entered < left && hidden < shown && shown > entered, "{text:?}");
    }
}

fn run(command: &mut Command) {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{output:?}");
}

#[test]
fn the_screen_follows_the_terminals_size_and_quits_with_q() {
    let served = Served::new();
    let mut screen = Screen::of(&served);
    screen.see("a.raw");
    screen.type_in("\r");
    screen.see("FLIGHT:");
    let tty = std::fs::read_to_string(served.room.path().join("tty")).unwrap();
    run(Command::new("stty").args(["-F", tty.trim(), "cols", "40", "rows", "10"]));
    screen.see("small:");
    screen.type_in("q");
    screen.ended(&served);
}

#[test]
fn signals_end_the_screen_and_restore_the_terminal() {
    for signal in ["-TERM", "-INT", "-HUP"] {
        let served = Served::new();
        let screen = Screen::of(&served);
        screen.see("a.raw");
        let pid = std::fs::read_to_string(served.room.path().join("pid")).unwrap();
        run(Command::new("kill").args([signal, pid.trim()]));
        screen.ended(&served);
    }
}
