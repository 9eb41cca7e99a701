//! Tests of the judgements: each state follows from the facts that cause it, and the worst one is shown.

use super::*;
use crate::Code;

fn plugged() -> DiskFacts<'static> {
    DiskFacts {
        name: "419e0000",
        vdi_name: "77aa0000",
        supervised: true,
        state: VbdState::Plugged,
        vdi: VdiState::Ready,
        problem: None,
        waits_for_space: false,
        pid: Some(1234),
        seen: Seen::default(),
        repository: None,
    }
}

fn vdi(state: VdiState) -> VdiFacts<'static> {
    VdiFacts { name: "77aa0000", state, file: "a.qcow2", repository: None }
}

fn attached() -> SrFacts<'static> {
    SrFacts { state: SrState::Attached, read_only: false, space: None, problem: None, silent: false }
}

fn space(free: u64, full: bool) -> Space {
    Space {
        physical_size: 100,
        physical_utilisation: 93,
        free,
        images: 93,
        virtual_allocation: 200,
        full,
        forecast: None,
        measured: Timestamp::UNIX_EPOCH,
    }
}

fn state(facts: &DiskFacts<'_>) -> HealthState {
    of_disk(facts).state
}

#[test]
fn each_fact_about_a_disk_gives_its_state() {
    let problem = |code| Problem::new(code, "it failed").advise("repair it");
    let (died, silent) = (problem(Code::Failed), problem(Code::Timeout));
    let seen = |seen| DiskFacts { seen, ..plugged() };
    let of = |state| DiskFacts { state, problem: Some(&died), pid: None, ..plugged() };
    let cases = [
        (plugged(), HealthState::Healthy),
        (DiskFacts { supervised: false, ..plugged() }, HealthState::Unmanaged),
        (seen(Seen { delay: Delay::Slow, ..Seen::default() }), HealthState::Slow),
        (of(VbdState::Restarting), HealthState::Restarting),
        (DiskFacts { waits_for_space: true, ..plugged() }, HealthState::Full),
        (seen(Seen { stopped: true, ..Seen::default() }), HealthState::Stuck),
        (seen(Seen { silent: true, ..Seen::default() }), HealthState::Stuck),
        (seen(Seen { delay: Delay::AtStorage, ..Seen::default() }), HealthState::Stuck),
        (seen(Seen { delay: Delay::BeforeStorage, ..Seen::default() }), HealthState::Stuck),
        (DiskFacts { problem: Some(&silent), ..plugged() }, HealthState::Stuck),
        (DiskFacts { vdi: VdiState::Diverged, ..plugged() }, HealthState::Diverged),
        (DiskFacts { vdi: VdiState::Missing, ..plugged() }, HealthState::Unreachable),
        (DiskFacts { vdi: VdiState::Damaged, ..plugged() }, HealthState::Damaged),
        (seen(Seen { broken: true, ..Seen::default() }), HealthState::Failed),
        (of(VbdState::Unplugged), HealthState::Failed),
    ];
    for (facts, expected) in cases {
        let health = of_disk(&facts);
        assert_eq!(health.state, expected, "{facts:?}");
        assert_eq!(health.reason.is_none(), health.is_healthy(), "{health:?}");
    }
}

#[test]
fn a_stopped_process_is_named_with_the_command_that_continues_it() {
    let health = of_disk(&DiskFacts { seen: Seen { stopped: true, ..Seen::default() }, ..plugged() });
    assert_eq!(health.reason.unwrap(), "process 1234 is stopped by a signal or a debugger (state T)");
    assert!(health.advice.unwrap().starts_with("continue it: kill -CONT 1234; "));
}

#[test]
fn a_death_that_was_recovered_from_is_healthy() {
    let died = Problem::failed("serve", "killed");
    assert_eq!(state(&DiskFacts { problem: Some(&died), ..plugged() }), HealthState::Healthy);
}

#[test]
fn an_unplugged_disk_has_nothing_of_its_last_process() {
    let seen = Seen { stopped: true, silent: true, broken: true, delay: Delay::AtStorage };
    let unplugged = DiskFacts { state: VbdState::Unplugged, waits_for_space: true, seen, ..plugged() };
    assert_eq!(of_disk(&unplugged), Health::healthy());
}

#[test]
fn a_stopped_process_of_a_full_disk_is_stuck() {
    let seen = Seen { stopped: true, delay: Delay::BeforeStorage, ..Seen::default() };
    assert_eq!(state(&DiskFacts { waits_for_space: true, seen, ..plugged() }), HealthState::Stuck);
    let held = Seen { delay: Delay::BeforeStorage, ..Seen::default() };
    assert_eq!(state(&DiskFacts { waits_for_space: true, seen: held, ..plugged() }), HealthState::Full);
}

