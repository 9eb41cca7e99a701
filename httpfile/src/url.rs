//! URLs of objects: `http://HOST[:PORT]/PATH[?QUERY]` and `https:` (RFC 3986).
//!
//! Invariant: a [`Url`] has a host and no credentials that are recognized as such: URLs are on command lines, in logs
//! and in the journal of the daemon.

use std::fmt;
use std::str::FromStr;

use ureq::http::Uri;

/// Longer than any that servers accept; most stop at 8 KiB for a whole request line.
const LEN_MAX: usize = 4096;

/// Query parameters that let their holder read an object: signatures of S3, Google and Azure, and bearer tokens (RFC
/// 6750, section 2.3).
const SECRETS: [&str; 7] =
    ["x-amz-signature", "x-amz-security-token", "x-goog-signature", "signature", "sig", "access_token", "token"];

/// The URL of an object. Displayed without its query.
#[derive(Clone, PartialEq, Eq)]
pub struct Url {
    text: String,
    uri: Uri,
}

/// Why a text is not the URL of an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadUrl {
    /// Another scheme, or no URL at all.
    #[error("use https://HOST[:PORT]/PATH")]
    Scheme,
    /// There is no host, or the port is not a number.
    #[error("its host or port is missing or malformed; use https://HOST[:PORT]/PATH")]
    Host,
    /// A user name, perhaps with a password.
    #[error("it has a user name or password, which would be shown in the list of processes and in logs")]
    User,
    /// A parameter that grants access.
    #[error("its query has a signature or token, which would be shown in the list of processes and in logs")]
    Secret,
    /// Something that no URL of an object has.
    #[error("it has a fragment (#), a space or another character that must be written as %XX")]
    Character,
    /// It is too long.
    #[error("it is longer than {LEN_MAX} bytes")]
    Long,
}

impl FromStr for Url {
    type Err = BadUrl;

    fn from_str(text: &str) -> Result<Url, BadUrl> {
        let url = Url::of_redirection(text)?;
        let query = url.uri.query().unwrap_or_default();
        let mut names = query.split('&').map(|pair| pair.split_once('=').map_or(pair, |(name, _)| name));
        if names.any(|name| SECRETS.iter().any(|secret| name.eq_ignore_ascii_case(secret))) {
            return Err(BadUrl::Secret);
        }
        Ok(url)
    }
}

impl Url {
    /// Parses a URL that a server has sent: its query may have a signature.
    pub(crate) fn of_redirection(text: &str) -> Result<Url, BadUrl> {
        let Some((scheme, rest)) = text.split_once("://") else { return Err(BadUrl::Scheme) };
        if !scheme.eq_ignore_ascii_case("https") && !scheme.eq_ignore_ascii_case("http") {
            return Err(BadUrl::Scheme);
        }
        if text.len() > LEN_MAX {
            return Err(BadUrl::Long);
        }
        if !text.bytes().all(|byte| byte.is_ascii_graphic() && !b"#\"<>\\^`{|}".contains(&byte)) {
            return Err(BadUrl::Character);
        }
        let authority = rest.split(['/', '?']).next().unwrap_or_default();
        if authority.contains('@') {
            return Err(BadUrl::User);
        }
        let uri: Uri = text.parse().map_err(|_| BadUrl::Host)?;
        match uri.host() {
            Some(host) if !host.is_empty() && (uri.port_u16().is_some() || !ends_in_port(authority)) => {
                Ok(Url { text: text.to_owned(), uri })
            }
            _ => Err(BadUrl::Host),
        }
    }

    /// Whether it is `https:`.
    pub fn is_secure(&self) -> bool {
        self.uri.scheme_str().is_some_and(|scheme| scheme.eq_ignore_ascii_case("https"))
    }

    /// All of it, with its query.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// The last component of its path, with `%XX` decoded: the name of the file.
    pub fn name(&self) -> String {
        decoded(self.uri.path().rsplit('/').next().unwrap_or_default())
    }

    /// The URL of a file in the same directory; its query is not kept.
    pub(crate) fn sibling(&self, name: &str) -> Result<Url, BadUrl> {
        let directory = self.uri.path().rsplit_once('/').map_or("", |(directory, _)| directory);
        Url::of_redirection(&format!("{}{directory}/{name}", self.origin()))
    }

    /// The URL with something appended to its path; its query is not kept.
    pub(crate) fn with_suffix(&self, suffix: &str) -> Result<Url, BadUrl> {
        Url::of_redirection(&format!("{}{}{suffix}", self.origin(), self.uri.path()))
    }

