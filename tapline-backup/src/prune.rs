//! `backup remove` and `backup prune`.

use std::collections::BTreeMap;

use arguments::backup::{BackupPrune, BackupRemove, Grace, Keep};
use backup::{Control, Id, Prune, Pruned, Record, Target};
use serde_json::json;

use crate::failure::{Exit, Failure};
use crate::list::{fields, table};
use crate::output::{bytes, now, print, print_json};
use crate::retention::superfluous;
use crate::stop;
use crate::target::{self, find};

/// Removes the named backups: all of them, or none if one of them is not there.
pub fn remove(remove: &BackupRemove) -> Result<Exit, Failure> {
    let target = target::open(&remove.at)?.target;
    let backups = target.backups()?;
    let found: Result<Vec<Record>, Failure> = remove.ids.iter().map(|word| find(&backups, word)).collect();
    carry_out(&target, &found?, remove.grace, remove.at.json)
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
    let mut backups = target.backups()?;
    if let Some(name) = &prune.name {
        backups.retain(|record| &record.label == name);
        if given.is_empty() {
            return Err(Failure::new(Exit::Usage, "--name needs a rule").advise("give one, such as --keep-daily 7"));
        }
    }
    let now = now();
    let mut disks: BTreeMap<Id, Vec<&Record>> = BTreeMap::new();
    backups.iter().for_each(|record| disks.entry(record.disk).or_default().push(record));
    let superfluous: Vec<Record> = match given.is_empty() {
        true => Vec::new(),
        false => disks.values().flat_map(|taken| superfluous(&prune.keep, taken, now)).cloned().collect(),
    };
    if prune.dry_run {
        match prune.at.json {
            true => print_json(&json!({ "would-remove": superfluous.iter().map(fields).collect::<Vec<_>>() }))?,
            false => print(&table(&superfluous))?,
        }
        return Ok(Exit::Done);
    }
    carry_out(&target, &superfluous, prune.grace, prune.at.json)
}

fn carry_out(target: &Target, removed: &[Record], grace: Grace, is_json: bool) -> Result<Exit, Failure> {
    let prune = Prune {
        remove: removed.iter().map(|record| record.id).collect(),
        now: now(),
        grace: u64::from(grace.grace) * 3600,
    };
    let mut control = Control { cancel: stop::cancelled(), progress: &mut |_| {} };
    let pruned = target.prune(&prune, &mut control)?;
    let Pruned { backups, deleted, moved, orphans } = pruned;
    match is_json {
        true => print_json(&json!({
            "removed": removed.iter().map(fields).collect::<Vec<_>>(),
            "deleted": deleted,
            "moved": moved,
            "spared": orphans,
        }))?,
        false => print(&format!(
            "{}{backups} backups removed, {deleted} objects deleted, {} moved; {orphans} objects that no backup refers to \
             are spared until their grace period ends\n",
            table(removed),
            bytes(moved),
        ))?,
    }
    Ok(Exit::Done)
}
