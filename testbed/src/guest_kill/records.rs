//! The records that the guest has reported as fsynced, and whether an image contains them.
//!
//! The format is defined by `testbed/guest/jobs/survive.sh`. Invariant checked: each reported record is in its slot,
//! complete, or a later one that reuses the slot; and the first block, which each record overwrites, contains the last
//! or a later one.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::{Duration, Instant};

/// Number of slots for records, which are reused in turn.
pub const SLOTS: u64 = 16_384;

const RECORD_LEN: usize = 4096;

/// The reported records.
#[derive(Debug)]
pub struct Records {
    /// Number of the last record.
    pub announced: u64,
    at: Instant,
    /// The longest time between two records since an action, and whether there were any.
    longest: Duration,
    heard: bool,
}

impl Records {
    pub fn new() -> Self {
        Self { announced: 0, at: Instant::now(), longest: Duration::ZERO, heard: false }
    }

    /// Records a report; an error if it is out of order.
    pub fn announce(&mut self, number: &str) -> Result<(), String> {
        let expected = self.announced + 1;
        if number.parse() != Ok(expected) {
            return Err(format!("the guest has fsynced record {number}, after {}", self.announced));
        }
        self.announced = expected;
        self.longest = self.longest.max(self.at.elapsed());
        (self.at, self.heard) = (Instant::now(), true);
        Ok(())
    }

    /// Called at a kill or replacement: returns the longest wait of the guest since the previous one, or `None` if it
    /// is still waiting.
    pub fn waited(&mut self) -> Option<Duration> {
        if !self.heard {
            return None;
        }
        self.heard = false;
        Some(std::mem::take(&mut self.longest))
    }

    /// Time since the last report.
    pub fn silent(&self) -> Duration {
        self.at.elapsed()
    }

    /// Whether the raw `image` contains all reported records.
    pub fn look_for_all(&self, image: &Path) -> io::Result<Result<(), String>> {
        let file = File::open(image)?;
        if let Err(wrong) = self.judge(&file, 0, self.announced, 1)? {
            return Ok(Err(format!("the first block: {wrong}")));
        }
        for number in self.announced.saturating_sub(SLOTS - 1).max(1)..=self.announced {
            let slot = number % SLOTS + 1;
            if let Err(wrong) = self.judge(&file, slot, number, SLOTS)? {
                return Ok(Err(format!("record {number} of {}, in block {slot}: {wrong}", self.announced)));
            }
        }
        Ok(Ok(()))
    }

    /// Whether block `at` contains record `number` or one that is later by a multiple of `step`.
    fn judge(&self, file: &File, at: u64, number: u64, step: u64) -> io::Result<Result<(), String>> {
        let mut block = [0; RECORD_LEN];
        file.read_exact_at(&mut block, at * RECORD_LEN as u64)?;
        // One more may have been written when the guest's power was cut.
        let mut possible = (number..=self.announced + 1).step_by(usize::try_from(step).unwrap_or(usize::MAX));
        if self.announced == 0 || possible.any(|number| block == record(number)) {
            return Ok(Ok(()));
        }
        let begin: String = String::from_utf8_lossy(&block).chars().take(20).collect();
        Ok(Err(format!("it begins with {begin:?}, and {number} was fsynced")))
    }
}

/// The content of a record.
fn record(number: u64) -> [u8; RECORD_LEN] {
    let line = format!("record {number}\n");
    let mut content = [0; RECORD_LEN];
    for (byte, says) in content.iter_mut().zip(line.bytes().cycle()) {
        *byte = says;
    }
    content
}

#[cfg(test)]
mod test {
    use super::*;

    /// An image in which this number of records was written, and all but the last reported.
    fn image(written: u64) -> (tempfile::NamedTempFile, Records) {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len((SLOTS + 1) * 4096).unwrap();
        let mut records = Records::new();
        for number in 1..=written {
            file.as_file().write_all_at(&record(number), (number % SLOTS + 1) * 4096).unwrap();
            file.as_file().write_all_at(&record(number), 0).unwrap();
            if number < written {
                records.announce(&number.to_string()).unwrap();
            }
        }
        (file, records)
    }

    #[test]
    fn reported_records_are_found_in_reused_slots() {
        for written in [1, 5, SLOTS + 3] {
            let (file, records) = image(written);
            assert_eq!(records.look_for_all(file.path()).unwrap(), Ok(()), "{written}");
        }
    }

    #[test]
    fn a_lost_torn_or_old_record_is_detected() {
        let (file, records) = image(5);
        file.as_file().write_all_at(&[0; 4096], 4 * 4096).unwrap();
        assert!(records.look_for_all(file.path()).unwrap().unwrap_err().starts_with("record 3 of 4, in block 4: "));
        let (file, records) = image(5);
        file.as_file().write_all_at(b"!", 4 * 4096 + 4095).unwrap();
        assert!(records.look_for_all(file.path()).unwrap().is_err());
        let (file, records) = image(5);
        file.as_file().write_all_at(&record(3), 0).unwrap();
        assert!(records.look_for_all(file.path()).unwrap().unwrap_err().starts_with("the first block: "));
        let (file, records) = image(SLOTS + 3);
        file.as_file().write_all_at(&record(2), 3 * 4096).unwrap();
        assert!(records.look_for_all(file.path()).unwrap().is_err());
    }

    #[test]
    fn records_are_announced_one_after_the_other() {
        let mut records = Records::new();
        assert_eq!(records.waited(), None);
        records.announce("1").unwrap();
        assert!(records.waited().is_some());
        assert_eq!(records.waited(), None);
        assert!(records.announce("3").is_err());
    }
}
