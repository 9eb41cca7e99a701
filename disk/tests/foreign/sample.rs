//! Small images of other hypervisors, made byte by byte after their specifications.

/// A VMDK: how long its grains are, and whether they are compressed.
pub fn vmdk(disk: &[u8], grain: usize, compressed: bool) -> Vec<u8> {
    let kind = if compressed { "streamOptimized" } else { "monolithicSparse" };
    let text = format!(
        "# Disk DescriptorFile\nversion=1\nCID=12345678\nparentCID=ffffffff\ncreateType=\"{kind}\"\n\
         RW {} SPARSE \"a.vmdk\"\n",
        disk.len() / 512
    );
    let mut file = vec![0; 21 * 512];
    file[512..512 + text.len()].copy_from_slice(text.as_bytes());
    let grains: Vec<&[u8]> = disk.chunks(grain).collect();
    let tables = grains.len().div_ceil(512);
    let directory_at = file.len();
    let tables_at = (directory_at + tables * 4).next_multiple_of(512);
    file.resize(tables_at + tables * 2048, 0);
    (0..tables).for_each(|n| put32(&mut file, directory_at + n * 4, (tables_at + n * 2048) / 512));
    for (number, bytes) in grains.iter().enumerate().filter(|(_, bytes)| bytes.iter().any(|&byte| byte != 0)) {
        let at = file.len().next_multiple_of(if compressed { 512 } else { grain });
        file.resize(at, 0);
        if compressed {
            let mut whole = bytes.to_vec();
            whole.resize(grain, 0);
            let deflated = miniz_oxide::deflate::compress_to_vec_zlib(&whole, 6);
            file.extend((number * grain / 512).to_le_bytes());
            file.extend(u32::try_from(deflated.len()).unwrap().to_le_bytes());
            file.extend(deflated);
        } else {
            file.extend(*bytes);
        }
        file.resize(file.len().next_multiple_of(512), 0);
        put32(&mut file, tables_at + number * 4, at / 512);
    }
    let flags = if compressed { 0x3_0001 } else { 1 };
    let mut header = vec![0; 512];
    header[..4].copy_from_slice(b"KDMV");
    put32(&mut header, 4, if compressed { 3 } else { 1 });
    put32(&mut header, 8, flags);
    put32(&mut header, 12, disk.len() / 512);
    put32(&mut header, 20, grain / 512);
    put32(&mut header, 28, 1);
    put32(&mut header, 36, 20);
    put32(&mut header, 44, 512);
    put32(&mut header, 56, directory_at / 512);
    header[73..77].copy_from_slice(b"\n \r\n");
    header[77] = compressed.into();
    file[..512].copy_from_slice(&header);
    if compressed {
        // Footer marker, footer, end of stream: the directory is known at the end only.
        file.resize(file.len() + 512, 0);
        file.extend(&header);
        file.resize(file.len() + 512, 0);
        file[56..64].fill(0xff);
    }
    file
}

pub const VHDX_HEADERS: [usize; 2] = [64 << 10, 128 << 10];
pub const VHDX_REGIONS: [usize; 2] = [192 << 10, 256 << 10];
pub const VHDX_METADATA: usize = 2 << 20;
pub const VHDX_BAT: usize = 3 << 20;

