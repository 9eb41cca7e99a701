//! One request: sent, redirected within limits, and judged by its status.
//!
//! Invariants: no redirection leads from https to http; no request or answer takes longer, and no header is larger,
//! than the constants here say; an answer is never decompressed. Requests of one client share connections.

use std::io::Read;
use std::sync::Arc;
use std::time::Duration;

use rustls::crypto::ring::default_provider;
use ureq::http::{HeaderMap, StatusCode};
use ureq::tls::{RootCerts, TlsConfig, TlsProvider};
use ureq::{Agent, Body, Error};

use crate::error::{Fault, HttpError, HttpErrorKind};
use crate::identity::{number, text};
use crate::roots;
use crate::url::Url;

/// A server that does not answer is given up after these times.
const RESOLVE: Duration = Duration::from_secs(10);
const CONNECT: Duration = Duration::from_secs(10);
const SEND: Duration = Duration::from_secs(10);
const ANSWER: Duration = Duration::from_secs(30);
/// The time for the body of an answer, of which the largest has a few MiB: slower lines are of no use here.
const BODY: Duration = Duration::from_secs(120);
/// Headers of servers have 1 KiB or so; those of some content delivery networks a few.
const HEADERS_MAX: usize = 32 << 10;
/// The length of a chain of redirections: mirrors need one or two.
const REDIRECTIONS_MAX: usize = 5;
/// Connections that are kept, idle, for the next requests.
const IDLE_MAX: usize = 16;
/// The longest pause that a server may request, in seconds.
const WAIT_MAX: u64 = 3600;
/// Bytes read between looks at the end of the process.
const CHUNK: usize = 64 << 10;

/// How objects are read.
#[derive(Clone, Debug)]
pub struct Options {
    /// Also read over plain HTTP, where anyone on the way can change what is read.
    pub allow_http: bool,
    /// How long a request is repeated to a server that is away or busy; `None`: without a limit.
    pub patience: Option<Duration>,
    /// Returns true once the process is to end.
    pub stopping: fn() -> bool,
    /// Receives messages for people.
    pub report: fn(&str),
}

/// A client of HTTP servers.
#[derive(Debug)]
pub struct Client {
    agent: Agent,
    /// Why there can be no TLS.
    no_roots: Option<String>,
    pub(crate) options: Options,
}

/// An answer that is not a redirection.
pub(crate) struct Answer {
    pub(crate) status: StatusCode,
    pub(crate) headers: HeaderMap,
    body: Body,
    /// Where it came from.
    pub(crate) url: Url,
}

impl Client {
    /// Makes a client. The certificates of the system's authorities are read now, proxies are those of the environment
    /// (`https_proxy`, `http_proxy`, `no_proxy`).
    pub fn new(options: Options) -> Client {
        let (roots, no_roots) = match roots::read() {
            Ok(roots) => (roots, None),
            Err(why) => (Vec::new(), Some(why)),
        };
        let tls = TlsConfig::builder()
            .provider(TlsProvider::Rustls)
            .root_certs(RootCerts::Specific(Arc::new(roots)))
            .unversioned_rustls_crypto_provider(Arc::new(default_provider()))
            .build();
        let config = Agent::config_builder()
            .tls_config(tls)
            .http_status_as_error(false)
            // Judged here: see `follow`.
            .max_redirects(0)
            .max_redirects_will_error(false)
            .user_agent(concat!("tapline/", env!("CARGO_PKG_VERSION")))
            .accept("*/*")
            .accept_encoding("identity")
            .max_response_header_size(HEADERS_MAX)
            .max_idle_connections(IDLE_MAX)
            .max_idle_connections_per_host(IDLE_MAX)
            .timeout_resolve(Some(RESOLVE))
            .timeout_connect(Some(CONNECT))
            .timeout_send_request(Some(SEND))
            .timeout_recv_response(Some(ANSWER))
            .timeout_recv_body(Some(BODY))
            .build();
        Client { agent: config.into(), no_roots, options }
    }

    /// The same client, which also reads over plain HTTP.
    pub fn allowing_http(&self) -> Client {
        let options = Options { allow_http: true, ..self.options.clone() };
        Client { agent: self.agent.clone(), no_roots: self.no_roots.clone(), options }
    }

    /// Refuses a URL that may not be read.
    pub(crate) fn check(&self, url: &Url) -> Result<(), HttpError> {
        let refused = |why: &str| HttpError::new(url, HttpErrorKind::Refused, why);
        match &self.no_roots {
            _ if !url.is_secure() && !self.options.allow_http => {
                Err(refused("over http anyone on the way can change what is read")
                    .advise("use https, give its digest as --checksum, or add --insecure-http"))
            }
            Some(why) if url.is_secure() => Err(refused(why)),
            _ => Ok(()),
        }
    }

    /// Sends a GET, also to where it is redirected.
    pub(crate) fn get(&self, url: &Url, headers: &[(&str, &str)]) -> Result<Answer, Fault> {
        let mut url = url.clone();
        for _ in 0..=REDIRECTIONS_MAX {
            let answer = self.get_once(&url, headers)?;
            match answer.status.as_u16() {
                301 | 302 | 303 | 307 | 308 => url = self.follow(&answer)?,
                _ => return Ok(answer),
            }
        }
        Err(Fault::refused(format!("it was redirected more than {REDIRECTIONS_MAX} times")))
    }

