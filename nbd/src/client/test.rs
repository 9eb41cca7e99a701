//! A hostile server: each violation ends the connection with its reason, and nothing else happens.

use disk::{Action, FileDone, FileError, FileId, FileOffset, FileOp, OpId};
use memory::Segments;

use super::{Broken, Client, Described};
use crate::wire;

/// The bytes of a greeting, and of a negotiation without structured replies of an export.
fn greeting() -> Vec<u8> {
    [&wire::GREETING_MAGIC.to_be_bytes()[..], &wire::OPTION_MAGIC.to_be_bytes(), &3u16.to_be_bytes()].concat()
}

fn option_reply(option: u32, kind: u32, payload: &[u8]) -> Vec<u8> {
    let len = wire::length(payload).to_be_bytes();
    [&wire::OPTION_REPLY_MAGIC.to_be_bytes()[..], &option.to_be_bytes(), &kind.to_be_bytes(), &len, payload].concat()
}

const FLAGS: u16 = wire::HAS_FLAGS | wire::SEND_FLUSH | wire::SEND_WRITE_ZEROES;

fn go(size: u64, flags: u16, blocks: Option<[u32; 3]>) -> Vec<u8> {
    let info = [&wire::INFO_EXPORT.to_be_bytes()[..], &size.to_be_bytes(), &flags.to_be_bytes()].concat();
    let mut bytes = option_reply(wire::OPT_GO, wire::REP_INFO, &info);
    if let Some(blocks) = blocks {
        let mut info = wire::INFO_BLOCK_SIZE.to_be_bytes().to_vec();
        blocks.iter().for_each(|block| info.extend_from_slice(&block.to_be_bytes()));
        bytes.extend(option_reply(wire::OPT_GO, wire::REP_INFO, &info));
    }
    bytes.extend(option_reply(wire::OPT_GO, wire::REP_ACK, b""));
    bytes
}

fn unsupported() -> Vec<u8> {
    option_reply(wire::OPT_STRUCTURED_REPLY, wire::REP_ERR_UNSUP, b"")
}

fn structured() -> Vec<u8> {
    let context = wire::OPT_SET_META_CONTEXT;
    [
        option_reply(wire::OPT_STRUCTURED_REPLY, wire::REP_ACK, b""),
        option_reply(context, wire::REP_META_CONTEXT, b"\0\0\0\x01base:allocation"),
        option_reply(context, wire::REP_ACK, b""),
    ]
    .concat()
}

fn negotiate(parts: &[Vec<u8>]) -> Result<Client, Broken> {
    let mut client = Client::new("e", true).unwrap();
    client.connected();
    client.receive(&parts.concat())?;
    Ok(client)
}

fn up(structured_replies: bool) -> Client {
    let options = if structured_replies { structured() } else { unsupported() };
    let mut client = negotiate(&[greeting(), options, go(4096, FLAGS, None)]).unwrap();
    let sent = client.to_send().len();
    client.sent(sent);
    client
}

fn read(client: &mut Client, at: u64, len: usize) -> Segments {
    let into = Segments::copy_of(&vec![9; len]);
    push(client, Action::Read { at: FileOffset(at), into: into.clone() });
    into
}

fn push(client: &mut Client, action: Action) {
    client.push(FileOp { id: OpId(0), file: FileId(0), action }).unwrap();
}

fn done(client: &mut Client) -> Vec<FileDone> {
    let mut done = Vec::new();
    client.take_done(&mut done);
    done
}

fn chunk(flags: u16, kind: u16, cookie: u64, payload: &[u8]) -> Vec<u8> {
    let len = wire::length(payload).to_be_bytes();
    let magic = wire::CHUNK_MAGIC.to_be_bytes();
    [&magic[..], &flags.to_be_bytes(), &kind.to_be_bytes(), &cookie.to_be_bytes(), &len, payload].concat()
}

fn data(at: u64, bytes: &[u8]) -> Vec<u8> {
    [&at.to_be_bytes()[..], bytes].concat()
}

