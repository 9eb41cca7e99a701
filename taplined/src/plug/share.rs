//! Hands a running disk process the page by which the disks of its repository share the storage, and its weight.
//!
//! Each process is told when its supervision begins: one that was plugged, restarted, upgraded, found by a new daemon
//! or adopted. It serves alone until then. The weight is in the catalogue before, so repeating it does no harm.
//! Invariant: the last that a process is told is what the catalogue has.

use std::path::PathBuf;
use std::time::Duration;

use ::control::{Kind, ask};
use api::{Code, Problem, VbdState};
use uuid::Uuid;

use crate::daemon::Daemon;
use crate::disk::control::{Beside, Refused, problem};
use crate::vdi::live;

/// The path that a page has for a process.
const PAGE: &str = "/shares.page";
/// How long a process that is to be adopted may take to say its weight.
const TO_SAY: Duration = Duration::from_secs(10);
/// How often a process that could not be told is told again, and how long after the first time. The pause doubles.
const TRIES: u32 = 10;
const FIRST_PAUSE: Duration = Duration::from_secs(1);

/// What a process is told.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Told {
    weight: u32,
    sr: Uuid,
    depth: u32,
}

/// Tells the process of a plugged VBD its weight, and goes on trying in the background if that fails.
pub async fn set(daemon: &Daemon, vbd: Uuid) -> Result<(), Problem> {
    let told = share(daemon, vbd).await;
    if told.as_ref().is_err_and(|problem| problem.code != Code::Unsupported) {
        try_later(daemon, vbd);
    }
    told
}

/// Tells a process whose supervision has begun, in the background.
pub fn tell(daemon: &Daemon, vbd: Uuid) {
    if !daemon.config.plug.shares {
        return;
    }
    let daemon = daemon.clone();
    tokio::spawn(async move {
        match share(&daemon, vbd).await {
            Ok(()) => {}
            Err(problem) if problem.code == Code::Unsupported => tracing::debug!(%vbd, "{problem}"),
            Err(problem) => {
                tracing::debug!(%vbd, "{problem}");
                try_later(&daemon, vbd);
            }
        }
    });
}

fn try_later(daemon: &Daemon, vbd: Uuid) {
    let daemon = daemon.clone();
    tokio::spawn(async move {
        for attempt in 0..TRIES {
            tokio::time::sleep(FIRST_PAUSE * 2u32.pow(attempt)).await;
            let plugged = daemon.catalogue.read(move |view| Ok(view.vbd(vbd)?.state == VbdState::Plugged)).await;
            if !plugged.unwrap_or(false) {
                // It is told when it serves.
                return;
            }
            match share(&daemon, vbd).await {
                Ok(()) => return,
                Err(problem) => tracing::warn!(%vbd, "{problem}"),
            }
        }
    });
}

/// Tells it once.
async fn share(daemon: &Daemon, vbd: Uuid) -> Result<(), Problem> {
    let now = || {
        daemon.catalogue.read(move |view| {
            let known = view.vbd(vbd)?;
            let sr = view.sr(view.vdi(known.vdi)?.sr)?;
            Ok(Told { weight: known.share_weight, sr: sr.uuid, depth: sr.share_depth })
        })
    };
    let mut next = now().await?;
    loop {
        let file = daemon.disks.shares.file(next.sr, next.depth)?;
        let page = Beside { path: PathBuf::from(PAGE), write: true, file };
        say(daemon, vbd, ask::Share { weight: Some(next.weight), recorded: true }, vec![page]).await?;
        // Another may have been recorded and told meanwhile, and told before this one.
        let told = std::mem::replace(&mut next, now().await?);
        if told == next {
            return Ok(());
        }
    }
}

async fn say(daemon: &Daemon, vbd: Uuid, verb: ask::Share, files: Vec<Beside>) -> Result<(), Problem> {
    let why = match live::hand(daemon, vbd, verb, files).await {
        Ok(_) => return Ok(()),
        Err(Refused::Disk(error)) if error.kind == Kind::UnknownVerb => {
            let what = "its process runs an older program, which does not share its storage";
            Problem::new(Code::Unsupported, what).advise(format!("upgrade it: 'tapline vbd upgrade {vbd}'"))
        }
        Err(Refused::Disk(error)) => problem(error),
        Err(Refused::Unanswered(problem)) => problem,
    };
    // If all slots are taken, some may be of processes that were killed.
    daemon.disks.shares.sweep();
    let what = format!("the share of VBD {vbd} is recorded, but not in force yet: {}", why.detail);
    let advice = why.advice.unwrap_or_else(|| "the daemon goes on trying; plugging it again has it, too".into());
    Err(Problem::new(why.code, what).advise(advice))
}

/// The weight of a running process that the catalogue does not know, if it has one.
pub async fn weight_of_process(daemon: &Daemon, vbd: Uuid) -> Option<u32> {
    let said = daemon.disks.ask(vbd, ask::Share { weight: None, recorded: true }, TO_SAY).await.ok()?;
    said.shared.then_some(said.weight)
}
