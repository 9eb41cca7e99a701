//! Converts a VM of the catalogue into its driver's form; errors name the invalid field of the request.

use ::vm::qemu::accelerator::Accelerator;
use ::vm::qemu::console::{CONSOLE, GUEST_PORT};
use ::vm::qemu::hardware::{self, Disk, Hardware, HardwareError};
use ::vm::qemu::platform::{Platform, PlatformError};
use ::vm::qemu::slots::Position;
use ::vm::xen::config::{self as domain, ConfigError};
use api::{Boot, Code, Driver, Problem, Vbd, Vm};
use control::size::readable;
use repo::catalogue::{ADVICE_FOR_SUSPENDED, VmMemory};
use uuid::Uuid;

use super::directory::vm_directory;
use super::network::Bridged;
use super::screen;
use super::seed;
use crate::config::Config;
use crate::disk::paths::DiskPaths;

/// The unit of QEMU's memory sizes, in bytes.
const MIB: u64 = 1 << 20;

/// Validates a VM, independent of its disks.
pub fn check(config: &Config, vm: &Vm) -> Result<(), Problem> {
    if vm.driver == Driver::Xen {
        if vm.seed {
            let what = "a Xen guest cannot be given a cloud-init seed: only QEMU is started with one";
            let advice = "make a disk with the label cidata, and attach it as any other";
            return Err(Problem::new(Code::Unsupported, what).field("seed").advise(advice));
        }
        return domain_of(vm)?.text().map(drop).map_err(|error| refused_by_xen(&error));
    }
    let mut hardware = without_disks(config, vm)?;
    // The disk from which it boots is determined at the start.
    let stand_in = DiskPaths::of(config, Uuid::nil()).transport(api::Transport::VhostUser);
    hardware.disks.extend(position(0).map(|position| Disk {
        position,
        socket: stand_in,
        queues: None,
        bootable: true,
    }));
    hardware.check().map_err(|error| refused(&error))
}

/// The specification of a machine to start.
#[derive(Debug)]
pub enum Plan {
    /// For QEMU, with its disks.
    Qemu(Box<Hardware>),
    /// For Xen, which gets the disks one by one.
    Xen(domain::Config),
}

/// The specification of a VM with these VBDs.
pub fn of(config: &Config, vm: &Vm, vbds: &[Vbd]) -> Result<Plan, Problem> {
    if vm.driver == Driver::Xen {
        return domain_of(vm).map(Plan::Xen);
    }
    let mut hardware = without_disks(config, vm)?;
    hardware.disks = vbds.iter().map(|vbd| disk(config, vbd)).collect::<Result<_, _>>()?;
    hardware.check().map_err(|error| refused(&error))?;
    Ok(Plan::Qemu(Box::new(hardware)))
}

/// The machine from which memory was saved, with its current connections.
pub fn as_saved(vm: Uuid, plan: Plan, memory: &VmMemory) -> Result<Plan, Problem> {
    let saved = serde_json::from_value::<Hardware>(memory.machine.clone());
    let (Plan::Qemu(now), Ok(saved)) = (plan, saved) else {
        let what = format!("the machine of VM {vm} that its memory was saved from is not understood");
        return Err(Problem::new(Code::Failed, what).advise(
            "start the taplined that has suspended it, or a later one; or give its memory up (tapline vm drop-memory)",
        ));
    };
    let Hardware { disks, console, seed, guest_port, .. } = *now;
    // The guest's memory contains the drivers of the devices that it had then.
    let guest_port = guest_port.filter(|_| saved.guest_port.is_some());
    let mut positions: Vec<_> = saved.disks.iter().map(|disk| disk.position).collect();
    let mut present: Vec<_> = disks.iter().map(|disk| disk.position).collect();
    positions.sort_unstable();
    present.sort_unstable();
    if positions != present {
        let what = format!("VM {vm} had other disks when it was suspended");
        return Err(Problem::new(Code::State, what).advise(ADVICE_FOR_SUSPENDED));
    }
    Ok(Plan::Qemu(Box::new(Hardware { disks, console, seed, guest_port, ..saved })))
}

/// A VM in the form of xl's configuration.
fn domain_of(vm: &Vm) -> Result<domain::Config, Problem> {
    let Boot::Kernel { kernel, initrd, cmdline } = &vm.boot else {
        let what =
            "a Xen guest must boot a kernel file on the host, because Xen does not read its disks before it runs";
        let advice = "give a kernel; GRUB for PVH works and boots from the first disk (docs/xen.md)";
        return Err(Problem::new(Code::Unsupported, what).field("boot").advise(advice));
    };
    Ok(domain::Config {
        uuid: vm.uuid.to_string(),
        memory_mib: whole_mib(vm)?,
        vcpus: vm.vcpus,
        kernel: kernel.as_path().to_owned(),
        initrd: initrd.as_ref().map(|initrd| initrd.as_path().to_owned()),
        command_line: cmdline.to_string(),
        platform: domain::Platform::parse(&vm.platform).map_err(|error| refused_by_xen(&error))?,
    })
}

fn whole_mib(vm: &Vm) -> Result<u64, Problem> {
    match vm.memory % MIB {
        0 => Ok(vm.memory / MIB),
        _ => {
            let what = format!("memory must be a multiple of 1 MiB, which {} bytes is not", vm.memory);
            Err(Problem::new(Code::Invalid, what).field("memory"))
        }
    }
}

