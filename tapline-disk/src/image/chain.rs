//! The files of a chain, from the image itself down to its last parent: opened, locked, and verified to belong
//! together.
//!
//! Only files given on the command line are ever opened. The parent recorded in an image is shown, to help find the
//! right name, and compared with the given one ([`crate::image::parent_link`]).

use control::{FormatName, ImageName, Kind};
use disk::foreign::Foreign;
use disk::qcow2::Qcow2;
use disk::redo::Patched;
use disk::vhd::Vhd;
use disk::{Access, Disk, Format, Geometry, Image, ImageError, LAYERS_MAX, RedoLog, Source, raw};
use uring::{Cache, ImageFile, OpenOptions};

use crate::files::identity::FileIdentity;
use crate::files::{Files, tail};
use crate::image::check;
use crate::image::fileless;
use crate::image::parent_link;
use crate::image::raw_lookalike;
use crate::image::redo_log;
use crate::image::remote;
use crate::image::replay_redo::{self, ChainToReplay, Replayed};
use crate::image::rewrite_marker::{self, UnfinishedRewrite};
use crate::image::vhd_tail;
use crate::image::write_synced;
use crate::process::failure::{Failure, explain, only_read};
use crate::process::log::say;
use arguments::Parents;

/// The largest sectors of drives.
const LARGE: usize = 4096;

/// An open chain: for each layer its file and its format, the image itself first.
#[derive(Debug)]
pub struct Layers {
    /// The name with which it was opened.
    pub name: ImageName,
    /// The names of all layers, starting with the image's.
    pub names: Vec<ImageName>,
    /// The source of the files.
    pub from: Files,
    /// The files.
    pub files: Vec<ImageFile>,
    /// The formats.
    pub images: Vec<Image>,
    /// The redo logs and the depths of their images.
    pub logs: Vec<(usize, RedoLog)>,
    /// The depths of parents that are written to only until they contain the redo logs of their last processes, which
    /// lack of space has prevented before.
    pub unsettled: Vec<usize>,
    /// The marker of the image, if it was opened with [`Chain::command`].
    pub unfinished: Option<UnfinishedRewrite>,
}

/// A chain to open, the image itself first.
#[derive(Clone, Debug)]
pub struct Chain<'a> {
    /// The source of the files.
    pub from: &'a Files,
    /// The layers.
    pub names: Vec<&'a ImageName>,
    /// Whether parents may have been modified since their children were created.
    pub accept_changed: bool,
    /// How many layers, from the image down, are opened according to the options; those below are opened read-only.
    pub writable: usize,
    /// The command, if it writes to the image without changing what guests see.
    pub command: Option<&'a str>,
    /// Set if the image is served: writes then go to a redo log, to survive this process.
    pub served: Option<Served>,
    /// Whether redo logs of earlier processes are replayed although nothing else is written: a new child records when
    /// its parent was last changed.
    pub settled: bool,
}

/// How an image is served.
#[derive(Clone, Copy, Debug)]
pub struct Served {
    /// Serve it although a sync of it failed in an earlier process.
    pub accept_failed_sync: bool,
    /// It may be taken over from another process: nothing is written until that has released it.
    pub taken_over: bool,
    /// A sync of one of its parents failed; found out when the chain is opened.
    pub below_failed: bool,
}

impl<'a> Chain<'a> {
    /// Makes the chain of `name` on `parents`; only the image itself may be written.
    pub fn of(from: &'a Files, name: &'a ImageName, parents: &'a Parents) -> Chain<'a> {
        let names = std::iter::once(name).chain(&parents.names).collect();
        let accept_changed = parents.accept_changed_parent;
        Chain { from, names, accept_changed, writable: 1, command: None, served: None, settled: false }
    }
}

impl Layers {
    /// Opens `name` without its parents, if it has any: enough to read its metadata.
    pub fn open_alone(files: &Files, name: &ImageName, options: OpenOptions) -> Result<Layers, Failure> {
        Layers::open_alone_for(files, name, options, None)
    }