#[test]
fn a_vdi_has_the_worst_health_of_its_users_unless_its_files_are_bad() {
    let slow = Health { state: HealthState::Slow, ..Health::default() };
    let stuck = Health { state: HealthState::Stuck, reason: Some("stopped".into()), ..Health::default() };
    assert_eq!(of_vdi(&vdi(VdiState::Ready), []), Health::healthy());
    assert_eq!(of_vdi(&vdi(VdiState::Ready), [&slow, &stuck, &slow]), stuck);
    let missing = of_vdi(&vdi(VdiState::Missing), [&stuck]);
    assert_eq!(missing.state, HealthState::Unreachable);
    assert!(missing.reason.unwrap().contains("a.qcow2"));
}

#[test]
fn a_diverged_disk_says_what_its_problem_does() {
    let why = Problem::new(Code::State, "its file was removed").advise("save it");
    let diverged = DiskFacts { vdi: VdiState::Diverged, problem: Some(&why), ..plugged() };
    let health = of_disk(&diverged);
    assert_eq!((health.reason.as_deref(), health.advice.as_deref()), (Some("its file was removed"), Some("save it")));
    assert_eq!(of_vdi(&vdi(VdiState::Diverged), [&health]), health);
    // Without a process there is nothing to believe but the catalogue.
    let unplugged = of_disk(&DiskFacts { state: VbdState::Unplugged, problem: None, pid: None, ..diverged });
    assert!(unplugged.advice.as_ref().unwrap().contains("tapline vdi reconcile 77aa0000 --believe catalogue"));
    assert_eq!(of_vdi(&vdi(VdiState::Diverged), [&unplugged]), unplugged);
    assert_eq!(of_vdi(&vdi(VdiState::Diverged), []), unplugged);
}

#[test]
fn disks_have_the_condition_of_a_repository_whose_storage_does_not_answer() {
    let of = |state, reason: &str| Health::of(state, reason, "mount it".to_owned());
    assert_eq!(of_contents("vms", &of(HealthState::Full, "it is full")), None);
    let lost = of_contents("vms", &of(HealthState::Unreachable, "it is gone")).unwrap();
    assert_eq!(lost.reason.as_deref(), Some("its repository 'vms' is unreachable: it is gone"));
    assert_eq!(of_disk(&DiskFacts { repository: Some(&lost), ..plugged() }), lost);
    assert_eq!(of_vdi(&VdiFacts { repository: Some(&lost), ..vdi(VdiState::Ready) }, []), lost);
    // What is worse of the disk itself is shown.
    let stuck = of_contents("vms", &of(HealthState::Stuck, "it does not respond")).unwrap();
    let diverged = DiskFacts { vdi: VdiState::Diverged, repository: Some(&stuck), ..plugged() };
    assert_eq!(state(&diverged), HealthState::Diverged);
}

#[test]
fn a_failure_without_advice_says_how_to_try_again() {
    let why = Problem::failed("open it", "no such file");
    let failed = of_disk(&DiskFacts { state: VbdState::Unplugged, problem: Some(&why), pid: None, ..plugged() });
    assert!(failed.advice.unwrap().ends_with("tapline vbd plug 419e0000"));
}

#[test]
fn the_reserve_of_a_repository_is_not_free_space() {
    let of = |space: &Space| of_sr(&SrFacts { space: Some(space), ..attached() }).state;
    assert_eq!(of(&space(7, false)), HealthState::Healthy);
    assert_eq!(of(&space(0, false)), HealthState::Full);
    assert_eq!(of(&space(7, true)), HealthState::Full);
    let none = space(0, false);
    assert_eq!(of_sr(&SrFacts { space: Some(&none), read_only: true, ..attached() }), Health::healthy());
}

#[test]
fn a_repository_is_stuck_lost_or_detached_before_its_space_matters() {
    let full = space(0, true);
    let facts = SrFacts { space: Some(&full), silent: true, ..attached() };
    assert_eq!(of_sr(&facts).state, HealthState::Stuck);
    let why = Problem::failed("find the directory", "it does not exist");
    let lost = of_sr(&SrFacts { state: SrState::Lost, problem: Some(&why), ..facts });
    assert_eq!((lost.state, lost.reason), (HealthState::Unreachable, Some(why.detail)));
    assert!(lost.advice.is_some());
    assert_eq!(of_sr(&SrFacts { state: SrState::Detached, ..facts }), Health::healthy());
}

#[test]
fn states_are_ordered_and_named_as_in_json() {
    assert!(HealthState::ALL.is_sorted());
    for state in HealthState::ALL {
        assert_eq!(serde_json::to_value(state).unwrap(), state.name());
    }
}
