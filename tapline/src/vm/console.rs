//! `vm console`: a machine's serial port at this terminal.
//!
//! The terminal passes on every key, and is set back whatever ends the command, a signal as well. A daemon that
//! restarts meanwhile is waited for.

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

/// Ctrl-], which no guest needs and telnet and virsh have as well.
const LEAVE: u8 = 0x1d;

/// Bytes that are passed on at once.
const PIECE: usize = 16 << 10;

/// How long a daemon that has closed the console may take to come back, and a machine to be halted.
const TO_COME_BACK: Duration = Duration::from_secs(30);
/// Pause between two looks.
const REST: Duration = Duration::from_millis(250);

/// `vm console`.
#[derive(clap::Args)]
pub struct Open {
    /// Name or UUID prefix
    vm: String,
    /// Print what the guest has written lately, and do not connect
    #[arg(long)]
    log: bool,
}

/// Why a console was left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Left {
    /// The user has left it, or a signal has ended the command.
    ByUser,
    /// The machine has ended.
    Ended,
}

impl Open {
    /// Runs the verb.
    pub async fn run(self, session: &Session) -> Result<(), Problem> {
        let vm = session.vm(&self.vm).await?;
        match self.log {
            true => write(&session.client.vm_console_log(vm).await?),
            false => attach(session, vm).await.map(drop),
        }
    }
}

/// Connects this terminal with a machine's console, until the user leaves it or the machine ends.
pub async fn attach(session: &Session, vm: Uuid) -> Result<Left, Problem> {
    let name = session.client.vm(vm).await?.name;
    let mut daemon = session.client.host().await?.started;
    let mut stream = session.client.vm_console(vm, None).await?;
    let mut ends = Ends::new()?;
    let mut keys = keys();
    let terminal = io::stdin().is_terminal();
    if terminal {
        say(&format!("tapline: connected to the console of '{name}'; press Ctrl-] to leave\n"));
    }
    let raw = terminal.then(Raw::enter).transpose()?;
    let left = loop {
        if pass_on(stream, &mut keys, terminal.then_some(LEAVE), &mut ends).await? {
            break Left::ByUser;
        }
        // The machine has ended, or the daemon has.
        match again(session, vm, &mut daemon).await? {
            Some(again) => stream = again,
            None => break Left::Ended,
        }
    };
    drop(raw);
    if terminal {
        let why = if left == Left::Ended { "the machine has ended" } else { "left the console" };
        say(&format!("\ntapline: {why}\n"));
    }
    Ok(left)
}

/// Passes on output and keys until the user leaves, at a terminal by a key; false if the console was closed.
async fn pass_on(
    stream: Stream,
    keys: &mut mpsc::Receiver<Vec<u8>>,
    leave: Option<u8>,
    ends: &mut Ends,
) -> Result<bool, Problem> {
    let (mut from, mut to) = tokio::io::split(stream);
    let mut piece = vec![0; PIECE];
    let mut typing = true;
    loop {
        tokio::select! {
            len = from.read(&mut piece) => match len {
                // A connection that breaks is looked into as well.
                Ok(0) | Err(_) => return Ok(false),
                Ok(len) => write(&piece[..len])?,
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
                // The end of a file that is typed: what the guest answers is still shown.
                None => typing = false,
            },
            () = ends.any() => return Ok(true),
        }
    }
}

/// Connects again, if the machine runs. `daemon` is when the daemon was started that this terminal was connected to.
async fn again(session: &Session, vm: Uuid, daemon: &mut Timestamp) -> Result<Option<Stream>, Problem> {
    let begun = Instant::now();
    loop {
        tokio::time::sleep(REST).await;
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
        if begun.elapsed() > TO_COME_BACK {
            let what = "the console was closed, and cannot be opened again".to_owned();
            return Err(Problem::new(Code::Unreachable, what).advise("check taplined: systemctl status taplined"));
        }
    }
}

/// Connects again, with what the guest has written meanwhile: all that a new daemon has, of which nothing was shown
/// here.
async fn reconnect(session: &Session, vm: Uuid, daemon: &mut Timestamp) -> Result<Stream, Problem> {
    let now = session.client.host().await?.started;
    let recent = (now == *daemon).then_some(0);
    let stream = session.client.vm_console(vm, recent).await?;
    *daemon = now;
    Ok(stream)
}

/// What is typed, read by a thread that nothing waits for at the end.
fn keys() -> mpsc::Receiver<Vec<u8>> {
    let (pressed, keys) = mpsc::channel(1);
    thread::spawn(move || {
        let mut piece = vec![0; PIECE];
        while let Ok(len @ 1..) = io::stdin().read(&mut piece) {
            if pressed.blocking_send(piece[..len].to_vec()).is_err() {
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

/// A terminal that passes on every key, until this is dropped.
struct Raw(Termios);

impl Raw {
    /// For the terminal that stdin is.
    fn enter() -> Result<Raw, Problem> {
        let set = || {
            let before = tcgetattr(io::stdin())?;
            let mut raw = before.clone();
            raw.make_raw();
            tcsetattr(io::stdin(), OptionalActions::Now, &raw)?;
            Ok::<_, io::Error>(Raw(before))
        };
        set().map_err(|error| Problem::failed("set the terminal to pass on every key", error))
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        // A terminal that is gone needs nothing.
        tcsetattr(io::stdin(), OptionalActions::Now, &self.0).unwrap_or_default();
    }
}

/// Signals that end the command, by which a terminal would be left as it is.
struct Ends([Signal; 3]);

impl Ends {
    fn new() -> Result<Ends, Problem> {
        let handle = |kind| signal(kind).map_err(|error| Problem::failed("handle signals", error));
        let [interrupt, terminate, hangup] =
            [SignalKind::interrupt(), SignalKind::terminate(), SignalKind::hangup()].map(handle);
        Ok(Ends([interrupt?, terminate?, hangup?]))
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
