//! A disk that QEMU reads for the guest's firmware while the guest's own driver connects.

use testkit::nbd::{Client, Command};

use super::*;

const PATH_KEY: &str = "/local/domain/0/backend/vbd/7/51728/physical-device-path";

/// Returns a machine whose disk is served to both, and QEMU, which has found it by the path that libxl passes.
fn machine_with_qemu() -> (GuestBed, Process, Client) {
    let mut machine = GuestBed::new();
    let path = machine.nbd();
    firmware::show(&mut machine.store, Path::new("/none"), &machine.device, &path).unwrap();
    let process = machine.serve_with(true);
    // It listens before the guest's end is served, when libxl starts QEMU.
    until(|| machine.states().0 == Some(State::INIT_WAIT));
    let qemu = Client::connect(&path).unwrap();
    (machine, process, qemu)
}

#[test]
fn firmware_and_driver_share_the_disk_and_see_each_others_writes() {
    let (mut machine, process, mut qemu) = machine_with_qemu();
    assert_eq!(qemu.size, 64 * 512);
    assert_eq!(qemu.read(5 * 512, 512).unwrap(), [5; 512]);
    assert_eq!(text(&mut machine.store, None, PATH_KEY).unwrap(), None, "it is not needed any more");
    qemu.write(6 * 512, &[66; 512]).unwrap();
    let front = machine.connect();
    assert_eq!(front.read(6), (vec![66; 512], 0));
    for number in 1..20 {
        qemu.write(7 * 512, &[number; 512]).unwrap();
        assert_eq!(front.read_as(number.into(), 7), (vec![number; 512], 0));
    }
    qemu.flush().unwrap();

    // The driver unplugs the emulated disk; the guest's end is not affected.
    drop(qemu);
    assert_eq!(front.read_as(20, 5), (vec![5; 512], 0));
    take::ask(&mut machine.store, &machine.device).unwrap();
    machine.guest_closes();
    assert_eq!(process.end(), Exit::Done);
    assert!(!machine.nbd().exists());
    assert_eq!(machine.host.counts(), Counts::default());
}

#[test]
fn a_guest_destroyed_during_firmware_leaves_nothing() {
    for connected in [false, true] {
        let (mut machine, process, mut qemu) = machine_with_qemu();
        let guest = if connected { machine.connect().guest } else { machine.host.guest(machine.device.guest) };
        qemu.send(Command::Write, 0, 4096, &[1; 4096]).unwrap();
        guest.die();
        machine.store.remove(None, "/local/domain/7").unwrap();
        assert_eq!(process.end(), Exit::Done);
        assert_eq!(machine.backends(), [""; 0]);
        assert!(!machine.nbd().exists());
        assert_eq!(machine.host.counts(), Counts::default());
    }
}

#[test]
fn libxls_path_is_removed_with_a_guest_whose_firmware_never_connected() {
    let mut machine = GuestBed::new();
    let path = machine.nbd();
    firmware::show(&mut machine.store, Path::new("/none"), &machine.device, &path).unwrap();
    let process = machine.serve_with(true);
    until(|| machine.states().0 == Some(State::INIT_WAIT));
    let front = machine.connect();
    assert!(text(&mut machine.store, None, PATH_KEY).unwrap().is_some());
    front.guest.die();
    assert_eq!(process.end(), Exit::Done);
    assert_eq!(machine.store.list(None, "/local/domain/0/backend/vbd").unwrap(), Some(Vec::new()));
}

#[test]
fn a_process_is_replaced_for_guest_and_firmware() {
    let (mut machine, process, mut qemu) = machine_with_qemu();
    let front = machine.connect();
    assert_eq!(front.read(5), (vec![5; 512], 0));
    qemu.write(6 * 512, &[66; 512]).unwrap();
    Process::signal(&process.leave);
    assert_eq!(process.end(), Exit::Done);
    assert!(qemu.read(0, 512).is_err(), "it has to reconnect");

    let process = machine.serve_with(true);
    assert_eq!(front.read_as(1, 6), (vec![66; 512], 0));
    assert_eq!(Client::connect(&machine.nbd()).unwrap().read(6 * 512, 512).unwrap(), [66; 512]);
    Process::signal(&process.stop);
    until(|| machine.states().0 == Some(State::CLOSING));
    machine.guest_closes();
    assert_eq!(process.end(), Exit::Done);
}

#[test]
fn a_stopping_process_with_only_firmware_connected_exits() {
    let (mut machine, process, mut qemu) = machine_with_qemu();
    assert_eq!(qemu.read(512, 512).unwrap(), [1; 512]);
    Process::signal(&process.stop);
    assert_eq!(process.end(), Exit::Done);
    assert_eq!(machine.states().0, Some(State::CLOSED));
}
