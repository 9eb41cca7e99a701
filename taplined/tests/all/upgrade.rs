//! Disks of the real daemon that are handed over to a new process while a client keeps its connection: successfully,
//! with failures at various points, and with the daemon killed at each of them.

use std::fs;
use std::io::{BufRead, BufReader, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::AsFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags, SocketType, sendmsg, socketpair,
};
use serde_json::{Value, json};

use crate::harness;
use crate::harness::disks::{ask_disk, control, nothing_leaked, plug, processes, state, unplug, vbd, with_disks};
use crate::harness::nbd::{BLOCK, Client, Writer};
use crate::harness::{Taplined, wait_until};

fn socket(daemon: &Taplined, vbd: &str) -> String {
    daemon.get(vbd).1["socket"].as_str().unwrap().into()
}

fn pid(daemon: &Taplined, vbd: &str) -> Value {
    daemon.get(vbd).1["pid"].clone()
}

#[track_caller]
fn upgrade(daemon: &Taplined, vbd: &str) -> Value {
    daemon.done(daemon.post(&format!("{vbd}/upgrade"), json!({})))
}

/// A daemon with a plugged disk, and a client that writes.
fn written() -> (Taplined, String, Writer) {
    let (daemon, vdis) = with_disks("", &["disk"]);
    let vbd = vbd(&daemon, &vdis[0], "nbd");
    plug(&daemon, &vbd);
    let writer = Writer::begin(Client::connect(&socket(&daemon, &vbd)));
    writer.makes_progress();
    (daemon, vbd, writer)
}

#[test]
fn a_client_keeps_its_connection_across_upgrades() {
    let (daemon, vbd, writer) = written();
    for _ in 0..5 {
        let before = daemon.get(&vbd).1;
        let upgraded = upgrade(&daemon, &vbd);
        let now = daemon.get(&vbd).1;
        assert!(now["pid"] != before["pid"] && upgraded["replaced"] == before["pid"], "{upgraded}");
        assert_eq!((&upgraded["pid"], &upgraded["uuid"]), (&now["pid"], &now["uuid"]));
        assert!(upgraded["pause_us"].is_u64(), "{upgraded}");
        assert!(upgraded["note"].as_str().unwrap().contains("the same version"), "{upgraded}");
        // No process has died.
        assert_eq!((&now["state"], &now["restarts"], &now["problem"]), (&json!("plugged"), &json!(0), &Value::Null));
        assert_eq!(now["socket"], before["socket"]);
        writer.makes_progress();
        nothing_leaked(&daemon);
    }
    let mut old = writer.end();
    // Other clients find it at the same place.
    let mut another = Client::connect(&socket(&daemon, &vbd));
    another.write(0, BLOCK, 77);
    assert_eq!(old.read(0, BLOCK), vec![77; BLOCK]);
    drop((old, another));
    unplug(&daemon, &vbd);
    nothing_leaked(&daemon);
    assert!(!daemon.log().contains("its process ended"), "{}", daemon.log());
}

#[test]
fn an_unplugged_disk_cannot_be_upgraded() {
    let (daemon, vdis) = with_disks("[storage]\nlost-interval = 1", &["disk"]);
    let vbd = vbd(&daemon, &vdis[0], "nbd");
    let refused = |what: &str| {
        let (status, refused) = daemon.post(&format!("{vbd}/upgrade"), json!({}));
        assert_eq!((status, &refused["code"]), (409, &json!("state")), "{refused}");
        assert!(refused["detail"].as_str().unwrap().contains(what) && refused["advice"].is_string(), "{refused}");
    };
    refused("is not plugged");
    plug(&daemon, &vbd);
    fs::rename(daemon.room().join("disks"), daemon.room().join("away")).unwrap();
    crate::harness::kill(&pid(&daemon, &vbd));
    wait_until("it is being started again", || state(&daemon, &vbd) == "restarting");
    refused("being restarted");
    fs::rename(daemon.room().join("away"), daemon.room().join("disks")).unwrap();
    wait_until("it is served", || state(&daemon, &vbd) == "plugged");
    let missing = "/vbds/9b1deb4d-3b7d-4bad-9bdd-2b0d7b3dcb6d/upgrade";
    assert_eq!(daemon.post(missing, json!({})).0, 404);
    unplug(&daemon, &vbd);
    nothing_leaked(&daemon);
}

