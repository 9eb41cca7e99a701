//! The client's side of the negotiation: fixed newstyle, TLS, structured replies, one metadata context, then GO.
//!
//! It knows nothing about requests. Invariants: an [`Export`] that it returns has been checked: its size and block
//! sizes are possible, and it has what this client needs; with TLS, nothing else is sent or accepted before that.

use zerocopy::IntoBytes;

use super::broken::Broken;
use super::incoming::{Incoming, u16_at, u32_at, u64_at};
use super::name::Canonical;
use crate::uri::TOKEN;
use crate::wire::{self, OptionHeader};

/// The export as the server describes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Export {
    /// Its size in bytes.
    pub size: u64,
    /// Whether the server refuses writes.
    pub read_only: bool,
    /// Whether it has FLUSH.
    pub can_flush: bool,
    /// Whether it has WRITE_ZEROES.
    pub can_zero: bool,
    /// The unit of offsets and lengths in bytes: 1 if the server does not say.
    pub block_min: u32,
    /// The maximum payload of a request.
    pub block_max: u32,
    /// Replies are structured.
    pub(super) structured: bool,
    /// The identifier of the context that was negotiated, if the server has it.
    pub(super) allocation: Option<u32>,
}

/// Maximum length of a reply to an option: the longest is an error message or a name, and a header.
const REPLY_MAX: usize = 2 * wire::STRING_MAX;
/// Maximum number of replies to one option: we ask for three pieces of information, a server may add some.
const REPLIES_MAX: usize = 64;
/// "Size constraints": the maximum payload where the server does not say.
const BLOCK_MAX: u32 = 32 << 20;
/// "Size constraints": the minimum block size is at most this.
const BLOCK_MIN_MAX: u32 = 64 << 10;
/// The unit of a disk.
const SECTOR: u64 = 512;
/// "Metadata contexts".
pub(super) const ALLOCATION: &str = "base:allocation";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    Greeting,
    Tls,
    Structured,
    Context,
    Go,
}

/// What has been negotiated.
#[derive(Debug)]
pub(super) enum Outcome {
    /// TLS begins now; then [`Negotiation::secured`] continues.
    StartTls,
    /// The end.
    Export(Export, Canonical),
}

/// A negotiation.
#[derive(Debug)]
pub(super) struct Negotiation {
    name: String,
    context: String,
    /// TLS is required.
    tls: bool,
    step: Step,
    /// Replies to the current option.
    replies: usize,
    structured: bool,
    allocation: Option<u32>,
    /// From NBD_INFO_EXPORT: size and transmission flags.
    export: Option<(u64, u16)>,
    /// From NBD_INFO_BLOCK_SIZE: minimum and maximum.
    blocks: Option<(u32, u32)>,
    /// From NBD_INFO_NAME.
    canonical: Canonical,
}

impl Negotiation {
    pub(super) fn new(name: &str, context: &str, tls: bool) -> Negotiation {
        Negotiation {
            name: name.to_owned(),
            context: context.to_owned(),
            tls,
            step: Step::Greeting,
            replies: 0,
            structured: false,
            allocation: None,
            export: None,
            blocks: None,
            canonical: Canonical::default(),
        }
    }

    /// Continues, through TLS.
    pub(super) fn secured(&mut self, out: &mut Vec<u8>) {
        self.option(Step::Structured, out);
    }

    /// Consumes what has arrived, and appends what is to be sent.
    pub(super) fn receive(&mut self, incoming: &mut Incoming, out: &mut Vec<u8>) -> Result<Option<Outcome>, Broken> {
        loop {
            if self.step == Step::Greeting {
                let Some(greeting) = incoming.take(size_of::<wire::Greeting>()) else { return Ok(None) };
                greet(greeting, out)?;
                self.option(if self.tls { Step::Tls } else { Step::Structured }, out);
                continue;
            }
            let Some(header) = incoming.peek(size_of::<wire::OptionReply>()) else { return Ok(None) };
            let (kind, len) = self.header(header)?;
            let Some(reply) = incoming.peek(size_of::<wire::OptionReply>() + len) else { return Ok(None) };
            let payload = reply.get(size_of::<wire::OptionReply>()..).unwrap_or_default().to_vec();
            // It is there: it was peeked at.
            incoming.take(size_of::<wire::OptionReply>() + len);
            if let Some(outcome) = self.reply(kind, &payload, out)? {
                return Ok(Some(outcome));
            }
        }
    }

