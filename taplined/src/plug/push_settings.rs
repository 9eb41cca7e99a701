//! Sends a running disk process its settings from the catalogue: limits, share, transfer sizes.
//!
//! They are recorded first, so that sending them is idempotent; a process that replaces another in the meantime gets
//! them again, or has them on its command line.

use std::time::Duration;

use api::{Code, Problem, VbdState};
use uuid::Uuid;

use crate::background;
use crate::daemon::Daemon;
use crate::disk::control::Refused;

/// How long a process to be adopted may take to report its settings.
pub const REPORT_TIMEOUT: Duration = Duration::from_secs(10);
/// Number of retries in the background, and the pause before the first one, which then doubles.
const TRIES: u32 = 10;
const FIRST_PAUSE: Duration = Duration::from_secs(1);

/// Sends the settings by `send`; if that fails, retries in the background, unless the program does not support them.
pub async fn send_or_retry<F, Sending>(daemon: &Daemon, vbd: Uuid, send: F) -> Result<(), Problem>
where
    F: Fn(Daemon, Uuid) -> Sending + Send + 'static,
    Sending: Future<Output = Result<(), Problem>> + Send,
{
    let sent = send(daemon.clone(), vbd).await;
    if sent.as_ref().is_err_and(|problem| problem.code != Code::Unsupported) {
        let daemon = daemon.clone();
        background::spawn(async move {
            for attempt in 0..TRIES {
                tokio::time::sleep(FIRST_PAUSE * 2u32.pow(attempt)).await;
                let plugged = daemon.catalogue.read(move |view| Ok(view.vbd(vbd)?.state == VbdState::Plugged)).await;
                if !plugged.unwrap_or(false) {
                    // The process gets them when it starts.
                    return;
                }
                match send(daemon.clone(), vbd).await {
                    Ok(()) => return,
                    Err(problem) => tracing::warn!(%vbd, "{problem}"),
                }
            }
        });
    }
    sent
}

/// Sends, by `send`, the settings read by `now`, until those are the recorded ones: a concurrent request may have
/// recorded others, and sent them earlier.
pub async fn send_until_current<T, Read, Sent>(now: impl Fn() -> Read, send: impl Fn(T) -> Sent) -> Result<(), Problem>
where
    T: PartialEq + Clone,
    Read: Future<Output = Result<T, Problem>>,
    Sent: Future<Output = Result<(), Problem>>,
{
    let mut next = now().await?;
    loop {
        send(next.clone()).await?;
        let sent = std::mem::replace(&mut next, now().await?);
        if sent == next {
            return Ok(());
        }
    }
}

/// Sends settings in the background, when no request waits for the result. A program that does not support them needs
/// none.
pub fn send_in_background<Sending>(vbd: Uuid, send: Sending)
where
    Sending: Future<Output = Result<(), Problem>> + Send + 'static,
{
    background::spawn(async move {
        if let Err(problem) = send.await {
            tracing::debug!(%vbd, "{problem}");
        }
    });
}

/// The problem that settings are recorded but not applied; `otherwise` says what else applies them.
pub fn not_applied(refused: Refused, recorded: &str, otherwise: &str) -> Problem {
    let why = Problem::from(refused);
    let what = format!("{recorded} saved, but not applied yet: {}", why.detail);
    let advice = why.advice.unwrap_or_else(|| format!("the daemon retries automatically; {otherwise}"));
    Problem::new(why.code, what).advise(advice)
}
