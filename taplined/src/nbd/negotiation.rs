//! A client of the NBD address: from its greeting to the export that it names, and the end of its connection.
//!
//! The daemon answers options that concern no export by itself, and remembers them; those that name one are sent on to
//! the disk process, which the same options were sent to first. Invariants: over TCP nothing but STARTTLS is served
//! before TLS, and no byte that arrived before it counts after it; no export is opened before the caller may have it; a
//! client has no more memory here than one option and one piece of data in each direction.

use std::io::{self, ErrorKind};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use api::{Code, Problem, Requester, Secret, Vdi, VdiState};
use nbd::uri::TOKEN;
use nbd::wire::{self, OptionHeader};
use repo::View;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, BufReader};
use tokio::net::UnixStream;
use tokio::time::Instant;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use uuid::Uuid;
use zerocopy::{FromBytes, IntoBytes};

use super::contexts::{self, split_string};
use super::process::{Contexts, DATA_MAX, Replies, ask, broken, connect, send_option};
use crate::daemon::Daemon;
use crate::http::{Caller, UnauthenticatedSlot, must_operate_vdi};
use crate::reader::Reader;

/// Time limit for each message of a client, to it and from it, before requests begin.
const PATIENCE: Duration = Duration::from_secs(30);

/// Time for a client over TCP to name an export with a valid token, for all that comes before.
const ANONYMOUS: Duration = Duration::from_secs(60);

/// Bytes forwarded at a time.
const PIECE: usize = 256 << 10;

/// A connection, with TLS or without.
pub trait Stream: AsyncRead + AsyncWrite + Unpin + Send {}

impl<T: AsyncRead + AsyncWrite + Unpin + Send> Stream for T {}

/// How a client proves that it may read.
pub enum Admission {
    /// It is known.
    Granted(Caller),
    /// By a token behind the name of an export, once the connection is encrypted.
    ByToken {
        /// The settings of TLS.
        tls: Arc<ServerConfig>,
        /// Where it connects from.
        peer: SocketAddr,
        /// Its place among the connections without a token.
        _slot: UnauthenticatedSlot,
    },
}

/// A connected client.
pub struct Client {
    stream: Box<dyn Stream>,
    admission: Admission,
    is_encrypted: bool,
    /// By when it must have named an export; `None` once it has, and for a user of this host.
    anonymous_until: Option<Instant>,
    flags: u32,
    replies: Replies,
    contexts: Option<Contexts>,
    export: Option<Export>,
}

/// The export that a client has named last.
struct Export {
    /// The name, with the token.
    name: Vec<u8>,
    caller: Caller,
    vdi: Uuid,
    label: String,
    /// The canonical name: that of a snapshot is its UUID. Another VDI may have other contents when it is plugged
    /// again, and then has another name: a client that connects again would mix them.
    canonical: Uuid,
    /// The snapshot to which the list of dirty bitmaps is restricted.
    only: Option<Uuid>,
    /// The snapshots whose dirty bitmaps the process offers, as far as all changes since are known.
    since: Vec<Uuid>,
    process: UnixStream,
    _reader: Reader,
}

/// The next step of a connection.
enum Next {
    Negotiate,
    Transmit,
    Disconnect,
}

impl Client {
    /// A client that has just connected.
    pub fn new(stream: Box<dyn Stream>, admission: Admission) -> Client {
        let must_hurry = matches!(admission, Admission::ByToken { .. });
        Client {
            stream,
            admission,
            is_encrypted: false,
            anonymous_until: must_hurry.then(|| Instant::now() + ANONYMOUS),
            flags: 0,
            replies: Replies::Simple,
            contexts: None,
            export: None,
        }
    }

    /// Serves the client until it disconnects or its token ends.
    pub async fn serve(mut self, daemon: &Daemon) -> io::Result<()> {
        self.greet().await?;
        loop {
            let caller = self.export.as_ref().map(|export| export.caller.clone());
            let ended = async move {
                match caller {
                    Some(caller) => caller.ended().await,
                    None => std::future::pending().await,
                }
            };
            let next = tokio::select! {
                next = self.option(daemon) => next?,
                () = ended => return Ok(()),
            };
            match next {
                Next::Negotiate => {}
                Next::Transmit => return self.transmit().await,
                Next::Disconnect => return timely(self.limit(), self.stream.shutdown()).await,
            }
        }
    }

