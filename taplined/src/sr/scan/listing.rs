//! Classifies the files of a repository by their names and users: a pure function.

use std::collections::{BTreeMap, HashMap, HashSet};

use api::{Code, ImageFormat, Problem, Sr, SrSource, Unplaced};
use repo::catalogue::{Image, ImageState};
use repo::driver::{Entry, FileNumbers, LABEL, LOCK, UNFINISHED};
use repo::inventory::{DAMAGED, INVENTORY};
use uuid::Uuid;

use crate::sr::probe::format_of;

/// Sector size in bytes: a disk consists of whole sectors.
const SECTOR: u64 = 512;

/// A file that may be an image.
#[derive(Clone, Debug, PartialEq)]
pub struct Candidate {
    /// Its name.
    pub file: String,
    /// The format implied by its name.
    pub format: ImageFormat,
    /// Length in bytes.
    pub len: u64,
    /// Physical size in bytes.
    pub physical: u64,
    /// Its device and inode number, if it was listed.
    pub numbers: Option<FileNumbers>,
    /// The image, if it is known.
    pub known: Option<Uuid>,
}

impl Candidate {
    /// A file of a known image.
    pub fn known(image: &Image) -> Candidate {
        let Image { uuid, file, format, size, physical, .. } = image.clone();
        Candidate { file, format, len: size, physical, numbers: None, known: Some(uuid) }
    }

    /// Whether its format can record an identity.
    pub fn has_identity(&self) -> bool {
        self.format != ImageFormat::Raw
    }
}

/// All files of a repository, classified.
#[derive(Debug, Default)]
pub struct Sorted {
    /// Images whose files exist, with their physical sizes.
    pub present: Vec<(Image, u64)>,
    /// Images whose files do not exist.
    pub absent: Vec<Image>,
    /// Unknown files that may be images.
    pub appeared: Vec<Candidate>,
    /// Files with the name of an image that cannot be one.
    pub unplaced: Vec<Unplaced>,
    /// Number of files of each class.
    pub counts: BTreeMap<String, u64>,
}

/// Classifies the `entries` of a repository. `in_hand` are the intents of tasks.
pub fn sort(sr: &Sr, entries: Vec<Entry>, known: Vec<Image>, in_hand: &[String]) -> Sorted {
    let mut sorted = Sorted::default();
    // Files that a task is creating are left to it, whether they exist or not.
    let known = known.into_iter().filter(|image| image.state != ImageState::NoData);
    let (making, known): (Vec<_>, Vec<_>) = known.partition(|image| image.state == ImageState::Making);
    let noted: HashSet<String> =
        entries.iter().filter_map(|entry| entry.name.strip_suffix(UNFINISHED)).map(Into::into).collect();
    let mut known: HashMap<String, Image> = known.into_iter().map(|image| (image.file.clone(), image)).collect();
    for entry in entries {
        let being_made = entry.name.ends_with(UNFINISHED) || making.iter().any(|image| image.file == entry.name);
        let format = format_of(&entry.name).filter(|_| belongs(sr, &entry.name));
        let what = match (known.remove(&entry.name), format) {
            (Some(image), _) if entry.file => {
                sorted.present.push((image, entry.physical));
                "images"
            }
            (Some(image), _) => {
                sorted.absent.push(image);
                sorted.unplaced.push(unplaced(entry.name, odd()));
                "odd"
            }
            (None, _) if [LABEL, LOCK, INVENTORY, DAMAGED].contains(&&*entry.name) => "notes",
            (None, _) if being_made => "unfinished",
            (None, Some(_)) if in_hand.iter().any(|intent| names(intent, &entry.name)) => "unfinished",
            (None, Some(_)) if noted.contains(&entry.name) => {
                sorted.unplaced.push(unplaced(entry.name, half_changed()));
                "odd"
            }
            (None, Some(format)) => appear(&mut sorted, entry, format),
            (None, None) => "others",
        };
        let count = sorted.counts.entry(what.into()).or_default();
        *count = count.saturating_add(1);
    }
    let mut absent: Vec<Image> = known.into_values().collect();
    absent.sort_by(|one, other| one.file.cmp(&other.file));
    sorted.absent.extend(absent);
    sorted
}

