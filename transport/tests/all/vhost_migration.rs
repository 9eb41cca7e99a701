//! The dirty log: its contents after each kind of write, and invalid logs.

use std::os::fd::{AsFd, OwnedFd};

use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::io::pread;
use transport::Server as _;

use crate::vhost_mock::{
    EVENT_IDX, FLUSH, FrontEnd, GEOMETRY, LOG_ALL, PROTOCOL, REGION, TestBackend, VERSION_1, WRITE,
};

const FEATURES: u64 = VERSION_1 | FLUSH;
const DATA: u64 = 0x41000;
/// Pages of 4096 bytes: of the used ring of the first queue, of the status, and of the data.
const USED_PAGE: u64 = 1;
const STATUS_PAGE: u64 = 0x40;
const DATA_PAGE: u64 = 0x41;
/// Bytes of a log of both regions.
const WHOLE: u64 = 2 * REGION / 4096 / 8;

fn log_file(len: u64) -> OwnedFd {
    let file = memfd_create("log", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&file, len).unwrap();
    file
}

/// The pages in a log, which begins at the start of its file.
fn pages(file: &OwnedFd) -> Vec<u64> {
    let mut bytes = [0; 4096];
    let len = pread(file, &mut bytes, 0).unwrap();
    (0..8 * len as u64).filter(|&page| bytes[page as usize / 8] >> (page % 8) & 1 == 1).collect()
}

fn clear(file: &OwnedFd, len: u64) {
    rustix::io::pwrite(file, &vec![0; len as usize], 0).unwrap();
}

fn base(len: u64, offset: u64) -> Vec<u8> {
    [len, offset].map(u64::to_ne_bytes).concat()
}

fn ready(features: u64) -> (TestBackend, FrontEnd) {
    let mut machine = TestBackend::new(GEOMETRY, 2);
    let mut front_end = FrontEnd::connect(&machine.path());
    front_end.set_up(&mut machine, features, 2);
    (machine, front_end)
}

/// Sends a log. The reply does not depend on the flag that requests an acknowledgement.
fn send_log(machine: &mut TestBackend, front_end: &mut FrontEnd, file: &OwnedFd, len: u64) {
    front_end.send(6, 0, &base(len, 0), &[file.as_fd()]);
    machine.settle();
    assert_eq!(front_end.reply(6), Some(vec![0; 8]), "{}", machine.events());
}

/// Begins or ends a migration, as QEMU does; the used ring of the first queue is logged.
fn set_logging(machine: &mut TestBackend, front_end: &mut FrontEnd, features: u64, on: bool) {
    let features = features | PROTOCOL | if on { LOG_ALL } else { 0 };
    front_end.expect(machine, 2, &features.to_ne_bytes(), &[], 0);
    let place = front_end.place(0, u32::from(on));
    front_end.expect(machine, 9, &place, &[], 0);
}

fn logging(features: u64) -> (TestBackend, FrontEnd, OwnedFd) {
    let (mut machine, mut front_end) = ready(features);
    let file = log_file(WHOLE);
    send_log(&mut machine, &mut front_end, &file, WHOLE);
    set_logging(&mut machine, &mut front_end, features, true);
    (machine, front_end, file)
}

#[test]
fn dirty_logging_is_offered_as_a_feature_and_in_the_protocol() {
    let (mut machine, mut front_end) = ready(FEATURES);
    let number = |reply: Option<Vec<u8>>| u64::from_ne_bytes(reply.unwrap().try_into().unwrap());
    assert_ne!(number(front_end.query(&mut machine, 1, &[])) & LOG_ALL, 0);
    assert_ne!(number(front_end.query(&mut machine, 15, &[])) & 2, 0);
}

#[test]
fn the_used_ring_is_in_the_log_from_the_start() {
    let (_machine, _front_end, file) = logging(FEATURES);
    assert_eq!(pages(&file), [USED_PAGE]);
}

