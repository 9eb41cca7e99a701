//! VHDs that have grown or lost their parent, as QEMU reads them; and one that QEMU has made, grown by us.

use std::path::Path;
use std::process::Command;

use disk::vhd::{self, Kind, Parent, Severity, Spec, Vhd};
use disk::{Access, DiskOffset, Format, MetaWrite, Span, Tail, Wait};

const MIB: u64 = 1 << 20;

/// An image and what it should read as.
struct Subject {
    bytes: Vec<u8>,
    model: Vec<u8>,
}

impl Subject {
    fn new(len: u64, kind: Kind) -> Subject {
        let spec = Spec { len, kind, block_size: 2 << 20, uuid: [7; 16], created: 1_700_000_000 };
        let creation = vhd::create(&spec).unwrap();
        let mut subject = Subject { bytes: vec![0; index(creation.len)], model: vec![0; index(len)] };
        creation.writes.iter().for_each(|write| subject.put(write));
        subject
    }

    fn put(&mut self, write: &MetaWrite) {
        let (at, end) = (index(write.at.0), index(write.at.0) + write.bytes.len());
        self.bytes.resize(self.bytes.len().max(end), 0);
        self.bytes[at..end].copy_from_slice(&write.bytes);
    }

    /// Opens it, makes changes, and makes them durable.
    fn change(&mut self, change: impl FnOnce(&mut Vhd)) {
        let mut image = Vhd::open(&mut self.bytes.as_slice(), Access::ReadWrite, Tail::Zeroes).unwrap();
        change(&mut image);
        image.seal().iter().flatten().for_each(|write| self.put(write));
        image.settled(true);
        self.model.resize(index(image.geometry().len), 0);
    }

    fn write(&mut self, at: u64, fill: u8) {
        let bytes = vec![fill; 4096];
        let span = Span { at: DiskOffset(at), len: 4096 };
        let mut image = Vhd::open(&mut self.bytes.as_slice(), Access::ReadWrite, Tail::Zeroes).unwrap();
        let reserved = loop {
            match image.reserve(span) {
                Ok(reserved) => break reserved,
                Err(Wait::Load(block)) => {
                    let range = index(block.at.0)..index(block.at.0) + index(block.len.into());
                    image.load(block, &self.bytes[range]).unwrap();
                }
                Err(wait) => panic!("{wait:?}"),
            }
        };
        self.put(&MetaWrite { at: reserved.at, bytes: bytes.clone() });
        if let Some(ticket) = reserved.ticket {
            image.commit(ticket).unwrap();
        }
        image.seal().iter().flatten().for_each(|write| self.put(write));
        self.model[index(at)..index(at) + 4096].copy_from_slice(&bytes);
    }

    /// QEMU finds the size and every byte.
    fn agrees_with_qemu(&self) {
        let report = vhd::check(&mut self.bytes.as_slice(), Tail::Zeroes).unwrap();
        assert_eq!(report.worst().filter(|&worst| worst > Severity::Leak), None, "{:?}", report.problems);
        let room = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        std::fs::write(room.path().join("a.vhd"), &self.bytes).unwrap();
        let info = qemu_img(room.path(), "info -f vpc a.vhd");
        assert!(info.contains(&format!("({} bytes)", self.model.len())), "{info}");
        qemu_img(room.path(), "convert -f vpc -O raw a.vhd a.raw");
        assert!(std::fs::read(room.path().join("a.raw")).unwrap() == self.model, "QEMU reads something else");
    }
}

fn index(n: u64) -> usize {
    usize::try_from(n).unwrap()
}

fn qemu_img(directory: &Path, words: &str) -> String {
    let output = Command::new("qemu-img").args(words.split_whitespace()).current_dir(directory).output();
    let output = output.unwrap_or_else(|error| panic!("qemu-img cannot be run (make prepare?): {error}"));
    assert!(output.status.success(), "qemu-img {words}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn parent() -> Parent {
    Parent { uuid: [9; 16], modified: 0, relative: "base.vhd".into(), absolute: "/srv/base.vhd".into() }
}

#[test]
fn a_grown_dynamic_disk_is_what_qemu_reads() {
    let mut subject = Subject::new(10 * MIB, Kind::Dynamic);
    subject.write(2 * MIB, 0x11);
    for (len, fill) in [(11 * MIB, 0x22), (12 * MIB, 0x33), (600 * MIB, 0x44), (601 * MIB, 0x55)] {
        subject.change(|image| image.grow(len).unwrap());
        subject.write(len - 4096, fill);
        subject.agrees_with_qemu();
    }
}

#[test]
fn a_grown_fixed_disk_is_what_qemu_reads() {
    let mut subject = Subject::new(10 * MIB, Kind::Fixed);
    subject.write(2 * MIB, 0x11);
    subject.change(|image| {
        image.grow(33 * MIB).unwrap();
    });
    subject.model.resize(index(33 * MIB), 0);
    subject.write(33 * MIB - 4096, 0x22);
    subject.agrees_with_qemu();
}

#[test]
fn a_disk_without_its_parent_is_what_qemu_reads() {
    let mut subject = Subject::new(10 * MIB, Kind::Differencing(parent()));
    subject.write(2 * MIB, 0x11);
    subject.change(|image| image.relink(None).unwrap());
    subject.write(6 * MIB, 0x22);
    subject.agrees_with_qemu();
    subject.change(|image| image.grow(300 * MIB).unwrap());
    subject.write(299 * MIB, 0x33);
    subject.agrees_with_qemu();
}

#[test]
#[ignore = "slow: run by `make test-all`"]
fn a_disk_that_qemu_has_made_grows() {
    let room = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    qemu_img(room.path(), "create -f vpc -o force_size=on q.vhd 64M");
    let bytes = std::fs::read(room.path().join("q.vhd")).unwrap();
    let mut subject = Subject { bytes, model: vec![0; index(64 * MIB)] };
    subject.write(2 * MIB, 0x11);
    subject.change(|image| image.grow(900 * MIB).unwrap());
    subject.write(899 * MIB, 0x22);
    subject.agrees_with_qemu();
}
