//! Has a running disk process keep the limits that the catalogue has.
//!
//! They are in the catalogue before: a process that is not reached, or is replaced meanwhile, gets them when it starts.
//! So repeating it does no harm. Invariant: the last that a process is told is what the catalogue has.

use ::control::{Kind, ask};
use api::{Code, DiskLimits, Problem};
use uuid::Uuid;

use crate::daemon::Daemon;
use crate::disk::control::{Refused, problem};
use crate::disk::limits::to_process;
use crate::vdi::live;

/// Tells the process of a plugged VBD its limits.
pub async fn limit(daemon: &Daemon, vbd: Uuid) -> Result<(), Problem> {
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
    let advice = why.advice.unwrap_or_else(|| "retry, or plug it again".into());
    Err(Problem::new(why.code, what).advise(advice))
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