    /// By when the next message must have been received or sent.
    fn limit(&self) -> Instant {
        let next = Instant::now() + PATIENCE;
        self.anonymous_until.map_or(next, |until| until.min(next))
    }

    async fn greet(&mut self) -> io::Result<()> {
        let flags = wire::FLAG_FIXED_NEWSTYLE | wire::FLAG_NO_ZEROES;
        let greeting = wire::Greeting {
            magic: wire::GREETING_MAGIC.into(),
            option_magic: wire::OPTION_MAGIC.into(),
            flags: flags.into(),
        };
        timely(self.limit(), self.stream.write_all(greeting.as_bytes())).await?;
        let mut flags = [0; 4];
        self.read(&mut flags).await?;
        self.flags = u32::from_be_bytes(flags);
        // Each option but one needs the fixed style, and all clients of the last ten years have it.
        match self.flags & wire::CLIENT_FIXED_NEWSTYLE {
            0 => Err(broken("the client does not support fixed newstyle")),
            _ => Ok(()),
        }
    }

    /// Reads exactly these bytes, and no byte behind them: those may belong to TLS.
    async fn read(&mut self, bytes: &mut [u8]) -> io::Result<()> {
        timely(self.limit(), self.stream.read_exact(bytes)).await.map(drop)
    }

    /// Handles the next option.
    async fn option(&mut self, daemon: &Daemon) -> io::Result<Next> {
        let mut header = [0; size_of::<OptionHeader>()];
        self.read(&mut header).await?;
        let header = OptionHeader::read_from_bytes(&header).map_err(|_| broken("an option has no header"))?;
        if header.magic != wire::OPTION_MAGIC || header.len > DATA_MAX {
            return Err(broken("an option without its magic number, or with too much data"));
        }
        let (option, mut data) = (header.option.get(), vec![0; header.len.get() as usize]);
        self.read(&mut data).await?;
        let is_open = self.is_encrypted || matches!(self.admission, Admission::Granted(_));
        match option {
            wire::OPT_ABORT => self.answer(option, wire::REP_ACK, &[]).await.map(|()| Next::Disconnect),
            wire::OPT_STARTTLS => self.start_tls(&data).await.map(|()| Next::Negotiate),
            wire::OPT_EXPORT_NAME if !is_open => Ok(Next::Disconnect),
            _ if !is_open => self.refuse(option, wire::REP_ERR_TLS_REQD, "this address is served with TLS only").await,
            wire::OPT_STRUCTURED_REPLY | wire::OPT_EXTENDED_HEADERS if data.is_empty() => {
                self.set_replies(option).await
            }
            wire::OPT_LIST if data.is_empty() => self.list(daemon).await,
            wire::OPT_EXPORT_NAME => match self.open(daemon, &data, self.wanted(&data)).await {
                Ok(export) => send_option(&mut export.process, option, &[]).await.map(|()| Next::Transmit),
                Err(problem) => {
                    tracing::debug!("an export was refused: {problem}");
                    Ok(Next::Disconnect)
                }
            },
            wire::OPT_INFO | wire::OPT_GO | wire::OPT_LIST_META_CONTEXT | wire::OPT_SET_META_CONTEXT => {
                self.forward(daemon, option, &data).await
            }
            wire::OPT_STRUCTURED_REPLY | wire::OPT_EXTENDED_HEADERS | wire::OPT_LIST => {
                self.refuse(option, wire::REP_ERR_INVALID, "this option has no data").await
            }
            _ => self.refuse(option, wire::REP_ERR_UNSUP, "this option is not supported").await,
        }
    }

