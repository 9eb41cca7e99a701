//! A round: an image is put in a place, and repeatedly served, killed, replaced and used.
//!
//! Invariant: after each step it is known what the image may show.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use sim::random::Random;

use super::action::{Action, Source, Step};
use super::failure::{Failure, FailureClass};
use super::image::{Image, ImageKind, Stored};
use super::library::Library;
use super::life::{self, Copier, CopyTime, Served, UNITS};
use super::oracle::Oracle;
use super::program::Programs;
use super::site::{self, Medium, Site};

/// Number of attempts to choose a step that is possible.
const TRIES: u64 = 200;

/// Restrictions of a run; empty lists restrict nothing.
#[derive(Clone, Debug, Default)]
pub struct Restrictions {
    /// The actions that are done.
    pub only: Vec<Action>,
    /// The kinds of images.
    pub kinds: Vec<ImageKind>,
    /// The kinds of places.
    pub media: Vec<Medium>,
}

/// Resources that all rounds share.
#[derive(Debug)]
pub struct RoundResources {
    /// The programs under test.
    pub programs: Programs,
    /// Sound images to begin with.
    pub library: Library,
    /// Directories for images, by medium.
    pub places: Vec<(Medium, PathBuf)>,
    /// The directory of sockets, logs and copies.
    pub room: PathBuf,
    /// The restrictions of this run.
    pub limits: Restrictions,
}

/// More than the maximum age of the state recorded for an image in use.
const RECORD_AGE: std::time::Duration = std::time::Duration::from_millis(150);

/// The current image of a round.
#[derive(Debug)]
pub struct ImageState {
    /// The image in its place.
    pub image: Image,
    /// The content that it may show.
    pub oracle: Oracle,
    /// Whether its process was killed and has left writes that are only in its redo log.
    pub has_pending_log: bool,
    /// The reason why the image may be refused with advice, if there is one.
    pub hold: Option<&'static str>,
    /// Whether it was truncated, so that errors are expected.
    pub cut: bool,
}

/// A round with its image.
#[derive(Debug)]
pub struct Round<'a> {
    /// The shared resources.
    pub ground: &'a RoundResources,
    /// The place of the image.
    pub site: Site,
    /// The source of the round's choices.
    pub random: Random,
    /// The current image.
    pub state: ImageState,
    /// The steps so far, for the report.
    pub story: Vec<String>,
    /// The steps since the image was last served for writing.
    pub steps: Vec<Step>,
    /// The kind of the first image.
    pub kind: ImageKind,
    stamps: u64,
    copies: Vec<(Source, Stored)>,
    /// Number of names used so far.
    pub names: u64,
}

