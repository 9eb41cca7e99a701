//! A server of HTTP/1.1 on plain sockets that answers range requests, and breaks the rules as a test requests.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

/// How the server answers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Trick {
    /// By the rules.
    None,
    /// Another range than that requested.
    AnotherRange,
    /// A Content-Range that is not one.
    BadRange(&'static str),
    /// Half of the body, and the end of the connection.
    HalfBody,
    /// More bytes than the header says fit the range.
    LongBody,
    /// All of the object, with 200.
    AllOfIt,
    /// Nothing: the connection stays open.
    Silence,
    /// The connection ends without an answer.
    Closes,
    /// This status, with these headers.
    Status(u16, &'static str),
    /// A redirection to this URL.
    Redirects(String),
    /// A header that says the body is compressed.
    Compressed,
    /// Headers without end.
    EndlessHeaders,
    /// No HTTP at all.
    Garbage,
    /// Only a weak ETag.
    WeakTag,
    /// A weak ETag and no date.
    NoValidator,
    /// An object of this length, by the headers.
    Claims(u64),
    /// Without ETags from now on, but by the rules otherwise.
    ForgetsTag,
    /// By the rules, and a part that has only zeroes in place of the bytes.
    Lies,
}

/// The bytes of an object, and the number in its ETag.
type Version = (Arc<Vec<u8>>, u32);

#[derive(Debug)]
struct State {
    objects: BTreeMap<String, Version>,
    trick: Trick,
    /// How many more requests the trick is for; `None` for all.
    times: Option<u32>,
    /// Requests so far: path and range.
    requests: Vec<String>,
    /// Requests that may still be answered; `None` for all.
    budget: Option<u32>,
    version: u32,
}

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

/// A server that runs on threads of its own until the process ends.
#[derive(Debug)]
pub struct WebServer {
    address: SocketAddr,
    shared: Arc<Shared>,
}

impl WebServer {
    /// Starts it, without objects.
    pub fn start() -> WebServer {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let (objects, requests) = Default::default();
        let state = State { objects, trick: Trick::None, times: None, requests, budget: None, version: 0 };
        let shared = Arc::new(Shared { state: Mutex::new(state), changed: Condvar::new() });
        let server = Arc::clone(&shared);
        std::thread::spawn(move || {
            for socket in listener.incoming().flatten() {
                let server = Arc::clone(&server);
                // A client that goes away is its own business.
                std::thread::spawn(move || server.serve(socket).unwrap_or_default());
            }
        });
        WebServer { address, shared }
    }

    /// The URL of an object.
    pub fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }

    /// Puts an object in place, with an ETag of its own.
    pub fn put(&self, path: &str, bytes: &[u8]) {
        let mut state = self.shared.state.lock().unwrap();
        state.version += 1;
        let version = state.version;
        state.objects.insert(path.to_owned(), (Arc::new(bytes.to_vec()), version));
    }

    /// Makes it answer in this way.
    pub fn play(&self, trick: Trick) {
        let mut state = self.shared.state.lock().unwrap();
        (state.trick, state.times) = (trick, None);
        self.shared.changed.notify_all();
    }

    /// Makes it answer the next requests in this way, and the later ones by the rules.
    pub fn play_times(&self, trick: Trick, times: u32) {
        let mut state = self.shared.state.lock().unwrap();
        (state.trick, state.times) = (trick, Some(times));
    }

    /// Limits how many more requests it answers; others wait until this is called again.
    pub fn answer_only(&self, requests: Option<u32>) {
        self.shared.state.lock().unwrap().budget = requests;
        self.shared.changed.notify_all();
    }

    /// The requests so far: path and range.
    pub fn requests(&self) -> Vec<String> {
        self.shared.state.lock().unwrap().requests.clone()
    }

    /// Waits until it has received this number of requests.
    pub fn wait_for_requests(&self, count: usize) {
        let mut state = self.shared.state.lock().unwrap();
        while state.requests.len() < count {
            state = self.shared.changed.wait(state).unwrap();
        }
    }
}

/// A request.
struct Request {
    path: String,
    range: Option<(usize, usize)>,
    if_match: Option<String>,
}

impl Shared {
    fn serve(&self, mut socket: TcpStream) -> std::io::Result<()> {
        while let Some(request) = receive(&mut socket)? {
            let (trick, object) = self.judge(&request);
            if !answer(&mut socket, &request, trick, object)? {
                break;
            }
        }
        Ok(())
    }

    /// Counts a request, waits for its turn, and returns how it is answered.
    fn judge(&self, request: &Request) -> (Trick, Option<Version>) {
        let mut state = self.state.lock().unwrap();
        let range = request.range.map_or(String::new(), |(first, last)| format!(" {first}-{last}"));
        state.requests.push(format!("{}{range}", request.path));
        self.changed.notify_all();
        while state.budget == Some(0) {
            state = self.changed.wait(state).unwrap();
        }
        state.budget = state.budget.map(|budget| budget - 1);
        let trick = match &mut state.times {
            Some(0) => Trick::None,
            Some(times) => {
                *times -= 1;
                state.trick.clone()
            }
            None => state.trick.clone(),
        };
        (trick, state.objects.get(&request.path).cloned())
    }
}

