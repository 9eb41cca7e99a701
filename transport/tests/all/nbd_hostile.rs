//! Clients that disconnect midway, send garbage, flood the server or never read can harm only themselves.

use std::collections::BTreeSet;
use std::io::Write;

use disk::Operation;
use testkit::nbd::wire::{Command, Connection, OPTION_LIST, option, request};

use crate::nbd_support::{GEOMETRY, Served};

/// Asserts that the disk still replies to a well-behaved client.
fn assert_serves(served: &Served) {
    let mut client = served.simple();
    client.request(Command::Read, 0, 7, 0, 512).unwrap();
    assert_eq!(client.simple_reply().unwrap(), (0, 7));
    client.receive(512).unwrap();
}

#[test]
fn garbage_ends_only_its_own_connection() {
    let served = Served::unix(GEOMETRY);
    let mut negotiating = served.greeted();
    negotiating.send(&[0x55; 64]).unwrap();
    assert!(negotiating.is_disconnected());
    let mut negotiated = served.simple();
    negotiated.send(&[0x55; 64]).unwrap();
    assert!(negotiated.is_disconnected());
    assert_serves(&served);
    let events = served.events.lock().unwrap();
    assert!(events.iter().any(|event| event.contains("a request does not begin with its magic number")), "{events:?}");
}

#[test]
fn an_incomplete_request_has_no_effect() {
    let served = Served::unix(GEOMETRY);
    served.simple().send(&request(Command::Write, 0, 1, 0, 4096)[..20]).unwrap();
    let mut halfway = served.simple();
    halfway.request(Command::Write, 0, 1, 0, 4096).unwrap();
    halfway.send(&[1; 1000]).unwrap();
    drop(halfway);
    assert_serves(&served);
    let disk = served.disk.lock().unwrap();
    assert!(disk.done.iter().all(|(operation, _)| *operation == Operation::Read), "{:?}", disk.done);
}

#[test]
fn the_server_survives_disconnects_with_reads_in_flight() {
    let served = Served::unix(GEOMETRY);
    for _ in 0..100 {
        let mut client = served.simple();
        let reads: Vec<u8> = (0..8).flat_map(|cookie| request(Command::Read, 0, cookie, 0, 1 << 20)).collect();
        client.send(&reads).unwrap();
    }
    assert_serves(&served);
}

#[test]
fn requests_past_the_end_are_refused_and_the_next_is_served() {
    let served = Served::unix(GEOMETRY);
    let mut client = served.simple();
    client.request(Command::Read, 0, 1, GEOMETRY.len, 512).unwrap();
    assert_eq!(client.simple_reply().unwrap(), (22, 1));
    client.request(Command::Read, 0, 2, u64::MAX - 511, 512).unwrap();
    assert_eq!(client.simple_reply().unwrap(), (22, 2));
    client.request(Command::Write, 0, 3, GEOMETRY.len - 512, 1024).unwrap();
    client.send(&[1; 1024]).unwrap();
    assert_eq!(client.simple_reply().unwrap(), (28, 3));
    client.request(Command::Write, 0, 4, GEOMETRY.len - 512, 512).unwrap();
    client.send(&[1; 512]).unwrap();
    assert_eq!(client.simple_reply().unwrap(), (0, 4));
}

#[test]
fn the_data_of_a_refused_write_is_skipped() {
    let served = Served::unix(GEOMETRY);
    let mut client = served.structured();
    client.request(Command::Write, 0, 1, GEOMETRY.len - 512, 700_000).unwrap();
    client.send(&vec![1; 700_000]).unwrap();
    let refused = client.chunk().unwrap();
    assert_eq!((refused.kind, refused.cookie), (0x8001, 1));
    assert_eq!(refused.payload[..4], 28u32.to_be_bytes());
    client.request(Command::Read, 0, 2, 512, 512).unwrap();
    let data = client.chunk().unwrap();
    assert_eq!((data.kind, data.cookie), (1, 2));
    assert_eq!(data.payload, [&512u64.to_be_bytes()[..], &[0; 512]].concat());
}