    /// Begins TLS. What was negotiated before is forgotten ("TLS support").
    async fn start_tls(&mut self, data: &[u8]) -> io::Result<()> {
        let option = wire::OPT_STARTTLS;
        let tls = match &self.admission {
            Admission::ByToken { tls, .. } if !self.is_encrypted && data.is_empty() => tls.clone(),
            Admission::ByToken { .. } => {
                return self
                    .refuse(option, wire::REP_ERR_INVALID, "TLS is in use, or the option has data")
                    .await
                    .map(drop);
            }
            Admission::Granted(_) => {
                return self
                    .refuse(option, wire::REP_ERR_POLICY, "the Unix socket is served without TLS")
                    .await
                    .map(drop);
            }
        };
        self.answer(option, wire::REP_ACK, &[]).await?;
        let plain = std::mem::replace(&mut self.stream, Box::new(tokio::io::empty()));
        let encrypted = timely(self.limit(), TlsAcceptor::from(tls).accept(plain));
        self.stream = Box::new(encrypted.await?);
        (self.is_encrypted, self.replies) = (true, Replies::Simple);
        Ok(())
    }

    async fn answer(&mut self, option: u32, kind: u32, data: &[u8]) -> io::Result<()> {
        let reply = reply(option, kind, data);
        let limit = self.limit();
        timely(limit, self.stream.write_all(&reply)).await?;
        timely(limit, self.stream.flush()).await
    }

    /// NBD_OPT_STRUCTURED_REPLY and NBD_OPT_EXTENDED_HEADERS, which takes precedence.
    async fn set_replies(&mut self, option: u32) -> io::Result<Next> {
        if option == wire::OPT_STRUCTURED_REPLY && self.replies == Replies::Extended {
            let why = "extended headers have been negotiated";
            return self.refuse(option, wire::REP_ERR_EXT_HEADER_REQD, why).await;
        }
        let is_extended = option == wire::OPT_EXTENDED_HEADERS;
        self.replies = if is_extended { Replies::Extended } else { Replies::Structured };
        // They were named, and set, for other replies.
        (self.export, self.contexts) = (None, None);
        self.answer(option, wire::REP_ACK, &[]).await.map(|()| Next::Negotiate)
    }

    async fn refuse(&mut self, option: u32, kind: u32, why: &str) -> io::Result<Next> {
        let why = why.get(..why.len().min(wire::STRING_MAX)).unwrap_or_default();
        self.answer(option, kind, why.as_bytes()).await.map(|()| Next::Negotiate)
    }

    /// Lists all VDIs that have data. A client whose token is behind the name of an export has none to show here.
    async fn list(&mut self, daemon: &Daemon) -> io::Result<Next> {
        let option = wire::OPT_LIST;
        if let Admission::ByToken { .. } = self.admission {
            let why = "a list needs a token, which an NBD client can only give with the name of an export";
            return self.refuse(option, wire::REP_ERR_POLICY, why).await;
        }
        let vdis = match daemon.catalogue.read_for_client(|view| view.vdis(None)).await {
            Ok(vdis) => vdis,
            Err(problem) => return self.refuse(option, wire::REP_ERR_POLICY, &problem.detail).await,
        };
        let mut listed = Vec::new();
        // Nothing of a snapshot without data could be read.
        for vdi in vdis.into_iter().filter(|vdi| vdi.state != VdiState::NoData) {
            let name = vdi.uuid.to_string();
            let data = [&wire::length(name.as_bytes()).to_be_bytes(), name.as_bytes(), vdi.name.as_str().as_bytes()];
            listed.push(reply(option, wire::REP_SERVER, &data.concat()));
        }
        timely(self.limit(), self.stream.write_all(&listed.concat())).await?;
        self.answer(option, wire::REP_ACK, &[]).await.map(|()| Next::Negotiate)
    }

