//! The protocol as seen by well-behaved clients, where the standard tools do not check it closely enough.

use std::net::TcpListener;
use std::path::PathBuf;

use disk::{DiskOffset, Operation, Span, Transport};
use testkit::nbd::wire::{Command, FAST_ZERO, FUA, NO_HOLE, OPTION_EXPORT_NAME, OPTION_GO, REQ_ONE, option, request};
use transport::Server as _;
use transport::nbd::{Address, BindError, Config, Export, Server};
use transport::{Interest, Watch, WatchKey};

use crate::nbd_support::{GEOMETRY, Served};

fn config(address: Address) -> Config {
    Config {
        address,
        export: Export {
            name: String::new(),
            description: String::new(),
            geometry: GEOMETRY,
            layered: false,
            bitmaps: Vec::new(),
        },
        tls: None,
    }
}

fn bind(path: impl Into<PathBuf>) -> Result<Server, BindError> {
    Server::bind(config(Address::Unix(path.into())))
}

#[test]
fn a_trim_with_fua_is_answered_after_a_flush() {
    let served = Served::unix(GEOMETRY);
    let mut client = served.simple();
    client.request(Command::Trim, FUA, 4, 0, 65536).unwrap();
    assert_eq!(client.simple_reply().unwrap(), (0, 4));
    let done = served.disk.lock().unwrap().done.clone();
    assert_eq!(
        done,
        [
            (Operation::Discard, Span { at: DiskOffset(0), len: 65536 }),
            (Operation::Flush, Span { at: DiskOffset(0), len: 0 })
        ]
    );
}

#[test]
fn the_reply_to_export_name_has_size_and_flags() {
    let served = Served::unix(GEOMETRY);
    let mut client = served.greeted();
    client.option(OPTION_EXPORT_NAME, &[]).unwrap();
    let reply = client.receive(10).unwrap();
    assert_eq!(reply[..8], GEOMETRY.len.to_be_bytes());
    assert_eq!(reply[9] & 1, 1, "NBD_FLAG_HAS_FLAGS");
    client.request(Command::Read, 0, 7, 0, 512).unwrap();
    assert_eq!(client.simple_reply().unwrap(), (0, 7));
}

#[test]
fn replies_are_sent_in_the_order_of_completion() {
    let served = Served::unix(GEOMETRY);
    let mut client = served.simple();
    client
        .send(
            &[
                request(Command::Flush, 0, 1, 0, 0),
                request(Command::Read, 0, 2, 0, 512),
                request(Command::Flush, 0, 3, 0, 0),
            ]
            .concat(),
        )
        .unwrap();
    let mut cookies = Vec::new();
    for _ in 0..3 {
        let (error, cookie) = client.simple_reply().unwrap();
        assert_eq!(error, 0);
        cookies.push(cookie);
        client.receive(if cookie == 2 { 512 } else { 0 }).unwrap();
    }
    // The disk of these tests completes a batch in reverse order.
    assert_eq!(cookies, [3, 2, 1]);
}

#[test]
fn clients_that_did_not_request_block_sizes_may_access_single_bytes() {
    let served = Served::unix(GEOMETRY);
    let mut client = served.structured();
    client.request(Command::Write, 0, 1, 511, 3).unwrap();
    client.send(&[7, 8, 9]).unwrap();
    assert_eq!(client.simple_reply().unwrap(), (0, 1));
    client.request(Command::Read, 0, 2, 510, 5).unwrap();
    let read = client.chunk().unwrap();
    assert_eq!(
        (read.kind, &read.payload[..8], &read.payload[8..]),
        (1, &510u64.to_be_bytes()[..], &[0, 7, 8, 9, 0][..])
    );
    client.request(Command::BlockStatus, 0, 3, 65_535, 3).unwrap();
    // The last byte of a written unit, and the first two of an unwritten one.
    assert_eq!(client.chunk().unwrap().payload, [0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 3]);
    let done = served.disk.lock().unwrap().done.clone();
    assert_eq!(done[0], (Operation::Patch { durable: false }, Span { at: DiskOffset(511), len: 3 }));
}

#[test]
fn a_cache_command_looks_up_extents() {
    let served = Served::unix(GEOMETRY);
    let mut client = served.simple();
    client.request(Command::Cache, 0, 1, 1, 1 << 20).unwrap();
    assert_eq!(client.simple_reply().unwrap(), (0, 1));
    client.request(Command::Cache, 0, 2, GEOMETRY.len, 1).unwrap();
    assert_eq!(client.simple_reply().unwrap(), (22, 2));
}

#[test]
fn fast_zeroes_with_no_hole_are_not_supported() {
    let served = Served::unix(GEOMETRY);
    let mut client = served.simple();
    client.request(Command::Zeroes, FAST_ZERO | NO_HOLE, 1, 0, 65_536).unwrap();
    assert_eq!(client.simple_reply().unwrap(), (95, 1));
    client.request(Command::Zeroes, FAST_ZERO, 2, 0, 65_536).unwrap();
    assert_eq!(client.simple_reply().unwrap(), (0, 2));
}

