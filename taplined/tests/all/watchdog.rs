//! The daemon's notifications to the service manager (sd_notify(3)).

use std::os::unix::net::UnixDatagram;
use std::time::{Duration, Instant};

use rusqlite::Connection;

use crate::harness::start_with;

/// Waits until the next watchdog notification.
fn wait_for_notification(socket: &UnixDatagram) {
    let (begun, mut said) = (Instant::now(), [0; 64]);
    while begun.elapsed() < Duration::from_secs(60) {
        if socket.recv(&mut said).is_ok_and(|len| said[..len] == *b"WATCHDOG=1") {
            return;
        }
    }
    panic!("it is not told that the daemon lives");
}

#[test]
fn the_watchdog_is_notified_only_while_the_catalogue_responds() {
    let room = tempfile::tempdir().unwrap();
    let path = room.path().join("notify");
    let socket = UnixDatagram::bind(&path).unwrap();
    socket.set_read_timeout(Some(Duration::from_secs(1))).unwrap();
    let asked = [("NOTIFY_SOCKET", path.to_str().unwrap()), ("WATCHDOG_USEC", "200000")];
    let daemon = start_with("", &asked);
    wait_for_notification(&socket);
    wait_for_notification(&socket);
    // The writer waits up to ten seconds for the holder of the file; a few notifications may still be queued.
    let other = Connection::open(daemon.room().join("state/catalogue.db")).unwrap();
    other.execute_batch("BEGIN IMMEDIATE").unwrap();
    let (begun, mut heard) = (Instant::now(), 0);
    while begun.elapsed() < Duration::from_secs(4) {
        heard += usize::from(socket.recv(&mut [0; 64]).is_ok());
    }
    assert!(heard <= 2, "{heard}");
    other.execute_batch("ROLLBACK").unwrap();
    wait_for_notification(&socket);
    wait_for_notification(&socket);
}

#[test]
fn a_watchdog_of_another_process_is_ignored() {
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
