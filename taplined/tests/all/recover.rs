//! A lost catalogue is not recreated silently: its backup is restored with one command, and without a backup it is
//! rebuilt from the repositories' inventories.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Value, json};

use crate::harness;
use crate::harness::mounted::Mounted;
use crate::harness::nbd::Client;
use crate::harness::{Taplined, disks};

const NO_CATALOGUE: i32 = 6;

/// A daemon, a repository with a disk that has data and a snapshot; the disk is plugged.
struct Bed {
    daemon: Taplined,
    sr: String,
    vdi: String,
    vbd: String,
}

fn bed() -> Bed {
    let daemon = harness::start();
    let sr = daemon.repository("vms");
    let asked = json!({ "sr": sr, "name": "web", "size": 64 << 20, "format": "qcow2" });
    let vdi: String = daemon.done(daemon.post("/vdis", asked))["uuid"].as_str().unwrap().into();
    let vbd = disks::vbd(&daemon, &vdi, "nbd");
    disks::plug(&daemon, &vbd);
    let bed = Bed { daemon, sr, vdi, vbd };
    bed.io(&["write -P 1 0 1M", "flush"]);
    bed.snapshot("before");
    bed.io(&["write -P 2 1M 1M", "flush"]);
    bed
}

impl Bed {
    fn snapshot(&self, name: &str) -> String {
        let made = self.daemon.post(&format!("/vdis/{}/snapshot", self.vdi), json!({ "name": name }));
        self.daemon.done(made)["uuid"].as_str().unwrap().into()
    }

    #[track_caller]
    fn io(&self, commands: &[&str]) {
        let (well, said) = disks::io(&disks::nbd(&self.daemon, &self.vbd), commands);
        assert!(well, "{commands:?}: {said}\n{}", self.daemon.log());
    }

    /// Like [`Bed::io`], while no daemon responds.
    #[track_caller]
    fn io_alone(&self, commands: &[&str]) {
        let place = self.daemon.room().join("run/vbd").join(self.vbd.trim_start_matches("/vbds/"));
        let (well, said) = disks::io(&format!("nbd+unix:///?socket={}/nbd.sock", place.display()), commands);
        assert!(well, "{commands:?}: {said}");
    }

    fn state(&self, name: &str) -> PathBuf {
        self.daemon.room().join("state").join(name)
    }

    fn path(&self) -> PathBuf {
        self.daemon.room().join("vms")
    }

    /// Removes the catalogue.
    fn lose(&self) {
        for suffix in ["", "-wal", "-shm", ".seal"] {
            fs::remove_file(self.state(&format!("catalogue.db{suffix}"))).ok();
        }
    }

    fn kill_disks(&self) {
        for pid in disks::processes(&self.daemon) {
            crate::harness::kill(&pid);
        }
        harness::wait_until("the disks are dead", || disks::processes(&self.daemon).is_empty());
    }

    /// All data about VDIs, except what is local to a host or measured.
    fn vdis(&self) -> Vec<Value> {
        let mut vdis = self.daemon.get("/vdis").1.as_array().unwrap().clone();
        for vdi in &mut vdis {
            for key in ["physical_utilisation", "users"] {
                vdi.as_object_mut().unwrap().remove(key);
            }
        }
        vdis
    }

    #[track_caller]
    fn refused(&mut self) -> String {
        let (code, said) = self.daemon.try_to_restart(&[]).unwrap_err();
        assert_eq!(code, NO_CATALOGUE, "{said}");
        said
    }

    /// Checks that the disk is served by the same process, with all its data, and can be unplugged and plugged.
    fn is_whole(&self, pids: &std::collections::BTreeSet<u32>) {
        assert_eq!(&disks::processes(&self.daemon), pids, "{}", self.daemon.log());
        self.io(&["read -P 1 0 1M", "read -P 2 1M 1M"]);
        disks::unplug(&self.daemon, &self.vbd);
        disks::plug(&self.daemon, &self.vbd);
        self.io(&["read -P 1 0 1M", "read -P 2 1M 1M", "write -P 3 2M 1M"]);
        self.daemon.settle();
        disks::inventory_agrees(&self.daemon);
    }
}

