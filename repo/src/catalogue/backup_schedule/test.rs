//! What became of a backup belongs to the schedule that it was made by.

use api::{BackupTarget, VmPatch};

use super::*;
use crate::catalogue::test::{room, vm};

fn target(name: &str) -> BackupTarget {
    BackupTarget {
        uuid: Uuid::new_v4(),
        name: name.parse().unwrap(),
        path: "/mnt".parse().unwrap(),
        s3: None,
        target_id: name.into(),
        key_file: None,
        created: Timestamp::now(),
    }
}

#[tokio::test]
async fn outcomes_go_with_their_target_and_a_scheduled_target_is_kept() {
    let room = room();
    let (vm, one, other) = (vm("web"), target("one"), target("other"));
    let due: Timestamp = "2026-11-30T00:00:00Z".parse().unwrap();
    let checked = room.catalogue.write(move |tx| {
        tx.add_backup_target(&one)?;
        tx.add_backup_target(&other)?;
        tx.add_vm(&vm)?;
        let daily = |target, daily| BackupSchedule { target, hourly: 0, daily, weekly: 0, monthly: 0 };
        let patch = |schedule| VmPatch { backup_schedule: Some(schedule), ..VmPatch::default() };
        let unknown = tx.patch_vm(vm.uuid, &patch(Some(daily(Uuid::new_v4(), 1)))).unwrap_err();
        assert_eq!((unknown.code, unknown.field.as_deref()), (Code::NotFound, Some("backup_schedule.target")));
        let first = daily(one.uuid, 7);
        assert_eq!(tx.patch_vm(vm.uuid, &patch(Some(first)))?.backup_schedule, Some(first));
        let why = Problem::new(Code::Failed, "it is away");
        let set =
            |tx: &mut Tx<'_>, schedule, outcome| tx.set_backup_outcome(ObjectKind::Vm, vm.uuid, schedule, &outcome);
        set(tx, &first, BackupOutcome::Made(due, None))?;
        set(tx, &first, BackupOutcome::Not(why.clone()))?;
        let state = |tx: &Tx<'_>| tx.vm(vm.uuid).map(|vm| (vm.last_backup, vm.backup_problem));
        assert_eq!(state(tx)?, (Some(due), Some(why.clone())));
        set(tx, &first, BackupOutcome::MadeLate(due))?;
        assert_eq!(state(tx)?, (Some(due), Some(why.clone())));
        // The same once more: it is still why the last one was not made.
        tx.patch_vm(vm.uuid, &patch(Some(first)))?;
        assert_eq!(state(tx)?, (Some(due), Some(why.clone())));
        // Another number, and then another target.
        let second = daily(one.uuid, 8);
        tx.patch_vm(vm.uuid, &patch(Some(second)))?;
        set(tx, &first, BackupOutcome::Not(why.clone()))?;
        assert_eq!(state(tx)?, (Some(due), None));
        assert_eq!(tx.vms_to_back_up()?.len(), 1);
        assert_eq!(tx.remove_backup_target(one.uuid).unwrap_err().code, Code::InUse);
        tx.patch_vm(vm.uuid, &patch(Some(daily(other.uuid, 8))))?;
        assert_eq!(state(tx)?, (None, None));
        tx.remove_backup_target(one.uuid)?;
        tx.patch_vm(vm.uuid, &patch(None))?;
        tx.remove_backup_target(other.uuid)
    });
    checked.await.unwrap();
}
