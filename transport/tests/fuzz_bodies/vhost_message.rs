//! A front-end that sends arbitrary messages, with arbitrary file descriptors.
//!
//! Invariants checked: no panic; every reply has a valid header and its announced size; the server either still serves
//! the front-end or has disconnected it; the next front-end is served; no file descriptor leaks.
//!
//! Input: records of request, flags, file descriptors (count in the low four bits, type in the others), length, and
//! that many bytes of payload. With bit 7 of the flags the header has the payload's first word as its size.

use std::io::Read;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

use crate::vhost_mock::{FrontEnd, GEOMETRY, REGION, TestBackend, VERSION_1};

/// Runs one input.
pub fn run(data: &[u8]) {
    let before = open_fds();
    {
        let mut machine = TestBackend::new(GEOMETRY, 2);
        let mut front_end = FrontEnd::connect(&machine.path());
        machine.settle();
        let mut rest = data;
        while let [request, flags, fds, len, more @ ..] = rest {
            let (payload, next) = more.split_at(more.len().min(usize::from(*len)));
            rest = next;
            send_message(&front_end, *request, *flags, *fds, payload);
            machine.settle();
            read_replies(&mut front_end);
        }
        drop(front_end);
        let mut next = FrontEnd::connect(&machine.path());
        next.set_up(&mut machine, VERSION_1, 1);
        next.request(4, 0, &[]);
        machine.settle();
        assert_eq!(next.used(0, 0).len(), 1, "the next front-end is served");
    }
    assert_eq!(open_fds(), before, "file descriptors leaked");
}

fn open_fds() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

fn send_message(front_end: &FrontEnd, request: u8, flags: u8, fds: u8, payload: &[u8]) {
    let wrong_size = payload.first_chunk().filter(|_| flags & 0x80 != 0).map(|word| u32::from_ne_bytes(*word));
    let size = wrong_size.unwrap_or(payload.len() as u32);
    let header = [u32::from(request), u32::from(flags & 0x7f), size];
    let mut bytes: Vec<u8> = header.iter().flat_map(|word| word.to_ne_bytes()).collect();
    bytes.extend(payload);
    let fds: Vec<OwnedFd> = (0..fds & 0xf).map(|index| file(fds >> 4, index)).collect();
    let borrowed: Vec<BorrowedFd<'_>> = fds.iter().map(AsFd::as_fd).collect();
    front_end.send_raw(&bytes, &borrowed);
}

fn file(kind: u8, index: u8) -> OwnedFd {
    if kind == 0 || (kind == 2 && index % 2 == 0) {
        return eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
    }
    let file = memfd_create("fuzz", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&file, REGION).unwrap();
    file
}

fn read_replies(front_end: &mut FrontEnd) {
    front_end.stream.set_nonblocking(true).unwrap();
    let mut header = [0; 12];
    while front_end.stream.read_exact(&mut header).is_ok() {
        let [_, flags, size] = [0, 4, 8].map(|at| u32::from_ne_bytes(header[at..at + 4].try_into().unwrap()));
        assert_eq!(flags, 5, "a reply of version 1");
        let mut payload = vec![0; size as usize];
        front_end.stream.read_exact(&mut payload).unwrap();
    }
}
