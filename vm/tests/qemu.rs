//! Real QEMUs without a guest: started, queried, killed, adopted; disks plugged into a firmware that never releases
//! one.
//!
//! The disks are served by QEMU's own storage daemon. Tests with a real guest are in `cargo xtask guest-test`.

use std::fs;
use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;
use vm::qemu::accelerator::Accelerator;
use vm::qemu::hardware::{Boot, Console, ConsoleDevice, ConsoleTo, Disk, Hardware};
use vm::qemu::machine::{Ending, MachineError, QemuVm, Status};
use vm::qemu::platform::Platform;
use vm::qemu::process::Identity;
use vm::qemu::slots::Position;

/// The QEMU that is tried, if `TAPLINE_QEMU` does not name another.
const QEMU: &str = "qemu-system-x86_64";

fn qemu() -> PathBuf {
    std::env::var_os("TAPLINE_QEMU").map_or_else(|| QEMU.into(), PathBuf::from)
}
const SOON: Duration = Duration::from_secs(60);
const SHORT: Duration = Duration::from_millis(500);

/// Set for the test that is run as a process of its own: the directory of the machine it starts.
const STARTER: &str = "VM_TEST_STARTER";

/// A directory with a disk that is served, for a machine that has no system to boot.
struct Room {
    room: TempDir,
    daemons: Vec<Child>,
}

impl Room {
    /// `None` without QEMU, which is reported.
    fn new() -> Option<Self> {
        for program in [qemu(), "qemu-storage-daemon".into()] {
            if Command::new(&program).arg("--version").output().is_err() {
                eprintln!("not run: there is no {}; `make prepare` installs it", program.display());
                return None;
            }
        }
        let directory = tempfile::tempdir().unwrap();
        fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o700)).unwrap();
        let mut room = Self { room: directory, daemons: Vec::new() };
        room.serve("boot");
        Some(room)
    }

    fn path(&self) -> &Path {
        self.room.path()
    }

    fn serve(&mut self, name: &str) -> PathBuf {
        let (image, socket) = (self.path().join(name), self.path().join(format!("{name}.sock")));
        fs::write(&image, vec![0; 1 << 20]).unwrap();
        let mut command = Command::new("qemu-storage-daemon");
        command.arg("--blockdev").arg(format!("driver=file,node-name=disk,filename={}", image.display()));
        command.arg("--export").arg(format!(
            "type=vhost-user-blk,id=export,node-name=disk,addr.type=unix,addr.path={},writable=on,num-queues=4",
            socket.display()
        ));
        self.daemons.push(command.stdin(Stdio::null()).spawn().unwrap());
        let deadline = Instant::now() + SOON;
        while !is_listening(&socket) {
            assert!(Instant::now() < deadline, "qemu-storage-daemon does not listen");
            thread::sleep(Duration::from_millis(10));
        }
        socket
    }

    fn hardware(&self) -> Hardware {
        let boot = self.path().join("boot.sock");
        Hardware {
            name: "test".into(),
            memory_mib: 64,
            vcpus: 2,
            machine: None,
            accelerator: Accelerator::Tcg,
            boot: Boot::Firmware,
            disks: vec![Disk { bootable: true, ..disk(0, boot) }],
            console: None,
            seed: None,
            guest_port: None,
            platform: Platform::default(),
        }
    }

    fn start(&self) -> QemuVm {
        QemuVm::start(&qemu(), &self.hardware(), self.path(), SOON).unwrap()
    }
}

/// Whether somebody listens on a socket of this name. The name is there a moment earlier, and connecting would take the
/// only place that an export of qemu-storage-daemon has.
fn is_listening(socket: &Path) -> bool {
    const ACCEPTS_CONNECTIONS: &str = "00010000";
    let sockets = fs::read_to_string("/proc/net/unix").unwrap();
    let name = socket.to_string_lossy();
    sockets.lines().any(|line| line.ends_with(&*name) && line.split(' ').nth(3) == Some(ACCEPTS_CONNECTIONS))
}

