//! Backups that are restored in place, compared byte by byte: what a disk has then, what of it stays, what is refused,
//! and what is left of a restore that does not end well.

use std::fs;
use std::path::Path;
use std::process::Command;

use serde_json::{Value, json};

use crate::backups::{Room, create_target, files_below, images, jobs, machine, register};
use crate::harness::disks::{nothing_leaked, plug, unplug, vbd};
use crate::harness::mounted::Mounted;
use crate::harness::{ABORT_AT, Taplined, kill, not_run, start, wait_until};
use crate::incremental::{self, BLOCK};
use crate::vm;

/// All bytes of a VDI that is not plugged.
fn bytes(daemon: &Taplined, vdi: &str) -> Vec<u8> {
    let path = daemon.room().join("content.raw");
    daemon.done(daemon.post(&format!("/vdis/{vdi}/export"), json!({ "path": path, "format": "raw" })));
    let bytes = fs::read(&path).unwrap();
    fs::remove_file(&path).unwrap();
    bytes
}

#[track_caller]
fn same(now: &[u8], then: &[u8]) {
    assert_eq!(now.len(), then.len());
    let differ = |at: &usize| now[*at..(*at + BLOCK).min(now.len())] != then[*at..(*at + BLOCK).min(then.len())];
    let wrong: Vec<usize> = (0..now.len()).step_by(BLOCK).filter(differ).collect();
    assert_eq!(wrong, Vec::<usize>::new(), "these blocks are not as they were");
}

fn show(daemon: &Taplined, vdi: &str) -> Value {
    daemon.get(&format!("/vdis/{vdi}")).1
}

impl Room {
    fn in_place(&self, vdi: &str, backup: &Value) -> (u16, Value) {
        self.daemon.post(&format!("/vdis/{vdi}/restore"), json!({ "target": self.target, "backup": backup }))
    }

    fn created(&self, name: &str, size: u64, format: &str) -> String {
        let asked = json!({ "sr": self.sr, "name": name, "size": size, "format": format });
        self.daemon.done(self.daemon.post("/vdis", asked))["uuid"].as_str().unwrap().into()
    }

    fn backed_up(&self, vdi: &str) -> Value {
        let made = self.daemon.post(&format!("/vdis/{vdi}/backup"), json!({ "target": self.target }));
        self.daemon.done(made)["backup"].clone()
    }
}

#[test]
fn a_disk_gets_the_content_and_the_size_of_the_backup_and_is_otherwise_the_same() {
    let bed = incremental::bed();
    bed.write(0..100, 1);
    let first = bed.back_up();
    bed.write([3], 2);
    let second = bed.back_up_changes();
    bed.write([5], 2);
    let snapshot = bed.snapshot();
    let then = bed.model.borrow().clone();
    bed.verb(&bed.vdi, "resize", json!({ "size": 2 * incremental::SIZE }));
    bed.write([4, 900], 3);
    let labels = json!({
        "name": "shop", "description": "of the shop", "tags": ["prod"], "other_config": { "owner": "me" },
        "retention": { "daily": 7 },
    });
    let (status, patched) = bed.daemon.patch(&format!("/vdis/{}", bed.vdi), labels);
    assert_eq!(status, 200, "{patched}");
    unplug(&bed.daemon, &bed.vbd);
    bed.daemon.settle();
    let (before, vbd) = (bed.show(&bed.vdi), bed.daemon.get(&bed.vbd).1);

    bed.verb(&bed.vdi, "restore", json!({ "target": bed.target, "backup": second.id }));
    let after = bed.show(&bed.vdi);
    let stays = ["uuid", "name", "description", "tags", "other_config", "retention", "format", "created", "read_only"];
    for field in stays.into_iter().chain(["logical_block_size", "state"]) {
        assert_eq!(after[field], before[field], "{field}");
    }
    assert_eq!((&before["size"], &after["size"]), (&json!(2 * incremental::SIZE), &json!(incremental::SIZE)));
    assert_eq!((&after["depth"], &after["cbt"]["enabled"]), (&json!(1), &json!(true)), "{after}");
    assert!(after["cbt"].get("maps").is_none(), "{after}");
    assert_eq!(bed.daemon.get(&bed.vbd).1, vbd);
    same(&bytes(&bed.daemon, &bed.vdi), &second.content);
    *bed.model.borrow_mut() = second.content.clone();
    let unknown = || {
        let (status, problem) = bed.daemon.get(&format!("/vdis/{}/changes?from={snapshot}", bed.vdi));
        let reason = format!("it was restored from backup {}", second.id.as_str().unwrap());
        assert!(status == 409 && problem["detail"].as_str().unwrap().contains(&reason), "{problem}");
    };
    unknown();
    plug(&bed.daemon, &bed.vbd);
    unknown();
    bed.write([7], 4);
    let third = bed.back_up_fully("it was restored from backup");
    bed.write([8], 5);
    let fourth = bed.back_up_changes();
    assert_eq!(fourth.read, BLOCK as u64);
    [&first, &second, &third, &fourth].into_iter().for_each(|made| bed.check(made));

    unplug(&bed.daemon, &bed.vbd);
    bed.verb(&bed.vdi, "revert", json!({ "snapshot": snapshot }));
    same(&bytes(&bed.daemon, &bed.vdi), &then);
    plug(&bed.daemon, &bed.vbd);
    bed.only(2, 1);
}

