//! Events that arrive between two steps of one turn, where a test over the socket would have to be lucky.

use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;

use disk::Geometry;

use super::*;
use crate::Server as _;

struct Ignored;

impl Watch for Ignored {
    fn watch(&mut self, _: BorrowedFd<'_>, _: Interest, _: WatchKey) -> io::Result<()> {
        Ok(())
    }

    fn forget(&mut self, _: WatchKey) {}
}

/// A started server with one front-end.
fn connected() -> (tempfile::TempDir, Server, UnixStream) {
    let directory = tempfile::tempdir().unwrap();
    let geometry =
        Geometry { len: 1 << 20, block: 512, physical_block: 4096, discard: 4096, chs: None, read_only: false };
    let config = Config { path: directory.path().join("disk.sock"), queues: 1, serial: String::new(), geometry };
    let mut server = Server::bind(config).unwrap();
    server.start(&mut Ignored).unwrap();
    let first = UnixStream::connect(directory.path().join("disk.sock")).unwrap();
    server.ready(WatchKey(LISTENER), &mut Ignored);
    assert!(server.is_connected());
    server.take_events();
    (directory, server, first)
}

#[test]
fn a_front_end_that_follows_within_one_turn_is_accepted() {
    let (directory, mut server, first) = connected();
    server.handle_messages(&mut Ignored);
    drop(first);
    let _second = UnixStream::connect(directory.path().join("disk.sock")).unwrap();
    server.admit(&mut Ignored);
    let events: Vec<String> = server.take_events().iter().map(Event::to_string).collect();
    assert!(
        matches!(&events[..], [ended, next] if ended.contains("closed") && next.contains("connected")),
        "{events:?}"
    );
    assert!(server.is_connected());
}

#[test]
fn a_front_end_beside_a_live_one_is_refused() {
    let (directory, mut server, _first) = connected();
    let _second = UnixStream::connect(directory.path().join("disk.sock")).unwrap();
    server.admit(&mut Ignored);
    assert!(matches!(server.take_events()[..], [Event::SecondRefused]));
}
