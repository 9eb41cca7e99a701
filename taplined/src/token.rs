//! Tokens: access to the API over TCP. The catalogue stores them; here they are looked up by their secrets, and
//! connections are notified when their token ends.
//!
//! Of a secret only the SHA-256 is kept. A slow hash, as needed for passwords, would add no protection: a secret is
//! 256 random bits, which cannot be guessed at any speed. It would only let clients burn the daemon's CPU time.
//! Secrets are found by looking up their hashes: the time this takes can reveal something about a stored hash, but
//! never about a secret, because a caller cannot choose a hash.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::background;
use api::{Code, Name, Problem, Role, Secret, Tag, Token, TokenCreate, TokenMade};
use jiff::Timestamp;
use repo::Catalogue;
use repo::catalogue::SecretHash;
use ring::digest::{SHA256, digest};
use ring::rand::{SecureRandom, SystemRandom};
use tokio::sync::watch;
use uuid::Uuid;

/// Longest wait for a token's expiry on the monotonic clock: the wall clock may be set in the meantime.
const CLOCK_TRUSTED: Duration = Duration::from_secs(60);

/// The existing tokens. Cheap to clone; clones share their state.
#[derive(Clone, Debug)]
pub struct Tokens {
    catalogue: Catalogue,
    known: Arc<Mutex<HashMap<SecretHash, Known>>>,
}

#[derive(Debug)]
struct Known {
    token: Token,
    /// Dropped with the token, which notifies the connections that use it.
    alive: watch::Sender<()>,
}

/// The rights of a connection that has sent a token, for as long as the token is valid.
#[derive(Clone, Debug)]
pub struct Grant {
    /// The token's name.
    pub name: Name,
    /// The role of its holder.
    pub role: Role,
    /// The tag of the objects that an operator may operate.
    pub tag: Option<Tag>,
    expires: Option<Timestamp>,
    alive: watch::Receiver<()>,
}

impl Tokens {
    /// Loads the tokens of the catalogue.
    pub async fn load(catalogue: &Catalogue) -> Result<Tokens, Problem> {
        let kept = catalogue.read(|view| view.tokens()).await?;
        let known = kept.into_iter().map(|(token, hash)| (hash, Known { token, alive: watch::Sender::default() }));
        Ok(Tokens { catalogue: catalogue.clone(), known: Arc::new(Mutex::new(known.collect())) })
    }

    fn known(&self) -> MutexGuard<'_, HashMap<SecretHash, Known>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// All tokens, by name.
    pub fn list(&self) -> Vec<Token> {
        let mut tokens: Vec<Token> = self.known().values().map(|known| known.token.clone()).collect();
        tokens.sort_by(|one, other| one.name.cmp(&other.name));
        tokens
    }

    /// Creates a token.
    pub async fn create(&self, asked: TokenCreate) -> Result<TokenMade, Problem> {
        let created = Timestamp::now();
        if asked.expires.is_some_and(|expires| expires <= created) {
            return Err(Problem::new(Code::Invalid, "a token's expiry must be in the future").field("expires"));
        }
        let mut random = [0; 32];
        SystemRandom::new().fill(&mut random).map_err(|error| Problem::failed("generate a secret", error))?;
        let secret = Secret::new(random);
        let role = asked.role()?;
        let TokenCreate { uuid: chosen, name, tag, expires, .. } = asked;
        let uuid = chosen.unwrap_or_else(Uuid::new_v4);
        let token = Token { uuid, name, role, tag, read_only: role == Role::Reader, created, expires };
        let (tokens, kept, hash) = (self.clone(), token.clone(), hash(&secret));
        self.to_completion(async move {
            let keep = kept.clone();
            let written = tokens.catalogue.write(move |tx| {
                chosen.map_or(Ok(()), |uuid| tx.check_uuid_free(uuid))?;
                tx.add_token(&keep, &hash)
            });
            written.await?;
            tracing::info!(name = %kept.name, uuid = %kept.uuid, "token created");
            tokens.known().insert(hash, Known { token: kept, alive: watch::Sender::default() });
            Ok(())
        })
        .await?;
        Ok(TokenMade { token, secret })
    }

    /// Revokes a token, and closes the connections that use it.
    pub async fn revoke(&self, uuid: Uuid) -> Result<(), Problem> {
        let tokens = self.clone();
        self.to_completion(async move {
            tokens.catalogue.write(move |tx| tx.remove_token(uuid)).await?;
            tokens.known().retain(|_, known| known.token.uuid != uuid);
            tracing::info!(%uuid, "token revoked");
            Ok(())
        })
        .await
    }

