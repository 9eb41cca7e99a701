//! A real guest in a machine of the `vm` crate's driver: all disks are visible, disks are plugged and unplugged at run
//! time, another driver finds the machine again, and the power button works.
//!
//! Tests the crate `vm`. The guest's messages are read from the log of its console.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use control::in_full;
use vm::qemu::console::GUEST_PORT;
use vm::qemu::hardware::{Console, ConsoleDevice, ConsoleTo, Disk, Hardware};
use vm::qemu::machine::{Ended, Ending, MachineError, QemuVm, Status};
use vm::qemu::platform::Platform;
use vm::qemu::seed;
use vm::qemu::slots::{FIRST_BRIDGE_SLOT, PciSlot, Position, SEED_SLOT};

use super::story::{Failure, Story};
use crate::guest::{self, Job, protocol_line};
use crate::tapline::{Access, DiskProcess};
use crate::tool;

/// Timeout for a guest under TCG on a loaded machine; with 255 disks its firmware alone takes minutes.
const PATIENCE: Duration = Duration::from_secs(600);

/// Timeout after which a stopped guest counts as not releasing a disk.
const SHORT: Duration = Duration::from_secs(1);

const POLL: Duration = Duration::from_millis(50);

/// Lines of the console that are shown if a guest has ended too early.
const LAST_LINES: usize = 20;

/// The machine's directory below the test's.
const MACHINE: &str = "machine";

/// A position on none of the bridges that a small test uses.
const FAR: u8 = 200;

/// Disks as seen by the guest: serial number by PCI address.
type SeenDisks = BTreeMap<String, String>;

/// A machine that is killed on drop.
pub(super) struct Bound(pub(super) Option<QemuVm>);

impl Drop for Bound {
    fn drop(&mut self) {
        if let Some(Err(error)) = self.0.take().map(|mut machine| machine.end()) {
            eprintln!("{}", in_full(&error));
        }
    }
}

/// A symbolic link with a short path to a directory: a socket's path has at most 107 bytes, and a checkout's may be
/// long.
pub(super) struct ShortWay(pub(super) PathBuf);

impl ShortWay {
    pub(super) fn to(directory: &Path) -> Result<ShortWay, Failure> {
        let way = std::env::temp_dir().join(format!("tapline-machine-{}", std::process::id()));
        let failed = |source| Failure::File { what: "create", path: way.clone(), source };
        std::os::unix::fs::symlink(directory, &way).map_err(failed)?;
        Ok(ShortWay(way))
    }
}

impl Drop for ShortWay {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_file(&self.0) {
            eprintln!("cannot remove {}: {error}", self.0.display());
        }
    }
}

/// A machine and its environment in a test.
pub(super) struct Bed {
    pub(super) hardware: Hardware,
    sockets: ShortWay,
    pub(super) directory: PathBuf,
    pub(super) console: PathBuf,
    /// The disks, by position.
    pub(super) disks: BTreeMap<u8, DiskProcess>,
    /// Size of each disk in bytes.
    len: u64,
}

