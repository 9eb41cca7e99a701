//! Tests of the negotiation's messages.

use disk::Geometry;

use super::*;
use crate::nbd::context::Context;

const NONE: Contexts = Contexts::NONE;

fn export() -> Export {
    let geometry =
        Geometry { len: 1 << 30, block: 512, physical_block: 4096, discard: 4096, chs: None, read_only: false };
    let bitmaps = vec!["a".into(), "a:b".into()];
    Export { name: "vdi".into(), description: "a disk".into(), geometry, layered: true, bitmaps }
}

/// A handshake whose client has sent `flags`.
fn begun(flags: u32) -> Handshake {
    let mut handshake = Handshake::default();
    let progress = handshake.step(&flags.to_be_bytes(), &export(), &mut Vec::new());
    assert_eq!(progress, Ok(Progress::Negotiating(4)));
    handshake
}

fn fixed() -> Handshake {
    begun(wire::CLIENT_FIXED_NEWSTYLE | wire::CLIENT_NO_ZEROES)
}

fn option(number: u32, data: &[u8]) -> Vec<u8> {
    let len = u32::try_from(data.len()).unwrap();
    let header = OptionHeader { magic: wire::OPTION_MAGIC.into(), option: number.into(), len: len.into() };
    [header.as_bytes(), data].concat()
}

/// Sends one option; returns the kinds and data of the replies.
fn send_option(handshake: &mut Handshake, number: u32, data: &[u8]) -> (Progress, Vec<(u32, Vec<u8>)>) {
    let mut out = Vec::new();
    let progress = handshake.step(&option(number, data), &export(), &mut out).unwrap();
    (progress, replies(number, &out))
}

fn replies(number: u32, mut out: &[u8]) -> Vec<(u32, Vec<u8>)> {
    let word = |at: usize, out: &[u8]| u32::from_be_bytes(out[at..at + 4].try_into().unwrap());
    let mut found = Vec::new();
    while !out.is_empty() {
        assert_eq!(&out[..8], wire::OPTION_REPLY_MAGIC.to_be_bytes());
        assert_eq!(word(8, out), number);
        let end = 20 + word(16, out) as usize;
        found.push((word(12, out), out[20..end].to_vec()));
        out = &out[end..];
    }
    found
}

fn kinds(replies: &[(u32, Vec<u8>)]) -> Vec<u32> {
    replies.iter().map(|(kind, _)| *kind).collect()
}

fn export_query(name: &[u8], wanted: &[u16]) -> Vec<u8> {
    let mut data = u32::try_from(name.len()).unwrap().to_be_bytes().to_vec();
    data.extend_from_slice(name);
    data.extend_from_slice(&u16::try_from(wanted.len()).unwrap().to_be_bytes());
    wanted.iter().for_each(|kind| data.extend_from_slice(&kind.to_be_bytes()));
    data
}

fn context_query(contexts: &[&[u8]]) -> Vec<u8> {
    let mut data = vec![0; 4];
    data.extend_from_slice(&u32::try_from(contexts.len()).unwrap().to_be_bytes());
    for context in contexts {
        data.extend_from_slice(&u32::try_from(context.len()).unwrap().to_be_bytes());
        data.extend_from_slice(context);
    }
    data
}

#[test]
fn go_returns_size_flags_and_block_sizes() {
    let mut handshake = fixed();
    let (progress, replies) = send_option(&mut handshake, wire::OPT_GO, &export_query(b"vdi", &[]));
    assert!(matches!(
        progress,
        Progress::Negotiated(_, Negotiated { structured: false, extended: false, contexts: NONE })
    ));
    assert_eq!(kinds(&replies), [wire::REP_INFO, wire::REP_INFO, wire::REP_ACK]);
    assert_eq!(replies[0].1[2..10], (1u64 << 30).to_be_bytes());
    // The client has not requested block sizes, and may request single bytes.
    assert_eq!(replies[1].1, [0, 3, 0, 0, 0, 1, 0, 0, 16, 0, 2, 0, 0, 0]);
}

#[test]
fn a_client_that_requests_block_sizes_gets_those_of_the_disk() {
    let mut handshake = fixed();
    let (_, replies) = send_option(&mut handshake, wire::OPT_GO, &export_query(b"vdi", &[wire::INFO_BLOCK_SIZE]));
    assert_eq!(replies[1].1, [0, 3, 0, 0, 2, 0, 0, 0, 16, 0, 2, 0, 0, 0]);
}

