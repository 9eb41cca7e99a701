//! `taplined`: the daemon. One per host; it keeps the catalogue, runs the tasks, and supervises one disk process per VBD.
//!
//! It never parses an image and never touches a guest's memory: that is the disk processes', which have no privilege. They
//! outlive it, and it finds them again.

#![forbid(unsafe_code)]
// They panic where nothing can be written.
#![cfg_attr(not(test), deny(clippy::print_stdout, clippy::print_stderr))]

mod account;
mod autostart;
mod catalogue;
mod config;
mod daemon;
mod directories;
mod disk;
mod fault;
mod http;
mod idempotency;
mod log;
mod notify;
mod panics;
mod plug;
mod reconcile;
mod sr;
mod task;
mod token;
mod vdi;
mod vm;
mod watchdog;

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use api::{Code, Problem};
use clap::Parser;

use config::Config;
use daemon::Daemon;

/// The exit code of a daemon that could not start, or not go on. As with the other programs of Tapline.
const FAILED: u8 = 4;

/// The exit code of a daemon that has no catalogue which it can believe: to start it again would change nothing
/// (RestartPreventExitStatus= in packaging/taplined.service).
const NO_CATALOGUE: u8 = 6;

/// How long threads may take that ask the storage when the daemon ends.
const TO_END: std::time::Duration = std::time::Duration::from_secs(5);

/// How long clients have to hear that the catalogue is damaged before the daemon ends.
const TO_TELL: std::time::Duration = std::time::Duration::from_secs(1);

/// Where the configuration is looked for if no other place is named; it need not exist.
const CONFIG: &str = "/etc/tapline/taplined.toml";

/// The daemon of Tapline: storage repositories, disks and machines of this host.
///
/// It serves its API at a Unix socket, and over TLS where that is configured, to `tapline` and to programs (docs/api.md). Settings: docs/taplined.toml.
#[derive(Debug, Parser)]
#[command(name = "taplined", version)]
struct Arguments {
    /// The configuration [default: /etc/tapline/taplined.toml if it is there]
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Read the configuration, say what is wrong with it, and end
    #[arg(long)]
    check_config: bool,
    /// Put a backup of the catalogue in its place, and end: a file, or «latest» for the newest that is sound
    #[arg(long, value_name = "FILE|latest", group = "place")]
    restore: Option<String>,
    /// Make the catalogue anew from what repositories say of themselves, and end: the directories in which they lie
    #[arg(long, value_name = "DIRECTORY", num_args = 1.., group = "place")]
    rebuild: Vec<PathBuf>,
    /// Begin with an empty catalogue where there was another one, and end
    #[arg(long, group = "place")]
    init: bool,
    /// Print the OpenAPI document of the API, and end
    #[arg(long)]
    openapi: bool,
    /// Print the JSON schema of the configuration, and end
    #[arg(long)]
    config_schema: bool,
    /// Print the steps of all journalled jobs, for tests that kill the daemon there, and end
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
        return print(&http::openapi_text()?);
    }
    if arguments.config_schema {
        return print(&config::schema_text()?);
    }
    if arguments.steps {
        return print(&task::job::steps());
    }
    let config = match &arguments.config {
        Some(path) => Config::read(path)?,
        None if std::path::Path::new(CONFIG).exists() => Config::read(CONFIG.as_ref())?,
        None => Config::default(),
    };
    http::check(&config)?;
    if arguments.check_config {
        return Ok(());
    }
    if let Some(from) = &arguments.restore {
        return print(&catalogue::restore(&config, from)?);
    }
    if arguments.init {
        return print(&catalogue::init(&config)?);
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
    let runtime = runtime.map_err(|error| Problem::failed("start the daemon's threads", error))?;
    if !arguments.rebuild.is_empty() {
        let directories = catalogue::absolute(&arguments.rebuild)?;
        return print(&runtime.block_on(catalogue::rebuild(&config, &directories))?);
    }
    log::start(&config)?;
    let outcome = runtime.block_on(serve(config.clone()));
    // A thread that waits for storage that does not answer is not waited for.
    runtime.shutdown_timeout(TO_END);
    outcome.map_err(|problem| catalogue::advise(&config, &command(arguments), problem))
}

/// How this program is called with the same configuration.
fn command(arguments: &Arguments) -> String {
    match &arguments.config {
        Some(path) => format!("taplined --config {}", path.display()),
        None => "taplined".into(),
    }
}

async fn serve(config: Config) -> Result<(), Problem> {
    let daemon = Daemon::start(config).await?;
    // Who finds that it listens may end it.
    let signals = http::Signals::handle()?;
    let listener = http::Listener::bind(&daemon.config, &daemon)?;
    notify::ready();
    watchdog::begin(daemon.clone());
    tracing::info!(socket = %daemon.config.socket().display(), "serving");
    tokio::select! {
        () = listener.serve(daemon.clone(), signals) => {}
        problem = damaged(&daemon) => return Err(problem),
    }
    notify::stopping();
    daemon.stop().await
}

/// Waits until the catalogue is found to be damaged, and until those who have asked meanwhile were told so. Nothing is
/// brought to an end then: all that could be recorded of it would go into that file.
async fn damaged(daemon: &Daemon) -> Problem {
    let problem = daemon.catalogue.damaged().await;
    tracing::error!("{problem}; the daemon ends, and disks go on");
    tokio::time::sleep(TO_TELL).await;
    problem
}

fn print(text: &str) -> Result<(), Problem> {
    let mut out = std::io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        // A reader who has seen enough, as `head` has, is no failure.
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
        printed => printed.map_err(|error| Problem::failed("print", error)),
    }
}
