//! Snapshots of VMs belong to their VM, and a guest is held only while there is one.

use jiff::Timestamp;

use super::*;
use crate::catalogue::Among;
use crate::catalogue::test::{room, vm};

#[tokio::test]
async fn a_vm_takes_its_snapshots_with_it_and_a_halted_one_is_not_held() {
    let room = room();
    let (one, other) = (vm("web"), vm("db"));
    let (vm, id) = (one.uuid, Uuid::new_v4());
    let hardware = api::VmHardware {
        driver: one.driver,
        memory: one.memory,
        vcpus: one.vcpus,
        boot: one.boot.clone(),
        platform: Default::default(),
    };
    let snapshot = api::VmSnapshot {
        uuid: id,
        vm,
        name: "before".parse().unwrap(),
        description: Default::default(),
        created: Timestamp::now(),
        hardware,
        disks: Vec::new(),
        scheduled: false,
    };
    let (kept, among) = (snapshot.clone(), Among::VmSnapshots(vm));
    let name: api::Name = "before".parse().unwrap();
    let made = room.catalogue.write(move |tx| {
        tx.add_vm(&one)?;
        tx.add_vm(&other)?;
        tx.add_vm_snapshot(&snapshot)?;
        assert!(!tx.is_name_free(among, &name)? && tx.is_name_free(Among::VmSnapshots(other.uuid), &name)?);
        assert_eq!(tx.vm_snapshot(other.uuid, id).unwrap_err().code, Code::NotFound);
        assert_eq!(tx.check_uuid_free(id).unwrap_err().code, Code::Exists);
        tx.set_vm_power(vm, api::Power::Running, None)?;
        tx.set_vm_held(vm, Some(id))
    });
    made.await.unwrap();
    let seen = room.catalogue.read(move |view| Ok((view.vm_snapshots(Some(vm))?, view.vm_held(vm)?))).await.unwrap();
    assert_eq!(seen, (vec![kept], Some(id)));
    room.catalogue.write(move |tx| tx.set_vm_power(vm, api::Power::Paused, None)).await.unwrap();
    assert_eq!(room.catalogue.read(move |view| view.vm_held(vm)).await.unwrap(), Some(id));
    room.catalogue.write(move |tx| tx.set_vm_power(vm, api::Power::Halted, None)).await.unwrap();
    assert_eq!(room.catalogue.read(move |view| view.vm_held(vm)).await.unwrap(), None);
    room.catalogue.write(move |tx| tx.remove_vm(vm)).await.unwrap();
    assert_eq!(room.catalogue.read(move |view| view.vm_snapshots(None)).await.unwrap(), []);
}
