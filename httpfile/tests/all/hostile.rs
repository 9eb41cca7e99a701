//! Servers that break the rules, change the object, or are away.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use httpfile::{Client, HttpErrorKind, Object, Options, Reader};
use testkit::web_server::{Trick, WebServer};

use crate::{REPORTS, client, impatient, noise, open, options, report, url};

const MIB: usize = 1 << 20;

fn server(len: usize) -> (WebServer, Vec<u8>) {
    let (server, bytes) = (WebServer::start(), noise(len));
    server.put("/a", &bytes);
    (server, bytes)
}

/// Reads all of an object.
fn read(reader: &Reader, len: usize) -> Result<Vec<u8>, httpfile::HttpError> {
    let mut bytes = vec![0; len];
    reader.read_at(0, &mut bytes).map(|()| bytes)
}

#[test]
fn an_object_is_read_in_blocks_that_are_requested_once() {
    let (server, bytes) = server(3 * MIB + 5);
    let (object, first) = open(&client(), &server).unwrap();
    assert_eq!(object.size(), bytes.len() as u64);
    assert!(object.identity().validator.is_strong());
    let reader = Arc::new(Reader::new(object, first));
    let threads: Vec<_> = (0..4)
        .map(|_| {
            let (reader, len) = (Arc::clone(&reader), bytes.len());
            std::thread::spawn(move || read(&reader, len).unwrap())
        })
        .collect();
    threads.into_iter().for_each(|thread| assert!(thread.join().unwrap() == bytes));
    let mut few = [0; 10];
    reader.read_at(MIB as u64 - 5, &mut few).unwrap();
    assert_eq!(few, bytes[MIB - 5..MIB + 5]);
    let mut requests = server.requests();
    requests.sort();
    assert_eq!(requests, ["/a 0-1048575", "/a 1048576-2097151", "/a 2097152-3145727", "/a 3145728-3145732"]);
}

/// What a server cannot be opened with, and a word of the reason.
#[test]
fn an_object_is_not_opened_against_the_rules() {
    let (server, _) = server(2 * MIB);
    for (trick, why) in [
        (Trick::AnotherRange, "in place of"),
        (Trick::BadRange("bytes 0-1048575/*"), "Content-Range"),
        (Trick::BadRange("bytes 0-1048575/99999999999999999999"), "Content-Range"),
        (Trick::BadRange("none"), "Content-Range"),
        (Trick::LongBody, "may have 1048576"),
        (Trick::AllOfIt, "all of it"),
        (Trick::Compressed, "compresses"),
        (Trick::EndlessHeaders, "not valid"),
        (Trick::Garbage, "not valid"),
        (Trick::NoValidator, "neither a strong ETag nor Last-Modified"),
        (Trick::Claims(u64::MAX / 2), "more than any disk"),
        (Trick::Status(204, ""), "204"),
        (Trick::Status(400, ""), "400"),
        (Trick::Status(206, ""), "lacks Content-Range"),
    ] {
        server.play(trick.clone());
        let error = open(&client(), &server).unwrap_err();
        assert_eq!(error.kind, HttpErrorKind::Refused, "{trick:?}: {error}");
        assert!(error.to_string().contains(why), "{trick:?}: {error}");
    }
    for (trick, why) in [(Trick::Status(404, ""), "404"), (Trick::Status(401, ""), "401")] {
        server.play(trick.clone());
        let error = open(&client(), &server).unwrap_err();
        assert_eq!(error.kind, HttpErrorKind::Missing, "{trick:?}: {error}");
        assert!(error.to_string().contains(why), "{trick:?}: {error}");
    }
    for trick in [Trick::HalfBody, Trick::Closes, Trick::Status(500, "")] {
        server.play(trick.clone());
        let error = open(&client(), &server).unwrap_err();
        assert_eq!(error.kind, HttpErrorKind::Away, "{trick:?}: {error}");
    }
}

#[test]
fn an_empty_object_is_refused() {
    let server = WebServer::start();
    server.put("/a", &[]);
    assert!(open(&client(), &server).unwrap_err().to_string().contains("empty"));
}

#[test]
fn a_change_ends_all_reading() {
    let (server, bytes) = server(4 * MIB);
    let (object, first) = open(&client(), &server).unwrap();
    let reader = Reader::new(object, first);
    server.put("/a", &noise(4 * MIB));
    let error = read(&reader, bytes.len()).unwrap_err();
    assert_eq!(error.kind, HttpErrorKind::Changed, "{error}");
    assert!(error.to_string().contains("has changed"), "{error}");
    // Also if the old object comes back.
    let requests = server.requests().len();
    reader.read_at(3 << 20, &mut [0; 1]).unwrap_err();
    assert_eq!((server.requests().len(), reader.object().broken().unwrap().kind), (requests, HttpErrorKind::Changed));
    // What is kept may be read: it was of the object that was opened.
    reader.read_at(0, &mut [0; 1]).unwrap();
}

/// A server that ignores the condition of the request.
#[test]
fn a_change_is_noticed_in_the_answer() {
    let (server, _) = server(4 * MIB);
    for (trick, kind) in [
        (Trick::Claims(5 << 20), HttpErrorKind::Changed),
        (Trick::ForgetsTag, HttpErrorKind::Refused),
        (Trick::WeakTag, HttpErrorKind::Changed),
        (Trick::AnotherRange, HttpErrorKind::Changed),
        (Trick::Status(416, ""), HttpErrorKind::Changed),
        (Trick::Status(412, ""), HttpErrorKind::Changed),
        (Trick::AllOfIt, HttpErrorKind::Refused),
        (Trick::Compressed, HttpErrorKind::Refused),
    ] {
        server.play(Trick::None);
        let (object, first) = open(&client(), &server).unwrap();
        server.play(trick.clone());
        let error = read(&Reader::new(object, first), 4 * MIB).unwrap_err();
        assert_eq!(error.kind, kind, "{trick:?}: {error}");
    }
}

