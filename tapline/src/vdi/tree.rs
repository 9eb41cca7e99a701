//! `vdi tree`: shows disks with their snapshots and clones.
//!
//! A snapshot is below its disk. A clone is below the snapshot whose image backs it, otherwise below the oldest disk
//! that shares an image with it. The images are in the repository's inventory; if that cannot be read, only snapshots
//! are below their disks. A file that shares blocks by reflink has no parent, so such a clone is a root.

use std::collections::{HashMap, HashSet};

use api::{Inventory, Problem, Sr, SrSource, SrState, Vdi};
use control::size::readable;
use serde::Serialize;
use uuid::Uuid;

use super::shown::state;
use crate::column::{Column, Names};
use crate::session::Session;

/// Arguments of `vdi tree`.
#[derive(clap::Args)]
pub struct Tree {
    /// Only this disk and what is below it: its name or UUID prefix
    vdi: Option<String>,
    /// Only the disks of this repository
    #[arg(long)]
    sr: Option<String>,
}

/// A disk, and the disks below it.
#[derive(Clone, Debug, PartialEq, Serialize)]
struct Node {
    #[serde(flatten)]
    vdi: Vdi,
    children: Vec<Node>,
}

/// A row of the table: a disk with its branch of the tree.
struct TreeRow {
    branch: String,
    vdi: Vdi,
}

type TreeColumn = Column<TreeRow>;

const COLUMNS: &[TreeColumn] = &[
    TreeColumn::new("name", |row, _| format!("{}{}", row.branch, row.vdi.name)),
    TreeColumn::new("virtual", |row, _| readable(row.vdi.size)).right(),
    TreeColumn::new("own", |row, _| readable(row.vdi.physical_utilisation)).right(),
    TreeColumn::new("created", |row, _| format!("{:.0}", row.vdi.created)).if_room(),
    TreeColumn::new("state", |row, _| state(&row.vdi)).if_room(),
    TreeColumn::new("uuid", |row, uuids| uuids.show(row.vdi.uuid)).if_room(),
    TreeColumn::new("sr", |row, uuids| uuids.named(row.vdi.sr)).if_room(),
];

/// The characters for the lines of a tree.
#[derive(Clone, Copy, Debug)]
struct LineStyle {
    child: &'static str,
    last: &'static str,
    pass: &'static str,
}

const UNICODE: LineStyle = LineStyle { child: "├─ ", last: "└─ ", pass: "│  " };
const ASCII: LineStyle = LineStyle { child: "|- ", last: "`- ", pass: "|  " };

impl Tree {
    /// Runs the verb and prints its output.
    pub async fn run(self, session: &Session) -> Result<(), Problem> {
        let sr = session.sr_if(self.sr.as_deref()).await?;
        let only = match &self.vdi {
            Some(vdi) => Some(session.client.vdi(session.vdi_in(sr, vdi).await?).await?),
            None => None,
        };
        let sr = only.as_ref().map(|vdi| vdi.sr).or(sr);
        let vdis = session.client.vdis(sr, None).await?;
        let srs = session.client.srs(None).await?;
        let mut images = Images::default();
        for sr in srs.iter().filter(|sr| has_images(sr) && vdis.iter().any(|vdi| vdi.sr == sr.uuid)) {
            // Without the inventory the tree is only flatter.
            if let Ok(inventory) = session.client.sr_inventory(sr.uuid).await {
                images.add(&inventory);
            }
        }
        let parents = images.parents(&vdis);
        let nodes = build_trees(&vdis, &parents, only.as_ref().map(|vdi| vdi.uuid));
        if session.json() {
            return session.value(&nodes);
        }
        let names: Names = srs.iter().map(|sr| (sr.uuid, sr.name.to_string())).collect();
        let variable = |name: &str| std::env::var(name).ok();
        let lines = if is_utf8(variable) { UNICODE } else { ASCII };
        let mut rows = Vec::new();
        nodes.iter().for_each(|node| draw(node, "", "", lines, &mut rows));
        session.rows(&rows, COLUMNS, &names)
    }
}

fn has_images(sr: &Sr) -> bool {
    sr.state == SrState::Attached && !matches!(sr.source, SrSource::Iso { .. })
}

/// Whether the locale's encoding is UTF-8 (locale(7)).
fn is_utf8(variable: impl Fn(&str) -> Option<String>) -> bool {
    let set = ["LC_ALL", "LC_CTYPE", "LANG"].into_iter().filter_map(variable).find(|value| !value.is_empty());
    set.is_some_and(|locale| locale.to_ascii_lowercase().replace('-', "").contains("utf8"))
}

