//! Confinement of an attacker in control of a disk's process: it can access nothing of other disks. Tried by a
//! process with its uid.

use std::collections::BTreeSet;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};

use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};
use serde_json::json;

use crate::harness;
use crate::harness::disks::{forget_plugs, io, nbd, nothing_leaked, plug, state, unplug, vbd, with_disks};
use crate::harness::nbd::Client;
use crate::harness::{Taplined, only_user, process_status, wait_until};

/// The processes that the attacker tries to access.
const VICTIMS: &str = "TAPLINE_TEST_VICTIMS";

/// The default range of disk users (docs/taplined.toml).
const RANGE: std::ops::RangeInclusive<u32> = 66_000..=81_999;

fn is_root() -> bool {
    let root = rustix::process::geteuid().is_root();
    if !root {
        harness::not_run("as whom disks run: only root can choose that");
    }
    root
}

fn pid(daemon: &Taplined, vbd: &str) -> u32 {
    daemon.get(vbd).1["pid"].as_u64().unwrap().try_into().unwrap()
}

/// The user of a process, whose only group has the same number.
#[track_caller]
fn user(pid: u32) -> u32 {
    assert_eq!(process_status(pid, "Groups"), [""; 0], "{pid}");
    only_user(pid)
}

#[track_caller]
fn is_confined(pid: u32) {
    for set in ["CapInh", "CapPrm", "CapEff", "CapAmb"] {
        assert_eq!(process_status(pid, set), ["0000000000000000"], "{set}");
    }
    assert_eq!(
        (process_status(pid, "NoNewPrivs"), process_status(pid, "Seccomp")),
        (vec!["1".into()], vec!["2".into()])
    );
}

/// Plugged disks, served over NBD.
fn plugged(settings: &str, names: &[&str]) -> (Taplined, Vec<String>) {
    let (daemon, vdis) = with_disks(settings, names);
    let vbds: Vec<String> = vdis.iter().map(|vdi| vbd(&daemon, vdi, "nbd")).collect();
    vbds.iter().for_each(|vbd| drop(plug(&daemon, vbd)));
    (daemon, vbds)
}

