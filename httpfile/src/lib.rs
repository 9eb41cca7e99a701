//! Objects at HTTP servers as read-only files, over HTTP/1.1 range requests (RFC 9110, section 14).
//!
//! It knows HTTP and nothing about images. Calls block; they may be made by several threads. What a server sends is
//! hostile input: each answer is bounded in size and time, and is either exactly the requested range of the object that
//! was opened, or an error.
//!
//! Invariants: the length and a validator of the object are fixed when it is opened ([`Identity`]), and each answer is
//! checked against them; an object that has failed once fails all later reads, so that no mixture of two objects is
//! read; nothing is read over plain HTTP unless the caller allows it.

#![forbid(unsafe_code)]

mod checksum;
mod client;
mod download;
mod error;
mod identity;
mod object;
mod partial;
mod reader;
mod roots;
mod url;

pub use checksum::{digest_of, find};
pub use client::{Client, Options};
pub use download::{DownloadError, download};
pub use error::{HttpError, HttpErrorKind};
pub use identity::{Identity, Validator};
pub use object::Object;
pub use reader::Reader;
pub use url::{BadUrl, Url};
