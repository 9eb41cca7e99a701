//! The API over TCP, always with TLS: for holders of tokens, but for the files of the dashboard, which need none.
//!
//! A connection is anonymous until it has sent a token, for which it has little time. It counts against the TCP
//! connection limit, never against the Unix socket's. It does not outlive the last token used on it.

use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use api::{Code, Problem, Secret};
use axum::Router;
use axum::body::Body;
use axum::extract::Request;
use axum::http::header::{AUTHORIZATION, WWW_AUTHENTICATE};
use axum::http::{HeaderMap, HeaderValue};
use axum::response::{IntoResponse, Response};
use hyper::body::Incoming;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinSet;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use tower::ServiceExt;

use super::super::Refusal;
use super::super::caller::Caller;
use super::super::{dashboard, websocket};
use super::unauthenticated::{Unauthenticated, UnauthenticatedSlot};
use super::{converse, rest, room};
use crate::background;
use crate::certificate::Certificate;
use crate::config::Config;
use crate::token::{ADVICE, Grant, Tokens};

/// Time limit for the TLS handshake.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);

/// Time limit for a client to send a token.
const TOKEN_TIMEOUT: Duration = Duration::from_secs(15);

/// TCP user timeout in milliseconds: a client that has vanished or does not read is disconnected.
const USER_TIMEOUT_MS: u32 = 60_000;

/// The first byte of a handshake record (RFC 8446, 5.1).
const HANDSHAKE: u8 = 22;

/// The prefix of a token that a browser sends as a subprotocol of a WebSocket.
const TOKEN_PROTOCOL: &str = "tapline.token.";

/// The sockets, and the state shared by all connections.
#[derive(Debug)]
pub struct Remote {
    /// The sockets, until serving starts.
    sockets: Mutex<Vec<TcpListener>>,
    certificate: Arc<Certificate>,
    connections: Arc<Semaphore>,
    unauthenticated: Unauthenticated,
    tokens: Tokens,
    refusals: Refusals,
}

impl Remote {
    /// Starts listening at the configured addresses.
    pub fn bind(config: &Config, certificate: &Arc<Certificate>, tokens: Tokens) -> Result<Remote, Problem> {
        let sockets =
            config.api.listen.iter().map(|address| bind(address, "api.listen", "serving")).collect::<Result<_, _>>()?;
        Ok(Remote {
            sockets: Mutex::new(sockets),
            certificate: certificate.clone(),
            connections: room(config.api.remote_connections_max),
            unauthenticated: Unauthenticated::among(config.api.remote_connections_max),
            tokens,
            refusals: Refusals::default(),
        })
    }

    /// Serves until the returned value is dropped; existing connections continue until `ended` changes.
    pub fn serve(self: &Arc<Remote>, router: &Router, ended: &watch::Receiver<()>) -> JoinSet<()> {
        let sockets = std::mem::take(&mut *self.sockets.lock().unwrap_or_else(PoisonError::into_inner));
        sockets.into_iter().map(|socket| self.clone().accept(socket, router.clone(), ended.clone())).collect()
    }

    /// Accepts connections forever. One connection beyond the limit waits here, the others in the socket's queue.
    async fn accept(self: Arc<Remote>, socket: TcpListener, router: Router, ended: watch::Receiver<()>) {
        loop {
            let accepted = socket.accept().await;
            // A connection beyond the per-address limit is closed before it can delay others.
            let slot = match &accepted {
                Ok((_, peer)) => match self.unauthenticated.enter(peer.ip()) {
                    Some(slot) => Some(slot),
                    None => {
                        tracing::debug!(%peer, "too many connections without a token from one address");
                        continue;
                    }
                },
                Err(_) => None,
            };
            match (accepted, self.connections.clone().acquire_owned().await) {
                (Ok((stream, peer)), Ok(permit)) => {
                    let connection = self.clone().take(stream, peer, slot, router.clone(), ended.clone());
                    background::spawn(async move {
                        connection.await;
                        drop(permit);
                    });
                }
                (Err(error), _) => rest(&error).await,
                (_, Err(_)) => return,
            }
        }
    }

    /// Serves a connection for as long as its token is valid.
    async fn take(
        self: Arc<Remote>,
        stream: TcpStream,
        peer: SocketAddr,
        slot: Option<UnauthenticatedSlot>,
        router: Router,
        mut ended: watch::Receiver<()>,
    ) {
        let (shown, seen) = watch::channel(None);
        let over = over(seen, slot);
        let greeted = tokio::select! {
            greeted = tokio::time::timeout(HANDSHAKE_TIMEOUT, self.greet(stream)) => greeted,
            _ = ended.changed() => return,
        };
        let stream = match greeted {
            Ok(Ok(stream)) => stream,
            Ok(Err(error)) => return tracing::debug!(%peer, %error, "a TLS handshake failed"),
            Err(_) => return tracing::debug!(%peer, "a TLS handshake timed out"),
        };
        let answer = |request: hyper::Request<Incoming>| {
            // The dashboard's files are public, and the page itself prompts for the token.
            let is_file = dashboard::is_for_file(request.method(), request.uri());
            let admitted = if is_file { Ok(None) } else { self.admit(&request, peer, &shown).map(Some) };
            let router = router.clone();
            async move {
                match admitted {
                    Ok(grant) => {
                        let mut request = Request::from(request.map(Body::new));
                        if let Some(grant) = grant {
                            request.extensions_mut().insert(Caller::Token(grant));
                        }
                        router.oneshot(request).await
                    }
                    Err(refused) => Ok(refused),
                }
            }
        };
        tokio::select! {
            () = converse(stream, answer, ended) => {}
            () = over => tracing::debug!(%peer, "closing a connection: its token expired, or none was sent in time"),
        }
    }

