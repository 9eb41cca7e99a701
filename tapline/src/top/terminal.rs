//! The terminal of `tapline top`: set up, and restored however the process ends.
//!
//! It knows terminals and signals, and nothing about what is shown. Invariant: the terminal is as it was after q, after
//! SIGINT, SIGTERM and SIGHUP, after an error, and after a panic.

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

use super::Wanted;
use super::layers::Layers;
use super::names::Names;
use super::pages::Pages;
use super::screen::{Asked, Screen};

/// After how long signals and names that have come are looked for.
const LOOKED: Duration = Duration::from_millis(100);
/// The first interval is shorter: so long nothing is known but what is in flight.
const FIRST: Duration = Duration::from_millis(500);

/// The terminal's settings before it was changed.
static BEFORE: OnceLock<Termios> = OnceLock::new();
/// Whether it is changed now.
static CHANGED: AtomicBool = AtomicBool::new(false);

/// Restores the terminal, if it is changed. It takes no lock, since a panic may hold any; that is why it is not done
/// with the library that has made the changes.
pub fn restore() {
    if !CHANGED.swap(false, Ordering::SeqCst) {
        return;
    }
    // The alternate screen is left, and the cursor shown. If that fails, there is no terminal any more.
    rustix::io::write(rustix::stdio::stdout(), b"\x1b[?1049l\x1b[?25h\x1b[0m").map(drop).unwrap_or_default();
    if let Some(before) = BEFORE.get() {
        tcsetattr(rustix::stdio::stdin(), OptionalActions::Flush, before).unwrap_or_default();
    }
}

/// Restores the terminal when it is dropped.
struct Restored;

impl Drop for Restored {
    fn drop(&mut self) {
        restore();
    }
}

/// Shows the screen until somebody quits.
pub fn run(
    wanted: Wanted,
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
    let _restored = Restored;
    let mut terminal = change().map_err(failed)?;
    let mut next = Instant::now() + interval.min(FIRST);
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
        if !event::poll(next.saturating_duration_since(Instant::now()).min(LOOKED)).map_err(failed)? {
            continue;
        }
        match event::read().map_err(failed)? {
            Event::Key(key) if key.kind != KeyEventKind::Release => match screen.key(key) {
                Asked::Quit => return Ok(()),
                Asked::Draw => draw = true,
            },
            Event::Resize(..) => draw = true,
            _ => {}
        }
    }
    Ok(())
}

fn change() -> io::Result<Terminal<CrosstermBackend<Stdout>>> {
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

    /// The part of the other test that runs in a child process, in a terminal; does nothing in this one.
    #[test]
    fn inside() {
        if std::env::var_os(ENVIRONMENT).is_none() {
            return;
        }
        crate::panics::abort_on_panic(restore);
        let _terminal = change().unwrap();
        panic!("while the screen is shown");
    }
}
