//! A daemon within the test, whose catalogue has a plugged disk: work that happens without a request.

use std::path::Path;
use std::time::Duration;

use api::{Change, ImageFormat, Space, Transport, Vbd, VbdState};
use jiff::Timestamp;
use repo::catalogue::NewVdi;
use repo::driver::{Label, make};
use serde_json::value::{RawValue, to_raw_value};

use super::*;
use crate::config::Config;

/// A daemon with a repository, an image in it, and an unplugged VBD of it.
struct Room {
    _room: tempfile::TempDir,
    daemon: Daemon,
    sr: Uuid,
    image: Uuid,
    vbd: Uuid,
    file: std::path::PathBuf,
}

async fn room() -> Room {
    let room = tempfile::tempdir().unwrap();
    let at = |name: &str| room.path().join(name);
    let mut config = Config {
        state_directory: at("state"),
        run_directory: at("run"),
        log_directory: at("log"),
        ..Config::default()
    };
    (config.storage.measure_interval, config.storage.full_interval) = (1, 1);
    let daemon = Daemon::start(config).await.unwrap();
    std::fs::create_dir(at("vms")).unwrap();
    let sr = repository(&daemon, &at("vms")).await;
    let (image, vbd) = disk(&daemon, sr).await;
    daemon.srs.attach(sr).await.unwrap();
    let file = at("vms/disk.raw");
    Room { _room: room, daemon, sr, image, vbd, file }
}

async fn repository(daemon: &Daemon, at: &Path) -> Uuid {
    let path: api::AbsolutePath = at.to_str().unwrap().parse().unwrap();
    let (uuid, name) = (Uuid::new_v4(), "vms".parse::<api::Name>().unwrap());
    make(&path, &Label::new(uuid, name.clone(), None), false).unwrap();
    let sr = crate::sr::new_sr(uuid, name, api::Description::default(), api::SrSource::Dir { path }, 0);
    daemon.catalogue.write(move |tx| tx.add_sr(&sr)).await.unwrap();
    uuid
}

/// An image with a VDI and a VBD, in the catalogue only.
async fn disk(daemon: &Daemon, sr: Uuid) -> (Uuid, Uuid) {
    let image = Image::new(Uuid::new_v4(), sr, ImageFormat::Raw, 1 << 20, None);
    let image = Image { file: "disk.raw".into(), ..image };
    let (name, (description, labels)) = ("disk".parse().unwrap(), Default::default());
    let vdi = NewVdi {
        uuid: Uuid::new_v4(),
        image: image.uuid,
        name,
        description,
        labels,
        read_only: false,
        snapshot: None,
        scheduled: false,
        for_backup: false,
        logical_block_size: None,
    };
    let vbd = Vbd::unplugged(vdi.uuid, Transport::VhostUser);
    let made = (image.uuid, vbd.uuid);
    let adding = daemon.catalogue.write(move |tx| {
        tx.add_image(&image)?;
        tx.add_vdi(&vdi)?;
        tx.add_vbd(&vbd)
    });
    adding.await.unwrap();
    made
}

impl Room {
    async fn plugged(&self, state: VbdState) {
        let vbd = self.vbd;
        self.daemon.catalogue.write(move |tx| tx.set_vbd_state(vbd, state, None)).await.unwrap();
    }

    async fn space(&self) -> Space {
        let sr = self.sr;
        self.daemon.catalogue.read(move |view| view.sr(sr)).await.unwrap().space.unwrap()
    }

    async fn physical(&self) -> u64 {
        let image = self.image;
        self.daemon.catalogue.read(move |view| view.image(image)).await.unwrap().physical
    }

    /// Waits until a condition holds; the test framework's time limit ends it.
    async fn until(&self, so: impl AsyncFn(&Room) -> bool) {
        let waited = async {
            while !so(self).await {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(60), waited).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn growth_of_a_plugged_disk_is_measured() {
    let room = room().await;
    room.plugged(VbdState::Plugged).await;
    std::fs::write(&room.file, vec![1; 1 << 20]).unwrap();
    room.until(async |room| room.physical().await == 1 << 20).await;
    room.until(async |room| room.space().await.images == 1 << 20).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn waiting_guests_are_checked_as_long_as_there_are_any() {
    let room = room().await;
    room.plugged(VbdState::Plugged).await;
    let mut relieved = room.daemon.srs.relieved();
    // Guests continue when there is more space than when they began to wait. Other programs that write to the same
    // file system at this time write less than this.
    let ballast = room.file.with_file_name("ballast");
    let file = std::fs::File::create(&ballast).unwrap();
    rustix::fs::fallocate(file, rustix::fs::FallocateFlags::empty(), 0, 1 << 30).unwrap();
    room.daemon.srs.reported_full(room.sr).await.unwrap();
    std::fs::remove_file(&ballast).unwrap();
    let notified = tokio::time::timeout(Duration::from_secs(60), relieved.recv());
    assert_eq!(notified.await.unwrap().unwrap(), room.sr);
    room.until(async |room| !room.space().await.full).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn without_plugged_disks_no_guest_waits() {
    let room = room().await;
    room.daemon.srs.reported_full(room.sr).await.unwrap();
    room.plugged(VbdState::Plugging).await;
    room.plugged(VbdState::Unplugged).await;
    room.until(async |room| !room.space().await.full).await;
}

fn event(kind: ObjectKind, object: Option<Box<RawValue>>) -> Event {
    Event {
        seq: 1,
        at: Timestamp::now(),
        kind,
        uuid: Uuid::new_v4(),
        change: Change::Changed,
        requester: api::Requester::Daemon,
        object,
    }
}

fn task(verb: &str, state: TaskState) -> Event {
    let created = Timestamp::now();
    let task = Task {
        requester: api::Requester::Daemon,
        uuid: Uuid::new_v4(),
        verb: verb.into(),
        about: Vec::new(),
        state,
        progress: 0.0,
        transfer: None,
        step: None,
        cancellable: false,
        result: None,
        problem: None,
        created,
        ended: None,
    };
    event(ObjectKind::Task, Some(to_raw_value(&task).unwrap()))
}

#[test]
fn a_measurement_does_not_trigger_another() {
    for kind in [ObjectKind::Sr, ObjectKind::Vdi, ObjectKind::Vm, ObjectKind::Host] {
        assert!(!matters(&event(kind, None)), "{kind:?}");
    }
    assert!(matters(&event(ObjectKind::Vbd, None)));
    assert!(matters(&task("vdi-create", TaskState::Done)));
    assert!(matters(&task("vdi-copy", TaskState::Cancelled)));
    assert!(!matters(&task("vdi-create", TaskState::Running)));
    // Plugging takes no space, and there are many plugs.
    assert!(!matters(&task("vbd-plug", TaskState::Done)));
}
