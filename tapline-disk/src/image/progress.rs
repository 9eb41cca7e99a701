//! The progress of a long job on stderr: a bar on a terminal, occasional lines in a log, or a JSON line per percent for
//! a daemon that has passed us our files.
//!
//! It knows only bytes and time, and nothing about the job. It prints nothing for short jobs.

use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

use control::pace::{Pace, clock};
use disk::size::on_disk;

use crate::files::Files;

/// Often enough to look alive, rarely enough to cost nothing.
const BAR_EVERY: Duration = Duration::from_millis(100);
const LINE_EVERY: Duration = Duration::from_secs(5);

/// The progress of one job.
pub struct Progress {
    title: &'static str,
    pace: Pace,
    started: Instant,
    printed: Option<Instant>,
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
            pace: Pace::new(total),
            started: Instant::now(),
            printed: None,
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
        self.reach(self.pace.done() + bytes);
    }

    /// Sets the number of bytes done.
    pub fn reach(&mut self, done: u64) {
        self.pace.reach(done);
        let every = match self.output {
            Output::Terminal => BAR_EVERY,
            Output::Log => LINE_EVERY,
            Output::Daemon => return self.send(),
        };
        let now = Instant::now();
        if now.duration_since(self.printed.unwrap_or(self.started)) >= every {
            self.printed = Some(now);
            self.pace.sample(now.duration_since(self.started));
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
        let hundredth = Some(self.pace.share(100));
        if std::mem::replace(&mut self.sent, hundredth) != hundredth {
            let line = control::Progress { doing: self.title.into(), done: self.pace.done(), len: self.pace.total() };
            emit(&serde_json::to_string(&line).map(|line| line + "\n").unwrap_or_default());
        }
    }

    fn print(&self) {
        match self.output {
            Output::Terminal => emit(&format!("\r{} {} {}\x1b[K", self.title, self.pace.bar(), self.figures())),
            _ => emit(&format!("{}: {}\n", self.title, self.figures())),
        }
    }

    fn figures(&self) -> String {
        if !self.steps {
            return self.pace.figures();
        }
        let left = self.pace.left().map(|left| format!(", {} left", clock(left))).unwrap_or_default();
        format!("{:3} % of {} steps{left}", self.pace.share(100), self.pace.total() / STEP)
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

    #[test]
    fn progress_in_steps_shows_the_remaining_time() {
        let mut progress = Progress::of_steps(&Files::of_system(), "measuring", 40);
        progress.pace.reach(10 * STEP);
        progress.pace.sample(Duration::from_secs(20));
        assert_eq!(progress.figures(), " 25 % of 40 steps, 1:00 min left");
    }
}