    /// Sends an option that begins with the name of an export to its disk process, and that one's replies back.
    async fn forward(&mut self, daemon: &Daemon, option: u32, data: &[u8]) -> io::Result<Next> {
        let Some((name, rest)) = split_string(data) else {
            return self.refuse(option, wire::REP_ERR_INVALID, "the name of the export is cut off").await;
        };
        let since = match option {
            wire::OPT_SET_META_CONTEXT => {
                self.contexts = None;
                contexts::set(rest)
            }
            _ => self.wanted(name),
        };
        if let Err(problem) = self.open(daemon, name, since.clone()).await {
            let kind = if problem.code == Code::NotFound { wire::REP_ERR_UNKNOWN } else { wire::REP_ERR_POLICY };
            let advice = problem.advice.as_deref().map(|advice| format!("; {advice}")).unwrap_or_default();
            return self.refuse(option, kind, &format!("{}{advice}", problem.detail)).await;
        }
        let Some(export) = &mut self.export else { return Err(broken("there is no export")) };
        let mut replies = ask(&mut export.process, option, rest).await?;
        for (kind, data) in &mut replies {
            // The process describes its export by the path of the image, and names it after that.
            let is = |info: u16| *kind == wire::REP_INFO && data.starts_with(&info.to_be_bytes());
            let text = match () {
                () if is(wire::INFO_DESCRIPTION) => export.label.clone(),
                () if is(wire::INFO_NAME) => export.canonical.to_string(),
                () => continue,
            };
            data.truncate(2);
            data.extend_from_slice(text.as_bytes());
        }
        let is_granted = replies.last().is_some_and(|(kind, _)| *kind == wire::REP_ACK);
        if is_granted && option == wire::OPT_LIST_META_CONTEXT {
            replies.retain(|reply| !contexts::is_bitmap(reply));
            let bitmaps = contexts::list(daemon, export.vdi, export.only, rest).await;
            replies.splice(..0, bitmaps);
        }
        for (kind, data) in &replies {
            self.answer(option, *kind, data).await?;
        }
        match option {
            wire::OPT_GO if is_granted => Ok(Next::Transmit),
            wire::OPT_SET_META_CONTEXT if is_granted => {
                self.contexts = Some(Contexts { name: name.to_owned(), queries: rest.to_owned(), since, replies });
                Ok(Next::Negotiate)
            }
            _ => Ok(Next::Negotiate),
        }
    }

    /// The snapshots whose dirty bitmaps were set for the export of this name.
    fn wanted(&self, name: &[u8]) -> Vec<Uuid> {
        let contexts = self.contexts.as_ref().filter(|contexts| contexts.name == name);
        contexts.map(|contexts| contexts.since.clone()).unwrap_or_default()
    }

    /// The export of this name, with the dirty bitmaps since these snapshots, which is opened unless it is the last one
    /// that was named.
    async fn open(&mut self, daemon: &Daemon, name: &[u8], since: Vec<Uuid>) -> Result<&mut Export, Problem> {
        let export = match self.export.take().filter(|export| export.name == name && export.since == since) {
            Some(export) => {
                // The caller's rights may have changed since.
                must_operate_vdi(daemon, &export.caller, export.vdi).await?;
                export
            }
            None => {
                let text = std::str::from_utf8(name)
                    .map_err(|_| Problem::new(Code::NotFound, "the name of the export is not UTF-8"))?;
                let (caller, text) = self.caller(daemon, text)?;
                let (text, only) = contexts::split_since(text)?;
                let Found { vdi, label, is_snapshot } = find(daemon, text.to_owned()).await?;
                must_operate_vdi(daemon, &caller, vdi).await?;
                self.anonymous_until = None;
                let requester = caller.requester().await;
                self.log_opened(vdi, &requester);
                let reader = Reader::open(daemon, vdi, &since, requester).await?;
                let failed = |error| Problem::failed(format_args!("connect to the disk process of VDI {vdi}"), error);
                let contexts = self.contexts.as_ref().filter(|contexts| contexts.name == name);
                let process = connect(&reader, self.flags, self.replies, contexts).await.map_err(failed)?;
                let canonical = if is_snapshot { vdi } else { reader.vbd() };
                Export { name: name.to_owned(), caller, vdi, label, canonical, only, since, process, _reader: reader }
            }
        };
        Ok(self.export.insert(export))
    }

    fn log_opened(&self, vdi: Uuid, requester: &Requester) {
        match &self.admission {
            Admission::Granted(_) => tracing::info!(%vdi, by = %requester, "a VDI is read over NBD"),
            Admission::ByToken { peer, .. } => tracing::info!(%vdi, by = %requester, %peer, "a VDI is read over NBD"),
        }
    }

