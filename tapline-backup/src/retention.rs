//! Which backups are superfluous by a rule: a pure function of the existing backups and the time.
//!
//! The rule is that of schedules of snapshots ([`periods`]), with the last N in addition. It
//! counts *states*: a backup of a disk alone, or those of all disks of a machine at one moment, which are retained or
//! superfluous together. It holds for the states of each machine, and for those of each disk alone, by themselves.
//!
//! Whether a state is newer than another has two answers: it was published later, or its moment is later. They differ
//! if an old snapshot was backed up, or if the clock of a host was wrong, and which of the two it was cannot be known.
//! The rule is applied by both orders, and a state is superfluous only if it is by each.
//!
//! A disk that has left its machine, or is not backed up with it any more, is in no later state of that. So a state is
//! also retained if it has the newest backup of one of its disks, by either order.
//!
//! Invariants: the passage of time alone makes nothing superfluous, only a newer state does, so the newest one never
//! is; a state from the future, made while the clock was ahead, is neither counted nor superfluous; and neither is an
//! incomplete state of a machine, whose other disks may be on their way.

use std::collections::{BTreeMap, BTreeSet};

use arguments::backup::Keep;
use backup::{Id, Record};
use periods::Rule;

/// The backups that a rule is about.
#[derive(Clone, Copy, Debug)]
pub enum Among<'a> {
    /// All of them.
    All,
    /// Those of disks with this name.
    Name(&'a str),
    /// Those of a disk alone, without those of its machine.
    Disk(Id),
    /// Those of a machine.
    Machine(Id),
}

impl Among<'_> {
    fn contains(&self, record: &Record) -> bool {
        match *self {
            Among::All => true,
            Among::Name(name) => record.label == name,
            Among::Disk(disk) => record.disk == disk && record.moment.is_none(),
            Among::Machine(machine) => record.moment.is_some_and(|moment| moment.machine == machine),
        }
    }
}

/// What a rule says about the backups on a target.
#[derive(Clone, Debug, Default)]
pub struct Judged {
    /// These are superfluous.
    pub superfluous: Vec<Id>,
    /// The number of backups that it is about but cannot judge: those of an incomplete state of a machine, or of one
    /// that has other disks, too.
    pub unjudged: u64,
}

/// Which states are counted together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Series {
    Disk(Id),
    Machine(Id),
}

/// What is retained or removed as one.
#[derive(Debug)]
struct State<'a> {
    /// In the order in which they were published.
    backups: Vec<&'a Record>,
    /// The number of disks that it has when it is complete.
    disks: usize,
}

impl State<'_> {
    fn is_complete(&self) -> bool {
        let disks: BTreeSet<Id> = self.backups.iter().map(|record| record.disk).collect();
        disks.len() >= self.disks
    }

    /// The backups of a machine have one time; whatever wrote others, the state is as old as the oldest.
    fn time(&self) -> u64 {
        self.backups.iter().map(|record| record.time).min().unwrap_or(u64::MAX)
    }

    /// From the future if any of its backups is.
    fn is_counted(&self, now: u64) -> bool {
        self.backups.iter().all(|record| record.time <= now)
    }

    fn ids(&self) -> impl Iterator<Item = Id> {
        self.backups.iter().map(|record| record.id)
    }
}

/// Applies a rule to some of the backups, which are in the order in which they were published.
pub fn judge(keep: &Keep, backups: &[Record], among: Among<'_>, now: u64) -> Judged {
    let mut judged = Judged::default();
    let states = states(backups);
    let last = last_of_disks(&states, now);
    let mut series: BTreeMap<Series, Vec<State<'_>>> = BTreeMap::new();
    for (of, state) in states {
        let chosen = state.backups.iter().filter(|record| among.contains(record)).count();
        if chosen == state.backups.len() && state.is_complete() {
            series.entry(of).or_default().push(state);
        } else {
            judged.unjudged += chosen as u64;
        }
    }
    let superfluous = series.values().flat_map(|states| superfluous(keep, states, now));
    let has_last = |state: &State<'_>| state.ids().any(|id| last.contains(&id));
    judged.superfluous = superfluous.filter(|state| !has_last(state)).flat_map(State::ids).collect();
    judged
}

