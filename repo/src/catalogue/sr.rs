//! Storage repositories.

use api::{Change, Code, Health, Labels, ObjectKind, Problem, Space, Sr, SrCalibration, SrPatch, SrState, Variant};
use rusqlite::{Row, named_params};
use uuid::Uuid;

use super::health::HealthBoard;
use super::image::Image;
use super::inventory::Noted;
use super::name::Among;
use super::row::{Id, Json, Time, Word, labels, text};
use super::{Tx, View, not_found};

const COLUMNS: &str = "uuid, name, description, source, state, variant, space, reserve, problem, created, tags, other_config, \
     share_depth, split, merge, policy";

fn of_row(row: &Row<'_>, health: &HealthBoard) -> rusqlite::Result<Sr> {
    let Labels { tags, other_config } = labels(row)?;
    let mut sr = Sr {
        uuid: row.get::<_, Id>("uuid")?.0,
        name: text(row, "name")?,
        description: text(row, "description")?,
        tags,
        other_config,
        source: row.get::<_, Json<_>>("source")?.0,
        state: row.get::<_, Word<_>>("state")?.0,
        health: Health::healthy(),
        variant: row.get::<_, Option<Json<_>>>("variant")?.map(|json| json.0),
        space: row.get::<_, Option<Json<_>>>("space")?.map(|json| json.0),
        reserve: row.get("reserve")?,
        share_depth: row.get("share_depth")?,
        split: row.get::<_, Word<_>>("split")?.0,
        merge: row.get::<_, Word<_>>("merge")?.0,
        policy: row.get::<_, Option<Json<_>>>("policy")?.map(|json| json.0),
        problem: row.get::<_, Option<Json<_>>>("problem")?.map(|json| json.0),
        created: row.get::<_, Time>("created")?.0,
    };
    sr.health = health.of_sr(&sr);
    Ok(sr)
}

/// One that is lost cannot be used, for the reason for which it is.
fn lost(sr: &Sr) -> Problem {
    let what = format!("the repository '{}' ({}) is lost", sr.name, sr.uuid);
    let Some(why) = &sr.problem else {
        return Problem::new(Code::State, what).advise("restore its storage, then attach it again");
    };
    let advice = why
        .advice
        .clone()
        .unwrap_or_else(|| "restore its storage; Tapline then attaches it again automatically".into());
    Problem::new(Code::State, format!("{what}: {why}")).advise(advice)
}