/// A VHDX with blocks of 1 MiB.
pub fn vhdx(disk: &[u8], fixed: bool) -> Vec<u8> {
    const MIB: usize = 1 << 20;
    let mut file = vec![0; 4 * MIB];
    file[..8].copy_from_slice(b"vhdxfile");
    for (sequence, at) in (1..).zip(VHDX_HEADERS) {
        file[at..at + 4].copy_from_slice(b"head");
        put32(&mut file, at + 8, sequence);
        // Log version 0, version 1; a log of 1 MiB, which is empty.
        file[at + 66] = 1;
        put32(&mut file, at + 68, MIB);
        put32(&mut file, at + 72, MIB);
    }
    for at in VHDX_REGIONS {
        file[at..at + 4].copy_from_slice(b"regi");
        put32(&mut file, at + 8, 2);
        let regions =
            [("2dc27766f62342009d64115e9bfd4a08", VHDX_BAT), ("8b7ca20647904b9ab8fe575f050f886e", VHDX_METADATA)];
        for (n, (guid, place)) in regions.into_iter().enumerate() {
            let entry = at + 16 + n * 32;
            file[entry..entry + 16].copy_from_slice(&guid_of(guid));
            put32(&mut file, entry + 16, place);
            put32(&mut file, entry + 24, MIB);
            put32(&mut file, entry + 28, 1);
        }
    }
    file[VHDX_METADATA..VHDX_METADATA + 8].copy_from_slice(b"metadata");
    let parameters = [&(1u32 << 20).to_le_bytes()[..], &u32::from(fixed).to_le_bytes()].concat();
    let items = [
        ("caa16737fa364d43b3b633f0aa44e76b", parameters),
        ("2fa54224cd1b4876b2115dbed83bf4b8", disk.len().to_le_bytes().to_vec()),
        ("beca12abb2e6452393efc309e000c746", vec![7; 16]),
        ("8141bf1da96f4709ba47f233a8faab5f", 512u32.to_le_bytes().to_vec()),
        ("cda348c7445d44719cc9e9885251c556", 4096u32.to_le_bytes().to_vec()),
    ];
    file[VHDX_METADATA + 10] = u8::try_from(items.len()).unwrap();
    for (n, (guid, bytes)) in items.into_iter().enumerate() {
        let (entry, place) = (VHDX_METADATA + 32 + n * 32, (64 << 10) + n * 16);
        file[entry..entry + 16].copy_from_slice(&guid_of(guid));
        put32(&mut file, entry + 16, place);
        put32(&mut file, entry + 20, bytes.len());
        put32(&mut file, entry + 24, 4);
        file[VHDX_METADATA + place..VHDX_METADATA + place + bytes.len()].copy_from_slice(&bytes);
    }
    for (number, bytes) in disk.chunks(MIB).enumerate() {
        if fixed || bytes.iter().any(|&byte| byte != 0) {
            let entry = u64::try_from(file.len()).unwrap() | 6;
            file[VHDX_BAT + number * 8..][..8].copy_from_slice(&entry.to_le_bytes());
            file.extend(bytes);
            file.resize(file.len().next_multiple_of(MIB), 0);
        }
    }
    seal(&mut file);
    file
}

/// Makes the checksums of a VHDX right.
pub fn seal(file: &mut [u8]) {
    for (at, len) in VHDX_HEADERS.map(|at| (at, 4096)).into_iter().chain(VHDX_REGIONS.map(|at| (at, 64 << 10))) {
        file[at + 4..at + 8].fill(0);
        let crc = crc32c(&file[at..at + len]);
        file[at + 4..at + 8].copy_from_slice(&crc.to_le_bytes());
    }
}

/// CRC-32C.
pub fn crc32c(bytes: &[u8]) -> u32 {
    let mut crc = u32::MAX;
    for &byte in bytes {
        crc ^= u32::from(byte);
        (0..8).for_each(|_| crc = if crc & 1 == 1 { crc >> 1 ^ 0x82f6_3b78 } else { crc >> 1 });
    }
    !crc
}

/// A GUID as it is written, as it stands in a file.
fn guid_of(text: &str) -> [u8; 16] {
    let byte = |n: usize| u8::from_str_radix(&text[2 * n..2 * n + 2], 16).unwrap();
    [3, 2, 1, 0, 5, 4, 7, 6, 8, 9, 10, 11, 12, 13, 14, 15].map(byte)
}

fn put32(bytes: &mut [u8], at: usize, value: usize) {
    bytes[at..at + 4].copy_from_slice(&u32::try_from(value).unwrap().to_le_bytes());
}
