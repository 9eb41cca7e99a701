//! The catalogue on a file of its own: what it stores, what it refuses, and which events it publishes.

use api::{Change, ImageFormat, Mode, Sr, SrSource, SrState, Task, TaskState, Transport, Vbd, VbdState};
use jiff::Timestamp;

use super::row::Id;
use super::*;

/// A catalogue in a directory of its own.
pub(super) struct Room {
    pub(super) directory: tempfile::TempDir,
    pub(super) catalogue: Catalogue,
}

pub(super) fn room() -> Room {
    let directory = tempfile::tempdir().unwrap();
    let catalogue = Catalogue::open(&directory.path().join("catalogue.db")).unwrap();
    Room { directory, catalogue }
}

pub(super) fn sr() -> Sr {
    Sr {
        uuid: Uuid::new_v4(),
        name: "local".parse().unwrap(),
        description: api::Description::default(),
        tags: Default::default(),
        other_config: Default::default(),
        source: SrSource::Dir { path: "/srv/vms".parse().unwrap() },
        state: SrState::Attached,
        health: Default::default(),
        variant: None,
        space: None,
        reserve: 0,
        share_depth: 64,
        split: Default::default(),
        merge: Default::default(),
        policy: None,
        problem: None,
        created: Timestamp::now(),
    }
}

pub(super) fn image(sr: Uuid, parent: Option<Uuid>) -> Image {
    Image { physical: 4096, ..Image::new(Uuid::new_v4(), sr, ImageFormat::Qcow2, 1 << 30, parent) }
}

pub(super) fn vdi(image: &Image) -> NewVdi {
    let name = "disk".parse().unwrap();
    let (description, labels) = Default::default();
    NewVdi {
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
    }
}

pub(super) fn vm(name: &str) -> api::Vm {
    api::Vm {
        uuid: Uuid::new_v4(),
        name: name.parse().unwrap(),
        description: api::Description::default(),
        tags: Default::default(),
        other_config: Default::default(),
        driver: api::Driver::Qemu,
        memory: 1 << 30,
        vcpus: 1,
        boot: api::Boot::Disk,
        platform: Default::default(),
        autostart: None,
        retention: None,
        retention_problem: None,
        backup_schedule: None,
        last_backup: None,
        backup_problem: None,
        seed: false,
        power: api::Power::Halted,
        suspended: None,
        pid: None,
        handle: None,
        problem: None,
        created: Timestamp::now(),
    }
}

fn vbd(vdi: Uuid) -> Vbd {
    Vbd::unplugged(vdi, Transport::VhostUser)
}

impl Room {
    /// A repository with a VDI on a chain of `depth` images.
    pub(super) async fn with_vdi(&self, depth: usize) -> (Sr, Vec<Image>, Uuid) {
        self.catalogue
            .write(move |tx| {
                let sr = sr();
                tx.add_sr(&sr)?;
                let mut chain: Vec<Image> = Vec::new();
                for _ in 0..depth {
                    let image = image(sr.uuid, chain.first().map(|below| below.uuid));
                    tx.add_image(&image)?;
                    chain.insert(0, image);
                }
                let new = vdi(&chain[0]);
                tx.add_vdi(&new)?;
                Ok((sr, chain, new.uuid))
            })
            .await
            .unwrap()
    }
}

#[tokio::test]
async fn writes_survive_reopening() {
    let Room { directory, catalogue } = room();
    let one = sr();
    let kept = one.clone();
    catalogue.write(move |tx| tx.add_sr(&kept)).await.unwrap();
    drop(catalogue);
    let again = Catalogue::open(&directory.path().join("catalogue.db")).unwrap();
    assert_eq!(again.read(|view| view.srs()).await.unwrap(), [one]);
}

