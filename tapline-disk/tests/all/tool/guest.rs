//! A guest that keeps working while its disk is changed.

#![allow(dead_code, reason = "each test uses its part")]

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;

use fastrand::Rng;

use super::nbd::{Peer, Versions};

/// A guest that writes and flushes until it is stopped or its disk disconnects.
pub struct Guest {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Versions>,
    steps: mpsc::Receiver<()>,
}

impl Guest {
    pub fn start<P: Peer>(
        connect: impl FnOnce() -> P + Send + 'static,
        mut versions: Versions,
        mut random: Rng,
    ) -> Guest {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let (step, steps) = mpsc::channel();
        let thread = std::thread::spawn(move || {
            let mut peer = connect();
            while !stopped.load(Ordering::Relaxed) && versions.step(&mut peer, &mut random).is_ok() {
                // The receiver may be gone.
                step.send(()).ok();
            }
            versions
        });
        Guest { stop, thread, steps }
    }

    /// Waits until it has done `steps` more.
    pub fn work(&self, steps: usize) {
        assert_eq!(self.steps.iter().take(steps).count(), steps, "the guest has lost its disk");
    }

    /// Stops it.
    pub fn stop(self) -> Versions {
        self.stop.store(true, Ordering::Relaxed);
        self.wait()
    }

    /// Waits until it has lost its disk.
    pub fn wait(self) -> Versions {
        self.thread.join().unwrap()
    }
}
