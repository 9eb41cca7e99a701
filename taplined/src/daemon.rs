//! State shared by all parts of the daemon.

use std::fs;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use api::{Code, Host, Problem, SrState};
use jiff::Timestamp;
use repo::Catalogue;
use repo::driver::{LastHost, machine};
use uuid::Uuid;

use crate::account;
use crate::background;
use crate::backup;
use crate::catalogue::Care;
use crate::config::Config;
use crate::directories;
use crate::disk::Disks;
use crate::disk::tool::{self, Tool};
use crate::download::Downloads;
use crate::history::History;
use crate::http::Answers;
use crate::jobs;
use crate::plug::{self, Plugs};
use crate::predecessors;
use crate::reader;
use crate::request;
use crate::sr::Srs;
use crate::task::Tasks;
use crate::token::Tokens;
use crate::upload::Uploads;
use crate::vdi;
use crate::vm::{self, Vms};

/// Timeout for another daemon to release a directory.
const LOCK_PATIENCE: Duration = Duration::from_secs(2);
/// Timeout for backing up and closing the catalogue when the daemon stops.
const TO_CLOSE: Duration = Duration::from_secs(10);

/// The daemon. Cheap to clone; clones share their state.
#[derive(Clone, Debug)]
pub struct Daemon(Arc<Parts>);

/// The parts of the daemon.
#[derive(Debug)]
pub struct Parts {
    /// The settings.
    pub config: Config,
    /// All objects.
    pub catalogue: Catalogue,
    /// Backups and verification of the catalogue.
    pub care: Care,
    /// Tokens for the API over TCP.
    pub tokens: Tokens,
    /// Running tasks.
    pub tasks: Tasks,
    /// Starts disk processes.
    pub tool: Tool,
    /// The running disks.
    pub disks: Disks,
    /// Plugged VBDs.
    pub plugs: Plugs,
    /// The running VMs.
    pub vms: Vms,
    /// The attached repositories.
    pub srs: Srs,
    /// Repositories with postponed garbage collection.
    pub postponed: vdi::Postponed,
    /// Statistics of each VBD for the last 24 hours.
    pub history: History,
    /// Responses that clients have not read yet.
    pub answers: Answers,
    /// Uploads in progress.
    pub uploads: Uploads,
    /// Exported disks that clients fetch.
    pub downloads: Downloads,
    /// VDIs that clients of the NBD address read.
    pub readers: reader::Readers,
    /// Requests that clients may repeat.
    pub key_locks: request::KeyLocks,
    /// The requests that look at backup targets.
    pub backup_turns: backup::Turns,
    host: Uuid,
    started: Timestamp,
    /// Locked for the lifetime of the daemon, so that there is only one.
    _locks: [fs::File; 2],
}

impl std::ops::Deref for Daemon {
    type Target = Parts;

    fn deref(&self) -> &Parts {
        &self.0
    }
}

