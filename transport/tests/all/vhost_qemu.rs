//! QEMU as the front-end and its firmware as the driver. It needs no kernel: a boot sector reads and writes.

use std::process::Command;

use crate::vhost_mock::{GEOMETRY, RunningBackend};

#[test]
#[ignore = "slow: run by `make test-all`"]
fn qemu_boots_from_the_disk_and_writes_to_it() {
    let sector = testkit::firmware::writes_itself_to(5);
    let mut running = RunningBackend::with_content(&sector, GEOMETRY, 4);
    let socket = running.path();
    let output = Command::new("qemu-system-x86_64")
        .args(["-nodefaults", "-display", "none", "-no-reboot", "-m", "64", "-accel", "kvm", "-accel", "tcg"])
        .args(["-object", "memory-backend-memfd,id=ram,size=64M,share=on", "-machine", "q35,memory-backend=ram"])
        .args(["-chardev", &format!("socket,id=disk,path={}", socket.display())])
        .args(["-device", "vhost-user-blk-pci,chardev=disk,num-queues=4,bootindex=0"])
        .args(["-device", "isa-debug-exit,iobase=0x501,iosize=1"])
        .output()
        .expect("this test needs qemu-system-x86_64 (Debian: qemu-system-x86)");
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    // isa-debug-exit exits with twice the value plus one.
    assert_eq!(output.status.code(), Some(16 * 2 + 1), "{stderr}");
    let bytes = running.stop();
    assert_eq!(bytes[5 * 512..6 * 512], sector);
}