#[tokio::test]
async fn a_refused_change_leaves_nothing_and_no_event() {
    let Room { directory: _directory, catalogue } = room();
    let mut events = catalogue.subscribe();
    let refused = catalogue.write(|tx| {
        tx.add_sr(&sr())?;
        Err::<(), _>(Problem::new(Code::Failed, "on second thoughts"))
    });
    assert_eq!(refused.await.unwrap_err().detail, "on second thoughts");
    assert_eq!(catalogue.read(|view| view.srs()).await.unwrap(), []);
    catalogue.write(|tx| tx.add_sr(&sr())).await.unwrap();
    assert_eq!(events.recv().await.unwrap().change, Change::Added);
    assert!(events.try_recv().is_err());
}

#[tokio::test]
async fn concurrent_changes_are_committed_except_refused_ones() {
    let Room { directory: _directory, catalogue } = room();
    let changes = (0..200).map(|n| {
        let catalogue = catalogue.clone();
        tokio::spawn(async move {
            catalogue
                .write(move |tx| {
                    tx.add_sr(&sr())?;
                    if n % 10 == 0 { Err(Problem::new(Code::Failed, "no")) } else { Ok(()) }
                })
                .await
                .is_ok()
        })
    });
    let mut made = 0;
    for change in changes.collect::<Vec<_>>() {
        made += usize::from(change.await.unwrap());
    }
    assert_eq!((made, catalogue.read(|view| view.srs()).await.unwrap().len()), (180, 180));
}

#[tokio::test]
async fn a_vdi_has_one_writer_or_readers() {
    let room = room();
    let (_, _, vdi) = room.with_vdi(1).await;
    let (first, second) = (vbd(vdi), vbd(vdi));
    let (a, b) = (first.uuid, second.uuid);
    let write = |holder, mode| room.catalogue.write(move |tx| tx.take_lease(vdi, holder, mode));
    room.catalogue.write(move |tx| tx.add_vbd(&first).and_then(|()| tx.add_vbd(&second))).await.unwrap();

    write(a, Mode::ReadWrite).await.unwrap();
    write(a, Mode::ReadWrite).await.unwrap();
    for mode in [Mode::ReadWrite, Mode::ReadOnly] {
        let refused = write(b, mode).await.unwrap_err();
        assert_eq!(refused.code, Code::InUse);
        assert!(refused.detail.contains(&a.to_string()), "{}", refused.detail);
    }
    room.catalogue.write(move |tx| tx.drop_leases(a)).await.unwrap();

    write(a, Mode::ReadOnly).await.unwrap();
    write(b, Mode::ReadOnly).await.unwrap();
    assert_eq!(write(Uuid::new_v4(), Mode::ReadWrite).await.unwrap_err().code, Code::InUse);
    let users = room.catalogue.read(move |view| view.vdi(vdi)).await.unwrap().users;
    assert_eq!(users.len(), 2);
}

#[tokio::test]
async fn the_schema_itself_refuses_a_second_writer() {
    let room = room();
    let (_, _, vdi) = room.with_vdi(1).await;
    let insert = |holder: Uuid| {
        room.catalogue
            .write(move |tx| tx.execute("INSERT INTO lease VALUES (?1, ?2, 'RW')", (row::Id(vdi), row::Id(holder))))
    };
    insert(Uuid::new_v4()).await.unwrap();
    assert!(insert(Uuid::new_v4()).await.unwrap_err().detail.contains("leased"));
}

#[tokio::test]
async fn a_claim_lasts_until_its_task_ends() {
    let Room { directory: _directory, catalogue } = room();
    let object = Uuid::new_v4();
    let (first, second) = (new_task(None), new_task(None));
    let (a, b) = (first.uuid, second.uuid);
    catalogue.write(move |tx| tx.add_task(&first).and_then(|_| tx.add_task(&second))).await.unwrap();
    let claim = |task| catalogue.write(move |tx| tx.claim(object, task));
    claim(a).await.unwrap();
    claim(a).await.unwrap();
    let refused = claim(b).await.unwrap_err();
    assert!(refused.code == Code::Busy && refused.detail.contains("vdi-create"), "{refused:?}");
    catalogue.write(move |tx| tx.end_task(a, Ok(serde_json::Value::Null))).await.unwrap();
    claim(b).await.unwrap();
}

