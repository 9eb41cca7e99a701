//! `/tokens`.

use hyper::Method;
use uuid::Uuid;

use super::Client;
use super::target::Target;
use crate::{Problem, Token, TokenCreate, TokenMade};

const TOKENS: &str = "tokens";

impl Client {
    /// The tokens that there are; of their secrets, nothing is known.
    pub async fn tokens(&self) -> Result<Vec<Token>, Problem> {
        self.get(&Target::new(TOKENS)).await
    }

    /// Makes a token.
    pub async fn token_create(&self, asked: &TokenCreate) -> Result<TokenMade, Problem> {
        self.change(Method::POST, &Target::new(TOKENS), asked).await
    }

    /// Ends a token, and all connections that it has.
    pub async fn token_revoke(&self, uuid: Uuid) -> Result<(), Problem> {
        self.change(Method::DELETE, &Target::object(TOKENS, uuid), &()).await
    }
}
