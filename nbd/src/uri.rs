//! NBD URIs (`doc/uri.md` of the NetworkBlockDevice project): `nbd://HOST[:PORT]/EXPORT`,
//! `nbd+unix:///EXPORT?socket=PATH`.
//!
//! It knows nothing about sockets. Invariant: an export's name is at most as long as the protocol allows.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use crate::wire::STRING_MAX;

/// The port of NBD.
const PORT: u16 = 10809;
/// Schemes, with what follows them.
const TCP: &str = "nbd://";
const UNIX: &str = "nbd+unix://";
const TLS: [&str; 2] = ["nbds://", "nbds+unix://"];

/// Where a server is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    /// Over TCP: a host's name or address, and the port.
    Tcp(String, u16),
    /// At a Unix socket.
    Unix(PathBuf),
}

/// An export of a server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Uri {
    /// The server.
    pub place: Place,
    /// The name of the export, which may be empty.
    pub export: String,
    text: String,
}

/// Why a text is not a usable URI.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadUri {
    /// It requires TLS.
    #[error("nbds: is NBD over TLS, which this client does not have yet; use nbd: or nbd+unix: in a trusted network")]
    Tls,
    /// Another scheme.
    #[error("use nbd://HOST[:PORT]/EXPORT or nbd+unix:///EXPORT?socket=PATH")]
    Scheme,
    /// The host is missing, or has a user.
    #[error("the host is missing or has a user name; use nbd://HOST[:PORT]/EXPORT")]
    Host,
    /// The port is not a number of a port.
    #[error("'{0}' is not a port")]
    Port(String),
    /// There is no socket.
    #[error("the socket is missing; use nbd+unix:///EXPORT?socket=PATH")]
    Socket,
    /// A parameter that would be ignored.
    #[error("the parameter '{0}' is not supported")]
    Parameter(String),
    /// `%` without two hexadecimal digits, or not UTF-8.
    #[error("it has a '%' that is not followed by two hexadecimal digits, or is not UTF-8")]
    Escape,
    /// The export's name is too long, or has a byte of zero.
    #[error("the name of the export is longer than 4096 bytes, or contains a zero byte")]
    Export,
}

impl FromStr for Uri {
    type Err = BadUri;

    fn from_str(text: &str) -> Result<Uri, BadUri> {
        if TLS.iter().any(|scheme| text.starts_with(scheme)) {
            return Err(BadUri::Tls);
        }
        let (unix, rest) = match (text.strip_prefix(TCP), text.strip_prefix(UNIX)) {
            (Some(rest), _) => (false, rest),
            (None, Some(rest)) => (true, rest),
            (None, None) => return Err(BadUri::Scheme),
        };
        let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
        let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
        let export = unescape(path)?;
        if export.len() > STRING_MAX || export.contains('\0') {
            return Err(BadUri::Export);
        }
        let socket = socket(query)?;
        let place = match (unix, socket) {
            (true, Some(socket)) if authority.is_empty() => Place::Unix(socket),
            (true, Some(_)) => return Err(BadUri::Host),
            (true, None) => return Err(BadUri::Socket),
            (false, Some(_)) => return Err(BadUri::Parameter("socket".to_owned())),
            (false, None) => tcp(authority)?,
        };
        Ok(Uri { place, export, text: text.to_owned() })
    }
}

