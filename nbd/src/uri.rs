//! NBD URIs (`doc/uri.md` of the NetworkBlockDevice project): `nbd://HOST[:PORT]/EXPORT`,
//! `nbd+unix:///EXPORT?socket=PATH`; `nbds:` and `nbds+unix:` require TLS, whose parameters are `tls-certificates=DIR`
//! and `tls-hostname=NAME`. `token-file=PATH` is a parameter of Tapline: the token of a daemon's NBD address is in that
//! file, since a URI is shown in many places, and recorded in images.
//!
//! It knows nothing about sockets, and reads no file. Invariant: an export's name is at most as long as the protocol
//! allows, and has no token.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use crate::wire::STRING_MAX;

/// The port of NBD.
const PORT: u16 = 10809;
/// Schemes, with what follows them; whether they are for Unix sockets, and whether they require TLS.
const SCHEMES: [(&str, bool, bool); 4] =
    [("nbd://", false, false), ("nbd+unix://", true, false), ("nbds://", false, true), ("nbds+unix://", true, true)];

/// What separates the name of an export at a daemon's NBD address from a token.
pub const TOKEN: &str = "?token=";

/// Where a server is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    /// Over TCP: a host's name or address, and the port.
    Tcp(String, u16),
    /// At a Unix socket.
    Unix(PathBuf),
}

/// How TLS is used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsParameters {
    /// The directory of certificates and keys; `None` for the default one.
    pub certificates: Option<PathBuf>,
    /// The name that the server's certificate must have.
    pub hostname: String,
}

/// An export of a server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Uri {
    /// The server.
    pub place: Place,
    /// The name of the export, which may be empty.
    pub export: String,
    /// TLS, if it is required; without it, it is not used.
    pub tls: Option<TlsParameters>,
    /// The file with the token that a daemon requires.
    pub token_file: Option<PathBuf>,
    text: String,
}

/// Why a text is not a usable URI.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadUri {
    /// Another scheme.
    #[error("use nbd://HOST[:PORT]/EXPORT or nbd+unix:///EXPORT?socket=PATH; nbds: for TLS")]
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
    /// A token is in the name of the export.
    #[error(
        "a token in a URI is shown in logs and recorded in images; write it to a file that only you can read, and add \
         the parameter token-file=PATH"
    )]
    Token,
    /// The export's name is too long, or has a byte of zero.
    #[error("the name of the export is longer than 4096 bytes, or contains a zero byte")]
    Export,
}

impl FromStr for Uri {
    type Err = BadUri;

    fn from_str(text: &str) -> Result<Uri, BadUri> {
        let scheme = SCHEMES.iter().find_map(|&(word, unix, tls)| Some((text.strip_prefix(word)?, unix, tls)));
        let Some((rest, unix, tls)) = scheme else { return Err(BadUri::Scheme) };
        let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
        let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
        let export = unescape(path)?;
        if export.len() > STRING_MAX || export.contains('\0') {
            return Err(BadUri::Export);
        }
        if export.contains(TOKEN) {
            return Err(BadUri::Token);
        }
        let parameters = Parameters::read(query, unix, tls)?;
        let (place, host) = match (unix, parameters.socket) {
            // With TLS there may be the name of the server in front of the path.
            (true, Some(socket)) if authority.is_empty() => (Place::Unix(socket), "localhost".to_owned()),
            (true, Some(socket)) if tls => match tcp(authority)? {
                Place::Tcp(host, _) => (Place::Unix(socket), host),
                Place::Unix(_) => return Err(BadUri::Host),
            },
            (true, Some(_)) => return Err(BadUri::Host),
            (true, None) => return Err(BadUri::Socket),
            (false, _) => {
                let place = tcp(authority)?;
                let Place::Tcp(host, _) = &place else { return Err(BadUri::Host) };
                (place.clone(), host.clone())
            }
        };
        let hostname = parameters.hostname.unwrap_or(host);
        let tls = tls.then_some(TlsParameters { certificates: parameters.certificates, hostname });
        Ok(Uri { place, export, tls, token_file: parameters.token_file, text: text.to_owned() })
    }
}