impl Drop for Room {
    fn drop(&mut self) {
        // A machine outlives a test that fails; it is known by its directory.
        for process in fs::read_dir("/proc").unwrap().map_while(Result::ok) {
            if fs::read_link(process.path().join("cwd")).is_ok_and(|directory| directory == self.room.path()) {
                let pid = process.file_name().to_string_lossy().parse().unwrap();
                // It may have exited first.
                kill_process(Pid::from_raw(pid).unwrap(), Signal::KILL).unwrap_or_default();
            }
        }
        for daemon in &mut self.daemons {
            daemon.kill().unwrap();
            daemon.wait().unwrap();
        }
    }
}

fn disk(position: u8, socket: PathBuf) -> Disk {
    Disk { position: Position::new(position).unwrap(), socket, queues: None, bootable: false }
}

fn signal(identity: &Identity, signal: Signal) {
    kill_process(Pid::from_raw(identity.pid).unwrap(), signal).unwrap();
}

#[test]
fn a_machine_runs_pauses_resumes_and_ends() {
    let Some(room) = Room::new() else { return };
    let mut machine = room.start();
    assert_eq!(machine.status().unwrap(), Status::Running);
    machine.pause().unwrap();
    assert_eq!(machine.status().unwrap(), Status::Paused);
    machine.resume().unwrap();
    assert_eq!(machine.status().unwrap(), Status::Running);
    assert!(machine.ended().unwrap().is_none());
    let names: Vec<String> = machine.take_events().into_iter().map(|event| event.name).collect();
    assert!(names.contains(&"STOP".to_owned()) && names.contains(&"RESUME".to_owned()), "{names:?}");
    assert_eq!(machine.end().unwrap(), Ending::Quit);
    assert!(machine.ended().unwrap().unwrap().status.unwrap().success());
}

#[test]
fn a_session_of_its_own_and_descriptors_for_every_disk() {
    let Some(room) = Room::new() else { return };
    let mut machine = room.start();
    let pid = machine.identity().pid;
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let session = stat.rsplit_once(") ").unwrap().1.split(' ').nth(3).unwrap();
    assert_eq!(session, pid.to_string(), "{stat}");
    let limits = fs::read_to_string(format!("/proc/{pid}/limits")).unwrap();
    let line = limits.lines().find(|line| line.starts_with("Max open files")).unwrap();
    let soft: u64 = line.split_whitespace().nth(3).unwrap().parse().unwrap();
    let hard: u64 = line.split_whitespace().nth(4).unwrap().parse().unwrap();
    assert_eq!(soft, hard.min(65_536), "{line}");
    machine.end().unwrap();
}

#[test]
fn a_killed_machine_is_noticed_and_reported() {
    let Some(room) = Room::new() else { return };
    let mut machine = room.start();
    signal(machine.identity(), Signal::KILL);
    let timeout = Timespec::try_from(SOON).unwrap();
    assert_eq!(poll(&mut [PollFd::new(&machine, PollFlags::IN)], Some(&timeout)).unwrap(), 1);
    let ended = machine.ended().unwrap().unwrap();
    assert_eq!(std::os::unix::process::ExitStatusExt::signal(&ended.status.unwrap()), Some(9));
    let error = machine.status().unwrap_err();
    assert!(matches!(error, MachineError::Ended { .. }), "{error:?}");
    assert!(error.to_string().contains("cannot query its status: QEMU exited"), "{error}");
    assert_eq!(machine.shutdown(SOON).unwrap(), Ending::Guest);
}

#[test]
fn a_machine_that_cannot_start_says_why_and_leaves_nothing() {
    let Some(room) = Room::new() else { return };
    let mut hardware = room.hardware();
    hardware.boot = Boot::Kernel { kernel: "/no/such/kernel".into(), initrd: None, command_line: String::new() };
    let start = |hardware: &Hardware| QemuVm::start(&qemu(), hardware, room.path(), SOON).unwrap_err();
    let error = start(&hardware).to_string();
    assert!(error.starts_with("cannot start the machine: QEMU exited: "), "{error}");
    assert!(error.contains("/no/such/kernel"), "{error}");
    // The output of the previous one is not taken for its own.
    let hardware =
        Hardware { disks: vec![Disk { bootable: true, ..disk(3, "/no/such.sock".into()) }], ..room.hardware() };
    let error = start(&hardware);
    assert_eq!(error.to_string(), "cannot plug disk 3 into the VM");
    let cause = std::error::Error::source(&error).unwrap().to_string();
    assert!(cause.contains("/no/such.sock"), "{cause}");
    // The output of the previous one is not taken for its own.
    let error = start(&Hardware { name: "x".into(), memory_mib: 1 << 20, ..room.hardware() }).to_string();
    assert!(error.contains("cannot start the machine: QEMU exited") && !error.contains("/no/such/kernel"), "{error}");
    let error = QemuVm::start(Path::new("/no/such/qemu"), &room.hardware(), room.path(), SOON).unwrap_err();
    assert!(error.to_string().contains("/no/such/qemu"), "{error}");
}

