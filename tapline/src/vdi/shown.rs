//! Formats disks.

use api::{Vdi, VdiState};
use control::size::readable;
use jiff::Timestamp;

use crate::column::{Column, Uuids};
use crate::health;
use crate::label;
use crate::schedule::{backed_up, last_backup, missed};
use crate::word;

type VdiColumn = Column<Vdi>;

/// Columns of a disk.
pub const COLUMNS: &[VdiColumn] = &[
    VdiColumn::new("uuid", |vdi, uuids| uuids.show(vdi.uuid)),
    VdiColumn::new("name", |vdi, _| vdi.name.to_string()),
    VdiColumn::new("virtual", |vdi, _| readable(vdi.size)).right(),
    VdiColumn::new("used", |vdi, _| readable(vdi.physical_utilisation)).right().if_room(),
    VdiColumn::new("state", |vdi, _| state(vdi)).if_room(),
    VdiColumn::new("format", |vdi, _| vdi.format.to_string()).if_room(),
    VdiColumn::new("sr", |vdi, uuids| uuids.named(vdi.sr)).if_room(),
    VdiColumn::new("snapshot of", |vdi, uuids| vdi.snapshot_of.map(|of| uuids.named(of)).unwrap_or_default()).if_room(),
    VdiColumn::new("depth", |vdi, _| vdi.depth.to_string()).right().wide(),
    VdiColumn::new("file", |vdi, _| vdi.file.clone()).wide(),
    VdiColumn::new("used by", used_by).wide(),
    VdiColumn::new("tags", |vdi, _| label::shown(&vdi.tags)).wide(),
    VdiColumn::new("other config", |vdi, _| label::lines(&vdi.other_config)).alone(),
    VdiColumn::new("sectors", |vdi, _| match vdi.logical_block_size {
        Some(size) => format!("{size} bytes"),
        None => "the storage decides".into(),
    })
    .alone(),
    VdiColumn::new("read-only", |vdi, _| vdi.read_only.to_string()).alone(),
    VdiColumn::new("snapshot time", |vdi, _| vdi.snapshot_time.map(|at| format!("{at:.0}")).unwrap_or_default())
        .alone(),
    VdiColumn::new("keeps", |vdi, _| vdi.retention.map(|schedule| schedule.to_string()).unwrap_or_default()).alone(),
    VdiColumn::new("not kept", |vdi, _| missed(vdi.retention_problem.as_ref())).alone(),
    VdiColumn::new("backed up", |vdi, uuids| backed_up(vdi.backup_schedule.as_ref(), uuids)).alone(),
    VdiColumn::new("last backup", |vdi, _| last_backup(vdi.last_backup)).alone(),
    VdiColumn::new("not backed up", |vdi, _| missed(vdi.backup_problem.as_ref())).alone(),
    VdiColumn::new("taken by", |vdi, _| if vdi.scheduled { "its schedule".into() } else { String::new() }).alone(),
    VdiColumn::new("health", |vdi, _| health::in_words(&vdi.health, Timestamp::now())).alone(),
    VdiColumn::new("reason", |vdi, _| vdi.health.reason.clone().unwrap_or_default()).alone(),
    VdiColumn::new("advice", |vdi, _| vdi.health.advice.clone().unwrap_or_default()).alone(),
    VdiColumn::new("created", |vdi, _| format!("{:.0}", vdi.created)).alone(),
    VdiColumn::new("description", |vdi, _| vdi.description.to_string()).alone(),
];

/// The health of the disk in one word or, if it is healthy, how the disk is used.
pub fn state(vdi: &Vdi) -> String {
    let state = match (vdi.state, vdi.users.is_empty()) {
        (VdiState::Ready, false) => "in use".into(),
        (VdiState::Ready, true) if vdi.read_only => "read-only".into(),
        (other, _) => word::of(&other),
    };
    health::instead_of(state, &vdi.health)
}

fn used_by(vdi: &Vdi, uuids: Uuids) -> String {
    let users = vdi.users.iter().map(|user| format!("{} {}", word::of(&user.mode), uuids.show(user.vbd)));
    users.collect::<Vec<_>>().join(", ")
}
