//! `/srs`: storage repositories.

use api::{
    About, Code, Inventory, Name, ObjectKind, Problem, Sr, SrAttach, SrCreate, SrDestroyPlan, SrFound, SrIntroduce,
    SrPatch, SrProbe, SrSource, SrState, SrType, Task,
};
use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::IntoResponse;
use repo::catalogue::NewTask;
use serde::Deserialize;
use serde_json::{Value, json};
use utoipa::IntoParams;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;
use uuid::Uuid;

use super::answer::{listed, shown};
use super::extract::{Body, Id, QueryParams};
use super::list::{Page, Paging, Tagged, Tagging};
use super::{Answer, Begun, begun};
use crate::daemon::Daemon;
use crate::differences;
use crate::disk::shares;
use crate::plug;
use crate::request;
use crate::sr::{self, Claim, Create, Destroy, Given, Introduce, WhenAttached, doubtful};
use crate::task::Context;
use crate::task::job::Job;
use crate::vdi;

/// The routes of repositories.
pub fn routes() -> OpenApiRouter<Daemon> {
    OpenApiRouter::new()
        .routes(routes!(sr_list, sr_create))
        .routes(routes!(sr_probe))
        .routes(routes!(sr_introduce))
        .routes(routes!(sr_show, sr_patch, sr_destroy))
        .routes(routes!(sr_attach))
        .routes(routes!(sr_detach))
        .routes(routes!(sr_scan))
        .routes(routes!(sr_forget))
        .routes(routes!(sr_inventory))
        .routes(routes!(sr_inventory_at))
}

#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
struct SrFilter {
    /// Only those with this name.
    name: Option<Name>,
    /// Only those with this name or UUID prefix (at least four digits).
    r#match: Option<String>,
    /// Only those in this state.
    #[param(inline)]
    state: Option<SrState>,
    /// Only those on storage of this type: dir, nfs, smb or iso.
    #[param(inline)]
    r#type: Option<SrType>,
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct DestroyOptions {
    /// Change nothing; only report what would be done.
    #[serde(default)]
    dry_run: bool,
}

/// Lists the repositories by name.
#[utoipa::path(
    get, path = "/srs", tag = "sr", params(SrFilter, Tagging, Paging), responses((status = 200, body = Vec<Sr>))
)]
async fn sr_list(
    State(daemon): State<Daemon>,
    QueryParams(filter): QueryParams<SrFilter>,
    tagged: Tagged,
    page: Page,
) -> Answer {
    let question = move |view: &repo::View<'_>| {
        let mut srs = view.shown_srs()?;
        srs.retain(|sr| {
            filter.name.as_ref().is_none_or(|name| *name == sr.name)
                && filter.r#match.as_ref().is_none_or(|like| super::is_like(like, Some(&sr.name), sr.uuid))
                && filter.state.is_none_or(|state| state == sr.state)
                && filter.r#type.is_none_or(|kind| kind == sr.source.kind())
                && sr.tags.have_all(&tagged.0)
        });
        Ok(srs)
    };
    listed(&daemon, page, |sr| sr.uuid, question).await
}

/// Gets a repository.
#[utoipa::path(get, path = "/srs/{uuid}", tag = "sr", params(Id), responses((status = 200, body = Sr)))]
async fn sr_show(State(daemon): State<Daemon>, Id(uuid): Id) -> Answer {
    shown(&daemon, ObjectKind::Sr, uuid).await
}

/// Creates a repository in an empty directory and attaches it. The task's result contains its UUID.
#[utoipa::path(post, path = "/srs", tag = "sr", request_body = SrCreate, responses((status = 202, body = Task)))]
async fn sr_create(State(daemon): State<Daemon>, Body(asked): Body<SrCreate>) -> Begun {
    let SrCreate { uuid: chosen, name, description, source, reserve, format, tags, other_config } = asked;
    repo::driver::mount::check(&source)?;
    if matches!(source, SrSource::Iso { .. }) && format.is_some_and(|format| format != api::ImageFormat::Raw) {
        let what = "an ISO library contains raw images only";
        return Err(Problem::new(Code::Unsupported, what).field("format").advise("omit the format").into());
    }
    let sr = sr::new_sr(chosen.unwrap_or_else(Uuid::new_v4), name, description, source, reserve);
    let given = Given { name: true, description: true, tags: Some(tags), other_config: Some(other_config) };
    let job = Create::new(sr, format, false, given);
    let prepare = move |job: &Create, task, tx: &mut repo::Tx<'_>| {
        chosen.map_or(Ok(()), |uuid| tx.check_uuid_free(uuid))?;
        job.prepare(tx, task)
    };
    let task = daemon.tasks.start_job(&daemon, job, prepare).await?;
    begun(task)
}

