//! A guest that needs no kernel: a boot sector that the firmware of a PC runs.

/// Bytes of a sector.
pub const SECTOR: usize = 512;

/// A boot sector that writes itself to a sector of its disk, by the firmware's disk service, and ends QEMU through
/// `isa-debug-exit,iobase=0x501,iosize=1` with the firmware's answer (AH, zero for success) plus 16.
pub fn writes_itself_to(sector: u64) -> [u8; SECTOR] {
    let code = [
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
        // The disk address packet: 16 bytes, one sector from 0000:7c00, and behind that where to.
        0x10, 0x00, 0x01, 0x00, 0x00, 0x7c, 0x00, 0x00,
    ];
    let mut bytes = [0; SECTOR];
    bytes[..code.len()].copy_from_slice(&code);
    bytes[code.len()..code.len() + 8].copy_from_slice(&sector.to_le_bytes());
    bytes[SECTOR - 2..].copy_from_slice(&[0x55, 0xaa]);
    bytes
}
