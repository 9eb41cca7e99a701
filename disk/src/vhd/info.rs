//! A description of a VHD, and whether it is sound.

use super::layout::{CREATOR_OS, EPOCH, UNUSED};
use super::parent::ParentInfo;
use super::sparse::Sparse;
use super::survey::{DiskType, Survey};
use crate::format::Tail;
use crate::size::on_disk;
use crate::{ImageError, MetaWrite, Problem, Severity, Source};

/// The fields of a VHD's metadata that people ask for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Info {
    /// Virtual size in bytes.
    pub len: u64,
    /// Virtual size when the image was made.
    pub original_len: u64,
    /// Fixed, dynamic or differencing.
    pub disk_type: DiskType,
    /// The image's identity.
    pub uuid: [u8; 16],
    /// Cylinders, heads, sectors.
    pub chs: (u16, u8, u8),
    /// When it was made, in seconds since 1970.
    pub created: u64,
    /// Four letters for the program that made it.
    pub creator: String,
    /// That program's version, major and minor.
    pub creator_version: (u16, u16),
    /// Whether that program was Tapline.
    pub by_tapline: bool,
    /// The Xen tools' mark of an image that no VDI refers to.
    pub hidden: bool,
    /// In a saved state, with a memory image that belongs to it.
    pub saved: bool,
    /// Bytes in a block. Not for fixed images.
    pub block_size: Option<u32>,
    /// Blocks of the disk.
    pub blocks: u64,
    /// Blocks that have a place in the file.
    pub blocks_allocated: u64,
    /// Whether there is a batmap.
    pub batmap: bool,
    /// Length of the file in bytes.
    pub file_len: u64,
    /// The record of the parent. Only for differencing images.
    pub parent: Option<ParentInfo>,
}

impl Info {
    pub(super) fn of(survey: &Survey) -> Info {
        let footer = &survey.footer;
        let tables = survey.tables.as_ref();
        let [major_high, major, minor_high, minor] = footer.creator_version.get().to_be_bytes();
        let parent = tables
            .filter(|_| survey.disk_type == DiskType::Differencing)
            .map(|tables| ParentInfo::of(&tables.header, tables.locators.clone()));
        Info {
            len: footer.current_size.get(),
            original_len: footer.original_size.get(),
            disk_type: survey.disk_type,
            uuid: footer.uuid,
            chs: (footer.cylinders.get(), footer.heads, footer.sectors),
            created: EPOCH + u64::from(footer.timestamp.get()),
            creator: String::from_utf8_lossy(&footer.creator_app).trim_end_matches(['\0', ' ']).into(),
            creator_version: (u16::from_be_bytes([major_high, major]), u16::from_be_bytes([minor_high, minor])),
            by_tapline: footer.creator_app == *b"tap\0" && footer.creator_os.get() == CREATOR_OS,
            hidden: footer.hidden != 0,
            saved: footer.saved != 0,
            block_size: tables.map(|tables| tables.header.block_size.get()),
            blocks: tables.map_or(0, |tables| on_disk(tables.bat.len())),
            blocks_allocated: tables
                .map_or(0, |tables| on_disk(tables.bat.iter().filter(|&&sector| sector != UNUSED).count())),
            batmap: tables.is_some_and(|tables| tables.batmap.is_some()),
            file_len: survey.file_len,
            parent,
        }
    }
}

/// A uuid as people write it: `01234567-89ab-cdef-0123-456789abcdef`.
pub fn uuid_text(uuid: &[u8; 16]) -> String {
    let mut text = String::with_capacity(36);
    for (at, byte) in uuid.iter().enumerate() {
        if matches!(at, 4 | 6 | 8 | 10) {
            text.push('-');
        }
        text.push_str(&format!("{byte:02x}"));
    }
    text
}

/// The outcome of a check.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// The problems found. Empty if there are none.
    pub problems: Vec<Problem>,
    /// Batches of writes that repair every [`Severity::Repairable`] problem, a sync behind each.
    pub repairs: Vec<Vec<MetaWrite>>,
}

impl Report {
    /// The severity of the worst problem.
    pub fn worst(&self) -> Option<Severity> {
        self.problems.iter().map(|problem| problem.severity).max()
    }
}

/// Checks all metadata of a file on storage whose end is like this. An error means that it cannot be read as a VHD at
/// all.
pub fn check(source: &mut dyn Source, tail: Tail) -> Result<Report, ImageError> {
    let survey = Survey::on(source, tail)?;
    let (problems, single) = (survey.problems.clone(), survey.repairs.clone());
    let misspelt = survey.tables.as_ref().is_some_and(|tables| tables.header.is_misspelt());
    let repairs = match misspelt && survey.damage().is_none() {
        true => Sparse::mending(survey, tail),
        false => vec![single],
    };
    Ok(Report { problems, repairs: repairs.into_iter().filter(|batch| !batch.is_empty()).collect() })
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn a_uuid_is_written_in_five_groups() {
        let uuid = [0x01, 0x23, 0x45, 0x67, 0x89, 0xab, 0xcd, 0xef, 1, 2, 3, 4, 5, 6, 7, 8];
        assert_eq!(uuid_text(&uuid), "01234567-89ab-cdef-0102-030405060708");
    }
}