/// The images of disks and their parents.
#[derive(Debug, Default)]
struct Images {
    parents: HashMap<Uuid, Uuid>,
    of_vdis: HashMap<Uuid, Uuid>,
}

impl Images {
    fn add(&mut self, inventory: &Inventory) {
        self.parents.extend(inventory.images.iter().filter_map(|image| Some((image.uuid, image.parent?))));
        self.of_vdis.extend(inventory.vdis.iter().map(|vdi| (vdi.uuid, vdi.image)));
    }

    /// The images below a disk's own, from the top down.
    fn below(&self, vdi: Uuid) -> Vec<Uuid> {
        let (mut below, mut at) = (Vec::new(), self.of_vdis.get(&vdi));
        while let Some(parent) = at.and_then(|image| self.parents.get(image)) {
            if below.contains(parent) {
                break;
            }
            below.push(*parent);
            at = Some(parent);
        }
        below
    }

    /// The parent of each disk in the tree.
    fn parents(&self, vdis: &[Vdi]) -> HashMap<Uuid, Uuid> {
        let by_uuid: HashMap<Uuid, &Vdi> = vdis.iter().map(|vdi| (vdi.uuid, vdi)).collect();
        let shown_by: HashMap<Uuid, &Vdi> =
            vdis.iter().filter_map(|vdi| Some((*self.of_vdis.get(&vdi.uuid)?, vdi))).collect();
        let mut oldest: HashMap<Uuid, &Vdi> = HashMap::new();
        for vdi in vdis {
            for image in self.below(vdi.uuid) {
                let known = oldest.entry(image).or_insert(vdi);
                if (vdi.created, vdi.uuid) < (known.created, known.uuid) {
                    *known = vdi;
                }
            }
        }
        let parent = |vdi: &Vdi| {
            if let Some(of) = vdi.snapshot_of.filter(|of| by_uuid.contains_key(of)) {
                return Some(of);
            }
            let is_own = |other: &Vdi| {
                other.uuid == vdi.uuid
                    || other.snapshot_of == Some(vdi.uuid)
                    || vdi.snapshot_of.is_some() && other.snapshot_of == vdi.snapshot_of
            };
            let below = self.below(vdi.uuid).into_iter();
            let mut others = below.filter_map(|image| shown_by.get(&image).or_else(|| oldest.get(&image)));
            others.find(|other| !is_own(other)).map(|other| other.uuid)
        };
        vdis.iter().filter_map(|vdi| Some((vdi.uuid, parent(vdi)?))).collect()
    }
}

/// Builds the trees of all disks, or the one of a disk. Each disk is in them once, even if the inventory is
/// inconsistent.
fn build_trees(vdis: &[Vdi], parents: &HashMap<Uuid, Uuid>, only: Option<Uuid>) -> Vec<Node> {
    let mut left: HashSet<Uuid> = vdis.iter().map(|vdi| vdi.uuid).collect();
    let roots = vdis.iter().filter(|vdi| match only {
        Some(only) => vdi.uuid == only,
        None => parents.get(&vdi.uuid).is_none_or(|parent| !left.contains(parent)),
    });
    let roots: Vec<&Vdi> = roots.collect();
    let mut nodes: Vec<Node> = roots.into_iter().filter_map(|vdi| build_tree(vdi, vdis, parents, &mut left)).collect();
    if only.is_none() {
        // Disks in a cycle have no root.
        nodes.extend(vdis.iter().filter_map(|vdi| build_tree(vdi, vdis, parents, &mut left)));
    }
    nodes
}

fn build_tree(vdi: &Vdi, vdis: &[Vdi], parents: &HashMap<Uuid, Uuid>, left: &mut HashSet<Uuid>) -> Option<Node> {
    if !left.remove(&vdi.uuid) {
        return None;
    }
    let mut below: Vec<&Vdi> = vdis.iter().filter(|other| parents.get(&other.uuid) == Some(&vdi.uuid)).collect();
    below.sort_by_key(|other| (other.snapshot_time.unwrap_or(other.created), other.uuid));
    let children = below.into_iter().filter_map(|other| build_tree(other, vdis, parents, left)).collect();
    Some(Node { vdi: vdi.clone(), children })
}

/// Adds the rows of a tree. `branch` precedes the disk itself, `indent` the disks below it.
fn draw(node: &Node, branch: &str, indent: &str, lines: LineStyle, rows: &mut Vec<TreeRow>) {
    rows.push(TreeRow { branch: branch.to_owned(), vdi: node.vdi.clone() });
    let last = node.children.len().saturating_sub(1);
    for (at, child) in node.children.iter().enumerate() {
        let (mark, pass) = if at == last { (lines.last, "   ") } else { (lines.child, lines.pass) };
        draw(child, &format!("{indent}{mark}"), &format!("{indent}{pass}"), lines, rows);
    }
}

