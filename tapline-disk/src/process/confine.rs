//! `--confine`: a process that has received everything it works on gives up access to anything else.
//!
//! It knows nothing about what the process does. Invariant: when [`enter`] has returned, neither this process nor its
//! children can open, create or execute any path, even with privileges, and no other process of its user can access its
//! descriptors or memory; if the kernel cannot ensure that, the log says so. It must be called while there is only one
//! thread: a thread gives up access for itself and the threads that it starts later.
//!
//! User and group are set by the parent process. Descriptors that are already open, or are received later, work as
//! before: permissions are checked at open.

mod calls;

use landlock::{
    ABI, Access, AccessFs, AccessNet, CompatLevel, Compatible, LandlockStatus, RestrictionStatus, Ruleset, RulesetAttr,
    RulesetCreatedAttr, RulesetError, RulesetStatus, Scope, path_beneath_rules,
};
use rustix::process::{DumpableBehavior, set_dumpable_behavior};
use rustix::thread::{CapabilitySet, CapabilitySets, clear_ambient_capability_set, set_capabilities, set_no_new_privs};

use crate::process::failure::Failure;
use crate::process::log::say;

/// The newest version of Landlock known here. On an older kernel, everything that its version has is used.
const NEWEST: ABI = ABI::V10;

/// What a confined process may still reach by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reach {
    /// Nothing.
    Nothing,
    /// TCP and UDP servers; and files that the C library reads to find them, which are the same for all users.
    Servers,
}

/// Files and directories that the resolver of names reads: its settings, which may be links to `/run`, and the modules
/// that these name.
const OF_RESOLVER: [&str; 11] = [
    "/etc/resolv.conf",
    "/etc/hosts",
    "/etc/host.conf",
    "/etc/nsswitch.conf",
    "/etc/gai.conf",
    "/etc/services",
    "/etc/ld.so.cache",
    "/lib",
    "/lib64",
    "/usr/lib",
    "/usr/lib64",
];

/// Drops all privileges and all access to files and sockets by name, but for what it may reach.
pub fn enter(reach: Reach) -> Result<(), Failure> {
    give_up_privilege().map_err(|error| Failure::new("drop privileges", error))?;
    // Other processes of the same user could take its descriptors and read its memory (ptrace(2), pidfd_getfd(2)).
    let hidden = set_dumpable_behavior(DumpableBehavior::NotDumpable);
    hidden.map_err(|error| Failure::new("hide this process from other processes of its user", error))?;
    let restricted = forbid_names(reach).map_err(|error| Failure::new("confine this process by Landlock", error))?;
    if restricted.ruleset == RulesetStatus::NotEnforced {
        let why = match restricted.landlock {
            LandlockStatus::NotEnabled => "it is disabled at boot (lsm=)",
            LandlockStatus::NotImplemented => "the kernel was built without it, or is older than Linux 5.13",
            _ => "the kernel refused it",
        };
        say(format_args!("not confined by Landlock: {why}"));
    }
    // This is last, because it forbids the system calls of the steps above.
    if let Err(why) = calls::restrict(reach) {
        say(format_args!("not confined by seccomp: {why}"));
    }
    Ok(())
}

/// Drops all capabilities, so that executing a program cannot regain any.
fn give_up_privilege() -> std::io::Result<()> {
    set_no_new_privs(true)?;
    clear_ambient_capability_set()?;
    let none = CapabilitySet::empty();
    set_capabilities(None, CapabilitySets { effective: none, permitted: none, inheritable: none })?;
    Ok(())
}

/// Restricts this process by a ruleset that handles everything and allows only what it may reach.
fn forbid_names(reach: Reach) -> Result<RestrictionStatus, RulesetError> {
    let rules = Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(AccessFs::from_all(NEWEST))?
        .scope(Scope::from_all(NEWEST))?;
    match reach {
        Reach::Nothing => rules.handle_access(AccessNet::from_all(NEWEST))?.create()?.restrict_self(),
        Reach::Servers => {
            let rules = rules.handle_access(AccessNet::BindTcp)?.create()?;
            // Those that do not exist are left out.
            rules.add_rules(path_beneath_rules(OF_RESOLVER, AccessFs::from_read(NEWEST)))?.restrict_self()
        }
    }
}

