//! Watches continuously for two processes that may write to one file, and for the memory of the daemon and its disk
//! processes. Machines and clients are not counted.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use crate::daemon::Daemon;
use crate::daemon::processes::{Disk, Places};
use crate::process::pss_kib;

/// Minimum pause between two samples, and the factor by which it exceeds the duration of a sample, which takes CPU time
/// from the others.
const PAUSE: Duration = Duration::from_millis(200);
const PAUSE_OF_LOOK: u32 = 4;

/// Maxima of all samples.
#[derive(Clone, Debug, Default)]
pub struct Peaks {
    /// KiB of the daemon and all disk processes together.
    pub all_kib: u64,
    /// KiB of the daemon alone.
    pub daemon_kib: u64,
    /// KiB of the processes that serve disks together, and their number.
    pub disks_kib: u64,
    pub disks: usize,
    /// KiB of the processes that work on images together, and their number.
    pub jobs_kib: u64,
    pub jobs: usize,
}

impl Peaks {
    fn raise(&mut self, seen: &Peaks) {
        self.all_kib = self.all_kib.max(seen.all_kib);
        self.daemon_kib = self.daemon_kib.max(seen.daemon_kib);
        self.jobs_kib = self.jobs_kib.max(seen.jobs_kib);
        self.jobs = self.jobs.max(seen.jobs);
        if seen.disks_kib > self.disks_kib {
            (self.disks_kib, self.disks) = (seen.disks_kib, seen.disks);
        }
    }
}

#[derive(Debug, Default)]
struct Samples {
    of_phase: Peaks,
    twice: BTreeSet<String>,
    looks: u64,
}

/// The thread that takes samples.
#[derive(Debug, Default)]
pub struct Watch {
    over: AtomicBool,
    seen: Mutex<Samples>,
}

impl Watch {
    fn seen(&self) -> MutexGuard<'_, Samples> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The peaks since the last call.
    pub fn peaks(&self) -> Peaks {
        std::mem::take(&mut self.seen().of_phase)
    }

    /// Files that were open for writing twice, and the number of samples.
    pub fn twice(&self) -> (Vec<String>, u64) {
        let seen = self.seen();
        (seen.twice.iter().cloned().collect(), seen.looks)
    }

    /// Ends the thread.
    pub fn end(&self) {
        self.over.store(true, Ordering::Relaxed);
    }

    /// Takes a sample.
    pub fn look(&self, daemon: &Daemon, places: &Places) {
        let disks = places.disks();
        let peaks = measure(daemon, &disks);
        let twice = twice(places, &disks);
        let mut seen = self.seen();
        seen.of_phase.raise(&peaks);
        seen.twice.extend(twice);
        seen.looks += 1;
    }

    /// Takes samples until it is ended.
    pub fn run(&self, daemon: &Daemon, places: &Places) {
        while !self.over.load(Ordering::Relaxed) {
            let begin = Instant::now();
            self.look(daemon, places);
            thread::sleep(PAUSE.max(begin.elapsed() * PAUSE_OF_LOOK));
        }
    }
}

/// The current memory of all processes. One that ends meanwhile counts as zero.
fn measure(daemon: &Daemon, disks: &[Disk]) -> Peaks {
    let mut peaks = Peaks { daemon_kib: daemon.pid().map_or(0, |pid| pss_kib(pid).unwrap_or(0)), ..Peaks::default() };
    for disk in disks {
        let Ok(kib) = pss_kib(disk.pid) else { continue };
        let (sum, count) = if disk.vbd.is_some() {
            (&mut peaks.disks_kib, &mut peaks.disks)
        } else {
            (&mut peaks.jobs_kib, &mut peaks.jobs)
        };
        *sum += kib;
        *count += 1;
    }
    peaks.all_kib = peaks.daemon_kib + peaks.disks_kib + peaks.jobs_kib;
    peaks
}

/// Files that several processes have open for writing in two readings, because a reading is not atomic.
fn twice(places: &Places, disks: &[Disk]) -> Vec<String> {
    let suspects = places.written_by_several(disks);
    let still = suspects
        .into_iter()
        .filter(|(file, pids)| pids.iter().filter(|pid| places.written_by(**pid).contains(file)).count() > 1);
    still
        .map(|((_, inode), pids)| {
            let who: Vec<&Disk> = disks.iter().filter(|disk| pids.contains(&disk.pid)).collect();
            format!("inode {inode} of the repository is open for writing in several processes: {who:?}")
        })
        .collect()
}
