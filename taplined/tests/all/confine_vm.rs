//! Confinement of an attacker in control of a QEMU: it can access nothing of the host or of other machines.
//!
//! Uses real QEMUs without a system to boot. `TAPLINE_QEMU` names another QEMU.

use std::fs;
use std::io::Read;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Value, json};

use crate::harness;
use crate::harness::disks::{nothing_leaked, plug, state, unplug, with_disks};
use crate::harness::{Taplined, only_user, process_status, wait_until};

const QEMU: &str = "qemu-system-x86_64";

/// The default range of VM users (docs/taplined.toml).
const RANGE: std::ops::RangeInclusive<u32> = 82_000..=97_999;

fn begin(settings: &str, names: &[&str]) -> Option<(Taplined, Vec<String>)> {
    let program = std::env::var("TAPLINE_QEMU");
    let qemu = program.as_deref().unwrap_or(QEMU);
    if Command::new(qemu).arg("--version").output().is_err() {
        harness::not_run("QEMU's confinement: there is no QEMU; `make prepare` installs it");
        return None;
    }
    if !rustix::process::geteuid().is_root() {
        harness::not_run("as whom QEMU runs: only root can choose that");
        return None;
    }
    Some(with_disks(&format!("qemu-program = {qemu:?}\n{settings}"), names))
}

/// Creates a VM with these disks; returns its path in the API.
#[track_caller]
fn machine(daemon: &Taplined, vdis: &[String], more: Value) -> String {
    let name = match daemon.get("/vms").1.as_array().unwrap().len() {
        0 => "guest".to_owned(),
        others => format!("guest {others}"),
    };
    let mut asked = json!({ "name": name, "driver": "qemu", "memory": 64 << 20, "vcpus": 2 });
    asked.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    let (status, vm) = daemon.post("/vms", asked);
    assert_eq!(status, 201, "{vm}");
    for vdi in vdis {
        add_disk(daemon, vm["uuid"].as_str().unwrap(), vdi);
    }
    format!("/vms/{}", vm["uuid"].as_str().unwrap())
}

#[track_caller]
fn add_disk(daemon: &Taplined, vm: &str, vdi: &str) -> String {
    let (status, vbd) = daemon.post("/vbds", json!({ "vdi": vdi, "vm": vm }));
    assert_eq!(status, 201, "{vbd}");
    format!("/vbds/{}", vbd["uuid"].as_str().unwrap())
}

#[track_caller]
fn start(daemon: &Taplined, vm: &str) -> u32 {
    daemon.done(daemon.post(&format!("{vm}/start"), json!({})))["pid"].as_u64().unwrap().try_into().unwrap()
}

#[track_caller]
fn shut_down(daemon: &Taplined, vm: &str) {
    daemon.done(daemon.post(&format!("{vm}/shutdown"), json!({ "force": true })));
}

/// Returns the user of a QEMU, and checks that it has no capability, no way to regain one, and no system call for that.
#[track_caller]
fn user(pid: u32) -> u32 {
    for set in ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"] {
        assert_eq!(process_status(pid, set), ["0000000000000000"], "{set}");
    }
    assert_eq!(
        (process_status(pid, "NoNewPrivs"), process_status(pid, "Seccomp")),
        (vec!["1".into()], vec!["2".into()])
    );
    only_user(pid)
}

/// The open files of a process that have a path or lead somewhere.
fn open_files(pid: u32) -> Vec<PathBuf> {
    let descriptors = fs::read_dir(format!("/proc/{pid}/fd")).unwrap();
    descriptors.flatten().filter_map(|descriptor| fs::read_link(descriptor.path()).ok()).collect()
}

/// Whether a user can connect to a socket, which requires write permission (unix(7)).
fn connects(user: u32, socket: &Path) -> bool {
    let (user, group) = (format!("--reuid={user}"), format!("--regid={user}"));
    let mut command = Command::new("setpriv");
    command.args([&user, &group, "--clear-groups", "--", "test", "-w"]).arg(socket);
    command.status().unwrap().success()
}

fn sockets(daemon: &Taplined, vm: &str) -> Vec<PathBuf> {
    let vbds = daemon.get(&format!("/vbds?vm={}", vm.trim_start_matches("/vms/"))).1;
    vbds.as_array().unwrap().iter().map(|vbd| vbd["socket"].as_str().unwrap().into()).collect()
}

