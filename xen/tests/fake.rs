//! The fake machine: copies, mappings and events behave as on Xen, and are refused where Xen refuses them.

use std::os::fd::AsFd;

use memory::Segments;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use xen::fake::{self, Access, Counts, Guest, Host, Page, Subsystem};
use xen::kernel::{Evtchn, Gntdev};
use xen::xenstored::XenstoredClient;
use xen::{
    Copied, CopyBatch, Direction, DomId, EventChannels, GrantRef, Grants, PAGE, PageRange, Port, Store, StoreError,
};

/// Xen's status codes (xen.h, `GNTST_*`).
const BAD_DOMAIN: Copied = Copied::Refused(-2);
const BAD_REF: Copied = Copied::Refused(-3);
const PERMISSION_DENIED: Copied = Copied::Refused(-8);

fn guest(host: &Host) -> (Guest, Page, GrantRef) {
    let guest = host.guest(DomId(5));
    let page = guest.page().unwrap();
    let grant = guest.grant(page, Access::ReadWrite);
    (guest, page, grant)
}

fn range(page: GrantRef, from: u16, len: u16) -> PageRange {
    PageRange { page, from, len }
}

/// Copies as many bytes as the ranges have; returns the result.
fn copy(host: &Host, direction: Direction, memory: &Segments, ranges: &[PageRange]) -> Copied {
    let mut batch = CopyBatch::default();
    let entry = batch.push(direction, memory.clone(), ranges).unwrap();
    host.grants().copy(DomId(5), &mut batch).unwrap();
    batch.copied(entry)
}

fn is_readable(channels: &impl EventChannels) -> bool {
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut [PollFd::from_borrowed_fd(channels.fd().as_fd(), PollFlags::IN)], Some(&now)).unwrap() > 0
}

fn taken(channels: &mut impl EventChannels) -> (Vec<Port>, bool) {
    let mut ports = Vec::new();
    let more = channels.take(&mut ports).unwrap();
    (ports, more)
}

/// Each side can run in its own thread. Checked by the compiler.
const fn is_send<T: Send>() {}
const _: () = {
    is_send::<(Host, fake::GrantTable, fake::Channels, fake::FakeStore)>();
    is_send::<(Gntdev, Evtchn, XenstoredClient, CopyBatch)>();
};

#[test]
fn bytes_are_copied_both_ways_and_across_pages() {
    let host = Host::new().unwrap();
    let (guest, first, one) = guest(&host);
    let second = guest.page().unwrap();
    let two = guest.grant(second, Access::ReadOnly);
    guest.write(first, PAGE - 3, b"abc").unwrap();
    guest.write(second, 0, b"defg").unwrap();
    let memory = Segments::zeroed(7);
    let ranges = [range(one, 4093, 3), range(two, 0, 4)];
    assert_eq!(copy(&host, Direction::FromGuest, &memory, &ranges), Copied::All);
    assert_eq!(memory.to_vec(), b"abcdefg");

    assert_eq!(copy(&host, Direction::ToGuest, &memory.slice(2, 4), &[range(one, 512, 4)]), Copied::All);
    assert_eq!(guest.read(first, 511, 6).unwrap(), b"\0cdef\0");
}

#[test]
fn a_refused_range_fails_its_entry_and_no_other() {
    let host = Host::new().unwrap();
    let (guest, page, good) = guest(&host);
    let bad = GrantRef(4711);
    guest.write(page, 0, b"data").unwrap();
    let mut batch = CopyBatch::default();
    let memory = [Segments::zeroed(4), Segments::zeroed(4)];
    let partial = batch.push(Direction::FromGuest, memory[0].clone(), &[range(good, 0, 2), range(bad, 0, 2)]).unwrap();
    let whole = batch.push(Direction::FromGuest, memory[1].clone(), &[range(good, 0, 4)]).unwrap();
    host.grants().copy(DomId(5), &mut batch).unwrap();
    assert_eq!((batch.copied(partial), batch.copied(whole)), (BAD_REF, Copied::All));
    assert_eq!(memory[1].to_vec(), b"data");
}

#[test]
fn a_copy_is_refused_with_xens_status_codes() {
    let host = Host::new().unwrap();
    let (guest, page, revoked) = guest(&host);
    let read_only = guest.grant(page, Access::ReadOnly);
    let memory = Segments::copy_of(b"x");
    assert_eq!(copy(&host, Direction::ToGuest, &memory, &[range(read_only, 0, 1)]), PERMISSION_DENIED);
    assert_eq!(copy(&host, Direction::FromGuest, &memory, &[range(read_only, 0, 1)]), Copied::All);
    assert!(guest.revoke(revoked));
    assert_eq!(copy(&host, Direction::FromGuest, &memory, &[range(revoked, 0, 1)]), BAD_REF);
    guest.die();
    assert_eq!(copy(&host, Direction::FromGuest, &memory, &[range(read_only, 0, 1)]), BAD_DOMAIN);
}

