//! Extended headers, message by message: no tool of Debian 12 uses them.

use disk::{DiskOffset, Geometry, Operation, Span};
use testkit::nbd::wire::{Command, Connection, ExtendedChunk, FUA, PAYLOAD, REQ_ONE, extended_request, request};

use crate::nbd_support::{GEOMETRY, Served};

const EINVAL: u32 = 22;
const ENOSPC: u32 = 28;

fn ask(client: &mut Connection, command: Command, flags: u16, at: u64, len: u64, data: &[u8]) -> ExtendedChunk {
    client.send(&[extended_request(command, flags, 9, at, len), data.to_vec()].concat()).unwrap();
    let chunk = client.extended_chunk().unwrap();
    assert_eq!((chunk.cookie, chunk.at), (9, at));
    chunk
}

/// Asserts success without data.
fn done(chunk: &ExtendedChunk) {
    assert_eq!((chunk.is_last, chunk.kind, chunk.payload.len()), (true, 0, 0), "{chunk:?}");
}

/// Asserts an error of this number.
fn fails(chunk: &ExtendedChunk, errno: u32) {
    assert_eq!((chunk.is_last, chunk.kind), (true, 0x8001), "{chunk:?}");
    assert_eq!(chunk.payload[..4], errno.to_be_bytes(), "{chunk:?}");
}

/// The id of a context, and its runs.
fn status(chunk: &ExtendedChunk) -> (u32, Vec<(u64, u64)>) {
    assert_eq!(chunk.kind, 6, "{chunk:?}");
    let (head, runs) = chunk.payload.split_at(8);
    let number = |bytes: &[u8]| u64::from_be_bytes(bytes.try_into().unwrap());
    let runs: Vec<_> = runs.chunks(16).map(|run| (number(&run[..8]), number(&run[8..]))).collect();
    assert_eq!(head[4..], u32::try_from(runs.len()).unwrap().to_be_bytes());
    (u32::from_be_bytes(head[..4].try_into().unwrap()), runs)
}

#[test]
fn every_reply_is_a_chunk_with_the_offset_of_its_request() {
    let served = Served::unix(GEOMETRY);
    let mut client = served.extended();
    done(&ask(&mut client, Command::Write, PAYLOAD | FUA, 511, 3, &[7, 8, 9]));
    let read = ask(&mut client, Command::Read, 0, 510, 5, &[]);
    let expected = [&510u64.to_be_bytes()[..], &[0, 7, 8, 9, 0]].concat();
    assert_eq!((read.is_last, read.kind, read.payload), (true, 1, expected));
    done(&ask(&mut client, Command::Flush, 0, 0, 0, &[]));
    done(&ask(&mut client, Command::Zeroes, 0, 0, 65_536, &[]));
    done(&ask(&mut client, Command::Trim, FUA, 65_536, 65_536, &[]));
    done(&ask(&mut client, Command::Cache, 0, 1, 1 << 20, &[]));
    done(&ask(&mut client, Command::Read, 0, 77, 0, &[]));
    fails(&ask(&mut client, Command::Read, 0, GEOMETRY.len, 1, &[]), EINVAL);
    fails(&ask(&mut client, Command::Flush, 0, 512, 0, &[]), EINVAL);
}

#[test]
fn effects_are_not_limited_to_32_bits() {
    let served = Served::unix(Geometry { len: 1 << 42, ..GEOMETRY });
    let mut client = served.extended();
    done(&ask(&mut client, Command::Write, PAYLOAD, 1 << 41, 512, &[1; 512]));
    let len = (1 << 33) + 512;
    // More than 4 GiB in one request, of a disk that notes what it was requested to do.
    fails(&ask(&mut client, Command::Zeroes, 0, 1 << 41, 1 << 42, &[]), ENOSPC);
    fails(&ask(&mut client, Command::Trim, 0, u64::MAX, u64::MAX, &[]), EINVAL);
    fails(&ask(&mut client, Command::Read, 0, 0, 1 << 33, &[]), EINVAL);
    done(&ask(&mut client, Command::Zeroes, 0, 0, len, &[]));
    let (id, runs) = status(&ask(&mut client, Command::BlockStatus, 0, 0, len, &[]));
    // Described in parts, so that other clients are served in between.
    assert_eq!((id, runs), (1, vec![(1 << 32, 3)]));
    let done = served.disk.lock().unwrap().done.clone();
    let zeroes = Operation::WriteZeroes { free: true, durable: false };
    // In parts, one after the other.
    let parts = [(0, 1 << 32), (1 << 32, 1 << 32), (1 << 33, 512)];
    let parts = parts.map(|(at, len)| (zeroes, Span { at: DiskOffset(at), len }));
    assert!(done.windows(3).any(|found| found == parts), "{done:?}");
}

