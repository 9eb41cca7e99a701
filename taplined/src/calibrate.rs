//! `sr calibrate`: measures which sizes of transfers suit a repository's storage (docs/decisions/0049), and records it.
//!
//! A job process measures, as `tapline calibrate` does. It writes only to a nameless file, which disappears with the
//! process. Any use of the repository by a disk or a task cancels the calibration: guests must not wait for it, and a
//! measurement next to other I/O is worthless. Nothing is recorded until the end, so a crash of the daemon only fails
//! the task.

use std::ffi::OsString;
use std::fs::File;
use std::path::PathBuf;

use api::{
    CalibrationOperation, Code, ImageFormat, ObjectKind, Problem, SrCalibrate, SrCalibration, SrMeasured, SrPolicy,
    SrSource, Storage,
};
use control::Kind;
use control::calibration::{self, Calibration};
use repo::View;
use repo::catalogue::{Image, ImageState};
use repo::driver::Directory;
use uuid::Uuid;

use crate::daemon::Daemon;
use crate::disk::control::Refused;
use crate::disk::handing::Handing;
use crate::disk::names::image_name;
use crate::plug;
use crate::sr;
use crate::task::Context;

/// Size of the scratch file in bytes, as in tapline-disk/src/jobs/calibrate.rs.
const WRITTEN: u64 = 256 << 20;
/// Minimum size in bytes of a file to read, as there.
const READ_MIN: u64 = 64 << 20;
/// Default duration in seconds.
const SECONDS: u32 = 45;
/// The longest calibration, in seconds.
const SECONDS_MAX: u32 = 3600;
/// The name of the scratch file in messages of the process; the file itself has none.
const SCRATCH: &str = "scratch";
const ADVICE: &str = "name a VDI that is full of data, of 64 MiB or more, or measure writes: without --read-only";

/// What to measure, and for how long.
struct Measure {
    path: PathBuf,
    file: File,
    write: bool,
    seconds: u32,
    device: Storage,
}

/// Refuses a calibration that is impossible, before a task is created.
pub fn check(view: &View<'_>, uuid: Uuid, asked: &SrCalibrate) -> Result<(), Problem> {
    let sr = view.attached_sr(uuid)?;
    if asked.seconds.is_some_and(|seconds| !(1..=SECONDS_MAX).contains(&seconds)) {
        let what = format!("a calibration takes 1 to {SECONDS_MAX} seconds");
        return Err(Problem::new(Code::Invalid, what).field("seconds"));
    }
    if asked.read_only {
        return asked.vdi.map_or(Ok(()), |vdi| image_of(view, uuid, vdi).map(drop));
    }
    if asked.vdi.is_some() {
        let what = "no VDI is ever written to for a calibration";
        return Err(Problem::new(Code::Invalid, what).field("vdi").advise("omit it, or read it only: --read-only"));
    }
    let is_library = matches!(sr.source, SrSource::Iso { .. });
    if is_library || sr.is_read_only() {
        let what = format!("nothing can be written in the repository {uuid}");
        return Err(Problem::new(Code::ReadOnly, what).advise("measure reads: --read-only"));
    }
    view.check_sr_unused(uuid).map_err(|problem| {
        let advice = problem.advice.clone().unwrap_or_default();
        problem.advise(format!("{advice}; or only read: --read-only"))
    })
}

/// Measures and records the result. The caller has claimed the repository.
pub async fn calibrate(
    daemon: &Daemon,
    uuid: Uuid,
    asked: SrCalibrate,
    context: &mut Context,
) -> Result<SrPolicy, Problem> {
    context.step("prepare", true).await?;
    let measure = prepare(daemon, uuid, &asked).await?;
    context.step("measure", true).await?;
    let measured = run(daemon, measure, context);
    let found = context.unless_cancelled(async {
        tokio::select! {
            measured = measured => measured,
            why = used(daemon, uuid), if !asked.read_only => Err(why),
        }
    });
    let found = found.await?;
    context.step("record", false).await?;
    let policy = found.policy.clone();
    daemon.catalogue.write(move |tx| tx.set_sr_calibration(uuid, Some(&found))).await?;
    plug::shape_all(daemon, uuid).await;
    Ok(policy)
}

async fn prepare(daemon: &Daemon, uuid: Uuid, asked: &SrCalibrate) -> Result<Measure, Problem> {
    let directory = daemon.srs.directory(uuid).await?;
    let seconds = asked.seconds.unwrap_or(SECONDS);
    if !asked.read_only {
        daemon.srs.room(uuid, WRITTEN).await?;
    }
    let (images, chosen) = {
        let vdi = asked.vdi.filter(|_| asked.read_only);
        let read = move |view: &View<'_>| {
            let chosen = vdi.map(|vdi| image_of(view, uuid, vdi)).transpose()?;
            Ok((view.images_of_sr(uuid)?, chosen))
        };
        daemon.catalogue.read(read).await?
    };
    let write = !asked.read_only;
    daemon
        .srs
        .patience
        .ask(uuid, "prepare a calibration", move || {
            // Messages name the storage by its path, but the open directory is measured: something may be mounted
            // over the path.
            directory.still_there()?;
            let device = sr::storage_of(directory.path())?;
            let (path, file) = match (write, chosen) {
                (true, _) => (directory.path().join(SCRATCH), directory.scratch()?),
                (false, Some(image)) => open(&directory, &image.file)?,
                (false, None) => open(&directory, &fullest(&directory, &images)?)?,
            };
            Ok(Measure { path, file, write, seconds, device })
        })
        .await
}

