//! Changing requests: each is carried out even if its client disconnects, only if the object is still as `If-Match`
//! says, and a repetition with the same `Idempotency-Key` gets the original response (`crate::request`).
//!
//! A repetition is answered before its condition is checked: the first request has changed the object.

use api::{Code, Problem, Requester};
use axum::body::{Body, HttpBody};
use axum::extract::{Request, State};
use axum::http::header::CONTENT_TYPE;
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode};
use axum::middleware::Next;
use axum::response::{AppendHeaders, IntoResponse, Response};
use repo::catalogue::{Answered, RequestKey, on_behalf_of};
use serde_json::Value;

use super::caller::Caller;
use super::contract::Undeclared;
use super::etag::{self, condition_of};
use super::extract::whole;
use super::listener::REQUEST_TIMEOUT;
use super::{Refusal, begun, location};
use crate::background;
use crate::daemon::Daemon;
use crate::request::Condition;
use crate::{fault, panics, request as current};

/// The header with the client's key, and the header that marks a replayed response.
const HEADER: &str = "idempotency-key";
const REPLAYED: &str = "idempotent-replayed";

/// Maximum length of a key.
const KEY_MAX: usize = 255;

/// Maximum bytes of a stored response; one that is not a task is about a single object.
const ANSWER_MAX: u64 = 16 << 10;

/// The secret of a new token is returned only once and never stored for replays. A repetition is rejected anyway,
/// because the name is taken.
const TOKENS: &str = "/v1/tokens";

/// Handles a request. A change continues after its client disconnects, so that nothing is left half done.
pub async fn answer(State(daemon): State<Daemon>, request: Request, next: Next) -> Response {
    if request.extensions().get::<Undeclared>().is_some() {
        return next.run(request).await;
    }
    if matches!(*request.method(), Method::GET | Method::HEAD | Method::OPTIONS) {
        return etag::read(request, next).await;
    }
    let name = format!("the request {} {}", request.method(), request.uri().path());
    let requester = match request.extensions().get::<Caller>() {
        Some(caller) => caller.requester().await,
        None => Requester::Daemon,
    };
    let done = background::spawn(panics::during(
        name,
        on_behalf_of(requester, async move {
            let carried_out = match (key_of(&request), condition_of(&request)) {
                (Ok(Some(key)), Ok(condition)) => once(&daemon, key, condition, request, next).await,
                (Ok(None), Ok(condition)) => {
                    conditionally(&daemon, None, condition, request, next).await.map(|(done, _)| done)
                }
                (Err(problem), _) | (_, Err(problem)) => Err(problem.into()),
            };
            carried_out.unwrap_or_else(IntoResponse::into_response)
        }),
    ));
    done.await.unwrap_or_else(|error| Refusal(Problem::failed("answer", error)).into_response())
}

/// The key in a request's header, if there is one.
fn key_of(request: &Request) -> Result<Option<RequestKey>, Problem> {
    let Some(value) = header(request.headers())? else { return Ok(None) };
    if request.uri().path() == TOKENS {
        return Ok(None);
    }
    let caller = match request.extensions().get() {
        Some(Caller::Local { uid }) => format!("user {uid}"),
        Some(Caller::Token(grant)) => format!("token {}", grant.name),
        None => "nobody".into(),
    };
    Ok(Some(RequestKey { asker: caller, key: value, hash: [0; 32] }))
}

fn header(headers: &HeaderMap) -> Result<Option<String>, Problem> {
    let mut values = headers.get_all(HEADER).iter();
    let (Some(value), None) = (values.next(), values.next()) else {
        return match headers.contains_key(HEADER) {
            true => Err(wrong("a request must not have more than one Idempotency-Key")),
            false => Ok(None),
        };
    };
    let plain =
        |text: &&str| !text.is_empty() && text.len() <= KEY_MAX && text.bytes().all(|byte| byte.is_ascii_graphic());
    let found = value.to_str().ok().filter(plain).map(str::to_owned);
    let what = || wrong(&format!("an Idempotency-Key must have 1 to {KEY_MAX} visible ASCII characters"));
    found.map(Some).ok_or_else(what)
}

fn wrong(what: &str) -> Problem {
    Problem::new(Code::Invalid, what).field(HEADER).advise("use a new random UUID for each request")
}

/// Carries out a request if its condition holds. The key is returned unless the response was recorded with it.
///
/// The condition is checked here for all, so that work that would have to wait before its first change is refused at
/// once; requests of a single transaction check it again there.
async fn conditionally(
    daemon: &Daemon,
    key: Option<RequestKey>,
    condition: Option<Condition>,
    request: Request,
    next: Next,
) -> Result<(Response, Option<RequestKey>), Refusal> {
    if let Some(condition) = condition.clone() {
        daemon.catalogue.read(move |view| condition.check(view)).await?;
    }
    Ok(current::during(key, condition, next.run(request)).await)
}

