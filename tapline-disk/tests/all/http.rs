//! Images at HTTP servers: nginx, and one that breaks the rules.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::process::{Child, Command, Stdio};

use rustix::process::{Pid, Signal, kill_process};
use testkit::certificates::Authority;
use testkit::nginx::Nginx;
use testkit::web_server::{Trick, WebServer};

use crate::confined;
use crate::tool::handed::{Hand, Handed, NOWHERE};
use crate::tool::{Room, Said, TAPLINE, noise};

const MIB: u64 = 1 << 20;

/// A room with an nginx, whose authority is in the file `ca-cert.pem`.
struct Site {
    room: Room,
    nginx: Nginx,
}

impl Site {
    fn new() -> Site {
        let room = Room::new();
        let authority = Authority::new(&room.file("authority")).unwrap();
        let certificates = authority.server().unwrap();
        fs::copy(certificates.join("ca-cert.pem"), room.file("ca-cert.pem")).unwrap();
        let nginx = Nginx::start(room.path(), &certificates);
        Site { room, nginx }
    }

    /// Puts a file of the room in place.
    fn publish(&self, name: &str) {
        fs::copy(self.room.file(name), self.nginx.files().join(name)).unwrap();
    }

    /// A command that trusts the authority of the site.
    fn command(&self, words: &str) -> Command {
        let mut command = self.room.command(TAPLINE);
        command.args(words.split_whitespace()).env("SSL_CERT_FILE", self.room.file("ca-cert.pem"));
        command
    }

    fn run(&self, words: &str) -> Said {
        Said::of(&self.command(words).output().unwrap())
    }

    fn done(&self, words: &str) -> String {
        let said = self.run(words);
        assert_eq!(said.code, Some(0), "{words}: {said:?}");
        said.out
    }

    fn json(&self, words: &str) -> serde_json::Value {
        serde_json::from_str(&self.done(&format!("{words} --json"))).unwrap()
    }
}

/// The SHA-256 of a file.
fn sha256(room: &Room, name: &str) -> String {
    room.tool("sha256sum", name).split_whitespace().next().unwrap().to_owned()
}

/// Bytes for a server that breaks the rules: a raw disk without holes.
fn served(len: u64) -> (WebServer, Vec<u8>) {
    let (server, bytes) = (WebServer::start(), noise(1, usize::try_from(len).unwrap()));
    server.put("/a.raw", &bytes);
    (server, bytes)
}

fn interrupt(child: &mut Child, signal: Signal) {
    kill_process(Pid::from_child(child), signal).unwrap();
}

#[test]
fn images_of_all_formats_are_read_from_nginx() {
    let site = Site::new();
    let room = &site.room;
    room.make_raw("full.raw", 32 * MIB);
    room.done("image convert raw:full.raw qcow2:full.qcow2");
    room.done("image convert raw:full.raw qcow2:small.qcow2 --compress");
    room.done("image convert raw:full.raw vhd:full.vhd");
    room.tool("qemu-img", "convert -f raw -O vmdk full.raw full.vmdk");
    room.tool("qemu-img", "convert -f raw -O vhdx full.raw full.vhdx");
    for file in ["full.raw", "full.qcow2", "small.qcow2", "full.vhd", "full.vmdk", "full.vhdx"] {
        site.publish(file);
        let (format, url) = (file.rsplit('.').next().unwrap(), site.nginx.https(file));
        site.done(&format!("image compare {url} raw:full.raw"));
        let copy = format!("qcow2:copy-of-{file}.qcow2");
        site.done(&format!("image convert {format}:{url} {copy} --verify"));
        room.done(&format!("image compare {copy} raw:full.raw"));
        assert!(room.space(&format!("copy-of-{file}.qcow2")) < 8 * MIB, "zeroes are not stored");
        let info = site.json(&format!("image info {url}"));
        assert_eq!((&info[0]["size"], &info[0]["format"]), (&(32 * MIB).into(), &format.into()), "{info}");
        let local = format!("{format}:{file}");
        // Nothing is known about holes of a file at a server, which may be in the large blocks of VHDs.
        if ["qcow2", "vmdk"].contains(&format) {
            assert_eq!(site.json(&format!("image map {url}")), room.json(&format!("image map {local}")), "{file}");
            let measured = |of: &str| site.json(&format!("image measure {of} --format qcow2"))["required"].clone();
            assert_eq!(measured(&url), measured(&local), "{file}");
        }
    }
    // A URL that does not end in its format.
    fs::copy(room.file("full.qcow2"), site.nginx.files().join("full.img")).unwrap();
    let url = site.nginx.https("full.img");
    let said = site.run(&format!("image info {url}"));
    assert!(said.code == Some(64) && said.err.contains(&format!("qcow2:{url}")), "{said:?}");
    site.done(&format!("image compare qcow2:{url} raw:full.raw"));
    // A format is not taken from the contents.
    let said = site.run(&format!("image convert raw:{url} qcow2:none"));
    assert!(said.code == Some(64) && said.err.contains("qcow2"), "{said:?}");
    assert!(!room.file("none").exists());
}

