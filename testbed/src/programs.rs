//! The source tree, and the programs that are built from it.
//!
//! Runs cargo; knows nothing about the programs.

use std::path::{Path, PathBuf};
use std::process::Command;

use control::in_full;

use crate::tool::{self, ToolError};

/// The directory of programs built by `make build`, in the source tree.
pub const BUILT: &str = "target/built";

/// The directory of the programs: the named one, or that of the tests' programs, which are built.
pub fn programs(named: Option<&Path>) -> Result<PathBuf, String> {
    match named {
        Some(directory) => Ok(directory.to_owned()),
        None => build_programs().map_err(|failure| in_full(&failure)),
    }
}

/// Builds the programs with the tests' profile, and returns their directory.
pub fn build_programs() -> Result<PathBuf, ToolError> {
    let mut command = cargo();
    command.args(["build", "--bin", "tapline", "--bin", "tapline-disk", "--bin", "taplined"]);
    tool::run(&mut command)?;
    // This program itself is in the target directory, as target/debug/xtask.
    let ours = std::env::current_exe()
        .map_err(|source| ToolError::Start { command: "the directory of xtask".to_owned(), source })?;
    let target = ours.ancestors().nth(2).unwrap_or(Path::new("target"));
    Ok(target.join("debug"))
}

/// The directory of optimized programs: the named one, or that of ours and of the benchmarks' clients, which are built.
pub fn released(named: Option<&Path>) -> Result<PathBuf, String> {
    if let Some(directory) = named {
        return Ok(directory.to_owned());
    }
    build_released(&["tapline-disk", "tapline", "taplined", "bench-client", "bench-guest"])
}

/// Builds these programs as `make build` does, and returns their directory.
pub fn build_released(programs: &[&str]) -> Result<PathBuf, String> {
    let (of_control, of_data): (Vec<&str>, Vec<&str>) =
        programs.iter().partition(|program| ["tapline", "taplined"].contains(program));
    let built = root().join(BUILT);
    let mut install = Command::new("install");
    install.arg("-D").arg("-t").arg(&built);
    for (profile, directory, programs) in [("release", "target/release", of_control), ("dist", "target/dist", of_data)]
    {
        if !programs.is_empty() {
            let mut build = cargo();
            build.args(["build", "--quiet", "--profile", profile]);
            build.args(programs.iter().flat_map(|program| ["--bin", program]));
            tool::run(&mut build).map_err(|error| in_full(&error))?;
        }
        install.args(programs.iter().map(|program| root().join(directory).join(program)));
    }
    tool::run(&mut install).map_err(|error| in_full(&error))?;
    Ok(built)
}

/// The top of the source tree, which contains all files of a run.
pub fn root() -> PathBuf {
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR"));
    manifest.parent().unwrap_or(manifest).to_owned()
}

/// The command `cargo` at the top of the source tree.
pub fn cargo() -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(root());
    command
}