fn receive(socket: &mut TcpStream) -> std::io::Result<Option<Request>> {
    let mut text = Vec::new();
    while !text.ends_with(b"\r\n\r\n") {
        let mut byte = [0];
        if socket.read(&mut byte)? == 0 {
            return Ok(None);
        }
        text.push(byte[0]);
    }
    let text = String::from_utf8_lossy(&text).into_owned();
    let header = |name: &str| {
        let mut lines = text.lines().filter_map(|line| line.split_once(": "));
        lines.find(|(found, _)| found.eq_ignore_ascii_case(name)).map(|(_, value)| value.to_owned())
    };
    let range = header("range").map(|range| {
        let (first, last) = range.strip_prefix("bytes=").unwrap().split_once('-').unwrap();
        (first.parse().unwrap(), last.parse().unwrap())
    });
    let path = text.split(' ').nth(1).unwrap().split('?').next().unwrap().to_owned();
    Ok(Some(Request { path, range, if_match: header("if-match") }))
}

/// Answers; returns whether the connection is kept.
fn answer(socket: &mut TcpStream, request: &Request, trick: Trick, object: Option<Version>) -> std::io::Result<bool> {
    let status = |socket: &mut TcpStream, status: &str, headers: &str| {
        write!(socket, "HTTP/1.1 {status} x\r\n{headers}Content-Length: 0\r\n\r\n")
    };
    match &trick {
        Trick::Silence => loop {
            std::thread::sleep(Duration::from_secs(3600));
        },
        Trick::Closes => return Ok(false),
        Trick::Garbage => return socket.write_all(b"SSH-2.0-OpenSSH_9.2\r\n\r\n").map(|()| false),
        Trick::EndlessHeaders => {
            socket.write_all(b"HTTP/1.1 206 x\r\n")?;
            loop {
                socket.write_all(b"X-More: and more and more and more and more\r\n")?;
            }
        }
        Trick::Status(code, headers) => {
            return status(socket, &code.to_string(), headers).map(|()| true);
        }
        Trick::Redirects(to) => {
            return status(socket, "302", &format!("Location: {to}\r\n")).map(|()| true);
        }
        _ => {}
    }
    let Some((bytes, version)) = object else { return status(socket, "404", "").map(|()| true) };
    let tag = format!("\"{version}\"");
    if request.if_match.as_ref().is_some_and(|wanted| *wanted != tag) {
        return status(socket, "412", "").map(|()| true);
    }
    let validators = match trick {
        Trick::WeakTag => format!("ETag: W/{tag}\r\nLast-Modified: Sat, 01 Aug 2026 10:00:0{version} GMT\r\n"),
        Trick::NoValidator => format!("ETag: W/{tag}\r\n"),
        Trick::ForgetsTag => String::new(),
        _ => format!("ETag: {tag}\r\n"),
    };
    let encoding = if trick == Trick::Compressed { "Content-Encoding: gzip\r\n" } else { "" };
    let Some((first, last)) = request.range.filter(|_| trick != Trick::AllOfIt) else {
        write!(socket, "HTTP/1.1 200 OK\r\n{validators}{encoding}Content-Length: {}\r\n\r\n", bytes.len())?;
        return socket.write_all(&bytes).map(|()| true);
    };
    let end = (last + 1).min(bytes.len());
    if first >= end {
        return status(socket, "416", &format!("Content-Range: bytes */{}\r\n", bytes.len())).map(|()| true);
    }
    let range = match &trick {
        Trick::AnotherRange => format!("bytes {}-{}/{}", first + 1, end, bytes.len() + 1),
        Trick::BadRange(text) => (*text).to_owned(),
        Trick::Claims(len) => format!("bytes {first}-{}/{len}", end - 1),
        _ => format!("bytes {first}-{}/{}", end - 1, bytes.len()),
    };
    let part = &bytes[first..end];
    let len = if trick == Trick::LongBody { part.len() + 1 } else { part.len() };
    write!(socket, "HTTP/1.1 206 x\r\n{validators}{encoding}Content-Range: {range}\r\nContent-Length: {len}\r\n\r\n")?;
    match trick {
        Trick::HalfBody => socket.write_all(&part[..part.len() / 2]).map(|()| false),
        Trick::LongBody => socket.write_all(&[part, &[0]].concat()).map(|()| true),
        Trick::Lies => socket.write_all(&vec![0; part.len()]).map(|()| true),
        _ => socket.write_all(part).map(|()| true),
    }
}
