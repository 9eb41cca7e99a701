//! Messages of a front-end, in and out of order, and their effects.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use transport::Server as _;
use transport::vhost_user::{BindError, Config, Server};

use crate::vhost_mock::{EVENT_IDX, FLUSH, FrontEnd, GEOMETRY, REGION, TestBackend, VERSION_1, WRITE};

const FEATURES: u64 = VERSION_1 | FLUSH;
const DATA: u64 = 0x41000;
const STATUS: u64 = 0x40100;
const HEADER: u64 = 0x40000;

fn connected() -> (TestBackend, FrontEnd) {
    let mut machine = TestBackend::new(GEOMETRY, 2);
    let front_end = FrontEnd::connect(&machine.path());
    machine.settle();
    machine.events();
    (machine, front_end)
}

fn ready() -> (TestBackend, FrontEnd) {
    let (mut machine, mut front_end) = connected();
    front_end.set_up(&mut machine, FEATURES, 2);
    (machine, front_end)
}

fn words(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_ne_bytes()).collect()
}

fn number(reply: Option<Vec<u8>>) -> u64 {
    u64::from_ne_bytes(reply.unwrap().try_into().unwrap())
}

fn new_eventfd() -> OwnedFd {
    eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap()
}

fn region(guest: u64, len: u64, peer: u64, offset: u64) -> Vec<u8> {
    [0, guest, len, peer, offset].iter().flat_map(|word| word.to_ne_bytes()).collect()
}

/// Lets a front-end send something invalid; returns the events that the server logs when it disconnects.
fn disconnection_reason(send: impl FnOnce(&FrontEnd)) -> String {
    let (mut machine, mut front_end) = connected();
    send(&front_end);
    machine.settle();
    assert!(front_end.is_closed());
    assert!(!machine.server.is_connected());
    let events = machine.events();
    let mut next = FrontEnd::connect(&machine.path());
    next.set_up(&mut machine, FEATURES, 1);
    next.request(4, 0, &[]);
    machine.settle();
    assert_eq!(next.used(0, 0).len(), 1, "the next front-end is served");
    events
}

#[test]
fn exactly_the_implemented_features_are_offered() {
    let (mut machine, mut front_end) = connected();
    let features = number(front_end.query(&mut machine, 1, &[]));
    for bit in [2, 6, 9, 10, 12, 13, 14, 26, 28, 29, 30, 32] {
        assert_ne!(features & 1 << bit, 0, "feature {bit}");
    }
    for bit in [1, 4, 5, 11, 34] {
        assert_eq!(features & 1 << bit, 0, "feature {bit}");
    }
    let protocol = number(front_end.query(&mut machine, 15, &[]));
    assert_eq!(protocol, 1 | 1 << 1 | 1 << 3 | 1 << 5 | 1 << 9 | 1 << 12 | 1 << 13 | 1 << 15);
    assert_eq!(number(front_end.query(&mut machine, 17, &[])), 2);
    assert_eq!(number(front_end.query(&mut machine, 36, &[])), 509);
}

#[test]
fn the_configuration_is_read_in_windows() {
    let (mut machine, mut front_end) = connected();
    let mut read = |offset: u32, size: u32| {
        let payload = [words(&[offset, size, 0]), vec![0; size as usize]].concat();
        front_end.query(&mut machine, 24, &payload).unwrap()
    };
    assert_eq!(read(0, 8)[12..], (GEOMETRY.len / 512).to_ne_bytes());
    assert_eq!(read(34, 2)[12..], 2u16.to_ne_bytes());
    assert_eq!(read(60, 40)[12..], [0; 40], "fields of later versions are zero");
    assert_eq!(read(0, 256).len(), 12 + 256);
    assert!(read(1, 256).is_empty(), "a window that is too large");
    assert!(read(u32::MAX, 2).is_empty(), "a window that wraps around");
}

fn larger() -> disk::Geometry {
    disk::Geometry { len: GEOMETRY.len * 2, ..GEOMETRY }
}

fn capacity(machine: &mut TestBackend, front_end: &mut FrontEnd) -> u64 {
    let payload = [words(&[0, 8, 0]), vec![0; 8]].concat();
    let reply = front_end.query(machine, 24, &payload).unwrap();
    u64::from_ne_bytes(reply[12..].try_into().unwrap()) * 512
}