#[tokio::test]
async fn a_chain_is_listed_from_the_top_down() {
    let room = room();
    let (_, chain, vdi) = room.with_vdi(5).await;
    assert_eq!(room.catalogue.read(move |view| view.chain(vdi)).await.unwrap(), chain);
    assert_eq!(room.catalogue.read(move |view| view.vdi(vdi)).await.unwrap().depth, 5);
}

#[tokio::test]
async fn the_vdis_above_an_image_are_all_its_descendants() {
    let room = room();
    let (sr, chain, vdi) = room.with_vdi(3).await;
    let other = image(sr.uuid, Some(chain[2].uuid));
    let shown = super::test::vdi(&other);
    let second = shown.uuid;
    room.catalogue.write(move |tx| tx.add_image(&other).and_then(|()| tx.add_vdi(&shown))).await.unwrap();
    let (base, middle) = (chain[2].uuid, chain[1].uuid);
    let mut both = vec![vdi, second];
    both.sort_by_key(ToString::to_string);
    assert_eq!(room.catalogue.read(move |view| view.vdis_above(base)).await.unwrap(), both);
    assert_eq!(room.catalogue.read(move |view| view.vdis_above(middle)).await.unwrap(), [vdi]);
}

#[tokio::test]
async fn a_repository_in_use_is_not_forgotten() {
    let room = room();
    let (sr, _, vdi) = room.with_vdi(3).await;
    let device = vbd(vdi);
    let uuid = device.uuid;
    room.catalogue.write(move |tx| tx.add_vbd(&device)).await.unwrap();
    let forget = || room.catalogue.write(move |tx| tx.remove_sr(sr.uuid));
    assert_eq!(forget().await.unwrap_err().code, Code::InUse);
    room.catalogue.write(move |tx| tx.remove_vbd(uuid)).await.unwrap();
    forget().await.unwrap();
    assert_eq!(room.catalogue.read(|view| view.vdis(None)).await.unwrap(), []);
}

#[tokio::test]
async fn a_repository_is_in_use_while_a_vbd_is_plugged_or_a_task_runs() {
    let room = room();
    let (sr, chain, vdi) = room.with_vdi(2).await;
    let (sr, leaf, device, task) = (sr.uuid, chain[0].clone(), vbd(vdi), Uuid::new_v4());
    let plugged = device.uuid;
    let used = || room.catalogue.read(move |view| view.check_sr_unused(sr));
    let written = || room.catalogue.read(move |view| Ok((view.srs_written()?, view.images_written(sr)?.len())));
    room.catalogue.write(move |tx| tx.add_vbd(&device)).await.unwrap();
    used().await.unwrap();
    assert_eq!(written().await.unwrap(), (vec![], 0));

    room.catalogue.write(move |tx| tx.set_vbd_state(plugged, VbdState::Plugging, None)).await.unwrap();
    assert_eq!(used().await.unwrap_err().code, Code::InUse);
    // The leaf, and the image below it.
    assert_eq!(written().await.unwrap(), (vec![sr], 2));
    room.catalogue.write(move |tx| tx.set_vbd_state(plugged, VbdState::Unplugged, None)).await.unwrap();

    room.catalogue.write(move |tx| tx.take_lease(vdi, task, Mode::ReadOnly)).await.unwrap();
    assert_eq!(used().await.unwrap_err().code, Code::Busy);
    room.catalogue.write(move |tx| tx.drop_leases(task)).await.unwrap();
    used().await.unwrap();

    // A job needs it before there is anything of it, and no job begins once it is detached.
    let create = new_task(Some(serde_json::json!({})));
    let uuid = create.uuid;
    let begun = room.catalogue.write(move |tx| tx.add_task(&create).and_then(|_| tx.use_sr(sr, uuid)));
    begun.await.unwrap();
    assert_eq!(used().await.unwrap_err().code, Code::Busy);
    room.catalogue.write(move |tx| tx.set_sr_state(sr, SrState::Lost, None)).await.unwrap();
    used().await.unwrap();
    room.catalogue.write(move |tx| tx.set_sr_state(sr, SrState::Attached, None)).await.unwrap();
    room.catalogue.write(move |tx| tx.end_task(uuid, Ok(serde_json::Value::Null))).await.unwrap();
    used().await.unwrap();
    room.catalogue.write(move |tx| tx.set_sr_state(sr, SrState::Detached, None)).await.unwrap();
    assert_eq!(room.catalogue.write(move |tx| tx.use_sr(sr, uuid)).await.unwrap_err().code, Code::State);
    room.catalogue.write(move |tx| tx.set_sr_state(sr, SrState::Attached, None)).await.unwrap();

    let making = Image { state: ImageState::Making, ..leaf };
    room.catalogue.write(move |tx| tx.set_image(&making)).await.unwrap();
    assert_eq!(used().await.unwrap_err().code, Code::Busy);
}

