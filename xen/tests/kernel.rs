//! The kernel's side on real Xen, with this domain as its own guest: pages granted by `/dev/xen/gntalloc`, and an event
//! channel between two users of `/dev/xen/evtchn`. Elsewhere: that the message says what is missing.

use std::fs::{File, OpenOptions};
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::Arc;

use memory::{Mapping, Segments, Shared};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::ioctl::{Direction as Way, Ioctl, IoctlOutput, Opcode, Updater, ioctl, opcode};
use xen::kernel::{Evtchn, Gntdev};
use xen::{Copied, CopyBatch, Direction, DomId, EventChannels, GrantRef, Grants, PAGE, Piece, Port};

/// linux/gntalloc.h, `struct ioctl_gntalloc_alloc_gref` with room for two references.
#[repr(C)]
struct Alloc {
    domid: u16,
    flags: u16,
    count: u32,
    index: u64,
    refs: [u32; 2],
}

const ALLOC_GREF: Opcode = opcode::from_components(Way::None, b'G', 5, 24);

/// linux/evtchn.h, `struct ioctl_evtchn_bind_unbound_port`: the domain that may bind the other end.
struct BindUnbound(u32);

// SAFETY: the call reads four bytes and answers with the number of the port.
unsafe impl Ioctl for BindUnbound {
    type Output = Port;
    const IS_MUTATING: bool = false;

    fn opcode(&self) -> Opcode {
        opcode::from_components(Way::None, b'E', 2, 4)
    }

    fn as_ptr(&mut self) -> *mut std::ffi::c_void {
        std::ptr::from_mut(&mut self.0).cast()
    }

    unsafe fn output_from_ptr(out: IoctlOutput, _: *mut std::ffi::c_void) -> rustix::io::Result<Port> {
        Ok(Port(u32::try_from(out).unwrap()))
    }
}

/// The number of the domain that the test runs in.
const OURS: DomId = DomId(0);

fn device(path: &str) -> File {
    OpenOptions::new().read(true).write(true).open(path).unwrap()
}

/// Two pages that this domain grants to itself, and how the granting side sees them. The grants last as long as the file.
fn granted(writable: bool) -> (File, [GrantRef; 2], Shared) {
    let file = device("/dev/xen/gntalloc");
    let mut alloc = Alloc { domid: OURS.0, flags: u16::from(writable), count: 2, index: 0, refs: [0; 2] };
    // SAFETY: the structure of this call.
    unsafe { ioctl(&file, Updater::<ALLOC_GREF, Alloc>::new(&mut alloc)) }.unwrap();
    let mapping = Arc::new(Mapping::of_file(file.as_fd(), alloc.index, 2 * PAGE).unwrap());
    let (base, len) = (mapping.base(), mapping.len());
    // SAFETY: the whole mapping, which the value holds.
    let shared = unsafe { Shared::new(mapping, base, len) };
    (file, alloc.refs.map(GrantRef), shared)
}

/// The device, on Xen; elsewhere its error was looked at.
fn gntdev() -> Option<Gntdev> {
    if Path::new("/dev/xen/gntdev").exists() {
        return Some(Gntdev::open().unwrap());
    }
    let error = Gntdev::open().map(drop).unwrap_err();
    assert!(error.to_string().starts_with("/dev/xen/gntdev: cannot open: this is not a Xen domain"), "{error}");
    None
}

/// As above.
fn evtchn() -> Option<Evtchn> {
    if Path::new("/dev/xen/evtchn").exists() {
        return Some(Evtchn::open().unwrap());
    }
    let error = Evtchn::open().map(drop).unwrap_err();
    assert!(error.to_string().starts_with("/dev/xen/evtchn: cannot open: this is not a Xen domain"), "{error}");
    None
}

fn piece(page: GrantRef, from: u16, len: u16) -> Piece {
    Piece { page, from, len }
}

fn wait_for(channels: &impl EventChannels, seconds: i64) -> bool {
    let timeout = Timespec { tv_sec: seconds, tv_nsec: 0 };
    poll(&mut [PollFd::from_borrowed_fd(channels.fd().as_fd(), PollFlags::IN)], Some(&timeout)).unwrap() > 0
}

fn taken(channels: &mut impl EventChannels) -> Vec<Port> {
    let mut ports = Vec::new();
    assert!(!channels.take(&mut ports).unwrap());
    ports
}

