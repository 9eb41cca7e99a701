//! Disks of virtual machines that are handed over to a new process, or whose process dies, while the guest uses
//! vhost-user: it keeps writing and reading at queue depth 128, and whatever process is killed, each request is
//! completed once and returns what was written last.

use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;

use fastrand::Rng;
use serde_json::json;
use testkit::ring::{DEPTH, Driver};

use crate::harness::disks::{nothing_leaked, plug, processes, state, unplug, vbd, with_disks};
use crate::harness::{self, Taplined, wait_until};

/// All points of an upgrade at which the daemon may die.
const POINTS: [&str; 8] =
    ["start", "start:after", "ask", "ask:after", "answer:after", "record", "record:after", "end:after"];

/// A guest that writes and reads over one connection.
struct Guest {
    end: Arc<AtomicBool>,
    answered: Arc<AtomicU64>,
    thread: JoinHandle<Driver>,
}

impl Guest {
    fn begin(mut driver: Driver) -> Guest {
        let (end, answered) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(driver.answered)));
        let (ends, counter) = (end.clone(), answered.clone());
        let mut random = Rng::with_seed(driver.answered);
        let thread = std::thread::spawn(move || {
            while !ends.load(Ordering::SeqCst) {
                driver.work(&mut random);
                counter.store(driver.answered, Ordering::SeqCst);
            }
            driver
        });
        Guest { end, answered, thread }
    }

    /// Waits until all requests in flight, and more, have been answered.
    #[track_caller]
    fn makes_progress(&self) {
        let before = self.answered.load(Ordering::SeqCst);
        let more = || self.answered.load(Ordering::SeqCst) > before + u64::from(2 * DEPTH);
        wait_until("the guest goes on", || more() || self.thread.is_finished());
        assert!(!self.thread.is_finished(), "the guest has found a fault");
    }

    /// Stops it, with requests in flight.
    fn pause(self) -> Driver {
        self.end.store(true, Ordering::SeqCst);
        self.thread.join().expect("the guest has found a fault")
    }
}

/// A daemon with a plugged disk, and a guest that uses it; its frontend supports the inflight region or does not.
fn served(recorded: bool) -> (Taplined, String, Driver) {
    let (daemon, vdis) = with_disks("", &["disk"]);
    let vbd = vbd(&daemon, &vdis[0], "vhost-user");
    plug(&daemon, &vbd);
    let socket = daemon.get(&vbd).1["socket"].as_str().unwrap().to_owned();
    let driver = Driver::connect(Path::new(&socket), recorded);
    (daemon, vbd, driver)
}

#[track_caller]
fn upgrade(daemon: &Taplined, vbd: &str) {
    let before = daemon.get(vbd).1;
    let upgraded = daemon.done(daemon.post(&format!("{vbd}/upgrade"), json!({})));
    let now = daemon.get(vbd).1;
    assert!(now["pid"] != before["pid"] && upgraded["replaced"] == before["pid"], "{upgraded}");
    // No process has died.
    for key in ["state", "restarts", "problem", "socket"] {
        assert_eq!(now[key], before[key], "{key}");
    }
}

/// Checks that all requests are answered, nothing leaks, and the image contains the last writes.
fn all_is_well(daemon: &Taplined, vbd: &str, mut driver: Driver) {
    driver.drain();
    nothing_leaked(daemon);
    // An unplug waits for that.
    driver.leave();
    unplug(daemon, vbd);
    nothing_leaked(daemon);
    let [image, copy] = ["qcow2:disks/disk.qcow2", "raw:copy"];
    for words in [&["image", "check", image][..], &["image", "convert", image, copy]] {
        let output = Command::new(harness::disk_program()).args(words).current_dir(daemon.room()).output().unwrap();
        assert!(output.status.success(), "{output:?}");
    }
    driver.check(&std::fs::read(daemon.room().join("copy")).unwrap());
}

#[test]
fn a_guest_keeps_its_connection_across_upgrades() {
    for recorded in [true, false] {
        let (daemon, vbd, driver) = served(recorded);
        let guest = Guest::begin(driver);
        for _ in 0..5 {
            guest.makes_progress();
            upgrade(&daemon, &vbd);
            nothing_leaked(&daemon);
        }
        guest.makes_progress();
        all_is_well(&daemon, &vbd, guest.pause());
        assert!(!daemon.log().contains("its process ended"), "{}", daemon.log());
    }
}

#[test]
#[ignore = "slow: run by `make test-all`"]
fn a_guest_survives_a_daemon_killed_during_an_upgrade() {
    let (mut daemon, vbd, driver) = served(true);
    let guest = Guest::begin(driver);
    for point in POINTS {
        daemon.restart_with(&[("TAPLINED_ABORT_AT", &format!("vbd-upgrade:{point}"))]);
        guest.makes_progress();
        daemon.post_and_die(&format!("{vbd}/upgrade"), json!({}));
        guest.makes_progress();
        daemon.restart();
        let now = daemon.get(&vbd).1;
        assert_eq!((&now["state"], &now["restarts"]), (&json!("plugged"), &json!(0)), "{point}: {now}");
        assert_eq!(json!(processes(&daemon)), json!([now["pid"]]), "{point}");
        guest.makes_progress();
        upgrade(&daemon, &vbd);
        nothing_leaked(&daemon);
    }
    guest.makes_progress();
    all_is_well(&daemon, &vbd, guest.pause());
}

/// Requests in flight are handed over a second time: first taken over from a killed process, then passed on in an
/// upgrade.
#[test]
#[ignore = "slow: run by `make test-all`"]
fn a_guest_loses_nothing_if_its_disk_is_killed_around_upgrades() {
    for recorded in [true, false] {
        let (daemon, vbd, mut driver) = served(recorded);
        let mut restarts = 0;
        for round in 0..6 {
            let guest = Guest::begin(driver);
            guest.makes_progress();
            let before = daemon.get(&vbd).1["pid"].clone();
            if round % 2 == 0 {
                upgrade(&daemon, &vbd);
                guest.makes_progress();
            }
            let before = if round % 2 == 0 { daemon.get(&vbd).1["pid"].clone() } else { before };
            // In some rounds another process is being started as well.
            let task = (round % 3 == 2).then(|| daemon.post(&format!("{vbd}/upgrade"), json!({})).1);
            Command::new("kill").args(["-9", &before.to_string()]).status().unwrap();
            driver = guest.pause();
            if let Some(task) = task {
                daemon.wait(&task);
            }
            wait_until("it is served again", || {
                let now = daemon.get(&vbd).1;
                state(&daemon, &vbd) == "plugged" && now["pid"] != before
            });
            let now = daemon.get(&vbd).1["restarts"].as_u64().unwrap();
            let connection_is_there = now == restarts;
            restarts = now;
            if !connection_is_there {
                driver.connect_again();
            }
            // Right after it was revived, with its predecessor's requests in flight being processed one at a time.
            upgrade(&daemon, &vbd);
        }
        assert!(restarts >= 3, "{restarts}: {}", daemon.log());
        let guest = Guest::begin(driver);
        guest.makes_progress();
        all_is_well(&daemon, &vbd, guest.pause());
    }
}