    /// Checks the header of a reply; returns its type, and the length of its payload.
    fn header(&self, header: &[u8]) -> Result<(u32, usize), Broken> {
        let wrong = Broken::Negotiation;
        if u64_at(header, 0) != Some(wire::OPTION_REPLY_MAGIC) {
            return Err(wrong("a reply to an option has the wrong magic number"));
        }
        if u32_at(header, 8) != Some(self.number()) {
            return Err(wrong("a reply is to another option than the one sent"));
        }
        let len = u32_at(header, 16).and_then(|len| usize::try_from(len).ok()).filter(|&len| len <= REPLY_MAX);
        let len = len.ok_or(wrong("a reply to an option is longer than any can be"))?;
        Ok((u32_at(header, 12).unwrap_or_default(), len))
    }

    fn number(&self) -> u32 {
        match self.step {
            Step::Tls => wire::OPT_STARTTLS,
            Step::Greeting | Step::Structured => wire::OPT_STRUCTURED_REPLY,
            Step::Context => wire::OPT_SET_META_CONTEXT,
            Step::Go => wire::OPT_GO,
        }
    }

    /// Sends the option of a step.
    fn option(&mut self, step: Step, out: &mut Vec<u8>) {
        self.step = step;
        self.replies = 0;
        let mut payload = Vec::new();
        let string = |payload: &mut Vec<u8>, text: &str| {
            payload.extend_from_slice(&wire::length(text.as_bytes()).to_be_bytes());
            payload.extend_from_slice(text.as_bytes());
        };
        match step {
            Step::Greeting | Step::Tls | Step::Structured => {}
            Step::Context => {
                string(&mut payload, &self.name);
                payload.extend_from_slice(&1u32.to_be_bytes());
                string(&mut payload, &self.context);
            }
            Step::Go => {
                string(&mut payload, &self.name);
                payload.extend_from_slice(&2u16.to_be_bytes());
                payload.extend_from_slice(&wire::INFO_BLOCK_SIZE.to_be_bytes());
                payload.extend_from_slice(&wire::INFO_NAME.to_be_bytes());
            }
        }
        let header = OptionHeader {
            magic: wire::OPTION_MAGIC.into(),
            option: self.number().into(),
            len: wire::length(&payload).into(),
        };
        out.extend_from_slice(header.as_bytes());
        out.extend_from_slice(&payload);
    }

    fn reply(&mut self, kind: u32, payload: &[u8], out: &mut Vec<u8>) -> Result<Option<Outcome>, Broken> {
        self.replies += 1;
        if self.replies > REPLIES_MAX {
            return Err(Broken::Negotiation("an option has more replies than any can have"));
        }
        match (self.step, kind) {
            (_, wire::REP_ERR_TLS_REQD) => return Err(Broken::TlsRequired),
            (Step::Tls, wire::REP_ACK) => return Ok(Some(Outcome::StartTls)),
            (Step::Tls, kind) if kind & wire::REP_IS_ERROR != 0 => {
                return Err(Broken::TlsRefused(refusal(kind, payload, "it has none")));
            }
            (Step::Greeting | Step::Structured, wire::REP_ACK) => {
                self.structured = true;
                self.option(Step::Context, out);
            }
            (Step::Structured, kind) if kind & wire::REP_IS_ERROR != 0 => self.option(Step::Go, out),
            (Step::Context, wire::REP_META_CONTEXT) => self.context(payload)?,
            (Step::Context, wire::REP_ACK) => self.option(Step::Go, out),
            (Step::Context, kind) if kind & wire::REP_IS_ERROR != 0 => {
                self.allocation = None;
                self.option(Step::Go, out);
            }
            (Step::Go, wire::REP_INFO) => self.info(payload)?,
            (Step::Go, wire::REP_ACK) => {
                let export = self.export()?;
                return Ok(Some(Outcome::Export(export, self.canonical.clone())));
            }
            (Step::Go, kind) if kind & wire::REP_IS_ERROR != 0 => {
                return Err(Broken::Refused(refusal(kind, payload, "it does not exist")));
            }
            _ => return Err(Broken::Negotiation("an option has a reply of the wrong type")),
        }
        Ok(None)
    }

    fn context(&mut self, payload: &[u8]) -> Result<(), Broken> {
        let (Some(id), Some(name)) = (u32_at(payload, 0), payload.get(4..)) else {
            return Err(Broken::Negotiation("a metadata context has no name"));
        };
        if name != self.context.as_bytes() || self.allocation.is_some() {
            return Err(Broken::Negotiation("a metadata context was not requested"));
        }
        self.allocation = Some(id);
        Ok(())
    }

