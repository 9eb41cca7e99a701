//! Tests of `tapline` without a daemon.

mod disk;
mod hand_over;
mod installed;
mod top;
mod upgrade_running;
mod xen;

use std::path::Path;
use std::process::Command;

/// Builds the program that serves disks next to `tapline`, because cargo builds only the programs of the crate under
/// test.
fn build_disk_program() {
    if !Path::new(env!("CARGO_BIN_EXE_tapline")).with_file_name("tapline-disk").exists() {
        let built = Command::new(env!("CARGO")).args(["build", "-q", "-p", "tapline-disk"]).status().unwrap();
        assert!(built.success(), "tapline-disk cannot be built");
    }
}