/// Carries out a request with a key, unless that was done before.
async fn once(
    daemon: &Daemon,
    mut key: RequestKey,
    condition: Option<Condition>,
    request: Request,
    next: Next,
) -> Result<Response, Refusal> {
    let (parts, body) = request.into_parts();
    let body = whole(body, REQUEST_TIMEOUT).await?;
    let path = parts.uri.path().to_owned();
    let asked = format!("{} {}\n", parts.method, parts.uri);
    let mut hash = ring::digest::Context::new(&ring::digest::SHA256);
    hash.update(asked.as_bytes());
    hash.update(&body);
    key.hash.copy_from_slice(hash.finish().as_ref());
    let _turn = daemon.key_locks.wait(&key).await;
    if let Some(response) = again(daemon, &key, &path).await? {
        return Ok(response);
    }
    let request = Request::from_parts(parts, Body::from(body));
    let (response, left) = conditionally(daemon, Some(key), condition, request, next).await?;
    let response = match left {
        Some(key) if response.status().is_success() => keep(daemon, key, response).await?,
        // A refused request has changed nothing, and the next attempt may succeed.
        _ => response,
    };
    fault::point("request", "answer", false);
    Ok(response)
}

/// The stored response to an earlier request with this key.
async fn again(daemon: &Daemon, key: &RequestKey, path: &str) -> Result<Option<Response>, Problem> {
    let asked = key.clone();
    let known = daemon.catalogue.read(move |view| {
        let Some((hash, answered)) = view.answered(&asked.asker, &asked.key)? else { return Ok(None) };
        let task = match answered {
            Answered::Task(uuid) => view.find_task(uuid)?,
            Answered::Done { .. } => None,
        };
        Ok(Some((hash, answered, task)))
    });
    let Some((hash, answered, task)) = known.await? else { return Ok(None) };
    if hash != key.hash {
        let what = format!("the Idempotency-Key {} was already used with a different request", key.key);
        return Err(Problem::new(Code::KeyReused, what).field(HEADER).advise("use a new key for each request"));
    }
    let mut response = match (answered, task) {
        (Answered::Task(_), Some(task)) => begun(task).into_response(),
        (Answered::Task(uuid), None) => {
            let what = format!("this request was made before; its task {uuid} has ended and is no longer remembered");
            return Err(
                Problem::new(Code::State, what).advise("check the object; to repeat the request, use a new key")
            );
        }
        (Answered::Done { status, body }, _) => said(path, status, body),
    };
    response.headers_mut().insert(REPLAYED, HeaderValue::from_static("true"));
    Ok(Some(response))
}

fn said(path: &str, status: u16, body: String) -> Response {
    let status = StatusCode::from_u16(status).unwrap_or(StatusCode::OK);
    if body.is_empty() {
        return status.into_response();
    }
    let made: Value = serde_json::from_str(&body).unwrap_or_default();
    let uuid = made["uuid"].as_str().filter(|_| status == StatusCode::CREATED);
    let location = uuid.map(|uuid| location(path, uuid));
    (status, AppendHeaders(location), [(CONTENT_TYPE, "application/json")], body).into_response()
}

/// Stores a response that was not recorded in the change's own transaction: such requests are idempotent.
async fn keep(daemon: &Daemon, key: RequestKey, response: Response) -> Result<Response, Refusal> {
    if response.body().size_hint().upper().is_none_or(|len| len > ANSWER_MAX) {
        return Ok(response);
    }
    let (head, body) = response.into_parts();
    let body = axum::body::to_bytes(body, usize::MAX).await.map_err(|error| Problem::failed("answer", error))?;
    let answered = Answered::Done { status: head.status.as_u16(), body: String::from_utf8_lossy(&body).into_owned() };
    if let Err(problem) = daemon.catalogue.write(move |tx| tx.keep_answer(&key, &answered)).await {
        tracing::warn!("the response could not be stored for retries of the request: {problem}");
    }
    Ok(Response::from_parts(head, Body::from(body)))
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn a_request_has_one_printable_key() {
        let of = |values: &[&'static str]| {
            let mut headers = HeaderMap::new();
            for value in values {
                headers.append(HEADER, HeaderValue::from_static(value));
            }
            header(&headers).map_err(|problem| problem.code)
        };
        assert_eq!(of(&[]), Ok(None));
        assert_eq!(of(&["a-1"]), Ok(Some("a-1".into())));
        for wrong in [&["a", "a"][..], &[""], &["a b"]] {
            assert_eq!(of(wrong), Err(Code::Invalid), "{wrong:?}");
        }
    }
}
