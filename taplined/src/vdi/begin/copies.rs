//! Requests for full copies of disks: `vdi-copy`, `vdi-import` and `vdi-export`.

use std::path::Path;

use api::{
    AbsolutePath, Code, FileChecksum, ImageFormat, ImageUrl, Labels, LogicalBlockSize, Mode, Problem, Task, Vdi,
    VdiCopy, VdiExport, VdiImport,
};
use repo::Tx;
use repo::catalogue::{Among, must_divide};
use uuid::Uuid;

use super::super::copy::open;
use super::super::fetch::{Fetch, new_file};
use super::super::{Chain, Copy, Export, Import, chain, format_for, must_be_ready};
use super::{EMPTY, Target, find, must_hold, take, take_new_name, writer_of};
use crate::daemon::Daemon;
use crate::task::blocking;

/// Starts a `vdi-copy` task.
pub async fn copy(daemon: &Daemon, uuid: Uuid, asked: VdiCopy) -> Result<Task, Problem> {
    let (vdi, _, _, _want) = find(daemon, uuid).await?;
    must_be_ready(&vdi)?;
    must_not_change(&vdi)?;
    let sizes = (vdi.size, takes(daemon, uuid).await?);
    let block = block_size(daemon, &vdi).await?;
    let name_is_default = asked.name.is_none();
    let name = asked.name.unwrap_or(vdi.name);
    let labels = Labels { tags: asked.tags, other_config: asked.other_config };
    let target = target(daemon, asked.sr, name, (vdi.description, labels), asked.format, sizes, block).await?;
    let chosen = asked.uuid;
    let target = Target { vdi: chosen.unwrap_or(target.vdi), name_is_default, ..target };
    let job = Copy { source: uuid, target };
    let held = move |job: &Copy, task, tx: &mut Tx<'_>| {
        take(tx, chosen, task)?;
        let Target { sr, name, .. } = &job.target;
        if !name_is_default {
            tx.take_name(Among::Vdis(*sr), name, task, &format!("copy VDI {} to '{name}'", job.source))?;
        }
        hold_source(tx, job.source, task)
    };
    daemon.tasks.start_job(daemon, job, held).await
}

/// Starts a `vdi-import` task, or a `vdi-fetch` task for a file at an HTTP server.
pub async fn import(daemon: &Daemon, asked: VdiImport) -> Result<Task, Problem> {
    let path = match (asked.path.clone(), asked.upload, &asked.url) {
        (None, None, Some(url)) => {
            let url = url.clone();
            return fetch(daemon, url, asked).await;
        }
        (Some(path), None, None) => path,
        (None, Some(upload), None) => daemon.uploads.path(upload).map_err(|problem| problem.field("upload"))?,
        (None, None, None) => return Err(one_source("one of them")),
        _ => return Err(one_source("not several")),
    };
    if asked.checksum.is_some() || asked.insecure_http {
        let field = if asked.checksum.is_some() { "checksum" } else { "insecure_http" };
        let what = format!("'{field}' is for files at HTTP servers");
        return Err(Problem::new(Code::Invalid, what).field(field).advise("verify a file by sha256sum -c"));
    }
    let file = open(daemon, &path, asked.upload).await?;
    let found = chain::look_at(daemon, &path, asked.source_format, asked.really_raw, file).await?;
    let block = asked.logical_block_size.or(found.recorded_block_size()).unwrap_or_default();
    must_divide(block, found.size).map_err(|problem| problem.field("logical_block_size"))?;
    let words = (asked.description, Labels { tags: asked.tags, other_config: asked.other_config });
    let target =
        target(daemon, asked.sr, asked.name, words, asked.format, (found.size, found.file_allocated), block).await?;
    let chosen = asked.uuid;
    let target = Target { vdi: chosen.unwrap_or(target.vdi), ..target };
    let job = Import { path, upload: asked.upload, format: asked.source_format, target };
    let unique = !asked.allow_duplicate_name;
    let held = move |job: &Import, task, tx: &mut Tx<'_>| {
        take(tx, chosen, task)?;
        let Import { path, target: Target { sr, name, .. }, .. } = job;
        if unique { take_new_name(tx, *sr, name, task, &format!("import {path} as VDI '{name}'")) } else { Ok(()) }
    };
    daemon.tasks.start_job(daemon, job, held).await
}

async fn fetch(daemon: &Daemon, url: ImageUrl, asked: VdiImport) -> Result<Task, Problem> {
    // A digest proves what TLS would.
    let insecure = asked.insecure_http || asked.checksum.as_ref().is_some_and(FileChecksum::is_digest);
    let found = chain::look_at_url(daemon, &url, asked.source_format, asked.really_raw, insecure).await?;
    let block = asked.logical_block_size.or(found.recorded_block_size()).unwrap_or_default();
    must_divide(block, found.size).map_err(|problem| problem.field("logical_block_size"))?;
    let words = (asked.description, Labels { tags: asked.tags, other_config: asked.other_config });
    // The file, and the image that is made of it.
    let sizes = (found.size, found.file_allocated.saturating_mul(2));
    let target = target(daemon, asked.sr, asked.name, words, asked.format, sizes, block).await?;
    let chosen = asked.uuid;
    let job = Fetch {
        url,
        format: asked.source_format,
        really_raw: asked.really_raw,
        checksum: asked.checksum,
        insecure_http: asked.insecure_http,
        seen: (found.file_allocated, found.recorded_block_size()),
        file: new_file(),
        target: Target { vdi: chosen.unwrap_or(target.vdi), ..target },
    };
    let unique = !asked.allow_duplicate_name;
    let held = move |job: &Fetch, task, tx: &mut Tx<'_>| {
        take(tx, chosen, task)?;
        let Fetch { url, target: Target { sr, name, .. }, .. } = job;
        if unique { take_new_name(tx, *sr, name, task, &format!("import {url} as VDI '{name}'")) } else { Ok(()) }
    };
    daemon.tasks.start_job(daemon, job, held).await
}

