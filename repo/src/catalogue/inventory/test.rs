//! The file of an inventory and the lines in the catalogue together equal the catalogue's state; a catalogue updated
//! from the file equals the file.

use std::collections::VecDeque;

use api::{AbsolutePath, Code, ImageFormat, LogicalBlockSize, Sr, SrSource, SrState, VdiPatch};
use jiff::Timestamp;

use super::*;
use crate::catalogue::{Catalogue, NewVdi};
use crate::driver::Directory;
use crate::inventory::{Log, Read, read};

struct Room {
    place: tempfile::TempDir,
    catalogue: Catalogue,
    directory: Directory,
    sr: Uuid,
}

fn repository(uuid: Uuid, path: &str) -> Sr {
    Sr {
        uuid,
        name: "vms".parse().unwrap(),
        description: api::Description::default(),
        tags: Default::default(),
        other_config: Default::default(),
        source: SrSource::Dir { path: path.parse().unwrap() },
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

async fn room() -> Room {
    let place = tempfile::tempdir().unwrap();
    let path: AbsolutePath = place.path().to_str().unwrap().parse().unwrap();
    let catalogue = Catalogue::open(&place.path().join("catalogue.db")).unwrap();
    let sr = Uuid::new_v4();
    let made = move |tx: &mut Tx<'_>| {
        tx.add_sr(&repository(sr, "/srv"))?;
        tx.begin_inventory(sr)
    };
    catalogue.write(made).await.unwrap();
    Room { place, catalogue, directory: Directory::open(&path).unwrap(), sr }
}

fn image(sr: Uuid, n: u128, parent: Option<u128>) -> Image {
    let parent = parent.map(Uuid::from_u128);
    let image = Image::new(Uuid::from_u128(n), sr, ImageFormat::Qcow2, 1 << 30, parent);
    Image { file: format!("{n}.qcow2"), ..image }
}

fn vdi(n: u128, image: u128, of: Option<u128>) -> NewVdi {
    NewVdi {
        uuid: Uuid::from_u128(1000 + n),
        image: Uuid::from_u128(image),
        name: format!("disk {n}").parse().unwrap(),
        description: api::Description::default(),
        labels: api::Labels::default(),
        read_only: of.is_some(),
        snapshot: of.map(|of| (Uuid::from_u128(1000 + of), Some(Timestamp::UNIX_EPOCH))),
        scheduled: false,
        for_backup: false,
        logical_block_size: None,
    }
}

fn labels() -> (api::Tags, api::OtherConfig) {
    (serde_json::from_str(r#"["db","prod"]"#).unwrap(), serde_json::from_str(r#"{"backup":"nightly"}"#).unwrap())
}

impl Room {
    async fn write(&self, change: impl FnOnce(&mut Tx<'_>) -> Result<(), Problem> + Send + 'static) {
        self.catalogue.write(change).await.unwrap();
    }

    async fn recorded(&self) -> Recorded {
        let sr = self.sr;
        self.catalogue.read(move |view| view.inventory(sr)).await.unwrap().unwrap()
    }

    fn log(&self) -> (Log, Contents) {
        match read(&self.directory, self.sr).unwrap() {
            Read::Whole(log, contents) => (*log, *contents),
            other => panic!("{other:?}"),
        }
    }

    async fn begin_file(&self) {
        let Recorded { generation, head, contents, .. } = self.recorded().await;
        Log::write(&self.directory, self.sr, (generation, head), &contents, VecDeque::new()).unwrap();
    }

    /// Appends the stored lines to the file; whether that is recorded is optional, as if the daemon was killed then.
    async fn append(&self, noted: bool) {
        let (mut log, _) = self.log();
        log.append(&self.directory, self.sr, &self.recorded().await.lines).unwrap();
        if noted {
            self.catalogue.outbox().wrote(self.sr, Some(log.generation));
        }
    }

    /// Five changes, each in a commit of its own.
    async fn change(&self, step: usize) {
        let sr = self.sr;
        let id = |n| Uuid::from_u128(n);
        match step {
            0 => {
                let made = move |tx: &mut Tx<'_>| {
                    tx.add_image(&image(sr, 1, None))?;
                    tx.add_vdi(&vdi(1, 1, None))
                };
                self.write(made).await;
            }
            1 => {
                let snapshot = move |tx: &mut Tx<'_>| {
                    tx.add_image(&image(sr, 2, Some(1)))?;
                    tx.set_vdi_image(id(1001), id(2))?;
                    tx.add_vdi(&vdi(2, 1, Some(1)))
                };
                self.write(snapshot).await;
            }
            2 => {
                let (tags, other_config) = labels();
                let of_sr = api::SrPatch {
                    tags: Some(tags.clone()),
                    other_config: Some(other_config.clone()),
                    ..Default::default()
                };
                let patch = VdiPatch {
                    name: Some("web".parse().unwrap()),
                    tags: Some(tags),
                    other_config: Some(other_config),
                    logical_block_size: Some(LogicalBlockSize::Large),
                    ..VdiPatch::default()
                };
                let patched = move |tx: &mut Tx<'_>| {
                    tx.patch_sr(sr, &of_sr)?;
                    tx.patch_vdi(id(1001), &patch).map(drop)
                };
                self.write(patched).await;
            }
            3 => self.write(move |tx| tx.remove_vdi(id(1002))).await,
            _ => {
                let merged = move |tx: &mut Tx<'_>| {
                    tx.set_vdi_image(id(1001), id(1))?;
                    tx.remove_image(id(2))
                };
                self.write(merged).await;
            }
        }
    }
}

