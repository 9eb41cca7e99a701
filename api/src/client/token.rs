//! `/tokens`.

use hyper::Method;
use uuid::Uuid;

use super::Client;
use super::target::Target;
use crate::{Problem, Token, TokenCreate, TokenMade};

const TOKENS: &str = "tokens";

impl Client {
    /// Lists the tokens, without their secrets.
    pub async fn tokens(&self) -> Result<Vec<Token>, Problem> {
        self.get(&Target::new(TOKENS)).await
    }

    /// Creates a token.
    pub async fn token_create(&self, asked: &TokenCreate) -> Result<TokenMade, Problem> {
        self.change(Method::POST, &Target::new(TOKENS), asked).await
    }

    /// Revokes a token and closes all its connections.
    pub async fn token_revoke(&self, uuid: Uuid) -> Result<(), Problem> {
        self.change(Method::DELETE, &Target::object(TOKENS, uuid), &()).await
    }
}
