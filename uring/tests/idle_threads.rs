//! An idle engine has no threads except its lanes, which sleep, and causes no wake-ups; it does not start kernel
//! workers either. The only test of its program, as threads are counted for the whole process.

mod fixture;

use std::os::fd::AsFd;
use std::path::Path;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use disk::{Action, FileOffset, Io, Until};
use fixture::{ENGINES, Fixture, STORAGES};
use memory::Segments;
use rustix::event::{EventfdFlags, eventfd};
use rustix::thread::gettid;

/// Name prefixes of threads: those of the engine's workers, and those of the kernel's for io_uring.
const OURS: [&str; 4] = ["reads", "writes", "syncs", "deallocations"];
const KERNELS: &str = "iou-";

/// Longer than an idle thread of ours waits for work, on the slowest machine.
const TIMEOUT: Duration = Duration::from_secs(60);

fn tasks() -> Vec<std::path::PathBuf> {
    std::fs::read_dir("/proc/self/task").unwrap().map(|entry| entry.unwrap().path()).collect()
}

/// The names of all threads. One may end while it is being read.
fn names() -> Vec<String> {
    tasks().iter().filter_map(|task| std::fs::read_to_string(task.join("comm")).ok()).collect()
}

fn field(task: &Path, name: &str) -> Option<String> {
    let status = std::fs::read_to_string(task.join("status")).ok()?;
    status.lines().find_map(|line| line.strip_prefix(name)).map(|value| value.trim().to_owned())
}

/// The number of times that threads other than this one have gone to sleep.
fn sleeps() -> u64 {
    let me = Path::new("/proc/self/task").join(gettid().as_raw_nonzero().to_string());
    let others = tasks().into_iter().filter(|task| *task != me);
    others.filter_map(|task| field(&task, "voluntary_ctxt_switches:")).map(|count| count.parse::<u64>().unwrap()).sum()
}

/// Operations that need threads: allocating writes, syncs, deallocations; and reads.
fn work() -> Vec<Action> {
    let memory = Segments::zeroed(64 << 10);
    let len = 64 << 10;
    let writes = (0..64).map(|block| Action::Write { at: FileOffset(block * len), from: memory.clone() });
    let others = (0..8).flat_map(|block| [Action::SyncData, Action::Deallocate { at: FileOffset(block * len), len }]);
    writes.chain(others).chain(reads()).collect()
}

fn reads() -> Vec<Action> {
    let len = 64 << 10;
    (0..64).map(|block| Action::Read { at: FileOffset(block * len), into: Segments::zeroed(64 << 10) }).collect()
}

/// Evicts a file from the page cache, so that reads have to wait for storage.
fn evict(path: &Path) {
    let file = std::fs::File::open(path).unwrap();
    file.sync_all().unwrap();
    rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
    rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::Random).unwrap();
}

#[test]
#[ignore = "slow: run by `make test-all`"]
fn an_idle_engine_leaves_no_thread_and_causes_no_wakeups() {
    let (ready, is_ready) = channel();
    let stop = eventfd(0, EventfdFlags::NONBLOCK).unwrap();
    let watched = stop.try_clone().unwrap();
    // Each engine has its own thread, asleep in its own wait.
    let mut threads = Vec::new();
    for storage in STORAGES {
        for engine in ENGINES {
            let (ready, watched) = (ready.clone(), watched.try_clone().unwrap());
            threads.push(std::thread::spawn(move || {
                let mut fixture = Fixture::on(storage, engine, &[], 32).with_lanes(1);
                fixture.engine.watch(watched.as_fd(), false, 1).unwrap();
                assert!(fixture.run(work()).iter().all(Result::is_ok));
                evict(&fixture.path);
                assert!(fixture.run(reads()).iter().all(Result::is_ok));
                ready.send(()).unwrap();
                let mut keys = Vec::new();
                while keys.is_empty() {
                    fixture.engine.reap(Until::Any, &mut Vec::new()).unwrap();
                    fixture.engine.take_ready(&mut keys);
                }
            }));
        }
    }
    threads.iter().for_each(|_| is_ready.recv().unwrap());
    assert!(
        !names().iter().any(|name| name.starts_with(KERNELS)),
        "the kernel has started io_uring workers: {:?}",
        names()
    );

    let since = Instant::now();
    while names().iter().any(|name| OURS.iter().any(|our| name.starts_with(our))) {
        assert!(since.elapsed() < TIMEOUT, "idle threads do not end: {:?}", names());
        std::thread::sleep(Duration::from_millis(100));
    }
    let before = sleeps();
    // The kernel's workers wake every five seconds.
    std::thread::sleep(Duration::from_secs(6));
    assert_eq!(sleeps() - before, 0, "a thread was woken: {:?}", names());

    rustix::io::write(&stop, &1u64.to_ne_bytes()).unwrap();
    threads.into_iter().for_each(|thread| thread.join().unwrap());
}