fn mode(path: &Path) -> u32 {
    fs::metadata(path).unwrap().permissions().mode() & 0o777
}

#[test]
fn a_missing_catalogue_is_not_recreated_and_disks_keep_running() {
    let mut bed = bed();
    let pids = disks::processes(&bed.daemon);
    bed.daemon.kill();
    bed.lose();
    let said = bed.refused();
    assert!(said.contains("one existed before") && said.contains("--rebuild") && said.contains("--init"), "{said}");
    bed.io_alone(&["read -P 2 1M 1M", "write -P 2 1M 1M", "flush"]);
    // After a reboot nothing runs, and files in memory are gone, including the disks' logs.
    bed.kill_disks();
    fs::remove_dir_all(bed.daemon.room().join("run")).unwrap();
    let said = bed.refused();
    assert!(said.contains("disks have logs"), "{said}");
    // An empty file counts as missing.
    fs::write(bed.state("catalogue.db"), "").unwrap();
    bed.refused();
    let (code, said) = bed.daemon.command(&["--init"]);
    assert_eq!((code, said.contains("has been rebuilt")), (0, true), "{said}");
    bed.daemon.try_to_restart(&[]).unwrap();
    assert_eq!(bed.daemon.get("/srs").1, json!([]));
    assert!(!pids.is_empty());
    let (code, said) = bed.daemon.command(&["--init"]);
    assert!(code == 4 && said.contains("another taplined is running"), "{code} {said}");
    assert!(bed.daemon.stop());
    let (code, said) = bed.daemon.command(&["--init"]);
    assert!(code == 4 && said.contains("already a usable catalogue"), "{code} {said}");
}

#[test]
fn a_backup_is_restored_with_one_command_and_updated() {
    let mut bed = bed();
    let (status, made) = bed.daemon.post("/host/backups", json!({}));
    assert_eq!(status, 201, "{made}");
    assert_eq!(bed.daemon.get("/host/backups").1, json!([made]));
    let file = PathBuf::from(made["file"].as_str().unwrap());
    assert_eq!((mode(&file), mode(file.parent().unwrap())), (0o600, 0o700));
    let later = bed.snapshot("later");
    let (vdis, pids) = (bed.vdis(), disks::processes(&bed.daemon));
    let (code, said) = bed.daemon.command(&["--restore", "latest"]);
    assert!(code == 4 && said.contains("another taplined is running"), "{code} {said}");
    bed.daemon.kill();
    let damaged = vec![0xff; 8192];
    // The files next to it may contain all of its pages.
    bed.lose();
    fs::write(bed.state("catalogue.db"), &damaged).unwrap();
    let said = bed.refused();
    assert!(said.contains(file.to_str().unwrap()) && said.contains("--restore latest"), "{said}");
    let (code, said) = bed.daemon.command(&["--restore", "latest"]);
    assert_eq!(code, 0, "{said}");
    let kept = said.lines().find_map(|line| line.strip_prefix("the old file was kept as ")).unwrap();
    assert!(kept.contains(".before-restore-") && fs::read(kept).unwrap() == damaged, "{said}");
    bed.daemon.try_to_restart(&[]).unwrap();
    assert_eq!(bed.vdis(), vdis, "{}", bed.daemon.log());
    assert!(bed.vdis().iter().any(|vdi| vdi["uuid"] == later.as_str()));
    bed.is_whole(&pids);
}

