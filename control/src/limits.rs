//! Limits of a disk's requests per second and bytes per second, as they are written, sent and checked.
//!
//! It knows nothing about how they are kept. Invariant: [`Limits`] that were checked hold nothing that contradicts
//! itself, and nothing that would stop a guest.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::size::{Size, readable};
use crate::{Error, Kind};

/// The least of a limit of requests: with less, a full ring of 128 takes longer than 13 seconds.
const IOPS_MIN: u64 = 10;
const IOPS_MAX: u64 = 1_000_000_000;
/// The least of a limit of bytes: a request of 1 MiB then takes 16 seconds.
const BANDWIDTH_MIN: u64 = 64 << 10;
const BANDWIDTH_MAX: u64 = 1 << 50;
/// The longest burst: an hour.
const BURST_MAX: u64 = 3_600_000;

/// How much may be saved up if that is not said: enough that a disk which is used now and then is not held back by
/// single requests, and little enough that ten seconds are within one percent of the limit.
pub const BURST_MS: u64 = 100;

/// The limits of a disk. What is not there is not limited.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Limits {
    /// Requests per second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub iops: Option<u64>,
    /// Reads per second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub read_iops: Option<u64>,
    /// Writes per second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub write_iops: Option<u64>,
    /// Bytes per second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bandwidth: Option<u64>,
    /// Bytes read per second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub read_bandwidth: Option<u64>,
    /// Bytes written per second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub write_bandwidth: Option<u64>,
    /// Burst that an unused disk saves up, as the milliseconds of each limit that it is worth.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub burst_ms: Option<u64>,
}

/// The limit that a word of the command line sets.
type Field = fn(&mut Limits) -> &mut Option<u64>;

/// The words of requests per second, and those of bytes per second: of all, of reads and of writes.
const IOPS: [(&str, Field); 3] = [
    ("iops", |limits| &mut limits.iops),
    ("read-iops", |limits| &mut limits.read_iops),
    ("write-iops", |limits| &mut limits.write_iops),
];
const BANDWIDTH: [(&str, Field); 3] = [
    ("bandwidth", |limits| &mut limits.bandwidth),
    ("read-bandwidth", |limits| &mut limits.read_bandwidth),
    ("write-bandwidth", |limits| &mut limits.write_bandwidth),
];
const BURST: &str = "burst";

impl Limits {
    /// Whether there is none.
    pub fn is_none(&self) -> bool {
        Limits { burst_ms: None, ..*self } == Limits::default()
    }

    /// How many milliseconds' worth may be saved up.
    pub fn burst_ms(&self) -> u64 {
        self.burst_ms.unwrap_or(BURST_MS)
    }

    /// For people: `5000 iops, 100 MiB/s, burst 100 ms`.
    pub fn shown(&self) -> String {
        let mut limits = *self;
        let mut parts = Vec::new();
        for (word, field) in IOPS {
            parts.extend(field(&mut limits).map(|limit| format!("{limit} {}", word.replace('-', " "))));
        }
        for (word, field) in BANDWIDTH {
            let what = word.strip_suffix("bandwidth").unwrap_or(word).trim_end_matches('-');
            let what = if what.is_empty() { String::new() } else { format!(" {what}") };
            parts.extend(field(&mut limits).map(|limit| format!("{}/s{what}", readable(limit))));
        }
        if !self.is_none() {
            parts.push(format!("burst {} ms", self.burst_ms()));
        }
        parts.join(", ")
    }