fn hole(at: u64, len: u32) -> Vec<u8> {
    [&at.to_be_bytes()[..], &len.to_be_bytes()].concat()
}

fn simple(error: u32, cookie: u64) -> Vec<u8> {
    [&wire::SIMPLE_REPLY_MAGIC.to_be_bytes()[..], &error.to_be_bytes(), &cookie.to_be_bytes()].concat()
}

#[test]
fn a_negotiation_that_violates_the_protocol_is_refused() {
    let broken = |parts: &[Vec<u8>]| negotiate(parts).expect_err("it was accepted");
    assert_eq!(broken(&[vec![0; 18]]), Broken::NotNbd);
    let old = [&wire::GREETING_MAGIC.to_be_bytes()[..], &[0; 10]].concat();
    assert_eq!(broken(&[old]), Broken::OldStyle);
    for reply in [
        option_reply(wire::OPT_GO, wire::REP_ACK, b""),
        option_reply(wire::OPT_STRUCTURED_REPLY, wire::REP_INFO, b""),
        option_reply(wire::OPT_STRUCTURED_REPLY, wire::REP_ACK, &[0; 9000]),
        vec![0; 20],
    ] {
        assert!(matches!(broken(&[greeting(), reply]), Broken::Negotiation(_)));
    }
    let endless = option_reply(wire::OPT_GO, wire::REP_INFO, b"\0\x09").repeat(1000);
    assert!(matches!(broken(&[greeting(), unsupported(), endless]), Broken::Negotiation(_)));
    let early_end = option_reply(wire::OPT_GO, wire::REP_ACK, b"");
    assert!(matches!(broken(&[greeting(), unsupported(), early_end]), Broken::Negotiation(_)));
    let tls = option_reply(wire::OPT_STRUCTURED_REPLY, wire::REP_ERR_TLS_REQD, b"");
    assert_eq!(broken(&[greeting(), tls]), Broken::TlsRequired);
    let missing = option_reply(wire::OPT_GO, wire::REP_ERR_UNKNOWN, b"no such\x1b[31m export");
    assert_eq!(broken(&[greeting(), unsupported(), missing]), Broken::Refused("no such[31m export".into()));
}

#[test]
fn an_export_that_cannot_be_used_is_refused() {
    let offer = |size, flags, blocks| negotiate(&[greeting(), unsupported(), go(size, flags, blocks)]).err();
    assert!(matches!(offer(4097, FLAGS, None), Some(Broken::Unusable(_))), "an odd size");
    assert!(matches!(offer(u64::MAX - 511, FLAGS, None), Some(Broken::Unusable(_))));
    assert!(matches!(offer(4096, FLAGS | wire::READ_ONLY, None), Some(Broken::Unusable(_))));
    assert!(matches!(offer(4096, wire::HAS_FLAGS, None), Some(Broken::Unusable(_))), "no flush");
    assert!(matches!(offer(4096, FLAGS, Some([3, 512, 512])), Some(Broken::Negotiation(_))));
    assert!(matches!(offer(4096, FLAGS, Some([0, 0, 0])), Some(Broken::Negotiation(_))));
    assert!(matches!(offer(4608, FLAGS, Some([4096, 4096, 1 << 20])), Some(Broken::Unusable(_))));
    assert!(matches!(offer(4096, FLAGS, Some([1, 512, 256])), Some(Broken::Unusable(_))));
    assert_eq!(offer(4096, FLAGS, Some([512, 4096, 1 << 20])), None);
}

#[test]
fn a_name_beyond_the_limit_of_the_protocol_is_refused() {
    assert!(Client::new(&"x".repeat(4096), false).is_ok());
    assert!(Client::new(&"x".repeat(4097), false).is_err());
}

