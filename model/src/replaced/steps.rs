//! Carries out actions, and records what the image may show afterwards.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{SystemTime, UNIX_EPOCH};

use rustix::fs::{AtFlags, CWD, Timespec, Timestamps, utimensat};

use super::action::{Action, Source, Step};
use super::failure::{Failure, FailureClass};
use super::image::{Image, ImageKind, Layer};
use super::life::UNITS;
use super::oracle::Oracle;
use super::round::Round;
use super::site::{self, Method};
use crate::content::{Content, Range, UNIT, bytes_of};

/// Number of seconds of a year.
const YEAR: i64 = 365 * 24 * 3600;

/// Number of units by which a disk grows.
const GROWTH: u64 = 256;

/// The reason why an image changed by another program may be held.
const FOREIGN: &str = "another program has changed it while its log had something";
/// The reason why a copy that shares its last durable state may be held.
const SAME_STATE: &str = "a copy in its place has the metadata that its log follows";

/// Cluster size of the qcow2 images in bytes.
const CLUSTER: u64 = 64 << 10;

impl Round<'_> {
    /// Whether a step is possible with the current image.
    pub fn is_possible(&self, step: Step) -> bool {
        let image = &self.state.image;
        let (on_device, has_device) = (self.on_device(), self.site.devices.is_some());
        let has_parents = !image.parents.is_empty();
        let by_qemu = !has_parents && (image.format == "qcow2" || image.data.is_none());
        let is_source_here =
            step.source != Source::Atomic || (self.site.medium.has_reflinks() && !on_device && image.data.is_none());
        match step.action {
            Action::Nothing | Action::Chmod | Action::TouchPast | Action::TouchFuture | Action::Link => true,
            Action::Repair => image.format != "raw",
            Action::Rename | Action::MoveBack => !on_device,
            Action::CreateRefused => !on_device,
            Action::Reattach | Action::Renumber => has_device,
            Action::RenameOver | Action::Recreate => !on_device && is_source_here,
            Action::Overwrite => is_source_here,
            Action::GiveNumber => on_device && is_source_here,
            Action::QemuCreate | Action::QemuConvert | Action::ConvertForce => true,
            Action::QemuConvertInto => by_qemu && self.is_of_first_size() && image.format != "vhd",
            Action::CreateForce => on_device,
            // A raw device is larger than the disks here, and so are images that are based on it.
            Action::Resize => self.is_of_first_size() && !has_device,
            Action::Flatten | Action::Rebase => has_parents,
            Action::Merge => {
                has_parents && !on_device && !image.parents.iter().any(|parent| site::is_device(&parent.leaf))
            }
            Action::Snapshot => image.parents.len() < 3,
            Action::Compact => image.format != "raw" && !image.is_fixed && !on_device && image.data.is_none(),
            // QEMU leaves no trace when it writes to a VHD in place (decision 0054, "Not covered").
            Action::QemuWrite => by_qemu && !(image.format == "vhd" && self.state.has_pending_log),
            Action::QemuRepair => image.format == "qcow2" && by_qemu,
            Action::QemuSnapshot => image.format == "qcow2" && by_qemu && image.data.is_none(),
            Action::Truncate => !on_device && image.data.is_none(),
        }
    }

    /// Does a step; false if it turned out to be impossible.
    pub fn apply(&mut self, step: Step) -> Result<bool, Failure> {
        if !self.is_possible(step) {
            return Ok(false);
        }
        match step.action {
            Action::Nothing => Ok(true),
            Action::Chmod => self.chmod(),
            Action::TouchPast => self.touch(-YEAR),
            Action::TouchFuture => self.touch(YEAR),
            Action::Rename => self.rename(),
            Action::Link => self.link(),
            Action::MoveBack => self.move_back(),
            Action::Reattach => self.attach_again(false),
            Action::Renumber => self.attach_again(true),
            Action::RenameOver => self.replace(Method::Renamed, step.source),
            Action::Overwrite => self.replace(Method::InPlace, step.source),
            Action::Recreate => self.replace(Method::SameInode, step.source),
            Action::GiveNumber => self.replace(Method::SameNumber, step.source),
            Action::QemuConvert => self.qemu_convert(),
            Action::QemuConvertInto => self.qemu_convert_into(),
            Action::QemuCreate => self.qemu_create(),
            Action::CreateForce => self.create_force(),
            Action::CreateRefused => self.create_refused(),
            Action::ConvertForce => self.convert_force(),
            Action::Resize => self.resize(),
            Action::Flatten => self.flatten(),
            Action::Rebase => self.rebase(),
            Action::Merge => self.merge(),
            Action::Snapshot => self.snapshot(),
            Action::Repair => self.job("check --repair", &["image", "check", "--repair"], &[], &[0, 3, 5]),
            Action::Compact => self.job("compact", &["image", "compact"], &[], &[0]),
            Action::QemuWrite => self.qemu_write(),
            Action::QemuRepair => self.qemu_repair(),
            Action::QemuSnapshot => self.qemu_snapshot(),
            Action::Truncate => self.truncate(),
        }
    }

    fn chmod(&mut self) -> Result<bool, Failure> {
        let permissions = fs::Permissions::from_mode(if self.random.below(2) == 0 { 0o640 } else { 0o666 });
        fs::set_permissions(self.leaf(), permissions).map_err(|error| failed(self.leaf(), &error))?;
        Ok(true)
    }

    fn touch(&mut self, by: i64) -> Result<bool, Failure> {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        let time = Timespec { tv_sec: i64::try_from(now).unwrap_or(0) + by, tv_nsec: 0 };
        let times = Timestamps { last_access: time, last_modification: time };
        utimensat(CWD, self.leaf(), &times, AtFlags::empty()).map_err(|errno| failed(self.leaf(), &errno.into()))?;
        // A parent's device node has a new modification time after each boot.
        for parent in self.state.image.parents.iter().filter(|parent| site::is_device(&parent.leaf)) {
            let parent = &parent.leaf;
            utimensat(CWD, parent, &times, AtFlags::empty()).map_err(|errno| failed(parent, &errno.into()))?;
        }
        Ok(true)
    }

    fn rename(&mut self) -> Result<bool, Failure> {
        let to = self.new_name("renamed");
        fs::rename(self.leaf(), &to).map_err(|error| failed(&to, &error))?;
        self.state.image.leaf = to;
        Ok(true)
    }

    fn link(&mut self) -> Result<bool, Failure> {
        let to = self.new_name("link");
        match self.on_device() {
            // A device is the same under each name; later steps use its own.
            true => std::os::unix::fs::symlink(self.leaf(), &to).map_err(|error| failed(&to, &error))?,
            false => {
                fs::hard_link(self.leaf(), &to).map_err(|error| failed(&to, &error))?;
                self.state.image.leaf = to;
            }
        }
        Ok(true)
    }

    fn move_back(&mut self) -> Result<bool, Failure> {
        let away = self.new_name("away");
        fs::create_dir(&away).map_err(|error| failed(&away, &error))?;
        let to = away.join("moved");
        fs::rename(self.leaf(), &to).map_err(|error| failed(&to, &error))?;
        fs::rename(&to, self.leaf()).map_err(|error| failed(&to, &error))?;
        Ok(true)
    }

    fn attach_again(&mut self, elsewhere: bool) -> Result<bool, Failure> {
        let Some((device, _)) = &self.site.devices else { return Ok(false) };
        let before = device.path();
        let after = self.site.attach_again(elsewhere)?;
        let image = &mut self.state.image;
        let paths = std::iter::once(&mut image.leaf).chain(image.parents.iter_mut().map(|parent| &mut parent.leaf));
        paths.filter(|path| **path == before).for_each(|path| path.clone_from(&after));
        Ok(true)
    }

    fn replace(&mut self, method: Method, source: Source) -> Result<bool, Failure> {
        let (stored, source) = self.replacement(source)?;
        let leaf = self.leaf().to_owned();
        let Some(image) = stored.put(&mut self.site, method, &leaf)? else { return Ok(false) };
        let is_same_file = matches!(method, Method::InPlace | Method::SameNumber);
        let hold = self.state.has_pending_log && is_same_file && matches!(source, Source::Flushed | Source::Atomic);
        self.log(&image.name());
        self.set_replaced(image, Oracle::at_rest(stored.content.clone()));
        self.state.hold = hold.then_some(SAME_STATE);
        Ok(true)
    }

    /// An image without parents in the place of this one.
    fn one_file(&self, format: &'static str) -> Image {
        Image { format, leaf: self.leaf().to_owned(), data: None, parents: Vec::new(), units: UNITS, is_fixed: false }
    }

    fn qemu_names(&mut self) -> (&'static str, &'static str, &'static str) {
        let kinds: &[ImageKind] = match self.on_device() {
            true => &[ImageKind::Qcow2ByQemu, ImageKind::Qcow2],
            false => &[ImageKind::Qcow2ByQemu, ImageKind::Qcow2, ImageKind::VhdByQemu, ImageKind::Raw],
        };
        let kind = kinds.get(self.random.index(kinds.len())).copied().unwrap_or(ImageKind::Qcow2);
        let (format, options) = kind.qemu_options().unwrap_or_default();
        (kind.format(), format, options)
    }

    fn qemu_create(&mut self) -> Result<bool, Failure> {
        let (ours, format, options) = self.qemu_names();
        let mut command = Command::new("qemu-img");
        command.args(["create", "-q", "-f", format]);
        if !options.is_empty() {
            command.args(["-o", options]);
        }
        site::run(command.arg(self.leaf()).arg((UNITS * UNIT).to_string()))?;
        let image = self.one_file(ours);
        self.set_replaced(image, Oracle::default());
        Ok(true)
    }

    /// Creates a sound raw image to be copied.
    fn create_raw(&mut self) -> Result<(PathBuf, Content), Failure> {
        let variant = self.random.below(3);
        let stored = self.ground.library.image(&self.ground.programs, ImageKind::Raw, site::Medium::Tmpfs, variant)?;
        let copy = self.site.room.join("source");
        site::copy(&stored.leaf, &copy)?;
        Ok((copy, stored.content.clone()))
    }

    fn qemu_convert(&mut self) -> Result<bool, Failure> {
        let (ours, format, options) = self.qemu_names();
        let (from, content) = self.create_raw()?;
        let mut command = Command::new("qemu-img");
        command.args(["convert", "-f", "raw", "-O", format]);
        if !options.is_empty() {
            command.args(["-o", options]);
        }
        site::run(command.arg(from).arg(self.leaf()).current_dir(&self.site.files))?;
        let image = self.one_file(ours);
        self.set_replaced(image, Oracle::at_rest(content));
        Ok(true)
    }

    fn qemu_convert_into(&mut self) -> Result<bool, Failure> {
        let (from, content) = self.create_raw()?;
        let mut command = Command::new("qemu-img");
        command.args(["convert", "-n", "-f", "raw", "-O", self.state.image.format]);
        site::run(command.arg(from).arg(self.leaf()).current_dir(&self.site.files))?;
        self.state.oracle = Oracle::at_rest(content);
        self.changed_by_others();
        Ok(true)
    }

    /// Records that QEMU has read the durable state or a later one, and has written.
    fn changed_by_others(&mut self) {
        if self.state.has_pending_log {
            self.state.hold = Some(FOREIGN);
        }
    }

    fn create_force(&mut self) -> Result<bool, Failure> {
        let format = if self.random.below(2) == 0 { "vhd" } else { "qcow2" };
        let image = self.one_file(format);
        let size = (UNITS * UNIT).to_string();
        self.attempt("create --force", &["image", "create", &image.name(), "--size", &size, "--force"], &[0])?;
        self.set_replaced(image, Oracle::default());
        Ok(true)
    }

    fn create_refused(&mut self) -> Result<bool, Failure> {
        let name = self.one_file("qcow2").name();
        let said = self.ground.programs.run(&self.site, &["image", "create", &name, "--size", "4M"])?;
        match said.code {
            Some(0) => Err(Failure::new(FailureClass::Foreign, "create: a file is overwritten".into())),
            _ => Ok(true),
        }
    }

    fn convert_force(&mut self) -> Result<bool, Failure> {
        let formats: &[&str] = if self.on_device() { &["vhd", "qcow2"] } else { &["vhd", "qcow2", "raw"] };
        let format = formats.get(self.random.index(formats.len())).copied().unwrap_or("qcow2");
        let image = self.one_file(format);
        let (from, content) = self.create_raw()?;
        let from = format!("raw:{}", from.display());
        self.attempt("convert --force", &["image", "convert", &from, &image.name(), "--force"], &[0])?;
        self.set_replaced(image, Oracle::at_rest(content));
        Ok(true)
    }

    /// Runs a job of Tapline on the image that does not change its content.
    fn job(&mut self, by: &str, job: &[&str], more: &[&str], codes: &[i32]) -> Result<bool, Failure> {
        let (name, parents) = (self.state.image.name(), self.state.image.parent_words());
        let has_no_parents = matches!(job, [_, "compact" | "resize"]);
        let parents = parents.iter().map(String::as_str).filter(|_| !has_no_parents);
        let line: Vec<&str> =
            job.iter().copied().chain([name.as_str()]).chain(parents).chain(more.iter().copied()).collect();
        self.attempt(by, &line, codes)?;
        Ok(true)
    }

    fn resize(&mut self) -> Result<bool, Failure> {
        let units = UNITS + GROWTH;
        let size = (units * UNIT).to_string();
        let parents: Vec<String> = self.state.image.parents.iter().map(Layer::name).collect();
        let mut more = vec!["--size", size.as_str()];
        more.extend(parents.iter().flat_map(|name| ["--parent", name.as_str()]));
        self.job("resize", &["image", "resize"], &more, &[0])?;
        self.state.image.units = units;
        Ok(true)
    }

    fn flatten(&mut self) -> Result<bool, Failure> {
        self.job("flatten", &["image", "flatten"], &[], &[0])?;
        self.state.image.parents.clear();
        Ok(true)
    }

    fn rebase(&mut self) -> Result<bool, Failure> {
        let Some(mut parent) = self.state.image.parents.first().cloned() else { return Ok(false) };
        let to = self.new_name("base");
        site::copy_with_time(&parent.leaf, &to)?;
        parent.leaf = to;
        let mut onto = vec![parent];
        onto.extend(self.state.image.parents.iter().skip(1).cloned());
        let names: Vec<String> = onto.iter().map(Layer::name).collect();
        let more: Vec<&str> = names.iter().flat_map(|name| ["--onto", name.as_str()]).collect();
        self.job("rebase", &["image", "rebase"], &more, &[0])?;
        self.state.image.parents = onto;
        Ok(true)
    }

    fn merge(&mut self) -> Result<bool, Failure> {
        self.job("merge", &["image", "merge"], &["--from", "0", "--into", "1"], &[0])?;
        let parents = std::mem::take(&mut self.state.image.parents);
        let Some((target, rest)) = parents.split_first() else { return Ok(false) };
        let Layer { format, leaf, data } = target.clone();
        let units = self.state.image.units;
        self.state.image = Image { format, leaf, data, parents: rest.to_vec(), units, is_fixed: false };
        Ok(true)
    }

    fn snapshot(&mut self) -> Result<bool, Failure> {
        let format = if self.random.below(2) == 0 { "vhd" } else { "qcow2" };
        let to = self.new_name("snapshot");
        let name = format!("{format}:{}", to.display());
        self.job("snapshot", &["image", "snapshot"], &["--to", &name], &[0])?;
        let before = self.state.image.clone();
        let parent = Layer { format: before.format, leaf: before.leaf, data: before.data };
        let parents = std::iter::once(parent).chain(before.parents).collect();
        let units = before.units;
        self.state.image = Image { format, leaf: to, data: None, parents, units, is_fixed: false };
        Ok(true)
    }

    fn qemu_write(&mut self) -> Result<bool, Failure> {
        let stamp = self.new_stamp();
        let range = Range { at: self.random.below(UNITS / 2), len: 1 + self.random.below(20) };
        let pattern = self.site.room.join("pattern");
        fs::write(&pattern, bytes_of(range, stamp)).map_err(|error| failed(&pattern, &error))?;
        let write = format!("write -s {} {} {}", pattern.display(), range.at * UNIT, range.len * UNIT);
        let mut command = Command::new("qemu-io");
        site::run(
            command
                .args(["-f", self.qemu_format(), "-c", &write, "-c", "flush"])
                .arg(self.leaf())
                .current_dir(&self.site.files),
        )?;
        self.state.oracle.lose();
        self.state.oracle.set_durably(range, stamp);
        self.changed_by_others();
        Ok(true)
    }

    fn qemu_format(&self) -> &'static str {
        if self.state.image.format == "vhd" { "vpc" } else { self.state.image.format }
    }

    fn qemu_repair(&mut self) -> Result<bool, Failure> {
        let mut command = Command::new("qemu-img");
        command.args(["check", "-q", "-f", "qcow2", "-r", "all"]);
        site::run(command.arg(self.leaf()).current_dir(&self.site.files))?;
        self.state.oracle.lose();
        self.changed_by_others();
        Ok(true)
    }

    fn qemu_snapshot(&mut self) -> Result<bool, Failure> {
        site::run(Command::new("qemu-img").args(["snapshot", "-c", "kept"]).arg(self.leaf()))?;
        self.state.oracle.lose();
        self.changed_by_others();
        Ok(true)
    }

    fn truncate(&mut self) -> Result<bool, Failure> {
        let path = self.leaf();
        let cut = || -> std::io::Result<()> {
            let file = fs::File::options().write(true).open(path)?;
            let len = file.metadata()?.len();
            // At a cluster boundary: a cut within a cluster is indistinguishable from an end that was never written.
            file.set_len(len / 2 / CLUSTER * CLUSTER)
        };
        cut().map_err(|error| failed(path, &error))?;
        self.state.cut = true;
        Ok(true)
    }
}

fn failed(path: &Path, error: &std::io::Error) -> Failure {
    Failure::of_program(format!("{}: {error}", path.display()))
}
