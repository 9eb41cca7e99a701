//! How a differencing image records its parent: identity, time and name in its header, and paths in locators.
//!
//! Knows nothing about where locators are put. The paths are for people and for other programs; none is followed here.

use zerocopy::FromZeros;
use zerocopy::byteorder::big_endian::U16;

use super::layout::{EPOCH, FILE_URL, MISSPELT_FILE_URL, RawHeader, RawLocator};
use super::survey::{Locator, decode_locator, index};
use crate::size::{in_32_bits, on_disk};
use crate::{FileOffset, ImageError, ImageErrorKind, Link, MetaWrite};

/// Longest path in a locator: twice what Linux allows, in UTF-16.
const PATH_MAX: usize = 8192;

/// The record that a differencing image has of its parent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Parent {
    /// The parent's identity; all zero if the parent is raw.
    pub uuid: [u8; 16],
    /// When the parent was last changed, in seconds since 1970; zero while that is not fixed.
    pub modified: u64,
    /// Its path as seen from the image's directory.
    pub relative: String,
    /// Its absolute path.
    pub absolute: String,
}

/// The same, as it is found in an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParentInfo {
    /// The parent's identity; all zero for a raw parent.
    pub uuid: [u8; 16],
    /// When the parent was last changed, in seconds since 1970.
    pub modified: u64,
    /// Its name.
    pub name: String,
    /// Its paths. Shown, never followed.
    pub locators: Vec<Locator>,
}

impl From<&Link> for Parent {
    fn from(link: &Link) -> Parent {
        Parent {
            uuid: link.uuid,
            modified: link.modified.unwrap_or(0),
            relative: link.relative.clone(),
            absolute: link.absolute.clone(),
        }
    }
}

impl Parent {
    /// The description of this parent that an image with this record has.
    pub(super) fn info(&self) -> Result<ParentInfo, ImageError> {
        let mut header = RawHeader::new_zeroed();
        self.name_in(&mut header);
        Ok(ParentInfo::of(&header, self.locators()?.decoded()))
    }

    /// Puts identity, time and name into the header.
    pub(super) fn name_in(&self, header: &mut RawHeader) {
        header.parent_uuid = self.uuid;
        header.parent_timestamp = vhd_time(self.modified).into();
        header.parent_name = [U16::ZERO; 256];
        let path = if self.relative.is_empty() { &self.absolute } else { &self.relative };
        let name = path.rsplit('/').next().unwrap_or_default();
        // The last unit stays zero: some readers look for the end.
        for (unit, place) in name.encode_utf16().take(255).zip(&mut header.parent_name) {
            *place = U16::new(unit);
        }
    }

    /// The paths, as the locators of the Xen tools have them. Paths that are not known have none.
    ///
    /// libvhd takes the first that leads to a file. So the path as seen from the child comes first, as a Windows path
    /// and as a URL: a chain that was copied elsewhere is read, and coalesced, over there.
    pub(super) fn locators(&self) -> Result<Locators, ImageError> {
        let windows = |path: &str| path.replace('/', "\\").encode_utf16().flat_map(u16::to_le_bytes).collect();
        let rooted = ["./", "../", "/"].iter().any(|start| self.relative.starts_with(start));
        let relative = match rooted {
            true => self.relative.clone(),
            false => format!("./{}", self.relative),
        };
        let mut paths: Vec<([u8; 4], Vec<u8>)> = Vec::new();
        if !self.relative.is_empty() {
            paths.push((*b"W2ru", windows(&relative)));
        }
        if !self.relative.is_empty() || !self.absolute.is_empty() {
            let path = if self.relative.is_empty() { &self.absolute } else { &relative };
            paths.push((FILE_URL, format!("file://{path}").into_bytes()));
        }
        if !self.absolute.is_empty() {
            paths.push((*b"W2ku", windows(&self.absolute)));
        }
        match paths.iter().map(|(_, bytes)| bytes.len()).find(|&len| len > PATH_MAX) {
            Some(len) => {
                let what = format!("the parent's path of {len} bytes is too long for a parent locator");
                Err(ImageError::new(ImageErrorKind::OutOfLimits, what))
            }
            None => Ok(Locators { paths }),
        }
    }
}