    /// Resolves the reference of a redirection (RFC 3986, section 5.2) against this URL. Dot segments are left to the
    /// server.
    pub(crate) fn join(&self, reference: &str) -> Result<Url, BadUrl> {
        let reference = reference.split('#').next().unwrap_or_default();
        let scheme = if self.is_secure() { "https" } else { "http" };
        let path = self.uri.path();
        Url::of_redirection(&match reference {
            _ if reference.contains("://") && !reference.starts_with(['/', '?']) => reference.to_owned(),
            _ if reference.starts_with("//") => format!("{scheme}:{reference}"),
            _ if reference.starts_with('/') => format!("{}{reference}", self.origin()),
            _ if reference.starts_with('?') => format!("{}{path}{reference}", self.origin()),
            _ => {
                let directory = path.rsplit_once('/').map_or("", |(directory, _)| directory);
                format!("{}{directory}/{reference}", self.origin())
            }
        })
    }

    fn origin(&self) -> String {
        let scheme = if self.is_secure() { "https" } else { "http" };
        format!("{scheme}://{}", self.uri.authority().map_or("", |authority| authority.as_str()))
    }
}

/// Whether an authority has a colon behind its host, which a port must follow.
fn ends_in_port(authority: &str) -> bool {
    authority.rsplit_once(']').map_or(authority, |(_, behind)| behind).contains(':')
}

fn decoded(text: &str) -> String {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text;
    while let Some((before, behind)) = rest.split_once('%') {
        bytes.extend(before.bytes());
        let escaped = behind.get(..2).and_then(|digits| u8::from_str_radix(digits, 16).ok());
        bytes.push(escaped.unwrap_or(b'%'));
        rest = if escaped.is_some() { behind.get(2..).unwrap_or_default() } else { behind };
    }
    bytes.extend(rest.bytes());
    String::from_utf8_lossy(&bytes).into_owned()
}

impl fmt::Display for Url {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.text.split_once('?') {
            Some((path, _)) => write!(f, "{path}?..."),
            None => f.write_str(&self.text),
        }
    }
}

impl fmt::Debug for Url {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Url({self})")
    }
}

#[cfg(test)]
mod test {
    use super::*;

    fn url(text: &str) -> Url {
        text.parse().unwrap()
    }

    #[test]
    fn credentials_are_refused_and_not_shown() {
        let refused = |text: &str| text.parse::<Url>().unwrap_err();
        assert_eq!(refused("https://me:secret@host/a"), BadUrl::User);
        assert_eq!(refused("https://me@host/a"), BadUrl::User);
        assert_eq!(refused("https://host/a?b=1&X-Amz-Signature=0f"), BadUrl::Secret);
        assert_eq!(refused("https://host/a?access_token=0f"), BadUrl::Secret);
        assert_eq!(url("https://host/a?version=7").to_string(), "https://host/a?...");
        assert_eq!(format!("{:?}", url("https://host/a?version=7")), "Url(https://host/a?...)");
        let redirection = url("https://host/a").join("https://cdn/b?sig=1").unwrap();
        assert_eq!(
            (redirection.text(), redirection.to_string().as_str()),
            ("https://cdn/b?sig=1", "https://cdn/b?...")
        );
    }

    #[test]
    fn malformed_urls_are_refused() {
        let refused = |text: &str| text.parse::<Url>().unwrap_err();
        assert_eq!(refused("ftp://host/a"), BadUrl::Scheme);
        assert_eq!(refused("host/a"), BadUrl::Scheme);
        assert_eq!(refused("https:///a"), BadUrl::Host);
        assert_eq!(refused("https://host:x/a"), BadUrl::Host);
        assert_eq!(refused("https://host:/a"), BadUrl::Host);
        assert_eq!(refused("https://host:99999/a"), BadUrl::Host);
        assert_eq!(refused("https://host/a b"), BadUrl::Character);
        assert_eq!(refused("https://host/a\r\nX: y"), BadUrl::Character);
        assert_eq!(refused("https://host/a#b"), BadUrl::Character);
        assert_eq!(refused(&format!("https://host/{}", "a".repeat(LEN_MAX))), BadUrl::Long);
    }

    #[test]
    fn redirections_are_relative_to_the_url() {
        let from = url("https://host:8443/a/b.img?c=d");
        let joined = |reference: &str| from.join(reference).unwrap().text().to_owned();
        assert_eq!(joined("http://other/x"), "http://other/x");
        assert_eq!(joined("//other/x"), "https://other/x");
        assert_eq!(joined("/x?y#z"), "https://host:8443/x?y");
        assert_eq!(joined("x"), "https://host:8443/a/x");
        assert_eq!(joined("?x=1"), "https://host:8443/a/b.img?x=1");
        assert_eq!(from.join("https://me@other/x"), Err(BadUrl::User));
        assert_eq!(from.join("file:///etc/passwd"), Err(BadUrl::Scheme));
    }

    #[test]
    fn the_name_is_the_last_component_decoded() {
        assert_eq!(url("https://host/a/b%20c%zz.img?d/e").name(), "b c%zz.img");
        assert_eq!(url("https://host/").name(), "");
        assert_eq!(url("https://host/a/b?c").sibling("SHA256SUMS").unwrap().text(), "https://host/a/SHA256SUMS");
        assert_eq!(url("https://host/a/b?c").with_suffix(".sha256").unwrap().text(), "https://host/a/b.sha256");
    }
}