impl View<'_> {
    /// All repositories, by name.
    pub fn srs(&self) -> Result<Vec<Sr>, Problem> {
        let sql = format!("SELECT {COLUMNS} FROM sr ORDER BY name, uuid");
        self.rows(&sql, [], |row| of_row(row, self.event_bus.health()))
    }

    /// A repository, if there is one.
    pub fn find_sr(&self, uuid: Uuid) -> Result<Option<Sr>, Problem> {
        let sql = format!("SELECT {COLUMNS} FROM sr WHERE uuid = ?1");
        self.row(&sql, [Id(uuid)], |row| of_row(row, self.event_bus.health()))
    }

    /// A repository; an error if there is none with this UUID.
    pub fn sr(&self, uuid: Uuid) -> Result<Sr, Problem> {
        self.find_sr(uuid)?.ok_or_else(|| not_found(ObjectKind::Sr, uuid))
    }

    /// A repository for clients. Its images and the space that its VDIs may need are those of now; the rest of its
    /// space is as last measured. Reads all images of the repository.
    pub fn shown_sr(&self, uuid: Uuid) -> Result<Sr, Problem> {
        self.with_allocation(self.sr(uuid)?)
    }

    /// All repositories for clients, by name.
    pub fn shown_srs(&self) -> Result<Vec<Sr>, Problem> {
        self.srs()?.into_iter().map(|sr| self.with_allocation(sr)).collect()
    }

    fn with_allocation(&self, mut sr: Sr) -> Result<Sr, Problem> {
        if let Some(space) = &mut sr.space {
            (space.images, space.virtual_allocation) = self.sr_allocation(sr.uuid)?;
        }
        Ok(sr)
    }

    /// A repository, which must be attached. To be checked in the commit that relies on it.
    pub fn attached_sr(&self, uuid: Uuid) -> Result<Sr, Problem> {
        let sr = self.sr(uuid)?;
        let (why, advice) = match sr.state {
            SrState::Attached => return Ok(sr),
            SrState::Detached => ("is not attached", "attach it first"),
            SrState::Lost => return Err(lost(&sr)),
        };
        Err(Problem::new(Code::State, format!("the repository '{}' ({uuid}) {why}", sr.name)).advise(advice))
    }

    /// Refuses if a repository is in use by a plugged VBD, or by a task that reads or creates images in it.
    pub fn check_sr_unused(&self, uuid: Uuid) -> Result<(), Problem> {
        let vbds = "SELECT vbd.uuid FROM vbd JOIN vdi ON vbd.vdi = vdi.uuid JOIN image ON vdi.image = image.uuid
                    WHERE image.sr = ?1 AND vbd.state <> 'unplugged' LIMIT 1";
        if let Some(vbd) = self.row(vbds, [Id(uuid)], |row| Ok(row.get::<_, Id>(0)?.0))? {
            let what = format!("the repository {uuid} is used by VBD {vbd}, which is plugged");
            return Err(Problem::new(Code::InUse, what).advise("unplug its VBDs first"));
        }
        let memory = "SELECT vdi.uuid FROM lease JOIN vdi ON lease.vdi = vdi.uuid JOIN image ON vdi.image = image.uuid
                      JOIN vbd ON vbd.uuid = lease.holder JOIN vm_memory ON vm_memory.vm = vbd.vm
                      WHERE image.sr = ?1 LIMIT 1";
        if let Some(vdi) = self.row(memory, [Id(uuid)], |row| Ok(row.get::<_, Id>(0)?.0))? {
            self.check_not_of_memory(vdi, &format!("taken away with its repository {uuid}"))?;
        }
        // In a repository that is lost a task may wait without success: that must not prevent forgetting it.
        let jobs = "SELECT 1 FROM sr_use JOIN task ON sr_use.task = task.uuid JOIN sr ON sr_use.sr = sr.uuid
                    WHERE sr.uuid = ?1 AND sr.state = 'attached' AND task.state <> 'stuck' LIMIT 1";
        if self.row(jobs, [Id(uuid)], |_| Ok(()))?.is_some() {
            return Err(used_by_a_task(uuid));
        }
        let tasks = "SELECT 1 FROM image LEFT JOIN vdi ON vdi.image = image.uuid
                     WHERE image.sr = ?1 AND (
                         image.state = 'making'
                         OR EXISTS (SELECT 1 FROM lease WHERE lease.vdi = vdi.uuid)) LIMIT 1";
        if self.row(tasks, [Id(uuid)], |_| Ok(()))?.is_some() {
            return Err(used_by_a_task(uuid));
        }
        Ok(())
    }

    /// The policy of a repository with all that was measured for it, if there is one.
    pub fn sr_calibration(&self, uuid: Uuid) -> Result<Option<SrCalibration>, Problem> {
        self.sr(uuid)?;
        let sql = "SELECT policy, policy_points FROM sr WHERE uuid = ?1 AND policy IS NOT NULL";
        self.row(sql, [Id(uuid)], |row| {
            let points = row.get::<_, Option<Json<_>>>("policy_points")?.map(|json| json.0);
            Ok(SrCalibration { policy: row.get::<_, Json<_>>("policy")?.0, points: points.unwrap_or_default() })
        })
    }

    /// The plugged VBDs of a repository's disks.
    pub fn plugged_in_sr(&self, uuid: Uuid) -> Result<Vec<Uuid>, Problem> {
        let sql = "SELECT vbd.uuid FROM vbd JOIN vdi ON vbd.vdi = vdi.uuid JOIN image ON vdi.image = image.uuid
                   WHERE image.sr = ?1 AND vbd.state = 'plugged'";
        self.rows(sql, [Id(uuid)], |row| Ok(row.get::<_, Id>(0)?.0))
    }

    /// The VBDs of a repository's disks whose guests wait for space.
    pub fn waiting_in_sr(&self, uuid: Uuid) -> Result<Vec<Uuid>, Problem> {
        let sql = "SELECT vbd.uuid FROM vbd JOIN vdi ON vbd.vdi = vdi.uuid JOIN image ON vdi.image = image.uuid
                   WHERE image.sr = ?1 AND vbd.waits_for_space";
        self.rows(sql, [Id(uuid)], |row| Ok(row.get::<_, Id>(0)?.0))
    }

    /// Repositories of which a disk may be written now.
    pub fn srs_written(&self) -> Result<Vec<Uuid>, Problem> {
        let sql =
            "SELECT DISTINCT image.sr FROM vbd JOIN vdi ON vbd.vdi = vdi.uuid JOIN image ON vdi.image = image.uuid
                   WHERE vbd.state <> 'unplugged' AND vbd.mode = 'RW'";
        self.rows(sql, [], |row| Ok(row.get::<_, Id>(0)?.0))
    }

    /// The images of a repository that may be written now, and those right below them: what belongs to a snapshot may
    /// be written shortly after it was taken.
    pub fn images_written(&self, sr: Uuid) -> Result<Vec<Image>, Problem> {
        let sql = "WITH leaf AS (SELECT image.uuid, image.parent FROM image
                       JOIN vdi ON vdi.image = image.uuid JOIN vbd ON vbd.vdi = vdi.uuid
                       WHERE image.sr = ?1 AND vbd.state <> 'unplugged' AND vbd.mode = 'RW')
                   SELECT image.* FROM image
                   WHERE uuid IN (SELECT uuid FROM leaf UNION SELECT parent FROM leaf) AND sr = ?1";
        self.rows(sql, [Id(sr)], super::image::of_row)
    }

    /// The physical size of a repository's images, and the space that its VDIs would need if they were full, in bytes.
    pub fn sr_allocation(&self, sr: Uuid) -> Result<(u64, u64), Problem> {
        let sql = "SELECT image.physical, CASE WHEN vdi.uuid IS NULL THEN 0 ELSE image.size END
                   FROM image LEFT JOIN vdi ON vdi.image = image.uuid WHERE image.sr = ?1";
        let images: Vec<(u64, u64)> = self.rows(sql, [Id(sr)], |row| Ok((row.get(0)?, row.get(1)?)))?;
        // Not added up by SQLite, whose sums overflow.
        Ok(images.iter().fold((0, 0), |(physical, size): (u64, u64), image| {
            (physical.saturating_add(image.0), size.saturating_add(image.1))
        }))
    }
}

