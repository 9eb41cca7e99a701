//! The daemon under test: in its own directory, and as user 'nobody', because requests may name any file.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, geteuid, kill_process};
use serde_json::Value;
use testbed::tool;

use super::tester::Target;

/// The UID and GID of 'nobody'.
const NOBODY: u32 = 65534;

/// Timeout for the daemon to listen and to exit, sufficient on a loaded machine.
const PATIENCE: Duration = Duration::from_secs(60);

/// The daemon under test, with its directory.
pub struct Daemon {
    room: PathBuf,
    /// A copy of `tapline`, owned by root if we are root.
    tapline: PathBuf,
    taplined: PathBuf,
    token: String,
    process: Option<Child>,
}

impl Daemon {
    /// Starts a daemon in `room`, with its own certificate.
    pub fn start(programs: &Path, room: &Path) -> Result<Daemon, String> {
        let (tapline, mut taplined) = (programs.join("tapline"), programs.join("taplined"));
        let make = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=fuzz \
                    -addext subjectAltName=IP:127.0.0.1 -addext basicConstraints=critical,CA:FALSE \
                    -keyout key.pem -out certificate.pem";
        tool::text(Command::new("openssl").args(make.split(' ')).current_dir(room))
            .map_err(|error| error.to_string())?;
        for name in ["state", "run", "log", "sr", "place"] {
            fs::create_dir(room.join(name)).map_err(|error| format!("{name}: {error}"))?;
        }
        let image = File::create(room.join("image.raw")).and_then(|file| file.set_len(1 << 20));
        image.map_err(|error| format!("image.raw: {error}"))?;
        let path = |name: &str| room.join(name).display().to_string();
        let config = format!(
            "state-directory = {:?}\nrun-directory = {:?}\nlog-directory = {:?}\n\
             [api]\nlisten = [\"127.0.0.1:0\"]\ncertificate = {:?}\nkey = {:?}\n\
             [storage]\nanswer-timeout = 5\n[plug]\nstep-timeout = 20\n",
            path("state"),
            path("run"),
            path("log"),
            path("certificate.pem"),
            path("key.pem"),
        );
        fs::write(room.join("taplined.toml"), config).map_err(|error| error.to_string())?;
        if geteuid().is_root() {
            // The user 'nobody' may not be able to read the checkout.
            for name in ["taplined", "tapline-disk"] {
                fs::copy(programs.join(name), room.join(name)).map_err(|error| format!("copy {name}: {error}"))?;
            }
            taplined = room.join("taplined");
            let owner = format!("{NOBODY}:{NOBODY}");
            tool::text(Command::new("chown").args(["-R", &owner]).arg(room)).map_err(|error| error.to_string())?;
        }
        let mut daemon = Daemon { room: room.to_owned(), tapline, taplined, token: String::new(), process: None };
        daemon.restart()?;
        daemon.token = daemon.tapline(&["token", "create", "fuzz", "--expires", "1"])?.trim().to_owned();
        Ok(daemon)
    }

