//! A directory with qcow2 images in it, and QEMU's tools to make and judge them (tools/prepare installs qemu-utils).

use std::path::PathBuf;
use std::process::{Command, Output, Stdio};

use disk::Severity;
use disk::qcow2::{Repair, Report};

/// What a check comes to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// Nothing is wrong.
    Clean,
    /// Space is lost.
    Leaks,
    /// Something is wrong, or the image cannot be checked at all.
    Corrupt,
}

/// The directory; gone when dropped.
pub struct Room(tempfile::TempDir);

impl Room {
    pub fn new() -> Room {
        Room(tempfile::tempdir().unwrap())
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    pub fn read(&self, name: &str) -> Vec<u8> {
        std::fs::read(self.path(name)).unwrap()
    }

    pub fn write(&self, name: &str, bytes: &[u8]) {
        std::fs::write(self.path(name), bytes).unwrap();
    }

    pub fn run(&self, program: &str, arguments: &[&str]) -> Output {
        let mut command = Command::new(program);
        command.args(arguments).current_dir(self.0.path()).stdin(Stdio::null());
        command.output().unwrap_or_else(|error| panic!("{program} (of qemu-utils) does not run: {error}"))
    }

    /// qemu-img with words separated by spaces.
    pub fn img(&self, line: &str) {
        let words: Vec<&str> = line.split_whitespace().collect();
        let output = self.run("qemu-img", &words);
        assert!(output.status.success(), "qemu-img {line}: {}", String::from_utf8_lossy(&output.stderr));
    }

    /// qemu-io with commands separated by semicolons.
    pub fn io(&self, name: &str, commands: &str) {
        let output = self.run("qemu-io", &io_words(name, commands));
        assert!(output.status.success(), "qemu-io {commands}: {}", String::from_utf8_lossy(&output.stderr));
    }

    /// The same, killed at the end before anything is closed.
    pub fn io_killed(&self, name: &str, commands: &str) {
        let commands = format!("{commands};flush;sigraise 9");
        assert!(!self.run("qemu-io", &io_words(name, &commands)).status.success());
    }

    /// What qemu-img says of an image.
    pub fn qemu_class(&self, name: &str) -> Class {
        let output = self.run("qemu-img", &["check", "-f", "qcow2", name]);
        match output.status.code() {
            Some(0) => Class::Clean,
            Some(3) => Class::Leaks,
            Some(1 | 2) => Class::Corrupt,
            other => panic!("qemu-img check ended with {other:?}: {}", String::from_utf8_lossy(&output.stderr)),
        }
    }

    /// What qemu-img says, for people.
    pub fn qemu_text(&self, name: &str) -> String {
        let output = self.run("qemu-img", &["check", "-f", "qcow2", name]);
        String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned()
    }

    /// Whether an image can be opened, if only to look at it.
    pub fn opens(&self, name: &str) -> bool {
        self.run("qemu-img", &["map", "-U", "-f", "qcow2", name]).status.success()
    }

    /// Whether two images hold the same, for qemu-img.
    pub fn is_same(&self, one: &str, other: &str) -> bool {
        self.run("qemu-img", &["compare", "-U", "-f", "qcow2", "-F", "qcow2", one, other]).status.success()
    }
}

fn io_words<'a>(name: &'a str, commands: &'a str) -> Vec<&'a str> {
    let commands = commands.split(';').flat_map(|command| ["-c", command.trim()]);
    ["-f", "qcow2"].into_iter().chain(commands).chain([name]).collect()
}

/// What our check says.
pub fn class_of(report: &Result<Report, disk::ImageError>) -> Class {
    match report.as_ref().map(Report::worst) {
        Ok(None) => Class::Clean,
        Ok(Some(Severity::Leak)) => Class::Leaks,
        Ok(Some(_)) | Err(_) => Class::Corrupt,
    }
}

/// Our check of bytes.
pub fn class(bytes: &[u8]) -> Class {
    let mut source = bytes;
    class_of(&disk::qcow2::check(&mut source))
}

/// Which sectors of a batch reach the file.
#[derive(Clone, Copy, Debug)]
pub enum Sectors {
    None,
    Even,
    Odd,
}

/// Makes the writes of the first `batches` batches of a repair, and some of the next.
pub fn apply(bytes: &mut Vec<u8>, repair: &Repair, batches: usize, then: Sectors) {
    if let Some(len) = repair.new_len {
        bytes.resize(usize::try_from(len).unwrap(), 0);
    }
    for write in repair.batches.iter().take(batches).flatten() {
        let at = usize::try_from(write.at.0).unwrap();
        bytes[at..at + write.bytes.len()].copy_from_slice(&write.bytes);
    }
    let skip = match then {
        Sectors::None => return,
        Sectors::Even => 0,
        Sectors::Odd => 1,
    };
    for write in repair.batches.iter().skip(batches).take(1).flatten() {
        for (number, sector) in write.bytes.chunks(512).enumerate() {
            let at = usize::try_from(write.at.0).unwrap() + number * 512;
            if at / 512 % 2 == skip {
                bytes[at..at + 512].copy_from_slice(sector);
            }
        }
    }
}
