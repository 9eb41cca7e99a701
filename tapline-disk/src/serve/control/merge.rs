//! `merge`: moves the data of layers into the one below them while the guest keeps running (decision 0006).
//!
//! 1. The layers down to the target are opened for writing, which fails if another disk is based on one of them.
//!    Nothing is written.
//! 2. The time and size that children record of a parent that is about to change become 'unknown', from the leaf down:
//!    each child durably before its parent changes, if only because that forgets its own parent's. *If killed:* the
//!    same chain opens. For a moment nothing is in flight, and the layers switch to the new files. The guest continues;
//!    the layers are given the same size ([`super::equalize_sizes`]), and the merge begins.
//! 3. Piece by piece, at the pace of [`super::rate_limiter`]. *If killed:* the same chain, and a restarted merge
//!    continues.
//! 4. The disk is quiesced. The sources, now empty, leave the chain; the layer above is linked to the target, durably.
//!    *If killed before:* the same chain, whose sources hold no data. *After:* the shorter one ([`super::finish`]); for
//!    a merged leaf, the longer one opens too.
//! 5. Layers below the leaf are reopened read-only. The sources' files may be removed.
//!
//! A merge that is cancelled, or fails, goes from 3 to 5.

use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

use disk::{Format, MergeState, Status};
use serde_json::{Value, json};

use super::access::{self, Lowered, Raised, ReopenedLayer};
use super::blocking_task::BlockingTask;
use super::equalize_sizes;
use super::pause::Measured;
use super::protocol;
use super::rate_limiter::RateLimiter;
use super::refusal::{Kind, Refusal};
use super::snapshot::lower;
use super::work::{Quiesce, Work};
use crate::file_identity::FileIdentity;
use crate::image_name::ImageName;
use crate::libvhd::Behind;
use crate::log::say;
use crate::parent_link;
use crate::serve::own_keys::MERGE_TIMER;

/// Pieces begun in one turn, so that the guest has its own.
const TURN: usize = 4;

/// A merge, from its first preparation to its last cleaning up.
#[derive(Debug)]
pub struct MergeJob {
    asked: protocol::MergeRequest,
    stage: Stage,
    rate_limiter: RateLimiter,
    /// Somebody has stopped it for a while, or for good.
    stopped: bool,
    cancelled: bool,
    /// A piece is under way: what was copied before it, and requests that had come.
    piece: Option<(u64, u64)>,
    /// There is more to do at once.
    hungry: bool,
    copied: u64,
    done: u64,
    len: u64,
    /// Files that hold nothing any more.
    sources: Vec<(PathBuf, Option<FileIdentity>)>,
    unused: Vec<String>,
    /// They are removed.
    deleted: bool,
    /// The result, once that is known.
    outcome: Option<Refusal>,
    longest: Option<Measured>,
    measured: bool,
    /// As it was at the beginning.
    behind: Behind,
}

#[derive(Debug)]
enum Stage {
    Raising(BlockingTask<Result<Vec<ReopenedLayer>, (Refusal, Lowered)>>),
    Forgetting(Vec<ReopenedLayer>),
    Preparing(BlockingTask<Result<Vec<Raised>, (Refusal, Lowered)>>),
    Opening(Vec<Raised>),
    Settling,
    Lengthening(BlockingTask<Result<(), Refusal>>),
    Running,
    Ending(Quiesce),
    Leaving(Quiesce),
    Lowering(BlockingTask<(Lowered, Vec<String>)>),
    Telling,
    Over,
}

