//! Detects whether other threads want the processor on which a thread polls, so that it polls at their expense.
//!
//! A thread that polls does not sleep, so the kernel preempts it at the end of its time slice if another thread waits.
//! It notices that an iteration took much longer than expected, and the kernel confirms that it was switched away from
//! meanwhile (nonvoluntary_ctxt_switches in /proc/thread-self/status). Then it does not poll for many times as long as
//! that iteration took: detection costs the others about two percent. How long threads wait for processors
//! (/proc/pressure/cpu, schedstat) does not help: the wake-up of a halted processor counts as waiting.
//!
//! The host of a virtual machine preempts its processors as well, which looks the same except for the kernel's counter.
//! That must be compared for this iteration, and not since the last long one, so it is read periodically.
//!
//! It knows nothing about what is polled.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::OnceLock;

/// The duration of an iteration that counts as interrupted, in nanoseconds.
const INTERRUPTED: u64 = 500_000;
/// Polling pauses for this many times the duration of the iteration.
const PAUSE_FACTOR: u64 = 64;
/// The maximum pause.
const PAUSE_MAX: u64 = 2_000_000_000;

/// The interval in nanoseconds at which the kernel's counter is read while no iteration takes too long.
const READ_INTERVAL: u64 = 5_000_000;

/// The kernel's status file of the polling thread.
static STATUS: OnceLock<File> = OnceLock::new();

/// Opens the status file. Call it in the thread that will poll, before the process is confined.
pub fn prepare() {
    if let Ok(status) = File::open("/proc/thread-self/status") {
        STATUS.get_or_init(|| status);
    }
}

/// The detection of contention. Times are in nanoseconds.
pub struct Contention {
    /// Reads how many times the thread has been preempted.
    switches: Box<dyn FnMut() -> Option<u64> + Send>,
    /// The last count, and when it was read.
    before: u64,
    read_at: u64,
    /// The end of the pause.
    until: u64,
}

impl Contention {
    /// Monitors the thread that has called [`prepare`]; without that, or if the kernel has no counter, there is never
    /// any contention.
    pub fn of_this_thread() -> Contention {
        Contention::by(Box::new(|| STATUS.get().and_then(switches_in)))
    }

    fn by(mut switches: Box<dyn FnMut() -> Option<u64> + Send>) -> Contention {
        let before = switches().unwrap_or(0);
        Contention { switches, before, read_at: 0, until: 0 }
    }

    /// Makes one that never detects contention.
    #[cfg(test)]
    pub fn none() -> Contention {
        Contention::by(Box::new(|| None))
    }

    /// Returns whether there has been contention recently.
    #[inline]
    pub fn is_there(&self, now: u64) -> bool {
        now < self.until
    }

    /// Returns whether an iteration from `before` to `now` was interrupted by other threads.
    #[inline]
    pub fn has_interrupted(&mut self, before: u64, now: u64) -> bool {
        let time = now.saturating_sub(before);
        let interrupted = time >= INTERRUPTED;
        if !interrupted && now.saturating_sub(self.read_at) < READ_INTERVAL {
            return false;
        }
        if !self.was_preempted(now) || !interrupted {
            return false;
        }
        self.until = now.saturating_add(time.saturating_mul(PAUSE_FACTOR).min(PAUSE_MAX));
        true
    }

    /// Returns whether the thread was preempted since the counter was last read. If not, a long iteration has waited
    /// for something else: a page of memory, the host of a virtual machine.
    #[cold]
    fn was_preempted(&mut self, now: u64) -> bool {
        self.read_at = now;
        let Some(switches) = (self.switches)() else { return false };
        switches > std::mem::replace(&mut self.before, switches)
    }
}

/// Returns how many times the thread was preempted, from the line of that name.
fn switches_in(status: &File) -> Option<u64> {
    let mut bytes = [0; 4096];
    let len = status.read_at(&mut bytes, 0).ok()?;
    let text = std::str::from_utf8(bytes.get(..len)?).ok()?;
    text.lines().find_map(|line| line.strip_prefix("nonvoluntary_ctxt_switches:"))?.trim().parse().ok()
}

#[cfg(test)]
mod test {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::*;

    const MS: u64 = 1_000_000;

    fn counting() -> (Contention, Arc<AtomicU64>) {
        let count = Arc::new(AtomicU64::new(0));
        let reading = Arc::clone(&count);
        (Contention::by(Box::new(move || Some(reading.load(Ordering::Relaxed)))), count)
    }

    #[test]
    fn waiting_threads_lose_little_to_polling() {
        let (mut contention, count) = counting();
        // Whenever it polls, it is interrupted for 3 ms after 3 ms of its own.
        let (mut polled, mut now) = (0, 0);
        while now < 10_000 * MS {
            if contention.is_there(now) {
                now += MS / 10;
                continue;
            }
            polled += 3 * MS;
            now += 6 * MS;
            count.fetch_add(1, Ordering::Relaxed);
            assert!(contention.has_interrupted(now - 3 * MS, now));
        }
        assert!(polled <= 300 * MS, "{polled}: three percent at most");
        // The other threads have gone.
        assert!(!contention.is_there(now + PAUSE_MAX));
    }

    #[test]
    fn iterations_delayed_for_other_reasons_do_not_count() {
        let (mut contention, count) = counting();
        assert!(!contention.has_interrupted(0, 3 * MS) && !contention.is_there(3 * MS));
        count.store(1, Ordering::Relaxed);
        assert!(contention.has_interrupted(0, 3 * MS) && !contention.has_interrupted(0, 3 * MS));
        assert!(!Contention::none().has_interrupted(0, 3 * MS));
        // A preemption before an iteration does not count for that.
        count.store(2, Ordering::Relaxed);
        assert!(!contention.has_interrupted(1_000 * MS, 1_000 * MS + 1));
        assert!(!contention.has_interrupted(1_001 * MS, 1_004 * MS) && !contention.is_there(1_004 * MS));
    }

    #[test]
    fn the_counter_is_read_rarely_in_short_iterations() {
        let mut contention = Contention::by(Box::new(|| None));
        assert!(!contention.has_interrupted(0, READ_INTERVAL));
        contention.switches = Box::new(|| panic!("it was read"));
        assert!(!contention.has_interrupted(READ_INTERVAL, READ_INTERVAL + INTERRUPTED - 1));
        assert!(!contention.has_interrupted(2 * READ_INTERVAL - 2, 2 * READ_INTERVAL - 1));
    }

    #[test]
    fn the_status_file_is_parsed() {
        let file = tempfile::tempfile().unwrap();
        assert_eq!(switches_in(&file), None);
        let text = b"Name:\tx\nvoluntary_ctxt_switches:\t5\nnonvoluntary_ctxt_switches:\t77\n";
        file.write_all_at(text, 0).unwrap();
        assert_eq!(switches_in(&file), Some(77));
        prepare();
        let mut this = Contention::of_this_thread();
        assert!((this.switches)().is_some());
    }
}