#[test]
fn a_server_must_be_proven_by_tls() {
    let site = Site::new();
    site.room.make_raw("full.raw", 16 * MIB);
    site.publish("full.raw");
    let said = site.room.tapline(&format!("image info {}", site.nginx.https("full.raw")));
    assert!(said.code == Some(4) && said.err.contains("TLS") && said.err.contains("SSL_CERT_FILE"), "{said:?}");
    let plain = site.nginx.http("full.raw");
    let said = site.run(&format!("image info {plain}"));
    assert!(said.code == Some(4) && said.err.contains("--insecure-http"), "{said:?}");
    site.done(&format!("image info {plain} --insecure-http"));
    let hex = sha256(&site.room, "full.raw");
    site.done(&format!("image fetch {plain} whole.raw --checksum sha256:{hex}"));
    assert!(site.room.read("whole.raw") == site.room.read("full.raw"));
    let said = site.run(&format!("image info {} --insecure-http", site.nginx.https("to-http/full.raw")));
    assert!(said.code == Some(4) && said.err.contains("redirects from https"), "{said:?}");
    let (mirror, _) = served(MIB);
    mirror.play(Trick::Redirects(site.nginx.https("full.raw")));
    site.done(&format!("image info {} --insecure-http", mirror.url("/a.raw")));
}

#[test]
fn a_file_is_downloaded_and_verified() {
    let site = Site::new();
    let room = &site.room;
    room.write("full.raw", &noise(7, 5 << 20));
    site.publish("full.raw");
    let url = site.nginx.https("full.raw");
    let said = site.run(&format!("image fetch {url} none.raw --checksum auto"));
    assert!(said.code == Some(4) && said.err.contains("SHA256SUMS"), "{said:?}");
    fs::write(site.nginx.files().join("SHA256SUMS"), format!("{}  full.raw\n", sha256(room, "full.raw"))).unwrap();
    let fetched = site.json(&format!("image fetch {url} auto.raw --checksum auto"));
    assert_eq!(fetched["digest"], format!("sha256:{}", sha256(room, "full.raw")));
    assert!(room.read("auto.raw") == room.read("full.raw"));
    let said = site.run(&format!("image fetch {url} auto.raw"));
    assert!(said.code == Some(4) && said.err.contains("exists"), "{said:?}");
    // What differs is not kept.
    let wrong = "0".repeat(64);
    let said = site.run(&format!("image fetch {url} none.raw --checksum sha256:{wrong}"));
    assert!(said.code == Some(4) && said.err.contains(&format!("not sha256:{wrong}")), "{said:?}");
    site.done(&format!("image convert {url} qcow2:a.qcow2 --checksum {}", site.nginx.https("SHA256SUMS")));
    room.done("image compare qcow2:a.qcow2 raw:full.raw");
    let said = site.run(&format!("image convert {url} qcow2:b.qcow2 --checksum sha256:{wrong}"));
    assert_eq!(said.code, Some(4), "{said:?}");
    let left: Vec<String> = fs::read_dir(room.path())
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter(|name| name.contains("none") || name.contains("b.qcow2") || name.contains("part"))
        .collect();
    assert_eq!(left, [""; 0]);
}

/// Killed as by power: what was synced is not downloaded again.
#[test]
fn a_killed_download_is_continued() {
    let room = Room::new();
    let (server, bytes) = served(96 * MIB);
    let words = format!("image fetch {} a.raw --insecure-http", server.url("/a.raw"));
    // The first bytes, and some parts more than are synced at a time.
    server.answer_only(Some(14));
    let mut child = room.command(TAPLINE).args(words.split_whitespace()).stderr(Stdio::null()).spawn().unwrap();
    while room.file(".a.raw.tapline-part").metadata().map_or(true, |_| recorded(&room) < 32 * MIB) {
        assert_eq!(child.try_wait().unwrap(), None);
        std::thread::yield_now();
    }
    interrupt(&mut child, Signal::KILL);
    child.wait().unwrap();
    server.answer_only(None);
    let said = room.json(&words);
    assert!(said["continued_at"].as_u64().unwrap() >= 32 * MIB, "{said}");
    assert!(room.read("a.raw") == bytes);
    assert!(!room.file(".a.raw.tapline-part").exists());
    // Another object: all of it is downloaded.
    fs::rename(room.file("a.raw"), room.file(".b.raw.tapline-part")).unwrap();
    let said = room.json(&format!("image fetch {} b.raw --insecure-http", server.url("/a.raw")));
    assert_eq!(said["continued_at"], 0, "{said}");
}

/// The bytes that the file of an unfinished download says are durable.
fn recorded(room: &Room) -> u64 {
    let Ok(bytes) = fs::read(room.file(".a.raw.tapline-part")) else { return 0 };
    let text =
        String::from_utf8_lossy(bytes.get(usize::try_from(96 * MIB).unwrap()..).unwrap_or_default()).into_owned();
    let numbers = text
        .split("\"done\":")
        .skip(1)
        .map(|rest| rest.chars().take_while(char::is_ascii_digit).collect::<String>().parse().unwrap_or(0));
    numbers.max().unwrap_or(0)
}

