//! The rows of the table: one per disk, VM or repository.
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

/// How disks are grouped into rows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum GroupBy {
    /// A disk.
    #[default]
    Disk,
    /// All disks of a VM.
    Vm,
    /// All disks of a repository.
    Sr,
}

/// A row of the table.
#[derive(Clone, Debug, Default)]
pub struct Row {
    /// The statistics pages of its disks.
    pub pages: Vec<PathBuf>,
    /// The name shown in the row.
    pub name: String,
    /// The daemon's names, for a single disk.
    pub known: Option<Name>,
    /// Rates in the last interval; `None` before the end of the first.
    pub rates: Option<Rates>,
    /// Number of requests in flight.
    pub in_flight: u64,
    /// Age of the oldest of them, in nanoseconds.
    pub oldest: Option<u64>,
    /// Requests that have failed since the beginning of the page.
    pub errors: u64,
    /// Durations of the requests that ended in the last interval, if they were read.
    pub latency: Option<Histogram>,
    /// The health of its disk, or the worst one of its disks.
    pub health: Health,
    /// Whether its process has ended.
    pub ended: bool,
    /// The name of its image.
    pub image: String,
    /// Whether it is a group, even of a single disk.
    pub is_sum: bool,
}

/// Whether a word of the command line selects this disk.
pub fn selects(word: &str, disk: &Disk, name: Option<&Name>) -> bool {
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

/// The name of a disk: the daemon's, or one from its page.
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

/// The rows of the selected disks, with their names where known.
pub fn rows(pages: &Pages, names: &Names, by: GroupBy, is_wanted: impl Fn(&Disk, Option<&Name>) -> bool) -> Vec<Row> {
    let disks =
        pages.disks.values().map(|disk| (disk, names.of(disk.vbd))).filter(|(disk, name)| is_wanted(disk, *name));
    if by == GroupBy::Disk {
        return disks.map(|(disk, name)| row(disk, name, false)).collect();
    }
    let mut groups: BTreeMap<String, Row> = BTreeMap::new();
    for (disk, known) in disks {
        let group = match by {
            GroupBy::Vm => known.and_then(|known| known.vm.clone()).unwrap_or_else(|| "(no VM known)".into()),
            GroupBy::Sr | GroupBy::Disk => {
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

/// The health of a disk: that from the daemon combined with what is observed here.
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
    /// Adds another disk to the sums of the row.
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

    /// Reads the durations of the row's requests.
    pub fn read_latency(&mut self, pages: &mut Pages) {
        let mut sum: Option<Histogram> = None;
        for path in &self.pages {
            let Some(latency) = pages.disks.get_mut(path).and_then(Disk::latency) else { continue };
            sum = Some(sum.map_or_else(|| latency.clone(), |sum| sum.with(latency)));
        }
        self.latency = sum;
    }
}
