//! VHDs as libvhd has them: what it accepts and refuses, and that all that we make and change is among what it accepts.
//!
//! `TAPLINE_LIBVHD_SAMPLES=DIRECTORY` puts the samples there, to be shown to the real `vhd-util check` (docs/vhd.md).

#[path = "libvhd/judge.rs"]
mod judge;

use std::io::Cursor;

use disk::vhd::{self, Kind, Parent, Spec, Vhd};
use disk::{Access, Discarded, DiskOffset, Format, Link, MetaWrite, Severity, Span, Tail, Wait};
use fastrand::Rng;

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
const BLOCK: u64 = 2 << 20;

/// The file of an image, and its life.
#[derive(Clone)]
struct File {
    bytes: Vec<u8>,
}

impl File {
    fn new(len: u64, kind: Kind) -> File {
        File::with_blocks(len, kind, BLOCK)
    }

    fn with_blocks(len: u64, kind: Kind, block: u64) -> File {
        let block_size = u32::try_from(block).unwrap();
        let creation = vhd::create(&Spec { len, kind, block_size, uuid: [7; 16], created: 1_000_000_000 }).unwrap();
        let mut file = File { bytes: vec![0; index(creation.len)] };
        creation.writes.iter().for_each(|write| file.put(write));
        file
    }

    fn put(&mut self, write: &MetaWrite) {
        let (at, end) = (index(write.at.0), index(write.at.0) + write.bytes.len());
        self.bytes.resize(self.bytes.len().max(end), 0);
        self.bytes[at..end].copy_from_slice(&write.bytes);
    }

    fn open(&self) -> Vhd {
        Vhd::open(&mut self.bytes.as_slice(), Access::ReadWrite, Tail::Zeroes).unwrap()
    }

    /// Opens it, makes changes, and makes them durable.
    fn change(&mut self, change: impl FnOnce(&mut Vhd)) {
        let mut image = self.open();
        change(&mut image);
        self.round(&mut image);
    }

    fn round(&mut self, image: &mut Vhd) {
        image.seal().iter().flatten().for_each(|write| self.put(write));
        image.settled(true);
    }

    fn write(&mut self, image: &mut Vhd, at: u64, fill: u8) {
        let span = Span { at: DiskOffset(at), len: 512 };
        let reserved = self.asked(image, |image| image.reserve(span));
        self.put(&MetaWrite { at: reserved.at, bytes: vec![fill; 512] });
        reserved.ticket.and_then(|ticket| image.commit(ticket));
    }

    fn discard(&mut self, image: &mut Vhd, span: Span) {
        if let Discarded::Freed { at, .. } = self.asked(image, |image| image.discard(span)) {
            image.released(at, false);
        }
    }

    fn asked<T>(&self, image: &mut Vhd, mut ask: impl FnMut(&mut Vhd) -> Result<T, Wait>) -> T {
        loop {
            match ask(image) {
                Ok(answer) => return answer,
                Err(Wait::Load(block)) => {
                    let bytes = &self.bytes[index(block.at.0)..][..index(block.len.into())];
                    image.load(block, bytes).unwrap();
                }
                Err(wait) => panic!("{wait:?}"),
            }
        }
    }

    /// The first byte of a sector; `None`: the parent's, or zero.
    fn read(&self, image: &mut Vhd, at: u64) -> Option<u8> {
        match self.asked(image, |image| image.map(Span { at: DiskOffset(at), len: 512 })) {
            disk::Mapping::Data { at, .. } => Some(self.bytes.get(index(at.0)).copied().unwrap_or(0)),
            _ => None,
        }
    }

    fn judged(&self) -> Result<(), judge::Refused> {
        judge::judge(Cursor::new(&self.bytes))
    }

    /// Changes bytes of the header, and the sum that goes with it.
    fn in_header(mut self, at: usize, bytes: &[u8]) -> File {
        let header = 512;
        self.bytes[header + at..][..bytes.len()].copy_from_slice(bytes);
        self.summed(header, 1024, 36)
    }

    /// Changes bytes of both footers.
    fn in_footers(mut self, at: usize, bytes: &[u8]) -> File {
        let end = self.bytes.len() - 512;
        for footer in [0, end] {
            self.bytes[footer + at..][..bytes.len()].copy_from_slice(bytes);
            self = self.summed(footer, 512, 64);
        }
        self
    }

    fn summed(mut self, at: usize, len: usize, place: usize) -> File {
        self.bytes[at + place..][..4].fill(0);
        let sum = self.bytes[at..at + len].iter().fold(0u32, |sum, &byte| sum.wrapping_add(byte.into()));
        self.bytes[at + place..][..4].copy_from_slice(&(!sum).to_be_bytes());
        self
    }
}

fn index(n: u64) -> usize {
    usize::try_from(n).unwrap()
}

fn child() -> Kind {
    let (relative, absolute) = ("base.vhd".into(), String::new());
    Kind::Differencing(Parent { uuid: [9; 16], modified: 1_000_000_000, relative, absolute })
}

fn link(name: &str) -> Link {
    let (relative, absolute) = (name.to_owned(), format!("/srv/{name}"));
    Link { format: None, uuid: [5; 16], relative, absolute, len: None, modified: Some(1_000_000_000) }
}

