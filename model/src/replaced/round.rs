//! A round: an image is put somewhere, and again and again served, killed, replaced and used.
//!
//! Invariant: what the image at the place may show is known after each step.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use sim::random::Random;

use super::action::{Action, Source, Step};
use super::failure::{Class, Failure};
use super::image::{Image, Kind, Stored};
use super::library::Library;
use super::life::{self, Copier, Moment, Served, UNITS};
use super::oracle::Oracle;
use super::program::Programs;
use super::site::{self, Medium, Site};

/// Tries to find a step that is possible here.
const TRIES: u64 = 200;

/// What a run is restricted to; what is empty restricts nothing.
#[derive(Clone, Debug, Default)]
pub struct Limits {
    /// Actions.
    pub only: Vec<Action>,
    /// Kinds of images.
    pub kinds: Vec<Kind>,
    /// Kinds of places.
    pub media: Vec<Medium>,
}

/// What rounds have in common.
#[derive(Debug)]
pub struct Ground {
    /// The program under test.
    pub programs: Programs,
    /// Sound images.
    pub library: Library,
    /// Directories for files.
    pub places: Vec<(Medium, PathBuf)>,
    /// For sockets, logs and copies.
    pub room: PathBuf,
    /// What is chosen from.
    pub limits: Limits,
}

/// Longer than a stamp of an image in use gets old.
const STAMP: std::time::Duration = std::time::Duration::from_millis(150);

/// The image of a round, as it is at its place now.
#[derive(Debug)]
pub struct State {
    /// Where and what it is.
    pub image: Image,
    /// What it may show.
    pub oracle: Oracle,
    /// Its process was killed, and has left something that is in no file.
    pub owed: bool,
    /// Why it may be refused with advice, if it may.
    pub hold: Option<&'static str>,
    /// It was cut off: errors are right.
    pub cut: bool,
}

/// A round.
#[derive(Debug)]
pub struct Round<'a> {
    /// What it stands on.
    pub ground: &'a Ground,
    /// Its place.
    pub site: Site,
    /// Its choices.
    pub random: Random,
    /// The image.
    pub state: State,
    /// What was done.
    pub story: Vec<String>,
    /// The steps since the last life.
    pub steps: Vec<Step>,
    /// The kind that it has begun with.
    pub kind: Kind,
    stamps: u64,
    copies: Vec<(Source, Stored)>,
    /// How many names were given.
    pub names: u64,
}

