//! Records which domain each VBD is plugged for. The records are in the run directory, which a reboot empties, as it
//! ends all domains.
//!
//! `libvirt/VBD` contains the domain's UUID and name, `libvirt/DOMAIN.started` exists while the domain is running. A
//! claim on an unplugged VBD is void. Invariant: claims are changed only under a lock, because libvirt starts domains
//! in parallel.

use std::fs::{self, DirBuilder, File, Permissions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use api::{Code, Problem};
use rustix::fs::{FlockOperation, flock};
use uuid::Uuid;

use super::domain::Domain;

/// How long to wait for the lock; its holder may be waiting for the daemon.
const LOCKED_MAX: Duration = Duration::from_secs(60);

/// Interval between attempts to get the lock.
const TRY_AGAIN: Duration = Duration::from_millis(20);

/// The claims in a run directory.
#[derive(Debug)]
pub struct Claims {
    directory: PathBuf,
}

/// A lock on the claims, which may be changed until it is dropped.
#[derive(Debug)]
pub struct Locked<'a> {
    claims: &'a Claims,
    _lock: File,
}

/// A domain that has claimed a VBD.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Claimant {
    /// The domain.
    pub uuid: Uuid,
    /// Its name at the time of its start.
    pub name: String,
}

impl Claims {
    /// Returns the claims in the daemon's run directory.
    pub fn of(run_directory: &Path) -> Claims {
        Claims { directory: run_directory.join("libvirt") }
    }

    /// Waits for the lock.
    pub fn lock(&self) -> Result<Locked<'_>, Problem> {
        match DirBuilder::new().mode(0o700).create(&self.directory) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            created => created.map_err(|error| self.failed("create", error))?,
        }
        let path = self.directory.join("lock");
        let lock = File::options().write(true).create(true).truncate(false).open(path);
        let lock = lock.map_err(|error| self.failed("lock", error))?;
        let deadline = Instant::now() + LOCKED_MAX;
        loop {
            match flock(&lock, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => return Ok(Locked { claims: self, _lock: lock }),
                Err(rustix::io::Errno::WOULDBLOCK) if Instant::now() < deadline => std::thread::sleep(TRY_AGAIN),
                Err(rustix::io::Errno::WOULDBLOCK) => {
                    let what = format!("{} is locked by the hook of another domain", self.directory.display());
                    return Err(
                        Problem::new(Code::Busy, what).advise("check that taplined responds: tapline host show")
                    );
                }
                Err(error) => return Err(self.failed("lock", error.into())),
            }
        }
    }

    /// The VBDs that a domain has claimed.
    pub fn of_domain(&self, domain: Uuid) -> Result<Vec<Uuid>, Problem> {
        let entries = match fs::read_dir(&self.directory) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries.map_err(|error| self.failed("list", error))?,
        };
        let vbds = entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse::<Uuid>().ok());
        let mut of_domain = Vec::new();
        for vbd in vbds {
            if self.claimant(vbd)?.is_some_and(|claimant| claimant.uuid == domain) {
                of_domain.push(vbd);
            }
        }
        Ok(of_domain)
    }

    /// The domain that has claimed a VBD.
    pub fn claimant(&self, vbd: Uuid) -> Result<Option<Claimant>, Problem> {
        let text = match fs::read_to_string(self.directory.join(vbd.to_string())) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            text => text.map_err(|error| self.failed("read", error))?,
        };
        let (uuid, name) = text.split_once(' ').unwrap_or((&text, ""));
        let uuid = uuid.parse().map_err(|_| self.failed("read", io::ErrorKind::InvalidData.into()))?;
        Ok(Some(Claimant { uuid, name: name.to_owned() }))
    }

    /// Records that a domain is running.
    pub fn note_started(&self, domain: Uuid) -> Result<(), Problem> {
        let _locked = self.lock()?;
        File::create(self.started(domain)).map(drop).map_err(|error| self.failed("write", error))
    }

    /// Whether a domain was recorded as running.
    pub fn has_started(&self, domain: Uuid) -> bool {
        self.started(domain).exists()
    }

    /// Claims all disks of a running domain that are not claimed, and records that it is running.
    pub fn adopt(&self, domain: &Domain) -> Result<(), Problem> {
        {
            let locked = self.lock()?;
            for disk in &domain.disks {
                if self.claimant(disk.vbd)?.is_none() {
                    locked.claim(disk.vbd, domain)?;
                }
            }
        }
        self.note_started(domain.uuid)
    }

    fn started(&self, domain: Uuid) -> PathBuf {
        self.directory.join(format!("{domain}.started"))
    }

    fn failed(&self, tried: &str, error: io::Error) -> Problem {
        Problem::failed(format_args!("{tried} the claims of domains in {}", self.directory.display()), error)
            .advise("check that the directory is writable and is root's")
    }
}

