//! Single cases of the rule, and random schedules, clocks and losses.
//!
//! Invariants checked: those in the documentation of `plan.rs`, and that each number of a schedule is kept if there
//! were as many snapshots.

use std::collections::BTreeSet;

use fastrand::Rng;
use jiff::SignedDuration;
use periods::Period;

use super::*;

fn time(text: &str) -> Timestamp {
    text.parse().unwrap()
}

fn taken(texts: &[&str]) -> Vec<Taken> {
    texts.iter().map(|text| Taken { snapshot: Uuid::new_v4(), at: time(text) }).collect()
}

/// The times of the destroyed snapshots.
fn gone(schedule: &Retention, taken: &[Taken], now: &str) -> Vec<String> {
    let gone = superfluous(schedule, taken, time(now));
    let at = |gone: &Uuid| taken.iter().find(|taken| taken.snapshot == *gone).unwrap().at.to_string();
    gone.iter().map(at).collect()
}

#[test]
fn the_newest_of_each_period_is_kept_for_as_many_periods_as_have_one() {
    let schedule = Retention::new(2, 2, 0, 0).unwrap();
    let all = taken(&[
        "2026-11-20T05:00:00Z",
        "2026-11-21T22:00:00Z",
        "2026-11-21T23:00:00Z",
        "2026-11-27T09:00:00Z",
        "2026-11-27T10:00:00Z",
        "2026-11-27T11:00:00Z",
        "2026-11-27T11:30:00Z",
    ]);
    let expected = ["2026-11-20T05:00:00Z", "2026-11-21T22:00:00Z", "2026-11-27T09:00:00Z", "2026-11-27T11:00:00Z"];
    assert_eq!(gone(&schedule, &all, "2026-11-27T11:45:00Z"), expected);
    // At any later time: age alone destroys nothing.
    assert_eq!(gone(&schedule, &all, "2036-01-01T00:00:00Z"), expected);
}

#[test]
fn a_snapshot_from_the_future_is_neither_counted_nor_destroyed() {
    let schedule = Retention::new(2, 0, 0, 0).unwrap();
    let all = taken(&[
        "2026-11-27T08:00:00Z",
        "2026-11-27T09:00:00Z",
        "2026-11-27T10:00:00Z",
        // While the clock was a day ahead.
        "2026-11-28T09:00:00Z",
        "2026-11-28T10:00:00Z",
        "2026-11-28T11:00:00Z",
    ]);
    assert_eq!(gone(&schedule, &all, "2026-11-27T10:30:00Z"), ["2026-11-27T08:00:00Z"]);
    assert!(!is_due_of(&schedule, &all, time("2026-11-27T10:30:00Z")));
    assert!(is_due_of(&schedule, &all, time("2026-11-27T11:00:00Z")));
}

fn periods(schedule: &Retention) -> impl Iterator<Item = (Period, usize)> {
    rule(schedule).periods()
}

fn is_due_of(schedule: &Retention, taken: &[Taken], now: Timestamp) -> bool {
    is_due(rule(schedule), taken.iter().map(|taken| taken.at), now)
}

fn random_schedule(random: &mut Rng) -> Retention {
    loop {
        let numbers = [(); 4].map(|()| random.u16(..9));
        if let Ok(schedule) = Retention::new(numbers[0], numbers[1], numbers[2], numbers[3]) {
            return schedule;
        }
    }
}

fn random_snapshots(random: &mut Rng, now: Timestamp) -> Vec<Taken> {
    let (count, spread) = (random.u64(..120), random.i64(1..=100) * 36_000);
    let mut taken = || {
        let at = now - SignedDuration::from_secs(random.i64(-spread / 4..spread * 7 / 4));
        Taken { snapshot: Uuid::from_u64_pair(random.u64(..), 1), at }
    };
    (0..count).map(|_| taken()).collect()
}