/// All points of an upgrade at which the daemon may die.
const POINTS: [&str; 8] =
    ["start", "start:after", "ask", "ask:after", "answer:after", "record", "record:after", "end:after"];

#[test]
#[ignore = "slow: run by `make test-all`"]
fn a_daemon_killed_during_an_upgrade_leaves_one_known_process() {
    let (mut daemon, vbd, writer) = written();
    for point in POINTS {
        daemon.restart_with(&[("TAPLINED_ABORT_AT", &format!("vbd-upgrade:{point}"))]);
        daemon.post_and_die(&format!("{vbd}/upgrade"), json!({}));
        daemon.restart();
        let now = daemon.get(&vbd).1;
        assert_eq!((&now["state"], &now["restarts"], &now["problem"]), (&json!("plugged"), &json!(0), &Value::Null));
        let running = processes(&daemon);
        assert_eq!(json!(running), json!([now["pid"]]), "{point}");
        nothing_leaked(&daemon);
        writer.makes_progress();
        // The daemon that has reattached the disk can upgrade it again.
        upgrade(&daemon, &vbd);
        nothing_leaked(&daemon);
        writer.makes_progress();
    }
    drop(writer.end());
    unplug(&daemon, &vbd);
    nothing_leaked(&daemon);
    assert!(!daemon.log().contains("killing a"), "somebody had to be killed: {}", daemon.log());
}

/// A daemon with its disks' program in its own directory, where it can be replaced.
fn with_program() -> (Taplined, String, Writer, PathBuf) {
    // All disks have the same user: a program that replaces theirs kills another process.
    let (mut daemon, vdis) = with_disks("disk-user = \"nobody\"", &["disk"]);
    // The disks' user must have access; the daemon's own directories are closed to others as before.
    fs::set_permissions(daemon.room(), fs::Permissions::from_mode(0o755)).unwrap();
    let program = daemon.room().join("tapline-disk");
    testkit::program::copy(&harness::disk_program(), &program);
    let path = daemon.room().join("taplined.toml");
    let config = fs::read_to_string(&path).unwrap();
    let others: Vec<&str> = config.lines().filter(|line| !line.starts_with("disk-program")).collect();
    fs::write(&path, format!("disk-program = {program:?}\n{}\n", others.join("\n"))).unwrap();
    daemon.restart();
    let vbd = vbd(&daemon, &vdis[0], "nbd");
    plug(&daemon, &vbd);
    let writer = Writer::begin(Client::connect(&socket(&daemon, &vbd)));
    writer.makes_progress();
    (daemon, vbd, writer, program)
}

/// Replaces a program with a script, as an installation does.
fn install(program: &Path, script: &str) {
    let new = program.with_extension("new");
    testkit::program::script(&new, &format!("# In the place of tapline-disk.\n{script}"));
    fs::rename(&new, program).unwrap();
}

fn install_real(program: &Path) {
    let new = program.with_extension("new");
    testkit::program::copy(&harness::disk_program(), &new);
    fs::rename(&new, program).unwrap();
}

