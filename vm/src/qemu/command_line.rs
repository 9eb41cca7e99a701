//! QEMU's command line for given hardware, each option here for a reason.
//!
//! It knows nothing about processes. Invariant: the same hardware gives the same command line, and a disk present at
//! the start has the same device and name as a hot-plugged one (`disk_device`). Written for QEMU 7.2 and later.

use std::path::Path;

use serde_json::{Value, json};

use super::hardware::{Boot, Console, ConsoleDevice, ConsoleTo, Disk, Hardware};
use super::platform::{Dvd, Nic, Platform, Port, Vga};
use super::slots::{BRIDGES, FIRST_BRIDGE_SLOT, Position, SEED_SLOT};
use super::version::Version;
use crate::syntax::qemu_value;

/// The driver of a disk: virtio 1.0 alone, for the older one needs I/O ports, of which there are not enough for 255
/// disks.
const DISK_DRIVER: &str = "vhost-user-blk-pci-non-transitional";

/// QEMU filters its own system calls, if it was built with support for that.
const SANDBOX: [&str; 2] = ["-sandbox", "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny"];

/// The message of a QEMU that was built without sandbox support (system/vl.c).
const NO_SANDBOX: &str = "-sandbox support is not enabled";

/// The name by which a guest finds the port on which it reports the counters of its disks.
pub const GUEST_PORT_NAME: &str = "org.tapline.guest.0";

/// Slots on the machine's own bus, below those of the bridges; 0 and 1 are the chipset.
const SLOT_VGA: u8 = 2;
const SLOT_NIC: u8 = 3;
const SLOT_CONSOLE: u8 = 4;

/// Greater than the boot index of any disk.
const BOOT_DVD: u16 = 1000;
const SLOT_USB: u8 = 5;

/// The arguments after the name of the program, which has this `version`. The monitor listens at `monitor`, and the
/// guest waits for `cont`.
pub fn words(hardware: &Hardware, monitor: &Path, version: Version) -> Vec<String> {
    let mut words = Words(Vec::new());
    words.machine(hardware);
    words.quiet(hardware);
    words.monitor(monitor);
    words.boot(&hardware.boot);
    words.bridges();
    for disk in &hardware.disks {
        words.disk(disk, hardware.vcpus, version);
    }
    if let Some(image) = &hardware.seed {
        words.seed(image);
    }
    if let Some(console) = &hardware.console {
        words.console(console);
    }
    if let Some(socket) = &hardware.guest_port {
        words.guest_port(socket, hardware.console.as_ref());
    }
    words.platform(&hardware.platform);
    words.0
}

/// Options that make QEMU wait for saved memory instead of booting.
pub const INCOMING: [&str; 2] = ["-incoming", "defer"];

/// The same for a QEMU that has exited with that message; `None` if it had another reason.
pub fn without_sandbox(words: &[String], said: &str) -> Option<Vec<String>> {
    let at = words.iter().position(|word| word == SANDBOX[0]).filter(|_| said.contains(NO_SANDBOX))?;
    let (before, rest) = words.split_at_checked(at)?;
    Some(before.iter().chain(rest.iter().skip(SANDBOX.len())).cloned().collect())
}

/// The name of a disk's device.
pub fn disk_name(position: Position) -> String {
    format!("disk{}", position.number())
}

/// The position of the disk whose device has this name.
pub fn position_of(name: &str) -> Option<Position> {
    let number: u8 = name.strip_prefix("disk")?.parse().ok()?;
    Position::new(number).filter(|&position| disk_name(position) == name)
}

/// The name of the connection to who serves a disk.
pub fn disk_chardev(position: Position) -> String {
    format!("served{}", position.number())
}

/// A disk's device, in the order in which its properties are said.
pub fn disk_device(disk: &Disk, vcpus: u16) -> Vec<(&'static str, Value)> {
    let place = disk.position.pci_slot();
    let queues = disk.queues_in(vcpus);
    let mut device = vec![
        ("driver", json!(DISK_DRIVER)),
        ("id", json!(disk_name(disk.position))),
        ("chardev", json!(disk_chardev(disk.position))),
        ("bus", json!(format!("disks{}", place.bridge))),
        ("addr", json!(format!("{:#x}", place.slot))),
        ("num-queues", json!(queues)),
        ("vectors", json!(disk.position.vectors(vcpus, queues))),
    ];
    if disk.bootable {
        // The lowest position first; 0 is left for a future, more urgent use.
        device.push(("bootindex", json!(u16::from(disk.position.number()) + 1)));
    }
    device
}