#[tokio::test]
async fn shared_images_are_counted_once_and_sums_do_not_overflow() {
    let room = room();
    let (sr, mut chain, _) = room.with_vdi(3).await;
    let allocation = || room.catalogue.read(move |view| view.sr_allocation(sr.uuid));
    assert_eq!(allocation().await.unwrap(), (3 * 4096, 1 << 30));
    for image in &mut chain {
        image.physical = 1 << 62;
        let image = image.clone();
        room.catalogue.write(move |tx| tx.set_image(&image)).await.unwrap();
    }
    assert_eq!(allocation().await.unwrap().0, 3 << 62);
}

#[tokio::test]
async fn a_shown_repository_has_the_images_of_now() {
    let room = room();
    let (sr, _, _) = room.with_vdi(3).await;
    let sr = sr.uuid;
    let measured = api::Space {
        physical_size: 1 << 40,
        physical_utilisation: 7,
        free: 1 << 39,
        images: 0,
        virtual_allocation: 0,
        full: false,
        forecast: None,
        measured: Timestamp::now(),
    };
    let space = measured.clone();
    room.catalogue.write(move |tx| tx.set_sr_space(sr, &space, false)).await.unwrap();
    let shown = room.catalogue.read(move |view| view.shown_sr(sr)).await.unwrap();
    let now = api::Space { images: 3 * 4096, virtual_allocation: 1 << 30, ..measured };
    assert_eq!(shown.space, Some(now));
    assert_eq!(room.catalogue.read(|view| view.shown_srs()).await.unwrap(), [shown]);
}

#[tokio::test]
async fn only_attached_repositories_are_usable() {
    let room = room();
    let (sr, _, _) = room.with_vdi(1).await;
    let asked = || room.catalogue.read(move |view| view.attached_sr(sr.uuid));
    asked().await.unwrap();
    for state in [SrState::Detached, SrState::Lost] {
        room.catalogue.write(move |tx| tx.set_sr_state(sr.uuid, state, None)).await.unwrap();
        let refused = asked().await.unwrap_err();
        assert!(refused.code == Code::State && refused.advice.is_some(), "{refused}");
    }
}

fn new_task(intent: Option<serde_json::Value>) -> NewTask {
    NewTask { uuid: Uuid::new_v4(), verb: "vdi-create", about: Vec::new(), cancellable: true, intent }
}

#[tokio::test]
async fn the_journal_contains_unfinished_tasks() {
    let Room { directory, catalogue } = room();
    let (open, over, passing) =
        (new_task(Some(serde_json::json!({"image": 1}))), new_task(Some(serde_json::json!({}))), new_task(None));
    let uuid = open.uuid;
    catalogue
        .write(move |tx| {
            tx.add_task(&open)?;
            tx.set_task_step(open.uuid, "write", false)?;
            tx.add_task(&passing)?;
            tx.add_task(&over)?;
            tx.end_task(over.uuid, Ok(serde_json::Value::Null))
        })
        .await
        .unwrap();
    drop(catalogue);
    let again = Catalogue::open(&directory.path().join("catalogue.db")).unwrap();
    let journal = again.read(|view| view.journal()).await.unwrap();
    let [Journalled { task: Task { step, state, .. }, intent }] = journal.as_slice() else { panic!("{journal:?}") };
    assert_eq!((step.as_deref(), *state), (Some("write"), TaskState::Running));
    assert_eq!(intent["image"], 1);
    assert_eq!(again.write(move |tx| tx.set_task_cancelling(uuid)).await.unwrap_err().code, Code::State);
}

