//! A damaged catalogue is refused with a message, or everything that the daemon returns is correct.
//!
//! Invariants checked: a start fails with exit code 6 and advice, or the daemon answers every request with the state
//! before the damage; nothing hangs, and no response is an internal error.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::time::SystemTime;

use fastrand::Rng;
use serde_json::{Value, json};

use crate::harness::{Taplined, disks, start};

const NO_CATALOGUE: i32 = 6;

/// Size of a page of SQLite in bytes.
const PAGE: u64 = 4096;

/// A stopped daemon, and its catalogue at that time.
struct Bed {
    daemon: Taplined,
    sr: String,
    sound: Vec<u8>,
    changed: SystemTime,
    known: Value,
}

/// Everything that the daemon returns, except measurements and data about the daemon itself.
fn all(daemon: &Taplined) -> Result<Value, String> {
    let ask = |path: &str| {
        let (status, answer) = daemon.get(path);
        if status == 200 { Ok(answer) } else { Err(format!("{path}: {status} {answer}")) }
    };
    let mut said = json!({
        "host": ask("/host")?["uuid"], "srs": ask("/srs")?, "vdis": ask("/vdis")?, "vbds": ask("/vbds")?,
        "vms": ask("/vms")?, "tokens": ask("/tokens")?,
    });
    for (kind, measured) in [("srs", ["space", "variant"]), ("vdis", ["physical_utilisation", "-"])] {
        for object in said[kind].as_array_mut().unwrap() {
            measured.iter().for_each(|key| drop(object.as_object_mut().unwrap().remove(*key)));
        }
    }
    Ok(said)
}

fn bed() -> Bed {
    let mut daemon = start();
    let sr = daemon.repository("vms");
    for number in 0..12 {
        let asked = json!({ "sr": sr, "name": format!("disk {number}"), "description": "of a guest", "size": 8 << 20 });
        let vdi = daemon.done(daemon.post("/vdis", asked))["uuid"].as_str().unwrap().to_owned();
        daemon.done(daemon.post(&format!("/vdis/{vdi}/snapshot"), json!({ "name": format!("state {number}") })));
        disks::vbd(&daemon, &vdi, "nbd");
    }
    daemon.settle();
    disks::inventory_agrees(&daemon);
    let known = all(&daemon).unwrap();
    assert!(daemon.stop(), "{}", daemon.log());
    let path = daemon.room().join("state/catalogue.db");
    let (sound, changed) = (fs::read(&path).unwrap(), fs::metadata(&path).unwrap().modified().unwrap());
    Bed { daemon, sr, sound, changed, known }
}

impl Bed {
    fn path(&self) -> PathBuf {
        self.daemon.room().join("state/catalogue.db")
    }

    /// Restores the catalogue and changes some of its bytes; returns whether they differ from before.
    fn damage(&self, random: &mut Rng, in_peace: bool) -> bool {
        for suffix in ["-wal", "-shm"] {
            fs::remove_file(self.daemon.room().join(format!("state/catalogue.db{suffix}"))).ok();
        }
        fs::write(self.path(), &self.sound).unwrap();
        let file = File::options().write(true).open(self.path()).unwrap();
        let len = self.sound.len() as u64;
        if random.bool() {
            file.write_all_at(&[0; 4096], random.u64(..len / PAGE) * PAGE).unwrap();
        } else {
            let mut bytes = [0; 20];
            random.fill(&mut bytes);
            file.write_all_at(&bytes, random.u64(..len - 20)).unwrap();
        }
        if in_peace {
            // Decayed data keeps its modification time.
            file.set_modified(self.changed).unwrap();
        }
        fs::read(self.path()).unwrap() != self.sound
    }

    /// Checks that the refusal contains everything needed to repair the catalogue.
    fn refused(&self, seed: u64, (code, said): &(i32, String)) {
        assert_eq!(*code, NO_CATALOGUE, "seed {seed}: {said}");
        assert!(said.contains("the catalogue is damaged") && said.contains("--restore latest"), "seed {seed}: {said}");
    }
}

