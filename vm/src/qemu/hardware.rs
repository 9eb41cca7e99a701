//! A machine's hardware as data: memory, processors, boot source, disks, console, platform.
//!
//! It knows nothing about QEMU's syntax and running machines. Invariant: hardware accepted by [`Hardware::check`] can
//! be expressed as QEMU options, and anything rejected is named.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use control::size::readable;
use serde::{Deserialize, Serialize};
use thiserror::Error;

use super::accelerator::Accelerator;
use super::platform::{Dvd, Nic, Platform, PlatformError, Port};
use super::slots::{Position, queues_default};

/// Less than any kernel boots in.
const MEMORY_MIB_MIN: u32 = 16;

/// The memory that the `pc` machine can address with 40 bits.
const MEMORY_MIB_MAX: u32 = 1 << 20;

/// Processors that the `pc` machine takes.
const VCPUS_MAX: u16 = 255;

/// Queues of one disk, as our own disk processes serve them at most.
const QUEUES_MAX: u16 = 64;

/// sockaddr_un.sun_path, without the terminating zero.
const SOCKET_LEN_MAX: usize = 107;

/// Maximum length of a name.
const NAME_LEN_MAX: usize = 64;

/// The hardware of a machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Hardware {
    /// Shown by ps, and in QEMU's messages.
    pub name: String,
    /// Memory, shared with the disks' processes.
    pub memory_mib: u32,
    /// Processors.
    pub vcpus: u16,
    /// The version of the machine, of which the guest's memory is: `pc-i440fx-7.2`. The newest by default.
    #[serde(default)]
    pub machine: Option<String>,
    /// The engine that executes the guest's instructions.
    pub accelerator: Accelerator,
    /// The boot source.
    pub boot: Boot,
    /// Its disks at the start, in any order.
    #[serde(default)]
    pub disks: Vec<Disk>,
    /// Where the guest's messages go; most guests have no console.
    #[serde(default)]
    pub console: Option<Console>,
    /// The image of a cloud-init seed, a disk for reading only.
    #[serde(default)]
    pub seed: Option<PathBuf>,
    /// The socket of the port through which a program in the guest reports the counters of its disks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub guest_port: Option<PathBuf>,
    /// Optional emulated devices.
    #[serde(default)]
    pub platform: Platform,
}

/// The boot source of a machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum Boot {
    /// A kernel, without any firmware's help in finding it.
    Kernel {
        /// Its image.
        kernel: PathBuf,
        /// Its first root file system.
        initrd: Option<PathBuf>,
        /// Its command line.
        command_line: String,
    },
    /// The boot loader that the firmware finds on the first bootable disk.
    Firmware,
}

/// A disk, served over vhost-user-blk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Disk {
    /// The position among the machine's disks, which determines the slot.
    pub position: Position,
    /// Where it is served. Its serial number, by which the guest names it below /dev/disk/by-id, is the answer of who
    /// serves it.
    pub socket: PathBuf,
    /// Its number of queues, at most as many as are served; by default as many as suit the machine.
    #[serde(default)]
    pub queues: Option<u16>,
    /// The firmware may boot from it.
    #[serde(default)]
    pub bootable: bool,
}

/// The guest's console.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Console {
    /// The device that the guest writes to.
    pub device: ConsoleDevice,
    /// Where it goes.
    pub to: ConsoleTo,
}

/// The device for a guest's messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ConsoleDevice {
    /// virtio's, `hvc0` in Linux: one interrupt a message, none at rest.
    Virtio,
    /// The serial port, `ttyS0`: for firmware and for guests without virtio; an exit for each byte.
    Serial,
}

/// Where a guest's messages go.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ConsoleTo {
    /// Appended to this file, which the guest can grow without limit: QEMU does not limit it.
    Log(PathBuf),
    /// To the client of this Unix socket; lost while there is none.
    Socket(PathBuf),
}

