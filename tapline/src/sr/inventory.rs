//! `tapline sr inventory`: a repository's own inventory file.

use api::{Inventory, InventoryVdi, Problem, SrProbe, SrSource};
use control::size::readable;

use crate::column::{Column, Layout, table};
use crate::session::{Session, print};
use crate::word;

type InventoryColumn = Column<InventoryRow>;

/// A row: a VDI with its image, or an image without a VDI.
struct InventoryRow {
    vdi: Option<InventoryVdi>,
    image: api::InventoryImage,
    parent: Option<String>,
}

const COLUMNS: &[InventoryColumn] = &[
    InventoryColumn::new("uuid", |line, uuids| line.vdi.as_ref().map(|vdi| uuids.show(vdi.uuid)).unwrap_or_default()),
    InventoryColumn::new("name", |line, _| line.vdi.as_ref().map_or_else(hidden, |vdi| vdi.name.to_string())),
    InventoryColumn::new("size", |line, _| readable(line.image.size)).right(),
    InventoryColumn::new("read-only", |line, _| {
        line.vdi.as_ref().map(|vdi| vdi.read_only.to_string()).unwrap_or_default()
    }),
    InventoryColumn::new("snapshot-of", |line, uuids| {
        let of = line.vdi.as_ref().and_then(|vdi| vdi.snapshot_of);
        of.map(|of| uuids.show(of)).unwrap_or_default()
    }),
    InventoryColumn::new("file", |line, _| line.image.file.clone()),
    InventoryColumn::new("parent", |line, _| line.parent.clone().unwrap_or_default()),
];

fn hidden() -> String {
    "(backs other images)".into()
}

/// Shows the inventory of an attached repository or of a directory.
pub async fn show(session: &Session, which: &str) -> Result<(), Problem> {
    let inventory = if which.contains('/') {
        let path = word::path(which).map_err(|why| Problem::failed("parse the directory's path", why))?;
        let source = SrSource::Dir { path: session.path(path)? };
        session.client.sr_inventory_at(&SrProbe { source }).await?
    } else {
        session.client.sr_inventory(session.sr(which).await?).await?
    };
    if session.json() {
        return session.value(&inventory);
    }
    let Inventory { sr, name, generation, images, vdis, .. } = inventory;
    print(&api::visible(&format!("sr '{name}' ({sr}), generation {generation}\n")))?;
    let file_of = |uuid| images.iter().find(|image| image.uuid == uuid).map(|image| image.file.clone());
    let mut lines: Vec<InventoryRow> = images
        .iter()
        .map(|image| InventoryRow {
            vdi: vdis.iter().find(|vdi| vdi.image == image.uuid).cloned(),
            image: image.clone(),
            parent: image.parent.and_then(file_of),
        })
        .collect();
    // Images without a VDI come last.
    lines.sort_by_key(|line| (line.vdi.is_none(), line.vdi.as_ref().map(|vdi| vdi.name.clone())));
    print(&table(&lines, COLUMNS, &Layout { wide: true, ..Layout::default() })?)
}
