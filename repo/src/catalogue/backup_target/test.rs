//! The record of a snapshot for a backup names each VDI that the snapshot consists of.

use super::*;
use crate::catalogue::test::room;

#[tokio::test]
async fn a_record_that_has_changed_is_kept_and_disks_are_noted_for_backups_only() {
    let room = room();
    let [of_vm, of_vdi, vm, disk, by_user] = std::array::from_fn(|_| Uuid::new_v4());
    let checked = room.catalogue.write(move |tx| {
        tx.add_backup_snapshot(of_vm, Some(vm))?;
        tx.add_backup_snapshot(of_vdi, None)?;
        let read = tx.find_backup_snapshot(of_vm)?.unwrap();
        for snapshot in [of_vm, of_vdi, by_user] {
            tx.note_backup_disks(snapshot, &[disk])?;
        }
        assert!(tx.find_backup_snapshot(by_user)?.is_none());
        assert!(tx.find_backup_snapshot(of_vdi)?.unwrap().disks.is_empty());
        assert!(!tx.forget_backup_snapshot(&read)?);
        let changed = tx.find_backup_snapshot(of_vm)?.unwrap();
        assert_eq!(changed, BackupSnapshot { snapshot: of_vm, vm: Some(vm), disks: vec![disk] });
        assert!(tx.forget_backup_snapshot(&changed)? && tx.forget_backup_snapshot(&changed)?);
        assert_eq!(tx.backup_snapshots()?.len(), 1);
        Ok(())
    });
    checked.await.unwrap();
}
