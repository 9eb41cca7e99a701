//! A context of Linux AIO: its four system calls, and the ring in which it leaves completions.
//!
//! The kernel maps that ring into the process (the context's id is its address) so that completions can be taken
//! without a system call. Tools have relied on this for fifteen years, and the ring's magic and feature numbers show
//! whether it still has the known layout (`struct aio_ring`, fs/aio.c). If not, `io_getevents` is used.
//!
//! Invariant: this value is the only consumer of the ring.

use std::io;
use std::os::fd::RawFd;
use std::ptr::{NonNull, null};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use memory::Part;

/// A request: `struct iocb` of linux/aio_abi.h.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Iocb {
    pub(crate) data: u64,
    #[cfg(target_endian = "little")]
    key: u32,
    rw_flags: u32,
    #[cfg(target_endian = "big")]
    key: u32,
    pub(crate) opcode: u16,
    pub(crate) priority: i16,
    pub(crate) fd: u32,
    pub(crate) buf: u64,
    pub(crate) len: u64,
    pub(crate) at: i64,
    reserved: u64,
    flags: u32,
    event_fd: u32,
}

const _: () = assert!(size_of::<Iocb>() == 64);

/// The opcodes: `IOCB_CMD_*` of linux/aio_abi.h.
const PREAD: u16 = 0;
const PWRITE: u16 = 1;
pub(crate) const FDSYNC: u16 = 3;
pub(crate) const POLL: u16 = 5;
const PREADV: u16 = 7;
const PWRITEV: u16 = 8;

impl Iocb {
    /// A request of any kind; its completion carries `data`.
    pub(crate) fn new(opcode: u16, fd: RawFd, data: u64) -> Iocb {
        Iocb { opcode, fd: fd.unsigned_abs(), data, ..Iocb::default() }
    }

    /// A read from offset `at` into `parts`.
    pub(crate) fn read(at: u64, parts: &[Part], fd: RawFd, data: u64) -> Iocb {
        Iocb::new(if parts.len() == 1 { PREAD } else { PREADV }, fd, data).with_buffers(at, parts)
    }

    /// A write of `parts` to offset `at`.
    pub(crate) fn write(at: u64, parts: &[Part], fd: RawFd, data: u64) -> Iocb {
        Iocb::new(if parts.len() == 1 { PWRITE } else { PWRITEV }, fd, data).with_buffers(at, parts)
    }

    fn with_buffers(self, at: u64, parts: &[Part]) -> Iocb {
        // Exposed: the kernel uses it as a pointer again. A list of parts is a `struct iovec[]` (memory::Part).
        let (address, len) = match parts {
            [part] => (part.base().expose_provenance(), part.len()),
            parts => (parts.as_ptr().expose_provenance(), parts.len()),
        };
        let number = |number| u64::try_from(number).unwrap_or(u64::MAX);
        Iocb { at: i64::try_from(at).unwrap_or(i64::MAX), buf: number(address), len: number(len), ..self }
    }

    /// Makes its completion also signal an eventfd (IOCB_FLAG_RESFD).
    pub(crate) fn signalling(self, event: RawFd) -> Iocb {
        Iocb { flags: 1, event_fd: event.unsigned_abs(), ..self }
    }
}

/// `struct io_event`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct AioEvent {
    pub(crate) data: u64,
    obj: u64,
    pub(crate) res: i64,
    res2: i64,
}

/// The header of `struct aio_ring`; `nr` events follow.
#[repr(C)]
struct RingHeader {
    id: u32,
    nr: u32,
    head: AtomicU32,
    tail: AtomicU32,
    magic: u32,
    compat_features: u32,
    incompat_features: u32,
    header_length: u32,
}

const MAGIC: u32 = 0xa10a_10a1;
const COMPAT_FEATURES: u32 = 1;
const INCOMPAT_FEATURES: u32 = 0;

/// Events fetched by one system call.
const BATCH: usize = 32;

/// A handle for submitting to a context from threads other than the one that takes completions.
#[derive(Clone, Copy)]
pub(crate) struct Submitter {
    id: libc::c_ulong,
}

impl Submitter {
    /// Submits one request, however long that takes.
    ///
    /// # Safety
    /// The context is alive, and what the request points to stays valid until its completion has been taken. A list of
    /// parts may be freed when this returns.
    pub(crate) unsafe fn submit(self, mut request: Iocb) -> io::Result<()> {
        let mut requests = [&raw mut request];
        // SAFETY: the kernel copies the request and its list during the call; the rest is this function's contract.
        check(unsafe { libc::syscall(libc::SYS_io_submit, self.id, 1, requests.as_mut_ptr()) }).map(drop)
    }
}

/// An AIO context.
pub(crate) struct AioContext {
    id: libc::c_ulong,
    /// The ring, if its layout is known.
    ring: Option<NonNull<RingHeader>>,
    /// Number of `io_submit` calls, checked by tests.
    #[cfg(test)]
    pub(crate) submits: usize,
}

