//! Tests of health in the catalogue: events, what follows from what, and the time since when.

use api::{Event, Mode, Task, Transport, VbdState};

use super::super::NewTask;
use super::super::Process;
use super::super::image::ImageState;
use super::super::test::{Room, room};
use super::*;

/// A plugged VBD of a VDI.
async fn plugged(room: &Room) -> (Uuid, Uuid) {
    let (_, _, vdi) = room.with_vdi(1).await;
    let vbd = Vbd::unplugged(vdi, Transport::Nbd);
    let uuid = vbd.uuid;
    let plug = room.catalogue.write(move |tx| {
        tx.add_vbd(&Vbd { mode: Mode::ReadWrite, ..vbd })?;
        tx.begin_plug(uuid)?;
        tx.set_vbd_served(uuid, Process { pid: 77, started: 1 }, &"/run/a.sock".parse().unwrap())?;
        tx.end_plug(uuid)
    });
    plug.await.unwrap();
    (vbd.vdi, uuid)
}

async fn healths(room: &Room, vdi: Uuid, vbd: Uuid) -> [Health; 3] {
    let read = room.catalogue.read(move |view| {
        let listed = view.vdis(None)?.into_iter().find(|one| one.uuid == vdi).unwrap();
        Ok([view.vbd(vbd)?.health, view.vdi(vdi)?.health, listed.health])
    });
    read.await.unwrap()
}

async fn see(room: &Room, vbd: Uuid, stopped: bool) {
    room.catalogue.write(move |tx| tx.see_vbd(vbd, |seen| seen.stopped = stopped)).await.unwrap();
}

fn states(events: &mut tokio::sync::broadcast::Receiver<std::sync::Arc<Event>>) -> Vec<(ObjectKind, HealthState)> {
    #[derive(serde::Deserialize)]
    struct Object {
        health: Health,
    }
    let mut states = Vec::new();
    while let Ok(event) = events.try_recv() {
        states.push((event.kind, event.object::<Object>().unwrap().unwrap().health.state));
    }
    states
}

#[tokio::test]
async fn a_change_of_health_is_one_event_of_the_vbd_and_its_vdi() {
    let room = room();
    let (vdi, vbd) = plugged(&room).await;
    let mut events = room.catalogue.subscribe();
    see(&room, vbd, true).await;
    let stuck = [(ObjectKind::Vbd, HealthState::Stuck), (ObjectKind::Vdi, HealthState::Stuck)];
    assert_eq!(states(&mut events), stuck);
    see(&room, vbd, true).await;
    assert_eq!(states(&mut events), [], "it is no other than before");
    let [of_vbd, of_vdi, listed] = healths(&room, vdi, vbd).await;
    assert!(of_vbd.since.is_some() && of_vbd.advice.is_some(), "{of_vbd:?}");
    assert_eq!((of_vdi.state, &of_vdi.reason, &listed), (HealthState::Stuck, &of_vbd.reason, &of_vdi));
    see(&room, vbd, false).await;
    let healthy = [(ObjectKind::Vbd, HealthState::Healthy), (ObjectKind::Vdi, HealthState::Healthy)];
    assert_eq!(states(&mut events), healthy);
    assert_eq!(healths(&room, vdi, vbd).await, [(); 3].map(|()| Health::healthy()));
}

#[tokio::test]
async fn another_process_has_nothing_of_the_one_before() {
    let room = room();
    let (vdi, vbd) = plugged(&room).await;
    see(&room, vbd, true).await;
    room.catalogue.write(move |tx| tx.set_vbd_process(vbd, Process { pid: 78, started: 2 })).await.unwrap();
    assert!(healths(&room, vdi, vbd).await.iter().all(Health::is_healthy));
    see(&room, vbd, true).await;
    room.catalogue.write(move |tx| tx.end_unplug(vbd, None)).await.unwrap();
    assert!(healths(&room, vdi, vbd).await.iter().all(Health::is_healthy));
}