    /// The TLS handshake. A client that speaks plain HTTP gets an HTTP response that says so.
    async fn greet(&self, mut stream: TcpStream) -> io::Result<TlsStream<TcpStream>> {
        stream.set_nodelay(true)?;
        rustix::net::sockopt::set_tcp_user_timeout(&stream, USER_TIMEOUT_MS)?;
        let mut first = [HANDSHAKE];
        if stream.peek(&mut first).await? > 0 && first != [HANDSHAKE] {
            // Reads what has arrived: closing a socket with unread data sends a reset, which would destroy the
            // response.
            let mut request = vec![0; 16 << 10];
            let read = stream.read(&mut request).await?;
            tracing::debug!(read, "HTTP without TLS");
            stream.write_all(&without_tls()).await?;
            stream.shutdown().await?;
            return Err(io::Error::other("it does not start like TLS"));
        }
        TlsAcceptor::from(self.certificate.current()).accept(stream).await
    }

    /// Checks the token of a request; returns its rights, or the response that refuses it.
    fn admit<B>(
        &self,
        request: &hyper::Request<B>,
        peer: SocketAddr,
        shown: &watch::Sender<Option<Grant>>,
    ) -> Result<Grant, Response> {
        let mut headers = request.headers().get_all(AUTHORIZATION).iter();
        let (header, other) = (headers.next(), headers.next());
        let of_page = header.is_none().then(|| of_websocket(request.headers())).flatten();
        let (Some(header), None) = (of_page.as_ref().or(header), other) else {
            let problem = Problem::new(
                Code::Unauthorized,
                "over TCP, each request must carry one token: Authorization: Bearer …",
            );
            return Err(challenge(problem.advise(ADVICE), "Bearer realm=\"tapline\""));
        };
        let granted =
            match bearer(header) {
                Some(secret) => self.tokens.grant(&secret),
                None => Err(Problem::new(Code::Unauthorized, "the Authorization header contains no taplined token")
                    .advise(ADVICE)),
            };
        let grant = granted.map_err(|problem| {
            self.refusals.log(peer, &problem);
            challenge(problem, "Bearer realm=\"tapline\", error=\"invalid_token\"")
        })?;
        shown.send_replace(Some(grant.clone()));
        Ok(grant)
    }
}

/// Listens at an address of this setting, where `what` is done.
pub fn bind(address: &SocketAddr, setting: &str, what: &str) -> Result<TcpListener, Problem> {
    let failed = |error| Problem::failed(format_args!("listen at {address} ({setting})"), error);
    let socket = std::net::TcpListener::bind(address).map_err(failed)?;
    socket.set_nonblocking(true).map_err(failed)?;
    let socket = TcpListener::from_std(socket).map_err(failed)?;
    tracing::info!(address = %socket.local_addr().map_err(failed)?, "{what} over TLS");
    Ok(socket)
}

/// The secret in a header (RFC 6750, 2.1). The scheme's name is case-insensitive (RFC 9110, 11.1).
fn bearer(header: &HeaderValue) -> Option<Secret> {
    let (scheme, secret) = header.to_str().ok()?.split_once(' ')?;
    scheme.eq_ignore_ascii_case("bearer").then(|| secret.trim().parse().ok()).flatten()
}

/// The token of a WebSocket as a header value. Browsers cannot set headers of a WebSocket: the page sends the token
/// as a subprotocol, which is not part of the address and is not logged.
fn of_websocket(headers: &HeaderMap) -> Option<HeaderValue> {
    websocket::accept(headers)?;
    let secret = websocket::offered(headers).find_map(|name| name.strip_prefix(TOKEN_PROTOCOL))?;
    HeaderValue::from_str(&format!("Bearer {secret}")).ok()
}

/// A refusal that tells how to authenticate (RFC 6750, 3).
fn challenge(problem: Problem, how: &'static str) -> Response {
    let mut response = Refusal(problem).into_response();
    response.headers_mut().insert(WWW_AUTHENTICATE, HeaderValue::from_static(how));
    response
}

/// The response to plain HTTP.
fn without_tls() -> Vec<u8> {
    let problem = Problem::new(Code::Malformed, "this port speaks TLS only")
        .advise("use https. A token sent without TLS may have been intercepted: revoke it");
    let body = serde_json::to_vec(&problem).unwrap_or_default();
    let head = "HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\nconnection: close\r\ncontent-length:";
    [format!("{head} {}\r\n\r\n", body.len()).into_bytes(), body].concat()
}

/// Waits until a connection must be closed: no token was sent in time, or the last one used has expired.
async fn over(mut seen: watch::Receiver<Option<Grant>>, slot: Option<UnauthenticatedSlot>) {
    match tokio::time::timeout(TOKEN_TIMEOUT, seen.wait_for(Option::is_some)).await {
        Ok(Ok(_)) => {}
        Ok(Err(_)) | Err(_) => return,
    }
    drop(slot);
    loop {
        let Some(grant) = seen.borrow_and_update().clone() else { return };
        tokio::select! {
            () = grant.ended() => return,
            changed = seen.changed() => if changed.is_err() { return },
        }
    }
}

/// Rejected tokens, logged at a limited rate because any client can cause them.
#[derive(Debug, Default)]
struct Refusals(Mutex<(Option<Instant>, u64)>);

impl Refusals {
    /// Logs one per second, with the number of suppressed messages.
    fn log(&self, peer: SocketAddr, problem: &Problem) {
        let mut last = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match last.0 {
            Some(at) if at.elapsed() < Duration::from_secs(1) => last.1 = last.1.saturating_add(1),
            _ => {
                tracing::warn!(%peer, others = last.1, "a token was refused: {problem}");
                *last = (Some(Instant::now()), 0);
            }
        }
    }
}