#[tokio::test]
async fn file_plus_outbox_equal_the_catalogue_after_any_crash() {
    // Each bit: whether the lines are appended to the file after that change, and whether that is recorded.
    for ways in (0_u32..1 << 10).step_by(31) {
        let room = room().await;
        room.begin_file().await;
        for step in 0..5 {
            room.change(step).await;
            if ways & (1 << step) != 0 {
                room.append(ways & (1 << (step + 5)) != 0).await;
            }
        }
        let lines = room.recorded().await.lines;
        assert!(lines.len() <= 5);
        // As the next daemon would: it only knows the contents of the file.
        let (mut log, _) = room.log();
        log.append(&room.directory, room.sr, &lines).unwrap();
        let (log, contents) = room.log();
        let recorded = room.recorded().await;
        assert_eq!((log.generation, &log.head), (recorded.generation, &recorded.head), "{ways:b}");
        assert_eq!(contents, recorded.contents, "{ways:b}");
    }
}

#[tokio::test]
async fn irrelevant_changes_create_no_line() {
    let room = room().await;
    room.change(0).await;
    let before = room.recorded().await;
    let sr = room.sr;
    let physical = move |tx: &mut Tx<'_>| {
        tx.set_image(&Image { physical: 77, ..image(sr, 1, None) })?;
        tx.take_lease(Uuid::from_u128(1001), Uuid::new_v4(), api::Mode::ReadOnly)?;
        tx.patch_sr(sr, &api::SrPatch { reserve: Some(4096), ..api::SrPatch::default() }).map(drop)
    };
    room.write(physical).await;
    let refused = room.catalogue.write(move |tx| {
        tx.remove_vdi(Uuid::from_u128(1001))?;
        Err::<(), _>(Problem::new(Code::Busy, "no"))
    });
    refused.await.unwrap_err();
    assert_eq!(room.recorded().await, before);
    // Changes recorded in one commit make one line.
    let both = move |tx: &mut Tx<'_>| {
        tx.add_image(&image(sr, 5, None))?;
        tx.remove_vdi(Uuid::from_u128(1001))
    };
    room.write(both).await;
    assert_eq!(room.recorded().await.generation, before.generation + 1);
}

