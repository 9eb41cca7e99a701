//! Devices that stand for kinds of storage. Their figures are of no product: each kind has what is typical of it, so
//! that what suits one does not suit another.

use std::fmt;
use std::str::FromStr;

use crate::model::Spec;

const US: u64 = 1_000;
const MS: u64 = 1_000_000;
const MB: u64 = 1_000_000;

/// A kind of storage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Preset {
    /// A drive of many channels, each request being served by one of them: much in flight is fast, whatever its sizes.
    Nvme,
    /// Some channels behind a link of 6 Gbit/s, and a controller that takes its time for each request.
    SataSsd,
    /// One head: what is not in order costs a seek, and each request a part of a rotation.
    Disk,
    /// Some spindles behind a controller with a cache, in stripes.
    Array,
}

impl Preset {
    /// All presets, the fastest first.
    pub const ALL: [Preset; 4] = [Preset::Nvme, Preset::SataSsd, Preset::Disk, Preset::Array];

    /// The name of the preset in `model:NAME`.
    pub fn word(self) -> &'static str {
        match self {
            Preset::Nvme => "nvme",
            Preset::SataSsd => "sata-ssd",
            Preset::Disk => "disk",
            Preset::Array => "array",
        }
    }

    /// The parameters of the model.
    pub fn spec(self) -> Spec {
        match self {
            Preset::Nvme => Spec {
                channels: 64,
                stripe: 8 << 10,
                width: 1,
                latency: 70 * US,
                command: 900,
                access: 0,
                seek: 0,
                channel_rate: 1_700 * MB,
                link_rate: 2_600 * MB,
                sync: 15 * US,
            },
            Preset::SataSsd => Spec {
                channels: 8,
                stripe: 16 << 10,
                width: 4,
                latency: 60 * US,
                command: 11 * US,
                access: 0,
                seek: 0,
                channel_rate: 150 * MB,
                link_rate: 540 * MB,
                sync: MS,
            },
            Preset::Disk => Spec {
                channels: 1,
                stripe: 1 << 40,
                width: 1,
                latency: 0,
                command: 30 * US,
                access: 300 * US,
                seek: 8 * MS,
                channel_rate: 180 * MB,
                link_rate: 540 * MB,
                sync: 8 * MS,
            },
            Preset::Array => Spec {
                channels: 12,
                stripe: 64 << 10,
                width: 4,
                latency: 150 * US,
                command: 12 * US,
                access: 60 * US,
                seek: 2 * MS,
                channel_rate: 160 * MB,
                link_rate: 1_100 * MB,
                sync: 100 * US,
            },
        }
    }
}

impl FromStr for Preset {
    type Err = String;

    fn from_str(word: &str) -> Result<Preset, String> {
        let known = Preset::ALL.into_iter().find(|preset| preset.word() == word);
        known.ok_or_else(|| {
            let words = Preset::ALL.map(Preset::word).join(", ");
            format!("'{word}' is no kind of storage that is known here; use one of {words}")
        })
    }
}

impl fmt::Display for Preset {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.word())
    }
}

#[cfg(test)]
mod test {
    use super::*;
    use crate::load::{Load, Pattern, Policy, throughput};

    fn speed(preset: Preset, size: u64, depth: usize, split: Option<u64>) -> u64 {
        let load = Load { size: size << 10, depth, pattern: Pattern::Random, write: false };
        throughput(preset.spec(), load, Policy { split: split.map(|kib| kib << 10), merge: None })
    }

    #[test]
    fn on_nvme_many_small_requests_are_twice_as_fast_as_one_large_one() {
        let (large, small) = (speed(Preset::Nvme, 512, 1, None), speed(Preset::Nvme, 8, 64, None));
        assert!((large * 18 / 10..large * 22 / 10).contains(&small), "{large} {small}");
    }

    #[test]
    fn on_a_rotating_disk_splitting_loses_badly() {
        let (whole, split) = (speed(Preset::Disk, 512, 1, None), speed(Preset::Disk, 512, 1, Some(8)));
        assert!(split * 2 < whole, "{whole} {split}");
    }

    #[test]
    fn an_array_gains_something_by_splitting_and_loses_by_splitting_too_much() {
        let [whole, split, crumbs] = [None, Some(64), Some(4)].map(|split| speed(Preset::Array, 1024, 1, split));
        assert!(split > whole * 105 / 100 && crumbs < split, "{whole} {split} {crumbs}");
    }

    #[test]
    fn words_and_presets_belong_together() {
        assert!(Preset::ALL.iter().all(|preset| preset.word().parse() == Ok(*preset)));
        assert!("tape".parse::<Preset>().unwrap_err().contains("sata-ssd"));
    }
}