#[test]
fn req_one_returns_a_single_extent() {
    let served = Served::unix(GEOMETRY);
    let mut client = served.structured();
    client.request(Command::Write, 0, 1, 65536, 512).unwrap();
    client.send(&[1; 512]).unwrap();
    client.simple_reply().unwrap();
    client.request(Command::BlockStatus, 0, 2, 0, 1 << 20).unwrap();
    let all = client.chunk().unwrap();
    assert_eq!((all.kind, all.cookie, all.payload.len()), (5, 2, 4 + 3 * 8));
    client.request(Command::BlockStatus, REQ_ONE, 3, 0, 1 << 20).unwrap();
    assert_eq!(client.chunk().unwrap().payload, [0, 0, 0, 1, 0, 1, 0, 0, 0, 0, 0, 3]);
}

#[test]
fn zero_length_requests_succeed() {
    let served = Served::unix(GEOMETRY);
    let mut client = served.structured();
    client.request(Command::Read, 0, 1, 0, 0).unwrap();
    let chunk = client.chunk().unwrap();
    assert_eq!((chunk.kind, chunk.cookie, chunk.payload.len()), (0, 1, 0));
    client.request(Command::Write, 0, 2, 0, 0).unwrap();
    assert_eq!(client.simple_reply().unwrap(), (0, 2));
    assert!(served.disk.lock().unwrap().done.is_empty());
}

#[test]
fn a_path_in_use_is_refused_and_a_stale_one_is_replaced() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("nbd.sock");
    let first = bind(&path).unwrap();
    assert!(matches!(bind(&path), Err(BindError::PathInUse(found)) if found == path));
    drop(first);
    assert!(!path.exists());
    drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
    assert!(path.exists());
    bind(&path).unwrap();
}

#[test]
fn a_private_socket_is_accessible_only_to_its_user() {
    use std::os::unix::fs::PermissionsExt;
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("nbd.sock");
    let _server = Server::bind_private(config(Address::Unix(path.clone()))).unwrap();
    assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
}

#[test]
fn the_path_of_a_successor_is_not_removed() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("nbd.sock");
    let first = bind(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    let _second = bind(&path).unwrap();
    drop(first);
    assert!(path.exists());
}

#[test]
fn paths_that_cannot_be_sockets_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("file");
    std::fs::write(&file, "precious").unwrap();
    assert!(matches!(bind(&file), Err(BindError::NotASocket(_))));
    assert_eq!(std::fs::read(&file).unwrap(), b"precious");
    assert!(matches!(bind(directory.path().join("x".repeat(108))), Err(BindError::PathTooLong { max: 107, .. })));
    assert!(matches!(bind(directory.path().join("missing/nbd.sock")), Err(BindError::Failed { .. })));
}

#[test]
fn a_port_in_use_is_refused() {
    let other = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = other.local_addr().unwrap();
    assert!(
        matches!(Server::bind(config(Address::Tcp(address))), Err(BindError::PortInUse(found)) if found == address)
    );
}

/// A watch that never reports anything.
struct NoWatch;

impl Watch for NoWatch {
    fn watch(&mut self, _: std::os::fd::BorrowedFd<'_>, _: Interest, _: WatchKey) -> std::io::Result<()> {
        Ok(())
    }

    fn forget(&mut self, _: WatchKey) {}
}

/// A server without an event loop, and a client in the transmission phase.
fn server_without_loop(directory: &tempfile::TempDir) -> (Server, std::os::unix::net::UnixStream) {
    use std::io::Write;
    let path = directory.path().join("nbd.sock");
    let mut server = bind(&path).unwrap();
    let mut stream = std::os::unix::net::UnixStream::connect(&path).unwrap();
    server.ready(WatchKey(u64::MAX), &mut NoWatch);
    let go = [&3u32.to_be_bytes()[..], &option(OPTION_GO, &[0; 6])].concat();
    stream.write_all(&go).unwrap();
    assert!(server.pop(&GEOMETRY).is_none());
    (server, stream)
}

/// The first connection of a server: slot 0, client 1.
const FIRST_CLIENT: WatchKey = WatchKey(1);

#[test]
fn a_server_sleeps_while_a_client_does_not_read() {
    use std::io::Write;
    let directory = tempfile::tempdir().unwrap();
    let (mut server, mut stream) = server_without_loop(&directory);
    let reads: Vec<u8> = (0..200).flat_map(|cookie| request(Command::Read, 0, cookie, 0, 1 << 20)).collect();
    stream.write_all(&reads).unwrap();
    server.ready(FIRST_CLIENT, &mut NoWatch);
    let mut popped = 0;
    while let Some(request) = server.pop(&GEOMETRY) {
        popped += 1;
        server.complete(request, disk::Status::Done);
    }
    server.publish().unwrap();
    assert_eq!(popped, 64);
    assert!(server.may_sleep());
}

#[test]
fn requests_not_popped_before_a_stop_fail() {
    use std::io::{Read, Write};
    let directory = tempfile::tempdir().unwrap();
    let (mut server, mut stream) = server_without_loop(&directory);
    stream.write_all(&[request(Command::Flush, 0, 1, 0, 0), request(Command::Flush, 0, 2, 0, 0)].concat()).unwrap();
    server.ready(FIRST_CLIENT, &mut NoWatch);
    let first = server.pop(&GEOMETRY).unwrap();
    server.stop(&mut NoWatch);
    server.complete(first, disk::Status::Done);
    server.publish().unwrap();
    drop(server);
    let mut received = Vec::new();
    stream.read_to_end(&mut received).unwrap();
    assert!(!directory.path().join("nbd.sock").exists());
    let replies = &received[received.len() - 32..];
    assert_eq!((replies[7], replies[15], replies[23], replies[31]), (108, 2, 0, 1));
}