#[tokio::test]
async fn a_diverged_vdi_is_so_with_its_vbds() {
    let room = room();
    let (vdi, vbd) = plugged(&room).await;
    let mut events = room.catalogue.subscribe();
    let diverge = room.catalogue.write(move |tx| {
        let image = tx.image(tx.vdi_image(vdi)?)?;
        tx.set_image(&super::super::Image { state: ImageState::Diverged, ..image })
    });
    diverge.await.unwrap();
    let states = states(&mut events);
    assert!(states.len() == 2 && states.iter().all(|(_, state)| *state == HealthState::Diverged), "{states:?}");
    assert!(healths(&room, vdi, vbd).await.iter().all(|health| health.state == HealthState::Diverged));
}

#[tokio::test]
async fn since_when_an_object_is_not_healthy_survives_a_restart() {
    let room = room();
    let (vdi, vbd) = plugged(&room).await;
    let died = Problem::failed("serve", "killed");
    room.catalogue.write(move |tx| tx.set_vbd_state(vbd, VbdState::Restarting, Some(&died))).await.unwrap();
    let before = healths(&room, vdi, vbd).await;
    assert_eq!((before[0].state, &before[0].reason), (HealthState::Restarting, &Some("cannot serve: killed".into())));
    let Room { directory, catalogue } = room;
    drop(catalogue);
    let catalogue = super::super::Catalogue::open(&directory.path().join("catalogue.db")).unwrap();
    let room = Room { directory, catalogue };
    assert_eq!(healths(&room, vdi, vbd).await, before);
    // A record that means nothing costs the times only.
    room.catalogue.write(|tx| tx.set_meta(META, "[")).await.unwrap();
    let board = room.catalogue.read(|view| Ok(HealthBoard::load(view.connection).known().since.len())).await.unwrap();
    assert_eq!(board, 0);
}

#[tokio::test]
async fn a_destroyed_vbd_takes_its_failure_with_it() {
    let room = room();
    let (vdi, vbd) = plugged(&room).await;
    let why = Problem::failed("plug it", "no such user");
    room.catalogue.write(move |tx| tx.end_unplug(vbd, Some(&why))).await.unwrap();
    assert_eq!(healths(&room, vdi, vbd).await[1].state, HealthState::Failed);
    let mut events = room.catalogue.subscribe();
    room.catalogue.write(move |tx| tx.remove_vbd(vbd)).await.unwrap();
    assert!(room.catalogue.read(move |view| view.vdi(vdi)).await.unwrap().health.is_healthy());
    let kinds: Vec<ObjectKind> = std::iter::from_fn(|| events.try_recv().ok()).map(|event| event.kind).collect();
    assert_eq!(kinds, [ObjectKind::Vbd, ObjectKind::Vdi]);
}

#[tokio::test]
async fn storage_that_does_not_respond_is_an_event_of_its_repository() {
    let room = room();
    let (sr, _, _) = room.with_vdi(1).await;
    let mut events = room.catalogue.subscribe();
    let uuid = sr.uuid;
    for silent in [true, true, false] {
        room.catalogue.write(move |tx| tx.see_sr(uuid, silent)).await.unwrap();
    }
    let sr = |state| (ObjectKind::Sr, state);
    let of_sr: Vec<_> = states(&mut events).into_iter().filter(|(kind, _)| *kind == ObjectKind::Sr).collect();
    assert_eq!(of_sr, [sr(HealthState::Stuck), sr(HealthState::Healthy)]);
}