impl AioContext {
    /// A context for up to `requests` concurrent requests.
    pub(crate) fn new(requests: u32) -> io::Result<AioContext> {
        let mut id: libc::c_ulong = 0;
        // SAFETY: the kernel writes the id during the call.
        check(unsafe { libc::syscall(libc::SYS_io_setup, libc::c_ulong::from(requests), &raw mut id) })?;
        Ok(AioContext {
            id,
            ring: known_ring(id),
            #[cfg(test)]
            submits: 0,
        })
    }

    /// A handle for submitting from other threads.
    pub(crate) fn submitter(&self) -> Submitter {
        Submitter { id: self.id }
    }

    /// Behaves as on a kernel whose ring has an unknown layout.
    #[cfg(test)]
    pub(crate) fn forget_ring(&mut self) {
        self.ring = None;
    }

    /// Submits requests in order; returns how many were accepted. An error is that of the first.
    ///
    /// # Safety
    /// Each pointer is that of a request; what the request points to stays valid until its completion has been taken.
    pub(crate) unsafe fn submit(&mut self, requests: &mut [*mut Iocb]) -> io::Result<usize> {
        #[cfg(test)]
        {
            self.submits += 1;
        }
        // SAFETY: the array is ours for the call, the requests by this function's contract.
        check(unsafe { libc::syscall(libc::SYS_io_submit, self.id, requests.len(), requests.as_mut_ptr()) })
    }

    /// Passes every available completion to `take`, without sleeping.
    pub(crate) fn harvest(&mut self, mut take: impl FnMut(AioEvent)) -> io::Result<()> {
        match self.ring {
            Some(ring) => {
                // SAFETY: the ring is mapped as long as the context lives, and we are its only consumer.
                unsafe { harvest_ring(ring, &mut take) };
                Ok(())
            }
            None => self.fetch(0, Some(Duration::ZERO), take),
        }
    }

    /// Sleeps until there is a completion, for at most `most`, and passes all available ones to `take`. EINTR is an
    /// error.
    pub(crate) fn wait(&mut self, most: Option<Duration>, take: impl FnMut(AioEvent)) -> io::Result<()> {
        self.fetch(1, most, take)
    }

    fn fetch(&mut self, least: libc::c_long, most: Option<Duration>, take: impl FnMut(AioEvent)) -> io::Result<()> {
        let mut events = [AioEvent::default(); BATCH];
        let most = most.map(|most| libc::timespec {
            tv_sec: libc::time_t::try_from(most.as_secs()).unwrap_or(libc::time_t::MAX),
            tv_nsec: libc::c_long::from(most.subsec_nanos()),
        });
        // SAFETY: the kernel writes at most `BATCH` events during the call; the time is only read.
        let count = check(unsafe {
            let timeout = most.as_ref().map_or(null(), std::ptr::from_ref);
            libc::syscall(libc::SYS_io_getevents, self.id, least, BATCH, events.as_mut_ptr(), timeout)
        })?;
        events.into_iter().take(count).for_each(take);
        Ok(())
    }
}

impl Drop for AioContext {
    /// Waits until the kernel has no request left.
    fn drop(&mut self) {
        // SAFETY: the context was set up in `new` and is not used after this.
        let result = unsafe { libc::syscall(libc::SYS_io_destroy, self.id) };
        debug_assert_eq!(result, 0, "io_destroy of our own context failed");
    }
}

fn check(result: libc::c_long) -> io::Result<usize> {
    usize::try_from(result).map_err(|_| io::Error::last_os_error())
}

/// The ring of a context, if it has the known layout.
fn known_ring(id: libc::c_ulong) -> Option<NonNull<RingHeader>> {
    let address = usize::try_from(id).ok()?;
    let ring = NonNull::new(std::ptr::with_exposed_provenance_mut::<RingHeader>(address))?;
    // SAFETY: the id of a context is the address of its ring, at least one page, mapped until `io_destroy`.
    let header = unsafe { ring.as_ref() };
    let known = header.magic == MAGIC
        && header.compat_features == COMPAT_FEATURES
        && header.incompat_features == INCOMPAT_FEATURES
        && usize::try_from(header.header_length) == Ok(size_of::<RingHeader>())
        && header.nr > 0;
    known.then_some(ring)
}

/// # Safety
/// `ring` is the mapped ring of a live context, and has no other consumer.
unsafe fn harvest_ring(ring: NonNull<RingHeader>, take: &mut impl FnMut(AioEvent)) {
    // SAFETY: mapped, by contract; the kernel changes only `head` and `tail`, which are atomics here.
    let header = unsafe { ring.as_ref() };
    // SAFETY: the events begin after the header.
    let events = unsafe { ring.as_ptr().add(1).cast::<AioEvent>() };
    let mut head = header.head.load(Ordering::Relaxed);
    // Acquire: the events before the tail are written (the kernel has a barrier before it moves the tail).
    let tail = header.tail.load(Ordering::Acquire);
    while head != tail {
        let Ok(index) = usize::try_from(head % header.nr) else { return };
        // SAFETY: `index` is less than the number of events in the ring.
        let event = unsafe { events.add(index).read_volatile() };
        head = head.wrapping_add(1) % header.nr;
        // Release: the event has been read before its slot is given back.
        header.head.store(head, Ordering::Release);
        take(event);
    }
}