#[test]
fn each_machine_has_its_own_user_without_access_to_others() {
    let Some((daemon, vdis)) = begin("", &["a", "b", "c"]) else { return };
    let vms = [machine(&daemon, &vdis[..2], json!({})), machine(&daemon, &vdis[2..], json!({}))];
    // One disk is plugged before the machine exists.
    let first = daemon.get(&format!("/vbds?vm={}", vms[0].trim_start_matches("/vms/"))).1;
    plug(&daemon, &format!("/vbds/{}", first[0]["uuid"].as_str().unwrap()));
    let pids = vms.each_ref().map(|vm| start(&daemon, vm));
    let users = pids.map(user);
    assert!(users[0] != users[1] && users.iter().all(|user| RANGE.contains(user)), "{users:?}");
    for (vm, (own, other)) in vms.iter().zip([(users[0], users[1]), (users[1], users[0])]) {
        let monitor = PathBuf::from(daemon.get(vm).1["handle"].as_str().unwrap());
        assert!(connects(0, &monitor) && !connects(other, &monitor) && connects(own, &monitor));
        for socket in sockets(&daemon, vm) {
            assert!(!connects(other, &socket) && !connects(own, &socket.with_file_name("control.sock")), "{socket:?}");
            assert_eq!(fs::metadata(&socket).unwrap().uid(), own, "{socket:?}");
        }
    }
    // In its own cgroup, where cgroups are available.
    let groups = pids.map(|pid| fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap());
    let of = |groups: &str| groups.lines().find_map(|line| line.strip_prefix("0::").map(str::to_owned));
    let told = daemon.log().contains("stays in the daemon's cgroup");
    assert!(told || of(&groups[0]) != of(&groups[1]), "{groups:?}");
    // Of the daemon's files, only its own messages, sockets and memory.
    for (vm, pid) in vms.iter().zip(pids) {
        let place = daemon.room().join("run/vm").join(vm.trim_start_matches("/vms/"));
        let foreign = |path: &&PathBuf| path.starts_with(daemon.room()) && !path.starts_with(&place);
        assert_eq!(open_files(pid).iter().find(foreign), None);
        shut_down(&daemon, vm);
    }
    nothing_leaked(&daemon);
}

#[test]
fn a_machine_keeps_its_user_and_disks_across_crashes() {
    let Some((mut daemon, vdis)) = begin("qemu-user-range = \"98021-98022\"", &["a", "b"]) else { return };
    let vm = machine(&daemon, &vdis[..1], json!({}));
    let pid = start(&daemon, &vm);
    let own = user(pid);
    daemon.kill();
    daemon.restart();
    assert_eq!(daemon.get(&vm).1["pid"], pid);
    // The second uid is free for one more machine; then none is left.
    let others = [machine(&daemon, &[], json!({})), machine(&daemon, &[], json!({}))];
    // The contents of the kernel do not matter here.
    let kernel = daemon.room().join("kernel");
    fs::write(&kernel, vec![7; 1 << 20]).unwrap();
    let with_kernel = json!({ "boot": { "from": "kernel", "kernel": kernel } });
    others.iter().for_each(|other| assert_eq!(daemon.patch(other, with_kernel.clone()).0, 200));
    let another = start(&daemon, &others[0]);
    assert_ne!(user(another), own);
    let refused = daemon.failed(daemon.post(&format!("{}/start", others[1]), json!({})));
    assert!(refused["detail"].as_str().unwrap().contains("all uids of qemu-user-range are in use"), "{refused}");
    // A disk that is restarted, and one that is plugged while the machine runs, grant it access.
    let vbd = format!("/vbds/{}", daemon.get("/vbds").1[0]["uuid"].as_str().unwrap());
    let disk = daemon.get(&vbd).1["pid"].clone();
    crate::harness::kill(&disk);
    wait_until("it is served again", || {
        let vbd = daemon.get(&vbd).1;
        vbd["state"] == "plugged" && vbd["pid"] != disk
    });
    let hot = add_disk(&daemon, vm.trim_start_matches("/vms/"), &vdis[1]);
    plug(&daemon, &hot);
    for socket in sockets(&daemon, &vm) {
        assert_eq!(fs::metadata(&socket).unwrap().uid(), own);
        wait_until("QEMU is connected", || {
            let connected = fs::read_to_string("/proc/net/unix").unwrap();
            connected.lines().any(|line| line.ends_with(socket.to_str().unwrap()) && line.contains(" 03 "))
        });
    }
    shut_down(&daemon, &vm);
    shut_down(&daemon, &others[0]);
    nothing_leaked(&daemon);
}

