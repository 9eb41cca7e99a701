//! Disks that use more than one thread, and where their threads run.

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use fastrand::Rng;
use rustix::process::Signal;
use serde_json::{Value, json};
use testkit::ring::Driver;

use crate::tool::control::Control;
use crate::tool::handed::{Hand, Handed, NOWHERE};
use crate::tool::nbd::{Nbd, Versions};
use crate::tool::replaced::Replaced;
use crate::tool::served::Disk;
use crate::tool::{Room, TAPLINE};

/// Makes every disk process use this many threads from its start.
const FORCED: &str = "TAPLINE_DISK_THREADS";

fn serve(room: &Room, words: &str, threads: usize) -> Disk {
    let mut command = room.command(TAPLINE);
    command.arg("serve").args(words.split_whitespace()).env(FORCED, threads.to_string());
    Disk::start(command)
}

fn ask(room: &Room, request: &Value) -> Value {
    Control::connect(&room.file("control.sock")).done(request)
}

/// Returns the number of operations of each of the disk's lanes.
fn lanes(room: &Room) -> Vec<u64> {
    let stats = ask(room, &json!({ "verb": "stats" }));
    stats["lanes"].as_array().into_iter().flatten().map(|count| count.as_u64().unwrap()).collect()
}

#[test]
fn a_guest_on_lanes_survives_kills_and_upgrades_of_its_disk() {
    for (format, io_engine) in [("raw", "uring"), ("qcow2", "uring"), ("vhd", "aio")] {
        let room = Room::new();
        let image = room.image(format, "16M");
        let words = format!("{image} --vhost-user vm.sock --control control.sock --io-engine {io_engine}");
        let mut random = Rng::with_seed(1);
        let mut disk = serve(&room, &words, 3);
        let mut driver = Driver::connect(&room.file("vm.sock"), true);
        for _ in 0..5 {
            (0..40).for_each(|_| driver.work(&mut random));
            disk.signal(Signal::KILL);
            disk.child.wait().unwrap();
            disk = serve(&room, &words, 3);
            driver.connect_again();
        }
        let mut disk = Replaced::of(&room, disk);
        for _ in 0..3 {
            (0..40).for_each(|_| driver.work(&mut random));
            let upgrade = disk.upgrade();
            while !upgrade.is_finished() {
                driver.work(&mut random);
            }
            disk.replaced_by(&upgrade.join().unwrap());
        }
        (0..40).for_each(|_| driver.work(&mut random));
        driver.drain();
        let counts = lanes(&room);
        assert!(counts.len() == 2 && counts.iter().sum::<u64>() > 0, "{format}: {counts:?}");
        disk.stop();
        room.done(&format!("image convert {image} raw:b"));
        driver.check(&room.read("b"));
    }
}

#[test]
fn threads_set_under_load_are_kept_by_the_next_process() {
    let room = Room::new();
    let image = room.image("raw", "64M");
    let mut disk = Replaced::serve(&room, &format!("{image} --nbd nbd.sock --threads 2"));
    let path = room.file("nbd.sock");
    let guest = crate::tool::guest::Guest::start(
        move || Nbd::connect(&path).unwrap(),
        Versions::new(64, 4096),
        Rng::with_seed(1),
    );
    guest.work(100);
    let threads = |most: Value| ask(&room, &json!({ "verb": "threads", "most": most }))["most"].clone();
    assert_eq!(threads(Value::Null), 2);
    for most in [0, 17] {
        let mut control = Control::connect(&room.file("control.sock"));
        let (kind, why) = control.refused(&json!({ "verb": "threads", "most": most }));
        assert!(kind == "invalid" && why.contains("1 to 16"), "{why}");
    }
    assert_eq!(threads(json!(4)), 4);
    let upgrade = disk.upgrade();
    disk.replaced_by(&upgrade.join().unwrap());
    guest.work(100);
    assert_eq!(threads(Value::Null), 4);
    guest.stop().check(&mut Nbd::connect(&room.file("nbd.sock")).unwrap());
    disk.stop();
}

#[test]
fn a_disk_starts_a_lane_under_load_and_ends_it_afterwards() {
    if std::thread::available_parallelism().is_ok_and(|processors| processors.get() == 1) {
        println!("not run: there is one processor, on which a lane is of no use");
        return;
    }
    let room = Room::new();
    let image = room.image("raw", "16M");
    let mut command = room.command(TAPLINE);
    command.arg("serve").args(format!("{image} --nbd nbd.sock --control control.sock --threads 2").split_whitespace());
    // Always counted as saturated, on a machine always idle enough.
    command.env("TAPLINE_DISK_EAGER", "1").env_remove(FORCED);
    let disk = Disk::start(command);
    // Each query is an iteration of the disk's loop, with almost no work.
    for wanted in [1, 0] {
        let begun = Instant::now();
        while lanes(&room).len() != wanted {
            assert!(begun.elapsed() < Duration::from_secs(60), "{wanted} lanes do not come");
            std::thread::sleep(Duration::from_millis(20));
        }
    }
    let (code, said) = disk.stop();
    assert!(code == Some(0) && !said.contains("no more threads"), "{said}");
}

