//! `snapshot` by a chain: the live leaf becomes a read-only parent, and a new file the leaf (decision 0006).
//!
//! 1. The new file is created under a temporary name, synced, and renamed ([`super::child`]). *If killed before the
//!    rename:* nothing has happened. *After:* the new file is empty, on a parent that has everything.
//! 2. A flush, to leave little in flight.
//! 3. Requests are held; those in flight are completed.
//! 4. The new file becomes the leaf. *If killed after:* the new file, on the old one. Writes to the old one that were
//!    not flushed may be lost, as before; a round makes the old leaf durable before the new one, so nothing else can
//!    be.
//! 5. Requests continue. A round makes the old leaf durable, and it is closed for writing.
//! 6. It is reopened read-only, so that other disks can be based on it too; its modification time is final, and the new
//!    leaf records it with the next round.
//!
//! So after a crash, the new file is the leaf if it exists, and otherwise the old one.
//!
//! With `--handed` the new file has its name before 1, and 'the new file exists' means 'it opens as an image on top of
//! the old leaf'. *If killed in 1:* it is not an image, and the disk was never switched to it: it may be removed. *If
//! killed after:* it is complete, empty unless the disk was switched to it (4), and its parent is not recorded as
//! unchanged: as the leaf it has the contents of the old one, whatever was written to that in the meantime. Nothing
//! more is created for 6: the read-only description of the old leaf came with the request.

use std::path::PathBuf;

use disk::FileId;
use serde_json::{Value, json};
use uring::{FileOpenError, ImageFile};

use super::blocking_task::BlockingTask;
use super::child::{Child, Wanted, remove};
use super::pause::micros;
use super::protocol::Method;
use super::refusal::Refusal;
use super::work::{Quiesce, Work};
use crate::files;
use crate::image_name::ImageName;
use crate::log::say;

/// A snapshot under way.
#[derive(Debug)]
pub struct Snapshot {
    to: ImageName,
    stage: Stage,
    /// The new file, as long as it is not the leaf.
    made: Option<PathBuf>,
}

#[derive(Debug)]
enum Stage {
    Making(BlockingTask<Result<Child, Refusal>>),
    Holding(Box<Child>, Quiesce),
    /// The switch is done; the old leaf becomes durable.
    Closing(FileId, ImageFile, Value),
    Lowering(BlockingTask<Result<ImageFile, FileOpenError>>, FileId, Value),
    Over,
}

impl Snapshot {
    /// Begins.
    pub fn begin(to: ImageName, work: &mut Work<'_>) -> Result<Snapshot, Refusal> {
        work.must_be_writable()?;
        // The future parent is reopened read-only at the end.
        files::must_have(work.file(0)?.1.path(), false)?;
        let wanted = Wanted::on(work, 0, &to, true)?;
        let stage = Stage::Making(work.send(move || wanted.make())?);
        Ok(Snapshot { to, stage, made: None })
    }

    /// Goes on; the answer but for the pause, when it has come to its end.
    pub fn advance(&mut self, work: &mut Work<'_>) -> Result<Option<Value>, Refusal> {
        loop {
            match std::mem::replace(&mut self.stage, Stage::Over) {
                Stage::Making(blocking_task) => match work.fetch(blocking_task) {
                    Ok(child) => {
                        let child = child?;
                        self.made = Some(self.to.path().to_owned());
                        child.fits_on(work.image(0)?)?;
                        self.stage = Stage::Holding(Box::new(child), Quiesce::default());
                    }
                    Err(blocking_task) => return self.wait(Stage::Making(blocking_task)),
                },
                Stage::Holding(child, mut hold) => {
                    if !hold.is_quiet(work)? {
                        return self.wait(Stage::Holding(child, hold));
                    }
                    self.stage = self.switch(*child, work)?;
                }
                Stage::Closing(old, handle, answer) => {
                    if !work.disk.is_frozen(old) && work.disk.is_syncing() {
                        return self.wait(Stage::Closing(old, handle, answer));
                    }
                    match Snapshot::closed(old, handle, work) {
                        Some(blocking_task) => self.stage = Stage::Lowering(blocking_task, old, answer),
                        None => return Ok(Some(answer)),
                    }
                }
                Stage::Lowering(blocking_task, old, answer) => match work.fetch(blocking_task) {
                    Ok(file) => {
                        lower(old, file, work);
                        work.record_time_of_parent();
                        return Ok(Some(answer));
                    }
                    Err(blocking_task) => return self.wait(Stage::Lowering(blocking_task, old, answer)),
                },
                Stage::Over => return Ok(None),
            }
        }
    }

    fn wait(&mut self, stage: Stage) -> Result<Option<Value>, Refusal> {
        self.stage = stage;
        Ok(None)
    }

    /// The disk stands still: the new file becomes its leaf.
    fn switch(&mut self, child: Child, work: &mut Work<'_>) -> Result<Stage, Refusal> {
        let (old, old_name) = (work.file(0)?.0, work.name(0)?);
        let handle = work.file(0)?.1.try_clone()?;
        let Child { file, image, log, work: making, sync } = child;
        let new = work.engine.add(file)?;
        if let Err(error) = work.disk.push_leaf(new, image) {
            work.engine.remove(new)?;
            return Err(error.into());
        }
        work.disk.freeze(1)?;
        self.made = None;
        log.map_or(Ok(()), |log| work.disk.set_log(new, log))?;
        work.let_go();
        let answer = json!({
            "method": Method::Chain.to_string(),
            "leaf": self.to.to_string(),
            "parent": old_name.to_string(),
            "layers": work.names(),
            "work_us": micros(making),
            "sync_us": micros(sync),
        });
        work.disk.sync(work.engine);
        Ok(Stage::Closing(old, handle, answer))
    }

    /// The old leaf is durable, or cannot be made so; the task that reopens it read-only. The snapshot is taken in
    /// either case, and nothing may make it look otherwise.
    fn closed(
        old: FileId,
        handle: ImageFile,
        work: &mut Work<'_>,
    ) -> Option<BlockingTask<Result<ImageFile, FileOpenError>>> {
        let path = handle.path().to_owned();
        let stays = |why: &str| say(format_args!("{} stays locked for writing: {why}", path.display()));
        if !work.disk.is_frozen(old) {
            stays("it could not be made durable");
            return None;
        }
        let blocking_task = work.send(move || files::reopen_read_only(&handle));
        blocking_task.inspect_err(|refusal| stays(&refusal.message)).ok()
    }

    /// Takes back what has happened so far.
    pub fn undo(&mut self, work: &mut Work<'_>) {
        work.let_go();
        if let Some(path) = self.made.take() {
            remove(&path);
        }
    }
}

/// Switches a layer that is no longer written to a read-only file. If that fails it stays as it was, and other disks
/// cannot be based on it.
pub fn lower(file: FileId, opened: Result<ImageFile, FileOpenError>, work: &mut Work<'_>) {
    let replaced = opened.map_err(Refusal::from).and_then(|opened| Ok(work.engine.replace(file, opened)?));
    if let Err(refusal) = replaced {
        say(format_args!("a parent could not be reopened read-only: {}", refusal.message));
    }
}
