//! Disks for tests of plugs, their clients, and a check for leaks.

use std::collections::BTreeSet;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;

use repo::Catalogue;
use serde_json::{Value, json};

use super::{Taplined, disk_program, wait_until};

/// A daemon with named disks, each an empty qcow2 image found by a scan; also returns their VDIs.
pub fn with_disks(settings: &str, names: &[&str]) -> (Taplined, Vec<String>) {
    let daemon = super::start_with(settings, &[]);
    let sr = daemon.repository("disks");
    let vdis = scanned(&daemon, &sr, names);
    (daemon, vdis)
}

/// Creates disks in the repository 'disks' and scans it; returns their VDIs.
pub fn scanned(daemon: &Taplined, sr: &str, names: &[&str]) -> Vec<String> {
    for name in names {
        let path = format!("qcow2:{}", daemon.room().join("disks").join(format!("{name}.qcow2")).display());
        let made = Command::new(disk_program()).args(["image", "create", &path, "--size", "16M"]).output().unwrap();
        assert!(made.status.success(), "{made:?}");
    }
    let scan = daemon.done(daemon.post(&format!("/srs/{sr}/scan"), json!({})));
    let found = scan["appeared"].as_array().unwrap();
    let vdi_of = |name: &&str| {
        let file = format!("{name}.qcow2");
        let placed = found.iter().find(|placed| placed["file"] == file.as_str());
        placed.unwrap_or_else(|| panic!("{scan}"))["vdi"].as_str().unwrap().into()
    };
    names.iter().map(vdi_of).collect()
}

/// The images of a VDI from the top down, according to the catalogue: formats and files.
pub fn chain(daemon: &Taplined, vdi: &str) -> Vec<(String, String)> {
    let sql = "WITH RECURSIVE chain (link, depth) AS (
                   SELECT image, 0 FROM vdi WHERE uuid = ?1
                   UNION ALL SELECT parent, depth + 1 FROM chain JOIN image ON uuid = link WHERE parent IS NOT NULL
               ) SELECT format, file FROM chain JOIN image ON uuid = link ORDER BY depth";
    let catalogue = daemon.catalogue();
    let mut statement = catalogue.prepare(sql).unwrap();
    let images = statement.query_map([vdi], |row| Ok((row.get(0)?, row.get(1)?))).unwrap();
    images.map(Result::unwrap).collect()
}

/// Creates a VBD; returns its path in the API.
#[track_caller]
pub fn vbd(daemon: &Taplined, vdi: &str, transport: &str) -> String {
    let (status, vbd) = daemon.post("/vbds", json!({ "vdi": vdi, "transport": transport }));
    assert_eq!(status, 201, "{vbd}");
    format!("/vbds/{}", vbd["uuid"].as_str().unwrap())
}

#[track_caller]
pub fn plug(daemon: &Taplined, vbd: &str) -> Value {
    daemon.done(daemon.post(&format!("{vbd}/plug"), json!({})))
}

#[track_caller]
pub fn unplug(daemon: &Taplined, vbd: &str) -> Value {
    daemon.done(daemon.post(&format!("{vbd}/unplug"), json!({})))
}

#[track_caller]
pub fn state(daemon: &Taplined, vbd: &str) -> String {
    daemon.get(vbd).1["state"].as_str().unwrap().into()
}

/// The control socket of a plugged VBD's process.
pub fn control(daemon: &Taplined, vbd: &str) -> PathBuf {
    daemon.room().join("run/vbd").join(vbd.trim_start_matches("/vbds/")).join("control.sock")
}

/// Sends it a request, like any process with access to it.
pub fn ask_disk(daemon: &Taplined, vbd: &str, mut request: Value) -> Value {
    request["version"] = json!(1);
    request["id"] = json!(1);
    let mut disk = UnixStream::connect(control(daemon, vbd)).unwrap();
    disk.write_all(format!("{request}\n").as_bytes()).unwrap();
    let mut said = String::new();
    BufReader::new(disk).read_line(&mut said).unwrap();
    serde_json::from_str(&said).unwrap()
}

/// The NBD address of a plugged VBD.
pub fn nbd(daemon: &Taplined, vbd: &str) -> String {
    format!("nbd+unix:///?socket={}", daemon.get(vbd).1["socket"].as_str().unwrap())
}

/// Runs qemu-io; returns whether it succeeded, and its output.
pub fn io(at: &str, commands: &[&str]) -> (bool, String) {
    let mut qemu = Command::new("qemu-io");
    qemu.args(["-f", "raw"]);
    for command in commands {
        qemu.args(["-c", command]);
    }
    let output = qemu.arg(at).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    (output.status.success() && !said.contains("failed"), said)
}

