//! Virtual disks.

use std::collections::HashMap;

use api::{Change, Code, Health, Labels, LogicalBlockSize, ObjectKind, Problem, Use, Vdi, VdiPatch};
use jiff::Timestamp;
use rusqlite::{Row, named_params};
use uuid::Uuid;

use super::image::ImageState;
use super::name::Among;
use super::row::{Block, Id, Json, Time, Word, labels, text};
use super::{Tx, View, not_found};

/// The columns of every VDI, and their tables.
const COLUMNS: &str =
    "vdi.*, image.sr, image.size, image.physical, image.format, image.file, image.state AS image_state";
const FROM: &str = "vdi JOIN image ON vdi.image = image.uuid";

/// Further columns of single VDIs: in a long list they would take most of the time, row by row, and are computed
/// differently there. `depth` walks down the chain, which is short.
const OF_FEW: &str = "
    (WITH RECURSIVE below (link, depth) AS (
         SELECT image.uuid, 1
         UNION ALL
         SELECT lower.parent, depth + 1 FROM below JOIN image AS lower ON lower.uuid = below.link
         WHERE lower.parent IS NOT NULL AND depth < 4096
     ) SELECT max(depth) FROM below) AS depth,
    (SELECT json_group_array(json_object('vbd', holder, 'mode', mode)) FROM lease
     WHERE lease.vdi = vdi.uuid AND holder IN (SELECT uuid FROM vbd)) AS users";

/// Longer than any chain.
const DEPTH_MAX: u32 = 4096;

fn of_row(row: &Row<'_>) -> rusqlite::Result<Vdi> {
    with(row, row.get("depth")?, row.get::<_, Json<Vec<Use>>>("users")?.0)
}

fn with(row: &Row<'_>, depth: u32, users: Vec<Use>) -> rusqlite::Result<Vdi> {
    let Labels { tags, other_config } = labels(row)?;
    Ok(Vdi {
        uuid: row.get::<_, Id>("uuid")?.0,
        name: text(row, "name")?,
        description: text(row, "description")?,
        tags,
        other_config,
        sr: row.get::<_, Id>("sr")?.0,
        size: row.get("size")?,
        logical_block_size: row.get::<_, Option<Block>>("logical_block_size")?.map(|size| size.0),
        physical_utilisation: row.get("physical")?,
        format: row.get::<_, Word<_>>("format")?.0,
        file: row.get("file")?,
        depth,
        read_only: row.get("read_only")?,
        snapshot_of: row.get::<_, Option<Id>>("snapshot_of")?.map(|id| id.0),
        snapshot_time: row.get::<_, Option<Time>>("snapshot_time")?.map(|time| time.0),
        retention: row.get::<_, Option<Json<_>>>("retention")?.map(|json| json.0),
        retention_problem: row.get::<_, Option<Json<_>>>("retention_problem")?.map(|json| json.0),
        backup_schedule: row.get::<_, Option<Json<_>>>("backup_schedule")?.map(|json| json.0),
        last_backup: row.get::<_, Option<Time>>("last_backup")?.map(|time| time.0),
        backup_problem: row.get::<_, Option<Json<_>>>("backup_problem")?.map(|json| json.0),
        scheduled: row.get("scheduled")?,
        for_backup: row.get("for_backup")?,
        cbt: row.get::<_, Option<Json<_>>>("cbt")?.map(|json| json.0),
        state: row.get::<_, Word<ImageState>>("image_state")?.0.shown(),
        health: Health::healthy(),
        users,
        created: row.get::<_, Time>("created")?.0,
    })
}

/// Images that a VDI consists of whose own is `image`.
fn depth(image: Uuid, parents: &HashMap<Uuid, Uuid>) -> u32 {
    let (mut depth, mut at) = (1, image);
    while let Some(parent) = parents.get(&at).filter(|_| depth < DEPTH_MAX) {
        (depth, at) = (depth.saturating_add(1), *parent);
    }
    depth
}

/// A VDI that is to be.
#[derive(Clone, Debug)]
pub struct NewVdi {
    /// Its identity.
    pub uuid: Uuid,
    /// The image it shows.
    pub image: Uuid,
    /// Its name.
    pub name: api::Name,
    /// Its description.
    pub description: api::Description,
    /// Its tags, and what programs keep with it.
    pub labels: Labels,
    /// Whether it may only be read.
    pub read_only: bool,
    /// The size of the sectors that its guest addresses; `None` if its storage decides.
    pub logical_block_size: Option<LogicalBlockSize>,
    /// The VDI whose state it keeps, and the moment of that state if that is known.
    pub snapshot: Option<(Uuid, Option<Timestamp>)>,
    /// Whether it is taken by the schedule of its VDI.
    pub scheduled: bool,
    /// Whether it is taken for a backup.
    pub for_backup: bool,
}

