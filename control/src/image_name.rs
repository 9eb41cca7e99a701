//! The name of an image on the command line: `FORMAT:PATH`, and with an external data file `qcow2:PATH,data-file=PATH`.
//!
//! The format is always given and never guessed: a guest that writes the first bytes of a raw disk must not control how
//! the file is read next time. Nor is a data file ever opened because an image refers to it.
//!
//! `nbd://HOST[:PORT]/EXPORT` and `nbd+unix:///EXPORT?socket=PATH` are raw images at an NBD server; their path is the
//! URI. A file of such a name is `raw:./nbd:...`. `FORMAT:https://HOST/PATH` is an image at an HTTP server, whose
//! format may also be the ending of the URL: the user writes both, no guest can change either.
//!
//! `null:SIZE` and `model:KIND,size=SIZE` are disks that have no file and store nothing, for measurements
//! ([`ImageName::to_measure`]). They are only understood where they are of use; everywhere else they are refused.

use std::ffi::OsString;
use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de, ser};

use crate::size::Size;

/// A format this program reads, and but for those of other hypervisors writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum FormatName {
    /// The bytes of the disk, as they are.
    Raw,
    /// Virtual Hard Disk: fixed, dynamic or differencing.
    Vhd,
    /// QEMU's copy-on-write format, version 3.
    Qcow2,
    /// VMware's format: images in one file, which are only read.
    Vmdk,
    /// Microsoft's later format: images without a parent, which are only read.
    Vhdx,
    /// No image at all: a disk that answers at once and stores nothing.
    Null,
    /// The same, but it takes as long as storage of some kind.
    Model,
}

impl FormatName {
    /// The word before the colon.
    pub fn word(self) -> &'static str {
        match self {
            FormatName::Raw => "raw",
            FormatName::Vhd => "vhd",
            FormatName::Qcow2 => "qcow2",
            FormatName::Vmdk => "vmdk",
            FormatName::Vhdx => "vhdx",
            FormatName::Null => "null",
            FormatName::Model => "model",
        }
    }

    /// Whether images of the format are only read: to be converted.
    pub fn is_read_only(self) -> bool {
        matches!(self, FormatName::Vmdk | FormatName::Vhdx)
    }

    /// Whether there is no file behind such a disk: what is written to it is gone.
    pub fn stores_nothing(self) -> bool {
        matches!(self, FormatName::Null | FormatName::Model)
    }

    /// The format of disks without a file for a word.
    fn without_file(word: &str) -> Option<FormatName> {
        [FormatName::Null, FormatName::Model].into_iter().find(|format| format.word() == word)
    }

    /// The format of image files for a word.
    pub fn of(word: &str) -> Option<FormatName> {
        use FormatName::{Qcow2, Raw, Vhd, Vhdx, Vmdk};
        [Raw, Vhd, Qcow2, Vmdk, Vhdx].into_iter().find(|format| format.word() == word)
    }
}

/// A format and a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImageName {
    /// The format of the file.
    pub format: FormatName,
    /// The file.
    pub path: PathBuf,
    /// Where its data is, if that is in a file of its own.
    pub data_file: Option<PathBuf>,
}

/// The separator between an image's path and that of its data file.
const DATA_FILE: &str = ",data-file=";

/// The largest disk without a file: its size is that of a file in memory, which none larger than 8 EiB can have.
const LEN_MAX: u64 = 1 << 60;

/// In front of the size of a disk that is a model, and what that is if it is not given.
const SIZE: &str = ",size=";
const MODEL_LEN: Size = Size(64 << 30);

/// The path that stands for standard input or output.
const STREAM: &str = "-";

/// The beginnings of URIs of NBD servers.
const REMOTE: [&str; 4] = ["nbd://", "nbd+unix://", "nbds://", "nbds+unix://"];

/// The beginnings of URLs of HTTP servers.
const WEB: [&str; 2] = ["https://", "http://"];

/// Why a word is not an image name.
#[derive(Debug, PartialEq, Eq)]
pub enum NotAnImage {
    /// There is no format in front.
    NoFormat(String),
    /// The format is not one of ours.
    UnknownFormat(String),
    /// Nothing follows the format.
    NoPath(String),
    /// The data file's path is missing.
    NoDataFile(String),
    /// A data file for a format that does not have any.
    HasNone(FormatName),
    /// The disk stores nothing, which is of no use here.
    StoresNothing(String),
    /// The text behind the format is not the size of such a disk.
    NoSize(String),
    /// A URL whose ending is not a format.
    NoEnding(String),
}

impl std::error::Error for NotAnImage {}

