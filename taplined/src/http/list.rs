//! Pages of lists: `limit`, `after`, and the header `Link` with the next page (RFC 8288).
//!
//! A page begins after a given object, not at a position: objects created or destroyed in the meantime are neither
//! repeated nor skipped. Only if that object itself was destroyed must the client start over.

use api::{Code, Problem, Tag};
use axum::extract::FromRequestParts;
use axum::http::request::Parts;
use serde::Deserialize;
use utoipa::IntoParams;

use super::extract::QueryParams;
use super::{ROOT, Refusal};

/// Maximum number of objects of a page. Without a limit, lists are complete.
const LIMIT_MAX: u32 = 1000;

/// The query of every list.
#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub struct Paging {
    /// At most this many; if there are more, the header `Link` has the next page. All if omitted.
    #[param(minimum = 1, maximum = 1000)]
    limit: Option<u32>,
    /// Only what comes after the one with this UUID, the last one of the previous page.
    after: Option<String>,
}

/// Tags that a list is to be of.
#[derive(Debug, IntoParams)]
#[into_params(parameter_in = Query)]
#[expect(dead_code, reason = "for the document: a parameter that may come several times is read by `Tagged`")]
pub struct Tagging {
    /// Only those with this tag; with several, those that have all of them.
    #[param(inline)]
    tag: Option<Vec<Tag>>,
}

/// The tags of a request's filter.
#[derive(Debug)]
pub struct Tagged(pub Vec<Tag>);

impl<S: Send + Sync> FromRequestParts<S> for Tagged {
    type Rejection = Refusal;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Tagged, Refusal> {
        let QueryParams(pairs) = QueryParams::<Vec<(String, String)>>::from_request_parts(parts, state).await?;
        let tags = pairs.into_iter().filter(|(name, _)| name == "tag").map(|(_, tag)| tag.parse());
        let tags: Result<Vec<Tag>, String> = tags.collect();
        Ok(Tagged(tags.map_err(|why| Problem::new(Code::Invalid, format!("invalid query: {why}")).field("tag"))?))
    }
}

/// The page that a request selects.
#[derive(Debug)]
pub struct Page {
    limit: Option<usize>,
    after: Option<String>,
    /// The path, and the query without `after`.
    target: String,
}

/// Validates the limit of a page.
pub fn check_limit(limit: Option<u32>) -> Result<Option<usize>, Problem> {
    match limit {
        Some(limit) if limit == 0 || limit > LIMIT_MAX => {
            let what = format!("a limit must be 1 to {LIMIT_MAX}, not {limit}");
            Err(Problem::new(Code::Invalid, what).field("limit").advise("to get all, leave it out"))
        }
        limit => Ok(limit.and_then(|limit| usize::try_from(limit).ok())),
    }
}

impl<S: Send + Sync> FromRequestParts<S> for Page {
    type Rejection = Refusal;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Page, Refusal> {
        let QueryParams(Paging { limit, after }) = QueryParams::from_request_parts(parts, state).await?;
        let mut target = format!("{ROOT}{}?", parts.uri.path());
        let pairs = parts.uri.query().unwrap_or_default().split('&').filter(|pair| !pair.is_empty());
        for pair in pairs.filter(|pair| !pair.starts_with("after=")) {
            target.push_str(pair);
            target.push('&');
        }
        Ok(Page { limit: check_limit(limit)?, after, target })
    }
}

impl Page {
    /// The page of a list, and the header `Link` if more follows. `after` names objects by `key`.
    pub fn of<T>(&self, mut all: Vec<T>, key: impl Fn(&T) -> String) -> Result<(Vec<T>, Option<String>), Problem> {
        if let Some(after) = &self.after {
            let Some(last) = all.iter().position(|one| key(one) == *after) else {
                let what = format!("'{after}' is not in this list");
                let advice = "begin again without after: it has been destroyed, or the filters are others now";
                return Err(Problem::new(Code::Invalid, what).field("after").advise(advice));
            };
            all.drain(..=last);
        }
        let more = self.limit.is_some_and(|limit| all.len() > limit);
        all.truncate(self.limit.unwrap_or(usize::MAX));
        let next = all
            .last()
            .filter(|_| more)
            .map(|last| format!("<{}after={}>; rel=\"next\"", self.target, escaped(&key(last))));
        Ok((all, next))
    }
}

/// A percent-encoded value for a query (RFC 3986, 3.4).
fn escaped(value: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~/:".contains(&byte);
    value.bytes().map(|byte| if plain(byte) { char::from(byte).into() } else { format!("%{byte:02X}") }).collect()
}

#[cfg(test)]
mod test {
    use super::*;

    fn page(limit: Option<usize>, after: Option<&str>) -> Page {
        Page { limit, after: after.map(str::to_owned), target: "/v1/vdis?limit=2&".into() }
    }

    fn of(page: &Page) -> Result<(Vec<&'static str>, Option<String>), Problem> {
        page.of(vec!["a", "b", "c d", "e", "f"], |one| (*one).to_owned())
    }

    #[test]
    fn pages_follow_each_other_without_gaps_or_repetitions() {
        let next = |after| Some(format!("</v1/vdis?limit=2&after={after}>; rel=\"next\""));
        assert_eq!(of(&page(Some(2), None)), Ok((vec!["a", "b"], next("b"))));
        assert_eq!(of(&page(Some(2), Some("a"))), Ok((vec!["b", "c d"], next("c%20d"))));
        assert_eq!(of(&page(Some(2), Some("c d"))), Ok((vec!["e", "f"], None)));
        assert_eq!(of(&page(Some(2), Some("f"))), Ok((vec![], None)));
        assert_eq!(of(&page(None, Some("b"))), Ok((vec!["c d", "e", "f"], None)));
        assert_eq!(of(&page(None, None)).unwrap().0.len(), 5);
    }

    #[test]
    fn an_object_that_is_not_in_the_list_and_a_limit_of_nothing_are_refused() {
        assert_eq!(of(&page(Some(2), Some("z"))).unwrap_err().field.as_deref(), Some("after"));
        for wrong in [0, LIMIT_MAX + 1, u32::MAX] {
            assert_eq!(check_limit(Some(wrong)).unwrap_err().field.as_deref(), Some("limit"));
        }
        assert_eq!(check_limit(Some(LIMIT_MAX)), Ok(Some(1000)));
    }
}
