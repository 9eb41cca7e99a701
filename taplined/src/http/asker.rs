//! Who asks: somebody of this host, as the kernel says, or whoever has a token.

use api::{Code, Problem};
use axum::extract::FromRequestParts;
use axum::http::request::Parts;

use super::Refusal;
use crate::token::Grant;

/// Who asks. Each request has it among its extensions.
#[derive(Clone, Debug)]
pub enum Asker {
    /// A process of this host, by its user.
    Local {
        /// Who.
        uid: u32,
    },
    /// Somebody who has shown a token.
    Token(Grant),
}

/// Root or the daemon's own user, on this host: what these may do, no token and no group gives.
#[derive(Clone, Copy, Debug)]
pub struct Administrator;

/// Whether a user is one whom the daemon need not ask further.
pub fn is_own(uid: u32) -> bool {
    uid == 0 || uid == rustix::process::geteuid().as_raw()
}

impl<S: Send + Sync> FromRequestParts<S> for Administrator {
    type Rejection = Refusal;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Administrator, Refusal> {
        let who = match parts.extensions.get() {
            Some(Asker::Local { uid }) if is_own(*uid) => return Ok(Administrator),
            // Members of the group may come and go; a token that one of them has made would stay.
            Some(Asker::Local { uid }) => format!("user {uid}"),
            Some(Asker::Token(grant)) => format!("the token «{}»", grant.name),
            None => "whoever asks".into(),
        };
        let what = format!("{who} may not see, make or revoke tokens");
        Err(Problem::new(Code::Forbidden, what).advise("ask as root on the daemon's host, over its socket").into())
    }
}
