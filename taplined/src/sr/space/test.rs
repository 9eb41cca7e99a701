//! Repositories that fill and empty, on real file systems; a full one is a small tmpfs.

use std::io::Write;
use std::path::Path;
use std::process::Command;

use repo::Catalogue;
use repo::driver::{Label, LastHost, make};

use super::*;
use crate::jobs::WHEN_ATTACHED;

/// An attached repository in its own directory.
struct Room {
    _state: tempfile::TempDir,
    srs: Srs,
    sr: Uuid,
}

fn here() -> LastHost {
    LastHost { host: Uuid::nil(), machine: String::new(), state_directory: "/".into() }
}

async fn room(at: &Path) -> Room {
    let state = tempfile::tempdir().unwrap();
    let catalogue = Catalogue::open(&state.path().join("catalogue.db")).unwrap();
    let srs = Srs::new(&Config::default(), catalogue, here(), Vec::new(), WHEN_ATTACHED);
    let path: api::AbsolutePath = at.to_str().unwrap().parse().unwrap();
    let (sr, name) = (Uuid::new_v4(), "vms".parse::<api::Name>().unwrap());
    make(&path, &Label::new(sr, name.clone(), None), false).unwrap();
    let new = crate::sr::new_sr(sr, name, api::Description::default(), api::SrSource::Dir { path }, 0);
    srs.catalogue.write(move |tx| tx.add_sr(&new)).await.unwrap();
    srs.attach(sr).await.unwrap();
    Room { _state: state, srs, sr }
}

impl Room {
    async fn sr(&self) -> Sr {
        let sr = self.sr;
        self.srs.catalogue.read(move |view| view.sr(sr)).await.unwrap()
    }

    async fn full(&self) -> bool {
        self.sr().await.space.unwrap().full
    }
}

/// A tmpfs of 2 MiB, unmounted on drop; `None` where only root can mount.
struct Small(tempfile::TempDir);

impl Small {
    fn mount() -> Option<Small> {
        let at = tempfile::tempdir().unwrap();
        let ran = Command::new("mount").args(["-t", "tmpfs", "-o", "size=2m", "none"]).arg(at.path()).output();
        if ran.is_ok_and(|ran| ran.status.success()) {
            return Some(Small(at));
        }
        // Bypasses the capture of test output, to be visible.
        std::io::stderr().write_all(b"NOT RUN: a test on a full file system: it needs root\n").unwrap();
        None
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        Command::new("umount").arg(self.0.path()).status().unwrap();
    }
}

#[tokio::test]
async fn waiting_guests_continue_only_when_there_is_space() {
    let Some(small) = Small::mount() else { return };
    let room = room(small.0.path()).await;
    let filler = small.0.path().join("filler");
    // Exactly the free bytes: the write fails for lack of space.
    assert!(std::fs::write(&filler, vec![1; 4 << 20]).is_err());
    let mut relieved = room.srs.relieved();
    room.srs.reported_full(room.sr).await.unwrap();
    assert!(room.full().await);
    room.srs.relieve(room.sr).await.unwrap();
    assert!(room.full().await && relieved.try_recv().is_err(), "there is no space yet");

    std::fs::remove_file(&filler).unwrap();
    room.srs.relieve(room.sr).await.unwrap();
    assert!(!room.full().await);
    assert_eq!(relieved.try_recv().unwrap(), room.sr);
    drop(room);
}

#[tokio::test]
async fn a_full_repository_is_full_after_a_restart() {
    let at = tempfile::tempdir().unwrap();
    let room = room(at.path()).await;
    room.srs.reported_full(room.sr).await.unwrap();
    room.srs.close_directory(room.sr).await.unwrap();
    let next = Srs::new(&Config::default(), room.srs.catalogue.clone(), here(), Vec::new(), WHEN_ATTACHED);
    next.attach(room.sr).await.unwrap();
    assert!(next.is_full(room.sr));
}

