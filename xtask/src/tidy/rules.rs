//! Rules for single files: the head, unsafe code, and unfinished code.

use std::path::Path;

use super::Finding;
use super::source::Source;
use super::tree::Tree;

/// Where `unsafe` is allowed: in the three packages that share memory with guests and with the kernel; in a clock that
/// reads the CPU's counter; and in the drivers of the independent client `blkio`, whose own interface is unsafe.
const UNSAFE_ALLOWED: &[&str] = &[
    "memory",
    "uring",
    "xen",
    "stats/src/clock.rs",
    "benches/client/src/load.rs",
    "benches/client/src/guest/device.rs",
    "transport/tests/all/vhost_blkio.rs",
    "tapline-disk/tests/all/tool/vhost.rs",
];

/// The attribute of a test that `make test` skips.
const SLOW: &str = "#[ignore = \"slow: run by `make test-all`\"]";

/// Macros for code that is missing or temporary.
const UNFINISHED: &[&str] = &["todo", "unimplemented", "dbg"];

/// All findings in one file.
pub fn check(source: &Source) -> Vec<Finding> {
    let mut findings = Vec::new();
    findings.extend(check_head(source));
    findings.extend(check_unsafe(source));
    findings.extend(check_unfinished(source));
    findings.extend(check_ignored(source));
    findings
}

/// Finds roots of crates outside of [`UNSAFE_ALLOWED`] that do not forbid unsafe code.
pub fn check_roots(tree: &Tree) -> Vec<Finding> {
    let roots = tree.sources.iter().filter(|source| {
        let is_root = source.path.ends_with("src/lib.rs") || source.path.ends_with("src/main.rs");
        is_root && !has_unsafe_below(&source.path)
    });
    roots
        .filter(|source| !source.code.contains("#![forbid(unsafe_code)]"))
        .map(|source| Finding::new(&source.path, 1, "the crate must say `#![forbid(unsafe_code)]`"))
        .collect()
}

/// Whether a file of the crate with this root may contain unsafe code.
fn has_unsafe_below(root: &Path) -> bool {
    let sources = root.parent().unwrap_or(root);
    may_be_unsafe(root) || UNSAFE_ALLOWED.iter().any(|allowed| Path::new(allowed).starts_with(sources))
}

fn may_be_unsafe(path: &Path) -> bool {
    UNSAFE_ALLOWED.iter().any(|package| path.starts_with(package))
}

fn check_head(source: &Source) -> Option<Finding> {
    let what = "the file must begin with `//!`: what it is, what it knows nothing about, the invariant it keeps";
    (!source.text.starts_with("//!")).then(|| Finding::new(&source.path, 1, what))
}

fn check_unsafe(source: &Source) -> Vec<Finding> {
    if may_be_unsafe(&source.path) {
        return Vec::new();
    }
    let what = "`unsafe` is allowed in memory and uring only (and where xtask/src/tidy/rules.rs says)";
    let found = source.words().filter(|&(_, word)| word == "unsafe");
    found.map(|(at, _)| Finding::new(&source.path, source.line_at(at), what)).collect()
}

fn check_unfinished(source: &Source) -> Vec<Finding> {
    let is_macro = |at: usize, word: &str| {
        let behind = source.code.get(at + word.len()..).unwrap_or_default();
        UNFINISHED.contains(&word) && behind.starts_with('!') && !behind.starts_with("!=")
    };
    let found = source.words().filter(|&(at, word)| is_macro(at, word));
    found
        .map(|(at, word)| {
            Finding::new(&source.path, source.line_at(at), format!("`{word}!` must not stay in the tree"))
        })
        .collect()
}

/// A test is run or deleted. A slow one is left to `make test-all`, with exactly this attribute.
fn check_ignored(source: &Source) -> Vec<Finding> {
    let lines = source.code.match_indices("#[ignore").map(|(at, _)| source.line_at(at));
    let unsaid = lines.filter(|line| source.text.lines().nth(line - 1).map(str::trim) != Some(SLOW));
    unsaid.map(|line| Finding::new(&source.path, line, format!("a test is ignored only as `{SLOW}`"))).collect()
}

#[cfg(test)]
mod test {
    use std::path::PathBuf;

    use super::*;

    fn findings(path: &str, text: &str) -> Vec<String> {
        check(&Source::new(PathBuf::from(path), text.to_owned())).iter().map(Finding::to_string).collect()
    }

    #[test]
    fn a_file_without_a_head_is_found() {
        assert_eq!(findings("disk/src/x.rs", "//! Head.\n").len(), 0);
        assert!(findings("disk/src/x.rs", "use x;\n")[0].starts_with("disk/src/x.rs:1: the file must begin"));
    }

    #[test]
    fn unsafe_is_found_outside_of_its_two_packages() {
        let text = "//! Head.\n\nfn f() { unsafe { g() } }\n";
        assert!(findings("disk/src/x.rs", text)[0].starts_with("disk/src/x.rs:3: `unsafe` is allowed in memory"));
        assert!(findings("transport/tests/all/vhost_blkio.rs", text).is_empty());
        assert!(findings("uring/src/x.rs", text).is_empty());
        assert!(findings("disk/src/x.rs", "//! Head.\n#![forbid(unsafe_code)] // unsafe\n").is_empty());
    }

    #[test]
    fn unfinished_and_ignored_code_is_found() {
        let text = "//! Head.\nfn f() { todo!() }\nfn g(dbg: bool) { if dbg != true { dbg!(1); } }\n#[ignore = \"slow\"]\nfn t() {}\n\
            #[ignore = \"slow: run by `make test-all`\"]\nfn u() {}\n";
        let found = findings("disk/tests/x.rs", text);
        assert_eq!(found.len(), 3, "{found:?}");
        assert!(found[0].starts_with("disk/tests/x.rs:2: `todo!`"));
        assert!(found[1].starts_with("disk/tests/x.rs:3: `dbg!`"));
        assert!(found[2].starts_with("disk/tests/x.rs:4: a test is ignored only as"));
    }

    #[test]
    fn a_crate_that_does_not_forbid_unsafe_is_found() {
        let source = |path: &str, text: &str| Source::new(PathBuf::from(path), text.to_owned());
        let sources = vec![
            source("disk/src/lib.rs", "//! A.\n#![forbid(unsafe_code)]\n"),
            source("sim/src/lib.rs", "//! B, which mentions #![forbid(unsafe_code)].\n"),
            source("uring/src/lib.rs", "//! C.\n"),
            source("benches/client/src/main.rs", "//! D, a file of which may be unsafe.\n"),
        ];
        let found = check_roots(&Tree { sources, ..Tree::default() });
        assert_eq!(found.len(), 1);
        assert_eq!(found[0].path, Path::new("sim/src/lib.rs"));
    }
}