#[test]
fn a_batch_copies_both_ways_and_says_what_was_refused() {
    let Some(mut gntdev) = gntdev() else { return };
    let (_file, [one, two], theirs) = granted(true);
    let (_other, [read_only, _], _) = granted(false);
    theirs.write(PAGE - 4, *b"from").unwrap();
    theirs.write(PAGE, *b"both").unwrap();
    let mut batch = CopyBatch::default();
    let ours: Vec<Segments> = (0..4).map(|_| Segments::copy_of(b"to them!")).collect();
    let read = batch.push(Direction::FromGuest, ours[0].clone(), &[piece(one, 4092, 4), piece(two, 0, 4)]).unwrap();
    let written = batch.push(Direction::ToGuest, ours[1].clone(), &[piece(two, 512, 8)]).unwrap();
    let bad = [piece(one, 0, 4), piece(GrantRef(1 << 20), 0, 4)];
    let bad = batch.push(Direction::FromGuest, ours[2].clone(), &bad).unwrap();
    let denied = batch.push(Direction::ToGuest, ours[3].clone(), &[piece(read_only, 0, 8)]).unwrap();
    gntdev.copy(OURS, &mut batch).unwrap();
    assert_eq!((batch.copied(read), ours[0].to_vec()), (Copied::All, b"fromboth".to_vec()));
    assert_eq!((batch.copied(written), theirs.read::<8>(PAGE + 512)), (Copied::All, Some(*b"to them!")));
    assert_eq!(batch.copied(bad), Copied::Refused(-3));
    assert!(matches!(batch.copied(denied), Copied::Refused(status) if status < 0));
}

#[test]
fn a_batch_is_larger_than_one_hypercall_takes() {
    let Some(mut gntdev) = gntdev() else { return };
    let (_file, [one, two], theirs) = granted(true);
    theirs.write(PAGE, *b"2").unwrap();
    let pages: Vec<Piece> = (0..256).flat_map(|_| [piece(one, 0, 4096), piece(two, 0, 4096)]).collect();
    let ours = Segments::zeroed(512 * PAGE);
    let mut batch = CopyBatch::default();
    let entry = batch.push(Direction::FromGuest, ours.clone(), &pages).unwrap();
    gntdev.copy(OURS, &mut batch).unwrap();
    assert_eq!(batch.copied(entry), Copied::All);
    assert_eq!(ours.slice(511 * PAGE, 2).to_vec(), b"2\0");
    assert_eq!(ours.to_vec().iter().filter(|&&byte| byte == b'2').count(), 256);
}

#[test]
fn a_thousand_mappings_leave_none() {
    let Some(mut gntdev) = gntdev() else { return };
    let (_file, [one, two], theirs) = granted(true);
    for round in 0..1000u32 {
        let mapped = gntdev.map(OURS, &[one, two], false).unwrap();
        mapped.shared().store_u32(PAGE, round).unwrap();
    }
    assert_eq!(theirs.load_u32(PAGE), Some(999));
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    assert_eq!(maps.matches("/dev/xen/gntdev").count(), 0);
}

#[test]
fn a_mapping_is_the_pages_themselves_until_its_last_user_goes() {
    let Some(mut gntdev) = gntdev() else { return };
    let (_file, [one, two], theirs) = granted(true);
    let mapped = gntdev.map(OURS, &[two, one], false).unwrap();
    let ring = mapped.shared();
    theirs.write(PAGE + 8, *b"from them").unwrap();
    assert_eq!(ring.read::<9>(8), Some(*b"from them"));
    ring.write(PAGE + 16, *b"from us").unwrap();
    assert_eq!(theirs.read::<7>(16), Some(*b"from us"));
    let data = mapped.segments([(8, 9)]).unwrap();
    drop((mapped, ring, gntdev));
    assert_eq!(data.to_vec(), b"from them");
}

#[test]
fn what_is_not_granted_is_not_mapped() {
    let Some(mut gntdev) = gntdev() else { return };
    let (_file, [one, _], _) = granted(true);
    let (_other, [read_only, _], theirs) = granted(false);
    let error = gntdev.map(OURS, &[one, GrantRef(1 << 20)], false).map(drop).unwrap_err();
    assert!(error.to_string().starts_with("/dev/xen/gntdev: cannot map 2 pages of domain 0"), "{error}");
    assert!(gntdev.map(OURS, &[read_only], false).is_err());
    theirs.write(0, *b"to be read").unwrap();
    let mapped = gntdev.map(OURS, &[one, read_only], true).unwrap();
    assert_eq!(mapped.segments([(PAGE, 10)]).unwrap().to_vec(), b"to be read");
}

#[test]
fn a_signal_arrives_once_and_again_after_unmasking() {
    let (Some(mut ours), Some(mut theirs)) = (evtchn(), evtchn()) else { return };
    // SAFETY: the structure of this call.
    let remote = unsafe { ioctl(theirs.fd(), BindUnbound(u32::from(OURS.0))) }.unwrap();
    let port = ours.bind(OURS, remote).unwrap();
    assert!(wait_for(&ours, 5));
    assert_eq!(taken(&mut ours), [port]);

    theirs.notify(remote).unwrap();
    theirs.notify(remote).unwrap();
    assert!(!wait_for(&ours, 0));
    ours.unmask(port).unwrap();
    assert!(wait_for(&ours, 5));
    assert_eq!(taken(&mut ours), [port]);
    ours.unmask(port).unwrap();
    ours.notify(port).unwrap();
    assert!(wait_for(&theirs, 5));
    assert_eq!(taken(&mut theirs), [remote]);
    ours.unbind(port).unwrap();
    assert!(ours.notify(port).is_err());
}