struct Words(Vec<String>);

impl Words {
    fn say(&mut self, option: &str, value: impl Into<String>) {
        self.0.push(option.to_owned());
        self.0.push(value.into());
    }

    fn flag(&mut self, option: &str) {
        self.0.push(option.to_owned());
    }

    fn machine(&mut self, hardware: &Hardware) {
        // Threads with names, so that one can tell processors from the device model.
        self.say("-name", format!("guest={},debug-threads=on", hardware.name));
        self.0.extend(hardware.accelerator.words().map(str::to_owned));
        // `pc`: its ACPI supports hot-plug at bridges (0010). Unneeded default devices are disabled: USB, HPET,
        // VMware's port, and the keyboard if there is no screen. Its IDE and floppy controllers cannot be removed; they
        // have no drives and cost nothing.
        let on = |on| if on { "on" } else { "off" };
        let keyboard = on(hardware.platform.vga != Vga::None);
        let hpet = on(hardware.platform.hpet);
        let kind = hardware.machine.as_deref().unwrap_or("pc");
        self.say("-machine", format!("{kind},memory-backend=memory,usb=off,hpet={hpet},vmport=off,i8042={keyboard}"));
        self.say("-smp", hardware.vcpus.to_string());
        // The disks' processes map the guest's memory: it is a file without a name, shared.
        let mib = hardware.memory_mib;
        self.say("-m", format!("{mib}M"));
        self.say("-object", format!("memory-backend-memfd,id=memory,size={mib}M,share=on"));
        // A sleeping guest could not be woken, so sleep is not offered.
        self.say("-global", "PIIX4_PM.disable_s3=1");
        self.say("-global", "PIIX4_PM.disable_s4=1");
    }

    fn quiet(&mut self, hardware: &Hardware) {
        // Without these QEMU adds a serial and a parallel port, a floppy and a DVD drive, a screen, a network card and
        // a monitor, and what is in the host's configuration.
        self.flag("-nodefaults");
        self.flag("-no-user-config");
        // A screen is refreshed by a timer even without a viewer.
        match &hardware.platform.vnc {
            None => self.say("-display", "none"),
            Some(socket) => self.say("-display", format!("vnc=unix:{}", path(socket))),
        }
        // Reduces what a guest that has taken over QEMU could do to the host.
        self.say(SANDBOX[0], SANDBOX[1]);
        // Times in the log of what went wrong.
        self.say("-msg", "timestamp=on");
        // Nothing runs before everything is in place and has been checked.
        self.flag("-S");
    }

    /// The only monitor. A client that disconnects makes way for the next, so that another daemon can adopt the
    /// machine.
    fn monitor(&mut self, socket: &Path) {
        self.say("-chardev", format!("socket,id=monitor,path={},server=on,wait=off", path(socket)));
        self.say("-mon", "chardev=monitor,mode=control");
    }

    fn boot(&mut self, boot: &Boot) {
        match boot {
            Boot::Kernel { kernel, initrd, command_line } => {
                self.say("-kernel", text(kernel));
                if let Some(initrd) = initrd {
                    self.say("-initrd", text(initrd));
                }
                self.say("-append", command_line);
            }
            // Only what has a bootindex; no minute of asking a network for a kernel.
            Boot::Firmware => self.say("-boot", "menu=off,strict=on"),
        }
    }

    /// All bridges, used or not: a bridge that is missing at the start cannot be plugged into. Their own hot-plug
    /// controllers are off, because the guest's ACPI does it; so the firmware must be configured to reserve space for
    /// later disks (virtio 1.0 has no I/O ports).
    fn bridges(&mut self) {
        for number in 0..BRIDGES {
            let (slot, chassis) = (FIRST_BRIDGE_SLOT + number, number + 1);
            self.say(
                "-device",
                format!("pci-bridge,id=disks{number},bus=pci.0,addr={slot:#x},chassis_nr={chassis},shpc=off,mem-reserve=1M,pref64-reserve=1M"),
            );
        }
    }

    fn disk(&mut self, disk: &Disk, vcpus: u16, version: Version) {
        let (name, socket) = (disk_chardev(disk.position), path(&disk.socket));
        self.say("-chardev", format!("socket,id={name},path={socket},{}", version.reconnect()));
        let properties = disk_device(disk, vcpus).into_iter().map(|(key, value)| match (key, value) {
            ("driver", value) => plain(&value),
            (key, value) => format!("{key}={}", plain(&value)),
        });
        self.say("-device", properties.collect::<Vec<_>>().join(","));
    }

