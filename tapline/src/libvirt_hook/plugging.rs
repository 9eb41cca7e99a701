//! Plugs and unplugs the VBDs of a domain through the daemon.
//!
//! A start either plugs and claims all disks, or leaves everything unchanged. A stop unplugs without force: QEMU has
//! exited, so no client is connected unless another program uses the disk, which then stays plugged.

use std::time::Duration;

use api::client::Answer;
use api::{Code, Mode, Problem, Task, TaskState, Vbd, VbdState, VbdUnplug};
use control::ask;
use serde::Serialize;
use tokio::time::{Instant, sleep};
use uuid::Uuid;

use super::claims::Claims;
use super::domain::{Domain, DomainDisk, canonical};
use crate::disk::ask_once;
use crate::output::say;
use crate::session::Session;
use crate::{wait, word};

/// Timeout for plugging a disk; `virsh start` waits for it.
const PLUG_MAX: Duration = Duration::from_secs(120);

/// Timeout for unplugging a disk; the domain cannot be started meanwhile.
const UNPLUG_MAX: Duration = Duration::from_secs(30);

/// Polling interval while another operation plugs or unplugs the disk.
const SETTLE_INTERVAL: Duration = Duration::from_millis(200);

/// Duration of a long-poll request for a task's state, in seconds.
const STEP: u32 = 1;

/// Finds the VBDs of a domain's disks; fails if one does not exist or belongs to a VM of the daemon.
pub async fn find(session: &Session, domain: &Domain) -> Result<Vec<Vbd>, Problem> {
    let mut vbds = Vec::new();
    for disk in &domain.disks {
        let vbd = session.client.vbd(disk.vbd).await.map_err(|problem| match problem.code {
            Code::NotFound => {
                let what = format!(
                    "domain {} has a disk at {}, but this host has no VBD {}",
                    domain.name,
                    disk.socket.display(),
                    disk.vbd
                );
                Problem::new(Code::NotFound, what)
                    .advise("tapline vbd list shows those there are; a Tapline disk cannot be migrated with its domain")
            }
            _ => problem,
        })?;
        if let Some(vm) = vbd.vm {
            let what = format!("VBD {} of domain {} belongs to VM {vm} of taplined", vbd.uuid, domain.name);
            return Err(Problem::new(Code::InUse, what)
                .advise("attach the disk to a machine that is managed elsewhere: tapline vdi attach DISK"));
        }
        vbds.push(vbd);
    }
    Ok(vbds)
}

/// Plugs and claims all disks of a domain that is about to start.
pub async fn plug(session: &Session, claims: &Claims, domain: &Domain) -> Result<(), Problem> {
    {
        let locked = claims.lock()?;
        let vbds = find(session, domain).await?;
        for vbd in &vbds {
            check_claimable(claims, domain, vbd)?;
        }
        for vbd in &vbds {
            locked.claim(vbd.uuid, domain)?;
        }
    }
    let mut plugged = Vec::new();
    for disk in &domain.disks {
        match plug_one(session, disk).await {
            Ok(true) => plugged.push(disk.vbd),
            Ok(false) => {}
            Err(problem) => {
                undo(session, claims, domain, &plugged).await;
                return Err(problem);
            }
        }
    }
    Ok(())
}

/// Refuses a VBD in use by another domain or client.
fn check_claimable(claims: &Claims, domain: &Domain, vbd: &Vbd) -> Result<(), Problem> {
    if vbd.state == VbdState::Unplugged {
        return Ok(());
    }
    if let Some(other) = claims.claimant(vbd.uuid)?.filter(|claimant| claimant.uuid != domain.uuid) {
        let what = format!("VBD {} is in use by domain {} ({})", vbd.uuid, other.name, other.uuid);
        let advice = format!(
            "two domains cannot share a disk; if that domain is not running, unplug it: tapline vbd unplug {}",
            vbd.uuid
        );
        return Err(Problem::new(Code::InUse, what).advise(advice));
    }
    if vbd.mode == Mode::ReadWrite && vbd.state == VbdState::Plugged && clients(vbd) != Some(0) {
        let what = format!("VBD {} is plugged, and another client may be connected to it", vbd.uuid);
        return Err(
            Problem::new(Code::InUse, what).advise(format!("end that client, then: tapline vbd unplug {}", vbd.uuid))
        );
    }
    Ok(())
}

/// Number of clients connected to a disk; `None` if unknown.
fn clients(vbd: &Vbd) -> Option<usize> {
    let control = vbd.socket.as_ref()?.as_path().with_file_name("control.sock");
    ask_once(&control, ask::Layers {}).ok()?.peers
}

