//! Progress shown on the terminal: one line per step, with the seconds since the start.
//!
//! A live line is overwritten by the next line on a terminal, and shown less often elsewhere.

use std::cell::Cell;
use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

/// Minimum interval between live lines where they cannot be overwritten.
const LIVE_INTERVAL: Duration = Duration::from_secs(3);

pub struct Progress {
    started: Instant,
    terminal: bool,
    live: Cell<bool>,
    unread: Cell<bool>,
    last_live: Cell<Option<Instant>>,
}

impl Progress {
    pub fn start() -> Self {
        let terminal = std::io::stdout().is_terminal();
        Self {
            started: Instant::now(),
            terminal,
            live: Cell::new(false),
            unread: Cell::new(false),
            last_live: Cell::new(None),
        }
    }

    pub fn elapsed(&self) -> Duration {
        self.started.elapsed()
    }

    /// Begins the next step.
    pub fn step(&self, text: &str) {
        self.line(&format!("== {text}"));
    }

    /// Shows a part of the step that is in progress or done.
    pub fn detail(&self, text: &str) {
        self.line(&format!("   {text}"));
    }

    /// Shows a claim that was checked and holds.
    pub fn holds(&self, claim: &str) {
        self.line(&format!("   ok: {claim}"));
    }

    /// Shows the progress of the current part.
    pub fn live(&self, text: &str) {
        if self.terminal {
            let short: String = text.chars().take(100).collect();
            self.write(&format!("\r\x1b[K{} ...{short}", self.clock()));
            self.live.set(true);
        } else if self.last_live.get().is_none_or(|last| last.elapsed() >= LIVE_INTERVAL) {
            self.line(&format!("      {text}"));
            self.last_live.set(Some(Instant::now()));
        }
    }

    fn line(&self, text: &str) {
        let over = if self.live.replace(false) { "\r\x1b[K" } else { "" };
        self.write(&format!("{over}{} {text}\n", self.clock()));
    }

    fn clock(&self) -> String {
        format!("[{:6.1}s]", self.elapsed().as_secs_f64())
    }

    fn write(&self, text: &str) {
        if self.unread.get() {
            return;
        }
        let mut stdout = std::io::stdout().lock();
        // If the reader has gone (`| head`), only the progress is lost; the result is in the exit status.
        self.unread.set(stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()).is_err());
    }
}