impl Story<'_> {
    /// Tests all operations of the driver on a machine with `disks` disks.
    pub fn machine(&mut self, disks: u8) -> Result<(), Failure> {
        self.progress.step(&format!("a machine of our own driver, with {disks} disks"));
        let job = Job { name: "machine", script: include_str!("../../guest/jobs/machine.sh"), parameters: Vec::new() };
        let mut bed = self.bed(&job, disks, 1 << 20)?;
        let qemu = Path::new("qemu-system-x86_64");
        let mut bound = Bound(Some(QemuVm::start(qemu, &bed.hardware, &bed.directory, PATIENCE)?));
        let Some(machine) = &mut bound.0 else { unreachable!("it was just put there") };
        self.sees(&bed, machine, &format!("the guest sees {disks} disks, each at its place with its serial number"))?;
        self.plugs(&mut bed, machine, disks)?;
        self.waits_for_the_guest(&mut bed, machine)?;
        let identity = machine.identity().clone();
        drop(bound.0.take());
        let machine = bound.0.insert(QemuVm::adopt(&identity, &bed.directory, PATIENCE)?);
        let found = (machine.status()?, machine.disks()?.len());
        let expected = (Status::Running, bed.disks.len());
        self.claim("found again, the machine runs and has its disks", found == expected, || format!("{found:?}"))?;
        let ending = machine.shutdown(PATIENCE)?;
        let kept = self.work.join(MACHINE);
        let pressed = said_in(&bed.console, "pressed")?.is_some();
        self.claim("the guest reacts to the power button and powers off", ending == Ending::Guest && pressed, || {
            format!("{ending:?}; see {}", kept.display())
        })?;
        let ended = machine.ended()?;
        self.claim("QEMU has ended by itself", ended.is_some(), || "it runs".to_owned())?;
        bed.disks.into_values().try_for_each(DiskProcess::stop)?;
        Ok(())
    }

    /// Creates a machine that runs `job`, with `disks` disks of `len` bytes.
    pub(super) fn bed(&self, job: &Job, disks: u8, len: u64) -> Result<Bed, Failure> {
        let sockets = ShortWay::to(self.work)?;
        let directory = sockets.0.join(MACHINE);
        let failed = |source| Failure::File { what: "create", path: directory.clone(), source };
        fs::create_dir_all(&directory).map_err(failed)?;
        fs::set_permissions(&directory, fs::Permissions::from_mode(0o700)).map_err(failed)?;
        let console = directory.join(format!("{}.console", job.name));
        let hardware = Hardware {
            name: "guest-test".to_owned(),
            memory_mib: guest::MEMORY_MIB,
            // With four, all of 255 disks have interrupt vectors.
            vcpus: 4,
            machine: None,
            accelerator: self.guest.accelerator(),
            boot: self.guest.boot_of(job, self.work)?,
            disks: Vec::new(),
            console: Some(Console { device: ConsoleDevice::Serial, to: ConsoleTo::Log(console.clone()) }),
            seed: Some(self.seed()?),
            guest_port: Some(directory.join(GUEST_PORT)),
            platform: Platform::default(),
        };
        let mut bed = Bed { hardware, sockets, directory, console, disks: BTreeMap::new(), len };
        for number in 0..disks {
            let disk = self.served(&mut bed, number)?;
            bed.hardware.disks.push(disk);
        }
        Ok(bed)
    }

    /// A cloud-init seed, which the guest finds after all disks.
    fn seed(&self) -> Result<PathBuf, Failure> {
        let path = self.work.join("seed.img");
        let failed = |source| Failure::File { what: "create", path: path.clone(), source };
        let image = seed::image(&[("meta-data", "instance-id: a\n"), ("user-data", "#cloud-config\n")]);
        image.and_then(|image| fs::write(&path, image)).map_err(failed)?;
        Ok(path)
    }

    /// Serves a disk with its own image.
    fn served(&self, bed: &mut Bed, number: u8) -> Result<Disk, Failure> {
        let file = format!("position-{number}.raw");
        let image = self.work.join(&file);
        let failed = |source| Failure::File { what: "create", path: image.clone(), source };
        File::create(&image).and_then(|file| file.set_len(bed.len)).map_err(failed)?;
        let served = self.tapline.serve(&[&format!("raw:{file}")], Access::ReadWrite, 4)?;
        let position = position(number)?;
        let disk = Disk { position, socket: bed.sockets.0.join(served.socket()), queues: None, bootable: false };
        bed.disks.insert(number, served);
        Ok(disk)
    }

    /// Plugs a disk behind an unused bridge, and unplugs two.
    fn plugs(&mut self, bed: &mut Bed, machine: &mut QemuVm, disks: u8) -> Result<(), Failure> {
        if disks <= FAR {
            let disk = self.served(bed, FAR)?;
            machine.plug(&disk)?;
            self.sees(bed, machine, "a disk that is plugged while the guest runs is at its place")?;
        }
        for number in [FAR, 1] {
            machine.unplug(position(number)?, PATIENCE)?;
            if let Some(disk) = bed.disks.remove(&number) {
                disk.stop()?;
            }
        }
        self.sees(bed, machine, "disks that are unplugged are gone from the guest, and the others stay")
    }

    /// A stopped guest keeps its disk; when it continues it releases the disk, and the position is free.
    fn waits_for_the_guest(&mut self, bed: &mut Bed, machine: &mut QemuVm) -> Result<(), Failure> {
        let position = position(2)?;
        machine.pause()?;
        let held = machine.unplug(position, SHORT);
        self.claim(
            "a guest that stands still keeps its disk, which is said",
            matches!(held, Err(MachineError::Held { .. })) && machine.disks()?.contains(&position),
            || format!("{held:?}"),
        )?;
        machine.resume()?;
        let deadline = Instant::now() + PATIENCE;
        while machine.disks()?.contains(&position) && Instant::now() < deadline {
            thread::sleep(POLL);
        }
        let disk = bed.hardware.disks.iter().find(|disk| disk.position == position);
        machine.plug(disk.ok_or(Failure::Position(2))?)?;
        self.sees(bed, machine, "it lets go when it runs again, and the disk is plugged again")?;
        // QEMU's event about the earlier disk must not be taken for this one.
        machine.unplug(position, PATIENCE)?;
        let disk = bed.disks.remove(&position.number());
        self.sees(bed, machine, "and unplugged again")?;
        disk.map_or(Ok(()), |disk| Ok(disk.stop()?))
    }

    /// Waits until the guest reports exactly the disks that are served, and the seed.
    fn sees(&mut self, bed: &Bed, machine: &mut QemuVm, claim: &str) -> Result<(), Failure> {
        let seed = (at(SEED_SLOT), seed::LABEL.to_owned());
        let served = bed.disks.iter().map(|(&number, disk)| Ok((place(number)?, disk.serial().to_owned())));
        let mut expected: SeenDisks = served.collect::<Result<_, Failure>>()?;
        expected.extend([seed]);
        let deadline = Instant::now() + PATIENCE;
        loop {
            let seen = said_in(&bed.console, "disks")?.map(|said| seen_in(&said)).unwrap_or_default();
            if seen == expected {
                self.holds(claim);
                return Ok(());
            }
            let ended = machine.ended()?;
            if Instant::now() > deadline || ended.is_some() {
                let found = format!("{} disks: {seen:?}; see {}", seen.len(), self.work.join(MACHINE).display());
                return self
                    .claim(claim, false, || ended.map_or(found.clone(), |ended| about(&found, &ended, &bed.console)));
            }
            self.progress.live(&format!("the guest has {} disks of {}", seen.len(), expected.len()));
            thread::sleep(POLL);
        }
    }
}