#[test]
fn a_read_logs_its_data_its_status_and_the_used_ring() {
    let (mut machine, mut front_end, file) = logging(FEATURES);
    clear(&file, WHOLE);
    front_end.request(0, 8, &[(DATA + 512, 8192, WRITE), (REGION + 0x3000, 4096, WRITE)]);
    machine.settle();
    assert_eq!(front_end.status(), 0);
    let second = REGION / 4096 + 3;
    assert_eq!(pages(&file), [USED_PAGE, STATUS_PAGE, DATA_PAGE, DATA_PAGE + 1, DATA_PAGE + 2, second]);
    set_logging(&mut machine, &mut front_end, FEATURES, false);
    clear(&file, WHOLE);
    front_end.request(0, 8, &[(DATA, 4096, WRITE)]);
    machine.settle();
    assert_eq!(front_end.used(0, 0).len(), 2);
    assert!(pages(&file).is_empty(), "nothing is logged after the migration");
}

#[test]
fn a_write_logs_its_status_and_the_used_ring_only() {
    let (mut machine, front_end, file) = logging(FEATURES);
    clear(&file, WHOLE);
    front_end.request(1, 8, &[(DATA, 4096, 0)]);
    machine.settle();
    assert_eq!(pages(&file), [USED_PAGE, STATUS_PAGE]);
}

#[test]
fn a_failed_read_logs_its_data_too() {
    let (mut machine, front_end, file) = logging(FEATURES);
    machine.fault = Some(disk::Status::Failed);
    clear(&file, WHOLE);
    front_end.request(0, 8, &[(DATA, 4096, WRITE)]);
    machine.settle();
    assert_eq!(pages(&file), [USED_PAGE, STATUS_PAGE, DATA_PAGE]);
}

#[test]
fn the_serial_number_is_logged() {
    let (mut machine, front_end, file) = logging(FEATURES);
    clear(&file, WHOLE);
    front_end.request(8, 0, &[(DATA, 20, WRITE)]);
    machine.settle();
    assert_eq!(pages(&file), [USED_PAGE, STATUS_PAGE, DATA_PAGE]);
}

#[test]
fn a_request_for_notifications_is_logged() {
    for features in [FEATURES, FEATURES | EVENT_IDX] {
        let (mut machine, _front_end, file) = logging(features);
        clear(&file, WHOLE);
        assert!(machine.server.may_sleep());
        assert_eq!(pages(&file), [USED_PAGE]);
    }
}

#[test]
fn a_used_ring_without_the_log_flag_is_not_logged() {
    let (mut machine, mut front_end, file) = logging(FEATURES);
    let place = front_end.place(0, 0);
    front_end.expect(&mut machine, 9, &place, &[], 0);
    clear(&file, WHOLE);
    front_end.request(1, 8, &[(DATA, 4096, 0)]);
    machine.settle();
    assert_eq!(pages(&file), [STATUS_PAGE]);
}

#[test]
fn a_completion_is_logged_in_the_newest_log() {
    let (mut machine, mut front_end) = ready(FEATURES);
    machine.hold = true;
    front_end.request(0, 8, &[(DATA, 4096, WRITE)]);
    machine.settle();
    let [first, second] = [log_file(WHOLE), log_file(WHOLE)];
    send_log(&mut machine, &mut front_end, &first, WHOLE);
    set_logging(&mut machine, &mut front_end, FEATURES, true);
    send_log(&mut machine, &mut front_end, &second, WHOLE);
    clear(&first, WHOLE);
    clear(&second, WHOLE);
    machine.release();
    assert_eq!(pages(&second), [USED_PAGE, STATUS_PAGE, DATA_PAGE]);
    assert!(pages(&first).is_empty());
}

#[test]
fn a_read_into_removed_memory_is_logged_at_its_old_address() {
    let (mut machine, mut front_end, file) = logging(FEATURES);
    machine.hold = true;
    front_end.request(0, 8, &[(REGION + 0x3000, 4096, WRITE)]);
    machine.settle();
    let region = front_end.region(1);
    front_end.expect(&mut machine, 38, &region, &[], 0);
    clear(&file, WHOLE);
    machine.release();
    assert_eq!(pages(&file), [USED_PAGE, STATUS_PAGE, REGION / 4096 + 3]);
}

