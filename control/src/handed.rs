//! Descriptors that are passed to a process before it begins (`--handed`): a message for each, and one that ends them.
//!
//! It knows nothing about sockets. Invariant: a [`Message`] is one of four kinds, and its path is absolute.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// A message. A descriptor comes with each but the last.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Fields", into = "Fields")]
pub enum Message {
    /// A file.
    File {
        /// The path by which the command line names it.
        path: PathBuf,
        /// Whether it is open for writing too.
        write: bool,
    },
    /// A listening socket.
    Socket {
        /// Whom it is for.
        listens: Listens,
        /// Where it listens.
        path: PathBuf,
    },
    /// Something of Xen.
    Xen(Lent),
    /// That is all.
    End,
}

/// The use of a listening socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Listens {
    /// `--vhost-user`.
    VhostUser,
    /// `--nbd`.
    Nbd,
    /// `--control`.
    Control,
}

/// The use of a descriptor for a Xen guest's disk (`--xen`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Lent {
    /// `/dev/xen/gntdev`.
    Grants,
    /// `/dev/xen/evtchn`.
    EventChannels,
    /// A xenstore connection, for the disk's nodes.
    Store,
    /// Another xenstore connection, for events about domains.
    Domains,
    /// A file for statistics, `vbd3-…/statistics`; it may be missing.
    Statistics,
    /// Another, `td3-…/vbd-…`.
    StatisticsByPid,
}

/// A message, as it is written.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Fields {
    #[serde(skip_serializing_if = "Option::is_none")]
    file: Option<PathBuf>,
    #[serde(skip_serializing_if = "Option::is_none")]
    write: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    listen: Option<Listens>,
    #[serde(skip_serializing_if = "Option::is_none")]
    path: Option<PathBuf>,
    #[serde(skip_serializing_if = "Option::is_none")]
    xen: Option<Lent>,
    #[serde(skip_serializing_if = "Option::is_none")]
    end: Option<bool>,
}

impl TryFrom<Fields> for Message {
    type Error = String;

    fn try_from(fields: Fields) -> Result<Message, String> {
        let message = match fields {
            Fields { file: Some(path), write: Some(write), listen: None, path: None, xen: None, end: None } => {
                Message::File { path, write }
            }
            Fields { file: None, write: None, listen: Some(listens), path: Some(path), xen: None, end: None } => {
                Message::Socket { listens, path }
            }
            Fields { file: None, write: None, listen: None, path: None, xen: Some(lent), end: None } => {
                Message::Xen(lent)
            }
            Fields { file: None, write: None, listen: None, path: None, xen: None, end: Some(true) } => Message::End,
            _ => {
                let why = "it must have 'file' and 'write', or 'listen' and 'path', or 'xen', or 'end' set to true";
                return Err(why.into());
            }
        };
        match &message {
            Message::File { path, .. } | Message::Socket { path, .. } if !path.is_absolute() => {
                Err(format!("'{}' must be an absolute path", path.display()))
            }
            _ => Ok(message),
        }
    }
}

impl From<Message> for Fields {
    fn from(message: Message) -> Fields {
        let none = Fields::default();
        match message {
            Message::File { path, write } => Fields { file: Some(path), write: Some(write), ..none },
            Message::Socket { listens, path } => Fields { listen: Some(listens), path: Some(path), ..none },
            Message::Xen(lent) => Fields { xen: Some(lent), ..none },
            Message::End => Fields { end: Some(true), ..none },
        }
    }
}
