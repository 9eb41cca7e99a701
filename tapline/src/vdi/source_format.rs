//! The format of an imported file. It is never guessed; if it is missing, the error shows the command to type. A URL
//! may end in it.

use std::path::Path;

use api::{Code, Problem, SourceFormat};

use crate::image_source::{ImageSource, format_of_url, is_url};
use crate::word;

/// Extensions of compressed files, and the command that unpacks them.
const COMPRESSED: [(&str, &str); 4] = [("gz", "gzip -dk"), ("xz", "xz -dk"), ("zst", "zstd -dk"), ("bz2", "bzip2 -dk")];

/// Extensions of image files, and their usual formats.
const EXTENSIONS: [(&str, &str); 8] = [
    ("qcow2", "qcow2"),
    ("qcow", "qcow2"),
    ("vmdk", "vmdk"),
    ("vhd", "vhd"),
    ("vpc", "vhd"),
    ("vhdx", "vhdx"),
    ("raw", "raw"),
    ("img", "raw"),
];

/// The given format, or an error with the command to type.
pub fn required(given: Option<SourceFormat>, name: &str, source: &ImageSource) -> Result<SourceFormat, Problem> {
    let typed = source.typed();
    let extension = extension(typed);
    match (given, extension.as_str(), source) {
        (_, "ova", _) => Err(archive(typed)),
        (Some(format), ..) => Ok(format),
        (None, _, ImageSource::Url(_)) if COMPRESSED.iter().all(|(known, _)| *known != extension) => {
            format_of_url(typed).map_err(|_| missing(name, typed, &extension))
        }
        (None, ..) => Err(missing(name, typed, &extension)),
    }
}

/// The error for an OVA: an archive of a description (OVF) and of VMDK disks.
fn archive(path: &str) -> Problem {
    Problem::new(Code::Invalid, format!("cannot import {path}: it is an archive with disks in it, not a disk"))
        .advise(format!("import the machine with all its disks: tapline vm import {path}"))
}

fn missing(name: &str, path: &str, extension: &str) -> Problem {
    if let Some((_, unpack)) = COMPRESSED.iter().find(|(known, _)| *known == extension) {
        let unpacked = path.rsplit_once('.').map_or(path, |(stem, _)| stem);
        let format = usual_format(&self::extension(unpacked)).unwrap_or("FORMAT");
        let what = format!("cannot import {path}: it is a compressed file");
        let advice = match is_url(path) {
            true => {
                let (file, plain) = (last_part(path), last_part(unpacked));
                format!(
                    "download and unpack it: curl -fLO {path}; {unpack} {file}; then: tapline vdi import {name} {plain} \
                     --source-format {format}"
                )
            }
            false => format!(
                "unpack it: {unpack} {path}; then: tapline vdi import {name} {unpacked} --source-format {format}"
            ),
        };
        return Problem::new(Code::Invalid, what).advise(advice);
    }
    let what = format!("cannot import {path}: its format was not given, and is never guessed");
    let advice = match usual_format(extension) {
        Some(format) => {
            format!("if it is what its name says: tapline vdi import {name} {path} --source-format {format}")
        }
        None => format!("add --source-format with one of {}", word::SOURCE_FORMATS.join(", ")),
    };
    Problem::new(Code::Invalid, what).advise(advice)
}

fn last_part(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or(path)
}

fn usual_format(extension: &str) -> Option<&'static str> {
    EXTENSIONS.iter().find(|(known, _)| *known == extension).map(|(_, format)| *format)
}

fn extension(path: &str) -> String {
    Path::new(path).extension().map(|extension| extension.to_string_lossy().to_ascii_lowercase()).unwrap_or_default()
}

#[cfg(test)]
mod test {
    use super::*;

    fn advice(given: Option<SourceFormat>, path: &str) -> String {
        required(given, "web", &ImageSource::parse(path).unwrap()).unwrap_err().advice.unwrap()
    }

    #[test]
    fn a_missing_format_is_answered_with_the_command_to_type() {
        assert!(advice(None, "/srv/a.qcow2").ends_with("tapline vdi import web /srv/a.qcow2 --source-format qcow2"));
        assert!(advice(None, "/srv/a.bin").contains("raw, vhd, qcow2, vmdk, vhdx"));
        let unpack = advice(None, "/srv/a.img.xz");
        assert!(
            unpack.contains("xz -dk /srv/a.img.xz") && unpack.ends_with("/srv/a.img --source-format raw"),
            "{unpack}"
        );
    }

    #[test]
    fn an_ova_is_refused_whatever_format_was_given() {
        for given in [None, Some(SourceFormat::Vmdk), Some(SourceFormat::Raw)] {
            assert!(advice(given, "web.OVA").contains("tapline vm import web.OVA"));
        }
    }

    #[test]
    fn the_ending_of_a_url_is_its_format() {
        let required = |url: &str| required(None, "web", &ImageSource::parse(url).unwrap());
        assert_eq!(required("https://host/a.qcow2?x=y"), Ok(SourceFormat::Qcow2));
        assert!(advice(None, "https://host/a.img").contains("--source-format"));
        assert!(advice(None, "https://host/a.qcow2.xz").contains("xz -dk"));
    }

    #[test]
    fn a_given_format_is_used() {
        let path = ImageSource::parse("/srv/a.qcow2").unwrap();
        assert_eq!(required(Some(SourceFormat::Raw), "web", &path), Ok(SourceFormat::Raw));
    }
}