/// How many different periods of a kind these snapshots are in.
fn periods_of<'a>(period: Period, taken: impl Iterator<Item = &'a Taken>) -> usize {
    taken.map(|taken| period.of(taken.at.as_second())).collect::<BTreeSet<_>>().len()
}

#[test]
fn random_schedules_keep_what_they_promise() {
    for seed in 0..2000 {
        let mut random = Rng::with_seed(seed);
        let now = time("2026-11-27T11:30:00Z") + SignedDuration::from_secs(random.i64(0..1 << 22));
        let (schedule, all) = (random_schedule(&mut random), random_snapshots(&mut random, now));
        let gone: BTreeSet<Uuid> = superfluous(&schedule, &all, now).into_iter().collect();
        let kept: Vec<Taken> = all.iter().filter(|taken| !gone.contains(&taken.snapshot)).copied().collect();
        let past = |taken: &&Taken| taken.at <= now;
        let why = format!("seed {seed}: {schedule}, {} snapshots", all.len());
        assert_eq!(kept.iter().filter(|taken| !past(taken)).count(), all.iter().filter(|taken| !past(taken)).count());
        for (period, number) in periods(&schedule) {
            let (had, has) =
                (periods_of(period, all.iter().filter(past)), periods_of(period, kept.iter().filter(past)));
            assert!(has >= had.min(number), "{why}: {has} of {period:?}");
        }
        let newest = all.iter().filter(past).max_by_key(|taken| (taken.at, taken.snapshot));
        assert!(newest.is_none_or(|newest| !gone.contains(&newest.snapshot)), "{why}");
        let total: usize = periods(&schedule).map(|(_, number)| number).sum();
        assert!(kept.iter().filter(past).count() <= total, "{why}");
        // Nothing more is destroyed after that, nor when time passes.
        let later = now + SignedDuration::from_hours(24 * 365);
        let past: Vec<Taken> = kept.iter().filter(past).copied().collect();
        assert!(
            superfluous(&schedule, &past, now).is_empty() && superfluous(&schedule, &past, later).is_empty(),
            "{why}"
        );
    }
}

/// A host that takes a snapshot whenever one is due, and whose clock sometimes jumps, by up to `back` and `ahead`
/// days.
fn jumps(seed: u64, back: i64, ahead: i64, mut holds: impl FnMut(&str, &Retention, &[Taken], Timestamp, usize)) {
    let mut random = Rng::with_seed(seed);
    let schedule = random_schedule(&mut random);
    let mut now = time("2026-11-27T11:30:00Z");
    let mut all = Vec::<Taken>::new();
    for step in 0..400 {
        now += SignedDuration::from_secs(random.i64(0..7200));
        if random.u8(..20) == 0 {
            now += SignedDuration::from_hours(24 * random.i64(-back..=ahead));
        }
        if is_due_of(&schedule, &all, now) {
            all.push(Taken { snapshot: Uuid::new_v4(), at: now });
            let gone = superfluous(&schedule, &all, now);
            all.retain(|taken| !gone.contains(&taken.snapshot));
            holds(&format!("seed {seed}, step {step}: {schedule}"), &schedule, &all, now, gone.len());
        }
    }
}

#[test]
fn a_forward_jump_destroys_at_most_one_snapshot_of_each_kind_per_new_one() {
    for seed in 0..300 {
        jumps(seed, 0, 400, |why, schedule, _, _, gone| assert!(gone <= periods(schedule).count(), "{why}: {gone}"));
    }
}

#[test]
fn a_clock_that_jumps_both_ways_never_destroys_the_newest_snapshot() {
    for seed in 0..300 {
        jumps(seed, 400, 400, |why, schedule, all, now, _| {
            assert!(all.iter().any(|taken| taken.at == now), "{why}: the new one is gone");
            let total: usize = periods(schedule).map(|(_, number)| number).sum();
            assert!(all.iter().filter(|taken| taken.at <= now).count() <= total, "{why}");
        });
    }
}
