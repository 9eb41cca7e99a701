//! Authorization: the role that each operation needs, enforced in one place, before anything else of a request is
//! examined.
//!
//! Invariant: an operation that is not in the table needs the role admin, and a test finds it.

use std::sync::Arc;

use api::{Code, Problem, Role, Tags, visible};
use axum::extract::{Request, State};
use axum::http::header::{UPGRADE, WWW_AUTHENTICATE};
use axum::http::{HeaderValue, Method};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use uuid::Uuid;

use super::Refusal;
use super::caller::Caller;
use super::contract::Contract;
use super::extract::whole;
use super::listener::REQUEST_TIMEOUT;
use crate::account::is_own;
use crate::daemon::Daemon;
use crate::token::Grant;

/// The access that an operation needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Any role.
    Read,
    /// The role operator of the object, or admin.
    Operate(Kind),
    /// [`Access::Read`] for the console's log; [`Access::Operate`] for a connection to the console or screen.
    Console,
    /// The role admin.
    Administer,
    /// Root on the daemon's host, whatever the role.
    Root,
}

/// Kinds of objects that an operator may operate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Vdi,
    Vbd,
    Vm,
}

use Access::{Administer, Console, Operate, Read, Root};

/// The accesses of all operations, by operation ID.
///
/// `sr_probe` and `sr_inventory_at` change no object, and still need the role admin: the caller decides what the
/// daemon opens as root. This may be any directory of the host, or a share of any server, which is mounted: with
/// credentials from a file that the caller names, and by a hard mount that hangs as long as that server wants. A
/// reader could use it to find out which files the host has, and make the daemon connect to an attacker's server.
#[rustfmt::skip]
const ACCESSES: &[(&str, Access)] = &[
    ("index", Read), ("docs", Read), ("openapi", Read), ("problem_list", Read), ("problem_show", Read),
    ("event_follow", Read),
    ("host_show", Read), ("host_backups", Read), ("host_backup", Administer), ("host_drain", Administer),
    ("host_reconcile", Administer),
    ("statistics_list", Read), ("vbd_statistics", Read), ("vbd_history", Read), ("metrics", Read),
    ("sr_list", Read), ("sr_show", Read), ("sr_inventory", Read), ("sr_inventory_at", Administer),
    ("sr_create", Administer), ("sr_introduce", Administer), ("sr_probe", Administer), ("sr_destroy", Administer),
    ("sr_patch", Administer), ("sr_attach", Administer), ("sr_detach", Administer), ("sr_forget", Administer),
    ("sr_scan", Administer), ("sr_calibrate", Administer), ("sr_policy", Read), ("sr_policy_forget", Administer),
    ("backup_target_list", Read), ("backup_target_show", Read), ("backup_target_backups", Read),
    ("backup_target_add", Administer), ("backup_target_remove", Administer), ("backup_target_restore", Administer),
    ("backup_target_verify", Administer), ("backup_target_prune", Administer),
    ("backup_target_remove_backups", Administer), ("backup_target_restore_vm", Administer),
    ("vdi_backup", Administer), ("vm_backup", Administer),
    ("vdi_restore_in_place", Administer), ("vm_restore_in_place", Administer),
    ("task_list", Read), ("task_show", Read), ("task_abandon", Administer), ("task_cancel", Administer),
    ("token_list", Root), ("token_show", Root), ("token_create", Root), ("token_revoke", Root),
    ("upload_list", Read), ("upload_show", Read), ("upload_create", Administer),
    ("upload_append", Administer), ("upload_remove", Administer),
    ("download_list", Read), ("download_show", Read), ("download_read", Administer), ("download_remove", Administer),
    ("vbd_list", Read), ("vbd_show", Read), ("vbd_connect", Read), ("vbd_create", Administer),
    ("vbd_plug_many", Administer), ("vbd_unplug_many", Administer), ("vbd_destroy", Administer),
    ("vbd_patch", Administer), ("vbd_plug", Operate(Kind::Vbd)), ("vbd_unplug", Operate(Kind::Vbd)),
    ("vbd_upgrade", Administer), ("vbd_limit", Operate(Kind::Vbd)), ("vbd_share", Administer),
    ("vdi_list", Read), ("vdi_show", Read), ("vdi_create", Administer), ("vdi_import", Administer),
    ("vdi_destroy", Administer), ("vdi_patch", Administer), ("vdi_clone", Administer), ("vdi_copy", Administer),
    ("vdi_export", Administer), ("vdi_merge", Administer), ("vdi_reconcile", Administer),
    ("vdi_cbt_enable", Administer), ("vdi_cbt_disable", Administer), ("vdi_changes", Read),
    ("vdi_data_destroy", Administer),
    ("vdi_resize", Operate(Kind::Vdi)), ("vdi_revert", Administer), ("vdi_snapshot", Operate(Kind::Vdi)),
    ("vm_list", Read), ("vm_show", Read), ("vm_console", Console), ("vm_screen", Console), ("vm_snapshot_list", Read),
    ("vm_create", Administer), ("vm_destroy", Administer), ("vm_patch", Administer), ("vm_clone", Administer),
    ("vm_pause", Operate(Kind::Vm)), ("vm_resume", Operate(Kind::Vm)), ("vm_suspend", Operate(Kind::Vm)),
    ("vm_drop_memory", Administer), ("vm_revert", Administer),
    ("vm_shutdown", Operate(Kind::Vm)), ("vm_snapshot", Operate(Kind::Vm)),
    ("vm_snapshot_destroy", Administer), ("vm_snapshot_patch", Administer), ("vm_start", Operate(Kind::Vm)),
];

