//! The kernel's devices on real Xen, with this domain as its own guest: pages granted through `/dev/xen/gntalloc`, and
//! an event channel between two users of `/dev/xen/evtchn`. Elsewhere: the error says what is missing.

use std::os::fd::AsFd;
use std::path::Path;

use memory::Segments;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use xen::kernel::{Evtchn, Gntalloc, Gntdev, GrantedPages};
use xen::{Copied, CopyBatch, Direction, DomId, EventChannels, GrantRef, Grants, PAGE, PageRange, Port};

/// The id of the domain that the test runs in.
const OURS: DomId = DomId(0);

/// Two pages that this domain grants to itself.
fn granted(read_only: bool) -> (GrantedPages, [GrantRef; 2]) {
    let offered = Gntalloc::open().unwrap().grant(OURS, 2, read_only).unwrap();
    let pages = [offered.pages[0], offered.pages[1]];
    (offered, pages)
}

/// The device, on Xen; elsewhere its error is checked.
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

fn range(page: GrantRef, from: u16, len: u16) -> PageRange {
    PageRange { page, from, len }
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
fn a_batch_copies_both_ways_and_reports_refusals() {
    let Some(mut gntdev) = gntdev() else { return };
    let (GrantedPages { bytes: theirs, .. }, [one, two]) = granted(false);
    let (_other, [read_only, _]) = granted(true);
    theirs.write(PAGE - 4, *b"from").unwrap();
    theirs.write(PAGE, *b"both").unwrap();
    let mut batch = CopyBatch::default();
    let ours: Vec<Segments> = (0..4).map(|_| Segments::copy_of(b"to them!")).collect();
    let read = batch.push(Direction::FromGuest, ours[0].clone(), &[range(one, 4092, 4), range(two, 0, 4)]).unwrap();
    let written = batch.push(Direction::ToGuest, ours[1].clone(), &[range(two, 512, 8)]).unwrap();
    let bad = [range(one, 0, 4), range(GrantRef(1 << 20), 0, 4)];
    let bad = batch.push(Direction::FromGuest, ours[2].clone(), &bad).unwrap();
    let denied = batch.push(Direction::ToGuest, ours[3].clone(), &[range(read_only, 0, 8)]).unwrap();
    gntdev.copy(OURS, &mut batch).unwrap();
    assert_eq!((batch.copied(read), ours[0].to_vec()), (Copied::All, b"fromboth".to_vec()));
    assert_eq!((batch.copied(written), theirs.read::<8>(PAGE + 512)), (Copied::All, Some(*b"to them!")));
    assert_eq!(batch.copied(bad), Copied::Refused(-3));
    assert!(matches!(batch.copied(denied), Copied::Refused(status) if status < 0));
}

#[test]
fn a_batch_can_be_larger_than_one_hypercall() {
    let Some(mut gntdev) = gntdev() else { return };
    let (GrantedPages { bytes: theirs, .. }, [one, two]) = granted(false);
    theirs.write(PAGE, *b"2").unwrap();
    let pages: Vec<PageRange> = (0..256).flat_map(|_| [range(one, 0, 4096), range(two, 0, 4096)]).collect();
    let ours = Segments::zeroed(512 * PAGE);
    let mut batch = CopyBatch::default();
    let entry = batch.push(Direction::FromGuest, ours.clone(), &pages).unwrap();
    gntdev.copy(OURS, &mut batch).unwrap();
    assert_eq!(batch.copied(entry), Copied::All);
    assert_eq!(ours.slice(511 * PAGE, 2).to_vec(), b"2\0");
    assert_eq!(ours.to_vec().iter().filter(|&&byte| byte == b'2').count(), 256);
}

#[test]
fn a_thousand_mappings_leak_none() {
    let Some(mut gntdev) = gntdev() else { return };
    let (GrantedPages { bytes: theirs, .. }, [one, two]) = granted(false);
    for round in 0..1000u32 {
        let mapped = gntdev.map(OURS, &[one, two], false).unwrap();
        mapped.shared().store_u32(PAGE, round).unwrap();
    }
    assert_eq!(theirs.load_u32(PAGE), Some(999));
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    assert_eq!(maps.matches("/dev/xen/gntdev").count(), 0);
}

#[test]
fn a_mapping_shares_the_pages_until_its_last_user_is_dropped() {
    let Some(mut gntdev) = gntdev() else { return };
    let (GrantedPages { bytes: theirs, .. }, [one, two]) = granted(false);
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
fn pages_that_are_not_granted_cannot_be_mapped() {
    let Some(mut gntdev) = gntdev() else { return };
    let (_granted, [one, _]) = granted(false);
    let (GrantedPages { bytes: theirs, .. }, [read_only, _]) = granted(true);
    let error = gntdev.map(OURS, &[one, GrantRef(1 << 20)], false).map(drop).unwrap_err();
    assert!(error.to_string().starts_with("/dev/xen/gntdev: cannot map 2 pages of domain 0"), "{error}");
    assert!(gntdev.map(OURS, &[read_only], false).is_err());
    theirs.write(0, *b"to be read").unwrap();
    let mapped = gntdev.map(OURS, &[one, read_only], true).unwrap();
    assert_eq!(mapped.segments([(PAGE, 10)]).unwrap().to_vec(), b"to be read");
}

#[test]
fn a_revoked_page_is_no_longer_granted() {
    let Some(mut gntdev) = gntdev() else { return };
    let gntalloc = Gntalloc::open().unwrap();
    // More than the module allows at once.
    for _ in 0..100 {
        let offered = gntalloc.grant(OURS, 16, false).unwrap();
        let page = offered.pages[15];
        drop(gntdev.map(OURS, &offered.pages, false).unwrap());
        drop(offered);
        assert!(gntdev.map(OURS, &[page], false).is_err(), "{page:?} is still granted");
    }
    let offered = gntalloc.grant(OURS, 1, false).unwrap();
    let page = offered.pages[0];
    let mapped = gntdev.map(OURS, &[page], false).unwrap();
    drop(offered);
    assert_eq!(mapped.shared().load_u32(0), Some(0), "a mapped page must stay accessible");
    drop(mapped);
    // The kernel checks once a second whether a page has been unmapped.
    let gone = (0..50).any(|_| {
        std::thread::sleep(std::time::Duration::from_millis(100));
        gntdev.map(OURS, &[page], false).is_err()
    });
    assert!(gone, "{page:?} is still granted");
}

#[test]
fn a_signal_arrives_once_and_again_after_unmasking() {
    let (Some(mut ours), Some(mut theirs)) = (evtchn(), evtchn()) else { return };
    let remote = theirs.offer(OURS).unwrap();
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
