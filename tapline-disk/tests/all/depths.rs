//! Which layer of a chain holds which data, as NBD clients can query it, compared with QEMU's view of the same images.

use std::collections::BTreeSet;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, Stdio};

use serde_json::Value;

use crate::tool::Room;
use crate::tool::served::Disk;

/// Merges adjacent ranges with the same value, so that results can be compared.
fn runs(map: &Value) -> Vec<(u64, u64)> {
    let mut runs: Vec<(u64, u64)> = Vec::new();
    for run in map.as_array().unwrap() {
        let (len, depth) = (run["length"].as_u64().unwrap(), run["type"].as_u64().unwrap());
        match runs.last_mut() {
            Some(last) if last.1 == depth => last.0 += len,
            _ => runs.push((len, depth)),
        }
    }
    runs
}

fn depths(room: &Room, socket: &str) -> Vec<(u64, u64)> {
    let words = format!("--map=qemu:allocation-depth --json nbd+unix:///?socket={}", room.file(socket).display());
    runs(&serde_json::from_str(&room.tool("nbdinfo", &words)).unwrap())
}

/// A QEMU server, killed on drop.
struct QemuNbd(Child, PathBuf);

impl QemuNbd {
    fn serve(room: &Room, image: &str) -> QemuNbd {
        let mut command = room.command("qemu-nbd");
        let socket = room.file("qemu.sock");
        command.args(["--allocation-depth", "--read-only", "--persistent", "--socket"]).arg(&socket);
        let server = command.args(["--format", "qcow2", image]).stdout(Stdio::null()).spawn().unwrap();
        let server = QemuNbd(server, socket);
        while UnixStream::connect(&server.1).is_err() {
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        server
    }
}

impl Drop for QemuNbd {
    fn drop(&mut self) {
        self.0.kill().ok();
        self.0.wait().ok();
        std::fs::remove_file(&self.1).ok();
    }
}

#[test]
fn a_client_sees_the_same_depths_as_with_qemu() {
    let room = Room::new();
    room.make_raw("base.raw", 8 << 20);
    room.tool("qemu-img", "create -q -f qcow2 -b base.raw -F raw a.q 12M");
    room.tool("qemu-img", "create -q -f qcow2 -o cluster_size=4k -b a.q -F qcow2 b.q 16M");
    room.tool("qemu-img", "create -q -f qcow2 -o extended_l2=on -b b.q -F qcow2 c.q 20M");
    room.tool("qemu-img", "create -q -f qcow2 alone.q 4M");
    let changes = [
        ("a.q", ["write -P 1 1M 64k", "write -P 2 9M 128k", "write -z 10M 1M"]),
        ("b.q", ["write -P 3 1088k 4k", "write -z 9M 8k", "write -P 4 13M 12k"]),
        ("c.q", ["write -P 5 1028k 4k", "discard 13M 64k", "write -z -u 17M 64k"]),
        ("alone.q", ["write -P 1 1M 64k", "write -z 2M 64k", "write -P 2 3M 64k"]),
    ];
    for (image, commands) in changes {
        for command in commands {
            let said = room.run_words("qemu-io", &["-d", "unmap", "-f", "qcow2", "-c", command, image]);
            assert_eq!(said.code, Some(0), "{command}: {said:?}");
        }
    }
    let chain = "qcow2:c.q --parent qcow2:b.q --parent qcow2:a.q --parent raw:base.raw";
    let all = [(chain, "c.q"), ("qcow2:alone.q", "alone.q")];
    let mut named = BTreeSet::new();
    for (words, image) in all {
        let theirs = {
            let _qemu = QemuNbd::serve(&room, image);
            depths(&room, "qemu.sock")
        };
        let disk = Disk::serve(&room, &format!("{words} --read-only --nbd ./ours.sock"));
        let ours = depths(&room, "ours.sock");
        assert_eq!(disk.stop().0, Some(0));
        assert_eq!(ours, theirs, "{image}");
        named.extend(ours.iter().map(|(_, depth)| *depth));
    }
    assert!(named.into_iter().eq(0..=4), "every depth is there");
}

#[test]
fn a_file_without_layers_reports_no_depth() {
    let room = Room::new();
    room.make_raw("a.raw", 1 << 20);
    let disk = Disk::serve(&room, "raw:a.raw --nbd ./a.sock");
    let list = format!("--json nbd+unix:///?socket={}", room.file("a.sock").display());
    let told: Value = serde_json::from_str(&room.tool("nbdinfo", &list)).unwrap();
    assert_eq!(told["exports"][0]["contexts"], serde_json::json!(["base:allocation"]));
    assert_eq!(disk.stop().0, Some(0));
}
