//! A connection to a store that is slow, dead or faulty.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::thread::{JoinHandle, spawn};
use std::time::Duration;

use xen::wire::{Kind, Message, Receiver};
use xen::xenstored::XenstoredClient;
use xen::{DomId, Store, StoreError};

/// A store that reads requests and writes, byte by byte, the bytes that `answer` returns for each.
fn store(answer: impl Fn(&Message) -> Option<Vec<u8>> + Send + 'static) -> (XenstoredClient, JoinHandle<()>) {
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    let serving = spawn(move || {
        let mut receiver = Receiver::default();
        let mut bytes = [0; 100];
        while let Ok(len @ 1..) = theirs.read(&mut bytes) {
            receiver.push(&bytes[..len]);
            while let Some(question) = receiver.next_message().unwrap() {
                let Some(bytes) = answer(&question) else { return };
                if bytes.iter().any(|&byte| theirs.write_all(&[byte]).is_err()) {
                    return;
                }
            }
        }
    });
    (XenstoredClient::from_fd(ours.into()).unwrap(), serving)
}

fn message(kind: Kind, request: u32, payload: &[u8]) -> Vec<u8> {
    Message { kind, request, transaction: 0, payload: payload.to_vec() }.encode().unwrap()
}

#[test]
fn a_reply_in_single_bytes_is_parsed() {
    let (mut client, serving) = store(|question| Some(message(question.kind, question.request, &question.payload)));
    assert_eq!(client.read(None, "/a").unwrap().unwrap(), b"/a\0");
    assert_eq!(client.list(None, "/b").unwrap().unwrap(), ["/b"]);
    drop(client);
    serving.join().unwrap();
}

#[test]
fn a_reply_to_another_request_is_skipped() {
    let (mut client, _) = store(|question| {
        let mut bytes = message(question.kind, question.request.wrapping_sub(1), b"old");
        bytes.extend(message(Kind::ERROR, 0, b"EIO\0"));
        bytes.extend(message(question.kind, question.request, b"new"));
        Some(bytes)
    });
    assert_eq!(client.read(None, "/a").unwrap().unwrap(), b"new");
}

#[test]
fn watch_replies_of_linux_without_the_request_id_are_accepted() {
    let (mut client, _) = store(|question| {
        let mut bytes = message(Kind::WATCH_EVENT, 0, b"/a\0token\0");
        bytes.extend(message(question.kind, 0, b"OK\0"));
        Some(bytes)
    });
    client.watch("/a", "token").unwrap();
    let event = client.take_event().unwrap().unwrap();
    assert_eq!((event.path.as_str(), event.token.as_str()), ("/a", "token"));
    client.unwatch("/a", "token").unwrap();
}

#[test]
fn a_request_times_out_and_a_late_reply_does_no_harm() {
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    let mut client = XenstoredClient::from_fd(ours.into()).unwrap().with_timeout(Duration::from_millis(30));
    let error = client.read(None, "/a").unwrap_err();
    assert!(matches!(error, StoreError::TimedOut { .. }), "{error}");
    assert_eq!(error.to_string(), "reading /a: no answer from the store in 0 s");

    theirs.write_all(&message(Kind::READ, 1, b"late")).unwrap();
    theirs.write_all(&message(Kind::READ, 2, b"in time")).unwrap();
    assert_eq!(client.read(None, "/b").unwrap().unwrap(), b"in time");
}

#[test]
fn a_flood_of_events_is_not_a_reply() {
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    let flood = spawn(move || {
        let event = message(Kind::WATCH_EVENT, 0, b"/a\0token\0");
        while theirs.write_all(&event).is_ok() {}
    });
    let mut client = XenstoredClient::from_fd(ours.into()).unwrap().with_timeout(Duration::from_millis(30));
    assert!(matches!(client.read(None, "/a"), Err(StoreError::TimedOut { .. })));
    drop(client);
    flood.join().unwrap();
}

