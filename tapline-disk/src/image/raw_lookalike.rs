//! Files that are not in the named format: images of another format, mere descriptions of a disk, compressed files.
//!
//! As a raw disk, such a file would show its metadata to a guest, whose first write could destroy it. Files are
//! recognized by their first or last sector; that is never used to choose a format.
//!
//! A process of the daemon does not check raw images: the catalogue knows the format, and a guest may write anything to
//! its disk. Only an image that is new to the catalogue is checked.

use control::{FormatName, ImageName, Kind};
use disk::{FileOffset, ImageError, ImageErrorKind, Source};
use uring::ImageFile;

use crate::files::Files;
use crate::process::failure::{self, Failure};

/// The number of bytes examined at the beginning and at the end.
pub const SECTOR: usize = 512;

/// What a file looks like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Found {
    /// An image of a supported format.
    Image(FormatName),
    /// An image of the named unsupported format.
    Other(&'static str),
    /// A compressed disk or archive: the program, and the command that decompresses it to standard output.
    Packed(&'static str, &'static str),
    /// An archive of files: its kind, and the command that unpacks it.
    Archive(&'static str, &'static str),
    /// The descriptor of a VMDK: the data is in other files.
    Descriptor,
    /// An extent of a VMDK that has a descriptor.
    Extent(&'static str),
    /// An empty file.
    Empty,
}

use Found::{Archive, Descriptor, Empty, Extent, Image, Other, Packed};

/// Magic numbers at the beginning of files, with their offsets.
const BEGINNINGS: [(usize, &[u8], Found); 16] = [
    (0, b"QFI\xfb", Image(FormatName::Qcow2)),
    (0, b"conectix", Image(FormatName::Vhd)),
    (0, b"vhdxfile", Image(FormatName::Vhdx)),
    (0, b"KDMV", Image(FormatName::Vmdk)),
    (0, b"<<< ", Other("VDI of VirtualBox")),
    (0, b"QED\0", Other("QED")),
    (0, b"# Disk DescriptorFile", Descriptor),
    (0, b"# Disk Descriptor File", Descriptor),
    (0, b"COWD", Extent("COWD")),
    (0, b"\xbe\xba\xfe\xca\0\0\0\0", Extent("SESPARSE")),
    (0, b"\x1f\x8b\x08", Packed("gzip", "gzip -dc")),
    (0, b"\xfd7zXZ\0", Packed("xz", "xz -dc")),
    (0, b"\x28\xb5\x2f\xfd", Packed("zstd", "zstd -dc")),
    (4, b"1AY&SY", Packed("bzip2", "bzip2 -dc")),
    (0, b"PK\x03\x04", Archive("zip", "unzip")),
    (257, b"ustar", Archive("tar", "tar -xf")),
];

/// The magic number of the footer of a VHD, in the last sector.
const FOOTER: &[u8] = b"conectix";

/// Refuses a raw image that programs for another format would recognize as theirs.
pub fn refuse(files: &Files, name: &ImageName, file: &mut ImageFile) -> Result<(), Failure> {
    if files.are_trusted() {
        return Ok(());
    }
    let (first, last) = ends(file);
    looks_like(&first, &last).map_or(Ok(()), |found| Err(refusal(name, found)))
}

/// Reads the first and the last sector, or what exists of them. Read errors are reported later, when the data is
/// needed.
fn ends(file: &mut ImageFile) -> (Vec<u8>, Vec<u8>) {
    let len = Source::len(file);
    let mut read = |at: u64| {
        let mut bytes = vec![0; SECTOR.min(usize::try_from(len - at).unwrap_or(SECTOR))];
        file.read_at(FileOffset(at), &mut bytes).map(|()| bytes).unwrap_or_else(|_| vec![0])
    };
    let last = len.checked_sub(SECTOR as u64).map(&mut read).unwrap_or_default();
    (read(0), last)
}

/// Recognizes a file by its first and last sector; also returns by which of them. A file of zero bytes is empty.
pub fn looks_like(first: &[u8], last: &[u8]) -> Option<(Found, &'static str)> {
    if first.is_empty() {
        return Some((Empty, "ends"));
    }
    let is = |&(at, magic, _): &(usize, &[u8], Found)| first.get(at..).is_some_and(|rest| rest.starts_with(magic));
    let by_beginning = BEGINNINGS.iter().find(|known| is(known)).map(|(_, _, found)| (*found, "begins"));
    by_beginning.or_else(|| last.starts_with(FOOTER).then_some((Image(FormatName::Vhd), "ends")))
}

/// Explains why a file is refused as a raw disk.
pub fn refusal(name: &ImageName, (found, place): (Found, &str)) -> Failure {
    let what = match found {
        Empty => format!("cannot open {name}: the file is empty, it has no disk"),
        _ => format!("cannot open {name}: it {place} like {}", found.words()),
    };
    let advice = match name.is_stream() {
        true => "save it in a file, and follow the advice for that",
        false => &found.advice(name),
    };
    let really_raw = if found == Empty { "" } else { "; if its bytes are the disk, add --really-raw" };
    Failure::of(Kind::Invalid, what).advise(format!("{advice}{really_raw}"))
}

/// Opens an image. If the file has another format, the error says which one and what to do about it.
pub fn open<T>(
    name: &ImageName,
    file: &mut ImageFile,
    open: impl FnOnce(&mut ImageFile) -> Result<T, ImageError>,
) -> Result<T, Failure> {
    open(file).map_err(|error| explain(name, file, error))
}

/// Explains an error of opening an image; if the file has another format, with that and what to do about it.
fn explain(name: &ImageName, file: &mut ImageFile, error: ImageError) -> Failure {
    if error.kind != ImageErrorKind::WrongFormat {
        return failure::explain(name, error);
    }
    let (first, last) = ends(file);
    let found = looks_like(&first, &last).filter(|(found, _)| *found != Image(name.format));
    let path = name.path().display();
    let advice = match found {
        Some((Empty, _)) => format!("the file is empty: {}", Empty.advice(name)),
        Some((found, place)) => format!("it {place} like {}: {}", found.words(), found.advice(name)),
        None if path.to_string().ends_with("-flat.vmdk") => {
            format!("the data of a flat VMDK is a raw disk: give it as raw:{path}")
        }
        None => return failure::explain(name, error),
    };
    Failure::new(format!("open {name}"), error).advise(advice)
}

impl Found {
    /// Describes the file.
    fn words(self) -> String {
        match self {
            Image(format) => format!("an image of the format {format}"),
            Other(format) => format!("an image of the format {format}"),
            Packed(program, _) => format!("a file that was compressed with {program}"),
            Archive(kind, _) => format!("a {kind} archive"),
            Descriptor => "the descriptor of a VMDK, whose data is in other files".into(),
            Extent(kind) => format!("a part of a VMDK, of the kind {kind}, that has a descriptor in another file"),
            Empty => "nothing".into(),
        }
    }

    /// Returns what to do, as a command.
    fn advice(self, name: &ImageName) -> String {
        let path = name.path().display();
        match self {
            Image(format) => format!("give it as {format}:{path}"),
            Other(format) => format!("convert it with the tools of {format}: `qemu-img convert -O qcow2 {path} NEW`"),
            Packed(_, command) => {
                format!("unpack it with `{command} {path} > NEW`, and give NEW with the format that it has then")
            }
            Archive(_, command) => {
                format!("unpack it with `{command} {path}`, and give the disk in it (of an OVA, vmdk:FILE)")
            }
            Descriptor => format!(
                "copy the disk into one file with `qemu-img convert -f vmdk -O qcow2 {path} NEW`; if its only extent is \
                 FLAT at offset 0, that file is the disk: raw:EXTENT"
            ),
            Extent(_) => {
                "give the descriptor, a text file, to `qemu-img convert -f vmdk -O qcow2 DESCRIPTOR NEW`".into()
            }
            Empty => "was it copied? If an empty disk is wanted: tapline image create".into(),
        }
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn an_empty_file_and_an_archive_are_recognized() {
        let mut tar = vec![0; SECTOR];
        tar[257..262].copy_from_slice(b"ustar");
        assert_eq!(looks_like(&tar, &[]), Some((Archive("tar", "tar -xf"), "begins")));
        assert_eq!(looks_like(&[], &[]), Some((Empty, "ends")));
        assert_eq!(looks_like(&[0; SECTOR], &[0; SECTOR]), None);
        assert_eq!(looks_like(&[0], b"conectix"), Some((Image(FormatName::Vhd), "ends")));
    }
}
