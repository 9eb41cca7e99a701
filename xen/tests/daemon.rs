//! A connection to a store that is slow, dead or mad.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::thread::{JoinHandle, spawn};
use std::time::Duration;

use xen::daemon::Daemon;
use xen::wire::{Kind, Message, Receiver};
use xen::{DomId, Store, StoreError};

/// A store that reads questions and, to each, writes what `answer` makes of it, byte by byte.
fn store(answer: impl Fn(&Message) -> Option<Vec<u8>> + Send + 'static) -> (Daemon, JoinHandle<()>) {
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
    (Daemon::over(ours.into()).unwrap(), serving)
}

fn message(kind: Kind, request: u32, payload: &[u8]) -> Vec<u8> {
    Message { kind, request, transaction: 0, payload: payload.to_vec() }.encode().unwrap()
}

#[test]
fn an_answer_in_single_bytes_is_understood() {
    let (mut daemon, serving) = store(|question| Some(message(question.kind, question.request, &question.payload)));
    assert_eq!(daemon.read(None, "/a").unwrap().unwrap(), b"/a\0");
    assert_eq!(daemon.list(None, "/b").unwrap().unwrap(), ["/b"]);
    drop(daemon);
    serving.join().unwrap();
}

#[test]
fn an_answer_to_another_question_is_passed_over() {
    let (mut daemon, _) = store(|question| {
        let mut bytes = message(question.kind, question.request.wrapping_sub(1), b"old");
        bytes.extend(message(Kind::ERROR, 0, b"EIO\0"));
        bytes.extend(message(question.kind, question.request, b"new"));
        Some(bytes)
    });
    assert_eq!(daemon.read(None, "/a").unwrap().unwrap(), b"new");
}

#[test]
fn linux_does_not_repeat_the_number_when_it_answers_for_watches() {
    let (mut daemon, _) = store(|question| {
        let mut bytes = message(Kind::WATCH_EVENT, 0, b"/a\0token\0");
        bytes.extend(message(question.kind, 0, b"OK\0"));
        Some(bytes)
    });
    daemon.watch("/a", "token").unwrap();
    let event = daemon.take_event().unwrap().unwrap();
    assert_eq!((event.path.as_str(), event.token.as_str()), ("/a", "token"));
    daemon.unwatch("/a", "token").unwrap();
}

#[test]
fn no_answer_is_waited_for_no_longer_than_said_and_a_late_one_does_no_harm() {
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    let mut daemon = Daemon::over(ours.into()).unwrap().with_patience(Duration::from_millis(30));
    let error = daemon.read(None, "/a").unwrap_err();
    assert!(matches!(error, StoreError::Mute { .. }), "{error}");
    assert_eq!(error.to_string(), "reading /a: no answer from the store in 0 s");

    theirs.write_all(&message(Kind::READ, 1, b"late")).unwrap();
    theirs.write_all(&message(Kind::READ, 2, b"in time")).unwrap();
    assert_eq!(daemon.read(None, "/b").unwrap().unwrap(), b"in time");
}

#[test]
fn a_flood_of_events_is_not_an_answer() {
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    let flood = spawn(move || {
        let event = message(Kind::WATCH_EVENT, 0, b"/a\0token\0");
        while theirs.write_all(&event).is_ok() {}
    });
    let mut daemon = Daemon::over(ours.into()).unwrap().with_patience(Duration::from_millis(30));
    assert!(matches!(daemon.read(None, "/a"), Err(StoreError::Mute { .. })));
    drop(daemon);
    flood.join().unwrap();
}

#[test]
fn rubbish_is_the_end_of_the_connection() {
    let odd: [fn(&Message) -> Vec<u8>; 4] = [
        |_| vec![0xff; 16],
        |question| message(Kind::RM, question.request, b"OK\0"),
        |_| message(Kind::WATCH_EVENT, 0, b"only a path\0"),
        |_| message(Kind::WATCH_EVENT, 0, b"\xff\xfe\0token\0"),
    ];
    for odd in odd {
        let (mut daemon, _) = store(move |question| Some(odd(question)));
        let error = daemon.read(None, "/a").unwrap_err();
        assert!(
            matches!(&error, StoreError::Lost { source, .. } if source.kind() == std::io::ErrorKind::InvalidData),
            "{error}"
        );
        assert!(matches!(daemon.read(None, "/a"), Err(StoreError::Lost { .. })));
        assert!(matches!(daemon.take_event(), Err(StoreError::Lost { .. })));
    }
}

