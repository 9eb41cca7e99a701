//! `backup remove` and `backup prune`.

use std::collections::BTreeMap;

use arguments::backup::{BackupPrune, BackupRemove, Grace, Keep};
use backup::{Control, Id, Prune, Pruned, Record, Target};
use control::size::readable;
use serde_json::json;

use crate::failure::{Exit, Failure};
use crate::list::{fields, table};
use crate::output::{now, print, print_json};
use crate::retention::superfluous;
use crate::stop;
use crate::target::{self, find};

/// Removes the named backups: all of them, or none if one of them is not there.
pub fn remove(remove: &BackupRemove) -> Result<Exit, Failure> {
    let target = target::open(&remove.at)?.target;
    let backups = target.backups()?;
    let found: Result<Vec<Record>, Failure> = remove.ids.iter().map(|word| find(&backups, word)).collect();
    let ids: Vec<Id> = found?.iter().map(|record| record.id).collect();
    carry_out(&target, &|_| ids.clone(), remove.grace, remove.at.json)
}

/// Removes what is superfluous by the rule.
pub fn prune(prune: &BackupPrune) -> Result<Exit, Failure> {
    let Keep { last, hourly, daily, weekly, monthly } = prune.keep;
    let given: Vec<u16> = [last, hourly, daily, weekly, monthly].into_iter().flatten().collect();
    if !given.is_empty() && given.iter().all(|number| *number == 0) {
        return Err(Failure::new(Exit::Usage, "this rule would retain no backup at all")
            .advise("retain one with --keep-last 1, or remove backups by their ids with 'tapline backup remove'"));
    }
    let target = target::open(&prune.at)?.target;
    if (prune.name.is_some() || prune.disk.is_some()) && given.is_empty() {
        return Err(
            Failure::new(Exit::Usage, "--name and --disk need a rule").advise("give one, such as --keep-daily 7")
        );
    }
    let (now, disk) = (now(), prune.disk.as_deref().map(Id::of_name));
    // By what is published when the backups are removed: another host may remove some meanwhile.
    let choose = |backups: &[Record]| -> Vec<Id> {
        let mut disks: BTreeMap<Id, Vec<&Record>> = BTreeMap::new();
        let is_of = |record: &&Record| {
            prune.name.as_ref().is_none_or(|name| &record.label == name) && disk.is_none_or(|disk| record.disk == disk)
        };
        let named = backups.iter().filter(is_of);
        named.for_each(|record| disks.entry(record.disk).or_default().push(record));
        match given.is_empty() {
            true => Vec::new(),
            false => disks.values().flat_map(|taken| superfluous(&prune.keep, taken, now)).collect(),
        }
    };
    if prune.dry_run {
        let backups = target.backups()?;
        let chosen = choose(&backups);
        let superfluous: Vec<Record> = backups.into_iter().filter(|record| chosen.contains(&record.id)).collect();
        match prune.at.json {
            true => print_json(&json!({ "would-remove": superfluous.iter().map(fields).collect::<Vec<_>>() }))?,
            false => print(&table(&superfluous))?,
        }
        return Ok(Exit::Done);
    }
    carry_out(&target, &choose, prune.grace, prune.at.json)
}

fn carry_out(
    target: &Target,
    remove: &dyn Fn(&[Record]) -> Vec<Id>,
    grace: Grace,
    is_json: bool,
) -> Result<Exit, Failure> {
    let prune = Prune { remove, now: now(), grace: u64::from(grace.grace) * 3600 };
    let mut control = Control { cancel: stop::cancelled(), progress: &mut |_| {} };
    let pruned = target.prune(&prune, &mut control)?;
    let Pruned { backups, deleted, moved, orphans } = pruned;
    match is_json {
        true => print_json(&json!({
            "removed": backups.iter().map(fields).collect::<Vec<_>>(),
            "deleted": deleted,
            "moved": moved,
            "spared": orphans,
        }))?,
        false => print(&format!(
            "{}{} backups removed, {deleted} objects deleted, {} moved; {orphans} objects that no backup refers to \
             are spared until their grace period ends\n",
            table(&backups),
            backups.len(),
            readable(moved),
        ))?,
    }
    Ok(Exit::Done)
}
