//! A disk served to a guest that a test plays, on a machine without Xen: from attach to detach, and to a guest's death.

use std::fs;
use std::path::Path;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use clap::Parser;
use disk::Disk;
use uring::Engine;
use xen::DomId;
use xen::fake::{Access, Counts, Guest, Host, Page, Tree};

use super::*;
use crate::cli::{Arguments, Command};
use crate::engine_choice::{Data, choose};
use crate::layers::Layers;
use crate::signals::Signal;
use crate::toolstack::attach::test::{WRITABLE, machine, say as say_state};
use crate::toolstack::attach::{announce, wait_connected};
use crate::toolstack::detach;
use crate::toolstack::device::State;

const PATIENCE: Duration = Duration::from_secs(60);

fn words(image: &str) -> Serve {
    let words = ["tapline", "serve", image, "--xen", "7/xvdb", "--cache", "writeback"];
    let Command::Serve(serve) = Arguments::try_parse_from(words).unwrap().command else { panic!("no serve") };
    serve
}

/// The disk process, in a thread.
fn served(host: &Host, device: &Device, directory: &Path) -> JoinHandle<Exit> {
    served_until(host, device, directory, Signal::in_test().0)
}

/// Likewise, until it is to leave the disk to another.
fn served_until(host: &Host, device: &Device, directory: &Path, leave: Signal) -> JoinHandle<Exit> {
    let image = directory.join("disk.raw");
    let sectors: Vec<u8> = (0..64u8).flat_map(|sector| [sector; 512]).collect();
    fs::write(&image, sectors).unwrap();
    let (host, device, directory) = (host.clone(), device.clone(), directory.to_owned());
    std::thread::spawn(move || {
        let image = format!("raw:{}", image.display());
        let serve = words(&image);
        let Layers { files, images, .. } =
            Layers::open(&serve.image, &serve.parents, serve.access.options(true)).unwrap();
        let kind = choose(serve.access.engine(), &files, Data::Granted).kind;
        let disk = Disk::new(images, disk::Options::default()).unwrap();
        let engine = Engine::open(kind, files, 16).unwrap();
        let mut store = host.store(DomId(0)).unwrap();
        make_own_end(&mut store, &device, WRITABLE).unwrap();
        leave_word(&mut store, &device, &serve).unwrap();
        let config = config(&serve, &device, false, disk.geometry());
        let watched = Box::new(host.store(DomId(0)).unwrap());
        let channels = Box::new(host.channels().unwrap());
        let backend = Backend::new(config, Box::new(store), watched, Box::new(host.grants()), channels).unwrap();
        let serving = Serving {
            disk,
            engine,
            poll_max: Duration::ZERO,
            stats_file: None,
            blkback_stats: Some(BlkbackStats::open(&directory, 7, 51728).unwrap()),
            stop: Signal::to_stop().unwrap(),
            leave,
            report: Signal::to_report().unwrap(),
            control: None,
        };
        EventLoop::new(backend, serving).and_then(EventLoop::run).unwrap()
    })
}

/// The guest's side: one ring of one page, as io/ring.h and io/blkif.h have it on x86_64.
struct Front {
    guest: Guest,
    ring: Page,
    port: xen::Port,
}

impl Front {
    fn connect(host: &Host, store: &mut Tree, device: &Device) -> Front {
        let guest = host.guest(device.guest);
        let (ring, port) = (guest.page().unwrap(), guest.offer());
        let grant = guest.grant(ring, Access::ReadWrite);
        // SHARED_RING_INIT: both sides want to hear of the first entry.
        guest.write(ring, 4, &1u32.to_le_bytes()).unwrap();
        guest.write(ring, 12, &1u32.to_le_bytes()).unwrap();
        let (grant, channel) = (grant.0.to_string(), port.0.to_string());
        let values = [("ring-ref", grant.as_str()), ("event-channel", &channel), ("protocol", "x86_64-abi")];
        write_all(store, None, &device.frontend(), &values).unwrap();
        say_state(store, &device.frontend(), "4");
        Front { guest, ring, port }
    }

    /// Reads a sector; what came, and its status. It is the ring's first request.
    fn read(&self, sector: u64) -> (Vec<u8>, i16) {
        self.read_as(0, sector)
    }

