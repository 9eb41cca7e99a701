//! Servers of one name, and what a connection does when they end it. The time is a parameter: nothing waits.

use std::cell::Cell;
use std::io::{ErrorKind, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use disk::{Action, FileDone, FileId, FileOffset, FileOp, OpId};
use memory::Segments;
use nbd::client::Client;

use super::super::RemoteOptions;
use super::super::socket::Target;
use super::Connection;

thread_local! {
    /// Whether the process of this test is to end.
    static STOPPING: Cell<bool> = const { Cell::new(false) };
}

/// A socket in a directory of its own, which is removed with this.
struct Server {
    listener: UnixListener,
    directory: PathBuf,
}

impl Server {
    fn new(name: &str) -> Server {
        let directory = std::env::temp_dir().join(format!("tapline-connection-{}-{name}", std::process::id()));
        std::fs::create_dir(&directory).unwrap();
        let listener = UnixListener::bind(directory.join("s")).unwrap();
        listener.set_nonblocking(true).unwrap();
        Server { listener, directory }
    }

    fn target(&self) -> Target {
        Target::Unix(self.directory.join("s"))
    }

    /// Accepts the connection that was made, if there is one, and sends all of a negotiation.
    fn negotiate(&self) -> Option<UnixStream> {
        let mut stream = match self.listener.accept() {
            Ok((stream, _)) => stream,
            Err(error) if error.kind() == ErrorKind::WouldBlock => return None,
            Err(error) => panic!("{error}"),
        };
        // An export of 4096 bytes with flush, of a server without structured replies.
        let reply = |option: u32, kind: u32, payload: &[u8]| {
            let len = u32::try_from(payload.len()).unwrap().to_be_bytes();
            let magic = 0x0003_e889_0455_65a9_u64.to_be_bytes();
            [&magic[..], &option.to_be_bytes(), &kind.to_be_bytes(), &len, payload].concat()
        };
        let info = [&0u16.to_be_bytes()[..], &4096u64.to_be_bytes(), &0b101u16.to_be_bytes()].concat();
        let greeting = [&b"NBDMAGICIHAVEOPT"[..], &3u16.to_be_bytes()].concat();
        let unsupported = reply(8, (1 << 31) + 1, b"");
        let bytes = [greeting, unsupported, reply(7, 3, &info), reply(7, 1, b"")].concat();
        stream.write_all(&bytes).unwrap();
        Some(stream)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        std::fs::remove_dir_all(&self.directory).unwrap();
    }
}

fn connection(servers: &[&Server], now: Instant) -> Connection {
    let client = Client::new("", true).unwrap();
    let uri = "nbd://host/".parse().unwrap();
    let targets = servers.iter().map(|server| server.target()).collect();
    let patience = Some(Duration::from_secs(60));
    let stopping = || STOPPING.with(Cell::get);
    let options = RemoteOptions { write: true, tls: None, patience, may_wait: false, stopping, report: |_| {} };
    Connection::new(client, uri, targets, options, now)
}

/// Connects, negotiates and loses the connection, if it is time to connect; returns the pause after that.
fn lose(connection: &mut Connection, server: &Server, now: Instant, done: &mut Vec<FileDone>) -> Option<Duration> {
    connection.turn(now, done);
    let stream = server.negotiate()?;
    connection.turn(now, done);
    assert!(connection.client.is_up());
    drop(stream);
    connection.turn(now, done);
    connection.sleeps(now)
}

#[test]
fn a_server_that_only_negotiates_is_tried_less_and_less_and_given_up() {
    let server = Server::new("negotiates");
    let (mut now, mut done) = (Instant::now(), Vec::new());
    let mut connection = connection(&[&server], now);
    now += lose(&mut connection, &server, now, &mut done).unwrap();
    let into = Segments::zeroed(512);
    let op = FileOp { id: OpId(0), file: FileId(0), action: Action::Read { at: FileOffset(0), into } };
    connection.push(op).unwrap();
    connection.opened();
    let (mut pauses, begun) = (Vec::new(), now);
    while let Some(pause) = lose(&mut connection, &server, now, &mut done).filter(|_| done.is_empty()) {
        pauses.push(pause);
        assert!(pauses.len() < 100, "it is not given up: {pauses:?}");
        now += pause;
    }
    assert_eq!(done.len(), 1);
    assert!((59..61).contains(&(now - begun).as_secs()), "{pauses:?}");
    // The last one ends when the operation is given up.
    pauses.pop();
    assert!(pauses.is_sorted() && pauses.last() == Some(&Duration::from_secs(5)), "{pauses:?}");
}

#[test]
fn after_a_loss_only_the_server_that_was_negotiated_with_is_tried() {
    let (one, other) = (Server::new("one"), Server::new("other"));
    let mut now = Instant::now();
    let mut connection = connection(&[&one, &other], now);
    connection.turn(now, &mut Vec::new());
    for round in 0..5 {
        let stream = one.negotiate().unwrap_or_else(|| panic!("round {round}: not connected"));
        connection.turn(now, &mut Vec::new());
        assert!(connection.client.is_up());
        drop(stream);
        connection.turn(now, &mut Vec::new());
        assert!(!connection.client.is_up());
        now += Duration::from_secs(10);
        connection.turn(now, &mut Vec::new());
    }
    assert!(other.negotiate().is_none(), "the other server was connected to");
}

#[test]
fn a_violation_closes_the_connection_although_the_engine_has_the_socket_too() {
    let server = Server::new("violates");
    let now = Instant::now();
    let mut connection = connection(&[&server], now);
    connection.turn(now, &mut Vec::new());
    let mut stream = server.negotiate().unwrap();
    let watched = connection.socket().unwrap().as_fd().try_clone_to_owned().unwrap();
    stream.write_all(&[7; 16]).unwrap();
    connection.turn(now, &mut Vec::new());
    assert!(connection.socket().is_none());
    // Without the end this would fail instead of waiting.
    stream.set_nonblocking(true).unwrap();
    stream.read_to_end(&mut Vec::new()).unwrap();
    drop(watched);
}

fn push_read(connection: &mut Connection) {
    let into = Segments::zeroed(512);
    let op = FileOp { id: OpId(0), file: FileId(0), action: Action::Read { at: FileOffset(0), into } };
    connection.push(op).unwrap();
}

#[test]
fn a_silent_server_is_given_up_when_the_process_is_to_end() {
    let server = Server::new("silent");
    let (mut now, mut done) = (Instant::now(), Vec::new());
    let mut connection = connection(&[&server], now);
    connection.turn(now, &mut done);
    let mut stream = server.negotiate().unwrap();
    connection.turn(now, &mut done);
    connection.opened();
    for _ in 0..2 {
        push_read(&mut connection);
    }
    now += Duration::from_secs(1000);
    connection.turn(now, &mut done);
    assert!(done.is_empty() && connection.sleeps(now).is_none(), "a server may be slow");
    STOPPING.set(true);
    connection.turn(now, &mut done);
    assert_eq!(connection.sleeps(now), Some(Duration::from_secs(5)));
    now += Duration::from_secs(4);
    let mut reply = vec![0x67, 0x44, 0x66, 0x98, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1];
    reply.resize(16 + 512, 7);
    stream.write_all(&reply).unwrap();
    connection.turn(now, &mut done);
    connection.turn(now, &mut done);
    assert_eq!((done.len(), done[0].result), (1, Ok(())));
    // It has answered something, and has its time again.
    now += Duration::from_secs(4);
    connection.turn(now, &mut done);
    assert_eq!((done.len(), connection.sleeps(now)), (1, Some(Duration::from_secs(1))));
    now += Duration::from_secs(1);
    connection.turn(now, &mut done);
    assert!(done.len() == 2 && done[1].result.is_err() && connection.is_given_up());
    // For good.
    push_read(&mut connection);
    now += Duration::from_secs(1);
    connection.turn(now, &mut done);
    assert!(done.len() == 3 && done[2].result.is_err() && server.negotiate().is_none());
}

#[test]
fn a_server_that_is_away_is_given_up_when_the_process_is_to_end() {
    let server = Server::new("away");
    let (mut now, mut done) = (Instant::now(), Vec::new());
    let mut connection = connection(&[&server], now);
    connection.turn(now, &mut done);
    drop(server.negotiate().unwrap());
    connection.turn(now, &mut done);
    connection.opened();
    push_read(&mut connection);
    STOPPING.set(true);
    while done.is_empty() {
        connection.turn(now, &mut done);
        let before = connection.sleeps(now);
        drop(server.negotiate());
        now += before.unwrap_or_default();
        assert!(connection.is_given_up() || before.is_some());
    }
    assert!(done[0].result.is_err() && connection.is_given_up());
}
