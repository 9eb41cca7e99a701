//! The lines in which the two ends talk, apart from requests.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::Error;

/// A client's name for a request, handed back with everything that is said about it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Id(pub(crate) Value);

/// Something that a disk says about a request.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Reply<A, E = A> {
    /// It is done.
    Ok(A),
    /// It was not done.
    Error(Error),
    /// A word on the way.
    Event(E),
}

#[derive(Serialize)]
struct Line<'a, A, E> {
    id: &'a Id,
    #[serde(flatten)]
    said: &'a Reply<A, E>,
}

impl<A: Serialize, E: Serialize> Reply<A, E> {
    /// The line about the request that a client calls so.
    pub fn line(&self, id: &Id) -> String {
        let text = serde_json::to_string(&Line { id, said: self });
        // Nothing in these values can fail to be JSON.
        let text = text.unwrap_or_else(|error| format!("{{\"id\":null,\"error\":{{\"message\":\"{error}\"}}}}"));
        format!("{text}\n")
    }
}

impl<A: DeserializeOwned, E: DeserializeOwned> Reply<A, E> {
    /// Reads a line without looking at its id: these clients have one request under way. Unknown fields are ignored.
    pub fn parse(line: &[u8]) -> serde_json::Result<Reply<A, E>> {
        #[derive(Deserialize)]
        struct Read<A, E> {
            ok: Option<A>,
            error: Option<Error>,
            event: Option<E>,
        }
        match serde_json::from_slice(line)? {
            Read { event: Some(event), .. } => Ok(Reply::Event(event)),
            Read { error: Some(error), .. } => Ok(Reply::Error(error)),
            Read { ok: Some(answer), .. } => Ok(Reply::Ok(answer)),
            _ => Err(serde::de::Error::custom("it is neither an answer nor an event")),
        }
    }
}

#[cfg(test)]
mod test {
    use super::*;
    use crate::Kind;

    #[test]
    fn an_answer_is_one_line_with_its_requests_id() {
        let id = Id("a\nb".into());
        assert_eq!(Reply::<_, ()>::Ok(()).line(&id), "{\"id\":\"a\\nb\",\"ok\":null}\n");
        assert_eq!(Reply::<(), _>::Event(7).line(&Id::default()), "{\"id\":null,\"event\":7}\n");
        let error = Error::new(Kind::Busy, "a merge is running").advise("wait");
        let line = Reply::<(), ()>::Error(error.clone()).line(&Id(1.into()));
        assert_eq!(
            line,
            "{\"id\":1,\"error\":{\"kind\":\"busy\",\"message\":\"a merge is running\",\"advice\":\"wait\"}}\n"
        );
        assert_eq!(Reply::<u8, u8>::parse(line.as_bytes()).unwrap(), Reply::Error(error));
    }

    #[test]
    fn kinds_and_fields_that_are_not_known_are_accepted() {
        let newer = br#"{"id":1,"error":{"kind":"tired","message":"no","since":7},"seen":true}"#;
        assert_eq!(Reply::<u8>::parse(newer).unwrap(), Reply::Error(Error::new(Kind::Failed, "no")));
        assert!(Reply::<u8>::parse(br#"{"id":1}"#).is_err());
    }
}