impl MergeJob {
    /// Begins.
    pub fn begin(asked: protocol::MergeRequest, work: &mut Work<'_>) -> Result<MergeJob, Refusal> {
        work.must_be_writable()?;
        work.name(asked.into)?;
        equalize_sizes::check(&asked, work)?;
        let layers = access::closed(work, asked.into)?;
        let timer = |error| Refusal::failed("create a timer", &error);
        let rate_limiter = RateLimiter::new(asked.rate, work.clock()).map_err(timer)?;
        work.engine.watch(rate_limiter.as_fd(), false, MERGE_TIMER.0).map_err(timer)?;
        let blocking_task = work.send(move || access::raise(layers))?;
        Ok(MergeJob {
            asked,
            stage: Stage::Raising(blocking_task),
            rate_limiter,
            stopped: false,
            cancelled: false,
            piece: None,
            hungry: false,
            copied: 0,
            done: 0,
            len: work.geometry.len,
            sources: Vec::new(),
            unused: Vec::new(),
            deleted: false,
            outcome: None,
            longest: None,
            measured: false,
            behind: work.behind(),
        })
    }

    /// Goes on; the answer, when it has come to its end.
    pub fn advance(&mut self, work: &mut Work<'_>) -> Result<Option<Value>, Refusal> {
        loop {
            self.hungry = false;
            let stage = std::mem::replace(&mut self.stage, Stage::Over);
            let (stage, moved) = self.step(stage, work)?;
            let over = matches!(stage, Stage::Over);
            self.stage = stage;
            if over {
                return match self.outcome.take() {
                    Some(refusal) => Err(refusal),
                    None => Ok(Some(self.answer(work))),
                };
            }
            if !moved {
                return Ok(None);
            }
        }
    }

    /// One step, and whether there may be another at once.
    fn step(&mut self, stage: Stage, work: &mut Work<'_>) -> Result<(Stage, bool), Refusal> {
        Ok(match stage {
            Stage::Raising(blocking_task) => match work.fetch(blocking_task) {
                Ok(Ok(raised)) => (self.forget(raised, work), true),
                Ok(Err((refusal, lowered))) => (self.give_up(refusal, lowered, work), true),
                Err(blocking_task) => (Stage::Raising(blocking_task), false),
            },
            Stage::Forgetting(raised) => match work.is_flushed() {
                Ok(true) => (MergeJob::prepare(raised, work)?, true),
                Ok(false) => (Stage::Forgetting(raised), false),
                Err(refusal) => (self.give_up(refusal, access::lower(raised), work), true),
            },
            Stage::Preparing(blocking_task) => match work.fetch(blocking_task) {
                Ok(Ok(raised)) => (Stage::Opening(raised), true),
                Ok(Err((refusal, lowered))) => (self.give_up(refusal, lowered, work), true),
                Err(blocking_task) => (Stage::Preparing(blocking_task), false),
            },
            Stage::Opening(raised) if work.is_quiet() => (self.open(raised, work), true),
            Stage::Opening(raised) => (Stage::Opening(raised), false),
            Stage::Settling => match work.is_flushed() {
                Ok(true) => (self.equalize_sizes(work), true),
                Ok(false) => (Stage::Settling, false),
                Err(refusal) => (self.fail(refusal, work), true),
            },
            Stage::Lengthening(blocking_task) => match work.fetch(blocking_task) {
                Ok(lengthened) => match lengthened.and_then(|()| work.lengthened(self.asked.into)) {
                    Ok(()) => (self.start(work), true),
                    Err(refusal) => (self.fail(refusal, work), true),
                },
                Err(blocking_task) => (Stage::Lengthening(blocking_task), false),
            },
            Stage::Running => self.run(work)?,
            Stage::Ending(mut hold) => match hold.advance(work) {
                Ok(true) => (self.end(work), true),
                Ok(false) => (Stage::Ending(hold), false),
                Err(refusal) => (self.fail(refusal, work), true),
            },
            Stage::Leaving(mut hold) => match hold.advance(work) {
                Ok(true) => (self.leave(work)?, true),
                Ok(false) => (Stage::Leaving(hold), false),
                // Broken, the disk writes nothing any more, and its files stay as they are.
                Err(refusal) => {
                    work.let_go();
                    self.outcome.get_or_insert(refusal);
                    (Stage::Telling, true)
                }
            },
            Stage::Lowering(blocking_task) => match work.fetch(blocking_task) {
                Ok((lowered, problems)) => {
                    put_back(lowered, work);
                    work.record_time_of_parent();
                    self.deleted = self.asked.delete && problems.is_empty();
                    problems.iter().for_each(say);
                    (Stage::Telling, true)
                }
                Err(blocking_task) => (Stage::Lowering(blocking_task), false),
            },
            Stage::Telling if self.measure(work) => (Stage::Over, true),
            Stage::Telling => (Stage::Telling, false),
            Stage::Over => (Stage::Over, false),
        })
    }

