//! Health: whether a disk or a repository does its work; if not, since when, why, and what to do.
//!
//! [`of_disk`], [`of_vdi`] and [`of_sr`] judge facts that others have gathered: the daemon for its own disks, the
//! command line for disks that are served without it. They know no clock, file or process. Invariants: the same facts
//! give the same words in every view; a reason has no duration or rate in it, so that it changes only when the state
//! does.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::{Problem, Space, SrState, VbdState, VdiState};

/// Whether an object does its work.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Health {
    /// How it is.
    pub state: HealthState,
    /// Since when it is in this state, as far as the daemon has noticed; absent while it is healthy.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub since: Option<Timestamp>,
    /// Why it is not healthy; absent while it is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// What to do about it, if anything.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub advice: Option<String>,
}

/// States of health, from the best to the worst.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum HealthState {
    /// It does its work, or has none to do.
    #[default]
    Healthy,
    /// The disk is served without the daemon, which neither lists it nor restarts its process.
    Unmanaged,
    /// Requests are answered, but take long at the storage.
    Slow,
    /// The process of the disk died and is being restarted.
    Restarting,
    /// Guests wait for space, or nothing but the repository's reserve is left.
    Full,
    /// Requests are not answered: the process is stopped or hangs, or the storage does not respond.
    Stuck,
    /// The running disk and the catalogue disagree about the disk's files.
    Diverged,
    /// The storage, or a file on it, is missing.
    Unreachable,
    /// A file of the disk is damaged.
    Damaged,
    /// A sync failed, so that the disk refuses to write; or the disk is not plugged although it should be.
    Failed,
}

impl HealthState {
    /// All of them, from the best to the worst.
    pub const ALL: [HealthState; 10] = [
        HealthState::Healthy,
        HealthState::Unmanaged,
        HealthState::Slow,
        HealthState::Restarting,
        HealthState::Full,
        HealthState::Stuck,
        HealthState::Diverged,
        HealthState::Unreachable,
        HealthState::Damaged,
        HealthState::Failed,
    ];

    /// Its name, as in JSON.
    pub fn name(self) -> &'static str {
        match self {
            HealthState::Healthy => "healthy",
            HealthState::Unmanaged => "unmanaged",
            HealthState::Slow => "slow",
            HealthState::Restarting => "restarting",
            HealthState::Full => "full",
            HealthState::Stuck => "stuck",
            HealthState::Diverged => "diverged",
            HealthState::Unreachable => "unreachable",
            HealthState::Damaged => "damaged",
            HealthState::Failed => "failed",
        }
    }
}

/// How long the requests of a disk take.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Delay {
    /// Not long.
    #[default]
    None,
    /// Long at the storage, but they are answered.
    Slow,
    /// The storage has not answered the oldest one for seconds.
    AtStorage,
    /// The oldest one has not been given to the storage for seconds.
    BeforeStorage,
}

/// Observations of a disk's process that do not need its help.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Seen {
    /// It is stopped by a signal or a debugger.
    pub stopped: bool,
    /// It did not respond on its control socket in time.
    pub silent: bool,
    /// It reported that a sync failed.
    pub broken: bool,
    /// How long its requests take.
    pub delay: Delay,
}

/// The facts that determine the health of a disk.
#[derive(Clone, Copy, Debug)]
pub struct DiskFacts<'a> {
    /// What commands call the disk: the beginning of the VBD's UUID, or a control socket.
    pub name: &'a str,
    /// What commands call its VDI: the beginning of its UUID; empty without a daemon.
    pub vdi_name: &'a str,
    /// Whether a daemon supervises its process.
    pub supervised: bool,
    /// Whether it is plugged; plugged, without a daemon.
    pub state: VbdState,
    /// The state of its VDI; ready, without a daemon.
    pub vdi: VdiState,
    /// The recorded problem of the VBD.
    pub problem: Option<&'a Problem>,
    /// Whether its guest waits for space.
    pub waits_for_space: bool,
    /// The process that serves it.
    pub pid: Option<u32>,
    /// The observations of that process.
    pub seen: Seen,
    /// What keeps its repository from being used, if anything does ([`of_contents`]).
    pub repository: Option<&'a Health>,
}

/// The facts that determine the health of a VDI, besides that of the VBDs that use it.
#[derive(Clone, Copy, Debug)]
pub struct VdiFacts<'a> {
    /// What commands call it: the beginning of its UUID.
    pub name: &'a str,
    /// The state of its files.
    pub state: VdiState,
    /// The first of its files.
    pub file: &'a str,
    /// What keeps its repository from being used, if anything does ([`of_contents`]).
    pub repository: Option<&'a Health>,
}

/// The facts that determine the health of a repository.
#[derive(Clone, Copy, Debug)]
pub struct SrFacts<'a> {
    /// Whether it can be used.
    pub state: SrState,
    /// Whether it can be written.
    pub read_only: bool,
    /// Its space, if that was measured.
    pub space: Option<&'a Space>,
    /// Its recorded problem.
    pub problem: Option<&'a Problem>,
    /// Whether calls to its storage have not returned in time.
    pub silent: bool,
}

