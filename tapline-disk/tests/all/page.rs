//! The statistics page of a served disk: compared with what its client knows, while requests are held, and across
//! processes that are killed or replaced.

use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::json;
use stats::{Kind, Reader, Snapshot, Stage};
use testkit::ring::{self, Driver};

use crate::tool::control::Control;
use crate::tool::nbd::{BLOCK, Nbd};
use crate::tool::replaced::Replaced;
use crate::tool::served::Disk;
use crate::tool::{Room, TAPLINE};

const WORDS: &str = "qcow2:a --vhost-user vm.sock --control control.sock --stats-page page";

fn snapshot(room: &Room) -> Snapshot {
    Reader::open(&room.file("page")).unwrap().snapshot().unwrap()
}

/// Waits until the page satisfies a condition: a client sees its completion a moment before the page has it.
fn wait_for(room: &Room, what: &str, is_so: impl Fn(&Snapshot) -> bool) -> Snapshot {
    let begun = Instant::now();
    loop {
        let now = snapshot(room);
        if is_so(&now) {
            return now;
        }
        assert!(begun.elapsed() < Duration::from_secs(60), "{what}: {now:?}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn the_page_counts_completed_requests_and_their_durations() {
    let room = Room::new();
    room.done("image create qcow2:a --size 16M");
    let disk = Disk::serve(&room, WORDS);
    let mut driver = Driver::connect(&room.file("vm.sock"), true);
    let begun = Instant::now();
    for _ in 0..50 {
        (0..8).for_each(|block| driver.prepare(ring::Kind::Write, block));
        driver.kick();
        driver.drain();
        driver.offer(ring::Kind::Read, 3);
        driver.drain();
    }
    driver.offer(ring::Kind::Flush, 0);
    driver.drain();
    let took = u64::try_from(begun.elapsed().as_nanos()).unwrap();
    let seen = wait_for(&room, "the flush is counted", |seen| seen.kind(Kind::Flush).count() == 1);
    let (reads, writes) = (seen.kind(Kind::Read), seen.kind(Kind::Write));
    assert_eq!((reads.count(), reads.bytes()), (50, 50 * 4096));
    assert_eq!((writes.count(), writes.bytes()), (400, 400 * 4096));
    assert_eq!((seen.kind(Kind::Discard).count(), reads.all_errors(), seen.in_flight.len()), (0, 0, 0));
    // Reads were alone, and at most eight writes were in flight at once.
    assert!(reads.sum_of_all() > 0 && reads.sum_of_all() <= took, "{reads:?} in {took} ns");
    assert!(writes.sum_of_all() <= 8 * took, "{writes:?} in {took} ns");
    let reader = Reader::open(&room.file("page")).unwrap();
    for (kind, count) in [(Kind::Read, 50), (Kind::Write, 400), (Kind::Flush, 1)] {
        let whole = reader.histogram(kind, None).unwrap();
        assert_eq!(whole.count(), count);
        // The histogram's middle values agree with the sum, to three digits.
        let of_buckets: f64 = whole
            .buckets()
            .iter()
            .map(|(bucket, count)| {
                let (from, to) = stats::bucket_bounds(*bucket);
                (from + to) as f64 / 2.0 * *count as f64
            })
            .sum();
        let sum = seen.kind(kind).sum_of_all() as f64;
        assert!((of_buckets - sum).abs() <= sum / 1000.0 + count as f64, "{of_buckets} and {sum}");
        assert!(seen.kind(kind).sum(Stage::Storage) > 0, "{kind:?} never waited for the storage");
    }
    let identity: serde_json::Value = serde_json::from_str(&seen.identity).unwrap();
    let image = format!("qcow2:{}", room.file("a").display());
    assert_eq!((&identity["image"], &identity["transport"]), (&json!(image), &json!("vhost-user")));
    assert_eq!(disk.stop().0, Some(0));
    let left = snapshot(&room);
    assert_eq!((left.pid, left.kind(Kind::Write).count()), (None, 400), "it was named, and stays");
}

#[test]
fn a_request_that_is_held_is_seen_while_it_is_held() {
    let room = Room::new();
    room.done("image create qcow2:a --size 16M");
    let disk = Disk::serve(&room, WORDS);
    let mut control = Control::connect(&room.file("control.sock"));
    let mut driver = Driver::connect(&room.file("vm.sock"), true);
    control.done(&json!({ "verb": "pause" }));
    driver.offer(ring::Kind::Write, 5);
    let seen = wait_for(&room, "the request is seen", |seen| seen.in_flight(Kind::Write) == 1);
    let request = seen.in_flight[0];
    assert_eq!((request.at, request.len, request.stage()), (5 * 4096, 4096, Stage::Map));
    let older = |seen: &Snapshot| seen.oldest(Kind::Write).is_some_and(|age| age > 50_000_000);
    let seen = wait_for(&room, "it grows older", older);
    assert_eq!(seen.kind(Kind::Write).count(), 0);
    control.done(&json!({ "verb": "resume" }));
    driver.drain();
    let seen = wait_for(&room, "it is counted", |seen| seen.kind(Kind::Write).count() == 1);
    assert!(seen.kind(Kind::Write).sum(Stage::Map) > 50_000_000 && seen.in_flight.is_empty());
    assert_eq!(disk.stop().0, Some(0));
}

#[test]
fn a_process_that_replaces_a_killed_one_continues_its_page() {
    let room = Room::new();
    room.done("image create qcow2:a --size 16M");
    let mut disk = Disk::serve(&room, WORDS);
    let mut driver = Driver::connect(&room.file("vm.sock"), true);
    (0..20).for_each(|block| driver.offer(ring::Kind::Write, block));
    driver.drain();
    wait_for(&room, "all are counted", |seen| seen.kind(Kind::Write).count() == 20);
    let mut control = Control::connect(&room.file("control.sock"));
    control.done(&json!({ "verb": "pause" }));
    (0..7).for_each(|block| driver.offer(ring::Kind::Write, block));
    wait_for(&room, "seven are held", |seen| seen.in_flight(Kind::Write) == 7);
    disk.signal(Signal::KILL);
    disk.child.wait().unwrap();
    let dead = snapshot(&room);
    assert_eq!((dead.in_flight(Kind::Write), dead.kind(Kind::Write).count()), (7, 20), "it can still be read");
    assert_eq!(dead.pid, Some(disk.child.id()));
    let next = Disk::serve(&room, WORDS);
    driver.connect_again();
    driver.drain();
    let seen = wait_for(&room, "all are counted", |seen| seen.kind(Kind::Write).count() == 27);
    assert_eq!((seen.incarnation, seen.in_flight.len(), seen.pid), (2, 0, Some(next.child.id())));
    assert_eq!(next.stop().0, Some(0));
}

#[test]
fn an_upgrade_goes_on_in_the_same_page() {
    let room = Room::new();
    let image = room.image("qcow2", "16M");
    let mut disk = Replaced::serve(&room, &format!("{image} --vhost-user vm.sock --stats-page page"));
    let mut driver = Driver::connect(&room.file("vm.sock"), true);
    for times in 1..=3u64 {
        (0..20).for_each(|block| driver.offer(ring::Kind::Write, block));
        driver.drain();
        wait_for(&room, "all are counted", |seen| seen.kind(Kind::Write).count() == 20 * times);
        let upgrade = disk.upgrade();
        disk.replaced_by(&upgrade.join().unwrap());
        let seen = wait_for(&room, "the new process writes", |seen| seen.incarnation == times + 1);
        assert_eq!(seen.kind(Kind::Write).count(), 20 * times);
        let told = Control::connect(&room.file("control.sock")).done(&json!({ "verb": "stats" }));
        assert_eq!(told["writes"]["count"], 20 * times, "counted once: {told}");
    }
    disk.stop();
}

#[test]
fn a_disk_is_served_without_a_page_where_there_can_be_none() {
    let room = Room::new();
    room.done("image create raw:a --size 16M");
    room.done("image create raw:b --size 16M");
    let first = Disk::serve(&room, "raw:a --nbd a.sock --stats-page page");
    // It announces that it serves a moment before it has its page.
    let begun = Instant::now();
    while Reader::open(&room.file("page")).is_err() {
        assert!(begun.elapsed() < Duration::from_secs(60), "the first one begins no page");
    }
    let mut second = Disk::serve(&room, "raw:b --nbd b.sock --stats-page page");
    second.signal(Signal::TERM);
    let said = second.rest_of_log() + &second.said;
    assert!(said.contains("no statistics page") && said.contains("another process writes it"), "{said}");
    let mut third = Disk::serve(&room, "raw:b --nbd c.sock --stats-page nowhere/page");
    third.signal(Signal::TERM);
    let said = third.rest_of_log() + &third.said;
    assert!(said.contains("no statistics page") && said.contains("nowhere/page"), "{said}");
    assert_eq!(first.stop().0, Some(0));
    room.write("precious", &[7; 9000]);
    let mut fourth = Disk::serve(&room, "raw:b --nbd d.sock --stats-page precious");
    fourth.signal(Signal::TERM);
    let said = fourth.rest_of_log() + &fourth.said;
    assert!(said.contains("it is not empty, and not a statistics page"), "{said}");
    assert!(room.read("precious") == [7; 9000], "a file that was there is overwritten");
}

#[test]
fn a_page_that_nobody_named_goes_with_its_process() {
    let room = Room::new();
    room.done("image create raw:a --size 16M");
    let pages = || std::fs::read_dir(room.file("tapline/stats")).map_or(0, |found| found.count());
    let serve = || {
        let mut command = room.command(TAPLINE);
        // A user's own directory; that of root is the machine's.
        command.env("XDG_RUNTIME_DIR", room.path());
        command.args(["serve", "raw:a", "--nbd", "a.sock"]);
        Disk::start(command)
    };
    if rustix::process::geteuid().is_root() {
        return;
    }
    let mut killed = serve();
    killed.signal(Signal::KILL);
    killed.child.wait().unwrap();
    assert_eq!(pages(), 1);
    let disk = serve();
    assert_eq!(pages(), 2, "a page that is a moment old may be about to be begun");
    assert_eq!(disk.stop().0, Some(0));
    assert_eq!(pages(), 1);
}

#[test]
fn a_disk_survives_a_page_and_a_log_that_are_cut_off() {
    let room = Room::new();
    room.done("image create vhd:a --size 64M");
    let disk = Disk::serve(&room, "vhd:a --nbd nbd.sock --stats-page page");
    let mut client = Nbd::connect(&room.file("nbd.sock")).unwrap();
    client.write(0, &[1; BLOCK]).unwrap();
    let log = std::fs::read_dir(room.file("redo")).unwrap().next().unwrap().unwrap().path();
    for path in [room.file("page"), log] {
        std::fs::File::options().write(true).open(path).unwrap().set_len(0).unwrap();
        client.write(4 << 20, &[2; BLOCK]).unwrap();
        client.flush().unwrap();
    }
    assert_eq!(client.read(4 << 20, BLOCK).unwrap(), [2; BLOCK]);
    assert_eq!(disk.stop().0, Some(0));
    room.sound("vhd:a");
}