#[test]
fn ending_lanes_under_load_completes_their_operations() {
    let room = Room::new();
    let image = room.image("qcow2", "16M");
    let disk = serve(&room, &format!("{image} --vhost-user vm.sock --control control.sock --threads 3"), 3);
    let mut driver = Driver::connect(&room.file("vm.sock"), true);
    let mut random = Rng::with_seed(1);
    for (most, left) in [(2, 1), (1, 0)] {
        (0..40).for_each(|_| driver.work(&mut random));
        ask(&room, &json!({ "verb": "threads", "most": most }));
        assert_eq!(lanes(&room).len(), left);
    }
    (0..40).for_each(|_| driver.work(&mut random));
    driver.drain();
    assert_eq!(disk.stop().0, Some(0));
    room.done(&format!("image convert {image} raw:b"));
    driver.check(&room.read("b"));
}

#[test]
fn a_confined_disk_can_start_lanes() {
    let room = Room::new();
    room.done("image create qcow2:a --size 16M");
    let words = format!(
        "serve qcow2:{NOWHERE}/a --nbd {NOWHERE}/nbd.sock --control {NOWHERE}/control.sock --threads 2 --confine"
    );
    let mut hand = Hand::to(&words).file(&Handed::open(&room, "a", true));
    hand.command.env(FORCED, "2");
    let disk = hand.listen(&room, "nbd", "nbd.sock").listen(&room, "control", "control.sock").serve();
    let path = room.file("nbd.sock");
    let guest = crate::tool::guest::Guest::start(
        move || Nbd::connect(&path).unwrap(),
        Versions::new(64, 4096),
        Rng::with_seed(1),
    );
    guest.work(200);
    let counts = lanes(&room);
    assert!(counts.len() == 1 && counts[0] > 0, "{counts:?}");
    let open = std::fs::read_dir(format!("/proc/{}/fd", disk.child.id())).unwrap().flatten();
    let paths: Vec<_> = open.filter_map(|entry| std::fs::read_link(entry.path()).ok()).collect();
    assert!(paths.iter().any(|path| path == Path::new("/proc/stat")), "{paths:?}");
    guest.stop().check(&mut Nbd::connect(&room.file("nbd.sock")).unwrap());
    assert_eq!(disk.stop().0, Some(0));
}

/// Returns the processors on which all threads of a process may run.
fn processors_of(disk: &Disk) -> Vec<String> {
    let tasks = std::fs::read_dir(format!("/proc/{}/task", disk.child.id())).unwrap();
    let status = tasks.map(|task| std::fs::read_to_string(task.unwrap().path().join("status")).unwrap());
    let list =
        |text: String| text.lines().find_map(|line| Some(line.strip_prefix("Cpus_allowed_list:")?.trim().into()));
    status.map(|text| list(text).unwrap()).collect()
}

#[test]
fn all_threads_of_a_disk_run_on_the_processors_that_it_is_given() {
    let room = Room::new();
    let image = room.image("raw", "16M");
    // The first on which this test may run.
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let list = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:")).unwrap();
    let first: String = list.trim().chars().take_while(char::is_ascii_digit).collect();
    let disk = serve(&room, &format!("{image} --nbd nbd.sock --cpus {first}"), 2);
    assert_eq!(processors_of(&disk), [first.as_str(), &first]);
    assert_eq!(disk.stop().0, Some(0));
}

#[test]
fn missing_processors_and_nodes_are_refused_with_the_existing_ones() {
    let room = Room::new();
    let image = room.image("raw", "16M");
    let refused = |words: &str| {
        let said = room.tapline(&format!("serve {image} --nbd nbd.sock {words}"));
        assert_ne!(said.code, Some(0));
        said.err
    };
    let why = refused("--cpus 1023");
    assert!(why.contains("cannot run on the processors 1023") && why.contains("it may use 0"), "{why}");
    let why = refused("--cpus 0,1023");
    assert!(why.contains("1023 is not there, or this process may not use it"), "{why}");
    let why = refused("--cpus 3-1");
    assert!(why.contains("'3-1' is no list of processors"), "{why}");
    let why = refused("--numa-node 1000");
    assert!(why.contains("NUMA node 1000"), "{why}");
    assert!(!room.file("nbd.sock").exists());
}

#[test]
fn a_disk_on_a_numa_node_runs_on_its_processors() {
    let Ok(list) = std::fs::read_to_string("/sys/devices/system/node/node0/cpulist") else {
        println!("not run: this kernel has no NUMA");
        return;
    };
    let room = Room::new();
    let image = room.image("raw", "16M");
    let mut command: Command = room.command(TAPLINE);
    command.arg("serve").args(format!("{image} --nbd nbd.sock --numa-node 0").split_whitespace());
    let disk = Disk::start(command);
    assert!(processors_of(&disk).iter().all(|allowed| *allowed == list.trim()), "{:?}", processors_of(&disk));
    let maps = std::fs::read_to_string(format!("/proc/{}/numa_maps", disk.child.id())).unwrap_or_default();
    assert!(maps.is_empty() || maps.contains(" prefer"), "{maps}");
    assert_eq!(disk.stop().0, Some(0));
}