/// Looks for a repository on a storage; changes nothing.
#[utoipa::path(
    post, path = "/srs/probe", tag = "sr", request_body = SrProbe, responses((status = 200, body = Vec<SrFound>))
)]
async fn sr_probe(State(daemon): State<Daemon>, Body(asked): Body<SrProbe>) -> Answer<Json<Vec<SrFound>>> {
    Ok(Json(daemon.srs.probe(&asked.source).await?))
}

/// Adds an existing repository, or turns a directory of existing images into one, and attaches it; a scan then adds its
/// images. The task's result contains its UUID.
#[utoipa::path(
    post, path = "/srs/introduce", tag = "sr", request_body = SrIntroduce, responses((status = 202, body = Task))
)]
async fn sr_introduce(State(daemon): State<Daemon>, Body(asked): Body<SrIntroduce>) -> Begun {
    let SrIntroduce { uuid, name, description, source, reserve, tags, other_config } = asked;
    repo::driver::mount::check(&source)?;
    let found = match source {
        SrSource::Iso { .. } => None,
        _ => daemon.srs.found_at(&source).await?,
    };
    let there = match source {
        SrSource::Iso { .. } => uuid,
        _ => found.as_ref().map(|found| found.uuid),
    };
    let known = daemon.catalogue.read(|view| view.srs()).await?;
    if let Some(known) = known.iter().find(|known| Some(known.uuid) == there || known.source == source) {
        return Err(sr::is_known(known).into());
    }
    let uuid = match (uuid, there) {
        (None, None) => Uuid::new_v4(),
        (Some(asked), Some(there)) if asked == there => there,
        (None, Some(there)) => {
            let what = format!("the repository there is {there}");
            return Err(Problem::new(Code::Exists, what)
                .field("uuid")
                .advise("give its UUID to confirm that this is the right one")
                .into());
        }
        (Some(asked), there) => {
            let there = there.map_or("no repository".into(), |there| format!("the repository {there}"));
            let what = format!("found {there}, expected {asked}");
            return Err(Problem::new(Code::NotFound, what)
                .field("uuid")
                .advise("probe the storage to see what it contains")
                .into());
        }
    };
    if let (SrSource::Dir { path }, None) = (&source, there) {
        daemon.srs.must_have_images(path).await?;
    }
    let given = Given { name: name.is_some(), description: description.is_some(), tags, other_config };
    let Some(name) = name.or(found.map(|found| found.name)) else {
        let what = "the storage does not record a name";
        return Err(Problem::new(Code::Invalid, what).field("name").advise("give it a name").into());
    };
    let sr = sr::new_sr(uuid, name, description.unwrap_or_default(), source, reserve);
    let job = Introduce::new(sr, None, there.is_some(), given);
    let task = daemon.tasks.start_job(&daemon, job, |job, task, tx| job.prepare(tx, task)).await?;
    begun(task)
}

/// Changes the name, description, tags, strings of programs or reserve of a repository, its share depth, or what is
/// done to the sizes of its disks' transfers. Plugged disks follow the last two within moments.
#[utoipa::path(
    patch, path = "/srs/{uuid}", tag = "sr", params(Id), request_body = SrPatch, responses((status = 200, body = Sr))
)]
async fn sr_patch(State(daemon): State<Daemon>, Id(uuid): Id, Body(patch): Body<SrPatch>) -> Answer<Json<Sr>> {
    patch.share_depth.map_or(Ok(()), shares::checked_depth)?;
    let sizes = patch.split.is_some() || patch.merge.is_some();
    let sr = request::change(&daemon.catalogue, 200, move |tx| {
        if let (Some(reserve), Some(space)) = (patch.reserve, tx.sr(uuid)?.space) {
            sr::must_fit(reserve, space.physical_size)?;
        }
        tx.patch_sr(uuid, &patch)
    });
    let sr = sr.await?;
    daemon.disks.shares.set_depth(uuid, sr.share_depth);
    if sizes {
        plug::shape_all(&daemon, uuid).await;
    }
    if sr.state == SrState::Attached {
        // Free space depends on the reserve; failure to measure it does not invalidate the change.
        daemon.srs.measure_now(uuid).await;
    }
    Ok(Json(daemon.catalogue.read(move |view| view.shown_sr(uuid)).await?))
}