/// Why hardware is invalid.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum HardwareError {
    /// A number is out of range.
    #[error("{what} of {value}: must be {min} to {max}")]
    Range {
        /// The quantity that is out of range.
        what: String,
        /// The number.
        value: u32,
        /// The least.
        min: u32,
        /// The most.
        max: u32,
    },
    /// There is too little or too much memory, in MiB.
    #[error(
        "a machine cannot have {} of memory: it must be {} to {}",
        mib(*.0), mib(MEMORY_MIB_MIN), mib(MEMORY_MIB_MAX)
    )]
    Memory(u32),
    /// The name is not a name.
    #[error("the name {0:?} is invalid: use up to {NAME_LEN_MAX} letters, digits and any of -_.:+")]
    Name(String),
    /// Two disks at one position.
    #[error("two disks have the position {0}")]
    Position(u8),
    /// A path cannot be used.
    #[error("{what} {}: {why}", path.display())]
    Path {
        /// The purpose of the path.
        what: &'static str,
        /// The path.
        path: PathBuf,
        /// What is wrong with it.
        why: &'static str,
    },
    /// Firmware without a disk to boot from.
    #[error("there is nothing to boot from: give it a disk or a DVD, or boot a kernel")]
    NothingToBoot,
    /// Two users of one port.
    #[error("the console and platform:hvm_serial both use the serial port: give only one of them")]
    SerialTwice,
    /// A bridge without the tap interface in it.
    #[error("the network card is in the bridge {0}, and QEMU is to be given a tap interface in it")]
    Bridge(String),
    /// A platform key.
    #[error(transparent)]
    Platform(#[from] PlatformError),
}

impl Hardware {
    /// Whether there can be such a machine.
    pub fn check(&self) -> Result<(), HardwareError> {
        check_name(&self.name)?;
        if !(MEMORY_MIB_MIN..=MEMORY_MIB_MAX).contains(&self.memory_mib) {
            return Err(HardwareError::Memory(self.memory_mib));
        }
        within("a number of processors", self.vcpus.into(), 1, VCPUS_MAX.into())?;
        self.check_boot()?;
        let mut positions = BTreeSet::new();
        for disk in &self.disks {
            disk.check()?;
            if !positions.insert(disk.position) {
                return Err(HardwareError::Position(disk.position.number()));
            }
        }
        if let Some(console) = &self.console {
            match &console.to {
                ConsoleTo::Log(path) => check_path("the console's log", path)?,
                ConsoleTo::Socket(path) => check_socket("the console's socket", path)?,
            }
            if console.device == ConsoleDevice::Serial && self.platform.hvm_serial != Port::None {
                return Err(HardwareError::SerialTwice);
            }
        }
        self.seed.as_ref().map_or(Ok(()), |path| check_path("the cloud-init seed", path))?;
        self.guest_port.as_ref().map_or(Ok(()), |path| check_socket("the guest port's socket", path))?;
        if let Nic::Bridge { bridge, .. } = &self.platform.nic {
            return Err(HardwareError::Bridge(bridge.clone()));
        }
        Ok(self.platform.agree()?)
    }

    fn check_boot(&self) -> Result<(), HardwareError> {
        match &self.boot {
            Boot::Kernel { kernel, initrd, .. } => {
                check_path("the kernel", kernel)?;
                initrd.as_ref().map_or(Ok(()), |initrd| check_path("the initrd", initrd))
            }
            Boot::Firmware if self.disks.iter().any(|disk| disk.bootable) => Ok(()),
            Boot::Firmware if matches!(self.platform.dvd, Dvd::File(_)) => Ok(()),
            Boot::Firmware => Err(HardwareError::NothingToBoot),
        }
    }
}

impl Disk {
    /// Whether there can be such a disk.
    pub fn check(&self) -> Result<(), HardwareError> {
        let what = || format!("disk {}: a number of queues", self.position.number());
        self.queues.map_or(Ok(()), |queues| within(what(), queues.into(), 1, QUEUES_MAX.into()))?;
        check_socket("a disk's socket", &self.socket)
    }

    /// Its number of queues in a machine with this many processors.
    pub fn queues_in(&self, vcpus: u16) -> u16 {
        self.queues.unwrap_or_else(|| queues_default(vcpus))
    }
}

fn mib(number: u32) -> String {
    readable(u64::from(number) << 20)
}

fn within(what: impl Into<String>, value: u32, min: u32, max: u32) -> Result<(), HardwareError> {
    if (min..=max).contains(&value) {
        return Ok(());
    }
    Err(HardwareError::Range { what: what.into(), value, min, max })
}

