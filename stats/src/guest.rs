//! The protocol between the host and `tapline-guest`, the reader in a guest: a question and its answer, in lines.
//!
//! ```text
//! disks 17
//!                begin 17
//!                uptime 123.45 200.00
//!                disk 9b1deb4d3b7d4bad9bdd 254 0 vda 1 2 3 …
//!                end 17
//! ```
//!
//! The number tells an answer from one to an earlier question. It knows nothing about the connection. The guest is
//! hostile. Invariant: whatever it says, what is kept of it is bounded, and so is what is listened to.

use thiserror::Error;

use crate::kernel::DeviceLine;

/// Maximum length of an answer in bytes: 255 disks need less than half of it.
const ANSWER_MAX: usize = 64 << 10;
/// Bytes in front of the answer that are listened to: late answers to earlier questions.
const BEFORE_MAX: usize = 4 * ANSWER_MAX;

/// The question with this number.
pub fn question(number: u64) -> String {
    format!("disks {number}\n")
}

/// The answer of a guest.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GuestAnswer {
    /// For how long its kernel runs, in nanoseconds: its clock for differences.
    pub uptime_ns: u64,
    /// Serial numbers of disks, and what its kernel counts for them.
    pub disks: Vec<(String, DeviceLine)>,
}

/// Why an answer is invalid.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum BadAnswer {
    /// There is no end of it.
    #[error("the guest's answer is longer than {} KiB", ANSWER_MAX >> 10)]
    TooLong,
    /// A line is no answer to the question.
    #[error("the guest's answer has a line that means nothing")]
    Line,
    /// The guest says nothing of its clock.
    #[error("the guest's answer has no uptime")]
    NoUptime,
}

/// Why an answer has nothing about a disk.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
pub enum NotThere {
    /// None of the disks has the serial number.
    #[error("the guest has no disk with its serial number")]
    None,
    /// One of them may be it.
    #[error("several disks of the guest have its serial number")]
    Several,
}

impl GuestAnswer {
    /// The disk with this serial number.
    pub fn disk(&self, serial: &str) -> Result<&DeviceLine, NotThere> {
        let mut found = self.disks.iter().filter(|(of, _)| of == serial).map(|(_, line)| line);
        match (found.next(), found.next()) {
            (Some(line), None) => Ok(line),
            (None, _) => Err(NotThere::None),
            (Some(_), Some(_)) => Err(NotThere::Several),
        }
    }
}

/// Listens for the answer to a question.
#[derive(Debug)]
pub struct Listening {
    number: u64,
    /// The part of a line that was received.
    line: Vec<u8>,
    heard: usize,
    answer: Option<Begun>,
}

#[derive(Debug, Default)]
struct Begun {
    len: usize,
    uptime_ns: Option<u64>,
    disks: Vec<(String, DeviceLine)>,
}

impl Listening {
    /// For the answer to the question with this number.
    pub fn to(number: u64) -> Listening {
        Listening { number, line: Vec::new(), heard: 0, answer: None }
    }

    /// Takes what has come; the answer, once it is whole.
    pub fn take(&mut self, bytes: &[u8]) -> Result<Option<GuestAnswer>, BadAnswer> {
        for byte in bytes {
            self.heard += 1;
            let len = self.answer.as_ref().map_or(0, |answer| answer.len);
            if self.heard > BEFORE_MAX + ANSWER_MAX || len > ANSWER_MAX || self.line.len() > ANSWER_MAX {
                return Err(BadAnswer::TooLong);
            }
            if *byte != b'\n' {
                self.line.push(*byte);
                continue;
            }
            let line = std::mem::take(&mut self.line);
            // A terminal may have put a carriage return there.
            let line = String::from_utf8_lossy(&line);
            if let Some(answer) = self.line(line.trim_end_matches('\r'))? {
                return Ok(Some(answer));
            }
        }
        Ok(None)
    }

    fn line(&mut self, line: &str) -> Result<Option<GuestAnswer>, BadAnswer> {
        let (word, rest) = line.split_once(' ').unwrap_or((line, ""));
        let is_its = rest.parse() == Ok(self.number);
        if word == "begin" && is_its {
            self.answer = Some(Begun::default());
            return Ok(None);
        }
        let Some(answer) = &mut self.answer else { return Ok(None) };
        answer.len += line.len() + 1;
        match word {
            "end" if is_its => {
                let Begun { uptime_ns, disks, .. } = std::mem::take(answer);
                let uptime_ns = uptime_ns.ok_or(BadAnswer::NoUptime)?;
                return Ok(Some(GuestAnswer { uptime_ns, disks }));
            }
            "uptime" => answer.uptime_ns = Some(uptime(rest).ok_or(BadAnswer::Line)?),
            "disk" => {
                let (serial, line) = rest.split_once(' ').ok_or(BadAnswer::Line)?;
                answer.disks.push((serial.to_owned(), DeviceLine::parse(line).ok_or(BadAnswer::Line)?));
            }
            _ => return Err(BadAnswer::Line),
        }
        Ok(None)
    }
}

