//! `image rebase` and `image flatten`: give an image other parents, or none, without changing its contents.
//!
//! The order is [`plan::rebase`], [`plan::flatten`] or, if nothing is copied, [`plan::relink`]. If killed before the
//! new parent is recorded, repeating the command continues; later, it only makes the record durable
//! ([`plan::finish_rebase`]). The plan knows nothing about children; therefore:
//!
//! 1. A marker file records the image's modification time, which its children have recorded
//!    ([`UnfinishedRewrite`]). *If killed here or later:* they open as before.
//! 2. The plan is executed.
//! 3. The image's modification time is restored, and the marker file removed.

use std::fs::File;

use control::size::readable;
use control::{ImageName, Kind};
use disk::{Format, Image, Link};
use plan::{Plan, Step};
use serde::Serialize;
use uring::{Cache, ImageFile, OpenOptions};
use vm::syntax::shell_word;

use crate::files::Files;
use crate::files::access;
use crate::files::identity::FileIdentity;
use crate::image::chain::{Chain, Layers, metadata_options};
use crate::image::parent_link;
use crate::image::presence::Presence;
use crate::image::rewrite_marker::UnfinishedRewrite;
use crate::jobs::copy_up::CopyUp;
use crate::jobs::planned;
use crate::jobs::runner::Runner;
use crate::process::failure::{Exit, Failure};
use crate::process::output;
use crate::process::signals::Signal;
use arguments::{Access, Flatten, Parents, Rebase};

/// The result. Names and meanings are part of the interface.
#[derive(Serialize)]
struct Moved {
    image: String,
    parent: Option<String>,
    /// The bytes written to the image.
    copied: u64,
}

/// Runs `image rebase`.
pub fn run(files: &Files, rebase: &Rebase) -> Result<Exit, Failure> {
    let name = &rebase.image;
    let new = open_new(files, rebase)?;
    let Some((parent, (image, file))) = rebase.onto.first().zip(new.images.first().zip(new.files.first())) else {
        return Err(Failure::new(format!("rebase {name}"), "no new parent is given").of_kind(Kind::Invalid));
    };
    check_size(rebase, files, parent, image.geometry().len)?;
    let link = parent_link::record(files, name.path(), parent, image, file)?;
    let parents = NewParents::of(&new)?;
    let line = CommandLine { verb: "rebase", onto: &rebase.onto, record_only: rebase.record_only };
    let command = line.text(name, &rebase.parents);
    let options = access::options(rebase.access, true);
    let copied = if rebase.record_only {
        let options = OpenOptions { cache: Cache::Writeback, ..options };
        let layers = Layers::open_alone_for(files, name, options, Some(&command))?;
        let to = Rebasing { layers, onto: None, parents, link: Some(&link), title: "rebasing" };
        run_plan(to, plan::relink(), rebase.access)?
    } else {
        let modified = parent_link::modified(files, parent, file)?;
        let is_done = |found: &Image| is_based_on((name, found), (parent, image), modified, &link);
        match open(files, name, &rebase.parents, options, &command, is_done)? {
            Opened::Before(layers) => {
                let layers = reject_snapshots(layers)?;
                let onto = Some(Runner::new(new, access::engine(rebase.access))?);
                let to = Rebasing { layers, onto, parents, link: Some(&link), title: "rebasing" };
                run_plan(to, plan::rebase(), rebase.access)?
            }
            Opened::Moved(layers) => finish(layers)?,
        }
    };
    let moved = Moved { image: name.to_string(), parent: Some(parent.to_string()), copied };
    let how = if rebase.record_only { ", only recorded" } else { "" };
    let line = format!("{name} is now based on {parent}{how}, {} copied\n", readable(copied));
    report(rebase.json, &moved, &line)
}

/// Runs `image flatten`.
pub fn flatten(files: &Files, flatten: &Flatten) -> Result<Exit, Failure> {
    let name = &flatten.image;
    let command = CommandLine { verb: "flatten", onto: &[], record_only: false }.text(name, &flatten.parents);
    let options = access::options(flatten.access, true);
    let no_longer = |copied| format!("{name} no longer has a parent, {} copied\n", readable(copied));
    let (copied, line) = match open(files, name, &flatten.parents, options, &command, |found| found.link().is_none())? {
        Opened::Before(layers) if layers.images.len() > 1 => {
            let layers = reject_snapshots(layers)?;
            let to = Rebasing { layers, onto: None, parents: NewParents::default(), link: None, title: "flattening" };
            let copied = run_plan(to, plan::flatten(), flatten.access)?;
            (copied, no_longer(copied))
        }
        Opened::Before(layers) => (finish(layers)?, format!("{name} has no parent; nothing was copied\n")),
        Opened::Moved(layers) => (finish(layers)?, no_longer(0)),
    };
    let moved = Moved { image: name.to_string(), parent: None, copied };
    report(flatten.json, &moved, &line)
}

