//! A recorded stream of requests: when each came, what it was, where, and how long it took. It never has data.
//!
//! A line of JSON says what it is, and one more stands for each request, in the order in which they came. The first
//! line has their number: a recording that was cut off is not taken for a shorter one.

use std::io::{self, BufRead, Write};

use serde::{Deserialize, Serialize};

use crate::layout::{Kind, Outcome};
use crate::snapshot::Record;

/// The version of the lines. Others are not read.
const VERSION: u64 = 1;
/// Requests of a recording: half a GiB of memory to replay them.
const COUNT_MAX: u64 = 1 << 24;
/// Bytes of a line: an object of a dozen short fields has fewer.
const LINE_MAX: u64 = 4096;

/// A request of a recording.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Recorded {
    /// When it came, in nanoseconds after the first.
    pub at_ns: u64,
    /// The kind of the request.
    pub kind: Kind,
    /// Whether the request succeeded.
    pub done: bool,
    /// Where it began, in bytes.
    pub offset: u64,
    /// How many bytes it was for.
    pub size: u64,
    /// How long it took.
    pub took_ns: u64,
}

/// Why a recording was not read.
#[derive(Debug, thiserror::Error)]
pub enum RecordingError {
    /// The file cannot be read.
    #[error("cannot read it")]
    Failed(#[from] io::Error),
    /// It was never written by `tapline trace --record`.
    #[error("it is not a recording: `tapline trace DISK --record FILE` makes one")]
    NotARecording,
    /// It was written by another version.
    #[error("it is of version {0}, and this program reads version {VERSION}: record the disk again")]
    Version(u64),
    /// It ends early.
    #[error("it is cut off: it has {found} of {count} requests")]
    CutOff {
        /// Requests that are there.
        found: u64,
        /// Requests that its first line promises.
        count: u64,
    },
    /// It has more requests than its first line says, or than can be replayed.
    #[error("it has more than {0} requests")]
    TooMany(u64),
    /// A line makes no sense.
    #[error("it is damaged: line {line} {why}")]
    Damaged {
        /// Which line, counted from 1.
        line: u64,
        /// What is wrong with it.
        why: &'static str,
    },
}

/// The first line.
#[derive(Serialize, Deserialize)]
struct Head {
    tapline_recording: u64,
    requests: u64,
    /// Requests that came in that time, and are missing.
    lost: u64,
}

/// Any other line.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Line<'a> {
    at_ns: u64,
    operation: &'a str,
    offset: u64,
    size: u64,
    took_ns: u64,
    outcome: &'a str,
}

/// Writes a recording of these requests. `lost` is the number of requests that are missing.
pub fn write_recording(out: &mut dyn Write, records: &[Record], lost: u64) -> io::Result<()> {
    let mut all: Vec<&Record> = records.iter().collect();
    all.sort_by_key(|record| record.seen);
    let begun = all.first().map_or(0, |record| record.seen);
    let head = Head { tapline_recording: VERSION, requests: all.len() as u64, lost };
    line(out, &head)?;
    for record in all {
        let operation = record.kind.name();
        let (at_ns, offset, size, took_ns) = (record.seen - begun, record.at, record.len, record.whole());
        line(out, &Line { at_ns, operation, offset, size, took_ns, outcome: record.outcome.name() })?;
    }
    Ok(())
}

fn line(out: &mut dyn Write, value: &impl Serialize) -> io::Result<()> {
    serde_json::to_writer(&mut *out, value)?;
    out.write_all(b"\n")
}

/// Reads a recording: its requests in order, and how many more came.
pub fn read_recording(from: &mut dyn BufRead) -> Result<(Vec<Recorded>, u64), RecordingError> {
    let mut bytes = Vec::new();
    if !next_line(from, &mut bytes)? {
        return Err(RecordingError::NotARecording);
    }
    let head: Head = serde_json::from_slice(&bytes).map_err(|_| RecordingError::NotARecording)?;
    if head.tapline_recording != VERSION {
        return Err(RecordingError::Version(head.tapline_recording));
    }
    if head.requests > COUNT_MAX {
        return Err(RecordingError::TooMany(COUNT_MAX));
    }
    let mut all: Vec<Recorded> = Vec::new();
    while next_line(from, &mut bytes)? {
        let found = all.len() as u64;
        if found == head.requests {
            return Err(RecordingError::TooMany(head.requests));
        }
        let damaged = |why| match bytes.last() {
            Some(b'\n') => RecordingError::Damaged { line: found + 2, why },
            _ => RecordingError::CutOff { found, count: head.requests },
        };
        let request = parse(&bytes).map_err(damaged)?;
        if all.last().is_some_and(|last| last.at_ns > request.at_ns) {
            return Err(damaged("came before the one above it"));
        }
        all.push(request);
    }
    match all.len() as u64 {
        found if found < head.requests => Err(RecordingError::CutOff { found, count: head.requests }),
        _ => Ok((all, head.lost)),
    }
}

