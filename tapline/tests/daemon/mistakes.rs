//! Makes the mistakes in `mistakes.txt` with `taplined` and the disk program, in the order of the file, and compares
//! messages and exit codes. No mistake may change anything.
//!
//! `WRITE_MISTAKES=1` rewrites the file from the commands in it. To be reviewed: does each message contain what was
//! tried, on what, why it failed, and what to do now?

use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

use control::size::readable;

use crate::play::{out, run};
use crate::taplined::Daemon;

/// The file: `$ COMMAND`, its output behind bars, `exit CODE`. Other lines are headings.
const MISTAKES: &str = include_str!("mistakes.txt");

/// The beginning of each line of output in the file.
const INDENT: &str = "| ";

/// The working directory of the commands, in the file.
const HERE: &str = "/here";

/// Commands that set up the objects.
const BEFORE: &[&str] = &[
    "sr create local --dir /here/sr --format vhd --description disks",
    "sr create other --dir /here/other --format qcow2",
    "vdi create web --sr local --size 64M",
    "vdi create data --sr local --size 64M",
    "vdi create spare --sr other --size 64M",
    "vdi snapshot data --name before",
    "vm create guest --memory 64M --disk web",
    "vdi attach data",
    "image create vhd:/here/a.vhd --size 10M",
    "image create qcow2:/here/b.qcow2 --size 10M",
    "image create raw:/here/c.raw --size 10M",
];

struct Bed {
    daemon: Daemon,
}

impl Bed {
    fn new() -> Bed {
        let bed = Bed { daemon: Daemon::start_with("") };
        for directory in ["sr", "other", "images", "empty"] {
            std::fs::create_dir(bed.here().join(directory)).unwrap();
        }
        std::fs::write(bed.here().join("text"), "not an image, and not a directory\n").unwrap();
        for command in BEFORE {
            let words = bed.words(command);
            out(&run(&bed.daemon.socket(), &words.iter().map(String::as_str).collect::<Vec<_>>()));
        }
        bed
    }

    fn here(&self) -> PathBuf {
        self.daemon.directory().to_owned()
    }

    /// Splits a command of the file into words.
    fn words(&self, command: &str) -> Vec<String> {
        split(&command.replace(HERE, &self.here().display().to_string()))
    }

    /// The output of a command and its exit code, in the format of the file.
    fn result(&self, command: &str) -> String {
        let output = Command::new(env!("CARGO_BIN_EXE_tapline"))
            .args(self.words(command))
            .env("TAPLINE_SOCKET", self.daemon.socket())
            // A log that a killed process has left on this host may have the name of a file of this test.
            .env("TAPLINE_REDO_DIR", self.here().join("run/redo"))
            .env_remove("COLUMNS")
            .current_dir(self.here())
            .stdin(std::process::Stdio::null())
            .output()
            .unwrap();
        let code = output.status.code().unwrap();
        let text = [output.stdout, output.stderr].concat();
        let mut shown = String::new();
        for line in self.normal(&String::from_utf8(text).unwrap()).lines() {
            writeln!(shown, "{}", format!("{INDENT}{line}").trim_end()).unwrap();
        }
        writeln!(shown, "exit {code}").unwrap();
        shown
    }

    /// Replaces text that differs between runs.
    fn normal(&self, text: &str) -> String {
        let text = text.replace(&self.here().display().to_string(), HERE);
        let mut normal = String::new();
        let mut rest = text.as_str();
        while let Some(first) = rest.chars().next() {
            if rest.get(..36).is_some_and(|word| word.parse::<uuid::Uuid>().is_ok()) {
                normal.push_str("UUID");
                rest = &rest[36..];
            } else {
                normal.push(first);
                rest = &rest[first.len_utf8()..];
            }
        }
        let stat = rustix::fs::statvfs(self.here()).unwrap();
        let normal = normal.replace(&readable(stat.f_blocks * stat.f_frsize), "SIZE");
        let words = normal.split_inclusive([' ', ',']).map(|word| match word.strip_suffix([' ', ',']) {
            Some(time) if time.parse::<jiff::Timestamp>().is_ok() => word.replace(time, "TIME"),
            _ => word.to_owned(),
        });
        words.collect()
    }

    /// The state of everything that a mistake could have changed.
    fn all(&self) -> String {
        let lists = ["sr", "vdi", "vbd", "vm", "token"].map(|noun| {
            let mut values: serde_json::Value =
                serde_json::from_str(&out(&run(&self.daemon.socket(), &[noun, "list", "--json"]))).unwrap();
            values.as_array_mut().unwrap().iter_mut().for_each(without_measurements);
            format!("{values:#}\n")
        });
        lists.concat() + &files(&self.here())
    }
}

/// Removes values that are measured repeatedly, such as free space.
fn without_measurements(object: &mut serde_json::Value) {
    if let Some(fields) = object.as_object_mut() {
        fields.retain(|_, value| value.is_string() || value.is_boolean());
    }
}

/// All files and their lengths, except those that the daemon writes for itself.
fn files(directory: &Path) -> String {
    let mut lines: Vec<String> = Vec::new();
    let mut left = vec![directory.to_owned()];
    while let Some(next) = left.pop() {
        for entry in std::fs::read_dir(next).unwrap().map(Result::unwrap) {
            let path = entry.path();
            let name = path.strip_prefix(directory).unwrap().display().to_string();
            match (entry.file_type().unwrap().is_dir(), name.as_str()) {
                (_, "state" | "run" | "log" | "stderr") => {}
                (true, _) => left.push(path),
                (false, _) => lines.push(format!("{name} {}\n", entry.metadata().unwrap().len())),
            }
        }
    }
    lines.sort();
    lines.concat()
}

/// Splits a command as a shell does; quotes are single ones.
fn split(command: &str) -> Vec<String> {
    let mut words = Vec::new();
    for (number, part) in command.split('\'').enumerate() {
        match number % 2 {
            0 => words.extend(part.split_whitespace().map(str::to_owned)),
            _ => words.push(part.to_owned()),
        }
    }
    words
}

#[test]
#[ignore = "slow: run by `make test-all`"]
fn each_mistake_has_the_message_of_the_list_and_changes_nothing() {
    let bed = Bed::new();
    let mut before = bed.all();
    let (mut now, mut wrong) = (String::new(), Vec::new());
    let mut mistakes = 0;
    for line in MISTAKES.lines() {
        if line.starts_with(INDENT.trim_end()) || line.starts_with("exit ") {
            continue;
        }
        writeln!(now, "{line}").unwrap();
        if let Some(command) = line.strip_prefix("$ tapline") {
            let result = bed.result(command);
            if result.ends_with("exit 0\n") || result.lines().count() == 1 {
                wrong.push(format!("is done, or nothing is said: {command}\n{result}"));
            }
            now.push_str(&result);
            mistakes += 1;
            let after = bed.all();
            if after != before {
                wrong.push(format!("something has changed: {command}"));
                before = after;
            }
        }
    }
    let writes = std::env::var_os("WRITE_MISTAKES").is_some();
    if writes {
        std::fs::write(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/daemon/mistakes.txt"), &now).unwrap();
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    if writes {
        return;
    }
    let differs = now.lines().zip(MISTAKES.lines()).find(|(now, listed)| now != listed);
    assert!(now == MISTAKES, "{differs:?}\nreview the difference: WRITE_MISTAKES=1 cargo test -p tapline mistake");
    assert!(mistakes >= 150, "{mistakes}");
}
