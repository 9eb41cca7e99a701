//! Guests that need no kernel: boot sectors that the firmware of a PC runs.

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

/// A boot sector that counts without end, and writes each number to a sector of its disk: 32 bits that are those of its
/// start, by the processor's clock, and then the number in 32 bits.
pub fn counts_in(sector: u64) -> [u8; SECTOR] {
    let code = [
        0x31, 0xc0, // xor ax, ax
        0x8e, 0xd8, // mov ds, ax
        0x52, // push dx (the number of the disk)
        0x0f, 0x31, // rdtsc
        0x5a, // pop dx
        0x66, 0xa3, 0x00, 0x80, // mov [0x8000], eax
        0x66, 0x31, 0xc0, // xor eax, eax
        0x66, 0xa3, 0x04, 0x80, // mov [0x8004], eax
        // Each number:
        0x66, 0xff, 0x06, 0x04, 0x80, // inc dword [0x8004]
        0xbe, 0x22, 0x7c, // mov si, 0x7c22
        0xb8, 0x00, 0x43, // mov ax, 0x4300 (extended write)
        0xcd, 0x13, // int 0x13
        0xeb, 0xf1, // jmp to the inc
        // The disk address packet at 0x7c22: one sector from 0000:8000, and behind that where to.
        0x10, 0x00, 0x01, 0x00, 0x00, 0x80, 0x00, 0x00,
    ];
    let mut bytes = [0; SECTOR];
    bytes[..code.len()].copy_from_slice(&code);
    bytes[code.len()..code.len() + 8].copy_from_slice(&sector.to_le_bytes());
    bytes[SECTOR - 2..].copy_from_slice(&[0x55, 0xaa]);
    bytes
}

/// A boot sector that writes `ready` and a line's end to the serial port, sends back what it receives there, and powers
/// the machine off when that is a `q` or when the power button is pressed.
pub fn answers_at_the_serial_port() -> [u8; SECTOR] {
    let code = [
        0x31, 0xc0, // xor ax, ax
        0x8e, 0xd8, // mov ds, ax
        // The power button sets its bit in the status of PM1a (0x600, bit 8) where that is enabled (0x602):
        0xba, 0x02, 0x06, // mov dx, 0x602
        0xb4, 0x01, // mov ah, 1
        0xef, // out dx, ax
        0xbe, 0x50, 0x7c, // mov si, 0x7c50
        // Each byte up to a zero:
        0xac, // lodsb
        0x84, 0xc0, // test al, al
        0x74, 0x05, // jz to what waits
        0xe8, 0x20, 0x00, // call what writes
        0xeb, 0xf6, // jmp to the lodsb
        // What waits for the power button or a byte (line status, bit 0):
        0xba, 0x00, 0x06, // mov dx, 0x600
        0xed, // in ax, dx
        0xf6, 0xc4, 0x01, // test ah, 1
        0x75, 0x26, // jnz to what powers off
        0xba, 0xfd, 0x03, // mov dx, 0x3fd
        0xec, // in al, dx
        0xa8, 0x01, // test al, 1
        0x74, 0xef, // jz to what waits
        0xba, 0xf8, 0x03, // mov dx, 0x3f8
        0xec, // in al, dx
        0x3c, b'q', // cmp al, 'q'
        0x74, 0x16, // je to what powers off
        0xe8, 0x02, 0x00, // call what writes
        0xeb, 0xe2, // jmp to what waits
        // What writes AL when the port is ready for it (line status, bit 5):
        0x88, 0xc4, // mov ah, al
        0xba, 0xfd, 0x03, // mov dx, 0x3fd
        0xec, // in al, dx
        0xa8, 0x20, // test al, 0x20
        0x74, 0xfb, // jz to the in
        0x88, 0xe0, // mov al, ah
        0xba, 0xf8, 0x03, // mov dx, 0x3f8
        0xee, // out dx, al
        0xc3, // ret
        // What powers off, by the chipset's power management as the firmware has set it up:
        0xba, 0x04, 0x06, // mov dx, 0x604
        0xb8, 0x00, 0x20, // mov ax, 0x2000
        0xef, // out dx, ax
        0xf4, // hlt
        0xeb, 0xf6, // jmp to what powers off
    ];
    let text = b"ready\r\n";
    let mut bytes = [0; SECTOR];
    bytes[..code.len()].copy_from_slice(&code);
    bytes[code.len()..code.len() + text.len()].copy_from_slice(text);
    bytes[SECTOR - 2..].copy_from_slice(&[0x55, 0xaa]);
    bytes
}

/// A DVD from which a boot sector is booted: El Torito 1.0, without emulation of a floppy disk.
pub fn dvd(boot: [u8; SECTOR]) -> Vec<u8> {
    const BLOCK: usize = 2048;
    const CATALOGUE: u8 = 19;
    const BOOT: u8 = 20;
    let mut bytes = vec![0; BLOCK * (usize::from(BOOT) + 1)];
    let mut put = |block: u8, at: usize, what: &[u8]| {
        let from = usize::from(block) * BLOCK + at;
        bytes[from..from + what.len()].copy_from_slice(what);
    };
    // Volume descriptors (ECMA-119, 8): the primary one, the boot record, and the end of the set.
    put(16, 0, b"\x01CD001\x01");
    put(17, 0, b"\0CD001\x01EL TORITO SPECIFICATION");
    put(17, 0x47, &[CATALOGUE]);
    put(18, 0, b"\xffCD001\x01");
    // The validation entry, whose words add up to zero, and the entry of the boot sector.
    put(CATALOGUE, 0, &[1]);
    put(CATALOGUE, 28, &[0xaa, 0x55, 0x55, 0xaa]);
    put(CATALOGUE, 32, &[0x88, 0, 0, 0, 0, 0, 1, 0, BOOT]);
    put(BOOT, 0, &boot);
    bytes
}
