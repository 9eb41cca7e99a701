//! Disks and machines that pass through the command: `-` of `vdi import` and `vdi export`, `vm export`, `vm import`.

use std::fs;
use std::io::Write;
use std::process::{Command, Output, Stdio};

use crate::play::{err, out, run};
use crate::taplined::Daemon;

const MIB: usize = 1 << 20;

/// A daemon with the repository `local`.
fn daemon() -> Daemon {
    let daemon = Daemon::start_with("");
    let sr = daemon.directory().join("sr");
    fs::create_dir(&sr).unwrap();
    ask(&daemon, &format!("sr create local --dir {} --format qcow2", sr.display()));
    daemon
}

#[track_caller]
fn ask(daemon: &Daemon, words: &str) -> String {
    out(&run(&daemon.socket(), &words.split(' ').collect::<Vec<_>>()))
}

#[track_caller]
fn refused(daemon: &Daemon, words: &str) -> String {
    err(&run(&daemon.socket(), &words.split(' ').collect::<Vec<_>>()))
}

/// The command with this input.
fn with_input(daemon: &Daemon, words: &str, input: Vec<u8>) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tapline"));
    command.arg("--socket").arg(daemon.socket()).args(words.split(' '));
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut stdin = child.stdin.take().unwrap();
    // It ends early if it refuses what it reads.
    let writing = std::thread::spawn(move || stdin.write_all(&input).ok());
    let output = child.wait_with_output().unwrap();
    writing.join().unwrap();
    output
}

/// A disk of 20 MiB, with data that depends on `seed` and ends in the last piece.
fn disk(seed: u8) -> Vec<u8> {
    let mut bytes = vec![0; 20 * MIB];
    for (at, byte) in bytes.iter_mut().enumerate().filter(|(at, _)| at % (5 * MIB) < MIB) {
        *byte = seed.wrapping_mul(31).wrapping_add((at / 512 % 251).try_into().unwrap());
    }
    bytes[20 * MIB - 1] = seed;
    bytes
}

fn import(daemon: &Daemon, name: &str, bytes: &[u8]) {
    let path = daemon.directory().join(format!("{name}.raw"));
    fs::write(&path, bytes).unwrap();
    ask(daemon, &format!("vdi import {name} {} --source-format raw --really-raw", path.display()));
    fs::remove_file(path).unwrap();
}

fn contents(daemon: &Daemon, name: &str) -> Vec<u8> {
    let output = with_input(daemon, &format!("vdi export {name} - --format raw"), Vec::new());
    assert!(output.status.success(), "{output:?}");
    output.stdout
}

fn names(daemon: &Daemon, noun: &str) -> String {
    ask(daemon, &format!("{noun} list -o name"))
}

/// Whether the daemon has nothing that a client has sent or is to fetch.
fn nothing_is_left(daemon: &Daemon) {
    for list in ["uploads", "downloads"] {
        let mut stream = std::os::unix::net::UnixStream::connect(daemon.socket()).unwrap();
        write!(stream, "GET /v1/{list} HTTP/1.1\r\nhost: t\r\nconnection: close\r\n\r\n").unwrap();
        let answer = std::io::read_to_string(stream).unwrap();
        assert!(answer.ends_with("\r\n\r\n[]"), "{answer}");
    }
}

#[test]
fn a_disk_passes_through_pipes() {
    let daemon = daemon();
    import(&daemon, "web", &disk(1));
    assert!(contents(&daemon, "web") == disk(1));
    let output = with_input(&daemon, "vdi export web - --format qcow2", Vec::new());
    assert!(output.status.success() && output.stdout.starts_with(b"QFI\xfb"), "{output:?}");
    let imported = with_input(&daemon, "vdi import copy - --source-format qcow2", output.stdout);
    assert_eq!(out(&imported).trim().len(), 36);
    assert!(contents(&daemon, "copy") == disk(1));
    nothing_is_left(&daemon);
}

#[test]
fn a_stream_that_is_no_disk_leaves_nothing() {
    let daemon = daemon();
    for (input, why) in [(Vec::new(), "the input is empty"), (vec![1; 70_000], "does not begin like a qcow2 image")] {
        let said = err(&with_input(&daemon, "vdi import web - --source-format qcow2", input));
        assert!(said.contains(why), "{said}");
    }
    let said = refused(&daemon, "vdi import web - --source-format qcow2 --no-wait");
    assert!(said.contains("--no-wait"), "{said}");
    assert_eq!(names(&daemon, "vdi"), "");
    nothing_is_left(&daemon);
}