/// The first number of /proc/uptime: seconds with two decimals.
fn uptime(words: &str) -> Option<u64> {
    let (seconds, hundredths) = words.split(' ').next()?.split_once('.')?;
    let is_number = |word: &str| !word.is_empty() && word.bytes().all(|byte| byte.is_ascii_digit());
    if !is_number(seconds) || !is_number(hundredths) || hundredths.len() != 2 {
        return None;
    }
    let hundredths: u64 = hundredths.parse().ok()?;
    seconds.parse::<u64>().ok()?.checked_mul(100)?.checked_add(hundredths)?.checked_mul(10_000_000)
}

#[cfg(test)]
mod test {
    use super::*;

    const LINE: &str = "254 0 vda 1 2 3 4 5 6 7 8 9 10 11 0 0 0 0 0 0";

    fn heard(text: &str) -> Result<Option<GuestAnswer>, BadAnswer> {
        Listening::to(17).take(text.as_bytes())
    }

    #[test]
    fn an_answer_is_the_one_to_its_question_however_it_comes() {
        let text = format!(
            "ready\n\u{fffd}\nbegin 16\nuptime 1.00 1.00\nend 16\nbegin 17\nuptime 123.45 200.00\ndisk abc {LINE}\n\
             disk two {LINE}\ndisk two {LINE}\r\nend 17\nmore"
        );
        let whole = heard(&text).unwrap().unwrap();
        assert_eq!(whole.uptime_ns, 123_450_000_000);
        assert_eq!(whole.disk("abc").unwrap().name, "vda");
        assert_eq!((whole.disk("ab"), whole.disk("two")), (Err(NotThere::None), Err(NotThere::Several)));
        let mut listening = Listening::to(17);
        let answers: Vec<_> = text.bytes().filter_map(|byte| listening.take(&[byte]).transpose()).take(1).collect();
        assert_eq!(answers, [Ok(whole)]);
        assert_eq!(question(17), "disks 17\n");
    }

    #[test]
    fn an_answer_that_was_cut_off_by_another_begins_anew() {
        let text = format!("begin 17\nuptime 1.00 1.00\ndisk a {LINE}\nbegin 17\nuptime 2.00 1.00\nend 17\n");
        assert_eq!(heard(&text), Ok(Some(GuestAnswer { uptime_ns: 2_000_000_000, disks: Vec::new() })));
    }

    #[test]
    fn rubbish_is_no_answer() {
        for (text, why) in [
            ("begin 17\nend 17\n", BadAnswer::NoUptime),
            ("begin 17\nrubbish\n", BadAnswer::Line),
            ("begin 17\n\n", BadAnswer::Line),
            ("begin 17\nuptime\n", BadAnswer::Line),
            ("begin 17\nuptime 99999999999999999999.00\n", BadAnswer::Line),
            ("begin 17\nuptime 18446744073709551615.00\n", BadAnswer::Line),
            ("begin 17\nuptime -1.00 0\n", BadAnswer::Line),
            ("begin 17\nuptime 1.5 0\n", BadAnswer::Line),
            ("begin 17\ndisk\n", BadAnswer::Line),
            ("begin 17\ndisk a 254 0 vda 1 2\n", BadAnswer::Line),
            ("begin 17\nend 18\n", BadAnswer::Line),
        ] {
            assert_eq!(heard(text), Err(why), "{text:?}");
        }
        assert_eq!(heard("begin 18\nuptime 1.00 1.00\nend 18\n"), Ok(None));
        assert_eq!(heard("begin 17\nuptime 1.00 1.00\nend 1"), Ok(None));
    }

    #[test]
    fn what_never_ends_is_given_up() {
        let endless = |first: &str, again: &str| {
            let mut listening = Listening::to(17);
            listening.take(first.as_bytes()).unwrap();
            (0..10_000_000 / again.len()).find_map(|_| listening.take(again.as_bytes()).err())
        };
        assert_eq!(endless("", "no end of a line"), Some(BadAnswer::TooLong));
        assert_eq!(endless("", "line after line\n"), Some(BadAnswer::TooLong));
        assert_eq!(endless("begin 17\n", &format!("disk a {LINE}\n")), Some(BadAnswer::TooLong));
        assert_eq!(endless("begin 17\n", "begin 17\n"), Some(BadAnswer::TooLong));
        assert_eq!(endless("begin 17\n", "no end of a line"), Some(BadAnswer::TooLong));
    }
}
