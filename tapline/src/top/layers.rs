//! The layers around a disk: the figures of its guest's kernel, and of the host's block device beneath its image.
//!
//! Both are read in a separate thread when the screen or a sample shows them, so that neither a guest nor storage that
//! does not respond delays the screen. Invariant: an unknown layer has a reason instead of figures.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::Duration;

use api::DeviceStatistics;
use api::client::Client;
use stats::{Completed, DeviceCounts, DeviceNumber, DeviceRates, GuestAnswer, HostDevices};
use uuid::Uuid;
use vm::guest_port::GuestPort;

use super::pages::{Disk, Pages};

/// How long to wait for the file system of an image before the next image is looked up.
const FILESYSTEM_WAITED: Duration = Duration::from_millis(500);

/// Counters that a kernel has for a device at some time of its clock.
#[derive(Clone, Debug, PartialEq)]
pub struct Device {
    /// The kernel's name of the device.
    pub name: String,
    /// The counters since the device appeared.
    pub counts: DeviceCounts,
    /// Rates since the previous reading, if there was one and no counter fell.
    pub rates: Option<DeviceRates>,
    clock_ns: u64,
}

/// The layers around a disk.
#[derive(Clone, Debug, PartialEq)]
pub struct DiskLayers {
    /// The guest's device, or why it is unknown.
    pub guest: Result<Device, String>,
    /// The device beneath the image and, if that is a partition, the whole disk; or why they are unknown.
    pub host: Result<Vec<Device>, String>,
    /// Number of disks with a page here that are on the device.
    pub shared_by: usize,
}

/// A request to the thread.
#[derive(Debug, Default)]
struct LayerRequest {
    /// The images of all disks, by page, because they may share a device.
    images: Vec<(PathBuf, PathBuf)>,
    /// The disks to describe: page, VBD, and serial number.
    wanted: Vec<(PathBuf, Option<Uuid>, Option<String>)>,
}

type LayerReply = Vec<(PathBuf, DiskLayers)>;

/// The latest readings, by page.
#[derive(Debug, Default)]
pub struct Layers {
    known: BTreeMap<PathBuf, DiskLayers>,
    channels: Option<(SyncSender<LayerRequest>, Receiver<LayerReply>)>,
}

impl Layers {
    /// Starts the thread. It queries the daemon for the guests of its disks, and other guests at these sockets.
    pub fn new(daemon: Option<Client>, sockets: &[PathBuf]) -> Layers {
        let (requests, pending) = sync_channel(1);
        let (replies, answers) = sync_channel(1);
        let mut reader = LayerReader::new(daemon, sockets);
        // The thread ends with the process, or when the receiver is dropped.
        let begun = std::thread::Builder::new().name("layers".into()).spawn(move || {
            while let Ok(question) = pending.recv() {
                if replies.send(reader.read(&question)).is_err() {
                    return;
                }
            }
        });
        let channels = begun.is_ok().then_some((requests, answers));
        Layers { known: BTreeMap::new(), channels }
    }

    /// Requests the layers of these disks, unless an earlier request is pending. Returns true if it was sent.
    pub fn ask(&mut self, pages: &Pages, wanted: &[PathBuf]) -> bool {
        let image = |disk: &Disk| (disk.path.clone(), image_of(&disk.identity.image).to_owned());
        let wanted = wanted.iter().filter_map(|path| pages.disks.get(path));
        let question = LayerRequest {
            images: pages.disks.values().map(image).collect(),
            wanted: wanted.map(|disk| (disk.path.clone(), disk.vbd, disk.identity.serial.clone())).collect(),
        };
        let Some((requests, _)) = &self.channels else { return false };
        requests.try_send(question).is_ok()
    }

    /// Waits for the reply for at most this time.
    pub fn wait(&mut self, at_most: Duration) {
        if let Some(Ok(answer)) = self.channels.as_ref().map(|(_, answers)| answers.recv_timeout(at_most)) {
            self.store(answer);
        }
    }

    /// Takes a reply if there is one; returns true if so.
    pub fn take(&mut self) -> bool {
        let Some(Ok(answer)) = self.channels.as_ref().map(|(_, answers)| answers.try_recv()) else { return false };
        self.store(answer);
        true
    }