/// The map that was in use names nothing of what differs: it must not be taken up again after any kill.
#[test]
fn changes_are_never_known_across_a_restore_whatever_was_killed() {
    let mut bed = incremental::bed();
    bed.write(0..100, 1);
    let mut made = bed.back_up();
    for (nth, at) in ["copy:after", "record", "record:after", "remove", "remove:after"].into_iter().enumerate() {
        bed.write([10 + nth, 200 + nth], 2);
        let snapshot = bed.snapshot();
        bed.write([20 + nth], 3);
        unplug(&bed.daemon, &bed.vbd);
        bed.daemon.restart_with(&[(ABORT_AT, &format!("vdi-restore-in-place:{at}"))]);
        let asked = json!({ "target": bed.target, "backup": made.id });
        bed.daemon.post_and_die(&format!("/vdis/{}/restore", bed.vdi), asked);
        bed.daemon.restart();
        bed.daemon.settle();
        let is_done = at != "copy:after";
        if is_done {
            *bed.model.borrow_mut() = made.content.clone();
        }
        same(&bytes(&bed.daemon, &bed.vdi), &bed.model.borrow());
        plug(&bed.daemon, &bed.vbd);
        bed.write([30 + nth], 4);
        let (status, said) = bed.daemon.get(&format!("/vdis/{}/changes?from={snapshot}", bed.vdi));
        assert_eq!(status == 409, is_done, "{at}: {said}");
        let next = bed.back_up();
        assert_eq!(next.full.is_some(), is_done, "{at}: {:?}", next.full);
        bed.check(&next);
        bed.write([31 + nth], 5);
        made = bed.back_up_changes();
        bed.check(&made);
        bed.daemon.done(bed.daemon.delete(&format!("/vdis/{snapshot}")));
        bed.only(1, 1);
    }
}

#[test]
fn disks_of_each_format_are_restored() {
    let room = Room::new();
    for format in ["qcow2", "vhd", "raw"] {
        let vdi = room.created(format, 16 << 20, format);
        room.write_to(&vdi, &["write -P 1 0 4M", "write -P 2 9M 64k"]);
        let then = bytes(&room.daemon, &vdi);
        // A raw disk has no snapshots here: it is backed up while nothing can write to it.
        let read_only = |now: bool| {
            let asked = json!({ "read_only": now });
            wait_until("it is not read any more", || {
                room.daemon.patch(&format!("/vdis/{vdi}"), asked.clone()).0 == 200
            });
        };
        read_only(format == "raw");
        let backup = room.backed_up(&vdi);
        read_only(false);
        room.write_to(&vdi, &["write -P 3 0 16M"]);
        room.daemon.done(room.in_place(&vdi, &backup));
        same(&bytes(&room.daemon, &vdi), &then);
        let shown = show(&room.daemon, &vdi);
        assert!(shown["format"] == format && shown["physical_utilisation"].as_u64().unwrap() < 8 << 20, "{shown}");
        room.write_to(&vdi, &["write -P 4 1M 1M"]);
    }
}