#[test]
fn a_directory_accessible_to_others_is_refused() {
    let Some(room) = Room::new() else { return };
    fs::set_permissions(room.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let error = QemuVm::start(&qemu(), &room.hardware(), room.path(), SOON).unwrap_err();
    assert!(error.to_string().contains("other users have access to it"), "{error}");
}

/// Not a test: what `a_machine_is_adopted_after_its_parent_has_exited` runs as a process of its own.
#[test]
fn starter() {
    let Some(directory) = std::env::var_os(STARTER) else { return };
    let hardware: Hardware = serde_json::from_str(&std::env::var("VM_TEST_HARDWARE").unwrap()).unwrap();
    let machine = QemuVm::start(&qemu(), &hardware, Path::new(&directory), SOON).unwrap();
    let identity = serde_json::to_string(machine.identity()).unwrap();
    fs::write(Path::new(&directory).join("identity"), identity).unwrap();
    // Without any message, like a killed process.
    signal(&Identity { pid: std::process::id().try_into().unwrap(), ..machine.identity().clone() }, Signal::KILL);
}

#[test]
fn a_machine_is_adopted_after_its_parent_has_exited() {
    let Some(mut room) = Room::new() else { return };
    let status = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "starter"])
        .env(STARTER, room.path())
        .env("VM_TEST_HARDWARE", serde_json::to_string(&room.hardware()).unwrap())
        .stdout(Stdio::null())
        .status()
        .unwrap();
    assert_eq!(std::os::unix::process::ExitStatusExt::signal(&status), Some(9));
    let identity: Identity = serde_json::from_slice(&fs::read(room.path().join("identity")).unwrap()).unwrap();
    let mut machine = QemuVm::adopt(&identity, room.path(), SOON).unwrap();
    assert_eq!(machine.status().unwrap(), Status::Running);
    assert_eq!(machine.disks().unwrap(), [Position::new(0).unwrap()]);
    let socket = room.serve("more");
    machine.plug(&disk(99, socket)).unwrap();
    assert_eq!(machine.disks().unwrap().len(), 2);
    drop(machine);
    let mut again = QemuVm::adopt(&identity, room.path(), SOON).unwrap();
    assert_eq!(again.end().unwrap(), Ending::Quit);
    let gone = QemuVm::adopt(&identity, room.path(), SOON).unwrap_err();
    assert!(matches!(gone, MachineError::Gone { .. }), "{gone:?}");
}

/// A boot sector that powers off when the first byte of the disk's second sector becomes nonzero.
fn waiting_to_power_off() -> Vec<u8> {
    let code = [
        &[0x31, 0xc0, 0x8e, 0xd8, 0x8e, 0xc0][..], // xor ax, ax; mov ds, ax; mov es, ax
        &[0xbe, 0x1e, 0x7c, 0xb4, 0x42, 0xcd, 0x13], // again: mov si, packet; mov ah, 0x42; int 0x13
        &[0x80, 0x3e, 0x00, 0x7e, 0x00, 0x74, 0xf2], // cmp byte [0x7e00], 0; je again
        &[0xba, 0x04, 0x06, 0xb8, 0x00, 0x20, 0xef], // mov dx, 0x604; mov ax, 0x2000; out dx, ax
        &[0xf4, 0xeb, 0xfd],                       // hlt; jmp
        &[0x10, 0, 1, 0, 0, 0x7e, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0], // packet: one sector, the second, to 0x7e00
    ];
    let mut sector = code.concat();
    sector.resize(510, 0);
    [&sector[..], &[0x55, 0xaa]].concat()
}