/// The newest backup of each disk, by publication and by time, among those of a disk alone or of a complete state.
fn last_of_disks(states: &[(Series, State<'_>)], now: u64) -> BTreeSet<Id> {
    let counted = states.iter().map(|(_, state)| state).filter(|state| state.is_complete() && state.is_counted(now));
    let mut by_publication: BTreeMap<Id, Id> = BTreeMap::new();
    let mut by_time: BTreeMap<Id, (u64, Id)> = BTreeMap::new();
    for record in counted.flat_map(|state| state.backups.iter()) {
        by_publication.insert(record.disk, record.id);
        let newest = by_time.entry(record.disk).or_insert((record.time, record.id));
        if newest.0 <= record.time {
            *newest = (record.time, record.id);
        }
    }
    by_publication.into_values().chain(by_time.into_values().map(|(_, id)| id)).collect()
}

/// All states, in the order in which the last backup of each was published.
fn states(backups: &[Record]) -> Vec<(Series, State<'_>)> {
    let mut ended: BTreeMap<usize, (Series, State<'_>)> = BTreeMap::new();
    let mut moments: BTreeMap<(Id, Id), (usize, State<'_>)> = BTreeMap::new();
    for (at, record) in backups.iter().enumerate() {
        match record.moment {
            None => drop(ended.insert(at, (Series::Disk(record.disk), State { backups: vec![record], disks: 1 }))),
            Some(moment) => {
                let begun = || (at, State { backups: Vec::new(), disks: 0 });
                let (last, state) = moments.entry((moment.machine, moment.id)).or_insert_with(begun);
                state.backups.push(record);
                state.disks = state.disks.max(usize::try_from(moment.disks).unwrap_or(usize::MAX));
                *last = at;
            }
        }
    }
    ended.extend(moments.into_iter().map(|((machine, _), (last, state))| (last, (Series::Machine(machine), state))));
    ended.into_values().collect()
}

/// The superfluous states of a series, which are in the order in which they were published.
fn superfluous<'a>(keep: &Keep, states: &'a [State<'a>], now: u64) -> Vec<&'a State<'a>> {
    let counted: Vec<&State<'_>> = states.iter().filter(|state| state.is_counted(now)).collect();
    let mut by_time = counted.clone();
    // Stable: equal times stay in the order of publication.
    by_time.sort_by_key(|state| state.time());
    let kept: BTreeSet<Id> = retained(keep, &counted).chain(retained(keep, &by_time)).collect();
    counted.into_iter().filter(|state| state.ids().all(|id| !kept.contains(&id))).collect()
}

/// The backups that are retained of states in this order, the newest last.
fn retained<'a>(keep: &Keep, ordered: &[&'a State<'a>]) -> impl Iterator<Item = Id> + use<'a> {
    let number = |kept: Option<u16>| kept.unwrap_or(0);
    let rule = Rule {
        hourly: number(keep.hourly),
        daily: number(keep.daily),
        weekly: number(keep.weekly),
        monthly: number(keep.monthly),
    };
    let newest_first: Vec<&State<'_>> = ordered.iter().rev().copied().collect();
    let times = newest_first.iter().map(|state| i64::try_from(state.time()).unwrap_or(i64::MAX));
    let mut kept = rule.retained(&times.collect::<Vec<_>>());
    kept.extend(0..usize::from(number(keep.last).max(1)));
    let kept = newest_first.into_iter().enumerate().filter(move |(position, _)| kept.contains(position));
    kept.flat_map(|(_, state)| state.backups.iter().map(|record| record.id))
}

#[cfg(test)]
mod test {
    use backup::{Digest, MachineMoment};

    use super::*;

    fn record(time: u64) -> Record {
        Record {
            id: Id::from_bytes(u128::from(time).to_be_bytes()),
            disk: Id::of_name("web"),
            label: "web".into(),
            time,
            len: 0,
            content: Digest::HOLE,
            base: None,
            moment: None,
        }
    }

    /// A backup of a disk of a machine with two of them.
    fn of_machine(disk: &str, moment: u64) -> Record {
        let [machine, id] = [format!("machine of {disk}").replace(['1', '2'], ""), moment.to_string()];
        let moment = MachineMoment { machine: Id::of_name(&machine), id: Id::of_name(&id), disks: 2 };
        let id = Id::of_name(&format!("{disk} at {id}"));
        Record { id, disk: Id::of_name(disk), label: disk.into(), moment: Some(moment), ..record(id_time(&moment)) }
    }

    fn id_time(moment: &MachineMoment) -> u64 {
        (0..1000).find(|time: &u64| Id::of_name(&time.to_string()) == moment.id).unwrap()
    }

    fn superfluous_times(keep: Keep, times: &[u64], now: u64) -> Vec<u64> {
        let records: Vec<Record> = times.iter().map(|time| record(*time)).collect();
        let chosen = judge(&keep, &records, Among::All, now).superfluous;
        records.iter().filter(|record| chosen.contains(&record.id)).map(|record| record.time).collect()
    }

    /// The labels and times of the superfluous ones, and the number that cannot be judged.
    fn judged(keep: Keep, records: &[Record], among: Among<'_>) -> (Vec<String>, u64) {
        let judged = judge(&keep, records, among, 1000);
        let chosen = records.iter().filter(|record| judged.superfluous.contains(&record.id));
        (chosen.map(|record| format!("{}@{}", record.label, record.time)).collect(), judged.unjudged)
    }

    const LAST: Keep = Keep { last: Some(1), hourly: None, daily: None, weekly: None, monthly: None };

    #[test]
    fn a_state_is_the_newest_if_it_is_by_either_order() {
        let times = superfluous_times(LAST, &[10, 50, 20], 100);
        assert_eq!(times, [10], "50 has the latest time, 20 was published last");
        let weekly = Keep { weekly: Some(2), ..Keep::default() };
        let week = 7 * 86_400;
        // The clock was behind for the last one, or an old snapshot was backed up: either way two weeks are retained.
        let times = [7 * week, 8 * week, 9 * week, week];
        assert_eq!(superfluous_times(weekly, &times, 10 * week), [7 * week]);
    }

    #[test]
    fn the_last_of_each_period_is_retained_whatever_the_time_is() {
        let day = 86_400;
        let times = [10 * day, 10 * day + 5, 11 * day, 14 * day + 1, 14 * day + 2];
        let daily = Keep { daily: Some(3), ..Keep::default() };
        assert_eq!(superfluous_times(daily, &times, 20 * day), [10 * day, 14 * day + 1]);
        assert_eq!(superfluous_times(daily, &times, 9000 * day), [10 * day, 14 * day + 1]);
        let last = Keep { last: Some(2), ..Keep::default() };
        assert_eq!(superfluous_times(last, &times, 20 * day), times[..3]);
        // 1970-01-11 was a Sunday, 1970-01-12 and 15 of the next week.
        let weekly = Keep { weekly: Some(1), ..Keep::default() };
        assert_eq!(superfluous_times(weekly, &times, 20 * day), times[..4]);
        let both = Keep { last: Some(1), monthly: Some(2), ..Keep::default() };
        assert_eq!(superfluous_times(both, &[day, 31 * day, 32 * day], 99 * day), [31 * day]);
    }

    #[test]
    fn a_backup_from_the_future_is_neither_counted_nor_superfluous() {
        assert_eq!(superfluous_times(LAST, &[1, 2, 900], 100), [1]);
    }

    #[test]
    fn a_machine_is_retained_whole_whatever_disks_are_backed_up_alone() {
        let alone = |disk: &str, time| Record { moment: None, ..of_machine(disk, time) };
        let records = [
            of_machine("a1", 1),
            of_machine("a2", 1),
            alone("a1", 2),
            of_machine("a2", 3),
            of_machine("a1", 3),
            alone("a1", 4),
            alone("a2", 5),
        ];
        let (superfluous, unjudged) = judged(LAST, &records, Among::All);
        assert_eq!((superfluous, unjudged), (vec!["a1@1".into(), "a2@1".into(), "a1@2".into()], 0));
    }

    #[test]
    fn the_last_backup_of_a_disk_that_has_left_its_machine_is_retained() {
        let one_disk = |time| {
            let record = of_machine("a1", time);
            Record { moment: record.moment.map(|moment| MachineMoment { disks: 1, ..moment }), ..record }
        };
        let mut records = vec![of_machine("a1", 1), of_machine("a2", 1), of_machine("a1", 2), of_machine("a2", 2)];
        records.extend([one_disk(3), one_disk(4)]);
        let first_and_third = vec!["a1@1".into(), "a2@1".into(), "a1@3".into()];
        assert_eq!(judged(LAST, &records, Among::All), (first_and_third, 0));
        records.push(Record { moment: None, ..of_machine("a2", 5) });
        let (superfluous, _) = judged(LAST, &records, Among::Machine(Id::of_name("machine of a")));
        assert_eq!(superfluous.len(), 5, "it was backed up alone since");
    }

    #[test]
    fn a_rule_for_a_disk_is_not_one_for_its_machine_even_if_that_has_no_other() {
        let one_disk = |time| {
            let record = of_machine("a1", time);
            Record { moment: record.moment.map(|moment| MachineMoment { disks: 1, ..moment }), ..record }
        };
        let alone = |time| Record { moment: None, ..of_machine("a1", time) };
        let records = [one_disk(1), one_disk(2), alone(3), one_disk(4), alone(5)];
        assert_eq!(judged(LAST, &records, Among::Disk(Id::of_name("a1"))), (vec!["a1@3".into()], 0));
        let (superfluous, _) = judged(LAST, &records, Among::Machine(Id::of_name("machine of a")));
        assert_eq!(superfluous, ["a1@1", "a1@2"]);
    }

    #[test]
    fn an_incomplete_state_of_a_machine_neither_counts_nor_is_superfluous() {
        let whole = [of_machine("a1", 1), of_machine("a2", 1)];
        let half = |time| of_machine("a1", time);
        let records = [whole[0].clone(), whole[1].clone(), half(2), half(3)];
        assert_eq!(judged(LAST, &records, Among::All), (vec![], 2));
        let twice = Record { id: Id::of_name("twice"), ..half(3) };
        let records = [whole[0].clone(), whole[1].clone(), half(3), twice];
        assert_eq!(judged(LAST, &records, Among::All), (vec![], 2), "one disk twice is not two disks");
    }

    #[test]
    fn machines_that_are_backed_up_at_the_same_time_are_counted_by_themselves() {
        let records = [of_machine("a1", 1), of_machine("b1", 1), of_machine("b2", 1), of_machine("a2", 1)];
        assert_eq!(judged(LAST, &records, Among::All), (vec![], 0));
    }

    #[test]
    fn of_a_state_with_other_disks_nothing_is_removed() {
        let mut records: Vec<Record> =
            (1..4).flat_map(|time| [of_machine("a1", time), of_machine("a2", time)]).collect();
        records.push(of_machine("b1", 1));
        assert_eq!(judged(LAST, &records, Among::Name("a1")), (vec![], 3));
        assert_eq!(judged(LAST, &records, Among::Disk(Id::of_name("a1"))), (vec![], 0));
        let (superfluous, unjudged) = judged(LAST, &records, Among::Machine(Id::of_name("machine of a")));
        assert_eq!((superfluous.len(), unjudged), (4, 0));
    }
}
