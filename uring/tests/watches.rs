//! Both engines watch descriptors in the same wait as I/O, edge triggered.

mod fixture;

use std::io::{ErrorKind, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use disk::{Action, FileId, FileOffset, FileOp, Io, OpId, Until};
use fixture::{DIRECT, Fixture, STORAGES};
use memory::Segments;
use rustix::event::{EventfdFlags, eventfd};
use uring::{Engine, EngineKind};

fn with_each_engine(test: impl Fn(&mut Fixture)) {
    for kind in [EngineKind::Uring, EngineKind::Aio] {
        eprintln!("{kind:?}");
        test(&mut Fixture::on(STORAGES[1], (kind, DIRECT), &[1; 1 << 20], 8));
    }
}

fn event() -> OwnedFd {
    eventfd(0, EventfdFlags::NONBLOCK).unwrap()
}

fn signal(event: &OwnedFd) {
    rustix::io::write(event, &1u64.to_ne_bytes()).unwrap();
}

/// The keys that are ready without waiting.
fn ready_now(engine: &mut Engine) -> Vec<u64> {
    let mut ready = Vec::new();
    engine.reap(Until::Now, &mut Vec::new()).unwrap();
    engine.take_ready(&mut ready);
    ready.sort();
    ready
}

/// Sleeps until a key is ready.
fn ready_next(engine: &mut Engine) -> Vec<u64> {
    let mut ready = Vec::new();
    while ready.is_empty() {
        engine.reap(Until::Any, &mut Vec::new()).unwrap();
        engine.take_ready(&mut ready);
    }
    ready
}

#[test]
fn a_descriptor_that_is_already_ready_is_reported_immediately() {
    with_each_engine(|fixture| {
        let event = event();
        signal(&event);
        fixture.engine.watch(event.as_fd(), false, 7).unwrap();
        assert_eq!(ready_next(&mut fixture.engine), [7]);
    });
}

#[test]
fn an_eventfd_is_reported_at_each_signal_without_being_read() {
    with_each_engine(|fixture| {
        let event = event();
        fixture.engine.watch(event.as_fd(), false, 7).unwrap();
        assert_eq!(ready_now(&mut fixture.engine), []);
        for _ in 0..100 {
            signal(&event);
            assert_eq!(ready_next(&mut fixture.engine), [7]);
            assert_eq!(ready_now(&mut fixture.engine), []);
        }
    });
}

#[test]
fn a_signal_is_seen_without_waiting() {
    with_each_engine(|fixture| {
        let event = event();
        fixture.engine.watch(event.as_fd(), false, 7).unwrap();
        assert_eq!(ready_now(&mut fixture.engine), []);
        for _ in 0..10 {
            signal(&event);
            assert_eq!(ready_now(&mut fixture.engine), [7]);
        }
    });
}

#[test]
fn a_socket_is_reported_for_data_and_for_hangup() {
    with_each_engine(|fixture| {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        fixture.engine.watch(ours.as_fd(), false, 1).unwrap();
        assert_eq!(ready_now(&mut fixture.engine), []);
        theirs.write_all(b"x").unwrap();
        assert_eq!(ready_next(&mut fixture.engine), [1]);
        theirs.write_all(b"y").unwrap();
        assert_eq!(ready_next(&mut fixture.engine), [1]);
        drop(theirs);
        assert_eq!(ready_next(&mut fixture.engine), [1]);
    });
}

#[test]
fn writability_is_reported_only_if_requested() {
    with_each_engine(|fixture| {
        let (ours, _theirs) = UnixStream::pair().unwrap();
        fixture.engine.watch(ours.as_fd(), false, 1).unwrap();
        fixture.engine.watch(ours.as_fd(), true, 2).unwrap();
        assert_eq!(ready_next(&mut fixture.engine), [2]);
    });
}

#[test]
fn watching_a_key_again_replaces_the_watch() {
    with_each_engine(|fixture| {
        let (old, new) = (event(), event());
        fixture.engine.watch(old.as_fd(), false, 1).unwrap();
        assert_eq!(ready_now(&mut fixture.engine), []);
        fixture.engine.watch(new.as_fd(), false, 1).unwrap();
        assert_eq!(ready_now(&mut fixture.engine), []);
        signal(&old);
        assert_eq!(ready_now(&mut fixture.engine), []);
        signal(&new);
        assert_eq!(ready_next(&mut fixture.engine), [1]);
    });
}

#[test]
fn a_forgotten_key_is_not_reported() {
    with_each_engine(|fixture| {
        let (forgotten, never_armed, kept) = (event(), event(), event());
        fixture.engine.watch(forgotten.as_fd(), false, 1).unwrap();
        fixture.engine.watch(kept.as_fd(), false, 2).unwrap();
        assert_eq!(ready_now(&mut fixture.engine), []);
        fixture.engine.watch(never_armed.as_fd(), false, 3).unwrap();
        fixture.engine.forget(3);
        fixture.engine.forget(1);
        fixture.engine.forget(99);
        for event in [&forgotten, &never_armed, &kept] {
            signal(event);
        }
        assert_eq!(ready_next(&mut fixture.engine), [2]);
        assert_eq!(ready_now(&mut fixture.engine), []);
    });
}

#[test]
fn each_of_many_descriptors_is_reported() {
    with_each_engine(|fixture| {
        let events: Vec<OwnedFd> = (0..100).map(|_| event()).collect();
        for (key, event) in (0..).zip(&events) {
            fixture.engine.watch(event.as_fd(), false, key).unwrap();
        }
        events.iter().for_each(signal);
        let mut seen = Vec::new();
        while seen.len() < 100 {
            seen.extend(ready_next(&mut fixture.engine));
        }
        seen.sort();
        assert_eq!(seen, (0..100).collect::<Vec<u64>>());
    });
}

/// The other thread sends the next signal only after the last one was received: a lost one hangs the test.
#[test]
fn another_thread_wakes_an_idle_engine() {
    with_each_engine(|fixture| {
        let event = event();
        let remote = event.try_clone().unwrap();
        fixture.engine.watch(event.as_fd(), false, 7).unwrap();
        let (received, next) = std::sync::mpsc::channel();
        let signaller = std::thread::spawn(move || next.iter().for_each(|()| signal(&remote)));
        for _ in 0..500 {
            received.send(()).unwrap();
            assert_eq!(ready_next(&mut fixture.engine), [7]);
        }
        drop(received);
        signaller.join().unwrap();
    });
}

/// As above, with a read in flight that may complete before, after or during the signal.
#[test]
fn io_and_signals_both_wake_an_engine_with_io_in_flight() {
    with_each_engine(|fixture| {
        let event = event();
        let remote = event.try_clone().unwrap();
        fixture.engine.watch(event.as_fd(), false, 7).unwrap();
        let (received, next) = std::sync::mpsc::channel();
        let signaller = std::thread::spawn(move || next.iter().for_each(|()| signal(&remote)));
        let mut done = Vec::new();
        for round in 0..500 {
            let action = Action::Read { at: FileOffset(0), into: Segments::zeroed(64 << 10) };
            fixture.engine.push(FileOp { id: OpId(round), file: FileId(0), action }).unwrap();
            received.send(()).unwrap();
            let mut ready = Vec::new();
            while done.is_empty() || ready.is_empty() {
                fixture.engine.reap(Until::Any, &mut done).unwrap();
                fixture.engine.take_ready(&mut ready);
            }
            assert_eq!((done.len(), ready), (1, vec![7]));
            assert!(done.drain(..).all(|done| done.result == Ok(())));
        }
        drop(received);
        signaller.join().unwrap();
    });
}

/// A caller that always has completions to take must still be notified of its sockets.
#[test]
fn steady_completions_do_not_hide_a_signal() {
    with_each_engine(|fixture| {
        let event = event();
        fixture.engine.watch(event.as_fd(), false, 7).unwrap();
        assert_eq!(ready_now(&mut fixture.engine), []);
        signal(&event);
        let mut ready = Vec::new();
        for round in 0..100 {
            let action = Action::Read { at: FileOffset(0), into: Segments::zeroed(4096) };
            fixture.engine.push(FileOp { id: OpId(round), file: FileId(0), action }).unwrap();
            let mut done = Vec::new();
            while done.is_empty() {
                fixture.engine.reap(Until::Any, &mut done).unwrap();
            }
            fixture.engine.take_ready(&mut ready);
        }
        assert_eq!(ready, [7]);
    });
}

/// A signal should interrupt the thread that sleeps in the engine, so it must not be delivered to another.
#[test]
fn engine_threads_block_signals() {
    let mut fixture = Fixture::on(STORAGES[1], (EngineKind::Uring, DIRECT), &[1; 4096], 4);
    let masked = loop {
        assert_eq!(fixture.run(vec![Action::SyncData]), [Ok(())]);
        let statuses = std::fs::read_dir("/proc/self/task").unwrap().filter_map(|task| {
            // A thread may end while its status is being read.
            std::fs::read_to_string(task.unwrap().path().join("status")).ok()
        });
        let thread = statuses.into_iter().find(|status| status.starts_with("Name:\tsyncs"));
        // On a slow machine it may have ended already.
        let mask = thread.and_then(|status| Some(status.split_once("SigBlk:\t")?.1.get(..16)?.to_owned()));
        if let Some(mask) = mask {
            break u64::from_str_radix(&mask, 16).unwrap();
        }
    };
    for signal in [libc::SIGTERM, libc::SIGINT, libc::SIGUSR1, libc::SIGHUP] {
        assert_ne!(masked & (1 << (signal - 1)), 0, "signal {signal} is not blocked in the worker");
    }
}

/// The engine also closes its duplicate of a descriptor that becomes ready while it is unwatched, so that the peer sees
/// the end when the owner closes it.
#[test]
fn a_socket_forgotten_while_data_arrives_is_closed() {
    with_each_engine(|fixture| {
        for key in 0..16 {
            let (ours, mut theirs) = UnixStream::pair().unwrap();
            fixture.engine.watch(ours.as_fd(), false, key).unwrap();
            assert_eq!(ready_now(&mut fixture.engine), []);
            theirs.write_all(b"x").unwrap();
            fixture.engine.forget(key);
            drop(ours);
            theirs.set_nonblocking(true).unwrap();
            let begun = Instant::now();
            loop {
                assert_eq!(ready_now(&mut fixture.engine), []);
                match theirs.read(&mut [0; 1]) {
                    Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                    // Data that we have not read is lost with the connection.
                    ended => break assert!(matches!(ended, Ok(0) | Err(_))),
                }
                assert!(begun.elapsed() < Duration::from_secs(60), "the engine keeps the socket open");
            }
        }
    });
}
