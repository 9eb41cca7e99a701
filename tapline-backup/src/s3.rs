//! A store in a bucket of S3, or of another server that speaks its protocol: `s3://BUCKET[/PREFIX]`.
//!
//! The server and the key come from options, or from the environment as for Amazon's own tools ([`settings`]).
//! Requests, signatures and repeated attempts are those of the crate `object_store`. Knows nothing of what objects
//! contain.
//!
//! The contract of [`ObjectStore`], and what it rests on here:
//!
//! - An object is created by `If-None-Match: *`. A server that does not know this replaces objects without an error, so
//!   it is tried on an object of its own before the first object is created ([`S3::prove_creation`]).
//! - A server may answer a creation with a conflict although there is no such object: a creation that was under way has
//!   failed meanwhile. A name is reported as taken only if the object is found.
//! - A creation or deletion whose outcome is not known is repeated ([`S3::change`]). A repeated creation may find its
//!   own object: that is "exists", and callers compare the bytes.
//! - A bucket that is gone answers as an object that does not exist. The code in the answer tells them apart; an answer
//!   without a body makes us look for the bucket.
//! - An object is durable when the server has answered (S3's own guarantee; other servers: their documentation).

mod credentials;
mod http;
mod settings;

use std::future::Future;
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use arguments::backup::S3Access;
use backup::{Id, Name, ObjectStore, StoreError, StoreErrorKind};
use control::{in_full, printable};
use futures_util::TryStreamExt;
use object_store::aws::AmazonS3;
use object_store::client::{HttpError, HttpErrorKind};
use object_store::path::Path;
use object_store::{Error, GetOptions, ObjectStore as _, ObjectStoreExt as _, PutMode, PutPayload};
use tokio::runtime::{Builder, Runtime};

use crate::failure::{Exit, Failure};
use crate::stop;

/// How a target in a bucket begins.
pub const SCHEME: &str = "s3://";

/// How long a request may still take when the command is to end: an entry of the log that is under way decides whether
/// a backup counts.
const AFTER_STOP: Duration = Duration::from_secs(10);

/// Creations of one object that end in a conflict with nothing.
const CONFLICTS: u32 = 5;

/// Attempts of one creation or deletion whose outcome is not known, the time after which no further one begins, and the
/// first pause between two of them, each of which is four times the one before.
const ATTEMPTS: u32 = 5;
const REPEATED_FOR: Duration = Duration::from_secs(600);
const FIRST_PAUSE: Duration = Duration::from_millis(250);

/// Codes of answers for a full bucket, account or server: Amazon, MinIO, Ceph.
const FULL: [&str; 5] =
    ["QuotaExceeded", "XMinioStorageFull", "XMinioAdminBucketQuotaExceeded", "InsufficientStorage", "StorageFull"];

/// A store in a bucket.
#[derive(Debug)]
pub struct S3 {
    runtime: Runtime,
    client: AmazonS3,
    /// Names of objects begin with this: empty, or ends with a slash.
    root: String,
    /// The server has been seen to create without replacing.
    creates: AtomicBool,
}

impl S3 {
    /// Prepares the access to `s3://BUCKET[/PREFIX]`. Nothing is sent yet.
    pub fn open(url: &str, access: &S3Access) -> Result<S3, Failure> {
        let (bucket, prefix) = parse(url)?;
        // Only the first of a process is installed, and all of them are the same.
        drop(rustls::crypto::ring::default_provider().install_default());
        let client = settings::client(url, bucket, access)?;
        let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build();
        let runtime = runtime.map_err(|error| Failure::cannot("start a thread for requests to S3", error))?;
        let root = if prefix.is_empty() { String::new() } else { format!("{prefix}/") };
        Ok(S3 { runtime, client, root, creates: AtomicBool::new(false) })
    }

