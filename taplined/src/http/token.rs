//! `/tokens`: for root on this host only.

use api::{Problem, Token, TokenCreate, TokenMade};
use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::Refusal;
use super::asker::Administrator;
use super::extract::{Body, Id};
use crate::daemon::Daemon;

/// The routes.
pub fn routes() -> OpenApiRouter<Daemon> {
    OpenApiRouter::new().routes(routes!(list, create)).routes(routes!(revoke))
}

/// Lists the tokens by name, including expired ones. Only over the socket, by root.
#[utoipa::path(
    get, path = "/tokens", tag = "token", operation_id = "token_list",
    responses((status = 200, body = Vec<Token>), (status = "4XX", body = Problem), (status = "5XX", body = Problem))
)]
async fn list(State(daemon): State<Daemon>, _: Administrator) -> Json<Vec<Token>> {
    Json(daemon.tokens.list())
}

/// Creates a token and returns its secret, this one time only. Only over the socket, by root.
#[utoipa::path(
    post, path = "/tokens", tag = "token", operation_id = "token_create", request_body = TokenCreate,
    responses((status = 201, body = TokenMade), (status = "4XX", body = Problem), (status = "5XX", body = Problem))
)]
async fn create(
    State(daemon): State<Daemon>,
    _: Administrator,
    Body(asked): Body<TokenCreate>,
) -> Result<(StatusCode, Json<TokenMade>), Refusal> {
    Ok((StatusCode::CREATED, Json(daemon.tokens.create(asked).await?)))
}

/// Revokes a token, which closes the connections that use it. Only over the socket, by root.
#[utoipa::path(
    delete, path = "/tokens/{uuid}", tag = "token", operation_id = "token_revoke", params(("uuid" = Uuid, Path)),
    responses((status = 204), (status = "4XX", body = Problem), (status = "5XX", body = Problem))
)]
async fn revoke(State(daemon): State<Daemon>, _: Administrator, Id(uuid): Id) -> Result<StatusCode, Refusal> {
    daemon.tokens.revoke(uuid).await?;
    Ok(StatusCode::NO_CONTENT)
}
