//! Objects of the API for recorded responses.

use api::{
    About, Forecast, ImageFormat, LogicalBlockSize, Mode, ObjectKind, Space, Sr, SrSource, SrState, Task, TaskState,
    Transport, Use, Variant, Vbd, VbdState, Vdi, VdiState, Versions, Vm,
};
use serde_json::{Value, json};
use uuid::Uuid;

/// The UUID prefixes of repositories, disks, block devices, machines and tasks; a number is appended.
const SR: u128 = 0x0000_5e00 << 96;
const VDI: u128 = 0x0000_d100 << 96;
const VBD: u128 = 0x0000_bd00 << 96;
const VM: u128 = 0x0000_4a00 << 96;
const TASK: u128 = 0x0000_7a00 << 96;

/// An attached repository that is filling up.
pub fn sr(number: u128, name: &str) -> Sr {
    Sr {
        uuid: Uuid::from_u128(SR + number),
        name: name.parse().unwrap(),
        description: "for tests".parse().unwrap(),
        tags: Default::default(),
        other_config: Default::default(),
        source: SrSource::Nfs { server: "nas".into(), export: "/srv/vms".parse().unwrap(), version: None },
        state: SrState::Attached,
        health: Default::default(),
        variant: Some(Variant {
            filesystem: "nfs".into(),
            versions: Versions::Chain,
            format: ImageFormat::Qcow2,
            formats: vec![ImageFormat::Qcow2, ImageFormat::Vhd],
            read_only: false,
            path: "/run/tapline/sr/1".parse().unwrap(),
            device: Some(api::Storage { id: "nfs:nas:/srv/vms".into(), name: "nas:/srv/vms (nfs)".into() }),
            notes: vec!["the server says when it is durable".into()],
        }),
        space: Some(Space {
            physical_size: 100 << 30,
            physical_utilisation: 40 << 30,
            free: 50 << 30,
            images: 30 << 30,
            virtual_allocation: 200 << 30,
            full: false,
            forecast: Some(Forecast {
                full_at: "2027-01-31T00:00:00Z".parse().unwrap(),
                bytes_per_day: 1 << 30,
                watched_seconds: 86400,
            }),
            measured: "2026-11-22T12:00:00Z".parse().unwrap(),
        }),
        reserve: 10 << 30,
        share_depth: 128,
        split: api::SizeRule::Auto,
        merge: api::SizeRule::None,
        policy: None,
        problem: None,
        created: "2026-11-22T10:00:00Z".parse().unwrap(),
    }
}

/// A disk of 10 GiB.
pub fn vdi(number: u128, name: &str) -> Vdi {
    Vdi {
        uuid: Uuid::from_u128(VDI + number),
        name: name.parse().unwrap(),
        description: api::Description::default(),
        tags: Default::default(),
        other_config: Default::default(),
        sr: Uuid::from_u128(SR + 1),
        size: 10 << 30,
        logical_block_size: Some(LogicalBlockSize::Small),
        physical_utilisation: 1 << 20,
        format: ImageFormat::Qcow2,
        file: "a.qcow2".into(),
        depth: 1,
        read_only: false,
        snapshot_of: None,
        retention: None,
        retention_problem: None,
        backup_schedule: None,
        last_backup: None,
        backup_problem: None,
        scheduled: false,
        for_backup: false,
        cbt: None,
        snapshot_time: None,
        state: VdiState::Ready,
        health: Default::default(),
        users: vec![Use { vbd: Uuid::from_u128(VBD + 1), mode: Mode::ReadWrite }],
        created: "2026-11-22T10:00:00Z".parse().unwrap(),
    }
}

/// A plugged block device.
pub fn vbd(number: u128) -> Vbd {
    Vbd {
        uuid: Uuid::from_u128(VBD + number),
        vm: None,
        vdi: Uuid::from_u128(VDI + 1),
        position: 3,
        mode: Mode::ReadWrite,
        bootable: true,
        transport: Transport::VhostUser,
        for_nbd_address: false,
        queues: 2,
        tags: Default::default(),
        other_config: Default::default(),
        autostart: None,
        limits: None,
        share_weight: 100,
        state: VbdState::Plugged,
        socket: Some("/run/tapline/vbd/1.sock".parse().unwrap()),
        pid: Some(77),
        restarts: 0,
        waits_for_space: false,
        health: Default::default(),
        problem: None,
        created: "2026-11-22T10:00:00Z".parse().unwrap(),
    }
}

/// A halted machine.
pub fn vm(number: u128, name: &str) -> Vm {
    Vm {
        uuid: Uuid::from_u128(VM + number),
        name: name.parse().unwrap(),
        description: api::Description::default(),
        tags: Default::default(),
        other_config: Default::default(),
        driver: api::Driver::Qemu,
        memory: 1 << 30,
        vcpus: 2,
        boot: api::Boot::Disk,
        platform: [("usb".to_owned(), "true".to_owned()), ("parallel".to_owned(), "none".to_owned())].into(),
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
        created: "2026-11-22T10:00:00Z".parse().unwrap(),
    }
}

/// A task that creates the first disk.
pub fn task(number: u128, state: TaskState, progress: f64, step: Option<&str>) -> Task {
    Task {
        requester: api::Requester::User { uid: 0, name: Some("root".into()) },
        uuid: Uuid::from_u128(TASK + number),
        verb: "vdi-copy".into(),
        about: vec![About { kind: ObjectKind::Vdi, uuid: Uuid::from_u128(VDI + 1) }],
        state,
        progress,
        transfer: None,
        step: step.map(str::to_owned),
        cancellable: true,
        result: None,
        problem: None,
        created: "2026-11-22T10:00:00Z".parse().unwrap(),
        ended: None,
    }
}

/// A completed task with its result.
pub fn done(number: u128, result: impl serde::Serialize) -> Task {
    let result: Value = json!(result);
    Task { result: Some(result), ..task(number, TaskState::Done, 1.0, Some("record")) }
}