impl Daemon {
    /// Opens the catalogue, and completes or rolls back the unfinished work of the previous daemon.
    pub async fn start(config: Config) -> Result<Daemon, Problem> {
        let locks = alone(&config)?;
        allow_many_disks()?;
        let catalogue = crate::catalogue::open(&config)?;
        directories::close_catalogue(&config);
        let machine = machine();
        let host = host_identity(&catalogue, &machine).await?;
        let tokens = Tokens::load(&catalogue).await?;
        let tasks = Tasks::new(catalogue.clone(), jobs::RULES);
        let tool = Tool::of(&config)?;
        let state_directory = config.state_directory.clone();
        let last_host = LastHost { host, machine, state_directory };
        let predecessors = predecessors::note(&config.run_directory, &last_host);
        let srs = Srs::new(&config, catalogue.clone(), last_host, predecessors, jobs::WHEN_ATTACHED);
        let (disks, plugs, vms) = (Disks::of(&config), Plugs::new(&config)?, Vms::of(&config)?);
        let parts = Parts {
            config,
            catalogue,
            care: Care::default(),
            tokens,
            tasks,
            tool,
            disks,
            plugs,
            vms,
            srs,
            postponed: vdi::Postponed::default(),
            history: History::default(),
            answers: Answers::default(),
            uploads: Uploads::default(),
            downloads: Downloads::default(),
            readers: reader::Readers::default(),
            key_locks: request::KeyLocks::default(),
            backup_turns: backup::Turns::default(),
            host,
            started: Timestamp::now(),
            _locks: locks,
        };
        let daemon = Daemon(Arc::new(parts));
        // Before recovery of tasks, which needs the repositories.
        Srs::attach_again(&daemon).await?;
        jobs::recover(&daemon).await?;
        daemon.tasks.end_unjournalled().await?;
        // After the jobs, which may change the chain of a disk.
        let plugged_since = plug::recover(&daemon).await?;
        // After their disks.
        vm::recover(&daemon, &plugged_since).await?;
        // Unfinished work in the catalogue belongs to this daemon from here on.
        daemon.catalogue.write(|tx| tx.set_up_to_date()).await?;
        for sr in daemon.catalogue.read(|view| view.srs()).await? {
            if sr.state == SrState::Attached {
                vdi::collect(&daemon, sr.uuid);
            }
        }
        reader::remove_left_over(&daemon).await?;
        backup::remove_left_over(&daemon).await?;
        crate::autostart::begin(&daemon).await?;
        background::spawn(crate::sr::keep_inventories(daemon.clone()));
        background::spawn(crate::sr::seek_lost(daemon.clone()));
        background::spawn(crate::sr::watch_space(daemon.clone()));
        background::spawn(crate::disk::hung::look_for_hung(daemon.clone()));
        background::spawn(crate::health::watch(daemon.clone()));
        background::spawn(crate::health::files::watch(daemon.clone()));
        background::spawn(crate::retention::follow(daemon.clone()));
        background::spawn(crate::history::keep(daemon.clone()));
        daemon.care.begin(&daemon);
        Ok(daemon)
    }

    /// Ends running operations that can be ended soon; the others are in the journal. Disks keep running.
    pub async fn stop(&self) -> Result<(), Problem> {
        self.tasks.stop().await;
        if tokio::time::timeout(TO_CLOSE, self.close()).await.is_err() {
            tracing::warn!("the catalogue was not closed cleanly: the state directory does not respond");
        }
        Ok(())
    }

    /// Backs up and seals the catalogue. It can be opened without either.
    async fn close(&self) {
        self.care.back_up_at_end(self).await;
        if let Err(problem) = self.catalogue.close().await {
            tracing::info!("the catalogue was not closed cleanly: {problem}");
        }
    }

    /// The identity of the host.
    pub fn host(&self) -> Uuid {
        self.host
    }

    /// The host as the API shows it.
    pub async fn show_host(&self) -> Result<Host, Problem> {
        let counted = self.catalogue.read_for_client(|view| Ok((view.count_vbds()?, view.count_open_tasks()?)));
        let (vbds, tasks) = counted.await?;
        let of_state = |states: &[api::VbdState]| {
            let counts = vbds.iter().filter(|(state, _)| states.contains(state)).map(|(_, count)| *count);
            counts.fold(0, u64::saturating_add)
        };
        use api::VbdState::{Plugged, Plugging, Restarting, Unplugging};
        Ok(Host {
            uuid: self.host,
            name: rustix::system::uname().nodename().to_string_lossy().into_owned(),
            version: env!("CARGO_PKG_VERSION").into(),
            started: self.started,
            cpus: std::thread::available_parallelism().map_or(1, |cpus| u32::try_from(cpus.get()).unwrap_or(u32::MAX)),
            memory: memory(),
            limits: self.config.limits(),
            plugged: of_state(&[Plugged, Restarting]),
            plugging: of_state(&[Plugging, Unplugging]),
            tasks,
        })
    }
}

/// Creates the directories, and ensures that no other daemon uses them as long as the returned value is kept.
pub fn alone(config: &Config) -> Result<[fs::File; 2], Problem> {
    directories::make(config)?;
    Ok([
        only_one(&config.state_directory, "state directory", "state-directory")?,
        only_one(&config.run_directory, "run directory", "run-directory")?,
    ])
}

