//! Types the pages of the manual's task part (`docs/tasks`) into a terminal as printed (`tasks.sh`), with a daemon and
//! images for each page.
//!
//! A page is typed from its first block of commands to its last. Blocks are fenced with `console`: lines that begin
//! with `# ` are typed by root, `> ` continues a command, and all others are output. Words after `console`:
//!
//! - `fails`: the last command of the block ends with an exit status other than zero.
//! - `not-typed: REASON`: the block needs something that a test does not have, such as a guest's shell.
//!
//! A block fenced with another language and `file: PATH` is saved at that path. A comment that begins with `<!--
//! before` contains shell commands that prepare the host.
//!
//! In printed output, `…` stands for any text and, alone in a line, for any number of lines. Of UUIDs, dates, process
//! numbers and times of less than a minute only the form is compared, and runs of spaces count as one.

use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

use testkit::firmware;

mod page;
mod pattern;

use page::{Page, Step};

/// Commands that prepare the host of each page: images of a guest that answers at its serial port, and of one that
/// writes without end; and what starts a daemon.
const PREPARED: &str = r#"
mkdir -p /srv/images
qemu-img convert -O qcow2 guest.raw /srv/images/debian.qcow2
qemu-img convert -O qcow2 busy.raw /srv/images/busy.qcow2
start_daemon() {
    taplined >>/var/log/taplined.log 2>&1 &
    until tapline host show >/dev/null 2>&1; do sleep 0.1; done
}
"#;

fn directory() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/tasks")
}

/// Types a page; `None` if that is impossible on this machine.
fn typed(name: &str) -> Option<Vec<(Step, String, String)>> {
    let page = Page::parse(&std::fs::read_to_string(directory().join(name)).unwrap()).unwrap();
    let room = tempfile::tempdir().unwrap();
    let bed = room.path().join("bed");
    let steps = bed.join("steps");
    std::fs::create_dir_all(&steps).unwrap();
    // There is room after the sector that is written, so that the image has to grow.
    let guests = [("guest", firmware::answers_at_the_serial_port()), ("busy", firmware::counts_in(8192))];
    for (name, boot) in guests {
        let mut bytes = boot.to_vec();
        bytes.resize(8 << 20, 0);
        std::fs::write(bed.join(name).with_extension("raw"), bytes).unwrap();
    }
    std::fs::write(bed.join("prepare"), format!("{PREPARED}{}", page.before)).unwrap();
    for (number, step) in page.steps.iter().enumerate() {
        match step {
            Step::Typed { command, .. } => std::fs::write(steps.join(format!("{number:03}.typed")), command).unwrap(),
            Step::File { path, text } => {
                std::fs::write(steps.join(format!("{number:03}.path")), path).unwrap();
                std::fs::write(steps.join(format!("{number:03}.file")), text).unwrap();
            }
        }
    }
    let built = Path::new(env!("CARGO_BIN_EXE_tapline")).parent().unwrap();
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/daemon/tasks.sh");
    let ended = Command::new("sh").arg(script).arg(built).arg(&bed).output().unwrap();
    let output = String::from_utf8_lossy(&ended.stdout).into_owned() + &String::from_utf8_lossy(&ended.stderr);
    match ended.status.code() {
        Some(0) => {}
        Some(77) => {
            eprintln!("{output}");
            return None;
        }
        code => panic!("{name}: exit status {code:?}\n{output}"),
    }
    let read = |number: usize, what: &str| std::fs::read_to_string(steps.join(format!("{number:03}.{what}")));
    let ended = page.steps.into_iter().enumerate().filter_map(|(number, step)| {
        let (output, status) = (read(number, "output").ok()?, read(number, "status").ok()?);
        Some((step, output, status.trim().to_owned()))
    });
    Some(ended.collect())
}

/// Whether a line is only printed if the guest is slow to power off.
fn depends_on_the_guest(line: &str) -> bool {
    line.starts_with("tapline: waiting for the guest of ")
        || line.starts_with("  to stop it as if its power were cut: ")
}

/// The commands of a page that did not end as printed, with their actual output.
fn faults(name: &str) -> String {
    let mut faults = String::new();
    for (step, output, status) in typed(name).into_iter().flatten() {
        let Step::Typed { command, printed, fails, line } = step else { continue };
        let continued = command.lines().count() - 1;
        let output = output.lines().skip(continued).map(str::trim_end);
        let output: Vec<&str> = output.filter(|line| !depends_on_the_guest(line)).collect();
        let printed: Vec<&str> = printed.iter().map(String::as_str).collect();
        if (status != "0") != fails || !pattern::matches(&printed, &output) {
            writeln!(faults, "docs/tasks/{name}:{line}: exit status {status}\n# {command}").unwrap();
            writeln!(faults, "{}", output.join("\n")).unwrap();
        }
    }
    faults
}

macro_rules! pages {
    ($($test:ident: $name:literal,)*) => {
        const PAGES: &[&str] = &[$($name),*];
        $(
            #[test]
            #[ignore = "slow: run by `make test-all`"]
            fn $test() {
                let faults = faults($name);
                assert!(faults.is_empty(), "{faults}");
            }
        )*
    };
}

pages! {
    back_up_ends_as_printed: "back-up.md",
    concepts_ends_as_printed: "concepts.md",
    full_ends_as_printed: "full.md",
    grow_ends_as_printed: "grow.md",
    import_ends_as_printed: "import.md",
    install_ends_as_printed: "install.md",
    limit_ends_as_printed: "limit.md",
    move_ends_as_printed: "move.md",
    noisy_neighbour_ends_as_printed: "noisy-neighbour.md",
    schedule_ends_as_printed: "schedule.md",
    upgrade_ends_as_printed: "upgrade.md",
}

#[test]
fn every_page_is_typed() {
    let mut pages: Vec<String> = std::fs::read_dir(directory())
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter(|name| name.ends_with(".md") && name != "README.md")
        .collect();
    pages.sort();
    let mut typed = PAGES.to_vec();
    typed.sort_unstable();
    assert_eq!(pages, typed);
}

/// Commands that no test types, each with its reason. A new one needs a reason that no preparation can remove.
#[test]
fn few_commands_are_not_typed() {
    let (mut typed, mut not_typed) = (0, Vec::new());
    for name in PAGES {
        let page = Page::parse(&std::fs::read_to_string(directory().join(name)).unwrap()).unwrap();
        assert!(page.steps.iter().any(|step| matches!(step, Step::Typed { .. })), "{name} has no typed command");
        typed += page.steps.len();
        not_typed.extend(page.not_typed.into_iter().map(|(command, reason)| format!("{name}: {command} ({reason})")));
    }
    eprintln!("{typed} commands are typed; these are not:\n{}", not_typed.join("\n"));
    assert!(not_typed.len() * 3 <= typed, "{} of {typed}:\n{}", not_typed.len(), not_typed.join("\n"));
}
