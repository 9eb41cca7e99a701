//! The HTTP client for S3: how long an answer is waited for, and that it is the server's own.
//!
//! Knows nothing of objects, and repeats nothing. Invariants:
//!
//! - A redirect is an error. Followed, a PUT becomes a GET of another page (303), whose success looks like that of the
//!   PUT; and signatures hold for one host only.
//! - A request ends, however silent the server is. A connection to a host that is gone is closed by the kernel
//!   (TCP_USER_TIMEOUT, keepalive: both are defaults of `reqwest`). For a host that acknowledges and does not answer
//!   there are limits here: between two pieces of an answer, and for a request with a body as a whole, because how much
//!   of it is still in buffers of the kernel is not known.

use std::error::Error;
use std::fmt;
use std::pin::Pin;
use std::time::Duration;

use control::printable;
use object_store::client::{
    ClientConfigKey, HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpResponse, HttpService,
};
use object_store::{ClientOptions, Result};
use reqwest::Certificate;
use reqwest::redirect::Policy;

/// How long a server may be silent.
pub const SILENCE: Duration = Duration::from_secs(60);

/// The slowest line that is waited for, in bytes per second: 0.25 Mbit/s.
const SLOWEST: u64 = 32 << 10;

/// Bounds one request with its body: a pack of 16 MiB at that rate, and more.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(600);

const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// Creates clients.
#[derive(Debug)]
pub struct Connector {
    /// How long a server may be silent ([`SILENCE`]).
    pub silence: Duration,
    /// The authorities that are trusted, if not those of the system.
    pub authorities: Option<Vec<Certificate>>,
}

impl HttpConnector for Connector {
    fn connect(&self, options: &ClientOptions) -> Result<HttpClient> {
        let is_plain = options.get_config_value(&ClientConfigKey::AllowHttp).is_some_and(|allowed| allowed == "true");
        let builder = || {
            let builder = match &self.authorities {
                Some(authorities) => reqwest::Client::builder().tls_certs_only(authorities.iter().cloned()),
                None => reqwest::Client::builder(),
            };
            builder
                .user_agent(concat!(env!("CARGO_PKG_NAME"), "/", env!("CARGO_PKG_VERSION")))
                .redirect(Policy::none())
                .connect_timeout(CONNECT_TIMEOUT)
                .timeout(REQUEST_TIMEOUT)
                .https_only(!is_plain)
                // As in the clients that `object_store` makes. Of compressed bodies the length would not be known.
                .http1_only()
                .no_gzip()
                .no_brotli()
                .no_zstd()
                .no_deflate()
        };
        let built = |built: reqwest::Result<reqwest::Client>| {
            built.map_err(|error| object_store::Error::Generic { store: "S3", source: Box::new(error) })
        };
        // Its limit counts from the begin of a request, while the body is still being sent.
        let reading = HttpClient::new(built(builder().read_timeout(self.silence).build())?);
        let sending = HttpClient::new(built(builder().build())?);
        Ok(HttpClient::new(Client { reading, sending, silence: self.silence }))
    }
}

#[derive(Debug)]
struct Client {
    /// For requests without a body.
    reading: HttpClient,
    sending: HttpClient,
    silence: Duration,
}

impl Client {
    async fn execute(&self, request: HttpRequest) -> std::result::Result<HttpResponse, HttpError> {
        let len = u64::try_from(request.body().content_length()).unwrap_or(u64::MAX);
        let answer = if len == 0 {
            self.reading.execute(request).await?
        } else {
            let limit = self.silence.saturating_add(Duration::from_secs(len / SLOWEST));
            match tokio::time::timeout(limit, self.sending.execute(request)).await {
                Ok(answer) => answer?,
                Err(late) => return Err(HttpError::new(HttpErrorKind::Timeout, late)),
            }
        };
        match Redirected::of(&answer) {
            Some(redirected) => Err(HttpError::new(HttpErrorKind::Unknown, redirected)),
            None => Ok(answer),
        }
    }
}

// The method of the trait as the macro `async_trait` declares it.
impl HttpService for Client {
    fn call<'life, 'future>(
        &'life self,
        request: HttpRequest,
    ) -> Pin<Box<dyn Future<Output = std::result::Result<HttpResponse, HttpError>> + Send + 'future>>
    where
        'life: 'future,
        Self: 'future,
    {
        Box::pin(self.execute(request))
    }
}

/// The answer that what was requested is elsewhere.
#[derive(Debug)]
pub struct Redirected {
    status: u16,
    /// Where, if the answer has it: a URL or a region. Written by the server.
    to: Option<String>,
}

impl Redirected {
    fn of(answer: &HttpResponse) -> Option<Redirected> {
        let status = answer.status();
        // 304 is the answer to a condition.
        if !status.is_redirection() || status.as_u16() == 304 {
            return None;
        }
        let header = |name: &str| answer.headers().get(name)?.to_str().ok().map(printable);
        let region = header("x-amz-bucket-region").map(|region| format!("the region {region}"));
        Some(Redirected { status: status.as_u16(), to: region.or_else(|| header("location")) })
    }
}

impl fmt::Display for Redirected {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the server redirects this request (status {})", self.status)?;
        self.to.as_ref().map_or(Ok(()), |to| write!(f, " to {to}"))
    }
}

impl Error for Redirected {}