#[test]
fn info_returns_name_and_description_and_continues() {
    let mut handshake = fixed();
    let data = export_query(b"", &[wire::INFO_NAME, wire::INFO_DESCRIPTION, 999]);
    let (progress, replies) = send_option(&mut handshake, wire::OPT_INFO, &data);
    assert!(matches!(progress, Progress::Negotiating(_)));
    assert_eq!(replies[2].1, b"\0\x01vdi");
    assert_eq!(replies[3].1, b"\0\x02a disk");
}

#[test]
fn an_unknown_export_is_refused_and_negotiation_continues() {
    let mut handshake = fixed();
    let (progress, replies) = send_option(&mut handshake, wire::OPT_GO, &export_query(b"other", &[]));
    assert!(matches!(progress, Progress::Negotiating(_)));
    assert_eq!(kinds(&replies), [wire::REP_ERR_UNKNOWN]);
}

#[test]
fn the_reply_to_export_name_ends_with_zeroes_unless_negotiated_otherwise() {
    let mut out = Vec::new();
    let bytes = option(wire::OPT_EXPORT_NAME, b"");
    let progress = begun(wire::CLIENT_FIXED_NEWSTYLE).step(&bytes, &export(), &mut out);
    assert_eq!(progress, Ok(Progress::Negotiated(16, Negotiated::default())));
    assert_eq!(out.len(), 10 + 124);
    out.clear();
    fixed().step(&bytes, &export(), &mut out).unwrap();
    assert_eq!(out.len(), 10);
}

#[test]
fn export_name_of_an_unknown_export_ends_the_connection() {
    let result = fixed().step(&option(wire::OPT_EXPORT_NAME, b"other"), &export(), &mut Vec::new());
    assert_eq!(result, Err(ProtocolError::UnknownExport));
}

#[test]
fn allocation_requires_structured_replies() {
    let mut handshake = fixed();
    let (_, replies) = send_option(&mut handshake, wire::OPT_SET_META_CONTEXT, &context_query(&[b"base:allocation"]));
    assert_eq!(kinds(&replies), [wire::REP_ERR_INVALID]);
    let (_, replies) = send_option(&mut handshake, wire::OPT_STRUCTURED_REPLY, &[]);
    assert_eq!(kinds(&replies), [wire::REP_ACK]);
    let (_, replies) =
        send_option(&mut handshake, wire::OPT_SET_META_CONTEXT, &context_query(&[b"x:y", b"base:allocation"]));
    assert_eq!(kinds(&replies), [wire::REP_META_CONTEXT, wire::REP_ACK]);
    let (progress, _) = send_option(&mut handshake, wire::OPT_GO, &export_query(b"", &[]));
    assert!(matches!(
        progress,
        Progress::Negotiated(_, Negotiated { structured: true, extended: false, contexts: Contexts::ALLOCATION })
    ));
}

#[test]
fn extended_headers_take_precedence_over_structured_replies() {
    let mut handshake = fixed();
    assert_eq!(kinds(&send_option(&mut handshake, wire::OPT_EXTENDED_HEADERS, b"x").1), [wire::REP_ERR_INVALID]);
    assert_eq!(kinds(&send_option(&mut handshake, wire::OPT_EXTENDED_HEADERS, &[]).1), [wire::REP_ACK]);
    let (_, replies) = send_option(&mut handshake, wire::OPT_STRUCTURED_REPLY, &[]);
    assert_eq!(kinds(&replies), [wire::REP_ERR_EXT_HEADER_REQD]);
    // Contexts need no structured replies then.
    let (_, replies) = send_option(&mut handshake, wire::OPT_SET_META_CONTEXT, &context_query(&[b"base:allocation"]));
    assert_eq!(kinds(&replies), [wire::REP_META_CONTEXT, wire::REP_ACK]);
    let named = handshake.step(&option(wire::OPT_EXPORT_NAME, b""), &export(), &mut Vec::new());
    assert_eq!(named, Err(ProtocolError::NotGo));
    let (progress, replies) = send_option(&mut handshake, wire::OPT_GO, &export_query(b"", &[]));
    let flags = u16::from_be_bytes([replies[0].1[10], replies[0].1[11]]);
    let expected = wire::SEND_DF | wire::BLOCK_STATUS_PAYLOAD;
    assert_eq!(flags & expected, expected);
    let negotiated = Negotiated { structured: true, extended: true, contexts: Contexts::ALLOCATION };
    assert!(matches!(progress, Progress::Negotiated(_, found) if found == negotiated));
}