/// Neither the catalogue nor a process knows the later changes, but the repository does.
#[test]
fn a_backup_restored_with_dead_disks_loses_nothing() {
    for reboot in [false, true] {
        let mut bed = bed();
        assert_eq!(bed.daemon.post("/host/backups", json!({})).0, 201);
        bed.snapshot("later");
        bed.io(&["write -P 4 4M 1M", "flush"]);
        bed.snapshot("last");
        bed.io(&["write -P 5 5M 1M", "flush"]);
        let resized = bed.daemon.post(&format!("/vdis/{}/resize", bed.vdi), json!({ "size": 128 << 20 }));
        bed.daemon.done(resized);
        bed.io(&["write -P 6 100M 1M", "flush"]);
        bed.daemon.settle();
        disks::inventory_agrees(&bed.daemon);
        let vdis = bed.vdis();
        bed.daemon.kill();
        bed.kill_disks();
        assert_eq!(bed.daemon.command(&["--restore", "latest"]).0, 0);
        if reboot {
            fs::remove_dir_all(bed.daemon.room().join("run/vbd")).unwrap();
            fs::create_dir(bed.daemon.room().join("run/vbd")).unwrap();
            disks::reboot(&bed.daemon);
        }
        bed.daemon.try_to_restart(&[]).unwrap();
        bed.daemon.settle();
        if reboot {
            disks::plug(&bed.daemon, &bed.vbd);
        }
        harness::wait_until("it is served", || disks::state(&bed.daemon, &bed.vbd) == "plugged");
        assert_eq!(bed.vdis(), vdis, "reboot {reboot}: {}", bed.daemon.log());
        bed.io(&["read -P 1 0 1M", "read -P 2 1M 1M", "read -P 4 4M 1M", "read -P 5 5M 1M", "read -P 6 100M 1M"]);
        bed.is_whole(&disks::processes(&bed.daemon));
        assert_eq!(bed.daemon.get("/vdis").1.as_array().unwrap().len(), 4);
    }
}

/// A backup may be taken, and a file copied, at any time.
#[test]
fn a_copy_from_the_middle_of_a_plug_or_unplug_ends_no_disk() {
    let (mut daemon, vdis) = disks::with_disks("[plug]\ninjected-delays = true", &["slow~2000ms"]);
    let vbd = disks::vbd(&daemon, &vdis[0], "nbd");
    let copy = |state: &str| {
        harness::wait_until(state, || disks::state(&daemon, &vbd) == state);
        let (status, made) = daemon.post("/host/backups", json!({}));
        assert_eq!(status, 201, "{made}");
        let kept = daemon.room().join(state);
        fs::copy(made["file"].as_str().unwrap(), &kept).unwrap();
        let catalogue = rusqlite::Connection::open(&kept).unwrap();
        let found: String = catalogue.query_row("SELECT state FROM vbd", [], |row| row.get(0)).unwrap();
        assert_eq!(found, state);
        kept
    };
    let signal = |pid: &Value, how: &str| {
        assert!(Command::new("kill").args([how, &pid.to_string()]).status().unwrap().success());
    };
    let plugged = daemon.post(&format!("{vbd}/plug"), json!({}));
    let plugging = copy("plugging");
    signal(&daemon.done(plugged)["pid"], "-KILL");
    let restarting = copy("restarting");
    harness::wait_until("it is served again", || disks::state(&daemon, &vbd) == "plugged");
    let pid = daemon.get(&vbd).1["pid"].clone();
    signal(&pid, "-STOP");
    let unplugged = daemon.post(&format!("{vbd}/unplug"), json!({ "force": true }));
    let unplugging = copy("unplugging");
    signal(&pid, "-CONT");
    daemon.done(unplugged);
    disks::plug(&daemon, &vbd);
    let (at, pids) = (disks::nbd(&daemon, &vbd), disks::processes(&daemon));
    assert!(disks::io(&at, &["write -P 7 0 1M", "flush"]).0);
    for older in [plugging, restarting, unplugging] {
        for by_hand in [false, true] {
            daemon.kill();
            let path = daemon.room().join("state/catalogue.db");
            if by_hand {
                ["-wal", "-shm", ".seal"].iter().for_each(|suffix| {
                    fs::remove_file(format!("{}{suffix}", path.display())).ok();
                });
                fs::copy(&older, &path).unwrap();
            } else {
                assert_eq!(daemon.command(&["--restore", older.to_str().unwrap()]).0, 0);
            }
            daemon.restart();
            let case = format!("{} by hand {by_hand}: {}", older.display(), daemon.log());
            assert_eq!(
                (disks::state(&daemon, &vbd), disks::processes(&daemon)),
                ("plugged".into(), pids.clone()),
                "{case}"
            );
            let (well, said) = disks::io(&at, &["read -P 7 0 1M"]);
            assert!(well, "{said} {case}");
        }
    }
    disks::unplug(&daemon, &vbd);
    disks::nothing_leaked(&daemon);
}

