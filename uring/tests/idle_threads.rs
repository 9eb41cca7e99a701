//! An engine that has worked and is idle leaves no thread in the process and wakes nobody, the kernel's workers included.
//! Alone in its program: the threads are the process's.

mod bed;

use std::os::fd::AsFd;
use std::path::Path;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use bed::{Bed, ENGINES, STORAGES};
use disk::{Action, Io, Until};
use memory::Segments;
use rustix::event::{EventfdFlags, eventfd};
use rustix::thread::gettid;

/// Threads of an engine, by the beginnings of their names: ours, and the kernel's for io_uring.
const OURS: [&str; 4] = ["reads", "writes", "syncs", "deallocations"];
const KERNELS: &str = "iou-";

/// Longer than a thread of ours waits for work, on the slowest machine.
const PATIENCE: Duration = Duration::from_secs(60);

fn tasks() -> Vec<std::path::PathBuf> {
    std::fs::read_dir("/proc/self/task").unwrap().map(|entry| entry.unwrap().path()).collect()
}

/// The names of all threads. One may end while it is looked at.
fn names() -> Vec<String> {
    tasks().iter().filter_map(|task| std::fs::read_to_string(task.join("comm")).ok()).collect()
}

fn field(task: &Path, name: &str) -> Option<String> {
    let status = std::fs::read_to_string(task.join("status")).ok()?;
    status.lines().find_map(|line| line.strip_prefix(name)).map(|value| value.trim().to_owned())
}

/// How often threads other than this one have gone to sleep.
fn sleeps() -> u64 {
    let me = Path::new("/proc/self/task").join(gettid().as_raw_nonzero().to_string());
    let others = tasks().into_iter().filter(|task| *task != me);
    others.filter_map(|task| field(&task, "voluntary_ctxt_switches:")).map(|count| count.parse::<u64>().unwrap()).sum()
}

/// All that engines do by threads: allocating writes, syncs, deallocations; and reads.
fn work() -> Vec<Action> {
    let memory = Segments::zeroed(64 << 10);
    let len = 64 << 10;
    let writes = (0..64).map(|block| Action::Write { at: block * len, from: memory.clone() });
    let reads = (0..64).map(|block| Action::Read { at: block * len, into: memory.clone() });
    let others = (0..8).flat_map(|block| [Action::SyncData, Action::Deallocate { at: block * len, len }]);
    writes.chain(others).chain(reads).collect()
}

#[test]
#[ignore = "slow: run by `make test-all`"]
fn an_engine_that_was_used_leaves_no_thread_and_wakes_nobody() {
    let (ready, is_ready) = channel();
    let stop = eventfd(0, EventfdFlags::NONBLOCK).unwrap();
    let watched = stop.try_clone().unwrap();
    // The engines of one thread each, asleep: each in its own wait.
    let mut threads = Vec::new();
    for storage in STORAGES {
        for engine in ENGINES {
            let (ready, watched) = (ready.clone(), watched.try_clone().unwrap());
            threads.push(std::thread::spawn(move || {
                let mut bed = Bed::on(storage, engine, &[], 32);
                bed.engine.watch(watched.as_fd(), false, 1).unwrap();
                assert!(bed.run(work()).iter().all(Result::is_ok));
                ready.send(()).unwrap();
                let mut keys = Vec::new();
                while keys.is_empty() {
                    bed.engine.reap(Until::Any, &mut Vec::new()).unwrap();
                    bed.engine.take_ready(&mut keys);
                }
            }));
        }
    }
    threads.iter().for_each(|_| is_ready.recv().unwrap());
    assert!(!names().iter().any(|name| name.starts_with(KERNELS)), "the kernel has workers here: {:?}", names());

    let since = Instant::now();
    while names().iter().any(|name| OURS.iter().any(|our| name.starts_with(our))) {
        assert!(since.elapsed() < PATIENCE, "threads without work stay: {:?}", names());
        std::thread::sleep(Duration::from_millis(100));
    }
    let before = sleeps();
    // The kernel's workers look around every five seconds.
    std::thread::sleep(Duration::from_secs(6));
    assert_eq!(sleeps() - before, 0, "somebody was woken: {:?}", names());

    rustix::io::write(&stop, &1u64.to_ne_bytes()).unwrap();
    threads.into_iter().for_each(|thread| thread.join().unwrap());
}