    /// Whether they can be kept, and say what was meant.
    pub fn check(&self) -> Result<(), Error> {
        of_kind(*self, IOPS, IOPS_MIN..=IOPS_MAX, |number| number.to_string())?;
        of_kind(*self, BANDWIDTH, BANDWIDTH_MIN..=BANDWIDTH_MAX, |number| format!("{} per second", readable(number)))?;
        match self.burst_ms {
            None => Ok(()),
            Some(_) if self.is_none() => {
                Err(invalid("a burst is given, and no limit").advise("give iops or bandwidth as well, or no burst"))
            }
            Some(1..=BURST_MAX) => Ok(()),
            Some(0) => Err(invalid("a burst of 0 saves nothing up, so the limit could not be reached")
                .advise("give at least 1ms, or leave it out for 100ms")),
            Some(_) => Err(invalid("a burst is longer than an hour").advise("give at most 3600s")),
        }
    }
}

/// Checks the limits of one kind: of all, of reads and of writes.
fn of_kind(
    mut limits: Limits,
    fields: [(&str, Field); 3],
    range: std::ops::RangeInclusive<u64>,
    show: fn(u64) -> String,
) -> Result<(), Error> {
    let [(total_word, total), ..] = fields;
    let total = *total(&mut limits);
    for (word, field) in fields {
        let Some(limit) = *field(&mut limits) else { continue };
        if limit == 0 {
            let what = format!("a limit of 0 for {word} would stop the disk");
            return Err(invalid(what).advise("leave it out for no limit"));
        }
        if !range.contains(&limit) {
            let (least, most) = (show(*range.start()), show(*range.end()));
            let what = format!("{word} cannot be limited to {}: give {least} to {most}", show(limit));
            return Err(invalid(what)
                .advise("a disk that is slower than that looks dead to its guest; leave it out for no limit"));
        }
        if let Some(total) = total.filter(|total| limit > *total) {
            let what = format!("{word} is {}, more than {total_word}, which is {}", show(limit), show(total));
            return Err(
                invalid(what).advise(format!("{total_word} limits reads and writes together; give {word} less"))
            );
        }
    }
    Ok(())
}

/// `iops=5000,bandwidth=100M,burst=2s`.
impl FromStr for Limits {
    type Err = Error;

    fn from_str(text: &str) -> Result<Limits, Error> {
        let mut limits = Limits::default();
        for part in text.split(',') {
            let known = || {
                let words: Vec<_> = IOPS.iter().chain(&BANDWIDTH).map(|(word, _)| *word).chain([BURST]).collect();
                format!("write LIMIT=NUMBER[,…], where LIMIT is one of {}", words.join(", "))
            };
            let Some((word, value)) = part.split_once('=') else {
                return Err(invalid(format!("'{part}' is not a limit")).advise(known()));
            };
            let of =
                |fields: &[(&str, Field)]| fields.iter().find(|(known, _)| *known == word).map(|(_, field)| *field);
            let (place, value) = match (of(&IOPS), of(&BANDWIDTH), word) {
                (Some(field), ..) => (field(&mut limits), iops(value)?),
                (None, Some(field), _) => (field(&mut limits), bandwidth(value)?),
                (None, None, BURST) => (&mut limits.burst_ms, burst(value)?),
                _ => return Err(invalid(format!("'{word}' cannot be limited")).advise(known())),
            };
            if place.replace(value).is_some() {
                return Err(invalid(format!("{word} is given twice")).advise("give each limit once"));
            }
        }
        limits.check()?;
        Ok(limits)
    }
}

/// As [`FromStr`] reads it.
impl fmt::Display for Limits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut limits = *self;
        let mut parts = Vec::new();
        for (word, field) in IOPS.iter().chain(&BANDWIDTH) {
            parts.extend(field(&mut limits).map(|limit| format!("{word}={limit}")));
        }
        parts.extend(self.burst_ms.map(|burst| format!("{BURST}={burst}ms")));
        f.write_str(&parts.join(","))
    }
}

/// Requests per second, as they are written.
pub fn iops(word: &str) -> Result<u64, Error> {
    let number = word.parse();
    number.map_err(|_| invalid(format!("'{word}' is not a number of requests per second: give a whole number")))
}

/// Bytes per second, as they are written.
pub fn bandwidth(word: &str) -> Result<u64, Error> {
    let size: Result<Size, _> = word.parse();
    size.map(|size| size.0).map_err(|why| invalid(format!("{why}, for bytes per second")))
}