#[tokio::test]
async fn lines_in_the_file_leave_the_outbox_with_the_next_line() {
    let room = room().await;
    room.begin_file().await;
    assert!(room.catalogue.outbox().is_behind(room.sr), "nobody has said that it is written");
    for step in 0..5 {
        room.change(step).await;
        assert_eq!(room.catalogue.outbox().behind(), [room.sr]);
        room.append(true).await;
        assert!(!room.catalogue.outbox().is_behind(room.sr));
        assert_eq!(room.recorded().await.lines.len(), 1);
    }
    let sr = room.sr;
    room.write(move |tx| tx.remove_sr(sr)).await;
    assert!(room.catalogue.outbox().behind().is_empty());
}

#[tokio::test]
async fn other_and_older_catalogues_are_updated_from_an_inventory() {
    for known in 0..=5 {
        let room = room().await;
        room.begin_file().await;
        let older = room.place.path().join("older.db");
        for step in 0..5 {
            if step == known {
                let copy = older.display().to_string();
                let from = rusqlite::Connection::open(room.place.path().join("catalogue.db")).unwrap();
                from.execute("VACUUM INTO ?1", [copy]).unwrap();
            }
            room.change(step).await;
        }
        room.append(true).await;
        let (log, contents) = room.log();
        let other = Catalogue::open(&older).unwrap();
        let sr = room.sr;
        if known == 5 {
            other.write(move |tx| tx.add_sr(&repository(sr, "/elsewhere"))).await.unwrap();
        }
        let known_head = other.read(move |view| view.inventory_head(sr)).await.unwrap();
        assert!(known_head.is_none_or(|(generation, head)| log.has_been_at(generation, &head)));
        let (head, said) = ((log.generation, log.head.clone()), contents.clone());
        let files = HashMap::from([("1.qcow2".to_owned(), 4096)]);
        let taken = move |tx: &mut Tx<'_>| tx.take_in(sr, (head.0, &head.1), &said, &files);
        other.write(taken).await.unwrap();
        let recorded = other.read(move |view| view.inventory(sr)).await.unwrap().unwrap();
        assert_eq!((recorded.generation, recorded.head, recorded.contents), (log.generation, log.head, contents));
        let disk = other.read(|view| view.vdi(Uuid::from_u128(1001))).await.unwrap();
        assert_eq!((disk.state, disk.physical_utilisation, disk.depth), (api::VdiState::Ready, 4096, 1));
    }
}

#[tokio::test]
async fn used_but_removed_vdis_are_missing_and_foreign_objects_refused() {
    let room = room().await;
    room.change(0).await;
    room.change(1).await;
    let old = room.recorded().await;
    room.change(2).await;
    let sr = room.sr;
    let empty = Contents::new(old.contents.words.clone());
    let with_vbd = move |tx: &mut Tx<'_>| {
        tx.add_vbd(&api::Vbd::unplugged(Uuid::from_u128(1001), api::Transport::Nbd))?;
        tx.take_in(sr, (9, "abc"), &empty, &HashMap::new())
    };
    let taken = room.catalogue.write(with_vbd).await.unwrap();
    assert_eq!((taken.missing, taken.removed), (vec![Uuid::from_u128(1001)], vec![Uuid::from_u128(1002)]));
    let stays = room.catalogue.read(|view| view.vdi(Uuid::from_u128(1001))).await.unwrap();
    assert_eq!((stays.state, stays.name.as_str()), (api::VdiState::Missing, "web"));
    // Append it to the file.
    let recorded = room.recorded().await;
    assert_eq!((recorded.generation, recorded.lines.len()), (10, 1));
    assert_eq!(recorded.lines.first().unwrap().before, "abc");

    let other = Uuid::new_v4();
    let copied = move |tx: &mut Tx<'_>| {
        tx.add_sr(&repository(other, "/copy"))?;
        tx.take_in(other, (3, "def"), &recorded.contents, &HashMap::new())
    };
    let refused = room.catalogue.write(copied).await.unwrap_err();
    assert_eq!(refused.code, Code::Exists);
    assert!(refused.advice.is_some());
}
