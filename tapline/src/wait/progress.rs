//! Shows a task's progress on stderr: a bar on a terminal, otherwise one line per step.

use std::io::IsTerminal;
use std::time::{Duration, Instant};

use api::{Task, Transfer};
use control::pace::clock;
use control::size::readable;
use indicatif::{ProgressBar, ProgressStyle};

use crate::output::say;
use crate::word;

/// The bar's total number of units.
const WHOLE: u32 = 1000;
/// Interval at which the bar is redrawn, so that its clock advances.
const TICK: Duration = Duration::from_millis(200);

/// Tasks that end sooner than this show no bar, which would only flash.
const QUICK: Duration = Duration::from_millis(500);

/// The progress of a task.
pub enum Progress {
    /// A bar on a terminal, not drawn yet.
    Soon(Instant),
    /// A bar on a terminal.
    Bar(ProgressBar),
    /// Lines for a log; the last line that was printed.
    Lines(String),
}

impl Progress {
    /// Creates the progress; nothing is shown yet.
    pub fn new() -> Progress {
        if std::io::stderr().is_terminal() { Progress::Soon(Instant::now()) } else { Progress::Lines(String::new()) }
    }

    /// Creates the bar with its first values: an update right after the first drawing might be skipped.
    fn bar(line: String, share: f64) -> Progress {
        let bar = ProgressBar::new(WHOLE.into()).with_message(line).with_position(parts(share));
        if let Ok(style) = ProgressStyle::with_template("{msg} [{bar:30}] {percent:>3} % {elapsed}") {
            bar.set_style(style.progress_chars("=> "));
        }
        // Drawn now: the thread that draws it later may not run before the task ends.
        bar.tick();
        bar.enable_steady_tick(TICK);
        Progress::Bar(bar)
    }

    /// Shows the progress of a task.
    pub fn show(&mut self, task: &Task) {
        if task.state.is_over() && !matches!(self, Progress::Lines(_)) {
            return self.finish();
        }
        let figures = match self {
            Progress::Lines(_) => String::new(),
            Progress::Soon(_) | Progress::Bar(_) => task.transfer.as_ref().map(figures).unwrap_or_default(),
        };
        self.show_share(line(task) + &figures, task.progress);
    }

    /// Shows a description and the completed share, from 0 to 1.
    pub fn show_share(&mut self, line: String, share: f64) {
        match self {
            Progress::Soon(begun) if begun.elapsed() > QUICK => *self = Progress::bar(line, share),
            Progress::Soon(_) => {}
            Progress::Bar(bar) => {
                bar.set_message(line);
                bar.set_position(parts(share));
            }
            Progress::Lines(last) => {
                if *last != line {
                    say(&format!("{line}\n"));
                    *last = line;
                }
            }
        }
    }

    /// Removes the bar.
    pub fn finish(&self) {
        if let Progress::Bar(bar) = self {
            bar.finish_and_clear();
        }
    }

    /// Prints a message next to the progress.
    pub fn say(&self, text: &str) {
        match self {
            Progress::Bar(bar) => bar.println(text),
            Progress::Soon(_) | Progress::Lines(_) => say(&format!("{text}\n")),
        }
    }
}

fn line(task: &Task) -> String {
    let state = word::of(&task.state);
    match &task.step {
        Some(step) if !task.state.is_over() => {
            let why = task.problem.as_ref().map(|problem| format!("; {problem}")).unwrap_or_default();
            format!("{}: {state}, {step}{why}", task.verb)
        }
        _ => format!("{}: {state}", task.verb),
    }
}

/// The rate of a transfer, the time left, and what is not read or not sent.
pub fn figures(transfer: &Transfer) -> String {
    let Transfer { rate, left, holes, unchanged, deduplicated, sent, .. } = *transfer;
    let rate = rate.map(|rate| format!(", {}/s", readable(rate))).unwrap_or_default();
    let left = left.map(|left| format!(", {} left", clock(left))).unwrap_or_default();
    let bytes = [("holes", holes), ("unchanged", unchanged), ("deduplicated", deduplicated), ("sent", sent)];
    let some = bytes.into_iter().filter(|(_, bytes)| *bytes > 0);
    let bytes: String = some.map(|(name, bytes)| format!(", {} {name}", readable(bytes))).collect();
    rate + &left + &bytes
}

/// Converts progress to units of [`WHOLE`]. Values outside of 0 to 1 are clamped; NaN counts as 0.
fn parts(progress: f64) -> u64 {
    // The only conversion from a float to an integer that is defined for all values.
    format!("{:.0}", progress.clamp(0.0, 1.0) * f64::from(WHOLE)).parse().unwrap_or(0)
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn progress_is_parts_of_the_whole() {
        assert_eq!((parts(0.0), parts(0.5), parts(1.0)), (0, 500, 1000));
        assert_eq!((parts(-1.0), parts(7.0), parts(f64::NAN)), (0, 1000, 0));
    }
}
