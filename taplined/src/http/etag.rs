//! Entity tags (RFC 9110, 8.8.3 and 13.1): which version of an object a client has, and whether it is current.
//!
//! Invariants: each response that is a single object, not a stream, has a tag computed from its bytes. A request with
//! a tag for an object that has none is refused, so that no condition is ignored.

use api::{Code, ObjectKind, Problem};
use axum::body::{Body, HttpBody};
use axum::extract::Request;
use axum::http::header::{ETAG, HeaderName, IF_MATCH, IF_NONE_MATCH};
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use uuid::Uuid;

use super::{ROOT, Refusal};
use crate::request::{Condition, tag_of};

/// Maximum bytes of a response with a tag: the longest are this API's own document and the inventory of a repository.
const TAGGED_MAX: u64 = 4 << 20;

/// The tags in a header.
#[derive(Debug, PartialEq, Eq)]
enum Tags {
    /// `*`: the object exists.
    Any,
    /// Tags, each with whether it is weak.
    These(Vec<(bool, String)>),
}

/// Answers a read request: with the tag of the response, or with the status alone if the client has that version.
pub async fn read(mut request: Request, next: Next) -> Response {
    let headers = request.headers();
    let (wanted, known) = match (tags(headers, IF_MATCH), tags(headers, IF_NONE_MATCH)) {
        (Ok(wanted), Ok(known)) => (wanted, known),
        (Err(problem), _) | (_, Err(problem)) => return Refusal(problem).into_response(),
    };
    if request.method() == Method::HEAD {
        // The tag is computed from the body; the connection omits it.
        *request.method_mut() = Method::GET;
    }
    let path = request.uri().path().to_owned();
    let response = next.run(request).await;
    if response.status() != StatusCode::OK {
        return response;
    }
    if response.body().size_hint().upper().is_none_or(|len| len > TAGGED_MAX) {
        return match wanted {
            None => response,
            Some(_) => Refusal(no_tag(&path)).into_response(),
        };
    }
    let (mut head, body) = response.into_parts();
    let body = match axum::body::to_bytes(body, usize::MAX).await {
        Ok(body) => body,
        Err(error) => return Refusal(Problem::failed("answer", error)).into_response(),
    };
    let tag = tag_of(&body);
    if wanted.is_some_and(|wanted| !wanted.has_strong(&tag)) {
        let what = format!("{path} has the ETag {tag} now");
        return Refusal(Problem::new(Code::Changed, what).field("if-match").advise("get it again")).into_response();
    }
    let unchanged = known.is_some_and(|known| known.has(&tag));
    if unchanged {
        return (StatusCode::NOT_MODIFIED, [(ETAG, tag)]).into_response();
    }
    // Quoted hexadecimal digits are a valid header value.
    head.headers.extend(HeaderValue::from_str(&tag).ok().map(|tag| (ETAG, tag)));
    Response::from_parts(head, Body::from(body))
}

/// The condition of a changing request on its object.
pub fn condition_of(request: &Request) -> Result<Option<Condition>, Problem> {
    if request.headers().contains_key(IF_NONE_MATCH) {
        let what = format!("If-None-Match is for GET, and this is {}", request.method());
        return Err(Problem::new(Code::Invalid, what)
            .field("if-none-match")
            .advise("to change what you know: If-Match"));
    }
    let Some(tags) = tags(request.headers(), IF_MATCH)? else { return Ok(None) };
    let (kind, uuid) = object_of(request.uri().path()).ok_or_else(|| no_tag(request.uri().path()))?;
    let tags = match tags {
        Tags::Any => None,
        // If-Match compares strongly: a weak tag is equal to none (RFC 9110, 13.1.1).
        Tags::These(tags) => Some(tags.into_iter().filter(|(weak, _)| !weak).map(|(_, tag)| tag).collect()),
    };
    Ok(Some(Condition { kind, uuid, tags }))
}

fn no_tag(path: &str) -> Problem {
    let what = format!("{path} has no ETag");
    Problem::new(Code::Invalid, what).field("if-match").advise("leave out If-Match; single objects have ETags")
}

