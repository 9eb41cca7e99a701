//! The system calls allowed in a confined process: operations on its own descriptors, memory and threads.
//!
//! None of them opens, creates or executes anything by name, or creates a socket that could be connected, unless the
//! process may reach servers. All others fail with EPERM, the error of Landlock; so this also holds where there is no
//! Landlock, except that a process that may reach servers can then open the files of its user. A deny list would be
//! shorter, but open to every new system call and every call with a second number.
//!
//! If a call can affect another process or bypass the list, its arguments are checked too: limits and signals are for
//! the process itself, clones are threads, and no descriptor can be used to send a signal.
//!
//! What remains: a process that has been broken into can use io_uring for operations that it may not call. Landlock
//! still applies there, and so do the permissions of an unprivileged user.

use std::collections::BTreeMap;

use libc::{c_int, c_long};
use seccompiler::SeccompCmpArgLen::{Dword, Qword};
use seccompiler::{
    BackendError, BpfProgram, SeccompAction, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule, TargetArch,
};

use super::Reach;

type Failed = Box<dyn std::error::Error + Send + Sync>;
type Rules = BTreeMap<i64, Vec<SeccompRule>>;

/// Data and attributes of open files.
const FILES: &[c_long] = &[
    libc::SYS_read,
    libc::SYS_write,
    libc::SYS_readv,
    libc::SYS_writev,
    libc::SYS_pread64,
    libc::SYS_pwrite64,
    libc::SYS_preadv,
    libc::SYS_pwritev,
    libc::SYS_preadv2,
    libc::SYS_pwritev2,
    libc::SYS_lseek,
    libc::SYS_fallocate,
    libc::SYS_ftruncate,
    // The inflight region for a frontend: an unnamed memory file.
    libc::SYS_memfd_create,
    libc::SYS_fdatasync,
    libc::SYS_fsync,
    libc::SYS_fadvise64,
    libc::SYS_copy_file_range,
    libc::SYS_fstat,
    // The fstat of some C libraries.
    libc::SYS_newfstatat,
    libc::SYS_statx,
    libc::SYS_fstatfs,
    // This identifies the file of a descriptor. Opening a file by handle is another call.
    libc::SYS_name_to_handle_at,
    libc::SYS_utimensat,
    // The mark of an image whose changed blocks are recorded.
    libc::SYS_fgetxattr,
    libc::SYS_fsetxattr,
    libc::SYS_fremovexattr,
    libc::SYS_flock,
    libc::SYS_dup,
    libc::SYS_dup3,
    libc::SYS_close,
    libc::SYS_close_range,
    libc::SYS_getcwd,
];

/// Engines, passed or accepted sockets, and waiting for all of them.
const EVENTS: &[c_long] = &[
    libc::SYS_io_uring_setup,
    libc::SYS_io_uring_enter,
    libc::SYS_io_uring_register,
    libc::SYS_io_setup,
    libc::SYS_io_submit,
    libc::SYS_io_cancel,
    libc::SYS_io_getevents,
    libc::SYS_io_destroy,
    libc::SYS_ppoll,
    libc::SYS_epoll_create1,
    libc::SYS_epoll_ctl,
    libc::SYS_epoll_pwait,
    libc::SYS_epoll_pwait2,
    libc::SYS_eventfd2,
    libc::SYS_timerfd_create,
    libc::SYS_timerfd_settime,
    libc::SYS_timerfd_gettime,
    libc::SYS_pipe2,
    libc::SYS_socketpair,
    libc::SYS_accept,
    libc::SYS_accept4,
    libc::SYS_recvfrom,
    libc::SYS_recvmsg,
    libc::SYS_sendto,
    libc::SYS_sendmsg,
    libc::SYS_shutdown,
    libc::SYS_getsockopt,
    libc::SYS_setsockopt,
    libc::SYS_getsockname,
    libc::SYS_getpeername,
];

