//! Cloud-init seeds of VMs.
//!
//! Invariants: their texts leave the catalogue only through [`View::seed`]; one that is deleted is overwritten in the
//! file and taken out of its log. Backups keep it until they are removed themselves.

use api::{Problem, Seed};
use rusqlite::{Row, named_params};
use uuid::Uuid;

use super::row::{Id, text};
use super::{Tx, View};

fn of_row(row: &Row<'_>) -> rusqlite::Result<Seed> {
    let optional = |column: &str| row.get::<_, Option<String>>(column)?.map(|_| text(row, column)).transpose();
    Ok(Seed {
        user_data: text(row, "user_data")?,
        meta_data: optional("meta_data")?,
        network_config: optional("network_config")?,
    })
}

impl View<'_> {
    /// The seed of a VM, if it has one.
    pub fn seed(&self, vm: Uuid) -> Result<Option<Seed>, Problem> {
        self.row("SELECT * FROM seed WHERE vm = ?1", [Id(vm)], of_row)
    }
}

impl Tx<'_> {
    /// Gives a VM this seed instead of the one that it has, or none.
    pub fn set_seed(&mut self, vm: Uuid, seed: Option<&Seed>) -> Result<(), Problem> {
        self.wipes |= self.execute("DELETE FROM seed WHERE vm = ?1", [Id(vm)])? > 0;
        let Some(seed) = seed else { return Ok(()) };
        self.execute(
            "INSERT INTO seed VALUES (:vm, :user_data, :meta_data, :network_config)",
            named_params! {
                ":vm": Id(vm), ":user_data": seed.user_data.as_str(),
                ":meta_data": seed.meta_data.as_ref().map(api::SeedText::as_str),
                ":network_config": seed.network_config.as_ref().map(api::SeedText::as_str),
            },
        )?;
        Ok(())
    }
}