impl fmt::Display for NotAnImage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            NotAnImage::NoFormat(word) => {
                write!(f, "'{word}' has no format prefix; use ")?;
                match format_by_ending(word) {
                    Some(format) => write!(f, "{format}:{word}"),
                    None if word.contains(['/', '.']) => write!(f, "raw:{word}, vhd:{word} or qcow2:{word}"),
                    // It may be the name of a disk of the daemon.
                    None => write!(
                        f,
                        "raw:{word}, vhd:{word} or qcow2:{word}; verbs for a disk of the daemon: 'tapline vdi --help'"
                    ),
                }
            }
            NotAnImage::UnknownFormat(format) => {
                write!(f, "unknown format '{format}'; use raw, vhd or qcow2, or to read vmdk or vhdx")
            }
            NotAnImage::NoPath(word) => write!(f, "'{word}' has no file name after the colon"),
            NotAnImage::NoDataFile(word) => write!(f, "'{word}' has no file name after 'data-file='"),
            NotAnImage::HasNone(format) => write!(f, "only qcow2 images have data files, not {format}"),
            NotAnImage::StoresNothing(word) => {
                write!(f, "'{word}' stores nothing and is only for measurements, with 'serve' or 'image bench'")
            }
            NotAnImage::NoEnding(url) => write!(
                f,
                "'{url}' does not end in a format; use qcow2:{url} or raw:{url} (cloud images that end in .img are \
                 usually qcow2; a compressed file must be downloaded and unpacked)"
            ),
            NotAnImage::NoSize(word) => {
                write!(
                    f,
                    "'{word}' has no size; use a multiple of 512 bytes up to 1024P, as in null:10G or model:disk,size=10G"
                )
            }
        }
    }
}

/// The format that the ending of a file's name suggests.
fn format_by_ending(word: &str) -> Option<FormatName> {
    let (_, ending) = word.rsplit_once('.')?;
    match ending {
        "img" | "raw" | "iso" => Some(FormatName::Raw),
        known => FormatName::of(known),
    }
}

impl FromStr for ImageName {
    type Err = NotAnImage;

    fn from_str(word: &str) -> Result<ImageName, NotAnImage> {
        if is_remote(word) {
            return Ok(ImageName { format: FormatName::Raw, path: PathBuf::from(word), data_file: None });
        }
        if is_web(word) {
            let (format, path) = (format_of_url(word), PathBuf::from(word));
            let format = format.ok_or_else(|| NotAnImage::NoEnding(word.to_owned()))?;
            return Ok(ImageName { format, path, data_file: None });
        }
        let no_format = || NotAnImage::NoFormat(word.to_owned());
        let (format, path) = word.split_once(':').ok_or_else(no_format)?;
        let format = match FormatName::of(format) {
            Some(known) => known,
            // A colon in a path is no format either.
            None if format.contains('/') => return Err(no_format()),
            None if FormatName::without_file(format).is_some() => {
                return Err(NotAnImage::StoresNothing(word.to_owned()));
            }
            None => return Err(NotAnImage::UnknownFormat(format.to_owned())),
        };
        if is_web(path) {
            return Ok(ImageName { format, path: PathBuf::from(path), data_file: None });
        }
        let (path, data_file) = match path.split_once(DATA_FILE) {
            None => (path, None),
            Some(_) if format != FormatName::Qcow2 => return Err(NotAnImage::HasNone(format)),
            Some((_, "")) => return Err(NotAnImage::NoDataFile(word.to_owned())),
            Some((path, data_file)) => (path, Some(PathBuf::from(data_file))),
        };
        if path.is_empty() {
            return Err(NotAnImage::NoPath(word.to_owned()));
        }
        // A file whose name looks like a URI stays a file.
        let path = if is_remote(path) { Path::new(".").join(path) } else { PathBuf::from(path) };
        Ok(ImageName { format, path, data_file })
    }
}

fn is_remote(word: &str) -> bool {
    REMOTE.iter().any(|scheme| word.starts_with(scheme))
}

fn is_web(word: &str) -> bool {
    WEB.iter().any(|scheme| word.starts_with(scheme))
}

/// The format in which the path of a URL ends.
fn format_of_url(url: &str) -> Option<FormatName> {
    let (_, rest) = url.split_once("://")?;
    let (_, name) = rest.split(['?', '#']).next()?.rsplit_once('/')?;
    FormatName::of(name.rsplit_once('.')?.1)
}

impl ImageName {
    /// As `from_str`, and also a disk without a file: for what moves data without caring where it goes.
    pub fn to_measure(word: &str) -> Result<ImageName, NotAnImage> {
        let split = word.split_once(':');
        let Some((format, path)) = split.and_then(|(word, path)| Some((FormatName::without_file(word)?, path))) else {
            return word.parse();
        };
        let name = ImageName { format, path: PathBuf::from(path), data_file: None };
        if name.len_without_file().is_some() { Ok(name) } else { Err(NotAnImage::NoSize(word.to_owned())) }
    }