    /// The leaf forgets what will change of its parent.
    fn forget(&mut self, raised: Vec<ReopenedLayer>, work: &mut Work<'_>) -> Stage {
        match work.disk.layer_mut(0).map_or(Ok(false), access::forget) {
            Ok(_) => {
                work.begin_flush();
                Stage::Forgetting(raised)
            }
            Err(refusal) => self.give_up(refusal, access::lower(raised), work),
        }
    }

    /// That is durable: the layers below it follow, in the background.
    fn prepare(raised: Vec<ReopenedLayer>, work: &mut Work<'_>) -> Result<Stage, Refusal> {
        Ok(Stage::Preparing(work.send(move || access::forget_parents(raised))?))
    }

    /// It cannot begin: the layers are as they were.
    fn give_up(&mut self, refusal: Refusal, lowered: Lowered, work: &mut Work<'_>) -> Stage {
        put_back(lowered, work);
        work.record_time_of_parent();
        self.outcome = Some(refusal);
        Stage::Over
    }

    /// Nothing is in flight: the layers become writable.
    fn open(&mut self, raised: Vec<Raised>, work: &mut Work<'_>) -> Stage {
        for layer in raised {
            let replaced = work.engine.replace(layer.id, layer.file).map_err(Refusal::from);
            let opened = replaced.and_then(|_| {
                work.disk.reopen(layer.depth, layer.image)?;
                Ok(layer.log.map_or(Ok(()), |log| work.disk.set_log(layer.id, log))?)
            });
            if let Err(refusal) = opened {
                return self.fail(refusal, work);
            }
        }
        work.let_go();
        work.begin_flush();
        Stage::Settling
    }

    /// Makes the next layer as large as the first of them; when all are, the merge begins.
    fn equalize_sizes(&mut self, work: &mut Work<'_>) -> Stage {
        match equalize_sizes::grow_one(&self.asked, work) {
            Ok(true) => {
                work.begin_flush();
                Stage::Settling
            }
            Ok(false) => match equalize_sizes::lengthen(&self.asked, work) {
                Ok(Some(blocking_task)) => Stage::Lengthening(blocking_task),
                Ok(None) => self.start(work),
                Err(refusal) => self.fail(refusal, work),
            },
            Err(refusal) => self.fail(refusal, work),
        }
    }

    fn start(&mut self, work: &mut Work<'_>) -> Stage {
        if let Err(error) = work.disk.begin_merge(self.asked.from, self.asked.into) {
            return self.fail(error.into(), work);
        }
        Stage::Running
    }

