//! A disk served to a guest simulated by the test, on a machine without Xen: from attach to detach, and to a guest's
//! death.

use std::fs;
use std::io::Write as _;
use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use clap::Parser;
use disk::Disk;
use uring::Engine;
use vm::xen::give::announce;
use xen::DomId;
use xen::fake::{Access, Counts, FakeStore, Guest, Host, Page};

use super::*;
use crate::files::Files;
use crate::files::access;
use crate::image::chain::Layers;
use crate::image::engine_choice::choose;
use crate::process::signals::Signal;
use crate::serve::admission::Admission;
use crate::serve::admission::limits::Limiter;
use crate::serve::data;
use crate::serve::polling::Contention;
use crate::serve::polling::{Polling, Settings};
use crate::serve::stats::Counters;
use crate::serve::threads::{Processors, Threads};
use arguments::{Arguments, Command};
use control::PollingMode;
use vm::xen::both_ends::wait_connected;
use vm::xen::device::{State, write_all};
use vm::xen::fake::{WRITABLE, machine, say as say_state};
use vm::xen::take;

mod emulated;

const PATIENCE: Duration = Duration::from_secs(60);

fn arguments(image: &str) -> Serve {
    let command_line = ["tapline", "serve", image, "--xen", "7/xvdb", "--cache", "writeback"];
    let Command::Serve(serve) = Arguments::try_parse_from(command_line).unwrap().command else { panic!("no serve") };
    serve
}

/// A machine with a guest, the disk that the toolstack has created for it, and a directory for the files of its
/// process.
struct GuestBed {
    directory: tempfile::TempDir,
    host: Host,
    store: FakeStore,
    device: Device,
}

/// The disk's process, simulated by a thread, and its signals.
struct Process {
    thread: JoinHandle<Exit>,
    stop: UnixStream,
    leave: UnixStream,
}

impl GuestBed {
    fn new() -> GuestBed {
        let directory = tempfile::tempdir().unwrap();
        let sectors: Vec<u8> = (0..64u8).flat_map(|sector| [sector; 512]).collect();
        fs::write(directory.path().join("disk.raw"), sectors).unwrap();
        let (host, mut store, device) = machine();
        announce(&mut store, &device, WRITABLE).unwrap();
        GuestBed { directory, host, store, device }
    }

    /// Returns a machine whose disk is served and used by its guest.
    fn in_use() -> (GuestBed, Process, Front) {
        let mut machine = GuestBed::new();
        let process = machine.serve();
        let front = machine.connect();
        (machine, process, front)
    }

    fn serve(&self) -> Process {
        self.serve_with(false)
    }

    /// Also serves QEMU if `nbd`.
    fn serve_with(&self, nbd: bool) -> Process {
        let nbd = nbd.then(|| self.nbd());
        let ((stop, to_stop), (leave, to_leave)) = (Signal::in_test(), Signal::in_test());
        let (host, device, directory) = (self.host.clone(), self.device.clone(), self.directory.path().to_owned());
        let thread = std::thread::spawn(move || serve(&host, &device, &directory, nbd, stop, leave));
        Process { thread, stop: to_stop, leave: to_leave }
    }

    fn connect(&mut self) -> Front {
        let front = Front::connect(&self.host, &mut self.store, &self.device);
        wait_connected(&mut self.store, &self.device, PATIENCE, |_| {}).unwrap();
        front
    }

    fn states(&mut self) -> (Option<State>, Option<State>) {
        self.device.states(&mut self.store, None).unwrap()
    }

    /// Reports that the guest's end has closed.
    fn guest_closes(&mut self) {
        say_state(&mut self.store, &self.device.frontend(), "6");
    }

    fn of_backend(&mut self, key: &str) -> Option<String> {
        text(&mut self.store, None, &format!("{}/{key}", self.device.backend())).unwrap()
    }

    /// Returns our backends in xenstore.
    fn backends(&mut self) -> Vec<String> {
        self.store.list(None, "/local/domain/0/backend/tapline").unwrap().unwrap()
    }

    fn nbd(&self) -> PathBuf {
        self.directory.path().join("nbd.sock")
    }