impl Health {
    /// Of an object that does its work.
    pub fn healthy() -> Health {
        Health::default()
    }

    fn of(state: HealthState, reason: impl Into<String>, advice: impl Into<Option<String>>) -> Health {
        Health { state, since: None, reason: Some(reason.into()), advice: advice.into() }
    }

    fn of_problem(state: HealthState, problem: Option<&Problem>, otherwise: &str) -> Health {
        let reason = problem.map_or_else(|| otherwise.to_owned(), |problem| problem.detail.clone());
        Health::of(state, reason, problem.and_then(|problem| problem.advice.clone()))
    }

    /// Whether there is nothing to report.
    pub fn is_healthy(&self) -> bool {
        self.state == HealthState::Healthy
    }
}

/// The health of a plugged or unplugged disk: the worst that the facts show. `since` is left to the caller.
pub fn of_disk(facts: &DiskFacts<'_>) -> Health {
    worse(of_disk_alone(facts), facts.repository)
}

/// The health of a disk whose repository can be used.
fn of_disk_alone(facts: &DiskFacts<'_>) -> Health {
    let DiskFacts { name, problem, seen, .. } = *facts;
    let served = !matches!(facts.state, VbdState::Unplugged | VbdState::Restarting);
    if served && seen.broken {
        let reason = "a sync failed on its storage, so the disk refuses all writes; data written since the last flush \
                      may be lost";
        let advice = "repair the storage, then restart the machine and plug the disk again";
        return Health::of(HealthState::Failed, reason, advice.to_owned());
    }
    if facts.vdi == VdiState::Diverged {
        return of_diverged(facts);
    }
    if let Some(health) = of_vdi_state(facts.vdi, None) {
        return health;
    }
    match facts.state {
        VbdState::Restarting => {
            return Health::of_problem(HealthState::Restarting, problem, "its process died and is being restarted");
        }
        VbdState::Unplugged => {
            let Some(problem) = problem else { return Health::healthy() };
            let health = Health::of_problem(HealthState::Failed, Some(problem), "");
            let advice = || format!("when its cause is gone, plug the disk again: tapline vbd plug {name}");
            return Health { advice: Some(health.advice.unwrap_or_else(advice)), ..health };
        }
        VbdState::Plugging | VbdState::Plugged | VbdState::Unplugging => {}
    }
    of_process(facts).unwrap_or_else(|| match facts.supervised {
        true => Health::healthy(),
        false => {
            let reason = "it is served without the daemon: it is not restarted if its process dies";
            Health::of(HealthState::Unmanaged, reason, None)
        }
    })
}

/// The health of a disk that the catalogue has other files of than its process, or than its last process had.
fn of_diverged(facts: &DiskFacts<'_>) -> Health {
    let vdi = facts.vdi_name;
    if facts.state == VbdState::Unplugged {
        return of_unused_diverged(vdi);
    }
    let otherwise = "its running process and the catalogue disagree about its files";
    let health = Health::of_problem(HealthState::Diverged, facts.problem, otherwise);
    let advice = || {
        format!(
            "see what differs: tapline host reconcile --dry-run; then choose which is right: tapline vdi reconcile \
             {vdi} --believe disk|catalogue"
        )
    };
    Health { advice: Some(health.advice.unwrap_or_else(advice)), ..health }
}

/// The health of a diverged disk that no process serves.
fn of_unused_diverged(vdi: &str) -> Health {
    let reason = "its files are others than its last process had, or belong to another disk as well";
    let advice = format!(
        "check that its files are the right ones (see: tapline sr scan), then use them: tapline vdi reconcile {vdi} \
         --believe catalogue"
    );
    Health::of(HealthState::Diverged, reason, advice)
}

/// The worse one of an object's own health and the condition of its repository.
fn worse(own: Health, repository: Option<&Health>) -> Health {
    repository.filter(|repository| repository.state > own.state).cloned().unwrap_or(own)
}

/// What the health of a repository means for the disks in it: nothing, unless its storage is missing or does not
/// respond.
pub fn of_contents(name: &str, repository: &Health) -> Option<Health> {
    let state = match repository.state {
        state @ (HealthState::Unreachable | HealthState::Stuck) => state,
        _ => return None,
    };
    let why = repository.reason.as_deref().unwrap_or_default();
    let reason = format!("its repository '{name}' is {}: {why}", state.name());
    Some(Health::of(state, reason, repository.advice.clone()))
}