#[test]
fn a_copy_past_the_end_of_a_page_is_not_accepted() {
    let mut batch = CopyBatch::default();
    let memory = Segments::zeroed(512);
    assert_eq!(batch.push(Direction::FromGuest, memory.clone(), &[range(GrantRef(8), 3585, 512)]), None);
    assert_eq!(batch.push(Direction::FromGuest, memory.clone(), &[range(GrantRef(8), u16::MAX, 512)]), None);
    assert_eq!(batch.push(Direction::FromGuest, memory, &[range(GrantRef(8), 0, 511)]), None);
    assert!(batch.is_empty());
}

#[test]
fn a_failed_call_reports_every_entry_as_refused() {
    let host = Host::new().unwrap();
    let (_guest, _, grant) = guest(&host);
    let mut batch = CopyBatch::default();
    let entry = batch.push(Direction::FromGuest, Segments::zeroed(1), &[range(grant, 0, 1)]).unwrap();
    let mut grants = host.grants();
    grants.copy(DomId(5), &mut batch).unwrap();
    host.fail(Subsystem::Grants, 2);
    grants.copy(DomId(5), &mut batch).unwrap();
    assert!(grants.copy(DomId(5), &mut batch).is_err());
    assert_ne!(batch.copied(entry), Copied::All);
    grants.copy(DomId(5), &mut batch).unwrap();
    assert_eq!((batch.copied(entry), host.calls(Subsystem::Grants)), (Copied::All, 4));
}

#[test]
fn a_mapping_shares_the_guests_pages_in_the_given_order() {
    let host = Host::new().unwrap();
    let guest = host.guest(DomId(5));
    let pages = guest.pages(2).unwrap();
    let grants = [guest.grant(pages[1], Access::ReadWrite), guest.grant(pages[0], Access::ReadWrite)];
    let mapped = host.grants().map(DomId(5), &grants, false).unwrap();
    let ring = mapped.shared();
    guest.write(pages[1], 8, b"from the guest").unwrap();
    guest.shared(&pages).unwrap().store_u32(0, 0x1234_5678).unwrap();
    assert_eq!(ring.read::<14>(8), Some(*b"from the guest"));
    assert_eq!(ring.load_u32(PAGE), Some(0x1234_5678));
    ring.write(PAGE + 4, *b"to the guest").unwrap();
    assert_eq!(guest.read(pages[0], 4, 12).unwrap(), b"to the guest");
}

#[test]
fn pages_are_unmapped_after_the_last_user_and_counted_until_then() {
    let host = Host::new().unwrap();
    let (guest, page, grant) = guest(&host);
    guest.write(page, 0, b"data").unwrap();
    let mapped = host.grants().map(DomId(5), &[grant, grant], true).unwrap();
    let data = mapped.segments([(0, 2), (PAGE + 2, 2)]).unwrap();
    assert!(mapped.segments([(2 * PAGE - 1, 2)]).is_none());
    drop(mapped);
    assert_eq!(host.counts().mapped, 2);
    assert!(!guest.revoke(grant));
    assert_eq!(data.to_vec(), b"data");
    drop(data);
    assert_eq!(host.counts(), Counts::default());
    assert!(guest.revoke(grant));
}

#[test]
fn either_all_pages_are_mapped_or_none() {
    let host = Host::new().unwrap();
    let (guest, page, good) = guest(&host);
    let read_only = guest.grant(page, Access::ReadOnly);
    let mut grants = host.grants();
    assert!(grants.map(DomId(5), &[good, GrantRef(4711)], false).is_err());
    assert!(grants.map(DomId(5), &[good, read_only], false).is_err());
    assert!(grants.map(DomId(6), &[good], false).is_err());
    assert!(grants.map(DomId(5), &[], false).is_err());
    assert_eq!(host.counts().mapped, 0);
    assert!(grants.map(DomId(5), &[good, read_only], true).is_ok());
}

#[test]
fn a_bound_port_is_reported_once_then_when_signalled_and_unmasked() {
    let host = Host::new().unwrap();
    let guest = host.guest(DomId(5));
    let remote = guest.offer();
    let mut channels = host.channels().unwrap();
    let port = channels.bind(DomId(5), remote).unwrap();
    assert!(is_readable(&channels));
    assert_eq!(taken(&mut channels), (vec![port], false));
    assert!(!is_readable(&channels));

    guest.signal(remote).unwrap();
    guest.signal(remote).unwrap();
    assert!(!is_readable(&channels));
    assert_eq!(taken(&mut channels), (vec![], false));
    channels.unmask(port).unwrap();
    assert!(is_readable(&channels));
    assert_eq!(taken(&mut channels), (vec![port], false));
    channels.unmask(port).unwrap();
    assert_eq!(taken(&mut channels), (vec![], false));
}

#[test]
fn one_call_takes_a_bounded_number_of_ports() {
    let host = Host::new().unwrap();
    let guest = host.guest(DomId(5));
    let mut channels = host.channels().unwrap();
    let bound: Vec<Port> = (0..10).map(|_| channels.bind(DomId(5), guest.offer()).unwrap()).collect();
    let (mut all, more) = taken(&mut channels);
    assert!(more && all.len() < 10);
    while channels.take(&mut all).unwrap() {}
    assert_eq!(all, bound);
}

