//! States of health are provoked with a real daemon and real disk processes, and each must be shown alike by all views.

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use api::HealthState;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use testkit::nbd::{Client, Command as Nbd};

use crate::play::{out, run};
use crate::taplined::Daemon;

/// All views show a fault within two seconds on a quiet machine; a busy one takes longer.
const SOON: Duration = Duration::from_secs(60);

const DISK: &str = "root";
const REPOSITORY: &str = "vms";

/// A daemon with a repository and a plugged disk in it.
struct Bed {
    daemon: Daemon,
    vbd: String,
}

/// A file system in memory that is unmounted with this value.
struct Small(PathBuf);

impl Small {
    fn mount(at: PathBuf, size: &str) -> Option<Small> {
        fs::create_dir_all(&at).unwrap();
        let options = format!("size={size}");
        let mounted = Command::new("mount").args(["-t", "tmpfs", "-o", &options, "none"]).arg(&at).status().unwrap();
        if !mounted.success() {
            std::io::stderr().write_all(b"NOT RUN: a test on a full file system: it needs root\n").unwrap();
        }
        mounted.success().then_some(Small(at))
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        // Lazily: a disk may still have files open.
        Command::new("umount").arg("-l").arg(&self.0).status().unwrap();
    }
}

impl Bed {
    fn of(daemon: Daemon, directory: &Path) -> Bed {
        fs::create_dir_all(directory).unwrap();
        let bed = Bed { daemon, vbd: String::new() };
        bed.out(&["sr", "create", REPOSITORY, "--dir", directory.to_str().unwrap()]);
        bed.out(&["vdi", "create", DISK, "--sr", REPOSITORY, "--size", "64M", "--format", "qcow2"]);
        let vbd = bed.out(&["vbd", "create", "--vdi", DISK, "--transport", "nbd"]).trim().to_owned();
        let bed = Bed { vbd, ..bed };
        bed.out(&["vbd", "plug", &bed.vbd]);
        bed
    }

    fn out(&self, words: &[&str]) -> String {
        out(&run(&self.daemon.socket(), words))
    }

    fn json(&self, words: &[&str]) -> Value {
        serde_json::from_str(&self.out(&[words, &["--json"]].concat())).unwrap()
    }

    fn shown(&self, noun: &str, name: &str) -> Value {
        self.json(&[noun, "show", name])
    }

    fn vbd(&self) -> Value {
        self.shown("vbd", &self.vbd)
    }

    fn pid(&self) -> Pid {
        let pid = self.vbd()["pid"].as_i64().unwrap();
        Pid::from_raw(i32::try_from(pid).unwrap()).unwrap()
    }

    fn client(&self) -> Client {
        Client::connect(Path::new(self.vbd()["socket"].as_str().unwrap())).unwrap()
    }

    fn image(&self) -> PathBuf {
        self.daemon.directory().join("images").join(self.shown("vdi", DISK)["file"].as_str().unwrap())
    }

    fn advice(&self) -> String {
        self.vbd()["health"]["advice"].as_str().unwrap_or_default().to_owned()
    }