#[test]
fn a_catalogue_rebuilt_from_repositories_adopts_running_disks() {
    let mut bed = bed();
    let (vdis, pids) = (bed.vdis(), disks::processes(&bed.daemon));
    let host = bed.daemon.get("/host").1["uuid"].clone();
    disks::inventory_agrees(&bed.daemon);
    bed.daemon.kill();
    fs::remove_dir_all(bed.daemon.room().join("state")).unwrap();
    let path = bed.path();
    bed.refused();
    let (code, said) = bed.daemon.command(&["--rebuild", bed.daemon.room().to_str().unwrap()]);
    assert!(code == 4 && said.contains("is not a repository"), "{code} {said}");
    bed.refused();
    let (code, said) = bed.daemon.command(&["--rebuild", path.to_str().unwrap()]);
    assert!(code == 0 && said.contains("2 VDIs in 2 images"), "{code} {said}");
    bed.daemon.try_to_restart(&[]).unwrap();
    assert_eq!(bed.vdis(), vdis, "{}", bed.daemon.log());
    assert_eq!(disks::state(&bed.daemon, &bed.vbd), "plugged", "{}", bed.daemon.log());
    bed.is_whole(&pids);
    // So that the backups of its disks are theirs.
    assert_eq!(bed.daemon.get("/host").1["uuid"], host);
    assert_eq!(bed.daemon.get(&format!("/srs/{}", bed.sr)).1["state"], "attached");
    bed.daemon.stop();
    let (code, said) = bed.daemon.command(&["--rebuild", path.to_str().unwrap()]);
    assert!(code == 4 && said.contains("sr introduce"), "{code} {said}");
}

#[test]
fn a_repository_introduced_to_an_empty_catalogue_brings_its_running_disks() {
    let mut bed = bed();
    let (vdis, pids, path) = (bed.vdis(), disks::processes(&bed.daemon), bed.path());
    bed.daemon.kill();
    bed.lose();
    assert_eq!(bed.daemon.command(&["--init"]).0, 0);
    bed.daemon.try_to_restart(&[]).unwrap();
    assert_eq!((bed.daemon.get("/vbds").1, disks::processes(&bed.daemon)), (json!([]), pids.clone()));
    let source = json!({ "type": "dir", "path": path });
    bed.daemon.done(bed.daemon.post("/srs/introduce", json!({ "uuid": bed.sr, "source": source })));
    assert_eq!(bed.vdis(), vdis, "{}", bed.daemon.log());
    assert_eq!(disks::state(&bed.daemon, &bed.vbd), "plugged", "{}", bed.daemon.log());
    bed.is_whole(&pids);
}

