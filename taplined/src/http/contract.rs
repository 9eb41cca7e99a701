//! The OpenAPI document's contract of each operation, enforced in one place: its query parameters, and its type of
//! body. Values are checked where they are used ([`super::extract`]).

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use api::{Code, Problem};
use axum::body::{Body, HttpBody};
use axum::extract::{MatchedPath, Query, Request, State};
use axum::http::header::{ACCEPT, CONTENT_TYPE};
use axum::http::{HeaderMap, Method};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use serde_json::Value;
use utoipa::openapi::OpenApi;
use utoipa::openapi::path::{Operation, ParameterIn};

use super::Refusal;
use super::access::{Access, access_of};
use super::extract::whole;
use super::listener::REQUEST_TIMEOUT;

/// The content type of all bodies except pieces of files.
const JSON: &str = "application/json";

/// The operations' inputs, by path.
#[derive(Debug)]
pub struct Contract(HashMap<String, HashMap<Method, Takes>>);

/// Marks a request for an unknown path or method: its key and condition are ignored.
#[derive(Clone, Copy, Debug)]
pub struct Undeclared;

/// The inputs of an operation.
#[derive(Debug)]
struct Takes {
    query: HashSet<String>,
    /// The content type of its body, if it has one.
    body: Option<String>,
    access: Access,
}

impl Contract {
    /// The contract stated by the document.
    pub fn of(document: &OpenApi) -> Contract {
        let paths = document.paths.paths.iter().map(|(path, item)| {
            let operations = [
                (Method::GET, &item.get),
                (Method::POST, &item.post),
                (Method::PATCH, &item.patch),
                (Method::DELETE, &item.delete),
            ];
            let known = operations.into_iter().filter_map(|(method, found)| Some((method, takes(found.as_ref()?))));
            (path.clone(), known.collect())
        });
        Contract(paths.collect())
    }

    /// The access that an operation needs; `None` for an unknown path or method.
    pub fn access(&self, request: &Request) -> Option<Access> {
        self.takes(request).map(|takes| takes.access)
    }

    fn takes(&self, request: &Request) -> Option<&Takes> {
        let path = request.extensions().get::<MatchedPath>()?;
        let method = if request.method() == Method::HEAD { &Method::GET } else { request.method() };
        self.0.get(path.as_str())?.get(method)
    }
}

fn takes(operation: &Operation) -> Takes {
    let parameters = operation.parameters.iter().flatten();
    let query = parameters.filter(|parameter| matches!(parameter.parameter_in, ParameterIn::Query));
    let access = access_of(operation.operation_id.as_deref().unwrap_or_default());
    let body = operation.request_body.as_ref().and_then(|body| body.content.keys().next().cloned());
    Takes { query: query.map(|known| known.name.clone()).collect(), body, access }
}

/// Passes on a request that satisfies the contract. Unknown paths and methods are refused later.
pub async fn hold(State(contract): State<Arc<Contract>>, mut request: Request, next: Next) -> Response {
    let Some(takes) = contract.takes(&request) else {
        request.extensions_mut().insert(Undeclared);
        return next.run(request).await;
    };
    if let Err(problem) = takes.check_query(&request) {
        return Refusal(problem).into_response();
    }
    if request.method().is_safe() || request.body().is_end_stream() {
        return next.run(request).await;
    }
    let body = takes.body.as_deref().unwrap_or(JSON);
    if let Err(problem) = check_type(body, request.headers()) {
        return ([(ACCEPT, body.to_owned())], Refusal(problem)).into_response();
    }
    if takes.body.is_some() {
        return next.run(request).await;
    }
    let (parts, body) = request.into_parts();
    match whole(body, REQUEST_TIMEOUT).await.and_then(|body| must_be_empty(&body)) {
        Ok(()) => next.run(Request::from_parts(parts, Body::empty())).await,
        Err(problem) => Refusal(problem).into_response(),
    }
}

impl Takes {
    fn check_query(&self, request: &Request) -> Result<(), Problem> {
        let pairs = Query::<Vec<(String, String)>>::try_from_uri(request.uri());
        let pairs = pairs.map_err(|error| Problem::new(Code::Invalid, format!("invalid query: {error}")))?.0;
        let Some((unknown, _)) = pairs.iter().find(|(name, _)| !self.query.contains(name)) else { return Ok(()) };
        let mut known: Vec<&str> = self.query.iter().map(String::as_str).collect();
        known.sort_unstable();
        let advice = match known.is_empty() {
            true => "it takes no parameters".into(),
            false => format!("it takes {}", known.join(", ")),
        };
        let what = format!("'{unknown}' is not a query parameter of {} {}", request.method(), request.uri().path());
        Err(Problem::new(Code::Invalid, what).field(unknown.clone()).advise(advice))
    }
}

/// A body without a type is parsed as the expected one (RFC 9110, 8.3).
fn check_type(expected: &str, headers: &HeaderMap) -> Result<(), Problem> {
    let Some(value) = headers.get(CONTENT_TYPE) else { return Ok(()) };
    let essence = value.to_str().unwrap_or_default().split(';').next().unwrap_or_default().trim();
    match essence.eq_ignore_ascii_case(expected) {
        true => Ok(()),
        false => Err(Problem::new(Code::MediaType, format!("the body is {value:?}, and not {expected}"))
            .field("content-type")
            .advise(format!("send it with Content-Type: {expected}"))),
    }
}

/// An operation without a body accepts at most an empty object.
fn must_be_empty(body: &[u8]) -> Result<(), Problem> {
    let plain = body.trim_ascii();
    let value = if plain.is_empty() { Ok(Value::Null) } else { serde_json::from_slice(plain) };
    match value {
        Ok(Value::Null) => Ok(()),
        Ok(Value::Object(fields)) if fields.is_empty() => Ok(()),
        Ok(_) => Err(Problem::new(Code::Invalid, "this operation takes no fields").advise("send no body")),
        Err(error) => {
            Err(Problem::new(Code::Malformed, format!("invalid request body: {error}")).advise("send no body"))
        }
    }
}
