//! A Linux kernel's counters for a block device, from a line of /proc/diskstats, and the rates between two readings.
//!
//! It does not know where a line comes from: a guest may have made it up. Invariant: whatever a line says, no rate is
//! negative or infinite, and counters that went back give none. The fields are those of
//! Documentation/admin-guide/iostats.rst of Linux.

use std::collections::BTreeMap;

use crate::snapshot::float;

/// The length of a device's name at most: the kernel's DISK_NAME_LEN.
const NAME_MAX: usize = 32;
/// Bytes of a sector, which the kernel counts in whatever the device has.
const SECTOR: u64 = 512;
/// A queue that differs from rate times latency by more than this share of the larger is pointed out.
const LITTLE: f64 = 0.05;
/// Smaller queues are not compared: a few requests at the edges of the interval are more than that.
const QUEUE_MIN: f64 = 0.01;
/// The kernel cuts each of its four times and their sum to whole milliseconds.
const ROUNDED_MS: f64 = 5.0;

/// Whether a measured queue is not what rate times latency says (Little's law).
pub fn differs(queue: f64, product: f64) -> bool {
    let larger = queue.max(product);
    larger >= QUEUE_MIN && (queue - product).abs() > LITTLE * larger
}

/// Completed requests of a kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Completed {
    /// Requests.
    pub count: u64,
    /// Requests that were merged into another one and are not counted.
    pub merged: u64,
    /// Bytes.
    pub bytes: u64,
    /// The sum of their durations, in milliseconds.
    pub ms: u64,
}

/// The counters of a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeviceCounts {
    /// Reads.
    pub reads: Completed,
    /// Writes.
    pub writes: Completed,
    /// Discards; none before Linux 4.18.
    pub discards: Completed,
    /// Flushes, of which only count and time are known; none before Linux 5.5.
    pub flushes: Completed,
    /// Requests in flight.
    pub in_flight: u64,
    /// How long there was at least one, in milliseconds.
    pub busy_ms: u64,
    /// Field 11: the sum of all durations, in milliseconds.
    pub weighted_ms: u64,
}

/// A device and its counters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceLine {
    /// Its number: major and minor.
    pub number: (u32, u32),
    /// The kernel's name for it.
    pub name: String,
    /// Its counters.
    pub counts: DeviceCounts,
}

/// The rates of a device in an interval.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct DeviceRates {
    /// The length of the interval.
    pub seconds: f64,
    /// Reads per second.
    pub reads: f64,
    /// Writes per second.
    pub writes: f64,
    /// Requests of all kinds per second.
    pub per_second: f64,
    /// Bytes read per second.
    pub read_bytes: f64,
    /// Bytes written per second.
    pub write_bytes: f64,
    /// Average number of requests: the growth of field 11, divided by the interval.
    pub queue: f64,
    /// Average duration of the requests that were completed, in nanoseconds.
    pub latency_ns: Option<f64>,
}

impl DeviceLine {
    /// A line of /proc/diskstats; `None` if it is malformed.
    pub fn parse(line: &str) -> Option<DeviceLine> {
        let mut words = line.split_ascii_whitespace();
        let number = (number(words.next()?)?.try_into().ok()?, number(words.next()?)?.try_into().ok()?);
        let name = words.next().filter(|name| is_name(name))?.to_owned();
        Some(DeviceLine { number, name, counts: DeviceCounts::parse(words)? })
    }
}

/// All devices of a /proc/diskstats, by their numbers.
pub fn devices(text: &str) -> BTreeMap<(u32, u32), DeviceLine> {
    text.lines().filter_map(DeviceLine::parse).map(|line| (line.number, line)).collect()
}

fn is_name(name: &str) -> bool {
    name.len() <= NAME_MAX && name.bytes().all(|byte| byte.is_ascii_graphic())
}

/// Accepts digits only, no sign.
fn number(word: &str) -> Option<u64> {
    word.bytes().all(|byte| byte.is_ascii_digit()).then(|| word.parse().ok()).flatten()
}

