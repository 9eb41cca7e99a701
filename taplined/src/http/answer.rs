//! JSON responses to read requests, and the limit on the memory that unread responses may use.
//!
//! Invariant: at most [`MADE_MAX`] lists are being created at any time, and lists that have not been read yet use at
//! most [`ROOM`] bytes in total. A list that does not fit is refused; one that is not read within [`TO_READ`] is
//! dropped together with its connection. A response about a single object is small and always sent.

use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use api::{Code, ObjectKind, Problem};
use axum::Json;
use axum::body::{Body, Bytes};
use axum::http::HeaderValue;
use axum::http::header::{CONTENT_LENGTH, CONTENT_TYPE, HeaderName, LINK};
use axum::response::{IntoResponse, Response};
use futures_util::stream;
use serde::Serialize;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use uuid::Uuid;

use super::Answer;
use super::list::Page;
use crate::background;
use crate::daemon::Daemon;
use crate::request::representation;

/// Maximum number of lists under construction or waiting for memory.
const MADE_MAX: usize = 4;

/// Bytes for unread lists, counted in units of [`UNIT`]: a dozen lists of ten thousand VDIs.
const ROOM: usize = 64 << 20;
const UNIT: usize = 4 << 10;

/// How long a list may wait for memory.
const TO_GET_ROOM: Duration = Duration::from_secs(2);

/// How long a client may take to read a list.
const TO_READ: Duration = Duration::from_secs(60);

/// Maximum bytes passed to a connection at a time.
const PIECE: usize = 128 << 10;

/// The limits on the memory of responses.
#[derive(Debug)]
pub struct Answers {
    made: Semaphore,
    room: Arc<Semaphore>,
    to_get_room: Duration,
    to_read: Duration,
}

impl Default for Answers {
    fn default() -> Answers {
        Answers {
            made: Semaphore::new(MADE_MAX),
            room: Arc::new(Semaphore::new(ROOM / UNIT)),
            to_get_room: TO_GET_ROOM,
            to_read: TO_READ,
        }
    }
}

/// A response that the client has not read completely.
type Unread = Arc<Mutex<Option<(Bytes, OwnedSemaphorePermit)>>>;

impl Answers {
    /// Waits for memory for a response, and makes it; an error if that takes too long.
    async fn admit(&self, text: Vec<u8>) -> Result<Response, Problem> {
        let Ok(units) = u32::try_from(text.len().div_ceil(UNIT).min(ROOM / UNIT)) else {
            unreachable!("a part of ROOM")
        };
        let room = self.room.clone().acquire_many_owned(units);
        let Ok(Ok(room)) = tokio::time::timeout(self.to_get_room, room).await else {
            let what = format!(
                "no memory for a list of {} bytes next to other responses that have not been read yet",
                text.len()
            );
            return Err(
                Problem::new(Code::Overloaded, what).advise("retry later, or ask for less with ?limit= or a filter")
            );
        };
        let len = text.len();
        let unread: Unread = Arc::new(Mutex::new(Some((text.into(), room))));
        let (late, to_read) = (Arc::downgrade(&unread), self.to_read);
        background::spawn(async move {
            tokio::time::sleep(to_read).await;
            if let Some(unread) = late.upgrade() {
                drop(unread.lock().unwrap_or_else(PoisonError::into_inner).take());
            }
        });
        let pieces = stream::unfold((unread, len), |(unread, left)| async move {
            let piece = next(&unread, left)?;
            let left = left.saturating_sub(piece.as_ref().map_or(left, Bytes::len));
            Some((piece, (unread, left)))
        });
        let head = [(CONTENT_TYPE, "application/json".to_owned()), (CONTENT_LENGTH, len.to_string())];
        Ok((head, Body::from_stream(pieces)).into_response())
    }
}

