//! The health of disks as this command line shows it: the daemon's judgement combined with what is observed here, or,
//! for disks served without the daemon, only the latter. Both are judged by [`api::health`].

use api::health::{self, Delay, DiskFacts, Seen};
use api::{Health, HealthState, Vbd, VbdState, VdiState};
use jiff::{Timestamp, Unit};
use stats::{Delays, Snapshot};

/// What this and earlier readings of a page show about the process that writes it.
pub fn seen(delays: &mut Delays, now: &Snapshot) -> Seen {
    let delay = match delays.judge(now) {
        stats::Delay::None => Delay::None,
        stats::Delay::Slow => Delay::Slow,
        stats::Delay::AtStorage => Delay::AtStorage,
        stats::Delay::BeforeStorage => Delay::BeforeStorage,
    };
    Seen { stopped: now.pid.is_some_and(stats::is_stopped), delay, ..Seen::default() }
}

/// The health of a disk served without the daemon; `name` is its name in commands.
pub fn without_daemon(name: &str, pid: Option<u32>, seen: Seen, waits_for_space: bool) -> Health {
    of_facts(name, false, pid, seen, waits_for_space)
}

/// The health of a disk of the daemon: the daemon's judgement, or what is observed here if that is worse, because the
/// daemon may not have noticed yet or may not run.
pub fn with_daemon(known: &Health, name: &str, pid: Option<u32>, seen: Seen) -> Health {
    // Requests waiting for space are old, but not stuck.
    let here = of_facts(name, true, pid, seen, known.state == HealthState::Full);
    if here.state > known.state { here } else { known.clone() }
}

/// The health of a VBD; its process may report waiting for space before the daemon knows.
pub fn of_vbd(vbd: &Vbd, seen: Seen, waits_for_space: bool) -> Health {
    let name = vbd.uuid.to_string();
    match vbd.state {
        VbdState::Plugged | VbdState::Unplugging => {
            let name = name.get(..8).unwrap_or_default();
            match waits_for_space && vbd.health.state < HealthState::Full {
                true => of_facts(name, true, vbd.pid, seen, true),
                false => with_daemon(&vbd.health, name, vbd.pid, seen),
            }
        }
        VbdState::Unplugged | VbdState::Plugging | VbdState::Restarting => vbd.health.clone(),
    }
}

fn of_facts(name: &str, supervised: bool, pid: Option<u32>, seen: Seen, waits_for_space: bool) -> Health {
    health::of_disk(&DiskFacts {
        name,
        vdi_name: "",
        supervised,
        state: VbdState::Plugged,
        vdi: VdiState::Ready,
        problem: None,
        waits_for_space,
        pid,
        seen,
        repository: None,
    })
}

/// Formats the state and its age: `stuck for 3 min, since 2026-11-28T19:50:00Z`.
pub fn in_words(health: &Health, now: Timestamp) -> String {
    let state = health.state.name();
    let Some(since) = health.since else { return state.to_owned() };
    let seconds = now.as_second().saturating_sub(since.as_second()).max(0);
    let time = match seconds {
        0..60 => format!("{seconds} s"),
        60..3600 => format!("{} min", seconds / 60),
        3600..86_400 => format!("{} h {} min", seconds / 3600, seconds % 3600 / 60),
        _ => format!("{} d {} h", seconds / 86_400, seconds % 86_400 / 3600),
    };
    let since = since.round(Unit::Second).unwrap_or(since);
    format!("{state} for {time}, since {since}")
}

/// The state of an object in a table, with its health appended unless that is healthy or the same word.
pub fn with_state(state: String, health: &Health) -> String {
    let word = health.state.name();
    if health.is_healthy() || state == word { state } else { format!("{state}, {word}") }
}

/// The state of an object in a narrow column: its health instead, unless it is healthy.
pub fn instead_of(state: String, health: &Health) -> String {
    if health.is_healthy() { state } else { health.state.name().to_owned() }
}

#[cfg(test)]
mod test {
    use super::*;

    fn stuck(since: &str) -> Health {
        Health { state: HealthState::Stuck, since: Some(since.parse().unwrap()), ..Health::default() }
    }

    #[test]
    fn a_health_is_shown_with_its_duration_and_beginning() {
        let now = "2026-11-28T20:00:00Z".parse().unwrap();
        assert_eq!(in_words(&stuck("2026-11-28T19:59:58.4Z"), now), "stuck for 2 s, since 2026-11-28T19:59:58Z");
        assert!(in_words(&stuck("2026-11-28T19:00:00Z"), now).starts_with("stuck for 1 h 0 min, "));
        assert!(in_words(&stuck("2026-11-26T19:00:00Z"), now).starts_with("stuck for 2 d 1 h, "));
        assert_eq!(in_words(&Health::healthy(), now), "healthy");
    }

    #[test]
    fn a_state_in_a_table_has_the_health_if_it_differs() {
        let health = stuck("2026-11-28T19:00:00Z");
        assert_eq!(with_state("plugged".into(), &health), "plugged, stuck");
        assert_eq!(with_state("stuck".into(), &health), "stuck");
        assert_eq!(with_state("plugged".into(), &Health::healthy()), "plugged");
        assert_eq!(instead_of("in use".into(), &health), "stuck");
        assert_eq!(instead_of("in use".into(), &Health::healthy()), "in use");
    }

    #[test]
    fn a_worse_observation_overrides_the_daemons_health() {
        let stopped = Seen { stopped: true, ..Seen::default() };
        let here = with_daemon(&Health::healthy(), "419e0000", Some(7), stopped);
        assert_eq!((here.state, here.since), (HealthState::Stuck, None));
        let known = stuck("2026-11-28T19:00:00Z");
        assert_eq!(with_daemon(&known, "419e0000", Some(7), stopped), known);
        assert_eq!(without_daemon("/a.sock", Some(7), Seen::default(), true).state, HealthState::Full);
        assert_eq!(without_daemon("/a.sock", Some(7), Seen::default(), false).state, HealthState::Unmanaged);
    }
}