fn position(number: u8) -> Result<Position, Failure> {
    Position::new(number).ok_or(Failure::Position(number))
}

/// Describes a QEMU that has ended too early.
fn about(found: &str, ended: &Ended, console: &Path) -> String {
    let lines = fs::read(console).map(|bytes| tool::last_lines(&String::from_utf8_lossy(&bytes), LAST_LINES));
    let console = lines.unwrap_or_else(|error| error.to_string());
    let Ended { status, shutdown, said } = ended;
    format!("{found}\nQEMU has ended: {status:?}, {shutdown:?}; it said: {said}\nthe end of the console:\n{console}")
}

/// The PCI address in the job's format.
fn place(number: u8) -> Result<String, Failure> {
    Ok(at(position(number)?.pci_slot()))
}

fn at(slot: PciSlot) -> String {
    format!("{:02x}.{:02x}", FIRST_BRIDGE_SLOT + slot.bridge, slot.slot)
}

/// Parses `3: 10.01=position-0 …`.
fn seen_in(said: &str) -> SeenDisks {
    let words = said.split_whitespace().skip(1);
    words.filter_map(|word| word.split_once('=')).map(|(place, serial)| (place.to_owned(), serial.to_owned())).collect()
}

/// The last value of `key` in a guest's console log; an incomplete last line is ignored.
pub(super) fn said_in(console: &Path, key: &str) -> Result<Option<String>, Failure> {
    let failed = |source| Failure::File { what: "read", path: console.to_owned(), source };
    let bytes = fs::read(console).map_err(failed)?;
    let text = String::from_utf8_lossy(&bytes);
    let whole = text.rsplit_once('\n').map_or("", |(whole, _)| whole);
    let lines = whole.lines().rev().map(|line| line.rsplit('\r').find(|part| !part.is_empty()).unwrap_or_default());
    let found = lines.filter_map(protocol_line).find(|(said, _)| *said == key);
    Ok(found.map(|(_, value)| value.to_owned()))
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn the_last_whole_line_of_a_console_counts() {
        let room = tempfile::tempdir().unwrap();
        let console = room.path().join("console");
        fs::write(&console, "x\r\n\rTAPLINE disks=0:\r\n\rTAPLINE disks=1: 10.01=a\r\n\rTAPLINE disks=2: 10.0")
            .unwrap();
        let said = said_in(&console, "disks").unwrap().unwrap();
        assert_eq!(seen_in(&said), SeenDisks::from([("10.01".to_owned(), "a".to_owned())]));
        assert_eq!(said_in(&console, "pressed").unwrap(), None);
    }

    #[test]
    fn places_are_as_the_guest_says_them() {
        assert_eq!(place(0).unwrap(), "10.01");
        assert_eq!(place(40).unwrap(), "11.0a");
        assert_eq!(place(254).unwrap(), "18.07");
    }
}