#[tokio::test]
async fn operations_that_need_the_reserve_are_refused() {
    let at = tempfile::tempdir().unwrap();
    let room = room(at.path()).await;
    let sr = room.sr;
    let free = room.sr().await.space.unwrap().free;
    room.srs.room(sr, 4096).await.unwrap();
    assert_eq!(room.srs.room(sr, u64::MAX).await.unwrap_err().code, api::Code::NoSpace);
    let patch = api::SrPatch { reserve: Some(free.saturating_mul(2)), ..api::SrPatch::default() };
    room.srs.catalogue.write(move |tx| tx.patch_sr(sr, &patch)).await.unwrap();
    let refused = room.srs.room(sr, 4096).await.unwrap_err();
    assert!(refused.code == api::Code::NoSpace && refused.advice.is_some(), "{refused}");
    room.srs.measure(sr).await.unwrap();
    assert_eq!(room.sr().await.space.unwrap().free, 0);
}

#[tokio::test]
async fn an_unchanged_measurement_causes_no_event() {
    let Some(small) = Small::mount() else { return };
    let room = room(small.0.path()).await;
    let mut events = room.srs.catalogue.subscribe();
    room.srs.measure(room.sr).await.unwrap();
    assert!(events.try_recv().is_err());
    // Ordinary writes of guests are recorded without an event.
    std::fs::write(small.0.path().join("little"), [1; 4096]).unwrap();
    let before = room.sr().await.space.unwrap().physical_utilisation;
    room.srs.measure(room.sr).await.unwrap();
    assert_eq!(room.sr().await.space.unwrap().physical_utilisation, before + 4096);
    assert!(events.try_recv().is_err());
    std::fs::write(small.0.path().join("much"), vec![1; 64 << 10]).unwrap();
    room.srs.measure(room.sr).await.unwrap();
    assert_eq!(events.try_recv().unwrap().uuid, room.sr);
    drop(room);
}

#[tokio::test]
async fn space_that_was_not_enough_is_not_tried_again() {
    let Some(small) = Small::mount() else { return };
    let room = room(small.0.path()).await;
    let filler = small.0.path().join("filler");
    std::fs::write(&filler, vec![1; 1 << 20]).unwrap();
    let mut relieved = room.srs.relieved();
    // A guest needs more than the megabyte that is free.
    room.srs.reported_full(room.sr).await.unwrap();
    room.srs.relieve(room.sr).await.unwrap();
    assert!(room.full().await && relieved.try_recv().is_err());
    std::fs::remove_file(&filler).unwrap();
    room.srs.relieve(room.sr).await.unwrap();
    assert!(!room.full().await && relieved.try_recv().is_ok());
    // The disk has found space by itself.
    room.srs.reported_full(room.sr).await.unwrap();
    room.srs.no_longer_full(room.sr).await;
    assert!(!room.full().await);
    drop(room);
}

#[tokio::test]
async fn a_detached_repository_has_no_directory() {
    let at = tempfile::tempdir().unwrap();
    let room = room(at.path()).await;
    let held = room.srs.directory(room.sr).await.unwrap();
    drop(held);
    room.srs.detach(room.sr).await.unwrap();
    let refused = room.srs.directory(room.sr).await.unwrap_err();
    assert!(refused.code == api::Code::State && refused.advice.unwrap().contains("attach"));
    assert_eq!(room.srs.directory(Uuid::new_v4()).await.unwrap_err().code, api::Code::NotFound);
    // It is not open: another process can use it.
    room.srs.attach(room.sr).await.unwrap();
}

#[tokio::test]
async fn a_repository_is_claimed_by_one_task_at_a_time() {
    let at = tempfile::tempdir().unwrap();
    let room = room(at.path()).await;
    let claim = room.srs.claim(room.sr, "scanned").unwrap();
    let refused = room.srs.claim(room.sr, "detached").unwrap_err();
    assert!(refused.code == api::Code::Busy && refused.detail.contains("scanned"), "{refused}");
    drop(claim);
    room.srs.claim(room.sr, "detached").unwrap();
}
