//! A server of S3 in memory, with one bucket: the requests that `object_store` sends, and faults of servers and
//! networks.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use axum::Router;
use axum::body::{Body, to_bytes};
use axum::extract::{Request, State};
use axum::http::request::Parts;
use axum::http::{HeaderMap, Method, Response, StatusCode};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::crypto::ring::default_provider;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};

const BUCKET: &str = "bucket";

/// Objects on one page of a listing.
const PAGE: usize = 7;

/// A fault of the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// None: it is sound.
    None,
    /// Every third change is carried out and answered with an error.
    LostAnswers,
    /// Every third change is carried out and never answered.
    Silent,
    /// No change is answered.
    Mute,
    /// Changes are redirected with this status to a page that exists.
    Redirects(u16),
    /// Every third request is put off.
    Busy,
    /// Every second creation collides with one that fails.
    Conflicts,
    /// `If-None-Match` is not known.
    Replaces,
    /// There is no space.
    Full,
    /// Every key is refused.
    Denied,
    /// There is no such bucket.
    Gone,
}

#[derive(Debug)]
struct Shared {
    objects: Mutex<BTreeMap<String, Vec<u8>>>,
    fault: Mutex<Fault>,
    requests: AtomicU32,
}

/// A server that runs, on a thread of its own. Its bucket is called `bucket`, and the only key that it accepts `key`.
#[derive(Debug)]
pub struct Bucket {
    address: SocketAddr,
    shared: Arc<Shared>,
}

impl Bucket {
    /// Starts it, without objects.
    pub fn start() -> Bucket {
        let (listener, address) = listen();
        let shared =
            Arc::new(Shared { objects: Mutex::default(), fault: Mutex::new(Fault::None), requests: AtomicU32::new(0) });
        let router = Router::new().fallback(answer).with_state(Arc::clone(&shared));
        run(async move {
            axum::serve(tokio::net::TcpListener::from_std(listener).unwrap(), router).await.unwrap();
        });
        Bucket { address, shared }
    }

    /// The variables by which a command finds the server.
    pub fn environment(&self) -> Vec<(&'static str, String)> {
        Bucket::environment_of(self.address)
    }

    /// The same behind a network that resets the connection instead of every third answer to a change.
    pub fn behind_resets(&self) -> Vec<(&'static str, String)> {
        let (listener, address) = listen();
        let (to, changes) = (self.address, Arc::new(AtomicU32::new(0)));
        run(async move {
            let listener = tokio::net::TcpListener::from_std(listener).unwrap();
            loop {
                let (client, _) = listener.accept().await.unwrap();
                tokio::spawn(relay(client, to, Arc::clone(&changes)));
            }
        });
        Bucket::environment_of(address)
    }

    /// The address of the server.
    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Its address behind TLS, with the certificate of a server in this directory ([`crate::certificates`]).
    pub fn url_behind_tls(&self, directory: &Path) -> String {
        let chain = CertificateDer::pem_file_iter(directory.join("server-cert.pem")).unwrap().map(Result::unwrap);
        let key = PrivateKeyDer::from_pem_file(directory.join("server-key.pem")).unwrap();
        let config = ServerConfig::builder_with_provider(Arc::new(default_provider()));
        let config = config.with_safe_default_protocol_versions().unwrap().with_no_client_auth();
        let acceptor = TlsAcceptor::from(Arc::new(config.with_single_cert(chain.collect(), key).unwrap()));
        let ((listener, address), to) = (listen(), self.address);
        run(async move {
            let listener = tokio::net::TcpListener::from_std(listener).unwrap();
            loop {
                let ((client, _), acceptor) = (listener.accept().await.unwrap(), acceptor.clone());
                tokio::spawn(async move {
                    // A client that does not trust the certificate ends the handshake.
                    if let Ok(mut client) = acceptor.accept(client).await {
                        let mut server = TcpStream::connect(to).await.unwrap();
                        tokio::io::copy_bidirectional(&mut client, &mut server).await.ok();
                    }
                });
            }
        });
        format!("https://{address}")
    }

    fn environment_of(address: SocketAddr) -> Vec<(&'static str, String)> {
        vec![
            ("AWS_ENDPOINT_URL", format!("http://{address}")),
            ("AWS_REGION", "here".to_owned()),
            ("AWS_ACCESS_KEY_ID", "key".to_owned()),
            ("AWS_SECRET_ACCESS_KEY", "secret".to_owned()),
        ]
    }