impl fmt::Display for Uri {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// The socket in a query.
fn socket(query: &str) -> Result<Option<PathBuf>, BadUri> {
    let mut found = None;
    for parameter in query.split('&').filter(|parameter| !parameter.is_empty()) {
        match parameter.split_once('=') {
            Some(("socket", path)) if !path.is_empty() && found.is_none() => found = Some(unescape(path)?.into()),
            _ => return Err(BadUri::Parameter(parameter.to_owned())),
        }
    }
    Ok(found)
}

fn tcp(authority: &str) -> Result<Place, BadUri> {
    let (host, port) = match authority.strip_prefix('[') {
        Some(rest) => {
            let (host, port) = rest.split_once(']').ok_or(BadUri::Host)?;
            let port = if port.is_empty() { None } else { Some(port.strip_prefix(':').ok_or(BadUri::Host)?) };
            (host.to_owned(), port)
        }
        None => {
            let (host, port) = authority.split_once(':').map_or((authority, None), |(host, port)| (host, Some(port)));
            (unescape(host)?, port)
        }
    };
    if host.is_empty() || host.contains('@') {
        return Err(BadUri::Host);
    }
    let number = |port: &str| port.parse().ok().filter(|&port| port > 0).ok_or_else(|| BadUri::Port(port.to_owned()));
    Ok(Place::Tcp(host, port.map_or(Ok(PORT), number)?))
}

/// Resolves `%XX`.
fn unescape(text: &str) -> Result<String, BadUri> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&first, after)) = rest.split_first() {
        if first != b'%' {
            bytes.push(first);
            rest = after;
            continue;
        }
        let digits = after.get(..2).and_then(|digits| std::str::from_utf8(digits).ok());
        let digits = digits.filter(|digits| digits.bytes().all(|digit| digit.is_ascii_hexdigit()));
        bytes.push(digits.and_then(|digits| u8::from_str_radix(digits, 16).ok()).ok_or(BadUri::Escape)?);
        rest = after.get(2..).unwrap_or_default();
    }
    String::from_utf8(bytes).map_err(|_| BadUri::Escape)
}

#[cfg(test)]
mod test {
    use super::*;

    fn parse(text: &str) -> Result<(Place, String), BadUri> {
        text.parse::<Uri>().map(|uri| (uri.place, uri.export))
    }

    #[test]
    fn a_uri_names_a_server_and_an_export() {
        let tcp = |host: &str, port, export: &str| Ok((Place::Tcp(host.into(), port), export.into()));
        assert_eq!(parse("nbd://host"), tcp("host", 10809, ""));
        assert_eq!(parse("nbd://host:10810/"), tcp("host", 10810, ""));
        assert_eq!(parse("nbd://[::1]:1/a/b%20c"), tcp("::1", 1, "a/b c"));
        assert_eq!(parse("nbd://[::1]/a"), tcp("::1", 10809, "a"));
        let unix = |path: &str, export: &str| Ok((Place::Unix(path.into()), export.into()));
        assert_eq!(parse("nbd+unix:///e?socket=/run/s%3f"), unix("/run/s?", "e"));
        assert_eq!(parse("nbd+unix://?socket=s"), unix("s", ""));
        assert_eq!("nbd://host/e".parse::<Uri>().unwrap().to_string(), "nbd://host/e");
    }

    #[test]
    fn a_uri_that_cannot_be_used_is_refused_by_its_reason() {
        assert_eq!(parse("nbds://host/e"), Err(BadUri::Tls));
        assert_eq!(parse("nbds+unix:///e?socket=s"), Err(BadUri::Tls));
        assert_eq!(parse("http://host/e"), Err(BadUri::Scheme));
        assert_eq!(parse("nbd:///e"), Err(BadUri::Host));
        assert_eq!(parse("nbd://user@host/e"), Err(BadUri::Host));
        assert_eq!(parse("nbd://[::1/e"), Err(BadUri::Host));
        assert_eq!(parse("nbd://[::1]x/e"), Err(BadUri::Host));
        assert_eq!(parse("nbd+unix://host/e?socket=s"), Err(BadUri::Host));
        assert_eq!(parse("nbd://host:0/e"), Err(BadUri::Port("0".into())));
        assert_eq!(parse("nbd://host:99999/e"), Err(BadUri::Port("99999".into())));
        assert_eq!(parse("nbd+unix:///e"), Err(BadUri::Socket));
        assert_eq!(parse("nbd://host/e?tls=x"), Err(BadUri::Parameter("tls=x".into())));
        assert_eq!(parse("nbd+unix:///e?socket=a&socket=b"), Err(BadUri::Parameter("socket=b".into())));
        assert_eq!(parse("nbd://host/%zz"), Err(BadUri::Escape));
        assert_eq!(parse("nbd://host/%+1"), Err(BadUri::Escape));
        assert_eq!(parse("nbd://host/%f"), Err(BadUri::Escape));
        assert_eq!(parse("nbd://host/%ff"), Err(BadUri::Escape));
        assert_eq!(parse("nbd://host/a%00"), Err(BadUri::Export));
        assert_eq!(parse(&format!("nbd://host/{}", "x".repeat(4097))), Err(BadUri::Export));
    }
}
