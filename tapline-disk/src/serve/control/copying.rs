//! A merge's copying, chunk by chunk, at the pace of [`super::rate_limiter`].

use std::os::fd::AsFd;

use control::Kind;
use disk::{MergeState, Status};

use super::rate_limiter::RateLimiter;
use super::work::Work;
use crate::process::failure::Failure;
use crate::serve::own_keys::MERGE_TIMER;

/// The chunks started in one iteration, so that the guest gets its share.
const TURN: usize = 4;

/// The copying of a merge.
#[derive(Debug)]
pub struct Copying {
    rate_limiter: RateLimiter,
    /// Whether a client has paused or cancelled it.
    pub stopped: bool,
    /// Whether it was cancelled.
    pub cancelled: bool,
    /// The chunk in progress: the bytes copied before it, and the number of requests received.
    chunk: Option<(u64, u64)>,
    /// Whether there is more to do without being woken.
    pub hungry: bool,
    /// The number of bytes copied.
    pub copied: u64,
    /// The number of bytes of the disk that are done.
    pub done: u64,
    /// The size of the disk.
    pub len: u64,
}

impl Copying {
    /// Prepares the copying.
    pub fn new(rate: Option<u64>, work: &mut Work<'_>) -> Result<Copying, Failure> {
        let timer = |error| Failure::failed("create a timer", &error);
        let rate_limiter = RateLimiter::new(rate, work.clock()).map_err(timer)?;
        work.engine.watch(rate_limiter.as_fd(), false, MERGE_TIMER.0).map_err(timer)?;
        let len = work.geometry.len;
        let (stopped, cancelled, hungry) = (false, false, false);
        Ok(Copying { rate_limiter, stopped, cancelled, chunk: None, hungry, copied: 0, done: 0, len })
    }

    /// Starts chunks, as the rate limiter allows; returns whether everything is copied.
    pub fn advance(&mut self, work: &mut Work<'_>) -> Result<bool, Failure> {
        self.hungry = false;
        for _ in 0..TURN {
            let Some(progress) = work.disk.merge() else {
                return Err(Failure::of(Kind::Cancelled, "the merge was cancelled"));
            };
            (self.copied, self.done, self.len) = (progress.copied, progress.done, progress.len);
            if let Some((copied, came)) = self.chunk.take_if(|_| !progress.busy) {
                let guest = work.disk.in_flight() > 0 || work.stats.come() != came;
                self.rate_limiter.end(work.clock(), progress.copied - copied, guest);
            }
            if self.cancelled {
                let refusal =
                    Failure::of(Kind::Cancelled, "the merge was cancelled; what has been merged stays merged");
                return Err(refusal.advise("request it again to continue where it stopped"));
            }
            match progress.state {
                MergeState::Copied => return Ok(true),
                MergeState::Failed(status) => return Err(failed(status)),
                MergeState::Running => {}
            }
            let may = !progress.busy && !self.stopped && !work.paused;
            let timer = |error| Failure::failed("set a timer", &error);
            if !may || !self.rate_limiter.allows(work.clock()).map_err(timer)? {
                return Ok(false);
            }
            self.rate_limiter.begin(work.clock());
            self.chunk = Some((progress.copied, work.stats.come()));
            if !work.disk.step_merge(work.engine) {
                self.chunk = None;
                return Ok(false);
            }
        }
        self.hungry = true;
        Ok(false)
    }
}

/// Explains why a merge cannot continue.
pub fn failed(status: Status) -> Failure {
    match status {
        Status::NoSpace => Failure::of(Kind::NoSpace, "the merge stopped: no space is left for its target").advise(
            "the chain is valid as it is; free some space and request the merge again to continue where it stopped",
        ),
        _ => Failure::of(Kind::Failed, "the merge stopped: the storage failed")
            .advise("the chain is valid as it is; see the kernel log"),
    }
}