#[test]
fn a_reply_that_violates_the_protocol_ends_the_connection() {
    let last = wire::CHUNK_DONE;
    let (offset, gap) = (wire::CHUNK_OFFSET_DATA, wire::CHUNK_OFFSET_HOLE);
    let cases: [(&str, Vec<u8>); 16] = [
        ("unknown magic", vec![1; 20]),
        ("unknown cookie", chunk(last, wire::CHUNK_NONE, 77, b"")),
        ("a simple reply to a read", simple(0, 1)),
        ("data before the range", chunk(0, offset, 1, &data(511, b"x"))),
        ("data behind the range", chunk(0, offset, 1, &data(1024, b"x"))),
        ("data across the end", chunk(0, offset, 1, &data(1023, b"xy"))),
        ("an offset that overflows", chunk(0, offset, 1, &data(u64::MAX, b"xy"))),
        ("more data than was asked", chunk(0, offset, 1, &data(512, &[0; 513]))),
        ("no data", chunk(0, offset, 1, &data(512, b""))),
        ("a hole outside", chunk(0, gap, 1, &hole(512, 513))),
        ("an empty hole", chunk(0, gap, 1, &hole(512, 0))),
        ("data twice", [chunk(0, offset, 1, &data(600, b"xy")), chunk(0, gap, 1, &hole(601, 3))].concat()),
        ("a part is missing", chunk(last, offset, 1, &data(512, &[0; 511]))),
        ("nothing, and no end", chunk(0, wire::CHUNK_NONE, 1, b"")),
        ("a status of a read", chunk(last, wire::CHUNK_BLOCK_STATUS, 1, &[0; 12])),
        ("an error chunk without an error", chunk(last, wire::CHUNK_ERROR, 1, &[0; 6])),
    ];
    for (what, bytes) in cases {
        let mut client = up(true);
        let into = read(&mut client, 512, 512);
        let broken = client.receive(&bytes);
        assert!(broken.is_err(), "{what}");
        client.disconnected();
        assert!(done(&mut client).is_empty(), "{what}: the read must wait for the next connection");
        assert_eq!(into.len(), 512);
    }
}

#[test]
fn an_answer_that_is_too_long_is_not_waited_for() {
    let mut client = up(true);
    read(&mut client, 0, 512);
    // Only the header has arrived.
    let header = &chunk(0, wire::CHUNK_OFFSET_DATA, 1, b"")[..16];
    let broken = client.receive(&[header, &(1u32 << 30).to_be_bytes()].concat());
    assert!(matches!(broken, Err(Broken::Reply(_))));
}

#[test]
fn an_answer_twice_ends_the_connection() {
    let mut client = up(false);
    push(&mut client, Action::SyncData);
    client.receive(&simple(0, 1)).unwrap();
    assert_eq!(client.receive(&simple(0, 1)), Err(Broken::UnknownCookie(1)));
    assert_eq!(done(&mut client).len(), 1);
}

#[test]
fn chunks_of_any_order_complete_a_read() {
    let mut client = up(true);
    let into = read(&mut client, 0, 8);
    client.receive(&chunk(0, wire::CHUNK_OFFSET_HOLE, 1, &hole(4, 4))).unwrap();
    client.receive(&chunk(0, wire::CHUNK_OFFSET_DATA, 1, &data(2, b"cd"))).unwrap();
    client.receive(&chunk(0, wire::CHUNK_OFFSET_DATA, 1, &data(0, b"ab"))).unwrap();
    assert!(done(&mut client).is_empty());
    client.receive(&chunk(wire::CHUNK_DONE, wire::CHUNK_NONE, 1, b"")).unwrap();
    assert_eq!(done(&mut client)[0].result, Ok(()));
    assert_eq!(into.to_vec(), b"abcd\0\0\0\0");
}

