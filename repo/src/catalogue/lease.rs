//! Leases: the current users of a VDI; and claims: the task that changes its layers. One writer, or any number of
//! readers; the schema itself prevents anything else.
//!
//! A lease is taken before a file is opened and released when no process has it open any more. It is the catalogue's
//! counterpart of the files' locks, which also exclude programs that know nothing of the catalogue.

use api::{Change, Code, Mode, ObjectKind, Problem, Task, TaskState};
use uuid::Uuid;

use super::row::{Id, Word};
use super::{Tx, View, not_found};

/// The holder of a lease: a VBD or a task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Holder {
    /// The holder of the lease.
    pub holder: Uuid,
    /// For what.
    pub mode: Mode,
}

impl View<'_> {
    /// All who may use a VDI now.
    pub(super) fn leases(&self) -> Result<Vec<Holder>, Problem> {
        self.rows("SELECT holder, mode FROM lease", [], |row| {
            Ok(Holder { holder: row.get::<_, Id>(0)?.0, mode: row.get::<_, Word<_>>(1)?.0 })
        })
    }

    /// The present holders of a VDI's leases.
    pub fn holders(&self, vdi: Uuid) -> Result<Vec<Holder>, Problem> {
        self.rows("SELECT holder, mode FROM lease WHERE vdi = ?1 ORDER BY holder", [Id(vdi)], |row| {
            Ok(Holder { holder: row.get::<_, Id>(0)?.0, mode: row.get::<_, Word<_>>(1)?.0 })
        })
    }

    /// The task that has claimed an object, if there is one and it is not stuck.
    pub fn at_work(&self, object: Uuid) -> Result<Option<Uuid>, Problem> {
        let Some(task) = self.claimant(object)? else { return Ok(None) };
        let stuck = self.find_task(task)?.is_some_and(|task| task.state == TaskState::Stuck);
        Ok((!stuck).then_some(task))
    }

    /// The task that has an object to itself, if one has.
    pub fn claimant(&self, object: Uuid) -> Result<Option<Uuid>, Problem> {
        self.row("SELECT task FROM claim WHERE object = ?1", [Id(object)], |row| Ok(row.get::<_, Id>(0)?.0))
    }
}

impl Tx<'_> {
    /// Gives `holder` a lease of a VDI. A holder that already has it keeps it.
    pub fn take_lease(&mut self, vdi: Uuid, holder: Uuid, mode: Mode) -> Result<(), Problem> {
        if self.find_vdi(vdi)?.is_none() {
            return Err(not_found(ObjectKind::Vdi, vdi));
        }
        let holders = self.holders(vdi)?;
        if let Some(own) = holders.iter().find(|other| other.holder == holder) {
            if own.mode == mode {
                return Ok(());
            }
            return Err(Problem::new(Code::InUse, format!("{holder} already uses VDI {vdi} in a different mode")));
        }
        let excluding = |other: &&Holder| other.mode == Mode::ReadWrite || mode == Mode::ReadWrite;
        if let Some(other) = holders.iter().find(excluding) {
            self.check_not_of_memory(vdi, "used")?;
            return Err(self.leased(vdi, *other)?);
        }
        self.execute("INSERT INTO lease VALUES (?1, ?2, ?3)", (Id(vdi), Id(holder), Word(mode)))?;
        self.touch(ObjectKind::Vdi, vdi, Change::Changed);
        Ok(())
    }

    /// Gives back all that `holder` has.
    pub fn drop_leases(&mut self, holder: Uuid) -> Result<(), Problem> {
        let vdis =
            self.rows("SELECT vdi FROM lease WHERE holder = ?1", [Id(holder)], |row| Ok(row.get::<_, Id>(0)?.0))?;
        self.execute("DELETE FROM lease WHERE holder = ?1", [Id(holder)])?;
        for vdi in vdis {
            self.touch(ObjectKind::Vdi, vdi, Change::Changed);
        }
        Ok(())
    }

    /// Gives a task exclusive use of an object. A task may claim an object repeatedly.
    pub fn claim(&mut self, object: Uuid, task: Uuid) -> Result<(), Problem> {
        match self.claimant(object)? {
            Some(other) if other != task => {
                let task = self.find_task(other)?;
                let verb = task.as_ref().map_or("a task", |task| &task.verb);
                let what = format!("{verb} {other} is working on {object}");
                Err(Problem::new(Code::Busy, what).advise(task.as_ref().map_or(ADVICE.into(), advice)))
            }
            Some(_) => Ok(()),
            None => self.execute("INSERT INTO claim VALUES (?1, ?2)", (Id(object), Id(task))).map(drop),
        }
    }

    /// Keeps a repository, which must be attached, from being detached until a task is over.
    pub fn use_sr(&mut self, sr: Uuid, task: Uuid) -> Result<(), Problem> {
        self.attached_sr(sr)?;
        self.execute("INSERT OR IGNORE INTO sr_use VALUES (?1, ?2)", (Id(sr), Id(task))).map(drop)
    }

    /// Refuses an object claimed by a stuck task: its layers are unknown.
    pub(super) fn check_not_stuck(&self, object: Uuid) -> Result<(), Problem> {
        let Some(task) = self.claimant(object)? else { return Ok(()) };
        match self.find_task(task)? {
            Some(Task { state: TaskState::Stuck, problem: Some(problem), .. }) => {
                Err(Problem { code: Code::Busy, ..problem })
            }
            _ => Ok(()),
        }
    }

    /// Gives back all that a task has to itself.
    pub(super) fn drop_claims(&mut self, task: Uuid) -> Result<(), Problem> {
        self.execute("DELETE FROM sr_use WHERE task = ?1", [Id(task)])?;
        self.execute("DELETE FROM claim WHERE task = ?1", [Id(task)]).map(drop)
    }

    /// Why a VDI cannot be had: by whom it is used, and for what.
    fn leased(&self, vdi: Uuid, by: Holder) -> Result<Problem, Problem> {
        let doing = if by.mode == Mode::ReadWrite { "written" } else { "read" };
        let (who, advice) = match self.find_task(by.holder)? {
            Some(task) => (format!("the task {} {}", task.verb, task.uuid), advice(&task)),
            None if self.find_vbd(by.holder)?.is_some_and(|vbd| vbd.for_nbd_address) => {
                let who = format!("clients of the daemon's NBD address (VBD {})", by.holder);
                (who, "wait until they have disconnected, or disconnect them".into())
            }
            None if by.mode == Mode::ReadWrite => {
                (format!("VBD {}", by.holder), "unplug that VBD first; to read the VDI, snapshot it".into())
            }
            None => (format!("VBD {}", by.holder), "unplug that VBD first".into()),
        };
        Ok(Problem::new(Code::InUse, format!("VDI {vdi} is being {doing} by {who}")).advise(advice))
    }
}

/// Advice about a task that holds an object.
const ADVICE: &str = "wait for that task or cancel it";

fn advice(task: &Task) -> String {
    let stuck = task.problem.as_ref().filter(|_| task.state == TaskState::Stuck);
    stuck.and_then(|problem| problem.advice.clone()).unwrap_or_else(|| ADVICE.into())
}
