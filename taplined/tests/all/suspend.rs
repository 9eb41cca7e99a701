//! VMs whose memory is saved and that resume from it: with a real QEMU whose guest is a boot sector that counts on
//! its disk, and records its start time.

use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::PathBuf;

use serde_json::{Value, json};

use crate::harness::disks::{nothing_leaked, processes};
use crate::harness::{ABORT_AT, Taplined, wait_until};
use crate::vm::{begin, machine, power, shut_down, start};

/// The sector in which the guest counts.
const SECTOR: usize = 64;

/// A daemon with a VM that counts on its disk.
struct Bed {
    daemon: Taplined,
    vm: String,
    vdi: String,
    file: PathBuf,
}

/// The guest's last write: its start time and its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Count {
    start: u32,
    number: u32,
}

impl Bed {
    /// `None` without QEMU, which is reported.
    fn new() -> Option<Bed> {
        let (daemon, _) = begin("", &["other"])?;
        let sr = daemon.get("/srs").1[0]["uuid"].clone();
        let asked = json!({ "sr": sr, "name": "counts", "size": 16 << 20, "format": "raw" });
        let vdi = daemon.done(daemon.post("/vdis", asked))["uuid"].as_str().unwrap().to_owned();
        let name = daemon.get(&format!("/vdis/{vdi}")).1["file"].as_str().unwrap().to_owned();
        let file = daemon.room().join("disks").join(name);
        let mut disk = std::fs::OpenOptions::new().write(true).open(&file).unwrap();
        std::io::Write::write_all(&mut disk, &testkit::firmware::counts_in(SECTOR as u64)).unwrap();
        let vm = machine(&daemon, &[]);
        let uuid = vm.trim_start_matches("/vms/");
        let (status, vbd) = daemon.post("/vbds", json!({ "vdi": vdi, "vm": uuid, "bootable": true }));
        assert_eq!(status, 201, "{vbd}");
        Some(Bed { daemon, vm, vdi, file })
    }

    fn count(&self) -> Count {
        let bytes = std::fs::read(&self.file).unwrap();
        let word = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
        Count { start: word(512 * SECTOR), number: word(512 * SECTOR + 4) }
    }

    /// Waits until the guest has counted further.
    fn counts_on(&self, from: Count) -> Count {
        wait_until("the guest counts", || self.count().number > from.number.saturating_add(3));
        self.count()
    }

    fn started(&self) -> Count {
        start(&self.daemon, &self.vm);
        self.counts_on(Count { start: 0, number: 0 })
    }

    fn suspend(&self) -> (u16, Value) {
        self.daemon.post(&format!("{}/suspend", self.vm), json!({}))
    }

    fn suspended(&self) -> Value {
        self.daemon.done(self.suspend());
        let vm = self.daemon.get(&self.vm).1;
        assert_eq!(vm["power"], "suspended", "{vm}");
        vm
    }

    /// Checks that the VM is suspended with a file, and nothing of it runs.
    #[track_caller]
    fn is_suspended(&self) -> Count {
        let vm = self.daemon.get(&self.vm).1;
        assert_eq!((&vm["power"], vm.get("pid")), (&json!("suspended"), None), "{vm}");
        let file = std::fs::metadata(vm["suspended"]["file"].as_str().unwrap()).unwrap();
        assert_eq!((file.len(), file.mode() & 0o777), (vm["suspended"]["size"].as_u64().unwrap(), 0o600));
        assert!(processes(&self.daemon).is_empty());
        nothing_leaked(&self.daemon);
        self.count()
    }

    /// Checks that the guest resumes from its memory instead of booting, and that the file is removed.
    #[track_caller]
    fn resumes(&self, from: Count) {
        let running = start(&self.daemon, &self.vm);
        assert_eq!((&running["power"], running.get("suspended")), (&json!("running"), None), "{running}");
        assert_eq!(self.counts_on(from).start, from.start, "it was booted instead");
        self.no_file();
    }

    #[track_caller]
    fn no_file(&self) {
        let left = std::fs::read_dir(self.daemon.room().join("state/suspended"));
        let left: Vec<_> = left.map(|all| all.map(|one| one.unwrap().path()).collect()).unwrap_or_default();
        assert!(left.is_empty(), "{left:?}");
    }

