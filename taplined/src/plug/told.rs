//! Has a running disk process told what the catalogue has for it: its limits, its share, the sizes of its
//! transfers.
//!
//! It is recorded before, so that repeating it does no harm; a process that is replaced meanwhile is told anew, or has
//! it on its command line.

use std::time::Duration;

use api::{Code, Problem, VbdState};
use uuid::Uuid;

use crate::background;
use crate::daemon::Daemon;
use crate::disk::control::Refused;

/// How long a process that is to be adopted may take to say what it has.
pub const TO_SAY: Duration = Duration::from_secs(10);
/// How often a process that could not be told is told again, and how long after the first time. The pause doubles.
const TRIES: u32 = 10;
const FIRST_PAUSE: Duration = Duration::from_secs(1);

/// Tells it by `tell`, and goes on trying in the background if that fails, unless its program does not know how.
pub async fn now_or_later<F, Told>(daemon: &Daemon, vbd: Uuid, tell: F) -> Result<(), Problem>
where
    F: Fn(Daemon, Uuid) -> Told + Send + 'static,
    Told: Future<Output = Result<(), Problem>> + Send,
{
    let told = tell(daemon.clone(), vbd).await;
    if told.as_ref().is_err_and(|problem| problem.code != Code::Unsupported) {
        let daemon = daemon.clone();
        background::spawn(async move {
            for attempt in 0..TRIES {
                tokio::time::sleep(FIRST_PAUSE * 2u32.pow(attempt)).await;
                let plugged = daemon.catalogue.read(move |view| Ok(view.vbd(vbd)?.state == VbdState::Plugged)).await;
                if !plugged.unwrap_or(false) {
                    // It gets it when it starts.
                    return;
                }
                match tell(daemon.clone(), vbd).await {
                    Ok(()) => return,
                    Err(problem) => tracing::warn!(%vbd, "{problem}"),
                }
            }
        });
    }
    told
}

/// Tells it by `say` what `now` reads, until that is what is recorded: another may have been recorded and told
/// meanwhile, and told before this one.
pub async fn until_current<T, Read, Said>(now: impl Fn() -> Read, say: impl Fn(T) -> Said) -> Result<(), Problem>
where
    T: PartialEq + Clone,
    Read: Future<Output = Result<T, Problem>>,
    Said: Future<Output = Result<(), Problem>>,
{
    let mut next = now().await?;
    loop {
        say(next.clone()).await?;
        let told = std::mem::replace(&mut next, now().await?);
        if told == next {
            return Ok(());
        }
    }
}

/// Tells a process in the background, where no request waits for it. A program that does not know how has nothing to
/// change.
pub fn in_background<Told>(vbd: Uuid, tell: Told)
where
    Told: Future<Output = Result<(), Problem>> + Send + 'static,
{
    background::spawn(async move {
        if let Err(problem) = tell.await {
            tracing::debug!(%vbd, "{problem}");
        }
    });
}

/// Why something is recorded and not in force: what is recorded, and what else has it in force.
pub fn not_in_force(refused: Refused, recorded: &str, otherwise: &str) -> Problem {
    let why = Problem::from(refused);
    let what = format!("{recorded} saved, but not applied yet: {}", why.detail);
    let advice = why.advice.unwrap_or_else(|| format!("the daemon retries automatically; {otherwise}"));
    Problem::new(why.code, what).advise(advice)
}