    /// The layers around the disk with this page.
    pub fn of(&self, page: &Path) -> Option<&DiskLayers> {
        self.known.get(page)
    }

    /// Stores the next reading of each disk. Disks that are not in it are removed: their next rates would cover too
    /// long an interval.
    fn store(&mut self, answer: LayerReply) {
        let before = std::mem::take(&mut self.known);
        for (page, mut now) in answer {
            if let Some(before) = before.get(&page) {
                now.follow(before);
            }
            self.known.insert(page, now);
        }
    }

    /// Layers from two successive readings.
    #[cfg(test)]
    pub fn of_known(readings: [LayerReply; 2]) -> Layers {
        let mut layers = Layers::default();
        readings.into_iter().for_each(|reading| layers.store(reading));
        layers
    }
}

impl DiskLayers {
    fn follow(&mut self, before: &DiskLayers) {
        if let (Ok(now), Ok(before)) = (&mut self.guest, &before.guest) {
            now.follow(before);
        }
        if let (Ok(now), Ok(before)) = (&mut self.host, &before.host) {
            now.iter_mut().zip(before).for_each(|(now, before)| now.follow(before));
        }
    }
}

impl Device {
    /// A first reading, without rates.
    pub fn new(name: &str, counts: DeviceCounts, clock_ns: u64) -> Device {
        Device { name: name.to_owned(), counts, rates: None, clock_ns }
    }

    fn follow(&mut self, before: &Device) {
        let passed = self.clock_ns.checked_sub(before.clock_ns);
        if self.name == before.name {
            self.rates = passed.and_then(|ns| self.counts.since(&before.counts, ns));
        }
    }

    fn of_daemon(device: &DeviceStatistics) -> Device {
        let completed = |of: &api::DeviceOperations| Completed {
            count: of.count,
            merged: of.merged,
            bytes: of.size,
            ms: of.time_ms,
        };
        let counts = DeviceCounts {
            reads: completed(&device.read),
            writes: completed(&device.write),
            discards: completed(&device.discard),
            flushes: completed(&device.flush),
            in_flight: device.in_flight,
            busy_ms: device.busy_ms,
            weighted_ms: device.weighted_ms,
        };
        Device::new(&device.name, counts, device.clock_ns)
    }
}

/// The path in the name of an image.
fn image_of(name: &str) -> &Path {
    Path::new(name.split_once(':').map_or(name, |(_, path)| path))
}

/// Reads the layers; owned by the thread.
struct LayerReader {
    daemon: Option<(Client, tokio::runtime::Runtime)>,
    sockets: Vec<GuestPort>,
    /// The devices beneath images, by image.
    beneath: HashMap<PathBuf, DeviceLookup>,
}

enum DeviceLookup {
    Known(Result<DeviceNumber, String>),
    Pending(Receiver<Result<DeviceNumber, String>>),
}

impl LayerReader {
    fn new(daemon: Option<Client>, sockets: &[PathBuf]) -> LayerReader {
        let daemon = daemon.and_then(|client| Some((client, crate::session::runtime().ok()?)));
        LayerReader {
            daemon,
            sockets: sockets.iter().map(|path| GuestPort::new(path)).collect(),
            beneath: HashMap::new(),
        }
    }

    fn read(&mut self, question: &LayerRequest) -> LayerReply {
        let of_daemon = self.ask_daemon(question);
        let inside: Vec<_> = self.sockets.iter_mut().map(GuestPort::ask).collect();
        let devices = HostDevices::read().map_err(|error| format!("cannot read /proc/diskstats: {error}"));
        let beneath: HashMap<&Path, Result<DeviceNumber, String>> =
            question.images.iter().map(|(page, image)| (page.as_path(), self.beneath(image))).collect();
        let answer = question.wanted.iter().map(|(page, vbd, serial)| {
            let device = beneath.get(page.as_path()).cloned().unwrap_or_else(|| Err("it has no image".into()));
            let shared_by = beneath.values().filter(|other| other.is_ok() && **other == device).count();
            let host = device.and_then(|number| host(devices.as_ref().map_err(Clone::clone)?, number));
            let silent = || Err("the daemon does not say".to_owned());
            let by_daemon = vbd.map(|vbd| of_daemon.get(&vbd).cloned().unwrap_or_else(silent));
            let guest = match by_daemon {
                Some(Ok(device)) => Ok(device),
                // The guest of a VBD may be run by another program.
                Some(Err(why)) if inside.is_empty() => Err(why),
                _ => find(&inside, serial.as_deref()),
            };
            (page.clone(), DiskLayers { guest, host, shared_by })
        });
        answer.collect()
    }

