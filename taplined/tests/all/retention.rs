//! Schedules of snapshots, with a clock that the test sets.

use std::cell::Cell;
use std::fs;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use serde_json::{Value, json};

use crate::harness::disks::inventory_agrees;
use crate::harness::{Taplined, start_with, wait_until};

/// A daemon with a disk, and its injected clock.
pub struct Bed {
    pub daemon: Taplined,
    pub sr: String,
    pub vdi: String,
    /// The object with the schedule: its path in the API, and the verb of its tasks.
    pub of: (String, &'static str),
    clock: PathBuf,
    began: Timestamp,
    hours: i64,
    up: u64,
    /// The number of tasks when the clock was set last, until the next wait for one.
    counted: Cell<Option<usize>>,
    _room: tempfile::TempDir,
}

fn set(clock: &Path, now: Timestamp, up: u64) {
    let beside = clock.with_extension("new");
    fs::write(&beside, format!("{now} {up}")).unwrap();
    fs::rename(beside, clock).unwrap();
}

impl Bed {
    /// Starts half past an hour near the current time.
    pub fn new() -> Bed {
        Bed::with("")
    }

    /// Like [`Bed::new`], with these settings.
    pub fn with(settings: &str) -> Bed {
        let room = tempfile::tempdir().unwrap();
        let clock = room.path().join("clock");
        let seconds = Timestamp::now().as_second();
        let began = Timestamp::from_second(seconds - seconds.rem_euclid(3600) + 1800).unwrap();
        set(&clock, began, 0);
        let daemon = start_with(settings, &[("TAPLINED_CLOCK", clock.to_str().unwrap())]);
        let sr = daemon.repository("disks");
        let made = daemon.done(daemon.post("/vdis", json!({ "sr": sr, "name": "web", "size": 8 << 20 })));
        let vdi = made["uuid"].as_str().unwrap().to_owned();
        let of = (format!("/vdis/{vdi}"), "vdi-schedule");
        Bed { daemon, sr, vdi, of, clock, began, hours: 0, up: 0, counted: Cell::default(), _room: room }
    }

    /// Sets the wall clock to `at` hours after the start, when `hours` have passed on the monotonic clock.
    pub fn set_clock(&mut self, at: i64, hours: u64) {
        self.hours = at;
        self.up += hours * 3600;
        // The daemon may read the new time at once, before its schedule is set again.
        let is_up = UnixStream::connect(self.daemon.socket()).is_ok();
        self.counted.set(is_up.then(|| self.kept_tasks().len()));
        set(&self.clock, self.now(), self.up);
    }

    fn now(&self) -> Timestamp {
        self.began + SignedDuration::from_hours(self.hours)
    }

    /// Sets the schedule, which makes the daemon read the clock; waits until it has followed it.
    #[track_caller]
    pub fn keep(&self, schedule: Value) {
        for retention in [json!(null), schedule] {
            let (status, patched) = self.daemon.patch(&self.of.0, json!({ "retention": retention }));
            assert_eq!(status, 200, "{patched}");
        }
    }

    /// Like [`Bed::keep`], when a snapshot is due.
    #[track_caller]
    pub fn keep_and_take(&self, schedule: Value) -> Value {
        let now = self.kept_tasks().len();
        let before = self.counted.take().map_or(now, |counted| counted.min(now));
        self.keep(schedule);
        wait_until("a task has taken a snapshot", || {
            let tasks = self.kept_tasks();
            tasks.len() > before && tasks.iter().all(|task| task["ended"].is_string())
        });
        self.kept_tasks().pop().unwrap()
    }

    /// Like [`Bed::keep`], when none is due.
    pub fn keep_and_take_none(&self, schedule: Value) {
        self.counted.take();
        let before = self.kept_tasks().len();
        self.keep(schedule);
        // There is no event to wait for: a wrongly begun snapshot is found now, or by a later count.
        std::thread::sleep(Duration::from_millis(300));
        assert_eq!(self.kept_tasks().len(), before);
    }

    /// Tasks of schedules, oldest first.
    pub fn kept_tasks(&self) -> Vec<Value> {
        let mut tasks = self.daemon.get("/tasks").1.as_array().unwrap().clone();
        tasks.retain(|task| task["verb"] == self.of.1);
        tasks.sort_by_key(|task| task["created"].as_str().unwrap().to_owned());
        tasks
    }