fn used_by_a_task(sr: Uuid) -> Problem {
    let what = format!("a task is using the repository {sr}");
    Problem::new(Code::Busy, what).advise("wait for it or cancel it: tapline task list")
}

impl Tx<'_> {
    /// Adds a repository. Its name was checked when it was chosen ([`super::name`]).
    pub fn add_sr(&mut self, sr: &Sr) -> Result<(), Problem> {
        if self.find_sr(sr.uuid)?.is_some() {
            let what = format!("the repository {} is already known", sr.uuid);
            return Err(Problem::new(Code::Exists, what).advise("attach it, or forget it first"));
        }
        self.execute(
            "INSERT INTO sr VALUES (:uuid, :name, :description, :source, :state, :variant, :space, :reserve, :created, NULL,
             :tags, :other_config, :share_depth, :split, :merge, NULL, NULL)",
            named_params! {
                ":uuid": Id(sr.uuid), ":name": sr.name.as_str(), ":description": sr.description.as_str(),
                ":source": Json(&sr.source), ":state": Word(sr.state), ":variant": sr.variant.as_ref().map(Json),
                ":space": sr.space.as_ref().map(Json), ":reserve": sr.reserve, ":created": Time(sr.created),
                ":tags": Json(&sr.tags), ":other_config": Json(&sr.other_config),
                ":share_depth": sr.share_depth, ":split": Word(sr.split), ":merge": Word(sr.merge),
            },
        )?;
        self.touch(ObjectKind::Sr, sr.uuid, Change::Added);
        Ok(())
    }

    /// Changes what people say of a repository.
    pub fn patch_sr(&mut self, uuid: Uuid, patch: &SrPatch) -> Result<Sr, Problem> {
        let sr = self.sr(uuid)?;
        if let Some(name) = patch.name.as_ref().filter(|name| **name != sr.name) {
            self.check_name_free(Among::Srs, name, &format!("rename SR {uuid} to '{name}'"))?;
        }
        self.set_sr_words(uuid, patch)
    }

    /// The same for a name that was checked when it was chosen.
    pub fn set_sr_words(&mut self, uuid: Uuid, patch: &SrPatch) -> Result<Sr, Problem> {
        let mut sr = self.sr(uuid)?;
        sr.name = patch.name.clone().unwrap_or(sr.name);
        sr.description = patch.description.clone().unwrap_or(sr.description);
        sr.tags = patch.tags.clone().unwrap_or(sr.tags);
        sr.other_config = patch.other_config.clone().unwrap_or(sr.other_config);
        sr.reserve = patch.reserve.unwrap_or(sr.reserve);
        sr.share_depth = patch.share_depth.unwrap_or(sr.share_depth);
        sr.split = patch.split.unwrap_or(sr.split);
        sr.merge = patch.merge.unwrap_or(sr.merge);
        let labels = patch.tags.is_some() || patch.other_config.is_some();
        if patch.name.is_some() || patch.description.is_some() || labels {
            self.note(uuid, Noted::Words);
        }
        self.execute(
            "UPDATE sr SET name = :name, description = :description, reserve = :reserve, tags = :tags,
             other_config = :other_config, share_depth = :share_depth, split = :split, merge = :merge
             WHERE uuid = :uuid",
            named_params! {
                ":uuid": Id(uuid), ":name": sr.name.as_str(), ":description": sr.description.as_str(),
                ":reserve": sr.reserve, ":tags": Json(&sr.tags), ":other_config": Json(&sr.other_config),
                ":share_depth": sr.share_depth, ":split": Word(sr.split), ":merge": Word(sr.merge),
            },
        )?;
        self.touch(ObjectKind::Sr, uuid, Change::Changed);
        Ok(sr)
    }

    /// Sets the state of a repository, and the properties of its storage; they stay unchanged if omitted.
    pub fn set_sr_state(&mut self, uuid: Uuid, state: SrState, variant: Option<&Variant>) -> Result<(), Problem> {
        self.sr(uuid)?;
        self.execute(
            "UPDATE sr SET state = ?2, variant = coalesce(?3, variant), problem = NULL WHERE uuid = ?1",
            (Id(uuid), Word(state), variant.map(Json)),
        )?;
        self.touch(ObjectKind::Sr, uuid, Change::Changed);
        Ok(())
    }

    /// A repository that should be attached is not; one that was lost before may be for another reason.
    pub fn set_sr_lost(&mut self, uuid: Uuid, why: &Problem) -> Result<(), Problem> {
        self.set_sr_state(uuid, SrState::Lost, None)?;
        self.execute("UPDATE sr SET problem = ?2 WHERE uuid = ?1", (Id(uuid), Json(why)))?;
        Ok(())
    }

    /// Replaces the result of the last calibration; `None` removes it.
    pub fn set_sr_calibration(&mut self, uuid: Uuid, found: Option<&SrCalibration>) -> Result<(), Problem> {
        self.sr(uuid)?;
        let (policy, points) = (found.map(|found| Json(&found.policy)), found.map(|found| Json(&found.points)));
        self.execute("UPDATE sr SET policy = ?2, policy_points = ?3 WHERE uuid = ?1", (Id(uuid), policy, points))?;
        self.touch(ObjectKind::Sr, uuid, Change::Changed);
        Ok(())
    }

    /// Records how full a repository is. Only with `publish`, or if its health changes, there is an event: space
    /// changes all the time.
    pub fn set_sr_space(&mut self, uuid: Uuid, space: &Space, publish: bool) -> Result<(), Problem> {
        let before = self.sr(uuid)?.health.state;
        self.execute("UPDATE sr SET space = ?2 WHERE uuid = ?1", (Id(uuid), Json(space)))?;
        if publish || self.sr(uuid)?.health.state != before {
            self.touch(ObjectKind::Sr, uuid, Change::Changed);
        }
        Ok(())
    }

    /// Forgets a repository with its VDIs and images, none of which may have a VBD.
    pub fn remove_sr(&mut self, uuid: Uuid) -> Result<(), Problem> {
        self.sr(uuid)?;
        let vbds = "SELECT vbd.uuid FROM vbd JOIN vdi ON vbd.vdi = vdi.uuid JOIN image ON vdi.image = image.uuid
                    WHERE image.sr = ?1 LIMIT 1";
        if let Some(vbd) = self.row(vbds, [Id(uuid)], |row| Ok(row.get::<_, Id>(0)?.0))? {
            let what = format!("the repository {uuid} is used by VBD {vbd}");
            return Err(Problem::new(Code::InUse, what).advise("destroy its VBDs first"));
        }
        for vdi in self.vdis(Some(uuid))? {
            self.touch(ObjectKind::Vdi, vdi.uuid, Change::Removed);
        }
        self.execute("DELETE FROM vdi WHERE image IN (SELECT uuid FROM image WHERE sr = ?1)", [Id(uuid)])?;
        self.drop_inventory(uuid)?;
        // Children refer to parents; all are deleted in one statement, and references are checked at its end.
        self.execute("UPDATE image SET parent = NULL WHERE sr = ?1", [Id(uuid)])?;
        self.execute("DELETE FROM image WHERE sr = ?1", [Id(uuid)])?;
        self.execute("DELETE FROM sr WHERE uuid = ?1", [Id(uuid)])?;
        self.touch(ObjectKind::Sr, uuid, Change::Removed);
        Ok(())
    }
}
