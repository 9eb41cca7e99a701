//! Programs that a test puts somewhere and runs.
//!
//! Another process (install(1)) writes them: a child that another test forks in this process at the same time would
//! inherit a file that is still open for writing, and the kernel then refuses to run it (ETXTBSY).

use std::path::{Path, PathBuf};
use std::process::Command;

/// Copies a program. A program of that name is replaced by a new file.
pub fn copy(from: &Path, to: &Path) {
    let copied = Command::new("install").args(["-m", "755", "--"]).args([from, to]).status();
    assert!(copied.unwrap().success(), "cannot copy {from:?} to {to:?}");
}

/// Writes a shell script, from the line after `#!/bin/sh`.
pub fn script(path: &Path, text: &str) {
    write(path, &format!("#!/bin/sh\n{text}\n"));
}

/// Writes a program with these bytes.
pub fn write(path: &Path, text: &str) {
    let mut draft = PathBuf::from(path).into_os_string();
    draft.push(".draft");
    std::fs::write(&draft, text).unwrap();
    copy(Path::new(&draft), path);
    std::fs::remove_file(draft).unwrap();
}
