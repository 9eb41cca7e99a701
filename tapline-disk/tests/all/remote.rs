//! Images at NBD servers: qemu-nbd, nbdkit and our own; servers that are killed and started again, and hostile ones.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::process::{Child, Stdio};
use std::time::Duration;

use crate::tool::served::Disk;
use crate::tool::{Room, TAPLINE, noise};

const MIB: u64 = 1 << 20;

/// Words for nbdkit: 2 MiB of the file at once, then 1 MiB/s. The data of [`make_disk`] takes 9 s.
pub fn slow_file(file: &str) -> String {
    format!("--filter=rate file {file} rate=8M")
}

/// A server of others, which is killed with this.
pub struct Server(Child);

impl Server {
    /// Starts a server at the socket `socket` of the room, and waits until it listens.
    pub fn start(room: &Room, words: &str, socket: &str) -> Server {
        // A killed server leaves its socket behind.
        drop(std::fs::remove_file(room.file(socket)));
        let (program, words) = words.split_once(' ').unwrap();
        let mut command = room.command(program);
        command.args(words.split_whitespace()).stdout(Stdio::null()).stderr(Stdio::null());
        let mut child = command.spawn().unwrap_or_else(|error| panic!("{program} (make prepare?): {error}"));
        while UnixStream::connect(room.file(socket)).is_err() {
            assert_eq!(child.try_wait().unwrap(), None, "{program} {words} has ended");
            std::thread::yield_now();
        }
        Server(child)
    }

    pub fn qemu(room: &Room, file: &str, socket: &str) -> Server {
        // It resolves a relative path of a socket against its own directory.
        let at = room.file(socket);
        Server::start(room, &format!("qemu-nbd --persistent -e 8 -f raw -k {} {file}", at.display()), socket)
    }

    /// Stops its process, or lets it continue: its connections stay, and nothing is answered.
    pub fn signal(&self, signal: rustix::process::Signal) {
        rustix::process::kill_process(rustix::process::Pid::from_child(&self.0), signal).unwrap();
    }

    pub fn nbdkit(room: &Room, words: &str, socket: &str) -> Server {
        let at = room.file(socket);
        Server::start(room, &format!("nbdkit -f -U {} {words}", at.display()), socket)
    }