#[test]
fn files_only_root_can_open_are_opened_for_a_machine() {
    let Some((daemon, vdis)) = begin("", &["a"]) else { return };
    let closed = tempfile::tempdir().unwrap();
    let path = |name: &str| closed.path().join(name);
    for name in ["kernel", "iso"] {
        fs::write(path(name), vec![7; 1 << 20]).unwrap();
        fs::set_permissions(path(name), fs::Permissions::from_mode(0o600)).unwrap();
    }
    let platform = json!({
        "hvm_serial": format!("file:{}", path("serial").display()), "parallel": "null",
        "dvd": format!("file:{}", path("iso").display()),
        "vga": "std", "vnc": format!("unix:{}", path("vnc").display()),
    });
    let boot = json!({ "from": "kernel", "kernel": path("kernel") });
    let vm = machine(&daemon, &vdis, json!({ "platform": platform, "boot": boot }));
    let pid = start(&daemon, &vm);
    let own = user(pid);
    let place = daemon.room().join("run/vm").join(vm.trim_start_matches("/vms/"));
    let words = fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap();
    let copy = place.join("kernel");
    assert!(words.contains(&format!("\0{}\0", copy.display())) && !copy.exists(), "{words}");
    assert!(open_files(pid).contains(&path("iso")) && open_files(pid).contains(&path("serial")));
    let mut screen = UnixStream::connect(path("vnc")).unwrap();
    let mut greeting = [0; 3];
    screen.read_exact(&mut greeting).unwrap();
    assert_eq!(&greeting, b"RFB");
    assert!(!connects(own + 1, &fs::read_link(path("vnc")).unwrap()));
    drop(screen);
    shut_down(&daemon, &vm);
    // Missing files and files of the wrong type are reported.
    fs::remove_file(path("iso")).unwrap();
    let (status, refused) = daemon.post(&format!("{vm}/start"), json!({}));
    assert!(status == 400 && refused["detail"].as_str().unwrap().contains("iso"), "{refused}");
    fs::write(path("iso"), "iso").unwrap();
    fs::remove_file(path("vnc")).unwrap();
    fs::write(path("vnc"), "precious").unwrap();
    let refused = daemon.failed(daemon.post(&format!("{vm}/start"), json!({})));
    assert!(refused["detail"].as_str().unwrap().contains("not a socket"), "{refused}");
    assert!(!fs::metadata(path("vnc")).unwrap().file_type().is_socket());
    nothing_leaked(&daemon);
}

#[test]
fn an_inaccessible_run_directory_is_reported_with_advice() {
    let Some((daemon, vdis)) = begin("", &["a"]) else { return };
    let vm = machine(&daemon, &vdis, json!({}));
    fs::set_permissions(daemon.room(), fs::Permissions::from_mode(0o700)).unwrap();
    let refused = daemon.failed(daemon.post(&format!("{vm}/start"), json!({})));
    let advice = format!("chmod o+x {}", daemon.room().display());
    assert!(refused["detail"].as_str().unwrap().contains(&advice), "{refused}");
    nothing_leaked(&daemon);
}

#[test]
fn a_configured_user_runs_all_machines() {
    let Some((daemon, vdis)) = begin("qemu-user = \"nobody\"", &["a"]) else { return };
    let vm = machine(&daemon, &vdis, json!({}));
    let pid = start(&daemon, &vm);
    assert_eq!(
        (process_status(pid, "Uid"), process_status(pid, "CapBnd")),
        (vec!["65534".into(); 4], vec!["0000000000000000".into()])
    );
    shut_down(&daemon, &vm);
    drop(daemon);
    let Some((daemon, vdis)) = begin("qemu-user = \"root\"", &["a"]) else { return };
    let vm = machine(&daemon, &vdis, json!({}));
    let pid = start(&daemon, &vm);
    assert_eq!(process_status(pid, "Uid"), ["0"; 4]);
    let vbd = format!("/vbds/{}", daemon.get("/vbds").1[0]["uuid"].as_str().unwrap());
    shut_down(&daemon, &vm);
    assert_eq!(state(&daemon, &vbd), "unplugged");
    plug(&daemon, &vbd);
    unplug(&daemon, &vbd);
    nothing_leaked(&daemon);
}

#[test]
fn a_qemu_without_sandbox_support_runs_and_is_logged() {
    if begin("", &[]).is_none() {
        return;
    }
    let room = tempfile::tempdir().unwrap();
    fs::set_permissions(room.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let program = room.path().join("qemu");
    let qemu = std::env::var("TAPLINE_QEMU").unwrap_or_else(|_| QEMU.into());
    let says = "-sandbox support is not enabled in this QEMU binary";
    let refuses = format!("case \"$*\" in *-sandbox*) echo {says:?} >&2; exit 1;; esac");
    testkit::program::script(&program, &format!("{refuses}\nexec {qemu} \"$@\""));
    let (daemon, vdis) = with_disks(&format!("qemu-program = {program:?}"), &["a"]);
    let vm = machine(&daemon, &vdis, json!({}));
    let pid = start(&daemon, &vm);
    assert_eq!(
        (process_status(pid, "CapBnd"), process_status(pid, "NoNewPrivs")),
        (vec!["0000000000000000".into()], vec!["1".into()])
    );
    assert!(daemon.log().contains("built without seccomp sandbox"), "{}", daemon.log());
    shut_down(&daemon, &vm);
    nothing_leaked(&daemon);
}
