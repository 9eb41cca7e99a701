//! Tests of questions, progress bars and tables on a terminal, which is that of script(1).

use std::io::Write;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};

use api::TaskState;

use crate::objects::{done, sr, task, vdi};
use crate::play::{Played, begun, late, ok, scene};

const SR: &str = "00005e00-0000-0000-0000-000000000001";
const VDI: &str = "0000d100-0000-0000-0000-000000000001";
const TASK: &str = "00007a00-0000-0000-0000-000000000001";

/// Starts `tapline` with these arguments on a terminal of this many columns.
pub fn script(socket: &Path, columns: u16, words: &str) -> Child {
    let tapline = env!("CARGO_BIN_EXE_tapline");
    let command = format!("stty cols {columns} && exec '{tapline}' {words}");
    let mut script = Command::new("script");
    script.args(["--quiet", "--return", "--command", &command, "/dev/null"]).env("TAPLINE_SOCKET", socket);
    script.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap()
}

/// Runs `tapline` with these arguments and input on a terminal of this many columns. All output is in `stdout`.
pub fn on_terminal(played: &Played, columns: u16, words: &str, typed: &str) -> Output {
    let mut script = script(&played.socket(), columns, words);
    // Held open: the end of the input would close the terminal.
    let mut stdin = script.stdin.take().unwrap();
    stdin.write_all(typed.as_bytes()).unwrap();
    let output = script.wait_with_output().unwrap();
    drop(stdin);
    output
}

pub fn said(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap().replace('\r', "")
}

#[test]
fn destroying_asks_for_confirmation() {
    let played = Played::new([ok("GET", &format!("vdis/{VDI}"), &vdi(1, "root"))]);
    let output = on_terminal(&played, 100, &format!("vdi destroy {VDI}"), "n\n");
    let said = said(&output);
    assert!(said.contains(&format!("destroy disk \"root\" ({VDI}): really? [y/N] ")), "{said}");
    assert!(said.ends_with("tapline: not confirmed: nothing was done\n"), "{said}");
    assert_eq!(output.status.code(), Some(4));
    played.received();
}

#[test]
fn yes_or_the_option_confirms_destruction() {
    let scenes =
        || [ok("GET", &format!("vdis/{VDI}"), &vdi(1, "root")), scene("DELETE", &format!("vdis/{VDI}"), 204, "")];
    let played = Played::new(scenes().into_iter().chain(scenes()));
    let output = on_terminal(&played, 100, &format!("vdi destroy {VDI}"), "y\n");
    assert_eq!(output.status.code(), Some(0), "{}", said(&output));
    let output = on_terminal(&played, 100, &format!("vdi destroy {VDI} --yes"), "");
    assert_eq!((output.status.code(), said(&output).as_str()), (Some(0), ""));
    played.received();
}

#[test]
fn a_table_has_the_columns_that_fit() {
    let srs = [sr(1, "fast")];
    let played = Played::new([ok("GET", "srs", &srs), ok("GET", "srs", &srs), ok("GET", "srs", &srs)]);
    let narrow = said(&on_terminal(&played, 51, "sr list", ""));
    assert_eq!(
        narrow,
        "\u{1b}[1mUUID      NAME  STATE     VIRTUAL    USED    FREE …\u{1b}[0m\n00005e00  fast  attached  200 GiB  40 GiB  50 GiB\n"
    );
    assert!(said(&on_terminal(&played, 200, "sr list", "")).contains("nas:/srv/vms"));
    assert!(said(&on_terminal(&played, 50, "sr list --wide", "")).contains(SR));
    played.received();
}

#[test]
fn a_task_has_a_bar() {
    let step = format!("tasks/{TASK}?wait=1");
    let played = Played::new([
        begun("POST", &format!("vdis/{VDI}/copy"), &task(1, TaskState::Running, 0.5, Some("copy"))),
        late(ok("GET", &step, &task(1, TaskState::Running, 0.5, Some("copy")))),
        ok("GET", &step, &done(1, vdi(7, "root"))),
        begun("POST", &format!("vdis/{VDI}/copy"), &task(1, TaskState::Running, 0.0, Some("copy"))),
        ok("GET", &step, &done(1, vdi(7, "root"))),
    ]);
    let said = said(&on_terminal(&played, 100, &format!("vdi copy {VDI} --sr {SR}"), ""));
    assert!(said.contains("vdi-copy: running, copy [===============") && said.contains(" 50 %"), "{said:?}");
    assert!(said.ends_with("0000d100-0000-0000-0000-000000000007\n"), "{said:?}");
    // A bar for a short task would only flash.
    let quick = on_terminal(&played, 100, &format!("vdi copy {VDI} --sr {SR}"), "");
    assert_eq!(crate::terminal::said(&quick), "0000d100-0000-0000-0000-000000000007\n");
    played.received();
}