/// The milliseconds of a burst, as they are written.
pub fn burst(word: &str) -> Result<u64, Error> {
    let digits = word.find(|c: char| !c.is_ascii_digit()).unwrap_or(word.len());
    let (number, unit) = word.split_at_checked(digits).unwrap_or((word, ""));
    let factor = match unit {
        "ms" => 1,
        "s" => 1000,
        _ => 0,
    };
    let ms = number.parse::<u64>().ok().filter(|_| factor > 0).and_then(|number| number.checked_mul(factor));
    ms.ok_or_else(|| invalid(format!("'{word}' is not the length of a burst: write 500ms or 2s")))
}

fn invalid(what: impl Into<String>) -> Error {
    Error::new(Kind::Invalid, what)
}

#[cfg(test)]
mod test {
    use super::*;

    fn refused(text: &str) -> String {
        let error = text.parse::<Limits>().unwrap_err();
        format!("{}; {}", error.message, error.advice.unwrap_or_default())
    }

    #[test]
    fn limits_are_read_as_they_are_written() {
        let text = "iops=5000,read-iops=100,write-iops=4000,bandwidth=104857600,read-bandwidth=65536,burst=2000ms";
        let limits: Limits = text.parse().unwrap();
        assert_eq!(limits.to_string(), text);
        assert_eq!((limits.iops, limits.read_iops, limits.write_iops), (Some(5000), Some(100), Some(4000)));
        assert_eq!((limits.bandwidth, limits.read_bandwidth), (Some(100 << 20), Some(64 << 10)));
        assert_eq!("iops=10,burst=2s".parse::<Limits>().unwrap().burst_ms(), 2000);
        let shown = "5000 iops, 100 read iops, 4000 write iops, 100 MiB/s, 64 KiB/s read, burst 2000 ms";
        assert_eq!((limits.shown().as_str(), Limits::default().shown().as_str()), (shown, ""));
        assert_eq!(
            "bandwidth=100M".parse::<Limits>().unwrap(),
            Limits { bandwidth: Some(100 << 20), ..Limits::default() }
        );
    }

    #[test]
    fn limits_that_would_stop_a_guest_are_refused() {
        assert!(refused("iops=0").contains("would stop the disk; leave it out for no limit"));
        assert!(refused("read-bandwidth=0").contains("read-bandwidth would stop the disk"));
        assert!(refused("iops=9").contains("give 10 to"));
        assert!(refused("bandwidth=100").contains("give 64 KiB per second to"));
        assert!(refused("iops=10,burst=0s").contains("could not be reached"));
    }

    #[test]
    fn contradictory_limits_are_refused() {
        assert!(refused("iops=100,read-iops=101").contains("read-iops is 101, more than iops, which is 100"));
        assert!(refused("bandwidth=1M,write-bandwidth=2M").contains("2 MiB per second, more than bandwidth"));
        assert!(refused("burst=1s").contains("no limit"));
        assert!(refused("iops=100,burst=2h").contains("write 500ms or 2s"));
        assert!(refused("iops=100,burst=3601s").contains("longer than an hour"));
        assert!(refused("iops=100,iops=200").contains("iops is given twice"));
        assert!("iops=100,read-iops=100".parse::<Limits>().is_ok());
    }

    #[test]
    fn words_that_are_no_limits_are_refused_with_those_that_are() {
        assert!(refused("iops").contains("'iops' is not a limit; write LIMIT=NUMBER"));
        assert!(refused("latency=5").contains("iops, read-iops, write-iops, bandwidth"));
        assert!(refused("iops=many").contains("whole number"));
        assert!(refused("bandwidth=1MB").contains("use 1M, which is 1MiB"));
        assert!(refused("iops=99999999999999999999").contains("whole number"));
        assert!(refused("").contains("not a limit"));
    }
}
