//! A script that replaces a program in tests. Knows nothing about what it does.

use std::path::Path;
use std::process::Command;

/// Writes a script that can be run at once. It is copied by another process: one that another test starts here
/// meanwhile would inherit the script still open for writing, and the kernel then refuses to run it (ETXTBSY).
pub fn write(path: &Path, text: &str) {
    let draft = path.with_extension("draft");
    std::fs::write(&draft, format!("#!/bin/sh\n{text}\n")).unwrap();
    let copied = Command::new("install").args(["-m", "755"]).arg(draft).arg(path).status();
    assert!(copied.unwrap().success());
}