impl View<'_> {
    /// All VDIs, or those of one repository, by name.
    pub fn vdis(&self, sr: Option<Uuid>) -> Result<Vec<Vdi>, Problem> {
        let sql = format!("SELECT {COLUMNS} FROM {FROM} WHERE ?1 IS NULL OR image.sr = ?1 ORDER BY vdi.name, vdi.uuid");
        let (parents, mut users) = (self.parents()?, self.users()?);
        let vdis = self.rows(&sql, [sr.map(Id)], |row| {
            let users = users.remove(&row.get::<_, Id>("uuid")?.0).unwrap_or_default();
            with(row, depth(row.get::<_, Id>("image")?.0, &parents), users)
        })?;
        self.with_health(vdis)
    }

    /// The images with parents, and their parents.
    fn parents(&self) -> Result<HashMap<Uuid, Uuid>, Problem> {
        let sql = "SELECT uuid, parent FROM image WHERE parent IS NOT NULL";
        let pairs = self.rows(sql, [], |row| Ok((row.get::<_, Id>(0)?.0, row.get::<_, Id>(1)?.0)))?;
        Ok(pairs.into_iter().collect())
    }

    /// The VBDs that use VDIs.
    fn users(&self) -> Result<HashMap<Uuid, Vec<Use>>, Problem> {
        let sql = "SELECT vdi, holder, mode FROM lease WHERE holder IN (SELECT uuid FROM vbd) ORDER BY vdi, holder";
        let all = self.rows(sql, [], |row| {
            Ok((row.get::<_, Id>(0)?.0, Use { vbd: row.get::<_, Id>(1)?.0, mode: row.get::<_, Word<_>>(2)?.0 }))
        })?;
        let mut users: HashMap<Uuid, Vec<Use>> = HashMap::new();
        for (vdi, user) in all {
            users.entry(vdi).or_default().push(user);
        }
        Ok(users)
    }

    /// A VDI, if there is one.
    pub fn find_vdi(&self, uuid: Uuid) -> Result<Option<Vdi>, Problem> {
        let sql = format!("SELECT {COLUMNS}, {OF_FEW} FROM {FROM} WHERE vdi.uuid = ?1");
        let Some(mut vdi) = self.row(&sql, [Id(uuid)], of_row)? else { return Ok(None) };
        let users = self.vbds(None, Some(uuid))?;
        vdi.health = self.event_bus.health().of_vdi(&vdi, users.iter().map(|vbd| &vbd.health));
        Ok(Some(vdi))
    }

    fn with_health(&self, mut vdis: Vec<Vdi>) -> Result<Vec<Vdi>, Problem> {
        let of_users = self.health_of_users()?;
        for vdi in &mut vdis {
            vdi.health = self.event_bus.health().of_vdi(vdi, of_users.get(&vdi.uuid));
        }
        Ok(vdis)
    }

    /// A VDI; an error if there is none with this UUID.
    pub fn vdi(&self, uuid: Uuid) -> Result<Vdi, Problem> {
        self.find_vdi(uuid)?.ok_or_else(|| not_found(ObjectKind::Vdi, uuid))
    }

    /// The VDIs that keep states of a VDI, the oldest first.
    pub fn snapshots_of(&self, vdi: Uuid) -> Result<Vec<Vdi>, Problem> {
        let order = "ORDER BY snapshot_time, vdi.uuid";
        let sql = format!("SELECT {COLUMNS}, {OF_FEW} FROM {FROM} WHERE snapshot_of = ?1 {order}");
        self.with_health(self.rows(&sql, [Id(vdi)], of_row)?)
    }

    /// The VDIs that have a schedule of snapshots.
    pub fn scheduled_vdis(&self) -> Result<Vec<Vdi>, Problem> {
        let sql = format!("SELECT {COLUMNS}, {OF_FEW} FROM {FROM} WHERE vdi.retention IS NOT NULL ORDER BY vdi.uuid");
        self.with_health(self.rows(&sql, [], of_row)?)
    }

    /// The VDIs that have a schedule of backups.
    pub fn vdis_to_back_up(&self) -> Result<Vec<Vdi>, Problem> {
        let of = "WHERE vdi.backup_schedule IS NOT NULL ORDER BY vdi.uuid";
        self.with_health(self.rows(&format!("SELECT {COLUMNS}, {OF_FEW} FROM {FROM} {of}"), [], of_row)?)
    }

    /// Until when the schedule of a VDI destroys nothing, if that was recorded.
    pub fn retention_rests(&self, vdi: Uuid) -> Result<Option<Timestamp>, Problem> {
        let sql = "SELECT retention_rests FROM vdi WHERE uuid = ?1 AND retention_rests IS NOT NULL";
        self.row(sql, [Id(vdi)], |row| Ok(row.get::<_, Time>(0)?.0))
    }

    /// Refuses to have a snapshot stay that belongs to one of its VM, with which it goes.
    fn check_kept_by_vm(&self, uuid: Uuid, patch: &VdiPatch) -> Result<(), Problem> {
        if patch.scheduled.is_none() {
            return Ok(());
        }
        let Some(whole) = self.vm_snapshot_with(uuid)?.filter(|whole| whole.scheduled) else { return Ok(()) };
        let what = format!("VDI {uuid} is in the snapshot '{}' that a schedule took of VM {}", whole.name, whole.vm);
        let advice = format!("pin that one: tapline vm pin {} --snapshot {}", whole.vm, whole.uuid);
        Err(Problem::new(Code::State, what).field("scheduled").advise(advice))
    }

    /// The logical block size of the VDIs whose chains have the same lowest image as `image`, if one of them has one:
    /// the state of one disk, at different times.
    pub fn block_size_of_relatives(&self, image: Uuid) -> Result<Option<LogicalBlockSize>, Problem> {
        let Some(lowest) = self.chain_of_image(image)?.pop() else { return Ok(None) };
        for vdi in self.vdis_above(lowest.uuid)? {
            if let Some(found) = self.vdi(vdi)?.logical_block_size {
                return Ok(Some(found));
            }
        }
        Ok(None)
    }

    /// The image that a VDI shows.
    pub fn vdi_image(&self, uuid: Uuid) -> Result<Uuid, Problem> {
        let found = self.row("SELECT image FROM vdi WHERE uuid = ?1", [Id(uuid)], |row| Ok(row.get::<_, Id>(0)?.0))?;
        found.ok_or_else(|| not_found(ObjectKind::Vdi, uuid))
    }
}