#[test]
fn an_adopted_machine_reports_why_it_ended() {
    let Some(room) = Room::new() else { return };
    let image = fs::OpenOptions::new().write(true).open(room.path().join("boot")).unwrap();
    let write = |bytes: &[u8], at: u64| std::os::unix::fs::FileExt::write_all_at(&image, bytes, at).unwrap();
    write(&waiting_to_power_off(), 0);
    let end = |by: &dyn Fn(&mut QemuVm)| {
        // We started it, so it is our child; nothing that only its parent would know is used.
        let started = room.start();
        let identity = started.identity().clone();
        drop(started);
        let mut machine = QemuVm::adopt(&identity, room.path(), SOON).unwrap();
        by(&mut machine);
        assert!(machine.wait_ended(SOON).unwrap());
        let ended = machine.ended().unwrap().unwrap();
        assert!(ended.status.is_none());
        ended.shutdown
    };
    let told = end(&|machine| signal(machine.identity(), Signal::TERM)).unwrap();
    assert_eq!((told.guest, &*told.reason), (false, "host-signal"));
    assert_eq!(end(&|machine| signal(machine.identity(), Signal::KILL)), None);
    let powered_off = end(&|_| write(&[1], 512)).unwrap();
    assert_eq!((powered_off.guest, &*powered_off.reason), (true, "guest-shutdown"));
}

#[test]
fn a_machine_with_anothers_monitor_is_not_adopted() {
    let Some(room) = Room::new() else { return };
    let machine = room.start();
    let identity = machine.identity().clone();
    // A monitor has one client at a time: the first one disconnects.
    drop(machine);
    let mut other = Command::new("sleep").arg("600").spawn().unwrap();
    let process = vm::qemu::process::Process::with_pid(other.id().try_into().unwrap()).unwrap();
    let error = QemuVm::adopt(process.identity(), room.path(), SOON).unwrap_err();
    assert!(matches!(error, MachineError::NotIts { .. }), "{error:?}");
    other.kill().unwrap();
    other.wait().unwrap();
    QemuVm::adopt(&identity, room.path(), SOON).unwrap().end().unwrap();
}

#[test]
fn the_firmware_boots_the_marked_disk_at_any_position() {
    let Some(mut room) = Room::new() else { return };
    // mov dx, 0x3f8; mov al, LETTER; out dx, al; hlt; jmp: writes a letter to the serial port, for ever silent then.
    let sector = |letter: u8| {
        let mut sector = vec![0xba, 0xf8, 0x03, 0xb0, letter, 0xee, 0xf4, 0xeb, 0xfd];
        sector.resize(510, 0);
        [&sector[..], &[0x55, 0xaa]].concat()
    };
    let mut disks = vec![disk(0, room.path().join("boot.sock"))];
    for (position, letter) in [(1, b'A'), (35, b'B'), (254, b'C')] {
        let name = format!("disk{position}");
        let socket = room.serve(&name);
        let image = fs::OpenOptions::new().write(true).open(room.path().join(&name)).unwrap();
        std::os::unix::fs::FileExt::write_all_at(&image, &sector(letter), 0).unwrap();
        disks.push(Disk { bootable: position > 1, ..disk(position, socket) });
    }
    let log = room.path().join("console");
    let console = Some(Console { device: ConsoleDevice::Serial, to: ConsoleTo::Log(log.clone()) });
    let hardware = Hardware { disks, console, ..room.hardware() };
    let mut machine = QemuVm::start(&qemu(), &hardware, room.path(), SOON).unwrap();
    let deadline = Instant::now() + SOON;
    while fs::read(&log).unwrap().is_empty() && Instant::now() < deadline {
        thread::sleep(Duration::from_millis(10));
    }
    assert_eq!(fs::read_to_string(&log).unwrap(), "B");
    machine.end().unwrap();
}