#[tokio::test]
async fn a_reconnecting_client_gets_missed_events_or_a_reset() {
    let Room { directory, catalogue } = room();
    let mut events = catalogue.subscribe();
    catalogue.write(|tx| tx.add_sr(&sr())).await.unwrap();
    let seen = events.recv().await.unwrap().seq;
    let second = sr();
    let expected = second.uuid;
    catalogue.write(move |tx| tx.add_sr(&second)).await.unwrap();
    let missed = catalogue.subscribe_behind(seen).missed.unwrap();
    assert_eq!(missed.iter().map(|event| event.uuid).collect::<Vec<_>>(), [expected]);
    assert!(catalogue.subscribe_behind(seen + 1000).missed.is_none());
    drop(catalogue);
    // From an earlier start: later events are unknown.
    let again = Catalogue::open(&directory.path().join("catalogue.db")).unwrap();
    assert!(again.subscribe_behind(seen).missed.is_none());
}

#[tokio::test]
async fn progress_is_published_per_percent_and_forgotten_at_the_end() {
    let Room { directory: _directory, catalogue } = room();
    let new = new_task(None);
    let uuid = new.uuid;
    let task = catalogue.write(move |tx| tx.add_task(&new)).await.unwrap();
    let mut events = catalogue.subscribe();
    for thousandth in 0..100_i32 {
        catalogue.progress(&task, f64::from(thousandth) / 1000.0);
    }
    let mut told = 0;
    while events.try_recv().is_ok() {
        told += 1;
    }
    assert_eq!(told, 10);
    assert!(catalogue.read(move |view| view.task(uuid)).await.unwrap().progress > 0.09);
    catalogue.write(move |tx| tx.end_task(uuid, Ok(serde_json::Value::Null))).await.unwrap();
    assert!((catalogue.read(move |view| view.task(uuid)).await.unwrap().progress - 1.0).abs() < f64::EPSILON);
}

#[test]
fn a_catalogue_of_a_later_version_is_refused() {
    let Room { directory, catalogue } = room();
    drop(catalogue);
    let path = directory.path().join("catalogue.db");
    Connection::open(&path).unwrap().pragma_update(None, "user_version", VERSION + 1).unwrap();
    assert_eq!(Catalogue::open(&path).unwrap_err().code, Code::Unsupported);
}

#[tokio::test]
async fn a_vbd_holds_its_lease_from_plug_to_unplug() {
    let room = room();
    let (_, _, disk) = room.with_vdi(2).await;
    let (one, other) = (vbd(disk), vbd(disk));
    let (first, second) = (one.uuid, other.uuid);
    let write = |change: fn(&mut Tx<'_>, Uuid) -> Result<Vbd, Problem>, uuid: Uuid| {
        room.catalogue.write(move |tx| change(tx, uuid))
    };
    let made = room.catalogue.write(move |tx| tx.add_vbd(&one).and_then(|()| tx.add_vbd(&other)));
    made.await.unwrap();
    assert_eq!(write(|tx, uuid| tx.begin_plug(uuid), first).await.unwrap().state, VbdState::Plugging);
    let busy = write(|tx, uuid| tx.begin_plug(uuid), second).await.unwrap_err();
    assert!(busy.code == Code::InUse && busy.detail.contains(&first.to_string()), "{busy:?}");
    assert_eq!(write(|tx, uuid| tx.begin_plug(uuid), first).await.unwrap_err().code, Code::Busy);
    assert_eq!(write(|tx, uuid| tx.end_plug(uuid), first).await.unwrap().state, VbdState::Plugged);
    assert_eq!(write(|tx, uuid| tx.begin_plug(uuid), first).await.unwrap_err().code, Code::State);
    write(|tx, uuid| tx.end_unplug(uuid, None), first).await.unwrap();
    assert_eq!(room.catalogue.read(move |view| view.holders(disk)).await.unwrap(), []);
    write(|tx, uuid| tx.begin_plug(uuid), second).await.unwrap();
}

