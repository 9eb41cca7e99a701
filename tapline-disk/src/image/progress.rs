//! The progress of a long job on stderr: a bar on a terminal, occasional lines in a log, or a JSON line per percent for
//! a daemon that has passed us our files.
//!
//! It knows only bytes and time, and nothing about the job. It prints nothing for short jobs.

use std::collections::VecDeque;
use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

use control::size::readable;
use disk::size::on_disk;

use crate::files::Files;

/// Often enough to look alive, rarely enough to cost nothing.
const BAR_EVERY: Duration = Duration::from_millis(100);
const LINE_EVERY: Duration = Duration::from_secs(5);
/// The rate is measured over these last seconds, because it predicts the remaining time.
const RATE_OVER: Duration = Duration::from_secs(5);
const BAR_WIDTH: u64 = 30;

/// The progress of one job.
pub struct Progress {
    title: &'static str,
    total: u64,
    done: u64,
    started: Instant,
    printed: Option<Instant>,
    /// Times and the bytes done by then, oldest first; covers [`RATE_OVER`].
    samples: VecDeque<(Duration, u64)>,
    output: Output,
    /// The last percentage that was sent to the daemon.
    sent: Option<u64>,
    /// Whether the total counts steps, in thousandths, and not bytes.
    steps: bool,
}

/// The count of one step, so that less than one step per second has a rate.
const STEP: u64 = 1000;

/// The kind of output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Output {
    Terminal,
    Log,
    Daemon,
}

impl Progress {
    /// Starts the progress of a job on `total` bytes.
    pub fn new(files: &Files, title: &'static str, total: u64) -> Progress {
        Progress {
            title,
            total,
            done: 0,
            started: Instant::now(),
            printed: None,
            samples: VecDeque::from([(Duration::ZERO, 0)]),
            output: match files.are_handed() {
                true => Output::Daemon,
                false if std::io::stderr().is_terminal() => Output::Terminal,
                false => Output::Log,
            },
            sent: None,
            steps: false,
        }
    }

    /// Starts the progress of a job of `steps` steps, which take about the same time each.
    pub fn of_steps(files: &Files, title: &'static str, steps: usize) -> Progress {
        let total = on_disk(steps) * STEP;
        Progress { steps: true, ..Progress::new(files, title, total) }
    }

    /// Sets the number of steps done.
    pub fn step(&mut self, done: usize) {
        self.reach(on_disk(done) * STEP);
    }

    /// Adds `bytes` to those done.
    pub fn advance(&mut self, bytes: u64) {
        self.reach(self.done + bytes);
    }

    /// Sets the number of bytes done.
    pub fn reach(&mut self, done: u64) {
        self.done = done.min(self.total);
        let every = match self.output {
            Output::Terminal => BAR_EVERY,
            Output::Log => LINE_EVERY,
            Output::Daemon => return self.send(),
        };
        let now = Instant::now();
        if now.duration_since(self.printed.unwrap_or(self.started)) >= every {
            self.printed = Some(now);
            self.sample(now.duration_since(self.started));
            self.print();
        }
    }

    /// Ends the progress, whether or not the job succeeded: clears the terminal's line for further output.
    pub fn finish(self) {
        if self.output == Output::Terminal && self.printed.is_some() {
            emit("\r\x1b[K");
        }
    }

    /// Sends each percentage once. The number of lines thus depends on bytes only, not on time.
    fn send(&mut self) {
        let hundredth = Some(share(self.done, self.total, 100));
        if std::mem::replace(&mut self.sent, hundredth) != hundredth {
            let line = control::Progress { doing: self.title.into(), done: self.done, len: self.total };
            emit(&serde_json::to_string(&line).map(|line| line + "\n").unwrap_or_default());
        }
    }

    fn sample(&mut self, elapsed: Duration) {
        self.samples.push_back((elapsed, self.done));
        while self.samples.get(1).is_some_and(|&(at, _)| at + RATE_OVER <= elapsed) {
            self.samples.pop_front();
        }
    }