/// Checks the settings that a start checks, besides their syntax: users, groups, the program of disk processes, and
/// the length of socket paths. Creates nothing.
pub fn check(config: &Config) -> Result<(), Problem> {
    tool::check(config)?;
    Plugs::new(config)?;
    Vms::of(config)?;
    if let Some(group) = &config.api.group {
        account::group("api.group", group)?;
    }
    let socket = config.socket();
    rustix::net::SocketAddrUnix::new(&socket).map(drop).map_err(|_| {
        let what = format!("run-directory: {} is too long for a socket", socket.display());
        Problem::new(Code::Invalid, what).advise("a socket's path has at most 107 bytes: give a shorter directory")
    })
}

/// Raises the limit on open files: a plugged disk needs two descriptors of the daemon and one for each of its files,
/// and the default limit is meant for programs that use select(2).
fn allow_many_disks() -> Result<(), Problem> {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit { current: limit.maximum, maximum: limit.maximum };
    setrlimit(Resource::Nofile, raised).map_err(|errno| Problem::failed("raise the limit on open files", errno))?;
    // The rings of all disks count as one user's locked memory, and 8 MiB are enough for only about 290 disks. Disks
    // inherit the limit; if it cannot be raised, the first disk that exceeds it reports that.
    if let Err(errno) = setrlimit(Resource::Memlock, Rlimit { current: None, maximum: None }) {
        tracing::info!(
            "cannot raise the limit on locked memory (RLIMIT_MEMLOCK), which limits the number of disks: {errno}"
        );
    }
    Ok(())
}

/// Locks a directory. Two daemons with one catalogue would each start the other's disks; with one run directory, each
/// would take the other's sockets.
fn only_one(directory: &Path, what: &str, setting: &str) -> Result<fs::File, Problem> {
    let path = directory.join("lock");
    let tried = format!("lock {}", path.display());
    let file = fs::File::options().create(true).truncate(false).write(true).mode(0o600).open(&path);
    let file = file.map_err(|error| Problem::failed(&tried, error))?;
    let begun = Instant::now();
    let lock = || rustix::fs::flock(&file, rustix::fs::FlockOperation::NonBlockingLockExclusive);
    // A child just forked by a killed daemon holds the lock too, until it executes another program.
    let mut locked = lock();
    while locked == Err(rustix::io::Errno::WOULDBLOCK) && begun.elapsed() < LOCK_PATIENCE {
        std::thread::sleep(LOCK_PATIENCE / 40);
        locked = lock();
    }
    match locked {
        Ok(()) => Ok(file),
        Err(rustix::io::Errno::WOULDBLOCK) => {
            let what = format!("cannot {tried}: another taplined is running with this {what}");
            Err(Problem::new(Code::InUse, what).advise(format!("stop it first, or set another {setting}")))
        }
        Err(errno) => Err(Problem::failed(tried, errno)),
    }
}

/// The host's identity, assigned when the catalogue was created and reassigned when it has moved to another machine.
async fn host_identity(catalogue: &Catalogue, machine: &str) -> Result<Uuid, Problem> {
    let now = machine.to_owned();
    let identity = catalogue.write(move |tx| {
        let host: Option<Uuid> = tx.meta("host")?.and_then(|text| text.parse().ok());
        let before = tx.meta("machine")?.filter(|before| !before.is_empty() && !now.is_empty());
        let moved = host.is_some() && before.is_some_and(|before| before != now);
        tx.set_meta("machine", &now)?;
        if let Some(known) = host.filter(|_| !moved) {
            return Ok((known, None));
        }
        let new = Uuid::new_v4();
        tx.set_meta("host", &new.to_string())?;
        if moved {
            tx.note_moved()?;
        }
        Ok((new, host))
    });
    let (host, before) = identity.await?;
    if let Some(before) = before {
        tracing::warn!(
            %host, %before,
            "the catalogue comes from another machine: this is a new host, and nothing that ran there is started here; \
             a repository that both use can be attached to only one of them at a time"
        );
    }
    Ok(host)
}

/// Has the host of a new catalogue be the one that a lost catalogue of this machine was of.
pub async fn be_host(catalogue: &Catalogue, host: &LastHost) -> Result<(), Problem> {
    let LastHost { host, machine, .. } = host.clone();
    let recorded = catalogue.write(move |tx| {
        tx.set_meta("machine", &machine)?;
        tx.set_meta("host", &host.to_string())
    });
    recorded.await
}

/// The host's memory in bytes.
fn memory() -> u64 {
    let info = rustix::system::sysinfo();
    info.totalram.saturating_mul(u64::from(info.mem_unit))
}
