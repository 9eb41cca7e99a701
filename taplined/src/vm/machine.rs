//! A running machine with either driver: its operations, and their errors in common terms.
//!
//! Its functions block; callers that must not block use threads ([`super::guest`]).

use std::fs::File;

use ::vm::qemu::machine::{Ended, Kind, MachineError, QemuVm, Saving, Status as QemuStatus};
use ::vm::qemu::slots::Position;
use ::vm::xen::machine::{Status as DomainStatus, XenDomain};
use ::vm::xen::vdev::Vdev;
use ::vm::xen::xl::Reason;
use api::{Code, Mode, Power, Problem, Vbd};
use control::in_full;
use serde_json::json;
use uuid::Uuid;

use super::hardware;
use crate::config::Config;

/// The device by which QEMU opens a tap interface.
const TUN: &str = "/dev/net/tun";

/// A running machine of either driver.
#[derive(Debug)]
pub struct RunningVm {
    vm: Uuid,
    driven: Driven,
}

#[derive(Debug)]
enum Driven {
    Qemu(Box<QemuVm>),
    Xen(XenDomain),
}

/// How a machine ended.
#[derive(Debug)]
pub enum End {
    /// Its guest has powered off.
    PoweredOff,
    /// Its guest reboots, for which Xen needs a new domain.
    Reboots,
    /// It failed.
    Badly(Problem),
}

impl RunningVm {
    /// Wraps a machine run by QEMU.
    pub fn qemu(vm: Uuid, machine: QemuVm) -> RunningVm {
        RunningVm { vm, driven: Driven::Qemu(Box::new(machine)) }
    }

    /// Wraps a domain run by Xen.
    pub fn xen(vm: Uuid, domain: XenDomain) -> RunningVm {
        RunningVm { vm, driven: Driven::Xen(domain) }
    }

    /// Whether it has a disk at a VBD's position, or its guest has not released the previous one.
    pub fn has(&mut self, vbd: &Vbd) -> Result<bool, Problem> {
        match &mut self.driven {
            Driven::Qemu(machine) => {
                let position = hardware::position_of(vbd)?;
                machine.disks().map(|disks| disks.contains(&position)).map_err(by_qemu(self.vm))
            }
            Driven::Xen(domain) => domain.has(vdev(vbd)).map_err(by_xen(self.vm)),
        }
    }

    /// Attaches a served VBD to the guest.
    pub fn plug(&mut self, config: &Config, vbd: &Vbd) -> Result<(), Problem> {
        match &mut self.driven {
            Driven::Qemu(machine) => machine.plug(&hardware::disk(config, vbd)?).map_err(by_qemu(self.vm)),
            Driven::Xen(domain) => domain.plug(vdev(vbd), vbd.mode == Mode::ReadOnly).map_err(by_xen(self.vm)),
        }
    }

    /// Requests the guest to release a VBD.
    pub fn begin_unplug(&mut self, vbd: &Vbd) -> Result<(), Problem> {
        match &mut self.driven {
            Driven::Qemu(machine) => machine.begin_unplug(hardware::position_of(vbd)?).map_err(by_qemu(self.vm)),
            Driven::Xen(domain) => domain.begin_unplug(vdev(vbd)).map_err(by_xen(self.vm)),
        }
    }

    /// Whether the guest has released a VBD.
    pub fn finish_unplug(&mut self, vbd: &Vbd) -> Result<bool, Problem> {
        match &mut self.driven {
            Driven::Qemu(machine) => machine.finish_unplug(hardware::position_of(vbd)?).map_err(by_qemu(self.vm)),
            Driven::Xen(domain) => domain.finish_unplug(vdev(vbd)).map_err(by_xen(self.vm)),
        }
    }

    /// Whether the guest waits for I/O of a VBD that QEMU no longer forwards.
    pub fn has_lost(&mut self, vbd: &Vbd) -> Result<bool, Problem> {
        match &mut self.driven {
            Driven::Qemu(machine) => machine.has_lost(hardware::position_of(vbd)?).map_err(by_qemu(self.vm)),
            Driven::Xen(_) => Ok(false),
        }
    }

    /// Presses the power button.
    pub fn ask_to_power_off(&mut self) -> Result<(), Problem> {
        match &mut self.driven {
            Driven::Qemu(machine) => machine.ask("system_powerdown", &json!({})).map(drop).map_err(by_qemu(self.vm)),
            Driven::Xen(domain) => domain.ask_to_power_off().map_err(by_xen(self.vm)),
        }
    }