    fn statistics(&self) -> PathBuf {
        self.directory.path().join("vbd3-7-51728")
    }
}

impl Process {
    fn signal(mut to: &UnixStream) {
        to.write_all(b"!").unwrap();
    }

    /// Returns its exit code.
    fn end(self) -> Exit {
        self.thread.join().unwrap()
    }
}

/// The main function of the process.
fn serve(host: &Host, device: &Device, directory: &Path, nbd: Option<PathBuf>, stop: Signal, leave: Signal) -> Exit {
    let serve = arguments(&format!("raw:{}", directory.join("disk.raw").display()));
    let Layers { files, images, .. } =
        Layers::open(&Files::of_system(), &serve.image, &serve.parents, access::options(serve.access, true)).unwrap();
    let kind = choose(access::engine(serve.access), &files, data(&serve)).kind;
    let disk = Disk::new(images, disk::Options::default()).unwrap();
    let engine = Engine::open(kind, files, 16).unwrap();
    let backend = backend(host, device, &serve, disk.geometry());
    let nbd = nbd.map(|path| {
        let export = nbd::Export {
            name: String::new(),
            description: String::new(),
            geometry: disk.geometry(),
            layered: false,
            bitmaps: Vec::new(),
        };
        nbd::Server::bind(nbd::Config { address: nbd::Address::Unix(path), export, tls: None }).unwrap()
    });
    let serving = Serving {
        files: Files::of_system(),
        disk,
        engine,
        polling: Polling::new(Settings::new(PollingMode::Off, Duration::ZERO), Contention::none()),
        threads: Threads::new(1, Processors::of_this_process()),
        stats_file: None,
        blkback_stats: Some(BlkbackStats::open(&Statistics::of(directory, device.guest, device.vdev)).unwrap()),
        stop,
        leave,
        report: Signal::to_report().unwrap(),
        control: None,
        admission: Admission::new(Limiter::new(control::limits::Limits::default(), 0), false),
        shaping: crate::serve::shaping::Shaping::default(),
        changes: crate::serve::changes::Changes::default(),
        counters: Counters::default(),
        page: None,
        identity: "{}".into(),
    };
    match nbd {
        None => EventLoop::new(backend, serving).and_then(EventLoop::run).unwrap(),
        Some(nbd) => EventLoop::new(Emulated::new(backend, nbd), serving).and_then(EventLoop::run).unwrap(),
    }
}

/// Makes the guest's end of a disk, not started.
fn backend(host: &Host, device: &Device, serve: &Serve, geometry: Geometry) -> Backend {
    let mut store = host.store(DomId(0)).unwrap();
    make_own_end(&mut store, device, WRITABLE).unwrap();
    write_keys(&Files::of_system(), &mut store, device, serve).unwrap();
    let config = config(serve, device, false, geometry);
    let watched = Box::new(host.store(DomId(0)).unwrap());
    let channels = Box::new(host.channels().unwrap());
    Backend::new(config, Box::new(store), watched, Box::new(host.grants()), channels).unwrap()
}

/// The keys that a server watches.
#[derive(Default)]
struct Watched(Vec<WatchKey>);

impl Watch for Watched {
    fn watch(&mut self, _: BorrowedFd<'_>, _: Interest, key: WatchKey) -> std::io::Result<()> {
        self.0.push(key);
        Ok(())
    }

    fn forget(&mut self, key: WatchKey) {
        self.0.retain(|watched| *watched != key);
    }
}

/// The guest's side: one ring of one page, as in io/ring.h and io/blkif.h on x86_64.
struct Front {
    guest: Guest,
    ring: Page,
    port: xen::Port,
}

