//! Whether the disks and repositories of this host are healthy, and what ended processes have left.
//!
//! Invariants: a disk that this user may not see is not taken for one that is not there; nothing waits for a process or
//! a daemon that does not respond.

use std::io;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use api::client::Client;
use api::health::Seen;
use api::{BackupSchedule, Code, Health, Problem};
use jiff::Timestamp;
use stats::{Delays, ReadError, Reader, Snapshot};
use vm::syntax::shell_word;

use super::{Check, bad, good, unknown};
use crate::health::{in_words, without_daemon};
use crate::session;
use crate::top;

/// How long the daemon may take.
const TO_ANSWER: Duration = Duration::from_secs(3);
/// Time between two readings of a page.
const BETWEEN: Duration = Duration::from_millis(500);

/// A page that was read, and what was seen of its process.
struct Served {
    page: PathBuf,
    reader: Reader,
    delays: Delays,
    now: Snapshot,
    seen: Seen,
}

/// What was found in the directories of pages.
#[derive(Default)]
struct Found {
    served: Vec<Served>,
    /// Those whose process has ended.
    ended: Vec<Served>,
    checks: Vec<Check>,
    /// Disks and directories that this user may not see.
    hidden: Vec<PathBuf>,
}

/// All checks of disks and repositories; `client` is that of the daemon of this host, if the user may use it.
/// `run` is its run directory.
pub fn checks(client: Option<&Client>, run: &Path) -> Vec<Check> {
    let mut found = Found::default();
    stats::directories(run).iter().for_each(|directory| found.look_into(directory));
    if !found.served.is_empty() {
        std::thread::sleep(BETWEEN);
        found.served.iter_mut().for_each(Served::look_again);
    }
    let (plugged, mut checks) = of_daemon(client);
    let is_there = plugged.is_some();
    checks.append(&mut found.checks);
    // The daemon has judged its own.
    let is_judged = |served: &&Served| is_there && served.is_of_daemon();
    let here = found.served.iter().filter(|served| !is_judged(served)).map(|served| (served.name(), served.health()));
    checks.extend(here.filter(|(_, health)| is_ill(health)).map(|(name, health)| check(&name, &health)));
    checks.extend(found.ended.iter().filter(|served| !is_judged(served)).map(Served::left));
    // Those of a daemon may be in a directory of its own.
    let of_daemon = found.served.iter().filter(|served| served.is_of_daemon()).count();
    let all = found.served.len() - of_daemon + of_daemon.max(plugged.unwrap_or(0));
    checks.push(counted(all, found.hidden.first(), run));
    checks
}

/// How many disks are served, as far as this user may see: `hidden` is a place into which only root may look.
fn counted(all: usize, hidden: Option<&PathBuf>, run: &Path) -> Check {
    let place = if rustix::process::geteuid().is_root() { "on this host" } else { "that this user may see" };
    let count = match all {
        0 => format!("no disk is served {place} (no statistics page in {})", places(run)),
        1 => format!("1 disk is served {place}"),
        all => format!("{all} disks are served {place}"),
    };
    match hidden {
        None => good(count),
        Some(hidden) => {
            let why = format!("whether there are others: only root may look into {}", hidden.display());
            Check { mend: Some("sudo tapline doctor".into()), ..unknown(format!("{why}; {count}")) }
        }
    }
}

fn places(run: &Path) -> String {
    stats::directories(run).iter().map(|path| path.display().to_string()).collect::<Vec<_>>().join(", ")
}

fn is_ill(health: &Health) -> bool {
    health.state > api::HealthState::Unmanaged
}

fn check(name: &str, health: &Health) -> Check {
    let state = in_words(health, Timestamp::now());
    let reason = health.reason.as_ref().map(|reason| format!(": {reason}")).unwrap_or_default();
    let text = format!("{name} is {state}{reason}");
    let text = control::printable(&text);
    match &health.advice {
        Some(advice) => bad(text, control::printable(advice)),
        None => Check { mend: None, ..bad(text, "") },
    }
}

impl Found {
    fn look_into(&mut self, directory: &Path) {
        match stats::pages_in(directory) {
            Ok(pages) => pages.into_iter().for_each(|page| self.look_at(page)),
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => self.hidden.push(directory.to_owned()),
            // There never was a disk.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => self.checks.push(unknown(format!("which disks are in {}: {error}", directory.display()))),
        }
    }

    fn look_at(&mut self, page: PathBuf) {
        let opened = Reader::open(&page).and_then(|reader| Ok((reader.snapshot()?, reader)));
        let (now, reader) = match opened {
            Ok(opened) => opened,
            Err(ReadError::Failed(error)) if error.kind() == io::ErrorKind::PermissionDenied => {
                self.hidden.push(page);
                return;
            }
            // It was removed meanwhile.
            Err(ReadError::Failed(error)) if error.kind() == io::ErrorKind::NotFound => return,
            Err(ReadError::NotAPage | ReadError::NotStarted) => return,
            Err(why) => {
                self.checks.push(unknown(format!("the disk of {}: {why}", page.display())));
                return;
            }
        };
        let mut delays = Delays::default();
        let seen = crate::health::seen(&mut delays, &now);
        let served = Served { page, reader, delays, now, seen };
        match served.now.writer_has_ended(&served.page) {
            true => self.ended.push(served),
            false => self.served.push(served),
        }
    }
}

impl Served {
    fn look_again(&mut self) {
        // A page that cannot be read any more is judged as it was.
        if let Ok(now) = self.reader.snapshot() {
            self.seen = crate::health::seen(&mut self.delays, &now);
            self.now = now;
        }
    }

