//! Runs programs in a separate directory, and returns their output.

pub mod control;
pub mod guest;
pub mod handed;
pub mod large;
pub mod nbd;
pub mod replaced;
pub mod served;
pub mod small;
pub mod vhost;

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use ::control::redo_name;
use fastrand::Rng;
use seccompiler::{BpfProgram, SeccompAction, SeccompFilter, apply_filter};

/// The program under test.
pub const TAPLINE: &str = env!("CARGO_BIN_EXE_tapline-disk");

/// Bytes without pattern, the same for the same seed.
pub fn noise(seed: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    Rng::with_seed(seed).fill(&mut bytes);
    bytes
}

/// A directory that is removed with its test. Not in /tmp, which may lack O_DIRECT.
pub struct Room {
    directory: tempfile::TempDir,
}

/// The result of a program.
#[derive(Debug)]
pub struct Said {
    pub code: Option<i32>,
    pub out: String,
    pub err: String,
}

impl Room {
    pub fn new() -> Room {
        Room::below(Path::new(env!("CARGO_TARGET_TMPDIR")))
    }

    pub fn below(directory: &Path) -> Room {
        Room { directory: tempfile::tempdir_in(directory).unwrap() }
    }

    pub fn path(&self) -> &Path {
        self.directory.path()
    }

    pub fn file(&self, name: &str) -> PathBuf {
        self.path().join(name)
    }

    pub fn read(&self, name: &str) -> Vec<u8> {
        fs::read(self.file(name)).unwrap()
    }

    pub fn write(&self, name: &str, bytes: &[u8]) {
        fs::write(self.file(name), bytes).unwrap();
    }

    /// Runs a program with arguments without spaces.
    pub fn run(&self, program: &str, words: &str) -> Said {
        self.run_words(program, &words.split_whitespace().collect::<Vec<&str>>())
    }

    /// Makes a command that runs in this room, with its redo logs there.
    pub fn command(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        command.current_dir(self.path()).env("TAPLINE_REDO_DIR", self.file("redo"));
        command
    }

    /// Returns the path of an image's redo log.
    fn redo_log_path(&self, image: &str) -> PathBuf {
        self.file("redo").join(redo_name::file_name(&fs::metadata(self.file(image)).unwrap()))
    }

    /// Returns the contents of an image's redo log.
    pub fn redo_log(&self, image: &str) -> Vec<u8> {
        fs::read(self.redo_log_path(image)).unwrap()
    }

    /// Changes bytes of an image's redo log.
    pub fn write_redo_log(&self, image: &str, at: u64, bytes: &[u8]) {
        let log = fs::File::options().write(true).open(self.redo_log_path(image)).unwrap();
        log.write_all_at(bytes, at).unwrap();
    }

    /// Removes the redo logs, like a power loss.
    pub fn lose_redo_logs(&self) {
        fs::remove_dir_all(self.file("redo")).unwrap();
    }

    pub fn run_words(&self, program: &str, words: &[&str]) -> Said {
        let output = self.command(program).args(words).output();
        let output = output.unwrap_or_else(|error| panic!("{program} cannot be run (make prepare?): {error}"));
        Said::of(&output)
    }

    pub fn tapline(&self, words: &str) -> Said {
        self.run(TAPLINE, words)
    }

    /// Runs a command that must succeed; returns its output.
    pub fn done(&self, words: &str) -> String {
        let said = self.tapline(words);
        assert_eq!(said.code, Some(0), "{words}: {said:?}");
        said.out
    }

    /// Creates an image `a` of a format, or of qcow2 with a data file, as QEMU makes it; returns its image name.
    pub fn image(&self, kind: &str, size: &str) -> String {
        if kind != "data-file" {
            self.done(&format!("image create {kind}:a --size {size}"));
            return format!("{kind}:a");
        }
        self.tool("qemu-img", &format!("create -q -f qcow2 -o data_file=a.data a {size}"));
        "qcow2:a,data-file=a.data".into()
    }

    /// Checks an image, with its parents if given: there must be no error except leaked space, which a killed process
    /// may leave. Returns the output of the check.
    pub fn sound(&self, image: &str) -> String {
        let said = self.tapline(&format!("image check {image}"));
        assert!(matches!(said.code, Some(0 | 5)), "{image}: {said:?}");
        said.out
    }