    /// Types the commands of an advice into a shell, as they are printed.
    fn type_commands_of(&self, advice: &str) {
        let commands = advice.split("; ").filter_map(|part| part.rsplit(": ").next());
        let commands: Vec<&str> = commands
            .filter(|word| ["tapline ", "cp ", "mv "].iter().any(|program| word.starts_with(program)))
            .collect();
        assert!(commands.len() >= 2, "{advice}");
        let programs = Path::new(env!("CARGO_BIN_EXE_tapline")).parent().unwrap();
        let path = format!("{}:{}", programs.display(), std::env::var("PATH").unwrap());
        let mut shell = Command::new("sh");
        // At a terminal a person confirms that.
        let commands = commands.join("\n").replace("--believe catalogue", "--believe catalogue --yes");
        shell.args(["-exc", &commands]).env("PATH", path).env("TAPLINE_SOCKET", self.daemon.socket());
        let ended = shell.output().unwrap();
        assert!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stderr));
    }

    /// What a command that must fail, and at once, prints on stderr.
    fn refused(&self, words: &[&str]) -> String {
        let begun = Instant::now();
        let ended = run(&self.daemon.socket(), words);
        assert!(!ended.status.success(), "{words:?}");
        assert!(begun.elapsed() < SOON, "{words:?} waited");
        String::from_utf8(ended.stderr).unwrap()
    }

    fn metrics(&self) -> String {
        let mut stream = UnixStream::connect(self.daemon.socket()).unwrap();
        stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        text
    }

    /// The state of a series `tapline_health` of this kind and name.
    fn metric(&self, kind: &str, name: &str) -> String {
        let text = self.metrics();
        let is_its = |line: &&str| {
            line.starts_with("tapline_health{")
                && line.contains(&format!("kind=\"{kind}\""))
                && line.contains(&format!("name=\"{name}\""))
        };
        let line = text.lines().find(is_its).unwrap_or("");
        let state = line.split("state=\"").nth(1).and_then(|rest| rest.split('"').next());
        state.unwrap_or("absent").to_owned()
    }

    /// The word of the health in the row of a table, which has none if it is healthy.
    fn listed(&self, noun: &str, name: &str) -> String {
        let table = self.out(&[noun, "list", "--columns", "uuid,state"]);
        let uuid = self.shown(noun, name)["uuid"].as_str().unwrap()[..8].to_owned();
        let row = table.lines().find(|line| line.starts_with(&uuid)).unwrap_or_else(|| panic!("{table}")).to_owned();
        // A state that is called as the health is not repeated.
        let word = row.rsplit([' ', ',']).find(|word| !word.is_empty()).unwrap_or_default();
        let is_health = HealthState::ALL.iter().any(|state| state.name() == word);
        if is_health { word.to_owned() } else { "healthy".to_owned() }
    }

    /// What each view says of the disk's health.
    fn of_disk(&self) -> BTreeMap<&'static str, String> {
        let of = |value: &Value| value["health"]["state"].as_str().unwrap_or_default().to_owned();
        let pages = self.daemon.directory().join("run/vbd");
        let top = self.json(&["top", "-n", "1", "-i", "0.05", "--pages", pages.to_str().unwrap()]);
        let explained = self.json(&["explain", &self.vbd, "--seconds", "1"]);
        let doctor = self.out(&["doctor", "--json"]);
        let word =
            doctor.split(&format!("the disk '{DISK}' is ")).nth(1).and_then(|rest| rest.split([' ', ':']).next());
        BTreeMap::from([
            ("vbd show", of(&self.vbd())),
            ("vdi show", of(&self.shown("vdi", DISK))),
            ("vbd list", self.listed("vbd", &self.vbd)),
            ("vdi list", self.listed("vdi", DISK)),
            // A disk without a process is in no row of it.
            ("top", top["disks"].get(0).map_or_else(|| of(&self.vbd()), of)),
            ("explain", of(&explained)),
            ("doctor", word.unwrap_or("healthy").to_owned()),
            ("metrics", self.metric("vbd", DISK)),
            ("metrics of the VDI", self.metric("vdi", DISK)),
        ])
    }

    fn of_repository(&self) -> BTreeMap<&'static str, String> {
        let doctor = self.out(&["doctor", "--json"]);
        let is = format!("the repository '{REPOSITORY}' is ");
        let word = doctor.split(&is).nth(1).and_then(|rest| rest.split([' ', ':']).next());
        BTreeMap::from([
            ("sr show", self.shown("sr", REPOSITORY)["health"]["state"].as_str().unwrap_or_default().to_owned()),
            ("sr list", self.listed("sr", REPOSITORY)),
            ("doctor", word.unwrap_or("healthy").to_owned()),
            ("metrics", self.metric("sr", REPOSITORY)),
        ])
    }
}