    /// Starts the daemon's process, again if necessary.
    pub fn restart(&mut self) -> Result<(), String> {
        let log = File::create(self.log()).map_err(|error| format!("{}: {error}", self.log().display()))?;
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL"]);
        if geteuid().is_root() {
            let number = NOBODY.to_string();
            command.args(["--reuid", &number, "--regid", &number, "--clear-groups"]);
        }
        command.arg("--").arg(&self.taplined).arg("--config").arg(self.room.join("taplined.toml"));
        let process = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log).current_dir(&self.room).spawn();
        self.process = Some(process.map_err(|error| format!("cannot run {}: {error}", tool::line_of(&command)))?);
        let until = Instant::now() + PATIENCE;
        while let Err(why) = self.tapline(&["host", "show"]) {
            self.is_running()?;
            if Instant::now() > until {
                return Err(why);
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(())
    }

    fn log(&self) -> PathBuf {
        self.room.join("stderr")
    }

    /// The path of its catalogue.
    pub fn catalogue(&self) -> PathBuf {
        self.room.join("state/catalogue.db")
    }

    /// Its address and credentials.
    pub fn target(&self) -> Result<Target, String> {
        let log = fs::read_to_string(self.log()).unwrap_or_default();
        let port = log.split_once("serving over TLS address=127.0.0.1:").map(|(_, rest)| rest);
        let port = port.and_then(|rest| rest.split_whitespace().next()).unwrap_or("0");
        let (url, ca) = (format!("https://127.0.0.1:{port}"), self.room.join("certificate.pem"));
        Ok(Target { url, ca, token: self.token.clone(), hints: self.hints()? })
    }

    /// Creates objects that requests can use.
    pub fn furnish(&self) -> Result<(), String> {
        let place = self.room.join("sr").display().to_string();
        for words in [
            &["sr", "create", "local", "--dir", &place][..],
            &["vdi", "create", "one", "--sr", "local", "--size", "16M"],
            &["vdi", "create", "two", "--sr", "local", "--size", "16M"],
            &["vdi", "snapshot", "one", "--name", "kept"],
            &["vm", "create", "machine", "--memory", "64M"],
            &["vbd", "create", "--vdi", "one"],
        ] {
            self.tapline(words)?;
        }
        Ok(())
    }

    /// The tester's configuration: most requests use existing objects, the others missing ones.
    fn hints(&self) -> Result<String, String> {
        let mut text = String::new();
        for noun in ["sr", "vdi", "vbd", "vm"] {
            let known = uuids(&self.list(noun)?);
            text += &format!("[dictionaries.{noun}]\nvalues = {known}\n");
            text += &format!("[[operations]]\ninclude-path-regex = \"^/v1/{noun}s/[{{]uuid\"\n");
            text += &format!("parameters = {{ \"path.uuid\" = {{ dictionary = \"{noun}\", probability = 0.8 }} }}\n");
        }
        let path = |name: &str| self.room.join(name).display().to_string();
        let (places, files) = (vec![path("place"), path("sr")], vec![path("image.raw"), path("new.raw")]);
        text += &format!(
            "[dictionaries.place]\nvalues = {places:?}\n[dictionaries.file]\nvalues = {files:?}\n\
             [dictionaries.etag]\nvalues = [\"*\"]\n[parameters]\n"
        );
        // Any other condition fails before the operation is tried.
        text += "\"header.If-Match\" = { dictionary = \"etag\", probability = 0.9 }\n";
        let fields = [
            ("sr", "sr"),
            ("vdi", "vdi"),
            ("vm", "vm"),
            ("snapshot", "vdi"),
            ("source.path", "place"),
            ("path", "file"),
        ];
        for (field, dictionary) in fields {
            text += &format!("\"body.{field}\" = {{ dictionary = \"{dictionary}\", probability = 0.8 }}\n");
        }
        Ok(text)
    }

    fn tapline(&self, words: &[&str]) -> Result<String, String> {
        let mut tapline = Command::new(&self.tapline);
        tapline.args(words).env("TAPLINE_SOCKET", self.room.join("run/taplined.sock")).env_remove("TAPLINE_CONNECT");
        tool::text(&mut tapline).map_err(|error| error.to_string())
    }

    fn is_running(&mut self) -> Result<(), String> {
        let Some(process) = &mut self.process else { return Err("the daemon was not started".into()) };
        match process.try_wait() {
            Ok(None) => Ok(()),
            Ok(Some(status)) => Err(format!("the daemon has ended ({status}): see {}", self.log().display())),
            Err(error) => Err(format!("cannot look after the daemon: {error}")),
        }
    }

    /// Checks that it responds, and that nothing in it has panicked.
    pub fn is_alive(&mut self) -> Result<(), String> {
        self.is_running()?;
        self.tapline(&["host", "show"])?;
        let log = fs::read_to_string(self.log()).map_err(|error| error.to_string())?;
        match log.lines().find(|line| line.contains("PANIC")) {
            Some(line) => Err(format!("the daemon has panicked: {line}")),
            None => Ok(()),
        }
    }

    /// All objects once nothing is in progress, without values that change by themselves.
    pub fn objects(&self) -> Result<Value, String> {
        let until = Instant::now() + PATIENCE;
        while self.list("task")? != Value::Array(Vec::new()) {
            if Instant::now() > until {
                return Err(format!("tasks do not end: {}", self.list("task")?));
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        let nouns = ["sr", "vdi", "vbd", "vm"];
        let lists = nouns.map(|noun| Ok((noun.to_owned(), uuids(&self.list(noun)?))));
        lists.into_iter().collect::<Result<serde_json::Map<_, _>, String>>().map(Value::Object)
    }

    fn list(&self, noun: &str) -> Result<Value, String> {
        serde_json::from_str(&self.tapline(&[noun, "list", "--json"])?).map_err(|error| error.to_string())
    }

    /// Stops machines, unplugs disks and stops the daemon as systemd does.
    pub fn stop(&mut self) -> Result<(), String> {
        for vm in self.list("vm")?.as_array().into_iter().flatten().filter(|vm| vm["power"] != "halted") {
            self.tapline(&["vm", "shutdown", vm["uuid"].as_str().unwrap_or_default(), "--force"])?;
        }
        self.tapline(&["host", "drain", "--timeout", "5"])?;
        let Some(mut process) = self.process.take() else { return Ok(()) };
        kill_process(Pid::from_child(&process), Signal::TERM).map_err(|errno| errno.to_string())?;
        let ended = process.wait().map_err(|error| error.to_string())?;
        if ended.success() { Ok(()) } else { Err(format!("the daemon has not ended well: {ended}")) }
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // After a failure its disks, which outlive a daemon, are stopped with it.
        if self.process.is_some() {
            if let Err(why) = self.stop() {
                eprintln!("disks of {} may still be served: {why}", self.room.display());
            }
        }
    }
}

fn uuids(list: &Value) -> Value {
    list.as_array().into_iter().flatten().map(|object| object["uuid"].clone()).collect()
}
