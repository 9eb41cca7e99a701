//! `vm console`: connects a machine's serial port with this terminal.
//!
//! Every key is sent to the guest, and the terminal is restored however the command ends, also by a signal. It waits
//! for a daemon that restarts.

use std::io::{self, IsTerminal, Read, Write};
use std::thread;
use std::time::Duration;

use api::client::Stream;
use api::{Code, Power, Problem};
use jiff::Timestamp;
use rustix::termios::{OptionalActions, Termios, tcgetattr, tcsetattr};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::mpsc;
use tokio::time::Instant;
use uuid::Uuid;

use crate::output::say;
use crate::session::Session;

/// Ctrl-], which no guest needs; telnet and virsh use it as well.
const LEAVE: u8 = 0x1d;

/// Maximum number of bytes that are transferred at once.
const CHUNK_MAX: usize = 16 << 10;

/// How long to wait for a daemon that has closed the console, or for a machine to be halted.
const RECONNECT_TIMEOUT: Duration = Duration::from_secs(30);
/// Polling interval while waiting.
const POLL_INTERVAL: Duration = Duration::from_millis(250);

/// Arguments of `vm console`.
#[derive(clap::Args)]
pub struct Open {
    /// Name or UUID prefix
    vm: String,
    /// Print what the guest has written lately, and do not connect
    #[arg(long)]
    log: bool,
}

/// The reason why a console session has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConsoleEnd {
    /// The user has left it, or a signal has arrived.
    ByUser,
    /// The machine has stopped.
    Ended,
}

impl Open {
    /// Runs the verb and prints its output.
    pub async fn run(self, session: &Session) -> Result<(), Problem> {
        let vm = session.vm(&self.vm).await?;
        match self.log {
            true => write(&session.client.vm_console_log(vm).await?),
            false => attach(session, vm).await.map(drop),
        }
    }
}

/// Connects this terminal with a machine's console until the user leaves it or the machine stops.
pub async fn attach(session: &Session, vm: Uuid) -> Result<ConsoleEnd, Problem> {
    let name = session.client.vm(vm).await?.name;
    let mut daemon = session.client.host().await?.started;
    let mut stream = session.client.vm_console(vm, None).await?;
    let mut ends = EndSignals::new()?;
    let mut keys = keys();
    let terminal = io::stdin().is_terminal();
    if terminal {
        say(&format!("tapline: connected to the console of '{name}'; press Ctrl-] to leave\n"));
    }
    let raw = terminal.then(RawTerminal::enter).transpose()?;
    let left = loop {
        if relay(stream, &mut keys, terminal.then_some(LEAVE), &mut ends).await? {
            break ConsoleEnd::ByUser;
        }
        // Either the machine has stopped, or the daemon has.
        match wait_reconnect(session, vm, &mut daemon).await? {
            Some(again) => stream = again,
            None => break ConsoleEnd::Ended,
        }
    };
    drop(raw);
    if terminal {
        let why = if left == ConsoleEnd::Ended { "the machine has ended" } else { "left the console" };
        say(&format!("\ntapline: {why}\n"));
    }
    Ok(left)
}

/// Relays output and keys. Returns true when the user leaves, by the `leave` key or a signal, and false if the console
/// was closed.
async fn relay(
    stream: Stream,
    keys: &mut mpsc::Receiver<Vec<u8>>,
    leave: Option<u8>,
    ends: &mut EndSignals,
) -> Result<bool, Problem> {
    let (mut from, mut to) = tokio::io::split(stream);
    let mut chunk = vec![0; CHUNK_MAX];
    let mut typing = true;
    loop {
        tokio::select! {
            len = from.read(&mut chunk) => match len {
                // The caller finds out why.
                Ok(0) | Err(_) => return Ok(false),
                Ok(len) => write(&chunk[..len])?,
            },
            typed = keys.recv(), if typing => match typed {
                Some(typed) => {
                    let leaves = typed.iter().position(|key| Some(*key) == leave);
                    let before = &typed[..leaves.unwrap_or(typed.len())];
                    if to.write_all(before).await.is_err() {
                        return Ok(false);
                    }
                    to.flush().await.unwrap_or_default();
                    if leaves.is_some() {
                        return Ok(true);
                    }
                }
                // End of piped input: the guest's output is still shown.
                None => typing = false,
            },
            () = ends.any() => return Ok(true),
        }
    }
}