impl<'a> Round<'a> {
    /// Begins a round with an image in a place.
    pub fn begin(ground: &'a RoundResources, seed: u64, numbers: (u32, u32)) -> Result<Round<'a>, String> {
        let mut random = Random::new(seed);
        let places: Vec<_> = ground.places.iter().filter(|(medium, _)| allows(&ground.limits.media, medium)).collect();
        let (medium, directory) = places.get(random.index(places.len())).ok_or("there is no such place here")?;
        let kinds: Vec<ImageKind> = <ImageKind as clap::ValueEnum>::value_variants()
            .iter()
            .filter(|kind| kind.fits(*medium) && allows(&ground.limits.kinds, kind))
            .copied()
            .collect();
        let kind = *kinds.get(random.index(kinds.len())).ok_or("no such image can be at such a place")?;
        let name = format!("round.{seed}");
        let mut site = Site::make(*medium, directory.join(&name), ground.room.join(&name), numbers)?;
        let stored = ground.library.image(&ground.programs, kind, *medium, 0)?;
        let leaf = site.first_path();
        let method = if *medium == Medium::Loop { site::Method::SameNumber } else { site::Method::Renamed };
        let image = stored.put(&mut site, method, &leaf)?.ok_or("there is no place for it")?;
        let oracle = Oracle::at_rest(stored.content.clone());
        let state = ImageState { image, oracle, has_pending_log: false, hold: None, cut: false };
        let story = vec![format!("{kind:?} on {medium:?}")];
        let (steps, copies) = (Vec::new(), Vec::new());
        Ok(Round { ground, site, random, state, story, steps, kind, stamps: 1 << 30, copies, names: 0 })
    }

    /// Runs the round.
    pub fn run(&mut self) -> Result<(), Failure> {
        let lives = 1 + self.random.below(3);
        for _ in 0..lives {
            let steps = self.choose()?;
            self.live(&steps)?;
            self.steps.clear();
            for step in steps {
                self.steps.push(step);
                self.log(&step.to_string());
                let done = self.apply(step)?;
                if !done {
                    self.log("(not here)");
                    self.steps.pop();
                }
            }
            if self.random.below(2) == 0 {
                self.use_at_rest()?;
            }
            if self.state.cut {
                self.serve_cut()?;
                return Ok(());
            }
        }
        let mut served = self.serve()?;
        self.read(&mut served)?;
        served.stop().map_err(Failure::of_program)?;
        self.state.oracle.flushed();
        self.state.has_pending_log = false;
        self.use_at_rest()
    }

    /// Records what is done, for the report.
    pub fn log(&mut self, what: &str) {
        self.story.push(what.to_owned());
    }

    /// Chooses steps that are possible.
    fn choose(&mut self) -> Result<Vec<Step>, Failure> {
        let count = 1 + self.random.below(8) / 6;
        let mut steps = Vec::new();
        let variants = <Action as clap::ValueEnum>::value_variants();
        for _ in 0..TRIES {
            let action = variants.get(self.random.index(variants.len())).copied().unwrap_or(Action::Nothing);
            let sources = <Source as clap::ValueEnum>::value_variants();
            let source = sources.get(self.random.index(sources.len())).copied().unwrap_or(Source::Other);
            // A copy at rest requires that no process has left writes in a redo log.
            let is_at_rest = !self.state.has_pending_log && self.state.hold.is_none();
            let source = if source == Source::AtRest && !is_at_rest { Source::Other } else { source };
            let step = Step { action, source };
            if allows(&self.ground.limits.only, &action) && self.is_possible(step) {
                steps.push(step);
            }
            if u64::try_from(steps.len()).unwrap_or(0) == count {
                break;
            }
        }
        if let Some(at) = steps.iter().position(|step| step.action == Action::Truncate) {
            steps.truncate(at + 1);
        }
        // A step that restores a copy applies to the image that was copied.
        if steps.iter().any(|step| step.action.has_source() && step.source != Source::Other) {
            steps.retain(|step| step.action.has_source());
            steps.truncate(1);
        }
        Ok(steps)
    }

    /// Serves the image, reads all of it, writes, and kills or stops its process.
    fn live(&mut self, steps: &[Step]) -> Result<(), Failure> {
        self.copies.clear();
        let source = steps.first().filter(|step| step.action.has_source()).map(|step| step.source);
        if source == Some(Source::AtRest) {
            let kept = self.keep("at-rest", false)?;
            self.copies.push((Source::AtRest, kept));
        }
        let mut served = self.serve()?;
        self.read(&mut served)?;
        if let Some((_, kept)) = self.copies.first_mut() {
            kept.content = self.state.oracle.live.clone();
        }
        let mut random = Random::new(self.random.number());
        let mut stamps = self.stamps;
        let mut oracle = std::mem::take(&mut self.state.oracle);
        let mut kept = None;
        let moment = match source {
            Some(Source::Flushed) => Some(CopyTime::Quiet),
            Some(Source::Atomic) => Some(CopyTime::Any),
            _ => None,
        };
        let (this, is_atomic) = (&*self, source == Some(Source::Atomic));
        let mut keep = |oracle: &Oracle| {
            let mut stored = this.keep("served", is_atomic)?;
            stored.content = if is_atomic { oracle.lossy.clone() } else { oracle.live.clone() };
            // After this time the copy can be distinguished from the image (decision 0054, "Not covered").
            std::thread::sleep(RECORD_AGE);
            kept = Some(stored);
            Ok(())
        };
        let copy = moment.map(|moment| (moment, &mut keep as &mut Copier<'_>));
        let lived = life::live(&mut served, &mut oracle, &mut random, &mut stamps, copy);
        let ended = lived.and_then(|()| match random.below(5) {
            0 => served.stop().map(|()| oracle.flushed()).map(|()| false),
            _ => life::kill(served, &mut oracle, &mut random, &mut stamps).map(|()| true),
        });
        (self.state.oracle, self.stamps) = (oracle, stamps);
        self.state.has_pending_log = ended.map_err(Failure::of_program)?;
        if let (Some(source), Some(kept)) = (source, kept) {
            self.copies.push((source, kept));
        }
        self.log(if self.state.has_pending_log { "written to, kill -9" } else { "written to, stopped" });
        site::wait_for_locks(&self.state.image.written()).map_err(Failure::of_program)
    }

    /// Copies the image's files as they are now.
    fn keep(&self, name: &str, is_atomic: bool) -> Result<Stored, String> {
        let Image { format, leaf, data, parents, units, is_fixed } = self.state.image.clone();
        let kept_leaf = match is_atomic {
            // On the same file system, where it can share blocks.
            true => self.site.files.join(format!("{name}.kept")),
            false => self.site.room.join(format!("{name}.kept")),
        };
        match is_atomic {
            true => {
                let mut command = std::process::Command::new("cp");
                site::run(command.args(["--reflink=always", "--"]).arg(&leaf).arg(&kept_leaf))?;
            }
            false => site::copy(&leaf, &kept_leaf)?,
        }
        let data = match data {
            Some(data) => {
                let kept = self.site.room.join(format!("{name}.kept.data"));
                site::copy(&data, &kept)?;
                Some(kept)
            }
            None => None,
        };
        let content = self.state.oracle.live.clone();
        Ok(Stored { format, leaf: kept_leaf, data, parents, content, units, is_fixed })
    }

    /// The image that takes the place of this one, and its actual source.
    pub fn replacement(&mut self, source: Source) -> Result<(Arc<Stored>, Source), String> {
        if let Some((source, stored)) = self.copies.iter().find(|(of, _)| *of == source) {
            return Ok((Arc::new(stored.clone()), *source));
        }
        let medium = if self.on_device() { Medium::Loop } else { Medium::Tmpfs };
        let variants = <ImageKind as clap::ValueEnum>::value_variants();
        let mut kind = self.kind;
        if self.random.below(3) == 0 {
            kind = variants.get(self.random.index(variants.len())).copied().unwrap_or(kind);
        }
        if !kind.fits(medium) {
            kind = ImageKind::Qcow2;
        }
        let variant = 1 + self.random.below(2);
        Ok((self.ground.library.image(&self.ground.programs, kind, medium, variant)?, Source::Other))
    }

    /// Whether the image itself is on a device.
    pub fn on_device(&self) -> bool {
        site::is_device(&self.state.image.leaf)
    }

    /// A name for another file of the round.
    pub fn new_name(&mut self, what: &str) -> PathBuf {
        self.names += 1;
        self.site.files.join(format!("{what}-{}", self.names))
    }

    /// Records that another image has taken the place.
    pub fn set_replaced(&mut self, image: Image, oracle: Oracle) {
        self.state.image = image;
        self.state.oracle = oracle;
        self.state.has_pending_log = false;
        self.state.hold = None;
    }

    /// Serves the image for writing, after which redo logs of earlier processes are replayed.
    pub fn serve(&mut self) -> Result<Served, Failure> {
        let mut told = false;
        loop {
            let started = Served::start(&self.ground.programs, &self.site, &self.state.image, false);
            match started.map_err(Failure::of_program)? {
                Ok(served) => return Ok(served),
                Err(_) if told => return Err(self.refused("serve", "the advice has changed nothing")),
                Err(said) => self.follow_advice(&said, "serve")?,
            }
            told = true;
        }
    }

    /// Reads and judges all of the image.
    pub fn read(&mut self, served: &mut Served) -> Result<(), Failure> {
        // After a flush its files contain the writes left by the last process.
        for by in ["serve", "serve, flushed"] {
            let bytes = served.read(self.state.image.units);
            let bytes = bytes.map_err(|error| Failure::new(FailureClass::Refused, format!("{by}, a read: {error}")))?;
            self.judge(by, &bytes)?;
            let flushed = served.client.flush();
            flushed.map_err(|error| Failure::new(FailureClass::Refused, format!("{by}, a flush: {error}")))?;
            self.state.oracle.flushed();
        }
        self.state.has_pending_log = false;
        self.state.hold = None;
        Ok(())
    }

    /// The path of the image, for programs of others.
    pub fn leaf(&self) -> &Path {
        &self.state.image.leaf
    }

    /// A stamp that was never used.
    pub fn new_stamp(&mut self) -> u64 {
        self.stamps += 1;
        self.stamps
    }

    /// Whether the image has the size that all have at first.
    pub fn is_of_first_size(&self) -> bool {
        self.state.image.units == UNITS
    }
}

/// Whether a restriction allows an item.
fn allows<T: PartialEq>(list: &[T], item: &T) -> bool {
    list.is_empty() || list.contains(item)
}
