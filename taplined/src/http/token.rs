//! `/tokens`: for root on this host only.

use api::{Code, Name, Problem, Token, TokenCreate, TokenMade};
use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use serde::Deserialize;
use utoipa::IntoParams;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::answer::listed_here;
use super::extract::{Body, Id, QueryParams};
use super::list::{Page, Paging};
use super::{Answer, Created, created};
use crate::daemon::Daemon;

/// The routes of tokens.
pub fn routes() -> OpenApiRouter<Daemon> {
    OpenApiRouter::new().routes(routes!(token_list, token_create)).routes(routes!(token_show, token_revoke))
}

#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
struct TokenFilter {
    /// Only the one with this name.
    name: Option<Name>,
}

/// Lists the tokens by name, including expired ones. Only over the socket, by root.
#[utoipa::path(
    get, path = "/tokens", tag = "token", params(TokenFilter, Paging), responses((status = 200, body = Vec<Token>))
)]
async fn token_list(State(daemon): State<Daemon>, QueryParams(filter): QueryParams<TokenFilter>, page: Page) -> Answer {
    let mut tokens = daemon.tokens.list();
    tokens.retain(|token| filter.name.as_ref().is_none_or(|name| *name == token.name));
    listed_here(&page, tokens, |token| token.uuid.to_string())
}

/// Gets a token. Only over the socket, by root.
#[utoipa::path(get, path = "/tokens/{uuid}", tag = "token", params(Id), responses((status = 200, body = Token)))]
async fn token_show(State(daemon): State<Daemon>, Id(uuid): Id) -> Answer<Json<Token>> {
    let found = daemon.tokens.list().into_iter().find(|token| token.uuid == uuid);
    let missing = || Problem::new(Code::NotFound, format!("there is no token {uuid}"));
    Ok(Json(found.ok_or_else(missing)?))
}

/// Creates a token and returns its secret, this one time only. Only over the socket, by root.
#[utoipa::path(
    post, path = "/tokens", tag = "token", request_body = TokenCreate, responses((status = 201, body = TokenMade))
)]
async fn token_create(State(daemon): State<Daemon>, Body(asked): Body<TokenCreate>) -> Answer<Created<TokenMade>> {
    let made = daemon.tokens.create(asked).await?;
    Ok(created("tokens", made.token.uuid, made))
}

/// Revokes a token, which closes the connections that use it. Only over the socket, by root.
#[utoipa::path(delete, path = "/tokens/{uuid}", tag = "token", params(Id), responses((status = 204)))]
async fn token_revoke(State(daemon): State<Daemon>, Id(uuid): Id) -> Answer<StatusCode> {
    daemon.tokens.revoke(uuid).await?;
    Ok(StatusCode::NO_CONTENT)
}
