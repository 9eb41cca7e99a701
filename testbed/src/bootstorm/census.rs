//! Checks that the daemon's objects, the processes and the directories agree: no VDI lost, stuck, used twice or leaked.
//!
//! It runs without kills, and waits until nothing is in progress.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::daemon::api::{Api, REST};
use crate::daemon::processes::Places;

/// Maximum time until nothing is in progress.
const TO_SETTLE: Duration = Duration::from_secs(120);

/// The expected objects.
#[derive(Clone, Copy, Debug)]
pub struct Expected {
    /// Number of VDIs, without the golden one.
    pub vdis: usize,
    /// VBDs.
    pub vbds: usize,
    /// Number of plugged VBDs; `None` if any number is allowed.
    pub plugged: Option<usize>,
}

/// The errors when nothing is in progress any more; empty if there are none.
pub fn census(api: &Api, places: &Places, expected: Expected) -> Vec<String> {
    let begin = Instant::now();
    loop {
        let wrong = look(api, places, expected).unwrap_or_else(|why| vec![why]);
        if wrong.is_empty() || begin.elapsed() > TO_SETTLE {
            return wrong;
        }
        std::thread::sleep(REST);
    }
}

fn look(api: &Api, places: &Places, expected: Expected) -> Result<Vec<String>, String> {
    let list = |path: &str| api.list(path).map_err(|trouble| trouble.to_string());
    let (vdis, vbds, vms) = (list("/vdis")?, list("/vbds")?, list("/vms")?);
    let mut wrong = Vec::new();
    for task in list("/tasks?open=true")? {
        wrong.push(format!("a task does not end: {task}"));
    }
    wrong.extend(counts(&vdis, &vbds, expected));
    wrong.extend(files(&vdis, places)?);
    wrong.extend(disks(&vbds, &vdis, places)?);
    wrong.extend(machines(&vms, places)?);
    if vbds.iter().all(|vbd| vbd["state"] == "unplugged") {
        wrong.extend(locks(places)?);
    }
    Ok(wrong)
}

fn text<'a>(object: &'a Value, key: &str) -> &'a str {
    object[key].as_str().unwrap_or_default()
}

/// The texts under a key in all objects.
fn all<'a>(objects: impl IntoIterator<Item = &'a Value>, key: &str) -> BTreeSet<String> {
    objects.into_iter().map(|object| text(object, key).to_owned()).collect()
}

/// The differences between two sets.
fn compare(what: &str, there: &BTreeSet<String>, known: &BTreeSet<String>) -> Vec<String> {
    let leaked = there.difference(known).map(|one| format!("{what} that nobody knows: {one}"));
    let lost = known.difference(there).map(|one| format!("{what} that is not there: {one}"));
    leaked.chain(lost).collect()
}

fn counts(vdis: &[Value], vbds: &[Value], expected: Expected) -> Vec<String> {
    let mut wrong = Vec::new();
    if vdis.len() != expected.vdis + 1 || all(vdis, "name").len() != vdis.len() {
        wrong.push(format!("{} VDIs and the golden one were made, and there are {}", expected.vdis, vdis.len()));
    }
    if vbds.len() != expected.vbds {
        wrong.push(format!("{} VBDs were made, and there are {}", expected.vbds, vbds.len()));
    }
    let of_state = |state: &str| vbds.iter().filter(|vbd| vbd["state"] == state).count();
    let plugged = of_state("plugged");
    if expected.plugged.is_some_and(|expected| expected != plugged) {
        wrong.push(format!("{:?} VBDs should be plugged, and {plugged} are", expected.plugged));
    }
    let stuck = vbds.iter().filter(|vbd| !["plugged", "unplugged"].contains(&text(vbd, "state")));
    wrong.extend(stuck.map(|vbd| format!("a VBD is stuck: {vbd}")));
    let not_ready = vdis.iter().filter(|vdi| vdi["state"] != "ready");
    wrong.extend(not_ready.map(|vdi| format!("a VDI is lost: {vdi}")));
    wrong
}

/// The repository must contain exactly the files of the VDIs: no image is hidden here.
fn files(vdis: &[Value], places: &Places) -> Result<Vec<String>, String> {
    let mut there = names(&places.sr)?;
    // Without the files of the repository itself.
    there.retain(|name| Path::new(name).extension().is_some_and(|end| end == "qcow2"));
    Ok(compare("a file", &there, &all(vdis, "file")))
}