/// An image with a block.
fn used(kind: Kind) -> File {
    let mut file = File::new(64 * MIB, kind);
    let mut image = file.open();
    file.write(&mut image, 0, 0x11);
    file.round(&mut image);
    file
}

/// Images, each with what libvhd says of it: all of them were shown to `vhd-util check`.
fn samples() -> Vec<(&'static str, bool, File)> {
    let changed = |file: &File, at: usize, bytes: &[u8]| {
        let mut file = file.clone();
        file.bytes[at..][..bytes.len()].copy_from_slice(bytes);
        file
    };
    let (dynamic, differencing) = (used(Kind::Dynamic), used(child()));
    let mut short = dynamic.clone();
    short.bytes.pop();
    let mut unclosed = dynamic.clone();
    unclosed.bytes.truncate(unclosed.bytes.len() - 512);
    let mut grown = dynamic.clone();
    grown.change(|image| image.grow(2040 * GIB).unwrap());
    let mut relinked = differencing.clone();
    relinked.change(|image| image.relink(Some(&Link { absolute: String::new(), ..link("other.vhd") })).unwrap());
    let mut alone = differencing.clone();
    alone.change(|image| image.relink(None).unwrap());
    let mut behind = File::with_blocks(64 * MIB, Kind::Dynamic, 1 << 20);
    let mut image = behind.open();
    behind.write(&mut image, 0, 0x11);
    behind.round(&mut image);
    behind.change(|image| image.grow(GIB).unwrap());
    let batmap = dynamic.bytes.windows(8).position(|bytes| bytes == b"tdbatmap").unwrap();
    vec![
        ("fixed", true, File::new(4 * MIB, Kind::Fixed)),
        ("new", true, File::new(64 * MIB, Kind::Dynamic)),
        ("odd-size", true, File::new(64 * MIB + 512, Kind::Dynamic)),
        ("dynamic", true, dynamic.clone()),
        ("largest", true, File::new(2040 * GIB, Kind::Dynamic)),
        ("grown", true, grown),
        ("child", true, differencing.clone()),
        ("relinked", true, relinked),
        ("without-parent", true, alone),
        ("short-footer", true, short),
        ("hidden", true, dynamic.clone().in_footers(85, &[1])),
        ("other-creator", true, dynamic.clone().in_footers(28, b"vpc ")),
        ("locator-in-sectors", true, differencing.clone().in_header(580, &1u32.to_be_bytes())),
        ("misspelt-locator", false, differencing.clone().in_header(600, b"MACX")),
        ("unknown-locator", false, differencing.clone().in_header(600, b"Linu")),
        ("locator-twice", false, differencing.clone().in_header(600, b"W2ru")),
        ("another-name", false, differencing.clone().in_header(65, b"d")),
        ("parent-of-dynamic", false, dynamic.clone().in_header(40, &[9; 16])),
        ("reserved-of-header", false, dynamic.clone().in_header(800, &[1])),
        ("blocks-of-4m", false, dynamic.clone().in_header(32, &(4u32 << 20).to_be_bytes())),
        ("blocks-of-1m-grown", false, behind),
        ("unclosed", false, unclosed),
        ("stale-copy", false, changed(&dynamic, 90, &[1])),
        ("reserved-of-footer", false, dynamic.clone().in_footers(100, &[1])),
        ("features", false, dynamic.clone().in_footers(11, &[6])),
        ("newer-creator", false, dynamic.clone().in_footers(32, &0x0001_0004u32.to_be_bytes())),
        ("geometry", false, dynamic.clone().in_footers(56, &[0xff; 4])),
        ("no-uuid", false, dynamic.clone().in_footers(68, &[0; 16])),
        ("small-table", false, dynamic.clone().in_header(28, &31u32.to_be_bytes())),
        ("block-in-headers", false, changed(&dynamic, 4096, &8u32.to_be_bytes())),
        ("block-behind-end", false, changed(&dynamic, 4100, &100_000u32.to_be_bytes())),
        ("no-batmap", false, changed(&dynamic, batmap, b"x")),
        ("sum-of-batmap", false, changed(&dynamic, batmap + 512, &[0x80])),
    ]
}

#[test]
fn samples_are_accepted_and_refused_as_by_libvhd() {
    let directory = std::env::var_os("TAPLINE_LIBVHD_SAMPLES").map(std::path::PathBuf::from);
    for (name, accepted, file) in samples() {
        let judged = file.judged();
        assert_eq!(judged.is_ok(), accepted, "{name}: {judged:?}");
        if let Some(directory) = &directory {
            let word = if accepted { "accepted" } else { "refused" };
            std::fs::write(directory.join(format!("{word}-{name}.vhd")), &file.bytes).unwrap();
        }
    }
}

/// Scope: the sizes of disks at which a table or a batmap needs another sector, and every GiB-odd size around them.
#[test]
fn every_size_that_we_make_is_accepted() {
    for blocks in [1, 2, 127, 128, 129, 4095, 4096, 4097, 4104, 500_000, 1_044_479, 1_044_480] {
        for len in [blocks * BLOCK - 512, blocks * BLOCK] {
            for kind in [Kind::Dynamic, child()] {
                File::new(len, kind).judged().unwrap_or_else(|why| panic!("{len} bytes: {why}"));
            }
        }
    }
}

