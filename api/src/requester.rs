//! Requester: who requested a change.

use std::fmt;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::Name;

/// Who requested a change.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(tag = "type", rename_all = "kebab-case")]
pub enum Requester {
    /// A user of the host, over the Unix socket, as the kernel says.
    User {
        /// The user's number.
        uid: u32,
        /// The user's name, if the host knew one.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        name: Option<String>,
    },
    /// The holder of a token.
    Token {
        /// The token's name.
        name: Name,
    },
    /// The daemon itself: a schedule, an autostart, the end of a machine.
    Daemon,
}

impl fmt::Display for Requester {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Requester::User { name: Some(name), .. } => write!(f, "user {name}"),
            Requester::User { uid, name: None } => write!(f, "user {uid}"),
            Requester::Token { name } => write!(f, "token {name}"),
            Requester::Daemon => f.write_str("daemon"),
        }
    }
}