/// Refuses a schedule that would have nothing to do, and a mark that only the schedule gives.
fn check_schedule(vdi: &Vdi, patch: &VdiPatch) -> Result<(), Problem> {
    let uuid = vdi.uuid;
    let scheduled = [
        ("retention", "snapshots", patch.retention.unwrap_or(vdi.retention).is_some()),
        ("backup_schedule", "backups", patch.backup_schedule.unwrap_or(vdi.backup_schedule).is_some()),
    ];
    let is_read_only = patch.read_only.unwrap_or(vdi.read_only);
    if let Some((field, made, _)) = scheduled.into_iter().find(|(_, _, is_set)| *is_set && is_read_only) {
        let what = format!("VDI {uuid} cannot be read-only and have a schedule of {made}: it has one state then");
        let advice = "end its schedule, or set one on the VDI that is written";
        return Err(Problem::new(Code::State, what).field(field).advise(advice));
    }
    if patch.scheduled == Some(true) && !vdi.scheduled {
        let what = format!("VDI {uuid} was not taken by a schedule");
        return Err(Problem::new(Code::State, what)
            .field("scheduled")
            .advise("destroy it when it is not needed any more"));
    }
    Ok(())
}

/// Refuses a logical block size that a running guest would not see, or that does not divide the disk.
fn check_block_size(vdi: &Vdi, patch: &VdiPatch) -> Result<(), Problem> {
    let Some(wanted) = patch.logical_block_size.filter(|wanted| Some(*wanted) != vdi.logical_block_size) else {
        return Ok(());
    };
    if !vdi.users.is_empty() {
        let what = format!("the logical block size of VDI {} cannot change while it is plugged", vdi.uuid);
        return Err(Problem::new(Code::InUse, what).field("logical_block_size").advise("unplug it first"));
    }
    must_divide(wanted, vdi.size).map_err(|problem| problem.field("logical_block_size"))
}