    /// Begins pieces, as the rate_limiter allows.
    fn run(&mut self, work: &mut Work<'_>) -> Result<(Stage, bool), Refusal> {
        self.measure(work);
        for _ in 0..TURN {
            let Some(progress) = work.disk.merge() else {
                return Ok((self.fail(Refusal::new(Kind::Cancelled, "the merge was cancelled"), work), true));
            };
            (self.copied, self.done, self.len) = (progress.copied, progress.done, progress.len);
            if !progress.busy {
                if let Some((copied, came)) = self.piece.take() {
                    let guest = work.disk.in_flight() > 0 || work.stats.come() != came;
                    self.rate_limiter.end(work.clock(), progress.copied.saturating_sub(copied), guest);
                }
            }
            if self.cancelled {
                let refusal =
                    Refusal::new(Kind::Cancelled, "the merge was cancelled; what has been merged stays merged");
                return Ok((self.fail(refusal.advise("request it again to continue where it stopped"), work), true));
            }
            match progress.state {
                MergeState::Copied => return Ok((Stage::Ending(Quiesce::default()), true)),
                MergeState::Failed(status) => return Ok((self.fail(failed(status), work), true)),
                MergeState::Running => {}
            }
            let may = !progress.busy && !self.stopped && !work.paused;
            let timer = |error| Refusal::failed("set a timer", &error);
            if !may || !self.rate_limiter.allows(work.clock()).map_err(timer)? {
                return Ok((Stage::Running, false));
            }
            self.rate_limiter.begin(work.clock());
            self.piece = Some((progress.copied, work.stats.come()));
            if !work.disk.step_merge(work.engine) {
                self.piece = None;
                return Ok((Stage::Running, false));
            }
        }
        self.hungry = true;
        Ok((Stage::Running, false))
    }

    /// The disk stands still: the sources leave the chain.
    fn end(&mut self, work: &mut Work<'_>) -> Stage {
        // A write that was under way when all was copied may have found no space in the target since then.
        if let Some(MergeState::Failed(status)) = work.disk.merge().map(|merge| merge.state) {
            return self.fail(failed(status), work);
        }
        let names: Vec<_> = (self.asked.from..self.asked.into).filter_map(|depth| work.name(depth).ok()).collect();
        let files: Vec<_> = (self.asked.from..self.asked.into)
            .filter_map(|depth| work.file(depth).ok())
            .flat_map(|(_, file)| file.all_files().map(FileIdentity::of_open).collect::<Vec<_>>())
            .collect();
        let sources = match work.disk.end_merge() {
            Ok(sources) => sources,
            Err(error) => return self.fail(error.into(), work),
        };
        self.unused = names.iter().map(ToString::to_string).collect();
        self.sources = names.iter().flat_map(ImageName::paths).map(Path::to_owned).zip(files).collect();
        for layer in sources {
            if let Err(error) = work.engine.remove(layer.file) {
                say(format_args!("a merged file could not be closed: {error}"));
            }
        }
        if let Err(refusal) = self.link(work) {
            // The layer above still names the sources: they must stay.
            self.sources.clear();
            self.outcome = Some(refusal);
        }
        *work.geometry = work.disk.geometry();
        Stage::Leaving(Quiesce::default())
    }

    /// Records the target as the parent of the layer above, durable with the next round.
    fn link(&self, work: &mut Work<'_>) -> Result<(), Refusal> {
        let Some(above) = self.asked.from.checked_sub(1) else { return Ok(()) };
        let (child, target) = (work.name(above)?, work.name(self.asked.from)?);
        let mut link =
            parent_link::record(child.path(), &target, work.image(self.asked.from)?, work.file(self.asked.from)?.1)?;
        link.modified = None;
        let Some(image) = work.disk.layer_mut(above) else { return Ok(()) };
        Ok(image.relink(Some(&link))?)
    }

    /// It cannot continue: the disk is left as it is.
    fn fail(&mut self, refusal: Refusal, work: &mut Work<'_>) -> Stage {
        self.outcome = Some(refusal);
        work.disk.cancel_merge();
        if work.disk.is_broken() {
            work.let_go();
            return Stage::Telling;
        }
        Stage::Leaving(Quiesce::default())
    }

    /// Everything is durable: layers below the leaf are no longer written, and the guest continues.
    fn leave(&mut self, work: &mut Work<'_>) -> Result<Stage, Refusal> {
        work.behind().tell_since(&self.behind);
        let layers = access::open(work)?;
        for depth in 1..work.disk.layers().len() {
            if work.image(depth).is_ok_and(|image| !image.geometry().read_only) {
                work.disk.freeze(depth)?;
            }
        }
        work.let_go();
        self.measured = false;
        let delete = if self.asked.delete { std::mem::take(&mut self.sources) } else { Vec::new() };
        let blocking_task = work.send(move || (access::lower(layers), delete.iter().filter_map(remove).collect()))?;
        Ok(Stage::Lowering(blocking_task))
    }