    fn is_of_daemon(&self) -> bool {
        self.page.ends_with("statistics.page")
    }

    fn identity(&self) -> top::Identity {
        top::identity(&self.now.identity)
    }

    fn name(&self) -> String {
        let image = self.identity().image;
        if image.is_empty() { format!("the disk of {}", self.page.display()) } else { format!("the disk {image}") }
    }

    fn health(&self) -> Health {
        let control = self.identity().control.unwrap_or_default();
        without_daemon(&control, self.now.pid, self.seen, false)
    }

    /// What the process has left. The daemon removes the files of its own disks, and restarts them.
    fn left(&self) -> Check {
        let process = self.now.pid.map(|pid| format!(" (process {pid})")).unwrap_or_default();
        let name = control::printable(&self.name());
        if self.is_of_daemon() {
            let text = format!("{name} is not served: its process{process} has ended, and the daemon does not respond");
            return bad(text, "systemctl status taplined; systemctl start taplined");
        }
        // Another process may listen there by now.
        let is_left = |control: &String| {
            let refused = |error: io::Error| error.kind() == io::ErrorKind::ConnectionRefused;
            UnixStream::connect(control).err().is_some_and(refused)
        };
        let control = self.identity().control.filter(is_left);
        let files = control.into_iter().chain([self.page.display().to_string()]);
        let files: Vec<String> = files.map(|file| shell_word(&file)).collect();
        let text = format!("{name} is no longer served: its process{process} has ended and left files");
        bad(text, control::printable(&format!("rm {}", files.join(" "))))
    }
}

/// How many disks the daemon serves, and what is wrong with its disks and repositories; nothing if there is no daemon.
fn of_daemon(client: Option<&Client>) -> (Option<usize>, Vec<Check>) {
    let Some(client) = client else { return (None, Vec::new()) };
    let asked = session::runtime().and_then(|runtime| {
        runtime.block_on(async {
            tokio::time::timeout(TO_ANSWER, ill(client)).await.unwrap_or_else(|_| {
                let what = format!("no answer in {} s", TO_ANSWER.as_secs());
                Err(Problem::new(Code::Timeout, what))
            })
        })
    });
    match asked {
        Ok((plugged, ill, missed)) => {
            let healthy = ill.is_empty().then(|| good("the daemon's disks and repositories are healthy"));
            let ill = ill.iter().map(|(name, health)| check(name, health));
            (Some(plugged), healthy.into_iter().chain(ill).chain(missed).collect())
        }
        Err(problem) if problem.code == Code::Unreachable => (None, Vec::new()),
        Err(problem) => {
            let what = format!("whether the daemon's disks and repositories are healthy: {problem}");
            (None, vec![unknown(what)])
        }
    }
}

/// The number of plugged disks, the disks and repositories that are not healthy, by name, and the schedules that did
/// not do what was due. A disk is a VDI, whose health is that of its VBDs, too.
async fn ill(client: &Client) -> Result<(usize, Vec<(String, Health)>, Vec<Check>), Problem> {
    let plugged = client.vbds(None, None, None).await?.iter().filter(|vbd| vbd.pid.is_some()).count();
    let srs = client.srs(None).await?.into_iter().map(|sr| (format!("the repository '{}'", sr.name), sr.health));
    let vdis = client.vdis(None, None).await?;
    let of_vdis = vdis.iter().flat_map(|vdi| {
        let backups = (vdi.backup_schedule, vdi.last_backup, vdi.backup_problem.as_ref());
        missed(&format!("the disk '{}'", vdi.name), vdi.retention_problem.as_ref(), backups)
    });
    let vms = client.vms(None).await?;
    let of_vms = vms.iter().flat_map(|vm| {
        let backups = (vm.backup_schedule, vm.last_backup, vm.backup_problem.as_ref());
        missed(&format!("the machine '{}'", vm.name), vm.retention_problem.as_ref(), backups)
    });
    let missed = of_vdis.chain(of_vms).collect();
    let vdis = vdis.into_iter().map(|vdi| (format!("the disk '{}'", vdi.name), vdi.health));
    Ok((plugged, srs.chain(vdis).filter(|(_, health)| is_ill(health)).collect(), missed))
}

/// What the schedules of an object did not do: snapshots, and backups with their schedule and the time of the last one.
fn missed(
    name: &str,
    snapshots: Option<&Problem>,
    (schedule, last, backups): (Option<BackupSchedule>, Option<Timestamp>, Option<&Problem>),
) -> Vec<Check> {
    let found = |what: &str, problem: &Problem| {
        let text = control::printable(&format!("{name} {what}: {}", problem.detail));
        let mend = problem.advice.as_deref().map(control::printable);
        Check { mend, ..bad(text, "") }
    };
    let since = last.map_or_else(String::new, |last| format!(" since {last:.0}"));
    let overdue = schedule.filter(|_| backups.is_none()).zip(last);
    let overdue = overdue.filter(|(schedule, last)| schedule.is_overdue(*last, Timestamp::now())).map(|_| {
        let text = control::printable(&format!("{name} has no backup by its schedule{since}"));
        bad(text, "tapline task list --open shows what the target is in use for")
    });
    let never = schedule.filter(|_| backups.is_none() && last.is_none()).map(|_| {
        let text = control::printable(&format!("{name} has a schedule of backups, and none has been made by it yet"));
        Check { mend: Some("tapline task list --open shows what is being backed up".into()), ..unknown(text) }
    });
    let snapshots = snapshots.map(|problem| found("has no snapshot by its schedule", problem));
    let backups = backups.map(|problem| found(&format!("has a problem with its backups{since}"), problem));
    snapshots.into_iter().chain(backups).chain(overdue).chain(never).collect()
}