#[test]
fn what_may_not_be_replaced_is_refused_with_words_and_stays() {
    let room = Room::new();
    room.write(&["write -P 1 0 4M"]);
    let backup = room.back_up()["backup"].clone();
    let other = room.created("other", 16 << 20, "vhd");
    let snapshot = room.daemon.done(room.daemon.post(&format!("/vdis/{}/snapshot", room.vdi), json!({})));
    let snapshot = snapshot["uuid"].as_str().unwrap().to_owned();
    room.write(&["write -P 2 0 1M"]);
    let then = bytes(&room.daemon, &room.vdi);
    let refused = |vdi: &str, backup: &Value, code: &str, words: &str| {
        let (status, problem) = room.in_place(vdi, backup);
        assert!((400..500).contains(&status), "{status} {problem}");
        let text =
            format!("{} {}", problem["detail"].as_str().unwrap(), problem["advice"].as_str().unwrap_or_default());
        assert!(problem["code"] == code && text.contains(words), "{problem}");
    };
    refused(&other, &backup, "state", "--other-disk");
    refused(&snapshot, &backup, "state", &format!("restore its disk instead, VDI {}", room.vdi));
    refused(&room.vdi, &json!("00000000"), "not-found", "no backup");
    let patch = |asked: Value| assert_eq!(room.daemon.patch(&format!("/vdis/{}", room.vdi), asked).0, 200);
    patch(json!({ "read_only": true }));
    refused(&room.vdi, &backup, "read-only", "--read-only false");
    patch(json!({ "read_only": false }));
    let guest = vbd(&room.daemon, &room.vdi, "nbd");
    plug(&room.daemon, &guest);
    refused(&room.vdi, &backup, "in-use", "unplug it first");
    unplug(&room.daemon, &guest);
    let set = |state: &str| {
        let sql = "UPDATE image SET state = ?2 WHERE uuid = (SELECT image FROM vdi WHERE uuid = ?1)";
        room.daemon.catalogue().execute(sql, [&room.vdi, state]).unwrap();
    };
    set("diverged");
    refused(&room.vdi, &backup, "state", "disagree about its files");
    set("ready");
    // Another task has the disk.
    let held = "INSERT INTO claim SELECT ?1, uuid FROM task LIMIT 1";
    room.daemon.catalogue().execute(held, [&room.vdi]).unwrap();
    refused(&room.vdi, &backup, "busy", "is working on");
    room.daemon.catalogue().execute("DELETE FROM claim", []).unwrap();
    same(&bytes(&room.daemon, &room.vdi), &then);

    // The other disk on request, with its own format.
    let asked = json!({ "target": room.target, "backup": backup, "other_disk": true });
    room.daemon.done(room.daemon.post(&format!("/vdis/{other}/restore"), asked));
    room.holds(&other, &["read -P 1 0 4M", "read -P 0 4M 60M"]);
    assert_eq!(show(&room.daemon, &other)["format"], "vhd");
    same(&bytes(&room.daemon, &room.vdi), &then);
    room.only(3);
}