    fn get_once(&self, url: &Url, headers: &[(&str, &str)]) -> Result<Answer, Fault> {
        let request =
            headers.iter().fold(self.agent.get(url.text()), |request, (name, value)| request.header(*name, *value));
        let response = request.call().map_err(|error| fault_of(&error))?;
        let (parts, body) = response.into_parts();
        Ok(Answer { status: parts.status, headers: parts.headers, body, url: url.clone() })
    }

    /// Where an answer redirects to.
    fn follow(&self, answer: &Answer) -> Result<Url, Fault> {
        let Some(location) = text(&answer.headers, "location") else {
            return Err(Fault::refused(format!("its server answered {} without a Location", answer.status)));
        };
        let to = answer.url.join(location);
        let to = to.map_err(|why| Fault::refused(format!("its server redirects to a URL that is not used: {why}")))?;
        match () {
            () if answer.url.is_secure() && !to.is_secure() => {
                Err(Fault::refused(format!("its server redirects from https to {to}, where anyone could change it")))
            }
            () if to.is_secure() && self.no_roots.is_some() => {
                Err(Fault::refused(self.no_roots.clone().unwrap_or_default()))
            }
            () => Ok(to),
        }
    }
}

impl Answer {
    /// Reads the body, which must have `len` bytes; `stopping` ends that.
    pub(crate) fn exactly(self, len: usize, stopping: fn() -> bool) -> Result<Vec<u8>, Fault> {
        let bytes = self.at_most(len, stopping)?;
        match bytes.len() {
            had if had < len => Err(Fault::transient(format!("an answer ended after {had} of {len} bytes"))),
            _ => Ok(bytes),
        }
    }

    /// Reads the body, which may have up to `max` bytes.
    pub(crate) fn at_most(self, max: usize, stopping: fn() -> bool) -> Result<Vec<u8>, Fault> {
        let more = |len: u64| Fault::refused(format!("an answer has {len} bytes or more, and may have {max}"));
        if let Some(len) = text(&self.headers, "content-length").and_then(number) {
            if usize::try_from(len).map_or(true, |len| len > max) {
                return Err(more(len));
            }
        }
        let mut body = self.body.into_reader();
        let mut bytes = Vec::new();
        let mut chunk = vec![0; CHUNK];
        loop {
            if stopping() {
                return Err(stopped());
            }
            let read = match body.read(&mut chunk) {
                Ok(read) => read,
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(Fault::transient(format!("the connection was lost: {error}"))),
            };
            match chunk.get(..read) {
                Some(read) if !read.is_empty() => bytes.extend_from_slice(read),
                _ => return Ok(bytes),
            }
            if bytes.len() > max {
                return Err(more(u64::try_from(bytes.len()).unwrap_or(u64::MAX)));
            }
        }
    }

    /// Fails if the body is not the object's own bytes.
    pub(crate) fn must_be_plain(&self) -> Result<(), Fault> {
        match self.headers.get("content-encoding").map(|value| value.to_str().unwrap_or("?")) {
            None | Some("identity") => Ok(()),
            Some(encoding) => Err(Fault::refused(format!(
                "its server compresses it ({}), although that was not requested",
                encoding.chars().take(40).collect::<String>()
            ))),
        }
    }

    /// The fault that an answer without the requested bytes is.
    pub(crate) fn fault(&self) -> Fault {
        let status = self.status;
        match status.as_u16() {
            // RFC 9110, 10.2.3: a number of seconds, or a date, for which the usual pause is taken.
            408 | 429 | 500 | 502..=504 | 507..=599 => Fault::Transient {
                why: format!("its server answered {status}"),
                wait: text(&self.headers, "retry-after")
                    .and_then(number)
                    .map(|seconds| Duration::from_secs(seconds.min(WAIT_MAX))),
            },
            401 | 403 | 407 => Fault::of_kind(HttpErrorKind::Missing, format!("its server answered {status}"))
                .advise("it must be readable without credentials; otherwise download it: curl -fLO URL"),
            404 | 410 => Fault::of_kind(HttpErrorKind::Missing, format!("its server answered {status}")),
            412 => Fault::changed("it has changed while it was read"),
            416 => Fault::changed("it has become shorter while it was read"),
            200 => Fault::refused("its server answers a request for a part with all of it")
                .advise("download it: curl -fLO URL; then use the file"),
            _ => Fault::refused(format!("its server answered {status}")),
        }
    }
}

pub(crate) fn stopped() -> Fault {
    Fault::of_kind(HttpErrorKind::Stopped, "interrupted by a signal")
}

fn fault_of(error: &Error) -> Fault {
    match error {
        Error::Io(error) if error.kind() == std::io::ErrorKind::InvalidData => of_tls(&error.to_string()),
        Error::Rustls(error) => of_tls(&error.to_string()),
        Error::Tls(why) => of_tls(why),
        Error::HostNotFound => Fault::transient("its host was not found"),
        Error::Timeout(_) => Fault::transient("its server does not answer"),
        Error::Io(_) | Error::ConnectionFailed => Fault::transient(error.to_string()),
        other => Fault::refused(format!("its server's answer is not valid: {other}")),
    }
}

fn of_tls(why: &str) -> Fault {
    Fault::refused(format!("TLS: {why}")).advise(
        "the server's certificate must be valid, for its host, and signed by an authority of this system, or by one in \
         the file named by SSL_CERT_FILE",
    )
}
