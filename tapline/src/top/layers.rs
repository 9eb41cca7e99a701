//! The layers around a disk: what its guest's kernel counts for it, and the host's block device beneath its image.
//!
//! Both are read in a thread of their own, when the screen or a sample shows them, so that neither a guest nor storage
//! that does not answer keeps the screen waiting. It knows where figures come from, and not how they are shown.
//! Invariant: what is not known has a reason in its place.

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

/// The file system of an image is waited for so long before others are looked at.
const FILESYSTEM_WAITED: Duration = Duration::from_millis(500);

/// What a kernel has counted for a device by some moment of its clock.
#[derive(Clone, Debug, PartialEq)]
pub struct Device {
    /// What that kernel calls it.
    pub name: String,
    /// What it has counted.
    pub counts: DeviceCounts,
    /// What has come since the reading before, if there was one and nothing went back.
    pub rates: Option<DeviceRates>,
    clock_ns: u64,
}

/// The layers around a disk.
#[derive(Clone, Debug, PartialEq)]
pub struct Around {
    /// The guest's device, or why it is not known.
    pub guest: Result<Device, String>,
    /// The device beneath its image and, where that is a partition, the whole disk; or why they are not known.
    pub host: Result<Vec<Device>, String>,
    /// How many disks that have a page here are on it.
    pub shared_by: usize,
}

/// What the thread is asked.
#[derive(Debug, Default)]
struct Question {
    /// All images, by their pages: they may share a device.
    images: Vec<(PathBuf, PathBuf)>,
    /// Those that are shown, by their pages: the VBD, and the serial number.
    wanted: Vec<(PathBuf, Option<Uuid>, Option<String>)>,
}

type Answer = Vec<(PathBuf, Around)>;

/// What is known by now.
#[derive(Debug, Default)]
pub struct Layers {
    known: BTreeMap<PathBuf, Around>,
    channels: Option<(SyncSender<Question>, Receiver<Answer>)>,
}

impl Layers {
    /// Asks the daemon for the guests of its disks, and what listens in other guests at these sockets.
    pub fn new(daemon: Option<Client>, sockets: &[PathBuf]) -> Layers {
        let (questions, asked) = sync_channel(1);
        let (told, answers) = sync_channel(1);
        let mut teller = Teller::new(daemon, sockets);
        // It ends with the process, or when nobody takes its answers.
        let begun = std::thread::Builder::new().name("layers".into()).spawn(move || {
            while let Ok(question) = asked.recv() {
                if told.send(teller.tell(&question)).is_err() {
                    return;
                }
            }
        });
        let channels = begun.is_ok().then_some((questions, answers));
        Layers { known: BTreeMap::new(), channels }
    }

    /// Asks about these disks, unless an earlier question is still open. Whether it was asked.
    pub fn ask(&mut self, pages: &Pages, wanted: &[PathBuf]) -> bool {
        let image = |disk: &Disk| (disk.path.clone(), image_of(&disk.identity.image).to_owned());
        let wanted = wanted.iter().filter_map(|path| pages.disks.get(path));
        let question = Question {
            images: pages.disks.values().map(image).collect(),
            wanted: wanted.map(|disk| (disk.path.clone(), disk.vbd, disk.identity.serial.clone())).collect(),
        };
        let Some((questions, _)) = &self.channels else { return false };
        questions.try_send(question).is_ok()
    }

    /// Waits for the answer, at most so long.
    pub fn wait(&mut self, at_most: Duration) {
        if let Some(Ok(answer)) = self.channels.as_ref().map(|(_, answers)| answers.recv_timeout(at_most)) {
            self.put(answer);
        }
    }

    /// Takes what has come; whether something has.
    pub fn take(&mut self) -> bool {
        let Some(Ok(answer)) = self.channels.as_ref().map(|(_, answers)| answers.try_recv()) else { return false };
        self.put(answer);
        true
    }

    /// The layers around the disk with this page.
    pub fn of(&self, page: &Path) -> Option<&Around> {
        self.known.get(page)
    }