    /// The length in bytes of a disk without a file.
    pub fn len_without_file(&self) -> Option<u64> {
        let word = self.path.to_str()?;
        let Size(len) = match self.format {
            FormatName::Null => word.parse().ok()?,
            FormatName::Model => word.split_once(SIZE).map_or(Some(MODEL_LEN), |(_, size)| size.parse().ok())?,
            _ => return None,
        };
        (len > 0 && len % 512 == 0 && len <= LEN_MAX).then_some(len)
    }

    /// The kind of storage that a disk without a file models; `None` for other disks.
    pub fn model(&self) -> Option<&str> {
        let word = self.path.to_str().filter(|_| self.format == FormatName::Model)?;
        Some(word.split_once(SIZE).map_or(word, |(kind, _)| kind))
    }

    /// The path of the image's file; for a disk without a file, the text behind its format.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// A raw disk on standard input or output, where a command can use that.
    pub fn raw_stream() -> ImageName {
        ImageName { format: FormatName::Raw, path: STREAM.into(), data_file: None }
    }

    /// Whether the name stands for standard input or output. A file of that name is `./-`.
    pub fn is_stream(&self) -> bool {
        self.path == Path::new(STREAM)
    }

    /// The URI of an image at an NBD server.
    pub fn uri(&self) -> Option<&str> {
        self.path.to_str().filter(|path| self.format == FormatName::Raw && is_remote(path))
    }

    /// The URL of an image at an HTTP server, which is only read.
    pub fn url(&self) -> Option<&str> {
        self.path.to_str().filter(|path| is_web(path))
    }

    /// Whether the image is at a server, and not a file of this host.
    pub fn is_at_server(&self) -> bool {
        self.uri().is_some() || self.url().is_some()
    }

    /// The same image with other paths to its files. A disk without a file has none, nor has one at a server.
    pub fn map_paths<E>(&self, mut path: impl FnMut(&Path) -> Result<PathBuf, E>) -> Result<ImageName, E> {
        if self.format.stores_nothing() || self.is_at_server() {
            return Ok(self.clone());
        }
        let data_file = self.data_file.as_deref().map(&mut path).transpose()?;
        Ok(ImageName { format: self.format, path: path(self.path())?, data_file })
    }

    /// The command-line argument, whatever bytes its paths contain.
    pub fn word(&self) -> OsString {
        if let Some(uri) = self.uri() {
            return OsString::from(uri);
        }
        let mut word = OsString::from(format!("{}:", self.format));
        word.push(self.path());
        if let Some(data) = &self.data_file {
            word.push(DATA_FILE);
            word.push(data);
        }
        word
    }

    /// The file, and the data file if there is one.
    pub fn paths(&self) -> impl Iterator<Item = &Path> {
        std::iter::once(self.path()).chain(self.data_file.as_deref())
    }
}

impl fmt::Display for FormatName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.word())
    }
}

impl fmt::Display for ImageName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.word().to_string_lossy())
    }
}

impl Serialize for ImageName {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let word = self.word().into_string();
        let word = word.map_err(|_| ser::Error::custom(format_args!("the path of {self} is not UTF-8")))?;
        serializer.serialize_str(&word)
    }
}

impl<'de> Deserialize<'de> for ImageName {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<ImageName, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(de::Error::custom)
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn an_image_is_a_format_and_a_path() {
        let name: ImageName = "vhd:/a/b:c.vhd".parse().unwrap();
        assert_eq!(name, ImageName { format: FormatName::Vhd, path: "/a/b:c.vhd".into(), data_file: None });
        assert_eq!(name.to_string(), "vhd:/a/b:c.vhd");
    }

    #[test]
    fn a_data_file_follows_the_image_name() {
        let word = "qcow2:a/b.qcow2,data-file=/c,d=e.raw";
        let name: ImageName = word.parse().unwrap();
        assert_eq!(name.paths().collect::<Vec<_>>(), [Path::new("a/b.qcow2"), Path::new("/c,d=e.raw")]);
        assert_eq!((name.to_string().as_str(), name.word()), (word, word.into()));
        let below = name.map_paths(|path| Ok::<_, ()>(Path::new("/d").join(path))).unwrap();
        assert_eq!(below.to_string(), "qcow2:/d/a/b.qcow2,data-file=/c,d=e.raw");
        assert!(matches!("qcow2:a,data-file=".parse::<ImageName>(), Err(NotAnImage::NoDataFile(_))));
        assert!(matches!("qcow2:,data-file=b".parse::<ImageName>(), Err(NotAnImage::NoPath(_))));
        assert_eq!("vhd:a,data-file=b".parse::<ImageName>(), Err(NotAnImage::HasNone(FormatName::Vhd)));
    }

