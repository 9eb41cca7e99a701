//! Threads of an engine.

use std::io;
use std::mem::MaybeUninit;
use std::sync::Once;
use std::thread::{Builder, JoinHandle};
use std::time::Duration;

/// Makes all threads allocate from one heap. They allocate almost nothing; a heap of its own would cost 8 KiB per
/// thread, which are not freed when it ends.
fn share_heap() {
    #[cfg(target_env = "gnu")]
    // SAFETY: it sets a number.
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, 1);
    }
}

/// Starts a thread with all signals blocked: they must wake the thread that sleeps in the engine.
pub(crate) fn spawn(name: &str, stack: usize, run: impl FnOnce() + Send + 'static) -> io::Result<JoinHandle<()>> {
    static ONCE: Once = Once::new();
    ONCE.call_once(share_heap);
    let builder = Builder::new().name(name.to_owned()).stack_size(stack);
    let mut all = MaybeUninit::<libc::sigset_t>::uninit();
    let mut before = MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: the first call fills one set, the second reads it and fills the other; both live until the end.
    unsafe {
        libc::sigfillset(all.as_mut_ptr());
        libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), before.as_mut_ptr());
    }
    let started = builder.spawn(run);
    // SAFETY: the set was filled above.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, before.as_ptr(), std::ptr::null_mut()) };
    started
}

/// The CPU-time clock of one thread, which other threads can read.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CpuClock(libc::clockid_t);

impl CpuClock {
    /// The clock of the calling thread; `None` if the system has none.
    pub(crate) fn of_this_thread() -> Option<CpuClock> {
        let mut clock = 0;
        // SAFETY: the thread exists; the clock's number is written to a variable that lives.
        let result = unsafe { libc::pthread_getcpuclockid(libc::pthread_self(), &raw mut clock) };
        (result == 0).then_some(CpuClock(clock))
    }

    /// The CPU time used so far; `None` if the thread has ended.
    pub(crate) fn time(self) -> Option<Duration> {
        let mut time = MaybeUninit::<libc::timespec>::uninit();
        // SAFETY: the call fills the value if it returns 0, and it is read only then.
        let time = unsafe {
            if libc::clock_gettime(self.0, time.as_mut_ptr()) != 0 {
                return None;
            }
            time.assume_init()
        };
        Some(Duration::new(u64::try_from(time.tv_sec).ok()?, u32::try_from(time.tv_nsec).ok()?))
    }
}

#[cfg(test)]
mod test {
    use std::sync::mpsc::channel;

    use super::*;

    #[test]
    fn the_cpu_time_of_a_thread_can_be_read_until_it_ends() {
        let (clocks, clock) = channel();
        let (stop, stopped) = channel::<()>();
        let thread = spawn("busy", 64 << 10, move || {
            let clock = CpuClock::of_this_thread().unwrap();
            while clock.time().unwrap() < Duration::from_millis(2) {}
            clocks.send(clock).unwrap();
            stopped.recv().unwrap_err();
        });
        let clock = clock.recv().unwrap();
        assert!(clock.time().unwrap() >= Duration::from_millis(2));
        drop(stop);
        thread.unwrap().join().unwrap();
        // The kernel lets a thread be joined shortly before it is gone.
        while clock.time().is_some() {
            std::thread::yield_now();
        }
    }
}
