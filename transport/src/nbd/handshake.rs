//! The negotiation of one connection: processes options and produces replies, until the client is served or
//! disconnected.
//!
//! It does no I/O, and knows nothing about sockets and requests. Invariant: work and memory per connection are bounded
//! by [`OPTIONS_MAX`] options of at most [`OPTION_DATA_MAX`] bytes each.

use disk::size::in_memory;
use zerocopy::{FromBytes, IntoBytes};

use super::context::Contexts;
use super::error::ProtocolError;
use super::export::{Export, Negotiated, REQUEST_MAX};
use super::option::{ContextQuery, ExportQuery, Malformed};
use super::wire::{self, OptionHeader};

/// The maximum number of options. libnbd and QEMU send fewer than ten; a client that sends more than this is hostile.
pub(super) const OPTIONS_MAX: u32 = 64;
/// The maximum size of an option: twice an export name and a context name of the maximum length.
pub(super) const OPTION_DATA_MAX: usize = 16 << 10;

/// The result of processing one message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Progress {
    /// The message is incomplete.
    Incomplete,
    /// The message had this number of bytes, and negotiation continues.
    Negotiating(usize),
    /// The message had this number of bytes, and requests follow.
    Negotiated(usize, Negotiated),
    /// The message had this number of bytes, and whatever follows is TLS.
    StartTls(usize),
    /// The client aborted.
    Aborted,
}

/// The state of a negotiation.
#[derive(Debug, Default)]
pub(super) struct Handshake {
    pub(super) client: Option<ClientFlags>,
    pub(super) options: u32,
    pub(super) negotiated: Negotiated,
    pub(super) encryption: Encryption,
}

/// "TLS support": the server's mode of operation, and the state of the connection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Encryption {
    /// NOTLS: the server has no TLS.
    #[default]
    Unavailable,
    /// FORCEDTLS: nothing is negotiated before TLS.
    Required,
    /// The options are received through TLS.
    InForce,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct ClientFlags {
    pub(super) fixed: bool,
    pub(super) no_zeroes: bool,
}

/// The first bytes of a connection.
pub(super) fn greeting() -> Vec<u8> {
    let greeting = wire::Greeting {
        magic: wire::GREETING_MAGIC.into(),
        option_magic: wire::OPTION_MAGIC.into(),
        flags: (wire::FLAG_FIXED_NEWSTYLE | wire::FLAG_NO_ZEROES).into(),
    };
    greeting.as_bytes().to_vec()
}

impl Handshake {
    /// Processes one message from the front of `bytes`; appends replies to `out`.
    pub(super) fn step(&mut self, bytes: &[u8], export: &Export, out: &mut Vec<u8>) -> Result<Progress, ProtocolError> {
        let Some(client) = self.client else { return self.client_flags(bytes) };
        let Ok((header, rest)) = OptionHeader::read_from_prefix(bytes) else { return Ok(Progress::Incomplete) };
        if header.magic != wire::OPTION_MAGIC {
            return Err(ProtocolError::OptionMagic);
        }
        let len = in_memory(header.len.get().into());
        if len > OPTION_DATA_MAX {
            return Err(ProtocolError::OptionTooLong { option: header.option.get(), len: header.len.get() });
        }
        let Some(data) = rest.get(..len) else { return Ok(Progress::Incomplete) };
        self.options += 1;
        if self.options > OPTIONS_MAX {
            return Err(ProtocolError::OptionFlood);
        }
        let used = size_of::<OptionHeader>().saturating_add(len);
        self.option(client, header.option.get(), data, used, export, out)
    }

    /// "Newstyle negotiation": the client's first message is 32 bits of flags.
    fn client_flags(&mut self, bytes: &[u8]) -> Result<Progress, ProtocolError> {
        let Some((flags, _)) = bytes.split_first_chunk() else { return Ok(Progress::Incomplete) };
        let flags = u32::from_be_bytes(*flags);
        if flags & !(wire::CLIENT_FIXED_NEWSTYLE | wire::CLIENT_NO_ZEROES) != 0 {
            return Err(ProtocolError::ClientFlags(flags));
        }
        self.client = Some(ClientFlags {
            fixed: flags & wire::CLIENT_FIXED_NEWSTYLE != 0,
            no_zeroes: flags & wire::CLIENT_NO_ZEROES != 0,
        });
        Ok(Progress::Negotiating(size_of::<u32>()))
    }

