//! `backup remove` and `backup prune`.

use std::cell::Cell;

use arguments::backup::{BackupPrune, BackupRemove, Grace, Keep};
use backup::{Control, Id, Prune, Pruned, Record, Target};
use control::size::readable;
use serde_json::json;

use crate::create::moment;
use crate::failure::{Exit, Failure};
use crate::list::{fields, table};
use crate::output::{now, print, print_json};
use crate::retention::{self, Among, Judged};
use crate::stop;
use crate::target::{self, find};

/// Removes the named backups: all of them, or none if one of them is not there.
pub fn remove(remove: &BackupRemove) -> Result<Exit, Failure> {
    let target = target::open(&remove.at)?.target;
    let backups = target.backups()?;
    let found: Result<Vec<Record>, Failure> = remove.ids.iter().map(|word| find(&backups, word)).collect();
    let ids: Vec<Id> = found?.iter().map(|record| record.id).collect();
    let named = |_: &[Record]| Judged { superfluous: ids.clone(), unjudged: 0 };
    carry_out(&target, &named, remove.grace, remove.at.json)
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
    if (prune.name.is_some() || prune.disk.is_some() || prune.machine.is_some()) && given.is_empty() {
        return Err(Failure::new(Exit::Usage, "--name, --disk and --machine need a rule")
            .advise("give one, such as --keep-daily 7"));
    }
    let now = prune.now.as_deref().map_or_else(|| Ok(now()), moment)?;
    let among = match (&prune.name, &prune.disk, &prune.machine) {
        (Some(name), _, _) => Among::Name(name),
        (_, Some(disk), _) => Among::Disk(Id::of_name(disk)),
        (_, _, Some(machine)) => Among::Machine(Id::of_name(machine)),
        (None, None, None) => Among::All,
    };
    let judge = |backups: &[Record]| match given.is_empty() {
        true => Judged::default(),
        false => retention::judge(&prune.keep, backups, among, now),
    };
    if prune.dry_run {
        let backups = target.backups()?;
        let judged = judge(&backups);
        let superfluous: Vec<Record> =
            backups.into_iter().filter(|record| judged.superfluous.contains(&record.id)).collect();
        match prune.at.json {
            true => print_json(&json!({
                "would-remove": superfluous.iter().map(fields).collect::<Vec<_>>(),
                "unjudged": judged.unjudged,
            }))?,
            false => print(&format!("{}{}", table(&superfluous), unjudged(judged.unjudged)))?,
        }
        return Ok(Exit::Done);
    }
    carry_out(&target, &judge, prune.grace, prune.at.json)
}

/// A line about backups that the rule has spared for want of the rest of their machine.
fn unjudged(number: u64) -> String {
    match number {
        0 => String::new(),
        _ => format!(
            "{number} backups are retained whatever the rule: they belong to machines of which the other disks are not \
             backed up, or were not chosen\n"
        ),
    }
}

fn carry_out(
    target: &Target,
    judge: &dyn Fn(&[Record]) -> Judged,
    grace: Grace,
    is_json: bool,
) -> Result<Exit, Failure> {
    let spared = Cell::new(0);
    // By what is published when the backups are removed: another host may remove some meanwhile.
    let remove = |backups: &[Record]| {
        let Judged { superfluous, unjudged } = judge(backups);
        spared.set(unjudged);
        superfluous
    };
    let prune = Prune { remove: &remove, now: now(), grace: u64::from(grace.grace) * 3600 };
    let mut control = Control { cancel: stop::cancelled(), progress: &mut |_| {} };
    let pruned = target.prune(&prune, &mut control)?;
    let Pruned { backups, deleted, moved, orphans } = pruned;
    match is_json {
        true => print_json(&json!({
            "removed": backups.iter().map(fields).collect::<Vec<_>>(),
            "deleted": deleted,
            "moved": moved,
            "spared": orphans,
            "unjudged": spared.get(),
        }))?,
        false => print(&format!(
            "{}{} backups removed, {deleted} objects deleted, {} moved; {orphans} objects that no backup refers to \
             are spared until their grace period ends\n{}",
            table(&backups),
            backups.len(),
            readable(moved),
            unjudged(spared.get()),
        ))?,
    }
    Ok(Exit::Done)
}
