//! Virtual disks: the jobs that create, change, copy and remove them, each of which is all or nothing.
//!
//! The contents of files are left to disk processes; the catalogue decides which files make up a disk. A job changes
//! files in such a way that both the catalogue before its commit and the one after it match the files.

pub mod begin;
mod chain;
mod copy;
mod create;
mod data_destroy;
mod destroy;
mod fetch;
mod file;
mod leaf;
pub mod maps;
mod merge;
mod postponed;
pub mod record_changes;
mod replacement;
mod resize;
mod revert;
mod snapshot;
mod target;
mod tracking;

use api::{About, Code, ImageFormat, Mode, ObjectKind, Problem, Sr, VbdState, Vdi, VdiState, Versions};
use repo::Tx;
use uuid::Uuid;

use crate::disk::live;
use crate::fault::{self, Planted};

pub use begin::{block_size, must_hold};
pub use chain::Chain;
pub use copy::{Copy, Export, Import};
pub use create::Create;
pub use data_destroy::DataDestroy;
pub use destroy::{Destroy, Reclaim};
pub use fetch::Fetch;
pub use file::make_image;
pub use merge::{Merge, collect, tidy_up};
pub use postponed::Postponed;
pub use replacement::Replacement;
pub use resize::Resize;
pub use revert::Revert;
pub use snapshot::{Clone, KeptImages, KeptState, Snapshot};
pub use target::Target;
pub use tracking::{DisableTracking, EnableTracking, remove_unneeded_maps};

pub use repo::catalogue::file_name;

/// The maximum length of a VDI's chain: a disk process serves no longer ones.
const DEPTH_MAX: u32 = 60;

/// The reference of a task to a VDI.
pub fn about_vdi(uuid: Uuid) -> About {
    About { kind: ObjectKind::Vdi, uuid }
}

/// The format of a new VDI: the requested one if the repository supports it, otherwise the repository's default.
pub fn format_for(sr: &Sr, asked: Option<ImageFormat>) -> Result<ImageFormat, Problem> {
    let Some(variant) = &sr.variant else { return Err(not_attached(sr)) };
    if variant.read_only {
        let what = format!("SR {} is read-only", sr.name);
        return Err(Problem::new(Code::ReadOnly, what).field("sr").advise("choose another SR"));
    }
    let format = asked.unwrap_or(variant.format);
    if variant.formats.contains(&format) {
        return Ok(format);
    }
    let possible: Vec<String> = variant.formats.iter().map(ToString::to_string).collect();
    let what = format!("SR {} on {} does not support VDIs of format {format}", sr.name, variant.filesystem);
    Err(Problem::new(Code::Unsupported, what).field("format").advise(format!("use {}", possible.join(" or "))))
}

/// How the repository keeps earlier states of a VDI; refused if its format does not support that.
pub fn versions_for(sr: &Sr, vdi: &Vdi) -> Result<Versions, Problem> {
    let Some(variant) = &sr.variant else { return Err(not_attached(sr)) };
    if variant.read_only {
        return Err(Problem::new(Code::ReadOnly, format!("SR {} is read-only", sr.name)));
    }
    match (vdi.format, variant.versions) {
        (ImageFormat::Raw, Versions::Reflink) => Ok(Versions::Reflink),
        (ImageFormat::Raw, _) => {
            let what = format!("VDI {} is raw, and {} cannot share blocks between files", vdi.uuid, variant.filesystem);
            Err(Problem::new(Code::Unsupported, what)
                .advise("copy it to the qcow2 format, which supports snapshots anywhere"))
        }
        (_, Versions::None) => {
            Err(Problem::new(Code::Unsupported, format!("SR {} does not support snapshots", sr.name)))
        }
        (_, Versions::Chain | Versions::Reflink) => Ok(Versions::Chain),
    }
}

/// Refuses a VDI of which a file was missing or damaged when last checked.
pub fn must_be_ready(vdi: &Vdi) -> Result<(), Problem> {
    let why = match vdi.state {
        VdiState::Ready => return Ok(()),
        VdiState::Missing => "one of its files is missing",
        VdiState::Damaged => "one of its files is damaged",
        VdiState::NoData => {
            let what = format!("VDI {} cannot be used: it is a snapshot whose data was destroyed", vdi.uuid);
            let advice = "use another snapshot of the disk; this one is only good for 'tapline vdi changed'";
            return Err(Problem::new(Code::State, what).advise(advice));
        }
        VdiState::Diverged => {
            let what = format!("VDI {} cannot be used: its disk and the catalogue disagree about its files", vdi.uuid);
            return Err(Problem::new(Code::State, what).advise(crate::reconcile::ADVICE));
        }
    };
    Err(Problem::new(Code::State, format!("VDI {} cannot be used: {why}", vdi.uuid)).advise("see 'tapline sr scan'"))
}

/// Refuses a VDI whose chain cannot get another image on top.
pub fn must_be_shallow(vdi: &Vdi) -> Result<(), Problem> {
    if vdi.depth < DEPTH_MAX || fault::planted(Planted::DeepChain) {
        return Ok(());
    }
    let what =
        format!("VDI {} has a chain of {} images, and a chain can have at most {DEPTH_MAX}", vdi.uuid, vdi.depth);
    Err(Problem::new(Code::State, what).advise(
        "destroy unneeded snapshots: their images are then merged automatically (see 'tapline task list'); or flatten \
         it into a copy: tapline vdi copy",
    ))
}

/// Refuses a VDI that is plugged.
pub fn must_be_unplugged(vdi: &Vdi, to: &str) -> Result<(), Problem> {
    match vdi.users.first() {
        None => Ok(()),
        Some(user) => {
            let what = format!("VDI {} cannot be {to} while VBD {} is plugged", vdi.uuid, user.vbd);
            Err(Problem::new(Code::InUse, what).advise("unplug it first"))
        }
    }
}

/// Reserves a VDI for a task: all of it if it is not plugged; otherwise only its files, through `vbd`.
pub fn hold(tx: &mut Tx<'_>, vdi: Uuid, task: Uuid, vbd: Option<Uuid>) -> Result<(), Problem> {
    tx.check_not_of_memory(vdi, "used or changed")?;
    tx.claim(vdi, task)?;
    // The VDI must still be in the state seen before.
    if leaf::writer_of(&tx.vdi(vdi)?) != vbd {
        return Err(Problem::new(Code::Busy, format!("VDI {vdi} is being plugged or unplugged")).advise("try again"));
    }
    let Some(vbd) = vbd else { return tx.take_lease(vdi, task, Mode::ReadWrite) };
    let now = tx.vbd(vbd)?;
    match now.state {
        // From this commit on, the task's problem tells if the disk becomes stuck.
        VbdState::Plugged => live::must_answer(&now),
        _ => Err(Problem::new(Code::Busy, format!("VBD {vbd} is being plugged or unplugged")).advise("try again")),
    }
}

fn not_attached(sr: &Sr) -> Problem {
    Problem::new(Code::State, format!("SR {} is not attached", sr.name)).field("sr").advise("attach it first")
}