/// Lets a process of a user, with a group of the same number, try to steal descriptors; returns whether it got none.
fn attack(user: u32, victims: &[u32]) -> bool {
    let room = tempfile::tempdir().unwrap();
    fs::set_permissions(room.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let program = room.path().join("attacker");
    testkit::program::copy(&std::env::current_exe().unwrap(), &program);
    let victims = victims.iter().map(u32::to_string).collect::<Vec<_>>().join(" ");
    let mut attacker = Command::new(&program);
    attacker.args(["--exact", "confine::inside", "--nocapture"]).env(VICTIMS, victims).uid(user).gid(user);
    let said = attacker.current_dir("/").output().unwrap();
    let out = String::from_utf8_lossy(&said.stdout).into_owned();
    eprintln!("{out}{}", String::from_utf8_lossy(&said.stderr));
    assert!(out.contains("1 passed") || out.contains("1 failed"), "{out}");
    said.status.success()
}

/// The part of other tests that runs as another user; on its own it does nothing.
#[test]
fn inside() {
    let Ok(victims) = std::env::var(VICTIMS) else { return };
    for victim in victims.split(' ') {
        let pidfd = pidfd_open(Pid::from_raw(victim.parse().unwrap()).unwrap(), PidfdFlags::empty()).unwrap();
        for number in 0..64 {
            let taken = pidfd_getfd(&pidfd, number, PidfdGetfdFlags::empty());
            assert_eq!(taken.err(), Some(Errno::PERM), "descriptor {number} of {victim}");
        }
        assert!(
            fs::read(format!("/proc/{victim}/mem")).is_err() && fs::read_dir(format!("/proc/{victim}/fd")).is_err()
        );
    }
}

/// A process of a user that disks never had, with the command line of a disk; killed on drop.
struct Impostor(std::process::Child);

impl Impostor {
    fn of(daemon: &Taplined, vbd: &str) -> Impostor {
        let place = daemon.room().join("run/vbd").join(vbd.trim_start_matches("/vbds/"));
        let mut command = Command::new("sh");
        command.args(["-c", "read word", "tapline-disk", "serve", "raw:/a", "--queues", "1", "--control"]);
        command.arg(place.join("control.sock")).uid(4242).gid(4242).current_dir("/").stdin(Stdio::piped());
        Impostor(command.spawn().unwrap())
    }

    fn lives(&mut self) -> bool {
        self.0.try_wait().unwrap().is_none()
    }
}

impl Drop for Impostor {
    fn drop(&mut self) {
        self.0.kill().ok();
        self.0.wait().ok();
    }
}

#[test]
fn a_process_of_another_user_is_never_taken_for_a_disk() {
    if !is_root() {
        return;
    }
    let (mut daemon, vbds) = plugged("", &["a", "b"]);
    let pids: Vec<u32> = vbds.iter().map(|vbd| pid(&daemon, vbd)).collect();
    unplug(&daemon, &vbds[1]);
    let mut impostors = [Impostor::of(&daemon, &vbds[0]), Impostor::of(&daemon, &vbds[1])];
    daemon.kill();
    daemon.restart();
    assert!(impostors.iter_mut().all(Impostor::lives), "{}", daemon.log());
    assert_eq!((pid(&daemon, &vbds[0]), state(&daemon, &vbds[1])), (pids[0], "unplugged".into()));
    // The disk served by a process is only known by its command line, and the users of disks have changed since.
    daemon.kill();
    forget_plugs(&daemon);
    let path = daemon.room().join("taplined.toml");
    let settings = fs::read_to_string(&path).unwrap();
    fs::write(&path, format!("disk-user = \"nobody\"\n{settings}")).unwrap();
    daemon.restart();
    assert_eq!((state(&daemon, &vbds[0]), pid(&daemon, &vbds[0])), ("plugged".into(), pids[0]), "{}", daemon.log());
    assert_eq!(state(&daemon, &vbds[1]), "unplugged", "{}", daemon.log());
    assert!(!daemon.log().contains("not touching"), "{}", daemon.log());
    assert!(impostors.iter_mut().all(Impostor::lives));
    drop(impostors);
    unplug(&daemon, &vbds[0]);
    nothing_leaked(&daemon);
}

#[test]
fn each_disk_has_its_own_user_without_access_to_others() {
    if !is_root() {
        return;
    }
    let (daemon, vbds) = plugged("", &["a", "b", "c"]);
    let pids: Vec<u32> = vbds.iter().map(|vbd| pid(&daemon, vbd)).collect();
    let users: BTreeSet<u32> = pids.iter().map(|pid| user(*pid)).collect();
    assert!(users.len() == 3 && users.iter().all(|user| RANGE.contains(user)), "{users:?}");
    pids.iter().for_each(|pid| is_confined(*pid));
    // Neither as the user of another disk nor as its own user.
    assert!(attack(user(pids[0]), &pids));
    for vbd in &vbds {
        unplug(&daemon, vbd);
    }
    nothing_leaked(&daemon);
}

#[test]
fn a_disks_user_stays_exclusive_across_restarts() {
    if !is_root() {
        return;
    }
    // A range as large as the number of disks: a uid used twice would be noticed.
    let (mut daemon, vbds) = plugged("disk-user-range = \"98001-98003\"", &["a", "b", "c"]);
    let users = |daemon: &Taplined| -> BTreeSet<u32> { vbds.iter().map(|vbd| user(pid(daemon, vbd))).collect() };
    let all = BTreeSet::from([98_001, 98_002, 98_003]);
    assert_eq!(users(&daemon), all);
    daemon.kill();
    daemon.restart();
    // All uids are in use by processes that another daemon has started.
    let refused = daemon.failed(daemon.post(&format!("{}/upgrade", vbds[0]), json!({})));
    assert!(refused["detail"].as_str().unwrap().contains("all uids of disk-user-range are in use"), "{refused}");
    assert!(refused["advice"].as_str().unwrap().contains("larger"), "{refused}");
    let before = pid(&daemon, &vbds[1]);
    crate::harness::kill(&before);
    wait_until("it is served again", || {
        let vbd = daemon.get(&vbds[1]).1;
        vbd["state"] == "plugged" && vbd["pid"].as_u64() != Some(before.into())
    });
    assert_eq!(users(&daemon), all);
    for vbd in &vbds {
        unplug(&daemon, vbd);
    }
    nothing_leaked(&daemon);
}

#[test]
fn a_disk_is_handed_over_from_one_user_to_another() {
    if !is_root() {
        return;
    }
    let (mut daemon, vbds) = plugged("disk-user-range = \"98011-98016\"", &["a"]);
    let mut client = Client::connect(daemon.get(&vbds[0]).1["socket"].as_str().unwrap());
    client.write(0, 4096, 7);
    let mut before = user(pid(&daemon, &vbds[0]));
    for round in 0..4 {
        daemon.done(daemon.post(&format!("{}/upgrade", vbds[0]), json!({})));
        let now = user(pid(&daemon, &vbds[0]));
        assert_ne!(now, before);
        assert_eq!(client.read(0, 4096), vec![7; 4096]);
        before = now;
        if round == 1 {
            daemon.kill();
            daemon.restart();
        }
    }
    drop(client);
    unplug(&daemon, &vbds[0]);
    nothing_leaked(&daemon);
}

#[test]
fn a_configured_user_runs_all_disks_without_access_to_files() {
    if !is_root() {
        return;
    }
    let (daemon, vbds) = plugged("disk-user = \"nobody\"", &["a", "b"]);
    let pids: Vec<u32> = vbds.iter().map(|vbd| pid(&daemon, vbd)).collect();
    assert!(attack(65_534, &pids));
    for pid in pids {
        assert_eq!(process_status(pid, "Uid"), ["65534"; 4]);
        is_confined(pid);
    }
    let (well, said) = io(&nbd(&daemon, &vbds[0]), &["write -P 7 0 64k", "read -P 7 0 64k"]);
    assert!(well, "{said}");
}

/// The socket to which members of the group connect without sending anything.
const SOCKET: &str = "TAPLINE_TEST_SOCKET";

/// The part of the next test that runs as another user: it holds its connections until it is told to exit.
#[test]
fn inside_the_group() {
    let Ok(socket) = std::env::var(SOCKET) else { return };
    let held: Vec<UnixStream> = (0..20).map(|_| UnixStream::connect(&socket).unwrap()).collect();
    println!("connected");
    std::io::stdin().read_line(&mut String::new()).unwrap();
    let ended = held.iter().filter(|held| {
        let mut stream: &UnixStream = held;
        stream.set_nonblocking(true).unwrap();
        !matches!(stream.read(&mut [0; 1]), Err(error) if error.kind() == std::io::ErrorKind::WouldBlock)
    });
    println!("ended: {}", ended.count());
}

#[test]
fn slow_group_members_do_not_delay_root() {
    if !is_root() {
        return;
    }
    let passwd = fs::read_to_string("/etc/group").unwrap();
    let Some(group) = passwd.lines().find_map(|line| line.split_once(":x:65534:")).map(|(name, _)| name) else {
        return harness::not_run("slow members of a group: there is no group 65534");
    };
    let daemon = harness::start_with(&format!("[api]\ngroup = {group:?}\nconnections-max = 10"), &[]);
    let room = tempfile::tempdir().unwrap();
    fs::set_permissions(room.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let program = room.path().join("member");
    testkit::program::copy(&std::env::current_exe().unwrap(), &program);
    let mut member = Command::new(&program);
    member
        .args(["--exact", "confine::inside_the_group", "--nocapture"])
        .env(SOCKET, daemon.socket())
        .uid(65_534)
        .gid(65_534);
    let mut member = member.current_dir("/").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut said = BufReader::new(member.stdout.take().unwrap()).lines().map(Result::unwrap);
    assert!(said.by_ref().any(|line| line.ends_with("connected")));
    for _ in 0..20 {
        assert_eq!(daemon.get("/host").0, 200);
    }
    member.stdin.take().unwrap().write_all(b"\n").unwrap();
    // If slow connections were not closed, root would have had to wait. One connection above the limit was closed at
    // once.
    let ended = said.find_map(|line| line.strip_prefix("ended: ").map(|count| count.parse::<u32>().unwrap())).unwrap();
    assert!(ended <= 1, "{ended}");
    member.wait().unwrap();
}

#[test]
fn the_state_is_inaccessible_to_others_even_if_it_was_not_before() {
    let mut daemon = harness::start();
    let mode = |path: &str| fs::metadata(daemon.room().join(path)).unwrap().permissions().mode() & 0o777;
    let files = ["state/catalogue.db", "state/catalogue.db-wal", "state/catalogue.db-shm", "state/lock", "run/lock"];
    assert_eq!((mode("state"), files.map(mode)), (0o700, [0o600; 5]));
    assert_eq!((mode("run"), mode("log")), (0o755, 0o750));
    // As after a restore with other modes.
    fs::set_permissions(daemon.room().join("state"), fs::Permissions::from_mode(0o755)).unwrap();
    fs::set_permissions(daemon.room().join("state/catalogue.db"), fs::Permissions::from_mode(0o644)).unwrap();
    daemon.restart();
    let mode = |path: &str| fs::metadata(daemon.room().join(path)).unwrap().permissions().mode() & 0o777;
    assert_eq!((mode("state"), files.map(mode)), (0o700, [0o600; 5]));
}