#[test]
fn a_machine_is_the_same_after_its_archive() {
    let daemon = daemon();
    for (name, seed) in [("root", 1), ("data", 2)] {
        import(&daemon, name, &disk(seed));
    }
    ask(&daemon, "vm create web --disk root --disk data --memory 768M --vcpus 3 --nic user --description shop");
    let archive = daemon.directory().join("web.tar");
    let at = archive.display();
    ask(&daemon, &format!("vm export web {at}"));
    assert_eq!(names(&daemon, "vdi"), "data\nroot\n", "its snapshots are gone");
    let said = refused(&daemon, &format!("vm export web {at}"));
    assert!(said.contains("exists"), "{said}");
    // It is an archive that other programs read, with digests that they check.
    let room = daemon.directory().join("unpacked");
    fs::create_dir(&room).unwrap();
    assert!(Command::new("tar").args(["-xf"]).arg(&archive).current_dir(&room).status().unwrap().success());
    let checked = Command::new("sha256sum").args(["--check", "--quiet", "SHA256SUMS"]).current_dir(&room).status();
    assert!(checked.unwrap().success());
    let said = refused(&daemon, &format!("vm import {at}"));
    assert!(said.contains("--name"), "{said}");
    let vm = ask(&daemon, &format!("vm import {at} --name copy"));
    assert!(contents(&daemon, "copy-0") == disk(1) && contents(&daemon, "copy-1") == disk(2));
    let shown: serde_json::Value =
        serde_json::from_str(&ask(&daemon, &format!("vm show {} --json", vm.trim()))).unwrap();
    assert_eq!(
        (&shown["memory"], &shown["vcpus"], &shown["platform"]["nic"], &shown["description"]),
        (&(768 * MIB).into(), &3.into(), &"user".into(), &"shop".into()),
        "{shown}"
    );
    let vbds: serde_json::Value = serde_json::from_str(&ask(&daemon, "vbd list --json")).unwrap();
    let its = |vbd: &&serde_json::Value| vbd["vm"] == vm.trim();
    let places: Vec<_> =
        vbds.as_array().unwrap().iter().filter(its).map(|vbd| (&vbd["position"], &vbd["bootable"])).collect();
    assert_eq!(places.len(), 2);
    assert!(places.contains(&(&0.into(), &true.into())) && places.contains(&(&1.into(), &false.into())), "{places:?}");
    // From pipe to pipe.
    let piped = with_input(&daemon, "vm export copy -", Vec::new());
    out(&with_input(&daemon, "vm import - --name third", piped.stdout));
    assert!(contents(&daemon, "third-1") == disk(2));
    nothing_is_left(&daemon);
}

#[test]
fn a_damaged_archive_leaves_nothing() {
    let daemon = daemon();
    import(&daemon, "root", &disk(1));
    ask(&daemon, "vm create web --disk root");
    let whole = with_input(&daemon, "vm export web - --format raw", Vec::new()).stdout;
    let mut flipped = whole.clone();
    let middle = whole.len() / 2;
    let header = whole.windows(11).position(|window| window == b"disk-0.raw\0").unwrap();
    flipped[middle] ^= 1;
    for (archive, why) in [
        (flipped, "is damaged"),
        (whole[..middle].to_vec(), "it ends in"),
        (whole[..header].to_vec(), "the archive ends without"),
        (whole[..whole.len() - 2048].to_vec(), "ends without the digest"),
        (vec![7; 4096], "tar file"),
        (Vec::new(), "empty"),
    ] {
        let said = err(&with_input(&daemon, "vm import - --name copy", archive));
        assert!(said.contains(why), "{why}: {said}");
        assert_eq!((names(&daemon, "vdi").as_str(), names(&daemon, "vm").as_str()), ("root\n", "web\n"), "{why}");
    }
    nothing_is_left(&daemon);
}