/// The running disk processes of this daemon.
pub fn processes(daemon: &Taplined) -> BTreeSet<u32> {
    disks_of(&daemon.room().join("run/vbd"))
}

/// The disk processes that listen in a directory.
pub fn disks_of(places: &Path) -> BTreeSet<u32> {
    let places = places.to_str().unwrap();
    let pids = fs::read_dir("/proc").unwrap().flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let ours = pids.filter(|pid: &u32| {
        let words = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let words = String::from_utf8_lossy(&words).into_owned();
        words.contains("--control") && words.contains(places)
    });
    ours.collect()
}

/// The QEMU processes that have their monitors in a directory.
pub fn machines_of(places: &Path) -> BTreeSet<u32> {
    let monitor = format!("id=monitor,path={}/", places.to_str().unwrap());
    let pids = fs::read_dir("/proc").unwrap().flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let ours = pids.filter(|pid: &u32| {
        let words = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        String::from_utf8_lossy(&words).contains(&monitor)
    });
    ours.collect()
}

/// Describes problems of VMs: a transitional state, or a process that differs from the recorded one.
fn wrong_machines(daemon: &Taplined) -> String {
    let vms = daemon.get("/vms").1;
    // A busy daemon may have no memory for a list just now.
    let Some(vms) = vms.as_array() else { return format!("no list of machines: {vms}; ") };
    let runs = |vm: &&Value| vm["power"] != "halted" && vm["power"] != "suspended";
    let running: Vec<&Value> = vms.iter().filter(runs).collect();
    let settled = running.iter().all(|vm| ["running", "paused"].contains(&vm["power"].as_str().unwrap()));
    let known: BTreeSet<u32> = running.iter().filter_map(|vm| vm["pid"].as_u64()?.try_into().ok()).collect();
    let halted = vms.iter().filter(|vm| !runs(vm));
    let forgotten = halted.into_iter().all(|vm| vm["pid"].is_null() && vm["handle"].is_null());
    let places = fs::read_dir(daemon.room().join("run/vm")).unwrap().count();
    let found = machines_of(&daemon.room().join("run/vm"));
    if settled && forgotten && found == known && places == known.len() {
        return String::new();
    }
    format!("machines: {vms:?}, running {found:?}, {places} directories; ")
}

/// Checks that no VDI is lost, stuck, active twice or leaked: running processes, leases, the run directory and the
/// daemon's answers agree, now or very soon, and no task is running.
#[track_caller]
pub fn nothing_leaked(daemon: &Taplined) {
    let mut said = String::new();
    wait_until("nothing is leaked", || {
        said = wrong_machines(daemon) + &leaks(daemon);
        if !said.is_empty() {
            eprintln!("{said}");
        }
        said.is_empty()
    });
}

fn leaks(daemon: &Taplined) -> String {
    let vbds = daemon.get("/vbds").1;
    let Some(vbds) = vbds.as_array() else { return format!("no list of VBDs: {vbds}; ") };
    let on_the_way = vbds.iter().filter(|vbd| !["plugged", "unplugged"].contains(&vbd["state"].as_str().unwrap()));
    let plugged: Vec<&Value> = vbds.iter().filter(|vbd| vbd["state"] == "plugged").collect();
    let named = |vbd: &&Value| vbd["uuid"].as_str().unwrap().to_owned();
    let known: BTreeSet<String> = plugged.iter().map(named).collect();
    let pids: BTreeSet<u32> =
        plugged.iter().filter_map(|vbd| vbd["pid"].as_u64()).map(|pid| pid.try_into().unwrap()).collect();
    let places = fs::read_dir(daemon.room().join("run/vbd")).unwrap();
    let places: BTreeSet<String> = places.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    let (leased, writers) = leases(daemon);
    // Suspended machines keep their leases.
    let vms = daemon.get("/vms?power=suspended").1;
    let asleep = |vbd: &&Value| vms.as_array().unwrap().iter().any(|vm| vm["uuid"] == vbd["vm"]);
    let users: BTreeSet<String> =
        known.iter().cloned().chain(vbds.iter().filter(asleep).map(|vbd| named(&vbd))).collect();
    let running = processes(daemon);
    let tasks = daemon.get("/tasks?open=true").1;
    let checks = [
        ("on the way", on_the_way.count() == 0),
        ("processes", running == pids && pids.len() == plugged.len()),
        ("directories", places == known),
        ("leases", leased == users),
        ("writers", writers),
        ("tasks", tasks.as_array().unwrap().is_empty()),
    ];
    let wrong: Vec<&str> = checks.iter().filter(|(_, right)| !right).map(|(what, _)| *what).collect();
    if wrong.is_empty() {
        return String::new();
    }
    format!("{wrong:?}: {vbds:?}, running {running:?}, in the directory {places:?}, leased {leased:?}, {tasks}")
}