/// The object that a path is about: `/v1/vdis/UUID`, or a verb of it.
fn object_of(path: &str) -> Option<(ObjectKind, Uuid)> {
    let mut words = path.strip_prefix(ROOT)?.split('/').skip(1);
    let kind = match words.next()? {
        "srs" => ObjectKind::Sr,
        "vdis" => ObjectKind::Vdi,
        "vbds" => ObjectKind::Vbd,
        "vms" => ObjectKind::Vm,
        "tasks" => ObjectKind::Task,
        _ => return None,
    };
    let uuid = words.next()?.parse().ok()?;
    // A VM's tag does not cover its snapshots.
    (words.next() != Some("snapshots")).then_some((kind, uuid))
}

fn tags(headers: &HeaderMap, name: HeaderName) -> Result<Option<Tags>, Problem> {
    if !headers.contains_key(&name) {
        return Ok(None);
    }
    let lines: Result<Vec<&str>, _> = headers.get_all(&name).iter().map(HeaderValue::to_str).collect();
    let found = lines.ok().and_then(|lines| parse(&lines.join(",")));
    let what = || Problem::new(Code::Invalid, format!("{name} has no entity tags")).field(name.as_str());
    found.map(Some).ok_or_else(|| what().advise("give the value of an ETag header with its quotes, several, or *"))
}

/// Parses `*`, or a list of tags, which may contain commas between quotes.
fn parse(text: &str) -> Option<Tags> {
    let mut rest = text.trim();
    if rest == "*" {
        return Some(Tags::Any);
    }
    let mut tags = Vec::new();
    while !rest.is_empty() {
        let (weak, quoted) = rest.strip_prefix("W/").map_or((false, rest), |quoted| (true, quoted));
        let (opaque, behind) = quoted.strip_prefix('"')?.split_once('"')?;
        tags.push((weak, format!("\"{opaque}\"")));
        let behind = behind.trim_start();
        rest = match behind.strip_prefix(',') {
            Some(more) => more.trim_start_matches([',', ' ', '\t']),
            None if behind.is_empty() => behind,
            None => return None,
        };
    }
    (!tags.is_empty()).then_some(Tags::These(tags))
}

impl Tags {
    /// Whether a tag is among them, by weak comparison (RFC 9110, 8.8.3.2).
    fn has(&self, tag: &str) -> bool {
        match self {
            Tags::Any => true,
            Tags::These(tags) => tags.iter().any(|(_, known)| known == tag),
        }
    }

    /// Whether a tag is among them, by strong comparison.
    fn has_strong(&self, tag: &str) -> bool {
        match self {
            Tags::Any => true,
            Tags::These(tags) => tags.iter().any(|(weak, known)| !weak && known == tag),
        }
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn lists_of_entity_tags_are_parsed_and_anything_else_is_not() {
        let these = |tags: &[(bool, &str)]| {
            Some(Tags::These(tags.iter().map(|(weak, tag)| (*weak, (*tag).to_owned())).collect()))
        };
        assert_eq!(parse(" * "), Some(Tags::Any));
        assert_eq!(parse("\"a\""), these(&[(false, "\"a\"")]));
        assert_eq!(parse("\"a,b\" , W/\"c\",,\"\""), these(&[(false, "\"a,b\""), (true, "\"c\""), (false, "\"\"")]));
        for wrong in ["", "a", "\"a", "\"a\" \"b\"", "*, \"a\"", "w/\"a\"", ","] {
            assert_eq!(parse(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn a_weak_tag_is_equal_for_a_read_and_never_for_a_change() {
        let tags = parse("W/\"a\"").unwrap();
        assert!(tags.has("\"a\"") && !tags.has_strong("\"a\"") && !tags.has("\"b\""));
        assert!(Tags::Any.has("\"b\"") && Tags::Any.has_strong("\"b\""));
    }

    #[test]
    fn the_object_of_a_path_is_found_with_and_without_a_verb() {
        let uuid = Uuid::from_u128(7);
        assert_eq!(object_of(&format!("/v1/vdis/{uuid}")), Some((ObjectKind::Vdi, uuid)));
        assert_eq!(object_of(&format!("/v1/vbds/{uuid}/plug")), Some((ObjectKind::Vbd, uuid)));
        for none in ["/v1/vdis".to_owned(), "/v1/srs/probe".into(), format!("/v1/tokens/{uuid}"), "/v1".into()] {
            assert_eq!(object_of(&none), None, "{none}");
        }
    }
}