/// The UUID of a disk is no proof: the repository, or a copy of it, may have been used by both.
#[test]
fn a_backup_of_another_host_is_one_of_another_disk() {
    let room = {
        let daemon = start();
        create_target(&daemon.room().join("target"), &[]);
        Room::on(daemon, Value::Null)
    };
    room.write(&["write -P 1 0 4M"]);
    let backup = room.back_up()["backup"].clone();
    room.only(1);
    room.daemon.done(room.daemon.post(&format!("/srs/{}/detach", room.sr), json!({})));
    let other = start();
    let source = json!({ "type": "dir", "path": room.daemon.room().join("disks") });
    other.done(other.post("/srs/introduce", json!({ "uuid": room.sr, "source": source })));
    let registered = json!({ "name": "offsite", "path": room.daemon.room().join("target") });
    let target = other.post("/backup-targets", registered).1["uuid"].clone();
    let restore = |more: Value| {
        let mut asked = json!({ "target": target, "backup": backup });
        asked.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        other.post(&format!("/vdis/{}/restore", room.vdi), asked)
    };
    let (status, problem) = restore(json!({}));
    assert!(status == 409 && problem["detail"].as_str().unwrap().contains("of this host"), "{problem}");
    other.done(restore(json!({ "other_disk": true })));
    same(&bytes(&other, &room.vdi)[..4 << 20], &vec![1; 4 << 20]);
}

#[test]
fn a_disk_whose_file_is_lost_comes_back() {
    let mut room = Room::new();
    room.write(&["write -P 1 0 4M"]);
    let backup = room.back_up()["backup"].clone();
    room.only(1);
    room.daemon.kill();
    fs::remove_file(room.daemon.room().join("disks").join(images(&room).pop_first().unwrap())).unwrap();
    room.daemon.restart();
    room.daemon.done(room.daemon.post(&format!("/srs/{}/scan", room.sr), json!({})));
    assert_eq!(show(&room.daemon, &room.vdi)["state"], "missing");
    room.daemon.done(room.in_place(&room.vdi, &backup));
    assert_eq!(show(&room.daemon, &room.vdi)["state"], "ready");
    room.holds(&room.vdi, &["read -P 1 0 4M", "read -P 0 4M 60M"]);
    room.only(1);
}

/// Begins a restore, stops it before it writes to the new image, and has `disturb` end it.
fn disturbed(room: &Room, backup: &Value, disturb: impl FnOnce(&Value)) -> Value {
    let stopped = room.stop_at_key();
    let begun = std::thread::scope(|scope| {
        let begun = scope.spawn(|| room.in_place(&room.vdi, backup));
        // A process reads the properties of the backup, and another one the list of backups.
        let mut before = Vec::new();
        for _ in 0..2 {
            wait_until("a process waits for the key", || {
                let now = jobs(&room.daemon);
                now.len() == 1 && now != before
            });
            before = jobs(&room.daemon);
            stopped.let_go();
        }
        begun.join().unwrap()
    });
    assert_eq!(begun.0, 202, "{}", begun.1);
    wait_until("the new image is served", || {
        fs::read_dir(room.daemon.room().join("run/restore")).is_ok_and(|mut all| all.next().is_some())
            && jobs(&room.daemon).len() == 1
    });
    disturb(&begun.1);
    if !jobs(&room.daemon).is_empty() {
        stopped.let_go();
    }
    let ended = room.daemon.wait(&begun.1);
    stopped.replace();
    ended
}

#[test]
fn a_restore_that_does_not_end_well_leaves_the_disk_as_it_was() {
    let room = Room::new();
    room.write(&["write -P 1 0 8M"]);
    let backup = room.back_up()["backup"].clone();
    room.write(&["write -P 2 4M 8M"]);
    room.only(1);
    let (then, files) = (bytes(&room.daemon, &room.vdi), images(&room));
    let unchanged = || {
        room.only(1);
        same(&bytes(&room.daemon, &room.vdi), &then);
        assert_eq!(images(&room), files);
    };
    let ended = disturbed(&room, &backup, |task| {
        let (status, _) = room.daemon.post(&format!("/tasks/{}/cancel", task["uuid"].as_str().unwrap()), json!({}));
        assert_eq!(status, 200);
        wait_until("its process has ended", || jobs(&room.daemon).is_empty());
    });
    assert_eq!(ended["state"], "cancelled", "{ended}");
    unchanged();
    // Nobody gets the disk meanwhile.
    let ended = disturbed(&room, &backup, |_| {
        let guest = vbd(&room.daemon, &room.vdi, "nbd");
        let (status, refused) = room.daemon.post(&format!("{guest}/plug"), json!({}));
        assert!(status == 409 && refused["detail"].as_str().unwrap().contains("vdi-restore-in-place"), "{refused}");
        assert_eq!(room.daemon.delete(&guest).0, 204);
        jobs(&room.daemon).iter().for_each(|pid| kill(pid));
        wait_until("its process has ended", || jobs(&room.daemon).is_empty());
    });
    assert_eq!(ended["state"], "failed", "{ended}");
    unchanged();
    for pack in files_below(&room.daemon.room().join("target/packs")) {
        let mut bytes = fs::read(&pack).unwrap();
        let last = bytes.len() - 1;
        bytes[last] ^= 1;
        fs::write(&pack, bytes).unwrap();
    }
    let problem = room.daemon.failed(room.in_place(&room.vdi, &backup));
    assert!(problem["detail"].as_str().unwrap().contains("no sound copy"), "{problem}");
    unchanged();
}