#[test]
fn the_guest_sees_a_notification() {
    let host = Host::new().unwrap();
    let guest = host.guest(DomId(5));
    let remote = guest.offer();
    let mut channels = host.channels().unwrap();
    let port = channels.bind(DomId(5), remote).unwrap();
    assert!(!guest.signalled(remote));
    channels.notify(port).unwrap();
    assert!(guest.signalled(remote));
    assert!(!guest.signalled(remote));
    guest.close(remote);
    channels.notify(port).unwrap();
}

#[test]
fn a_port_can_be_bound_once_and_only_to_the_domain_that_offers_it() {
    let host = Host::new().unwrap();
    let (guest, stranger) = (host.guest(DomId(5)), host.guest(DomId(6)));
    let remote = guest.offer();
    let mut channels = host.channels().unwrap();
    assert!(channels.bind(stranger.domain(), remote).is_err());
    assert!(channels.bind(DomId(5), Port(4711)).is_err());
    let port = channels.bind(DomId(5), remote).unwrap();
    assert!(channels.bind(DomId(5), remote).is_err());
    assert_eq!(host.counts().bound, 1);
    channels.unbind(port).unwrap();
    assert!(channels.unbind(port).is_err());
    assert!(channels.notify(port).is_err());
    assert_eq!(taken(&mut channels), (vec![], false));
    channels.bind(DomId(5), remote).unwrap();
    drop(channels);
    assert_eq!(host.counts(), Counts::default());
}

#[test]
fn watches_and_transactions_are_counted_and_end_with_their_client() {
    let host = Host::new().unwrap();
    let mut store = host.store(DomId(0)).unwrap();
    store.watch("/a", "token").unwrap();
    store.begin().unwrap();
    assert_eq!((host.counts().watched, host.counts().transactions), (1, 1));
    drop(store);
    assert_eq!(host.counts(), Counts::default());
}

#[test]
fn permissions_are_kept_and_inherited() {
    let host = Host::new().unwrap();
    let mut store = host.store(DomId(0)).unwrap();
    store.write(None, "/a", b"").unwrap();
    store.set_permissions(None, "/a", &["n0", "r5"]).unwrap();
    store.write(None, "/a/b/c", b"").unwrap();
    assert_eq!(host.permissions("/a/b/c").unwrap(), ["n0", "r5"]);
}

#[test]
fn created_and_destroyed_domains_fire_watches() {
    let host = Host::new().unwrap();
    let mut store = host.store(DomId(0)).unwrap();
    store.watch("@releaseDomain", "gone").unwrap();
    assert!(store.take_event().unwrap().is_some());
    let guest = host.guest(DomId(5));
    assert_eq!(store.take_event().unwrap(), None);
    assert!(store.is_introduced(DomId(5)).unwrap());
    guest.die();
    assert_eq!(store.take_event().unwrap().unwrap().path, "@releaseDomain");
    assert!(!store.is_introduced(DomId(5)).unwrap());
}

#[test]
fn only_the_selected_call_fails() {
    let host = Host::new().unwrap();
    let guest = host.guest(DomId(5));
    let mut store = host.store(DomId(0)).unwrap();
    host.fail(Subsystem::Store, 1);
    assert!(matches!(store.write(None, "/a", b""), Err(StoreError::Refused { code, .. }) if code == "EIO"));
    store.write(None, "/a", b"").unwrap();

    let mut channels = host.channels().unwrap();
    host.fail(Subsystem::Channels, 1);
    assert!(channels.bind(DomId(5), guest.offer()).is_err());
    assert_eq!(host.counts().bound, 0);
}

/// Scope: the calls of a backend's startup, with each call of each subsystem failing in turn.
#[test]
fn nothing_is_leaked_wherever_a_call_fails() {
    for part in [Subsystem::Grants, Subsystem::Channels, Subsystem::Store] {
        for nth in 1..=6 {
            let host = Host::new().unwrap();
            let (guest, _, grant) = guest(&host);
            let remote = guest.offer();
            host.fail(part, nth);
            let came_up = come_up(&host, grant, remote);
            let failed = host.calls(part) >= nth;
            assert_eq!(came_up.is_err(), failed, "{part:?} {nth}");
            drop(came_up);
            assert_eq!(host.counts(), Counts::default(), "{part:?} {nth}");
        }
    }
}

type Up = (std::sync::Arc<xen::Granted>, fake::Channels, fake::FakeStore);

fn come_up(host: &Host, grant: GrantRef, remote: Port) -> Result<Up, Box<dyn std::error::Error>> {
    let (mut store, mut channels) = (host.store(DomId(0))?, host.channels()?);
    store.watch("/front", "front")?;
    let transaction = store.begin()?;
    store.write(Some(transaction), "/back/state", b"4")?;
    store.end(transaction, true)?;
    let ring = host.grants().map(DomId(5), &[grant], false)?;
    let port = channels.bind(DomId(5), remote)?;
    channels.notify(port)?;
    Ok((ring, channels, store))
}