/// Processes, socket directories and leases must be those of the plugged VBDs.
fn disks(vbds: &[Value], vdis: &[Value], places: &Places) -> Result<Vec<String>, String> {
    let plugged: Vec<&Value> = vbds.iter().filter(|vbd| vbd["state"] == "plugged").collect();
    let known: BTreeSet<String> =
        plugged.iter().map(|vbd| format!("{} of {}", vbd["pid"], text(vbd, "uuid"))).collect();
    let running = places.disks();
    let mut wrong = Vec::new();
    wrong.extend(
        running.iter().filter(|disk| disk.vbd.is_none()).map(|disk| format!("an image job does not end: {disk:?}")),
    );
    let serving = running.iter().filter_map(|disk| Some(format!("{} of {}", disk.pid, disk.vbd.as_ref()?))).collect();
    wrong.extend(compare("a disk process", &serving, &known));
    let plugged_uuids = all(plugged.iter().copied(), "uuid");
    wrong.extend(compare("a directory of sockets", &names(&places.vbds())?, &plugged_uuids));
    let users = |vdi: &Value| vdi["users"].as_array().cloned().unwrap_or_default();
    let leased: BTreeSet<String> = vdis.iter().flat_map(users).map(|user| text(&user, "vbd").to_owned()).collect();
    wrong.extend(compare("a lease", &leased, &plugged_uuids));
    let several = vdis.iter().filter(|vdi| users(vdi).len() > 1);
    wrong.extend(several.map(|vdi| format!("a VDI is doubly active: {vdi}")));
    let logs = names(&places.room.join("log/vbd"))?;
    let of_vbds = all(vbds, "uuid");
    let leaked = logs.iter().filter(|name| name.split_once('.').is_none_or(|(vbd, _)| !of_vbds.contains(vbd)));
    wrong.extend(leaked.map(|name| format!("a log of a VBD that is no more: {name}")));
    Ok(wrong)
}

fn machines(vms: &[Value], places: &Places) -> Result<Vec<String>, String> {
    let settled = |vm: &&Value| ["halted", "running"].contains(&text(vm, "power"));
    let mut wrong: Vec<String> =
        vms.iter().filter(|vm| !settled(vm)).map(|vm| format!("a VM is stuck: {vm}")).collect();
    let running: Vec<&Value> = vms.iter().filter(|vm| vm["power"] == "running").collect();
    let there: BTreeSet<String> = places.machines().iter().map(u32::to_string).collect();
    wrong.extend(compare("a QEMU", &there, &running.iter().map(|vm| vm["pid"].to_string()).collect()));
    wrong.extend(compare("a directory of a VM", &names(&places.vms())?, &all(running, "uuid")));
    Ok(wrong)
}

/// No process may hold a lock on a file of the repository.
fn locks(places: &Places) -> Result<Vec<String>, String> {
    let failed = |error: std::io::Error| format!("{}: {error}", places.sr.display());
    let mut inodes = BTreeMap::new();
    for entry in fs::read_dir(&places.sr).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        // The file may be removed meanwhile.
        if let Ok(found) = entry.metadata() {
            inodes.insert(found.ino().to_string(), entry.file_name());
        }
    }
    let table = fs::read_to_string("/proc/locks").map_err(|error| format!("/proc/locks: {error}"))?;
    // proc_locks(5): 1: OFDLCK ADVISORY READ -1 fd:01:1234 100 201
    let locked = table.lines().filter(|line| line.contains("OFDLCK"));
    let ours = locked.filter_map(|line| {
        let inode = line
            .split_whitespace()
            .find_map(|word| word.rsplit_once(':').filter(|(device, _)| device.contains(':')))?
            .1;
        inodes.get(inode).map(|file| format!("{} is locked, and nobody uses it: {line}", file.to_string_lossy()))
    });
    Ok(ours.collect())
}

/// The names in a directory.
fn names(directory: &Path) -> Result<BTreeSet<String>, String> {
    let failed = |error: std::io::Error| format!("{}: {error}", directory.display());
    let entries = fs::read_dir(directory).map_err(failed)?;
    entries.map(|entry| Ok(entry.map_err(failed)?.file_name().to_string_lossy().into_owned())).collect()
}
