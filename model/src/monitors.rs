//! Compares the VMs of the daemon, their processes and their monitors at rest.

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;

use serde_json::Value;

use super::check::{names_in, text};
use super::machines::Power;
use super::verbs::patience;
use super::world::World;

impl World {
    /// Compares the VMs of the API with the processes and their states in QMP.
    pub fn compare_machines(&mut self) -> Result<(), String> {
        let shown = self.list("/vms")?;
        let uuids: BTreeSet<String> = shown.iter().map(|vm| text(&vm["uuid"])).collect();
        if uuids != self.vms.keys().cloned().collect() {
            return Err(format!("VMs are {uuids:?}, should be {:?}", self.vms));
        }
        for now in &shown {
            let uuid = text(&now["uuid"]);
            let vm = self.vm(&uuid)?.clone();
            let said = vm.shown.as_object().into_iter().flatten();
            let differs = said.filter(|(key, value)| now[key.as_str()] != **value).count();
            let power = now["power"].as_str().and_then(Power::parse);
            let pid = self.bed.places.machine(&uuid).map(u64::from);
            let pid_differs = now["pid"].as_u64() != pid;
            if differs > 0 || power != Some(vm.power) || pid_differs {
                return Err(format!("VM {uuid} is {now}, its process {pid:?}; should be {vm:?}"));
            }
            if (vm.power != Power::Halted) != pid.is_some() {
                return Err(format!("VM {uuid} is {:?}, and its process is {pid:?}", vm.power));
            }
        }
        let (running, known) = (self.bed.places.machines().len(), self.running_vms().len());
        if running != known {
            return Err(format!("{running} QEMUs run, should be {known}"));
        }
        let places: BTreeSet<String> = names_in(&self.bed.places.vms()).unwrap_or_default();
        if places != self.running_vms().into_iter().collect() {
            return Err(format!("places of VMs {places:?}, should be of {:?}", self.running_vms()));
        }
        self.compare_vm_snapshots()
    }

    /// VMs that are not halted.
    pub fn running_vms(&self) -> Vec<String> {
        self.vms.iter().filter(|(_, vm)| vm.power != Power::Halted).map(|(uuid, _)| uuid.clone()).collect()
    }

    /// Queries the QEMUs through QMP while no daemon is connected to it.
    pub fn query_monitors(&mut self) -> Result<(), String> {
        let running = self.running_vms();
        if running.is_empty() {
            return Ok(());
        }
        self.kill_daemon()?;
        for vm in running {
            let monitor = self.bed.places.vms().join(&vm).join("monitor");
            let (status, disks) =
                query_monitor(&monitor).map_err(|error| format!("the monitor of VM {vm}: {error}"))?;
            let power = self.vm(&vm)?.power;
            let plugged: BTreeSet<String> = self
                .vbds
                .values()
                .filter(|vbd| vbd.vm.as_ref() == Some(&vm) && vbd.plugged)
                .map(|vbd| format!("disk{}", vbd.position))
                .collect();
            if status != power.status() || disks != plugged {
                return Err(format!("QEMU of VM {vm}: {status}, {disks:?}; should be {power:?}, {plugged:?}"));
            }
        }
        self.count("ask monitors");
        self.rest()
    }
}

/// The state of a QEMU's guest and the names of its disks.
fn query_monitor(socket: &std::path::Path) -> Result<(String, BTreeSet<String>), String> {
    let failed = |error: std::io::Error| error.to_string();
    let mut monitor = UnixStream::connect(socket).map_err(failed)?;
    monitor.set_read_timeout(Some(patience())).map_err(failed)?;
    let mut said = BufReader::new(monitor.try_clone().map_err(failed)?).lines();
    let mut ask = |order: &str| -> Result<Value, String> {
        monitor.write_all(order.as_bytes()).map_err(failed)?;
        for line in said.by_ref() {
            let value: Value = serde_json::from_str(&line.map_err(failed)?).map_err(|error| error.to_string())?;
            if !value["return"].is_null() {
                return Ok(value["return"].clone());
            }
            if !value["error"].is_null() {
                return Err(value.to_string());
            }
        }
        Err("it has ended".into())
    };
    ask("{\"execute\":\"qmp_capabilities\"}\n")?;
    let status = text(&ask("{\"execute\":\"query-status\"}\n")?["status"]);
    let list = ask("{\"execute\":\"qom-list\",\"arguments\":{\"path\":\"/machine/peripheral\"}}\n")?;
    let names = list.as_array().into_iter().flatten().map(|one| text(&one["name"]));
    Ok((status, names.filter(|name| is_disk(name)).collect()))
}

fn is_disk(name: &str) -> bool {
    name.strip_prefix("disk").is_some_and(|rest| !rest.is_empty() && rest.bytes().all(|byte| byte.is_ascii_digit()))
}