#[test]
fn a_protocol_error_ends_the_connection() {
    let odd: [fn(&Message) -> Vec<u8>; 4] = [
        |_| vec![0xff; 16],
        |question| message(Kind::RM, question.request, b"OK\0"),
        |_| message(Kind::WATCH_EVENT, 0, b"only a path\0"),
        |_| message(Kind::WATCH_EVENT, 0, b"\xff\xfe\0token\0"),
    ];
    for odd in odd {
        let (mut client, _) = store(move |question| Some(odd(question)));
        let error = client.read(None, "/a").unwrap_err();
        assert!(
            matches!(&error, StoreError::Lost { source, .. } if source.kind() == std::io::ErrorKind::InvalidData),
            "{error}"
        );
        assert!(matches!(client.read(None, "/a"), Err(StoreError::Lost { .. })));
        assert!(matches!(client.take_event(), Err(StoreError::Lost { .. })));
    }
}

#[test]
fn is_introduced_returns_true_or_false() {
    let (mut client, _) = store(|question| {
        let answer: &[u8] = match question.payload.as_slice() {
            b"7\0" => b"T\0",
            b"8\0" => b"F\0",
            _ => b"perhaps\0",
        };
        Some(message(question.kind, question.request, answer))
    });
    assert!(client.is_introduced(DomId(7)).unwrap());
    assert!(!client.is_introduced(DomId(8)).unwrap());
    assert!(matches!(client.is_introduced(DomId(9)), Err(StoreError::Lost { .. })));
}

/// Linux's device would block in the middle of a write, forever.
#[test]
fn a_watch_through_the_device_is_sent_only_to_a_responsive_store() {
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    let mut client = XenstoredClient::from_fd(ours.into()).unwrap().with_timeout(Duration::from_millis(30)).as_device();
    assert!(matches!(client.watch("/a", "token"), Err(StoreError::TimedOut { .. })));
    let mut receiver = Receiver::default();
    let mut bytes = [0; 100];
    let len = theirs.read(&mut bytes).unwrap();
    receiver.push(&bytes[..len]);
    let asked = receiver.next_message().unwrap().unwrap();
    assert_eq!((asked.kind, asked.payload.as_slice()), (Kind::READ, b"/\0".as_slice()));
    assert_eq!(receiver.next_message().unwrap(), None, "a watch was sent");

    let (client, _) = store(|question| Some(message(question.kind, question.request, b"OK\0")));
    client.as_device().watch("/a", "token").unwrap();
}

#[test]
fn a_closed_store_is_reported_as_lost() {
    let (mut client, _) = store(|_| None);
    assert!(matches!(client.read(None, "/a"), Err(StoreError::Lost { .. })));
    let (ours, _) = UnixStream::pair().unwrap();
    let mut client = XenstoredClient::from_fd(ours.into()).unwrap();
    assert!(matches!(client.take_event(), Err(StoreError::Lost { .. })));
}

#[test]
fn the_error_for_a_missing_store_says_what_to_do() {
    let error = XenstoredClient::connect_to(Path::new("/nowhere/socket")).map(drop).unwrap_err();
    assert_eq!(
        error.to_string(),
        "no store at /nowhere/socket: this is not a Xen domain, or xenstored is not running; set XENSTORED_PATH to use another path"
    );
}

#[test]
fn a_list_in_parts_is_restarted_when_it_changes() {
    // The replies after the first: the list changed between the first and the second part.
    let parts: [(&[u8], &[u8]); 4] =
        [(b"0", b"1\0one\0two\0"), (b"8", b"2\0three\0\0"), (b"0", b"2\0one\0"), (b"4", b"2\0three\0\0")];
    let (mut client, _) = store(move |question| {
        let Some(at) = usize::try_from(question.request).ok()?.checked_sub(2) else {
            return Some(message(Kind::ERROR, question.request, b"E2BIG\0"));
        };
        let (offset, part) = parts.get(at)?;
        let asked: Vec<&[u8]> = question.words().collect();
        let right = question.kind == Kind::DIRECTORY_PART && asked == [b"/a", *offset];
        right.then(|| message(question.kind, question.request, part))
    });
    assert_eq!(client.list(None, "/a").unwrap().unwrap(), ["one", "three"]);
}

#[test]
fn a_list_without_an_end_is_a_protocol_error() {
    let (mut client, _) = store(|question| match question.kind {
        Kind::DIRECTORY => Some(message(Kind::ERROR, question.request, b"E2BIG\0")),
        _ => Some(message(question.kind, question.request, b"1\0")),
    });
    assert!(matches!(client.list(None, "/a"), Err(StoreError::Lost { .. })));
}