#[tokio::test]
async fn a_vbd_must_match_its_vdis_access_mode() {
    let room = room();
    let (_, chain, disk) = room.with_vdi(2).await;
    let refused = |change: fn(&mut Vbd)| {
        let mut one = vbd(disk);
        change(&mut one);
        let made = room.catalogue.write(move |tx| tx.add_vbd(&one));
        async { made.await.unwrap_err() }
    };
    assert_eq!(refused(|vbd| vbd.queues = 0).await.field.as_deref(), Some("queues"));
    assert_eq!(refused(|vbd| vbd.queues = 65).await.field.as_deref(), Some("queues"));
    assert_eq!(refused(|vbd| vbd.position = 255).await.field.as_deref(), Some("position"));
    assert_eq!(refused(|vbd| vbd.transport = Transport::Blkif).await.code, Code::Unsupported);
    let one = vbd(disk);
    let uuid = one.uuid;
    let mut below = chain[1].clone();
    below.state = ImageState::Damaged;
    room.catalogue.write(move |tx| tx.add_vbd(&one).and_then(|()| tx.set_image(&below))).await.unwrap();
    let damaged = room.catalogue.write(move |tx| tx.begin_plug(uuid)).await.unwrap_err();
    assert!(damaged.code == Code::State && damaged.detail.contains("damaged"), "{damaged:?}");
    let patch = api::VdiPatch { read_only: Some(true), ..api::VdiPatch::default() };
    room.catalogue.write(move |tx| tx.patch_vdi(disk, &patch)).await.unwrap();
    assert_eq!(refused(|_| ()).await.code, Code::ReadOnly);
}

/// Queries that do not return until allowed, and the maximum number that ran at the same time.
#[derive(Default)]
struct Asked {
    now: std::sync::atomic::AtomicUsize,
    most: std::sync::atomic::AtomicUsize,
    may_end: std::sync::atomic::AtomicBool,
}

impl Asked {
    fn wait(&self) -> Result<(), Problem> {
        use std::sync::atomic::Ordering::SeqCst;
        let now = self.now.fetch_add(1, SeqCst) + 1;
        self.most.fetch_max(now, SeqCst);
        while !self.may_end.load(SeqCst) {
            std::thread::sleep(Duration::from_millis(1));
        }
        self.now.fetch_sub(1, SeqCst);
        Ok(())
    }
}

