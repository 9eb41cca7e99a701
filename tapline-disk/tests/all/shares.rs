//! Disks that share a storage by a page: one that is ahead of another waits, and held requests neither delay anything
//! else nor get lost; whatever happens to the page and to the other processes, each disk continues.
//!
//! The speed of a disk depends on the machine; whether it reports held requests does not. The other disks are simulated
//! by the test, which writes their slots.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::process::Signal;
use serde_json::{Value, json};
use shares::{Owner, PAGE_LEN, Page, Slot, Usable};
use testkit::nbd::{Client, Command};
use testkit::ring::{BLOCK, Driver, Kind};

use crate::tool::control::Control;
use crate::tool::replaced::Replaced;
use crate::tool::served::Disk;
use crate::tool::{Room, noise};

const COUNT: u64 = 64;

/// Serves the image `a` with these names for its socket and its control socket.
fn serve(room: &Room, name: &str, words: &str) -> (Disk, Control) {
    if !room.file(name).exists() {
        room.done(&format!("image create raw:{name} --size 32M"));
    }
    let words = format!("raw:{name} --nbd {name}.sock --control {name}.control --share page {words}");
    let disk = Disk::serve(room, &words);
    (disk, Control::connect(&room.file(&format!("{name}.control"))))
}

fn connect(room: &Room, name: &str) -> Client {
    Client::connect(&room.file(&format!("{name}.sock"))).unwrap()
}

fn share(control: &mut Control) -> Value {
    control.done(&json!({ "verb": "share" }))
}

fn page(room: &Room) -> Page {
    Page::open(File::options().read(true).write(true).open(room.file("page")).unwrap()).unwrap()
}

/// Writes some blocks at once, all different from the previous contents.
fn write(nbd: &mut Client, round: u64) {
    send(nbd, round);
    take_answers(nbd);
}

fn send(nbd: &mut Client, round: u64) {
    (0..COUNT).for_each(|n| nbd.send(Command::Write, n * BLOCK as u64, BLOCK as u64, &block(round, n)).unwrap());
}

fn take_answers(nbd: &mut Client) {
    (0..COUNT).for_each(|_| drop(nbd.answer(0).unwrap()));
}

fn block(round: u64, n: u64) -> Vec<u8> {
    vec![u8::try_from((round * 7 + n) % 251 + 1).unwrap(); BLOCK]
}

fn assert_holds(room: &Room, name: &str, round: u64) {
    let bytes = room.read(name);
    let expected: Vec<u8> = (0..COUNT).flat_map(|n| block(round, n)).collect();
    assert!(bytes[..expected.len()] == expected, "the blocks of round {round}");
}

