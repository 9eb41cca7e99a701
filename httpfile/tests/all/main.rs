//! Objects at a server that keeps the rules of HTTP, and at one that breaks them.

mod downloads;
mod hostile;

use std::sync::Arc;
use std::sync::Mutex;
use std::time::Duration;

use httpfile::{Client, HttpError, Object, Options, Url};
use testkit::web_server::WebServer;

/// What was reported to people, by all tests of this process.
static REPORTS: Mutex<Vec<String>> = Mutex::new(Vec::new());

fn report(line: &str) {
    REPORTS.lock().unwrap().push(line.to_owned());
}

fn never() -> bool {
    false
}

/// Options with this patience.
fn options(patience: Duration) -> Options {
    Options { allow_http: true, patience: Some(patience), stopping: never, report }
}

fn client() -> Arc<Client> {
    Arc::new(Client::new(options(Duration::from_secs(60))))
}

/// A client that does not repeat anything.
fn impatient() -> Arc<Client> {
    Arc::new(Client::new(options(Duration::ZERO)))
}

fn url(server: &WebServer, path: &str) -> Url {
    server.url(path).parse().unwrap()
}

fn open(client: &Arc<Client>, server: &WebServer) -> Result<(Object, Vec<u8>), HttpError> {
    Object::open(client, &url(server, "/a"))
}

/// Bytes that are not repeated.
fn noise(len: usize) -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    };
    let mut bytes: Vec<u8> = Vec::new();
    while bytes.len() < len {
        bytes.extend(next());
    }
    bytes.truncate(len);
    bytes
}