/// The new catalogue is another host of this machine, and yet the disk's redo log belongs to this machine.
#[test]
fn completed_writes_survive_the_loss_of_the_disk_and_the_catalogue() {
    for words in [vec!["--init"], vec!["--rebuild", "vms"]] {
        let mut bed = bed();
        // Not flushed: the allocation of its cluster is only in the log.
        let mut client = Client::connect(bed.daemon.get(&bed.vbd).1["socket"].as_str().unwrap());
        client.write(4 << 20, 4096, 9);
        bed.daemon.kill();
        bed.kill_disks();
        bed.lose();
        let path = bed.path().to_str().unwrap().to_owned();
        let words: Vec<&str> = words.iter().map(|word| if *word == "vms" { path.as_str() } else { *word }).collect();
        let (code, said) = bed.daemon.command(&words);
        assert_eq!(code, 0, "{said}");
        bed.daemon.try_to_restart(&[]).unwrap();
        if words.len() == 1 {
            let source = json!({ "type": "dir", "path": path });
            bed.daemon.done(bed.daemon.post("/srs/introduce", json!({ "uuid": bed.sr, "source": source })));
        }
        bed.vbd = disks::vbd(&bed.daemon, &bed.vdi, "nbd");
        disks::plug(&bed.daemon, &bed.vbd);
        bed.io(&["read -P 9 4M 4k"]);
        disks::unplug(&bed.daemon, &bed.vbd);
        disks::nothing_leaked(&bed.daemon);
    }
}

#[test]
fn a_stopping_daemon_backs_up_only_changes() {
    let mut bed = bed();
    let copies = |bed: &Bed| fs::read_dir(bed.state("backups")).map_or(0, Iterator::count);
    assert_eq!(copies(&bed), 0);
    disks::unplug(&bed.daemon, &bed.vbd);
    bed.daemon.restart();
    assert_eq!(copies(&bed), 1, "{}", bed.daemon.log());
    let first = bed.daemon.get("/host/backups").1;
    assert_eq!(first[0]["reason"], "daily");
    bed.daemon.restart();
    assert_eq!(bed.daemon.get("/host/backups").1, first);
    // A copy is as recent as its source, and a damaged copy is skipped.
    bed.daemon.patch(&format!("/vdis/{}", bed.vdi), json!({ "name": "site" }));
    let (status, made) = bed.daemon.post("/host/backups", json!({}));
    assert_eq!(status, 201);
    assert!(bed.daemon.stop());
    // Its name sorts before the intact one.
    let damaged = made["file"].as_str().unwrap().replace("-asked", "-schema");
    fs::write(&damaged, "no catalogue").unwrap();
    bed.lose();
    let (code, said) = bed.daemon.command(&["--restore", "latest"]);
    assert!(code == 0 && said.contains(&format!("skipping {damaged}: ")), "{code} {said}");
    bed.daemon.try_to_restart(&[]).unwrap();
    assert_eq!(bed.daemon.get(&format!("/vdis/{}", bed.vdi)).1["name"], "site");
}

#[test]
fn a_catalogue_damaged_while_in_use_stops_the_daemon_for_good() {
    let mut bed = bed();
    let path = bed.state("catalogue.db");
    bed.daemon.restart();
    let whole = fs::read(&path).unwrap();
    let damaged: Vec<u8> = whole.iter().enumerate().map(|(at, byte)| if at < 4096 { *byte } else { !byte }).collect();
    fs::write(&path, damaged).unwrap();
    let mut told = false;
    harness::wait_until("somebody is told, or it has ended", || {
        let asked = json!({ "vdi": bed.vdi, "transport": "nbd", "mode": "RO" });
        let answers = [bed.daemon.get("/vdis"), bed.daemon.get("/tasks"), bed.daemon.post("/vbds", asked)];
        told = answers.iter().any(|(status, answer)| *status == 503 && answer["code"] == "damaged");
        assert!(answers.iter().all(|(status, _)| *status != 500), "{answers:?}");
        told
    });
    assert_eq!(bed.daemon.wait_for_death().code(), Some(NO_CATALOGUE), "{}", bed.daemon.log());
    bed.io_alone(&["read -P 2 1M 1M"]);
    assert!(bed.daemon.log().contains("running disks keep running"), "{}", bed.daemon.log());
    let said = bed.refused();
    assert!(said.contains("the catalogue is damaged"), "{said}");
}