#[test]
fn errors_are_those_of_the_request_that_they_name() {
    let mut client = up(true);
    read(&mut client, 0, 8);
    push(&mut client, Action::Deallocate { at: FileOffset(512), len: 512 });
    push(&mut client, Action::Write { at: FileOffset(1024), from: Segments::copy_of(b"12345678") });
    let error = |number: u32| [&number.to_be_bytes()[..], b"\0\x02no"].concat();
    client.receive(&chunk(wire::CHUNK_DONE, wire::CHUNK_ERROR, 3, &error(28))).unwrap();
    client.receive(&chunk(wire::CHUNK_DONE, wire::CHUNK_ERROR, 2, &error(95))).unwrap();
    client.receive(&chunk(wire::CHUNK_DONE, wire::CHUNK_ERROR, 1, &error(5))).unwrap();
    let results: Vec<_> = done(&mut client).into_iter().map(|done| done.result).collect();
    assert_eq!(results, [Err(FileError::NoSpace), Err(FileError::Unsupported), Err(FileError::Failed(5))]);
}

#[test]
fn after_a_failed_flush_nothing_is_written() {
    let mut client = up(false);
    push(&mut client, Action::SyncData);
    client.receive(&simple(5, 1)).unwrap();
    push(&mut client, Action::SyncData);
    push(&mut client, Action::Write { at: FileOffset(0), from: Segments::copy_of(&[1; 512]) });
    push(&mut client, Action::Deallocate { at: FileOffset(0), len: 512 });
    let results: Vec<_> = done(&mut client).into_iter().map(|done| done.result).collect();
    assert_eq!(results, vec![Err(FileError::Failed(5)); 4]);
}

#[test]
fn a_flush_of_the_guest_fails_with_the_clients_own_before_it() {
    let mut client = up(false);
    client.kept_max = 512;
    push(&mut client, Action::Write { at: FileOffset(0), from: Segments::copy_of(&[1; 512]) });
    client.receive(&simple(0, 1)).unwrap();
    let sent = client.to_send().len();
    client.sent(sent);
    push(&mut client, Action::SyncData);
    assert!(client.to_send().is_empty(), "two flushes are in flight");
    client.receive(&simple(5, 2)).unwrap();
    let results: Vec<_> = done(&mut client).into_iter().map(|done| done.result).collect();
    assert_eq!(results, [Ok(()), Err(FileError::Failed(5))]);
    assert!(client.take_trouble().unwrap().contains("failed a flush: I/O error"));
    assert_eq!(client.take_trouble(), None);
}

#[test]
fn kept_writes_take_no_room_from_operations() {
    let mut client = up(false);
    for cookie in 1..=300 {
        push(&mut client, Action::Write { at: FileOffset(0), from: Segments::copy_of(&[1; 512]) });
        client.receive(&simple(0, cookie)).unwrap();
    }
    client.disconnected();
    read(&mut client, 0, 512);
    client.connected();
    client.receive(&[greeting(), unsupported(), go(4096, FLAGS, None)].concat()).unwrap();
    read(&mut client, 0, 512);
}

#[test]
fn what_waits_for_a_lost_server_can_be_failed() {
    let mut client = up(false);
    read(&mut client, 0, 8);
    client.fail_waiting();
    assert!(done(&mut client).is_empty(), "there is a connection");
    client.disconnected();
    client.fail_waiting();
    assert_eq!(done(&mut client)[0].result, Err(FileError::Failed(5)));
    assert!(client.is_idle());
}

#[test]
fn allocation_is_queried_if_this_connection_has_negotiated_it() {
    let mut client = up(false);
    for (options, queried) in [(structured(), true), (unsupported(), false)] {
        client.connected();
        client.receive(&[greeting(), options, go(4096, FLAGS, None)].concat()).unwrap();
        let sent = client.to_send().len();
        client.sent(sent);
        client.describe(0, 4096);
        assert_eq!(!client.to_send().is_empty(), queried);
        assert_eq!(client.take_described().is_none(), queried);
    }
}