/// The URI of the export with the empty name at a Unix socket.
pub fn of_socket(socket: &Path) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"/._-".contains(&byte);
    let escape = |byte: u8| if plain(byte) { char::from(byte).to_string() } else { format!("%{byte:02x}") };
    let path: String = socket.as_os_str().as_encoded_bytes().iter().map(|byte| escape(*byte)).collect();
    format!("nbd+unix:///?socket={path}")
}

impl fmt::Display for Uri {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// The parameters in a query.
#[derive(Default)]
struct Parameters {
    socket: Option<PathBuf>,
    certificates: Option<PathBuf>,
    hostname: Option<String>,
    token_file: Option<PathBuf>,
}

impl Parameters {
    /// Reads those that the scheme has. Another one is refused: `tls-verify-peer=false` must not be overlooked.
    fn read(query: &str, unix: bool, tls: bool) -> Result<Parameters, BadUri> {
        let mut found = Parameters::default();
        for parameter in query.split('&').filter(|parameter| !parameter.is_empty()) {
            let refused = || BadUri::Parameter(parameter.to_owned());
            let (name, value) = parameter.split_once('=').filter(|(_, value)| !value.is_empty()).ok_or_else(refused)?;
            let value = unescape(value)?;
            match name {
                "socket" if unix && found.socket.is_none() => found.socket = Some(value.into()),
                "tls-certificates" if tls && found.certificates.is_none() => found.certificates = Some(value.into()),
                "token-file" if tls && found.token_file.is_none() => found.token_file = Some(value.into()),
                "tls-hostname" if tls && found.hostname.is_none() => found.hostname = Some(value),
                _ => return Err(refused()),
            }
        }
        Ok(found)
    }
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
    fn the_uri_of_a_socket_names_it() {
        for path in ["/run/tapline/a.sock", "/tmp/a b&c?%\u{fc}/s"] {
            assert_eq!(parse(&of_socket(Path::new(path))), Ok((Place::Unix(path.into()), String::new())));
        }
    }

    #[test]
    fn a_uri_with_tls_has_the_name_of_the_server() {
        let tls = |text: &str| {
            let uri = text.parse::<Uri>().unwrap();
            let tls = uri.tls.unwrap();
            (uri.place, tls.hostname, tls.certificates)
        };
        let tcp = |host: &str, port| Place::Tcp(host.into(), port);
        assert_eq!(tls("nbds://host:1/e"), (tcp("host", 1), "host".into(), None));
        assert_eq!(tls("nbds://[::1]/e?tls-hostname=a.b"), (tcp("::1", 10809), "a.b".into(), None));
        let unix = || Place::Unix("s".into());
        assert_eq!(tls("nbds+unix:///e?socket=s"), (unix(), "localhost".into(), None));
        let named = tls("nbds+unix://host/?tls-certificates=%2fpki&socket=s");
        assert_eq!(named, (unix(), "host".into(), Some("/pki".into())));
        assert_eq!("nbd://host/e".parse::<Uri>().unwrap().tls, None);
    }

    #[test]
    fn a_token_is_in_a_file() {
        let uri: Uri = "nbds://host/e?token-file=%2fkeys/a".parse().unwrap();
        assert_eq!((uri.export.as_str(), uri.token_file), ("e", Some("/keys/a".into())));
        assert_eq!(parse("nbds://host/e%3Ftoken=secret"), Err(BadUri::Token));
        // It would be sent unencrypted.
        assert!(matches!(parse("nbd://host/e?token-file=t"), Err(BadUri::Parameter(_))));
        assert!(!parse("nbds://host/e%3Ftoken=secret").unwrap_err().to_string().contains("secret"));
    }

    #[test]
    fn a_uri_that_cannot_be_used_is_refused_by_its_reason() {
        for text in
            ["nbd://host/e?tls-hostname=x", "nbds://host/e?tls-verify-peer=false", "nbds://host/e?tls-hostname="]
        {
            assert!(matches!(parse(text), Err(BadUri::Parameter(_))), "{text}");
        }
        assert_eq!(parse("nbds://host/e?socket=s"), Err(BadUri::Parameter("socket=s".into())));
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
