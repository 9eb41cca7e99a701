//! A token bucket in integers.
//!
//! It knows no disk and no clock: callers pass the time in nanoseconds. A unit, which is a request or a byte, costs
//! [`UNIT`] tokens. At a rate of n units per second, n tokens are added per nanosecond. So neither rounds; only the
//! computation of a wait divides.
//!
//! Invariants: between any two moments a bucket passes no more than its rate allows, the saved level, and the last
//! request; what is added while something waits is not lost if the wait ends late, up to [`CATCH_UP`].

/// The cost of a unit: the nanoseconds of a second.
const UNIT: i128 = 1_000_000_000;

/// How late a wait may end, in nanoseconds, before the excess is lost. With less, a busy machine would keep a disk
/// below its limit; with more, a process that was stopped for minutes would catch up for them.
const CATCH_UP: u64 = 100_000_000;

/// The largest debt of an open gate, in nanoseconds of the rate; it is waited for afterwards.
const DEBT_MAX: u64 = 1_000_000_000;

/// A token bucket. A level below zero is a debt.
#[derive(Clone, Copy, Debug)]
pub struct Bucket {
    /// Units per second.
    rate: i128,
    /// The maximum of the level.
    level_max: i128,
    level: i128,
    /// The time of the level.
    at: u64,
    /// Until when the level may exceed the maximum, because something has waited recently.
    catches_up: u64,
}

impl Bucket {
    /// Makes a full bucket for `rate` units per second, which can save what is added in `burst` nanoseconds.
    pub fn new(rate: u64, burst: u64, now: u64) -> Bucket {
        let rate = i128::from(rate);
        let level_max = rate * i128::from(burst);
        Bucket { rate, level_max, level: level_max, at: now, catches_up: 0 }
    }

    /// Changes rate and burst. The level, or the debt, is kept within the new bounds.
    pub fn replaced(self, rate: u64, burst: u64, now: u64) -> Bucket {
        let mut old = self;
        old.refill(now, false);
        let new = Bucket::new(rate, burst, now);
        Bucket { level: old.level.clamp(-new.debt_max(), new.level_max), ..new }
    }

    /// Adds tokens for the time that has passed. `waiting`: something has waited for this bucket meanwhile. For a
    /// moment after that the level may still exceed the maximum: a guest with few requests at a time has none waiting
    /// just after a late wait.
    pub fn refill(&mut self, now: u64, waiting: bool) {
        let Some(passed) = now.checked_sub(self.at).filter(|passed| *passed > 0) else { return };
        self.at = now;
        if waiting {
            self.catches_up = now.saturating_add(CATCH_UP);
        }
        let extra = if now <= self.catches_up { self.rate * i128::from(CATCH_UP) } else { 0 };
        self.level = (self.level + i128::from(passed) * self.rate).min(self.level_max + extra);
    }

    /// Returns whether `units` may pass now. A request larger than the bucket may pass when that is full, and leaves a
    /// debt.
    pub fn allows(&self, units: u64) -> bool {
        units == 0 || self.level >= self.needed(units)
    }

    /// Takes the cost of `units`.
    pub fn take(&mut self, units: u64) {
        self.level -= i128::from(units) * UNIT;
    }

    /// Takes the cost of `units` whether allowed or not, up to the largest debt.
    pub fn take_anyway(&mut self, units: u64) {
        let before = self.level;
        self.take(units);
        self.level = self.level.max(before.min(-self.debt_max()));
    }

    /// Returns the nanoseconds until `units` may pass.
    pub fn wait(&self, units: u64) -> u64 {
        if self.allows(units) {
            return 0;
        }
        let lacking = self.needed(units) - self.level;
        u64::try_from((lacking + self.rate - 1) / self.rate).unwrap_or(u64::MAX)
    }

    /// Returns the level in whole units, for a successor.
    pub fn units(&self) -> i64 {
        i64::try_from(self.level.div_euclid(UNIT)).unwrap_or(i64::MIN)
    }

    /// Continues with the level of another process.
    pub fn resume(&mut self, units: i64) {
        self.level = (i128::from(units) * UNIT).clamp(-self.debt_max(), self.level_max);
    }