fn check_name(name: &str) -> Result<(), HardwareError> {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.:+".contains(&byte);
    if (1..=NAME_LEN_MAX).contains(&name.len()) && name.bytes().all(plain) {
        return Ok(());
    }
    Err(HardwareError::Name(name.to_owned()))
}

/// QEMU may have a different working directory, and its options are text.
fn check_path(what: &'static str, path: &Path) -> Result<(), HardwareError> {
    let refuse = |why| Err(HardwareError::Path { what, path: path.to_owned(), why });
    match path.to_str() {
        None => refuse("not UTF-8, which cannot be passed to QEMU"),
        Some(text) if text.contains(char::is_control) => refuse("it has control characters"),
        Some(_) if !path.is_absolute() => refuse("not an absolute path"),
        Some(_) => Ok(()),
    }
}

fn check_socket(what: &'static str, path: &Path) -> Result<(), HardwareError> {
    check_path(what, path)?;
    if path.as_os_str().len() > SOCKET_LEN_MAX {
        let why = "longer than the 107 bytes allowed for a socket path";
        return Err(HardwareError::Path { what, path: path.to_owned(), why });
    }
    Ok(())
}

#[cfg(test)]
pub(crate) mod test {
    use super::*;

    pub(crate) fn small() -> Hardware {
        Hardware {
            name: "small".into(),
            memory_mib: 128,
            vcpus: 2,
            machine: None,
            accelerator: Accelerator::Tcg,
            boot: Boot::Kernel { kernel: "/k".into(), initrd: None, command_line: String::new() },
            disks: Vec::new(),
            console: None,
            seed: None,
            guest_port: None,
            platform: Platform::default(),
        }
    }

    pub(crate) fn disk(position: u8, socket: &str) -> Disk {
        let position = Position::new(position).unwrap();
        Disk { position, socket: socket.into(), queues: None, bootable: false }
    }

    fn refused(change: impl FnOnce(&mut Hardware)) -> String {
        let mut hardware = small();
        change(&mut hardware);
        hardware.check().unwrap_err().to_string()
    }

    #[test]
    fn impossible_hardware_is_refused_by_name() {
        small().check().unwrap();
        assert!(refused(|h| h.memory_mib = 1).contains("cannot have 1 MiB of memory: it must be 16 MiB to 1 TiB"));
        assert!(refused(|h| h.vcpus = 0).starts_with("a number of processors of 0: must be 1 to 255"));
        assert!(refused(|h| h.name = "a,b".into()).contains("\"a,b\" is invalid"));
        assert!(refused(|h| h.boot = Boot::Firmware).contains("nothing to boot from"));
        assert!(refused(|h| h.disks = vec![disk(3, "/a"), disk(3, "/b")]).contains("two disks have the position 3"));
        assert!(refused(|h| h.disks = vec![disk(0, "a.sock")]).contains("not an absolute path"));
        assert!(refused(|h| h.disks = vec![disk(0, &format!("/{}", "x".repeat(107)))]).contains("107 bytes"));
        assert!(
            refused(|h| h.disks = vec![Disk { queues: Some(0), ..disk(9, "/a") }])
                .contains("disk 9: a number of queues")
        );
        let bridge = Nic::Bridge { bridge: "br0".into(), mac: None };
        assert!(refused(|h| h.platform.nic = bridge).contains("the bridge br0"));
        assert!(refused(|h| h.platform.usb_tablet = true).contains("usb_tablet=true needs"));
        assert!(
            refused(|h| {
                h.console = Some(Console { device: ConsoleDevice::Serial, to: ConsoleTo::Log("/l".into()) });
                h.platform.hvm_serial = Port::Pty;
            })
            .contains("give only one of them")
        );
    }

    #[test]
    fn hardware_round_trips_and_unknown_fields_are_refused() {
        let mut hardware = small();
        hardware.disks = vec![disk(40, "/run/40.sock")];
        let text = serde_json::to_string(&hardware).unwrap();
        assert_eq!(serde_json::from_str::<Hardware>(&text).unwrap(), hardware);
        let more = text.replacen('{', "{\"floppy\":true,", 1);
        assert!(serde_json::from_str::<Hardware>(&more).unwrap_err().to_string().contains("floppy"));
    }
}