    fn code_of(&self, answer: (u16, Value)) -> String {
        answer.1["code"].as_str().unwrap_or_else(|| panic!("{answer:?}")).to_owned()
    }
}

fn said(problem: &Value) -> &str {
    problem["detail"].as_str().unwrap_or_else(|| panic!("{problem}"))
}

#[test]
fn a_repository_with_a_disk_of_a_suspended_vm_is_not_detached_and_says_why() {
    let Some(bed) = Bed::new() else { return };
    bed.started();
    bed.suspended();
    let sr = bed.daemon.get("/srs").1[0]["uuid"].as_str().unwrap().to_owned();
    let (status, refused) = bed.daemon.post(&format!("/srs/{sr}/detach"), json!({}));
    assert_eq!((status, &refused["code"]), (409, &json!("in-use")), "{refused}");
    assert!(said(&refused).contains("is suspended") && said(&refused).contains(&sr), "{refused}");
    // As advised.
    assert!(refused["advice"].as_str().unwrap().contains("tapline vm drop-memory"), "{refused}");
    assert_eq!(bed.daemon.delete(&format!("{}/memory", bed.vm)).0, 200);
    bed.daemon.done(bed.daemon.post(&format!("/srs/{sr}/detach"), json!({})));
}

#[test]
fn a_suspended_guest_resumes_where_it_was() {
    let Some(bed) = Bed::new() else { return };
    let first = bed.started();
    bed.suspended();
    let then = bed.is_suspended();
    assert_eq!(then.start, first.start);
    bed.resumes(then);
    // Again, by the other verb.
    bed.suspended();
    let then = bed.is_suspended();
    bed.daemon.done(bed.daemon.post(&format!("{}/resume", bed.vm), json!({})));
    assert_eq!(bed.counts_on(then).start, first.start);
    assert_eq!(shut_down(&bed.daemon, &bed.vm, json!({ "force": true }))["power"], "halted");
    nothing_leaked(&bed.daemon);
    bed.no_file();
}

#[test]
fn a_suspended_vm_and_its_disks_cannot_be_changed() {
    let Some(bed) = Bed::new() else { return };
    let Bed { daemon, vm, vdi, .. } = &bed;
    bed.started();
    bed.suspended();
    let then = bed.is_suspended();
    for change in [json!({ "memory": 128 << 20 }), json!({ "vcpus": 1 }), json!({ "platform": { "nic": "user" } })] {
        let (_, refused) = daemon.patch(vm, change);
        assert!(refused["code"] == "state" && said(&refused).contains("is suspended"), "{refused}");
        assert!(refused["advice"].as_str().unwrap().contains("tapline vm drop-memory"), "{refused}");
    }
    let uuid = vm.trim_start_matches("/vms/");
    let vbd = format!("/vbds/{}", daemon.get(&format!("/vbds?vm={uuid}")).1[0]["uuid"].as_str().unwrap());
    let other = daemon.get("/vdis?match=other").1[0]["uuid"].clone();
    assert_eq!(bed.code_of(daemon.post("/vbds", json!({ "vdi": other, "vm": uuid }))), "state");
    assert_eq!(bed.code_of(daemon.delete(&vbd)), "state");
    assert_eq!(bed.code_of(daemon.post(&format!("{vbd}/plug"), json!({}))), "state");
    let elsewhere = crate::harness::disks::vbd(daemon, vdi, "nbd");
    let (_, refused) = daemon.post(&format!("{elsewhere}/plug"), json!({}));
    assert!(refused["code"] == "in-use" && said(&refused).contains("is suspended"), "{refused}");
    assert_eq!(daemon.delete(&elsewhere).0, 204);
    for (verb, asked) in
        [("resize", json!({ "size": 32 << 20 })), ("snapshot", json!({})), ("clone", json!({ "name": "c" }))]
    {
        let (_, refused) = daemon.post(&format!("/vdis/{vdi}/{verb}"), asked);
        assert!(refused["code"] == "in-use" && said(&refused).contains("is suspended"), "{verb}: {refused}");
    }
    assert_eq!(bed.code_of(daemon.delete(&format!("/vdis/{vdi}"))), "in-use");
    for verb in ["suspend", "pause", "shutdown"] {
        assert_eq!(bed.code_of(daemon.post(&format!("{vm}/{verb}"), json!({}))), "state", "{verb}");
    }
    assert_eq!(daemon.get("/vms?power=suspended").1.as_array().unwrap().len(), 1);
    // Properties other than the hardware may change.
    assert_eq!(daemon.patch(vm, json!({ "description": "asleep" })).0, 200);
    bed.resumes(then);
}

