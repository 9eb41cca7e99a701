//! QEMU as the front-end and its firmware as the driver: no kernel, a boot sector is enough to read and write.

use std::process::Command;

use crate::vhost_mock::{GEOMETRY, Running};

/// Writes itself to sector 5 with the firmware's disk service and exits with the firmware's result (AH, zero for
/// success) plus 16.
const BOOT_SECTOR: [u8; 42] = [
    0x31, 0xc0, // xor ax, ax
    0x8e, 0xd8, // mov ds, ax
    0xbe, 0x1a, 0x7c, // mov si, 0x7c1a
    0xb4, 0x43, // mov ah, 0x43 (extended write)
    0xcd, 0x13, // int 0x13
    0xba, 0x01, 0x05, // mov dx, 0x501
    0x88, 0xe0, // mov al, ah
    0x04, 0x10, // add al, 16
    0xee, // out dx, al
    0xf4, // hlt
    0xeb, 0xfd, // jmp to the hlt
    0x90, 0x90, 0x90, 0x90, // up to 0x7c1a
    // The disk address packet: 16 bytes, one sector from 0000:7c00 to sector 5.
    0x10, 0x00, 0x01, 0x00, 0x00, 0x7c, 0x00, 0x00, 0x05, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00,
];

#[test]
#[ignore = "slow: run by `make test-all`"]
fn qemu_boots_from_the_disk_and_writes_to_it() {
    let mut sector = [0; 512];
    sector[..BOOT_SECTOR.len()].copy_from_slice(&BOOT_SECTOR);
    sector[510..].copy_from_slice(&[0x55, 0xaa]);
    let mut running = Running::holding(&sector, GEOMETRY, 4);
    let socket = running.path();
    let output = Command::new("qemu-system-x86_64")
        .args(["-nodefaults", "-display", "none", "-no-reboot", "-m", "64", "-accel", "kvm", "-accel", "tcg"])
        .args(["-object", "memory-backend-memfd,id=ram,size=64M,share=on", "-machine", "q35,memory-backend=ram"])
        .args(["-chardev", &format!("socket,id=disk,path={}", socket.display())])
        .args(["-device", "vhost-user-blk-pci,chardev=disk,num-queues=4,bootindex=0"])
        .args(["-device", "isa-debug-exit,iobase=0x501,iosize=1"])
        .output()
        .expect("this test needs qemu-system-x86_64 (Debian: qemu-system-x86)");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    // isa-debug-exit exits with twice the value plus one.
    assert_eq!(output.status.code(), Some(16 * 2 + 1), "{said}");
    let bytes = running.stop();
    assert_eq!(bytes[5 * 512..6 * 512], sector);
}
