//! The layers around the disks: their guests' statistics, and the host's devices beneath their images.
//!
//! Guests are queried concurrently, each with a time limit. A host device is that of the repository's file system,
//! whose number was determined when it was attached: storage is not accessed here. Invariant: an unknown layer has a
//! reason, and a guest's disk is identified by the serial number that the daemon has assigned.

use std::collections::HashMap;
use std::path::PathBuf;

use api::{DeviceOperations, DeviceStatistics, GuestLayer, HostLayer, Problem, Transport};
use stats::{Completed, DeviceLine, DeviceNumber, GuestAnswer, HostDevices};
use tokio::task::JoinSet;
use uuid::Uuid;

use super::{Plugged, is_served};
use crate::daemon::Daemon;
use crate::plug::serial;

/// A device's counters, and the time on its kernel's clock.
#[derive(Clone, Debug)]
pub struct Device {
    pub clock_ns: u64,
    pub line: DeviceLine,
}

/// The layers around a disk.
#[derive(Clone, Debug)]
pub struct Layers {
    /// The guest's device, or the reason why it is unknown.
    pub guest: Result<Device, String>,
    /// The host's device beneath the disk, then the whole disk of a partition; or the reason why they are unknown.
    pub host: Result<Vec<Device>, String>,
    /// Number of plugged disks on it.
    pub shared_by: u64,
}

/// The data about all guests and repositories, before the host's devices are read.
#[derive(Debug)]
pub struct Around {
    guests: HashMap<Uuid, Result<GuestAnswer, String>>,
    /// By repository: the device number of its file system, and its directory.
    directories: HashMap<Uuid, (u64, PathBuf)>,
    /// The repository of each plugged disk.
    plugged: Vec<Uuid>,
}

/// The data about all guests and host devices.
#[derive(Debug)]
pub struct Counted {
    guests: HashMap<Uuid, Result<GuestAnswer, String>>,
    devices: Result<HostDevices, String>,
    beneath: HashMap<Uuid, Result<DeviceNumber, String>>,
    shared: HashMap<DeviceNumber, u64>,
}

impl Around {
    /// Queries the guests of these disks.
    pub async fn of(daemon: &Daemon, disks: &[Plugged]) -> Result<Around, Problem> {
        let all = daemon.catalogue.read_for_client(|view| {
            let served = view.vbds(None, None)?.into_iter().filter(is_served);
            served.map(|vbd| Ok(view.vdi(vbd.vdi)?.sr)).collect::<Result<Vec<Uuid>, Problem>>()
        });
        let plugged = all.await?;
        let mut directories = HashMap::new();
        for sr in &plugged {
            if directories.contains_key(sr) {
                continue;
            }
            // One that is being detached has no directory any more.
            if let Ok(directory) = daemon.srs.directory(*sr).await {
                directories.insert(*sr, (directory.device(), directory.path().to_owned()));
            }
        }
        let mut queries = JoinSet::new();
        // Guests are queried only for disks with a serial number from their driver.
        let ours = disks.iter().filter(|disk| disk.vbd.transport == Transport::VhostUser);
        let vms: std::collections::BTreeSet<Uuid> = ours.filter_map(|disk| disk.vbd.vm).collect();
        for vm in vms {
            let daemon = daemon.clone();
            queries.spawn(async move { (vm, daemon.vms.query_guest(vm).await) });
        }
        Ok(Around { guests: queries.join_all().await.into_iter().collect(), directories, plugged })
    }

    /// Reads the counters of the host's kernel.
    pub fn read(self) -> Counted {
        let Around { guests, directories, plugged } = self;
        let of = |(device, path): &(u64, PathBuf)| stats::beneath_filesystem(*device, path);
        let beneath: HashMap<_, _> = directories.iter().map(|(sr, directory)| (*sr, of(directory))).collect();
        let mut shared = HashMap::new();
        for device in plugged.iter().filter_map(|sr| beneath.get(sr)?.as_ref().ok()) {
            *shared.entry(*device).or_default() += 1;
        }
        let devices = HostDevices::read().map_err(|error| format!("cannot read /proc/diskstats: {error}"));
        Counted { guests, devices, beneath, shared }
    }
}

impl Counted {
    /// The layers around a disk.
    pub fn layers(&self, disk: &Plugged) -> Layers {
        let device = self.beneath.get(&disk.sr).cloned();
        let device = device.unwrap_or_else(|| Err("its repository is not attached".into()));
        let shared_by = device.as_ref().map_or(0, |device| self.shared.get(device).copied().unwrap_or(0));
        Layers { guest: self.guest(disk), host: device.and_then(|device| self.host(device)), shared_by }
    }

    fn host(&self, device: DeviceNumber) -> Result<Vec<Device>, String> {
        let devices = self.devices.as_ref().map_err(Clone::clone)?;
        let of = |line: &DeviceLine| Device { clock_ns: devices.read, line: line.clone() };
        Ok(devices.of(device)?.into_iter().map(of).collect())
    }

    fn guest(&self, disk: &Plugged) -> Result<Device, String> {
        let vm = disk.vbd.vm.ok_or("no VM of this daemon has it")?;
        let answer = self.guests.get(&vm).ok_or("guests are queried about vhost-user disks only")?;
        let answer = answer.as_ref().map_err(Clone::clone)?;
        let line = answer.disk(&serial(disk.vbd.vdi)).map_err(|not_there| not_there.to_string())?;
        Ok(Device { clock_ns: answer.uptime_ns, line: line.clone() })
    }
}

impl Layers {
    /// The guest's layer as the API shows it.
    pub fn guest_shown(&self) -> GuestLayer {
        let (unknown, device) = (self.guest.as_ref().err().cloned(), self.guest.as_ref().ok().map(Device::shown));
        GuestLayer { unknown, device }
    }

    /// The host's layer as the API shows it.
    pub fn host_shown(&self) -> HostLayer {
        let devices = self.host.as_ref().map_or_else(|_| Vec::new(), |all| all.iter().map(Device::shown).collect());
        HostLayer { unknown: self.host.as_ref().err().cloned(), devices, shared_by: self.shared_by }
    }
}

impl Device {
    fn shown(&self) -> DeviceStatistics {
        let counts = &self.line.counts;
        DeviceStatistics {
            name: self.line.name.clone(),
            clock_ns: self.clock_ns,
            in_flight: counts.in_flight,
            busy_ms: counts.busy_ms,
            weighted_ms: counts.weighted_ms,
            read: shown(counts.reads),
            write: shown(counts.writes),
            discard: shown(counts.discards),
            flush: shown(counts.flushes),
        }
    }
}

fn shown(completed: Completed) -> DeviceOperations {
    let Completed { count, merged, bytes, ms } = completed;
    DeviceOperations { count, merged, size: bytes, time_ms: ms }
}
