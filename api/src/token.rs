//! Tokens: what lets somebody use the API over TCP, where no kernel says who asks.

use std::fmt;
use std::str::FromStr;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use uuid::Uuid;

use crate::Name;

/// What every secret begins with, so that programs that look for secrets in files know one.
const PREFIX: &str = "tapline_";
/// Bytes of a secret.
const LEN: usize = 32;

/// What is known of a token; of its secret, the daemon keeps only a hash.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Token {
    /// Its identity.
    pub uuid: Uuid,
    /// Whom or what it was made for; no two have the same.
    pub name: Name,
    /// Whether it only lets see, and change nothing.
    pub read_only: bool,
    /// When it was made.
    pub created: Timestamp,
    /// When it ends by itself, if it does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expires: Option<Timestamp>,
}

/// Makes a token.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct TokenCreate {
    /// Whom or what it is for; no two have the same.
    pub name: Name,
    /// Whether it only lets see, and change nothing.
    #[serde(default)]
    pub read_only: bool,
    /// When it is to end by itself: later than now.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expires: Option<Timestamp>,
}

/// A token that was made, with its secret: nobody can be told that again.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct TokenMade {
    /// What is known of it.
    pub token: Token,
    /// What is sent as `Authorization: Bearer SECRET`.
    #[schema(value_type = String)]
    pub secret: Secret,
}

/// The secret of a token: `tapline_` and 64 hexadecimal digits, 256 bits. It is not shown where things are shown for
/// debugging.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Secret(String);

impl Secret {
    /// Of bytes that nobody can guess.
    pub fn new(random: [u8; LEN]) -> Secret {
        let digits: String = random.iter().map(|byte| format!("{byte:02x}")).collect();
        Secret(format!("{PREFIX}{digits}"))
    }

    /// As it is sent.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl TryFrom<String> for Secret {
    type Error = String;

    fn try_from(text: String) -> Result<Secret, String> {
        let digits = text.strip_prefix(PREFIX).unwrap_or_default();
        let is_digit = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
        // What it is instead is not repeated: it may be another secret.
        match digits.len() == 2 * LEN && digits.bytes().all(is_digit) {
            true => Ok(Secret(text)),
            false => Err(format!("a token is {PREFIX} and {} hexadecimal digits", 2 * LEN)),
        }
    }
}

impl From<Secret> for String {
    fn from(secret: Secret) -> String {
        secret.0
    }
}

impl FromStr for Secret {
    type Err = String;

    fn from_str(text: &str) -> Result<Secret, String> {
        text.to_owned().try_into()
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret")
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn a_secret_is_read_as_it_was_written_and_nothing_else_is_one() {
        let secret = Secret::new([0xa7; LEN]);
        assert_eq!(secret.as_str().parse(), Ok(secret.clone()));
        for wrong in ["", "tapline_", "tapline_a7", &secret.as_str().to_uppercase(), &format!("{}0", secret.as_str())] {
            let why = wrong.parse::<Secret>().unwrap_err();
            assert!(wrong.is_empty() || !why.contains(wrong) || wrong == PREFIX, "{why}");
        }
    }

    #[test]
    fn a_secret_is_not_shown_for_debugging() {
        assert!(!format!("{:?}", Secret::new([0xa7; LEN])).contains("a7"));
    }
}
