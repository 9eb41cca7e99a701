//! Our own programs for dom0: static, so that it does not matter which libraries lie there.
//!
//! Knows cargo and nothing of Xen. They are built in a directory of their own below target, so other builds are not
//! disturbed.

use std::path::{Path, PathBuf};
use std::process::Command;

use super::BedError;
use crate::demo::{root, tool};

/// Named explicitly: flags then go to the programs and not to the compiler's plugins, which cannot be static.
const TARGET: &str = "x86_64-unknown-linux-gnu";

/// The released `tapline` and `tapline-disk`.
pub fn tapline() -> Result<Vec<PathBuf>, BedError> {
    built(&["build", "--release", "--bin", "tapline", "--bin", "tapline-disk"])
}

/// The released `taplined`.
pub fn daemon() -> Result<Vec<PathBuf>, BedError> {
    built(&["build", "--release", "--bin", "taplined"])
}

/// The tests of the crate `xen` that need Xen.
pub fn tests() -> Result<Vec<PathBuf>, BedError> {
    built(&["test", "--no-run", "-p", "xen", "--test", "kernel", "--test", "store"])
}

/// The front end of our own, which is a test of the crate `transport`.
pub fn front_end() -> Result<Vec<PathBuf>, BedError> {
    built(&["test", "--no-run", "-p", "transport", "--test", "xen_hostile"])
}

/// Runs cargo and returns the programs that it built or found built.
fn built(words: &[&str]) -> Result<Vec<PathBuf>, BedError> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(cargo);
    command.args(words).args(["--quiet", "--target", TARGET, "--message-format", "json-render-diagnostics"]);
    command.env("RUSTFLAGS", "-C target-feature=+crt-static").current_dir(root());
    let listing = tool::text(&mut command)?;
    Ok(executables_in(&listing))
}

/// The paths in cargo's messages about artifacts.
fn executables_in(listing: &str) -> Vec<PathBuf> {
    let messages = listing.lines().filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok());
    messages.filter_map(|message| message["executable"].as_str().map(PathBuf::from)).collect()
}

/// The plain name of a program: cargo gives tests one with a number.
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
