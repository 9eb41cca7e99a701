//! The clock of a disk's thread: the CPU's counter where it runs at a constant rate, else the kernel's.
//!
//! Times are nanoseconds of CLOCK_MONOTONIC, so that another process can say how old something is. The counter's rate
//! is measured against the kernel's clock while the disk runs: nothing waits for it, and until there is a measurement
//! the kernel's clock is read. The two are brought together ten times a second, so that they never differ by more than
//! the error of a tenth of a second. A rate that has changed is measured again. Invariant: a time is never less than
//! the one before it.

/// Nanoseconds between two comparisons of the counter with the kernel's clock.
const COMPARED: u64 = 100_000_000;
/// Nanoseconds of the first measurement of the rate.
const FIRST: u64 = 10_000_000;
/// Binary places of the rate.
const FRACTION: u32 = 32;

/// Where times come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// The CPU's counter.
    Counter,
    /// The kernel's clock, since the CPU has no counter of a constant rate.
    Kernel,
}

/// A clock that never goes back.
#[derive(Debug)]
pub struct Clock {
    source: Source,
    /// Nanoseconds of a tick, with [`FRACTION`] binary places; zero while it is not known.
    rate: u64,
    /// The counter and the kernel's clock at the last comparison, and at the first one.
    last: (u64, u64),
    first: (u64, u64),
    /// Ticks after the last comparison at which the next one is due.
    due: u64,
    /// The last time that was given.
    given: u64,
}

impl Source {
    /// The best one of this machine. To be called before the process gives up access to files; the result is kept.
    pub fn of_this_machine() -> Source {
        static KNOWN: std::sync::OnceLock<Source> = std::sync::OnceLock::new();
        *KNOWN.get_or_init(|| if has_constant_counter() { Source::Counter } else { Source::Kernel })
    }
}

impl Clock {
    /// A clock, by the CPU's counter if it has one of a constant rate.
    pub fn new() -> Clock {
        Clock::by(Source::of_this_machine())
    }

    /// A clock that takes its times from there.
    fn by(source: Source) -> Clock {
        let now = both();
        Clock { source, rate: 0, last: now, first: now, due: 0, given: now.1 }
    }

    /// Where times come from.
    pub fn source(&self) -> Source {
        self.source
    }

    /// The current time, in nanoseconds of CLOCK_MONOTONIC.
    #[inline(always)]
    pub fn now(&mut self) -> u64 {
        let ticks = counter().wrapping_sub(self.last.0);
        if ticks >= self.due {
            return self.compare();
        }
        // Ticks of a tenth of a second times the rate: far less than 128 bits.
        let ns = u64::try_from((u128::from(ticks) * u128::from(self.rate)) >> FRACTION).unwrap_or(COMPARED);
        let now = (self.last.1 + ns).max(self.given);
        self.given = now;
        now
    }

    /// Compares the counter with the kernel's clock; the time now.
    #[cold]
    #[inline(never)]
    fn compare(&mut self) -> u64 {
        let (ticks, now) = match self.source {
            Source::Counter => both(),
            // The kernel is queried each time.
            Source::Kernel => (0, monotonic()),
        };
        let (ticks_since, since) = (ticks.wrapping_sub(self.first.0), now.saturating_sub(self.first.1));
        if self.source == Source::Counter && since >= FIRST && ticks_since > 0 {
            let rate = u64::try_from((u128::from(since) << FRACTION) / u128::from(ticks_since)).unwrap_or(0);
            if self.rate != 0 && rate.abs_diff(self.rate) > self.rate / 64 {
                // The machine was suspended, or moved to another one: what was measured is of no use any more.
                *self = Clock { given: self.given.max(now), ..Clock::by(Source::Counter) };
                return self.given;
            }
            self.rate = rate;
            let due = (u128::from(COMPARED) << FRACTION) / u128::from(self.rate.max(1));
            self.due = u64::try_from(due).unwrap_or(0);
            self.last = (ticks, now);
        }
        self.given = self.given.max(now);
        self.given
    }
}

/// The counter and the time at one moment: a thread that lost the CPU between the two would be late by that until the
/// next comparison. The reading that took the fewest ticks is taken.
fn both() -> (u64, u64) {
    let reading = || {
        let (before, now, after) = (counter(), monotonic(), counter());
        let took = after.wrapping_sub(before);
        (took, (before.wrapping_add(took / 2), now))
    };
    let all = [reading(), reading(), reading()];
    all.into_iter().min_by_key(|(took, _)| *took).map_or((0, 0), |(_, both)| both)
}

impl Default for Clock {
    fn default() -> Clock {
        Clock::new()
    }
}

/// Nanoseconds of CLOCK_MONOTONIC.
pub fn monotonic() -> u64 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the structure is ours, and lives as long as the call.
    let done = unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut now) };
    debug_assert_eq!(done, 0, "every kernel has this clock");
    let (seconds, ns) = (u64::try_from(now.tv_sec).unwrap_or(0), u64::try_from(now.tv_nsec).unwrap_or(0));
    seconds.saturating_mul(1_000_000_000).saturating_add(ns)
}

#[cfg(target_arch = "x86_64")]
#[inline(always)]
fn counter() -> u64 {
    // SAFETY: every CPU of this architecture has the instruction. Where a process may not use it (PR_SET_TSC), it is
    // ended, as it would be for any other instruction that was taken away from it.
    unsafe { core::arch::x86_64::_rdtsc() }
}

#[cfg(not(target_arch = "x86_64"))]
fn counter() -> u64 {
    0
}

/// Whether the CPU's counter runs at a constant rate, whatever the CPU does. The kernel knows the CPUs and their faults
/// better than we do: it says so in the flags of the CPU, and uses another clock where the counters of several CPUs
/// differ.
fn has_constant_counter() -> bool {
    if cfg!(not(target_arch = "x86_64")) {
        return false;
    }
    let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    let clock = read("/sys/devices/system/clocksource/clocksource0/current_clocksource");
    let trusted = ["tsc", "kvm-clock", "hyperv_clocksource_tsc_page"].contains(&clock.trim());
    let cpus = read("/proc/cpuinfo");
    let flags = cpus.lines().find(|line| line.starts_with("flags")).unwrap_or_default();
    trusted && ["constant_tsc", "nonstop_tsc"].iter().all(|flag| flags.split_whitespace().any(|have| have == *flag))
}

#[cfg(test)]
mod test {
    use std::time::Duration;

    use super::*;

    #[test]
    fn times_are_those_of_the_kernel_and_never_go_back() {
        for mut clock in [Clock::new(), Clock::by(Source::Kernel)] {
            let until = monotonic() + 350_000_000;
            let mut last = 0;
            while last < until {
                let (before, now) = (monotonic(), clock.now());
                let after = monotonic();
                assert!(now >= last, "{now} after {last}");
                // Between the two, or outside by what the rate may be wrong in a tenth of a second: a thousandth is
                // far more than it ever is.
                let slack = COMPARED / 1000;
                assert!(now + slack >= before && now <= after + slack, "{now} is not in {before}..{after}");
                last = now;
            }
        }
    }

    #[test]
    fn a_counter_is_used_once_its_rate_is_known() {
        let mut clock = Clock::by(Source::Counter);
        assert_eq!(clock.rate, 0);
        std::thread::sleep(Duration::from_nanos(2 * FIRST));
        clock.now();
        assert_eq!(clock.rate > 0, cfg!(target_arch = "x86_64"));
        let mut kernels = Clock::by(Source::Kernel);
        std::thread::sleep(Duration::from_nanos(2 * FIRST));
        kernels.now();
        assert_eq!(kernels.rate, 0);
    }
}