/// A restore may be killed after the current catalogue was renamed and before the files next to it were.
#[test]
fn a_killed_restore_can_be_repeated() {
    let mut bed = bed();
    assert_eq!(bed.daemon.post("/host/backups", json!({})).0, 201);
    let vdis = bed.vdis();
    bed.daemon.kill();
    fs::rename(bed.state("catalogue.db"), bed.state("catalogue.db.before-restore-x")).unwrap();
    fs::write(bed.state("catalogue.db.unfinished"), "half of it").unwrap();
    fs::write(bed.state("catalogue.db.unfinished-wal"), "and more").unwrap();
    assert!(bed.state("catalogue.db-wal").exists());
    bed.refused();
    let (code, said) = bed.daemon.command(&["--restore", "latest"]);
    assert_eq!(code, 0, "{said}");
    assert!(!bed.state("catalogue.db-wal").exists() && !bed.state("catalogue.db.unfinished-wal").exists());
    bed.daemon.try_to_restart(&[]).unwrap();
    assert_eq!(bed.vdis(), vdis);
    let mode = mode(&bed.state("catalogue.db"));
    assert_eq!(mode, 0o600);
}

#[test]
fn a_schema_upgrade_is_preceded_by_a_backup() {
    let mut daemon = harness::start();
    assert!(daemon.stop());
    let state = daemon.room().join("state");
    for suffix in ["", "-wal", "-shm", ".seal"] {
        fs::remove_file(state.join(format!("catalogue.db{suffix}"))).ok();
    }
    let old = rusqlite::Connection::open(state.join("catalogue.db")).unwrap();
    old.execute_batch(include_str!("../../../repo/src/catalogue/schema.sql")).unwrap();
    old.pragma_update(None, "user_version", 17).unwrap();
    drop(old);
    daemon.restart();
    let backups = daemon.get("/host/backups").1;
    assert_eq!(backups[0]["reason"], "schema", "{backups}");
    let copy = rusqlite::Connection::open(backups[0]["file"].as_str().unwrap()).unwrap();
    let version: i64 = copy.pragma_query_value(None, "user_version", |row| row.get(0)).unwrap();
    assert_eq!(version, 17);
    drop(copy);
    // An older backup can be restored too: its schema is upgraded in the process.
    assert!(daemon.stop());
    assert_eq!(daemon.command(&["--restore", backups[0]["file"].as_str().unwrap()]).0, 0);
    daemon.restart();
    assert_eq!(daemon.get("/srs").0, 200);
}

/// A small file system over a directory.
fn small(at: PathBuf) -> Option<Mounted> {
    Mounted::over(at, &["-t", "tmpfs", "-o", "size=4m", "small"])
}

fn remount(mounted: &Mounted, how: &str) {
    let again = Command::new("mount").args(["-o", &format!("remount,{how}")]).arg(mounted.path()).status();
    assert!(again.unwrap().success());
}

/// All that is left or mounted of the host is its repository.
#[test]
fn a_mounted_repository_tells_that_there_was_a_catalogue() {
    let mut daemon = harness::start();
    let lose_all = |daemon: &mut Taplined| {
        daemon.kill();
        ["state", "run", "log"].iter().for_each(|lost| fs::remove_dir_all(daemon.room().join(lost)).unwrap());
    };
    for (at, inside) in [("vms", "vms"), ("srv", "srv/vms")] {
        let (at, repository) = (daemon.room().join(at), daemon.room().join(inside));
        fs::create_dir(&at).unwrap();
        let Some(mounted) = small(at) else {
            return harness::not_run("a repository on a file system of its own: this user may mount nothing");
        };
        fs::create_dir_all(&repository).unwrap();
        let source = json!({ "type": "dir", "path": repository });
        daemon.done(daemon.post("/srs", json!({ "name": "vms", "source": source })));
        lose_all(&mut daemon);
        let (code, said) = daemon.try_to_restart(&[]).unwrap_err();
        assert_eq!(code, NO_CATALOGUE, "{said}");
        for word in [repository.to_str().unwrap(), "--init", "--rebuild", "backup"] {
            assert!(said.contains(word), "{word}: {said}");
        }
        // For another daemon of this machine it is no evidence.
        assert_eq!(harness::start().get("/srs").1, json!([]));
        assert_eq!(daemon.command(&["--rebuild", repository.to_str().unwrap()]).0, 0);
        daemon.try_to_restart(&[]).unwrap();
        assert_eq!(daemon.get("/srs").1[0]["state"], "attached");
        lose_all(&mut daemon);
        drop(mounted);
        daemon.try_to_restart(&[]).unwrap();
    }
}