#[test]
fn a_write_longer_than_announced_ends_the_connection() {
    let served = Served::unix(GEOMETRY);
    let mut client = served.simple();
    client.request(Command::Write, 0, 1, 0, (32 << 20) + 512).unwrap();
    assert!(client.is_disconnected());
    assert_serves(&served);
}

#[test]
fn unread_replies_stop_further_requests() {
    let served = Served::unix(GEOMETRY);
    let mut silent = served.simple();
    let reads: Vec<u8> = (0..512).flat_map(|cookie| request(Command::Read, 0, cookie, 0, 1 << 20)).collect();
    silent.send(&reads).unwrap();
    // When another client has been served, the input of the one that does not read has been processed.
    assert_serves(&served);
    assert_serves(&served);
    let done = served.disk.lock().unwrap().done.len();
    assert!(done <= 64 + 1 + 2, "{done} reads of 1 MiB were done for a client that reads nothing");
    for _ in 0..512 {
        assert_eq!(silent.simple_reply().unwrap().0, 0);
        silent.receive(1 << 20).unwrap();
    }
    assert_eq!(served.disk.lock().unwrap().done.len(), 512 + 2);
}

#[test]
fn each_of_many_concurrent_requests_is_answered() {
    let served = Served::unix(GEOMETRY);
    let mut client = served.simple();
    let mut sender = client.0.try_clone().unwrap();
    let reads: Vec<u8> = (0..10_000).flat_map(|cookie| request(Command::Read, 0, cookie, cookie * 512, 512)).collect();
    let sending = std::thread::spawn(move || sender.write_all(&reads).unwrap());
    let mut cookies = BTreeSet::new();
    for _ in 0..10_000 {
        let (error, cookie) = client.simple_reply().unwrap();
        assert_eq!(error, 0);
        cookies.insert(cookie);
        client.receive(512).unwrap();
    }
    sending.join().unwrap();
    assert_eq!(cookies.len(), 10_000);
}

#[test]
fn ten_thousand_options_end_the_connection() {
    let served = Served::unix(GEOMETRY);
    let mut client = served.greeted();
    let option = option(OPTION_LIST, &[]);
    // The connection may end before all of them are sent.
    let sent = client.0.write_all(&option.repeat(10_000));
    assert!(sent.is_err() || client.is_disconnected());
    assert_serves(&served);
    assert!(served.events.lock().unwrap().iter().any(|event| event.contains("too many options")));
}

#[test]
fn new_clients_displace_idle_negotiations_but_not_served_clients() {
    let served = Served::unix(GEOMETRY);
    let mut first = served.simple();
    let mut idle: Vec<Connection> = (0..100).map(|_| served.greeted()).collect();
    assert_serves(&served);
    first.request(Command::Read, 0, 9, 0, 512).unwrap();
    assert_eq!(first.simple_reply().unwrap(), (0, 9));
    assert!(idle.iter_mut().take(80).all(Connection::is_disconnected));
    let newest = idle.last_mut().unwrap();
    newest.option(OPTION_LIST, &[]).unwrap();
    assert_eq!(newest.option_reply().unwrap().0, 2);
}

#[test]
fn the_number_of_clients_is_limited() {
    let served = Served::unix(GEOMETRY);
    let mut clients: Vec<Connection> = (0..64).map(|_| served.simple()).collect();
    let mut late = Connection(std::os::unix::net::UnixStream::connect(served.path()).unwrap());
    assert!(late.is_disconnected());
    let mut leaving = clients.pop().unwrap();
    leaving.request(Command::Disconnect, 0, 0, 0, 0).unwrap();
    assert!(leaving.is_disconnected());
    assert_serves(&served);
}

#[test]
fn input_may_arrive_byte_by_byte() {
    let served = Served::unix(GEOMETRY);
    let mut client = served.simple();
    let write = [request(Command::Write, 0, 5, 512, 512), vec![3; 512]].concat();
    write.iter().for_each(|byte| client.send(&[*byte]).unwrap());
    assert_eq!(client.simple_reply().unwrap(), (0, 5));
    request(Command::Read, 0, 6, 512, 512).iter().for_each(|byte| client.send(&[*byte]).unwrap());
    assert_eq!(client.simple_reply().unwrap(), (0, 6));
    assert_eq!(client.receive(512).unwrap(), [3; 512]);
}