const OVF: &str = r#"<?xml version="1.0"?>
<Envelope xmlns="http://schemas.dmtf.org/ovf/envelope/1" xmlns:ovf="http://schemas.dmtf.org/ovf/envelope/1"
  xmlns:rasd="http://schemas.dmtf.org/wbem/wscim/1/cim-schema/2/CIM_ResourceAllocationSettingData">
  <References><File ovf:href="appliance-disk1.vmdk" ovf:id="file1"/></References>
  <DiskSection><Info/><Disk ovf:capacity="20" ovf:capacityAllocationUnits="byte * 2^20" ovf:diskId="d1" ovf:fileRef="file1"/>
    <Disk ovf:capacity="3" ovf:capacityAllocationUnits="byte * 2^20" ovf:diskId="d2"/></DiskSection>
  <VirtualSystem ovf:id="appliance"><Info/><VirtualHardwareSection><Info/>
    <Item><rasd:InstanceID>1</rasd:InstanceID><rasd:ResourceType>3</rasd:ResourceType><rasd:VirtualQuantity>2</rasd:VirtualQuantity></Item>
    <Item><rasd:AllocationUnits>byte * 2^20</rasd:AllocationUnits><rasd:InstanceID>2</rasd:InstanceID><rasd:ResourceType>4</rasd:ResourceType><rasd:VirtualQuantity>512</rasd:VirtualQuantity></Item>
    <Item><rasd:AddressOnParent>0</rasd:AddressOnParent><rasd:HostResource>ovf:/disk/d1</rasd:HostResource><rasd:InstanceID>4</rasd:InstanceID><rasd:ResourceType>17</rasd:ResourceType></Item>
    <Item><rasd:AddressOnParent>1</rasd:AddressOnParent><rasd:HostResource>ovf:/disk/d2</rasd:HostResource><rasd:InstanceID>5</rasd:InstanceID><rasd:ResourceType>17</rasd:ResourceType></Item>
    <Item><rasd:InstanceID>6</rasd:InstanceID><rasd:ResourceType>10</rasd:ResourceType></Item>
  </VirtualHardwareSection></VirtualSystem>
</Envelope>"#;

/// An OVA as ovftool writes it: description, digests, stream-optimized VMDK.
#[test]
fn an_ova_becomes_a_machine() {
    if Command::new("qemu-img").arg("--version").output().is_err() {
        eprintln!("not run: there is no qemu-img; `make prepare` installs it");
        return;
    }
    let daemon = daemon();
    let path = |name: &str| daemon.directory().join(name);
    fs::write(path("disk.raw"), disk(5)).unwrap();
    let mut convert = Command::new("qemu-img");
    convert.args(["convert", "-f", "raw", "-O", "vmdk", "-o", "subformat=streamOptimized"]);
    convert.arg(path("disk.raw")).arg(path("appliance-disk1.vmdk"));
    assert!(convert.status().unwrap().success());
    fs::write(path("appliance.ovf"), OVF).unwrap();
    let files = ["appliance.ovf", "appliance-disk1.vmdk"];
    let sums = Command::new("sha256sum").args(files).current_dir(daemon.directory()).output().unwrap();
    let manifest: String = String::from_utf8(sums.stdout)
        .unwrap()
        .lines()
        .map(|line| {
            let (digits, name) = line.split_once("  ").unwrap();
            format!("SHA256({name})= {digits}\n")
        })
        .collect();
    fs::write(path("appliance.mf"), manifest).unwrap();
    let ova = |name: &str, members: &[&str]| {
        let mut tar = Command::new("tar");
        tar.args(["--format=ustar", "-cf", name]).args(members).current_dir(daemon.directory());
        assert!(tar.status().unwrap().success());
        path(name)
    };
    let whole = ova("appliance.ova", &["appliance.ovf", "appliance.mf", "appliance-disk1.vmdk"]);
    let output = run(&daemon.socket(), &["vm", "import", whole.to_str().unwrap()]);
    assert!(output.status.success(), "{output:?}");
    assert!(String::from_utf8_lossy(&output.stderr).contains("network card"), "{output:?}");
    assert!(contents(&daemon, "appliance-0") == disk(5));
    assert_eq!(contents(&daemon, "appliance-1").len(), 3 * MIB);
    let shown: serde_json::Value = serde_json::from_str(&ask(&daemon, "vm show appliance --json")).unwrap();
    assert_eq!((&shown["memory"], &shown["vcpus"]), (&(512 * MIB).into(), &2.into()));
    // Without its disk, and with the description behind it.
    let lacking = ova("lacking.ova", &["appliance.ovf"]);
    let said = refused(&daemon, &format!("vm import {} --name b", lacking.display()));
    assert!(said.contains("ends without appliance-disk1.vmdk"), "{said}");
    let backwards = ova("backwards.ova", &["appliance-disk1.vmdk", "appliance.ovf"]);
    let said = refused(&daemon, &format!("vm import {} --name b", backwards.display()));
    assert!(said.contains("begins with appliance-disk1.vmdk"), "{said}");
    assert_eq!(names(&daemon, "vm"), "appliance\n");
    nothing_is_left(&daemon);
}