    /// Has it show a fault from now on.
    pub fn set(&self, fault: Fault) {
        *self.shared.fault.lock().unwrap() = fault;
    }

    /// Adds an object.
    pub fn put(&self, name: &str, bytes: &[u8]) {
        self.shared.objects.lock().unwrap().insert(name.to_owned(), bytes.to_vec());
    }

    /// The names of all objects.
    pub fn names(&self) -> Vec<String> {
        self.shared.objects.lock().unwrap().keys().cloned().collect()
    }

    /// Changes a byte of each object below a prefix.
    pub fn damage(&self, prefix: &str) {
        for (name, bytes) in self.shared.objects.lock().unwrap().iter_mut() {
            if let (true, Some(last)) = (name.starts_with(prefix), bytes.last_mut()) {
                *last ^= 1;
            }
        }
    }
}

fn listen() -> (std::net::TcpListener, SocketAddr) {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    listener.set_nonblocking(true).unwrap();
    let address = listener.local_addr().unwrap();
    (listener, address)
}

/// Runs a server on a thread of its own.
fn run(server: impl Future<Output = ()> + Send + 'static) {
    std::thread::spawn(move || {
        tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(server);
    });
}

/// A connection to a server. Instead of every third answer to a change it is reset.
async fn relay(mut client: TcpStream, to: SocketAddr, changes: Arc<AtomicU32>) {
    let mut server = TcpStream::connect(to).await.unwrap();
    let (mut sent, mut answer, mut is_change) = ([0; 16 << 10], [0; 16 << 10], false);
    loop {
        let relayed = tokio::select! {
            read = client.read(&mut sent) => {
                let part = &sent[..read.unwrap_or(0)];
                is_change |= part.starts_with(b"PUT ") || part.starts_with(b"DELETE ");
                if part.is_empty() { None } else { server.write_all(part).await.ok() }
            }
            read = server.read(&mut answer) => {
                let part = &answer[..read.unwrap_or(0)];
                if std::mem::take(&mut is_change) && changes.fetch_add(1, Ordering::Relaxed) % 3 == 0 {
                    return rustix::net::sockopt::set_socket_linger(&client, Some(std::time::Duration::ZERO)).unwrap();
                }
                if part.is_empty() { None } else { client.write_all(part).await.ok() }
            }
        };
        if relayed.is_none() {
            return;
        }
    }
}

async fn answer(State(shared): State<Arc<Shared>>, request: Request) -> Response<Body> {
    let (parts, body) = request.into_parts();
    let bytes = to_bytes(body, 64 << 20).await.unwrap().to_vec();
    let fault = *shared.fault.lock().unwrap();
    let turn = shared.requests.fetch_add(1, Ordering::Relaxed);
    let path = parts.uri.path().trim_start_matches('/');
    let bucket = path.split_once('/').map_or(path, |(bucket, _)| bucket);
    let signed = parts.headers.get("authorization").and_then(|value| value.to_str().ok());
    if fault == Fault::Denied || !signed.is_some_and(|signed| signed.contains("Credential=key/")) {
        return error(StatusCode::FORBIDDEN, "AccessDenied");
    }
    if fault == Fault::Gone || bucket != BUCKET {
        return error(StatusCode::NOT_FOUND, "NoSuchBucket");
    }
    if fault == Fault::Busy && turn % 3 == 0 {
        return error(StatusCode::SERVICE_UNAVAILABLE, "SlowDown");
    }
    let is_change = parts.method == Method::PUT || parts.method == Method::DELETE;
    if let (Fault::Redirects(status), true) = (fault, is_change) {
        let to = format!("/{BUCKET}?list-type=2");
        return Response::builder().status(status).header("location", to).body(Body::empty()).unwrap();
    }
    let answered = carry_out(&shared, &parts, bytes, turn);
    if is_change && (fault == Fault::Mute || fault == Fault::Silent && turn % 3 == 0) {
        std::future::pending::<()>().await;
    }
    if fault == Fault::LostAnswers && is_change && turn % 3 == 0 {
        return error(StatusCode::INTERNAL_SERVER_ERROR, "InternalError");
    }
    answered
}