    #[test]
    fn a_uri_of_a_server_is_a_raw_image() {
        let word = "nbd+unix:///e?socket=/run/s";
        let name: ImageName = word.parse().unwrap();
        assert_eq!((name.format, name.uri()), (FormatName::Raw, Some(word)));
        assert_eq!((name.to_string().as_str(), name.word()), (word, word.into()));
        assert_eq!(name.map_paths(|_| Err(())), Ok(name), "there is no path");
        assert!("nbds://host/e".parse::<ImageName>().unwrap().uri().is_some());
        let file: ImageName = "raw:nbd://host/e".parse().unwrap();
        assert_eq!((file.uri(), file.path()), (None, Path::new("./nbd://host/e")));
        assert_eq!("qcow2:nbd://host/e".parse::<ImageName>().unwrap().uri(), None);
    }

    #[test]
    fn a_url_is_an_image_of_the_format_before_it_or_of_its_ending() {
        let name: ImageName = "https://host/a.b/web.qcow2?x=1.raw".parse().unwrap();
        assert_eq!((name.format, name.url()), (FormatName::Qcow2, Some("https://host/a.b/web.qcow2?x=1.raw")));
        assert_eq!((name.uri(), name.is_at_server()), (None, true));
        assert_eq!(name.map_paths(|_| Err(())), Ok(name.clone()), "there is no path");
        assert_eq!(name.to_string().parse(), Ok(name));
        let name: ImageName = "qcow2:https://host/web.img,data-file=x".parse().unwrap();
        assert_eq!((name.url(), name.data_file.as_ref()), (Some("https://host/web.img,data-file=x"), None));
        assert_eq!("http://h/a.vhdx".parse::<ImageName>().map(|name| name.format), Ok(FormatName::Vhdx));
        for word in ["https://host/web.img", "https://host.raw", "https://host/web.qcow2.xz", "https://host/web"] {
            assert_eq!(word.parse::<ImageName>(), Err(NotAnImage::NoEnding(word.into())), "{word}");
        }
        let file: ImageName = "raw:./https://host/a".parse().unwrap();
        assert_eq!((file.url(), file.is_at_server()), (None, false));
    }

    #[test]
    fn a_path_without_format_is_refused_with_a_suggestion() {
        let refused = |word: &str| word.parse::<ImageName>().unwrap_err().to_string();
        assert_eq!(refused("disk.vhd"), "'disk.vhd' has no format prefix; use vhd:disk.vhd");
        assert!(refused("a.img").ends_with("use raw:a.img"));
        assert!(refused("/dev/sdb").ends_with("use raw:/dev/sdb, vhd:/dev/sdb or qcow2:/dev/sdb"));
        assert!(refused("web").contains("tapline vdi"));
        assert!(matches!("/a:b".parse::<ImageName>(), Err(NotAnImage::NoFormat(_))));
    }

    #[test]
    fn a_disk_without_a_file_is_refused_where_it_is_of_no_use() {
        assert_eq!("null:1G".parse::<ImageName>(), Err(NotAnImage::StoresNothing("null:1G".into())));
        let name = ImageName::to_measure("null:1G").unwrap();
        assert_eq!((name.len_without_file(), name.to_string().as_str()), (Some(1 << 30), "null:1G"));
        assert_eq!(name.map_paths(|_| Err(())), Ok(name), "there is no path");
        assert_eq!(ImageName::to_measure("raw:1G").unwrap().len_without_file(), None);
        let name = ImageName::to_measure("model:nvme,size=2M").unwrap();
        assert_eq!((name.len_without_file(), name.model()), (Some(2 << 20), Some("nvme")));
        let name = ImageName::to_measure("model:disk").unwrap();
        assert_eq!((name.len_without_file(), name.model()), (Some(64 << 30), Some("disk")));
        for word in ["null:", "null:0", "null:100", "null:1X", "null:/a", "null:2048P", "model:disk,size=", "null:nvme"]
        {
            assert_eq!(ImageName::to_measure(word), Err(NotAnImage::NoSize(word.into())), "{word}");
        }
    }

    #[test]
    fn an_unknown_format_and_a_missing_path_are_refused() {
        assert_eq!("qcow9:x".parse::<ImageName>(), Err(NotAnImage::UnknownFormat("qcow9".into())));
        assert_eq!("vhd:".parse::<ImageName>(), Err(NotAnImage::NoPath("vhd:".into())));
    }
}