#[test]
fn a_reset_does_not_end_the_logging() {
    let (mut machine, mut front_end, file) = logging(FEATURES);
    front_end.expect(&mut machine, 34, &[], &[], 0);
    clear(&file, WHOLE);
    front_end.start_queue(&mut machine, 0, 0);
    front_end.request(1, 8, &[(DATA, 4096, 0)]);
    machine.settle();
    assert_eq!(pages(&file), [STATUS_PAGE]);
}

#[test]
fn a_write_outside_the_log_ends_the_session_unanswered() {
    let (mut machine, mut front_end) = ready(FEATURES);
    // The log covers the status but not the data.
    let file = log_file(4096);
    let len = DATA_PAGE / 8;
    front_end.request(0, 8, &[(DATA, 4096, WRITE)]);
    machine.hold = true;
    machine.settle();
    send_log(&mut machine, &mut front_end, &file, len);
    set_logging(&mut machine, &mut front_end, FEATURES, true);
    machine.hold = false;
    machine.release();
    machine.settle();
    assert!(front_end.is_closed());
    assert!(front_end.used(0, 0).is_empty(), "it is not answered");
    let events = machine.events();
    assert!(events.contains("dirty log") && events.contains("0x41000"), "{events}");
    assert!(pages(&file).iter().all(|&page| page < 8 * len), "{:?}", pages(&file));
    // The next session takes it again.
    front_end.reconnect(&machine.path());
    front_end.set_up(&mut machine, FEATURES, 1);
    machine.settle();
    assert_eq!(front_end.used(0, 0).len(), 1, "{}", machine.events());
}

#[test]
fn a_used_ring_outside_of_the_log_ends_the_session() {
    let (mut machine, mut front_end) = ready(FEATURES);
    let file = log_file(WHOLE);
    send_log(&mut machine, &mut front_end, &file, WHOLE);
    front_end.expect(&mut machine, 2, &(FEATURES | PROTOCOL | LOG_ALL).to_ne_bytes(), &[], 0);
    let mut place = front_end.place(0, 1);
    place.truncate(32);
    place.extend(u64::MAX.to_ne_bytes());
    front_end.expect(&mut machine, 9, &place, &[], 0);
    assert!(front_end.is_closed(), "{}", machine.events());
    assert!(pages(&file).is_empty());
}

#[test]
fn a_log_that_does_not_fit_its_file_ends_the_session() {
    for (payload, len) in [(base(4097, 0), 4096), (base(8, 4096), 4096), (base(8, u64::MAX), 8), (base(0, 0), 8)] {
        let (mut machine, mut front_end) = ready(FEATURES);
        let file = log_file(len);
        front_end.send(6, 8, &payload, &[file.as_fd()]);
        machine.settle();
        assert!(front_end.is_closed());
        assert!(machine.events().contains("cannot use the dirty log"));
    }
}

#[test]
fn a_log_is_refused_where_it_was_not_negotiated() {
    let mut machine = TestBackend::new(GEOMETRY, 1);
    let mut front_end = FrontEnd::connect(&machine.path());
    let file = log_file(WHOLE);
    front_end.send(6, 0, &base(WHOLE, 0), &[file.as_fd()]);
    machine.settle();
    assert!(front_end.is_closed());
    assert!(machine.events().contains("was not negotiated"));
}

#[test]
fn writes_to_the_log_are_signalled_at_the_log_fd() {
    let (mut machine, mut front_end, file) = logging(FEATURES);
    let fd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
    front_end.expect(&mut machine, 7, &[], &[file.as_fd()], 1);
    front_end.expect(&mut machine, 7, &[], &[fd.as_fd()], 0);
    front_end.request(1, 8, &[(DATA, 4096, 0)]);
    machine.settle();
    assert_eq!(FrontEnd::signalled(&fd), 1);
}