/// Paths of a parent, each with the platform whose idea of a path it is.
#[derive(Clone, Debug, Default)]
pub struct Locators {
    paths: Vec<([u8; 4], Vec<u8>)>,
}

impl Locators {
    /// Bytes that they take.
    pub fn len(&self) -> u64 {
        self.paths.iter().map(|(_, bytes)| space(bytes)).sum()
    }

    /// As they are shown.
    fn decoded(&self) -> Vec<Locator> {
        self.paths.iter().map(|(code, bytes)| decode_locator(code, bytes)).collect()
    }

    /// Puts the entries into the header, for paths that stand at `at` one behind another; and the paths' writes.
    pub fn place(&self, header: &mut RawHeader, at: FileOffset) -> Vec<MetaWrite> {
        let mut writes = Vec::new();
        let mut end = at;
        header.locators = [RawLocator::new_zeroed(); 8];
        for ((code, bytes), locator) in self.paths.iter().zip(&mut header.locators) {
            let space = space(bytes);
            *locator = RawLocator {
                code: *code,
                data_space: in_32_bits(space, "PATH_MAX").into(),
                data_len: in_32_bits(on_disk(bytes.len()), "PATH_MAX").into(),
                reserved: 0.into(),
                data_offset: end.0.into(),
            };
            let mut bytes = bytes.clone();
            bytes.resize(index(space), 0);
            writes.push(MetaWrite { at: end, bytes });
            end += space;
        }
        writes
    }
}

/// Bytes that a path takes in the file.
fn space(path: &[u8]) -> u64 {
    on_disk(path.len()).next_multiple_of(512)
}

/// Seconds since 1970 as seconds since 2000, which is what VHD counts; what is out of its reach is its first or last.
pub fn vhd_time(unix: u64) -> u32 {
    u32::try_from(unix.saturating_sub(EPOCH)).unwrap_or(u32::MAX)
}

impl ParentInfo {
    /// Decodes the record of the parent in a header.
    pub(super) fn of(header: &RawHeader, locators: Vec<Locator>) -> ParentInfo {
        let name: Vec<u16> = header.parent_name.iter().map(|unit| unit.get()).take_while(|&unit| unit != 0).collect();
        ParentInfo {
            uuid: header.parent_uuid,
            modified: EPOCH + u64::from(header.parent_timestamp.get()),
            name: String::from_utf16_lossy(&name),
            locators,
        }
    }

    /// The same, as every format has it. Programs put relative paths where absolute ones belong, libvhd in all three.
    pub fn link(&self) -> Link {
        let path = |code: &[u8; 4]| {
            let found = self.locators.iter().find(|locator| locator.code.as_bytes() == code)?;
            Some(found.path.strip_prefix("file://").map_or_else(|| found.path.replace('\\', "/"), str::to_owned))
        };
        let paths: Vec<String> =
            [b"W2ru", b"W2ku", &FILE_URL, &MISSPELT_FILE_URL].into_iter().filter_map(path).collect();
        // Windows begins absolute ones with the letter of a drive.
        let is_absolute = |path: &String| path.starts_with('/') || path.as_bytes().get(1) == Some(&b':');
        let first = |absolute: bool| paths.iter().find(|path| is_absolute(path) == absolute).cloned();
        let relative = first(false).unwrap_or_default();
        Link {
            format: None,
            uuid: self.uuid,
            relative: relative.strip_prefix("./").unwrap_or(&relative).into(),
            absolute: first(true).unwrap_or_default(),
            len: None,
            modified: Some(self.modified).filter(|&time| time > EPOCH),
        }
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn a_name_that_is_too_long_is_cut_with_room_for_its_end() {
        let mut header = RawHeader::new_zeroed();
        let parent = Parent { uuid: [1; 16], modified: 0, relative: "x".repeat(300), absolute: String::new() };
        parent.name_in(&mut header);
        assert_eq!((header.parent_name[254].get(), header.parent_name[255].get()), (u16::from(b'x'), 0));
        assert_eq!(header.parent_timestamp.get(), 0, "a time that is not fixed is zero");
    }

    #[test]
    fn a_path_that_no_locator_holds_is_refused() {
        let parent = Parent { uuid: [1; 16], modified: 0, relative: "x".repeat(5000), absolute: String::new() };
        assert_eq!(parent.locators().unwrap_err().kind, ImageErrorKind::OutOfLimits);
    }
}