    /// The hours after the start at which the existing scheduled snapshots were taken.
    pub fn taken(&self) -> Vec<i64> {
        let vdis = self.daemon.get(&format!("/vdis?snapshot_of={}", self.vdi)).1;
        let scheduled = vdis.as_array().unwrap().iter().filter(|vdi| vdi["scheduled"] == true);
        let mut hours: Vec<i64> = scheduled.map(|vdi| self.hour(&vdi["snapshot_time"])).collect();
        hours.sort_unstable();
        hours
    }

    /// Hours from the start to a time.
    pub fn hour(&self, at: &Value) -> i64 {
        let at: Timestamp = at.as_str().unwrap().parse().unwrap();
        (at.as_second() - self.began.as_second()) / 3600
    }

    /// The scheduled snapshot of an hour.
    #[track_caller]
    fn snapshot_at(&self, hour: i64) -> String {
        let at = (self.began + SignedDuration::from_hours(hour)).to_string();
        let vdis = self.daemon.get(&format!("/vdis?snapshot_of={}", self.vdi)).1;
        let found = vdis.as_array().unwrap().iter().find(|vdi| vdi["snapshot_time"] == at.as_str());
        found.unwrap_or_else(|| panic!("{vdis}"))["uuid"].as_str().unwrap().into()
    }
}

#[test]
fn a_schedule_takes_a_snapshot_each_hour_and_keeps_its_number() {
    let mut bed = Bed::new();
    let by_hand = bed.daemon.done(bed.daemon.post(&format!("/vdis/{}/snapshot", bed.vdi), json!({ "name": "mine" })));
    for hour in 0..4 {
        bed.set_clock(hour, u64::from(hour > 0));
        let task = bed.keep_and_take(json!({ "hourly": 2 }));
        assert_eq!(task["state"], "done", "{task}");
        assert_eq!(task["result"]["uuid"], bed.snapshot_at(hour));
    }
    assert_eq!(bed.taken(), [2, 3]);
    // A manual snapshot is neither counted nor destroyed.
    assert_eq!(bed.daemon.get(&format!("/vdis/{}", by_hand["uuid"].as_str().unwrap())).1["name"], "mine");
    bed.keep_and_take_none(json!({ "hourly": 1 }));
    // Superfluous snapshots are destroyed only after the next one is taken.
    assert_eq!(bed.taken(), [2, 3]);
    inventory_agrees(&bed.daemon);
    // A starting daemon takes a snapshot that is due.
    bed.set_clock(4, 1);
    bed.daemon.restart();
    wait_until("a snapshot was taken, and others destroyed", || bed.taken() == [4]);
}

#[test]
fn a_clock_that_jumps_destroys_nothing_and_makes_no_storm() {
    let mut bed = Bed::new();
    for hour in 0..3 {
        bed.set_clock(hour, u64::from(hour > 0));
        bed.keep_and_take(json!({ "hourly": 3 }));
    }
    assert_eq!(bed.taken(), [0, 1, 2]);
    // Back and forth within half an hour: one snapshot at most.
    for hour in [26, 2, 50, -30, 2] {
        bed.set_clock(hour, 0);
        bed.keep_and_take_none(json!({ "hourly": 3 }));
    }
    assert_eq!(bed.taken(), [0, 1, 2]);
    // A day ahead for an hour, and back: nothing is destroyed until the clock has been steady for two hours, and the
    // snapshots taken then do not displace others.
    bed.set_clock(27, 1);
    let task = bed.keep_and_take(json!({ "hourly": 3 }));
    assert!(task["result"]["held"].as_str().unwrap().contains("the clock of this host"), "{task}");
    assert_eq!(bed.taken(), [0, 1, 2, 27]);
    bed.set_clock(4, 1);
    bed.keep_and_take(json!({ "hourly": 3 }));
    bed.set_clock(5, 1);
    bed.keep_and_take(json!({ "hourly": 3 }));
    assert_eq!(bed.taken(), [0, 1, 2, 4, 5, 27]);
    bed.set_clock(6, 1);
    let task = bed.keep_and_take(json!({ "hourly": 3 }));
    assert_eq!(task["result"].get("held"), None, "{task}");
    assert_eq!(bed.taken(), [4, 5, 6, 27]);
    // Ten years without the daemon.
    bed.set_clock(10 * 365 * 24, 10 * 365 * 24 - 6);
    bed.keep_and_take(json!({ "hourly": 3 }));
    assert_eq!(bed.taken(), [6, 27, 10 * 365 * 24]);
}

#[test]
fn a_restarted_daemon_waits_half_a_period_after_the_last_snapshot() {
    let mut bed = Bed::new();
    let set_minutes = |bed: &Bed, minutes: i64| {
        let up = u64::try_from(minutes).unwrap() * 60;
        set(&bed.clock, bed.began + SignedDuration::from_mins(minutes), up);
    };
    // Ten minutes before the end of an hour, and five minutes after it.
    set_minutes(&bed, 20);
    bed.keep_and_take(json!({ "hourly": 3 }));
    set_minutes(&bed, 35);
    bed.daemon.restart();
    bed.keep_and_take_none(json!({ "hourly": 3 }));
    set_minutes(&bed, 51);
    bed.keep_and_take(json!({ "hourly": 3 }));
}

#[test]
fn a_snapshot_in_use_stays_until_it_is_released() {
    let mut bed = Bed::new();
    for hour in 0..3 {
        bed.set_clock(hour, u64::from(hour > 0));
        bed.keep_and_take(json!({ "hourly": 5 }));
    }
    let [cloned, attached, chosen] = [0, 1, 2].map(|hour| bed.snapshot_at(hour));
    let clone = bed.daemon.done(bed.daemon.post(&format!("/vdis/{cloned}/clone"), json!({ "name": "clone" })));
    let (status, vbd) = bed.daemon.post("/vbds", json!({ "vdi": attached, "mode": "RO", "transport": "nbd" }));
    assert_eq!(status, 201, "{vbd}");
    assert_eq!(bed.daemon.patch(&format!("/vdis/{chosen}"), json!({ "scheduled": false })).0, 200);
    bed.set_clock(3, 1);
    bed.keep_and_take(json!({ "hourly": 1 }));
    assert_eq!(bed.taken(), [0, 1, 3]);
    assert_eq!(bed.daemon.delete(&format!("/vbds/{}", vbd["uuid"].as_str().unwrap())).0, 204);
    bed.daemon.done(bed.daemon.delete(&format!("/vdis/{}", clone["uuid"].as_str().unwrap())));
    // The clone's image is removed with its VDI.
    bed.daemon.settle();
    bed.set_clock(4, 1);
    bed.keep_and_take(json!({ "hourly": 1 }));
    assert_eq!(bed.taken(), [4]);
    assert_eq!(bed.daemon.get(&format!("/vdis/{chosen}")).0, 200);
}

#[test]
fn a_snapshot_whose_only_child_is_a_clone_stays() {
    let mut bed = Bed::new();
    for hour in 0..3 {
        bed.set_clock(hour, u64::from(hour > 0));
        bed.keep_and_take(json!({ "hourly": 5 }));
    }
    let [first, cloned, last] = [0, 1, 2].map(|hour| bed.snapshot_at(hour));
    let clone = bed.daemon.done(bed.daemon.post(&format!("/vdis/{cloned}/clone"), json!({ "name": "clone" })));
    // The disk is now based on another state, and this one has the clone as its only child.
    let revert = json!({ "snapshot": first });
    bed.daemon.done(bed.daemon.post(&format!("/vdis/{}/revert", bed.vdi), revert));
    bed.daemon.done(bed.daemon.delete(&format!("/vdis/{last}")));
    bed.daemon.settle();
    bed.set_clock(3, 1);
    bed.keep_and_take(json!({ "hourly": 1 }));
    assert_eq!(bed.taken(), [1, 3]);
    // When the clone is gone, it is no longer in use.
    bed.daemon.done(bed.daemon.delete(&format!("/vdis/{}", clone["uuid"].as_str().unwrap())));
    bed.daemon.settle();
    bed.set_clock(4, 1);
    bed.keep_and_take(json!({ "hourly": 1 }));
    assert_eq!(bed.taken(), [4]);
}

#[test]
fn a_snapshot_that_fails_is_an_event_and_not_repeated_before_the_next_hour() {
    let mut bed = Bed::new();
    bed.keep_and_take(json!({ "hourly": 3 }));
    // The reserve is all space: nothing may be allocated.
    let sr = bed.daemon.get(&format!("/srs/{}", bed.sr)).1;
    let all = sr["space"]["physical_size"].as_u64().unwrap_or_else(|| panic!("{sr}")) - 1;
    let reserve = |bytes: u64| bed.daemon.patch(&format!("/srs/{}", bed.sr), json!({ "reserve": bytes })).0;
    assert_eq!(reserve(all), 200);
    bed.set_clock(1, 1);
    let failed = bed.keep_and_take(json!({ "hourly": 3 }));
    assert_eq!((&failed["state"], &failed["problem"]["code"]), (&json!("failed"), &json!("no-space")), "{failed}");
    assert_eq!(failed["about"][0]["uuid"], bed.vdi.as_str());
    let reserve = |bytes: u64| bed.daemon.patch(&format!("/srs/{}", bed.sr), json!({ "reserve": bytes })).0;
    assert_eq!(reserve(0), 200);
    bed.keep_and_take_none(json!({ "hourly": 3 }));
    assert_eq!(bed.taken(), [0]);
    bed.set_clock(2, 1);
    bed.keep_and_take(json!({ "hourly": 3 }));
    assert_eq!(bed.taken(), [0, 2]);
}

#[test]
fn a_schedule_from_an_inventory_destroys_nothing_for_a_day() {
    let mut bed = Bed::new();
    for hour in 0..3 {
        bed.set_clock(hour, u64::from(hour > 0));
        bed.keep_and_take(json!({ "hourly": 3 }));
    }
    // Fewer are kept now, and the repository is moved before that has had an effect.
    let few = json!({ "retention": { "hourly": 1 } });
    assert_eq!(bed.daemon.patch(&format!("/vdis/{}", bed.vdi), few).0, 200);
    inventory_agrees(&bed.daemon);
    bed.daemon.done(bed.daemon.post(&format!("/srs/{}/detach", bed.sr), json!({})));
    assert_eq!(bed.daemon.post(&format!("/srs/{}/forget", bed.sr), json!({})).0, 204);
    let path = bed.daemon.room().join("disks");
    let source = json!({ "uuid": bed.sr, "source": { "type": "dir", "path": path } });
    let before = bed.kept_tasks().len();
    bed.set_clock(3, 1);
    bed.daemon.done(bed.daemon.post("/srs/introduce", source));
    bed.daemon.restart();
    wait_until("a snapshot was taken", || {
        let tasks = bed.kept_tasks();
        tasks.len() > before && tasks.iter().all(|task| task["ended"].is_string())
    });
    assert_eq!(bed.daemon.get(&format!("/vdis/{}", bed.vdi)).1["retention"], json!({ "hourly": 1 }));
    assert_eq!(bed.taken(), [0, 1, 2, 3]);
    // A clock that is a year ahead does not end that day.
    let ahead = 365 * 24;
    bed.set_clock(ahead, 1);
    bed.daemon.restart();
    wait_until("a snapshot was taken", || bed.taken() == [0, 1, 2, 3, ahead]);
    bed.daemon.settle();
    assert_eq!(bed.taken(), [0, 1, 2, 3, ahead]);
    bed.set_clock(5, 1);
    bed.daemon.restart();
    wait_until("a snapshot was taken", || bed.taken() == [0, 1, 2, 3, 5, ahead]);
    bed.set_clock(30, 25);
    bed.daemon.restart();
    wait_until("a snapshot was taken, and others destroyed", || bed.taken() == [30, ahead]);
}

#[test]
fn an_impossible_schedule_is_refused() {
    let bed = Bed::new();
    let vdi = format!("/vdis/{}", bed.vdi);
    let refused = |patch: Value| {
        let problem = bed.daemon.patch(&vdi, patch).1;
        (problem["code"].as_str().unwrap_or_default().to_owned(), problem["field"].clone())
    };
    assert_eq!(refused(json!({ "retention": {} })), ("invalid".into(), json!("retention")));
    assert_eq!(refused(json!({ "retention": { "hourly": 51 } })), ("invalid".into(), json!("retention")));
    assert_eq!(refused(json!({ "scheduled": true })), ("state".into(), json!("scheduled")));
    let read_only = json!({ "retention": { "daily": 1 }, "read_only": true });
    assert_eq!(refused(read_only), ("state".into(), json!("retention")));
}

/// Takes manual snapshots until the chain has this many images.
fn deepen(bed: &Bed, depth: u64) {
    while bed.daemon.get(&format!("/vdis/{}", bed.vdi)).1["depth"].as_u64().unwrap() < depth {
        bed.daemon.done(bed.daemon.post(&format!("/vdis/{}/snapshot", bed.vdi), json!({})));
    }
}

/// The value of the metric.
pub fn failed_schedules(bed: &Bed) -> f64 {
    let metrics = bed.daemon.exchange("GET", "/metrics", &[], "").body;
    let line = metrics.lines().find(|line| line.starts_with("tapline_failed_schedules"));
    line.unwrap_or_else(|| panic!("{metrics}")).rsplit_once(' ').unwrap().1.parse().unwrap()
}

#[test]
#[ignore = "slow: run by `make test-all`"]
fn a_schedule_of_a_full_chain_shows_why_it_fails_until_there_is_room() {
    let mut bed = Bed::new();
    let vdi = format!("/vdis/{}", bed.vdi);
    deepen(&bed, 60);
    let failed = bed.keep_and_take(json!({ "hourly": 3 }));
    assert_eq!((&failed["state"], &failed["problem"]["code"]), (&json!("failed"), &json!("state")), "{failed}");
    let shown = bed.daemon.get(&vdi).1;
    let why = &shown["retention_problem"];
    assert!(why["detail"].as_str().unwrap().contains("60 images"), "{shown}");
    assert!(why["advice"].as_str().unwrap().contains("destroy unneeded snapshots"), "{shown}");
    assert_eq!(failed_schedules(&bed), 1.0);
    // As advised.
    let snapshots = bed.daemon.get(&format!("/vdis?snapshot_of={}", bed.vdi)).1;
    let one = snapshots.as_array().unwrap().iter().find(|vdi| vdi["scheduled"] != true).unwrap();
    bed.daemon.done(bed.daemon.delete(&format!("/vdis/{}", one["uuid"].as_str().unwrap())));
    bed.set_clock(1, 1);
    let done = bed.keep_and_take(json!({ "hourly": 3 }));
    assert_eq!(done["state"], "done", "{done}");
    assert_eq!(bed.daemon.get(&vdi).1.get("retention_problem"), None);
    assert_eq!(failed_schedules(&bed), 0.0);
}

#[test]
#[ignore = "slow: run by `make test-all`"]
fn a_schedule_of_a_full_chain_destroys_and_merges_first() {
    let mut bed = Bed::new();
    for hour in 0..3 {
        bed.set_clock(hour, u64::from(hour > 0));
        bed.keep_and_take(json!({ "hourly": 3 }));
    }
    deepen(&bed, 60);
    bed.set_clock(3, 1);
    let done = bed.keep_and_take(json!({ "hourly": 1 }));
    assert_eq!(done["state"], "done", "{done}");
    assert_eq!(bed.taken(), [3]);
}

#[test]
fn a_snapshot_uses_what_the_disk_had_written() {
    let bed = Bed::new();
    let vbd = crate::harness::disks::vbd(&bed.daemon, &bed.vdi, "nbd");
    crate::harness::disks::plug(&bed.daemon, &vbd);
    let at = crate::harness::disks::nbd(&bed.daemon, &vbd);
    let (written, said) = crate::harness::disks::io(&at, &["write -P 1 0 4M", "flush"]);
    assert!(written, "{said}");
    let used = |vdi: &str| bed.daemon.get(&format!("/vdis/{vdi}")).1["physical_utilisation"].as_u64().unwrap();
    let made = bed.daemon.done(bed.daemon.post(&format!("/vdis/{}/snapshot", bed.vdi), json!({})));
    assert!(used(made["uuid"].as_str().unwrap()) >= 4 << 20);
    let (written, said) = crate::harness::disks::io(&at, &["write -P 2 0 2M", "flush"]);
    assert!(written, "{said}");
    crate::harness::disks::unplug(&bed.daemon, &vbd);
    assert!(used(&bed.vdi) >= 2 << 20);
}
