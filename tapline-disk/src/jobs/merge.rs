//! shim
use crate::cli::Merge;
use crate::failure::{Exit, Failure};
pub fn run(_m: &Merge) -> Result<Exit, Failure> {
    Ok(Exit::Done)
}
