//! Where a backup target is: a directory, or a bucket of S3 and how that is reached. Values are checked here.
//!
//! Invariant: neither a place nor an address holds a secret: the key for a server is in a file, whose path is named.

use std::borrow::Borrow;
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use utoipa::openapi::{RefOr, Schema};

use crate::AbsolutePath;
use crate::value::{checked, text, text_schema};

/// How a place in a bucket begins.
const SCHEME: &str = "s3://";
/// Maximum bytes of a place in a bucket, and of a server's address.
const LENGTH_MAX: usize = 1024;
const REGION_MAX: usize = 64;

/// The place of a backup target: a directory of the host, or `s3://BUCKET[/PREFIX]`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct BackupPlace(String);

/// The address of a server: `http://` or `https://`, a host, and a port if it is not the usual one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct ServerUrl(String);

/// The name of a region: letters, digits and dashes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Region(String);

/// How the bucket of a backup target is reached.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct S3Access {
    /// The file with the key for the server, which only root can read: `aws_access_key_id` and `aws_secret_access_key`
    /// of the profile `default`, as Amazon's tools keep it. It is read for each use of the target, and never stored.
    pub credentials: AbsolutePath,
    /// The server, for all but Amazon's. Without TLS if it begins with `http://`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub endpoint: Option<ServerUrl>,
    /// The region; `us-east-1` if omitted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub region: Option<Region>,
    /// The file with the certificates of the authorities that are trusted, in PEM; those of the system if omitted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ca_file: Option<AbsolutePath>,
}

impl BackupPlace {
    /// Whether it is in a bucket.
    pub fn is_s3(&self) -> bool {
        self.0.starts_with(SCHEME)
    }
}

impl From<AbsolutePath> for BackupPlace {
    fn from(path: AbsolutePath) -> BackupPlace {
        BackupPlace(path.into())
    }
}

impl TryFrom<String> for BackupPlace {
    type Error = String;

    fn try_from(text: String) -> Result<BackupPlace, String> {
        let Some(rest) = text.strip_prefix(SCHEME) else {
            return match text.split_once("://") {
                Some(_) => Err(format!("'{}' is neither a directory nor s3://BUCKET[/PREFIX]", text.escape_debug())),
                None => AbsolutePath::try_from(text).map(BackupPlace::from),
            };
        };
        let rest = rest.strip_suffix('/').unwrap_or(rest);
        let is_plain = |part: &str| {
            !part.is_empty()
                && !part.starts_with('.')
                && part.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte))
        };
        match text.len() <= LENGTH_MAX && rest.split('/').all(is_plain) {
            true => Ok(BackupPlace(format!("{SCHEME}{rest}"))),
            false => Err(format!(
                "'{}' is not s3://BUCKET[/PREFIX]: parts between slashes have letters, digits, dashes, underscores and \
                 dots",
                text.escape_debug()
            )),
        }
    }
}

impl TryFrom<String> for ServerUrl {
    type Error = String;

    fn try_from(text: String) -> Result<ServerUrl, String> {
        let rest = text.strip_prefix("https://").or_else(|| text.strip_prefix("http://"));
        // No '@': a password has no place in an address.
        let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.:[]/%~".contains(&byte);
        let is_right = |rest: &str| {
            let first = rest.bytes().next().is_some_and(|byte| byte.is_ascii_alphanumeric() || byte == b'[');
            first && rest.bytes().all(is_plain)
        };
        match text.len() <= LENGTH_MAX && rest.is_some_and(is_right) {
            true => Ok(ServerUrl(text)),
            // It may have a password, so it is not repeated.
            false => Err("the address of a server is https://HOST[:PORT] or http://HOST[:PORT]".into()),
        }
    }
}

impl TryFrom<String> for Region {
    type Error = String;

    fn try_from(text: String) -> Result<Region, String> {
        let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-';
        match (1..=REGION_MAX).contains(&text.len()) && text.bytes().all(is_plain) {
            true => Ok(Region(text)),
            false => Err(format!("a region has 1 to {REGION_MAX} letters, digits and dashes, as in eu-central-1")),
        }
    }
}

checked!(
    BackupPlace,
    1,
    4095,
    r"^(/[^\x00-\x1f\x7f-\x9f]*|s3:/(/[A-Za-z0-9_-][A-Za-z0-9._-]*)+/?)$",
    "The place of a backup target: a directory of the host, or s3://BUCKET[/PREFIX]."
);
checked!(
    ServerUrl,
    1,
    LENGTH_MAX,
    r"^https?://[A-Za-z0-9\[][A-Za-z0-9._:\[\]/%~-]*$",
    "The address of a server: https://HOST[:PORT] or http://HOST[:PORT]."
);
checked!(Region, 1, REGION_MAX, "^[A-Za-z0-9-]+$", "The name of a region.");

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn a_place_is_a_directory_or_a_prefix_of_a_bucket() {
        for (text, right) in
            [("/mnt//backup/", "/mnt/backup"), ("s3://b", "s3://b"), ("s3://b.c/a/d_e/", "s3://b.c/a/d_e")]
        {
            assert_eq!(text.parse::<BackupPlace>().unwrap().as_str(), right);
        }
        for wrong in
            ["", "mnt", "s3://", "s3:///a", "s3://b//a", "s3://b/../a", "s3://b/ä", "s3://b?x=y", "http://b", "/a/../b"]
        {
            assert!(wrong.parse::<BackupPlace>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn an_address_has_no_password() {
        for right in ["https://s3.example.org", "http://[::1]:9000", "https://h:1/base"] {
            assert!(right.parse::<ServerUrl>().is_ok(), "{right}");
        }
        for wrong in ["", "h", "ftp://h", "https://", "https://-h", "https://me:secret@h", "https://h?a", "https://h\n"]
        {
            let refused = wrong.parse::<ServerUrl>().unwrap_err();
            assert!(!refused.contains("secret"), "{refused}");
        }
        assert!("eu-central-1".parse::<Region>().is_ok());
        for wrong in ["", "a b", "--x y", &"a".repeat(65)] {
            assert!(wrong.parse::<Region>().is_err(), "{wrong}");
        }
    }
}
