//! A disk process, to which the negotiation of a client is repeated as soon as the client has named an export.
//!
//! It knows the only export of the process, which has the empty name too, and no client.

use std::io::{self, ErrorKind};

use nbd::wire::{self, OptionHeader};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use uuid::Uuid;
use zerocopy::{FromBytes, IntoBytes};

use crate::reader::Reader;

/// Maximum bytes of data of an option and of a reply to one: a name and several queries, each up to
/// [`wire::STRING_MAX`].
pub const DATA_MAX: u32 = 16 << 10;

/// The shape of replies to requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Replies {
    /// As of the first version of the protocol.
    Simple,
    /// NBD_OPT_STRUCTURED_REPLY.
    Structured,
    /// NBD_OPT_EXTENDED_HEADERS.
    Extended,
}

/// The contexts that a client has set: they count until requests begin, or until it sets others.
pub struct Contexts {
    /// The name of the export, as the client gave it.
    pub name: Vec<u8>,
    /// The data of the option behind the name.
    pub queries: Vec<u8>,
    /// The snapshots whose dirty bitmaps are among them.
    pub since: Vec<Uuid>,
    /// The types and data of the replies, with the numbers of the contexts.
    pub replies: Vec<(u32, Vec<u8>)>,
}

/// Connects to a disk process, and negotiates there what the client has negotiated here.
pub async fn connect(
    reader: &Reader,
    flags: u32,
    replies: Replies,
    contexts: Option<&Contexts>,
) -> io::Result<UnixStream> {
    let mut process = UnixStream::connect(&reader.socket).await?;
    let mut greeting = [0; size_of::<wire::Greeting>()];
    process.read_exact(&mut greeting).await?;
    process.write_all(&flags.to_be_bytes()).await?;
    let shape = match replies {
        Replies::Simple => None,
        Replies::Structured => Some(wire::OPT_STRUCTURED_REPLY),
        Replies::Extended => Some(wire::OPT_EXTENDED_HEADERS),
    };
    if let Some(option) = shape {
        send_option(&mut process, option, &[]).await?;
        if receive_reply(&mut process, option).await?.0 != wire::REP_ACK {
            return Err(broken("the disk process does not have the shape of replies that the daemon has promised"));
        }
    }
    if let Some(Contexts { queries, replies, .. }) = contexts {
        if ask(&mut process, wire::OPT_SET_META_CONTEXT, queries).await? != *replies {
            return Err(broken("the disk process has other contexts than before"));
        }
    }
    Ok(process)
}

/// Sends an option about the only export of a disk process; returns the replies, the last of which is an
/// acknowledgement or an error.
pub async fn ask(process: &mut UnixStream, option: u32, rest: &[u8]) -> io::Result<Vec<(u32, Vec<u8>)>> {
    // It has the empty name too.
    send_option(process, option, &[&0_u32.to_be_bytes(), rest].concat()).await?;
    let mut replies = Vec::new();
    loop {
        let reply = receive_reply(process, option).await?;
        let is_last = reply.0 == wire::REP_ACK || reply.0 & wire::REP_IS_ERROR != 0;
        replies.push(reply);
        if is_last {
            return Ok(replies);
        }
    }
}

/// Sends an option with its data.
pub async fn send_option(process: &mut UnixStream, option: u32, data: &[u8]) -> io::Result<()> {
    let header =
        OptionHeader { magic: wire::OPTION_MAGIC.into(), option: option.into(), len: wire::length(data).into() };
    process.write_all(&[header.as_bytes(), data].concat()).await
}

/// Receives a reply of a disk process to an option: its kind and its data.
async fn receive_reply(process: &mut UnixStream, option: u32) -> io::Result<(u32, Vec<u8>)> {
    let mut header = [0; size_of::<wire::OptionReply>()];
    process.read_exact(&mut header).await?;
    let header = wire::OptionReply::read_from_bytes(&header).map_err(|_| broken("a reply has no header"))?;
    if header.magic != wire::OPTION_REPLY_MAGIC || header.option != option || header.len > DATA_MAX {
        return Err(broken("the disk process replies to another option, or at length"));
    }
    let mut data = vec![0; header.len.get() as usize];
    process.read_exact(&mut data).await?;
    Ok((header.kind.get(), data))
}

/// The error of a side that violates the protocol.
pub fn broken(what: &'static str) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, what)
}
