//! How a disk is shown.

use api::{Vdi, VdiState};
use control::size::readable;
use jiff::Timestamp;

use crate::column::{Column, Uuids};
use crate::health;
use crate::label;
use crate::schedule::why_none_is_taken;
use crate::word;

type Shown = Column<Vdi>;

/// Columns of a disk.
pub const COLUMNS: &[Shown] = &[
    Shown::new("uuid", |vdi, uuids| uuids.show(vdi.uuid)),
    Shown::new("name", |vdi, _| vdi.name.to_string()),
    Shown::new("virtual", |vdi, _| readable(vdi.size)).right(),
    Shown::new("used", |vdi, _| readable(vdi.physical_utilisation)).right().if_room(),
    Shown::new("state", |vdi, _| state(vdi)).if_room(),
    Shown::new("format", |vdi, _| vdi.format.to_string()).if_room(),
    Shown::new("sr", |vdi, uuids| uuids.named(vdi.sr)).if_room(),
    Shown::new("snapshot of", |vdi, uuids| vdi.snapshot_of.map(|of| uuids.named(of)).unwrap_or_default()).if_room(),
    Shown::new("depth", |vdi, _| vdi.depth.to_string()).right().wide(),
    Shown::new("file", |vdi, _| vdi.file.clone()).wide(),
    Shown::new("used by", used_by).wide(),
    Shown::new("tags", |vdi, _| label::shown(&vdi.tags)).wide(),
    Shown::new("other config", |vdi, _| label::lines(&vdi.other_config)).alone(),
    Shown::new("sectors", |vdi, _| match vdi.logical_block_size {
        Some(size) => format!("{size} bytes"),
        None => "the storage decides".into(),
    })
    .alone(),
    Shown::new("read-only", |vdi, _| vdi.read_only.to_string()).alone(),
    Shown::new("snapshot time", |vdi, _| vdi.snapshot_time.map(|at| format!("{at:.0}")).unwrap_or_default()).alone(),
    Shown::new("keeps", |vdi, _| vdi.retention.map(|schedule| schedule.to_string()).unwrap_or_default()).alone(),
    Shown::new("not kept", |vdi, _| why_none_is_taken(vdi.retention_problem.as_ref())).alone(),
    Shown::new("taken by", |vdi, _| if vdi.scheduled { "its schedule".into() } else { String::new() }).alone(),
    Shown::new("health", |vdi, _| health::in_words(&vdi.health, Timestamp::now())).alone(),
    Shown::new("reason", |vdi, _| vdi.health.reason.clone().unwrap_or_default()).alone(),
    Shown::new("advice", |vdi, _| vdi.health.advice.clone().unwrap_or_default()).alone(),
    Shown::new("created", |vdi, _| format!("{:.0}", vdi.created)).alone(),
    Shown::new("description", |vdi, _| vdi.description.to_string()).alone(),
];

/// One word: the health of the disk, or if that is good, how it is used.
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