    /// Takes the next reading of each disk. Disks that were not asked about have none: the last one would be too long
    /// ago.
    fn put(&mut self, answer: Answer) {
        let before = std::mem::take(&mut self.known);
        for (page, mut now) in answer {
            if let Some(before) = before.get(&page) {
                now.follow(before);
            }
            self.known.insert(page, now);
        }
    }

    /// Two readings that are known from elsewhere, one after the other.
    #[cfg(test)]
    pub fn of_known(readings: [Answer; 2]) -> Layers {
        let mut layers = Layers::default();
        readings.into_iter().for_each(|reading| layers.put(reading));
        layers
    }
}

impl Around {
    fn follow(&mut self, before: &Around) {
        if let (Ok(now), Ok(before)) = (&mut self.guest, &before.guest) {
            now.follow(before);
        }
        if let (Ok(now), Ok(before)) = (&mut self.host, &before.host) {
            now.iter_mut().zip(before).for_each(|(now, before)| now.follow(before));
        }
    }
}

impl Device {
    /// A reading by itself.
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

/// The path in an image's name.
fn image_of(name: &str) -> &Path {
    Path::new(name.split_once(':').map_or(name, |(_, path)| path))
}

/// What is done in the thread.
struct Teller {
    daemon: Option<(Client, tokio::runtime::Runtime)>,
    sockets: Vec<GuestPort>,
    /// The devices beneath images, as far as their file systems have answered.
    beneath: HashMap<PathBuf, Beneath>,
}

enum Beneath {
    Known(Result<DeviceNumber, String>),
    Asked(Receiver<Result<DeviceNumber, String>>),
}

impl Teller {
    fn new(daemon: Option<Client>, sockets: &[PathBuf]) -> Teller {
        let daemon = daemon.and_then(|client| Some((client, crate::session::runtime().ok()?)));
        Teller { daemon, sockets: sockets.iter().map(|path| GuestPort::new(path)).collect(), beneath: HashMap::new() }
    }

    fn tell(&mut self, question: &Question) -> Answer {
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
                // Another program may run the guest of a VBD.
                Some(Err(why)) if inside.is_empty() => Err(why),
                _ => find(&inside, serial.as_deref()),
            };
            (page.clone(), Around { guest, host, shared_by })
        });
        answer.collect()
    }

    /// What the daemon's guests say.
    fn ask_daemon(&self, question: &Question) -> HashMap<Uuid, Result<Device, String>> {
        let vbds: Vec<Uuid> = question.wanted.iter().filter_map(|(_, vbd, _)| *vbd).collect();
        let Some((client, runtime)) = self.daemon.as_ref().filter(|_| !vbds.is_empty()) else { return HashMap::new() };
        let told = match vbds.as_slice() {
            [vbd] => runtime.block_on(client.vbd_statistics(*vbd)).map(|one| vec![one]),
            _ => runtime.block_on(client.statistics(true)),
        };
        let none = "the daemon is of a version that asks no guests";
        match told {
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

    /// The device beneath an image. A file system that does not answer is asked once.
    fn beneath(&mut self, image: &Path) -> Result<DeviceNumber, String> {
        let entry = self.beneath.entry(image.to_owned()).or_insert_with(|| {
            let (sender, answer) = sync_channel(1);
            let image = image.to_owned();
            std::thread::spawn(move || sender.send(stats::beneath(&image)).unwrap_or_default());
            match answer.recv_timeout(FILESYSTEM_WAITED) {
                Ok(known) => Beneath::Known(known),
                Err(_) => Beneath::Asked(answer),
            }
        });
        if let Beneath::Asked(answer) = entry {
            let Ok(known) = answer.try_recv() else { return Err("its file system does not answer".into()) };
            *entry = Beneath::Known(known);
        }
        match entry {
            Beneath::Known(known) => known.clone(),
            Beneath::Asked(_) => Err("its file system does not answer".into()),
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
        return Err("no guest is asked: give the socket of its port (--guest)".into());
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
