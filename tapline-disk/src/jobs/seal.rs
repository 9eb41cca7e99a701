//! `image seal`: ends a map of changed blocks for good, when a snapshot was taken of a disk that is not served.
//!
//! The process that serves a disk seals the map of the interval that has ended itself. A sealed map needs no other proof
//! that it is complete, and an older copy of it is not sealed. It knows no mark: the daemon reads that, and removes it
//! afterwards.

use control::Kind;
use control::tracking::{ExpectedMap, Proof};
use disk::changes::ChangeMap;
use uring::{Cache, ImageFile, OpenOptions};

use crate::files::Files;
use crate::image::{tracking, write_synced};
use crate::jobs::changes::why_unexpected;
use crate::process::failure::{Exit, Failure};
use arguments::Seal;

/// Runs `image seal`. A map that is sealed already stays as it is.
pub fn run(files: &Files, seal: &Seal) -> Result<Exit, Failure> {
    let tried = || format!("seal the map of changed blocks {}", seal.map.display());
    let [expected] = seal.expect.0.as_slice() else {
        return Err(Failure::new(tried(), "one map must be expected").of_kind(Kind::Invalid));
    };
    // Its process may be about to seal it, and has it locked until then.
    let mut file = files.open(&seal.map, OpenOptions { write: true, cache: Cache::Writeback, lock: true })?;
    let mut map = tracking::read(&seal.map, &mut file)?;
    let is_sealed = map.is_sealed();
    let proof = if is_sealed { Proof::Sealed(None) } else { expected.proof.clone() };
    if let Some(why) = why_unexpected(&map, &ExpectedMap { proof, ..expected.clone() }) {
        return Err(Failure::new(tried(), why).of_kind(Kind::State));
    }
    if !is_sealed {
        write(&mut map, &mut file).map_err(|error| Failure::new(tried(), error))?;
    }
    Ok(Exit::Done)
}

fn write(map: &mut ChangeMap, file: &mut ImageFile) -> std::io::Result<()> {
    let header = map.sealed();
    write_synced::write(file, &[vec![header]])
}