/// Whether the intent of a task names a file, or the image after which our file is named.
fn names(intent: &str, file: &str) -> bool {
    let image = file.split_once('.').map(|(stem, _)| stem).filter(|stem| Uuid::parse_str(stem).is_ok());
    intent.contains(file) || image.is_some_and(|image| intent.contains(image))
}

/// Whether a file may belong to a repository: a library contains ISO images only.
fn belongs(sr: &Sr, name: &str) -> bool {
    !matches!(sr.source, SrSource::Iso { .. }) || name.ends_with(".iso")
}

/// Classifies a file with the name of an image.
fn appear(sorted: &mut Sorted, entry: Entry, format: ImageFormat) -> &'static str {
    let problem = match (entry.file, format) {
        (false, _) => Some(odd()),
        (true, _) if entry.name.contains(char::is_control) || entry.name.contains(char::REPLACEMENT_CHARACTER) => {
            let what = "its name contains control characters or is not UTF-8";
            Some(Problem::new(Code::Invalid, what).advise("rename it"))
        }
        (true, _) if entry.foreign && entry.fresh => {
            let what = "it belongs to another user and was written a moment ago";
            Some(Problem::new(Code::Busy, what).advise("scan again when it is no longer being written"))
        }
        (true, ImageFormat::Raw) if entry.len == 0 || entry.len % SECTOR != 0 => {
            let what = format!("a raw image must be a multiple of {SECTOR} bytes, but it has {} bytes", entry.len);
            Some(Problem::new(Code::Invalid, what))
        }
        (true, _) => None,
    };
    match problem {
        Some(problem) => {
            sorted.unplaced.push(unplaced(entry.name, problem));
            "odd"
        }
        None => {
            let Entry { name, physical, len, numbers, .. } = entry;
            let candidate = Candidate { file: name, format, len, physical, numbers: Some(numbers), known: None };
            sorted.appeared.push(candidate);
            "images"
        }
    }
}

fn half_changed() -> Problem {
    let what = format!(
        "it is being changed, or the command that changed it was killed: there is a marker file \
            '…{UNFINISHED}' next to it"
    );
    Problem::new(Code::Busy, what)
        .advise("scan again when that has ended, or repeat the interrupted command to finish it")
}

fn odd() -> Problem {
    Problem::new(Code::Invalid, "it is not a regular file: a link, a directory or a device")
        .advise("replace it with the image itself")
}

/// A file that could not be placed, with the reason.
pub fn unplaced(file: String, problem: Problem) -> Unplaced {
    Unplaced { file, problem }
}

#[cfg(test)]
mod test {
    use super::*;

    fn entry(name: &str) -> Entry {
        let numbers = FileNumbers { device: 1, inode: 1 };
        Entry { name: name.into(), file: true, physical: 4096, len: 1024, foreign: false, fresh: false, numbers }
    }

    fn repository(source: &str) -> Sr {
        let source = serde_json::from_str(source).unwrap();
        crate::sr::make::new_sr(Uuid::new_v4(), "a".parse().unwrap(), api::Description::default(), source, 0)
    }