#[test]
fn a_front_end_with_a_back_end_channel_is_notified_of_a_new_size() {
    let (mut machine, mut front_end) = connected();
    front_end.negotiate(&mut machine, FEATURES);
    let (mut ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
    front_end.expect(&mut machine, 21, &[], &[theirs.as_fd()], 0);
    drop(theirs);
    machine.server.resized(&larger(), &mut machine.watch);
    let mut message = [0; 12];
    std::io::Read::read_exact(&mut ours, &mut message).unwrap();
    assert_eq!(message, [2, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0], "VHOST_USER_BACKEND_CONFIG_CHANGE_MSG");
    assert_eq!(capacity(&mut machine, &mut front_end), larger().len);
    assert!(machine.events().contains("notified the front-end"));
}

#[test]
fn a_front_end_without_a_back_end_channel_keeps_working_after_a_resize() {
    let (mut machine, mut front_end) = ready();
    machine.server.resized(&larger(), &mut machine.watch);
    assert_eq!(machine.server.peers(), 1);
    assert!(machine.events().contains("cannot notify the front-end"));
    assert_eq!(capacity(&mut machine, &mut front_end), larger().len);
    front_end.request(4, 0, &[]);
    machine.settle();
    assert_eq!(front_end.used(0, 0).len(), 1);
}

#[test]
fn the_next_front_end_sees_the_new_size() {
    let mut machine = TestBackend::new(GEOMETRY, 1);
    machine.server.resized(&larger(), &mut machine.watch);
    assert_eq!(machine.server.peers(), 0);
    let mut front_end = FrontEnd::connect(&machine.path());
    machine.settle();
    assert_eq!(capacity(&mut machine, &mut front_end), larger().len);
}

#[test]
fn an_unread_back_end_channel_ends_only_its_own_connection() {
    let (mut machine, mut front_end) = connected();
    front_end.negotiate(&mut machine, FEATURES);
    let (_ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
    front_end.expect(&mut machine, 21, &[], &[theirs.as_fd()], 0);
    while machine.server.is_connected() {
        machine.server.resized(&larger(), &mut machine.watch);
    }
    assert!(front_end.is_closed());
    let mut next = FrontEnd::connect(&machine.path());
    machine.settle();
    assert_eq!(capacity(&mut machine, &mut next), larger().len);
}

#[test]
fn the_configuration_is_read_only() {
    let (mut machine, mut front_end) = connected();
    front_end.negotiate(&mut machine, FEATURES);
    let payload = [words(&[32, 1, 0]), vec![0]].concat();
    front_end.expect(&mut machine, 25, &payload, &[], 1);
}

#[test]
fn an_unknown_request_is_refused_if_a_reply_is_requested() {
    let (mut machine, mut front_end) = connected();
    front_end.negotiate(&mut machine, FEATURES);
    for request in [0, 19, 30, 33, 39, 40, 44, u32::MAX] {
        front_end.expect(&mut machine, request, &[0; 16], &[], 1);
    }
    assert!(machine.events().contains("request 19 is unknown"));
    front_end.send(19, 0, &[], &[]);
    machine.settle();
    assert!(front_end.is_closed());
}

#[test]
fn malformed_messages_end_the_connection() {
    assert!(
        disconnection_reason(|f| f.send_raw(&words(&[1, 1, u32::MAX]), &[])).contains("payload of 4294967295 bytes")
    );
    assert!(disconnection_reason(|f| f.send_raw(&words(&[1, 1, 1025]), &[])).contains("payload of 1025 bytes"));
    assert!(disconnection_reason(|f| f.send_raw(&words(&[1, 0, 0]), &[])).contains("flags 0x0"));
    assert!(disconnection_reason(|f| f.send(2, 0, &[0; 7], &[])).contains("request 2 has a payload of 7 bytes"));
    assert!(disconnection_reason(|f| f.send(11, 8, &words(&[2, 0]), &[])).contains("no queue 2"));
    assert!(disconnection_reason(|f| f.send(24, 8, &words(&[0, 9, 0]), &[])).contains("request 24 has a payload"));
    assert!(disconnection_reason(|f| f.send(2, 0, &(1u64 << 34).to_ne_bytes(), &[])).contains("were not offered"));
    assert!(disconnection_reason(|f| f.send(16, 0, &(1u64 << 14).to_ne_bytes(), &[])).contains("were not offered"));
    assert!(
        disconnection_reason(|f| f.stream.shutdown(std::net::Shutdown::Write).unwrap())
            .contains("closed the connection")
    );
    let truncated = disconnection_reason(|f| {
        f.send_raw(&words(&[2, 1, 8, 0]), &[]);
        f.stream.shutdown(std::net::Shutdown::Write).unwrap();
    });
    assert!(truncated.contains("in the middle of a message"));
}

#[test]
fn too_many_file_descriptors_end_the_connection() {
    let fds: Vec<OwnedFd> = (0..20).map(|_| new_eventfd()).collect();
    let borrowed: Vec<BorrowedFd<'_>> = fds.iter().map(AsFd::as_fd).collect();
    assert!(disconnection_reason(|f| f.send(12, 0, &[0; 8], &borrowed)).contains("more than 8 file descriptors"));
    let trickle = disconnection_reason(|f| {
        for byte in words(&[12, 1, 8, 0]) {
            f.send_raw(&[byte], &borrowed[..1]);
        }
    });
    assert!(trickle.contains("more than 8 file descriptors"));
    assert!(disconnection_reason(|f| f.send(1, 0, &[], &borrowed[..1])).contains("came with 1 file descriptors"));
}

#[test]
fn a_flood_of_messages_is_answered_in_turns() {
    let (mut machine, mut front_end) = connected();
    for _ in 0..200 {
        front_end.send(1, 0, &[], &[]);
    }
    let mut turns = 0;
    while !machine.turn(false).is_empty() {
        turns += 1;
    }
    assert!(turns >= 200 / 64, "{turns} turns");
    for _ in 0..200 {
        assert_eq!(front_end.reply(1).unwrap().len(), 8);
    }
}

#[test]
fn a_front_end_that_reads_no_replies_is_disconnected() {
    let (mut machine, mut front_end) = connected();
    for _ in 0..20_000 {
        if !machine.server.is_connected() {
            break;
        }
        front_end.send(1, 0, &[], &[]);
        machine.settle();
    }
    assert!(machine.events().contains("does not read its replies"));
    while front_end.reply(1).is_some() {}
    assert!(front_end.is_closed());
}

#[test]
fn bad_regions_are_refused_and_change_nothing() {
    let (mut machine, mut front_end) = ready();
    let file = memfd_create("short", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&file, 4096).unwrap();
    let far = 1 << 30;
    for (payload, why) in [
        (region(far, 4097, far, 0), "has 4096 bytes and needs 4097"),
        (region(far, 4096, far, 4096), "has 4096 bytes and needs 8192"),
        (region(far, 0, far, 0), "invalid region"),
        (region(far, 4096, far, u64::MAX), "invalid region"),
        (region(u64::MAX, 4096, far, 0), "invalid region"),
        (region(REGION - 1, 4096, far, 0), "overlap"),
    ] {
        front_end.expect(&mut machine, 37, &payload, &[file.as_fd()], 1);
        let events = machine.events();
        assert!(events.contains(why), "{why}: {events}");
    }
    front_end.expect(&mut machine, 37, &region(far, 4096, far, 0), &[], 1);
    front_end.expect(&mut machine, 37, &region(far, 4096, far, 0), &[new_eventfd().as_fd()], 1);
    front_end.expect(&mut machine, 38, &region(far, 4096, far, 0), &[], 1);
    front_end.expect(&mut machine, 5, &words(&[1, 0]), &[file.as_fd()], 1);

    front_end.request(4, 0, &[]);
    machine.settle();
    assert_eq!(front_end.used(0, 0).len(), 1);
}

#[test]
fn bad_queue_numbers_are_refused() {
    let (mut machine, mut front_end) = connected();
    front_end.negotiate(&mut machine, FEATURES);
    for (request, payload) in [
        (8, words(&[2, 16])),
        (8, words(&[0, 0])),
        (8, words(&[0, 15])),
        (8, words(&[0, 65536])),
        (10, words(&[0, 65536])),
        (10, words(&[u32::MAX, 0])),
        (18, words(&[0, 2])),
        (18, words(&[99, 1])),
        (9, [words(&[99, 0]), vec![0; 32]].concat()),
    ] {
        front_end.expect(&mut machine, request, &payload, &[], 1);
    }
    // A ring of this size is not within an empty memory table.
    front_end.expect(&mut machine, 8, &words(&[0, 16]), &[], 0);
    let place = front_end.place(0, 0);
    front_end.expect(&mut machine, 9, &place, &[], 1);
}

#[test]
fn a_running_queue_keeps_its_size_and_index() {
    let (mut machine, mut front_end) = ready();
    front_end.expect(&mut machine, 8, &words(&[0, 32]), &[], 1);
    front_end.expect(&mut machine, 10, &words(&[0, 5]), &[], 1);
    front_end.request(4, 0, &[]);
    machine.settle();
    assert_eq!(front_end.used(0, 0).len(), 1);
}

#[test]
fn a_driver_that_cannot_kick_is_refused() {
    let (mut machine, mut front_end) = connected();
    front_end.negotiate(&mut machine, FEATURES);
    front_end.expect(&mut machine, 12, &0x100u64.to_ne_bytes(), &[], 1);
    assert!(machine.events().contains("does not poll"));
}

#[test]
fn a_kick_for_a_missing_ring_starts_nothing() {
    let (mut machine, mut front_end) = connected();
    front_end.set_up(&mut machine, FEATURES, 0);
    front_end.expect(&mut machine, 8, &words(&[0, 16]), &[], 0);
    let place = front_end.place(0, 0);
    front_end.expect(&mut machine, 9, &place, &[], 0);
    let region = front_end.region(0);
    front_end.expect(&mut machine, 38, &region, &[], 0);
    front_end.expect(&mut machine, 12, &[0; 8], &[new_eventfd().as_fd()], 1);
    front_end.expect(&mut machine, 8, &words(&[0, 32]), &[], 0);
}

#[test]
fn only_descriptors_that_can_be_signalled_without_blocking_are_accepted() {
    let (mut machine, mut front_end) = connected();
    front_end.negotiate(&mut machine, FEATURES);
    let file = memfd_create("file", MemfdFlags::CLOEXEC).unwrap();
    front_end.expect(&mut machine, 13, &[0; 8], &[file.as_fd()], 1);
    front_end.expect(&mut machine, 14, &[0; 8], &[file.as_fd()], 1);

    // A write to this saturated, blocking eventfd would block the thread.
    let full = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
    rustix::io::write(&full, &(u64::MAX - 1).to_ne_bytes()).unwrap();
    front_end.set_up(&mut machine, FEATURES, 1);
    front_end.expect(&mut machine, 13, &[0; 8], &[full.as_fd()], 0);
    front_end.request(4, 0, &[]);
    machine.settle();
    assert_eq!(front_end.used(0, 0).len(), 1);
}

#[test]
fn a_driver_that_polls_for_answers_is_served() {
    let (mut machine, mut front_end) = ready();
    assert_eq!(FrontEnd::signalled(&front_end.calls[0]), 1, "once, because an earlier signal may have been lost");
    front_end.expect(&mut machine, 13, &0x100u64.to_ne_bytes(), &[], 0);
    front_end.request(4, 0, &[]);
    machine.settle();
    assert_eq!(front_end.used(0, 0).len(), 1);
    assert_eq!(FrontEnd::signalled(&front_end.calls[0]), 0);
}

#[test]
fn a_disabled_queue_is_not_served_until_it_is_enabled() {
    let (mut machine, mut front_end) = ready();
    front_end.expect(&mut machine, 18, &words(&[0, 0]), &[], 0);
    front_end.request(4, 0, &[]);
    machine.settle();
    assert!(machine.server.may_sleep());
    assert_eq!(front_end.used(0, 0), []);
    front_end.expect(&mut machine, 18, &words(&[0, 1]), &[], 0);
    assert_eq!(front_end.used(0, 0).len(), 1);
}

#[test]
fn a_queue_may_be_configured_in_any_order() {
    let (mut machine, mut front_end) = connected();
    front_end.negotiate(&mut machine, FEATURES);
    let place = front_end.place(0, 0);
    front_end.expect(&mut machine, 18, &words(&[0, 1]), &[], 0);
    front_end.expect(&mut machine, 13, &[0; 8], &[new_eventfd().as_fd()], 0);
    front_end.expect(&mut machine, 9, &place, &[], 0);
    front_end.expect(&mut machine, 8, &words(&[0, 16]), &[], 0);
    let payload = [front_end.region(0), front_end.region(1)];
    let files: Vec<OwnedFd> = front_end.files.iter().map(|file| rustix::io::dup(file).unwrap()).collect();
    let table = [words(&[2, 0]), payload[0][8..].to_vec(), payload[1][8..].to_vec()].concat();
    front_end.expect(&mut machine, 5, &table, &[files[0].as_fd(), files[1].as_fd()], 0);
    front_end.request(4, 0, &[]);
    machine.settle();
    assert_eq!(front_end.used(0, 0), [], "not started yet");
    front_end.expect(&mut machine, 12, &[0; 8], &[new_eventfd().as_fd()], 0);
    assert_eq!(front_end.used(0, 0).len(), 1);
}

#[test]
fn without_protocol_features_queues_start_enabled() {
    let (mut machine, mut front_end) = connected();
    front_end.send(2, 0, &FEATURES.to_ne_bytes(), &[]);
    let table = [words(&[1, 0]), front_end.region(0)[8..].to_vec()].concat();
    front_end.send(5, 0, &table, &[front_end.files[0].as_fd()]);
    front_end.send(8, 0, &words(&[0, 16]), &[]);
    front_end.send(9, 0, &front_end.place(0, 0), &[]);
    front_end.send(12, 0, &[0; 8], &[new_eventfd().as_fd()]);
    front_end.request(4, 0, &[]);
    machine.settle();
    assert_eq!(front_end.used(0, 0).len(), 1, "{}", machine.events());
    assert!(front_end.reply(2).is_none(), "acknowledgements were not negotiated");
}

#[test]
fn stopping_a_queue_waits_for_its_requests_and_for_no_others() {
    let (mut machine, mut front_end) = ready();
    machine.hold = true;
    front_end.request(0, 0, &[(DATA, 512, WRITE)]);
    machine.settle();
    front_end.send(11, 0, &words(&[0, 0]), &[]);
    front_end.send(1, 0, &[], &[]);
    machine.settle();
    assert!(front_end.reply(11).is_none(), "one request is in flight");

    machine.hold = false;
    front_end.offer(0, 0);
    front_end.header(HEADER + 32, 4, 0);
    front_end.chain(1, 0, &[(HEADER + 32, 16, 0), (STATUS + 1, 1, WRITE)]);
    front_end.offer(1, 0);
    machine.settle();
    assert_eq!(front_end.used(1, 0).len(), 1, "the other queue still works");
    assert_eq!(machine.held.len(), 1, "no more are taken from this one");

    machine.release();
    machine.settle();
    assert_eq!(front_end.used(0, 0), [(0, 513)], "answered before the reply");
    assert_eq!(front_end.reply(11).unwrap(), words(&[0, 1]));
    assert_eq!(front_end.reply(1).unwrap().len(), 8, "then the reply to the later request");
    machine.settle();
    assert_eq!(front_end.used(0, 0).len(), 1, "stopped");

    front_end.start_queue(&mut machine, 0, 1);
    assert_eq!(front_end.used(0, 0).len(), 2, "continued with the request that was left");
}

#[test]
fn a_reset_waits_for_all_requests() {
    let (mut machine, mut front_end) = ready();
    machine.hold = true;
    front_end.request(0, 0, &[(DATA, 512, WRITE)]);
    machine.settle();
    front_end.send(34, 8, &[], &[]);
    machine.settle();
    assert!(front_end.reply(34).is_none());
    machine.release();
    machine.settle();
    assert_eq!(number(front_end.reply(34)), 0);
    front_end.offer(0, 0);
    machine.settle();
    assert_eq!(machine.held.len(), 0, "no queue runs after a reset");
}

#[test]
fn memory_may_change_while_requests_are_in_flight() {
    let (mut machine, mut front_end) = ready();
    machine.hold = true;
    machine.bytes[..512].fill(3);
    let at = REGION + 4096;
    front_end.request(0, 0, &[(at, 512, WRITE)]);
    machine.settle();
    let removed = front_end.region(1);
    front_end.expect(&mut machine, 38, &removed, &[], 0);
    machine.release();
    assert_eq!(front_end.used(0, 0), [(0, 513)]);
    assert_eq!(front_end.get(at, 512), [3; 512], "the old mapping was alive");

    machine.hold = false;
    machine.bytes[..512].fill(4);
    front_end.request(0, 0, &[(at, 512, WRITE)]);
    machine.settle();
    assert_eq!(front_end.used(0, 0).len(), 1, "the request waits: front-ends remove a region before they replace it");
    assert!(machine.events().contains("queue 0 waits for memory"));
    let file = rustix::io::dup(&front_end.files[1]).unwrap();
    front_end.expect(&mut machine, 37, &removed, &[file.as_fd()], 0);
    assert_eq!((front_end.status(), front_end.used(0, 0).len()), (0, 2));
    assert_eq!(front_end.get(at, 512), [4; 512]);
}

#[test]
fn a_ring_whose_memory_is_removed_waits_for_it() {
    let (mut machine, mut front_end) = ready();
    front_end.request(4, 0, &[]);
    machine.settle();
    let region = front_end.region(0);
    front_end.expect(&mut machine, 38, &region, &[], 0);
    front_end.offer(0, 0);
    machine.settle();
    assert_eq!(front_end.used(0, 0).len(), 1);
    let file = rustix::io::dup(&front_end.files[0]).unwrap();
    front_end.expect(&mut machine, 37, &region, &[file.as_fd()], 0);
    assert_eq!(front_end.used(0, 0).len(), 2);
    assert_eq!(machine.events().matches("broken").count(), 0);
}

#[test]
fn a_region_can_be_removed_with_its_file_descriptor_attached() {
    let (mut machine, mut front_end) = ready();
    let region = front_end.region(1);
    let file = rustix::io::dup(&front_end.files[1]).unwrap();
    front_end.expect(&mut machine, 38, &region, &[file.as_fd()], 0);
    front_end.expect(&mut machine, 38, &region, &[file.as_fd()], 1);
}

#[test]
fn results_for_a_disconnected_front_end_are_discarded() {
    let (mut machine, front_end) = ready();
    machine.hold = true;
    front_end.request(1, 0, &[(DATA, 512, 0)]);
    front_end.put(DATA, &[4; 512]);
    machine.settle();
    front_end.stream.shutdown(std::net::Shutdown::Both).unwrap();
    let mut next = FrontEnd::connect(&machine.path());
    machine.settle();
    assert!(machine.events().contains("gone with 1 requests in flight"));
    next.send(1, 0, &[], &[]);
    machine.settle();
    assert!(next.reply(1).is_none(), "the next one waits, so that no old write reaches its data");

    machine.release();
    assert_eq!(front_end.used(0, 0), []);
    assert_eq!(machine.bytes[..512], [4; 512]);
    machine.hold = false;
    machine.settle();
    assert_eq!(next.reply(1).unwrap().len(), 8);
    next.set_up(&mut machine, FEATURES | EVENT_IDX, 2);
    next.request(4, 0, &[]);
    machine.settle();
    assert_eq!(next.used(0, 0).len(), 1);
}

#[test]
fn a_second_front_end_is_refused() {
    let (mut machine, first) = ready();
    let mut second = FrontEnd::connect(&machine.path());
    machine.settle();
    assert!(second.is_closed());
    assert!(machine.events().contains("refused a second front-end"));
    first.request(4, 0, &[]);
    machine.settle();
    assert_eq!(first.used(0, 0).len(), 1);
}

#[test]
fn a_front_end_is_accepted_right_after_a_disconnection() {
    let (mut machine, first) = ready();
    drop(first);
    let mut second = FrontEnd::connect(&machine.path());
    second.set_up(&mut machine, FEATURES, 1);
    second.request(4, 0, &[]);
    machine.settle();
    assert_eq!(second.used(0, 0).len(), 1);
}

#[test]
fn a_stopped_server_completes_its_requests_and_takes_no_more() {
    let (mut machine, mut front_end) = ready();
    machine.hold = true;
    front_end.request(0, 0, &[(DATA, 512, WRITE)]);
    machine.settle();
    machine.server.stop(&mut machine.watch);
    assert!(!machine.path().exists());
    front_end.offer(0, 0);
    machine.settle();
    assert_eq!(machine.held.len(), 1);
    machine.release();
    assert_eq!(front_end.used(0, 0), [(0, 513)]);
    assert!(!front_end.is_closed());
}

#[test]
fn the_error_for_unsupported_options_names_them() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("disk.sock");
    let config = Config { path, queues: 1, serial: String::new(), geometry: GEOMETRY };
    let none = Server::bind(Config { queues: 0, ..config.clone() });
    assert!(matches!(none.err(), Some(BindError::Queues { requested: 0 })));
    let many = Server::bind(Config { queues: 65, ..config.clone() });
    assert!(matches!(many.err(), Some(BindError::Queues { requested: 65 })));
    let long = Server::bind(Config { serial: "x".repeat(21), ..config.clone() });
    assert!(matches!(long.err(), Some(BindError::SerialTooLong(_))));
    let first = Server::bind(Config { queues: 64, serial: "x".repeat(20), ..config.clone() }).unwrap();
    let second = Server::bind(config).err().unwrap();
    assert!(second.to_string().contains("is in use by another process"), "{second}");
    drop(first);
}