fn carry_out(shared: &Shared, parts: &Parts, bytes: Vec<u8>, turn: u32) -> Response<Body> {
    let fault = *shared.fault.lock().unwrap();
    let name = parts.uri.path().trim_start_matches('/').split_once('/').map_or("", |(_, name)| name);
    let mut objects = shared.objects.lock().unwrap();
    match parts.method {
        Method::GET if name.is_empty() => list(&objects, parts.uri.query().unwrap_or_default()),
        Method::GET | Method::HEAD => match objects.get(name) {
            Some(found) => read(found, &parts.headers, parts.method == Method::HEAD),
            None => error(StatusCode::NOT_FOUND, "NoSuchKey"),
        },
        Method::PUT if fault == Fault::Full => error(StatusCode::INSUFFICIENT_STORAGE, "XMinioStorageFull"),
        Method::PUT if fault == Fault::Conflicts && turn % 2 == 0 => {
            error(StatusCode::CONFLICT, "ConditionalRequestConflict")
        }
        Method::PUT => {
            let is_conditional = parts.headers.get("if-none-match").is_some_and(|value| value == "*");
            if is_conditional && fault != Fault::Replaces && objects.contains_key(name) {
                error(StatusCode::PRECONDITION_FAILED, "PreconditionFailed")
            } else {
                objects.insert(name.to_owned(), bytes);
                Response::builder().header("etag", "\"0\"").body(Body::empty()).unwrap()
            }
        }
        Method::DELETE => {
            objects.remove(name);
            Response::builder().status(StatusCode::NO_CONTENT).body(Body::empty()).unwrap()
        }
        _ => error(StatusCode::NOT_IMPLEMENTED, "NotImplemented"),
    }
}

fn read(found: &[u8], headers: &HeaderMap, is_head: bool) -> Response<Body> {
    let range = headers.get("range").and_then(|value| value.to_str().ok()?.strip_prefix("bytes=")?.split_once('-'));
    let mut answer = Response::builder().header("etag", "\"0\"").header("last-modified", DATE);
    let mut part = found;
    if let Some((start, end)) = range {
        let (start, end): (usize, usize) = (start.parse().unwrap(), end.parse().unwrap());
        let end = (end + 1).min(found.len());
        if start >= found.len() {
            return error(StatusCode::RANGE_NOT_SATISFIABLE, "InvalidRange");
        }
        part = &found[start..end];
        let shown = format!("bytes {start}-{}/{}", end - 1, found.len());
        answer = answer.status(StatusCode::PARTIAL_CONTENT).header("content-range", shown);
    }
    let body = if is_head { Vec::new() } else { part.to_vec() };
    answer.header("content-length", part.len()).body(Body::from(body)).unwrap()
}

const DATE: &str = "Mon, 30 Nov 2026 00:00:00 GMT";

/// One page of names; the token of the next one is the last name on this one.
fn list(objects: &BTreeMap<String, Vec<u8>>, query: &str) -> Response<Body> {
    let field = |wanted: &str| {
        let found = query.split('&').find_map(|field| field.strip_prefix(wanted)?.strip_prefix('='));
        found.unwrap_or_default().replace("%2F", "/")
    };
    assert_eq!(field("list-type"), "2", "{query}");
    let (prefix, after) = (field("prefix"), field("continuation-token"));
    let mut matching = objects.iter().filter(|(name, _)| name.starts_with(&prefix) && **name > after);
    let page: Vec<_> = matching.by_ref().take(PAGE).collect();
    let contents: String = page
        .iter()
        .map(|(name, bytes)| {
            let (date, size) = ("2026-11-30T00:00:00.000Z", bytes.len());
            format!("<Contents><Key>{name}</Key><LastModified>{date}</LastModified><Size>{size}</Size></Contents>")
        })
        .collect();
    let next = match (matching.next(), page.last()) {
        (Some(_), Some((name, _))) => format!("<NextContinuationToken>{name}</NextContinuationToken>"),
        _ => String::new(),
    };
    let text = format!("<ListBucketResult>{contents}{next}</ListBucketResult>");
    Response::builder().header("content-type", "application/xml").body(Body::from(text)).unwrap()
}

fn error(status: StatusCode, code: &str) -> Response<Body> {
    let text = format!("<Error><Code>{code}</Code><Message>this is a test</Message></Error>");
    Response::builder().status(status).body(Body::from(text)).unwrap()
}
