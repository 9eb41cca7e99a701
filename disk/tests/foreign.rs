//! VMDK and VHDX: images made after their specifications read back, and damaged ones neither panic nor lead out of the
//! file.

#![allow(missing_docs, reason = "a test")]

#[path = "foreign/sample.rs"]
mod sample;

use disk::foreign::Foreign;
use disk::{DiskOffset, Format, ImageError, ImageErrorKind, Mapping, MetaBlock, Span, Wait};
use sample::{VHDX_BAT, VHDX_HEADERS, VHDX_METADATA, VHDX_REGIONS, seal, vhdx, vmdk};

const MIB: usize = 1 << 20;

/// 5 MiB and a sector, some of which is zero.
fn disk() -> Vec<u8> {
    let mut disk: Vec<u8> = (0..5 * MIB + 512).map(|n| u8::try_from(n / 513 % 251).unwrap()).collect();
    disk[100_000..MIB + 300_000].fill(0);
    disk[2 * MIB..4 * MIB].fill(0);
    disk
}

type Opens = fn(&[u8]) -> Result<Foreign, ImageError>;

fn open_vmdk(mut file: &[u8]) -> Result<Foreign, ImageError> {
    Foreign::open_vmdk(&mut file)
}

fn open_vhdx(mut file: &[u8]) -> Result<Foreign, ImageError> {
    Foreign::open_vhdx(&mut file)
}

/// Where the first bytes of a span live; what must be read for that is behind the file's end zero.
fn map(image: &mut Foreign, file: &[u8], span: Span) -> Mapping {
    loop {
        match image.map(span) {
            Ok(mapping) => {
                assert!(mapping.len() > 0 && mapping.len() <= span.len, "{mapping:?} of {span:?}");
                return mapping;
            }
            Err(Wait::Load(block)) => {
                let MetaBlock { at, len } = block;
                assert!(at.0 % 512 == 0 && len % 512 == 0 && at.0 < file.len() as u64, "{block:?}");
                image.load(block, &piece(file, at.0, len.into())).unwrap();
            }
            Err(wait) => panic!("{wait:?}"),
        }
    }
}

/// Bytes of a file, behind whose end is zero.
fn piece(file: &[u8], at: u64, len: u64) -> Vec<u8> {
    let from = usize::try_from(at).unwrap().min(file.len());
    let len = usize::try_from(len).unwrap();
    let mut bytes = file[from..file.len().min(from + len)].to_vec();
    bytes.resize(len, 0);
    bytes
}

/// The bytes of a mapping; `None` if they cannot be read.
fn bytes_of(image: &Foreign, file: &[u8], mapping: Mapping) -> Option<Vec<u8>> {
    match mapping {
        Mapping::Data { at, len } => Some(piece(file, at.0, len)),
        Mapping::Zero { len } | Mapping::Parent { len } => Some(vec![0; usize::try_from(len).unwrap()]),
        Mapping::Damaged { .. } | Mapping::Missing { .. } => None,
        Mapping::Compressed { at, size, lead, skip, len } => {
            let bytes = piece(file, at.0, size);
            let grain = image.decompress(&bytes[usize::try_from(lead).unwrap()..]).ok()?;
            grain.get(usize::try_from(skip).unwrap()..usize::try_from(skip + len).unwrap()).map(<[u8]>::to_vec)
        }
        Mapping::Shared { .. } => panic!("nothing is shared"),
    }
}

/// Asks where all of a disk is, at most `max` bytes of it: inside of the file. What is compressed is decompressed.
fn walk(image: &mut Foreign, file: &[u8], max: u64) {
    let (mut done, len) = (0, image.geometry().len.min(max));
    while done < len {
        let mapping = map(image, file, Span { at: DiskOffset(done), len: (len - done).min(2 << 20) });
        match mapping {
            Mapping::Data { at, .. } => assert!(at.0 < file.len() as u64),
            Mapping::Compressed { at, size, lead, .. } => {
                assert!(at.0 < file.len() as u64 && size <= 2 << 20 && lead < size);
                bytes_of(image, file, mapping);
            }
            _ => {}
        }
        done += mapping.len();
    }
}