/// A daemon whose state directory is a small file system, with a plugged VBD; `None` if this user may not mount.
fn plugged_on_small() -> Option<(Taplined, String, PathBuf, Mounted)> {
    let mut daemon = harness::start();
    let sr = daemon.repository("vms");
    let vdi = daemon.done(daemon.post("/vdis", json!({ "sr": sr, "name": "a", "size": 8 << 20 })));
    let vbd = disks::vbd(&daemon, vdi["uuid"].as_str().unwrap(), "nbd");
    assert!(daemon.stop());
    let state = daemon.room().join("state");
    let catalogue = fs::read(state.join("catalogue.db")).unwrap();
    let mounted = small(state.clone())?;
    fs::write(state.join("catalogue.db"), catalogue).unwrap();
    daemon.restart();
    disks::plug(&daemon, &vbd);
    Some((daemon, vbd, state, mounted))
}

/// An unplug is past its point of no return when the catalogue runs out of space.
#[test]
fn an_unplug_is_recorded_once_there_is_space() {
    let Some((mut daemon, vbd, state, _mounted)) = plugged_on_small() else {
        return harness::not_run("a state directory that is full: this user may mount nothing");
    };
    let pid = daemon.get(&vbd).1["pid"].to_string();
    let signal = |how: &str| assert!(Command::new("kill").args([how, &pid]).status().unwrap().success());
    // The stopped process keeps the unplug from completing until there is no space left.
    signal("-STOP");
    let (status, task) = daemon.post(&format!("{vbd}/unplug"), json!({ "force": true }));
    assert_eq!(status, 202, "{task}");
    harness::wait_until("it is being unplugged", || disks::state(&daemon, &vbd) == "unplugging");
    fs::write(state.join("filler"), vec![1; 5 << 20]).unwrap_err();
    let (mut refused, mut count) = (0, 0);
    harness::wait_until("the catalogue is full, and its log's space is used up", || {
        count += 1;
        let asked = json!({ "name": format!("vm {count}"), "driver": "qemu", "memory": 64 << 20, "vcpus": 1 });
        refused = if daemon.post("/vms", asked).0 == 507 { refused + 1 } else { 0 };
        refused == 5
    });
    signal("-CONT");
    harness::wait_until("its process has ended", || disks::processes(&daemon).is_empty());
    harness::wait_until("that cannot be recorded", || daemon.log().contains("cannot be recorded; retrying"));
    fs::remove_file(state.join("filler")).unwrap();
    daemon.done((202, task));
    assert_eq!(disks::state(&daemon, &vbd), "unplugged");
    disks::nothing_leaked(&daemon);
    daemon.kill();
}

#[test]
fn a_vanished_state_directory_is_reported_and_changes_are_refused() {
    let daemon = harness::start();
    let sr = daemon.repository("vms");
    let create = |name: &str| daemon.post("/vdis", json!({ "sr": sr, "name": name, "size": 8 << 20 }));
    daemon.done(create("a"));
    let (state, away) = (daemon.room().join("state"), daemon.room().join("away"));
    fs::rename(&state, &away).unwrap();
    let (status, problem) = create("b");
    assert_eq!((status, &problem["code"]), (500, &json!("failed")), "{problem}");
    assert!(problem["detail"].as_str().unwrap().contains("no longer at"), "{problem}");
    assert!(problem["advice"].as_str().unwrap().contains("docs/recover.md"), "{problem}");
    // A new directory under the same path is not the same directory.
    fs::create_dir(&state).unwrap();
    fs::copy(away.join("catalogue.db"), state.join("catalogue.db")).unwrap();
    assert_eq!(create("b").0, 500);
    fs::remove_dir_all(&state).unwrap();
    fs::rename(&away, &state).unwrap();
    daemon.done(create("b"));
    assert_eq!(daemon.get("/vdis").1.as_array().unwrap().len(), 2);
}

