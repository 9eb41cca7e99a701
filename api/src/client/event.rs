//! `/events` as an endless stream: a lost connection is re-established and continues after the last event.

use std::collections::VecDeque;
use std::time::Duration;

use http_body_util::BodyExt;
use hyper::Method;
use hyper::body::Incoming;

use super::Client;
use super::exchange::{Content, Failure, Known, refusal};
use super::sse::{Message, Reader};
use super::target::Target;
use crate::{Code, Event, Problem};

/// Pause before reconnecting to the daemon.
const REST: Duration = Duration::from_secs(1);

/// The stream of all changes.
#[derive(Debug)]
pub struct Events {
    client: Client,
    /// The number of the last event received.
    last: Option<u64>,
    stream: Option<Stream>,
}

/// A connection that delivers events.
#[derive(Debug)]
struct Stream {
    body: Incoming,
    reader: Reader,
    ready: VecDeque<Message>,
}

/// An item of the stream.
#[derive(Clone, Debug, PartialEq)]
pub enum StreamItem {
    /// An object has changed.
    Change(Box<Event>),
    /// Events were lost: everything known must be loaded again.
    Reset,
    /// The connection was lost for this reason; the next call reconnects after a pause.
    Lost(Problem),
}

impl Client {
    /// All changes from now on, or after the event with the number `after`. The daemon must be reachable for this
    /// call; later the stream reconnects as needed.
    pub async fn events(&self, after: Option<u64>) -> Result<Events, Problem> {
        let mut events = Events { client: self.clone(), last: after, stream: None };
        events.stream = Some(events.connect().await?);
        Ok(events)
    }
}

impl Events {
    /// Waits for the next item. Reconnects after a pause if the connection was lost.
    pub async fn next(&mut self) -> StreamItem {
        if self.stream.is_some() {
            return self.hear().await;
        }
        tokio::time::sleep(REST).await;
        match self.connect().await {
            Ok(stream) => self.stream = Some(stream),
            Err(failure) => return StreamItem::Lost(failure.into()),
        }
        // Without an event number to continue from, it is unknown what happened in the meantime.
        if self.last.is_none() { StreamItem::Reset } else { self.hear().await }
    }

    /// The next item of the current connection.
    async fn hear(&mut self) -> StreamItem {
        let Some(stream) = &mut self.stream else { return StreamItem::Lost(ended("the stream was not started")) };
        loop {
            let heard = match stream.message().await {
                Ok(message) => item(&message).map(|item| (message.id, item)),
                Err(problem) => Err(problem),
            };
            match heard {
                Ok((_, None)) => {}
                Ok((id, Some(item))) => {
                    self.last = id.or(self.last);
                    return item;
                }
                Err(problem) => {
                    self.stream = None;
                    return StreamItem::Lost(problem);
                }
            }
        }
    }

    async fn connect(&self) -> Result<Stream, Failure> {
        let last = self.last.map(Known::LastEvent);
        let response = self.client.send(Method::GET, &Target::new("events"), last, Content::none()).await?;
        let status = response.status();
        if status.is_success() {
            return Ok(Stream { body: response.into_body(), reader: Reader::default(), ready: VecDeque::new() });
        }
        let body = response.into_body().collect().await.map(|body| body.to_bytes()).unwrap_or_default();
        Err(Failure::Refused(refusal(status, &body)))
    }
}

impl Stream {
    async fn message(&mut self) -> Result<Message, Problem> {
        loop {
            if let Some(message) = self.ready.pop_front() {
                return Ok(message);
            }
            let frame = self.body.frame().await.ok_or_else(|| ended("the daemon closed it"))?.map_err(ended)?;
            if let Ok(piece) = frame.into_data() {
                self.reader.take(&piece, &mut self.ready).map_err(|_| ended("an event is too long"))?;
            }
        }
    }
}

fn ended(why: impl std::fmt::Display) -> Problem {
    Problem::new(Code::Failed, format!("the event stream ended: {why}"))
}

/// What a message means; `None` for a kind that this version does not know.
fn item(message: &Message) -> Result<Option<StreamItem>, Problem> {
    match (message.name.as_str(), message.id) {
        ("change", _) => {
            let event = serde_json::from_str(&message.data).map_err(ended)?;
            Ok(Some(StreamItem::Change(event)))
        }
        ("reset", _) => Ok(Some(StreamItem::Reset)),
        _ => Ok(None),
    }
}