/// Memory as the description of a QEMU machine has it, which has fewer bits than the request: what is beyond those is
/// refused by its own number. Less may be too much as well ([`Hardware::check`]).
fn memory_of_machine(mib: u64) -> Result<u32, Problem> {
    u32::try_from(mib).map_err(|_| {
        let what = format!("a machine cannot have {} of memory", readable(mib.saturating_mul(MIB)));
        Problem::new(Code::Invalid, what).field("memory")
    })
}

/// The same for processors.
fn processors_of_machine(vcpus: u32) -> Result<u16, Problem> {
    u16::try_from(vcpus)
        .map_err(|_| Problem::new(Code::Invalid, format!("a machine cannot have {vcpus} processors")).field("vcpus"))
}

fn refused_by_xen(error: &ConfigError) -> Problem {
    let field = match error {
        ConfigError::Unknown { key } => format!("platform.{key}"),
        ConfigError::Value { key, .. } => format!("platform.{key}"),
        ConfigError::Range { field, .. } => (*field).to_owned(),
        ConfigError::Word { field: "the initrd" } => "boot.initrd".to_owned(),
        ConfigError::Word { field: "the command line" } => "boot.cmdline".to_owned(),
        ConfigError::Word { .. } => "boot.kernel".to_owned(),
    };
    Problem::new(Code::Invalid, error.to_string()).field(field)
}

/// A VBD in the form of the crate `vm`.
pub fn disk(config: &Config, vbd: &Vbd) -> Result<Disk, Problem> {
    let socket = DiskPaths::of(config, vbd.uuid).transport(vbd.transport);
    let position = position_of(vbd)?;
    // As many as are served: QEMU refuses a disk with fewer.
    Ok(Disk { position, socket, queues: Some(vbd.queues), bootable: vbd.bootable })
}

/// The position of a VBD in its machine.
pub fn position_of(vbd: &Vbd) -> Result<Position, Problem> {
    let none = || Problem::new(Code::Internal, format!("VBD {} has a position beyond 254", vbd.uuid));
    position(vbd.position).ok_or_else(none)
}

fn position(number: u8) -> Option<Position> {
    Position::new(number)
}

fn without_disks(config: &Config, vm: &Vm) -> Result<Hardware, Problem> {
    let (memory_mib, vcpus) = (memory_of_machine(whole_mib(vm)?)?, processors_of_machine(vm.vcpus)?);
    let pairs = vm.platform.iter().map(|(key, value)| (key.as_str(), value.as_str()));
    let (private, pairs): (Vec<_>, Vec<_>) = pairs.partition(|pair| *pair == (screen::KEY, screen::PRIVATE));
    let mut platform = Platform::parse(pairs).map_err(|error| refused(&error.into()))?;
    if !private.is_empty() {
        platform.vnc = Some(screen::private(config, vm.uuid));
        platform.agree().map_err(|error| refused(&error.into()))?;
    }
    if let Some(bridged) = Bridged::of(config, vm) {
        platform.nic = bridged.nic();
    }
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
        memory_mib,
        vcpus,
        // Both are determined at the start.
        machine: None,
        accelerator: Accelerator::Tcg,
        boot,
        disks: Vec::new(),
        // The serial port, unless the user has connected it elsewhere.
        console: (!vm.platform.contains_key("hvm_serial")).then(|| hardware::Console {
            device: hardware::ConsoleDevice::Serial,
            to: hardware::ConsoleTo::Socket(vm_directory(config, vm.uuid).join(CONSOLE)),
        }),
        seed: vm.seed.then(|| seed::path(&vm_directory(config, vm.uuid))),
        guest_port: Some(vm_directory(config, vm.uuid).join(GUEST_PORT)),
        platform,
    })
}

fn refused(error: &HardwareError) -> Problem {
    let field = match error {
        HardwareError::Memory(_) => "memory".to_owned(),
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

#[cfg(test)]
mod test {
    use std::path::Path;

    use super::*;

    #[test]
    fn values_too_large_for_a_machine_are_refused_by_number() {
        assert_eq!(memory_of_machine(u64::from(u32::MAX)).unwrap(), u32::MAX);
        let refused = memory_of_machine(1 << 33).unwrap_err().to_string();
        assert!(refused.contains(&readable(1 << 53)), "{refused}");
        assert_eq!(processors_of_machine(65535).unwrap(), 65535);
        assert!(processors_of_machine(65536).unwrap_err().to_string().contains("65536 processors"));
    }

    #[test]
    fn memory_resumes_with_a_guest_port_only_if_saved_with_one() {
        let port = |at: &str| Some(Path::new(at).to_owned());
        let hardware = |guest_port| Hardware {
            name: "a".into(),
            memory_mib: 64,
            vcpus: 1,
            machine: None,
            accelerator: Accelerator::Tcg,
            boot: hardware::Boot::Firmware,
            disks: Vec::new(),
            console: None,
            seed: None,
            guest_port,
            platform: Platform::default(),
        };
        for (saved, expected) in [(None, None), (port("/run/earlier/guest"), port("/run/now/guest"))] {
            let memory = VmMemory {
                id: Uuid::nil(),
                file: "memory".into(),
                size: 0,
                since: jiff::Timestamp::UNIX_EPOCH,
                ran: true,
                qemu: String::new(),
                machine: serde_json::to_value(hardware(saved)).unwrap(),
                disks: Vec::new(),
            };
            let now = Plan::Qemu(Box::new(hardware(port("/run/now/guest"))));
            let Ok(Plan::Qemu(loaded)) = as_saved(Uuid::nil(), now, &memory) else { panic!() };
            assert_eq!(loaded.guest_port, expected);
        }
    }
}