#[test]
fn a_repository_that_becomes_full_leaves_the_disk_as_it_was() {
    let daemon = start();
    let key = daemon.room().join("key");
    create_target(&daemon.room().join("target"), &["--new-key", key.to_str().unwrap()]);
    let place = daemon.room().join("small");
    fs::create_dir(&place).unwrap();
    let Some(_mounted) = Mounted::over(place.clone(), &["-t", "tmpfs", "-o", "size=40M", "tmpfs"]) else {
        return not_run("a full repository: this process may not mount");
    };
    let target = register(&daemon, &json!(key));
    let made = daemon.post("/srs", json!({ "name": "small", "source": { "type": "dir", "path": place } }));
    let sr: String = daemon.done(made)["uuid"].as_str().unwrap().into();
    let room = Room { sr, vdi: String::new(), target, daemon };
    let room = Room { vdi: room.created("web", 32 << 20, "qcow2"), ..room };
    room.write(&["write -P 1 0 8M"]);
    let backup = room.back_up()["backup"].clone();
    room.write(&["write -P 2 4M 4M"]);
    room.only(1);
    let then = bytes(&room.daemon, &room.vdi);
    let files = |place: &Path| fs::read_dir(place).unwrap().count();
    let before = files(&place);
    let fill = place.join("fill");
    let ended = disturbed(&room, &backup, |_| {
        let filled = Command::new("sh").arg("-c").arg("cat /dev/zero > \"$0\" 2>/dev/null").arg(&fill).status();
        assert!(!filled.unwrap().success(), "the repository is not full");
    });
    assert_eq!(ended["state"], "failed", "{ended}");
    fs::remove_file(&fill).unwrap();
    room.only(1);
    same(&bytes(&room.daemon, &room.vdi), &then);
    assert_eq!(files(&place), before);
    // One that is too small is refused at once.
    fs::write(&fill, vec![7; 24 << 20]).unwrap();
    let (status, problem) = room.in_place(&room.vdi, &backup);
    assert_eq!((status, &problem["code"]), (507, &json!("no-space")), "{problem}");
    fs::remove_file(&fill).unwrap();
    room.daemon.done(room.in_place(&room.vdi, &backup));
    room.holds(&room.vdi, &["read -P 1 0 8M"]);
}

/// A machine with two disks that was backed up, and whose disks were written since.
struct Machine {
    room: Room,
    vm: String,
    data: String,
    backups: Vec<Value>,
}

impl Machine {
    fn new() -> Machine {
        let room = Room::new();
        room.write(&["write -P 1 0 1M"]);
        let (vm, data) = machine(&room);
        room.write_to(&data, &["write -P 2 0 1M"]);
        let made = room.daemon.done(room.daemon.post(&format!("/vms/{vm}/backup"), json!({ "target": room.target })));
        let backups = made["disks"].as_array().unwrap().iter().map(|disk| disk["backup"].clone()).collect();
        room.only(2);
        let machine = Machine { room, vm, data, backups };
        machine.write(3);
        machine
    }

