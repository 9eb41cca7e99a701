//! How a snapshot is taken, in requests and answers.

use std::fmt;

use serde::{Deserialize, Serialize};

/// How a snapshot is taken.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Method {
    /// By reflink where the leaf and the new file are raw and the file system can, else by a chain.
    #[default]
    Auto,
    /// The new file shares all blocks with the file of the disk, which stays in use.
    Reflink,
    /// The new file is the leaf; the old one its parent.
    Chain,
}

impl fmt::Display for Method {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Method::Auto => "auto",
            Method::Reflink => "reflink",
            Method::Chain => "chain",
        })
    }
}