#[test]
fn a_paused_guest_is_paused_again_when_it_is_resumed() {
    let Some(bed) = Bed::new() else { return };
    let first = bed.started();
    bed.daemon.done(bed.daemon.post(&format!("{}/pause", bed.vm), json!({})));
    assert_eq!(bed.suspended()["suspended"]["paused"], true);
    let then = bed.is_suspended();
    assert_eq!(start(&bed.daemon, &bed.vm)["power"], "paused");
    bed.no_file();
    assert_eq!(bed.count(), then);
    bed.daemon.done(bed.daemon.post(&format!("{}/resume", bed.vm), json!({})));
    assert_eq!(bed.counts_on(then).start, first.start);
}

#[test]
fn memory_can_be_discarded_alone_or_with_its_vm() {
    let Some(bed) = Bed::new() else { return };
    let Bed { daemon, vm, .. } = &bed;
    let memory = format!("{vm}/memory");
    assert_eq!(bed.code_of(daemon.delete(&memory)), "state");
    let first = bed.started();
    bed.suspended();
    let (status, halted) = daemon.delete(&memory);
    assert_eq!((status, &halted["power"]), (200, &json!("halted")), "{halted}");
    bed.no_file();
    let second = {
        start(daemon, vm);
        wait_until("it was booted", || bed.count().start != first.start);
        bed.count()
    };
    assert_ne!(second.start, first.start);
    bed.suspended();
    assert_eq!(daemon.delete(vm).0, 204);
    bed.no_file();
    assert_eq!(
        daemon.done(daemon.post(&format!("/vdis/{}/resize", bed.vdi), json!({ "size": 32 << 20 })))["size"],
        32 << 20
    );
}

#[test]
fn memory_whose_file_or_disk_has_changed_is_not_resumed() {
    let Some(mut bed) = Bed::new() else { return };
    bed.started();
    let suspended = bed.suspended();
    let then = bed.is_suspended();
    let file = PathBuf::from(suspended["suspended"]["file"].as_str().unwrap());
    let aside = file.with_extension("aside");
    let refused = |bed: &Bed, why: &str| {
        let (_, problem) = bed.daemon.post(&format!("{}/start", bed.vm), json!({}));
        assert!(said(&problem).contains(why), "{problem}");
        assert_eq!(power(&bed.daemon, &bed.vm), "suspended");
    };
    std::fs::rename(&file, &aside).unwrap();
    refused(&bed, "cannot be opened");
    let whole = std::fs::read(&aside).unwrap();
    std::fs::write(&file, &whole[..whole.len() - 1]).unwrap();
    refused(&bed, "bytes, and had");
    std::fs::write(&file, vec![0; whole.len()]).unwrap();
    refused(&bed, "does not begin as one of Tapline");
    // A file that QEMU rejects: the VM stays suspended, with a problem.
    let mut damaged = whole.clone();
    damaged[(256 << 10)..(256 << 10) + 4].copy_from_slice(b"????");
    std::fs::write(&file, damaged).unwrap();
    let failed = bed.daemon.failed(bed.daemon.post(&format!("{}/start", bed.vm), json!({})));
    assert_eq!(failed["code"], "failed", "{failed}");
    assert!(!bed.daemon.get(&bed.vm).1["problem"].is_null());
    std::fs::rename(&aside, &file).unwrap();
    assert_eq!(bed.is_suspended(), then);
    // Another program has written to the disk.
    let before = std::fs::metadata(&bed.file).unwrap().modified().unwrap();
    let disk = std::fs::File::options().write(true).open(&bed.file).unwrap();
    disk.set_modified(before + std::time::Duration::from_secs(1)).unwrap();
    refused(&bed, "was written to since it was suspended");
    disk.set_modified(before).unwrap();
    drop(disk);
    bed.daemon.restart();
    assert_eq!(std::fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600);
    bed.resumes(then);
}