fn one_target(which: &str) -> Problem {
    let what = format!("an export needs the path of a file on the host or is a download: {which}");
    Problem::new(Code::Invalid, what).field("path")
}

fn one_source(which: &str) -> Problem {
    let what = format!("an import needs the path of a file on the host, an upload or a URL: {which}");
    Problem::new(Code::Invalid, what).field("path")
}

/// Starts a `vdi-export` task.
pub async fn export(daemon: &Daemon, uuid: Uuid, asked: VdiExport) -> Result<Task, Problem> {
    let (vdi, _, _, _want) = find(daemon, uuid).await?;
    must_be_ready(&vdi)?;
    must_not_change(&vdi)?;
    must_hold(asked.format, vdi.size)?;
    let (path, download) = match (asked.path, asked.download) {
        (Some(path), false) => {
            let wanted = path.clone();
            blocking("look at the path of an export", move || can_be_created(&wanted)).await?;
            (path, None)
        }
        (None, true) => {
            daemon.downloads.must_have_room()?;
            daemon.srs.room(vdi.sr, takes(daemon, uuid).await?.saturating_add(EMPTY)).await?;
            let (download, path) = (Uuid::new_v4(), format!("/download/{uuid}"));
            (path.parse().map_err(|why| Problem::failed("name a download", why))?, Some(download))
        }
        (Some(_), true) => return Err(one_target("both are given")),
        (None, false) => return Err(one_target("neither is given")),
    };
    let block = block_size(daemon, &vdi).await?;
    let (source, format, token) = (uuid, asked.format, Uuid::new_v4());
    let job = Export { source, path, download, format, token, block };
    daemon.tasks.start_job(daemon, job, |job, task, tx| hold_source(tx, job.source, task)).await
}

/// The target of a copy; refused unless there is space for `takes` bytes.
async fn target(
    daemon: &Daemon,
    sr: Uuid,
    name: api::Name,
    (description, labels): (api::Description, Labels),
    format: Option<ImageFormat>,
    (size, takes): (u64, u64),
    block: LogicalBlockSize,
) -> Result<Target, Problem> {
    let sr = daemon.catalogue.read(move |view| view.sr(sr)).await.map_err(|problem| problem.field("sr"))?;
    let format = format_for(&sr, format)?;
    must_hold(format, size)?;
    daemon.srs.room(sr.uuid, takes.saturating_add(EMPTY)).await?;
    let (vdi, image) = (Uuid::new_v4(), Uuid::new_v4());
    Ok(Target {
        vdi,
        image,
        sr: sr.uuid,
        name,
        name_is_default: false,
        description,
        labels,
        format,
        size,
        logical_block_size: block,
    })
}

/// The space used by a VDI with its whole chain: a copy needs no more, apart from the overhead of another format.
async fn takes(daemon: &Daemon, vdi: Uuid) -> Result<u64, Problem> {
    let chain = daemon.catalogue.read(move |view| view.chain(vdi)).await?;
    Ok(chain.iter().fold(0, |sum, image| image.physical.saturating_add(sum)))
}

/// The logical block size of a VDI; its storage determines it if none is recorded.
pub async fn block_size(daemon: &Daemon, vdi: &Vdi) -> Result<LogicalBlockSize, Problem> {
    match vdi.logical_block_size {
        Some(recorded) => Ok(recorded),
        None => chain::block_size(daemon, &Chain::of_vdi(daemon, vdi.uuid).await?).await,
    }
}

/// Refuses a VDI that could change while it is copied.
fn must_not_change(vdi: &Vdi) -> Result<(), Problem> {
    match writer_of(vdi) {
        None => Ok(()),
        Some(vbd) => {
            let what = format!("VDI {} is being written through VBD {vbd}", vdi.uuid);
            Err(Problem::new(Code::InUse, what).advise("take a snapshot and use that"))
        }
    }
}

/// Reserves the source, and its repository, which may be another one than those that the job changes.
fn hold_source(tx: &mut Tx<'_>, vdi: Uuid, task: Uuid) -> Result<(), Problem> {
    tx.attached_sr(tx.vdi(vdi)?.sr)?;
    tx.take_lease(vdi, task, Mode::ReadOnly)
}

/// Refuses to export to a path that exists, or whose directory does not.
fn can_be_created(path: &AbsolutePath) -> Result<(), Problem> {
    let refused = |code, what: String, advice| Err(Problem::new(code, what).field("path").advise(advice));
    if path.as_path().symlink_metadata().is_ok() {
        return refused(Code::Exists, format!("{path} already exists"), "choose another name");
    }
    if !path.as_path().parent().is_some_and(Path::is_dir) {
        let what = format!("cannot export to {path}: there is no such directory");
        return refused(Code::NotFound, what, "create it first, or give another path on the daemon's host");
    }
    Ok(())
}