#[tokio::test]
async fn client_reads_take_turns_without_delaying_the_daemon() {
    use std::sync::atomic::Ordering::SeqCst;
    let room = room();
    let asked = Arc::new(Asked::default());
    let clients: Vec<_> = (0..100)
        .map(|_| {
            let (catalogue, asked) = (room.catalogue.clone(), asked.clone());
            tokio::spawn(async move { catalogue.read_for_client(move |_| asked.wait()).await })
        })
        .collect();
    while asked.now.load(SeqCst) < READERS_OF_CLIENTS {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    // With all readers busy, and many more waiting.
    room.catalogue.read(|view| view.srs()).await.unwrap();
    asked.may_end.store(true, SeqCst);
    for client in clients {
        client.await.unwrap().unwrap();
    }
    assert_eq!(asked.most.load(SeqCst), READERS_OF_CLIENTS);
    assert!(room.catalogue.readers.idle.lock().unwrap().len() <= READERS + READERS_OF_CLIENTS);
}

#[tokio::test]
async fn an_abandoned_read_keeps_its_turn_until_done() {
    use std::sync::atomic::Ordering::SeqCst;
    let room = room();
    let asked = Arc::new(Asked::default());
    for _ in 0..3 * READERS {
        let question = asked.clone();
        let left = room.catalogue.read(move |_| question.wait());
        assert!(tokio::time::timeout(Duration::from_millis(5), left).await.is_err());
    }
    while asked.now.load(SeqCst) < READERS {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    asked.may_end.store(true, SeqCst);
    room.catalogue.read(|view| view.srs()).await.unwrap();
    assert_eq!(asked.most.load(SeqCst), READERS);
}

#[tokio::test]
async fn vbds_are_counted_by_state_and_unfinished_tasks_in_total() {
    let room = room();
    let (_, _, disk) = room.with_vdi(1).await;
    room.catalogue
        .write(move |tx| {
            let (plugged, other) = (vbd(disk), vbd(disk));
            tx.add_vbd(&plugged)?;
            tx.add_vbd(&other)?;
            tx.begin_plug(plugged.uuid)?;
            tx.end_plug(plugged.uuid)?;
            let (open, over) = (tx.add_task(&new_task(None))?, tx.add_task(&new_task(None))?);
            assert_ne!(open.uuid, over.uuid);
            tx.end_task(over.uuid, Ok(serde_json::Value::Null))
        })
        .await
        .unwrap();
    let counted = room.catalogue.read(|view| Ok((view.count_vbds()?, view.count_open_tasks()?))).await.unwrap();
    let (vbds, tasks) = counted;
    assert_eq!((vbds.len(), tasks), (2, 1));
    assert!(vbds.contains(&(VbdState::Plugged, 1)) && vbds.contains(&(VbdState::Unplugged, 1)));
}

#[tokio::test]
async fn a_list_has_the_same_fields_as_a_single_vdi() {
    let room = room();
    let (_, _, deep) = room.with_vdi(3).await;
    let (_, _, flat) = room.with_vdi(1).await;
    let (listed, alone) = room
        .catalogue
        .write(move |tx| {
            let reader = |mode| Vbd { mode, ..vbd(flat) };
            for vbd in [vbd(deep), reader(Mode::ReadOnly), reader(Mode::ReadOnly)] {
                tx.add_vbd(&vbd)?;
                tx.begin_plug(vbd.uuid)?;
            }
            let listed = tx.vdis(None)?;
            let alone = listed.iter().map(|vdi| tx.vdi(vdi.uuid)).collect::<Result<Vec<_>, _>>()?;
            Ok((listed, alone))
        })
        .await
        .unwrap();
    assert_eq!(listed, alone);
    let mut said: Vec<(u32, usize)> = listed.iter().map(|vdi| (vdi.depth, vdi.users.len())).collect();
    said.sort_unstable();
    assert_eq!(said, [(1, 2), (3, 1)]);
}

fn token(name: &str) -> api::Token {
    let name = name.parse().unwrap();
    api::Token {
        role: api::Role::Admin,
        tag: None,
        uuid: Uuid::new_v4(),
        name,
        read_only: true,
        created: Timestamp::now(),
        expires: Some(Timestamp::now()),
    }
}

#[tokio::test]
async fn a_tokens_name_is_unique_until_it_is_removed() {
    let room = room();
    let (first, second) = (token("ci"), token("ci"));
    let add = |token: &api::Token, hash| {
        let token = token.clone();
        room.catalogue.write(move |tx| tx.add_token(&token, &hash))
    };
    let remove = |uuid| room.catalogue.write(move |tx| tx.remove_token(uuid));
    add(&first, [7; 32]).await.unwrap();
    let taken = add(&second, [8; 32]).await.unwrap_err();
    assert_eq!((taken.code, taken.field.as_deref()), (Code::Exists, Some("name")));
    assert_eq!(room.catalogue.read(|view| view.tokens()).await.unwrap(), [(first.clone(), [7; 32])]);
    remove(first.uuid).await.unwrap();
    assert_eq!(remove(first.uuid).await.unwrap_err().code, Code::NotFound);
    add(&second, [7; 32]).await.unwrap();
}

/// A catalogue as version [`FIRST`] has left it, with a VM, a disk and a token.
fn first_version(path: &Path, sr: Uuid, of: Uuid) {
    let old = Connection::open(path).unwrap();
    old.execute_batch(MIGRATIONS[0]).unwrap();
    old.pragma_update(None, "user_version", FIRST).unwrap();
    old.execute("INSERT INTO meta VALUES ('host', 'alpha')", []).unwrap();
    let (source, time) = (r#"{"type":"dir","path":"/srv"}"#, "2026-01-01T00:00:00Z");
    old.execute(
        "INSERT INTO sr VALUES (?1, 'local', '', ?2, 'attached', NULL, NULL, 0, ?3, NULL, '[]', '{}', 64, 'auto', 'auto',
         NULL, NULL)",
        (Id(sr), source, time),
    )
    .unwrap();
    old.execute("INSERT INTO image VALUES (?1, ?2, 'web', 'raw', 512, 0, NULL, 'ready', FALSE)", (Id(of), Id(sr)))
        .unwrap();
    old.execute(
        "INSERT INTO vdi VALUES (?1, ?1, 'web', 'old', FALSE, NULL, NULL, ?2, '[\"a\"]', '{}', NULL, FALSE, NULL, NULL,
         4096)",
        (Id(of), time),
    )
    .unwrap();
    old.execute(
        "INSERT INTO vm VALUES (?1, 'web', '', 'qemu', 1073741824, 2, '{\"from\":\"disk\"}', '{}', 'halted', NULL, NULL,
         NULL, NULL, NULL, ?2, NULL, '[]', '{}', NULL, NULL, NULL)",
        (Id(of), time),
    )
    .unwrap();
    old.execute(
        "INSERT INTO token VALUES (?1, 'ci', ?2, FALSE, ?3, NULL, 'operator', NULL)",
        (Id(of), [7_u8; 32], time),
    )
    .unwrap();
}

