//! What the service manager is told of the daemon's life (sd_notify(3)).

use std::os::unix::net::UnixDatagram;
use std::time::{Duration, Instant};

use rusqlite::Connection;

use crate::harness::start_with;

/// Waits until it is told again that the daemon lives.
fn told(socket: &UnixDatagram) {
    let (begun, mut said) = (Instant::now(), [0; 64]);
    while begun.elapsed() < Duration::from_secs(60) {
        if socket.recv(&mut said).is_ok_and(|len| said[..len] == *b"WATCHDOG=1") {
            return;
        }
    }
    panic!("it is not told that the daemon lives");
}

#[test]
fn it_is_told_that_the_daemon_lives_only_while_its_catalogue_answers() {
    let room = tempfile::tempdir().unwrap();
    let path = room.path().join("notify");
    let socket = UnixDatagram::bind(&path).unwrap();
    socket.set_read_timeout(Some(Duration::from_secs(1))).unwrap();
    let asked = [("NOTIFY_SOCKET", path.to_str().unwrap()), ("WATCHDOG_USEC", "200000")];
    let daemon = start_with("", &asked);
    told(&socket);
    told(&socket);
    // The writer waits for whoever holds the file, ten seconds at most; a word or two may still be under way.
    let other = Connection::open(daemon.room().join("state/catalogue.db")).unwrap();
    other.execute_batch("BEGIN IMMEDIATE").unwrap();
    let (begun, mut heard) = (Instant::now(), 0);
    while begun.elapsed() < Duration::from_secs(4) {
        heard += usize::from(socket.recv(&mut [0; 64]).is_ok());
    }
    assert!(heard <= 2, "{heard}");
    other.execute_batch("ROLLBACK").unwrap();
    told(&socket);
    told(&socket);
}

#[test]
fn a_watchdog_of_another_process_is_none_of_ours() {
    let room = tempfile::tempdir().unwrap();
    let path = room.path().join("notify");
    let socket = UnixDatagram::bind(&path).unwrap();
    socket.set_read_timeout(Some(Duration::from_secs(2))).unwrap();
    let asked = [("NOTIFY_SOCKET", path.to_str().unwrap()), ("WATCHDOG_USEC", "200000"), ("WATCHDOG_PID", "1")];
    let _daemon = start_with("", &asked);
    let mut said = [0; 64];
    let len = socket.recv(&mut said).unwrap();
    assert_eq!(said[..len], *b"READY=1");
    assert!(socket.recv(&mut said).is_err());
}
