//! `taplined`: the daemon. There is one per host; it keeps the catalogue, runs tasks, and supervises one disk process
//! per VBD.
//!
//! It never parses an image and never touches a guest's memory: disk processes do that, without privileges. They
//! outlive the daemon, which finds them again after a restart.

#![forbid(unsafe_code)]
// These macros panic if the output cannot be written.
#![cfg_attr(not(test), deny(clippy::print_stdout, clippy::print_stderr))]

mod account;
mod autostart;
mod background;
mod backup;
mod calibrate;
mod catalogue;
mod certificate;
mod clock;
mod config;
mod daemon;
mod differences;
mod directories;
mod disk;
mod download;
mod drain;
mod fault;
mod health;
mod history;
mod http;
mod jobs;
mod kernel;
mod log;
mod metrics;
mod nbd;
mod notify;
mod panics;
mod plug;
mod predecessors;
mod reader;
mod reconcile;
mod request;
mod retention;
mod sr;
mod statistics;
mod task;
mod token;
mod transient;
mod upload;
mod vdi;
mod vm;
mod watchdog;

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use api::{Code, Problem};
use clap::Parser;

use certificate::Certificate;
use config::Config;
use daemon::Daemon;

/// The maximum number of threads for blocking calls. The catalogue is read on them, too, and each job and each request
/// whose storage does not respond holds one: tokio's 512 are fewer than the disks of a host.
const BLOCKING_MAX: usize = 8192;

/// The exit code of a daemon that cannot start or continue, as in Tapline's other programs.
const FAILED: u8 = 4;

/// The exit code of a daemon without a usable catalogue: restarting it would not help (RestartPreventExitStatus= in
/// packaging/taplined.service).
const NO_CATALOGUE: u8 = 6;

/// Time limit for threads blocked on storage when the daemon stops.
const TO_END: std::time::Duration = std::time::Duration::from_secs(5);

/// Time for clients to learn that the catalogue is damaged before the daemon stops.
const NOTIFY_TIME: std::time::Duration = std::time::Duration::from_secs(1);

/// The default path of the configuration; the file need not exist.
const CONFIG: &str = "/etc/tapline/taplined.toml";

/// The Tapline daemon: storage repositories, disks and machines of this host.
///
/// It serves its API at a Unix socket, and optionally over TLS, to `tapline` and to programs (docs/api.md). Settings:
/// docs/taplined.toml.
#[derive(Debug, Parser)]
#[command(name = "taplined", version)]
struct Arguments {
    /// Configuration file [default: /etc/tapline/taplined.toml if it exists]
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Check the configuration and exit
    #[arg(long)]
    check_config: bool,
    /// Restore a backup of the catalogue and exit: a file, or 'latest' for the newest intact one
    #[arg(long, value_name = "FILE|latest", group = "place")]
    restore: Option<String>,
    /// Rebuild the catalogue from the inventories of the repositories in these directories, and exit
    #[arg(long, value_name = "DIRECTORY", num_args = 1.., group = "place")]
    rebuild: Vec<PathBuf>,
    /// Start with an empty catalogue where there was another one, and exit
    #[arg(long, group = "place")]
    init: bool,
    /// Print the OpenAPI document of the API and exit
    #[arg(long)]
    openapi: bool,
    /// Print the JSON schema of the configuration and exit
    #[arg(long)]
    config_schema: bool,
    /// Print the steps of all journalled jobs and exit, for tests that kill the daemon there
    #[arg(long, hide = true)]
    steps: bool,
}

fn main() -> ExitCode {
    panics::abort_on_panic();
    let arguments = Arguments::parse();
    match run(&arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(problem) => {
            let advice = problem.advice.as_ref().map(|advice| format!("\n  {advice}")).unwrap_or_default();
            log::STDERR.write_last(&format!("taplined: {problem}{advice}\n"));
            ExitCode::from(if problem.code == Code::Damaged { NO_CATALOGUE } else { FAILED })
        }
    }
}