    /// Like [`Layers::open_alone`], for a command that writes without changing what guests see.
    pub fn open_alone_for(
        files: &Files,
        name: &ImageName,
        options: OpenOptions,
        command: Option<&str>,
    ) -> Result<Layers, Failure> {
        if let Some(fileless) = fileless::open(&[name], options.write)? {
            return Ok(Layers::alone(files, fileless));
        }
        check_names(files, &[name])?;
        Layers::open_first(files, name, options, command, None)
    }

    /// Makes a chain of one layer without a redo log.
    fn alone(files: &Files, (name, file, image): (ImageName, ImageFile, Image)) -> Layers {
        let (names, from) = (vec![name.clone()], files.clone());
        let (logs, unsettled) = Default::default();
        Layers { name, names, from, files: vec![file], images: vec![image], logs, unsettled, unfinished: None }
    }

    fn open_first(
        files: &Files,
        name: &ImageName,
        options: OpenOptions,
        command: Option<&str>,
        served: Option<Served>,
    ) -> Result<Layers, Failure> {
        let (names, opened, images, logs, unsettled) = Default::default();
        let (name_of, from) = (name.clone(), files.clone());
        let mut layers =
            Layers { name: name_of, from, names, files: opened, images, logs, unsettled, unfinished: None };
        let opened = layers.add(name, options, command, served);
        layers.unless_failed(opened)
    }

    /// Opens `name` and its parents. Parents are opened read-only.
    pub fn open(files: &Files, name: &ImageName, parents: &Parents, options: OpenOptions) -> Result<Layers, Failure> {
        Layers::open_chain(&Chain::of(files, name, parents), options)
    }

    /// Opens the layers of a chain, leaf first.
    pub fn open_chain(chain: &Chain<'_>, options: OpenOptions) -> Result<Layers, Failure> {
        let Some((first, rest)) = chain.names.split_first() else {
            return Err(Failure::new("open a chain", "it has no layer"));
        };
        if let Some(fileless) = fileless::open(&chain.names, options.write)? {
            return Ok(Layers::alone(chain.from, fileless));
        }
        check_names(chain.from, &chain.names)?;
        let Replayed { below_failed, unsettled } = settle_logs(chain, options)?;
        let served = chain.served.map(|served| Served { below_failed, ..served });
        let mut layers = Layers::open_first(chain.from, first, options, chain.command, served)?;
        layers.unsettled = unsettled;
        let opened = layers.add_parents(chain, rest, options);
        layers.unless_failed(opened)
    }

    fn add_parents(&mut self, chain: &Chain<'_>, rest: &[&ImageName], options: OpenOptions) -> Result<(), Failure> {
        for (n, (child, parent)) in (1..).zip(chain.names.iter().zip(rest)) {
            let write = options.write && (n < chain.writable || self.unsettled.contains(&n));
            self.add(parent, OpenOptions { write, ..options }, None, chain.served)?;
            self.check_last_pair(child, parent, chain.accept_changed)?;
        }
        match (chain.names.last(), self.images.last().and_then(Image::link)) {
            (Some(last), Some(link)) => Err(parent_missing(last, &link)),
            _ => Ok(()),
        }
    }

    /// Returns the layers, or why opening them failed: the marker of the command is then removed, while the image is
    /// still locked.
    pub fn unless_failed(mut self, opened: Result<(), Failure>) -> Result<Layers, Failure> {
        match opened {
            Ok(()) => Ok(self),
            Err(failure) => {
                self.unfinished.take().map_or(Ok(()), UnfinishedRewrite::end)?;
                Err(failure)
            }
        }
    }

    /// Returns the logical block size with which the disk was partitioned: that of the storage if the lowest layer is
    /// raw, or that recorded in a VHDX. It is the guest's default; upper layers have the same.
    pub fn block(&self) -> u32 {
        match self.images.last().zip(self.files.last()) {
            Some((Image::Raw(_), file)) if file.alignment().offset == LARGE => 4096,
            Some((Image::Foreign(image), _)) => image.logical_sector(),
            _ => 512,
        }
    }

    /// Returns the size and the limits of the disk.
    pub fn geometry(&self) -> Option<Geometry> {
        self.images.first().map(Format::geometry)
    }