impl<'a> Round<'a> {
    /// Puts an image somewhere.
    pub fn begin(ground: &'a Ground, seed: u64, numbers: (u32, u32)) -> Result<Round<'a>, String> {
        let mut random = Random::new(seed);
        let places: Vec<_> = ground.places.iter().filter(|(medium, _)| allows(&ground.limits.media, medium)).collect();
        let (medium, directory) = places.get(random.index(places.len())).ok_or("there is no such place here")?;
        let kinds: Vec<Kind> = <Kind as clap::ValueEnum>::value_variants()
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
        let state = State { image, oracle, owed: false, hold: None, cut: false };
        let story = vec![format!("{kind:?} on {medium:?}")];
        let (steps, copies) = (Vec::new(), Vec::new());
        Ok(Round { ground, site, random, state, story, steps, kind, stamps: 1 << 30, copies, names: 0 })
    }

    /// All of it.
    pub fn run(&mut self) -> Result<(), Failure> {
        let lives = 1 + self.random.below(3);
        for _ in 0..lives {
            let steps = self.choose()?;
            self.live(&steps)?;
            self.steps.clear();
            for step in steps {
                self.steps.push(step);
                self.tell(&step.to_string());
                let done = self.apply(step)?;
                if !done {
                    self.tell("(not here)");
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
        self.state.owed = false;
        self.use_at_rest()
    }

    /// Notes what is done.
    pub fn tell(&mut self, what: &str) {
        self.story.push(what.to_owned());
    }

    /// Steps that are possible.
    fn choose(&mut self) -> Result<Vec<Step>, Failure> {
        let count = 1 + self.random.below(8) / 6;
        let mut steps = Vec::new();
        let variants = <Action as clap::ValueEnum>::value_variants();
        for _ in 0..TRIES {
            let action = variants.get(self.random.index(variants.len())).copied().unwrap_or(Action::Nothing);
            let sources = <Source as clap::ValueEnum>::value_variants();
            let source = sources.get(self.random.index(sources.len())).copied().unwrap_or(Source::Other);
            // A copy at rest is one of which no process has left anything.
            let is_at_rest = !self.state.owed && self.state.hold.is_none();
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
        // What puts a copy back is meant of the image that was copied.
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
            Some(Source::Flushed) => Some(Moment::Quiet),
            Some(Source::Atomic) => Some(Moment::Any),
            _ => None,
        };
        let (this, is_atomic) = (&*self, source == Some(Source::Atomic));
        let mut keep = |oracle: &Oracle| {
            let mut stored = this.keep("served", is_atomic)?;
            stored.content = if is_atomic { oracle.lossy.clone() } else { oracle.live.clone() };
            // From then on the copy can be told from the image (decision 0054, "Not covered").
            std::thread::sleep(STAMP);
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
        self.state.owed = ended.map_err(Failure::of_program)?;
        if let (Some(source), Some(kept)) = (source, kept) {
            self.copies.push((source, kept));
        }
        self.tell(if self.state.owed { "written to, kill -9" } else { "written to, stopped" });
        site::wait_for_locks(&self.state.image.written()).map_err(Failure::of_program)
    }

    /// A copy of the image as its files are now.
    fn keep(&self, name: &str, is_atomic: bool) -> Result<Stored, String> {
        let Image { format, leaf, data, parents, units, is_fixed } = self.state.image.clone();
        let kept_leaf = match is_atomic {
            // Where it can share blocks.
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

    /// The image that comes in the place of this one, and whether it is a copy of it.
    pub fn replacement(&mut self, source: Source) -> Result<(Arc<Stored>, Source), String> {
        if let Some((source, stored)) = self.copies.iter().find(|(of, _)| *of == source) {
            return Ok((Arc::new(stored.clone()), *source));
        }
        let medium = if self.on_device() { Medium::Loop } else { Medium::Tmpfs };
        let variants = <Kind as clap::ValueEnum>::value_variants();
        let mut kind = self.kind;
        if self.random.below(3) == 0 {
            kind = variants.get(self.random.index(variants.len())).copied().unwrap_or(kind);
        }
        if !kind.fits(medium) {
            kind = Kind::Qcow2;
        }
        let variant = 1 + self.random.below(2);
        Ok((self.ground.library.image(&self.ground.programs, kind, medium, variant)?, Source::Other))
    }

    /// Whether the image itself is on a device.
    pub fn on_device(&self) -> bool {
        site::is_device(&self.state.image.leaf)
    }

    /// A name for a further file.
    pub fn new_name(&mut self, what: &str) -> PathBuf {
        self.names += 1;
        self.site.files.join(format!("{what}-{}", self.names))
    }

    /// Another image is in its place.
    pub fn is_replaced(&mut self, image: Image, oracle: Oracle) {
        self.state.image = image;
        self.state.oracle = oracle;
        self.state.owed = false;
        self.state.hold = None;
    }

    /// Serves it for writing, after which nothing is left of earlier lives.
    pub fn serve(&mut self) -> Result<Served, Failure> {
        let mut told = false;
        loop {
            let started = Served::start(&self.ground.programs, &self.site, &self.state.image, false);
            match started.map_err(Failure::of_program)? {
                Ok(served) => return Ok(served),
                Err(_) if told => return Err(self.refused("serve", "the advice has changed nothing")),
                Err(said) => self.follow(&said, "serve")?,
            }
            told = true;
        }
    }

    /// Reads all of it and judges that.
    pub fn read(&mut self, served: &mut Served) -> Result<(), Failure> {
        // What its last process has left is in its files after a flush.
        for by in ["serve", "serve, flushed"] {
            let bytes = served.read(self.state.image.units);
            let bytes = bytes.map_err(|error| Failure::new(Class::Refused, format!("{by}, a read: {error}")))?;
            self.judge(by, &bytes)?;
            let flushed = served.client.flush();
            flushed.map_err(|error| Failure::new(Class::Refused, format!("{by}, a flush: {error}")))?;
            self.state.oracle.flushed();
        }
        self.state.owed = false;
        self.state.hold = None;
        Ok(())
    }

    /// Its files, for programs by others.
    pub fn leaf(&self) -> &Path {
        &self.state.image.leaf
    }

    /// A stamp that nothing has had.
    pub fn new_stamp(&mut self) -> u64 {
        self.stamps += 1;
        self.stamps
    }

    /// Whether it has the size that all have.
    pub fn is_of_first_size(&self) -> bool {
        self.state.image.units == UNITS
    }
}

/// Whether something may be chosen.
fn allows<T: PartialEq>(list: &[T], item: &T) -> bool {
    list.is_empty() || list.contains(item)
}
