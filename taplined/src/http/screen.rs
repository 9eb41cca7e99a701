//! `/vms/UUID/screen`: the VNC server of a VM as a WebSocket, for browsers.
//!
//! It knows nothing about RFB: bytes are relayed. Invariant: a relay ends when the token that opened it becomes
//! invalid.

use api::{Code, Problem};
use axum::body::Body;
use axum::extract::{Extension, Request, State};
use axum::http::StatusCode;
use axum::http::header::{CONNECTION, HeaderValue, SEC_WEBSOCKET_ACCEPT, SEC_WEBSOCKET_PROTOCOL, UPGRADE};
use axum::response::IntoResponse;
use hyper::upgrade::OnUpgrade;
use tokio::sync::Semaphore;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::caller::Caller;
use super::extract::Id;
use super::{Answer, websocket};
use crate::background;
use crate::daemon::Daemon;

/// The subprotocol of the WebSocket.
const PROTOCOL: &str = "tapline.screen";

/// Maximum number of relayed screens. Each needs two buffers and two descriptors.
const SCREENS_MAX: usize = 64;

static SCREENS: Semaphore = Semaphore::const_new(SCREENS_MAX);

/// The route of the screens of VMs.
pub fn routes() -> OpenApiRouter<Daemon> {
    OpenApiRouter::new().routes(routes!(vm_screen))
}

/// Opens the screen of a VM: its VNC server (RFB), as a WebSocket with the subprotocol `tapline.screen`. Over TCP a
/// browser sends its token as a second subprotocol, `tapline.token.SECRET`.
#[utoipa::path(
    get, path = "/vms/{uuid}/screen", tag = "vm", params(Id),
    responses((status = 101, description = "The connection is a WebSocket with the bytes of RFB from now on"))
)]
async fn vm_screen(
    State(daemon): State<Daemon>,
    Extension(caller): Extension<Caller>,
    Id(uuid): Id,
    mut request: Request,
) -> Answer {
    let vm = daemon.catalogue.read(move |view| view.vm(uuid)).await?;
    let what = |why: &str| format!("cannot open the screen of VM '{}' ({uuid}): {why}", vm.name);
    let upgrade = request.extensions_mut().remove::<OnUpgrade>();
    let (Some(connection), Some(accepted)) = (upgrade, websocket::accept(request.headers())) else {
        let problem = Problem::new(Code::Invalid, what("this is no handshake of a WebSocket"));
        return Err(problem.advise("connect with a WebSocket client (RFC 6455), over HTTP/1.1").into());
    };
    let Ok(place) = SCREENS.try_acquire() else {
        let problem = Problem::new(Code::Overloaded, what(&format!("{SCREENS_MAX} screens are open")));
        return Err(problem.advise("close one of them").into());
    };
    let guest = daemon.vms.screen(&daemon.config, &vm)?;
    background::spawn(async move {
        let _place = place;
        if let Err(error) = caller.serve(connection, |viewer| websocket::relay(viewer, guest)).await {
            tracing::debug!(vm = %uuid, %error, "a viewer of its screen is gone");
        }
    });
    let mut response = (StatusCode::SWITCHING_PROTOCOLS, Body::empty()).into_response();
    let headers = response.headers_mut();
    headers.insert(CONNECTION, HeaderValue::from_static("upgrade"));
    headers.insert(UPGRADE, HeaderValue::from_static("websocket"));
    headers.insert(SEC_WEBSOCKET_ACCEPT, accepted);
    if websocket::offered(request.headers()).any(|offered| offered == PROTOCOL) {
        headers.insert(SEC_WEBSOCKET_PROTOCOL, HeaderValue::from_static(PROTOCOL));
    }
    Ok(response)
}
