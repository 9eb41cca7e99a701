//! Where the contents of a new disk come from: an image file on the daemon's host, an image at an HTTP server, or the
//! standard input.

use api::{AbsolutePath, Code, FileChecksum, ImageUrl, Problem, SourceFormat};
use control::ImageName;

use crate::session::Session;
use crate::word::{self, HostPath};

/// An image that the daemon reads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ImageSource {
    /// A file on its host.
    File(HostPath),
    /// A file at a server.
    Url(ImageUrl),
    /// The standard input of this command.
    Standard,
}

/// How an image at a server is verified.
#[derive(Clone, Debug, Default, PartialEq, Eq, clap::Args)]
pub struct Verified {
    /// Fail unless the file at the URL has this digest: sha256:HEX or sha512:HEX, or the one in a list: its URL, or
    /// auto for SHA256SUMS, SHA512SUMS, NAME.sha256 or NAME.sha512 next to the file
    #[arg(long, value_name = "DIGEST|URL|auto")]
    pub checksum: Option<FileChecksum>,
    /// Also read over http, without TLS: anyone on the way can change what is read
    #[arg(long)]
    pub insecure_http: bool,
}

impl ImageSource {
    /// Parses a path or a URL.
    pub fn parse(word: &str) -> Result<ImageSource, String> {
        match word {
            "-" => Ok(ImageSource::Standard),
            url if is_url(url) => url.parse().map(ImageSource::Url),
            path => word::path(path).map(ImageSource::File),
        }
    }

    /// The path or the URL as typed.
    pub fn typed(&self) -> &str {
        match self {
            ImageSource::File(path) => &path.typed,
            ImageSource::Url(url) => url.as_str(),
            ImageSource::Standard => "-",
        }
    }

    /// The path or the URL for a request.
    pub fn of_request(self, session: &Session) -> Result<(Option<AbsolutePath>, Option<ImageUrl>), Problem> {
        match self {
            ImageSource::File(path) => Ok((Some(session.path(path)?), None)),
            ImageSource::Url(url) => Ok((None, Some(url))),
            ImageSource::Standard => Ok((None, None)),
        }
    }

    /// Refuses options that are only for URLs.
    pub fn check(&self, verified: &Verified) -> Result<(), Problem> {
        match self {
            ImageSource::File(_) | ImageSource::Standard if *verified != Verified::default() => {
                let what = format!("{} is no URL: --checksum and --insecure-http are for URLs", self.typed());
                Err(Problem::new(Code::Invalid, what).advise("verify a file by sha256sum -c"))
            }
            _ => Ok(()),
        }
    }
}

/// Whether a word is the URL of an image.
pub fn is_url(word: &str) -> bool {
    word.starts_with("https://") || word.starts_with("http://")
}

/// The format in which a URL ends: the user writes it, as the format before a path.
pub fn format_of_url(url: &str) -> Result<SourceFormat, String> {
    let name: ImageName = url.parse().map_err(|why: control::NotAnImage| why.to_string())?;
    let word = serde_json::Value::String(name.format.word().to_owned());
    serde_json::from_value(word).map_err(|_| format!("{} is not a format of images", name.format))
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn a_url_is_no_path_and_its_ending_is_its_format() {
        let source = ImageSource::parse("https://host/web.qcow2").unwrap();
        assert_eq!(
            (&source, source.typed()),
            (&ImageSource::Url("https://host/web.qcow2".parse().unwrap()), source.typed())
        );
        assert_eq!(format_of_url(source.typed()), Ok(SourceFormat::Qcow2));
        assert!(format_of_url("https://host/web.img").unwrap_err().contains("qcow2:https://host/web.img"));
        assert!(ImageSource::parse("https://me:x@host/web.qcow2").is_err());
        assert!(matches!(ImageSource::parse("/srv/web.qcow2"), Ok(ImageSource::File(_))));
        let verified = Verified { insecure_http: true, ..Verified::default() };
        assert!(source.check(&verified).is_ok());
        assert!(ImageSource::parse("/srv/web.qcow2").unwrap().check(&verified).is_err());
    }
}