/// All of a disk, at most `max` bytes of it; `None` if some of it cannot be read.
fn contents(image: &mut Foreign, file: &[u8], max: u64) -> Option<Vec<u8>> {
    let (len, mut disk) = (image.geometry().len.min(max), Vec::new());
    while (disk.len() as u64) < len {
        let at = disk.len() as u64;
        let mapping = map(image, file, Span { at: DiskOffset(at), len: (len - at).min(2 << 20) });
        disk.extend(bytes_of(image, file, mapping)?);
    }
    Some(disk)
}

/// Each kind of image, and the places of its metadata.
fn samples() -> Vec<(Vec<u8>, Opens, Vec<std::ops::Range<usize>>)> {
    let disk = disk();
    let mut samples: Vec<(Vec<u8>, Opens, Vec<std::ops::Range<usize>>)> = Vec::new();
    for (grain, compressed) in [(64 << 10, false), (4096, false), (64 << 10, true)] {
        let file = vmdk(&disk, grain, compressed);
        // Header and descriptor; directory and the beginnings of tables; the first grain's marker; the footer.
        let last = file.len() - 2048;
        let grain = 21 * 512 + 512 + 2048;
        samples.push((
            file,
            open_vmdk,
            vec![0..512 + 160, 21 * 512..21 * 512 + 700, grain..grain + 64, last..last + 1200],
        ));
    }
    for fixed in [false, true] {
        let mut places = vec![0..16, VHDX_METADATA..VHDX_METADATA + 200, VHDX_BAT..VHDX_BAT + 64];
        places.push(VHDX_METADATA + (64 << 10)..VHDX_METADATA + (64 << 10) + 80);
        places.extend(VHDX_HEADERS.map(|at| at..at + 80));
        places.extend(VHDX_REGIONS.map(|at| at..at + 80));
        samples.push((vhdx(&disk, fixed), open_vhdx, places));
    }
    samples
}

#[test]
fn images_read_back_as_their_disk() {
    for (n, (file, open, _)) in samples().into_iter().enumerate() {
        let mut image = open(&file).unwrap();
        assert_eq!(image.geometry().len, disk().len() as u64, "{n}");
        assert!(image.geometry().read_only);
        assert!(contents(&mut image, &file, u64::MAX).unwrap() == disk(), "{n}");
        image.drop_caches();
        assert!(contents(&mut image, &file, u64::MAX).unwrap() == disk(), "{n}: after its caches were dropped");
    }
}

/// Scope: each byte of the metadata of each kind of image replaced, with right checksums. What opens is read as far as
/// the disk of the sample goes.
#[test]
fn a_changed_byte_is_refused_or_read_inside_of_the_file() {
    replace_each_byte(&[0xff]);
}

/// Scope: the same with three more values.
#[test]
#[ignore = "slow: run by `make test-all`"]
fn a_byte_of_another_value_is_refused_or_read_inside_of_the_file() {
    replace_each_byte(&[0, 1, 0x7f]);
}

fn replace_each_byte(values: &[u8]) {
    for (sample, open, places) in samples() {
        let has_checksums = sample.starts_with(b"vhdx");
        let mut file = sample.clone();
        for at in places.into_iter().flatten() {
            let summed = has_checksums && (VHDX_HEADERS[0]..VHDX_METADATA).contains(&at);
            for &value in values {
                file[at] = value;
                if summed {
                    seal(&mut file);
                }
                if let Ok(mut image) = open(&file) {
                    walk(&mut image, &file, 6 << 20);
                }
            }
            file[at] = sample[at];
            if summed {
                seal(&mut file);
            }
        }
        assert!(file == sample);
    }
}