    /// Reads a sector by the ring's request of that number.
    fn read_as(&self, number: u32, sector: u64) -> (Vec<u8>, i16) {
        let at = 64 + 112 * usize::try_from(number).unwrap();
        let data = self.guest.page().unwrap();
        let mut entry = [0; 112];
        entry[1] = 1;
        entry[8..16].copy_from_slice(&7u64.to_le_bytes());
        entry[16..24].copy_from_slice(&sector.to_le_bytes());
        entry[24..28].copy_from_slice(&self.guest.grant(data, Access::ReadWrite).0.to_le_bytes());
        self.guest.write(self.ring, at, &entry).unwrap();
        self.guest.write(self.ring, 0, &(number + 1).to_le_bytes()).unwrap();
        self.guest.signal(self.port).unwrap();
        until(|| self.guest.read(self.ring, 8, 4).unwrap() == (number + 1).to_le_bytes());
        let status = self.guest.read(self.ring, at + 10, 2).unwrap();
        (self.guest.read(data, 0, 512).unwrap(), i16::from_le_bytes(status.try_into().unwrap()))
    }
}

/// What another thread brings about, and nothing tells.
fn until(mut seen: impl FnMut() -> bool) {
    let limit = Instant::now() + PATIENCE;
    while !seen() {
        assert!(Instant::now() < limit, "it does not come about");
        std::thread::yield_now();
    }
}

fn counted(directory: &Path) -> Vec<u8> {
    fs::read(directory.join("vbd3-7-51728/statistics")).unwrap_or_default()
}

#[test]
fn a_disk_is_attached_read_and_detached_and_nothing_is_left() {
    let directory = tempfile::tempdir().unwrap();
    let (host, mut store, device) = machine();
    announce(&mut store, &device, WRITABLE).unwrap();
    let process = served(&host, &device, directory.path());
    let front = Front::connect(&host, &mut store, &device);
    wait_connected(&mut store, &device, PATIENCE, |_| {}).unwrap();
    assert_eq!(front.read(5), (vec![5; 512], 0));
    // One read was asked for and answered, of one sector.
    until(|| counted(directory.path()).get(24..48).is_some_and(|reads| reads.chunks(8).all(|count| count[0] == 1)));
    let image = text(&mut store, None, &format!("{}/tapline/image", device.backend())).unwrap().unwrap();
    assert!(image.ends_with("disk.raw"));
    assert_eq!(host.permissions(&format!("{}/tapline/image", device.backend())).unwrap(), ["n0"]);

    detach::ask(&mut store, &device).unwrap();
    say_state(&mut store, &device.frontend(), "6");
    detach::wait_closed(&mut store, &device, PATIENCE, |_| {}).unwrap();
    assert_eq!(process.join().unwrap(), Exit::Done);
    detach::remove(&mut store, &device).unwrap();
    assert_eq!(device.states(&mut store, None).unwrap(), (None, None));
    assert_eq!(host.counts(), Counts::default());
    assert!(!directory.path().join("vbd3-7-51728").exists());
}

#[test]
fn a_disk_pulled_without_consent_lets_go_of_the_guest() {
    let directory = tempfile::tempdir().unwrap();
    let (host, mut store, device) = machine();
    announce(&mut store, &device, WRITABLE).unwrap();
    let process = served(&host, &device, directory.path());
    let _front = Front::connect(&host, &mut store, &device);
    wait_connected(&mut store, &device, PATIENCE, |_| {}).unwrap();
    detach::ask(&mut store, &device).unwrap();
    detach::remove(&mut store, &device).unwrap();
    assert_eq!(process.join().unwrap(), Exit::Done);
    assert_eq!(host.counts(), Counts::default());
}

#[test]
fn a_guest_that_is_destroyed_ends_its_disk_and_leaves_no_node() {
    let directory = tempfile::tempdir().unwrap();
    let (host, mut store, device) = machine();
    announce(&mut store, &device, WRITABLE).unwrap();
    let process = served(&host, &device, directory.path());
    let front = Front::connect(&host, &mut store, &device);
    wait_connected(&mut store, &device, PATIENCE, |_| {}).unwrap();
    front.guest.die();
    store.remove(None, "/local/domain/7").unwrap();
    assert_eq!(process.join().unwrap(), Exit::Done);
    assert_eq!(store.list(None, "/local/domain/0/backend/tapline").unwrap(), Some(Vec::new()));
    assert_eq!(host.counts(), Counts::default());
}

