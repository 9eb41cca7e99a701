//! Sets up an io_uring in the best mode that the kernel has, restricted to what an engine needs.
//!
//! **Restrictions.** The ring is created disabled, the files are registered, the ring is restricted, then enabled. From
//! then on it accepts eight opcodes, and of `io_uring_register` only updating the file table (a chain changes while it
//! is served), unregistering it, and registering our own memory. Neither opening nor sending is possible through it,
//! even if this process is compromised (seccomp does not see what goes through a ring), and only descriptors that the
//! process already has can be put into the table. `IORING_RESTRICTION_SQE_FLAGS_REQUIRED` could also require a
//! registered file for every request, polls included. As any descriptor can be registered, that gains nothing, so
//! requests on files use registered files by our own choice and polls use plain descriptors.
//!
//! **Mode.** SINGLE_ISSUER with DEFER_TASKRUN (Linux 6.1): completions are posted only inside our own `io_uring_enter`,
//! never by interrupting the thread. Otherwise COOP_TASKRUN (5.19), otherwise neither (5.13).

use std::io;
use std::os::fd::RawFd;

use io_uring::register::{Probe, Restriction};
use io_uring::{EnterFlags, IoUring, opcode};

use crate::EngineError;
use crate::engine_error::sysctl;

/// `IOSQE_FIXED_FILE` of linux/io_uring.h: the file is given by its index among the registered ones.
const FIXED_FILE: u8 = 1;

/// `IORING_UNREGISTER_FILES` of linux/io_uring.h.
const UNREGISTER_FILES: u8 = 3;

/// `IORING_REGISTER_FILES_UPDATE` of linux/io_uring.h.
const REGISTER_FILES_UPDATE: u8 = 6;

/// `IORING_REGISTER_BUFFERS` of linux/io_uring.h.
const REGISTER_BUFFERS: u8 = 0;

/// `IORING_REGISTER_BUFFERS_UPDATE` of linux/io_uring.h.
const REGISTER_BUFFERS_UPDATE: u8 = 16;

/// Watches have completions in addition to those of operations. The kernel keeps one that does not fit, at a cost: it
/// ends the multishot, which must then be armed again. 4 KiB avoid that for all but a storm of completions.
const COMPLETIONS_MIN: u32 = 256;

/// The opcodes that an engine needs.
const OPCODES: [(u8, &str); 8] = [
    (opcode::Read::CODE, "IORING_OP_READ (Linux 5.6)"),
    (opcode::Readv::CODE, "IORING_OP_READV (Linux 5.1)"),
    (opcode::Write::CODE, "IORING_OP_WRITE (Linux 5.6)"),
    (opcode::ReadFixed::CODE, "IORING_OP_READ_FIXED (Linux 5.1)"),
    (opcode::WriteFixed::CODE, "IORING_OP_WRITE_FIXED (Linux 5.1)"),
    (opcode::Writev::CODE, "IORING_OP_WRITEV (Linux 5.1)"),
    (opcode::PollAdd::CODE, "IORING_OP_POLL_ADD (Linux 5.1)"),
    (opcode::AsyncCancel::CODE, "IORING_OP_ASYNC_CANCEL (Linux 5.5)"),
];

/// A ring with `entries` submission entries, for this thread, on `files`.
pub(crate) fn open(entries: u32, files: &[RawFd]) -> Result<IoUring, EngineError> {
    let ring = create(entries)?;
    check_features(&ring)?;
    let submitter = ring.submitter();
    submitter
        .register_files(files)
        .map_err(|cause| refused("io_uring_register", "register files with io_uring", cause))?;
    let mut restrictions: Vec<Restriction> = OPCODES.iter().map(|&(code, _)| Restriction::sqe_op(code)).collect();
    restrictions.push(Restriction::sqe_flags_allowed(FIXED_FILE));
    restrictions.push(Restriction::register_op(UNREGISTER_FILES));
    restrictions.push(Restriction::register_op(REGISTER_FILES_UPDATE));
    restrictions.push(Restriction::register_op(REGISTER_BUFFERS));
    restrictions.push(Restriction::register_op(REGISTER_BUFFERS_UPDATE));
    submitter
        .register_restrictions(&mut restrictions)
        .map_err(|cause| refused("io_uring_register", "restrict the io_uring", cause))?;
    submitter.register_enable_rings().map_err(|cause| refused("io_uring_register", "enable the io_uring", cause))?;
    // Submits nothing and does not wait: it shows whether the call is permitted before it is needed.
    // SAFETY: there are no entries, and there is no argument.
    let entered = unsafe { submitter.enter::<libc::sigset_t>(0, 0, EnterFlags::GETEVENTS.bits(), None) };
    entered.map_err(|cause| refused("io_uring_enter", "enter the io_uring", cause))?;
    Ok(ring)
}