    /// Names below the prefix that `is_own` is not true for, or that cannot be of a target.
    pub fn others(&self, is_own: impl Fn(&Name) -> bool) -> Result<Vec<String>, StoreError> {
        let names = self.list_all("")?.into_iter().map(|(name, _)| name);
        Ok(names.filter(|name| !Name::parse(name).is_some_and(|name| is_own(&name))).collect())
    }

    fn path(&self, name: &str) -> Path {
        Path::from(format!("{}{name}", self.root))
    }

    /// Carries out a request, on the thread of the caller.
    fn wait<T, E: Into<Tried>>(
        &self,
        attempt: &'static str,
        name: &str,
        request: impl Future<Output = Result<T, E>>,
    ) -> Result<T, StoreError> {
        self.runtime.block_on(async {
            tokio::select! {
                done = request => done.map_err(|error| failure(attempt, name, &error.into())),
                () = given_up() => {
                    let cause = io::Error::new(io::ErrorKind::Interrupted, "interrupted while the server was silent");
                    Err(StoreError::new(StoreErrorKind::Io, attempt, name, Some(cause)))
                }
            }
        })
    }

    /// Carries out a request that changes something, and repeats it while its outcome is not known: the connection was
    /// lost, or no answer came. A name is given out once, so a creation or deletion can be carried out twice, also if
    /// the first one is late.
    fn change<T, F: Future<Output = object_store::Result<T>>>(
        &self,
        attempt: &'static str,
        name: &str,
        request: impl Fn() -> F,
    ) -> Result<T, StoreError> {
        let repeated = async {
            let (began, mut attempts, mut pause) = (Instant::now(), 1, FIRST_PAUSE);
            loop {
                let error = match request().await {
                    Err(error) if is_undecided(&error) => error,
                    done => return done.map_err(Tried::from),
                };
                let within = began.elapsed();
                if attempts == ATTEMPTS || within > REPEATED_FOR || stop::cancelled().load(Ordering::Relaxed) {
                    return Err(Tried { error, attempts, within });
                }
                tokio::time::sleep(pause).await;
                pause = pause.saturating_mul(4);
                attempts += 1;
            }
        };
        self.wait(attempt, name, repeated)
    }

    fn create(&self, name: &Name, bytes: &[u8]) -> Result<(), StoreError> {
        let (text, path) = (name.as_str(), self.path(name.as_str()));
        let mut last = None;
        for _ in 0..CONFLICTS {
            let payload = PutPayload::from(bytes.to_vec());
            let put = || self.client.put_opts(&path, payload.clone(), PutMode::Create.into());
            match self.change("create", text, put) {
                Err(error) if error.kind == StoreErrorKind::Exists => match self.size(name) {
                    Ok(_) => return Err(error),
                    Err(missing) if missing.kind == StoreErrorKind::NotFound => last = Some(error),
                    Err(failed) => return Err(failed),
                },
                done => return done.map(drop),
            }
        }
        let cause = last.and_then(|error| error.source);
        Err(StoreError::new(StoreErrorKind::Io, "create", text, cause))
    }

    /// Finds out whether the server creates objects without replacing others, by trying.
    fn prove_creation(&self) -> Result<(), StoreError> {
        if self.creates.load(Ordering::Acquire) {
            return Ok(());
        }
        let name = Name::temporary(Id::random());
        let is_taken = |put: Result<(), StoreError>| match put {
            Ok(()) => Ok(false),
            Err(error) if error.kind == StoreErrorKind::Exists => Ok(true),
            Err(error) => Err(error),
        };
        // The name is ours: if it is taken, the first answer was lost and the request repeated.
        is_taken(self.create(&name, b"first"))?;
        let is_refused = is_taken(self.create(&name, b"second"))?;
        let is_kept = self.get(&name, 0..8)? == b"first";
        self.delete(&name)?;
        if !(is_refused && is_kept) {
            return Err(StoreError::new(StoreErrorKind::Unsuitable, "create", name.as_str(), None));
        }
        self.creates.store(true, Ordering::Release);
        Ok(())
    }