    fn option(
        &mut self,
        client: ClientFlags,
        option: u32,
        data: &[u8],
        used: usize,
        export: &Export,
        out: &mut Vec<u8>,
    ) -> Result<Progress, ProtocolError> {
        let needs_tls = self.encryption == Encryption::Required;
        if option == wire::OPT_EXPORT_NAME {
            if needs_tls {
                return Err(ProtocolError::TlsRequired);
            }
            if self.negotiated.extended {
                return Err(ProtocolError::NotGo);
            }
            self.export_name(client, data, export, out)?;
            return Ok(Progress::Negotiated(used, self.negotiated));
        }
        // A client of the original newstyle cannot parse a reply to anything else.
        if !client.fixed {
            return Err(ProtocolError::NotFixed(option));
        }
        match option {
            wire::OPT_ABORT => {
                reply(out, option, wire::REP_ACK, &[]);
                return Ok(Progress::Aborted);
            }
            wire::OPT_STARTTLS => {
                if self.start_tls(data, out) {
                    return Ok(Progress::StartTls(used));
                }
            }
            _ if needs_tls => refuse(out, option, wire::REP_ERR_TLS_REQD, "the server requires TLS"),
            wire::OPT_GO => {
                if self.info(option, data, export, out) {
                    return Ok(Progress::Negotiated(used, self.negotiated));
                }
            }
            wire::OPT_INFO => {
                self.info(option, data, export, out);
            }
            wire::OPT_LIST => list(data, export, out),
            wire::OPT_STRUCTURED_REPLY | wire::OPT_EXTENDED_HEADERS => self.reply_style(option, data, out),
            wire::OPT_LIST_META_CONTEXT => self.list_contexts(data, export, out),
            wire::OPT_SET_META_CONTEXT => self.set_contexts(data, export, out),
            _ => refuse(out, option, wire::REP_ERR_UNSUP, "the option is not supported"),
        }
        Ok(Progress::Negotiating(used))
    }

    /// NBD_OPT_STARTTLS. Returns true if the option was acknowledged. Then everything negotiated before is forgotten:
    /// it may have been inserted by a third party.
    fn start_tls(&mut self, data: &[u8], out: &mut Vec<u8>) -> bool {
        let option = wire::OPT_STARTTLS;
        match self.encryption {
            Encryption::Unavailable => refuse(out, option, wire::REP_ERR_UNSUP, "the server has no TLS"),
            Encryption::InForce => refuse(out, option, wire::REP_ERR_INVALID, "TLS is in force already"),
            Encryption::Required if !data.is_empty() => {
                refuse(out, option, wire::REP_ERR_INVALID, "the option must have no data");
            }
            Encryption::Required => {
                reply(out, option, wire::REP_ACK, &[]);
                self.negotiated = Negotiated::default();
                self.encryption = Encryption::InForce;
                return true;
            }
        }
        false
    }

    /// NBD_OPT_EXPORT_NAME. It has no error reply: an unknown name ends the connection.
    fn export_name(
        &self,
        client: ClientFlags,
        name: &[u8],
        export: &Export,
        out: &mut Vec<u8>,
    ) -> Result<(), ProtocolError> {
        if !export.has_name(name) {
            return Err(ProtocolError::UnknownExport);
        }
        let header =
            wire::ExportNameReply { size: export.geometry.len.into(), flags: export.flags(self.negotiated).into() };
        out.extend_from_slice(header.as_bytes());
        if !client.no_zeroes {
            out.extend_from_slice(&[0; wire::EXPORT_NAME_ZEROES]);
        }
        Ok(())
    }

    /// NBD_OPT_INFO and NBD_OPT_GO. Returns true if the option was acknowledged.
    fn info(&self, option: u32, data: &[u8], export: &Export, out: &mut Vec<u8>) -> bool {
        let Ok(query) = ExportQuery::parse(data) else {
            refuse(out, option, wire::REP_ERR_INVALID, "the option's data is malformed");
            return false;
        };
        if !export.has_name(query.name) {
            refuse(out, option, wire::REP_ERR_UNKNOWN, "no export has this name");
            return false;
        }
        let payload = wire::ExportInfo {
            kind: wire::INFO_EXPORT.into(),
            size: export.geometry.len.into(),
            flags: export.flags(self.negotiated).into(),
        };
        reply(out, option, wire::REP_INFO, payload.as_bytes());
        // Sent unsolicited: a client that does not know the kind ignores it, others comply with it.
        let sizes = wire::BlockSizeInfo {
            kind: wire::INFO_BLOCK_SIZE.into(),
            minimum: export.block_minimum(query.wanted.contains(&wire::INFO_BLOCK_SIZE)).into(),
            preferred: export.block_preferred().into(),
            maximum: REQUEST_MAX.into(),
        };
        reply(out, option, wire::REP_INFO, sizes.as_bytes());
        if query.wanted.contains(&wire::INFO_NAME) {
            reply_text(out, option, wire::INFO_NAME, &export.name);
        }
        if query.wanted.contains(&wire::INFO_DESCRIPTION) && !export.description.is_empty() {
            reply_text(out, option, wire::INFO_DESCRIPTION, &export.description);
        }
        reply(out, option, wire::REP_ACK, &[]);
        true
    }