    /// Completes a change even if the caller disconnects, so that stored and cached tokens do not diverge.
    async fn to_completion(
        &self,
        change: impl Future<Output = Result<(), Problem>> + Send + 'static,
    ) -> Result<(), Problem> {
        let changed = background::spawn(change).await;
        changed.map_err(|error| Problem::new(Code::Internal, format!("a change of the tokens ended: {error}")))?
    }

    /// The rights granted by a secret.
    pub fn grant(&self, secret: &Secret) -> Result<Grant, Problem> {
        let unauthorized = |what: &str| Err(Problem::new(Code::Unauthorized, what).advise(ADVICE));
        let known = self.known();
        let Some(Known { token, alive }) = known.get(&hash(secret)) else {
            return unauthorized("unknown or revoked token");
        };
        let Token { name, role, tag, expires, .. } = token.clone();
        match expires {
            Some(expires) if expires <= Timestamp::now() => unauthorized("the token has expired"),
            _ => Ok(Grant { name, role, tag, expires, alive: alive.subscribe() }),
        }
    }
}

/// Advice for a missing or invalid token.
pub const ADVICE: &str = "create one as root on the daemon's host: tapline token create NAME";

impl Grant {
    /// Waits until the token is revoked or expires.
    pub async fn ended(mut self) {
        tokio::select! {
            // An error means that the other side was dropped, and no value is ever sent.
            _ = self.alive.changed() => {}
            () = reached(self.expires) => {}
        }
    }
}

/// Waits for a wall-clock time; forever if there is none.
async fn reached(at: Option<Timestamp>) {
    let Some(at) = at else { return std::future::pending().await };
    while let Ok(left) = Duration::try_from(at.duration_since(Timestamp::now())) {
        if left.is_zero() {
            return;
        }
        tokio::time::sleep(left.min(CLOCK_TRUSTED)).await;
    }
}

fn hash(secret: &Secret) -> SecretHash {
    let mut hash = SecretHash::default();
    hash.copy_from_slice(digest(&SHA256, secret.as_str().as_bytes()).as_ref());
    hash
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn the_hash_is_standard_sha256() {
        // printf tapline_0707… | sha256sum
        let hash: String = hash(&Secret::new([7; 32])).iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(hash, "d6e8a2fc6b898b63d8291e63819b6cecc74530d6d58850bdd26977cf86a4c78d");
    }

    async fn tokens(directory: &tempfile::TempDir) -> Tokens {
        Tokens::load(&Catalogue::open(&directory.path().join("catalogue.db")).unwrap()).await.unwrap()
    }

    fn asked(name: &str) -> TokenCreate {
        let name = name.parse().unwrap();
        TokenCreate { uuid: None, name, role: None, tag: None, read_only: false, expires: None }
    }

    #[tokio::test]
    async fn a_token_is_valid_until_revoked_even_for_the_next_daemon() {
        let directory = tempfile::tempdir().unwrap();
        let made = tokens(&directory).await.create(asked("ci")).await.unwrap();
        let tokens = tokens(&directory).await;
        let grant = tokens.grant(&made.secret).unwrap();
        assert_eq!((grant.name.as_str(), tokens.list()), ("ci", vec![made.token.clone()]));
        tokens.revoke(made.token.uuid).await.unwrap();
        grant.ended().await;
        assert_eq!(tokens.grant(&made.secret).unwrap_err().code, Code::Unauthorized);
        assert_eq!(tokens.revoke(made.token.uuid).await.unwrap_err().code, Code::NotFound);
    }

    #[tokio::test]
    async fn a_token_expires_and_cannot_be_created_already_expired() {
        let directory = tempfile::tempdir().unwrap();
        let tokens = tokens(&directory).await;
        let past = tokens.create(TokenCreate { expires: Some(Timestamp::now()), ..asked("past") }).await.unwrap_err();
        assert_eq!((past.code, past.field.as_deref()), (Code::Invalid, Some("expires")));
        // On a busy machine it may expire before it is used.
        let mut life = Duration::from_millis(300);
        let (made, grant) = loop {
            let soon = Timestamp::now() + life;
            let made = tokens.create(TokenCreate { expires: Some(soon), ..asked("soon") }).await.unwrap();
            match tokens.grant(&made.secret) {
                Ok(grant) => break (made, grant),
                Err(problem) => assert!(problem.detail.contains("expired"), "{problem}"),
            }
            life *= 2;
        };
        grant.ended().await;
        assert!(tokens.grant(&made.secret).unwrap_err().detail.contains("expired"));
    }
}