/// The access that an operation needs.
pub fn access_of(operation: &str) -> Access {
    ACCESSES.iter().find(|(name, _)| *name == operation).map_or(Administer, |(_, access)| *access)
}

/// Passes on requests that the caller may make. Unknown paths and methods are refused later.
pub async fn allow(
    State((daemon, contract)): State<(Daemon, Arc<Contract>)>,
    request: Request,
    next: Next,
) -> Response {
    let Some(access) = contract.access(&request) else { return next.run(request).await };
    let access = match access {
        // An upgraded connection can type on the console.
        Console if request.headers().contains_key(UPGRADE) => Operate(Kind::Vm),
        Console => Read,
        access => access,
    };
    let (caller, uuid) = (request.extensions().get::<Caller>().cloned(), uuid_in(request.uri().path()));
    let allowed = match check(&daemon, access, caller.as_ref(), uuid).await {
        Ok(Some((grant, tags))) => must_give_only(request, grant, &tags).await,
        Ok(None) => Ok(request),
        Err(problem) => Err(problem),
    };
    match allowed {
        Ok(request) => next.run(request).await,
        Err(problem) => {
            let is_token = matches!(caller, Some(Caller::Token(_)));
            let mut response = Refusal(problem).into_response();
            if is_token && response.status() == axum::http::StatusCode::FORBIDDEN {
                let how = HeaderValue::from_static("Bearer realm=\"tapline\", error=\"insufficient_scope\"");
                response.headers_mut().insert(WWW_AUTHENTICATE, how);
            }
            response
        }
    }
}

/// Refuses a caller that may not operate a VDI.
pub async fn must_operate_vdi(daemon: &Daemon, caller: &Caller, vdi: Uuid) -> Result<(), Problem> {
    check(daemon, Operate(Kind::Vdi), Some(caller), Some(vdi)).await.map(drop)
}

/// Refuses a request that its caller may not make. For an operator, returns the tags of the object, which are the
/// only ones that it may set.
async fn check(
    daemon: &Daemon,
    access: Access,
    caller: Option<&Caller>,
    uuid: Option<Uuid>,
) -> Result<Option<(Grant, Vec<Tags>)>, Problem> {
    let grant = match (access, caller) {
        (Root, caller) => return must_be_root(caller).map(|()| None),
        (_, Some(Caller::Local { .. })) | (Read, Some(_)) => return Ok(None),
        (_, Some(Caller::Token(grant))) => grant,
        (_, None) => return Err(Problem::new(Code::Forbidden, "the caller is not known")),
    };
    match (grant.role, access) {
        (Role::Admin, _) => Ok(None),
        (Role::Operator, Operate(kind)) => {
            // The operation's own parser may accept a UUID that is not recognized here, with percent-encoded digits.
            let Some(uuid) = uuid else { return Err(missing(grant, "a UUID, as it is, in the path")) };
            let tags = daemon.catalogue.read_for_client(move |view| tags_of(view, kind, uuid)).await?;
            let tag = grant.tag.as_ref();
            if tags.iter().any(|tags| tags.iter().any(|known| Some(known) == tag)) {
                return Ok(Some((grant.clone(), tags)));
            }
            Err(missing(grant, &format!("the role operator of objects with a tag of {uuid}, or admin")))
        }
        (Role::Reader, Operate(_)) => Err(missing(grant, "the role operator of this object, or admin")),
        _ => Err(missing(grant, "the role admin")),
    }
}