#[test]
#[ignore = "slow: run by `make test-all`"]
fn a_failing_new_program_leaves_the_old_process_running() {
    let (daemon, vbd, writer, program) = with_program();
    let before = pid(&daemon, &vbd);
    let fails = |what: &str| {
        let problem = daemon.failed(daemon.post(&format!("{vbd}/upgrade"), json!({})));
        let message = problem["detail"].as_str().unwrap();
        assert!(message.contains("its old process continues") && message.contains(what), "{problem}");
        assert_eq!((pid(&daemon, &vbd), state(&daemon, &vbd)), (before.clone(), "plugged".into()));
        nothing_leaked(&daemon);
        writer.makes_progress();
    };
    install(&program, "exit 3");
    fails("exit status: 3");
    install(&program, "echo '{\"id\":null,\"error\":{\"kind\":\"failed\",\"message\":\"it is broken\"}}'\nexit 4");
    fails("the new process said: it is broken");
    // It takes nothing over, and does not exit.
    install(&program, "exec sleep 1000");
    fails("");
    fs::remove_file(&program).unwrap();
    fails("No such file");
    install_real(&program);
    upgrade(&daemon, &vbd);
    assert_ne!(pid(&daemon, &vbd), before);
    drop(writer.end());
    unplug(&daemon, &vbd);
    nothing_leaked(&daemon);
}

#[test]
fn a_disk_whose_old_process_dies_in_an_upgrade_is_restarted_once() {
    let (daemon, vbd, writer, program) = with_program();
    let before = pid(&daemon, &vbd);
    // Before anything can have been handed over to it.
    let real = program.with_extension("real");
    testkit::program::copy(&program, &real);
    let at_take_over = format!("case \"$*\" in *--take-over*) kill -9 {before};; esac\nexec {} \"$@\"", real.display());
    install(&program, &at_take_over);
    daemon.failed(daemon.post(&format!("{vbd}/upgrade"), json!({})));
    wait_until("another process serves", || {
        let now = daemon.get(&vbd).1;
        now["state"] == "plugged" && now["restarts"] == 1 && now["pid"] != before
    });
    // Its connection ended with the process.
    assert!(writer.thread.join().is_err());
    let mut client = Client::connect(&socket(&daemon, &vbd));
    client.write(0, BLOCK, 5);
    assert_eq!(client.read(0, BLOCK), vec![5; BLOCK]);
    drop(client);
    nothing_leaked(&daemon);
    unplug(&daemon, &vbd);
    nothing_leaked(&daemon);
}

#[test]
fn a_new_process_that_dies_at_once_is_restarted() {
    let (mut daemon, vbd, writer) = written();
    drop(writer.end());
    let before = pid(&daemon, &vbd);
    // The daemon dies as well, before it knows which process serves.
    daemon.restart_with(&[("TAPLINED_ABORT_AT", "vbd-upgrade:answer:after")]);
    daemon.post_and_die(&format!("{vbd}/upgrade"), json!({}));
    wait_until("only the new one is there", || {
        let running = processes(&daemon);
        running.len() == 1 && json!(running) != json!([before])
    });
    processes(&daemon).into_iter().for_each(|pid| crate::harness::kill(&json!(pid)));
    daemon.restart();
    wait_until("it is served", || daemon.get(&vbd).1["restarts"] == 1 && state(&daemon, &vbd) == "plugged");
    nothing_leaked(&daemon);
    upgrade(&daemon, &vbd);
    crate::harness::kill(&pid(&daemon, &vbd));
    wait_until("it is served", || daemon.get(&vbd).1["restarts"] == 2 && state(&daemon, &vbd) == "plugged");
    let mut client = Client::connect(&socket(&daemon, &vbd));
    client.write(0, BLOCK, 5);
    drop(client);
    unplug(&daemon, &vbd);
    nothing_leaked(&daemon);
}

#[test]
fn an_unplug_aborts_an_upgrade_and_upgrades_are_exclusive() {
    let (daemon, vbd, writer) = written();
    drop(writer.end());
    for _ in 0..5 {
        let first = daemon.post(&format!("{vbd}/upgrade"), json!({}));
        assert_eq!(first.0, 202, "{}", first.1);
        let second = daemon.post(&format!("{vbd}/upgrade"), json!({}));
        let unplugged = unplug(&daemon, &vbd);
        assert_eq!(unplugged["state"], "unplugged");
        let ended = daemon.wait(&first.1);
        assert!(["done", "cancelled"].contains(&ended["state"].as_str().unwrap()), "{ended}");
        match second {
            (202, task) => drop(daemon.wait(&task)),
            (status, refused) => assert_eq!((status, &refused["code"]), (409, &json!("busy")), "{refused}"),
        }
        nothing_leaked(&daemon);
        plug(&daemon, &vbd);
    }
    unplug(&daemon, &vbd);
}