    fn add(
        &mut self,
        name: &ImageName,
        options: OpenOptions,
        command: Option<&str>,
        served: Option<Served>,
    ) -> Result<(), Failure> {
        let files = &self.from;
        if name.is_at_server() {
            return self.add_remote(name, options.write, served.is_some());
        }
        let taken_over = served.is_some_and(|served| served.taken_over);
        // The disk replays the log of an image that is served for writing: reads need not wait for that.
        let served = served.filter(|_| options.write);
        self.files.push(match options.write && served.is_none() && !taken_over {
            true => replay_redo::to_write(files, name, options)?,
            false => files.open_image(name, options).map_err(Failure::said)?,
        });
        let depth = self.images.len();
        let Some(file) = self.files.last_mut() else { return Ok(()) };
        check_unit(name, file)?;
        match command {
            Some(command) => self.unfinished = Some(UnfinishedRewrite::begin(files, name, command)?),
            None if options.write && !taken_over => rewrite_marker::settle(files, name)?,
            None => {}
        }
        let log = match served {
            Some(served) => open_log(files, name, file, served)?,
            None if options.write || !options.lock => None,
            None => redo_log::read(files, name, file)?,
        };
        let image = match log.as_ref().filter(|log| taken_over || log.owed().is_some()) {
            Some(log) => open_as_logged(files, name, file, Some(log), options.write)?,
            None if options.write && taken_over => open_as_logged(files, name, file, None, true)?,
            None => {
                let failed = log.as_ref().is_some_and(RedoLog::has_failed);
                if options.write && name.format == FormatName::Vhd && !failed {
                    vhd_tail::clear(name, file)?;
                }
                open_as_it_is(files, name, file, options.write)?
            }
        };
        check_data_file(name, file, &image)?;
        self.images.push(image);
        self.names.push(name.clone());
        self.logs.extend(log.map(|log| (depth, log)));
        Ok(())
    }