    fn info(&mut self, payload: &[u8]) -> Result<(), Broken> {
        let short = Broken::Negotiation("information about the export has the wrong length");
        match u16_at(payload, 0) {
            Some(wire::INFO_EXPORT) => {
                let found = u64_at(payload, 2).zip(u16_at(payload, 10)).filter(|_| payload.len() == 12);
                self.export = Some(found.ok_or(short)?);
            }
            Some(wire::INFO_BLOCK_SIZE) => {
                let found = u32_at(payload, 2).zip(u32_at(payload, 10)).filter(|_| payload.len() == 14);
                self.blocks = Some(found.ok_or(short)?);
            }
            Some(wire::INFO_NAME) => self.canonical = Canonical::of(payload.get(2..).unwrap_or_default()),
            // "NBD_REP_INFO": a client must ignore what it does not know.
            Some(_) => {}
            None => return Err(short),
        }
        Ok(())
    }

    /// Checks what the server has said about the export.
    fn export(&self) -> Result<Export, Broken> {
        let Some((size, flags)) = self.export else {
            return Err(Broken::Negotiation("the export has no size"));
        };
        let (block_min, block_max) = self.blocks.unwrap_or((1, BLOCK_MAX));
        if !block_min.is_power_of_two() || block_min > BLOCK_MIN_MAX || block_max < block_min {
            return Err(Broken::Negotiation("the block sizes are impossible"));
        }
        let unit = u64::from(block_min).max(SECTOR);
        if size % unit != 0 || size > i64::MAX.unsigned_abs() {
            return Err(Broken::Unusable(format!(
                "its size of {size} bytes is not a multiple of {unit}, or too large"
            )));
        }
        if u64::from(block_max) < SECTOR {
            return Err(Broken::Unusable(format!("its requests are limited to {block_max} bytes")));
        }
        let has = |flag| flags & wire::HAS_FLAGS != 0 && flags & flag != 0;
        Ok(Export {
            size,
            read_only: has(wire::READ_ONLY),
            can_flush: has(wire::SEND_FLUSH),
            can_zero: has(wire::SEND_WRITE_ZEROES),
            block_min,
            block_max,
            structured: self.structured,
            allocation: self.allocation,
        })
    }
}

impl Export {
    /// Whether the server describes which ranges are holes.
    pub fn has_allocation(&self) -> bool {
        self.structured && self.allocation.is_some()
    }

    /// Fails if work that was begun on `self` cannot continue on `next`, the export on a later connection.
    pub(super) fn check_same(&self, next: &Export) -> Result<(), Broken> {
        let changed = |what: String| Err(Broken::Changed(what));
        if self.size != next.size {
            return changed(format!("it had {} bytes and has {} now", self.size, next.size));
        }
        if self.read_only != next.read_only {
            return changed(format!("it was {} and is {} now", access(self.read_only), access(next.read_only)));
        }
        if self.can_flush != next.can_flush || self.can_zero && !next.can_zero {
            return changed("it has lost a command that it had, or got FLUSH".to_owned());
        }
        match next.block_min > self.block_min || next.block_max < self.block_max {
            true => changed("its block sizes are narrower than they were".to_owned()),
            false => Ok(()),
        }
    }
}

fn access(read_only: bool) -> &'static str {
    if read_only { "read-only" } else { "writable" }
}

/// Checks the greeting, and sends our flags.
fn greet(greeting: &[u8], out: &mut Vec<u8>) -> Result<(), Broken> {
    let second = u64_at(greeting, 8);
    if u64_at(greeting, 0) != Some(wire::GREETING_MAGIC) {
        return Err(Broken::NotNbd);
    }
    let flags = u16_at(greeting, 16).unwrap_or_default();
    if second != Some(wire::OPTION_MAGIC) || flags & wire::FLAG_FIXED_NEWSTYLE == 0 {
        return Err(Broken::OldStyle);
    }
    let no_zeroes = if flags & wire::FLAG_NO_ZEROES != 0 { wire::CLIENT_NO_ZEROES } else { 0 };
    out.extend_from_slice(&(wire::CLIENT_FIXED_NEWSTYLE | no_zeroes).to_be_bytes());
    Ok(())
}

/// The reason that the server gives for an error; `unknown` is that of an option or export that it does not know.
fn refusal(kind: u32, payload: &[u8], unknown: &str) -> String {
    let said = String::from_utf8_lossy(payload);
    // The name of the export, which it may repeat, can have a token.
    let said = said.split(TOKEN).next().unwrap_or_default();
    let said: String = said.chars().filter(|c| !c.is_control()).take(200).collect();
    match (kind, said.is_empty()) {
        (_, false) => said,
        (wire::REP_ERR_UNKNOWN | wire::REP_ERR_UNSUP, true) => unknown.to_owned(),
        (_, true) => format!("error {}", kind & !wire::REP_IS_ERROR),
    }
}