    /// Fails if the bucket is gone, which the answer about one object may not say.
    fn find_bucket(&self, attempt: &'static str, name: &str) -> Result<(), StoreError> {
        let nothing = self.path(Name::temporary(Id::random()).as_str());
        let mut listing = self.client.list(Some(&nothing));
        self.wait(attempt, name, listing.try_next()).map(drop)
    }

    /// Names below the root, with sizes.
    fn list_all(&self, prefix: &str) -> Result<Vec<(String, u64)>, StoreError> {
        let below = format!("{}{prefix}", self.root);
        let below = Path::from(below.trim_end_matches('/'));
        let mut listing = self.client.list((!below.as_ref().is_empty()).then_some(&below));
        let mut found = Vec::new();
        while let Some(object) = self.wait("list", prefix, listing.try_next())? {
            if let Some(name) = object.location.as_ref().strip_prefix(&self.root) {
                found.push((name.to_owned(), object.size));
            }
        }
        found.sort();
        Ok(found)
    }
}

impl ObjectStore for S3 {
    fn put(&self, name: &Name, bytes: &[u8]) -> Result<(), StoreError> {
        self.prove_creation()?;
        self.create(name, bytes)
    }

    fn get(&self, name: &Name, range: Range<u64>) -> Result<Vec<u8>, StoreError> {
        if range.is_empty() {
            return self.size(name).map(|_| Vec::new());
        }
        let (text, path) = (name.as_str(), self.path(name.as_str()));
        let options = GetOptions::new().with_range(Some(range.clone()));
        let read = async { self.client.get_opts(&path, options).await?.bytes().await };
        match self.wait("read", text, read) {
            Ok(bytes) => Ok(bytes.to_vec()),
            Err(error) if error.kind == StoreErrorKind::NotFound => Err(error),
            // The protocol has an error for a range that begins behind the end.
            Err(error) => match self.size(name) {
                Ok(size) if size <= range.start => Ok(Vec::new()),
                _ => Err(error),
            },
        }
    }

    fn size(&self, name: &Name) -> Result<u64, StoreError> {
        let (text, path) = (name.as_str(), self.path(name.as_str()));
        match self.wait("find", text, self.client.head(&path)) {
            Err(error) if error.kind == StoreErrorKind::NotFound => {
                self.find_bucket("find", text)?;
                Err(error)
            }
            found => Ok(found?.size),
        }
    }

    fn list(&self, prefix: &str) -> Result<Vec<(Name, u64)>, StoreError> {
        let listed = self.list_all(prefix)?;
        Ok(listed.into_iter().filter_map(|(name, size)| Some((Name::parse(&name)?, size))).collect())
    }

    fn delete(&self, name: &Name) -> Result<(), StoreError> {
        let (text, path) = (name.as_str(), self.path(name.as_str()));
        match self.change("delete", text, || self.client.delete(&path)) {
            Err(error) if error.kind == StoreErrorKind::NotFound => self.find_bucket("delete", text),
            done => done,
        }
    }

    /// An object that was shown is durable: there is nothing to sync.
    fn settle(&self, _prefix: &str) -> Result<(), StoreError> {
        Ok(())
    }
}

/// Bucket and prefix of a target.
fn parse(url: &str) -> Result<(&str, &str), Failure> {
    let refuse = |why: &str| {
        let what = format!("'{}' is not a target: {why}", printable(url));
        Failure::new(Exit::Usage, what).advise("name it as s3://BUCKET or s3://BUCKET/PREFIX")
    };
    let rest = url.strip_prefix(SCHEME).ok_or_else(|| refuse("only directories and s3:// can be targets"))?;
    let (bucket, prefix) = rest.split_once('/').unwrap_or((rest, ""));
    let prefix = prefix.strip_suffix('/').unwrap_or(prefix);
    let is_plain = |part: &str| {
        !part.is_empty()
            && !part.starts_with('.')
            && part.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte))
    };
    if !is_plain(bucket) {
        return Err(refuse("a bucket's name has letters, digits, dashes and dots"));
    }
    if !prefix.is_empty() && !prefix.split('/').all(is_plain) {
        return Err(refuse("a prefix has letters, digits, dashes, underscores and dots, in parts divided by slashes"));
    }
    Ok((bucket, prefix))
}

