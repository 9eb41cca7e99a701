//! Mappings of files that others may make shorter: an access behind the end of the file raises SIGBUS, which would end
//! the process. Here zeroes of the process's own take the place of the whole mapping then, and the access is repeated.
//!
//! It knows no file, and not what the bytes mean. Invariants: only faults within a mapping that is registered are
//! handled; all others are left to the handler that was there before. What is in the table is mapped: a mapping is
//! registered after it is made, and unregistered before it is unmapped.

use std::ffi::{c_int, c_void};
use std::io;
use std::mem::MaybeUninit;
use std::ptr::null_mut;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering};

/// The newest of all places. They are never freed, as a handler may be reading them at any time, but used again.
static PLACES: AtomicPtr<Place> = AtomicPtr::new(null_mut());

/// The previous handler of SIGBUS, or the error number if ours could not be installed.
static BEFORE: OnceLock<Result<Before, i32>> = OnceLock::new();

/// An action of a signal is plain data.
struct Before(libc::sigaction);

// SAFETY: it is only copied, and the kernel reads what its pointers are for.
unsafe impl Send for Before {}
// SAFETY: as above.
unsafe impl Sync for Before {}

struct Place {
    taken: AtomicBool,
    base: AtomicPtr<u8>,
    /// Zero while nothing is registered.
    len: AtomicUsize,
    lost: AtomicBool,
    /// Written before the place is in the list.
    older: Option<&'static Place>,
}

impl Place {
    /// A place that is taken by the caller.
    fn take() -> &'static Place {
        places().find(|place| !place.taken.swap(true, Ordering::AcqRel)).unwrap_or_else(Place::add)
    }

    fn add() -> &'static Place {
        let mut place = Box::new(Place {
            taken: AtomicBool::new(true),
            base: AtomicPtr::new(null_mut()),
            len: AtomicUsize::new(0),
            lost: AtomicBool::new(false),
            older: None,
        });
        let mut newest = PLACES.load(Ordering::Acquire);
        loop {
            // SAFETY: null, or a place that is never freed.
            place.older = unsafe { newest.as_ref() };
            let added = Box::into_raw(place);
            match PLACES.compare_exchange(newest, added, Ordering::AcqRel, Ordering::Acquire) {
                // SAFETY: it is never freed, and only its atomics change from now on.
                Ok(_) => return unsafe { &*added },
                Err(changed) => newest = changed,
            }
            // SAFETY: made of a box above, and no one else has seen it.
            place = unsafe { Box::from_raw(added) };
        }
    }
}

/// All places; nothing here takes a lock or allocates, so a signal handler may walk along it.
fn places() -> impl Iterator<Item = &'static Place> {
    // SAFETY: null, or a place that is never freed.
    let newest = unsafe { PLACES.load(Ordering::Acquire).as_ref() };
    std::iter::successors(newest, |place| place.older)
}

/// A registered mapping; dropped before it is unmapped.
pub struct Registered(&'static Place);

impl Registered {
    /// Registers `len` mapped bytes.
    pub fn new(base: *mut u8, len: usize) -> io::Result<Registered> {
        BEFORE.get_or_init(handle).as_ref().map_err(|errno| io::Error::from_raw_os_error(*errno))?;
        let place = Place::take();
        place.lost.store(false, Ordering::Relaxed);
        place.base.store(base, Ordering::Relaxed);
        place.len.store(len, Ordering::Release);
        Ok(Registered(place))
    }

    /// Whether the file was made shorter, and the mapping is no longer of it.
    pub fn is_lost(&self) -> bool {
        self.0.lost.load(Ordering::Relaxed)
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        self.0.len.store(0, Ordering::Release);
        self.0.taken.store(false, Ordering::Release);
    }
}

fn handle() -> Result<Before, i32> {
    let mut before = MaybeUninit::<libc::sigaction>::zeroed();
    // SAFETY: all zeroes are a valid action: the default one, an empty mask and no flags.
    let mut action = unsafe { MaybeUninit::<libc::sigaction>::zeroed().assume_init() };
    let handler: extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void) = on_fault;
    action.sa_sigaction = handler as libc::sighandler_t;
    action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
    // SAFETY: `action` has a handler of the type that SA_SIGINFO says, which only makes calls that a handler may make;
    // `before` has room for an action.
    let result = unsafe { libc::sigaction(libc::SIGBUS, &action, before.as_mut_ptr()) };
    match result {
        // SAFETY: written by the call, and zeroes before.
        0 => Ok(Before(unsafe { before.assume_init() })),
        _ => Err(io::Error::last_os_error().raw_os_error().unwrap_or(libc::EINVAL)),
    }
}

extern "C" fn on_fault(_: c_int, info: *mut libc::siginfo_t, _: *mut c_void) {
    // SAFETY: the kernel hands a valid one to a handler with SA_SIGINFO, and for SIGBUS it has an address.
    let at = unsafe { (*info).si_addr() }.addr();
    for place in places() {
        let len = place.len.load(Ordering::Acquire);
        let base = place.base.load(Ordering::Relaxed);
        if at.checked_sub(base.addr()).is_some_and(|offset| offset < len) && replace(base, len) {
            place.lost.store(true, Ordering::Relaxed);
            return;
        }
    }
    // The access is repeated when this returns, and comes to whatever was there before.
    if let Some(Ok(Before(before))) = BEFORE.get() {
        // SAFETY: an action that the kernel has given out.
        unsafe { libc::sigaction(libc::SIGBUS, before, null_mut()) };
    }
}

/// Puts zeroes into the place of a mapping.
fn replace(base: *mut u8, len: usize) -> bool {
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
    // SAFETY: these bytes are mapped, by the owner of a `Registered` that exists; they are accessed by copies and
    // atomics, which may find anything there at any time. mmap is a single system call that takes no lock of ours.
    let mapped = unsafe { libc::mmap(base.cast(), len, protection, flags, -1, 0) };
    mapped != libc::MAP_FAILED
}
