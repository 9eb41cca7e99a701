//! A machine that runs, for a daemon that must not wait: told what to do on a thread that may, and its end seen without asking.

use std::error::Error;
use std::fmt::Write;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};

use ::vm::qemu::machine::{Machine, MachineError};
use ::vm::qemu::process::Identity;
use api::{Code, Problem};
use repo::catalogue::{Process, VmProcess};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use uuid::Uuid;

/// A machine that runs, or has just ended.
#[derive(Debug)]
pub struct Guest {
    /// Its VM.
    pub vm: Uuid,
    identity: Identity,
    machine: Mutex<Machine>,
    pidfd: AsyncFd<OwnedFd>,
}

impl Guest {
    /// Of a machine. One that cannot be watched is left as it is.
    pub fn of(vm: Uuid, machine: Machine) -> Result<Guest, (Machine, Problem)> {
        // It is deprecated for types that may give another descriptor each time; the new one is unsafe for their sake.
        #[allow(deprecated, reason = "an OwnedFd has one descriptor")]
        let watched =
            machine.as_fd().try_clone_to_owned().and_then(|pidfd| AsyncFd::with_interest(pidfd, Interest::READABLE));
        match watched {
            Ok(pidfd) => Ok(Guest { vm, identity: machine.identity().clone(), machine: Mutex::new(machine), pidfd }),
            Err(error) => Err((machine, Problem::failed(format_args!("watch the QEMU of VM {vm}"), error))),
        }
    }

    /// Its process, as the catalogue keeps it.
    pub fn process(&self) -> Result<VmProcess, Problem> {
        let pid = u32::try_from(self.identity.pid)
            .map_err(|error| Problem::failed(format_args!("record the QEMU of VM {}", self.vm), error))?;
        Ok(VmProcess { process: Process { pid, started: self.identity.started }, boot: self.identity.boot.clone() })
    }

    /// Waits until QEMU has ended.
    pub async fn ended(&self) -> Result<(), Problem> {
        let ready = self.pidfd.ready(Interest::READABLE).await;
        ready.map(drop).map_err(|error| Problem::failed(format_args!("wait for the QEMU of VM {}", self.vm), error))
    }

    /// Has the machine do something. It is done to its end, also if nobody waits for it any more.
    pub async fn tell<T: Send + 'static>(
        self: &Arc<Guest>,
        work: impl FnOnce(&mut Machine) -> Result<T, MachineError> + Send + 'static,
    ) -> Result<T, Problem> {
        let guest = self.clone();
        let told = tokio::task::spawn_blocking(move || {
            work(&mut guest.machine.lock().unwrap_or_else(PoisonError::into_inner))
        });
        let told = told.await.map_err(|error| Problem::failed(format_args!("speak to VM {}", self.vm), error))?;
        told.map_err(|error| problem(self.vm, &error))
    }
}

/// An identity, as the crate `vm` wants it.
pub fn identity(process: &VmProcess) -> Option<Identity> {
    let pid = i32::try_from(process.process.pid).ok()?;
    Some(Identity { pid, started: process.process.started, boot: process.boot.clone() })
}

/// What went wrong with a machine, with its causes.
pub fn problem(vm: Uuid, error: &MachineError) -> Problem {
    let mut what = format!("VM {vm}: {error}");
    let mut cause = error.source();
    while let Some(error) = cause {
        // A string takes everything.
        write!(what, ": {error}").ok();
        cause = error.source();
    }
    match error {
        MachineError::Hardware(_) => Problem::new(Code::Invalid, what),
        MachineError::Held { .. } | MachineError::Refused(_) => Problem::new(Code::InUse, what),
        MachineError::Taken(_) => Problem::new(Code::InUse, what)
            .advise("the guest has not let go of the disk that was there; do that in the guest, or shut it down"),
        MachineError::Start { .. } => {
            Problem::new(Code::Failed, what).advise("install QEMU and util-linux, or set qemu-program")
        }
        _ => Problem::new(Code::Failed, what),
    }
}