#[test]
fn a_guest_that_shuts_down_and_is_gone_later_ends_its_disk() {
    let directory = tempfile::tempdir().unwrap();
    let (host, mut store, device) = machine();
    announce(&mut store, &device, WRITABLE).unwrap();
    let process = served(&host, &device, directory.path());
    let front = Front::connect(&host, &mut store, &device);
    wait_connected(&mut store, &device, PATIENCE, |_| {}).unwrap();
    say_state(&mut store, &device.frontend(), "6");
    detach::wait_closed(&mut store, &device, PATIENCE, |_| {}).unwrap();
    front.guest.die();
    store.remove(None, "/local/domain/7").unwrap();
    assert_eq!(process.join().unwrap(), Exit::Done);
    assert_eq!(store.list(None, "/local/domain/0/backend/tapline").unwrap(), Some(Vec::new()));
    assert_eq!(host.counts(), Counts::default());
}

#[test]
fn a_guest_that_dies_is_let_go_whatever_becomes_of_its_nodes() {
    let directory = tempfile::tempdir().unwrap();
    let (host, mut store, device) = machine();
    announce(&mut store, &device, WRITABLE).unwrap();
    let process = served(&host, &device, directory.path());
    let front = Front::connect(&host, &mut store, &device);
    wait_connected(&mut store, &device, PATIENCE, |_| {}).unwrap();
    host.guest(DomId(9)).die();
    assert_eq!(front.read(5), (vec![5; 512], 0), "another domain's end is none of its own");
    let begun = Instant::now();
    front.guest.die();
    assert_eq!(process.join().unwrap(), Exit::Done);
    assert!(begun.elapsed() < Duration::from_secs(1), "nobody is waited for");
    assert!(store.read(None, &device.frontend()).unwrap().is_some(), "the toolstack's");
    assert_eq!(store.list(None, "/local/domain/0/backend/tapline").unwrap(), Some(Vec::new()));
    assert_eq!(host.counts(), Counts::default());
}

#[test]
fn a_disk_that_is_made_before_its_guest_waits_for_it() {
    let directory = tempfile::tempdir().unwrap();
    let (host, mut store, device) = machine();
    announce(&mut store, &device, WRITABLE).unwrap();
    let process = served(&host, &device, directory.path());
    let state = format!("{}/state", device.backend());
    until(|| text(&mut store, None, &state).unwrap().as_deref() == Some("2"));
    host.guest(DomId(9)).die();
    let front = Front::connect(&host, &mut store, &device);
    wait_connected(&mut store, &device, PATIENCE, |_| {}).unwrap();
    assert_eq!(front.read(1), (vec![1; 512], 0));
    front.guest.die();
    assert_eq!(process.join().unwrap(), Exit::Done);
}

#[test]
fn a_process_that_leaves_is_followed_by_another_and_the_guest_notices_nothing() {
    use std::io::Write as _;

    let directory = tempfile::tempdir().unwrap();
    let (host, mut store, device) = machine();
    announce(&mut store, &device, WRITABLE).unwrap();
    let (leave, mut wish) = Signal::in_test();
    let process = served_until(&host, &device, directory.path(), leave);
    let front = Front::connect(&host, &mut store, &device);
    wait_connected(&mut store, &device, PATIENCE, |_| {}).unwrap();
    assert_eq!(front.read(5), (vec![5; 512], 0));
    wish.write_all(b"!").unwrap();
    assert_eq!(process.join().unwrap(), Exit::Done);
    let both = (Some(State::CONNECTED), Some(State::CONNECTED));
    assert_eq!(device.states(&mut store, None).unwrap(), both);
    assert_eq!(text(&mut store, None, &format!("{}/tapline/pid", device.backend())).unwrap(), None);
    assert_eq!(host.counts(), Counts::default());

    let process = served(&host, &device, directory.path());
    assert_eq!(front.read_as(1, 6), (vec![6; 512], 0));
    assert_eq!(device.states(&mut store, None).unwrap(), both);
    detach::ask(&mut store, &device).unwrap();
    detach::remove(&mut store, &device).unwrap();
    assert_eq!(process.join().unwrap(), Exit::Done);
}

#[test]
fn a_device_that_is_removed_before_it_is_served_is_not_made_again() {
    let (_host, mut store, device) = machine();
    announce(&mut store, &device, WRITABLE).unwrap();
    detach::remove(&mut store, &device).unwrap();
    let failure = leave_word(&mut store, &device, &words("raw:/a")).unwrap_err();
    assert!(failure.what().contains("somebody has removed it meanwhile"), "{failure}");
    assert_eq!(store.list(None, "/local/domain/0/backend/tapline").unwrap(), Some(Vec::new()));
}
