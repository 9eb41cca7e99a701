//! `/events`: every change of an object, as server-sent events.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use api::{Code, Event, ObjectKind, Problem};
use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::sse::{self, KeepAlive, Sse};
use futures_util::{Stream, StreamExt, stream};
use serde::Deserialize;
use tokio_stream::wrappers::BroadcastStream;
use utoipa::IntoParams;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;
use uuid::Uuid;

use super::Answer;
use super::extract::QueryParams;
use super::list::check_limit;
use crate::daemon::Daemon;

/// Interval of keep-alive messages while no events occur.
const KEEP_ALIVE: Duration = Duration::from_secs(20);

/// The route of events.
pub fn routes() -> OpenApiRouter<Daemon> {
    OpenApiRouter::new().routes(routes!(event_follow))
}

#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
struct EventFilter {
    /// The last event number that the client knows; later events are sent first.
    after: Option<u64>,
    /// End the stream after this many events.
    #[param(minimum = 1, maximum = 1000)]
    limit: Option<u32>,
    /// Only changes of this kind of object.
    #[param(inline)]
    kind: Option<ObjectKind>,
    /// Only changes of the object with this UUID.
    uuid: Option<Uuid>,
}

impl EventFilter {
    fn has(&self, event: &Event) -> bool {
        self.kind.is_none_or(|kind| kind == event.kind) && self.uuid.is_none_or(|uuid| uuid == event.uuid)
    }
}

/// All changes of objects from now on, or after the event given by the header `Last-Event-ID` or by `after`.
///
/// Each event is named `change`; its `id` is the event number and its `data` an `Event`. An event named `reset` says
/// that events were lost and everything must be loaded again; its `id` is the number to continue from.
#[utoipa::path(
    get, path = "/events", tag = "event", params(EventFilter),
    responses((status = 200, content_type = "text/event-stream", body = Event))
)]
async fn event_follow(
    State(daemon): State<Daemon>,
    QueryParams(filter): QueryParams<EventFilter>,
    headers: HeaderMap,
) -> Answer<Sse<impl Stream<Item = Result<sse::Event, Infallible>>>> {
    let after = match headers.get("last-event-id") {
        Some(id) => Some(id.to_str().ok().and_then(|id| id.parse().ok()).ok_or_else(|| {
            Problem::new(Code::Invalid, "the Last-Event-ID header is not an event number").field("last-event-id")
        })?),
        None => filter.after,
    };
    let limit = check_limit(filter.limit)?.unwrap_or(usize::MAX);
    let (first, next) = match after {
        None => (Vec::new(), daemon.catalogue.subscribe()),
        Some(seq) => {
            let past = daemon.catalogue.subscribe_behind(seq);
            let first = match past.missed {
                Some(missed) => missed.iter().filter(|event| filter.has(event)).map(change).collect(),
                None => vec![reset(past.seq)],
            };
            (first, past.next)
        }
    };
    let catalogue = daemon.catalogue.clone();
    let next = BroadcastStream::new(next).filter_map(move |event| {
        let sent = match event {
            Ok(event) => filter.has(&event).then(|| change(&event)),
            // The client reads more slowly than events occur.
            Err(_) => Some(reset(catalogue.subscribe_behind(u64::MAX).seq)),
        };
        async move { sent }
    });
    let all = stream::iter(first).chain(next).take(limit).map(Ok);
    Ok(Sse::new(all).keep_alive(KeepAlive::new().interval(KEEP_ALIVE)))
}

fn change(event: &Arc<Event>) -> sse::Event {
    let data = serde_json::to_string(&**event).unwrap_or_default();
    sse::Event::default().event("change").id(event.seq.to_string()).data(data)
}

fn reset(seq: u64) -> sse::Event {
    sse::Event::default().event("reset").id(seq.to_string()).data("{}")
}