#[test]
fn qemu_accepts_every_platform_key() {
    let Some(room) = Room::new() else { return };
    let file = |name: &str| format!("{}/{name}", room.path().display());
    fs::write(file("a,b.iso"), vec![0; 1 << 20]).unwrap();
    let (dvd, serial, vnc) =
        (format!("file:{}", file("a,b.iso")), format!("unix:{}", file("serial")), format!("unix:{}", file("vnc")));
    for (vga, parallel, hvm_serial, dvd) in [
        ("std", "null", serial.as_str(), dvd.as_str()),
        ("cirrus", "none", "pty", "empty"),
        ("virtio", "none", "null", "none"),
    ] {
        let pairs = [
            ("usb", "true"),
            ("usb_tablet", "true"),
            ("hpet", "true"),
            ("nic", "user"),
            ("vga", vga),
            ("vnc", vnc.as_str()),
            ("parallel", parallel),
            ("hvm_serial", hvm_serial),
            ("dvd", dvd),
        ];
        let console = Some(Console { device: ConsoleDevice::Virtio, to: ConsoleTo::Socket(file("console").into()) });
        let platform = Platform::parse(pairs).unwrap();
        let hardware = Hardware { platform, console, memory_mib: 256, ..room.hardware() };
        let mut machine = QemuVm::start(&qemu(), &hardware, room.path(), SOON).unwrap();
        assert_eq!(machine.status().unwrap(), Status::Running);
        machine.end().unwrap();
        let said = fs::read_to_string(machine.log()).unwrap();
        assert!(!said.contains("warning") && !said.contains("error"), "{said}");
    }
}

#[test]
fn a_second_client_of_a_monitor_gets_an_error() {
    let Some(room) = Room::new() else { return };
    let mut machine = room.start();
    let error = QemuVm::adopt(machine.identity(), room.path(), SHORT).unwrap_err();
    let cause = std::error::Error::source(&error).unwrap().to_string();
    assert!(cause.contains("another client holds its monitor"), "{cause}");
    machine.end().unwrap();
}

#[test]
fn a_disk_is_plugged_once_and_a_plug_that_fails_leaves_nothing() {
    let Some(mut room) = Room::new() else { return };
    let mut machine = room.start();
    let taken = machine.plug(&disk(0, room.path().join("boot.sock"))).unwrap_err();
    assert!(matches!(taken, MachineError::Taken(0)), "{taken:?}");
    let failed = machine.plug(&disk(254, "/no/such.sock".into())).unwrap_err();
    let cause = std::error::Error::source(&failed).unwrap().to_string();
    assert!(
        failed.to_string() == "cannot plug disk 254 into the VM" && cause.contains("/no/such.sock"),
        "{failed}: {cause}"
    );
    let socket = room.serve("last");
    // More queues than are served: QEMU refuses the device when its connection is there already.
    let greedy = Disk { queues: Some(64), ..disk(254, socket.clone()) };
    let refused = machine.plug(&greedy).unwrap_err();
    let cause = std::error::Error::source(&refused).unwrap().to_string();
    assert!(refused.to_string() == "cannot plug disk 254" && cause.contains("QEMU refused device_add"), "{cause}");
    // Its connection is gone, or the same name could not be used again.
    machine.plug(&disk(254, socket)).unwrap();
    let positions: Vec<u8> = machine.disks().unwrap().into_iter().map(Position::number).collect();
    assert_eq!(positions, [0, 254]);
    machine.unplug(Position::new(7).unwrap(), SHORT).unwrap();
    machine.end().unwrap();
}

#[test]
fn a_guest_that_does_not_release_keeps_the_disk_and_is_reported() {
    let Some(mut room) = Room::new() else { return };
    let mut machine = room.start();
    let socket = room.serve("held");
    machine.plug(&disk(40, socket)).unwrap();
    let position = Position::new(40).unwrap();
    for _ in 0..2 {
        // The second request is refused by QEMU as being under way, which is no other answer.
        let error = machine.unplug(position, SHORT).unwrap_err();
        assert!(matches!(error, MachineError::Held { position: 40, .. }), "{error:?}");
        assert!(error.to_string().contains("has not released disk 40"), "{error}");
    }
    assert!(machine.disks().unwrap().contains(&position));
    machine.end().unwrap();
}

