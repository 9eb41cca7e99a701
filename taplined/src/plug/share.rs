//! Passes a running disk process the page by which the disks of its repository share the storage, and its weight.
//!
//! Each process gets them when its supervision begins: after a plug, a restart, an upgrade, a restart of the daemon,
//! or an adoption. It serves alone until then. The weight is in the catalogue first, so sending it is idempotent. A
//! daemon with `plug.shares = false` withdraws the pages that processes have from its predecessor. Invariant: the
//! last weight sent to a process is that in the catalogue.

use std::path::PathBuf;

use ::control::ask;
use api::{Code, Problem};
use uuid::Uuid;

use super::told::{self, TO_SAY};
use crate::daemon::Daemon;
use crate::disk::control::Beside;
use crate::disk::live;
use crate::fault::{self, Planted};

/// The page's path in messages to a process.
const PAGE: &str = "/shares.page";

/// The state sent to a process.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Told {
    weight: u32,
    sr: Uuid,
    depth: u32,
}

/// Sends its weight to the process of a plugged VBD; if that fails, retries in the background.
pub async fn set(daemon: &Daemon, vbd: Uuid) -> Result<(), Problem> {
    if !daemon.config.plug.shares {
        let what =
            format!("the share of VBD {vbd} is recorded, but not in force: plug.shares is false in taplined.toml");
        return Err(Problem::new(Code::State, what).advise("set it to true, and start taplined again"));
    }
    told::now_or_later(daemon, vbd, |daemon, vbd| async move { share(&daemon, vbd).await }).await
}

/// Sends the weight to a process whose supervision has begun, in the background.
pub fn tell(daemon: &Daemon, vbd: Uuid) {
    if fault::planted(Planted::UntoldWeight) {
        return;
    }
    let daemon = daemon.clone();
    told::in_background(vbd, async move {
        match daemon.config.plug.shares {
            true => set(&daemon, vbd).await,
            false => told::now_or_later(&daemon, vbd, |daemon, vbd| async move { leave(&daemon, vbd).await }).await,
        }
    });
}

/// Withdraws the page from a process.
async fn leave(daemon: &Daemon, vbd: Uuid) -> Result<(), Problem> {
    say(daemon, vbd, ask::Share { alone: true, recorded: true, ..ask::Share::default() }, Vec::new()).await
}

/// Sends page and weight once.
async fn share(daemon: &Daemon, vbd: Uuid) -> Result<(), Problem> {
    let now = || {
        daemon.catalogue.read(move |view| {
            let known = view.vbd(vbd)?;
            let sr = view.sr(view.vdi(known.vdi)?.sr)?;
            Ok(Told { weight: known.share_weight, sr: sr.uuid, depth: sr.share_depth })
        })
    };
    let tell = |next: Told| async move {
        let file = daemon.disks.shares.file(next.sr, next.depth)?;
        let page = Beside { path: PathBuf::from(PAGE), write: true, file };
        say(daemon, vbd, ask::Share { weight: Some(next.weight), recorded: true, alone: false }, vec![page]).await
    };
    told::until_current(now, tell).await
}

async fn say(daemon: &Daemon, vbd: Uuid, verb: ask::Share, files: Vec<Beside>) -> Result<(), Problem> {
    let told = match live::must_answer_now(daemon, vbd).await {
        Ok(()) => live::hand(daemon, vbd, verb, files).await,
        Err(stuck) => Err(stuck.into()),
    };
    let refused = match told {
        Ok(_) => return Ok(()),
        Err(refused) => refused,
    };
    // All slots may be taken, some by processes that were killed.
    daemon.disks.shares.sweep();
    let recorded = format!("the share of VBD {vbd} is");
    Err(told::not_in_force(refused, &recorded, "plugging it again has it, too"))
}

/// The weight reported by a running process that the catalogue does not contain, if it has one.
pub async fn weight_of_process(daemon: &Daemon, vbd: Uuid) -> Option<u32> {
    let said = daemon.disks.ask(vbd, ask::Share { recorded: true, ..ask::Share::default() }, TO_SAY).await.ok()?;
    said.shared.then_some(said.weight)
}