/// Waits until the console can be connected again; `None` if the machine has stopped. `daemon` is the start time of the
/// daemon that closed it.
async fn wait_reconnect(session: &Session, vm: Uuid, daemon: &mut Timestamp) -> Result<Option<Stream>, Problem> {
    let begun = Instant::now();
    loop {
        tokio::time::sleep(POLL_INTERVAL).await;
        let found = match session.client.vm(vm).await {
            Ok(now) if now.power == Power::Halted => return Ok(None),
            Ok(_) => reconnect(session, vm, daemon).await,
            Err(problem) => Err(problem),
        };
        match found {
            Ok(stream) => return Ok(Some(stream)),
            Err(problem) if problem.code == Code::NotFound => return Ok(None),
            Err(problem) if ![Code::State, Code::Unreachable].contains(&problem.code) => return Err(problem),
            Err(_) => {}
        }
        if begun.elapsed() > RECONNECT_TIMEOUT {
            let what = "the console was closed, and cannot be opened again".to_owned();
            return Err(Problem::new(Code::Unreachable, what).advise("check taplined: systemctl status taplined"));
        }
    }
}

/// Connects again, with the output since then: a restarted daemon sends all it has, of which nothing was shown here.
async fn reconnect(session: &Session, vm: Uuid, daemon: &mut Timestamp) -> Result<Stream, Problem> {
    let now = session.client.host().await?.started;
    let recent = (now == *daemon).then_some(0);
    let stream = session.client.vm_console(vm, recent).await?;
    *daemon = now;
    Ok(stream)
}

/// Reads keys in a thread that is not joined at the end, because it may be blocked.
fn keys() -> mpsc::Receiver<Vec<u8>> {
    let (pressed, keys) = mpsc::channel(1);
    thread::spawn(move || {
        let mut chunk = vec![0; CHUNK_MAX];
        while let Ok(len @ 1..) = io::stdin().read(&mut chunk) {
            if pressed.blocking_send(chunk[..len].to_vec()).is_err() {
                break;
            }
        }
    });
    keys
}

fn write(bytes: &[u8]) -> Result<(), Problem> {
    let mut out = io::stdout().lock();
    out.write_all(bytes).and_then(|()| out.flush()).map_err(|error| Problem::failed("write to stdout", error))
}

/// Raw mode of the terminal on stdin; dropping this restores the terminal.
struct RawTerminal(Termios);

impl RawTerminal {
    /// Saves the terminal's settings and sets raw mode.
    fn enter() -> Result<RawTerminal, Problem> {
        let set = || {
            let before = tcgetattr(io::stdin())?;
            let mut raw = before.clone();
            raw.make_raw();
            tcsetattr(io::stdin(), OptionalActions::Now, &raw)?;
            Ok::<_, io::Error>(RawTerminal(before))
        };
        set().map_err(|error| Problem::failed("set the terminal to pass on every key", error))
    }
}

impl Drop for RawTerminal {
    fn drop(&mut self) {
        // If this fails, the terminal is gone.
        tcsetattr(io::stdin(), OptionalActions::Now, &self.0).unwrap_or_default();
    }
}

/// Signals that end the command; handled so that the terminal is restored.
struct EndSignals([Signal; 3]);

impl EndSignals {
    fn new() -> Result<EndSignals, Problem> {
        let handle = |kind| signal(kind).map_err(|error| Problem::failed("handle signals", error));
        let [interrupt, terminate, hangup] =
            [SignalKind::interrupt(), SignalKind::terminate(), SignalKind::hangup()].map(handle);
        Ok(EndSignals([interrupt?, terminate?, hangup?]))
    }

    async fn any(&mut self) {
        let [interrupt, terminate, hangup] = &mut self.0;
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
            _ = hangup.recv() => {}
        }
    }
}
