//! `cargo xtask man`: the manual pages of `tapline`'s nouns, written anew of the definitions of its commands.
//!
//! `tapline` writes them itself; a test of it says when those that are committed are stale.

use std::path::Path;
use std::process::Command;

/// Where the pages are.
const PAGES: &str = "docs/man";

/// Runs the chore.
pub fn run(arguments: &[String]) -> Result<(), String> {
    if !arguments.is_empty() {
        return Err("usage: cargo xtask man".into());
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().ok_or("xtask has no parent directory")?;
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut tapline = Command::new(cargo);
    tapline.args(["run", "--quiet", "--bin", "tapline", "--", "manual", PAGES]).current_dir(root);
    let status = tapline.status().map_err(|error| format!("cannot run cargo: {error}"))?;
    if status.success() { Ok(()) } else { Err("tapline has not written its pages".into()) }
}
