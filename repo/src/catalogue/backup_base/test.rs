//! Bases that follow each other, and what is to be destroyed then.

use jiff::Timestamp;

use super::*;
use crate::catalogue::test::{Room, image, room, sr, vdi};
use crate::catalogue::{BackupSnapshot, NewVdi};

/// A tracked VDI, and two snapshots of it that end maps.
async fn tracked(room: &Room) -> (Uuid, [Uuid; 2]) {
    let sr = sr();
    let own = image(sr.uuid, None);
    let (repository, new) = (sr.uuid, vdi(&own));
    let disk = new.uuid;
    let made = room.catalogue.write(move |tx| {
        tx.add_sr(&sr)?;
        tx.add_image(&own)?;
        tx.add_vdi(&new)?;
        tx.change_tracking(disk, |tracking| {
            tracking.enabled = true;
            tracking.begin(Uuid::from_u128(1), Timestamp::UNIX_EPOCH);
        })
    });
    made.await.unwrap();
    let mut snapshots = [Uuid::nil(); 2];
    for (nth, slot) in snapshots.iter_mut().enumerate() {
        let image = image(repository, None);
        let at = Timestamp::from_second(100 + i64::try_from(nth).unwrap()).unwrap();
        let name = format!("at-{nth}").parse().unwrap();
        let new = NewVdi { name, snapshot: Some((disk, Some(at))), read_only: true, ..vdi(&image) };
        *slot = new.uuid;
        let made = room.catalogue.write(move |tx| {
            tx.add_image(&image)?;
            tx.add_vdi(&new)?;
            tx.change_tracking(disk, |tracking| tracking.switch(Uuid::from_u128(10 + nth as u128), at))?;
            tx.give_maps_to_snapshot(disk, new.uuid)
        });
        made.await.unwrap();
    }
    (disk, snapshots)
}

fn base(target: u128) -> BackupBase {
    let backup = "0123456789abcdef0123456789abcdef".parse().unwrap();
    BackupBase { target: Uuid::from_u128(target), backup, content: "00".repeat(32) }
}

#[tokio::test]
async fn a_base_takes_the_place_of_the_one_before_in_one_commit() {
    let room = room();
    let (disk, [first, second]) = tracked(&room).await;
    let set = |snapshot, target| room.catalogue.write(move |tx| tx.set_backup_base(snapshot, &base(target)));
    assert_eq!(set(first, 1).await.unwrap(), Vec::<Uuid>::new());
    // Of another target.
    assert_eq!(set(second, 2).await.unwrap(), Vec::<Uuid>::new());
    let bases = room.catalogue.read(move |view| view.backup_bases(Some(disk))).await.unwrap();
    assert_eq!(bases.iter().map(|base| base.snapshot).collect::<Vec<_>>(), [second, first]);
    assert_eq!(set(second, 1).await.unwrap(), vec![first]);
    let (bases, recorded) =
        room.catalogue.read(|view| Ok((view.backup_bases(None)?, view.backup_snapshots()?))).await.unwrap();
    assert_eq!(bases, [KeptBase { snapshot: second, disk, base: base(1) }]);
    assert_eq!(recorded, [BackupSnapshot { snapshot: first, vm: None, disks: vec![] }]);
    assert_eq!(set(disk, 1).await.unwrap_err().code, Code::State);
    room.catalogue.write(move |tx| tx.change_tracking(disk, |tracking| tracking.enabled = false)).await.unwrap();
    assert_eq!(set(first, 1).await.unwrap_err().code, Code::State);
}

#[tokio::test]
async fn only_bases_without_data_are_of_no_use_without_their_target() {
    let room = room();
    let (_, [first, second]) = tracked(&room).await;
    let useless = || room.catalogue.read(|view| view.useless_backup_bases());
    room.catalogue.write(move |tx| tx.set_backup_base(first, &base(1))).await.unwrap();
    room.catalogue.write(move |tx| tx.set_backup_base(second, &base(2))).await.unwrap();
    assert_eq!(useless().await.unwrap(), Vec::<Uuid>::new());
    room.catalogue.write(move |tx| tx.remove_data(first, Uuid::from_u128(99))).await.unwrap();
    assert_eq!(useless().await.unwrap(), vec![first]);
    let shown = room.catalogue.read(move |view| view.vdi(first)).await.unwrap();
    assert_eq!((shown.state, shown.cbt.unwrap().maps.len()), (VdiState::NoData, 1));
}
