//! A real `taplined` in its own directory: started, killed, and restarted in the same place. It is killed on drop, with
//! its disks and machines.

pub mod api;
pub mod processes;

use std::fs::{self, File};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde_json::Value;

use self::api::Api;
use self::processes::Places;
use crate::tool;

/// How long a daemon may take to listen if it has to find a thousand disks on a loaded machine.
const TO_LISTEN: Duration = Duration::from_secs(120);

/// A daemon: its programs, directory and configuration.
#[derive(Debug)]
pub struct Daemon {
    programs: PathBuf,
    places: Places,
    process: Mutex<Option<Child>>,
}

impl Daemon {
    /// Starts the first daemon, with settings of `[plug]` in TOML.
    pub fn start(programs: PathBuf, places: Places, plug: &str) -> Result<Daemon, String> {
        let directory = |name: &str| places.room.join(name).display().to_string();
        let text = format!(
            "state-directory = {:?}\nrun-directory = {:?}\nlog-directory = {:?}\ndisk-program = {:?}\n\
             [plug]\n{plug}\n",
            directory("state"),
            directory("run"),
            directory("log"),
            programs.join("tapline-disk"),
        );
        let config = places.room.join("taplined.toml");
        fs::write(&config, text).map_err(|error| format!("{}: {error}", config.display()))?;
        let daemon = Daemon { programs, places, process: Mutex::new(None) };
        daemon.restart()?;
        Ok(daemon)
    }

    /// A client of its API.
    pub fn api(&self) -> Api {
        Api { socket: self.places.room.join("run/taplined.sock") }
    }

    fn process(&self) -> MutexGuard<'_, Option<Child>> {
        self.process.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The pid of the daemon, if it runs.
    pub fn pid(&self) -> Option<u32> {
        self.process().as_ref().map(Child::id)
    }

    /// Kills the daemon with SIGKILL.
    pub fn kill(&self) -> Result<(), String> {
        let Some(mut process) = self.process().take() else { return Ok(()) };
        process.kill().and_then(|()| process.wait()).map(drop).map_err(|error| format!("kill the daemon: {error}"))
    }

    /// Sends a signal to the daemon if it runs.
    pub fn signal(&self, signal: rustix::process::Signal) -> Result<(), String> {
        let process = self.process();
        let Some(pid) = process.as_ref().map(rustix::process::Pid::from_child) else { return Ok(()) };
        rustix::process::kill_process(pid, signal).map_err(|errno| format!("signal the daemon: {errno}"))
    }

    /// Runs a command of the program that ends, while no daemon runs; returns its output.
    pub fn once(&self, words: &[String]) -> Result<String, String> {
        tool::text(self.command().args(words)).map_err(|error| error.to_string())
    }

    /// Starts a second daemon in the same place, which must exit.
    pub fn second(&self) -> Result<(), String> {
        let mut command = self.command();
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let mut second = command.spawn().map_err(|error| format!("start a second taplined: {error}"))?;
        let begin = Instant::now();
        loop {
            match second.try_wait().map_err(|error| format!("wait for a second taplined: {error}"))? {
                Some(status) if status.success() => {
                    return Err("a second taplined has ended as if all were well".into());
                }
                Some(_) => return Ok(()),
                None if begin.elapsed() < TO_LISTEN => std::thread::sleep(Duration::from_millis(5)),
                None => {
                    let ended = second.kill().and_then(|()| second.wait());
                    return Err(format!("a second taplined runs in addition to the first; killed: {ended:?}"));
                }
            }
        }
    }

    fn command(&self) -> Command {
        let mut command = Command::new(self.programs.join("taplined"));
        command.arg("--config").arg(self.places.room.join("taplined.toml"));
        // Tests set the time for schedules in this file.
        command.env("TAPLINED_CLOCK", self.places.room.join("clock"));
        command
    }

    /// Starts a daemon without waiting. It may be killed before it listens.
    pub fn launch(&self) -> Result<(), String> {
        self.launch_with(&[])
    }

    /// Starts a daemon with variables in its environment, without waiting.
    pub fn launch_with(&self, environment: &[(&str, &str)]) -> Result<(), String> {
        let log = File::options().create(true).append(true).open(self.places.room.join("stderr"));
        let log = log.map_err(|error| format!("the daemon's log: {error}"))?;
        let mut command = self.command();
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log).envs(environment.iter().copied());
        let child = command.spawn().map_err(|error| format!("start taplined: {error}"))?;
        *self.process() = Some(child);
        Ok(())
    }

    /// Starts a daemon and waits until it listens.
    pub fn restart(&self) -> Result<(), String> {
        self.launch()?;
        self.until_it_listens()
    }

    /// Waits until the daemon that was started listens.
    pub fn until_it_listens(&self) -> Result<(), String> {
        let begin = Instant::now();
        // A response is required, not a connection: a child that the killed daemon had just forked may hold its socket.
        while self.api().ask("GET", "/host", &Value::Null).is_err() {
            let ended = self.process().as_mut().and_then(|process| process.try_wait().ok().flatten());
            if let Some(status) = ended {
                return Err(format!("taplined has ended by itself: {status}"));
            }
            if begin.elapsed() > TO_LISTEN {
                return Err(format!("taplined does not listen in {} s", TO_LISTEN.as_secs()));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        if let Err(why) = self.kill() {
            eprintln!("{why}");
        }
        // Only processes of this daemon: all have a path in its directory on their command lines.
        let left = self.places.disks().into_iter().map(|disk| disk.pid).chain(self.places.machines());
        for pid in left {
            if let Err(why) = self.places.kill(pid) {
                eprintln!("{why}");
            }
        }
    }
}
