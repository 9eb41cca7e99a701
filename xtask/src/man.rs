//! `cargo xtask man`: the manual pages of `tapline`'s nouns, written anew of the definitions of its commands.
//!
//! `tapline` writes them itself; a test of it says when those that are committed are stale.

use testbed::programs::cargo;

/// Where the pages are.
const PAGES: &str = "docs/man";

/// Runs the chore.
pub fn run() -> Result<(), String> {
    let mut tapline = cargo();
    tapline.args(["run", "--quiet", "--bin", "tapline", "--", "manual", PAGES]);
    let status = tapline.status().map_err(|error| format!("cannot run cargo: {error}"))?;
    if status.success() { Ok(()) } else { Err("tapline has not written its pages".into()) }
}
