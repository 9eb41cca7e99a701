//! Tokens: credentials for the API over TCP, where no kernel identifies the caller.

use std::fmt;
use std::str::FromStr;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use uuid::Uuid;

use crate::problem::Code;
use crate::{Name, Problem, Tag};

/// The prefix of every secret, so that secret scanners can recognize one in files.
const PREFIX: &str = "tapline_";
/// Bytes of a secret.
const LEN: usize = 32;

/// A token without its secret, of which the daemon keeps only a hash.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Token {
    /// Its identity.
    pub uuid: Uuid,
    /// A unique name that says what the token is for.
    pub name: Name,
    /// What its holder may do.
    pub role: Role,
    /// The tag of the objects that an operator may operate.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tag: Option<Tag>,
    /// Whether the token is read-only: its role is `reader`.
    pub read_only: bool,
    /// When the token was created.
    pub created: Timestamp,
    /// When the token expires, if it does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expires: Option<Timestamp>,
}

/// Creates a token.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct TokenCreate {
    /// Its identity; a random one if omitted.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "crate::value::chosen")]
    pub uuid: Option<Uuid>,
    /// A unique name that says what the token is for.
    #[serde(deserialize_with = "crate::value::given")]
    pub name: Name,
    /// What its holder may do; `admin` if omitted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub role: Option<Role>,
    /// The tag of the objects that an operator may operate.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "crate::value::given_if")]
    pub tag: Option<Tag>,
    /// Whether the token is read-only: the same as the role `reader`.
    #[serde(default)]
    pub read_only: bool,
    /// When the token expires; must be in the future.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expires: Option<Timestamp>,
}

/// What the holder of a token may do. Only root on the daemon's host may list, create and revoke tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Role {
    /// Everything.
    #[default]
    Admin,
    /// Reading; and plugging, unplugging, starting, pausing, stopping, resizing and taking snapshots of objects with a
    /// tag.
    Operator,
    /// Reading.
    Reader,
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Role::Admin => "admin",
            Role::Operator => "operator",
            Role::Reader => "reader",
        })
    }
}

impl TokenCreate {
    /// The role, if it is only one and has what it needs.
    pub fn role(&self) -> Result<Role, Problem> {
        let refused = |what: &str, field: &str| Err(Problem::new(Code::Invalid, what).field(field));
        match (self.role, self.read_only, &self.tag) {
            (Some(Role::Admin | Role::Operator), true, _) => {
                refused("a read-only token has the role reader", "read_only")
            }
            (Some(Role::Operator), _, None) => refused("an operator needs the tag of the objects it operates", "tag"),
            (Some(Role::Operator), _, Some(_)) => Ok(Role::Operator),
            (_, _, Some(_)) => refused("only an operator has a tag", "tag"),
            (Some(Role::Reader), _, None) | (None, true, None) => Ok(Role::Reader),
            (Some(Role::Admin) | None, false, None) => Ok(Role::Admin),
        }
    }
}

/// A new token with its secret, which cannot be retrieved again.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct TokenMade {
    /// The token.
    pub token: Token,
    /// The secret, to be sent as `Authorization: Bearer SECRET`.
    #[schema(value_type = String)]
    pub secret: Secret,
}

/// The secret of a token: `tapline_` and 64 hexadecimal digits, 256 bits. Debug output does not show it.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Secret(String);

impl Secret {
    /// A secret made of unpredictable bytes.
    pub fn new(random: [u8; LEN]) -> Secret {
        let digits: String = random.iter().map(|byte| format!("{byte:02x}")).collect();
        Secret(format!("{PREFIX}{digits}"))
    }

    /// The secret as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl TryFrom<String> for Secret {
    type Error = String;

    fn try_from(text: String) -> Result<Secret, String> {
        let digits = text.strip_prefix(PREFIX).unwrap_or_default();
        let is_digit = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
        // The invalid text is not repeated in the message: it may be another secret.
        match digits.len() == 2 * LEN && digits.bytes().all(is_digit) {
            true => Ok(Secret(text)),
            false => Err(format!("a token is {PREFIX} followed by {} hexadecimal digits", 2 * LEN)),
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
    fn only_well_formed_secrets_are_parsed() {
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