    fn write(&self, pattern: u8) {
        let command = format!("write -P {pattern} 0 2M");
        for vdi in [&self.room.vdi, &self.data] {
            self.room.write_to(vdi, &[&command]);
        }
    }

    fn restore(&self, backup: &Value) -> (u16, Value) {
        let asked = json!({ "target": self.room.target, "backup": backup });
        self.room.daemon.post(&format!("/vms/{}/restore", self.vm), asked)
    }

    #[track_caller]
    fn is_restored(&self) {
        self.room.holds(&self.room.vdi, &["read -P 1 0 1M", "read -P 0 1M 63M"]);
        self.room.holds(&self.data, &["read -P 2 0 1M", "read -P 0 1M 15M"]);
    }

    #[track_caller]
    fn is_unchanged(&self, pattern: u8) {
        let command = format!("read -P {pattern} 0 2M");
        for vdi in [&self.room.vdi, &self.data] {
            self.room.holds(vdi, &[&command]);
        }
    }

    #[track_caller]
    fn refused(&self, backup: &Value, words: &str) {
        let (status, problem) = self.restore(backup);
        let text =
            format!("{} {}", problem["detail"].as_str().unwrap(), problem["advice"].as_str().unwrap_or_default());
        assert!((400..500).contains(&status) && text.contains(words), "{status} {problem}");
    }
}

#[test]
fn all_disks_of_a_machine_come_back_and_its_hardware_stays() {
    let machine = Machine::new();
    let daemon = &machine.room.daemon;
    assert_eq!(daemon.patch(&format!("/vms/{}", machine.vm), json!({ "memory": 512 << 20, "tags": ["prod"] })).0, 200);
    let look = || {
        let vbds = daemon.get(&format!("/vbds?vm={}", machine.vm)).1;
        (daemon.get(&format!("/vms/{}", machine.vm)).1, vbds)
    };
    let before = look();
    for backup in &machine.backups {
        machine.write(4);
        let restored = daemon.done(machine.restore(backup));
        assert_eq!(restored["vdis"], json!([machine.room.vdi, machine.data]), "{restored}");
        machine.is_restored();
        assert_eq!(look(), before);
    }
    machine.room.only(2);
}

#[test]
fn a_machine_with_other_disks_than_its_backup_is_refused() {
    let machine = Machine::new();
    let (room, backup) = (&machine.room, &machine.backups[0]);
    let daemon = &room.daemon;
    let alone = room.back_up()["backup"].clone();
    machine.refused(&alone, "disk alone");
    let attach = |vdi: &str, position: u8| {
        let (status, made) = daemon.post("/vbds", json!({ "vm": machine.vm, "vdi": vdi, "position": position }));
        assert_eq!(status, 201, "{made}");
        format!("/vbds/{}", made["uuid"].as_str().unwrap())
    };
    let added = room.created("added", 1 << 20, "qcow2");
    let more = attach(&added, 5);
    machine.refused(backup, "at position 5");
    assert_eq!(daemon.delete(&more).0, 204);
    let vbds = daemon.get(&format!("/vbds?vm={}", machine.vm)).1;
    let of_data = vbds.as_array().unwrap().iter().find(|vbd| vbd["vdi"] == machine.data.as_str()).unwrap();
    assert_eq!(daemon.delete(&format!("/vbds/{}", of_data["uuid"].as_str().unwrap())).0, 204);
    machine.refused(backup, "attach it again");
    machine.is_unchanged(3);
    attach(&machine.data, 3);
    // One disk is in use by another one.
    let guest = vbd(daemon, &machine.data, "nbd");
    plug(daemon, &guest);
    machine.refused(backup, "unplug it first");
    unplug(daemon, &guest);
    assert_eq!(daemon.delete(&guest).0, 204);
    machine.is_unchanged(3);
    // Another machine.
    let hardware = json!({ "name": "other", "driver": "qemu", "memory": 256 << 20, "vcpus": 1 });
    let other = daemon.post("/vms", hardware).1["uuid"].as_str().unwrap().to_owned();
    let asked = json!({ "target": room.target, "backup": backup });
    let (status, problem) = daemon.post(&format!("/vms/{other}/restore"), asked);
    assert!(status == 409 && problem["detail"].as_str().unwrap().contains("another machine"), "{problem}");
    // A disk is gone, on the host or on the target.
    let removed = json!({ "backups": [machine.backups[1]] });
    daemon.done(daemon.post(&format!("/backup-targets/{}/remove-backups", room.target), removed));
    machine.refused(backup, "at position 3");
    let vbds = daemon.get(&format!("/vbds?vm={}", machine.vm)).1;
    for vbd in vbds.as_array().unwrap().iter().filter(|vbd| vbd["vdi"] == machine.data.as_str()) {
        assert_eq!(daemon.delete(&format!("/vbds/{}", vbd["uuid"].as_str().unwrap())).0, 204);
    }
    daemon.done(daemon.delete(&format!("/vdis/{}", machine.data)));
    machine.refused(backup, "was destroyed");
    // Nothing keeps the machine from being used.
    assert_eq!(daemon.delete(&format!("/vms/{}", machine.vm)).0, 204);
}

