//! What a VM of the catalogue is to QEMU; refused by the field of the request that is at fault.

use ::vm::qemu::accelerator::Accelerator;
use ::vm::qemu::hardware::{self, Disk, Hardware, HardwareError};
use ::vm::qemu::platform::{Platform, PlatformError};
use ::vm::qemu::slots::Position;
use api::{Boot, Code, Driver, Problem, Vbd, Vm};
use uuid::Uuid;

use crate::config::Config;
use crate::disk::place::Place;

/// Bytes of the unit in which QEMU has memory.
const MIB: u64 = 1 << 20;

/// Whether there can be such a VM, whatever disks it will have.
pub fn check(config: &Config, vm: &Vm) -> Result<(), Problem> {
    if vm.driver == Driver::Xen {
        let what = "the daemon does not start guests of Xen yet";
        let advice = "start them with xl, and give them disks with `tapline xen attach`";
        return Err(Problem::new(Code::Unsupported, what).field("driver").advise(advice));
    }
    let mut hardware = without_disks(vm)?;
    // Which it will boot from is seen when it starts.
    let stand_in = Place::of(config, Uuid::nil()).transport(api::Transport::VhostUser);
    hardware.disks.extend(position(0).map(|position| Disk {
        position,
        socket: stand_in,
        queues: None,
        bootable: true,
    }));
    hardware.check().map_err(|error| refused(&error))
}

/// The hardware of a VM with these VBDs.
pub fn of(config: &Config, vm: &Vm, vbds: &[Vbd]) -> Result<Hardware, Problem> {
    let mut hardware = without_disks(vm)?;
    hardware.disks = vbds.iter().map(|vbd| disk(config, vbd)).collect::<Result<_, _>>()?;
    hardware.check().map_err(|error| refused(&error))?;
    Ok(hardware)
}

/// A VBD, as the machine has it.
pub fn disk(config: &Config, vbd: &Vbd) -> Result<Disk, Problem> {
    let socket = Place::of(config, vbd.uuid).transport(vbd.transport);
    let position = position_of(vbd)?;
    // As many as are served: QEMU refuses a disk that has fewer.
    Ok(Disk { position, socket, queues: Some(vbd.queues), bootable: vbd.bootable })
}

/// Where a VBD is in its machine.
pub fn position_of(vbd: &Vbd) -> Result<Position, Problem> {
    let none = || Problem::new(Code::Internal, format!("VBD {} has a position beyond 254", vbd.uuid));
    position(vbd.position).ok_or_else(none)
}

fn position(number: u8) -> Option<Position> {
    Position::new(number)
}

fn without_disks(vm: &Vm) -> Result<Hardware, Problem> {
    if vm.memory % MIB != 0 {
        let what = format!("a memory is whole MiB, and {} bytes are not", vm.memory);
        return Err(Problem::new(Code::Invalid, what).field("memory"));
    }
    let pairs = vm.platform.iter().map(|(key, value)| (key.as_str(), value.as_str()));
    let platform = Platform::parse(pairs).map_err(|error| refused(&error.into()))?;
    let boot = match &vm.boot {
        Boot::Disk => hardware::Boot::Firmware,
        Boot::Kernel { kernel, initrd, cmdline } => hardware::Boot::Kernel {
            kernel: kernel.as_path().to_owned(),
            initrd: initrd.as_ref().map(|initrd| initrd.as_path().to_owned()),
            command_line: cmdline.to_string(),
        },
    };
    Ok(Hardware {
        name: vm.uuid.to_string(),
        // More than fit are refused by their number.
        memory_mib: u32::try_from(vm.memory / MIB).unwrap_or(u32::MAX),
        vcpus: u16::try_from(vm.vcpus).unwrap_or(u16::MAX),
        // Found out when it starts.
        accelerator: Accelerator::Tcg,
        boot,
        disks: Vec::new(),
        console: None,
        platform,
    })
}

fn refused(error: &HardwareError) -> Problem {
    let field = match error {
        HardwareError::Range { what, .. } if what.contains("memory") => "memory".to_owned(),
        HardwareError::Range { what, .. } if what.contains("processors") => "vcpus".to_owned(),
        HardwareError::Path { what: "the kernel", .. } => "boot.kernel".to_owned(),
        HardwareError::Path { what: "the initrd", .. } => "boot.initrd".to_owned(),
        HardwareError::NothingToBoot => "boot".to_owned(),
        HardwareError::Platform(PlatformError::Unknown { key }) => format!("platform.{key}"),
        HardwareError::Platform(PlatformError::Value { key, .. }) => format!("platform.{key}"),
        HardwareError::Platform(PlatformError::Alone { .. }) | HardwareError::SerialTwice => "platform".to_owned(),
        _ => return Problem::new(Code::Invalid, error.to_string()),
    };
    Problem::new(Code::Invalid, error.to_string()).field(field)
}
