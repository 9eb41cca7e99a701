//! `cargo xtask tidy`: checks the rules of the project that no compiler checks.
//!
//! It reads only the files of the working tree: no cargo, no git, no network. Every finding has a file and a line; any
//! finding is a failure. Lengths, widths of comments and words are checked by a ratchet ([`ratchet`]): current excesses
//! are recorded, and can only shrink.

mod arrows;
mod book;
mod circles;
mod ratchet;
mod rules;
mod source;
mod tree;
mod words;

use std::fmt;
use std::path::{Path, PathBuf};

use testbed::programs::root;

use ratchet::Ratchet;
use tree::Tree;

/// The file of the recorded excesses.
const RECORD: &str = "xtask/tidy-ratchet.toml";

/// A violation of a rule.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Finding {
    /// The file, from the root of the workspace.
    path: PathBuf,
    /// The line, counted from 1.
    line: usize,
    /// The violation, and how to fix it.
    what: String,
}

impl Finding {
    fn new(path: &Path, line: usize, what: impl Into<String>) -> Finding {
        Finding { path: path.to_owned(), line, what: what.into() }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: {}", self.path.display(), self.line, self.what)
    }
}

/// Check the rules of the project: dependency arrows, unsafe code, lengths, heads of files, links and words of pages
#[derive(Debug, clap::Args)]
pub struct Options {
    /// Lower recorded excesses to their present values; none is ever raised
    #[arg(long)]
    tighten: bool,
}

/// Runs the chore.
pub fn run(options: &Options) -> Result<(), String> {
    if options.tighten { tighten(&root()) } else { report(check(&root())?) }
}

fn report(findings: Vec<Finding>) -> Result<(), String> {
    for finding in &findings {
        println!("{finding}");
    }
    match findings.len() {
        0 => {
            println!("tidy: every rule is kept");
            Ok(())
        }
        1 => Err("1 finding".into()),
        count => Err(format!("{count} findings")),
    }
}

/// All findings in the workspace at `root`, by file and line.
fn check(root: &Path) -> Result<Vec<Finding>, String> {
    let tree = Tree::read(root)?;
    let record = Ratchet::read(&root.join(RECORD))?;
    let mut findings = arrows::check(&tree);
    findings.extend(circles::check(&tree));
    for source in &tree.sources {
        findings.extend(rules::check(source));
    }
    findings.extend(rules::check_roots(&tree));
    findings.extend(book::check(&tree));
    findings.extend(record.check(&tree, Path::new(RECORD)));
    findings.sort();
    Ok(findings)
}

fn tighten(root: &Path) -> Result<(), String> {
    let tree = Tree::read(root)?;
    let place = root.join(RECORD);
    let record = Ratchet::read(&place)?.tightened(&tree);
    std::fs::write(&place, record.to_string()).map_err(|error| format!("cannot write {}: {error}", place.display()))?;
    println!("tidy: {RECORD} holds {} exceptions", record.len());
    Ok(())
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn this_very_tree_can_be_read() {
        let tree = Tree::read(&root()).unwrap();
        assert!(tree.sources.iter().any(|source| source.path == Path::new("xtask/src/tidy.rs")));
        assert!(tree.manifests.iter().any(|manifest| manifest.name == "disk"));
    }

    #[test]
    fn a_finding_reads_as_file_line_and_reason() {
        let finding = Finding::new(Path::new("disk/src/lib.rs"), 7, "too long");
        assert_eq!(finding.to_string(), "disk/src/lib.rs:7: too long");
    }
}