/// Serves a disk up to QEMU's request for the inflight region, which comes when the guest's driver starts the disk;
/// then closes the connection, as at the end of a process. The next connection is served in the same way.
fn die_when_the_driver_starts(socket: &Path) {
    // Messages of the vhost-user protocol, and features: VIRTIO_F_VERSION_1 and protocol features; then CONFIG and
    // INFLIGHT_SHMFD.
    const GET_FEATURES: u32 = 1;
    const GET_PROTOCOL_FEATURES: u32 = 15;
    const GET_CONFIG: u32 = 24;
    const GET_INFLIGHT_FD: u32 = 31;
    const FEATURES: u64 = 1 << 32 | 1 << 30;
    const PROTOCOL_FEATURES: u64 = 1 << 9 | 1 << 12;
    let listener = UnixListener::bind(socket).unwrap();
    thread::spawn(move || {
        for mut stream in listener.incoming().map_while(Result::ok) {
            let mut header = [0; 12];
            while stream.read_exact(&mut header).is_ok() {
                let word = |at: usize| u32::from_le_bytes(header[at..at + 4].try_into().unwrap());
                let mut payload = vec![0; word(8) as usize];
                stream.read_exact(&mut payload).unwrap();
                match word(0) {
                    GET_FEATURES => payload = FEATURES.to_le_bytes().to_vec(),
                    GET_PROTOCOL_FEATURES => payload = PROTOCOL_FEATURES.to_le_bytes().to_vec(),
                    // After offset, size and flags: the capacity in sectors and, for the firmware, blocks of 512 bytes.
                    GET_CONFIG => {
                        payload[12..20].copy_from_slice(&2048_u64.to_le_bytes());
                        payload[32..36].copy_from_slice(&512_u32.to_le_bytes());
                    }
                    GET_INFLIGHT_FD => break,
                    _ => continue,
                }
                // Version 1, and that it is an answer.
                let len = u32::try_from(payload.len()).unwrap();
                let answer = [word(0), 5, len].map(u32::to_le_bytes).concat();
                stream.write_all(&[answer, payload].concat()).unwrap();
            }
        }
    });
}

#[test]
fn a_disk_whose_server_dies_during_driver_start_is_detected_as_lost() {
    let Some(room) = Room::new() else { return };
    let socket = room.path().join("dies.sock");
    die_when_the_driver_starts(&socket);
    let dies = Disk { queues: Some(1), bootable: true, ..disk(0, socket) };
    let place = dies.position;
    let hardware = Hardware { disks: vec![dies], ..room.hardware() };
    let mut machine = QemuVm::start(&qemu(), &hardware, room.path(), SOON).unwrap();
    // The firmware is the driver.
    let deadline = Instant::now() + SOON;
    while !machine.has_lost(place).unwrap() {
        assert!(Instant::now() < deadline, "the disk is not seen to be lost");
        thread::sleep(Duration::from_millis(100));
    }
    machine.pause().unwrap();
    assert!(!machine.has_lost(place).unwrap(), "a guest that stands still has lost nothing");
    machine.end().unwrap();
}

#[test]
fn a_disk_that_the_firmware_reads_is_not_lost() {
    let Some(room) = Room::new() else { return };
    let mut machine = room.start();
    let place = Position::new(0).unwrap();
    for _ in 0..20 {
        assert!(!machine.has_lost(place).unwrap());
        thread::sleep(Duration::from_millis(100));
    }
    assert!(!machine.has_lost(Position::new(1).unwrap()).unwrap(), "there is none");
    machine.end().unwrap();
}

#[test]
fn a_guest_that_ignores_the_power_button_is_stopped() {
    let Some(room) = Room::new() else { return };
    let mut machine = room.start();
    assert_eq!(machine.shutdown(SHORT).unwrap(), Ending::Quit);
}

#[test]
#[ignore = "slow: run by `make test-all`"]
fn a_qemu_that_hangs_is_killed() {
    let Some(room) = Room::new() else { return };
    let mut machine = room.start();
    signal(machine.identity(), Signal::STOP);
    assert_eq!(machine.end().unwrap(), Ending::Killed);
    let status = machine.ended().unwrap().unwrap().status.unwrap();
    assert_eq!(std::os::unix::process::ExitStatusExt::signal(&status), Some(9));
}
