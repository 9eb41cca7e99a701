//! The target of a request: its path and query (RFC 3986).

use std::fmt::{Display, Write};

use uuid::Uuid;

/// The version of the API, with which every path starts.
const ROOT: &str = "/v1/";

/// A path with a query.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target(String);

impl Target {
    /// A path of plain words separated by slashes.
    pub fn new(path: &str) -> Target {
        Target(format!("{ROOT}{path}"))
    }

    /// An object of a collection.
    pub fn object(collection: &str, uuid: Uuid) -> Target {
        Target(format!("{ROOT}{collection}/{uuid}"))
    }

    /// A verb of an object.
    pub fn verb(collection: &str, uuid: Uuid, verb: &str) -> Target {
        Target(format!("{ROOT}{collection}/{uuid}/{verb}"))
    }

    /// Adds a query parameter if there is a value for it.
    pub fn query(mut self, name: &str, value: Option<impl Display>) -> Target {
        if let Some(value) = value {
            let mark = if self.0.contains('?') { '&' } else { '?' };
            self.0.push(mark);
            self.0.push_str(name);
            self.0.push('=');
            escape(&value.to_string(), &mut self.0);
        }
        self
    }

    /// Adds a query parameter for each of the values.
    pub fn queries(self, name: &str, values: &[impl Display]) -> Target {
        values.iter().fold(self, |target, value| target.query(name, Some(value)))
    }

    /// The target as HTTP text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// Everything except unreserved characters is percent-encoded.
fn escape(value: &str, into: &mut String) {
    for byte in value.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) {
            into.push(char::from(byte));
        } else if write!(into, "%{byte:02X}").is_err() {
            unreachable!("writing to a string does not fail");
        }
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn values_are_escaped_in_the_query() {
        let target = Target::new("srs").query("match", Some("a b&open=true#ü")).query("sr", None::<Uuid>);
        assert_eq!(target.as_str(), "/v1/srs?match=a%20b%26open%3Dtrue%23%C3%BC");
    }

    #[test]
    fn query_parameters_are_joined() {
        let target = Target::verb("vbds", Uuid::nil(), "connect").query("for", Some("qemu")).query("n", Some(1));
        let target = target.queries("tag", &["a", "b"]);
        assert_eq!(target.as_str(), format!("/v1/vbds/{}/connect?for=qemu&n=1&tag=a&tag=b", Uuid::nil()));
    }
}
