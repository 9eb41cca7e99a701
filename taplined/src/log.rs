//! The daemon's log: text on standard error, or JSON lines in files of bounded size.
//!
//! Invariant: the daemon keeps running whatever happens to its log, and does not wait for its reader; lost lines are
//! counted (crate `logging`).

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, OnceLock, PoisonError};

use api::{Code, Problem};
use jiff::Timestamp;
use logging::{Lines, Stderr};
use serde_json::json;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::LevelFilter;
use tracing_subscriber::fmt::MakeWriter;

use crate::config::{Config, LogTo};

/// Standard error, for output of the daemon outside its log too.
pub static STDERR: Stderr = Stderr::of("taplined");

/// The log's destination, and the path of its file, used or not.
static FILE: OnceLock<(LogTo, PathBuf)> = OnceLock::new();

/// Checks that the log's level is valid.
pub fn check(config: &Config) -> Result<(), Problem> {
    filter(&config.log.level).map(drop)
}

/// Parses a log level. `tracing` would take an unknown word for the name of a module, and the log would be empty.
fn filter(level: &str) -> Result<EnvFilter, Problem> {
    let refused = |why: String| {
        let advice = "use error, warn, info, debug or trace, or a filter such as info,taplined::plug=debug";
        Problem::new(Code::Invalid, format!("log.level: {why}")).advise(advice)
    };
    // `tracing` would accept the empty word: no log.
    let is_level = |word: &str| !word.is_empty() && word.parse::<LevelFilter>().is_ok();
    for directive in level.split(',').map(str::trim).filter(|directive| !directive.contains(['=', '[', ':'])) {
        if !is_level(directive) && directive != "taplined" {
            return Err(refused(format!("'{directive}' is no level")));
        }
    }
    EnvFilter::try_new(level).map_err(|error| refused(error.to_string()))
}

/// Starts the log.
pub fn start(config: &Config) -> Result<(), Problem> {
    let filter = filter(&config.log.level)?;
    let builder = tracing_subscriber::fmt().with_env_filter(filter);
    let path = config.log_directory.join("taplined.log");
    FILE.get_or_init(|| (config.log.to, path.clone()));
    match config.log.to {
        LogTo::Stderr => builder.with_writer(|| ToStderr).with_ansi(false).init(),
        LogTo::File => {
            let file = Rotating::open(&path, config.log.file_size, config.log.files)
                .map_err(|error| Problem::failed(format_args!("write the log {}", path.display()), error))?;
            builder.json().with_writer(ToFile::new(file)).init();
        }
    }
    Ok(())
}

/// Writes the last line of a daemon that has panicked, to standard error or the log file. Takes no locks, because any
/// may be held.
pub fn say_last(line: &str) {
    let said = STDERR.say_last(line);
    let Some((to, path)) = FILE.get() else { return };
    if said && *to == LogTo::Stderr {
        return;
    }
    let file = File::options().create(true).append(true).open(path);
    // If this fails, there is no way left to report it.
    file.and_then(|mut file| file.write_all(event("ERROR", line).as_bytes())).ok();
}

/// Writes events to standard error. On an error `tracing` would print it, and panic if that fails too.
struct ToStderr;