/// A command line to repeat, without its image and parents.
struct CommandLine<'a> {
    verb: &'static str,
    onto: &'a [ImageName],
    record_only: bool,
}

impl CommandLine<'_> {
    /// Returns the command line for this image and these parents.
    fn text(&self, name: &ImageName, parents: &Parents) -> String {
        let mut text = format!("tapline image {} {name}", self.verb);
        let word = |parent: &ImageName| parent.uri().map_or_else(|| parent.to_string(), shell_word);
        parents.names.iter().for_each(|parent| text.push_str(&format!(" --parent {}", word(parent))));
        self.onto.iter().for_each(|parent| text.push_str(&format!(" --onto {parent}")));
        for (option, is_set) in
            [(" --unsafe", self.record_only), (" --accept-changed-parent", parents.accept_changed_parent)]
        {
            text.push_str(if is_set { option } else { "" });
        }
        text
    }
}

/// An image opened to be rebased.
enum Opened {
    /// It is based on its old parents.
    Before(Layers),
    /// It is already based on the new one: the command was killed at its end, and is being repeated.
    Moved(Layers),
}

/// Opens the image on its current parents, or alone if it fails to open on them and `is_done` returns true.
fn open(
    files: &Files,
    name: &ImageName,
    parents: &Parents,
    options: OpenOptions,
    command: &str,
    is_done: impl Fn(&Image) -> bool,
) -> Result<Opened, Failure> {
    let chain = Chain { command: Some(command), ..Chain::of(files, name, parents) };
    let failure = match Layers::open_chain(&chain, options) {
        Ok(layers) => return Ok(Opened::Before(layers)),
        Err(failure) => failure,
    };
    // Opened for writing, which restores its modification time if that was not done.
    match Layers::open_alone(files, name, options) {
        Ok(layers) if layers.images.first().is_some_and(is_done) => Ok(Opened::Moved(layers)),
        _ => Err(failure),
    }
}

/// Rejects an image with internal snapshots: only the current contents of the disk are copied up, so snapshots would
/// change with another parent.
fn reject_snapshots(layers: Layers) -> Result<Layers, Failure> {
    let snapshots = match layers.images.first() {
        Some(Image::Qcow2(qcow2)) => qcow2.info().snapshots,
        _ => 0,
    };
    if snapshots == 0 {
        return Ok(layers);
    }
    let name = layers.name.clone();
    let why = "it has internal snapshots, whose contents would change";
    let failure = Failure::new(format!("rebase {name}"), why)
        .advise(format!("delete them, or copy the disk: tapline image convert {name} qcow2:NEW"));
    layers.unless_failed(Err(failure))
}

/// Returns whether `child` records this very parent, last modified at `modified` if that is known.
fn is_based_on(child: (&ImageName, &Image), parent: (&ImageName, &Image), modified: Option<u64>, link: &Link) -> bool {
    let fits = parent_link::check(child, parent, modified, false).is_ok();
    // A parent without identity is recognized by its path only.
    let named = child.1.link().is_some_and(|found| found.absolute == link.absolute || found.relative == link.relative);
    fits && named
}

/// A rebase to execute.
struct Rebasing<'a> {
    layers: Layers,
    onto: Option<Runner>,
    parents: NewParents,
    link: Option<&'a Link>,
    title: &'static str,
}

/// The files of the new parents, to be made durable: another program may have written them, and their contents may be
/// only in the page cache.
#[derive(Default)]
struct NewParents(Vec<(ImageName, File)>);

impl NewParents {
    fn of(new: &Layers) -> Result<NewParents, Failure> {
        let mut parents = Vec::new();
        for (name, file) in new.names.iter().zip(&new.files) {
            for file in [Some(file), file.data_file()].into_iter().flatten() {
                parents.push((name.clone(), File::from(file.try_clone_fd().map_err(Failure::said)?)));
            }
        }
        Ok(NewParents(parents))
    }

    /// Makes the contents and the modification times durable; the image records the latter.
    fn sync(&self) -> Result<(), Failure> {
        self.0.iter().try_for_each(|(name, file)| {
            file.sync_all().map_err(|error| {
                Failure::new(format!("make {name} durable, which is to be the parent"), error)
                    .advise("see the kernel log for the reason; the image is unchanged")
            })
        })
    }
}