/// Plugs a disk; returns true if it was unplugged before.
async fn plug_one(session: &Session, disk: &DomainDisk) -> Result<bool, Problem> {
    let deadline = Instant::now() + PLUG_MAX;
    let vbd = settled(session, disk.vbd, deadline).await?;
    let is_new = vbd.state == VbdState::Unplugged;
    if is_new {
        finish(session, session.client.vbd_plug(disk.vbd).await?, deadline).await?;
    }
    let vbd = session.client.vbd(disk.vbd).await?;
    if vbd.socket.as_ref().is_some_and(|socket| canonical(socket.as_path()) == canonical(&disk.socket)) {
        return Ok(is_new);
    }
    if is_new {
        unplug_one(session, disk.vbd).await?;
    }
    let socket = vbd.socket.map_or_else(|| "none".to_owned(), |socket| socket.to_string());
    let what =
        format!("the domain's disk is at {}, but the socket of VBD {} is {socket}", disk.socket.display(), disk.vbd);
    Err(Problem::new(Code::State, what)
        .advise(format!("change the domain as shown by: tapline vbd connect {} --for libvirt", disk.vbd)))
}

/// Waits until no plug, unplug or restart of a VBD is in progress; returns its state.
async fn settled(session: &Session, vbd: Uuid, deadline: Instant) -> Result<Vbd, Problem> {
    loop {
        let now = session.client.vbd(vbd).await?;
        match now.state {
            VbdState::Unplugged | VbdState::Plugged => return Ok(now),
            VbdState::Plugging | VbdState::Restarting | VbdState::Unplugging if Instant::now() < deadline => {
                sleep(SETTLE_INTERVAL).await;
            }
            state => {
                let what = format!("VBD {vbd} has been {} for too long", word::of(&state));
                return Err(Problem::new(Code::Busy, what).advise("see: tapline task list"));
            }
        }
    }
}

/// Waits for an operation and cancels it at the deadline.
async fn finish<T: Serialize>(session: &Session, answer: Answer<T>, deadline: Instant) -> Result<(), Problem> {
    let Answer::Begun(task) = answer else { return Ok(()) };
    let mut task: Task = *task;
    let mut is_cancelled = false;
    while !task.state.is_over() {
        if Instant::now() >= deadline && !is_cancelled {
            session.client.task_cancel(task.uuid).await?;
            is_cancelled = true;
        }
        task = session.client.task_wait(task.uuid, STEP).await?;
    }
    match task.state {
        TaskState::Done => Ok(()),
        _ if is_cancelled => Err(Problem::new(Code::Timeout, format!("{} took too long and was cancelled", task.verb))
            .advise("see: tapline vbd list; tapline sr list")),
        _ => Err(wait::failure(&task)),
    }
}

async fn unplug_one(session: &Session, vbd: Uuid) -> Result<(), Problem> {
    let deadline = Instant::now() + UNPLUG_MAX;
    if settled(session, vbd, deadline).await?.state == VbdState::Unplugged {
        return Ok(());
    }
    let answer = session.client.vbd_unplug(vbd, &VbdUnplug { force: false }).await?;
    finish(session, answer, deadline).await
}

/// Unplugs the disks that a failed start has plugged and removes its claims. Failures are reported; the claims on those
/// disks stay.
async fn undo(session: &Session, claims: &Claims, domain: &Domain, plugged: &[Uuid]) {
    for vbd in domain.disks.iter().map(|disk| disk.vbd) {
        let undone = async {
            if plugged.contains(&vbd) {
                unplug_one(session, vbd).await?;
            }
            claims.lock()?.release(vbd, domain.uuid)
        };
        if let Err(problem) = undone.await {
            say(&format!("tapline: VBD {vbd} of domain {} stays plugged: {problem}\n", domain.name));
        }
    }
}

/// Unplugs the disks of a stopped domain: those claimed for it, and those hot-plugged into it.
pub async fn unplug(session: &Session, claims: &Claims, domain: &Domain) -> Result<(), Problem> {
    let mut to_unplug = claims.of_domain(domain.uuid)?;
    if claims.has_started(domain.uuid) {
        for disk in &domain.disks {
            if claims.claimant(disk.vbd)?.is_none() && is_unused(session, disk.vbd).await? {
                to_unplug.push(disk.vbd);
            }
        }
    }
    let mut failed = None;
    for vbd in to_unplug {
        let done = match unplug_one(session, vbd).await {
            Err(problem) if problem.code == Code::NotFound => Ok(()),
            done => done,
        };
        match done {
            Ok(()) => claims.lock()?.release(vbd, domain.uuid)?,
            Err(problem) => failed = Some(problem),
        }
    }
    claims.lock()?.forget_started(domain.uuid)?;
    failed.map_or(Ok(()), Err)
}

/// Whether a VBD is plugged with no client connected.
async fn is_unused(session: &Session, vbd: Uuid) -> Result<bool, Problem> {
    match session.client.vbd(vbd).await {
        Ok(vbd) => Ok(vbd.state == VbdState::Plugged && vbd.vm.is_none() && clients(&vbd) == Some(0)),
        Err(problem) if problem.code == Code::NotFound => Ok(false),
        Err(problem) => Err(problem),
    }
}