#[tokio::test]
async fn a_catalogue_of_the_version_before_is_upgraded_with_its_rows() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("catalogue.db");
    let (sr, of) = (Uuid::new_v4(), Uuid::new_v4());
    first_version(&path, sr, of);
    let mut versions = Vec::new();
    let version = |path: &Path| {
        let connection = Connection::open(path).unwrap();
        connection.pragma_query_value(None, "user_version", |row| row.get::<_, i64>(0)).unwrap()
    };
    let catalogue = Catalogue::open_with(&path, None, || versions.push(version(&path))).unwrap();
    versions.push(version(&path));
    assert_eq!(versions, [FIRST, VERSION]);
    let (vdi, vm, tokens) = catalogue
        .write(move |tx| {
            assert_eq!((tx.meta("host")?.as_deref(), tx.sr(sr)?.share_depth), (Some("alpha"), 64));
            assert!(tx.vm_shutdown(of)?.is_none());
            tx.set_vm_stopping(of, &api::VmShutdown { force: false, force_after: Some(9) })?;
            assert_eq!(tx.vm_shutdown(of)?.unwrap().force_after, Some(9));
            assert!(tx.backup_targets()?.is_empty() && tx.backup_snapshots()?.is_empty());
            Ok((tx.vdi(of)?, tx.vm(of)?, tx.tokens()?))
        })
        .await
        .unwrap();
    assert_eq!((vdi.name.as_str(), vdi.description.as_str()), ("web", "old"));
    assert_eq!(serde_json::to_value(&vdi.tags).unwrap(), serde_json::json!(["a"]));
    assert_eq!((vdi.logical_block_size, vm.vcpus), (Some(api::LogicalBlockSize::Large), 2));
    assert_eq!((tokens[0].0.role, tokens[0].1), (api::Role::Operator, [7; 32]));
}

#[test]
fn a_catalogue_of_a_version_before_0_1_is_refused_and_unchanged() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("catalogue.db");
    first_version(&path, Uuid::new_v4(), Uuid::new_v4());
    Connection::open(&path).unwrap().pragma_update(None, "user_version", FIRST - 1).unwrap();
    let before = std::fs::read(&path).unwrap();
    let refused = Catalogue::open_with(&path, None, || panic!("it was to be changed")).unwrap_err();
    assert_eq!(refused.code, Code::Unsupported);
    assert!(refused.detail.contains("before 0.1") && refused.advice.unwrap().contains("--rebuild"));
    assert_eq!(std::fs::read(&path).unwrap(), before);
    assert_eq!(backup::prepare(&path, &directory.path().join("other.db")).unwrap_err().code, Code::Unsupported);
}
