//! `tapline` without a daemon: what it passes on, and what it does itself.

mod disk;
mod hand_over;
mod installed;
mod top;
mod upgrade_running;
mod xen;

use std::path::Path;
use std::process::Command;

/// Has the program that serves disks beside `tapline`: cargo builds the programs of the crate under test only.
fn build_disk_program() {
    if !Path::new(env!("CARGO_BIN_EXE_tapline")).with_file_name("tapline-disk").exists() {
        let built = Command::new(env!("CARGO")).args(["build", "-q", "-p", "tapline-disk"]).status().unwrap();
        assert!(built.success(), "tapline-disk cannot be built");
    }
}