/// Refuses a disk that has a part of a sector at its end.
pub fn must_divide(block: LogicalBlockSize, size: u64) -> Result<(), Problem> {
    if size % u64::from(u32::from(block)) == 0 {
        return Ok(());
    }
    let what =
        format!("a disk of {size} bytes cannot have sectors of {block} bytes: its size must be a multiple of that");
    Err(Problem::new(Code::Invalid, what).advise("use a multiple of 4096 for the size, or 512 as logical block size"))
}

impl Tx<'_> {
    /// Adds a VDI of an image. Its name was checked when it was chosen ([`super::name`]).
    pub fn add_vdi(&mut self, vdi: &NewVdi) -> Result<(), Problem> {
        self.execute(
            "INSERT INTO vdi VALUES
             (:uuid, :image, :name, :description, :read_only, :snapshot_of, :snapshot_time, :created,
              :tags, :other_config, NULL, :scheduled, NULL, NULL, :logical_block_size, NULL, :for_backup,
              NULL, NULL, NULL)",
            named_params! {
                ":uuid": Id(vdi.uuid), ":image": Id(vdi.image), ":name": vdi.name.as_str(),
                ":description": vdi.description.as_str(), ":read_only": vdi.read_only,
                ":snapshot_of": vdi.snapshot.map(|(of, _)| Id(of)), ":snapshot_time": vdi.snapshot.and_then(|(_, at)| at).map(Time),
                ":created": Time(Timestamp::now()),
                ":tags": Json(&vdi.labels.tags), ":other_config": Json(&vdi.labels.other_config),
                ":scheduled": vdi.scheduled, ":logical_block_size": vdi.logical_block_size.map(Block),
                ":for_backup": vdi.for_backup,
            },
        )?;
        self.touch(ObjectKind::Vdi, vdi.uuid, Change::Added);
        self.note_vdi(vdi.uuid)
    }

    /// Changes what people say of a VDI, and whether it may be written.
    pub fn patch_vdi(&mut self, uuid: Uuid, patch: &VdiPatch) -> Result<Vdi, Problem> {
        let mut vdi = self.vdi(uuid)?;
        if patch.read_only.is_some_and(|wanted| wanted != vdi.read_only) {
            if !vdi.users.is_empty() {
                let what = format!("VDI {uuid} cannot change between read-only and writable while it is plugged");
                return Err(Problem::new(Code::InUse, what).field("read_only").advise("unplug it first"));
            }
            if vdi.snapshot_of.is_some() {
                let what = format!("VDI {uuid} is a snapshot and cannot be written");
                return Err(Problem::new(Code::State, what)
                    .field("read_only")
                    .advise("clone it and write to the clone"));
            }
            if patch.read_only == Some(false) && !self.children(self.vdi_image(uuid)?)?.is_empty() {
                let what = format!("the image of VDI {uuid} backs other images; writing to it would change them");
                return Err(Problem::new(Code::InUse, what)
                    .field("read_only")
                    .advise("clone it and write to the clone"));
            }
        }
        check_schedule(&vdi, patch)?;
        check_block_size(&vdi, patch)?;
        self.check_kept_by_vm(uuid, patch)?;
        if let Some(name) = patch.name.as_ref().filter(|name| **name != vdi.name) {
            self.check_name_free(Among::Vdis(vdi.sr), name, &format!("rename VDI {uuid} to '{name}'"))?;
        }
        vdi.name = patch.name.clone().unwrap_or(vdi.name);
        vdi.description = patch.description.clone().unwrap_or(vdi.description);
        vdi.tags = patch.tags.clone().unwrap_or(vdi.tags);
        vdi.other_config = patch.other_config.clone().unwrap_or(vdi.other_config);
        vdi.read_only = patch.read_only.unwrap_or(vdi.read_only);
        vdi.logical_block_size = patch.logical_block_size.or(vdi.logical_block_size);
        vdi.retention = patch.retention.unwrap_or(vdi.retention);
        vdi.scheduled = patch.scheduled.unwrap_or(vdi.scheduled);
        self.execute(
            "UPDATE vdi SET name = :name, description = :description, read_only = :read_only, tags = :tags,
             other_config = :other_config, retention = :retention, scheduled = :scheduled,
             logical_block_size = :logical_block_size WHERE uuid = :uuid",
            named_params! {
                ":uuid": Id(uuid), ":name": vdi.name.as_str(), ":description": vdi.description.as_str(),
                ":read_only": vdi.read_only, ":tags": Json(&vdi.tags), ":other_config": Json(&vdi.other_config),
                ":retention": vdi.retention.map(Json), ":scheduled": vdi.scheduled,
                ":logical_block_size": vdi.logical_block_size.map(Block),
            },
        )?;
        if patch.retention.is_some() {
            // A person has said so now. Why the schedule before could not be followed says nothing of this one.
            let sql = "UPDATE vdi SET retention_rests = NULL, retention_problem = NULL WHERE uuid = ?1";
            self.execute(sql, [Id(uuid)])?;
            vdi.retention_problem = None;
        }
        if let Some(schedule) = patch.backup_schedule {
            self.set_backup_schedule(ObjectKind::Vdi, uuid, (vdi.backup_schedule, schedule))?;
            vdi = self.vdi(uuid)?;
        }
        self.note_vdi(uuid)?;
        self.touch(ObjectKind::Vdi, uuid, Change::Changed);
        Ok(vdi)
    }

    /// Records why a snapshot of a VDI that was due by its schedule was not taken, or that one was. Not of a VDI
    /// without a schedule: it may have ended meanwhile, and the VDI too.
    pub fn set_vdi_retention_problem(&mut self, uuid: Uuid, problem: Option<&Problem>) -> Result<(), Problem> {
        let known = self.find_vdi(uuid)?.filter(|vdi| vdi.retention.is_some());
        if known.is_some_and(|vdi| vdi.retention_problem.as_ref() != problem) {
            self.execute("UPDATE vdi SET retention_problem = ?2 WHERE uuid = ?1", (Id(uuid), problem.map(Json)))?;
            self.touch(ObjectKind::Vdi, uuid, Change::Changed);
        }
        Ok(())
    }

    /// Has a VDI show another image.
    pub fn set_vdi_image(&mut self, uuid: Uuid, image: Uuid) -> Result<(), Problem> {
        self.vdi_image(uuid)?;
        self.execute("UPDATE vdi SET image = ?2 WHERE uuid = ?1", (Id(uuid), Id(image)))?;
        self.touch(ObjectKind::Vdi, uuid, Change::Changed);
        self.note_vdi(uuid)
    }

    /// Has a VDI show the image of a state that another VDI keeps, with the sectors that the guest of that state had.
    pub fn revert_vdi(&mut self, uuid: Uuid, image: Uuid, snapshot: Uuid) -> Result<(), Problem> {
        let block = self.vdi(snapshot)?.logical_block_size;
        self.exchange_vdi(uuid, image, block, &format!("it was reverted to snapshot {snapshot}"))
    }

    /// Has a VDI show an image of another content, for guests with sectors of this size. Its maps of changed blocks
    /// end, for the reason `why`: they do not name what differs now.
    pub fn exchange_vdi(
        &mut self,
        uuid: Uuid,
        image: Uuid,
        block: Option<LogicalBlockSize>,
        why: &str,
    ) -> Result<(), Problem> {
        self.execute("UPDATE vdi SET logical_block_size = ?2 WHERE uuid = ?1", (Id(uuid), block.map(Block)))?;
        if self.vdi(uuid)?.cbt.is_some() {
            self.change_tracking(uuid, |tracking| tracking.end(why))?;
        }
        self.set_vdi_image(uuid, image)
    }

    /// Forgets a VDI, which may have no VBD. Its image stays, hidden.
    pub fn remove_vdi(&mut self, uuid: Uuid) -> Result<(), Problem> {
        let vbd =
            self.row("SELECT uuid FROM vbd WHERE vdi = ?1 LIMIT 1", [Id(uuid)], |row| Ok(row.get::<_, Id>(0)?.0))?;
        if let Some(vbd) = vbd {
            let what = format!("VDI {uuid} is used by VBD {vbd}");
            return Err(Problem::new(Code::InUse, what).advise("destroy its VBDs first"));
        }
        self.leave_maps(uuid)?;
        self.note_vdi(uuid)?;
        self.execute("DELETE FROM lease WHERE vdi = ?1", [Id(uuid)])?;
        if self.execute("DELETE FROM vdi WHERE uuid = ?1", [Id(uuid)])? > 0 {
            self.touch(ObjectKind::Vdi, uuid, Change::Removed);
        }
        Ok(())
    }

    /// The VDI of an image, if it has one, is other than before.
    pub(super) fn touch_vdi_of(&mut self, image: Uuid) -> Result<(), Problem> {
        if let Some(vdi) = self.vdi_of_image(image)? {
            self.touch(ObjectKind::Vdi, vdi, Change::Changed);
        }
        Ok(())
    }
}