/// The next piece of a response with `left` bytes remaining; the last piece releases its memory.
fn next(unread: &Unread, left: usize) -> Option<io::Result<Bytes>> {
    if left == 0 {
        return None;
    }
    let mut unread = unread.lock().unwrap_or_else(PoisonError::into_inner);
    let Some((bytes, _)) = unread.as_mut() else {
        return Some(Err(io::Error::new(io::ErrorKind::TimedOut, "the client does not read the response")));
    };
    let piece = bytes.split_to(PIECE.min(bytes.len()));
    if bytes.is_empty() {
        *unread = None;
    }
    // A copy, so that the whole buffer is freed when the response is dropped.
    Some(Ok(Bytes::copy_from_slice(&piece)))
}

/// A response with a single object, serialized on the reader's thread.
pub async fn shown(daemon: &Daemon, kind: ObjectKind, uuid: Uuid) -> Answer {
    let text = daemon.catalogue.read_for_client(move |view| representation(view, kind, uuid)).await?;
    Ok(([(CONTENT_TYPE, "application/json")], text).into_response())
}

/// A response with a page of a potentially long list; `after` names objects by `key`.
pub async fn listed<T: Serialize>(
    daemon: &Daemon,
    page: Page,
    key: impl Fn(&T) -> Uuid + Send + 'static,
    question: impl FnOnce(&repo::View<'_>) -> Result<Vec<T>, Problem> + Send + 'static,
) -> Answer {
    let _turn = daemon.answers.made.acquire().await;
    let asked = daemon.catalogue.read_for_client(move |view| {
        let (found, next) = page.of(question(view)?, |one| key(one).to_string())?;
        let text = serde_json::to_vec(&found).map_err(|error| Problem::failed("encode the response", error))?;
        Ok((text, next))
    });
    let (text, next) = asked.await?;
    let mut response = daemon.answers.admit(text).await?;
    response.headers_mut().extend(link(next));
    Ok(response)
}

/// A response with a page of a potentially long list that is already in memory.
pub async fn listed_of<T: Serialize>(daemon: &Daemon, page: &Page, all: Vec<T>, key: impl Fn(&T) -> String) -> Answer {
    let (found, next) = page.of(all, key)?;
    let text = serde_json::to_vec(&found).map_err(|error| Problem::failed("encode the response", error))?;
    let mut response = daemon.answers.admit(text).await?;
    response.headers_mut().extend(link(next));
    Ok(response)
}

/// A response with a page of a short list that is already in memory.
pub fn listed_here<T: Serialize>(page: &Page, all: Vec<T>, key: impl Fn(&T) -> String) -> Answer {
    let (found, next) = page.of(all, key)?;
    let mut response = Json(found).into_response();
    response.headers_mut().extend(link(next));
    Ok(response)
}

/// The Link header; the next page's address consists of visible ASCII characters.
fn link(next: Option<String>) -> Option<(HeaderName, HeaderValue)> {
    Some((LINK, HeaderValue::try_from(next?).ok()?))
}

#[cfg(test)]
mod test {
    use super::*;

    use futures_util::StreamExt;

    fn answers(to_read: Duration) -> Answers {
        Answers { to_get_room: Duration::from_millis(50), to_read, ..Answers::default() }
    }

    fn half() -> Vec<u8> {
        vec![b'x'; ROOM / 2]
    }

    #[tokio::test]
    async fn a_list_uses_memory_until_it_is_read() {
        let answers = answers(Duration::from_secs(600));
        let (first, _second) = (answers.admit(half()).await.unwrap(), answers.admit(half()).await.unwrap());
        assert_eq!(answers.admit(half()).await.unwrap_err().code, Code::Overloaded);
        let pieces: Vec<_> = first.into_body().into_data_stream().collect().await;
        assert_eq!(pieces.into_iter().map(|piece| piece.unwrap().len()).sum::<usize>(), ROOM / 2);
        answers.admit(half()).await.unwrap();
    }

    #[tokio::test]
    async fn an_unread_list_is_dropped_after_a_timeout() {
        let answers = answers(Duration::from_millis(50));
        let mut pieces = answers.admit(half()).await.unwrap().into_body().into_data_stream();
        assert_eq!(pieces.next().await.unwrap().unwrap().len(), PIECE);
        while answers.room.available_permits() < ROOM / UNIT {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        assert!(pieces.next().await.unwrap().is_err());
    }
}
