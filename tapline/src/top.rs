//! `tapline top`: what served disks do, from their statistics pages alone.
//!
//! The daemon is asked for names only, and may be absent. A page is written by a process that may be hostile: it is
//! read through [`stats::Reader`], and every text in it is shown with [`api::visible`].
//!
//! | module | knows |
//! |---|---|
//! | `pages` | where pages are, and what was read from them |
//! | `rates` | what two readings mean |
//! | `names` | what the daemon calls disks |
//! | `layers` | what guests and the host's kernel count for them |
//! | `rows`, `columns`, `text` | how a disk is shown in a line |
//! | `batch` | samples for scripts |
//! | `screen`, `detail`, `layer_table`, `terminal` | the screen, its keys, and the terminal |

mod batch;
mod columns;
mod detail;
#[cfg(test)]
pub mod fixture;
mod layer_table;
mod layers;
mod names;
mod pages;
mod rates;
mod rows;
mod screen;
mod terminal;
mod text;

use std::io::IsTerminal;
use std::path::PathBuf;
use std::time::Duration;

use api::{Code, Problem};
use arguments::number;

use crate::session::How;
use batch::{Batch, Form, Sources};
use layers::Layers;
use names::Names;
use pages::{Disk, Pages};
use rows::{By, Row};

pub use pages::{Identity, identity};
pub use terminal::restore as restore_terminal;

/// How long the daemon's names are waited for where they are needed.
const NAMES_WAITED: Duration = Duration::from_secs(2);

/// Show what served disks do: rates, queue sizes, latency, and requests that are stuck
///
/// Reads the statistics pages of the disks served on this host, those of the daemon and those that are served without
/// one. The daemon is asked for names only, and need not run; pages of its disks are next to its socket (--socket), and
/// can be read by root.
#[derive(clap::Args)]
pub struct Top {
    /// Only these disks: a VBD's UUID prefix, VM/vda, a VDI's name or UUID, an image's file name, or the path of a
    /// statistics page
    #[arg(value_name = "DISK")]
    disks: Vec<String>,
    /// Seconds between two samples; fractions are allowed
    #[arg(short, long, value_name = "SECONDS", default_value = "1", value_parser = seconds)]
    interval: Duration,
    /// Print samples instead of showing a screen; with --json one JSON object per line
    #[arg(short, long)]
    batch: bool,
    /// Print samples in the form of xsiostat
    #[arg(long, conflicts_with = "json")]
    xsiostat: bool,
    /// Number of samples [default: until interrupted]
    #[arg(short = 'n', long, value_name = "SAMPLES", value_parser = number::<u64>(1..=u64::MAX))]
    count: Option<u64>,
    /// Show a row for each disk, or sums for each VM or storage repository
    #[arg(long, value_enum, default_value = "disk", conflicts_with = "xsiostat")]
    by: By,
    /// Sort by this column, by its heading
    #[arg(long, value_name = "HEADING", default_value = "DISK", value_parser = heading)]
    sort: usize,
    /// Read the pages in this directory instead: DIRECTORY/*.page and DIRECTORY/*/statistics.page
    #[arg(long, value_name = "DIRECTORY")]
    pages: Option<PathBuf>,
    /// Ask a guest that another program runs what it counts for its disks: the socket of its port org.tapline.guest.0;
    /// can be given several times
    #[arg(long, value_name = "SOCKET")]
    guest: Vec<PathBuf>,
}

/// Which disks are shown, and how they are put together.
#[derive(Debug)]
pub struct Wanted {
    words: Vec<String>,
    by: By,
}

impl Wanted {
    /// The rows of these disks.
    fn rows(&self, pages: &Pages, names: &Names) -> Vec<Row> {
        rows::rows(pages, names, self.by, |disk, name| self.means(disk, name))
    }

    fn means(&self, disk: &Disk, name: Option<&names::Name>) -> bool {
        self.words.is_empty() || self.words.iter().any(|word| rows::is_meant(word, disk, name))
    }

    /// The words that no disk answers to.
    fn without_disk(&self, pages: &Pages, names: &Names) -> Vec<&str> {
        let has = |word: &str| pages.disks.values().any(|disk| rows::is_meant(word, disk, names.of(disk.vbd)));
        self.words.iter().map(String::as_str).filter(|word| !has(word)).collect()
    }
}

fn seconds(word: &str) -> Result<Duration, String> {
    let seconds = word.parse::<f64>().ok().filter(|seconds| (0.01..=86_400.0).contains(seconds));
    seconds.map(Duration::from_secs_f64).ok_or_else(|| "give a number of seconds from 0.01 to 86400".into())
}

fn heading(word: &str) -> Result<usize, String> {
    columns::find(word).ok_or_else(|| {
        let heads: Vec<&str> = columns::COLUMNS.iter().map(|column| column.head).collect();
        format!("the columns are {}", heads.join(", "))
    })
}