#[test]
fn payloads_of_block_status_are_offered_only_with_extended_headers_and_contexts() {
    let all = Negotiated { structured: true, extended: true, contexts: Contexts::ALLOCATION };
    for negotiated in [Negotiated { extended: false, ..all }, Negotiated { contexts: NONE, ..all }] {
        assert_eq!(export().flags(negotiated) & wire::BLOCK_STATUS_PAYLOAD, 0);
    }
}

#[test]
fn depths_are_offered_only_for_layered_images() {
    for layered in [true, false] {
        let export = Export { layered, bitmaps: Vec::new(), ..export() };
        let mut handshake = fixed();
        let mut send_option = |code, data: &[u8]| {
            let mut out = Vec::new();
            let progress = handshake.step(&option(code, data), &export, &mut out).unwrap();
            (progress, kinds(&replies(code, &out)))
        };
        send_option(wire::OPT_STRUCTURED_REPLY, &[]);
        let found = |count: usize| [vec![wire::REP_META_CONTEXT; count], vec![wire::REP_ACK]].concat();
        let count = usize::from(layered);
        for (queries, expected) in [(&[][..], 1 + count), (&[b"qemu:" as &[u8]], count), (&[b"base:"], 1)] {
            let (_, replies) = send_option(wire::OPT_LIST_META_CONTEXT, &context_query(queries));
            assert_eq!(replies, found(expected), "{queries:?}");
        }
        let (_, replies) = send_option(wire::OPT_SET_META_CONTEXT, &context_query(&[b"qemu:allocation-depth"]));
        assert_eq!(replies, found(count));
        let (progress, _) = send_option(wire::OPT_GO, &export_query(b"", &[]));
        let Progress::Negotiated(_, negotiated) = progress else { panic!("{progress:?}") };
        let contexts = if layered { Contexts::DEPTH } else { NONE };
        assert_eq!(negotiated, Negotiated { structured: true, extended: false, contexts });
    }
}

#[test]
fn setting_contexts_again_replaces_them_even_when_it_fails() {
    let mut handshake = fixed();
    send_option(&mut handshake, wire::OPT_STRUCTURED_REPLY, &[]);
    send_option(&mut handshake, wire::OPT_SET_META_CONTEXT, &context_query(&[b"base:allocation"]));
    send_option(&mut handshake, wire::OPT_SET_META_CONTEXT, b"nonsense");
    let (progress, _) = send_option(&mut handshake, wire::OPT_GO, &export_query(b"", &[]));
    assert!(matches!(
        progress,
        Progress::Negotiated(_, Negotiated { structured: true, extended: false, contexts: NONE })
    ));
}

#[test]
fn contexts_are_listed_by_namespace_or_all() {
    let mut handshake = fixed();
    send_option(&mut handshake, wire::OPT_STRUCTURED_REPLY, &[]);
    let all = ["base:allocation", "qemu:allocation-depth", BITMAP_A, BITMAP_AB];
    let cases: [(&[&[u8]], &[&str]); 9] = [
        (&[], &all),
        (&[b"base:"], &all[..1]),
        (&[b"qemu:"], &all[1..]),
        (&[b"qemu:dirty-bitmap:"], &all[2..]),
        (&[BITMAP_A.as_bytes(), b"base:"], &[all[0], all[2]]),
        // A name may look like a namespace.
        (&[b"qemu:dirty-bitmap:a:"], &[]),
        (&[b"qemu:dirty-bitmap:A"], &[]),
        (&[b"qemu:dirty-bitmap", b"qemu", b"", b":"], &[]),
        (&[b"\xff\0", BITMAP_AB.as_bytes(), BITMAP_AB.as_bytes()], &all[3..]),
    ];
    for (queries, expected) in cases {
        let (_, replies) = send_option(&mut handshake, wire::OPT_LIST_META_CONTEXT, &context_query(queries));
        let (last, listed) = replies.split_last().unwrap();
        assert_eq!(*last, (wire::REP_ACK, Vec::new()));
        let listed: Vec<_> =
            listed.iter().map(|(_, data)| (&data[..4], std::str::from_utf8(&data[4..]).unwrap())).collect();
        assert_eq!(listed, expected.iter().map(|name| (&[0; 4][..], *name)).collect::<Vec<_>>(), "for {queries:?}");
    }
}