fn seeds() -> std::ops::Range<u64> {
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse().ok());
    let first = number("TAPLINE_SEED").unwrap_or(1);
    first..first + number("TAPLINE_ROUNDS").unwrap_or(30)
}

#[test]
fn a_byte_changed_after_a_clean_stop_is_detected() {
    let mut bed = bed();
    let sealed = fs::read(bed.daemon.room().join("state/catalogue.db.seal")).unwrap();
    for seed in seeds() {
        let differs = bed.damage(&mut Rng::with_seed(seed), true);
        fs::write(bed.daemon.room().join("state/catalogue.db.seal"), &sealed).unwrap();
        match bed.daemon.try_to_restart(&[]) {
            Err(refused) => bed.refused(seed, &refused),
            Ok(()) => {
                assert!(!differs, "seed {seed}: {}", bed.daemon.log());
                assert_eq!(all(&bed.daemon).unwrap(), bed.known, "seed {seed}");
                assert!(bed.daemon.stop());
            }
        }
    }
}

#[test]
#[ignore = "slow: run by `make test-all`"]
fn a_catalogue_damaged_while_in_use_is_refused_or_works() {
    let mut bed = bed();
    let (mut refused, mut untrue) = (0, Vec::new());
    for seed in seeds() {
        bed.damage(&mut Rng::with_seed(seed), false);
        match bed.daemon.try_to_restart(&[]) {
            Err(why) => {
                bed.refused(seed, &why);
                refused += 1;
            }
            Ok(()) => {
                let said = all(&bed.daemon).unwrap_or_else(|why| panic!("seed {seed}: {why}\n{}", bed.daemon.log()));
                if said != bed.known {
                    untrue.push(seed);
                }
                // A new task must finish.
                let made = bed.daemon.post("/vdis", json!({ "sr": bed.sr, "name": "new", "size": 8 << 20 }));
                if made.0 == 202 {
                    let made = bed.daemon.wait(&made.1);
                    bed.daemon.done(bed.daemon.delete(&format!("/vdis/{}", made["result"]["uuid"].as_str().unwrap())));
                    bed.daemon.settle();
                }
                bed.daemon.kill();
            }
        }
    }
    eprintln!("{:?}: {refused} refused, untrue: {untrue:?}", seeds());
    assert_eq!(untrue, Vec::<u64>::new());
}

/// SQLite silently drops transactions at a damaged end of the write-ahead log; the repositories still have them.
#[test]
#[ignore = "slow: run by `make test-all`"]
fn commits_lost_with_a_damaged_log_are_restored_from_repositories() {
    let mut bed = bed();
    bed.daemon.try_to_restart(&[]).unwrap();
    for number in 0..6 {
        let asked = json!({ "sr": bed.sr, "name": format!("later {number}"), "size": 8 << 20 });
        bed.daemon.done(bed.daemon.post("/vdis", asked));
    }
    bed.daemon.settle();
    disks::inventory_agrees(&bed.daemon);
    let known = all(&bed.daemon).unwrap();
    bed.daemon.kill();
    let state = |suffix: &str| bed.daemon.room().join(format!("state/catalogue.db{suffix}"));
    let paths = ["", "-wal"].map(state);
    let files = paths.clone().map(|path| fs::read(path).unwrap());
    let seeds = seeds();
    for seed in seeds.start..seeds.start + (seeds.end - seeds.start) / 3 {
        let mut random = Rng::with_seed(seed);
        fs::remove_file(bed.daemon.room().join("state/catalogue.db-shm")).ok();
        let mut damaged = files.clone();
        let at = random.usize(..damaged[1].len() - 20);
        random.fill(&mut damaged[1][at..at + 20]);
        paths.iter().zip(&damaged).for_each(|(path, bytes)| fs::write(path, bytes).unwrap());
        bed.daemon.try_to_restart(&[]).unwrap();
        bed.daemon.settle();
        let said = all(&bed.daemon).unwrap();
        assert_eq!(said["vdis"], known["vdis"], "seed {seed}: {}", bed.daemon.log());
        bed.daemon.kill();
    }
}
