//! Has a running disk process keep the limits that the catalogue has.
//!
//! They are in the catalogue before: a process that is not reached, or is replaced meanwhile, gets them when it starts.
//! So repeating it does no harm. Invariant: the last that a process is told is what the catalogue has.

use std::time::Duration;

use ::control::{Kind, ask};
use api::{Code, DiskLimits, Problem, VbdState};
use uuid::Uuid;

use crate::daemon::Daemon;
use crate::disk::control::{Refused, problem};
use crate::disk::limits::{self, to_process};
use crate::vdi::live;

/// How long a process that is to be adopted may take to say its limits.
const TO_SAY: Duration = Duration::from_secs(10);
/// How often a process that could not be told is told again, and how long after the first time. The pause doubles.
const TRIES: u32 = 10;
const FIRST_PAUSE: Duration = Duration::from_secs(1);

/// Tells the process of a plugged VBD its limits. Goes on trying in the background if that fails: they are recorded,
/// and a repetition of the request with its key is answered by what was recorded.
pub async fn set(daemon: &Daemon, vbd: Uuid) -> Result<(), Problem> {
    let told = limit(daemon, vbd).await;
    if told.as_ref().is_err_and(|problem| problem.code != Code::Unsupported) {
        let daemon = daemon.clone();
        tokio::spawn(async move {
            for attempt in 0..TRIES {
                tokio::time::sleep(FIRST_PAUSE * 2u32.pow(attempt)).await;
                let plugged = daemon.catalogue.read(move |view| Ok(view.vbd(vbd)?.state == VbdState::Plugged)).await;
                if !plugged.unwrap_or(false) {
                    // It gets them when it starts.
                    return;
                }
                match limit(&daemon, vbd).await {
                    Ok(()) => return,
                    Err(problem) => tracing::warn!(%vbd, "{problem}"),
                }
            }
        });
    }
    told
}

/// The same once.
async fn limit(daemon: &Daemon, vbd: Uuid) -> Result<(), Problem> {
    let now = || daemon.catalogue.read(move |view| Ok(view.vbd(vbd)?.limits));
    let mut limits = now().await?;
    loop {
        tell(daemon, vbd, limits.as_ref()).await?;
        // Another may have been recorded and told meanwhile, and told before this one.
        let told = std::mem::replace(&mut limits, now().await?);
        if told == limits {
            return Ok(());
        }
    }
}

async fn tell(daemon: &Daemon, vbd: Uuid, limits: Option<&DiskLimits>) -> Result<(), Problem> {
    let verb = ask::Limit { limits: Some(to_process(limits)), recorded: true };
    let why = match live::ask(daemon, vbd, verb, Vec::new()).await {
        Ok(_) => return Ok(()),
        Err(Refused::Disk(error)) if error.kind == Kind::UnknownVerb => {
            let what = "its process runs an older program, which knows no limits";
            Problem::new(Code::Unsupported, what).advise(format!("upgrade it: 'tapline vbd upgrade {vbd}'"))
        }
        Err(Refused::Disk(error)) => problem(error),
        Err(Refused::Unanswered(problem)) => problem,
    };
    let what = format!("the limits of VBD {vbd} are recorded, but not in force yet: {}", why.detail);
    let advice = why.advice.unwrap_or_else(|| "the daemon goes on trying; plugging it again has them, too".into());
    Err(Problem::new(why.code, what).advise(advice))
}

/// The limits of a running process that the catalogue does not know. One of before there were limits has none.
pub async fn of_process(daemon: &Daemon, vbd: Uuid) -> Option<DiskLimits> {
    let limited = daemon.disks.ask(vbd, ask::Limit { limits: None, recorded: true }, TO_SAY).await.ok()?;
    limits::of_process(limited.limits)
}

/// Tells a process that was found running its limits, in the background: the daemon before this one may have ended
/// between recording them and telling it.
pub fn tell_again(daemon: &Daemon, vbd: Uuid) {
    let daemon = daemon.clone();
    tokio::spawn(async move {
        if let Err(problem) = limit(&daemon, vbd).await {
            // A program of before there were limits has none to change.
            tracing::debug!(%vbd, "{problem}");
        }
    });
}
