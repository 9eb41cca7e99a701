//! Images at HTTP servers: their URLs, and the digests that they must have.

use std::borrow::Borrow;
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use utoipa::openapi::{RefOr, Schema};

use crate::value::{checked, text, text_schema};

/// Maximum bytes of a URL.
const URL_MAX: usize = 4096;

/// The URL of an image: `https://HOST[:PORT]/PATH`, or http. Without a user name or password: a URL is logged.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct ImageUrl(String);

/// The digest that a file must have: `sha256:HEX`, `sha512:HEX`, the URL of a list of digests, or `auto` for a list
/// next to the file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct FileChecksum(String);

impl TryFrom<String> for ImageUrl {
    type Error = String;

    fn try_from(text: String) -> Result<ImageUrl, String> {
        let rest = text.strip_prefix("https://").or_else(|| text.strip_prefix("http://"));
        let is_right = |rest: &str| {
            let authority = rest.split(['/', '?']).next().unwrap_or_default();
            let is_plain = |byte: u8| byte.is_ascii_graphic() && !b"#\"<>\\^`{|}".contains(&byte);
            !authority.is_empty() && !authority.contains('@') && rest.bytes().all(is_plain)
        };
        match text.len() <= URL_MAX && rest.is_some_and(is_right) {
            true => Ok(ImageUrl(text)),
            // It may have a password, so it is not repeated.
            false => Err("the URL of an image is https://HOST[:PORT]/PATH, without a user name, and with %XX for \
                          characters that a URL cannot have"
                .into()),
        }
    }
}

impl TryFrom<String> for FileChecksum {
    type Error = String;

    fn try_from(text: String) -> Result<FileChecksum, String> {
        let is_hex = |hex: &str, len| hex.len() == len && hex.bytes().all(|byte| byte.is_ascii_hexdigit());
        let is_right = match text.split_once(':') {
            Some(("sha256", hex)) => is_hex(hex, 64),
            Some(("sha512", hex)) => is_hex(hex, 128),
            Some(("https" | "http", _)) => ImageUrl::try_from(text.clone()).is_ok(),
            _ => text == "auto",
        };
        match is_right {
            true => Ok(FileChecksum(text)),
            false => {
                Err("a checksum is sha256:HEX with 64 digits, sha512:HEX with 128 digits, the URL of a list, or auto"
                    .into())
            }
        }
    }
}

impl FileChecksum {
    /// Whether it is a digest, and not the place of one.
    pub fn is_digest(&self) -> bool {
        self.0.starts_with("sha")
    }
}

checked!(
    ImageUrl,
    9,
    URL_MAX,
    r##"^https?://[^\x00-\x20\x7f-\uffff#"<>@\\^`{|}/?]+([/?][^\x00-\x20\x7f-\uffff#"<>\\^`{|}]*)?$"##,
    "The URL of an image: https://HOST[:PORT]/PATH"
);
checked!(
    FileChecksum,
    4,
    URL_MAX,
    r"^(auto|sha256:[0-9A-Fa-f]{64}|sha512:[0-9A-Fa-f]{128}|https?://.*)$",
    "The digest that a file must have, or where it is found"
);

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn a_url_has_a_host_and_no_password() {
        for right in ["https://host/a.qcow2", "http://[::1]:80/a?b=c@d", "https://host"] {
            assert_eq!(right.parse::<ImageUrl>().map(String::from), Ok(right.to_owned()));
        }
        for wrong in ["", "https://", "https:///a", "ftp://host/a", "https://me:x@host/a", "https://host/a b", "/srv/a"]
        {
            assert!(wrong.parse::<ImageUrl>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_checksum_is_a_digest_or_its_place() {
        let digest = format!("sha256:{}", "0a".repeat(32));
        assert!(digest.parse::<FileChecksum>().unwrap().is_digest());
        for place in ["auto", "https://host/SHA256SUMS"] {
            assert!(!place.parse::<FileChecksum>().unwrap().is_digest());
        }
        for wrong in ["", "sha256:0a", "md5:0a", "sha512:x", "/srv/SHA256SUMS", "https://me@host/a"] {
            assert!(wrong.parse::<FileChecksum>().is_err(), "{wrong}");
        }
    }
}
