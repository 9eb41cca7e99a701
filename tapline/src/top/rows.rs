//! Rows: a disk each, or the disks of a VM or a repository together.
//!
//! It knows pages and names, and neither columns nor screens.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use api::Health;
use stats::Histogram;

use super::names::{Name, Names};
use super::pages::{Disk, Pages};
use super::rates::Rates;
use super::text::in_one_line;
use crate::health::{with_daemon, without_daemon};

/// What a row is about.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum By {
    /// A disk.
    #[default]
    Disk,
    /// All disks of a VM.
    Vm,
    /// All disks of a repository.
    Sr,
}

/// A row.
#[derive(Clone, Debug, Default)]
pub struct Row {
    /// The pages of its disks.
    pub pages: Vec<PathBuf>,
    /// Its name.
    pub name: String,
    /// Names of its disk.
    pub known: Option<Name>,
    /// What happened in the last interval; `None` if there was none yet.
    pub rates: Option<Rates>,
    /// Requests in flight now.
    pub in_flight: u64,
    /// Age of the oldest of them, in nanoseconds.
    pub oldest: Option<u64>,
    /// Requests that have failed since the page was begun.
    pub errors: u64,
    /// Durations of what ended in the last interval, if they were asked for.
    pub latency: Option<Histogram>,
    /// The health of its disk, or the worst of them.
    pub health: Health,
    /// Its process is gone.
    pub ended: bool,
    /// Its image.
    pub image: String,
    /// It is of several disks, or may be.
    pub is_sum: bool,
}

/// A word of the command line by which a disk is chosen: does it mean this disk?
pub fn is_meant(word: &str, disk: &Disk, name: Option<&Name>) -> bool {
    if Path::new(word) == disk.path || std::path::absolute(word).is_ok_and(|path| path == disk.path) {
        return true;
    }
    let begins = |uuid: uuid::Uuid| word.len() >= 4 && uuid.to_string().starts_with(&word.to_ascii_lowercase());
    let of_daemon = name.is_some_and(|name| {
        let device = word.rsplit_once('/').is_some_and(|(vm, device)| {
            let letters = |device: &str| device.trim_start_matches("xvd").trim_start_matches("vd").to_owned();
            name.vm.as_deref() == Some(vm) && letters(device) == letters(&name.device)
        });
        device || name.vdi == word || begins(name.vdi_uuid)
    });
    of_daemon || disk.vbd.is_some_and(begins) || (!word.is_empty() && file_name(&disk.identity.image) == word)
}

/// The file name of an image, without its format and directories.
pub fn file_name(image: &str) -> &str {
    let path = image.split_once(':').map_or(image, |(_, path)| path);
    path.rsplit('/').next().unwrap_or(path)
}

/// The name of a disk, from the daemon or from its page.
pub fn name(disk: &Disk, known: Option<&Name>) -> String {
    let own = || match (file_name(&disk.identity.image), disk.vbd) {
        ("", None) => file_name(&disk.path.to_string_lossy()).to_owned(),
        (image, None) => image.to_owned(),
        (image, Some(vbd)) => format!("{} {image}", vbd.to_string().get(..8).unwrap_or_default()),
    };
    let text = match known {
        Some(Name { vm: Some(vm), device, .. }) => format!("{vm}/{device}"),
        Some(Name { vdi, .. }) if !vdi.is_empty() => vdi.clone(),
        _ => own(),
    };
    in_one_line(&text)
}

/// The rows, each with the names that are known.
pub fn rows(pages: &Pages, names: &Names, by: By, is_wanted: impl Fn(&Disk, Option<&Name>) -> bool) -> Vec<Row> {
    let disks =
        pages.disks.values().map(|disk| (disk, names.of(disk.vbd))).filter(|(disk, name)| is_wanted(disk, *name));
    if by == By::Disk {
        return disks.map(|(disk, name)| row(disk, name, false)).collect();
    }
    let mut groups: BTreeMap<String, Row> = BTreeMap::new();
    for (disk, known) in disks {
        let group = match by {
            By::Vm => known.and_then(|known| known.vm.clone()).unwrap_or_else(|| "(no VM known)".into()),
            By::Sr | By::Disk => {
                let sr = known.map(|known| known.sr.clone()).filter(|sr| !sr.is_empty());
                sr.unwrap_or_else(|| "(no SR known)".into())
            }
        };
        let group = in_one_line(&group);
        let row = row(disk, known, true);
        match groups.get_mut(&group) {
            Some(sum) => sum.add(row),
            None => drop(groups.insert(group.clone(), Row { name: group, image: String::new(), is_sum: true, ..row })),
        }
    }
    groups.into_values().collect()
}

/// The health of a disk: that which the daemon knows, or what can be seen here.
pub fn health(disk: &Disk, known: Option<&Name>) -> Health {
    let socket = || disk.identity.control.clone().unwrap_or_else(|| disk.path.display().to_string());
    match (disk.vbd, known) {
        _ if disk.ended.is_some() => Health::healthy(),
        (Some(vbd), known) => {
            let (vbd, unknown) = (vbd.to_string(), Health::healthy());
            let known = known.map_or(&unknown, |known| &known.health);
            with_daemon(known, vbd.get(..8).unwrap_or_default(), disk.now.pid, disk.seen)
        }
        (None, _) => without_daemon(&in_one_line(&socket()), disk.now.pid, disk.seen, false),
    }
}

fn row(disk: &Disk, names: Option<&Name>, is_sum: bool) -> Row {
    let now = &disk.now;
    let known = names.filter(|_| !is_sum);
    Row {
        pages: vec![disk.path.clone()],
        name: name(disk, known),
        known: known.cloned(),
        rates: disk.rates.clone().filter(|_| disk.ended.is_none()),
        in_flight: now.in_flight.len() as u64,
        oldest: now.oldest_of_all(),
        errors: now.kinds.iter().fold(0, |sum, kind| kind.all_errors().saturating_add(sum)),
        latency: None,
        health: health(disk, names),
        ended: disk.ended.is_some(),
        image: in_one_line(&disk.identity.image),
        is_sum: false,
    }
}

impl Row {
    /// Adds another disk.
    fn add(&mut self, other: Row) {
        self.pages.extend(other.pages);
        self.rates = match (self.rates.take(), other.rates) {
            (Some(mut sum), Some(more)) => {
                sum.add(&more);
                Some(sum)
            }
            (one, other) => one.or(other),
        };
        self.in_flight = self.in_flight.saturating_add(other.in_flight);
        self.oldest = self.oldest.max(other.oldest);
        self.errors = self.errors.saturating_add(other.errors);
        if other.health.state > self.health.state {
            self.health = other.health;
        }
        self.ended &= other.ended;
    }

    /// Reads the durations of its requests.
    pub fn read_latency(&mut self, pages: &mut Pages) {
        let mut sum: Option<Histogram> = None;
        for path in &self.pages {
            let Some(latency) = pages.disks.get_mut(path).and_then(Disk::latency) else { continue };
            sum = Some(sum.map_or_else(|| latency.clone(), |sum| sum.with(latency)));
        }
        self.latency = sum;
    }
}