impl Locked<'_> {
    /// Claims a VBD for a domain, replacing an earlier claim.
    pub fn claim(&self, vbd: Uuid, domain: &Domain) -> Result<(), Problem> {
        let path = self.claims.directory.join(vbd.to_string());
        // Atomic, because a hook may be killed.
        let incomplete = path.with_extension("new");
        let written = fs::write(&incomplete, format!("{} {}", domain.uuid, domain.name))
            .and_then(|()| fs::set_permissions(&incomplete, Permissions::from_mode(0o600)))
            .and_then(|()| fs::rename(&incomplete, path));
        written.map_err(|error| self.claims.failed("write", error))
    }

    /// Removes a domain's claim on a VBD, unless another domain has claimed it since.
    pub fn release(&self, vbd: Uuid, domain: Uuid) -> Result<(), Problem> {
        if self.claims.claimant(vbd)?.is_none_or(|claimant| claimant.uuid != domain) {
            return Ok(());
        }
        self.remove(&self.claims.directory.join(vbd.to_string()))
    }

    /// Records that a domain is no longer running.
    pub fn forget_started(&self, domain: Uuid) -> Result<(), Problem> {
        self.remove(&self.claims.started(domain))
    }

    fn remove(&self, path: &Path) -> Result<(), Problem> {
        match fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(self.claims.failed("remove", error)),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod test {
    use super::*;

    fn domain(name: &str) -> Domain {
        Domain { uuid: Uuid::new_v4(), name: name.to_owned(), disks: Vec::new() }
    }

    #[test]
    fn a_claim_is_removed_by_its_domain_only() {
        let room = tempfile::tempdir().unwrap();
        let claims = Claims::of(room.path());
        let (web, other, vbd) = (domain("web server"), domain("other"), Uuid::new_v4());
        assert!(claims.of_domain(web.uuid).unwrap().is_empty());
        let locked = claims.lock().unwrap();
        locked.claim(vbd, &web).unwrap();
        locked.release(vbd, other.uuid).unwrap();
        let claimant = Claimant { uuid: web.uuid, name: "web server".to_owned() };
        assert_eq!(claims.claimant(vbd).unwrap(), Some(claimant));
        assert_eq!((claims.of_domain(web.uuid).unwrap(), claims.of_domain(other.uuid).unwrap()), (vec![vbd], vec![]));
        locked.release(vbd, web.uuid).unwrap();
        assert_eq!(claims.claimant(vbd).unwrap(), None);
    }

    #[test]
    fn adopting_a_domain_leaves_claims_of_others() {
        use super::super::domain::DomainDisk;
        let room = tempfile::tempdir().unwrap();
        let claims = Claims::of(room.path());
        let (first, second, mut web, other) = (Uuid::new_v4(), Uuid::new_v4(), domain("web"), domain("other"));
        web.disks = [first, second].map(|vbd| DomainDisk { vbd, socket: PathBuf::new() }).into();
        claims.lock().unwrap().claim(second, &other).unwrap();
        claims.adopt(&web).unwrap();
        assert_eq!(
            (claims.of_domain(web.uuid).unwrap(), claims.of_domain(other.uuid).unwrap()),
            (vec![first], vec![second])
        );
        assert!(claims.has_started(web.uuid) && !claims.has_started(other.uuid));
        claims.lock().unwrap().forget_started(web.uuid).unwrap();
        assert!(!claims.has_started(web.uuid));
    }

    #[test]
    fn only_one_hook_has_the_lock() {
        let room = tempfile::tempdir().unwrap();
        let claims = Claims::of(room.path());
        let first = claims.lock().unwrap();
        let file = File::open(room.path().join("libvirt/lock")).unwrap();
        assert!(flock(&file, FlockOperation::NonBlockingLockExclusive).is_err());
        drop(first);
        drop(claims.lock().unwrap());
    }
}
