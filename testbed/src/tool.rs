//! Runs other programs to their end, or bound to this process.
//!
//! A failure contains the command line and the last output of the program.

use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};

use thiserror::Error;

/// An error: a program could not be started, or did not succeed.
#[derive(Debug, Error)]
pub enum ToolError {
    #[error("cannot start `{command}`; `make prepare` installs what is needed")]
    Start { command: String, source: io::Error },
    #[error("`{command}` failed ({status}): {said}")]
    Failed { command: String, status: ExitStatus, said: String },
}

/// Runs `command` to its end and returns what it printed.
pub fn output(command: &mut Command) -> Result<Vec<u8>, ToolError> {
    let output = command.output().map_err(|source| ToolError::Start { command: line_of(command), source })?;
    if output.status.success() {
        return Ok(output.stdout);
    }
    let mut said = last_lines(&String::from_utf8_lossy(&output.stderr), 5);
    if said.is_empty() {
        said = last_lines(&String::from_utf8_lossy(&output.stdout), 5);
    }
    Err(ToolError::Failed { command: line_of(command), status: output.status, said })
}

/// As [`output`], for programs that print text.
pub fn text(command: &mut Command) -> Result<String, ToolError> {
    output(command).map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
}

/// Runs `command` to its end, with inherited output.
pub fn run(command: &mut Command) -> Result<(), ToolError> {
    let status = command.status().map_err(|source| ToolError::Start { command: line_of(command), source })?;
    if status.success() {
        return Ok(());
    }
    Err(ToolError::Failed { command: line_of(command), status, said: "see above".to_owned() })
}

/// A command for `program` that the kernel kills when this process ends, so that no guest or disk outlives the demo.
pub fn bound_to_us(program: impl AsRef<Path>) -> Command {
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "KILL", "--"]).arg(program.as_ref());
    command
}

/// The path of an installed program. A user's PATH lacks the directories of mke2fs and fstrim.
pub fn locate(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let system = ["/usr/sbin", "/sbin"].map(PathBuf::from);
    std::env::split_paths(&path).chain(system).map(|directory| directory.join(program)).find(|file| file.is_file())
}

/// The command line as typed in a shell.
pub fn line_of(command: &Command) -> String {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    words.map(|word| word.to_string_lossy()).collect::<Vec<_>>().join(" ")
}

/// The last `count` non-empty lines of `text`.
pub fn last_lines(text: &str, count: usize) -> String {
    let lines: Vec<&str> = text.lines().filter(|line| !line.trim().is_empty()).collect();
    let skipped = lines.len().saturating_sub(count);
    lines.into_iter().skip(skipped).collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn a_failed_program_is_reported_with_its_last_output() {
        let error = text(Command::new("ls").arg("/does/not/exist")).unwrap_err();

        assert!(error.to_string().contains("ls /does/not/exist"), "{error}");
        assert!(error.to_string().contains("No such file"), "{error}");
    }

    #[test]
    fn a_missing_program_is_reported_by_name() {
        let error = text(&mut Command::new("no-such-program")).unwrap_err();

        assert!(matches!(error, ToolError::Start { .. }));
        assert!(error.to_string().contains("no-such-program"));
    }

    #[test]
    fn last_lines_skip_empty_lines() {
        assert_eq!(last_lines("a\n\nb\n \nc\n", 2), "b\nc");
    }
}