    /// The kernels of cloud images have no driver for IDE. It is read once, by the boot that finds it new: one queue,
    /// and none of the interrupts that the disks need.
    fn seed(&mut self, image: &Path) {
        self.say("-blockdev", format!("driver=file,node-name=seed,read-only=on,filename={}", path(image)));
        let (bridge, slot) = (SEED_SLOT.bridge, SEED_SLOT.slot);
        self.say(
            "-device",
            format!("virtio-blk-pci-non-transitional,id=seed,drive=seed,bus=disks{bridge},addr={slot:#x},num-queues=1,vectors=0"),
        );
    }

    fn console(&mut self, console: &Console) {
        let backend = match &console.to {
            ConsoleTo::Log(log) => format!("file,id=console,path={},append=on", path(log)),
            ConsoleTo::Socket(socket) => format!("socket,id=console,path={},server=on,wait=off", path(socket)),
        };
        self.say("-chardev", backend);
        match console.device {
            ConsoleDevice::Serial => self.say("-device", "isa-serial,chardev=console"),
            ConsoleDevice::Virtio => {
                self.say(
                    "-device",
                    format!("virtio-serial-pci-non-transitional,id=ports,bus=pci.0,addr={SLOT_CONSOLE:#x}"),
                );
                self.say("-device", "virtconsole,chardev=console,bus=ports.0");
            }
        }
    }

    /// It is at the controller of the console, if that has one. A controller of its own has queues for this port alone,
    /// and none of the interrupts that the disks need.
    fn guest_port(&mut self, socket: &Path, console: Option<&Console>) {
        self.say("-chardev", format!("socket,id=guest,path={},server=on,wait=off", path(socket)));
        if console.is_none_or(|console| console.device != ConsoleDevice::Virtio) {
            self.say(
                "-device",
                format!(
                    "virtio-serial-pci-non-transitional,id=ports,bus=pci.0,addr={SLOT_CONSOLE:#x},max_ports=2,vectors=0"
                ),
            );
        }
        self.say("-device", format!("virtserialport,chardev=guest,bus=ports.0,name={GUEST_PORT_NAME}"));
    }

    fn platform(&mut self, platform: &Platform) {
        if platform.usb {
            self.say("-device", format!("piix3-usb-uhci,id=usb,bus=pci.0,addr={SLOT_USB:#x}"));
        }
        if platform.usb_tablet {
            self.say("-device", "usb-tablet,bus=usb.0");
        }
        self.port(&platform.hvm_serial, "serial", "isa-serial");
        self.port(&platform.parallel, "parallel", "isa-parallel");
        match &platform.dvd {
            Dvd::None => {}
            Dvd::Empty => self.say("-device", "ide-cd,bus=ide.1"),
            Dvd::File(image) => {
                self.say("-blockdev", format!("driver=file,node-name=dvd,read-only=on,filename={}", path(image)));
                // Behind all disks: an installer is booted while they are empty, and no more once it is done.
                self.say("-device", format!("ide-cd,bus=ide.1,drive=dvd,bootindex={BOOT_DVD}"));
            }
        }
        match platform.vga {
            Vga::None => {}
            Vga::Std => self.say("-device", format!("VGA,bus=pci.0,addr={SLOT_VGA:#x}")),
            Vga::Cirrus => self.say("-device", format!("cirrus-vga,bus=pci.0,addr={SLOT_VGA:#x}")),
            Vga::Virtio => self.say("-device", format!("virtio-vga,bus=pci.0,addr={SLOT_VGA:#x}")),
        }
        self.network(&platform.nic);
    }

    fn port(&mut self, port: &Port, name: &str, driver: &str) {
        let backend = match port {
            Port::None => return,
            Port::Null => format!("null,id={name}"),
            Port::Pty => format!("pty,id={name}"),
            Port::File(file) => format!("file,id={name},path={},append=on", path(file)),
            Port::Unix(socket) => format!("socket,id={name},path={},server=on,wait=off", path(socket)),
        };
        self.say("-chardev", backend);
        self.say("-device", format!("{driver},chardev={name}"));
    }