/// Memory, threads, signals, time.
const ITSELF: &[c_long] = &[
    libc::SYS_mmap,
    libc::SYS_munmap,
    libc::SYS_mremap,
    libc::SYS_mprotect,
    libc::SYS_madvise,
    libc::SYS_brk,
    libc::SYS_mlock,
    libc::SYS_munlock,
    libc::SYS_membarrier,
    libc::SYS_futex,
    libc::SYS_set_robust_list,
    libc::SYS_get_robust_list,
    libc::SYS_set_tid_address,
    libc::SYS_rseq,
    // See `without_clone3`.
    libc::SYS_clone3,
    libc::SYS_exit,
    libc::SYS_exit_group,
    libc::SYS_gettid,
    libc::SYS_getpid,
    libc::SYS_getppid,
    libc::SYS_getuid,
    libc::SYS_geteuid,
    libc::SYS_getgid,
    libc::SYS_getegid,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_sigaltstack,
    libc::SYS_restart_syscall,
    libc::SYS_prctl,
    libc::SYS_getrusage,
    libc::SYS_sched_yield,
    libc::SYS_sched_getaffinity,
    libc::SYS_sysinfo,
    libc::SYS_uname,
    libc::SYS_getrandom,
    libc::SYS_nanosleep,
    libc::SYS_clock_nanosleep,
    libc::SYS_clock_gettime,
    libc::SYS_clock_getres,
    libc::SYS_gettimeofday,
];

/// Older variants of these calls, which C libraries still use where they exist.
#[cfg(target_arch = "x86_64")]
const OLDER: &[c_long] = &[libc::SYS_poll, libc::SYS_epoll_wait, libc::SYS_arch_prctl, libc::SYS_time];
#[cfg(not(target_arch = "x86_64"))]
const OLDER: &[c_long] = &[];

/// In a user namespace of its own a process has all capabilities, and with them access to parts of the kernel that are
/// otherwise closed to it.
const NAME_SPACES: c_int = libc::CLONE_NEWUSER
    | libc::CLONE_NEWNS
    | libc::CLONE_NEWPID
    | libc::CLONE_NEWNET
    | libc::CLONE_NEWIPC
    | libc::CLONE_NEWUTS
    | libc::CLONE_NEWCGROUP;

/// Commands of fcntl(2) that make the kernel signal a process when something happens to a descriptor.
const SIGNALS_BY_FCNTL: [c_int; 3] = [libc::F_SETOWN, F_SETOWN_EX, F_SETSIG];
/// From asm-generic/fcntl.h; the crate `libc` lacks it.
const F_SETSIG: c_int = 10;
const F_SETOWN_EX: c_int = 15;

/// Requests of ioctl(2) (asm-generic/sockios.h) with the same effect: FIOSETOWN and SIOCSPGRP; and TIOCSTI, which types
/// into a terminal as its user.
const SIGNALS_BY_IOCTL: [u32; 3] = [0x8901, 0x8902, 0x5412];

/// What a process that may reach servers needs besides: sockets of the internet and of netlink (the resolver looks
/// which addresses this host has), and files that Landlock allows.
const SERVERS: &[c_long] = &[
    libc::SYS_connect,
    libc::SYS_bind,
    libc::SYS_sendmmsg,
    libc::SYS_recvmmsg,
    libc::SYS_openat,
    libc::SYS_faccessat,
    libc::SYS_faccessat2,
    libc::SYS_readlinkat,
];

/// Their older variants.
#[cfg(target_arch = "x86_64")]
const OLDER_SERVERS: &[c_long] =
    &[libc::SYS_open, libc::SYS_access, libc::SYS_stat, libc::SYS_lstat, libc::SYS_readlink, libc::SYS_select];
#[cfg(not(target_arch = "x86_64"))]
const OLDER_SERVERS: &[c_long] = &[];