/// Removes a repository without VDIs, and its files. Files of others stay in the directory.
#[utoipa::path(
    delete, path = "/srs/{uuid}", tag = "sr", params(Id, DestroyOptions),
    responses((status = 200, body = SrDestroyPlan), (status = 202, body = Task))
)]
async fn sr_destroy(
    State(daemon): State<Daemon>,
    Id(uuid): Id,
    QueryParams(options): QueryParams<DestroyOptions>,
) -> Answer {
    if options.dry_run {
        // A dry run does not interrupt running work in the repository.
        let job = daemon.catalogue.read(move |view| Destroy::of(view, uuid)).await?;
        return Ok(Json(job.plan(&daemon.srs).await?).into_response());
    }
    let claim = daemon.srs.claim(uuid, "destroyed")?;
    let job = daemon.catalogue.read(move |view| Destroy::of(view, uuid)).await?;
    let task = daemon.tasks.start_job(&daemon, job, |job, _, tx| job.prepare(tx)).await?;
    // From here on it cannot be attached: its state prevents it, and its label is being removed.
    drop(claim);
    begun(task).map(IntoResponse::into_response)
}

/// Attaches a repository. Images in it that are no longer needed are then merged and removed.
#[utoipa::path(
    post, path = "/srs/{uuid}/attach", tag = "sr", params(Id), request_body = SrAttach,
    responses((status = 202, body = Task))
)]
async fn sr_attach(State(daemon): State<Daemon>, Id(uuid): Id, Body(asked): Body<SrAttach>) -> Begun {
    let claim = claim(&daemon, uuid, "attached").await?;
    let at_work = daemon.clone();
    let work = move |mut context: Context| async move {
        let _claim = claim;
        context.step("attach", false).await?;
        let ended = at_work.srs.attach_as(uuid, asked.believe, true).await?;
        at_work.tasks.abandon_ended(&ended);
        doubtful::hold(&at_work, uuid).await;
        let WhenAttached { reconcile, collect } = at_work.srs.when_attached;
        reconcile(at_work.clone(), uuid).await;
        collect(&at_work, uuid);
        Ok(json!({ "uuid": uuid }))
    };
    begin(&daemon, uuid, "sr-attach", work).await
}

/// Detaches a repository, none of whose VBDs may be plugged.
#[utoipa::path(post, path = "/srs/{uuid}/detach", tag = "sr", params(Id), responses((status = 202, body = Task)))]
async fn sr_detach(State(daemon): State<Daemon>, Id(uuid): Id) -> Begun {
    let claim = claim(&daemon, uuid, "detached").await?;
    daemon.catalogue.read(move |view| view.check_sr_unused(uuid)).await?;
    let at_work = daemon.clone();
    let work = move |mut context: Context| async move {
        let _claim = claim;
        context.step("detach", false).await?;
        at_work.uploads.remove_of(uuid);
        at_work.downloads.remove_of(uuid);
        at_work.srs.detach(uuid).await.map(|()| json!({ "uuid": uuid }))
    };
    begin(&daemon, uuid, "sr-detach", work).await
}

