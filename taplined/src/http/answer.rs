//! Answers to those who only want to know, as JSON; and how much memory those may take that clients have not read yet.
//!
//! Invariant: of lists that are being made there are no more than [`MADE_MAX`], and those that wait to be read have no more than [`ROOM`]
//! bytes together. A list for which there is no room is refused; one that is not read in [`TO_READ`] is given up, with its connection.
//! What is about one object is small, and always answered.

use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use api::{Code, Problem};
use axum::body::{Body, Bytes};
use axum::http::header::{CONTENT_LENGTH, CONTENT_TYPE};
use axum::response::{IntoResponse, Response};
use futures_util::stream;
use serde::Serialize;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::Refusal;
use crate::daemon::Daemon;

/// Lists at one time that are being made, or wait for room.
const MADE_MAX: usize = 4;

/// Bytes of lists that wait to be read, which is counted in units of [`UNIT`]: a dozen lists of ten thousand VDIs.
const ROOM: usize = 64 << 20;
const UNIT: usize = 4 << 10;

/// How long a list may wait for room.
const TO_GET_ROOM: Duration = Duration::from_secs(2);

/// How long a client may take to read a list.
const TO_READ: Duration = Duration::from_secs(60);

/// Bytes that are given to a connection at one time.
const PIECE: usize = 128 << 10;

/// What bounds the memory of answers.
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

/// An answer that a client has not read to its end.
type Unread = Arc<Mutex<Option<(Bytes, OwnedSemaphorePermit)>>>;

impl Answers {
    /// An answer that takes no more room than there is, if that can be had in time.
    async fn admit(&self, text: Vec<u8>) -> Result<Response, Problem> {
        let units = u32::try_from(text.len().div_ceil(UNIT).min(ROOM / UNIT)).unwrap_or(u32::MAX);
        let room = self.room.clone().acquire_many_owned(units);
        let Ok(Ok(room)) = tokio::time::timeout(self.to_get_room, room).await else {
            let what = format!("a list of {} bytes has no room beside others that are not read", text.len());
            return Err(
                Problem::new(Code::Overloaded, what).advise("ask again later, or for less: ?match=, ?sr=, ?vm=")
            );
        };
        let len = text.len();
        let unread: Unread = Arc::new(Mutex::new(Some((text.into(), room))));
        let (late, to_read) = (Arc::downgrade(&unread), self.to_read);
        tokio::spawn(async move {
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

/// The next piece of an answer of which so many bytes are left; with the last one its room is given back.
fn next(unread: &Unread, left: usize) -> Option<io::Result<Bytes>> {
    if left == 0 {
        return None;
    }
    let mut unread = unread.lock().unwrap_or_else(PoisonError::into_inner);
    let Some((bytes, _)) = unread.as_mut() else {
        return Some(Err(io::Error::new(io::ErrorKind::TimedOut, "the client does not read its answer")));
    };
    let piece = bytes.split_to(PIECE.min(bytes.len()));
    if bytes.is_empty() {
        *unread = None;
    }
    // Of its own, so that the whole goes when it is given up.
    Some(Ok(Bytes::copy_from_slice(&piece)))
}

/// An object that a client wants to see. Its text is made where it is read.
pub async fn shown<T: Serialize>(
    daemon: &Daemon,
    question: impl FnOnce(&repo::View<'_>) -> Result<T, Problem> + Send + 'static,
) -> Result<Response, Refusal> {
    let text = read(daemon, question).await?;
    Ok(([(CONTENT_TYPE, "application/json")], text).into_response())
}

/// Objects that a client wants to see, of which there may be many.
pub async fn listed<T: Serialize>(
    daemon: &Daemon,
    question: impl FnOnce(&repo::View<'_>) -> Result<Vec<T>, Problem> + Send + 'static,
) -> Result<Response, Refusal> {
    let _turn = daemon.answers.made.acquire().await;
    let text = read(daemon, question).await?;
    Ok(daemon.answers.admit(text).await?)
}

async fn read<T: Serialize>(
    daemon: &Daemon,
    question: impl FnOnce(&repo::View<'_>) -> Result<T, Problem> + Send + 'static,
) -> Result<Vec<u8>, Problem> {
    let asked = daemon.catalogue.read_for_client(move |view| {
        serde_json::to_vec(&question(view)?).map_err(|error| Problem::failed("show what was asked for", error))
    });
    asked.await
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
    async fn a_list_has_room_until_it_is_read() {
        let answers = answers(Duration::from_secs(600));
        let (first, _second) = (answers.admit(half()).await.unwrap(), answers.admit(half()).await.unwrap());
        assert_eq!(answers.admit(half()).await.unwrap_err().code, Code::Overloaded);
        let pieces: Vec<_> = first.into_body().into_data_stream().collect().await;
        assert_eq!(pieces.into_iter().map(|piece| piece.unwrap().len()).sum::<usize>(), ROOM / 2);
        answers.admit(half()).await.unwrap();
    }

    #[tokio::test]
    async fn a_list_that_nobody_reads_is_given_up_with_what_is_left_of_it() {
        let answers = answers(Duration::from_millis(50));
        let mut pieces = answers.admit(half()).await.unwrap().into_body().into_data_stream();
        assert_eq!(pieces.next().await.unwrap().unwrap().len(), PIECE);
        while answers.room.available_permits() < ROOM / UNIT {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        assert!(pieces.next().await.unwrap().is_err());
    }
}
