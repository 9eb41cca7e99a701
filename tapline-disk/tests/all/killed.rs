//! A guest that survives its disk's process, which is killed at random moments under load and restarted.
//!
//! Invariants: each request is completed once and without an error, none is executed after its completion, and reads as
//! well as the final image show what was written last. `TAPLINE_KILLS` sets the number of kills, `TAPLINE_SEED` the
//! random seed.

use std::fs::File;
use std::time::{Duration, Instant};

use fastrand::Rng;
use rustix::fs::{FlockOperation, fcntl_lock};
use rustix::process::Signal;
use testkit::ring::Driver;

use crate::tool::served::Disk;
use crate::tool::{Room, from_environment};

/// Runs a guest at queue depth 128 whose disk's process is killed this many times.
fn survive(recorded: bool, kills: u64, format: &str) {
    let seed = from_environment("TAPLINE_SEED").unwrap_or(1);
    println!("TAPLINE_SEED={seed} TAPLINE_KILLS={kills}, recorded: {recorded}, {format}");
    let mut random = Rng::with_seed(seed);
    let room = Room::new();
    let image = room.image(format, "16M");
    let words = format!("{image} --vhost-user vm.sock");
    let mut disk = Disk::serve(&room, &words);
    let mut driver = Driver::connect(&room.file("vm.sock"), recorded);
    let (mut unanswered, mut before) = (0, 0);
    for kill in 0..kills {
        // Half of them survive the quarantine after a death.
        let answered = driver.answered + 256 * random.u64(..2);
        let begun = Instant::now();
        while driver.answered < answered {
            assert!(begun.elapsed() < Duration::from_secs(60), "nothing goes on");
            driver.work(&mut random);
        }
        let rounds = random.u64(..60);
        for _ in 0..rounds {
            driver.work(&mut random);
        }
        // Some are killed while they recover.
        disk.signal(Signal::KILL);
        disk.child.wait().unwrap();
        unanswered += driver.unanswered();
        wait_for_storage(&room);
        disk = Disk::serve(&room, &words);
        driver.connect_again();
        if kill % 64 == 63 {
            driver.drain();
            if format == "raw" {
                driver.check(&room.read("a"));
            }
            assert!(driver.answered > before, "nothing goes on");
            before = driver.answered;
        }
    }
    driver.drain();
    println!("{} requests answered, {unanswered} in flight at kills", driver.answered);
    assert!(unanswered > 0, "nothing was in flight at any kill");
    assert_eq!(disk.stop().0, Some(0));
    if format != "raw" {
        room.sound_and_closed(&image);
    }
    room.done(&format!("image convert {image} raw:b"));
    driver.check(&room.read("b"));
}

/// Waits until the last I/O of the killed process is over, for which the kernel keeps its lock: storage may be slow.
fn wait_for_storage(room: &Room) {
    for name in ["a", "a.data"].iter().filter(|name| room.file(name).exists()) {
        let image = File::options().write(true).open(room.file(name)).unwrap();
        fcntl_lock(&image, FlockOperation::LockExclusive).unwrap();
    }
}

#[test]
#[ignore = "slow: run by `make test-all`"]
fn a_guest_with_inflight_recording_survives_kills() {
    survive(true, from_environment("TAPLINE_KILLS").unwrap_or(50), "raw");
}

#[test]
#[ignore = "slow: run by `make test-all`"]
fn a_guest_without_inflight_recording_survives_kills() {
    survive(false, from_environment("TAPLINE_KILLS").unwrap_or(50), "raw");
}

/// Most of its writes allocate: their metadata is in no file when the process dies.
#[test]
#[ignore = "slow: run by `make test-all`"]
fn a_guest_on_an_image_that_allocates_survives_kills() {
    for format in ["vhd", "qcow2", "data-file"] {
        survive(true, from_environment("TAPLINE_KILLS").unwrap_or(30), format);
        survive(false, from_environment("TAPLINE_KILLS").unwrap_or(15), format);
    }
}