/// The holders of leases, and whether each VDI has at most one writer, and no readers in addition to it.
fn leases(daemon: &Taplined) -> (BTreeSet<String>, bool) {
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let copy: PathBuf = daemon.room().join("state/catalogue.db");
    // The daemon may be writing to it.
    let mut opened = None;
    super::wait_until("the catalogue can be opened beside the daemon", || {
        opened = Catalogue::open(&copy).ok();
        opened.is_some()
    });
    let catalogue = opened.unwrap();
    let holders = runtime.block_on(
        catalogue.read(|view| view.vdis(None)?.iter().map(|vdi| view.holders(vdi.uuid)).collect::<Result<Vec<_>, _>>()),
    );
    let holders = holders.unwrap();
    let alone = |of_vdi: &Vec<repo::catalogue::Holder>| {
        of_vdi.len() <= 1 || of_vdi.iter().all(|holder| holder.mode == api::Mode::ReadOnly)
    };
    let right = holders.iter().all(alone);
    (holders.into_iter().flatten().map(|holder| holder.holder.to_string()).collect(), right)
}

/// Changes the catalogue while no daemon runs.
fn change(daemon: &Taplined, change: impl FnOnce(&mut repo::Tx<'_>) -> Result<(), api::Problem> + Send + 'static) {
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let catalogue = Catalogue::open(&daemon.room().join("state/catalogue.db")).unwrap();
    runtime.block_on(catalogue.write(change)).unwrap();
}

/// Simulates a boot of the host.
pub fn reboot(daemon: &Taplined) {
    change(daemon, |tx| tx.set_meta("boot", "another life"));
}

/// Makes the catalogue forget all plugs.
pub fn forget_plugs(daemon: &Taplined) {
    change(daemon, |tx| {
        let vbds = tx.vbds(None, None)?;
        vbds.iter().try_for_each(|vbd| tx.end_unplug(vbd.uuid, None).map(drop))
    });
}

/// Checks that the inventory of every attached repository matches the catalogue, now or very soon.
#[track_caller]
pub fn inventory_agrees(daemon: &Taplined) {
    let catalogue = daemon.catalogue();
    let known = |sr: &str, sql: &str| -> BTreeSet<String> {
        let mut statement = catalogue.prepare(sql).unwrap();
        statement.query_map([sr], |row| row.get::<_, String>(0)).unwrap().map(Result::unwrap).collect()
    };
    let images = "SELECT concat_ws(' ', uuid, file, size, parent) FROM image WHERE sr = ?1";
    let vdis = "SELECT concat_ws(' ', vdi.uuid, image, name, description, snapshot_of, snapshot_time, created)
                FROM vdi JOIN image ON image.uuid = vdi.image WHERE image.sr = ?1";
    let said = |objects: &Value, keys: &[&str]| -> BTreeSet<String> {
        let text = |value: &Value| value.as_str().map_or_else(|| value.to_string(), String::from);
        let words = |object: &Value| {
            let known = keys.iter().filter_map(|key| object.get(key).map(text));
            known.collect::<Vec<_>>().join(" ")
        };
        objects.as_array().unwrap().iter().map(words).collect()
    };
    let srs = daemon.get("/srs").1;
    for sr in srs.as_array().unwrap().iter().filter(|sr| sr["state"] == "attached" && sr["source"]["type"] != "iso") {
        let uuid = sr["uuid"].as_str().unwrap();
        let mut differ = (BTreeSet::new(), BTreeSet::new());
        wait_until(&format!("the inventory of {uuid} agrees with the catalogue"), || {
            let inventory = daemon.get(&format!("/srs/{uuid}/inventory")).1;
            if inventory["images"].is_null() {
                return false;
            }
            let mut found = said(&inventory["images"], &["uuid", "file", "size", "parent"]);
            // A missing description is an empty one.
            let of_vdis = ["uuid", "image", "name", "description", "snapshot_of", "snapshot_time", "created"];
            found.extend(said(&inventory["vdis"], &of_vdis));
            let mut expected = known(uuid, images);
            expected.extend(known(uuid, vdis).into_iter().map(|words| words.replace("  ", " ")));
            differ = (&found - &expected, &expected - &found);
            differ == Default::default()
        });
    }
}
