//! Parent links: what an image records about its parent, its verification and its text for people, and the link of a
//! new child.
//!
//! Nothing here opens a file. A recorded name is shown as printable text, and never followed.

use std::path::{Component, Path, PathBuf};

use control::{FormatName, ImageName, Kind};
use disk::{Format, Image, Link};
use uring::ImageFile;
use vm::syntax::shell_word;

use crate::files::Files;
use crate::image::create::seconds;
use crate::image::http;
use crate::image::mtime;
use crate::image::rewrite_marker::UnfinishedRewrite;
use crate::image::uuid;
use crate::process::failure::{Failure, only_read};
use crate::process::output::printable;

/// Makes the link to `parent`, which is open as `file`, for a child at the path `child`.
pub fn record(
    files: &Files,
    child: &Path,
    parent: &ImageName,
    image: &Image,
    file: &ImageFile,
) -> Result<Link, Failure> {
    http::refuse(format!("use {parent} as a parent"), parent)?;
    if parent.format.is_read_only() {
        return Err(only_read(format!("use {parent} as a parent"), parent));
    }
    let (relative, absolute) = match parent.uri() {
        // As QEMU writes it.
        Some(uri) => (String::new(), uri.to_owned()),
        None => paths(files, child, parent.path())?,
    };
    Ok(Link {
        format: Some(parent.format.word()),
        uuid: image.identity(),
        relative,
        absolute,
        len: Some(image.geometry().len),
        modified: modified(files, parent, file)?,
    })
}

/// Returns when the open file of an image was last modified, in seconds since 1970. Changes by an unfinished command
/// that does not change what guests see do not count. `None` for block devices and exports, which have no such time.
pub fn modified(files: &Files, name: &ImageName, file: &ImageFile) -> Result<Option<u64>, Failure> {
    if file.remote().is_some() {
        return Ok(None);
    }
    let changed = mtime::of_open(name, file)?;
    match UnfinishedRewrite::find(files, name)?.filter(|_| changed.is_some()) {
        Some(left) => Ok(Some(seconds(left.modified()))),
        None => Ok(changed.map(seconds)),
    }
}

/// Returns the paths of the parent for a child's metadata: relative to the child's directory, and absolute.
fn paths(files: &Files, child: &Path, parent: &Path) -> Result<(String, String), Failure> {
    let failed = |path: &Path, error| Failure::new(format!("resolve the path of {}", path.display()), error);
    let parent = files.canonical(parent).map_err(|error| failed(parent, error))?;
    // Symbolic links are resolved; for a child that does not exist yet, those of its directory.
    let child = match files.canonical(child) {
        Ok(found) => found,
        Err(_) => {
            let directory = child.parent().filter(|directory| !directory.as_os_str().is_empty());
            let directory = directory.unwrap_or(Path::new("."));
            directory.canonicalize().map_err(|error| failed(directory, error))?.join("child")
        }
    };
    match (relative(&child, &parent).to_str(), parent.to_str()) {
        (Some(relative), Some(absolute)) => Ok((relative.to_owned(), absolute.to_owned())),
        _ => Err(Failure::new(
            format!("record the parent {}", parent.display()),
            "its path is not UTF-8, so it cannot be recorded as a parent",
        )),
    }
}

/// Returns `to` relative to the directory of `from`; both are absolute and without symbolic links.
fn relative(from: &Path, to: &Path) -> PathBuf {
    let directory = from.parent().unwrap_or(Path::new("/"));
    let shared = directory.components().zip(to.components()).take_while(|(one, other)| one == other).count();
    let up = directory.components().skip(shared).map(|_| "..");
    up.map(PathBuf::from).chain([to.components().skip(shared).collect()]).collect()
}

/// Describes an image's recorded parent.
pub fn describe(link: &Link) -> String {
    let mut names = Vec::new();
    for name in [&link.relative, &link.absolute] {
        if !name.is_empty() && !names.contains(&name) {
            names.push(name);
        }
    }
    let mut text = match names.split_first() {
        Some((first, rest)) => {
            let rest: String = rest.iter().map(|name| format!(" ({})", printable(name))).collect();
            format!("its recorded parent is '{}'{rest}", printable(first))
        }
        None => "it has a parent whose name is not recorded".to_owned(),
    };
    if link.uuid != [0; 16] {
        text.push_str(&format!(" with uuid {}", uuid::text(&link.uuid)));
    }
    text
}

