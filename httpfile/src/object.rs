//! An object: opened, and read by ranges.
//!
//! Invariants: every byte that is returned is of the state that was opened, as far as its server's validator tells; a
//! failure that is not repaired by repeating the request is remembered, and all later reads fail with it.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use crate::client::{Answer, Client, stopped};
use crate::error::{Fault, HttpError, HttpErrorKind};
use crate::identity::{Identity, Part, Validator};
use crate::url::Url;

/// The bytes that are requested when it is opened: the metadata of most images is there.
pub(crate) const FIRST: u64 = 1 << 20;
/// The largest part that is requested at once.
pub(crate) const PART_MAX: u64 = 4 << 20;
/// As the largest disk: no more can be addressed.
const LEN_MAX: u64 = 1 << 60;
/// Pauses between attempts, unless the server names another one.
const PAUSE_MIN: Duration = Duration::from_millis(100);
const PAUSE_MAX: Duration = Duration::from_secs(5);
/// How often a pause looks at the end of the process.
const LOOK: Duration = Duration::from_millis(50);
/// How long opening waits for a server that is busy.
const OPENING: Duration = Duration::from_secs(10);

/// An open object. Several threads may read it.
#[derive(Debug)]
pub struct Object {
    client: Arc<Client>,
    url: Url,
    /// Where the URL was redirected to, until that place no longer works: a redirection may have an expiry date.
    place: Mutex<Option<Url>>,
    identity: Identity,
    broken: OnceLock<HttpError>,
    /// A loss was reported, and no success since.
    is_lost: AtomicBool,
}

impl Object {
    /// Opens the object at a URL; also returns its first bytes.
    pub fn open(client: &Arc<Client>, url: &Url) -> Result<(Object, Vec<u8>), HttpError> {
        client.check(url)?;
        let patience = client.options.patience.map_or(OPENING, |patience| patience.min(OPENING));
        let (identity, first, place) = retry(client, url, Some(patience), &mut |_| begin(client, url), &mut |fault| {
            // A server that is not there is reported at once; one that is busy has said so.
            matches!(fault, Fault::Transient { wait: Some(_), .. })
        })?;
        if !identity.validator.is_strong() {
            (client.options.report)(&format!(
                "{url}: its server has no strong ETag for it: it is recognized by its date and length, and a change \
                 within one second is not noticed"
            ));
        }
        let place = Mutex::new((place != *url).then_some(place));
        let (broken, is_lost) = Default::default();
        Ok((Object { client: Arc::clone(client), url: url.clone(), place, identity, broken, is_lost }, first))
    }

    /// The URL with which it was opened.
    pub fn url(&self) -> &Url {
        &self.url
    }

    /// Its length and validator.
    pub fn identity(&self) -> &Identity {
        &self.identity
    }

    /// Its length in bytes.
    pub fn size(&self) -> u64 {
        self.identity.len
    }

    /// Why all reads fail, if they do.
    pub fn broken(&self) -> Option<&HttpError> {
        self.broken.get()
    }

    pub(crate) fn is_stopping(&self) -> bool {
        (self.client.options.stopping)()
    }

    /// Reads a range within the object of at most `PART_MAX` bytes.
    pub(crate) fn read(&self, range: Range<u64>) -> Result<Vec<u8>, HttpError> {
        if let Some(broken) = self.broken() {
            return Err(broken.clone());
        }
        let patience = self.client.options.patience;
        let read = retry(&self.client, &self.url, patience, &mut |_| self.read_once(&range), &mut |fault| {
            self.report_loss(fault);
            true
        });
        match read {
            Ok(bytes) => {
                if self.is_lost.swap(false, Ordering::Relaxed) {
                    (self.client.options.report)(&format!("{}: its server answers again", self.url));
                }
                Ok(bytes)
            }
            Err(error) => Err(self.broken.get_or_init(|| error).clone()),
        }
    }

    fn report_loss(&self, fault: &Fault) {
        if let Fault::Transient { why, .. } = fault {
            if !self.is_lost.swap(true, Ordering::Relaxed) {
                (self.client.options.report)(&format!("{}: {why}; trying again", self.url));
            }
        }
    }

    fn read_once(&self, range: &Range<u64>) -> Result<Vec<u8>, Fault> {
        let place = self.place.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let target = place.as_ref().unwrap_or(&self.url);
        let wanted = header_of(range);
        let answer = self.client.get(target, &[("range", &wanted), self.identity.validator.condition()])?;
        if answer.status.as_u16() != 206 {
            return Err(self.unless_moved(place.is_some(), answer));
        }
        answer.must_be_plain()?;
        let part = Part::of(&answer.headers)?;
        self.identity.validator.check(&answer.headers)?;
        if part.len != self.identity.len {
            let (was, is) = (self.identity.len, part.len);
            return Err(Fault::changed(format!("it has changed while it was read: it had {was} bytes and has {is}")));
        }
        if part.range != *range {
            return Err(another_range(&part.range, range));
        }
        let reached = answer.url.clone();
        let bytes = answer.exactly(in_memory(range), self.client.options.stopping)?;
        if reached != *target {
            *self.place.lock().unwrap_or_else(PoisonError::into_inner) = Some(reached);
        }
        Ok(bytes)
    }

