//! Names of virtual disks: `xvdb`, `hda1`, `d3p2`, or the number used in xenstore.
//!
//! It knows nothing about xenstore. Invariant: numbers and names are converted by one table, that of Xen's
//! xen-vbd-interface(7).

use std::fmt;
use std::str::FromStr;

/// How a number is put together for disks of one kind: `base | (disk - first) << shift | partition`.
struct Scheme {
    prefix: &'static str,
    base: u32,
    shift: u32,
    first: u32,
    /// Disks from `first` on.
    disks: u32,
}

/// xen-vbd-interface(7), "Concrete encoding in the VBD interface". For a disk, the first scheme that has room is the
/// one.
const SCHEMES: [Scheme; 5] = [
    Scheme { prefix: "xvd", base: 202 << 8, shift: 4, first: 0, disks: 16 },
    Scheme { prefix: "xvd", base: 1 << 28, shift: 8, first: 0, disks: 1 << 20 },
    Scheme { prefix: "sd", base: 8 << 8, shift: 4, first: 0, disks: 16 },
    Scheme { prefix: "hd", base: 3 << 8, shift: 6, first: 0, disks: 2 },
    Scheme { prefix: "hd", base: 22 << 8, shift: 6, first: 2, disks: 2 },
];

impl Scheme {
    fn number(&self, disk: u32, partition: u32) -> Option<u32> {
        let disk = disk.checked_sub(self.first).filter(|&disk| disk < self.disks)?;
        (partition < 1 << self.shift).then_some(self.base | disk << self.shift | partition)
    }

    fn parts(&self, number: u32) -> Option<(u32, u32)> {
        let rest = number.checked_sub(self.base)?;
        let disk = rest >> self.shift;
        (disk < self.disks).then_some((disk + self.first, rest & ((1 << self.shift) - 1)))
    }
}

/// A virtual disk of a guest, by its number in the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Vdev(u32);

impl Vdev {
    /// The disk of that number, whatever it means.
    pub fn of_number(number: u32) -> Vdev {
        Vdev(number)
    }

    /// The disk at this position among a guest's disks: xvda is 0.
    pub fn of_position(position: u8) -> Vdev {
        // Every position has a number: the second scheme has room for a million.
        Vdev(encoded("xvd", position.into(), 0).unwrap_or_default())
    }

    /// The number of the disk in xenstore.
    pub fn number(self) -> u32 {
        self.0
    }
}

/// Why a name is not that of a disk.
#[derive(Debug, PartialEq, Eq)]
pub struct NotAVdev(String);

impl std::error::Error for NotAVdev {}

impl fmt::Display for NotAVdev {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "'{}' is not a virtual disk; use xvda to xvdz and beyond, hda to hdd, sda to sdp, or a number",
            self.0
        )
    }
}

impl FromStr for Vdev {
    type Err = NotAVdev;

    fn from_str(word: &str) -> Result<Vdev, NotAVdev> {
        let named = plain_number(word).or_else(|| numbered_disk(word)).or_else(|| lettered_disk(word));
        named.map(Vdev).ok_or_else(|| NotAVdev(word.to_owned()))
    }
}

/// The name, or the number where there is none.
impl fmt::Display for Vdev {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for scheme in &SCHEMES {
            if let Some((disk, partition)) = scheme.parts(self.0) {
                write!(f, "{}{}", scheme.prefix, letters(disk))?;
                return if partition > 0 { write!(f, "{partition}") } else { Ok(()) };
            }
        }
        write!(f, "{}", self.0)
    }
}

/// A number as configuration files of old have it: decimal, 0x…, or octal with a 0 in front.
fn plain_number(word: &str) -> Option<u32> {
    let (digits, radix) = match (word.strip_prefix("0x"), word.strip_prefix('0')) {
        (Some(digits), _) => (digits, 16),
        (None, Some(digits)) if !digits.is_empty() => (digits, 8),
        _ => (word, 10),
    };
    digits.starts_with(|c: char| c.is_ascii_hexdigit()).then(|| u32::from_str_radix(digits, radix).ok()).flatten()
}

/// `d3` or `d3p2`: of Xen's own disks.
fn numbered_disk(word: &str) -> Option<u32> {
    let numbers = word.strip_prefix('d')?;
    let (disk, partition) = numbers.split_once('p').unwrap_or((numbers, "0"));
    encoded("xvd", decimal(disk)?, decimal(partition)?)
}