#[tokio::test]
async fn disks_follow_a_repository_that_is_lost_also_after_a_restart() {
    let room = room();
    let (vdi, vbd) = plugged(&room).await;
    let sr = room.catalogue.read(move |view| view.vdi(vdi)).await.unwrap().sr;
    let mut events = room.catalogue.subscribe();
    let why = Problem::failed("find the directory", "it does not exist").advise("mount it");
    room.catalogue.write(move |tx| tx.set_sr_lost(sr, &why)).await.unwrap();
    let seen = states(&mut events);
    assert!(seen.len() == 3 && seen.iter().all(|(_, state)| *state == HealthState::Unreachable), "{seen:?}");
    let lost = healths(&room, vdi, vbd).await;
    for health in &lost {
        assert_eq!((health.state, health.advice.as_deref()), (HealthState::Unreachable, Some("mount it")));
        assert!(health.reason.as_ref().unwrap().contains("is unreachable: cannot find the directory"), "{health:?}");
    }
    let Room { directory, catalogue } = room;
    drop(catalogue);
    let catalogue = super::super::Catalogue::open(&directory.path().join("catalogue.db")).unwrap();
    let room = Room { directory, catalogue };
    assert_eq!(healths(&room, vdi, vbd).await, lost);
}

#[tokio::test]
async fn disks_follow_storage_that_does_not_respond_until_it_does() {
    let room = room();
    let (vdi, vbd) = plugged(&room).await;
    let sr = room.catalogue.read(move |view| view.vdi(vdi)).await.unwrap().sr;
    room.catalogue.write(move |tx| tx.see_sr(sr, true)).await.unwrap();
    assert!(healths(&room, vdi, vbd).await.iter().all(|health| health.state == HealthState::Stuck));
    room.catalogue.write(move |tx| tx.see_sr(sr, false)).await.unwrap();
    assert_eq!(healths(&room, vdi, vbd).await, [(); 3].map(|()| Health::healthy()));
}

#[tokio::test]
async fn a_task_shows_that_it_waits_for_a_stuck_disk() {
    let room = room();
    let (vdi, vbd) = plugged(&room).await;
    let uuid = Uuid::new_v4();
    let new = NewTask { uuid, verb: "vdi-snapshot", about: Vec::new(), cancellable: true, intent: None };
    let begin = room.catalogue.write(move |tx| {
        tx.add_task(&new)?;
        tx.claim(vdi, uuid)
    });
    begin.await.unwrap();
    let task = async || -> Task { room.catalogue.read(move |view| view.task(uuid)).await.unwrap() };
    see(&room, vbd, true).await;
    let waits = task().await.problem.unwrap();
    assert!(waits.detail.contains("is stuck: process 77 is stopped"), "{waits}");
    assert!(waits.advice.as_ref().unwrap().contains("kill -CONT 77"), "{waits:?}");
    // Neither its next step nor another reason hides that.
    room.catalogue.write(move |tx| tx.set_task_step(uuid, "leaf", true)).await.unwrap();
    assert_eq!(task().await.problem.as_ref(), Some(&waits));
    let slow = Problem::new(Code::Timeout, "it makes no progress");
    room.catalogue.write(move |tx| tx.set_task_problem(uuid, Some(&slow))).await.unwrap();
    assert_eq!(task().await.problem, Some(waits));
    see(&room, vbd, false).await;
    assert_eq!(task().await.problem, None);
}

#[tokio::test]
async fn a_restart_is_one_event_of_the_death_and_one_of_the_recovery() {
    let room = room();
    let (_, vbd) = plugged(&room).await;
    let mut events = room.catalogue.subscribe();
    let died = Problem::failed("serve", "killed");
    let again = died.clone();
    let record = room.catalogue.write(move |tx| {
        tx.set_vbd_unserved(vbd)?;
        tx.set_vbd_state(vbd, VbdState::Restarting, Some(&died))
    });
    record.await.unwrap();
    let process = Process { pid: 78, started: 2 };
    let at = "/run/a.sock".parse().unwrap();
    room.catalogue.write(move |tx| tx.set_vbd_served(vbd, process, &at)).await.unwrap();
    room.catalogue.write(move |tx| tx.set_vbd_state(vbd, VbdState::Plugged, Some(&again))).await.unwrap();
    let of_vbd = states(&mut events).into_iter().filter(|(kind, _)| *kind == ObjectKind::Vbd);
    let expected = [HealthState::Restarting, HealthState::Healthy].map(|state| (ObjectKind::Vbd, state));
    assert_eq!(of_vbd.collect::<Vec<_>>(), expected);
}