/// Executes a plan for the image; returns the number of bytes copied.
fn run_plan(to: Rebasing<'_>, plan: Plan, access: Access) -> Result<u64, Failure> {
    let Rebasing { mut layers, onto, parents, link, title } = to;
    let (name, unfinished) = (layers.name.clone(), layers.unfinished.take());
    let stop = Signal::to_stop().map_err(|error| Failure::new("handle SIGTERM", error))?;
    // It keeps all locks until the modification time is restored.
    let image = Runner::new(layers, access::engine(access))?;
    let before = image.behind();
    let mut work = RebaseJob { name: &name, access, image, onto, parents, link, stop, title, copied: 0 };
    planned::carry_out(plan, |step| work.step(step))?;
    work.image.behind().log_new_since(&before);
    unfinished.map_or(Ok(()), UnfinishedRewrite::end)?;
    Ok(work.copied)
}

/// A rebase in progress. The image is not used otherwise.
struct RebaseJob<'a> {
    name: &'a ImageName,
    access: Access,
    image: Runner,
    onto: Option<Runner>,
    parents: NewParents,
    link: Option<&'a Link>,
    stop: Signal,
    title: &'static str,
    copied: u64,
}

impl RebaseJob<'_> {
    fn step(&mut self, step: Step) -> Result<(), Failure> {
        match step {
            Step::SyncParents => self.parents.sync(),
            Step::CopyUp => self.copy_up(),
            Step::MakeDurable => self.image.flush(),
            Step::LinkParent { child } => self.image.relink(child, self.link),
            Step::RemoveParentLink => self.image.relink(0, None),
            _ => unreachable!("{step:?} is not a step of a rebase"),
        }
    }

    fn copy_up(&mut self) -> Result<(), Failure> {
        let presence = Presence::of(self.image.from(), self.name, access::options(self.access, true))?;
        let (image, onto, stop) = (&mut self.image, self.onto.as_mut(), &mut self.stop);
        self.copied = CopyUp { image, presence, onto, stop, title: self.title }.run()?;
        Ok(())
    }
}

/// Finishes the rebase of an image that is already based on its new parent: makes durable what the killed command may
/// have left in the page cache. Copies nothing, and returns 0.
fn finish(mut layers: Layers) -> Result<u64, Failure> {
    let Layers { name, files, unfinished, .. } = &mut layers;
    planned::carry_out(plan::finish_rebase(), |step| match step {
        Step::MakeDurable => files.iter_mut().try_for_each(ImageFile::sync).map_err(|error| {
            Failure::new(format!("make durable what {name} records of its parent"), error)
                .advise("see the kernel log for the reason, then run the command again")
        }),
        _ => unreachable!("{step:?} is not a step of a rebase"),
    })?;
    unfinished.take().map_or(Ok(()), UnfinishedRewrite::end)?;
    Ok(0)
}

/// Opens the new parents, which must not include the image itself.
fn open_new(files: &Files, rebase: &Rebase) -> Result<Layers, Failure> {
    let own = FileIdentity::of(files, &rebase.image);
    if let Some(loops) = rebase.onto.iter().find(|name| own.is_some() && FileIdentity::of(files, name) == own) {
        let why = format!("it is the same file as {}: no image is its own parent", rebase.image);
        return Err(Failure::new(format!("rebase {} onto {loops}", rebase.image), why).of_kind(Kind::Invalid));
    }
    let accept_changed = rebase.parents.accept_changed_parent;
    let chain = Chain {
        from: files,
        names: rebase.onto.iter().collect(),
        accept_changed,
        writable: 0,
        command: None,
        served: None,
        settled: true,
    };
    Layers::open_chain(&chain, access::options(rebase.access, false))
}

/// Rejects a parent larger than its child. A smaller one is fine: the child reads as zeroes beyond it.
fn check_size(rebase: &Rebase, files: &Files, parent: &ImageName, parent_len: u64) -> Result<(), Failure> {
    let name = &rebase.image;
    let len = Layers::open_alone(files, name, metadata_options(true))?.geometry().map_or(0, |geometry| geometry.len);
    if parent_len <= len {
        return Ok(());
    }
    let why = format!("the new parent has {parent_len} bytes, but the image only {len}");
    let parents: String = rebase.parents.names.iter().map(|parent| format!(" --parent {parent}")).collect();
    Err(Failure::new(format!("rebase {name} onto {parent}"), why)
        .advise(format!("make the image larger first: tapline image resize {name}{parents} --size {parent_len}")))
}

fn report(json: bool, moved: &Moved, line: &str) -> Result<Exit, Failure> {
    match json {
        true => output::json(moved)?,
        false => output::print(line)?,
    }
    Ok(Exit::Done)
}