/// Refuses an operator's request that sets a tag that the object does not have: operators of other objects could then
/// use it. This holds for every operation, whatever its other fields are.
async fn must_give_only(request: Request, grant: Grant, tags: &[Tags]) -> Result<Request, Problem> {
    #[derive(serde::Deserialize)]
    struct Given {
        #[serde(default)]
        tags: Vec<serde_json::Value>,
    }
    if request.method() == Method::GET {
        return Ok(request);
    }
    let (parts, body) = request.into_parts();
    let body = whole(body, REQUEST_TIMEOUT).await?;
    // An invalid body is refused by the operation, with the reason.
    let given = serde_json::from_slice::<Given>(&body).map(|given| given.tags).unwrap_or_default();
    let has = |given: &str| tags.iter().flat_map(Tags::iter).any(|tag| tag.to_string() == given);
    if let Some(other) = given.iter().filter_map(serde_json::Value::as_str).find(|given| !has(given)) {
        let needs = format!("the role admin, to give the tag '{}', which the object does not have", visible(other));
        return Err(missing(&grant, &needs).field("tags").advise("leave that tag out, or have an admin set it"));
    }
    Ok(Request::from_parts(parts, axum::body::Body::from(body)))
}

/// Refuses all callers except root and the daemon's own user on this host; no token or group suffices.
fn must_be_root(caller: Option<&Caller>) -> Result<(), Problem> {
    let who = match caller {
        Some(Caller::Local { uid }) if is_own(*uid) => return Ok(()),
        // Group membership can be withdrawn, but a token created by a member would stay valid.
        Some(Caller::Local { uid }) => format!("user {uid}"),
        Some(Caller::Token(grant)) => format!("the token '{}'", grant.name),
        None => "the caller".into(),
    };
    let what = format!("{who} may not list, create or revoke tokens");
    Err(Problem::new(Code::Forbidden, what).advise("do it as root on the daemon's host, over its socket"))
}

fn missing(grant: &Grant, needs: &str) -> Problem {
    let has = match &grant.tag {
        Some(tag) => format!("{} of objects with the tag '{tag}'", grant.role),
        None => grant.role.to_string(),
    };
    let what = format!("the token '{}' has the role {has}; this needs {needs}", grant.name);
    Problem::new(Code::MissingRole, what).advise("use a token that has it: tapline token create --role")
}

/// The UUID of the object that a path is about: `/v1/LIST/UUID`.
fn uuid_in(path: &str) -> Option<Uuid> {
    Uuid::parse_str(path.split('/').nth(3)?).ok()
}

/// The tags that decide who may operate an object: its own and, for a VBD, those of its VM.
fn tags_of(view: &repo::View<'_>, kind: Kind, uuid: Uuid) -> Result<Vec<Tags>, Problem> {
    Ok(match kind {
        Kind::Vdi => vec![view.vdi(uuid)?.tags],
        Kind::Vm => vec![view.vm(uuid)?.tags],
        Kind::Vbd => {
            let vbd = view.vbd(uuid)?;
            let vm = vbd.vm.map(|vm| view.vm(vm)).transpose()?;
            std::iter::once(vbd.tags).chain(vm.map(|vm| vm.tags)).collect()
        }
    })
}

#[cfg(test)]
mod test {
    use std::collections::BTreeSet;

    use serde_json::Value;

    use super::*;

    #[test]
    fn each_operation_of_the_document_has_a_stated_access() {
        let document: Value = serde_json::from_str(super::super::document::text().unwrap()).unwrap();
        let paths = document["paths"].as_object().unwrap();
        let operations = paths.values().flat_map(|item| item.as_object().unwrap());
        let known: Vec<(&str, &str)> =
            operations.map(|(method, one)| (method.as_str(), one["operationId"].as_str().unwrap())).collect();
        let names: BTreeSet<&str> = known.iter().map(|(_, name)| *name).collect();
        let stated: BTreeSet<&str> = ACCESSES.iter().map(|(name, _)| *name).collect();
        assert_eq!((&stated, ACCESSES.len()), (&names, names.len()));
        for (method, name) in known {
            let access = access_of(name);
            assert!(access != Read || method == "get", "{name} changes something, and anybody may do it");
            // What is in a disk is not for everybody who may read about it.
            let is_of_disk = name == "download_read";
            assert!(method != "get" || is_of_disk || matches!(access, Read | Console | Root), "{name} only reads");
        }
    }

    #[test]
    fn the_object_of_a_path_is_the_uuid_behind_its_list() {
        let (one, other) = (Uuid::new_v4(), Uuid::new_v4());
        assert_eq!(uuid_in(&format!("/v1/vms/{one}/snapshots/{other}")), Some(one));
        for none in ["/v1/vms/1/start".to_owned(), format!("/v1/vms/%31/{one}"), "/v1/vms".into()] {
            assert_eq!(uuid_in(&none), None);
        }
    }
}