/// Runs the command.
pub fn run(top: Top, how: How) -> Result<(), Problem> {
    let form = match (top.batch, top.xsiostat, how.json) {
        (_, _, true) => Some(Form::Json),
        (_, true, false) => Some(Form::Xsiostat),
        (true, false, false) => Some(Form::Text),
        (false, false, false) => None,
    };
    if form.is_none() {
        refuse_without_terminal(top.count)?;
    }
    // An image's file name may be that of a file here.
    let is_page = |path: &PathBuf| {
        (path.components().count() > 1 || path.extension().is_some_and(|extension| extension == "page"))
            && path.is_file()
    };
    let named = top.disks.iter().map(PathBuf::from).filter(is_page);
    let named: Vec<PathBuf> = named.filter_map(|path| std::path::absolute(path).ok()).collect();
    let only_named = !named.is_empty() && named.len() == top.disks.len() && top.pages.is_none();
    let run_directory = how.run_directory()?;
    let directories = if only_named { Vec::new() } else { pages::directories(top.pages.as_deref(), &run_directory) };
    let client = how.local_client()?;
    let mut layers = Layers::new(client.clone(), &top.guest);
    let mut names = client.map(Names::from_daemon).unwrap_or_default();
    let mut pages = Pages::new(directories, named);
    pages.round();
    let wanted = Wanted { words: top.disks, by: top.by };
    if form.is_some() || !wanted.without_disk(&pages, &names).is_empty() || top.by != By::Disk {
        names.wait(NAMES_WAITED);
    }
    refuse_unreadable(&pages)?;
    if let Some(word) = wanted.without_disk(&pages, &names).first() {
        return Err(not_found(word, &pages));
    }
    match form {
        Some(form) => {
            let batch = Batch { form, interval: top.interval, count: top.count, sort: top.sort };
            let from = Sources { pages: &mut pages, names: &mut names, layers: &mut layers };
            batch::run(&batch, &wanted, from)
        }
        None => terminal::run(wanted, top.interval, top.sort, &mut pages, &mut names, &mut layers),
    }
}

fn refuse_without_terminal(count: Option<u64>) -> Result<(), Problem> {
    let is_dumb = std::env::var_os("TERM").is_none_or(|term| term.is_empty() || term == "dumb");
    let what = match (std::io::stdout().is_terminal() && std::io::stdin().is_terminal(), count) {
        (true, None) if !is_dumb => return Ok(()),
        (true, None) => "this terminal cannot show a screen (TERM)",
        (false, _) => "stdin or stdout is not a terminal",
        (true, Some(_)) => "-n applies to samples that are printed",
    };
    Err(Problem::new(Code::Invalid, what).advise("print samples: tapline top --batch"))
}

/// If there is nothing but what only root can read, that is said, rather than that there is nothing.
fn refuse_unreadable(pages: &Pages) -> Result<(), Problem> {
    if !pages.disks.is_empty() || !pages.unread.values().any(|unread| unread.forbidden) {
        return Ok(());
    }
    let what = notes(pages).join("; ");
    Err(Problem::new(Code::Forbidden, what).advise("run it as root: sudo tapline top"))
}

fn not_found(word: &str, pages: &Pages) -> Problem {
    let seen: Vec<String> = pages.disks.values().map(|disk| rows::name(disk, None)).take(10).collect();
    let what = format!("no disk that is served here is '{word}'");
    let advice = match (notes(pages).as_slice(), seen.as_slice()) {
        ([first, ..], _) => first.clone(),
        ([], []) => "no disk is served here".into(),
        ([], seen) => format!("without DISK it shows all; served are {}", seen.join(", ")),
    };
    Problem::new(Code::NotFound, what).advise(advice)
}

/// What is to be said about pages that are not shown.
fn notes(pages: &Pages) -> Vec<String> {
    let (forbidden, other): (Vec<_>, Vec<_>) = pages.unread.iter().partition(|(_, unread)| unread.forbidden);
    let mut notes = Vec::new();
    if let [(path, _), rest @ ..] = forbidden.as_slice() {
        let more = if rest.is_empty() { String::new() } else { format!(" and {} more", rest.len()) };
        notes.push(format!("{}{more}: permission denied; root can read them", path.display()));
    }
    notes.extend(other.iter().map(|(path, unread)| format!("{}: {}", path.display(), unread.why)));
    if pages.disks.is_empty() && pages.unread.is_empty() {
        notes.push(format!(
            "no disk is served here: there is no statistics page in {}; 'tapline serve' and 'tapline vbd plug' make one",
            pages.places()
        ));
    }
    notes.iter().map(|note| text::in_one_line(note)).collect()
}
