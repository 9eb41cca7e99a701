//! Xen domains: found by their VM, and monitored until their end.
//!
//! A domain is found by its UUID, which is the VM's: nothing about it is recorded that a crash of the daemon could
//! lose. Its number, which users and xenstore know it by, is the VM's handle.

use std::os::fd::AsFd;
use std::time::Duration;

use ::vm::xen::departures::Departures;
use ::vm::xen::machine::{Status, XenDomain};
use ::vm::xen::xl::Xl;
use api::Problem;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::watch;
use uuid::Uuid;

use super::machine::by_xen;
use crate::background;
use crate::config::Config;
use crate::daemon::Daemon;
use crate::task;

/// Pause before a lost connection to xenstore is retried.
const TO_COME_BACK: Duration = Duration::from_secs(10);

/// The toolstack of this host.
pub fn xl(config: &Config) -> Xl {
    Xl::of(&config.xl_program)
}

/// The domain of a VM, if there is one.
pub async fn find(daemon: &Daemon, vm: Uuid) -> Result<Option<XenDomain>, Problem> {
    let xl = xl(&daemon.config);
    query(vm, move || XenDomain::find(&xl, &vm.to_string())).await
}

/// Destroys a domain.
pub async fn destroy(vm: Uuid, domain: XenDomain) -> Result<(), Problem> {
    query(vm, move || domain.end()).await
}

/// Queries Xen about a VM, on a thread that may block.
pub async fn query<T: Send + 'static>(
    vm: Uuid,
    work: impl FnOnce() -> Result<T, control::Error> + Send + 'static,
) -> Result<T, Problem> {
    task::blocking(format!("query Xen about VM {vm}"), move || work().map_err(by_xen(vm))).await
}

/// Monitors a domain; the value becomes true at its end. Stops when there is no receiver.
pub fn follow(vm: Uuid, domain: XenDomain) -> watch::Receiver<bool> {
    let (ended, listens) = watch::channel(false);
    background::spawn(async move {
        loop {
            let followed = tokio::select! {
                () = ended.closed() => return,
                followed = to_the_end(vm, &domain) => followed,
            };
            match followed {
                Ok(()) => {
                    ended.send_replace(true);
                    return;
                }
                Err(problem) => tracing::error!(%vm, "cannot watch for its end at the moment: {problem}"),
            }
            tokio::time::sleep(TO_COME_BACK).await;
        }
    });
    listens
}

/// Waits until a domain has ended. It is only checked when some domain has ended.
async fn to_the_end(vm: Uuid, domain: &XenDomain) -> Result<(), Problem> {
    let mut departures = query(vm, Departures::watch).await?;
    let listen = |error: std::io::Error| Problem::failed("watch xenstore", error);
    let descriptor = departures.as_fd().try_clone_to_owned().map_err(listen)?;
    // The function is deprecated for types that may return a different descriptor each time; the replacement is
    // unsafe because of those.
    #[allow(deprecated, reason = "an OwnedFd has one descriptor")]
    let readable = AsyncFd::with_interest(descriptor, Interest::READABLE).map_err(listen)?;
    loop {
        // Later notifications are received in the next iteration.
        readable.readable().await.map_err(listen)?.clear_ready();
        if departures.take().map_err(by_xen(vm))? {
            let domain = domain.clone();
            match query(vm, move || domain.status()).await? {
                Status::Running | Status::Paused => {}
                Status::Down(_) | Status::Gone => return Ok(()),
            }
        }
    }
}