    /// The caller, and the name of the export without the token.
    fn caller<'a>(&self, daemon: &Daemon, name: &'a str) -> Result<(Caller, &'a str), Problem> {
        let (name, token) = match name.rsplit_once(TOKEN) {
            Some((name, token)) => (name, Some(token)),
            None => (name, None),
        };
        let unauthorized = |what: &str| {
            Problem::new(Code::Unauthorized, what).advise("name the export NAME?token=TOKEN, or UUID?token=TOKEN")
        };
        match (&self.admission, token) {
            (Admission::Granted(caller), _) => Ok((caller.clone(), name)),
            (Admission::ByToken { .. }, None) => Err(unauthorized("over TCP, the name of an export needs a token")),
            (Admission::ByToken { .. }, Some(token)) => {
                let secret: Secret =
                    token.parse().map_err(|_| unauthorized("there is no taplined token behind the name"))?;
                Ok((Caller::Token(daemon.tokens.grant(&secret)?), name))
            }
        }
    }

    /// Forwards requests and replies until the disk process disconnects, as it does after the client, or until the
    /// token ends.
    async fn transmit(self) -> io::Result<()> {
        let Client { stream, admission, export, .. } = self;
        let Some(Export { caller, process, _reader, .. }) = export else { return Ok(()) };
        // It has proven who it is.
        drop(admission);
        let (from_client, mut to_client) = tokio::io::split(stream);
        let (from_process, mut to_process) = process.into_split();
        let requests = async {
            tokio::io::copy_buf(&mut BufReader::with_capacity(PIECE, from_client), &mut to_process).await?;
            to_process.shutdown().await?;
            // The replies to what it has sent are still to come.
            std::future::pending::<io::Result<()>>().await
        };
        let replies = async {
            tokio::io::copy_buf(&mut BufReader::with_capacity(PIECE, from_process), &mut to_client).await?;
            to_client.shutdown().await
        };
        tokio::select! {
            ended = requests => ended,
            ended = replies => ended,
            () = caller.ended() => Ok(()),
        }
    }
}

/// A VDI, and its name.
struct Found {
    vdi: Uuid,
    label: String,
    is_snapshot: bool,
}

/// The VDI of this UUID or name.
async fn find(daemon: &Daemon, name: String) -> Result<Found, Problem> {
    let found = move |view: &View<'_>| {
        let missing = || Problem::new(Code::NotFound, format!("there is no VDI '{}'", api::visible(&name)));
        let of =
            |vdi: &Vdi| Found { vdi: vdi.uuid, label: vdi.name.to_string(), is_snapshot: vdi.snapshot_of.is_some() };
        if let Ok(uuid) = name.parse::<Uuid>() {
            return Ok(of(&view.find_vdi(uuid)?.ok_or_else(missing)?));
        }
        let vdis = view.vdis(None)?;
        match vdis.iter().filter(|vdi| vdi.name.as_str() == name).collect::<Vec<_>>()[..] {
            [] => Err(missing().advise("give the UUID or the name of a VDI: tapline vdi list")),
            [vdi] => Ok(of(vdi)),
            [one, other, ..] => {
                let (one, other) = (one.uuid, other.uuid);
                let what = format!("several VDIs have the name '{name}', among them {one} and {other}");
                Err(Problem::new(Code::NotFound, what).advise("give the UUID"))
            }
        }
    };
    daemon.catalogue.read_for_client(found).await
}

/// Fails if `work` is not done by then.
async fn timely<T>(limit: Instant, work: impl Future<Output = io::Result<T>>) -> io::Result<T> {
    tokio::time::timeout_at(limit, work).await.map_err(|_| io::Error::from(ErrorKind::TimedOut))?
}

/// A reply to an option.
fn reply(option: u32, kind: u32, data: &[u8]) -> Vec<u8> {
    let header = wire::OptionReply {
        magic: wire::OPTION_REPLY_MAGIC.into(),
        option: option.into(),
        kind: kind.into(),
        len: wire::length(data).into(),
    };
    [header.as_bytes(), data].concat()
}
