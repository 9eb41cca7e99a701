//! A cpio archive in the "newc" form, which the Linux kernel unpacks as its first root filesystem.
//!
//! Written here instead of by cpio(1), so that device nodes need no root. Every name is stored once and after its
//! directories, because the kernel creates them in order. Format: Linux
//! Documentation/driver-api/early-userspace/buffer-format.rst.

use std::collections::BTreeSet;

const DIRECTORY: u32 = 0o040_755;
const FILE: u32 = 0o100_644;
const PROGRAM: u32 = 0o100_755;
const CHARACTER_DEVICE: u32 = 0o020_600;

/// The name that ends an archive.
const TRAILER: &str = "TRAILER!!!";

/// Archives are padded to this size, so that another one may follow in the same file.
const ARCHIVE_ALIGNMENT: usize = 512;

#[derive(Default)]
pub struct Archive {
    bytes: Vec<u8>,
    names: BTreeSet<String>,
}

/// An error: a file is too large for the archive's 32-bit fields.
#[derive(Debug, thiserror::Error)]
#[error("{name} does not fit into an initramfs: {len} bytes")]
pub struct TooLarge {
    name: String,
    len: usize,
}

impl Archive {
    pub fn directory(&mut self, path: &str) -> Result<(), TooLarge> {
        self.entry(path, DIRECTORY, (0, 0), &[])
    }

    pub fn file(&mut self, path: &str, content: &[u8]) -> Result<(), TooLarge> {
        self.entry(path, FILE, (0, 0), content)
    }

    pub fn program(&mut self, path: &str, content: &[u8]) -> Result<(), TooLarge> {
        self.entry(path, PROGRAM, (0, 0), content)
    }

    pub fn character_device(&mut self, path: &str, major: u32, minor: u32) -> Result<(), TooLarge> {
        self.entry(path, CHARACTER_DEVICE, (major, minor), &[])
    }

    /// Returns the finished archive.
    pub fn finish(mut self) -> Result<Vec<u8>, TooLarge> {
        self.record(TRAILER, 0, (0, 0), &[])?;
        pad(&mut self.bytes, ARCHIVE_ALIGNMENT);
        Ok(self.bytes)
    }

    fn entry(&mut self, path: &str, mode: u32, device: (u32, u32), content: &[u8]) -> Result<(), TooLarge> {
        let name = relative(path);
        if let Some((parent, _)) = name.rsplit_once('/') {
            self.directory(parent)?;
        }
        if self.names.insert(name.to_owned()) { self.record(name, mode, device, content) } else { Ok(()) }
    }

    fn record(&mut self, name: &str, mode: u32, device: (u32, u32), content: &[u8]) -> Result<(), TooLarge> {
        let too_large = || TooLarge { name: name.to_owned(), len: content.len() };
        let len = u32::try_from(content.len()).map_err(|_| too_large())?;
        let name_len = u32::try_from(name.len() + 1).map_err(|_| too_large())?;
        let number = u32::try_from(self.names.len()).map_err(|_| too_large())?;
        let links = if mode == DIRECTORY { 2 } else { 1 };
        // inode, mode, uid, gid, links, mtime, size, device of the file (2), device number (2), name length, checksum
        let fields = [number, mode, 0, 0, links, 0, len, 0, 0, device.0, device.1, name_len, 0];
        self.bytes.extend_from_slice(b"070701");
        for field in fields {
            self.bytes.extend_from_slice(format!("{field:08X}").as_bytes());
        }
        self.bytes.extend_from_slice(name.as_bytes());
        self.bytes.push(0);
        pad(&mut self.bytes, 4);
        self.bytes.extend_from_slice(content);
        pad(&mut self.bytes, 4);
        Ok(())
    }
}

fn relative(path: &str) -> &str {
    path.trim_matches('/')
}

fn pad(bytes: &mut Vec<u8>, alignment: usize) {
    bytes.resize(bytes.len().next_multiple_of(alignment), 0);
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn directories_precede_their_contents_once() {
        let mut archive = Archive::default();
        archive.file("/a/b/one", b"1").unwrap();
        archive.file("a/b/two", b"22").unwrap();

        let text = String::from_utf8(archive.finish().unwrap()).unwrap();

        let names: Vec<&str> = text.split("070701").skip(1).map(name_in).collect();
        assert_eq!(names, ["a", "a/b", "a/b/one", "a/b/two", TRAILER]);
    }

    #[test]
    fn an_archive_ends_where_another_may_begin() {
        let mut archive = Archive::default();
        archive.program("init", b"#!/bin/sh\n").unwrap();

        let bytes = archive.finish().unwrap();

        assert_eq!(bytes.len() % ARCHIVE_ALIGNMENT, 0);
        assert!(bytes.starts_with(b"070701"));
    }

    #[test]
    fn contents_begin_at_multiples_of_four() {
        let mut archive = Archive::default();
        archive.file("odd", b"odd content").unwrap();

        let bytes = archive.finish().unwrap();

        let at = bytes.windows(11).position(|window| window == b"odd content").unwrap();
        assert_eq!(at % 4, 0);
    }

    /// The name follows the 104 digits of the 13 fields.
    fn name_in(record: &str) -> &str {
        record[104..].split('\0').next().unwrap()
    }
}