/// Waits until all views say so.
#[track_caller]
fn all_say(expected: &str, views: impl Fn() -> BTreeMap<&'static str, String>) {
    let begun = Instant::now();
    loop {
        let now = views();
        if now.values().all(|state| state == expected) {
            return;
        }
        assert!(begun.elapsed() < SOON, "not all say {expected}: {now:?}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

fn bed() -> Bed {
    let daemon = Daemon::start_with("[storage]\nmeasure-interval = 1\nfull-interval = 1");
    let directory = daemon.directory().join("images");
    Bed::of(daemon, &directory)
}

#[test]
fn a_stopped_disk_is_stuck_in_all_views_until_it_continues() {
    let bed = bed();
    all_say("healthy", || bed.of_disk());
    let pid = bed.pid();
    kill_process(pid, Signal::STOP).unwrap();
    let stopped = Instant::now();
    let explained = bed.out(&["explain", &bed.vbd]);
    // Also before the daemon has noticed; a machine that builds meanwhile gets more than two seconds.
    assert!(stopped.elapsed() < SOON && explained.starts_with("The disk is stuck"), "{explained}");
    let number = pid.as_raw_nonzero();
    assert!(explained.replace('\n', " ").contains(&format!("process {number} is stopped")), "{explained}");
    assert!(explained.lines().all(|line| line.chars().count() <= 80), "{explained}");
    all_say("stuck", || bed.of_disk());
    let health = bed.vbd()["health"].clone();
    assert!(health["advice"].as_str().unwrap().contains(&format!("kill -CONT {number}")), "{health}");
    assert!(bed.out(&["vbd", "show", &bed.vbd]).contains("health: stuck for "));
    kill_process(pid, Signal::CONT).unwrap();
    all_say("healthy", || bed.of_disk());
    assert_eq!(bed.vbd()["health"].get("since"), None);
    assert_eq!(bed.vbd()["restarts"], 0);
}

#[test]
fn a_process_that_cannot_be_restarted_is_restarting_and_then_healthy() {
    let bed = bed();
    let file = bed.shown("vdi", DISK)["file"].as_str().unwrap().to_owned();
    let (file, aside) = (bed.daemon.directory().join("images").join(&file), bed.daemon.directory().join("aside"));
    // Stopped, it cannot say that its file is gone, which would be shown instead.
    kill_process(bed.pid(), Signal::STOP).unwrap();
    fs::rename(&file, &aside).unwrap();
    kill_process(bed.pid(), Signal::KILL).unwrap();
    all_say("restarting", || bed.of_disk());
    fs::rename(&aside, &file).unwrap();
    all_say("healthy", || bed.of_disk());
    let table = bed.out(&["vbd", "list", "--columns", "uuid,state"]);
    assert!(!table.contains("restarted"), "an old death is not a state: {table}");
}

#[test]
fn a_disk_without_space_is_full_and_so_is_its_repository() {
    let daemon = Daemon::start_with("[storage]\nmeasure-interval = 1\nfull-interval = 1");
    let Some(small) = Small::mount(daemon.directory().join("small"), "6m") else { return };
    let bed = Bed::of(daemon, &small.0);
    all_say("healthy", || bed.of_repository());
    let mut client = bed.client();
    let filler = small.0.join("filler");
    fs::write(&filler, vec![1; 4 << 20]).unwrap();
    for at in 0..16 {
        client.send(Nbd::Write, at << 18, 1 << 18, &vec![7; 1 << 18]).unwrap();
    }
    all_say("full", || bed.of_disk());
    all_say("full", || bed.of_repository());
    let explained = bed.out(&["explain", &bed.vbd, "--seconds", "1"]);
    assert!(explained.starts_with("The disk is full") && !explained.contains("not answer"), "{explained}");
    fs::write(&filler, "").unwrap();
    (0..16).for_each(|_| drop(client.answer(0).unwrap()));
    all_say("healthy", || bed.of_disk());
    drop(client);
    bed.out(&["vbd", "unplug", &bed.vbd]);
    drop(bed);
}

/// The daemon may take what was free when it measured for what was not enough, and then never tells the disk.
#[test]
fn a_disk_that_waits_for_space_finds_it_without_the_daemon() {
    let daemon = Daemon::start_with("[storage]\nmeasure-interval = 3600\nfull-interval = 3600");
    let Some(small) = Small::mount(daemon.directory().join("small"), "6m") else { return };
    let bed = Bed::of(daemon, &small.0);
    let mut client = bed.client();
    let filler = small.0.join("filler");
    fs::write(&filler, vec![1; 4 << 20]).unwrap();
    for at in 0..16 {
        client.send(Nbd::Write, at << 18, 1 << 18, &vec![7; 1 << 18]).unwrap();
    }
    all_say("full", || bed.of_disk());
    fs::write(&filler, "").unwrap();
    let freed = Instant::now();
    (0..16).for_each(|_| drop(client.answer(0).unwrap()));
    // It tries every 5 s; a machine that builds meanwhile gets more.
    assert!(freed.elapsed() < SOON, "{:?}", freed.elapsed());
    all_say("healthy", || bed.of_disk());
    drop(client);
    bed.out(&["vbd", "unplug", &bed.vbd]);
    drop(bed);
}

#[test]
fn a_repository_with_nothing_but_its_reserve_left_is_full() {
    let bed = bed();
    let size = bed.shown("sr", REPOSITORY)["space"]["physical_size"].as_u64().unwrap();
    bed.out(&["sr", "set", REPOSITORY, "--reserve", &(size - 4096).to_string()]);
    all_say("full", || bed.of_repository());
    let health = bed.shown("sr", REPOSITORY)["health"].clone();
    assert!(health["reason"].as_str().unwrap().contains("reserve"), "{health}");
    bed.out(&["sr", "set", REPOSITORY, "--reserve", "0"]);
    all_say("healthy", || bed.of_repository());
}

#[test]
fn a_repository_whose_directory_is_gone_is_unreachable_with_its_disks() {
    // It is not the measuring that finds out.
    let daemon = Daemon::start_with("[storage]\nmeasure-interval = 3600\nlost-interval = 1");
    let directory = daemon.directory().join("images");
    let bed = Bed::of(daemon, &directory);
    let (here, aside) = (bed.daemon.directory().join("images"), bed.daemon.directory().join("aside"));
    fs::rename(&here, &aside).unwrap();
    all_say("unreachable", || bed.of_repository());
    all_say("unreachable", || bed.of_disk());
    let reason = bed.vbd()["health"]["reason"].as_str().unwrap().to_owned();
    assert!(reason.starts_with("its repository 'vms' is unreachable: "), "{reason}");
    let table = bed.out(&["sr", "list", "--columns", "name,used,free"]);
    let row: Vec<&str> = table.lines().last().unwrap().split_whitespace().collect();
    assert_eq!(row, ["vms", "unknown", "unknown"], "numbers from before the loss");
    fs::rename(&aside, &here).unwrap();
    all_say("healthy", || bed.of_repository());
    all_say("healthy", || bed.of_disk());
}

#[test]
fn a_removed_image_of_a_running_disk_is_saved_as_advised() {
    let bed = bed();
    let mut client = bed.client();
    client.write(0, &[7; 4096]).unwrap();
    let (image, other) = (bed.image(), bed.daemon.directory().join("aside"));
    // One that was moved is moved back.
    fs::rename(&image, &other).unwrap();
    all_say("diverged", || bed.of_disk());
    fs::rename(&other, &image).unwrap();
    all_say("healthy", || bed.of_disk());
    for replaced in [false, true] {
        fs::copy(&image, &other).unwrap();
        fs::remove_file(&image).unwrap();
        if replaced {
            fs::rename(&other, &image).unwrap();
        }
        all_say("diverged", || bed.of_disk());
        let reason = bed.vbd()["health"]["reason"].as_str().unwrap().to_owned();
        assert!(reason.contains("the data is lost when process"), "{reason}");
        // Its guest continues.
        client.write(4096, &[8 + u8::from(replaced); 4096]).unwrap();
        bed.type_commands_of(&bed.advice());
        all_say("healthy", || bed.of_disk());
        client = bed.client();
        assert_eq!(client.read(0, 4096).unwrap(), [7; 4096]);
        assert_eq!(client.read(4096, 4096).unwrap(), [8 + u8::from(replaced); 4096]);
    }
}

#[test]
fn a_disk_whose_process_died_without_its_image_is_served_from_a_backup_as_advised() {
    let bed = bed();
    let (image, backup) = (bed.image(), bed.daemon.directory().join("backup"));
    fs::copy(&image, &backup).unwrap();
    fs::remove_file(&image).unwrap();
    all_say("diverged", || bed.of_disk());
    kill_process(bed.pid(), Signal::KILL).unwrap();
    let begun = Instant::now();
    while !bed.advice().contains("put a backup in its place") {
        assert!(begun.elapsed() < SOON, "{}", bed.vbd());
        std::thread::sleep(Duration::from_millis(50));
    }
    let reason = bed.vbd()["health"]["reason"].as_str().unwrap().to_owned();
    assert!(reason.contains("(restarts since it was plugged: "), "{reason}");
    all_say("diverged", || bed.of_disk());
    // It may have the number of the file that is gone, and is not served before somebody has decided that.
    fs::copy(&backup, &image).unwrap();
    let restarts = bed.vbd()["restarts"].as_u64().unwrap();
    while bed.vbd()["restarts"].as_u64().unwrap() < restarts + 2 {
        assert!(begun.elapsed() < SOON * 2, "{}", bed.vbd());
        std::thread::sleep(Duration::from_millis(50));
    }
    all_say("diverged", || bed.of_disk());
    bed.type_commands_of(&bed.advice());
    all_say("healthy", || bed.of_disk());
}

#[test]
fn a_file_put_in_place_of_an_image_just_before_the_death_of_its_process_is_not_served() {
    let bed = bed();
    let (image, backup) = (bed.image(), bed.daemon.directory().join("backup"));
    fs::copy(&image, &backup).unwrap();
    // It would get the number of the one that is gone, if nothing held that.
    let pid = bed.pid();
    fs::remove_file(&image).unwrap();
    fs::copy(&backup, &image).unwrap();
    kill_process(pid, Signal::KILL).unwrap();
    let begun = Instant::now();
    while !bed.advice().contains("put a backup in its place") {
        assert!(begun.elapsed() < SOON, "{}", bed.vbd());
        std::thread::sleep(Duration::from_millis(50));
    }
    assert_eq!(bed.vbd()["pid"], serde_json::Value::Null, "{}", bed.vbd());
    bed.type_commands_of(&bed.advice());
    all_say("healthy", || bed.of_disk());
}

#[test]
fn verbs_on_a_stuck_disk_are_refused_at_once_and_never_carried_out() {
    let bed = bed();
    let pid = bed.pid();
    kill_process(pid, Signal::STOP).unwrap();
    // Before the daemon has noticed, and after.
    for _ in 0..2 {
        for verb in [vec!["vdi", "snapshot", DISK], vec!["vdi", "resize", DISK, "128M"], vec!["vdi", "clone", DISK]] {
            let refused = bed.refused(&verb);
            assert!(refused.contains("is stuck, so that nothing was sent to it"), "{refused}");
            assert!(refused.contains("kill -CONT") && refused.contains("tapline explain"), "{refused}");
        }
        all_say("stuck", || bed.of_disk());
    }
    let refused = bed.refused(&["vbd", "upgrade", &bed.vbd]);
    assert!(refused.contains("is stuck"), "{refused}");
    kill_process(pid, Signal::CONT).unwrap();
    all_say("healthy", || bed.of_disk());
    // The next verb comes after all that its process was sent.
    bed.out(&["vdi", "resize", DISK, "96M"]);
    assert_eq!(bed.shown("vdi", DISK)["size"], 96 << 20);
    assert_eq!(bed.json(&["vdi", "list"]).as_array().unwrap().len(), 1);
}

#[test]
fn a_death_is_one_line_and_two_events_that_name_the_disk() {
    let bed = bed();
    kill_process(bed.pid(), Signal::KILL).unwrap();
    let begun = Instant::now();
    while bed.vbd()["restarts"] != 1 || bed.vbd()["state"] != "plugged" {
        assert!(begun.elapsed() < SOON, "{}", bed.vbd());
        std::thread::sleep(Duration::from_millis(50));
    }
    let died = bed.vbd()["problem"]["detail"].as_str().unwrap().to_owned();
    assert!(!died.contains('\n') && died.contains(".log") && died.contains("SIGKILL"), "{died}");
    assert!(!died.contains("serving"), "what a process announces is no error: {died}");
    // All events since the daemon was started for the first time.
    let mut follow = Command::new(env!("CARGO_BIN_EXE_tapline"));
    follow.args(["event", "follow", "--kind", "vbd", "--after", &(1_u64 << 32).to_string()]);
    let mut follow = follow.env("TAPLINE_SOCKET", bed.daemon.socket()).stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(follow.stdout.take().unwrap()).lines().map(Result::unwrap);
    let state = |line: &String| line.rsplit("  ").next().unwrap_or_default().to_owned();
    let plugged = lines.by_ref().find(|line| state(line) == "plugged").unwrap();
    assert!(plugged.contains(&format!("  {DISK}  ")), "{plugged}");
    assert_eq!(lines.by_ref().take(2).map(|line| state(&line)).collect::<Vec<_>>(), ["restarting", "plugged"]);
    follow.kill().unwrap();
    follow.wait().unwrap();
}

#[test]
fn a_failed_plug_is_forgotten_with_an_unplug_or_a_plug_that_succeeds() {
    let bed = bed();
    let (image, aside) = (bed.image(), bed.daemon.directory().join("aside"));
    bed.out(&["vbd", "unplug", &bed.vbd]);
    for clears in ["unplug", "plug"] {
        fs::rename(&image, &aside).unwrap();
        bed.refused(&["vbd", "plug", &bed.vbd]);
        all_say("failed", || bed.of_disk());
        assert!(bed.advice().contains("tapline vbd plug"), "{}", bed.vbd());
        fs::rename(&aside, &image).unwrap();
        bed.out(&["vbd", clears, &bed.vbd]);
        all_say("healthy", || bed.of_disk());
    }
}

/// A disk that is served without the daemon, until this is dropped.
struct Served(Child);

impl Drop for Served {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

#[test]
fn a_disk_without_the_daemon_is_unmanaged_and_stuck_when_stopped() {
    let room = tempfile::tempdir().unwrap();
    let path = |name: &str| room.path().join(name).display().to_string();
    let nowhere = room.path().join("no-daemon.sock");
    fs::File::create(path("a.raw")).unwrap().set_len(1 << 20).unwrap();
    let mut serve = Command::new(env!("CARGO_BIN_EXE_tapline"));
    let image = format!("raw:{}", path("a.raw"));
    serve.args(["serve", &image, "--nbd", &path("a.nbd"), "--control", &path("a.sock")]);
    serve.args(["--stats-page", &path("statistics.page")]).stdin(Stdio::null()).stderr(Stdio::null());
    let served = Served(serve.spawn().unwrap());
    while UnixStream::connect(path("a.sock")).is_err() {
        std::thread::sleep(Duration::from_millis(10));
    }
    let explained = || -> Value {
        let words = ["explain", &path("a.sock"), "--json", "--seconds", "1"];
        serde_json::from_str(&out(&run(&nowhere, &words))).unwrap()
    };
    assert_eq!(explained()["health"]["state"], "unmanaged");
    // `tapline serve` becomes the disk process.
    let pid = Pid::from_raw(i32::try_from(served.0.id()).unwrap()).unwrap();
    kill_process(pid, Signal::STOP).unwrap();
    let begun = Instant::now();
    assert_eq!(explained()["health"]["state"], "stuck");
    assert!(begun.elapsed() < SOON);
    kill_process(pid, Signal::CONT).unwrap();
    assert_eq!(explained()["health"]["state"], "unmanaged");
}