#[test]
fn one_failed_upgrade_of_several_does_not_stop_the_others() {
    let names: Vec<String> = (0..8).map(|number| format!("disk {number}")).collect();
    let (daemon, vdis) = with_disks("", &names.iter().map(String::as_str).collect::<Vec<_>>());
    let vbds: Vec<String> = vdis.iter().map(|vdi| vbd(&daemon, vdi, "nbd")).collect();
    vbds.iter().for_each(|vbd| drop(plug(&daemon, vbd)));
    let before: Vec<Value> = vbds.iter().map(|vbd| pid(&daemon, vbd)).collect();
    let clients: Vec<Writer> = vbds.iter().map(|vbd| Writer::begin(Client::connect(&socket(&daemon, vbd)))).collect();
    let tasks: Vec<Value> = vbds.iter().map(|vbd| daemon.post(&format!("{vbd}/upgrade"), json!({})).1).collect();
    for task in &tasks {
        assert_eq!(daemon.wait(task)["state"], "done", "{}", daemon.log());
    }
    nothing_leaked(&daemon);
    for ((vbd, before), client) in vbds.iter().zip(&before).zip(clients) {
        assert_ne!(pid(&daemon, vbd), *before);
        client.makes_progress();
        drop(client.end());
        unplug(&daemon, vbd);
    }
    nothing_leaked(&daemon);
}

/// A stopped disk whose leaf is being merged; `None` if the merge was too quick.
fn merging(daemon: &Taplined, sr: &str) -> Option<(String, String, Client)> {
    let asked = json!({ "sr": sr, "name": "disk", "size": 256 << 20, "format": "qcow2" });
    let vdi = daemon.done(daemon.post("/vdis", asked))["uuid"].as_str().unwrap().to_owned();
    let vbd = vbd(daemon, &vdi, "nbd");
    plug(daemon, &vbd);
    let mut client = Client::connect(&socket(daemon, &vbd));
    client.write(0, BLOCK, 1);
    let snapshot = daemon.done(daemon.post(&format!("/vdis/{vdi}/snapshot"), json!({})));
    for at in 1..128 {
        client.write(at << 20, 1 << 20, 2);
    }
    let deleted = daemon.delete(&format!("/vdis/{}", snapshot["uuid"].as_str().unwrap()));
    assert_eq!(deleted.0, 202, "{}", deleted.1);
    let mut paused = Value::Null;
    wait_until("it is merged, or is being", || {
        // It is not paused yet while it begins.
        paused = ask_disk(daemon, &vbd, json!({ "verb": "merge-pause" }));
        paused["ok"]["state"] == "paused" || daemon.get(&format!("/vdis/{vdi}")).1["depth"] == 1
    });
    let stands = paused["ok"]["state"] == "paused";
    if !stands {
        drop(client);
        unplug(daemon, &vbd);
        return None;
    }
    Some((vdi, vbd, client))
}

/// Checks that data written to a merged disk can be read, and that nothing is left after an unplug.
fn holds_all_and_leaks_nothing(daemon: &Taplined, vbd: &str, mut client: Client) {
    assert_eq!(client.read(0, BLOCK), vec![1; BLOCK]);
    for at in 1..128 {
        assert_eq!(client.read(at << 20, 1 << 20), vec![2; 1 << 20], "megabyte {at}");
    }
    drop(client);
    unplug(daemon, vbd);
    nothing_leaked(daemon);
}