    /// Checks that the last layer is the parent of the layer above it.
    fn check_last_pair(&self, child: &ImageName, parent: &ImageName, accept: bool) -> Result<(), Failure> {
        let ([.., above, below], Some(file)) = (self.images.as_slice(), self.files.last()) else { return Ok(()) };
        if let Some(left) = UnfinishedRewrite::find(&self.from, parent)? {
            say(format_args!(
                "{parent} has its old contents, but a command that changes it did not finish; to finish it: {}",
                left.command()
            ));
        }
        let modified = parent_link::modified(&self.from, parent, file)?;
        if let Some(note) = parent_link::check((child, above), (parent, below), modified, accept)? {
            say(note);
        }
        Ok(())
    }
}

/// Makes a disk with the given logical block size from `images`, leaf first; `unsettled` are the depths of parents to
/// which redo logs must still be written.
pub fn disk_of(
    images: Vec<Image>,
    logs: Vec<(usize, RedoLog)>,
    unsettled: &[usize],
    block: u32,
) -> Result<Disk<Image>, ImageError> {
    let mut disk = Disk::new(images, disk::Options { block, ..disk::Options::default() })?;
    for (depth, log) in logs {
        let file = disk.layers().get(depth).map(|layer| layer.file);
        file.map_or(Ok(()), |file| disk.set_log(file, log))?;
    }
    unsettled.iter().for_each(|&depth| disk.close_when_durable(depth));
    Ok(disk)
}

/// Replays the redo logs of a chain, except those from which it is read.
fn settle_logs(chain: &Chain<'_>, options: OpenOptions) -> Result<Replayed, Failure> {
    if !options.lock || chain.served.is_some_and(|served| served.taken_over) {
        return Ok(Replayed::default());
    }
    replay_redo::chain(&ChainToReplay {
        files: chain.from,
        names: &chain.names,
        options,
        writable: chain.writable,
        is_served: chain.served.is_some(),
        keeps_failed: chain.served.is_some_and(|served| !served.accept_failed_sync),
        writes_all: chain.settled,
    })
}

/// Opens the redo log of a served image, and logs what the last process has left in it.
fn open_log(files: &Files, name: &ImageName, file: &mut ImageFile, served: Served) -> Result<Option<RedoLog>, Failure> {
    let Some(mut log) = redo_log::open(files, name, file)? else { return Ok(None) };
    if served.below_failed {
        log.sync_failed();
    }
    if log.has_failed() && served.accept_failed_sync {
        say(format_args!(
            "a sync of {name} or of an image below it failed in an earlier process: it is opened as after a power loss"
        ));
        redo_log::drop_cache(name, file);
        log.accept_failure();
    } else if log.has_failed() {
        say(format_args!("a sync of {name} or of an image below it failed in an earlier process: not writing to it"));
        say("see the kernel log for the reason; --accept-failed-sync serves it as after a power loss");
    }
    if let Some(owed) = log.owed() {
        say(format_args!("{name}: replaying {} sectors from the redo log of the last process", owed.sectors()));
    }
    Ok(Some(log))
}

/// Opens an image for reading as it will be when its redo log has been replayed.
pub fn open_through(
    files: &Files,
    name: &ImageName,
    file: &mut ImageFile,
    log: Option<&RedoLog>,
) -> Result<Image, Failure> {
    match log {
        Some(_) => open_as_logged(files, name, file, log, false),
        None => open_as_it_is(files, name, file, false),
    }
}

/// Opens an image as it will be when its redo log has been replayed.
fn open_as_logged(
    files: &Files,
    name: &ImageName,
    file: &mut ImageFile,
    log: Option<&RedoLog>,
    write: bool,
) -> Result<Image, Failure> {
    if name.format == FormatName::Raw || name.format.is_read_only() {
        // Redo logs of these formats contain only syncs.
        return open_as_it_is(files, name, file, write);
    }
    let tail = tail(file);
    let mut source = match log {
        Some(log) => log.patched(file),
        None => Patched::of(file),
    };
    let opened = match name.format {
        FormatName::Raw
        | FormatName::Vmdk
        | FormatName::Vhdx
        | FormatName::Null
        | FormatName::Model
        | FormatName::Vhd => Vhd::open(&mut source, access(write), tail).map(|image| Image::Vhd(Box::new(image))),
        // Its last process has already done what an image needs before the first write.
        FormatName::Qcow2 => Qcow2::open(&mut source, access(write), tail).map(|image| Image::Qcow2(Box::new(image))),
    };
    opened.map_err(|error| explain(name, error))
}

/// Rejects chains that are invalid whatever the files contain: those that are too long, or contain a file twice, even
/// under different names.
fn check_names(files: &Files, names: &[&ImageName]) -> Result<(), Failure> {
    if let Some(name) = names.first().filter(|_| names.len() > LAYERS_MAX) {
        let why = format!("a chain of {} layers is longer than the maximum of {LAYERS_MAX}", names.len());
        return Err(Failure::new(format!("open {name}"), why)
            .advise("merge some of them first: tapline image merge")
            .of_kind(Kind::Invalid));
    }
    if let Some(name) = names.iter().find(|name| names.len() > 1 && name.format.is_read_only()) {
        return Err(only_read(format!("use {name} in a chain"), name));
    }
    remote::refuse_in_chain(names)?;
    let mut seen: Vec<(FileIdentity, &ImageName)> = Vec::new();
    for (name, path) in names.iter().flat_map(|&name| name.paths().map(move |path| (name, path))) {
        // A missing file is reported when it is opened.
        let Some(identity) = FileIdentity::of_path(files, path) else { continue };
        if name.data_file.as_deref() == Some(path) && seen.iter().any(|(other, _)| *other == identity) {
            let why = "its data file is already another file of this chain";
            return Err(Failure::new(format!("use {name} in this chain"), why).of_kind(Kind::Invalid));
        }
        if let Some((_, above)) = seen.iter().find(|(other, _)| *other == identity) {
            let why = format!("it is the same file as {above}, which stands above it: no image is its own parent");
            return Err(Failure::new(format!("use {name} in this chain"), why).of_kind(Kind::Invalid));
        }
        seen.push((identity, name));
    }
    Ok(())
}

/// Reads the metadata of an image. For writing, it first makes the writes that an image needs before all others.
pub fn open_image(files: &Files, name: &ImageName, file: &mut ImageFile, write: bool) -> Result<Image, Failure> {
    if write {
        rewrite_marker::settle(files, name)?;
    }
    open_as_it_is(files, name, file, write)
}

/// Like [`open_image`], for callers that keep the record of the image's children up to date themselves.
pub fn open_as_it_is(files: &Files, name: &ImageName, file: &mut ImageFile, write: bool) -> Result<Image, Failure> {
    check_unit(name, file)?;
    match name.format {
        FormatName::Raw => {
            raw_lookalike::refuse(files, name, file)?;
            let len = Source::len(file);
            raw::Raw::of_file(len, !write).map(Image::Raw).map_err(|error| explain(name, error))
        }
        FormatName::Vhd => {
            raw_lookalike::open(name, file, |file| open_vhd(file, write)).map(|vhd| Image::Vhd(Box::new(vhd)))
        }
        FormatName::Qcow2 => open_qcow2(name, file, write).map(|image| Image::Qcow2(Box::new(image))),
        FormatName::Vmdk | FormatName::Vhdx if write => Err(only_read(format!("open {name} for writing"), name)),
        FormatName::Null | FormatName::Model => unreachable!("it is opened by `fileless`"),
        FormatName::Vmdk => open_foreign(name, file, Foreign::open_vmdk),
        FormatName::Vhdx => open_foreign(name, file, Foreign::open_vhdx),
    }
}

type OpenForeign = fn(&mut dyn Source) -> Result<Foreign, ImageError>;

fn open_foreign(name: &ImageName, file: &mut ImageFile, open: OpenForeign) -> Result<Image, Failure> {
    let image = raw_lookalike::open(name, file, |file| open(file))?;
    Ok(Image::Foreign(Box::new(image)))
}

fn access(write: bool) -> Access {
    if write { Access::ReadWrite } else { Access::ReadOnly }
}

fn open_vhd(file: &mut ImageFile, write: bool) -> Result<Vhd, ImageError> {
    let tail = tail(file);
    Vhd::open(file, access(write), tail)
}

fn open_qcow2(name: &ImageName, file: &mut ImageFile, write: bool) -> Result<Qcow2, Failure> {
    let tail = tail(file);
    let open = |file: &mut _, access| raw_lookalike::open(name, file, |file| Qcow2::open(file, access, tail));
    if write {
        // As in QEMU: clusters must not be allocated by refcounts that may be wrong.
        let found = open(file, Access::ReadOnly)?;
        if found.info().dirty {
            let done = check::close(name, file)?;
            say(format_args!(
                "{name} was not closed cleanly by its last writer and has been repaired: {}",
                done.join("; ")
            ));
        }
    }
    let image = open(file, access(write))?;
    if write {
        write_synced::write(file, &[image.first_writes()])
            .map_err(|error| Failure::new(format!("open {name} for writing"), error))?;
        check::tell_of_refcounts(name, &image);
    }
    Ok(image)
}

/// Checks that the data file's block device is large enough for the disk.
fn check_data_file(name: &ImageName, file: &ImageFile, image: &Image) -> Result<(), Failure> {
    let (len, device) = (image.geometry().len, file.data_file().and_then(ImageFile::device_len));
    match device {
        Some(device) if device < len => {
            let why = format!("its data file is a block device of {device} bytes, but the disk has {len}");
            Err(Failure::new(format!("open {name}"), why).advise("give the right device, or enlarge it"))
        }
        _ => Ok(()),
    }
}

/// Checks the unit of direct I/O. Sectors are written as parts of it, so it must survive a power loss whole or not at
/// all (decision 0033).
fn check_unit(name: &ImageName, file: &ImageFile) -> Result<(), Failure> {
    let unit = file.all_files().map(|file| file.alignment().offset).max().unwrap_or(1);
    if unit <= LARGE {
        return Ok(());
    }
    let why =
        format!("its storage requires O_DIRECT writes of at least {unit} bytes, which no drive writes atomically");
    Err(Failure::new(format!("open {name}"), why).advise("use --cache writeback"))
}

fn parent_missing(name: &ImageName, link: &disk::Link) -> Failure {
    let advice = format!(
        "{}\n  if that is the right one: --parent {}",
        parent_link::describe(link),
        parent_link::suggestion(name, link)
    );
    Failure::new(format!("open {name}"), "it has a parent, which must be given").advise(advice).of_kind(Kind::Invalid)
}

/// Returns options for reading metadata: through the page cache, which all file systems have.
pub fn metadata_options(lock: bool) -> OpenOptions {
    OpenOptions { write: false, cache: Cache::Writeback, lock }
}