#[test]
fn a_disk_that_grows_to_the_largest_keeps_its_metadata_in_front_of_its_blocks() {
    for kind in [Kind::Dynamic, child()] {
        let mut file = used(kind);
        for len in [65 * MIB, 300 * MIB, 10 * GIB, 2040 * GIB] {
            let mut image = file.open();
            image.grow(len).unwrap();
            file.write(&mut image, len - 512, 0x22);
            file.round(&mut image);
            file.judged().unwrap_or_else(|why| panic!("grown to {len}: {why}"));
        }
        let mut image = file.open();
        assert_eq!((file.read(&mut image, 0), file.read(&mut image, 2040 * GIB - 512)), (Some(0x11), Some(0x22)));
    }
}

/// A child with the code that Tapline wrote once.
fn misspelt() -> File {
    let file = used(child()).in_header(600, b"MACX");
    file.judged().unwrap_err();
    file
}

#[test]
fn opening_for_writing_mends_a_misspelt_locator() {
    let mut file = misspelt();
    file.change(|_| {});
    assert_eq!(file.judged(), Ok(()));
    let mut image = file.open();
    assert_eq!((image.dirty(), file.read(&mut image, 0)), (0, Some(0x11)));
}

#[test]
fn a_check_mends_a_misspelt_locator_and_finds_nothing_then() {
    let mut file = misspelt();
    let report = vhd::check(&mut file.bytes.as_slice(), Tail::Zeroes).unwrap();
    assert_eq!(report.worst(), Some(Severity::Repairable));
    report.repairs.iter().flatten().for_each(|write| file.put(write));
    assert_eq!(file.judged(), Ok(()));
    assert_eq!(vhd::check(&mut file.bytes.as_slice(), Tail::Zeroes).unwrap().problems, []);
    let (mut image, mut before) = (file.open(), misspelt().open());
    assert_eq!((image.link(), file.read(&mut image, 0)), (before.link(), misspelt().read(&mut before, 0)));
}

/// An image as other programs leave it: the first block right behind the metadata.
fn tight() -> File {
    let mut file = File::with_blocks(64 * MIB, Kind::Dynamic, 1 << 20);
    let mut image = file.open();
    file.write(&mut image, 0, 0x11);
    file.round(&mut image);
    // The block is 2 MiB long from here on; its bitmap is as long.
    file.bytes.truncate(file.bytes.len() - 512);
    file.bytes.resize(file.bytes.len() + index(MIB), 0);
    let footer: Vec<u8> = file.bytes[..512].to_vec();
    file.bytes.extend(footer);
    file.in_header(32, &(2u32 << 20).to_be_bytes()).in_header(28, &32u32.to_be_bytes())
}

#[test]
fn a_table_without_room_grows_behind_the_blocks_and_that_is_known() {
    let mut file = tight();
    file.judged().unwrap();
    let mut image = file.open();
    image.grow(65 * MIB).unwrap();
    file.round(&mut image);
    assert_eq!(file.judged(), Ok(()), "the table's last sector has room for that");
    assert!(!image.is_behind_blocks());
    image.grow(10 * GIB).unwrap();
    file.round(&mut image);
    assert_eq!(file.judged(), Err("block clobbers headers".into()));
    assert!(image.is_behind_blocks());
    let mut image = file.open();
    assert!(image.is_behind_blocks());
    assert_eq!((image.geometry().len, file.read(&mut image, 0)), (10 * GIB, Some(0x11)));
}

/// Scope: 40 lives of 60 steps, from seeds 0 to 39: writes, discards, growth, other parents, and opening again.
#[test]
fn whatever_happens_to_an_image_libvhd_accepts_it() {
    for seed in 0..40u64 {
        let mut rng = Rng::with_seed(seed);
        let mut random = |below| rng.u64(..below);
        let differencing = seed % 2 == 0;
        let mut file = File::new(16 * MIB, if differencing { child() } else { Kind::Dynamic });
        let mut image = file.open();
        for step in 0..60 {
            let (len, blocks) = (image.geometry().len, 6);
            match random(8) {
                0..=2 => file.write(&mut image, random(blocks) * BLOCK, 0x33),
                3 => file.discard(&mut image, Span { at: DiskOffset(random(blocks) * BLOCK), len: BLOCK }),
                4 => image.grow((len + random(3) * GIB).min(2040 * GIB)).unwrap(),
                5 if differencing => {
                    let name = "x".repeat(index(random(200)) + 1);
                    image.relink(Some(&link(&format!("{name}.vhd")))).unwrap();
                }
                6 => {
                    image = {
                        file.round(&mut image);
                        file.open()
                    }
                }
                _ => {}
            }
            file.round(&mut image);
            file.judged().unwrap_or_else(|why| panic!("seed {seed}, step {step}: {why}"));
            assert!(!image.is_behind_blocks(), "seed {seed}, step {step}");
        }
    }
}
