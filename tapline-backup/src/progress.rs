//! The progress of a long command on standard error: a bar on a terminal, occasional lines in a log, or lines of JSON:
//! one for each percent, and one every few seconds.
//!
//! It prints nothing for short commands, but for JSON.

use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

use backup::{Control, Statistics};
use control::pace::Pace;
use control::size::readable;
use serde_json::json;

use crate::stop;

const BAR_EVERY: Duration = Duration::from_millis(100);
const LINE_EVERY: Duration = Duration::from_secs(5);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Output {
    Terminal,
    Log,
    Json,
}

/// The progress of one command.
pub struct Progress {
    title: &'static str,
    pace: Pace,
    started: Instant,
    printed: Option<Instant>,
    percent: Option<u64>,
    output: Output,
}

impl Progress {
    /// A command on `total` bytes.
    pub fn new(title: &'static str, total: u64, is_json: bool) -> Progress {
        let output = match is_json {
            true => Output::Json,
            false if std::io::stderr().is_terminal() => Output::Terminal,
            false => Output::Log,
        };
        Progress { title, pace: Pace::new(total), started: Instant::now(), printed: None, percent: None, output }
    }

    /// Runs a step that reports its progress here, until it ends or is cancelled.
    pub fn during<T>(
        mut self,
        run: impl FnOnce(&mut Control<'_>) -> Result<T, backup::Error>,
    ) -> Result<T, backup::Error> {
        let mut report = |statistics: &Statistics| self.report(statistics);
        let result = run(&mut Control { cancel: stop::cancelled(), progress: &mut report });
        if self.output == Output::Terminal && self.printed.is_some() {
            emit("\r\x1b[K");
        }
        result
    }

    fn report(&mut self, statistics: &Statistics) {
        self.pace.reach(statistics.done);
        let now = Instant::now();
        let every = match self.output {
            Output::Terminal => BAR_EVERY,
            Output::Log => LINE_EVERY,
            Output::Json => {
                self.pace.sample(now.duration_since(self.started));
                return self.send(statistics);
            }
        };
        if now.duration_since(self.printed.unwrap_or(self.started)) >= every {
            self.printed = Some(now);
            self.pace.sample(now.duration_since(self.started));
            let (title, figures, costs) = (self.title, self.pace.figures(), costs(statistics));
            match self.output {
                Output::Terminal => emit(&format!("\r{title} {} {figures}{costs}\x1b[K", self.pace.bar())),
                _ => emit(&format!("{title}: {figures}{costs}\n")),
            }
        }
    }

    fn send(&mut self, statistics: &Statistics) {
        let (percent, now) = (Some(self.pace.share(100)), Instant::now());
        let is_recent = self.printed.is_some_and(|printed| now.duration_since(printed) < LINE_EVERY);
        if std::mem::replace(&mut self.percent, percent) == percent && is_recent {
            return;
        }
        self.printed = Some(now);
        let line = json!({
            "doing": self.title,
            "done": self.pace.done(),
            "len": self.pace.total(),
            "rate": self.pace.rate(),
            "left": self.pace.left(),
            "holes": statistics.holes,
            "unchanged": statistics.unchanged,
            "deduplicated": statistics.deduplicated,
            "sent": statistics.sent,
        });
        emit(&format!("{line}\n"));
    }
}

/// Holes, deduplicated and sent bytes, where there are any.
fn costs(statistics: &Statistics) -> String {
    let parts = [
        ("holes", statistics.holes),
        ("unchanged", statistics.unchanged),
        ("deduplicated", statistics.deduplicated),
        ("sent", statistics.sent),
    ];
    let named = |&(name, bytes): &(&str, u64)| format!(", {} {name}", readable(bytes));
    parts.iter().filter(|(_, bytes)| *bytes > 0).map(named).collect()
}

fn emit(text: &str) {
    let mut stderr = std::io::stderr();
    // A command does not fail because its progress cannot be printed.
    stderr.write_all(text.as_bytes()).and_then(|()| stderr.flush()).unwrap_or_default();
}
