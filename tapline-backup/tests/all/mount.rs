//! A backup as an export, read by other people's clients.

use std::io::{BufRead, BufReader};
use std::process::Stdio;

use rustix::process::{Pid, Signal, kill_process};

use crate::room::{Room, Server, id, uri};

/// The command and the URI that it prints.
fn mounted(room: &Room, words: &[&str]) -> (Server, String) {
    let mut child = room.command(&[&["mount", "t"], words].concat()).stdout(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    (Server(child), line.trim().to_owned())
}

fn ended(mut server: Server) {
    kill_process(Pid::from_child(&server.0), Signal::TERM).unwrap();
    assert!(server.0.wait().unwrap().success());
}

#[test]
fn clients_read_a_mounted_backup_and_its_holes() {
    let room = Room::new();
    room.image("a.raw", 33, 1);
    let made = room.back_up("raw:a.raw", "a", &[]);
    let socket = room.path("s").display().to_string();
    let (child, printed) = mounted(&room, &[id(&made), "--nbd", &socket]);
    assert_eq!(printed, uri(&room));
    room.tool("nbdcopy", &[&printed, "b.raw"]);
    room.same("a.raw", "b.raw");
    room.tool("qemu-img", &["compare", "-f", "raw", "-F", "raw", &printed, "a.raw"]);
    let disk = std::path::Path::new(env!("CARGO_BIN_EXE_tapline-backup")).with_file_name("tapline-disk");
    room.tool(&disk.display().to_string(), &["image", "convert", &printed, "qcow2:c.qcow2"]);
    room.same("a.raw", "c.qcow2");
    let map: serde_json::Value = serde_json::from_str(&room.tool("nbdinfo", &["--json", "--map", &printed])).unwrap();
    let data = map.as_array().unwrap().iter().filter(|extent| extent["type"] == 0);
    assert_eq!(data.map(|extent| extent["length"].as_u64().unwrap()).sum::<u64>(), 9 << 20, "{map}");
    let write = ["-f", "raw", "-c", "write 0 512", &printed];
    assert!(!std::process::Command::new("qemu-io").args(write).output().unwrap().status.success());
    // Unaligned, across chunks.
    let mut client = testkit::nbd::Client::connect(&room.path("s")).unwrap();
    let image = std::fs::read(room.path("a.raw")).unwrap();
    for (at, len) in [(65_500, 100_001), (0, 1), ((4 << 20) - 3, 7), ((33 << 20) - 1, 1)] {
        let read = client.read(at, len).unwrap();
        assert!(read == image[usize::try_from(at).unwrap()..][..len], "{len} bytes at {at}");
    }
    drop(client);
    ended(child);
    assert!(!room.path("s").exists());
}

#[test]
fn a_backup_is_mounted_at_a_port_and_a_used_socket_is_refused() {
    let room = Room::new();
    room.image("a.raw", 4, 1);
    let made = room.back_up("raw:a.raw", "a", &[]);
    let (child, printed) = mounted(&room, &[id(&made), "--nbd", "127.0.0.1:0"]);
    assert!(printed.starts_with("nbd://127.0.0.1:"), "{printed}");
    room.tool("qemu-img", &["compare", "-f", "raw", "-F", "raw", &printed, "a.raw"]);
    ended(child);
    room.run(&["mount", "t", id(&made), "--nbd", "localhost:10809"]).failed(64, "neither");
    let _other = std::os::unix::net::UnixListener::bind(room.path("s")).unwrap();
    room.run(&["mount", "t", id(&made), "--nbd", "./s"]).failed(7, "another process");
    std::fs::write(room.path("file"), "").unwrap();
    room.run(&["mount", "t", id(&made), "--nbd", "./file"]).failed(7, "not a socket");
    room.run(&["mount", "t", "00000000", "--nbd", "./x"]).failed(6, "no backup");
}

#[test]
fn a_client_that_speaks_something_else_disturbs_no_other() {
    let room = Room::new();
    room.image("a.raw", 4, 1);
    let made = room.back_up("raw:a.raw", "a", &[]);
    let socket = room.path("s").display().to_string();
    let (child, printed) = mounted(&room, &[id(&made), "--nbd", &socket]);
    let mut rude = std::os::unix::net::UnixStream::connect(room.path("s")).unwrap();
    let _silent = std::os::unix::net::UnixStream::connect(room.path("s")).unwrap();
    std::io::Write::write_all(&mut rude, b"GET / HTTP/1.1\r\n\r\n").unwrap();
    room.tool("qemu-img", &["compare", "-f", "raw", "-F", "raw", &printed, "a.raw"]);
    ended(child);
}
