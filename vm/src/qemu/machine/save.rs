//! A guest's memory, saved to a file and loaded from it: QEMU's migration, with a file in place of another host.
//!
//! It knows nothing about what is in the file, nor where it is. Invariants: a guest whose memory is saved does not run;
//! memory is loaded only by a machine that was started for that, and whose guest does not run until it is complete.
//!
//! The file is handed over as a descriptor (getfd), because QEMU's user cannot open it and its sandbox starts no
//! programs. QEMU continues at the descriptor's offset. It is the form that QEMU 7.2 knows; `file:` came with 8.2, and
//! takes nothing away from this one.

use std::fs::File;
use std::os::fd::AsFd;
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::super::accelerator::Accelerator;
use super::super::command_line::disk_name;
use super::super::slots::Position;
use super::super::version::Version;
use super::error::{MachineError, monitor};
use super::{COMMAND, POLL, QemuVm};

/// The name of the file in the monitor.
const NAME: &str = "memory";

/// Bytes a second: no limit, for the guest waits for it.
const BANDWIDTH: u64 = 1 << 40;

/// The time limit for loading: this, and a second for every [`MIB_A_SECOND`] MiB of memory.
const TO_LOAD: Duration = Duration::from_secs(120);
const MIB_A_SECOND: u32 = 8;

/// How long QEMU may take to stop saving.
const TO_CANCEL: Duration = Duration::from_secs(20);

/// The properties of a machine on which its saved memory depends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Kind {
    /// The version of the machine: `pc-i440fx-7.2`.
    pub machine: String,
    /// The engine that executes the guest's instructions.
    pub accelerator: Accelerator,
    /// The version of QEMU.
    pub version: Version,
}

/// How far saving is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Saving {
    /// Under way: bytes of memory that are saved, and all.
    Active {
        /// Done.
        done: u64,
        /// All.
        total: u64,
    },
    /// All is in the file.
    Complete,
    /// It is not being saved, and was not.
    Idle,
}

/// A disk of a stopped guest with requests that are not answered: they are known to this QEMU alone, and the guest
/// would wait for them forever.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Leftover(pub Position);

impl QemuVm {
    /// The machine type, accelerator and version that a QEMU which loads its memory must have.
    pub fn kind(&mut self) -> Result<Kind, MachineError> {
        let what = "query its machine type";
        let answer = self.command(what, "qom-get", &json!({ "path": "/machine", "property": "type" }))?;
        let machine = answer.as_str().and_then(|kind| kind.strip_suffix("-machine"));
        let machine = machine.ok_or_else(|| MachineError::NotSavable(format!("its machine type is {answer}")))?;
        let kvm = self.command("query its accelerator", "query-kvm", &json!({}))?;
        let accelerator = if kvm["enabled"] == true { Accelerator::Kvm } else { Accelerator::Tcg };
        Ok(Kind { machine: machine.to_owned(), accelerator, version: self.version()? })
    }

    /// Whether its memory was saved, and the guest has not run since.
    pub fn is_saved(&mut self) -> Result<bool, MachineError> {
        let answer = self.command("query its status", "query-status", &json!({}))?;
        Ok(answer["status"] == "postmigrate")
    }

    /// Checks that nothing in the machine prevents its memory from being saved.
    pub fn must_be_savable(&mut self) -> Result<(), MachineError> {
        let answer = self.query()?;
        let reasons = answer["blocked-reasons"].as_array().into_iter().flatten().filter_map(Value::as_str);
        let reasons: Vec<&str> = reasons.collect();
        if reasons.is_empty() { Ok(()) } else { Err(MachineError::NotSavable(reasons.join("; "))) }
    }