#[cfg(test)]
mod test {
    use serde_json::json;

    use super::*;

    fn vdi(number: u128, name: &str, snapshot_of: Option<u128>) -> Vdi {
        let shown = json!({
            "uuid": Uuid::from_u128(number), "name": name, "description": "", "tags": [], "other_config": {},
            "health": { "state": "healthy" }, "sr": Uuid::nil(), "size": 512,
            "physical_utilisation": 0, "format": "qcow2", "file": "a", "depth": 1, "read_only": false,
            "snapshot_of": snapshot_of.map(Uuid::from_u128), "state": "ready", "users": [],
            "created": format!("2026-11-22T10:{number:02}:00Z"),
        });
        serde_json::from_value(shown).unwrap()
    }

    /// Images of disks, with the disk's own number unless `of_vdis` has another one.
    fn images(parents: &[(u128, u128)], of_vdis: &[(u128, u128)]) -> Images {
        let pairs = |pairs: &[(u128, u128)]| {
            pairs.iter().map(|(one, other)| (Uuid::from_u128(*one), Uuid::from_u128(*other))).collect()
        };
        Images { parents: pairs(parents), of_vdis: pairs(of_vdis) }
    }

    fn drawn(vdis: &[Vdi], images: &Images, only: Option<u128>) -> String {
        let nodes = build_trees(vdis, &images.parents(vdis), only.map(Uuid::from_u128));
        let mut rows = Vec::new();
        nodes.iter().for_each(|node| draw(node, "", "", UNICODE, &mut rows));
        rows.iter().map(|row| format!("{}{}\n", row.branch, row.vdi.name)).collect()
    }

    /// `web` has two snapshots, `copy` is a clone of the first of them, `twin` one of `web` itself.
    fn web() -> (Vec<Vdi>, Images) {
        let vdis = [
            vdi(1, "web", None),
            vdi(2, "web@1", Some(1)),
            vdi(3, "web@2", Some(1)),
            vdi(4, "copy", None),
            vdi(5, "twin", None),
            vdi(6, "data", None),
        ];
        // web@1 ◀ web@2 ◀ 13 (hidden) ◀ web.
        let parents = [(12, 11), (13, 12), (14, 13), (21, 11), (22, 13)];
        let of_vdis = [(1, 14), (2, 11), (3, 12), (4, 21), (5, 22), (6, 31)];
        (vdis.to_vec(), images(&parents, &of_vdis))
    }

    #[test]
    fn snapshots_are_below_their_disk_and_clones_below_what_they_share_data_with() {
        let (vdis, images) = web();
        let text = "web\n├─ web@1\n│  └─ copy\n├─ web@2\n└─ twin\ndata\n";
        assert_eq!(drawn(&vdis, &images, None), text);
        assert_eq!(drawn(&vdis, &images, Some(2)), "web@1\n└─ copy\n");
    }

    #[test]
    fn without_an_inventory_snapshots_are_below_their_disks() {
        let (vdis, _) = web();
        let text = "web\n├─ web@1\n└─ web@2\ncopy\ntwin\ndata\n";
        assert_eq!(drawn(&vdis, &Images::default(), None), text);
    }

    #[test]
    fn snapshots_of_a_disk_that_is_gone_are_listed_by_themselves() {
        let (vdis, images) = web();
        let vdis: Vec<Vdi> = vdis.into_iter().filter(|vdi| vdi.name.as_str().starts_with("web@")).collect();
        assert_eq!(drawn(&vdis, &images, None), "web@1\nweb@2\n");
    }

    #[test]
    fn disks_that_are_snapshots_of_each_other_are_listed_once() {
        let vdis = [vdi(1, "a", Some(2)), vdi(2, "b", Some(1)), vdi(3, "c", Some(3))];
        assert_eq!(drawn(&vdis, &images(&[(1, 2), (2, 1)], &[(1, 1), (2, 2)]), None), "a\n└─ b\nc\n");
    }

    #[test]
    fn lines_are_ascii_unless_the_locale_is_utf8() {
        let with = |set: &'static [(&str, &str)]| {
            is_utf8(|name| set.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned()))
        };
        assert!(with(&[("LANG", "de_DE.UTF-8")]) && with(&[("LC_ALL", ""), ("LC_CTYPE", "C.utf8")]));
        assert!(!with(&[]) && !with(&[("LC_ALL", "C"), ("LANG", "en_US.UTF-8")]));
    }
}