#[test]
fn a_running_merge_continues_in_the_new_process() {
    let daemon = harness::start();
    let sr = daemon.repository("disks");
    let (vdi, vbd, client) = (0..10).find_map(|_| merging(&daemon, &sr)).expect("a merge was never under way");
    let before = pid(&daemon, &vbd);
    upgrade(&daemon, &vbd);
    assert_ne!(pid(&daemon, &vbd), before);
    assert!(daemon.log().contains("repeating the request to its new process"), "{}", daemon.log());
    // The task does not know about it, and no other is requested.
    wait_until("it is merged", || daemon.get(&format!("/vdis/{vdi}")).1["depth"] == 1);
    let merges = || -> Vec<Value> {
        let tasks = daemon.get("/tasks").1;
        let of_disk = |task: &&Value| task["verb"] == "vdi-merge" && task["about"].to_string().contains(&vdi);
        tasks.as_array().unwrap().iter().filter(of_disk).map(|task| task["state"].clone()).collect()
    };
    wait_until("its task is over", || !merges().contains(&json!("running")));
    assert_eq!(merges(), [json!("done")]);
    holds_all_and_leaks_nothing(&daemon, &vbd, client);
}

#[test]
fn a_running_merge_survives_a_daemon_killed_during_an_upgrade() {
    let mut daemon = harness::start();
    let sr = daemon.repository("disks");
    daemon.restart_with(&[("TAPLINED_ABORT_AT", "vbd-upgrade:answer:after")]);
    let (vdi, vbd, client) = (0..10).find_map(|_| merging(&daemon, &sr)).expect("a merge was never under way");
    daemon.post_and_die(&format!("{vbd}/upgrade"), json!({}));
    daemon.restart();
    assert_eq!(daemon.get(&vbd).1["restarts"], 0);
    wait_until("it is merged", || daemon.get(&format!("/vdis/{vdi}")).1["depth"] == 1);
    holds_all_and_leaks_nothing(&daemon, &vbd, client);
}

#[test]
fn an_upgrade_by_others_is_noticed() {
    let (daemon, vbd, writer) = written();
    let before = pid(&daemon, &vbd);
    let words = fs::read(format!("/proc/{before}/cmdline")).unwrap();
    let words: Vec<String> = words.split(|byte| *byte == 0).map(|word| String::from_utf8_lossy(word).into()).collect();
    let words = words.iter().skip(1).filter(|word| !word.is_empty() && *word != "--accept-failed-sync");
    let pair = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
    let mut new = Command::new(harness::disk_program());
    new.args(words).arg("--take-over").stdin(pair.0).stdout(Stdio::null()).stderr(Stdio::null());
    let mut new = new.spawn().unwrap();
    let stream = UnixStream::connect(control(&daemon, &vbd)).unwrap();
    let verb = json!({ "version": 1, "id": 1, "verb": "upgrade", "successor": true, "pause_max": 60000 });
    let verb = format!("{verb}\n");
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut beside = SendAncillaryBuffer::new(&mut space);
    let descriptors = [pair.1.as_fd()];
    assert!(beside.push(SendAncillaryMessage::ScmRights(&descriptors)));
    sendmsg(&stream, &[IoSlice::new(verb.as_bytes())], &mut beside, SendFlags::NOSIGNAL).unwrap();
    drop(pair.1);
    let mut answer = String::new();
    BufReader::new(stream).read_line(&mut answer).unwrap();
    assert!(answer.contains(&format!("\"pid\":{}", new.id())), "{answer}");
    wait_until("the daemon knows it", || pid(&daemon, &vbd) == json!(new.id()));
    let now = daemon.get(&vbd).1;
    assert_eq!((&now["state"], &now["restarts"], &now["problem"]), (&json!("plugged"), &json!(0), &Value::Null));
    drop(writer.end());
    unplug(&daemon, &vbd);
    assert!(new.wait().unwrap().success());
    nothing_leaked(&daemon);
}
