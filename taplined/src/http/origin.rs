//! Refuses requests that a browser makes for a page of another site.
//!
//! Over TCP a token protects the API: browsers add none by themselves. The Unix socket needs none, and a port
//! forwarded to it (`ssh -L`, a reverse proxy) lets every page that the browser shows send requests to it.
//! Invariants: a page of another origin changes nothing (`Origin`), and a foreign name that resolves to this host
//! (DNS rebinding) gets no response over the socket (`Host`). Decision 0045 has the reasons.

use std::net::IpAddr;

use api::{Code, Problem};
use axum::extract::{Request, State};
use axum::http::HeaderMap;
use axum::http::header::{HOST, HeaderName, ORIGIN, UPGRADE};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

use super::Refusal;
use super::caller::Caller;
use crate::daemon::Daemon;

/// Passes on requests, except those from pages of another origin.
pub async fn hold(State(daemon): State<Daemon>, request: Request, next: Next) -> Response {
    let is_local = matches!(request.extensions().get(), Some(Caller::Local { .. }));
    let changes = !request.method().is_safe() || request.headers().contains_key(UPGRADE);
    match check(request.headers(), is_local, changes, &daemon.config.api.hosts) {
        Ok(()) => next.run(request).await,
        Err(problem) => Refusal(problem).into_response(),
    }
}

fn check(headers: &HeaderMap, is_local: bool, changes: bool, known: &[String]) -> Result<(), Problem> {
    let host = only(headers, HOST)?;
    if let Some(host) = host.filter(|host| is_local && !is_trusted(host, known)) {
        let what = format!("'{host}' is not a name of this API: a page of another site may be behind the request");
        let advice = "use localhost or an address; add the name of a reverse proxy to api.hosts in taplined.toml";
        return Err(Problem::new(Code::Forbidden, what).field("host").advise(advice));
    }
    let Some(origin) = only(headers, ORIGIN)?.filter(|_| changes) else { return Ok(()) };
    let is_own = origin.split_once("://").is_some_and(|(_, authority)| {
        host.is_some_and(|host| !host.is_empty() && authority.eq_ignore_ascii_case(host))
    });
    if is_own {
        return Ok(());
    }
    let what =
        format!("a page of {origin} may change nothing here: this is {}", host.unwrap_or("a host without a name"));
    let advice = "use the daemon's own page; a reverse proxy must pass on the header Host as the browser sends it";
    Err(Problem::new(Code::Forbidden, what).field("origin").advise(advice))
}

/// The value of a header that may occur only once.
fn only(headers: &HeaderMap, name: HeaderName) -> Result<Option<&str>, Problem> {
    let mut values = headers.get_all(&name).iter();
    let Some(value) = values.next() else { return Ok(None) };
    match (value.to_str(), values.next()) {
        (Ok(text), None) => Ok(Some(text)),
        _ => {
            Err(Problem::new(Code::Malformed, format!("a request must have one {name}, in ASCII")).field(name.as_str()))
        }
    }
}

/// Whether a Host cannot be a foreign name that resolves to this host: it is an address, a name of this host or
/// without a domain (programs make up such names for sockets), or a configured name.
fn is_trusted(host: &str, known: &[String]) -> bool {
    let (name, port) = match host.rsplit_once(':') {
        Some((name, port)) if !port.ends_with(']') => (name, port),
        _ => (host, ""),
    };
    if !port.bytes().all(|byte| byte.is_ascii_digit()) {
        return false;
    }
    if let Some(address) = name.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
        return address.parse::<IpAddr>().is_ok();
    }
    let name = name.strip_suffix('.').unwrap_or(name).to_ascii_lowercase();
    !name.contains('.')
        || name.ends_with(".localhost")
        || name.parse::<IpAddr>().is_ok()
        || known.iter().any(|known| known.eq_ignore_ascii_case(&name))
}

#[cfg(test)]
mod test {
    use axum::http::HeaderValue;

    use super::*;

    fn field(pairs: &[(HeaderName, &'static str)], is_local: bool, changes: bool) -> Option<String> {
        let mut headers = HeaderMap::new();
        for (name, value) in pairs {
            headers.append(name, HeaderValue::from_static(value));
        }
        let known = ["tapline.example.org".to_owned()];
        check(&headers, is_local, changes, &known).err().map(|problem| problem.field.unwrap())
    }

    #[test]
    fn a_change_needs_an_origin_equal_to_its_host_or_none() {
        for (host, origin, expected) in [
            ("localhost:8080", "http://localhost:8080", None),
            ("LOCALHOST:8080", "http://localhost:8080", None),
            ("[::1]:8080", "http://[::1]:8080", None),
            ("tapline.example.org", "https://tapline.example.org", None),
            ("localhost:8080", "http://localhost:9090", Some("origin")),
            ("localhost:8080", "http://localhost", Some("origin")),
            ("localhost:8080", "https://evil.example", Some("origin")),
            ("localhost:8080", "null", Some("origin")),
            ("localhost:8080", "", Some("origin")),
            ("", "http://", Some("origin")),
        ] {
            for is_local in [false, true] {
                let headers = [(HOST, host), (ORIGIN, origin)];
                assert_eq!(field(&headers, is_local, true).as_deref(), expected, "{host} {origin}");
                assert_eq!(field(&headers, is_local, false), None, "what changes nothing is not held to its origin");
            }
        }
        assert_eq!(field(&[(HOST, "localhost")], true, true), None, "programs send no Origin");
        assert_eq!(field(&[(ORIGIN, "http://localhost")], true, true).as_deref(), Some("origin"));
    }

    #[test]
    fn foreign_host_names_are_refused_over_the_socket() {
        for host in ["evil.example", "evil.example:8080", "localhost.evil.example", "127.0.0.1.evil.example", "a:b"] {
            for changes in [false, true] {
                assert_eq!(field(&[(HOST, host)], true, changes).as_deref(), Some("host"), "{host}");
                assert_eq!(field(&[(HOST, host)], false, changes), None, "over TCP there is a token: {host}");
            }
        }
        for host in ["t", "localhost", "localhost.:80", "a.localhost", "127.0.0.1:8080", "[::1]:8080", "[::1]", ""] {
            assert_eq!(field(&[(HOST, host)], true, false), None, "{host}");
        }
        for host in ["tapline.example.org", "Tapline.Example.org:8443"] {
            assert_eq!(field(&[(HOST, host)], true, false), None, "{host}");
        }
    }

    #[test]
    fn a_second_host_or_origin_is_refused() {
        assert_eq!(field(&[(HOST, "localhost"), (HOST, "evil.example")], true, false).as_deref(), Some("host"));
        let twice = [(HOST, "a"), (ORIGIN, "http://a"), (ORIGIN, "http://b")];
        assert_eq!(field(&twice, true, true).as_deref(), Some("origin"));
    }
}