    /// Pauses the guest in memory.
    pub fn pause(&mut self) -> Result<(), Problem> {
        match &mut self.driven {
            Driven::Qemu(machine) => machine.pause().map_err(by_qemu(self.vm)),
            Driven::Xen(domain) => domain.pause().map_err(by_xen(self.vm)),
        }
    }

    /// Resumes the guest.
    pub fn resume(&mut self) -> Result<(), Problem> {
        match &mut self.driven {
            Driven::Qemu(machine) => machine.resume().map_err(by_qemu(self.vm)),
            Driven::Xen(domain) => domain.resume().map_err(by_xen(self.vm)),
        }
    }

    /// Whether the guest is paused.
    pub fn is_paused(&mut self) -> Result<bool, Problem> {
        match &mut self.driven {
            Driven::Qemu(machine) => {
                machine.status().map(|status| status == QemuStatus::Paused).map_err(by_qemu(self.vm))
            }
            Driven::Xen(domain) => {
                domain.status().map(|status| status == DomainStatus::Paused).map_err(by_xen(self.vm))
            }
        }
    }

    /// Whether the guest runs or is paused; `None` if it cannot continue.
    pub fn power(&mut self) -> Result<Option<Power>, Problem> {
        let vm = self.vm;
        Ok(match &mut self.driven {
            Driven::Qemu(machine) => match machine.status().map_err(by_qemu(vm))? {
                QemuStatus::Running => Some(Power::Running),
                QemuStatus::Paused => Some(Power::Paused),
                QemuStatus::Stuck(_) => None,
            },
            Driven::Xen(domain) => match domain.status().map_err(by_xen(vm))? {
                DomainStatus::Running => Some(Power::Running),
                DomainStatus::Paused => Some(Power::Paused),
                DomainStatus::Down(_) | DomainStatus::Gone => None,
            },
        })
    }

    /// Reads what the machine has reported, without waiting. Returns whether its guest may have stopped or continued.
    pub fn has_changed(&mut self) -> Result<bool, Problem> {
        match &mut self.driven {
            Driven::Qemu(machine) => machine.has_changed().map_err(by_qemu(self.vm)),
            Driven::Xen(_) => Ok(false),
        }
    }

    /// Whether a report read since has the same effect as [`RunningVm::has_changed`].
    pub fn knows_of_change(&self) -> bool {
        match &self.driven {
            Driven::Qemu(machine) => machine.knows_of_change(),
            Driven::Xen(_) => false,
        }
    }

    /// Checks that its guest's memory can be saved.
    pub fn must_be_savable(&mut self) -> Result<(), Problem> {
        self.by_qemu()?.must_be_savable().map_err(by_qemu(self.vm))
    }

    /// The properties that a machine needs to resume from its memory.
    pub fn kind(&mut self) -> Result<Kind, Problem> {
        self.by_qemu()?.kind().map_err(by_qemu(self.vm))
    }

    /// Whether its memory was saved, and its guest has not run since.
    pub fn is_saved(&mut self) -> Result<bool, Problem> {
        self.by_qemu()?.is_saved().map_err(by_qemu(self.vm))
    }

    /// Starts saving the memory of its guest, which is paused and has exactly these disks.
    pub fn begin_save(&mut self, file: &File, disks: &[Position]) -> Result<(), Problem> {
        let vm = self.vm;
        let machine = self.by_qemu()?;
        if machine.disks().map_err(by_qemu(vm))? != disks {
            let what = format!("a disk of VM {vm} is being plugged or unplugged");
            return Err(Problem::new(Code::Busy, what).advise("wait for that, then try again"));
        }
        if let Some(leftover) = machine.leftover().map_err(by_qemu(vm))? {
            let position = leftover.0.number();
            let what = format!("disk {position} of VM {vm} has not answered all requests of its guest");
            return Err(Problem::new(Code::State, what).advise(
                "its repository is full or its storage does not respond: see 'tapline vbd list'; then try again",
            ));
        }
        machine.begin_save(file).map_err(by_qemu(vm))
    }

    /// The progress of saving.
    pub fn saving(&mut self) -> Result<Saving, Problem> {
        self.by_qemu()?.saving().map_err(by_qemu(self.vm))
    }

    /// Stops saving, if it is in progress.
    pub fn end_save(&mut self) -> Result<(), Problem> {
        match &mut self.driven {
            Driven::Qemu(machine) => machine.end_save().map_err(by_qemu(self.vm)),
            Driven::Xen(_) => Ok(()),
        }
    }

    fn by_qemu(&mut self) -> Result<&mut QemuVm, Problem> {
        match &mut self.driven {
            Driven::Qemu(machine) => Ok(machine),
            Driven::Xen(_) => Err(Problem::new(Code::Unsupported, format!("VM {} is run by Xen", self.vm))),
        }
    }

