//! Disk processes: how they are started, the files passed to them, and requests to them. The daemon opens files for
//! them and never looks inside.

pub mod control;
pub mod doubt;
pub mod files;
pub mod gate;
pub mod handing;
pub mod hung;
pub mod limits;
pub mod live;
pub mod mark;
pub mod names;
pub mod oom;
mod owners;
pub mod paths;
pub mod process;
mod program;
pub mod redo;
pub mod serving;
pub mod shares;
pub mod tool;

use std::path::PathBuf;
use std::time::Duration;

use ::control::answer::{Condition, Version};
use ::control::{Ask, ask};
use api::{Code, Problem};
use uuid::Uuid;

use self::control::Watch;
use crate::config::Config;
use doubt::Doubted;
use files::OpenFiles;
use gate::Gates;
use paths::DiskPaths;

/// The running disks, by VBD.
#[derive(Debug)]
pub struct Disks {
    config: Config,
    /// Gates at which verbs wait while a disk's process is replaced.
    pub gates: Gates,
    /// Disks that do not respond.
    pub doubted: Doubted,
    /// The files that disks have open.
    pub open_files: OpenFiles,
    /// The pages by which disks of a repository share its storage.
    pub shares: shares::Pages,
}

impl Disks {
    /// The disks of a daemon with this configuration; none yet.
    pub fn of(config: &Config) -> Disks {
        Disks {
            config: config.clone(),
            gates: Gates::default(),
            doubted: Doubted::default(),
            open_files: OpenFiles::default(),
            shares: shares::Pages::default(),
        }
    }

    /// Sends a verb of docs/control.md to the disk of a VBD and waits for the response, but not longer than `patience`.
    pub async fn ask<V: Ask>(&self, vbd: Uuid, verb: V, patience: Duration) -> Result<V::Answer, Problem> {
        Ok(self::control::ask(&self.socket(vbd), verb, Vec::new(), patience).await?)
    }

    /// The process version reported by the disk of a VBD.
    pub async fn version(&self, vbd: Uuid, patience: Duration) -> Result<Version, Problem> {
        self.ask(vbd, ask::Version {}, patience).await
    }

    /// Whether the disk of a VBD accepts connections but does not respond. A disk that is stopping accepts none.
    pub async fn is_silent(&self, vbd: Uuid, patience: Duration) -> bool {
        self.version(vbd, patience).await.is_err_and(|problem| problem.code == Code::Timeout)
    }

    /// Subscribes to the disk's events; the current state comes first.
    pub async fn watch(&self, vbd: Uuid) -> Result<(Condition, Watch), Problem> {
        self::control::watch(&self.socket(vbd)).await
    }

    /// The control socket of a VBD's disk.
    pub fn socket(&self, vbd: Uuid) -> PathBuf {
        DiskPaths::of(&self.config, vbd).control()
    }
}