    fn dir() -> Sr {
        repository(r#"{"type":"dir","path":"/srv"}"#)
    }

    fn image(file: &str, state: ImageState) -> Image {
        let (uuid, sr) = (Uuid::new_v4(), Uuid::new_v4());
        let (format, file) = (ImageFormat::Vhd, file.into());
        Image { uuid, sr, file, format, size: 1024, physical: 0, parent: None, state, kept: false }
    }

    fn files(candidates: &[Candidate]) -> Vec<&str> {
        candidates.iter().map(|candidate| &*candidate.file).collect()
    }

    #[test]
    fn files_are_classified_by_name() {
        let names =
            ["a.vhd", "b.qcow2", "c.raw", "d.img", "e.iso", "f.txt", ".vhd", "g", LABEL, LOCK, "h.vhd.unfinished"];
        let sorted = sort(&dir(), names.map(entry).into(), Vec::new(), &[]);
        assert_eq!(files(&sorted.appeared), ["a.vhd", "b.qcow2", "c.raw", "d.img", "e.iso"]);
        let counts: Vec<_> = sorted.counts.iter().map(|(what, count)| (&**what, *count)).collect();
        assert_eq!(counts, [("images", 5), ("notes", 2), ("others", 3), ("unfinished", 1)]);
        assert!(sorted.unplaced.is_empty());
    }

    #[test]
    fn files_that_cannot_be_images_are_reported_with_the_reason() {
        let odd = Entry { file: false, ..entry("link.vhd") };
        let short = Entry { len: 1000, ..entry("short.raw") };
        let empty = Entry { len: 0, ..entry("empty.img") };
        let growing = Entry { foreign: true, fresh: true, ..entry("upload.vhd") };
        let settled = Entry { foreign: true, ..entry("theirs.vhd") };
        let entries = vec![odd, short, empty, growing, settled, entry("a\u{7}.vhd"), entry("\u{fffd}.vhd")];
        let sorted = sort(&dir(), entries, Vec::new(), &[]);
        assert_eq!(files(&sorted.appeared), ["theirs.vhd"]);
        let codes: Vec<Code> = sorted.unplaced.iter().map(|unplaced| unplaced.problem.code).collect();
        assert_eq!(codes, [Code::Invalid, Code::Invalid, Code::Invalid, Code::Busy, Code::Invalid, Code::Invalid]);
    }

    #[test]
    fn an_image_with_a_marker_file_is_unplaced() {
        let sorted = sort(&dir(), ["a.vhd", "a.vhd.unfinished"].map(entry).into(), Vec::new(), &[]);
        assert!(sorted.appeared.is_empty());
        assert_eq!(sorted.unplaced.first().unwrap().problem.code, Code::Busy);
    }

    #[test]
    fn files_of_running_tasks_are_left_alone() {
        let known = vec![image("new.vhd", ImageState::Making), image("next.vhd", ImageState::Making)];
        let going = r#"{"file":"going.vhd"}"#.to_owned();
        let snapshot = r#"{"image":"9b1deb4d-3b7d-4bad-9bdd-2b0d7b3dcb6d","format":"qcow2"}"#.to_owned();
        let leaf = "9b1deb4d-3b7d-4bad-9bdd-2b0d7b3dcb6d.qcow2";
        let sorted = sort(&dir(), ["new.vhd", "going.vhd", leaf].map(entry).into(), known, &[going, snapshot]);
        assert!(sorted.appeared.is_empty() && sorted.present.is_empty() && sorted.absent.is_empty());
        assert_eq!(sorted.counts.get("unfinished"), Some(&3));
    }

    #[test]
    fn a_link_that_replaced_a_known_image_is_not_an_image() {
        let known = ["a.vhd", "b.vhd", "c.vhd"].map(|file| image(file, ImageState::Ready));
        let link = Entry { file: false, ..entry("c.vhd") };
        let sorted = sort(&dir(), vec![entry("a.vhd"), link], known.into(), &[]);
        assert_eq!(sorted.present.len(), 1);
        assert_eq!(sorted.absent.iter().map(|image| &*image.file).collect::<Vec<_>>(), ["c.vhd", "b.vhd"]);
        assert_eq!(sorted.unplaced.first().unwrap().file, "c.vhd");
    }

    #[test]
    fn a_library_has_iso_images_only() {
        let library = repository(r#"{"type":"iso","path":"/srv"}"#);
        let sorted = sort(&library, ["a.iso", "b.vhd"].map(entry).into(), Vec::new(), &[]);
        assert_eq!(files(&sorted.appeared), ["a.iso"]);
    }
}