    /// nbdkit with the file `file`, at a rate that no job comes to its end with while a test waits for the processor.
    pub fn slow(room: &Room, file: &str, socket: &str) -> Server {
        Server::nbdkit(room, &slow_file(file), socket)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

pub fn uri(socket: &str) -> String {
    format!("nbd+unix:///?socket={socket}")
}

/// A disk of 64 MiB with data at its beginning, in its middle and at its end.
pub fn make_disk(room: &Room, name: &str) {
    let mut bytes = vec![0; 64 << 20];
    bytes[..3 << 20].copy_from_slice(&noise(1, 3 << 20));
    bytes[32 << 20..40 << 20].copy_from_slice(&noise(2, 8 << 20));
    bytes[(64 << 20) - 512..].fill(7);
    room.write("full.raw", &bytes);
    room.done(&format!("image convert raw:full.raw {name}"));
}

/// Waits until `job` has written 1 MiB more to the file `file`.
pub fn wait_for_progress(room: &Room, file: &str, job: &mut Child) {
    let before = room.space(file);
    while room.space(file) < before + MIB {
        assert_eq!(job.try_wait().unwrap(), None, "it ended before it had written to {file}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Copies a disk to a server of an empty disk and back.
fn copies_there_and_back(room: &Room, socket: &str) {
    let there = uri(socket);
    room.done(&format!("image convert qcow2:disk.qcow2 {there} --verify"));
    room.done(&format!("image compare {there} raw:full.raw"));
    room.done(&format!("image convert {there} qcow2:back-{socket}.qcow2"));
    room.done(&format!("image compare qcow2:back-{socket}.qcow2 raw:full.raw"));
    let info = room.json(&format!("image info {there}"));
    assert_eq!(info[0]["size"], 64 * MIB);
}

#[test]
fn a_disk_is_copied_to_each_server_and_back() {
    let room = Room::new();
    make_disk(&room, "qcow2:disk.qcow2");
    for name in ["qemu.raw", "nbdkit.raw", "own.raw"] {
        room.done(&format!("image create raw:{name} --size 64M"));
    }
    let _qemu = Server::qemu(&room, "qemu.raw", "qemu");
    copies_there_and_back(&room, "qemu");
    let _nbdkit = Server::nbdkit(&room, "file nbdkit.raw", "nbdkit");
    copies_there_and_back(&room, "nbdkit");
    let _memory = Server::nbdkit(&room, "memory 64M", "memory");
    copies_there_and_back(&room, "memory");
    // Its units are the largest that a disk can have.
    let words = "--filter=blocksize-policy memory 64M blocksize-minimum=4k blocksize-error-policy=error";
    let _large = Server::nbdkit(&room, words, "large");
    copies_there_and_back(&room, "large");
    // Neither structured replies nor zeroes.
    let _plain = Server::nbdkit(&room, "--no-sr --filter=nozero memory 64M zeromode=none", "plain");
    copies_there_and_back(&room, "plain");
    let _own = Disk::serve(&room, "raw:own.raw --nbd own");
    copies_there_and_back(&room, "own");
}

#[test]
fn a_server_that_takes_one_client_is_enough_to_verify() {
    let room = Room::new();
    make_disk(&room, "qcow2:disk.qcow2");
    room.done("image create raw:one.raw --size 64M");
    // It ends with its first client, so a connection cannot tell whether it listens; the parent's exit does.
    let mut server = room.command("qemu-nbd");
    server.args(["--fork", "-f", "raw", "-k"]).arg(room.file("one")).arg("one.raw").stdout(Stdio::null());
    assert!(server.status().unwrap().success());
    room.done(&format!("image convert qcow2:disk.qcow2 {} --verify", uri("one")));
    assert!(room.read("one.raw") == room.read("full.raw"), "the copy differs");
}

#[test]
fn holes_are_shown_and_not_transferred() {
    let room = Room::new();
    make_disk(&room, "qcow2:disk.qcow2");
    room.done("image create raw:there.raw --size 64M");
    let server = Server::nbdkit(&room, "--filter=stats file there.raw statsfile=stats", "s");
    room.done(&format!("image convert qcow2:disk.qcow2 {}", uri("s")));
    let lines = room.json(&format!("image map {}", uri("s")));
    let data: u64 = lines
        .as_array()
        .unwrap()
        .iter()
        .filter(|line| line["data"] == true)
        .map(|line| line["length"].as_u64().unwrap())
        .sum();
    assert!((11 * MIB..13 * MIB).contains(&data), "{lines}");
    drop(server);
    let mut server = Server::nbdkit(&room, "--filter=stats file there.raw statsfile=stats", "s");
    room.done(&format!("image convert {} qcow2:back.qcow2", uri("s")));
    // nbdkit writes its statistics when it is asked to end.
    let id = rustix::process::Pid::from_child(&server.0);
    rustix::process::kill_process(id, rustix::process::Signal::TERM).unwrap();
    server.0.wait().unwrap();
    let stats = String::from_utf8(room.read("stats")).unwrap();
    let line = stats.lines().find(|line| line.starts_with("read:")).unwrap();
    assert!(line.contains(" 11") || line.contains(" 12"), "not 11 to 12 MiB were read: {line}");
}

/// Waits for a line with these words on the standard error of a job.
pub fn wait_for_line(lines: &mut impl Iterator<Item = std::io::Result<String>>, words: &str) {
    let mut seen = Vec::new();
    for line in lines {
        let line = line.unwrap();
        if line.contains(words) {
            return;
        }
        seen.push(line);
    }
    panic!("no line with '{words}': {seen:?}");
}

/// Starts a job on servers that are slow, so that it is not done before they are killed.
pub fn start(room: &Room, words: &str) -> Child {
    room.command(TAPLINE).args(words.split_whitespace()).stderr(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap()
}

#[test]
fn servers_killed_during_a_conversion_change_nothing() {
    let room = Room::new();
    make_disk(&room, "raw:from.raw");
    room.done("image create raw:to.raw --size 64M");
    let mut source = Server::nbdkit(&room, "file from.raw", "from");
    let mut target = Server::slow(&room, "to.raw", "to");
    let mut job = start(&room, &format!("image convert {} {}", uri("from"), uri("to")));
    let mut lines = BufReader::new(job.stderr.take().unwrap()).lines();
    for round in 1..=3 {
        wait_for_progress(&room, "to.raw", &mut job);
        drop(target);
        wait_for_line(&mut lines, "to: connection lost");
        target = match round {
            3 => Server::nbdkit(&room, "file to.raw", "to"),
            _ => Server::slow(&room, "to.raw", "to"),
        };
        wait_for_line(&mut lines, "to: connected again");
        if round == 2 {
            drop(source);
            source = Server::nbdkit(&room, "file from.raw", "from");
        }
    }
    let rest: Vec<String> = lines.map(Result::unwrap).collect();
    assert!(job.wait().unwrap().success(), "{rest:?}");
    assert!(room.read("to.raw") == room.read("full.raw"), "the copy differs");
}

#[test]
fn an_export_of_another_size_is_not_used_until_it_is_as_before() {
    let room = Room::new();
    make_disk(&room, "raw:from.raw");
    let source = Server::slow(&room, "from.raw", "from");
    let mut job = start(&room, &format!("image convert {} qcow2:to.qcow2", uri("from")));
    let mut lines = BufReader::new(job.stderr.take().unwrap()).lines();
    while room.file("to.qcow2.tapline-new").metadata().is_err() {
        assert_eq!(job.try_wait().unwrap(), None);
        std::thread::sleep(Duration::from_millis(1));
    }
    drop(source);
    let other = Server::nbdkit(&room, "memory 32M", "from");
    wait_for_line(&mut lines, "the export has changed: it had 67108864 bytes and has 33554432 now");
    drop(other);
    let _source = Server::nbdkit(&room, "file from.raw", "from");
    let rest: Vec<String> = lines.map(Result::unwrap).collect();
    assert!(job.wait().unwrap().success(), "{rest:?}");
    room.done("image compare qcow2:to.qcow2 raw:full.raw");
}

#[test]
fn an_error_of_the_server_is_one_of_the_job() {
    let room = Room::new();
    make_disk(&room, "qcow2:disk.qcow2");
    let _writes = Server::nbdkit(&room, "--filter=error memory 64M error-pwrite=EIO error-pwrite-rate=100%", "writes");
    let said = room.tapline(&format!("image convert qcow2:disk.qcow2 {}", uri("writes")));
    assert!(said.code == Some(4) && said.err.contains("Input/output error"), "{said:?}");
    let _full = Server::nbdkit(&room, "--filter=error memory 64M error-pwrite=ENOSPC error-pwrite-rate=100%", "full");
    let said = room.tapline(&format!("image convert qcow2:disk.qcow2 {}", uri("full")));
    assert!(said.code == Some(4) && said.err.contains("No space"), "{said:?}");
    let _reads = Server::nbdkit(&room, "--filter=error file full.raw error-pread=EIO error-pread-rate=100%", "reads");
    let said = room.tapline(&format!("image compare {} qcow2:disk.qcow2", uri("reads")));
    assert!(said.code == Some(4) && said.err.contains("see the log of its server"), "{said:?}");
}

#[test]
fn what_cannot_be_used_is_refused_with_the_reason() {
    let room = Room::new();
    room.done("image create raw:small.raw --size 32M");
    room.done("image create qcow2:disk.qcow2 --size 64M");
    let _small = Server::qemu(&room, "small.raw", "small");
    let _read_only = Server::nbdkit(&room, "-r memory 64M", "read-only");
    let _odd = Server::nbdkit(&room, "memory 1000", "odd");
    let small = uri("small");
    for (words, why) in [
        (format!("image convert qcow2:disk.qcow2 {small}"), "the export has 33554432 bytes"),
        (format!("image convert qcow2:disk.qcow2 {}", uri("read-only")), "it is read-only"),
        (format!("image info {}", uri("odd")), "1000 bytes is not a multiple of 512"),
        (format!("image info {}", uri("missing")), "No such file"),
        ("image info nbd+unix:///other?socket=small".to_owned(), "the server refuses the export"),
        ("image info nbd+unix:///small".to_owned(), "the socket is missing"),
        (format!("image convert {small} {small} --force"), "it is the export of"),
        (format!("image convert {small} {} --force", uri("./small")), "it is the export of"),
        (format!("image convert {small} nbd+unix:///other?socket=small --force"), "may have given one disk both names"),
        ("image convert nbd://127.0.0.1/a nbd://127.1/a --force".to_owned(), "it is the export of"),
        (format!("image resize {small} 64M"), "can only be converted"),
        (format!("image check {small}"), "can only be converted"),
        (format!("image snapshot {small} --to qcow2:child"), "can only be converted"),
        (format!("image map qcow2:disk.qcow2 --parent {small}"), "disk.qcow2 has no parent"),
        (format!("image map {small} --parent qcow2:disk.qcow2"), "an image at an NBD server has no parent"),
        (format!("image create vhd:child.vhd --parent {small}"), "only qcow2 can record a parent at an NBD server"),
        (format!("image create qcow2:child --parent {small} --parent raw:small.raw"), "at an NBD server has no parent"),
        (format!("image merge qcow2:disk.qcow2 --parent {small} --from 0 --into 1"), "can only be converted"),
        (format!("image rebase qcow2:disk.qcow2 --onto {small}"), "can only be converted"),
        (format!("serve {small} --vhost-user at --control c --take-over --handed"), "--take-over"),
    ] {
        let said = room.tapline(&words);
        assert!(said.code != Some(0) && said.err.contains(why), "{words}: {said:?}");
    }
    // A file of such a name is a file.
    let said = room.tapline("image info raw:nbd://small");
    assert!(said.err.contains("./nbd://small: there is no such file"), "{said:?}");
}

pub fn reads_in_flight(disk: &mut Disk) -> u64 {
    disk.signal(rustix::process::Signal::USR1);
    let line = disk.wait_for("statistics: ");
    let (_, text) = line.split_once("statistics: ").unwrap();
    let statistics: serde_json::Value = serde_json::from_str(text).unwrap();
    statistics["reads"]["in_flight"].as_u64().unwrap()
}

#[test]
fn a_request_completes_after_more_kept_writes_than_there_is_room_for_requests() {
    let room = Room::new();
    room.done("image create raw:there.raw --size 64M");
    let server = Server::nbdkit(&room, "file there.raw", "there");
    let mut disk = Disk::serve(&room, &format!("{} --nbd at", uri("there")));
    let at = format!("nbd+unix:///?socket={}", room.file("at").display());
    // Without writeback it flushes after each write; it also flushes when it ends, so it must live on.
    let mut guest = room.command("qemu-io");
    let guest = guest.args(["-f", "raw", "-t", "writeback", &at]).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut guest = guest.spawn().unwrap();
    let mut commands = guest.stdin.take().unwrap();
    let mut lines = BufReader::new(guest.stdout.take().unwrap()).lines();
    for n in 0..300 {
        writeln!(commands, "write -P 5 {}k 4k", 8 * n).unwrap();
        wait_for_line(&mut lines, "wrote 4096/4096");
    }
    drop(server);
    disk.wait_for("connection lost");
    // It comes while the server is away, and the kept writes wait.
    writeln!(commands, "read -P 5 0 4k").unwrap();
    while reads_in_flight(&mut disk) == 0 {}
    let _server = Server::nbdkit(&room, "file there.raw", "there");
    wait_for_line(&mut lines, "read 4096/4096");
    drop(commands);
    assert!(guest.wait().unwrap().success());
    assert_eq!(disk.stop().0, Some(0));
}

#[test]
fn a_served_disk_waits_for_a_server_that_is_killed() {
    let room = Room::new();
    room.done("image create raw:there.raw --size 64M");
    let mut server = Server::nbdkit(&room, "file there.raw", "there");
    let mut disk = Disk::serve(&room, &format!("{} --nbd at", uri("there")));
    let at = format!("nbd+unix:///?socket={}", room.file("at").display());
    let mut expected = vec![0; 64 << 20];
    for round in 1..=4u8 {
        let write = |n: u8| format!("write -P {n} {}M 3M", 10 * round);
        room.qemu_io(&["-f", "raw", &at], &[&write(100 + round), "flush", &write(round)]);
        drop(server);
        disk.wait_for("connection lost");
        // The server is away: the guest waits.
        let mut guest = room.command("qemu-io");
        guest.args(["-f", "raw", &at, "-c", &format!("read -P {round} {}M 3M", 10 * round), "-c", "write -P 9 60M 1M"]);
        let mut guest = guest.args(["-c", "flush"]).stdout(Stdio::null()).spawn().unwrap();
        server = Server::nbdkit(&room, "file there.raw", "there");
        disk.wait_for("connected again");
        assert!(guest.wait().unwrap().success());
        let from = usize::from(round) * 10 << 20;
        expected[from..from + (3 << 20)].fill(round);
        expected[60 << 20..61 << 20].fill(9);
    }
    assert_eq!(disk.stop().0, Some(0));
    assert!(room.read("there.raw") == expected, "the disk differs");
}