#[test]
fn a_change_ends_the_conversion_with_its_reason() {
    let room = Room::new();
    let (server, _) = served(64 * MIB);
    server.answer_only(Some(3));
    let words = format!("image convert {} raw:b.raw --insecure-http", server.url("/a.raw"));
    let child = room.command(TAPLINE).args(words.split_whitespace()).stderr(Stdio::piped()).spawn().unwrap();
    server.wait_for_requests(4);
    server.put("/a.raw", &noise(2, 64 << 20));
    server.answer_only(None);
    let said = Said::of(&child.wait_with_output().unwrap());
    assert!(said.code == Some(4) && said.err.contains("has changed while it was read"), "{said:?}");
    assert!(!room.file("b.raw").exists());
}

#[test]
fn a_signal_ends_a_command_that_waits_for_a_silent_server() {
    let room = Room::new();
    for words in ["image convert URL raw:b.raw", "image fetch URL b.raw"] {
        let (server, _) = served(64 * MIB);
        server.answer_only(Some(3));
        let words = format!("{words} --insecure-http").replace("URL", &server.url("/a.raw"));
        let mut child = room.command(TAPLINE).args(words.split_whitespace()).stderr(Stdio::piped()).spawn().unwrap();
        server.wait_for_requests(4);
        interrupt(&mut child, Signal::TERM);
        let said = Said::of(&child.wait_with_output().unwrap());
        assert!(said.code == Some(4) && said.err.contains("signal"), "{said:?}");
        assert!(!room.file("b.raw").exists());
    }
}

#[test]
fn an_object_is_not_used_where_it_cannot_be() {
    let room = Room::new();
    let (server, _) = served(4 * MIB);
    let url = server.url("/a.raw");
    room.done("image create qcow2:a.qcow2 4M");
    for words in [
        format!("serve {url} --nbd a.sock"),
        format!("serve qcow2:a.qcow2 --parent {url} --nbd a.sock"),
        format!("image create qcow2:b.qcow2 --parent {url}"),
        format!("image convert qcow2:a.qcow2 --parent {url} raw:b.raw"),
        format!("image rebase qcow2:a.qcow2 --onto {url}"),
        format!("image check qcow2:{url}"),
        format!("image convert qcow2:a.qcow2 {url}"),
        format!("image bench {url}"),
        format!("image convert raw:a.qcow2 raw:b.raw --really-raw --checksum auto"),
    ] {
        let said = room.tapline(&format!("{words} --insecure-http"));
        assert!(said.code == Some(64) && !said.err.is_empty(), "{words}: {said:?}");
    }
    assert!(!room.file("b.qcow2").exists() && !room.file("b.raw").exists());
    for url in ["https://me:secret@127.0.0.1/a.raw", "https://127.0.0.1/a.raw?sig=secret"] {
        let said = room.tapline(&format!("image info {url}"));
        assert!(said.code == Some(64) && said.err.contains("credentials are refused"), "{said:?}");
        assert!(!said.err.contains("secret"), "{said:?}");
    }
}

#[test]
fn a_process_on_passed_files_connects_only_if_it_may() {
    let room = Room::new();
    let (server, bytes) = served(4 * MIB);
    let url = server.url("/a.raw");
    let said = Hand::to(&format!("image info {url} --insecure-http")).run();
    assert!(said.code == Some(64) && said.err.contains("may not connect"), "{said:?}");
    let words = format!("image fetch {url} {NOWHERE}/a --insecure-http --network");
    Hand::to(&words).file(&Handed::create(&room, "a")).done();
    assert!(room.read("a") == bytes);
}

/// As the daemon runs it: another user's process, which resolves a name, verifies a certificate, and opens nothing
/// else.
#[test]
fn a_confined_process_downloads_over_tls() {
    let Some(_) = confined::room() else { return };
    let site = Site::new();
    site.room.write("full.raw", &noise(3, 9 << 20));
    site.publish("full.raw");
    let public = tempfile::tempdir().unwrap();
    fs::set_permissions(public.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let authority = public.path().join("ca-cert.pem");
    fs::copy(site.room.file("ca-cert.pem"), &authority).unwrap();
    let url = site.nginx.https("full.raw");
    let hand = |words: &str| {
        let mut hand = confined::by_nobody(&format!("{words} --network"));
        hand.command.env("SSL_CERT_FILE", &authority);
        hand
    };
    let hex = sha256(&site.room, "full.raw");
    let words = format!("image fetch {url} {NOWHERE}/a --checksum sha256:{hex} --json");
    hand(&words).file(&Handed::create(&site.room, "a")).done();
    assert!(site.room.read("a") == site.room.read("full.raw"));
    let info: serde_json::Value = serde_json::from_str(&hand(&format!("image info {url} --json")).done()).unwrap();
    assert_eq!(info[0]["size"], 9 * MIB);
}