/// An interrupted start has had the disk open; then an earlier state of the disk is restored.
#[test]
fn a_disk_restored_during_an_interrupted_start_is_detected() {
    let Some(mut bed) = Bed::new() else { return };
    bed.started();
    let old = std::fs::read(&bed.file).unwrap();
    bed.suspended();
    bed.daemon.restart_with(&[(ABORT_AT, "vm-start:plug:after")]);
    bed.daemon.post(&format!("{}/start", bed.vm), json!({}));
    bed.daemon.wait_for_death();
    let pid: i64 = bed.daemon.catalogue().query_row("SELECT pid FROM vbd WHERE pid > 0", [], |row| row.get(0)).unwrap();
    crate::harness::kill(&pid);
    wait_until("the disk's process is gone", || !std::path::Path::new(&format!("/proc/{pid}/exe")).exists());
    std::fs::write(&bed.file, old).unwrap();
    bed.daemon.restart_with(&[]);
    bed.daemon.settle();
    wait_until("it is suspended", || power(&bed.daemon, &bed.vm) == "suspended");
    let (_, problem) = bed.daemon.post(&format!("{}/start", bed.vm), json!({}));
    assert!(said(&problem).contains("was written to since it was suspended"), "{problem}");
}

/// A catalogue from before the suspend is restored: the memory is all that is left of the guest.
#[test]
fn memory_that_the_catalogue_does_not_know_is_kept() {
    let Some(mut bed) = Bed::new() else { return };
    bed.started();
    let before = bed.daemon.room().join("before");
    let catalogue = bed.daemon.catalogue();
    catalogue.execute("VACUUM INTO ?1", [before.to_str().unwrap()]).unwrap();
    let suspended = bed.suspended();
    let file = PathBuf::from(suspended["suspended"]["file"].as_str().unwrap());
    drop(catalogue);
    bed.daemon.kill();
    let place: String = {
        let known = bed.daemon.catalogue();
        known.query_row("SELECT file FROM pragma_database_list WHERE name = 'main'", [], |row| row.get(0)).unwrap()
    };
    for suffix in ["-wal", "-shm"] {
        std::fs::remove_file(format!("{place}{suffix}")).ok();
    }
    std::fs::copy(&before, &place).unwrap();
    for _ in 0..2 {
        bed.daemon.restart_with(&[]);
        bed.daemon.settle();
        wait_until("it is halted", || power(&bed.daemon, &bed.vm) == "halted");
    }
    assert!(file.with_extension("unclaimed").exists() || file.exists(), "the memory is gone");
}

#[test]
fn a_suspend_that_is_cancelled_leaves_the_guest_running() {
    let Some(bed) = Bed::new() else { return };
    let first = bed.started();
    let (_, task) = bed.suspend();
    bed.daemon.post(&format!("/tasks/{}/cancel", task["uuid"].as_str().unwrap()), json!({}));
    // It may have been too late for that.
    if bed.daemon.wait(&task)["state"] == "cancelled" {
        assert_eq!(power(&bed.daemon, &bed.vm), "running");
        bed.no_file();
        assert_eq!(bed.counts_on(bed.count()).start, first.start);
        bed.suspended();
    }
    bed.resumes(bed.is_suspended());
}