/// Scope: each length that is a multiple of 512 bytes up to 64 KiB, and of 64 KiB up to the whole.
#[test]
fn a_file_that_is_cut_off_is_refused_or_read_inside_of_it() {
    for (sample, open, _) in samples() {
        let lens = (0..128).map(|n| n * 512).chain((2..).map(|n| n * (32 << 10))).take_while(|&len| len < sample.len());
        for len in lens {
            let file = &sample[..len];
            if let Ok(mut image) = open(file) {
                walk(&mut image, file, u64::MAX);
            }
        }
    }
}

#[test]
fn a_damaged_entry_costs_its_grain_and_is_named() {
    let sample = vmdk(&disk(), 64 << 10, false);
    let (table, mut file) = (21 * 512 + 512, sample.clone());
    let has = sample.len() as u64;
    file[table + 80 * 4..][..4].fill(0xff);
    let mut image = open_vmdk(&file).unwrap();
    let mapping = map(&mut image, &file, Span { at: DiskOffset(80 << 16), len: 512 });
    assert_eq!(mapping, Mapping::Missing { at: disk::FileOffset(0xffff_ffff * 512), has, len: 512 });
    assert!(contents(&mut image, &file, 80 << 16).unwrap() == disk()[..80 << 16]);
    let mut file = vhdx(&disk(), true);
    file[VHDX_BAT + 32] = 7;
    let mut image = open_vhdx(&file).unwrap();
    let mapping = map(&mut image, &file, Span { at: DiskOffset(4 << 20), len: 512 });
    assert!(matches!(mapping, Mapping::Damaged { len: 512, .. }), "{mapping:?}");
}

/// Why an image is refused.
fn refused(open: Opens, file: &[u8]) -> (ImageErrorKind, String) {
    let error = open(file).unwrap_err();
    (error.kind, error.to_string())
}

#[test]
fn what_is_not_read_is_refused_with_the_reason() {
    let text = |from: &str, to: &str| {
        let mut file = vmdk(&disk(), 64 << 10, false);
        let at = file.windows(from.len()).position(|window| window == from.as_bytes()).unwrap();
        file[at..at + from.len()].copy_from_slice(to.as_bytes());
        file
    };
    let (kind, why) = refused(open_vmdk, &text("parentCID=ffffffff", "parentCID=12345678"));
    assert!(kind == ImageErrorKind::Unsupported && why.contains("names no other file"), "{why}");
    let (kind, why) = refused(open_vmdk, &text("\"monolithicSparse\"", "\"vmfsSparse\"      "));
    assert!(kind == ImageErrorKind::Unsupported && why.contains("vmfsSparse"), "{why}");
    assert_eq!(refused(open_vmdk, b"# Disk DescriptorFile\nversion=1\n").0, ImageErrorKind::WrongFormat);
    let (_, why) = refused(open_vmdk, &text("# Disk DescriptorFile", "\0Disk DescriptorFile "));
    assert!(why.contains("one of several"), "{why}");
    assert_eq!(refused(open_vmdk, &[0; 4096]).0, ImageErrorKind::WrongFormat);
    assert_eq!(refused(open_vmdk, &[]).0, ImageErrorKind::WrongFormat);
    assert_eq!(refused(open_vhdx, b"vhd").0, ImageErrorKind::WrongFormat);
    let mut file = vhdx(&disk(), false);
    VHDX_HEADERS.iter().for_each(|at| file[at + 48..at + 64].fill(0x55));
    file[MIB + 8192..MIB + 12288].copy_from_slice(&log_entry(0x55));
    seal(&mut file);
    let (kind, why) = refused(open_vhdx, &file);
    assert!(kind == ImageErrorKind::Unsupported && why.contains("its log holds changes"), "{why}");
    let mut file = vhdx(&disk(), false);
    file[VHDX_METADATA + (64 << 10) + 4] = 2;
    let (kind, why) = refused(open_vhdx, &file);
    assert!(kind == ImageErrorKind::Unsupported && why.contains("differencing"), "{why}");
}