/// Reads a line with its end. Whether there was one.
fn next_line(from: &mut dyn BufRead, bytes: &mut Vec<u8>) -> io::Result<bool> {
    bytes.clear();
    Ok(io::Read::take(from, LINE_MAX).read_until(b'\n', bytes)? > 0)
}

fn parse(line: &[u8]) -> Result<Recorded, &'static str> {
    let Line { at_ns, operation, offset, size, took_ns, outcome } =
        serde_json::from_slice(line).map_err(|_| "is not a request")?;
    let kind = Kind::ALL.into_iter().find(|kind| kind.name() == operation).ok_or("has an unknown operation")?;
    let done = outcome == Outcome::Done.name();
    if !done && !Outcome::ERRORS.iter().any(|error| error.name() == outcome) {
        return Err("has an unknown outcome");
    }
    if offset.checked_add(size).is_none() {
        return Err("lies beyond every disk");
    }
    if kind == Kind::Flush && size > 0 {
        return Err("is a flush with a size");
    }
    Ok(Recorded { at_ns, kind, done, offset, size, took_ns })
}

#[cfg(test)]
mod test {
    use super::*;

    const HEAD: &str = "{\"tapline_recording\":1,\"requests\":2,\"lost\":3}\n";

    fn read(text: &str) -> Result<(Vec<Recorded>, u64), RecordingError> {
        read_recording(&mut text.as_bytes())
    }

    fn written() -> String {
        let stages = [10, 0, 0, 0, 100, 0, 5];
        let read = Record {
            number: 7,
            kind: Kind::Read,
            outcome: Outcome::Done,
            at: 4096,
            len: 512,
            seen: 1_000,
            stages,
            shown: 1_115,
        };
        let flush = Record { kind: Kind::Flush, outcome: Outcome::Failed, at: 0, len: 0, seen: 900, ..read };
        let mut out = Vec::new();
        write_recording(&mut out, &[read, flush], 3).unwrap();
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn what_was_written_is_read_in_the_order_in_which_it_came() {
        let (all, lost) = read(&written()).unwrap();
        let flush = Recorded { at_ns: 0, kind: Kind::Flush, done: false, offset: 0, size: 0, took_ns: 115 };
        let read = Recorded { at_ns: 100, kind: Kind::Read, done: true, offset: 4096, size: 512, took_ns: 115 };
        assert_eq!((all, lost), (vec![flush, read], 3));
        let mut none = Vec::new();
        write_recording(&mut none, &[], 0).unwrap();
        assert_eq!(read_recording(&mut none.as_slice()).unwrap(), (Vec::new(), 0));
    }

    #[test]
    fn a_recording_that_is_cut_off_anywhere_is_refused() {
        let whole = written();
        // Without its last end of line it is complete.
        for len in 0..whole.len() - 1 {
            let refused = read(&whole[..len]);
            assert!(refused.is_err(), "{len} bytes are taken for a recording: {refused:?}");
        }
        let lines: Vec<&str> = whole.lines().collect();
        let cut = read(&format!("{}\n{}\n", lines[0], lines[1])).unwrap_err();
        assert_eq!(cut.to_string(), "it is cut off: it has 1 of 2 requests");
        let cut = read(&whole[..whole.len() - 2]).unwrap_err();
        assert_eq!(cut.to_string(), "it is cut off: it has 1 of 2 requests");
    }

    #[test]
    fn what_is_wrong_with_a_recording_is_said() {
        let good =
            "{\"at_ns\":5,\"operation\":\"read\",\"offset\":0,\"size\":512,\"took_ns\":9,\"outcome\":\"done\"}\n";
        assert_eq!(read(&format!("{HEAD}{good}{good}")).unwrap().0.len(), 2);
        let long = "x".repeat(5000);
        for (text, said) in [
            (String::new(), "not a recording"),
            ("{\"at_ns\":0}\n".into(), "not a recording"),
            (HEAD.replace(":1,", ":2,"), "of version 2"),
            (HEAD.replace(":2,", ":99999999,"), "more than 16777216"),
            (format!("{HEAD}{good}{good}{good}"), "more than 2 requests"),
            (format!("{HEAD}{good}{}", good.replace("read", "erase")), "line 3 has an unknown operation"),
            (format!("{HEAD}{good}{}", good.replace("done", "lucky")), "line 3 has an unknown outcome"),
            (format!("{HEAD}{good}{}", good.replace(":5", ":4")), "line 3 came before the one above it"),
            (format!("{HEAD}{}", good.replace("read", "flush")), "line 2 is a flush with a size"),
            (format!("{HEAD}{}", good.replace("\"offset\":0", "\"offset\":-1")), "line 2 is not a request"),
            (format!("{HEAD}{}", good.replace("offset\":0", "offset\":18446744073709551615")), "beyond every disk"),
            (format!("{HEAD}\u{0}\u{1}{good}"), "line 2 is not a request"),
            (format!("{HEAD}{long}\n{good}"), "cut off"),
        ] {
            let refused = read(&text).unwrap_err().to_string();
            assert!(refused.contains(said), "'{refused}' is not '{said}'");
        }
    }
}
