//! Detects a disk that QEMU has lost: its guest will wait for it forever, and an administrator must be informed.
//!
//! This happens with QEMU before 9.1 if a disk's process dies while the guest's driver starts the disk. No later
//! process can fix it; the VBD's problem contains advice.

use std::time::Duration;

use api::{Code, Problem, VbdState};
use uuid::Uuid;

use crate::background;
use crate::daemon::Daemon;
use crate::vm;

/// QEMU normally reconnects to a new process of a disk after a second or two.
const TO_SPEAK: Duration = Duration::from_secs(20);

/// Checks, some time after a new process started to serve, whether the guest has reconnected.
pub fn check_later(daemon: &Daemon, vbd: Uuid) {
    let daemon = daemon.clone();
    background::spawn(async move {
        if let Err(problem) = check(&daemon, vbd).await {
            tracing::warn!(%vbd, "cannot tell whether its guest has reconnected: {problem}");
        }
    });
}

async fn check(daemon: &Daemon, vbd: Uuid) -> Result<(), Problem> {
    let before = daemon.catalogue.read(move |view| view.find_vbd(vbd)).await?;
    tokio::time::sleep(TO_SPEAK).await;
    let now = daemon.catalogue.read(move |view| view.find_vbd(vbd)).await?;
    // Other code handles a VBD that was unplugged or has got yet another process.
    let (Some(before), Some(now)) = (before, now) else { return Ok(()) };
    if (now.state, now.restarts) != (VbdState::Plugged, before.restarts) {
        return Ok(());
    }
    if !vm::has_lost(daemon, &now).await? {
        return Ok(());
    }
    let problem = Problem::new(
        Code::Failed,
        "QEMU has lost this disk: its process died while the guest's driver was starting it, and the guest's I/O will \
         hang forever",
    )
    .advise("shut the VM down with force and start it again; QEMU 9.1 and newer recover from this");
    tracing::error!(%vbd, "{problem}");
    daemon
        .catalogue
        .write(move |tx| match tx.vbd(vbd)? {
            vbd if (vbd.state, vbd.restarts) == (now.state, now.restarts) => {
                tx.set_vbd_state(vbd.uuid, VbdState::Plugged, Some(&problem))
            }
            _ => Ok(()),
        })
        .await
}