    /// Checks the same, and that its writer has closed it.
    pub fn sound_and_closed(&self, image: &str) {
        let said = self.sound(image);
        assert!(!said.contains("not closed"), "{image}: {said}");
    }

    /// Runs a command that must succeed; returns its JSON.
    pub fn json(&self, words: &str) -> serde_json::Value {
        serde_json::from_str(&self.done(&format!("{words} --json"))).unwrap()
    }

    /// Runs another program, which must succeed.
    pub fn tool(&self, program: &str, words: &str) -> String {
        let said = self.run(program, words);
        assert_eq!(said.code, Some(0), "{program} {words}: {said:?}");
        said.out
    }

    /// Executes commands of qemu-io (`write -P 1 0 64k`, `discard 0 1M`, `read -P 1 0 64k`) on a disk through the
    /// server, like a guest; each must succeed. `disk` is the image with its parents and options.
    pub fn guest(&self, disk: &str, commands: &[&str]) {
        let mut words = vec!["serve"];
        words.extend(disk.split_whitespace());
        words.extend(["--nbd", "./guest.sock"]);
        let mut server = self.command(TAPLINE);
        let server = server.args(&words).stdout(Stdio::null()).stderr(Stdio::piped());
        let mut server = server.spawn().unwrap();
        let mut log = BufReader::new(server.stderr.take().unwrap());
        let mut said = String::new();
        while !said.contains("serving ") {
            assert!(log.read_line(&mut said).unwrap() > 0, "{disk} is not served: {said}");
        }
        self.qemu_io(&["-f", "raw", "nbd+unix:///?socket=guest.sock"], commands);
        let pid = rustix::process::Pid::from_raw(i32::try_from(server.id()).unwrap()).unwrap();
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
        log.read_to_string(&mut said).unwrap();
        assert!(server.wait().unwrap().success(), "{said}");
    }

    /// Runs qemu-io commands on the image given by these arguments; each must succeed.
    pub fn qemu_io(&self, words: &[&str], commands: &[&str]) {
        let words = ["--discard=unmap"].into_iter().chain(words.iter().copied());
        let words: Vec<&str> = words.chain(commands.iter().flat_map(|command| ["-c", *command])).collect();
        let done = self.run_words("qemu-io", &words);
        assert!(done.code == Some(0) && !done.out.contains("failed"), "{words:?}: {done:?}");
    }

    /// Returns the bytes allocated to a file.
    pub fn space(&self, name: &str) -> u64 {
        use std::os::unix::fs::MetadataExt;
        fs::metadata(self.file(name)).unwrap().blocks() * 512
    }

    /// Creates a raw disk of `len` bytes with some nonzero pieces, at odd offsets.
    pub fn make_raw(&self, name: &str, len: u64) {
        let file = fs::File::create(self.file(name)).unwrap();
        file.set_len(len).unwrap();
        for (at, bytes) in [(0, 70_000), (5 << 20, 1), ((8 << 20) - 512, 4 << 20), (len - 512, 512)] {
            let pattern: Vec<u8> = (0..bytes).map(|n: u64| u8::try_from((n + at / 512) % 251).unwrap() | 1).collect();
            std::os::unix::fs::FileExt::write_all_at(&file, &pattern, at).unwrap();
        }
    }
}

/// Runs `work` in a thread to which the system refuses `call`, like to the processes that it starts.
pub fn where_refused(call: i64, errno: u32, work: impl FnOnce() + Send) {
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let machine = std::env::consts::ARCH.try_into().unwrap();
            let refused = [(call, Vec::new())].into_iter().collect();
            let filter = SeccompFilter::new(refused, SeccompAction::Allow, SeccompAction::Errno(errno), machine);
            apply_filter(&BpfProgram::try_from(filter.unwrap()).unwrap()).unwrap();
            work();
        });
    });
}

/// Returns a number that can be set in the environment of the tests.
pub fn from_environment(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|value| value.parse().unwrap_or_else(|_| panic!("{name} is no number")))
}

impl Said {
    pub fn of(output: &Output) -> Said {
        Said {
            code: output.status.code(),
            out: String::from_utf8_lossy(&output.stdout).into_owned(),
            err: String::from_utf8_lossy(&output.stderr).into_owned(),
        }
    }
}