    /// Kills the machine, like a power cut.
    pub fn end(&mut self) -> Result<(), Problem> {
        match &mut self.driven {
            Driven::Qemu(machine) => machine.end().map(drop).map_err(by_qemu(self.vm)),
            Driven::Xen(domain) => domain.end().map_err(by_xen(self.vm)),
        }
    }

    /// How it ended, if it has; its remains are then removed.
    pub fn ended(&mut self) -> Result<Option<End>, Problem> {
        let vm = self.vm;
        match &mut self.driven {
            Driven::Qemu(machine) => {
                let ended = machine.ended().map_err(by_qemu(vm))?;
                Ok(ended.map(|ended| qemu_ended(vm, &ended)))
            }
            Driven::Xen(domain) => {
                let end = match domain.status().map_err(by_xen(vm))? {
                    DomainStatus::Running | DomainStatus::Paused => return Ok(None),
                    DomainStatus::Down(Reason::PowerOff) => End::PoweredOff,
                    // After a kexec the domain cannot continue as it is.
                    DomainStatus::Down(Reason::Reboot | Reason::SoftReset) => End::Reboots,
                    DomainStatus::Down(_) => End::Badly(halted(vm, "its guest has crashed", "")),
                    DomainStatus::Gone => End::Badly(halted(vm, "its domain was destroyed", ", but not by the daemon")),
                };
                domain.end().map_err(by_xen(vm))?;
                Ok(Some(end))
            }
        }
    }
}

fn vdev(vbd: &Vbd) -> Vdev {
    Vdev::of_position(vbd.position)
}

/// The end of a QEMU that exited by itself.
fn qemu_ended(vm: Uuid, ended: &Ended) -> End {
    let Some(how) = ended.badly() else { return End::PoweredOff };
    let more = format!(" ({how}); its last output: {}", ended.said);
    End::Badly(halted(vm, "its QEMU exited unexpectedly", &more))
}

fn halted(vm: Uuid, why: &str, more: &str) -> Problem {
    Problem::new(Code::Failed, format!("VM {vm} is halted: {why}{more}")).advise("find the cause, then start it again")
}

/// The problem of an operation by QEMU; for `map_err`.
fn by_qemu(vm: Uuid) -> impl FnOnce(MachineError) -> Problem {
    move |error| qemu_problem(vm, &error)
}

/// The problem of an operation by Xen; for `map_err`.
pub fn by_xen(vm: Uuid) -> impl FnOnce(control::Error) -> Problem {
    move |error| {
        let problem = Problem::new(Code::Failed, format!("VM {vm}: {}", error.message));
        Problem { advice: error.advice, ..problem }
    }
}

/// The problem with a QEMU, including its causes.
pub fn qemu_problem(vm: Uuid, error: &MachineError) -> Problem {
    let what = format!("VM {vm}: {}", in_full(error));
    match error {
        MachineError::Hardware(_) => Problem::new(Code::Invalid, what),
        MachineError::Held { .. } | MachineError::Refused(_) => Problem::new(Code::InUse, what),
        MachineError::Taken(_) => Problem::new(Code::InUse, what)
            .advise("the guest has not released the previous disk; detach it inside the guest, or shut the guest down"),
        MachineError::Ended { said, .. } if said.contains(TUN) => Problem::new(Code::Failed, what).advise(
            "QEMU runs as its own user: let all users open /dev/net/tun (chmod 666), and create a tap interface of your \
             own without an owner, or set qemu-user to its owner",
        ),
        MachineError::NotSavable(_) => Problem::new(Code::State, what).advise(
            "a disk cannot be saved under: unplug and plug it again, or shut the VM down and start it",
        ),
        late if late.is_late() => Problem::new(Code::Timeout, what)
            .advise("what it was sent may still be done; find out why QEMU hangs, or shut the VM down with force"),
        MachineError::Start { .. } => {
            Problem::new(Code::Failed, what).advise("install QEMU and util-linux, or set qemu-program")
        }
        _ => Problem::new(Code::Failed, what),
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn an_inaccessible_tap_interface_is_reported_with_advice() {
        let said = "qemu: could not configure /dev/net/tun (tap7): Operation not permitted".to_owned();
        let ended = MachineError::Ended { what: "start the machine".into(), said };
        let advice = qemu_problem(Uuid::nil(), &ended).advice.unwrap();
        assert!(advice.contains("without an owner") && advice.contains("qemu-user"), "{advice}");
    }
}