    /// NBD_OPT_STRUCTURED_REPLY and NBD_OPT_EXTENDED_HEADERS, which takes precedence and needs no other option before.
    fn reply_style(&mut self, option: u32, data: &[u8], out: &mut Vec<u8>) {
        if !data.is_empty() {
            return refuse(out, option, wire::REP_ERR_INVALID, "the option must have no data");
        }
        if option == wire::OPT_EXTENDED_HEADERS {
            self.negotiated.extended = true;
        } else if self.negotiated.extended {
            return refuse(out, option, wire::REP_ERR_EXT_HEADER_REQD, "extended headers have been negotiated");
        }
        self.negotiated.structured = true;
        reply(out, option, wire::REP_ACK, &[]);
    }

    /// NBD_OPT_LIST_META_CONTEXT. Without queries all contexts are listed; a namespace selects the contexts in it.
    fn list_contexts(&self, data: &[u8], export: &Export, out: &mut Vec<u8>) {
        let option = wire::OPT_LIST_META_CONTEXT;
        let Some(query) = self.context_query(option, data, export, out) else { return };
        for (context, name) in export.contexts() {
            let is_listed = |query: &&[u8]| context.is_listed_by(query, &name);
            if query.contexts.is_empty() || query.contexts.iter().any(is_listed) {
                reply_context(out, option, &name, 0);
            }
        }
        reply(out, option, wire::REP_ACK, &[]);
    }

    /// NBD_OPT_SET_META_CONTEXT. It replaces earlier contexts even if it fails.
    fn set_contexts(&mut self, data: &[u8], export: &Export, out: &mut Vec<u8>) {
        let option = wire::OPT_SET_META_CONTEXT;
        self.negotiated.contexts = Contexts::default();
        let Some(query) = self.context_query(option, data, export, out) else { return };
        for (context, name) in export.contexts().filter(|(_, name)| query.contexts.contains(&name.as_bytes())) {
            self.negotiated.contexts = self.negotiated.contexts.with(context);
            reply_context(out, option, &name, context.id());
        }
        reply(out, option, wire::REP_ACK, &[]);
    }

    fn context_query<'a>(
        &self,
        option: u32,
        data: &'a [u8],
        export: &Export,
        out: &mut Vec<u8>,
    ) -> Option<ContextQuery<'a>> {
        match ContextQuery::parse(data) {
            Err(Malformed) => refuse(out, option, wire::REP_ERR_INVALID, "the option's data is malformed"),
            Ok(_) if !self.negotiated.structured => {
                refuse(out, option, wire::REP_ERR_INVALID, "contexts require structured replies");
            }
            Ok(query) if !export.has_name(query.name) => {
                refuse(out, option, wire::REP_ERR_UNKNOWN, "no export has this name");
            }
            Ok(query) => return Some(query),
        }
        None
    }
}

/// NBD_OPT_LIST.
fn list(data: &[u8], export: &Export, out: &mut Vec<u8>) {
    if !data.is_empty() {
        return refuse(out, wire::OPT_LIST, wire::REP_ERR_INVALID, "the option must have no data");
    }
    let name = export.name.as_bytes();
    let mut payload = wire::length(name).to_be_bytes().to_vec();
    payload.extend_from_slice(name);
    payload.extend_from_slice(export.description.as_bytes());
    reply(out, wire::OPT_LIST, wire::REP_SERVER, &payload);
    reply(out, wire::OPT_LIST, wire::REP_ACK, &[]);
}

fn reply(out: &mut Vec<u8>, option: u32, kind: u32, data: &[u8]) {
    let header = wire::OptionReply {
        magic: wire::OPTION_REPLY_MAGIC.into(),
        option: option.into(),
        kind: kind.into(),
        len: wire::length(data).into(),
    };
    out.extend_from_slice(header.as_bytes());
    out.extend_from_slice(data);
}

fn reply_text(out: &mut Vec<u8>, option: u32, info: u16, text: &str) {
    let mut payload = info.to_be_bytes().to_vec();
    payload.extend_from_slice(text.as_bytes());
    reply(out, option, wire::REP_INFO, &payload);
}

fn reply_context(out: &mut Vec<u8>, option: u32, name: &str, id: u32) {
    let mut payload = id.to_be_bytes().to_vec();
    payload.extend_from_slice(name.as_bytes());
    reply(out, option, wire::REP_META_CONTEXT, &payload);
}

fn refuse(out: &mut Vec<u8>, option: u32, kind: u32, why: &str) {
    reply(out, option, kind, why.as_bytes());
}

#[cfg(test)]
mod test;