/// `xvda`, `sdb3`, `hdc`.
fn lettered_disk(word: &str) -> Option<u32> {
    let prefix = ["xvd", "sd", "hd"].into_iter().find(|prefix| word.starts_with(prefix))?;
    let rest = word.strip_prefix(prefix)?;
    let end = rest.find(|c: char| !c.is_ascii_lowercase()).unwrap_or(rest.len());
    let (letters, partition) = rest.split_at(end);
    let partition = if partition.is_empty() { 0 } else { decimal(partition).filter(|&partition| partition > 0)? };
    encoded(prefix, disk_of(letters)?, partition)
}

fn encoded(prefix: &str, disk: u32, partition: u32) -> Option<u32> {
    let schemes = SCHEMES.iter().filter(|scheme| scheme.prefix == prefix);
    schemes.filter_map(|scheme| scheme.number(disk, partition)).next()
}

fn decimal(digits: &str) -> Option<u32> {
    digits.bytes().all(|byte| byte.is_ascii_digit()).then(|| digits.parse().ok()).flatten()
}

/// a = 0, z = 25, aa = 26: counting in which there is no zero.
fn disk_of(letters: &str) -> Option<u32> {
    let after = letters
        .bytes()
        .try_fold(0u32, |disk, letter| disk.checked_mul(26)?.checked_add(u32::from(letter.checked_sub(b'a')?) + 1));
    after?.checked_sub(1)
}

fn letters(disk: u32) -> String {
    let mut backwards = Vec::new();
    let mut after = disk + 1;
    while after > 0 {
        let letter = u8::try_from((after - 1) % 26).unwrap_or_default();
        backwards.push(char::from(b'a' + letter));
        after = (after - 1) / 26;
    }
    backwards.iter().rev().collect()
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn names_map_to_the_numbers_of_xens_table() {
        let table = [
            ("xvda", 51712),
            ("xvdb", 51728),
            ("xvdp", 51952),
            ("xvdb2", 51730),
            ("xvdq", (1 << 28) | (16 << 8)),
            ("xvdaa", (1 << 28) | (26 << 8)),
            ("xvda16", (1 << 28) | 16),
            ("xvdtq37", (1 << 28) | (536 << 8) | 37),
            ("sda", 2048),
            ("sdb3", 2067),
            ("hda", 768),
            ("hdb", 832),
            ("hdc2", 5634),
            ("hdd", 5696),
        ];
        for (name, number) in table {
            assert_eq!(name.parse(), Ok(Vdev(number)), "{name}");
            assert_eq!(Vdev(number).to_string(), name, "{number}");
        }
    }

    #[test]
    fn disks_are_counted_as_linux_does() {
        for (position, name) in [(0, "xvda"), (15, "xvdp"), (16, "xvdq"), (25, "xvdz"), (26, "xvdaa"), (254, "xvdiu")] {
            assert_eq!(Vdev::of_position(position).to_string(), name);
        }
    }

    #[test]
    fn alternative_spellings_are_equal() {
        for (word, name) in [("d0", "xvda"), ("d0p0", "xvda"), ("d1p2", "xvdb2"), ("d536p37", "xvdtq37")] {
            assert_eq!(word.parse::<Vdev>(), name.parse(), "{word}");
        }
        for word in ["51712", "0xca00", "0145000"] {
            assert_eq!(word.parse(), Ok(Vdev(51712)), "{word}");
        }
        assert_eq!(Vdev::of_number(17).to_string(), "17");
    }

    #[test]
    fn names_beyond_any_scheme_are_refused() {
        for word in
            ["", "xvd", "xvda0", "xvda256", "sdq", "sda16", "hde", "hda64", "vda", "xvdA", "d", "dp1", "-1", "+1", "0x"]
        {
            assert!(word.parse::<Vdev>().is_err(), "{word}");
        }
        assert!("d1048576".parse::<Vdev>().is_err());
        assert!("xvdzzzzzzzzzz".parse::<Vdev>().is_err());
    }

    #[test]
    fn every_small_number_round_trips_through_its_name() {
        for number in 0..1 << 16 {
            let name = Vdev(number).to_string();
            assert_eq!(name.parse(), Ok(Vdev(number)), "{name}");
        }
    }
}