/// Returns the parent's likely name on the command line: the recorded path, relative to the image.
pub fn suggestion(name: &ImageName, link: &Link) -> String {
    let recorded = [&link.relative, &link.absolute].into_iter().find(|path| !path.is_empty());
    if let Some(uri) = recorded.filter(|path| path.parse::<ImageName>().is_ok_and(|name| name.uri().is_some())) {
        return shell_word(&printable(uri));
    }
    let file = recorded.map_or("PATH".into(), |path| printable(path));
    let path: PathBuf = name.path().parent().unwrap_or(Path::new("")).join(file);
    let path: PathBuf = path.components().filter(|part| *part != Component::CurDir).collect();
    let format = link.format.or_else(|| format_of(name, link).map(FormatName::word)).unwrap_or("FORMAT");
    format!("{format}:{}", path.display())
}

/// Returns the recorded format of a parent. A VHD records none, and no uuid for a raw parent.
pub fn format_of(child: &ImageName, link: &Link) -> Option<FormatName> {
    match (link.format, child.format) {
        (Some(format), _) => FormatName::of(format),
        (None, FormatName::Vhd) if link.uuid == [0; 16] => Some(FormatName::Raw),
        (None, FormatName::Vhd) => Some(FormatName::Vhd),
        (None, _) => None,
    }
}

/// Checks that `parent`, whose file was last modified at `modified` if that is known, is the recorded parent of `child`
/// and unchanged since. With `accept` a modification is only reported.
pub fn check(
    (child, above): (&ImageName, &Image),
    (parent, below): (&ImageName, &Image),
    modified: Option<u64>,
    accept: bool,
) -> Result<Option<String>, Failure> {
    let tried = || format!("use {parent} as the parent of {child}");
    let Some(link) = above.link() else {
        return Err(Failure::new(tried(), format!("{child} has no parent"))
            .advise("omit this --parent and those after it")
            .of_kind(Kind::Invalid));
    };
    if let Some(format) = link.format.filter(|&format| format != parent.format.word()) {
        return Err(Failure::new(tried(), format!("the recorded parent of {child} has the format {format}"))
            .advise(format!("{}\n  if that is the right one: --parent {}", describe(&link), suggestion(child, &link)))
            .of_kind(Kind::Invalid));
    }
    let error = match disk::check_parent(above, below, modified) {
        Ok(note) => return Ok(note.map(|note| format!("{child} on {parent}: {note}"))),
        Err(error) => error,
    };
    // Does only the modification time differ?
    let only_changed = disk::check_parent(above, below, None).is_ok();
    if only_changed && accept {
        return Ok(Some(format!("{child} on {parent}: {error}; using it anyway, as requested")));
    }
    let advice = match only_changed {
        true => format!(
            "{}\n  the contents of {child} may have changed; if you know that they have not, or accept that they have: \
             --accept-changed-parent",
            describe(&link)
        ),
        false => describe(&link),
    };
    Err(Failure::new(tried(), error).advise(advice))
}

#[cfg(test)]
mod test {
    use super::*;

    fn link(relative: &str, absolute: &str) -> Link {
        let (relative, absolute) = (relative.to_owned(), absolute.to_owned());
        Link { format: None, uuid: [0; 16], relative, absolute, len: None, modified: None }
    }

    #[test]
    fn relative_paths_ascend_only_as_far_as_needed() {
        let relative = |from: &str, to: &str| relative(Path::new(from), Path::new(to)).display().to_string();
        assert_eq!(relative("/a/b/child", "/a/b/base"), "base");
        assert_eq!(relative("/a/b/child", "/a/c/base"), "../c/base");
        assert_eq!(relative("/child", "/a/base"), "a/base");
    }

    #[test]
    fn a_parents_path_is_suggested_relative_to_its_child() {
        let child: ImageName = "vhd:disks/child.vhd".parse().unwrap();
        assert_eq!(suggestion(&child, &link("./base.raw", "/x/base.raw")), "raw:disks/base.raw");
        assert_eq!(suggestion(&child, &link("", "/x/base.raw")), "raw:/x/base.raw");
        assert_eq!(suggestion(&child, &link("", "nbd://host/e")), "nbd://host/e");
        let known = Link { format: Some("qcow2"), uuid: [1; 16], ..link("../b.q", "") };
        assert_eq!(suggestion(&child, &known), "qcow2:disks/../b.q");
        assert_eq!(suggestion(&child, &Link { uuid: [1; 16], ..link("", "") }), "vhd:disks/PATH");
    }

    #[test]
    fn recorded_names_are_shown_once_and_escaped() {
        assert_eq!(describe(&link("/b", "/b")), "its recorded parent is '/b'");
        assert_eq!(describe(&link("b\x1b[2J", "/a/b")), "its recorded parent is 'b\u{fffd}[2J' (/a/b)");
    }
}