/// Restricts this thread, and those that it starts, to these calls.
pub fn restrict(reach: Reach) -> Result<(), Failed> {
    seccompiler::apply_filter(&without_clone3()?)?;
    let mut allowed = [FILES, EVENTS, ITSELF, OLDER].concat();
    let mut sockets = Rules::new();
    if reach == Reach::Servers {
        allowed.extend([SERVERS, OLDER_SERVERS].concat());
        sockets.insert(libc::SYS_socket, of_families(&[libc::AF_INET, libc::AF_INET6, libc::AF_NETLINK])?);
    }
    let mut rules: Rules = allowed.into_iter().map(|call| (call, Vec::new())).collect();
    rules.extend(by_arguments(std::process::id())?);
    rules.extend(sockets);
    Ok(seccompiler::apply_filter(&program(rules, libc::EPERM, Listed::Allowed)?)?)
}

/// Allows a call if its first argument is one of these address families.
fn of_families(families: &[c_int]) -> Result<Vec<SeccompRule>, Failed> {
    let one = |family: &c_int| {
        let condition = SeccompCondition::new(0, Dword, SeccompCmpOp::Eq, u64::try_from(*family)?)?;
        Ok(SeccompRule::new(vec![condition])?)
    };
    families.iter().map(one).collect()
}

/// Returns the calls that are allowed only with certain arguments.
fn by_arguments(own: u32) -> Result<Rules, Failed> {
    let is = |argument, value: u32| SeccompCondition::new(argument, Dword, SeccompCmpOp::Eq, value.into());
    let is_not = |argument, value: u32| SeccompCondition::new(argument, Dword, SeccompCmpOp::Ne, value.into());
    let one = |condition: Result<_, BackendError>| Ok::<_, Failed>(SeccompRule::new(vec![condition?])?);
    let none_of = |values: &[u32]| {
        let conditions = values.iter().map(|value| is_not(1, *value)).collect::<Result<Vec<_>, _>>()?;
        Ok::<_, Failed>(SeccompRule::new(conditions)?)
    };
    let by_fcntl = SIGNALS_BY_FCNTL.iter().map(|command| u32::try_from(*command)).collect::<Result<Vec<_>, _>>()?;
    let threads = SeccompCmpOp::MaskedEq(u64::try_from(NAME_SPACES)?);
    Ok(BTreeMap::from([
        // A process may set its own limits (with pid zero), and signal its own threads, as `abort` does.
        (libc::SYS_prlimit64, vec![one(is(0, 0))?, one(is(0, own))?]),
        (libc::SYS_tgkill, vec![one(is(0, own))?]),
        (libc::SYS_fcntl, vec![none_of(&by_fcntl)?]),
        (libc::SYS_ioctl, vec![none_of(&SIGNALS_BY_IOCTL)?]),
        (libc::SYS_clone, vec![one(SeccompCondition::new(0, Qword, threads, 0))?]),
    ]))
}

/// Makes clone3 fail with ENOSYS: its arguments are in memory, which a filter cannot check. C libraries take its
/// absence for an old kernel and use clone. The list allows the call, because otherwise its error would take
/// precedence.
fn without_clone3() -> Result<BpfProgram, Failed> {
    program(BTreeMap::from([(libc::SYS_clone3, Vec::new())]), libc::ENOSYS, Listed::Fails)
}

/// What a list of calls means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Listed {
    /// Listed calls are allowed, and others fail.
    Allowed,
    /// Listed calls fail, and others are allowed.
    Fails,
}

fn program(rules: Rules, error: c_int, listed: Listed) -> Result<BpfProgram, Failed> {
    let fails = SeccompAction::Errno(u32::try_from(error)?);
    let (others, these) = match listed {
        Listed::Allowed => (fails, SeccompAction::Allow),
        Listed::Fails => (SeccompAction::Allow, fails),
    };
    let architecture = TargetArch::try_from(std::env::consts::ARCH)?;
    Ok(BpfProgram::try_from(SeccompFilter::new(rules, others, these, architecture)?)?)
}