/// A thread that keeps publishing the state of a simulated disk.
struct Other {
    end: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Other {
    /// Simulates a disk that has all of the storage's depth in flight, and has received nothing of it.
    fn busy(room: &Room) -> Other {
        Other::saying(page(room), |page, turn| {
            let slot = page.claim(Owner::this().unwrap(), Usable::Free).unwrap();
            page.say(slot, Slot { in_flight: 256, waits: true, time: 0, answered: turn }, 100);
        })
    }

    fn saying(page: Page, say: impl Fn(&Page, u64) + Send + 'static) -> Other {
        let end = Arc::new(AtomicBool::new(false));
        let ended = Arc::clone(&end);
        let thread = std::thread::spawn(move || {
            for turn in 1.. {
                say(&page, turn);
                if ended.load(Ordering::Relaxed) {
                    break;
                }
                std::thread::sleep(Duration::from_millis(1));
            }
        });
        Other { end, thread: Some(thread) }
    }

    /// Ends it, and leaves its slot as it is.
    fn end(mut self) {
        self.end.store(true, Ordering::Relaxed);
        self.thread.take().unwrap().join().unwrap();
    }

    /// Ends it like a process that exits normally.
    fn leave(self, room: &Room) {
        self.end();
        let (page, owner) = (page(room), Owner::this().unwrap());
        let slot = page.claim(owner, Usable::Free).unwrap();
        page.release(slot, owner);
    }
}

/// Writes until a request was held by the disk's share; returns the last round.
fn write_until_held(nbd: &mut Client, control: &mut Control) -> u64 {
    for round in 1.. {
        write(nbd, round);
        if share(control)["held"].as_u64() > Some(0) {
            return round;
        }
    }
    unreachable!("it has held nothing");
}

/// A served disk with requests held by its share because of a busy one.
struct Held {
    disk: Disk,
    control: Control,
    nbd: Client,
    other: Other,
    /// The last round that was written.
    round: u64,
}

fn held(room: &Room, words: &str) -> Held {
    let (disk, mut control) = serve(room, "a", words);
    let mut nbd = connect(room, "a");
    write(&mut nbd, 0);
    let other = Other::busy(room);
    let round = write_until_held(&mut nbd, &mut control);
    Held { disk, control, nbd, other, round }
}

#[test]
fn a_disk_is_paced_only_while_another_one_is_behind_its_share() {
    let room = Room::new();
    let (disk, mut control) = serve(&room, "a", "--share-depth 8");
    let mut nbd = connect(&room, "a");
    write(&mut nbd, 0);
    let told = share(&mut control);
    assert_eq!((&told["shared"], &told["weight"], &told["depth"]), (&json!(true), &json!(100), &json!(8)));
    assert_eq!((&told["others"], &told["held"]), (&json!(0), &json!(0)), "{told}");
    let other = Other::busy(&room);
    let round = write_until_held(&mut nbd, &mut control);
    let told = share(&mut control);
    assert_eq!((&told["others"], &told["waiting"]), (&json!(1), &json!(0)), "{told}");
    assert!(told["held_ns"].as_u64() > Some(0), "{told}");
    assert_eq!(control.done(&json!({ "verb": "limit" }))["throttled"], 0, "that is no limit");
    other.leave(&room);
    // The next look shows that it has gone; earlier waits do not count.
    while share(&mut control)["others"] != 0 {
        write(&mut nbd, round);
    }
    assert_eq!(disk.stop().0, Some(0));
    assert_holds(&room, "a", round);
    assert_eq!(page(&room).claim(Owner::this().unwrap(), Usable::Free).unwrap(), 0, "it has given its slot back");
}

/// With one request at a time, each is released when the one before has completed, and not by a timer: the disk sleeps
/// once for each.
#[test]
fn what_waits_goes_on_when_a_request_of_the_same_disk_has_ended() {
    let room = Room::new();
    let Held { disk, mut control, mut nbd, other, round } = held(&room, "--share-depth 1 --polling off");
    let round = round + 1;
    let sleeps = |control: &mut Control| control.done(&json!({ "verb": "stats" }))["sleeps"].as_u64().unwrap();
    let before = (sleeps(&mut control), share(&mut control)["held"].as_u64().unwrap());
    write(&mut nbd, round);
    let after = (sleeps(&mut control), share(&mut control)["held"].as_u64().unwrap());
    assert!(after.1 - before.1 >= COUNT / 2, "most have waited: {before:?} {after:?}");
    // Requests arrive over a socket, which may cause a few more wake-ups.
    assert!(after.0 - before.0 < COUNT * 3 / 2, "{before:?} {after:?}");
    other.end();
    assert_eq!(disk.stop().0, Some(0));
    assert_holds(&room, "a", round);
}

#[test]
fn a_slot_that_says_the_same_for_long_holds_nothing_back_any_more() {
    let room = Room::new();
    let Held { disk, mut control, mut nbd, other, round } = held(&room, "--share-depth 8");
    other.end();
    // Its process was killed, or its storage does not respond.
    while share(&mut control)["others"] != 0 {
        write(&mut nbd, round);
    }
    assert_eq!(disk.stop().0, Some(0));
    assert_holds(&room, "a", round);
}

#[test]
fn a_flush_and_the_end_of_the_process_do_not_wait_for_the_share() {
    let room = Room::new();
    let Held { disk, control: _control, mut nbd, other, round } = held(&room, "--share-depth 1");
    let round = round + 1;
    send(&mut nbd, round);
    connect(&room, "a").flush().unwrap();
    let stopped = disk.stop();
    assert_eq!(stopped.0, Some(0), "{}", stopped.1);
    other.end();
    assert_eq!(page(&room).said(0), Slot::default());
}

#[test]
fn the_slot_of_a_killed_process_is_taken_by_the_next_one() {
    let room = Room::new();
    let (mut first, _control) = serve(&room, "a", "");
    let mut nbd = connect(&room, "a");
    write(&mut nbd, 1);
    let (second, mut control) = serve(&room, "b", "");
    first.signal(Signal::KILL);
    first.child.wait().unwrap();
    // As if it had been killed with all of that in flight.
    page(&room).say(0, Slot { in_flight: 256, waits: true, time: 0, answered: 1 }, 100);
    let mut other = connect(&room, "b");
    write(&mut other, 2);
    assert_eq!(share(&mut control)["shared"], true);
    let (third, mut its_control) = serve(&room, "c", "");
    write(&mut connect(&room, "c"), 3);
    let me = Owner::this().unwrap();
    assert_eq!(page(&room).claim(me, Usable::Free).unwrap(), 2, "three processes had two slots at any time");
    assert!(share(&mut its_control)["others"].as_u64() <= Some(1));
    assert_eq!((second.stop().0, third.stop().0), (Some(0), Some(0)));
    assert_holds(&room, "b", 2);
    assert_holds(&room, "c", 3);
}

#[test]
fn upgrades_keep_weight_and_slot_even_if_they_fail() {
    let room = Room::new();
    let (disk, mut control) = serve(&room, "a", "--share-weight 50 --share-depth 8");
    std::fs::rename(room.file("a.control"), room.file("control.sock")).unwrap();
    let mut disk = Replaced::of(&room, disk);
    let mut nbd = connect(&room, "a");
    write(&mut nbd, 0);
    let other = Other::busy(&room);
    let round = write_until_held(&mut nbd, &mut control);
    assert_eq!(control.done(&json!({ "verb": "share", "weight": 300 }))["weight"], 300);
    page(&room).set_depth(9);
    drop(control);
    let refused = disk.upgrade_to("/bin/false").join().unwrap();
    assert_eq!(refused["error"]["kind"], "failed", "{refused}");
    write(&mut nbd, round + 1);
    for round in [round + 2, round + 3] {
        let answer = disk.upgrade().join().unwrap();
        disk.replaced_by(&answer);
        write(&mut nbd, round);
        let told = share(&mut Control::connect(&room.file("control.sock")));
        assert_eq!((&told["shared"], &told["weight"], &told["depth"]), (&json!(true), &json!(300), &json!(9)));
        let owner = Owner::of(u32::try_from(disk.pid.as_raw_nonzero().get()).unwrap()).unwrap().unwrap();
        assert!(page(&room).keep(0, owner), "the slot is that of the process that serves");
    }
    other.end();
    drop(nbd);
    disk.stop();
    assert_holds(&room, "a", round + 3);
}

#[test]
fn requests_held_by_the_share_are_executed_once_by_the_next_process() {
    let room = Room::new();
    room.done("image create raw:a --size 32M");
    let words = "raw:a --vhost-user vm.sock --control control.sock --share page --share-depth 1";
    let mut disk = Disk::serve(&room, words);
    let mut control = Control::connect(&room.file("control.sock"));
    let mut driver = Driver::connect(&room.file("vm.sock"), true);
    let other = Other::busy(&room);
    let mut block = 0;
    while share(&mut control)["held"].as_u64() == Some(0) {
        (0..50).for_each(|n| driver.prepare(Kind::Write, block + n));
        block = (block + 50) % 4000;
        driver.kick();
        driver.drain();
    }
    (0..100).for_each(|n| driver.prepare(Kind::Write, block + n));
    driver.kick();
    drop(control);
    disk.signal(Signal::KILL);
    disk.child.wait().unwrap();
    let disk = Disk::serve(&room, words);
    driver.connect_again();
    driver.drain();
    other.end();
    assert_eq!(disk.stop().0, Some(0));
    driver.check(&room.read("a"));
}

/// A compromised process of another disk may write anything anywhere in the page.
#[test]
fn a_disk_serves_while_its_page_is_filled_with_anything() {
    let room = Room::new();
    let (disk, mut control) = serve(&room, "a", "");
    let mut nbd = connect(&room, "a");
    write(&mut nbd, 0);
    let file = File::options().read(true).write(true).open(room.file("page")).unwrap();
    let vandal = Other::saying(page(&room), move |_, turn| {
        let mut bytes = noise(turn, PAGE_LEN);
        // Sometimes all zeroes, so that a slot can be claimed, and taken away again.
        if turn % 3 == 0 {
            bytes.fill(0);
        }
        file.write_all_at(&bytes, 0).unwrap();
    });
    (1..=50).for_each(|round| write(&mut nbd, round));
    vandal.end();
    // All slots are in use, and then none is.
    let file = File::options().write(true).open(room.file("page")).unwrap();
    for (byte, is_shared) in [(0x5a, false), (0, true)] {
        file.write_all_at(&vec![byte; PAGE_LEN], 0).unwrap();
        while share(&mut control)["shared"] != is_shared {
            write(&mut nbd, 51);
        }
    }
    let (code, said) = disk.stop();
    assert_eq!(code, Some(0), "{said}");
    assert!(said.contains("shared with other disks again"), "{said}");
    assert_holds(&room, "a", 51);
}

/// A process that may write to the file of `--share` may truncate it at any time.
#[test]
fn a_page_that_is_made_shorter_is_left_and_the_disk_is_served() {
    let room = Room::new();
    let Held { disk, mut control, mut nbd, other, round } = held(&room, "--share-depth 1");
    let round = round + 1;
    send(&mut nbd, round);
    // While requests are held.
    File::options().write(true).open(room.file("page")).unwrap().set_len(100).unwrap();
    take_answers(&mut nbd);
    other.end();
    let told = share(&mut control);
    assert_eq!((&told["shared"], &told["waiting"]), (&json!(false), &json!(0)), "{told}");
    write(&mut nbd, round + 1);
    let (code, said) = disk.stop();
    assert!(code == Some(0) && said.contains("made shorter"), "{said}");
    assert_holds(&room, "a", round + 1);
}

#[test]
fn a_disk_leaves_its_page_when_it_is_told_to() {
    let room = Room::new();
    let Held { disk, mut control, mut nbd, other, round } = held(&room, "--share-depth 1");
    let round = round + 1;
    let (kind, _) = control.refused(&json!({ "verb": "share", "alone": true, "weight": 7 }));
    assert_eq!(kind, "invalid");
    send(&mut nbd, round);
    assert_eq!(control.done(&json!({ "verb": "share", "alone": true }))["shared"], false);
    take_answers(&mut nbd);
    let held = share(&mut control)["held"].clone();
    write(&mut nbd, round + 1);
    let told = share(&mut control);
    assert_eq!((&told["shared"], &told["held"]), (&json!(false), &held), "nothing waits for a share any more");
    other.leave(&room);
    assert_eq!(page(&room).claim(Owner::this().unwrap(), Usable::Free).unwrap(), 0, "it has given its slot back");
    assert_eq!(disk.stop().0, Some(0));
    assert_holds(&room, "a", round + 1);
}

#[test]
fn a_disk_is_served_without_a_share_where_the_page_is_none() {
    let room = Room::new();
    std::fs::write(room.file("page"), "a letter").unwrap();
    let (disk, mut control) = serve(&room, "a", "");
    assert!(disk.said.contains("not a page of shares"), "{}", disk.said);
    write(&mut connect(&room, "a"), 1);
    let told = share(&mut control);
    assert_eq!((&told["shared"], &told["held"]), (&json!(false), &json!(0)));
    let (kind, message) = control.refused(&json!({ "verb": "share", "weight": 200 }));
    assert!(kind == "state" && message.contains("no other disk"), "{kind}: {message}");
    assert_eq!(disk.stop().0, Some(0));
    assert_eq!(std::fs::read(room.file("page")).unwrap(), b"a letter");
}

#[test]
fn a_weight_out_of_range_is_refused_and_changes_nothing() {
    let room = Room::new();
    let (disk, mut control) = serve(&room, "a", "--share-weight 7");
    for weight in [0, 10_001] {
        let (kind, message) = control.refused(&json!({ "verb": "share", "weight": weight }));
        assert!(kind == "invalid" && message.contains("give 1 to 10000"), "{kind}: {message}");
    }
    assert_eq!(share(&mut control)["weight"], 7);
    assert_eq!(disk.stop().0, Some(0));
}

#[test]
fn a_disk_that_shares_sleeps_while_it_is_idle() {
    let room = Room::new();
    let (disk, mut control) = serve(&room, "a", "--polling off");
    let mut nbd = connect(&room, "a");
    write(&mut nbd, 0);
    let other = Other::busy(&room);
    write_until_held(&mut nbd, &mut control);
    // The one timer that is left from held requests.
    std::thread::sleep(Duration::from_millis(150));
    let sleeps = |control: &mut Control| control.done(&json!({ "verb": "stats" }))["sleeps"].as_u64().unwrap();
    let before = sleeps(&mut control);
    std::thread::sleep(Duration::from_millis(300));
    // It is only woken by the queries, and by nothing that the other one does; the last timer may fire late.
    let after = sleeps(&mut control);
    assert!(after - before <= 4, "{} sleeps", after - before);
    other.end();
    assert_eq!(disk.stop().0, Some(0));
}

#[test]
fn the_ranges_of_the_command_line_are_those_that_disks_take() {
    assert_eq!((control::share::WEIGHTS, control::share::DEPTHS), (shares::WEIGHTS, shares::DEPTHS));
    assert_eq!((control::share::WEIGHT, control::share::DEPTH), (shares::WEIGHT, shares::DEPTH));
}