    fn print(&self) {
        match self.output {
            Output::Terminal => {
                emit(&format!("\r{} {} {}\x1b[K", self.title, bar(self.done, self.total), self.figures()))
            }
            _ => emit(&format!("{}: {}\n", self.title, self.figures())),
        }
    }

    fn figures(&self) -> String {
        let percent = share(self.done, self.total, 100);
        if self.steps {
            let left = rate(&self.samples).map(|rate| (self.total - self.done) / rate);
            let left = left.map(|left| format!(", {} left", clock(left))).unwrap_or_default();
            return format!("{percent:3} % of {} steps{left}", self.total / STEP);
        }
        let mut text = format!("{percent:3} % of {}", readable(self.total));
        if let Some(rate) = rate(&self.samples) {
            let left = (self.total - self.done).checked_div(rate).unwrap_or(0);
            text.push_str(&format!(", {}/s, {} left", readable(rate), clock(left)));
        }
        text
    }
}

/// Returns bytes per second over the samples; `None` while nothing is done.
fn rate(samples: &VecDeque<(Duration, u64)>) -> Option<u64> {
    let (&(from, before), &(to, after)) = (samples.front()?, samples.back()?);
    let ms = u64::try_from(to.checked_sub(from)?.as_millis()).ok()?;
    let rate = after.checked_sub(before)?.saturating_mul(1000).checked_div(ms)?;
    (rate > 0).then_some(rate)
}

/// Scales `done` of `total` to `parts`.
fn share(done: u64, total: u64, parts: u64) -> u64 {
    let scaled = u128::from(done) * u128::from(parts);
    scaled.checked_div(u128::from(total)).and_then(|share| u64::try_from(share).ok()).unwrap_or(parts)
}

fn bar(done: u64, total: u64) -> String {
    let filled = share(done, total, BAR_WIDTH);
    let cell = |at| if at < filled { '█' } else { '·' };
    (0..BAR_WIDTH).map(cell).collect()
}

/// Formats a duration for people.
pub fn clock(seconds: u64) -> String {
    match seconds {
        0..60 => format!("{seconds} s"),
        60..3600 => format!("{}:{:02} min", seconds / 60, seconds % 60),
        _ => format!("{}:{:02} h", seconds / 3600, seconds % 3600 / 60),
    }
}

fn emit(text: &str) {
    let mut stderr = std::io::stderr();
    // A job does not fail because its progress cannot be printed.
    stderr.write_all(text.as_bytes()).and_then(|()| stderr.flush()).unwrap_or_default();
}

#[cfg(test)]
mod test {
    use super::*;

    fn half_way() -> Progress {
        let mut progress = Progress::new(&Files::of_system(), "converting", 10 << 30);
        progress.done = 5 << 30;
        progress.sample(Duration::from_secs(10));
        progress
    }

    #[test]
    fn progress_shows_percentage_rate_and_remaining_time() {
        assert_eq!(half_way().figures(), " 50 % of 10 GiB, 512 MiB/s, 10 s left");
    }

    #[test]
    fn progress_in_steps_shows_the_remaining_time() {
        let mut progress = Progress::of_steps(&Files::of_system(), "measuring", 40);
        progress.done = 10 * STEP;
        progress.sample(Duration::from_secs(20));
        assert_eq!(progress.figures(), " 25 % of 40 steps, 1:00 min left");
    }

    #[test]
    fn the_rate_is_that_of_the_last_seconds() {
        let mut progress = half_way();
        progress.sample(Duration::from_secs(11));
        progress.done += 1 << 20;
        progress.sample(Duration::from_secs(12));
        progress.sample(Duration::from_secs(16));
        assert_eq!(rate(&progress.samples), Some((1 << 20) / 5));
    }

    #[test]
    fn an_empty_job_is_complete_and_has_no_rate() {
        let progress = Progress::new(&Files::of_system(), "converting", 0);
        assert_eq!(progress.figures(), "100 % of 0 B");
        assert_eq!(bar(0, 0), "█".repeat(30));
    }

    #[test]
    fn times_are_short() {
        assert_eq!((clock(59), clock(61), clock(3660)), ("59 s".into(), "1:01 min".into(), "1:01 h".into()));
    }
}
