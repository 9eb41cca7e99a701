//! A one-shot timer with a descriptor to be watched.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create, timerfd_settime,
};

/// A one-shot timer, initially not armed.
#[derive(Debug)]
pub struct Timer(OwnedFd);

impl Timer {
    /// A timer on the monotonic clock.
    pub fn new() -> io::Result<Timer> {
        let flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
        Ok(Timer(timerfd_create(TimerfdClockId::Monotonic, flags)?))
    }

    /// Makes it readable after a delay, replacing an earlier setting.
    pub fn set(&self, after: Duration) -> io::Result<()> {
        let it_value = Timespec {
            tv_sec: i64::try_from(after.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: i64::from(after.subsec_nanos()),
        };
        let once = Itimerspec { it_interval: Timespec { tv_sec: 0, tv_nsec: 0 }, it_value };
        timerfd_settime(&self.0, TimerfdTimerFlags::empty(), &once)?;
        Ok(())
    }
}

impl AsFd for Timer {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

#[cfg(test)]
mod test {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};

    use super::*;

    #[test]
    fn it_expires_after_the_delay_and_not_before() {
        let timer = Timer::new().unwrap();
        let readable = |at_most: Option<&Timespec>| poll(&mut [PollFd::new(&timer, PollFlags::IN)], at_most).unwrap();
        let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
        assert_eq!(readable(Some(&at_once)), 0);
        timer.set(Duration::from_secs(3600)).unwrap();
        assert_eq!(readable(Some(&at_once)), 0);
        timer.set(Duration::from_millis(1)).unwrap();
        assert_eq!(readable(None), 1);
    }
}
