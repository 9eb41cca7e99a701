//! Applies the limits recorded in the catalogue to a running disk process.
//!
//! They are recorded first: a process that cannot be reached, or is replaced in the meantime, gets them when it
//! starts. Sending them is idempotent. Invariant: the last limits sent to a process are those in the catalogue.

use ::control::ask;
use api::{DiskLimits, Problem};
use uuid::Uuid;

use super::push_settings::{self, REPORT_TIMEOUT};
use crate::daemon::Daemon;
use crate::disk::limits::{self, to_process};
use crate::disk::live;

/// Sends its limits to the process of a plugged VBD. If that fails, retries in the background: the limits are
/// recorded, and a repetition of the request with its key only returns the recorded response.
pub async fn set(daemon: &Daemon, vbd: Uuid) -> Result<(), Problem> {
    push_settings::send_or_retry(daemon, vbd, |daemon, vbd| async move { limit(&daemon, vbd).await }).await
}

/// Sends the limits once.
async fn limit(daemon: &Daemon, vbd: Uuid) -> Result<(), Problem> {
    let now = || daemon.catalogue.read(move |view| Ok(view.vbd(vbd)?.limits));
    push_settings::send_until_current(now, |limits| send(daemon, vbd, limits)).await
}

async fn send(daemon: &Daemon, vbd: Uuid, limits: Option<DiskLimits>) -> Result<(), Problem> {
    let verb = ask::Limit { limits: Some(to_process(limits.as_ref())), recorded: true };
    let sent = match live::must_answer_now(daemon, vbd).await {
        Ok(()) => live::ask(daemon, vbd, verb, Vec::new()).await,
        Err(stuck) => Err(stuck.into()),
    };
    let refused = match sent {
        Ok(_) => return Ok(()),
        Err(refused) => refused,
    };
    let recorded = format!("the limits of VBD {vbd} are");
    Err(push_settings::not_applied(refused, &recorded, "plugging it again has them, too"))
}

/// The limits reported by a running process that the catalogue does not contain.
pub async fn of_process(daemon: &Daemon, vbd: Uuid) -> Option<DiskLimits> {
    let limited = daemon.disks.ask(vbd, ask::Limit { limits: None, recorded: true }, REPORT_TIMEOUT).await.ok()?;
    limits::of_process(limited.limits)
}

/// Sends its limits to a process that was found running, in the background: the previous daemon may have stopped
/// between recording and sending them.
pub fn resend(daemon: &Daemon, vbd: Uuid) {
    let daemon = daemon.clone();
    push_settings::send_in_background(vbd, async move { limit(&daemon, vbd).await });
}