#[test]
fn a_full_or_read_only_state_directory_is_reported_without_loss() {
    let mut daemon = harness::start();
    let sr = daemon.repository("vms");
    assert!(daemon.stop());
    let state = daemon.room().join("state");
    let files = ["catalogue.db"].map(|name| (name, fs::read(state.join(name)).unwrap()));
    let Some(mounted) = small(state.clone()) else {
        return harness::not_run("a state directory that is full: this user may mount nothing");
    };
    // Without the mount there is no catalogue: repositories are not used before they are known.
    assert_eq!(fs::read_dir(&state).unwrap().count(), 0);
    files.iter().for_each(|(name, bytes)| fs::write(state.join(name), bytes).unwrap());
    daemon.restart();
    let create = |name: &str| daemon.post("/vdis", json!({ "sr": sr, "name": name, "size": 8 << 20 }));
    daemon.done(create("a"));
    fs::write(state.join("filler"), vec![1; 5 << 20]).unwrap_err();
    let (status, problem) = daemon.post("/host/backups", json!({}));
    assert_eq!((status, &problem["code"]), (507, &json!("no-space")), "{problem}");
    let mut count = 0;
    harness::wait_until("the catalogue is full too", || {
        count += 1;
        let asked = json!({ "name": format!("vm {count}"), "driver": "qemu", "memory": 64 << 20, "vcpus": 1 });
        let (status, problem) = daemon.post("/vms", asked);
        assert!([201, 507].contains(&status), "{problem}");
        let advice = problem["advice"].as_str().unwrap_or_default();
        assert!(status == 201 || advice.contains("free space on the file system of the state directory"), "{problem}");
        status == 507
    });
    let left: Vec<_> = fs::read_dir(state.join("backups")).unwrap().collect();
    assert!(left.is_empty(), "{left:?}");
    fs::remove_file(state.join("filler")).unwrap();
    daemon.done(create("b"));
    assert_eq!(daemon.post("/host/backups", json!({})).0, 201);
    daemon.kill();
    remount(&mounted, "ro");
    let (code, said) = daemon.try_to_restart(&[]).unwrap_err();
    assert!(code == 4 && said.contains("Read-only"), "{code} {said}");
    remount(&mounted, "rw");
    daemon.restart();
    assert_eq!(daemon.get("/vdis").1.as_array().unwrap().len(), 2);
    daemon.settle();
    daemon.kill();
}

/// A disk's process dies while the catalogue's file system is full.
#[test]
fn a_disk_is_restarted_and_recorded_while_the_state_directory_is_full() {
    let Some((mut daemon, vbd, state, _mounted)) = plugged_on_small() else {
        return harness::not_run("a state directory that is full: this user may mount nothing");
    };
    fs::write(state.join("filler"), vec![1; 5 << 20]).unwrap_err();
    assert_eq!(daemon.post("/host/backups", json!({})).0, 507);
    for restarts in 1..=3 {
        let pid = daemon.get(&vbd).1["pid"].clone();
        assert!(Command::new("kill").args(["-KILL", &pid.to_string()]).status().unwrap().success());
        harness::wait_until("it is restarted and recorded", || {
            let (_, vbd) = daemon.get(&vbd);
            vbd["state"] == "plugged" && vbd["restarts"] == restarts && vbd["pid"] != pid
        });
    }
    fs::remove_file(state.join("filler")).unwrap();
    disks::unplug(&daemon, &vbd);
    daemon.kill();
}