#[test]
fn extents_beyond_the_question_are_cut_off() {
    let mut client = up(true);
    client.describe(0, 4096);
    assert!(!client.to_send().is_empty());
    let extents = |list: &[(u32, u32)]| {
        let mut payload = 1u32.to_be_bytes().to_vec();
        list.iter().for_each(|(len, state)| payload.extend([len.to_be_bytes(), state.to_be_bytes()].concat()));
        chunk(wire::CHUNK_DONE, wire::CHUNK_BLOCK_STATUS, 1, &payload)
    };
    client.receive(&extents(&[(512, 0), (1 << 20, 3)])).unwrap();
    let expected = vec![Described { len: 512, zero: false, flags: 0 }, Described { len: 3584, zero: true, flags: 3 }];
    assert_eq!(client.take_described(), Some(expected));
    for wrong in [&[(0, 0)][..], &[(4096, 0), (512, 0)]] {
        let mut client = up(true);
        client.describe(0, 4096);
        client.to_send();
        assert!(client.receive(&extents(wrong)).is_err());
    }
}

/// Connects a client that only reads, and sends all it has to; returns the cookie of its last request.
fn connect(client: &mut Client) -> u64 {
    client.connected();
    client.receive(&[greeting(), unsupported(), go(4096, FLAGS, None)].concat()).unwrap();
    last_cookie(client)
}

fn last_cookie(client: &mut Client) -> u64 {
    let sent = client.to_send().to_vec();
    client.sent(sent.len());
    let request = sent.last_chunk::<28>().unwrap();
    u64::from_be_bytes(*request[8..].first_chunk().unwrap())
}

/// A client that has read a block of ones, has lost its connection, and is about to compare the block on the next one;
/// and the cookie of that read.
fn comparing() -> (Client, u64) {
    let mut client = Client::new("e", false).unwrap();
    client.sample.block = 512;
    connect(&mut client);
    let into = read(&mut client, 0, 512);
    let cookie = last_cookie(&mut client);
    client.receive(&[simple(0, cookie), vec![1; 512]].concat()).unwrap();
    assert_eq!(done(&mut client).len(), 1);
    // The memory is the guest's, who may write there at any time.
    into.fill_zero();
    client.disconnected();
    let cookie = connect(&mut client);
    (client, cookie)
}

#[test]
fn a_disk_is_recognized_by_what_was_received_and_that_is_no_answer_to_anything_else() {
    let (mut client, cookie) = comparing();
    let answers = client.answers();
    assert!(!client.is_up() && !client.is_negotiating());
    client.receive(&[simple(0, cookie), vec![1; 512]].concat()).unwrap();
    assert!(client.is_up() && !client.has_answered() && client.answers() == answers);
}

/// The name under which an export was requested can be given to another one while the client is away.
#[test]
fn an_export_with_another_canonical_name_is_not_the_same() {
    let named = |name: &str| {
        let info = [&wire::INFO_NAME.to_be_bytes()[..], name.as_bytes()].concat();
        [option_reply(wire::OPT_GO, wire::REP_INFO, &info), go(4096, FLAGS, None)].concat()
    };
    let (one, other) = ("6f0d3c2e-41b7-4a86-9a55-0c8be7a0d1f2", "6f0d3c2e-41b7-4a86-9a55-0c8be7a0d1f3");
    // The name of an image changes with a snapshot of the disk.
    for (before, after, is_same) in [(one, one, true), (one, other, false), ("a.qcow2", "b.qcow2", true)] {
        let mut client = negotiate(&[greeting(), unsupported(), named(before)]).unwrap();
        client.disconnected();
        client.connected();
        let again = client.receive(&[greeting(), unsupported(), named(after)].concat());
        assert_eq!(again.is_ok(), is_same, "{again:?}");
        assert!(is_same || matches!(again, Err(Broken::Changed(_))));
    }
}

#[test]
fn a_disk_whose_blocks_differ_or_cannot_be_read_is_not_recognized() {
    let (mut client, cookie) = comparing();
    let other = client.receive(&[simple(0, cookie), vec![2; 512]].concat());
    assert!(matches!(other, Err(Broken::Changed(_))), "{other:?}");
    assert!(!client.has_answered());
    let (mut client, cookie) = comparing();
    let unread = client.receive(&simple(5, cookie));
    assert!(matches!(unread, Err(Broken::Changed(_))), "{unread:?}");
}
