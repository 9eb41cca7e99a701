//! Returns how long the processors on which this process may run have been idle.
//!
//! /proc/stat counts that for each processor, in steps of 10 ms. Quotas of control groups are ignored.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::OnceLock;

use rustix::thread::{CpuSet, sched_getaffinity};

/// The kernel's statistics of processors.
static STAT: OnceLock<File> = OnceLock::new();

/// The bytes of /proc/stat that are read: its first lines are about processors.
const TEXT_MAX: usize = 128 << 10;

/// Opens the file. Call it before the process is confined.
pub fn prepare() {
    if let Ok(stat) = File::open("/proc/stat") {
        STAT.get_or_init(|| stat);
    }
}

/// The processors on which a disk may run.
pub struct Processors {
    count: usize,
    /// Returns the total nanoseconds for which they have been idle since boot.
    idle: Box<dyn FnMut() -> Option<u64> + Send>,
}

impl Processors {
    /// Returns those on which this process may run; without [`prepare`] their idle time is unknown.
    pub fn of_this_process() -> Processors {
        let ours = sched_getaffinity(None).unwrap_or_else(|_| CpuSet::new());
        let count = usize::try_from(ours.count()).unwrap_or(1);
        let step = 1_000_000_000 / rustix::param::clock_ticks_per_second().max(1);
        Processors::by(count, move || Some(idle_in(&read(STAT.get()?)?, &ours)?.saturating_mul(step)))
    }

    /// Makes `count` processors with the given idle time.
    pub fn by(count: usize, idle: impl FnMut() -> Option<u64> + Send + 'static) -> Processors {
        Processors { count, idle: Box::new(idle) }
    }

    /// Returns their number.
    pub fn count(&self) -> usize {
        self.count
    }

    /// Returns the total nanoseconds for which they have been idle since boot.
    pub fn idle(&mut self) -> Option<u64> {
        (self.idle)()
    }
}

fn read(stat: &File) -> Option<String> {
    let mut bytes = vec![0; TEXT_MAX];
    let len = stat.read_at(&mut bytes, 0).ok()?;
    bytes.truncate(len);
    String::from_utf8(bytes).ok()
}

/// Returns the idle steps of some processors (proc(5): the fourth and fifth number of a processor's line).
fn idle_in(text: &str, ours: &CpuSet) -> Option<u64> {
    let mut sum = None;
    for line in text.lines() {
        let mut words = line.split_whitespace();
        let number = words.next().and_then(|word| word.strip_prefix("cpu")?.parse::<usize>().ok());
        if !number.is_some_and(|number| number < CpuSet::MAX_CPU && ours.is_set(number)) {
            continue;
        }
        let numbers: Vec<u64> = words.map_while(|word| word.parse().ok()).collect();
        let idle = numbers.get(3)?.saturating_add(*numbers.get(4)?);
        *sum.get_or_insert(0) += idle;
    }
    sum
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn only_processors_of_this_process_count() {
        let text = "cpu  9 9 9 999 999 9\ncpu0 1 2 3 40 5 6 7\ncpu1 1 2 3 100 0 6 7\ncpu2 1 2 3 7000 0 6\nintr 4 5\n";
        let mut ours = CpuSet::new();
        assert_eq!(idle_in(text, &ours), None);
        ours.set(0);
        ours.set(1);
        assert_eq!(idle_in(text, &ours), Some(145));
        assert_eq!(idle_in("cpu0 1 2 3\n", &ours), None, "an old or strange kernel");
        assert_eq!(idle_in("", &ours), None);
    }

    #[test]
    fn the_statistics_file_is_parsed() {
        prepare();
        let mut processors = Processors::of_this_process();
        assert!(processors.count() > 0);
        assert!(processors.idle().is_some());
    }
}
