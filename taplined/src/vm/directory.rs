//! The directory of a running machine's monitor and messages, and its owner: the user that its QEMU runs as.
//!
//! It knows nothing about the machine. Invariant: only root and that user have access; the directory also records the
//! user, before QEMU is started, so that the next daemon knows it.

use std::fs::{self, DirBuilder, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, chown};
use std::path::{Path, PathBuf};

use ::vm::qemu::account::Account;
use api::Problem;
use uuid::Uuid;

use crate::account::As;
use crate::config::Config;

/// An empty file whose owner is the user.
const USER: &str = "user";

/// Exists on a host that can run guests.
const KVM: &str = "/dev/kvm";

/// The directory of a machine.
pub fn vm_directory(config: &Config, vm: Uuid) -> PathBuf {
    config.vm_directories().join(vm.to_string())
}

/// The user that the QEMU of a VM runs as or is about to; `None` if it is the daemon's own user, or the VM is not
/// running.
pub fn user(config: &Config, vm: Uuid) -> Option<u32> {
    // Links are not followed: anything that the user has put in its place belongs to the user.
    fs::symlink_metadata(vm_directory(config, vm).join(USER)).ok().map(|file| file.uid()).filter(|uid| *uid != 0)
}

/// The user in the form of the crate `vm`; `None` if QEMU runs as the daemon's user.
pub fn account(runs_as: &As) -> Option<Account> {
    let (uid, gid) = runs_as.user.filter(|(uid, _)| *uid != 0)?;
    Some(Account { uid, gid, groups: group_of_kvm().into_iter().collect() })
}

/// The group that may use /dev/kvm, unless all users may.
fn group_of_kvm() -> Option<u32> {
    let found = fs::metadata(KVM).ok()?;
    let (group, others) = (found.mode() & 0o060 == 0o060, found.mode() & 0o006 == 0o006);
    (group && !others && found.gid() != 0).then(|| found.gid())
}

/// Creates an empty directory for a machine. The monitor's directory is accessible to its user only: access to the
/// monitor is access to the guest.
pub fn make_empty(directory: &Path, account: Option<&Account>) -> Result<(), Problem> {
    let make = || {
        match fs::remove_dir_all(directory) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        DirBuilder::new().mode(0o700).create(directory)?;
        let Some(account) = account else { return Ok(()) };
        let user = directory.join(USER);
        OpenOptions::new().write(true).create_new(true).mode(0o400).open(&user)?;
        chown(&user, Some(account.uid), Some(account.gid))?;
        account.own(directory)
    };
    make().map_err(|error: io::Error| {
        Problem::failed(format_args!("create the directory {}", directory.display()), error)
    })
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn a_machines_user_is_recorded_in_its_directory() {
        let room = tempfile::tempdir().unwrap();
        let config = Config { run_directory: room.path().to_owned(), ..Config::default() };
        let vm = Uuid::new_v4();
        fs::create_dir(config.vm_directories()).unwrap();
        make_empty(&vm_directory(&config, vm), None).unwrap();
        assert_eq!(user(&config, vm), None);
        if !rustix::process::geteuid().is_root() {
            return;
        }
        let account = Account { uid: 82_000, gid: 82_001, groups: Vec::new() };
        make_empty(&vm_directory(&config, vm), Some(&account)).unwrap();
        assert_eq!(user(&config, vm), Some(82_000));
        let directory = fs::metadata(vm_directory(&config, vm)).unwrap();
        assert_eq!((directory.uid(), directory.gid(), directory.mode() & 0o7777), (0, 82_001, 0o1770));
        fs::remove_dir_all(vm_directory(&config, vm)).unwrap();
        assert_eq!(user(&config, vm), None);
    }
}
