//! The maps of changed blocks of VDIs that are snapshotted, reverted and removed.

use jiff::Timestamp;

use super::*;
use crate::catalogue::NewVdi;
use crate::catalogue::test::{Room, image, room, sr, vdi};

/// A VDI in a repository, whose changes are recorded in a first map.
async fn tracked(room: &Room) -> (Uuid, Uuid) {
    let sr = sr();
    let image = image(sr.uuid, None);
    let (uuid, new) = (sr.uuid, vdi(&image));
    let vdi = new.uuid;
    let made = room.catalogue.write(move |tx| {
        tx.add_sr(&sr)?;
        tx.add_image(&image)?;
        tx.add_vdi(&new)?;
        tx.change_tracking(vdi, |tracking| {
            tracking.enabled = true;
            tracking.begin(Uuid::from_u128(1), Timestamp::UNIX_EPOCH);
        })
    });
    made.await.unwrap();
    (uuid, vdi)
}

/// Takes a snapshot, at which the map of this number begins.
async fn snapshot(room: &Room, sr: Uuid, of: Uuid, map: u128) -> Uuid {
    let image = image(sr, None);
    let new = NewVdi { name: format!("at-{map}").parse().unwrap(), snapshot: Some((of, None)), ..vdi(&image) };
    let uuid = new.uuid;
    let made = room.catalogue.write(move |tx| {
        tx.add_image(&image)?;
        tx.add_vdi(&new)?;
        tx.change_tracking(of, |tracking| tracking.switch(Uuid::from_u128(map), Timestamp::UNIX_EPOCH))?;
        tx.give_maps_to_snapshot(of, uuid)
    });
    made.await.unwrap();
    uuid
}

async fn maps(room: &Room, vdi: Uuid) -> (Vec<u128>, Vec<u128>) {
    let found = room.catalogue.read(move |view| view.vdi(vdi)).await.unwrap().cbt.unwrap_or_default();
    let maps = found.maps.iter().map(|map| map.uuid.as_u128()).collect();
    (maps, found.unneeded.iter().map(|map| map.as_u128()).collect())
}

#[tokio::test]
async fn a_removed_snapshot_leaves_its_maps_while_an_earlier_one_is_there() {
    let room = room();
    let (sr, vdi) = tracked(&room).await;
    let first = snapshot(&room, sr, vdi, 2).await;
    let second = snapshot(&room, sr, vdi, 3).await;
    let third = snapshot(&room, sr, vdi, 4).await;
    assert_eq!(maps(&room, third).await, (vec![3], vec![]));
    room.catalogue.write(move |tx| tx.remove_vdi(second)).await.unwrap();
    assert_eq!(maps(&room, third).await, (vec![2, 3], vec![]));
    room.catalogue.write(move |tx| tx.remove_vdi(third)).await.unwrap();
    assert_eq!(maps(&room, vdi).await, (vec![2, 3, 4], vec![]));
    assert!(room.catalogue.read(move |view| view.is_map_needed(sr, Uuid::from_u128(2))).await.unwrap());
    // Nobody can ask for changes since a time before the only state.
    room.catalogue.write(move |tx| tx.remove_vdi(first)).await.unwrap();
    assert_eq!(maps(&room, vdi).await, (vec![4], vec![2, 3]));
    assert!(!room.catalogue.read(move |view| view.is_map_needed(sr, Uuid::from_u128(2))).await.unwrap());
}

#[tokio::test]
async fn a_removed_disk_takes_no_map_of_its_snapshots() {
    let room = room();
    let (sr, vdi) = tracked(&room).await;
    let first = snapshot(&room, sr, vdi, 2).await;
    let second = snapshot(&room, sr, vdi, 3).await;
    room.catalogue.write(move |tx| tx.remove_vdi(vdi)).await.unwrap();
    assert_eq!((maps(&room, first).await.0, maps(&room, second).await.0), (vec![1], vec![2]));
    let contents = room.catalogue.read(move |view| view.contents(sr)).await.unwrap();
    assert_eq!(contents.vdis[&second].cbt.as_ref().unwrap().maps[0].continues, Some(Uuid::from_u128(1)));
}