/// Synchronizes the catalogue with a repository's files. Images that no VDI needs are then merged and removed. The
/// task's result has the fields of a `Scan`.
#[utoipa::path(post, path = "/srs/{uuid}/scan", tag = "sr", params(Id), responses((status = 202, body = Task)))]
async fn sr_scan(State(daemon): State<Daemon>, Id(uuid): Id) -> Begun {
    let claim = claim(&daemon, uuid, "scanned").await?;
    daemon.catalogue.read(move |view| view.attached_sr(uuid)).await?;
    let at_work = daemon.clone();
    let work = move |mut context: Context| async move {
        let _claim = claim;
        let scan = sr::scan(&at_work, uuid, &mut context).await?;
        at_work.srs.keep_inventory(uuid).await?;
        differences::heal_sr(&at_work, uuid).await;
        vdi::collect(&at_work, uuid);
        let mut result =
            serde_json::to_value(scan).map_err(|error| Problem::failed("encode the scan's result", error))?;
        result["uuid"] = json!(uuid);
        Ok(result)
    };
    begin(&daemon, uuid, "sr-scan", work).await
}

/// Forgets a detached repository and its VDIs. Its files stay: it can be introduced again.
#[utoipa::path(post, path = "/srs/{uuid}/forget", tag = "sr", params(Id), responses((status = 204)))]
async fn sr_forget(State(daemon): State<Daemon>, Id(uuid): Id) -> Answer<StatusCode> {
    let _claim = claim(&daemon, uuid, "forgotten").await?;
    let written = daemon.catalogue.outbox().written(uuid);
    let forgotten = request::change(&daemon.catalogue, 204, move |tx| {
        let Sr { state, variant, .. } = tx.sr(uuid)?;
        if state == SrState::Attached {
            let what = format!("the repository {uuid} is attached");
            return Err(Problem::new(Code::State, what).advise("detach it first"));
        }
        tx.check_sr_unused(uuid)?;
        // Changes to a repository that is lost for good or read-only can never be written.
        let writable = state == SrState::Detached && !variant.is_some_and(|variant| variant.read_only);
        let lines = tx.inventory_lines(uuid)?;
        let unwritten = lines.iter().filter(|line| written.is_none_or(|written| line.generation > written)).count();
        if unwritten > 0 && writable {
            let what = format!("{unwritten} changes to the repository {uuid} are not in its inventory yet");
            return Err(Problem::new(Code::State, what).advise("attach and detach it again, then forget it"));
        }
        tx.remove_sr(uuid)
    });
    forgotten.await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Gets the inventory of an attached repository from its own file.
#[utoipa::path(
    get, path = "/srs/{uuid}/inventory", tag = "sr", params(Id), responses((status = 200, body = Inventory))
)]
async fn sr_inventory(State(daemon): State<Daemon>, Id(uuid): Id) -> Answer<Json<Inventory>> {
    Ok(Json(daemon.srs.inventory(uuid).await?))
}

/// Gets the inventory of the repository on a storage, whether it is known here or not. Changes nothing.
#[utoipa::path(
    post, path = "/srs/inventory", tag = "sr", request_body = SrProbe, responses((status = 200, body = Inventory))
)]
async fn sr_inventory_at(State(daemon): State<Daemon>, Body(asked): Body<SrProbe>) -> Answer<Json<Inventory>> {
    Ok(Json(daemon.srs.inventory_at(&asked.source).await?))
}

/// Reserves a known repository for one task.
pub(super) async fn claim(daemon: &Daemon, uuid: Uuid, doing: &'static str) -> Result<Claim, Problem> {
    let claim = daemon.srs.claim(uuid, doing)?;
    let journal = daemon.catalogue.read(move |view| view.sr(uuid).and_then(|_| view.journal())).await?;
    let about = |task: &Task| task.about.iter().any(|about| about.uuid == uuid);
    match journal.iter().find(|entry| entry.task.verb == Destroy::VERB && about(&entry.task)) {
        Some(_) => Err(Problem::new(Code::Busy, format!("the repository {uuid} is being destroyed"))),
        None => Ok(claim),
    }
}

/// Begins a task that needs no cleanup.
pub(super) async fn begin<W, F>(daemon: &Daemon, sr: Uuid, verb: &'static str, work: W) -> Begun
where
    W: FnOnce(Context) -> F + Send + 'static,
    F: Future<Output = Result<Value, Problem>> + Send + 'static,
{
    let about = vec![About { kind: ObjectKind::Sr, uuid: sr }];
    let new = NewTask { uuid: Uuid::new_v4(), verb, about, cancellable: true, intent: None };
    begun(daemon.tasks.start(daemon, new, work).await?)
}