#[test]
fn one_sound_copy_of_what_a_vhdx_has_twice_is_enough() {
    for at in [VHDX_HEADERS[0], VHDX_HEADERS[1], VHDX_REGIONS[0], VHDX_REGIONS[1]] {
        let mut file = vhdx(&disk(), false);
        file[at + 40] ^= 1;
        let mut image = open_vhdx(&file).unwrap();
        assert!(contents(&mut image, &file, u64::MAX).unwrap() == disk());
    }
    let mut file = vhdx(&disk(), false);
    VHDX_REGIONS.iter().for_each(|at| file[at + 40] ^= 1);
    assert_eq!(refused(open_vhdx, &file).0, ImageErrorKind::Corrupt);
}

/// Cut off at any place that is behind their metadata, or, where that is at their end, in front of it.
#[test]
fn a_file_that_was_cut_off_shows_its_bytes_or_none() {
    let disk = disk();
    let samples: [(Opens, Vec<u8>); 4] = [
        (open_vmdk, vmdk(&disk, 64 << 10, false)),
        (open_vmdk, vmdk(&disk, 4096, false)),
        (open_vhdx, vhdx(&disk, false)),
        (open_vhdx, vhdx(&disk, true)),
    ];
    for (open, whole) in samples {
        let mut refused = 0;
        for cut in (512..3 * MIB / 2).step_by(133_333) {
            let file = &whole[..whole.len() - cut];
            let Ok(mut image) = open(file) else { continue };
            let mut at = 0;
            while at < disk.len() {
                let left = (disk.len() - at) as u64;
                let mapping = map(&mut image, file, Span { at: DiskOffset(at as u64), len: left });
                if let Mapping::Data { at, len } = mapping {
                    assert!(at.0 + len <= file.len() as u64, "{mapping:?}");
                }
                let len = usize::try_from(mapping.len()).unwrap();
                refused += usize::from(matches!(mapping, Mapping::Missing { .. }));
                match bytes_of(&image, file, mapping) {
                    Some(bytes) => assert!(bytes == disk[at..at + len], "{cut}: {mapping:?}"),
                    None => assert!(matches!(mapping, Mapping::Missing { has, .. } if has == file.len() as u64)),
                }
                at += len;
            }
        }
        assert!(refused > 3, "{refused}");
    }
}

/// Some programs pad what they write to whole MiB.
#[test]
fn the_footer_of_a_padded_stream_is_found() {
    let disk = disk();
    let mut file = vmdk(&disk, 64 << 10, true);
    file.resize(file.len() + 1536, 0);
    file.resize(file.len().next_multiple_of(64 << 10), 0);
    let mut image = open_vmdk(&file).unwrap();
    walk(&mut image, &file, u64::MAX);
}

/// The writer of a log names it in the header before its first entry; an entry of another log counts for nothing.
#[test]
fn a_named_log_without_entries_is_not_replayed() {
    let mut file = vhdx(&disk(), false);
    for at in VHDX_HEADERS {
        file[at + 48..at + 64].fill(0x55);
    }
    seal(&mut file);
    open_vhdx(&file).unwrap();
    file[MIB + 8192..MIB + 12288].copy_from_slice(&log_entry(0x44));
    open_vhdx(&file).unwrap();
    file[MIB + 8192..MIB + 12288].copy_from_slice(&log_entry(0x55));
    assert!(open_vhdx(&file).unwrap_err().what.contains("its log holds changes"));
    file[MIB + 8196] ^= 1;
    open_vhdx(&file).unwrap();
}

/// A valid entry of a log with this name, without changes.
fn log_entry(log: u8) -> Vec<u8> {
    let mut entry = vec![0; 4096];
    entry[..4].copy_from_slice(b"loge");
    entry[8..12].copy_from_slice(&4096u32.to_le_bytes());
    entry[16] = 1;
    entry[32..48].fill(log);
    let crc = sample::crc32c(&entry);
    entry[4..8].copy_from_slice(&crc.to_le_bytes());
    entry
}