    /// The layers of the daemon's guests, by VBD.
    fn ask_daemon(&self, question: &LayerRequest) -> HashMap<Uuid, Result<Device, String>> {
        let vbds: Vec<Uuid> = question.wanted.iter().filter_map(|(_, vbd, _)| *vbd).collect();
        let Some((client, runtime)) = self.daemon.as_ref().filter(|_| !vbds.is_empty()) else { return HashMap::new() };
        let statistics = match vbds.as_slice() {
            [vbd] => runtime.block_on(client.vbd_statistics(*vbd)).map(|one| vec![one]),
            _ => runtime.block_on(client.statistics(true)),
        };
        let none = "this version of the daemon does not query guests";
        match statistics {
            Ok(disks) => disks
                .into_iter()
                .map(|disk| {
                    let guest = disk.guest.map(|guest| match (guest.device, guest.unknown) {
                        (Some(device), None) => Ok(Device::of_daemon(&device)),
                        (_, unknown) => Err(unknown.unwrap_or_default()),
                    });
                    (disk.vbd, guest.unwrap_or_else(|| Err(none.into())))
                })
                .collect(),
            Err(problem) => vbds.into_iter().map(|vbd| (vbd, Err(problem.detail.clone()))).collect(),
        }
    }

    /// The device beneath an image. A file system that does not respond is queried only once.
    fn beneath(&mut self, image: &Path) -> Result<DeviceNumber, String> {
        let entry = self.beneath.entry(image.to_owned()).or_insert_with(|| {
            let (sender, answer) = sync_channel(1);
            let image = image.to_owned();
            std::thread::spawn(move || sender.send(stats::beneath(&image)).unwrap_or_default());
            match answer.recv_timeout(FILESYSTEM_WAITED) {
                Ok(known) => DeviceLookup::Known(known),
                Err(_) => DeviceLookup::Pending(answer),
            }
        });
        if let DeviceLookup::Pending(answer) = entry {
            let Ok(known) = answer.try_recv() else { return Err("its file system does not answer".into()) };
            *entry = DeviceLookup::Known(known);
        }
        match entry {
            DeviceLookup::Known(known) => known.clone(),
            DeviceLookup::Pending(_) => Err("its file system does not answer".into()),
        }
    }
}

fn host(devices: &HostDevices, number: DeviceNumber) -> Result<Vec<Device>, String> {
    let of = |line: &stats::DeviceLine| Device::new(&line.name, line.counts, devices.read);
    Ok(devices.of(number)?.into_iter().map(of).collect())
}

/// The device with this serial number in one of these guests.
fn find(guests: &[Result<GuestAnswer, String>], serial: Option<&str>) -> Result<Device, String> {
    let serial = serial.ok_or("its guest does not know it by a serial number")?;
    if guests.is_empty() {
        return Err("no guest is queried: give the socket of its port (--guest)".into());
    }
    let mut found = Vec::new();
    for answer in guests.iter().flatten() {
        match answer.disk(serial) {
            Ok(line) => found.push(Device::new(&line.name, line.counts, answer.uptime_ns)),
            Err(stats::NotThere::None) => {}
            Err(several) => return Err(several.to_string()),
        }
    }
    let why = || guests.iter().find_map(|guest| guest.as_ref().err().cloned());
    match (found.pop(), found.pop()) {
        (Some(device), None) => Ok(device),
        (None, _) => Err(why().unwrap_or_else(|| stats::NotThere::None.to_string())),
        _ => Err("several guests have a disk with its serial number".into()),
    }
}

#[cfg(test)]
#[path = "layers/test.rs"]
mod test;
