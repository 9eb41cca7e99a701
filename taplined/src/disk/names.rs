//! Images and their chains in the notation of a disk process: on its command line, and in its reports.

use std::ffi::OsString;
use std::path::PathBuf;

use api::SourceFormat;
use control::{FormatName, ImageName, answer};
use repo::driver::FileNumbers;

/// The name of an image on a command line: `FORMAT:PATH`.
pub fn image_name(format: impl Into<SourceFormat>, path: PathBuf) -> ImageName {
    let format = match format.into() {
        SourceFormat::Raw => FormatName::Raw,
        SourceFormat::Vhd => FormatName::Vhd,
        SourceFormat::Qcow2 => FormatName::Qcow2,
        SourceFormat::Vmdk => FormatName::Vmdk,
        SourceFormat::Vhdx => FormatName::Vhdx,
    };
    ImageName { format, path, data_file: None }
}

/// A chain as command-line arguments of a disk process, from the top down. A merge records a new parent in an image,
/// which changes its modification time from the one recorded in children that are not part of the merge; and the
/// process cannot restore the time of another user's file. Leases and locks ensure that no other process changes a
/// parent, so the process only prints a note.
pub fn words_of(names: impl IntoIterator<Item = ImageName>) -> Vec<OsString> {
    let mut words = Vec::new();
    for (depth, name) in names.into_iter().enumerate() {
        match depth {
            0 => {}
            1 => words.extend(["--accept-changed-parent".into(), "--parent".into()]),
            _ => words.push("--parent".into()),
        }
        words.push(name.word());
    }
    words
}

/// A layer of a disk, as reported by its process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServedLayer {
    /// The path of its file.
    pub path: PathBuf,
    /// Virtual size in bytes.
    pub size: u64,
    /// Device and inode number of its file.
    pub device: Option<u64>,
    pub inode: Option<u64>,
}

impl ServedLayer {
    /// The layer in a response; `None` if it has no file.
    pub fn of(layer: answer::Layer) -> Option<ServedLayer> {
        let answer::Layer { path, size, device, inode, .. } = layer;
        Some(ServedLayer { path: path?.into(), size, device, inode })
    }

    /// The name of the layer's file.
    pub fn file(&self) -> &str {
        self.path.file_name().and_then(|name| name.to_str()).unwrap_or_default()
    }

    /// The identity of the file, independent of its name.
    pub fn numbers(&self) -> Option<FileNumbers> {
        Some(FileNumbers { device: self.device?, inode: self.inode? })
    }

    /// Whether the layer's file has this name.
    pub fn names(&self, file: &str) -> bool {
        self.file() == file
    }
}
