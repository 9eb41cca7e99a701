//! Activity of QEMU by interval: events of its trace, and context switches of its threads.
//!
//! An event of the trace is a line `PID@SECONDS.MICROSECONDS:NAME …` in QEMU's messages.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::time::Duration;

/// The events that are counted: accesses of the guest to registers of emulated devices, and interrupts by a local APIC.
pub const EVENTS: [&str; 3] = ["memory_region_ops_read", "memory_region_ops_write", "apic_local_deliver"];

/// Interrupt controllers and the PC's timer, by the names of their registers. Under KVM they are in the kernel and do
/// not wake QEMU.
const IRQ_CHIPS: [&str; 6] = ["apic-msi", "kvm-apic-msi", "ioapic", "pic", "pit", "elcr"];

/// Voluntary context switches of QEMU's threads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Threads {
    /// Those of the main loop, the device model: it was woken before each.
    pub main: u64,
    /// Those of the vCPU threads.
    pub vcpus: u64,
}

/// The counts of an interval.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    pub woken: Threads,
    /// Interrupts by the guest's own timers in the local APICs.
    pub timers: u64,
    pub reads: u64,
    pub writes: u64,
    /// Accesses to interrupt controllers, which are not included in the others.
    pub irq_chips: u64,
    /// Accesses by device.
    pub devices: BTreeMap<String, u64>,
}

impl Threads {
    /// Reads the counts of the process with this pid.
    pub fn of(pid: i32) -> Result<Self, String> {
        let tasks = Path::new("/proc").join(pid.to_string()).join("task");
        let failed = |error| format!("{}: {error}", tasks.display());
        let mut threads = Self::default();
        let mut is_whole = false;
        for task in fs::read_dir(&tasks).map_err(failed)? {
            // A worker may exit meanwhile; threads that are counted live as long as the process.
            let Ok(status) = fs::read_to_string(task.map_err(failed)?.path().join("status")) else { continue };
            let value = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
            let switches = value("voluntary_ctxt_switches:").and_then(|value| value.parse().ok()).unwrap_or(0);
            if value("Pid:") == Some(&pid.to_string()) {
                threads.main = switches;
                is_whole = true;
            } else if value("Name:").is_some_and(|name| name.starts_with("CPU ")) {
                threads.vcpus += switches;
            }
        }
        if is_whole { Ok(threads) } else { Err(format!("process {pid} has ended")) }
    }

    /// The difference from an earlier reading.
    pub fn since(&self, before: &Self) -> Self {
        Self { main: self.main.saturating_sub(before.main), vcpus: self.vcpus.saturating_sub(before.vcpus) }
    }
}

/// The events of a trace by interval; later ones count for the last interval.
pub fn counts(trace: &str, began: Duration, interval: Duration, intervals: u32) -> Vec<Counts> {
    let mut counts: Vec<Counts> = (0..intervals).map(|_| Counts::default()).collect();
    let last = counts.len().saturating_sub(1);
    for line in trace.lines() {
        let Some((at, event)) = event(line) else { continue };
        let passed = at.saturating_sub(began).as_micros() / interval.as_micros().max(1);
        let which = usize::try_from(passed).unwrap_or(last).min(last);
        if let Some(count) = counts.get_mut(which) {
            count.add(event);
        }
    }
    counts
}

impl Counts {
    fn add(&mut self, event: &str) {
        let is_write = event.starts_with("memory_region_ops_write ");
        if event.starts_with("apic_local_deliver vector 0 ") {
            self.timers += 1;
        } else if is_write || event.starts_with("memory_region_ops_read ") {
            let name = event.rsplit_once("name '").map_or("", |(_, name)| name.trim_end_matches('\''));
            if IRQ_CHIPS.contains(&name) {
                self.irq_chips += 1;
                return;
            }
            *(if is_write { &mut self.writes } else { &mut self.reads }) += 1;
            *self.devices.entry(name.to_owned()).or_default() += 1;
        }
    }
}

/// Parses the time and the name of an event.
fn event(line: &str) -> Option<(Duration, &str)> {
    let (_, rest) = line.split_once('@')?;
    let (at, event) = rest.split_once(':')?;
    let (seconds, micros) = at.split_once('.')?;
    let at = Duration::from_secs(seconds.parse().ok()?) + Duration::from_micros(micros.parse().ok()?);
    Some((at, event))
}

#[cfg(test)]
mod test {
    use super::*;

    const TRACE: &str = "\
77@100.500000:memory_region_ops_read cpu 0 mr 0x1 addr 0x3f8 value 0x0 size 1 name 'serial'
77@131.000000:memory_region_ops_write cpu 0 mr 0x1 addr 0x1 value 0x0 size 4 name 'apic-msi'
77@131.000001:apic_local_deliver vector 0 delivery mode 0
77@131.000002:apic_local_deliver vector 3 delivery mode 0
a message of another kind
77@999.000000:memory_region_ops_write cpu 0 mr 0x1 addr 0x1 value 0x0 size 4 name 'acpi-cnt'
";

    #[test]
    fn events_are_counted_by_interval_and_kind() {
        let counts = counts(TRACE, Duration::from_secs(100), Duration::from_secs(30), 3);
        assert_eq!((counts[0].reads, counts[0].writes, counts[0].devices["serial"]), (1, 0, 1));
        assert_eq!((counts[1].irq_chips, counts[1].timers, counts[1].reads + counts[1].writes), (1, 1, 0));
        assert_eq!((counts[2].writes, counts[2].devices["acpi-cnt"]), (1, 1));
    }

    #[test]
    fn a_process_is_asked_for_its_threads() {
        let pid = i32::try_from(std::process::id()).unwrap();
        let before = Threads::of(pid).unwrap();
        let later = Threads { main: before.main + 3, vcpus: before.vcpus };
        assert_eq!(later.since(&before), Threads { main: 3, vcpus: 0 });
        assert!(Threads::of(i32::MAX).is_err());
    }
}
