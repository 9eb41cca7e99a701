//! Has a running disk process keep the limits that the catalogue has.
//!
//! They are in the catalogue before: a process that is not reached, or is replaced meanwhile, gets them when it starts.
//! So repeating it does no harm. Invariant: the last that a process is told is what the catalogue has.

use ::control::ask;
use api::{DiskLimits, Problem};
use uuid::Uuid;

use super::told::{self, TO_SAY};
use crate::daemon::Daemon;
use crate::disk::limits::{self, to_process};
use crate::disk::live;

/// Tells the process of a plugged VBD its limits. Goes on trying in the background if that fails: they are recorded,
/// and a repetition of the request with its key is answered by what was recorded.
pub async fn set(daemon: &Daemon, vbd: Uuid) -> Result<(), Problem> {
    told::now_or_later(daemon, vbd, |daemon, vbd| async move { limit(&daemon, vbd).await }).await
}

/// The same once.
async fn limit(daemon: &Daemon, vbd: Uuid) -> Result<(), Problem> {
    let now = || daemon.catalogue.read(move |view| Ok(view.vbd(vbd)?.limits));
    told::until_current(now, |limits| tell(daemon, vbd, limits)).await
}

async fn tell(daemon: &Daemon, vbd: Uuid, limits: Option<DiskLimits>) -> Result<(), Problem> {
    let verb = ask::Limit { limits: Some(to_process(limits.as_ref())), recorded: true };
    let told = match live::must_answer_now(daemon, vbd).await {
        Ok(()) => live::ask(daemon, vbd, verb, Vec::new()).await,
        Err(stuck) => Err(stuck.into()),
    };
    let refused = match told {
        Ok(_) => return Ok(()),
        Err(refused) => refused,
    };
    let recorded = format!("the limits of VBD {vbd} are");
    Err(told::not_in_force(refused, &recorded, "plugging it again has them, too"))
}

/// The limits of a running process that the catalogue does not know.
pub async fn of_process(daemon: &Daemon, vbd: Uuid) -> Option<DiskLimits> {
    let limited = daemon.disks.ask(vbd, ask::Limit { limits: None, recorded: true }, TO_SAY).await.ok()?;
    limits::of_process(limited.limits)
}

/// Tells a process that was found running its limits, in the background: the daemon before this one may have ended
/// between recording them and telling it.
pub fn tell_again(daemon: &Daemon, vbd: Uuid) {
    let daemon = daemon.clone();
    told::in_background(vbd, async move { limit(&daemon, vbd).await });
}