/// Ends some time after the command was interrupted.
async fn given_up() {
    while !stop::cancelled().load(Ordering::Relaxed) {
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    tokio::time::sleep(AFTER_STOP).await;
}

/// A request that has failed.
struct Tried {
    /// The last time.
    error: Error,
    attempts: u32,
    within: Duration,
}

impl From<Error> for Tried {
    fn from(error: Error) -> Tried {
        Tried { error, attempts: 1, within: Duration::ZERO }
    }
}

fn failure(attempt: &'static str, name: &str, Tried { error, attempts, within }: &Tried) -> StoreError {
    let text = match attempts {
        1 => in_full(error),
        _ => format!("{attempts} attempts in {} s: {}", within.as_secs(), in_full(error)),
    };
    let code = element(&text, "Code").unwrap_or_default();
    let kind = match error {
        _ if find::<http::Redirected>(error).is_some() => StoreErrorKind::Elsewhere,
        _ if code == "NoSuchBucket" => StoreErrorKind::NoBucket,
        _ if is_unreachable(error) => StoreErrorKind::Vanished,
        _ if FULL.contains(&code) => StoreErrorKind::NoSpace,
        Error::NotFound { .. } => StoreErrorKind::NotFound,
        Error::AlreadyExists { .. } => StoreErrorKind::Exists,
        Error::PermissionDenied { .. } | Error::Unauthenticated { .. } => StoreErrorKind::Refused,
        Error::NotImplemented { .. } | Error::NotSupported { .. } => StoreErrorKind::Unsuitable,
        _ => StoreErrorKind::Io,
    };
    let answer = element(&text, "Message").map(|message| format!("the server: {code}: {message}"));
    StoreError::new(kind, attempt, name, Some(io::Error::other(answer.unwrap_or(text))))
}

/// The text of an element of an answer in XML.
fn element<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    let (_, rest) = text.split_once(&format!("<{name}>"))?;
    rest.split_once("</").map(|(inner, _)| inner)
}

/// The cause of an error that is of this type.
fn find<'a, T: std::error::Error + 'static>(error: &'a (dyn std::error::Error + 'static)) -> Option<&'a T> {
    std::iter::successors(Some(error), |error| error.source()).find_map(|error| error.downcast_ref())
}

/// Whether the server cannot be reached, or does not answer.
fn is_unreachable(error: &Error) -> bool {
    use HttpErrorKind::{Connect, Interrupted, Request, Timeout};
    find::<HttpError>(error).is_some_and(|http| matches!(http.kind(), Connect | Timeout | Interrupted | Request))
}

/// Whether a request may have been carried out or not.
fn is_undecided(error: &Error) -> bool {
    find::<HttpError>(error)
        .is_some_and(|http| matches!(http.kind(), HttpErrorKind::Timeout | HttpErrorKind::Interrupted))
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn targets_are_a_bucket_and_a_prefix() {
        assert_eq!(parse("s3://b").unwrap(), ("b", ""));
        assert_eq!(parse("s3://b.c/").unwrap(), ("b.c", ""));
        assert_eq!(parse("s3://b/a/b_c/").unwrap(), ("b", "a/b_c"));
        for bad in ["s3://", "s3:///a", "s3://b//a", "s3://b/../a", "s3://b/a//", "s3://b/ä", "http://b", "s3://b?x=y"]
        {
            assert!(parse(bad).is_err(), "{bad}");
        }
    }
}