impl DeviceCounts {
    /// The fields behind the name. There are 11, 15 or 17 of them, and may be more in later kernels.
    pub fn parse<'a>(words: impl Iterator<Item = &'a str>) -> Option<DeviceCounts> {
        let fields = words.map(number).collect::<Option<Vec<u64>>>().filter(|fields| fields.len() >= 11)?;
        let field = |at: usize| fields.get(at).copied().unwrap_or(0);
        let completed = |at: usize| Completed {
            count: field(at),
            merged: field(at + 1),
            bytes: field(at + 2).saturating_mul(SECTOR),
            ms: field(at + 3),
        };
        Some(DeviceCounts {
            reads: completed(0),
            writes: completed(4),
            in_flight: field(8),
            busy_ms: field(9),
            weighted_ms: field(10),
            discards: completed(11),
            flushes: Completed { count: field(15), ms: field(16), ..Completed::default() },
        })
    }

    /// The counters of all kinds: reads, writes, discards, flushes.
    pub fn all(&self) -> [Completed; 4] {
        [self.reads, self.writes, self.discards, self.flushes]
    }

    /// The rates since an earlier reading, `ns` nanoseconds before; `None` if a counter went back.
    pub fn since(&self, before: &DeviceCounts, ns: u64) -> Option<DeviceRates> {
        if ns == 0 {
            return None;
        }
        let seconds = float(ns) / 1e9;
        let mut grown = [Completed::default(); 4];
        for (grown, (now, before)) in grown.iter_mut().zip(self.all().into_iter().zip(before.all())) {
            *grown = now.since(&before)?;
        }
        let [reads, writes, ..] = grown;
        let (mut count, mut ms) = (0.0, 0.0);
        for kind in grown {
            count += float(kind.count);
            ms += float(kind.ms);
        }
        let weighted = grown_ms(self.weighted_ms, before.weighted_ms)?;
        Some(DeviceRates {
            seconds,
            reads: float(reads.count) / seconds,
            writes: float(writes.count) / seconds,
            per_second: count / seconds,
            read_bytes: float(reads.bytes) / seconds,
            write_bytes: float(writes.bytes) / seconds,
            queue: float(weighted) / 1e3 / seconds,
            latency_ns: (count > 0.0).then(|| ms * 1e6 / count),
        })
    }
}

impl Completed {
    fn since(&self, before: &Completed) -> Option<Completed> {
        Some(Completed {
            count: self.count.checked_sub(before.count)?,
            merged: self.merged.checked_sub(before.merged)?,
            bytes: self.bytes.checked_sub(before.bytes)?,
            ms: grown_ms(self.ms, before.ms)?,
        })
    }
}

/// The kernel prints times as numbers of 32 bits, which wrap after 49 days: with a queue of 64 after 18
/// hours.
fn grown_ms(now: u64, before: u64) -> Option<u64> {
    const ROUND: u64 = 1 << 32;
    match now.checked_sub(before) {
        None if before < ROUND && before - now > ROUND / 2 => Some(now + ROUND - before),
        grown => grown,
    }
}

impl DeviceRates {
    /// Rate times latency, and whether the measured queue differs from it by more than what the kernel rounds.
    pub fn little(&self) -> (f64, bool) {
        let product = self.per_second * self.latency_ns.unwrap_or(0.0) / 1e9;
        let is_rounding = (self.queue - product).abs() * self.seconds * 1e3 <= ROUNDED_MS;
        (product, differs(self.queue, product) && !is_rounding)
    }
}

#[cfg(test)]
mod test {
    use super::*;

    const LINE: &str = " 254       0 vda 100 5 800 400 50 7 1600 300 2 600 790 10 1 4096 40 20 50";

    #[test]
    fn a_line_has_the_fields_of_each_kernel_that_counts_so_many() {
        let line = DeviceLine::parse(LINE).unwrap();
        assert_eq!((line.number, line.name.as_str()), ((254, 0), "vda"));
        let DeviceCounts { reads, writes, discards, flushes, in_flight, busy_ms, weighted_ms } = line.counts;
        assert_eq!(reads, Completed { count: 100, merged: 5, bytes: 409_600, ms: 400 });
        assert_eq!(writes, Completed { count: 50, merged: 7, bytes: 819_200, ms: 300 });
        assert_eq!(discards, Completed { count: 10, merged: 1, bytes: 2_097_152, ms: 40 });
        assert_eq!(flushes, Completed { count: 20, ms: 50, ..Completed::default() });
        assert_eq!((in_flight, busy_ms, weighted_ms), (2, 600, 790));
        let old = DeviceLine::parse("8 1 sda1 1 2 3 4 5 6 7 8 9 10 11").unwrap().counts;
        assert_eq!((old.weighted_ms, old.discards, old.flushes), (11, Completed::default(), Completed::default()));
        assert!(DeviceLine::parse(&format!("{LINE} 1 2 3")).is_some(), "a later kernel");
    }

