//! A directory with a target and images, and the programs that work on them.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::Once;

use serde_json::Value;

static BUILT: Once = Once::new();

/// The program under test; `tapline-disk` is built in the same directory.
pub fn program() -> Command {
    BUILT.call_once(|| {
        if !Path::new(env!("CARGO_BIN_EXE_tapline-backup")).with_file_name("tapline-disk").exists() {
            let built = Command::new(env!("CARGO")).args(["build", "-q", "-p", "tapline-disk"]).status().unwrap();
            assert!(built.success(), "tapline-disk cannot be built");
        }
    });
    let mut command = Command::new(env!("CARGO_BIN_EXE_tapline-backup"));
    command.arg("backup");
    command
}

pub struct Room {
    directory: tempfile::TempDir,
    /// The target, as commands get it.
    pub target: String,
    /// Variables for all commands.
    environment: Vec<(&'static str, String)>,
}

/// How a command has ended.
#[derive(Debug)]
pub struct Ran {
    pub code: i32,
    pub out: String,
    pub err: String,
}

impl Ran {
    pub fn of(output: &Output) -> Ran {
        Ran {
            code: output.status.code().unwrap_or(-1),
            out: String::from_utf8_lossy(&output.stdout).into_owned(),
            err: String::from_utf8_lossy(&output.stderr).into_owned(),
        }
    }

    pub fn json(&self) -> Value {
        assert_eq!(self.code, 0, "{self:?}");
        serde_json::from_str(&self.out).unwrap()
    }

    #[track_caller]
    pub fn failed(&self, code: i32, with: &str) {
        assert_eq!(self.code, code, "{self:?}");
        assert!(self.err.contains(with), "{self:?}");
        assert!(!self.err.contains("PANIC"), "{self:?}");
    }
}

impl Room {
    /// With an empty, unencrypted target `t`.
    pub fn new() -> Room {
        let room = Room::without_target();
        std::fs::create_dir(room.path("t")).unwrap();
        assert_eq!(room.run(&["target", "create", "t"]).code, 0);
        room
    }

    pub fn without_target() -> Room {
        Room { directory: tempfile::tempdir().unwrap(), target: "t".to_owned(), environment: Vec::new() }
    }

    /// With a target in a bucket, not created yet.
    pub fn with_bucket(target: &str, environment: Vec<(&'static str, String)>) -> Room {
        Room { target: target.to_owned(), environment, ..Room::without_target() }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    pub fn command(&self, words: &[&str]) -> Command {
        let mut command = program();
        // What a killed command leaves is removed with the room.
        command.env("TMPDIR", self.directory.path());
        if !self.environment.is_empty() {
            // Not those of a real server that other tests use.
            for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("AWS_")) {
                command.env_remove(name);
            }
        }
        command.envs(self.environment.iter().cloned());
        command.args(words).current_dir(self.directory.path()).stdin(Stdio::null());
        command
    }

    pub fn run(&self, words: &[&str]) -> Ran {
        Ran::of(&self.command(words).output().unwrap())
    }

    /// The id of a new backup.
    #[track_caller]
    pub fn back_up(&self, source: &str, name: &str, more: &[&str]) -> Value {
        let words = [&["create", &self.target, source, "--name", name, "--json"], more].concat();
        self.run(&words).json()
    }

    /// Runs a program of others, which must succeed.
    #[track_caller]
    pub fn tool(&self, program: &str, words: &[&str]) -> String {
        let output = Command::new(program).args(words).current_dir(self.directory.path()).output().unwrap();
        assert!(output.status.success(), "{program} {words:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    #[track_caller]
    pub fn same(&self, a: &str, b: &str) {
        let format = |name: &str| match name.rsplit_once('.') {
            Some((_, "vhd")) => "vpc",
            Some((_, "qcow2")) => "qcow2",
            _ => "raw",
        };
        self.tool("qemu-img", &["compare", "-f", format(a), "-F", format(b), a, b]);
    }

    /// A sparse raw image of some MiB, of which every fourth has data that only this seed has.
    pub fn image(&self, name: &str, mib: u64, seed: u64) {
        let file = File::create(self.path(name)).unwrap();
        file.set_len(mib << 20).unwrap();
        let mut random = fastrand::Rng::with_seed(seed);
        let mut block = vec![0; 1 << 20];
        for at in (0..mib).step_by(4) {
            random.fill(&mut block);
            file.write_all_at(&block, at << 20).unwrap();
        }
    }

    /// All backups on the target.
    #[track_caller]
    pub fn list(&self) -> Vec<Value> {
        self.run(&["list", &self.target, "--json"]).json().as_array().unwrap().clone()
    }

    /// That each byte of the target is sound.
    #[track_caller]
    pub fn verify(&self) {
        let verified = self.run(&["verify", &self.target]);
        assert_eq!(verified.code, 0, "{verified:?}");
    }

    /// That a backup has the content of an image.
    #[track_caller]
    pub fn restores(&self, id: &str, image: &str) {
        let name = format!("restored-{}.raw", fastrand::u64(..));
        let ran = self.run(&["restore", &self.target, id, &format!("raw:{name}")]);
        assert_eq!(ran.code, 0, "{ran:?}");
        self.same(&name, image);
        std::fs::remove_file(self.path(&name)).unwrap();
    }
}

pub fn id(backup: &Value) -> &str {
    backup["id"].as_str().unwrap()
}

/// A server of others, which ends with the test.
pub struct Server(pub Child);

impl Server {
    /// Starts it, and waits until it listens at the socket `s` in the room.
    pub fn start(room: &Room, program: &str, words: &[&str]) -> Server {
        let mut command = Command::new(program);
        command.args(words).current_dir(room.directory.path()).stdin(Stdio::null());
        let mut server = Server(command.spawn().unwrap());
        while UnixStream::connect(room.path("s")).is_err() {
            assert!(server.0.try_wait().unwrap().is_none(), "{program} {words:?} has ended");
            std::thread::yield_now();
        }
        server
    }

    /// QEMU's, of an image.
    pub fn qemu(room: &Room, image: &str, more: &[&str]) -> Server {
        let format = if image.ends_with(".qcow2") { "qcow2" } else { "raw" };
        let socket = room.path("s").display().to_string();
        Server::start(room, "qemu-nbd", &[&["-t", "-e", "4", "-f", format, "-k", &socket], more, &[image]].concat())
    }

    pub fn kill(mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.0.kill().unwrap_or_default();
        self.0.wait().map(drop).unwrap_or_default();
    }
}

/// The export of [`Server`].
pub fn uri(room: &Room) -> String {
    format!("nbd+unix:///?socket={}", room.path("s").display())
}

/// A command that was started with `--json`, and has reported progress `lines` times or ended.
pub fn begun(room: &Room, words: &[&str], lines: usize) -> Child {
    let mut command = room.command(words);
    let mut child = command.arg("--json").stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let mut reader = BufReader::new(child.stderr.take().unwrap());
    let mut line = String::new();
    for _ in 0..lines {
        if reader.read_line(&mut line).unwrap() == 0 {
            break;
        }
    }
    // The rest is read, so that the child does not wait for a reader.
    std::thread::spawn(move || std::io::copy(&mut reader, &mut std::io::sink()));
    child
}
