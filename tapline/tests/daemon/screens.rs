//! Compares lists and objects on terminals of 60, 80 and 200 columns with `screens.txt`.
//!
//! `WRITE_SCREENS=1` rewrites the file, to be reviewed.

use std::fmt::Write;
use std::path::Path;

use api::{Health, HealthState, Mode, Power, Problem, SrState, TaskState, Use, VbdState, Vdi};
use jiff::{Timestamp, ToSpan};

use crate::objects::{done, sr, task, vbd, vdi, vm};
use crate::play::{Played, ok};
use crate::terminal::{on_terminal, said};

const SCREENS: &str = include_str!("screens.txt");
const WIDTHS: [u16; 3] = [60, 80, 200];

/// The commands that are run.
const COMMANDS: &[&str] = &[
    "sr list",
    "vdi list",
    "vdi tree",
    "vbd list",
    "vm list",
    "task list --all",
    "sr show 00005e00-0000-0000-0000-000000000001",
    "vdi show 0000d100-0000-0000-0000-000000000001",
    "vm show 00004a00-0000-0000-0000-000000000001",
];

/// A host with objects of all kinds, and with names of all lengths.
fn host() -> Played {
    let mut full = sr(1, "fast");
    // A bit more than three days from now.
    let soon = in_three_days();
    full.space.as_mut().unwrap().forecast.as_mut().unwrap().full_at = soon;
    let lost = sr(2, "archive of everything that was ever taken over");
    let health = ill(HealthState::Unreachable, &nas_is_gone().detail);
    let lost = api::Sr { state: SrState::Lost, health, space: None, problem: Some(nas_is_gone()), ..lost };
    let snapshot = |number, name, of: &Vdi| Vdi {
        read_only: true,
        snapshot_of: Some(of.uuid),
        snapshot_time: Some("2026-11-23T02:07:00Z".parse().unwrap()),
        users: Vec::new(),
        ..vdi(number, name)
    };
    let root = vdi(1, "web-root");
    let before = snapshot(2, "web-root@2026-11-23T02:07", &root);
    let no_space = || ill(HealthState::Full, "its repository is full, and the guest waits for space");
    let data = Vdi {
        health: no_space(),
        users: vec![Use { vbd: vbd(2).uuid, mode: Mode::ReadWrite }],
        physical_utilisation: 7 << 30,
        ..vdi(3, "all mail since 1998, and what is in the attachments")
    };
    let waiting =
        api::Vbd { vdi: data.uuid, vm: Some(vm(1, "web").uuid), waits_for_space: true, health: no_space(), ..vbd(2) };
    let unplugged = api::Vbd { state: VbdState::Unplugged, pid: None, ..vbd(3) };
    let web = api::Vm { power: Power::Running, pid: Some(4711), ..vm(1, "web") };
    let broken = api::Vm { problem: Some(nas_is_gone()), ..vm(2, "a machine with a name that says what it is for") };
    let tasks = [
        task(1, TaskState::Running, 0.5, Some("copy")),
        api::Task { problem: Some(nas_is_gone()), ..task(2, TaskState::Failed, 0.25, Some("copy")) },
        done(3, vdi(1, "web-root")),
    ];
    let (srs, vdis, vbds, vms) =
        (vec![full, lost], vec![root, before, data], vec![vbd(1), waiting, unplugged], vec![web, broken]);
    Played::lasting([
        ok("GET", "srs", &srs),
        ok("GET", &format!("srs/{}", srs[0].uuid), &srs[0]),
        ok("GET", "vdis", &vdis),
        ok("GET", &format!("vdis/{}", vdis[0].uuid), &vdis[0]),
        ok("GET", "vbds", &vbds),
        ok("GET", "vms", &vms),
        ok("GET", &format!("vms/{}", vms[0].uuid), &vms[0]),
        ok("GET", "tasks", &tasks),
    ])
}

fn ill(state: HealthState, reason: &str) -> Health {
    Health { state, reason: Some(reason.into()), ..Health::default() }
}

fn in_three_days() -> Timestamp {
    Timestamp::now().checked_add(80.hours()).unwrap()
}

fn nas_is_gone() -> Problem {
    Problem::new(api::Code::Timeout, "the server nas has not answered for 30 s").advise("check the network to nas")
}

/// Removes the part of a line that depends on the current time.
fn without_the_time(line: &str) -> &str {
    line.strip_suffix(" per day").map_or(line, |_| "       full: TIME, at 1 GiB per day")
}

#[test]
fn screens_match_the_file_at_each_width() {
    let host = host();
    let mut now = String::new();
    for command in COMMANDS {
        for width in WIDTHS {
            let output = on_terminal(&host, width, command, "");
            assert!(output.status.success(), "{command}: {}", said(&output));
            let screen = said(&output).replace("\u{1b}[1m", "").replace("\u{1b}[0m", "");
            writeln!(now, "==== {command}, {width} columns").unwrap();
            for line in screen.lines().map(without_the_time) {
                // A single object is not cut; the terminal wraps its lines.
                let is_table = !command.contains("show");
                assert!(!is_table || line.chars().count() <= width.into(), "{command}, {width} columns: {line}");
                writeln!(now, "{}", line.trim_end()).unwrap();
            }
        }
    }
    if std::env::var_os("WRITE_SCREENS").is_some() {
        std::fs::write(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/daemon/screens.txt"), &now).unwrap();
        return;
    }
    let differs = now.lines().zip(SCREENS.lines()).find(|(now, listed)| now != listed);
    assert!(now == SCREENS, "{differs:?}\nreview the difference: WRITE_SCREENS=1 cargo test -p tapline screens");
}