#[cfg(test)]
mod test {
    use std::fs::File;
    use std::io::ErrorKind;
    use std::net::TcpListener;
    use std::os::unix::net::{UnixListener, UnixStream};
    use std::path::Path;
    use std::process::Command;

    use rustix::io::Errno;
    use rustix::process::{Pid, Resource, Rlimit, Signal, getppid, getrlimit, kill_process, prlimit};

    use super::*;

    /// Names the directory in which the confined child process tries forbidden operations.
    const ROOM: &str = "TAPLINE_TEST_ROOM";

    #[test]
    fn a_confined_process_cannot_open_create_or_execute_by_name() {
        let room = tempfile::tempdir().unwrap();
        std::fs::write(room.path().join("file"), "here").unwrap();
        let _listener = UnixListener::bind(room.path().join("socket")).unwrap();
        // A process cannot undo this, so the test uses a child process.
        let mut inside = Command::new(std::env::current_exe().unwrap());
        inside.args(["--exact", "process::confine::test::inside", "--nocapture"]).env(ROOM, room.path());
        let said = inside.output().unwrap();
        let (out, err) = (String::from_utf8_lossy(&said.stdout), String::from_utf8_lossy(&said.stderr));
        assert!(said.status.success() && out.contains("1 passed"), "{out}\n{err}");
        assert_eq!(std::fs::read_dir(room.path()).unwrap().count(), 2);
    }

    #[test]
    fn a_panic_aborts_a_confined_process() {
        use std::os::unix::process::ExitStatusExt;
        let mut inside = Command::new(std::env::current_exe().unwrap());
        inside.args(["--exact", "process::confine::test::inside_it_aborts"]).env(ROOM, "/");
        assert_eq!(inside.output().unwrap().status.signal(), Some(Signal::ABORT.as_raw()));
    }

    /// The part of another test that runs in a child process.
    #[test]
    fn inside_it_aborts() {
        if std::env::var_os(ROOM).is_some() {
            enter(Reach::Nothing).unwrap();
            std::process::abort();
        }
    }

    /// The part of the first test that runs in a child process; without the variable it does nothing.
    #[test]
    fn inside() {
        let Some(room) = std::env::var_os(ROOM) else { return };
        let room = Path::new(&room);
        let open = File::options().read(true).write(true).open(room.join("file")).unwrap();
        enter(Reach::Nothing).unwrap();
        assert_eq!(rustix::process::dumpable_behavior().unwrap(), DumpableBehavior::NotDumpable);
        let denied = |tried: &str, kind: ErrorKind| assert_eq!(kind, ErrorKind::PermissionDenied, "{tried}");
        denied("open", File::open(room.join("file")).unwrap_err().kind());
        denied("open a device", File::open("/dev/null").unwrap_err().kind());
        denied("create", File::create(room.join("new")).unwrap_err().kind());
        denied("remove", std::fs::remove_file(room.join("file")).unwrap_err().kind());
        denied("make a directory", std::fs::create_dir(room.join("new")).unwrap_err().kind());
        denied("list", std::fs::read_dir(room).unwrap_err().kind());
        denied("bind", UnixListener::bind(room.join("new")).unwrap_err().kind());
        denied("connect", UnixStream::connect(room.join("socket")).unwrap_err().kind());
        denied("listen at a port", TcpListener::bind("127.0.0.1:0").unwrap_err().kind());
        denied("run", Command::new("/bin/true").spawn().unwrap_err().kind());
        let own = || Pid::from_raw(std::process::id().try_into().unwrap());
        prlimit(own(), Resource::Core, Rlimit { current: Some(0), maximum: Some(0) }).unwrap();
        getrlimit(Resource::Core);
        let other = prlimit(getppid(), Resource::Core, Rlimit { current: Some(0), maximum: Some(0) });
        assert_eq!(other.unwrap_err(), Errno::PERM);
        assert_eq!(kill_process(own().unwrap(), Signal::CONT).unwrap_err(), Errno::PERM);
        // Threads can be started, and exit.
        assert_eq!(std::thread::spawn(|| 7).join().unwrap(), 7);
        // Open files still work, and can be resized.
        open.set_len(4096).unwrap();
        std::os::unix::fs::FileExt::write_all_at(&open, b"more", 100).unwrap();
    }
}
