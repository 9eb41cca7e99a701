//! The caller of a request: a user of this host, identified by the kernel, or the holder of a token.

use api::{Code, Problem};
use axum::extract::FromRequestParts;
use axum::http::request::Parts;

use super::Refusal;
use crate::token::Grant;

/// The caller, which is among the extensions of each request.
#[derive(Clone, Debug)]
pub enum Asker {
    /// A process on this host.
    Local {
        /// The user it runs as.
        uid: u32,
    },
    /// The holder of a token.
    Token(Grant),
}

/// Proof that the caller is root or the daemon's own user on this host, which no token and no group can replace.
#[derive(Clone, Copy, Debug)]
pub struct Administrator;

/// Whether a user has full rights.
pub fn is_own(uid: u32) -> bool {
    uid == 0 || uid == rustix::process::geteuid().as_raw()
}

impl<S: Send + Sync> FromRequestParts<S> for Administrator {
    type Rejection = Refusal;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Administrator, Refusal> {
        let who = match parts.extensions.get() {
            Some(Asker::Local { uid }) if is_own(*uid) => return Ok(Administrator),
            // Group membership can be withdrawn, but a token created by a member would stay valid.
            Some(Asker::Local { uid }) => format!("user {uid}"),
            Some(Asker::Token(grant)) => format!("the token '{}'", grant.name),
            None => "the caller".into(),
        };
        let what = format!("{who} may not list, create or revoke tokens");
        Err(Problem::new(Code::Forbidden, what).advise("do it as root on the daemon's host, over its socket").into())
    }
}