    fn network(&mut self, nic: &Nic) {
        let address = match nic {
            // Hardware with a bridge was refused.
            Nic::None | Nic::Bridge { .. } => return,
            Nic::User { mac } => {
                self.say("-netdev", "user,id=net");
                mac.map(|mac| format!(",mac={mac}")).unwrap_or_default()
            }
            // Its scripts would have to start programs; the creator of the interface has already connected it.
            Nic::Tap { name, mac } => {
                self.say("-netdev", format!("tap,id=net,ifname={name},script=no,downscript=no"));
                format!(",mac={mac}")
            }
        };
        // Without a ROM: the guest never boots from it.
        self.say(
            "-device",
            format!("virtio-net-pci-non-transitional,netdev=net,bus=pci.0,addr={SLOT_NIC:#x},romfile={address}"),
        );
    }
}

/// The path as a value of a key. Hardware that was checked has only paths that are text.
fn path(path: &Path) -> String {
    qemu_value(&text(path))
}

fn text(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}

fn plain(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

#[cfg(test)]
mod test {
    use super::super::hardware::test::{disk, small};
    use super::*;

    fn line(hardware: &Hardware) -> String {
        line_for(Version::OLDEST, hardware)
    }

    fn line_for(version: Version, hardware: &Hardware) -> String {
        hardware.check().unwrap();
        words(hardware, Path::new("/run/vm/monitor"), version).join(" ")
    }

    #[test]
    fn the_default_is_quiet() {
        let line = line(&small());
        for word in ["-nodefaults", "-no-user-config", "usb=off", "hpet=off", "-display none", "-sandbox on", "-S"] {
            assert!(line.contains(word), "{word}: {line}");
        }
        for device in ["usb-", "isa-serial", "isa-parallel", "ide-", "VGA", "virtio-net", "virtio-serial", "-vnc"] {
            assert!(!line.contains(device), "{device}: {line}");
        }
        assert_eq!(line.matches("-mon ").count(), 1);
        assert!(line.contains("memory-backend-memfd,id=memory,size=128M,share=on"), "{line}");
    }

    #[test]
    fn only_a_qemu_without_sandbox_support_is_started_without_it() {
        let all = words(&small(), Path::new("/run/vm/monitor"), Version::OLDEST);
        let without = without_sandbox(&all, "qemu: -sandbox support is not enabled in this QEMU binary").unwrap();
        assert_eq!(all.join(" ").replace(&format!(" {}", SANDBOX.join(" ")), ""), without.join(" "));
        assert_eq!(without_sandbox(&all, "qemu: no memory"), None);
        assert_eq!(without_sandbox(&without, NO_SANDBOX), None);
    }

    #[test]
    fn a_seed_is_a_disk_for_reading_only_behind_all_others() {
        let hardware = Hardware { seed: Some("/run/vm/seed,1.img".into()), ..small() };
        let expected = format!(
            "{} -blockdev driver=file,node-name=seed,read-only=on,filename=/run/vm/seed,,1.img \
             -device virtio-blk-pci-non-transitional,id=seed,drive=seed,bus=disks8,addr=0x1f,num-queues=1,vectors=0",
            line(&small())
        );
        assert_eq!(line(&hardware), expected);
    }

    #[test]
    fn each_platform_key_adds_its_device_and_no_other() {
        let base = line(&small());
        let cases: [(&[(&str, &str)], &str); 10] = [
            (&[("usb", "true")], " -device piix3-usb-uhci,id=usb,bus=pci.0,addr=0x5"),
            (&[("parallel", "null")], " -chardev null,id=parallel -device isa-parallel,chardev=parallel"),
            (&[("hvm_serial", "pty")], " -chardev pty,id=serial -device isa-serial,chardev=serial"),
            (&[("dvd", "empty")], " -device ide-cd,bus=ide.1"),
            (
                &[("dvd", "file:/a,b.iso")],
                " -blockdev driver=file,node-name=dvd,read-only=on,filename=/a,,b.iso -device ide-cd,bus=ide.1,drive=dvd,bootindex=1000",
            ),
            (
                &[("nic", "user")],
                " -netdev user,id=net -device virtio-net-pci-non-transitional,netdev=net,bus=pci.0,addr=0x3,romfile=",
            ),
            (
                &[("nic", "user/52:54:00:0a:00:01")],
                " -netdev user,id=net -device virtio-net-pci-non-transitional,netdev=net,bus=pci.0,addr=0x3,romfile=,mac=52:54:00:0a:00:01",
            ),
            (
                &[("nic", "tap:tap7/52:54:00:0a:00:01")],
                " -netdev tap,id=net,ifname=tap7,script=no,downscript=no -device virtio-net-pci-non-transitional,netdev=net,bus=pci.0,addr=0x3,romfile=,mac=52:54:00:0a:00:01",
            ),
            (&[("usb", "false")], ""),
            (&[("hvm_serial", "none")], ""),
        ];
        for (keys, added) in cases {
            let hardware = Hardware { platform: Platform::parse(keys.iter().copied()).unwrap(), ..small() };
            assert_eq!(line(&hardware), format!("{base}{added}"), "{keys:?}");
        }
        let tablet = Platform::parse([("usb", "true"), ("usb_tablet", "true")]).unwrap();
        assert!(line(&Hardware { platform: tablet, ..small() }).ends_with("-device usb-tablet,bus=usb.0"));
        let screen = Platform::parse([("vga", "std"), ("vnc", "unix:/run/vnc")]).unwrap();
        let line = line(&Hardware { platform: screen, ..small() });
        assert!(line.contains("-display vnc=unix:/run/vnc") && line.contains("i8042=on"), "{line}");
        assert!(line.ends_with("-device VGA,bus=pci.0,addr=0x2"), "{line}");
    }

    #[test]
    fn a_disk_is_named_by_its_position_and_found_by_its_name() {
        for position in Position::all() {
            assert_eq!(position_of(&disk_name(position)), Some(position));
        }
        for name in ["disk255", "disk01", "disk", "diskx", "usb"] {
            assert_eq!(position_of(name), None, "{name}");
        }
    }

    #[test]
    fn disks_have_a_slot_and_vectors() {
        let bootable = Disk { bootable: true, ..disk(0, "/run/a,b.sock") };
        let hardware = Hardware { disks: vec![bootable, disk(70, "/run/70.sock")], ..small() };
        let newer = line_for(Version(9, 2), &hardware);
        assert!(newer.contains("socket,id=served0,path=/run/a,,b.sock,reconnect-ms=100 "), "{newer}");
        let line = line(&hardware);
        assert!(line.contains("socket,id=served0,path=/run/a,,b.sock,reconnect=1 "), "{line}");
        assert!(
            line.contains("-device vhost-user-blk-pci-non-transitional,id=disk0,chardev=served0,bus=disks0,addr=0x1,num-queues=2,vectors=3,bootindex=1"),
            "{line}"
        );
        assert!(line.contains("id=disk70,chardev=served70,bus=disks2,addr=0x9,num-queues=2,vectors=0"), "{line}");
    }

    #[test]
    fn a_console_is_at_the_requested_device() {
        let console = |device| Some(Console { device, to: ConsoleTo::Log("/run/console.log".into()) });
        let virtio = line(&Hardware { console: console(ConsoleDevice::Virtio), ..small() });
        assert!(virtio.contains("-chardev file,id=console,path=/run/console.log,append=on"), "{virtio}");
        assert!(virtio.ends_with("-device virtconsole,chardev=console,bus=ports.0"), "{virtio}");
        let serial = line(&Hardware { console: console(ConsoleDevice::Serial), ..small() });
        assert!(serial.ends_with("-device isa-serial,chardev=console"), "{serial}");
    }

    #[test]
    fn the_guest_port_is_at_the_consoles_controller_or_at_its_own() {
        let hardware = Hardware { guest_port: Some("/run/vm/g,1".into()), ..small() };
        let own = line(&hardware);
        assert_eq!(
            own,
            format!(
                "{} -chardev socket,id=guest,path=/run/vm/g,,1,server=on,wait=off \
                 -device virtio-serial-pci-non-transitional,id=ports,bus=pci.0,addr=0x4,max_ports=2,vectors=0 \
                 -device virtserialport,chardev=guest,bus=ports.0,name=org.tapline.guest.0",
                line(&small())
            )
        );
        let console = Some(Console { device: ConsoleDevice::Virtio, to: ConsoleTo::Log("/run/log".into()) });
        let shared = line(&Hardware { console, ..hardware });
        assert_eq!(shared.matches("virtio-serial-pci").count(), 1);
        assert!(shared.contains("virtserialport,chardev=guest,bus=ports.0"), "{shared}");
    }

    #[test]
    fn firmware_boots_only_marked_disks() {
        let bootable = Disk { bootable: true, ..disk(5, "/run/5.sock") };
        let line = line(&Hardware { boot: Boot::Firmware, disks: vec![bootable], ..small() });
        assert!(line.contains("-boot menu=off,strict=on") && line.contains("bootindex=6"), "{line}");
        assert!(!line.contains("-kernel"), "{line}");
    }
}