impl Write for ToStderr {
    fn write(&mut self, lines: &[u8]) -> io::Result<usize> {
        // Control characters are escaped, because the output is read in terminals.
        match std::str::from_utf8(lines) {
            Ok(text) => STDERR.write(api::visible(text).as_bytes()),
            Err(_) => STDERR.write(lines),
        }
        Ok(lines.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Writes events to a file.
struct ToFile<F> {
    file: Mutex<F>,
    lines: Lines,
}

impl<F> ToFile<F> {
    fn new(file: F) -> ToFile<F> {
        ToFile { file: Mutex::new(file), lines: Lines::new() }
    }
}

impl<'a, F: Write + 'a> MakeWriter<'a> for ToFile<F> {
    type Writer = &'a ToFile<F>;

    fn make_writer(&'a self) -> Self::Writer {
        self
    }
}

impl<F: Write> Write for &ToFile<F> {
    fn write(&mut self, lines: &[u8]) -> io::Result<usize> {
        let mut file = self.file.lock().unwrap_or_else(PoisonError::into_inner);
        self.lines.write(lines, notice, |bytes| file.write(bytes));
        Ok(lines.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The line that reports lost lines.
fn notice(lost: u64) -> String {
    event("WARN", &logging::in_words(lost))
}

/// A line in the format of `tracing`.
fn event(level: &str, message: &str) -> String {
    let fields = json!({ "message": message });
    let event = json!({ "timestamp": Timestamp::now(), "level": level, "fields": fields, "target": module_path!() });
    format!("{event}\n")
}

/// A file that is renamed to `NAME.1` when it is full, `NAME.1` to `NAME.2` and so on; the last is removed.
#[derive(Debug)]
struct Rotating {
    path: PathBuf,
    file: File,
    written: u64,
    size_max: u64,
    kept: u32,
}

impl Rotating {
    fn open(path: &Path, size_max: u64, kept: u32) -> io::Result<Rotating> {
        if let Some(directory) = path.parent() {
            fs::create_dir_all(directory)?;
        }
        let file = File::options().create(true).append(true).open(path)?;
        let written = file.metadata()?.len();
        Ok(Rotating { path: path.to_owned(), file, written, size_max, kept })
    }

    fn numbered(&self, number: u32) -> PathBuf {
        let mut name = self.path.clone().into_os_string();
        name.push(format!(".{number}"));
        name.into()
    }

    fn rotate(&mut self) -> io::Result<()> {
        for number in (1..self.kept).rev() {
            rename_if_there(&self.numbered(number), &self.numbered(number.saturating_add(1)))?;
        }
        if self.kept > 0 {
            rename_if_there(&self.path, &self.numbered(1))?;
        } else {
            fs::remove_file(&self.path)?;
        }
        *self = Rotating::open(&self.path, self.size_max, self.kept)?;
        Ok(())
    }
}

fn rename_if_there(from: &Path, to: &Path) -> io::Result<()> {
    match fs::rename(from, to) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

impl Write for Rotating {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        if self.written > 0 && self.written + line.len() as u64 > self.size_max {
            // If rotation fails, the log keeps growing: too long is better than lost.
            if let Err(error) = self.rotate() {
                STDERR.say(format_args!("cannot rotate the log {}: {error}", self.path.display()));
                self.written = 0;
            }
        }
        let written = self.file.write(line)?;
        self.written += written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn a_level_that_means_nothing_is_refused() {
        for level in ["info", "DEBUG", "off", "warn,taplined::plug=debug", "taplined=trace", "taplined"] {
            assert!(filter(level).is_ok(), "{level}");
        }
        for level in ["loud", "", "info,verbose", "info,taplined=loud"] {
            let problem = filter(level).unwrap_err();
            assert!(problem.detail.starts_with("log.level: ") && problem.advice.is_some(), "{level}: {problem}");
        }
    }

    #[test]
    fn log_files_are_bounded_in_size_and_number() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("log/taplined.log");
        let mut log = Rotating::open(&path, 100, 2).unwrap();
        for number in 0..100 {
            log.write_all(format!("{number:09}\n").as_bytes()).unwrap();
        }
        let mut files: Vec<_> =
            fs::read_dir(path.parent().unwrap()).unwrap().map(|entry| entry.unwrap().path()).collect();
        files.sort();
        assert_eq!(files.len(), 3, "{files:?}");
        let lines: String = [2, 1].iter().map(|n| fs::read_to_string(log.numbered(*n)).unwrap()).collect();
        let all = lines + &fs::read_to_string(&path).unwrap();
        assert!(files.iter().all(|file| file.metadata().unwrap().len() <= 100));
        let kept: Vec<u32> = all.lines().map(|line| line.parse().unwrap()).collect();
        assert_eq!(kept, (70..100).collect::<Vec<u32>>());
    }

    /// A device that is temporarily full.
    struct Full(u32, Vec<u8>);

    impl Write for Full {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            match self.0.checked_sub(1) {
                Some(left) => {
                    self.0 = left;
                    Err(io::ErrorKind::StorageFull.into())
                }
                None => self.1.write(bytes),
            }
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_full_log_is_no_error_and_reports_lost_lines_later() {
        let log = ToFile::new(Full(2, Vec::new()));
        for line in ["1\n", "2\n", "3\n"] {
            (&log).write_all(line.as_bytes()).unwrap();
        }
        let file = log.file.into_inner().unwrap();
        let text = String::from_utf8(file.1).unwrap();
        let (notice, rest) = text.split_once('\n').unwrap();
        let notice: serde_json::Value = serde_json::from_str(notice).unwrap();
        assert_eq!((notice["fields"]["message"].as_str(), rest), (Some("2 lines could not be logged"), "3\n"));
    }

    #[test]
    fn a_log_is_appended_to() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("a.log");
        fs::write(&path, [b'x'; 99]).unwrap();
        let mut log = Rotating::open(&path, 100, 1).unwrap();
        log.write_all(b"more\n").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"more\n");
        assert_eq!(fs::read(log.numbered(1)).unwrap().len(), 99);
    }
}