/// The error for a failed call on a new ring. Filters and emulations of Linux refuse calls with these errnos, and the
/// ring is useless without them.
fn refused(call: &str, tried: &'static str, cause: io::Error) -> EngineError {
    match cause.raw_os_error() {
        Some(libc::EPERM | libc::EACCES) => {
            EngineError::UringForbidden { reason: format!("a seccomp or security policy refuses {call}") }
        }
        Some(libc::ENOSYS | libc::EINVAL | libc::EOPNOTSUPP) => {
            EngineError::UringForbidden { reason: format!("{call} does not work: {cause}") }
        }
        Some(libc::ENOMEM) => EngineError::UringNoMemory(cause),
        _ => EngineError::failed(tried, cause),
    }
}

fn create(entries: u32) -> Result<IoUring, EngineError> {
    let completions = (entries * 2).max(COMPLETIONS_MIN);
    let mut newest = IoUring::builder();
    newest.setup_single_issuer().setup_defer_taskrun().setup_taskrun_flag().setup_submit_all();
    let mut older = IoUring::builder();
    older.setup_coop_taskrun().setup_taskrun_flag().setup_submit_all();
    for mut builder in [newest, older, IoUring::builder()] {
        match builder.setup_r_disabled().setup_cqsize(completions).dontfork().build(entries) {
            Ok(ring) => return Ok(ring),
            // This kernel does not know one of the flags.
            Err(cause) if cause.raw_os_error() == Some(libc::EINVAL) => continue,
            Err(cause) => return Err(setup_error(cause)),
        }
    }
    Err(EngineError::UringTooOld { missing: "restrictions (Linux 5.10)" })
}

fn setup_error(cause: io::Error) -> EngineError {
    match cause.raw_os_error() {
        Some(libc::EPERM | libc::EACCES) => {
            let reason = match sysctl("/proc/sys/kernel/io_uring_disabled").as_deref() {
                Some("0") | None => "a seccomp or security policy refuses io_uring_setup".to_owned(),
                Some(value) => format!("sysctl kernel.io_uring_disabled is {value}"),
            };
            EngineError::UringForbidden { reason }
        }
        Some(libc::ENOSYS) => {
            let reason =
                "io_uring_setup does not exist: the kernel lacks it, or a container's filter hides it".to_owned();
            EngineError::UringForbidden { reason }
        }
        Some(libc::ENOMEM) => EngineError::UringNoMemory(cause),
        _ => EngineError::failed("set up io_uring", cause),
    }
}

fn check_features(ring: &IoUring) -> Result<(), EngineError> {
    if !ring.params().is_feature_nodrop() {
        return Err(EngineError::UringTooOld { missing: "IORING_FEAT_NODROP (Linux 5.5)" });
    }
    // This feature was introduced together with multishot POLL_ADD, which cannot be probed.
    if !ring.params().is_feature_resource_tagging() {
        return Err(EngineError::UringTooOld { missing: "multishot IORING_OP_POLL_ADD (Linux 5.13)" });
    }
    let mut probe = Probe::new();
    ring.submitter()
        .register_probe(&mut probe)
        .map_err(|cause| refused("io_uring_register", "probe io_uring", cause))?;
    match OPCODES.iter().find(|&&(code, _)| !probe.is_supported(code)) {
        Some(&(_, missing)) => Err(EngineError::UringTooOld { missing }),
        None => Ok(()),
    }
}

#[cfg(test)]
mod test {
    use io_uring::types::Fd;

    use super::*;
    use crate::EngineKind;

    #[test]
    fn a_restricted_ring_refuses_other_opcodes_and_registrations() {
        let mut ring = open(8, &[-1]).unwrap();
        // SAFETY: a NOP has no memory; the ring refuses it anyway.
        unsafe { ring.submission().push(&opcode::Nop::new().build().user_data(1)).unwrap() };
        // SAFETY: closing an invalid descriptor uses no memory either.
        unsafe { ring.submission().push(&opcode::Close::new(Fd(-1)).build().user_data(2)).unwrap() };
        while ring.completion().len() < 2 {
            ring.submit_and_wait(1).unwrap();
        }
        assert!(ring.completion().all(|cqe| cqe.result() == -libc::EACCES));
        assert_eq!(ring.submitter().register_files(&[0]).unwrap_err().raw_os_error(), Some(libc::EACCES));
    }

    #[test]
    fn a_setup_error_names_the_other_engine() {
        let forbidden = setup_error(io::Error::from_raw_os_error(libc::EPERM));
        let absent = setup_error(io::Error::from_raw_os_error(libc::ENOSYS));
        assert_eq!(forbidden.other(), Some(EngineKind::Aio), "{forbidden}");
        assert_eq!(absent.other(), Some(EngineKind::Aio), "{absent}");
    }
}
