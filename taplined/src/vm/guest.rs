//! A running machine, for a daemon that must not block: it is controlled on a thread that may block, and its end is
//! detected without polling.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};

use ::vm::qemu::machine::QemuVm;
use ::vm::qemu::process::Identity;
use ::vm::xen::machine::XenDomain;
use api::Problem;
use repo::catalogue::{Process, VmProcess};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::{Notify, watch};
use uuid::Uuid;

use super::console::Console;
use super::domain;
use super::inside::GuestPort;
use super::machine::RunningVm;
use crate::task::blocking;

/// A machine that runs, or has just ended.
#[derive(Debug)]
pub struct Guest {
    /// Its VM.
    pub vm: Uuid,
    process: Option<VmProcess>,
    machine: Mutex<RunningVm>,
    end: End,
    /// QEMU's monitor, polled for readability. A domain has none.
    monitor: Option<AsyncFd<OwnedFd>>,
    /// Notified when a stop or resume report was read together with the response to a command.
    changed: Notify,
    /// The console of the guest, unless its serial port is connected elsewhere.
    pub console: Option<Arc<Console>>,
    /// The port at which its guest is queried about its disks.
    pub inside: Option<GuestPort>,
}

/// How its end is detected.
#[derive(Debug)]
enum End {
    /// QEMU: by a pidfd.
    Process(AsyncFd<OwnedFd>),
    /// A domain: the task that monitors it reports its end.
    Domain(watch::Receiver<bool>),
}

impl Guest {
    /// Wraps a machine that QEMU runs. One that cannot be watched is returned unchanged.
    pub fn of_qemu(vm: Uuid, mut machine: QemuVm) -> Result<Guest, (QemuVm, Problem)> {
        // The function is deprecated for types that may return a different descriptor each time; the replacement is
        // unsafe because of those.
        #[allow(deprecated, reason = "an OwnedFd has one descriptor")]
        let readable = |fd: BorrowedFd<'_>| {
            fd.try_clone_to_owned().and_then(|owned| AsyncFd::with_interest(owned, Interest::READABLE))
        };
        let watched = readable(machine.as_fd()).and_then(|pidfd| Ok((pidfd, readable(machine.monitor())?)));
        let tried = format!("watch the QEMU of VM {vm}");
        let watched = watched.map_err(|error| Problem::failed(&tried, error));
        match watched.and_then(|watched| Ok((watched, process(vm, machine.identity())?))) {
            Ok(((pidfd, monitor), process)) => {
                let console = machine.take_console().and_then(|stream| match Console::follow(stream) {
                    Ok(console) => Some(Arc::new(console)),
                    Err(error) => {
                        tracing::warn!(%vm, %error, "cannot follow its console");
                        None
                    }
                });
                let inside = machine.take_guest_port().and_then(|stream| {
                    let failed = |error: &_| tracing::warn!(%vm, %error, "cannot use its guest's port");
                    GuestPort::of(stream).inspect_err(failed).ok()
                });
                let machine = Mutex::new(RunningVm::qemu(vm, machine));
                let (process, end, monitor) = (Some(process), End::Process(pidfd), Some(monitor));
                Ok(Guest { vm, process, machine, end, monitor, changed: Notify::new(), console, inside })
            }
            Err(problem) => Err((machine, problem)),
        }
    }

    /// Wraps a domain and watches for its end.
    pub fn of_domain(vm: Uuid, domain: XenDomain) -> Guest {
        let end = End::Domain(domain::follow(vm, domain.clone()));
        let (machine, changed) = (Mutex::new(RunningVm::xen(vm, domain)), Notify::new());
        Guest { vm, process: None, machine, end, monitor: None, changed, console: None, inside: None }
    }

    /// Its process, as recorded in the catalogue; `None` for a domain.
    pub fn process(&self) -> Option<&VmProcess> {
        self.process.as_ref()
    }

    /// Waits until it has ended.
    pub async fn ended(&self) -> Result<(), Problem> {
        match &self.end {
            End::Process(pidfd) => {
                let ready = pidfd.ready(Interest::READABLE).await;
                ready
                    .map(drop)
                    .map_err(|error| Problem::failed(format_args!("wait for the QEMU of VM {}", self.vm), error))
            }
            End::Domain(ended) => {
                let waited = ended.clone().wait_for(|ended| *ended).await.map(drop);
                waited.map_err(|error| Problem::failed(format_args!("wait for the domain of VM {}", self.vm), error))
            }
        }
    }

    /// Waits until the guest may have stopped or continued, on request or not. Fails when the machine's monitor is
    /// closed.
    pub async fn power_changed(self: &Arc<Guest>) -> Result<(), Problem> {
        let Some(monitor) = &self.monitor else { return std::future::pending().await };
        loop {
            tokio::select! {
                () = self.changed.notified() => {}
                ready = monitor.readable() => match ready {
                    // Before it is read: later data makes it readable again.
                    Ok(mut ready) => ready.clear_ready(),
                    Err(error) => {
                        return Err(Problem::failed(format_args!("watch the monitor of VM {}", self.vm), error));
                    }
                },
            }
            if self.run(RunningVm::has_changed).await? {
                return Ok(());
            }
        }
    }

    /// Runs an operation on the machine. It completes even if the caller stops waiting.
    pub async fn run<T: Send + 'static>(
        self: &Arc<Guest>,
        work: impl FnOnce(&mut RunningVm) -> Result<T, Problem> + Send + 'static,
    ) -> Result<T, Problem> {
        let guest = self.clone();
        let done_on_thread = blocking(format!("control VM {}", self.vm), move || {
            let mut machine = guest.machine.lock().unwrap_or_else(PoisonError::into_inner);
            let done = work(&mut machine);
            if machine.knows_of_change() {
                guest.changed.notify_one();
            }
            done
        });
        done_on_thread.await
    }
}

/// A process in the form of the catalogue.
pub fn process(vm: Uuid, identity: &Identity) -> Result<VmProcess, Problem> {
    let pid = u32::try_from(identity.pid)
        .map_err(|error| Problem::failed(format_args!("record the QEMU of VM {vm}"), error))?;
    Ok(VmProcess { process: Process { pid, started: identity.started }, boot: identity.boot.clone() })
}

/// An identity in the form of the crate `vm`.
pub fn identity(process: &VmProcess) -> Option<Identity> {
    let pid = i32::try_from(process.process.pid).ok()?;
    Some(Identity { pid, started: process.process.started, boot: process.boot.clone() })
}