    #[test]
    fn what_is_no_line_is_refused() {
        for line in [
            "",
            "254 0 vda",
            "254 0 vda 1 2 3 4 5 6 7 8 9 10",
            "254 0 vda 1 2 3 4 5 6 7 8 9 10 -11",
            "254 0 vda +1 2 3 4 5 6 7 8 9 10 11",
            "254 0 vda 1 2 3 4 5 6 7 8 9 10 99999999999999999999",
            "99999999999 0 vda 1 2 3 4 5 6 7 8 9 10 11",
            "254 0 v\u{1b}[2Jda 1 2 3 4 5 6 7 8 9 10 11",
            "254 0 aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa 1 2 3 4 5 6 7 8 9 10 11",
        ] {
            assert_eq!(DeviceLine::parse(line), None, "{line:?}");
        }
        assert_eq!(devices(&format!("rubbish\n{LINE}\n\n8 1 sda1 1")).len(), 1);
    }

    fn counts(count: u64, ms: u64, weighted_ms: u64) -> DeviceCounts {
        let reads = Completed { count, bytes: count * 4096, ms, merged: 0 };
        DeviceCounts { reads, weighted_ms, ..DeviceCounts::default() }
    }

    #[test]
    fn the_queue_is_the_growth_of_field_11_and_the_latency_time_by_count() {
        let rates = counts(1100, 2200, 2200).since(&counts(100, 200, 200), 2_000_000_000).unwrap();
        assert_eq!((rates.per_second, rates.reads, rates.writes), (500.0, 500.0, 0.0));
        assert_eq!((rates.read_bytes, rates.queue, rates.latency_ns), (2_048_000.0, 1.0, Some(2e6)));
        assert_eq!(rates.little(), (1.0, false));
    }

    #[test]
    fn a_queue_that_is_not_rate_times_latency_is_pointed_out_unless_it_is_rounding() {
        let zero = DeviceCounts::default();
        let little = |weighted| counts(1000, 1000, weighted).since(&zero, 1_000_000_000).unwrap().little();
        assert_eq!([1000, 1040, 1100, 800].map(|weighted| little(weighted).1), [false, false, true, true]);
        let small = |weighted| counts(50, 50, weighted).since(&zero, 1_000_000_000).unwrap().little();
        assert_eq!([54, 60].map(|weighted| small(weighted).1), [false, true]);
    }

    #[test]
    fn counters_that_went_back_give_no_rate_but_times_of_32_bits_may_begin_anew() {
        let since = |now: DeviceCounts, before: DeviceCounts| now.since(&before, 1_000_000_000);
        assert_eq!(since(counts(1, 5, 5), counts(2, 5, 5)), None);
        assert_eq!(since(counts(2, 4, 5), counts(2, 5, 5)), None);
        assert_eq!(since(counts(2, 5, 4), counts(2, 5, 5)), None);
        assert_eq!(since(counts(0, 0, 0), counts(0, 0, u64::MAX)), None);
        let near = u64::from(u32::MAX) - 99;
        let rates = since(counts(2, 100, 100), counts(0, near, near)).unwrap();
        assert_eq!((rates.queue, rates.latency_ns), (0.2, Some(1e8)));
        assert_eq!(counts(1, 1, 1).since(&counts(1, 1, 1), 0), None);
    }

    #[test]
    fn rates_are_finite_whatever_was_counted() {
        let most = Completed { count: u64::MAX, merged: u64::MAX, bytes: u64::MAX, ms: u64::MAX };
        let now = DeviceCounts {
            reads: most,
            writes: most,
            discards: most,
            flushes: most,
            in_flight: u64::MAX,
            busy_ms: u64::MAX,
            weighted_ms: u64::MAX,
        };
        let rates = now.since(&DeviceCounts::default(), 1).unwrap();
        let DeviceRates { per_second, read_bytes, queue, latency_ns, .. } = rates;
        for value in [per_second, read_bytes, queue, latency_ns.unwrap(), rates.little().0] {
            assert!(value.is_finite() && value >= 0.0, "{rates:?}");
        }
    }
}
