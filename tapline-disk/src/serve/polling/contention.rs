//! Whether others want the processor on which a thread polls: then it polls at their expense.
//!
//! A thread that polls does not sleep, so the kernel takes the processor from it when its turn is over and somebody
//! else waits. It notices that a look took much longer than it should, and the kernel confirms that it was switched
//! away from meanwhile (nonvoluntary_ctxt_switches in /proc/thread-self/status). Then it does without polling for many
//! times as long as the look took: others lose what it takes to find out, two in a hundred. How long threads wait for
//! processors (/proc/pressure/cpu, schedstat) is of no use here: the wake-up of a halted processor counts as waiting.
//!
//! Of a guest, the host takes processors as well, which looks the same but for the kernel's answer; so it must be the
//! answer for that look, and not for all the time since the last that took too long: the kernel is asked now and then.
//!
//! It knows nothing about what is polled.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::OnceLock;

/// A look of so many nanoseconds was interrupted.
const INTERRUPTED: u64 = 500_000;
/// Polling is given up for so many times as long as the look took.
const GIVEN_UP: u64 = 64;
/// And for no longer than this.
const GIVEN_UP_MAX: u64 = 2_000_000_000;

/// The kernel is asked so often while nothing takes too long.
const ASKED: u64 = 5_000_000;

/// What the kernel says of the thread that polls.
static STATUS: OnceLock<File> = OnceLock::new();

/// To be called by the thread that will poll, before the process gives up access to files.
pub fn prepare() {
    if let Ok(status) = File::open("/proc/thread-self/status") {
        STATUS.get_or_init(|| status);
    }
}

/// What is known of it. Times are in nanoseconds.
pub struct Contention {
    /// Asks how often the processor was taken from the thread so far.
    switches: Box<dyn FnMut() -> Option<u64> + Send>,
    /// The last answer, and when it was given.
    before: u64,
    asked: u64,
    /// Until then polling is given up.
    until: u64,
}

impl Contention {
    /// For the thread that called [`prepare`]; without that, or where the kernel does not tell, there is never any.
    pub fn of_this_thread() -> Contention {
        Contention::by(Box::new(|| STATUS.get().and_then(switches_in)))
    }

    fn by(mut switches: Box<dyn FnMut() -> Option<u64> + Send>) -> Contention {
        let before = switches().unwrap_or(0);
        Contention { switches, before, asked: 0, until: 0 }
    }

    /// There is never any.
    #[cfg(test)]
    pub fn of_nobody() -> Contention {
        Contention::by(Box::new(|| None))
    }

    /// Whether there was some lately.
    #[inline]
    pub fn is_there(&self, now: u64) -> bool {
        now < self.until
    }

    /// Whether a look that began at `before` and has ended now was interrupted by others.
    #[inline]
    pub fn has_interrupted(&mut self, before: u64, now: u64) -> bool {
        let time = now.saturating_sub(before);
        let interrupted = time >= INTERRUPTED;
        if !interrupted && now.saturating_sub(self.asked) < ASKED {
            return false;
        }
        if !self.ask(now) || !interrupted {
            return false;
        }
        self.until = now.saturating_add(time.saturating_mul(GIVEN_UP).min(GIVEN_UP_MAX));
        true
    }

    /// Whether the processor was taken from the thread since the kernel was last asked. If not, a look that took too
    /// long has waited for something else: a page of memory, the host of a virtual machine.
    #[cold]
    fn ask(&mut self, now: u64) -> bool {
        self.asked = now;
        let Some(switches) = (self.switches)() else { return false };
        switches > std::mem::replace(&mut self.before, switches)
    }
}

/// How often the processor was taken from the thread: the line of that name.
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
        let asked = Arc::clone(&count);
        (Contention::by(Box::new(move || Some(asked.load(Ordering::Relaxed)))), count)
    }

    #[test]
    fn others_that_wait_lose_little_to_polling() {
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
        assert!(polled <= 300 * MS, "{polled}: three in a hundred at most");
        // They have gone.
        assert!(!contention.is_there(now + GIVEN_UP_MAX));
    }

    #[test]
    fn what_took_too_long_for_another_reason_does_not_count() {
        let (mut contention, count) = counting();
        assert!(!contention.has_interrupted(0, 3 * MS) && !contention.is_there(3 * MS));
        count.store(1, Ordering::Relaxed);
        assert!(contention.has_interrupted(0, 3 * MS) && !contention.has_interrupted(0, 3 * MS));
        assert!(!Contention::of_nobody().has_interrupted(0, 3 * MS));
        // A moment of another thread is not what a later look has waited for.
        count.store(2, Ordering::Relaxed);
        assert!(!contention.has_interrupted(1_000 * MS, 1_000 * MS + 1));
        assert!(!contention.has_interrupted(1_001 * MS, 1_004 * MS) && !contention.is_there(1_004 * MS));
    }

    #[test]
    fn looks_that_are_short_ask_rarely() {
        let mut contention = Contention::by(Box::new(|| None));
        assert!(!contention.has_interrupted(0, ASKED));
        contention.switches = Box::new(|| panic!("it was asked"));
        assert!(!contention.has_interrupted(ASKED, ASKED + INTERRUPTED - 1));
        assert!(!contention.has_interrupted(2 * ASKED - 2, 2 * ASKED - 1));
    }

    #[test]
    fn the_kernels_words_are_understood() {
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
