//! The caller of a request: a user of this host, identified by the kernel, or the holder of a token.

use std::io;

use api::Requester;
use hyper::upgrade::{OnUpgrade, Upgraded};
use hyper_util::rt::TokioIo;

use crate::token::Grant;

/// The caller, an extension of each request.
#[derive(Clone, Debug)]
pub enum Caller {
    /// A process on this host.
    Local {
        /// The user it runs as.
        uid: u32,
    },
    /// The holder of a token.
    Token(Grant),
}

/// The local users; others are known by uid only.
const USERS: &str = "/etc/passwd";

impl Caller {
    /// Serves an upgraded connection until it ends or the caller's token becomes invalid.
    pub async fn serve<F>(self, connection: OnUpgrade, serve: impl FnOnce(TokioIo<Upgraded>) -> F) -> io::Result<()>
    where
        F: Future<Output = io::Result<()>>,
    {
        let connection = TokioIo::new(connection.await.map_err(io::Error::other)?);
        tokio::select! {
            served = serve(connection) => served,
            () = self.ended() => Ok(()),
        }
    }

    /// Waits until the caller's token is revoked or expires. Never returns for a user of this host.
    pub async fn ended(self) {
        match self {
            Caller::Token(grant) => grant.ended().await,
            Caller::Local { .. } => std::future::pending().await,
        }
    }

    /// The caller, as recorded with its request.
    pub async fn requester(&self) -> Requester {
        match self {
            Caller::Token(grant) => Requester::Token { name: grant.name.clone() },
            Caller::Local { uid } => {
                let users = tokio::fs::read_to_string(USERS).await.unwrap_or_default();
                Requester::User { uid: *uid, name: name_in(&users, *uid) }
            }
        }
    }
}

/// The name of a user (passwd(5)).
fn name_in(users: &str, uid: u32) -> Option<String> {
    let mut fields = users.lines().map(|line| line.split(':').collect::<Vec<_>>());
    fields.find_map(|fields| match fields.as_slice() {
        [name, _, number, ..] if number.parse() == Ok(uid) => Some((*name).to_owned()),
        _ => None,
    })
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn a_users_name_is_found_by_number() {
        let users = "root:x:0:0:root:/root:/bin/sh\nbroken\nweb:x:1001:1001::/home/web:/bin/sh\n";
        let names = [0, 1001, 7].map(|uid| name_in(users, uid));
        assert_eq!(names, [Some("root".to_owned()), Some("web".to_owned()), None]);
    }
}