impl Front {
    fn connect(host: &Host, store: &mut FakeStore, device: &Device) -> Front {
        let guest = host.guest(device.guest);
        let (ring, port) = (guest.page().unwrap(), guest.offer());
        let grant = guest.grant(ring, Access::ReadWrite);
        // SHARED_RING_INIT: both sides request an event for the first entry.
        guest.write(ring, 4, &1u32.to_le_bytes()).unwrap();
        guest.write(ring, 12, &1u32.to_le_bytes()).unwrap();
        let (grant, channel) = (grant.0.to_string(), port.0.to_string());
        let values = [("ring-ref", grant.as_str()), ("event-channel", &channel), ("protocol", "x86_64-abi")];
        write_all(store, None, &device.frontend(), &values).unwrap();
        say_state(store, &device.frontend(), "4");
        Front { guest, ring, port }
    }

    /// Reads a sector by the ring's first request; returns its data and status.
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

/// Polls for a change made by another thread without notification.
fn until(mut seen: impl FnMut() -> bool) {
    let limit = Instant::now() + PATIENCE;
    while !seen() {
        assert!(Instant::now() < limit, "timeout");
        std::thread::yield_now();
    }
}

#[test]
fn a_disk_can_be_attached_read_and_detached() {
    let (mut machine, process, front) = GuestBed::in_use();
    assert_eq!(front.read(5), (vec![5; 512], 0));
    // One read of one sector was requested and completed.
    let counted = || fs::read(machine.statistics().join("statistics")).unwrap_or_default();
    until(|| counted().get(24..48).is_some_and(|reads| reads.chunks(8).all(|count| count[0] == 1)));
    assert!(machine.of_backend("tapline/image").unwrap().ends_with("disk.raw"));
    // Toolstacks wait for this; a file is no device.
    assert_eq!(machine.of_backend("hotplug-status").as_deref(), Some("connected"));
    assert_eq!(machine.of_backend("physical-device"), None);
    // Current readers start with the process, and find the same.
    let pid = machine.of_backend("kthread-pid").unwrap();
    assert_eq!(pid, std::process::id().to_string());
    let td3 = machine.directory.path().join(format!("td3-{pid}"));
    let counted = || fs::read(td3.join("vbd-7-51728")).unwrap_or_default();
    until(|| counted().get(16..40).is_some_and(|reads| reads.chunks(8).all(|count| count[0] == 1)));
    for word in ["tapline/image", "kthread-pid"] {
        let word = format!("{}/{word}", machine.device.backend());
        assert_eq!(machine.host.permissions(&word).unwrap(), ["n0"]);
    }

    take::ask(&mut machine.store, &machine.device).unwrap();
    machine.guest_closes();
    take::wait_closed(&mut machine.store, &machine.device, PATIENCE, |_| {}).unwrap();
    assert_eq!(process.end(), Exit::Done);
    assert_eq!(machine.of_backend("kthread-pid"), None);
    take::remove(&mut machine.store, &machine.device).unwrap();
    assert_eq!(machine.states(), (None, None));
    assert_eq!(machine.host.counts(), Counts::default());
    assert!(!machine.statistics().exists());
    assert!(!td3.exists());
}

#[test]
fn a_forcibly_detached_disk_unmaps_the_guests_pages() {
    let (mut machine, process, _front) = GuestBed::in_use();
    take::ask(&mut machine.store, &machine.device).unwrap();
    take::remove(&mut machine.store, &machine.device).unwrap();
    assert_eq!(process.end(), Exit::Done);
    assert_eq!(machine.host.counts(), Counts::default());
}

#[test]
fn a_stopping_process_serves_its_guest_until_release() {
    let (mut machine, process, front) = GuestBed::in_use();
    Process::signal(&process.stop);
    until(|| machine.states().0 == Some(State::CLOSING));
    for number in 0..3 {
        assert_eq!(front.read_as(number, u64::from(number)), (vec![u8::try_from(number).unwrap(); 512], 0));
    }
    machine.guest_closes();
    assert_eq!(process.end(), Exit::Done);
    assert_eq!(machine.states(), (Some(State::CLOSED), Some(State::CLOSED)));
    assert_eq!(machine.host.counts(), Counts::default());
}

#[test]
fn a_stopping_process_waits_bounded_and_not_twice() {
    for twice in [false, true] {
        let (mut machine, process, front) = GuestBed::in_use();
        assert_eq!(front.read(5), (vec![5; 512], 0));
        Process::signal(&process.stop);
        if twice {
            until(|| machine.states().0 == Some(State::CLOSING));
            Process::signal(&process.stop);
        }
        assert_eq!(process.end(), Exit::Done);
        assert_eq!(machine.states(), (Some(State::CLOSING), Some(State::CONNECTED)));
        assert_eq!(machine.of_backend("kthread-pid"), None);
        assert_eq!(machine.host.counts(), Counts::default());
        // The next process of the disk has a guest that still uses it.
        let process = machine.serve();
        assert_eq!(front.read_as(1, 6), (vec![6; 512], 0));
        assert_eq!(machine.states().0, Some(State::CONNECTED));
        front.guest.die();
        assert_eq!(process.end(), Exit::Done);
    }
}

#[test]
fn a_stopping_process_of_an_unused_disk_exits_at_once() {
    let mut machine = GuestBed::new();
    let process = machine.serve();
    until(|| machine.states().0 == Some(State::INIT_WAIT));
    Process::signal(&process.stop);
    assert_eq!(process.end(), Exit::Done);
    assert_eq!(machine.states().0, Some(State::CLOSED));
}

#[test]
fn destroying_a_guest_stops_its_disk_and_removes_its_nodes() {
    let (mut machine, process, front) = GuestBed::in_use();
    front.guest.die();
    machine.store.remove(None, "/local/domain/7").unwrap();
    assert_eq!(process.end(), Exit::Done);
    assert_eq!(machine.backends(), [""; 0]);
    assert_eq!(machine.host.counts(), Counts::default());
}

#[test]
fn a_guest_that_shuts_down_and_disappears_later_stops_its_disk() {
    let (mut machine, process, front) = GuestBed::in_use();
    machine.guest_closes();
    take::wait_closed(&mut machine.store, &machine.device, PATIENCE, |_| {}).unwrap();
    front.guest.die();
    machine.store.remove(None, "/local/domain/7").unwrap();
    assert_eq!(process.end(), Exit::Done);
    assert_eq!(machine.backends(), [""; 0]);
    assert_eq!(machine.host.counts(), Counts::default());
}

/// Events of xenstore arrive in any order: here the driver's connection before the domain's creation.
#[test]
fn a_guest_that_connects_and_dies_early_stops_its_disk() {
    let mut machine = GuestBed::new();
    let serve = arguments("raw:none");
    let geometry =
        Geometry { len: 64 * 512, block: 512, physical_block: 512, discard: 512, chs: None, read_only: false };
    let mut backend = backend(&machine.host, &machine.device, &serve, geometry);
    let mut watched = Watched::default();
    backend.start(&mut watched).unwrap();
    let front = Front::connect(&machine.host, &mut machine.store, &machine.device);
    let others: Vec<WatchKey> = watched.0.iter().copied().filter(|key| *key != DOMAINS && *key != TIME_IS_UP).collect();
    others.into_iter().for_each(|key| backend.ready(key, &mut watched));
    assert_eq!(backend.peers(), 1);
    front.guest.die();
    backend.ready(DOMAINS, &mut watched);
    assert!(backend.is_over());
}

/// Kills a guest whose nodes stay; returns how long its disk's process takes to exit.
fn dies() -> Duration {
    let (mut machine, process, front) = GuestBed::in_use();
    machine.host.guest(DomId(9)).die();
    assert_eq!(front.read(5), (vec![5; 512], 0), "another domain's death has no effect");
    let begun = Instant::now();
    front.guest.die();
    assert_eq!(process.end(), Exit::Done);
    let took = begun.elapsed();
    assert!(machine.states().1.is_some(), "the toolstack's");
    assert_eq!(machine.backends(), [""; 0]);
    assert_eq!(machine.host.counts(), Counts::default());
    took
}

#[test]
fn a_dead_guest_is_released_whatever_happens_to_its_nodes() {
    // A busy machine may be too slow once, but not each time.
    assert!((0..20).any(|_| dies() < CLOSING_MAX), "the process waits for the dead guest");
}

#[test]
fn a_disk_created_before_its_guest_waits_for_it() {
    let mut machine = GuestBed::new();
    let process = machine.serve();
    until(|| machine.states().0 == Some(State::INIT_WAIT));
    machine.host.guest(DomId(9)).die();
    let front = machine.connect();
    assert_eq!(front.read(1), (vec![1; 512], 0));
    front.guest.die();
    assert_eq!(process.end(), Exit::Done);
}

#[test]
fn a_leaving_process_is_replaced_transparently() {
    let (mut machine, process, front) = GuestBed::in_use();
    assert_eq!(front.read(5), (vec![5; 512], 0));
    Process::signal(&process.leave);
    assert_eq!(process.end(), Exit::Done);
    let both = (Some(State::CONNECTED), Some(State::CONNECTED));
    assert_eq!(machine.states(), both);
    assert_eq!([machine.of_backend("tapline/pid"), machine.of_backend("kthread-pid")], [None, None]);
    assert_eq!(machine.host.counts(), Counts::default());

    let process = machine.serve();
    assert_eq!(front.read_as(1, 6), (vec![6; 512], 0));
    assert_eq!(machine.states(), both);
    take::ask(&mut machine.store, &machine.device).unwrap();
    take::remove(&mut machine.store, &machine.device).unwrap();
    assert_eq!(process.end(), Exit::Done);
}

#[test]
fn without_xenstore_a_guest_keeps_its_disk_and_upgrades_still_work() {
    for way in [|process: &Process| Process::signal(&process.stop), |process: &Process| Process::signal(&process.leave)]
    {
        let (mut machine, process, front) = GuestBed::in_use();
        machine.host.break_store_connections();
        assert_eq!(front.read(5), (vec![5; 512], 0));
        way(&process);
        assert_eq!(process.end(), Exit::Done);
        assert_eq!(machine.host.counts().mapped, 0);

        machine.store = machine.host.store(DomId(0)).unwrap();
        assert_eq!(machine.states(), (Some(State::CONNECTED), Some(State::CONNECTED)));
        let process = machine.serve();
        assert_eq!(front.read_as(1, 6), (vec![6; 512], 0));
        front.guest.die();
        assert_eq!(process.end(), Exit::Done);
    }
}

#[test]
fn a_device_removed_before_serving_is_not_recreated() {
    let mut machine = GuestBed::new();
    take::remove(&mut machine.store, &machine.device).unwrap();
    let failure =
        write_keys(&Files::of_system(), &mut machine.store, &machine.device, &arguments("raw:/a")).unwrap_err();
    assert!(failure.what().contains("it was removed in the meantime"), "{failure}");
    assert_eq!(machine.backends(), [""; 0]);
}

#[test]
fn a_toolstack_can_set_the_polling_time() {
    let mut machine = GuestBed::new();
    let requested = |machine: &mut GuestBed| requested_polling(&mut machine.store, &machine.device).unwrap();
    assert_eq!(requested(&mut machine), None);
    let node = machine.device.backend();
    for (values, expected) in [
        ([("polling-duration", "8000"), ("polling-idle-threshold", "50")], Some(8000)),
        ([("polling-duration", "8000"), ("polling-idle-threshold", "100")], Some(0)),
        ([("polling-duration", "0"), ("polling-idle-threshold", "50")], Some(0)),
        ([("polling-duration", "99999999"), ("polling-idle-threshold", "x")], Some(10_000)),
        ([("polling-duration", "-1"), ("polling-idle-threshold", "50")], None),
    ] {
        write_all(&mut machine.store, None, &node, &values).unwrap();
        assert_eq!(requested(&mut machine), expected.map(Duration::from_micros), "{values:?}");
    }
}

#[test]
fn a_device_may_have_been_served_by_an_earlier_process() {
    let mut machine = GuestBed::new();
    let device = machine.device.clone();
    write_all(&mut machine.store, None, &device.backend(), &[("physical-device", "8:1")]).unwrap();
    write_keys(&Files::of_system(), &mut machine.store, &device, &arguments("raw:/dev/null")).unwrap();
    assert_eq!(machine.of_backend("physical-device"), None, "no block device");
}
