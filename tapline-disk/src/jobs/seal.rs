//! `image seal`: ends a map of changed blocks for good, when a snapshot was taken of a disk that is not served.
//!
//! The process that serves a disk seals the map of the interval that has ended itself. A sealed map needs no other
//! proof that it is complete, and an older copy of it is not sealed. It knows no mark: the daemon reads that, and
//! removes it afterwards.

use control::tracking::Proof;
use disk::changes::ChangeMap;
use uring::{Cache, ImageFile, OpenOptions};

use crate::files::Files;
use crate::image::{expected_maps, tracking, write_synced};
use crate::process::failure::{Exit, Failure};
use arguments::Seal;

/// Runs `image seal`. A map that is sealed already stays as it is.
pub fn run(files: &Files, seal: &Seal) -> Result<Exit, Failure> {
    // Its process may be about to seal it, and has it locked until then.
    let mut file = files.open(&seal.map, OpenOptions { write: true, cache: Cache::Writeback, lock: true })?;
    let mut map = tracking::read(&seal.map, &mut file)?;
    let mut expected = seal.expect.0.clone();
    if map.is_sealed() {
        expected.iter_mut().for_each(|expected| expected.proof = Proof::Sealed(None));
    }
    expected_maps::check(std::slice::from_ref(&map), &expected, None)?;
    if !map.is_sealed() {
        let tried = || format!("seal the map of changed blocks {}", seal.map.display());
        write(&mut map, &mut file).map_err(|error| Failure::new(tried(), error))?;
    }
    Ok(Exit::Done)
}

fn write(map: &mut ChangeMap, file: &mut ImageFile) -> std::io::Result<()> {
    let header = map.sealed();
    write_synced::write(file, &[vec![header]])
}