fn open(directory: &Directory, name: &str) -> Result<(PathBuf, File), Problem> {
    Ok((directory.path().join(name), directory.open_image(name, false)?))
}

/// The image of a VDI, which must be in the repository.
fn image_of(view: &View<'_>, sr: Uuid, vdi: Uuid) -> Result<Image, Problem> {
    let image = view.chain(vdi).map_err(|problem| problem.field("vdi"))?.into_iter().next();
    image
        .filter(|image| image.sr == sr)
        .ok_or_else(|| Problem::new(Code::Invalid, format!("VDI {vdi} is not in the repository {sr}")).field("vdi"))
}

/// The name of the largest image file without significant holes, which are not read from storage.
fn fullest(directory: &Directory, images: &[Image]) -> Result<String, Problem> {
    let is_image = |name: &str| images.iter().any(|image| image.state == ImageState::Ready && image.file == name);
    let entries = directory.entries()?.into_iter();
    let full = entries.filter(|entry| entry.file && entry.len >= READ_MIN && entry.physical >= entry.len / 10 * 9);
    let largest = full.filter(|entry| is_image(&entry.name)).max_by_key(|entry| entry.len);
    largest.map(|entry| entry.name).ok_or_else(|| {
        Problem::new(Code::State, "no image file of this repository is full of data and has 64 MiB or more")
            .advise("measure writes, to a file of its own: without --read-only")
    })
}

/// Runs the measuring process.
async fn run(daemon: &Daemon, measure: Measure, context: &Context) -> Result<SrCalibration, Problem> {
    let Measure { path, file, write, seconds, device } = measure;
    let storage = calibration::Storage { id: device.id, name: device.name };
    let storage =
        serde_json::to_string(&storage).map_err(|error| Problem::failed("encode what the storage is", error))?;
    let name = image_name(ImageFormat::Raw, path.clone()).word();
    let mut words: Vec<OsString> = vec!["calibrate".into(), name, "--storage".into(), storage.into()];
    words.extend(["--seconds".into(), seconds.to_string().into()]);
    words.push(if write { "--write" } else { "--in-use" }.into());
    let mut handing = Handing::default();
    handing.plain(&path, write, file);
    let found = daemon.tool.long_job(words, handing, |part| context.progress(part)).await;
    recorded(found.map_err(|refused| match refused {
        Refused::Disk(error) if error.kind == Kind::Invalid && !write => {
            Problem::new(Code::Invalid, error.message).advise(ADVICE)
        }
        refused => refused.into(),
    })?)
}

/// Waits until the repository comes into use; returns the reason to stop.
async fn used(daemon: &Daemon, uuid: Uuid) -> Problem {
    let mut events = daemon.catalogue.subscribe();
    loop {
        if let Err(problem) = daemon.catalogue.read(move |view| view.check_sr_unused(uuid)).await {
            let what = format!("nothing was kept: the repository came into use while it was measured: {problem}");
            return Problem::new(problem.code, what)
                .advise("try again when it is not in use, or only read: --read-only");
        }
        // A missed event may have been relevant.
        while events.recv().await.is_ok_and(|event| !matches!(event.kind, ObjectKind::Vbd | ObjectKind::Task)) {}
    }
}

/// Converts the result to the types of the API.
fn recorded(found: Calibration) -> Result<SrCalibration, Problem> {
    let why = found.why();
    let failed = |why: String| Problem::failed("understand what a disk process has measured", why);
    if let Some(size) = found.policy.not_allowed() {
        return Err(failed(format!("no policy has a size of {size}")));
    }
    let Calibration { device, measured, program, kernel, operation, policy, gain, worst, points, .. } = found;
    let policy = SrPolicy {
        device: Storage { id: device.id, name: device.name },
        measured: measured.parse().map_err(|error: jiff::Error| failed(error.to_string()))?,
        operation: match operation.as_str() {
            "write" => CalibrationOperation::Write,
            _ => CalibrationOperation::Read,
        },
        split: policy.split,
        merge: policy.merge,
        gain,
        worst,
        why,
        program,
        kernel,
    };
    let points = points.into_iter().map(|point| SrMeasured {
        size: point.size,
        depth: point.depth as u64,
        sequential: point.sequential,
        split: point.policy.split,
        merge: point.policy.merge,
        bytes_per_second: point.bytes_per_second,
    });
    Ok(SrCalibration { policy, points: points.collect() })
}
