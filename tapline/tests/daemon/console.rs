//! Tests of a machine's console, with `taplined`, QEMU and a guest that answers at its serial port. The terminal is
//! that of script(1).

use std::io::{Read, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use crate::play::{err, out, run};
use crate::taplined::Daemon;
use crate::terminal::script;

/// A daemon with a repository and a disk `boot`, from which the guest boots; `None` without QEMU, which is reported.
fn daemon() -> Option<Daemon> {
    if Command::new("qemu-system-x86_64").arg("--version").output().is_err() {
        eprintln!("not run: there is no qemu-system-x86_64; `make prepare` installs it");
        return None;
    }
    let daemon = Daemon::start_with("");
    let (image, sr) = (daemon.directory().join("boot.raw"), daemon.directory().join("sr"));
    let mut bytes = testkit::firmware::answers_at_the_serial_port().to_vec();
    bytes.resize(1 << 20, 0);
    std::fs::write(&image, bytes).unwrap();
    std::fs::create_dir(&sr).unwrap();
    let path = |path: &std::path::Path| path.display().to_string();
    ask(&daemon, &format!("sr create local --dir {} --format vhd", path(&sr)));
    ask(&daemon, &format!("vdi import boot {} --sr local --source-format raw", path(&image)));
    Some(daemon)
}

#[track_caller]
fn ask(daemon: &Daemon, words: &str) -> String {
    out(&run(&daemon.socket(), &words.split(' ').collect::<Vec<_>>()))
}

fn names(daemon: &Daemon, noun: &str) -> String {
    ask(daemon, &format!("{noun} list -o name"))
}

/// A command in a terminal of its own.
struct Terminal {
    process: Child,
    keys: ChildStdin,
    screen: ChildStdout,
    seen: String,
}

impl Terminal {
    fn run(daemon: &Daemon, words: &str) -> Terminal {
        let mut process = script(&daemon.socket(), 200, words);
        let (keys, screen) = (process.stdin.take().unwrap(), process.stdout.take().unwrap());
        Terminal { process, keys, screen, seen: String::new() }
    }

    /// Waits until this text is printed, and drops all output up to it.
    #[track_caller]
    fn see(&mut self, text: &str) {
        let mut byte = [0];
        while !self.seen.contains(text) {
            assert_eq!(self.screen.read(&mut byte).unwrap(), 1, "not seen: {text:?} in {:?}", self.seen);
            self.seen.push(char::from(byte[0]));
        }
        self.seen.clear();
    }

    fn press(&mut self, keys: &str) {
        self.keys.write_all(keys.as_bytes()).unwrap();
    }

    /// Waits for the command to exit; returns its remaining output.
    #[track_caller]
    fn end(mut self) -> String {
        self.screen.read_to_string(&mut self.seen).unwrap();
        assert!(self.process.wait().unwrap().success(), "{}", self.seen);
        self.seen
    }
}

#[test]
fn a_machine_that_is_run_is_removed_when_it_powers_off() {
    let Some(daemon) = daemon() else { return };
    let mut terminal = Terminal::run(&daemon, "vm run boot --memory 64M --name try");
    terminal.see("connected to the console of 'try'; press Ctrl-] to leave\r\n");
    terminal.see("ready\r\n");
    assert_eq!((names(&daemon, "vm").as_str(), names(&daemon, "vdi").as_str()), ("try\n", "boot\ntry\n"));
    // An interrupt goes to the guest as well.
    terminal.press("a\u{3}b");
    terminal.see("a\u{3}b");
    terminal.press("q");
    let last = terminal.end();
    assert!(last.contains("the machine has ended"), "{last}");
    assert_eq!((names(&daemon, "vm").as_str(), names(&daemon, "vdi").as_str()), ("", "boot\n"));
}

#[test]
fn a_machine_whose_console_is_left_is_removed_unless_it_is_kept() {
    let Some(daemon) = daemon() else { return };
    for (words, left) in [("", ""), ("--keep", "try\n")] {
        let mut terminal = Terminal::run(&daemon, &format!("vm run boot --memory 64M --name try {words}"));
        terminal.see("ready\r\n");
        terminal.press("a\u{1d}b");
        let last = terminal.end();
        assert!(last.contains("left the console"), "{last}");
        assert_eq!(names(&daemon, "vm"), left);
    }
    assert!(ask(&daemon, "vm show try").contains("running"));
    let log = || ask(&daemon, "vm console try --log");
    while !log().contains('a') {
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    assert_eq!(log(), "ready\r\na");
    ask(&daemon, "vm shutdown try --force");
    let halted = run(&daemon.socket(), &["vm", "console", "try"]);
    assert!(err(&halted).contains("cannot open the console of VM 'try'") && err(&halted).contains("start it"));
    assert_eq!(halted.status.code(), Some(7), "{}", err(&halted));
}

#[test]
fn a_console_outlives_the_daemon_and_ends_with_the_machine() {
    let Some(mut daemon) = daemon() else { return };
    ask(&daemon, "vm create web --disk boot --memory 64M --start");
    let mut first = Terminal::run(&daemon, "vm console web");
    first.see("ready\r\n");
    let mut second = Terminal::run(&daemon, "vm console web");
    second.see("ready\r\n");
    first.press("1");
    first.see("1");
    second.see("1");
    daemon.restart();
    // Keys are lost while there is no daemon, so they are repeated until there is an answer.
    while !ask(&daemon, "vm console web --log").contains('2') {
        first.press("2");
        std::thread::sleep(std::time::Duration::from_millis(100));
    }
    first.see("2");
    second.see("2");
    // From a pipe all input is sent unchanged, and the answer is printed.
    let mut piped = Command::new(env!("CARGO_BIN_EXE_tapline"));
    piped.args(["vm", "console", "web"]).env("TAPLINE_SOCKET", daemon.socket());
    let mut piped = piped.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    piped.stdin.take().unwrap().write_all(b"3q").unwrap();
    let output = piped.wait_with_output().unwrap();
    assert!(output.status.success() && out(&output).ends_with('3'), "{output:?}");
    for terminal in [first, second] {
        let last = terminal.end();
        assert!(last.contains('3') && last.contains("the machine has ended"), "{last}");
    }
}

#[test]
fn a_machine_with_an_empty_disk_boots_from_its_dvd() {
    let Some(daemon) = daemon() else { return };
    let iso = daemon.directory().join("installer.iso");
    std::fs::write(&iso, testkit::firmware::dvd(testkit::firmware::answers_at_the_serial_port())).unwrap();
    let words = format!("vm create web --memory 64M --disk root=64M --cdrom {} --start --console", iso.display());
    let mut terminal = Terminal::run(&daemon, &words);
    terminal.see("ready\r\n");
    terminal.press("q");
    assert!(terminal.end().contains("the machine has ended"));
    // Without the ISO image the start is refused before anything is plugged.
    std::fs::remove_file(&iso).unwrap();
    let refused = run(&daemon.socket(), &["vm", "start", "web"]);
    assert!(err(&refused).contains("cannot read") && err(&refused).contains("installer.iso"), "{}", err(&refused));
}

#[test]
fn a_serial_port_that_goes_elsewhere_has_no_console() {
    let Some(daemon) = daemon() else { return };
    ask(&daemon, "vm create web --disk boot --memory 64M --serial null --start");
    let refused = run(&daemon.socket(), &["vm", "console", "web"]);
    assert!(err(&refused).contains("its serial port goes to null"), "{}", err(&refused));
    ask(&daemon, "vm shutdown web --force");
}