#[test]
fn payloads_of_commands_without_one_are_skipped() {
    let served = Served::unix(GEOMETRY);
    let mut client = served.extended();
    for command in [Command::Read, Command::Flush, Command::Trim, Command::Zeroes, Command::Cache] {
        fails(&ask(&mut client, command, PAYLOAD, 0, 1000, &[0x55; 1000]), EINVAL);
    }
    fails(&ask(&mut client, Command::Write, PAYLOAD, GEOMETRY.len - 1, 700_000, &vec![1; 700_000]), ENOSPC);
    done(&ask(&mut client, Command::Flush, 0, 0, 0, &[]));
    assert!(served.disk.lock().unwrap().done.iter().all(|(operation, _)| *operation == Operation::Flush));
}

#[test]
fn writes_of_qemu_have_a_payload_without_its_flag() {
    let served = Served::unix(GEOMETRY);
    let mut client = served.extended();
    done(&ask(&mut client, Command::Write, 0, 0, 512, &[7; 512]));
    assert_eq!(ask(&mut client, Command::Read, 0, 0, 512, &[]).payload[8..], [7; 512]);
}

#[test]
fn a_payload_longer_than_announced_ends_the_connection() {
    let served = Served::unix(GEOMETRY);
    for (command, len) in [(Command::Write, (32 << 20) + 1), (Command::Trim, 1 << 40), (Command::BlockStatus, u64::MAX)]
    {
        let mut client = served.extended();
        client.send(&extended_request(command, PAYLOAD, 1, 0, len)).unwrap();
        assert!(client.is_disconnected(), "{command:?}");
    }
}

#[test]
fn compact_requests_end_the_connection() {
    let served = Served::unix(GEOMETRY);
    let mut client = served.extended();
    client.send(&[request(Command::Flush, 0, 1, 0, 0), vec![0; 4]].concat()).unwrap();
    assert!(client.is_disconnected());
}

#[test]
fn a_block_status_can_select_contexts() {
    let served = Served::unix(GEOMETRY);
    let mut client = served.extended();
    done(&ask(&mut client, Command::Write, PAYLOAD, 65_536, 512, &[1; 512]));
    let select = |effect: u64, ids: &[u32]| {
        let ids: Vec<u8> = ids.iter().flat_map(|id| id.to_be_bytes()).collect();
        [&effect.to_be_bytes()[..], &ids].concat()
    };
    let all = vec![(65_536, 3), (65_536, 0), ((1 << 20) - 131_072, 3)];
    for (flags, runs) in [(PAYLOAD, &all[..]), (PAYLOAD | REQ_ONE, &all[..1])] {
        let data = select(1 << 20, &[1]);
        let chunk = ask(&mut client, Command::BlockStatus, flags, 0, 12, &data);
        assert!(chunk.is_last);
        assert_eq!(status(&chunk), (1, runs.to_vec()));
    }
    assert_eq!(status(&ask(&mut client, Command::BlockStatus, 0, 0, 1 << 20, &[])), (1, all));
    // Unknown, duplicate, missing and cut ids; an effect of nothing, and one behind the end.
    let end = GEOMETRY.len;
    for data in [
        select(512, &[2]),
        select(512, &[1, 1]),
        select(512, &[]),
        select(512, &[1])[..11].to_vec(),
        vec![0],
        select(512, &[1; 100]),
        select(0, &[1]),
        select(end + 512, &[1]),
    ] {
        let len = u64::try_from(data.len()).unwrap();
        fails(&ask(&mut client, Command::BlockStatus, PAYLOAD, 0, len, &data), EINVAL);
    }
    // It arrives byte by byte.
    let request = [extended_request(Command::BlockStatus, PAYLOAD, 5, 0, 12), select(512, &[1])].concat();
    request.iter().for_each(|byte| client.send(&[*byte]).unwrap());
    assert_eq!(status(&client.extended_chunk().unwrap()), (1, vec![(512, 3)]));
}
