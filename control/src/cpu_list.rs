//! A list of processors, as the kernel and `taskset` write it: `0-3,8`.

use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;

/// Processors have smaller numbers than this: as many as one call can name.
pub const CPUS_MAX: usize = 1024;

/// Processors, of which there is at least one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CpuList(BTreeSet<usize>);

impl CpuList {
    /// Their numbers, in order.
    pub fn numbers(&self) -> impl Iterator<Item = usize> {
        self.0.iter().copied()
    }

    /// Those with these numbers, if there are any.
    pub fn of(numbers: impl IntoIterator<Item = usize>) -> Option<CpuList> {
        let numbers: BTreeSet<usize> = numbers.into_iter().collect();
        (!numbers.is_empty()).then_some(CpuList(numbers))
    }
}

/// Text that is no such list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NotCpus(String);

impl fmt::Display for NotCpus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let end = CPUS_MAX - 1;
        write!(f, "'{}' is no list of processors: give numbers from 0 to {end} and ranges, as in 0-3,8", self.0)
    }
}

impl std::error::Error for NotCpus {}

impl FromStr for CpuList {
    type Err = NotCpus;

    fn from_str(text: &str) -> Result<CpuList, NotCpus> {
        let range = |part: &str| {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            let number = |word: &str| {
                let digits = !word.is_empty() && word.bytes().all(|byte| byte.is_ascii_digit());
                word.parse::<usize>().ok().filter(|number| digits && *number < CPUS_MAX)
            };
            let (first, last) = (number(first)?, number(last)?);
            (first <= last).then_some(first..=last)
        };
        let ranges: Option<Vec<_>> = text.split(',').map(range).collect();
        let ranges = ranges.ok_or_else(|| NotCpus(text.to_owned()))?;
        Ok(CpuList(ranges.into_iter().flatten().collect()))
    }
}

impl fmt::Display for CpuList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut rest = self.numbers().peekable();
        let mut comma = "";
        while let Some(first) = rest.next() {
            let mut last = first;
            while let Some(next) = rest.next_if_eq(&(last + 1)) {
                last = next;
            }
            write!(f, "{comma}{first}")?;
            if last > first {
                write!(f, "-{last}")?;
            }
            comma = ",";
        }
        Ok(())
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn a_list_is_read_and_written_as_the_kernel_does() {
        for (text, again) in [("0", "0"), ("0-3,8", "0-3,8"), ("8,0-1,2-3,3", "0-3,8"), ("5-5,7,9-10", "5,7,9-10")] {
            let list: CpuList = text.parse().unwrap();
            assert_eq!(list.to_string(), again);
            assert_eq!(again.parse::<CpuList>().unwrap(), list);
        }
        assert_eq!("0-1023".parse::<CpuList>().unwrap().numbers().count(), CPUS_MAX);
    }

    #[test]
    fn what_is_no_list_is_refused_by_name() {
        for text in ["", ",", "0,", "a", "-1", "3-1", "0-", "1024", "0-1024", "+1", " 1", "0--1", "0-1-2"] {
            let why = text.parse::<CpuList>().unwrap_err().to_string();
            assert_eq!(
                why,
                format!("'{text}' is no list of processors: give numbers from 0 to 1023 and ranges, as in 0-3,8")
            );
        }
        assert_eq!(CpuList::of([]), None);
    }
}
