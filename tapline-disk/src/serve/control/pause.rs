//! Measures how long a guest was kept waiting while the chain changed.
//!
//! It knows times and nothing else. The pause seen by the guest begins with the first request that arrives while
//! requests are held, and ends with the first completion after they are released; there is none if no request arrived.

use std::time::Duration;

use control::answer;

/// A time during which requests are held, if there is one.
#[derive(Clone, Copy, Debug, Default)]
pub struct Pause {
    held: Option<Duration>,
    first: Option<Duration>,
    released: Option<Duration>,
    answered: Option<Duration>,
}

/// The lengths to report.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Measured {
    /// The pause seen by the guest.
    pub pause: Duration,
    /// How long requests were held.
    pub held: Duration,
}

impl Pause {
    /// Records that requests are held from now on.
    pub fn begin(&mut self, now: Duration) {
        *self = Pause { held: Some(now), ..Pause::default() };
    }

    /// Records that a request has arrived.
    pub fn came(&mut self, now: Duration) {
        if self.held.is_some() && self.released.is_none() && self.first.is_none() {
            self.first = Some(now);
        }
    }

    /// Records that requests are released.
    pub fn end(&mut self, now: Duration) {
        self.released = Some(now);
    }

    /// Records that a request has completed.
    pub fn answered(&mut self, now: Duration) {
        if self.released.is_some() && self.answered.is_none() {
            self.answered = Some(now);
        }
    }

    /// Returns the lengths, once they are known.
    pub fn measured(&self) -> Option<Measured> {
        let held = self.released?.saturating_sub(self.held?);
        let pause = match self.first {
            None => Duration::ZERO,
            Some(first) => self.answered?.saturating_sub(first),
        };
        Some(Measured { pause, held })
    }
}

impl From<Measured> for answer::Pause {
    fn from(Measured { pause, held }: Measured) -> answer::Pause {
        answer::Pause { pause_us: micros(pause), held_us: micros(held) }
    }
}

/// Converts to whole microseconds.
pub fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod test {
    use super::*;

    const fn at(us: u64) -> Duration {
        Duration::from_micros(us)
    }

    #[test]
    fn a_pause_lasts_from_the_first_request_held_to_the_first_answer_after() {
        let mut pause = Pause::default();
        pause.came(at(5));
        pause.begin(at(10));
        pause.answered(at(11));
        pause.came(at(20));
        pause.came(at(25));
        pause.answered(at(30));
        pause.end(at(40));
        assert_eq!(pause.measured(), None);
        pause.answered(at(47));
        pause.answered(at(90));
        assert_eq!(pause.measured(), Some(Measured { pause: at(27), held: at(30) }));
    }

    #[test]
    fn a_guest_without_requests_saw_no_pause() {
        let mut pause = Pause::default();
        assert_eq!(pause.measured(), None);
        pause.begin(at(10));
        pause.end(at(40));
        pause.came(at(41));
        assert_eq!(pause.measured(), Some(Measured { pause: at(0), held: at(30) }));
    }
}