    fn needed(&self, units: u64) -> i128 {
        (i128::from(units) * UNIT).min(self.level_max)
    }

    fn debt_max(&self) -> i128 {
        self.rate * i128::from(DEBT_MAX)
    }
}

#[cfg(test)]
mod test {
    use super::*;

    const SECOND: u64 = 1_000_000_000;
    const MS: u64 = 1_000_000;

    #[test]
    fn a_full_bucket_gives_its_burst_and_then_its_rate() {
        let mut bucket = Bucket::new(1000, 10 * MS, 0);
        let burst = (0..20).take_while(|_| bucket.allows(1).then(|| bucket.take(1)).is_some()).count();
        assert_eq!((burst, bucket.wait(1), bucket.wait(5)), (10, MS, 5 * MS));
        bucket.refill(MS - 1, true);
        assert!(!bucket.allows(1));
        assert_eq!(bucket.wait(1), 1);
        bucket.refill(MS, true);
        assert!(bucket.allows(1));
    }

    #[test]
    fn a_request_larger_than_the_burst_passes_and_leaves_a_debt() {
        let mut bucket = Bucket::new(1000, 10 * MS, 0);
        assert!(bucket.allows(1_000));
        bucket.take(1_000);
        assert_eq!(bucket.wait(1), 991 * MS);
        assert_eq!(bucket.wait(1_000), SECOND);
        assert!(bucket.allows(0), "what costs nothing never waits");
    }

    #[test]
    fn an_unused_hour_saves_up_the_burst_only() {
        let mut bucket = Bucket::new(1000, 10 * MS, 0);
        bucket.take(10);
        bucket.refill(3600 * SECOND, false);
        assert_eq!(bucket.units(), 10);
        bucket.take(10);
        bucket.refill(7200 * SECOND, true);
        assert_eq!(bucket.units(), 110, "a wait that ended late");
        bucket.refill(7200 * SECOND + CATCH_UP, false);
        assert_eq!(bucket.units(), 110);
        bucket.refill(7200 * SECOND + CATCH_UP + 1, false);
        assert_eq!(bucket.units(), 10);
    }

    #[test]
    fn a_clock_that_goes_back_brings_nothing_and_stops_nothing() {
        let mut bucket = Bucket::new(1000, 10 * MS, 5 * SECOND);
        bucket.take(10);
        bucket.refill(SECOND, true);
        assert_eq!((bucket.units(), bucket.wait(1)), (0, MS));
        bucket.refill(5 * SECOND + MS, true);
        assert!(bucket.allows(1));
        bucket.refill(u64::MAX, false);
        assert_eq!(bucket.units(), 10);
    }

    #[test]
    fn another_rate_keeps_the_level_and_bounds_the_debt() {
        let mut bucket = Bucket::new(1000, 1000 * MS, 0);
        bucket.take(700);
        assert_eq!(bucket.replaced(2000, 1000 * MS, 0).units(), 300);
        assert_eq!(bucket.replaced(100, 1000 * MS, 0).units(), 100);
        bucket.take(100_000);
        assert_eq!(bucket.replaced(10, 1000 * MS, 0).wait(1), 1100 * MS);
    }

    #[test]
    fn unlimited_requests_leave_a_debt_of_a_second_at_most() {
        let mut bucket = Bucket::new(10, 100 * MS, 0);
        (0..1000).for_each(|_| bucket.take_anyway(1));
        assert_eq!((bucket.units(), bucket.wait(1)), (-10, 1100 * MS));
        let mut next = Bucket::new(10, 100 * MS, 0);
        next.resume(bucket.units());
        assert_eq!(next.wait(1), 1100 * MS);
    }

    #[test]
    fn the_largest_numbers_do_not_overflow() {
        let mut bucket = Bucket::new(1 << 50, 3600 * SECOND, 0);
        bucket.take(u64::MAX);
        bucket.refill(u64::MAX, true);
        bucket.take_anyway(u64::MAX);
        assert!(bucket.wait(u64::MAX) > 0);
    }
}