#[test]
fn whether_a_domain_is_there_is_yes_or_no() {
    let (mut daemon, _) = store(|question| {
        let answer: &[u8] = match question.payload.as_slice() {
            b"7\0" => b"T\0",
            b"8\0" => b"F\0",
            _ => b"perhaps\0",
        };
        Some(message(question.kind, question.request, answer))
    });
    assert!(daemon.is_introduced(DomId(7)).unwrap());
    assert!(!daemon.is_introduced(DomId(8)).unwrap());
    assert!(matches!(daemon.is_introduced(DomId(9)), Err(StoreError::Lost { .. })));
}

/// Linux's device would wait in the middle of a write, and for ever.
#[test]
fn a_watch_over_the_device_is_asked_for_only_of_a_store_that_answers() {
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    let mut daemon = Daemon::over(ours.into()).unwrap().with_patience(Duration::from_millis(30)).as_device();
    assert!(matches!(daemon.watch("/a", "token"), Err(StoreError::Mute { .. })));
    let mut receiver = Receiver::default();
    let mut bytes = [0; 100];
    let len = theirs.read(&mut bytes).unwrap();
    receiver.push(&bytes[..len]);
    let asked = receiver.next_message().unwrap().unwrap();
    assert_eq!((asked.kind, asked.payload.as_slice()), (Kind::READ, b"/\0".as_slice()));
    assert_eq!(receiver.next_message().unwrap(), None, "no watch was asked for");

    let (daemon, _) = store(|question| Some(message(question.kind, question.request, b"OK\0")));
    daemon.as_device().watch("/a", "token").unwrap();
}

#[test]
fn a_store_that_goes_away_is_lost() {
    let (mut daemon, _) = store(|_| None);
    assert!(matches!(daemon.read(None, "/a"), Err(StoreError::Lost { .. })));
    let (ours, _) = UnixStream::pair().unwrap();
    let mut daemon = Daemon::over(ours.into()).unwrap();
    assert!(matches!(daemon.take_event(), Err(StoreError::Lost { .. })));
}

#[test]
fn where_there_is_no_store_the_message_says_what_to_do() {
    let error = Daemon::connect_to(Path::new("/nowhere/socket")).map(drop).unwrap_err();
    assert_eq!(
        error.to_string(),
        "no store at /nowhere/socket: this is not a Xen domain, or its store does not run; XENSTORED_PATH names another place"
    );
}

#[test]
fn a_list_in_parts_is_begun_anew_when_it_changes() {
    // The answers after the first: it changed between the first part and the second.
    let parts: [(&[u8], &[u8]); 4] =
        [(b"0", b"1\0one\0two\0"), (b"8", b"2\0three\0\0"), (b"0", b"2\0one\0"), (b"4", b"2\0three\0\0")];
    let (mut daemon, _) = store(move |question| {
        let Some(at) = usize::try_from(question.request).ok()?.checked_sub(2) else {
            return Some(message(Kind::ERROR, question.request, b"E2BIG\0"));
        };
        let (offset, part) = parts.get(at)?;
        let asked: Vec<&[u8]> = question.words().collect();
        let right = question.kind == Kind::DIRECTORY_PART && asked == [b"/a", *offset];
        right.then(|| message(question.kind, question.request, part))
    });
    assert_eq!(daemon.list(None, "/a").unwrap().unwrap(), ["one", "three"]);
}

#[test]
fn a_list_that_does_not_end_is_rubbish() {
    let (mut daemon, _) = store(|question| match question.kind {
        Kind::DIRECTORY => Some(message(Kind::ERROR, question.request, b"E2BIG\0")),
        _ => Some(message(question.kind, question.request, b"1\0")),
    });
    assert!(matches!(daemon.list(None, "/a"), Err(StoreError::Lost { .. })));
}
