//! `/events`: every change of an object, as server-sent events.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use api::{Code, Event, Problem};
use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::sse::{self, KeepAlive, Sse};
use futures_util::{Stream, StreamExt, stream};
use serde::Deserialize;
use tokio_stream::wrappers::BroadcastStream;
use utoipa::IntoParams;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::Refusal;
use super::extract::Asked;
use crate::daemon::Daemon;

/// Interval of keep-alive messages while nothing happens.
const KEEP_ALIVE: Duration = Duration::from_secs(20);

/// The routes.
pub fn routes() -> OpenApiRouter<Daemon> {
    OpenApiRouter::new().routes(routes!(follow))
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct From {
    /// The last event number that the client knows; later events are sent first.
    behind: Option<u64>,
}

/// All changes of objects from now on, or after the event given by the header `Last-Event-ID` or by `behind`.
///
/// Each event is named `change`; its `id` is the event number and its `data` an `Event`. An event named `reset` says
/// that events were lost and everything must be loaded again; its `id` is the number to continue from.
#[utoipa::path(
    get, path = "/events", tag = "event", operation_id = "event_follow", params(From),
    responses(
        (status = 200, content_type = "text/event-stream", body = Event),
        (status = "4XX", body = Problem), (status = "5XX", body = Problem)
    )
)]
async fn follow(
    State(daemon): State<Daemon>,
    Asked(from): Asked<From>,
    headers: HeaderMap,
) -> Result<Sse<impl Stream<Item = Result<sse::Event, Infallible>>>, Refusal> {
    let behind = match headers.get("last-event-id") {
        Some(id) => Some(id.to_str().ok().and_then(|id| id.parse().ok()).ok_or_else(|| {
            Problem::new(Code::Invalid, "the Last-Event-ID header is not an event number").field("last-event-id")
        })?),
        None => from.behind,
    };
    let (first, next) = match behind {
        None => (Vec::new(), daemon.catalogue.subscribe()),
        Some(seq) => {
            let past = daemon.catalogue.subscribe_behind(seq);
            let first = match past.missed {
                Some(missed) => missed.iter().map(change).collect(),
                None => vec![reset(past.seq)],
            };
            (first, past.next)
        }
    };
    let catalogue = daemon.catalogue.clone();
    let next = BroadcastStream::new(next).map(move |event| match event {
        Ok(event) => change(&event),
        // The client reads more slowly than events occur.
        Err(_) => reset(catalogue.subscribe_behind(u64::MAX).seq),
    });
    let all = stream::iter(first).chain(next).map(Ok);
    Ok(Sse::new(all).keep_alive(KeepAlive::new().interval(KEEP_ALIVE)))
}

fn change(event: &Arc<Event>) -> sse::Event {
    let data = serde_json::to_string(&**event).unwrap_or_default();
    sse::Event::default().event("change").id(event.seq.to_string()).data(data)
}

fn reset(seq: u64) -> sse::Event {
    sse::Event::default().event("reset").id(seq.to_string()).data("{}")
}
