//! Integrity checks of a catalogue, as far as they are possible from the file alone.
//!
//! Three levels, from the bottom up: SQLite's own check of its pages and indexes, foreign keys, and whether every row
//! is one that we could have written. A change to something valid is not detected here: that is what the seal
//! ([`super::seal`]) and the inventories of repositories are for.

use api::{Code, Problem};
use rusqlite::{Connection, ErrorCode};

use super::event::EventBus;
use super::health::HealthBoard;
use super::{View, failed};

/// The size up to which every start also compares indexes with their tables: this takes five times as long as the check
/// without it, which uses 65 ms of CPU time for 10,000 VDIs in 10 MiB.
const SMALL: u64 = 64 << 20;

/// How thorough the check is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Look {
    /// At everything, however long it takes.
    Whole,
    /// At everything but indexes, if the catalogue is large.
    Bounded,
}

/// Rejects a damaged file as [`Code::Damaged`]. The contents of rows are not checked.
pub fn check_pages(connection: &Connection, look: Look) -> Result<(), Problem> {
    let pages: u64 = connection.pragma_query_value(None, "page_count", |row| row.get(0)).map_err(failed)?;
    let size: u64 = connection.pragma_query_value(None, "page_size", |row| row.get(0)).map_err(failed)?;
    let whole = look == Look::Whole || pages.saturating_mul(size) <= SMALL;
    // One sentence is enough to know; what all is wrong is for people who repair files.
    let sql = if whole { "PRAGMA integrity_check(1)" } else { "PRAGMA quick_check(1)" };
    let said: String = connection.query_row(sql, [], |row| row.get(0)).map_err(failed)?;
    if said != "ok" {
        return Err(damaged(said.trim_start_matches("*** in database main ***").trim()));
    }
    let mut statement = connection.prepare("PRAGMA foreign_key_check").map_err(failed)?;
    let mut missing = statement.query([]).map_err(failed)?;
    match missing.next().map_err(failed)? {
        None => Ok(()),
        Some(row) => {
            let table = |column| row.get::<_, String>(column).map_err(|error| damaged(error.to_string()));
            Err(damaged(format!("a row of {} refers to a missing row of {}", table(0)?, table(2)?)))
        }
    }
}

/// Refuses rows that this program cannot have written.
pub fn check_rows(connection: &Connection) -> Result<(), Problem> {
    let event_bus = EventBus::new(0, HealthBoard::default());
    let view = View { connection, event_bus: &event_bus };
    let read = || {
        for sr in view.srs()? {
            view.images_of_sr(sr.uuid)?;
            view.inventory_lines(sr.uuid).map_err(|problem| damaged(problem.detail))?;
        }
        view.inventory_heads()?;
        for vbd in view.vbds(None, None)?.iter().filter(|vbd| vbd.pid.is_some()) {
            view.vbd_process(vbd.uuid)?;
        }
        for vm in view.vms()? {
            view.vm_process(vm.uuid)?;
            view.vm_held(vm.uuid)?;
            view.vm_shutdown(vm.uuid)?;
            view.seed(vm.uuid)?;
        }
        view.vdis(None)?;
        for vdi in view.scheduled_vdis()? {
            view.retention_rests(vdi.uuid)?;
        }
        view.vdis_to_back_up()?;
        view.vms_to_back_up()?;
        view.vm_snapshots(None)?;
        view.leases()?;
        view.tasks(false)?;
        view.journal()?;
        view.to_start()?;
        view.tokens()?;
        view.backup_targets()?;
        view.backup_snapshots()?;
        view.backup_bases(None)?;
        Ok(())
    };
    read().map_err(|problem: Problem| match problem.code {
        // A value of another program.
        Code::Internal => damaged(problem.detail),
        _ => problem,
    })
}

/// The error for a damaged catalogue.
pub fn damaged(why: impl std::fmt::Display) -> Problem {
    Problem::new(Code::Damaged, format!("the catalogue is damaged: {why}"))
}

/// Whether an SQLite error means that a file is damaged or is not a catalogue: a truncated one has no tables.
pub fn tells_of_damage(error: &rusqlite::Error) -> bool {
    let is_empty = |words: &str| words.starts_with("no such table") || words.starts_with("no such column");
    let words = match error {
        rusqlite::Error::SqliteFailure(_, words) => words.as_deref(),
        rusqlite::Error::SqlInputError { msg, .. } => Some(msg.as_str()),
        _ => None,
    };
    let code = error.sqlite_error_code();
    matches!(code, Some(ErrorCode::DatabaseCorrupt | ErrorCode::NotADatabase)) || words.is_some_and(is_empty)
}

/// Whether a value is one that we never write.
pub fn is_foreign(error: &rusqlite::Error) -> bool {
    use rusqlite::Error::{FromSqlConversionFailure, IntegralValueOutOfRange, InvalidColumnType, Utf8Error};
    matches!(error, FromSqlConversionFailure(..) | IntegralValueOutOfRange(..) | InvalidColumnType(..) | Utf8Error(..))
}