    /// The fault of an answer without the bytes. A place to which the URL was redirected may have expired: the next
    /// attempt begins at the URL.
    fn unless_moved(&self, was_redirected: bool, answer: Answer) -> Fault {
        let fault = answer.fault();
        match &fault {
            Fault::Fatal { kind: HttpErrorKind::Missing, why, .. } if was_redirected => {
                *self.place.lock().unwrap_or_else(PoisonError::into_inner) = None;
                Fault::transient(why.clone())
            }
            Fault::Fatal { kind: HttpErrorKind::Refused, .. } if answer.status.as_u16() == 200 => {
                // A server that ignores the condition answers with all of a new object.
                self.identity.validator.check(&answer.headers).err().unwrap_or(fault)
            }
            _ => fault,
        }
    }
}

/// Requests the first bytes, which shows what the object is, and whether its server answers parts.
fn begin(client: &Client, url: &Url) -> Result<(Identity, Vec<u8>, Url), Fault> {
    let wanted = 0..FIRST;
    let answer = client.get(url, &[("range", &header_of(&wanted))])?;
    match answer.status.as_u16() {
        206 => {}
        // RFC 9110, 14.2: no range of an empty object can be satisfied.
        416 => return Err(Fault::refused("it is empty, or its server refuses ranges")),
        _ => return Err(answer.fault()),
    }
    answer.must_be_plain()?;
    let Part { range, len } = Part::of(&answer.headers)?;
    if range != (0..FIRST.min(len)) {
        return Err(another_range(&range, &wanted));
    }
    if len > LEN_MAX {
        return Err(Fault::refused(format!("it has {len} bytes, more than any disk")));
    }
    let Some(validator) = Validator::of(&answer.headers) else {
        return Err(Fault::refused(
            "its server gives neither a strong ETag nor Last-Modified: a change while it is read would not be noticed",
        )
        .advise("download it: curl -fLO URL; then use the file"));
    };
    let place = answer.url.clone();
    let first = answer.exactly(in_memory(&range), client.options.stopping)?;
    Ok((Identity { len, validator }, first, place))
}

/// Repeats a request while `again` permits it, no longer than `patience` after the first failure.
pub(crate) fn retry<T>(
    client: &Client,
    url: &Url,
    patience: Option<Duration>,
    attempt: &mut dyn FnMut(u32) -> Result<T, Fault>,
    again: &mut dyn FnMut(&Fault) -> bool,
) -> Result<T, HttpError> {
    let (mut pause, mut since) = (PAUSE_MIN, None);
    for attempts in 1.. {
        let fault = match attempt(attempts) {
            Ok(done) => return Ok(done),
            Err(_) if (client.options.stopping)() => stopped(),
            Err(fault) => fault,
        };
        let is_repeated = again(&fault);
        match fault {
            Fault::Fatal { kind, why, advice } => {
                let error = HttpError::new(url, kind, why);
                return Err(advice.into_iter().fold(error, HttpError::advise));
            }
            Fault::Transient { why, wait } => {
                let rest = wait.map_or(pause, |wait| wait.max(pause));
                let begun: Instant = *since.get_or_insert_with(Instant::now);
                let is_over = patience.is_some_and(|patience| begun.elapsed() + rest > patience);
                if is_over || !is_repeated {
                    return Err(given_up(url, &why, attempts, wait));
                }
                if !sleep(rest, client.options.stopping) {
                    return Err(HttpError::new(url, HttpErrorKind::Stopped, "interrupted by a signal"));
                }
                pause = (pause * 2).min(PAUSE_MAX);
            }
        }
    }
    unreachable!("the loop ends by a return")
}

fn given_up(url: &Url, why: &str, attempts: u32, wait: Option<Duration>) -> HttpError {
    let wait = wait.map_or_else(String::new, |wait| format!(", and requests a pause of {} s", wait.as_secs()));
    let attempts = if attempts > 1 { format!("; given up after {attempts} attempts") } else { String::new() };
    HttpError::new(url, HttpErrorKind::Away, format!("{why}{wait}{attempts}"))
        .advise("check the server and the network, then run the command again; --patience sets how long it is repeated")
}

/// Sleeps; returns false if the process is to end.
fn sleep(time: Duration, stopping: fn() -> bool) -> bool {
    let end = Instant::now() + time;
    loop {
        let left = end.saturating_duration_since(Instant::now());
        if stopping() || left.is_zero() {
            return !stopping();
        }
        std::thread::sleep(left.min(LOOK));
    }
}

fn header_of(range: &Range<u64>) -> String {
    format!("bytes={}-{}", range.start, range.end.saturating_sub(1))
}

fn another_range(found: &Range<u64>, wanted: &Range<u64>) -> Fault {
    let last = |range: &Range<u64>| range.end.saturating_sub(1);
    Fault::refused(format!(
        "its server answers with bytes {} to {} in place of {} to {}",
        found.start,
        last(found),
        wanted.start,
        last(wanted)
    ))
}

/// The length of a range of a few MiB.
fn in_memory(range: &Range<u64>) -> usize {
    usize::try_from(range.end.saturating_sub(range.start)).unwrap_or(usize::MAX)
}