const BITMAP_A: &str = "qemu:dirty-bitmap:a";
const BITMAP_AB: &str = "qemu:dirty-bitmap:a:b";

#[test]
fn several_contexts_are_set_at_once_by_exact_names_only() {
    let mut handshake = fixed();
    send_option(&mut handshake, wire::OPT_STRUCTURED_REPLY, &[]);
    let names = [&b"qemu:"[..], b"qemu:dirty-bitmap:", BITMAP_AB.as_bytes(), b"base:allocation", BITMAP_AB.as_bytes()];
    let (_, replies) = send_option(&mut handshake, wire::OPT_SET_META_CONTEXT, &context_query(&names));
    assert_eq!(kinds(&replies), [wire::REP_META_CONTEXT, wire::REP_META_CONTEXT, wire::REP_ACK]);
    let set = [[&[0, 0, 0, 1][..], b"base:allocation"].concat(), [&[0, 0, 0, 4], BITMAP_AB.as_bytes()].concat()];
    assert_eq!([&replies[0].1, &replies[1].1], [&set[0], &set[1]]);
    let expected = Contexts::ALLOCATION.with(Context::Bitmap(1));
    assert_eq!(handshake.negotiated.contexts, expected);
}

#[test]
fn thousands_of_queries_get_each_context_once() {
    let mut handshake = fixed();
    send_option(&mut handshake, wire::OPT_STRUCTURED_REPLY, &[]);
    let many = vec![&b""[..]; (OPTION_DATA_MAX - 8) / 4];
    for option in [wire::OPT_LIST_META_CONTEXT, wire::OPT_SET_META_CONTEXT] {
        let (_, replies) = send_option(&mut handshake, option, &context_query(&many));
        assert_eq!(kinds(&replies), [wire::REP_ACK]);
        let name = BITMAP_A.as_bytes();
        let same = vec![name; (OPTION_DATA_MAX - 8) / (4 + name.len())];
        let (_, replies) = send_option(&mut handshake, option, &context_query(&same));
        assert_eq!(kinds(&replies), [wire::REP_META_CONTEXT, wire::REP_ACK]);
    }
    // A name that is longer than any, and a count that is larger than the data.
    let long = [b'x'; 4097];
    for data in [context_query(&[&long]), [&[0; 4][..], &[255; 4], &[0; 100]].concat()] {
        let (_, replies) = send_option(&mut handshake, wire::OPT_SET_META_CONTEXT, &data);
        assert_eq!(kinds(&replies), [wire::REP_ERR_INVALID]);
    }
    assert_eq!(handshake.negotiated.contexts, NONE);
}

#[test]
fn list_returns_the_export() {
    let (_, replies) = send_option(&mut fixed(), wire::OPT_LIST, &[]);
    assert_eq!(replies[0], (wire::REP_SERVER, b"\0\0\0\x03vdia disk".to_vec()));
    assert_eq!(kinds(&send_option(&mut fixed(), wire::OPT_LIST, b"x").1), [wire::REP_ERR_INVALID]);
}

#[test]
fn unknown_options_and_tls_are_unsupported() {
    let mut handshake = fixed();
    for number in [0, 4, 5, 12, 77, u32::MAX] {
        assert_eq!(kinds(&send_option(&mut handshake, number, b"data").1), [wire::REP_ERR_UNSUP]);
    }
}

fn requiring_tls() -> Handshake {
    Handshake { encryption: Encryption::Required, ..fixed() }
}

