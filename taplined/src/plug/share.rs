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

use super::push_settings::{self, REPORT_TIMEOUT};
use crate::daemon::Daemon;
use crate::disk::control::PassedFile;
use crate::disk::live;
use crate::fault::{self, Planted};

/// The page's path in messages to a process.
const PAGE: &str = "/shares.page";

/// The state sent to a process.
#[derive(Clone, Copy, PartialEq, Eq)]
struct ShareSettings {
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
    push_settings::send_or_retry(daemon, vbd, |daemon, vbd| async move { share(&daemon, vbd).await }).await
}

/// Sends the weight to a process whose supervision has begun, in the background.
pub fn send_later(daemon: &Daemon, vbd: Uuid) {
    if fault::planted(Planted::UntoldWeight) {
        return;
    }
    let daemon = daemon.clone();
    push_settings::send_in_background(vbd, async move {
        match daemon.config.plug.shares {
            true => set(&daemon, vbd).await,
            false => {
                push_settings::send_or_retry(&daemon, vbd, |daemon, vbd| async move { withdraw(&daemon, vbd).await })
                    .await
            }
        }
    });
}

/// Withdraws the page from a process.
async fn withdraw(daemon: &Daemon, vbd: Uuid) -> Result<(), Problem> {
    send(daemon, vbd, ask::Share { alone: true, recorded: true, ..ask::Share::default() }, Vec::new()).await
}

/// Sends page and weight once.
async fn share(daemon: &Daemon, vbd: Uuid) -> Result<(), Problem> {
    let now = || {
        daemon.catalogue.read(move |view| {
            let known = view.vbd(vbd)?;
            let sr = view.sr(view.vdi(known.vdi)?.sr)?;
            Ok(ShareSettings { weight: known.share_weight, sr: sr.uuid, depth: sr.share_depth })
        })
    };
    let send_next = |next: ShareSettings| async move {
        let file = daemon.disks.shares.file(next.sr, next.depth)?;
        let page = PassedFile { path: PathBuf::from(PAGE), write: true, file };
        send(daemon, vbd, ask::Share { weight: Some(next.weight), recorded: true, alone: false }, vec![page]).await
    };
    push_settings::send_until_current(now, send_next).await
}

async fn send(daemon: &Daemon, vbd: Uuid, verb: ask::Share, files: Vec<PassedFile>) -> Result<(), Problem> {
    let sent = match live::must_answer_now(daemon, vbd).await {
        Ok(()) => live::hand(daemon, vbd, verb, files).await,
        Err(stuck) => Err(stuck.into()),
    };
    let refused = match sent {
        Ok(_) => return Ok(()),
        Err(refused) => refused,
    };
    // All slots may be taken, some by processes that were killed.
    daemon.disks.shares.sweep();
    let recorded = format!("the share of VBD {vbd} is");
    Err(push_settings::not_applied(refused, &recorded, "plugging it again has it, too"))
}

/// The weight reported by a running process that the catalogue does not contain, if it has one.
pub async fn weight_of_process(daemon: &Daemon, vbd: Uuid) -> Option<u32> {
    let reported =
        daemon.disks.ask(vbd, ask::Share { recorded: true, ..ask::Share::default() }, REPORT_TIMEOUT).await.ok()?;
    reported.shared.then_some(reported.weight)
}