    /// Takes note of the pause that was last; whether it is known.
    fn measure(&mut self, work: &Work<'_>) -> bool {
        if self.measured || work.paused {
            return true;
        }
        let Some(found) = work.pause.measured() else { return false };
        self.measured = true;
        if self.longest.is_none_or(|longest| longest.pause < found.pause) {
            self.longest = Some(found);
        }
        true
    }

    fn answer(&self, work: &Work<'_>) -> Value {
        let mut answer = json!({
            "state": "done",
            "from": self.asked.from,
            "into": self.asked.into,
            "copied": self.copied,
            "unused": self.unused,
            "deleted": self.deleted,
            "layers": work.names(),
        });
        let none = Measured { pause: Duration::ZERO, held: Duration::ZERO };
        self.longest.unwrap_or(none).put_into(&mut answer);
        answer
    }

    /// How far it is.
    pub fn status(&self) -> Value {
        let state = match (&self.stage, self.stopped) {
            _ if !self.has_begun() => "beginning",
            (Stage::Running, true) => "paused",
            (Stage::Running, false) => "running",
            (Stage::Lowering(_), _) if self.asked.delete => "removing",
            _ => "ending",
        };
        json!({
            "state": state,
            "from": self.asked.from,
            "into": self.asked.into,
            "done": self.done,
            "len": self.len,
            "copied": self.copied,
        })
    }

    /// Whether it has begun to copy.
    pub fn has_begun(&self) -> bool {
        let opened = !matches!(self.stage, Stage::Raising(_) | Stage::Forgetting(_) | Stage::Preparing(_));
        opened && !matches!(self.stage, Stage::Opening(_) | Stage::Settling | Stage::Lengthening(_))
    }

    /// Whether it holds requests, or is about to, or waits for a flush of its own.
    pub fn is_switching(&self) -> bool {
        !matches!(self.stage, Stage::Running | Stage::Raising(_) | Stage::Preparing(_) | Stage::Lengthening(_))
    }

    /// Whether there is more to do without being woken.
    pub fn is_hungry(&self) -> bool {
        self.hungry
    }

    /// Hundredths of it that are done.
    pub fn percent(&self) -> u64 {
        let done = u128::from(self.done).saturating_mul(100).checked_div(u128::from(self.len)).unwrap_or(100);
        u64::try_from(done).unwrap_or(100)
    }

    /// Stops it for a while, or goes on.
    pub fn stop(&mut self, stopped: bool) {
        self.stopped = stopped;
    }

    /// Stops it for good.
    pub fn cancel(&mut self) {
        self.cancelled = true;
    }
}

/// Removes a file, if what has its name is it still; why not.
fn remove((path, file): &(PathBuf, Option<FileIdentity>)) -> Option<String> {
    let why = match FileIdentity::of_path(path) {
        found if found.is_some() && found != *file => "another file now has its name".to_owned(),
        _ => std::fs::remove_file(path).err()?.to_string(),
    };
    Some(format!("the merged file {} cannot be removed: {why}", path.display()))
}

fn put_back(lowered: Lowered, work: &mut Work<'_>) {
    for (id, file) in lowered {
        lower(id, file, work);
    }
}

fn failed(status: Status) -> Refusal {
    match status {
        Status::NoSpace => Refusal::new(Kind::NoSpace, "the merge stopped: no space is left for its target").advise(
            "the chain is valid as it is; free some space and request the merge again to continue where it stopped",
        ),
        _ => Refusal::new(Kind::Failed, "the merge stopped: the storage failed")
            .advise("the chain is valid as it is; see the kernel log"),
    }
}
