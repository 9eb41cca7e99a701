//! Sets up the terminal for `tapline top`, and restores it however the process ends.
//!
//! Invariant: the terminal is restored after q, SIGINT, SIGTERM, SIGHUP, an error, and a panic.

use std::io::{self, Stdout};
use std::sync::Arc;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use api::Problem;
use ratatui::Terminal;
use ratatui::backend::CrosstermBackend;
use ratatui::crossterm::event::{self, Event, KeyEventKind};
use ratatui::crossterm::terminal::{EnterAlternateScreen, enable_raw_mode};
use ratatui::crossterm::{cursor, execute};
use rustix::termios::{OptionalActions, Termios, tcgetattr, tcsetattr};

use super::DiskSelection;
use super::layers::Layers;
use super::names::Names;
use super::pages::Pages;
use super::screen::{KeyResult, Screen};

/// Interval at which signals and replies are checked for.
const POLL_INTERVAL: Duration = Duration::from_millis(100);
/// Length of the first interval, before which only requests in flight can be shown.
const FIRST_INTERVAL: Duration = Duration::from_millis(500);

/// The terminal's settings before the change.
static BEFORE: OnceLock<Termios> = OnceLock::new();
/// Whether the terminal is changed now.
static CHANGED: AtomicBool = AtomicBool::new(false);

/// Restores the terminal if it is changed. Takes no lock, because a panic may hold any; hence the library that has
/// changed the terminal is not used.
pub fn restore() {
    if !CHANGED.swap(false, Ordering::SeqCst) {
        return;
    }
    // Leaves the alternate screen and shows the cursor. If that fails, the terminal is gone.
    rustix::io::write(rustix::stdio::stdout(), b"\x1b[?1049l\x1b[?25h\x1b[0m").map(drop).unwrap_or_default();
    if let Some(before) = BEFORE.get() {
        tcsetattr(rustix::stdio::stdin(), OptionalActions::Flush, before).unwrap_or_default();
    }
}

/// Restores the terminal when it is dropped.
struct RestoreOnDrop;

impl Drop for RestoreOnDrop {
    fn drop(&mut self) {
        restore();
    }
}

/// Shows the screen until the user quits or a signal arrives.
pub fn run(
    wanted: DiskSelection,
    interval: Duration,
    sort: usize,
    pages: &mut Pages,
    names: &mut Names,
    layers: &mut Layers,
) -> Result<(), Problem> {
    let failed = |error: io::Error| Problem::failed("show the screen", error);
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM, signal_hook::consts::SIGHUP] {
        signal_hook::flag::register(signal, Arc::clone(&stop)).map_err(failed)?;
    }
    let colour = std::env::var_os("NO_COLOR").is_none_or(|no| no.is_empty());
    let mut screen = Screen::new(wanted, interval, sort, colour);
    let _restore = RestoreOnDrop;
    let mut terminal = set_up().map_err(failed)?;
    let mut next = Instant::now() + interval.min(FIRST_INTERVAL);
    let mut draw = true;
    while !stop.load(Ordering::Relaxed) {
        if Instant::now() >= next {
            next = Instant::now() + interval;
            if !screen.is_frozen() {
                names.take();
                pages.round();
                if let Some(disk) = screen.disk() {
                    layers.ask(pages, std::slice::from_ref(disk));
                }
                draw = true;
            }
        }
        draw |= !screen.is_frozen() && layers.take();
        if draw {
            terminal.draw(|frame| screen.draw(frame, pages, names, layers)).map_err(failed)?;
            draw = false;
        }
        if !event::poll(next.saturating_duration_since(Instant::now()).min(POLL_INTERVAL)).map_err(failed)? {
            continue;
        }
        match event::read().map_err(failed)? {
            Event::Key(key) if key.kind != KeyEventKind::Release => match screen.key(key) {
                KeyResult::Quit => return Ok(()),
                KeyResult::Draw => draw = true,
            },
            Event::Resize(..) => draw = true,
            _ => {}
        }
    }
    Ok(())
}

fn set_up() -> io::Result<Terminal<CrosstermBackend<Stdout>>> {
    let before = tcgetattr(rustix::stdio::stdin())?;
    BEFORE.get_or_init(|| before);
    CHANGED.store(true, Ordering::SeqCst);
    enable_raw_mode()?;
    execute!(io::stdout(), EnterAlternateScreen, cursor::Hide)?;
    Terminal::new(CrosstermBackend::new(io::stdout()))
}

#[cfg(test)]
mod test {
    use std::process::Command;

    use super::*;

    const ENVIRONMENT: &str = "TAPLINE_TEST_TOP_PANIC";

    #[test]
    fn a_panic_restores_the_terminal_before_it_is_reported() {
        let room = tempfile::tempdir().unwrap();
        let command = format!(
            "stty -g >before; '{}' top::terminal::test::inside --exact --nocapture; stty -g >after",
            std::env::current_exe().unwrap().display()
        );
        let mut script = Command::new("script");
        script.args(["--quiet", "--command", &command, "/dev/null"]).current_dir(room.path());
        let output = script.env(ENVIRONMENT, "1").env("RUST_BACKTRACE", "0").output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        let left = text.find("\x1b[?1049l").unwrap_or_else(|| panic!("not left: {text:?}"));
        assert!(text.find("PANIC").is_some_and(|reported| reported > left), "{text:?}");
        let file = |name: &str| std::fs::read_to_string(room.path().join(name)).unwrap();
        assert_eq!(file("before"), file("after"));
    }

    /// Panics in the child process of the other test, in a terminal; does nothing otherwise.
    #[test]
    fn inside() {
        if std::env::var_os(ENVIRONMENT).is_none() {
            return;
        }
        crate::panics::abort_on_panic(restore);
        let _terminal = set_up().unwrap();
        panic!("while the screen is shown");
    }
}