#[test]
fn nothing_but_starttls_and_abort_is_accepted_before_tls() {
    for number in [0, 3, 4, 6, 7, 8, 9, 10, 11, 77, u32::MAX] {
        let (progress, replies) = send_option(&mut requiring_tls(), number, &export_query(b"", &[]));
        assert_eq!(kinds(&replies), [wire::REP_ERR_TLS_REQD], "{number}");
        assert!(matches!(progress, Progress::Negotiating(_)));
    }
    assert_eq!(send_option(&mut requiring_tls(), wire::OPT_ABORT, &[]).0, Progress::Aborted);
    let named = requiring_tls().step(&option(wire::OPT_EXPORT_NAME, b""), &export(), &mut Vec::new());
    assert_eq!(named, Err(ProtocolError::TlsRequired));
    assert_eq!(kinds(&send_option(&mut requiring_tls(), wire::OPT_STARTTLS, b"x").1), [wire::REP_ERR_INVALID]);
}

#[test]
fn starttls_forgets_what_was_negotiated_and_is_refused_afterwards() {
    let negotiated = Negotiated { structured: true, extended: false, contexts: Contexts::BOTH };
    let mut handshake = Handshake { negotiated, ..requiring_tls() };
    let (progress, replies) = send_option(&mut handshake, wire::OPT_STARTTLS, &[]);
    assert_eq!((progress, kinds(&replies)), (Progress::StartTls(16), vec![wire::REP_ACK]));
    assert_eq!(handshake.negotiated, Negotiated::default());
    assert_eq!(kinds(&send_option(&mut handshake, wire::OPT_STARTTLS, &[]).1), [wire::REP_ERR_INVALID]);
    let (progress, _) = send_option(&mut handshake, wire::OPT_GO, &export_query(b"", &[]));
    assert!(matches!(progress, Progress::Negotiated(_, negotiated) if negotiated == Negotiated::default()));
}

#[test]
fn abort_is_acknowledged() {
    let (progress, replies) = send_option(&mut fixed(), wire::OPT_ABORT, &[]);
    assert_eq!(progress, Progress::Aborted);
    assert_eq!(kinds(&replies), [wire::REP_ACK]);
}

#[test]
fn every_truncation_waits_for_more() {
    let whole = option(wire::OPT_GO, &export_query(b"vdi", &[1, 2]));
    for len in 0..whole.len() {
        let mut out = Vec::new();
        assert_eq!(fixed().step(&whole[..len], &export(), &mut out), Ok(Progress::Incomplete));
        assert!(out.is_empty());
    }
}

#[test]
fn a_flood_of_options_ends_the_connection() {
    let mut handshake = fixed();
    for _ in 0..OPTIONS_MAX {
        send_option(&mut handshake, wire::OPT_LIST, &[]);
    }
    let result = handshake.step(&option(wire::OPT_LIST, &[]), &export(), &mut Vec::new());
    assert_eq!(result, Err(ProtocolError::OptionFlood));
}

#[test]
fn a_long_option_is_refused_by_its_header() {
    let header = OptionHeader { magic: wire::OPTION_MAGIC.into(), option: 77.into(), len: u32::MAX.into() };
    let result = fixed().step(header.as_bytes(), &export(), &mut Vec::new());
    assert_eq!(result, Err(ProtocolError::OptionTooLong { option: 77, len: u32::MAX }));
}

#[test]
fn wrong_magic_or_unknown_flags_end_the_connection() {
    assert_eq!(fixed().step(&[0; 16], &export(), &mut Vec::new()), Err(ProtocolError::OptionMagic));
    let result = Handshake::default().step(&[0, 0, 0, 4], &export(), &mut Vec::new());
    assert_eq!(result, Err(ProtocolError::ClientFlags(4)));
}

#[test]
fn a_client_of_the_original_newstyle_can_only_use_export_name() {
    let result = begun(0).step(&option(wire::OPT_GO, &export_query(b"", &[])), &export(), &mut Vec::new());
    assert_eq!(result, Err(ProtocolError::NotFixed(wire::OPT_GO)));
    let progress = begun(0).step(&option(wire::OPT_EXPORT_NAME, b"vdi"), &export(), &mut Vec::new());
    assert!(matches!(progress, Ok(Progress::Negotiated(19, _))));
}

#[test]
fn a_read_only_export_announces_no_write_commands() {
    let mut export = export();
    export.geometry.read_only = true;
    let flags = export.flags(Negotiated { structured: true, ..Negotiated::default() });
    let expected = wire::READ_ONLY | wire::SEND_FLUSH | wire::CAN_MULTI_CONN | wire::SEND_DF | wire::SEND_CACHE;
    assert_eq!(flags, wire::HAS_FLAGS | expected);
}