/// The daemon is killed before and after each step of the job.
#[test]
#[ignore = "slow: run by `make test-all`"]
fn a_suspend_is_completed_or_undone_after_any_kill() {
    let Some(mut bed) = Bed::new() else { return };
    let first = bed.started();
    let points =
        ["save", "save:after", "record", "record:after", "end", "end:after"].map(|at| format!("vm-suspend:{at}"));
    let ends = ["vm-end:unplug", "vm-end:unplug:after"].map(str::to_owned);
    for point in points.into_iter().chain(ends) {
        bed.daemon.restart_with(&[(ABORT_AT, &point)]);
        bed.daemon.post(&format!("{}/suspend", bed.vm), json!({}));
        bed.daemon.wait_for_death();
        bed.daemon.restart_with(&[]);
        bed.daemon.settle();
        let undone = point.contains(":save");
        assert_eq!(power(&bed.daemon, &bed.vm), if undone { "running" } else { "suspended" }, "{point}");
        if undone {
            bed.no_file();
            assert_eq!(bed.counts_on(bed.count()).start, first.start, "{point}");
        } else {
            let then = bed.is_suspended();
            bed.resumes(then);
            assert_eq!(bed.count().start, first.start, "{point}");
        }
    }
}

/// The same for a resume: its memory is loaded at most once.
#[test]
#[ignore = "slow: run by `make test-all`"]
fn a_resume_is_completed_or_undone_after_any_kill() {
    let Some(mut bed) = Bed::new() else { return };
    let first = bed.started();
    for at in ["plug", "plug:after", "start:after", "record", "record:after", "continue:after"] {
        bed.suspended();
        let then = bed.is_suspended();
        bed.daemon.restart_with(&[(ABORT_AT, &format!("vm-start:{at}"))]);
        bed.daemon.post(&format!("{}/start", bed.vm), json!({}));
        bed.daemon.wait_for_death();
        bed.daemon.restart_with(&[]);
        bed.daemon.settle();
        if ["record:after", "continue:after"].contains(&at) {
            assert_eq!(power(&bed.daemon, &bed.vm), "running", "{at}");
            assert_eq!(bed.counts_on(then).start, first.start, "{at}");
            bed.no_file();
        } else {
            wait_until("it is suspended", || power(&bed.daemon, &bed.vm) == "suspended");
            assert_eq!(bed.is_suspended(), then, "{at}");
            bed.resumes(then);
        }
    }
}

/// QEMU dies while the daemon lives: as soon as its memory is complete.
#[test]
fn a_qemu_that_dies_when_its_memory_is_complete_leaves_a_halted_vm() {
    let Some(bed) = Bed::new() else { return };
    bed.started();
    let pid: i64 = bed.daemon.catalogue().query_row("SELECT pid FROM vm", [], |row| row.get(0)).unwrap();
    let uuid = bed.vm.trim_start_matches("/vms/").to_owned();
    let saved = bed.daemon.room().join(format!("state/suspended/{uuid}.memory"));
    let (_, task) = bed.suspend();
    wait_until("its memory is complete, or the task has ended", || {
        saved.exists() || bed.daemon.get(&format!("/tasks/{}", task["uuid"].as_str().unwrap())).1["state"] != "running"
    });
    std::process::Command::new("kill").args(["-9", &pid.to_string()]).status().unwrap();
    let over = bed.daemon.wait(&task);
    // It may have been recorded before the kill.
    let expected = if over["state"] == "done" { "suspended" } else { "halted" };
    wait_until("it is over", || power(&bed.daemon, &bed.vm) == expected);
    if expected == "halted" {
        wait_until("nothing is left", || !saved.exists());
        start(&bed.daemon, &bed.vm);
    }
}

#[test]
fn a_qemu_that_dies_while_its_memory_is_saved_leaves_a_halted_vm() {
    let Some(mut bed) = Bed::new() else { return };
    bed.started();
    bed.daemon.restart_with(&[(ABORT_AT, "vm-suspend:record")]);
    bed.daemon.post(&format!("{}/suspend", bed.vm), json!({}));
    bed.daemon.wait_for_death();
    let pid: i64 = bed.daemon.catalogue().query_row("SELECT pid FROM vm", [], |row| row.get(0)).unwrap();
    crate::harness::kill(&pid);
    bed.daemon.restart_with(&[]);
    bed.daemon.settle();
    wait_until("it is halted", || power(&bed.daemon, &bed.vm) == "halted");
    bed.no_file();
    nothing_leaked(&bed.daemon);
}