fn run(arguments: &Arguments) -> Result<(), Problem> {
    if arguments.openapi {
        return print(http::openapi_text()?);
    }
    if arguments.config_schema {
        return print(&config::schema_text()?);
    }
    if arguments.steps {
        return print(&jobs::steps());
    }
    let config = match &arguments.config {
        Some(path) => Config::read(path)?,
        None if std::path::Path::new(CONFIG).exists() => Config::read(CONFIG.as_ref())?,
        None => Config::default(),
    };
    certificate::check(&config)?;
    log::check(&config)?;
    if arguments.check_config {
        daemon::check(&config)?;
        let of = arguments.config.as_deref().unwrap_or(CONFIG.as_ref());
        return print(&format!("{}: the configuration is valid\n", of.display()));
    }
    if let Some(from) = &arguments.restore {
        return print(&catalogue::restore(&config, from)?);
    }
    if arguments.init {
        return print(&catalogue::init(&config)?);
    }
    let mut runtime = tokio::runtime::Builder::new_multi_thread();
    let runtime = runtime.enable_all().max_blocking_threads(BLOCKING_MAX).build();
    let runtime = runtime.map_err(|error| Problem::failed("start the daemon's threads", error))?;
    if !arguments.rebuild.is_empty() {
        let directories = catalogue::absolute(&arguments.rebuild)?;
        return print(&runtime.block_on(catalogue::rebuild(&config, &directories))?);
    }
    log::start(&config)?;
    let outcome = runtime.block_on(serve(config.clone()));
    // Threads blocked on unresponsive storage are not waited for.
    runtime.shutdown_timeout(TO_END);
    outcome.map_err(|problem| catalogue::advise(&config, &command(arguments), problem))
}

/// The command line of this program with the same configuration.
fn command(arguments: &Arguments) -> String {
    match &arguments.config {
        Some(path) => format!("taplined --config {}", path.display()),
        None => "taplined".into(),
    }
}

async fn serve(config: Config) -> Result<(), Problem> {
    let daemon = Daemon::start(config).await?;
    // Signals are handled before it listens, because any process that sees the socket may stop the daemon.
    let signals = http::Signals::handle()?;
    let certificate = Certificate::of(&daemon.config)?;
    let listener = http::Listener::bind(&daemon.config, &daemon, certificate.clone())?;
    let nbd = nbd::Listener::bind(&daemon.config, certificate)?;
    notify::ready();
    watchdog::begin(daemon.clone());
    tracing::info!(socket = %daemon.config.socket().display(), "serving");
    tokio::select! {
        () = listener.serve(daemon.clone(), signals) => {}
        () = nbd.serve(&daemon) => {}
        problem = damaged(&daemon) => return Err(problem),
    }
    nbd.remove();
    notify::stopping();
    daemon.stop().await
}

/// Waits until the catalogue is found to be damaged and waiting clients have been notified. No work is completed
/// then, because every record of it would go into the damaged file.
async fn damaged(daemon: &Daemon) -> Problem {
    let problem = daemon.catalogue.damaged().await;
    tracing::error!("{problem}; stopping the daemon, disks keep running");
    tokio::time::sleep(NOTIFY_TIME).await;
    problem
}

fn print(text: &str) -> Result<(), Problem> {
    let mut out = std::io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        // A closed pipe, as with `head`, is not an error.
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
        printed => printed.map_err(|error| Problem::failed("print", error)),
    }
}

#[cfg(test)]
mod test {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_manual_page_has_every_option() {
        let page = include_str!("../../docs/man/taplined.8").replace('\\', "");
        for option in Arguments::command().get_arguments().filter(|option| !option.is_hide_set()) {
            let Some(long) = option.get_long() else { continue };
            assert!(page.contains(&format!(".B --{long}\n")) || page.contains(&format!("\nfB--{long}fR")), "--{long}");
        }
    }
}