#[test]
fn a_machine_that_is_killed_at_each_step_has_all_disks_of_one_moment() {
    let mut machine = Machine::new();
    for step in ["copy", "copy:after", "record", "record:after", "remove", "remove:after"] {
        machine.write(5);
        machine.room.only(2);
        machine.room.daemon.restart_with(&[(ABORT_AT, &format!("vm-restore-in-place:{step}"))]);
        let asked = json!({ "target": machine.room.target, "backup": machine.backups[0] });
        machine.room.daemon.post_and_die(&format!("/vms/{}/restore", machine.vm), asked);
        machine.room.daemon.restart();
        machine.room.only(2);
        if step.starts_with("copy") { machine.is_unchanged(5) } else { machine.is_restored() }
    }
    // The second disk is damaged on the target, so the first one stays as well.
    machine.write(6);
    let shown = machine.backups[1].as_str().unwrap();
    let index = files_below(&machine.room.daemon.room().join("target"));
    let index: Vec<_> = index.iter().filter(|path| path.to_string_lossy().contains(&shown[..8])).collect();
    assert!(!index.is_empty(), "the target has no file of this backup");
    index.iter().for_each(|path| fs::write(path, "damaged").unwrap());
    let (status, problem) = machine.restore(&machine.backups[0]);
    assert!(status >= 400 || machine.room.daemon.wait(&problem)["state"] == "failed", "{status} {problem}");
    machine.room.only(2);
    machine.is_unchanged(6);
}

#[test]
fn a_running_or_suspended_machine_is_refused() {
    let Some((daemon, vdis)) = vm::begin("", &["a", "b"]) else { return };
    let guest = vm::machine(&daemon, &vdis);
    create_target(&daemon.room().join("target"), &[]);
    let target = register(&daemon, &Value::Null);
    let made = daemon.done(daemon.post(&format!("{guest}/backup"), json!({ "target": target })));
    let asked = json!({ "target": target, "backup": made["backup"] });
    let restore = || daemon.post(&format!("{guest}/restore"), asked.clone());
    vm::start(&daemon, &guest);
    let (status, problem) = restore();
    assert!(status == 409 && problem["detail"].as_str().unwrap().contains("not halted"), "{problem}");
    daemon.done(daemon.post(&format!("{guest}/suspend"), json!({})));
    let (status, problem) = restore();
    assert!(status == 409 && problem["advice"].as_str().unwrap().contains("drop-memory"), "{problem}");
    let (status, problem) = daemon.post(&format!("/vdis/{}/restore", vdis[0]), asked.clone());
    assert!(status == 409 && problem["detail"].as_str().unwrap().contains("is suspended"), "{problem}");
    assert_eq!(daemon.delete(&format!("{guest}/memory")).0, 200);
    daemon.done(restore());
    vm::start(&daemon, &guest);
    vm::shut_down(&daemon, &guest, json!({ "force": true }));
    daemon.settle();
    nothing_leaked(&daemon);
}