    /// A disk of the stopped guest with requests that are not answered. Their number is that of the requests that were
    /// taken from a queue less that of those that were answered.
    pub fn leftover(&mut self) -> Result<Option<Leftover>, MachineError> {
        for position in self.disks()? {
            let path = format!("/machine/peripheral/{}/virtio-backend", disk_name(position));
            let what = format!("query the queues of disk {}", position.number());
            let device = self.command(&what, "x-query-virtio-status", &json!({ "path": path }))?;
            for queue in 0..device["num-vqs"].as_u64().unwrap_or(0) {
                let arguments = json!({ "path": path, "queue": queue });
                let queue = self.command(&what, "x-query-virtio-queue-status", &arguments)?;
                if queue["vring-desc"].as_u64().is_some_and(|at| at > 0) && queue["last-avail-idx"] != queue["used-idx"]
                {
                    return Ok(Some(Leftover(position)));
                }
            }
        }
        Ok(None)
    }

    /// Begins to save the stopped guest's memory at the offset of `file`.
    pub fn begin_save(&mut self, file: &File) -> Result<(), MachineError> {
        self.command("save the guest's memory", "migrate-set-parameters", &json!({ "max-bandwidth": BANDWIDTH }))?;
        self.hand(file)?;
        self.command("save the guest's memory", "migrate", &json!({ "uri": format!("fd:{NAME}") })).map(drop)
    }

    /// How far that is.
    pub fn saving(&mut self) -> Result<Saving, MachineError> {
        let answer = self.query()?;
        match answer["status"].as_str() {
            Some("completed") => Ok(Saving::Complete),
            Some("failed") => {
                let why = answer["error-desc"].as_str().unwrap_or("it gives no reason").to_owned();
                Err(MachineError::Memory { what: "save", why })
            }
            None | Some("none" | "cancelled") => Ok(Saving::Idle),
            _ => {
                let number = |name: &str| answer["ram"][name].as_u64().unwrap_or(0);
                let (remaining, total) = (number("remaining"), number("total"));
                Ok(Saving::Active { done: total.saturating_sub(remaining), total })
            }
        }
    }

    /// Stops saving, if it is under way. The guest can be let run then.
    pub fn end_save(&mut self) -> Result<(), MachineError> {
        let deadline = Instant::now() + TO_CANCEL;
        let mut told = false;
        // One that has failed has ended as well.
        while let Ok(Saving::Active { .. }) | Err(MachineError::Monitor { .. }) = self.saving() {
            if !told {
                self.command("stop saving the guest's memory", "migrate_cancel", &json!({}))?;
                told = true;
            }
            if Instant::now() >= deadline {
                let why = format!("it has not stopped in {} s", TO_CANCEL.as_secs());
                return Err(MachineError::Memory { what: "stop saving", why });
            }
            thread::sleep(POLL);
        }
        Ok(())
    }

    /// Loads the guest's memory from the offset of `file`.
    pub(super) fn load(&mut self, file: &File, memory_mib: u32) -> Result<(), MachineError> {
        let patience = TO_LOAD + Duration::from_secs(u64::from(memory_mib / MIB_A_SECOND));
        let deadline = Instant::now() + patience;
        self.hand(file)?;
        self.command("load the guest's memory", "migrate-incoming", &json!({ "uri": format!("fd:{NAME}") }))?;
        loop {
            let answer = self.query()?;
            let failed = |why: String| Err(MachineError::Memory { what: "load", why });
            match answer["status"].as_str() {
                Some("completed") => return Ok(()),
                Some("failed") => {
                    return failed(answer["error-desc"].as_str().unwrap_or("it gives no reason").to_owned());
                }
                _ if Instant::now() >= deadline => {
                    return failed(format!("it has taken more than {} s", patience.as_secs()));
                }
                _ => thread::sleep(POLL),
            }
        }
    }

    fn query(&mut self) -> Result<Value, MachineError> {
        self.command("query the migration of the guest's memory", "query-migrate", &json!({}))
    }

    /// Gives the monitor a file, by [`NAME`].
    fn hand(&mut self, file: &File) -> Result<(), MachineError> {
        let arguments = json!({ "fdname": NAME });
        let handed = self.client.execute_with("getfd", &arguments, file.as_fd(), COMMAND);
        handed.map(drop).map_err(monitor("hand over the file of the guest's memory"))
    }
}
