//! Images of other formats that are called raw: a guest would be shown their metadata, and its first write could
//! destroy them. They are refused by what they begin or end with, which is never used to choose a format.
//!
//! A daemon's process does not ask: the catalogue knows the format, and a guest may write to its disk what it likes.
//! Only an image that is new to the catalogue is looked at.

use control::{ImageName, Kind};
use disk::{FileOffset, Source};
use uring::ImageFile;

use crate::failure::Failure;
use crate::files::Files;

/// What images of other formats begin with.
const BEGINNINGS: [(&[u8], &str); 6] = [
    (b"QFI\xfb", "qcow2"),
    (b"conectix", "vhd"),
    (b"vhdxfile", "vhdx"),
    (b"KDMV", "vmdk"),
    (b"<<< ", "VDI of VirtualBox"),
    (b"QED\0", "QED"),
];

/// What a VHD of fixed size ends with, in a sector of its own.
const FOOTER: &[u8] = b"conectix";
const SECTOR: u64 = 512;

/// Refuses a raw image that another format's programs would take for one of theirs.
pub fn refuse(files: &Files, name: &ImageName, file: &mut ImageFile) -> Result<(), Failure> {
    if files.are_trusted() {
        return Ok(());
    }
    let read = |file: &mut ImageFile, at: u64| -> Option<Vec<u8>> {
        let mut bytes = vec![0; 8];
        // What cannot be read is found out when it is served.
        file.read_at(FileOffset(at), &mut bytes).ok()?;
        Some(bytes)
    };
    let len = Source::len(file);
    let first = read(file, 0).unwrap_or_default();
    let last = len.checked_sub(SECTOR).and_then(|at| read(file, at)).unwrap_or_default();
    looks_like(&first, &last).map_or(Ok(()), |found| Err(refusal(name, found)))
}

/// The format that a disk looks like which begins, or whose last sector begins, with these bytes; and by which of them.
pub fn looks_like(first: &[u8], last: &[u8]) -> Option<(&'static str, &'static str)> {
    let by_beginning = BEGINNINGS.iter().find(|(magic, _)| first.starts_with(magic));
    let by_end = last.starts_with(FOOTER).then_some(("vhd", "ends"));
    by_beginning.map(|(_, format)| (*format, "begins")).or(by_end)
}

/// Why it is refused.
pub fn refusal(name: &ImageName, (found, place): (&str, &str)) -> Failure {
    let advice = match found {
        _ if name.is_stream() => "save it in a file, and give that with its format".into(),
        "qcow2" | "vhd" | "vmdk" | "vhdx" => format!("give it as {found}:{}", name.path().display()),
        other => format!("convert it with the tools of {other}"),
    };
    Failure::of(Kind::Invalid, format!("cannot open {name}: it {place} like an image of the format {found}"))
        .advise(format!("{advice}; if its bytes are the disk, add --really-raw"))
}