#[test]
fn an_object_with_only_a_date_is_read_and_reported() {
    let (server, bytes) = server(2 * MIB);
    server.play(Trick::WeakTag);
    let (object, first) = open(&client(), &server).unwrap();
    assert!(!object.identity().validator.is_strong());
    let name = object.url().to_string();
    assert!(REPORTS.lock().unwrap().iter().any(|line| line.contains(&name) && line.contains("date and length")));
    let reader = Reader::new(object, first);
    assert!(read(&reader, bytes.len()).unwrap() == bytes);
    // Its date changes with it.
    let (object, first) = open(&client(), &server).unwrap();
    server.put("/a", &noise(2 * MIB));
    assert_eq!(read(&Reader::new(object, first), 2 * MIB).unwrap_err().kind, HttpErrorKind::Changed);
}

#[test]
fn lost_connections_and_busy_servers_are_tried_again() {
    let (server, bytes) = server(4 * MIB);
    for trick in [Trick::Closes, Trick::HalfBody, Trick::Status(503, ""), Trick::Status(429, "Retry-After: 0\r\n")] {
        server.play(Trick::None);
        let (object, first) = open(&client(), &server).unwrap();
        server.play_times(trick, 2);
        assert!(read(&Reader::new(object, first), bytes.len()).unwrap() == bytes);
    }
    let again = "answers again";
    assert!(REPORTS.lock().unwrap().iter().any(|line| line.contains(&server.url("/a")) && line.contains(again)));
}

#[test]
fn patience_ends() {
    let (server, bytes) = server(4 * MIB);
    let (object, first) = open(&impatient(), &server).unwrap();
    server.play(Trick::Status(503, ""));
    let error = read(&Reader::new(object, first), bytes.len()).unwrap_err();
    assert_eq!(error.kind, HttpErrorKind::Away, "{error}");
    // A pause that is longer than patience is not waited for.
    server.play(Trick::None);
    let (object, first) = open(&client(), &server).unwrap();
    server.play(Trick::Status(429, "Retry-After: 3600\r\n"));
    let error = read(&Reader::new(object, first), bytes.len()).unwrap_err();
    assert!(error.to_string().contains("requests a pause of 3600 s"), "{error}");
}

static STOPPED: AtomicBool = AtomicBool::new(false);

#[test]
fn a_process_that_is_to_end_waits_for_no_server() {
    let stopping = || STOPPED.load(Ordering::Relaxed);
    let options = Options { allow_http: true, patience: None, stopping, report };
    let (server, bytes) = server(4 * MIB);
    let (object, first) = open(&Arc::new(Client::new(options)), &server).unwrap();
    server.play(Trick::Status(503, "Retry-After: 3600\r\n"));
    let before = server.requests().len();
    let reading = std::thread::spawn(move || read(&Reader::new(object, first), bytes.len()).unwrap_err());
    server.wait_for_requests(before + 1);
    STOPPED.store(true, Ordering::Relaxed);
    assert_eq!(reading.join().unwrap().kind, HttpErrorKind::Stopped);
}

#[test]
fn redirections_are_followed_once_and_have_a_limit() {
    let (server, bytes) = server(3 * MIB);
    let mirror = WebServer::start();
    mirror.play(Trick::Redirects(format!("{}?x=1", server.url("/a"))));
    let (object, first) = open(&client(), &mirror).unwrap();
    assert_eq!(mirror.requests().len(), 1);
    let reader = Reader::new(object, first);
    assert!(read(&reader, bytes.len()).unwrap() == bytes);
    assert_eq!(mirror.requests().len(), 1, "the place is remembered");
    mirror.play(Trick::Redirects("/b".into()));
    let error = open(&client(), &mirror).unwrap_err();
    assert!(error.to_string().contains("redirected more than 5 times"), "{error}");
    for to in ["ftp://127.0.0.1/a", "http://me:x@127.0.0.1/a", "http:///a", "http://127.0.0.1:x/a"] {
        mirror.play(Trick::Redirects(to.into()));
        assert_eq!(open(&client(), &mirror).unwrap_err().kind, HttpErrorKind::Refused, "{to}");
    }
}

/// As those of content delivery networks, with signatures.
#[test]
fn a_redirection_that_has_expired_is_requested_again() {
    let (server, bytes) = server(3 * MIB);
    let mirror = WebServer::start();
    mirror.play(Trick::Redirects(server.url("/a")));
    let (object, first) = open(&client(), &mirror).unwrap();
    server.play_times(Trick::Status(403, ""), 1);
    assert!(read(&Reader::new(object, first), bytes.len()).unwrap() == bytes);
    assert!(mirror.requests().len() >= 2);
}

#[test]
fn plain_http_is_refused_unless_it_is_allowed() {
    let (server, _) = server(MIB);
    let careful = Options { allow_http: false, ..options(Duration::ZERO) };
    let error = Object::open(&Arc::new(Client::new(careful)), &url(&server, "/a")).unwrap_err();
    assert!(error.advice.unwrap().contains("--insecure-http"));
    assert_eq!(server.requests(), [""; 0]);
}

/// It takes as long as the time-out says, which is the point.
#[test]
#[ignore = "slow: run by `make test-all`"]
fn a_silent_server_is_given_up() {
    let (server, _) = server(2 * MIB);
    server.play(Trick::Silence);
    let begun = Instant::now();
    assert_eq!(open(&client(), &server).unwrap_err().kind, HttpErrorKind::Away);
    assert!(begun.elapsed() < Duration::from_secs(120));
}
