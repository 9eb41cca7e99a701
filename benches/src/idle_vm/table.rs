//! The tables: one per machine, by interval, and one with the cost of an idle interval of all.

use std::collections::BTreeMap;
use std::fmt::Write;

use serde_json::{Value, json};

use super::trace::Counts;
use super::{Accelerator, Counted, Plan};

/// Number of devices that the comparison names.
const NAMED: usize = 3;

/// Formats the tables as text.
pub fn text(counted: &[Counted], plan: Plan, accelerator: Accelerator) -> String {
    let mut text = head(plan, accelerator);
    for run in counted {
        table(&mut text, run);
    }
    comparison(&mut text, counted);
    text
}

fn head(plan: Plan, accelerator: Accelerator) -> String {
    let mut head = format!(
        "What wakes QEMU, in intervals of {} s from boot to shutdown; one processor, one disk of ours, a guest that does nothing.\n\
         woken   the main loop, which is the device model, went to sleep again (voluntary switches of its thread)\n\
         timers  interrupts by the guest's own timer\n\
         reads, writes  of registers of emulated devices by the guest (QEMU's trace), without\n\
         chips   those of interrupt controllers and the PC's timer\n",
        plan.interval.as_secs()
    );
    if accelerator == Accelerator::Tcg {
        head.push_str(
            "Under TCG, as here, the guest's own timer and the chips are QEMU's. Such a timer wakes the main loop four or five times: when it is due, when \
             it is\nset anew, and for the lock that the processor holds then. Under KVM both are the kernel's, and QEMU sleeps.\n",
        );
    }
    head
}

fn table(text: &mut String, run: &Counted) {
    line(text, &format!("\n{}", run.name));
    line(
        text,
        &format!("  {:>8} {:>9} {:>9} {:>9} {:>9} {:>9}", "interval", "woken", "timers", "reads", "writes", "chips"),
    );
    for (number, count) in run.counts.iter().enumerate() {
        let Counts { woken, timers, reads, writes, irq_chips, .. } = count;
        line(text, &format!("  {number:>8} {:>9} {timers:>9} {reads:>9} {writes:>9} {irq_chips:>9}", woken.main));
    }
}

fn comparison(text: &mut String, counted: &[Counted]) {
    line(text, "\nmean of the idle intervals, all but the first two and the last");
    line(
        text,
        &format!("  {:<18} {:>9} {:>9} {:>9} {:>9}  {}", "", "woken", "timers", "reads", "writes", "most used devices"),
    );
    for run in counted {
        let idle = Idle::of(&run.counts);
        let devices: Vec<String> = idle.devices.iter().take(NAMED).map(|(name, n)| format!("{name} {n:.1}")).collect();
        line(
            text,
            &format!(
                "  {:<18} {:>9.1} {:>9.1} {:>9.1} {:>9.1}  {}",
                run.name,
                idle.woken,
                idle.timers,
                idle.reads,
                idle.writes,
                devices.join(", ")
            ),
        );
    }
}

/// Appends a line; writing to a string cannot fail.
fn line(text: &mut String, line: &str) {
    writeln!(text, "{line}").unwrap_or_default();
}

/// Means over the idle intervals.
#[derive(Debug, Default, PartialEq)]
struct Idle {
    woken: f64,
    timers: f64,
    reads: f64,
    writes: f64,
    /// Accesses by device, the most used first.
    devices: Vec<(String, f64)>,
}

impl Idle {
    fn of(counts: &[Counts]) -> Self {
        let end = counts.len().saturating_sub(1);
        // In a short run the second interval is idle enough.
        let idle = counts.get(2.min(end.saturating_sub(1))..end).unwrap_or_default();
        let number = u32::try_from(idle.len()).unwrap_or(u32::MAX).max(1);
        // Counts of this size are exact in a double.
        let mean = |sum: u64| u32::try_from(sum).map_or(f64::INFINITY, f64::from) / f64::from(number);
        let of = |column: fn(&Counts) -> u64| mean(idle.iter().map(column).sum());
        let mut devices: BTreeMap<&str, u64> = BTreeMap::new();
        for (name, uses) in idle.iter().flat_map(|count| &count.devices) {
            *devices.entry(name).or_default() += uses;
        }
        let mut devices: Vec<(String, u64)> = devices.into_iter().map(|(name, uses)| (name.to_owned(), uses)).collect();
        devices.sort_by_key(|(_, uses)| std::cmp::Reverse(*uses));
        Self {
            woken: of(|count| count.woken.main),
            timers: of(|count| count.timers),
            reads: of(|count| count.reads),
            writes: of(|count| count.writes),
            devices: devices.into_iter().map(|(name, uses)| (name, mean(uses))).collect(),
        }
    }
}

/// Formats the counts as JSON.
pub fn json(counted: &[Counted], plan: Plan, accelerator: Accelerator) -> Value {
    let runs = counted.iter().map(|run| {
        let intervals = run.counts.iter().map(|count| {
            json!({
                "main_loop_woken": count.woken.main, "vcpus_woken": count.woken.vcpus, "guest_timers": count.timers,
                "reads": count.reads, "writes": count.writes, "irq_chips": count.irq_chips, "devices": count.devices,
            })
        });
        json!({ "hardware": run.name, "intervals": intervals.collect::<Vec<_>>() })
    });
    json!({ "interval_seconds": plan.interval.as_secs(), "accelerator": accelerator, "runs": runs.collect::<Vec<_>>() })
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn the_mean_is_of_what_is_idle() {
        let count = |reads| Counts { reads, devices: BTreeMap::from([("ide".to_owned(), reads)]), ..Counts::default() };
        let idle = Idle::of(&[count(1000), count(100), count(2), count(4), count(50)]);
        assert_eq!((idle.reads, idle.devices.as_slice()), (3.0, [("ide".to_owned(), 3.0)].as_slice()));
        assert_eq!(Idle::of(&[count(1000), count(7), count(50)]).reads, 7.0);
        assert_eq!(Idle::of(&[]), Idle::default());
    }
}
