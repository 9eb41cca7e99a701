//! Builds Tapline's programs for dom0, which has the same libraries as the distribution on which they are built, and
//! for guests, which have none.
//!
//! Uses cargo. In dom0 the programs of all other tests are tested. Programs for guests, and those that are measured,
//! are static.

use std::path::{Path, PathBuf};
use std::process::Command;

use super::BedError;
use crate::programs::cargo;
use crate::tool;

/// Named explicitly so that flags apply to the programs and not to the compiler's plugins, which cannot be static.
const TARGET: &str = "x86_64-unknown-linux-gnu";

/// Builds optimized `tapline` and `tapline-disk`, to be measured.
pub fn released() -> Result<Vec<PathBuf>, BedError> {
    built_static(&["build", "--profile", "dist", "--bin", "tapline", "--bin", "tapline-disk"])
}

/// Builds `tapline` and `tapline-disk`, to be tested.
pub fn tapline() -> Result<Vec<PathBuf>, BedError> {
    built(cargo().args(["build", "--bin", "tapline", "--bin", "tapline-disk"]))
}

/// Builds `taplined`, to be tested.
pub fn daemon() -> Result<Vec<PathBuf>, BedError> {
    built(cargo().args(["build", "--bin", "taplined"]))
}

/// Builds the tests of the crate `xen` that need Xen.
pub fn tests() -> Result<Vec<PathBuf>, BedError> {
    built_static(&["test", "--no-run", "-p", "xen", "--test", "kernel", "--test", "store"])
}

/// Builds the test front end, which is a test of the crate `transport`.
pub fn front_end() -> Result<Vec<PathBuf>, BedError> {
    built_static(&["test", "--no-run", "-p", "transport", "--test", "xen_hostile"])
}

/// Builds static programs with cargo, below a separate directory.
fn built_static(words: &[&str]) -> Result<Vec<PathBuf>, BedError> {
    built(cargo().args(words).args(["--target", TARGET]).env("RUSTFLAGS", "-C target-feature=+crt-static"))
}

/// Runs cargo and returns the programs that are up to date or were built.
fn built(command: &mut Command) -> Result<Vec<PathBuf>, BedError> {
    let listing = tool::text(command.args(["--quiet", "--message-format", "json-render-diagnostics"]))?;
    Ok(executables_in(&listing))
}

/// The paths of executables in cargo's messages.
fn executables_in(listing: &str) -> Vec<PathBuf> {
    let messages = listing.lines().filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok());
    messages.filter_map(|message| message["executable"].as_str().map(PathBuf::from)).collect()
}

/// The name of a program without the hash that cargo appends to tests.
pub fn name_of(program: &Path) -> String {
    let name = program.file_name().unwrap_or_default().to_string_lossy().into_owned();
    match name.rsplit_once('-') {
        Some((plain, number)) if number.len() == 16 && number.bytes().all(|byte| byte.is_ascii_hexdigit()) => {
            plain.to_owned()
        }
        _ => name,
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn executables_are_found_among_cargos_messages() {
        let listing = "{\"reason\":\"compiler-artifact\",\"executable\":null}\n\
            {\"reason\":\"compiler-artifact\",\"executable\":\"/t/deps/store-0123456789abcdef\"}\nnoise\n";

        assert_eq!(executables_in(listing), [Path::new("/t/deps/store-0123456789abcdef")]);
    }

    #[test]
    fn the_number_of_a_test_is_not_its_name() {
        assert_eq!(name_of(Path::new("/t/deps/store-0123456789abcdef")), "store");
        assert_eq!(name_of(Path::new("/t/release/tapline-disk")), "tapline-disk");
    }
}