/// What is wrong with a disk that is served.
fn of_process(facts: &DiskFacts<'_>) -> Option<Health> {
    let DiskFacts { name, pid, problem, seen, supervised, .. } = *facts;
    let process = pid.map_or_else(|| "its process".to_owned(), |pid| format!("process {pid}"));
    let stop = match supervised {
        true => format!("to give the disk up: tapline vbd unplug --force {name}"),
        false => "to give the disk up, kill the process".to_owned(),
    };
    if seen.stopped {
        let advice = pid.map(|pid| format!("continue it: kill -CONT {pid}; {stop}")).unwrap_or(stop);
        let reason = format!("{process} is stopped by a signal or a debugger (state T)");
        return Some(Health::of(HealthState::Stuck, reason, advice));
    }
    let unanswered = problem.filter(|problem| problem.code == crate::Code::Timeout);
    if seen.silent || unanswered.is_some() {
        let otherwise = format!("{process} does not respond");
        let health = Health::of_problem(HealthState::Stuck, unanswered, &otherwise);
        let advice = health.advice.unwrap_or_else(|| format!("see the kernel log of the host; {stop}"));
        return Some(Health { advice: Some(advice), ..health });
    }
    if facts.waits_for_space {
        let advice = "free space in the repository or enlarge it: the guest then continues";
        let reason = "its repository is full, and the guest waits for space";
        return Some(Health::of(HealthState::Full, reason, advice.to_owned()));
    }
    let slow = || match supervised {
        true => format!("see whether the storage or other disks cause it: tapline top, tapline explain {name}"),
        false => format!("see whether the storage or other disks cause it: tapline explain {name}"),
    };
    match seen.delay {
        Delay::None => None,
        Delay::Slow => Some(Health::of(HealthState::Slow, "its storage takes long to answer requests", slow())),
        Delay::AtStorage => {
            let reason = "its storage does not answer a request";
            let advice = "see the kernel log of the host, and whether the file system or its server hangs; the disk \
                          continues when the storage does";
            Some(Health::of(HealthState::Stuck, reason, advice.to_owned()))
        }
        Delay::BeforeStorage => {
            let reason = "a request is held back and has not reached the storage";
            let advice = "it waits for a pause or an operation on the disk: see tapline task list";
            Some(Health::of(HealthState::Stuck, reason, advice.to_owned()))
        }
    }
}

/// The health of a VDI: that of its files, or the worst of the VBDs that use it.
pub fn of_vdi<'a>(facts: &VdiFacts<'_>, users: impl IntoIterator<Item = &'a Health>) -> Health {
    let worst = users.into_iter().max_by_key(|health| health.state);
    let own = match (facts.state, worst) {
        // What serves it can say more.
        (VdiState::Diverged, Some(user)) if user.state == HealthState::Diverged => user.clone(),
        (VdiState::Diverged, _) => of_unused_diverged(facts.name),
        (state, worst) => of_vdi_state(state, Some(facts.file)).unwrap_or_else(|| worst.cloned().unwrap_or_default()),
    };
    worse(own, facts.repository)
}

/// What is wrong with the files of a disk, of which `file` is the first, if they are missing or damaged.
fn of_vdi_state(state: VdiState, file: Option<&str>) -> Option<Health> {
    let (state, wrong, advice) = match state {
        // Who serves it decides the words of a diverged one.
        VdiState::Ready | VdiState::Diverged | VdiState::NoData => return None,
        VdiState::Missing => (
            HealthState::Unreachable,
            "one of its files was missing at the last scan",
            "restore it, then scan the repository: tapline sr scan",
        ),
        VdiState::Damaged => (
            HealthState::Damaged,
            "one of its files is damaged",
            "restore it from a backup, or repair it (tapline image check --repair), then scan the repository: tapline \
             sr scan",
        ),
    };
    let reason = file.map_or_else(|| wrong.to_owned(), |file| format!("{wrong} (its own is {file})"));
    Some(Health::of(state, reason, advice.to_owned()))
}

/// The health of a repository. The reserve is not free space: a repository with nothing else left is full.
pub fn of_sr(facts: &SrFacts<'_>) -> Health {
    match facts.state {
        SrState::Detached => return Health::healthy(),
        SrState::Lost => {
            let health = Health::of_problem(HealthState::Unreachable, facts.problem, "its storage disappeared");
            let advice = || "restore its storage: the repository is then attached again automatically".to_owned();
            return Health { advice: Some(health.advice.unwrap_or_else(advice)), ..health };
        }
        SrState::Attached => {}
    }
    if facts.silent {
        let advice = "see the kernel log of the host, and whether the file system or its server hangs";
        return Health::of(HealthState::Stuck, "its storage does not respond", advice.to_owned());
    }
    let space = facts.space.filter(|_| !facts.read_only);
    let advice = || "destroy what is not needed (tapline vdi list --sort -used) or enlarge the storage".to_owned();
    match space {
        Some(space) if space.full => Health::of(HealthState::Full, "it is full, and guests wait for space", advice()),
        Some(space) if space.free == 0 => {
            let reason = "no space is left but its reserve: new disks, snapshots and copies are refused";
            Health::of(HealthState::Full, reason, advice())
        }
        _ => Health::healthy(),
    }
}

#[cfg(test)]
mod test;
